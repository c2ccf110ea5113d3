"""The true neighbours of a query: one truth for what is found, for the ceiling and for the floor.

Items with equal features are copies. A query cannot want one of them rather than another, so what counts is how many
copies of each point an answer holds (``docs/theory/ceiling.md``, "Copies"; attack: ``tests/retrieval/test_truth.py``).
"""

import numpy as np
from numpy.typing import NDArray

from nearveil.retrieval._codes import Singles

Items = NDArray[np.intp]
_CELLS = 1 << 24  # of a matrix that is held at a time


class Copies:
    """Which items of a gallery are equal: their points, in the order in which the gallery shows them first.

    `point`: The point of each item.
    `first`: The first item of each point.
    `sizes`: How many items each point has.

    Examples
    --------
    >>> copies = Copies(np.array([[1, 0], [0, 1], [1, 0], [1, 0]], dtype=np.float32))
    >>> copies.point.tolist(), copies.sizes.tolist()
    ([0, 1, 0, 0], [3, 1])
    >>> copies.canonical(np.array([3, 2, 1])).tolist()  # two of the first point, one of the second
    [0, 2, 1]
    """

    def __init__(self, gallery: Singles) -> None:
        rows = np.ascontiguousarray(gallery) + gallery.dtype.type(0)  # minus zero is zero
        whole = rows.view(np.dtype((np.void, rows.dtype.itemsize * rows.shape[1]))).ravel()
        _, first, place = np.unique(whole, return_index=True, return_inverse=True)
        self.first: Items = np.sort(first)
        self.point: Items = np.argsort(np.argsort(first))[place]
        self.sizes: Items = np.bincount(self.point)
        self._order: Items = np.argsort(self.point, kind="stable")
        self._start: Items = np.cumsum(self.sizes) - self.sizes

    def canonical(self, items: NDArray[np.integer]) -> Items:
        """Return as many copies of each point as there are among some items, and always the first ones.

        `items`: Each at most once in a row.
        Returns: By point.
        """
        points, places = np.sort(self.point[items], axis=-1), np.arange(items.shape[-1])
        starts = np.ones(points.shape, dtype=bool)
        starts[..., 1:] = points[..., 1:] != points[..., :-1]
        turn = places - np.maximum.accumulate(np.where(starts, places, 0), axis=-1)
        return np.asarray(self._order[self._start[points] + turn])

    def recall(self, truth: Items, items: NDArray[np.integer]) -> NDArray[np.float64]:
        """Return the part of each query's true neighbours that an answer holds.

        `truth`: Of :func:`true_neighbors`.
        `items`: The answer to all queries, or to each.
        """
        held, found = self.canonical(items), np.empty(len(truth))
        if held.ndim == 1:
            return np.asarray(np.isin(np.arange(len(self.point)), held)[truth].mean(axis=1))
        for some in _blocks(len(truth), len(self.point)):
            inside = np.zeros((len(truth[some]), len(self.point)), dtype=bool)
            np.put_along_axis(inside, held[some], values=True, axis=1)
            found[some] = np.take_along_axis(inside, truth[some], axis=1).mean(axis=1)
        return found

    def _filled(self, near: Items, sizes: Items, k: int) -> Items:
        """Return the first k items of points that are given in an order, so many of each."""
        ends, places = np.cumsum(sizes, axis=1), np.arange(k)
        which = (ends[:, :, None] <= places).sum(axis=1)
        points, before = (np.take_along_axis(one, which, axis=1) for one in (near, ends - sizes))
        return np.asarray(self._order[self._start[points] + places - before])


def true_neighbors(queries: Singles, gallery: Singles, k: int, *, leave_out: bool = False) -> Items:
    """Return the k items of highest inner product with each query.

    Of copies the first ones are named. Between points that are equally near, the first in the gallery is taken; so
    every query has k true neighbours, no more and no fewer.

    `leave_out`: Whether query i is item i, which is then no neighbour of itself. Its copies are.
    Returns: Nearest first.
    """
    copies, found = Copies(gallery), np.empty((len(queries), k), np.intp)
    points = gallery[copies.first]
    for some in _blocks(len(queries), len(points)):
        scores = queries[some] @ points.T
        own = copies.point[some] if leave_out else np.full(len(scores), -1)
        alone = np.flatnonzero(leave_out & (copies.sizes[own] == 1))
        scores[alone, own[alone]] = -np.inf
        near = _highest(scores, min(k, len(points)))
        found[some] = copies._filled(near, copies.sizes[near] - (near == own[:, None]), k)
    return found


def popularity(gallery: Singles, k: int) -> NDArray[np.int64]:
    """Return how often each item is among the k nearest of another item of the gallery.

    `gallery`: Features of norm one.
    """
    return np.bincount(true_neighbors(gallery, gallery, k, leave_out=True).ravel(), minlength=len(gallery))


def _highest(scores: Singles, count: int) -> Items:
    """Return the places of the highest scores of each row, highest first, and of equal ones the first."""
    least = np.partition(scores, -count, axis=1)[:, -count, None]
    above, level = scores > least, scores == least
    room = count - above.sum(axis=1, keepdims=True)
    kept = above | (level & (np.cumsum(level, axis=1, dtype=np.int32) <= room))
    near = np.nonzero(kept)[1].reshape(len(scores), count)
    order = np.argsort(-np.take_along_axis(scores, near, axis=1), axis=1, kind="stable")
    return np.take_along_axis(near, order, axis=1)


def _blocks(rows: int, width: int) -> list[slice]:
    step = max(1, _CELLS // width)
    return [slice(start, start + step) for start in range(0, rows, step)]
