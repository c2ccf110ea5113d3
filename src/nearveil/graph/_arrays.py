"""NumPy arrays and torch tensors behind one namespace.

Everything in this room is written against the array API standard. NumPy 2 follows it by itself, so
``array_api_compat`` is imported only when something other than a NumPy array comes in: the graphs
work with NumPy, SciPy and scikit-learn alone.
"""

from numbers import Real
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = Any  # a NumPy array or a torch tensor; the standard has no static type for "either"


def namespace(*arrays: Array) -> Any:
    """Return the array API namespace that all `arrays` share.

    `*arrays`: NumPy arrays, or tensors of one library.
    Returns: ``numpy`` itself, or the ``array_api_compat`` wrapper of the other library.
    """
    if all(isinstance(array, np.ndarray | np.generic) for array in arrays):
        return np
    from array_api_compat import array_namespace

    return array_namespace(*arrays)


def as_array(values: Any) -> Array:
    """Return `values` as an array: of its own library where it has one, else of NumPy.

    Tensors are cut off from their gradient graph: no operator here has a derivative.
    """
    if isinstance(values, np.ndarray):
        return values
    if hasattr(values, "detach"):
        return values.detach()
    return values if hasattr(values, "__dlpack__") else np.asarray(values)


def is_host(array: Array) -> bool:
    """Say whether the memory of `array` can be read by NumPy without a copy."""
    return isinstance(array, np.ndarray) or getattr(array.device, "type", "cpu") == "cpu"


def to_numpy(array: Array) -> Any:
    """Return `array` as a NumPy array, sharing memory where it lies on the host."""
    if isinstance(array, np.ndarray):
        return array
    return np.asarray(array.cpu() if hasattr(array, "cpu") else array)


def like(values: Array, model: Array) -> Array:
    """Return `values` in the library and on the device of `model`, dtype kept."""
    if isinstance(model, np.ndarray):
        return to_numpy(values)
    from array_api_compat import device

    return namespace(model).asarray(values, device=device(model))


def epsilon_of(array: Array) -> float:
    """Return the distance from 1 to the next number in the dtype of `array`."""
    return float(namespace(array).finfo(array.dtype).eps)


def tiny_of(array: Array) -> float:
    """Return the least positive normal number in the dtype of `array`."""
    return float(namespace(array).finfo(array.dtype).smallest_normal)


def column_of_ones(model: Array) -> Array:
    """Return ones of shape (n, 1) with the dtype and device of `model`, an (n, k) array."""
    return namespace(model).ones_like(model[:, :1])


def segment_sum(values: Array, codes: Array, n_segments: int) -> Array:
    """Sum the rows of `values` that share a code.

    The one operation here that the array API standard lacks.

    `codes`: Integers from 0 to ``n_segments - 1``.
    """
    if isinstance(values, np.ndarray):
        sums = [np.bincount(codes, weights=column, minlength=n_segments) for column in values.T]
        return np.stack(sums, axis=1).astype(values.dtype, copy=False)
    doubles = values.double()
    return doubles.new_zeros((n_segments, values.shape[1])).index_add_(0, codes, doubles).to(values.dtype)


def check_unit_rows(X: Array, name: str = "X", least: int = 2) -> Array:
    """Check that the rows of `X` are finite and of norm one up to rounding, and take the rounding out.

    `name`: What the caller calls it, for the error.
    `least`: The fewest rows that make sense.
    Returns: A copy, each row divided by its norm: what is made of one row depends on no other.
    Names `name`, the row (never its values) and what to do.
    """
    X = as_array(X)
    xp = namespace(X)
    if X.ndim != 2 or X.shape[1] == 0:
        raise ValueError(
            f"{name} must be a 2-D array (rows, features) with at least one feature; got shape {tuple(X.shape)}"
        )
    if X.shape[0] < least:
        raise ValueError(f"{name} has {X.shape[0]} row(s); it needs at least {least}")
    if not xp.isdtype(X.dtype, "real floating"):
        raise ValueError(f"{name} must hold floating-point numbers; got dtype {X.dtype}: convert it first")
    if X.shape[0] == 0:
        return X
    wide = X if xp.finfo(X.dtype).bits >= 32 else xp.astype(X, xp.float32)
    norms = xp.sqrt(xp.vecdot(wide, wide))
    if not bool(xp.all(xp.isfinite(norms))):
        row = int(xp.argmin(xp.astype(xp.isfinite(norms), xp.int8)))
        raise ValueError(
            f"{name} holds NaN, infinity or a huge number (first in row {row}): remove or repair such rows"
        )
    if bool(xp.any(norms == 0)):
        row = int(xp.argmin(norms))
        raise ValueError(f"{name} holds a row of zeros (row {row}), which has no direction: remove it")
    off = xp.abs(norms - 1)
    if float(xp.max(off)) > max(1e-4, 8 * epsilon_of(X)):
        row = int(xp.argmax(off))
        raise ValueError(
            f"{name} must have rows of norm 1 (row {row} has not): divide each row by its norm, "
            "as sklearn.preprocessing.normalize does"
        )
    return xp.astype(wide / norms[:, None], X.dtype, copy=False)


def check_columns(Z: Array, n: int, model: Array, name: str = "Z") -> Array:
    """Check that `Z` is a finite (n, k) array and bring it to the dtype of `model`.

    `n`: The rows of the graph.
    `model`: A floating-point array of the graph's own: its library and dtype are what `Z` must have.
    """
    Z = as_array(Z)
    check_same_library(Z, model, name)
    xp = namespace(Z)
    if Z.ndim != 2 or Z.shape[0] != n:
        raise ValueError(f"{name} must have shape ({n}, k), a row for each row of the graph; got {tuple(Z.shape)}")
    Z = xp.astype(check_real(Z, name), model.dtype, copy=False)
    if not bool(xp.all(xp.isfinite(Z))):
        raise ValueError(f"{name} holds NaN or infinity")
    return Z


def check_same_library(array: Array, model: Array, name: str) -> None:
    """Raise unless `array` is of the library of `model`."""
    if isinstance(array, np.ndarray) != isinstance(model, np.ndarray):
        raise ValueError(
            f"{name} is a {type(array).__name__} but the graph holds {type(model).__name__}: convert one of them"
        )


def check_real(array: Array, name: str) -> Array:
    """Return `array` in floating point; complex numbers, text and objects raise."""
    xp = namespace(array)
    if isinstance(array, np.ndarray) and array.dtype.kind not in "fiub":
        raise ValueError(f"{name} must hold real numbers; got dtype {array.dtype}")
    if xp.isdtype(array.dtype, "complex floating"):
        raise ValueError(f"{name} must hold real numbers; got dtype {array.dtype}")
    return array if xp.isdtype(array.dtype, "real floating") else xp.astype(array, xp.float64)


def check_positive(value: Any, name: str) -> float:
    """Return `value` as a float if it is finite and above zero, else raise with `name`."""
    if not isinstance(value, Real):  # whatever it is, it may hold data: say its type alone
        raise ValueError(f"{name} must be a number above 0; got {type(value).__name__}")
    number = float(value)
    if not (np.isfinite(number) and number > 0):
        raise ValueError(f"{name} must be a finite number above 0; got {number!r}")
    return number


def check_bandwidth(value: float) -> float:
    """Return a bandwidth as a float if its square neither overflows nor vanishes, else raise."""
    bandwidth = check_positive(value, "bandwidth")
    if not 1e-100 < bandwidth < 1e100:
        raise ValueError(f"bandwidth {bandwidth:g} is out of range: use one between 1e-100 and 1e100")
    return bandwidth
