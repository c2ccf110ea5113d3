"""Gaussian graphs over unit rows: exact or by series, also on Dask arrays."""

import importlib.util
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import joblib
import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from nearveil.cluster import SpreadRows, is_dask_array
from nearveil.privacy.checks import check_choice, check_positive, check_range
from nearveil.privatemail.graph import series
from nearveil.privatemail.graph._base import (
    Array,
    GaussianGraph,
    as_array,
    check_unit_rows,
    find_limits,
    find_namespace,
    is_host,
    move_to_library,
    to_numpy,
)

Method = Literal["auto", "exact", "series"]

HOST_TILE = 512  # a tile of doubles is 2 MiB: it stays in the second-level cache
DEVICE_TILE = 8192
FUSED_FEATURES = 128  # beyond these the tiles of the kernel no longer fit into shared memory
_EXPONENTIAL = 16  # cost of an exponential in multiplications, measured on the host
_COLUMNS = 2  # columns of Z that "auto" assumes
_BLAS = ThreadpoolController()


class ExactGraph(GaussianGraph):
    """All weights, exact to rounding, in O(n) memory."""

    # Each tile above the diagonal serves both its rows and its columns. The diagonal is masked in the tile, so that
    # nothing cancels at small bandwidths. On the host this beats PyTorch's fused attention (docs/results/graph.md).

    method = "exact"

    def __init__(self, X: Array, bandwidth: float, model: Array) -> None:
        if find_limits(X).bits < 32 and _find_fused_product(X) is None:
            raise ValueError(f"X has dtype {X.dtype}, too coarse for this device and width: convert it to float32")
        super().__init__(X, bandwidth, model)
        if 2 * self._sharpness > -np.log(float(find_limits(self._model).smallest_normal)) / 2:
            _ = self.degree  # raise now, not at the first product, if weights underflow

    def _product(self, Z: Array) -> Array:
        if (product := _find_fused_product(self._X)) is not None:
            return product(self._X, self._X, Z, self._sharpness, skip_diagonal=True)
        if is_host(self._X):
            return move_to_library(_multiply_on_threads(to_numpy(self._X), to_numpy(Z), self._sharpness), Z)
        return _multiply_symmetric(self._X, Z, self._sharpness, DEVICE_TILE)

    def _cross_product(self, X: Array, Z: Array) -> Array:
        if (product := _find_fused_product(self._X)) is not None:
            return product(X, self._X, Z, self._sharpness, skip_diagonal=False)
        return _multiply_rectangular(X, self._X, Z, self._sharpness)


def _find_fused_product(X: Array) -> Any:
    """Return the product of the Triton kernel if it supports the rows of `X`, or None."""
    on_gpu = getattr(X, "is_cuda", False) and importlib.util.find_spec("triton") is not None
    if not on_gpu or find_limits(X).bits > 32 or X.shape[1] > FUSED_FEATURES:
        return None
    return importlib.import_module("nearveil.privatemail.graph._fused").product


def _weights(A: Array, B: Array, sharpness: float) -> Array:
    """Return the (a, b) Gaussian weights between unit rows."""
    xp = find_namespace(A)
    exponents = xp.matmul(A, B.T)
    exponents -= 1
    exponents *= sharpness
    return xp.exp(exponents)


def _multiply_symmetric(X: Array, Z: Array, sharpness: float, tile: int, first: int = 0, stride: int = 1) -> Array:
    """Multiply the weights by `Z`, for the tiles of every `stride`-th strip of rows, in double precision."""
    xp = find_namespace(X)
    n = X.shape[0]
    total = xp.zeros_like(Z, dtype=xp.float64)  # sums of a million tiles need the digits
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


