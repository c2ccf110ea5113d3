"""Noise, attacked: its distribution read from the tables, its low bits, its promises, its calibration.

A statistical test fails by chance with probability below 1e-6; those with a seed always give one answer.
"""

import itertools
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
import pytest
from dp_accounting import get_sigma_gaussian
from dp_accounting.pld import privacy_loss_distribution, privacy_loss_mechanism
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from nearveil.privacy import noise as samplers
from nearveil.privacy.noise import (
    GaussianNoise,
    LaplaceNoise,
    add_noise,
    analytic_gaussian_scale,
    calibrate_gaussian,
    calibrate_laplace,
    choose_gaussian_grid,
    choose_laplace_grid,
    compute_classical_scale,
    compute_gaussian_delta,
    secure_source,
    unsafe_seeded,
)

CHANCE = 1e-6
UNIT = mpmath.mpf(2) ** -samplers.TOTAL_BITS


@pytest.fixture(autouse=True)
def digits() -> Iterator[None]:
    with mpmath.workdps(120):
        yield


# --- the distribution, computed from the tables ---


def table_pmf(table: samplers.Table) -> list[int]:
    """The probabilities that a table really has, in units of 2^-255."""
    capacity = 1 << (samplers.TOTAL_BITS - table.bits)
    pmf = [0] * (1 << table.bits)
    for cell, (first, rest) in enumerate(zip(table.first.tolist(), table.rest, strict=True)):
        threshold = (first << 192) + rest
        pmf[cell] += threshold
        pmf[int(table.alias[cell])] += capacity - threshold
    return pmf


def gaussian_pmf(ratio: Fraction) -> dict[int, mpmath.mpf]:
    """The distribution of `gaussian_integers`, layer by layer."""
    total: dict[int, mpmath.mpf] = {0: mpmath.mpf(1)}
    for layer in samplers.split_gaussian(ratio):
        half = [(k, UNIT * p) for k, p in enumerate(table_pmf(layer.table)) if p]
        signed = [(sign * k << layer.shift, p / 2) for k, p in half for sign in (1, -1)]
        summed: dict[int, mpmath.mpf] = {}
        for (a, p), (b, q) in itertools.product(total.items(), signed):
            summed[a + b] = summed.get(a + b, mpmath.mpf(0)) + p * q
        total = summed
    return total


