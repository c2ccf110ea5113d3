"""The log: lines of JSON without private values, written by a thread of the standard library."""

import json
import logging
import queue
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from io import TextIOWrapper
from logging.handlers import QueueHandler, QueueListener, WatchedFileHandler
from pathlib import Path
from typing import Any

from nearveil.server.limits import TokenBuckets
from nearveil.storage import open_private

_MAX_QUEUED = 20_000  # lines
_UNAUTHENTICATED = 60.0, 120  # lines about unauthenticated clients a minute, and at once after a pause
_SUMMARY_INTERVAL = 10.0  # seconds between two lines that count the others
_CLOSE_TIMEOUT = 2.0  # seconds
_to_json = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
LOGGERS = ("nearveil", "uvicorn", "uvicorn.error", "asyncio")


class _CountingHandler(logging.Handler):
    """Count records that cannot be written: a log must never stop the server."""

    dropped = 0
    failing = False  # whether the last record could not be written

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        self.failing = False
        try:
            super().emit(record)
        except (OSError, ValueError):
            self.handleError(record)

    def handleError(self, _: logging.LogRecord) -> None:  # noqa: N802
        """Count a record that was lost."""
        self.failing = True
        self.dropped += 1


class _FileOutput(_CountingHandler, WatchedFileHandler):
    """Append to a file that only its owner can read; open it again if it was moved."""

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", encoding="utf-8", opener=open_private)


class _StreamOutput(_CountingHandler, logging.StreamHandler[Any]):
    """Write to standard error."""


class JsonLog(QueueHandler):
    """Queue lines of JSON for a thread that writes them to `path`, or to standard error."""

    # Records of libraries are written without the text of exceptions; of the event loop, only type and location are
    # kept: their text has the arguments of the call that failed.

    def __init__(self, path: Path | None = None) -> None:
        self._queue: queue.Queue[Any] = queue.Queue(_MAX_QUEUED)
        super().__init__(self._queue)
        self._output = _StreamOutput(sys.stderr) if path is None else _FileOutput(path, delay=True)
        self._listener = QueueListener(self._queue, self._output)
        self._listener.start()
        self._is_open = True
        self._overflowed = 0
        self._unauthenticated = TokenBuckets(*_UNAUTHENTICATED)
        self._suppressed, self._summarized_at = 0, -_SUMMARY_INTERVAL

    @property
    def dropped(self) -> int:
        """The number of lines that were not written."""
        return self._overflowed + self._output.dropped

    @property
    def failing(self) -> bool:
        """Whether the last line could not be written."""
        return self._output.failing

    def write(self, fields: Mapping[str, Any]) -> None:
        """Queue a line, or count it if the queue is full."""
        line = _to_json({"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **fields})
        try:
            self._queue.put_nowait(logging.makeLogRecord({"msg": line}))
        except queue.Full:
            self._overflowed += 1

    def write_unauthenticated(self, fields: Mapping[str, Any]) -> None:
        """Queue a line about an unauthenticated client; beyond a rate, only count it."""
        if self._unauthenticated.take(""):
            self._suppressed += 1
        else:
            self.write(fields)
        now = time.monotonic()
        if self._suppressed and now - self._summarized_at >= _SUMMARY_INTERVAL:
            self.write({"event": "unauthenticated", "count": self._suppressed})
            self._suppressed, self._summarized_at = 0, now

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record of a library."""
        fields: dict[str, Any] = {"event": "log", "level": record.levelname.lower(), "logger": record.name}
        from_loop = record.name.partition(".")[0] == "asyncio"
        fields["message"] = "on the event loop" if from_loop else record.getMessage().strip()
        if record.exc_info and record.exc_info[1] is not None:
            fields.update(describe_error(record.exc_info[1]))
        self.write(fields)

    def close(self) -> None:
        """Write all queued lines and end the thread, unless that takes too long: a pipe may be stuck."""
        if self._is_open:
            self._is_open = False
            stopping = threading.Thread(target=self._stop, daemon=True)
            stopping.start()
            stopping.join(_CLOSE_TIMEOUT)
        super().close()

    def _stop(self) -> None:
        with suppress(queue.Full):
            self._listener.stop()
            self._output.close()


def install(log: JsonLog, level: str) -> None:
    """Send the records of this program and its libraries to the log, from a level up."""
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [], False
        logger.setLevel(logging.WARNING if name.startswith(("uvicorn", "asyncio")) else level.upper())
    for name in ("nearveil", "uvicorn", "asyncio"):
        logging.getLogger(name).addHandler(log)
    logging.getLogger("uvicorn.error").propagate = True


def describe_error(error: BaseException) -> dict[str, str]:
    """Return type and location of an error, without its text, which may quote private values."""
    frames = traceback.extract_tb(error.__traceback__)
    locations = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames[-4:]]
    return {"error": type(error).__name__, "at": " > ".join(locations)}
