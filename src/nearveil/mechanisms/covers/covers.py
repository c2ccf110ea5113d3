"""Covers and cells: mechanisms whose message names one set of a public map."""

from abc import abstractmethod
from dataclasses import KW_ONLY, dataclass
from typing import Literal, Self, get_args

import faiss
import numpy as np
import scipy.sparse
from numpy.typing import ArrayLike, NDArray
from sklearn.base import clone
from sklearn.exceptions import NotFittedError

from nearveil.mechanisms.base import (
    Floats,
    TractableRelease,
    candidate_count,
    checked_fraction,
    checked_numbers,
    fingerprint,
    make_guarantee,
)
from nearveil.mechanisms.covers.channel import RandomizedResponse, SubsetSelection, checked_epsilon
from nearveil.mechanisms.covers.learning import Rows, centres, learn_sets, most_wanted, projection
from nearveil.mechanisms.covers.map import MOST_DIMENSIONS, MOST_PROTOTYPES, MapError, PublicMap
from nearveil.mechanisms.message import Message, MessageError
from nearveil.privacy import Guarantee
from nearveil.privacy.events import PureDp
from nearveil.privacy.noise import Source

_OF_THE_GALLERY = ("map_", "members_", "_gallery_digest")
PROTOTYPES = MOST_PROTOTYPES  # a gallery up to this size stands for itself


@dataclass(frozen=True)
class Grouping:
    """Sets of a gallery, and how a client shall choose among them."""

    members: scipy.sparse.csr_array  # ones where an item is in a set
    prototypes: Rows  # features that stand for the gallery
    coverage: NDArray[np.float32]  # the share of what lies around a prototype that a set holds


