"""Storage: one database engine (SQLite, PostgreSQL), private files, the user's folder, and change watching."""

import os
import sqlite3
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import sqlalchemy as sa
from platformdirs import user_data_path
from sqlalchemy.engine import URL, make_url

from nearveil.errors import NearveilError

_DATABASES: "weakref.WeakSet[Database]" = weakref.WeakSet()
_ABANDONED: list[sa.Engine] = []  # a parent's connections are never closed by its child
_CREATION_LOCK = 0x6E76_746F_6B65_6E  # "nvtoken": of those who create tables, among all that lock in one server
_SECRETS = {"password", "sslpassword", "oauth_client_secret", "scram_client_key", "scram_server_key"}
_SQLITE_TRANSIENT = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_POSTGRES_REFUSALS = ("does not exist", "authentication failed", "pg_hba.conf", "could not translate host name")
# Connection lost, shut down or starting, too many connections, deadlock, serialisation, two who insert one key at once.
_POSTGRES_TRANSIENT = ("08", "57P", "53300", "40", "23505")

E = TypeVar("E", bound=NearveilError)
T = TypeVar("T")


class Database:
    """One database, for any number of threads, and for processes that fork.

    `timeout` is in seconds, for a server or its lock; `busy`, by default the same, for a lock of SQLite. `prepare` is
    called with every new connection of the driver; `explain` turns an error of the database into one of the library,
    and is told whether nothing but reading was under way; `ping` tries a connection before it is used again. A SQLite
    file on a read-only volume is opened for reading where `allow_read_only`, without `prepare`.
    """

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
        self._allow_read_only = allow_read_only and self.is_sqlite
        self._prepare, self._explain, self._busy = prepare, explain, timeout if busy is None else busy
        self._process, self._made = os.getpid(), self._engine()
        self._direct: sa.Connection | None = None
        self._files: set[tuple[int, int]] = set()  # device and inode, of a SQLite file that is open
        _DATABASES.add(self)

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
        self._drop_direct()
        self.engine.dispose()
        self._files.clear()

    def has_open(self, file: tuple[int, int]) -> bool:
        """Return whether it has a file open, by device and inode."""
        return file in self._files

    def run_direct(self, work: Callable[[Any], T]) -> T:
        """Run `work` on the driver's own connection, outside of transactions.

        For one statement on every request: SQLAlchemy would cost several times as much. The connection is kept. Where
        the server has gone away, the work is done anew on another: it must be such that twice is as good as once.
        """
        kept = self._direct
        try:
            if kept is None or kept.engine is not self.engine:
                kept = None
                self._direct = self.engine.connect().execution_options(isolation_level="AUTOCOMMIT")
            assert self._direct is not None
            return work(self._direct.connection.driver_connection)
        except Exception:
            self._drop_direct()
            if kept is None or self.is_sqlite:
                raise
        return self.run_direct(work)

    def _drop_direct(self) -> None:
        if self._direct is not None and self._direct.engine is self.engine:
            self._direct.invalidate()
            self._direct.close()
        self._direct = None

    @contextmanager
    def begin_write(self, *, times: float = 1.0) -> Iterator[sa.Connection]:
        """Begin a transaction: on disk when the block ends, undone if it raises. Other writers are waited for.

        `times` the timeout, at most; 0 does not wait.
        """
        with self._explain_errors(), self.engine.connect() as connection:
            if self.is_sqlite:
                self._begin_immediate(connection, times * self._busy)
            else:
                connection.exec_driver_sql("SET LOCAL synchronous_commit = on")
                milliseconds = max(1, round(1000 * times * self.timeout))
                connection.exec_driver_sql(f"SET LOCAL lock_timeout = {milliseconds}")
            yield connection
            connection.commit()

    @contextmanager
    def begin_read(self) -> Iterator[sa.Connection]:
        """Begin a transaction that sees everything at one moment and writes nothing."""
        with self._explain_errors(reading=True), self.engine.connect() as connection:
            if self.is_sqlite:
                connection.exec_driver_sql("BEGIN")
            else:
                connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
            yield connection

    @contextmanager
    def autocommit(self) -> Iterator[sa.Connection]:
        """Give a connection outside of transactions: for what cannot be done in one."""
        with self._explain_errors(), self.engine.connect() as connection:
            yield connection.execution_options(isolation_level="AUTOCOMMIT")

    def _begin_immediate(self, connection: sa.Connection, seconds: float) -> None:
        if seconds == self._busy:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            return
        connection.exec_driver_sql(f"PRAGMA busy_timeout = {round(1000 * seconds)}")
        try:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        finally:  # the connection is used again
            connection.exec_driver_sql(f"PRAGMA busy_timeout = {round(1000 * self._busy)}")

    @contextmanager
    def _explain_errors(self, *, reading: bool = False) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            # Not `from error`: a driver may quote the row that it could not write.
            if self._explain is not None and is_of_database(error):
                raise self._explain(getattr(error, "orig", None) or error, self.url, reading) from None
            raise

    def _engine(self) -> sa.Engine:
        try:
            engine = sa.create_engine(
                self.url,
                max_overflow=-1,
                pool_pre_ping=self._ping and not self.is_sqlite,
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
        if self.is_sqlite:
            connection.isolation_level = None  # transactions begin where we say so
            with suppress(OSError):  # it is gone again: SQLite tells
                status = self.path.stat()
                self._files.add((status.st_dev, status.st_ino))
            if self._allow_read_only and find_read_only_mode(self.path) is not None:
                return
        self._prepare(connection)

    def _connect_arguments(self) -> dict[str, Any]:
        if self.is_sqlite:
            return {"timeout": self._busy}
        # A server that vanished without a word is noticed within the timeout, not after hours.
        seconds = max(2, round(self.timeout))
        alive = {"keepalives_idle": seconds, "keepalives_interval": max(1, seconds // 3), "keepalives_count": 3}
        return {"connect_timeout": seconds, "tcp_user_timeout": 1000 * seconds, **alive}


def find_read_only_mode(path: Path) -> str | None:
    """Return the options of a URI that open a SQLite file for reading alone; None where it can be written.

    Without its log a file on a read-only volume is opened as one that never changes: SQLite could not make the log's
    index. Where the log is there, another process writes, or did not close it.
    """
    log, shared = (path.with_name(f"{path.name}-{name}") for name in ("wal", "shm"))
    is_writable = os.access(path, os.W_OK) and (os.access(path.parent, os.W_OK) or shared.exists())
    if is_writable or not path.exists():
        return None
    return "mode=ro" if shared.exists() or (log.exists() and log.stat().st_size) else "mode=ro&immutable=1"


def is_open_here(path: Path) -> bool:
    """Return whether a database of this process has a SQLite file open.

    Then nobody else in it may open and close that file: the process would lose its locks, others would delete the log
    when they close it, and what is written to the log after that is lost.
    """
    try:
        status = path.stat()
    except OSError:
        return False
    return any(database.has_open((status.st_dev, status.st_ino)) for database in list(_DATABASES))


def prepare_durable(connection: sqlite3.Connection) -> None:
    """Let readers and writers of a SQLite file not wait for each other, and commits be on the disk."""
    connection.execute("PRAGMA journal_mode = WAL")
    # In WAL mode a commit is durable only with FULL: then the log is flushed before the commit returns.
    connection.execute("PRAGMA synchronous = FULL")


def create_tables(connection: sa.Connection, metadata: sa.MetaData) -> None:
    """Create the tables that are not there yet; several processes may do so at once."""
    if connection.dialect.name == "postgresql":  # there, even "if not exists" fails when two come together
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_CREATION_LOCK)))
    for table in metadata.sorted_tables:
        connection.execute(sa.schema.CreateTable(table, if_not_exists=True))
        for index in table.indexes:
            connection.execute(sa.schema.CreateIndex(index, if_not_exists=True))


