"""LATENT, OME and unary encoding: values become bits, and every bit is randomised."""

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from decimal import Decimal, localcontext
from typing import ClassVar, Literal

import numpy as np
from dp_accounting import DpEvent, SelfComposedDpEvent
from numpy.typing import ArrayLike, NDArray
from scipy.special import softmax

from nearveil.mechanisms._bitwise_laws import (
    LEAST,
    MOST,
    MOST_BITS,
    PRECISE,
    BitLaw,
    Bits,
    BitString,
    Budgets,
    Encoding,
    as_decimal,
    bound_code_word_epsilon,
    compute_exp_of_part,
    compute_prices,
    compute_pure_epsilon,
    convert_odds,
    find_largest_nominal,
    read_bits,
)
from nearveil.mechanisms.base import Floats, Message, TractableRelease, make_guarantee
from nearveil.mechanisms.covers.covers import checked_epsilon
from nearveil.mechanisms.covers.learning import centres
from nearveil.mechanisms.projection import ProjectedRelease
from nearveil.privacy import Guarantee
from nearveil.privacy.checks import check_choice, check_integer, check_positive
from nearveil.privacy.events import PureDp
from nearveil.privacy.noise import Source, round_up

Pairs = Literal["strings", "code words"]
Decoder = Literal["expected", "unbiased"]

_FORMAT = 1  # of the bits in a message
LINK = "docs/theory/latent-ome.md"
_ALPHAS = (1e-3, 1e3)


