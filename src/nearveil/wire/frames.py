"""The frame of all that goes over the wire, and how its fields are written and read. Both halves use it.

A frame is a header of 14 bytes and a body: magic, version, kind, flags, length of the body, CRC-32 of all
but itself. Every kind has a largest size. What is not known is refused: other versions, kinds and flags,
bytes that are missing or left over, numbers that are not finite, text that does not print. Reading costs
memory in proportion to what was given, never to what a header claims.
"""

import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum

from nearveil.errors import NearveilError

_MAGIC = b"NVW"
VERSION = 1
_HEADER = struct.Struct("<3sBBBII")
_UNCHECKED = _HEADER.size - 4  # the checksum covers what stands before it, and the body
HEADER_BYTES = _HEADER.size
LONGEST_TEXT = 1000  # characters
_UTF8 = 4  # bytes of a character, at most


class WireError(NearveilError, ValueError):
    """Bytes are not what the protocol sends."""


class WireVersionError(WireError):
    """Bytes are of another version of the wire format."""


class WireSizeError(WireError):
    """Bytes are more than the limit of their kind."""


class Kind(IntEnum):
    """What a frame holds."""

    PUBLIC_REQUEST = 1
    PUBLIC_PART = 2
    QUERY = 3
    ANSWER = 4
    MAP_CHANGED = 5
    REFUSAL = 6
    CODES_MANIFEST = 16
    CODES_GROUP = 17
    SEALED_PUBLIC = 24
    SEALED_HINT = 25
    SEALED_QUESTION = 26
    SEALED_ANSWER = 27


@dataclass(frozen=True)
class Limits:
    """The largest body of each kind, in bytes.

    `public_request, public_part, query, answer, map_changed, refusal, codes_manifest, codes_group, sealed_public,
    sealed_hint, sealed_question, sealed_answer`: From 0 to 2^32 - 1.

    Examples
    --------
    >>> Limits(answer=1 << 20).get(Kind.ANSWER)
    1048576
    """

    public_request: int = 0
    public_part: int = 64 << 20
    query: int = 64 << 10
    answer: int = 256 << 20
    map_changed: int = 16 << 10
    refusal: int = 16 << 10
    codes_manifest: int = 16 << 20
    codes_group: int = 256 << 20
    sealed_public: int = 64 << 20
    sealed_hint: int = 1 << 30
    sealed_question: int = 32 << 20
    sealed_answer: int = 32 << 20

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 32:
                raise ValueError(f"{each.name} must be a number of bytes from 0 to 2^32 - 1")

    def get(self, kind: Kind) -> int:
        """Return the limit of a kind."""
        return int(getattr(self, kind.name.lower()))


DEFAULT_LIMITS = Limits()
MOST_KEYS, LONGEST_KEY = 64, 200  # of metadata, and their characters, that a list of galleries tells
MOST_FEATURES = 16_000  # dimensions of a feature that travels: what a column of pgvector holds


def frame(kind: Kind, body: bytes, flags: int = 0) -> bytes:
    """Return a body with its header.

    Examples
    --------
    >>> data = frame(Kind.QUERY, b"abc", flags=1)
    >>> len(data), unframe(data)
    (17, (<Kind.QUERY: 3>, 1, b'abc'))
    """
    if len(body) >= 1 << 32:
        raise WireSizeError("a frame holds less than 4 GiB")
    head = _HEADER.pack(_MAGIC, VERSION, kind, flags, len(body), 0)[:_UNCHECKED]
    return head + struct.pack("<I", zlib.crc32(body, zlib.crc32(head))) + body


def read_frame_size(head: bytes, limits: Limits = DEFAULT_LIMITS) -> int:
    """Return how long the frame is that begins so, for a transport that must know how much to read.

    `head`: The first `HEADER_BYTES` of a frame, or more.
    Returns: Header included; never above the limit of its kind.
    """
    _, _, length = _header(head, limits)
    return HEADER_BYTES + length