def parse_url(where: str | Path | URL, field: str) -> URL:
    """Return the address of a SQLite file or a PostgreSQL database."""
    if isinstance(where, Path) or (isinstance(where, str) and "://" not in where):
        if not str(where).strip() or str(where) == ":memory:":
            raise ValueError(f"{field} must be a path or a URL; what is in memory would be forgotten")
        return URL.create("sqlite", database=str(Path(where).expanduser().resolve()))
    try:
        parsed = make_url(where)
    except (sa.exc.ArgumentError, ValueError):
        raise ValueError(f"{field} must be a path, or a URL such as postgresql://user@host/database") from None
    kind = parsed.get_backend_name()
    if kind == "postgresql":
        return parsed.set(drivername="postgresql+psycopg")
    if kind == "sqlite" and parsed.database and ":memory:" not in parsed.database and not parsed.query:
        return URL.create("sqlite", database=str(Path(parsed.database).resolve()))
    raise ValueError(f"{field} must name a SQLite file or a PostgreSQL database: postgresql://user@host/database")


def describe_url(url: URL) -> str:
    """Return an address for people: without passwords, also those among its options."""
    if url.get_backend_name() == "sqlite":
        return str(url.database)
    return url.set(query={}).render_as_string(hide_password=True)


def without_secrets(url: URL) -> URL:
    """Return an address without passwords, also among its options; PostgreSQL then reads PGPASSWORD and ~/.pgpass."""
    query = {name: value for name, value in url.query.items() if name not in _SECRETS}
    bare = URL.create(url.drivername, username=url.username, host=url.host, port=url.port, database=url.database)
    return bare.set(query=query)


