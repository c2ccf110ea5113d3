"""Argument checks. Each error names the argument and never shows its value."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import Any, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

MAX_EPSILON = 500.0
"""Beyond this a guarantee says nothing (odds may change by a factor of 1e217); such a loss counts as infinite."""

ROUNDING = 2.0**-46
"""Relative; more than the error of a value made by a few library functions, each within 4 units in the last place."""

LONGEST_TEXT = 200
_OFF_ONE = 1e-3  # tolerance of a norm, above the rounding of 16-bit rows; rows within it keep every bit
_BLOCK = 4096  # rows to normalise at a time


@dataclass(frozen=True)
class NumberCheck:
    """A check of one number. A call returns the number as a float, or raises an error that states the rule."""

    rule: str
    fits: Callable[[float], bool]
    name: str = ""  # of the argument, if the caller gives none

    def __call__(self, value: float, name: str = "") -> float:
        try:
            number = math.nan if isinstance(value, str | bytes | bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not self.fits(number):
            raise ValueError(f"{name or self.name} must {self.rule}")
        return number


check_positive = NumberCheck("be a finite number above 0", lambda number: 0 < number < math.inf)
check_nonnegative = NumberCheck("be a finite number of at least 0", lambda number: 0 <= number < math.inf)
check_finite = NumberCheck("be a finite number", math.isfinite)
check_rate = NumberCheck("be in (0, 1]", lambda number: 0 < number <= 1, "sampling_rate")
check_delta = NumberCheck("be in (0, 1), both ends excluded", lambda number: 0 < number < 1, "delta")
check_epsilon = NumberCheck(
    f"be from 0 to {MAX_EPSILON:g}; smaller protects more", lambda number: 0 <= number <= MAX_EPSILON, "epsilon"
)
check_order = NumberCheck("be a finite number above 1", lambda number: 1 < number < math.inf, "order")


def check_range(value: float, name: str, least: float, most: float) -> float:
    """Return a number from `least` to `most` as a float, or raise."""
    return NumberCheck(f"be from {least:g} to {most:g}", lambda number: least <= number <= most)(value, name)


def check_count(value: int, name: str, least: int = 0) -> int:
    """Return a whole number of at least `least` as an int, or raise."""
    NumberCheck(f"be a whole number of at least {least}", lambda n: n.is_integer() and n >= least)(value, name)
    return int(value)  # not through a float, which would round counts above 2^53


def is_integer(value: Any, least: float = -math.inf, most: float = math.inf) -> bool:
    """Return whether `value` is an integer from `least` to `most`. Floats and booleans are not."""
    return not isinstance(value, bool) and isinstance(value, Integral) and least <= int(value) <= most


def check_integer(value: Any, name: str, least: int = 0, most: float = math.inf) -> int:
    """Return an integer from `least` to `most` as an int, or raise. Floats and booleans are refused."""
    if not is_integer(value, least, most):
        bounds = f"of at least {least}" if math.isinf(most) else f"from {least} to {most}"
        raise ValueError(f"{name} must be an integer {bounds}")
    return int(value)


def check_choice(value: str, name: str, choices: Any) -> None:
    """Raise unless `value` is one of the strings of a Literal."""
    *most, last = (f'"{choice}"' for choice in get_args(choices))
    if not isinstance(value, str) or value not in get_args(choices):
        raise ValueError(f"{name} must be {', '.join(most)} or {last}")


def check_text(value: object, name: str) -> str:
    """Return a text of 1 to 200 printable characters, or raise."""
    if not (isinstance(value, str) and 0 < len(value) <= LONGEST_TEXT and value.isprintable() and value.strip()):
        raise ValueError(f"{name} must be a text of 1 to {LONGEST_TEXT} printable characters")
    return value


def check_numbers(values: ArrayLike, name: str) -> NDArray[np.float64]:
    """Return an array of real numbers, of any shape, as float64, or raise."""
    try:
        array = np.asarray(values)
        if array.dtype.kind in "biuf":
            return np.asarray(array, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError):
        pass
    raise ValueError(f"{name} must be an array of real numbers with rows of one length")


def check_rows(values: ArrayLike, name: str) -> NDArray[np.float64]:
    """Return finite rows of shape (n, d) as float64, or raise an error that shows no value."""
    rows = check_numbers(values, name)
    if rows.ndim != 2:
        raise ValueError(f"{name} must have rows and columns; it has {rows.ndim} dimensions")
    if 0 in rows.shape:
        raise ValueError(f"{name} must have at least one row and one column")
    if not np.isfinite(rows).all():
        raise ValueError(f"{name} must be finite: it holds NaN or infinity")
    return rows


LARGEST_FEATURE = 1e6  # of a number in a feature or a mean: differences are then finite, and not lost in rounding
OUT_OF_RANGE = f"must be finite, with no number beyond {LARGEST_FEATURE:g}"


def is_in_range(rows: NDArray[Any]) -> bool:
    """Return whether features or a mean are finite and small enough to compare."""
    with np.errstate(all="ignore"):  # in 64 bits: the limit itself is infinite in 16
        return bool((np.abs(rows.astype(np.float64)) <= LARGEST_FEATURE).all())


def as_rows(value: Any, name: str = "rows") -> NDArray[np.float32]:
    """Return vectors (array, tensor, data frame, pyarrow, lists) as float32 of shape (n, d); one vector is one row."""
    try:
        with np.errstate(over="ignore"):  # `normalize_rows` reports infinity
            array = np.asarray(_convert_to_array(value))
            if array.dtype == object:  # a column of vectors
                array = np.stack([np.asarray(_convert_to_array(row), np.float64) for row in array.ravel()])
            if array.dtype.kind not in "fiu" or not array.ndim:
                raise TypeError
            rows = np.ascontiguousarray(np.atleast_2d(array), np.float32)
    except (TypeError, ValueError, AttributeError, OverflowError):
        raise ValueError(f"{name} must be numbers, in rows of one length") from None
    if rows.ndim != 2 or 0 in rows.shape:
        raise ValueError(f"{name} must have shape (n, d), with at least one row and one column")
    return rows


def _convert_to_array(value: Any) -> Any:
    """Convert a tensor, a data frame or a column to a type that NumPy reads."""
    if hasattr(value, "detach"):  # a torch tensor, perhaps on a GPU or in bfloat16
        value = value.detach().cpu()
        return (value.float() if value.is_floating_point() else value).numpy()
    if hasattr(value, "combine_chunks"):  # a pyarrow table or chunked column
        return _flatten_arrow(value.combine_chunks())
    if hasattr(value, "flatten") and hasattr(value, "to_pylist"):
        return _flatten_arrow(value)
    if hasattr(value, "to_numpy"):  # a frame or a series
        return value.to_numpy()
    return value


def _flatten_arrow(value: Any) -> Any:
    """Return the numbers of a pyarrow table or of a column of lists."""
    if hasattr(value, "column_names"):
        return np.stack([column.to_numpy() for column in value.columns], axis=1)
    if value.null_count:
        raise ValueError
    if not hasattr(value, "value_lengths"):  # a column of plain numbers: one vector
        return value.to_numpy(zero_copy_only=False)
    lengths = set(value.value_lengths().to_pylist())
    if len(lengths) != 1:
        raise ValueError
    return value.flatten().to_numpy(zero_copy_only=False).reshape(-1, lengths.pop())


def normalize_rows(rows: NDArray[Any], name: str) -> NDArray[Any]:
    """Divide rows by their norms unless those are one; galleries and queries share this function."""
    out = rows
    of = f"{name} number" if name.endswith(":") else f"{name} of number"
    for start in range(0, len(rows), _BLOCK):
        block = rows[start : start + _BLOCK]
        with np.errstate(over="ignore", invalid="ignore"):
            norms = np.sqrt(np.einsum("ij,ij->i", block, block))
        off = np.flatnonzero(~(np.abs(norms - 1) <= _OFF_ONE))
        if not len(off):
            continue
        wide = block[off].astype(np.float64)
        finite = np.isfinite(wide).all(axis=1)
        if not finite.all():
            raise ValueError(f"{of} {start + off[np.argmin(finite)]} must be finite: it holds NaN or infinity")
        largest = np.abs(wide).max(axis=1, keepdims=True)
        if not largest.all():
            raise ValueError(f"{of} {start + off[np.argmin(largest)]} must not be all zeros: it has no direction")
        wide /= largest  # squares of tiny or huge numbers leave the range of a float
        wide /= np.sqrt(np.einsum("ij,ij->i", wide, wide))[:, None]
        if out is rows:
            out = rows.copy()
        out[start + off] = wide
    return out