def unframe(data: bytes, limits: Limits = DEFAULT_LIMITS) -> tuple[Kind, int, bytes]:
    """Return kind, flags and body of one frame, with nothing after it. Nothing in it is trusted."""
    kind, flags, length = _header(data, limits)
    if len(data) != HEADER_BYTES + length:
        raise WireError("data is truncated, or has bytes after its end")
    body = data[HEADER_BYTES:]
    (claimed,) = struct.unpack_from("<I", data, _UNCHECKED)
    if zlib.crc32(body, zlib.crc32(data[:_UNCHECKED])) != claimed:
        raise WireError("data was damaged on its way: its checksum is wrong")
    return kind, flags, body


def _header(data: bytes, limits: Limits) -> tuple[Kind, int, int]:
    if not isinstance(data, bytes):
        raise WireError("data must be bytes")
    if len(data) < HEADER_BYTES or data[:3] != _MAGIC:
        raise WireError("data is not of the nearveil protocol")
    _, version, number, flags, length, _ = _HEADER.unpack_from(data)
    if version != VERSION:
        raise WireVersionError(f"data has version {version} of the wire format; this program speaks version {VERSION}")
    try:
        kind = Kind(number)
    except ValueError:
        raise WireError(f"data is of kind {number}, which is not known") from None
    if length > limits.get(kind):
        raise WireSizeError(f"data must be at most {limits.get(kind)} bytes for its kind; it is {length}")
    return kind, flags, length


class Writer:
    """Puts fields one after the other."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def write_int(self, value: int) -> None:
        """Write a whole number from 0 to 2^64 - 1."""
        self._parts.append(struct.pack("<Q", value))

    def write_float(self, value: float) -> None:
        """Write a float."""
        self._parts.append(struct.pack("<d", value))

    def write_bytes(self, value: bytes) -> None:
        """Write bytes after their length."""
        self._parts += [struct.pack("<I", len(value)), value]

    def write_text(self, value: str) -> None:
        """Write text in UTF-8 after its length."""
        self.write_bytes(value.encode())

    def to_bytes(self) -> bytes:
        """Return all that was written."""
        return b"".join(self._parts)


class Reader:
    """Takes fields one after the other, and trusts none of them."""

    def __init__(self, body: bytes) -> None:
        self._body, self._at = body, 0

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes."""
        end = self._at + count
        if end > len(self._body):
            raise WireError("data is truncated: a field is longer than what is there")
        found = self._body[self._at : end]
        self._at = end
        return found

    def read_int(self) -> int:
        """Return a whole number from 0 to 2^64 - 1."""
        return int.from_bytes(self.take(8), "little")

    def read_float(self) -> float:
        """Return a finite float."""
        (value,) = struct.unpack("<d", self.take(8))
        if not math.isfinite(value):
            raise WireError("data holds a number that is not finite")
        return float(value)

    def read_bytes(self) -> bytes:
        """Return bytes that stand after their length."""
        return self.take(int.from_bytes(self.take(4), "little"))

    def read_text(self) -> str:
        """Return text."""
        length = int.from_bytes(self.take(4), "little")
        if length > _UTF8 * LONGEST_TEXT:
            raise WireError(f"data holds text of more than {LONGEST_TEXT} characters")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            raise WireError("data holds text that is not UTF-8") from None

    def check_end(self) -> None:
        """Check that nothing is left."""
        if self._at != len(self._body):
            raise WireError("data has bytes after its end")


def check_text(value: object, name: str, *, least: int = 1) -> str:
    """Return short, printable text of at least `least` characters, or raise: a terminal obeys what it is shown."""
    if not isinstance(value, str) or not least <= len(value) <= LONGEST_TEXT or not value.isprintable():
        raise WireError(f"{name} must be {least} to {LONGEST_TEXT} characters of text that prints, without line breaks")
    return value


def check_whole(value: object, name: str, below: int = 1 << 64) -> int:
    """Return a whole number from 0 up, or say that it is none."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < below:
        raise WireError(f"{name} must be a whole number from 0 to {below - 1}")
    return value


def read_flag(flags: int, known: Sequence[str]) -> str:
    """Return the word that flags stand for, or refuse them."""
    if flags >= len(known):
        raise WireError(f"data has flags {flags}, which are not known")
    return known[flags]
