"""What is put to the test: two inputs that must look alike, how to run the mechanism on either, and the law it states.

Proofs: ``docs/theory/audit.md``, section 5. Attacked by ``tests/audit/test_law.py``.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln, ndtr, ndtri
from scipy.stats import binom, chi2

from nearveil.audit.report import Check
from nearveil.privacy import Guarantee
from nearveil.privacy.noise import Source

Floats = NDArray[np.float64]
Words = NDArray[np.uint64]
Coin = tuple[NDArray[np.bool_], float]

_BINS = 32
_LEVELS = 20  # sets of probability 1/2, 1/4, ... in either tail and around the middle
_FORGIVEN = 1e-3  # part of a probability: outcomes lie on grids, stated laws are continuous
_HASHED = 2.0**-64  # chance that two different rows have one hash
_LEAST_UNIFORM, _MOST_UNIFORM = 1e-300, 1 - 2.0**-53

_SETS = np.concatenate([np.full(_BINS, 1 / _BINS), np.tile(2.0 ** -np.arange(1, _LEVELS + 1), 3)])
_MIDDLE = np.arange(len(_SETS)) >= len(_SETS) - _LEVELS
TESTS = len(_SETS) + 1
"""How many tests there are of one array of numbers that must be uniform."""


@dataclass(frozen=True, eq=False)
class Law:
    """What a mechanism states about its outcomes, in a form that runs can contradict.

    Parameters
    ----------
    uniforms : callable, optional
        ``uniforms(seen, given)`` returns arrays. By the stated law of the input `given`, the entries of each array are
        independent and uniform between 0 and 1: the distribution function at what was seen. Arrays may depend on each
        other.
    coins : callable, optional
        ``coins(seen, given)`` returns pairs of an array of bool and the chance with which, by the stated law, each of
        its entries is True, independently of the others.
    values : callable, optional
        ``values(seen)`` returns numbers of shape (n, k) that hardly ever come twice.
    largest_value, largest_row : float, default=1.0
        No value of one column of `values`, and no whole row of it, is more probable than that. Where `values` is
        given, a law of `uniforms` that lies on a grid has cells that are no more probable either.
    consistent : callable, optional
        ``consistent(seen)`` says of each run whether what must follow from the released numbers does: a label that is
        that of the most votes.

    Examples
    --------
    >>> law = Law(uniforms=lambda seen, given: [ndtr(seen[:, 0] - given)])
    >>> watch = Watch(law)
    >>> noise = np.random.default_rng(0).normal(size=(4_000, 1))
    >>> watch.see("zero", noise, 0.0)
    >>> watch.find_misfit(1e-9)
    >>> watch.see("one", 1.0 + 0.8 * noise, 1.0)  # a fifth of the noise is missing
    >>> print(watch.find_misfit(1e-9))
    one, number 1 has not the spread that is stated (probability below 1e-30)
    """

    uniforms: Callable[[Any, Any], Sequence[Floats]] | None = None
    coins: Callable[[Any, Any], Sequence[Coin]] | None = None
    values: Callable[[Any], NDArray[Any]] | None = None
    largest_value: float = 1.0
    largest_row: float = 1.0
    consistent: Callable[[Any], NDArray[np.bool_]] | None = None


def compute_gaussian_uniforms(off: Floats) -> Floats:
    """Return the normal distribution function at deviations in units of the noise."""
    return np.asarray(ndtr(off))


def compute_laplace_uniforms(off: Floats) -> Floats:
    """Return the Laplace distribution function at deviations in units of the scale."""
    half = np.exp(-np.abs(off)) / 2
    return np.where(off < 0, half, 1 - half)


@dataclass
class _Counts:
    """What is kept of one array: how many entries lie in each set, and their squares as normal scores."""

    cell: float
    runs: int = 0
    hits: NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(_SETS), dtype=np.int64))
    squares: float = 0.0

    def add(self, uniforms: Floats) -> None:
        if not len(uniforms):
            return
        inside = np.clip(uniforms, _LEAST_UNIFORM, _MOST_UNIFORM)
        bins = np.bincount((inside * _BINS).astype(np.int64), minlength=_BINS)
        nested = [_count_levels(inside), _count_levels(1 - inside), _count_levels(np.abs(2 * inside - 1))]
        self.hits += np.concatenate([bins, *nested])
        self.squares += float((ndtri(inside) ** 2).sum())
        self.runs += len(uniforms)

    def find_misfit(self, mistake: float) -> str | None:
        """Say what does not fit, where something that improbable happened (Theorem 8)."""
        if not self.runs:
            return None
        share = mistake / TESTS / 2  # each test has two sides
        # A small set around the middle holds a cell of the grid more, or less, than stated; in tails cells are tiny.
        rarest = _compute_rarity(self.hits, self.runs, _SETS, np.where(_MIDDLE, 2 * self.cell, 0.0))
        worst = int(np.argmin(rarest))
        spread = min(
            float(chi2.sf(self.squares / (1 + _FORGIVEN), self.runs)),
            float(chi2.cdf(self.squares / (1 - _FORGIVEN), self.runs)),
        )
        if spread < share:
            return f"has not the spread that is stated ({_show_chance(2 * TESTS * spread)})"
        if rarest[worst] < share:
            return _describe_excess(
                int(self.hits[worst]), self.runs, float(_SETS[worst]), 2 * TESTS * float(rarest[worst])
            )
        return None


@dataclass
class _Coins:
    """What is kept of coins that have one chance."""

    chance: float
    runs: int = 0
    hits: int = 0

    def find_misfit(self, mistake: float) -> str | None:
        """Say what does not fit, where something that improbable happened."""
        rarity = 2 * float(_compute_rarity(np.array(self.hits), self.runs, np.array(self.chance), np.array(0.0)))
        return _describe_excess(self.hits, self.runs, self.chance, rarity) if rarity < mistake else None


def _compute_rarity(hits: NDArray[np.int64], runs: int, chances: Floats, doubt: Floats) -> Floats:
    """Return the probability of as many hits or more, or of as few or fewer, whichever is less."""
    above = binom.sf(hits - 1, runs, np.minimum(chances * (1 + _FORGIVEN) + doubt, 1.0))
    below = binom.cdf(hits, runs, np.maximum(chances * (1 - _FORGIVEN) - doubt, 0.0))
    return np.asarray(np.minimum(above, below))


def _describe_excess(hits: int, runs: int, chance: float, rarity: float) -> str:
    return f"has {hits:,} of {runs:,} runs where {chance * runs:,.1f} are stated ({_show_chance(rarity)})"


def _count_levels(distances: Floats) -> NDArray[np.int64]:
    """Return how many distances are at most 1/2, 1/4, and so on."""
    depth = np.floor(-np.log2(np.maximum(distances, _LEAST_UNIFORM))).astype(np.int64)
    counts = np.bincount(np.clip(depth, 0, _LEVELS), minlength=_LEVELS + 1)
    return np.cumsum(counts[::-1])[::-1][1:]


class Watch:
    """Collects what a law is judged by, in a number of runs that must not depend on what was seen."""

    def __init__(self, law: Law) -> None:
        self.law = law
        self._counts: dict[str, list[_Counts]] = {}
        self._coins: dict[str, list[_Coins]] = {}
        self._rows: dict[str, list[Words]] = {}
        self._columns: dict[str, list[int]] = {}
        self._first: dict[str, int] = {}
        self._judged = self._wrong = 0

    def see(self, name: str, seen: Any, given: Any) -> None:
        """Take note of what `run` returned on one input; runs of one name are counted together."""
        if self.law.uniforms is not None:
            arrays, cell = self.law.uniforms(seen, given), 0.0 if self.law.values is None else self.law.largest_value
            counted = self._counts.setdefault(name, [_Counts(cell) for _ in arrays])
            for counts, array in zip(counted, arrays, strict=True):
                counts.add(array)
        if self.law.coins is not None:
            tossed = self.law.coins(seen, given)
            kept = self._coins.setdefault(name, [_Coins(float(chance)) for _, chance in tossed])
            for coins, (hits, _) in zip(kept, tossed, strict=True):
                coins.runs, coins.hits = coins.runs + len(hits), coins.hits + int(hits.sum())
        if self.law.values is not None:
            values = self.law.values(seen)
            self._rows.setdefault(name, []).append(hash_rows(values))
            if name not in self._columns:  # of the first part alone: single columns are judged by fewer runs
                self._first[name] = len(values)
                self._columns[name] = [_count_most_repeated(hash_rows(column[:, None])) for column in values.T]
        if self.law.consistent is not None:
            fine = self.law.consistent(seen)
            self._judged, self._wrong = self._judged + len(fine), self._wrong + int((~fine).sum())

    def find_misfit(self, mistake: float) -> str | None:
        """Return what contradicts the stated law; a true one is called false with at most that probability."""
        every: list[tuple[str, _Counts | _Coins]] = [
            *((f"{name}, number {i}", one) for name, kept in self._counts.items() for i, one in enumerate(kept, 1)),
            *((f"{name}, coin {i}", one) for name, kept in self._coins.items() for i, one in enumerate(kept, 1)),
        ]
        found = ((name, one.find_misfit(mistake / len(every))) for name, one in every)
        return next((f"{name} {why}" for name, why in found if why is not None), None)

    def find_repeats(self, mistake: float) -> str | None:
        """Return which outcome came too often, by Theorem 9; None where none did."""
        for name, parts in self._rows.items():
            hashes, columns = np.concatenate(parts), self._columns[name]
            share = mistake / len(self._rows) / (1 + len(columns))
            looks = [(_count_most_repeated(hashes), len(hashes), self.law.largest_row + _HASHED, "outcome")]
            looks += [(times, self._first[name], self.law.largest_value + _HASHED, "value") for times in columns]
            for times, runs, largest, what in looks:
                chance = bound_repeat_chance(times, runs, largest)
                if chance < share:
                    return f"{name}: the same {what} came {times:,} times in {runs:,} runs ({_show_chance(chance)})"
        return None

    def find_contradictions(self) -> str | None:
        """Return how many outcomes contradict themselves; None where none does."""
        return f"{self._wrong:,} of {self._judged:,} outcomes contradict themselves" if self._wrong else None


def bound_repeat_chance(times: int, runs: int, largest: float) -> float:
    """Bound the chance that an outcome comes so often, where none is more probable than `largest` (Theorem 9)."""
    if times < 2:
        return 1.0
    ways = gammaln(runs + 1) - gammaln(times + 1) - gammaln(runs - times + 1)
    return math.exp(min(0.0, float(ways) + (times - 1) * math.log(min(largest, 1.0))))


def _count_most_repeated(values: Words) -> int:
    """Return how often the most frequent value comes."""
    return int(np.unique(values, return_counts=True)[1].max(initial=0))


def hash_rows(rows: NDArray[Any]) -> Words:
    """Return a hash of each row of numbers (the mixing of SplitMix64)."""
    if rows.dtype.kind == "f":
        words = np.ascontiguousarray(rows.astype(np.float64) + 0.0).view(np.uint64)  # one zero, not two
    else:
        words = np.ascontiguousarray(rows.astype(np.int64)).view(np.uint64)
    found = np.zeros(len(words), dtype=np.uint64)
    for column in words.T:
        found = found * np.uint64(0x9E3779B97F4A7C15) + column
        found = (found ^ (found >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        found = (found ^ (found >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        found ^= found >> np.uint64(31)
    return found


def _show_chance(chance: float) -> str:
    return "probability below 1e-30" if chance < 1e-30 else f"probability at most {chance:.0e}"


Coins = NDArray[np.bool_]

TRIALS = 200_000
ROWS, DIMENSION, CLASSES = 200, 16, 4  # of what a mechanism is fitted on where nobody has fitted it
_PURE = 1e-9  # a delta below is what samplers of finite precision cost
_SEEN_TIMES, _MOST_TRIALS = 30, 1_000_000  # how often an event of probability delta is to be seen, if that is possible
_CHUNK = 1 << 17  # runs at a time


@dataclass(frozen=True, eq=False)
class Pair:
    """Two inputs that are neighbours, so that the guarantee covers them.

    Parameters
    ----------
    name : str
        In words: "opposite unit vectors".
    first, second : object
        Whatever the experiment's `run` takes.
    """

    name: str
    first: Any = field(repr=False)
    second: Any = field(repr=False)


@dataclass(frozen=True, eq=False)
class Outcomes:
    """What an observer saw in many independent runs."""

    numbers: NDArray[Any]  # all that is seen, as numbers
    losses: Floats | None  # the log-likelihood ratio of the first input against the second, where it is known

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, rows: slice) -> "Outcomes":
        return Outcomes(self.numbers[rows], None if self.losses is None else self.losses[rows])


@dataclass(frozen=True, eq=False)
class Experiment:
    """A mechanism, its guarantee and the pairs of inputs that put it to the test.

    Parameters
    ----------
    name : str
    guarantee : Guarantee
        What is audited: its epsilon and delta.
    pairs : tuple of Pair
        Worst cases; the audit finds out which is the worst of them.
    run : callable
        ``run(input, n, source)`` runs the mechanism `n` times, independently, and returns what an observer sees.
    log_ratio : callable, optional
        ``log_ratio(seen, pair)`` returns ``ln p(seen | first) / p(seen | second)`` for each run, shape (n,).
    exact : bool, default=False
        Whether `log_ratio` is exactly that of the runs' law. Then the hockey-stick divergence is estimated from it. If
        not it serves as a score alone, which is safe whatever it is.
    numbers : callable, optional
        From what `run` returns to an array of shape (n, k); ``numpy.asarray`` by default.
    scores : tuple of (str, callable), optional
        Further ways to score an outcome: a name, and ``learn(first, second)`` that returns a score or None.
    together : callable, optional
        ``together(coins, pair, source)`` runs the mechanism *once* on many records, each the pair's first or second
        input by its coin, and returns what is seen of each: for the one-run estimate.
    law : Law, optional
        What is stated about the outcomes themselves. Runs that contradict it break the guarantee.
    checks : tuple of callable, optional
        ``check(source, mistake)`` uses the mechanism as its users do and returns a :class:`Check`. Where the check
        rests on chance, a sound mechanism fails it with a probability of at most `mistake`.
    trials : int, default=200000
        Runs of either input, unless the caller says otherwise.

    Examples
    --------
    ``docs/howto/audit.md`` has a mechanism of one's own at work.
    """

    name: str
    guarantee: Guarantee
    pairs: tuple[Pair, ...]
    run: Callable[[Any, int, Source], Any]
    log_ratio: Callable[[Any, Pair], Floats] | None = None
    exact: bool = False
    numbers: Callable[[Any], NDArray[Any]] = np.asarray
    scores: tuple[Any, ...] = ()
    together: Callable[[Coins, Pair, Source], Any] | None = None
    law: Law = field(default_factory=Law)
    checks: tuple[Callable[[Source, float], Check], ...] = ()
    trials: int = TRIALS

    def __post_init__(self) -> None:
        if not self.pairs:
            raise ValueError("pairs must hold at least one Pair of neighbouring inputs")
        if self.exact and self.log_ratio is None:
            raise ValueError("exact needs a log_ratio: without one nothing is known of the law")

    def observe(self, pair: Pair, which: int, runs: int, source: Source, watch: Watch | None = None) -> Outcomes:
        """Run on the pair's first (0) or second (1) input, in chunks, while `watch` looks on."""
        given = pair.second if which else pair.first
        parts = []
        for start in range(0, runs, _CHUNK):
            raw = self.run(given, min(_CHUNK, runs - start), source)
            parts.append(self.read(raw, pair))
            if watch is not None:
                watch.see(f"{pair.name} ({'second' if which else 'first'} input)", raw, given)
        losses = [part.losses for part in parts if part.losses is not None]
        return Outcomes(np.concatenate([part.numbers for part in parts]), np.concatenate(losses) if losses else None)

    def read(self, raw: Any, pair: Pair) -> Outcomes:
        """Turn what `run` returned into numbers and, where the density is known, losses."""
        numbers = np.asarray(self.numbers(raw))
        numbers = numbers.reshape(len(numbers), -1)
        losses = None if self.log_ratio is None else np.asarray(self.log_ratio(raw, pair), dtype=np.float64)
        return Outcomes(numbers, losses)


def count_trials(delta: float) -> int:
    """Return how many runs of either input it takes to see events of probability `delta`."""
    return TRIALS if delta <= _PURE else int(min(max(TRIALS, _SEEN_TIMES / delta), _MOST_TRIALS))


def draw_public_rows() -> tuple[Floats, NDArray[np.int64]]:
    """Return 200 standard normal rows of 16 dimensions, and labels of 4 classes."""
    return np.random.default_rng(0).standard_normal((ROWS, DIMENSION)), np.arange(ROWS, dtype=np.int64) % CLASSES


def draw_gallery() -> Floats:
    """Return 200 other rows, for mechanisms that have a map of a gallery."""
    return np.random.default_rng(1).standard_normal((ROWS, DIMENSION))
