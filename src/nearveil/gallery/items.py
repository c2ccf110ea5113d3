"""Items of an index: what it is given and gives back, files of originals, and the tables that keep all of it.

The tables are the same in SQLite and PostgreSQL but for how features are kept. Every row has a checksum.
"""

import datetime
import hashlib
import json
import os
import stat
import threading
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import compress
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import sqlalchemy as sa
from numpy.typing import ArrayLike, NDArray

from nearveil.cluster import Cluster, SpreadRows, StoredPart, cut_rows
from nearveil.features.vectors import TablePart, VectorFile, as_list
from nearveil.gallery.answers import (
    LARGEST_METADATA,
    LARGEST_ORIGINAL,
    LONGEST_ID,
    ItemDetails,
    Singles,
    encode_details,
    encode_name,
    encode_names,
    is_thumbnail,
)
from nearveil.gallery.errors import (
    DamagedIndexError,
    IndexStoreError,
    InexactRowsError,
    NotAnIndexError,
    PrivateIndexError,
)
from nearveil.mechanisms.covers.maps import MOST_ITEMS
from nearveil.privacy.checks import as_rows, is_integer, normalize_rows
from nearveil.wire.frames import LONGEST_KEY, MOST_FEATURES, MOST_KEYS

_FLAGS = {name: getattr(os, name, 0) for name in ("O_PATH", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC")}
_FOLDER = os.O_RDONLY | _FLAGS["O_PATH"] | _FLAGS["O_DIRECTORY"] | _FLAGS["O_NOFOLLOW"] | _FLAGS["O_CLOEXEC"]
_FILE = os.O_RDONLY | _FLAGS["O_NOFOLLOW"] | _FLAGS["O_NONBLOCK"] | _FLAGS["O_CLOEXEC"]


def hash_file(path: Path) -> bytes | None:
    """Return the SHA-256 of a file that may be served; None where there is none."""
    data = read_regular(path, LARGEST_ORIGINAL)
    return None if data is None else hashlib.sha256(data).digest()


def read_regular(path: Path, most: int) -> bytes | None:
    """Return the content of a regular file of at most `most` bytes; None where there is none.

    No part of the path may be a link: one that was made after indexing could lead to any file. A pipe or a device is
    refused without waiting for it.
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
Tick = Callable[[int], object]
Progress = Callable[[str, int | None], Tick]
"""``progress(text, total)`` returns a function that is called with the number of items done."""

_LONGEST_NAME = 4096
_LARGEST_THUMBNAIL = 1 << 20
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Item:
    """What an index keeps of one image, or of any other record that has a vector.

    Parameters
    ----------
    feature : array-like of shape (d,) or (1, d)
        Divided by its norm where that is not one.
    name : str, default=""
        For people; need not be unique.
    thumbnail : bytes, default=b""
        WebP, as answers hold it, or nothing.
    original : bytes, Path or None, default=None
        The file itself, or where it is. A file is served only while it is what it was when the item was added.
    external_id : str or None, default=None
        Your own id of it; no two items of an index have the same. It replaces and deletes items by name.
    metadata : mapping or None, default=None
        What JSON can hold, with text as keys. It comes back with every match where the gallery offers it.
    """

    feature: ArrayLike
    name: str = ""
    thumbnail: bytes = field(default=b"", repr=False)
    original: bytes | Path | None = field(default=None, repr=False)
    external_id: str | None = None
    metadata: Mapping[str, Any] | None = field(default=None, repr=False)


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
    external_id : str or None, default=None
    metadata : mapping
        Empty where the item has none.
    """

    id: int
    name: str
    thumbnail: bytes = field(repr=False)
    original: bytes | Path | None = field(repr=False)
    digest: bytes | None = field(default=None, repr=False)
    external_id: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict, repr=False)

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


@dataclass(frozen=True)
class RowPlace(StoredPart):
    """Features of some items, read by whoever needs them. Those of items that were deleted since are zeros."""

    read: Callable[[str, Ids, int], Singles]  # from a place, of rising ids
    place: str = field(repr=False)  # may hold a password
    ids: Ids | range = field(repr=False)
    dimension: int

    def load(self) -> Singles:
        """Read them."""
        return self.read(self.place, np.asarray(self.ids, np.uint32), self.dimension)

    def select(self, ids: Ids) -> "RowPlace":
        """Return the place of some of them; a range where none between them is missing: it travels with each stage."""
        first, last = int(ids[0]), int(ids[-1])
        return replace(self, ids=range(first, last + 1) if last - first + 1 == len(ids) else ids)


@dataclass(frozen=True, eq=False)
class Snapshot:
    """All items at one revision. It stays as it is while the index goes on.

    Rows of a large gallery are read when they are needed; those of items that are deleted meanwhile become zeros.
    """

    revision: int
    ids: Ids = field(repr=False)  # rising
    rows: "Singles | RowPlace" = field(repr=False)

    def __post_init__(self) -> None:
        for name in ("ids", "rows") if self.in_memory else ("ids",):
            frozen = getattr(self, name).view()
            frozen.setflags(write=False)
            object.__setattr__(self, name, frozen)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def in_memory(self) -> bool:
        """Whether this process holds the rows."""
        return isinstance(self.rows, np.ndarray)

    @property
    def features(self) -> Singles:
        """All rows, in memory."""
        return self.rows if isinstance(self.rows, np.ndarray) else self.rows.load()

    def spread(self, workers: Cluster) -> SpreadRows:
        """Return the rows in partitions."""
        if isinstance(self.rows, np.ndarray):
            return SpreadRows.cut(self.rows, workers)
        cuts, held = cut_rows(len(self)), self.rows
        parts = workers.place([held.select(self.ids[some]) for some in cuts])
        return SpreadRows(workers, parts, cuts, (len(self), held.dimension), np.dtype(np.float32))


class Attached(NamedTuple):
    """The images of an item."""

    thumbnail: bytes = b""
    original: bytes | None = None  # where there is a path, the digest of its file
    path: str | None = None


@dataclass(frozen=True)
class Details:
    """Columns of consecutive items, None where one holds nothing; `attached` are positions of items with images."""

    count: int
    names: list[str] | None = None
    external_ids: list[str | None] | None = None
    metadata: list[str] | None = None  # JSON, or nothing
    attached: tuple[int, ...] = ()

    def cut(self, start: int, stop: int) -> "Details":
        """Return those of some positions."""
        stop = min(stop, self.count)
        return Details(
            stop - start,
            _cut_column(self.names, start, stop),
            _cut_column(self.external_ids, start, stop),
            _cut_column(self.metadata, start, stop),
            tuple(place - start for place in self.attached if start <= place < stop),
        )

    def as_item(self, position: int, number: int) -> StoredItem:
        """Return one as an item with a number, without its images."""
        return StoredItem(
            number,
            "" if self.names is None else self.names[position],
            b"",
            None,
            None,
            None if self.external_ids is None else self.external_ids[position],
            {} if self.metadata is None or not self.metadata[position] else json.loads(self.metadata[position]),
        )


def _select(column: list[T] | None, positions: Sequence[int]) -> list[T] | None:
    return None if column is None else [column[place] for place in positions]


def _cut_column(column: list[T] | None, start: int, stop: int) -> list[T] | None:
    some = None if column is None else column[start:stop]
    return some if some and any(some) else None


@dataclass(frozen=True, eq=False)
class Batch:
    """Items that were checked, ready to be written; `attached` is by position, for those that have images."""

    features: Singles
    details: Details
    attached: dict[int, Attached] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.features)

    def select(self, positions: Sequence[int]) -> "Batch":
        """Return the items of some positions, in that order; none of them has images."""
        columns = self.details
        return Batch(
            self.features[list(positions)],
            Details(
                len(positions),
                _select(columns.names, positions),
                _select(columns.external_ids, positions),
                _select(columns.metadata, positions),
            ),
        )


