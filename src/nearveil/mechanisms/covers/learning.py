"""Sets of a gallery, learned for the very channel that will name them.

Items of the gallery act as queries, each without itself. Every query has a good set, the one that covers most of its
neighbours; every set holds the items in greatest demand, given how often the channel names it for each query. The two
steps alternate, and neither lowers the recall. All of it is public, so random choices are seeded.
"""

from dataclasses import dataclass

import faiss
import numpy as np
import scipy.sparse
from numpy.typing import NDArray
from sklearn.utils.extmath import randomized_svd

Rows = NDArray[np.float32]
Lists = NDArray[np.int32]
Sets = NDArray[np.float32]  # (n_sets, n_items), ones and zeros

RANKS = 48  # neighbours that count, with weights exp(-rank / DECAY): wider than the top 8, lest sets fit noise
DECAY = 16.0
_CHOICE_RANKS, _CHOICE_DECAY = 24, 8.0  # as the client chooses
_TOP = 8
_EXACT = 20_000  # items up to which neighbours are searched exactly, and the number of sets on all of them
_WHOLE = 1500  # rows or columns up to which all directions are computed
_DIMENSIONS = 128  # where clusters are looked for, and neighbours of larger galleries
_SOFTNESS = np.geomspace(3.0, 100.0, 24)
_MOST_PASSES = 30
_SEED = 0
_MOST_SETS = 512
_MOST_OF_LARGE = 4096
_GROWTH = 1.25
_RESTARTS = 8


def neighbor_lists(features: Rows, ranks: int = RANKS) -> Lists:
    """Return each item's nearest others, nearest first; exact up to 20,000 items, by inverted lists above."""
    n, d = features.shape
    count = min(ranks, n - 1)
    index = faiss.IndexFlatIP(d) if n <= _EXACT else _inverted(features)
    index.add(features)
    _, found = index.search(features, count + 1)
    # An item is its own nearest, unless another has the same features or a list ran out (-1).
    own = found == np.arange(n)[:, None]
    own[~own.any(axis=1), -1] = True
    lists = found[~own].reshape(n, count).astype(np.int32)
    return np.where(lists < 0, np.roll(np.arange(n, dtype=np.int32), 1)[:, None], lists)


def _inverted(features: Rows) -> faiss.IndexIVFFlat:
    """Return an empty index of inverted lists that has learned where rows lie."""
    n, d = features.shape
    n_lists = int(2 * np.sqrt(n))
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(d), d, n_lists, faiss.METRIC_INNER_PRODUCT)
    index.nprobe = 8
    index.cp.min_points_per_centroid = 1
    index.train(_some(features, 64 * n_lists))
    return index


@dataclass(frozen=True)
class Demand:
    """How much each query wants each item, by two kinds of weights."""

    wanted: scipy.sparse.csr_array  # for learning: exp(-rank / 16)
    wanted_by: scipy.sparse.csr_array  # its transpose
    chosen_by: scipy.sparse.csr_array  # as the client chooses
    top: scipy.sparse.csr_array  # the nearest 8 alike: what is measured

    @classmethod
    def of(cls, lists: Lists, n_items: int) -> "Demand":
        """Weigh lists of neighbours, shape (n_queries, ranks)."""
        wanted = _weighted(lists, n_items, np.exp(-np.arange(RANKS) / DECAY))
        return cls(
            wanted=wanted,
            wanted_by=wanted.T.tocsr(),
            chosen_by=_weighted(lists, n_items, np.exp(-np.arange(_CHOICE_RANKS) / _CHOICE_DECAY)),
            top=_weighted(lists, n_items, np.ones(_TOP)),
        )


def _weighted(lists: Lists, n_items: int, weights: NDArray[np.float64]) -> scipy.sparse.csr_array:
    ranks = min(lists.shape[1], len(weights))
    share = (weights[:ranks] / weights[:ranks].sum()).astype(np.float32)
    starts = np.arange(0, len(lists) * ranks + 1, ranks)
    parts = (np.tile(share, len(lists)), np.ascontiguousarray(lists[:, :ranks]).ravel(), starts)
    return scipy.sparse.csr_array(parts, shape=(len(lists), n_items))


def naming(coverage: NDArray[np.float32], epsilon: float, softness: float | None = None) -> NDArray[np.float32]:
    """Return how often the channel names each set for each query; rows sum to one.

    `softness` shares the part of the good set among those that cover about as much; None gives it to the best.
    """
    odds = np.exp(epsilon)
    if softness is None:
        good = np.zeros_like(coverage)
        good[np.arange(len(good)), coverage.argmax(axis=1)] = 1
    else:
        good = np.exp(softness * (coverage - coverage.max(axis=1, keepdims=True)))
        good /= good.sum(axis=1, keepdims=True)
    return np.asarray((1 + (odds - 1) * good) / (odds + coverage.shape[1] - 1), dtype=np.float32)


def most_wanted(demand: NDArray[np.float32], set_size: int) -> Sets:
    """Return the sets of the items in greatest demand."""
    sets = np.zeros(demand.shape, dtype=np.float32)
    kept = np.argpartition(demand, -set_size, axis=1)[:, -set_size:]
    np.put_along_axis(sets, kept, 1, axis=1)
    return sets


