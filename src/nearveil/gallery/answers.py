"""Codes of items, and answers: the ids and codes of all candidates, perhaps with names or images."""

import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self, cast, get_args

import faiss
import numpy as np
from numpy.typing import NDArray
from sklearn.decomposition import PCA
from threadpoolctl import threadpool_limits

from nearveil.cluster import SpreadRows
from nearveil.mechanisms import Message
from nearveil.mechanisms.base import CODE_BYTES, fingerprint
from nearveil.privacy.checks import is_integer
from nearveil.wire.frames import (
    DEFAULT_LIMITS,
    HEADER_BYTES,
    MOST_FEATURES,
    Kind,
    Limits,
    WireError,
    frame,
    read_flag,
    unframe,
)

Singles = NDArray[np.float32]
Rows = NDArray[np.float32] | NDArray[np.float64]
Bytes = NDArray[np.uint8]

ID_BYTES = 4
_COMPACT_DIMENSIONS = 90  # dimensions up to which codes of 128 bytes lose less than 0.01 of NN-recall
_FACTOR_BYTES = 2  # a float16
_DIMENSIONS = 4  # kept of the projection for each byte: more gain nothing on image features, and cost table
_ROWS = 1 << 16  # enough to learn 256 centroids from
_SAMPLE = 4096  # items that act as queries when scores are corrected
_NEAR = 30  # of them, nearest to each item
_BLOCK = 4096


class Codes(Protocol):
    """How items are written into an answer, and how a query is compared with what was written."""

    @property
    def width(self) -> int:
        """Bytes of an item's code."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of the public table that the client needs in order to read codes."""
        ...

    def encode(self, features: Singles) -> Bytes:
        """Return the codes, shape (n, width), of features, shape (n, d)."""
        ...

    def project(self, queries: Rows) -> Rows:
        """Return queries in the space of decoded rows."""
        ...

    def decode(self, codes: Bytes) -> Singles:
        """Return the rows that codes stand for: their products with projected queries are the scores."""
        ...

    def scores(self, queries: Rows, codes: Bytes) -> Singles:
        """Return the scores, shape (q, n), of n codes for full features of queries, shape (q, d)."""
        ...


class _LinearCodes:
    """Codes whose scores are inner products."""

    def project(self, queries: Rows) -> Rows:
        """Return queries in the space of decoded rows."""
        raise NotImplementedError

    def decode(self, codes: Bytes) -> Singles:
        """Return the rows that codes stand for."""
        raise NotImplementedError

    def scores(self, queries: Rows, codes: Bytes) -> Singles:
        """Return approximate inner products of full queries with the items."""
        return np.asarray(self.project(queries) @ self.decode(codes).T, dtype=np.float32)


