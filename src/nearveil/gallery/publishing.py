"""Published maps of a gallery: learn and update them, answer messages from them, and store them in an index."""

import json
import threading
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from tempfile import SpooledTemporaryFile
from typing import IO, TYPE_CHECKING, Any, Literal, NamedTuple, Self

import numpy as np
import sqlalchemy as sa
from numpy.typing import ArrayLike, NDArray

from nearveil.cluster import LOCAL, SpreadRows, connect, cut_rows, use_one_thread
from nearveil.gallery import store
from nearveil.gallery.answers import Answer, read_details
from nearveil.gallery.codes import (
    Bytes,
    CodeBytes,
    Codes,
    Singles,
    codes_from_bytes,
    codes_to_bytes,
    learn_codes,
    sample_rows,
)
from nearveil.gallery.errors import (
    CorruptedIndexError,
    IndexStoreError,
    MapChangedError,
    NotPublishedError,
    StaleMapError,
)
from nearveil.gallery.items import Ids, IndexSnapshot
from nearveil.lazy import LateModule
from nearveil.mechanisms.covers.channels import check_channel_epsilon
from nearveil.mechanisms.covers.maps import MOST_SETS, PublicMap
from nearveil.mechanisms.messages import COVERS, Message, MessageError, candidate_count, fingerprint
from nearveil.metrics import CENTRED, NORMALIZED, Metric, ScoreSpace
from nearveil.privacy.checks import check_integer, check_rows
from nearveil.progress import Progress, start_stage, tick_percent
from nearveil.storage import Database

if TYPE_CHECKING:
    from nearveil.mechanisms import public as papers
    from nearveil.mechanisms.covers import covers
else:  # to learn and to answer, not to search an index
    covers = LateModule("nearveil.mechanisms.covers.covers", "gallery")
    papers = LateModule("nearveil.mechanisms.public", "gallery")

_HEADER = "told"  # the stored name of the header in the archive
_SPACE_ROWS = 1 << 18  # of a gallery, to learn the constants of a metric from
_MEASURED_ROWS = 1 << 12  # that are read together to measure clipping, and of the items that a map has
_ANCHORS = 500  # public rows of a mechanism besides covers: a sample of the gallery


@dataclass(frozen=True)
class MapTerms:
    """The parameters of a map."""

    epsilon: float = 4.0  #: the privacy cost of one message
    candidates: float = 0.1  #: the fraction of the gallery in an answer
    n_sets: int | None = None  #: by default chosen on held-out items
    #: The fraction of the items that must be in some set, as in :class:`nearveil.mechanisms.Covers`. Messages never
    #: return the others. 0 gives the highest average recall at a small epsilon.
    reach: float = 1.0
    code_bytes: CodeBytes = "auto"  #: the size of a code, as in :class:`nearveil.search.Retriever`
    mechanism: str = COVERS  #: of messages: covers, or one of the papers' (docs/howto/mechanisms.md)
    #: The key of metadata with the class of an item, for mechanisms as published; by default its folder, in its name.
    labels: str | None = None
    allow_unsound: bool = False  #: required for mechanisms as published

    def updated(self, **options: Any) -> "MapTerms":
        """Return the terms with the options that are not None."""
        return replace(self, **{name: value for name, value in options.items() if value is not None})

    def make_release(self) -> "covers.Covers":
        """Return covers with these parameters, which are not fitted yet."""
        return covers.Covers(self.epsilon, self.candidates, n_sets=self.n_sets, reach=self.reach)

    def check(self, items: int, state: str = "nothing was changed", *, exact: bool = True) -> None:
        """Raise unless a map of `items` items can be learned, or of fewer if not `exact`; `state` ends the message."""
        try:
            if items < 2:
                raise ValueError("a map needs at least two items")
            check_channel_epsilon(self.epsilon)
            size = candidate_count(self.candidates, items)
            if self.mechanism != COVERS:
                papers.check_served(self.mechanism, allow_unsound=self.allow_unsound)
                return
            if not 0 <= self.reach <= 1:
                raise ValueError("reach must be a fraction of the items, from 0 to 1")
            if self.n_sets is not None and not 2 <= self.n_sets <= items:
                raise ValueError(f"n_sets must be from 2 to {items:,}, the number of items")
            most = (self.n_sets or MOST_SETS) * (size if exact else self.candidates * items)
            if most < self.reach * items * (1 - 1e-9):
                larger = "candidates" if self.n_sets is None else "n_sets"
                raise ValueError(f"{larger} must be larger, or reach smaller: the sets cannot contain so many items")
        except ValueError as error:
            raise ValueError(f"{error} ({items:,} items); {state}") from None


