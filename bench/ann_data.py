"""Read vectors of public benchmarks: ann-benchmarks' HDF5, .fvecs and .fbin families, NumPy, and real data."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

K = 10
METRICS = {"angular": "cosine", "cosine": "cosine", "euclidean": "euclidean", "dot": "dot", "ip": "dot"}
_RECORDS = {".fvecs": "<f4", ".bvecs": "u1", ".ivecs": "<i4"}  # each record begins with its length
_MATRICES = {".fbin": "<f4", ".u8bin": "u1", ".i8bin": "i1", ".ibin": "<i4"}  # the file begins with its shape
_NEIGHBORS = {".ivecs", ".ibin"}
_HDF5 = {".hdf5", ".h5"}
SUFFIXES = sorted({*_HDF5, *_RECORDS, *_MATRICES, ".npy", ".npz"})


class DataError(ValueError):
    """A file that cannot be used as a benchmark, with the remedy."""


@dataclass(frozen=True)
class Benchmark:
    """Items and queries, as given, and the ids of the nearest items of each query if the source lists them."""

    name: str
    metric: str | None
    items: Any  # an array or a dataset on the disk, shape (n, d)
    queries: Any = None  # shape (q, d)
    neighbors: NDArray[np.int64] | None = None  # shape (q, K), nearest first

    def select(self, n_items: int | None, n_queries: int, metric: str | None) -> "Benchmark":
        """Return the first items and queries, by a metric; hold out queries if there are none."""
        chosen = metric or self.metric
        if chosen is None:
            raise DataError(f"{self.name} does not state its metric: add --metric cosine, dot or euclidean")
        items, queries, neighbors = self.items, self.queries, self.neighbors
        if chosen != self.metric and self.metric is not None:
            neighbors = None
        if queries is None:
            total = min(len(items), len(items) if n_items is None else n_items + n_queries)
            if total <= n_queries:
                raise DataError(f"{self.name} has {total:,} vectors: use fewer --queries than that")
            order = np.random.default_rng(0).permutation(total)
            rows = np.asarray(items[:total], np.float32)
            items, queries = rows[np.sort(order[n_queries:])], rows[order[:n_queries]]
            neighbors = None
        elif n_items is not None and n_items < len(items):
            items, neighbors = items[:n_items], None
        if len(items) <= K:
            raise DataError(f"{self.name} has {len(items):,} items: a recall@{K} needs more than {K}")
        if items.shape[1] != queries.shape[1]:
            raise DataError(f"items have {items.shape[1]} dimensions and queries {queries.shape[1]}: check the files")
        selected = None if neighbors is None else _check_neighbors(neighbors, len(queries), len(items))[:n_queries]
        return replace(self, metric=chosen, items=items, queries=queries[:n_queries], neighbors=selected)


def _check_neighbors(neighbors: Any, n_queries: int, n_items: int) -> NDArray[np.int64]:
    if neighbors.shape[0] < n_queries or neighbors.shape[1] < K:
        shape = " x ".join(map(str, neighbors.shape))
        raise DataError(f"the neighbors are {shape}: they must be at least {n_queries} x {K}, or left out")
    nearest = np.asarray(neighbors[:n_queries, :K], np.int64)
    if nearest.min() < 0 or nearest.max() >= n_items:
        raise DataError(f"the neighbors name items beyond the {n_items:,} of the file: they belong to other data")
    return nearest


def load(sources: Sequence[str], n_items: int | None, n_queries: int, metric: str | None) -> Benchmark:
    """Load real data by its name, or files: items, then queries and ids of their neighbours if there are any.

    Raises
    ------
    DataError
        If a file cannot be used.
    FileNotFoundError
        If data is not on this machine.
    """
    first, *more = sources
    if first in NAMES:
        if more:
            raise DataError(f"{first} has queries already: leave out {more[0]}")
        return NAMES[first]().select(n_items, n_queries, metric)
    benchmark = read_file(Path(first))
    for source in map(Path, more):
        array = read_file(source).items
        benchmark = replace(benchmark, **{"neighbors" if source.suffix in _NEIGHBORS else "queries": array})
    return benchmark.select(n_items, n_queries, metric)


def read_file(path: Path) -> Benchmark:
    """Open a file by its suffix; arrays stay on the disk where their format allows it."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; --data takes a file, or one of {', '.join(NAMES)}")
    suffix = path.suffix
    if suffix in _HDF5:
        return _read_hdf5(path)
    if suffix == ".npz":
        return _read_npz(path)
    readers: dict[str, Callable[[Path], Any]] = {
        **dict.fromkeys(_RECORDS, _read_records),
        **dict.fromkeys(_MATRICES, _read_matrix),
        ".npy": lambda file: np.load(file, mmap_mode="r", allow_pickle=False),
    }
    if suffix not in readers:
        raise DataError(f"{path}: the suffix must be one of {', '.join(SUFFIXES)}")
    array = readers[suffix](path)
    if array.ndim != 2:
        raise DataError(f"{path} has the shape {array.shape}: it must be a matrix, one vector in each row")
    return Benchmark(path.stem, None, array)