def check_items(items: Iterable[Item], dimension: int) -> Batch:
    """Return items in columns, or say what is wrong with the first wrong one."""
    given = list(items)
    for position, item in enumerate(given):
        if not isinstance(item, Item):
            raise ValueError(f"items: number {position} must be an Item")
        _check_attached(item, position)
    features = np.empty((len(given), dimension), np.float32)
    for position, item in enumerate(given):
        features[position] = _read_feature(item.feature, dimension, position)
    attached = {
        position: _take_images(item)
        for position, item in enumerate(given)
        if item.thumbnail or item.original is not None
    }
    return Batch(
        normalize_rows(features, "items: the feature"),
        Details(
            len(given),
            _check_texts([item.name for item in given], "items: the name", _LONGEST_NAME),
            _check_external_ids([item.external_id for item in given], "items: the external_id"),
            _encode_metadata([item.metadata for item in given], "items: the metadata"),
            tuple(attached),
        ),
        attached,
    )


def check_table(rows: Any, ids: Any, names: Any, metadata: Any, dimension: int) -> Batch:
    """Return rows with their columns, or say what is wrong with the first wrong one."""
    features = normalize_rows(as_rows(rows), "rows:")
    if features.shape[1] != dimension:
        raise ValueError(f"rows have {features.shape[1]} dimensions; this index holds {dimension}")
    columns = {
        name: None if values is None else as_list(values, name, len(features))
        for name, values in (("ids", ids), ("names", names), ("metadata", metadata))
    }
    return Batch(
        features,
        Details(
            len(features),
            None if columns["names"] is None else _check_texts(columns["names"], "names:", _LONGEST_NAME),
            None if columns["ids"] is None else _check_external_ids(columns["ids"], "ids:"),
            None if columns["metadata"] is None else _encode_metadata(columns["metadata"], "metadata:"),
        ),
    )


