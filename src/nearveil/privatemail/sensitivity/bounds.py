"""The sound bounds; proofs: ``docs/theory/sensitivity.md``.

Theorems A and A': one private target among public anchors. The target's row and the anchors' rows have separate bounds,
and the smaller theorem counts for each. Theorems B and B': any one record of a private data set. Write
u = 1 / bandwidth^2 and a = exp(-2u), the least weight between unit rows.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import cdist

from nearveil.cluster import cut_rows
from nearveil.privacy.checks import check_nonnegative, check_rows
from nearveil.privatemail.graph import gaussian_graph, label_graph
from nearveil.privatemail.graph.labels import Encoding

Norm = Literal["l2", "l1"]
Floats = NDArray[np.float64]

MARGIN = 1 + 1e-9  # far above the rounding of a bound in double precision
SIGNS_LIMIT = 10  # up to so many columns, all 2^(k-1) sign patterns are tried: the L1 bound is exact
_BLOCK = 512  # rows of a distance matrix that are in memory at a time
_METRIC = {"l2": "euclidean", "l1": "cityblock"}


def check_error_bound(value: float) -> float:
    """Return the relative error of the weights, in [0, 1), or raise."""
    error_bound = check_nonnegative(value, "error_bound")
    if error_bound >= 1:
        raise ValueError(
            "error_bound must be below 1: a graph of neighbours, which omits edges, has no sensitivity bound. "
            "Use an exact or a series graph"
        )
    return error_bound


def check_start(start: Any, rows: int | None = None) -> Floats:
    """Return the start minus its mean row, or raise. Steps commute with translations, so bounds do not change."""
    array = check_rows(start, "start")
    if rows is not None and array.shape[0] != rows:
        raise ValueError(f"start must have {rows} rows, the target's first and then one for each anchor")
    if array.shape[0] < 2:
        raise ValueError(f"start has {array.shape[0]} row(s); it needs at least 2")
    centred: Floats = array - array.mean(axis=0)
    largest = float(np.max(np.abs(centred)))
    if largest and not 1e-60 < largest < 1e60:  # squares would lose digits
        raise ValueError("start must have entries between 1e-60 and 1e60 in size: the query is linear in it, rescale")
    return centred


def check_result(bound: float) -> float:
    """Return a bound, or raise if it overflowed."""
    if not np.isfinite(bound):
        raise ValueError("the bound overflows: use a larger bandwidth, or a smaller label_weight")
    return float(bound)


def compute_row_norms(rows: Floats, norm: Norm) -> Floats:
    """Return the norm of each row."""
    return np.asarray(np.linalg.norm(rows, axis=1, ord=1 if norm == "l1" else 2), dtype=np.float64)


def combine_norms(parts: Floats, norm: Norm) -> float:
    """Return the norm of a matrix from the norms of its rows."""
    return float(np.sum(parts) if norm == "l1" else np.linalg.norm(parts))


def iterate_distances(rows: Floats, norm: Norm) -> Iterator[tuple[slice, Floats]]:
    """Yield the matrix of distances between `rows`, a block of its rows at a time."""
    for block in cut_rows(len(rows), _BLOCK):
        yield block, cdist(rows[block], rows, _METRIC[norm])


def compute_diameter(rows: Floats, norm: Norm) -> float:
    """Return the largest distance between two of `rows`."""
    return max(float(distances.max()) for _, distances in iterate_distances(rows, norm))


def sign_patterns(columns: int) -> Floats:
    """Return all sign vectors that start with plus: ``|y|_1`` is the largest ``|e.y|`` over them."""
    patterns = np.arange(2 ** (columns - 1))[:, None] >> np.arange(columns)[None, :] & 1
    return np.asarray(1 - 2 * patterns[:, ::-1], dtype=np.float64)


def label_floor(n_classes: int, encoding: Encoding, label_bandwidth: float, may_be_unlabelled: bool = False) -> float:
    """Return b, the least weight of two labels."""
    if may_be_unlabelled:
        return 0.0
    if n_classes == 1:
        return 1.0
    squared = 2.0 if encoding == "one-hot" else float(n_classes - 1) ** 2
    return math.exp(-squared / (2 * label_bandwidth**2))


_SHARP = 50.0  # beyond this u Theorem A' is far above A, and its exponentials overflow
_ROUNDING = 64 * np.finfo(float).eps  # of a weight, and of sums of weights; generous


@dataclass(frozen=True)
class AnchorFigures:
    """Public quantities of the anchors."""

    anchors: Floats  # unit rows
    start: Floats  # row 0 is the target's
    u: float  # 1 / bandwidth^2
    norm: Norm
    degree: Floats  # d_i, the sum of the weights of anchor i to other anchors
    lever: Floats  # ``|A_i - d_i q_0|``: the effect of the target's weight on row i
    label_pull: Floats  # ``alpha |sum_j v_ij (q_i - q_j)|``: the label part, before the division by the degree
    form: Floats  # ``Q_c' K Q_c`` of Theorem A'

    @property
    def least(self) -> float:
        """The a of the theorems, the least weight between unit rows."""
        return float(np.exp(-2 * self.u))


def collect_figures(
    anchors: Floats,
    labels: object,
    start: Floats,
    *,
    bandwidth: float,
    label_weight: float,
    label_encoding: Encoding,
    label_bandwidth: float,
    norm: Norm,
) -> AnchorFigures:
    """Compute the public quantities in one pass over the weights between the anchors."""
    u, columns = bandwidth**-2, start.shape[1]
    target, anchor_start = start[0], start[1:]
    pull = np.zeros_like(anchor_start)
    if labels is not None and label_weight > 0:
        pull = label_weight * label_graph(labels, label_bandwidth, label_encoding).laplacian_matmul(anchor_start)
    if len(anchors) == 1:  # it moves half-way to its only neighbour, the target, for any weight
        zero = np.zeros(1)
        return AnchorFigures(anchors, start, u, norm, np.ones(1), zero, zero, np.zeros((columns, columns)))
    # Q_c' K Q_c = c H' (W + I) H: K + 1 is e^(u x_ci.x_cj) = e^u w_ij h_i h_j with
    # h_i = e^(u (|x_mean|^2 / 2 - x_i.x_mean)), and the columns of Q_c sum to zero, so the 1 has no effect and the
    # weights of the graph suffice.
    mean = anchors.mean(axis=0)
    exponents = min(u, _SHARP) * (mean @ mean / 2 - anchors @ mean)
    scaled = np.exp(exponents)[:, None] * (anchor_start - anchor_start.mean(axis=0))
    scale = float(np.exp(u)) if u <= _SHARP else 0.0
    # Relative to q_0, so that A_i - d_i q_0 is one sum.
    sides = np.column_stack([np.ones(len(anchors)), anchor_start - target, scaled])
    product = gaussian_graph(anchors, bandwidth, method="exact").matmul(sides)
    lever = product[:, 1 : 1 + columns] + pull
    form = scale * (scaled.T @ (product[:, 1 + columns :] + scaled))
    # K has entries near 0, but the sum has entries near 1: add their rounding.
    form += np.eye(columns) * scale * _ROUNDING * float(np.sum(np.linalg.norm(scaled, axis=1))) ** 2
    sizes = compute_row_norms(lever, norm), compute_row_norms(pull, norm)
    return AnchorFigures(anchors, start, u, norm, product[:, 0], *sizes, form)


def bound_target_a(public: AnchorFigures) -> float:
    """Theorem A for the target's row: ``1/2 tanh(u) diam(q_1..q_m)``."""
    return 0.5 * float(np.tanh(public.u)) * compute_diameter(public.start[1:], public.norm)


