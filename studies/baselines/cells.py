"""Cells: the simple case of covers, with sets by k-means, and subset selection (``docs/theory/covers.md``)."""

from dataclasses import KW_ONLY, dataclass
from fractions import Fraction
from functools import cached_property
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from sklearn.base import clone

from nearveil.cluster import SpreadRows
from nearveil.mechanisms.covers.channels import (
    WORD,
    Indices,
    RandomizedResponse,
    check_channel_epsilon,
    compute_exp,
)
from nearveil.mechanisms.covers.covers import GALLERY_ATTRIBUTES, MappedRelease
from nearveil.mechanisms.covers.learning import Report, Rows, centres, projection, to_directions
from nearveil.mechanisms.covers.maps import MOST_DIMENSIONS, PublicMap
from nearveil.mechanisms.covers.members import make_map, make_members
from nearveil.privacy.checks import check_choice
from nearveil.privacy.events import NamedSets
from nearveil.privacy.noise import Source

CellKind = Literal["kmeans", "balanced"]
Response = Literal["randomized", "subset"]


def check_good(good: Indices, n_sets: int) -> None:
    """Raise if a set is out of range: it would reveal itself."""
    if ((good < 0) | (good >= n_sets)).any():
        raise ValueError(f"good must be one of the {n_sets} sets")


@dataclass(frozen=True)
class SubsetSelection:
    """Name `size` cells; subsets with the good cell are e^epsilon times as likely (Wang et al. 2016, Ye, Barg 2018)."""

    epsilon: float  # from 1e-6 to 40
    n_sets: int
    size: int  # from 1 to ``n_sets - 1``

    def __post_init__(self) -> None:
        check_channel_epsilon(self.epsilon)
        if not 2 <= self.n_sets < 1 << 20:
            raise ValueError("n_sets must be from 2 to a million")
        if not 1 <= self.size < self.n_sets:
            raise ValueError("size must be from 1 to n_sets - 1")

    @cached_property
    def _threshold(self) -> int:
        """Number of words that include the good cell, rounded down."""
        weight = self.size * compute_exp(self.epsilon)
        return int(WORD * weight / (weight + self.n_sets - self.size))

    @property
    def odds(self) -> Fraction:
        """Exact odds of a subset with the good cell against one without, at most e^epsilon."""
        return Fraction(self._threshold * (self.n_sets - self.size), (WORD - self._threshold) * self.size)

    @property
    def event(self) -> NamedSets:
        """The privacy loss of one message, whatever the map contains (``docs/theory/covers.md``, Theorem 3)."""
        return NamedSets(self.epsilon, self.n_sets, self.size)

    @property
    def hit(self) -> float:
        """Probability that the good cell is included."""
        return self._threshold / WORD

    def sample(self, good: Indices, source: Source) -> Indices:
        """Draw a subset for each row, sorted, so that the position of the good cell reveals nothing."""
        check_good(good, self.n_sets)
        included = source.words(len(good)) < np.uint64(self._threshold)
        order = _draw_orders(len(good), self.n_sets, source)
        # Move the good cell to the front or the end of the random order; the rest stays uniform.
        ranks = np.where(order == good[:, None], np.where(included, -1, self.n_sets)[:, None], 0)
        chosen = np.take_along_axis(order, np.argsort(ranks, 1, "stable"), axis=1)[:, : self.size]
        return np.sort(chosen, axis=1)


def _draw_orders(n: int, length: int, source: Source) -> Indices:
    """Return uniformly random orders, shape (n, length), by random keys; draws again if two keys are equal."""
    while True:
        keys = source.words(n * length).reshape(n, length)
        order = np.argsort(keys, axis=1)
        ranked = np.take_along_axis(keys, order, axis=1)
        if (ranked[:, 1:] != ranked[:, :-1]).all():
            return order


