"""From a row to whole numbers of bounded length: a public map that depends on the row alone, to the last bit."""

import math
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray
from sklearn.decomposition import PCA

from nearveil.votes._integers import LONGEST, IntegerRows

Rows = NDArray[np.float64]

_EXACT = 53  # bits of a whole number that float64 holds
_COMPONENT_BITS = 15  # of a component, so that it fits into 16 bits with its sign
_AT_ONCE = 4096  # rows
_FLAT = 1e-9  # directions with less than this share of the largest variance are left out


@dataclass(frozen=True, eq=False)
class Projection:
    """Centre, project, scale and round rows. Everything in it is public.

    Rows are cut off at `reach` and rounded to whole numbers so fine that their products with `components`, which are
    whole numbers too, and all partial sums are below 2^53. Such sums are exact in any order, so the image of a row
    does not depend on the other rows of a batch, on threads or on the machine. :class:`IntegerRows` then scales it to
    norm one and rounds it: no image is longer than ``LONGEST`` (``docs/theory/private-discriminant.md``; attacked by
    ``tests/votes/test_discriminant.py``).

    Attributes
    ----------
    components : ndarray of shape (n_features, n_directions), int16, or None
        None where there are no public rows: rows are scaled to norm one as they are.
    offset : ndarray of shape (n_directions,)
        The projected public mean.
    scale : ndarray of shape (n_directions,)
        What each direction is multiplied by.
    reach : float
        Larger values are cut off.
    n_features : int
    """

    components: NDArray[np.int16] | None = field(repr=False)
    offset: Rows = field(repr=False)
    scale: Rows = field(repr=False)
    reach: float
    n_features: int

    @classmethod
    def learn(cls, public: Rows, n_components: int, power: float) -> Self:
        """Learn the principal directions of public rows; each is scaled by its variance to the power of -`power`."""
        n, d = public.shape
        if n < 2 or not np.ptp(public, axis=0).any():
            raise ValueError("public must hold at least two rows, and rows that differ")
        found = PCA(min(n_components, n - 1, d), svd_solver="full").fit(public)
        kept = found.explained_variance_ > _FLAT * found.explained_variance_[0]
        axes, variances = found.components_[kept].T, found.explained_variance_[kept]
        step = 2.0**_COMPONENT_BITS - 1
        peak = float(np.abs(axes).max())
        components = np.rint(axes / peak * step).astype(np.int16)
        reach = float(np.abs(public).max())
        bare = cls(components, np.zeros(len(variances)), np.ones(len(variances)), reach, d)
        offset = bare._project(found.mean_[None])[0]
        scale = (variances / variances[0]) ** -power * (peak / step * reach * 2.0**-bare._bits)
        return cls(components, offset, scale, reach, d)

    @classmethod
    def none(cls, n_features: int) -> Self:
        """Return the projection without public rows: nothing but norm one."""
        return cls(None, np.zeros(n_features), np.ones(n_features), 1.0, n_features)

    @property
    def n_directions(self) -> int:
        """How many numbers the image of a row has."""
        return len(self.offset)

    def round(self, rows: Rows, name: str = "X") -> NDArray[np.int16]:
        """Map rows to whole numbers; the length of none is above ``LONGEST``.

        Parameters
        ----------
        rows : ndarray of shape (n, n_features)
        name : str
            What errors call them.

        Returns
        -------
        ndarray of shape (n, n_directions), int16
        """
        if self.components is not None:
            rows = (self._project(rows) - self.offset) * self.scale
        return IntegerRows(self.n_directions).round(rows, name=name)

    def transform(self, rows: Rows) -> Rows:
        """Return the same with a length of at most one."""
        return self.round(rows) / float(LONGEST)

    @property
    def _bits(self) -> int:
        """Of a row's whole numbers."""
        return _EXACT - 1 - _COMPONENT_BITS - math.ceil(math.log2(self.n_features + 1))

    def _project(self, rows: Rows) -> Rows:
        assert self.components is not None
        wide = self.components.astype(np.float64)
        images = np.empty((len(rows), wide.shape[1]))
        for start in range(0, len(rows), _AT_ONCE):
            some = slice(start, start + _AT_ONCE)
            images[some] = np.rint(np.clip(rows[some] / self.reach, -1, 1) * 2.0**self._bits) @ wide
        return images
