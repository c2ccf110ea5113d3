"""Sensitivity of the first step of the supervised manifold learning query to one record.

The step is eq. 4 of the 2022 paper, ``f(Q) = Q + 1/2 Diag(L_X)^-1 (alpha L_Y - L_X) Q``, on unit rows, from a start Q
that never depends on private data. The bound of :func:`target_only` is *sound*, for every pair of neighbours: the
smaller of Theorems A and A', proved in ``docs/theory/sensitivity.md``. The published bounds are not: use them for
comparison and audits only. ``studies`` has the bound of 2021, and those of other rows, which no mechanism releases.
"""

import math
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import cdist

from nearveil.cluster import cut_rows
from nearveil.privacy.checks import (
    check_choice,
    check_count,
    check_nonnegative,
    check_range,
    check_rows,
)
from nearveil.privatemail.graph import gaussian_graph
from nearveil.privatemail.graph._base import check_unit_rows

__all__ = ["published_2022", "target_only"]

Norm = Literal["l2", "l1"]
Floats = NDArray[np.float64]

MARGIN = 1 + 1e-9  # far above the rounding of a bound in double precision
SIGNS_LIMIT = 10  # up to so many columns, all 2^(k-1) sign patterns are tried: the L1 bound is exact
_SHARP = 50.0  # beyond this u Theorem A' is far above A, and its exponentials overflow
_ROUNDING = 64 * np.finfo(float).eps  # of a weight, and of sums of weights; generous
BLOCK = 512  # rows of a distance matrix that are in memory at a time
METRIC = {"l2": "euclidean", "l1": "cityblock"}
BANDWIDTHS = (0.06, 1e100)  # weights and bounds do not overflow


def target_only(anchors: Any, start: Any, *, bandwidth: float, norm: Norm = "l2", error_bound: float = 0.0) -> float:
    """Bound the change of the target's row if one private, unlabelled target is replaced; all else is public.

    Theorems A and A' of ``docs/theory/sensitivity.md``. Attacked by ``test_no_target_passes_the_bound`` of
    ``tests/privatemail/test_sensitivity.py``. The bound is of public data, so it may be published; no label enters.

    Parameters
    ----------
    anchors : array-like of shape (m, d)
        Public unit rows. Norms that differ by rounding are corrected. Others are refused: the bound is false for them.
    start : array-like of shape (m + 1, k)
        The start; row 0 is the target's.
    bandwidth : float
        The s of ``w_ij = exp(-|x_i - x_j|^2 / (2 s^2))``.
    norm : {"l2", "l1"}, default="l2"
        L2 (Frobenius) for Gaussian noise, L1 for Laplace noise.
    error_bound : float, default=0.0
        ``error_bound`` of the graph that computes the step; the result includes its effect (Theorem E).

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> anchors = rng.normal(size=(200, 16))
    >>> anchors /= np.linalg.norm(anchors, axis=1, keepdims=True)
    >>> round(target_only(anchors, rng.normal(size=(201, 2)), bandwidth=6.0), 4)
    0.0027
    """
    bandwidth = check_range(bandwidth, "bandwidth", *BANDWIDTHS)
    check_choice(norm, "norm", Norm)
    error_bound = check_error_bound(error_bound)
    rows = check_unit_rows(check_rows(anchors, "anchors"), "anchors", least=1)
    moving = check_start(start, rows=len(rows) + 1)[1:]
    target = min(bound_target_a(moving, bandwidth, norm), bound_target_a_prime(rows, moving, bandwidth, norm))
    error = error_bound / (1 - error_bound) * compute_diameter(moving, norm) / 4
    return MARGIN * (target + 2 * error)


def bound_target_a(anchor_start: Floats, bandwidth: float, norm: Norm) -> float:
    """Theorem A: ``1/2 tanh(u) diam(q_1..q_m)``; u is 1 / bandwidth^2 in all theorems."""
    return 0.5 * math.tanh(bandwidth**-2) * compute_diameter(anchor_start, norm)


def bound_target_a_prime(anchors: Floats, anchor_start: Floats, bandwidth: float, norm: Norm) -> float:
    """Theorem A': ``1/m sqrt(sinh(u) max_e e'Q_c'KQ_c e)``, K = expm1(u X_c X_c')."""
    u = bandwidth**-2
    if u > _SHARP:
        return math.inf
    form = compute_form(anchors, anchor_start, bandwidth)
    return math.sqrt(math.sinh(u) * bound_form(form, norm)) / len(anchors)


