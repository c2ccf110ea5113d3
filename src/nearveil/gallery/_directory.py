"""An index in a directory: one SQLite file, with features in blocks, and a matrix of them in memory."""

import os
import sqlite3
import stat
import struct
import threading
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import sqlalchemy as sa
from numpy.typing import ArrayLike, NDArray
from sqlalchemy.engine import URL

from nearveil.gallery import index as _index
from nearveil.gallery.answers import Singles
from nearveil.gallery.errors import CorruptedIndexError, IndexStoreError, NotAnIndexError, UnknownItemError, explain
from nearveil.gallery.items import Ids, LazyFeatures, Snapshot, check_ids, check_k
from nearveil.gallery.store import (
    FEATURES,
    Header,
    count_deleted,
    cut_runs,
    fill_rows,
    find_deleted_since,
    headers,
    load_header,
    load_ids,
    metadata,
)
from nearveil.mechanisms.covers.maps import MOST_ITEMS
from nearveil.progress import Tick
from nearveil.storage import (
    Database,
    flush_folder,
    identify_file,
    is_open_here,
    make_private_file,
    make_private_folder,
    prepare_durable,
)

Positions = NDArray[np.int64]
SearchHits = tuple[Positions, Singles]

_GROWTH = 1.5
_MOST_DEAD = 256  # deleted rows that a search skips; more are removed from the matrix


@dataclass(frozen=True, eq=False)
class RowView:
    """The rows at one moment; later rows are written behind them."""

    ids: Ids  # increasing
    rows: Singles
    dead: Positions  # positions of deleted rows

    def __len__(self) -> int:
        return len(self.ids) - len(self.dead)

    def alive(self) -> tuple[Ids, Singles]:
        """Return ids and features without deleted rows."""
        if not len(self.dead):
            return self.ids, self.rows
        return np.delete(self.ids, self.dead), np.delete(self.rows, self.dead, axis=0)

    def positions(self, ids: NDArray[np.int64]) -> Positions:
        """Return the positions of ids; -1 for ids that do not exist."""
        positions = np.searchsorted(self.ids, ids)
        exists = positions < len(self.ids)
        exists[exists] = self.ids[positions[exists]] == ids[exists]
        exists &= ~np.isin(positions, self.dead)
        return np.where(exists, positions, -1)

    def nearest(self, queries: Singles, k: int) -> SearchHits:
        """Return positions and inner products of the k nearest, best first: exact."""
        return select_best(search_rows(self.rows, queries, k + len(self.dead)), self.dead, k)


class RowMatrix:
    """A growing matrix of rows; readers use views."""

    def __init__(self, dimension: int) -> None:
        self._ids, self._rows = np.empty(0, np.uint32), np.empty((0, dimension), np.float32)
        self.view = RowView(self._ids, self._rows, np.empty(0, np.int64))

    def change(self, ids: Ids, rows: Singles, gone: NDArray[np.int64]) -> RowView:
        """Add rows of increasing ids and remove others; return the new view."""
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

    def reserve(self, capacity: int) -> None:
        """Reallocate for a number of rows; existing views keep the old array."""
        ids, rows = self.view.ids, self.view.rows
        self._ids, self._rows = np.empty(capacity, np.uint32), np.empty((capacity, rows.shape[1]), np.float32)
        self._ids[: len(ids)], self._rows[: len(ids)] = ids, rows

    def _pack(self) -> None:
        self._ids, self._rows = self.view.alive()
        self.view = RowView(self._ids, self._rows, np.empty(0, np.int64))


def search_rows(rows: Singles, queries: Singles, k: int) -> SearchHits:
    """Return positions and inner products of the k nearest rows; -1 if there are fewer."""
    if not len(rows):
        return np.full((len(queries), k), -1, np.int64), np.full((len(queries), k), -np.inf, np.float32)
    scores, positions = faiss.knn(queries, rows, k, metric=faiss.METRIC_INNER_PRODUCT)
    return positions, scores


def select_best(hits: SearchHits, dead: Positions, k: int) -> SearchHits:
    """Return the k best without deleted rows, of equal scores the earliest; -1 if there are fewer."""
    positions, scores = hits
    scores = np.where((positions < 0) | np.isin(positions, dead), -np.inf, scores)
    order = np.lexsort((positions, -scores), axis=1)[:, :k]
    scores = np.take_along_axis(scores, order, axis=1)
    return np.where(np.isneginf(scores), -1, np.take_along_axis(positions, order, axis=1)), scores


