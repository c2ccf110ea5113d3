"""Tables of an index, the same in SQLite and PostgreSQL except for features, and the SQL that reads and writes them.

The header has a checksum. Rows of items, images and deletions, and features in PostgreSQL, have one digest for each
block of ids: the sum of their CRCs, which is updated without reading the other rows of the block.
"""

import hashlib
import itertools
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import IO, Any, Literal

import numpy as np
import sqlalchemy as sa
from numpy.typing import NDArray

from nearveil.gallery.codes import Singles
from nearveil.gallery.errors import CorruptedIndexError, IndexStoreError, NotAnIndexError, PrivateIndexError
from nearveil.gallery.items import Ids, ItemTable, StoredItem, is_text
from nearveil.mechanisms.covers.maps import MOST_ITEMS
from nearveil.metrics import CENTRED, Metric
from nearveil.storage import is_among
from nearveil.wire.frames import MOST_KEYS

FORMAT = 4  # `migrations` upgrades formats 1 to 3
BLOCK = 1024  # ids in a block that has one digest
_PART = 16 << 20  # bytes of a map in one row, far below the limits of the databases
_CHUNK = 500  # ids in a statement that loads images
_MOST_ROWS = 1 << 30  # bytes of features that are loaded into memory before a search needs them

metadata = sa.MetaData()


def _integer(name: str, *, primary_key: bool = False) -> "sa.Column[int]":
    kind = sa.BigInteger().with_variant(sa.Integer, "sqlite")  # there, an INTEGER key is the row id
    return sa.Column(name, kind, primary_key=primary_key, autoincrement=False, nullable=False)


headers = sa.Table(
    "nearveil_index",
    metadata,
    *map(_integer, ("format", "dimension", "revision", "next_id", "count")),
    sa.Column("extractor", sa.Text, nullable=False),
    _integer("crc"),
    sa.Column("metric", sa.Text, nullable=False),
)
# In a directory, a row has the features of consecutive ids, from `id` on, and their CRC; in PostgreSQL, of one id.
FEATURES = "nearveil_feature"
items = sa.Table(
    "nearveil_item",
    metadata,
    _integer("id", primary_key=True),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("external_id", sa.Text, unique=True),
    sa.Column("metadata", sa.Text),  # JSON
)
# Separate from `items`, so that reading many names does not read images. Items without images have no row.
images = sa.Table(
    "nearveil_image",
    metadata,
    _integer("id", primary_key=True),
    sa.Column("thumbnail", sa.LargeBinary, nullable=False),
    sa.Column("original", sa.LargeBinary),  # with a path: the SHA-256 of its file
    sa.Column("path", sa.Text),
)
# The keys of the metadata of all items that were ever added.
metadata_keys = sa.Table("nearveil_metadata_key", metadata, sa.Column("name", sa.Text, primary_key=True))
deleted = sa.Table(
    "nearveil_deleted",
    metadata,
    _integer("id", primary_key=True),
    _integer("revision"),
    sa.Index("nearveil_deleted_revision", "revision"),
)
digests = sa.Table(
    "nearveil_digest",
    metadata,
    sa.Column("kind", sa.Text, primary_key=True),
    _integer("block", primary_key=True),
    _integer("value"),
)
published = sa.Table(
    "nearveil_published",
    metadata,
    _integer("number", primary_key=True),
    _integer("revision"),
    sa.Column("public_id", sa.Text, nullable=False),
    sa.Column("digest", sa.Text),  # SHA-256 of the parts; None never, except while an older format is migrated
)
parts = sa.Table(
    "nearveil_published_part",
    metadata,
    _integer("number", primary_key=True),
    _integer("part", primary_key=True),
    sa.Column("data", sa.LargeBinary, nullable=False),
)
# One row if the rows of the index are private: the account that they are bound to, or an empty name.
bindings = sa.Table("nearveil_bound", metadata, sa.Column("name", sa.Text, primary_key=True), _integer("crc"))
# Ranges of ids, both ends included, that have row-exact rows.
exact_ranges = sa.Table(
    "nearveil_row_exact", metadata, _integer("first", primary_key=True), _integer("last"), _integer("crc")
)


