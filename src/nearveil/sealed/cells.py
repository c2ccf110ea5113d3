"""Balanced cells of a gallery, and their colours.

A question looks into one cell of every colour. So cells that are near each other should have different colours, and
no cell may have more items than slots.
"""

from dataclasses import dataclass

import faiss
import numpy as np
from numpy.typing import NDArray

Singles = NDArray[np.float32]
Vectors = NDArray[np.float32] | NDArray[np.int8]
Whole = NDArray[np.int64]

_SEED = 20260901  # of k-means and of ties: the result is public, and should be the same each time
_SAMPLE = 40  # rows a cell that k-means learns from
_PASSES = 8
_CHOICES = 8  # cells that an item may go to, nearest first
_AT_ONCE = 1 << 18  # rows that are compared with all cells at a time
_ROUNDS = 40
_STEP = 0.5  # how fast prices move
_NEAR = 48  # cells whose colours should differ from a cell's own
_SWAPS = 20
_TRIED = 1024  # cells that a cell may change places with, in one pass


@dataclass(frozen=True, eq=False)
class CellPartition:
    """Where items are: cell ``c`` has colour ``c // (n_cells / n_colours)``.

    `centroids`: Shape (n_cells, d): what a client compares its question with.
    `cells`: For each item, its cell.
    """

    centroids: Singles
    cells: Whole
    n_colours: int


def make_cells(vectors: Vectors, n_cells: int, n_colours: int, n_slots: int) -> CellPartition:
    """Part vectors, shape (n, d), into cells of at most `n_slots`, and give them colours.

    `n_cells` is a multiple of `n_colours`.
    """
    centroids = _find_centroids(vectors, n_cells)
    cells = _balance(vectors, centroids, n_slots)
    centroids = _find_means(vectors, cells, centroids)
    order = np.argsort(_colour(centroids, n_colours), kind="stable")
    rank = np.empty(n_cells, np.int64)
    rank[order] = np.arange(n_cells)
    return CellPartition(np.ascontiguousarray(centroids[order]), rank[cells], n_colours)


def _find_centroids(vectors: Vectors, n_cells: int) -> Singles:
    spread = np.linspace(0, len(vectors) - 1, min(len(vectors), _SAMPLE * n_cells)).astype(np.int64)
    sample = vectors[spread].astype(np.float32)
    means = faiss.Kmeans(
        vectors.shape[1],
        n_cells,
        niter=_PASSES,
        seed=_SEED,
        min_points_per_centroid=1,
        max_points_per_centroid=_SAMPLE,
    )
    # Too few rows are repeated: faiss wants as many as there are centroids.
    means.train(sample if len(sample) >= n_cells else np.resize(sample, (n_cells, sample.shape[1])))
    return np.asarray(means.centroids, dtype=np.float32).reshape(n_cells, -1)


def _balance(vectors: Vectors, centroids: Singles, n_slots: int) -> Whole:
    """Give every item a cell near it, such that no cell has more than `n_slots`.

    Cells that are too full raise their price until items go elsewhere; what is left over goes to the nearest cell
    that has room.
    """
    n_cells = len(centroids)
    search = faiss.IndexFlatL2(centroids.shape[1])
    search.add(centroids)
    shape = len(vectors), min(_CHOICES, n_cells)
    distances, near = np.empty(shape, np.float32), np.empty(shape, np.int32)
    for start in range(0, len(vectors), _AT_ONCE):
        some = slice(start, start + _AT_ONCE)
        distances[some], near[some] = search.search(vectors[some].astype(np.float32), shape[1])
    unit = float(np.median(distances[:, -1] - distances[:, 0])) + 1e-12
    prices = np.zeros(n_cells, np.float32)
    for _ in range(_ROUNDS):
        chosen = (distances + prices[near]).argmin(axis=1)
        counts = np.bincount(np.take_along_axis(near, chosen[:, None], axis=1)[:, 0], minlength=n_cells)
        if counts.max() <= n_slots:
            break
        prices += (_STEP * unit * np.clip(counts / n_slots - 1, -0.1, 1)).astype(np.float32)
        prices = np.maximum(prices, 0)
    cells = np.take_along_axis(near, chosen[:, None], axis=1)[:, 0].astype(np.int64)
    return _move_overflow(vectors, centroids, cells, n_slots)


