"""Covers, and other mechanisms with messages that name a set of a public map."""

import math
from abc import abstractmethod
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import csr_array
from sklearn.exceptions import NotFittedError

from nearveil.cluster import SpreadRows, connect, cut_rows, use_one_thread
from nearveil.mechanisms.base import TractableRelease
from nearveil.mechanisms.covers.channels import RandomizedResponse, check_channel_epsilon, set_guarantee
from nearveil.mechanisms.covers.learning import Report, Rows, learn_sets
from nearveil.mechanisms.covers.maps import (
    MOST_DIMENSIONS,
    MOST_SETS,
    MapError,
    PublicMap,
    count_least_sets,
    count_prototypes,
)
from nearveil.mechanisms.covers.members import (
    make_members,
    map_around_prototypes,
    measure_local,
    reach_items,
    update_members,
)
from nearveil.mechanisms.messages import (
    COVERS,
    Floats,
    Message,
    MessageError,
    candidate_count,
    check_fraction,
    fingerprint,
)
from nearveil.metrics import CENTRED, ScoreSpace
from nearveil.privacy import Guarantee
from nearveil.privacy.checks import check_range, check_rows
from nearveil.privacy.events import PureDp
from nearveil.privacy.noise import Source

_CHUNK = 1 << 18  # numbers of features in memory at once: a block fits into a processor's cache
GALLERY_ATTRIBUTES = ("map_", "members_", "drift_", "_gallery_digest")
_REPLACEMENTS, _REPLACEMENTS_A_CHANGE = 4096, 8  # items of a large gallery that an update may move to other sets
DUE = 0.1  # the part of a gallery that may change before you should learn its sets again


