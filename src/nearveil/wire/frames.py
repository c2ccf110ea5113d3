"""The frame of every message on the wire, and its fields. Both halves of the protocol use this one codec.

A frame is a header of 14 bytes and a body: magic, version, kind, flags, length of the body, CRC-32 of all other bytes.
Every kind has a size limit. Unknown versions, kinds and flags, missing or additional bytes, numbers that are not finite
and unprintable text are refused. Reading uses memory in proportion to the input, never to the sizes that a header
claims.
"""

import math
import struct
import zlib
from collections.abc import Callable
from enum import IntEnum
from typing import Any, Self

from nearveil.errors import NearveilError

_MAGIC = b"NVW"
VERSION = 1
_HEADER = struct.Struct("<3sBBBII")
_UNCHECKED = _HEADER.size - 4  # the checksum covers what stands before it, and the body
HEADER_BYTES = _HEADER.size
LONGEST_TEXT = 1000  # characters
_UTF8 = 4  # bytes of a character, at most


class WireError(NearveilError, ValueError):
    """Bytes are not a valid message of the protocol."""


class WireVersionError(WireError):
    """Bytes have another version of the wire format."""


class WireSizeError(WireError):
    """A message is larger than the limit of its kind."""


class Kind(IntEnum):
    """Kind of a message, with the largest body in bytes, and how many values the flags have."""

    limit: int
    frame_limit: int  # with the header
    n_flags: int

    PUBLIC_REQUEST = 1, 0  # of version 0.2; no program sends it, and servers refuse it
    PUBLIC_PART = 2, 64 << 20, 32  # what it offers, one bit each, and whether it has a metric
    QUERY = 3, 64 << 10, 5  # the extras
    ANSWER = 4, 256 << 20, 5
    MAP_CHANGED = 5, 16 << 10
    REFUSAL = 6, 16 << 10
    CODES_MANIFEST = 16, 16 << 20
    CODES_GROUP = 17, 256 << 20, 2  # whether it is compressed
    SEALED_PUBLIC = 24, 64 << 20
    SEALED_HINT = 25, 0  # of version 0.2; no program sends it
    SEALED_QUESTION = 26, 32 << 20, 2  # the part: scores or records
    SEALED_ANSWER = 27, 32 << 20, 2
    SEALED_TOKENS = 28, 256 << 20  # public parts of tokens
    SEALED_TOKEN_REQUEST = 29, 4 << 20
    SEALED_TOKEN = 30, 128 << 20

    def __new__(cls, number: int, limit: int = 0, n_flags: int = 1) -> Self:
        """Return the member with a number on the wire."""
        kind = int.__new__(cls, number)
        kind._value_, kind.limit, kind.frame_limit, kind.n_flags = number, limit, HEADER_BYTES + limit, n_flags
        return kind


MOST_KEYS, LONGEST_KEY = 64, 200  # metadata keys of a gallery in a list of galleries, and characters of a key
MOST_FEATURES = 16_000  # dimensions of a feature: the limit of a pgvector column


def frame(kind: Kind, body: bytes, flags: int = 0) -> bytes:
    """Return a frame: a header and the body."""
    if len(body) >= 1 << 32:
        raise WireSizeError("a frame holds less than 4 GiB")
    head = _HEADER.pack(_MAGIC, VERSION, kind, flags, len(body), 0)[:_UNCHECKED]
    return head + struct.pack("<I", zlib.crc32(body, zlib.crc32(head))) + body


def unframe(data: bytes) -> tuple[Kind, int, bytes]:
    """Return kind, flags and body of one whole frame. Nothing in it is trusted."""
    if not isinstance(data, bytes):
        raise WireError("data must be bytes")
    if len(data) < HEADER_BYTES or data[:3] != _MAGIC:
        raise WireError("data is not of the nearveil protocol")
    _, version, number, flags, length, checksum = _HEADER.unpack_from(data)
    if version != VERSION:
        raise WireVersionError(f"data has version {version} of the wire format; this program speaks version {VERSION}")
    try:
        kind = Kind(number)
    except ValueError:
        raise WireError(f"data has the unknown kind {number}") from None
    if length > kind.limit:
        raise WireSizeError(f"data must be at most {kind.limit} bytes for its kind; it is {length}")
    if len(data) != HEADER_BYTES + length:
        raise WireError("data is truncated, or has bytes after its end")
    body = data[HEADER_BYTES:]
    if zlib.crc32(body, zlib.crc32(data[:_UNCHECKED])) != checksum:
        raise WireError("data was corrupted in transit: wrong checksum")
    if flags >= kind.n_flags:
        raise WireError(f"data has unknown flags {flags}")
    return kind, flags, body


