"""Attacks on outcomes: scores and events that tell two worlds apart, and bounds on the epsilon that they show.

Bounds hold whatever the mechanism is; each takes `mistake`, the probability with which it may be wrong. Proofs:
``docs/theory/audit.md``.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import betaincinv
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.ensemble import HistGradientBoostingClassifier
from threadpoolctl import threadpool_limits

from nearveil.audit._experiment import Experiment, Outcomes, Pair, hash_rows
from nearveil.privacy.noise import Source

Floats = NDArray[np.float64]
Interval = tuple[float, float]

_FINE = 400  # steps of the ladder up to four times the stated epsilon
_GROWTH = 1.005  # of the ladder beyond
_TOP = 1000.0
_LEAST_STEP = 1e-4
_PURE = 1e-9  # a delta below is what samplers of finite precision cost


def bound_proportion(hits: NDArray[np.int64] | int, runs: int, mistake: float) -> tuple[Floats, Floats]:
    """Return the Clopper-Pearson interval of a probability, each end wrong with `mistake` / 2 at most (Lemma 1)."""
    counts = np.asarray(hits)
    low = np.where(counts > 0, betaincinv(np.maximum(counts, 1), runs - counts + 1, mistake / 2), 0.0)
    high = np.where(counts < runs, betaincinv(counts + 1, np.maximum(runs - counts, 1), 1 - mistake / 2), 1.0)
    return low, high


def bound_event_epsilon(
    hits: NDArray[np.int64] | int,
    false_hits: NDArray[np.int64] | int,
    runs: int,
    delta: float,
    mistake: float,
) -> tuple[Floats, Floats]:
    """Return the interval of ``ln((P(S) - delta) / Q(S))``, at least 0, for an event S that came so often (Theorem 2).

    The lower end is too high with probability at most `mistake` / 2. Attacked by ``tests/audit/test_bounds.py``.
    """
    p_low, p_high = bound_proportion(hits, runs, mistake / 2)
    q_low, q_high = bound_proportion(false_hits, runs, mistake / 2)
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
        if self.mean <= 0:
            return -math.expm1(-odds)
        if _compute_divergence(self.mean, 1 - 1e-15) <= odds:
            return 1.0
        return float(brentq(lambda at: _compute_divergence(self.mean, at) - odds, max(self.mean, 1e-300), 1 - 1e-15))


def _compute_divergence(mean: float, at: float) -> float:
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

        Each end is wrong with a probability of at most `mistake` / 2; the hypotheses are nested, so testing many is
        free. For a delta below 1e-9 the upper end leaves out what is too rare to be seen in so many runs.
        """
        shown, highest = self.lower_end(delta, mistake, steps), math.inf
        # A pure guarantee has no probability below which nothing counts, but so many runs see only so much.
        least = delta if delta > _PURE else 2 * math.log(2 / mistake) / self._count
        for epsilon in steps[::-1]:
            if not self.at(float(epsilon)).high(mistake / 2) <= least:
                break
            highest = float(epsilon)
        return shown, max(highest, shown)

    def lower_end(self, delta: float, mistake: float, steps: Floats) -> float:
        """Return the lower end of the interval."""
        shown = 0.0
        for epsilon in steps:
            if not self.at(float(epsilon)).low(mistake / 2) > delta:
                break
            shown = float(epsilon)
        return shown


def list_epsilons(epsilon: float) -> Floats:
    """Return the epsilons that are tried, rising from 0: fine around what is stated, coarser far above it."""
    stated = min(epsilon, 10.0) if math.isinf(epsilon) else epsilon
    step = max(stated * 4 / _FINE, _LEAST_STEP)
    fine: Floats = step * np.arange(_FINE + 1, dtype=np.float64)
    if fine[-1] >= _TOP:
        return fine
    beyond = fine[-1] * _GROWTH ** np.arange(1, math.ceil(math.log(_TOP / fine[-1], _GROWTH)) + 1)
    return np.concatenate([fine, beyond])


