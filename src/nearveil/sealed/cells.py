"""Cells of a gallery, and their colours.

A question looks into one cell of every colour: the one whose centroid is nearest. So an item may lie in any of the
cells that are nearest to it among those of their colour. It lies where it is deepest: where the border to the next
cell of the same colour is farthest away, since a question that is nearer to the item than that border is always asked
in the item's cell. No cell may have more items than slots.
"""

from dataclasses import dataclass

import faiss
import numpy as np
from numpy.typing import NDArray

Singles = NDArray[np.float32]
Vectors = NDArray[np.float32] | NDArray[np.int8]
Whole = NDArray[np.int64]

_SEED = 20260901  # of k-means and of ties: the result is public, and should be the same each time
_SAMPLE = 40  # rows a cell that k-means learns from, at least
_MOVED = 200, 1 << 18  # rows a cell that cells are moved by, and in all
_PASSES = 8  # of k-means, and of moving cells
_CHOICES = 8  # cells that an item may go to, deepest first
_AT_ONCE = 1 << 22  # depths that are held at a time
_APART = 1e-6  # of the longest square: cells whose squared distance is less cannot be told apart in 32 bits
_CACHED = 1 << 18  # distances that are held at a time: they stay in a core's cache
_ROUNDS = 60
_STEP = 0.5, 0.95, 0.05  # how fast prices move at first, how much slower in each round, and at least
_NEAR = 48  # cells whose colours should differ from a cell's own
_SWAPS = 20
_TRIED = 1024  # cells that a cell may change places with, in one pass


@dataclass(frozen=True, eq=False)
class CellPartition:
    """The cells of items. Cell ``c`` has colour ``c // (n_cells / n_colours)``; `centroids` has shape (n_cells, d)."""

    centroids: Singles
    cells: Whole
    n_colours: int


