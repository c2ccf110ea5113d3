"""What leaves the client: a frozen message of plain numbers, and its bytes."""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray

from nearveil.errors import NearveilError

_MAGIC = b"NVM"
_HEADER = struct.Struct("<3sBI")  # magic, version, length of the JSON that follows
_TYPES = ("|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<f4", "<f8")
_LARGEST = 64 << 20  # bytes of a message: far above any of ours, far below what hurts a server
_LARGEST_JSON = 1 << 16
_MOST_ARRAYS = 16
_FIELDS = {"mechanism", "public_id", "seeded", "arrays"}

Shapes = Mapping[str, tuple[int, ...]]


class MessageError(NearveilError, ValueError):
    """Bytes are not a message, or a message does not fit the mechanism or map that shall read it."""


@dataclass(frozen=True, eq=False)
class Message:
    """What a release sends: all that the server gets. Two messages are equal if all their fields are.

    Parameters
    ----------
    mechanism : str
        The name of the mechanism, such as "privunit".
    public_id : str
        The fingerprint of the public things that both sides must share: anchors, projection, map.
    arrays : mapping of str to ndarray
        The numbers, kept as read-only copies. Integers or floats, all finite.
    seeded : bool, default=False
        Whether the noise came from a seed. Such a message has no guarantee.

    Examples
    --------
    >>> message = Message("cells", "0f", {"cell": np.array(3, dtype=np.int32)})
    >>> Message.from_bytes(message.to_bytes()) == message
    True
    """

    version: ClassVar[int] = 1

    mechanism: str
    public_id: str
    arrays: Mapping[str, NDArray[Any]] = field(repr=False)
    seeded: bool = False

    def __post_init__(self) -> None:
        if not (isinstance(self.mechanism, str) and isinstance(self.public_id, str) and isinstance(self.seeded, bool)):
            raise MessageError("mechanism and public_id must be text, and seeded true or false")
        if not 1 <= len(self.arrays) <= _MOST_ARRAYS or not all(isinstance(name, str) for name in self.arrays):
            raise MessageError(f"arrays must be 1 to {_MOST_ARRAYS} named arrays")
        kept = {name: _freeze_array(name, values) for name, values in sorted(self.arrays.items())}
        object.__setattr__(self, "arrays", MappingProxyType(kept))

    def __getitem__(self, name: str) -> NDArray[Any]:
        try:
            return self.arrays[name]
        except KeyError:
            raise MessageError(f"arrays must hold {name!r}: the message is of another kind or version") from None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Message) and self.to_bytes() == other.to_bytes()

    def __hash__(self) -> int:
        return hash(self.to_bytes())

    def __reduce__(self) -> tuple[Any, ...]:
        return Message.from_bytes, (self.to_bytes(),)

    @property
    def nbytes(self) -> int:
        """Return how many bytes go over the wire."""
        return len(self.to_bytes())

    def to_bytes(self) -> bytes:
        """Return the message as bytes, the same for equal messages on every machine."""
        described = {name: [values.dtype.str, list(values.shape)] for name, values in self.arrays.items()}
        top = {"mechanism": self.mechanism, "public_id": self.public_id, "seeded": self.seeded, "arrays": described}
        text = json.dumps(top, sort_keys=True, separators=(",", ":")).encode()
        body = b"".join(values.tobytes() for values in self.arrays.values())
        return _HEADER.pack(_MAGIC, self.version, len(text)) + text + body

    @classmethod
    def from_bytes(cls, data: bytes, largest: Shapes | None = None) -> Self:
        """Read a message, or raise a MessageError; nothing in the bytes is trusted.

        Parameters
        ----------
        data : bytes
            As :meth:`to_bytes` made them.
        largest : mapping of str to tuple of int, optional
            The arrays that the message may hold, with the largest shape of each.
        """
        if len(data) > _LARGEST:
            raise MessageError(f"data must be at most {_LARGEST} bytes")
        if len(data) < _HEADER.size or data[:3] != _MAGIC:
            raise MessageError("data is not a nearveil message")
        _, version, length = _HEADER.unpack_from(data)
        if version != cls.version:
            raise MessageError(f"data has version {version} of the format; this program reads version {cls.version}")
        if length > _LARGEST_JSON or _HEADER.size + length > len(data):
            raise MessageError("data is truncated")
        top = _parse_header(data[_HEADER.size : _HEADER.size + length])
        return cls(
            mechanism=top["mechanism"],
            public_id=top["public_id"],
            arrays=_split_body(_read_forms(top["arrays"], largest), data[_HEADER.size + length :]),
            seeded=top["seeded"],
        )