def check_part(part: TablePart, file: VectorFile, dimension: int | None) -> Batch:
    """Read a partition of a file, and check it as a table; without ids, rows are called by file and number."""
    table = file.read(part)
    ids = table.ids if file.ids is not None else [f"{file.path.name}:{row}" for row in range(part.start, part.stop)]
    return check_table(table.rows, ids, table.names, table.metadata, dimension or table.rows.shape[1])


def name_parts(file: VectorFile, parts: Sequence[TablePart]) -> list[str] | None:
    """Return what errors call the partitions of a file; None where it is read as a whole."""
    return [file.describe(part) for part in parts] if len(parts) > 1 else None


def _take_images(item: Item) -> Attached:
    """Return what an index holds of an item's images: of a file, its path and its digest."""
    small, original = bytes(item.thumbnail), item.original
    if isinstance(original, Path):
        path = original.resolve()
        return Attached(small, hash_file(path), str(path))
    return Attached(small, None if original is None else bytes(original))


def _read_feature(feature: Any, dimension: int, position: int) -> Singles:
    rows = as_rows(feature, f"items: the feature of number {position}")
    if len(rows) != 1:
        raise ValueError(f"items: the feature of number {position} must be one row")
    if rows.shape[1] != dimension:
        raise ValueError(
            f"items: the feature of number {position} has {rows.shape[1]} dimensions; this index holds {dimension}"
        )
    row: Singles = rows[0]
    return row


def _check_attached(item: Item, position: int) -> None:
    original = item.original
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


def _check_texts(values: Sequence[Any], what: str, longest: int) -> list[str]:
    """Return texts as plain `str`, or raise an error that calls the first wrong one `what`, with its number."""
    if set(map(type, values)) <= {str} and _is_text("".join(values)) and max(map(len, values), default=0) <= longest:
        return list(values)
    for position, value in enumerate(values):
        if not _is_text(value) or len(value) > longest:
            of = "number" if what.endswith(":") else "of number"
            raise ValueError(
                f"{what} {of} {position} must be text that UTF-8 can write, without zero characters, of at most "
                f"{longest} characters"
            )
    return [str.__str__(value) for value in values]


def _check_external_ids(values: Sequence[Any], what: str) -> list[str | None] | None:
    """Return ids as plain text, whole numbers among them too; None stands for no id."""
    kinds = set(map(type, values))
    if kinds <= {type(None)}:
        return None
    if kinds != {str}:
        given = ["" if value is None else str(value) if is_whole(value) else value for value in values]
    else:
        given = list(values)
    texts = _check_texts(given, what, LONGEST_ID)
    if "" not in texts and len(set(texts)) == len(texts):
        return list(texts)
    first: dict[str, int] = {}
    for place, text in enumerate(texts):
        if values[place] is None:
            continue
        if first.setdefault(text, place) != place or not text:
            why = f"is the same as number {first[text]}: give every id once" if text else "is empty"
            raise ValueError(f"{what} {'' if what.endswith(':') else 'of '}number {place} {why}")
    return [None if value is None else text for value, text in zip(values, texts, strict=True)]


