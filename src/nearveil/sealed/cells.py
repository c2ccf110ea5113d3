"""Cells of a gallery, and their colours.

A question probes one cell of every colour: the cell with the nearest centroid. So an item may be stored in any cell
that is the nearest one of its colour. It is stored in the cell with the largest margin, which is the distance to the
border with the next cell of the same colour: a question that is closer to the item than this margin probes the item's
cell. No cell has more items than slots.
"""

from dataclasses import dataclass

import faiss
import numpy as np
from numpy.typing import NDArray

Singles = NDArray[np.float32]
Vectors = NDArray[np.float32] | NDArray[np.int8]
Whole = NDArray[np.int64]

_SEED = 20260901  # of k-means and of ties: the result is public, and should be the same each time
_SAMPLE = 40  # training rows of k-means for each cell, at least
_MOVED = 200, 1 << 18  # rows that move the centroids: for each cell, and in total
_PASSES = 8  # of k-means, and of moving cells
_CHOICES = 8, 32  # candidate cells of an item, largest margin first; more if colours have few cells
_FEW = 16  # cells of a colour
_MARGIN_BLOCK = 1 << 22  # margins in memory at a time
_APART = 1e-6  # of the longest square: 32 bits cannot distinguish cells at a smaller squared distance
_DISTANCE_BLOCK = 1 << 18  # distances in memory at a time: they fit in a core's cache
_ROUNDS = 60
_STEP = 0.5, 0.95, 0.05  # of prices: the first, its factor in each round, and the least
_NEAR = 48  # near cells that should have other colours
_SWAPS = 20
_TRIED = 1024  # cells with which a cell may swap colours, in one pass


@dataclass(frozen=True, eq=False)
class CellPartition:
    """The cells of items. Cell ``c`` has colour ``c // (n_cells / n_colours)``; `centroids` has shape (n_cells, d)."""

    centroids: Singles
    cells: Whole
    n_colours: int


