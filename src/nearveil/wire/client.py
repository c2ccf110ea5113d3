"""What client and server send each other, and the client's half: from a row to a message, and back to neighbours."""

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, ClassVar, Literal, Protocol, Self, TypeVar, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nearveil.errors import NearveilError
from nearveil.gallery.answers import (
    EXTRAS,
    ID_BYTES,
    Answer,
    Bytes,
    Codes,
    Extras,
    Singles,
    code_dimension,
    codes_from_bytes,
    codes_to_bytes,
    count_columns,
)
from nearveil.mechanisms import Covers, Message, PublicMap, Release
from nearveil.mechanisms.base import candidate_count
from nearveil.mechanisms.covers.channels import check_channel_epsilon
from nearveil.mechanisms.covers.covers import MappedRelease, set_guarantee
from nearveil.mechanisms.covers.maps import NEIGHBORS
from nearveil.privacy import Guarantee
from nearveil.privacy.checks import check_numbers, is_integer
from nearveil.privacy.noise import Source, secure_source
from nearveil.wire.frames import (
    DEFAULT_LIMITS,
    HEADER_BYTES,
    MOST_FEATURES,
    Kind,
    Limits,
    Reader,
    WireError,
    Writer,
    check_text,
    check_whole,
    frame,
    read_flag,
    unframe,
)

_DIGEST = re.compile(r"[0-9a-f]{32}")
LARGEST_FEATURE = 1e6  # of a number in a feature or a mean: differences are then finite, and not lost in rounding
OUT_OF_RANGE = f"must be finite, with no number beyond {LARGEST_FEATURE:g}"
_OFFERS = 1 << (len(EXTRAS) - 1)  # choices of what a gallery may offer, one bit each


def is_in_range(row: NDArray[Any]) -> bool:
    """Return whether a feature or a mean holds finite numbers alone, none too large to compare."""
    with np.errstate(all="ignore"):  # in 64 bits: the limit itself is infinite in 16
        return bool((np.abs(row.astype(np.float64)) <= LARGEST_FEATURE).all())


@dataclass(frozen=True, eq=False)
class PublicPart:
    """All that a client must know in order to ask. Nothing in it is private, and nothing in it is trusted.

    `extractor` and `fingerprint` are empty where it is not known what makes the features.
    """

    kind: ClassVar[Kind] = Kind.PUBLIC_PART

    gallery: str  # its name
    revision: int  # grows whenever the gallery changes
    mechanism: str  # the name of the release
    epsilon: float  # what the map was learned for: advice. Which epsilon a message has is the client's choice
    candidates: float  # the fraction of the gallery that an answer holds
    public_digest: str  # the fingerprint of the public rows
    mean: NDArray[np.float64] = field(repr=False)  # the public mean
    map: PublicMap = field(repr=False)
    table: Codes = field(repr=False)  # what codes are read by
    extractor: str
    fingerprint: str
    offers: tuple[Extras, ...] = ()  # what a query may ask for besides ids and codes

    def __post_init__(self) -> None:
        for name, least in (("gallery", 1), ("mechanism", 1), ("extractor", 0), ("fingerprint", 0)):
            check_text(getattr(self, name), name, least=least)
        check_whole(self.revision, "revision")
        if not 0 < self.epsilon < np.inf:
            raise WireError("epsilon must be a positive number")
        if not _DIGEST.fullmatch(self.public_digest):
            raise WireError("public_digest must be 32 hexadecimal digits")
        mean = np.array(self.mean, dtype=np.float64)
        if mean.ndim != 1 or not len(mean) or not is_in_range(mean):
            raise WireError(f"mean must be a row of finite numbers, none beyond {LARGEST_FEATURE:g}")
        mean.setflags(write=False)
        object.__setattr__(self, "mean", mean)
        if tuple(self.offers) != tuple(word for word in EXTRAS[1:] if word in self.offers):
            raise WireError(f"offers must be of {', '.join(EXTRAS[1:])}, in this order")
        self._check_fit()

    def _check_fit(self) -> None:
        """Check that mean, map and table are of one gallery."""
        if not len(self.mean) == len(self.map.components) == code_dimension(self.table):
            raise WireError("mean, map and table must be for features of one dimension")
        try:
            size = candidate_count(self.candidates, self.map.n_items)
        except ValueError as error:
            raise WireError(str(error)) from None
        if self.map.set_size != size:
            raise WireError("map must have sets of as many items as candidates says")

    def to_bytes(self) -> bytes:
        """Return the public part as bytes."""
        out = Writer()
        out.write_text(self.gallery)
        out.write_int(self.revision)
        out.write_text(self.mechanism)
        out.write_float(self.epsilon)
        out.write_float(self.candidates)
        for text in (self.public_digest, self.extractor, self.fingerprint):
            out.write_text(text)
        for part in (self.mean.astype("<f8").tobytes(), self.map.to_bytes(), codes_to_bytes(self.table)):
            out.write_bytes(part)
        return frame(self.kind, out.to_bytes(), sum(1 << EXTRAS.index(word) >> 1 for word in self.offers))

    @classmethod
    def from_body(cls, flags: int, body: bytes) -> Self:
        """Read what stands in its frame."""
        if flags >= _OFFERS:
            raise WireError(f"data has flags {flags}, which are not known")
        taken = Reader(body)
        gallery, revision, mechanism = taken.read_text(), taken.read_int(), taken.read_text()
        epsilon, candidates = taken.read_float(), taken.read_float()
        digest, extractor, fingerprint = taken.read_text(), taken.read_text(), taken.read_text()
        mean, public_map, table = taken.read_bytes(), taken.read_bytes(), taken.read_bytes()
        taken.check_end()
        if len(mean) % 8 or len(mean) > 8 * MOST_FEATURES:
            raise WireError(f"mean must be a row of at most {MOST_FEATURES} finite numbers of 64 bits")
        return cls(
            gallery=gallery,
            revision=revision,
            mechanism=mechanism,
            epsilon=epsilon,
            candidates=candidates,
            public_digest=digest,
            mean=np.frombuffer(mean, "<f8"),
            map=read_part(PublicMap, public_map, "the map"),
            table=codes_from_bytes(table),
            extractor=extractor,
            fingerprint=fingerprint,
            offers=tuple(word for place, word in enumerate(EXTRAS[1:]) if flags >> place & 1),
        )


