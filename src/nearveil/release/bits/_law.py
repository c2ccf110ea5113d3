"""Randomised bits: what a bit becomes, by integer thresholds, and what one look at it tells.

A bit is 1 with probability ``T / 2^64``, where T depends on the true bit alone. A random word is compared with
T, so the odds are exactly what the integers say. Both thresholds are rounded towards each other: every rounding
lowers the loss (``docs/theory/latent-ome.md``, Theorem 1; attacked by ``tests/release/test_bitwise.py``).
"""

import math
from dataclasses import dataclass
from decimal import Context, Decimal, localcontext
from fractions import Fraction
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from nearveil.privacy.noise import Source
from nearveil.privacy.noise.calibration import up
from nearveil.release._base import Floats
from nearveil.release._message import Message, MessageError

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
    return up(math.log1p(Fraction(larger - smaller, smaller)))
