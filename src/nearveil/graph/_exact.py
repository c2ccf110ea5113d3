"""The exact Gaussian graph: every weight, a tile at a time.

On unit rows ``w_ij = exp(u (x_i.x_j - 1))``. A tile of weights lives in cache for the time of two
small matrix products and is gone; because ``w_ij = w_ji`` each tile above the diagonal serves both
its rows and its columns, which halves the products and the exponentials. The diagonal is masked in
the tile, so that no self-term has to be subtracted and nothing cancels at small bandwidths.

On the host this beats PyTorch's fused attention (which computes the same sums but can neither use
the symmetry nor skip the padding of the values; see ``docs/results/graph.md``). On a GPU with
Triton the tiles are those of :mod:`nearveil.graph._fused`.
"""

import importlib.util
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

from nearveil.graph._arrays import Array, is_host, like, namespace, tiny_of, to_numpy
from nearveil.graph._base import GaussianGraph

HOST_TILE = 512  # a tile of doubles is 2 MiB: it stays in the second-level cache
DEVICE_TILE = 8192
FUSED_FEATURES = 128  # beyond these the tiles of the kernel no longer fit into shared memory
_BLAS = ThreadpoolController()


class ExactGraph(GaussianGraph):
    """All weights, exact to rounding, in O(n) memory."""

    method = "exact"

    def __init__(self, X: Array, bandwidth: float, model: Array) -> None:
        if namespace(X).finfo(X.dtype).bits < 32 and not _has_fused_kernel(X):
            raise ValueError(f"X has dtype {X.dtype}, too coarse for this device and width: convert it to float32")
        super().__init__(X, bandwidth, model)
        if 2 * self._sharpness > -np.log(tiny_of(self._model)) / 2:
            _ = self.degree  # weights may underflow: say so now, not at the first product

    def _product(self, Z: Array) -> Array:
        if _has_fused_kernel(self._X):
            from nearveil.graph import _fused

            return _fused.product(self._X, self._X, Z, self._sharpness, skip_diagonal=True)
        if is_host(self._X):
            return like(_symmetric_on_threads(to_numpy(self._X), to_numpy(Z), self._sharpness), Z)
        return _symmetric(self._X, Z, self._sharpness, DEVICE_TILE)

    def _cross_product(self, X: Array, Z: Array) -> Array:
        if _has_fused_kernel(self._X):
            from nearveil.graph import _fused

            return _fused.product(X, self._X, Z, self._sharpness, skip_diagonal=False)
        tile = HOST_TILE if is_host(self._X) else DEVICE_TILE
        return _rectangular(X, self._X, Z, self._sharpness, tile)


def _has_fused_kernel(X: Array) -> bool:
    """Say whether the Triton kernel multiplies with the weights between the rows of `X`."""
    on_gpu = getattr(X, "is_cuda", False) and importlib.util.find_spec("triton") is not None
    return on_gpu and namespace(X).finfo(X.dtype).bits <= 32 and X.shape[1] <= FUSED_FEATURES


def _weights(A: Array, B: Array, sharpness: float) -> Array:
    """Return the (a, b) Gaussian weights between unit rows."""
    xp = namespace(A)
    exponents = xp.matmul(A, B.T)
    exponents -= 1
    exponents *= sharpness
    return xp.exp(exponents)


def _accumulator(Z: Array) -> Array:
    """Return zeros like `Z` in double precision, so that a million tiles do not lose digits."""
    xp = namespace(Z)
    return xp.zeros_like(Z, dtype=xp.float64)


def _symmetric(X: Array, Z: Array, sharpness: float, tile: int, first: int = 0, stride: int = 1) -> Array:
    """Multiply the weights with `Z`, for the tiles of every `stride`-th strip of rows, in double."""
    xp = namespace(X)
    n = X.shape[0]
    total = _accumulator(Z)
    for i in range(first * tile, n, stride * tile):
        rows, here = X[i : i + tile], Z[i : i + tile]
        weights = _weights(rows, rows, sharpness)
        weights *= 1 - xp.eye(weights.shape[0], dtype=weights.dtype, device=weights.device)
        total[i : i + tile] += xp.matmul(weights, here)
        for j in range(i + tile, n, tile):
            weights = _weights(rows, X[j : j + tile], sharpness)
            total[i : i + tile] += xp.matmul(weights, Z[j : j + tile])
            total[j : j + tile] += xp.matmul(weights.T, here)
    return total


def _symmetric_on_threads(X: Any, Z: Any, sharpness: float) -> Any:
    """Deal the strips of :func:`_symmetric` out to one thread a core.

    NumPy's exponential runs on one thread, so the threads are ours and BLAS is held to one each.
    The deal depends on the number of cores alone: the same machine gives the same bits.
    """
    n_strips = -(-X.shape[0] // HOST_TILE)
    workers = min(_cores(), n_strips)
    if workers == 1:
        return _symmetric(X, Z, sharpness, HOST_TILE)
    with _BLAS.limit(limits=1, user_api="blas"), ThreadPoolExecutor(workers) as pool:
        parts = list(pool.map(lambda first: _symmetric(X, Z, sharpness, HOST_TILE, first, workers), range(workers)))
    return np.sum(parts, axis=0)


def _cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _rectangular(A: Array, B: Array, Z: Array, sharpness: float, tile: int) -> Array:
    """Multiply the (a, b) weights between the rows of `A` and `B` with `Z`, shape (b, k)."""
    xp = namespace(A)
    strips = []
    for i in range(0, A.shape[0], tile):
        rows = A[i : i + tile]
        total = xp.zeros((rows.shape[0], Z.shape[1]), dtype=xp.float64, device=Z.device)
        for j in range(0, B.shape[0], tile):
            total += xp.matmul(_weights(rows, B[j : j + tile], sharpness), Z[j : j + tile])
        strips.append(total)
    return xp.concat(strips)
