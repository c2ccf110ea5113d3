"""The channel that names a set of a public map: randomised response with exact odds."""

from dataclasses import dataclass
from decimal import Context
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from nearveil.mechanisms.messages import make_guarantee
from nearveil.privacy import Guarantee
from nearveil.privacy.checks import NumberCheck
from nearveil.privacy.noise import Source

if TYPE_CHECKING:
    from nearveil.privacy.events import NamedSets, PureDp

WORD = 1 << 64
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
        return WORD // (compute_exp(self.epsilon) + self.n_sets - 1) + 1

    @property
    def odds(self) -> Fraction:
        """Exact odds of the good set against one other, at most e^epsilon."""
        return Fraction(WORD - (self.n_sets - 1) * self._miss, self._miss)

    @property
    def event(self) -> "NamedSets":
        """The privacy loss of one message, whatever the map contains (``docs/theory/covers.md``, Theorem 3)."""
        from nearveil.privacy.events import NamedSets

        return NamedSets(self.epsilon, self.n_sets)

    @property
    def hit(self) -> float:
        """Probability of the good set."""
        return 1 - (self.n_sets - 1) * self._miss / WORD

    def sample(self, good: Indices, source: Source) -> Indices:
        """Draw one set for each row from its good set. A good set out of range would reveal itself: it is an error."""
        if ((good < 0) | (good >= self.n_sets)).any():
            raise ValueError(f"good must be one of the {self.n_sets} sets")
        words = source.words(len(good))
        first = np.uint64(WORD - (self.n_sets - 1) * self._miss)
        misses = ((words - first) // np.uint64(self._miss)).astype(np.int64)  # wraps around if a word is a hit
        return np.where(words < first, good, misses + (misses >= good))


@lru_cache(maxsize=256)
def compute_exp(epsilon: float) -> Fraction:
    """Return e^epsilon to 50 digits, rounded down; epsilon is the decimal that Python prints, as in the ledger."""
    # The result must not depend on the decimal context of the application.
    near = _DECIMAL.exp(_DECIMAL.create_decimal(repr(float(epsilon))))
    return Fraction(near) * (1 - Fraction(1, 10**50))


@lru_cache(maxsize=256)
def set_guarantee(event: "PureDp") -> Guarantee:
    """Return the guarantee of a message that names sets, for any map; with a `PureDp` event for any number of sets."""
    epsilon, theorem = check_channel_epsilon(event.epsilon), "exact odds of a channel that names sets"
    return make_guarantee(epsilon, 0.0, theorem, "docs/theory/covers.md", events=(event,))
