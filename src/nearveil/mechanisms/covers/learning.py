"""Learn the sets of a gallery for the channel that will name them.

Items of the gallery act as queries, each without itself. The good set of a query is the one that covers most of its
neighbours; every set contains the items in greatest demand, given how often the channel names it for each query. The
two steps alternate. The first passes share a query among the sets with about the same coverage, less and less softly.
More sets than needed are learned at first, and the least useful ones dropped.

Coverage and demand are sparse, and a large gallery learns from some of its items. Random choices are seeded.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import faiss
import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from sklearn.utils.extmath import randomized_svd
from threadpoolctl import threadpool_limits

from nearveil.cluster import LOCAL, Cluster, SpreadRows
from nearveil.mechanisms.covers.maps import DECAY as CHOICE_DECAY
from nearveil.mechanisms.covers.maps import MOST_SETS, NEIGHBORS, usual_number
from nearveil.metrics import ScoreSpace

Rows = NDArray[np.float32]
Lists = NDArray[np.int32]
Positions = NDArray[np.int64]

Report = Callable[[str, float], object]  # the current stage, and the completed fraction of the work

RANKS = 48  # neighbours that count, with weights exp(-rank / DECAY): more than the top 8, to avoid overfitting
DECAY = 16.0
_TOP = 8
_EXACT = 1 << 36  # largest number of products for an exact search of neighbours
_PROBES = 8  # inverted lists to search otherwise
_MOST_LISTS = 4096  # with more, time would grow faster than the gallery
_WHOLE = 1500  # largest number of rows or columns for a full decomposition
_DIMENSIONS = 128  # for clusters and approximate searches
_SAMPLE = 20_000  # rows to compute leading directions from
MOST_QUERIES = 250_000  # items that act as queries
_ANNEALED = 15_000  # queries for soft passes, or more for many sets
_QUERIES_A_SET = 64
_ITEMS_A_QUERY = 16  # with fewer queries, too few sets look best
_SOFT_PASSES = 12
_FIRMEST = 100.0
_HARD = 1e5  # a softness that ignores the second best
_MIN_SHARE = 0.01  # of a query; smaller shares are ignored
_MOST_PASSES = 30
_GAIN = 1e-4  # stop after a smaller gain
_STARTS = 4
_MANY_SETS = 256  # sets in earlier starts; more starts would not improve
_SPARE = 1.5  # multiple of the usual number of sets to learn at first
_DROPPED = 32  # drop one of so many sets at a time
_PASSES_A_DROP = 2
_FALL = 0.03  # stop dropping sets after such a loss of recall
_ITEMS_A_SET = 8  # with fewer, a map would be larger than its gallery
_CELLS = 64  # for fine centroids
_MOST_LISTED = 1 << 24  # positions in one list
_SEED = 0


@dataclass(frozen=True)
class Plan:
    """The sizes of sets and the epsilon of the channel."""

    n_sets: int
    set_size: int
    epsilon: float

    @property
    def favour(self) -> float:
        """Excess odds of the good set against another."""
        return float(np.expm1(self.epsilon))


@dataclass(frozen=True)
class Demand:
    """The demand of each query for each item, by three kinds of weights; rows sum to one."""

    training: csr_array  # for learning: exp(-rank / 16)
    chosen_by: csr_array  # as the client chooses
    top: csr_array  # equal weights for the nearest 8, as in recall@8

    @classmethod
    def of(cls, lists: Lists, n_items: int) -> "Demand":
        """Weigh lists of neighbours, shape (n_queries, ranks)."""
        return cls(
            training=_weigh(lists, n_items, np.exp(-np.arange(RANKS) / DECAY)),
            chosen_by=_weigh(lists, n_items, np.exp(-np.arange(NEIGHBORS) / CHOICE_DECAY)),
            top=_weigh(lists, n_items, np.ones(_TOP)),
        )


def _weigh(lists: Lists, n_items: int, weights: NDArray[np.float64]) -> csr_array:
    ranks = min(lists.shape[1], len(weights))
    share = (weights[:ranks] / weights[:ranks].sum()).astype(np.float32)
    starts = np.arange(0, len(lists) * ranks + 1, ranks)
    parts = (np.tile(share, len(lists)), np.ascontiguousarray(lists[:, :ranks]).ravel(), starts)
    return csr_array(parts, shape=(len(lists), n_items))


@dataclass(frozen=True)
class Shares:
    """The degree to which each set is the good set of each query: `common` for all sets, plus `specific`."""

    specific: csr_array  # (n_queries, n_sets)
    common: NDArray[np.float32]  # (n_queries,)

    @classmethod
    def of(cls, coverage: csr_array, softness: float) -> "Shares":
        """Share queries among sets in proportion to exp(softness * coverage)."""
        n_queries, n_sets = coverage.shape
        counts = np.diff(coverage.indptr)
        rows = np.repeat(np.arange(n_queries), counts)
        largest = _row_maxima(coverage, coverage.data)
        weight = np.exp(softness * (coverage.data - largest[rows]))
        nothing = np.exp(-softness * largest)  # the weight of a set that covers nothing
        total = np.bincount(rows, weight, minlength=n_queries) + (n_sets - counts) * nothing
        excess = ((weight - nothing[rows]) / total[rows]).astype(np.float32)
        large = excess > _MIN_SHARE
        starts = np.concatenate([[0], np.cumsum(np.bincount(rows[large], minlength=n_queries))])
        return cls(
            csr_array((excess[large], coverage.indices[large], starts), shape=coverage.shape),
            (nothing / total).astype(np.float32),
        )

    @classmethod
    def assign(cls, good: Positions, n_sets: int) -> "Shares":
        """Assign each query to one set."""
        ones = np.ones(len(good), dtype=np.float32)
        return cls(csr_array((ones, good, np.arange(len(good) + 1)), shape=(len(good), n_sets)), 0 * ones)

    def measure(self, coverage: csr_array, plan: Plan) -> float:
        """Return the mean coverage of the set that the channel names."""
        by_all = np.asarray(coverage.sum(axis=1)).ravel()
        by_good = np.asarray(self.specific.multiply(coverage).sum(axis=1)).ravel() + self.common * by_all
        total = (by_all + plan.favour * by_good).sum(dtype=np.float64)
        return float(total) / (len(by_all) * (plan.favour + plan.n_sets))


def measure_coverage(demand: csr_array, sets: csr_array) -> csr_array:
    """Return the part of each query's demand that is in each set, shape (n_queries, n_sets)."""
    return (demand @ sets.T.tocsr()).tocsr()