def learn(demand: Demand, start: NDArray[np.int64], n_sets: int, set_size: int, epsilon: float) -> Sets:
    """Alternate between good sets (at first `start`) and demand, first softly and then until nothing is gained."""
    first = np.zeros((len(start), n_sets), dtype=np.float32)
    first[np.arange(len(start)), start] = 1
    sets = most_wanted((demand.wanted_by @ naming(first, epsilon)).T, set_size)
    for softness in _SOFTNESS:
        named = naming(demand.wanted @ sets.T, epsilon, softness)
        sets = most_wanted((demand.wanted_by @ named).T, set_size)
    best, best_sets = -1.0, sets
    for _ in range(_MOST_PASSES):
        coverage = demand.wanted @ sets.T
        named = naming(coverage, epsilon)
        reached = float(np.einsum("ij,ij->", named, coverage, dtype=np.float64)) / len(start)
        if reached <= best + 1e-5:
            break
        best, best_sets = reached, sets
        sets = most_wanted((demand.wanted_by @ named).T, set_size)
    return best_sets


def recall(sets: Sets, demand: Demand, epsilon: float) -> float:
    """Return the expected NN-recall@8 of queries, whose good sets are chosen as a client would."""
    named = naming(demand.chosen_by @ sets.T, epsilon)
    return float(np.einsum("ij,ij->", named, demand.top @ sets.T, dtype=np.float64)) / len(named)


def clustering(features: Rows, n_sets: int, seed: int) -> NDArray[np.int64]:
    """Return the nearest of `n_sets` k-means centroids of each row."""
    centroids = centres(features, n_sets, seed)
    index = faiss.IndexFlatL2(features.shape[1])
    index.add(centroids)
    return np.asarray(index.search(features, 1)[1][:, 0], dtype=np.int64)


def centres(features: Rows, count: int, seed: int, passes: int = 15) -> Rows:
    """Return k-means centroids of (at most 256 times as many) rows."""
    means = faiss.Kmeans(
        features.shape[1], count, niter=passes, seed=seed, min_points_per_centroid=1, max_points_per_centroid=256
    )
    means.train(features)
    return np.asarray(means.centroids)


