"""LATENT: a vector's bits, each randomised with one pair of odds."""

from decimal import Decimal
from typing import Any

from nearveil.release.bits._bitwise import BitwiseRelease, Decoder, Pairs
from nearveil.release.bits._law import PRECISE, BitLaw, decimal, growth, told


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
