"""An index in a folder: rows in a file of their own, the rest in SQLite."""

import os
import sqlite3
import stat
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import faiss
import numpy as np
import sqlalchemy as sa
from numpy.typing import ArrayLike, NDArray
from sqlalchemy.engine import URL

from nearveil.gallery import index as _index
from nearveil.gallery.answers import Singles
from nearveil.gallery.errors import (
    DamagedIndexError,
    IndexStoreError,
    NotAnIndexError,
    UnknownItemError,
    explain,
)
from nearveil.gallery.items import (
    FEATURE_TABLE,
    FEATURES,
    Batch,
    Head,
    Ids,
    RowPlace,
    Snapshot,
    Tick,
    check_k,
    count_deleted,
    cut_runs,
    decode_features,
    encode_features,
    encode_images,
    features_per_row,
    fill_rows,
    find_deleted_since,
    find_ids,
    heads,
    is_large,
    load_head,
    make_damaged_error,
    metadata,
)
from nearveil.storage import (
    Database,
    flush_folder,
    is_open_here,
    make_private_file,
    make_private_folder,
    prepare_durable,
)

Positions = NDArray[np.int64]
Found = tuple[Positions, Singles]

_GROWTH = 1.5
_MOST_DEAD = 256  # deleted rows that a search skips; with more of them the rows are packed


@dataclass(frozen=True, eq=False)
class RowView:
    """Rows as they are at one moment; rows that come later are written behind them."""

    ids: Ids  # rising
    rows: Singles
    dead: Positions  # positions of rows that were deleted

    def __len__(self) -> int:
        return len(self.ids) - len(self.dead)

    def alive(self) -> tuple[Ids, Singles]:
        """Return ids and features of what was not deleted."""
        if not len(self.dead):
            return self.ids, self.rows
        return np.delete(self.ids, self.dead), np.delete(self.rows, self.dead, axis=0)

    def positions(self, ids: NDArray[np.int64]) -> Positions:
        """Return where ids are; -1 for those that are not held."""
        found = np.searchsorted(self.ids, ids)
        there = found < len(self.ids)
        there[there] = self.ids[found[there]] == ids[there]
        there &= ~np.isin(found, self.dead)
        return np.where(there, found, -1)

    def nearest(self, queries: Singles, k: int) -> Found:
        """Return positions and inner products of the k nearest, best first: exact."""
        found = search_rows(self.rows, queries, k + len(self.dead))
        return select_best(found, self.dead, k)


class RowMatrix:
    """Holds the rows and changes them; readers hold views."""

    def __init__(self, dimension: int) -> None:
        self._ids, self._rows = np.empty(0, np.uint32), np.empty((0, dimension), np.float32)
        self.view = RowView(self._ids, self._rows, np.empty(0, np.int64))

    def change(self, ids: Ids, rows: Singles, gone: NDArray[np.int64]) -> RowView:
        """Add rows of rising ids and take out others; return the view after it."""
        size = len(self.view.ids) + len(ids)
        if size > len(self._ids):
            self.reserve(max(size, int(_GROWTH * len(self._ids))))
        start = len(self.view.ids)
        self._ids[start:size], self._rows[start:size] = ids, rows
        grown = RowView(self._ids[:size], self._rows[:size], self.view.dead)
        positions = grown.positions(gone)
        dead = np.union1d(grown.dead, positions[positions >= 0])
        self.view = RowView(grown.ids, grown.rows, dead)
        if len(dead) > _MOST_DEAD:
            self._pack()
        return self.view

    def reserve(self, room: int) -> None:
        """Move to a place for so many rows; views keep the old one."""
        ids, rows = self.view.ids, self.view.rows
        self._ids, self._rows = np.empty(room, np.uint32), np.empty((room, rows.shape[1]), np.float32)
        self._ids[: len(ids)], self._rows[: len(ids)] = ids, rows

    def _pack(self) -> None:
        self._ids, self._rows = self.view.alive()
        self.view = RowView(self._ids, self._rows, np.empty(0, np.int64))