def checksum(*values: int | str | bytes | None) -> int:
    """Return the CRC of values, their types and their lengths."""
    total = 0
    for value in values:
        data = value if isinstance(value, bytes) else str(value).encode()
        total = zlib.crc32(data, zlib.crc32(f"{type(value).__name__}{len(data)}:".encode(), total))
    return total


@dataclass(frozen=True)
class Header:
    """The state of an index: one row, updated in every transaction that changes items."""

    format: int
    dimension: int
    revision: int
    next_id: int
    count: int
    extractor: str
    metric: Metric = CENTRED

    @property
    def is_large(self) -> bool:
        """Whether features are read on demand instead of being kept in memory."""
        return 4 * self.count * self.dimension > _MOST_ROWS

    def to_row(self) -> dict[str, Any]:
        """Return the row of the table."""
        values = asdict(self)
        return {**values, "crc": checksum(*values.values())}


def load_header(connection: sa.Connection, location: str, *, lock: bool = False) -> Header:
    """Load the index header, with a row lock if `lock`."""
    query = sa.select(sa.text("*")).select_from(headers)  # an older format has no metric
    rows = connection.execute(query.with_for_update() if lock else query).all()
    if not rows:
        raise NotAnIndexError(f"No index at {location}. Create one with Index.create().")
    values = dict(rows[0]._mapping)
    stored_checksum, stored_format = values.pop("crc", None), values.get("format", 0)
    if len(rows) > 1 or checksum(*values.values()) != stored_checksum:
        raise CorruptedIndexError(location, "the header")
    if stored_format > FORMAT:
        raise IndexStoreError(f"index {location} has format {stored_format}, above {FORMAT}: install a newer nearveil")
    try:
        return Header(**values)
    except TypeError:  # the name of a column is corrupted
        raise CorruptedIndexError(location, "the header") from None


def save_header(connection: sa.Connection, header: Header) -> None:
    """Update the header, under its lock."""
    connection.execute(sa.update(headers).values(header.to_row()))


def allocate_ids(header: Header, count: int) -> NDArray[np.int64]:
    """Allocate unused ids."""
    if header.next_id + count > MOST_ITEMS:
        raise IndexStoreError("all 32-bit ids are used up; nothing was changed: create a new index")
    return np.arange(header.next_id, header.next_id + count, dtype=np.int64)


def insert_rows(connection: sa.Connection, table: sa.Table, rows: Sequence[tuple[Any, ...]]) -> None:
    """Insert many rows, in the order of the columns."""
    if not rows:
        return
    names = ", ".join(table.c.keys())
    if connection.dialect.name == "postgresql":
        kinds = {sa.Text: "text", sa.LargeBinary: "bytea"}
        copy_rows(connection, f"{table.name} ({names})", [kinds.get(type(c.type), "int8") for c in table.c], rows)
    else:
        marks = ", ".join("?" * len(table.c))
        connection.exec_driver_sql(f"INSERT INTO {table.name} ({names}) VALUES ({marks})", list(rows))  # noqa: S608


def copy_rows(connection: sa.Connection, target: str, types: Sequence[str], rows: Iterable[tuple[Any, ...]]) -> None:
    """Insert rows into PostgreSQL by COPY."""
    cursor = connection.connection.driver_connection.cursor()  # type: ignore[union-attr]
    with cursor, cursor.copy(f"COPY {target} FROM STDIN (FORMAT BINARY)") as copy:
        copy.set_types(types)
        for row in rows:
            copy.write_row(row)


DigestKind = Literal["feature", "item", "image", "deleted"]
HASHED: dict[DigestKind, sa.Table] = {"item": items, "image": images, "deleted": deleted}  # in both stores


