"""The one door to the Gaussian graphs, and the choice between them."""

import sys
from numbers import Integral
from typing import Any, Literal

from nearveil.graph._arrays import (
    Array,
    as_array,
    check_bandwidth,
    check_positive,
    check_unit_rows,
    namespace,
)
from nearveil.graph._base import GaussianGraph
from nearveil.graph._exact import ExactGraph
from nearveil.graph._neighbors import NeighborsGraph
from nearveil.graph._polynomial import MAX_DEGREE, KernelPolynomial, best_polynomial, least_polynomial
from nearveil.graph._series import MOMENTS_LIMIT, SeriesGraph, n_moments

Method = Literal["auto", "exact", "series", "neighbors"]
METHODS = ("auto", "exact", "series", "neighbors")

_EXPONENTIAL = 16  # multiplications that an exponential is worth, measured on the host
_COLUMNS = 2  # columns of Z that the choice of "auto" reckons with


def gaussian_graph(
    X: Array, bandwidth: float, method: Method = "auto", tolerance: float = 1e-6, n_neighbors: int = 15
) -> GaussianGraph:
    """Build the Gaussian graph over unit rows as a linear operator.

    Parameters
    ----------
    X : array-like of shape (n, d)
        Rows of norm one, as a NumPy array or a torch tensor on any device; they are copied. Results
        have their dtype (float32 where it is shorter); the arithmetic is done in float64 where
        float32 would miss the tolerance.
    bandwidth : float
        The s of ``w_ij = exp(-|x_i - x_j|^2 / (2 s^2))``.
    method : {"auto", "exact", "series", "neighbors"}, default="auto"
        "exact": every weight, O(n^2) time, O(n) memory. "series": a polynomial of degree at most 3
        in the inner products, O(n d^degree) time; the least degree that meets `tolerance`.
        "neighbors": the weights to the nearest neighbours alone. "auto": the cheaper of the first two
        within `tolerance`, which a graph of neighbours never meets.
    tolerance : float, default=1e-6
        Largest ``|w~ - w| / w`` that an edge may have; see ``error_bound`` of the result. Rounding is
        kept below it too, or an error says that it cannot be.
    n_neighbors : int, default=15
        Edges that each row asks for, for "neighbors"; the graph is symmetric, so it may get more.

    Returns
    -------
    GaussianGraph
        With ``degree``, ``matmul(Z)``, ``laplacian_matmul(Z)``, ``interpolate(X, Z)`` and
        ``error_bound``.

    Examples
    --------
    >>> import numpy as np
    >>> from nearveil.graph import gaussian_graph
    >>> X = np.random.default_rng(0).normal(size=(1000, 8))
    >>> X /= np.linalg.norm(X, axis=1, keepdims=True)
    >>> graph = gaussian_graph(X, bandwidth=6.0)
    >>> graph.method, graph.error_bound < 1e-6
    ('series', True)
    >>> exact = gaussian_graph(X, bandwidth=6.0, method="exact")
    >>> bool(np.max(np.abs(graph.degree / exact.degree - 1)) <= graph.error_bound)
    True
    """
    bandwidth = check_bandwidth(bandwidth)
    tolerance = check_positive(tolerance, "tolerance")
    if not (isinstance(method, str) and method in METHODS):
        raise ValueError(f"method must be one of {', '.join(METHODS)}")
    rows = check_unit_rows(_precise_enough(X, bandwidth, tolerance))
    model = _model(as_array(X))
    if method == "neighbors":
        return NeighborsGraph(_at_least_single(rows), bandwidth, model, _checked_neighbors(n_neighbors, rows.shape[0]))
    if sys.float_info.epsilon * bandwidth**-2 > tolerance:
        raise ValueError(
            f"bandwidth {bandwidth:g} is too small: the rounding of inner products would move weights by more than "
            f'tolerance {tolerance:g}. Use a larger bandwidth or tolerance, or method="neighbors"'
        )
    polynomial = None if method == "exact" else least_polynomial(bandwidth**-2, tolerance)
    if method == "series":
        return SeriesGraph(_at_least_single(rows), bandwidth, model, _checked(polynomial, rows, bandwidth, tolerance))
    if method == "auto" and polynomial is not None and _series_pays(polynomial, rows):
        return SeriesGraph(rows, bandwidth, model, polynomial)
    return ExactGraph(rows, bandwidth, model)


def _precise_enough(X: Array, bandwidth: float, tolerance: float) -> Array:
    """Return the rows in a dtype in which rounding stays below `tolerance`.

    An inner product is rounded by about one epsilon of the dtype, and the weight multiplies that by
    ``1 / bandwidth^2``. Where 32 bits would not do, the arithmetic is done in 64; results have the
    dtype of the rows all the same.
    """
    X = as_array(X)
    xp = namespace(X)
    single = float(xp.finfo(xp.float32).eps)  # rows of 16 bits are multiplied exactly, in 32 bits
    if xp.isdtype(X.dtype, "real floating") and single * max(1.0, bandwidth**-2) > tolerance:
        return xp.astype(X, xp.float64, copy=False)
    return X


def _model(X: Array) -> Array:
    """Return a column of the dtype of the results: that of the rows, and float32 for rows of 16 bits."""
    xp = namespace(X)
    return xp.astype(X[:, :1], X.dtype if xp.finfo(X.dtype).bits >= 32 else xp.float32, copy=True)


def _at_least_single(X: Array) -> Array:
    if namespace(X).finfo(X.dtype).bits < 32:
        raise ValueError(f"X has dtype {X.dtype}, too coarse for this method: convert it to float32")
    return X


def _checked_neighbors(n_neighbors: Any, n: int) -> int:
    whole = isinstance(n_neighbors, Integral) and not isinstance(n_neighbors, bool)
    if not (whole and 1 <= n_neighbors < n):
        raise ValueError(f"n_neighbors must be a whole number from 1 to {n - 1}, one less than the rows")
    return int(n_neighbors)


def _checked(polynomial: KernelPolynomial | None, X: Array, bandwidth: float, tolerance: float) -> KernelPolynomial:
    if polynomial is None:
        nearest = best_polynomial(bandwidth**-2, MAX_DEGREE).error_bound
        raise ValueError(
            f"no polynomial of degree {MAX_DEGREE} or less meets tolerance {tolerance:g} at bandwidth {bandwidth:g} "
            f'(the best has error {nearest:.1e}): use method="exact", a larger tolerance or a larger bandwidth'
        )
    if not _fits(polynomial, X):
        raise ValueError(
            f"a series of degree {polynomial.degree} in {X.shape[1]} features needs too many moments: use "
            'method="exact", or a tolerance that a lower degree meets'
        )
    return polynomial


def _fits(polynomial: KernelPolynomial, X: Array) -> bool:
    return n_moments(polynomial.degree, X.shape[1]) <= MOMENTS_LIMIT


def _series_pays(polynomial: KernelPolynomial, X: Array) -> bool:
    """Say whether the series takes fewer operations than all weights would."""
    n, d = X.shape
    series = 2 * n_moments(polynomial.degree, d) * _COLUMNS
    exact = n * (d + _EXPONENTIAL) / 2
    return _fits(polynomial, X) and namespace(X).finfo(X.dtype).bits >= 32 and series < exact
