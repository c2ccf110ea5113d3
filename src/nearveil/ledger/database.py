"""The database of a ledger: durable transactions that are retried, and errors that say what to do."""

import os
import random
import sqlite3
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import URL

from nearveil import storage
from nearveil.ledger.errors import CorruptLedgerError, LedgerError, LedgerFullError, LedgerUnavailableError
from nearveil.ledger.store import Receipt
from nearveil.ledger.witness import Witness
from nearveil.storage import describe_url, find_error_code, is_connection_refused, is_transient

Clock = Callable[[], datetime]
T = TypeVar("T")

_BUSY = 0.025  # seconds; SQLite's own backoff grows, which starves late writers: short rounds are fair
_JITTER = random.SystemRandom()


def read_utc_clock() -> datetime:
    """Return the time of the system clock."""
    return datetime.now(UTC)


class LedgerDatabase(storage.Database):
    """The database of one ledger and, once it is known, its witness; `read_only` never writes a SQLite file."""

    witness: Witness | None = None

    def __init__(self, url: URL, timeout: float, clock: Clock = read_utc_clock, *, read_only: bool = False) -> None:
        self.clock, self.read_only = clock, read_only
        prepare = _prepare_postgres
        if file := storage.find_file(url):
            prepare = _forbid_writing if read_only else storage.prepare_durable
            if not read_only:
                with suppress(OSError):  # SQLite reports the reason
                    storage.make_private_file(file)
        try:
            super().__init__(url, timeout, prepare=prepare, busy=_BUSY, ping=False)
        except ModuleNotFoundError as missing:
            raise LedgerError('PostgreSQL needs psycopg: pip install "nearveil[postgres]"') from missing

    def now(self) -> str:
        """Return the time as stored, in UTC. It informs people; no decision depends on it."""
        return self.clock().astimezone(UTC).isoformat(timespec="microseconds")

    def write(self, work: Callable[[sa.Connection], tuple[T, Receipt | None]]) -> T:
        """Run `work` in one durable transaction, then record its receipt in the witness."""
        # A transaction on a broken connection is retried, although it may have been committed: `work` must know its
        # own entries by their nonce.
        if self.read_only:
            raise LedgerError("this ledger was opened with read_only=True: open it without, to spend")
        result, receipt = self._retry(self.begin_write, work)
        if self.witness is not None and receipt is not None:
            self.witness.advance(receipt)
        return result

    def read(self, work: Callable[[sa.Connection], T]) -> T:
        """Run `work` on one consistent snapshot."""
        return self._retry(self.begin_read, work)

    def _retry(
        self, begin: Callable[[], AbstractContextManager[sa.Connection]], work: Callable[[sa.Connection], T]
    ) -> T:
        deadline = time.monotonic() + self.timeout
        while True:
            try:
                with begin() as connection:
                    return work(connection)
            except (sa.exc.DBAPIError, sa.exc.TimeoutError) as error:
                if not is_transient(error) or time.monotonic() > deadline:
                    raise explain_error(error, self.url) from error
            # All waiting processes poll equally often, so all have the same chance.
            time.sleep(_JITTER.uniform(0.0005, 0.004) if self.is_file else _JITTER.uniform(0.01, 0.1))

    def copy_to(self, target: Path) -> None:
        """Copy a SQLite file to a new one, consistently, while others write."""
        try:
            os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            raise LedgerError(f"backup: {target} exists; a backup overwrites nothing, use another path") from None
        except OSError as error:
            raise LedgerError(f"backup: {target} cannot be written: {error.strerror}") from error
        try:
            with closing(sqlite3.connect(self.path)) as source, closing(sqlite3.connect(target)) as copy:
                source.backup(copy)
        except sqlite3.Error as error:
            target.unlink(missing_ok=True)  # no partial backup
            raise explain_error(sa.exc.DBAPIError("backup", {}, error), self.url) from error


def _prepare_postgres(connection: Any) -> None:
    # Every lookup has an index. A plan made while the tables were small would scan them, and be cached.
    connection.execute("SET enable_seqscan = off")
    connection.commit()


def _forbid_writing(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA query_only = ON")  # setting a journal mode would write to the file, too


_NO_LEDGER = (CorruptLedgerError, "its tables are not those of a ledger; restore the newest backup")
_LOCKED = (LedgerUnavailableError, "timeout: other processes hold its lock; release nothing, try again")
_ERRORS: dict[int | str, tuple[type[LedgerError], str]] = {
    **{code: (LedgerError, text) for code, text in storage.COMMON_ERRORS.items()},
    **{code: (LedgerFullError, storage.COMMON_ERRORS[code]) for code in (sqlite3.SQLITE_FULL, "53100")},
    sqlite3.SQLITE_CANTOPEN: (LedgerError, "it cannot be opened: the directory must exist and be writable"),
    sqlite3.SQLITE_NOTADB: (
        CorruptLedgerError,
        "the file is not a SQLite database: use the path of a ledger, or a new path",
    ),
    sqlite3.SQLITE_CORRUPT: (
        CorruptLedgerError,
        "the file is corrupted; restore the newest backup, and treat missing entries as spent",
    ),
    sqlite3.SQLITE_IOERR: (
        LedgerUnavailableError,
        "the disk is full or does not respond; the debit may be stored or not. Release nothing, and check the disk",
    ),
    sqlite3.SQLITE_ERROR: _NO_LEDGER,
    "42P01": _NO_LEDGER,
    sqlite3.SQLITE_BUSY: _LOCKED,
    "55P03": _LOCKED,
}


def explain_error(error: Exception, url: URL) -> LedgerError:
    """Translate a database error into one that says what to do, without the values that were being written."""
    location = f"ledger {describe_url(url)}"
    explanation, kind = _ERRORS.get(find_error_code(error)), type(getattr(error, "orig", None) or error).__name__
    if explanation is not None:
        error_type, text = explanation
        return error_type(f"{location}: {text}")
    if is_connection_refused(error):
        return LedgerUnavailableError(
            f"{location}: connection refused. Start the server, or check host and port; release nothing, and try again "
            "with the same key"
        )
    if not is_transient(error):
        return LedgerError(f"{location}: the database refused ({kind}): check address and rights. Release nothing")
    return LedgerUnavailableError(
        f"{location}: the database did not answer ({kind}). The debit may be stored or not; "
        "release nothing, and try again with the same key"
    )