def bound_target_a_prime(public: AnchorFigures) -> float:
    """Theorem A' for the target's row: ``1/m sqrt(sinh(u) max_e e'Q_c'KQ_c e)``, K = expm1(u X_c X_c')."""
    if public.u > _SHARP:
        return float("inf")
    return float(np.sqrt(np.sinh(public.u) * bound_form(public.form, public.norm))) / len(public.anchors)


def bound_form(form: Floats, norm: Norm) -> float:
    """Bound ``e' form e`` over the e with ``e.y <= |y|``: unit vectors for L2, sign vectors for L1."""
    largest = max(float(np.linalg.eigvalsh(form)[-1]), 0.0)
    if norm == "l2":
        return largest
    columns = len(form)
    if columns <= SIGNS_LIMIT:
        signs = sign_patterns(columns)
        return max(float(np.max(np.einsum("ei,ij,ej->e", signs, form, signs))), 0.0)
    return min(columns * largest, float(np.sum(np.sqrt(np.maximum(np.diag(form), 0)))) ** 2)


def bound_anchors_a(public: AnchorFigures) -> float:
    """Theorem A for the anchors' rows: each weight of the target ranges over [a, 1] independently."""
    change = (1 - public.least) / ((public.degree + public.least) * (public.degree + 1))
    return combine_norms(public.lever * change / 2, public.norm)


