"""Messages of the protocol, besides answers: the public part of a gallery, queries, and other replies."""

import re
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, ClassVar, Self

import numpy as np

from nearveil.gallery.answers import EXTRAS, Answer, Extras
from nearveil.gallery.codes import Codes, codes_from_bytes, codes_to_bytes
from nearveil.lazy import require_extra
from nearveil.mechanisms.covers.maps import PublicMap
from nearveil.mechanisms.messages import COVERS, Message, candidate_count
from nearveil.metrics import CENTRED, LARGEST_SCALE, METRICS, SMALLEST_SCALE, ScoreSpace
from nearveil.privacy.checks import LARGEST_FEATURE, is_in_range
from nearveil.wire import frames
from nearveil.wire.frames import Kind, WireError

_METRIC = 16  # the flag of a public part with a metric and a recall
_UNKNOWN = -1.0  # a recall that was not measured
_DIGEST = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, eq=False)
class PublicPart:
    """The public map of a gallery, with all else that a client needs to ask. Nothing in it is private or trusted."""

    kind: ClassVar[Kind] = Kind.PUBLIC_PART

    gallery: str
    revision: int  # grows whenever the gallery changes
    mechanism: str  # the name of the release
    epsilon: float  # the map was learned for it: advice. The client chooses the epsilon of a message
    candidates: float  # the fraction of the gallery in an answer
    public_digest: str  # the fingerprint of the public rows
    extractor: str
    fingerprint: str
    space: ScoreSpace = field(repr=False)  # the metric, with its public constants
    map: Any = field(repr=False)  # a PublicMap of covers, or a PublicRelease of another mechanism
    table: Codes = field(repr=False)  # decodes the codes of items
    offers: tuple[Extras, ...] = ()  # extras that a query may ask for
    code_recall: float | None = None  # the share of the 10 nearest that the codes keep, as the server measured it

    @property
    def dimension(self) -> int:
        """The dimension of features."""
        return len(self.space.mean)

    def __post_init__(self) -> None:
        for name, least in (("gallery", 1), ("mechanism", 1), ("extractor", 0), ("fingerprint", 0)):
            frames.check_text(getattr(self, name), name, least=least)
        frames.check_whole(self.revision, "revision")
        if not 0 < self.epsilon < np.inf:
            raise WireError("epsilon must be a positive number")
        if not _DIGEST.fullmatch(self.public_digest):
            raise WireError("public_digest must be 32 hexadecimal digits")
        self._check_space()
        self._check_map()
        if self.code_recall is not None and not 0 <= self.code_recall <= 1:
            raise WireError("code_recall must be a share from 0 to 1")
        if tuple(self.offers) != tuple(word for word in EXTRAS[1:] if word in self.offers):
            raise WireError(f"offers must be of {', '.join(EXTRAS[1:])}, in this order")

    def _check_map(self) -> None:
        if not isinstance(self.map, PublicMap):
            stated = self.map.mechanism, self.map.epsilon, self.map.public_digest
            if stated != (self.mechanism, self.epsilon, self.public_digest):
                raise WireError("mechanism, epsilon and public_digest must be those of the map")
        fits = self.map.n_features == (self.space.width if self.mechanism == COVERS else self.dimension)
        if not (fits and self.space.width == self.table.dimension):
            raise WireError("mean, map and table must be for features of one dimension")
        try:
            size = candidate_count(self.candidates, self.map.n_items)
        except ValueError as error:
            raise WireError(str(error)) from None
        if self.map.set_size != size:
            raise WireError("map must have sets of as many items as candidates says")

    def _check_space(self) -> None:
        space = self.space
        if space.mean.ndim != 1 or not len(space.mean) or not is_in_range(space.mean):
            raise WireError(f"mean must be a row of finite numbers, none beyond {LARGEST_FEATURE:g}")
        if space.metric not in METRICS:
            raise WireError(f"metric must be one of {', '.join(METRICS)}")
        if not (SMALLEST_SCALE <= space.scale <= LARGEST_SCALE and SMALLEST_SCALE <= space.balance <= LARGEST_SCALE):
            raise WireError(f"scale and balance must be from {SMALLEST_SCALE:g} to {LARGEST_SCALE:g}")

    def to_bytes(self) -> bytes:
        """Encode the public part as a frame."""
        fields: tuple[str | float, ...] = ()
        if self.space.metric != CENTRED:  # as in version 0.2
            recall = _UNKNOWN if self.code_recall is None else float(self.code_recall)
            fields = self.space.metric, float(self.space.scale), float(self.space.balance), recall
        body = frames.write_fields(
            self.gallery,
            self.revision,
            self.mechanism,
            float(self.epsilon),
            float(self.candidates),
            self.public_digest,
            self.extractor,
            self.fingerprint,
            self.space.mean.astype("<f8").tobytes(),
            self.map.to_bytes(),
            codes_to_bytes(self.table),
            *fields,
        )
        offers = sum(1 << EXTRAS.index(word) >> 1 for word in self.offers)
        return frames.frame(self.kind, body, offers + _METRIC * bool(fields))

    @classmethod
    def from_body(cls, flags: int, body: bytes) -> Self:
        """Decode the body of a frame."""
        types = str, int, str, float, float, str, str, str, bytes, bytes, bytes
        metric_types = (str, float, float, float) if flags & _METRIC else ()
        gallery, revision, mechanism, epsilon, candidates, digest, extractor, fingerprint, mean, *parts = (
            frames.read_fields(body, *types, *metric_types)
        )
        public_map, table, metric, scale, balance, recall = (*parts, CENTRED, 1.0, 1.0, _UNKNOWN)[:6]
        if flags & _METRIC and metric == CENTRED:
            raise WireError(f"metric must be one of {', '.join(METRICS[:3])} in this frame")
        if len(mean) % 8 or len(mean) > 8 * frames.MOST_FEATURES:
            raise WireError(f"mean must be a row of at most {frames.MOST_FEATURES} finite numbers of 64 bits")
        space = ScoreSpace(metric, np.frombuffer(mean, "<f8"), scale, balance)
        form = PublicMap if mechanism == COVERS else _find_release(mechanism)
        decoded = space, _decode_part(form, public_map, "the map"), codes_from_bytes(table)
        offers = tuple(word for bit, word in enumerate(EXTRAS[1:]) if flags >> bit & 1)
        return cls(
            gallery, revision, mechanism, epsilon, candidates, digest, extractor, fingerprint, *decoded,
            offers, None if recall == _UNKNOWN else recall,
        )  # fmt: skip


