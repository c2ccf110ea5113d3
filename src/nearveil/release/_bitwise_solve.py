"""From an exact epsilon to the nominal one that has it."""

import math
from collections.abc import Callable

import numpy as np
from scipy.optimize import brentq

LEAST, MOST = 1e-9, 40.0  # of the nominal epsilon of a bit: below, thresholds are too coarse; above, nothing is hidden


def largest_nominal(
    price: Callable[[float], float], epsilon: float, turn: float, length: int, name: str = "the mechanism"
) -> float:
    """Return the largest nominal epsilon found whose exact price is at most `epsilon`.

    `price`: The exact epsilon of a nominal one; rising from `turn` on.
    `length`: Bits.
    `name`: What an error calls the mechanism.

    Examples
    --------
    >>> f"{largest_nominal(lambda nominal: nominal / 2, 1.0, 0.0, 10):.6f}"
    '2.000000'
    """
    least, most = LEAST * length, MOST * length
    starts = [start for start in (max(turn, least), least) if price(start) <= epsilon]
    if not starts:
        floor = min(price(max(turn, least)), price(least))
        raise ValueError(
            f"epsilon must be at least {floor:.6g} for {name} with this alpha and {length} bits: "
            "no nominal_epsilon reaches less. Take alpha nearer to 1, fewer bits or fewer n_components"
        )
    low = starts[0]
    high = min(2 * max(low, epsilon), most)
    while price(high) <= epsilon and high < most:
        low, high = high, min(2 * high, most)
    if price(high) <= epsilon:
        return high
    found = float(brentq(lambda nominal: price(nominal) - epsilon, low, high, rtol=1e-15, xtol=1e-300))
    step = 2.0**-50
    while found > low and price(found) > epsilon:  # rounding, or a bound that is minimised to a few digits
        found, step = max(found * (1 - step), low), 2 * step
    return found


def checked_number(value: float, name: str) -> float:
    """Return a positive, finite number, or say what is wrong with it."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise ValueError(f"{name} must be a number")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be positive and finite")
    return float(value)