@dataclass(frozen=True)
class WholeCodes(_LinearCodes):
    """Features as they are, in 16 bits a number: no loss, and no economy."""

    form: ClassVar[str] = "codes-whole"

    dimension: int
    nbytes: int = 0

    @property
    def width(self) -> int:
        """Bytes of an item's code."""
        return 2 * self.dimension

    def encode(self, features: Singles) -> Bytes:
        """Return the features in 16 bits."""
        return np.ascontiguousarray(features, dtype="<f2").view(np.uint8)

    def project(self, queries: Rows) -> Rows:
        """Return queries as they are."""
        return queries

    def decode(self, codes: Bytes) -> Singles:
        """Return the features."""
        return np.ascontiguousarray(codes).view("<f2").astype(np.float32)

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the public table."""
        return {"dimension": np.array(self.dimension, dtype="<i8")}

    @classmethod
    def from_message(cls, table: Message) -> Self:
        """Read a public table; nothing in it is trusted."""
        dimension = int(_get_array(table, "dimension", "<i8", 0))
        if not 1 <= dimension <= MOST_FEATURES:
            raise WireError(f"the table of codes must be of 1 to {MOST_FEATURES} dimensions")
        return cls(dimension)


@dataclass(frozen=True)
class ScalarCodes(_LinearCodes):
    """Each dimension by itself, in two bytes or one: for rows of few dimensions. Next to no loss. All of it is public.

    Rows are rotated by the gallery's principal directions, so that dimensions in one byte are those that vary least.
    """

    form: ClassVar[str] = "codes-scalar"

    projection: Singles = field(repr=False)
    lowest: Singles = field(repr=False)
    steps: Singles = field(repr=False)
    double: int

    @classmethod
    def fit(cls, features: SpreadRows, width: int) -> Self:
        """Learn codes of at most `width` bytes, which must be no less than the dimensions of `features`."""
        dimension = features.shape[1]
        double = min(dimension, width - dimension)
        projection = _find_directions(_sample_rows(features, _ROWS), dimension)
        lowest, highest = features.reduce(_find_bounds, _join_bounds, projection, stage="measuring")
        levels = np.where(np.arange(dimension) < double, 65535, 255)
        steps = np.maximum((highest - lowest) / levels, 1e-30).astype(np.float32)
        return cls(projection, lowest, steps, double)

    @property
    def width(self) -> int:
        """Bytes of an item's code."""
        return len(self.steps) + self.double

    @property
    def nbytes(self) -> int:
        """Bytes of projection and scales."""
        return self.projection.nbytes + self.lowest.nbytes + self.steps.nbytes

    def encode(self, features: Singles) -> Bytes:
        """Return the codes of features of shape (n, d)."""
        levels = np.rint((features @ self.projection - self.lowest) / self.steps)
        wide = np.clip(levels[:, : self.double], 0, 65535).astype("<u2")
        narrow = np.clip(levels[:, self.double :], 0, 255).astype(np.uint8)
        return np.concatenate([wide.view(np.uint8).reshape(len(wide), -1), narrow], axis=1)

    def project(self, queries: Rows) -> Rows:
        """Return queries in the principal directions."""
        return np.asarray(queries @ self.projection)

    def decode(self, codes: Bytes) -> Singles:
        """Return the rows that codes stand for."""
        wide = np.ascontiguousarray(codes[:, : 2 * self.double]).view("<u2")
        levels = np.concatenate([wide, codes[:, 2 * self.double :]], axis=1, dtype=np.float32)
        return np.asarray(levels * self.steps + self.lowest, dtype=np.float32)

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the public table."""
        double = np.array(self.double, dtype="<i8")
        return {"projection": self.projection, "lowest": self.lowest, "steps": self.steps, "double": double}

    @classmethod
    def from_message(cls, table: Message) -> Self:
        """Read a public table; nothing in it is trusted."""
        projection, double = _get_array(table, "projection", "<f4", 2), int(_get_array(table, "double", "<i8", 0))
        lowest, steps = _get_array(table, "lowest", "<f4", 1), _get_array(table, "steps", "<f4", 1)
        if not projection.shape[1] == len(lowest) == len(steps) or not 0 <= double <= len(steps):
            raise WireError("the table of codes has arrays that do not fit each other")
        return cls(projection, lowest, steps, double)


@dataclass(frozen=True)
class ProductCodes(_LinearCodes):
    """Product quantisation that spends its bytes where they change scores: for rows of many dimensions. All is public.

    A direction in which queries vary little hardly matters for a score, so the principal directions are weighted by
    their root mean square. A factor of 16 bits an item makes its scores right on average for the items nearest to it.
    """

    form: ClassVar[str] = "codes-product"

    projection: Singles = field(repr=False)
    weights: Singles = field(repr=False)
    mean: Singles = field(repr=False)
    quantiser: Any = field(repr=False)
    sample: Singles = field(repr=False)  # the server's: for the factors that it writes

    @classmethod
    def fit(cls, features: SpreadRows, width: int) -> Self:
        """Learn codes of `width` bytes, at least 3."""
        rows = _sample_rows(features, _ROWS)
        groups = width - _FACTOR_BYTES
        size = min(_DIMENSIONS, -(-rows.shape[1] // groups))
        projection = _find_directions(rows, min(groups * size, rows.shape[1]))
        # Groups are of one size: what is missing is filled up by directions of no variance.
        projection = np.pad(projection, ((0, 0), (0, groups * size - projection.shape[1])))
        turned = rows @ projection
        projection = projection[:, _order_dimensions(turned.var(axis=0) * np.mean(turned**2, axis=0), groups)]
        turned = rows @ projection
        spread = np.sqrt(np.mean(turned**2, axis=0))
        weights = np.maximum(spread, max(float(spread.max()), 1e-30) * 1e-4).astype(np.float32)
        mean = turned.mean(axis=0)
        quantiser = faiss.ProductQuantizer(groups * size, groups, 8)
        quantiser.cp.niter = 12
        quantiser.cp.min_points_per_centroid = 1
        # A gallery of fewer than 256 items is repeated: each then has a centroid of its own.
        weighted = np.resize((turned - mean) * weights, (max(len(rows), 256), groups * size))
        with threadpool_limits(1, user_api="openmp"):  # threads cost more than they help at a few dimensions each
            quantiser.train(np.ascontiguousarray(weighted))
        return cls(projection, weights, mean, quantiser, _sample_rows(features, _SAMPLE))

    @property
    def width(self) -> int:
        """Bytes of an item's code."""
        return _FACTOR_BYTES + int(self.quantiser.M)

    @property
    def nbytes(self) -> int:
        """Bytes of projection, weights and centroids."""
        tables = self.projection.nbytes + self.weights.nbytes + self.mean.nbytes
        return tables + 4 * int(self.quantiser.centroids.size())

    def encode(self, features: Singles) -> Bytes:
        """Return codes, and before them the factors that correct their scores, of features of shape (n, d)."""
        weighted = (features @ self.projection - self.mean) * self.weights
        codes = np.asarray(self.quantiser.compute_codes(np.ascontiguousarray(weighted)), dtype=np.uint8)
        factors = self._factors(features, self._read(codes)).astype("<f2")
        return np.concatenate([factors[:, None].view(np.uint8), codes], axis=1)

    def project(self, queries: Rows) -> Rows:
        """Return queries in the weighted directions."""
        return np.asarray(queries @ self.projection)

    def decode(self, codes: Bytes) -> Singles:
        """Return the rows that codes stand for, with their factors."""
        factors = np.ascontiguousarray(codes[:, :_FACTOR_BYTES]).view("<f2").astype(np.float32)
        return np.asarray(self._read(np.ascontiguousarray(codes[:, _FACTOR_BYTES:])) * factors, dtype=np.float32)

    def _read(self, codes: Bytes) -> Singles:
        """Return the rows that codes stand for, in the projection's space, without their factors."""
        return np.asarray(self.quantiser.decode(codes) / self.weights + self.mean, dtype=np.float32)

    def _factors(self, features: Singles, rows: Singles) -> Singles:
        """Return, for each item, the least-squares factor from coded to true scores of the sample's nearest."""
        factors = np.ones(len(features), np.float32)
        turned = self.sample @ self.projection
        near = min(_NEAR, len(self.sample))
        for start in range(0, len(features), _BLOCK):
            block = slice(start, start + _BLOCK)
            true, coded = features[block] @ self.sample.T, rows[block] @ turned.T
            true[true > 1 - 1e-6] = -np.inf  # itself is no query
            found = np.argpartition(-true, near - 1, axis=1)[:, :near]
            true, coded = np.take_along_axis(true, found, axis=1), np.take_along_axis(coded, found, axis=1)
            coded[np.isinf(true)] = true[np.isinf(true)] = 0
            power = np.einsum("ij,ij->i", coded, coded)
            fitted = np.einsum("ij,ij->i", coded, true)
            np.divide(fitted, power, out=factors[block], where=power > 1e-12)
        return np.clip(factors, 0.5, 2.0)

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the public table. The server's sample is left out."""
        centroids = faiss.vector_to_array(self.quantiser.centroids).reshape(int(self.quantiser.M), _CENTROIDS, -1)
        return {"projection": self.projection, "weights": self.weights, "mean": self.mean, "centroids": centroids}

    @classmethod
    def from_message(cls, table: Message) -> Self:
        """Read a public table; nothing in it is trusted."""
        projection, centroids = _get_array(table, "projection", "<f4", 2), _get_array(table, "centroids", "<f4", 3)
        weights, mean = _get_array(table, "weights", "<f4", 1), _get_array(table, "mean", "<f4", 1)
        groups, levels, size = centroids.shape
        if levels != _CENTROIDS:
            raise WireError(f"the table of codes must have {_CENTROIDS} centroids for each byte")
        if not projection.shape[1] == len(weights) == len(mean) == groups * size:
            raise WireError("the table of codes has arrays that do not fit each other")
        quantiser = faiss.ProductQuantizer(groups * size, groups, 8)
        faiss.copy_array_to_vector(np.ascontiguousarray(centroids, np.float32).ravel(), quantiser.centroids)
        return cls(projection, weights, mean, quantiser, np.zeros((0, len(projection)), np.float32))


