"""Whether a SQLite file was changed, by whomever: asked before every answer, so it must cost next to nothing."""

import os
import sqlite3
import threading
from pathlib import Path
from typing import NamedTuple

_ABANDONED: list[sqlite3.Connection] = []  # a parent's connections are never closed by its child


class Mark(NamedTuple):
    """Equal as long as nobody changed the file, or put another in its place.

    Attributes
    ----------
    opening : int
        Of the connection that looked: versions of two connections do not compare.
    version : int
        As SQLite counts it, for one connection.
    """

    opening: int
    version: int


class FileWatch:
    """Looks at a SQLite file through a connection of its own, which never writes and waits for no writer.

    A look takes some microseconds; but a disk may hang, and SQLite tries for ten seconds to get a place among the
    readers where others hold all of them. So it is no work for an event loop.

    ``PRAGMA data_version`` changes with every commit of any other connection, in this process or another; it reads a
    page that is shared in memory. That the file itself is still in its place is asked of the directory.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._uri = path, f"{path.as_uri()}?mode=rw"
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._opening, self._file, self._process = 0, (0, 0), 0

    def mark(self) -> Mark | None:
        """Return what stands for the state of the file now.

        Returns
        -------
        Mark or None
            None where it cannot be told: somebody holds the file for itself.

        Raises
        ------
        OSError
            If the file is gone.
        """
        status = os.stat(self._path)  # noqa: PTH116 - twice as fast, on every request
        with self._lock:
            try:
                if (status.st_dev, status.st_ino) != self._file or os.getpid() != self._process:
                    self._open((status.st_dev, status.st_ino))
                assert self._connection is not None
                (version,) = self._connection.execute("PRAGMA data_version").fetchone()
            except sqlite3.Error:
                self._file = (0, 0)  # opened anew by the next
                return None
            return Mark(self._opening, version)

    def close(self) -> None:
        """Close the connection; it is opened again where it is needed."""
        with self._lock:
            self._drop()

    def _open(self, file: tuple[int, int]) -> None:
        self._drop()
        self._connection = sqlite3.connect(
            self._uri, uri=True, timeout=0, isolation_level=None, check_same_thread=False
        )
        self._opening, self._file, self._process = self._opening + 1, file, os.getpid()

    def _drop(self) -> None:
        if self._connection is not None:
            if self._process == os.getpid():
                self._connection.close()
            else:
                _ABANDONED.append(self._connection)
        self._connection, self._file = None, (0, 0)