def bound_anchors_a_double_prime(public: AnchorFigures) -> float:
    """Theorem A'' for the anchors' rows: ``sqrt((1 - a) (1 - sqrt a) / 2) |diag(g) X|_op``."""
    anchors = public.anchors
    weighted = (public.lever / (public.degree + public.least) ** 2)[:, None] * anchors
    tall = weighted if len(anchors) > anchors.shape[1] else weighted.T
    operator_norm = np.sqrt(max(float(np.linalg.eigvalsh(tall.T @ tall)[-1]), 0.0))
    factor = np.sqrt(np.expm1(-2 * public.u) * np.expm1(-public.u) / 2)
    return float(factor * operator_norm) * (np.sqrt(len(anchors)) if public.norm == "l1" else 1.0)


def bound_target_error(public: AnchorFigures, error_bound: float) -> float:
    """Bound the effect of the operator's error on the target's row (Theorem E)."""
    return error_bound / (1 - error_bound) * compute_diameter(public.start[1:], public.norm) / 4


def bound_anchors_error(public: AnchorFigures, error_bound: float) -> float:
    """Bound the effect of the operator's error on the anchors' rows (Theorem E)."""
    moved = compute_diameter(public.start, public.norm) / 4 + public.label_pull / (2 * (public.degree + public.least))
    return error_bound / (1 - error_bound) * combine_norms(moved, public.norm)


_DIRECTIONS = 128  # half a turn in this many steps costs a factor of 1 / cos(0.7 degrees) = 1.00008
_ROUNDS = 60  # Newton's steps; 4 to 8 are needed, and the error of an early stop is added


@dataclass(frozen=True)
class Box:
    """The ranges of the weights: ``w`` in [a, 1] and ``v`` in [b, 1]."""

    least: float  # a
    label_least: float  # b
    label_weight: float  # alpha
    private_labels: bool  # whether the label may be replaced with the record

    @property
    def moved_label_least(self) -> float:
        """The least v of an edge that a replaced record moves away from v = 1: b, or 1 if v is fixed."""
        return self.label_least if self.private_labels else 1.0

    @property
    def swing(self) -> float:
        """Kappa, the largest ``|alpha v - w|``."""
        return max(abs(self.label_weight - self.least), abs(self.label_weight * self.label_least - 1))

    @property
    def pull_range(self) -> float:
        """The range of (n-1) v_j / D for one j."""
        return 1 / self.least - self.moved_label_least

    def edge_range(self, degree: float) -> float:
        """Return the range of ``(alpha v - w) / (degree + w)``, at the corners of the box."""
        high = (self.label_weight - self.least) / (degree + self.least)
        return high - (self.label_weight * self.moved_label_least - 1) / (degree + 1)

    def largest_edge_range(self, n: int) -> float:
        """Return the largest :meth:`edge_range` over the degrees from (n-2) a to n-2."""
        degrees = [(n - 2) * self.least, float(n - 2)]
        rise = self.label_weight - self.least
        fall = 1 - self.label_weight * self.moved_label_least
        if rise < 0 < fall:  # only then does the range rise before it falls
            ratio = float(np.sqrt(-rise / fall))
            if ratio < 1:
                degrees.append(min(max((ratio - self.least) / (1 - ratio), degrees[0]), degrees[1]))
        return max(map(self.edge_range, degrees))

    def shift_range(self, n: int) -> float:
        """Return the range of ``1 / (degree + w)`` at the least degree."""
        degree = (n - 2) * self.least
        return (1 - self.least) / ((degree + self.least) * (degree + 1))


