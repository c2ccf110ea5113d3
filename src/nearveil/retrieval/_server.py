"""The server's half: from a message to an answer. It never sees a feature of the query."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from nearveil.mechanisms import Message, Release
from nearveil.mechanisms.covers.covers import MappedRelease
from nearveil.retrieval._answer import Answer
from nearveil.retrieval._codes import Bytes, Singles
from nearveil.retrieval._index_errors import StaleMapError


class Server:
    """Ranks its gallery by messages and answers with the first candidates of each.

    Parameters
    ----------
    mechanism : Release
        Fitted on the public rows, with its map of this gallery where it has one.
    features : ndarray of shape (N, d), float32
        The gallery, centred and of norm one.
    codes : ndarray of shape (N, b), uint8
        Of all items.
    count : int
        Candidates of an answer.
    """

    def __init__(self, mechanism: Release, features: Singles, codes: Bytes, count: int) -> None:
        self._mechanism = mechanism
        # Once, not for every message: projections, embeddings.
        self._prepared = mechanism._prepare(features)  # type: ignore[arg-type]
        self._codes = codes
        self._count = count

    def answer(self, message: Message) -> Answer:
        """Answer one message.

        Parameters
        ----------
        message : Message

        Returns
        -------
        Answer
        """
        return self.answers([message])[0]

    def answers(self, messages: Sequence[Message]) -> list[Answer]:
        """Answer messages; equal ones are ranked once and share their answer.

        Parameters
        ----------
        messages : sequence of Message

        Returns
        -------
        list of Answer
        """
        known: dict[bytes, Answer] = {}
        found = []
        for message in messages:
            key = message.to_bytes()
            if key not in known:
                ids = first(self._scores(message), self._count)
                known[key] = Answer(ids.astype(np.uint32), self._codes[ids])
            found.append(known[key])
        return found

    def _scores(self, message: Message) -> NDArray[np.float64]:
        # Not `rank`: it would centre, normalise and prepare the whole gallery anew for every message.
        self._mechanism._check_message(message)
        return self._mechanism._rank(message, self._prepared)


class Mapped(Protocol):
    """A gallery whose sets were settled when it was indexed; rows of ids and codes belong together."""

    @property
    def release(self) -> MappedRelease: ...

    @property
    def ids(self) -> NDArray[np.uint32]: ...

    @property
    def codes(self) -> Bytes: ...


def mapped_answer(gallery: Mapped, message: Message, alive: NDArray[np.bool_]) -> Answer:
    """Return the items of the sets that a message names, and as many others as keep all answers of one size.

    `alive`: Which items may still be handed out.
    Returns: Without images.
    """
    release, size = gallery.release, gallery.release.map_.set_size
    # Not `rank`, which scores the whole gallery: a mapped release settled its sets when it was indexed.
    rows = _members(release, message)
    rows = rows[alive[rows]][:size]
    if len(rows) < size:
        others = np.setdiff1d(np.flatnonzero(alive), rows, assume_unique=True)[: size - len(rows)]
        rows = np.sort(np.concatenate([rows, others]))
    if len(rows) < size:
        raise StaleMapError("fewer items are left than an answer holds: publish anew")
    rows = rows[np.argsort(gallery.ids[rows], kind="stable")]
    return Answer(gallery.ids[rows].astype(np.uint32, copy=False), gallery.codes[rows])


def _members(release: MappedRelease, message: Message) -> NDArray[np.intp]:
    """Return the positions of all items of the sets that a message names, rising."""
    items, starts = release.members_.indices, release.members_.indptr
    named = [items[starts[number] : starts[number + 1]] for number in release._named(message).tolist()]
    return np.unique(np.concatenate(named)).astype(np.intp, copy=False)


def first(scores: NDArray[np.float64], count: int) -> NDArray[np.intp]:
    """Return the positions of the highest scores, rising; of equal scores, those of the lowest positions.

    Examples
    --------
    >>> first(np.array([0.0, 1.0, 0.0, 1.0, 0.0]), 3).tolist()
    [0, 1, 3]
    """
    threshold = np.partition(scores, len(scores) - count)[len(scores) - count]
    above = np.flatnonzero(scores > threshold)
    level = np.flatnonzero(scores == threshold)[: count - len(above)]
    return np.sort(np.concatenate([above, level]))
