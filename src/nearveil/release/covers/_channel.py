"""Channels with exact integer odds: which of L sets a message names, given the good one.

Random words are compared with integer thresholds, so the odds are exactly what the integers say and no
floating-point number decides. Every rounding lowers the odds of the good set: the promise is kept, not
just approached (``docs/theory/covers.md``, Theorem 1; attacked by ``tests/release/test_channel.py``).
"""

from dataclasses import dataclass
from decimal import Context
from fractions import Fraction
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from nearveil.privacy.noise import Source

_WORD = 1 << 64
_DECIMAL = Context(prec=60)
_LARGEST_EPSILON = 40.0  # e^40 words still fit between two thresholds of a 64-bit word
_LEAST_EPSILON = 1e-6  # below 1e-12 a rounded word would weigh more than epsilon

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class RandomizedResponse:
    """Name the good set with odds e^epsilon against each other set.

    Examples
    --------
    >>> channel = RandomizedResponse(2.0, 10)
    >>> f"{channel.hit:.4f}"
    '0.4509'
    """

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
        """Name one set for each row.

        A good set that the channel does not know would name itself by being out of range, so it is refused first.

        `good`: The good set of each row.
        """
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
        """Name a subset for each row.

        Returns: Sorted, so that the place of the good cell tells nothing.
        """
        _check_good(good, self.n_sets)
        kept = source.words(len(good)) < np.uint64(self._threshold)
        order = _orders(len(good), self.n_sets, source)
        # The good cell goes first or last in the random order; the order of the others stays uniform.
        place = np.argsort(np.where(order == good[:, None], np.where(kept, -1, self.n_sets)[:, None], 0), 1, "stable")
        chosen = np.take_along_axis(order, place, axis=1)[:, : self.size]
        return np.sort(chosen, axis=1)


def _orders(n: int, length: int, source: Source) -> Indices:
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
    if isinstance(epsilon, bool) or not isinstance(epsilon, (int, float, np.integer, np.floating)):
        raise ValueError("epsilon must be a number")
    if not _LEAST_EPSILON <= epsilon <= _LARGEST_EPSILON:
        raise ValueError(f"epsilon must be from {_LEAST_EPSILON:g} to {_LARGEST_EPSILON:g}; smaller protects more")
    return float(epsilon)


@lru_cache(maxsize=256)
def _exp(epsilon: float) -> Fraction:
    """Return e^epsilon to 50 digits, rounded down; epsilon is the decimal number that is written, as in the ledger."""
    # Nothing here may depend on the decimal context of the application.
    near = _DECIMAL.exp(_DECIMAL.create_decimal(repr(float(epsilon))))
    return Fraction(near) * (1 - Fraction(1, 10**50))