def bound_by_theorem_b(start: Floats, box: Box, bandwidth: float, norm: Norm) -> float:
    """Theorem B: ``sqrt((n-1) row^2 + own^2)``, or their sum for L1."""
    n = len(start)
    diameter = compute_diameter(start, norm)
    row = diameter / 2 * (box.swing * (n - 2) * box.shift_range(n) + box.edge_range((n - 2) * box.least))
    replaced = diameter / 2 * (float(np.tanh(bandwidth**-2)) + box.label_weight * box.pull_range)
    return float((n - 1) * row + replaced if norm == "l1" else np.hypot(np.sqrt(n - 1) * row, replaced))


def bound_by_theorem_b_prime(start: Floats, box: Box, bandwidth: float, norm: Norm) -> float:
    """Theorem B': the replaced row by fractional programmes, other rows by their distances."""
    n = len(start)
    replaced, spread = _bound_reaches(start, box, bandwidth, norm)
    shift = np.zeros(n) if n == 2 else box.swing * box.shift_range(n) * spread / 2
    edge = box.largest_edge_range(n) / 2
    largest = 0.0
    for records, distances in iterate_distances(start, norm):
        moved = shift[None, :] + edge * distances
        moved[np.arange(len(distances)), np.arange(n)[records]] = replaced[records]
        largest = max(largest, float(np.max(compute_row_norms(moved, norm))))
    return largest


def compute_mean_distances(start: Floats, norm: Norm) -> Floats:
    """Return the mean distance of each row to all other rows."""
    sums = [distances.sum(axis=1) for _, distances in iterate_distances(start, norm)]
    return np.asarray(np.concatenate(sums) / (len(start) - 1), dtype=np.float64)


def bound_replace_error(start: Floats, box: Box, error_bound: float, norm: Norm) -> float:
    """Bound the effect of the operator's error on all rows (Theorem E)."""
    moved = compute_diameter(start, norm) / 4 + box.label_weight * compute_mean_distances(start, norm) / (2 * box.least)
    return error_bound / (1 - error_bound) * combine_norms(moved, norm)


def _bound_reaches(start: Floats, box: Box, bandwidth: float, norm: Norm) -> tuple[Floats, Floats]:
    """Bound, for each record, the change of its row, and ``max_e sum_j |e.(q_i - q_j)|``."""
    # L1 up to 10 columns and L2 up to 2 columns: the maximum over directions. L2 beyond: second moments, in closed
    # form. L1 beyond: the sum over columns, or sqrt(k) times the L2 bound.
    columns = start.shape[1]
    if norm == "l2" and columns > 2:
        return _bound_reaches_by_moments(start, box, bandwidth)
    if columns == 1:
        directions, cover = np.ones((1, 1)), 1.0
    elif norm == "l2":
        angles = np.arange(_DIRECTIONS) * (np.pi / _DIRECTIONS)
        directions = np.column_stack([np.cos(angles), np.sin(angles)])
        cover = 1 / float(np.cos(np.pi / (2 * _DIRECTIONS)))
    elif columns <= SIGNS_LIMIT:
        directions, cover = sign_patterns(columns), 1.0
    else:
        along = [_measure_along(start[:, column], box) for column in range(columns)]
        width, spread = (np.sum(parts, axis=0) for parts in zip(*along, strict=True))
        width_l2, spread_l2 = _bound_reaches_by_moments(start, box, bandwidth)
        root = np.sqrt(columns)
        return np.minimum(width, root * width_l2), np.minimum(spread, root * spread_l2)
    width, spread = np.zeros(len(start)), np.zeros(len(start))
    for direction in directions:
        width_along, spread_along = _measure_along(start @ direction, box)
        width, spread = np.maximum(width, width_along), np.maximum(spread, spread_along)
    return cover * width, cover * spread