def make_cells(vectors: Vectors, n_cells: int, n_colours: int, n_slots: int) -> CellPartition:
    """Partition vectors, shape (n, d), into `n_cells` cells of at most `n_slots`; `n_colours` divides `n_cells`."""
    centroids = _find_centroids(_spread(vectors, _SAMPLE * n_cells), n_cells)
    centroids = np.ascontiguousarray(centroids[np.argsort(_colour(centroids, n_colours), kind="stable")])
    each, most = _MOVED
    sample = _spread(vectors, max(_SAMPLE * n_cells, min(each * n_cells, most)))
    prices = np.zeros(n_cells, np.float32)
    for _ in range(_PASSES):
        near, margins = _choose_largest_margins(sample, centroids, n_colours)
        cells = _balance(near, margins, prices, -(-n_slots * len(sample) // len(vectors)))
        centroids = _find_means(sample, cells, centroids)
    near, margins = _choose_largest_margins(vectors, centroids, n_colours)
    cells = _balance(near, margins, prices, n_slots)
    _move_overflow(vectors, cells, centroids, n_colours, n_slots)
    return CellPartition(centroids, cells, n_colours)


def find_margins(vectors: Singles, centroids: Singles, n_colours: int) -> tuple[NDArray[np.int32], Singles]:
    """Return the nearest cell and its margin for every vector and colour, both of shape (n, n_colours)."""
    by_colour = centroids.reshape(n_colours, -1, centroids.shape[1])
    lengths = np.square(by_colour).sum(axis=2)
    apart = lengths[:, :, None] + lengths[:, None] - 2 * by_colour @ by_colour.transpose(0, 2, 1)
    least_apart = np.float32(_APART) * lengths.max()  # closer cells count as one: no item has a margin in either
    scales = np.where(apart > least_apart, 0.5 / np.sqrt(np.maximum(apart, least_apart) + np.float32(1e-30)), 0)
    near, margins = np.empty((len(vectors), n_colours), np.int32), np.empty((len(vectors), n_colours), np.float32)
    colours, factors = np.arange(n_colours), np.ascontiguousarray(-2 * centroids.T)
    step = max(64, _DISTANCE_BLOCK // len(centroids))
    for start in range(0, len(vectors), step):
        block = vectors[start : start + step]
        squares = (block @ factors).reshape(-1, *lengths.shape)  # of distances, less those of the vectors
        squares += lengths
        nearest = squares.argmin(axis=2)
        least = np.take_along_axis(squares, nearest[:, :, None], axis=2)
        if by_colour.shape[1] > 1:
            squares -= least
            squares *= scales[colours, nearest]
            np.put_along_axis(squares, nearest[:, :, None], np.inf, axis=2)
        # A single cell has no border.
        margins[start : start + step] = squares.min(axis=2) if by_colour.shape[1] > 1 else -least[:, :, 0]
        near[start : start + step] = nearest + colours * by_colour.shape[1]
    return near, margins


def _spread(vectors: Vectors, count: int) -> Singles:
    """Return evenly spaced vectors."""
    return vectors[np.linspace(0, len(vectors) - 1, min(len(vectors), count)).astype(np.int64)].astype(np.float32)


def _find_centroids(sample: Singles, n_cells: int) -> Singles:
    limits = {"min_points_per_centroid": 1, "max_points_per_centroid": _SAMPLE}
    means = faiss.Kmeans(sample.shape[1], n_cells, niter=_PASSES, seed=_SEED, **limits)
    # faiss needs at least one row for each centroid: repeat rows if there are fewer.
    means.train(sample if len(sample) >= n_cells else np.resize(sample, (n_cells, sample.shape[1])))
    return np.asarray(means.centroids, dtype=np.float32).reshape(n_cells, -1)


def _choose_largest_margins(vectors: Vectors, centroids: Singles, n_colours: int) -> tuple[NDArray[np.int32], Singles]:
    """Return the cells in which each vector has the largest margins, largest first, and these margins."""
    choices = _CHOICES[len(centroids) <= _FEW * n_colours]  # large cells are the best of many items, and fill up
    shape = len(vectors), min(choices, n_colours)
    near, margins = np.empty(shape, np.int32), np.empty(shape, np.float32)
    step = max(1, _MARGIN_BLOCK // n_colours)
    for start in range(0, len(vectors), step):
        block = slice(start, start + step)
        cells, block_margins = find_margins(vectors[block].astype(np.float32), centroids, n_colours)
        order = np.argsort(-block_margins, axis=1, kind="stable")[:, : shape[1]]
        near[block] = np.take_along_axis(cells, order, 1)
        margins[block] = np.take_along_axis(block_margins, order, 1)
    return near, margins


def _balance(near: NDArray[np.int32], margins: Singles, prices: Singles, n_slots: int) -> Whole:
    """Assign items to the cell with the largest margin less price; overfull cells raise their prices, in place."""
    unit = float(np.median(margins[:, 0] - margins[:, -1])) + 1e-12
    step, slower, least = _STEP
    for _ in range(_ROUNDS):
        chosen = (margins - prices[near]).argmax(axis=1)
        cells = np.take_along_axis(near, chosen[:, None], axis=1)[:, 0].astype(np.int64)
        counts = np.bincount(cells, minlength=len(prices))
        if counts.max() <= n_slots:
            break
        prices += (step * unit * np.clip(counts / n_slots - 1, -0.2, 1)).astype(np.float32)
        np.maximum(prices, 0, out=prices)
        step = max(least, slower * step)
    return cells


def _move_overflow(vectors: Vectors, cells: Whole, centroids: Singles, n_colours: int, n_slots: int) -> None:
    """Move items of overfull cells, in place, to the cell with the largest margin that has free slots."""
    counts = np.bincount(cells, minlength=len(centroids))
    for cell in np.flatnonzero(counts > n_slots):
        items = np.flatnonzero(cells == cell)[n_slots:]
        near, margins = find_margins(vectors[items].astype(np.float32), centroids, n_colours)
        for item, ranked in zip(items, np.take_along_axis(near, np.argsort(-margins, axis=1), axis=1), strict=True):
            free = ranked[counts[ranked] < n_slots]
            cells[item] = free[0] if len(free) else np.argmin(counts)
            counts[cells[item]] += 1
        counts[cell] = n_slots


def _find_means(vectors: Singles, cells: Whole, centroids: Singles) -> Singles:
    """Return the mean of the items of each cell, or the old centroid if it has none."""
    counts = np.bincount(cells, minlength=len(centroids))
    sums = np.stack([np.bincount(cells, column, minlength=len(centroids)) for column in vectors.T], axis=1)
    means = np.divide(sums, counts[:, None], out=centroids.astype(np.float64), where=counts[:, None] > 0)
    return np.asarray(means, dtype=np.float32)


def _colour(centroids: Singles, n_colours: int) -> Whole:
    """Return a colour for each cell: all colours equally often, and rarely the same for near cells."""
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
    free = np.full(n_colours, n_cells // n_colours)
    for cell in rng.permutation(n_cells):
        colour = int(np.argmin(np.where(free > 0, clash[cell], np.inf)))
        colours[cell], free[colour] = colour, free[colour] - 1
        clash[:, colour] += weights[cell]
    for _ in range(_SWAPS):
        if not _swap(colours, clash, weights, rng):
            break
    return colours


def _swap(colours: Whole, clash: Singles, weights: Singles, rng: np.random.Generator) -> int:
    """Swap the colours of each cell and the cell with the largest gain; return the number of swaps."""
    changed = 0
    tried = rng.permutation(len(colours))[:_TRIED]
    for cell in rng.permutation(len(colours)):
        colour, other_colours = colours[cell], colours[tried]
        gain = clash[cell, colour] - clash[cell, other_colours] + clash[tried, other_colours] - clash[tried, colour]
        gain[other_colours == colour] = 0
        # Neighbours would be counted in each other's old colour: they do not swap.
        gain[weights[cell, tried] > 0] = 0
        best = int(np.argmax(gain))
        if gain[best] <= 1e-4:
            continue
        other = int(tried[best])
        other_colour = colours[other]
        shift = weights[other] - weights[cell]
        clash[:, colour] += shift
        clash[:, other_colour] -= shift
        colours[cell], colours[other] = other_colour, colour
        changed += 1
    return changed
