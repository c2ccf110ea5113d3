"""From counts and samples to an epsilon that is shown: intervals that hold whatever the mechanism is.

Proofs: ``docs/theory/audit.md``. Every function takes `mistake`, the probability with which its interval may be wrong.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import betaincinv

Floats = NDArray[np.float64]
Interval = tuple[float, float]

_FINE = 400  # steps of the ladder up to four times the stated epsilon
_GROWTH = 1.005  # of the ladder beyond
_TOP = 1000.0
_LEAST_STEP = 1e-4
_PURE = 1e-9  # a delta below is what samplers of finite precision cost


def proportion(hits: NDArray[np.int64] | int, runs: int, mistake: float) -> tuple[Floats, Floats]:
    """Return the Clopper-Pearson interval of a probability, each end wrong with `mistake` / 2 at most (Lemma 1)."""
    counts = np.asarray(hits)
    low = np.where(counts > 0, betaincinv(np.maximum(counts, 1), runs - counts + 1, mistake / 2), 0.0)
    high = np.where(counts < runs, betaincinv(counts + 1, np.maximum(runs - counts, 1), 1 - mistake / 2), 1.0)
    return low, high


def event_epsilon(
    hits: NDArray[np.int64] | int,
    false_hits: NDArray[np.int64] | int,
    runs: int,
    delta: float,
    mistake: float,
) -> tuple[Floats, Floats]:
    """Return the interval of ``ln((P(S) - delta) / Q(S))``, at least 0, for an event S that came so often (Theorem 2).

    No guarantee of (epsilon, delta) with an epsilon below the lower end can be true, unless something happened
    whose probability is at most `mistake` / 2. Attacked by ``tests/audit/test_bounds.py``.
    """
    p_low, p_high = proportion(hits, runs, mistake / 2)
    q_low, q_high = proportion(false_hits, runs, mistake / 2)
    with np.errstate(divide="ignore", invalid="ignore"):
        low = np.log(np.maximum(p_low - delta, 0) / q_high)
        high = np.log(np.maximum(p_high - delta, 0) / q_low)
    high = np.where(p_high <= delta, 0.0, high)
    return np.maximum(low, 0.0), np.maximum(high, 0.0)


@dataclass(frozen=True)
class Moments:
    """Mean and variance of values between 0 and 1."""

    mean: float
    variance: float
    count: int

    def low(self, mistake: float) -> float:
        """Return the empirical Bernstein bound from below (Maurer and Pontil 2009; Lemma 3)."""
        odds = math.log(2 / mistake)
        width = math.sqrt(2 * self.variance * odds / self.count) + 7 * odds / (3 * (self.count - 1))
        return self.mean - width

    def high(self, mistake: float) -> float:
        """Return Chernoff's bound from above (Lemma 4): sharper than Bernstein's where nearly all values are 0."""
        odds = math.log(1 / mistake) / self.count
        if self.mean >= 1:
            return 1.0
        if _divergence(self.mean, 1 - 1e-15) <= odds:
            return 1.0
        return float(brentq(lambda at: _divergence(self.mean, at) - odds, max(self.mean, 1e-300), 1 - 1e-15))


def _divergence(mean: float, at: float) -> float:
    """Return the Kullback-Leibler divergence of two coins."""
    hit = mean * math.log(mean / at) if mean > 0 else 0.0
    return hit + (1 - mean) * math.log((1 - mean) / (1 - at))


class HockeyStick:
    """The divergence ``E_P[(1 - e^(epsilon - L))+]`` at any epsilon, of samples of L = ``ln p/q`` under P."""

    def __init__(self, losses: Floats) -> None:
        given = np.asarray(losses, dtype=np.float64)
        if np.isnan(given).any():
            raise ValueError("losses must be numbers or infinite: a density is zero under both inputs")
        # Only positive ones count at an epsilon of at least 0; the largest come first.
        self._sorted = np.sort(given[given > 0])[::-1]
        self._count = len(given)
        ratios = np.exp(-self._sorted)
        self._sums = np.concatenate([[0.0], np.cumsum(ratios)])
        self._squares = np.concatenate([[0.0], np.cumsum(ratios**2)])

    def at(self, epsilon: float) -> Moments:
        """Return the moments of ``(1 - e^(epsilon - L))+``."""
        above = int(np.searchsorted(-self._sorted, -epsilon))
        if above == 0:
            return Moments(0.0, 0.0, self._count)
        scale = math.exp(epsilon)
        linear, square = scale * float(self._sums[above]), scale**2 * float(self._squares[above])
        total, squares = above - linear, above - 2 * linear + square
        mean = min(max(total / self._count, 0.0), 1.0)
        variance = max(squares - self._count * mean**2, 0.0) / (self._count - 1)
        return Moments(mean, variance, self._count)

    def interval(self, delta: float, mistake: float, steps: Floats) -> Interval:
        """Return between which of the rising epsilons `steps` the divergence falls to `delta` (Theorem 5).

        Each end is wrong with a probability of at most `mistake` / 2. The hypotheses "the divergence at this
        epsilon is at most delta" are nested, so they are tested one after the other, and the ladder is free.
        For a delta below 1e-9 the upper end leaves out what is too rare to be seen in so many runs.
        """
        shown = 0.0
        for epsilon in steps:
            if not self.at(float(epsilon)).low(mistake / 2) > delta:
                break
            shown = float(epsilon)
        highest = math.inf
        # A pure guarantee has no probability below which nothing counts, but so many runs see only so much.
        least = delta if delta > _PURE else 2 * math.log(2 / mistake) / self._count
        for epsilon in steps[::-1]:
            if not self.at(float(epsilon)).high(mistake / 2) <= least:
                break
            highest = float(epsilon)
        return shown, max(highest, shown)


def ladder(epsilon: float) -> Floats:
    """Return the epsilons that are tried, rising from 0: fine around what is stated, coarser far above it."""
    stated = min(epsilon, 10.0) if math.isinf(epsilon) else epsilon
    step = max(stated * 4 / _FINE, _LEAST_STEP)
    fine: Floats = step * np.arange(_FINE + 1, dtype=np.float64)
    if fine[-1] >= _TOP:
        return fine
    beyond = fine[-1] * _GROWTH ** np.arange(1, math.ceil(math.log(_TOP / fine[-1], _GROWTH)) + 1)
    return np.concatenate([fine, beyond])


def one_run_epsilon(correct: int, guesses: int, records: int, delta: float, mistake: float) -> float:
    """Return the epsilon that one run with many records shows (Theorem 6; Steinke, Nasr and Jagielski 2023).

    0 where nothing is shown, which is always so if ``records * delta`` reaches `mistake`.
    """
    rest = mistake - records * delta
    if rest <= 0 or guesses == 0:
        return 0.0
    chance = float(proportion(correct, guesses, 2 * rest)[0])
    return max(0.0, math.log(chance / (1 - chance))) if 0 < chance < 1 else 0.0
