"""Experiments: neighbouring inputs, a way to run the mechanism on them, and the stated law of its outcomes.

Proofs: ``docs/theory/audit.md``, section 5. Tests: ``tests/audit/test_law.py``.
"""

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln, ndtr, ndtri
from scipy.stats import binom, chi2

from nearveil.audit.report import Check, judge
from nearveil.privacy import Guarantee
from nearveil.privacy.noise import Source

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Words = NDArray[np.uint64]
Coin = tuple[Bools, float]  # tosses, and the stated probability of True

TRIALS = 200_000
ROWS, DIMENSION, CLASSES = 200, 16, 4  # of the default data for mechanisms that are not fitted
_PURE = 1e-9  # a smaller delta only accounts for the finite precision of samplers
_EXPECTED_HITS, _MAX_TRIALS = 30, 1_000_000  # runs should contain this many events of probability delta, if affordable
_CHUNK = 1 << 17  # runs per call

_BINS = 32
_LEVELS = 20  # sets of probability 1/2, 1/4, ... in either tail and around the middle
_TOLERANCE = 1e-3  # relative, of a probability: outcomes are on grids, stated laws are continuous
_HASH_COLLISION = 2.0**-64
_MIN_UNIFORM, _MAX_UNIFORM = 1e-300, 1 - 2.0**-53
_SETS = np.concatenate([np.full(_BINS, 1 / _BINS), np.tile(2.0 ** -np.arange(1, _LEVELS + 1), 3)])
_MIDDLE = np.arange(len(_SETS)) >= len(_SETS) - _LEVELS


@dataclass(frozen=True, eq=False)
class Law:
    """The stated distribution of outcomes, in a form that runs can refute.

    Examples
    --------
    >>> law = Law(uniforms=lambda outcomes, mean: [ndtr(outcomes[:, 0] - mean)])
    >>> test = LawTest(law)
    >>> noise = np.random.default_rng(0).normal(size=(4_000, 1))
    >>> test.add("zero", noise, 0.0)
    >>> test.find_misfit(1e-9)
    >>> test.add("one", 1.0 + 0.8 * noise, 1.0)  # a fifth of the noise is missing
    >>> print(test.find_misfit(1e-9))
    one, number 1 does not have the stated spread (probability below 1e-30)
    """

    #: ``uniforms(outcomes, input)`` returns arrays of the stated distribution function at the outcomes. If the law is
    #: true, the entries of each array are independent and uniform between 0 and 1. Arrays may depend on each other.
    uniforms: Callable[[Any, Any], Sequence[Floats]] | None = None
    #: ``coins(outcomes, input)`` returns arrays of tosses, independent in themselves, with the probability of True.
    coins: Callable[[Any, Any], Sequence[Coin]] | None = None
    #: ``values(outcomes)`` returns numbers of shape (n, k) that rarely repeat.
    values: Callable[[Any], NDArray[Any]] | None = None
    #: The largest probability of one value in a column of `values`, and of a cell of a grid for `uniforms`.
    largest_value: float = 1.0
    largest_row: float = 1.0  #: the largest probability of one row of `values`
    #: ``consistent(outcomes)`` returns, for each run, whether derived results follow from the released numbers: for
    #: example, whether the label is the class with the most votes.
    consistent: Callable[[Any], Bools] | None = None


def compute_uniforms(deviations: Floats, *, laplace: bool = False) -> Floats:
    """Return the distribution function of Gaussian or Laplace noise, at deviations in units of its scale."""
    if not laplace:
        return np.asarray(ndtr(deviations))
    tail = np.exp(-np.abs(deviations)) / 2
    return np.where(deviations < 0, tail, 1 - tail)


def compute_losses(
    values: Floats, first: Floats, second: Floats, scale: Floats | float, *, laplace: bool = False
) -> Floats:
    """Return the log-likelihood ratio of noisy `values`, shape (..., k), around the first or the second exact ones."""
    near, far = ((np.abs(values - exact) / scale) ** (1 if laplace else 2) for exact in (first, second))
    return np.asarray((far - near).sum(axis=-1) / (1 if laplace else 2))