def laplace_pmf(ratio: Fraction) -> dict[int, mpmath.mpf]:
    """The distribution of `draw_laplace_integers`, digit group by digit group."""
    total: dict[int, mpmath.mpf] = {0: mpmath.mpf(1)}
    for layer in samplers.split_exponential(2 * ratio):
        group = [(k << layer.shift, UNIT * p) for k, p in enumerate(table_pmf(layer.table))]
        total = {a + b: p * q for (a, p), (b, q) in itertools.product(total.items(), group)}
    signed: dict[int, mpmath.mpf] = {}
    for digits_, p in total.items():
        for sign in (1, -1):
            z = sign * ((digits_ + 1) // 2)
            signed[z] = signed.get(z, mpmath.mpf(0)) + p / 2
    return signed


def total_variation(pmf: dict[int, mpmath.mpf], exact: dict[int, mpmath.mpf]) -> mpmath.mpf:
    zero = mpmath.mpf(0)
    return mpmath.fsum(abs(pmf.get(k, zero) - exact.get(k, zero)) for k in pmf.keys() | exact.keys()) / 2


def divergence(pmf: dict[int, mpmath.mpf], shift: int, epsilon: float) -> mpmath.mpf:
    """The exact delta at `epsilon` between the noise and the noise moved by `shift` steps."""
    zero, factor = mpmath.mpf(0), mpmath.exp(epsilon)
    return mpmath.fsum(max(zero, p - factor * pmf.get(k - shift, zero)) for k, p in pmf.items())


@pytest.fixture
def narrow_layers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Layers of one bit each, so that few steps already need several of them."""
    samplers.split_gaussian.cache_clear()
    monkeypatch.setattr(samplers, "_GAP", 1)
    yield
    samplers.split_gaussian.cache_clear()


def exact_gaussian(ratio: Fraction) -> dict[int, mpmath.mpf]:
    variance = mpmath.mpf(ratio.numerator) ** 2 / mpmath.mpf(ratio.denominator) ** 2
    reach = int(21 * ratio)
    weights = {k: mpmath.exp(-(k**2) / (2 * variance)) for k in range(-reach, reach + 1)}
    total = mpmath.fsum(weights.values())
    return {k: weight / total for k, weight in weights.items()}


@pytest.mark.parametrize(("ratio", "layers"), [(Fraction(4), 1), (Fraction(47, 5), 1), (Fraction(1701, 100), 1)])
def test_a_single_layer_is_the_discrete_gaussian(ratio: Fraction, layers: int) -> None:
    assert len(samplers.split_gaussian(ratio)) == layers
    assert total_variation(gaussian_pmf(ratio), exact_gaussian(ratio)) < mpmath.mpf(2) ** -204


@pytest.mark.usefixtures("narrow_layers")
@pytest.mark.parametrize(("ratio", "layers"), [(Fraction(173, 10), 2), (Fraction(45), 3)])
def test_layers_add_up_to_the_discrete_gaussian(ratio: Fraction, layers: int) -> None:
    assert len(samplers.split_gaussian(ratio)) == layers
    assert total_variation(gaussian_pmf(ratio), exact_gaussian(ratio)) < mpmath.mpf(2) ** -204


@pytest.mark.usefixtures("narrow_layers")
def test_a_fine_layer_that_is_too_narrow_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samplers, "_FINE", 1)
    assert total_variation(gaussian_pmf(Fraction(173, 10)), exact_gaussian(Fraction(173, 10))) > mpmath.mpf(2) ** -60


@settings(max_examples=200)
@given(exponent=st.floats(2, 50))
def test_the_layers_meet_what_the_proof_asks(exponent: float) -> None:
    ratio = Fraction(2**exponent)
    shift = 0
    while samplers._find_top_variance(ratio**2, shift + 1) >= 64:
        shift += 1
    pairs = list(samplers._pair_layers(shift))
    top = samplers._find_top_variance(ratio**2, shift)
    fine = sum(9 * Fraction(4) ** coarser for _, coarser in pairs)
    assert top * 4**shift + fine == ratio**2
    assert (shift == 0 and top >= 16) or 64 <= top < 320
    assert len(pairs) <= 6
    assert all(0 < coarser - finer <= samplers._GAP for finer, coarser in pairs)
    assert [coarser for _, coarser in pairs[1:]] == [finer for finer, _ in pairs[:-1]]
    assert not pairs or (pairs[0][1] == shift and pairs[-1][0] == 0)


@pytest.mark.parametrize("ratio", [Fraction(1, 2), Fraction(4), Fraction(33, 10)])
def test_rounded_laplace_is_what_the_tables_hold(ratio: Fraction) -> None:
    h = mpmath.mpf(ratio.denominator) / ratio.numerator
    exact = {0: 1 - mpmath.exp(-h / 2)}
    for k in range(1, int(200 * ratio) + 2):
        exact[k] = exact[-k] = mpmath.exp(-k * h) * mpmath.sinh(h / 2)
    assert total_variation(laplace_pmf(ratio), exact) < mpmath.mpf(2) ** -200


def test_the_rounding_kernel_is_a_distribution_wherever_it_stands() -> None:
    # Theorem 3: normal weights of the variance that is charged, at the integers, add up to one up to 2^-198.
    noise = GaussianNoise(sensitivity=1.0, scale=4.0, size=1, grid=1.0)
    charged = round(noise.scale**2 - noise.effective_scale**2, 6)
    for offset in (0, 0.1, 0.25, 0.5, 0.73):
        total = mpmath.fsum(mpmath.npdf(k - mpmath.mpf(offset), 0, mpmath.sqrt(charged)) for k in range(-60, 61))
        assert abs(total - 1) < mpmath.mpf(2) ** -198


@settings(max_examples=60)
@given(weights=st.lists(st.integers(0, 2**40), min_size=1, max_size=40).filter(any))
def test_alias_tables_hold_their_weights(weights: list[int]) -> None:
    pmf, total = table_pmf(samplers.make_alias_table(weights)), sum(weights)
    assert sum(pmf) == 1 << samplers.TOTAL_BITS
    for k, share in enumerate(pmf):
        exact = Fraction(weights[k] << samplers.TOTAL_BITS, total) if k < len(weights) else Fraction(0)
        assert -1 < share - exact < (len(weights) if k == 0 else 1)


class Script:
    """A source that says what it is told to."""

    sound = False

    def __init__(self, *words: int) -> None:
        self._words = list(words)

    def words(self, count: int) -> NDArray[np.uint64]:
        words, self._words = self._words[:count], self._words[count:]
        assert len(words) == count
        return np.array(words, dtype=np.uint64)


def test_ties_are_decided_by_further_bits() -> None:
    table = samplers.make_alias_table([2, 1])  # two cells: 2/3 and 1/3, so cell 1 is 2/3 full and 1/3 alias
    cell = int(np.flatnonzero(table.rest)[0])
    word = (cell << (63 - table.bits)) | int(table.first[cell])
    parts = [(table.rest[cell] >> (64 * i)) & (2**64 - 1) for i in range(3)]
    tie = np.array([word], dtype=np.uint64)
    below, at = Script(parts[0] - 1, *parts[1:]), Script(*parts)
    assert samplers.look_up(table, tie, below)[0] == cell
    assert samplers.look_up(table, tie, at)[0] == table.alias[cell] != cell
    for step, drawn in ((-1, cell), (1, table.alias[cell])):  # no tie: the source is not asked
        assert samplers.look_up(table, tie + np.int64(step).astype(np.uint64), Script())[0] == drawn


# --- the promise, against exact divergences ---


@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 1e-3), (1.0, 1e-5), (4.0, 1e-9)])
def test_exact_divergence_of_gaussian_noise_keeps_the_promise(epsilon: float, delta: float) -> None:
    noise = calibrate_gaussian(epsilon, delta, sensitivity=1.0, size=1, grid=0.125)
    steps = 9  # values one apart may be 9 grid steps of 1/8 apart once rounded
    assert noise.effective_sensitivity == pytest.approx(steps / 8)
    spent = divergence(gaussian_pmf(Fraction(noise.scale) * 8), steps, epsilon)
    assert 0.3 * delta < spent <= delta
    assert divergence(gaussian_pmf(Fraction(noise.scale) * 4), steps, epsilon) > delta  # half the noise


def test_without_the_cost_of_rounding_the_promise_would_break() -> None:
    noise = calibrate_gaussian(1.0, 1e-5, sensitivity=1.0, size=1, grid=0.125)
    ignorant = Fraction(analytic_gaussian_scale(1.0, 1.0, 1e-5))
    assert ignorant < noise.scale
    assert divergence(gaussian_pmf(ignorant * 8), 9, 1.0) > 1e-5


@pytest.mark.parametrize("steps", [(9, 0), (6, 7), (-7, 6), (12, 0), (8, -8)])
def test_two_values_keep_the_promise_together(steps: tuple[int, int]) -> None:
    epsilon, delta = 1.0, 1e-4
    noise = calibrate_gaussian(epsilon, delta, sensitivity=1.0, size=2, grid=0.125)
    neighbours = math.hypot(*steps) <= noise.effective_sensitivity / noise.grid  # the last two are not, and it shows
    k = np.arange(-400, 401)
    kept, *moved = (np.exp(-((k - step) ** 2) / (2 * (noise.scale / noise.grid) ** 2)) for step in (0, *steps))
    excess = np.outer(kept, kept) - math.exp(epsilon) * np.outer(*moved)
    assert (np.maximum(excess, 0).sum() / kept.sum() ** 2 <= delta) == neighbours


@pytest.mark.parametrize("epsilon", [0.25, 1.0])
def test_dp_accounting_agrees_about_the_discrete_gaussian(epsilon: float) -> None:
    noise = calibrate_gaussian(epsilon, 1e-6, sensitivity=1.0, size=1, grid=2.0**-5)
    loss = privacy_loss_mechanism.DiscreteGaussianPrivacyLoss(noise.scale / noise.grid, sensitivity=33)
    assert loss.get_delta_for_epsilon(epsilon) <= 1e-6
    halved = privacy_loss_mechanism.DiscreteGaussianPrivacyLoss(noise.scale / noise.grid / 2, sensitivity=33)
    assert halved.get_delta_for_epsilon(epsilon) > 1e-6


@pytest.mark.parametrize("epsilon", [0.2, 1.0, 2.0])
def test_exact_likelihood_ratios_of_laplace_noise_keep_the_promise(epsilon: float) -> None:
    noise = calibrate_laplace(epsilon, sensitivity=1.0, size=1, grid=0.125)
    pmf = laplace_pmf(Fraction(noise.scale) * 8)
    assert noise.epsilon == pytest.approx(epsilon, rel=1e-12)
    assert divergence(pmf, 9, epsilon) <= noise.extra_delta
    centre = {k: p for k, p in pmf.items() if p > 1e-40}
    worst = max(abs(mpmath.log(p / centre[k - 9])) for k, p in centre.items() if k - 9 in centre)
    assert 0.99 * epsilon < worst <= epsilon
    assert divergence(laplace_pmf(Fraction(noise.scale) * 4), 9, epsilon) > 0.01  # half the noise


def test_rounded_laplace_leaks_no_more_than_continuous_where_discrete_laplace_would() -> None:
    ratio, h = Fraction(1), mpmath.mpf(1)
    continuous = 1 - mpmath.exp(-h / 2)  # total variation of two Laplace distributions one scale apart
    assert divergence(laplace_pmf(ratio), 1, 0.0) <= continuous * (1 + mpmath.mpf(2) ** -190)
    assert mpmath.tanh(h / 2) > 1.17 * continuous  # discrete Laplace


@pytest.mark.parametrize("parts", [(0.5, 0.5), (0.9, 0.1), (0.25, 0.25, 0.25, 0.25)])
def test_one_coordinate_is_the_worst_case_of_laplace(parts: tuple[float, ...]) -> None:
    # Theorem 5, with dp-accounting's pessimistic and optimistic discretisations on either side.
    def pld(share: float, pessimistic: bool) -> Any:
        return privacy_loss_distribution.from_laplace_mechanism(
            parameter=1.0, sensitivity=share, pessimistic_estimate=pessimistic, value_discretization_interval=1e-4
        )

    together = pld(parts[0], False)
    for share in parts[1:]:
        together = together.compose(pld(share, False))
    alone = pld(1.0, True)
    for epsilon in np.linspace(0, 0.95, 20):
        assert together.get_delta_for_epsilon(epsilon) < alone.get_delta_for_epsilon(epsilon)


@given(
    values=st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=20),
    moves=st.lists(st.floats(-2, 2), min_size=20, max_size=20),
    exponent=st.integers(-12, 2),
)
def test_rounding_raises_the_distance_by_no_more_than_stated(
    values: list[float], moves: list[float], exponent: int
) -> None:
    grid, first = 2.0**exponent, np.array(values)
    second = first + np.array(moves[: len(first)])
    for norm, noise_type in ((2, GaussianNoise), (1, LaplaceNoise)):
        apart = float(np.linalg.norm(first - second, norm)) + 1e-300
        noise = noise_type(sensitivity=apart, scale=8 * grid, size=len(first), grid=grid)
        one, other = (add_noise(v, noise, source=unsafe_seeded(1)) for v in (first, second))
        assert np.linalg.norm(one - other, norm) <= noise.effective_sensitivity * (1 + 1e-12)


def test_the_raise_is_attained() -> None:
    first, second = np.full(16, 0.4999), np.full(16, 0.5001)
    for norm, noise_type in ((2, GaussianNoise), (1, LaplaceNoise)):
        apart = float(np.linalg.norm(first - second, norm))
        noise = noise_type(sensitivity=apart, scale=8.0, size=16, grid=1.0)
        one, other = (add_noise(v, noise, source=unsafe_seeded(1)) for v in (first, second))
        assert np.linalg.norm(one - other, norm) > 0.99 * noise.effective_sensitivity


# --- calibration ---


def exact_delta(noise_multiplier: float, epsilon: float) -> mpmath.mpf:
    c, e = mpmath.mpf(noise_multiplier), mpmath.mpf(epsilon)
    return mpmath.ncdf(1 / (2 * c) - e * c) - mpmath.exp(e) * mpmath.ncdf(-1 / (2 * c) - e * c)


def test_published_figures() -> None:
    assert f"{analytic_gaussian_scale(1.0, 1.0, 1e-5):.6f}" == "3.730632"
    assert f"{compute_classical_scale(1.0, 1.0, 1e-5):.6f}" == "4.844805"
    assert 1.069 < analytic_gaussian_scale(1.0, 12.0, 1e-5) / compute_classical_scale(1.0, 12.0, 1e-5) < 1.070
    assert exact_delta(compute_classical_scale(1.0, 12.0, 1e-5), 12.0) > 1e-5


@pytest.mark.parametrize("epsilon", [1e-3, 0.03, 0.5, 1.0, 3.0, 12.0, 50.0])
@pytest.mark.parametrize("delta", [1e-12, 1e-9, 1e-5, 1e-2, 0.1])
def test_the_analytic_scale_is_sufficient_and_necessary(epsilon: float, delta: float) -> None:
    scale = analytic_gaussian_scale(1.0, epsilon, delta)
    assert exact_delta(scale, epsilon) <= delta
    assert exact_delta(scale * (1 - 1e-6), epsilon) > delta
    assert scale == pytest.approx(get_sigma_gaussian(epsilon, delta), rel=1e-6)
    assert analytic_gaussian_scale(3.7, epsilon, delta) == pytest.approx(3.7 * scale, rel=1e-14)


@settings(max_examples=60)
@given(epsilon=st.floats(1e-6, 64), exponent=st.floats(-18, -0.01))
def test_the_analytic_scale_never_falls_short(epsilon: float, exponent: float) -> None:
    delta = 10**exponent
    scale = analytic_gaussian_scale(1.0, epsilon, delta)
    assert exact_delta(scale, epsilon) <= delta
    assert exact_delta(scale * (1 - 1e-6), epsilon) > delta


@settings(max_examples=200)
@given(noise_multiplier=st.floats(-3, 8).map(lambda x: 10**x), epsilon=st.floats(-6, 1.8).map(lambda x: 10**x))
def test_gaussian_delta_is_an_upper_bound(noise_multiplier: float, epsilon: float) -> None:
    exact = exact_delta(noise_multiplier, epsilon)
    assert mpmath.mpf(compute_gaussian_delta(noise_multiplier, epsilon)) >= exact or exact < 1e-290
    if epsilon * noise_multiplier < 30 and noise_multiplier < 1e3:
        assert compute_gaussian_delta(noise_multiplier, epsilon) <= float(exact) * (1 + 1e-6)


@settings(max_examples=100)
@given(
    epsilon=st.floats(1e-3, 50),
    exponent=st.floats(-12, -1),
    sensitivity=st.floats(-6, 6).map(lambda x: 10**x),
    size=st.integers(1, 10**6),
)
def test_specifications_reach_what_was_asked_and_cost_next_to_nothing(
    epsilon: float, exponent: float, sensitivity: float, size: int
) -> None:
    delta = 10**exponent
    gaussian = calibrate_gaussian(epsilon, delta, sensitivity=sensitivity, size=size)
    assert exact_delta(gaussian.event.noise_multiplier, epsilon) + gaussian.extra_delta <= delta
    assert compute_gaussian_delta(gaussian.event.noise_multiplier, epsilon) + gaussian.extra_delta <= delta
    assert gaussian.scale <= (1 + 2e-5) * analytic_gaussian_scale(sensitivity, epsilon, delta)
    laplace = calibrate_laplace(epsilon, sensitivity=sensitivity, size=size)
    assert 1 / laplace.event.noise_multiplier <= epsilon
    assert laplace.scale <= (1 + 2e-5) * sensitivity / epsilon
    for noise, root in ((gaussian, math.sqrt(size)), (laplace, size)):
        assert Fraction(noise.effective_sensitivity) >= Fraction(sensitivity) + Fraction(noise.grid) * Fraction(
            root
        ) * (1 - Fraction(1, 2**52))
        assert noise.extra_delta == size * 2.0**-100


def test_the_extra_delta_covers_the_total_variation() -> None:
    assert (1 + mpmath.exp(64)) * mpmath.mpf(2) ** -195 < mpmath.mpf(2) ** -100


def test_grids_are_the_coarsest_of_negligible_cost() -> None:
    for grid, raised in ((choose_gaussian_grid(3.0, 64), 8), (choose_laplace_grid(3.0, 64), 64)):
        assert math.frexp(grid)[0] == 0.5
        assert grid * raised <= 3 * 2.0**-16 < 2 * grid * raised


# --- samples ---

NOISES: dict[str, tuple[GaussianNoise | LaplaceNoise, Any]] = {
    "gaussian": (calibrate_gaussian(1.0, 1e-5, sensitivity=1.0, size=200_000), stats.norm),
    "laplace": (calibrate_laplace(1.0, sensitivity=1.0, size=200_000), stats.laplace),
}


@pytest.fixture(params=list(NOISES))
def drawn(request: pytest.FixtureRequest) -> tuple[Any, Any, NDArray[np.float64]]:
    noise, law = NOISES[request.param]
    return noise, law, add_noise(np.zeros(noise.size), noise, source=unsafe_seeded(20))


def test_samples_follow_the_law_and_half_of_them_do_not(drawn: tuple[Any, Any, NDArray[np.float64]]) -> None:
    noise, law, sample = drawn
    assert stats.kstest(sample / noise.scale, law.cdf).pvalue > CHANCE
    assert stats.kstest(sample / 2 / noise.scale, law.cdf).pvalue < CHANCE
    assert stats.kstest(sample / 1.03 / noise.scale, law.cdf).pvalue < CHANCE


def test_variance_is_that_of_the_law(drawn: tuple[Any, Any, NDArray[np.float64]]) -> None:
    noise, law, sample = drawn
    fourth = float(law.stats(moments="k")) + 2  # the variance of the sample variance, in units of variance^2 / n
    deviation = (np.mean(sample**2) / (noise.scale**2 * law.var()) - 1) / math.sqrt(fourth / noise.size)
    assert abs(deviation) < 4.9
    assert abs(np.mean(sample) / (noise.scale * law.std())) * math.sqrt(noise.size) < 4.9


def test_values_are_independent_of_their_neighbours(drawn: tuple[Any, Any, NDArray[np.float64]]) -> None:
    _, _, sample = drawn
    for lag in (1, 2, 1 << 15):  # the last: from one chunk to the next
        for transform in (lambda x: x, np.abs):
            moved = transform(sample)
            assert abs(np.corrcoef(moved[lag:], moved[:-lag])[0, 1]) * math.sqrt(len(sample)) < 4.9


@pytest.mark.parametrize("ratio", [Fraction(5), Fraction(1000, 7), Fraction(40_000)])
def test_integers_have_the_right_frequencies(ratio: Fraction) -> None:
    count = 200_000
    for draw, law in ((samplers.gaussian_integers, stats.norm), (samplers.draw_laplace_integers, stats.laplace)):
        sample = draw(ratio, count, unsafe_seeded(3))
        step = max(1, int(ratio) // 10)
        edges = np.arange(-3 * int(ratio), 3 * int(ratio) + 1, step) - 0.5
        if draw is samplers.gaussian_integers:
            k = np.arange(-20 * int(ratio), 20 * int(ratio) + 1)
            mass = np.exp(-(k**2) / (2 * float(ratio) ** 2))
            inner = np.histogram(k, edges, weights=mass / mass.sum())[0]
        else:
            inner = np.diff(law.cdf(edges / float(ratio)))
        expected = count * np.concatenate([inner, [1 - inner.sum()]])
        observed = np.histogram(sample, edges)[0]
        observed = np.concatenate([observed, [count - observed.sum()]])
        assert stats.chisquare(observed, expected).pvalue > CHANCE


@pytest.mark.parametrize("value", [0.0, 1.0, 1 / 3, -1e-9, 12345.678])
def test_low_bits_say_nothing_about_the_value(value: float) -> None:
    for noise, _ in NOISES.values():
        released = add_noise(np.full(noise.size, value), noise, source=unsafe_seeded(5))
        steps = released / noise.grid
        assert (steps == np.rint(steps)).all()
        for modulus in (2, 64, 60):
            counts = np.bincount(steps.astype(np.int64) % modulus, minlength=modulus)
            assert stats.chisquare(counts).pvalue > CHANCE


def test_textbook_laplace_leaks_in_the_low_bits_and_ours_does_not() -> None:
    # Mironov 2012: a sum of doubles has holes that depend on the value. Near zero, 1 + noise is always a
    # multiple of 2^-53 and 0 + noise hardly ever: one such output tells the two apart for sure.
    rng = np.random.default_rng(0)
    zero, one = (value + rng.laplace(scale=1.0, size=200_000) for value in (0.0, 1.0))
    assert np.mean(np.ldexp(zero, 53) % 1 != 0) > 0.05
    assert np.mean(np.ldexp(one[np.abs(one - 1) < 0.5], 53) % 1 != 0) == 0
    noise, _ = NOISES["laplace"]
    for value in (0.0, 1.0):
        released = add_noise(np.full(noise.size, value), noise, source=unsafe_seeded(6))
        assert ((released / noise.grid) % 1 == 0).all()


def test_noise_is_added_to_the_rounded_value_and_knows_nothing_of_it() -> None:
    noise = calibrate_gaussian(1.0, 1e-5, sensitivity=1.0, size=6, grid=0.25)
    values = np.array([[0.1, -0.2, 7.0], [1e6, -3.3, 0.125]])
    with_value, alone = (add_noise(v, noise, source=unsafe_seeded(9)) for v in (values, np.zeros((2, 3))))
    np.testing.assert_array_equal(with_value - alone, [[0.0, -0.25, 7.0], [1e6, -3.25, 0.0]])


@pytest.mark.parametrize("kind", ["gaussian", "laplace"])
def test_opendp_agrees(kind: str) -> None:
    import opendp.prelude as dp

    ratio, count = 50, 4000
    domain = dp.vector_domain(dp.atom_domain(T="i64"))
    with OpenDPFeatures(dp):
        if kind == "gaussian":
            mechanism = dp.m.make_gaussian(domain, dp.l2_distance(T="f64"), scale=float(ratio))
            ours = samplers.gaussian_integers(Fraction(ratio), 50 * count, unsafe_seeded(1))
        else:
            mechanism = dp.m.make_laplace(domain, dp.l1_distance(T="f64"), scale=float(ratio))
            ours = samplers.draw_laplace_integers(Fraction(ratio), 50 * count, unsafe_seeded(1))
        theirs = np.array(mechanism([0] * count))
    assert stats.ks_2samp(ours, theirs).pvalue > CHANCE
    assert stats.ks_2samp(ours // 2, theirs).pvalue < CHANCE


class OpenDPFeatures:
    """OpenDP's opt-in, for as long as a test needs it."""

    def __init__(self, dp: Any) -> None:
        self._dp = dp

    def __enter__(self) -> None:
        self._dp.enable_features("contrib")

    def __exit__(self, *_: object) -> None:
        self._dp.disable_features("contrib")


# --- randomness ---


def test_the_default_is_secure_and_ignores_numpy_seeds() -> None:
    noise = calibrate_laplace(1.0, sensitivity=1.0, size=8)
    before = np.random.get_state()[1].copy()  # type: ignore[index]  # noqa: NPY002
    first, second = add_noise(np.zeros(8), noise), add_noise(np.zeros(8), noise)
    assert (before == np.random.get_state()[1]).all()  # type: ignore[index]  # noqa: NPY002
    assert (first != second).any()
    assert secure_source().sound
    assert repr(secure_source()) == "secure_source()"


def test_secure_words_are_uniform() -> None:
    words = secure_source().words(20_000)
    ones = np.unpackbits(words.view(np.uint8)).mean()
    assert abs(ones - 0.5) * 2 * math.sqrt(64 * 20_000) < 6


def test_a_seed_repeats_and_is_marked() -> None:
    noise = calibrate_gaussian(1.0, 1e-5, sensitivity=1.0, size=8)
    seeded = unsafe_seeded(4)
    assert not seeded.sound
    assert repr(seeded) == "unsafe_seeded(4)"
    first, second = (add_noise(np.zeros(8), noise, source=unsafe_seeded(4)) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert (add_noise(np.zeros(8), noise, source=unsafe_seeded(5)) != first).any()
    draws = [add_noise(np.zeros(8), noise, source=seeded) for _ in range(2)]
    assert (draws[0] != draws[1]).any()


# --- bad input ---


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0, math.nan, 0.0], "finite"),
        ([1.0, math.inf, 0.0], "finite"),
        ([1.0, 2.0], "as many as"),
        ([1.0, 2.0, 2.0**62], r"within 2\^61 grid steps"),
        ([7.77e30, 2.0, 0.0], r"within 2\^61 grid steps"),
        ([1j, 0, 0], "real numbers"),
        (["secret", "a", "b"], "real numbers"),
        (np.zeros(3, dtype=np.longdouble), "real numbers"),
        ([2**53 + 1, 0, 0], "holds exactly"),
        ([-(2**60), 0, 0], "holds exactly"),
        ([True, False, True], "real numbers"),
    ],
)
def test_bad_values(values: Any, message: str) -> None:
    noise = GaussianNoise(sensitivity=1.0, scale=8.0, size=3, grid=1.0)
    with pytest.raises(ValueError, match=message) as caught:
        add_noise(values, noise)
    for private in ("secret", "7.77", f"{2.0**62:g}"):
        assert private not in str(caught.value)