def read_vector(message: Message, name: str, kind: Literal["int8", "float32"], size: int) -> NDArray[np.float64]:
    """Return a vector of a message as doubles, or refuse one of another type or length."""
    vector = message[name]
    if vector.dtype != np.dtype(kind) or vector.shape != (size,):
        words = {"int8": "integers of 8 bits", "float32": "floats of 32 bits"}[kind]
        raise MessageError(f"arrays: {name!r} must hold {size} {words}")
    return vector.astype(np.float64)


def check_shape(name: str, shape: Sequence[int], largest: Shapes) -> None:
    """Refuse an array that is not known, or is larger than it may be in any dimension."""
    most = largest.get(name)
    if most is None:
        raise MessageError(f"arrays: {name!r} has no place here")
    if len(shape) != len(most) or any(side > limit for side, limit in zip(shape, most, strict=True)):
        raise MessageError(f"{name} must be an array of at most {' x '.join(map(str, most)) or 'one number'}")


def _freeze_array(name: str, values: NDArray[Any]) -> NDArray[Any]:
    """Return a read-only, little-endian copy."""
    copy = np.array(values, order="C")
    if copy.dtype.byteorder == ">":
        copy = copy.astype(copy.dtype.newbyteorder("<"))
    if copy.dtype.str not in _TYPES:
        raise MessageError(f"arrays: {name!r} must hold integers or floats of up to 64 bits")
    if copy.dtype.kind == "f" and not np.isfinite(copy).all():
        raise MessageError(f"arrays: {name!r} must be finite")
    copy.setflags(write=False)
    return copy


def _parse_header(text: bytes) -> dict[str, Any]:
    """Return the JSON of a message, checked for its fields."""
    try:
        top = json.loads(text)
    except (ValueError, RecursionError):
        raise MessageError("data is not a nearveil message: its header is broken") from None
    if not isinstance(top, dict) or set(top) != _FIELDS or not isinstance(top["arrays"], dict):
        raise MessageError(f"data must have exactly the fields {sorted(_FIELDS)}")
    return top


def _read_forms(described: dict[str, Any], largest: Shapes | None) -> list[tuple[str, str, list[int]]]:
    """Return name, type and shape of the arrays that a header describes."""
    forms = []
    for name, entry in sorted(described.items()):
        if not (isinstance(entry, list) and len(entry) == 2 and entry[0] in _TYPES and isinstance(entry[1], list)):
            raise MessageError(f"arrays: {name!r} has a type that is not known")
        kind, shape = entry
        if len(shape) > 3 or not all(type(side) is int and 0 <= side <= _LARGEST for side in shape):
            raise MessageError(f"arrays: {name!r} has an impossible shape")
        if largest is not None:
            check_shape(name, shape, largest)
        forms.append((name, kind, shape))
    return forms


def _split_body(forms: list[tuple[str, str, list[int]]], body: bytes) -> dict[str, NDArray[Any]]:
    """Cut the body into arrays; it must end with the last of them."""
    arrays = {}
    start = 0
    for name, kind, shape in forms:
        count = int(np.prod(shape, dtype=object)) if shape else 1
        end = start + count * np.dtype(kind).itemsize
        if end > len(body):
            raise MessageError("data is truncated")
        arrays[name] = np.frombuffer(body[start:end], dtype=kind).reshape(shape)
        start = end
    if start != len(body):
        raise MessageError("data has bytes after its end")
    return arrays
