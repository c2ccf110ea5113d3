"""A published map of a gallery, and how messages are answered by it."""

import io
import json
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import numpy as np
import scipy.sparse
from numpy.typing import ArrayLike, NDArray

from nearveil.gallery.answers import Answer
from nearveil.gallery.codes import Bytes, Codes, Singles, codes_from_bytes, codes_to_bytes, make_codes
from nearveil.gallery.errors import StaleMapError
from nearveil.gallery.items import Ids, Snapshot
from nearveil.mechanisms import Covers, Message, PublicMap
from nearveil.mechanisms.base import checked_rows, fingerprint


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
        code_bytes: int | Literal["auto"] | None = "auto",
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
        code_bytes : int, "auto" or None, default="auto"
            As of :class:`nearveil.search.Retriever`.

        Returns
        -------
        Published
        """
        if len(snapshot) < 2:
            raise ValueError("the index must hold at least two items before a map can be learned")
        mean = _find_mean(snapshot.features if public is None else public, snapshot.features.shape[1])
        release = Covers(epsilon, candidates, n_sets=n_sets).fit_mean(mean)
        features = release.features(snapshot.features, "gallery", lenient=True).astype(np.float32)
        table = make_codes(features, code_bytes)
        release.fit_mean(mean, _hash_public(mean, table)).index(snapshot.features)
        return cls(snapshot.revision, release, table, table.encode(features), snapshot.ids, code_bytes)

    @property
    def public_id(self) -> str:
        """The fingerprint that messages for this map carry."""
        return self.release.public_id

    @property
    def public_digest(self) -> str:
        """The fingerprint of the mean and the table: codes are read by the table that a message was made with."""
        return self.release.public_digest

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
        release = self.release
        about = {
            "revision": self.revision,
            "epsilon": float(release.epsilon),
            "candidates": float(release.candidates),
            "n_sets": None if release.n_sets is None else int(release.n_sets),
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
        out = io.BytesIO()
        np.savez(out, allow_pickle=False, **arrays)
        return out.getvalue()

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
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            about = json.loads(arrays["told"].tobytes())
            table, mean = codes_from_bytes(arrays["table"].tobytes()), arrays["mean"]
            release = Covers(about["epsilon"], about["candidates"], n_sets=about["n_sets"])
            release.fit_mean(mean, _hash_public(mean, table)).use_map(PublicMap.from_bytes(arrays["map"].tobytes()))
            items, starts = arrays["set_items"], arrays["set_starts"]
            members = scipy.sparse.csr_array(
                (np.ones(len(items), np.uint8), items, starts), shape=(len(starts) - 1, len(arrays["ids"]))
            )
            release._store(members_=members, _gallery_digest=about["gallery"])
            return cls(about["revision"], release, table, arrays["codes"], arrays["ids"], about["code_bytes"])


def _find_mean(public: ArrayLike, dimension: int) -> Singles:
    """Return the mean of rows, or the mean that was given, in 32 bits: as it goes over the wire."""
    given = np.asarray(public)
    rows = checked_rows(given[None] if given.ndim == 1 else given, "public")
    if rows.shape[1] != dimension:
        raise ValueError(f"public must have {dimension} columns, as the index has")
    return np.asarray(rows.mean(axis=0), dtype=np.float32)


def _hash_public(mean: Singles, table: Codes) -> str:
    """Return the fingerprint of what is public besides the map.

    Messages carry it. Without the table in it, a gallery that is published again with other codes would answer old
    clients with codes that they read by the old table.
    """
    return fingerprint(mean, _to_array(codes_to_bytes(table)))


def _to_array(data: bytes) -> Bytes:
    return np.frombuffer(data, np.uint8)
