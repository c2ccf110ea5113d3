"""Private search on one machine: client and server in one object."""

import copy
from collections.abc import Sequence
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.exceptions import NotFittedError

from nearveil.cluster import SpreadRows
from nearveil.gallery.answers import Answer
from nearveil.gallery.codes import CodeBytes, Codes, Longs, Singles, learn_codes
from nearveil.gallery.publishing import select_first
from nearveil.mechanisms import Message, Release
from nearveil.mechanisms.base import check_labels
from nearveil.mechanisms.covers.covers import MappedRelease
from nearveil.mechanisms.messages import candidate_count, check_fraction
from nearveil.metrics import Metric, ScoreSpace, check_metric
from nearveil.privacy import Guarantee
from nearveil.privacy.checks import check_numbers, check_rows, is_integer
from nearveil.privacy.noise import Source
from nearveil.wire.client import rank_candidates


class GalleryRanker:
    """The server: ranks a gallery by messages and returns the best candidates. It never sees a query."""

    def __init__(
        self,
        mechanism: Release,
        space: ScoreSpace,
        gallery: ArrayLike,
        gallery_y: ArrayLike | None,
        candidates: float,
        code_bytes: CodeBytes,
    ) -> None:
        features = mechanism.gallery_features(gallery).astype(np.float32)
        self.features: Singles = space.encode(np.asarray(gallery)).astype(np.float32)
        self.labels = None if gallery_y is None else check_labels(gallery_y, len(self.features), "gallery_y")
        self.count = candidate_count(candidates, len(self.features))
        self.codes, self._packed, _ = learn_codes(SpreadRows.cut(self.features), code_bytes, space)
        self.mechanism: Release = mechanism.index(gallery) if hasattr(mechanism, "index") else mechanism
        # Once for all messages: projections, embeddings.
        self._prepared = self.mechanism._prepare(features)

    def answers(self, messages: Sequence[Message]) -> list[Answer]:
        """Answer messages; equal messages share one answer."""
        cache: dict[bytes, Answer] = {}
        for message in messages:
            if message.to_bytes() not in cache:
                # Not `rank`, which would prepare the whole gallery again for every message.
                self.mechanism._check_messages([message])
                ids = select_first(self.mechanism._rank(message, self._prepared), self.count)
                cache[message.to_bytes()] = Answer(ids.astype(np.uint32), self._packed[ids])
        return [cache[message.to_bytes()] for message in messages]