def is_whole(value: object) -> bool:
    """Return whether a value is a whole number, of Python or NumPy."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, (bool, np.bool_))


def _encode_metadata(values: Sequence[Any], what: str) -> list[str] | None:
    """Return metadata as JSON, in plain values; None where no item has any."""
    if set(map(type, values)) <= {type(None)}:
        return None
    texts = []
    encode = json.JSONEncoder(default=_as_plain, allow_nan=False, ensure_ascii=False).encode
    for position, value in enumerate(values):
        if value is None:
            texts.append("")
            continue
        of = f"{what} {'' if what.endswith(':') else 'of '}number {position}"
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            raise ValueError(f"{of} must be a mapping with text as keys")
        try:
            text = encode(dict(value))
            size = len(text.encode())
        except (TypeError, ValueError, RecursionError):
            raise ValueError(
                f"{of} must hold what JSON can: text, finite numbers, lists and mappings of them"
            ) from None
        if size > LARGEST_METADATA:
            raise ValueError(f"{of} must be at most {LARGEST_METADATA} bytes as JSON")
        texts.append(text if value else "")
    return texts if any(texts) else None


def _as_plain(value: Any) -> Any:
    """Return a value of NumPy, pandas, or of time, as JSON can hold it."""
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, Mapping):
        return dict(value)
    if callable(getattr(value, "tolist", None)):  # NumPy's numbers and arrays, tensors, series
        return value.tolist()
    raise TypeError


def _is_text(value: object) -> bool:
    if not isinstance(value, str) or "\0" in value:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


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


def check_ids(ids: ArrayLike) -> NDArray[np.int64] | list[str]:
    """Return ids as whole numbers, shape (n,), or external ids as text; or say that they are neither."""
    given = np.asarray(ids)
    if given.size == 0:
        return np.empty(0, np.int64)
    if given.ndim == 1 and given.dtype.kind in "UTO" and all(isinstance(one, str) for one in given.tolist()):
        return [str.__str__(one) for one in given.tolist()]
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise ValueError("ids must be a list of whole numbers, or of external ids")
    return given.astype(np.int64)


def check_k(k: int, held: int) -> int:
    """Return how many neighbours to find, at most as many as there are."""
    if not is_integer(k, 1):
        raise ValueError("k must be a whole number of at least 1")
    if k > held:
        raise ValueError(f"k must be at most {held}, the number of items in the index")
    return int(k)


def check_dimension(dimension: int) -> int:
    """Return a number of dimensions that both stores can hold."""
    if not is_integer(dimension):
        raise ValueError("dimension must be a whole number")
    if not 1 <= dimension <= MOST_FEATURES:
        raise ValueError(f"dimension must be from 1 to {MOST_FEATURES}")
    return int(dimension)


def check_extractor(extractor: str) -> str:
    """Return a fingerprint that can be kept."""
    if not _is_text(extractor) or len(extractor) > _LONGEST_NAME:
        raise ValueError("extractor must be a fingerprint: short text")
    return extractor


FORMAT = 2  # 1 had a row for each feature, and names in the table of items
_SOME = 500  # ids in one statement
_DETAILS_BLOCK = 4096  # items in a row of details, at most; no row crosses a multiple of it
_BLOCK_BYTES = 1 << 20  # of features in one row, at most
_MOST_TEXT = 256 << 20  # bytes of names, or of details, that stay in memory
_MOST_ROWS = 1 << 30  # bytes of features that stay in memory while nobody searches them

_NONE = np.empty(0, np.int64)

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
# Apart from the rest: who reads all features does not read all originals. In a directory a row holds the features of
# consecutive ids, from `id` on.
FEATURES = "nearveil_feature"
FEATURE_TABLE = "CREATE TABLE nearveil_feature (id {id} PRIMARY KEY, crc BIGINT NOT NULL, feature {feature} NOT NULL)"
# The names of items with consecutive ids, in one row: a table of 100,000 is written at once.
details = sa.Table(
    "nearveil_details",
    metadata,
    _number("first", primary_key=True),
    _number("last"),
    sa.Column("external_ids", sa.Text),  # a list in JSON; apart from the rest: all of them are looked through
    sa.Column("columns", sa.Text, nullable=False),  # in JSON
    _number("crc"),
)
# The images of those items that have some. In format 1 every item had a row here, with its name.
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


def feature_crcs(ids: Sequence[int], features: Iterable[Any]) -> list[int]:
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


def features_per_row(dimension: int) -> int:
    """Return how many features a row of a directory holds at most; no row crosses a multiple of it."""
    return max(1, _BLOCK_BYTES // (4 * dimension))


def encode_features(ids: NDArray[np.int64], features: Singles, block: int) -> Iterator[tuple[int, int, memoryview]]:
    """Yield rows of the first id, checksum and features as bytes; ids follow each other."""
    rows, first = np.ascontiguousarray(features, "<f4"), int(ids[0])
    for start, stop in _cut_blocks(first, first + len(rows), block):
        data = rows[start - first : stop - first].data.cast("B")
        yield start, zlib.crc32(data, start), data


def decode_features(rows: Sequence[tuple[int, int, bytes]], dimension: int, where: str) -> tuple[Ids, Singles]:
    """Return ids and features of rows, checked."""
    if not rows:
        return np.empty(0, np.uint32), np.empty((0, dimension), np.float32)
    ids, crcs, features = zip(*rows, strict=True)
    width = 4 * dimension
    try:
        fits = feature_crcs(ids, features) == list(crcs) and all(one and len(one) % width == 0 for one in features)
    except (TypeError, OverflowError):  # a number or bytes that are none
        fits = False
    counts = [len(one) // width for one in features] if fits else []
    if not fits or not 0 <= min(ids) <= max(map(sum, zip(ids, counts, strict=True))) <= MOST_ITEMS:
        raise make_damaged_error(where, "a feature")
    numbers = np.concatenate([np.arange(first, first + count) for first, count in zip(ids, counts, strict=True)])
    joined = np.frombuffer(b"".join(features), "<f4").reshape(-1, dimension)
    return numbers.astype(np.uint32), joined.astype(np.float32, copy=False)


def encode_images(ids: NDArray[np.int64], batch: Batch) -> list[tuple[Any, ...]]:
    """Return rows of the items' table."""
    rows = []
    for position, (small, original, path) in batch.attached.items():
        number, told = int(ids[position]), checksum(original)
        rows.append((number, checksum(number, "", small, path, told), "", small, original, path, told))
    return rows


