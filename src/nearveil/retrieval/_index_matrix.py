"""Features in memory: rows that grow while others read them, exact search, and approximate search by FAISS."""

from dataclasses import dataclass
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from nearveil.retrieval._index_items import Ids, Singles

Positions = NDArray[np.int64]
Found = tuple[Positions, Singles]

_GROWTH = 1.5
_MOST_DEAD = 256  # deleted rows that a search skips; with more of them the rows are packed
_CELLS = 2.0  # lists for the square root of the rows
_TRAINING = 40  # rows a list is learned from
_WIDER = 4  # candidates of short codes for each neighbour that is asked for, ranked again by full rows
_GOAL = 0.95  # recall at which lists are enough
_SAMPLE, _TOP = 200, 10  # rows that recall is measured on, and their neighbours
_OUTDATED = 0.2  # part of the rows that may have come since before lists are built anew
_BLOCK = 1 << 24  # numbers gathered at once


@dataclass(frozen=True, eq=False)
class View:
    """Rows as they are at one moment; rows that come later are written behind them."""

    ids: Ids  # rising
    rows: Singles
    dead: Positions  # positions of rows that were deleted
    packing: int  # positions mean the same in two views with the same number

    def __len__(self) -> int:
        return len(self.ids) - len(self.dead)

    def alive(self) -> tuple[Ids, Singles]:
        """Return ids and features of what was not deleted."""
        if not len(self.dead):
            return self.ids, self.rows
        return np.delete(self.ids, self.dead), np.delete(self.rows, self.dead, axis=0)

    def positions(self, ids: NDArray[np.int64]) -> Positions:
        """Return where ids are; -1 for those that are not held."""
        found = np.searchsorted(self.ids, ids)
        there = found < len(self.ids)
        there[there] = self.ids[found[there]] == ids[there]
        there &= ~np.isin(found, self.dead)
        return np.where(there, found, -1)

    def nearest(self, queries: Singles, k: int) -> Found:
        """Return positions and inner products of the k nearest, best first: exact."""
        found = exact(self.rows, queries, k + len(self.dead))
        return best(found, self.dead, k)


class Matrix:
    """The one who changes rows; readers hold views."""

    def __init__(self, dimension: int) -> None:
        self._ids, self._rows = np.empty(0, np.uint32), np.empty((0, dimension), np.float32)
        self.view = View(self._ids, self._rows, np.empty(0, np.int64), 0)

    def change(self, ids: Ids, rows: Singles, gone: NDArray[np.int64]) -> View:
        """Add rows of rising ids and take out others; return the view after it."""
        size = len(self.view.ids) + len(ids)
        if size > len(self._ids):
            self.reserve(max(size, int(_GROWTH * len(self._ids))))
        start = len(self.view.ids)
        self._ids[start:size], self._rows[start:size] = ids, rows
        grown = View(self._ids[:size], self._rows[:size], self.view.dead, self.view.packing)
        positions = grown.positions(gone)
        dead = np.union1d(grown.dead, positions[positions >= 0])
        self.view = View(grown.ids, grown.rows, dead, grown.packing)
        if len(dead) > _MOST_DEAD:
            self._pack()
        return self.view

    def reserve(self, room: int) -> None:
        """Move to a place for so many rows; views keep the old one."""
        ids, rows = self.view.ids, self.view.rows
        self._ids, self._rows = np.empty(room, np.uint32), np.empty((room, rows.shape[1]), np.float32)
        self._ids[: len(ids)], self._rows[: len(ids)] = ids, rows

    def _pack(self) -> None:
        self._ids, self._rows = self.view.alive()
        self.view = View(self._ids, self._rows, np.empty(0, np.int64), self.view.packing + 1)


def exact(rows: Singles, queries: Singles, k: int) -> Found:
    """Return positions and inner products of the k nearest rows; -1 where there are fewer."""
    if not len(rows):
        return np.full((len(queries), k), -1, np.int64), np.full((len(queries), k), -np.inf, np.float32)
    scores, positions = faiss.knn(queries, rows, k, metric=faiss.METRIC_INNER_PRODUCT)
    return positions, scores