def _find_bounds(rows: Singles, first: int, projection: Singles) -> Singles:
    del first
    turned = rows @ projection
    return np.stack([turned.min(axis=0), turned.max(axis=0)])


def _join_bounds(one: Singles, other: Singles) -> Singles:
    return np.stack([np.minimum(one[0], other[0]), np.maximum(one[1], other[1])])


def make_codes(features: Singles | SpreadRows, code_bytes: int | Literal["auto"] | None) -> Codes:
    """Return codes that take `code_bytes` for each candidate, its id included; None keeps whole features.

    "auto" takes 128 bytes up to 90 dimensions, where they lose next to nothing, and whole features above.
    """
    if code_bytes == "auto":
        code_bytes = CODE_BYTES if features.shape[1] <= _COMPACT_DIMENSIONS else None
    if code_bytes is None:
        return WholeCodes(features.shape[1])
    if not is_integer(code_bytes):
        raise ValueError('code_bytes must be a whole number, "auto", or None for whole features')
    width = int(code_bytes) - ID_BYTES
    if width <= _FACTOR_BYTES:
        raise ValueError(f"code_bytes must be at least {ID_BYTES + _FACTOR_BYTES + 1}")
    rows = features if isinstance(features, SpreadRows) else SpreadRows.cut(features)
    return (ScalarCodes if features.shape[1] <= width else ProductCodes).fit(rows, width)


