"""Randomised bits: codes of values, the odds of bits, and their exact epsilons."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal, localcontext
from fractions import Fraction
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq, minimize_scalar

from nearveil.cluster import cut_table
from nearveil.mechanisms.base import Floats, Message, MessageError
from nearveil.privacy.noise import Source, round_up

Bits = NDArray[np.uint8]

WORD = 1 << 64
PRECISE = Context(prec=80)
_DOUBT = Decimal("1e-40")  # of a threshold: far above the error of 80 digits, far below one word
_CHUNK = 1 << 22  # words drawn at a time


@dataclass(frozen=True)
class BitLaw:
    """Odds of one randomised bit: the number of 64-bit words, of 2^64, that make it a 1."""

    if_one: int  # if the true bit is 1
    if_zero: int  # if the true bit is 0

    @classmethod
    def nearest_to(cls, p: Decimal, q: Decimal) -> Self:
        """Return the law nearest to P(1 | 1) = p, P(1 | 0) = q with losses that are not larger."""
        with localcontext(PRECISE):  # Python's default of 28 digits would round a threshold to the next word
            high = math.floor(max(p, q) * WORD - _DOUBT)
            low = math.ceil(min(p, q) * WORD + _DOUBT)
        high = max(high, low)  # nearer to each other than a word: the bit reveals nothing
        return cls(high, low) if p > q else cls(low, high)

    @property
    def one(self) -> float:
        """Largest log-likelihood ratio of a 1 against a 0, rounded up."""
        if self.if_one >= self.if_zero:
            return _log_ratio(self.if_one, self.if_zero)
        return _log_ratio(WORD - self.if_one, WORD - self.if_zero)

    @property
    def zero(self) -> float:
        """Largest log-likelihood ratio of a 0 against a 1, rounded up."""
        return BitLaw(self.if_zero, self.if_one).one

    @property
    def epsilon(self) -> float:
        """Exact epsilon of the bit."""
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
    """A string of randomised bits; bit j follows law j modulo the number of laws."""

    laws: tuple[BitLaw, ...]
    length: int

    def counts(self) -> tuple[int, ...]:
        """Return how many bits follow each law."""
        return tuple(len(range(i, self.length, len(self.laws))) for i in range(len(self.laws)))

    def sample(self, bits: Bits, source: Source) -> Bits:
        """Randomise every bit of every row."""
        ones, zeros = (self._each([getattr(law, name) for law in self.laws]) for name in ("if_one", "if_zero"))
        drawn = [
            source.words(part.size).reshape(part.shape) < np.where(part, ones, zeros)
            for part in cut_table(bits, max(1, _CHUNK // self.length))
        ]
        return np.concatenate(drawn).astype(np.uint8)

    def evidence(self, observed: Bits) -> Floats:
        """Return the log-likelihood ratio of a true 1 against a true 0, bit by bit."""
        return self._log(observed, "if_one") - self.log_if_zero(observed)

    def log_if_zero(self, observed: Bits) -> Floats:
        """Return the log-probability of each observed bit if all true bits are 0, shape (..., length)."""
        return self._log(observed, "if_zero")

    def unbiased(self, observed: Bits) -> Floats:
        """Return unbiased estimates of the true bits; zeros if a law reveals nothing."""
        q = self._each([law.q for law in self.laws])
        gap = self._each([(law.if_one - law.if_zero) / WORD for law in self.laws])
        return np.asarray(np.divide(observed - q, gap, out=np.zeros(observed.shape), where=gap != 0))

    def _log(self, observed: Bits, name: str) -> Floats:
        counts = [getattr(law, name) for law in self.laws]
        yes, no = (self._each([math.log(part(n) / WORD) for n in counts]) for part in (int, lambda n: WORD - n))
        return np.where(observed, yes, no)

    def _each(self, values: list[int] | list[float]) -> NDArray[Any]:
        """Return the value for each bit, shape (length,)."""
        kind = np.uint64 if isinstance(values[0], int) else np.float64
        return np.resize(np.array(values, dtype=kind), self.length)


def compute_exp_of_part(epsilon: float, parts: int) -> Decimal:
    """Return e^(epsilon / parts), to 79 digits in the context PRECISE."""
    return (as_decimal(epsilon) / parts).exp()


def as_decimal(number: float) -> Decimal:
    """Return the decimal number that Python prints, as in the ledger."""
    return Decimal(repr(float(number)))


def read_bits(messages: Sequence[Message], length: int) -> Bits:
    """Return the `length` bits of each message after a check, shape (n_messages, length)."""
    for packed in (message["bits"] for message in messages):
        if packed.dtype != np.uint8 or packed.shape != (-(-length // 8),) or np.unpackbits(packed)[length:].any():
            raise MessageError(f"arrays: 'bits' must hold {length} bits in whole bytes, and zeros after them")
    rows = np.array([message["bits"] for message in messages], dtype=np.uint8).reshape(len(messages), -1)
    return np.unpackbits(rows, axis=1, count=length)


def _log_ratio(larger: int, smaller: int) -> float:
    """Return the logarithm of a ratio of integers, accurate near 1, rounded up."""
    return round_up(math.log1p(Fraction(larger - smaller, smaller)))


MOST_BITS = 12  # integer and fraction bits of a value: keeps tables of pairs small
_SLACK = 1e-9  # generous bound on the excess of the norm of a computed unit row


@dataclass(frozen=True)
class Encoding:
    """One sign bit, then integer and fraction bits of the magnitude, highest first; larger magnitudes are clipped."""

    # Rounding "down" truncates, and a value below one step keeps its sign; with "nearest", zero has no sign.

    integer_bits: int
    fraction_bits: int
    scale: float  # factor for values
    rounding: Literal["down", "nearest"]

    @property
    def word_bits(self) -> int:
        """Number of bits of a value."""
        return 1 + self.integer_bits + self.fraction_bits

    @property
    def steps(self) -> float:
        """Number of steps per unit."""
        return self.scale * 2.0**self.fraction_bits

    @property
    def middle(self) -> float:
        """Middle of the values of one magnitude, in steps above it."""
        return 0.5 if self.rounding == "down" else 0.0

    @property
    def largest(self) -> int:
        """Largest magnitude, in steps."""
        return (1 << (self.integer_bits + self.fraction_bits)) - 1

    def magnitudes(self, rows: Floats) -> Floats:
        """Return magnitudes in whole steps before clipping, in the shape of the rows."""
        steps = np.abs(rows) * self.steps
        return np.floor(steps) if self.rounding == "down" else np.rint(steps)

    def encode(self, rows: Floats) -> Bits:
        """Return the code words of rows, concatenated."""
        clipped = np.minimum(self.magnitudes(rows), self.largest).astype(np.int64)
        negative = (rows < 0) & (clipped >= self._first_signed)
        words = np.concatenate([negative[..., None], self._digits(clipped)], axis=2)
        return words.reshape(len(rows), -1).astype(np.uint8)

    def words(self) -> tuple[Bits, Floats]:
        """Return all code words of values from -1 to 1, and the values that they represent."""
        steps = self._reachable()
        digits = self._digits(steps)
        middle = (steps + self.middle) / self.steps
        signed = steps >= self._first_signed
        plus, minus = np.pad(digits, ((0, 0), (1, 0))), np.pad(digits[signed], ((0, 0), (1, 0)), constant_values=1)
        return np.concatenate([plus, minus]).astype(np.uint8), np.concatenate([middle, -middle[signed]])

    def losses(self, one: Floats, zero: Floats) -> Floats:
        """Return the largest loss of each pair of magnitudes, from the losses of each bit."""
        steps = self._reachable()
        digits = self._digits(steps).astype(np.float64)
        rising, falling = (digits * one[1:]) @ (1 - digits).T, ((1 - digits) * zero[1:]) @ digits.T
        signed = (steps >= self._first_signed).astype(np.float64)  # a sign costs if the word can have both
        signs = np.maximum(one[0] * signed[:, None], zero[0] * signed[None, :])
        return np.asarray(rising + falling + signs)

    def worst(self, one: Floats, zero: Floats, n_values: int) -> float:
        """Bound the loss between two unit rows of `n_values` values from above."""
        # Theorem 5 of docs/theory/latent-ome.md, by Lagrangian duality: squares of a unit row sum to at most one, and
        # each price of a unit of squares gives a bound. Attacked by `test_no_two_unit_rows_pass_the_bound`.
        # The smallest value of each magnitude, squared.
        squares = (np.maximum(self._reachable() - (0.5 - self.middle), 0.0) / self.steps) ** 2
        sums = squares[:, None] + squares[None, :]
        kinds, counts = np.unique(
            np.concatenate([one.reshape(n_values, -1), zero.reshape(n_values, -1)], axis=1), axis=0, return_counts=True
        )
        tables = [self.losses(*np.split(kind, 2)) for kind in kinds]

        def bound(price: float) -> float:
            parts = [count * float((table - price * sums).max()) for table, count in zip(tables, counts, strict=True)]
            return float(sum(parts) + 2 * price * (1 + _SLACK))

        free = bound(0.0)
        if free == 0:
            return 0.0
        least = minimize_scalar(bound, bounds=(0.0, free), method="bounded", options={"xatol": 1e-9 * free})
        return min(free, float(least.fun)) * (1 + 1e-12)

    def _reachable(self) -> NDArray[np.int64]:
        """Return the magnitudes of values from -1 to 1."""
        most = min(int(self.magnitudes(np.array(1 + _SLACK))), self.largest)
        return np.arange(most + 1)

    @property
    def _first_signed(self) -> int:
        """Smallest magnitude with a sign."""
        return 0 if self.rounding == "down" else 1

    def _digits(self, steps: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the binary digits of magnitudes, highest first, in a new last axis."""
        shifts = np.arange(self.word_bits - 2, -1, -1)
        return np.asarray((steps[..., None] >> shifts) & 1)