_FILE = "index.db"
_SEALED = "index.sealed"
_APPLICATION = 0x4E567831  # "NVx1", in the header of the file: distinguishes it from other SQLite files
_SQLITE = b"SQLite format 3\0"
_LOG_BYTES = 64 << 20  # of the log that stay on disk after a large addition
_BLOCK_BYTES = 1 << 20  # of features in one row, at most
_TIMEOUT = 30.0  # seconds, of a worker that loads a partition
_PAGE = 32 << 10  # bytes: features are many times a page, and fewer pages are written faster
_FEATURE_TABLE = f"CREATE TABLE {FEATURES} (id INTEGER PRIMARY KEY, crc BIGINT NOT NULL, feature BLOB NOT NULL)"
_INSERT = f"INSERT INTO {FEATURES} (id, crc, feature) VALUES (?, ?, ?)"  # noqa: S608
_SELECT = (
    f"SELECT id, crc, feature FROM {FEATURES} "  # noqa: S608
    "WHERE id BETWEEN ? AND ? AND id + length(feature) / ? > ? ORDER BY id"
)
_SELECT_FROM = f"SELECT id, crc, feature FROM {FEATURES} WHERE id >= ? ORDER BY id"  # noqa: S608
_DELETE = f"DELETE FROM {FEATURES} WHERE id = ?"  # noqa: S608