def peek_header(data: bytes | bytearray) -> tuple[int, int]:
    """Return the numbers of kind and flags in the header of a frame, unchecked; zeros if `data` is shorter."""
    return (data[4], data[5]) if len(data) >= HEADER_BYTES else (0, 0)


def open_frame(data: bytes, kind: Kind, flags: int = 0) -> bytes:
    """Return the body of a frame that must be of a kind and have these flags."""
    actual_kind, actual_flags, body = unframe(data)
    if actual_kind is not kind or actual_flags != flags:
        raise WireError(f"data must be a frame of kind {kind.name} with flags {flags}")
    return body


def write_fields(*values: float | str | bytes) -> bytes:
    """Write fields one after the other: numbers in 8 bytes, text (as UTF-8) and bytes after their length in 4."""
    parts: list[bytes] = []
    for value in values:
        if isinstance(value, (str, bytes)):
            content = value.encode() if isinstance(value, str) else value
            parts += [struct.pack("<I", len(content)), content]
        else:
            parts.append(struct.pack("<d" if isinstance(value, float) else "<Q", value))
    return b"".join(parts)


def read_fields(body: bytes, *types: type) -> tuple[Any, ...]:
    """Read fields of the given types, with nothing after them. Nothing in them is trusted."""
    reader = Reader(body)
    fields = tuple(_READERS[kind](reader) for kind in types)
    reader.check_end()
    return fields


class Reader:
    """Read fields one after the other; nothing in them is trusted."""

    def __init__(self, body: bytes) -> None:
        self._body, self._offset = body, 0

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes."""
        end = self._offset + count
        if end > len(self._body):
            raise WireError("data is truncated: a field is longer than the rest of the body")
        content = self._body[self._offset : end]
        self._offset = end
        return content

    def read_int(self) -> int:
        """Read a whole number from 0 to 2^64 - 1."""
        return int.from_bytes(self.take(8), "little")

    def read_float(self) -> float:
        """Read a finite float."""
        (value,) = struct.unpack("<d", self.take(8))
        if not math.isfinite(value):
            raise WireError("data holds a number that is not finite")
        return float(value)

    def read_bytes(self) -> bytes:
        """Read bytes after their length."""
        return self.take(int.from_bytes(self.take(4), "little"))

    def read_text(self) -> str:
        """Read text after its length."""
        length = int.from_bytes(self.take(4), "little")
        if length > _UTF8 * LONGEST_TEXT:
            raise WireError(f"data holds text of more than {LONGEST_TEXT} characters")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            raise WireError("data holds text that is not UTF-8") from None

    def check_end(self) -> None:
        """Refuse bytes after the last field."""
        if self._offset != len(self._body):
            raise WireError("data has bytes after its end")


_READERS: dict[type, Callable[[Reader], Any]] = {
    int: Reader.read_int,
    float: Reader.read_float,
    bytes: Reader.read_bytes,
    str: Reader.read_text,
}


def check_text(value: object, name: str, *, least: int = 1) -> str:
    """Return short, printable text of at least `least` characters, or raise: other characters control terminals."""
    if not isinstance(value, str) or not least <= len(value) <= LONGEST_TEXT or not value.isprintable():
        raise WireError(f"{name} must be {least} to {LONGEST_TEXT} printable characters, without line breaks")
    return value


def check_whole(value: object, name: str, below: int = 1 << 64) -> int:
    """Return a whole number from 0 to `below` - 1, or raise."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < below:
        raise WireError(f"{name} must be a whole number from 0 to {below - 1}")
    return value