class _Serial(Protocol):
    @classmethod
    def from_bytes(cls, data: bytes) -> Any: ...

    def to_bytes(self) -> bytes: ...


_Form = TypeVar("_Form", bound=_Serial)


def read_part(form: type[_Form], data: bytes, name: str) -> _Form:
    """Read a part that has a form of its own; there is one way to write it, and no other is read."""
    try:
        found = cast("_Form", form.from_bytes(data))
    except ValueError as error:
        raise WireError(f"{name} cannot be read: {error}") from None
    if found.to_bytes() != data:
        raise WireError(f"{name} is not written as it must be")
    return found


@dataclass(frozen=True)
class PublicRequest:
    """The client asks for the public part."""

    kind: ClassVar[Kind] = Kind.PUBLIC_REQUEST

    def to_bytes(self) -> bytes:
        """Return the request as bytes."""
        return frame(self.kind, b"")

    @classmethod
    def from_body(cls, flags: int, body: bytes) -> Self:
        """Read what stands in its frame."""
        read_flag(flags, ("",))
        Reader(body).check_end()
        return cls()


@dataclass(frozen=True)
class Query:
    """The one thing that is made from a private record: a message, and what shall come with the answer."""

    kind: ClassVar[Kind] = Kind.QUERY

    message: Message
    extras: Extras = "none"  # decided before there is an answer, for all candidates alike

    def __post_init__(self) -> None:
        if not isinstance(self.message, Message):
            raise WireError("message must be a Message")
        if self.extras not in EXTRAS:
            raise WireError(f"extras must be one of {', '.join(EXTRAS)}")

    def to_bytes(self) -> bytes:
        """Return the query as bytes."""
        return frame(self.kind, self.message.to_bytes(), EXTRAS.index(self.extras))

    @classmethod
    def from_body(cls, flags: int, body: bytes) -> Self:
        """Read what stands in its frame."""
        extras = cast("Extras", read_flag(flags, EXTRAS))
        return cls(read_part(Message, body, "the message"), extras)


