"""An index in a directory: one SQLite file that makes changes whole, and FAISS on the features in memory."""

import os
import sqlite3
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import sqlalchemy as sa
from numpy.typing import ArrayLike, NDArray
from sqlalchemy.engine import URL

from nearveil.retrieval import _index
from nearveil.retrieval._index_errors import (
    DamagedIndexError,
    IndexExistsError,
    IndexStoreError,
    IndexUnavailableError,
    NotAnIndexError,
    UnknownItemError,
    explain,
)
from nearveil.retrieval._index_items import Batch, Ids, Singles, Snapshot, checked_count, checked_ids
from nearveil.retrieval._index_matrix import Lists, Matrix, View
from nearveil.retrieval._index_publishing import Stamp
from nearveil.retrieval._index_tables import (
    FEATURE_TABLE,
    FEATURES,
    Head,
    damaged,
    decoded,
    deleted_count,
    deleted_since,
    feature_rows,
    heads,
    item_rows,
    load_head,
    metadata,
)
from nearveil.storage import Database, FileWatch, Mark, prepare_durable

_FILE = "index.db"
_APPLICATION = 0x4E567831  # "NVx1", in the header of the file: what tells it from other SQLite files
_SQLITE = b"SQLite format 3\0"
_LOG_BYTES = 64 << 20  # of the log that stay on the disk after a large addition
_BLOCK = 4096  # rows read at once
_INSERT_FEATURE = f"INSERT INTO {FEATURES} (id, crc, feature) VALUES (?, ?, ?)"  # noqa: S608
_INSERT_ITEM = (
    "INSERT INTO nearveil_item (id, crc, name, thumbnail, original, path, original_crc) VALUES (?, ?, ?, ?, ?, ?, ?)"
)
_SELECT = f"SELECT id, crc, feature FROM {FEATURES} WHERE id >= ? ORDER BY id"  # noqa: S608


class DirectoryIndex(_index.Index):
    """The embedded store: no server, one file.

    A change is one SQLite transaction, in the log and flushed before it is acknowledged; so a process that is killed
    leaves the index as it was before or after. Features are held in memory, for exact search (FAISS) and approximate
    search (lists that FAISS learns from the rows, built when first asked for, anew when a fifth of the rows is new).
    """

    def __init__(self, database: Database, where: str) -> None:
        super().__init__(database, where)
        self._lock = threading.Lock()
        self._matrix, self._revision, self._next_id = _nothing(self.dimension)
        self._lists: Lists | None = None
        self._building = threading.Lock()
        self._watch = FileWatch(Path(where) / _FILE)
        self._stamped: tuple[Mark, Stamp] | None = None
        self._view()  # what is damaged shall be told now

    @classmethod
    def _create(cls, where: str, first: Head, timeout: float) -> "DirectoryIndex":
        folder = Path(where).expanduser().resolve()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            others = [entry for entry in folder.iterdir() if not entry.name.startswith(_FILE)]
        except OSError as error:
            raise IndexStoreError(f"index {folder}: the directory cannot be made: {error.strerror}") from error
        if others:
            raise IndexExistsError(f"index {folder}: the directory must be new or empty; it holds other files")
        url = URL.create("sqlite", database=str(folder / _FILE))
        try:
            _make(folder / _FILE, first, timeout)
        except sqlite3.Error as error:
            raise explain(error, url) from error
        _flush(folder.parent)
        return cls(_database(folder / _FILE, timeout), str(folder))

    @classmethod
    def _open(cls, where: str, timeout: float) -> "DirectoryIndex":
        folder = Path(where).expanduser().resolve()
        _check_header(folder / _FILE, str(folder))
        database = _database(folder / _FILE, timeout)
        try:
            with database.begin_read() as connection:
                if not sa.inspect(connection).has_table(heads.name):
                    raise NotAnIndexError(f"index {folder}: it was never finished: Index.create makes one here")
            return cls(database, str(folder))
        except BaseException:
            database.close()
            raise

    def features(self, ids: ArrayLike) -> Singles:
        """Return features, in the order of the ids."""
        numbers = checked_ids(ids)
        _, view = self._view()
        positions = view.positions(numbers)
        if (positions < 0).any():
            raise UnknownItemError(numbers[positions < 0].tolist())
        return view.rows[positions]

    def snapshot(self) -> Snapshot:
        """Return all ids and features as they are now."""
        revision, view = self._view()
        return Snapshot(revision, *view.alive())

    def stamp(self) -> Stamp:
        """Return what stands for the state of the index now: the database is read only where its file has changed."""
        try:
            mark = self._watch.mark()
        except OSError:
            raise IndexUnavailableError(f"index {self._where}: its file is gone: put it back") from None
        known = self._stamped
        if known is not None and mark is not None and known[0] == mark:
            return known[1]
        if known is not None and mark is not None and known[0].opening != mark.opening:
            self._reset()
        stamp = self._read_stamp()
        if mark is not None:
            # Marked before it was read: what is committed meanwhile has another mark.
            self._stamped = (mark, stamp)
        return stamp

    def close(self) -> None:
        """Close all connections."""
        self._watch.close()
        super().close()

    def _search(self, queries: Singles, k: int, *, exact: bool) -> tuple[Ids, Singles]:
        _, view = self._view()
        k = checked_count(k, len(view))
        lists = None if exact or len(view) <= _index.SMALL else self._fitting_lists(view)
        positions, scores = view.nearest(queries, k) if lists is None else lists.nearest(view, queries, k)
        return view.ids[positions], scores

    def _fitting_lists(self, view: View) -> Lists | None:
        """Return lists for approximate search; None while another thread builds them."""
        lists = self._lists
        if lists is not None and lists.fits(view):
            return lists
        if not self._building.acquire(blocking=False):
            return None
        try:
            if self._lists is None or not self._lists.fits(view):
                self._lists = Lists(view)
            return self._lists
        finally:
            self._building.release()

    def _view(self) -> tuple[int, View]:
        """Return the revision and the rows, after reading what changed since."""
        with self._lock, self._database.begin_read() as connection:
            head = load_head(connection, self._where)
            if head.revision != self._revision:
                try:
                    self._catch_up(connection, head)
                except BaseException:
                    self._forget()  # half of it is worse than none
                    raise
            return self._revision, self._matrix.view

    def _catch_up(self, connection: sa.Connection, head: Head) -> None:
        if head.revision < self._revision:  # a backup was put back
            self._forget()
        gone = deleted_since(connection, self._revision, self._where)
        if self._revision < 0:
            self._matrix.reserve(head.count)
        for ids, rows in self._stored(connection, self._next_id):
            self._matrix.change(ids, rows, np.empty(0, np.int64))
        view = self._matrix.change(np.empty(0, np.uint32), np.empty((0, self.dimension), np.float32), gone)
        if len(view) != head.count or deleted_count(connection) != head.next_id - head.count:
            raise damaged(self._where, "the list of items")
        self._revision, self._next_id = head.revision, head.next_id

    def _reset(self) -> None:
        # A backup was put back, or the file was moved: connections still hold the one that was there before.
        super()._reset()
        self._database.close()
        with self._lock:
            self._forget()

    def _forget(self) -> None:
        self._matrix, self._revision, self._next_id = _nothing(self.dimension)

    def _insert(self, connection: sa.Connection, ids: NDArray[np.int64], batch: Batch) -> None:
        connection.exec_driver_sql(_INSERT_FEATURE, feature_rows(ids, batch.features))
        connection.exec_driver_sql(_INSERT_ITEM, item_rows(ids, batch))

    def _stored(self, connection: sa.Connection, first: int) -> Iterator[tuple[Ids, Singles]]:
        cursor = connection.connection.cursor()
        cursor.execute(_SELECT, (first,))
        last = first - 1
        while rows := cursor.fetchmany(_BLOCK):
            ids, features = decoded(rows, self.dimension, self._where)
            if ids[0] <= last or (np.diff(ids.astype(np.int64)) <= 0).any():
                raise damaged(self._where, "the order of features")
            last = int(ids[-1])
            yield ids, features

    def _wipe(self) -> None:
        # The log still holds pages as they were. If somebody reads right now, or the disk is full, it stays until the
        # next time: the deletion itself stands.
        with suppress(IndexStoreError), self._database.autocommit() as connection:
            connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")

    def _check_pages(self, connection: sa.Connection) -> None:
        found = connection.exec_driver_sql("PRAGMA integrity_check(1)").scalar_one()
        if found != "ok":
            raise damaged(self._where, "the file")


