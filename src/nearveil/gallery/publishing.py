"""Published maps of a gallery: how messages are answered by one, and how an index keeps them."""

import io
import json
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import scipy.sparse
import sqlalchemy as sa
from numpy.typing import ArrayLike, NDArray

from nearveil.cluster import LOCAL, SpreadRows, connect, cut_rows, use_one_thread
from nearveil.gallery.answers import (
    Answer,
    Bytes,
    Codes,
    Singles,
    codes_from_bytes,
    codes_to_bytes,
    encode_rows,
    make_codes,
    prepare_table,
)
from nearveil.gallery.errors import IndexStoreError, MapChangedError, NotPublishedError, StaleMapError
from nearveil.gallery.items import (
    Ids,
    Snapshot,
    check_open,
    checksum,
    find_deleted_since,
    load_head,
    make_damaged_error,
    parts,
    published,
)
from nearveil.mechanisms import Covers, Message, MessageError, PublicMap
from nearveil.mechanisms.base import fingerprint
from nearveil.mechanisms.covers.covers import DUE, spread_features
from nearveil.mechanisms.covers.learning import Progress
from nearveil.privacy.checks import check_rows, is_integer
from nearveil.storage import Database, FileWatch, Mark


@dataclass(frozen=True, eq=False)
class Published:
    """A map of a gallery at one revision, with all that a server needs to answer messages made for it.

    Made by :meth:`learn`, or by :meth:`nearveil.gallery.Index.publish`, which also keeps it.

    Attributes
    ----------
    revision : int
        Of the gallery that it was learned on.
    release : Covers
        The server's half, with the sets. Fitted on the public mean alone, so that a client who knows the
        mean, the digest and the map can make the same: ``Covers(...).fit_mean(mean, public_digest).use_map(map)``.
    table : Codes
        The public table that codes are read by.
    codes : ndarray of shape (n, b), uint8
        Of all items of the gallery at that revision.
    ids : ndarray of shape (n,), uint32
        Of the same items, rising.
    code_bytes : int, "auto" or None
        As it was asked for.
    """

    revision: int
    release: Covers
    table: Codes = field(repr=False)
    codes: Bytes = field(repr=False)
    ids: Ids = field(repr=False)
    code_bytes: int | Literal["auto"] | None = "auto"

    @classmethod
    def learn(
        cls,
        snapshot: Snapshot,
        epsilon: float,
        candidates: float = 0.1,
        *,
        public: ArrayLike | None = None,
        n_sets: int | None = None,
        reach: float = 0.0,
        code_bytes: int | Literal["auto"] | None = "auto",
        progress: Progress | None = None,
        cluster: Any = None,
    ) -> Self:
        """Learn the sets of a gallery.

        Parameters
        ----------
        snapshot : Snapshot
        epsilon : float
            For one message.
        candidates : float, default=0.1
            The fraction f of the gallery that an answer holds.
        public : array-like of shape (d,) or (n, d), optional
            The mean that features are centred by, or public rows to take it from; the gallery's own otherwise.
        n_sets : int, optional
            Chosen on held-out items where it is not given.
        reach : float, default=0.0
            The part of the items that must be in some set, as of :class:`nearveil.mechanisms.Covers`.
        code_bytes : int, "auto" or None, default="auto"
            As of :class:`nearveil.search.Retriever`.
        progress : callable, optional
            Called with what is done now, in words, and the part of all work that is done, from 0 to 1.
        cluster : str or dask.distributed.Client, optional
            Whose workers search and encode; see :func:`nearveil.cluster.connect`. The map is the same to the last bit.

        Returns
        -------
        Published
        """
        if len(snapshot) < 2:
            raise ValueError("the index must hold at least two items before a map can be learned")
        with use_one_thread(), connect(cluster) as workers:  # workers have one, too
            rows = snapshot.spread(LOCAL if snapshot.in_memory else workers)
            mean = _find_mean(rows) if public is None else _read_mean(public, rows.shape[1])
            release = Covers(epsilon, candidates, n_sets=n_sets, reach=reach).fit_mean(mean)
            features = spread_features(release, rows)
            if snapshot.in_memory:
                features = SpreadRows.cut(features.gather("centring rows"), workers)
            table = make_codes(features, code_bytes)
            release.fit_mean(mean, _hash_public(mean, table))
            release.index_features(features, progress=progress)
            codes = encode_rows(table, features)
        return cls(snapshot.revision, release, table, codes, snapshot.ids, code_bytes)

    def update(self, snapshot: Snapshot) -> "Published":
        """Bring the map in step with a gallery that has changed a little, without learning it anew.

        Mean, table of codes and the codes of items that stayed are kept. See :meth:`nearveil.mechanisms.Covers.update`.

        Parameters
        ----------
        snapshot : Snapshot

        Returns
        -------
        Published
        """
        places = self._find_places(snapshot.ids)
        release = self.release.with_epsilon(self.release.epsilon)
        features = spread_features(release, snapshot.spread(LOCAL))
        release.update_features(features, places)
        codes, new = self.codes[np.maximum(places, 0)], np.flatnonzero(places < 0)
        if len(new):
            codes[new] = prepare_table(self.table, features).encode(features.take(new, "taking rows"))
        return Published(snapshot.revision, release, self.table, codes, snapshot.ids, self.code_bytes)

    def measure_drift(self, snapshot: Snapshot) -> float:
        """Return the part of the gallery that an update to it would have changed since the map was learned.

        Parameters
        ----------
        snapshot : Snapshot

        Returns
        -------
        float
            With what earlier updates changed.
        """
        stayed = int((self._find_places(snapshot.ids) >= 0).sum())
        changed = len(snapshot) + len(self.ids) - 2 * stayed
        return float(self.release.drift_ + changed / max(1, len(snapshot)))

    def _find_places(self, ids: Ids) -> NDArray[np.int64]:
        """Return where items are in this map; -1 for those that came later."""
        found = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        return np.where(self.ids[found] == ids, found, -1)

    @property
    def public_id(self) -> str:
        """The fingerprint that messages for this map carry."""
        return self.release.public_id

    @property
    def public_digest(self) -> str:
        """The fingerprint of the mean and the table: codes are read by the table that a message was made with."""
        return self.release.public_digest

    @property
    def reach(self) -> float:
        """The part of the items that are in any set: the others are never returned."""
        return self.release.reach_

    @property
    def map(self) -> PublicMap:
        """What clients choose their set by."""
        return self.release.map_

    @property
    def mean(self) -> Singles:
        """The public mean, shape (d,)."""
        return np.asarray(self.release.mean_, dtype=np.float32)

    def answer(self, message: Message, alive: NDArray[np.bool_] | None = None) -> Answer:
        """Answer one message that was made for this map.

        Parameters
        ----------
        message : Message
        alive : ndarray of shape (n,), bool, optional
            Which items may still be handed out; all by default. Others take the places of deleted ones, so that all
            answers are of one size.

        Returns
        -------
        Answer
            Its ids are those of the index. Without images.
        """
        size, living = self.map.set_size, np.ones(len(self.ids), np.bool_) if alive is None else alive
        # Not `rank`, which scores the whole gallery: covers settled their sets when they were indexed.
        rows = self._find_members(message)
        rows = rows[living[rows]][:size]
        if len(rows) < size:
            others = np.setdiff1d(np.flatnonzero(living), rows, assume_unique=True)[: size - len(rows)]
            rows = np.sort(np.concatenate([rows, others]))
        if len(rows) < size:
            raise StaleMapError("fewer items are left than an answer holds: publish anew")
        rows = rows[np.argsort(self.ids[rows], kind="stable")]
        return Answer(self.ids[rows].astype(np.uint32, copy=False), self.codes[rows])

    def _find_members(self, message: Message) -> NDArray[np.intp]:
        """Return the positions of all items of the sets that a message names, rising."""
        items, starts = self.release.members_.indices, self.release.members_.indptr
        named = [items[starts[number] : starts[number + 1]] for number in self.release.read_sets(message).tolist()]
        return np.unique(np.concatenate(named)).astype(np.intp, copy=False)

    def to_bytes(self) -> bytes:
        """Return all of it as bytes: for the server's own keeping, not for the wire."""
        out = io.BytesIO()
        self._write(out)
        return out.getvalue()

    def _write(self, file: io.IOBase) -> None:
        """Write all of it, in pieces: codes of a large gallery fill much of the memory."""
        release = self.release
        about = {
            "revision": self.revision,
            "epsilon": float(release.epsilon),
            "candidates": float(release.candidates),
            "n_sets": None if release.n_sets is None else int(release.n_sets),
            "reach": float(release.reach),
            "drift": release.drift_,
            "gallery": release._gallery_digest,
            "code_bytes": self.code_bytes,
        }
        arrays: dict[str, NDArray[Any]] = {
            "told": _to_array(json.dumps(about).encode()),
            "mean": self.mean,
            "map": _to_array(self.map.to_bytes()),
            "table": _to_array(codes_to_bytes(self.table)),
            "set_items": release.members_.indices,
            "set_starts": release.members_.indptr,
            "codes": self.codes,
            "ids": self.ids,
        }
        np.savez(file, allow_pickle=False, **arrays)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read what :meth:`to_bytes` wrote.

        Parameters
        ----------
        data : bytes

        Returns
        -------
        Published
        """
        return cls._read(io.BytesIO(data))

    @classmethod
    def _read(cls, file: io.IOBase) -> Self:
        """Read what :meth:`_write` wrote."""
        with np.load(file, allow_pickle=False) as arrays:
            about = json.loads(arrays["told"].tobytes())
            table, mean = codes_from_bytes(arrays["table"].tobytes()), arrays["mean"]
            # Versions before reach and updates wrote neither.
            reach, drift = about.get("reach", 0.0), about.get("drift", 0.0)
            release = Covers(about["epsilon"], about["candidates"], n_sets=about["n_sets"], reach=reach)
            release.fit_mean(mean, _hash_public(mean, table)).use_map(PublicMap.from_bytes(arrays["map"].tobytes()))
            items, starts = arrays["set_items"], arrays["set_starts"]
            members = scipy.sparse.csr_array(
                (np.ones(len(items), np.uint8), items, starts), shape=(len(starts) - 1, len(arrays["ids"]))
            )
            release._store(members_=members, drift_=drift, _gallery_digest=about["gallery"])
            return cls(about["revision"], release, table, arrays["codes"], arrays["ids"], about["code_bytes"])


def _check_keep(keep: int) -> None:
    if not is_integer(keep, 1):
        raise ValueError("keep must be a whole number of at least 1")


def _find_mean(rows: SpreadRows) -> Singles:
    """Return the mean of a gallery, in 32 bits: as it goes over the wire."""
    total = sum(rows.map(_add_rows, stage="taking the mean"))
    return np.asarray(total / len(rows), dtype=np.float32)


def _add_rows(rows: Singles) -> NDArray[np.float64]:
    return np.asarray(rows.sum(axis=0, dtype=np.float64))


def _read_mean(public: ArrayLike, dimension: int) -> Singles:
    """Return the mean of public rows, or the mean that was given, in 32 bits."""
    given = np.asarray(public)
    rows = given[None] if given.ndim == 1 else given
    for some in cut_rows(len(rows)):
        if check_rows(rows[some], "public").shape[1] != dimension:
            raise ValueError(f"public must have {dimension} columns, as the index has")
    return np.asarray(rows.mean(axis=0, dtype=np.float64), dtype=np.float32)


def _hash_public(mean: Singles, table: Codes) -> str:
    """Return the fingerprint of what is public besides the map. Messages carry it.

    It covers the table: otherwise old clients would read codes of a new table by the old one.
    """
    return fingerprint(mean, _to_array(codes_to_bytes(table)))


def _to_array(data: bytes) -> Bytes:
    return np.frombuffer(data, np.uint8)


KEPT_MAPS = 2  # by default: the newest, and one for clients that fetched it just before
_PART = 16 << 20  # bytes in one row: far below what a database takes


class Current(NamedTuple):
    """The newest map, and whether the gallery has changed since it was learned."""

    published: Published
    stale: bool


class _PartWriter(io.RawIOBase):
    """A file that is written into rows of a database."""

    def __init__(self, connection: sa.Connection, number: int) -> None:
        self._connection, self._number, self._held = connection, number, bytearray()
        self.count = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._held += data
        while len(self._held) >= _PART:
            self._insert(bytes(self._held[:_PART]))
            del self._held[:_PART]
        return len(data)

    def flush(self) -> None:
        if self._held:
            self._insert(bytes(self._held))
            self._held.clear()

    def _insert(self, data: bytes) -> None:
        row = {"number": self._number, "part": self.count, "data": data}
        row["crc"] = checksum(self._number, self.count, data)
        self._connection.execute(sa.insert(parts).values(row))
        self.count += 1


class _PartReader(io.RawIOBase):
    """A file that lies in rows of a database, checked; one of them is in memory."""

    def __init__(self, connection: sa.Connection, number: int, count: int, where: str) -> None:
        self._connection, self._number, self._count, self._where = connection, number, count, where
        self._place, self._part, self._data = 0, -1, b""
        length = sa.select(sa.func.sum(sa.func.length(parts.c.data)), sa.func.count()).where(parts.c.number == number)
        self._size, held = connection.execute(length).one()
        if held != count:
            raise make_damaged_error(where, "what was published")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = offset + (0, self._place, int(self._size))[whence]
        return self._place

    def readinto(self, buffer: Any) -> int:
        part, start = divmod(self._place, _PART)
        if part >= self._count:
            return 0
        if part != self._part:
            self._data, self._part = self._fetch(part), part
        some = self._data[start : start + len(buffer)]
        buffer[: len(some)] = some
        self._place += len(some)
        return len(some)

    def _fetch(self, part: int) -> bytes:
        query = sa.select(parts).where(parts.c.number == self._number, parts.c.part == part)
        row = self._connection.execute(query).one_or_none()
        full = part + 1 == self._count or (row is not None and len(row.data) == _PART)
        if row is None or not full or checksum(self._number, part, row.data) != row.crc:
            raise make_damaged_error(self._where, "what was published")
        return bytes(row.data)


_SAVING = 20.0  # times as long as usual others are waited for: hours of learning would be lost


class MapStore:
    """Maps of one index, newest last; those that were read stay in memory."""

    def __init__(self, database: Database, where: str) -> None:
        self._database, self._where = database, where
        self._read: dict[int, Published] = {}
        self._lock = threading.Lock()

    def save(self, new: Published, keep: int) -> None:
        """Keep a map, and of the older ones as many as shall still be answered."""
        with self._database.begin_write(times=_SAVING) as connection:
            load_head(connection, self._where, lock=True)
            check_open(connection, self._where)  # a map is learned for a while: it may have become private meanwhile
            kept = connection.execute(sa.select(published.c.number, published.c.revision)).all()
            if any(row.revision > new.revision for row in kept):
                raise StaleMapError("a map of a newer revision was published meanwhile; this one is not kept")
            numbers = sorted(row.number for row in kept)
            number = numbers[-1] + 1 if numbers else 1
            with _PartWriter(connection, number) as file:
                new._write(file)
                file.flush()
                values = {"number": number, "revision": new.revision, "public_id": new.public_id, "parts": file.count}
            connection.execute(sa.insert(published).values(**values, crc=checksum(*values.values())))
            old = [*numbers, number][:-keep]
            connection.execute(sa.delete(parts).where(parts.c.number.in_(old)))
            connection.execute(sa.delete(published).where(published.c.number.in_(old)))

    def load_newest(self, connection: sa.Connection) -> Published:
        """Return the newest map."""
        listed = self._list_maps(connection)
        if not listed:
            raise NotPublishedError(f"index {self._where}: nothing was published yet: call publish(epsilon)")
        return self._load(connection, max(listed))

    def load_all(self, connection: sa.Connection, *, read: bool = True) -> list[Published]:
        """Return all maps, the newest first; without `read`, those that are in memory."""
        numbers, held = sorted(self._list_maps(connection), reverse=True), self._read
        return [self._load(connection, number) for number in numbers if read or number in held]

    def list_numbers(self, connection: sa.Connection) -> set[int]:
        """Return the numbers of all maps."""
        return set(self._list_maps(connection))

    def reset(self) -> None:
        """Forget what was read."""
        with self._lock:
            self._read = {}

    def find_map(self, connection: sa.Connection, public_id: str) -> Published:
        """Return the map that a message names."""
        fitting = [number for number, name in self._list_maps(connection).items() if name == public_id]
        if fitting:
            return self._load(connection, max(fitting))
        newest = self.load_newest(connection)
        raise MapChangedError(public_id, newest.public_id, newest.revision)

    def _list_maps(self, connection: sa.Connection) -> dict[int, str]:
        """Return the fingerprints of all maps by number, and forget those that are kept no more. None is private."""
        check_open(connection, self._where)
        rows = connection.execute(sa.select(published)).all()
        for number, revision, public_id, count, told in rows:
            if checksum(number, revision, public_id, count) != told:
                raise make_damaged_error(self._where, "what was published")
        listed = {row.number: row.public_id for row in rows}
        with self._lock:
            self._read = {number: kept for number, kept in self._read.items() if number in listed}
        return listed

    def _load(self, connection: sa.Connection, number: int) -> Published:
        known = self._read.get(number)
        if known is not None:
            return known
        count = connection.execute(sa.select(published.c.parts).where(published.c.number == number)).scalar_one()
        found = Published._read(io.BufferedReader(_PartReader(connection, number, count, self._where)))
        with self._lock:
            self._read[number] = found
        return found


_REMEMBERED = 7  # maps, besides the one that is asked about, whose deletions stay in memory


class Stamp(NamedTuple):
    """Stands for the state of an index: equal as long as nothing was added, deleted or published."""

    revision: int  # of the index
    maps: tuple[int, ...]  # numbers of the maps that are kept, rising
    replaced: int = 0  # how often another database was found in its place: its numbers may be the same


class MapPublisher(ABC):
    """What an index publishes, and how it answers. Part of :class:`nearveil.gallery.Index`."""

    def __init__(self, database: Database, where: str) -> None:
        self._database, self._where = database, where
        self._store = MapStore(database, where)
        self._replaced = 0
        self._watch = FileWatch(database.path) if database.is_sqlite else None
        self._stamped: tuple[Mark, Stamp] | None = None
        self._gone: dict[int, tuple[int, NDArray[np.int64]]] = {}
        self._alive: dict[tuple[str, int], tuple[int, NDArray[np.bool_]]] = {}

    @abstractmethod
    def snapshot(self) -> Snapshot:
        """Return all ids and features as they are now; later changes do not reach it."""

    def publish(
        self,
        epsilon: float,
        candidates: float = 0.1,
        *,
        public: ArrayLike | None = None,
        n_sets: int | None = None,
        reach: float = 0.0,
        code_bytes: int | Literal["auto"] | None = "auto",
        keep: int = KEPT_MAPS,
        progress: Progress | None = None,
        cluster: Any = None,
    ) -> Published:
        """Learn a map of the gallery as it is now, and keep it. Items may come and go meanwhile.

        Parameters
        ----------
        epsilon, candidates, public, n_sets, reach, code_bytes, progress, cluster
            As of :meth:`Published.learn`.
        keep : int, default=2
            How many maps are answered from now on, this one included. The one before it serves clients that have
            just fetched it.

        Returns
        -------
        Published

        Raises
        ------
        StaleMapError
            If somebody published a map of a newer revision meanwhile; that one stays.
        PrivateIndexError
            If the rows are private.
        """
        self.assert_open()
        _check_keep(keep)
        found = Published.learn(
            self.snapshot(),
            epsilon,
            candidates,
            public=public,
            n_sets=n_sets,
            reach=reach,
            code_bytes=code_bytes,
            progress=progress,
            cluster=cluster,
        )
        self._store.save(found, keep)
        return found

    def assert_open(self) -> None:
        """Raise PrivateIndexError if the rows are private: then nothing of them may be shown.

        That stands in the index itself; it holds for every process, whatever its configuration says.
        """
        with self._database.begin_read() as connection:
            check_open(connection, self._where)

    def republish(self, keep: int = KEPT_MAPS, *, progress: Progress | None = None, cluster: Any = None) -> Published:
        """Bring the map in step with the gallery, on the same terms, where the gallery has changed.

        It is updated while at most a tenth of the gallery has changed since it was learned, and learned anew after
        that; :meth:`publish` learns it anew in any case.

        Parameters
        ----------
        keep : int, default=2
            As of :meth:`publish`.
        progress, cluster : optional
            As of :meth:`publish`.

        Returns
        -------
        Published
            The newest map, now in step.
        """
        newest, stale = self.current()
        if not stale:
            return newest
        release, now = newest.release, self.snapshot()
        try:
            if len(now) > 1 and newest.measure_drift(now) <= DUE:
                self.assert_open()
                _check_keep(keep)
                found = newest.update(now)
                self._store.save(found, keep)
                return found
            return self.publish(
                release.epsilon,
                release.candidates,
                public=newest.mean,
                n_sets=release.n_sets,
                reach=release.reach,
                code_bytes=newest.code_bytes,
                keep=keep,
                progress=progress,
                cluster=cluster,
            )
        except StaleMapError:  # somebody was faster: theirs may be in step
            return self.republish(keep, progress=progress, cluster=cluster)

    def current(self) -> Current:
        """Return the newest map, and whether the gallery has changed since it was learned.

        Returns
        -------
        Current
            A tuple (published, stale).
        """
        with self._database.begin_read() as connection:
            newest = self._store.load_newest(connection)
            return Current(newest, load_head(connection, self._where).revision != newest.revision)

    def answer(self, message: Message) -> Answer:
        """Answer a message by the map that it was made for, without items that were deleted since.

        Parameters
        ----------
        message : Message

        Returns
        -------
        Answer
            With the index's ids.

        Raises
        ------
        MapChangedError
            If that map is not kept any more.
        """
        if not isinstance(message, Message):
            raise MessageError("message must be a Message; Message.from_bytes reads one")
        with self._database.begin_read() as connection:
            found = self._store.find_map(connection, message.public_id)
            gone = self._deleted_since(connection, found.revision)
        return found.answer(message, ~np.isin(found.ids, gone))

    def stamp(self) -> Stamp:
        """Return what stands for the state of the index now, whoever changed it. An unchanged file is not read again.

        Returns
        -------
        Stamp
        """
        if self._watch is None:
            return self._read_stamp()
        try:
            mark = self._watch.mark()
        except OSError:
            raise IndexStoreError(f"index {self._where}: its file is gone: put it back") from None
        known = self._stamped
        if known is not None and mark is not None and known[0] == mark:
            return known[1]
        if known is not None and (mark is None or known[0].opening != mark.opening):
            self._reset()
        stamp = self._read_stamp()
        if mark is not None:
            # Marked before it was read: what is committed meanwhile has another mark.
            self._stamped = (mark, stamp)
        return stamp

    def is_at(self, stamp: Stamp) -> bool:
        """Return whether the index is in a state, if that is known without waiting for a disk or a database.

        Parameters
        ----------
        stamp : Stamp
            Of an earlier call of :meth:`stamp`.

        Returns
        -------
        bool
            False also where it is not known, as in PostgreSQL: then ask :meth:`stamp`, which may wait.
        """
        known = self._stamped
        return known is not None and known[1] == stamp and self._watch is not None and self._watch.is_at(known[0])

    def alive(self, published: Published) -> NDArray[np.bool_]:
        """Return which items of a map the index still holds.

        Parameters
        ----------
        published : Published

        Returns
        -------
        ndarray of shape (n,), bool
            In the order of its ids; not to be written to. The same array as long as none of them was deleted.
        """
        stamp = self.stamp()
        key = published.public_id, published.revision
        until, alive = self._alive.get(key, (-1, None))
        if alive is not None and until == stamp.revision:
            return alive
        with self._database.begin_read() as connection:
            now = ~np.isin(published.ids, self._deleted_since(connection, published.revision))
        if alive is None or not np.array_equal(alive, now):
            alive = now
            alive.setflags(write=False)
        # Under the revision that was read first: what was deleted meanwhile is looked for again.
        others = [item for item in self._alive.items() if item[0] != key]
        self._alive = {**dict(others[-_REMEMBERED:]), key: (stamp.revision, alive)}
        return alive

    def maps(self, *, read: bool = True) -> list[Published]:
        """Return all maps that are kept, the newest first.

        Parameters
        ----------
        read : bool, default=True
            Whether maps are read that are not in memory; they are left out otherwise.

        Returns
        -------
        list of Published
        """
        with self._database.begin_read() as connection:
            return self._store.load_all(connection, read=read)

    def _deleted_since(self, connection: sa.Connection, revision: int) -> NDArray[np.int64]:
        """Return what was deleted after a revision; read anew only when something has changed."""
        now = load_head(connection, self._where).revision
        until, gone = self._gone.get(revision, (-1, np.empty(0, np.int64)))
        if until != now:
            gone = find_deleted_since(connection, revision, self._where)
            self._gone = {**self._gone, revision: (now, gone)}
        return gone

    def _read_stamp(self) -> Stamp:
        """Ask the database, on one view of it."""
        with self._database.begin_read() as connection:
            revision = load_head(connection, self._where).revision
            return Stamp(revision, tuple(sorted(self._store.list_numbers(connection))), self._replaced)

    def _reset(self) -> None:
        """Forget what was read: another database stands in the place of the one that was known."""
        self._replaced += 1
        self._gone, self._alive = {}, {}
        self._store.reset()
