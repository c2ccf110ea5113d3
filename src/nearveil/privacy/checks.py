"""What every accountant asks of its numbers: one clear error each, naming the field."""

import math

MAX_EPSILON = 500.0
"""Beyond this a promise is none (odds may change by a factor of 1e217); accountants treat such a loss as infinite."""

ROUNDING = 2.0**-46
"""Relative; more than the error of a value made by a few library functions, each within 4 units in the last place."""

LONGEST_TEXT = 200


def check_positive(value: float, name: str) -> float:
    """Return `value` as a float, or say that it must be a positive finite number."""
    number = _number(value, name)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{name} must be a positive finite number")
    return number


def check_finite(value: float, name: str) -> float:
    """Return `value` as a float, or say that it must be finite."""
    number = _number(value, name)
    if not math.isfinite(number):
        raise ValueError(f"{name} must be a finite number")
    return number


def check_count(value: int, name: str, least: int = 0) -> int:
    """Return `value` as an int, or say that it must be a whole number of at least `least`."""
    number = _number(value, name)
    if not (math.isfinite(number) and number == int(number) and number >= least):
        raise ValueError(f"{name} must be a whole number of at least {least}")
    # Through a float, a count above 2^53 would be rounded, perhaps down.
    return int(value)


def check_rate(value: float, name: str = "sampling_rate") -> float:
    """Return `value` as a float, or say that it must lie in (0, 1]."""
    number = _number(value, name)
    if not 0 < number <= 1:
        raise ValueError(f"{name} must lie in (0, 1]")
    return number


def check_delta(value: float, name: str = "delta") -> float:
    """Return `value` as a float, or say that it must lie in (0, 1)."""
    number = _number(value, name)
    if not 0 < number < 1:
        raise ValueError(f"{name} must lie in (0, 1), both ends excluded")
    return number


def check_epsilon(value: float, name: str = "epsilon") -> float:
    """Return `value` as a float, or say that it must lie in [0, 500]."""
    number = _number(value, name)
    if not 0 <= number <= MAX_EPSILON:
        raise ValueError(f"{name} must lie in [0, {MAX_EPSILON:g}]: beyond that nothing is promised")
    return number


def check_order(value: float, name: str = "order") -> float:
    """Return `value` as a float, or say that an order of Renyi divergence must be above 1."""
    number = _number(value, name)
    if not (math.isfinite(number) and number > 1):
        raise ValueError(f"{name} must be a finite number above 1")
    return number


def check_text(value: object, name: str) -> str:
    """Return `value`, or say that it must be a text of 1 to 200 printable characters."""
    if not (isinstance(value, str) and 0 < len(value) <= LONGEST_TEXT and value.isprintable() and value.strip()):
        raise ValueError(f"{name} must be a text of 1 to {LONGEST_TEXT} printable characters")
    return value


def _number(value: float, name: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a number") from None