def fill_sets(demand: csr_array, shares: Shares, plan: Plan) -> csr_array:
    """Return the sets of the items in greatest demand, shape (n_sets, n_items)."""
    common = np.asarray(demand.T @ (1 + plan.favour * shares.common), dtype=np.float32)
    set_demand = (shares.specific.T.tocsr() @ demand).tocsr()
    set_demand.data *= plan.favour
    hubs = np.argpartition(common, -plan.set_size)[-plan.set_size :]  # the items of a set without queries
    value, is_own = common.copy(), np.zeros(len(common), dtype=bool)
    set_items = np.empty((plan.n_sets, plan.set_size), dtype=np.int32)
    for number, (start, end) in enumerate(zip(set_demand.indptr[:-1], set_demand.indptr[1:], strict=True)):
        demanded = set_demand.indices[start:end]
        value[demanded] += set_demand.data[start:end]
        is_own[demanded] = True
        items = np.concatenate([demanded, hubs[~is_own[hubs]]])
        set_items[number] = items[np.argpartition(value[items], -plan.set_size)[-plan.set_size :]]
        value[demanded] = common[demanded]
        is_own[demanded] = False
    set_items.sort(axis=1)
    starts = np.arange(0, set_items.size + 1, plan.set_size)
    return csr_array((np.ones(set_items.size, np.float32), set_items.ravel(), starts), shape=set_demand.shape)