def _bound_reaches_by_moments(start: Floats, box: Box, bandwidth: float) -> tuple[Floats, Floats]:
    n = len(start)
    variance = float(np.linalg.eigvalsh(start.T @ start / n)[-1])  # the mean row of `start` is zero
    moments = np.sqrt(n / (n - 1) * (variance + np.sum(start**2, axis=1)))
    mean = np.minimum(moments, compute_mean_distances(start, "l2"))
    features = np.minimum(np.tanh(bandwidth**-2) * compute_diameter(start, "l2"), (1 / box.least - box.least) * mean)
    return (features + box.label_weight * box.pull_range * mean) / 2, (n - 1) * mean


def _measure_along(projected: Floats, box: Box) -> tuple[Floats, Floats]:
    """Return, for each record, the width of its row's range along one direction, and its spread."""
    order = np.argsort(projected, kind="stable")
    up = projected[order]
    n, rank, before = len(up), np.arange(len(up)), np.concatenate([[0.0], np.cumsum(up)])
    above = rank * up - before[:-1]  # the sums of the positive and of the negative differences to other records
    below = (n - rank) * up - (before[-1] - before[:-1])
    most = box.label_weight * (above + box.label_least * below)
    least = box.label_weight * (box.label_least * above + below)

    def compute_width(pull_up: Floats, pull_down: Floats) -> Floats:
        return _maximise_ratio(up, pull_up, box) + _maximise_ratio(-up[::-1], -pull_down[::-1], box)[::-1]

    width, spread = np.empty(len(up)), np.empty(len(up))
    if box.private_labels:
        width[order] = compute_width(most, least) / 2
    else:  # fixed labels are worst at their largest or least pull, depending on the degrees
        width[order] = np.maximum(compute_width(most, most), compute_width(least, least)) / 2
    spread[order] = above - below
    return width, spread


def _maximise_ratio(y: Floats, pull: Floats, box: Box) -> Floats:
    """Maximise ``(pull_r - sum_j w_j A_j) / sum_j w_j``, A_j = y_r - y_j, over w in [a, 1], for each r."""
    # The root tau of ``phi(tau) = max_w [pull_r - sum_j w_j (A_j + tau)]``, which is convex and falls. The best w_j is
    # a where A_j > -tau and 1 elsewhere: a cut of the sorted y, so prefix sums evaluate phi for all r at once. Newton's
    # steps end at the root or just below it: the rest of phi, divided by its least slope (n-1) a, is added.
    n = len(y)
    rank = np.arange(n)
    before = np.concatenate([[0.0], np.cumsum(y)])
    total = n * y - before[-1]

    def best(tau: Floats) -> tuple[Floats, Floats]:
        """Return numerator and denominator for the best weights at `tau`."""
        cut = np.searchsorted(y, y + tau, side="left")
        near = cut * y - before[cut]
        itself = rank < cut  # a record has no edge to itself
        value = pull - (box.least * near + (total - near))
        degree = box.least * (cut - itself) + (n - cut - ~itself)
        return np.asarray(value, dtype=np.float64), np.asarray(degree, dtype=np.float64)

    value, degree = best(np.zeros(n))
    tau = value / degree
    for _ in range(_ROUNDS):
        value, degree = best(tau)
        if np.all(value / degree <= tau):
            break
        tau = np.maximum(value / degree, tau)
    value, degree = best(tau)
    remainder = np.maximum(value - tau * degree, 0) / ((n - 1) * box.least)
    return np.asarray(tau + remainder, dtype=np.float64)