def save_details(connection: sa.Connection, first: int, all_details: Details) -> None:
    """Write the details of items whose ids follow each other."""
    rows = []
    for start, stop in _cut_blocks(first, first + all_details.count, _DETAILS_BLOCK):
        some = all_details.cut(start - first, stop - first)
        own = None if some.external_ids is None else _to_json(some.external_ids)
        columns = {"names": some.names, "metadata": some.metadata, "images": list(some.attached) or None}
        text = _to_json({name: column for name, column in columns.items() if column is not None})
        values: tuple[Any, ...] = (start, stop - 1, own, text)
        rows.append(dict(zip(details.c.keys(), (*values, checksum(*values)), strict=True)))
    if rows:
        connection.execute(sa.insert(details), rows)


def load_details(
    connection: sa.Connection, ids: NDArray[np.int64], where: str
) -> Iterator[tuple[int, Details, NDArray[np.int64]]]:
    """Yield rows of details that hold some of the ids, which rise: their first id, the details, and those ids."""
    if not _exists(connection, details):  # an index of format 1
        return
    blocks = ids // _DETAILS_BLOCK
    for block in np.unique(blocks).tolist():
        some = ids[blocks == block]
        inside = details.c.first.between(block * _DETAILS_BLOCK, int(some[-1])) & (details.c.last >= int(some[0]))
        for row in connection.execute(sa.select(details).where(inside).order_by(details.c.first)).all():
            held = some[(some >= row.first) & (some <= row.last)]
            if len(held):
                yield int(row.first), _read_details(row, where), held


class TextColumn:
    """Names or details of all items of an index, in memory; nothing is kept above 256 MiB.

    An answer holds items from all over an index: read from the database, every answer would read all rows of details.
    """

    def __init__(self, kind: Literal["names", "metadata"]) -> None:
        self._kind = kind
        self._lock = threading.Lock()
        self._is_too_large = False
        self._kept = _KeptTexts()

    def find(self, connection: sa.Connection, ids: NDArray[np.int64], where: str) -> list[bytes | None]:
        """Return texts as answers hold them, in the order of the ids; None for what is not in the table of details."""
        kept = self._keep_up(connection, where)
        if kept is None:
            return [None] * len(ids)
        places = kept.find_places(ids)
        bounds = kept.bounds[places].tolist() if len(kept.bounds) else [(0, 0)] * len(ids)
        if self._kind == "names":
            texts: list[bytes | None] = [kept.data[start:stop] for start, stop in bounds]
        else:
            texts = [_encode_packed(kept.data[start:stop]) if stop > start else None for start, stop in bounds]
        for missing in np.flatnonzero(places < 0).tolist():
            texts[missing] = None
        return texts

    def find_keys(self, connection: sa.Connection, where: str) -> tuple[str, ...] | None:
        """Return the keys of all metadata, sorted; None where that is not known, or they are too many to be told."""
        kept = self._keep_up(connection, where)
        return None if kept is None or kept.keys is None else tuple(sorted(kept.keys))

    def _keep_up(self, connection: sa.Connection, where: str) -> "_KeptTexts | None":
        """Return the texts of now; None where they are too many."""
        head = load_head(connection, where)
        with self._lock:
            if self._is_too_large:
                return None
            if self._kept.revision != head.revision:
                # After a backup was put back, and where texts of deleted items fill the room, all is read anew.
                old = self._kept if self._kept.revision < head.revision else _KeptTexts()
                caught_up = self._catch_up(connection, head, where, old)
                if caught_up is None and len(old.data):
                    caught_up = self._catch_up(connection, head, where, _KeptTexts())
                self._is_too_large = caught_up is None
                self._kept = caught_up or _KeptTexts()
            return None if self._is_too_large else self._kept

    def _catch_up(self, connection: sa.Connection, head: Head, where: str, old: "_KeptTexts") -> "_KeptTexts | None":
        """Return the texts of now: with what was added, without what was deleted; None where they are too many."""
        pack = _pack_names if self._kind == "names" else _pack_details
        gone = find_deleted_since(connection, old.revision, where)
        left = ~np.isin(old.ids, gone)
        ids, bounds, data = [old.ids[left]], [old.bounds[left]], [old.data]
        held, keys = len(old.data), old.keys
        for first, some in _stream_details(connection, old.next_id, where):
            numbers = np.arange(first, first + some.count)
            there = ~np.isin(numbers, gone)
            keys = keys if self._kind == "names" else _collect_keys(some, keys)
            texts = list(compress(pack(some), there.tolist()))
            ids.append(numbers[there])
            stops = held + np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)))
            bounds.append(np.column_stack([np.concatenate([[held], stops])[:-1], stops]))
            data.append(b"".join(texts))
            held += len(data[-1])
            if held > _MOST_TEXT:
                return None
        places = np.concatenate(ids), np.concatenate(bounds)
        return _KeptTexts(head.revision, head.next_id, *places, b"".join(data), keys)