def search_rows(rows: Singles, queries: Singles, k: int) -> Found:
    """Return positions and inner products of the k nearest rows; -1 where there are fewer."""
    if not len(rows):
        return np.full((len(queries), k), -1, np.int64), np.full((len(queries), k), -np.inf, np.float32)
    scores, positions = faiss.knn(queries, rows, k, metric=faiss.METRIC_INNER_PRODUCT)
    return positions, scores


def select_best(found: Found, dead: Positions, k: int) -> Found:
    """Return the k best that are alive, of equal scores the earliest; -1 where there are fewer."""
    positions, scores = found
    scores = np.where((positions < 0) | np.isin(positions, dead), -np.inf, scores)
    order = np.lexsort((positions, -scores), axis=1)[:, :k]
    scores = np.take_along_axis(scores, order, axis=1)
    return np.where(np.isneginf(scores), -1, np.take_along_axis(positions, order, axis=1)), scores


_FILE = "index.db"
_SEALED = "index.sealed"
_APPLICATION = 0x4E567831  # "NVx1", in the header of the file: what tells it from other SQLite files
_SQLITE = b"SQLite format 3\0"
_LOG_BYTES = 64 << 20  # of the log that stay on the disk after a large addition
_READ = 64  # rows read at once: each has up to a megabyte
_WAIT = 30.0  # seconds, of a worker that reads a partition
_PAGE = 32 << 10  # bytes: features are many times a page, and fewer pages are written faster
_INSERT_FEATURE = f"INSERT INTO {FEATURES} (id, crc, feature) VALUES (?, ?, ?)"  # noqa: S608
_INSERT_ITEM = (
    "INSERT INTO nearveil_item (id, crc, name, thumbnail, original, path, original_crc) VALUES (?, ?, ?, ?, ?, ?, ?)"
)
_SELECT = f"SELECT id, crc, feature FROM {FEATURES} WHERE id >= ? ORDER BY id"  # noqa: S608
_SELECT_SOME = (
    f"SELECT id, crc, feature FROM {FEATURES} "  # noqa: S608
    "WHERE id BETWEEN ? AND ? AND id + length(feature) / ? > ? ORDER BY id"
)
_DELETE = f"DELETE FROM {FEATURES} WHERE id = ?"  # noqa: S608


