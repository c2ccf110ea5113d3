"""An index in a directory: one SQLite file, with features in blocks, and a copy of them in memory."""

import itertools
import os
import sqlite3
import stat
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import sqlalchemy as sa
from numpy.typing import NDArray
from sqlalchemy.engine import URL

from nearveil import storage
from nearveil.gallery import store
from nearveil.gallery.codes import Longs, Singles
from nearveil.gallery.errors import CorruptedIndexError, IndexStoreError, NotAnIndexError, explain
from nearveil.gallery.index import Index
from nearveil.gallery.items import Ids, IndexSnapshot, check_k
from nearveil.progress import Tick
from nearveil.remote import fetch_objects, is_remote, refuse_change
from nearveil.storage import Database

_FILE = "index.db"
_SEALED = "index.sealed"
_APPLICATION = 0x4E567831  # "NVx1", in the header of the file: distinguishes it from other SQLite files
_SQLITE = b"SQLite format 3\0"
_LOG_BYTES = 64 << 20  # of the log that stay on disk after a large addition
_BLOCK_BYTES = 1 << 20  # of features in one row, at most
_PAGE = 32 << 10  # bytes: features are many times a page, and fewer pages are written faster
_features = sa.Table(  # a row has the features of consecutive ids, from `id` on
    store.FEATURES,
    sa.MetaData(),
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("crc", sa.BigInteger, nullable=False),
    sa.Column("feature", sa.LargeBinary, nullable=False),
)