def encode_rows(table: Codes, features: SpreadRows) -> Bytes:
    """Return the codes of features."""
    shared = codes_to_bytes(table), table.sample if isinstance(table, ProductCodes) else np.empty((0, 0), np.float32)
    found = np.empty((len(features), table.width), np.uint8)
    for some, codes in zip(features.cuts, features.map(_encode_part, *shared, stage="making codes"), strict=True):
        found[some] = codes
    return found


def _encode_part(features: Singles, table: bytes, sample: Singles) -> Bytes:
    codes = codes_from_bytes(table)
    return (replace(codes, sample=sample) if isinstance(codes, ProductCodes) else codes).encode(features)


def prepare_table(table: Codes, features: SpreadRows) -> Codes:
    """Return a table that encodes features of a gallery, also where it was read and its sample is missing."""
    if isinstance(table, ProductCodes) and not len(table.sample):
        return replace(table, sample=_sample_rows(features, _SAMPLE))
    return table


def _sample_rows(rows: SpreadRows, most: int) -> Singles:
    """Return at most so many rows, from all over the gallery, always the same."""
    places = np.linspace(0, len(rows) - 1, most).astype(np.intp) if len(rows) > most else np.arange(len(rows))
    return rows.take(places, "taking rows")


def _find_directions(rows: Singles, kept: int) -> Singles:
    """Return principal directions, shape (d, kept), completed by others where there are fewer rows than that."""
    if len(rows) > kept:
        return np.asarray(PCA(kept, svd_solver="covariance_eigh").fit(rows).components_.T, dtype=np.float32)
    basis, _ = np.linalg.qr(np.concatenate([rows.T, np.eye(rows.shape[1], dtype=np.float32)], axis=1))
    return np.asarray(basis[:, :kept], dtype=np.float32)


def _order_dimensions(variances: Singles, groups: int) -> NDArray[np.intp]:
    """Return an order of dimensions in which consecutive groups have about equal products of variances."""
    size = len(variances) // groups
    members: list[list[int]] = [[] for _ in range(groups)]
    products = np.zeros(groups)
    least = math.log(max(float(variances.min()), 1e-30))
    for dimension in np.argsort(-variances):
        group = int(np.argmin(products))
        members[group].append(int(dimension))
        products[group] += math.log(max(float(variances[dimension]), 1e-30)) - least
        if len(members[group]) == size:
            products[group] = np.inf
    return np.concatenate([np.array(group, dtype=np.intp) for group in members])


