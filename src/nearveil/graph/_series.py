"""The Gaussian graph in linear time: a polynomial in the inner products.

With ``p(t) = c_0 + c_1 t + t^2 (c_2 + c_3 t)`` the product ``sum_j p(x_i.x_j) z_j`` needs the rows
x_j only through sums over all of them: ``sum z_j`` and ``sum x_j z_j`` for the first two terms, and

    T[f, a] = sum_j right(x_j)_f x_ja z_j,     sum_a x_ia <left(x_i), T[:, a]>

for the rest, where ``<left(x), right(y)> = c_2 (x.y) + c_3 (x.y)^2`` takes the features x and, for
degree three, their pairs. One pass over the rows collects these moments and a second one applies
them: O(n d^m k) time for degree m, where the exact graph needs O(n^2 (d + k)).
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.polynomial import Polynomial
from numpy.typing import NDArray

from nearveil.graph._base import Array, GaussianGraph, is_host, namespace

MAX_DEGREE = 3
_MARGIN = 1e-6  # rows are of norm one up to rounding, so inner products may leave [-1, 1] by a little
_HOPELESS = 5.0  # beyond this sharpness (bandwidth < 0.45) the best cubic is off by 80%


@dataclass(frozen=True)
class KernelPolynomial:
    """A polynomial p(t) = c_0 + c_1 t + ... close to ``exp(u (t - 1))`` on [-1, 1]."""

    coefficients: tuple[float, ...]  # from the constant upwards
    error_bound: float  # certified largest ``|p(t) - w(t)| / w(t)``

    @property
    def degree(self) -> int:
        """The degree of the polynomial."""
        return len(self.coefficients) - 1


def best_polynomial(sharpness: float, degree: int) -> KernelPolynomial:
    """Return the polynomial of least relative error to ``exp(sharpness * (t - 1))`` on [-1, 1], of degree 0 to 3.

    Minimising ``max |r|``, r = p / w - 1, is a linear Chebyshev problem, which Remez' exchange solves. The extrema of r
    are the roots of ``p' - u p``, so the largest error is evaluated, not estimated on a grid: that is the certificate.
    """
    if sharpness > _HOPELESS:
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
        extrema = _extrema(polynomial, sharpness, end)
        error = float(np.max(np.abs(_relative_error(polynomial, sharpness, extrema))))
        if best is not None and error >= best[0] * (1 - 1e-9):
            break
        best = (error, polynomial)
        if len(extrema) != degree + 2:
            break  # fewer alternations than unknowns: the error has sunk into rounding
        points = extrema
    assert best is not None
    rounding = 8 * np.finfo(float).eps * np.exp(2 * sharpness)
    return KernelPolynomial(tuple(float(c) for c in best[1].coef), float(best[0] * (1 + 1e-6) + rounding))


def _relative_error(polynomial: Polynomial, sharpness: float, t: NDArray[np.float64]) -> NDArray[np.float64]:
    values: NDArray[np.float64] = polynomial(t) * np.exp(-sharpness * (t - 1)) - 1
    return values


def _extrema(polynomial: Polynomial, sharpness: float, end: float) -> NDArray[np.float64]:
    """Return the ends of the interval and, between them, all roots of p' - u p, in order."""
    roots = np.asarray((polynomial.deriv() - sharpness * polynomial).roots(), dtype=np.complex128)
    # A double root may come out as a pair just off the real line: its real part is the extremum.
    inside = [root.real for root in roots if abs(root.imag) < 1e-3 and -end < root.real < end]
    return np.array([-end, *sorted(inside), end])


def least_polynomial(sharpness: float, tolerance: float) -> KernelPolynomial | None:
    """Return the polynomial of least degree, up to 3, whose certified error is at most `tolerance`, or None."""
    for degree in range(MAX_DEGREE + 1):
        polynomial = best_polynomial(sharpness, degree)
        if polynomial.error_bound <= tolerance:
            return polynomial
    return None


HOST_BLOCK = 1 << 19  # numbers in a block of rows: 4 MiB of doubles, so that a block stays in cache
DEVICE_BLOCK = 1 << 27
MOMENTS_LIMIT = 1 << 27  # numbers in the moments of one column: 1 GiB of doubles


def n_moments(degree: int, d: int) -> int:
    """Return how many moments a series needs for each column of Z."""
    return 1 + d + (d * _n_features(degree, d) if degree > 1 else 0)