@dataclass(frozen=True)
class MapChanged:
    """The message was made for a map that is served no more: fetch the public part anew. Asking anew is paid anew."""

    kind: ClassVar[Kind] = Kind.MAP_CHANGED

    gallery: str
    revision: int  # that is served now

    def __post_init__(self) -> None:
        check_text(self.gallery, "gallery")
        check_whole(self.revision, "revision")

    def to_bytes(self) -> bytes:
        """Return it as bytes."""
        out = Writer()
        out.write_text(self.gallery)
        out.write_int(self.revision)
        return frame(self.kind, out.to_bytes())

    @classmethod
    def from_body(cls, flags: int, body: bytes) -> Self:
        """Read what stands in its frame."""
        read_flag(flags, ("",))
        taken = Reader(body)
        gallery, revision = taken.read_text(), taken.read_int()
        taken.check_end()
        return cls(gallery, revision)


class RefusalCode(IntEnum):
    """Why a server does not answer."""

    MALFORMED = 1
    VERSION = 2
    TOO_LARGE = 3
    NOT_OFFERED = 4
    FAILED = 5


@dataclass(frozen=True)
class Refusal:
    """The server does not answer, and says why."""

    kind: ClassVar[Kind] = Kind.REFUSAL

    code: RefusalCode
    words: str

    def __post_init__(self) -> None:
        check_text(self.words, "words", least=0)

    def to_bytes(self) -> bytes:
        """Return it as bytes."""
        out = Writer()
        out.write_int(int(self.code))
        out.write_text(self.words)
        return frame(self.kind, out.to_bytes())

    @classmethod
    def from_body(cls, flags: int, body: bytes) -> Self:
        """Read what stands in its frame."""
        read_flag(flags, ("",))
        taken = Reader(body)
        code, words = taken.read_int(), taken.read_text()
        taken.check_end()
        if code not in {int(one) for one in RefusalCode}:
            raise WireError(f"data has code {code} of a refusal, which is not known")
        return cls(RefusalCode(code), words)


WireMessage = PublicRequest | PublicPart | Query | Answer | MapChanged | Refusal
_SCHEMA: dict[Kind, type[WireMessage]] = {
    one.kind: one for one in (PublicRequest, PublicPart, Query, Answer, MapChanged, Refusal)
}


def decode_frame(data: bytes, *expected: type[WireMessage], limits: Limits = DEFAULT_LIMITS) -> Any:
    """Read one frame of an expected kind; others are refused, unread. Nothing in it is trusted.

    Examples
    --------
    >>> decode_frame(MapChanged("birds", 7).to_bytes(), MapChanged, Refusal)
    MapChanged(gallery='birds', revision=7)
    """
    kind, flags, body = unframe(data, limits)
    found = _SCHEMA.get(kind)
    if found is None or found not in expected:
        raise WireError(f"data is of kind {kind.name}, which has no place here")
    return found.from_body(flags, body)


class ProtocolError(NearveilError, ValueError):
    """The protocol does not go on from here: a step is out of turn, or the server offers what cannot be used."""


class OutdatedMapError(ProtocolError):
    """The server has another map now. The message is spent; asking anew with the new public part is paid anew.

    Attributes
    ----------
    revision : int
        That the server serves.
    """

    def __init__(self, changed: MapChanged) -> None:
        super().__init__(
            f"the map of {changed.gallery!r} has changed, to revision {changed.revision}: fetch the public part, and "
            "ask anew with a new debit"
        )
        self.revision = changed.revision


