"""LATENT, OME and unary encoding: each a way to share one budget among bits."""

import math
from decimal import Decimal
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import softmax

from nearveil.mechanisms.base import Floats, Release
from nearveil.mechanisms.bits._bitwise import BitwiseRelease, Decoder, Pairs
from nearveil.mechanisms.bits._code import PRECISE, BitLaw, Bits, BitString, decimal, growth, told, unpacked
from nearveil.mechanisms.covers.channel import checked_epsilon
from nearveil.mechanisms.covers.learning import centres
from nearveil.mechanisms.message import Message
from nearveil.privacy import Basis, Guarantee
from nearveil.privacy.events import PureDp
from nearveil.privacy.noise import Source
from nearveil.privacy.noise.calibration import round_up


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
        Of a value, besides its sign; further digits are cut off. Magnitudes of more than ``2^integer_bits`` are cut
        off too: :meth:`clipped` says how many of public rows are.
    scale : float, default=1.0
        Values, which lie between -1 and 1, are multiplied by it first. Public.
    pairs : {"strings", "code words"}, default="strings"
        Whether the promise counts all pairs of bit strings, or only those that rows of norm one can have.
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
    exact, code words     0.389427 (0.0336), at delta 1e-05 0.0605097 (0.01848)
    """

    name = "latent"
    rounding = "down"

    def __init__(
        self,
        epsilon: float | None = None,
        *,
        nominal_epsilon: float | None = None,
        alpha: float | None = None,
        integer_bits: int = 0,
        fraction_bits: int = 0,
        scale: float = 1.0,
        pairs: Pairs = "strings",
        decoder: Decoder = "expected",
        projection: Any = None,
        n_components: int | None = None,
        projection_seed: int = 0,
    ) -> None:
        self.epsilon = epsilon
        self.nominal_epsilon = nominal_epsilon
        self.alpha = alpha
        self.integer_bits = integer_bits
        self.fraction_bits = fraction_bits
        self.scale = scale
        self.pairs = pairs
        self.decoder = decoder
        self.projection = projection
        self.n_components = n_components
        self.projection_seed = projection_seed

    def _laws(self, nominal: float, length: int) -> tuple[BitLaw, ...]:
        """Return eq. 30."""
        return (BitLaw.of(*(told(Decimal(1), odds) for odds in self._odds(nominal, length))),)

    def _published_correction(self, nominal: float, length: int) -> float:
        """Return Theorem 8's value."""
        alpha, grown = self._odds(nominal, length)
        return float((1 + alpha) * (1 + grown) / (alpha + grown) * decimal(nominal))

    def _odds(self, nominal: float, length: int) -> tuple[Decimal, Decimal]:
        """Return the odds of a true 1, and of a true 0, to be told as 0: alpha and alpha e^x."""
        if self.alpha is None:
            half = growth(nominal, 2 * length)
            return PRECISE.divide(Decimal(1), half), half
        return decimal(self.alpha), PRECISE.multiply(decimal(self.alpha), growth(nominal, length))

    def _check_alpha(self) -> None:
        if self.alpha is not None:
            super()._check_alpha()


class OME(BitwiseRelease):
    """Tell a vector by its bits, even and odd places with different odds (Lyu et al. 2020), at its exact price.

    A value x becomes 11 bits: its sign and ``round(32 |x|)``. A true 1 is told as 1 with probability
    ``alpha / (1 + alpha)`` in even places of the whole string and ``1 / (1 + alpha^3)`` in odd ones; a true 0 with
    ``1 / (1 + alpha e^x)``, x being the nominal epsilon over the number of bits dl.

    The paper's claim counts what even places lose and what odd places lose with opposite signs, so that alpha cancels.
    An observer may choose the sign: for alpha above 1 and x up to 2 ln alpha the exact epsilon is
    ``dl / 2 ln(alpha^3 - alpha^2 + alpha)``, whatever the nominal one is (Theorem 3 of ``docs/theory/latent-ome.md``).
    So a small `epsilon` needs an alpha near 1; where none is reachable an error says what is.

    Parameters
    ----------
    epsilon : float, optional
        The exact epsilon of a whole message, from 1e-6 to 40. The odds are solved for it.
    nominal_epsilon : float, optional
        The paper's epsilon, in place of `epsilon`. The guarantee states the exact one nevertheless.
    alpha : float, default=1.0
        From 0.001 to 1000; the paper has 100.
    integer_bits, fraction_bits : int, default=5
        Of a value, besides its sign. Larger magnitudes are cut off: :meth:`clipped` says how many of public rows are.
    scale : float, default=1.0
        Values, which lie between -1 and 1, are multiplied by it first. Public.
    pairs : {"strings", "code words"}, default="strings"
        Whether the promise counts all pairs of bit strings, or only those that rows of norm one can have.
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

    def __init__(
        self,
        epsilon: float | None = None,
        *,
        nominal_epsilon: float | None = None,
        alpha: float = 1.0,
        integer_bits: int = 5,
        fraction_bits: int = 5,
        scale: float = 1.0,
        pairs: Pairs = "strings",
        decoder: Decoder = "expected",
        projection: Any = None,
        n_components: int | None = None,
        projection_seed: int = 0,
    ) -> None:
        self.epsilon = epsilon
        self.nominal_epsilon = nominal_epsilon
        self.alpha: float = alpha
        self.integer_bits = integer_bits
        self.fraction_bits = fraction_bits
        self.scale = scale
        self.pairs = pairs
        self.decoder = decoder
        self.projection = projection
        self.n_components = n_components
        self.projection_seed = projection_seed

    def _laws(self, nominal: float, length: int) -> tuple[BitLaw, ...]:
        """Return eq. 36: the odds of even places, then of odd ones."""
        even, odd, false = self._chances(nominal, length)
        return BitLaw.of(even, false), BitLaw.of(odd, false)

    def _published_correction(self, nominal: float, length: int) -> float:
        """Return Theorem 9's value."""
        *chances, false = self._chances(nominal, length)
        even, odd = (true * (1 - false) + false * (1 - true) for true in chances)
        logarithm = decimal(self.alpha).ln(PRECISE)
        return float(length * (1 / even - 1 / odd) * logarithm + decimal(nominal) * (1 / even + 1 / odd) / 2)

    def _chances(self, nominal: float, length: int) -> tuple[Decimal, Decimal, Decimal]:
        """Return how likely a true 1 in an even place, one in an odd place, and a true 0 are told as 1."""
        one, alpha = Decimal(1), decimal(self.alpha)
        false = told(one, PRECISE.multiply(alpha, growth(nominal, length)))
        return told(alpha, one), told(one, PRECISE.power(alpha, 3)), false

    def _turn(self) -> float:
        return 2 * abs(math.log(self.alpha))