LEAST, MOST = 1e-9, 40.0  # nominal epsilon of a bit: below, thresholds are too coarse; above, nothing is hidden


def find_largest_nominal(
    price: Callable[[float], float], epsilon: float, turn: float, length: int, name: str = "the mechanism"
) -> float:
    """Search the largest nominal epsilon with an exact price, increasing above `turn`, of at most `epsilon`."""
    least, most = LEAST * length, MOST * length
    starts = [start for start in (max(turn, least), least) if price(start) <= epsilon]
    if not starts:
        floor = min(price(max(turn, least)), price(least))
        raise ValueError(
            f"epsilon must be at least {floor:.6g} for {name} with this alpha and {length} bits: "
            "no nominal_epsilon reaches less. Use an alpha closer to 1, or fewer bits or n_components"
        )
    low = starts[0]
    high = min(2 * max(low, epsilon), most)
    while price(high) <= epsilon and high < most:
        low, high = high, min(2 * high, most)
    if price(high) <= epsilon:
        return high
    root = float(brentq(lambda nominal: price(nominal) - epsilon, low, high, rtol=1e-15, xtol=1e-300))
    step = 2.0**-50
    while root > low and price(root) > epsilon:  # rounding, or a bound that is minimised to a few digits
        root, step = max(root * (1 - step), low), 2 * step
    return root


def compute_pure_epsilon(string: BitString) -> float:
    """Return the exact epsilon over all strings, the sum over all bits (Theorem 2 of docs/theory/latent-ome.md)."""
    return sum(law.epsilon * count for law, count in zip(string.laws, string.counts(), strict=True))


def bound_code_word_epsilon(string: BitString, encoding: Encoding, n_values: int) -> float:
    """Return an upper bound on epsilon over the code words of unit rows (Theorem 5); at most that of strings."""
    ones, zeros = (np.resize([getattr(law, side) for law in string.laws], string.length) for side in ("one", "zero"))
    return min(encoding.worst(ones, zeros, n_values), compute_pure_epsilon(string))
