"""Metrics of galleries, and rows whose inner products order items as a metric does (``docs/theory/metrics.md``).

Items and queries are encoded once. For one query, the inner product of its query row with an item row grows as the item
comes nearer, so codes, local copies and sealed scores need inner products only. Everything here is public: the DP
guarantee of a message holds for any space, as it holds for any map.
"""

from dataclasses import dataclass, field
from typing import Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray

Metric = Literal["cosine", "dot", "euclidean", "centred cosine"]
METRICS: tuple[Metric, ...] = get_args(Metric)
CENTRED: Metric = "centred cosine"  # of version 0.2: the cosine after subtracting the mean of the gallery
METRIC_NAMES: dict[Metric, str] = {  # for people
    "cosine": "cosine",
    "dot": "dot product",
    "euclidean": "Euclidean distance",
    "centred cosine": "centred cosine",
}
NORMALIZED: frozenset[Metric] = frozenset({"cosine", CENTRED})  # an index stores rows of norm one

Floats = NDArray[np.float64]
_MEAN_SHARE = 2.0  # longest part of the mean in a direction, relative to the spread around the mean
_PROBED = 1.5  # norm of a point near to items with large products, relative to that of all items
_TINY = 1e-30  # a row whose numbers are all smaller has no direction
SMALLEST_SCALE, LARGEST_SCALE = 1e-9, 1e9


def check_metric(metric: str) -> Metric:
    """Return a metric, or raise."""
    if metric not in METRICS:
        raise ValueError(f"metric must be one of {', '.join(METRICS[:3])}")
    return metric


def scale_to_unit(rows: Floats) -> Floats:
    """Divide rows by their norms, in place; rows of zeros stay zeros."""
    # Divide by the largest entry first: squares of tiny or huge numbers leave the range of a float.
    largest = np.abs(rows).max(axis=1, keepdims=True)
    np.divide(rows, largest, out=rows, where=largest > 0)
    norms = np.sqrt(np.einsum("ij,ij->i", rows, rows))[:, None]
    np.divide(rows, norms, out=rows, where=norms > 0)
    return rows


