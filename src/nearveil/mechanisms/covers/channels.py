"""Channels that name a set of a public map: randomised response and subset selection, with exact odds."""

from dataclasses import dataclass
from decimal import Context
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from nearveil.privacy.checks import NumberCheck
from nearveil.privacy.events import NamedSets
from nearveil.privacy.noise import Source

_WORD = 1 << 64
_DECIMAL = Context(prec=60)
_LARGEST_EPSILON = 40.0  # e^40 words still fit between two thresholds of a 64-bit word
_LEAST_EPSILON = 1e-6  # below 1e-12 a rounded word would weigh more than epsilon
check_channel_epsilon = NumberCheck(
    f"be from {_LEAST_EPSILON:g} to {_LARGEST_EPSILON:g}",
    lambda number: _LEAST_EPSILON <= number <= _LARGEST_EPSILON,
    "epsilon",
)

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class RandomizedResponse:
    """Name the good set with odds e^epsilon against each other set."""

    epsilon: float  # from 1e-6 to 40
    n_sets: int  # at least 2
    size: ClassVar[int] = 1  # of a message, in sets

    def __post_init__(self) -> None:
        check_channel_epsilon(self.epsilon)
        if not 2 <= self.n_sets < 1 << 20:
            raise ValueError("n_sets must be from 2 to a million")

    @cached_property
    def _miss(self) -> int:
        """Number of words that name one particular other set, rounded up, so that the odds of the good set decrease."""
        return _WORD // (_exp(self.epsilon) + self.n_sets - 1) + 1

    @property
    def odds(self) -> Fraction:
        """Exact odds of the good set against one other, at most e^epsilon."""
        return Fraction(_WORD - (self.n_sets - 1) * self._miss, self._miss)

    @property
    def event(self) -> NamedSets:
        """The privacy loss of one message, whatever the map contains (``docs/theory/covers.md``, Theorem 3)."""
        return NamedSets(self.epsilon, self.n_sets)

    @property
    def hit(self) -> float:
        """Probability of the good set."""
        return 1 - (self.n_sets - 1) * self._miss / _WORD

    def sample(self, good: Indices, source: Source) -> Indices:
        """Draw one set for each row from its good set. A good set out of range would reveal itself: it is an error."""
        _check_good(good, self.n_sets)
        words = source.words(len(good))
        first = np.uint64(_WORD - (self.n_sets - 1) * self._miss)
        misses = ((words - first) // np.uint64(self._miss)).astype(np.int64)  # wraps around if a word is a hit
        return np.where(words < first, good, misses + (misses >= good))


@dataclass(frozen=True)
class SubsetSelection:
    """Name `size` cells; subsets with the good cell are e^epsilon times as likely (Wang et al. 2016, Ye, Barg 2018)."""

    epsilon: float  # from 1e-6 to 40
    n_sets: int
    size: int  # from 1 to ``n_sets - 1``

    def __post_init__(self) -> None:
        check_channel_epsilon(self.epsilon)
        if not 2 <= self.n_sets < 1 << 20:
            raise ValueError("n_sets must be from 2 to a million")
        if not 1 <= self.size < self.n_sets:
            raise ValueError("size must be from 1 to n_sets - 1")

    @cached_property
    def _threshold(self) -> int:
        """Number of words that include the good cell, rounded down."""
        weight = self.size * _exp(self.epsilon)
        return int(_WORD * weight / (weight + self.n_sets - self.size))

    @property
    def odds(self) -> Fraction:
        """Exact odds of a subset with the good cell against one without, at most e^epsilon."""
        return Fraction(self._threshold * (self.n_sets - self.size), (_WORD - self._threshold) * self.size)

    @property
    def event(self) -> NamedSets:
        """The privacy loss of one message, whatever the map contains (``docs/theory/covers.md``, Theorem 3)."""
        return NamedSets(self.epsilon, self.n_sets, self.size)

    @property
    def hit(self) -> float:
        """Probability that the good cell is included."""
        return self._threshold / _WORD

    def sample(self, good: Indices, source: Source) -> Indices:
        """Draw a subset for each row, sorted, so that the position of the good cell reveals nothing."""
        _check_good(good, self.n_sets)
        included = source.words(len(good)) < np.uint64(self._threshold)
        order = _draw_orders(len(good), self.n_sets, source)
        # Move the good cell to the front or the end of the random order; the rest stays uniform.
        ranks = np.where(order == good[:, None], np.where(included, -1, self.n_sets)[:, None], 0)
        chosen = np.take_along_axis(order, np.argsort(ranks, 1, "stable"), axis=1)[:, : self.size]
        return np.sort(chosen, axis=1)


def _draw_orders(n: int, length: int, source: Source) -> Indices:
    """Return uniformly random orders, shape (n, length), by random keys; draws again if two keys are equal."""
    while True:
        keys = source.words(n * length).reshape(n, length)
        order = np.argsort(keys, axis=1)
        ranked = np.take_along_axis(keys, order, axis=1)
        if (ranked[:, 1:] != ranked[:, :-1]).all():
            return order


def _check_good(good: Indices, n_sets: int) -> None:
    if ((good < 0) | (good >= n_sets)).any():
        raise ValueError(f"good must be one of the {n_sets} sets")


@lru_cache(maxsize=256)
def _exp(epsilon: float) -> Fraction:
    """Return e^epsilon to 50 digits, rounded down; epsilon is the decimal that Python prints, as in the ledger."""
    # The result must not depend on the decimal context of the application.
    near = _DECIMAL.exp(_DECIMAL.create_decimal(repr(float(epsilon))))
    return Fraction(near) * (1 - Fraction(1, 10**50))