def find_error(error: BaseException, table: Mapping[int | str, tuple[type[E], str]]) -> tuple[type[E], str] | None:
    """Return what a table of SQLite's result codes and PostgreSQL's SQLSTATEs says of an error, or None."""
    original = getattr(error, "orig", None) or error
    code = getattr(original, "sqlite_errorcode", None)
    return table.get(int(code) & 0xFF if code is not None else str(getattr(original, "sqlstate", "")))


def is_transient(error: Exception) -> bool:
    """Return whether an error of a database may go away by itself."""
    if isinstance(error, sa.exc.TimeoutError):
        return True
    original = getattr(error, "orig", None)
    code = getattr(original, "sqlite_errorcode", None)
    if code is not None:
        return int(code) & 0xFF in _SQLITE_TRANSIENT
    if isinstance(original, sqlite3.Error) or not isinstance(error, sa.exc.DBAPIError):
        return False
    state = getattr(original, "sqlstate", None)
    if state is None:  # no answer at all, or a refusal at the door, of which the text alone tells why
        refused = any(word in str(original) for word in _POSTGRES_REFUSALS)
        return not refused and (bool(error.connection_invalidated) or isinstance(error, sa.exc.OperationalError))
    return str(state).startswith(_POSTGRES_TRANSIENT)


def is_connection_refused(error: BaseException) -> bool:
    """Return whether no database listens at an address."""
    return "connection refused" in str(getattr(error, "orig", None) or error).lower()


def is_of_database(error: Exception) -> bool:
    """Return whether an error is of SQLAlchemy, or of a driver past it; SQLite tells of damaged text by Unicode."""
    return isinstance(error, (sa.exc.SQLAlchemyError, sqlite3.Error, UnicodeDecodeError)) or hasattr(error, "sqlstate")


_ABANDONED_WATCHES: list[sqlite3.Connection] = []  # a parent's connections are never closed by its child
# Of files that SQLite's connections share, by device and inode: a descriptor, and who reads it. To close a file takes
# all locks on it away from a process, also those of its connections; so it is closed when it has no name any more: the
# last connection of all takes that away.
_SHARED_FILES: dict[tuple[int, int], tuple[int, "weakref.WeakSet[FileWatch]"]] = {}
_SHARED_LOCK = threading.RLock()
_LOG_HEADER = 48  # bytes of the first of two equal headers; one of them counts commits


class Mark(NamedTuple):
    """Equal as long as nobody changed the file, or put another in its place."""

    opening: int  # of the connection that looked: versions of two connections do not compare
    version: int  # as SQLite counts it, for one connection


