"""Amounts: whole numbers of a fixed small unit, so that sums are exact; rounded against the spender, always."""

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from fractions import Fraction

UNITS = 10**18
"""How many units an epsilon, or a divergence, of 1 has."""

Amounts = tuple[int | None, ...]
"""One amount for each thing that a budget counts; None is infinity."""


def written(number: float) -> Fraction:
    """Return the decimal number that a float is written as: 0.1 is one tenth, and ten of them are 1."""
    return Fraction(repr(float(number)))


def units_up(number: Fraction | float) -> int | None:
    """Return an amount in units, rounded up; None for infinity."""
    if not isinstance(number, Fraction) and not math.isfinite(number):
        return None
    return math.ceil(Fraction(number) * UNITS)


def units_down(number: Fraction | float) -> int:
    """Return an amount in units, rounded down."""
    return math.floor(Fraction(number) * UNITS)


def float_up(number: Fraction) -> float:
    """Return the least float that is written as a number not below this one."""
    nearest = float(number)
    return nearest if written(nearest) >= number else math.nextafter(nearest, math.inf)


def float_down(number: Fraction) -> float:
    """Return the largest float that is written as a number not above this one."""
    return -float_up(-number)


def shown_up(number: float, digits: int = 4) -> str:
    """Write what was spent, rounded up.

    Examples
    --------
    >>> shown_up(0.30000000000000004), shown_up(1.25), shown_up(float("inf"))
    ('0.3001', '1.25', 'infinity')
    """
    return _shown(number, Context(prec=digits, rounding=ROUND_CEILING))


def shown_down(number: float, digits: int = 4) -> str:
    """Write what is left, rounded down.

    Examples
    --------
    >>> shown_down(0.69999), shown_down(0.0)
    ('0.6999', '0')
    """
    return _shown(number, Context(prec=digits, rounding=ROUND_FLOOR))


def _shown(number: float, context: Context) -> str:
    if math.isinf(number):
        return "infinity"
    return f"{float(context.plus(Decimal(repr(float(number))))):.12g}"