def best(found: Found, dead: Positions, k: int) -> Found:
    """Return the k best that are alive, of equal scores the earliest; -1 where there are fewer."""
    positions, scores = found
    scores = np.where((positions < 0) | np.isin(positions, dead), -np.inf, scores)
    order = np.lexsort((positions, -scores), axis=1)[:, :k]
    scores = np.take_along_axis(scores, order, axis=1)
    return np.where(np.isneginf(scores), -1, np.take_along_axis(positions, order, axis=1)), scores


class Lists:
    """Approximate search: inverted lists of 8-bit rows, whose candidates are ranked again by full rows.

    Built from a view. Rows that came after it are searched exactly, rows that were deleted are skipped; what
    is left to do is to notice when lists are out of date.

    `recall`: The part of the true nearest 10 that is found, measured on 200 rows of the gallery.
    """

    def __init__(self, view: View) -> None:
        size, dimension = view.rows.shape
        n_lists = max(1, round(_CELLS * size**0.5))
        self._size, self._packing = size, view.packing
        self._lists = faiss.IndexIVFScalarQuantizer(
            faiss.IndexFlatIP(dimension), dimension, n_lists, faiss.ScalarQuantizer.QT_8bit,
            faiss.METRIC_INNER_PRODUCT, False,
        )  # fmt: skip
        self._lists.cp.min_points_per_centroid = 1
        spread = np.linspace(0, size - 1, min(size, _TRAINING * n_lists)).astype(np.intp)
        self._lists.train(view.rows[spread])
        self._lists.add(view.rows)
        self.recall = self._tune(view)

    def fits(self, view: View) -> bool:
        """Return whether not too much has changed since."""
        return view.packing == self._packing and len(view.ids) - self._size <= _OUTDATED * self._size

    def nearest(self, view: View, queries: Singles, k: int) -> Found:
        """Return positions and inner products of (nearly) the k nearest, best first."""
        count = min(self._size, _WIDER * k + len(view.dead))
        rough = self._lists.search(queries, count)[1]
        late, late_scores = exact(view.rows[self._size :], queries, k + len(view.dead))
        late = np.where(late < 0, -1, late + self._size)
        positions = np.concatenate([rough, late], axis=1)
        scores = np.concatenate([_products(view.rows, queries, rough), late_scores], axis=1)
        positions, scores = best((positions, scores), view.dead, k)
        short = positions[:, -1] < 0  # lists ran out: those queries are answered exactly
        if short.any():
            positions[short], scores[short] = view.nearest(queries[short], k)
        return positions, scores

    def _tune(self, view: View) -> float:
        """Look into more lists until recall is good; return it."""
        sample = np.unique(np.linspace(0, self._size - 1, _SAMPLE).astype(np.int64))
        queries, top = view.rows[sample], min(_TOP + 1, len(view))
        true = view.nearest(queries, top)[0]
        looked = 4
        while True:
            self._lists.nprobe = min(looked, self._lists.nlist)
            found = _overlap(true, self.nearest(view, queries, top)[0], sample)
            if found >= _GOAL or looked >= self._lists.nlist:
                return found
            looked *= 2


def _overlap(true: Positions, found: Positions, own: Positions) -> float:
    """Return the part of true neighbours that was found; a row is not its own neighbour."""
    wanted = true != own[:, None]
    hit = np.array([np.isin(one, other) for one, other in zip(true, found, strict=True)])
    return float((hit & wanted).sum() / max(1, wanted.sum()))


def _products(rows: Singles, queries: Singles, positions: Positions) -> Singles:
    """Return inner products of each query with its own candidates."""
    products = np.empty(positions.shape, np.float32)
    step = max(1, _BLOCK // max(1, positions.shape[1] * rows.shape[1]))
    for start in range(0, len(queries), step):
        some = slice(start, start + step)
        gathered: Any = rows[np.maximum(positions[some], 0)]
        products[some] = np.matmul(gathered, queries[some, :, None])[:, :, 0]
    return products
