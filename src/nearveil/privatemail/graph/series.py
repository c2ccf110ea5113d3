"""Gaussian graphs in linear time, by a polynomial kernel of certified error (``docs/theory/graph.md``)."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.polynomial import Polynomial
from numpy.typing import NDArray

from nearveil.cluster import cut_rows
from nearveil.privatemail.graph._base import Array, GaussianGraph, find_namespace, is_host

MAX_DEGREE = 3
_MARGIN = 1e-6  # rows are of norm one up to rounding, so inner products may leave [-1, 1] by a little
_MAX_SHARPNESS = 5.0  # beyond it (bandwidth < 0.45) the best cubic has an error of 80%


@dataclass(frozen=True)
class KernelPolynomial:
    """A polynomial p(t) = c_0 + c_1 t + ... close to ``exp(u (t - 1))`` on [-1, 1]."""

    coefficients: tuple[float, ...]  # from the constant upwards
    error_bound: float  # certified largest ``|p(t) - w(t)| / w(t)``

    @property
    def degree(self) -> int:
        """The degree of the polynomial."""
        return len(self.coefficients) - 1


def find_best_polynomial(sharpness: float, degree: int) -> KernelPolynomial:
    """Return the polynomial of degree 0 to 3 of least relative error to ``exp(sharpness * (t - 1))`` on [-1, 1]."""
    # By Remez' exchange. The error is evaluated at the roots of ``p' - u p`` (docs/theory/graph.md, Theorem 1).
    if sharpness > _MAX_SHARPNESS:
        return KernelPolynomial((0.0,) * (degree + 1), math.inf)
    end = 1 + _MARGIN
    points = end * np.cos(np.pi * np.arange(degree + 2) / (degree + 1))[::-1]
    best: tuple[float, Polynomial] | None = None
    for _ in range(20):
        # p(t_i) / w(t_i) + (-1)^i E = 1 at every point of the reference, linear in p and E.
        powers = np.vander(points, degree + 1, increasing=True) * np.exp(-sharpness * (points - 1))[:, None]
        signs = (-1.0) ** np.arange(degree + 2)[:, None]
        *coefficients, _level = np.linalg.solve(np.hstack([powers, signs]), np.ones(degree + 2))
        polynomial = Polynomial(coefficients)
        extrema = _find_extrema(polynomial, sharpness, end)
        error = float(np.max(np.abs(polynomial(extrema) * np.exp(-sharpness * (extrema - 1)) - 1)))
        if best is not None and error >= best[0] * (1 - 1e-9):
            break
        best = (error, polynomial)
        if len(extrema) != degree + 2:
            break  # fewer alternations than unknowns: the error is below rounding
        points = extrema
    assert best is not None
    rounding = 8 * np.finfo(float).eps * np.exp(2 * sharpness)
    return KernelPolynomial(tuple(float(c) for c in best[1].coef), float(best[0] * (1 + 1e-6) + rounding))


def _find_extrema(polynomial: Polynomial, sharpness: float, end: float) -> NDArray[np.float64]:
    """Return the ends of the interval and, between them, all roots of p' - u p, in order."""
    roots = np.asarray((polynomial.deriv() - sharpness * polynomial).roots(), dtype=np.complex128)
    # A double root may come out as a pair just off the real line: its real part is the extremum.
    inside = [root.real for root in roots if abs(root.imag) < 1e-3 and -end < root.real < end]
    return np.array([-end, *sorted(inside), end])


def find_least_polynomial(sharpness: float, tolerance: float) -> KernelPolynomial | None:
    """Return the polynomial of least degree, up to 3, with a certified error of at most `tolerance`, or None."""
    polynomials = (find_best_polynomial(sharpness, degree) for degree in range(MAX_DEGREE + 1))
    return next((polynomial for polynomial in polynomials if polynomial.error_bound <= tolerance), None)


HOST_BLOCK = 1 << 19  # numbers in a block of rows: 4 MiB of doubles, so that a block stays in cache
DEVICE_BLOCK = 1 << 27
MOMENTS_LIMIT = 1 << 27  # numbers in the moments of one column: 1 GiB of doubles


def count_moments(degree: int, d: int) -> int:
    """Return the number of moments of a series for each column of Z."""
    return 1 + d + d * _count_features(degree, d)


