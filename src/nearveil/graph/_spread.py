"""Gaussian graphs over rows of a Dask array: blocks are multiplied where they lie, and `Z` is at home.

Sums over blocks are made in the order of the blocks, in double precision: how the rows are cut into blocks moves a
result by rounding alone.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearveil.cluster import SpreadRows
from nearveil.graph._base import Array, GaussianGraph, Graph, check_unit_rows
from nearveil.graph._series import KernelPolynomial, SeriesGraph

Rectangular = Any  # multiplies the weights between two blocks of rows with `Z`


class SpreadGraph(GaussianGraph):
    """A graph of rows that need not fit into the memory: by a series, or exact."""

    def __init__(self, rows: SpreadRows, bandwidth: float, dtype: Any) -> None:
        if rows.shape[0] < 2:
            raise ValueError(f"X has {rows.shape[0]} row(s); it needs at least 2")
        Graph.__init__(self, np.empty((rows.shape[0], 1), rows.dtype), rows.shape[0], dtype)
        self._rows = rows
        self._X = np.empty((0, rows.shape[1]), dtype)  # what new rows are compared with: dtype and features
        self.bandwidth = bandwidth

    def _pair(self, Z: Array) -> list[tuple[Any, Array]]:
        """Return every block with its rows of `Z`."""
        return [(part, Z[some]) for part, some in zip(self._rows.parts, self._rows.cuts, strict=True)]


class SpreadSeries(SpreadGraph):
    """Weights by a polynomial: one pass over the blocks collects sums, another applies them."""

    method = "series"

    def __init__(self, rows: SpreadRows, bandwidth: float, dtype: Any, polynomial: KernelPolynomial) -> None:
        super().__init__(rows, bandwidth, dtype)
        self.polynomial, self.error_bound = polynomial, polynomial.error_bound

    def _terms(self) -> tuple[Any, ...]:
        return self.bandwidth, self._work_dtype, self.polynomial

    def _collect(self, Z: Array) -> list[Array]:
        found = self._rows.cluster.map(_collect_block, self._pair(Z), *self._terms(), stage="collecting moments")
        total: list[Array] = []
        for sums in found:
            total = [one + other for one, other in zip(total, sums, strict=True)] if total else sums
        return total

    def _product(self, Z: Array) -> Array:
        found = self._rows.cluster.map(
            _apply_block, self._pair(Z), self._collect(Z), *self._terms(), stage="applying moments"
        )
        return np.concatenate(list(found))

    def _cross_product(self, X: Array, Z: Array) -> Array:
        return SeriesGraph(X, self.bandwidth, X[:, :1], self.polynomial).apply_sums(X, self._collect(Z), Z.dtype)


def _make_series(rows: NDArray[Any], bandwidth: float, dtype: Any, polynomial: KernelPolynomial) -> SeriesGraph:
    unit = check_unit_rows(rows.astype(dtype, copy=False), least=0)
    return SeriesGraph(unit, bandwidth, unit[:, :1], polynomial)


def _collect_block(pair: tuple[NDArray[Any], Array], *terms: Any) -> list[Array]:
    rows, Z = pair
    return _make_series(rows, *terms).collect_sums(Z)


def _apply_block(pair: tuple[NDArray[Any], Array], collected: list[Array], *terms: Any) -> Array:
    rows, Z = pair
    graph = _make_series(rows, *terms)
    return graph.apply_sums(graph._X, collected, Z.dtype) - graph.weigh_own()[:, None] * Z


class SpreadExact(SpreadGraph):
    """All weights, for each pair of blocks a task."""

    method = "exact"

    def __init__(self, rows: SpreadRows, bandwidth: float, dtype: Any, rectangular: Rectangular) -> None:
        super().__init__(rows, bandwidth, dtype)
        self._rectangular = rectangular

    def _product(self, Z: Array) -> Array:
        pairs = self._pair(Z)
        tasks = [(here, there, values, here is there) for here, _ in pairs for there, values in pairs]
        found = self._rows.cluster.map(
            _multiply_blocks, tasks, self._rectangular, self._sharpness, self._work_dtype, stage="multiplying weights"
        )
        product = np.zeros(Z.shape, np.float64)
        for number, one in enumerate(found):
            product[self._rows.cuts[number // len(pairs)]] += one
        return product

    def _cross_product(self, X: Array, Z: Array) -> Array:
        found = self._rows.cluster.map(
            _multiply_new,
            self._pair(Z),
            X,
            self._rectangular,
            self._sharpness,
            self._work_dtype,
            stage="multiplying weights",
        )
        return sum(found, np.zeros((len(X), Z.shape[1]), np.float64))


def _multiply_blocks(
    task: tuple[NDArray[Any], NDArray[Any], Array, bool], rectangular: Rectangular, sharpness: float, dtype: Any
) -> Array:
    here, there, Z, same = task
    rows = check_unit_rows(here.astype(dtype, copy=False), least=0)
    if not same:
        return rectangular(rows, check_unit_rows(there.astype(dtype, copy=False), least=0), Z, sharpness)
    return rectangular(rows, rows, Z, sharpness, skip_diagonal=True)


def _multiply_new(
    pair: tuple[NDArray[Any], Array], X: Array, rectangular: Rectangular, sharpness: float, dtype: Any
) -> Array:
    rows, Z = pair
    return rectangular(X, check_unit_rows(rows.astype(dtype, copy=False), least=0), Z, sharpness)