class MappedRelease(TractableRelease):
    """A release that names sets of a public map; the server returns their items, at most floor(f N)."""

    epsilon: float
    candidates: float
    map_: PublicMap
    members_: csr_array
    _space: ScoreSpace  # of a gallery with a metric; other features are centred and of norm one
    _gallery_digest: str

    def fit_space(self, space: ScoreSpace, public_digest: str | None = None) -> Self:
        """Return a copy fitted to a gallery's metric; `public_digest` is that of the server's release.

        Neighbours in :meth:`index` are those by the metric. The guarantee holds for any space.
        """
        rows = check_rows(space.mean[None], "mean")  # the mean of one row is that row, to the last bit
        digest = fingerprint(rows, None) if public_digest is None else str(public_digest)
        return self._fit_public(rows, None, digest)._with_attributes(_space=space)

    @property
    def space_(self) -> ScoreSpace:
        """The space in which neighbours are compared."""
        self._check_fitted()
        return self.__dict__.get("_space") or ScoreSpace(CENTRED, self.mean_)

    @property
    def public_digest(self) -> str:
        """Fingerprint of the public rows, for :meth:`fit_space` on the other side."""
        self._check_fitted()
        return str(self._public_digest)

    def index(self, gallery: ArrayLike, *, report: Report | None = None, cluster: Any = None) -> Self:
        """Return a copy with the public map of a gallery, built once, on the server.

        `report` is called with the current stage and the completed fraction of the work, from 0 to 1. The map is the
        same to the last bit on any `cluster` (:func:`nearveil.cluster.connect`).
        """
        features = self.gallery_features(gallery)
        with connect(cluster) as workers:
            return self.index_features(SpreadRows.cut(features, workers), report=report)

    def gallery_features(self, gallery: ArrayLike) -> Rows:
        """Return the item rows of public rows in 32 bits, computed by blocks to save memory."""
        rows = np.asarray(gallery)
        if rows.ndim != 2 or len(rows) < 2:
            check_rows(rows, "gallery")  # raises an error about other mistakes first
            raise ValueError("gallery must contain at least two items")
        return _encode_rows(rows, self)

    def _unit_rows(self, finite: Floats, name: str, *, lenient: bool) -> Floats:
        space = self.__dict__.get("_space")
        if space is None or finite.shape[1] != self.n_features_in_:
            return super()._unit_rows(finite, name, lenient=lenient)
        with np.errstate(over="ignore", invalid="ignore"):
            rows: Floats = space.make_directions(space.encode(finite), lenient=lenient)
        if not np.isfinite(rows).all():
            raise ValueError(f"{name} contains numbers so large that their squares overflow; scale them down")
        return rows

    def index_features(self, features: SpreadRows, *, report: Report | None) -> Self:
        """Build the map from item rows in partitions; see :meth:`index`."""
        size = candidate_count(self.candidates, len(features))
        report = report or (lambda _stage, _done: None)
        with use_one_thread():
            members, public_map = self._group(features, size, report)
            digest = _hash_rows(features)
        report("making the map", 1.0)
        return self._with_attributes(map_=public_map, members_=members, drift_=0.0, _gallery_digest=digest)

    @property
    def reach_(self) -> float:
        """Fraction of the items that are in a set; other items are never returned."""
        self._check_indexed()
        return float(np.count_nonzero(np.bincount(self.members_.indices)) / self.members_.shape[1])

    def use_map(self, public_map: PublicMap) -> Self:
        """Return a copy with a server's map, for the client. The guarantee holds for any map."""
        self._check_fitted()
        if not isinstance(public_map, PublicMap):
            raise MapError("public_map must be a PublicMap; parse bytes with PublicMap.from_bytes")
        if len(public_map.components) != self.space_.width:
            raise MapError(f"public_map must be for {self.space_.width} features, as public_X had")
        if public_map.set_size != candidate_count(self.candidates, public_map.n_items):
            raise MapError(
                f"public_map must have sets of {self.candidates:g} of its items, the candidates of this release"
            )
        client = self._with_attributes(map_=public_map)
        for name in GALLERY_ATTRIBUTES[1:]:
            client.__dict__.pop(name, None)
        return client

    def _make_guarantee(self) -> Guarantee:
        return set_guarantee(self._channel.event if "map_" in vars(self) else PureDp(self.epsilon))

    def _with_attributes(self, **attributes: Any) -> Self:
        release = super()._with_attributes(**attributes)
        if "map_" in attributes:  # its number of sets is a part of the event
            release.__dict__["_guarantee"] = release._make_guarantee()
        return release

    def _log_density(self, messages: list[Message], features: Floats) -> Floats:
        good = self._map().choose(features)
        named = self._read_sets(messages)
        odds = float(self._channel.odds)
        return np.where((named[:, None, :] == good[None, :, None]).any(axis=2), np.log(odds), 0.0)

    def _fit(self, features: Floats, labels: NDArray[np.int64] | None) -> None:
        del features, labels  # both sides need the public mean and the map only
        check_channel_epsilon(self.epsilon)
        check_fraction(self.candidates)

    def _prepare(self, features: NDArray[Any]) -> NDArray[Any]:
        self._check_indexed()
        if self._gallery_digest != _hash_rows(SpreadRows.cut(features)):
            raise ValueError("gallery must be the indexed one, in the same order: call index(gallery) again")
        return features

    def _release(self, features: Floats, source: Source) -> list[Message]:
        named = self._channel.sample(self.map_.choose(features), source).astype(np.int32)
        return self._messages(source, sets=named.reshape(len(features), -1))

    def _rank(self, message: Message, prepared: Floats) -> Floats:
        del prepared  # members_ is already known
        named = self.read_sets(message)
        return np.asarray(self.members_[named].sum(axis=0) > 0, dtype=np.float64)

    def read_sets(self, message: Message) -> NDArray[np.int64]:
        """Check a message and return the sets that it names."""
        self._check_messages([message])
        return self._read_sets([message]).reshape(-1)

    def _read_sets(self, messages: list[Message]) -> NDArray[np.int64]:
        """Return the sets that checked messages name, one row for each."""
        channel, named = self._channel, [message.arrays.get("sets") for message in messages]
        if all(sets is not None and sets.dtype == np.int32 and sets.shape == (channel.size,) for sets in named):
            rows: NDArray[np.int64] = np.array(named, dtype=np.int64).reshape(-1, channel.size)
            if ((rows >= 0) & (rows < channel.n_sets)).all():
                return rows
        raise MessageError(f"message must name {channel.size} of the {channel.n_sets} sets")

    def _public_parts(self) -> tuple[object, ...]:
        # Not epsilon: a named set means the same at any epsilon, and the client may choose another than the server.
        return (self._map().map_id,)

    def _map(self) -> PublicMap:
        if not hasattr(self, "map_"):
            raise NotFittedError(
                f"{type(self).__name__} needs a map: call index(gallery) at the server, use_map(map) at the client"
            )
        return self.map_

    def _check_indexed(self) -> None:
        if not hasattr(self, "members_"):
            raise NotFittedError(f"{type(self).__name__} must index its gallery first: call index(gallery)")

    @property
    @abstractmethod
    def _channel(self) -> Any:
        """The channel for the map."""

    @abstractmethod
    def _group(self, features: SpreadRows, set_size: int, report: Report) -> tuple[csr_array, PublicMap]:
        """Make the sets of a gallery and their map from features of norm one (or zero), and report progress."""


