"""Argument checks: one clear error each, which names the field and never holds its value."""

import math
from collections.abc import Callable
from numbers import Integral
from typing import Any, get_args

MAX_EPSILON = 500.0
"""Beyond this a guarantee says nothing (odds may change by a factor of 1e217); such a loss counts as infinite."""

ROUNDING = 2.0**-46
"""Relative; more than the error of a value made by a few library functions, each within 4 units in the last place."""

LONGEST_TEXT = 200


def _check(value: Any, name: str, wanted: str, fits: Callable[[float], bool]) -> float:
    """Return `value` as a float that `fits`, or say that it must `wanted`."""
    try:
        number = math.nan if isinstance(value, str | bytes | bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not fits(number):
        raise ValueError(f"{name} must {wanted}")
    return number


def check_positive(value: float, name: str) -> float:
    """Return a positive finite number as a float, or raise."""
    return _check(value, name, "be a positive finite number", lambda number: 0 < number < math.inf)


def check_nonnegative(value: float, name: str) -> float:
    """Return a finite number of at least 0 as a float, or raise."""
    return _check(value, name, "be a finite number of at least 0", lambda number: 0 <= number < math.inf)


def check_finite(value: float, name: str) -> float:
    """Return a finite number as a float, or raise."""
    return _check(value, name, "be a finite number", math.isfinite)


def check_range(value: float, name: str, least: float, most: float) -> float:
    """Return a number from `least` to `most` as a float, or raise."""
    return _check(value, name, f"be from {least:g} to {most:g}", lambda number: least <= number <= most)


def check_rate(value: float, name: str = "sampling_rate") -> float:
    """Return a number in (0, 1] as a float, or raise."""
    return _check(value, name, "lie in (0, 1]", lambda number: 0 < number <= 1)


def check_delta(value: float, name: str = "delta") -> float:
    """Return a number in (0, 1) as a float, or raise."""
    return _check(value, name, "lie in (0, 1), both ends excluded", lambda number: 0 < number < 1)


def check_epsilon(value: float, name: str = "epsilon") -> float:
    """Return a number in [0, 500] as a float, or raise."""
    wanted = f"be from 0 to {MAX_EPSILON:g}; smaller protects more"
    return _check(value, name, wanted, lambda number: 0 <= number <= MAX_EPSILON)


def check_order(value: float, name: str = "order") -> float:
    """Return an order of Renyi divergence, a finite number above 1, as a float, or raise."""
    return _check(value, name, "be a finite number above 1", lambda number: 1 < number < math.inf)


def check_count(value: int, name: str, least: int = 0) -> int:
    """Return a whole number of at least `least` as an int, or raise."""
    wanted = f"be a whole number of at least {least}"
    _check(value, name, wanted, lambda number: number.is_integer() and number >= least)
    # Through a float, a count above 2^53 would be rounded, perhaps down.
    return int(value)


def check_integer(value: Any, name: str, least: int = 0, most: float = math.inf) -> int:
    """Return an integer from `least` to `most` as an int, or raise; no float is one, and no boolean."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not least <= int(value) <= most:
        bounds = f"of at least {least}" if math.isinf(most) else f"from {least} to {most}"
        raise ValueError(f"{name} must be an integer {bounds}")
    return int(value)


def check_choice(value: str, name: str, choices: Any) -> None:
    """Raise unless `value` is one of the strings of a Literal."""
    *most, last = (f'"{choice}"' for choice in get_args(choices))
    if value not in get_args(choices):
        raise ValueError(f"{name} must be {', '.join(most)} or {last}")


def check_text(value: object, name: str) -> str:
    """Return a text of 1 to 200 printable characters, or raise."""
    if not (isinstance(value, str) and 0 < len(value) <= LONGEST_TEXT and value.isprintable() and value.strip()):
        raise ValueError(f"{name} must be a text of 1 to {LONGEST_TEXT} printable characters")
    return value