def add_to_digests(connection: sa.Connection, kind: DigestKind, crcs: dict[int, int], *, sign: int = 1) -> None:
    """Add the CRCs of rows, by id, to the digests of their blocks; with `sign` -1, subtract them."""
    totals: Counter[int] = Counter()
    for number, crc in crcs.items():
        totals[number // BLOCK] += sign * crc
    for block, total in totals.items():
        row = (digests.c.kind == kind) & (digests.c.block == block)
        change = sa.update(digests).where(row).values(value=digests.c.value + total)
        if not connection.execute(change).rowcount:
            connection.execute(sa.insert(digests).values(kind=kind, block=block, value=total))


def check_digest(connection: sa.Connection, kind: DigestKind, block: int, crcs: dict[int, int], location: str) -> None:
    """Raise unless all rows of a block, as CRCs by id, match its digest."""
    query = sa.select(digests.c.value).where(digests.c.kind == kind, digests.c.block == block)
    if sum(crcs.values()) != (connection.execute(query).scalar() or 0):
        raise CorruptedIndexError(location, f"a block of rows ({kind})")


def hash_rows(rows: Iterable[Sequence[Any]]) -> dict[int, int]:
    """Return the CRC of each row by its first column, the id."""
    return {row[0]: checksum(*row) for row in rows}


def hash_features(ids: NDArray[np.integer], features: Singles) -> dict[int, int]:
    """Return the CRC of each feature by its id."""
    numbers = ids.tolist()
    rows = np.ascontiguousarray(features, "<f4")
    return dict(zip(numbers, map(zlib.crc32, rows, numbers), strict=True))


def hash_blocks(connection: sa.Connection, kind: DigestKind, next_id: int) -> Iterator[tuple[int, dict[int, int]]]:
    """Yield the blocks of a table, with the CRCs of their rows by id."""
    table = HASHED[kind]
    for block in range(-(-next_id // BLOCK)):
        inside = table.c.id.between(block * BLOCK, (block + 1) * BLOCK - 1)
        yield block, hash_rows(connection.execute(sa.select(table).where(inside)).all())


def insert_hashed(connection: sa.Connection, kind: DigestKind, rows: Sequence[tuple[Any, ...]]) -> None:
    """Insert rows into a table with digests."""
    insert_rows(connection, HASHED[kind], rows)
    add_to_digests(connection, kind, hash_rows(rows))


def insert_items(connection: sa.Connection, ids: NDArray[np.int64], table: ItemTable) -> None:
    """Insert names, external ids, metadata and images of items."""
    numbers = ids.tolist()
    insert_hashed(connection, "item", list(table.rows(numbers)))
    insert_hashed(connection, "image", [(numbers[position], *stored) for position, stored in table.images.items()])
    add_metadata_keys(connection, table.keys)


def add_metadata_keys(connection: sa.Connection, keys: frozenset[str]) -> None:
    """Add keys, up to the first that make the list too long to publish."""
    if not keys:
        return
    stored = set(connection.execute(sa.select(metadata_keys.c.name)).scalars())
    if len(stored) <= MOST_KEYS:
        new = sorted(keys - stored)[: MOST_KEYS + 1]
        insert_rows(connection, metadata_keys, [(key.replace("\0", "\n"),) for key in new])  # neither is published


def load_items(connection: sa.Connection, ids: NDArray[np.int64], *, originals: bool = True) -> dict[int, StoredItem]:
    """Load the items that exist, by id; without `originals`, the content of originals is not read."""
    original = images.c.original if originals else sa.null().label("original")
    query = sa.select(items, images.c.thumbnail, images.c.path, original).outerjoin(images, images.c.id == items.c.id)
    rows = connection.execute(query.where(is_among(connection, items.c.id, ids.tolist())))
    return {row.id: StoredItem.from_row(*row) for row in rows}


def find_external_ids(connection: sa.Connection, external_ids: Collection[str | None]) -> dict[str | None, int]:
    """Return the ids of the external ids that exist."""
    texts = [text for text in external_ids if is_text(text)]
    if not texts:
        return {}
    query = sa.select(items.c.external_id, items.c.id).where(is_among(connection, items.c.external_id, texts))
    return {row.external_id: row.id for row in connection.execute(query)}


def delete_items(connection: sa.Connection, ids: NDArray[np.int64], revision: int) -> None:
    """Delete everything except the features of items, and record their ids with the revision."""
    numbers = ids.tolist()
    kinds: tuple[DigestKind, ...] = ("item", "image")
    for start, kind in itertools.product(range(0, len(numbers), _CHUNK), kinds):
        table = HASHED[kind]
        chosen = is_among(connection, table.c.id, numbers[start : start + _CHUNK])
        rows = connection.execute(sa.delete(table).where(chosen).returning(*table.c)).all()
        add_to_digests(connection, kind, hash_rows(rows), sign=-1)
    insert_hashed(connection, "deleted", [(number, revision) for number in numbers])


def load_ids(connection: sa.Connection, header: Header, location: str) -> Ids:
    """Return the ids of all items, increasing."""
    gone = find_deleted_since(connection, -1)
    if header.next_id - len(gone) != header.count or (gone >= header.next_id).any():
        raise CorruptedIndexError(location, "the list of items")
    return np.delete(np.arange(header.next_id, dtype=np.uint32), gone)


def find_deleted_since(connection: sa.Connection, revision: int) -> NDArray[np.int64]:
    """Return the ids that were deleted after a revision, increasing."""
    query = sa.select(deleted.c.id).where(deleted.c.revision > revision).order_by(deleted.c.id)
    return np.array(connection.execute(query).scalars().all(), np.int64)


def verify_rows(connection: sa.Connection, header: Header, location: str) -> None:
    """Compare items, images and deletions with their digests, and their numbers with the header."""
    counts = dict.fromkeys(HASHED, 0)
    for kind in HASHED:
        for block, crcs in hash_blocks(connection, kind, header.next_id):
            check_digest(connection, kind, block, crcs, location)
            counts[kind] += len(crcs)
    if (counts["item"], counts["deleted"]) != (header.count, header.next_id - header.count):
        raise CorruptedIndexError(location, "the list of items")


def load_binding(connection: sa.Connection, location: str) -> str | None:
    """Return the name that private rows are bound to, "" if there is none; None if the rows are not private."""
    rows = connection.execute(sa.select(bindings)).all()
    if len(rows) > 1 or any(checksum(row.name) != row.crc for row in rows):
        raise CorruptedIndexError(location, "the binding")
    return str(rows[0].name) if rows else None


def save_binding(connection: sa.Connection, name: str | None) -> None:
    """Mark rows as private and bound to `name`, or, with None, as public; under the header's lock."""
    connection.execute(sa.delete(bindings))
    if name is not None:
        connection.execute(sa.insert(bindings).values(name=name, crc=checksum(name)))


def check_public(connection: sa.Connection, location: str) -> None:
    """Raise if the rows are private."""
    if load_binding(connection, location) is not None:
        raise PrivateIndexError(f"index {location} has private rows: only a protected gallery can serve them")


def read_map(connection: sa.Connection, number: int, write: Callable[[bytes], object] = lambda _: None) -> str:
    """Pass the data of a stored map to `write`, one row at a time; return its SHA-256."""
    digest = hashlib.sha256()
    query = sa.select(parts.c.part).where(parts.c.number == number).order_by(parts.c.part)
    for part in connection.execute(query).scalars().all():
        row = sa.select(parts.c.data).where(parts.c.number == number, parts.c.part == part)
        data = connection.execute(row).scalar_one()
        if isinstance(data, bytes):  # otherwise corrupted: SQLite stores any type
            digest.update(data)
            write(data)
    return digest.hexdigest()


def write_map(connection: sa.Connection, number: int, file: IO[bytes]) -> str:
    """Store a map from a file; return its SHA-256."""
    file.seek(0)
    digest = hashlib.sha256()
    for part, data in enumerate(iter(partial(file.read, _PART), b"")):
        digest.update(data)
        connection.execute(sa.insert(parts).values(number=number, part=part, data=data))
    return digest.hexdigest()


def mark_exact(connection: sa.Connection, ids: NDArray[np.int64]) -> None:
    """Record that the rows of new, consecutive ids are row-exact."""
    first, last = int(ids[0]), int(ids[-1])
    before = connection.execute(sa.select(exact_ranges.c.first).where(exact_ranges.c.last == first - 1)).scalar()
    if before is not None:
        first = before
        connection.execute(sa.delete(exact_ranges).where(exact_ranges.c.first == first))
    connection.execute(sa.insert(exact_ranges).values(first=first, last=last, crc=checksum(first, last)))


def count_inexact(connection: sa.Connection, location: str) -> int:
    """Return the number of rows that are not row-exact."""
    ranges = connection.execute(sa.select(exact_ranges)).all()
    if any(checksum(row.first, row.last) != row.crc for row in ranges):
        raise CorruptedIndexError(location, "the list of row-exact rows")
    inside = sa.exists().where(deleted.c.id.between(exact_ranges.c.first, exact_ranges.c.last))
    gone = connection.execute(sa.select(sa.func.count()).select_from(deleted).where(inside)).scalar_one()
    exact = sum(int(row.last - row.first + 1) for row in ranges) - int(gone)
    return load_header(connection, location).count - exact