class FileWatch:
    """Looks at a SQLite file through a connection of its own, which never writes and waits for no writer.

    ``PRAGMA data_version`` changes with every commit of any other connection. A disk may hang, and SQLite may wait ten
    seconds for a place among the readers, so :meth:`mark` is no work for an event loop. :meth:`is_at` is: it takes no
    locks, and reads what the system has in memory.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._opening, self._process = 0, 0
        self._file: tuple[int, ...] = ()
        self._immutable = False
        self._is_asked = False  # whether `is_at` is used
        self._shared: int | None = None
        self._seen: tuple[Mark, bytes] | None = None

    def mark(self) -> Mark | None:
        """Return what stands for the state of the file now."""
        status = os.stat(self._path)  # noqa: PTH116 - twice as fast, on every request
        with self._lock:
            try:
                if self._identify(status) != self._file or os.getpid() != self._process:
                    self._open(status)
                assert self._connection is not None
                header = self._read_header()  # before the version: what is committed meanwhile changes it
                (version,) = self._connection.execute("PRAGMA data_version").fetchone()
            except sqlite3.Error:
                self._file = ()  # opened anew by the next
                return None
            mark = Mark(self._opening, version)
            self._seen = (mark, header) if len(header) == _LOG_HEADER or self._immutable else None
            if (
                self._is_asked and self._shared is None and not self._immutable
            ):  # now there is a log, if there is one at all
                self._shared = _open_shared(self._path.with_name(f"{self._path.name}-shm"), self)
            return mark

    def is_at(self, mark: Mark) -> bool:
        """Return whether the file is in the state of a mark, if that is known without waiting; else False.

        Every commit changes the header of the log's index, in shared memory, before it returns.
        """
        seen, self._is_asked = self._seen, True
        if seen is None or seen[0] != mark or os.getpid() != self._process:
            return False
        try:
            status = os.stat(self._path)  # noqa: PTH116
            return self._identify(status) == self._file and self._read_header() == seen[1]
        except OSError:
            return False

    def _read_header(self) -> bytes:
        """Return the header of the index of the write-ahead log; nothing where it is not open."""
        shared = self._shared
        return b"" if shared is None else os.pread(shared, _LOG_HEADER, 0)

    def close(self) -> None:
        """Close the connection; it is opened again where it is needed."""
        with self._lock:
            self._drop()

    def _identify(self, status: os.stat_result) -> tuple[int, ...]:
        """Return what names a file; with its time and size where it has no log that counts commits."""
        file = (status.st_dev, status.st_ino)
        return (*file, status.st_mtime_ns, status.st_size) if self._immutable else file

    def _open(self, status: os.stat_result) -> None:
        self._drop()
        mode = find_read_only_mode(self._path) or "mode=rw"
        self._connection = sqlite3.connect(
            f"{self._path.as_uri()}?{mode}", uri=True, timeout=0, isolation_level=None, check_same_thread=False
        )
        self._immutable = "immutable" in mode
        self._opening, self._file, self._process = self._opening + 1, self._identify(status), os.getpid()

    def _drop(self) -> None:
        if self._connection is not None:
            if self._process == os.getpid():
                self._connection.close()
            else:
                _ABANDONED_WATCHES.append(self._connection)
        self._connection, self._file = None, ()
        self._shared = self._seen = None
        _close_shared(self)


def _open_shared(path: Path, reader: FileWatch) -> int | None:
    """Return the descriptor of a file for one who reads it, or None where there is no such file."""
    with _SHARED_LOCK:
        _close_shared(reader)
        try:
            status = path.stat()
            if (status.st_dev, status.st_ino) not in _SHARED_FILES:
                opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
                status = os.fstat(opened)
                _SHARED_FILES[status.st_dev, status.st_ino] = opened, weakref.WeakSet()
        except OSError:
            return None
        found, readers = _SHARED_FILES[status.st_dev, status.st_ino]
        readers.add(reader)
        return found


def _close_shared(reader: FileWatch) -> None:
    """Take note that one reads no file any more; close those that nobody reads and no connection uses."""
    with _SHARED_LOCK:
        for file, (opened, readers) in list(_SHARED_FILES.items()):
            readers.discard(reader)
            if not readers and not os.fstat(opened).st_nlink:
                del _SHARED_FILES[file]
                os.close(opened)


def data_folder() -> Path:
    """Return the folder where everything of this user is kept by default, whether it is there or not."""
    folder = user_data_path("nearveil", appauthor=False)
    # Where version 0.1 kept it on every system: a budget must not be left behind.
    earlier = Path.home() / ".local" / "share" / "nearveil"
    return earlier if sys.platform != "linux" and earlier.is_dir() else folder


def make_data_folder(*inside: str) -> Path:
    """Make that folder, or one inside it, for its owner alone; return it."""
    folder = data_folder().joinpath(*inside)
    make_private_folder(folder)
    return folder


def make_private_folder(folder: Path) -> None:
    """Make a folder and those above it that are missing, all for their owner alone; leave existing ones as they are.

    ``Path.mkdir(mode, parents=True)`` would make the folders above it for all to read.
    """
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
    """Open a file, made for its owner alone where there is none: an `opener` of :func:`open`."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def make_private_file(path: Path) -> None:
    """Make a file for its owner alone where there is none: SQLite would make it for all to read."""
    with suppress(FileExistsError):
        os.close(open_private(str(path), os.O_CREAT | os.O_EXCL | os.O_WRONLY))


def flush_folder(folder: Path) -> None:
    """See to it that a new name in a folder survives a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
