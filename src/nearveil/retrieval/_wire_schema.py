"""What the two halves say to each other: one schema, read and written here alone."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar, Self, cast

from nearveil.mechanisms import Message
from nearveil.retrieval._answer import EXTRAS, Answer, Extras
from nearveil.retrieval._wire import (
    DEFAULT_LIMITS,
    Kind,
    Limits,
    Reader,
    WireError,
    Writer,
    checked_flag,
    checked_text,
    checked_whole,
    frame,
    unframe,
)
from nearveil.retrieval._wire_public import PublicPart, read_part


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
        checked_flag(flags, ("",))
        Reader(body).end()
        return cls()


@dataclass(frozen=True)
class Query:
    """The one thing that is made from a private record: a message, and what shall come with the answer.

    Parameters
    ----------
    message : Message
    extras : {"none", "thumbnails", "originals", "names"}, default="none"
        Decided before there is an answer, for all candidates alike.
    """

    kind: ClassVar[Kind] = Kind.QUERY

    message: Message
    extras: Extras = "none"

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
        extras = cast("Extras", checked_flag(flags, EXTRAS))
        return cls(read_part(Message, body, "the message"), extras)


@dataclass(frozen=True)
class MapChanged:
    """The message was made for a map that is served no more: fetch the public part anew. Asking anew is paid anew.

    Parameters
    ----------
    gallery : str
    revision : int
        That is served now.
    """

    kind: ClassVar[Kind] = Kind.MAP_CHANGED

    gallery: str
    revision: int

    def __post_init__(self) -> None:
        checked_text(self.gallery, "gallery")
        checked_whole(self.revision, "revision")

    def to_bytes(self) -> bytes:
        """Return it as bytes."""
        out = Writer()
        out.text(self.gallery)
        out.whole(self.revision)
        return frame(self.kind, out.done())

    @classmethod
    def from_body(cls, flags: int, body: bytes) -> Self:
        """Read what stands in its frame."""
        checked_flag(flags, ("",))
        taken = Reader(body)
        gallery, revision = taken.text(), taken.whole()
        taken.end()
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
    """The server does not answer, and says why.

    Parameters
    ----------
    code : RefusalCode
    words : str
    """

    kind: ClassVar[Kind] = Kind.REFUSAL

    code: RefusalCode
    words: str

    def __post_init__(self) -> None:
        checked_text(self.words, "words", least=0)

    def to_bytes(self) -> bytes:
        """Return it as bytes."""
        out = Writer()
        out.whole(int(self.code))
        out.text(self.words)
        return frame(self.kind, out.done())

    @classmethod
    def from_body(cls, flags: int, body: bytes) -> Self:
        """Read what stands in its frame."""
        checked_flag(flags, ("",))
        taken = Reader(body)
        code, words = taken.whole(), taken.text()
        taken.end()
        if code not in {int(one) for one in RefusalCode}:
            raise WireError(f"data has code {code} of a refusal, which is not known")
        return cls(RefusalCode(code), words)


Spoken = PublicRequest | PublicPart | Query | Answer | MapChanged | Refusal
_SCHEMA: dict[Kind, type[Spoken]] = {
    one.kind: one for one in (PublicRequest, PublicPart, Query, Answer, MapChanged, Refusal)
}


def read(data: bytes, *expected: type[Spoken], limits: Limits = DEFAULT_LIMITS) -> Any:
    """Read one frame of a kind that is expected. Nothing in it is trusted.

    `*expected`: All others are refused, unread.

    Examples
    --------
    >>> read(MapChanged("birds", 7).to_bytes(), MapChanged, Refusal)
    MapChanged(gallery='birds', revision=7)
    """
    kind, flags, body = unframe(data, limits)
    found = _SCHEMA[kind]
    if found not in expected:
        raise WireError(f"data is of kind {kind.name}, which has no place here")
    return found.from_body(flags, body)
