"""The tables of an index, the same in SQLite and PostgreSQL but for how a feature is kept. Every row has a checksum."""

import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import sqlalchemy as sa
from numpy.typing import NDArray

from nearveil.gallery.codes import Singles
from nearveil.gallery.errors import (
    DamagedIndexError,
    IndexStoreError,
    InexactRowsError,
    NotAnIndexError,
    PrivateIndexError,
)
from nearveil.gallery.items import Batch, Ids, StoredItem
from nearveil.mechanisms.covers.map import MOST_ITEMS

FORMAT = 1
_SOME = 500  # ids in one statement

metadata = sa.MetaData()


def _number(name: str, *, primary_key: bool = False) -> "sa.Column[int]":
    return sa.Column(name, sa.BigInteger, primary_key=primary_key, autoincrement=False, nullable=False)


heads = sa.Table(
    "nearveil_index",
    metadata,
    *map(_number, ("format", "dimension", "revision", "next_id", "count")),
    sa.Column("extractor", sa.Text, nullable=False),
    _number("crc"),
)
# Apart from the rest: who reads all features does not read all originals.
FEATURES = "nearveil_feature"
FEATURE_TABLE = "CREATE TABLE nearveil_feature (id {id} PRIMARY KEY, crc BIGINT NOT NULL, feature {feature} NOT NULL)"
items = sa.Table(
    "nearveil_item",
    metadata,
    _number("id", primary_key=True),
    _number("crc"),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("thumbnail", sa.LargeBinary, nullable=False),
    sa.Column("original", sa.LargeBinary),  # where there is a path, the SHA-256 of its file
    sa.Column("path", sa.Text),
    _number("original_crc"),  # by itself: who checks the rest need not read an original
)
deleted = sa.Table(
    "nearveil_deleted",
    metadata,
    _number("id", primary_key=True),
    _number("revision"),
    _number("crc"),
    sa.Index("nearveil_deleted_revision", "revision"),
)
published = sa.Table(
    "nearveil_published",
    metadata,
    _number("number", primary_key=True),
    _number("revision"),
    sa.Column("public_id", sa.Text, nullable=False),
    _number("parts"),
    _number("crc"),
)
parts = sa.Table(
    "nearveil_published_part",
    metadata,
    _number("number", primary_key=True),
    _number("part", primary_key=True),
    sa.Column("data", sa.LargeBinary, nullable=False),
    _number("crc"),
)

# One row where the rows of the index are private: the account that they are bound to, or nothing yet.
bindings = sa.Table("nearveil_bound", metadata, sa.Column("name", sa.Text, primary_key=True), _number("crc"))
# Ranges of ids, both ends included, whose rows are row-exact. What is in none of them is not.
exact_ranges = sa.Table(
    "nearveil_row_exact", metadata, _number("first", primary_key=True), _number("last"), _number("crc")
)


def checksum(*values: int | str | bytes | None) -> int:
    """Return a checksum of values, their types and their lengths.

    Examples
    --------
    >>> checksum(1, "a") != checksum(1, b"a") != checksum(1, "a", None)
    True
    """
    total = 0
    for value in values:
        data = value if isinstance(value, bytes) else str(value).encode()
        total = zlib.crc32(data, zlib.crc32(f"{type(value).__name__}{len(data)}:".encode(), total))
    return total


def feature_crcs(ids: Sequence[int], features: Sequence[bytes]) -> list[int]:
    """Return a checksum of each feature together with its id."""
    return list(map(zlib.crc32, features, ids))


@dataclass(frozen=True)
class Head:
    """What an index says of itself: one row, changed in every transaction that changes anything."""

    format: int
    dimension: int
    revision: int
    next_id: int
    count: int
    extractor: str

    def row(self) -> dict[str, Any]:
        """Return it as it is kept."""
        values = asdict(self)
        return {**values, "crc": checksum(*values.values())}


def load_head(connection: sa.Connection, where: str, *, lock: bool = False) -> Head:
    """Return the head; others who write wait if `lock`."""
    query = sa.select(heads)
    rows = connection.execute(query.with_for_update() if lock else query).all()
    if not rows:
        raise NotAnIndexError(f"index {where}: there is none here: Index.create makes one")
    values = dict(rows[0]._mapping)
    told = values.pop("crc")
    if len(rows) > 1 or checksum(*values.values()) != told:
        raise make_damaged_error(where, "its first row")
    head = Head(**values)
    if head.format > FORMAT:
        raise IndexStoreError(
            f"index {where}: it has version {head.format} of the format; this nearveil reads version {FORMAT}: "
            "install a newer nearveil"
        )
    return head


