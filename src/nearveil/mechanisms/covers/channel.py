"""How a client names a set: randomised response, and a choice whose time tells nothing."""

from dataclasses import dataclass
from decimal import Context
from fractions import Fraction
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from nearveil.mechanisms.base import checked_number
from nearveil.privacy.noise import Source

_WORD = 1 << 64
_DECIMAL = Context(prec=60)
_LARGEST_EPSILON = 40.0  # e^40 words still fit between two thresholds of a 64-bit word
_LEAST_EPSILON = 1e-6  # below 1e-12 a rounded word would weigh more than epsilon

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class RandomizedResponse:
    """Name the good set with odds e^epsilon against each other set."""

    epsilon: float  # from 1e-6 to 40
    n_sets: int  # at least 2

    def __post_init__(self) -> None:
        checked_epsilon(self.epsilon)
        if not 2 <= self.n_sets < 1 << 20:
            raise ValueError("n_sets must be from 2 to a million")

    @cached_property
    def _miss(self) -> int:
        """Return how many words name one particular other set; rounded up, so that the odds of the good one fall."""
        return _WORD // (_exp(self.epsilon) + self.n_sets - 1) + 1

    @property
    def odds(self) -> Fraction:
        """Return the odds of the good set against one other, exactly; never above e^epsilon."""
        return Fraction(_WORD - (self.n_sets - 1) * self._miss, self._miss)

    @property
    def hit(self) -> float:
        """Return the probability of the good set."""
        return 1 - (self.n_sets - 1) * self._miss / _WORD

    def sample(self, good: Indices, source: Source) -> Indices:
        """Name one set for each row, whose `good` sets are given; one out of range would name itself, so is refused."""
        _check_good(good, self.n_sets)
        words = source.words(len(good))
        first = np.uint64(_WORD - (self.n_sets - 1) * self._miss)
        others = ((words - first) // np.uint64(self._miss)).astype(np.int64)  # wraps around where a word is a hit
        return np.where(words < first, good, others + (others >= good))


@dataclass(frozen=True)
class SubsetSelection:
    """Name `size` of the cells, the good one among them with odds that make every pair of subsets e^epsilon apart.

    Wang and others (2016), Ye and Barg (2018). With ``size=1`` it is randomised response.
    """

    epsilon: float  # from 1e-6 to 40
    n_sets: int
    size: int  # from 1 to ``n_sets - 1``

    def __post_init__(self) -> None:
        checked_epsilon(self.epsilon)
        if not 2 <= self.n_sets < 1 << 20:
            raise ValueError("n_sets must be from 2 to a million")
        if not 1 <= self.size < self.n_sets:
            raise ValueError("size must be from 1 to n_sets - 1")

    @cached_property
    def _threshold(self) -> int:
        """Return how many words mean that the good cell is in; rounded down."""
        weight = self.size * _exp(self.epsilon)
        return int(_WORD * weight / (weight + self.n_sets - self.size))

    @property
    def odds(self) -> Fraction:
        """Return the odds of a subset with the good cell against one without, exactly; never above e^epsilon."""
        return Fraction(self._threshold * (self.n_sets - self.size), (_WORD - self._threshold) * self.size)

    @property
    def hit(self) -> float:
        """Return the probability that the good cell is in."""
        return self._threshold / _WORD

    def sample(self, good: Indices, source: Source) -> Indices:
        """Name a subset for each row, sorted, so that the place of the good cell tells nothing."""
        _check_good(good, self.n_sets)
        kept = source.words(len(good)) < np.uint64(self._threshold)
        order = _draw_orders(len(good), self.n_sets, source)
        # The good cell goes first or last in the random order; the order of the others stays uniform.
        place = np.argsort(np.where(order == good[:, None], np.where(kept, -1, self.n_sets)[:, None], 0), 1, "stable")
        chosen = np.take_along_axis(order, place, axis=1)[:, : self.size]
        return np.sort(chosen, axis=1)


def _draw_orders(n: int, length: int, source: Source) -> Indices:
    """Return uniformly random orders, shape (n, length): by random keys, drawn anew should two be equal."""
    while True:
        keys = source.words(n * length).reshape(n, length)
        order = np.argsort(keys, axis=1)
        ranked = np.take_along_axis(keys, order, axis=1)
        if (ranked[:, 1:] != ranked[:, :-1]).all():
            return order


def _check_good(good: Indices, n_sets: int) -> None:
    if ((good < 0) | (good >= n_sets)).any():
        raise ValueError(f"good must be one of the {n_sets} sets")


def checked_epsilon(epsilon: float) -> float:
    """Return the epsilon of a channel, or say what is wrong with it."""
    if not _LEAST_EPSILON <= checked_number(epsilon, "epsilon") <= _LARGEST_EPSILON:
        raise ValueError(f"epsilon must be from {_LEAST_EPSILON:g} to {_LARGEST_EPSILON:g}; smaller protects more")
    return float(epsilon)


@lru_cache(maxsize=256)
def _exp(epsilon: float) -> Fraction:
    """Return e^epsilon to 50 digits, rounded down; epsilon is the decimal number that is written, as in the ledger."""
    # Nothing here may depend on the decimal context of the application.
    near = _DECIMAL.exp(_DECIMAL.create_decimal(repr(float(epsilon))))
    return Fraction(near) * (1 - Fraction(1, 10**50))


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


def round_to_steps(values: Floats, steps: float = _FINE) -> Floats:
    """Return values in whole steps, as floats that are whole numbers."""
    return np.rint(values * steps)


def directions(rows: Floats) -> Singles:
    """Return rows of up to 64 numbers, scaled to one length and rounded to whole numbers; zeros stay zeros.

    Each operation is exact or correctly rounded, so they are the same on every machine.
    """
    largest = np.maximum(np.abs(rows).max(axis=1, keepdims=True), 1.0)
    scaled = np.rint(rows * _FINE / largest)
    norms = np.sqrt((scaled * scaled).sum(axis=1, keepdims=True))  # the sum is below 2^53, so exact
    return np.asarray(np.rint(scaled * _LENGTH / np.maximum(norms, 1.0)), dtype=np.float32)


def similarity_keys(queries: Singles, prototypes: Singles) -> Keys:
    """Return a number for each query and prototype, by their :func:`directions`: the larger, the nearer.

    No two of a row are equal: of equally near ones the first is larger. There may be 8192 prototypes.
    """
    similarities = (queries @ prototypes.T).astype(np.int32)
    similarities >>= _DROPPED_BITS
    similarities <<= _INDEX_BITS
    similarities += _LAST - np.arange(len(prototypes), dtype=np.int32)
    return similarities


def largest_keys(keys: Keys) -> Keys:
    """Return the 32 largest keys of each row, largest first, by a network of comparisons that is fixed by the shape.

    Lists are merged in pairs (Batcher's bitonic merge) until one is left; of lists longer than 32 the upper half is
    kept. The lowest number of 32 bits stands where there are fewer.
    """
    n, m = keys.shape
    lists = np.full((1, max(MOST_NEIGHBORS, 1 << (m - 1).bit_length()), n), _LOWEST, dtype=np.int32)
    lists[0, :m] = keys.T
    while lists.shape[1] > 1:
        length, count = len(lists), lists.shape[1] // 2
        first, second = lists[:, :count], lists[::-1, count:]
        lists = np.maximum(first, second)[None] if length == MOST_NEIGHBORS else _exchange(first, second)
        while length > 1:
            length //= 2
            blocks = lists.reshape(-1, 2, length, count, n)
            lists = _exchange(blocks[:, 0], blocks[:, 1]).swapaxes(0, 1)
        lists = lists.reshape(-1, count, n)
    return lists[:, 0].T


def _exchange(first: Keys, second: Keys) -> Keys:
    out = np.empty((2, *first.shape), dtype=np.int32)
    np.maximum(first, second, out=out[0])
    np.minimum(first, second, out=out[1])
    return out


def find_prototypes(keys: Keys) -> NDArray[np.int64]:
    """Return which prototypes keys belong to."""
    return (_LAST - (keys & _LAST)).astype(np.int64)


def most_covered(keys: Keys, coverage: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return the (first) set that covers most around each query: its nearest prototypes are weighted by rank."""
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
