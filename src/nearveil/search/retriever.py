"""Private search in one object: both halves of the protocol, for those who hold both."""

import copy
from collections.abc import Sequence
from typing import Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.exceptions import NotFittedError

from nearveil.gallery.answers import Answer, Bytes, Codes, Singles, make_codes
from nearveil.mechanisms import Message, Release
from nearveil.mechanisms.base import candidate_count, check_fraction, check_labels
from nearveil.privacy import Guarantee
from nearveil.privacy.checks import check_numbers, is_integer
from nearveil.privacy.noise import Source
from nearveil.wire.client import rank_candidates


class GalleryRanker:
    """Ranks a gallery by messages, and answers with the first candidates of each. It never sees a query."""

    def __init__(self, mechanism: Release, features: Singles, codes: Bytes, count: int) -> None:
        self._mechanism = mechanism
        # Once, not for every message: projections, embeddings.
        self._prepared = mechanism._prepare(features)  # type: ignore[arg-type]
        self._codes = codes
        self._count = count

    def answers(self, messages: Sequence[Message]) -> list[Answer]:
        """Answer messages; equal ones are ranked once and share their answer."""
        known: dict[bytes, Answer] = {}
        found = []
        for message in messages:
            key = message.to_bytes()
            if key not in known:
                ids = select_first(self._scores(message), self._count)
                known[key] = Answer(ids.astype(np.uint32), self._codes[ids])
            found.append(known[key])
        return found

    def _scores(self, message: Message) -> NDArray[np.float64]:
        # Not `rank`: it would centre, normalise and prepare the whole gallery anew for every message.
        self._mechanism._check_messages([message])
        return self._mechanism._rank(message, self._prepared)


def select_first(scores: NDArray[np.float64], count: int) -> NDArray[np.intp]:
    """Return the positions of the highest scores, rising; of equal scores, those of the lowest positions.

    Examples
    --------
    >>> select_first(np.array([0.0, 1.0, 0.0, 1.0, 0.0]), 3).tolist()
    [0, 1, 3]
    """
    threshold = np.partition(scores, len(scores) - count)[len(scores) - count]
    above = np.flatnonzero(scores > threshold)
    level = np.flatnonzero(scores == threshold)[: count - len(above)]
    return np.sort(np.concatenate([above, level]))


