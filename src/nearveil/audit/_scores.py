"""Attacks on outcomes: scores and events that separate two worlds, and bounds on the epsilon that they show.

Bounds hold for every mechanism; each takes `alpha`, its error probability. Proofs: ``docs/theory/audit.md``.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product, takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import betaincinv, rel_entr
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_limits

from nearveil.audit._experiment import Experiment, Floats, Outcomes, Pair, hash_rows
from nearveil.privacy import Guarantee
from nearveil.privacy.noise import Source

Interval = tuple[float, float]
Bound = Callable[[float], Interval]
"""From the error probability to an interval of epsilon."""

_FINE = 400  # steps of the ladder up to four times the stated epsilon
_GROWTH = 1.005  # of the ladder beyond
_TOP = 1000.0
_LEAST_STEP = 1e-4
_PURE = 1e-9  # a smaller delta only accounts for the finite precision of samplers


def bound_proportion(hits: NDArray[np.int64] | int, runs: int, alpha: float) -> tuple[Floats, Floats]:
    """Return the Clopper-Pearson interval of a probability, each end at error `alpha` / 2 (Lemma 1)."""
    counts = np.asarray(hits)
    low = np.where(counts > 0, betaincinv(np.maximum(counts, 1), runs - counts + 1, alpha / 2), 0.0)
    high = np.where(counts < runs, betaincinv(counts + 1, np.maximum(runs - counts, 1), 1 - alpha / 2), 1.0)
    return low, high


def bound_event_epsilon(
    hits: NDArray[np.int64] | int, false_hits: NDArray[np.int64] | int, runs: int, delta: float, alpha: float
) -> tuple[Floats, Floats]:
    """Return the interval of ``ln((P(S) - delta) / Q(S))`` for an event S; each end errs with chance `alpha` / 2."""
    # Theorem 2; the interval starts at 0 or above. Tests: tests/audit/test_bounds.py.
    p_low, p_high = bound_proportion(hits, runs, alpha / 2)
    q_low, q_high = bound_proportion(false_hits, runs, alpha / 2)
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

    def low(self, alpha: float) -> float:
        """Return the empirical Bernstein lower bound (Maurer and Pontil 2009; Lemma 3)."""
        odds = math.log(2 / alpha)
        width = math.sqrt(2 * self.variance * odds / self.count) + 7 * odds / (3 * (self.count - 1))
        return self.mean - width

    def high(self, alpha: float) -> float:
        """Return Chernoff's upper bound (Lemma 4), sharper than Bernstein's if nearly all values are 0."""
        odds = math.log(1 / alpha) / self.count
        if self.mean >= 1:
            return 1.0
        if self.mean <= 0:
            return -math.expm1(-odds)
        if _compute_divergence(self.mean, 1 - 1e-15) <= odds:
            return 1.0
        return float(brentq(lambda at: _compute_divergence(self.mean, at) - odds, max(self.mean, 1e-300), 1 - 1e-15))


def _compute_divergence(mean: float, at: float) -> float:
    """Return the Kullback-Leibler divergence of two coins."""
    return float(rel_entr(mean, at) + rel_entr(1 - mean, 1 - at))


class HockeyStick:
    """The divergence ``E_P[(1 - e^(epsilon - L))+]`` at any epsilon, of samples of L = ``ln p/q`` under P."""

    def __init__(self, losses: Floats) -> None:
        values = np.asarray(losses, dtype=np.float64)
        if np.isnan(values).any():
            raise ValueError("losses must be numbers or infinite: a density is zero under both inputs")
        # Only positive losses count at an epsilon of at least 0; the largest come first.
        self._sorted = np.sort(values[values > 0])[::-1]
        self._count = len(values)
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

    def interval(self, delta: float, alpha: float, steps: Floats) -> Interval:
        """Return the two of the rising epsilons `steps` between which the divergence falls to `delta` (Theorem 5)."""
        # Each end errs with probability `alpha` / 2. The hypotheses are nested: multiple tests need no correction. For
        # a delta below 1e-9 the upper end ignores events that are too rare for so many runs.
        # A pure guarantee allows no rare failures, but runs cannot show events rarer than this.
        least = delta if delta > _PURE else 2 * math.log(2 / alpha) / self._count
        falling = takewhile(lambda epsilon: self.at(epsilon).high(alpha / 2) <= least, steps[::-1].tolist())
        shown, highest = self.lower_end(delta, alpha, steps), min(falling, default=math.inf)
        return shown, max(highest, shown)

    def lower_end(self, delta: float, alpha: float, steps: Floats) -> float:
        """Return the lower end of the interval."""
        return max(takewhile(lambda epsilon: self.at(epsilon).low(alpha / 2) > delta, steps.tolist()), default=0.0)


def list_epsilons(epsilon: float) -> Floats:
    """Return the epsilons to test, rising from 0: fine steps up to four times the stated one, coarser above."""
    stated = min(epsilon, 10.0) if math.isinf(epsilon) else epsilon
    step = max(stated * 4 / _FINE, _LEAST_STEP)
    fine: Floats = step * np.arange(_FINE + 1, dtype=np.float64)
    if fine[-1] >= _TOP:
        return fine
    beyond = fine[-1] * _GROWTH ** np.arange(1, math.ceil(math.log(_TOP / fine[-1], _GROWTH)) + 1)
    return np.concatenate([fine, beyond])


def bound_one_run_epsilon(correct: int, guesses: int, records: int, delta: float, alpha: float) -> float:
    """Return the epsilon that one run with many records shows (Theorem 6; Steinke, Nasr and Jagielski 2023)."""
    # 0 if nothing is shown, which is always so if ``records * delta`` reaches `alpha`.
    rest = alpha - records * delta
    if rest <= 0 or guesses == 0:
        return 0.0
    chance = float(bound_proportion(correct, guesses, 2 * rest)[0])
    return max(0.0, math.log(chance / (1 - chance))) if 0 < chance < 1 else 0.0


Score = Callable[[Outcomes], Floats]
Learn = Callable[[Outcomes, Outcomes], Score | None]
"""From outcomes of both worlds to a score; None if there is nothing to learn."""

_CANDIDATES = 300  # thresholds, half of them deep in the tails
_MAX_EXAMPLES = 20_000  # outcomes of either world that a classifier learns from
_MAX_COLUMNS = 512
_MAX_VALUES = 4096  # distinct outcomes in a table
_PRIOR = 0.5  # pseudo-count of each outcome
_LAST_BIT_OF_ZERO = 2000.0  # larger than any other
_LOW_BITS = 4  # of a mantissa, for a classifier
_SLICES, _RUNS_IN_A_SLICE = 24, 200
_TOLERANCE = 1e-3  # relative, of a probability: some densities are of grid cells
_MAX_RECORDS = 4096  # in one run
_SHARES = np.geomspace(0.002, 0.5, 40)


def score_likelihood(outcomes: Outcomes) -> Floats:
    """Score by the log-likelihood ratio, which is optimal if the density is right."""
    return np.asarray(outcomes.losses)


def learn_line(first: Outcomes, second: Outcomes) -> Score | None:
    """Learn the direction in which the means differ most, in units of the noise."""
    rows, worlds = _take_examples(first.numbers, second.numbers)
    if rows.shape[1] > _MAX_COLUMNS or not np.isfinite(rows).all() or not rows.std(axis=0).any():
        return None
    model = make_pipeline(StandardScaler(), LinearDiscriminantAnalysis(solver="lsqr", shrinkage=1e-3))
    with threadpool_limits(1):
        model.fit(rows, worlds)
    return lambda outcomes: np.asarray(model.decision_function(outcomes.numbers.astype(np.float64)))


def learn_trees(
    first: Outcomes, second: Outcomes, extract: Callable[[NDArray[Any]], NDArray[Any]] = np.asarray
) -> Score | None:
    """Train boosted trees to separate the features that `extract` computes."""
    rows, worlds = _take_examples(*(extract(world.numbers[:_MAX_EXAMPLES]) for world in (first, second)))
    if rows.shape[1] > _MAX_COLUMNS or not rows.std(axis=0).any():
        return None
    model = HistGradientBoostingClassifier(
        max_iter=60, max_leaf_nodes=15, min_samples_leaf=20, early_stopping=False, random_state=0
    )
    with threadpool_limits(1):  # the same runs give the same trees on every machine
        model.fit(rows, worlds)
    return threadpool_limits.wrap(1)(lambda outcomes: model.decision_function(extract(outcomes.numbers)))  # type: ignore[no-any-return]


def _take_examples(*numbers: NDArray[Any]) -> tuple[Floats, NDArray[np.int64]]:
    """Return training rows, with target 1 for the first world and 0 for the second."""
    parts = [np.asarray(rows[:_MAX_EXAMPLES], dtype=np.float64) for rows in numbers]
    return np.concatenate(parts), np.repeat([1, 0], [len(part) for part in parts])


def learn_table(first: Outcomes, second: Outcomes) -> Score | None:
    """Score an outcome by the ratio of its counts in training; None if no outcome repeats."""
    worlds = hash_rows(first.numbers), hash_rows(second.numbers)
    distinct, inverse = np.unique(np.concatenate(worlds), return_inverse=True)
    counts = np.array([np.bincount(part, minlength=len(distinct)) for part in np.split(inverse, [len(first)])])
    frequent = np.argsort(-counts.sum(axis=0), kind="stable")[:_MAX_VALUES]
    frequent = np.sort(frequent[counts.sum(axis=0)[frequent] > 1])
    if not len(frequent):
        return None
    table, (hits, false_hits) = distinct[frequent], counts[:, frequent] + _PRIOR
    ratios = np.append(np.log(hits / false_hits), 0.0)

    def score(outcomes: Outcomes) -> Floats:
        hashes = hash_rows(outcomes.numbers)
        rows = np.minimum(np.searchsorted(table, hashes), len(table) - 1)
        return np.asarray(ratios[np.where(table[rows] == hashes, rows, len(table))])

    return score


def find_last_bits(numbers: NDArray[np.floating]) -> Floats:
    """Return, for each number, the exponent e of its lowest set bit 2^e: rounding may reveal the summands."""
    mantissa, exponent = np.frexp(np.asarray(numbers, dtype=np.float64))
    whole = np.ldexp(np.abs(mantissa), 53).astype(np.int64)
    low = np.log2(np.maximum(whole & -whole, 1).astype(np.float64))
    return np.where(whole == 0, _LAST_BIT_OF_ZERO, low + exponent - 53)


def learn_finest_bit(first: Outcomes, second: Outcomes) -> Score | None:
    """Score by the lowest set bit of all numbers; None if the outcomes are not floating point."""
    del second
    return (lambda outcomes: find_last_bits(outcomes.numbers).min(axis=1)) if first.numbers.dtype.kind == "f" else None


def learn_low_bits(first: Outcomes, second: Outcomes) -> Score | None:
    """Learn from the positions of the last bits and from the lowest bits of the mantissas, by boosted trees."""

    def extract(rows: NDArray[Any]) -> Floats:
        numbers = np.ascontiguousarray(rows)
        words: NDArray[Any] = numbers.view(np.uint32 if numbers.dtype.itemsize == 4 else np.uint64)
        low = [((words >> bit) & 1).astype(np.float64) for bit in range(_LOW_BITS)]
        return np.concatenate([find_last_bits(numbers), *low], axis=1)

    return learn_trees(first, second, extract) if first.numbers.dtype.kind == "f" else None


LEARNED: tuple[tuple[str, Learn], ...] = (
    ("a linear classifier", learn_line),
    ("boosted trees", learn_trees),
    ("a table of outcomes", learn_table),
    ("the finest bit", learn_finest_bit),
    ("boosted trees on low bits", learn_low_bits),
)
"""The scores of every audit, besides a stated density."""


@dataclass(frozen=True)
class Event:
    """A set of outcomes, given by a threshold on a score, and the world that it indicates."""

    threshold: float
    above: bool  # whether scores are at least the threshold, or below it
    swapped: bool  # whether it indicates the second world
    estimate: float  # epsilon on the choosing half; not a bound, because it was maximised

    def measure(self, score: Score, worlds: list[Outcomes], guarantee: Guarantee) -> Bound:
        """Return the bound that fresh outcomes of both worlds show (Theorem 2)."""
        runs = min(map(len, worlds))
        inside = [(score(outcomes[:runs]) >= self.threshold) == self.above for outcomes in worlds]
        hits, false_hits = map(int, map(np.count_nonzero, inside[::-1] if self.swapped else inside))

        def bound(alpha: float) -> Interval:
            low, high = bound_event_epsilon(hits, false_hits, runs, guarantee.delta, alpha)
            return float(low), float(high)

        return bound


def choose_event(first: Floats, second: Floats, delta: float, alpha: float) -> Event:
    """Choose the event that shows the largest epsilon, by scores of equally many runs of both worlds."""
    pooled, runs = np.concatenate([first, second]), len(first)
    # Thresholds at equally spaced ranks, and denser at both ends, where rare outcomes show most.
    deep = np.geomspace(1 / len(pooled), 0.5, _CANDIDATES // 4)
    shares = np.concatenate([np.linspace(0, 1, _CANDIDATES // 2), deep, 1 - deep])
    thresholds = np.unique(np.quantile(pooled, shares, method="nearest"))
    up = [runs - np.searchsorted(np.sort(scores), thresholds) for scores in (first, second)]
    best = Event(float(thresholds[0]), above=True, swapped=False, estimate=-1.0)
    for above, swapped in product((True, False), (False, True)):
        counts = up if above else [runs - count for count in up]
        hits, false_hits = counts[::-1] if swapped else counts
        shown = bound_event_epsilon(hits, false_hits, runs, delta, alpha)[0]
        i = int(np.argmax(shown))
        if shown[i] > best.estimate:
            best = Event(float(thresholds[i]), above, swapped, float(shown[i]))
    return best


@dataclass(frozen=True)
class Direction:
    """The world in which losses are measured, and the epsilon on the choosing half."""

    swapped: bool
    estimate: float

    def measure(self, score: Score, worlds: list[Outcomes], guarantee: Guarantee) -> Bound:
        """Return the bound that fresh losses in this world show (Theorem 5)."""
        stick = HockeyStick(-score(worlds[1]) if self.swapped else score(worlds[0]))
        steps = list_epsilons(guarantee.epsilon)
        return lambda alpha: stick.interval(guarantee.delta, alpha, steps)


def choose_direction(first: Floats, second: Floats, epsilon: float, delta: float, alpha: float) -> Direction:
    """Choose the direction in which the divergence is larger, by the losses in both worlds."""
    steps = list_epsilons(epsilon)
    estimates = [HockeyStick(losses).lower_end(delta, alpha, steps) for losses in (first, -second)]
    return Direction(estimates[1] > estimates[0], max(estimates))


@dataclass(frozen=True)
class Slices:
    """Sets of outcomes with a stated loss between two numbers, inclusive."""

    low: Floats
    high: Floats

    @classmethod
    def choose(cls, losses: Floats) -> "Slices":
        """Choose slices of about equally many outcomes, by runs that are not tested."""
        ordered = np.sort(losses)
        count = min(_SLICES, max(2, len(losses) // _RUNS_IN_A_SLICE))
        starts = np.unique(ordered[(np.arange(count) * len(ordered)) // count])
        ends = np.append(np.searchsorted(ordered, starts[1:]), len(ordered)) - 1  # equal losses share a slice
        return cls(starts, ordered[ends])

    def find_misfit(self, first: Floats, second: Floats, alpha: float) -> str | None:
        """Describe where the stated losses contradict the counts under P and Q (Theorem 7)."""
        p, q = (
            bound_proportion(self._count_hits(losses), len(losses), alpha / (2 * len(self.low)))
            for losses in (first, second)
        )
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            too_many = p[0] > np.exp(self.high) * q[1] * (1 + _TOLERANCE)
            too_few = p[1] < np.exp(self.low) * q[0] * (1 - _TOLERANCE)
            true = np.log(p[0] / q[1]), np.log(p[1] / q[0])
        wrong = np.flatnonzero(too_many | too_few)
        if not len(wrong):
            return None
        low, high, least, most = (float(ends[wrong[0]]) for ends in (self.low, self.high, *true))
        stated = f"where the stated log-ratio is {low:.3g} to {high:.3g}"
        return f"{stated}, the true one is between {least:.3g} and {most:.3g}"

    def _count_hits(self, losses: Floats) -> NDArray[np.int64]:
        ordered = np.sort(losses)
        return np.searchsorted(ordered, self.high, side="right") - np.searchsorted(ordered, self.low)


@dataclass(frozen=True)
class Guesser:
    """Guess the first input at scores from `high`, the second up to `low`, and abstain in between."""

    low: float
    high: float

    def __call__(self, scores: Floats) -> NDArray[np.int64]:
        """Return 1 for the first input, -1 for the second, 0 for no guess."""
        return (scores >= self.high).astype(np.int64) - (scores <= self.low)


def choose_guesser(first: Floats, second: Floats, alpha: float) -> Guesser:
    """Choose the scores at which the attacker guesses, by scores that are not used again."""
    pooled = np.concatenate([first, second])
    best, most = Guesser(-np.inf, np.inf), -1.0
    for share in _SHARES:
        low, high = np.quantile(pooled, [share, 1 - share], method="nearest")
        guesser = Guesser(float(low), float(high)) if low < high else Guesser(float(np.nextafter(high, -1e300)), high)
        right = int((guesser(first) == 1).sum() + (guesser(second) == -1).sum())
        guessed = int((guesser(pooled) != 0).sum())
        shown = float(bound_proportion(right, guessed, 2 * alpha)[0]) if guessed else 0.0
        if shown > most:
            best, most = guesser, shown
    return best


def estimate_one_run(
    experiment: Experiment, pair: Pair, score: Score, guesser: Guesser | None, alpha: float, source: Source
) -> float | None:
    """Run once on many records, each chosen by a fair coin, and return the epsilon that guesses show."""
    if experiment.run_once is None or guesser is None:
        return None
    delta = experiment.guarantee.delta
    # Half of alpha may go to delta: the theorem subtracts delta for every record.
    records = _MAX_RECORDS if delta == 0 else int(min(_MAX_RECORDS, alpha / (2 * delta)))
    if records < 1:
        return 0.0
    coins = source.words(records) % np.uint64(2) == 1
    guesses = guesser(score(experiment.read(experiment.run_once(coins, pair, source), pair)))
    right = int(((guesses == 1) & coins).sum() + ((guesses == -1) & ~coins).sum())
    return bound_one_run_epsilon(right, int((guesses != 0).sum()), records, delta, alpha)
