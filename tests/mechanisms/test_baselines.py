"""The baselines that add noise to a vector: the analytic Gaussian, random projection, von Mises-Fisher."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.special import ive, logsumexp

from nearveil.mechanisms import Message, PrivUnit, Release
from nearveil.mechanisms._gaussian import AnalyticGaussian, bound_computed_norm
from nearveil.privacy.noise import analytic_gaussian_scale, compute_gaussian_delta, unsafe_seeded
from studies.baselines.fisher import (
    BLUR,
    FINE_BITS,
    PIECES,
    VonMisesFisher,
    _bound_bending,
    bound_arithmetic_cost,
    bound_displacement,
    calibrate,
    heights,
    log_height,
    make_pieces,
)
from studies.baselines.projection import RandomProjection, compute_published_noise, record_sensitivity
from tests.mechanisms.conformance import Contract, Floats, sample_messages, shown_epsilon


class _ByDensity(Contract):
    samples = 20_000
    power = 0.45

    def statistic(self, release: Any, messages: list[Message], x: Floats, other: Floats) -> Floats:
        ratios = release.log_density(messages, np.stack([x, other]))
        return np.asarray(ratios[:, 0] - ratios[:, 1])


class TestAnalyticGaussian(_ByDensity):
    # A large delta, so that the samples see the events that decide.
    def make(self, epsilon: float) -> Release:
        return AnalyticGaussian(epsilon, delta=0.05)


class TestProjectedGaussian(_ByDensity):
    samples = 5_000
    power = 0.4

    def make(self, epsilon: float) -> Release:
        return AnalyticGaussian(epsilon, delta=0.05, projection="pca", n_components=2)


class TestRandomProjection(_ByDensity):
    def make(self, epsilon: float) -> Release:
        return RandomProjection(epsilon, delta=0.05, n_components=4)

    def pairs(self, release: Any) -> list[tuple[Floats, Floats]]:
        # The direction that the matrix stretches most, where the bound is attained.
        x = np.linalg.svd(release.matrix_)[0][:, 0]
        return [(release.mean_ + x, release.mean_ - x)]


class TestRandomProjectionAsPublished(TestRandomProjection):
    sound = False
    samples = 10_000

    def make(self, epsilon: float) -> Release:
        return RandomProjection(epsilon, delta=0.05, n_components=4, as_published=True, allow_unsound=True)


class TestVonMisesFisher(_ByDensity):
    samples = 8_000
    power = 0.2  # directions near the row or its opposite, which tell most, are rare

    def make(self, epsilon: float) -> Release:
        return VonMisesFisher(epsilon)

    @pytest.mark.parametrize("epsilon", [8.0, 12.0])  # so few samples see nothing of a smaller one
    def test_sampled_likelihood_ratios_keep_the_promise(self, epsilon: float) -> None:
        super().test_sampled_likelihood_ratios_keep_the_promise(epsilon)


def rows(n: int = 100, d: int = 24, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal((n, d))


def test_analytic_noise_is_the_least_for_a_diameter_of_two() -> None:
    release = AnalyticGaussian(2.0).fit(rows())
    assert release.noise_.scale == pytest.approx(analytic_gaussian_scale(2.0, 2.0, 1e-5), rel=1e-4)
    drawn = np.array([m["vector"] for m in sample_messages(release, rows()[0], 4000, 0)])
    assert np.allclose(drawn.std(axis=0), release.noise_.scale, rtol=0.06)
    assert np.allclose(drawn.mean(axis=0), release.features(rows()[:1])[0], atol=5 * release.noise_.scale / 4000**0.5)


@given(st.integers(1, 300), st.integers(0, 2**32), st.floats(-200, 200))
@settings(max_examples=40, deadline=None)
def test_computed_norms_keep_the_bound(d: int, seed: int, exponent: float) -> None:
    X = np.random.default_rng(seed).standard_normal((4, d)) * 10.0**exponent
    release = AnalyticGaussian(1.0)
    release.mean_, release.n_features_in_ = np.zeros(d), d
    found = release._unit_rows(X, "X", lenient=False)
    exact = np.sqrt(np.array([math.fsum(float(v) ** 2 for v in row) for row in found]))
    assert (exact <= bound_computed_norm(d)).all()


def test_computed_norms_pass_one_and_not_the_bound() -> None:
    release = AnalyticGaussian(1.0)
    release.mean_, release.n_features_in_ = np.zeros(50), 50
    found = release._unit_rows(np.random.default_rng(0).standard_normal((500, 50)), "X", lenient=False)
    squares = [sum(Fraction(float(value)) ** 2 for value in row) for row in found]
    assert 1 < max(squares) <= Fraction(bound_computed_norm(50)) ** 2


def test_privunit_tells_three_times_as_much() -> None:
    noise = AnalyticGaussian(2.0).fit(rows()).noise_
    assert 1 / noise.scale == pytest.approx(0.251, abs=0.001)
    assert PrivUnit(2.0).fit(rows()).channel_.signal > 3 / noise.scale


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_the_projection_moves_as_far_as_the_bound_and_no_farther(d: int, k: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    matrix = generator.standard_normal((d, k)) / math.sqrt(k)
    bound = record_sensitivity(matrix)
    x, y = (v / np.linalg.norm(v) for v in generator.standard_normal((2, d)))
    assert np.linalg.norm((x - y) @ matrix) <= bound
    top = np.linalg.svd(matrix)[0][:, 0]
    assert bound * (1 - 1e-9) <= np.linalg.norm((top - -top) @ matrix) <= bound


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 4.0, 12.0])
@pytest.mark.parametrize("delta", [1e-5, 0.05])
def test_published_noise_hides_an_attribute_and_not_a_record(epsilon: float, delta: float) -> None:
    paper = RandomProjection(epsilon, delta=delta, as_published=True, allow_unsound=True, n_components=16).fit(rows())
    noise, matrix = paper.noise_, paper.matrix_
    w = float(np.linalg.norm(matrix, axis=1).max())
    assert noise.scale == pytest.approx(w * math.sqrt(2 * (math.log(1 / (2 * delta)) + epsilon)) / epsilon)
    assert compute_gaussian_delta(noise.scale / w, epsilon) <= delta
    assert compute_gaussian_delta(noise.scale / record_sensitivity(matrix), epsilon) > 1.5 * delta
    assert not paper.guarantee.sound
    assert "one attribute" in str(paper.guarantee)


def test_unsound_noise_must_be_asked_for() -> None:
    with pytest.raises(ValueError, match="allow_unsound"):
        RandomProjection(1.0, as_published=True).fit(rows())
    with pytest.raises(ValueError, match="below 1/2"):
        compute_published_noise(np.eye(3), 1.0, 0.6)


@pytest.mark.parametrize(
    ("release", "words"),
    [
        (AnalyticGaussian(1.0, delta=0.0), "delta"),
        (AnalyticGaussian(1.0, delta=math.nan), "delta"),
        (AnalyticGaussian(65.0), "epsilon"),
        (AnalyticGaussian(1.0, projection="round"), "projection must"),
        (RandomProjection(1.0, n_components=0), "n_components"),
        (RandomProjection(1.0, projection_seed=-1), "projection_seed"),
        (VonMisesFisher(1e-3), "epsilon must"),
        (VonMisesFisher(65.0), "epsilon must"),
        (VonMisesFisher(True), "epsilon must"),
        (VonMisesFisher(1.0, projection=np.zeros((24, (1 << 14) + 1))), "16384 columns"),
    ],
)
def test_bad_parameters(release: Release, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        release.fit(rows())


@pytest.mark.parametrize(("epsilon", "dimension"), [(0.1, 3), (4.0, 64), (64.0, 16), (64.0, 1280), (2.0, 16_384)])
def test_what_the_fisher_channel_costs(epsilon: float, dimension: int) -> None:
    channel = calibrate(epsilon, dimension)
    bending = _bound_bending(epsilon / 2, channel.dimension, channel.reach)
    at = np.linspace(-channel.reach, channel.reach, 8 * PIECES + 1)
    straight = np.interp(at, at[::8], log_height(at[::8], channel.kappa, channel.dimension))
    off = np.abs(straight - log_height(at, channel.kappa, channel.dimension)).max()
    assert 0.5 * bending < off < bending + 1e-9
    cost = 2 * bending + 2 * bound_arithmetic_cost(channel.dimension, channel.reach)
    assert cost < channel.cost < cost + 2e-8
    assert 2 * channel.kappa + channel.cost <= epsilon
    assert channel.cost < 2e-3


@pytest.mark.parametrize(("epsilon", "dimension"), [(0.5, 16), (20.0, 16), (64.0, 200)])
def test_the_heights_are_those_of_the_density(epsilon: float, dimension: int) -> None:
    channel = calibrate(epsilon, dimension)
    # The mean of <g, x> in closed form: a ratio of Bessel functions.
    order, kappa = dimension / 2, channel.kappa
    mean = ive(order, kappa) / ive(order - 1, kappa)
    drawn = np.tanh(heights(channel, 200_000, unsafe_seeded(0)))
    assert drawn.mean() == pytest.approx(mean, abs=5 * drawn.std() / 200_000**0.5)
    # And the masses of the pieces, by quadrature of the density of w = <g, x>.
    table, _ = make_pieces(channel)
    masses = np.zeros(PIECES)
    share = 1 / (1 << table.bits)
    kept = table.first.astype(np.float64) / 2.0 ** (63 - table.bits)
    np.add.at(masses, np.arange(PIECES), share * kept)
    np.add.at(masses, table.alias, share * (1 - kept))
    knots = np.tanh(np.linspace(-channel.reach, channel.reach, PIECES + 1))

    def density(w: float) -> float:
        return float(math.exp(kappa * (w - 1)) * (1 - w * w) ** ((dimension - 3) / 2))

    total = quad(density, -1, 1, epsabs=0, epsrel=1e-11, limit=500)[0]
    for piece in np.argsort(-masses)[:: PIECES // 64][:24]:
        exact = quad(density, knots[piece], knots[piece + 1], epsabs=0, epsrel=1e-10)[0] / total
        assert masses[piece] == pytest.approx(exact, rel=2 * _bound_bending(kappa, dimension, channel.reach) + 1e-8)


def test_beyond_the_reach_lies_nothing() -> None:
    for epsilon, dimension in ((64.0, 16), (1.0, 1280)):
        channel = calibrate(epsilon, dimension)
        far = np.linspace(channel.reach, 4 * channel.reach, 4001)
        near = np.linspace(-channel.reach, channel.reach, 40_001)
        outside = logsumexp(np.concatenate([log_height(s, channel.kappa, dimension) for s in (far, -far)]))
        inside = logsumexp(log_height(near, channel.kappa, dimension))
        assert outside + math.log(far[1] - far[0]) - inside - math.log(near[1] - near[0]) < -200 * math.log(2)


class _Recorded:
    """A source that repeats what another said."""

    sound = False

    def __init__(self) -> None:
        self._source = unsafe_seeded(3)

    def words(self, count: int) -> Any:
        return self._source.words(count)


def test_directions_lie_on_the_sphere_as_near_as_the_bound_says(monkeypatch: pytest.MonkeyPatch) -> None:
    channel = calibrate(4.0, 64)
    x = rows(50, 64)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    blurred = channel.draw(x, _Recorded()) * 2.0**-FINE_BITS
    module = "studies.baselines.fisher.gaussian_integers"
    genuine = __import__("studies.baselines.fisher", fromlist=["x"]).gaussian_integers
    calls: list[Any] = []

    def without_blur(ratio: Any, count: int, source: Any) -> Any:
        calls.append(genuine(ratio, count, source))
        return calls[-1] if len(calls) == 1 else calls[-1] * 0

    monkeypatch.setattr(module, without_blur)
    bare = channel.draw(x, _Recorded()) * 2.0**-FINE_BITS
    assert np.abs((blurred - bare).std() / BLUR - 1) < 0.05
    # In extended precision, from the same integers and the same height.
    long = np.longdouble
    gauss, unit = calls[0].reshape(x.shape).astype(long), x.astype(long)
    unit = unit / np.sqrt((unit**2).sum(axis=1, keepdims=True))
    s = heights(channel, 50, _Recorded()).astype(long)[:, None]
    across = gauss - (gauss * unit).sum(axis=1, keepdims=True) * unit
    across /= np.sqrt((across**2).sum(axis=1, keepdims=True))
    exact = (np.tanh(s) * unit + across / np.cosh(s)) * np.sqrt(long(64))
    off = np.sqrt(((bare - exact) ** 2).sum(axis=1)).max()
    assert off < 0.51 * 2.0**-FINE_BITS * 8 < bound_displacement(64, channel.reach)


def test_metric_promise_is_half_of_the_local_one_for_each_unit() -> None:
    release = VonMisesFisher(6.0).fit(rows())
    assert release.metric_epsilon * 2 + release.metric_slack == pytest.approx(6.0)
    assert 0 < release.metric_slack < 1e-3
    # The log-density moves by at most kappa times the distance, on the sphere.
    x = release.features(rows(60))
    messages = release.release(rows(60), rng=unsafe_seeded(1))
    density = release.log_density(messages, rows(60))
    sizes = np.array([np.linalg.norm(m["vector"] / 8.0) for m in messages]) / math.sqrt(24)
    apart = np.linalg.norm(x[:, None] - x[None], axis=2)
    moved = np.abs(density[:, :, None] - density[:, None, :]) / sizes[:, None, None]
    assert (moved <= release.metric_epsilon * apart + 1e-9).all()


def test_fisher_messages_tell_rows_apart_and_near_rows_less() -> None:
    release, contract = VonMisesFisher(12.0).fit(rows()), TestVonMisesFisher()
    x = np.eye(24)[0]
    shown = []
    for distance in (0.5, 2.0):
        angle = 2 * math.asin(distance / 2)
        other = math.cos(angle) * x + math.sin(angle) * np.eye(24)[1]
        pair = release.mean_ + x, release.mean_ + other
        drawn = [sample_messages(release, row, 4000, i) for i, row in enumerate(pair)]
        first, second = (contract.statistic(release, messages, *pair) for messages in drawn)
        shown.append(shown_epsilon(first, second, 0.0))
        assert shown[-1] <= release.metric_epsilon * distance + release.metric_slack
    assert shown[1] > 2.0
    assert 0.0 < shown[0] < shown[1] / 3


def test_fisher_signal_is_that_of_its_density() -> None:
    release = VonMisesFisher(32.0).fit(rows())
    x = rows(1, 24, 7)
    drawn = np.array([m["vector"] for m in sample_messages(release, x, 20_000, 2)]) / 8.0
    along = drawn @ release.features(x)[0] / math.sqrt(24)
    kappa = release.metric_epsilon
    assert along.mean() == pytest.approx(ive(12, kappa) / ive(11, kappa), abs=0.004)
