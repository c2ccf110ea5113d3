"""Nearest prototypes and the best set by work that depends on sizes alone.

A hostile server may craft a map so that a search by heaps, sorting or early exits is fast for some rows and slow for
others. Here every row of every map of one size takes the same operations on the same addresses: dense products of
whole numbers, compare-exchange networks, counting. No number is subnormal, so none takes a slow path
(``docs/theory/covers.md``; attacked by ``tests/release/test_oblivious.py``).
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Singles = NDArray[np.float32]
Keys = NDArray[np.int32]

NEIGHBORS = 24  # prototypes that have a say
DECAY = 8.0  # of their weights, in ranks
MOST_NEIGHBORS = 32  # what the network keeps: a power of two
_LENGTH = 4000.0  # of a direction: products of two are below 2^24, so exact in 32-bit floats in any order of summing
_FINE = 2.0**20  # steps of a unit in numbers of 64 bits
_INDEX_BITS = 13
_LAST = (1 << _INDEX_BITS) - 1
_DROPPED_BITS = 6  # of a similarity: 32 bits hold the rest and the index
_LOWEST = np.iinfo(np.int32).min
# Weights sum up to 2^15.02; times a coverage of 255 that is below 2^24.
_WEIGHTS = np.append(np.rint(4096 * np.exp(-np.arange(NEIGHBORS) / DECAY)), 0).astype(np.float32)
_MOST_SETS = 4096
_BLOCK = 1 << 22  # coverages that are floats at once


def whole(values: Floats, steps: float = _FINE) -> Floats:
    """Return values in whole steps, as floats that are whole numbers."""
    return np.rint(values * steps)


def directions(rows: Floats) -> Singles:
    """Return rows scaled to one length and rounded to whole numbers; rows of zeros stay zeros.

    `rows`: With r up to 64.
    Returns: Whole numbers. Each operation is exact or correctly rounded, so they are the same on every machine.
    """
    largest = np.maximum(np.abs(rows).max(axis=1, keepdims=True), 1.0)
    scaled = np.rint(rows * _FINE / largest)
    norms = np.sqrt((scaled * scaled).sum(axis=1, keepdims=True))  # the sum is below 2^53, so exact
    return np.asarray(np.rint(scaled * _LENGTH / np.maximum(norms, 1.0)), dtype=np.float32)


def similarity_keys(queries: Singles, prototypes: Singles) -> Keys:
    """Return a number for each query and prototype: the larger, the nearer; of equally near ones the first is larger.

    `prototypes`: Both of :func:`directions`; m up to 8192.
    Returns: No two of a row are equal.
    """
    similarities = (queries @ prototypes.T).astype(np.int32)
    similarities >>= _DROPPED_BITS
    similarities <<= _INDEX_BITS
    similarities += _LAST - np.arange(len(prototypes), dtype=np.int32)
    return similarities


def largest_keys(keys: Keys) -> Keys:
    """Return the 32 largest keys of each row, largest first, by a network of comparisons that is fixed by the shape.

    Lists are merged in pairs (Batcher's bitonic merge) until one is left; of lists that are longer than 32 the upper
    half is kept.

    Returns: The lowest number of 32 bits stands where there are fewer.
    """
    n, m = keys.shape
    lists = np.full((1, max(MOST_NEIGHBORS, 1 << (m - 1).bit_length()), n), _LOWEST, dtype=np.int32)
    lists[0, :m] = keys.T
    while lists.shape[1] > 1:
        length, count = len(lists), lists.shape[1] // 2
        first, second = lists[:, :count], lists[::-1, count:]
        lists = np.maximum(first, second)[None] if length == MOST_NEIGHBORS else _exchanged(first, second)
        while length > 1:
            length //= 2
            blocks = lists.reshape(-1, 2, length, count, n)
            lists = _exchanged(blocks[:, 0], blocks[:, 1]).swapaxes(0, 1)
        lists = lists.reshape(-1, count, n)
    return lists[:, 0].T


def _exchanged(first: Keys, second: Keys) -> Keys:
    out = np.empty((2, *first.shape), dtype=np.int32)
    np.maximum(first, second, out=out[0])
    np.minimum(first, second, out=out[1])
    return out


def prototype_of(keys: Keys) -> NDArray[np.int64]:
    """Return which prototypes keys belong to."""
    return (_LAST - (keys & _LAST)).astype(np.int64)


def most_covered(keys: Keys, coverage: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return the set that covers most around each query: its nearest prototypes are weighted by their ranks.

    `keys`: Of :func:`similarity_keys`.
    Returns: The first of sets that cover as much.
    """
    weights = _rank_weights(keys)
    m, n_sets = coverage.shape
    total = np.zeros((len(keys), n_sets), dtype=np.float32)
    step = max(1, _BLOCK // n_sets)
    for start in range(0, m, step):
        some = slice(start, start + step)
        total += weights[:, some] @ coverage[some].astype(np.float32)
    ranked = total.astype(np.int64) * _MOST_SETS + np.arange(_MOST_SETS - 1, _MOST_SETS - 1 - n_sets, -1)
    best: NDArray[np.int64] = ranked.max(axis=1)
    return _MOST_SETS - 1 - best % _MOST_SETS


def _rank_weights(keys: Keys) -> Singles:
    """Return the weight of each prototype for each query, shape (n, m); zero for all but the nearest."""
    top = largest_keys(keys)[:, :NEIGHBORS]
    ranks = np.zeros(keys.shape, dtype=np.uint8)
    for place in range(NEIGHBORS):
        ranks += keys < top[:, place, None]
    # A table of two cache lines, of which every query takes each weight once.
    return _WEIGHTS.take(ranks)
