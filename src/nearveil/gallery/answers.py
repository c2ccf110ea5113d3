"""Codes of items, and answers: the ids and codes of all candidates, optionally with names or images."""

import json
import math
import re
import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, Self, get_args

import faiss
import numpy as np
from numpy.typing import NDArray
from sklearn.decomposition import PCA
from threadpoolctl import threadpool_limits

from nearveil.cluster import SpreadRows
from nearveil.mechanisms import Message
from nearveil.mechanisms.base import CODE_BYTES, fingerprint
from nearveil.privacy.checks import is_integer
from nearveil.wire.frames import HEADER_BYTES, MOST_FEATURES, Kind, WireError, frame, unframe

Singles = NDArray[np.float32]
Rows = NDArray[np.float32] | NDArray[np.float64]
Bytes = NDArray[np.uint8]

ID_BYTES = 4
_COMPACT_DIMENSIONS = 90  # dimensions up to which codes of 128 bytes lose less than 0.01 of NN-recall
_FACTOR_BYTES = 2  # a float16
_DIMENSIONS = 4  # of the projection for each byte: more gain nothing on image features, and enlarge the table
_ROWS = 1 << 16  # enough to learn 256 centroids from
_SAMPLE = 4096  # items that are used as queries when scores are corrected
_NEAR = 30  # nearest sample rows of an item
_BLOCK = 4096
_CENTROIDS = 256  # a byte names one of them
_MOST_DIMENSIONS = 4  # that a byte of a product code stands for: more would make small answers large in memory
MOST_COLUMNS = 2 * MOST_FEATURES  # of a projection: groups of one size are filled up
_MISFIT = "the table of codes has arrays that do not fit each other"


class Codes(ABC):
    """A public table that encodes items for answers, and scores codes by inner products with projected queries."""

    # The constructor of a subclass takes the arrays of its table, checks them, and keeps them under the same names.

    form: ClassVar[str]  # the kind of the table on the wire
    fields: ClassVar[dict[str, tuple[str, tuple[int, ...]]]]  # type and largest shape of every array of the table
    dimension: int  # of the features
    columns: int  # of a decoded row
    width: int  # bytes of an item's code

    @cached_property
    def nbytes(self) -> int:
        """The size of the table in memory."""
        return sum(getattr(self, name).nbytes for name, (_, largest) in self.fields.items() if largest)

    def prepare(self, features: SpreadRows) -> Self:
        """Return a table that encodes features of a gallery; a stored one may lack what only the server has."""
        del features
        return self

    @abstractmethod
    def encode(self, features: Singles) -> Bytes:
        """Return the codes, shape (n, width), of features, shape (n, d)."""

    @abstractmethod
    def project(self, queries: Rows) -> Rows:
        """Return queries in the space of decoded rows."""

    @abstractmethod
    def decode(self, codes: Bytes) -> Singles:
        """Return the approximate rows of codes."""

    def scores(self, queries: Rows, codes: Bytes) -> Singles:
        """Return approximate inner products, shape (q, n), of full queries, shape (q, d), with n items."""
        return np.asarray(self.project(queries) @ self.decode(codes).T, dtype=np.float32)


class WholeCodes(Codes):
    """Features in 16 bits for each number: no loss and no compression."""

    form = "codes-whole"
    fields: ClassVar = {"dimension": ("<i8", ())}

    def __init__(self, dimension: int) -> None:
        if not 1 <= dimension <= MOST_FEATURES:
            raise WireError(f"the table of codes must be of 1 to {MOST_FEATURES} dimensions")
        self.dimension = self.columns = int(dimension)
        self.width = 2 * self.dimension

    def encode(self, features: Singles) -> Bytes:
        return np.ascontiguousarray(features, dtype="<f2").view(np.uint8)

    def project(self, queries: Rows) -> Rows:
        return queries

    def decode(self, codes: Bytes) -> Singles:
        return np.ascontiguousarray(codes).view("<f2").astype(np.float32)