@dataclass
class _Counts:
    """Hits of sets with stated probabilities and, of uniform numbers, the sum of their squared normal scores."""

    chances: Floats
    slack: Floats | float = 0.0  # of the probabilities
    squares: float | None = None
    runs: int = 0
    hits: Any = 0  # of each set

    def add_uniforms(self, uniforms: Floats) -> None:
        """Count the hits of `_SETS`."""
        clipped = np.clip(uniforms, _MIN_UNIFORM, _MAX_UNIFORM)
        bins = np.bincount((clipped * _BINS).astype(np.int64), minlength=_BINS)
        nested = [_count_levels(clipped), _count_levels(1 - clipped), _count_levels(np.abs(2 * clipped - 1))]
        self.hits, self.runs = self.hits + np.concatenate([bins, *nested]), self.runs + len(uniforms)
        self.squares = (self.squares or 0.0) + float((ndtri(clipped) ** 2).sum())

    def find_misfit(self, alpha: float) -> str | None:
        """Describe a deviation with a p-value below `alpha` (Theorem 8)."""
        if not self.runs:
            return None
        tests = 2 * (len(self.chances) + (self.squares is not None))  # two-sided
        if self.squares is not None:
            spread = min(
                float(chi2.sf(self.squares / (1 + _TOLERANCE), self.runs)),
                float(chi2.cdf(self.squares / (1 - _TOLERANCE), self.runs)),
            )
            if tests * spread < alpha:
                return f"does not have the stated spread ({_format_chance(tests * spread)})"
        high = np.minimum(self.chances * (1 + _TOLERANCE) + self.slack, 1.0)
        low = np.maximum(self.chances * (1 - _TOLERANCE) - self.slack, 0.0)
        hits = np.broadcast_to(self.hits, len(self.chances))
        p_values = tests * np.minimum(binom.sf(hits - 1, self.runs, high), binom.cdf(hits, self.runs, low))
        worst = int(np.argmin(p_values))
        if p_values[worst] >= alpha:
            return None
        expected, chance = self.chances[worst] * self.runs, _format_chance(float(p_values[worst]))
        return f"has {hits[worst]:,} of {self.runs:,} runs where {expected:,.1f} are stated ({chance})"


def _count_levels(distances: Floats) -> NDArray[np.int64]:
    """Count the distances that are at most 1/2, 1/4, and so on."""
    depth = np.floor(-np.log2(np.maximum(distances, _MIN_UNIFORM))).astype(np.int64)
    counts = np.bincount(np.clip(depth, 0, _LEVELS), minlength=_LEVELS + 1)
    return np.cumsum(counts[::-1])[::-1][1:]


class LawTest:
    """Collect statistics of runs and test a stated law. The number of runs must not depend on their outcomes."""

    def __init__(self, law: Law) -> None:
        self.law = law
        self._counts: dict[str, _Counts] = {}
        self._rows: dict[str, list[Words]] = {}
        self._columns: dict[str, tuple[int, list[int]]] = {}  # runs, and repeats of the most frequent value
        self._checked = self._inconsistent = 0

    def add(self, name: str, outcomes: Any, input_: Any) -> None:
        """Add the outcomes of runs on one input; runs with the same name are counted together."""
        if self.law.uniforms is not None:
            # A small set around the middle may gain or lose one grid cell; cells in the tails are tiny.
            slack = np.where(_MIDDLE, 0.0 if self.law.values is None else 2 * self.law.largest_value, 0.0)
            for i, uniforms in enumerate(self.law.uniforms(outcomes, input_), 1):
                self._counts.setdefault(f"{name}, number {i}", _Counts(_SETS, slack)).add_uniforms(uniforms)
        if self.law.coins is not None:
            for i, (tosses, chance) in enumerate(self.law.coins(outcomes, input_), 1):
                coin = self._counts.setdefault(f"{name}, coin {i}", _Counts(np.array([chance])))
                coin.runs, coin.hits = coin.runs + len(tosses), coin.hits + int(tosses.sum())
        if self.law.values is not None:
            values = self.law.values(outcomes)
            self._rows.setdefault(name, []).append(hash_rows(values))
            if name not in self._columns:  # only of the first chunk: fewer runs are enough for single columns
                repeats = [_count_most_repeated(hash_rows(column[:, None])) for column in values.T]
                self._columns[name] = len(values), repeats
        if self.law.consistent is not None:
            consistent = self.law.consistent(outcomes)
            self._checked += len(consistent)
            self._inconsistent += int((~consistent).sum())

    def find_misfit(self, alpha: float) -> str | None:
        """Describe how the runs contradict the law; for a true law the probability of that is at most `alpha`."""
        misfits = ((name, counts.find_misfit(alpha / len(self._counts))) for name, counts in self._counts.items())
        return next((f"{name} {misfit}" for name, misfit in misfits if misfit is not None), None)

    def find_repeats(self, alpha: float) -> str | None:
        """Describe an outcome that repeats too often (Theorem 9)."""
        for name, parts in self._rows.items():
            hashes, (column_runs, columns) = np.concatenate(parts), self._columns[name]
            threshold = alpha / len(self._rows) / (1 + len(columns))
            repeats = [("outcome", _count_most_repeated(hashes), len(hashes), self.law.largest_row)]
            repeats += [("value", times, column_runs, self.law.largest_value) for times in columns]
            for kind, times, runs, largest in repeats:
                chance = bound_repeat_chance(times, runs, largest + _HASH_COLLISION)
                if chance < threshold:
                    return f"{name}: the same {kind} came {times:,} times in {runs:,} runs ({_format_chance(chance)})"
        return None

    def find_contradictions(self) -> str | None:
        """Describe how many outcomes are inconsistent, if any."""
        if not self._inconsistent:
            return None
        return f"{self._inconsistent:,} of {self._checked:,} outcomes contradict themselves"