def _find_release(mechanism: str) -> Any:
    """Return the class that reads the map of a mechanism of the papers."""
    with require_extra("knn"):
        from nearveil.mechanisms.public import SERVED, PublicRelease
    if mechanism not in SERVED:
        raise WireError(f"mechanism must be {COVERS}, {', '.join(SERVED)}")
    return PublicRelease


def _decode_part(form: Any, data: bytes, name: str) -> Any:
    """Decode a part of a message that has its own format, and require the one canonical encoding."""
    try:
        part = form.from_bytes(data)
    except ValueError as error:
        raise WireError(f"{name} cannot be read: {error}") from None
    if part.to_bytes() != data:
        raise WireError(f"{name} is not encoded canonically")
    return part


def write_query(message: bytes, extras: Extras = "none") -> bytes:
    """Encode a message, such as ``debit.message``, as a query. Never choose `extras` by a private record."""
    return frames.frame(Kind.QUERY, message, EXTRAS.index(extras))


@dataclass(frozen=True)
class Query:
    """The only message that is made from a private record, and what the answer adds for all candidates."""

    kind: ClassVar[Kind] = Kind.QUERY

    message: Message
    extras: Extras = "none"

    def to_bytes(self) -> bytes:
        """Encode the query as a frame."""
        return write_query(self.message.to_bytes(), self.extras)

    @classmethod
    def from_body(cls, flags: int, body: bytes) -> Self:
        """Decode the body of a frame."""
        return cls(_decode_part(Message, body, "the message"), EXTRAS[flags])


class RefusalCode(IntEnum):
    """Why a server refuses a query, with the HTTP status."""

    status: int

    MALFORMED = 1, 400
    VERSION = 2, 400
    TOO_LARGE = 3, 413
    NOT_OFFERED = 4, 403
    FAILED = 5, 503

    def __new__(cls, number: int, status: int = 0) -> Self:
        """Return the member with a number on the wire."""
        code = int.__new__(cls, number)
        code._value_, code.status = number, status
        return code


class FieldsMessage:
    """A message without flags, with its fields one after the other as its body."""

    kind: ClassVar[Kind]
    types: ClassVar[tuple[type, ...]]

    def to_bytes(self) -> bytes:
        """Encode it as a frame."""
        return frames.frame(self.kind, frames.write_fields(*vars(self).values()))

    @classmethod
    def from_body(cls, _: int, body: bytes) -> Self:
        """Decode the body of a frame."""
        return cls(*frames.read_fields(body, *cls.types))


@dataclass(frozen=True)
class MapChanged(FieldsMessage):
    """The server no longer has the map of a message: fetch the public part. Another question is another debit."""

    kind = Kind.MAP_CHANGED
    types = str, int

    gallery: str
    revision: int  # of the current map

    def __post_init__(self) -> None:
        frames.check_text(self.gallery, "gallery")
        frames.check_whole(self.revision, "revision")


@dataclass(frozen=True)
class Refusal(FieldsMessage):
    """The server refuses a query, with the reason."""

    kind = Kind.REFUSAL
    types = int, str

    code: RefusalCode
    words: str

    def __post_init__(self) -> None:
        if self.code not in RefusalCode.__members__.values():
            raise WireError(f"data has the unknown refusal code {self.code}")
        object.__setattr__(self, "code", RefusalCode(self.code))
        frames.check_text(self.words, "words", least=0)


def frame_status(reply: bytes) -> int:
    """Return the HTTP status of a reply to a query: the frame of an answer, a changed map or a refusal."""
    kind, _ = frames.peek_header(reply)
    if kind == Kind.ANSWER:
        return 200
    return 409 if kind == Kind.MAP_CHANGED else decode_frame(reply, Refusal).code.status


WireMessage = PublicPart | Query | Answer | MapChanged | Refusal


def decode_frame(data: bytes, *expected: type[WireMessage]) -> Any:
    """Decode one frame of an expected type; refuse any other without reading its body. Nothing in it is trusted."""
    kind, flags, body = frames.unframe(data)
    for form in expected:
        if form.kind is kind:
            return form.from_body(flags, body)
    raise WireError(f"data is of kind {kind.name}, which is not expected here")