class ScalarCodes(Codes):
    """Each dimension by itself, in two bytes or one: for rows of few dimensions, with almost no loss."""

    # Rows are rotated by the principal directions, so that dimensions in one byte are those that vary least.

    form = "codes-scalar"
    fields: ClassVar = {
        "projection": ("<f4", (MOST_FEATURES, MOST_COLUMNS)),
        "lowest": ("<f4", (MOST_COLUMNS,)),
        "steps": ("<f4", (MOST_COLUMNS,)),
        "double": ("<i8", ()),  # dimensions in two bytes, which come first
    }

    def __init__(self, projection: Singles, lowest: Singles, steps: Singles, double: int) -> None:
        if not projection.shape[1] == len(lowest) == len(steps) or not 0 <= double <= len(steps):
            raise WireError(_MISFIT)
        self.projection, self.lowest, self.steps, self.double = projection, lowest, steps, int(double)
        self.dimension, self.columns = projection.shape
        self.width = len(steps) + self.double

    @classmethod
    def fit(cls, features: SpreadRows, width: int) -> Self:
        """Learn codes of at most `width` bytes, at least one for each dimension of `features`."""
        dimension = features.shape[1]
        double = min(dimension, width - dimension)
        projection = _find_directions(_sample_rows(features, _ROWS), dimension)
        lowest, highest = features.reduce(_find_bounds, _join_bounds, projection, stage="measuring")
        levels = np.where(np.arange(dimension) < double, 65535, 255)
        steps = np.maximum((highest - lowest) / levels, 1e-30).astype(np.float32)
        return cls(projection, lowest, steps, double)

    def encode(self, features: Singles) -> Bytes:
        levels = np.rint((features @ self.projection - self.lowest) / self.steps)
        wide = np.clip(levels[:, : self.double], 0, 65535).astype("<u2")
        narrow = np.clip(levels[:, self.double :], 0, 255).astype(np.uint8)
        return np.concatenate([wide.view(np.uint8).reshape(len(wide), -1), narrow], axis=1)

    def project(self, queries: Rows) -> Rows:
        return np.asarray(queries @ self.projection)

    def decode(self, codes: Bytes) -> Singles:
        wide = np.ascontiguousarray(codes[:, : 2 * self.double]).view("<u2")
        levels = np.concatenate([wide, codes[:, 2 * self.double :]], axis=1, dtype=np.float32)
        return np.asarray(levels * self.steps + self.lowest, dtype=np.float32)


