"""Items of an index: what it is given and gives back, files of originals, and the tables that keep all of it.

The tables are the same in SQLite and PostgreSQL but for how a feature is kept. Every row has a checksum.
"""

import hashlib
import os
import stat
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import sqlalchemy as sa
from numpy.typing import ArrayLike, NDArray

from nearveil.gallery.answers import LARGEST_ORIGINAL, Singles, is_thumbnail
from nearveil.gallery.errors import (
    DamagedIndexError,
    IndexStoreError,
    InexactRowsError,
    NotAnIndexError,
    PrivateIndexError,
)
from nearveil.mechanisms.covers.covers import MOST_FEATURES, MOST_ITEMS

_FLAGS = {name: getattr(os, name, 0) for name in ("O_PATH", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC")}
_FOLDER = os.O_RDONLY | _FLAGS["O_PATH"] | _FLAGS["O_DIRECTORY"] | _FLAGS["O_NOFOLLOW"] | _FLAGS["O_CLOEXEC"]
_FILE = os.O_RDONLY | _FLAGS["O_NOFOLLOW"] | _FLAGS["O_NONBLOCK"] | _FLAGS["O_CLOEXEC"]


def hash_file(path: Path) -> bytes | None:
    """Return the SHA-256 of a file that may be served; None where there is none."""
    data = read_regular(path, LARGEST_ORIGINAL)
    return None if data is None else hashlib.sha256(data).digest()


def read_regular(path: Path, most: int) -> bytes | None:
    """Return the content of a file; None where there is none that may be served.

    No part of the path may be a link: one that was made after indexing could lead to any file. A pipe or a device in
    place of the file is refused without waiting for it.

    `path`: Absolute, without links when the item was added.
    `most`: Bytes; None is returned for a larger file.
    """
    try:
        with os.fdopen(_open_without_links(path), "rb") as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode) or about.st_size > most:
                return None
            data = file.read(most + 1)  # it may have grown
    except (OSError, ValueError, NotImplementedError):  # the last where a system has no such walk
        return None
    return data if len(data) <= most else None


def _open_without_links(path: Path) -> int:
    """Return a file descriptor, after a walk through the folders that follows no link."""
    anchor, *folders, name = path.parts
    place = os.open(anchor, _FOLDER)
    try:
        for folder in folders:
            below = os.open(folder, _FOLDER, dir_fd=place)
            os.close(place)
            place = below
        return os.open(name, _FILE, dir_fd=place)
    finally:
        os.close(place)


Ids = NDArray[np.uint32]

_LONGEST_NAME = 4096
_LARGEST_THUMBNAIL = 1 << 20
_OFF_ONE = 1e-3  # of a norm: what 16-bit rows lose, and more


@dataclass(frozen=True, eq=False)
class Item:
    """What an index keeps of one image.

    Parameters
    ----------
    feature : ndarray of shape (d,), float32
        Of norm one.
    name : str, default=""
        For people; need not be unique.
    thumbnail : bytes, default=b""
        WebP, as answers hold it, or nothing.
    original : bytes, Path or None, default=None
        The file itself, or where it is. A file is served only while it is what it was when the item was added.
    """

    feature: NDArray[np.floating]
    name: str = ""
    thumbnail: bytes = field(default=b"", repr=False)
    original: bytes | Path | None = field(default=None, repr=False)


@dataclass(frozen=True)
class StoredItem:
    """An item as the index gives it back; its feature is asked for by ``features``.

    Parameters
    ----------
    id : int
        Never given to another item, also after this one was deleted.
    name : str
    thumbnail : bytes
    original : bytes, Path or None
    digest : bytes or None, default=None
        The SHA-256 of the file that `original` names, when the item was added.
    """

    id: int
    name: str
    thumbnail: bytes = field(repr=False)
    original: bytes | Path | None = field(repr=False)
    digest: bytes | None = field(default=None, repr=False)

    def read_original(self, most: int = LARGEST_ORIGINAL) -> bytes | None:
        """Return the original, also where it lies in a file.

        Parameters
        ----------
        most : int, default=64 MiB

        Returns
        -------
        bytes or None
            None where there is none, or where its file is larger, is no regular file, was changed since the item was
            added, or lies behind a link.
        """
        if not isinstance(self.original, Path):
            return self.original
        data = read_regular(self.original, most)
        return None if data is None or hashlib.sha256(data).digest() != self.digest else data


@dataclass(frozen=True, eq=False)
class Snapshot:
    """All items at one revision. It stays as it is while the index goes on."""

    revision: int
    ids: Ids = field(repr=False)  # rising
    features: Singles = field(repr=False)

    def __post_init__(self) -> None:
        for name in ("ids", "features"):
            frozen = getattr(self, name).view()
            frozen.setflags(write=False)
            object.__setattr__(self, name, frozen)

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, eq=False)
class Batch:
    """Items that were checked, ready to be written."""

    features: Singles
    names: list[str]
    thumbnails: list[bytes]
    originals: list[bytes | None]  # where there is a path, the digest of its file
    paths: list[str | None]

    def __len__(self) -> int:
        return len(self.features)


