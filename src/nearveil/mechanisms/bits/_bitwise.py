"""What LATENT and OME share: values become bits, every bit is randomised, and the price is the exact one."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from decimal import localcontext
from typing import Any, Literal, get_args

import numpy as np
from dp_accounting import DpEvent, SelfComposedDpEvent
from numpy.typing import ArrayLike, NDArray
from scipy.special import softmax

from nearveil.mechanisms.base import Floats, Release
from nearveil.mechanisms.bits._budget import (
    LEAST,
    MOST,
    Budgets,
    checked_number,
    code_word_epsilon,
    exact_prices,
    largest_nominal,
    pure_epsilon,
)
from nearveil.mechanisms.bits._code import MOST_BITS, PRECISE, BitLaw, Bits, BitString, Encoding, unpacked
from nearveil.mechanisms.covers.channel import checked_epsilon
from nearveil.mechanisms.message import Message
from nearveil.mechanisms.projection import fit_projection
from nearveil.privacy import Basis, Guarantee
from nearveil.privacy.events import PureDp
from nearveil.privacy.noise import Source

Pairs = Literal["strings", "code words"]
Decoder = Literal["expected", "unbiased"]

_FORMAT = 1  # of the bits in a message
_ALPHAS = (1e-3, 1e3)


class BitwiseRelease(Release):
    """A release of randomised bits. Subclasses say how a value is rounded and what a bit's odds are."""

    rounding: Literal["down", "nearest"]

    epsilon: float | None
    nominal_epsilon: float | None
    alpha: float | None
    integer_bits: int
    fraction_bits: int
    scale: float
    pairs: Pairs
    decoder: Decoder
    projection: Any
    n_components: int | None
    projection_seed: int

    def _make_guarantee(self) -> Guarantee:
        """State the exact epsilon of the vector (docs/theory/latent-ome.md, Theorems 2 and 5)."""
        return Guarantee(
            epsilon=self.exact_epsilon_,
            delta=0.0,
            protects="query",
            unit="record",
            relation="replace",
            basis=Basis(f"exact likelihood ratios of bits, over {self.pairs}", "docs/theory/latent-ome.md"),
            events=self._events(),
        )

    def budgets(self, delta: float = 1e-5) -> Budgets:
        """Return the budget as claimed, as corrected in print, and exactly.

        Parameters
        ----------
        delta : float, default=1e-5
            At which composed epsilons are given besides the pure ones.

        Returns
        -------
        Budgets
        """
        self._check_fitted()
        exact, code_words = exact_prices(self.string_, self.encoding_, delta)
        with localcontext(PRECISE):  # nothing may depend on the application's decimal context
            correction = self._published_correction(self.nominal_epsilon_, self.string_.length)
        return Budgets(
            claimed=self.nominal_epsilon_,
            published_correction=correction,
            exact=exact,
            exact_code_words=code_words,
            delta=delta,
            n_bits=self.string_.length,
            n_values=self.projection_.n_components,
        )

    def clipped(self, public_X: ArrayLike) -> float:
        """Return the share of values that the code is too short for; they are cut off at its largest.

        Parameters
        ----------
        public_X : array-like of shape (n, d)
            Public: the answer is about them.

        Returns
        -------
        float
        """
        rows = self.projection_(self.features(public_X, "public_X", lenient=True))
        return float((self.encoding_.magnitudes(rows) > self.encoding_.largest).mean())

    def decode(self, message: Message) -> Floats:
        """Return what the message tells of the projected row: its expected value.

        By ``decoder="expected"`` that of a row which was drawn like the public ones, value by value; by "unbiased"
        an estimate whose mean is the encoded row, whatever it is, and whose noise is far larger.

        Parameters
        ----------
        message : Message

        Returns
        -------
        ndarray of shape (n_values,)
        """
        seen = self._seen(message)
        if self.decoder == "unbiased":
            return self._unbiased(self.string_.unbiased(seen).reshape(-1, self.encoding_.word_bits))
        evidence = self.string_.evidence(seen).reshape(-1, self.encoding_.word_bits)
        chances = softmax(evidence @ self.encoding_.words()[0].T + self.log_prior_, axis=1)
        return np.asarray((chances * self.word_values_).sum(axis=1))

    def log_density(self, messages: Message | Sequence[Message], X: ArrayLike) -> Floats:
        """Return the log-probability of messages, for each row that may have caused them.

        Parameters
        ----------
        messages : Message or sequence of Message
        X : array-like of shape (n_rows, d)

        Returns
        -------
        ndarray of shape (n_messages, n_rows)
        """
        self._check_fitted()
        given = [messages] if isinstance(messages, Message) else list(messages)
        seen = np.array([self._seen(message) for message in given], dtype=np.uint8).reshape(-1, self.string_.length)
        codes = self.encoding_.encode(self.projection_(self.features(X))).astype(np.float64)
        return np.asarray(
            self.string_.evidence(seen) @ codes.T + self.string_.log_if_zero(seen).sum(axis=1, keepdims=True)
        )

    def _fit(self, features: Floats, labels: NDArray[np.int64] | None) -> None:
        encoding = self._checked_encoding()
        projection = fit_projection(
            self.projection, features, labels, n_components=self.n_components, seed=self.projection_seed
        )
        length = projection.n_components * encoding.word_bits

        def string(nominal: float) -> BitString:
            return BitString(self._laws(nominal, length), length)

        def price(nominal: float) -> float:
            if self.pairs == "strings":
                return pure_epsilon(string(nominal))
            return code_word_epsilon(string(nominal), encoding, projection.n_components)

        self.nominal_epsilon_ = self._calibrated(price, length)
        self.string_, self.exact_epsilon_ = string(self.nominal_epsilon_), price(self.nominal_epsilon_)
        self.encoding_, self.projection_ = encoding, projection
        self.log_prior_, self.word_values_ = _habits(encoding, projection(features[features.any(axis=1)]))

    def _calibrated(self, price: Callable[[float], float], length: int) -> float:
        """Return the nominal epsilon: the one given, or the largest whose exact epsilon is the one given."""
        if (self.epsilon is None) == (self.nominal_epsilon is None):
            raise ValueError(
                "epsilon must be given, the exact one of a message, or nominal_epsilon, the paper's; and not both"
            )
        if self.nominal_epsilon is not None:
            nominal = checked_number(self.nominal_epsilon, "nominal_epsilon")
            if not LEAST * length <= nominal <= MOST * length:
                raise ValueError(
                    f"nominal_epsilon must be from {LEAST * length:.3g} to {MOST * length:.6g} for {length} bits"
                )
            return nominal
        assert self.epsilon is not None
        epsilon = checked_epsilon(self.epsilon)
        return largest_nominal(price, epsilon, self._turn() * length, length, type(self).__name__)

    def _release(self, features: Floats, source: Source) -> list[Message]:
        bits = self.string_.sample(self.encoding_.encode(self.projection_(features)), source)
        return self._messages(source, bits=np.packbits(bits, axis=1))

    def _prepare(self, features: Floats) -> Floats:
        return self.projection_(features)

    def _rank(self, message: Message, prepared: Floats) -> Floats:
        return np.asarray(prepared @ self.decode(message))

    def _seen(self, message: Message) -> Bits:
        """Return the bits of a message, checked."""
        self._check_message(message)
        return unpacked(message, self.string_.length)

    def _unbiased(self, bits: Floats) -> Floats:
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

    def _checked_encoding(self) -> Encoding:
        for name in ("integer_bits", "fraction_bits"):
            bits = getattr(self, name)
            if isinstance(bits, bool) or not isinstance(bits, int | np.integer) or not 0 <= bits <= MOST_BITS:
                raise ValueError(f"{name} must be a whole number from 0 to {MOST_BITS}")
        if not self._least_bits <= self.integer_bits + self.fraction_bits <= MOST_BITS:
            raise ValueError(f"integer_bits + fraction_bits must be from {self._least_bits} to {MOST_BITS}")
        self._check_alpha()
        for name, choices in (("pairs", get_args(Pairs)), ("decoder", get_args(Decoder))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}")
        scale = checked_number(self.scale, "scale")
        return Encoding(int(self.integer_bits), int(self.fraction_bits), scale, self.rounding)

    def _check_alpha(self) -> None:
        if self.alpha is None or not _ALPHAS[0] <= checked_number(self.alpha, "alpha") <= _ALPHAS[1]:
            raise ValueError(f"alpha must be from {_ALPHAS[0]:g} to {_ALPHAS[1]:g}")

    @property
    def _least_bits(self) -> int:
        """Bits that a magnitude needs: none where zero has a sign."""
        return 0 if self.rounding == "down" else 1

    @abstractmethod
    def _laws(self, nominal: float, length: int) -> tuple[BitLaw, ...]:
        """Return the odds of bits in turn, for a nominal epsilon of all `length` bits."""

    @abstractmethod
    def _published_correction(self, nominal: float, length: int) -> float:
        """Return what the correction in print says."""

    def _turn(self) -> float:
        """Return the nominal epsilon of a bit from which on the exact epsilon rises."""
        return 0.0


def _habits(encoding: Encoding, rows: Floats) -> tuple[Floats, Floats]:
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
