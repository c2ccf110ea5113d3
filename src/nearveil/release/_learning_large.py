"""Sets of a large gallery: the same two steps as of a small one, on lists of neighbours alone.

How often the channel names a set for a query is one of two numbers, so the demand for an item is its popularity
plus what those want whose good set it is. Both are sparse: nothing here is as large as items times sets.
"""

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

_PASSES = 12
_GAIN = 1.002  # a pass that gains less is the last
_AT_ONCE = 50_000  # queries


def learn_large(
    wanted: scipy.sparse.csr_array, start: NDArray[np.int64], n_sets: int, set_size: int, epsilon: float
) -> scipy.sparse.csr_array:
    """Alternate between good sets and demand until hardly anything is gained.

    `wanted`: How much each query wants each item; rows sum to one.
    `start`: A first good set of each query.
    Returns: Ones.
    """
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