@dataclass(eq=False, repr=False)
class BitwiseRelease(ProjectedRelease):
    """A release of randomised bits. Subclasses say how a value is rounded and what a bit's odds are."""

    rounding: ClassVar[Literal["down", "nearest"]]

    epsilon: float | None = None
    _: KW_ONLY
    nominal_epsilon: float | None = None
    alpha: float | None = None
    integer_bits: int = 0
    fraction_bits: int = 0
    scale: float = 1.0
    pairs: Pairs = "strings"
    decoder: Decoder = "expected"

    def _make_guarantee(self) -> Guarantee:
        """State the exact epsilon of the vector (docs/theory/latent-ome.md, Theorems 2 and 5)."""
        theorem = f"exact likelihood ratios of bits, over {self.pairs}"
        return make_guarantee(self.exact_epsilon_, 0.0, theorem, LINK, events=self._events())

    def budgets(self, delta: float = 1e-5) -> Budgets:
        """Return the budget as claimed, as corrected in print, and exactly: at delta 0 and at `delta`."""
        self._check_fitted()
        exact, code_words = compute_prices(self.string_, self.encoding_, delta)
        with localcontext(PRECISE):  # nothing may depend on the application's decimal context
            correction = self._compute_published_correction(self.nominal_epsilon_, self.string_.length)
        return Budgets(
            claimed=self.nominal_epsilon_,
            published_correction=correction,
            exact=exact,
            code_word_bound=code_words,
            delta=delta,
            n_bits=self.string_.length,
            n_values=self.projection_.n_components,
        )

    def measure_clipping(self, public_X: ArrayLike) -> float:
        """Return the share of values of public rows that the code is too short for; they are cut off."""
        rows = self.projection_(self.features(public_X, "public_X", lenient=True))
        return float((self.encoding_.magnitudes(rows) > self.encoding_.largest).mean())

    def decode(self, message: Message) -> Floats:
        """Return the expected value of the projected row, shape (n_values,).

        With ``decoder="expected"`` that of a row drawn like the public ones, value by value; with "unbiased" an
        estimate whose mean is the encoded row, whatever it is, and whose noise is far larger.
        """
        self._check_messages([message])
        seen = self._read_bits(message)
        if self.decoder == "unbiased":
            return self._estimate_values(self.string_.unbiased(seen).reshape(-1, self.encoding_.word_bits))
        evidence = self.string_.evidence(seen).reshape(-1, self.encoding_.word_bits)
        chances = softmax(evidence @ self.encoding_.words()[0].T + self.log_prior_, axis=1)
        return np.asarray((chances * self.word_values_).sum(axis=1))

    def _log_density(self, messages: list[Message], features: Floats) -> Floats:
        bits = [self._read_bits(message) for message in messages]
        seen = np.array(bits, dtype=np.uint8).reshape(-1, self.string_.length)
        codes = self.encoding_.encode(self.projection_(features)).astype(np.float64)
        return np.asarray(
            self.string_.evidence(seen) @ codes.T + self.string_.log_if_zero(seen).sum(axis=1, keepdims=True)
        )

    def _fit(self, features: Floats, labels: NDArray[np.int64] | None) -> None:
        encoding = self._make_encoding()
        projection = self._fit_projection(features, labels)
        length = projection.n_components * encoding.word_bits

        def string(nominal: float) -> BitString:
            return BitString(self._laws(nominal, length), length)

        def price(nominal: float) -> float:
            if self.pairs == "strings":
                return compute_pure_epsilon(string(nominal))
            return bound_code_word_epsilon(string(nominal), encoding, projection.n_components)

        self.nominal_epsilon_ = self._find_nominal(price, length)
        self.string_, self.exact_epsilon_ = string(self.nominal_epsilon_), price(self.nominal_epsilon_)
        self.encoding_, self.projection_ = encoding, projection
        self.log_prior_, self.word_values_ = _learn_prior(encoding, projection(features[features.any(axis=1)]))

    def _find_nominal(self, price: Callable[[float], float], length: int) -> float:
        """Return the nominal epsilon: the one given, or the largest whose exact epsilon is the one given."""
        if (self.epsilon is None) == (self.nominal_epsilon is None):
            raise ValueError(
                "epsilon must be given, the exact one of a message, or nominal_epsilon, the paper's; and not both"
            )
        if self.nominal_epsilon is not None:
            nominal = check_positive(self.nominal_epsilon, "nominal_epsilon")
            if not LEAST * length <= nominal <= MOST * length:
                raise ValueError(
                    f"nominal_epsilon must be from {LEAST * length:.3g} to {MOST * length:.6g} for {length} bits"
                )
            return nominal
        assert self.epsilon is not None
        epsilon = checked_epsilon(self.epsilon)
        return find_largest_nominal(price, epsilon, self._turn() * length, length, type(self).__name__)

    def _release(self, features: Floats, source: Source) -> list[Message]:
        bits = self.string_.sample(self.encoding_.encode(self.projection_(features)), source)
        return self._messages(source, bits=np.packbits(bits, axis=1))

    def _rank(self, message: Message, prepared: Floats) -> Floats:
        return np.asarray(prepared @ self.decode(message))

    def _read_bits(self, message: Message) -> Bits:
        return read_bits(message, self.string_.length)

    def _estimate_values(self, bits: Floats) -> Floats:
        """Return values from estimates of their bits, shape (n_values, word_bits): bits are independent."""
        places = 2.0 ** np.arange(bits.shape[1] - 2, -1, -1)
        middle = 0.5 if self.rounding == "down" else 0.0
        return np.asarray((1 - 2 * bits[:, 0]) * (bits[:, 1:] @ places + middle) / self.encoding_.steps)

    def _events(self) -> tuple[DpEvent, ...]:
        if self.pairs != "strings":
            return (PureDp(self.exact_epsilon_),)
        # Bit by bit: many messages then compose to less than the sum of their epsilons.
        counted = zip(self.string_.laws, self.string_.counts(), strict=True)
        return tuple(SelfComposedDpEvent(PureDp(law.epsilon), count) for law, count in counted if count)

    def _public_parts(self) -> tuple[object, ...]:
        laws = [number for law in self.string_.laws for number in (law.if_one, law.if_zero)]
        return (_FORMAT, *laws, repr(self.encoding_), self.projection_.n_components, self.projection_.public_id)

    def _make_encoding(self) -> Encoding:
        for name in ("integer_bits", "fraction_bits"):
            check_integer(getattr(self, name), name, 0, MOST_BITS)
        if not self._least_bits <= self.integer_bits + self.fraction_bits <= MOST_BITS:
            raise ValueError(f"integer_bits + fraction_bits must be from {self._least_bits} to {MOST_BITS}")
        self._check_alpha()
        check_choice(self.pairs, "pairs", Pairs)
        check_choice(self.decoder, "decoder", Decoder)
        scale = check_positive(self.scale, "scale")
        return Encoding(int(self.integer_bits), int(self.fraction_bits), scale, self.rounding)

    def _check_alpha(self) -> None:
        if self.alpha is None or not _ALPHAS[0] <= check_positive(self.alpha, "alpha") <= _ALPHAS[1]:
            raise ValueError(f"alpha must be from {_ALPHAS[0]:g} to {_ALPHAS[1]:g}")

    @property
    def _least_bits(self) -> int:
        """Bits that a magnitude needs: none where zero has a sign."""
        return 0 if self.rounding == "down" else 1

    @abstractmethod
    def _laws(self, nominal: float, length: int) -> tuple[BitLaw, ...]:
        """Return the odds of bits in turn, for a nominal epsilon of all `length` bits."""

    @abstractmethod
    def _compute_published_correction(self, nominal: float, length: int) -> float:
        """Return what the correction in print says."""

    def _turn(self) -> float:
        """Return the nominal epsilon of a bit from which on the exact epsilon rises."""
        return 0.0


