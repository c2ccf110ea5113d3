"""Messages of mechanisms: their format, and the parts of a release that a client needs."""

import hashlib
import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray

from nearveil.errors import NearveilError
from nearveil.privacy import Basis, Guarantee
from nearveil.privacy.checks import NumberCheck

Floats = NDArray[np.float64]
COVERS = "covers"  # the mechanism with a PublicMap

_MAGIC = b"NVM"
_HEADER = struct.Struct("<3sBI")  # magic, version, length of the JSON header
_TYPES = ("|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<f4", "<f8")
_LARGEST = 64 << 20  # bytes of a message
_LARGEST_JSON = 1 << 16
_MOST_ARRAYS = 16
_FIELDS = {"mechanism", "public_id", "seeded", "arrays"}

Shapes = Mapping[str, tuple[int, ...]]


class MessageError(NearveilError, ValueError):
    """Raised for invalid message bytes, and for a message of another mechanism or map."""


@dataclass(frozen=True, eq=False)
class Message:
    """All that a release sends to the server. Messages with equal fields are equal.

    Examples
    --------
    >>> message = Message("cells", "0f", {"cell": np.array(3, dtype=np.int32)})
    >>> Message.from_bytes(message.to_bytes()) == message
    True
    """

    version: ClassVar[int] = 1

    mechanism: str  #: the name of the mechanism, such as "privunit"
    public_id: str  #: fingerprint of the public data that both sides share: anchors, projection, map
    arrays: Mapping[str, NDArray[Any]] = field(repr=False)  #: finite integers or floats, stored as read-only copies
    seeded: bool = False  #: whether the noise came from a seed; such a message has no guarantee

    def __post_init__(self) -> None:
        if not (isinstance(self.mechanism, str) and isinstance(self.public_id, str) and isinstance(self.seeded, bool)):
            raise MessageError("mechanism and public_id must be str, and seeded must be bool")
        if not 1 <= len(self.arrays) <= _MOST_ARRAYS or not all(isinstance(name, str) for name in self.arrays):
            raise MessageError(f"arrays must be 1 to {_MOST_ARRAYS} named arrays")
        arrays = {name: _freeze_array(name, values) for name, values in sorted(self.arrays.items())}
        object.__setattr__(self, "arrays", MappingProxyType(arrays))

    def __getitem__(self, name: str) -> NDArray[Any]:
        try:
            return self.arrays[name]
        except KeyError:
            raise MessageError(f"arrays must hold {name!r}: the message has another kind or version") from None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Message) and self.to_bytes() == other.to_bytes()

    def __hash__(self) -> int:
        return hash(self.to_bytes())

    def __reduce__(self) -> tuple[Any, ...]:
        return Message.from_bytes, (self.to_bytes(),)

    @property
    def nbytes(self) -> int:
        """Size of the message in bytes."""
        return len(self.to_bytes())

    def to_bytes(self) -> bytes:
        """Serialize the message; equal messages give equal bytes on every machine."""
        forms = {name: [values.dtype.str, list(values.shape)] for name, values in self.arrays.items()}
        header = {"mechanism": self.mechanism, "public_id": self.public_id, "seeded": self.seeded, "arrays": forms}
        text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
        body = b"".join(values.tobytes() for values in self.arrays.values())
        return _HEADER.pack(_MAGIC, self.version, len(text)) + text + body

    @classmethod
    def from_bytes(cls, data: bytes, largest: Shapes | None = None) -> Self:
        """Parse untrusted bytes, or raise a MessageError.

        `largest` names the allowed arrays, each with its largest shape.
        """
        if len(data) > _LARGEST:
            raise MessageError(f"data must be at most {_LARGEST} bytes")
        if len(data) < _HEADER.size or data[:3] != _MAGIC:
            raise MessageError("data is not a nearveil message")
        _, version, length = _HEADER.unpack_from(data)
        if version != cls.version:
            raise MessageError(f"data has format version {version}; this program reads version {cls.version}")
        end = _HEADER.size + length
        if length > _LARGEST_JSON or end > len(data):
            raise MessageError("data is truncated")
        try:
            header = json.loads(data[_HEADER.size : end])
        except (ValueError, RecursionError):
            raise MessageError("data is not a nearveil message: the header is corrupted") from None
        if not isinstance(header, dict) or set(header) != _FIELDS or not isinstance(header["arrays"], dict):
            raise MessageError(f"data must have exactly the fields {sorted(_FIELDS)}")
        forms = {name: _check_form(name, form, largest) for name, form in sorted(header["arrays"].items())}
        arrays = {}
        for name, (kind, shape) in forms.items():
            start, end = end, end + math.prod(shape) * kind.itemsize
            if end > len(data):
                raise MessageError("data is truncated")
            arrays[name] = np.frombuffer(data[start:end], dtype=kind).reshape(shape)
        if end != len(data):
            raise MessageError("data has bytes after its end")
        return cls(**{**header, "arrays": arrays})


