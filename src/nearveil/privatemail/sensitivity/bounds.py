"""The sound bounds; proofs: ``docs/theory/sensitivity.md``.

Theorems A and A': one private target among public anchors. The target's row and the anchors' rows have separate bounds,
and the smaller theorem counts for each. Write u = 1 / bandwidth^2 and a = exp(-2u), the least weight between unit rows.
"""

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
