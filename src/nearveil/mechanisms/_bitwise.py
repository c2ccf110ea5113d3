"""LATENT and OME: codes of values as bits, the odds of randomised bits, their exact epsilons, and the mechanisms."""

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from decimal import Context, Decimal, localcontext
from fractions import Fraction
from typing import Any, ClassVar, Literal, Self, get_args

import numpy as np
from dp_accounting import DpEvent, SelfComposedDpEvent
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq, minimize_scalar
from scipy.special import softmax
from sklearn.utils._param_validation import StrOptions

from nearveil.cluster import cut_table
from nearveil.mechanisms.base import TractableRelease
from nearveil.mechanisms.covers.channels import check_channel_epsilon
from nearveil.mechanisms.messages import Floats, Message, MessageError, make_guarantee
from nearveil.mechanisms.projection import ProjectedRelease
from nearveil.privacy import Guarantee
from nearveil.privacy.checks import check_range
from nearveil.privacy.events import PureDp
from nearveil.privacy.noise import Source, round_up
from nearveil.privacy.parameters import allow_integers, allow_reals, parameter

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


Pairs = Literal["strings", "code words"]
Decoder = Literal["expected", "unbiased"]

_FORMAT = 1  # version of the bits in a message
LINK = "docs/theory/latent-ome.md"


class BitRelease(TractableRelease):
    """A release of a string of randomised bits."""

    string_: BitString

    @abstractmethod
    def _encode(self, features: Floats) -> Bits:
        """Return the true bits of rows, shape (n, length)."""

    def _release(self, features: Floats, source: Source) -> list[Message]:
        bits = self.string_.sample(self._encode(features), source)
        return self._messages(source, bits=np.packbits(bits, axis=1))

    def _log_density(self, messages: list[Message], features: Floats) -> Floats:
        observed = read_bits(messages, self.string_.length)
        always = self.string_.log_if_zero(observed).sum(axis=1, keepdims=True)
        return np.asarray(self.string_.evidence(observed) @ self._encode(features).T.astype(np.float64) + always)


