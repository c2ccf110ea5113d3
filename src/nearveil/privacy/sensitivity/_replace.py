"""Theorems B and B': every row is private, and one record may be replaced.

Write a = exp(-2 / bandwidth^2) for the least feature weight and b for the least label weight. The
proofs are in ``docs/theory/sensitivity.md``. Theorem B needs only R, the diameter of the start;
Theorem B' solves, for every record and direction, the fractional programme that moves it the most.
"""

from dataclasses import dataclass

import numpy as np

from nearveil.privacy.sensitivity._common import (
    SIGNS_LIMIT,
    Floats,
    Norm,
    diameter,
    distances,
    lengths,
    sign_patterns,
    total,
)

_DIRECTIONS = 128  # half a turn in this many steps costs a factor of 1 / cos(0.7 degrees) = 1.00008
_ROUNDS = 60  # Newton's steps; 4 to 8 are needed, and what an early stop would lose is added


@dataclass(frozen=True)
class Box:
    """All that is known of the weights: ``w`` in [a, 1] and ``v`` in [b, 1]."""

    least: float  # a
    label_least: float  # b
    label_weight: float  # alpha
    private_labels: bool  # whether the label may be replaced with the record

    @property
    def swing(self) -> float:
        """Kappa, the largest ``|alpha v - w|``."""
        return max(abs(self.label_weight - self.least), abs(self.label_weight * self.label_least - 1))

    @property
    def pull_range(self) -> float:
        """The range of (n-1) v_j / D for one j: ``1/a - b``, or ``1/a - 1`` where v stays."""
        return 1 / self.least - (self.label_least if self.private_labels else 1.0)

    def edge_range(self, degree: float) -> float:
        """Return the range of ``(alpha v - w) / (degree + w)``, at the corners of the box."""
        high = (self.label_weight - self.least) / (degree + self.least)
        other = self.label_least if self.private_labels else 1.0
        return high - (self.label_weight * other - 1) / (degree + 1)

    def largest_edge_range(self, n: int) -> float:
        """Return the largest :meth:`edge_range` over the degrees from (n-2) a to n-2."""
        degrees = [(n - 2) * self.least, float(n - 2)]
        rise = self.label_weight - self.least
        fall = 1 - self.label_weight * (self.label_least if self.private_labels else 1.0)
        if rise < 0 < fall:  # only then does the range rise before it falls
            ratio = float(np.sqrt(-rise / fall))
            if ratio < 1:
                degrees.append(min(max((ratio - self.least) / (1 - ratio), degrees[0]), degrees[1]))
        return max(map(self.edge_range, degrees))

    def shift_range(self, n: int) -> float:
        """Return the range of ``1 / (degree + w)`` at the least degree."""
        degree = (n - 2) * self.least
        return (1 - self.least) / ((degree + self.least) * (degree + 1))


def theorem_b(start: Floats, box: Box, bandwidth: float, norm: Norm) -> float:
    """Theorem B: ``sqrt((n-1) row^2 + own^2)``, or their sum for L1."""
    n = len(start)
    reach = diameter(start, norm)
    row = reach / 2 * (box.swing * (n - 2) * box.shift_range(n) + box.edge_range((n - 2) * box.least))
    own = reach / 2 * (float(np.tanh(bandwidth**-2)) + box.label_weight * box.pull_range)
    return float((n - 1) * row + own if norm == "l1" else np.hypot(np.sqrt(n - 1) * row, own))


def theorem_b_prime(start: Floats, box: Box, bandwidth: float, norm: Norm) -> float:
    """Theorem B': the own row by fractional programmes, other rows by their own distances."""
    n = len(start)
    own, spread = _reaches(start, box, bandwidth, norm)
    shift = np.zeros(n) if n == 2 else box.swing * box.shift_range(n) * spread / 2
    edge = box.largest_edge_range(n) / 2
    largest = 0.0

    def one_block(records: slice, apart: Floats) -> None:
        nonlocal largest
        moved = shift[None, :] + edge * apart
        moved[np.arange(len(apart)), np.arange(n)[records]] = own[records]
        largest = max(largest, float(np.max(lengths(moved, norm))))

    distances(start, norm, one_block)
    return largest


def mean_distances(start: Floats, norm: Norm) -> Floats:
    """Return the mean distance of each row to all others."""
    means = np.empty(len(start))

    def one_block(records: slice, apart: Floats) -> None:
        means[records] = apart.sum(axis=1) / (len(start) - 1)

    distances(start, norm, one_block)
    return means


def replace_error(start: Floats, box: Box, error_bound: float, norm: Norm) -> float:
    """Bound how far the operator's error moves all rows (Theorem E)."""
    moved = diameter(start, norm) / 4 + box.label_weight * mean_distances(start, norm) / (2 * box.least)
    return error_bound / (1 - error_bound) * total(moved, norm)


