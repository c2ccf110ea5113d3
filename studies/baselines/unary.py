"""Unary encodings: a cell as a string of randomised bits."""

from dataclasses import dataclass
from decimal import Decimal, localcontext
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax

from nearveil.mechanisms._bitwise import (
    LINK,
    PRECISE,
    BitLaw,
    BitRelease,
    Bits,
    BitString,
    compute_exp_of_part,
    read_bits,
)
from nearveil.mechanisms.covers.channels import check_channel_epsilon
from nearveil.mechanisms.covers.learning import centres
from nearveil.mechanisms.messages import Floats, Message, make_guarantee
from nearveil.privacy import Guarantee
from nearveil.privacy.checks import check_choice, check_integer
from nearveil.privacy.events import PureDp
from nearveil.privacy.noise import round_up

UnaryKind = Literal["symmetric", "optimised"]

_UNARY_FORMAT = 1
_MOST_CELLS = 4096


@dataclass(eq=False, repr=False)
class Unary(BitRelease):
    """Send a row's k-means cell among public rows, as a string of randomised bits with a single true 1.

    Every bit is randomised independently. Two strings differ in two bits, so the exact epsilon is
    ``ln(p (1 - q) / (q (1 - p)))``, where p and q are the probabilities that a true 1 and a true 0 are sent as 1
    (Theorem 6 of ``docs/theory/latent-ome.md``).

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
        Odds of all bits.

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
        epsilon = min(round_up(law.one + law.zero), check_channel_epsilon(self.epsilon))
        return make_guarantee(epsilon, 0.0, "exact likelihood ratio of two bits", LINK, events=(PureDp(epsilon),))

    def _fit(self, features: Floats, labels: NDArray[np.int64] | None) -> None:
        del labels
        check_choice(self.kind, "kind", UnaryKind)
        check_integer(self.n_cells, "n_cells", 2, min(_MOST_CELLS, len(features)))
        law = make_unary_law(self.epsilon, self.kind)
        self.centroids_ = centres(features.astype(np.float32), int(self.n_cells), seed=0).astype(np.float64)
        cells = self._cells(features)
        self.log_prior_ = np.log(np.bincount(cells, minlength=self.n_cells) + 1 / self.n_cells)
        self.string_ = BitString((law,), int(self.n_cells))

    def _encode(self, features: Floats) -> Bits:
        return np.eye(self.string_.length, dtype=np.uint8)[self._cells(features)]

    def _rank(self, message: Message, prepared: Floats) -> Floats:
        observed = read_bits([message], self.string_.length)[0]
        chances = softmax(self.string_.evidence(observed) + self.log_prior_)
        return np.asarray(prepared @ (chances @ self.centroids_))

    def _cells(self, features: Floats) -> NDArray[np.int64]:
        """Return the cell of the nearest centroid of each row, shape (n,)."""
        near = 2 * features @ self.centroids_.T - (self.centroids_**2).sum(axis=1)
        return np.asarray(near.argmax(axis=1), dtype=np.int64)

    def _public_parts(self) -> tuple[object, ...]:
        return _UNARY_FORMAT, self.string_.laws[0].if_one, self.string_.laws[0].if_zero, self.string_.length


def make_unary_law(epsilon: float, kind: UnaryKind) -> BitLaw:
    """Return the odds of a bit for which two bits have exactly `epsilon`."""
    value = check_channel_epsilon(epsilon)
    with localcontext(PRECISE):
        if kind == "optimised":
            return BitLaw.nearest_to(Decimal("0.5"), 1 / (1 + compute_exp_of_part(value, 1)))
        half = compute_exp_of_part(value, 2)
        return BitLaw.nearest_to(half / (1 + half), 1 / (1 + half))