@dataclass(frozen=True, eq=False)
class Published:
    """A map of a gallery at one revision, with everything a server needs to answer messages made for it.

    Create one with :meth:`learn`, or with :meth:`nearveil.gallery.Index.publish`, which also stores it.
    """

    revision: int  #: of the gallery that the map was learned on
    #: The server's half, with the sets. Fitted on the public space alone, so that a client with the space, the digest
    #: and the map can build the same: ``Covers(...).fit_space(space, public_digest).use_map(map)``.
    release: "covers.Covers"
    table: Codes = field(repr=False)  #: decodes codes; public
    codes: Bytes = field(repr=False)  #: of all items of the gallery at that revision; shape (n, b), uint8
    ids: Ids = field(repr=False)  #: of the same items, increasing; shape (n,), uint32
    terms: MapTerms  #: the parameters of the map
    #: The share of the 10 nearest that the codes keep, measured on a sample of the items; None in maps of 0.2.
    code_recall: float | None = None

    @classmethod
    def learn(
        cls,
        snapshot: IndexSnapshot,
        terms: MapTerms,
        *,
        metric: Metric = "cosine",
        public: ArrayLike | None = None,
        progress: Progress | None = None,
        cluster: Any = None,
    ) -> Self:
        """Learn the sets of a gallery.

        Parameters
        ----------
        public : array-like of shape (n, d), optional
            Rows from which the constants of the metric are learned, which do not change its order: by default the
            gallery's.
        progress : callable, optional
            ``progress(text, total)`` starts a stage and returns a function that is called with the units done.
        cluster : str or dask.distributed.Client, optional
            The workers that search and encode; see :func:`nearveil.cluster.connect`. The map is the same to the last
            bit.
        """
        if len(snapshot) < 2:
            raise ValueError("the index must have at least two items before a map can be learned")
        report = tick_percent((progress or start_stage)("learning the map", 100))
        with use_one_thread(), connect(cluster) as workers:  # workers have one thread, too
            rows = snapshot.spread(LOCAL if snapshot.in_memory else workers)
            space = _learn_space(metric, rows, public)
            release = terms.make_release().fit_space(space)
            features = covers.spread_features(release, rows)
            if snapshot.in_memory:
                features = SpreadRows.cut(features.gather("centring rows"), workers)
            table, codes, recall = learn_codes(features, terms.code_bytes, space)
            release = release.fit_space(space, _hash_public(space, table)).index_features(features, report=report)
        return cls(snapshot.revision, release, table, codes, snapshot.ids, terms, recall)

    def update(self, snapshot: IndexSnapshot) -> "Published":
        """Update the map for a gallery that has changed a little, without learning it again.

        The mean, the table of codes and the codes of remaining items do not change. See
        :meth:`nearveil.mechanisms.Covers.update`.
        """
        positions = self._find_positions(snapshot.ids)
        features = covers.spread_features(self.release, snapshot.spread(LOCAL))
        release = self.release.update_features(features, positions)
        codes, new = self.codes[np.maximum(positions, 0)], np.flatnonzero(positions < 0)
        if len(new):
            codes[new] = self.table.prepare(features, self.space).encode(features.take(new, "taking rows"))
        return Published(snapshot.revision, release, self.table, codes, snapshot.ids, self.terms, self.code_recall)

    def measure_drift(self, snapshot: IndexSnapshot) -> float:
        """Return the fraction of the gallery that has changed since the map was learned, with earlier updates."""
        unchanged = int((self._find_positions(snapshot.ids) >= 0).sum())
        changed = len(snapshot) + len(self.ids) - 2 * unchanged
        return float(self.release.drift_ + changed / max(1, len(snapshot)))

    def can_encode(self, snapshot: IndexSnapshot) -> bool:
        """Return whether the codes hold new items: none is clipped much more than those they were learned from."""
        # Norms are about one. Where all are, clipping changes a cosine little, and any new item is clipped a little.
        features = covers.spread_features(self.release, snapshot.spread(LOCAL))
        is_new = self._find_positions(snapshot.ids) < 0
        new, old = np.flatnonzero(is_new), np.flatnonzero(~is_new)[:: max(1, len(snapshot) // _MEASURED_ROWS)]

        if not len(new):
            return True

        def measure(positions: NDArray[np.intp]) -> float:
            blocks = [positions[block] for block in cut_rows(len(positions), _MEASURED_ROWS)]
            rows = (features.take(block, "taking rows") for block in blocks)
            return max((self.table.measure_clipping(block, self.space) for block in rows), default=0.0)

        return measure(new) <= measure(old) + (0.1 if self.space.metric in NORMALIZED else 0.01)

    def _find_positions(self, ids: Ids) -> NDArray[np.int64]:
        """Return the positions of items in this map; -1 for newer items."""
        positions = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        return np.where(self.ids[positions] == ids, positions, -1)

    @property
    def public_id(self) -> str:
        """The fingerprint that messages for this map carry."""
        return self.release.public_id

    @property
    def public_digest(self) -> str:
        """The fingerprint of the mean and the table of codes."""
        return self.release.public_digest

    @property
    def reach(self) -> float:
        """The fraction of the items that are in any set: messages never return the others."""
        return self.release.reach_

    @property
    def map(self) -> PublicMap:
        """The public map, from which clients choose their set."""
        return self.release.map_

    @property
    def space(self) -> ScoreSpace:
        """The public space in which rows are compared, with the metric."""
        return self.release.space_

    def answer(self, message: Message, alive: NDArray[np.bool_] | None = None) -> Answer:
        """Answer one message that was made for this map, without images.

        `alive`, shape (n,), are the items that may still be returned; all by default. Other items replace deleted ones,
        so that all answers have the same size.
        """
        rows = self._find_candidates(message, np.ones(len(self.ids), np.bool_) if alive is None else alive)
        if len(rows) < self.map.set_size:
            raise StaleMapError("too few items are left for an answer: publish a new map")
        rows = rows[np.argsort(self.ids[rows], kind="stable")]
        return Answer(self.ids[rows].astype(np.uint32, copy=False), self.codes[rows])

    def _find_candidates(self, message: Message, available: NDArray[np.bool_]) -> NDArray[np.intp]:
        """Return the positions of the items in an answer, of those that are available."""
        # `rank` would score the whole gallery; the sets of covers are fixed.
        size, rows = self.map.set_size, np.unique(self.release.members_[self.release.read_sets(message)].indices)
        rows = rows[available[rows]][:size]
        if len(rows) < size:
            padding = np.setdiff1d(np.flatnonzero(available), rows, assume_unique=True)[: size - len(rows)]
            rows = np.sort(np.concatenate([rows, padding]))
        return np.asarray(rows)

    def write(self, file: IO[bytes]) -> None:
        """Write the map to a file, for storage and not for the wire."""
        details, arrays = self._describe_items()
        header = {
            **asdict(self.terms),
            **details,
            "revision": self.revision,
            "metric": self.space.metric,
            "scale": self.space.scale,
            "balance": self.space.balance,
            "code_recall": self.code_recall,
        }
        arrays |= {
            _HEADER: _to_array(json.dumps(header, default=lambda number: number.item()).encode()),
            "mean": self.space.mean.astype(np.float32),
            "map": _to_array(self.map.to_bytes()),
            "table": _to_array(codes_to_bytes(self.table)),
            "codes": self.codes,
            "ids": self.ids,
        }
        np.savez(file, allow_pickle=False, **arrays)

    def _describe_items(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Return what a server keeps to choose the items of an answer: fields of the header, and arrays."""
        release = self.release
        sets = {"set_items": release.members_.indices, "set_starts": release.members_.indptr}
        return {"drift": release.drift_, "gallery": release._gallery_digest}, sets

    @staticmethod
    def read(file: IO[bytes]) -> "Published":
        """Read a file of :meth:`write`."""
        with np.load(file, allow_pickle=False) as arrays:
            header = {"reach": 0.0, **json.loads(arrays[_HEADER].tobytes())}  # maps of 0.1 have no reach
            table, names = codes_from_bytes(arrays["table"].tobytes()), [part.name for part in fields(MapTerms)]
            constants = (header.get("scale", 1.0), header.get("balance", 1.0))  # missing in maps of 0.2
            space = ScoreSpace(header.get("metric", CENTRED), arrays["mean"], *constants)
            terms = MapTerms(**{name: header[name] for name in names if name in header})
            encoded_map, revision = arrays["map"].tobytes(), header["revision"]
            parts = table, arrays["codes"], arrays["ids"], terms, header.get("code_recall")
            if terms.mechanism != COVERS:
                items: Any = {"score_space": space, "features": arrays["features"], "labels": arrays["labels"]}
                return PublishedRelease(revision, papers.PublicRelease.from_bytes(encoded_map), *parts, **items)
            items, starts = arrays["set_items"], arrays["set_starts"]
            from scipy.sparse import csr_array

            shape = len(starts) - 1, len(arrays["ids"])
            members = csr_array((np.ones(len(items), np.uint8), items, starts), shape=shape)
            fitted = terms.make_release().fit_space(space, _hash_public(space, table))
            release = fitted.use_map(PublicMap.from_bytes(encoded_map))
            drift = header.get("drift", 0.0)
            release = release._with_attributes(members_=members, drift_=drift, _gallery_digest=header["gallery"])
            return Published(revision, release, *parts)


@dataclass(frozen=True, eq=False)
class PublishedRelease(Published):
    """A gallery published for a mechanism of the papers: the server ranks all its rows by each message."""

    release: "papers.PublicRelease"  # type: ignore[assignment]
    score_space: ScoreSpace = field(kw_only=True, repr=False)
    features: Singles = field(kw_only=True, repr=False)  #: of all items, as stored in the index
    labels: NDArray[np.int64] = field(kw_only=True, repr=False)  #: classes of the items; empty without classes

    @property
    def space(self) -> ScoreSpace:
        """The public space in which rows are compared, with the metric."""
        return self.score_space

    @classmethod
    def learn_release(
        cls,
        snapshot: IndexSnapshot,
        terms: MapTerms,
        classes: NDArray[np.str_] | None,
        *,
        metric: Metric = "cosine",
        public: ArrayLike | None = None,
    ) -> Self:
        """Fit a mechanism to public rows: `public`, or a sample of the gallery with the `classes` of its items."""
        papers.check_served(terms.mechanism, allow_unsound=terms.allow_unsound)
        rows = np.asarray(snapshot.features)
        space = _learn_space(metric, SpreadRows.cut(rows), public)
        encoded = SpreadRows.cut(space.encode(rows).astype(np.float32))
        table, codes, recall = learn_codes(encoded, terms.code_bytes, space)
        names, labels = np.unique(classes if classes is not None else np.empty(0, np.str_), return_inverse=True)
        if public is None:
            chosen = np.sort(np.random.default_rng(0).permutation(len(rows))[:_ANCHORS])
            anchors, anchor_labels = rows[chosen], labels[chosen] if len(labels) else labels
        else:
            anchors, anchor_labels = np.asarray(public, np.float32), np.empty(0, np.int64)
        set_size, digest = candidate_count(terms.candidates, len(rows)), _hash_public(space, table)
        about = terms.mechanism, float(terms.epsilon), anchors, anchor_labels
        release = papers.PublicRelease(*about, tuple(names.tolist()), len(rows), set_size, digest)
        if not release.is_sound and not len(anchor_labels):
            raise ValueError(f"public: {terms.mechanism} needs anchors with classes: leave public out")
        parts: Any = {"score_space": space, "features": rows, "labels": labels}
        return cls(snapshot.revision, release, table, codes, snapshot.ids, terms, recall, **parts)

    @cached_property
    def _prepared(self) -> Any:
        return self.release.prepare(self.features, self.labels)

    def _find_candidates(self, message: Message, available: NDArray[np.bool_]) -> NDArray[np.intp]:
        rows = np.flatnonzero(available)
        if len(rows) < self.map.set_size:
            return rows
        return np.asarray(rows[select_first(self.release.rank(message, self._prepared)[rows], self.map.set_size)])

    def _describe_items(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        return {}, {"features": self.features, "labels": self.labels}


def select_first(scores: NDArray[np.float64], count: int) -> NDArray[np.intp]:
    """Return the positions of the highest scores in increasing order; of equal scores, the lowest positions."""
    threshold = np.partition(scores, len(scores) - count)[len(scores) - count]
    above = np.flatnonzero(scores > threshold)
    level = np.flatnonzero(scores == threshold)[: count - len(above)]
    return np.sort(np.concatenate([above, level]))


def _learn_space(metric: Metric, rows: SpreadRows, public: ArrayLike | None) -> ScoreSpace:
    """Learn the constants of a metric from public rows, or from a sample of the gallery."""
    if public is None:
        return ScoreSpace.fit(metric, sample_rows(rows, _SPACE_ROWS))
    values = check_rows(np.atleast_2d(np.asarray(public)), "public")
    if values.shape[1] != rows.shape[1]:
        raise ValueError(f"public must have {rows.shape[1]} columns, as the index has")
    return ScoreSpace.fit(metric, values)


def _hash_public(space: ScoreSpace, table: Codes) -> str:
    """Return the fingerprint of the public space and table, which messages carry."""
    # With the table: otherwise old clients would decode codes of a new table with the old one.
    constants = () if space.metric == CENTRED else (space.metric, space.scale, space.balance)
    return fingerprint(np.asarray(space.mean, np.float32), _to_array(codes_to_bytes(table)), *constants)


def _to_array(data: bytes) -> Bytes:
    return np.frombuffer(data, np.uint8)


KEPT_MAPS = 2  # by default: the newest map, and the one before it for clients that fetched that just before
_SPOOLED = 256 << 20  # bytes of a map that is written or read in memory; a larger one uses a temporary file
_SAVE_TIMEOUT = 20.0  # in multiples of the usual timeout: a map may have taken hours to learn


class Current(NamedTuple):
    """The newest map, and whether the gallery, or its metric, has changed since it was learned."""

    published: Published
    stale: bool


class IndexState(NamedTuple):
    """Identifies the content of an index: equal as long as nothing is added, deleted or published."""

    file: tuple[int, ...]  # identifies the file of a directory
    revision: int
    maps: tuple[int, ...]  # numbers of the stored maps, increasing


class MapPublisher(ABC):
    """The published maps of an index, and answers from them. Base of :class:`nearveil.gallery.Index`."""

    def __init__(self, database: Database, location: str) -> None:
        self._database, self._location = database, location
        self._loaded_maps: dict[str, Published] = {}  # by digest
        self._maps_lock = threading.Lock()

    @abstractmethod
    def snapshot(self) -> IndexSnapshot:
        """Return all ids and features of the current revision."""

    @property
    @abstractmethod
    def metric(self) -> Metric:
        """The metric of the gallery."""

    @abstractmethod
    def texts(self, ids: ArrayLike, kind: Literal["names", "metadata"]) -> list[bytes]:
        """Return names, or JSON of name, external id and metadata, in the order of the ids."""

    def _read_classes(self, ids: Ids, key: str | None) -> NDArray[np.str_] | None:
        """Return the class of each item: its metadata, or by default the folder in its name; None if one has none."""
        details = [read_details(text) for text in self.texts(ids, "metadata")]
        if key is None:
            classes = ["/".join(item.name.split("/")[:-1]) for item in details]
        else:
            classes = [str(item.metadata.get(key, "")) for item in details]
            if not all(classes):
                raise ValueError(f"labels: some items have no {key!r} in their metadata")
        return np.array(classes) if all(classes) else None

    def state(self) -> IndexState:
        """Return the current state, which changes with every change by any process."""
        try:
            file = self._database.reopen_if_replaced()
        except OSError:
            raise IndexStoreError(f"index {self._location}: its file is gone: restore it") from None
        with self._database.begin_read() as connection:
            numbers = tuple(row.number for row in reversed(self._list_maps(connection, required=False)))
            return IndexState(file, store.load_header(connection, self._location).revision, numbers)

    def publish(
        self,
        epsilon: float,
        candidates: float = 0.1,
        *,
        public: ArrayLike | None = None,
        n_sets: int | None = None,
        reach: float = 1.0,
        code_bytes: CodeBytes = "auto",
        mechanism: str = COVERS,
        labels: str | None = None,
        allow_unsound: bool = False,
        keep: int = KEPT_MAPS,
        progress: Progress | None = None,
        cluster: Any = None,
    ) -> Published:
        """Learn a map of the current gallery and store it. Items may be added and deleted meanwhile.

        Parameters
        ----------
        epsilon, candidates, n_sets, reach, code_bytes, mechanism, labels, allow_unsound
            As in :class:`MapTerms`.
        public, progress, cluster
            As in :meth:`Published.learn`.
        keep : int, default=2
            The number of maps that are answered from now on, including this one. The previous one serves clients that
            fetched it just before.

        Raises
        ------
        StaleMapError
            If a map of a newer revision was published meanwhile; that one stays.
        PrivateIndexError
            If the rows are private.
        """
        self.assert_open()
        check_integer(keep, "keep", 1)
        terms = MapTerms(epsilon, candidates, n_sets, reach, code_bytes, mechanism, labels, allow_unsound)
        snapshot, metric = self.snapshot(), self.metric
        learned: Published
        if mechanism == COVERS:
            learned = Published.learn(snapshot, terms, metric=metric, public=public, progress=progress, cluster=cluster)
        else:
            entry = papers.check_served(mechanism, allow_unsound=allow_unsound)
            # Clients fetch the classes with the map, also of a gallery that offers no names.
            classes = self._read_classes(snapshot.ids, labels) if entry.labelled else None
            learned = PublishedRelease.learn_release(snapshot, terms, classes, metric=metric, public=public)
        self._save_map(learned, keep)
        return learned

    def republish(self, keep: int = KEPT_MAPS, *, progress: Progress | None = None, cluster: Any = None) -> Published:
        """Update the map with the same parameters, if the gallery has changed.

        The map is updated while at most a tenth of the gallery has changed since it was learned. It is learned again
        after that, for another metric, and if the codes cannot hold a new item, such as one longer than all others.
        :meth:`publish`, which has the same parameters, always learns it again.
        """
        check_integer(keep, "keep", 1)
        newest, stale = self.current()
        if not stale:
            return newest
        snapshot = self.snapshot()
        try:
            is_same = newest.space.metric == self.metric and newest.terms.mechanism == COVERS
            is_same = is_same and len(snapshot) > 1 and newest.measure_drift(snapshot) <= covers.DUE
            if is_same and newest.can_encode(snapshot):
                updated = newest.update(snapshot)
                self._save_map(updated, keep)
                return updated
            return self.publish(**asdict(newest.terms), keep=keep, progress=progress, cluster=cluster)
        except StaleMapError:  # another process published first: its map may be up to date
            return self.republish(keep, progress=progress, cluster=cluster)

    def assert_open(self) -> None:
        """Raise PrivateIndexError if the rows are private, as the index itself stores, for every process."""
        with self._database.begin_read() as connection:
            store.check_public(connection, self._location)

    def current(self) -> Current:
        """Return the newest map, and whether the gallery, or its metric, has changed since it was learned."""
        with self._database.begin_read() as connection:
            newest = self._load_map(connection, self._list_maps(connection)[0])
            header = store.load_header(connection, self._location)
            return Current(newest, (header.revision, header.metric) != (newest.revision, newest.space.metric))

    def maps(self) -> list[Published]:
        """Return all stored maps, the newest first."""
        with self._database.begin_read() as connection:
            return [self._load_map(connection, row) for row in self._list_maps(connection, required=False)]

    def answer(self, message: Message) -> Answer:
        """Answer a message without deleted items; MapChangedError if its map is no longer stored."""
        if not isinstance(message, Message):
            raise MessageError("message must be a Message; Message.from_bytes reads one")
        with self._database.begin_read() as connection:
            rows = self._list_maps(connection)
            row = next((row for row in rows if row.public_id == message.public_id), None)
            if row is None:
                raise MapChangedError(message.public_id, rows[0].public_id, rows[0].revision)
            published_map = self._load_map(connection, row)
            gone = store.find_deleted_since(connection, published_map.revision)
        return published_map.answer(message, ~np.isin(published_map.ids, gone))

    def alive(self, published: Published) -> NDArray[np.bool_]:
        """Return which items of a map are still in the index: bool, in the order of its ids, read-only."""
        with self._database.begin_read() as connection:
            alive = ~np.isin(published.ids, store.find_deleted_since(connection, published.revision))
        alive.setflags(write=False)
        return alive

    def _list_maps(self, connection: sa.Connection, *, required: bool = True) -> list[Any]:
        """Return the rows of all maps, the newest first, and drop other maps from memory."""
        store.check_public(connection, self._location)
        rows = connection.execute(sa.select(store.published).order_by(store.published.c.number.desc())).all()
        if required and not rows:
            raise NotPublishedError(f"index {self._location} has no published map: call publish(epsilon)")
        digests = {row.digest for row in rows}
        with self._maps_lock:
            self._loaded_maps = {key: value for key, value in self._loaded_maps.items() if key in digests}
        return list(rows)

    def _load_map(self, connection: sa.Connection, row: Any) -> Published:
        """Return a map, from memory or from the database; compare it with its digest."""
        loaded = self._loaded_maps.get(row.digest)
        if loaded is None:
            with SpooledTemporaryFile(_SPOOLED) as file:
                if store.read_map(connection, row.number, file.write) != row.digest:
                    raise CorruptedIndexError(self._location, "a published map")
                file.seek(0)
                loaded = Published.read(file)
            with self._maps_lock:
                self._loaded_maps[row.digest] = loaded
        if (loaded.public_id, loaded.revision) != (row.public_id, row.revision):
            raise CorruptedIndexError(self._location, "a published map")
        return loaded

    def _save_map(self, new: Published, keep: int) -> None:
        """Store a map, and delete all but the newest `keep` maps."""
        with SpooledTemporaryFile(_SPOOLED) as file, self._database.begin_write(times=_SAVE_TIMEOUT) as connection:
            new.write(file)
            store.load_header(connection, self._location, lock=True)
            store.check_public(connection, self._location)  # the rows may have become private while the map was learned
            stored = connection.execute(sa.select(store.published).order_by(store.published.c.number)).all()
            if any(row.revision > new.revision for row in stored):
                raise StaleMapError("a map of a newer revision was published meanwhile; this one is not stored")
            numbers = [*(row.number for row in stored), stored[-1].number + 1 if stored else 1]
            for table in (store.parts, store.published):  # first: the new map takes their space in the file
                connection.execute(sa.delete(table).where(table.c.number.in_(numbers[:-keep])))
            digest = store.write_map(connection, numbers[-1], file)
            row = {"number": numbers[-1], "revision": new.revision, "public_id": new.public_id, "digest": digest}
            connection.execute(sa.insert(store.published).values(row))
