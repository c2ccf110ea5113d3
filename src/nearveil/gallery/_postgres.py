"""An index in PostgreSQL: the same tables, with features in a column of pgvector."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import sqlalchemy as sa
from numpy.typing import ArrayLike, NDArray
from sqlalchemy.engine import make_url

from nearveil.gallery import index as _index
from nearveil.gallery.answers import Singles
from nearveil.gallery.errors import (
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
    encode_images,
    feature_crcs,
    fill_rows,
    find_ids,
    heads,
    is_large,
    load_head,
    make_damaged_error,
    metadata,
)
from nearveil.mechanisms.covers.maps import MOST_ITEMS
from nearveil.storage import Database, describe_url

_LOCK = 0x6E76_696E_6465_78  # "nvindex": of those who make or prepare an index, among all that lock in one server
_PLAIN = 1900  # dimensions up to which a row fits into a page of 8 KiB: beside each other a scan reads them fastest
_BLOCK = 1 << 14  # rows written or read at once
_WAIT = 30.0  # seconds, of a worker that reads a partition
_EXTENSION = (
    "SELECT n.nspname FROM pg_extension e JOIN pg_namespace n ON n.oid = e.extnamespace WHERE e.extname = 'vector'"
)
_PATH = (
    "SELECT set_config('search_path', "
    "concat_ws(', ', nullif(current_setting('search_path'), ''), quote_ident(%s)), false)"
)
_EXACT = "SELECT id, -(feature <#> %(q)s) FROM nearveil_feature ORDER BY feature <#> %(q)s, id LIMIT %(k)s"


class PostgresIndex(_index.Index):
    """The store for those who have a PostgreSQL server already. A change is one transaction."""

    @classmethod
    def _create(cls, where: str, first: Head, timeout: float) -> "PostgresIndex":
        database = _database(where, timeout)
        where = describe_url(database.url)
        try:
            with database.begin_write() as connection:
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
                if connection.exec_driver_sql(_EXTENSION).one_or_none() is None:
                    connection.exec_driver_sql("CREATE EXTENSION vector SCHEMA public")
            database.close()  # connections of now know the type
            with database.begin_write() as connection:
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
                if _has(connection, heads.name):
                    raise IndexStoreError(f"index {where}: there is one already: Index.open opens it")
                metadata.create_all(connection)
                connection.exec_driver_sql(FEATURE_TABLE.format(id="BIGINT", feature=f"vector({first.dimension})"))
                if first.dimension <= _PLAIN:
                    connection.exec_driver_sql(f"ALTER TABLE {FEATURES} ALTER COLUMN feature SET STORAGE PLAIN")
                connection.execute(sa.insert(heads).values(first.row()))
            return cls(database, where)
        except BaseException:
            database.close()
            raise

    @classmethod
    def _open(cls, where: str, timeout: float) -> "PostgresIndex":
        database = _database(where, timeout)
        where = describe_url(database.url)
        try:
            with database.begin_read() as connection:
                if not _has(connection, heads.name):
                    raise NotAnIndexError(f"index {where}: there is none here: Index.create makes one")
            return cls(database, where)
        except BaseException:
            database.close()
            raise

    def features(self, ids: ArrayLike) -> Singles:
        """Return features, in the order of the ids."""
        numbers = self._find_numbers(ids)
        listed = ",".join(map(str, np.unique(numbers).tolist()))
        with self._database.begin_read() as connection:
            some = _copy_out(connection, f"WHERE id = ANY('{{{listed}}}')", self.dimension, self._where)
        held, rows = some
        missing = ~np.isin(numbers, held)
        if missing.any():
            raise UnknownItemError(numbers[missing].tolist())
        return rows[np.searchsorted(held, numbers)]

    def snapshot(self) -> Snapshot:
        """Return all ids and features as they are now."""
        with self._database.begin_read() as connection:
            head = load_head(connection, self._where)
            if is_large(head):
                ids, place = find_ids(connection, head, self._where), self._database.url
                text = place.render_as_string(hide_password=False)
                return Snapshot(head.revision, ids, RowPlace(read_rows, text, ids, self.dimension))
            ids, features = np.empty(head.count, np.uint32), np.empty((head.count, self.dimension), np.float32)
            end = 0
            for some, rows in self._stored(connection, 0):
                start, end = end, end + len(some)
                if end > head.count:
                    break
                ids[start:end], features[start:end] = some, rows
        if end != head.count:
            raise make_damaged_error(self._where, "the list of items")
        return Snapshot(head.revision, ids, features)

    def _search(self, queries: Singles, k: int) -> tuple[Ids, Singles]:
        from pgvector import Vector

        # A scan of all rows: an index on the features, such as one of version 0.2, would make it approximate.
        settings = ("jit = off", "enable_indexscan = off", "enable_bitmapscan = off")
        with self._database.begin_read() as connection:
            k = check_k(k, load_head(connection, self._where).count)
            connection.exec_driver_sql("; ".join(f"SET LOCAL {setting}" for setting in settings))
            rows = [list(connection.exec_driver_sql(_EXACT, {"q": Vector(row), "k": k}).all()) for row in queries]
        table = np.array(rows, np.float64).reshape(len(rows), k, 2)  # ids of 32 bits are whole numbers there
        return table[:, :, 0].astype(np.uint32), table[:, :, 1].astype(np.float32)

    def _insert(self, connection: sa.Connection, ids: NDArray[np.int64], batch: Batch, tick: Tick) -> None:
        for start in range(0, len(batch), _BLOCK):
            some = batch.features[start : start + _BLOCK]
            _copy_in(connection, ids[start : start + _BLOCK], some)
            tick(len(some))
        columns = "nearveil_item (id, crc, name, thumbnail, original, path, original_crc)"
        types = ("int8", "int8", "text", "bytea", "bytea", "text", "int8")
        _copy(connection, columns, types, encode_images(ids, batch))

    def _delete_features(self, connection: sa.Connection, ids: NDArray[np.int64]) -> int:
        gone = connection.exec_driver_sql(f"DELETE FROM {FEATURES} WHERE id = ANY(%s)", (ids.tolist(),))  # noqa: S608
        return int(gone.rowcount)

    def _stored(self, connection: sa.Connection, first: int) -> Iterator[tuple[Ids, Singles]]:
        for start in range(first, load_head(connection, self._where).next_id, _BLOCK):
            some = _copy_out(connection, _between(start, start + _BLOCK - 1), self.dimension, self._where)
            if len(some[0]):
                yield some


def _between(first: int, last: int) -> str:
    return f"WHERE id BETWEEN {int(first)} AND {int(last)}"


def read_rows(place: str, ids: Ids, dimension: int) -> Singles:
    """Return the features of ids, which rise, from a server: in any process that reaches it."""
    database = _database(place, _WAIT)
    where, blocks = describe_url(database.url), [ids[start : start + _BLOCK] for start in range(0, len(ids), _BLOCK)]
    try:
        with database.begin_read() as connection:
            found = (_copy_out(connection, _between(some[0], some[-1]), dimension, where) for some in blocks)
            return fill_rows(ids, dimension, found)
    finally:
        database.close()


def _database(where: str, timeout: float) -> Database:
    try:
        url = make_url(where).set(drivername="postgresql+psycopg")
    except (sa.exc.ArgumentError, ValueError):
        raise ValueError("where must be a directory, or a URL such as postgresql://user@host/database") from None
    return Database(url, timeout, prepare=_prepare, explain=explain)


def _prepare(connection: Any) -> None:
    """Teach a connection the type of features, wherever the server keeps it."""
    try:
        from pgvector.psycopg import register_vector
    except ModuleNotFoundError as missing:
        raise IndexStoreError("PostgreSQL needs pgvector: pip install nearveil[postgres]") from missing
    schema = connection.execute(_EXTENSION).fetchone()
    if schema is not None:
        connection.execute(_PATH, schema)
        register_vector(connection)
    connection.commit()


def _has(connection: sa.Connection, table: str) -> bool:
    """Return whether a table is found on the search path's first schema."""
    return bool(sa.inspect(connection).has_table(table))


