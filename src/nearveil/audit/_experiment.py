"""What is put to the test: two inputs that must look alike, and how to run the mechanism on either."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearveil.audit._law import Law, Watch
from nearveil.audit.report import Check
from nearveil.privacy import Guarantee
from nearveil.privacy.noise import Source

Floats = NDArray[np.float64]
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