def check_items(items: Iterable[Item], dimension: int) -> Batch:
    """Return items in columns, or say what is wrong with the first wrong one."""
    given = list(items)
    for position, item in enumerate(given):
        if not isinstance(item, Item):
            raise ValueError(f"items: number {position} must be an Item")
        _check_feature_shape(item.feature, dimension, position)
        _check_attached(item, position)
    features = np.empty((len(given), dimension), np.float32)
    for position, item in enumerate(given):
        features[position] = item.feature
    _check_rows(features)
    return Batch(
        features=features,
        names=[str.__str__(item.name) for item in given],  # plain text, also of NumPy's: checksums are of values
        thumbnails=[bytes(item.thumbnail) for item in given],
        originals=[_held(item.original) for item in given],
        paths=[str(item.original.resolve()) if isinstance(item.original, Path) else None for item in given],
    )


def _held(original: bytes | Path | None) -> bytes | None:
    """Return what an index holds of an original: its bytes, or the digest of its file."""
    if isinstance(original, Path):
        return hash_file(original.resolve())
    return None if original is None else bytes(original)


def _check_feature_shape(feature: object, dimension: int, position: int) -> None:
    if not isinstance(feature, np.ndarray) or feature.dtype.kind != "f" or feature.ndim != 1:
        raise ValueError(f"items: the feature of number {position} must be one row of floats")
    if len(feature) != dimension:
        raise ValueError(
            f"items: the feature of number {position} has {len(feature)} dimensions; this index holds {dimension}"
        )


def _check_attached(item: Item, position: int) -> None:
    original = item.original
    if not _is_text(item.name) or len(item.name) > _LONGEST_NAME:
        raise ValueError(
            f"items: the name of number {position} must be text that UTF-8 can write, without zero characters, "
            f"of at most {_LONGEST_NAME} characters"
        )
    if not is_thumbnail(item.thumbnail) or len(item.thumbnail) > _LARGEST_THUMBNAIL:
        raise ValueError(
            f"items: the thumbnail of number {position} must be WebP of at most {_LARGEST_THUMBNAIL} bytes, or empty"
        )
    if isinstance(original, bytes) and len(original) > LARGEST_ORIGINAL:
        raise ValueError(f"items: the original of number {position} must be at most {LARGEST_ORIGINAL} bytes")
    if not (
        original is None or isinstance(original, bytes) or (isinstance(original, Path) and _is_text(str(original)))
    ):
        raise ValueError(f"items: the original of number {position} must be bytes, a Path that is text, or None")


def _is_text(value: object) -> bool:
    if not isinstance(value, str) or "\0" in value:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_rows(features: Singles) -> None:
    """Say which row is not finite, or not of norm one."""
    with np.errstate(over="ignore", invalid="ignore"):
        norms = np.sqrt(np.einsum("ij,ij->i", features, features, dtype=np.float64))
    wrong = np.flatnonzero(~(np.abs(norms - 1) <= _OFF_ONE))
    if not len(wrong):
        return
    position = int(wrong[0])
    if not np.isfinite(features[position]).all():
        raise ValueError(f"items: the feature of number {position} must be finite: it holds NaN or infinity")
    raise ValueError(f"items: the feature of number {position} must have norm one: divide it by its norm")


def check_queries(queries: ArrayLike, dimension: int) -> Singles:
    """Return rows to search for, shape (q, d), without showing a value where they are wrong."""
    try:
        rows = np.atleast_2d(np.asarray(queries, dtype=np.float32))
    except (TypeError, ValueError):
        raise ValueError("queries must be an array of real numbers with rows of one length") from None
    if rows.ndim != 2 or rows.shape[1] != dimension or not len(rows):
        raise ValueError(f"queries must be one or more rows of {dimension} dimensions, as the index holds")
    if not np.isfinite(rows).all():
        raise ValueError("queries must be finite: they hold NaN or infinity")
    return np.ascontiguousarray(rows)


def check_ids(ids: ArrayLike) -> NDArray[np.int64]:
    """Return ids as whole numbers, shape (n,), or say that they are none."""
    given = np.asarray(ids)
    if given.size == 0:
        return np.empty(0, np.int64)
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise ValueError("ids must be a list of whole numbers")
    return given.astype(np.int64)


def check_k(k: int, held: int) -> int:
    """Return how many neighbours to find, at most as many as there are."""
    if isinstance(k, bool) or not isinstance(k, (int, np.integer)) or k < 1:
        raise ValueError("k must be a whole number of at least 1")
    if k > held:
        raise ValueError(f"k must be at most {held}, the number of items in the index")
    return int(k)


def check_dimension(dimension: int) -> int:
    """Return a number of dimensions that both stores can hold."""
    if isinstance(dimension, bool) or not isinstance(dimension, (int, np.integer)):
        raise ValueError("dimension must be a whole number")
    if not 1 <= dimension <= MOST_FEATURES:
        raise ValueError(f"dimension must be from 1 to {MOST_FEATURES}")
    return int(dimension)


def check_extractor(extractor: str) -> str:
    """Return a fingerprint that can be kept."""
    if not _is_text(extractor) or len(extractor) > _LONGEST_NAME:
        raise ValueError("extractor must be a fingerprint: short text")
    return extractor


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