def compute_form(anchors: Floats, anchor_start: Floats, bandwidth: float) -> Floats:
    """Return ``Q_c' K Q_c`` of Theorem A', for a u of at most `_SHARP`."""
    u, columns = bandwidth**-2, anchor_start.shape[1]
    if len(anchors) == 1:  # it moves half-way to its only neighbour, the target, for any weight
        return np.zeros((columns, columns))
    # Q_c' K Q_c = c H' (W + I) H: K + 1 is e^(u x_ci.x_cj) = e^u w_ij h_i h_j with
    # h_i = e^(u (|x_mean|^2 / 2 - x_i.x_mean)), and the columns of Q_c sum to zero, so the 1 has no effect.
    mean = anchors.mean(axis=0)
    scaled = np.exp(u * (mean @ mean / 2 - anchors @ mean))[:, None] * (anchor_start - anchor_start.mean(axis=0))
    product = gaussian_graph(anchors, bandwidth, method="exact").matmul(scaled)
    form = scaled.T @ (product + scaled)
    # K has entries near 0, but the sum has entries near 1: add their rounding.
    form += np.eye(columns) * _ROUNDING * float(np.sum(np.linalg.norm(scaled, axis=1))) ** 2
    return np.asarray(math.exp(u) * form)


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


def compute_diameter(rows: Floats, norm: Norm) -> float:
    """Return the largest distance between two of `rows`."""
    return max(float(cdist(rows[block], rows, METRIC[norm]).max()) for block in cut_rows(len(rows), BLOCK))


def sign_patterns(columns: int) -> Floats:
    """Return all sign vectors that start with plus: ``|y|_1`` is the largest ``|e.y|`` over them."""
    patterns = np.arange(2 ** (columns - 1))[:, None] >> np.arange(columns)[None, :] & 1
    return np.asarray(1 - 2 * patterns[:, ::-1], dtype=np.float64)


# The papers' bounds as printed, for comparison and audits. ``docs/theory/sensitivity.md`` shows the error in each
# derivation, and ``tests/privatemail/test_sensitivity.py`` has a counterexample to each.


def published_2022(
    start: Any, *, bandwidth: float, label_weight: float, n_classes: int, as_programmed: bool = False
) -> float:
    """Return the bound of Theorem 2 of the 2022 paper, with M of its Lemma 1 as printed. Not sound.

    ``M sqrt(n + 1) / 2 |Q|_F`` with n the rows of `start`. Lemma 1 bounds ``|M_i|^2`` and uses it as
    ``|M_i|``: ``test_the_bound_of_2022_is_passed`` shows a pair of data sets that it does not cover.

    Labels are 0 to ``n_classes - 1``, the paper's c. If `as_programmed`, one c^2 is c, as in the authors' program.

    Examples
    --------
    >>> import numpy as np
    >>> start = np.random.default_rng(0).normal(size=(1000, 2))
    >>> round(published_2022(start, bandwidth=6.0, label_weight=0.6, n_classes=98))
    572
    """
    bandwidth = check_range(bandwidth, "bandwidth", *BANDWIDTHS)
    alpha = check_range(label_weight, "label_weight", 0, 1e50)
    c = check_count(n_classes, "n_classes", least=1) - 1
    check_start(start)
    n, s2 = len(start), bandwidth**2
    at = bound_degrees(n, bandwidth)
    label = math.exp(-(c if as_programmed else c**2) / (2 * s2))
    diagonal = alpha**2 * ((n / at.low) ** 2 + (n / at.low_added) ** 2 - 2 * ((n + 1) * label - 1) ** 2 / (n * at.high))
    mixed = math.exp(-(c**2 + 4) / (2 * s2))
    off_diagonal = (
        (alpha**2 + 1) / at.low**2
        - 2 * alpha * mixed / at.high**2
        + (alpha**2 + 1) / at.low_added**2
        - 2 * alpha * mixed / n**2
        - 2 * (alpha**2 * math.exp(-(c**2) / s2) + math.exp(-4 / s2)) / (n * at.high)
        + 4 * alpha / (at.low * at.low_added)
    )
    frobenius = float(np.linalg.norm(np.asarray(start, dtype=np.float64)))
    return (n * off_diagonal + diagonal) * math.sqrt(n + 1) / 2 * frobenius


class Degrees(NamedTuple):
    """The papers' bounds on the diagonals of the Laplacians of n rows: padded by a row of zeros, and of n + 1 rows."""

    low: float  # ``n exp(-2/s^2) + exp(-1/(2 s^2)) - 1``
    high: float  # ``n + exp(-1/(2 s^2)) - 1``
    low_added: float  # ``(n + 1) exp(-2/s^2) - 1``; the upper one is n


def bound_degrees(n: int, bandwidth: float) -> Degrees:
    """Return the bounds, or raise if the papers' lower ones are not positive."""
    zero = math.expm1(-1 / (2 * bandwidth**2))
    a = math.exp(-2 / bandwidth**2)
    bounds = Degrees(n * a + zero, n + zero, (n + 1) * a - 1)
    if min(bounds.low, bounds.low_added) <= 0:
        raise ValueError(
            f"the published bound needs n exp(-2 / bandwidth^2) > 1, which {n} rows at bandwidth {bandwidth:g} "
            "do not meet: use a larger bandwidth or more rows"
        )
    return bounds