class Retriever:
    """Search a gallery with private queries.

    A query goes the whole way: the mechanism makes a message of it, the server ranks its gallery by the
    message and answers with a fraction of it, and the client chooses among those by the true
    feature. The server learns the message and nothing else.

    Parameters
    ----------
    mechanism : Release
        How queries are told. A copy of it is fitted, and given its map of the gallery, by this object.
    candidates : float, optional
        The fraction f of the gallery that an answer holds: floor(f N) items. The mechanism's own where it
        has one; if both are given they must agree.
    code_bytes : int, "auto" or None, default="auto"
        Bytes of a candidate in an answer, its id included. Fewer bytes lose some neighbours
        (``docs/howto/retrieve.md`` has figures); None sends whole features. "auto" loses less than 0.01 of them:
        128 bytes up to 90 dimensions, whole features above.

    Examples
    --------
    >>> from nearveil.mechanisms import PrivUnit
    >>> generator = np.random.default_rng(0)
    >>> public, gallery = generator.standard_normal((50, 8)), generator.standard_normal((100, 8))
    >>> retriever = Retriever(PrivUnit(epsilon=8.0), candidates=0.5).fit(public).index(gallery)
    >>> retriever.nearest(gallery[3], k=2).shape
    (2,)
    """

    def __init__(
        self, mechanism: Release, candidates: float | None = None, *, code_bytes: int | Literal["auto"] | None = "auto"
    ) -> None:
        if not isinstance(mechanism, Release):
            raise ValueError("mechanism must be a release, such as nearveil.mechanisms.default(epsilon=4.0)")
        if getattr(mechanism, "_dummies", None) is not None:
            raise ValueError(
                "mechanism must not have dummies: their answers are for release_with_position and rank_each"
            )
        own: float | None = getattr(mechanism, "candidates", None)
        fraction = own if candidates is None else candidates
        if fraction is None:
            raise ValueError("candidates must be given: the mechanism has no fraction of its own")
        if own is not None and fraction != own:
            raise ValueError(f"candidates must agree with the mechanism's own, {own}; leave it out to take that")
        # A copy: another retriever may fit the same mechanism on other rows.
        self._mechanism = copy.deepcopy(mechanism)
        self.candidates = check_fraction(fraction)
        self.code_bytes = code_bytes
        self._fitted = False
        self._ranker: GalleryRanker | None = None

    def fit(self, public_X: ArrayLike, public_y: ArrayLike | None = None) -> Self:
        """Fit the mechanism on public rows. An index made before is void.

        Parameters
        ----------
        public_X : array-like of shape (n, d)
        public_y : array-like of shape (n,), optional

        Returns
        -------
        Retriever
        """
        self.mechanism.fit(public_X, public_y)
        self._fitted = True
        self._ranker = None
        return self

    def index(self, gallery: ArrayLike, gallery_y: ArrayLike | None = None) -> Self:
        """Take a gallery: its features, its codes, and the mechanism's map of it.

        Parameters
        ----------
        gallery : array-like of shape (N, d)
            Open to the client as far as the map and the answers show it; no guarantee covers it.
        gallery_y : array-like of shape (N,), optional
            Labels, for :func:`evaluate` alone.

        Returns
        -------
        Retriever
        """
        if not self._fitted:
            raise NotFittedError("Retriever must be fitted on public rows first: call fit(public_X)")
        features = self.mechanism.features(gallery, "gallery", lenient=True).astype(np.float32)
        labels = None if gallery_y is None else check_labels(gallery_y, len(features), "gallery_y")
        count = candidate_count(self.candidates, len(features))
        codes = make_codes(features, self.code_bytes)
        if hasattr(self.mechanism, "index"):
            self.mechanism.index(gallery)
        self._features, self._labels, self._codes, self._count = features, labels, codes, count
        self._ranker = GalleryRanker(self.mechanism, features, codes.encode(features), count)
        return self

    @property
    def mechanism(self) -> Release:
        """How queries are told: the copy that this object has fitted."""
        return self._mechanism

    @property
    def guarantee(self) -> Guarantee:
        """What one query promises: the mechanism's guarantee."""
        return self.mechanism.guarantee

    @property
    def features(self) -> Singles:
        """The gallery, centred and of norm one, shape (N, d)."""
        self._indexed()
        return self._features

    @property
    def labels(self) -> NDArray[np.int64] | None:
        """The gallery's labels, shape (N,), where given."""
        self._indexed()
        return self._labels

    @property
    def codes(self) -> Codes:
        """The public table that codes are read by."""
        self._indexed()
        return self._codes

    def nearest(self, x: ArrayLike, k: int = 8, *, rng: Source | None = None) -> NDArray[np.int64]:
        """Ask privately. Spends the guarantee once for each row.

        Parameters
        ----------
        x : array-like of shape (d,) or (n, d)
            Private.
        k : int, default=8
            At most the number of candidates of an answer, floor(f N): more is an error.
        rng : Source, optional
            For tests and studies; see :meth:`nearveil.mechanisms.Release.release`.

        Returns
        -------
        ndarray of shape (k,) or (n, k), int64
            Gallery positions, best first.
        """
        rows = check_numbers(x, "x")
        chosen, _, _ = self.search(rows[None] if rows.ndim == 1 else rows, k, rng=rng)
        return chosen[0] if rows.ndim == 1 else chosen

    def search(
        self, X: ArrayLike, k: int = 8, *, rng: Source | None = None
    ) -> tuple[NDArray[np.int64], list[int], list[Answer]]:
        """Ask privately, and show what went over the wire.

        Parameters
        ----------
        X : array-like of shape (n, d)
        k : int, default=8
        rng : Source, optional

        Returns
        -------
        chosen : ndarray of shape (n, k), int64
        message_bytes : list of n int
        answers : list of n Answer
        """
        ranker = self._indexed()
        # Before anything is spent: a message that brings no answer costs as much as one that does.
        if not is_integer(k, 1, self._count):
            raise ValueError(f"k must be a whole number from 1 to {self._count}, the candidates of an answer")
        messages = self.mechanism.release(X, rng=rng)
        answers = ranker.answers(messages)
        chosen, _ = rank_candidates(self.mechanism, self._codes, X, answers, int(k))
        return chosen, [message.nbytes for message in messages], answers

    def __repr__(self) -> str:
        return f"Retriever({self.mechanism!r}, candidates={self.candidates}, code_bytes={self.code_bytes!r})"

    def _indexed(self) -> GalleryRanker:
        if self._ranker is None:
            raise NotFittedError("Retriever must have a gallery first: call index(gallery)")
        return self._ranker
