"""Unary encodings: a cell as a string with a single 1, which LATENT and OME build on."""

from decimal import Decimal
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import softmax

from nearveil.privacy import Basis, Guarantee
from nearveil.privacy.events import PureDp
from nearveil.privacy.noise import Source
from nearveil.privacy.noise.calibration import up
from nearveil.release._base import Floats, Release
from nearveil.release._message import Message
from nearveil.release.bits._law import BitLaw, Bits, BitString, growth, told, unpacked
from nearveil.release.covers._channel import checked_epsilon
from nearveil.release.covers._learning import centres

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
        epsilon = min(up(law.one + law.zero), checked_epsilon(self.epsilon))
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