class ProductCodes(Codes):
    """Product quantisation that spends its bytes where they change scores: for rows of many dimensions."""

    # A direction in which queries vary little hardly matters for a score, so the principal directions are weighted by
    # their root mean square. A code begins with a factor of 16 bits, which corrects the mean of its scores for the
    # items nearest to it. `sample` are the rows that the server computes factors from: without them, it can score, not
    # encode.

    form = "codes-product"
    fields: ClassVar = {
        "projection": ("<f4", (MOST_FEATURES, MOST_COLUMNS)),
        "weights": ("<f4", (MOST_COLUMNS,)),
        "mean": ("<f4", (MOST_COLUMNS,)),
        "centroids": ("<f4", (MOST_FEATURES, _CENTROIDS, _MOST_DIMENSIONS)),  # for every byte, 256 rows
    }

    def __init__(
        self, projection: Singles, weights: Singles, mean: Singles, centroids: Singles, sample: Singles | None = None
    ) -> None:
        groups, levels, size = centroids.shape
        if levels != _CENTROIDS:
            raise WireError(f"the table of codes must have {_CENTROIDS} centroids for each byte")
        if not projection.shape[1] == len(weights) == len(mean) == groups * size:
            raise WireError(_MISFIT)
        self.projection, self.weights, self.mean, self.centroids = projection, weights, mean, centroids
        self.sample = sample
        self.dimension, self.columns = projection.shape
        self.width = _FACTOR_BYTES + groups
        self._quantiser: Any = faiss.ProductQuantizer(groups * size, groups, 8)
        faiss.copy_array_to_vector(np.ascontiguousarray(centroids, np.float32).ravel(), self._quantiser.centroids)

    def __reduce__(self) -> tuple[Any, ...]:
        """Support pickling, which the quantiser does not."""
        return ProductCodes, (self.projection, self.weights, self.mean, self.centroids, self.sample)

    @classmethod
    def fit(cls, features: SpreadRows, width: int) -> Self:
        """Learn codes of `width` bytes, at least 3."""
        rows = _sample_rows(features, _ROWS)
        groups = width - _FACTOR_BYTES
        size = min(_DIMENSIONS, -(-rows.shape[1] // groups))
        projection = _find_directions(rows, min(groups * size, rows.shape[1]))
        # Groups have one size: the last is padded by directions without variance.
        projection = np.pad(projection, ((0, 0), (0, groups * size - projection.shape[1])))
        rotated = rows @ projection
        projection = projection[:, _order_dimensions(rotated.var(axis=0) * np.mean(rotated**2, axis=0), groups)]
        rotated = rows @ projection
        spread = np.sqrt(np.mean(rotated**2, axis=0))
        weights = np.maximum(spread, max(float(spread.max()), 1e-30) * 1e-4).astype(np.float32)
        mean = rotated.mean(axis=0)
        quantiser = faiss.ProductQuantizer(groups * size, groups, 8)
        quantiser.cp.niter = 12
        quantiser.cp.min_points_per_centroid = 1
        # A gallery of fewer than 256 items is repeated: then each item has its own centroid.
        weighted = np.resize((rotated - mean) * weights, (max(len(rows), _CENTROIDS), groups * size))
        with threadpool_limits(1, user_api="openmp"):  # threads cost more than they help at a few dimensions each
            quantiser.train(np.ascontiguousarray(weighted))
        centroids = faiss.vector_to_array(quantiser.centroids).reshape(groups, _CENTROIDS, size)
        return cls(projection, weights, mean, centroids).prepare(features)

    def prepare(self, features: SpreadRows) -> Self:
        if self.sample is not None:
            return self
        sample = _sample_rows(features, _SAMPLE)
        return type(self)(self.projection, self.weights, self.mean, self.centroids, sample)

    def encode(self, features: Singles) -> Bytes:
        weighted = (features @ self.projection - self.mean) * self.weights
        codes = np.asarray(self._quantiser.compute_codes(np.ascontiguousarray(weighted)), dtype=np.uint8)
        factors = self._fit_factors(features, self._reconstruct(codes)).astype("<f2")
        return np.concatenate([factors[:, None].view(np.uint8), codes], axis=1)

    def project(self, queries: Rows) -> Rows:
        return np.asarray(queries @ self.projection)

    def decode(self, codes: Bytes) -> Singles:
        factors = np.ascontiguousarray(codes[:, :_FACTOR_BYTES]).view("<f2").astype(np.float32)
        return np.asarray(self._reconstruct(np.ascontiguousarray(codes[:, _FACTOR_BYTES:])) * factors, dtype=np.float32)

    def _reconstruct(self, codes: Bytes) -> Singles:
        """Return the projected rows of codes without their factors."""
        return np.asarray(self._quantiser.decode(codes) / self.weights + self.mean, dtype=np.float32)

    def _fit_factors(self, features: Singles, rows: Singles) -> Singles:
        """Return the least-squares factor from coded to true scores of the nearest sample rows, for each item."""
        assert self.sample is not None
        factors = np.ones(len(features), np.float32)
        rotated = self.sample @ self.projection
        near = min(_NEAR, len(self.sample))
        for start in range(0, len(features), _BLOCK):
            block = slice(start, start + _BLOCK)
            true, coded = features[block] @ self.sample.T, rows[block] @ rotated.T
            true[true > 1 - 1e-6] = -np.inf  # the item itself is not a query
            nearest = np.argpartition(-true, near - 1, axis=1)[:, :near]
            true, coded = np.take_along_axis(true, nearest, axis=1), np.take_along_axis(coded, nearest, axis=1)
            coded[np.isinf(true)] = true[np.isinf(true)] = 0
            power = np.einsum("ij,ij->i", coded, coded)
            fitted = np.einsum("ij,ij->i", coded, true)
            np.divide(fitted, power, out=factors[block], where=power > 1e-12)
        return np.clip(factors, 0.5, 2.0)


def _find_bounds(rows: Singles, first: int, projection: Singles) -> Singles:
    del first
    rotated = rows @ projection
    return np.stack([rotated.min(axis=0), rotated.max(axis=0)])


def _join_bounds(first: Singles, second: Singles) -> Singles:
    return np.stack([np.minimum(first[0], second[0]), np.maximum(first[1], second[1])])


def make_codes(features: Singles | SpreadRows, code_bytes: int | Literal["auto"] | None) -> Codes:
    """Learn codes of `code_bytes` for each candidate, including its id; None for whole features."""
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
    """Return the codes of features in partitions."""
    codes = np.empty((len(features), table.width), np.uint8)
    for cut, part in zip(features.cuts, features.map(_encode_part, table, stage="making codes"), strict=True):
        codes[cut] = part
    return codes


def _encode_part(features: Singles, table: Codes) -> Bytes:
    return table.encode(features)


def _sample_rows(rows: SpreadRows, count: int) -> Singles:
    """Return at most `count` rows, evenly spaced over the gallery."""
    positions = np.linspace(0, len(rows) - 1, count).astype(np.intp) if len(rows) > count else np.arange(len(rows))
    return rows.take(positions, "taking rows")


def _find_directions(rows: Singles, count: int) -> Singles:
    """Return principal directions, shape (d, count), completed by orthogonal ones if there are too few rows."""
    if len(rows) > count:
        return np.asarray(PCA(count, svd_solver="covariance_eigh").fit(rows).components_.T, dtype=np.float32)
    basis, _ = np.linalg.qr(np.concatenate([rows.T, np.eye(rows.shape[1], dtype=np.float32)], axis=1))
    return np.asarray(basis[:, :count], dtype=np.float32)


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


_KINDS: dict[str, type[Any]] = {kind.form: kind for kind in (WholeCodes, ScalarCodes, ProductCodes)}
_LARGEST = {name: largest for kind in _KINDS.values() for name, (_, largest) in kind.fields.items()}


def codes_to_bytes(codes: Codes) -> bytes:
    """Return the public table, with which a client reads codes."""
    arrays = {name: np.asarray(getattr(codes, name), kind) for name, (kind, _) in codes.fields.items()}
    return Message(codes.form, _hash_arrays(arrays), arrays).to_bytes()


def codes_from_bytes(data: bytes) -> Codes:
    """Read a public table; nothing in it is trusted."""
    try:
        message = Message.from_bytes(data, _LARGEST)
    except ValueError as error:
        raise WireError(f"the table of codes cannot be read: {error}") from None
    kind = _KINDS.get(message.mechanism)
    if kind is None:
        raise WireError("unknown kind of table of codes")
    codes: Codes = kind(*(_get_array(message, name, *field) for name, field in kind.fields.items()))
    if codes.columns > 2 * codes.dimension:  # more would be slow to score, without better results
        raise WireError("the table of codes must have at most two columns for each feature")
    if codes_to_bytes(codes) != data:  # another fingerprint, unknown arrays, or another encoding
        raise WireError("the table of codes is not encoded canonically")
    return codes


def _hash_arrays(arrays: Mapping[str, NDArray[Any]]) -> str:
    return fingerprint(*(part for name in sorted(arrays) for part in (name, arrays[name])))


def _get_array(message: Message, name: str, kind: str, largest: tuple[int, ...]) -> NDArray[Any]:
    """Return an array of a message, or raise WireError if it is missing or has another type."""
    values, dimensions = message.arrays.get(name), len(largest)
    if values is None or values.dtype != np.dtype(kind) or values.ndim != dimensions or 0 in values.shape:
        raise WireError(f"the table of codes must hold {name!r}, an array of type {kind} with {dimensions} dimensions")
    return values


Extras = Literal["none", "thumbnails", "originals", "names", "metadata"]
EXTRAS: tuple[Extras, ...] = get_args(Extras)  # a flag is the position of its word

_SIZES = struct.Struct("<II")  # numbers of candidates, and of bytes of a code
LARGEST_ORIGINAL = 64 << 20  # bytes
IMAGE_HEADER_BYTES = 4  # of the content of an item: its length
LONGEST_NAME = 4096  # characters
LONGEST_ID = 512  # characters of an external id
LARGEST_METADATA = 64 << 10  # bytes of JSON, of one item
LARGEST_DETAILS = LARGEST_METADATA + 12 * (LONGEST_NAME + LONGEST_ID) + 100  # JSON may write a character in 12
# Characters that break a line, control a terminal, or change the direction of the text around them.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


@dataclass(frozen=True)
class Answer:
    """The server's answer: ids and codes of all candidates, and their extras if the query requests any."""

    # There is no second request: it would reveal which candidates are near, which the message hides.

    kind: ClassVar[Kind] = Kind.ANSWER
    header_bytes: ClassVar[int] = HEADER_BYTES + _SIZES.size

    ids: NDArray[np.uint32]  # of the candidates, increasing: their order reveals nothing
    codes: Bytes = field(repr=False)
    extras: Extras = "none"  # the kind of `contents`
    contents: tuple[bytes, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if self.ids.ndim != 1 or self.ids.dtype != np.uint32 or not len(self.ids):
            raise WireError("ids must be at least one number of 32 bits")
        codes = self.codes
        if codes.dtype != np.uint8 or codes.ndim != 2 or len(codes) != len(self.ids) or not codes.size:
            raise WireError("codes must hold a row of bytes for each id")
        _check_increasing(self.ids)
        self._check_contents()

    def _check_contents(self) -> None:
        if self.extras not in EXTRAS:
            raise WireError(f"extras must be one of {', '.join(EXTRAS)}")
        if len(self.contents) != (0 if self.extras == "none" else len(self.ids)):
            raise WireError("contents must be one for each id, or none at all")
        # The whole answer is refused, whichever items will be chosen.
        if self.extras == "metadata":
            for content in self.contents:
                read_details(content)
        if self.extras == "thumbnails" and not all(map(is_thumbnail, self.contents)):
            raise WireError("contents must be WebP, or empty, as thumbnails")
        if self.extras == "names" and not _are_names(self.contents):
            raise WireError(
                f"contents must be text in UTF-8, of at most {LONGEST_NAME} characters and without control characters, "
                "as names"
            )

    @property
    def nbytes(self) -> int:
        """The number of bytes on the wire."""
        extras_bytes = IMAGE_HEADER_BYTES * len(self.contents) + sum(map(len, self.contents))
        return self.header_bytes + 4 * len(self.ids) + self.codes.size + extras_bytes

    def to_bytes(self) -> bytes:
        """Serialize the answer, to the same bytes on every machine."""
        lengths = np.fromiter(map(len, self.contents), "<u4", len(self.contents))
        parts = [_SIZES.pack(*self.codes.shape), self.ids.astype("<u4").tobytes(), self.codes.tobytes()]
        return frame(Kind.ANSWER, b"".join([*parts, lengths.tobytes(), *self.contents]), EXTRAS.index(self.extras))

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read an answer; nothing in it is trusted."""
        kind, flags, body = unframe(data)
        if kind != Kind.ANSWER:
            raise WireError(f"data must be an answer, not of kind {kind.name}")
        return cls.from_body(flags, body)

    @classmethod
    def from_body(cls, flags: int, body: bytes) -> Self:
        """Read the body of an answer's frame."""
        if len(body) < _SIZES.size:
            raise WireError("data is truncated")
        count, width = _SIZES.unpack_from(body)
        if not count or not width:
            raise WireError("ids must be at least one, with codes of at least one byte")
        middle = _SIZES.size + 4 * count
        end = middle + count * width
        extras = EXTRAS[flags]
        lengths = 0 if extras == "none" else IMAGE_HEADER_BYTES * count
        if len(body) < end + lengths or (extras == "none" and len(body) != end):
            raise WireError("data is truncated, or has bytes after its end")
        ids = np.frombuffer(body, "<u4", count, _SIZES.size).astype(np.uint32)
        _check_increasing(ids)  # before contents are cut
        codes = np.frombuffer(body, np.uint8, count * width, middle).reshape(count, width)
        sizes = np.frombuffer(body, "<u4", lengths // IMAGE_HEADER_BYTES, end)
        return cls(ids, codes, extras, _cut(body, end + lengths, sizes))


def _cut(body: bytes, start: int, sizes: NDArray[np.uint32]) -> tuple[bytes, ...]:
    """Return the contents at the end of an answer, which they must fill to its last byte."""
    if len(sizes) and start + int(sizes.sum(dtype=np.int64)) != len(body):
        raise WireError("data is truncated, or has bytes after its end")
    contents = []
    for size in map(int, sizes):  # one by one: a list of numbers would be many times as large as the answer
        contents.append(body[start : start + size])
        start += size
    return tuple(contents)


def _check_increasing(ids: NDArray[np.uint32]) -> None:
    if (ids[1:] <= ids[:-1]).any():
        raise WireError("ids must rise, each once")


def encode_name(name: str) -> bytes:
    """Encode a name for an answer; control characters are replaced."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", name[:LONGEST_NAME]).encode()


class ItemDetails(NamedTuple):
    """The details of an item in an answer with metadata."""

    name: str = ""
    external_id: str | None = None
    metadata: Mapping[str, Any] = MappingProxyType({})


def encode_details(details: ItemDetails) -> bytes:
    """Encode details for an answer, in JSON."""
    name = encode_name(details.name).decode()
    values = {"name": name, "id": details.external_id, "metadata": dict(details.metadata)}
    return json.dumps(values, ensure_ascii=False, separators=(",", ":")).encode()


def read_details(data: bytes) -> ItemDetails:
    """Read the bytes of :func:`encode_details`; nothing in them is trusted. Empty bytes are a deleted item."""
    if not data:
        return ItemDetails()
    try:
        if len(data) > LARGEST_DETAILS:
            raise ValueError
        values = _DECODER.decode(data.decode())
        name, external_id, metadata = values.pop("name"), values.pop("id"), values.pop("metadata")
        fits = isinstance(name, str) and len(name) <= LONGEST_NAME and not _CONTROL.search(name)
        fits = fits and (external_id is None or (isinstance(external_id, str) and len(external_id) <= LONGEST_ID))
        if values or not fits or not isinstance(metadata, dict):
            raise ValueError
    except (ValueError, KeyError, AttributeError, RecursionError, TypeError):
        raise WireError("contents must be JSON of a name, an id and metadata, as metadata") from None
    return ItemDetails(name, external_id, metadata)


def _refuse_constant(_: str) -> Any:
    raise ValueError


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)  # json.loads would make one for each call


def _are_names(images: Sequence[bytes]) -> bool:
    """Return whether all are valid names, checked at once."""
    try:
        names = b"\n".join(images).decode().split("\n")
    except UnicodeDecodeError:
        return False
    return (
        len(names) == len(images)  # otherwise a name has a line break
        and max(map(len, names), default=0) <= LONGEST_NAME
        and not _CONTROL.search("".join(names))
    )


def is_thumbnail(image: object) -> bool:
    """Return whether bytes are a valid thumbnail: WebP, or empty."""
    return isinstance(image, bytes) and (not image or (image[:4] == b"RIFF" and image[8:12] == b"WEBP"))