def best_number(features: Rows, lists: Lists, set_size: int, epsilon: float) -> int:
    """Return the number of sets with the best recall on a fifth of the queries that was held out.

    It is near ``2 + 0.11 exp(epsilon / 2) / f``, f the part of the items in a set: the search starts there and climbs.
    """
    n = len(features)
    held_out = np.zeros(n, dtype=bool)
    held_out[np.random.default_rng(_SEED).permutation(n)[: max(1, n // 5)]] = True
    taught, tested = Demand.of(lists[~held_out], n), Demand.of(lists[held_out], n)
    most = min(_MOST_SETS, n)
    tried: dict[int, float] = {}

    def score(n_sets: int) -> float:
        if n_sets not in tried:
            runs = [
                recall(
                    learn(taught, clustering(features, n_sets, seed)[~held_out], n_sets, set_size, epsilon),
                    tested,
                    epsilon,
                )
                for seed in range(2)
            ]
            tried[n_sets] = float(np.mean(runs))
        return tried[n_sets]

    best = usual_number(n, set_size, epsilon, most)
    while True:
        larger = min(max(best + 1, round(best * _GROWTH)), most)
        smaller = max(min(best - 1, round(best / _GROWTH)), 2)
        better = max((best, larger, smaller), key=score)
        if better == best:
            return best
        best = better


def usual_number(n_items: int, set_size: int, epsilon: float, most: int) -> int:
    """Return about how many sets are best, at most `most`."""
    return int(min(max(2, round(2 + 0.11 * np.exp(epsilon / 2) * n_items / set_size)), most))


def learn_sets(features: Rows, set_size: int, epsilon: float, n_sets: int | None) -> scipy.sparse.csr_array:
    """Return the best sets found; their number, where it is not given, is chosen on held-out items."""
    small = features if features.shape[1] <= _DIMENSIONS else features @ projection(features, _DIMENSIONS)
    if len(features) > _EXACT:
        return _large_sets(small, set_size, epsilon, n_sets).astype(np.uint8)
    lists = neighbor_lists(features)
    count = best_number(small, lists, set_size, epsilon) if n_sets is None else n_sets
    demand = Demand.of(lists, len(features))
    found = (learn(demand, clustering(small, count, seed), count, set_size, epsilon) for seed in range(_RESTARTS))
    return scipy.sparse.csr_array(max(found, key=lambda sets: recall(sets, demand, epsilon)).astype(np.uint8))


def _large_sets(features: Rows, set_size: int, epsilon: float, n_sets: int | None) -> scipy.sparse.csr_array:
    """Return sets of a gallery of more than 20,000 items."""
    n = len(features)
    if n_sets is None:
        few = _some(features, _EXACT)
        few_size = set_size * len(few) // n
        if few_size >= 2 * RANKS:
            n_sets = best_number(few, neighbor_lists(few), few_size, epsilon)
        else:  # among few items, neighbours that count would not fit into a set
            n_sets = usual_number(n, set_size, epsilon, _MOST_OF_LARGE)
    wanted = _weighted(neighbor_lists(features), n, np.exp(-np.arange(RANKS) / DECAY))
    return learn_large(wanted, clustering(features, n_sets, _SEED), n_sets, set_size, epsilon)


def projection(features: Rows, dimensions: int) -> Rows:
    """Return the leading directions of features around their origin, shape (d, r)."""
    n, d = features.shape
    kept = min(d, dimensions)
    if min(n, d) > _WHOLE:  # the few leading directions are all that is needed
        _, _, rows = randomized_svd(_some(features, _EXACT), kept, random_state=_SEED)
        return np.ascontiguousarray(rows.T)
    if n >= d:
        _, vectors = np.linalg.eigh(features.T @ features)
        return np.ascontiguousarray(vectors[:, ::-1][:, :kept])
    _, _, rows = np.linalg.svd(features, full_matrices=False)
    return np.ascontiguousarray(rows[:kept].T)


def _some(features: Rows, count: int) -> Rows:
    """Return a fixed random choice of rows."""
    if len(features) <= count:
        return features
    return features[np.sort(np.random.default_rng(_SEED).choice(len(features), count, replace=False))]


_PASSES = 12
_GAIN = 1.002  # a pass that gains less is the last
_AT_ONCE = 50_000  # queries


def learn_large(
    wanted: scipy.sparse.csr_array, start: NDArray[np.int64], n_sets: int, set_size: int, epsilon: float
) -> scipy.sparse.csr_array:
    """Alternate between good sets and demand until hardly anything is gained; rows of `wanted` sum to one."""
    odds = float(np.exp(epsilon))
    popular = np.asarray(wanted.sum(axis=0), dtype=np.float32).ravel()
    good, best = start, 0.0
    found = None
    for _ in range(_PASSES):
        sets = _most_wanted(_wanted_by_sets(wanted, good, n_sets), popular, set_size, odds - 1)
        good, by_good, by_all = _good_sets(wanted, sets)
        reached = (by_all + (odds - 1) * by_good) / (odds + n_sets - 1)
        if found is not None and reached <= best * _GAIN:
            break
        best, found = reached, sets
    return found


def _wanted_by_sets(wanted: scipy.sparse.csr_array, good: NDArray[np.int64], n_sets: int) -> scipy.sparse.csr_array:
    """Return how much the queries of each good set want each item, shape (n_sets, n_items)."""
    count = len(good)
    ones = np.ones(count, dtype=np.float32)
    whose = scipy.sparse.csr_array((ones, (good, np.arange(count))), shape=(n_sets, count))
    return (whose @ wanted).tocsr()


def _most_wanted(
    demand: scipy.sparse.csr_array, popular: NDArray[np.float32], set_size: int, weight: float
) -> scipy.sparse.csr_array:
    """Return the items of each set: those with the largest popularity plus weighted demand."""
    hubs = np.argpartition(popular, -set_size)[-set_size:]  # whatever is not wanted by a set's own queries
    kept = []
    for start, end in zip(demand.indptr[:-1], demand.indptr[1:], strict=True):
        own = demand.indices[start:end]
        items = np.union1d(own, hubs)
        value = popular[items]
        value[np.searchsorted(items, own)] += weight * demand.data[start:end]
        kept.append(np.sort(items[np.argpartition(value, -set_size)[-set_size:]]))
    chosen = np.concatenate(kept)
    starts = np.arange(0, len(chosen) + 1, set_size)
    return scipy.sparse.csr_array((np.ones(len(chosen), np.float32), chosen, starts), shape=demand.shape)


def _good_sets(wanted: scipy.sparse.csr_array, sets: scipy.sparse.csr_array) -> tuple[NDArray[np.int64], float, float]:
    """Return each query's good set, and the mean coverage by it and by all sets together."""
    holders = sets.T.tocsr()
    good = np.zeros(wanted.shape[0], dtype=np.int64)
    by_good = by_all = 0.0
    for start in range(0, len(good), _AT_ONCE):
        coverage = (wanted[start : start + _AT_ONCE] @ holders).tocsr()
        filled = np.flatnonzero(np.diff(coverage.indptr))
        largest = np.zeros(coverage.shape[0], dtype=np.float32)
        largest[filled] = np.maximum.reduceat(coverage.data, coverage.indptr[filled]) if len(filled) else 0
        rows = np.repeat(np.arange(coverage.shape[0]), np.diff(coverage.indptr))
        top = np.flatnonzero(coverage.data == largest[rows])
        # Written backwards: of sets that cover as much, the first that is stored stays.
        good[start + rows[top][::-1]] = coverage.indices[top][::-1]
        by_good += float(largest.sum(dtype=np.float64))
        by_all += float(coverage.data.sum(dtype=np.float64))
    return good, by_good / len(good), by_all / len(good)