def _n_features(degree: int, d: int) -> int:
    """Return the length of the features of one row that stand for ``c_2 t + c_3 t^2``."""
    return d if degree == 2 else d + d * (d + 1) // 2


class SeriesGraph(GaussianGraph):
    """Weights ``p(x_i.x_j)`` for a polynomial p of certified relative error."""

    method = "series"

    def __init__(self, X: Array, bandwidth: float, model: Array, polynomial: KernelPolynomial) -> None:
        super().__init__(X, bandwidth, model)
        self.polynomial = polynomial
        self.error_bound = polynomial.error_bound

    def _product(self, Z: Array) -> Array:
        return self.apply_sums(self._X, self.collect_sums(Z), Z.dtype) - self.weigh_own()[:, None] * Z

    def weigh_own(self) -> Array:
        """Return the weight that the polynomial gives each row with itself."""
        own = namespace(self._X).vecdot(self._X, self._X)
        weight = own * 0
        for coefficient in reversed(self.polynomial.coefficients):
            weight = weight * own + coefficient
        return weight

    def _cross_product(self, X: Array, Z: Array) -> Array:
        return self.apply_sums(X, self.collect_sums(Z), Z.dtype)

    def collect_sums(self, Z: Array) -> list[Array]:
        """Return what a product needs of all rows, in double precision: sums of `Z`, slopes, and higher moments."""
        xp = namespace(Z)
        slopes = xp.zeros((self._X.shape[1], Z.shape[1]), dtype=xp.float64, device=Z.device)
        for rows in self._blocks(self._X, Z.shape[1]):
            slopes += xp.matmul(self._X[rows].T, Z[rows])
        higher = [self._moments(Z)] if self.polynomial.degree > 1 else []
        return [xp.sum(Z, axis=0, dtype=xp.float64), slopes, *higher]

    def apply_sums(self, X: Array, collected: list[Array], dtype: Any) -> Array:
        """Return the product of the weights between rows `X` and those whose sums were collected."""
        sums, slopes, *higher = collected
        xp, k = namespace(sums), slopes.shape[1]
        constant, linear = (*self.polynomial.coefficients, 0.0)[:2]
        product = xp.matmul(X, xp.astype(linear * slopes, dtype)) + xp.astype(constant * sums, dtype)
        if higher:
            moments = xp.astype(higher[0], dtype)
            for rows in self._blocks(X, k):
                block = X[rows]
                applied = xp.reshape(xp.matmul(self._left(block), moments), (-1, k, X.shape[1]))
                product[rows] += xp.vecdot(applied, block[:, None, :])
        return product

    def _moments(self, Z: Array) -> Array:
        """Collect ``T[f, c * d + a] = sum_j right(x_j)_f x_ja z_jc``, in double precision."""
        xp = namespace(Z)
        d, k = self._X.shape[1], Z.shape[1]
        total = xp.zeros((_n_features(self.polynomial.degree, d), k * d), dtype=xp.float64, device=Z.device)
        for rows in self._blocks(self._X, k):
            block = self._X[rows]
            weighted = xp.reshape(block[:, None, :] * Z[rows][:, :, None], (-1, k * d))
            total += xp.matmul(self._right(block).T, weighted)
        return total

    def _right(self, X: Array) -> Array:
        """Return the features x and, for degree three, their pairs."""
        if self.polynomial.degree == 2:
            return X
        return namespace(X).concat([X, *(X[:, a : a + 1] * X[:, a:] for a in range(X.shape[1]))], axis=1)

    def _left(self, X: Array) -> Array:
        """Return the same features times their coefficients; a pair of two different ones counts twice."""
        quadratic, *cubic = self.polynomial.coefficients[2:]
        features = [quadratic * X]
        for a in range(X.shape[1]) if cubic else ():
            scaled = (2 * cubic[0]) * X[:, a : a + 1]
            features += [0.5 * scaled * X[:, a : a + 1], scaled * X[:, a + 1 :]]
        return namespace(X).concat(features, axis=1)

    def _blocks(self, X: Array, k: int) -> list[slice]:
        """Cut the rows so that the widest thing made of a block fits in cache, or on the device."""
        d = X.shape[1]
        width = max(k * d, _n_features(self.polynomial.degree, d))
        step = max(64, (HOST_BLOCK if is_host(X) else DEVICE_BLOCK) // width)
        return [slice(start, start + step) for start in range(0, X.shape[0], step)]
