"""The low bits of the noise: floating-point numbers have gaps, and the gaps may show what was added to what."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearveil.audit._bounds import Floats
from nearveil.audit._experiment import Outcomes
from nearveil.audit.attacks._classifier import boosted_on
from nearveil.audit.attacks._threshold import Score

_NOTHING = 2000.0  # the last bit of zero: beyond every other
_KEPT = 4  # low bits of a mantissa that a classifier sees


def last_bits(numbers: NDArray[np.floating]) -> Floats:
    """Return, for each number, e where 2^e is its lowest bit that is set.

    Examples
    --------
    >>> last_bits(np.array([1.0, 0.75, 3 * 2.0**-60]))
    array([  0.,  -2., -60.])
    """
    mantissa, exponent = np.frexp(np.asarray(numbers, dtype=np.float64))
    whole = np.ldexp(np.abs(mantissa), 53).astype(np.int64)
    low = np.log2(np.maximum(whole & -whole, 1).astype(np.float64))
    return np.where(whole == 0, _NOTHING, low + exponent - 53)


def finest(first: Outcomes, second: Outcomes) -> Score | None:
    """Score by the finest bit of all numbers; None where what is seen is no floating point.

    `first, second`: Their kind of numbers decides, nothing else.
    """
    del second
    if first.numbers.dtype.kind != "f":
        return None
    return lambda outcomes: last_bits(outcomes.numbers).min(axis=1)


def patterns(first: Outcomes, second: Outcomes) -> Score | None:
    """Learn from the positions of the last bits and from the lowest bits of the mantissas, by boosted trees."""
    if first.numbers.dtype.kind != "f":
        return None
    return boosted_on(first, second, _patterns)


def _patterns(outcomes: Outcomes) -> Floats:
    numbers = np.ascontiguousarray(outcomes.numbers)
    words: NDArray[Any] = numbers.view(np.uint32 if numbers.dtype.itemsize == 4 else np.uint64)
    low = [((words >> bit) & 1).astype(np.float64) for bit in range(_KEPT)]
    return np.concatenate([last_bits(numbers), *low], axis=1)
