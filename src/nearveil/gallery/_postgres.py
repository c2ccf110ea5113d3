"""An index in PostgreSQL: the same tables, with features in a pgvector column."""

from typing import Any

import numpy as np
import sqlalchemy as sa
from numpy.typing import NDArray
from sqlalchemy.engine import make_url

from nearveil.gallery import store
from nearveil.gallery.codes import Longs, Singles
from nearveil.gallery.errors import IndexStoreError, explain
from nearveil.gallery.index import Index
from nearveil.gallery.items import Ids, check_k
from nearveil.gallery.store import FEATURES, Header
from nearveil.progress import Tick
from nearveil.storage import Database, describe_url

_LOCK = 0x6E76_696E_6465_78  # "nvindex": the advisory lock of those who create an index in one server
_PLAIN = 1900  # dimensions up to which a row fits into a page of 8 KiB, where a scan is fastest
_INSERTED = 1 << 14  # rows written at once
_EXTENSION = "SELECT nspname FROM pg_extension JOIN pg_namespace n ON n.oid = extnamespace WHERE extname = 'vector'"
_PATH = (
    "SELECT set_config('search_path', "
    "concat_ws(', ', nullif(current_setting('search_path'), ''), quote_ident(%s)), false)"
)
# By what items are sorted, in pgvector, and the metric's value of it; inner products are negative there.
_MEASURES = {"dot": ("<#>", "-({})"), "euclidean": ("<->", "{}")}
_COSINE = ("<->", "1 - ({}) ^ 2 / 2")  # by the distance of rows of norm one, which is more precise than their product


class PostgresIndex(Index):
    """The store for users of a PostgreSQL server. A change is one transaction."""

    @classmethod
    def _prepare_location(cls, location: str, timeout: float) -> tuple[Database, str]:
        database, shown = cls._connect(location, timeout)
        try:
            with database.begin_write() as connection:
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
                if connection.exec_driver_sql(_EXTENSION).one_or_none() is None:
                    connection.exec_driver_sql("CREATE EXTENSION vector SCHEMA public")
        finally:
            database.close()  # new connections have the type
        return database, shown

    @classmethod
    def _create_tables(cls, connection: sa.Connection, location: str, dimension: int) -> None:
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
        if sa.inspect(connection).has_table(store.headers.name):
            raise IndexStoreError(f"index {location} already exists: open it with Index.open()")
        store.metadata.create_all(connection)
        columns = f"id BIGINT PRIMARY KEY, feature vector({dimension}) NOT NULL"
        connection.exec_driver_sql(f"CREATE TABLE {FEATURES} ({columns})")
        if dimension <= _PLAIN:
            connection.exec_driver_sql(f"ALTER TABLE {FEATURES} ALTER COLUMN feature SET STORAGE PLAIN")

    @classmethod
    def _connect(cls, location: str, timeout: float) -> tuple[Database, str]:
        try:
            url = make_url(location).set(drivername="postgresql+psycopg")
        except (sa.exc.ArgumentError, ValueError):
            raise ValueError("location must be a directory, or a URL such as postgresql://user@host/database") from None
        return Database(url, timeout, prepare=_prepare, explain=explain), describe_url(url)

    def _search(self, queries: Singles, k: int) -> tuple[Ids, Singles]:
        from pgvector import Vector

        # A scan of all rows: an index on the features, such as one of version 0.2, would make it approximate.
        settings = ("jit = off", "enable_indexscan = off", "enable_bitmapscan = off")
        with self._database.begin_read() as connection:
            k = check_k(k, store.load_header(connection, self._location).count)
            connection.exec_driver_sql("; ".join(f"SET LOCAL {setting}" for setting in settings))
            operator, value = _MEASURES.get(self._first_metric, _COSINE)
            order = f"feature {operator} %(q)s"
            query = f"SELECT id, {value.format(order)} FROM {FEATURES} ORDER BY {order}, id LIMIT %(k)s"  # noqa: S608
            rows = [list(connection.exec_driver_sql(query, {"q": Vector(row), "k": k}).all()) for row in queries]
        table = np.array(rows, np.float64).reshape(len(rows), k, 2)  # exact for 32-bit ids
        return table[:, :, 0].astype(np.uint32), table[:, :, 1].astype(np.float32)

    def _insert_features(self, connection: sa.Connection, ids: Longs, features: Singles, tick: Tick) -> None:
        for start in range(0, len(ids), _INSERTED):
            numbers, rows = ids[start : start + _INSERTED], features[start : start + _INSERTED]
            pairs = zip(numbers.tolist(), rows, strict=True)
            store.copy_rows(connection, f"{FEATURES} (id, feature)", ("int8", "vector"), pairs)
            store.add_to_digests(connection, "feature", store.hash_features(numbers, rows))
            tick(len(rows))

    def _delete_features(self, connection: sa.Connection, ids: NDArray[np.int64]) -> int:
        delete = f"DELETE FROM {FEATURES} WHERE id = ANY(%s) RETURNING id, feature"  # noqa: S608
        gone, features = _fetch(connection, delete, [ids.tolist()], self.dimension)
        store.add_to_digests(connection, "feature", store.hash_features(gone, features), sign=-1)
        return len(gone)

    @property
    def _block_size(self) -> int:
        return store.BLOCK

    def _read_block(self, connection: sa.Connection, block: int) -> tuple[Ids, Singles]:
        ids, features = _fetch_block(connection, block, self.dimension)
        store.check_digest(connection, "feature", block, store.hash_features(ids, features), self._location)
        return ids, features

    def _migrate_features(self, connection: sa.Connection, header: Header) -> None:
        connection.exec_driver_sql(f"ALTER TABLE {FEATURES} DROP COLUMN crc")
        for block in range(-(-header.next_id // store.BLOCK)):
            rows = _fetch_block(connection, block, header.dimension)
            store.add_to_digests(connection, "feature", store.hash_features(*rows))


def _fetch_block(connection: sa.Connection, block: int, dimension: int) -> tuple[Ids, Singles]:
    """Return the ids and features of a block, increasing, without a check."""
    query = f"SELECT id, feature FROM {FEATURES} WHERE id BETWEEN %s AND %s ORDER BY id"  # noqa: S608
    return _fetch(connection, query, [block * store.BLOCK, (block + 1) * store.BLOCK - 1], dimension)


def _fetch(connection: sa.Connection, statement: str, values: list[Any], dimension: int) -> tuple[Ids, Singles]:
    """Run a statement that returns ids and features."""
    driver: Any = connection.connection.driver_connection
    with driver.cursor(binary=True) as cursor:
        rows = cursor.execute(statement, values).fetchall()
    features = np.empty((len(rows), dimension), np.float32)
    for position, (_, vector) in enumerate(rows):
        features[position] = vector.to_numpy() if hasattr(vector, "to_numpy") else vector
    return np.array([number for number, _ in rows], np.uint32), features


def _prepare(connection: Any) -> None:
    """Register the type of features on a connection, whatever schema of the server has it."""
    try:
        from pgvector.psycopg import register_vector
    except ModuleNotFoundError as missing:
        raise IndexStoreError('PostgreSQL needs pgvector: pip install "nearveil[postgres]"') from missing
    schema = connection.execute(_EXTENSION).fetchone()
    if schema is not None:
        connection.execute(_PATH, schema)
        register_vector(connection)
    connection.commit()
