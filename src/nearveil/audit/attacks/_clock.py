"""The clock: hostile servers send maps that make a client's work depend on its feature, and measure when it asks.

Nothing here is counted or simulated: the real client asks, and real time is taken between the moment when the map was
handed over and the moment when the question came. Machines drift, so each run asks about the feature and about another
one that is public, in random order, and the observer sees the difference.
"""

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from types import FrameType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearveil.audit._experiment import Experiment, Floats, Pair
from nearveil.audit._releases import fit_release, make_release_experiment
from nearveil.gallery.answers import WholeCodes
from nearveil.mechanisms import PublicMap, Release
from nearveil.mechanisms.covers.maps import MOST_DIMENSIONS, MOST_PROTOTYPES
from nearveil.privacy.noise import Source
from nearveil.wire import ClientProtocol
from nearveil.wire.client import PublicPart

Asking = Callable[[Floats], float]
Observer = Callable[[PublicPart], AbstractContextManager[Asking]]

EPSILON = 1.0
DIMENSION = MOST_DIMENSIONS
_ITEMS = 1000
_AT_ONCE = 8  # clients that wait at the same time
_TRIALS = 800
_COUNTED_TRIALS = 1_200
_WARM = 3  # runs before the clock starts: what is computed once and kept is no secret
_SUBNORMAL = 2.0**-24


@dataclass(frozen=True, eq=False)
class TimedQuestion:
    """What one run is about."""

    public: PublicPart  # of a hostile server
    feature: Floats = field(repr=False)  # private
    reference: Floats = field(repr=False)  # public, to compare with


def ask_through_client(public: PublicPart) -> AbstractContextManager[Asking]:
    """Let a client ask a hostile server in this process."""
    from nearveil.audit.attacks._hostile_server import open_asking_client

    return open_asking_client(public)


def time_choice(public: PublicPart) -> AbstractContextManager[Asking]:
    """Measure the choice of a set alone, without anything that hides its time."""

    def ask(feature: Floats) -> float:
        row = (feature / np.linalg.norm(feature))[None]
        start = perf_counter()
        public.map.choose(row)
        return perf_counter() - start

    return nullcontext(ask)


def make_clock_experiment(
    observer: Observer = ask_through_client,
    *,
    name: str = "covers: clock",
    at_once: int = _AT_ONCE,
    trials: int = _TRIALS,
) -> Experiment:
    """Return the experiment of the time that passes between a map and the question about it.

    `observer`: ``observer(public)`` is a context with a callable: it asks a server with this public part about a
    feature, and returns the seconds that the server saw. By default a :class:`nearveil.Client` asks over a
    transport in this process.
    `at_once`: How many ask at the same time. A client waits most of the time.
    """

    def run(asked: TimedQuestion, runs: int, source: Source) -> NDArray[np.float64]:
        first = source.words(runs) % np.uint64(2) == 1
        with ExitStack() as stack:
            asking = [stack.enter_context(observer(asked.public)) for _ in range(min(at_once, runs))]
            with ThreadPoolExecutor(len(asking)) as pool:
                shares = np.array_split(first, len(asking))
                parts = pool.map(lambda ask, share: _time_differences(ask, asked, share), asking, shares)
                return np.concatenate(list(parts))

    return Experiment(
        name=name,
        guarantee=ClientProtocol(EPSILON).guarantee,
        pairs=tuple(_make_pair(family, public) for family, public in make_hostile_parts().items()),
        run=run,
        trials=trials,
    )


def _time_differences(ask: Asking, asked: TimedQuestion, first: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return how much longer the feature took than the reference, in microseconds."""
    ask(asked.reference)  # what is computed once and kept depends on the map alone
    found = []
    for feature_first in first:
        if feature_first:
            own, other = ask(asked.feature), ask(asked.reference)
        else:
            other, own = ask(asked.reference), ask(asked.feature)
        found.append(1e6 * (own - other))
    return np.array(found)


def make_hostile_parts(prototypes: int = MOST_PROTOTYPES) -> dict[str, PublicPart]:
    """Return what hostile servers publish, by what it is made to slow down, with so many prototypes a map."""
    arc = _make_arc(prototypes)
    exact = np.eye(DIMENSION, dtype=np.float16)
    small = np.full((DIMENSION, MOST_DIMENSIONS), _SUBNORMAL, dtype=np.float16)
    small[0, 0] = 1.0
    some = (255 * np.random.default_rng(0).integers(0, 2, (prototypes, 8))).astype(np.uint8)
    many = np.full((prototypes, 256), 255, dtype=np.uint8)
    return {
        "prototypes sorted along an arc": _make_part(exact, arc, some),
        "subnormal components": _make_part(small, arc, some),
        "components that overflow": _make_part(np.full_like(small, 65504.0), arc, some),
        "ties everywhere, and many sets": _make_part(exact, np.ones_like(arc), many),
    }


def _make_arc(count: int) -> NDArray[np.int8]:
    """Return prototypes from one end of an axis to the other, each nearer to the one end than all before."""
    angles = np.linspace(0.0, np.pi, count)
    rows = np.zeros((count, MOST_DIMENSIONS))
    rows[:, 0], rows[:, 1] = np.cos(angles), np.sin(angles)
    return np.rint(127 * rows).astype(np.int8)


def _make_part(components: NDArray[Any], prototypes: NDArray[np.int8], coverage: NDArray[np.uint8]) -> PublicPart:
    return PublicPart(
        gallery="hostile",
        revision=1,
        mechanism="covers",
        epsilon=EPSILON,
        candidates=0.1,
        public_digest="0" * 32,
        mean=np.zeros(DIMENSION),
        map=PublicMap(components, prototypes, coverage, _ITEMS, _ITEMS // 10),
        table=WholeCodes(DIMENSION),
        extractor="",
        fingerprint="hostile",
    )


def _make_pair(family: str, public: PublicPart) -> Pair:
    """Return features at the two ends of the arc."""
    ends = np.zeros((2, DIMENSION))
    ends[:, 0], ends[:, 1] = (1.0, -1.0), 0.1
    return Pair(family, TimedQuestion(public, ends[0], ends[0]), TimedQuestion(public, ends[1], ends[0]))


def count_lines(work: Callable[[], object]) -> int:
    """Return how many lines of Python some work executes; unlike seconds, the number is the same in every run.

    A line that calls NumPy counts as one, however long it takes (``docs/theory/audit.md``).
    """
    lines, before = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        del frame, argument
        lines += event == "line"
        return trace

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return lines


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


def make_time_experiment(
    release: Release, *, measure: Callable[[Callable[[], object]], int] = count_lines
) -> Experiment:
    """Return the experiment of the work that one release is: an observer sees how long it took, and nothing else.

    `measure`: From a call without arguments to the work that it is.
    """
    released = make_release_experiment(fit_release(release))

    def measure_one(row: Any, source: Source) -> tuple[int, int]:
        counting = CountingSource(source)
        return measure(lambda: released.run(row, 1, counting)), counting.drawn

    def run(row: Any, runs: int, source: Source) -> NDArray[np.int64]:
        return np.array([measure_one(row, source) for _ in range(runs + _WARM)][_WARM:], dtype=np.int64)

    return Experiment(
        name=f"{released.name}: time",
        guarantee=released.guarantee,
        pairs=released.pairs,
        run=run,
        trials=_COUNTED_TRIALS,
    )