class RefusedError(ProtocolError):
    """The server refused. The same message may be sent again; that costs nothing."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(f"the server refused ({refusal.code.name.lower()}): {refusal.words}")
        self.code: RefusalCode = refusal.code


_BLOCK = 1 << 13  # candidates whose codes are read at once: an answer is larger in memory than on the wire


class Payment(Protocol):
    """A debit that stands, as :class:`nearveil.ledger.Debit` is one."""

    @property
    def repeated(self) -> bool:
        """Whether its key was spent before: then nothing is made, and `message` is sent again."""
        ...

    @property
    def message(self) -> bytes | None:
        """What was stored."""
        ...

    def store(self, message: bytes, /) -> None:
        """Keep the message before it is sent."""
        ...


Spend = Callable[[Guarantee], AbstractContextManager[Payment]]


@dataclass(frozen=True)
class Found:
    """What the client chose, and all that it chose from.

    `images`: Thumbnails or originals of the chosen, where they were asked for; empty where the gallery has none.
    `scores`: What the chosen were ranked by: the similarity that the table reads from each code. Finite for any
    table.
    """

    ids: NDArray[np.int64]  # of the chosen candidates, best first
    codes: Bytes = field(repr=False)
    images: tuple[bytes, ...] = field(repr=False)
    answer: Answer = field(repr=False)  # every candidate: what the server knows of the choice
    scores: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32), repr=False)


_BASE = 0.1  # seconds: a debit, and whatever does not grow
_MESSAGE = 5e-3  # seconds, besides its operations
_BYTE = 2e-8  # seconds to read one
_OPERATION = 5e-9  # seconds
_NETWORK = 256  # operations for a prototype, besides its products
_CANDIDATE = 256  # operations for a candidate, besides its score
_NUMBER = 6e-8  # seconds for each number that codes stand for: decoding and its product take 3 to 12e-9 on a free core
FILTERING = 5e-5  # seconds, for each item that a filter reads
TEXT = 5e-5  # seconds for the texts of an item, besides their bytes: they take 1 to 15e-6
_TEXT_BYTE = 3e-7  # seconds for each byte of texts of an answer: hostile JSON takes 85e-9, read twice


def question_period(public: PublicPart) -> float:
    """Return the seconds for reading a public part, paying and making a message."""
    held = public.map
    features, dimensions = held.components.shape
    work = features * dimensions + len(held.prototypes) * (dimensions + _NETWORK + held.n_sets)
    size = held.components.nbytes + held.prototypes.nbytes + held.coverage.nbytes + public.table.nbytes
    return float(_BASE + _MESSAGE + _BYTE * size + _OPERATION * work)


def choice_period(public: PublicPart, answers: int, size: int, *, text_bytes: int = 0, filtered: bool = False) -> float:
    """Return the seconds for reading answers and choosing among their candidates, with a filter if `filtered`.

    `size`: Bytes of all answers. `text_bytes`: Bytes of those with names or metadata.
    """
    count, features = public.map.set_size, len(public.mean)
    choice = _OPERATION * len(public.map.prototypes) * (public.map.components.shape[1] + _NETWORK)
    reading = _BYTE * (size + public.table.nbytes) + _OPERATION * _CANDIDATE * answers * count
    scoring = scoring_period(public.table, features, count)
    texts = _TEXT_BYTE * text_bytes + TEXT * count * (text_bytes > 0)
    return float(_BASE / 2 + choice + reading + texts + scoring + filtered * FILTERING * count)


def scoring_period(table: Codes, n_features: int, n_codes: int) -> float:
    """Return the seconds for scoring codes against a row of a given length."""
    columns = count_columns(table)
    return _NUMBER * columns * n_codes + _OPERATION * columns * n_features


K = 8  # neighbours that are counted where an answer is judged
FULL = 255.0  # of a coverage


def find_share(public: PublicPart, feature: Singles, named_set: int) -> float:
    """Return the share of the prototypes nearest to a feature that a set holds, by the map. Private: never send it."""
    near = find_prototypes(public.map, project_rows(public, feature[None]), None)[0, :K]
    return float(public.map.coverage[near, named_set].mean() / FULL)


def project_rows(public: PublicPart, features: Singles) -> Singles:
    """Return where features lie among a map's prototypes, shape (n, r)."""
    with np.errstate(all="ignore"):
        rows = features.astype(np.float64) - public.mean
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        return np.nan_to_num(rows @ public.map.components.astype(np.float64)).astype(np.float32)


def find_prototypes(held: PublicMap, rows: Singles, own: NDArray[np.intp] | None) -> NDArray[np.int64]:
    """Return the prototypes nearest to rows, as many as the client's rule looks at; without their own, if told."""
    count = min(NEIGHBORS + (own is not None), len(held.prototypes))
    found = held.nearest(rows.astype(np.float64), count)
    if own is None:
        return found
    # Of equal rows another may stand first; then the last one goes in place of the own.
    keep = found != own[:, None]
    keep[keep.all(axis=1), -1] = False
    return np.asarray(found[keep].reshape(len(rows), count - 1))


State = Literal["start", "ready", "asked", "answered"]

_MECHANISMS: dict[str, type[MappedRelease]] = {Covers.name: Covers}
_NOWHERE = 1e-30  # of the public mean: a row so near has no direction