GOOD: dict[str, Any] = {"sensitivity": 1.0, "scale": 8.0, "size": 3, "grid": 1.0}


@pytest.mark.parametrize("kind", [GaussianNoise, LaplaceNoise])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sensitivity", 0.0), ("sensitivity", -1.0), ("sensitivity", math.nan), ("sensitivity", math.inf),
        ("scale", 0.0), ("scale", math.nan), ("scale", math.inf),
        ("size", 0), ("size", 2.5), ("size", True), ("size", 2**41),
        ("grid", 0.0), ("grid", 3.0), ("grid", math.inf), ("grid", math.nan), ("grid", 4.0), ("grid", 2.0**-60),
        ("grid", 2.0**-1000),
    ],
)  # fmt: skip
def test_bad_specifications(kind: Any, field: str, value: Any) -> None:
    kind(**GOOD)
    with pytest.raises(ValueError, match=field):
        kind(**{**GOOD, field: value})


@pytest.mark.parametrize("epsilon", [0.0, -1.0, 1e-9, 65.0, math.inf, math.nan])
def test_bad_epsilon(epsilon: float) -> None:
    for call in (
        lambda: calibrate_gaussian(epsilon, 1e-5, sensitivity=1.0, size=1),
        lambda: calibrate_laplace(epsilon, sensitivity=1.0, size=1),
        lambda: analytic_gaussian_scale(1.0, epsilon, 1e-5),
        lambda: compute_classical_scale(1.0, epsilon, 1e-5),
        lambda: compute_gaussian_delta(1.0, epsilon),
    ):
        with pytest.raises(ValueError, match="epsilon must be from"):
            call()


