"""Where an index is kept: connections that survive threads and forks, transactions, and errors in words."""

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import URL

from nearveil.retrieval._index_errors import (
    DamagedIndexError,
    IndexFullError,
    IndexStoreError,
    IndexUnavailableError,
    NotAnIndexError,
)

_ABANDONED: list[sa.Engine] = []  # a parent's connections are never closed by its child


class Database:
    """One database, for any number of threads, and for processes that fork.

    Parameters
    ----------
    url : URL
        Of a SQLite file or of a PostgreSQL database.
    timeout : float
        Seconds to wait for a lock or for the server.
    prepare : callable
        Told of every new connection of the driver.
    """

    def __init__(self, url: URL, timeout: float, prepare: Callable[[Any, object], None]) -> None:
        self.url, self.timeout, self._prepare = url, timeout, prepare
        self._process, self._made = os.getpid(), self._engine()

    @property
    def is_sqlite(self) -> bool:
        """Whether it is a file."""
        return self.url.get_backend_name() == "sqlite"

    @property
    def engine(self) -> sa.Engine:
        """The engine of this process; a child that was forked gets its own."""
        if os.getpid() != self._process:
            _ABANDONED.append(self._made)
            self._process, self._made = os.getpid(), self._engine()
        return self._made

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()

    @contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """Begin a transaction that writes; it is on the disk when the block ends, and undone if it raises."""
        with self._in_words(), self.engine.connect() as connection:
            if self.is_sqlite:
                connection.exec_driver_sql("BEGIN IMMEDIATE")
            else:
                connection.exec_driver_sql("SET LOCAL synchronous_commit = on")
                connection.exec_driver_sql(f"SET LOCAL lock_timeout = {max(1, round(1000 * self.timeout))}")
            yield connection
            connection.commit()

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """Begin a transaction that sees everything at one moment and writes nothing."""
        with self._in_words(), self.engine.connect() as connection:
            if self.is_sqlite:
                connection.exec_driver_sql("BEGIN")
            else:
                connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
            yield connection

    @contextmanager
    def alone(self) -> Iterator[sa.Connection]:
        """Give a connection outside of transactions: for what cannot be done in one."""
        with self._in_words(), self.engine.connect() as connection:
            yield connection.execution_options(isolation_level="AUTOCOMMIT")

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        try:
            yield
        except sa.exc.SQLAlchemyError as error:
            # Not `from error`: a driver may quote the row that it could not write.
            raise in_words(getattr(error, "orig", None) or error, self.url) from None
        except UnicodeDecodeError:  # SQLite tells of a damaged name, and Python cannot read what it tells
            raise DamagedIndexError(f"index {place(self.url)}: {_DAMAGED}") from None
        except Exception as error:
            # What comes from the driver itself, past SQLAlchemy.
            if isinstance(error, sqlite3.Error) or hasattr(error, "sqlstate"):
                raise in_words(error, self.url) from None
            raise

    def _engine(self) -> sa.Engine:
        try:
            engine = sa.create_engine(
                self.url,
                max_overflow=-1,
                pool_pre_ping=True,
                hide_parameters=True,
                connect_args=self._arguments(),
            )
        except ModuleNotFoundError as missing:
            raise IndexStoreError("PostgreSQL needs psycopg and pgvector: pip install nearveil[postgres]") from missing
        sa.event.listen(engine, "connect", self._prepare)
        return engine

    def _arguments(self) -> dict[str, Any]:
        if self.is_sqlite:
            return {"timeout": self.timeout}
        # A server that vanished without a word is noticed within the time that is waited for it.
        seconds = max(2, round(self.timeout))
        alive = {"keepalives_idle": seconds, "keepalives_interval": max(1, seconds // 3), "keepalives_count": 3}
        return {"connect_timeout": seconds, "tcp_user_timeout": 1000 * seconds, **alive}


_DAMAGED = "its file is damaged: put a backup back"
_SQLITE_WORDS: dict[int, tuple[type[IndexStoreError], str]] = {
    sqlite3.SQLITE_FULL: (IndexFullError, "the disk is full; nothing was changed: make room, then try again"),
    sqlite3.SQLITE_READONLY: (IndexStoreError, "it is read-only: give this user the right to write"),
    sqlite3.SQLITE_CANTOPEN: (IndexStoreError, "it cannot be opened: the directory must be writable"),
    sqlite3.SQLITE_PERM: (IndexStoreError, "this user may not open it"),
    sqlite3.SQLITE_NOTADB: (DamagedIndexError, _DAMAGED),
    sqlite3.SQLITE_CORRUPT: (DamagedIndexError, _DAMAGED),
    sqlite3.SQLITE_MISMATCH: (DamagedIndexError, _DAMAGED),
    sqlite3.SQLITE_ERROR: (DamagedIndexError, "its tables are not those of an index: put a backup back"),
    sqlite3.SQLITE_IOERR: (IndexUnavailableError, "the disk does not answer; a change may stand or not: see to it"),
    sqlite3.SQLITE_BUSY: (IndexUnavailableError, "others held its lock all the time; nothing was changed: try again"),
}
_POSTGRES_WORDS: dict[str, tuple[type[IndexStoreError], str]] = {
    "53100": (IndexFullError, "the server's disk is full; nothing was changed: make room, then try again"),
    "55P03": (IndexUnavailableError, "others held its lock all the time; nothing was changed: try again"),
    "42P01": (NotAnIndexError, "there is no index in this database: Index.create makes one"),
    "42501": (IndexStoreError, "this role may not do that: grant it the right"),
    "0A000": (IndexStoreError, "the server has no pgvector: install the extension `vector` there"),
    "58P01": (IndexStoreError, "the server has no pgvector: install the extension `vector` there"),
    "25006": (IndexStoreError, "the server is read-only (a replica?): connect to the primary"),
    "28P01": (IndexStoreError, "the server refuses the password"),
    "3D000": (IndexStoreError, "the server has no such database: create it first"),
    "XX001": (DamagedIndexError, "the server found damaged data: put a backup back"),
    "XX002": (DamagedIndexError, "the server found a damaged index: REINDEX may help"),
}


def in_words(error: BaseException, url: URL) -> IndexStoreError:
    """Return a database error as one that says what to do, without what was being written."""
    where = f"index {place(url)}"
    code, state = getattr(error, "sqlite_errorcode", None), getattr(error, "sqlstate", None)
    known = _SQLITE_WORDS.get(code & 0xFF) if code is not None else _POSTGRES_WORDS.get(state or "")
    if known is None and code is None and isinstance(error, sqlite3.OperationalError):
        known = (DamagedIndexError, _DAMAGED)  # Python's own: text that is none
    if known is not None:
        return known[0](f"{where}: {known[1]}")
    return IndexUnavailableError(
        f"{where}: the database did not answer as it should ({type(error).__name__}); a change that was under way may "
        "stand or not: look at the revision"
    )


def place(url: URL) -> str:
    """Return where a database is, for people, without a password, which may also stand in the query.

    Examples
    --------
    >>> place(sa.make_url("postgresql://me:secret@host/birds?password=secret"))
    'postgresql://me:***@host/birds'
    """
    if url.get_backend_name() == "sqlite":
        return str(url.database)
    return url.set(query={}).render_as_string(hide_password=True)
