"""Learned covers: the release that comes nearest to the ceiling."""

from typing import Literal, get_args

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

from nearveil.release.covers._channel import RandomizedResponse, SubsetSelection
from nearveil.release.covers._learning import Rows, centres, learned_sets, most_wanted
from nearveil.release.covers._map import PublicMap
from nearveil.release.covers._mapped import Grouping, MappedRelease, membership, standing_for


class Covers(MappedRelease):
    """Name one of a few overlapping sets of the gallery, learned so that this very channel finds most neighbours.

    The message names the good set of the record with odds e^epsilon against every other set, exactly. The
    server returns the set's items, the client re-ranks them with its true feature. Popular items enter many sets.
    Few sets are best where epsilon is small: then the good one is named more often, and what none covers is given up.

    Parameters
    ----------
    epsilon : float
        From 1e-6 to 40. Pure: delta is 0.
    candidates : float, default=0.1
        The fraction f of the gallery that each answer holds.
    n_sets : int, optional
        The number L of sets; by default that with the best recall on a fifth of the gallery, held out.

    Attributes
    ----------
    map_ : PublicMap
        What the server publishes.
    members_ : csr array of shape (n_sets, n_items)
        Which items are in which set; at the server alone.

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> X = load_digits().data
    >>> server = Covers(epsilon=4.0, candidates=0.2, n_sets=6).fit(X[:300]).index(X[300:1700])
    >>> client = Covers(epsilon=4.0, candidates=0.2, n_sets=6).fit(X[:300]).use_map(server.map_)
    >>> message = client.release(X[1700])
    >>> int(server.rank(message, X[300:1700]).sum())
    280
    >>> print(client.guarantee)
    Whoever sees the message can change their odds about which record was asked for by at most a factor of 55.
    """

    name = "covers"

    def __init__(self, epsilon: float, candidates: float = 0.1, *, n_sets: int | None = None) -> None:
        self.epsilon = epsilon
        self.candidates = candidates
        self.n_sets = n_sets

    def _channel(self, public_map: PublicMap) -> RandomizedResponse:
        return RandomizedResponse(self.epsilon, public_map.n_sets)

    def _group(self, features: Rows, set_size: int) -> Grouping:
        if self.n_sets is not None and not 2 <= self.n_sets <= len(features):
            raise ValueError("n_sets must be at least 2 and at most the number of items in the gallery")
        members = learned_sets(features, set_size, self.epsilon, self.n_sets)
        prototypes, coverage = standing_for(features, members)
        return Grouping(members, prototypes, coverage)


Kind = Literal["kmeans", "balanced"]
Response = Literal["randomized", "subset"]


class Cells(MappedRelease):
    """Name a cell of the gallery, by randomised response or subset selection.

    Parameters
    ----------
    epsilon : float
        From 1e-6 to 40. Pure: delta is 0.
    candidates : float, default=0.1
        The fraction f of the gallery that each answer holds at most.
    kind : {"kmeans", "balanced"}, default="kmeans"
        "kmeans": a cell holds the floor(f N) items nearest to its centroid, and cells overlap.
        "balanced": every item is in one cell, and cells are of one size, give or take one.
    response : {"randomized", "subset"}, default="randomized"
        "randomized" names one cell. "subset" names as many balanced cells as an answer affords.
    n_cells : int, optional
        As few as hold the whole gallery, about ``1 / f``, for "randomized"; four times as many for "subset".

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> X = load_digits().data
    >>> cells = Cells(2.0, 0.2, kind="balanced").fit(X[:300]).index(X[300:])
    >>> cells.release(X[0]).mechanism, cells.map_.n_sets
    ('cells', 6)
    """

    name = "cells"

    def __init__(
        self,
        epsilon: float,
        candidates: float = 0.1,
        *,
        kind: Kind = "kmeans",
        response: Response = "randomized",
        n_cells: int | None = None,
    ) -> None:
        self.epsilon = epsilon
        self.candidates = candidates
        self.kind = kind
        self.response = response
        self.n_cells = n_cells

    def _channel(self, public_map: PublicMap) -> RandomizedResponse | SubsetSelection:
        if self.response == "randomized":
            return RandomizedResponse(self.epsilon, public_map.n_sets)
        largest = -(-public_map.n_items // public_map.n_sets)
        return SubsetSelection(self.epsilon, public_map.n_sets, max(1, public_map.set_size // largest))

    def _group(self, features: Rows, set_size: int) -> Grouping:
        count = self._count(len(features), set_size)
        centroids = centres(features, count, seed=0)
        if self.kind == "kmeans" and self.response == "randomized":
            members = membership(most_wanted(-_squared(features, centroids).T, set_size))
        else:
            cells = balanced(_squared(features, centroids))
            ones = np.ones(len(features), dtype=np.uint8)
            members = scipy.sparse.csr_array((ones, (cells, np.arange(len(features)))), shape=(count, len(features)))
            members.sort_indices()
        return Grouping(members, centroids, np.eye(count, dtype=np.float32))

    def _count(self, n_items: int, set_size: int) -> int:
        """Return the number of cells, checked."""
        if self.kind not in get_args(Kind):
            raise ValueError('kind must be "kmeans" or "balanced"')
        if self.response not in get_args(Response):
            raise ValueError('response must be "randomized" or "subset"')
        if set_size == n_items:
            raise ValueError("candidates must be less than the whole gallery: nothing need be asked for that")
        least = -(-n_items // set_size)
        usual = least if self.response == "randomized" else min(4 * least, n_items)
        count = usual if self.n_cells is None else self.n_cells
        whole = self.kind == "balanced" or self.response == "subset"
        if not max(2, least if whole else 2) <= count <= n_items:
            raise ValueError(f"n_cells must be from {max(2, least)} to the {n_items} items of the gallery")
        return count


def balanced(distances: NDArray[np.float32]) -> NDArray[np.int64]:
    """Assign rows to cells of one size, give or take one; rows that lose most by waiting choose first."""
    n, count = distances.shape
    room = np.full(count, n // count)
    room[: n % count] += 1
    cells = np.full(n, -1)
    waiting = np.arange(n)
    while len(waiting):
        open_cells = np.flatnonzero(room)
        near = distances[np.ix_(waiting, open_cells)]
        wish = near.argmin(axis=1)
        loss = np.partition(near, 1, axis=1)[:, 1] - near.min(axis=1) if len(open_cells) > 1 else near[:, 0]
        for place, cell in enumerate(open_cells):
            asking = np.flatnonzero(wish == place)
            taken = asking[np.argsort(-loss[asking], kind="stable")[: room[cell]]]
            cells[waiting[taken]] = cell
            room[cell] -= len(taken)
        waiting = waiting[cells[waiting] < 0]
    return cells


def _squared(features: Rows, centroids: Rows) -> NDArray[np.float32]:
    """Return squared distances, shape (n, n_cells), up to the rows' own norms."""
    return np.asarray((centroids**2).sum(axis=1) - 2 * features @ centroids.T, dtype=np.float32)
