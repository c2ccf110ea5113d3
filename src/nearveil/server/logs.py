"""Logs and metrics: what an operator sees. Nothing private stands in them."""

import json
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, multiprocess
from prometheus_client.core import GaugeMetricFamily

from nearveil.ledger import Account
from nearveil.server.errors import RateError
from nearveil.server.galleries import Gallery, OpenGallery
from nearveil.server.limits import Buckets
from nearveil.storage import open_private

_ALIVE = b"READY=1\nWATCHDOG=1"


def tell_alive() -> None:
    """Give a sign of life to the service manager, if there is one that waits for it (sd_notify(3))."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sending:
        sending.setblocking(False)
        sending.sendto(_ALIVE, "\0" + address[1:] if address.startswith("@") else address)


_GALLERY = {
    "revision": ("nearveil_gallery_revision", "Of the newest map."),
    "stale": ("nearveil_gallery_stale", "1 where the gallery changed after its newest map."),
    "up": ("nearveil_gallery_up", "1 where the gallery can be read."),
    "left": ("nearveil_ledger_left_epsilon", "What a protected gallery's account may still spend."),
}
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


@runtime_checkable
class Paying(Protocol):
    """A gallery that pays for what it publishes."""

    @property
    def account(self) -> Account | None:
        """Who pays; None before the first publication."""
        ...


class Metrics:
    """All figures of one server, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "nearveil_requests", "Requests by route and status.", ["route", "status"], registry=self.registry
        )
        self._seconds = Histogram(
            "nearveil_request_seconds", "How long requests took.", ["route"], buckets=_SECONDS, registry=self.registry
        )
        self.in_flight = Gauge(
            "nearveil_in_flight", "Requests under way.", registry=self.registry, multiprocess_mode="livesum"
        )
        self._refused = Counter(
            "nearveil_refused", "Requests that were refused, by the code of the problem.", ["code"],
            registry=self.registry,
        )  # fmt: skip
        self._bytes = Counter(
            "nearveil_answer_bytes", "Bytes of bodies that were sent.", ["route"], registry=self.registry
        )
        self.made = Counter(
            "nearveil_answers_made", "Answers that a thread made: neither kept nor small.", registry=self.registry
        )
        self.log_lines_dropped = Gauge(
            "nearveil_log_lines_dropped", "Lines that could not be written.", registry=self.registry,
            multiprocess_mode="sum",
        )  # fmt: skip
        self._known: dict[tuple[str, int], tuple[Callable[[], None], Callable[[float], None], Callable[[float], None]]]
        self._known = {}

    def count(self, route: str, status: int, seconds: float, sent: int) -> None:
        """Count a request that has ended."""
        found = self._known.get((route, status))
        if found is None:  # there are few routes and statuses; looking up labels anew takes longer than counting
            requests = self._requests.labels(route, str(status))
            found = requests.inc, self._seconds.labels(route).observe, self._bytes.labels(route).inc
            self._known[route, status] = found
        found[0]()
        found[1](seconds)
        found[2](sent)

    def refuse(self, code: str) -> None:
        """Count a refusal, by its code."""
        self._refused.labels(code).inc()

    def exposition(self, figures: Sequence["GalleryFigures"], dropped: int) -> bytes:
        """Return figures of some galleries and those of the server, as Prometheus reads them."""
        self.log_lines_dropped.set(dropped)
        galleries = CollectorRegistry()
        galleries.register(_Collector(figures))
        return generate_latest(_whole(self.registry)) + generate_latest(galleries)


def _whole(own: CollectorRegistry) -> CollectorRegistry:
    """Return the figures of all processes of a server, where there are several; else those of this one."""
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        return own
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return registry


def forget_process(pid: int | None) -> None:
    """Count what a process had under way no more: it has died."""
    multiprocess.mark_process_dead(pid)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class GalleryFigures:
    """Figures of one gallery; None where there is none, or the gallery cannot be read."""

    name: str
    up: bool = False
    revision: int | None = None
    stale: bool | None = None
    left: float | None = None

    @classmethod
    def of(cls, gallery: Gallery) -> "GalleryFigures":
        """Look at a gallery. It may wait for a disk or a database."""
        return cls(
            gallery.name,
            True,
            gallery.info().revision,
            gallery.stale if isinstance(gallery, OpenGallery) else None,
            gallery.account.balance().left if isinstance(gallery, Paying) and gallery.account is not None else None,
        )


