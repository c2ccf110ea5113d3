"""Codes: compressed rows of items, by which clients rank them, and the public tables that decode them."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from nearveil.cluster import SpreadRows, cut_rows
from nearveil.lazy import LateModule
from nearveil.mechanisms.messages import Message, fingerprint
from nearveil.metrics import CENTRED, ScoreSpace
from nearveil.privacy.checks import is_integer
from nearveil.wire.frames import MOST_FEATURES, WireError

if TYPE_CHECKING:
    import faiss
else:  # only to learn codes and to encode rows
    faiss = LateModule("faiss", "gallery")

Singles = NDArray[np.float32]
Longs = NDArray[np.int64]
Rows = NDArray[np.float32] | NDArray[np.float64]
Bytes = NDArray[np.uint8]
CodeBytes = int | Literal["auto"] | None

ID_BYTES = 4
_FACTOR_BYTES = 2  # a float16
_DIMENSIONS = 4  # of the projection for each byte: more gain nothing on image features, and enlarge the table
_ROWS = 1 << 16  # enough to learn 256 centroids from
_SAMPLE = 4096  # items that are used as queries when scores are corrected
_NEAR = 30  # nearest sample rows of an item
_BLOCK = 4096
_CENTROIDS = 256  # a byte names one of them
_PASSES = 12  # of k-means
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

    def prepare(self, features: SpreadRows, space: ScoreSpace) -> Self:
        """Return a table that encodes item rows of a gallery; a stored one may lack what only the server has."""
        del features, space
        return self

    @abstractmethod
    def encode(self, features: Singles) -> Bytes:
        """Return the codes, shape (n, width), of item rows, shape (n, d)."""

    @abstractmethod
    def project(self, queries: Rows) -> Rows:
        """Return queries in the space of decoded rows."""

    @abstractmethod
    def decode(self, codes: Bytes) -> Singles:
        """Return the approximate rows of codes."""

    @property
    @abstractmethod
    def bounds(self) -> Singles:
        """The lowest and highest number of each column of a decoded row, shape (2, columns)."""

    def measure_clipping(self, features: Singles, space: ScoreSpace) -> float:
        """Return the largest error that the bounds cause in the score of an item row with itself."""
        # Magnitudes are added: errors of a long row in its norm and in its other columns would cancel.
        rows, queries = self.project(features), self.project(space.make_queries(features))
        return float((np.abs(queries) * np.abs(rows - np.clip(rows, *self.bounds))).sum(axis=1).max(initial=0))

    def scores(self, queries: Rows, codes: Bytes) -> Singles:
        """Return approximate inner products, shape (q, n), of query rows, shape (q, d), with n items."""
        return self.compare(self.project(queries), codes)

    def compare(self, projected: Rows, codes: Bytes) -> Singles:
        """Return the scores of projected queries with n items."""
        return np.asarray(projected @ self.decode(codes).T, dtype=np.float32)


class WholeCodes(Codes):
    """Rows in 16 bits for each number: hardly any loss, and a table without arrays."""

    form = "codes-whole"
    fields: ClassVar = {"dimension": ("<i8", ())}
    kind: ClassVar[np.dtype[Any]] = np.dtype("<f2")

    def __init__(self, dimension: int) -> None:
        if not 1 <= dimension <= MOST_FEATURES:
            raise WireError(f"the table of codes must be of 1 to {MOST_FEATURES} dimensions")
        self.dimension = self.columns = int(dimension)
        self.width = self.kind.itemsize * self.dimension

    @property
    def bounds(self) -> Singles:
        largest = np.finfo(self.kind).max
        return np.full((2, self.columns), [[-largest], [largest]], np.float32)

    def encode(self, features: Singles) -> Bytes:
        return np.ascontiguousarray(np.clip(features, *self.bounds), self.kind).view(np.uint8)

    def project(self, queries: Rows) -> Rows:
        return queries

    def decode(self, codes: Bytes) -> Singles:
        return np.ascontiguousarray(codes).view(self.kind).astype(np.float32)


class ExactCodes(WholeCodes):
    """Rows in 32 bits for each number, as they are compared: no loss."""

    form = "codes-exact"
    kind = np.dtype("<f4")


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
        projection = _find_directions(sample_rows(features, _ROWS), dimension)
        lowest, highest = features.reduce(_find_bounds, _join_bounds, projection, stage="measuring")
        levels = np.where(np.arange(dimension) < double, 65535, 255)
        steps = np.maximum((highest - lowest) / levels, 1e-30).astype(np.float32)
        return cls(projection, lowest, steps, double)

    @property
    def bounds(self) -> Singles:
        levels = np.where(np.arange(self.columns) < self.double, 65535, 255)
        return np.stack([self.lowest, self.lowest + levels * self.steps]).astype(np.float32)

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

    # A direction in which query rows are small hardly matters for a score, so the principal directions of items are
    # weighted by the root mean square of queries. A code begins with a factor of 16 bits, which corrects the mean of
    # its scores for the queries nearest to it. `sample` are the rows that the server computes factors from: without
    # them, it can score, not encode.

    form = "codes-product"
    fields: ClassVar = {
        "projection": ("<f4", (MOST_FEATURES, MOST_COLUMNS)),
        "weights": ("<f4", (MOST_COLUMNS,)),
        "mean": ("<f4", (MOST_COLUMNS,)),
        "centroids": ("<f4", (MOST_FEATURES, _CENTROIDS, _MOST_DIMENSIONS)),  # for every byte, 256 rows
    }

    def __init__(
        self, projection: Singles, weights: Singles, mean: Singles, centroids: Singles,
        sample: "_Sample | None" = None,
    ) -> None:  # fmt: skip
        groups, levels, size = centroids.shape
        if levels != _CENTROIDS:
            raise WireError(f"the table of codes must have {_CENTROIDS} centroids for each byte")
        if not projection.shape[1] == len(weights) == len(mean) == groups * size:
            raise WireError(_MISFIT)
        self.projection, self.weights, self.mean, self.centroids = projection, weights, mean, centroids
        self.sample = sample
        self.dimension, self.columns = projection.shape
        self.width = _FACTOR_BYTES + groups
        with np.errstate(all="ignore"):  # a hostile table may hold numbers of any size
            decoded = centroids / weights.reshape(groups, 1, size) + mean.reshape(groups, 1, size)
            self._decoded = decoded.astype(np.float32).reshape(-1, size)  # rows of all bytes, group after group

    def __reduce__(self) -> tuple[Any, ...]:
        """Support pickling, which the quantiser does not."""
        return ProductCodes, (self.projection, self.weights, self.mean, self.centroids, self.sample)

    @cached_property
    def _quantiser(self) -> Any:
        """A quantiser of weighted rows."""
        groups, _, size = self.centroids.shape
        quantiser = faiss.ProductQuantizer(groups * size, groups, 8)
        faiss.copy_array_to_vector(np.ascontiguousarray(self.centroids, np.float32).ravel(), quantiser.centroids)
        return quantiser

    @classmethod
    def fit(cls, features: SpreadRows, width: int, space: ScoreSpace, passes: int = _PASSES) -> Self:
        """Learn codes of `width` bytes, at least 3."""
        rows = sample_rows(features, _ROWS)
        queries = space.make_queries(rows).astype(np.float32)
        groups = width - _FACTOR_BYTES
        size = min(_DIMENSIONS, -(-rows.shape[1] // groups))
        projection = _find_directions(rows, min(groups * size, rows.shape[1]))
        # Groups have one size: the last is padded by directions without variance.
        projection = np.pad(projection, ((0, 0), (0, groups * size - projection.shape[1])))
        importance = (rows @ projection).var(axis=0) * np.mean((queries @ projection) ** 2, axis=0)
        projection = projection[:, _order_dimensions(importance, groups)]
        rotated = rows @ projection
        spread = np.sqrt(np.mean((queries @ projection) ** 2, axis=0))
        weights = np.maximum(spread, max(float(spread.max()), 1e-30) * 1e-4).astype(np.float32)
        mean = rotated.mean(axis=0)
        quantiser = faiss.ProductQuantizer(groups * size, groups, 8)
        quantiser.cp.niter = passes
        quantiser.cp.min_points_per_centroid = 1
        # A gallery of fewer than 256 items is repeated: then each item has its own centroid.
        weighted = np.resize((rotated - mean) * weights, (max(len(rows), _CENTROIDS), groups * size))
        from threadpoolctl import threadpool_limits

        with threadpool_limits(1, user_api="openmp"):  # threads cost more than they help at a few dimensions each
            quantiser.train(np.ascontiguousarray(weighted))
        centroids = faiss.vector_to_array(quantiser.centroids).reshape(groups, _CENTROIDS, size)
        return cls(projection, weights, mean, centroids).prepare(features, space)

    def prepare(self, features: SpreadRows, space: ScoreSpace) -> Self:
        if self.sample is not None:
            return self
        rows = sample_rows(features, _SAMPLE)
        queries = space.make_queries(rows).astype(np.float32)
        sample = _Sample(queries, np.einsum("ij,ij->i", queries, rows))
        return type(self)(self.projection, self.weights, self.mean, self.centroids, sample)

    @property
    def bounds(self) -> Singles:
        codes = np.repeat(np.arange(_CENTROIDS, dtype=np.uint8)[:, None], len(self.centroids), axis=1)
        rows = self._reconstruct(codes)
        return np.stack([rows.min(axis=0), rows.max(axis=0)])

    def encode(self, features: Singles) -> Bytes:
        weighted = (features @ self.projection - self.mean) * self.weights
        codes = np.asarray(self._quantiser.compute_codes(np.ascontiguousarray(weighted)), dtype=np.uint8)
        factors = self._fit_factors(features, self._reconstruct(codes)).astype("<f2")
        return np.concatenate([factors[:, None].view(np.uint8), codes], axis=1)

    def project(self, queries: Rows) -> Rows:
        return np.asarray(queries @ self.projection)

    def decode(self, codes: Bytes) -> Singles:
        return self._reconstruct(np.ascontiguousarray(codes[:, _FACTOR_BYTES:])) * _read_factors(codes)

    def compare(self, projected: Rows, codes: Bytes) -> Singles:
        rows = self._reconstruct(np.ascontiguousarray(codes[:, _FACTOR_BYTES:]))
        return np.asarray(projected @ rows.T * _read_factors(codes).T, dtype=np.float32)

    def _reconstruct(self, codes: Bytes) -> Singles:
        """Return the projected rows of codes without their factors."""
        groups, size = len(self.centroids), self.centroids.shape[2]
        positions = codes + _CENTROIDS * np.arange(groups, dtype=np.int64)
        return self._decoded.take(positions, axis=0).reshape(len(codes), groups * size)

    def _fit_factors(self, features: Singles, rows: Singles) -> Singles:
        """Return the least-squares factor from coded to true scores of the nearest sample rows, for each item."""
        assert self.sample is not None
        queries, own_scores = self.sample
        factors = np.ones(len(features), np.float32)
        rotated, rounding = queries @ self.projection, 4 * _ROUNDING * np.linalg.norm(queries, axis=1)
        near = min(_NEAR, len(queries))
        for start in range(0, len(features), _BLOCK):
            block = slice(start, start + _BLOCK)
            true, coded = features[block] @ queries.T, rows[block] @ rotated.T
            lengths = np.linalg.norm(features[block], axis=1, keepdims=True)
            true[np.abs(true - own_scores) <= lengths * rounding] = -np.inf  # the item itself is not a query
            nearest = np.argpartition(-true, near - 1, axis=1)[:, :near]
            true, coded = np.take_along_axis(true, nearest, axis=1), np.take_along_axis(coded, nearest, axis=1)
            coded[np.isinf(true)] = true[np.isinf(true)] = 0
            power = np.einsum("ij,ij->i", coded, coded)
            fitted = np.einsum("ij,ij->i", coded, true)
            np.divide(fitted, power, out=factors[block], where=power > 1e-12)
        return np.clip(factors, 0.5, 2.0)


def _read_factors(codes: Bytes) -> Singles:
    return np.ascontiguousarray(codes[:, :_FACTOR_BYTES]).view("<f2").astype(np.float32)


def _find_bounds(rows: Singles, first: int, projection: Singles) -> Singles:
    del first
    rotated = rows @ projection
    return np.stack([rotated.min(axis=0), rotated.max(axis=0)])


def _join_bounds(first: Singles, second: Singles) -> Singles:
    return np.stack([np.minimum(first[0], second[0]), np.maximum(first[1], second[1])])


class _Sample(NamedTuple):
    """Query rows of some items, and the score of each with itself."""

    queries: Singles
    own_scores: Singles


def make_codes(features: Singles | SpreadRows, code_bytes: CodeBytes, space: ScoreSpace | None = None) -> Codes:
    """Learn codes of item rows, of `code_bytes` for each candidate with its id; "auto" chooses, None loses nothing."""
    rows = features if isinstance(features, SpreadRows) else SpreadRows.cut(features)
    space = space or ScoreSpace(CENTRED, np.zeros(features.shape[1]))
    if code_bytes is None:
        return ExactCodes(features.shape[1])
    if code_bytes == "auto":
        return learn_codes(rows, code_bytes, space).table
    if not is_integer(code_bytes):
        raise ValueError('code_bytes must be a whole number, "auto", or None for exact rows')
    width = int(code_bytes) - ID_BYTES
    if width <= _FACTOR_BYTES:
        raise ValueError(f"code_bytes must be at least {ID_BYTES + _FACTOR_BYTES + 1}")
    return _fit_width(rows, width, space)


def _fit_width(rows: SpreadRows, width: int, space: ScoreSpace, passes: int = _PASSES) -> Codes:
    return ScalarCodes.fit(rows, width) if rows.shape[1] <= width else ProductCodes.fit(rows, width, space, passes)


KEPT_RECALL = 0.99  # of the 10 nearest, by codes that are chosen automatically
_LARGEST_COPY = 256 << 20  # bytes of all codes and ids
_SMALLEST_LIMIT = 128  # bytes of a code and its id that are always allowed
_TRIAL_ROWS, _TRIAL_PASSES = 1 << 12, 4


def limit_code_bytes(n_items: int) -> int:
    """Return the most bytes of a code with its id that "auto" chooses in a gallery of so many items."""
    return max(_SMALLEST_LIMIT, _LARGEST_COPY // n_items)


def list_code_sizes(n_items: int, width: int) -> list[int]:
    """Return the bytes of the codes that "auto" tries, those with the smallest copy (codes and table) first."""
    limit = limit_code_bytes(n_items) - ID_BYTES
    sizes = [
        size
        for size in (width // 4, width // 2, width, width + width // 8, width + width // 2, 2 * width, 4 * width)
        if size > _FACTOR_BYTES
    ]
    allowed = [size for size in sizes if size <= limit] or [min(limit, width)]
    return sorted(allowed, key=lambda size: n_items * size + count_table_bytes(size, width))


def estimate_code_bytes(n_items: int, width: int) -> int:
    """Return the bytes of a code without its id that "auto" is most likely to choose: it depends on the data."""
    # A byte or a little more for each number keeps .99 of the 10 nearest on features of images and of words.
    sizes = list_code_sizes(n_items, width)
    return next((size for size in sizes if size >= width + width // 8), max(sizes))


def count_table_bytes(size: int, width: int) -> int:
    """Return the bytes of the table of codes of `size` bytes for rows of `width` numbers."""
    if size in (2 * width, 4 * width):
        return 0
    if size >= width:
        return 4 * width * (width + 2)
    groups = size - _FACTOR_BYTES
    return 4 * groups * min(_DIMENSIONS, -(-width // groups)) * (width + 2 + _CENTROIDS)


class LearnedCodes(NamedTuple):
    """A table, the codes of all items, and the share of the 10 nearest that they keep."""

    table: Codes
    codes: Bytes
    recall: float


def learn_codes(rows: SpreadRows, code_bytes: CodeBytes, space: ScoreSpace) -> LearnedCodes:
    """Learn codes and encode a gallery; "auto" takes the smallest copy that keeps 0.99 of the 10 nearest, or the best.

    The recall is measured on a sample of the items, each as a query without itself.
    """
    if code_bytes != "auto":
        return _encode(make_codes(rows, code_bytes, space), rows, space)
    width, tried = rows.shape[1], list[LearnedCodes]()
    sizes, trial_recall = list_code_sizes(len(rows), width), 1.0
    for size in sizes:
        if size < width and len(sizes) > 1:  # learning product codes takes long: try a part of the gallery first
            if 1 - trial_recall > 3 * (1 - KEPT_RECALL):
                continue  # a smaller code lost so much that this one, of twice the size, will not do
            trial = SpreadRows.cut(sample_rows(rows, _TRIAL_ROWS))
            trial_recall = _encode(ProductCodes.fit(trial, size, space, _TRIAL_PASSES), trial, space).recall
            if trial_recall < KEPT_RECALL:
                continue
        whole = {2 * width: WholeCodes, 4 * width: ExactCodes}.get(size)
        table = _fit_width(rows, size, space) if whole is None else whole(width)
        tried.append(_encode(table, rows, space))
        if tried[-1].recall >= KEPT_RECALL:
            return tried[-1]
    return max(tried, key=lambda learned: learned.recall)


def _encode(table: Codes, rows: SpreadRows, space: ScoreSpace) -> LearnedCodes:
    codes = np.empty((len(rows), table.width), np.uint8)
    for cut, part in zip(rows.cuts, rows.map(_encode_part, table, stage="making codes"), strict=True):
        codes[cut] = part
    return LearnedCodes(table, codes, measure_codes(table, codes, rows, space))


def measure_codes(table: Codes, codes: Bytes, rows: SpreadRows, space: ScoreSpace, n_queries: int = 400) -> float:
    """Return the share of the 10 nearest other items that codes keep, with a sample of the items as queries."""
    positions = np.unique(np.linspace(0, len(rows) - 1, min(n_queries, len(rows))).astype(np.intp))
    k = min(_MEASURED, len(rows) - 1)
    if not k:
        return 1.0
    queries = space.make_queries(rows.take(positions, "taking queries")).astype(np.float32)
    exact = rows.reduce(_search_rows, _merge, queries, k + 1, stage="measuring codes")
    projected = np.asarray(table.project(queries), np.float32)
    parts = (_search_rows(table.decode(codes[cut]), cut.start, projected, k + 1) for cut in cut_rows(len(codes), _ROWS))
    best = next(parts)
    for part in parts:
        best = _merge(best, part)
    lists = (_drop_self(nearest, positions)[:, :k] for nearest in (best[1], exact[1]))
    items = [rows.take(part.ravel(), "taking items").reshape(*part.shape, -1) for part in lists]
    values, least = (np.einsum("qd,qkd->qk", queries, part, dtype=np.float64) for part in items)
    # Less the rounding of 32-bit numbers: ties count as kept.
    rounding = _ROUNDING * np.einsum("qd,qkd->qk", np.abs(queries), np.abs(items[0]))
    return float((values >= least.min(axis=1, keepdims=True) - rounding).mean())


_MEASURED = 10  # nearest items in the recall of codes
_ROUNDING = 2.0**-22  # of a sum, relative to that of absolute values


def _search_rows(rows: Singles, first: int, queries: Singles, count: int) -> tuple[Singles, NDArray[np.int64]]:
    """Return scores and positions of a partition's best rows; positions begin with `first`."""
    scores, positions = faiss.knn(queries, rows, min(count, len(rows)), metric=faiss.METRIC_INNER_PRODUCT)
    padding = ((0, 0), (0, count - scores.shape[1]))
    return np.pad(scores, padding, constant_values=-np.inf), np.pad(positions + first, padding, constant_values=-1)


