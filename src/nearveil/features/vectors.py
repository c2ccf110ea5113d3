"""Vectors that users bring: rows of any library as arrays of norm one, and tables in files."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Singles = NDArray[np.float32]

_OFF_ONE = 1e-3  # of a norm: what 16-bit rows lose, and more. Rows nearer to one stay as they are, to the last bit
_BLOCK = 4096


def as_rows(value: Any, name: str = "rows") -> Singles:
    """Return vectors as an array of shape (n, d), in 32 bits; one vector is one row.

    `value`: An array of NumPy, a tensor, a data frame, a table or list column of pyarrow, or lists of numbers.
    `name`: What an error calls it.

    Examples
    --------
    >>> as_rows([3, 4]).tolist(), as_rows([[0.5, 0.5], [1, 0]]).shape
    ([[3.0, 4.0]], (2, 2))
    """
    try:
        with np.errstate(over="ignore"):  # infinity is told where rows are normalised
            found = np.asarray(_to_array(value))
            if found.dtype == object:  # a column of vectors
                found = np.stack([np.asarray(_to_array(row), np.float64) for row in found.ravel()])
            if found.dtype.kind not in "fiu":
                raise TypeError
            rows = np.ascontiguousarray(np.atleast_2d(found), np.float32)
    except (TypeError, ValueError, AttributeError, OverflowError):
        raise ValueError(f"{name} must be numbers, in rows of one length") from None
    if rows.ndim != 2 or 0 in rows.shape:
        raise ValueError(f"{name} must have shape (n, d), with at least one row and one column")
    return rows


def _to_array(value: Any) -> Any:
    """Return what NumPy can read of a tensor, a frame or a column."""
    if hasattr(value, "detach"):  # a tensor of torch, perhaps on a device, or in a type that NumPy has not
        value = value.detach().cpu()
        return (value.float() if value.is_floating_point() else value).numpy()
    if hasattr(value, "combine_chunks"):  # a table or a column of pyarrow
        return _flatten_arrow(value.combine_chunks())
    if hasattr(value, "flatten") and hasattr(value, "to_pylist"):
        return _flatten_arrow(value)
    if hasattr(value, "to_numpy"):  # a frame or a series
        return value.to_numpy()
    return value


def _flatten_arrow(value: Any) -> Any:
    """Return the numbers of a pyarrow table, by columns, or of a column of lists."""
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
    """Return rows divided by their norms, where those are not one: the same for galleries and for questions.

    `name`: What an error calls a row, before its number.

    Examples
    --------
    >>> normalize_rows(np.array([[3.0, 4.0], [0.0, 1.0]]), "rows:").tolist()
    [[0.6, 0.8], [0.0, 1.0]]
    """
    out = rows
    of = f"{name} number" if name.endswith(":") else f"{name} of number"
    for start in range(0, len(rows), _BLOCK):
        some = rows[start : start + _BLOCK]
        with np.errstate(over="ignore", invalid="ignore"):
            norms = np.sqrt(np.einsum("ij,ij->i", some, some))
        off = np.flatnonzero(~(np.abs(norms - 1) <= _OFF_ONE))
        if not len(off):
            continue
        wide = some[off].astype(np.float64)
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


def as_list(values: Any, name: str, count: int) -> list[Any]:
    """Return a column as a list, one value for each row.

    Examples
    --------
    >>> as_list(np.array(["a", "b"]), "names", 2)
    ['a', 'b']
    """
    for reader in ("to_pylist", "tolist"):
        if hasattr(values, reader):
            found = getattr(values, reader)()
            break
    else:
        if hasattr(values, "to_dict") and hasattr(values, "columns"):  # a frame of pandas: a mapping for each row
            found = values.astype(object).where(values.notna(), None).to_dict("records")
        else:
            found = None if isinstance(values, (str, bytes, dict)) or not hasattr(values, "__iter__") else list(values)
    if not isinstance(found, list) or len(found) != count:
        raise ValueError(f"{name} must be a list of {count:,}, one for each row")
    return found