def bound_repeat_chance(times: int, runs: int, largest: float) -> float:
    """Bound the probability that an outcome repeats `times`, if none is more probable than `largest` (Theorem 9)."""
    if times < 2:
        return 1.0
    log_subsets = gammaln(runs + 1) - gammaln(times + 1) - gammaln(runs - times + 1)
    return math.exp(min(0.0, float(log_subsets) + (times - 1) * math.log(min(largest, 1.0))))


def _count_most_repeated(values: Words) -> int:
    """Return the count of the most frequent value."""
    return int(np.unique(values, return_counts=True)[1].max(initial=0))


def hash_rows(rows: NDArray[Any]) -> Words:
    """Return a 64-bit hash of each row of numbers (the mixing of SplitMix64)."""
    if rows.dtype.kind == "f":
        words = np.ascontiguousarray(rows.astype(np.float64) + 0.0).view(np.uint64)  # -0.0 becomes 0.0
    else:
        words = np.ascontiguousarray(rows.astype(np.int64)).view(np.uint64)
    hashes = np.zeros(len(words), dtype=np.uint64)
    for column in words.T:
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + column
        hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        hashes ^= hashes >> np.uint64(31)
    return hashes


def _format_chance(chance: float) -> str:
    return "probability below 1e-30" if chance < 1e-30 else f"probability at most {chance:.0e}"


@dataclass(frozen=True, eq=False)
class Pair:
    """Two neighbouring inputs, which the guarantee covers: inputs for the `run` of an :class:`Experiment`."""

    name: str  #: a description, such as "opposite unit vectors"
    first: Any = field(repr=False)
    second: Any = field(repr=False)


@dataclass(frozen=True, eq=False)
class Outcomes:
    """The observations of many independent runs."""

    numbers: NDArray[Any]  # shape (runs, k)
    losses: Floats | None  # log-likelihood ratios, first input against second, if the density is known

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, rows: slice) -> "Outcomes":
        return Outcomes(self.numbers[rows], None if self.losses is None else self.losses[rows])