class MappedRelease(TractableRelease):
    """A message names sets of a public map; the server answers with their items, at most floor(f N) of them."""

    epsilon: float
    candidates: float
    map_: PublicMap
    members_: scipy.sparse.csr_array
    _gallery_digest: str

    def fit_mean(self, mean: ArrayLike, public_digest: str | None = None) -> Self:
        """Take the public mean instead of public rows: it is all that a mapped release needs of them.

        Parameters
        ----------
        mean : array-like of shape (d,)
            As the server published it.
        public_digest : str, optional
            `public_digest` of the server's release, so that messages fit both sides; by default that of the mean.
        """
        row = checked_numbers(mean, "mean")
        if row.ndim != 1:
            raise ValueError(f"mean must be one row; it has {row.ndim} dimensions")
        self.fit(row[None])  # the mean of one row is that row, to the last bit
        if public_digest is not None:
            self._store(_public_digest=str(public_digest))
        return self

    @property
    def public_digest(self) -> str:
        """The fingerprint of the public rows, for :meth:`fit_mean` at the other side."""
        self._check_fitted()
        return str(self._public_digest)

    def index(self, gallery: ArrayLike) -> Self:
        """Build the public map of a gallery, rows of shape (n, d): the server's part, done once and published."""
        features = self.features(gallery, "gallery", lenient=True).astype(np.float32)
        if len(features) < 2:
            raise ValueError("gallery must hold at least two items")
        size = candidate_count(self.candidates, len(features))
        grouping = self._group(features, size)
        self._store(
            map_=_make_map(features, grouping, size),
            members_=grouping.members,
            _gallery_digest=fingerprint(features),
        )
        return self

    def use_map(self, public_map: PublicMap) -> Self:
        """Take the map that a server published: the client's part. The guarantee holds for any map."""
        self._check_fitted()
        if not isinstance(public_map, PublicMap):
            raise MapError("public_map must be a PublicMap; PublicMap.from_bytes reads one")
        if len(public_map.components) != self.n_features_in_:
            raise MapError(f"public_map must be for {self.n_features_in_} features, as public_X had")
        if public_map.set_size != candidate_count(self.candidates, public_map.n_items):
            raise MapError(
                f"public_map must have sets of {self.candidates:g} of its items, the candidates of this release"
            )
        self._store(without=_OF_THE_GALLERY, map_=public_map)  # members belong to another map
        return self

    def with_epsilon(self, epsilon: float) -> Self:
        """Return a release with the same public rows, gallery and map at another epsilon, with its own guarantee."""
        other: Self = clone(self).set_params(epsilon=epsilon).fit_mean(self.mean_, self.public_digest)
        other._store(**{name: value for name, value in vars(self).items() if name in _OF_THE_GALLERY})
        return other

    def _make_guarantee(self) -> Guarantee:
        return set_guarantee(self.epsilon)

    def _log_density(self, messages: list[Message], features: Floats) -> Floats:
        public_map = self._map()
        good = public_map.choose(features)
        named = np.stack([self.read_sets(message) for message in messages])
        odds = float(self._channel(public_map).odds)
        return np.where((named[:, None, :] == good[None, :, None]).any(axis=2), np.log(odds), 0.0)

    def _fit(self, features: Floats, labels: NDArray[np.int64] | None) -> None:
        del features, labels  # the public mean is all that both sides need; the map carries the rest
        checked_epsilon(self.epsilon)
        checked_fraction(self.candidates)

    def _prepare(self, features: Floats) -> Floats:
        if not hasattr(self, "members_"):
            raise NotFittedError(f"{type(self).__name__} must index its gallery first: call index(gallery)")
        if fingerprint(features.astype(np.float32)) != self._gallery_digest:
            raise ValueError("gallery must be the one that was indexed, in the same order: call index(gallery) anew")
        return features

    def _release(self, features: Floats, source: Source) -> list[Message]:
        public_map = self._map()
        named = self._channel(public_map).sample(public_map.choose(features), source).astype(np.int32)
        return self._messages(source, sets=named.reshape(len(features), -1))

    def _rank(self, message: Message, prepared: Floats) -> Floats:
        del prepared  # which items are in a set was settled when the gallery was indexed
        named = self.read_sets(message)
        return np.asarray(self.members_[named].sum(axis=0) > 0, dtype=np.float64)

    def read_sets(self, message: Message) -> NDArray[np.int64]:
        """Return the sets that a message names, checked."""
        self._check_message(message)
        channel = self._channel(self._map())
        size = channel.size if isinstance(channel, SubsetSelection) else 1
        named = message["sets"]
        if named.dtype != np.int32 or named.shape != (size,) or ((named < 0) | (named >= channel.n_sets)).any():
            raise MessageError(f"message must name {size} of the {channel.n_sets} sets")
        return named.astype(np.int64)

    def _public_parts(self) -> tuple[object, ...]:
        # Not epsilon: which set a message names means the same at any, and the client's choice need not be the map's.
        return (self._map().map_id,)

    def _map(self) -> PublicMap:
        if not hasattr(self, "map_"):
            raise NotFittedError(
                f"{type(self).__name__} needs a map: call index(gallery) at the server, use_map(map) at the client"
            )
        return self.map_

    @abstractmethod
    def _channel(self, public_map: PublicMap) -> RandomizedResponse | SubsetSelection:
        """Return the channel for a map."""

    @abstractmethod
    def _group(self, features: Rows, set_size: int) -> Grouping:
        """Make the sets of a gallery, features of norm one (or zero)."""


def set_guarantee(epsilon: float) -> Guarantee:
    """Return the guarantee of a message that names sets: pure epsilon, whatever the map."""
    epsilon = checked_epsilon(epsilon)
    theorem = "exact odds of a channel that names sets"
    return make_guarantee(epsilon, 0.0, theorem, "docs/theory/covers.md", events=(PureDp(epsilon),))


def as_sparse(sets: NDArray[np.float32]) -> scipy.sparse.csr_array:
    """Return sets of ones and zeros, shape (n_sets, n_items), as a sparse array."""
    return scipy.sparse.csr_array(sets.astype(np.uint8))