def _learn_prior(encoding: Encoding, rows: Floats) -> tuple[Floats, Floats]:
    """Return how common each code word is among public rows, in logarithms, and their mean value where it occurs.

    Each of shape (n_values, n_words). One imagined row is spread over all words, with the words' own values.
    """
    words, middle = encoding.words()
    places = 1 << np.arange(encoding.word_bits)
    numbers = words @ places
    order = np.argsort(numbers)
    n_values = rows.shape[1]
    found = encoding.encode(rows).reshape(len(rows), n_values, -1) @ places
    at = np.broadcast_to(np.arange(n_values), found.shape), order[np.searchsorted(numbers[order], found)]
    counts = np.full((n_values, len(words)), 1 / len(words))
    sums = counts * middle
    np.add.at(counts, at, 1.0)
    np.add.at(sums, at, rows)
    return np.log(counts), sums / counts


class Latent(BitwiseRelease):
    """Tell a vector by its bits, each kept or changed at random (Arachchige et al. 2019), at its exact price.

    A value becomes a sign, integer and fraction bits; the words of all values are concatenated to dl bits. A true 1
    stays 1 with probability ``1 / (1 + alpha)``; a true 0 becomes 1 with ``1 / (1 + alpha e^x)``, where x is the
    nominal epsilon over dl. The exact local epsilon is ``dl max(a, x - a)``, ``a = ln((1 + alpha e^x) / (1 + alpha))``:
    between half of the nominal one and all of it (Theorem 2 of ``docs/theory/latent-ome.md``).

    Parameters
    ----------
    epsilon : float, optional
        The exact epsilon of a whole message, from 1e-6 to 40. The odds are solved for it.
    nominal_epsilon : float, optional
        The paper's epsilon, in place of `epsilon`. The guarantee states the exact one nevertheless.
    alpha : float, optional
        The odds of a true 1 to be told as 0, from 0.001 to 1000; the paper has them above 1. By default ``e^(-x/2)``,
        the best: both errors are then equally likely, and the exact epsilon is half of the nominal one.
    integer_bits, fraction_bits : int, default=0
        Of a value, besides its sign; further digits are cut off, and magnitudes above ``2^integer_bits`` too, as
        :meth:`measure_clipping` counts.
    scale : float, default=1.0
        Values, which lie between -1 and 1, are multiplied by it first. Public.
    pairs : {"strings", "code words"}, default="strings"
        Whether the guarantee counts all pairs of bit strings, or only those that rows of norm one can have.
    decoder : {"expected", "unbiased"}, default="expected"
        How the server reads bits: :meth:`decode`.
    projection, n_components, projection_seed
        A public map to fewer dimensions, as of :class:`~nearveil.mechanisms.PrivUnit`. Every bit costs: use it.

    Attributes
    ----------
    nominal_epsilon_ : float
        What the paper would say.
    exact_epsilon_ : float
        What is true, over `pairs`.
    string_ : BitString
        The odds of all bits.
    encoding_ : Encoding
    projection_ : Projection

    Examples
    --------
    >>> import numpy as np
    >>> rows = np.random.default_rng(0).standard_normal((300, 16))
    >>> published = Latent(nominal_epsilon=1.0, alpha=7.0, integer_bits=4, fraction_bits=5).fit(rows)
    >>> print(published.budgets())
    epsilon of a vector (of a value), 16 values, 160 bits
    claimed               1 (holds)
    published correction  4.58214 (not an LDP bound)
    exact, all strings    0.875341 (0.05471), at delta 1e-05 0.0859681 (0.02198)
    code words, at most   0.389427 (0.0336), at delta 1e-05 0.0605097 (0.01848)
    """

    name = "latent"
    rounding = "down"

    def _laws(self, nominal: float, length: int) -> tuple[BitLaw, ...]:
        """Return eq. 30."""
        return (BitLaw.nearest_to(*(convert_odds(Decimal(1), odds) for odds in self._odds(nominal, length))),)

    def _compute_published_correction(self, nominal: float, length: int) -> float:
        """Return Theorem 8's value."""
        alpha, grown = self._odds(nominal, length)
        return float((1 + alpha) * (1 + grown) / (alpha + grown) * as_decimal(nominal))

    def _odds(self, nominal: float, length: int) -> tuple[Decimal, Decimal]:
        """Return the odds of a true 1, and of a true 0, to be told as 0: alpha and alpha e^x."""
        if self.alpha is None:
            half = compute_exp_of_part(nominal, 2 * length)
            return PRECISE.divide(Decimal(1), half), half
        return as_decimal(self.alpha), PRECISE.multiply(as_decimal(self.alpha), compute_exp_of_part(nominal, length))

    def _check_alpha(self) -> None:
        if self.alpha is not None:
            super()._check_alpha()


