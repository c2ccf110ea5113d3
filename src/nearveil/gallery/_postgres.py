"""An index in PostgreSQL: the same tables, with features in a pgvector column."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import sqlalchemy as sa
from numpy.typing import NDArray
from sqlalchemy.engine import make_url

from nearveil.gallery import index as _index
from nearveil.gallery.answers import Singles
from nearveil.gallery.errors import IndexStoreError, explain
from nearveil.gallery.items import Ids, IndexSnapshot, LazyFeatures, check_k
from nearveil.gallery.store import (
    BLOCK,
    FEATURES,
    Header,
    add_to_digests,
    check_digests,
    copy_rows,
    fill_rows,
    hash_features,
    headers,
    load_header,
    load_ids,
    metadata,
)
from nearveil.progress import Tick
from nearveil.storage import Database, describe_url

_LOCK = 0x6E76_696E_6465_78  # "nvindex": the advisory lock of those who create an index in one server
_PLAIN = 1900  # dimensions up to which a row fits into a page of 8 KiB, where a scan is fastest
_INSERTED = 1 << 14  # rows written at once
_EXTENSION = (
    "SELECT n.nspname FROM pg_extension e JOIN pg_namespace n ON n.oid = e.extnamespace WHERE e.extname = 'vector'"
)
_PATH = (
    "SELECT set_config('search_path', "
    "concat_ws(', ', nullif(current_setting('search_path'), ''), quote_ident(%s)), false)"
)
_NEAREST = f"SELECT id, -(feature <#> %(q)s) FROM {FEATURES} ORDER BY feature <#> %(q)s, id LIMIT %(k)s"  # noqa: S608


class PostgresIndex(_index.Index):
    """The store for users of a PostgreSQL server. A change is one transaction."""

    @classmethod
    def _create(cls, location: str, header: Header, timeout: float) -> "PostgresIndex":
        database = _open_database(location, timeout)
        shown = describe_url(database.url)  # without its password
        try:
            with database.begin_write() as connection:
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
                if connection.exec_driver_sql(_EXTENSION).one_or_none() is None:
                    connection.exec_driver_sql("CREATE EXTENSION vector SCHEMA public")
            database.close()  # new connections have the type
            with database.begin_write() as connection:
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
                if sa.inspect(connection).has_table(headers.name):
                    raise IndexStoreError(f"index {shown} already exists: open it with Index.open()")
                metadata.create_all(connection)
                columns = f"id BIGINT PRIMARY KEY, feature vector({header.dimension}) NOT NULL"
                connection.exec_driver_sql(f"CREATE TABLE {FEATURES} ({columns})")
                if header.dimension <= _PLAIN:
                    connection.exec_driver_sql(f"ALTER TABLE {FEATURES} ALTER COLUMN feature SET STORAGE PLAIN")
                connection.execute(sa.insert(headers).values(header.to_row()))
            return cls(database, shown)
        except BaseException:
            database.close()
            raise

    @classmethod
    def _open(cls, location: str, timeout: float) -> "PostgresIndex":
        database = _open_database(location, timeout)
        try:
            return cls(database, describe_url(database.url))
        except BaseException:
            database.close()
            raise

    def snapshot(self) -> IndexSnapshot:
        with self._database.begin_read() as connection:
            header = load_header(connection, self._location)
            ids = load_ids(connection, header, self._location)
            if header.is_large:
                url = self._database.url.render_as_string(hide_password=False)
                return IndexSnapshot(header.revision, ids, LazyFeatures(_index.read_rows, url, ids, self.dimension))
            features, _ = fill_rows(ids, self.dimension, self._read_blocks(connection, ids.astype(np.int64)))
            return IndexSnapshot(header.revision, ids, features)

    def _search(self, queries: Singles, k: int) -> tuple[Ids, Singles]:
        from pgvector import Vector

        # A scan of all rows: an index on the features, such as one of version 0.2, would make it approximate.
        settings = ("jit = off", "enable_indexscan = off", "enable_bitmapscan = off")
        with self._database.begin_read() as connection:
            k = check_k(k, load_header(connection, self._location).count)
            connection.exec_driver_sql("; ".join(f"SET LOCAL {setting}" for setting in settings))
            rows = [list(connection.exec_driver_sql(_NEAREST, {"q": Vector(row), "k": k}).all()) for row in queries]
        table = np.array(rows, np.float64).reshape(len(rows), k, 2)  # exact for 32-bit ids
        return table[:, :, 0].astype(np.uint32), table[:, :, 1].astype(np.float32)

    def _insert_features(
        self, connection: sa.Connection, ids: NDArray[np.int64], features: Singles, tick: Tick
    ) -> None:
        for start in range(0, len(ids), _INSERTED):
            numbers, rows = ids[start : start + _INSERTED], features[start : start + _INSERTED]
            copy_rows(
                connection, f"{FEATURES} (id, feature)", ("int8", "vector"), zip(numbers.tolist(), rows, strict=True)
            )
            add_to_digests(connection, "feature", hash_features(numbers, rows))
            tick(len(rows))

    def _delete_features(self, connection: sa.Connection, ids: NDArray[np.int64]) -> int:
        delete = f"DELETE FROM {FEATURES} WHERE id = ANY(%s) RETURNING id, feature"  # noqa: S608
        gone, features = _fetch(connection, delete, [ids.tolist()], self.dimension)
        add_to_digests(connection, "feature", hash_features(gone, features), sign=-1)
        return len(gone)

    def _read_blocks(self, connection: sa.Connection, ids: NDArray[np.int64]) -> Iterator[tuple[Ids, Singles]]:
        for block in np.unique(ids[(ids >= 0) & (ids < 1 << 32)] // BLOCK).tolist():
            numbers, rows = _read_block(connection, block, self.dimension)
            check_digests(connection, "feature", hash_features(numbers, rows), [block], self._location)
            if len(numbers):
                yield numbers.astype(np.uint32), rows

    def _read_from(self, connection: sa.Connection, first: int) -> Iterator[tuple[Ids, Singles]]:
        next_id = load_header(connection, self._location).next_id
        return self._read_blocks(connection, np.arange(first, next_id, BLOCK))

    def _migrate_features(self, connection: sa.Connection, header: Header) -> None:
        connection.exec_driver_sql(f"ALTER TABLE {FEATURES} DROP COLUMN crc")
        for block in range(-(-header.next_id // BLOCK)):
            add_to_digests(connection, "feature", hash_features(*_read_block(connection, block, header.dimension)))


def _read_block(connection: sa.Connection, block: int, dimension: int) -> tuple[NDArray[np.int64], Singles]:
    query = f"SELECT id, feature FROM {FEATURES} WHERE id BETWEEN %s AND %s ORDER BY id"  # noqa: S608
    return _fetch(connection, query, [block * BLOCK, (block + 1) * BLOCK - 1], dimension)


def _fetch(
    connection: sa.Connection, statement: str, values: list[Any], dimension: int
) -> tuple[NDArray[np.int64], Singles]:
    """Run a statement that returns ids and features."""
    driver: Any = connection.connection.driver_connection
    with driver.cursor(binary=True) as cursor:
        rows = cursor.execute(statement, values).fetchall()
    features = np.empty((len(rows), dimension), np.float32)
    for position, (_, vector) in enumerate(rows):
        features[position] = vector.to_numpy() if hasattr(vector, "to_numpy") else vector
    return np.array([number for number, _ in rows], np.int64), features


def _open_database(location: str, timeout: float) -> Database:
    try:
        url = make_url(location).set(drivername="postgresql+psycopg")
    except (sa.exc.ArgumentError, ValueError):
        raise ValueError("location must be a directory, or a URL such as postgresql://user@host/database") from None
    return Database(url, timeout, prepare=_prepare, explain=explain)


def _prepare(connection: Any) -> None:
    """Register the type of features on a connection, whatever schema of the server has it."""
    try:
        from pgvector.psycopg import register_vector
    except ModuleNotFoundError as missing:
        raise IndexStoreError("PostgreSQL needs pgvector: pip install nearveil[postgres]") from missing
    schema = connection.execute(_EXTENSION).fetchone()
    if schema is not None:
        connection.execute(_PATH, schema)
        register_vector(connection)
    connection.commit()
