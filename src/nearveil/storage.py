"""Storage: one database interface (SQLite, PostgreSQL), private files, and the data folder."""

from __future__ import annotations

import json
import os
import secrets
import sqlite3
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import BufferedRandom
from pathlib import Path
from typing import TYPE_CHECKING, Any

from platformdirs import user_data_path

from nearveil.errors import NearveilError
from nearveil.lazy import LateModule

if TYPE_CHECKING:
    import sqlalchemy as sa
    from sqlalchemy.engine import URL
else:
    sa = LateModule("sqlalchemy", "budget")

_DATABASES: weakref.WeakSet[Database] = weakref.WeakSet()
# Inherited across a fork, and never closed here: they belong to the parent.
_inherited_engines: list[sa.Engine] = []
_CREATION_LOCK = 0x6E76_746F_6B65_6E  # "nvtoken": the advisory lock for creating tables in one server
_SECRETS = {"password", "sslpassword", "oauth_client_secret", "scram_client_key", "scram_server_key"}
_SQLITE_TRANSIENT = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_POSTGRES_REFUSALS = ("does not exist", "authentication failed", "pg_hba.conf", "could not translate host name")
# Connection lost, server stopping or starting, too many connections, deadlock, serialisation, concurrent inserts.
_POSTGRES_TRANSIENT = ("08", "57P", "53300", "40", "23505")

# Errors of both databases with the same remedy in every store.
COMMON_ERRORS: dict[int | str, str] = {
    sqlite3.SQLITE_FULL: "the disk is full; nothing was changed: free some space, then try again",
    sqlite3.SQLITE_READONLY: "the file or its directory is read-only: give this user write access",
    sqlite3.SQLITE_PERM: "this user may not open the file",
    "53100": "the server's disk is full; nothing was changed: free some space, then try again",
    "42501": "this role lacks a permission: grant it",
    "25006": "the server is read-only (a replica?): connect to the primary",
    "28P01": "the server rejected the password",
    "3D000": "the server has no such database: create it first",
}