@dataclass(eq=False, repr=False, kw_only=True)
class OME(BitwiseRelease):
    """Tell a vector by its bits, even and odd places with different odds (Lyu et al. 2020), at its exact price.

    A value x becomes 11 bits: its sign and ``round(32 |x|)``. A true 1 is told as 1 with probability
    ``alpha / (1 + alpha)`` in even places of the whole string and ``1 / (1 + alpha^3)`` in odd ones; a true 0 with
    ``1 / (1 + alpha e^x)``, x being the nominal epsilon over the number of bits dl.

    The paper counts the losses of even and odd places with opposite signs, so that alpha cancels. They do not cancel:
    for alpha above 1 and x up to 2 ln alpha the exact epsilon is ``dl / 2 ln(alpha^3 - alpha^2 + alpha)``, whatever
    the nominal one is (Theorem 3 of ``docs/theory/latent-ome.md``). So a small `epsilon` needs an alpha near 1.

    Parameters
    ----------
    epsilon : float, optional
        The exact epsilon of a whole message, from 1e-6 to 40. The odds are solved for it.
    nominal_epsilon : float, optional
        The paper's epsilon, in place of `epsilon`. The guarantee states the exact one nevertheless.
    alpha : float, default=1.0
        From 0.001 to 1000; the paper has 100.
    integer_bits, fraction_bits : int, default=5
        Of a value, besides its sign. Larger magnitudes are cut off, as :meth:`measure_clipping` counts.
    scale, pairs, decoder, projection, n_components, projection_seed
        As for :class:`~nearveil.mechanisms.Latent`, which also has the same attributes.

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

    alpha: float = 1.0
    integer_bits: int = 5
    fraction_bits: int = 5

    def _laws(self, nominal: float, length: int) -> tuple[BitLaw, ...]:
        """Return eq. 36: the odds of even places, then of odd ones."""
        even, odd, false = self._chances(nominal, length)
        return BitLaw.nearest_to(even, false), BitLaw.nearest_to(odd, false)

    def _compute_published_correction(self, nominal: float, length: int) -> float:
        """Return Theorem 9's value."""
        *chances, false = self._chances(nominal, length)
        even, odd = (true * (1 - false) + false * (1 - true) for true in chances)
        logarithm = as_decimal(self.alpha).ln(PRECISE)
        return float(length * (1 / even - 1 / odd) * logarithm + as_decimal(nominal) * (1 / even + 1 / odd) / 2)

    def _chances(self, nominal: float, length: int) -> tuple[Decimal, Decimal, Decimal]:
        """Return how likely a true 1 in an even place, one in an odd place, and a true 0 are told as 1."""
        one, alpha = Decimal(1), as_decimal(self.alpha)
        false = convert_odds(one, PRECISE.multiply(alpha, compute_exp_of_part(nominal, length)))
        return convert_odds(alpha, one), convert_odds(one, PRECISE.power(alpha, 3)), false

    def _turn(self) -> float:
        return 2 * abs(math.log(self.alpha))


UnaryKind = Literal["symmetric", "optimised"]

_UNARY_FORMAT = 1
_MOST_CELLS = 4096