def bound_one_run_epsilon(correct: int, guesses: int, records: int, delta: float, mistake: float) -> float:
    """Return the epsilon that one run with many records shows (Theorem 6; Steinke, Nasr and Jagielski 2023).

    0 where nothing is shown, which is always so if ``records * delta`` reaches `mistake`.
    """
    rest = mistake - records * delta
    if rest <= 0 or guesses == 0:
        return 0.0
    chance = float(bound_proportion(correct, guesses, 2 * rest)[0])
    return max(0.0, math.log(chance / (1 - chance))) if 0 < chance < 1 else 0.0


Score = Callable[[Outcomes], Floats]
Learn = Callable[[Outcomes, Outcomes], Score | None]
"""From outcomes of both worlds to a score; None where there is nothing to learn from."""

_CANDIDATES = 300  # thresholds, half of them deep in the tails
_MOST_EXAMPLES = 20_000  # outcomes of either world that a classifier learns from
_MOST_COLUMNS = 512
_MOST_VALUES = 4096  # different outcomes in a table
_PRIOR = 0.5  # of a run, for each outcome that was not seen
_NOTHING = 2000.0  # the last bit of zero: beyond every other
_KEPT_BITS = 4  # low bits of a mantissa that a classifier sees
_SLICES, _RUNS_IN_A_SLICE = 24, 200
_FORGIVEN = 1e-3  # part of a probability: densities are of cells as often as of points
_MOST_RECORDS = 4096  # of one run
_SHARES = np.geomspace(0.002, 0.5, 40)


def score_likelihood(outcomes: Outcomes) -> Floats:
    """Score by the log-likelihood ratio: the best score there is, if the density is right."""
    assert outcomes.losses is not None
    return outcomes.losses


def learn_line(first: Outcomes, second: Outcomes) -> Score | None:
    """Learn the direction in which two noisy means differ most, in units of the noise."""
    rows, worlds = _take_examples(first.numbers, second.numbers)
    spread = rows.std(axis=0)
    if rows.shape[1] > _MOST_COLUMNS or not np.isfinite(rows).all() or not spread.any():
        return None
    middle, scale = rows.mean(axis=0), np.where(spread > 0, spread, 1.0)
    with threadpool_limits(1):
        model = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=1e-3).fit((rows - middle) / scale, worlds)
    direction = model.coef_[0] / scale
    return lambda outcomes: np.asarray((outcomes.numbers - middle) @ direction, dtype=np.float64)


def learn_trees(
    first: Outcomes, second: Outcomes, look: Callable[[NDArray[Any]], NDArray[Any]] = np.asarray
) -> Score | None:
    """Learn any difference in what `look` makes of outcomes, by boosted trees."""
    rows, worlds = _take_examples(*(look(one.numbers[:_MOST_EXAMPLES]) for one in (first, second)))
    if rows.shape[1] > _MOST_COLUMNS or not rows.std(axis=0).any():
        return None
    model = HistGradientBoostingClassifier(
        max_iter=60, max_leaf_nodes=15, min_samples_leaf=20, early_stopping=False, random_state=0
    )
    with threadpool_limits(1):  # so that the same runs give the same trees everywhere
        model.fit(rows, worlds)

    def score(outcomes: Outcomes) -> Floats:
        with threadpool_limits(1):
            return np.asarray(model.decision_function(np.asarray(look(outcomes.numbers), dtype=np.float64)))

    return score


def _take_examples(*numbers: NDArray[Any]) -> tuple[Floats, NDArray[np.int64]]:
    """Return some outcomes of either world, and 1 for those of the first."""
    parts = [np.asarray(one[:_MOST_EXAMPLES], dtype=np.float64) for one in numbers]
    return np.concatenate(parts), np.repeat([1, 0], [len(part) for part in parts])


def learn_table(first: Outcomes, second: Outcomes) -> Score | None:
    """Score an outcome by the ratio of how often the very same one came in training; None where none came twice."""
    every, place = np.unique(np.concatenate([hash_rows(first.numbers), hash_rows(second.numbers)]), return_inverse=True)
    counts = np.array([np.bincount(part, minlength=len(every)) for part in np.split(place, [len(first)])])
    often = np.argsort(-counts.sum(axis=0), kind="stable")[:_MOST_VALUES]
    often = np.sort(often[counts.sum(axis=0)[often] > 1])
    if not len(often):
        return None
    known, (own, other) = every[often], counts[:, often] + _PRIOR
    ratios = np.append(np.log(own / other), 0.0)

    def score(outcomes: Outcomes) -> Floats:
        hashes = hash_rows(outcomes.numbers)
        at = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
        return np.asarray(ratios[np.where(known[at] == hashes, at, len(known))])

    return score