def learn(demand: csr_array, start: Positions, plan: Plan) -> csr_array:
    """Alternate between good sets (at first `start`) and demand, first softly, then until the gain is small."""
    sets = fill_sets(demand, Shares.assign(start, plan.n_sets), plan)
    softest = max(3.0, 1.5 * np.log(plan.n_sets))  # with more sets, more would go to sets without coverage
    for softness in np.geomspace(softest, _FIRMEST, _SOFT_PASSES):
        sets = fill_sets(demand, Shares.of(measure_coverage(demand, sets), softness), plan)
    return refine(demand, sets, plan)


def refine(demand: csr_array, sets: csr_array, plan: Plan) -> csr_array:
    """Alternate until the gain is small."""
    best, best_sets = 0.0, sets
    for _ in range(_MOST_PASSES):
        coverage = measure_coverage(demand, sets)
        shares = Shares.of(coverage, _HARD)
        reached = shares.measure(coverage, plan)
        if reached <= best * (1 + _GAIN):
            break
        best, best_sets = reached, sets
        sets = fill_sets(demand, shares, plan)
    return best_sets


def measure_recall(demand: Demand, sets: csr_array, plan: Plan) -> float:
    """Return the expected NN-recall@8 of queries, with good sets chosen as by a client."""
    chosen = Shares.of(measure_coverage(demand.chosen_by, sets), _HARD)
    return chosen.measure(measure_coverage(demand.top, sets), plan)


def neighbor_lists(
    features: SpreadRows,
    space: ScoreSpace,
    queries: Positions,
    ranks: int = RANKS,
    *,
    encoded: Rows | None = None,
    report: Callable[[float], object] | None = None,
) -> Lists:
    """Return the nearest other items of the items `queries`, nearest first; exact if that is cheap."""
    # Pass the item rows of randomly chosen queries as `encoded`: inverted lists are then learned from them.
    n, d = features.shape
    count = min(ranks, n - 1)
    rows = features.take(queries, "taking queries") if encoded is None else encoded
    probe = None
    if len(queries) * n * d > _EXACT:
        n_lists = min(int(2 * np.sqrt(n)), _MOST_LISTS)
        chosen = choose_rows(n, 64 * n_lists)
        sample = features.take(chosen, "taking rows") if encoded is None else rows[: len(chosen)]
        axes = projection(to_directions(sample, space), _DIMENSIONS) if d > _DIMENSIONS else None
        probe = _Probe(space, axes, _find_lists(to_directions(sample, space, axes), n_lists, features.cluster))
    done = 0

    def tick(number: int) -> None:
        nonlocal done
        done += number
        if report is not None:
            report(done / len(features.cuts))

    near = None
    if probe is not None:
        cut = SpreadRows.cut(rows, features.cluster)
        near = np.concatenate(list(cut.map(_find_near, probe, stage="choosing lists")))
    query_rows = _project_rows(space.make_queries(rows).astype(np.float32), probe)
    _, nearest = features.reduce(
        _search_part, _merge, query_rows, probe, near, count + 1, stage="looking for neighbours", tick=tick
    )
    # Drop each item from its own list, or else the last entry (-1 if a list ran out).
    is_self = nearest == queries[:, None]
    is_self[~is_self.any(axis=1), -1] = True
    neighbors = nearest[~is_self].reshape(len(queries), count)
    return np.asarray(np.where(neighbors < 0, (queries[:, None] + 1) % n, neighbors), dtype=np.int32)


def to_directions(rows: Rows, space: ScoreSpace, axes: Rows | None = None) -> Rows:
    """Return the directions of item rows, by which sets are chosen, or their coordinates along `axes`."""
    directions = space.make_directions(rows, lenient=True).astype(np.float32)
    return directions if axes is None else project(directions, axes)


class _Probe(NamedTuple):
    """Inverted lists for an approximate search: items and queries are in the lists nearest to their directions."""

    space: ScoreSpace
    axes: Rows | None  # if rows are projected first
    centroids: Rows


def _project_rows(rows: Rows, probe: _Probe | None) -> Rows:
    return rows if probe is None or probe.axes is None else project(rows, probe.axes)


