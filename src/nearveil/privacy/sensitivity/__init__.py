"""How far one record can move the first step of the supervised manifold learning query.

The step is eq. 4 of the 2022 paper, ``f(Q) = Q + 1/2 Diag(L_X)^-1 (alpha L_Y - L_X) Q``, on unit rows,
from a start Q that never depends on private data. A *sound* bound holds for every pair of neighbours;
each function returns the smallest that is proved in ``docs/theory/sensitivity.md``. The published
bounds are here for comparison and for audits: they are not sound.
"""

from decimal import Decimal
from typing import Any, Literal

import numpy as np

from nearveil.graph.labels import Encoding
from nearveil.privacy.checks import check_choice, check_count, check_positive, check_range
from nearveil.privacy.sensitivity import bounds, published
from nearveil.privacy.sensitivity.bounds import (
    MARGIN,
    Floats,
    Norm,
    check_error_bound,
    check_matrix,
    check_result,
    check_start,
    combine_norms,
    label_floor,
)
from nearveil.privacy.sensitivity.published import Variant

__all__ = ["published_2021", "published_2022", "replace_one", "target_only"]

_NORM_TOLERANCE = 1e-4  # single precision is off by 1e-7; anything beyond this is not a rounding


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
    """Bound what replacing one private, unlabelled target changes, all else being public.

    Theorems A and A' of ``docs/theory/sensitivity.md``: for the target's row and for the anchors' rows
    the smaller of both. Attacked by ``test_no_target_passes_the_bound``. Anchors, their labels and the
    start are public, so the bound may be computed from them and published.

    Parameters
    ----------
    anchors : array-like of shape (m, d)
        Public unit rows. Norms that are off by rounding are repaired; others are refused, because
        the bound is false for them.
    anchor_labels : array-like of shape (m,) or None
        -1 means unlabelled, None that all are.
    start : array-like of shape (m + 1, k)
        Where the rows start; row 0 is the target's.
    bandwidth : float
        The s of ``w_ij = exp(-|x_i - x_j|^2 / (2 s^2))``.
    label_weight : float
        The alpha of the query, at least 0.
    label_encoding : {"integer", "one-hot"}, default="integer"
    label_bandwidth : float, optional
        That of the features unless given.
    released : {"all", "target"}, default="all"
        Whether all rows of the step are released, or the target's alone.
    norm : {"l2", "l1"}, default="l2"
        L2 (Frobenius) for Gaussian noise, L1 for Laplace noise.
    error_bound : float, default=0.0
        That of the graph which computes the step; what it may add is added (Theorem E).

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
    bandwidth, label_weight, label_bandwidth = _check_query(bandwidth, label_weight, label_bandwidth)
    check_choice(label_encoding, "label_encoding", Encoding)
    check_choice(released, "released", Literal["all", "target"])
    check_choice(norm, "norm", Norm)
    error_bound = check_error_bound(error_bound)
    rows = _check_anchors(anchors)
    if anchor_labels is not None and np.shape(anchor_labels) != (len(rows),):
        raise ValueError(f"anchor_labels must have shape ({len(rows)},), one for each anchor; -1 means unlabelled")
    starts = check_start(start, rows=len(rows) + 1)

    public = bounds.collect_figures(
        rows,
        anchor_labels,
        starts,
        bandwidth=bandwidth,
        label_weight=label_weight,
        label_encoding=label_encoding,
        label_bandwidth=label_bandwidth,
        norm=norm,
    )
    own = min(bounds.target_a(public), bounds.target_a_prime(public))
    own_error = bounds.target_error(public, error_bound)
    if released == "target":
        return check_result(MARGIN * (own + 2 * own_error))
    change = combine_norms(np.array([own, min(bounds.anchors_a(public), bounds.anchors_a_prime(public))]), norm)
    error = combine_norms(np.array([own_error, bounds.anchors_error(public, error_bound)]), norm)
    return check_result(MARGIN * (change + 2 * error))


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
    """Bound what replacing any one record changes, where every row is private.

    The smaller of Theorems B and B' of ``docs/theory/sensitivity.md``. Attacked by
    ``test_no_data_set_passes_the_bound``. Only the start, the number of classes and the parameters
    enter, so the bound is the same for all data sets.

    Parameters
    ----------
    start : array-like of shape (n, k)
        Where the rows start; public.
    bandwidth, label_weight, label_encoding, label_bandwidth, norm, error_bound
        As for :func:`target_only`.
    n_classes : int
        Labels are 0 to ``n_classes - 1``.
    labels : {"private", "public"}, default="private"
        Whether the label is replaced with the record, or is public and stays.
    may_be_unlabelled : bool, default=False
        Whether a record may come without a label; for private labels it may then lose or gain it.

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
    bandwidth, label_weight, label_bandwidth = _check_query(bandwidth, label_weight, label_bandwidth)
    n_classes = check_count(n_classes, "n_classes", least=1)
    check_choice(labels, "labels", Literal["private", "public"])
    check_choice(label_encoding, "label_encoding", Encoding)
    check_choice(norm, "norm", Norm)
    error_bound = check_error_bound(error_bound)
    starts = check_start(start)
    floor = label_floor(n_classes, label_encoding, label_bandwidth, may_be_unlabelled)
    box = bounds.Box(float(np.exp(-2 * bandwidth**-2)), floor, label_weight, labels == "private")
    change = min(
        bounds.theorem_b(starts, box, bandwidth, norm),
        bounds.theorem_b_prime(starts, box, bandwidth, norm),
    )
    return check_result(MARGIN * (change + 2 * bounds.replace_error(starts, box, error_bound, norm)))


