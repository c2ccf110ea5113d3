"""Items of an index: the input, the stored form, snapshots of all rows, and the checks of both inputs."""

import datetime
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nearveil.cluster import Cluster, SpreadRows, StoredPart, cut_rows
from nearveil.features.vectors import TablePart, VectorFile, as_list
from nearveil.gallery.answers import LARGEST_METADATA, LARGEST_ORIGINAL, LONGEST_ID, LONGEST_NAME, is_thumbnail
from nearveil.gallery.codes import Singles
from nearveil.metrics import NORMALIZED, Metric
from nearveil.privacy.checks import LARGEST_FEATURE, OUT_OF_RANGE, as_rows, check_integer, is_integer, normalize_rows

Ids = NDArray[np.uint32]

_LARGEST_THUMBNAIL = 1 << 20
_FLAGS = {name: getattr(os, name, 0) for name in ("O_PATH", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC")}
_FOLDER = os.O_RDONLY | _FLAGS["O_PATH"] | _FLAGS["O_DIRECTORY"] | _FLAGS["O_NOFOLLOW"] | _FLAGS["O_CLOEXEC"]
_FILE = os.O_RDONLY | _FLAGS["O_NOFOLLOW"] | _FLAGS["O_NONBLOCK"] | _FLAGS["O_CLOEXEC"]


@dataclass(frozen=True, eq=False)
class Item:
    """One image, or any other record that has a vector, to be added to an index."""

    feature: ArrayLike  #: shape (d,) or (1, d); divided by its norm if the metric is the cosine
    name: str = ""  #: for people; need not be unique
    thumbnail: bytes = field(default=b"", repr=False)  #: WebP, as answers contain it, or empty
    #: The file content, or its path. A file is served only while it is unchanged since the item was added.
    original: bytes | Path | None = field(default=None, repr=False)
    external_id: str | None = None  #: your own id, unique in an index: use it to replace and delete items
    #: JSON values with text as keys. Every match carries it if the gallery offers it. An item that replaces another
    #: keeps its metadata if this is None, and its name if that is empty; ``{}`` drops the metadata.
    metadata: Mapping[str, Any] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class StoredItem:
    """An item as the index returns it, without its feature (see ``features``), with the fields of :class:`Item`."""

    id: int  #: never reused, not even after the item is deleted
    name: str
    thumbnail: bytes = field(repr=False)
    original: bytes | Path | None = field(repr=False)
    #: SHA-256 of the file at the path `original` when the item was added.
    digest: bytes | None = field(default=None, repr=False)
    external_id: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def from_row(
        cls,
        number: int,
        name: str,
        external_id: str | None,
        text: str | None,
        thumbnail: bytes | None = None,
        path: str | None = None,
        original: bytes | None = None,
    ) -> "StoredItem":
        """Return an item from its columns; `text` is metadata in JSON."""
        content, digest = (original, None) if path is None else (Path(path), original)
        return cls(number, name, thumbnail or b"", content, digest, external_id, json.loads(text) if text else {})

    def read_original(self) -> bytes | None:
        """Return the original, or read its file; None if there is none, or it is too large, a link, or changed."""
        if not isinstance(self.original, Path):
            return self.original
        data = read_regular(self.original, LARGEST_ORIGINAL)
        return None if data is None or hashlib.sha256(data).digest() != self.digest else data


@dataclass(frozen=True)
class LazyFeatures(StoredPart):
    """Feature rows that are loaded on demand; rows of deleted items are zeros."""

    read: Callable[[str, Ids, int], Singles]  # arguments: location, increasing ids, dimension
    location: str = field(repr=False)  # may contain a password
    ids: Ids | range = field(repr=False)
    dimension: int

    def load(self) -> Singles:
        """Load the rows."""
        return self.read(self.location, np.asarray(self.ids, np.uint32), self.dimension)

    def select(self, ids: Ids) -> "LazyFeatures":
        """Return the rows of a subset of the ids; contiguous ids become a range, which is small to send."""
        first, last = int(ids[0]), int(ids[-1])
        return replace(self, ids=range(first, last + 1) if last - first + 1 == len(ids) else ids)


@dataclass(frozen=True, eq=False)
class IndexSnapshot:
    """All items at one revision. Rows of a large gallery are loaded on demand; of items deleted since, they are 0."""

    revision: int
    ids: Ids = field(repr=False)  # increasing
    rows: "Singles | LazyFeatures" = field(repr=False)

    def __post_init__(self) -> None:
        for name in ("ids", "rows") if self.in_memory else ("ids",):
            frozen = getattr(self, name).view()
            frozen.setflags(write=False)
            object.__setattr__(self, name, frozen)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def in_memory(self) -> bool:
        """Whether the rows are in the memory of this process."""
        return isinstance(self.rows, np.ndarray)

    @property
    def features(self) -> Singles:
        """All rows, in memory."""
        return self.rows if isinstance(self.rows, np.ndarray) else self.rows.load()

    def spread(self, workers: Cluster) -> SpreadRows:
        """Return the rows in partitions."""
        if isinstance(self.rows, np.ndarray):
            return SpreadRows.cut(self.rows, workers)
        cuts, lazy = cut_rows(len(self)), self.rows
        parts = workers.place([lazy.select(self.ids[cut]) for cut in cuts])
        return SpreadRows(workers, parts, cuts, (len(self), lazy.dimension), np.dtype(np.float32))


class ItemImages(NamedTuple):
    """The images of an item."""

    thumbnail: bytes = b""
    original: bytes | None = None  # with a path: the SHA-256 of its file
    path: str | None = None


@dataclass(frozen=True, eq=False)
class ItemTable:
    """Checked items in columns; `images` is by position, `keys` are the keys of all metadata."""

    features: Singles
    names: Sequence[str]
    external_ids: Sequence[str | None]
    metadata: Sequence[str | None]  # JSON
    images: dict[int, ItemImages] = field(default_factory=dict)
    keys: frozenset[str] = frozenset()

    def __len__(self) -> int:
        return len(self.features)

    def select(self, positions: Sequence[int]) -> "ItemTable":
        """Return a subset of items without images."""
        return ItemTable(
            self.features[list(positions)],
            [self.names[position] for position in positions],
            [self.external_ids[position] for position in positions],
            [self.metadata[position] for position in positions],
            keys=self.keys,
        )

    def inherit(self, stored: Mapping[int, StoredItem]) -> "ItemTable":
        """Return the table with the names and metadata of stored items, by position, where it has none."""
        if not stored:
            return self
        names, metadata = list(self.names), list(self.metadata)
        for position, item in stored.items():
            names[position] = names[position] or item.name
            if metadata[position] is None and item.metadata:
                metadata[position] = _encode_json(dict(item.metadata))
        return replace(self, names=names, metadata=metadata)

    def rows(self, ids: Iterable[int]) -> Iterator[tuple[int, str, str | None, str | None]]:
        """Yield id, name, external id and metadata of each item."""
        return zip(ids, self.names, self.external_ids, self.metadata, strict=True)


def check_items(items: Iterable[Item], dimension: int, metric: Metric) -> ItemTable:
    """Return items in columns, or raise an error that names the first invalid one."""
    item_list = list(items)
    features = np.empty((len(item_list), dimension), np.float32)
    images: dict[int, ItemImages] = {}
    for position, item in enumerate(item_list):
        if not isinstance(item, Item):
            raise ValueError(f"items: number {position} must be an Item")
        loaded = _load_images(item, position)
        if loaded is not None:
            images[position] = loaded
        name = f"items: the feature of number {position}"
        row = as_rows(item.feature, name)
        if row.shape != (1, dimension):
            raise ValueError(f"{name} must be one row of {dimension} dimensions, as this index has, not {row.shape}")
        features[position] = row[0]
    metadata, keys = _encode_metadata([item.metadata for item in item_list], "items: the metadata")
    return ItemTable(
        _prepare_rows(features, "items: the feature", metric),
        _check_texts([item.name for item in item_list], "items: the name", LONGEST_NAME),
        _check_external_ids([item.external_id for item in item_list], "items: the external_id"),
        metadata,
        images,
        keys,
    )


def check_table(rows: Any, ids: Any, names: Any, metadata: Any, dimension: int, metric: Metric) -> ItemTable:
    """Return rows with their columns, or raise an error that names the first invalid one."""
    features = _prepare_rows(as_rows(rows), "rows:", metric)
    count = len(features)
    if features.shape[1] != dimension:
        raise ValueError(f"rows have {features.shape[1]} dimensions; this index has {dimension}")
    name_list = [""] * count if names is None else as_list(names, "names", count)
    id_list = [None] * count if ids is None else as_list(ids, "ids", count)
    metadata_list = [None] * count if metadata is None else as_list(metadata, "metadata", count)
    texts, keys = _encode_metadata(metadata_list, "metadata:")
    return ItemTable(
        features,
        _check_texts(name_list, "names:", LONGEST_NAME),
        _check_external_ids(id_list, "ids:"),
        texts,
        keys=keys,
    )


def _prepare_rows(rows: Singles, name: str, metric: Metric) -> Singles:
    """Return rows as an index stores them: divided by their norms, or as given within a range."""
    if metric in NORMALIZED:
        return normalize_rows(rows, name)
    invalid = np.flatnonzero(~(np.abs(rows) <= LARGEST_FEATURE).all(axis=1))
    if len(invalid):
        raise ValueError(f"{name}{'' if name.endswith(':') else ' of'} number {invalid[0]} {OUT_OF_RANGE}")
    return rows


def check_part(part: TablePart, file: VectorFile, dimension: int | None, metric: Metric) -> ItemTable:
    """Load and check a partition of a file; without ids, rows are named after the file and their number."""
    table = file.read(part)
    ids = table.ids if file.ids is not None else [f"{file.path.name}:{row}" for row in range(part.start, part.stop)]
    return check_table(table.rows, ids, table.names, table.metadata, dimension or table.rows.shape[1], metric)


def name_parts(file: VectorFile, parts: Sequence[TablePart]) -> list[str] | None:
    """Return the names of the partitions of a file for error messages; None if the file is one partition."""
    return [file.describe(part) for part in parts] if len(parts) > 1 else None


def _load_images(item: Item, position: int) -> ItemImages | None:
    """Check the images of an item, and return their stored form, or None if it has none."""
    thumbnail, original = item.thumbnail, item.original
    if not is_thumbnail(thumbnail) or len(thumbnail) > _LARGEST_THUMBNAIL:
        raise ValueError(f"items: the thumbnail of number {position} must be WebP of up to {_LARGEST_THUMBNAIL} bytes")
    if isinstance(original, Path) and is_text(str(original)):
        path = original.resolve()
        data = read_regular(path, LARGEST_ORIGINAL)  # None if it may not be served
        return ItemImages(bytes(thumbnail), None if data is None else hashlib.sha256(data).digest(), str(path))
    if not (original is None or isinstance(original, bytes)):
        raise ValueError(f"items: the original of number {position} must be bytes, a Path that is text, or None")
    if original is not None and len(original) > LARGEST_ORIGINAL:
        raise ValueError(f"items: the original of number {position} must be at most {LARGEST_ORIGINAL} bytes")
    has_images = thumbnail or original is not None
    return ItemImages(bytes(thumbnail), None if original is None else bytes(original)) if has_images else None


def read_regular(path: Path, most: int) -> bytes | None:
    """Read a regular file of at most `most` bytes; return None if that fails."""
    # No part of the path may be a symbolic link: one created after indexing could point to any file. Pipes and devices
    # are refused without blocking.
    try:
        with os.fdopen(_open_without_links(path), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > most:
                return None
            data = file.read(most + 1)  # the file may have grown
    except (OSError, ValueError, NotImplementedError):  # NotImplementedError: no dir_fd on this system
        return None
    return data if len(data) <= most else None


def _open_without_links(path: Path) -> int:
    """Open a file by walking down its folders, following no link; return the descriptor."""
    anchor, *folders, name = path.parts
    parent = os.open(anchor, _FOLDER)
    try:
        for folder in folders:
            child = os.open(folder, _FOLDER, dir_fd=parent)
            os.close(parent)
            parent = child
        return os.open(name, _FILE, dir_fd=parent)
    finally:
        os.close(parent)


def _describe_value(column: str, position: int) -> str:
    """Return the description of one value of a column, such as "names: number 3"."""
    return f"{column} {'' if column.endswith(':') else 'of '}number {position}"


def _check_texts(values: Sequence[Any], column: str, longest: int) -> list[str]:
    """Return texts as plain `str`, or raise an error that names the first invalid one."""
    if set(map(type, values)) <= {str} and is_text("".join(values)) and max(map(len, values), default=0) <= longest:
        return list(values)
    for position, value in enumerate(values):
        if not is_text(value) or len(value) > longest:
            name = _describe_value(column, position)
            raise ValueError(f"{name} must be text in UTF-8, of at most {longest} characters and without NUL")
    return [str.__str__(value) for value in values]


def _check_external_ids(values: Sequence[Any], column: str) -> Sequence[str | None]:
    """Return external ids as plain text; integers become text, and None is no id."""
    if set(map(type, values)) <= {type(None)}:
        return values
    texts = ["" if value is None else str(value) if is_integer(value) else value for value in values]
    texts = _check_texts(texts, column, LONGEST_ID)
    first: dict[str, int] = {}
    for position, text in enumerate(texts):
        if values[position] is None:
            continue
        if first.setdefault(text, position) != position or not text:
            problem = f"is the same as number {first[text]}: give every id once" if text else "is empty"
            raise ValueError(f"{_describe_value(column, position)} {problem}")
    return [None if value is None else text for value, text in zip(values, texts, strict=True)]


def _encode_metadata(values: Sequence[Any], column: str) -> tuple[Sequence[str | None], frozenset[str]]:
    """Return metadata as JSON, None where it is not given, and all keys."""
    if set(map(type, values)) <= {type(None)}:
        return values, frozenset()
    texts: list[str | None] = []
    keys: set[str] = set()
    for position, value in enumerate(values):
        if value is None:
            texts.append(None)
            continue
        name = _describe_value(column, position)
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise ValueError(f"{name} must be a mapping with text as keys")
        try:
            text = _encode_json(dict(value))
            size = len(text.encode())
        except (TypeError, ValueError, RecursionError):
            raise ValueError(f"{name} must be JSON: text, finite numbers, lists and mappings of them") from None
        if size > LARGEST_METADATA:
            raise ValueError(f"{name} must be at most {LARGEST_METADATA} bytes as JSON")
        texts.append(text)
        keys.update(map(str.__str__, value))
    return texts, frozenset(keys)


def _as_plain(value: Any) -> Any:
    """Return a value of NumPy, pandas or datetime as JSON can encode it."""
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, Mapping):
        return dict(value)
    if callable(getattr(value, "tolist", None)):  # NumPy scalars and arrays, tensors, series
        return value.tolist()
    raise TypeError


_encode_json = json.JSONEncoder(default=_as_plain, allow_nan=False, ensure_ascii=False).encode


def is_text(value: object) -> bool:
    """Return whether a value is text that both databases can store."""
    if not isinstance(value, str) or "\0" in value:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_queries(queries: ArrayLike, dimension: int) -> Singles:
    """Return query rows, shape (q, d); an error does not show any value."""
    rows = as_rows(queries, "queries")
    if rows.shape[1] != dimension:
        raise ValueError(f"queries must be rows of {dimension} dimensions, as the index has")
    if not np.isfinite(rows).all():
        raise ValueError("queries must be finite: they contain NaN or infinity")
    return rows


def check_ids(ids: ArrayLike) -> NDArray[np.int64] | list[str]:
    """Return ids as integers, shape (n,), or external ids as text."""
    values = np.asarray(ids)
    if values.size == 0:
        return np.empty(0, np.int64)
    if values.ndim == 1 and values.dtype.kind in "UTO" and all(isinstance(value, str) for value in values.tolist()):
        return [str.__str__(value) for value in values.tolist()]
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise ValueError("ids must be a list of integers, or of external ids")
    return values.astype(np.int64)


def check_k(k: int, count: int) -> int:
    """Return the number of neighbours, at most the number of items."""
    if check_integer(k, "k", 1) > count:
        raise ValueError(f"k must be at most {count}, the number of items in the index")
    return int(k)
