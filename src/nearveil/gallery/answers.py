"""Answers: the ids and codes of all candidates, optionally with names or images."""

import json
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, Self, get_args

import numpy as np
from numpy.typing import NDArray

from nearveil.gallery.codes import Bytes
from nearveil.wire.frames import HEADER_BYTES, Kind, WireError, frame, unframe

Extras = Literal["none", "thumbnails", "originals", "names", "metadata"]
EXTRAS: tuple[Extras, ...] = get_args(Extras)  # a flag is the position of its word

_SIZES = struct.Struct("<II")  # numbers of candidates, and of bytes of a code
LARGEST_ORIGINAL = 64 << 20  # bytes
IMAGE_HEADER_BYTES = 4  # of the content of an item: its length
LONGEST_NAME = 4096  # characters
LONGEST_ID = 512  # characters of an external id
LARGEST_METADATA = 64 << 10  # bytes of JSON, of one item
LARGEST_DETAILS = LARGEST_METADATA + 12 * (LONGEST_NAME + LONGEST_ID) + 100  # JSON may write a character in 12
# Characters that break a line, control a terminal, or change the direction of the text around them.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


@dataclass(frozen=True)
class Answer:
    """The server's answer: ids and codes of all candidates, and their extras if the query requests any."""

    # There is no second request: it would reveal which candidates are near, which the message hides.

    kind: ClassVar[Kind] = Kind.ANSWER
    header_bytes: ClassVar[int] = HEADER_BYTES + _SIZES.size

    ids: NDArray[np.uint32]  # of the candidates, increasing: their order reveals nothing
    codes: Bytes = field(repr=False)
    extras: Extras = "none"  # the kind of `contents`
    contents: tuple[bytes, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if self.ids.ndim != 1 or self.ids.dtype != np.uint32 or not len(self.ids):
            raise WireError("ids must be at least one number of 32 bits")
        codes = self.codes
        if codes.dtype != np.uint8 or codes.ndim != 2 or len(codes) != len(self.ids) or not codes.size:
            raise WireError("codes must hold a row of bytes for each id")
        _check_increasing(self.ids)
        self._check_contents()

    def _check_contents(self) -> None:
        if self.extras not in EXTRAS:
            raise WireError(f"extras must be one of {', '.join(EXTRAS)}")
        if len(self.contents) != (0 if self.extras == "none" else len(self.ids)):
            raise WireError("contents must be one for each id, or none at all")
        # The whole answer is refused, whichever items will be chosen.
        if self.extras == "metadata":
            for content in self.contents:
                read_details(content)
        if self.extras == "thumbnails" and not all(map(is_thumbnail, self.contents)):
            raise WireError("contents must be WebP, or empty, as thumbnails")
        if self.extras == "names" and not _are_names(self.contents):
            raise WireError(f"names must be UTF-8 of at most {LONGEST_NAME} characters, without control characters")

    @property
    def nbytes(self) -> int:
        """The number of bytes on the wire."""
        extras_bytes = IMAGE_HEADER_BYTES * len(self.contents) + sum(map(len, self.contents))
        return self.header_bytes + 4 * len(self.ids) + self.codes.size + extras_bytes

    def to_bytes(self) -> bytes:
        """Serialize the answer, to the same bytes on every machine."""
        lengths = np.fromiter(map(len, self.contents), "<u4", len(self.contents))
        parts = [_SIZES.pack(*self.codes.shape), self.ids.astype("<u4").tobytes(), self.codes.tobytes()]
        return frame(Kind.ANSWER, b"".join([*parts, lengths.tobytes(), *self.contents]), EXTRAS.index(self.extras))

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read an answer; nothing in it is trusted."""
        kind, flags, body = unframe(data)
        if kind != Kind.ANSWER:
            raise WireError(f"data must be an answer, not of kind {kind.name}")
        return cls.from_body(flags, body)

    @classmethod
    def from_body(cls, flags: int, body: bytes) -> Self:
        """Read the body of an answer's frame."""
        if len(body) < _SIZES.size:
            raise WireError("data is truncated")
        count, width = _SIZES.unpack_from(body)
        if not count or not width:
            raise WireError("ids must be at least one, with codes of at least one byte")
        extras, middle = EXTRAS[flags], _SIZES.size + 4 * count
        n_contents, end = 0 if extras == "none" else count, middle + count * width
        start = end + IMAGE_HEADER_BYTES * n_contents
        if len(body) < start:
            raise WireError("data is truncated")
        ids = np.frombuffer(body, "<u4", count, _SIZES.size).astype(np.uint32)
        _check_increasing(ids)  # before contents are cut
        codes = np.frombuffer(body, np.uint8, count * width, middle).reshape(count, width)
        contents = []
        for size in np.frombuffer(body, "<u4", n_contents, end):  # a list of sizes would be larger than the answer
            contents.append(body[start : start + int(size)])
            start += int(size)
        if start != len(body):
            raise WireError("data is truncated, or has bytes after its end")
        return cls(ids, codes, extras, tuple(contents))


def _check_increasing(ids: NDArray[np.uint32]) -> None:
    if (ids[1:] <= ids[:-1]).any():
        raise WireError("ids must rise, each once")


def encode_name(name: str) -> bytes:
    """Encode a name for an answer; control characters are replaced."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", name[:LONGEST_NAME]).encode()


class ItemDetails(NamedTuple):
    """The details of an item in an answer with metadata."""

    name: str = ""
    external_id: str | None = None
    metadata: Mapping[str, Any] = MappingProxyType({})


def encode_details(details: ItemDetails) -> bytes:
    """Encode details for an answer, in JSON."""
    name = encode_name(details.name).decode()
    values = {"name": name, "id": details.external_id, "metadata": dict(details.metadata)}
    return json.dumps(values, ensure_ascii=False, separators=(",", ":")).encode()


def read_details(data: bytes) -> ItemDetails:
    """Read the bytes of :func:`encode_details`; nothing in them is trusted. Empty bytes are a deleted item."""
    if not data:
        return ItemDetails()
    try:
        if len(data) > LARGEST_DETAILS:
            raise ValueError
        values = _DECODER.decode(data.decode())
        name, external_id, metadata = values.pop("name"), values.pop("id"), values.pop("metadata")
        fits = isinstance(name, str) and len(name) <= LONGEST_NAME and not _CONTROL.search(name)
        fits = fits and (external_id is None or (isinstance(external_id, str) and len(external_id) <= LONGEST_ID))
        if values or not fits or not isinstance(metadata, dict):
            raise ValueError
    except (ValueError, KeyError, AttributeError, RecursionError, TypeError):
        raise WireError("contents must be JSON of a name, an id and metadata, as metadata") from None
    return ItemDetails(name, external_id, metadata)


def _refuse_constant(_: str) -> Any:
    raise ValueError


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)  # json.loads would make one for each call


def _are_names(images: Sequence[bytes]) -> bool:
    """Return whether all are valid names, checked at once."""
    try:
        names = b"\n".join(images).decode().split("\n")
    except UnicodeDecodeError:
        return False
    return (
        len(names) == len(images)  # otherwise a name has a line break
        and max(map(len, names), default=0) <= LONGEST_NAME
        and not _CONTROL.search("".join(names))
    )


def is_thumbnail(image: object) -> bool:
    """Return whether bytes are a valid thumbnail: WebP, or empty."""
    return isinstance(image, bytes) and (not image or (image[:4] == b"RIFF" and image[8:12] == b"WEBP"))
