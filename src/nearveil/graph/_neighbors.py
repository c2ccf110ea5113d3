"""The sparse Gaussian graph of nearest neighbours."""

import importlib.util
from typing import Any

import numpy as np
from scipy.sparse import csr_array
from sklearn.neighbors import NearestNeighbors

from nearveil.graph._arrays import Array, like, to_numpy
from nearveil.graph._base import GaussianGraph

_BLOCK = 1 << 22  # numbers in a block of differences


class NeighborsGraph(GaussianGraph):
    """Exact weights between rows of which one is among the nearest of the other; no other edges.

    `error_bound`: 1 where an edge of the full graph is missing (its weight became zero), else 0. The weights of the
    edges that are there are exact.
    """

    method = "neighbors"

    def __init__(self, X: Array, bandwidth: float, model: Array, n_neighbors: int) -> None:
        super().__init__(X, bandwidth, model)
        self.n_neighbors = n_neighbors
        host = to_numpy(X)
        n = host.shape[0]
        # One more than asked for: the nearest is usually the row itself, though not among duplicates.
        found = nearest(host, host, min(n_neighbors + 1, n))
        apart = found != np.arange(n)[:, None]
        keep = apart & (np.cumsum(apart, axis=1) <= n_neighbors)
        rows, others = np.nonzero(keep)[0], found[keep]
        edges = np.unique(np.minimum(rows, others) * n + np.maximum(rows, others))
        low, high = edges // n, edges % n
        weights = self._weights(host, low, host, high)
        both = (np.concatenate([weights, weights]), (np.concatenate([low, high]), np.concatenate([high, low])))
        self._matrix = csr_array(both, shape=(n, n))
        self.error_bound = float(len(edges) < n * (n - 1) // 2)
        _ = self.degree

    def _weights(self, A: Any, a: Any, B: Any, b: Any) -> Any:
        """Return the weights between rows `a` of A and `b` of B, a block at a time.

        From differences, not inner products: near rows keep their digits at any bandwidth.
        """
        step = max(1, _BLOCK // A.shape[1])
        blocks = [slice(start, start + step) for start in range(0, len(a), step)]
        squares = [np.vecdot(difference, difference) for difference in (A[a[i]] - B[b[i]] for i in blocks)]
        return np.exp(-0.5 * self._sharpness * np.concatenate(squares))

    def _product(self, Z: Array) -> Array:
        return like(self._matrix @ to_numpy(Z), Z)

    def _cross_product(self, X: Array, Z: Array) -> Array:
        new, host = to_numpy(X), to_numpy(self._X)
        found = nearest(new, host, self.n_neighbors)
        rows = np.repeat(np.arange(len(new)), self.n_neighbors)
        edges = (self._weights(new, rows, host, found.ravel()), (rows, found.ravel()))
        return like(csr_array(edges, shape=(len(new), len(host))) @ to_numpy(Z), Z)


def nearest(queries: Any, rows: Any, k: int) -> Any:
    """Find the k nearest of `rows` for each of `queries`, exactly, by the largest inner product.

    FAISS searches where it is installed and the rows are of single precision (it knows no other);
    scikit-learn elsewhere.

    `queries`: Unit rows.
    `rows`: Unit rows.
    Returns: Positions in `rows`, nearest first.
    """
    if rows.dtype == np.float32 and importlib.util.find_spec("faiss"):
        import faiss

        index = faiss.IndexFlatIP(rows.shape[1])
        index.add(np.ascontiguousarray(rows))
        return index.search(np.ascontiguousarray(queries), k)[1]
    search = NearestNeighbors(n_neighbors=k, algorithm="brute").fit(rows)
    return search.kneighbors(queries, return_distance=False)