class Database:
    """One database, for any number of threads, and for processes that fork."""

    # `timeout` is in seconds, for a server or its locks; `busy`, by default the same, for a lock of SQLite. `prepare`
    # is called with every new driver connection. `explain` translates an error of the database, its URL and whether
    # only reads were in progress into an error of the library. `ping` tests a connection before it is reused. With
    # `allow_read_only`, a SQLite file on a read-only volume is opened for reading, without `prepare`.

    def __init__(
        self,
        url: URL,
        timeout: float,
        *,
        prepare: Callable[[Any], None] = lambda _: None,
        explain: Callable[[BaseException, URL, bool], NearveilError] | None = None,
        busy: float | None = None,
        ping: bool = True,
        allow_read_only: bool = False,
    ) -> None:
        self.url, self.timeout, self._ping = url, timeout, ping
        self.is_file = find_file(url) is not None
        self.path = Path(str(url.database))  # of a SQLite file
        self._allow_read_only = allow_read_only and self.is_file
        self._prepare, self._explain, self._busy = prepare, explain, timeout if busy is None else busy
        self._process, self._made = os.getpid(), self._engine()
        self.open_files: set[tuple[int, int]] = set()  # device and inode of open SQLite files
        self.file: tuple[int, ...] = ()  # the identity of the SQLite file, as of the last `reopen_if_replaced`
        _DATABASES.add(self)

    @property
    def is_read_only(self) -> bool:
        """Whether a SQLite file can only be opened for reading."""
        return self._allow_read_only and find_read_only_mode(self.path) is not None

    @property
    def engine(self) -> sa.Engine:
        """The engine of this process; a forked child gets its own."""
        if os.getpid() != self._process:
            _inherited_engines.append(self._made)
            self._process, self._made = os.getpid(), self._engine()
        return self._made

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()
        self.open_files.clear()

    def reopen_if_replaced(self) -> tuple[int, ...]:
        """Return the identity of the SQLite file; if it was replaced, close all connections, which read the old one.

        OSError if there is no file.
        """
        file = _identify_file(self.path) if self.is_file else ()
        if file != self.file:
            self.close()
            self.file = file
        return file

    @contextmanager
    def begin_write(self, *, times: float = 1.0) -> Iterator[sa.Connection]:
        """Begin a transaction, on disk when the block ends; wait for other writers at most `times` the timeout."""
        with self.connect() as connection:
            if self.is_file and times == 1:
                connection.exec_driver_sql("BEGIN IMMEDIATE")
            elif self.is_file:
                connection.exec_driver_sql(f"PRAGMA busy_timeout = {round(1000 * times * self._busy)}")
                try:
                    connection.exec_driver_sql("BEGIN IMMEDIATE")
                finally:  # the connection is reused
                    connection.exec_driver_sql(f"PRAGMA busy_timeout = {round(1000 * self._busy)}")
            else:
                connection.exec_driver_sql("SET LOCAL synchronous_commit = on")
                milliseconds = max(1, round(1000 * times * self.timeout))
                connection.exec_driver_sql(f"SET LOCAL lock_timeout = {milliseconds}")
            yield connection
            connection.commit()

    @contextmanager
    def begin_read(self) -> Iterator[sa.Connection]:
        """Begin a read-only transaction on a snapshot of the database."""
        with self.connect(reading=True) as connection:
            if self.is_file:
                connection.exec_driver_sql("BEGIN")
            else:
                connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
            yield connection

    @contextmanager
    def connect(self, *, reading: bool = False) -> Iterator[sa.Connection]:
        """Yield a connection without a transaction, and translate the errors of the database."""
        try:
            with self.engine.connect() as connection:
                yield connection
        except Exception as error:
            # Not `from error`: a driver may quote the row.
            if self._explain is not None and is_of_database(error):
                raise self._explain(getattr(error, "orig", None) or error, self.url, reading) from None
            raise

    def _engine(self) -> sa.Engine:
        try:
            engine = sa.create_engine(
                self.url,
                max_overflow=-1,
                pool_pre_ping=self._ping and not self.is_file,
                hide_parameters=True,
                connect_args=self._connect_arguments(),
            )
        except ModuleNotFoundError as missing:
            raise (missing if self._explain is None else self._explain(missing, self.url, True)) from None
        sa.event.listen(engine, "connect", self._prepare_connection)
        if self._allow_read_only:
            sa.event.listen(engine, "do_connect", self._choose_mode)
        return engine

    def _choose_mode(self, _: object, __: object, arguments: list[Any], options: dict[str, Any]) -> None:
        mode = find_read_only_mode(self.path)
        if mode is not None:
            arguments[:] = [f"{self.path.as_uri()}?{mode}"]
            options["uri"] = True

    def _prepare_connection(self, connection: Any, _: object) -> None:
        if self.is_file:
            connection.isolation_level = None  # transactions begin explicitly
            with suppress(OSError):  # the file is gone: SQLite reports it
                status = self.path.stat()
                self.open_files.add((status.st_dev, status.st_ino))
            if self.is_read_only:
                return
        self._prepare(connection)

    def _connect_arguments(self) -> dict[str, Any]:
        if self.is_file:
            return {"timeout": self._busy}
        # Detect a dead server within the timeout instead of hours.
        seconds = max(2, round(self.timeout))
        alive = {"keepalives_idle": seconds, "keepalives_interval": max(1, seconds // 3), "keepalives_count": 3}
        return {"connect_timeout": seconds, "tcp_user_timeout": 1000 * seconds, **alive}


def find_read_only_mode(path: Path) -> str | None:
    """Return the URI options that open a SQLite file read-only; None if it can be written."""
    # Without a log, a file on a read-only volume is opened as immutable: SQLite could not create the index of the log.
    # With a log, another process writes, or did not close it.
    log, shared = (path.with_name(f"{path.name}-{name}") for name in ("wal", "shm"))
    is_writable = os.access(path, os.W_OK) and (os.access(path.parent, os.W_OK) or shared.exists())
    if (is_writable and path.stat().st_mode & 0o222) or not path.exists():  # root may write to every file
        return None
    return "mode=ro" if shared.exists() or (log.exists() and log.stat().st_size) else "mode=ro&immutable=1"


def _identify_file(path: Path) -> tuple[int, ...]:
    """Return the identity of a SQLite file; an immutable one has no log that counts commits, so its time counts."""
    status = os.stat(path)  # noqa: PTH116 - twice as fast as Path.stat, on every request
    file = (status.st_dev, status.st_ino)
    is_immutable = "immutable" in (find_read_only_mode(path) or "")
    return (*file, status.st_mtime_ns, status.st_size) if is_immutable else file


def is_open_here(path: Path) -> bool:
    """Return whether a database of this process has a SQLite file open."""
    # Then no other code in this process may open and close that file: the process would lose its locks, another process
    # would delete the log when it closes the file, and later writes to the log would be lost.
    try:
        status = path.stat()
    except OSError:
        return False
    return any((status.st_dev, status.st_ino) in database.open_files for database in list(_DATABASES))


def prepare_durable(connection: sqlite3.Connection) -> None:
    """Set up a connection so that readers and writers do not block each other, and commits are durable."""
    connection.execute("PRAGMA journal_mode = WAL")
    # In WAL mode, only FULL flushes the log before a commit returns.
    connection.execute("PRAGMA synchronous = FULL")


def create_tables(connection: sa.Connection, metadata: sa.MetaData) -> None:
    """Create missing tables; several processes may do so at once."""
    if connection.dialect.name == "postgresql":  # there, even concurrent "if not exists" fails
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_CREATION_LOCK)))
    for table in metadata.sorted_tables:
        connection.execute(sa.schema.CreateTable(table, if_not_exists=True))
        for index in table.indexes:
            connection.execute(sa.schema.CreateIndex(index, if_not_exists=True))


