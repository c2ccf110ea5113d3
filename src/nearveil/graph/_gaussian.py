"""The one door to the Gaussian graphs, and the choice between them."""

from typing import Literal

from nearveil.graph._arrays import Array, check_positive, check_unit_rows, namespace
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
        Rows of norm one, as a NumPy array or a torch tensor on any device. Its dtype is the
        precision of the arithmetic.
    bandwidth : float
        The s of ``w_ij = exp(-|x_i - x_j|^2 / (2 s^2))``.
    method : {"auto", "exact", "series", "neighbors"}, default="auto"
        "exact": every weight, O(n^2) time, O(n) memory. "series": a polynomial of degree at most 3
        in the inner products, O(n d^degree) time; the least degree that meets `tolerance`.
        "neighbors": the weights to the nearest neighbours alone. "auto": the cheapest of them that
        meets `tolerance`.
    tolerance : float, default=1e-6
        Largest ``|w~ - w| / w`` that an edge may have; see ``error_bound`` of the result. Graphs of
        neighbours are exempt when asked for by name: they drop edges by design.
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
    bandwidth = check_positive(bandwidth, "bandwidth")
    tolerance = check_positive(tolerance, "tolerance")
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}; got {method!r}")
    X = check_unit_rows(X)
    n = X.shape[0]
    if not 1e-100 < bandwidth < 1e100:
        raise ValueError(f"bandwidth {bandwidth:g} is out of range: unit rows are at most 2 apart")
    if method == "neighbors":
        if not (isinstance(n_neighbors, int) and 1 <= n_neighbors < n):
            raise ValueError(f"n_neighbors must be a whole number from 1 to {n - 1}, one less than the rows")
        return NeighborsGraph(X, bandwidth, n_neighbors)
    polynomial = None if method == "exact" else least_polynomial(bandwidth**-2, tolerance)
    if method == "series":
        return SeriesGraph(X, bandwidth, _checked(polynomial, X, bandwidth, tolerance))
    if method == "auto" and polynomial is not None and _series_pays(polynomial, X):
        return SeriesGraph(X, bandwidth, polynomial)
    return ExactGraph(X, bandwidth)


def _checked(polynomial: KernelPolynomial | None, X: Array, bandwidth: float, tolerance: float) -> KernelPolynomial:
    if namespace(X).finfo(X.dtype).bits < 32:
        raise ValueError(f"X has dtype {X.dtype}, too coarse for a series: convert it to float32")
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
