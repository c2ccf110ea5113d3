"""The database: where it is, transactions that wait their turn, connections that die, and errors in words."""

import os
import random
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import URL, make_url

from nearveil.ledger.errors import CorruptLedgerError, LedgerError, LedgerFullError, LedgerUnavailableError

T = TypeVar("T")

_BUSY_MS = 25  # SQLite's own waiting grows longer and longer, which starves the late; short rounds of it are fair
_JITTER = random.SystemRandom()
_ABANDONED: list[sa.Engine] = []  # a parent's connections are never closed by its child


def database_url(url: str | Path | URL) -> URL:
    """Return the SQLAlchemy URL of a path or a URL.

    Examples
    --------
    >>> database_url("postgresql://me@host/budgets").drivername
    'postgresql+psycopg'
    >>> database_url("my budget.db").drivername
    'sqlite'
    """
    if isinstance(url, Path) or (isinstance(url, str) and "://" not in url):
        if not str(url).strip() or str(url) == ":memory:":
            raise ValueError("url must be a path or a URL; a ledger in memory would forget what was spent")
        return URL.create("sqlite", database=str(Path(url).expanduser().resolve()))
    try:
        parsed = make_url(url)
    except (sa.exc.ArgumentError, ValueError):
        raise ValueError("url must be a path, or a URL such as postgresql://user@host/database") from None
    kind = parsed.get_backend_name()
    if kind == "postgresql":
        return parsed.set(drivername="postgresql+psycopg")
    if kind == "sqlite" and parsed.database and ":memory:" not in parsed.database and not parsed.query:
        return URL.create("sqlite", database=str(Path(parsed.database).resolve()))
    raise ValueError("url must name a SQLite file or a PostgreSQL database")


