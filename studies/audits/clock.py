"""Timing attacks: hostile servers send maps that make a client's work depend on its feature, and measure the delay.

Nothing is simulated: the real client asks, and the server measures real time from its map to the question. Clocks
drift, so each run asks about the private feature and about a public reference, in random order, and the observer sees
the difference.
"""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from time import perf_counter
from types import FrameType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearveil.audit._experiment import Experiment, Floats, Pair
from nearveil.audit._releases import fit_release, make_release_experiment
from nearveil.gallery.codes import WholeCodes
from nearveil.mechanisms import PublicMap, Release
from nearveil.mechanisms.covers.channels import set_guarantee
from nearveil.mechanisms.covers.maps import MOST_DIMENSIONS, MOST_PROTOTYPES
from nearveil.metrics import CENTRED, ScoreSpace
from nearveil.privacy.events import PureDp
from nearveil.privacy.noise import Source
from nearveil.wire.messages import PublicPart
from nearveil.wire.schema import FRAME, Galleries
from studies.audits.wire import FreeAccount

QuestionTimer = Callable[[Floats], float]
Observer = Callable[[PublicPart], AbstractContextManager[QuestionTimer]]

ETAG = '"map"'
EPSILON = 1.0
DIMENSION = MOST_DIMENSIONS
_ITEMS = 1000
_AT_ONCE = 8  # concurrent clients
_TRIALS = 800
_COUNTED_TRIALS = 1_200
_WARM = 3  # runs before the measurement, to fill caches, which depend on public data only
_SUBNORMAL = 2.0**-24


@dataclass(frozen=True, eq=False)
class TimedQuestion:
    """The inputs of one run."""

    public: PublicPart  # from a hostile server
    feature: Floats = field(repr=False)  # private
    reference: Floats = field(repr=False)  # public


@contextmanager
def ask_through_client(public: PublicPart, prepare: Callable[[Any], object] = id) -> Iterator[QuestionTimer]:
    """Open a client of a hostile in-process server that answers nothing; `prepare` is called with it before it asks."""
    import httpx

    from nearveil.client import Client, GalleryInfo, UnansweredError

    info = GalleryInfo(
        name=public.gallery,
        kind="open",
        candidates=(0.1,),
        offers=(),
        extractor="",
        fingerprint=public.fingerprint,
        dimension=DIMENSION,
        revision=1,
    )
    galleries, frame = Galleries(galleries=(info,)).model_dump_json().encode(), public.to_bytes()
    sent_at = gap = 0.0

    def reply(request: httpx.Request) -> httpx.Response:
        nonlocal sent_at, gap
        now, status, kind, body = perf_counter(), 200, "application/json", galleries
        if request.url.path.endswith("/map"):
            cached = request.headers.get("If-None-Match") == ETAG
            status, kind, body = 304 if cached else 200, FRAME, b"" if cached else frame
            sent_at = perf_counter()
        elif not request.url.path.endswith("/galleries"):
            gap = now - sent_at
            status, body = 400, b'{"code": "hostile", "message": "no answer"}'
        return httpx.Response(status, headers={"content-type": kind, "etag": ETAG}, stream=httpx.ByteStream(body))

    transport = httpx.MockTransport(reply)
    with Client("https://hostile.example", "token", account=FreeAccount(), retries=0, transport=transport) as client:
        prepare(client)

        def ask(feature: Floats) -> float:
            with suppress(UnansweredError):
                client.nearest(feature, epsilon=EPSILON)
            return gap

        yield ask


