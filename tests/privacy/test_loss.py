"""Privacy losses: curves, distributions and convolutions against exact references; nothing may be below the truth."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import mpmath
import numpy as np
import pytest
from dp_accounting import (
    DpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    PoissonSampledDpEvent,
    RandomizedResponseDpEvent,
)
from mpmath import mpf
from scipy import fft
from scipy.stats import laplace

from nearveil.privacy.accounting import PldAccountant, RdpAccountant, make_loss_curves
from nearveil.privacy.accounting import _loss as loss
from nearveil.privacy.accounting._loss import Curve
from nearveil.privacy.events import PureDp

Kinds = Sequence[tuple[float, int]]


@pytest.fixture(autouse=True)
def _digits() -> Any:
    with mpmath.workdps(40):
        yield


def response(epsilon: float) -> Curve:
    return make_loss_curves(PureDp(epsilon), 1)[0]


@cache
def responses(epsilon: float, count: int) -> list[tuple[mpf, mpf]]:
    """The losses of repeated randomised response on one bit, and their probabilities."""
    with mpmath.workdps(40):
        yes = 1 / (1 + mpmath.exp(-mpf(epsilon)))
        table, mass = [], (1 - yes) ** count
        for k in range(count + 1):
            table.append(((2 * k - count) * mpf(epsilon), mass))
            mass *= mpf(count - k) / (k + 1) * yes / (1 - yes)
        return table


def gaussian(multiplier: float, epsilon: mpf) -> mpf:
    half, drift = 1 / (2 * mpf(multiplier)), epsilon * mpf(multiplier)
    return mpmath.ncdf(half - drift) - mpmath.exp(epsilon) * mpmath.ncdf(-half - drift)


def exact_delta(kinds: Kinds, epsilon: float, multiplier: float | None = None) -> mpf:
    """The exact delta of randomised responses, composed, and of Gaussian noise on top."""
    total = mpf(0)
    for outcome in itertools.product(*(responses(e, n) for e, n in kinds)):
        left, mass = mpf(epsilon) - sum(at for at, _ in outcome), mpmath.fprod(mass for _, mass in outcome)
        if multiplier is not None:
            total += mass * gaussian(multiplier, left)
        elif left < 0:
            total += mass * (1 - mpmath.exp(left))
    return total


def assert_least(kinds: Kinds, epsilon: float, delta: float, multiplier: float | None = None, *, near: float) -> None:
    """Assert that an epsilon is not below the exact one, nor above it by more than the share `near`."""
    assert exact_delta(kinds, epsilon, multiplier) <= delta
    assert epsilon == 0 or exact_delta(kinds, epsilon * (1 - near), multiplier) > delta


def accountant_of(kinds: Kinds, multiplier: float | None = None) -> PldAccountant:
    accountant = PldAccountant()
    for epsilon, count in kinds:
        accountant.compose(PureDp(epsilon), count)
    return accountant if multiplier is None else accountant.compose(GaussianDpEvent(multiplier))


@pytest.mark.parametrize(("epsilon", "at"), [(0.01, 10.586830619901237), (0.005, 11.991439592541859)])
def test_a_small_delta_is_not_lost_in_the_rounding_of_the_convolution(epsilon: float, at: float) -> None:
    """By an FFT without a bound: 6.8e-13 where 1e-12 is exact, and -2e-14."""
    count = 20_000 if epsilon == 0.01 else 100_000
    accountant = PldAccountant().compose(PureDp(epsilon), count)
    assert 1e-12 <= accountant.delta(at) <= 1.0001e-12  # the exact value is 1e-12, up to 14 digits
    assert at * (1 - 1e-12) <= accountant.epsilon(1e-12) <= at * (1 + 1e-6)


def test_the_reference_of_the_small_delta() -> None:
    """The same as a sum over the tail, in 40 digits."""
    for epsilon, count, at in ((0.01, 20_000, 10.586830619901237), (0.005, 100_000, 11.991439592541859)):
        yes, k = 1 / (1 + mpmath.exp(-mpf(epsilon))), math.floor((at / epsilon + count) / 2) + 1
        total, mass = mpf(0), mpmath.binomial(count, k) * yes**k * (1 - yes) ** (count - k)
        while mass > 1e-40:
            total += mass * (1 - mpmath.exp(mpf(at) - (2 * k - count) * mpf(epsilon)))
            mass, k = mass * mpf(count - k) / (k + 1) * yes / (1 - yes), k + 1
        assert abs(total / mpf("1e-12") - 1) < 1e-11


@pytest.mark.parametrize("delta", [3e-4, 1e-5])
def test_small_losses_do_not_cost_what_the_grid_costs(delta: float) -> None:
    """With losses rounded to multiples of 5e-5 they cost 3.7 and 2.4 times the truth; by RDP 1.3 and 1.15 times."""
    epsilon = PldAccountant().compose(PureDp(2.1e-4), 769).epsilon(delta)
    assert_least([(2.1e-4, 769)], epsilon, delta, near=1e-6)
    assert 1.1 * epsilon < RdpAccountant().compose(PureDp(2.1e-4), 769).epsilon(delta) < 1.35 * epsilon


def test_no_small_composition_costs_less_than_the_truth_or_much_more() -> None:
    rng = np.random.default_rng(18)
    for _ in range(30):
        kinds = [(float(10 ** rng.uniform(-4, 0.7)), int(rng.integers(1, 8))) for _ in range(rng.integers(1, 4))]
        multiplier = float(10 ** rng.uniform(-0.5, 3)) if rng.random() < 0.4 else None
        accountant, delta = accountant_of(kinds, multiplier), float(10 ** rng.uniform(-14, -0.5))
        epsilon = accountant.epsilon(delta)
        assert_least(kinds, epsilon, delta, multiplier, near=1e-4)
        lower = epsilon * float(rng.uniform(0.2, 1))
        exact = exact_delta(kinds, lower, multiplier)
        assert exact <= accountant.delta(lower) <= exact * (1 + mpf("1e-2")) + 1e-30


@pytest.mark.parametrize("delta", [1e-20, 1e-60, 1e-200])
def test_deltas_far_below_the_rounding_of_doubles_have_their_epsilon(delta: float) -> None:
    assert_least([(0.3, 1000)], PldAccountant().compose(PureDp(0.3), 1000).epsilon(delta), delta, near=1e-6)


@pytest.mark.parametrize("factor", [0.01, 0.3, 1.0, 3.0, 30.0])
def test_the_bound_holds_whatever_the_tilt(factor: float) -> None:
    kinds = ((0.37, 6), (0.11, 9))
    parts = [(response(epsilon), count) for epsilon, count in kinds]
    for delta in (1e-3, 1e-9):
        tilt, guess = loss._Sketch.of(parts, delta).for_delta(delta)
        composed = loss._convolve(parts, factor * tilt, guess, delta)
        assert composed is not None
        for epsilon in np.linspace(0, 3.2, 30):
            assert exact_delta(kinds, float(epsilon)) <= composed.delta(float(epsilon)) <= 1


def exact_tilted(losses: Sequence[loss._Losses], tilt: float) -> list[mpf]:
    """The tilted distribution of the sum, by multiplying polynomials in 40 digits."""
    total = [mpf(1)]
    for part in losses:
        scale = mpf(part.tilted(tilt)[0])
        factor = [
            mpf(float(mass)) * mpmath.exp(mpf(tilt) * (part.first + i) * mpf(part.spacing) - scale)
            for i, mass in enumerate(part.mass)
        ]
        for _ in range(part.times):
            product = [mpf(0)] * (len(total) + len(factor) - 1)
            for (i, a), (j, b) in itertools.product(enumerate(total), enumerate(factor)):
                product[i + j] += a * b
            total = product
    return total


@pytest.mark.parametrize("tilt", [0.0, 1.3, 9.0])
def test_the_error_of_a_convolution_is_within_its_bound(tilt: float) -> None:
    rng = np.random.default_rng(5)
    losses = [
        loss._Losses(0.125, -3, rng.random(8) / 8, 0.0, 11),
        loss._Losses(0.125, -1, np.array([0.25, 0.0, 0.75]), 0.0, 40),
    ]
    first, last = (sum(part.times * getattr(part, end) for part in losses) for end in ("first", "last"))
    composed = loss._convolve_tilted(losses, tilt, loss._Window(first, last, 0.0), tight=True)
    exact = exact_tilted(losses, tilt)
    error = mpmath.sqrt(sum((mpf(float(a)) - b) ** 2 for a, b in zip(composed.mass, exact, strict=True)))
    assert 0 < error <= composed.error < 1e-11
    often = [replace(part, times=100 * part.times) for part in losses]
    assert loss._convolve_tilted(often, tilt, loss._Window(first, last, 0.0), tight=True).error >= 100 * composed.error


@pytest.mark.parametrize("tilt", [0.5, 4.0])
def test_the_mass_above_a_window_is_within_its_bound(tilt: float) -> None:
    losses = [loss._Losses.of(response(0.2), 60, 0.2, (0.2, 0.2))]
    window = loss._find_window(losses, tilt)
    exact = exact_tilted(losses, tilt)
    above = sum(exact[window.last - 60 * losses[0].first + 1 :])
    assert 0 < above <= window.above < 1e-14


def composed_responses() -> loss._Convolution:
    losses = [loss._Losses.of(response(0.2), 60, 0.2, (0.2, 0.2))]
    ends = (60 * losses[0].first, 60 * losses[0].last)
    return replace(loss._convolve_tilted(losses, 1.0, loss._Window(*ends, 0.0), tight=True), error=0.0)


@pytest.mark.parametrize("epsilon", [0.0, 1.1, 4.0])
def test_a_convolution_that_errs_as_far_as_it_may_is_still_a_bound(epsilon: float) -> None:
    """The worst error takes from each mass in proportion to what it counts."""
    whole = composed_responses()
    weights = np.maximum(-np.expm1(epsilon - whole.losses), 0) * np.exp(-whole.tilt * (whole.losses - epsilon))
    error = 1e-3
    wrong = replace(whole, mass=whole.mass - error * weights / np.linalg.norm(weights), error=error)
    assert replace(wrong, error=0.0).delta(epsilon) < 0.999 * whole.delta(epsilon)
    assert whole.delta(epsilon) <= wrong.delta(epsilon) * (1 + 1e-12)


@pytest.mark.parametrize("last", [3, 9, 21])
def test_what_was_cut_off_above_a_window_is_counted(last: int) -> None:
    whole = composed_responses()
    end = int(np.searchsorted(whole.losses, 0.2 * last))
    cut = replace(whole, losses=whole.losses[:end], mass=whole.mass[:end], above=float(np.sum(whole.mass[end:])))
    for epsilon in np.linspace(0, 0.2 * last - 0.3, 7):
        assert replace(cut, above=0.0).delta(float(epsilon)) < 0.999 * whole.delta(float(epsilon))
        assert whole.delta(float(epsilon)) <= cut.delta(float(epsilon)) * (1 + 1e-12)


def test_transforms_err_by_no_more_than_the_lemma_says() -> None:
    rng = np.random.default_rng(3)
    for stages in (4, 7, 10, 13, 16):
        size = 2**stages
        for values in (rng.random(size), rng.exponential(size=size) ** 4, np.eye(1, size, 3)[0]):
            exact = fft.rfft(values.astype(np.longdouble))
            error = np.linalg.norm((fft.rfft(values) - exact).astype(complex))
            assert error <= 6 * stages * 2.0**-53 * np.linalg.norm(exact.astype(complex))


def exact_curve(event: DpEvent, log: mpf) -> mpf:
    """H(a) - max(1 - a, 0), exactly."""
    if log < 0:
        return mpmath.exp(log) * exact_curve(event, -log)
    if isinstance(event, GaussianDpEvent):
        return gaussian(event.noise_multiplier, log)
    if isinstance(event, LaplaceDpEvent):
        return max(1 - mpmath.exp((log - 1 / mpf(event.noise_multiplier)) / 2), mpf(0))
    assert isinstance(event, PureDp)
    return max(1 - mpmath.exp(log - mpf(event.epsilon)), mpf(0)) / (1 + mpmath.exp(-mpf(event.epsilon)))


def scale_of(event: DpEvent) -> float:
    return event.epsilon if isinstance(event, PureDp) else 1 / float(event.noise_multiplier)


@pytest.mark.parametrize(
    "event", [GaussianDpEvent(0.7), GaussianDpEvent(40.0), LaplaceDpEvent(1.7), PureDp(0.8), PureDp(1e-5)], ids=str
)
def test_curves_are_above_the_truth_by_a_hair(event: DpEvent) -> None:
    logs = np.array([-6, -1.001, -0.5, -1e-9, 0, 1e-3, 0.7, 0.999, 1.0, 2.5, 7]) * scale_of(event)
    for log, value in zip(logs, make_loss_curves(event, 1)[0](logs), strict=True):
        exact = exact_curve(event, mpf(float(log)))
        assert exact <= value <= exact * (1 + mpf("1e-11")) + 1e-13 * scale_of(event)


@pytest.mark.parametrize("event", [GaussianDpEvent(0.7), GaussianDpEvent(40.0), LaplaceDpEvent(1.7)])
@pytest.mark.parametrize("rate", [0.01, 0.3])
def test_curves_of_samples_are_above_the_truth_by_a_hair(event: DpEvent, rate: float) -> None:
    remove, add, _ = make_loss_curves(PoissonSampledDpEvent(rate, event), 1)
    logs = np.array([-3, -1.001, -0.1, 0, 1e-3, 0.5, 1.0, 4]) * rate * scale_of(event)
    for log, first, second in zip(logs, remove(logs), add(logs), strict=True):
        a = mpmath.exp(mpf(float(log)))
        inner = 1 + (a - 1) / mpf(rate)
        exact = mpf(rate) * exact_curve(event, mpmath.log(inner)) if inner > 0 else mpf(0)
        assert exact <= first <= exact * (1 + mpf("1e-9")) + 1e-15 * scale_of(event)
        inner = 1 + (1 / a - 1) / mpf(rate)
        exact = a * mpf(rate) * exact_curve(event, mpmath.log(inner)) if inner > 0 else mpf(0)
        assert exact <= second <= exact * (1 + mpf("1e-9")) + 1e-15 * scale_of(event)


@pytest.mark.parametrize("direction", ["remove", "add"])
def test_two_sampled_gaussians_against_an_integral(direction: str) -> None:
    """H of the pair is the mean of H of the second, at what the first leaves; the integral is by quadrature."""
    multiplier, rate, epsilon = 0.9, 0.2, 0.6 if direction == "remove" else 0.2
    mean, scale = 1 / mpf(multiplier), mpf(rate)

    def divergence(log: mpf) -> mpf:
        """H(a) of one, with the record above the line."""
        inner = 1 + (mpmath.exp(log) - 1) / scale
        return scale * gaussian(multiplier, mpmath.log(inner)) if inner > 0 else 1 - mpmath.exp(log)

    def ratio(x: mpf) -> mpf:
        return mpmath.log(1 - scale + scale * mpmath.exp(mean * x - mean**2 / 2))

    def integrand(x: mpf) -> mpf:
        if direction == "remove":
            return mpmath.npdf(x) * mpmath.exp(ratio(x)) * divergence(mpf(epsilon) - ratio(x))
        left = mpf(epsilon) + ratio(x)
        return mpmath.npdf(x) * (1 - mpmath.exp(left) + mpmath.exp(left) * divergence(-left))

    with mpmath.workdps(15):
        exact = float(mpmath.quad(integrand, [-12, -4, -1, 0, 1, 2, 4, 7, 12]))
    [remove, add] = PldAccountant().compose(sampled(rate, multiplier), 2)._directions()
    bound = loss.find_loss_delta(remove if direction == "remove" else add, epsilon).value
    assert exact * (1 - 1e-9) <= bound <= exact * (1 + 1e-3)


def sampled(rate: float, multiplier: float) -> DpEvent:
    return PoissonSampledDpEvent(rate, GaussianDpEvent(multiplier))


@pytest.mark.parametrize(("epsilon", "worse"), [(0.05, "add"), (0.25, "remove")])
def test_the_worse_direction_counts(epsilon: float, worse: str) -> None:
    """Two samples with Laplace noise, seen through cells, which show no more than there is."""
    edges = np.array([-np.inf, *np.linspace(-8, 9, 801), np.inf])
    without, moved = (np.diff(laplace.cdf(edges, at, 2.0)) for at in (0.0, 1.0))
    with_record = 0.7 * without + 0.3 * moved
    pairs = {"add": (without, with_record), "remove": (with_record, without)}
    shown = {
        name: float(np.sum(np.maximum(np.outer(p, p) - math.exp(epsilon) * np.outer(q, q), 0)))
        for name, (p, q) in pairs.items()
    }
    bound = PldAccountant().compose(PoissonSampledDpEvent(0.3, LaplaceDpEvent(2.0)), 2).delta(epsilon)
    assert max(shown, key=shown.__getitem__) == worse
    assert max(shown.values()) <= bound <= 1.01 * max(shown.values())
    assert min(shown.values()) < 0.99 * bound


@pytest.mark.parametrize("spacing", [1e-4, 0.03, 1.7])
@pytest.mark.parametrize("event", [GaussianDpEvent(2.0), LaplaceDpEvent(1.3), PureDp(0.77), sampled(0.1, 0.8)])
def test_a_distribution_on_a_grid_dominates_its_mechanism(event: DpEvent, spacing: float) -> None:
    for curve in make_loss_curves(event, 1)[:2]:
        losses = loss._Losses.of(curve, 1, spacing, (2.0, 5.0))
        for log in np.linspace(-1.5, 4.5, 25):
            above = np.maximum(-np.expm1(log - losses.losses), 0)
            divergence = losses.infinite + float(np.sum(above * losses.mass))
            assert divergence >= curve(np.array([log]))[0] + max(-math.expm1(log), 0.0) - 1e-15
        assert 1 - 1e-14 <= losses.infinite + float(np.sum(losses.mass)) <= 1 + 1e-8


def test_a_loss_without_end_is_counted() -> None:
    loud = PldAccountant().compose(sampled(1e-4, 1e-3), 10)  # whoever is sampled stands out
    assert 1 - (1 - 1e-4) ** 10 <= loud.delta(5.0) <= 1.001e-3
    assert loud.epsilon(1e-3 - 1e-6) == math.inf
    assert loud.epsilon(1.1e-3) < 1


EVENTS: list[DpEvent] = [
    PureDp(1e-6),
    PureDp(2.0),
    GaussianDpEvent(50.0),
    LaplaceDpEvent(3.0),
    RandomizedResponseDpEvent(0.4, 5),
    sampled(0.05, 1.5),
]


@pytest.mark.parametrize("event", EVENTS, ids=str)
def test_the_least_certificate_counts(event: DpEvent) -> None:
    for count in (1, 60, 20_000):
        best, rdp = PldAccountant().compose(event, count), RdpAccountant().compose(event, count)
        assert best.epsilon(1e-6) <= rdp.epsilon(1e-6) * (1 + 1e-4)
        assert best.delta(1.0) <= rdp.delta(1.0) * (1 + 1e-4)


def test_beyond_what_a_grid_resolves_renyi_divergences_answer() -> None:
    event, count = PureDp(1e-7), 10**12
    best, rdp = PldAccountant().compose(event, count), RdpAccountant().compose(event, count)
    assert best.epsilon(1e-6) == rdp.epsilon(1e-6) < 1
    assert best.delta(0.5) == rdp.delta(0.5) < 1e-3
    unknown = PldAccountant().compose(PoissonSampledDpEvent(0.1, LaplaceDpEvent(1e6)), 10**12)  # not even they
    assert unknown.epsilon(1e-6) == math.inf
    assert 0 < unknown.delta(1.0) <= 1


def test_many_kinds_together_cost_what_one_kind_costs() -> None:
    apart, alike = PldAccountant(), PldAccountant().compose(PureDp(0.1), 60)
    for i in range(60):
        apart.compose(PureDp(0.1 * (1 + 1e-9 * i)))
    assert alike.epsilon(1e-6) <= apart.epsilon(1e-6) <= alike.epsilon(1e-6) * (1 + 1e-4)


def test_sums_of_pure_epsilons_are_rounded_up() -> None:
    for epsilon, count in ((0.1, 3), (0.7, 10), (1 / 3, 7)):
        total = PldAccountant().compose(PureDp(epsilon), count).epsilon(1e-300)
        assert mpf(epsilon) * count <= total <= epsilon * count * (1 + 1e-15)
