"""OME: a vector's bits, with odds that differ between even and odd places."""

import math
from decimal import Decimal
from typing import Any

from nearveil.release.bits._bitwise import BitwiseRelease, Decoder, Pairs
from nearveil.release.bits._law import PRECISE, BitLaw, decimal, growth, told


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
        A public map to fewer dimensions, as of :class:`~nearveil.release.PrivUnit`. Every bit costs: use it.

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