def save_head(connection: sa.Connection, head: Head) -> None:
    """Write the head, under the lock."""
    connection.execute(sa.update(heads).values(head.row()))


def take_ids(head: Head, count: int) -> NDArray[np.int64]:
    """Return ids that nobody had."""
    if head.next_id + count > MOST_ITEMS:
        raise IndexStoreError("all ids of 32 bits are used up; nothing was changed: make a new index")
    return np.arange(head.next_id, head.next_id + count, dtype=np.int64)


def encode_features(ids: NDArray[np.int64], features: Singles) -> list[tuple[int, int, bytes]]:
    """Return rows of id, checksum and feature as bytes."""
    width, whole = 4 * features.shape[1], features.astype("<f4", copy=False).tobytes()
    cut = [whole[start : start + width] for start in range(0, len(whole), width)]
    numbers = ids.tolist()
    return list(zip(numbers, feature_crcs(numbers, cut), cut, strict=True))


def encode_items(ids: NDArray[np.int64], batch: Batch) -> list[tuple[Any, ...]]:
    """Return rows of the items' table."""
    columns = zip(ids.tolist(), batch.names, batch.thumbnails, batch.originals, batch.paths, strict=True)
    return [
        (
            number,
            checksum(number, name, small, path, checksum(original)),
            name,
            small,
            original,
            path,
            checksum(original),
        )
        for number, name, small, original, path in columns
    ]


def decode_features(rows: Sequence[tuple[int, int, bytes]], dimension: int, where: str) -> tuple[Ids, Singles]:
    """Return ids and features of rows, checked."""
    if not rows:
        return np.empty(0, np.uint32), np.empty((0, dimension), np.float32)
    ids, crcs, features = zip(*rows, strict=True)
    try:
        fits = feature_crcs(ids, features) == list(crcs) and set(map(len, features)) == {4 * dimension}
    except (TypeError, OverflowError):  # a number or bytes that are none
        fits = False
    if not fits or not 0 <= min(ids) <= max(ids) < MOST_ITEMS:
        raise make_damaged_error(where, "a feature")
    joined = np.frombuffer(b"".join(features), "<f4").reshape(-1, dimension)
    return np.array(ids, np.uint32), joined.astype(np.float32, copy=False)


def load_items(
    connection: sa.Connection, ids: NDArray[np.int64], where: str, *, originals: bool = True
) -> dict[int, StoredItem]:
    """Return those of the items that are there, by id; without `originals`, bytes of originals are not read."""
    found: dict[int, StoredItem] = {}
    columns = [items.c.id, items.c.name, items.c.thumbnail, items.c.path, items.c.original_crc, items.c.crc]
    query = sa.select(*columns, items.c.original if originals else sa.null())
    for some in _chunks(ids):
        for *values, told, original in connection.execute(query.where(items.c.id.in_(some))):
            number, name, thumbnail, path, original_crc = values
            if checksum(*values) != told or (originals and checksum(original) != original_crc):
                raise make_damaged_error(where, "an item")
            if path is None:
                found[number] = StoredItem(number, name, thumbnail, original)
            else:
                found[number] = StoredItem(number, name, thumbnail, Path(path), original)
    return found


def sum_sizes(connection: sa.Connection, ids: NDArray[np.int64], kind: Literal["thumbnail", "original"]) -> int:
    """Return how many bytes a column holds of items, without reading them."""
    total = sa.select(sa.func.coalesce(sa.func.sum(sa.func.length(items.c[kind])), 0))
    return sum(int(connection.execute(total.where(items.c.id.in_(some))).scalar_one()) for some in _chunks(ids))


def delete_rows(connection: sa.Connection, ids: NDArray[np.int64], revision: int) -> int:
    """Delete items; remember their ids and when; return how many there were."""
    count = 0
    for some in _chunks(ids):
        connection.execute(sa.delete(items).where(items.c.id.in_(some)))
        gone = sa.text(f"DELETE FROM {FEATURES} WHERE id IN :some").bindparams(sa.bindparam("some", expanding=True))  # noqa: S608
        count += connection.execute(gone, {"some": some}).rowcount
        rows = [{"id": number, "revision": revision, "crc": checksum(number, revision)} for number in some]
        connection.execute(sa.insert(deleted), rows)
    return count


def find_present(connection: sa.Connection, ids: NDArray[np.int64]) -> set[int]:
    """Return those of the ids that the index holds."""
    found: set[int] = set()
    for some in _chunks(ids):
        found.update(connection.execute(sa.select(items.c.id).where(items.c.id.in_(some))).scalars())
    return found


