"""Sensitivity of the first step of the supervised manifold learning query if every row is private.

Theorems B and B' of ``docs/theory/sensitivity.md``: any one record of a private data set is replaced. No mechanism of
the library needs them, because its anchors are public.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from nearveil.privacy.checks import check_choice, check_count
from nearveil.privatemail.graph.labels import Encoding
from nearveil.privatemail.sensitivity import (
    MARGIN,
    SIGNS_LIMIT,
    Floats,
    Norm,
    check_error_bound,
    check_start,
    compute_diameter,
    sign_patterns,
)
from studies.all_rows import check_query, check_result, combine_norms, compute_row_norms, iterate_distances

_DIRECTIONS = 128  # half a turn in this many steps costs a factor of 1 / cos(0.7 degrees) = 1.00008
_ROUNDS = 60  # Newton's steps; 4 to 8 are needed, and the error of an early stop is added


def replace_one(
    start: Any,
    *,
    bandwidth: float,
    label_weight: float,
    n_classes: int,
    labels: Literal["private", "public"] = "private",
    label_encoding: Encoding = "integer",
    label_bandwidth: float | None = None,
    may_be_unlabelled: bool = False,
    norm: Norm = "l2",
    error_bound: float = 0.0,
) -> float:
    """Bound the effect of replacing any one record, if every row is private.

    The smaller of Theorems B and B' of ``docs/theory/sensitivity.md``. Attacked by
    ``test_no_data_set_passes_the_bound``. The bound depends on the start, the number of
    classes and the parameters alone, so it is the same for all data sets.

    Parameters
    ----------
    start : array-like of shape (n, k)
        The public start.
    bandwidth, label_weight, label_encoding, label_bandwidth, norm, error_bound
        As for :func:`target_only`.
    n_classes : int
        Labels are 0 to ``n_classes - 1``.
    labels : {"private", "public"}, default="private"
        Whether the label is replaced with the record, or is public and unchanged.
    may_be_unlabelled : bool, default=False
        Whether a record may be unlabelled; a private label may then appear or disappear.

    Examples
    --------
    >>> import numpy as np
    >>> start = np.random.default_rng(0).normal(size=(1000, 2))
    >>> setting = {"bandwidth": 6.0, "label_weight": 0.6, "n_classes": 98}
    >>> round(replace_one(start, **setting), 2)
    1.25
    >>> round(replace_one(start, labels="public", **setting), 3)
    0.067
    """
    bandwidth, label_weight, label_bandwidth = check_query(bandwidth, label_weight, label_bandwidth)
    n_classes = check_count(n_classes, "n_classes", least=1)
    check_choice(labels, "labels", Literal["private", "public"])
    check_choice(label_encoding, "label_encoding", Encoding)
    check_choice(norm, "norm", Norm)
    error_bound = check_error_bound(error_bound)
    starts = check_start(start)
    floor = label_floor(n_classes, label_encoding, label_bandwidth, may_be_unlabelled)
    box = Box(float(np.exp(-2 * bandwidth**-2)), floor, label_weight, labels == "private")
    change = min(
        bound_by_theorem_b(starts, box, bandwidth, norm),
        bound_by_theorem_b_prime(starts, box, bandwidth, norm),
    )
    return check_result(MARGIN * (change + 2 * bound_replace_error(starts, box, error_bound, norm)))


def label_floor(n_classes: int, encoding: Encoding, label_bandwidth: float, may_be_unlabelled: bool = False) -> float:
    """Return b, the least weight of two labels."""
    if may_be_unlabelled:
        return 0.0
    if n_classes == 1:
        return 1.0
    squared = 2.0 if encoding == "one-hot" else float(n_classes - 1) ** 2
    return math.exp(-squared / (2 * label_bandwidth**2))


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