def _reaches(start: Floats, box: Box, bandwidth: float, norm: Norm) -> tuple[Floats, Floats]:
    """Bound, for each record, how far its own row moves, and ``max_e sum_j |e.(q_i - q_j)|``.

    L1 up to 10 columns, and L2 up to 2: the largest over directions. L2 beyond: second moments, in
    closed form. L1 beyond: the sum over columns, or sqrt(k) times that.
    """
    columns = start.shape[1]
    if norm == "l2" and columns > 2:
        return _reaches_by_moments(start, box, bandwidth)
    if columns == 1:
        directions, cover = np.ones((1, 1)), 1.0
    elif norm == "l2":
        angles = np.arange(_DIRECTIONS) * (np.pi / _DIRECTIONS)
        directions = np.column_stack([np.cos(angles), np.sin(angles)])
        cover = 1 / float(np.cos(np.pi / (2 * _DIRECTIONS)))
    elif columns <= SIGNS_LIMIT:
        directions, cover = sign_patterns(columns), 1.0
    else:
        along = [_along(start[:, column], box) for column in range(columns)]
        own, spread = (np.sum(parts, axis=0) for parts in zip(*along, strict=True))
        own_l2, spread_l2 = _reaches_by_moments(start, box, bandwidth)
        root = np.sqrt(columns)
        return np.minimum(own, root * own_l2), np.minimum(spread, root * spread_l2)
    own, spread = np.zeros(len(start)), np.zeros(len(start))
    for direction in directions:
        own_along, spread_along = _along(start @ direction, box)
        own, spread = np.maximum(own, own_along), np.maximum(spread, spread_along)
    return cover * own, cover * spread


def _reaches_by_moments(start: Floats, box: Box, bandwidth: float) -> tuple[Floats, Floats]:
    n = len(start)
    variance = float(np.linalg.eigvalsh(start.T @ start / n)[-1])  # the mean row of `start` is zero
    moments = np.sqrt(n / (n - 1) * (variance + np.sum(start**2, axis=1)))
    mean = np.minimum(moments, mean_distances(start, "l2"))
    features = np.minimum(
        np.tanh(bandwidth**-2) * diameter(start, "l2"),
        (1 / box.least - box.least) * mean,
    )
    return (features + box.label_weight * box.pull_range * mean) / 2, (n - 1) * mean


def _along(projected: Floats, box: Box) -> tuple[Floats, Floats]:
    """Return, for each record, the width of its own row along one direction, and its spread."""
    order = np.argsort(projected, kind="stable")
    up = projected[order]
    above, below = _sides(up)
    most = box.label_weight * (above + box.label_least * below)
    least = box.label_weight * (box.label_least * above + below)

    def width(pull: Floats, pull_other: Floats) -> Floats:
        return _programme(up, pull, box) + _programme(-up[::-1], -pull_other[::-1], box)[::-1]

    own, spread = np.empty(len(up)), np.empty(len(up))
    # Labels that stay are worst where they pull the most or the least, by which degree is the larger.
    own[order] = (
        width(most, least) / 2 if box.private_labels else np.maximum(width(most, most), width(least, least)) / 2
    )
    spread[order] = above - below
    return own, spread


def _sides(y: Floats) -> tuple[Floats, Floats]:
    """Return the sums of the positive and of the negative ``y_r - y_j``, for sorted y."""
    n = len(y)
    rank = np.arange(n)
    before = np.concatenate([[0.0], np.cumsum(y)])
    return rank * y - before[:-1], (n - rank) * y - (before[-1] - before[:-1])


def _programme(y: Floats, pull: Floats, box: Box) -> Floats:
    """Maximise ``(pull_r - sum_j w_j A_j) / sum_j w_j``, A_j = y_r - y_j, over w in [a, 1], for each r.

    The root tau of ``phi(tau) = max_w [pull_r - sum_j w_j (A_j + tau)]``, which is convex and falls. The
    best w_j is a where A_j > -tau and 1 elsewhere: a cut of the sorted y, so prefix sums evaluate phi
    for all r at once. Newton's steps end at the root or just below it, and phi falls with a slope of
    at least (n-1) a: what is left of phi, divided by that, is added.
    """
    n = len(y)
    rank = np.arange(n)
    before = np.concatenate([[0.0], np.cumsum(y)])
    everything = n * y - before[-1]

    def best(tau: Floats) -> tuple[Floats, Floats]:
        """Return numerator and denominator of the weights that are best at `tau`."""
        cut = np.searchsorted(y, y + tau, side="left")
        near = cut * y - before[cut]
        own = rank < cut  # a record has no edge to itself
        value = pull - (box.least * near + (everything - near))
        degree = box.least * (cut - own) + (n - cut - ~own)
        return np.asarray(value, dtype=np.float64), np.asarray(degree, dtype=np.float64)

    value, degree = best(np.zeros(n))
    tau = value / degree
    for _ in range(_ROUNDS):
        value, degree = best(tau)
        if np.all(value / degree <= tau):
            break
        tau = np.maximum(value / degree, tau)
    value, degree = best(tau)
    missing = np.maximum(value - tau * degree, 0) / ((n - 1) * box.least)
    return np.asarray(tau + missing, dtype=np.float64)
