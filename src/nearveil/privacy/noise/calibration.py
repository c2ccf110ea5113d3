"""How much Gaussian noise a guarantee needs: the analytic answer, and the classical one as published."""

import math
from typing import Any

import numpy as np
from dp_accounting import get_sigma_gaussian
from numpy.typing import NDArray
from scipy.special import log_ndtr

from nearveil.privacy.checks import check_positive, check_range

EPSILONS = (1e-6, 64.0)  # below, rounding would eat the answer; above, nothing is guaranteed worth a name
DELTAS = (1e-18, 0.999)
_ULP = 2.0**-52


def round_up(value: float) -> float:
    """Return a little more (four units in the last place), so that rounding never favours the spender."""
    return value * (1 + 4 * _ULP)


def round_down(value: float) -> float:
    """Return a little less (four units in the last place)."""
    return value * (1 - 4 * _ULP)


def as_double(value: Any) -> Any:
    """Return a NumPy or Python number as a double; anything else as it is, for the checks to refuse."""
    return float(value) if isinstance(value, int | float | np.floating | np.integer) else value


def gaussian_delta(noise_multiplier: float, epsilon: float) -> float:
    """Return an upper bound on the delta of continuous Gaussian noise at `epsilon`, tight to rounding.

    With noise of c times the sensitivity, ``delta = Phi(a) - e^epsilon Phi(b)``, a and b being
    ``+-1/(2c) - epsilon c`` (Balle and Wang 2018, Theorem 8; necessary and sufficient). Rounding is
    bounded and added, on the ground that `log_ndtr` errs by at most 8 units in the last place.
    Attacked by `test_gaussian_delta_is_an_upper_bound` in 60 digits.
    """
    multiplier = check_positive(noise_multiplier, "noise_multiplier")
    return float(gaussian_deltas(multiplier, np.array([check_range(epsilon, "epsilon", *EPSILONS)]))[0])


def gaussian_deltas(noise_multiplier: float, epsilons: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the same bound at many epsilons, none of them negative."""
    half, drift = 0.5 / noise_multiplier, epsilons * noise_multiplier
    a, b = half - drift, -half - drift
    log_a, log_b = log_ndtr(a), log_ndtr(b)
    # a and b are off by three roundings of |b|; the slope of log Phi at x is at most |x| + 1.
    error_a = _ULP * (8 * np.abs(log_a) + 3 * np.abs(b) * (np.abs(a) + 1))
    error_b = _ULP * (8 * np.abs(log_b) + 3 * np.abs(b) * (np.abs(b) + 1))
    gap = log_a - log_b - epsilons  # positive: 1 - e^-gap is the share of Phi(a) that stays
    gap = np.maximum(gap, 0.0) + error_a + error_b + _ULP * epsilons
    return np.asarray(round_up(-np.expm1(-gap) * np.exp(log_a + error_a)))


def analytic_gaussian_scale(sensitivity: float, epsilon: float, delta: float) -> float:
    """Return the least standard deviation of continuous Gaussian noise that is (epsilon, delta)-DP.

    dp-accounting finds the root; what is returned is raised until `gaussian_delta` certifies it, by less than 1e-6 of
    its value. Attacked by `test_the_analytic_scale_is_sufficient_and_necessary`. The sensitivity is L2; epsilon is from
    1e-6 to 64, delta from 1e-18 to 0.999.

    Examples
    --------
    >>> f"{analytic_gaussian_scale(1.0, 1.0, 1e-5):.6f}"
    '3.730632'
    """
    sensitivity = check_positive(sensitivity, "sensitivity")
    epsilon, delta = check_range(epsilon, "epsilon", *EPSILONS), check_range(delta, "delta", *DELTAS)
    root, margin = float(get_sigma_gaussian(epsilon, delta)), 2.0**-40
    while gaussian_delta(root * (1 + margin), epsilon) > delta:
        margin *= 2
    return round_up(root * (1 + margin) * sensitivity)


def classical_gaussian_scale(sensitivity: float, epsilon: float, delta: float) -> float:
    """Return ``sqrt(2 ln(1.25 / delta)) sensitivity / epsilon``, the classical calibration as published.

    A theorem for epsilon < 1 alone (Dwork and Roth 2014, Theorem A.1). From 1 on it is none: at epsilon
    12 and delta 1e-5 the least noise that keeps the guarantee is 7% more than this. It is here to
    reproduce what others did; nothing in this package calibrates with it.
    """
    sensitivity = check_positive(sensitivity, "sensitivity")
    epsilon, delta = check_range(epsilon, "epsilon", *EPSILONS), check_range(delta, "delta", *DELTAS)
    return math.sqrt(2 * math.log(1.25 / delta)) * sensitivity / epsilon
