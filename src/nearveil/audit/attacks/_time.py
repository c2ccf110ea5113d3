"""Time: how much work a release is must not depend on the record. The clock counts operations, not seconds."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from nearveil.audit._experiment import Experiment
from nearveil.audit._releases import fitted, release_experiment
from nearveil.mechanisms import Release
from nearveil.privacy.noise import Source

_TRIALS = 1_200
_WARM = 3  # runs before the clock starts: what is computed once and kept is no secret


class Clock(Protocol):
    """Something that measures the work between `start` and `stop`."""

    def start(self) -> None: ...

    def stop(self) -> int:
        """Return the work since `start`."""
        ...


class OperationClock:
    """Counts the lines of Python that are executed.

    What a line does inside NumPy counts as one operation, however long it takes (``docs/theory/audit.md``). Seconds
    would be truer, and would never be the same twice.

    Examples
    --------
    >>> clock = OperationClock()
    >>> def work(n):
    ...     for _ in range(n):
    ...         pass
    >>> def measured(n):
    ...     clock.start()
    ...     work(n)
    ...     return clock.stop()
    >>> measured(10) < measured(20) == measured(20)
    True
    """

    def __init__(self) -> None:
        self._count = 0
        self._before: Any = None

    def start(self) -> None:
        """Begin to count."""
        self._count, self._before = 0, sys.gettrace()
        sys.settrace(self._trace)

    def stop(self) -> int:
        """Stop, and return how many lines were executed."""
        sys.settrace(self._before)
        return self._count

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        del frame, argument
        if event == "line":
            self._count += 1
        return self._trace


class CountingSource:
    """A source that counts the words that are drawn from it."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.drawn = 0

    @property
    def sound(self) -> bool:
        """Whether nobody can foresee the words."""
        return self._source.sound

    def words(self, count: int) -> NDArray[np.uint64]:
        """Return the next words."""
        self.drawn += count
        return self._source.words(count)


def time_experiment(release: Release, *, clock: Callable[[], Clock] = OperationClock) -> Experiment:
    """Return the experiment of the work that one release is: an observer sees how long it took, and nothing else.

    `clock`: Makes the clock. Inject another to measure something else.
    """
    ready = fitted(release)
    told = release_experiment(ready)

    def run(row: Any, runs: int, source: Source) -> NDArray[np.int64]:
        return np.array([_worked(told, row, clock(), source) for _ in range(runs + _WARM)][_WARM:], dtype=np.int64)

    return Experiment(
        name=f"{told.name}: time",
        promise=told.promise,
        pairs=told.pairs,
        run=run,
        trials=_TRIALS,
    )


def _worked(told: Experiment, row: Any, clock: Clock, source: Source) -> tuple[int, int]:
    """Return the operations and the random words of one release."""
    counting = CountingSource(source)
    clock.start()
    try:
        told.run(row, 1, counting)
    finally:
        work = clock.stop()
    return work, counting.drawn