def spread_features(release: MappedRelease, gallery: SpreadRows) -> SpreadRows:
    """Return the item rows of public rows in partitions; see :meth:`MappedRelease.gallery_features`."""
    return gallery.then(_encode_rows, release, width=release.space_.width)


def _encode_rows(rows: NDArray[Any], release: MappedRelease) -> Rows:
    space = release.space_
    if rows.shape[1] != len(space.mean):
        raise ValueError(f"gallery must have {len(space.mean)} columns, as public_X had")
    encoded = np.empty((len(rows), space.width), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for block in cut_rows(len(rows), max(1, _CHUNK // rows.shape[1])):
            encoded[block] = space.encode(check_rows(rows[block], "gallery"))
    if not np.isfinite(encoded).all():
        raise ValueError("gallery contains numbers so large that their differences overflow; scale them down")
    return encoded


def _hash_rows(features: SpreadRows) -> str:
    """Return the fingerprint of a gallery, from those of its partitions."""
    digests = list(features.map(fingerprint, stage="taking fingerprints"))
    return digests[0] if len(digests) == 1 else fingerprint(*digests)


def _check_positions(before: ArrayLike, n_items: int, n_before: int) -> NDArray[np.int64]:
    positions = np.asarray(before)
    if positions.shape != (n_items,) or not np.issubdtype(positions.dtype, np.integer):
        raise ValueError(f"before must hold one whole number for each of the {n_items} items")
    old = positions[positions >= 0]
    if (positions < -1).any() or (old >= n_before).any() or np.bincount(old, minlength=1).max() > 1:
        raise ValueError(f"before must name each of the {n_before} earlier items at most once, or be -1")
    return positions.astype(np.int64)


@dataclass(eq=False, repr=False)
class Covers(MappedRelease):
    """Name one of a few overlapping sets of the gallery, learned to maximise recall for this channel.

    The message names the record's good set with odds of exactly e^epsilon against every other set (Theorem 1 of
    ``docs/theory/covers.md``). The server returns the set's items, and the client ranks them by its true feature.
    Popular items are in many sets. With a small epsilon few sets are best: the good one is named more often.

    Parameters
    ----------
    epsilon : float
        From 1e-6 to 40. Pure: delta is 0.
    candidates : float, default=0.1
        The fraction f of the gallery in each answer.
    n_sets : int, optional
        The number L of sets; by default, the one with the best recall on held-out items of the gallery.
    reach : float, default=0.0
        The minimum fraction of items that are in a set. With 0, recall is best, but items that are rarely a
        neighbour may be in no set and are then never returned. With 1 every item can be returned, at a lower average
        recall for a small epsilon; :meth:`nearveil.Index.publish` takes 1 by default.

    Attributes
    ----------
    map_ : PublicMap
        The map to publish.
    members_ : csr array of shape (n_sets, n_items)
        The items of each set; only on the server.
    reach_ : float
        The fraction of items that are in a set.
    drift_ : float
        Items added or removed by :meth:`update` since the sets were learned, as a fraction of the gallery.

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

    name = COVERS

    epsilon: float
    candidates: float = 0.1
    _: KW_ONLY
    n_sets: int | None = None
    reach: float = 0.0

    def update(self, gallery: ArrayLike, before: ArrayLike) -> Self:
        """Return a copy with sets and map for a slightly changed gallery, without learning them again.

        Remaining items keep their sets. New items, and replacements of removed items, enter the sets with the largest
        coverage around them, until every set has floor(f N) items. In a large gallery replacements come from a sample,
        and the map keeps its coverage. Clients need the new map; messages for the old one do not fit it.

        If new items resemble old ones, recall hardly falls. Learn the sets again with :meth:`index` when `drift_`
        exceeds `DUE`, a tenth of the gallery, or when new items are far from all old ones.

        `before` is the position of each item in the previously indexed or updated gallery; -1 for a new item.

        Examples
        --------
        >>> from sklearn.datasets import load_digits
        >>> X = load_digits().data
        >>> covers = Covers(epsilon=4.0, candidates=0.2, n_sets=6).fit(X[:300]).index(X[300:1700])
        >>> covers = covers.update(X[320:1750], [*range(20, 1400), *[-1] * 50])
        >>> covers.map_.n_items, covers.map_.set_size, round(covers.drift_, 3)
        (1430, 286, 0.049)
        """
        features = SpreadRows.cut(self.gallery_features(gallery))
        return self.update_features(features, before)._with_attributes(_gallery_digest=_hash_rows(features))

    def update_features(self, features: SpreadRows, before: ArrayLike) -> Self:
        """Update from features in partitions, without the digest for :meth:`rank`; see :meth:`update`.

        Of a large gallery this reads new items and a sample of the others alone.
        """
        self._check_indexed()
        n, old = len(features), self.map_
        positions, size = _check_positions(before, n, self.members_.shape[1]), candidate_count(self.candidates, n)
        changed = 2 * int((positions < 0).sum()) + self.members_.shape[1] - n
        every_item = n <= count_prototypes(n, old.n_sets, size) or len(old.prototypes) == old.n_items
        replaced = n if every_item else _REPLACEMENTS + _REPLACEMENTS_A_CHANGE * changed
        members = update_members(self.members_, features, self.space_, old, positions, replaced, size, self.reach)
        if every_item:
            public_map = map_around_prototypes(features, self.space_, members, old.components)
        else:
            public_map = replace(old, n_items=n, set_size=size)
        drift = self.drift_ + changed / n
        return self._with_attributes(map_=public_map, members_=members, drift_=drift, _gallery_digest="")

    def _fit(self, features: Floats, labels: NDArray[np.int64] | None) -> None:
        super()._fit(features, labels)
        check_range(self.reach, "reach", 0, 1)

    @cached_property
    def _channel(self) -> RandomizedResponse:
        return RandomizedResponse(self.epsilon, self._map().n_sets)

    def _group(self, features: SpreadRows, set_size: int, report: Report) -> tuple[csr_array, PublicMap]:
        if self.n_sets is not None and not 2 <= self.n_sets <= len(features):
            raise ValueError("n_sets must be at least 2 and at most the number of items in the gallery")
        n = len(features)
        least = count_least_sets(n, set_size, self.reach)
        if self.n_sets is not None and self.n_sets * set_size < self.reach * n - 1e-9:
            least = -(-math.ceil(self.reach * n - 1e-9) // set_size)
            raise ValueError(f"n_sets must be at least {least}, so that sets of this size reach so many items")
        if least * set_size < self.reach * n - 1e-9:
            raise ValueError(f"candidates must be larger, or reach smaller: {MOST_SETS} sets reach fewer items")
        learned = learn_sets(features, self.space_, set_size, self.epsilon, self.n_sets, report, least=least)
        report("making the map", 0.8)
        members = learned.sets.astype(np.uint8)
        components = learned.directions[:, :MOST_DIMENSIONS].astype(np.float16)
        if self.reach > 0:
            initial = map_around_prototypes(features, self.space_, members, components)
            local = measure_local(features, self.space_, initial)
            members = make_members(reach_items(members.indices.reshape(-1, set_size), local, self.reach), n)
        return members, map_around_prototypes(features, self.space_, members, components, learned)
