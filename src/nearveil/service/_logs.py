"""Lines of JSON, written by a thread of their own: a full disk or a pipe that nobody reads stops no request.

A line of a request holds when, which route, how it ended, how long it took and whose token it was; nothing of what was
asked. A line of an error holds its type and where in the code it arose, never its text.
"""

import json
import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nearveil.service._errors import RateError
from nearveil.service._limits import Buckets

_MOST = 20_000  # lines that wait
_STRANGERS = 60.0, 120  # lines of strangers a minute, and at once after a pause
_UNSAID = 10.0  # seconds between two lines that count the others
_PAUSE = 0.1  # seconds between two rounds of writing
_as_json = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
LOGGERS = ("nearveil", "uvicorn", "uvicorn.error", "asyncio")


class LineWriter:
    """Writes lines of JSON to a file or to the standard error, in rounds.

    `path`: Opened anew for each round, so that it may be moved away meanwhile; the standard error by default.
    """

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
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(text)
            self.failing = False
        except (OSError, ValueError):  # a full disk, a closed stream
            self.dropped += text.count("\n")
            self.failing = True


class LineHandler(logging.Handler):
    """Sends what libraries log to the same lines, without what an exception says.

    The event loop writes what failed, and with which arguments, into its text: of that, only the error's type and
    place are left.
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
