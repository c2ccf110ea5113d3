"""Find the nearest private records of a query, in a total order, and draw the voters among them.

The order is by integer squared distance, then by row number: see :class:`IntegerRows`. Since
``|x - y|^2 = |x|^2 - (2 x.y - |y|^2)``, the nearest records of x are those of the largest score ``2 x.y - |y|^2``,
and with one more column a score is one entry of a matrix product. All its partial sums are exact in float32, so
the order does not depend on blocks, threads or devices. NumPy finds voters 1.1 to 8 times as fast as FAISS and torch
on the same cores, and a CUDA device 9 times as fast as NumPy on 16 (``docs/results/votes-speed.md``).
"""

import hashlib
import importlib.util
import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from threadpoolctl import ThreadpoolController

from nearveil.cluster import SpreadRows, is_dask_array
from nearveil.privacy.noise import Source
from nearveil.private_knn.plan import PoissonSample

LONGEST = 2364
"""No rounded row is longer. ``3 * LONGEST**2`` is 16,765,488, below ``2**24`` by 11,728."""
MOST_FEATURES = 2**20
_GRID = 2.0**16
_CHUNK = 2**15  # numbers at a time: they stay in the cache


@dataclass(frozen=True)
class IntegerRows:
    """Scale each row to norm one, or by ``1 / feature_norm`` and at most to norm one, and round it to integers."""

    # Every step is element by element in IEEE arithmetic, a maximum, or a sum of integers: the result depends on the
    # row and on public parameters alone. Partial sums of 2 x.y - |y|^2 are whole numbers below 2^24, which float32
    # holds exactly in any blocking (docs/theory/private-knn.md, Theorem 3; attacked by
    # tests/private_knn/test_search.py).

    n_features: int
    feature_norm: float | None = None  # a public bound, never computed from the private rows

    def __post_init__(self) -> None:
        """Check the parameters."""
        if not 1 <= self.n_features <= MOST_FEATURES:
            raise ValueError(f"rows must have 1 to {MOST_FEATURES:,} features; reduce their number before the search")
        if self.feature_norm is not None and not (self.feature_norm > 0 and math.isfinite(self.feature_norm)):
            raise ValueError("feature_norm must be a positive, finite number, or None for rows of norm one")

    def round(self, rows: ArrayLike, *, name: str = "rows") -> NDArray[np.int16]:
        """Round rows, which errors call `name`: finite numbers of any real type and any magnitude."""
        table = _check_shape(rows, self.n_features, name)
        rounded = np.empty(table.shape, dtype=np.int16)
        step = max(1, _CHUNK // self.n_features)
        for start in range(0, len(table), step):
            chunk = slice(start, start + step)
            with np.errstate(over="ignore", under="ignore"):  # wide types may overflow here, tiny rows below
                rounded[chunk] = self._round_chunk(table[chunk].astype(np.float64), name)
        return rounded

    def _round_chunk(self, rows: NDArray[np.float64], name: str) -> NDArray[np.float64]:
        peaks = np.maximum(rows.max(axis=1, keepdims=True), -rows.min(axis=1, keepdims=True))
        if not np.isfinite(peaks).all():
            raise ValueError(f"{name} must be finite: they hold NaN or infinity")
        peaks[peaks == 0] = 1
        grid = np.rint(rows / peaks * _GRID)
        # A sum of at most 2^20 integers of at most 2^32 each is exact in float64, in any order.
        lengths = np.maximum(np.sqrt(np.vecdot(grid, grid)), 1)[:, None]
        if self.feature_norm is not None:
            lengths = np.maximum(lengths, self.feature_norm / peaks * _GRID)
        radius = LONGEST - math.sqrt(self.n_features) / 2
        return np.asarray(np.rint(grid * (radius / lengths)))


def _check_shape(rows: ArrayLike, n_features: int, name: str) -> NDArray[np.generic]:
    table = np.asarray(rows)
    if table.ndim != 2 or table.shape[1] != n_features:
        raise ValueError(f"{name} must have shape (n, {n_features}), one row each; got shape {table.shape}")
    if table.dtype.kind not in "biuf":
        raise ValueError(f"{name} must be real numbers; got {table.dtype}")
    return table


SearchEngine = Literal["auto", "numpy", "cuda"]
Ids = NDArray[np.int32]
Floats = NDArray[np.float32]
Scores = NDArray[np.int32]

SCORE_BYTES: Final = 2**28
"""Bytes of the scores that an engine has in memory at a time, at most."""
_MOST_QUERIES: Final = 1024  # in a batch; more are not faster
_HOST_BLOCK: Final = 128  # queries a worker multiplies at once: enough for a fast product, few enough for the cache
_GROUP: Final = 16  # queries selected at once: their positions fit into the cache, and threads seldom need the GIL
_SAMPLE: Final = 2000  # scores for the estimate of a row's threshold
_BLAS: Final = ThreadpoolController().select(user_api="blas")
_ALONE: Final = threading.Lock()  # two searches that limit BLAS at once would restore each other's limits


class NeighborSearch:
    """Exact search among private rows, in a total order that is the same for all engines."""

    # Rows longer than `feature_norm`, a public bound, are scaled down to it; None scales each to norm one.

    def __init__(self, rows: ArrayLike, *, feature_norm: float | None = None, engine: SearchEngine = "auto") -> None:
        table: Any = rows if is_dask_array(rows) else np.asarray(rows)
        if table.ndim != 2:
            raise ValueError(f"rows must have shape (n, d), one record each; got {table.ndim} dimensions")
        self.n_rows, self.n_features = table.shape
        if self.n_rows >= 2**31:
            raise ValueError("rows must be fewer than 2^31, so that a row number fits into 32 bits")
        self._integers = IntegerRows(self.n_features, feature_norm)
        self.engine = _choose_engine("numpy" if is_dask_array(rows) else engine)
        self._engine: _DaskEngine | _NumpyEngine | _TorchEngine
        if is_dask_array(rows):
            self._engine = _DaskEngine(SpreadRows.of(table, private=True), self._integers)
        else:
            scores = _make_table(table, self._integers)
            self._engine = _NumpyEngine(scores) if self.engine == "numpy" else _TorchEngine(scores, "cuda")

    def nearest(self, queries: ArrayLike, length: int) -> Ids:
        """Return the `length` nearest records of every query, nearest first, ties by row number."""
        batches = [ids for _, ids in self.batches(queries, length)]
        return np.vstack([np.empty((0, min(length, self.n_rows)), dtype=np.int32), *batches])

    def batches(self, queries: ArrayLike, length: int) -> Iterator[tuple[slice, Ids]]:
        """Yield slices of the queries and their nearest records, a batch at a time in bounded memory."""
        length = min(length, self.n_rows)
        for part, doubled in self._double(self.round(queries)):
            n_queries = len(doubled)
            yield part, self._engine.search(doubled, length) if length else np.empty((n_queries, 0), dtype=np.int32)

    def round(self, queries: ArrayLike) -> NDArray[np.int16]:
        """Return queries in integers, as the records are compared with them."""
        return self._integers.round(queries, name="queries")

    def rank(self, rounded: NDArray[np.int16], length: int) -> tuple[Ids, Scores]:
        """Return the `length` nearest rows of each rounded query, nearest first, and their scores."""
        if not isinstance(self._engine, _NumpyEngine):
            raise TypeError('rank needs engine="numpy"')
        ids = np.empty((len(rounded), length), dtype=np.int32)
        scores = np.empty(ids.shape, dtype=np.int32)
        for part, doubled in self._double(rounded):
            ids[part] = self._engine.search(doubled, length)
            scores[part] = [self._engine.table[rows] @ query for rows, query in zip(ids[part], doubled, strict=True)]
        return ids, scores

    def find_units(self, rows: Ids) -> Ids:
        """Return the protected unit of each row: the row itself."""
        return rows

    def within(self, rounded: NDArray[np.int16], radii: Scores, *, nearest_first: bool = False) -> Iterator[Ids]:
        """Yield, for each rounded query, all rows of at least the score `radii`, by row number or nearest first."""
        # Each row's verdict depends on the query, its radius and the row itself alone, to the last bit.
        if isinstance(self._engine, _DaskEngine):
            raise TypeError("X must be in memory: the rows of a Dask array are searched on its workers")
        for part, doubled in self._double(rounded):
            for rows, scores in self._engine.select(doubled, radii[part].astype(np.float32)):
                yield rows[np.argsort(-scores, kind="stable")] if nearest_first else rows

    def _double(self, rounded: NDArray[np.int16]) -> Iterator[tuple[slice, Floats]]:
        """Yield slices of rounded queries as factors of a product with the table, which gives their scores."""
        step = _find_batch_length(self.n_rows)
        for start in range(0, len(rounded), step):
            batch = rounded[start : start + step]
            doubled = np.ones((len(batch), self.n_features + 1), dtype=np.float32)
            np.multiply(batch, 2, out=doubled[:, :-1], casting="unsafe", dtype=np.float32)
            yield slice(start, start + len(batch)), doubled


class GroupSearch:
    """Search among groups of rows by the nearest row of each, which stands for its group in all results."""

    # The order of groups is by the score of a group's nearest row, then by that row's number, so it is a total order in
    # which two groups are compared by their own rows alone, as in Theorem 1.

    def __init__(self, search: NeighborSearch, groups: NDArray[np.int64]) -> None:
        self._search, self._groups, self.round = search, groups, search.round
        self.n_rows, self.engine = int(groups.max(initial=-1)) + 1, search.engine

    def find_units(self, rows: Ids) -> NDArray[np.int64]:
        """Return the group of each row."""
        return np.asarray(self._groups[rows])

    def nearest(self, queries: ArrayLike, length: int) -> Ids:
        """Return the nearest row of each of the `length` nearest groups of every query."""
        rows, length = np.asarray(queries), min(length, self.n_rows)
        nearest, unfinished = np.empty((len(rows), length), dtype=np.int32), np.arange(len(rows))
        depth = 2 * length
        while len(unfinished):
            short = []
            for part, ids in self._search.batches(rows[unfinished], depth):
                for number, listed in zip(unfinished[part], ids, strict=True):
                    firsts = self._find_firsts(listed)[:length]
                    nearest[number, : len(firsts)] = firsts
                    short += [number] * (len(firsts) < length)
            unfinished, depth = np.array(short, dtype=np.int64), 2 * depth
        return nearest

    def batches(self, queries: ArrayLike, length: int) -> Iterator[tuple[slice, Ids]]:
        """Yield slices of the queries and the nearest rows of their nearest groups."""
        rows = np.asarray(queries)
        for start in range(0, len(rows), _HOST_BLOCK):
            part = slice(start, start + _HOST_BLOCK)
            yield part, self.nearest(rows[part], length)

    def rank(self, rounded: NDArray[np.int16], length: int) -> tuple[Ids, Scores]:
        """Return the nearest row of each of the nearest groups of each rounded query, and their scores."""
        ids, scores = (np.empty((len(rounded), length), dtype=np.int32) for _ in range(2))
        for number in range(len(rounded)):
            (rows,), (listed,) = self._search.rank(rounded[number : number + 1], self._search.n_rows)
            firsts = np.sort(np.unique(self._groups[rows], return_index=True)[1])[:length]
            ids[number], scores[number] = rows[firsts], listed[firsts]
        return ids, scores

    def within(self, rounded: NDArray[np.int16], radii: Scores) -> Iterator[Ids]:
        """Yield, for each rounded query, the nearest row of each group that has one of at least the score `radii`."""
        for rows in self._search.within(rounded, radii, nearest_first=True):
            yield self._find_firsts(rows)

    def _find_firsts(self, rows: Ids) -> Ids:
        """Return the first row of each group, in their order."""
        return np.asarray(rows[np.sort(np.unique(self._groups[rows], return_index=True)[1])])


def _make_table(rows: NDArray[Any], integers: IntegerRows) -> Floats:
    """Return rounded rows with an additional column, minus their squared lengths."""
    rounded = integers.round(rows)
    table = np.empty((len(rounded), integers.n_features + 1), dtype=np.float32)
    table[:, :-1] = rounded
    table[:, -1] = -np.einsum("ij,ij->i", rounded, rounded, dtype=np.int64)
    return table


class _DaskEngine:
    """Search the blocks of a Dask array on their workers, which return row numbers; refuse a changed block."""

    def __init__(self, rows: SpreadRows, integers: IntegerRows) -> None:
        self._rows, self._integers = rows, integers
        digests = rows.map(_check_block, integers, stage="checking private records")
        self._digests = {block.start: digest for block, digest in zip(rows.cuts, digests, strict=True)}

    def search(self, queries: Floats, length: int) -> Ids:
        shared = (queries, length, self._integers, self._digests)
        ids: Ids = self._rows.reduce(  # the workers drop the scores
            _search_block, _join_nearest, *shared, finish=lambda nearest: nearest[0], stage="searching private records"
        )
        return ids


def _check_block(rows: NDArray[Any], integers: IntegerRows) -> bytes:
    integers.round(rows)
    return _hash_block(rows)


def _hash_block(rows: NDArray[Any]) -> bytes:
    block = np.ascontiguousarray(rows)
    return hashlib.blake2b(block.tobytes(), key=f"{block.dtype.str}{block.shape}".encode()).digest()


_Nearest: TypeAlias = tuple[Ids, Floats]


def _search_block(
    rows: NDArray[Any], first: int, queries: Floats, length: int, integers: IntegerRows, digests: dict[int, bytes]
) -> _Nearest:
    """Return the nearest rows of the block that starts at row `first`, and their exact scores."""
    if _hash_block(rows) != digests[first]:
        raise ValueError("the rows of this block have changed since fit: call fit again with persistent rows")
    table = _make_table(rows, integers)
    if not len(table):
        return np.empty((len(queries), 0), np.int32), np.empty((len(queries), 0), np.float32)
    ids = _NumpyEngine(table).search(queries, min(length, len(table)))
    scores = np.stack([table[nearest] @ query for nearest, query in zip(ids, queries, strict=True)])
    padding = ((0, 0), (0, length - ids.shape[1]))  # merged lists are of one length
    numbers = np.pad(ids + np.int32(first), padding, constant_values=-1)
    return numbers, np.pad(scores, padding, constant_values=-np.inf)


def _join_nearest(left: _Nearest, right: _Nearest) -> _Nearest:
    """Return the nearest of two blocks: by score, then by row number."""
    ids, scores = (np.concatenate(both, axis=1) for both in zip(left, right, strict=True))
    order = np.lexsort((ids, -scores), axis=1)[:, : max(left[0].shape[1], right[0].shape[1])]
    return np.take_along_axis(ids, order, axis=1), np.take_along_axis(scores, order, axis=1)


class _NumpyEngine:
    """Products by NumPy; of a row of scores only those above a guessed threshold are sorted."""

    def __init__(self, table: Floats) -> None:
        self.table = table
        # The sample affects the time of a search, never its result. A stride is a bad sample of sorted rows.
        self._sample = np.sort(np.random.default_rng(0).permutation(len(table))[:_SAMPLE])

    def search(self, queries: Floats, length: int) -> Ids:
        ids = np.empty((len(queries), length), dtype=np.int32)

        def work(first: int, last: int, block: int) -> None:
            # Fresh memory costs as much as the selection, so that all blocks of a worker share one buffer.
            buffer = np.empty((min(block, last - first), len(self.table)), dtype=np.float32)
            for start in range(first, last, block):
                part = slice(start, min(start + block, last))
                scores = np.matmul(queries[part], self.table.T, out=buffer[: part.stop - start])
                _assert_exact(scores[0, :8], queries[start], self.table[:8])
                for group in range(0, len(scores), _GROUP):
                    ids[part][group : group + _GROUP] = _find_largest(
                        scores[group : group + _GROUP], length, self._sample
                    )

        with _ALONE:
            # As many workers as BLAS has threads: OMP_NUM_THREADS and threadpoolctl limit the search, too.
            threads = max((library["num_threads"] for library in _BLAS.info()), default=1)
            workers = min(threads, len(queries))
            block = max(1, min(_HOST_BLOCK, _find_batch_length(len(self.table)) // workers))
            bounds = np.linspace(0, len(queries), workers + 1).astype(int).tolist()
            with _BLAS.limit(limits=threads // workers), ThreadPoolExecutor(workers) as pool:
                list(pool.map(work, bounds[:-1], bounds[1:], [block] * workers))
        return ids

    def select(self, queries: Floats, radii: Floats) -> Iterator[_Nearest]:
        for start in range(0, len(queries), _HOST_BLOCK):
            part = slice(start, start + _HOST_BLOCK)
            scores = queries[part] @ self.table.T
            _assert_exact(scores[0, :8], queries[start], self.table[:8])
            for row, radius in zip(scores, radii[part], strict=True):
                rows = np.flatnonzero(row >= radius).astype(np.int32)
                yield rows, row[rows]


class _TorchEngine:
    """Products and selection by torch on a CUDA device (8.7 times 16 cores); tests use the CPU."""

    def __init__(self, table: Floats, device: str) -> None:
        import torch

        self._device = device
        self._table = torch.from_numpy(table).to(device)
        self._numbers = torch.arange(len(table), device=device)

    def search(self, queries: Floats, length: int) -> Ids:
        import torch

        n = len(self._table)
        n_listed = min(length + 1, n)
        with torch.inference_mode():
            batch = torch.from_numpy(queries).to(self._device)
            with _keep_float32(self._device):
                scores = batch @ self._table.T
            _assert_exact(scores[0, :8].float().cpu().numpy(), queries[0], self._table[:8].cpu().numpy())
            keys = torch.sort(self._keys(*torch.topk(scores, n_listed, dim=1, sorted=False)), dim=1).values
            ids = (keys[:, :length] % n).int()
            if n_listed > length:
                tied = torch.nonzero(keys[:, length - 1] // n == keys[:, length] // n)[:, 0]
                # Keys and their temporary arrays take several times the memory of scores: eight parts keep the bound.
                for part in torch.split(tied, max(1, _find_batch_length(n) // 8)):
                    unique = self._keys(scores[part], self._numbers)
                    ids[part] = (torch.topk(unique, length, dim=1, largest=False).values % n).int()
            return np.asarray(ids.cpu().numpy())

    def select(self, queries: Floats, radii: Floats) -> Iterator[_Nearest]:
        import torch

        with torch.inference_mode():
            batch = torch.from_numpy(queries).to(self._device)
            with _keep_float32(self._device):
                scores = batch @ self._table.T
            _assert_exact(scores[0, :8].float().cpu().numpy(), queries[0], self._table[:8].cpu().numpy())
            for row, radius in zip(scores, radii.tolist(), strict=True):
                rows = torch.nonzero(row >= radius)[:, 0]
                yield np.asarray(rows.int().cpu().numpy()), np.asarray(row[rows].cpu().numpy())

    def _keys(self, scores: Any, numbers: Any) -> Any:
        """Return integers in the total order, different for any two records of a query."""
        return (LONGEST**2 - scores.long()) * len(self._table) + numbers


def _choose_engine(engine: str) -> str:
    """Return "cuda" or "numpy", or raise if the engine cannot be used here."""
    if engine not in get_args(SearchEngine):
        raise ValueError(f"engine must be one of {', '.join(get_args(SearchEngine))}")
    if engine == "numpy":
        return engine
    problem = "needs torch: install the extra nearveil[torch], or"
    if importlib.util.find_spec("torch") is not None:
        import torch

        if torch.cuda.is_available():
            return "cuda"
        problem = "finds no CUDA device here:"
    if engine == "cuda":
        raise ValueError(f'engine "cuda" {problem} take engine="auto"')
    return "numpy"


def _find_batch_length(n_rows: int) -> int:
    """Return the number of queries to score at once."""
    return max(1, min(_MOST_QUERIES, SCORE_BYTES // (4 * max(1, n_rows))))


def _find_largest(scores: Floats, length: int, sample: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the columns of the `length` largest scores of each row, for at most 128 rows: by score, then by column."""
    # Scores at or above a guessed threshold are sorted. Too low a guess costs time; too high a one is corrected.
    m, n = scores.shape
    thresholds = _guess_thresholds(scores, length, sample)
    positions, bounds = _find_candidates(scores, thresholds)
    short = np.diff(bounds) < length
    if short.any():
        thresholds[short] = np.partition(scores[short], n - length, axis=1)[:, n - length]
        positions, bounds = _find_candidates(scores, thresholds)
    # A distance has 25 bits, a row 7: two stable passes over 16 bits each. NumPy sorts these by radix, four times
    # as fast as whole numbers. Positions rise, so that equal distances stay in their order.
    distances = (LONGEST**2 - scores.ravel()[positions].astype(np.int32)).astype(np.uint32)
    rows = np.repeat(np.arange(m, dtype=np.uint32), np.diff(bounds))
    order = np.lexsort((distances.astype(np.uint16), (rows << 9 | distances >> 16).astype(np.uint16)))
    first = order[bounds[:-1, None] + np.arange(length)]
    return np.asarray(positions[first] - n * np.arange(m)[:, None])


def _guess_thresholds(scores: Floats, length: int, sample: NDArray[np.int64]) -> Floats:
    """Return for each row a threshold that its `length` largest scores probably reach."""
    expected = length * len(sample) / scores.shape[1]
    rank = len(sample) - int(expected + 4 * np.sqrt(expected) + 1)  # four standard deviations: one miss in 30,000
    if rank < 0:
        return np.full(len(scores), -np.inf, dtype=np.float32)
    return np.asarray(np.partition(scores[:, sample], rank, axis=1)[:, rank])


def _find_candidates(scores: Floats, thresholds: Floats) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the flat positions of scores at or above the threshold of their row, and where each row begins."""
    positions = np.flatnonzero(scores >= thresholds[:, None])
    return positions, np.searchsorted(positions, np.arange(len(scores) + 1) * scores.shape[1])


def _assert_exact(scores: Floats, query: Floats, rows: Floats) -> None:
    """Raise if a product was not computed in true float32; the last column needs all its bits."""
    if not np.array_equal(scores, rows.astype(np.float64) @ query.astype(np.float64)):
        raise RuntimeError("products on this machine are less exact than float32: switch off TF32 and bfloat16 modes")


@contextmanager
def _keep_float32(device: str) -> Iterator[None]:
    """Make torch multiply in full float32, and restore its settings."""
    import torch

    host: Any = torch.backends.mkldnn  # torch's annotations lack its `matmul`
    backends = torch.backends.cuda.matmul, host.matmul
    before = [backend.fp32_precision for backend in backends]
    with ExitStack() as stack:
        stack.enter_context(torch.autocast(device, enabled=False))
        for backend, precision in zip(backends, before, strict=True):
            stack.callback(setattr, backend, "fp32_precision", precision)
            backend.fp32_precision = "ieee"
        yield


Voters = NDArray[np.int32]

NO_VOTER = -1
"""Fills the list of voters if a sample has fewer records than may vote."""


def draw_voters(
    search: NeighborSearch | GroupSearch,
    queries: NDArray[np.float64],
    sample: PoissonSample,
    n_neighbors: int,
    source: Source,
    *,
    draws: int,
) -> Iterator[list[Voters]]:
    """Draw the voters of each query, in batches: for each draw their row numbers, nearest first, then `NO_VOTER`."""
    # The draws do not depend on the records, so this is drawing the kept ranks of the full order. A list that is too
    # short for its coins is lengthened; the coins stay (docs/theory/private-knn.md; test_coins.py).
    most = min(n_neighbors, search.n_rows)  # no sample keeps more
    for rows, ids in search.batches(queries, sample.list_length(most)):
        coins = [sample.ranks(len(ids), most, source) for _ in range(draws if sample.rate < 1 else 1)]
        voters = [_look_up(search, queries[rows], ids, ranks) for ranks in coins]
        yield voters if len(voters) == draws else voters * draws  # all records are kept: no draws, one search


def _look_up(
    search: NeighborSearch | GroupSearch, queries: NDArray[np.float64], ids: Voters, ranks: NDArray[np.int64]
) -> Voters:
    listed, n_rows = ids.shape[1], search.n_rows
    voters = np.full(ranks.shape, NO_VOTER, dtype=np.int32)
    present = ranks < listed
    voters[present] = np.take_along_axis(ids, np.where(present, ranks, 0), axis=1)[present] if listed else NO_VOTER
    needed = np.minimum(ranks[:, -1] + 1, n_rows)
    short = np.flatnonzero(needed > listed)
    if len(short):
        longer = search.nearest(queries[short], int(needed[short].max()))
        voters[short] = _look_up(search, queries[short], longer, ranks[short])
    return voters