def is_among(connection: sa.Connection, column: sa.Column[Any], values: Sequence[Any]) -> sa.ColumnElement[bool]:
    """Return the condition that a column has one of any number of values."""
    if connection.dialect.name == "postgresql":
        from sqlalchemy.dialects.postgresql import ARRAY

        return column == sa.any_(sa.literal(values, ARRAY(column.type)))
    listed = sa.func.json_each(json.dumps(values)).table_valued("value")
    return column.in_(sa.select(listed.c.value))


def parse_url(location: str | Path | URL, field: str) -> URL:
    """Return the URL of a SQLite file or a PostgreSQL database."""
    if isinstance(location, Path) or (isinstance(location, str) and "://" not in location):
        if not str(location).strip() or str(location) == ":memory:":
            raise ValueError(f"{field} must be a path or a URL; a database in memory is not durable")
        return sa.URL.create("sqlite", database=str(Path(location).expanduser().resolve()))
    try:
        parsed = sa.make_url(location)
    except (sa.exc.ArgumentError, ValueError):
        raise ValueError(f"{field} must be a path, or a URL such as postgresql://user@host/database") from None
    kind = parsed.get_backend_name()
    if kind == "postgresql":
        return parsed.set(drivername="postgresql+psycopg")
    if kind == "sqlite" and parsed.database and ":memory:" not in parsed.database and not parsed.query:
        return sa.URL.create("sqlite", database=str(Path(parsed.database).resolve()))
    raise ValueError(f"{field} must name a SQLite file or a PostgreSQL database: postgresql://user@host/database")


def find_file(url: URL) -> Path | None:
    """Return the file of a database; None for one on a server."""
    return Path(str(url.database)) if url.get_backend_name() == "sqlite" else None


def describe_url(url: URL) -> str:
    """Return a URL for messages: without passwords, also among its options."""
    if file := find_file(url):
        return str(file)
    return url.set(query={}).render_as_string(hide_password=True)