@dataclass(frozen=True, eq=False)
class _Collector:
    """Gives figures of galleries to a registry. They are kept nowhere: whoever asks next may be told of others."""

    figures: Sequence[GalleryFigures]

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Return the figures, as Prometheus has them."""
        for name, (metric, text) in _GALLERY.items():
            family = GaugeMetricFamily(metric, text, labels=["gallery"])
            for one in self.figures:
                value = getattr(one, name)
                if value is not None:
                    family.add_metric([one.name], float(value))
            yield family


_MOST = 20_000  # lines that wait
_STRANGERS = 60.0, 120  # lines of strangers a minute, and at once after a pause
_UNSAID = 10.0  # seconds between two lines that count the others
_PAUSE = 0.1  # seconds between two rounds of writing
_as_json = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
LOGGERS = ("nearveil", "uvicorn", "uvicorn.error", "asyncio")


class LineWriter:
    """Writes lines of JSON to standard error or to a file, opened anew for each round: it may be moved meanwhile."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._lines: deque[str] = deque()
        self._wake, self._closing = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._starting, self._writing = threading.Lock(), threading.Lock()
        self._strangers = Buckets(*_STRANGERS)
        self._unsaid, self._said = 0, -_UNSAID
        self.dropped = 0
        self.failing = False  # whether the last round could not be written

    def write_stranger(self, fields: Mapping[str, Any]) -> None:
        """Write a line about somebody without a good token; beyond a rate they are only counted, in one line."""
        try:
            self._strangers.take("")
            self.write(fields)
        except RateError:
            self._unsaid += 1
        now = time.monotonic()
        if self._unsaid and now - self._said >= _UNSAID:
            self.write({"event": "strangers", "count": self._unsaid})
            self._unsaid, self._said = 0, now

    def write(self, fields: Mapping[str, Any]) -> None:
        """Write a line soon; where too many wait, it is dropped and counted."""
        if len(self._lines) >= _MOST:
            self.dropped += 1
            return
        self._lines.append(_as_json({"time": _now(), **fields}))
        if not self._wake.is_set():
            self._wake.set()
            if self._thread is None:
                self._start()

    def flush(self) -> None:
        """Write all that waits."""
        with self._writing:
            taken = []
            with suppress(IndexError):
                while True:
                    taken.append(self._lines.popleft())
            if taken:
                self._put("\n".join(taken) + "\n")

    def close(self) -> None:
        """Write all that waits, and end the thread."""
        self._closing.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout=2)  # a pipe that nobody reads must not keep a server from ending
        else:
            self.flush()

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="nearveil-log", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while not self._closing.is_set():
            self._wake.wait()
            self._closing.wait(_PAUSE)
            self._wake.clear()  # before the lines are taken: one that comes now wakes us again
            self.flush()
        self.flush()

    def _put(self, text: str) -> None:
        try:
            if self._path is None:
                sys.stderr.write(text)
                sys.stderr.flush()
            else:
                with open(self._path, "a", encoding="utf-8", opener=open_private) as file:
                    file.write(text)
            self.failing = False
        except (OSError, ValueError):  # a full disk, a closed stream
            self.dropped += text.count("\n")
            self.failing = True


class LineHandler(logging.Handler):
    """Sends what libraries log to the same lines, without what an exception says.

    Of what the event loop logs, only the error's type and place are left: its text has the arguments of what failed.
    """

    def __init__(self, writer: LineWriter) -> None:
        super().__init__()
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        fields: dict[str, Any] = {"event": "log", "level": record.levelname.lower(), "logger": record.name}
        loop = record.name.partition(".")[0] == "asyncio"
        fields["message"] = "on the event loop" if loop else record.getMessage().strip()
        if record.exc_info and record.exc_info[1] is not None:
            fields.update(described(record.exc_info[1]))
        self._writer.write(fields)


def install(writer: LineWriter, level: str) -> LineHandler:
    """Send what this program and its libraries log to a writer, from a level up."""
    handler = LineHandler(writer)
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [], False
        logger.setLevel(logging.WARNING if name.startswith(("uvicorn", "asyncio")) else level.upper())
    for name in ("nearveil", "uvicorn", "asyncio"):
        logging.getLogger(name).addHandler(handler)
    logging.getLogger("uvicorn.error").propagate = True
    return handler


def described(error: BaseException) -> dict[str, str]:
    """Return type and place of an error. Not its text, which may quote what it was given.

    Examples
    --------
    >>> try:
    ...     int("a secret")
    ... except ValueError as error:
    ...     described(error)["error"]
    'ValueError'
    """
    frames = traceback.extract_tb(error.__traceback__)
    at = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames[-4:]]
    return {"error": type(error).__name__, "at": " > ".join(at)}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