@dataclass(frozen=True, eq=False)
class Experiment:
    """A mechanism, its guarantee, and pairs of inputs to attack it with. Examples: ``docs/howto/audit.md``."""

    name: str
    guarantee: Guarantee  #: the epsilon and delta to audit
    pairs: tuple[Pair, ...]  #: candidates for the worst case; the audit chooses among them
    #: ``run(input, n, source)`` runs the mechanism `n` times, independently, and returns all that an observer sees.
    run: Callable[[Any, int, Source], Any]
    #: ``log_ratio(outcomes, pair)`` returns ``ln p(outcome | first) / p(outcome | second)`` of each run, shape (n,).
    log_ratio: Callable[[Any, Pair], Floats] | None = None
    #: Whether `log_ratio` is exact: the audit estimates the divergence from it. Otherwise it is a score; any is safe.
    exact: bool = False
    numbers: Callable[[Any], NDArray[Any]] = np.asarray  #: converts the result of `run` to an array of shape (n, k)
    #: ``run_once(coins, pair, source)`` runs the mechanism *once* on many records, each the pair's first or second
    #: input by its coin, and returns the observation of each record. Needed for the one-run estimate.
    run_once: Callable[[Bools, Pair, Source], Any] | None = None
    law: Law = field(default_factory=Law)  #: of the outcomes; runs that contradict it break the guarantee
    #: ``check(source, alpha)`` uses the mechanism as its users do and returns a :class:`Check`. A sound mechanism may
    #: fail a randomized check with a probability of at most `alpha`.
    checks: tuple[Callable[[Source, float], Check], ...] = ()
    trials: int = TRIALS  #: default number of runs of either input

    def __post_init__(self) -> None:
        if not self.pairs:
            raise ValueError("pairs must contain at least one Pair of neighbouring inputs")
        if self.exact and self.log_ratio is None:
            raise ValueError("exact needs a log_ratio")

    def observe(self, pair: Pair, world: int, runs: int, source: Source, test: LawTest | None = None) -> Outcomes:
        """Run on the pair's first (0) or second (1) input, in chunks, and add the outcomes to `test`."""
        input_ = pair.second if world else pair.first
        parts = []
        for start in range(0, runs, _CHUNK):
            raw = self.run(input_, min(_CHUNK, runs - start), source)
            parts.append(self.read(raw, pair))
            if test is not None:
                test.add(f"{pair.name} ({'second' if world else 'first'} input)", raw, input_)
        losses = [part.losses for part in parts if part.losses is not None]
        return Outcomes(np.concatenate([part.numbers for part in parts]), np.concatenate(losses) if losses else None)

    def read(self, raw: Any, pair: Pair) -> Outcomes:
        """Convert the result of `run` to numbers and, if the density is known, losses."""
        numbers = np.asarray(self.numbers(raw))
        numbers = numbers.reshape(len(numbers), -1)
        losses = None if self.log_ratio is None else np.asarray(self.log_ratio(raw, pair), dtype=np.float64)
        return Outcomes(numbers, losses)


def count_trials(delta: float) -> int:
    """Return the number of runs of either input that is needed to see events of probability `delta`."""
    return TRIALS if delta <= _PURE else int(min(max(TRIALS, _EXPECTED_HITS / delta), _MAX_TRIALS))


def draw_public_rows() -> tuple[Floats, NDArray[np.int64]]:
    """Return 200 standard normal rows of 16 dimensions, and labels of 4 classes."""
    return np.random.default_rng(0).standard_normal((ROWS, DIMENSION)), np.arange(ROWS, dtype=np.int64) % CLASSES


def draw_gallery(dimension: int = DIMENSION) -> Floats:
    """Return 200 other rows, as a gallery."""
    return np.random.default_rng(1).standard_normal((ROWS, dimension))


CheckRun = Callable[[Source, float], Check]

_STRENGTHS = ("epsilon", "delta", "nominal_epsilon", "vote_noise")


def make_check(name: str, find: Callable[[Source, float], str | None]) -> CheckRun:
    """Return a check that fails if ``find(source, alpha)`` returns a problem."""
    return lambda source, alpha: judge(name, find(source, alpha))


def make_frozen_check(estimator: Any) -> CheckRun:
    """Return a check that parameters set after `fit` do not change the guarantee."""
    return make_check("parameters set later", lambda *_: _find_unfrozen(estimator))


def _find_unfrozen(estimator: Any) -> str | None:
    """Describe a parameter that changes the guarantee of a fitted estimator."""
    before = estimator.guarantee
    parameters = estimator.get_params(deep=False)
    for name in (strength for strength in _STRENGTHS if parameters.get(strength)):
        with suppress(AttributeError, ValueError):  # a fitted release refuses every change
            after = copy.deepcopy(estimator).set_params(**{name: parameters[name] / 64}).guarantee
            if (after.epsilon, after.delta) != (before.epsilon, before.delta):
                return f"setting {name} after fit changes the guarantee, but not the noise"
    return None