def _search_part(
    rows: Rows, first: int, queries: Rows, probe: _Probe | None, near: Positions | None, count: int
) -> tuple[Rows, Lists]:
    """Return scores and items of a partition's nearest rows, counted from `first`; -1 if there are fewer."""
    items = _project_rows(rows, probe)
    index = faiss.IndexFlatIP(items.shape[1])
    if probe is None or near is None:
        index.add(items)
        scores, positions = index.search(queries, count)
    else:
        index.add(probe.centroids)
        inverted: Any = faiss.IndexIVFFlat(index, items.shape[1], len(probe.centroids), faiss.METRIC_INNER_PRODUCT)
        inverted.is_trained, inverted.nprobe = True, near.shape[1]
        lists = np.ascontiguousarray(index.search(to_directions(rows, probe.space, probe.axes), 1)[1][:, 0])
        inverted.add_core(len(items), faiss.swig_ptr(items), None, faiss.swig_ptr(lists))
        scores, positions = inverted.search_preassigned(queries, count, near, None)
    return scores, np.where(positions < 0, -1, positions + first).astype(np.int32)


def _merge(first: tuple[Rows, Lists], second: tuple[Rows, Lists]) -> tuple[Rows, Lists]:
    """Return the best of two lists of each query."""
    scores, items = np.stack([first[0], second[0]]), np.stack([first[1], second[1]], dtype=np.int64)
    best, which = faiss.merge_knn_results(scores, items, keep_max=True)
    return best, which.astype(np.int32)


def _find_lists(sample: Rows, n_lists: int, workers: Cluster) -> Rows:
    """Return the centroids of inverted lists, of norm one."""
    centroids = fine_centres(sample, n_lists, workers, stage="making lists").centroids
    norms = np.maximum(np.linalg.norm(centroids, axis=1, keepdims=True), 1e-9)
    return np.asarray(centroids / norms, dtype=np.float32)


def _find_near(rows: Rows, probe: _Probe) -> Positions:
    """Return the inverted lists to search for each query."""
    index = faiss.IndexFlatIP(probe.centroids.shape[1])
    index.add(probe.centroids)
    directions = to_directions(rows, probe.space, probe.axes)
    return np.asarray(index.search(directions, min(_PROBES, len(probe.centroids)))[1])


def nearest_centre(features: Rows, centroids: Rows) -> Positions:
    """Return the nearest centroid of each row."""
    index = faiss.IndexFlatL2(features.shape[1])
    index.add(centroids)
    return np.asarray(index.search(features, 1)[1][:, 0], dtype=np.int64)


def centres(features: Rows, count: int, seed: int, passes: int = 15) -> Rows:
    """Return k-means centroids, from at most 256 rows for each."""
    means = faiss.Kmeans(
        features.shape[1], count, niter=passes, seed=seed, min_points_per_centroid=1, max_points_per_centroid=256
    )
    with threadpool_limits(1, user_api="openmp"):  # with more threads, near ties would come out differently
        means.train(features)
    return np.asarray(means.centroids)


@dataclass(frozen=True)
class FineCentres:
    """Many centroids in cells; the centroid of a row is the nearest in its cell."""

    cells: Rows
    centroids: Rows
    starts: Positions  # where the centroids of each cell begin, and the end

    def find(self, rows: Rows) -> NDArray[np.uint16]:
        """Return the centroid of each row."""
        cell, nearest = nearest_centre(rows, self.cells), np.empty(len(rows), np.uint16)
        for number in np.unique(cell):
            start, stop = self.starts[number : number + 2]
            inside = cell == number
            nearest[inside] = start + nearest_centre(rows[inside], self.centroids[start:stop])
        return nearest