def avoid_zero_vector(row: NDArray[np.float64], mean: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a row that has a direction from the mean: the row itself, unless it is the mean.

    A server may send a suspect's feature as its mean. Were that row refused, silence would tell it.
    """
    if np.abs(row - mean).max() >= _NOWHERE:
        return row
    moved = row.copy()
    moved[0] += 1.0
    return moved


def rank_candidates(
    mechanism: Release, codes: Codes, X: ArrayLike, answers: Sequence[Answer], k: int
) -> tuple[NDArray[np.int64], Singles]:
    """Return ids and scores of the k best candidates in each row's answer, best first. All scores are finite."""
    # In 64 bits: a hostile table of tiny numbers would take some queries where 32-bit arithmetic is slow.
    with np.errstate(all="ignore"):
        queries = mechanism.features(X)
    if len(answers) != len(queries):
        raise ValueError(f"answers must be {len(queries)}, one for each row of X")
    chosen, scores = np.empty((len(queries), k), np.int64), np.empty((len(queries), k), np.float32)
    groups: dict[int, list[int]] = {}
    for row, answer in enumerate(answers):
        groups.setdefault(id(answer), []).append(row)
    for rows in groups.values():
        chosen[rows], scores[rows] = _rank_answer(codes, queries[rows], answers[rows[0]], k)
    return chosen, scores


def _rank_answer(
    codes: Codes, queries: NDArray[np.float64], answer: Answer, k: int
) -> tuple[NDArray[np.int64], Singles]:
    """Rank the candidates of one answer by their codes."""
    if answer.codes.shape[1] != codes.width:
        raise WireError(f"answer must have codes of {codes.width} bytes: fetch the public table anew")
    if len(answer.ids) < k:
        raise WireError(f"answer must hold at least k = {k} candidates; it holds {len(answer.ids)}")
    # A hostile table may make scores overflow for some queries and not for others. To stop there would tell which.
    with np.errstate(all="ignore"):
        parts = [
            codes.scores(queries, answer.codes[start : start + _BLOCK]) for start in range(0, len(answer.ids), _BLOCK)
        ]
        scores = np.nan_to_num(np.concatenate(parts, axis=1), nan=float(np.finfo(np.float32).min))
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return answer.ids[order].astype(np.int64), np.take_along_axis(scores, order, axis=1)


class ClientProtocol:
    """Asks one question. A state machine without a socket: what it returns is sent, what comes is given to it.

    The states are "start", "ready" (it has the public part), "asked" and "answered". Another question is another
    object, given the same public part, and another debit.

    Parameters
    ----------
    epsilon : float
        Of the message; the client's choice, whatever the server's map was learned for.
    public : PublicPart, optional
        Fetched before. Then nothing need be requested.
    fingerprint : str, optional
        Of the extractor that made the feature. A gallery of other features is refused before anything is paid.
    limits : Limits, optional
        The largest replies that are read.

    Examples
    --------
    ``docs/howto/protocol.md`` has both halves at work.

    >>> client = ClientProtocol(4.0)
    >>> client.state, len(client.public_request())
    ('start', 14)
    """

    def __init__(
        self,
        epsilon: float,
        *,
        public: PublicPart | None = None,
        fingerprint: str | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self._epsilon = check_channel_epsilon(epsilon)
        self._fingerprint, self._limits = fingerprint, limits
        self._state: State = "start"
        self._row: NDArray[np.float64] | None = None
        self._message: Message | None = None
        if public is not None:
            self._accept(public)

    @property
    def epsilon(self) -> float:
        """Of the message."""
        return self._epsilon

    @property
    def state(self) -> State:
        """How far it has come."""
        return self._state

    @property
    def public(self) -> PublicPart:
        """The public part, to be kept for further questions."""
        if self._state == "start":
            raise ProtocolError(
                "there is no public part yet: send public_request(), and give the reply to take_public()"
            )
        return self._public

    @property
    def guarantee(self) -> Guarantee:
        """What the message promises: nothing, once it was made with a seed."""
        message = self._message
        return set_guarantee(self.epsilon) if message is None else self._release.guarantee_of(message)

    @property
    def n_candidates(self) -> int:
        """How many candidates the answer will hold; the largest k."""
        return self.public.map.set_size

    def question_period(self) -> float:
        """Return the seconds after the public part came, or a multiple of them, at which to send the question.

        The time of a debit and a choice may leak information. A moment that public sizes fix leaks nothing:
        :class:`nearveil.Client` sends at such moments.

        Returns
        -------
        float
        """
        return question_period(self.public)

    def choice_period(self, answers: int, size: int, *, text_bytes: int = 0, filtered: bool = False) -> float:
        """Return the seconds after the last answer came, or a multiple of them, before which to do nothing visible.

        Parameters
        ----------
        answers : int
        size : int
            Bytes of all of them.
        text_bytes : int, default=0
            Bytes of those with names or metadata.
        filtered : bool, default=False
            Whether a filter reads all candidates.

        Returns
        -------
        float
        """
        return choice_period(self.public, answers, size, text_bytes=text_bytes, filtered=filtered)

    def public_request(self) -> bytes:
        """Return the request for the public part. It depends on nothing."""
        self._require_state("start")
        return PublicRequest().to_bytes()

    def take_public(self, data: bytes) -> PublicPart:
        """Read the public part and check it.

        Parameters
        ----------
        data : bytes
            The reply to :meth:`public_request`.

        Returns
        -------
        PublicPart

        Raises
        ------
        WireError, ProtocolError
            Nothing was paid.
        """
        self._require_state("start")
        found: PublicPart | Refusal = decode_frame(data, PublicPart, Refusal, limits=self._limits)
        if isinstance(found, Refusal):
            raise RefusedError(found)
        self._accept(found)
        return found

    def ask(self, feature: ArrayLike, *, spend: Spend, extras: Extras = "none", rng: Source | None = None) -> bytes:
        """Pay, then make the message. Called again about the same feature, it returns the same bytes and pays nothing.

        Parameters
        ----------
        feature : array-like of shape (d,)
            Private. Numbers up to a million.
        spend : callable
            Debits the client's account by a guarantee and returns the debit, a context:
            ``lambda guarantee: account.spend(guarantee, key)``.
        extras : {"none", "thumbnails", "originals", "names"}, default="none"
            What shall come with all candidates. Never choose it by the feature.
        rng : Source, optional
            For tests and studies; see :meth:`nearveil.mechanisms.Release.release`. No account pays for what is made
            with a seed.

        Returns
        -------
        bytes
            To be sent. A transport may send them as often as it must.
        """
        self._require_state("ready", "asked")
        with np.errstate(all="ignore"):
            row = self._checked_feature(feature)
        if extras not in EXTRAS:
            raise ValueError(f"extras must be one of {', '.join(EXTRAS)}")
        if extras != "none" and extras not in self._public.offers:
            raise ProtocolError(f"the gallery {self._public.gallery!r} does not offer {extras}")
        if self._message is None or self._row is None:
            self._message = self._paid_message(row, spend, rng)
            self._row, self._state = row, "asked"
        elif not np.array_equal(row, self._row):
            raise ProtocolError(
                "this client has asked about another feature: a question has a ClientProtocol of its own"
            )
        self._extras: Extras = extras
        return Query(self._message, extras).to_bytes()

    def take_answer(self, data: bytes, k: int = 8) -> Found:
        """Read the answer and choose. Nothing can be sent afterwards.

        Whether an answer is refused depends on the answer alone, never on the feature, and a retry sends what was sent.

        Parameters
        ----------
        data : bytes
        k : int, default=8
            At most `candidates`.

        Returns
        -------
        Found

        Raises
        ------
        WireError, RefusedError
            The message may be sent again.
        OutdatedMapError
            The message is of no more use.
        """
        self._require_state("asked")
        self._check_count(k)
        return self.choose(self.read_answer(data), k)

    def read_answer(self, data: bytes, extras: Extras | None = None) -> Answer:
        """Read an answer without choosing yet, for example where one message is sent twice with different extras.

        Parameters
        ----------
        data : bytes
        extras : {"none", "thumbnails", "originals", "names"}, optional
            That it must have; by default those that were asked for last.

        Returns
        -------
        Answer

        Raises
        ------
        WireError, RefusedError, OutdatedMapError
            As of :meth:`take_answer`.
        """
        self._require_state("asked")
        found: Answer | MapChanged | Refusal = decode_frame(data, Answer, MapChanged, Refusal, limits=self._limits)
        if isinstance(found, Refusal):
            raise RefusedError(found)
        if isinstance(found, MapChanged):
            self._end()
            raise OutdatedMapError(found)
        self._check_answer(found, self._extras if extras is None else extras)
        return found

    def best_set(self) -> int:
        """Return the set that suits the feature, which the message names or not. Private: never send it.

        Returns
        -------
        int
        """
        self._require_state("asked")
        assert self._row is not None
        with np.errstate(all="ignore"):
            return int(self._public.map.choose(self._release.features(self._row[None]))[0])

    def choose(self, answer: Answer, k: int = 8) -> Found:
        """Choose among the candidates of an answer that was read. Nothing can be sent afterwards.

        Parameters
        ----------
        answer : Answer
        k : int, default=8
            At most `candidates`.

        Returns
        -------
        Found
        """
        self._require_state("asked")
        self._check_count(k)
        assert self._row is not None
        ids, scores = (
            best[0] for best in rank_candidates(self._release, self._public.table, self._row[None], [answer], k)
        )
        self._end()
        places = np.searchsorted(answer.ids, ids)
        images = tuple(answer.images[place] for place in places) if answer.images else ()
        return Found(ids, answer.codes[places], images, answer, scores)

    def _require_state(self, *states: State) -> None:
        if self._state not in states:
            raise ProtocolError(
                f"this client is in state {self._state!r}, not in {' or '.join(map(repr, states))}: after an answer "
                "nothing is sent, and a new question is a new ClientProtocol"
            )

    def _check_count(self, k: int) -> None:
        if not is_integer(k, 1, self.n_candidates):
            raise ValueError(f"k must be a whole number from 1 to {self.n_candidates}, the candidates of an answer")

    def _end(self) -> None:
        """Forget the feature: no step needs it any more."""
        self._row, self._state = None, "answered"

    def _accept(self, public: PublicPart) -> None:
        """Check all that could make an answer useless. The feature plays no part, and nothing is paid yet."""
        if public.mechanism not in _MECHANISMS:
            raise ProtocolError(f"the server's mechanism must be one of {sorted(_MECHANISMS)}")
        if self._fingerprint is not None and public.fingerprint != self._fingerprint:
            raise ProtocolError(
                f"the gallery {public.gallery!r} has features of {public.extractor!r} ({public.fingerprint}), not of "
                "the extractor that the feature is from"
            )
        size = Answer.header_bytes - HEADER_BYTES + public.map.set_size * (ID_BYTES + public.table.width)
        if size > self._limits.answer:
            raise ProtocolError(f"an answer would be {size} bytes, and at most {self._limits.answer} are read")
        release = _MECHANISMS[public.mechanism](self.epsilon, public.candidates)
        release = release.fit_mean(public.mean, public.public_digest).use_map(public.map)
        self._release, self._public, self._state = release, public, "ready"

    def _checked_feature(self, feature: ArrayLike) -> NDArray[np.float64]:
        row, mean = check_numbers(feature, "feature"), self._public.mean
        if row.shape != mean.shape:
            raise ValueError(f"feature must be one row of {len(mean)} numbers")
        if not is_in_range(row):
            raise ValueError(f"feature {OUT_OF_RANGE}")
        return avoid_zero_vector(row, mean)

    def _paid_message(self, row: NDArray[np.float64], spend: Spend, rng: Source | None) -> Message:
        source = secure_source() if rng is None else rng
        with spend(self._release.guarantee.with_source(source)) as debit:
            if debit.repeated:
                return self._stored(debit.message)
            # Were numpy told to raise, a number that underflows for some features would be silence after the debit.
            with np.errstate(all="ignore"):
                message: Message = self._release.release(row, rng=source)
            debit.store(message.to_bytes())
            return message

    def _stored(self, data: bytes | None) -> Message:
        """Return the message of a debit that was made before, perhaps by a process that died."""
        if data is None:
            raise ProtocolError(
                "this debit stands, but its message was never stored and so never sent: take a new key, which pays anew"
            )
        message = Message.from_bytes(data)
        if message.public_id != self._release.public_id:
            raise ProtocolError("this debit is for a message on another map: take a new key, which pays anew")
        return message

    def _check_answer(self, answer: Answer, extras: Extras) -> None:
        if answer.extras != extras:
            raise WireError(f"answer must have {extras} as extras; it has {answer.extras}")
        if len(answer.ids) != self.n_candidates:
            raise WireError(f"answer must hold {self.n_candidates} candidates; it holds {len(answer.ids)}")
        if answer.codes.shape[1] != self._public.table.width:
            raise WireError(f"answer must have codes of {self._public.table.width} bytes, as the public table has")