Kind = Literal["symmetric", "optimised"]

_FORMAT = 1
_MOST_CELLS = 4096


class Unary(Release):
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

    def __init__(self, epsilon: float, kind: Kind = "optimised", n_cells: int = 64) -> None:
        self.epsilon = epsilon
        self.kind = kind
        self.n_cells = n_cells

    def _make_guarantee(self) -> Guarantee:
        """Theorem 6 of docs/theory/latent-ome.md."""
        law = self.string_.laws[0]
        epsilon = min(round_up(law.one + law.zero), checked_epsilon(self.epsilon))
        return Guarantee(
            epsilon=epsilon,
            delta=0.0,
            protects="query",
            unit="record",
            relation="replace",
            basis=Basis("exact likelihood ratio of two bits", "docs/theory/latent-ome.md"),
            events=(PureDp(epsilon),),
        )

    def log_density(self, messages: list[Message], X: ArrayLike) -> Floats:
        """Return the log-probability of each message for each row.

        Parameters
        ----------
        messages : list of Message
        X : array-like of shape (n, d)

        Returns
        -------
        ndarray of shape (len(messages), n)
        """
        seen = np.stack([self._seen(message) for message in messages])
        always = self.string_.log_if_zero(seen).sum(axis=1, keepdims=True)
        return np.asarray(self.string_.evidence(seen)[:, self._cells(self.features(X))] + always)

    def _fit(self, features: Floats, labels: NDArray[np.int64] | None) -> None:
        del labels
        if self.kind not in get_args(Kind):
            raise ValueError('kind must be "symmetric" or "optimised"')
        whole = isinstance(self.n_cells, int | np.integer) and not isinstance(self.n_cells, bool)
        if not whole or not 2 <= self.n_cells <= min(_MOST_CELLS, len(features)):
            raise ValueError(f"n_cells must be a whole number from 2 to {_MOST_CELLS}, at most that of public rows")
        law = unary_law(self.epsilon, self.kind)
        self.centroids_ = centres(features.astype(np.float32), int(self.n_cells), seed=0).astype(np.float64)
        own = self._cells(features)
        self.log_prior_ = np.log(np.bincount(own, minlength=self.n_cells) + 1 / self.n_cells)
        self.string_ = BitString((law,), int(self.n_cells))

    def _release(self, features: Floats, source: Source) -> list[Message]:
        bits = np.eye(self.string_.length, dtype=np.uint8)[self._cells(features)]
        return self._messages(source, bits=np.packbits(self.string_.sample(bits, source), axis=1))

    def _rank(self, message: Message, prepared: Floats) -> Floats:
        chances = softmax(self.string_.evidence(self._seen(message)) + self.log_prior_)
        return np.asarray(prepared @ (chances @ self.centroids_))

    def _cells(self, features: Floats) -> NDArray[np.int64]:
        """Return the cell of the nearest centroid of each row, shape (n,)."""
        near = 2 * features @ self.centroids_.T - (self.centroids_**2).sum(axis=1)
        return np.asarray(near.argmax(axis=1), dtype=np.int64)

    def _seen(self, message: Message) -> Bits:
        """Return the bits of a message, checked."""
        self._check_message(message)
        return unpacked(message, self.string_.length)

    def _public_parts(self) -> tuple[object, ...]:
        return _FORMAT, self.string_.laws[0].if_one, self.string_.laws[0].if_zero, self.string_.length


def unary_law(epsilon: float, kind: Kind) -> BitLaw:
    """Return the odds of a bit such that two of them have the exact epsilon.

    `epsilon`: From 1e-6 to 40.

    Examples
    --------
    >>> law = unary_law(2.0, "optimised")
    >>> f"{law.p:.4f} {law.q:.4f}"
    '0.5000 0.1192'
    """
    value, one = checked_epsilon(epsilon), Decimal(1)
    if kind == "optimised":
        return BitLaw.of(Decimal("0.5"), told(one, growth(value, 1)))
    half = growth(value, 2)
    return BitLaw.of(told(half, one), told(one, half))