@dataclass(eq=False, repr=False)
class Cells(MappedRelease):
    """Name a cell of the gallery, by randomised response or subset selection.

    Parameters
    ----------
    epsilon : float
        From 1e-6 to 40. Pure: delta is 0.
    candidates : float, default=0.1
        The largest fraction f of the gallery in an answer.
    kind : {"kmeans", "balanced"}, default="kmeans"
        "kmeans": a cell contains the floor(f N) items nearest to its centroid, and cells overlap.
        "balanced": every item is in one cell, and the sizes of cells differ by at most one.
    response : {"randomized", "subset"}, default="randomized"
        "randomized" names one cell. "subset" names as many balanced cells as fit into an answer.
    n_cells : int, optional
        By default the fewest that cover the gallery, about ``1 / f``; four times as many for "subset".

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> X = load_digits().data
    >>> cells = Cells(2.0, 0.2, kind="balanced").fit(X[:300]).index(X[300:])
    >>> cells.release(X[0]).mechanism, cells.map_.n_sets
    ('cells', 6)
    """

    name = "cells"

    epsilon: float
    candidates: float = 0.1
    _: KW_ONLY
    kind: CellKind = "kmeans"
    response: Response = "randomized"
    n_cells: int | None = None

    def with_epsilon(self, epsilon: float) -> Self:
        """Return a release with the same public rows, gallery and map at another epsilon."""
        other: Self = clone(self).set_params(epsilon=epsilon).fit_space(self.space_, self.public_digest)
        return other._with_attributes(**{name: vars(self)[name] for name in GALLERY_ATTRIBUTES if name in vars(self)})

    @cached_property
    def _channel(self) -> RandomizedResponse | SubsetSelection:
        public_map = self._map()
        if self.response == "randomized":
            return RandomizedResponse(self.epsilon, public_map.n_sets)
        largest = -(-public_map.n_items // public_map.n_sets)
        return SubsetSelection(self.epsilon, public_map.n_sets, max(1, public_map.set_size // largest))

    def _group(self, features: SpreadRows, set_size: int, report: Report) -> tuple[csr_array, PublicMap]:
        count = self._count(len(features), set_size)
        report("making cells", 0.0)
        rows = to_directions(features.gather("gathering rows"), self.space_)
        centroids = centres(rows, count, seed=0)
        if self.kind == "kmeans" and self.response == "randomized":
            nearest = np.argpartition(_squared_distances(rows, centroids).T, set_size - 1, axis=1)[:, :set_size]
            members = make_members(nearest, len(rows))
        else:
            cells = assign_balanced(_squared_distances(rows, centroids))
            ones = np.ones(len(rows), dtype=np.uint8)
            members = csr_array((ones, (cells, np.arange(len(rows)))), shape=(count, len(rows)))
            members.sort_indices()
        components = projection(rows, MOST_DIMENSIONS).astype(np.float16)
        prototypes = centroids @ components.astype(np.float32)
        return members, make_map(components, prototypes, np.eye(count, dtype=np.float32), len(rows), set_size)

    def _count(self, n_items: int, set_size: int) -> int:
        """Check the parameters and return the number of cells."""
        check_choice(self.kind, "kind", CellKind)
        check_choice(self.response, "response", Response)
        if set_size == n_items:
            raise ValueError("candidates must be less than the whole gallery")
        least = -(-n_items // set_size)
        usual = least if self.response == "randomized" else min(4 * least, n_items)
        count = usual if self.n_cells is None else self.n_cells
        whole = self.kind == "balanced" or self.response == "subset"
        if not max(2, least if whole else 2) <= count <= n_items:
            raise ValueError(f"n_cells must be from {max(2, least)} to the {n_items} items of the gallery")
        return count


def assign_balanced(distances: NDArray[np.float32]) -> NDArray[np.int64]:
    """Assign rows to cells of equal sizes, to within one; rows that would lose most choose first."""
    n, count = distances.shape
    room = np.full(count, n // count)
    room[: n % count] += 1
    cells = np.full(n, -1)
    waiting = np.arange(n)
    while len(waiting):
        open_cells = np.flatnonzero(room)
        near = distances[np.ix_(waiting, open_cells)]
        nearest = near.argmin(axis=1)
        loss = np.partition(near, 1, axis=1)[:, 1] - near.min(axis=1) if len(open_cells) > 1 else near[:, 0]
        for number, cell in enumerate(open_cells):
            candidates = np.flatnonzero(nearest == number)
            accepted = candidates[np.argsort(-loss[candidates], kind="stable")[: room[cell]]]
            cells[waiting[accepted]] = cell
            room[cell] -= len(accepted)
        waiting = waiting[cells[waiting] < 0]
    return cells


def _squared_distances(features: Rows, centroids: Rows) -> NDArray[np.float32]:
    """Return squared distances less the squared norms of the rows, shape (n, n_cells)."""
    return np.asarray((centroids**2).sum(axis=1) - 2 * features @ centroids.T, dtype=np.float32)