def find_last_bits(numbers: NDArray[np.floating]) -> Floats:
    """Return, for each number, e where 2^e is its lowest bit that is set: gaps may show what was added to what."""
    mantissa, exponent = np.frexp(np.asarray(numbers, dtype=np.float64))
    whole = np.ldexp(np.abs(mantissa), 53).astype(np.int64)
    low = np.log2(np.maximum(whole & -whole, 1).astype(np.float64))
    return np.where(whole == 0, _NOTHING, low + exponent - 53)


def learn_finest_bit(first: Outcomes, second: Outcomes) -> Score | None:
    """Score by the finest bit of all numbers; None where what is seen is no floating point."""
    del second
    return (lambda one: find_last_bits(one.numbers).min(axis=1)) if first.numbers.dtype.kind == "f" else None


def learn_low_bits(first: Outcomes, second: Outcomes) -> Score | None:
    """Learn from the positions of the last bits and from the lowest bits of the mantissas, by boosted trees."""

    def look(given: NDArray[Any]) -> Floats:
        numbers = np.ascontiguousarray(given)
        words: NDArray[Any] = numbers.view(np.uint32 if numbers.dtype.itemsize == 4 else np.uint64)
        low = [((words >> bit) & 1).astype(np.float64) for bit in range(_KEPT_BITS)]
        return np.concatenate([find_last_bits(numbers), *low], axis=1)

    return learn_trees(first, second, look) if first.numbers.dtype.kind == "f" else None


LEARNED: tuple[tuple[str, Learn], ...] = (
    ("a linear classifier", learn_line),
    ("boosted trees", learn_trees),
    ("a table of outcomes", learn_table),
    ("the finest bit", learn_finest_bit),
    ("boosted trees on low bits", learn_low_bits),
)
"""The scores that every audit tries, besides a stated density."""


@dataclass(frozen=True)
class Event:
    """A set of outcomes, told by a score, and the world that it speaks for."""

    threshold: float
    above: bool  # whether it is the outcomes with a score of at least the threshold, or those below it
    swapped: bool  # whether it speaks for the second world against the first
    promising: float  # the epsilon that the choosing half showed. No bound: it was maximised

    def count(self, scores: Floats) -> int:
        """Count the outcomes that are in the set."""
        return int(np.count_nonzero((scores >= self.threshold) == self.above))