class DirectoryIndex(_index.Index):
    """The embedded store: no server, one file.

    A change is one SQLite transaction, flushed before it returns: a killed process leaves the index as it was before or
    after. Features are in memory; those of a gallery of 1 GiB or more are loaded at the first search.
    """

    def __init__(self, database: Database, location: str) -> None:
        super().__init__(database, location)
        self._lock = threading.Lock()
        self._file = identify_file(database.path)
        self._matrix = RowMatrix(self.dimension)
        self._revision, self._next_id = -1, 0  # of the rows in the matrix
        if not self._header().is_large:
            self._view()  # raises now if the file is corrupted

    @property
    def sealed_file(self) -> Path:
        """The path of the index for sealed queries beside this one."""
        return Path(self._location) / _SEALED

    @classmethod
    def _create(cls, where: str, header: Header, timeout: float) -> "DirectoryIndex":
        folder = Path(where).expanduser().resolve()
        try:
            make_private_folder(folder)
            other_files = [entry for entry in folder.iterdir() if not entry.name.startswith(_FILE)]
        except OSError as error:
            raise IndexStoreError(f"index {folder}: cannot create the directory: {error.strerror}") from error
        if other_files:
            raise IndexStoreError(f"index {folder}: the directory must be new or empty; it contains other files")
        url = URL.create("sqlite", database=str(folder / _FILE))
        try:
            _write_empty(folder / _FILE, header, timeout)
        except sqlite3.Error as error:
            raise explain(error, url) from error
        flush_folder(folder.parent)
        return cls(_open_database(folder / _FILE, timeout), str(folder))

    @classmethod
    def _open(cls, where: str, timeout: float) -> "DirectoryIndex":
        folder = Path(where).expanduser().resolve()
        _check_file(folder / _FILE, str(folder))
        database = _open_database(folder / _FILE, timeout)
        try:
            with database.begin_read() as connection:
                if not sa.inspect(connection).has_table(headers.name):
                    raise NotAnIndexError(f"index {folder} was never finished. Create one here with Index.create().")
            return cls(database, str(folder))
        except BaseException:
            database.close()
            raise

    def features(self, ids: ArrayLike) -> Singles:
        """Return features, in the order of the ids."""
        if self._revision < 0:  # nothing was searched yet: load only these rows
            return super().features(ids)
        id_list = check_ids(ids)
        if not isinstance(id_list, np.ndarray):
            with self._database.begin_read() as connection:
                id_list = self._resolve(connection, id_list)
        _, view = self._view()
        positions = view.positions(id_list)
        if (positions < 0).any():
            raise UnknownItemError(id_list[positions < 0].tolist())
        return view.rows[positions]

    def snapshot(self) -> Snapshot:
        """Return all ids and features of the current revision."""
        with self._database.begin_read() as connection:
            header = load_header(connection, self._location)
            if header.is_large:
                ids = load_ids(connection, header, self._location)
                return Snapshot(header.revision, ids, LazyFeatures(read_rows, self._location, ids, self.dimension))
        revision, view = self._view()
        return Snapshot(revision, *view.alive())

    def _search(self, queries: Singles, k: int) -> tuple[Ids, Singles]:
        _, view = self._view()
        positions, scores = view.nearest(queries, check_k(k, len(view)))
        return view.ids[positions], scores

    def _view(self) -> tuple[int, RowView]:
        """Return the revision and the rows, after loading changes."""
        with self._lock, self._database.begin_read() as connection:
            header = load_header(connection, self._location)
            if header.revision != self._revision:
                try:
                    self._load_changes(connection, header)
                except BaseException:
                    self._forget_rows()  # they may be half updated
                    raise
            return self._revision, self._matrix.view

    def _load_changes(self, connection: sa.Connection, header: Header) -> None:
        if header.revision < self._revision:  # a backup was restored
            self._forget_rows()
        gone = find_deleted_since(connection, self._revision)
        if self._revision < 0:
            self._matrix.reserve(header.count)
        for ids, rows in self._read_from(connection, self._next_id):
            self._matrix.change(ids, rows, np.empty(0, np.int64))
        view = self._matrix.change(np.empty(0, np.uint32), np.empty((0, self.dimension), np.float32), gone)
        if len(view) != header.count or count_deleted(connection) != header.next_id - header.count:
            raise CorruptedIndexError(self._location, "the list of items")
        self._revision, self._next_id = header.revision, header.next_id

    def _identify_file(self) -> tuple[int, ...]:
        try:
            file = identify_file(self._database.path)
        except OSError:
            raise IndexStoreError(f"index {self._location}: its file is gone: restore it") from None
        if file != self._file:  # a backup was restored: open connections still read the file that was there before
            self._database.close()
            with self._lock:
                self._forget_rows()
            self._file = file
        return file

    def _forget_rows(self) -> None:
        self._matrix = RowMatrix(self.dimension)
        self._revision, self._next_id = -1, 0

    def _insert_features(
        self, connection: sa.Connection, ids: NDArray[np.int64], features: Singles, tick: Tick
    ) -> None:
        block, rows, first = _block_size(self.dimension), np.ascontiguousarray(features, "<f4"), int(ids[0])
        for start in range(first - first % block, first + len(rows), block):
            chunk = rows[max(0, start - first) : start + block - first]
            data, number = chunk.data.cast("B"), max(start, first)
            connection.exec_driver_sql(_INSERT, (number, zlib.crc32(data, number), data))
            tick(len(chunk))

    def _delete_features(self, connection: sa.Connection, ids: NDArray[np.int64]) -> int:
        count = 0
        for block_ids, features in list(self._read_blocks(connection, ids)):
            first, stop = int(block_ids[0]), int(block_ids[-1]) + 1
            gone = ids[(ids >= first) & (ids < stop)]
            if not len(gone):
                continue
            connection.exec_driver_sql(_DELETE, (first,))
            for start, end in cut_runs(first, stop, gone):
                remaining = np.arange(start, end, dtype=np.int64)
                self._insert_features(connection, remaining, features[start - first : end - first], lambda _: None)
            count += len(gone)
        return count

    def _read_blocks(self, connection: sa.Connection, ids: NDArray[np.int64]) -> Iterator[tuple[Ids, Singles]]:
        return _read_blocks(connection, ids, self.dimension, self._location)

    def _read_from(self, connection: sa.Connection, first: int) -> Iterator[tuple[Ids, Singles]]:
        return _check_rows(connection.exec_driver_sql(_SELECT_FROM, (first,)), self.dimension, self._location)

    def _wipe(self) -> None:
        # The log still contains old pages. If another process reads right now, or the disk is full, it stays until the
        # next deletion: the deletion itself is done.
        with suppress(IndexStoreError), self._database.autocommit() as connection:
            connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")

    def _check_pages(self, connection: sa.Connection) -> None:
        if connection.exec_driver_sql("PRAGMA integrity_check(1)").scalar_one() != "ok":
            raise CorruptedIndexError(self._location)


def read_rows(location: str, ids: Ids, dimension: int) -> Singles:
    """Return the features of increasing ids from a directory, in any process that can access it."""
    database = _open_database(Path(location) / _FILE, _TIMEOUT)
    try:
        with database.begin_read() as connection:
            return fill_rows(ids, dimension, _read_blocks(connection, ids.astype(np.int64), dimension, location))
    finally:
        database.close()