def without_secrets(url: URL) -> URL:
    """Return a URL without passwords, also among its options; PostgreSQL then reads PGPASSWORD and ~/.pgpass."""
    query = {name: value for name, value in url.query.items() if name not in _SECRETS}
    bare = sa.URL.create(url.drivername, username=url.username, host=url.host, port=url.port, database=url.database)
    return bare.set(query=query)


def find_error_code(error: BaseException) -> int | str:
    """Return the primary result code of SQLite or the SQLSTATE of PostgreSQL; "" if there is none."""
    original = getattr(error, "orig", None) or error
    code = getattr(original, "sqlite_errorcode", None)
    return int(code) & 0xFF if code is not None else str(getattr(original, "sqlstate", None) or "")


def name_error(error: BaseException) -> str:
    """Return the kind of an error, such as SQLITE_FULL, without its text, which may quote private values."""
    original = getattr(error, "orig", None) or error
    return str(getattr(original, "sqlite_errorname", None) or type(original).__name__)


def is_transient(error: Exception) -> bool:
    """Return whether a database error may be temporary."""
    if isinstance(error, sa.exc.TimeoutError):
        return True
    if not isinstance(error, sa.exc.DBAPIError):
        return False
    original, code = error.orig, find_error_code(error)
    if isinstance(original, sqlite3.Error):
        return code in _SQLITE_TRANSIENT
    if not code:  # no response, or a refused connection, which only the text explains
        refused = any(word in str(original) for word in _POSTGRES_REFUSALS)
        return not refused and (bool(error.connection_invalidated) or isinstance(error, sa.exc.OperationalError))
    return str(code).startswith(_POSTGRES_TRANSIENT)


def is_connection_refused(error: BaseException) -> bool:
    """Return whether no server listens at an address."""
    return "connection refused" in str(getattr(error, "orig", None) or error).lower()


def is_of_database(error: Exception) -> bool:
    """Return whether an error is from SQLAlchemy or a driver; SQLite reports corrupted text as UnicodeDecodeError."""
    return isinstance(error, (sa.exc.SQLAlchemyError, sqlite3.Error, UnicodeDecodeError)) or hasattr(error, "sqlstate")


def data_folder() -> Path:
    """Return the default data folder of this user, which may not exist."""
    folder = user_data_path("nearveil", appauthor=False)
    # The folder of version 0.1 on every system: its budgets still count.
    earlier = Path.home() / ".local" / "share" / "nearveil"
    return earlier if sys.platform != "linux" and earlier.is_dir() else folder


def make_data_folder(*inside: str) -> Path:
    """Create the data folder, or one inside it, accessible to its owner only; return it."""
    folder = data_folder().joinpath(*inside)
    make_private_folder(folder)
    return folder


def make_private_folder(folder: Path) -> None:
    """Create a folder and its missing parents, all accessible to their owner only; do not change existing ones."""
    # `Path.mkdir(mode, parents=True)` would create the parents readable for all.
    try:
        folder.mkdir(mode=0o700)
    except FileNotFoundError:
        if folder.parent == folder:
            raise
        make_private_folder(folder.parent)
        make_private_folder(folder)
    except FileExistsError:
        if not folder.is_dir():
            raise


def open_private(path: str, flags: int) -> int:
    """Open a file, created readable by its owner only: an `opener` for :func:`open`."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def make_private_file(path: Path) -> None:
    """Create a file readable by its owner only, if missing: SQLite would create it readable for all."""
    with suppress(FileExistsError):
        os.close(open_private(str(path), os.O_CREAT | os.O_EXCL | os.O_WRONLY))


@contextmanager
def replace_file(path: Path, *, private: bool = True, durable: bool = True) -> Iterator[BufferedRandom]:
    """Yield a new file that replaces `path` atomically when the block ends, or is deleted if it raises."""
    # A private file is readable by its owner only. A durable one is on disk before it gets its name; the name itself
    # survives a power failure after flush_folder.
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with open(draft, "x+b", opener=open_private if private else None) as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def flush_folder(folder: Path) -> None:
    """Flush a folder, so that a new name in it survives a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