_CENTROIDS = 256  # a byte names one of them
_MOST_DIMENSIONS = 4  # that a byte of a product code stands for: more would make small answers large in memory
MOST_COLUMNS = 2 * MOST_FEATURES  # of a projection: groups of one size are filled up
_LARGEST = {
    "dimension": (),
    "double": (),
    "projection": (MOST_FEATURES, MOST_COLUMNS),
    "lowest": (MOST_COLUMNS,),
    "steps": (MOST_COLUMNS,),
    "weights": (MOST_COLUMNS,),
    "mean": (MOST_COLUMNS,),
    "centroids": (MOST_FEATURES, _CENTROIDS, _MOST_DIMENSIONS),
}


_FORMS: dict[str, type[WholeCodes | ScalarCodes | ProductCodes]] = {
    one.form: one for one in (WholeCodes, ScalarCodes, ProductCodes)
}


def codes_to_bytes(codes: Codes) -> bytes:
    """Return the public table that a client reads codes by, without the server's sample.

    Examples
    --------
    >>> codes_from_bytes(codes_to_bytes(WholeCodes(64))).width
    128
    """
    if not isinstance(codes, WholeCodes | ScalarCodes | ProductCodes):
        raise WireError("codes must be of a kind that has a wire form")
    arrays = codes.to_arrays()
    return Message(codes.form, _hash_arrays(arrays), arrays).to_bytes()


def codes_from_bytes(data: bytes) -> Codes:
    """Read a public table; nothing in it is trusted. Product codes lack their sample: they can score, not encode."""
    try:
        message = Message.from_bytes(data, _LARGEST)
    except ValueError as error:
        raise WireError(f"the table of codes cannot be read: {error}") from None
    found = _FORMS.get(message.mechanism)
    if found is None:
        raise WireError("the table of codes is of a kind that is not known")
    codes: Codes = found.from_message(message)
    if count_columns(codes) > 2 * code_dimension(codes):  # more would be slow to score and find nothing more
        raise WireError("the table of codes must have at most two columns for each feature")
    if codes_to_bytes(codes) != data:  # another fingerprint, arrays that are not known, another way to write it
        raise WireError("the table of codes is not written as it must be")
    return codes


def code_dimension(codes: Codes) -> int:
    """Return the dimension of the features that codes are scored against."""
    return codes.dimension if isinstance(codes, WholeCodes) else len(codes.projection)  # type: ignore[attr-defined]


def count_columns(codes: Codes) -> int:
    """Return how many numbers a code stands for."""
    return codes.dimension if isinstance(codes, WholeCodes) else codes.projection.shape[1]  # type: ignore[attr-defined]


def _hash_arrays(arrays: Any) -> str:
    return fingerprint(*(part for name in sorted(arrays) for part in (name, arrays[name])))


def _get_array(message: Message, name: str, kind: str, dimensions: int) -> NDArray[Any]:
    """Return a named array of a type, checked; a message without it is a WireError too."""
    values = message.arrays.get(name)
    if values is None or values.dtype != np.dtype(kind) or values.ndim != dimensions or 0 in values.shape:
        raise WireError(f"the table of codes must hold {name!r}, an array of type {kind} with {dimensions} dimensions")
    return values


Extras = Literal["none", "thumbnails", "originals", "names", "metadata"]
EXTRAS: tuple[Extras, ...] = get_args(Extras)  # a flag is the place of its word

_SIZES = struct.Struct("<II")  # candidates, bytes of a code
LARGEST_ORIGINAL = 64 << 20  # bytes
IMAGE_HEADER_BYTES = 4  # of an image: its length
LONGEST_NAME = 4096  # characters, as an index holds them
LONGEST_ID = 512  # characters of an external id
LARGEST_METADATA = 64 << 10  # bytes of JSON, of one item
LARGEST_DETAILS = LARGEST_METADATA + 12 * (LONGEST_NAME + LONGEST_ID) + 100  # JSON may write a character in 12
# What breaks a line, steers a terminal, or turns the direction of the text round it.
_STEERING = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