def time_choice(public: PublicPart) -> AbstractContextManager[QuestionTimer]:
    """Measure only the choice of a set, without the delays that hide its time."""

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
    """Return the experiment of the time between a map and the question about it.

    ``observer(public)`` is a context manager for a callable that asks a server with this public part about a feature,
    and returns the seconds that the server measured. `at_once` clients ask at a time: a client waits most of the time.
    """

    def run(question: TimedQuestion, runs: int, source: Source) -> NDArray[np.float64]:
        first = source.words(runs) % np.uint64(2) == 1
        with ExitStack() as stack:
            asking = [stack.enter_context(observer(question.public)) for _ in range(min(at_once, runs))]
            with ThreadPoolExecutor(len(asking)) as pool:
                shares = np.array_split(first, len(asking))
                parts = pool.map(lambda ask, share: _time_differences(ask, question, share), asking, shares)
                return np.concatenate(list(parts))

    ends = np.zeros((2, DIMENSION))  # of the arc
    ends[:, 0], ends[:, 1] = (1.0, -1.0), 0.1
    return Experiment(
        name=name,
        guarantee=set_guarantee(PureDp(EPSILON)),
        pairs=tuple(
            Pair(family, TimedQuestion(public, ends[0], ends[0]), TimedQuestion(public, ends[1], ends[0]))
            for family, public in make_hostile_parts().items()
        ),
        run=run,
        trials=trials,
    )


def _time_differences(ask: QuestionTimer, question: TimedQuestion, first: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the time of the feature minus the time of the reference, in microseconds."""
    ask(question.reference)  # fill caches, which depend on the map only
    differences = []
    for sign in np.where(first, 1e6, -1e6):
        inputs = (question.feature, question.reference)[:: int(np.sign(sign))]
        differences.append(sign * (ask(inputs[0]) - ask(inputs[1])))
    return np.array(differences)


def make_hostile_parts() -> dict[str, PublicPart]:
    """Return public parts of hostile servers, by the weakness that they target."""
    angles = np.linspace(0.0, np.pi, MOST_PROTOTYPES)
    arc = np.zeros((MOST_PROTOTYPES, MOST_DIMENSIONS), dtype=np.int8)  # in order from one end of an axis to the other
    arc[:, 0], arc[:, 1] = np.rint(127 * np.cos(angles)), np.rint(127 * np.sin(angles))
    exact = np.eye(DIMENSION, dtype=np.float16)
    small = np.full((DIMENSION, MOST_DIMENSIONS), _SUBNORMAL, dtype=np.float16)
    small[0, 0] = 1.0
    random_sets = (255 * np.random.default_rng(0).integers(0, 2, (MOST_PROTOTYPES, 8))).astype(np.uint8)
    full_sets = np.full((MOST_PROTOTYPES, 256), 255, dtype=np.uint8)
    return {
        "prototypes sorted along an arc": _make_part(exact, arc, random_sets),
        "subnormal components": _make_part(small, arc, random_sets),
        "components that overflow": _make_part(np.full_like(small, 65504.0), arc, random_sets),
        "ties everywhere, and many sets": _make_part(exact, np.ones_like(arc), full_sets),
    }


def _make_part(components: NDArray[Any], prototypes: NDArray[np.int8], coverage: NDArray[np.uint8]) -> PublicPart:
    return PublicPart(
        gallery="hostile",
        revision=1,
        mechanism="covers",
        epsilon=EPSILON,
        candidates=0.1,
        public_digest="0" * 32,
        space=ScoreSpace(CENTRED, np.zeros(DIMENSION)),
        map=PublicMap(components, prototypes, coverage, _ITEMS, _ITEMS // 10),
        table=WholeCodes(DIMENSION),
        extractor="",
        fingerprint="hostile",
    )


def count_lines(work: Callable[[], object]) -> int:
    """Count executed lines of Python, which unlike seconds never vary; NumPy calls are one (docs/theory/audit.md)."""
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
    """A source that counts the words drawn from it."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.drawn = 0

    @property
    def sound(self) -> bool:
        """Whether the words are unpredictable."""
        return self._source.sound

    def words(self, count: int) -> NDArray[np.uint64]:
        """Return the next words."""
        self.drawn += count
        return self._source.words(count)


def make_time_experiment(
    release: Release, *, measure: Callable[[Callable[[], object]], int] = count_lines
) -> Experiment:
    """Return the experiment of the work of one release, which is all that the observer sees."""
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