def _count_features(degree: int, d: int) -> int:
    """Return the number of features of one row that represent ``c_2 t + c_3 t^2``."""
    return (0, 0, d, d + d * (d + 1) // 2)[degree]


class SeriesGraph(GaussianGraph):
    """Weights ``p(x_i.x_j)`` for a polynomial of certified relative error and degree m, in O(n d^m k) time."""

    # One pass over the rows collects moments and a second one applies them (docs/theory/graph.md).

    method = "series"

    def __init__(self, X: Array, bandwidth: float, model: Array, polynomial: KernelPolynomial) -> None:
        super().__init__(X, bandwidth, model)
        self.polynomial = polynomial
        self.error_bound = polynomial.error_bound

    def _product(self, Z: Array) -> Array:
        return apply_to_own(self._X, Z, collect_moments(self._X, Z, self.polynomial), self.polynomial)

    def _cross_product(self, X: Array, Z: Array) -> Array:
        return apply_moments(X, collect_moments(self._X, Z, self.polynomial), self.polynomial, Z.dtype)


def collect_moments(X: Array, Z: Array, polynomial: KernelPolynomial) -> list[Array]:
    """Return the sums of `Z`, slopes and higher moments over all rows, in double precision."""
    # Higher moments, from degree 2 on: ``T[f, c * d + a] = sum_j right(x_j)_f x_ja z_jc``.
    xp, d, k = find_namespace(Z), X.shape[1], Z.shape[1]
    slopes = xp.zeros((d, k), dtype=xp.float64, device=Z.device)
    higher = xp.zeros((_count_features(polynomial.degree, d), k * d), dtype=xp.float64, device=Z.device)
    for rows in _cut_blocks(X, k, polynomial):
        block, values = X[rows], Z[rows]
        slopes += xp.matmul(block.T, values)
        if polynomial.degree > 1:
            weighted = xp.reshape(block[:, None, :] * values[:, :, None], (-1, k * d))
            higher += xp.matmul(_make_right(block, polynomial).T, weighted)
    return [xp.sum(Z, axis=0, dtype=xp.float64), slopes, higher]


def apply_moments(X: Array, moments: list[Array], polynomial: KernelPolynomial, dtype: Any) -> Array:
    """Multiply the weights between rows `X` and the collected rows by their `Z`."""
    xp = find_namespace(X)
    constant, linear = (*polynomial.coefficients, 0.0)[:2]
    sums, slopes, higher = constant * moments[0], linear * moments[1], xp.astype(moments[2], dtype)
    product = xp.matmul(X, xp.astype(slopes, dtype)) + xp.astype(sums, dtype)
    for rows in _cut_blocks(X, slopes.shape[1], polynomial) if polynomial.degree > 1 else ():
        block = X[rows]
        applied = xp.reshape(xp.matmul(_make_left(block, polynomial), higher), (-1, slopes.shape[1], X.shape[1]))
        product[rows] += xp.vecdot(applied, block[:, None, :])
    return product


def apply_to_own(X: Array, Z: Array, moments: list[Array], polynomial: KernelPolynomial) -> Array:
    """Multiply like :func:`apply_moments`, for collected rows `X`, without the weight of each row with itself."""
    squares = find_namespace(X).vecdot(X, X)
    weights = squares * 0
    for coefficient in reversed(polynomial.coefficients):
        weights = weights * squares + coefficient
    return apply_moments(X, moments, polynomial, Z.dtype) - weights[:, None] * Z


def _make_right(X: Array, polynomial: KernelPolynomial) -> Array:
    """Return the features x and, for degree three, their pairs."""
    if polynomial.degree == 2:
        return X
    return find_namespace(X).concat([X, *(X[:, a : a + 1] * X[:, a:] for a in range(X.shape[1]))], axis=1)


def _make_left(X: Array, polynomial: KernelPolynomial) -> Array:
    """Return the same features times their coefficients; pairs of different features count twice."""
    quadratic, *cubic = polynomial.coefficients[2:]
    features = [quadratic * X]
    for a in range(X.shape[1]) if cubic else ():
        scaled = (2 * cubic[0]) * X[:, a : a + 1]
        features += [0.5 * scaled * X[:, a : a + 1], scaled * X[:, a + 1 :]]
    return find_namespace(X).concat(features, axis=1)


def _cut_blocks(X: Array, k: int, polynomial: KernelPolynomial) -> list[slice]:
    """Split the rows so that the widest intermediate array of a block fits in cache, or on the device."""
    d = X.shape[1]
    width = max(k * d, _count_features(polynomial.degree, d))
    step = max(64, (HOST_BLOCK if is_host(X) else DEVICE_BLOCK) // width)
    return cut_rows(X.shape[0], step)
