"""NumPy arrays and torch tensors behind one namespace.

Everything in this room is written against the array API standard. NumPy 2 follows it by itself, so
``array_api_compat`` is imported only when something other than a NumPy array comes in: the graphs
work with NumPy, SciPy and scikit-learn alone.
"""

from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = Any  # a NumPy array or a torch tensor; the standard has no static type for "either"


def namespace(*arrays: Array) -> Any:
    """Return the array API namespace that all `arrays` share.

    Parameters
    ----------
    *arrays : array
        NumPy arrays, or tensors of one library.

    Returns
    -------
    module
        ``numpy`` itself, or the ``array_api_compat`` wrapper of the other library.
    """
    if all(isinstance(array, np.ndarray | np.generic) for array in arrays):
        return np
    from array_api_compat import array_namespace

    return array_namespace(*arrays)


def as_array(values: Any) -> Array:
    """Return `values` unchanged if it is an array of a known library, else as a NumPy array."""
    if isinstance(values, np.ndarray):
        return values
    if hasattr(values, "__dlpack__"):
        return values
    return np.asarray(values)


def is_host(array: Array) -> bool:
    """Say whether the memory of `array` can be read by NumPy without a copy."""
    return isinstance(array, np.ndarray) or getattr(array.device, "type", "cpu") == "cpu"


def to_numpy(array: Array) -> Any:
    """Return `array` as a NumPy array, sharing memory where it lies on the host."""
    if isinstance(array, np.ndarray):
        return array
    if hasattr(array, "detach"):  # torch refuses to hand out memory that is part of a gradient graph
        array = array.detach().cpu()
    return np.asarray(array)


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

    Parameters
    ----------
    values : array of shape (n, k)
    codes : array of shape (n,)
        Integers from 0 to ``n_segments - 1``.
    n_segments : int

    Returns
    -------
    array of shape (n_segments, k)
    """
    if isinstance(values, np.ndarray):
        sums = [np.bincount(codes, weights=column, minlength=n_segments) for column in values.T]
        return np.stack(sums, axis=1).astype(values.dtype, copy=False)
    return values.new_zeros((n_segments, values.shape[1])).index_add_(0, codes, values)


def check_unit_rows(X: Array, name: str = "X", least: int = 2) -> Array:
    """Check that the rows of `X` are finite and of norm one, and make the norm exact.

    Parameters
    ----------
    X : array-like of shape (n, d)
    name : str
        What the caller calls it, for the error.
    least : int, default=2
        The fewest rows that make sense.

    Returns
    -------
    array of shape (n, d)
        `X`, or a copy whose rows were divided by their norm where rounding had moved it.

    Raises
    ------
    ValueError
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
    norms = xp.sqrt(xp.vecdot(X, X))
    if not bool(xp.all(xp.isfinite(norms))):
        row = int(xp.argmin(xp.astype(xp.isfinite(norms), xp.int8)))
        raise ValueError(f"{name} holds NaN or infinity (first in row {row}): remove or repair such rows")
    if bool(xp.any(norms == 0)):
        row = int(xp.argmin(norms))
        raise ValueError(f"{name} holds a row of zeros (row {row}), which has no direction: remove it")
    off = xp.abs(norms - 1)
    eps = epsilon_of(X)
    if float(xp.max(off)) > max(1e-4, 8 * eps):
        row = int(xp.argmax(off))
        raise ValueError(
            f"{name} must have rows of norm 1 (row {row} has not): divide each row by its norm, "
            "as sklearn.preprocessing.normalize does"
        )
    if float(xp.max(off)) > 8 * eps:
        return X / norms[:, None]
    return X


def check_columns(Z: Array, n: int, model: Array, name: str = "Z") -> Array:
    """Check that `Z` is a finite (n, k) array and bring it to the dtype of `model`.

    Parameters
    ----------
    Z : array-like of shape (n, k)
    n : int
        The rows of the graph.
    model : array
        A floating-point array of the graph's own: its library and dtype are what `Z` must have.
    name : str

    Returns
    -------
    array of shape (n, k)
    """
    Z = as_array(Z)
    if isinstance(Z, np.ndarray) != isinstance(model, np.ndarray):
        raise ValueError(
            f"{name} is a {type(Z).__name__} but the graph holds {type(model).__name__}: convert one of them"
        )
    xp = namespace(Z)
    if Z.ndim != 2 or Z.shape[0] != n:
        raise ValueError(f"{name} must have shape ({n}, k), a row for each row of the graph; got {tuple(Z.shape)}")
    Z = xp.astype(Z, model.dtype, copy=False)
    if not bool(xp.all(xp.isfinite(Z))):
        raise ValueError(f"{name} holds NaN or infinity")
    return Z


def check_positive(value: float, name: str) -> float:
    """Return `value` as a float if it is finite and above zero, else raise with `name`."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a number above 0; got {value!r}") from None
    if not (np.isfinite(number) and number > 0):
        raise ValueError(f"{name} must be a finite number above 0; got {value!r}")
    return number
