"""The graph of nearest neighbours, to compare with the graphs that keep all edges (``docs/theory/graph.md``)."""

from typing import Any

import numpy as np
from scipy.sparse import csr_array
from sklearn.neighbors import NearestNeighbors

from nearveil.cluster import cut_rows
from nearveil.privacy.checks import check_integer, check_range
from nearveil.privatemail.graph._base import Array, GaussianGraph, as_array, find_limits, move_to_library, to_numpy
from nearveil.privatemail.graph.gaussian import prepare_rows

_BLOCK = 1 << 22  # numbers in a block of differences
_TOLERANCE = 1e-6  # of a weight, for rounding


def neighbors_graph(X: Array, bandwidth: float, n_neighbors: int = 15) -> "NeighborsGraph":
    """Build the Gaussian graph of the edges to and from the `n_neighbors` nearest rows of each unit row.

    Examples
    --------
    >>> graph = neighbors_graph(np.eye(4), 1.0, n_neighbors=3)
    >>> graph.error_bound  # all edges
    0.0
    """
    bandwidth = check_range(bandwidth, "bandwidth", 1e-100, 1e100)
    rows, model = prepare_rows(as_array(X), bandwidth, _TOLERANCE)
    if find_limits(rows).bits < 32:
        raise ValueError(f"X has dtype {rows.dtype}, too coarse for this method: convert it to float32")
    return NeighborsGraph(rows, bandwidth, model, check_integer(n_neighbors, "n_neighbors", 1, rows.shape[0] - 1))


class NeighborsGraph(GaussianGraph):
    """Exact weights of edges to and from nearest rows; `error_bound` is 1 if any edge is missing, else 0."""

    method = "neighbors"

    def __init__(self, X: Array, bandwidth: float, model: Array, n_neighbors: int) -> None:
        super().__init__(X, bandwidth, model)
        self.n_neighbors = n_neighbors
        host = to_numpy(X)
        n = host.shape[0]
        # One more neighbour: the nearest is usually the row itself, but not always among duplicates.
        neighbors = _find_nearest(host, host, min(n_neighbors + 1, n))
        distinct = neighbors != np.arange(n)[:, None]
        keep = distinct & (np.cumsum(distinct, axis=1) <= n_neighbors)
        rows, columns = np.nonzero(keep)[0], neighbors[keep]
        edges = np.unique(np.minimum(rows, columns) * n + np.maximum(rows, columns))
        low, high = edges // n, edges % n
        weights = self._find_weights(host, low, host, high)
        both = (np.concatenate([weights, weights]), (np.concatenate([low, high]), np.concatenate([high, low])))
        self._matrix = csr_array(both, shape=(n, n))
        self.error_bound = float(len(edges) < n * (n - 1) // 2)
        _ = self.degree

    def _find_weights(self, A: Any, a: Any, B: Any, b: Any) -> Any:
        """Return weights of rows `a` of A and `b` of B from differences, which are precise for close rows."""
        blocks = cut_rows(len(a), max(1, _BLOCK // A.shape[1]))
        squares = [np.vecdot(difference, difference) for difference in (A[a[i]] - B[b[i]] for i in blocks)]
        return np.exp(-0.5 * self._sharpness * np.concatenate(squares))

    def _product(self, Z: Array) -> Array:
        return move_to_library(self._matrix @ to_numpy(Z), Z)

    def _cross_product(self, X: Array, Z: Array) -> Array:
        new, host = to_numpy(X), to_numpy(self._X)
        columns = _find_nearest(new, host, self.n_neighbors).ravel()
        rows = np.repeat(np.arange(len(new)), self.n_neighbors)
        edges = (self._find_weights(new, rows, host, columns), (rows, columns))
        return move_to_library(csr_array(edges, shape=(len(new), len(host))) @ to_numpy(Z), Z)


def _find_nearest(queries: Any, rows: Any, k: int) -> Any:
    """Return the positions of the k nearest `rows` of each query, nearest first."""
    return NearestNeighbors(n_neighbors=k, algorithm="brute").fit(rows).kneighbors(queries, return_distance=False)
