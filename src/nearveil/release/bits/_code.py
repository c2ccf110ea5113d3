"""Code words: a value as a sign, integer bits and fraction bits, and which pairs of code words can occur."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar

from nearveil.release._base import Floats
from nearveil.release.bits._law import Bits

MOST_BITS = 12  # integer and fraction bits of a value: tables of pairs stay small
_SLACK = 1e-9  # by which the norm of a computed unit row may pass one, generously


@dataclass(frozen=True)
class Encoding:
    """One sign bit, then the magnitude's integer and fraction bits, highest first.

    Magnitudes above ``2^integer_bits - 2^-fraction_bits`` are cut off.

    `rounding`: "down" cuts further digits off, and a value below one step keeps its sign. "nearest" rounds, and
    zero has no sign.

    Examples
    --------
    >>> Encoding(1, 2, 1.0, "down").encode(np.array([[-0.8, 1.5]]))
    array([[1, 0, 1, 1, 0, 1, 1, 0]], dtype=uint8)
    """

    integer_bits: int
    fraction_bits: int
    scale: float  # values are multiplied by it first
    rounding: Literal["down", "nearest"]

    @property
    def word_bits(self) -> int:
        """Bits of a value."""
        return 1 + self.integer_bits + self.fraction_bits

    @property
    def steps(self) -> float:
        """How many steps of the code the number one has."""
        return self.scale * 2.0**self.fraction_bits

    @property
    def largest(self) -> int:
        """The largest magnitude, in steps."""
        return (1 << (self.integer_bits + self.fraction_bits)) - 1

    def magnitudes(self, rows: Floats) -> Floats:
        """Return magnitudes in whole steps, before they are cut off; of the shape of the rows."""
        steps = np.abs(rows) * self.steps
        return np.floor(steps) if self.rounding == "down" else np.rint(steps)

    def encode(self, rows: Floats) -> Bits:
        """Return the code words of rows, concatenated."""
        kept = np.minimum(self.magnitudes(rows), self.largest).astype(np.int64)
        negative = (rows < 0) & (kept >= self._first_signed)
        words = np.concatenate([negative[..., None], self._digits(kept)], axis=2)
        return words.reshape(len(rows), -1).astype(np.uint8)

    def words(self) -> tuple[Bits, Floats]:
        """Return all code words that values from -1 to 1 can have, and the values they stand for."""
        steps = self._reachable()
        digits = self._digits(steps)
        middle = (steps + (0.5 if self.rounding == "down" else 0.0)) / self.steps
        signed = steps >= self._first_signed
        plus = np.concatenate([np.zeros((len(steps), 1), dtype=np.int64), digits], axis=1)
        minus = np.concatenate([np.ones((len(steps), 1), dtype=np.int64), digits], axis=1)[signed]
        return np.concatenate([plus, minus]).astype(np.uint8), np.concatenate([middle, -middle[signed]])

    def losses(self, one: Floats, zero: Floats) -> Floats:
        """Return the largest loss of each pair of magnitudes, the best signs included.

        `one, zero`: The loss of each bit where it is 1 in the first word and 0 in the second, and the reverse.
        """
        steps = self._reachable()
        digits = self._digits(steps).astype(np.float64)
        rising, falling = (digits * one[1:]) @ (1 - digits).T, ((1 - digits) * zero[1:]) @ digits.T
        signed = (steps >= self._first_signed).astype(np.float64)  # a sign costs where the word can have either
        signs = np.maximum(one[0] * signed[:, None], zero[0] * signed[None, :])
        return np.asarray(rising + falling + signs)

    def worst(self, one: Floats, zero: Floats, n_values: int) -> float:
        """Bound the loss between two unit rows of `n_values` values from above.

        Theorem 5 of docs/theory/latent-ome.md: magnitudes of a unit row have squares that sum to at most one.
        For every price of a unit of squares, what is left of the best pair of each value, plus the price, is
        a bound; the least of them is taken. Attacked by `test_no_two_unit_rows_pass_the_bound`.

        `one, zero`: The loss of each bit where it is 1 for the first row and 0 for the second, and the reverse.
        """
        squares = self._least(self._reachable()) ** 2
        spent = squares[:, None] + squares[None, :]
        kinds, counts = np.unique(
            np.concatenate([one.reshape(n_values, -1), zero.reshape(n_values, -1)], axis=1), axis=0, return_counts=True
        )
        tables = [self.losses(*np.split(kind, 2)) for kind in kinds]

        def bound(price: float) -> float:
            parts = [count * float((table - price * spent).max()) for table, count in zip(tables, counts, strict=True)]
            return float(sum(parts) + 2 * price * (1 + _SLACK))

        free = bound(0.0)
        if free == 0:
            return 0.0
        least = minimize_scalar(bound, bounds=(0.0, free), method="bounded", options={"xatol": 1e-9 * free})
        return min(free, float(least.fun)) * (1 + 1e-12)

    def _reachable(self) -> NDArray[np.int64]:
        """Return the magnitudes that values from -1 to 1 have."""
        most = min(int(self.magnitudes(np.array(1 + _SLACK))), self.largest)
        return np.arange(most + 1)

    def _least(self, steps: NDArray[np.int64]) -> Floats:
        """Return the least value of each magnitude."""
        return np.asarray(np.maximum(steps - (0.0 if self.rounding == "down" else 0.5), 0.0) / self.steps)

    @property
    def _first_signed(self) -> int:
        """The least magnitude that has a sign."""
        return 0 if self.rounding == "down" else 1

    def _digits(self, steps: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the binary digits of magnitudes, highest first, in a new last axis."""
        places = np.arange(self.word_bits - 2, -1, -1)
        return np.asarray((steps[..., None] >> places) & 1)