# PostgreSQL's binary form of COPY: a header, a row for each feature, an end.
_COPY_HEADER, _COPY_END = b"PGCOPY\n\xff\r\n\0" + bytes(8), b"\xff\xff"


def _copy_type(dimension: int) -> "np.dtype[np.void]":
    sizes = [("id_bytes", ">i4"), ("id", ">i8"), ("crc_bytes", ">i4"), ("crc", ">i8"), ("bytes", ">i4")]
    return np.dtype([("fields", ">i2"), *sizes, ("dimension", ">i2"), ("flags", ">i2"), ("row", ">f4", (dimension,))])


def _make_copied(count: int, dimension: int) -> NDArray[np.void]:
    """Return rows of a COPY with all but ids, checksums and features."""
    copied = np.zeros(count, _copy_type(dimension))
    copied["fields"], copied["id_bytes"], copied["crc_bytes"] = 3, 8, 8
    copied["bytes"], copied["dimension"] = 4 + 4 * dimension, dimension
    return copied


def _copy_in(connection: sa.Connection, ids: NDArray[np.int64], features: Singles) -> None:
    """Write features at once."""
    rows = np.ascontiguousarray(features, "<f4")
    copied = _make_copied(*rows.shape)
    copied["id"], copied["crc"], copied["row"] = ids, feature_crcs(ids.tolist(), rows), rows
    statement = f"COPY {FEATURES} (id, crc, feature) FROM STDIN (FORMAT BINARY)"
    with _driver(connection).cursor() as cursor, cursor.copy(statement) as copy:
        for part in (_COPY_HEADER, copied.data.cast("B"), _COPY_END):
            copy.write(part)