@dataclass(eq=False, repr=False)
class BitwiseRelease(ProjectedRelease, BitRelease):
    """A release of the bits of values. Subclasses define the rounding of values and the odds of bits."""

    rounding: ClassVar[Literal["down", "nearest"]]

    epsilon: float | None = None
    _: KW_ONLY
    nominal_epsilon: float | None = None
    alpha: float | None = parameter(None, allow_reals(1e-3, 1e3), None)
    integer_bits: int = parameter(0, allow_integers(0, MOST_BITS))
    fraction_bits: int = parameter(0, allow_integers(0, MOST_BITS))
    scale: float = parameter(1.0, allow_reals(0))
    pairs: Pairs = parameter("strings", StrOptions(set(get_args(Pairs))))
    decoder: Decoder = parameter("expected", StrOptions(set(get_args(Decoder))))

    def _make_guarantee(self) -> Guarantee:
        """State the exact epsilon of the vector (docs/theory/latent-ome.md, Theorems 2 and 5)."""
        events: tuple[DpEvent, ...] = (PureDp(self.exact_epsilon_),)
        if self.pairs == "strings":
            # One event per bit: many messages then compose to less than the sum of their epsilons.
            counts = zip(self.string_.laws, self.string_.counts(), strict=True)
            events = tuple(SelfComposedDpEvent(PureDp(law.epsilon), count) for law, count in counts if count)
        theorem = f"exact likelihood ratios of bits, over {self.pairs}"
        return make_guarantee(self.exact_epsilon_, 0.0, theorem, LINK, events=events)

    def measure_clipping(self, public_X: ArrayLike) -> float:
        """Return the fraction of values in public rows that exceed the code's range and are clipped."""
        rows = self.projection_(self.features(public_X, "public_X", lenient=True))
        return float((self.encoding_.magnitudes(rows) > self.encoding_.largest).mean())

    def decode(self, message: Message) -> Floats:
        """Return the expected projected row, (n_values,), given the public rows; "unbiased": a noisier estimate."""
        self._check_messages([message])
        bits, encoding = read_bits([message], self.string_.length)[0], self.encoding_
        if self.decoder == "unbiased":
            signs, digits = np.split(self.string_.unbiased(bits).reshape(-1, encoding.word_bits), [1], axis=1)
            powers = 2.0 ** np.arange(encoding.word_bits - 2, -1, -1)
            return np.asarray((1 - 2 * signs[:, 0]) * (digits @ powers + encoding.middle) / encoding.steps)
        evidence = self.string_.evidence(bits).reshape(-1, encoding.word_bits)
        chances = softmax(evidence @ encoding.words()[0].T + self.log_prior_, axis=1)
        return np.asarray((chances * self.word_values_).sum(axis=1))

    def _calibrate(self, features: Floats) -> None:
        least = 0 if self.rounding == "down" else 1  # bits of a magnitude: none if zero has a sign
        if not least <= self.integer_bits + self.fraction_bits <= MOST_BITS:
            raise ValueError(f"integer_bits + fraction_bits must be from {least} to {MOST_BITS}")
        encoding = Encoding(int(self.integer_bits), int(self.fraction_bits), float(self.scale), self.rounding)
        n_values = self.projection_.n_components
        length = n_values * encoding.word_bits

        def string(nominal: float) -> BitString:
            with localcontext(PRECISE):  # independent of the application's decimal context
                laws = tuple(BitLaw.nearest_to(*chances) for chances in self._chances(nominal, length))
            return BitString(laws, length)

        def price(nominal: float) -> float:
            if self.pairs == "strings":
                return compute_pure_epsilon(string(nominal))
            return bound_code_word_epsilon(string(nominal), encoding, n_values)

        self.nominal_epsilon_ = self._find_nominal(price, length)
        self.string_, self.exact_epsilon_ = string(self.nominal_epsilon_), price(self.nominal_epsilon_)
        self.encoding_ = encoding
        self.log_prior_, self.word_values_ = _learn_prior(encoding, self._prepare(features[features.any(axis=1)]))

    def _find_nominal(self, price: Callable[[float], float], length: int) -> float:
        """Return `nominal_epsilon`, or the largest one with an exact epsilon of at most `epsilon`."""
        if self.epsilon is not None and self.nominal_epsilon is None:
            epsilon = check_channel_epsilon(self.epsilon)
            return find_largest_nominal(price, epsilon, self._turn() * length, length, type(self).__name__)
        if self.epsilon is not None or self.nominal_epsilon is None:
            raise ValueError(
                "epsilon must be given, the exact one of a message, or nominal_epsilon, the paper's; and not both"
            )
        return check_range(self.nominal_epsilon, "nominal_epsilon", LEAST * length, MOST * length)

    def _encode(self, features: Floats) -> Bits:
        return self.encoding_.encode(self._prepare(features))

    def _rank(self, message: Message, prepared: Floats) -> Floats:
        return np.asarray(prepared @ self.decode(message))

    def _public_parts(self) -> tuple[object, ...]:
        laws = [number for law in self.string_.laws for number in (law.if_one, law.if_zero)]
        return (_FORMAT, *laws, repr(self.encoding_), *super()._public_parts())

    @abstractmethod
    def _chances(self, nominal: float, length: int) -> tuple[tuple[Decimal, Decimal], ...]:
        """Return P(1 | 1) and P(1 | 0) of the laws that bits follow in turn; `nominal` is the epsilon of all bits."""

    def _turn(self) -> float:
        """Return the nominal epsilon of a bit above which the exact epsilon increases."""
        return 0.0


def _learn_prior(encoding: Encoding, rows: Floats) -> tuple[Floats, Floats]:
    """Return the log-frequency and mean value of each code word, (n_values, n_words); smoothed by a pseudo-row."""
    words, middle = encoding.words()
    powers = 1 << np.arange(encoding.word_bits)
    numbers = words @ powers
    order = np.argsort(numbers)
    n_values = rows.shape[1]
    codes = encoding.encode(rows).reshape(len(rows), n_values, -1) @ powers
    at = np.broadcast_to(np.arange(n_values), codes.shape), order[np.searchsorted(numbers[order], codes)]
    counts = np.full((n_values, len(words)), 1 / len(words))
    sums = counts * middle
    np.add.at(counts, at, 1.0)
    np.add.at(sums, at, rows)
    return np.log(counts), sums / counts


