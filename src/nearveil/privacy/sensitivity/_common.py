"""What the sensitivity bounds share: checks of their inputs, norms, and the margin for rounding."""

import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import cdist

from nearveil.graph import Encoding

Norm = Literal["l2", "l1"]
Floats = NDArray[np.float64]

MARGIN = 1 + 1e-9  # a bound is computed in double precision; this is far more than rounding takes from it
SIGNS_LIMIT = 10  # columns up to which all 2^(k-1) sign patterns are tried, which makes an L1 bound exact
_BLOCK = 512  # rows of a distance matrix that are in memory at a time
_METRIC = {"l2": "euclidean", "l1": "cityblock"}


def checked_number(value: float, name: str, *, least: float, above: bool = False) -> float:
    """Return `value` as a finite float of at least (or above) `least`, or raise with `name`."""
    wanted = f"a finite number {'above' if above else 'of at least'} {least:g}"
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be {wanted}; got {value!r}") from None
    if not math.isfinite(number) or number < least or (above and number == least):
        raise ValueError(f"{name} must be {wanted}; got {value!r}")
    return number


def checked_count(value: int, name: str, *, least: int) -> int:
    """Return `value` as an int of at least `least`, or raise with `name`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}; got {value!r}")
    return int(value)


def checked_choice(value: str, name: str, choices: Any) -> None:
    """Raise with `name` unless `value` is one of the strings of a Literal."""
    allowed = get_args(choices)
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r}")


def checked_error_bound(value: float) -> float:
    """Return the relative error of the weights, in [0, 1), or raise."""
    error_bound = checked_number(value, "error_bound", least=0)
    if error_bound >= 1:
        raise ValueError(
            "error_bound must be below 1: an operator that may lose whole edges (a graph of neighbours) has no "
            "sensitivity bound here. Use an exact or a series graph"
        )
    return error_bound


def checked_start(start: Any, rows: int | None = None, least: int = 2) -> Floats:
    """Return the starting matrix in double precision with its mean row taken out, or raise.

    The step commutes with translations, so the mean changes no bound; without it nothing cancels.
    """
    try:
        array = np.asarray(start, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError("start must be a 2-D array of numbers (rows, columns)") from None
    if array.ndim != 2 or array.shape[1] == 0:
        raise ValueError(f"start must be a 2-D array (rows, columns) with at least one column; got shape {array.shape}")
    if rows is not None and array.shape[0] != rows:
        raise ValueError(f"start must have {rows} rows, the target's first and then one for each anchor")
    if array.shape[0] < least:
        raise ValueError(f"start has {array.shape[0]} row(s); it needs at least {least}")
    if not np.all(np.isfinite(array)):
        raise ValueError("start holds NaN or infinity")
    centred: Floats = array - array.mean(axis=0)
    largest = float(np.max(np.abs(centred)))
    if largest and not 1e-60 < largest < 1e60:  # its squares would lose digits, and the bound with them
        raise ValueError("start must have entries between 1e-60 and 1e60 in size: the query is linear in it, rescale")
    return centred


def checked_result(bound: float) -> float:
    """Return a bound, or raise where the parameters drove it out of range: no bound is better than a wrong one."""
    if not np.isfinite(bound):
        raise ValueError("the bound leaves all range: use a larger bandwidth, or a smaller label_weight")
    return float(bound)


def lengths(rows: Floats, norm: Norm) -> Floats:
    """Return the norm of each row."""
    return np.asarray(np.linalg.norm(rows, axis=1, ord=1 if norm == "l1" else 2), dtype=np.float64)


def total(parts: Floats, norm: Norm) -> float:
    """Return the norm of a matrix from the norms of its rows."""
    return float(np.sum(parts) if norm == "l1" else np.linalg.norm(parts))


def distances(rows: Floats, norm: Norm, use: Callable[[slice, Floats], None]) -> None:
    """Hand the matrix of distances between `rows` to `use`, a block of its rows at a time."""
    for start in range(0, len(rows), _BLOCK):
        block = slice(start, min(start + _BLOCK, len(rows)))
        use(block, cdist(rows[block], rows, _METRIC[norm]))


def diameter(rows: Floats, norm: Norm) -> float:
    """Return the largest distance between two of `rows`."""
    largest = [0.0]
    distances(rows, norm, lambda _, block: largest.append(float(block.max())))
    return max(largest)


def sign_patterns(columns: int) -> Floats:
    """Return all vectors of signs whose first is plus: ``|y|_1`` is the largest ``|e.y|`` over them."""
    patterns = np.arange(2 ** (columns - 1))[:, None] >> np.arange(columns)[None, :] & 1
    return np.asarray(1 - 2 * patterns[:, ::-1], dtype=np.float64)


def label_floor(n_classes: int, encoding: Encoding, label_bandwidth: float, may_be_unlabelled: bool = False) -> float:
    """Return b, the least weight that two labels can have."""
    if may_be_unlabelled:
        return 0.0
    if n_classes == 1:
        return 1.0
    squared = 2.0 if encoding == "one-hot" else float(n_classes - 1) ** 2
    return math.exp(-squared / (2 * label_bandwidth**2))