def _move_overflow(vectors: Vectors, centroids: Singles, cells: Whole, n_slots: int) -> Whole:
    """Move the items that are farthest from a cell that is too full to the nearest with room."""
    counts = np.bincount(cells, minlength=len(centroids))
    moved = []
    for cell in np.flatnonzero(counts > n_slots):
        members = np.flatnonzero(cells == cell)
        far = np.sum((vectors[members] - centroids[cell]) ** 2, axis=1)
        moved.append(members[np.argsort(far)[n_slots:]])
        counts[cell] = n_slots
    for item in np.concatenate(moved) if moved else ():
        room = np.flatnonzero(counts < n_slots)
        cell = room[np.argmin(np.sum((centroids[room] - vectors[item]) ** 2, axis=1))]
        cells[item] = cell
        counts[cell] += 1
    return cells


def _find_means(vectors: Vectors, cells: Whole, centroids: Singles) -> Singles:
    """Return the mean of each cell's items; a cell without items keeps its centroid."""
    counts = np.bincount(cells, minlength=len(centroids))
    sums = np.stack([np.bincount(cells, column, minlength=len(centroids)) for column in vectors.T], axis=1)
    means = np.divide(sums, counts[:, None], out=centroids.astype(np.float64), where=counts[:, None] > 0)
    return np.asarray(means, dtype=np.float32)


def _colour(centroids: Singles, n_colours: int) -> Whole:
    """Return a colour for each cell, all colours equally often, such that near cells rarely share one.

    Greedy at first; then pairs of cells change places where that lessens the weight of neighbours of one colour.
    """
    n_cells = len(centroids)
    search = faiss.IndexFlatL2(centroids.shape[1])
    search.add(centroids)
    count = min(_NEAR + 1, n_cells)
    near = np.asarray(search.search(centroids, count)[1][:, 1:])
    weights = np.zeros((n_cells, n_cells), np.float32)
    np.put_along_axis(weights, near, np.exp(-np.arange(near.shape[1], dtype=np.float32) / n_colours)[None], axis=1)
    weights += weights.T
    rng = np.random.default_rng(_SEED)
    colours, clash = np.full(n_cells, -1), np.zeros((n_cells, n_colours), np.float32)
    room = np.full(n_colours, n_cells // n_colours)
    for cell in rng.permutation(n_cells):
        colour = int(np.argmin(np.where(room > 0, clash[cell], np.inf)))
        colours[cell], room[colour] = colour, room[colour] - 1
        clash[:, colour] += weights[cell]
    for _ in range(_SWAPS):
        if not _swap(colours, clash, weights, rng):
            break
    return colours


def _swap(colours: Whole, clash: Singles, weights: Singles, rng: np.random.Generator) -> int:
    """Let each cell change colours with the cell that gains most by it; return how many did."""
    changed = 0
    tried = rng.permutation(len(colours))[:_TRIED]
    for cell in rng.permutation(len(colours)):
        own, theirs = colours[cell], colours[tried]
        gain = clash[cell, own] - clash[cell, theirs] + clash[tried, theirs] - clash[tried, own]
        gain[theirs == own] = 0
        # Neighbours would be counted in each other's old colour: they do not change places.
        gain[weights[cell, tried] > 0] = 0
        best = int(np.argmax(gain))
        if gain[best] <= 1e-4:
            continue
        other = int(tried[best])
        taken = colours[other]
        shift = weights[other] - weights[cell]
        clash[:, own] += shift
        clash[:, taken] -= shift
        colours[cell], colours[other] = taken, own
        changed += 1
    return changed