def published_2022(start: Any, *, bandwidth: float, label_weight: float, n_classes: int) -> float:
    """Return the bound of Theorem 2 of the 2022 paper, with M of its Lemma 1 as printed. Not sound.

    ``M sqrt(n + 1) / 2 |Q|_F`` with n the rows of `start`. Lemma 1 bounds ``|M_i|^2`` and uses it as
    ``|M_i|``: ``test_the_bound_of_2022_is_passed`` shows a pair of data sets that it does not cover.
    Labels are 0 to ``n_classes - 1``; the paper's c is ``n_classes - 1``.

    Examples
    --------
    >>> import numpy as np
    >>> start = np.random.default_rng(0).normal(size=(1000, 2))
    >>> round(published_2022(start, bandwidth=6.0, label_weight=0.6, n_classes=98))
    572
    """
    bandwidth, label_weight, _ = _check_query(bandwidth, label_weight, None)
    n_classes = check_count(n_classes, "n_classes", least=1)
    check_start(start)
    return published.bound_step(np.asarray(start, dtype=np.float64), bandwidth, label_weight, n_classes)


def published_2021(
    n_rows: int,
    n_columns: int,
    start_scale: float,
    *,
    bandwidth: float,
    label_weight: float,
    n_classes: int,
    beta: float | Decimal,
    label_encoding: Encoding = "one-hot",
    variant: Variant = "printed",
) -> float:
    """Return the bound of Corollary 1.1 of the 2021 paper. Not sound.

    It is about a start of independent normal entries and is said to hold "with probability 1 - sum
    beta" over all pairs of neighbours, of which there are uncountably many. Its condition on beta
    depends on the data; here beta has to meet it whatever the data, ``beta <= exp(-4 k n)``.

    Parameters
    ----------
    n_rows, n_columns : int
        The n and k of the paper.
    start_scale : float
        The standard deviation of the start, the paper's sigma_q.
    bandwidth : float
    label_weight : float
    n_classes : int
        Labels are 0 to ``n_classes - 1``; not used for one-hot labels.
    beta : float or Decimal
        No float is small enough where ``4 k n`` passes 744: use ``decimal.Decimal``.
    label_encoding : {"one-hot", "integer"}, default="one-hot"
    variant : {"printed", "derived"}, default="printed"
        The constants of Appendix E, or those of the derivation in Appendix A.1.

    Examples
    --------
    >>> from decimal import Decimal
    >>> setting = {"bandwidth": 6.0, "label_weight": 0.6, "n_classes": 98, "beta": Decimal("1e-3500")}
    >>> round(published_2021(1000, 2, 1.0, variant="derived", **setting))
    166
    """
    n = check_count(n_rows, "n_rows", least=2)
    columns = check_count(n_columns, "n_columns", least=1)
    start_scale = check_positive(start_scale, "start_scale")
    bandwidth, label_weight, _ = _check_query(bandwidth, label_weight, None)
    n_classes = check_count(n_classes, "n_classes", least=1)
    check_choice(label_encoding, "label_encoding", Encoding)
    check_choice(variant, "variant", Variant)
    entries = published.bound_entries(n, bandwidth, label_weight, n_classes, label_encoding, variant)
    return published.bound_random_start(entries, n, columns, start_scale, published.check_beta(beta, n, columns))


def _check_query(bandwidth: float, label_weight: float, label_bandwidth: float | None) -> tuple[float, float, float]:
    """Return the parameters as floats, or raise where the weights, and with them the bound, would leave all range."""
    bandwidth = check_range(bandwidth, "bandwidth", 0.06, 1e100)
    label_weight = check_range(label_weight, "label_weight", 0, 1e50)
    if label_bandwidth is None:
        return bandwidth, label_weight, bandwidth
    return bandwidth, label_weight, check_range(label_bandwidth, "label_bandwidth", 1e-50, 1e100)


def _check_anchors(anchors: Any) -> Floats:
    """Return the anchors as unit rows in double precision, or raise; names no value."""
    rows = check_matrix(anchors, "anchors")
    norms = np.linalg.norm(rows, axis=1)
    if np.max(np.abs(norms - 1)) > _NORM_TOLERANCE:
        row = int(np.argmax(np.abs(norms - 1)))
        raise ValueError(
            f"anchors must have rows of norm 1 (row {row} has not), or the bound is false: divide each row by its "
            "norm, as sklearn.preprocessing.normalize does"
        )
    unit: Floats = rows / norms[:, None]
    return unit