def _copy_out(connection: sa.Connection, condition: str, dimension: int, where: str) -> tuple[Ids, Singles]:
    """Return ids and features by rising ids, checked. All are read first: a copying connection does nothing else."""
    statement = f"COPY (SELECT id, crc, feature FROM {FEATURES} {condition} ORDER BY id) TO STDOUT (FORMAT BINARY)"  # noqa: S608
    with _driver(connection).cursor() as cursor, cursor.copy(statement) as copy:
        data = b"".join(copy)
    if not data.startswith(_COPY_HEADER) or not data.endswith(_COPY_END):
        raise make_damaged_error(where, "a feature")
    return _decode_copied(data[len(_COPY_HEADER) : -len(_COPY_END)], dimension, where)


def _decode_copied(data: bytes, dimension: int, where: str) -> tuple[Ids, Singles]:
    kind = _copy_type(dimension)
    if len(data) % kind.itemsize:
        raise make_damaged_error(where, "a feature")
    if not data:
        return np.empty(0, np.uint32), np.empty((0, dimension), np.float32)
    copied, wanted = np.frombuffer(data, kind), _make_copied(1, dimension)
    ids, rows = copied["id"].astype(np.int64), copied["row"].astype("<f4")
    fixed = [name for name in kind.names or () if name not in {"id", "crc", "row", "flags"}]
    fits = all((copied[name] == wanted[name]).all() for name in fixed)
    if not fits or ids[0] < 0 or ids[-1] >= MOST_ITEMS or feature_crcs(ids.tolist(), rows) != copied["crc"].tolist():
        raise make_damaged_error(where, "a feature")
    return ids.astype(np.uint32), rows.astype(np.float32, copy=False)


def _copy(connection: sa.Connection, target: str, types: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
    """Write many rows at once."""
    with _driver(connection).cursor() as cursor, cursor.copy(f"COPY {target} FROM STDIN (FORMAT BINARY)") as copy:
        copy.set_types(types)
        for row in rows:
            copy.write_row(row)


def _driver(connection: sa.Connection) -> Any:
    """Return psycopg's own connection: for what SQLAlchemy has no words for."""
    return connection.connection.driver_connection
