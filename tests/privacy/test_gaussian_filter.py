"""The Gaussian filter: its limit in 60 digits, adaptive spenders, and the noise that is really added."""

import math
from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, LaplaceDpEvent, PoissonSampledDpEvent, UnsupportedEventError
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from nearveil.privacy import Basis, Guarantee, compose
from nearveil.privacy.accounting import BudgetExceededError, GaussianFilter, PldAccountant, RenyiFilter
from nearveil.privacy.events import ClippedVotes, GaussianNoisyMax, NoisyScreening, PureDp, VoteHistogram
from nearveil.privacy.guarantee import FilterTerms
from nearveil.privacy.noise import GaussianNoise


def true_delta(square: Fraction, epsilon: float) -> Any:
    """Return Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu), with 60 digits."""
    mu, at = mpmath.sqrt(mpmath.mpf(square.numerator) / square.denominator), mpmath.mpf(epsilon)
    return mpmath.ncdf(mu / 2 - at / mu) - mpmath.exp(at) * mpmath.ncdf(-mu / 2 - at / mu)


@settings(deadline=None, max_examples=40)
@given(st.floats(1e-3, 64), st.floats(-17, -1))
def test_the_limit_is_sufficient_and_nearly_necessary(epsilon: float, exponent: float) -> None:
    delta = 10.0**exponent
    gate = GaussianFilter(epsilon, delta)
    with mpmath.workdps(60):
        assert true_delta(gate.limit, epsilon) <= delta
        assert true_delta(gate.limit * Fraction(1001, 1000), epsilon) > delta


@pytest.mark.parametrize(("epsilon", "gaussian", "renyi"), [(1.0, 560, 394), (2.0, 2010, 1487), (4.0, 7020, 5399)])
def test_answers_of_a_budget(epsilon: float, gaussian: int, renyi: int) -> None:
    """Noise 100, delta 1e-6: the figures of docs/theory/accounting.md. As many as a fixed plan has."""
    answer = GaussianDpEvent(100.0)
    for gate, count in ((GaussianFilter(epsilon, 1e-6), gaussian), (RenyiFilter(epsilon, 1e-6), renyi)):
        assert [gate.may_spend(answer, n) for n in (count, count + 1)] == [True, False]
    plan = [PldAccountant().compose(answer, n).epsilon(1e-6) for n in (gaussian, gaussian + 1)]
    assert plan[0] <= epsilon < plan[1]


def test_it_stops_in_time_and_takes_all_kinds_of_unsampled_gaussians() -> None:
    gate = GaussianFilter(1.0, 1e-6)
    kinds = (GaussianDpEvent(50.0), NoisyScreening(40.0, 3.0, 9), VoteHistogram(60.0), GaussianNoisyMax(70.0))
    for event in (*kinds, ClippedVotes(80.0, 2.0, "binary"), PoissonSampledDpEvent(1.0, GaussianDpEvent(90.0))):
        gate.spend(event, 2)
    with pytest.raises(BudgetExceededError, match="release nothing"):
        gate.spend(GaussianDpEvent(4.0))
    assert sum(times for _, times in gate.spent) == 12
    sampled = [PoissonSampledDpEvent(0.1, each) for each in (GaussianDpEvent(99.0), NoisyScreening(99.0, 3.0, 9))]
    for event in (PureDp(0.01), LaplaceDpEvent(99.0), *sampled):
        with pytest.raises(UnsupportedEventError):
            gate.spend(event)
    with pytest.raises(ValueError, match="epsilon must"):
        GaussianFilter(65.0, 1e-6)
    with pytest.raises(ValueError, match="delta must"):
        GaussianFilter(1.0, 0.0)


def test_no_adaptive_spender_beats_the_filter() -> None:
    """Two answers: the second's noise is the best for each first answer, within the filter; by integration."""
    epsilon, delta = 1.0, 1e-3
    limit = float(GaussianFilter(epsilon, delta).limit)
    first = 0.6 * limit

    def leak(room: float) -> float:
        losses = np.linspace(first / 2 - 9 * math.sqrt(first), first / 2 + 9 * math.sqrt(first), 4001)
        weights = norm.pdf(losses, first / 2, math.sqrt(first)) * (losses[1] - losses[0])
        best = np.maximum(-np.expm1(np.minimum(epsilon - losses, 0)), 0)  # after a stop
        for square in np.linspace(0.05, 1, 20) * room:
            mu, rest = math.sqrt(square), epsilon - losses
            more = norm.cdf(mu / 2 - rest / mu) - np.exp(rest) * norm.cdf(-mu / 2 - rest / mu)
            best = np.maximum(best, more)
        return float(np.sum(weights * best))

    assert leak(limit - first) == pytest.approx(delta, rel=1e-3)
    assert leak(limit - first) <= delta * (1 + 1e-6)
    assert leak(1.1 * limit - first) > 1.2 * delta  # a filter that is a tenth too generous


@pytest.mark.parametrize("grid", [0.125, 0.5])
def test_the_noise_that_is_added_keeps_the_promise(grid: float) -> None:
    """Discrete Gaussians on a coarse grid, as the sampler draws them, composed exactly, against the filter's price."""
    noise, epsilon, count = GaussianNoise(sensitivity=1.0, scale=4.0, size=1, grid=grid), 1.0, 4
    steps = np.arange(-round(60 / grid), round(60 / grid) + 1)
    mass = np.exp(-((steps * grid) ** 2) / (2 * noise.scale**2))
    mass /= mass.sum()
    # Values rounded to the grid differ by up to the sensitivity, plus one step.
    shift = round(1.0 / grid) + 1
    log_ratio = ((steps * grid - shift * grid) ** 2 - (steps * grid) ** 2) / (2 * noise.scale**2)
    unit = grid * shift * grid / noise.scale**2  # losses are multiples of it, up to one offset
    start = log_ratio[0]
    total = mass
    for _ in range(count - 1):
        total = np.convolve(total, mass)
    losses = count * start - unit * np.arange(len(total))
    delta = float(np.sum(total * np.maximum(-np.expm1(np.minimum(epsilon - losses, 0)), 0)))
    price = count / Fraction(noise.noise_multiplier) ** 2
    with mpmath.workdps(40):
        assert 0.3 * float(true_delta(price, epsilon)) < delta <= float(true_delta(price, epsilon))
        assert delta > float(true_delta(price / 2, epsilon))  # twice the noise would be caught


def test_a_composed_guarantee_has_the_terms_of_the_filter() -> None:
    gate, answer = GaussianFilter(1.0, 1e-6), GaussianDpEvent(40.0)
    stated: dict[str, Any] = {"protects": "query", "unit": "image", "relation": "replace", "basis": Basis("a test")}
    once = Guarantee(epsilon=1.0, delta=1e-6, events=(answer,), **stated)
    gate.spend(answer, 80)
    with pytest.raises(ValueError, match="exactly these events"):
        compose([once] * 79, within=gate)
    whole = compose([once] * 80, within=gate)
    assert (whole.epsilon, whole.delta, whole.within) == (1.0, 1e-6, FilterTerms(1.0, 1e-6))
    assert whole.basis.name == "Gaussian filter, parameters chosen adaptively"
    assert not RenyiFilter(1.0, 1e-6).may_spend(answer, 80)
    for events in ((*whole.events, *[answer] * 10), (*whole.events, VoteHistogram(8.0))):
        with pytest.raises(ValueError, match="within the filter"):
            Guarantee(
                epsilon=1.0, delta=1e-6, events=events, within=whole.within, **{**stated, "relation": "add-remove"}
            )