def _multiply_on_threads(X: Any, Z: Any, sharpness: float) -> Any:
    """Run the strips of :func:`_multiply_symmetric` on one thread per core; a machine always gives the same bits."""
    workers = min(joblib.cpu_count(), -(-X.shape[0] // HOST_TILE))
    if workers == 1:
        return _multiply_symmetric(X, Z, sharpness, HOST_TILE)

    def multiply(first: int) -> Any:
        return _multiply_symmetric(X, Z, sharpness, HOST_TILE, first, workers)

    with _BLAS.limit(limits=1, user_api="blas"), ThreadPoolExecutor(workers) as pool:
        return np.sum(list(pool.map(multiply, range(workers))), axis=0)


def _multiply_rectangular(A: Array, B: Array, Z: Array, sharpness: float) -> Array:
    """Multiply the (a, b) weights between the rows of `A` and `B` by `Z`, shape (b, k), in double precision."""
    xp, tile = find_namespace(A), HOST_TILE if is_host(A) else DEVICE_TILE
    total = xp.zeros((A.shape[0], Z.shape[1]), dtype=xp.float64, device=Z.device)
    for i in range(0, A.shape[0], tile):
        for j in range(0, B.shape[0], tile):
            total[i : i + tile] += xp.matmul(_weights(A[i : i + tile], B[j : j + tile], sharpness), Z[j : j + tile])
    return total


def gaussian_graph(X: Array, bandwidth: float, method: Method = "auto", tolerance: float = 1e-6) -> GaussianGraph:
    """Build the Gaussian graph over unit rows as a linear operator, a :class:`GaussianGraph`.

    Parameters
    ----------
    X : array-like of shape (n, d)
        Rows of norm one, as a NumPy array or a torch tensor on any device; they are copied. Blocks of a Dask array stay
        on their workers ("series" and "exact") and need not fit in memory. Results have the dtype of the rows, at least
        float32; the arithmetic uses float64 if float32 would miss the tolerance.
    bandwidth : float
        The s of ``w_ij = exp(-|x_i - x_j|^2 / (2 s^2))``.
    method : {"auto", "exact", "series"}, default="auto"
        "exact": every weight, O(n^2) time, O(n) memory. "series": a polynomial of degree at most 3
        in the inner products, O(n d^degree) time; the least degree that meets `tolerance`.
        "auto": the cheaper of the two within `tolerance`.
    tolerance : float, default=1e-6
        Largest ``|w~ - w| / w`` of an edge; see ``error_bound`` of the result. Rounding above it raises an error.

    Examples
    --------
    >>> import numpy as np
    >>> from nearveil.privatemail.graph import gaussian_graph
    >>> X = np.random.default_rng(0).normal(size=(1000, 8))
    >>> X /= np.linalg.norm(X, axis=1, keepdims=True)
    >>> graph = gaussian_graph(X, bandwidth=6.0)
    >>> graph.method, graph.error_bound < 1e-6
    ('series', True)
    >>> exact = gaussian_graph(X, bandwidth=6.0, method="exact")
    >>> bool(np.max(np.abs(graph.degree / exact.degree - 1)) <= graph.error_bound)
    True
    """
    bandwidth = check_range(bandwidth, "bandwidth", 1e-100, 1e100)  # its square must not overflow or vanish
    tolerance = check_positive(tolerance, "tolerance")
    check_choice(method, "method", Method)
    if is_dask_array(X):
        return SpreadGraph(SpreadRows.of(X), bandwidth, method, tolerance)
    rows, model = prepare_rows(as_array(X), bandwidth, tolerance)
    if method == "series" and find_limits(rows).bits < 32:
        raise ValueError(f"X has dtype {rows.dtype}, too coarse for this method: convert it to float32")
    polynomial = _choose_polynomial(rows, bandwidth, method, tolerance)
    if polynomial is not None and (method == "series" or _is_series_cheaper(rows, polynomial)):
        return series.SeriesGraph(rows, bandwidth, model, polynomial)
    return ExactGraph(rows, bandwidth, model)


def prepare_rows(X: Array, bandwidth: float, tolerance: float) -> tuple[Array, Array]:
    """Return checked unit rows, and a column of ones in the dtype of results."""
    rows = check_unit_rows(_cast_precisely(X, bandwidth, tolerance))
    xp = find_namespace(rows)
    return rows, xp.ones_like(rows[:, :1], dtype=X.dtype if find_limits(X).bits >= 32 else xp.float32)


def _cast_precisely(X: Array, bandwidth: float, tolerance: float) -> Array:
    """Return the rows in a dtype in which rounding, times ``1 / bandwidth^2``, stays below `tolerance`."""
    xp = find_namespace(X)
    single = float(xp.finfo(xp.float32).eps)  # 16-bit rows are multiplied exactly, in 32 bits
    if xp.isdtype(X.dtype, "real floating") and single * max(1.0, bandwidth**-2) > tolerance:
        return xp.astype(X, xp.float64, copy=False)
    return X


def _is_series_cheaper(X: Array, polynomial: series.KernelPolynomial) -> bool:
    """Return whether a series takes fewer multiplications than all weights, and is precise enough for its rows."""
    n, d = X.shape
    cheaper = 2 * series.count_moments(polynomial.degree, d) * _COLUMNS < n * (d + _EXPONENTIAL) / 2
    return bool(cheaper and find_limits(X).bits >= 32)


def _choose_polynomial(X: Array, bandwidth: float, method: Method, tolerance: float) -> series.KernelPolynomial | None:
    """Return the polynomial of a series; None if no series should, or can, be used."""
    if sys.float_info.epsilon * bandwidth**-2 > tolerance:
        raise ValueError(
            f"bandwidth {bandwidth:g} is too small: the rounding of inner products would move weights by more than "
            f"tolerance {tolerance:g}. Use a larger bandwidth or tolerance"
        )
    if method == "exact":
        return None
    polynomial = series.find_least_polynomial(bandwidth**-2, tolerance)
    if polynomial is not None and series.count_moments(polynomial.degree, X.shape[1]) <= series.MOMENTS_LIMIT:
        return polynomial
    if method == "auto":
        return None
    if polynomial is None:
        least_error = series.find_best_polynomial(bandwidth**-2, series.MAX_DEGREE).error_bound
        raise ValueError(
            f"no polynomial of degree {series.MAX_DEGREE} or less meets tolerance {tolerance:g} at bandwidth "
            f'{bandwidth:g} (the best has error {least_error:.1e}): use method="exact", a larger tolerance or a larger '
            "bandwidth"
        )
    raise ValueError(
        f"a series of degree {polynomial.degree} in {X.shape[1]} features needs too many moments: use "
        'method="exact", or a tolerance that a lower degree meets'
    )


class SpreadGraph(GaussianGraph):
    """A graph of the rows of a Dask array, in double precision: workers multiply their blocks, `Z` stays here."""

    # With a polynomial, one pass over the blocks collects sums and another applies them; without, there is a task for
    # each pair of blocks. Sums follow the order of the blocks, so chunk sizes change results by rounding only.

    method = "exact"

    def __init__(self, rows: SpreadRows, bandwidth: float, method: Method, tolerance: float) -> None:
        if rows.dtype not in (np.float32, np.float64):
            raise ValueError(f"X must hold floating-point numbers; got dtype {rows.dtype}: convert it first")
        if rows.shape[0] < 2:
            raise ValueError(f"X has {rows.shape[0]} row(s); it needs at least 2")
        # The base has an empty array for the dtype and the features of new rows.
        super().__init__(np.empty((0, rows.shape[1])), bandwidth, np.ones((rows.shape[0], 1), rows.dtype))
        self._rows = rows
        self.polynomial = _choose_polynomial(rows, bandwidth, method, tolerance)
        if self.polynomial is not None:
            self.method, self.error_bound = "series", self.polynomial.error_bound

    def _map(self, stage: str, function: Any, tasks: list[Any], *shared: Any) -> Iterator[Any]:
        return self._rows.cluster.map(function, tasks, *shared, stage=stage)

    def _pair_blocks(self, Z: Array) -> list[tuple[Any, Array]]:
        """Return every block with its rows of `Z`."""
        return [(part, Z[rows]) for part, rows in zip(self._rows.parts, self._rows.cuts, strict=True)]

    def _collect(self, Z: Array) -> list[Array]:
        """Return the moments of a series over all blocks, one block at a time: they may be large."""
        blocks = self._map("collecting moments", _collect_block, self._pair_blocks(Z), self.polynomial)
        total: list[Array] = next(blocks)
        for moments in blocks:
            total = [first + second for first, second in zip(total, moments, strict=True)]
        return total

    def _product(self, Z: Array) -> Array:
        blocks = self._pair_blocks(Z)
        if self.polynomial is not None:
            moments = self._collect(Z)
            return np.concatenate(list(self._map("applying moments", _apply_block, blocks, moments, self.polynomial)))
        tasks = [(rows, None if rows is columns else columns, Z_) for rows, _ in blocks for columns, Z_ in blocks]
        product = np.zeros(Z.shape, np.float64)
        for number, term in enumerate(self._map("multiplying weights", _multiply_blocks, tasks, self._sharpness)):
            product[self._rows.cuts[number // len(blocks)]] += term
        return product

    def _cross_product(self, X: Array, Z: Array) -> Array:
        if self.polynomial is not None:
            return series.apply_moments(X, self._collect(Z), self.polynomial, Z.dtype)
        terms = self._map("multiplying weights", _multiply_new_rows, self._pair_blocks(Z), X, self._sharpness)
        return sum(terms, np.zeros((len(X), Z.shape[1]), np.float64))


def _check_block(rows: NDArray[Any]) -> Array:
    return check_unit_rows(rows.astype(np.float64, copy=False), least=0)


def _collect_block(block: tuple[NDArray[Any], Array], polynomial: series.KernelPolynomial) -> list[Array]:
    return series.collect_moments(_check_block(block[0]), block[1], polynomial)


def _apply_block(block: tuple[NDArray[Any], Array], moments: list[Array], polynomial: series.KernelPolynomial) -> Array:
    return series.apply_to_own(_check_block(block[0]), block[1], moments, polynomial)


def _multiply_blocks(task: tuple[NDArray[Any], NDArray[Any] | None, Array], sharpness: float) -> Array:
    """Multiply the weights between two blocks, or within one if the second is None, by the rows of `Z`."""
    block, columns, Z = task
    rows = _check_block(block)
    if columns is None:
        return _multiply_symmetric(rows, Z, sharpness, HOST_TILE)
    return _multiply_rectangular(rows, _check_block(columns), Z, sharpness)


def _multiply_new_rows(block: tuple[NDArray[Any], Array], X: Array, sharpness: float) -> Array:
    return _multiply_rectangular(X, _check_block(block[0]), block[1], sharpness)
