"""What client and server send each other: one schema, read and written here alone."""

import re
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, ClassVar, Protocol, Self, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from nearveil.errors import NearveilError
from nearveil.frames import (
    DEFAULT_LIMITS,
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
from nearveil.gallery.answers import EXTRAS, Answer, Extras
from nearveil.gallery.codes import Codes, code_dimension, codes_from_bytes, codes_to_bytes
from nearveil.mechanisms import Message, PublicMap
from nearveil.mechanisms.base import candidate_count
from nearveil.mechanisms.covers.map import MOST_FEATURES

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

    `extractor, fingerprint`: Name and fingerprint of what makes the features; empty where they are not known.
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
    """Read one frame of a kind that is expected. Nothing in it is trusted.

    `*expected`: All others are refused, unread.

    Examples
    --------
    >>> decode_frame(MapChanged("birds", 7).to_bytes(), MapChanged, Refusal)
    MapChanged(gallery='birds', revision=7)
    """
    kind, flags, body = unframe(data, limits)
    found = _SCHEMA[kind]
    if found not in expected:
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