def fine_centres(
    features: Rows, count: int, workers: Cluster = LOCAL, *, stage: str = "placing prototypes"
) -> FineCentres:
    """Return many centroids by k-means in cells: plain k-means would compare every row with every centroid."""
    n_cells = min(_CELLS, max(1, count // 4))
    coarse = centres(features[choose_rows(len(features), 64 * n_cells)], n_cells, _SEED)
    cell = nearest_centre(features, coarse)
    sizes = np.bincount(cell, minlength=n_cells)
    ends = np.rint(np.cumsum(sizes) * ((count - n_cells) / len(features))).astype(int)
    parts, filled = np.minimum(sizes, 1 + np.diff(ends, prepend=0)), np.flatnonzero(sizes)
    cells = workers.place([(features[cell == number], int(parts[number])) for number in filled])
    names = [f"cell {number}" for number in filled]
    centroids = list(workers.map(_part_cell, cells, stage=stage, names=names))
    return FineCentres(coarse[filled], np.concatenate(centroids), np.concatenate([[0], np.cumsum(parts[filled])]))


def _part_cell(cell: tuple[Rows, int]) -> Rows:
    """Return centroids of a cell's rows."""
    rows, count = cell
    return centres(rows, count, _SEED, passes=6)


def find_fine(rows: Rows, fine: FineCentres) -> NDArray[np.uint16]:
    """Return the centroids of a partition's rows."""
    return fine.find(rows)


def project(rows: Rows, matrix: Rows) -> Rows:
    """Return the coordinates of rows in the directions of a matrix."""
    return np.asarray(rows @ matrix)


class Learned(NamedTuple):
    """Sets of a gallery, and the queries used to learn them."""

    sets: csr_array  # (n_sets, n_items)
    queries: Positions  # items in a random order
    lists: Lists  # their neighbours
    rows: Rows  # their directions
    directions: Rows  # the leading axes of the directions, shape (d, r)


def learn_sets(
    features: SpreadRows,
    space: ScoreSpace,
    set_size: int,
    epsilon: float,
    n_sets: int | None,
    report: Report,
    *,
    least: int = 2,
) -> Learned:
    """Return the best sets of several starts. By default, held-out queries determine their number."""
    (n, d), workers = features.shape, features.cluster
    queries = _choose(n, MOST_QUERIES)
    encoded = features.take(queries, "taking queries")
    rows = to_directions(encoded, space)
    directions = projection(rows[np.argsort(queries)], _DIMENSIONS)
    small = rows if d <= _DIMENSIONS else project(rows, directions)
    lists = neighbor_lists(
        features, space, queries, encoded=encoded, report=lambda done: report("looking for neighbours", 0.4 * done)
    )
    shared = workers.share(_Task(small, lists, n, set_size, epsilon))
    most = min(MOST_SETS, n, max(n // _ITEMS_A_SET, 2 * n // set_size))
    numbers = (n_sets, n_sets) if n_sets else (max(2, least), max(2, least, most))
    results: list[tuple[float, int, csr_array]] = []
    seeds = range(_count_starts(n_sets) if n_sets else 1)
    while seeds:
        jobs = [(seed, *numbers) for seed in seeds]
        names = [f"start {seed}" for seed in seeds]
        for result in workers.map(_learn_start, jobs, shared, stage="learning sets", names=names):
            results.append(result)
            report("learning sets", 0.4 + 0.4 * len(results) / _STARTS)
        numbers = (results[0][2].shape[0],) * 2  # the first start chooses the number
        seeds = range(len(results), _count_starts(numbers[0]))
    return Learned(max(results)[2], queries, lists, rows, directions)


def _count_starts(n_sets: int) -> int:
    return min(_STARTS, 1 + _MANY_SETS // n_sets)


def _learn_start(job: tuple[int, int, int], task: "_Task") -> tuple[float, int, csr_array]:
    """Return the best sets of one start, refined on all queries, with their recall and the start's seed."""
    seed, least, most = job
    sets, _ = max(task.learn(least, most, seed), key=lambda result: result[1])
    demand, plan = Demand.of(task.lists, task.n_items), task.plan(sets.shape[0])
    refined = refine(demand.training, sets, plan)
    return measure_recall(demand, refined, plan), seed, refined


@dataclass(frozen=True)
class _Task:
    """Queries of a gallery to learn sets for."""

    rows: Rows  # of the queries, in a random order
    lists: Lists  # their neighbours
    n_items: int
    set_size: int
    epsilon: float

    def plan(self, n_sets: int) -> Plan:
        return Plan(n_sets, self.set_size, self.epsilon)

    def learn(self, least: int, most: int, seed: int) -> Iterator[tuple[csr_array, float]]:
        """Yield fewer and fewer sets, learned from one start, with recall on other queries, until recall falls."""
        # Learning too many sets and dropping the least useful ones is better than starting with the best number.
        n, total = self.n_items, len(self.rows)
        usual = usual_number(n, self.set_size, self.epsilon, least, most)
        count = max(_ANNEALED, _QUERIES_A_SET * usual, self.n_items // _ITEMS_A_QUERY)
        taught = min(count, total - total // 5)
        demand = Demand.of(self.lists[:taught], n).training
        tested = Demand.of(self.lists[taught : taught + count] if total > taught else self.lists, n)
        sample = self.rows[: taught + count]
        plan = self.plan(min(round(_SPARE * usual) + 2, len(sample)))
        sets = learn(demand, nearest_centre(sample[:taught], centres(sample, plan.n_sets, seed)), plan)
        best = 0.0
        while True:
            if plan.n_sets <= most:
                recall = measure_recall(tested, sets, plan)
                yield sets, recall
                best = max(best, recall)
                if plan.n_sets <= least or recall < (1 - _FALL) * best:
                    return
            target = most if plan.n_sets > most else least
            plan = self.plan(max(target, plan.n_sets - max(1, plan.n_sets // _DROPPED)))
            sets = drop_sets(demand, sets, plan)


def drop_sets(demand: csr_array, sets: csr_array, plan: Plan) -> csr_array:
    """Drop the sets that another set can replace with the smallest loss, and refine the rest."""
    coverage = measure_coverage(demand, sets)
    rows = np.repeat(np.arange(len(coverage.indptr) - 1), np.diff(coverage.indptr))
    best = _row_maxima(coverage, coverage.data)
    is_best = coverage.data == best[rows]
    second = _row_maxima(coverage, np.where(is_best, 0, coverage.data))
    missed = np.where(np.bincount(rows, is_best, minlength=len(best)) == 1, best - second, 0)
    loss = np.bincount(coverage.indices, coverage.data + plan.favour * is_best * missed[rows], minlength=sets.shape[0])
    sets = sets[np.sort(np.argsort(loss, kind="stable")[sets.shape[0] - plan.n_sets :])]
    for _ in range(_PASSES_A_DROP):
        sets = fill_sets(demand, Shares.of(measure_coverage(demand, sets), _HARD), plan)
    return sets


def _row_maxima(table: csr_array, values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the largest of the values at a table's entries in each row; 0 without entries."""
    largest = np.zeros(table.shape[0], dtype=np.float32)
    filled = np.flatnonzero(np.diff(table.indptr))
    if len(filled):
        largest[filled] = np.maximum.reduceat(values, table.indptr[filled])
    return largest


def projection(features: Rows, dimensions: int) -> Rows:
    """Return the leading directions of uncentred features, shape (d, r)."""
    n, d = features.shape
    rank = min(d, dimensions)
    if min(n, d) > _WHOLE:  # compute only the leading directions
        _, _, rows = randomized_svd(features[choose_rows(n, _SAMPLE)], rank, random_state=_SEED)
        return np.ascontiguousarray(rows.T)
    if n >= d:
        _, vectors = np.linalg.eigh(features.T @ features)
        return np.ascontiguousarray(vectors[:, ::-1][:, :rank])
    _, _, rows = np.linalg.svd(features, full_matrices=False)
    return np.ascontiguousarray(rows[:rank].T)


def choose_rows(n: int, count: int) -> Positions:
    """Return a fixed random choice of positions in increasing order."""
    return np.sort(_choose(n, count))


def _choose(n: int, count: int) -> Positions:
    """Return a fixed random choice of positions in random order; avoids a permutation of very many."""
    rng = np.random.default_rng(_SEED)
    return rng.permutation(n)[:count] if n <= _MOST_LISTED else rng.choice(n, min(n, count), replace=False)
