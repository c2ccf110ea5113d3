"""Rows of features as integers, so that every distance is exact whatever computes it."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

LONGEST = 2364
"""No rounded row is longer. ``3 * LONGEST**2`` is 16,765,488, below ``2**24`` by 11,728."""
MOST_FEATURES = 2**20
_GRID = 2.0**16
_CHUNK = 2**15  # numbers at a time: they stay in the cache


@dataclass(frozen=True)
class IntegerRows:
    r"""Rounding of rows to integers, one row at a time.

    A row is first scaled: to norm one if `feature_norm` is None (zero rows stay zero), else by ``1 / feature_norm``,
    and rows longer than `feature_norm` to norm one. It is then multiplied by ``LONGEST - sqrt(n_features) / 2`` and
    rounded to the nearest integers.

    What comes out depends on the row and on the two parameters, which are public, and on nothing else: not on the
    other rows, on memory layout, on threads, on the machine. Every step is either element by element in IEEE
    arithmetic, or a maximum, or a sum of integers, and none of these knows an order.

    Every partial sum of 2 x.y - |y|^2 of rounded rows is a whole number below 2^24 in magnitude, so float32 holds it
    exactly, in any blocking and on any device: Theorem 3 of ``docs/theory/private-knn.md``, attacked by
    ``tests/votes/test_search.py::test_no_rounded_row_is_too_long``.

    Examples
    --------
    >>> IntegerRows(2).round([[3.0, 4.0], [0.0, 0.0], [3e300, 4e300]])
    array([[1418, 1891],
           [   0,    0],
           [1418, 1891]], dtype=int16)
    """

    n_features: int
    feature_norm: float | None = None  # a public bound, never taken from the private rows

    def __post_init__(self) -> None:
        """Refuse parameters that no row can be rounded with."""
        if not 1 <= self.n_features <= MOST_FEATURES:
            raise ValueError(f"rows must have 1 to {MOST_FEATURES:,} features; reduce their number before the search")
        if self.feature_norm is not None and not (self.feature_norm > 0 and math.isfinite(self.feature_norm)):
            raise ValueError("feature_norm must be a positive, finite number, or None for rows of norm one")

    def round(self, rows: ArrayLike, *, name: str = "rows") -> NDArray[np.int16]:
        """Round rows.

        `rows`: Finite numbers of any real type and any magnitude.
        `name`: What errors call them.
        Returns: In C order.
        """
        given = _checked(rows, self.n_features, name)
        rounded = np.empty(given.shape, dtype=np.int16)
        step = max(1, _CHUNK // self.n_features)
        for start in range(0, len(given), step):
            chunk = slice(start, start + step)
            with np.errstate(over="ignore", under="ignore"):  # wide types may overflow here, tiny rows below
                rounded[chunk] = self._rounded(given[chunk].astype(np.float64), name)
        return rounded

    def _rounded(self, rows: NDArray[np.float64], name: str) -> NDArray[np.float64]:
        peaks = np.maximum(rows.max(axis=1, keepdims=True), -rows.min(axis=1, keepdims=True))
        if not np.isfinite(peaks).all():
            raise ValueError(f"{name} must be finite: they hold NaN or infinity")
        peaks[peaks == 0] = 1
        grid = np.rint(rows / peaks * _GRID)
        # A sum of at most 2^20 integers of at most 2^32 each is exact in float64, in any order.
        lengths = np.maximum(np.sqrt(np.vecdot(grid, grid)), 1)[:, None]
        if self.feature_norm is not None:
            lengths = np.maximum(lengths, self.feature_norm / peaks * _GRID)
        radius = LONGEST - math.sqrt(self.n_features) / 2
        rounded: NDArray[np.float64] = np.rint(grid * (radius / lengths))
        return rounded


def _checked(rows: ArrayLike, n_features: int, name: str) -> NDArray[np.generic]:
    given = np.asarray(rows)
    if given.ndim != 2 or given.shape[1] != n_features:
        raise ValueError(f"{name} must have shape (n, {n_features}), one row each; got shape {given.shape}")
    if not (np.issubdtype(given.dtype, np.floating) or np.issubdtype(given.dtype, np.integer) or given.dtype == bool):
        raise ValueError(f"{name} must be real numbers; got {given.dtype}")
    return given