@dataclass(frozen=True, eq=False)
class ScoreSpace:
    """How a gallery encodes rows for scores: a metric with public constants, which only affect accuracy.

    Examples
    --------
    >>> rows = np.array([[3.0, 4.0], [0.0, 2.0], [5.0, 0.0]])
    >>> space = ScoreSpace.fit("euclidean", rows)
    >>> items = space.encode(rows)
    >>> query = space.encode(np.array([[3.0, 3.0]]))
    >>> space.measure(query, space.make_queries(query) @ items.T).round(3)
    array([[1.   , 3.162, 3.606]])
    """

    metric: Metric
    mean: Floats = field(repr=False)  #: subtracted from normalised ("cosine") or scaled rows, shape (d,)
    scale: float = 1.0  #: divides rows, so that their root mean square norm is about one ("dot", "euclidean")
    balance: float = 1.0  #: weight of the coordinate that holds the norms of items ("euclidean")

    def __post_init__(self) -> None:
        mean = np.array(self.mean, np.float64)
        mean.setflags(write=False)
        object.__setattr__(self, "mean", mean)

    @property
    def width(self) -> int:
        """The number of columns of encoded rows."""
        return len(self.mean) + (self.metric == "euclidean")

    @property
    def axis(self) -> Floats | None:
        """The direction in which query rows are long and item rows vary little, shape (width,), if there is one."""
        if self.metric == "euclidean":
            return np.asarray(np.eye(self.width)[-1])
        return None if self.metric == CENTRED else self.mean

    @classmethod
    def fit(cls, metric: Metric, rows: NDArray[np.floating]) -> Self:
        """Learn the constants from public rows, shape (n, d), or a sample of them."""
        values = _normalize(rows) if metric == "cosine" else np.asarray(rows, np.float64)
        mean = _round(values.mean(axis=0))
        if metric in NORMALIZED:
            return cls(metric, mean)
        offset = mean if metric == "euclidean" else np.zeros_like(mean)
        scale = _limit(np.sqrt(np.mean(((values - offset) ** 2).sum(axis=1))))
        if metric == "dot":
            return cls(metric, _round(mean / scale), scale)
        squares = (((values - mean) / scale) ** 2).sum(axis=1)
        # Norms of items then vary as much as other coordinates matter: codes spend their bytes accordingly.
        return cls(metric, _round(mean / scale), scale, max(float(np.sqrt(squares.std() / 2)), 1e-3))

    def encode(self, rows: NDArray[np.floating]) -> Floats:
        """Return item rows, shape (n, width), of rows as given, shape (n, d)."""
        if self.metric == "cosine":
            return _normalize(rows) - self.mean
        values = np.asarray(rows, np.float64)
        if self.metric == CENTRED:
            return scale_to_unit(values - self.mean)
        values = values / self.scale - self.mean
        if self.metric == "dot":
            return values
        squares = np.einsum("ij,ij->i", values, values)
        return np.concatenate([values, (1 - squares[:, None]) / (2 * self.balance)], axis=1)

    def make_queries(self, encoded: NDArray[np.floating]) -> Floats:
        """Return query rows, shape (n, width): their inner products with item rows are scores."""
        values = np.array(encoded, np.float64)
        if self.metric == "euclidean":
            values[:, -1] = self.balance
        elif self.metric != CENTRED:
            values += self.mean
        return scale_to_unit(values) if self.metric == "dot" else values

    def make_probes(self, encoded: NDArray[np.floating]) -> Floats:
        """Return points, shape (n, width), near to which an item row is likely to have a large score."""
        # Items with large products are long: a point as long as the longest of them is near to them.
        return _PROBED * self.make_queries(encoded) - self.mean if self.metric == "dot" else np.array(encoded)

    def make_directions(self, encoded: NDArray[np.floating], *, lenient: bool = False) -> Floats:
        """Return rows of norm one, shape (n, width), by which a set of a map is chosen; zero only if `lenient`."""
        values = np.array(encoded, np.float64)
        if self.metric == "euclidean":
            values[:, -1] = 1.0
        elif self.metric == "dot":
            values = self.make_queries(values) - self.mean
        elif self.metric == "cosine":
            values += self._kept_mean
        if not lenient:
            # A server may send a suspect's feature as its mean, where it has no direction: an error would reveal it.
            values[np.abs(values).max(axis=1) < _TINY, 0] += 1.0
        return values if self.metric == CENTRED else scale_to_unit(values)

    @property
    def _kept_mean(self) -> Floats:
        """The part of the mean in directions for the cosine: all of it, unless rows hardly differ beside it."""
        length = float(np.linalg.norm(self.mean))
        spread = np.sqrt(max(1 - length**2, 0.0))  # of rows of norm one
        return np.asarray(self.mean * min(1.0, _MEAN_SHARE * spread / max(length, _TINY)))

    def measure(self, encoded: NDArray[np.floating], scores: NDArray[np.floating]) -> Floats:
        """Return the metric's values, shape (q, n), of scores of encoded queries: cosines, products or distances."""
        values = np.asarray(scores, np.float64)
        if self.metric == CENTRED:
            return values
        with np.errstate(all="ignore"):  # numpy may be set to raise: an error for some queries would reveal them
            queries = self.make_queries(encoded)
            if self.metric == "euclidean":
                squares = (queries[:, :-1] ** 2).sum(axis=1, keepdims=True) + 1
                return np.asarray(self.scale * np.sqrt(np.maximum(squares - 2 * values, 0)))
            values = values + (queries @ self.mean)[:, None]
            if self.metric == "dot":
                values *= self.scale**2 * np.linalg.norm(encoded + self.mean, axis=1, keepdims=True)
            return values


def _normalize(rows: NDArray[np.floating]) -> Floats:
    return scale_to_unit(np.array(rows, np.float64))


def _round(mean: Floats) -> Floats:
    """Round a mean to 32 bits, as maps are stored."""
    return mean.astype(np.float32).astype(np.float64)


def _limit(scale: float) -> float:
    """Return a scale within the limits; rows that are all equal have none."""
    return float(np.clip(scale, SMALLEST_SCALE, LARGEST_SCALE)) if scale > 0 else 1.0