class Database:
    """One database, for any number of threads, and for processes that fork.

    Parameters
    ----------
    url : URL
        As `database_url` gives it.
    timeout : float
        Seconds to wait for a lock, or for a database that went away.
    read_only : bool, default=False
        Leave a SQLite file as it is, also one that is no ledger.
    """

    def __init__(self, url: URL, timeout: float, *, read_only: bool = False) -> None:
        self.url, self.timeout, self._read_only = url, timeout, read_only
        if self.is_sqlite and not read_only:
            with suppress(OSError):  # SQLite says what is wrong, and would make the file for all to read
                os.close(os.open(self.path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        self._process, self._made = os.getpid(), self._engine()

    @property
    def is_sqlite(self) -> bool:
        """Whether it is a file."""
        return self.url.get_backend_name() == "sqlite"

    @property
    def path(self) -> Path:
        """The file of a SQLite database."""
        return Path(str(self.url.database))

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

    def write(self, work: Callable[[sa.Connection], T]) -> T:
        """Run `work` in one durable transaction of its own, and try again where the connection died.

        A connection may die during the commit, and then nobody knows. So `work` runs again, and must itself see, under
        the lock, whether its first attempt stands: by the nonce.
        """
        return self._until_done(lambda: self._attempt(work, self._begin_write))

    def read(self, work: Callable[[sa.Connection], T]) -> T:
        """Run `work` on one consistent view of everything, writing nothing."""
        return self._until_done(lambda: self._attempt(work, self._begin_read))

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
            raise in_words(sa.exc.DBAPIError("backup", {}, error), self.url) from error

    def _attempt(self, work: Callable[[sa.Connection], T], begin: Callable[[sa.Connection], None]) -> T:
        with self.engine.connect() as connection:
            begin(connection)
            result = work(connection)
            connection.commit()
            return result

    def _until_done(self, attempt: Callable[[], T]) -> T:
        deadline = time.monotonic() + self.timeout
        while True:
            try:
                return attempt()
            except (sa.exc.DBAPIError, sa.exc.TimeoutError) as error:
                if not passing(error) or time.monotonic() > deadline:
                    raise in_words(error, self.url) from error
            # Everybody who waits asks equally often, so everybody has the same chance.
            time.sleep(_JITTER.uniform(0.0005, 0.004) if self.is_sqlite else _JITTER.uniform(0.01, 0.1))

    def _begin_write(self, connection: sa.Connection) -> None:
        if self.is_sqlite:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            return
        connection.exec_driver_sql("SET LOCAL synchronous_commit = on")
        connection.exec_driver_sql(f"SET LOCAL lock_timeout = {max(1, round(self.timeout * 1000))}")

    def _begin_read(self, connection: sa.Connection) -> None:
        if self.is_sqlite:
            connection.exec_driver_sql("BEGIN")
            return
        connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")

    def _engine(self) -> sa.Engine:
        try:
            engine = sa.create_engine(
                self.url, max_overflow=-1, hide_parameters=True, connect_args=self._connect_arguments()
            )
        except ModuleNotFoundError as missing:
            raise LedgerError("PostgreSQL needs psycopg: pip install nearveil[postgres]") from missing
        sqlite = _look_at_sqlite if self._read_only else _prepare_sqlite
        sa.event.listen(engine, "connect", sqlite if self.is_sqlite else _prepare_postgres)
        return engine

    def _connect_arguments(self) -> dict[str, Any]:
        if self.is_sqlite:
            return {"timeout": _BUSY_MS / 1000}
        # A server that vanished without a word is noticed within the timeout, not after hours.
        patience = max(2, round(self.timeout))
        return {"connect_timeout": patience, "tcp_user_timeout": 1000 * patience, "keepalives_idle": patience}


def _prepare_postgres(connection: Any, _: object) -> None:
    # Every lookup has an index. A plan made while the tables were small would read them whole, and be kept.
    connection.execute("SET enable_seqscan = off")
    connection.commit()


def _look_at_sqlite(connection: sqlite3.Connection, _: object) -> None:
    connection.isolation_level = None
    connection.execute("PRAGMA query_only = ON")  # a journal mode, too, would be written to the file


def _prepare_sqlite(connection: sqlite3.Connection, _: object) -> None:
    connection.isolation_level = None  # transactions begin where we say so
    # In WAL mode a commit is durable only with FULL: then the log is flushed before the commit returns.
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")


_SQLITE_PASSING = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
# Of PostgreSQL: connection lost, shut down or starting, too many connections, deadlock, serialisation, and two who
# opened one account at once.
_POSTGRES_REFUSALS = ("does not exist", "authentication failed", "pg_hba.conf", "could not translate host name")
_POSTGRES_PASSING = ("08", "57P", "53300", "40", "23505")


def passing(error: Exception) -> bool:
    """Return whether a database error may go away by itself."""
    if isinstance(error, sa.exc.TimeoutError):
        return True
    original = getattr(error, "orig", None)
    code = getattr(original, "sqlite_errorcode", None)
    if code is not None:
        return int(code) & 0xFF in _SQLITE_PASSING
    if isinstance(original, sqlite3.Error) or not isinstance(error, sa.exc.DBAPIError):
        return False
    state = getattr(original, "sqlstate", None)
    if state is None:  # no answer at all, or a refusal at the door, of which the text alone tells why
        refused = any(word in str(original) for word in _POSTGRES_REFUSALS)
        return not refused and (bool(error.connection_invalidated) or isinstance(error, sa.exc.OperationalError))
    return str(state).startswith(_POSTGRES_PASSING)


_SQLITE_WORDS: dict[int, tuple[type[LedgerError], str]] = {
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
}
_POSTGRES_WORDS: dict[str, tuple[type[LedgerError], str]] = {
    "53100": (LedgerFullError, "the server's disk is full: make room, then try again"),
    "55P03": (LedgerUnavailableError, "others held the account's lock all the time; release nothing, try again"),
    "42P01": (CorruptLedgerError, "its tables are not those of a ledger: put the newest backup back"),
    "42501": (LedgerError, "this role may not use the ledger's tables: grant it the right"),
    "25006": (LedgerError, "the server is read-only (a replica?): connect to the primary"),
    "28P01": (LedgerError, "the server refuses the password"),
    "3D000": (LedgerError, "the server has no such database: create it first"),
}


_SECRETS = {"password", "sslpassword", "oauth_client_secret", "scram_client_key", "scram_server_key"}


def without_secrets(url: URL) -> URL:
    """Return an address without its passwords, also those that stand among its options.

    Whoever connects with it is asked by PostgreSQL, whose library then looks into PGPASSWORD and ~/.pgpass.
    """
    query = {name: value for name, value in url.query.items() if name not in _SECRETS}
    bare = URL.create(url.drivername, username=url.username, host=url.host, port=url.port, database=url.database)
    return bare.set(query=query)


def shown(url: URL) -> str:
    """Return an address for people: without passwords, also those that stand among its options."""
    return url.set(query={}).render_as_string(hide_password=True)


def in_words(error: Exception, url: URL) -> LedgerError:
    """Return a database error as one that says what to do, without what was being written."""
    where = f"ledger {shown(url)}"
    original = getattr(error, "orig", None)
    code, state = getattr(original, "sqlite_errorcode", None), getattr(original, "sqlstate", None)
    known = _SQLITE_WORDS.get(code & 0xFF) if code is not None else _POSTGRES_WORDS.get(state or "")
    if known is not None:
        return known[0](f"{where}: {known[1]}")
    if not passing(error):
        return LedgerError(
            f"{where}: the database refused ({type(original or error).__name__}): check its address, the role and its "
            "rights. Release nothing"
        )
    return LedgerUnavailableError(
        f"{where}: the database did not answer ({type(original or error).__name__}). A debit may stand or not; "
        "release nothing, and try again with the same key"
    )
