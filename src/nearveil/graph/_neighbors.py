"""The sparse Gaussian graph of nearest neighbours."""

import importlib.util
from typing import Any

import numpy as np
from scipy.sparse import csr_array
from sklearn.neighbors import NearestNeighbors

from nearveil.graph._arrays import Array, like, to_numpy
from nearveil.graph._base import GaussianGraph


class NeighborsGraph(GaussianGraph):
    """Exact weights between rows of which one is among the nearest of the other; no other edges.

    Attributes
    ----------
    error_bound : float
        1 where an edge of the full graph is missing (its weight became zero), else 0. The weights of
        the edges that are there are exact.
    """

    method = "neighbors"

    def __init__(self, X: Array, bandwidth: float, n_neighbors: int) -> None:
        super().__init__(X, bandwidth)
        self.n_neighbors = n_neighbors
        host = to_numpy(X)
        n = host.shape[0]
        # One more than asked for: the nearest is usually the row itself, though not among duplicates.
        found = nearest(host, host, min(n_neighbors + 1, n))
        rows = np.repeat(np.arange(n), found.shape[1])
        others = found.ravel()
        apart = rows != others
        position = np.cumsum(apart.reshape(found.shape), axis=1).ravel()
        keep = apart & (position <= n_neighbors)
        rows, others = rows[keep], others[keep]
        low, high = np.minimum(rows, others), np.maximum(rows, others)
        edges = np.unique(low * n + high)
        low, high = edges // n, edges % n
        weights = self._weights(host[low], host[high])
        both = (np.concatenate([weights, weights]), (np.concatenate([low, high]), np.concatenate([high, low])))
        self._matrix = csr_array(both, shape=(n, n))
        self.error_bound = float(len(edges) < n * (n - 1) // 2)
        _ = self.degree

    def _weights(self, A: Any, B: Any) -> Any:
        return np.exp(self._sharpness * (np.vecdot(A, B) - 1))

    def _product(self, Z: Array) -> Array:
        return like(self._matrix @ to_numpy(Z), Z)

    def _cross_product(self, X: Array, Z: Array) -> Array:
        new, host = to_numpy(X), to_numpy(self._X)
        found = nearest(new, host, self.n_neighbors)
        weights = self._weights(new[:, None, :], host[found])
        return like(np.einsum("ij,ijk->ik", weights, to_numpy(Z)[found]), Z)


def nearest(queries: Any, rows: Any, k: int) -> Any:
    """Find the k nearest of `rows` for each of `queries`, exactly, by the largest inner product.

    FAISS searches where it is installed and the rows are of single precision (it knows no other);
    scikit-learn elsewhere.

    Parameters
    ----------
    queries : ndarray of shape (m, d)
        Unit rows.
    rows : ndarray of shape (n, d)
        Unit rows.
    k : int

    Returns
    -------
    ndarray of shape (m, k)
        Positions in `rows`, nearest first.
    """
    if rows.dtype == np.float32 and importlib.util.find_spec("faiss"):
        import faiss

        index = faiss.IndexFlatIP(rows.shape[1])
        index.add(np.ascontiguousarray(rows))
        return index.search(np.ascontiguousarray(queries), k)[1]
    search = NearestNeighbors(n_neighbors=k, algorithm="brute").fit(rows)
    return search.kneighbors(queries, return_distance=False)