class DirectoryIndex(Index):
    """The embedded store: one SQLite file, and the features in memory, those of 1 GiB or more from the first search."""

    # A change is one transaction, flushed before it returns: a killed process leaves the index as it was before or
    # after.

    _rows: IndexSnapshot | None = None

    def __init__(self, database: Database, location: str) -> None:
        self._rows_file = database.reopen_if_replaced()  # the file of `_rows`
        with database.begin_read() as connection:
            if not sa.inspect(connection).has_table(store.headers.name):
                raise NotAnIndexError(f"index {location} was never finished. Create one here with Index.create().")
        super().__init__(database, location)
        self._lock = threading.Lock()

    @property
    def sealed_file(self) -> Path:
        """The path of the index for sealed queries beside this one."""
        return Path(self._location) / _SEALED

    @classmethod
    def _prepare_location(cls, location: str, timeout: float) -> tuple[Database, str]:
        refuse_change(location)
        folder = Path(location).expanduser().resolve()
        try:
            storage.make_private_folder(folder)
            other_files = [entry for entry in folder.iterdir() if not entry.name.startswith(_FILE)]
        except OSError as error:
            raise IndexStoreError(f"index {folder}: cannot create the directory: {error.strerror}") from error
        if other_files:
            raise IndexStoreError(f"index {folder}: the directory must be new or empty; it contains other files")
        with suppress(OSError):  # SQLite reports the reason, and would create the file readable for all
            storage.make_private_file(folder / _FILE)
        storage.flush_folder(folder.parent)
        return Database(_make_url(folder), timeout, prepare=_prepare_new, explain=explain), str(folder)

    @classmethod
    def _create_tables(cls, connection: sa.Connection, location: str, dimension: int) -> None:
        del dimension
        if sa.inspect(connection).get_table_names():
            raise IndexStoreError(f"index {location} already exists: open it with Index.open()")
        store.metadata.create_all(connection)
        _features.create(connection)
        connection.exec_driver_sql(f"PRAGMA application_id = {_APPLICATION}")

    @classmethod
    def _connect(cls, location: str, timeout: float) -> tuple[Database, str]:
        folder = fetch_objects(location, _FILE, _SEALED) if is_remote(location) else Path(location).expanduser()
        folder = folder.resolve()
        _check_file(folder / _FILE, str(folder))
        database = Database(_make_url(folder), timeout, prepare=_prepare, explain=explain, allow_read_only=True)
        return database, str(folder)

    def _check_rows(self) -> None:
        if not self._header().is_large:
            self._load_rows()

    def snapshot(self) -> IndexSnapshot:
        return super().snapshot() if self._header().is_large else self._load_rows()

    def _search(self, queries: Singles, k: int) -> tuple[Ids, Singles]:
        rows = self._load_rows()
        is_product, k = self._first_metric == "dot", check_k(k, len(rows))
        import faiss

        # Rows of norm one by their distance: its rounding is small beside it, that of a sum of products is not.
        measure = faiss.METRIC_INNER_PRODUCT if is_product else faiss.METRIC_L2
        values: NDArray[Any]
        values, positions = faiss.knn(queries, rows.features, k, metric=measure)
        order = np.lexsort((positions, -values if is_product else values), axis=1)  # equal values by id
        ids, values = rows.ids[np.take_along_axis(positions, order, axis=1)], np.take_along_axis(values, order, axis=1)
        if not is_product:
            values = np.sqrt(np.maximum(values, 0)) if self._first_metric == "euclidean" else 1 - values / 2
        return ids, np.asarray(values, np.float32)

    def _load_rows(self) -> IndexSnapshot:
        """Return the rows of the current revision; only rows added since the last call are read."""
        file = self._database.file  # before the connection, which may be to a newer one
        with self._lock, self._database.begin_read() as connection:
            header = store.load_header(connection, self._location)
            rows = self._rows
            if rows is None or header.revision < rows.revision or file != self._rows_file:  # a backup was restored
                rows = self._read_snapshot(connection, header)
            elif header.revision > rows.revision:
                rows = self._read_snapshot(connection, header, rows)
            self._rows, self._rows_file = rows, file
            return rows

    def _insert_features(self, connection: sa.Connection, ids: Longs, features: Singles, tick: Tick) -> None:
        for row in self._pack(ids, features):
            connection.execute(sa.insert(_features), row)
            tick(len(row["feature"]) // (4 * self.dimension))

    def _delete_features(self, connection: sa.Connection, ids: NDArray[np.int64]) -> int:
        count = 0
        for block in np.unique(ids // self._block_size).tolist():
            block_ids, features = self._read_block(connection, block)
            remaining = ~np.isin(block_ids, ids)
            count += int((~remaining).sum())
            connection.execute(sa.delete(_features).where(self._is_in_block(block)))
            if remaining.any():
                connection.execute(sa.insert(_features), list(self._pack(block_ids[remaining], features[remaining])))
        return count

    def _pack(self, ids: NDArray[np.integer], features: Singles) -> Iterator[dict[str, Any]]:
        """Yield rows of the table for increasing ids: each has consecutive ids of one block."""
        rows, blocks = np.ascontiguousarray(features, "<f4"), ids // self._block_size
        cuts = np.flatnonzero((np.diff(ids) > 1) | (np.diff(blocks) > 0)) + 1
        for start, stop in itertools.pairwise([0, *cuts.tolist(), len(ids)]):
            data, number = rows[start:stop].data.cast("B"), int(ids[start])
            yield {"id": number, "crc": zlib.crc32(data, number), "feature": data}

    @property
    def _block_size(self) -> int:
        """The most features in a row of the table; no row crosses a multiple of it."""
        return max(1, _BLOCK_BYTES // (4 * self.dimension))

    def _is_in_block(self, block: int) -> sa.ColumnElement[bool]:
        return _features.c.id.between(block * self._block_size, (block + 1) * self._block_size - 1)

    def _read_block(self, connection: sa.Connection, block: int) -> tuple[Ids, Singles]:
        width, stop, end = 4 * self.dimension, block * self._block_size, (block + 1) * self._block_size
        ids, blobs = [np.empty(0, np.uint32)], []
        query = sa.select(_features).where(self._is_in_block(block)).order_by(_features.c.id)
        for first, crc, data in connection.execute(query):
            is_sound = isinstance(data, bytes) and len(data) % width == 0 and zlib.crc32(data, first) == crc
            if not is_sound or not stop <= first <= end - len(data) // width:
                raise CorruptedIndexError(self._location, "a block of features")
            stop = first + len(data) // width
            ids.append(np.arange(first, stop, dtype=np.uint32))
            blobs.append(data)
        features = np.frombuffer(b"".join(blobs), "<f4").reshape(-1, self.dimension)
        return np.concatenate(ids), features.astype(np.float32, copy=False)

    def _wipe(self) -> None:
        # The log still contains old pages. If another process reads right now, or the disk is full, it stays until the
        # next deletion: the deletion itself is done.
        with suppress(IndexStoreError), self._database.connect() as connection:
            connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")

    def _check_pages(self, connection: sa.Connection) -> None:
        if connection.exec_driver_sql("PRAGMA integrity_check(1)").scalar_one() != "ok":
            raise CorruptedIndexError(self._location)


def _make_url(folder: Path) -> URL:
    return URL.create("sqlite", database=str(folder / _FILE))


def _prepare(connection: sqlite3.Connection) -> None:
    storage.prepare_durable(connection)
    connection.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}")
    connection.execute("PRAGMA secure_delete = ON")  # overwrite deleted data
    connection.execute("PRAGMA cell_size_check = ON")  # report a corrupted page instead of reading it


def _prepare_new(connection: sqlite3.Connection) -> None:
    """Set up a connection that creates an index: not yet with a log, because the header must be in the file itself."""
    connection.execute(f"PRAGMA page_size = {_PAGE}")
    connection.execute("PRAGMA synchronous = FULL")


def _check_file(path: Path, location: str) -> None:
    """Check the file before SQLite, which would write to it, opens it; a file that is open here was checked before."""
    if storage.is_open_here(path):
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
