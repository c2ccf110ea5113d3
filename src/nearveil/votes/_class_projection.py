"""From a row to whole numbers of bounded length: a public map that depends on the row alone, to the last bit."""

import math
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import eigh
from sklearn.decomposition import PCA
from sklearn.neighbors import NearestNeighbors
from sklearn.preprocessing import normalize

from nearveil.votes.neighbors import LONGEST, IntegerRows

Rows = NDArray[np.float64]

_EXACT = 53  # bits of a whole number that float64 holds
_COMPONENT_BITS = 15  # of a component, so that it fits into 16 bits with its sign
_AT_ONCE = 4096  # rows
_FLAT = 1e-9  # directions with less than this share of the largest variance are left out
MOST_COMPONENTS = 128
_NEIGHBORS = 5
_ASKED = 4096  # rows whose neighbours are looked for
_RIDGE = 0.05  # share of their mean variance that is added to the variances of neighbours


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
    def learn(cls, public: Rows, n_components: int) -> Self:
        """Learn the directions of public rows in which neighbours differ least, compared with all rows."""
        if len(public) < 2 or not np.ptp(public, axis=0).any():
            raise ValueError("public must hold at least two rows, and rows that differ")
        axes, step = _directions(public, n_components), 2.0**_COMPONENT_BITS - 1
        peaks = np.abs(axes).max(axis=0)
        components = np.rint(axes / peaks * step).astype(np.int16)
        n_directions, reach = axes.shape[1], float(np.abs(public).max())
        bare = cls(components, np.zeros(n_directions), np.ones(n_directions), reach, public.shape[1])
        offset = bare._project(public.mean(axis=0, keepdims=True))[0]
        return cls(components, offset, peaks / step * reach * 2.0**-bare._bits, reach, public.shape[1])

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
            with np.errstate(over="ignore", under="ignore"):  # a warning would tell of a row
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


def _directions(public: Rows, n_components: int) -> Rows:
    """Return directions as columns, those first in which all rows vary most for the variation of neighbours.

    Neighbours are mostly of one class, so what they vary by stands for the variation within classes, which nobody has
    labels for. Directions are scaled so that neighbours vary alike in all of them.
    """
    wanted = min(max(n_components, MOST_COMPONENTS), len(public) - 1, public.shape[1])
    found = PCA(wanted, random_state=0).fit(public)
    kept = found.explained_variance_ > _FLAT * found.explained_variance_[0]
    axes = found.components_[kept].T
    rows = (public - found.mean_) @ axes
    asked = rows[:: -(-len(rows) // _ASKED)]
    search = NearestNeighbors(n_neighbors=min(_NEIGHBORS + 1, len(rows))).fit(normalize(rows))
    others = search.kneighbors(normalize(asked), return_distance=False)[:, 1:]  # the nearest is the row itself
    apart = (asked[:, None] - rows[others]).reshape(-1, rows.shape[1])
    near, all_rows = apart.T @ apart / len(apart) / 2, np.cov(rows.T, ddof=0).reshape(rows.shape[1], -1)
    near += (_RIDGE * np.trace(near) + _FLAT * np.trace(all_rows)) / len(near) * np.eye(len(near))
    _, found_axes = eigh(all_rows, near)
    chosen: Rows = axes @ found_axes[:, ::-1][:, :n_components]
    return chosen
