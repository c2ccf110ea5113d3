"""The bounds, exactly: by summing over everything that could have been counted, not by sampling."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom, binomtest, norm

from nearveil.audit._scores import (
    Guesser,
    HockeyStick,
    Moments,
    bound_event_epsilon,
    bound_one_run_epsilon,
    bound_proportion,
    choose_guesser,
    list_epsilons,
)


@pytest.mark.parametrize(("hits", "runs"), [(0, 50), (1, 50), (25, 50), (50, 50), (3, 100_000)])
def test_clopper_pearson_is_that_of_scipy(hits: int, runs: int) -> None:
    low, high = bound_proportion(hits, runs, 0.03)
    exact = binomtest(hits, runs).proportion_ci(0.97, "exact")
    np.testing.assert_allclose([float(low), float(high)], [exact.low, exact.high], rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 0.0), (1.0, 0.0), (1.0, 0.05), (3.0, 0.0)])
@pytest.mark.parametrize("alpha", [0.05, 0.3])
def test_an_event_shows_too_much_as_seldom_as_promised(epsilon: float, delta: float, alpha: float) -> None:
    """Sum over all counts of two worlds that are exactly as far apart as they may be."""
    runs = 80
    for q in (0.02, 0.1, (1 - delta) / (1 + math.exp(epsilon))):
        p = min(1.0, math.exp(epsilon) * q + delta)
        counts = np.arange(runs + 1)
        low, high = bound_event_epsilon(counts[:, None], counts[None, :], runs, delta, alpha)
        chances = binom.pmf(counts, runs, p)[:, None] * binom.pmf(counts, runs, q)[None, :]
        assert chances[low > epsilon].sum() <= alpha / 2
        assert chances[high < math.log((p - delta) / q)].sum() <= alpha / 2 + 1e-12
    # Not idle: a bound that were half as careful would be wrong more often than it may be.
    careless = bound_event_epsilon(counts[:, None], counts[None, :], runs, delta, 0.999)[0]
    assert chances[careless > epsilon].sum() > 0.1


@pytest.mark.parametrize("alpha", [0.2, 0.01])
@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.97])
def test_means_of_coins_stay_within_their_bounds(p: float, alpha: float) -> None:
    runs = 300
    counts = np.arange(runs + 1)
    chances = binom.pmf(counts, runs, p)
    found = [Moments(k / runs, k * (runs - k) / runs / (runs - 1), runs) for k in counts]
    assert chances[[one.low(alpha) > p for one in found]].sum() <= alpha
    assert chances[[one.high(alpha) < p for one in found]].sum() <= alpha
    assert max(one.high(alpha) for one in found) <= 1.0


def test_nothing_seen_bounds_what_may_be() -> None:
    assert Moments(0.0, 0.0, 1000).high(0.05) == pytest.approx(1 - 0.05 ** (1 / 1000))
    assert Moments(1.0, 0.0, 1000).high(0.05) == 1.0
    assert Moments(0.9, 0.01, 3).high(0.05) == 1.0 or Moments(0.9, 0.01, 3).high(0.05) > 0.9


@given(st.lists(st.floats(-5, 5), min_size=5, max_size=60), st.floats(0, 4))
@settings(max_examples=60, deadline=None)
def test_moments_are_those_of_the_values(losses: list[float], epsilon: float) -> None:
    values = np.maximum(1 - np.exp(epsilon - np.array(losses)), 0)
    found = HockeyStick(np.array(losses)).at(epsilon)
    assert found.mean == pytest.approx(values.mean(), abs=1e-12)
    assert found.variance == pytest.approx(values.var(ddof=1), abs=1e-12)


def test_infinite_losses_count_in_full() -> None:
    found = HockeyStick(np.array([np.inf, np.inf, 1.0, -3.0])).at(5.0)
    assert found.mean == 0.5
    with pytest.raises(ValueError, match="losses must be numbers"):
        HockeyStick(np.array([np.nan, 1.0]))


def test_the_interval_of_a_gaussian_holds_its_epsilon() -> None:
    """Normal losses of a Gaussian mechanism with multiplier 1: the curve is known. A alpha has a chance of 1e-6."""
    generator, sigma, delta = np.random.default_rng(0), 1.0, 1e-3
    losses = generator.normal(1 / (2 * sigma**2), 1 / sigma, 200_000)

    def divergence(epsilon: float) -> float:
        a, b = 1 / (2 * sigma) - epsilon * sigma, -1 / (2 * sigma) - epsilon * sigma
        return float(norm.cdf(a) - math.exp(epsilon) * norm.cdf(b))

    low, high = HockeyStick(losses).interval(delta, 1e-6, list_epsilons(3.0))
    assert divergence(high) <= delta <= divergence(low)
    assert high - low < 0.35
    # What was drawn with half the deviation is farther apart, and is not taken for the same.
    closer = generator.normal(1 / (2 * 0.25), 2.0, 200_000)
    assert HockeyStick(closer).interval(delta, 1e-6, list_epsilons(3.0))[0] > high


def test_a_ladder_rises_from_zero_past_every_promise() -> None:
    for promise in (1e-3, 0.5, 4.0, 60.0, 800.0, math.inf):
        steps = list_epsilons(promise)
        assert steps[0] == 0
        assert (np.diff(steps) > 0).all()
        assert steps[-1] >= 1000.0 or steps[-1] >= 2 * promise
        if math.isfinite(promise):
            assert np.abs(steps - promise).min() <= 0.01 * promise + 1e-4


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
@pytest.mark.parametrize("alpha", [0.05, 0.2])
def test_one_run_shows_too_much_as_seldom_as_promised(epsilon: float, alpha: float) -> None:
    guesses = 200
    p = math.exp(epsilon) / (1 + math.exp(epsilon))
    wrong = sum(
        binom.pmf(correct, guesses, p)
        for correct in range(guesses + 1)
        if bound_one_run_epsilon(correct, guesses, guesses, 0.0, alpha) > epsilon
    )
    assert 0 < wrong <= alpha


def test_one_run_pays_delta_for_every_record() -> None:
    assert bound_one_run_epsilon(990, 1000, 1000, 0.0, 0.05) > bound_one_run_epsilon(990, 1000, 1000, 4e-5, 0.05) > 3.5
    assert bound_one_run_epsilon(990, 1000, 1000, 5e-5, 0.05) == 0.0
    assert bound_one_run_epsilon(0, 0, 1000, 0.0, 0.05) == 0.0
    assert bound_one_run_epsilon(500, 1000, 1000, 0.0, 0.05) == 0.0


def test_guesses_are_made_where_they_are_sure() -> None:
    generator = np.random.default_rng(1)
    first, second = generator.normal(1, 1, 20_000), generator.normal(-1, 1, 20_000)
    guesser = choose_guesser(first, second, 0.05)
    assert guesser.low < -1.5 < 1.5 < guesser.high
    assert Guesser(-1.0, 1.0)(np.array([-2.0, 0.0, 1.0])).tolist() == [-1, 0, 1]


def test_bernstein_is_the_published_formula() -> None:
    """0.1 less sqrt(2 * 0.09 * ln 40 / 1000), less 7 ln 40 / (3 * 999); by hand, ln 40 = 3.688879."""
    assert Moments(0.1, 0.09, 1000).low(0.05) == pytest.approx(0.1 - 0.025768 - 0.008616, abs=1e-6)


def test_a_climb_ends_at_the_first_step_that_fails() -> None:
    """A later step that passes, perhaps by chance, is not reached: that is what makes the ladder free."""

    class Gapped(HockeyStick):
        def at(self, epsilon: float) -> Moments:
            return Moments(0.0 if epsilon == 2.0 else 0.9, 0.0, 10_000)

    steps = np.array([0.0, 1.0, 2.0, 3.0, 4.0])
    assert Gapped(np.ones(3)).interval(0.1, 0.05, steps) == (1.0, math.inf)


@pytest.mark.parametrize("delta", [0.0, 0.1])
def test_the_epsilon_of_an_event_is_too_large_as_seldom_as_was_said(delta: float) -> None:
    """Over all counts, exactly; and what is shown is not so little that a shift of a twentieth would hide in it."""
    runs, p, q, alpha = 20_000, 0.6, 0.2, 0.05
    hits, false_hits = (np.arange(int(runs * one) - 600, int(runs * one) + 600) for one in (p, q))
    chance = np.outer(binom.pmf(hits, runs, p), binom.pmf(false_hits, runs, q))
    low, high = bound_event_epsilon(hits[:, None], false_hits[None, :], runs, delta, alpha)
    true = math.log((p - delta) / q)
    assert float(chance[low > true].sum()) <= alpha / 2
    assert float(chance[high < true].sum()) <= alpha / 2
    assert float(chance[low + 0.05 > true].sum()) > 0.5
    assert float(chance[high - 0.05 < true].sum()) > 0.5