def choose_prototypes(features: Rows, members: scipy.sparse.csr_array) -> tuple[Rows, NDArray[np.float32]]:
    """Return prototypes of a gallery and what the sets cover around each.

    A small gallery stands for itself, in an order that tells no item's position; a large one has k-means centroids.
    """
    if len(features) <= PROTOTYPES:
        order = np.lexsort(features.T)
        return features[order], members.toarray().T[order].astype(np.float32)
    found = centres(features[:: max(1, len(features) // (64 * PROTOTYPES))], PROTOTYPES, seed=0, passes=5)
    index = faiss.IndexFlatL2(features.shape[1])
    index.add(found)
    nearest = index.search(features, 1)[1][:, 0]
    one = np.ones(len(features), dtype=np.float32)
    around = scipy.sparse.csr_array((one, (nearest, np.arange(len(features)))), shape=(PROTOTYPES, len(features)))
    counts = np.maximum(around.sum(axis=1), 1)
    return found, np.asarray((around @ members.T.astype(np.float32)).toarray() / counts[:, None], dtype=np.float32)


def _make_map(features: Rows, grouping: Grouping, size: int) -> PublicMap:
    components = projection(features, MOST_DIMENSIONS).astype(np.float16)
    placed = grouping.prototypes @ components.astype(np.float32)
    largest = np.abs(placed).max(axis=1, keepdims=True)
    scaled = np.divide(127 * placed, largest, out=np.zeros_like(placed), where=largest > 0)
    return PublicMap(
        components=components,
        prototypes=np.rint(scaled).astype(np.int8),
        coverage=np.rint(255 * grouping.coverage).astype(np.uint8),
        n_items=len(features),
        set_size=size,
    )


@dataclass(eq=False, repr=False)
class Covers(MappedRelease):
    """Name one of a few overlapping sets of the gallery, learned so that this very channel finds most neighbours.

    The message names the good set of the record with odds e^epsilon against every other set, exactly. The server
    returns the set's items, the client re-ranks them with its true feature. Popular items enter many sets. Few sets
    are best where epsilon is small: then the good one is named more often.

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
    Seeing this message changes the odds between any two records by at most a factor of 55.
    """

    name = "covers"

    epsilon: float
    candidates: float = 0.1
    _: KW_ONLY
    n_sets: int | None = None

    def _channel(self, public_map: PublicMap) -> RandomizedResponse:
        return RandomizedResponse(self.epsilon, public_map.n_sets)

    def _group(self, features: Rows, set_size: int) -> Grouping:
        if self.n_sets is not None and not 2 <= self.n_sets <= len(features):
            raise ValueError("n_sets must be at least 2 and at most the number of items in the gallery")
        members = learn_sets(features, set_size, self.epsilon, self.n_sets)
        prototypes, coverage = choose_prototypes(features, members)
        return Grouping(members, prototypes, coverage)


CellKind = Literal["kmeans", "balanced"]
Response = Literal["randomized", "subset"]


@dataclass(eq=False, repr=False)
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

    epsilon: float
    candidates: float = 0.1
    _: KW_ONLY
    kind: CellKind = "kmeans"
    response: Response = "randomized"
    n_cells: int | None = None

    def _channel(self, public_map: PublicMap) -> RandomizedResponse | SubsetSelection:
        if self.response == "randomized":
            return RandomizedResponse(self.epsilon, public_map.n_sets)
        largest = -(-public_map.n_items // public_map.n_sets)
        return SubsetSelection(self.epsilon, public_map.n_sets, max(1, public_map.set_size // largest))

    def _group(self, features: Rows, set_size: int) -> Grouping:
        count = self._count(len(features), set_size)
        centroids = centres(features, count, seed=0)
        if self.kind == "kmeans" and self.response == "randomized":
            members = as_sparse(most_wanted(-_squared_distances(features, centroids).T, set_size))
        else:
            cells = assign_balanced(_squared_distances(features, centroids))
            ones = np.ones(len(features), dtype=np.uint8)
            members = scipy.sparse.csr_array((ones, (cells, np.arange(len(features)))), shape=(count, len(features)))
            members.sort_indices()
        return Grouping(members, centroids, np.eye(count, dtype=np.float32))

    def _count(self, n_items: int, set_size: int) -> int:
        """Return the number of cells, checked."""
        if self.kind not in get_args(CellKind):
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


def assign_balanced(distances: NDArray[np.float32]) -> NDArray[np.int64]:
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


def _squared_distances(features: Rows, centroids: Rows) -> NDArray[np.float32]:
    """Return squared distances, shape (n, n_cells), up to the rows' own norms."""
    return np.asarray((centroids**2).sum(axis=1) - 2 * features @ centroids.T, dtype=np.float32)
