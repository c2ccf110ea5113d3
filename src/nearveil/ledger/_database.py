"""The database of a ledger: transactions that wait their turn, connections that die, and errors in words."""

import os
import random
import sqlite3
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, suppress
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import URL

from nearveil import storage
from nearveil.ledger.errors import CorruptLedgerError, LedgerError, LedgerFullError, LedgerUnavailableError
from nearveil.storage import describe_url, find_error, is_transient

T = TypeVar("T")

_BUSY = 0.025  # seconds: SQLite's own waiting grows longer and longer, which starves the late; short rounds are fair
_JITTER = random.SystemRandom()


class LedgerDatabase(storage.Database):
    """A database whose transactions are tried again until they stand.

    `timeout`: Seconds to wait for a lock, or for a database that went away.
    `read_only`: Leave a SQLite file as it is, also one that is no ledger.
    """

    def __init__(self, url: URL, timeout: float, *, read_only: bool = False) -> None:
        if url.get_backend_name() == "sqlite" and not read_only:
            with suppress(OSError):  # SQLite says what is wrong
                storage.make_private_file(Path(str(url.database)))
        prepare = _prepare_postgres
        if url.get_backend_name() == "sqlite":
            prepare = _forbid_writing if read_only else storage.prepare_durable
        try:
            super().__init__(url, timeout, prepare=prepare, busy=_BUSY, ping=False)
        except ModuleNotFoundError as missing:
            raise LedgerError("PostgreSQL needs psycopg: pip install nearveil[postgres]") from missing

    def write(self, work: Callable[[sa.Connection], T]) -> T:
        """Run `work` in one durable transaction of its own, and try again where the connection died.

        A connection may die during the commit, and then nobody knows. So `work` runs again, and must itself see, under
        the lock, whether its first attempt stands: by the nonce.
        """
        return self._until_done(work, self.begin_write)

    def read(self, work: Callable[[sa.Connection], T]) -> T:
        """Run `work` on one consistent view of everything, writing nothing."""
        return self._until_done(work, self.begin_read)

    def copy_to(self, target: Path) -> None:
        """Copy a SQLite file to a new one, consistently, while others write."""
        try:
            os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            raise LedgerError(f"backup: {target} exists; a backup overwrites nothing, give another path") from None
        except OSError as error:
            raise LedgerError(f"backup: {target} cannot be written: {error.strerror}") from error
        try:
            with closing(sqlite3.connect(self.path)) as source, closing(sqlite3.connect(target)) as copy:
                source.backup(copy)
        except sqlite3.Error as error:
            target.unlink(missing_ok=True)  # a backup is whole, or it is not there
            raise explain(sa.exc.DBAPIError("backup", {}, error), self.url) from error

    def _until_done(
        self, work: Callable[[sa.Connection], T], begin: Callable[[], AbstractContextManager[sa.Connection]]
    ) -> T:
        deadline = time.monotonic() + self.timeout
        while True:
            try:
                return self._attempt(work, begin)
            except (sa.exc.DBAPIError, sa.exc.TimeoutError) as error:
                if not is_transient(error) or time.monotonic() > deadline:
                    raise explain(error, self.url) from error
            # Everybody who waits asks equally often, so everybody has the same chance.
            time.sleep(_JITTER.uniform(0.0005, 0.004) if self.is_sqlite else _JITTER.uniform(0.01, 0.1))

    def _attempt(
        self, work: Callable[[sa.Connection], T], begin: Callable[[], AbstractContextManager[sa.Connection]]
    ) -> T:
        with begin() as connection:
            return work(connection)


def _prepare_postgres(connection: Any) -> None:
    # Every lookup has an index. A plan made while the tables were small would read them whole, and be kept.
    connection.execute("SET enable_seqscan = off")
    connection.commit()


def _forbid_writing(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA query_only = ON")  # a journal mode, too, would be written to the file


_ERRORS: dict[int | str, tuple[type[LedgerError], str]] = {
    sqlite3.SQLITE_FULL: (LedgerFullError, "the disk is full: make room, then try again"),
    sqlite3.SQLITE_READONLY: (LedgerError, "the file or its directory is read-only: give this user the right to write"),
    sqlite3.SQLITE_CANTOPEN: (LedgerError, "it cannot be opened: the directory must exist and be writable"),
    sqlite3.SQLITE_PERM: (LedgerError, "this user may not open it"),
    sqlite3.SQLITE_NOTADB: (
        CorruptLedgerError,
        "the file is no SQLite database: give the path of a ledger, or a new path",
    ),
    sqlite3.SQLITE_CORRUPT: (
        CorruptLedgerError,
        "the file is damaged: put the newest backup back, and treat what is missing as spent",
    ),
    sqlite3.SQLITE_IOERR: (
        LedgerUnavailableError,
        "the disk does not answer; a debit may stand or not. Release nothing, and see to the disk",
    ),
    sqlite3.SQLITE_ERROR: (CorruptLedgerError, "its tables are not those of a ledger: put the newest backup back"),
    sqlite3.SQLITE_BUSY: (LedgerUnavailableError, "others held its lock all the time; release nothing, try again"),
    "53100": (LedgerFullError, "the server's disk is full: make room, then try again"),
    "55P03": (LedgerUnavailableError, "others held the account's lock all the time; release nothing, try again"),
    "42P01": (CorruptLedgerError, "its tables are not those of a ledger: put the newest backup back"),
    "42501": (LedgerError, "this role may not use the ledger's tables: grant it the right"),
    "25006": (LedgerError, "the server is read-only (a replica?): connect to the primary"),
    "28P01": (LedgerError, "the server refuses the password"),
    "3D000": (LedgerError, "the server has no such database: create it first"),
}


def explain(error: Exception, url: URL) -> LedgerError:
    """Return a database error as one that says what to do, without what was being written."""
    where = f"ledger {describe_url(url)}"
    found, kind = find_error(error, _ERRORS), type(getattr(error, "orig", None) or error).__name__
    if found is not None:
        return found[0](f"{where}: {found[1]}")
    if not is_transient(error):
        return LedgerError(
            f"{where}: the database refused ({kind}): check its address, the role and its rights. Release nothing"
        )
    return LedgerUnavailableError(
        f"{where}: the database did not answer ({kind}). A debit may stand or not; "
        "release nothing, and try again with the same key"
    )
