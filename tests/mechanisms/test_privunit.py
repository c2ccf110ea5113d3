"""PrivUnit, attacked: the theorems in exact arithmetic, the sampler against its density, the promise by sampling.

A statistical test fails by chance with probability below 1e-6; those with a seed always give one answer.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from scipy import stats
from scipy.optimize import minimize_scalar
from scipy.special import ndtr
from sklearn.base import BaseEstimator, clone
from sklearn.decomposition import PCA
from sklearn.frozen import FrozenEstimator
from sklearn.preprocessing import FunctionTransformer

from nearveil.mechanisms import Message, Release
from nearveil.mechanisms._privunit import (
    BLUR_STEPS,
    CELL,
    FINE_BITS,
    LARGEST_CELL,
    LARGEST_DIMENSION,
    REACH,
    STEPS,
    PrivUnit,
    bound_arithmetic_cost,
    calibrate,
    compute_directions,
    draw_cells,
    make_lattice_table,
    place_along_axes,
    round_to_cells,
)
from nearveil.mechanisms.projection import fit_projection
from nearveil.privacy import compose
from nearveil.privacy.events import PureDp
from nearveil.privacy.noise import make_alias_table, secure_source, unsafe_seeded
from nearveil.privatemail.manifold import SupervisedManifold
from tests.mechanisms.conformance import Contract, sample_messages, shown_epsilon
from tests.privacy.test_noise import table_pmf

Floats = NDArray[np.float64]
CHANCE = 1e-6
BLUR = BLUR_STEPS / STEPS
PUBLISHED = {1.0: 0.397, 2.0: 0.786, 4.0: 1.516, 8.0: 2.743}


@pytest.fixture(autouse=True)
def digits() -> Iterator[None]:
    with mpmath.workdps(120):
        yield


def fitted(epsilon: float, dimension: int, **options: Any) -> PrivUnit:
    return PrivUnit(epsilon, **options).fit(np.random.default_rng(5).standard_normal((60, dimension)))


# --- the promise, by sampling ---


class TestThreeDimensions(Contract):
    power = 0.8

    def make(self, epsilon: float) -> PrivUnit:
        return PrivUnit(epsilon)

    def statistic(self, release: Release, messages: list[Message], x: Floats, other: Floats) -> Floats:
        assert isinstance(release, PrivUnit)
        vectors = np.array([message["vector"] for message in messages]) * CELL
        heights = vectors @ release.projection_(release.features(np.stack([x, other]))).T
        inside = heights >= release.channel_.cap_start
        return inside[:, 0].astype(np.float64) - inside[:, 1]


class TestTwoDimensions(TestThreeDimensions):
    dimension = 2


class TestProjected(TestThreeDimensions):
    samples = 10_000
    power = 0.6

    def make(self, epsilon: float) -> PrivUnit:
        return PrivUnit(epsilon, projection="pca", n_components=2)


class TestManifold(TestProjected):
    samples = 2_000
    power = 0.0  # where the map leaves the pairs is its own matter

    def make(self, epsilon: float) -> PrivUnit:
        return PrivUnit(epsilon, projection="manifold", n_components=2)


@pytest.mark.parametrize("epsilon", [1.0, 2.0])
def test_a_cap_ten_percent_too_likely_is_found(epsilon: float) -> None:
    suite = TestThreeDimensions()
    release = suite.make(epsilon).fit(*suite.public())
    more, p = 1.1 * release.channel_.p, release.channel_.p
    x, other = suite.pairs(release)[0]

    def shown() -> float:
        drawn = [
            suite.statistic(release, sample_messages(release, row, 40_000, seed), x, other)
            for seed, row in enumerate((x, other))
        ]
        return shown_epsilon(drawn[0], drawn[1], release.guarantee.delta)

    assert 0.8 * epsilon < shown() <= epsilon
    tilt = release.channel_.tilt + math.log(more / (1 - more)) - math.log(p / (1 - p))
    release.__dict__["channel_"] = replace(release.channel_, tilt=tilt)
    assert shown() > epsilon


# --- Theorem 1: the lattice does not show through the blur ---


def lattice_density(at: Floats, x: Floats, step: float, blur: float, weight: Any) -> Floats:
    """The density of a x + (h - <h, x> x) + z by a plain sum over the lattice of (a, h), relative to a Gaussian."""
    d = len(x)
    line = step * np.arange(-math.ceil(9 / step), math.ceil(9 / step) + 1)
    points = np.array(list(itertools.product(line, repeat=d + 1)))
    chances = np.exp(-(points**2).sum(axis=1) / 2) * weight(points[:, 0])
    chances *= (step / math.sqrt(2 * math.pi)) ** (d + 1)
    places = points[:, :1] * x + points[:, 1:] - np.outer(points[:, 1:] @ x, x)
    distances = ((at[:, None] - places) ** 2).sum(axis=2)
    density = (chances * np.exp(-distances / (2 * blur**2))).sum(axis=1) / blur**d
    return np.asarray(density / np.exp(-(at**2).sum(axis=1) / (2 * (1 + blur**2))) * (1 + blur**2) ** (d / 2))


def unevenness(d: int, step: Any, blur: Any) -> Any:
    """The r of Theorem 1."""
    s = blur**2 / (1 + blur**2) / step**2
    theta = 1 + 2 * sum(mpmath.exp(-2 * mpmath.pi**2 * s * j**2) for j in (1, 2, 3))
    return theta ** (d + 1) - 1


@pytest.mark.parametrize("x", [[1.0], [1.0, 0.0], [0.6, 0.8], [5 / 13, -12 / 13]])
@pytest.mark.parametrize(("step", "blur"), [(0.9, 0.6), (0.7, 0.7)])
def test_a_blurred_lattice_is_a_gaussian(x: list[float], step: float, blur: float) -> None:
    bound = float(unevenness(len(x), step, blur))
    at = np.random.default_rng(0).uniform(-3, 3, (200, len(x)))
    off = np.abs(lattice_density(at, np.array(x), step, blur, np.ones_like) - 1).max()
    assert off <= bound * (1 + 1e-9)
    if x[0] == 1.0:  # along an axis of the lattice the bound is nearly attained
        assert off > 0.5 * bound * len(x) / (len(x) + 1)


@pytest.mark.parametrize("tilt", [0.5, 3.0])
def test_likelihood_ratios_of_a_tilted_lattice(tilt: float) -> None:
    step, blur = 0.6, 0.5
    r = float(unevenness(2, step, blur))
    at = np.random.default_rng(1).uniform(-3, 3, (300, 2))
    densities = np.array(
        [
            lattice_density(at, np.array(x), step, blur, lambda a: np.where(a >= step, math.exp(tilt), 1.0))
            for x in ([1.0, 0.0], [-1.0, 0.0], [0.6, 0.8], [-0.8, -0.6])
        ]
    )
    largest = np.log(densities.max(axis=0) / densities.min(axis=0)).max()
    assert 0.99 * tilt < largest <= tilt + math.log((1 + r) / (1 - r))


def test_the_lattice_in_use_is_even_to_2_to_the_minus_250() -> None:
    step, blur = mpmath.mpf(1) / STEPS, mpmath.mpf(BLUR_STEPS) / STEPS
    assert unevenness(LARGEST_DIMENSION, step, blur) < mpmath.mpf(2) ** -230
    bound = unevenness(1, step, blur)
    assert bound < mpmath.mpf(2) ** -250
    worst = mpmath.mpf(0)
    for quarter in range(4):
        at = (100 + mpmath.mpf(quarter) / 4) * step * (1 + blur**2)  # its posterior mean: on a point, and between
        near = range(100 - 90, 100 + 90)
        total = sum(mpmath.exp(-((k * step) ** 2) / 2 - (at - k * step) ** 2 / (2 * blur**2)) for k in near)
        total *= step / mpmath.sqrt(2 * mpmath.pi) / blur * mpmath.sqrt(1 + blur**2)
        worst = max(worst, abs(total / mpmath.exp(-(at**2) / (2 * (1 + blur**2))) - 1))
    assert bound / 3 < worst <= bound


# --- Lemma 2: the tables ---


@pytest.mark.parametrize("epsilon", [1e-3, 2.0, 64.0])
def test_tables_are_what_the_proof_says(epsilon: float) -> None:
    channel = calibrate(epsilon, 1280)
    for tilt, threshold in ((channel.tilt, channel.threshold), (0.0, 0)):
        table = table_pmf(make_lattice_table(tilt, threshold))
        assert sum(table) == 1 << 255
        far = REACH + 4 * STEPS  # heights that the table leaves out count as well
        weights = {k: mpmath.exp(-(mpmath.mpf(k) ** 2) / (2 * STEPS**2)) for k in range(far + 1)}
        odds = mpmath.floor(mpmath.exp(mpmath.mpf(tilt)) * 2**128) / 2**128
        ideal = {k: weights[abs(k)] * (odds if k >= threshold else 1) for k in range(-far, far + 1)}
        total = sum(ideal.values())
        found = {k - REACH: mpmath.mpf(share) / 2**255 for k, share in enumerate(table)}
        distance = sum(abs(found.get(k, 0) - chance / total) for k, chance in ideal.items()) / 2
        assert distance < mpmath.mpf(2) ** -240


@pytest.mark.parametrize("epsilon", [1e-3, 1.0, 8.0, 64.0])
def test_exact_likelihood_ratios_reach_epsilon_and_never_pass_it(epsilon: float) -> None:
    """In one dimension: x = 1 against x = -1, from the integers of the table, blur included."""
    channel = calibrate(epsilon, 1)
    chances = table_pmf(make_lattice_table(channel.tilt, channel.threshold))
    step, blur = mpmath.mpf(1) / STEPS, mpmath.mpf(BLUR_STEPS) / STEPS

    def density(at: int) -> Any:
        near = range(max(0, at + REACH - 75), min(2 * REACH, at + REACH + 75) + 1)
        return sum(chances[k] * mpmath.exp(-(((at + REACH - k) * step) ** 2) / (2 * blur**2)) for k in near)

    start = channel.threshold
    places = [0, 1, start // 2, start - 9, start, start + 1, start + 9, start + 60, start + 300, start + 600]
    ratios = [mpmath.log(density(at) / density(-at)) for at in places]
    cost = bound_arithmetic_cost(1)
    assert max(abs(ratio) for ratio in ratios) + cost <= epsilon
    assert max(ratios) + cost >= epsilon * (1 - 1e-12)


# --- Theorems 3 to 5: the one step in floating point, and the whole ---


def exact_distance(height: int, plain: NDArray[np.int64], axis: Floats, found: NDArray[np.int64]) -> Any:
    """How far `found` lies from the true vector, in grid steps."""
    whole = [int(part) for part in axis]
    square, product = sum(part**2 for part in whole), sum(p * int(k) for p, k in zip(whole, plain, strict=True))
    along = mpmath.mpf(height) / mpmath.sqrt(square) - mpmath.mpf(product) / square
    true = [(mpmath.mpf(int(k)) + along * part) * 2**FINE_BITS for k, part in zip(plain, whole, strict=True)]
    return mpmath.sqrt(sum((int(f) - t) ** 2 for f, t in zip(found, true, strict=True)))


@settings(deadline=None, max_examples=60)
@given(
    hnp.arrays(np.float64, st.integers(1, 30), elements=st.floats(-1, 1)),
    st.integers(-REACH, REACH),
    st.integers(0, 2**32 - 1),
    st.booleans(),
)
def test_computed_vectors_lie_within_the_bound(row: Floats, height: int, seed: int, extreme: bool) -> None:
    generator = np.random.default_rng(seed)
    plain = np.rint(STEPS * generator.standard_normal(len(row))).astype(np.int64)
    if extreme:
        plain = REACH * np.where(row < 0, -1, 1)
    axis = compute_directions(row[None])
    found = place_along_axes(np.array([height]), plain[None], axis)[0]
    assert exact_distance(height, plain, axis[0], found) <= 0.51 * math.sqrt(len(row))


def test_the_bound_on_computed_vectors_is_not_idle() -> None:
    generator = np.random.default_rng(3)
    rows = np.vstack([generator.standard_normal((3, 4096)), np.ones((1, 4096))])
    plain = np.rint(STEPS * generator.standard_normal(rows.shape)).astype(np.int64)
    plain[3] = REACH
    heights = np.array([0, 50, -REACH, REACH])
    axes = compute_directions(rows)
    found = place_along_axes(heights, plain, axes)
    shares = [float(exact_distance(*case) / 64) for case in zip(heights.tolist(), plain, axes, found, strict=True)]
    assert 0.26 < max(shares) <= 0.51  # half the bound would be too little


def test_what_the_arithmetic_and_the_tables_cost() -> None:
    tail = mpmath.ncdf(-17)
    blur = mpmath.sqrt(mpmath.mpf(BLUR_STEPS << FINE_BITS) ** 2 - 7)  # of the continuous noise behind z
    for dimension in (1, 3, 1280, 4096, LARGEST_DIMENSION):
        # The distance proved, 0.5014 sqrt(d), and the lattice's unevenness fit into what is charged.
        shift = mpmath.mpf("0.5014") * mpmath.sqrt(dimension) / blur
        r = unevenness(dimension, mpmath.mpf(1) / STEPS, blur / (1 << FINE_BITS) / STEPS)
        needed = 2 * (17 * shift + shift**2 / 2) + mpmath.log((1 + r) / (1 - r))
        assert needed < bound_arithmetic_cost(dimension) < 1.02 * needed
        tables = dimension * mpmath.mpf(2) ** -197 + (dimension + 1) * mpmath.mpf(2) ** -240
        assert (1 + mpmath.exp(64)) * (tables + tail) < calibrate(64.0, dimension).extra_delta
        assert calibrate(1e-3, dimension).tilt > 0.98e-3


# --- the signal ---


@pytest.mark.parametrize("epsilon", [1e-3, 1e-2, 0.1, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0])
def test_signal_by_formula(epsilon: float) -> None:
    best = minimize_scalar(
        lambda t: -stats.norm.pdf(t) / (1 / math.expm1(epsilon) + stats.norm.sf(t)), bounds=(0, 12), method="bounded"
    )
    channel = calibrate(epsilon, 1280)
    assert channel.signal == pytest.approx(-best.fun, rel=2e-3)
    assert channel.cap_share == pytest.approx(stats.norm.sf(channel.cap_start), rel=1e-3)
    odds = channel.p / (1 - channel.p) * (1 - channel.cap_share) / channel.cap_share
    assert math.log(odds) == pytest.approx(channel.tilt, rel=1e-9)
    if epsilon in PUBLISHED:
        assert channel.signal == pytest.approx(PUBLISHED[epsilon], rel=0.01)


@pytest.mark.parametrize(("epsilon", "rows"), [(1.0, 700_000), (2.0, 200_000), (4.0, 100_000), (8.0, 50_000)])
def test_signal_by_sampling(epsilon: float, rows: int) -> None:
    x = np.array([0.6, -0.8])
    vectors = CELL * draw_cells(calibrate(epsilon, 2), np.tile(x, (rows, 1)), unsafe_seeded(1)).astype(np.float64)
    signal = (vectors @ x).mean() / (vectors @ [0.8, 0.6]).std()
    assert signal == pytest.approx(PUBLISHED[epsilon], rel=0.01)


# --- the sampler against its density ---


@pytest.mark.parametrize("epsilon", [1e-3, 1.0, 8.0, 64.0])
def test_cells_have_their_probabilities(epsilon: float) -> None:
    """Along an axis the law of a cell is known exactly: the table, blurred; across, a Gaussian."""
    channel, n = calibrate(epsilon, 2), 100_000
    drawn = draw_cells(channel, np.tile([0.0, -1.0], (n, 1)), unsafe_seeded(2))
    heights = (np.arange(2 * REACH + 1) - REACH) / STEPS
    table = np.array(
        [float(mpmath.mpf(share) / 2**255) for share in table_pmf(make_lattice_table(0.0, 0))[: 2 * REACH + 1]]
    )
    tilted = table * np.where(heights >= channel.threshold / STEPS, 1.0, math.exp(-channel.tilt))
    cells = np.arange(-LARGEST_CELL, LARGEST_CELL + 1)
    edges = np.concatenate([[-np.inf], CELL * (cells[1:] - 0.5), [np.inf]])
    along = np.diff(ndtr((edges[:, None] - heights) / BLUR), axis=0) @ (tilted / tilted.sum())
    across = np.diff(ndtr(edges / math.sqrt(1 + BLUR**2)))
    for column, law in ((-drawn[:, 1], along), (drawn[:, 0], across)):
        seen = np.bincount(column.astype(np.int64) + LARGEST_CELL, minlength=len(cells))
        often = law * n >= 10
        counts, expected = np.append(seen[often], seen[~often].sum()), np.append(law[often], law[~often].sum()) * n
        assert stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue > CHANCE


@pytest.mark.parametrize("dimension", [2, 5, 40])
@pytest.mark.parametrize("epsilon", [2.0, 6.0])
def test_heights_and_noise_in_a_direction_of_no_axis(dimension: int, epsilon: float) -> None:
    generator = np.random.default_rng(dimension)
    x = generator.standard_normal(dimension)
    x /= np.linalg.norm(x)
    channel, n = calibrate(epsilon, dimension), 20_000
    vectors = CELL * draw_cells(channel, np.tile(x, (n, 1)), unsafe_seeded(3)).astype(np.float64)
    spread = math.sqrt(BLUR**2 + CELL**2 / 12)
    heights = (np.arange(2 * REACH + 1) - REACH) / STEPS
    law = np.exp(-(heights**2) / 2) * np.where(heights >= channel.threshold / STEPS, 1.0, math.exp(-channel.tilt))

    grid = np.linspace(-9, 9, 1801)
    below = ndtr((grid[:, None] - heights) / spread) @ (law / law.sum())
    assert stats.kstest(vectors @ x, lambda y: np.interp(y, grid, below)).pvalue > CHANCE
    across = generator.standard_normal(dimension)
    across -= (across @ x) * x
    across /= np.linalg.norm(across)
    assert stats.kstest(vectors @ across, stats.norm(scale=math.sqrt(1 + spread**2)).cdf).pvalue > CHANCE
    assert abs(np.corrcoef(vectors @ x, vectors @ across)[0, 1]) < 5 / math.sqrt(n)


@pytest.mark.parametrize("dimension", [1, 4096])
def test_extreme_dimensions(dimension: int) -> None:
    release = fitted(2.0, dimension)
    n = 40_000 if dimension == 1 else 200
    row = np.random.default_rng(8).standard_normal(dimension)
    messages = sample_messages(release, row, n, 4)
    vectors = CELL * np.array([message["vector"] for message in messages], dtype=np.float64)
    x = release.features(row[None])[0]
    assert (vectors @ x).mean() == pytest.approx(0.786, abs=5 * 1.2 / math.sqrt(n))
    if dimension > 1:
        noise = vectors - np.outer(vectors @ x, x)
        assert (noise**2).sum() / (n * (dimension - 1)) == pytest.approx(1 + BLUR**2 + CELL**2 / 12, rel=0.01)
        assert release.rank(messages[0], row[None]) == pytest.approx(vectors[:1] @ x)
    assert messages[0].nbytes < dimension + 200


@pytest.mark.parametrize("epsilon", [1e-3, 64.0])
def test_extreme_epsilons(epsilon: float) -> None:
    release = fitted(epsilon, 8)
    x = release.mean_ + np.eye(8)[0]
    vectors = np.array([m["vector"] for m in sample_messages(release, x, 20_000, 5)]) * CELL
    assert vectors[:, 0].mean() == pytest.approx(release.channel_.signal, abs=0.04)
    assert release.guarantee.epsilon == epsilon


@pytest.mark.parametrize("epsilon", [5e-4, 65.0, 1e300, True, [1.0]])
def test_epsilons_without_a_proof(epsilon: Any) -> None:
    with pytest.raises(ValueError, match=r"epsilon must be from 0\.001 to 64"):
        fitted(epsilon, 3)


def test_dimensions_without_a_proof() -> None:
    with pytest.raises(ValueError, match="columns after the projection"):
        calibrate(1.0, LARGEST_DIMENSION + 1)


# --- norms, words, coins ---


@settings(deadline=None, max_examples=40)
@given(
    hnp.arrays(np.float64, 6, elements=st.floats(-1, 1).filter(lambda v: v == 0 or abs(v) > 1e-3)),
    st.sampled_from([2.0**-1000, 2.0**-500, 0.5, 4.0, 2.0**1000]),
    st.integers(0, 2**32 - 1),
)
def test_norms_other_than_one_do_not_reach_the_sampler(row: Floats, factor: float, seed: int) -> None:
    channel = calibrate(2.0, 6)
    given, scaled = (draw_cells(channel, rows[None], unsafe_seeded(seed)) for rows in (row, factor * row))
    assert np.array_equal(given, scaled)
    axis = compute_directions(factor * row[None])[0]
    assert abs(np.linalg.norm(axis) * 2.0**-26 - 1) < 1e-7
    assert np.array_equal(axis, np.rint(axis))


class Counting:
    sound = True

    def __init__(self) -> None:
        self.asked: list[int] = []

    def words(self, count: int) -> NDArray[np.uint64]:
        self.asked.append(count)
        return secure_source().words(count)


def test_every_row_takes_the_same_words_whether_in_the_cap_or_not() -> None:
    release = fitted(1.0, 3)
    asked = set()
    for row in np.random.default_rng(0).standard_normal((50, 3)):
        source = Counting()
        release.release(row, rng=source)
        asked.add(tuple(source.asked))
    assert len(asked) == 1  # but for ties, of probability 2^-40 in this test


@pytest.mark.parametrize("x", [[1.0, 0.0, 0.0], [0.6, 0.0, -0.8], [0.1, 0.7, 0.2]])
def test_low_bits_tell_nothing_even_before_they_are_cut(x: list[float]) -> None:
    found = calibrate(8.0, 3).draw(np.tile(x, (20_000, 1)), unsafe_seeded(11))
    for bits in (FINE_BITS - 20, FINE_BITS, FINE_BITS + 1):
        for column in (found & ((1 << bits) - 1)).T:
            assert stats.kstest(column / 2.0**bits, "uniform").pvalue > CHANCE


def test_blur_has_its_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = make_alias_table([0] * REACH + [1] + [0] * REACH)  # heights and h are always zero
    monkeypatch.setattr("nearveil.mechanisms._privunit.make_lattice_table", lambda *_: nothing)
    found = calibrate(1.0, 2).draw(np.tile([0.6, 0.8], (50_000, 1)), unsafe_seeded(12))
    for column in found.T / 2.0**FINE_BITS:
        assert stats.kstest(column, stats.norm(scale=BLUR_STEPS).cdf).pvalue > CHANCE


def test_messages_are_bytes_of_cells() -> None:
    message = fitted(64.0, 5).release(np.ones(5))
    assert set(message.arrays) == {"vector"}
    assert message["vector"].dtype == np.int8
    half = 1 << 32
    places = np.array([[0, half - 1, half, -half, -half - 1, 126 * 2 * half + half, 1 << 50, -(1 << 50)]])
    assert round_to_cells(places).tolist() == [[0, 0, 1, 0, -1, 127, 127, -127]]


# --- guarantee, ranking, densities ---


def test_guarantee() -> None:
    promise = fitted(2.0, 7).guarantee
    assert (promise.epsilon, promise.delta) == (2.0, 7 * 2.0**-100)
    assert promise.events == (PureDp(2.0),)
    assert (promise.unit, promise.relation, promise.protects) == ("record", "replace", "query")
    assert promise.basis.link == "docs/theory/privunit.md"
    assert compose([promise] * 3, delta=1e-6).epsilon == pytest.approx(6.0, rel=1e-3)


def test_ranking_finds_the_row_at_large_epsilon() -> None:
    generator = np.random.default_rng(0)
    public, gallery = generator.standard_normal((50, 20)), generator.standard_normal((400, 20))
    release = PrivUnit(64.0).fit(public)
    before = []
    for place, message in enumerate(release.release(gallery[:40], rng=unsafe_seeded(0))):
        scores = release.rank(message, gallery)
        before.append((scores > scores[place]).sum())
        assert scores == pytest.approx(release.features(gallery) @ (message["vector"] / 8))
    assert np.mean(np.array(before) == 0) > 0.9


def test_densities() -> None:
    release = fitted(2.0, 1)
    cells = np.arange(-LARGEST_CELL, LARGEST_CELL + 1, dtype=np.int8)
    messages = [Message("privunit", release.public_id, {"vector": cells[i : i + 1]}) for i in range(len(cells))]
    density = np.exp(release.log_density(messages, release.mean_ + np.array([[1.0], [-1.0]]))) * CELL
    assert density.sum(axis=0) == pytest.approx([1, 1], abs=5e-3)
    assert density[:, 0] == pytest.approx(density[::-1, 1], rel=1e-12)
    n = 100_000
    drawn = sample_messages(release, release.mean_ + 1, n, 6)
    seen = np.bincount([int(m["vector"][0]) + LARGEST_CELL for m in drawn], minlength=len(cells)) / n
    assert np.abs(seen - density[:, 0]).sum() < 0.04  # the cell that the cap's edge crosses is off a little
    assert release.log_density(drawn[0], [[5.0]]).shape == (1, 1)


@pytest.mark.parametrize("epsilon", [1.0, 5.0])
def test_densities_weigh_messages_rightly(epsilon: float) -> None:
    """The likelihood ratio of two rows has mean one where the denominator is true, and stays within epsilon."""
    release = fitted(epsilon, 6)
    rows = np.random.default_rng(9).standard_normal((5, 6))
    messages = sample_messages(release, rows[0], 20_000, 7)
    density = release.log_density(messages, rows)
    ratios = np.exp(density[:, 1:] - density[:, :1])
    errors = ratios.std(axis=0) / math.sqrt(len(ratios))
    assert (np.abs(ratios.mean(axis=0) - 1) < 5 * errors + 0.002).all()
    assert np.ptp(density, axis=1).max() <= epsilon
    assert np.ptp(density, axis=1).max() > 0.9 * epsilon


# --- projections ---


@pytest.mark.parametrize("kind", ["pca", "random", "manifold"])
def test_learned_projections(kind: str) -> None:
    generator = np.random.default_rng(1)
    rows, labels = generator.standard_normal((80, 10)) * np.arange(10, 0, -1), generator.integers(0, 3, 80)
    release = PrivUnit(2.0, projection=kind, n_components=4).fit(rows, labels)
    features = release.features(rows)
    found = release.projection_(features)
    matrix = release.projection_.matrix
    if matrix is None:
        assert kind == "manifold"
        expected = SupervisedManifold(4, random_state=0).fit(features, labels).transform(features)
    else:
        assert matrix.T @ matrix == pytest.approx(np.eye(4), abs=1e-12)
        expected = features @ matrix
    assert found == pytest.approx(expected / np.linalg.norm(expected, axis=1, keepdims=True), abs=1e-9)
    if kind == "pca" and matrix is not None:
        assert np.abs(matrix) == pytest.approx(np.abs(PCA(4).fit(features).components_.T), abs=1e-8)
    message = release.release(rows[0])
    assert message["vector"].shape == (4,)
    assert release.rank(message, rows) == pytest.approx(found @ (message["vector"] / 8))


def test_random_projections_come_from_their_seed_alone() -> None:
    features = np.eye(6)
    first, again, other = (fit_projection("random", features, None, n_components=3, seed=s) for s in (1, 1, 2))
    assert np.array_equal(first.matrix, again.matrix)  # type: ignore[arg-type]
    assert not np.allclose(first.matrix, other.matrix)  # type: ignore[arg-type]
    assert first.public_id == again.public_id != other.public_id
    square = fit_projection("random", features, None)
    assert square.n_components == 6
    assert fit_projection("random", np.eye(70), None).n_components == 64


def test_given_projections() -> None:
    rows = np.random.default_rng(2).standard_normal((50, 5))
    matrix = np.random.default_rng(3).standard_normal((5, 2))
    pca = PCA(2).fit(rows)
    by_matrix, by_pca = PrivUnit(1.0, projection=matrix).fit(rows), PrivUnit(1.0, projection=pca).fit(rows)
    by_frozen = clone(PrivUnit(1.0, projection=FrozenEstimator(pca))).fit(rows)
    features = by_matrix.features(rows)
    for release, mapped in ((by_matrix, features @ matrix), (by_pca, pca.transform(features))):
        expected = mapped / np.linalg.norm(mapped, axis=1, keepdims=True)
        assert release.projection_(features) == pytest.approx(expected, abs=1e-12)
    assert np.array_equal(by_frozen.projection_(features), by_pca.projection_(features))
    assert by_pca.public_id == PrivUnit(1.0, projection=PCA(2).fit(rows)).fit(rows).public_id
    ids = {by_matrix.public_id, by_pca.public_id, PrivUnit(1.0, projection=2 * matrix).fit(rows).public_id}
    ids |= {PrivUnit(1.0, projection=PCA(2).fit(rows[:40])).fit(rows).public_id, PrivUnit(1.0).fit(rows).public_id}
    ids |= {PrivUnit(2.0, projection=matrix).fit(rows).public_id}
    assert len(ids) == 6


def test_rows_that_project_to_nothing_take_the_first_axis() -> None:
    matrix = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    release = PrivUnit(64.0, projection=matrix).fit(np.vstack([np.eye(3), -np.eye(3)]))
    assert release.projection_(np.array([[1.0, 0, 0], [0, 0, 2.0]])).tolist() == [[1, 0], [0, 1]]
    vectors = np.array([m["vector"] for m in release.release(np.tile([1.0, 0, 0], (500, 1)))]) / 8
    assert vectors[:, 0].mean() == pytest.approx(10.57, abs=0.3)
    assert compute_directions(np.zeros((1, 3))).tolist() == [[2**26, 0, 0]]


class Wild(BaseEstimator):  # type: ignore[misc]
    """Sends rows of a positive first feature nowhere, and others far away."""

    def fit(self, X: Floats) -> "Wild":
        self.n_features_in_ = X.shape[1]
        return self

    def transform(self, X: Floats) -> Floats:
        return np.where(X[:, :1] > 0, np.nan, X[:, :2] * 1e200)


def test_maps_to_no_finite_place_take_the_first_axis_too() -> None:
    projection = fit_projection(Wild().fit(np.eye(3)), np.eye(3), None)
    found = projection(np.array([[1.0, 1, 1], [-0.6, 0.8, 0], [0, 0, 0]]))
    assert found == pytest.approx(np.array([[1, 0], [-0.6, 0.8], [1, 0]]))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"projection": "umap"}, "projection must be None"),
        ({"projection": np.ones((4, 2))}, "projection must have 3 rows"),
        ({"projection": [[np.nan], [1.0], [1.0]]}, "projection must be finite"),
        ({"projection": np.ones(3)}, "projection must have rows and columns"),
        ({"projection": PCA(2)}, "projection must be a scikit-learn transformer that is fitted"),
        ({"projection": object()}, "projection must be an array of real numbers"),
        ({"projection": type("Odd", (), {"transform": len})()}, "projection must be a scikit-learn transformer"),
        ({"projection": FunctionTransformer(np.ravel)}, "projection must map rows to rows"),
        ({"n_components": 2}, "n_components must be None"),
        ({"projection": "pca", "n_components": 4}, "n_components must be an integer from 1 to 3"),
        ({"projection": "pca", "n_components": 0}, "n_components must be an integer from 1 to 3"),
        ({"projection": "random", "n_components": 1.5}, "n_components must be an integer from 1 to 3"),
        ({"projection": "random", "n_components": True}, "n_components must be an integer from 1 to 3"),
        ({"projection": "manifold", "n_components": 61}, "n_components must be an integer from 1 to 60"),
        ({"projection": "random", "projection_seed": -1}, "projection_seed must be"),
        ({"projection": "random", "projection_seed": "7"}, "projection_seed must be"),
    ],
)
def test_bad_projections(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        fitted(1.0, 3, **options)


@pytest.mark.parametrize("projection", ["pca", PCA(1).fit(np.eye(3))])
def test_public_rows_that_are_all_alike_teach_no_projection(projection: Any) -> None:
    with pytest.raises(ValueError, match="public_X must contain a row that differs"):
        PrivUnit(1.0, projection=projection).fit(np.ones((4, 3)))
