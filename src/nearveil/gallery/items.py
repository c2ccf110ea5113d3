"""Items of an index: what it is given, what it gives back, and the files of originals."""

import hashlib
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nearveil.gallery.answers import is_thumbnail
from nearveil.gallery.codes import Singles
from nearveil.mechanisms.covers.map import MOST_FEATURES

LARGEST_ORIGINAL = 64 << 20
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
