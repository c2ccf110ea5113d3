"""Theorems A and A': one private target among public anchors.

Write u = 1 / bandwidth^2 and a = exp(-2u), the least weight between unit rows. The proofs are in
``docs/theory/sensitivity.md``. The target's row and the anchors' rows are bounded apart; for each the
smaller of the two theorems counts.
"""

from dataclasses import dataclass

import numpy as np

from nearveil.graph import Encoding, gaussian_graph, label_graph
from nearveil.privacy.sensitivity._common import (
    SIGNS_LIMIT,
    Floats,
    Norm,
    diameter,
    lengths,
    sign_patterns,
    total,
)

_SHARP = 50.0  # beyond this u Theorem A' is far above A, and its exponentials would leave the range of doubles
_ROUNDING = 64 * np.finfo(float).eps  # of a weight, and of sums of weights; generous


@dataclass(frozen=True)
class Public:
    """What the bounds need of the anchors; everything here is public."""

    anchors: Floats  # unit rows
    start: Floats  # row 0 is the target's
    bandwidth: float
    norm: Norm
    degree: Floats  # d_i, the weights between anchor i and the other anchors
    lever: Floats  # ``|A_i - d_i q_0|``: how far the target's weight can turn row i
    label_pull: Floats  # ``alpha |sum_j v_ij (q_i - q_j)|``: the label part, before the division by the degree
    form: Floats  # ``Q_c' K Q_c`` of Theorem A'

    @property
    def u(self) -> float:
        """1 / bandwidth^2."""
        return self.bandwidth**-2

    @property
    def least(self) -> float:
        """The a of the theorems, the least weight between unit rows."""
        return float(np.exp(-2 * self.u))


def collect(
    anchors: Floats,
    labels: object,
    start: Floats,
    *,
    bandwidth: float,
    label_weight: float,
    label_encoding: Encoding,
    label_bandwidth: float,
    norm: Norm,
) -> Public:
    """Collect the public quantities in one pass over the weights between the anchors."""
    target, others = start[0], start[1:]
    columns = start.shape[1]
    pull = np.zeros_like(others)
    if labels is not None and label_weight > 0:
        pull = label_weight * label_graph(labels, label_bandwidth, label_encoding).laplacian_matmul(others)
    if len(anchors) == 1:  # its only neighbour is the target: it moves half-way to it, whatever the weight
        nothing = np.zeros(1)
        return Public(anchors, start, bandwidth, norm, np.ones(1), nothing, nothing, np.zeros((columns, columns)))
    scaled, scale = _scaled_start(anchors, others, bandwidth)
    # Relative to q_0, so that A_i - d_i q_0 is one sum.
    sides = np.column_stack([np.ones(len(anchors)), others - target, scaled])
    product = gaussian_graph(anchors, bandwidth, method="exact").matmul(sides)
    degree = product[:, 0]
    lever = product[:, 1 : 1 + columns] + pull
    form = scale * (scaled.T @ (product[:, 1 + columns :] + scaled))
    # K has entries near 0, but what was summed are entries near 1: their rounding is added.
    form += np.eye(columns) * scale * _ROUNDING * float(np.sum(np.linalg.norm(scaled, axis=1))) ** 2
    return Public(anchors, start, bandwidth, norm, degree, lengths(lever, norm), lengths(pull, norm), form)


def _scaled_start(anchors: Floats, others: Floats, bandwidth: float) -> tuple[Floats, float]:
    """Return H and c such that ``Q_c' K Q_c = c H' (W + I) H``.

    K + 1 is ``e^(u x_ci.x_cj) = e^u w_ij h_i h_j`` with ``h_i = e^(u (|x_mean|^2 / 2 - x_i.x_mean))``, and the
    columns of Q_c sum to zero, so the 1 plays no part: the graph's own weights do.
    """
    u = bandwidth**-2
    if u > _SHARP:
        return np.zeros_like(others), 0.0
    mean = anchors.mean(axis=0)
    exponents = u * (mean @ mean / 2 - anchors @ mean)
    return np.exp(exponents)[:, None] * (others - others.mean(axis=0)), float(np.exp(u))


def target_a(public: Public) -> float:
    """Theorem A for the target's row: ``1/2 tanh(u) diam(q_1..q_m)``."""
    return 0.5 * float(np.tanh(public.u)) * diameter(public.start[1:], public.norm)


def target_a_prime(public: Public) -> float:
    """Theorem A' for the target's row: ``1/m sqrt(sinh(u) max_e e'Q_c'KQ_c e)``, K = expm1(u X_c X_c')."""
    if public.u > _SHARP:
        return float("inf")
    return float(np.sqrt(np.sinh(public.u) * largest_form(public.form, public.norm))) / len(public.anchors)


def largest_form(form: Floats, norm: Norm) -> float:
    """Bound ``e' form e`` over the e with ``e.y <= |y|``: unit vectors for L2, sign vectors for L1."""
    largest = max(float(np.linalg.eigvalsh(form)[-1]), 0.0)
    if norm == "l2":
        return largest
    columns = len(form)
    if columns <= SIGNS_LIMIT:
        signs = sign_patterns(columns)
        return max(float(np.max(np.einsum("ei,ij,ej->e", signs, form, signs))), 0.0)
    return min(columns * largest, float(np.sum(np.sqrt(np.maximum(np.diag(form), 0)))) ** 2)


def anchors_a(public: Public) -> float:
    """Theorem A for the anchors' rows: each weight of the target ranges over [a, 1] by itself."""
    change = (1 - public.least) / ((public.degree + public.least) * (public.degree + 1))
    return total(public.lever * change / 2, public.norm)


def anchors_a_prime(public: Public) -> float:
    """Theorem A' for the anchors' rows: ``sqrt((1 - a) (1 - sqrt a) / 2) |diag(g) X|_op``."""
    anchors = public.anchors
    weighted = (public.lever / (public.degree + public.least) ** 2)[:, None] * anchors
    tall = weighted if len(anchors) > anchors.shape[1] else weighted.T
    operator_norm = np.sqrt(max(float(np.linalg.eigvalsh(tall.T @ tall)[-1]), 0.0))
    factor = np.sqrt(np.expm1(-2 * public.u) * np.expm1(-public.u) / 2)
    return float(factor * operator_norm) * (np.sqrt(len(anchors)) if public.norm == "l1" else 1.0)


def target_error(public: Public, error_bound: float) -> float:
    """Bound how far the operator's error moves the target's row (Theorem E)."""
    return error_bound / (1 - error_bound) * diameter(public.start[1:], public.norm) / 4


def anchors_error(public: Public, error_bound: float) -> float:
    """Bound how far the operator's error moves the anchors' rows (Theorem E)."""
    moved = diameter(public.start, public.norm) / 4 + public.label_pull / (2 * (public.degree + public.least))
    return error_bound / (1 - error_bound) * total(moved, public.norm)
