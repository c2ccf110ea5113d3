"""Bits of a feature, and the law by which they flip."""

import math
from dataclasses import dataclass
from decimal import Context, Decimal, localcontext
from fractions import Fraction
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar

from nearveil.mechanisms.base import Floats
from nearveil.mechanisms.message import Message, MessageError
from nearveil.privacy.noise import Source
from nearveil.privacy.noise.calibration import round_up

Bits = NDArray[np.uint8]

WORD = 1 << 64
PRECISE = Context(prec=80)
_DOUBT = Decimal("1e-40")  # of a threshold: far above the error of 80 digits, far below one word
_CHUNK = 1 << 22  # words drawn at a time


@dataclass(frozen=True)
class BitLaw:
    """The odds of one randomised bit.

    `if_one, if_zero`: Out of 2^64 words, how many make it a 1 where the true bit is 1, and where it is 0.

    Examples
    --------
    >>> law = BitLaw.of(Decimal("0.75"), Decimal("0.25"))
    >>> f"{law.one:.6f} {law.zero:.6f} {math.log(3):.6f}"
    '1.098612 1.098612 1.098612'
    """

    if_one: int
    if_zero: int

    @classmethod
    def of(cls, p: Decimal, q: Decimal) -> Self:
        """Return the law nearest to P(1 | 1) = p, P(1 | 0) = q whose losses are not above theirs.

        `p, q`: Between 0 and 1, right to 50 digits.
        """
        with localcontext(PRECISE):  # Python's own 28 digits would round a threshold to the next word
            high = math.floor(max(p, q) * WORD - _DOUBT)
            low = math.ceil(min(p, q) * WORD + _DOUBT)
        high = max(high, low)  # nearer to each other than a word: the bit tells nothing
        return cls(high, low) if p > q else cls(low, high)

    @property
    def one(self) -> float:
        """The largest log-likelihood ratio of a 1 against a 0; rounded up."""
        if self.if_one >= self.if_zero:
            return _log_ratio(self.if_one, self.if_zero)
        return _log_ratio(WORD - self.if_one, WORD - self.if_zero)

    @property
    def zero(self) -> float:
        """The largest log-likelihood ratio of a 0 against a 1; rounded up."""
        return BitLaw(self.if_zero, self.if_one).one

    @property
    def epsilon(self) -> float:
        """The exact epsilon of the bit."""
        return max(self.one, self.zero)

    @property
    def p(self) -> float:
        """P(1 | 1)."""
        return self.if_one / WORD

    @property
    def q(self) -> float:
        """P(1 | 0)."""
        return self.if_zero / WORD


@dataclass(frozen=True)
class BitString:
    """A string of randomised bits; bit j follows law j modulo the number of laws.

    Examples
    --------
    >>> from nearveil.privacy.noise import unsafe_seeded
    >>> string = BitString((BitLaw.of(Decimal("0.9"), Decimal("0.1")),), 4)
    >>> string.sample(np.array([[0, 0, 1, 1]], dtype=np.uint8), unsafe_seeded(1)).shape
    (1, 4)
    """

    laws: tuple[BitLaw, ...]
    length: int

    def counts(self) -> tuple[int, ...]:
        """Return how many bits follow each law."""
        return tuple(len(range(i, self.length, len(self.laws))) for i in range(len(self.laws)))

    def sample(self, bits: Bits, source: Source) -> Bits:
        """Randomise every bit of every row."""
        ones, zeros = (self._each([getattr(law, name) for law in self.laws]) for name in ("if_one", "if_zero"))
        step = max(1, _CHUNK // self.length)
        drawn = [
            source.words(part.size).reshape(part.shape) < np.where(part, ones, zeros)
            for part in (bits[start : start + step] for start in range(0, len(bits), step))
        ]
        return np.concatenate(drawn).astype(np.uint8)

    def evidence(self, seen: Bits) -> Floats:
        """Return the log-likelihood ratio of a true 1 against a true 0, bit by bit."""
        return self._log(seen, "if_one") - self.log_if_zero(seen)

    def log_if_zero(self, seen: Bits) -> Floats:
        """Return the log-probability of what is seen of each bit if all true bits are 0, shape (..., length)."""
        return self._log(seen, "if_zero")

    def unbiased(self, seen: Bits) -> Floats:
        """Return estimates of the true bits whose mean is the true bit; zeros where a law tells nothing."""
        q = self._each([law.q for law in self.laws])
        gap = self._each([(law.if_one - law.if_zero) / WORD for law in self.laws])
        return np.asarray(np.divide(seen - q, gap, out=np.zeros(seen.shape), where=gap != 0))

    def _log(self, seen: Bits, name: str) -> Floats:
        counts = [getattr(law, name) for law in self.laws]
        yes, no = (self._each([math.log(part(n) / WORD) for n in counts]) for part in (int, lambda n: WORD - n))
        return np.where(seen, yes, no)

    def _each(self, values: list[int] | list[float]) -> NDArray[Any]:
        """Return the value of each bit's law, shape (length,)."""
        kind = np.uint64 if isinstance(values[0], int) else np.float64
        return np.resize(np.array(values, dtype=kind), self.length)


def told(yes: Decimal, no: Decimal) -> Decimal:
    """Return yes / (yes + no), to 79 digits: a probability from odds."""
    return PRECISE.divide(yes, PRECISE.add(yes, no))


def growth(epsilon: float, parts: int) -> Decimal:
    """Return e^(epsilon / parts), to 79 digits."""
    return PRECISE.divide(decimal(epsilon), Decimal(parts)).exp(PRECISE)


def decimal(number: float) -> Decimal:
    """Return the decimal number that is written, as the ledger reads it."""
    return Decimal(repr(float(number)))


def unpacked(message: Message, length: int) -> Bits:
    """Return the `length` bits of a message, or refuse it."""
    packed: NDArray[Any] = message["bits"]
    if packed.dtype != np.uint8 or packed.shape != (-(-length // 8),) or np.unpackbits(packed)[length:].any():
        raise MessageError(f"arrays: 'bits' must hold {length} bits in whole bytes, and zeros after them")
    return np.unpackbits(packed, count=length)


def _log_ratio(larger: int, smaller: int) -> float:
    """Return the logarithm of a ratio of integers, with all its digits near 1; rounded up."""
    return round_up(math.log1p(Fraction(larger - smaller, smaller)))


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
