"""Sensitivity of the first step of the supervised manifold learning query to one record.

The step is eq. 4 of the 2022 paper, ``f(Q) = Q + 1/2 Diag(L_X)^-1 (alpha L_Y - L_X) Q``, on unit rows, from a start Q
that never depends on private data. A *sound* bound holds for every pair of neighbours; :func:`target_only` returns the
smallest one that is proved in ``docs/theory/sensitivity.md``.
"""

from typing import Any, Literal

import numpy as np

from nearveil.privacy.checks import check_choice, check_range, check_rows
from nearveil.privatemail.graph._base import check_unit_rows
from nearveil.privatemail.graph.labels import Encoding
from nearveil.privatemail.sensitivity import bounds
from nearveil.privatemail.sensitivity.bounds import (
    MARGIN,
    Norm,
    check_error_bound,
    check_result,
    check_start,
    combine_norms,
)

__all__ = ["target_only"]


def target_only(
    anchors: Any,
    anchor_labels: Any,
    start: Any,
    *,
    bandwidth: float,
    label_weight: float,
    label_encoding: Encoding = "integer",
    label_bandwidth: float | None = None,
    released: Literal["all", "target"] = "all",
    norm: Norm = "l2",
    error_bound: float = 0.0,
) -> float:
    """Bound the effect of replacing one private, unlabelled target; everything else is public.

    Theorems A, A' and A'' of ``docs/theory/sensitivity.md``: the smallest bounds of the target's row and the anchors'.
    Attacked by ``test_no_target_passes_the_bound`` of ``tests/privatemail/test_sensitivity.py``. The bound depends on
    public data alone, so it may be published.

    Parameters
    ----------
    anchors : array-like of shape (m, d)
        Public unit rows. Norms that differ by rounding are corrected. Others are refused: the bound is false for them.
    anchor_labels : array-like of shape (m,) or None
        -1 means unlabelled, None that all are.
    start : array-like of shape (m + 1, k)
        The start; row 0 is the target's.
    bandwidth : float
        The s of ``w_ij = exp(-|x_i - x_j|^2 / (2 s^2))``.
    label_weight : float
        The alpha of the query, at least 0.
    label_encoding : {"integer", "one-hot"}, default="integer"
    label_bandwidth : float, optional
        Default: `bandwidth`.
    released : {"all", "target"}, default="all"
        The rows of the step that are released.
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
    >>> start = rng.normal(size=(201, 2))
    >>> setting = {"bandwidth": 6.0, "label_weight": 0.6}
    >>> round(target_only(anchors, None, start, released="target", **setting), 4)
    0.0027
    >>> round(target_only(anchors, None, start, **setting), 4)
    0.0028
    """
    bandwidth, label_weight, label_bandwidth = check_query(bandwidth, label_weight, label_bandwidth)
    check_choice(label_encoding, "label_encoding", Encoding)
    check_choice(released, "released", Literal["all", "target"])
    check_choice(norm, "norm", Norm)
    error_bound = check_error_bound(error_bound)
    rows = check_unit_rows(check_rows(anchors, "anchors"), "anchors", least=1)  # for others the bound is false
    if anchor_labels is not None and np.shape(anchor_labels) != (len(rows),):
        raise ValueError(f"anchor_labels must have shape ({len(rows)},), one for each anchor; -1 means unlabelled")
    starts = check_start(start, rows=len(rows) + 1)

    public = bounds.collect_figures(
        rows, anchor_labels, starts, bandwidth=bandwidth, label_weight=label_weight, label_encoding=label_encoding,
        label_bandwidth=label_bandwidth, norm=norm,
    )  # fmt: skip
    target = min(bounds.bound_target_a(public), bounds.bound_target_a_prime(public))
    target_error = bounds.bound_target_error(public, error_bound)
    if released == "target":
        return check_result(MARGIN * (target + 2 * target_error))
    anchor_rows = min(bounds.bound_anchors_a(public), bounds.bound_anchors_a_double_prime(public))
    change = combine_norms(np.array([target, anchor_rows]), norm)
    error = combine_norms(np.array([target_error, bounds.bound_anchors_error(public, error_bound)]), norm)
    return check_result(MARGIN * (change + 2 * error))


def check_query(bandwidth: float, label_weight: float, label_bandwidth: float | None) -> tuple[float, float, float]:
    """Return the parameters as floats, or raise if weights or bounds could overflow."""
    bandwidth = check_range(bandwidth, "bandwidth", 0.06, 1e100)
    label_weight = check_range(label_weight, "label_weight", 0, 1e50)
    if label_bandwidth is None:
        return bandwidth, label_weight, bandwidth
    return bandwidth, label_weight, check_range(label_bandwidth, "label_bandwidth", 1e-50, 1e100)
