"""Read tables of vectors from files."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from nearveil import cluster
from nearveil.privacy.checks import as_rows

Singles = NDArray[np.float32]


def as_list(values: Any, name: str, count: int) -> list[Any]:
    """Return a column as a list, one value for each row."""
    items: Any = None
    if reader := getattr(values, "to_pylist", getattr(values, "tolist", None)):
        items = reader()
    elif hasattr(values, "to_dict") and hasattr(values, "columns"):  # a pandas frame: a mapping for each row
        items = values.astype(object).where(values.notna(), None).to_dict("records")
    elif hasattr(values, "__iter__") and not isinstance(values, (str, bytes, dict)):
        items = list(values)
    if not isinstance(items, list) or len(items) != count:
        raise ValueError(f"{name} must be a list of {count:,}, one for each row")
    return items


class VectorTable(NamedTuple):
    """Vectors of a file and their columns; a column that was not requested is None."""

    rows: Singles
    ids: list[Any] | None = None
    names: list[Any] | None = None
    metadata: list[dict[str, Any]] | None = None


class TablePart(NamedTuple):
    """A partition of a file: its range of rows, and its range of row groups or chunks."""

    start: int
    stop: int
    first: int
    last: int


@dataclass(frozen=True)
class VectorFile:
    """Vectors in a file, read at once or by partitions, in any process that can open the file."""

    # Row groups of Parquet, chunks of Zarr and rows of .npy are loaded on demand; .npz and .csv at once. `vectors` is
    # by default the only array of two dimensions, the only column of lists, or all numeric columns without another
    # role.

    path: Path
    vectors: str | None = None
    ids: str | None = None
    names: str | None = None
    metadata: tuple[str, ...] = ()

    def cut(self) -> list[TablePart]:
        """Return the partitions: whole row groups or chunks, of `nearveil.cluster.ROWS` rows at least."""
        parts: list[TablePart] = []
        start = stop = first = 0
        sizes = self._open().sizes
        for number, size in enumerate(sizes):
            stop += size
            if stop - start >= cluster.ROWS or number + 1 == len(sizes):
                parts.append(TablePart(start, stop, first, number + 1))
                start, first = stop, number + 1
        return parts

    def describe(self, part: TablePart) -> str:
        """Return the name of a partition for error messages."""
        return f"rows {part.start:,} to {part.stop - 1:,} of {self.path.name}"

    def read(self, part: TablePart | None = None) -> VectorTable:
        """Read the file, or a partition of it."""
        source = self._open()
        with _explain_errors(self.path):
            columns = source.read(0, len(source.sizes)) if part is None else source.read(part.first, part.last)
        roles = {"vectors": (self.vectors,), "ids": (self.ids,), "names": (self.names,), "metadata": self.metadata}
        for option, name in ((option, name) for option, names in roles.items() for name in names):
            if name is not None and name not in columns:
                raise ValueError(f"{option}: there is no {name!r} in {self.path.name}; there are {', '.join(columns)}")
        details = {self.ids, self.names, *self.metadata} - {None}
        rows = as_rows(_choose_vectors(columns, self.vectors, details, self.path.name), "vectors")
        lists = {name: as_list(columns[name], name, len(rows)) for name in details if name is not None}
        records = zip(*(lists[name] for name in self.metadata), strict=True)
        ids, names = (None if name is None else lists[name] for name in (self.ids, self.names))
        metadata = [dict(zip(self.metadata, record, strict=True)) for record in records] if self.metadata else None
        return VectorTable(rows, ids, names, metadata)

    def _open(self) -> "_Source":
        if not self.path.exists():
            raise ValueError(f"vectors: there is no file at {self.path}; correct the path")
        opener = _SOURCES.get(self.path.suffix.lower())
        if opener is None:
            raise ValueError(f"vectors: {self.path.name} must end in {', '.join(_SOURCES)}")
        with _explain_errors(self.path):
            return opener(self.path)


@contextmanager
def _explain_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError:
        extra, needed = ("cluster", "zarr") if path.suffix.lower() == ".zarr" else ("tables", "pyarrow")
        raise ModuleNotFoundError(f'tables in files need {needed}: pip install "nearveil[{extra}]"') from None
    except (OSError, ValueError, EOFError, KeyError, BadZipFile):
        raise ValueError(f"vectors: {path.name} cannot be read: it is corrupted, or its suffix is wrong") from None


def read_vector(path: str | os.PathLike[str]) -> Singles:
    """Read the vector of a file with one row."""
    rows = VectorFile(Path(path)).read().rows
    if len(rows) != 1:
        raise ValueError(
            f"vectors: {Path(path).name} holds {len(rows):,} rows, and a query needs one; use nearest_many of a "
            "client in Python for many"
        )
    return np.asarray(rows[0])


def _choose_vectors(columns: dict[str, Any], name: str | None, details: set[str | None], file: str) -> Any:
    """Return the array or column with the vectors, by name or by its type."""
    if name is not None:
        return columns[name]
    rest = {key: column for key, column in columns.items() if key not in details}
    wide = [column for column in rest.values() if _is_wide(column)]
    if len(wide) == 1:
        return wide[0]
    if not wide and rest and all(_is_number(column) for column in rest.values()):
        return np.stack([column.to_numpy() for column in rest.values()], axis=1)
    raise ValueError(
        f"vectors: it is unclear which of {', '.join(rest) or 'its columns'} in {file} are the vectors: name the "
        "columns of vectors, ids, names and metadata"
    )


def _is_wide(column: Any) -> bool:
    """Return whether a column holds vectors: an array of two dimensions, or lists."""
    return column.ndim == 2 if isinstance(column, np.ndarray) else "list" in str(column.type)


def _is_number(column: Any) -> bool:
    numeric = ("int", "uint", "float", "double", "halffloat")
    return hasattr(column, "to_numpy") and str(column.type).startswith(numeric)


class _Source(NamedTuple):
    """The sizes of a file's row groups or chunks, and a function that reads a range of them."""

    sizes: list[int]
    read: Callable[[int, int], dict[str, Any]]