def check_unknown(connection: sa.Connection, missing: list[int], where: str) -> None:
    """Raise if an id that is not found was given and never deleted: then its row was lost."""
    given = [number for number in missing if 0 <= number < load_head(connection, where).next_id]
    for some in _chunks(np.array(given, np.int64)):
        known = connection.execute(
            sa.select(sa.func.count()).select_from(deleted).where(deleted.c.id.in_(some))
        ).scalar_one()
        if known != len(some):
            raise make_damaged_error(where, "the list of items")


def find_deleted_since(connection: sa.Connection, revision: int, where: str) -> NDArray[np.int64]:
    """Return ids that were deleted after a revision, rising."""
    rows = connection.execute(sa.select(deleted).where(deleted.c.revision > revision).order_by(deleted.c.id)).all()
    if any(checksum(number, when) != told for number, when, told in rows):
        raise make_damaged_error(where, "a deletion")
    return np.array([row.id for row in rows], np.int64)


def count_deleted(connection: sa.Connection) -> int:
    """Return how many items were ever deleted."""
    return connection.execute(sa.select(sa.func.count()).select_from(deleted)).scalar_one()


def load_binding(connection: sa.Connection, where: str) -> str | None:
    """Return what private rows are bound to, "" for nothing yet; None where the rows are not private."""
    if not _exists(connection, bindings):  # an index that was made earlier
        return None
    held = connection.execute(sa.select(bindings)).all()
    if len(held) > 1 or any(checksum(row.name) != row.crc for row in held):
        raise make_damaged_error(where, "what it is bound to")
    return str(held[0].name) if held else None


def save_binding(connection: sa.Connection, name: str | None) -> None:
    """Say that rows are private and bound to `name`, or, with None, that they are not; under the lock."""
    bindings.create(connection, checkfirst=True)
    connection.execute(sa.delete(bindings))
    if name is not None:
        connection.execute(sa.insert(bindings).values(name=name, crc=checksum(name)))


def check_open(connection: sa.Connection, where: str) -> None:
    """Raise where the rows are private."""
    if load_binding(connection, where) is not None:
        raise PrivateIndexError(
            f"index {where}: its rows are private: they are not served, published or searched as an open gallery. A "
            "protected gallery answers from them"
        )


def delete_maps(connection: sa.Connection) -> None:
    """Delete all that was published."""
    connection.execute(sa.delete(parts))
    connection.execute(sa.delete(published))


def mark_exact(connection: sa.Connection, ids: NDArray[np.int64]) -> None:
    """Remember that the rows of new ids, which follow each other, are row-exact."""
    exact_ranges.create(connection, checkfirst=True)
    first, last = int(ids[0]), int(ids[-1])
    before = connection.execute(sa.select(exact_ranges.c.first).where(exact_ranges.c.last == first - 1)).scalar()
    if before is not None:
        first = before
        connection.execute(sa.delete(exact_ranges).where(exact_ranges.c.first == first))
    connection.execute(sa.insert(exact_ranges).values(first=first, last=last, crc=checksum(first, last)))


def check_exact(connection: sa.Connection, where: str) -> None:
    """Raise unless all rows are row-exact."""
    if count_inexact(connection, where):
        raise InexactRowsError(
            f"index {where}: it holds rows that are not row-exact, so removing one record may change others, and no "
            "guarantee to records holds. Index the images again: `nearveil index DIR --private` into a new place; or "
            "Index.add(items, row_exact=True) of rows by extract(images, row_exact=True)"
        )


def count_inexact(connection: sa.Connection, where: str) -> int:
    """Return how many rows are not row-exact."""
    total = sa.select(sa.func.count()).select_from(items)
    if not _exists(connection, exact_ranges):
        return connection.execute(total).scalar_one()
    if any(checksum(row.first, row.last) != row.crc for row in connection.execute(sa.select(exact_ranges))):
        raise make_damaged_error(where, "the list of rows that are row-exact")
    inside = sa.exists().where(items.c.id.between(exact_ranges.c.first, exact_ranges.c.last))
    return connection.execute(total.where(~inside)).scalar_one()


def _exists(connection: sa.Connection, table: sa.Table) -> bool:
    return bool(sa.inspect(connection).has_table(table.name))


def make_damaged_error(where: str, what: str) -> DamagedIndexError:
    """Return an error that says what does not fit its checksum."""
    return DamagedIndexError(f"index {where}: {what} is damaged: put a backup back")


def _chunks(ids: NDArray[np.int64]) -> list[list[int]]:
    numbers = ids.tolist()
    return [numbers[start : start + _SOME] for start in range(0, len(numbers), _SOME)]
