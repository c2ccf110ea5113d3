"""Sensitivity of all rows of the first step to one private target among public anchors.

Theorems A, A' and A'' of ``docs/theory/sensitivity.md``. PrivateMail releases the target's row alone, which
:func:`nearveil.privatemail.sensitivity.target_only` bounds; nothing releases the anchors' rows. Write u for
1 / bandwidth^2 and a for exp(-2u), the least weight between unit rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.spatial.distance import cdist

from nearveil.cluster import cut_rows
from nearveil.privacy.checks import check_choice, check_range, check_rows
from nearveil.privatemail.graph import gaussian_graph, label_graph
from nearveil.privatemail.graph._base import check_unit_rows
from nearveil.privatemail.graph.labels import Encoding
from nearveil.privatemail.sensitivity import (
    BANDWIDTHS,
    BLOCK,
    MARGIN,
    METRIC,
    Floats,
    Norm,
    check_error_bound,
    check_start,
    compute_diameter,
    target_only,
)


def bound_all_rows(
    anchors: Any,
    anchor_labels: Any,
    start: Any,
    *,
    bandwidth: float,
    label_weight: float,
    label_encoding: Encoding = "integer",
    label_bandwidth: float | None = None,
    norm: Norm = "l2",
    error_bound: float = 0.0,
) -> float:
    """Bound the change of all rows if one private, unlabelled target is replaced; all else is public.

    The smallest bounds of the target's row and the anchors'. Attacked by ``test_no_target_passes_the_bound`` of
    ``tests/privatemail/test_sensitivity.py``.

    Parameters
    ----------
    anchors, start, bandwidth, norm, error_bound
        As for :func:`nearveil.privatemail.sensitivity.target_only`.
    anchor_labels : array-like of shape (m,) or None
        -1 means unlabelled, None that all are.
    label_weight : float
        The alpha of the query, at least 0.
    label_encoding : {"integer", "one-hot"}, default="integer"
    label_bandwidth : float, optional
        Default: `bandwidth`.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> anchors = rng.normal(size=(200, 16))
    >>> anchors /= np.linalg.norm(anchors, axis=1, keepdims=True)
    >>> round(bound_all_rows(anchors, None, rng.normal(size=(201, 2)), bandwidth=6.0, label_weight=0.6), 4)
    0.0028
    """
    bandwidth, label_weight, label_bandwidth = check_query(bandwidth, label_weight, label_bandwidth)
    check_choice(label_encoding, "label_encoding", Encoding)
    error_bound = check_error_bound(error_bound)
    target = target_only(anchors, start, bandwidth=bandwidth, norm=norm) / MARGIN
    rows = check_unit_rows(check_rows(anchors, "anchors"), "anchors", least=1)
    if anchor_labels is not None and np.shape(anchor_labels) != (len(rows),):
        raise ValueError(f"anchor_labels must have shape ({len(rows)},), one for each anchor; -1 means unlabelled")
    starts = check_start(start, rows=len(rows) + 1)
    pull = np.zeros_like(starts[1:])
    if anchor_labels is not None and label_weight > 0:
        labels = label_graph(anchor_labels, label_bandwidth, label_encoding)
        pull = label_weight * labels.laplacian_matmul(starts[1:])
    figures = collect_figures(rows, starts, pull, bandwidth=bandwidth, norm=norm)
    anchor_rows = min(bound_anchors_a(figures), bound_anchors_a_double_prime(figures))
    target_error = error_bound / (1 - error_bound) * compute_diameter(starts[1:], norm) / 4
    change = combine_norms(np.array([target, anchor_rows]), norm)
    error = combine_norms(np.array([target_error, bound_anchors_error(figures, error_bound)]), norm)
    return check_result(MARGIN * (change + 2 * error))


def check_query(bandwidth: float, label_weight: float, label_bandwidth: float | None) -> tuple[float, float, float]:
    """Return the parameters as floats, or raise if weights or bounds could overflow."""
    bandwidth = check_range(bandwidth, "bandwidth", *BANDWIDTHS)
    label_weight = check_range(label_weight, "label_weight", 0, 1e50)
    if label_bandwidth is None:
        return bandwidth, label_weight, bandwidth
    return bandwidth, label_weight, check_range(label_bandwidth, "label_bandwidth", 1e-50, 1e100)


def check_result(bound: float) -> float:
    """Return a bound, or raise if it overflowed."""
    if not np.isfinite(bound):
        raise ValueError("the bound overflows: use a larger bandwidth, or a smaller label_weight")
    return float(bound)


def iterate_distances(rows: Floats, norm: Norm) -> Iterator[tuple[slice, Floats]]:
    """Yield the matrix of distances between `rows`, a block of its rows at a time."""
    for block in cut_rows(len(rows), BLOCK):
        yield block, cdist(rows[block], rows, METRIC[norm])


def compute_row_norms(rows: Floats, norm: Norm) -> Floats:
    """Return the norm of each row."""
    return np.asarray(np.linalg.norm(rows, axis=1, ord=1 if norm == "l1" else 2), dtype=np.float64)


def combine_norms(parts: Floats, norm: Norm) -> float:
    """Return the norm of a matrix from the norms of its rows."""
    return float(np.sum(parts) if norm == "l1" else np.linalg.norm(parts))


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

    @property
    def least(self) -> float:
        """The a of the theorems, the least weight between unit rows."""
        return float(np.exp(-2 * self.u))


def collect_figures(anchors: Floats, start: Floats, pull: Floats, *, bandwidth: float, norm: Norm) -> AnchorFigures:
    """Compute the public quantities; `pull` is the label part of each anchor's row."""
    u, sides = bandwidth**-2, np.column_stack([np.ones(len(anchors)), start[1:] - start[0]])
    if len(anchors) == 1:  # it moves half-way to its only neighbour, the target, for any weight
        return AnchorFigures(anchors, start, u, norm, np.ones(1), np.zeros(1), np.zeros(1))
    # Relative to q_0, so that A_i - d_i q_0 is one sum.
    product = gaussian_graph(anchors, bandwidth, method="exact").matmul(sides)
    lever = compute_row_norms(product[:, 1:] + pull, norm)
    return AnchorFigures(anchors, start, u, norm, product[:, 0], lever, compute_row_norms(pull, norm))


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


def bound_anchors_error(public: AnchorFigures, error_bound: float) -> float:
    """Bound the effect of the operator's error on the anchors' rows (Theorem E)."""
    moved = compute_diameter(public.start, public.norm) / 4 + public.label_pull / (2 * (public.degree + public.least))
    return error_bound / (1 - error_bound) * combine_norms(moved, public.norm)