class DirectoryIndex(_index.Index):
    """The embedded store: no server, one file.

    A change is one SQLite transaction, flushed before it is acknowledged: a killed process leaves the index as it was
    before or after. Features are held in memory; those of a gallery of 1 GiB or more are read when first searched.
    """

    def __init__(self, database: Database, where: str) -> None:
        super().__init__(database, where)
        self._lock = threading.Lock()
        self._matrix, self._revision, self._next_id = _start_empty(self.dimension)
        with self._database.begin_read() as connection:
            large = is_large(load_head(connection, where))
        if not large:
            self._view()  # what is damaged shall be told now

    @property
    def sealed_file(self) -> Path:
        """Where the index for sealed questions is kept beside this one."""
        return Path(self._where) / _SEALED

    @classmethod
    def _create(cls, where: str, first: Head, timeout: float) -> "DirectoryIndex":
        folder = Path(where).expanduser().resolve()
        try:
            make_private_folder(folder)
            others = [entry for entry in folder.iterdir() if not entry.name.startswith(_FILE)]
        except OSError as error:
            raise IndexStoreError(f"index {folder}: the directory cannot be made: {error.strerror}") from error
        if others:
            raise IndexStoreError(f"index {folder}: the directory must be new or empty; it holds other files")
        url = URL.create("sqlite", database=str(folder / _FILE))
        try:
            _write_empty(folder / _FILE, first, timeout)
        except sqlite3.Error as error:
            raise explain(error, url) from error
        flush_folder(folder.parent)
        return cls(_open_database(folder / _FILE, timeout), str(folder))

    @classmethod
    def _open(cls, where: str, timeout: float) -> "DirectoryIndex":
        folder = Path(where).expanduser().resolve()
        _check_header(folder / _FILE, str(folder))
        database = _open_database(folder / _FILE, timeout)
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
        numbers = self._find_numbers(ids)
        if self._revision < 0:  # nobody searched yet: some rows are read without all others
            return self._read_features(numbers)
        _, view = self._view()
        positions = view.positions(numbers)
        if (positions < 0).any():
            raise UnknownItemError(numbers[positions < 0].tolist())
        return view.rows[positions]

    def _read_features(self, numbers: NDArray[np.int64]) -> Singles:
        unique, places = np.unique(numbers, return_inverse=True)
        with self._database.begin_read() as connection:
            blocks = list(_read_blocks(connection, unique, self.dimension, self._where))
        held = np.concatenate([some for some, _ in blocks] or [np.empty(0, np.uint32)])
        missing = ~np.isin(numbers, held)
        if missing.any():
            raise UnknownItemError(numbers[missing].tolist())
        return fill_rows(unique, self.dimension, blocks)[places]

    def snapshot(self) -> Snapshot:
        """Return all ids and features as they are now."""
        with self._database.begin_read() as connection:
            head = load_head(connection, self._where)
            if is_large(head):
                ids = find_ids(connection, head, self._where)
                return Snapshot(head.revision, ids, RowPlace(read_rows, self._where, ids, self.dimension))
        revision, view = self._view()
        return Snapshot(revision, *view.alive())

    def _search(self, queries: Singles, k: int) -> tuple[Ids, Singles]:
        _, view = self._view()
        positions, scores = view.nearest(queries, check_k(k, len(view)))
        return view.ids[positions], scores

    def _view(self) -> tuple[int, RowView]:
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
        gone = find_deleted_since(connection, self._revision, self._where)
        if self._revision < 0:
            self._matrix.reserve(head.count)
        for ids, rows in self._stored(connection, self._next_id):
            self._matrix.change(ids, rows, np.empty(0, np.int64))
        view = self._matrix.change(np.empty(0, np.uint32), np.empty((0, self.dimension), np.float32), gone)
        if len(view) != head.count or count_deleted(connection) != head.next_id - head.count:
            raise make_damaged_error(self._where, "the list of items")
        self._revision, self._next_id = head.revision, head.next_id

    def _reset(self) -> None:
        # A backup was put back, or the file was moved: connections still hold the one that was there before.
        super()._reset()
        self._database.close()
        with self._lock:
            self._forget()

    def _forget(self) -> None:
        self._matrix, self._revision, self._next_id = _start_empty(self.dimension)

    def _insert(self, connection: sa.Connection, ids: NDArray[np.int64], batch: Batch, tick: Tick) -> None:
        self._insert_features(connection, ids, batch.features, tick)
        if batch.attached:
            connection.exec_driver_sql(_INSERT_ITEM, encode_images(ids, batch))

    def _insert_features(
        self, connection: sa.Connection, ids: NDArray[np.int64], features: Singles, tick: Tick
    ) -> None:
        width = features.shape[1] * features.itemsize
        for row in encode_features(ids, features, features_per_row(self.dimension)):
            connection.exec_driver_sql(_INSERT_FEATURE, row)
            tick(len(row[2]) // width)

    def _delete_features(self, connection: sa.Connection, ids: NDArray[np.int64]) -> int:
        count, block = 0, features_per_row(self.dimension)
        for number in np.unique(ids // block).tolist():
            some = ids[ids // block == number]
            where = (number * block, int(some[-1]), 4 * self.dimension, int(some[0]))
            for row in connection.exec_driver_sql(_SELECT_SOME, where).all():
                held, features = decode_features([tuple(row)], self.dimension, self._where)
                first, stop = int(held[0]), int(held[-1]) + 1
                gone = some[(some >= first) & (some < stop)]
                if not len(gone):
                    continue
                connection.exec_driver_sql(_DELETE, (first,))
                for start, end in cut_runs(first, stop, gone):
                    left = np.arange(start, end, dtype=np.int64)
                    self._insert_features(connection, left, features[start - first : end - first], lambda _: None)
                count += len(gone)
        return count

    def _stored(self, connection: sa.Connection, first: int) -> Iterator[tuple[Ids, Singles]]:
        cursor = connection.connection.cursor()
        cursor.execute(_SELECT, (first,))
        last = first - 1
        while rows := cursor.fetchmany(_READ):
            ids, features = decode_features(rows, self.dimension, self._where)
            if ids[0] <= last or (np.diff(ids.astype(np.int64)) <= 0).any():
                raise make_damaged_error(self._where, "the order of features")
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
            raise make_damaged_error(self._where, "the file")


def read_rows(place: str, ids: Ids, dimension: int) -> Singles:
    """Return the features of ids, which rise, from a folder: in any process that reaches it."""
    database = _open_database(Path(place) / _FILE, _WAIT)
    try:
        with database.begin_read() as connection:
            return fill_rows(ids, dimension, _read_blocks(connection, ids.astype(np.int64), dimension, place))
    finally:
        database.close()


def _read_blocks(
    connection: sa.Connection, ids: NDArray[np.int64], dimension: int, where: str
) -> Iterator[tuple[Ids, Singles]]:
    """Yield the blocks that hold some of the ids, which rise."""
    block = features_per_row(dimension)
    blocks = ids // block
    starts = np.flatnonzero(np.diff(blocks, prepend=-1))
    for start, stop in zip(starts, [*starts[1:], len(ids)], strict=True):
        some = (int(blocks[start]) * block, int(ids[stop - 1]), 4 * dimension, int(ids[start]))
        rows = connection.exec_driver_sql(_SELECT_SOME, some).all()
        if rows:
            yield decode_features([tuple(row) for row in rows], dimension, where)


def _start_empty(dimension: int) -> tuple[RowMatrix, int, int]:
    """Return what is known before anything was read: no rows, no revision, no id."""
    return RowMatrix(dimension), -1, 0


def _open_database(path: Path, timeout: float) -> Database:
    url = URL.create("sqlite", database=str(path))
    return Database(url, timeout, prepare=_prepare, explain=explain, allow_read_only=True)


def _prepare(connection: sqlite3.Connection) -> None:
    prepare_durable(connection)
    connection.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}")
    connection.execute("PRAGMA secure_delete = ON")  # what is deleted is overwritten, not only forgotten
    connection.execute("PRAGMA cell_size_check = ON")  # a damaged page is told, not read


def _write_empty(path: Path, first: Head, timeout: float) -> None:
    """Write an empty index in one transaction. Not yet with a log: the header must be in the file itself."""
    with suppress(OSError):  # SQLite says what is wrong, and would make the file for all to read
        make_private_file(path)
    engine = sa.create_engine(URL.create("sqlite", database=str(path)), connect_args={"timeout": timeout})
    sa.event.listen(engine, "connect", lambda connection, _: setattr(connection, "isolation_level", None))
    try:
        with engine.connect() as connection:
            connection.exec_driver_sql(f"PRAGMA page_size = {_PAGE}")
            connection.exec_driver_sql("PRAGMA synchronous = FULL")
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            if sa.inspect(connection).get_table_names():
                raise IndexStoreError(f"index {path.parent}: there is one already: Index.open opens it")
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
    """Look at the file before SQLite does, which would write to it; where it is open here, that was done before."""
    if is_open_here(path):
        return
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise IndexStoreError(f"index {where}: it is not a regular file: put a backup back")
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


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # of a pipe, too, which nobody may write to