@dataclass(eq=False, repr=False)
class Unary(TractableRelease):
    """Tell which of the public rows' k-means cells a row lies in, by a string of bits with a single 1.

    Every bit is randomised by itself. Two strings differ in two bits, so the exact epsilon is
    ``ln(p (1 - q) / (q (1 - p)))``, p and q being the odds of a true 1 and of a true 0 to be told as 1.

    Parameters
    ----------
    epsilon : float
        Exact; from 1e-6 to 40.
    kind : {"symmetric", "optimised"}, default="optimised"
        "symmetric" is basic RAPPOR (Erlingsson et al. 2014): ``p = 1 - q = e^(epsilon/2) / (1 + e^(epsilon/2))``.
        "optimised" is OUE (Wang et al. 2017): ``p = 1/2, q = 1 / (1 + e^epsilon)``.
    n_cells : int, default=64
        From 2 to 4096, and at most the number of public rows.

    Attributes
    ----------
    centroids_ : ndarray of shape (n_cells, d)
    string_ : BitString
        The odds of all bits.

    Examples
    --------
    >>> rows = np.random.default_rng(0).standard_normal((300, 4))
    >>> release = Unary(2.0, kind="symmetric", n_cells=8).fit(rows)
    >>> f"{release.string_.laws[0].p:.4f} {release.guarantee.epsilon:.6f}"
    '0.7311 2.000000'
    """

    name = "unary"

    epsilon: float
    kind: UnaryKind = "optimised"
    n_cells: int = 64

    def _make_guarantee(self) -> Guarantee:
        """Theorem 6 of docs/theory/latent-ome.md."""
        law = self.string_.laws[0]
        epsilon = min(round_up(law.one + law.zero), checked_epsilon(self.epsilon))
        return make_guarantee(epsilon, 0.0, "exact likelihood ratio of two bits", LINK, events=(PureDp(epsilon),))

    def _log_density(self, messages: list[Message], features: Floats) -> Floats:
        seen = np.stack([self._read_bits(message) for message in messages])
        always = self.string_.log_if_zero(seen).sum(axis=1, keepdims=True)
        return np.asarray(self.string_.evidence(seen)[:, self._cells(features)] + always)

    def _fit(self, features: Floats, labels: NDArray[np.int64] | None) -> None:
        del labels
        check_choice(self.kind, "kind", UnaryKind)
        check_integer(self.n_cells, "n_cells", 2, min(_MOST_CELLS, len(features)))
        law = make_unary_law(self.epsilon, self.kind)
        self.centroids_ = centres(features.astype(np.float32), int(self.n_cells), seed=0).astype(np.float64)
        own = self._cells(features)
        self.log_prior_ = np.log(np.bincount(own, minlength=self.n_cells) + 1 / self.n_cells)
        self.string_ = BitString((law,), int(self.n_cells))

    def _release(self, features: Floats, source: Source) -> list[Message]:
        bits = np.eye(self.string_.length, dtype=np.uint8)[self._cells(features)]
        return self._messages(source, bits=np.packbits(self.string_.sample(bits, source), axis=1))

    def _rank(self, message: Message, prepared: Floats) -> Floats:
        chances = softmax(self.string_.evidence(self._read_bits(message)) + self.log_prior_)
        return np.asarray(prepared @ (chances @ self.centroids_))

    def _cells(self, features: Floats) -> NDArray[np.int64]:
        """Return the cell of the nearest centroid of each row, shape (n,)."""
        near = 2 * features @ self.centroids_.T - (self.centroids_**2).sum(axis=1)
        return np.asarray(near.argmax(axis=1), dtype=np.int64)

    def _read_bits(self, message: Message) -> Bits:
        return read_bits(message, self.string_.length)

    def _public_parts(self) -> tuple[object, ...]:
        return _UNARY_FORMAT, self.string_.laws[0].if_one, self.string_.laws[0].if_zero, self.string_.length


def make_unary_law(epsilon: float, kind: UnaryKind) -> BitLaw:
    """Return the odds of a bit such that two of them have the exact epsilon."""
    value, one = checked_epsilon(epsilon), Decimal(1)
    if kind == "optimised":
        return BitLaw.nearest_to(Decimal("0.5"), convert_odds(one, compute_exp_of_part(value, 1)))
    half = compute_exp_of_part(value, 2)
    return BitLaw.nearest_to(convert_odds(half, one), convert_odds(one, half))