class Retriever:
    """Search a gallery with private queries.

    The mechanism makes a message from a query, the server ranks its gallery by the message and returns a fraction of
    it, and the client ranks these candidates by the true feature. The server learns only the message.

    Parameters
    ----------
    mechanism : Release
        Makes the messages. The retriever fits and indexes a copy.
    candidates : float, optional
        The fraction f of the gallery in an answer: floor(f N) items. By default the mechanism's; must not differ from
        it.
    code_bytes : int, "auto" or None, default="auto"
        Bytes of a candidate in an answer, including its id. Fewer bytes lose some neighbours
        (``docs/howto/retrieve.md`` has figures); None loses nothing. "auto" keeps 0.99 of the 10 nearest with the
        smallest codes and table.
    metric : {"cosine", "dot", "euclidean"}, default="cosine"
        By which "nearest" is meant. "centred cosine", the cosine after subtracting the mean of the public rows, is
        that of the papers and of version 0.2.

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
        self, mechanism: Release, candidates: float | None = None, *,
        code_bytes: CodeBytes = "auto",
        metric: Metric = "cosine",
    ) -> None:  # fmt: skip
        if not isinstance(mechanism, Release):
            raise ValueError("mechanism must be a release, such as nearveil.mechanisms.default(epsilon=4.0)")
        if getattr(mechanism, "_dummies", None) is not None:
            raise ValueError("mechanism must not have dummies; use release_with_position and rank_each instead")
        default: float | None = getattr(mechanism, "candidates", None)
        fraction = default if candidates is None else candidates
        if fraction is None:
            raise ValueError("candidates must be given: the mechanism does not define a fraction")
        if default is not None and fraction != default:
            raise ValueError(f"candidates must agree with the mechanism's own, {default}; omit it to use that")
        # Copy it: the caller may change its parameters later.
        self._mechanism = copy.deepcopy(mechanism)
        self.candidates = check_fraction(fraction)
        self.code_bytes, self.metric = code_bytes, check_metric(metric)
        self._space: ScoreSpace | None = None
        self._ranker: GalleryRanker | None = None

    def fit(self, public_X: ArrayLike, public_y: ArrayLike | None = None) -> Self:
        """Fit the mechanism on public rows, and labels of them if it uses labels, and drop the index."""
        self._mechanism = fitted = self.mechanism.fit(public_X, public_y)
        self._space = ScoreSpace.fit(self.metric, check_rows(public_X, "public_X"))
        if isinstance(fitted, MappedRelease):
            self._mechanism = fitted.fit_space(self._space, fitted.public_digest)
        self._ranker = None
        return self

    def index(self, gallery: ArrayLike, gallery_y: ArrayLike | None = None) -> Self:
        """Index a gallery, shape (N, d): compute its features, codes and the mechanism's map.

        The map and the answers reveal it to the client; no guarantee covers it. Labels are for :func:`evaluate` only.
        """
        self._ranker = GalleryRanker(self.mechanism, self.space, gallery, gallery_y, self.candidates, self.code_bytes)
        self._mechanism = self._ranker.mechanism
        return self

    @property
    def mechanism(self) -> Release:
        """The mechanism, a copy that this object fits."""
        return self._mechanism

    @property
    def guarantee(self) -> Guarantee:
        """Guarantee of one query, from the mechanism."""
        return self.mechanism.guarantee

    @property
    def features(self) -> Singles:
        """Rows of the gallery as :attr:`space` encodes them, shape (N, width)."""
        return self._indexed().features

    @property
    def space(self) -> ScoreSpace:
        """The metric, with the constants that :meth:`fit` learned."""
        if self._space is None:
            raise NotFittedError("Retriever must be fitted first: call fit(public_X)")
        return self._space

    @property
    def labels(self) -> NDArray[np.int64] | None:
        """Labels of the gallery, shape (N,), or None."""
        return self._indexed().labels

    @property
    def codes(self) -> Codes:
        """Public table that decodes codes."""
        return self._indexed().codes

    def nearest(self, x: ArrayLike, k: int = 8, *, rng: Source | None = None) -> NDArray[np.int64]:
        """Search privately; return gallery positions, best first, shape (k,) or (n, k).

        Uses the guarantee once for each row.

        Parameters
        ----------
        x : array-like of shape (d,) or (n, d)
            Private.
        k : int, default=8
            At most the number of candidates in an answer, floor(f N).
        rng : Source, optional
            Only for tests and studies.
        """
        rows = check_numbers(x, "x")
        chosen, _, _ = self.search(rows[None] if rows.ndim == 1 else rows, k, rng=rng)
        return chosen[0] if rows.ndim == 1 else chosen

    def search(self, X: ArrayLike, k: int = 8, *, rng: Source | None = None) -> tuple[Longs, list[int], list[Answer]]:
        """Search privately; return gallery positions, shape (n, k), sizes of the n messages in bytes, and answers."""
        ranker = self._indexed()
        # Check before the release: a message without an answer costs as much as one with an answer.
        if not is_integer(k, 1, ranker.count):
            raise ValueError(f"k must be a whole number from 1 to {ranker.count}, the candidates of an answer")
        messages = self.mechanism.release(X, rng=rng)
        answers = ranker.answers(messages)
        with np.errstate(all="ignore"):
            queries = self.space.make_queries(self.space.encode(check_rows(X, "X")))
        chosen, _ = rank_candidates(ranker.codes, queries, answers, int(k))
        return chosen, [message.nbytes for message in messages], answers

    def __repr__(self) -> str:
        return f"Retriever({self.mechanism!r}, candidates={self.candidates}, code_bytes={self.code_bytes!r})"

    def _indexed(self) -> GalleryRanker:
        if self._ranker is None:
            raise NotFittedError("Retriever must index a gallery first: call index(gallery)")
        return self._ranker