class Latent(BitwiseRelease):
    """LATENT: send the bits of a vector, each kept or flipped at random (Arachchige et al. 2019).

    A value becomes a sign, integer and fraction bits; the words of all values are concatenated to dl bits. A true 1
    stays 1 with probability ``1 / (1 + alpha)``; a true 0 becomes 1 with ``1 / (1 + alpha e^x)``, where x is the
    nominal epsilon divided by dl. With ``a = ln((1 + alpha e^x) / (1 + alpha))``, the exact local epsilon is
    ``dl max(a, x - a)``, from half of the nominal one to all of it (Theorem 2 of ``docs/theory/latent-ome.md``).

    Parameters
    ----------
    epsilon : float, optional
        Exact epsilon of a whole message, from 1e-6 to 40. The odds are solved for it.
    nominal_epsilon : float, optional
        The paper's epsilon, instead of `epsilon`. The guarantee still states the exact one.
    alpha : float, optional
        Odds that a true 1 becomes 0, from 0.001 to 1000; above 1 in the paper. The default ``e^(-x/2)`` is the best:
        both errors are equally likely, and the exact epsilon is half of the nominal one.
    integer_bits, fraction_bits : int, default=0
        Bits of a value, besides its sign. Larger magnitudes are clipped (:meth:`measure_clipping`), other digits cut.
    scale : float, default=1.0
        Factor for values, which are between -1 and 1. Public.
    pairs : {"strings", "code words"}, default="strings"
        Whether the guarantee covers all pairs of bit strings, or only those that rows of norm one can have.
    decoder : {"expected", "unbiased"}, default="expected"
        How the server decodes bits: see :meth:`decode`.
    projection, n_components, projection_seed
        A public map to fewer dimensions, as for :class:`~nearveil.mechanisms.PrivUnit`. Use it: every bit costs.

    Attributes
    ----------
    nominal_epsilon_, exact_epsilon_ : float
        By the paper's formula, and exact, over `pairs`.
    string_ : BitString
        Odds of all bits.
    encoding_ : Encoding
    projection_ : Projection

    Examples
    --------
    >>> import numpy as np
    >>> rows = np.random.default_rng(0).standard_normal((300, 16))
    >>> published = Latent(nominal_epsilon=1.0, alpha=7.0, integer_bits=4, fraction_bits=5).fit(rows)
    >>> f"claimed {published.nominal_epsilon_:g}, exact {published.guarantee.epsilon:.6f}"
    'claimed 1, exact 0.875341'
    """

    name = "latent"
    rounding = "down"

    def _chances(self, nominal: float, length: int) -> tuple[tuple[Decimal, Decimal], ...]:
        # Eq. 30 of the paper: the odds that a true 1, and a true 0, is sent as 0.
        if self.alpha is None:
            of_zero = compute_exp_of_part(nominal, 2 * length)
            of_one = 1 / of_zero
        else:
            of_one = as_decimal(self.alpha)
            of_zero = of_one * compute_exp_of_part(nominal, length)
        return ((1 / (1 + of_one), 1 / (1 + of_zero)),)


@dataclass(eq=False, repr=False, kw_only=True)
class OME(BitwiseRelease):
    """OME: send the bits of a vector, with different odds at even and odd positions (Lyu et al. 2020).

    A value x becomes 11 bits: its sign and ``round(32 |x|)``. A true 1 is sent as 1 with probability
    ``alpha / (1 + alpha)`` at even positions of the whole string and ``1 / (1 + alpha^3)`` at odd ones; a true 0 with
    ``1 / (1 + alpha e^x)``, where x is the nominal epsilon divided by the number of bits dl.

    The paper counts the losses of even and odd positions with opposite signs, so that alpha cancels. They do not
    cancel: for alpha above 1 and x up to 2 ln alpha the exact epsilon is ``dl / 2 ln(alpha^3 - alpha^2 + alpha)``,
    for any nominal one (Theorem 3 of ``docs/theory/latent-ome.md``). So a small `epsilon` needs an alpha near 1.

    Parameters
    ----------
    epsilon : float, optional
        Exact epsilon of a whole message, from 1e-6 to 40. The odds are solved for it.
    nominal_epsilon : float, optional
        The paper's epsilon, instead of `epsilon`. The guarantee still states the exact one.
    alpha : float, default=1.0
        From 0.001 to 1000; 100 in the paper.
    integer_bits, fraction_bits : int, default=5
        Bits of a value, besides its sign. Larger magnitudes are clipped: see :meth:`measure_clipping`.
    scale, pairs, decoder, projection, n_components, projection_seed
        As for :class:`~nearveil.mechanisms.Latent`, which has the same attributes.

    Examples
    --------
    >>> import numpy as np
    >>> rows = np.random.default_rng(0).standard_normal((300, 50))
    >>> published = OME(nominal_epsilon=10.0, alpha=100.0).fit(rows)
    >>> f"{published.guarantee.epsilon:.2f}"
    '3796.53'
    >>> OME(epsilon=8.0, alpha=100.0).fit(rows)
    Traceback (most recent call last):
    ValueError: epsilon must be at least 3796.53 for OME with this alpha and 550 bits: no nominal_epsilon...
    """

    name = "ome"
    rounding = "nearest"

    alpha: float = parameter(1.0, allow_reals(1e-3, 1e3))
    integer_bits: int = parameter(5, allow_integers(0, MOST_BITS))
    fraction_bits: int = parameter(5, allow_integers(0, MOST_BITS))

    def _chances(self, nominal: float, length: int) -> tuple[tuple[Decimal, Decimal], ...]:
        # Eq. 36 of the paper: even, then odd positions.
        alpha = as_decimal(self.alpha)
        false = 1 / (1 + alpha * compute_exp_of_part(nominal, length))
        return (alpha / (1 + alpha), false), (1 / (1 + alpha**3), false)

    def _turn(self) -> float:
        return 2 * abs(math.log(self.alpha))