def _open_npy(path: Path) -> _Source:
    rows = np.load(path, mmap_mode="r", allow_pickle=False)
    if not isinstance(rows, np.ndarray):
        raise ValueError
    rows = np.atleast_2d(rows)
    return _make_source({"rows": rows}, len(rows), cluster.ROWS)


def _open_npz(path: Path) -> _Source:
    with np.load(path, allow_pickle=False) as arrays:
        return _open_whole(dict(arrays))


def _open_parquet(path: Path) -> _Source:
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(path)

    def read(first: int, last: int) -> dict[str, Any]:
        table = file.read_row_groups(range(first, last))
        return dict(zip(table.column_names, table.columns, strict=True))

    return _Source([file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)], read)


def _open_csv(path: Path) -> _Source:
    import pyarrow.csv

    table = pyarrow.csv.read_csv(path)
    return _open_whole(dict(zip(table.column_names, table.columns, strict=True)))


def _open_zarr(path: Path) -> _Source:
    import zarr

    root = zarr.open(path, mode="r")
    columns = {"rows": root} if isinstance(root, zarr.Array) else dict(root.arrays())
    counts = {column.shape[0] for column in columns.values() if column.ndim}
    if len(counts) != 1 or not all(column.ndim for column in columns.values()):
        raise ValueError
    return _make_source(columns, counts.pop(), max(column.chunks[0] for column in columns.values()))


def _make_source(columns: dict[str, Any], count: int, step: int) -> _Source:
    """Return a source that loads rows of arrays on demand."""

    def read(first: int, last: int) -> dict[str, Any]:
        return {name: np.asarray(column[first * step : last * step]) for name, column in columns.items()}

    return _Source([cut.stop - cut.start for cut in cluster.cut_rows(count, step)], read)


def _open_whole(columns: dict[str, Any]) -> _Source:
    count = max((len(column) for column in columns.values() if getattr(column, "ndim", 1)), default=0)
    return _Source([count], lambda _first, _last: columns)


_SOURCES = {".npy": _open_npy, ".npz": _open_npz, ".parquet": _open_parquet, ".csv": _open_csv, ".zarr": _open_zarr}
SUFFIXES = frozenset(_SOURCES)  # of files with vectors