def _read_hdf5(path: Path) -> Benchmark:
    """Open a file in the layout of ann-benchmarks."""
    try:
        import h5py
    except ImportError:
        raise DataError(f"{path} needs h5py: pip install h5py, or the extra nearveil[bench]") from None
    file = h5py.File(path, "r")  # stays open: its arrays are read when they are used
    missing = [name for name in ("train", "test") if name not in file]
    if missing:
        raise DataError(f"{path} has no {missing[0]!r}: it must have the layout of ann-benchmarks")
    if file["train"].ndim != 2:
        raise DataError(f"{path} holds sets, not vectors: 'train' must be a matrix, one vector in each row")
    distance = str(file.attrs.get("distance", ""))
    if distance and distance not in METRICS:
        raise DataError(f"{path} is about the distance {distance!r}: only {', '.join(METRICS)} can be compared")
    neighbors = file["neighbors"][:] if "neighbors" in file else None
    return Benchmark(path.stem, METRICS.get(distance), file["train"], file["test"][:], neighbors)


def _read_npz(path: Path) -> Benchmark:
    """Read ``train``, ``test`` and ``neighbors``, or the only matrix of a file."""
    with np.load(path, allow_pickle=False) as arrays:
        if "train" in arrays:
            queries, neighbors = (arrays.get(name) for name in ("test", "neighbors"))
            return Benchmark(path.stem, None, arrays["train"], queries, neighbors)
        matrices = [arrays[name] for name in arrays.files if arrays[name].ndim == 2]
    if len(matrices) != 1:
        raise DataError(f"{path} has {len(matrices)} matrices: name them train, test and neighbors")
    return Benchmark(path.stem, None, matrices[0])


def _read_records(path: Path) -> NDArray[Any]:
    """Map a file of records, each with its length first."""
    kind, size = np.dtype(_RECORDS[path.suffix]), path.stat().st_size
    width = int(np.fromfile(path, "<i4", 1)[0]) if size >= 4 else 0
    length = 4 + width * kind.itemsize
    if width <= 0 or size % length:
        raise DataError(f"{path} is no whole {path.suffix} file: its size does not fit records of {width} numbers")
    records = np.memmap(path, np.dtype([("length", "<i4"), ("row", kind, (width,))]), "r")
    if (records["length"][:: max(1, len(records) // 1000)] != width).any():
        raise DataError(f"{path} has records of different lengths: it is no {path.suffix} file of vectors")
    return np.asarray(records["row"])


def _read_matrix(path: Path) -> NDArray[Any]:
    """Map a file that begins with the numbers of its rows and columns; distances may follow neighbours."""
    kind, size = np.dtype(_MATRICES[path.suffix]), path.stat().st_size
    rows, columns = (int(number) for number in np.fromfile(path, "<u4", 2)) if size >= 8 else (0, 0)
    if not rows or not columns or size < 8 + rows * columns * kind.itemsize:
        raise DataError(f"{path} is no whole {path.suffix} file: it states {rows:,} x {columns} numbers")
    return np.memmap(path, kind, "r", 8, (rows, columns))


def _load_glove() -> Benchmark:
    from studies.data import find

    with np.load(find("glove100/glove100.npz")) as arrays:
        return Benchmark("glove100", "cosine", arrays["vectors"])


def _load_features(name: str, folder: str) -> Benchmark:
    from studies.data import load_features

    return Benchmark(name, "cosine", load_features(folder).features)


def _load_mnist() -> Benchmark:
    from studies.data import find

    with np.load(find("mnist/mnist.npz")) as arrays:
        train, test = (arrays[name].reshape(-1, 784) for name in ("x_train", "x_test"))
    return Benchmark("mnist", "euclidean", train, test)


def _load_digits() -> Benchmark:
    from sklearn.datasets import load_digits

    return Benchmark("digits", "euclidean", load_digits().data)


NAMES: dict[str, Callable[[], Benchmark]] = {
    "glove100": _load_glove,
    "cub": lambda: _load_features("cub", "cub200_cropped_lite0"),
    "cars": lambda: _load_features("cars", "cars196_cropped_lite0"),
    "mnist": _load_mnist,
    "digits": _load_digits,
}
