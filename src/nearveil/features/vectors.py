"""Tables of vectors that users bring, in files."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from nearveil.privacy.checks import as_rows

Singles = NDArray[np.float32]


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


class VectorTable(NamedTuple):
    """Vectors of a file, with what stands beside them; a column is None where it was not asked for."""

    rows: Singles
    ids: list[Any] | None = None
    names: list[Any] | None = None
    metadata: list[dict[str, Any]] | None = None


def read_table(
    path: str | os.PathLike[str],
    *,
    vectors: str | None = None,
    ids: str | None = None,
    names: str | None = None,
    metadata: Sequence[str] = (),
) -> VectorTable:
    """Read vectors from a file: ``.npy``, ``.npz``, ``.parquet`` or ``.csv``.

    `vectors`: The array or column that holds them. By default the only array of two dimensions, the only column of
    lists, or all columns of numbers that are not named otherwise.
    `ids, names, metadata`: Arrays or columns.
    """
    place = Path(path)
    if not place.is_file():
        raise ValueError(f"vectors: there is no file at {place}")
    try:
        columns = _READERS[place.suffix.lower()](place)
    except KeyError:
        raise ValueError(f"vectors: {place.name} must end in {', '.join(_READERS)}") from None
    except ModuleNotFoundError:
        raise ModuleNotFoundError('tables in files need pyarrow: pip install "nearveil[tables]"') from None
    except (OSError, ValueError, EOFError, BadZipFile):
        raise ValueError(f"vectors: {place.name} cannot be read: it is damaged, or not what its name says") from None
    for option, wanted in (("vectors", (vectors,)), ("ids", (ids,)), ("names", (names,)), ("metadata", metadata)):
        for name in wanted:
            if name is not None and name not in columns:
                raise ValueError(f"{option}: there is no {name!r} in {place.name}; there are {', '.join(columns)}")
    chosen = _choose_vectors(columns, vectors, {ids, names, *metadata}, place.name)
    rows = as_rows(chosen, "vectors")
    told = {name: as_list(columns[name], name, len(rows)) for name in {ids, names, *metadata} if name is not None}
    return VectorTable(
        rows,
        told[ids] if ids is not None else None,
        told[names] if names is not None else None,
        [dict(zip(metadata, values, strict=True)) for values in zip(*(told[name] for name in metadata), strict=True)]
        if metadata
        else None,
    )


def read_vector(path: str | os.PathLike[str]) -> Singles:
    """Read one vector from a ``.npy`` file."""
    rows = read_table(path).rows
    if len(rows) != 1:
        raise ValueError(
            f"vectors: {Path(path).name} holds {len(rows):,} rows, and a question is about one: nearest_many of a "
            "client in Python asks about many"
        )
    row: Singles = rows[0]
    return row


def _choose_vectors(columns: dict[str, Any], name: str | None, others: set[str | None], file: str) -> Any:
    """Return the rows of a file: the array or column of that name, or what can only be them."""
    if name is not None:
        return columns[name]
    left = {key: column for key, column in columns.items() if key not in others}
    wide = [column for column in left.values() if _is_wide(column)]
    if len(wide) == 1:
        return wide[0]
    if not wide and left and all(hasattr(column, "to_numpy") and _is_number(column) for column in left.values()):
        return np.stack([column.to_numpy() for column in left.values()], axis=1)
    raise ValueError(
        f"vectors: {file} does not say which of {', '.join(left) or 'its columns'} are the vectors: name one, and name "
        "ids, names and metadata"
    )


def _is_wide(column: Any) -> bool:
    """Return whether a column holds vectors: an array of two dimensions, or lists."""
    return column.ndim == 2 if isinstance(column, np.ndarray) else "list" in str(column.type)


def _is_number(column: Any) -> bool:
    return str(column.type).startswith(("int", "uint", "float", "double", "halffloat"))


def _read_npy(path: Path) -> dict[str, Any]:
    rows = np.load(path, allow_pickle=False)
    if not isinstance(rows, np.ndarray):
        raise ValueError
    return {"rows": np.atleast_2d(rows)}


def _read_npz(path: Path) -> dict[str, Any]:
    with np.load(path, allow_pickle=False) as arrays:
        return dict(arrays)


def _read_parquet(path: Path) -> dict[str, Any]:
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(path)
    return dict(zip(table.column_names, table.columns, strict=True))


def _read_csv(path: Path) -> dict[str, Any]:
    import pyarrow.csv

    table = pyarrow.csv.read_csv(path)
    return dict(zip(table.column_names, table.columns, strict=True))


_READERS = {".npy": _read_npy, ".npz": _read_npz, ".parquet": _read_parquet, ".csv": _read_csv}