@pytest.mark.parametrize("delta", [0.0, -1.0, 1e-30, 1.0, math.nan])
def test_bad_delta(delta: float) -> None:
    for call in (
        lambda: calibrate_gaussian(1.0, delta, sensitivity=1.0, size=1),
        lambda: analytic_gaussian_scale(1.0, 1.0, delta),
        lambda: compute_classical_scale(1.0, 1.0, delta),
    ):
        with pytest.raises(ValueError, match="delta must be from"):
            call()


def test_a_delta_below_what_the_tables_cost_is_refused() -> None:
    with pytest.raises(ValueError, match="delta must be above"):
        calibrate_gaussian(1.0, 1e-18, sensitivity=1.0, size=2**40)


def test_a_grid_too_fine_or_too_coarse_is_named() -> None:
    with pytest.raises(ValueError, match="grid must be from"):
        calibrate_gaussian(1.0, 1e-5, sensitivity=1.0, size=1, grid=2.0**-60)
    with pytest.raises(ValueError, match="grid must be from"):
        calibrate_laplace(50.0, sensitivity=1.0, size=1, grid=1.0)


@pytest.mark.parametrize("grid", [0.0, -1.0, 3.0, math.nan, math.inf])
def test_a_grid_that_is_none_is_named(grid: float) -> None:
    with pytest.raises(ValueError, match="grid must be"):
        calibrate_gaussian(1.0, 1e-5, sensitivity=1.0, size=1, grid=grid)
    with pytest.raises(ValueError, match="grid must be"):
        calibrate_laplace(1.0, sensitivity=1.0, size=1, grid=grid)


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.uint64, np.float16, np.float32, np.float64])
def test_every_type_that_floats_hold_is_taken(dtype: Any) -> None:
    noise = GaussianNoise(sensitivity=1.0, scale=8.0, size=3, grid=1.0)
    one, other = (add_noise(v, noise, source=unsafe_seeded(2)) for v in (np.array([1, 2, 3], dtype=dtype), np.zeros(3)))
    np.testing.assert_array_equal(one - other, [1, 2, 3])


@pytest.mark.parametrize("seed", [-1, 0.5, True, None])
def test_bad_seeds(seed: Any) -> None:
    with pytest.raises(ValueError, match="seed must be"):
        unsafe_seeded(seed)