@dataclass(frozen=True)
class Answer:
    """The server's answer: ids and codes of all candidates, and the images or names of all where the query asked so.

    There is no second request, because which candidates a client would ask about is what the message hid. `images` has
    one for each candidate, empty where the gallery has none: WebP for a thumbnail, UTF-8 without control characters for
    a name, JSON for metadata (:class:`ItemDetails`).

    Examples
    --------
    >>> answer = Answer(np.array([3, 7], np.uint32), np.zeros((2, 5), np.uint8))
    >>> answer.nbytes, Answer.from_bytes(answer.to_bytes()).ids.tolist()
    (40, [3, 7])
    """

    kind: ClassVar[Kind] = Kind.ANSWER
    header_bytes: ClassVar[int] = HEADER_BYTES + _SIZES.size

    ids: NDArray[np.uint32]  # the gallery's numbers of the candidates, rising: their order tells nothing
    codes: Bytes = field(repr=False)  # what to re-rank by
    extras: Extras = "none"  # what else the answer holds
    images: tuple[bytes, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if self.ids.ndim != 1 or self.ids.dtype != np.uint32 or not len(self.ids):
            raise WireError("ids must be at least one number of 32 bits")
        if self.codes.dtype != np.uint8 or self.codes.ndim != 2 or len(self.codes) != len(self.ids):
            raise WireError("codes must hold a row of bytes for each id")
        if not self.codes.shape[1]:
            raise WireError("codes must be of at least one byte")
        _check_rising(self.ids)
        self._check_images()

    def _check_images(self) -> None:
        if self.extras not in EXTRAS:
            raise WireError(f"extras must be one of {', '.join(EXTRAS)}")
        if len(self.images) != (0 if self.extras == "none" else len(self.ids)):
            raise WireError("images must be one for each id, or none at all")
        # The whole answer is refused, whichever of them will be chosen.
        if self.extras == "metadata":
            for image in self.images:
                read_details(image)
        if self.extras == "thumbnails" and not all(map(is_thumbnail, self.images)):
            raise WireError("images must be WebP, or empty, as thumbnails")
        if self.extras == "names" and not _are_names(self.images):
            raise WireError(
                f"images must be text in UTF-8, of at most {LONGEST_NAME} characters and without control characters, "
                "as names"
            )

    @property
    def nbytes(self) -> int:
        """How many bytes go over the wire."""
        images = IMAGE_HEADER_BYTES * len(self.images) + sum(map(len, self.images))
        return self.header_bytes + 4 * len(self.ids) + self.codes.size + images

    def to_bytes(self) -> bytes:
        """Return the answer as bytes, the same on every machine."""
        lengths = np.fromiter(map(len, self.images), "<u4", len(self.images))
        parts = [_SIZES.pack(*self.codes.shape), self.ids.astype("<u4").tobytes(), self.codes.tobytes()]
        return frame(Kind.ANSWER, b"".join([*parts, lengths.tobytes(), *self.images]), EXTRAS.index(self.extras))

    @classmethod
    def from_bytes(cls, data: bytes, limits: Limits = DEFAULT_LIMITS) -> Self:
        """Read an answer. Nothing in it is trusted."""
        kind, flags, body = unframe(data, limits)
        if kind != Kind.ANSWER:
            raise WireError(f"data is no answer but of kind {kind.name}")
        return cls.from_body(flags, body)

    @classmethod
    def from_body(cls, flags: int, body: bytes) -> Self:
        """Read what stands in the frame of an answer."""
        extras = cast("Extras", read_flag(flags, EXTRAS))
        if len(body) < _SIZES.size:
            raise WireError("data is truncated")
        count, width = _SIZES.unpack_from(body)
        if not count or not width:
            raise WireError("ids must be at least one, with codes of at least one byte")
        middle = _SIZES.size + 4 * count
        end = middle + count * width
        lengths = 0 if extras == "none" else IMAGE_HEADER_BYTES * count
        if len(body) < end + lengths or (extras == "none" and len(body) != end):
            raise WireError("data is truncated, or has bytes after its end")
        ids = np.frombuffer(body, "<u4", count, _SIZES.size).astype(np.uint32)
        _check_rising(ids)  # before anything is cut
        codes = np.frombuffer(body, np.uint8, count * width, middle).reshape(count, width)
        sizes = np.frombuffer(body, "<u4", lengths // IMAGE_HEADER_BYTES, end)
        return cls(ids, codes, extras, _cut(body, end + lengths, sizes))


def _cut(body: bytes, start: int, sizes: NDArray[np.uint32]) -> tuple[bytes, ...]:
    """Return the images at the end of an answer; they must fill it to its last byte."""
    if len(sizes) and start + int(sizes.sum(dtype=np.int64)) != len(body):
        raise WireError("data is truncated, or has bytes after its end")
    images = []
    for size in map(int, sizes):  # one by one: lists of numbers would be many times what was sent
        images.append(body[start : start + size])
        start += size
    return tuple(images)


def _check_rising(ids: NDArray[np.uint32]) -> None:
    if (ids[1:] <= ids[:-1]).any():
        raise WireError("ids must rise, each once")


def encode_name(name: str) -> bytes:
    """Return a name as an answer holds it; what would steer a terminal is replaced.

    Examples
    --------
    >>> encode_name("a tab" + chr(9) + ".png").decode()
    'a tab�.png'
    """
    return _STEERING.sub("\N{REPLACEMENT CHARACTER}", name[:LONGEST_NAME]).encode()


def encode_names(names: Sequence[str]) -> list[bytes]:
    """Return names of at most 4,096 characters as an answer holds them; faster than one by one."""
    if _STEERING.search("".join(names)):
        return list(map(encode_name, names))
    return [name.encode() for name in names]


class ItemDetails(NamedTuple):
    """What an answer tells of an item besides its code, where metadata is asked for."""

    name: str = ""
    external_id: str | None = None
    metadata: Mapping[str, Any] = MappingProxyType({})


def encode_details(details: ItemDetails) -> bytes:
    """Return details as an answer holds them, in JSON.

    Examples
    --------
    >>> encode_details(ItemDetails("a bird", "b-7", {"wings": 2})).decode()
    '{"name":"a bird","id":"b-7","metadata":{"wings":2}}'
    """
    name, held = encode_name(details.name).decode(), dict(details.metadata)
    told = {"name": name, "id": details.external_id, "metadata": held}
    return json.dumps(told, ensure_ascii=False, separators=(",", ":")).encode()


def read_details(data: bytes) -> ItemDetails:
    """Read what :func:`encode_details` wrote; nothing in it is trusted. Empty for an item that is there no more."""
    if not data:
        return ItemDetails()
    try:
        if len(data) > LARGEST_DETAILS:
            raise ValueError
        told = _DECODER.decode(data.decode())
        name, own, metadata = told.pop("name"), told.pop("id"), told.pop("metadata")
        fits = isinstance(name, str) and len(name) <= LONGEST_NAME and not _STEERING.search(name)
        fits = fits and (own is None or (isinstance(own, str) and len(own) <= LONGEST_ID))
        if told or not fits or not isinstance(metadata, dict):
            raise ValueError
    except (ValueError, KeyError, AttributeError, RecursionError, TypeError):
        raise WireError("images must be JSON of a name, an id and metadata, as metadata") from None
    return ItemDetails(name, own, metadata)


def _refuse_constant(_: str) -> Any:
    raise ValueError


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)  # one for all: json.loads would make one each time


def _are_names(images: Sequence[bytes]) -> bool:
    """Return whether each is text that an answer may hold as a name; all are read at once."""
    try:
        names = b"\n".join(images).decode().split("\n")
    except UnicodeDecodeError:
        return False
    return (
        len(names) == len(images)  # else one of them has a line break
        and max(map(len, names), default=0) <= LONGEST_NAME
        and not _STEERING.search("".join(names))
    )


def is_thumbnail(image: object) -> bool:
    """Return whether bytes may stand as a thumbnail: WebP, or nothing at all."""
    return isinstance(image, bytes) and (not image or (image[:4] == b"RIFF" and image[8:12] == b"WEBP"))