def _merge(first: tuple[Singles, Any], second: tuple[Singles, Any]) -> tuple[Singles, NDArray[np.int64]]:
    scores, positions = np.stack([first[0], second[0]]), np.stack([first[1], second[1]])
    merged: tuple[Singles, NDArray[np.int64]] = faiss.merge_knn_results(scores, positions, keep_max=True)
    return merged


def _drop_self(nearest: NDArray[np.int64], positions: NDArray[np.intp]) -> NDArray[np.int64]:
    """Return lists without the item of each, or without the last entry."""
    is_self = nearest == positions[:, None]
    is_self[~is_self.any(axis=1), -1] = True
    others: NDArray[np.int64] = nearest[~is_self].reshape(len(nearest), -1)
    return others


def _encode_part(features: Singles, table: Codes) -> Bytes:
    return table.encode(features)


def sample_rows(rows: SpreadRows, count: int) -> Singles:
    """Return at most `count` rows, evenly spaced over the gallery."""
    positions = np.linspace(0, len(rows) - 1, count).astype(np.intp) if len(rows) > count else np.arange(len(rows))
    return rows.take(positions, "taking rows")


def _find_directions(rows: Singles, count: int) -> Singles:
    """Return principal directions, shape (d, count), completed by orthogonal ones if there are too few rows."""
    if len(rows) > count:
        from sklearn.decomposition import PCA

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


_KINDS: dict[str, type[Any]] = {kind.form: kind for kind in (WholeCodes, ExactCodes, ScalarCodes, ProductCodes)}
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