def _block_size(dimension: int) -> int:
    """Return the most features in a row; no row crosses a multiple of it."""
    return max(1, _BLOCK_BYTES // (4 * dimension))


def _read_blocks(
    connection: sa.Connection, ids: NDArray[np.int64], dimension: int, location: str
) -> Iterator[tuple[Ids, Singles]]:
    """Yield the rows of the table that have some of the increasing ids."""
    block, width, ids = _block_size(dimension), 4 * dimension, ids[ids >= 0]
    blocks = ids // block
    starts = np.flatnonzero(np.diff(blocks, prepend=-1)).tolist()
    for start, stop in pairwise([*starts, len(ids)]):
        bounds = (int(blocks[start]) * block, int(ids[stop - 1]), width, int(ids[start]))
        yield from _check_rows(connection.exec_driver_sql(_SELECT, bounds).all(), dimension, location)


def _check_rows(rows: Iterable[Any], dimension: int, location: str) -> Iterator[tuple[Ids, Singles]]:
    """Yield ids and features of rows of the table, in order of their ids, compared with their CRC."""
    width, last = 4 * dimension, -1
    for first, crc, data in rows:
        is_sound = isinstance(data, bytes) and data and len(data) % width == 0 and zlib.crc32(data, first) == crc
        if not is_sound or not last < first <= MOST_ITEMS - len(data) // width:
            raise CorruptedIndexError(location, "a block of features")
        last = first + len(data) // width - 1
        features = np.frombuffer(data, "<f4").reshape(-1, dimension).astype(np.float32, copy=False)
        yield np.arange(first, last + 1, dtype=np.uint32), features


def _open_database(path: Path, timeout: float) -> Database:
    url = URL.create("sqlite", database=str(path))
    return Database(url, timeout, prepare=_prepare, explain=explain, allow_read_only=True)


def _prepare(connection: sqlite3.Connection) -> None:
    prepare_durable(connection)
    connection.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}")
    connection.execute("PRAGMA secure_delete = ON")  # overwrite deleted data
    connection.execute("PRAGMA cell_size_check = ON")  # report a corrupted page instead of reading it


def _write_empty(path: Path, header: Header, timeout: float) -> None:
    """Write an empty index in one transaction. Not yet with a log: the header must be in the file itself."""
    with suppress(OSError):  # SQLite reports the reason, and would create the file readable for all
        make_private_file(path)
    engine = sa.create_engine(URL.create("sqlite", database=str(path)), connect_args={"timeout": timeout})
    sa.event.listen(engine, "connect", lambda connection, _: setattr(connection, "isolation_level", None))
    try:
        with engine.connect() as connection:
            connection.exec_driver_sql(f"PRAGMA page_size = {_PAGE}")
            connection.exec_driver_sql("PRAGMA synchronous = FULL")
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            if sa.inspect(connection).get_table_names():
                raise IndexStoreError(f"index {path.parent} already exists: open it with Index.open()")
            metadata.create_all(connection)
            connection.exec_driver_sql(_FEATURE_TABLE)
            connection.exec_driver_sql(f"PRAGMA application_id = {_APPLICATION}")
            connection.execute(sa.insert(headers).values(header.to_row()))
            connection.commit()
    except sa.exc.DBAPIError as error:
        raise error.orig or error from error
    finally:
        engine.dispose()


def _check_file(path: Path, location: str) -> None:
    """Check the file before SQLite, which would write to it, opens it; a file that is open here was checked before."""
    if is_open_here(path):
        return
    try:
        with open(path, "rb", opener=_open_nonblocking) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise IndexStoreError(f"index {location}: not a regular file; restore a backup")
            start = file.read(100)
    except (FileNotFoundError, NotADirectoryError):
        raise NotAnIndexError(f"No index at {location}. Create one with Index.create().") from None
    except OSError as error:
        raise IndexStoreError(f"index {location} cannot be opened: {error.strerror}") from error
    if not start:
        raise NotAnIndexError(f"index {location} was never finished. Create one here with Index.create().")
    if len(start) < 100 or not start.startswith(_SQLITE):
        raise CorruptedIndexError(location)
    if struct.unpack_from(">I", start, 68)[0] != _APPLICATION:
        raise NotAnIndexError(f"index {location}: the file {_FILE} there is not an index of nearveil")


def _open_nonblocking(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # a pipe without a writer would block
