"""Polynomials that stand in for the Gaussian kernel on unit rows, with certified error.

On unit rows the weight depends on the inner product t alone: ``w(t) = exp(u (t - 1))``, u = 1/s^2.
A polynomial p with small *relative* error ``r(t) = p(t)/w(t) - 1`` on [-1, 1] turns the product
with all n^2 weights into sums of moments. Two facts make the best p and its error easy:

* Minimising ``max |r|`` is a linear Chebyshev problem, so Remez' exchange solves it.
* ``r'(t) = (p'(t) - u p(t)) / w(t)``: the extrema of r inside the interval are the roots of a
  polynomial of the same degree. With them and the two ends the largest error is *evaluated*, not
  estimated on a grid. That is the certificate.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.polynomial import Polynomial
from numpy.typing import NDArray

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
    """Return the polynomial of least relative error to ``exp(sharpness * (t - 1))`` on [-1, 1].

    `sharpness`: The u of the kernel, 1 / bandwidth^2.
    `degree`: From 0 to 3.

    Examples
    --------
    >>> best_polynomial(1 / 36, 2).error_bound < 9e-7
    True
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
    """Return the polynomial of least degree whose certified error is at most `tolerance`.

    Returns: None where no degree up to 3 is good enough.
    """
    for degree in range(MAX_DEGREE + 1):
        polynomial = best_polynomial(sharpness, degree)
        if polynomial.error_bound <= tolerance:
            return polynomial
    return None