def _nothing(dimension: int) -> tuple[Matrix, int, int]:
    """Return what is known before anything was read: no rows, no revision, no id."""
    return Matrix(dimension), -1, 0


def _database(path: Path, timeout: float) -> Database:
    return Database(URL.create("sqlite", database=str(path)), timeout, prepare=_prepare, explain=explain)


def _prepare(connection: sqlite3.Connection) -> None:
    prepare_durable(connection)
    connection.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}")
    connection.execute("PRAGMA secure_delete = ON")  # what is deleted is overwritten, not only forgotten
    connection.execute("PRAGMA cell_size_check = ON")  # a damaged page is told, not read


def _make(path: Path, first: Head, timeout: float) -> None:
    """Write an empty index in one transaction. Not yet with a log: the header must be in the file itself."""
    with suppress(OSError):  # SQLite says what is wrong, and would make the file for all to read
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    engine = sa.create_engine(URL.create("sqlite", database=str(path)), connect_args={"timeout": timeout})
    sa.event.listen(engine, "connect", lambda connection, _: setattr(connection, "isolation_level", None))
    try:
        with engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA synchronous = FULL")
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            if sa.inspect(connection).get_table_names():
                raise IndexExistsError(f"index {path.parent}: there is one already: Index.open opens it")
            metadata.create_all(connection)
            connection.exec_driver_sql(FEATURE_TABLE.format(id="INTEGER", feature="BLOB"))
            connection.exec_driver_sql(f"PRAGMA application_id = {_APPLICATION}")
            connection.execute(sa.insert(heads).values(first.row()))
            connection.commit()
    except sa.exc.DBAPIError as error:
        raise error.orig or error from error
    finally:
        engine.dispose()


def _check_header(path: Path, where: str) -> None:
    """Look at the file before SQLite does, which would write to it."""
    try:
        with path.open("rb") as file:
            start = file.read(100)
    except (FileNotFoundError, NotADirectoryError):
        raise NotAnIndexError(f"index {where}: there is none here: Index.create makes one") from None
    except OSError as error:
        raise IndexStoreError(f"index {where}: it cannot be opened: {error.strerror}") from error
    if not start:
        raise NotAnIndexError(f"index {where}: it was never finished: Index.create makes one here")
    if len(start) < 100 or not start.startswith(_SQLITE):
        raise DamagedIndexError(f"index {where}: its file is damaged, or none of ours: put a backup back")
    if struct.unpack_from(">I", start, 68)[0] != _APPLICATION:
        raise NotAnIndexError(f"index {where}: the file {_FILE} there is not an index of nearveil")


def _flush(folder: Path) -> None:
    """See to it that a new name in a directory survives a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
