"""The certificates of the polynomials, attacked on a grid in extended precision."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearveil.privatemail.graph.series import find_best_polynomial, find_least_polynomial

GRID = np.linspace(-1 - 1e-6, 1 + 1e-6, 4001, dtype=np.longdouble)  # rounded rows pass 1 by a little


def worst_error(coefficients: tuple[float, ...], sharpness: float) -> float:
    values = sum(np.longdouble(c) * GRID**power for power, c in enumerate(coefficients))
    return float(np.max(np.abs(values * np.exp(-np.longdouble(sharpness) * (GRID - 1)) - 1)))


@given(bandwidth=st.floats(0.45, 300), degree=st.integers(0, 3))
def test_no_point_exceeds_the_certificate_and_some_reach_it(bandwidth: float, degree: int) -> None:
    sharpness = bandwidth**-2
    polynomial = find_best_polynomial(sharpness, degree)
    worst = worst_error(polynomial.coefficients, sharpness)
    assert worst <= polynomial.error_bound
    if polynomial.error_bound > 1e-12:
        assert worst > 0.99 * polynomial.error_bound


@pytest.mark.parametrize("degree", [0, 1, 2, 3])
@pytest.mark.parametrize("bandwidth", [0.5, 1.0, 2.0, 6.0])
def test_it_beats_chebyshev_which_beats_taylor(bandwidth: float, degree: int) -> None:
    sharpness = bandwidth**-2
    ours = find_best_polynomial(sharpness, degree).error_bound
    interpolant: Any = np.polynomial.chebyshev.chebinterpolate(lambda t: np.exp(sharpness * (t - 1)), degree)
    chebyshev = worst_error(tuple(np.polynomial.chebyshev.cheb2poly(interpolant)), sharpness)
    taylor = worst_error(
        tuple(math.exp(-sharpness) * sharpness**power / math.factorial(power) for power in range(degree + 1)), sharpness
    )
    assert ours < chebyshev * (1 + 1e-5)
    if bandwidth >= 1 and degree > 0:  # constants: both are the value in the middle
        assert chebyshev < taylor


def test_degree_two_at_bandwidth_six() -> None:
    assert find_best_polynomial(1 / 36, 2).error_bound < 9e-7


@pytest.mark.parametrize(("tolerance", "degree"), [(0.1, 0), (1e-3, 1), (1e-6, 2), (1e-8, 3)])
def test_the_least_degree_is_taken(tolerance: float, degree: int) -> None:
    polynomial = find_least_polynomial(1 / 36, tolerance)
    assert polynomial is not None
    assert polynomial.degree == degree
    assert polynomial.error_bound <= tolerance
    assert degree == 0 or find_best_polynomial(1 / 36, degree - 1).error_bound > tolerance


@pytest.mark.parametrize("sharpness", [1e-300, 1e-12, 4.9, 19.9])
def test_extreme_bandwidths_give_a_bound_that_is_true(sharpness: float) -> None:
    for degree in range(4):
        polynomial = find_best_polynomial(sharpness, degree)
        assert 0 <= worst_error(polynomial.coefficients, sharpness) <= polynomial.error_bound
    assert find_least_polynomial(1e6, 1e300) is None