@dataclass(frozen=True, eq=False)
class _KeptTexts:
    """Texts at one revision, one after the other."""

    revision: int = -1
    next_id: int = 0
    ids: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))  # rising
    bounds: NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 2), np.int64))  # where each begins and ends
    data: bytes = b""
    keys: frozenset[str] | None = frozenset()  # of metadata, also of items that were deleted since

    def find_places(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where items are; -1 for those that are not here."""
        if not len(self.ids):
            return np.full(len(ids), -1, np.int64)
        first, last = int(self.ids[0]), int(self.ids[-1])
        if last - first + 1 == len(self.ids):  # none between them is missing: a search would cost more than the rest
            return np.where((ids >= first) & (ids <= last), ids - first, -1)
        places = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        return np.where(self.ids[places] == ids, places, -1)


def encode_text(item: StoredItem, kind: Literal["names", "metadata"]) -> bytes:
    """Return the name of an item, or its details, as answers hold them."""
    if kind == "names":
        return encode_name(item.name)
    return encode_details(ItemDetails(item.name, item.external_id, item.metadata))


def _pack_names(some: Details) -> list[bytes]:
    return [b""] * some.count if some.names is None else encode_names(some.names)


def _pack_details(some: Details) -> list[bytes]:
    """Return names, external ids and metadata, with a zero between them, which none of them holds."""
    empty = [""] * some.count
    columns = (some.names or empty, some.external_ids or empty, some.metadata or empty)
    return ["\0".join((name, own or "", told)).encode() for name, own, told in zip(*columns, strict=True)]


def _collect_keys(some: Details, known: frozenset[str] | None) -> frozenset[str] | None:
    """Return the keys of metadata with those that are known; None where a list of galleries cannot tell them."""
    if known is None or some.metadata is None:
        return known
    found = known.union(*(json.loads(told) for told in some.metadata if told))
    fits = len(found) <= MOST_KEYS and all(len(key) <= LONGEST_KEY and key.isprintable() for key in found)
    return found if fits else None


def _encode_packed(packed: bytes) -> bytes:
    """Return details as an answer holds them."""
    name, own, told = packed.decode().split("\0")
    return encode_details(ItemDetails(name, own or None, json.loads(told) if told else {}))


def _stream_details(connection: sa.Connection, first: int, where: str) -> Iterator[tuple[int, Details]]:
    """Yield all rows of details from an id on: their first id, and the details."""
    if not _exists(connection, details):  # an index of format 1
        return
    query = sa.select(details).where(details.c.first >= first).order_by(details.c.first)
    with connection.execute(query.execution_options(yield_per=16)) as rows:  # closed also where not all are read
        for row in rows:
            yield int(row.first), _read_details(row, where)


def find_external_ids(connection: sa.Connection, wanted: Collection[str | None], where: str) -> dict[str | None, int]:
    """Return the items' own ids of those external ids that the index holds; None stands for none."""
    found: dict[str | None, int] = {}
    if not wanted or not _exists(connection, details):
        return found
    query = sa.select(details.c.first, details.c.external_ids).where(details.c.external_ids.is_not(None))
    rows = connection.execute(query).all()
    looked = set(wanted) - {None} if rows else set()
    for row in rows:
        try:
            held = json.loads(row.external_ids)
            hits = looked.intersection(held)
        except (TypeError, ValueError):
            raise make_damaged_error(where, "the list of names") from None
        if hits:
            found.update((one, row.first + place) for place, one in enumerate(held) if one in hits)
    return found


class ExternalIds:
    """The external ids of an index in one transaction, as hashes: batch after batch, the text is not read again."""

    def __init__(self, connection: sa.Connection, where: str) -> None:
        self._connection, self._where, self._next_id = connection, where, 0
        self._runs: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []  # rising hashes, and the items' own ids

    def find(self, wanted: Collection[str | None]) -> dict[str | None, int]:
        """Return the items' own ids of those external ids that the index holds; None stands for none."""
        own = {one for one in wanted if one is not None}
        if not own:
            return {}
        self._catch_up()
        hashes = np.sort(np.fromiter(map(hash, own), np.int64, len(own)))
        numbers = []
        for held, its in self._runs:
            starts, stops = np.searchsorted(held, hashes), np.searchsorted(held, hashes, "right")
            there = np.flatnonzero(stops > starts).tolist()
            numbers += [its[starts[place] : stops[place]] for place in there]
        found: dict[str | None, int] = {}
        unique = np.unique(np.concatenate([_NONE, *numbers]))
        for first, some, those in load_details(self._connection, unique, self._where):
            texts = some.external_ids or []
            found |= {texts[one - first]: one for one in those.tolist() if texts and texts[one - first] in own}
        return found

    def _catch_up(self) -> None:
        """Read what came since."""
        columns = (details.c.first, details.c.last, details.c.external_ids)
        query = sa.select(*columns).where(details.c.first >= self._next_id).order_by(details.c.first)
        hashes, numbers = [_NONE], [_NONE]
        for row in self._connection.execute(query.execution_options(yield_per=16)):
            self._next_id = row.last + 1
            try:
                texts = [] if row.external_ids is None else json.loads(row.external_ids)
                hashes.append(np.fromiter(map(hash, texts), np.int64, len(texts)))
            except (TypeError, ValueError):
                raise make_damaged_error(self._where, "the list of names") from None
            numbers.append(np.arange(row.first, row.first + len(texts)))
        self._runs.append((np.concatenate(hashes), np.concatenate(numbers)))
        while len(self._runs) > 1 and len(self._runs[-2][0]) <= 2 * len(self._runs[-1][0]):  # so that there are few
            (some, its), (others, theirs) = self._runs.pop(), self._runs.pop()
            self._runs.append((np.concatenate([some, others]), np.concatenate([its, theirs])))
        some, its = self._runs.pop()
        order = np.argsort(some)
        self._runs.append((some[order], its[order]))


def load_items(
    connection: sa.Connection, ids: NDArray[np.int64], where: str, *, originals: bool = True
) -> dict[int, StoredItem]:
    """Return those of the items that are there, by id; without `originals`, bytes of originals are not read."""
    found: dict[int, StoredItem] = {}
    with_images: list[int] = []
    for first, some, held in load_details(connection, ids, where):
        attached = set(some.attached)
        for number in held.tolist():
            found[number] = some.as_item(number - first, number)
            if number - first in attached:
                with_images.append(number)
    named = np.fromiter(found, np.int64, len(found))
    rows = _load_images(connection, np.union1d(np.setdiff1d(ids, named), with_images), where, originals=originals)
    if not rows.keys() >= set(with_images):
        raise make_damaged_error(where, "the list of items")
    for number, (name, thumbnail, original, digest) in rows.items():
        known = found.get(number, StoredItem(number, name, b"", None))  # in format 1 the name is here
        found[number] = replace(known, thumbnail=thumbnail, original=original, digest=digest)
    return found


def _load_images(
    connection: sa.Connection, ids: NDArray[np.int64], where: str, *, originals: bool
) -> dict[int, tuple[str, bytes, bytes | Path | None, bytes | None]]:
    """Return name, thumbnail, original and digest of items that have a row."""
    found: dict[int, tuple[str, bytes, bytes | Path | None, bytes | None]] = {}
    columns = [items.c.id, items.c.name, items.c.thumbnail, items.c.path, items.c.original_crc, items.c.crc]
    query = sa.select(*columns, items.c.original if originals else sa.null())
    for some in _chunks(ids):
        for *values, told, original in connection.execute(query.where(items.c.id.in_(some))):
            number, name, thumbnail, path, original_crc = values
            if checksum(*values) != told or (originals and checksum(original) != original_crc):
                raise make_damaged_error(where, "an item")
            if path is None:
                found[number] = name, thumbnail, original, None
            else:
                found[number] = name, thumbnail, Path(path), original
    return found


def sum_sizes(connection: sa.Connection, ids: NDArray[np.int64], kind: Literal["thumbnail", "original"]) -> int:
    """Return how many bytes a column holds of items, without reading them."""
    total = sa.select(sa.func.coalesce(sa.func.sum(sa.func.length(items.c[kind])), 0))
    return sum(int(connection.execute(total.where(items.c.id.in_(some))).scalar_one()) for some in _chunks(ids))


def delete_rows(connection: sa.Connection, ids: NDArray[np.int64], revision: int, where: str) -> None:
    """Delete all but the features of items, whose ids rise; remember the ids and when."""
    for first, some, held in list(load_details(connection, ids, where)):
        connection.execute(sa.delete(details).where(details.c.first == first))
        for start, stop in cut_runs(first, first + some.count, held):
            save_details(connection, start, some.cut(start - first, stop - first))
    for numbers in _chunks(ids):
        connection.execute(sa.delete(items).where(items.c.id.in_(numbers)))
        rows = [{"id": number, "revision": revision, "crc": checksum(number, revision)} for number in numbers]
        connection.execute(sa.insert(deleted), rows)


def cut_runs(first: int, stop: int, gone: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return the ranges that are left of one when ids in it, rising, are taken out.

    Examples
    --------
    >>> cut_runs(10, 20, np.array([10, 14, 15]))
    [(11, 14), (16, 20)]
    """
    starts, stops = [first, *(gone + 1).tolist()], [*gone.tolist(), stop]
    return [(start, end) for start, end in zip(starts, stops, strict=True) if start < end]


def find_present(connection: sa.Connection, ids: NDArray[np.int64], head: Head) -> set[int]:
    """Return those of the ids that the index holds."""
    found = {number for number in ids.tolist() if 0 <= number < head.next_id}
    for some in _chunks(ids):
        found.difference_update(connection.execute(sa.select(deleted.c.id).where(deleted.c.id.in_(some))).scalars())
    return found


def is_large(head: Head) -> bool:
    """Return whether features are read where they lie, rather than held in memory."""
    return 4 * head.count * head.dimension > _MOST_ROWS


def find_ids(connection: sa.Connection, head: Head, where: str) -> Ids:
    """Return the ids of all items, rising."""
    gone = find_deleted_since(connection, -1, where)
    ids = np.delete(np.arange(head.next_id, dtype=np.uint32), gone)
    if len(ids) != head.count:
        raise make_damaged_error(where, "the list of items")
    return ids


def fill_rows(ids: NDArray[np.integer], dimension: int, blocks: Iterable[tuple[Ids, Singles]]) -> Singles:
    """Return the rows of ids, which rise, from blocks that hold them; zeros where there are none."""
    found = np.zeros((len(ids), dimension), np.float32)
    for some, rows in blocks:
        places = np.minimum(np.searchsorted(ids, some), len(ids) - 1)
        here = ids[places] == some
        found[places[here]] = rows[here]
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
    held: int = load_head(connection, where).count
    if not _exists(connection, exact_ranges):
        return held
    ranges = connection.execute(sa.select(exact_ranges)).all()
    if any(checksum(row.first, row.last) != row.crc for row in ranges):
        raise make_damaged_error(where, "the list of rows that are row-exact")
    inside = sa.exists().where(deleted.c.id.between(exact_ranges.c.first, exact_ranges.c.last))
    gone = connection.execute(sa.select(sa.func.count()).select_from(deleted).where(inside)).scalar_one()
    return held + int(gone) - sum(int(row.last - row.first + 1) for row in ranges)


def upgrade(connection: sa.Connection) -> None:
    """Make what an index of format 1 has not, under the lock."""
    details.create(connection, checkfirst=True)


def _read_details(row: Any, where: str) -> Details:
    """Return the details of a row, checked."""
    try:
        if checksum(*row[:-1]) != row.crc:
            raise ValueError
        columns, count = json.loads(row.columns), row.last - row.first + 1
        own = None if row.external_ids is None else json.loads(row.external_ids)
        found = Details(count, columns.get("names"), own, columns.get("metadata"), tuple(columns.get("images", ())))
        if any(column is not None and len(column) != count for column in (found.names, own, found.metadata)):
            raise ValueError
    except (TypeError, ValueError, AttributeError):
        raise make_damaged_error(where, "the list of names") from None
    return found


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _cut_blocks(first: int, stop: int, block: int) -> Iterator[tuple[int, int]]:
    """Yield a range of ids in parts that cross no multiple of a number."""
    for start in range(first - first % block, stop, block):
        yield max(start, first), min(start + block, stop)


def _exists(connection: sa.Connection, table: sa.Table) -> bool:
    return bool(sa.inspect(connection).has_table(table.name))


def make_damaged_error(where: str, what: str) -> DamagedIndexError:
    """Return an error that says what does not fit its checksum."""
    return DamagedIndexError(f"index {where}: {what} is damaged: put a backup back")


def _chunks(ids: NDArray[np.int64]) -> list[list[int]]:
    numbers = ids.tolist()
    return [numbers[start : start + _SOME] for start in range(0, len(numbers), _SOME)]