def make_cells(vectors: Vectors, n_cells: int, n_colours: int, n_slots: int) -> CellPartition:
    """Part vectors, shape (n, d), into coloured cells of at most `n_slots`; `n_cells` is a multiple of `n_colours`."""
    centroids = _find_centroids(_spread(vectors, _SAMPLE * n_cells), n_cells)
    centroids = np.ascontiguousarray(centroids[np.argsort(_colour(centroids, n_colours), kind="stable")])
    each, most = _MOVED
    sample = _spread(vectors, max(_SAMPLE * n_cells, min(each * n_cells, most)))
    prices = np.zeros(n_cells, np.float32)
    for _ in range(_PASSES):
        near, depths = _choose_deepest(sample, centroids, n_colours)
        cells = _balance(near, depths, prices, -(-n_slots * len(sample) // len(vectors)))
        centroids = _find_means(sample, cells, centroids)
    near, depths = _choose_deepest(vectors, centroids, n_colours)
    cells = _balance(near, depths, prices, n_slots)
    return CellPartition(centroids, _move_overflow(near, cells, n_cells, n_slots), n_colours)


def find_depths(vectors: Singles, centroids: Singles, n_colours: int) -> tuple[NDArray[np.int32], Singles]:
    """Return, for every vector and colour, the nearest cell and how far its border is, both of shape (n, n_colours)."""
    own = centroids.reshape(n_colours, -1, centroids.shape[1])
    lengths = np.square(own).sum(axis=2)
    apart = lengths[:, :, None] + lengths[:, None] - 2 * own @ own.transpose(0, 2, 1)
    least_apart = np.float32(_APART) * lengths.max()  # nearer cells are one: nothing is deep in either
    scales = np.where(apart > least_apart, 0.5 / np.sqrt(np.maximum(apart, least_apart) + np.float32(1e-30)), 0)
    near, depths = np.empty((len(vectors), n_colours), np.int32), np.empty((len(vectors), n_colours), np.float32)
    colours, factors = np.arange(n_colours), np.ascontiguousarray(-2 * centroids.T)
    step = max(64, _CACHED // len(centroids))
    for start in range(0, len(vectors), step):
        some = vectors[start : start + step]
        squares = (some @ factors).reshape(-1, *lengths.shape)  # of distances, less those of the vectors
        squares += lengths
        nearest = squares.argmin(axis=2)
        least = np.take_along_axis(squares, nearest[:, :, None], axis=2)
        if own.shape[1] > 1:
            squares -= least
            squares *= scales[colours, nearest]
            np.put_along_axis(squares, nearest[:, :, None], np.inf, axis=2)
        found = squares.min(axis=2) if own.shape[1] > 1 else -least[:, :, 0]  # a cell alone has no border
        near[start : start + step], depths[start : start + step] = nearest + colours * own.shape[1], found
    return near, depths


def _spread(vectors: Vectors, count: int) -> Singles:
    """Return some of the vectors, from the first to the last."""
    return vectors[np.linspace(0, len(vectors) - 1, min(len(vectors), count)).astype(np.int64)].astype(np.float32)


def _find_centroids(sample: Singles, n_cells: int) -> Singles:
    means = faiss.Kmeans(
        sample.shape[1],
        n_cells,
        niter=_PASSES,
        seed=_SEED,
        min_points_per_centroid=1,
        max_points_per_centroid=_SAMPLE,
    )
    # Too few rows are repeated: faiss wants as many as there are centroids.
    means.train(sample if len(sample) >= n_cells else np.resize(sample, (n_cells, sample.shape[1])))
    return np.asarray(means.centroids, dtype=np.float32).reshape(n_cells, -1)


def _choose_deepest(vectors: Vectors, centroids: Singles, n_colours: int) -> tuple[NDArray[np.int32], Singles]:
    """Return the cells where each vector is deepest, the deepest first, and how deep it is there."""
    shape = len(vectors), min(_CHOICES, n_colours)
    near, depths = np.empty(shape, np.int32), np.empty(shape, np.float32)
    step = max(1, _AT_ONCE // n_colours)
    for start in range(0, len(vectors), step):
        some = slice(start, start + step)
        cells, found = find_depths(vectors[some].astype(np.float32), centroids, n_colours)
        order = np.argsort(-found, axis=1, kind="stable")[:, : shape[1]]
        near[some], depths[some] = np.take_along_axis(cells, order, 1), np.take_along_axis(found, order, 1)
    return near, depths


def _balance(near: NDArray[np.int32], depths: Singles, prices: Singles, n_slots: int) -> Whole:
    """Give every item one of its cells, the deepest that it can afford; a few cells may stay too full.

    Cells that are too full raise their price, in place, until items go elsewhere.
    """
    unit = float(np.median(depths[:, 0] - depths[:, -1])) + 1e-12
    step, slower, least = _STEP
    for _ in range(_ROUNDS):
        chosen = (depths - prices[near]).argmax(axis=1)
        cells = np.take_along_axis(near, chosen[:, None], axis=1)[:, 0].astype(np.int64)
        counts = np.bincount(cells, minlength=len(prices))
        if counts.max() <= n_slots:
            break
        prices += (step * unit * np.clip(counts / n_slots - 1, -0.2, 1)).astype(np.float32)
        np.maximum(prices, 0, out=prices)
        step = max(least, slower * step)
    return cells


def _move_overflow(near: NDArray[np.int32], cells: Whole, n_cells: int, n_slots: int) -> Whole:
    """Move items of cells that are too full to the deepest of theirs that has room, or to the emptiest cell."""
    counts = np.bincount(cells, minlength=n_cells)
    for cell in np.flatnonzero(counts > n_slots):
        for item in np.flatnonzero(cells == cell)[n_slots:]:
            room = near[item][counts[near[item]] < n_slots]
            cells[item] = room[0] if len(room) else np.argmin(counts)
            counts[cell], counts[cells[item]] = counts[cell] - 1, counts[cells[item]] + 1
    return cells


def _find_means(vectors: Singles, cells: Whole, centroids: Singles) -> Singles:
    """Return the mean of each cell's items; a cell without items keeps its centroid."""
    counts = np.bincount(cells, minlength=len(centroids))
    sums = np.stack([np.bincount(cells, column, minlength=len(centroids)) for column in vectors.T], axis=1)
    means = np.divide(sums, counts[:, None], out=centroids.astype(np.float64), where=counts[:, None] > 0)
    return np.asarray(means, dtype=np.float32)


def _colour(centroids: Singles, n_colours: int) -> Whole:
    """Return a colour for each cell, all colours equally often, such that near cells rarely share one."""
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