def read_vector(message: Message, name: str, kind: Literal["int8", "float32"], size: int) -> NDArray[np.float64]:
    """Return a vector of a message as doubles, after a check of its type and length."""
    vector = message[name]
    if vector.dtype != np.dtype(kind) or vector.shape != (size,):
        raise MessageError(f"arrays: {name!r} must hold {size} numbers of type {kind}")
    return vector.astype(np.float64)


def check_shape(name: str, shape: Sequence[int], largest: Shapes, error: type[MessageError] = MessageError) -> None:
    """Raise an error if the array is unknown or larger than its limit in any dimension."""
    most = largest.get(name)
    if most is None:
        raise error(f"arrays: {name!r} is an unexpected array")
    if len(shape) != len(most) or any(side > limit for side, limit in zip(shape, most, strict=True)):
        raise error(f"{name} must be an array of at most {' x '.join(map(str, most)) or 'one number'}")


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


def _check_form(name: str, form: Any, largest: Shapes | None) -> tuple[np.dtype[Any], list[int]]:
    """Return the type and shape of an array from the header of a message."""
    if not (isinstance(form, list) and len(form) == 2 and form[0] in _TYPES and isinstance(form[1], list)):
        raise MessageError(f"arrays: {name!r} has an unknown type")
    kind, shape = form
    if len(shape) > 3 or not all(type(side) is int and 0 <= side <= _LARGEST for side in shape):
        raise MessageError(f"arrays: {name!r} has an invalid shape")
    if largest is not None:
        check_shape(name, shape, largest)
    return np.dtype(kind), shape


_ROUNDING = 1e-9  # 0.29 of 100 items is 29, although the product of the floats is smaller


def make_guarantee(epsilon: float, delta: float, theorem: str, link: str, **details: Any) -> Guarantee:
    """Return a guarantee for the record in a message; a `reason` among the `details` makes it unsound."""
    stated = {"protects": "query", "unit": "record", "relation": "replace", **details}
    stated["sound"] = not details.get("reason")
    return Guarantee(epsilon=epsilon, delta=delta, basis=Basis(theorem, link), **stated)


check_fraction = NumberCheck(
    "be a fraction of the gallery, above 0 and at most 1", lambda number: 0 < number <= 1, "candidates"
)


def candidate_count(candidates: float, items: int) -> int:
    """Return floor(f N), the number of candidates in an answer; at least 1."""
    count = math.floor(check_fraction(candidates) * items + _ROUNDING)
    if count < 1:
        raise ValueError(f"candidates must be at least 1/{items}, one item of this gallery")
    return count


def fingerprint(*parts: object) -> str:
    """Return a hash of arrays, numbers and text: 32 hexadecimal digits, the same on every machine."""
    total = hashlib.sha256()
    for part in parts:
        if isinstance(part, np.ndarray):
            small = np.ascontiguousarray(part, dtype=part.dtype.newbyteorder("<"))
            total.update(f"{small.dtype.str}{small.shape};".encode())
            total.update(small.reshape(-1).view(np.uint8).data)
        else:
            total.update(f"{type(part).__name__}:{part!r};".encode())
    return total.hexdigest()[:32]