def choose_event(first: Floats, second: Floats, delta: float, mistake: float) -> Event:
    """Choose the event that shows most on scores of as many runs in either world; it must be measured on other runs."""
    pooled, runs = np.concatenate([first, second]), len(first)
    # Candidates are even in rank, and ever denser towards both ends, where rare outcomes tell most.
    deep = np.geomspace(1 / len(pooled), 0.5, _CANDIDATES // 4)
    shares = np.concatenate([np.linspace(0, 1, _CANDIDATES // 2), deep, 1 - deep])
    thresholds = np.unique(np.quantile(pooled, shares, method="nearest"))
    up = [runs - np.searchsorted(np.sort(scores), thresholds) for scores in (first, second)]
    best: list[Event] = []
    for above in (True, False):
        counts = up if above else [runs - one for one in up]
        for swapped in (False, True):
            hits, false_hits = counts[::-1] if swapped else counts
            shown = bound_event_epsilon(hits, false_hits, runs, delta, mistake)[0]
            at = int(np.argmax(shown))
            best.append(Event(float(thresholds[at]), above, swapped, float(shown[at])))
    return max(best, key=lambda event: event.promising)


@dataclass(frozen=True)
class Direction:
    """Which world the losses are drawn in, and what the choosing half showed."""

    swapped: bool
    promising: float


def choose_direction(first: Floats, second: Floats, epsilon: float, delta: float, mistake: float) -> Direction:
    """Return the direction whose divergence shows more, by the losses in either world."""
    found = [
        Direction(swapped, HockeyStick(own).lower_end(delta, mistake, list_epsilons(epsilon)))
        for swapped, own in ((False, first), (True, -second))
    ]
    return max(found, key=lambda one: one.promising)


@dataclass(frozen=True)
class Slices:
    """Sets of outcomes: those whose stated loss lies between two numbers, ends included."""

    low: Floats
    high: Floats

    @classmethod
    def choose(cls, losses: Floats) -> "Slices":
        """Choose slices that hold about as many outcomes each, by runs of both worlds that do not judge."""
        ordered = np.sort(losses)
        count = min(_SLICES, max(2, len(losses) // _RUNS_IN_A_SLICE))
        starts = np.unique(ordered[(np.arange(count) * len(ordered)) // count])
        ends = np.append(np.searchsorted(ordered, starts[1:]), len(ordered)) - 1  # equal losses share a slice
        return cls(starts, ordered[ends])

    def find_misfit(self, first: Floats, second: Floats, mistake: float) -> str | None:
        """Say where stated losses of runs under P and under Q are not of one density (Theorem 7)."""
        p, q = (
            bound_proportion(self._count_hits(one), len(one), mistake / (2 * len(self.low))) for one in (first, second)
        )
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            too_many = p[0] > np.exp(self.high) * q[1] * (1 + _FORGIVEN)
            too_few = p[1] < np.exp(self.low) * q[0] * (1 - _FORGIVEN)
            true = np.log(p[0] / q[1]), np.log(p[1] / q[0])
        wrong = np.flatnonzero(too_many | too_few)
        if not len(wrong):
            return None
        low, high, least, most = (float(ends[wrong[0]]) for ends in (self.low, self.high, *true))
        return f"where the stated log-ratio is {low:.3g} to {high:.3g}, it lies between {least:.3g} and {most:.3g}"

    def _count_hits(self, losses: Floats) -> NDArray[np.int64]:
        ordered = np.sort(losses)
        found = np.searchsorted(ordered, self.high, side="right") - np.searchsorted(ordered, self.low)
        return found.astype(np.int64)


@dataclass(frozen=True)
class Guesser:
    """Guesses the first input from `high` on, the second up to `low`, and abstains between."""

    low: float
    high: float

    def __call__(self, scores: Floats) -> NDArray[np.int64]:
        """Return 1 for the first input, -1 for the second, 0 for no guess."""
        return (scores >= self.high).astype(np.int64) - (scores <= self.low)


def choose_guesser(first: Floats, second: Floats, mistake: float) -> Guesser:
    """Choose how sure the attacker has to be, by scores in either world that are not used again."""
    pooled = np.concatenate([first, second])
    best, most = Guesser(-np.inf, np.inf), -1.0
    for share in _SHARES:
        low, high = np.quantile(pooled, [share, 1 - share], method="nearest")
        guesser = Guesser(float(low), float(high)) if low < high else Guesser(float(np.nextafter(high, -1e300)), high)
        right = int((guesser(first) == 1).sum() + (guesser(second) == -1).sum())
        guessed = int((guesser(pooled) != 0).sum())
        shown = float(bound_proportion(right, guessed, 2 * mistake)[0]) if guessed else 0.0
        if shown > most:
            best, most = guesser, shown
    return best


def run_once(
    experiment: Experiment, pair: Pair, score: Score, guesser: Guesser | None, mistake: float, source: Source
) -> float | None:
    """Run once on many records, each with a fair coin, and return the epsilon that guesses show."""
    if experiment.together is None or guesser is None:
        return None
    delta = experiment.guarantee.delta
    # Half of the mistake may go to delta: the theorem pays delta for every record.
    records = _MOST_RECORDS if delta == 0 else int(min(_MOST_RECORDS, mistake / (2 * delta)))
    if records < 1:
        return 0.0
    coins = source.words(records) % np.uint64(2) == 1
    guesses = guesser(score(experiment.read(experiment.together(coins, pair, source), pair)))
    right = int(((guesses == 1) & coins).sum() + ((guesses == -1) & ~coins).sum())
    return bound_one_run_epsilon(right, int((guesses != 0).sum()), records, delta, mistake)
