"""The interface of all releases (fit public rows, release private rows, rank a gallery), and their messages."""

import copy
import hashlib
import json
import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from functools import cached_property
from numbers import Integral
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self

import numpy as np
import scipy.sparse
from numpy.typing import ArrayLike, NDArray
from sklearn.exceptions import NotFittedError

from nearveil.errors import NearveilError
from nearveil.metrics import scale_to_unit
from nearveil.privacy import Basis, Guarantee
from nearveil.privacy.checks import NumberCheck, check_numbers, check_rows
from nearveil.privacy.noise import GaussianNoise, LaplaceNoise, Source, secure_source
from nearveil.privacy.parameters import Parameters

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


Floats = NDArray[np.float64]

CODE_BYTES = 128  # size of a candidate in an answer with compact codes, including its id
_ROUNDING = 1e-9  # 0.29 of 100 items is 29, although the product of the floats is smaller


class Release(Parameters, ABC):
    """A mechanism with messages that reveal no more about a private record than its guarantee says.

    Both sides fit the same public rows. The client calls :meth:`release` and sends the message; the server calls
    :meth:`rank`. Both first centre features by the public mean and scale them to norm one.

    `fit` returns a fitted copy, which is immutable so that it always matches its guarantee
    (``docs/theory/guarantee.md``). To change a parameter, use ``clone(release).set_params(...)`` and fit the clone.

    Subclasses implement the abstract methods and pass the suite of ``tests/mechanisms/conformance.py``.

    Examples
    --------
    >>> from nearveil.mechanisms import PrivUnit
    >>> rows = np.random.default_rng(0).standard_normal((50, 8))
    >>> mechanism = PrivUnit(4.0).fit(rows[:20])
    >>> mechanism.rank(mechanism.release(rows[20]), rows[21:]).shape
    (29,)
    """

    name: ClassVar[str]
    _public_names: ClassVar[tuple[str, ...]]  # parameters that both sides must share
    _guarantee: Guarantee

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "guarantee" in vars(cls):
            raise TypeError(f"{cls.__name__} must define _make_guarantee, not guarantee: fit stores its result")

    def fit(self, public_X: ArrayLike, public_y: ArrayLike | None = None) -> Self:
        """Return a copy that has learned the data that both sides share from public rows.

        Some mechanisms use integer labels. Never fit private rows: messages and maps reveal them.
        """
        rows = check_rows(public_X, "public_X")
        labels = None if public_y is None else check_labels(public_y, len(rows), "public_y")
        # A digest of the input, not of results: sums differ in their last bits between machines.
        return self._fit_public(rows, labels, fingerprint(rows, labels))

    def _fit_public(self, rows: Floats, labels: NDArray[np.int64] | None, public_digest: str) -> Self:
        """Return a fitted copy; it has deep copies of the parameters, so no caller can change them."""
        learner: Self = object.__new__(type(self))
        learner.__dict__.update(copy.deepcopy(self.get_params(deep=False)))
        learner.n_features_in_ = rows.shape[1]
        with np.errstate(over="ignore"):  # _unit_rows raises an error
            learner.mean_ = rows.mean(axis=0)
        learner._public_digest = public_digest
        learner._fit(learner._unit_rows(rows, "public_X", lenient=True), labels)
        return learner._with_attributes(_guarantee=learner._make_guarantee())

    def _with_attributes(self, **attributes: Any) -> Self:
        """Return a copy with more attributes, without cached properties, and with read-only arrays."""
        extended: Self = object.__new__(type(self))
        extended.__dict__.update(self.__getstate__(), **attributes)
        _make_read_only(tuple(extended.__dict__.values()))
        return extended

    def __setattr__(self, name: str, value: Any) -> None:
        """Raise an error if the release is fitted: its guarantee would no longer match."""
        self._refuse_change(name)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        """Raise an error if the release is fitted, as for an assignment."""
        self._refuse_change(name)
        super().__delattr__(name)

    def set_params(self, **params: Any) -> Self:
        """Set parameters, also of nested estimators. Raises an error if the release is fitted."""
        for name in params:
            self._refuse_change(name)
        super().set_params(**params)
        return self

    def _refuse_change(self, name: str) -> None:
        if "_guarantee" in vars(self):
            raise AttributeError(
                f"{name} of a fitted {type(self).__name__} cannot change, because its guarantee would not match. "
                "Use clone(release).set_params(...) and fit the clone."
            )

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without cached properties: a release that was used is pickled as before."""
        state = super().__getstate__().items()
        return {
            name: value for name, value in state if not isinstance(getattr(type(self), name, None), cached_property)
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make arrays read-only again: pickles and deep copies do not preserve the flag."""
        super().__setstate__(state)
        if "_guarantee" in vars(self):
            _make_read_only(tuple(vars(self).values()))

    def features(self, X: ArrayLike, name: str = "X", *, lenient: bool = False) -> Floats:
        """Centre rows by the public mean and scale them to norm one.

        Errors call them `name`. If `lenient`, for public rows only, a row that equals the public mean becomes zeros
        instead of an error.
        """
        self._check_fitted()
        return self._unit_rows(check_rows(X, name), name, lenient=lenient)

    def _unit_rows(self, finite: Floats, name: str, *, lenient: bool) -> Floats:
        if finite.shape[1] != self.n_features_in_:
            raise ValueError(f"{name} must have {self.n_features_in_} columns, as public_X had")
        with np.errstate(over="ignore"):
            rows: Floats = finite - self.mean_
        if not np.isfinite(rows).all():
            raise ValueError(f"{name} contains numbers so large that their differences overflow; scale them down")
        if not lenient and not rows.any(axis=1).all():
            raise ValueError(f"{name} must not contain a row that equals the public mean: it has no direction")
        return scale_to_unit(rows)

    def release(self, X: ArrayLike, *, rng: Source | None = None) -> Any:
        """Make a message from a private row, or one from each row of a batch. Each row uses the guarantee once.

        `rng` is the operating system's by default; :func:`nearveil.privacy.noise.unsafe_seeded` voids the guarantee.
        """
        self._check_fitted()
        source = choose_source(rng)
        rows = check_numbers(X, "X")
        single = rows.ndim == 1
        features = self._unit_rows(check_rows(rows[None] if single else rows, "X"), "X", lenient=False)
        messages = self._release(features, source)
        return messages[0] if single else messages

    def rank(self, message: Message, gallery: ArrayLike) -> Floats:
        """Score the server's items by a message, shape (n,); a higher score means nearer.

        Both sides fit the same public rows.
        """
        self._check_messages([message])
        return self._rank(message, self._prepare(self.gallery_features(gallery)))

    def gallery_features(self, gallery: ArrayLike) -> NDArray[Any]:
        """Return the features of public rows, by which the server ranks; those without a direction are zero."""
        return self.features(gallery, "gallery", lenient=True)

    @property
    def guarantee(self) -> Guarantee:
        """Guarantee of one message with randomness from the operating system, as computed by :meth:`fit`."""
        self._check_fitted()
        return self._guarantee

    def guarantee_of(self, message: Message) -> Guarantee:
        """Return the guarantee of a message of this mechanism; a message from a seed has none."""
        self._check_messages([message])
        return self.guarantee.as_seeded() if message.seeded else self.guarantee

    @property
    def gallery_guarantee(self) -> Guarantee:
        """Guarantee for the server's items: none, because answers and the public map reveal them."""
        protected = {"protects": "database", "unit": "item"}
        return make_guarantee(math.inf, 0.0, "an open gallery", "docs/theory/covers.md", **protected)

    @cached_property
    def public_id(self) -> str:
        """Fingerprint of the data that both sides share; a field of every message."""
        self._check_fitted()
        return fingerprint(self.name, self._public_digest, *self._public_parts())

    @abstractmethod
    def _fit(self, features: Floats, labels: NDArray[np.int64] | None) -> None:
        """Learn from public features of norm one (or zero); may set attributes."""

    @abstractmethod
    def _make_guarantee(self) -> Guarantee:
        """Return the guarantee of one message; called once, after :meth:`_fit`."""

    @abstractmethod
    def _release(self, features: Floats, source: Source) -> list[Message]:
        """Make a message from each row; rows have norm one."""

    def _prepare(self, features: NDArray[Any]) -> Any:
        """Precompute the input of :meth:`_rank` from a gallery's features of norm one (or zero)."""
        return features

    @abstractmethod
    def _rank(self, message: Message, prepared: Any) -> Floats:
        """Score the items of a prepared gallery."""

    def _public_parts(self) -> tuple[object, ...]:
        """Return what the server needs to read a message besides the fitted rows: by default, `_public_names`."""
        return self._list_parameters(*self._public_names)

    def _list_parameters(self, *names: str) -> tuple[object, ...]:
        """Return constrained parameters as plain numbers, for the fingerprint."""
        rules = self._parameter_constraints
        kinds = [int if rules[name][0].type is Integral else float for name in names]
        values = [getattr(self, name) for name in names]
        return tuple(None if value is None else kind(value) for kind, value in zip(kinds, values, strict=True))

    def _messages(self, source: Source, /, **batches: NDArray[Any]) -> list[Message]:
        """Make one message from the first entries of all batches, one from the second, and so on."""
        public_id = self.public_id
        rows = zip(*batches.values(), strict=True)
        return [
            Message(self.name, public_id, dict(zip(batches, row, strict=True)), seeded=not source.sound) for row in rows
        ]

    def _check_messages(self, messages: Sequence[Message]) -> None:
        public_id = self.public_id
        for message in messages:
            if not isinstance(message, Message):
                raise MessageError("message must be a Message; parse bytes with Message.from_bytes")
            if message.mechanism != self.name:
                raise MessageError(f"message must come from {self.name!r}; it comes from {message.mechanism!r}")
            if message.public_id != public_id:
                raise MessageError(
                    "message was made with other public rows, parameters or map: fetch the map and query again"
                )

    def _check_fitted(self) -> None:
        if "_guarantee" not in vars(self):
            raise NotFittedError(f"{type(self).__name__} must be fitted: fit(public_X) returns the fitted object")


class TractableRelease(Release):
    """A release with a density of messages that can be computed."""

    def log_density(self, messages: Message | Sequence[Message], X: ArrayLike) -> Floats:
        """Return the log-density of messages given each possible row, shape (n_messages, n_rows).

        Up to a constant: the difference between two rows is a message's evidence for one against the other.
        """
        checked = [messages] if isinstance(messages, Message) else list(messages)
        features = self.features(X)
        self._check_messages(checked)
        return self._log_density(checked, features)

    @abstractmethod
    def _log_density(self, messages: list[Message], features: Floats) -> Floats:
        """Return the log-density of checked messages given features of norm one."""


class VectorRelease(Release):
    """A release with messages that are one vector; the server ranks by inner products with it."""

    _kind: ClassVar[Literal["int8", "float32"]] = "float32"
    _unit: ClassVar[float] = 1.0

    def _rank(self, message: Message, prepared: Floats) -> Floats:
        return np.asarray(prepared @ self._read_vectors([message], prepared.shape[1])[0], dtype=np.float64)

    def _read_vectors(self, messages: Sequence[Message], size: int) -> Floats:
        """Return the vectors of messages, one row for each."""
        vectors = [read_vector(message, "vector", self._kind, size) for message in messages]
        return self._unit * np.array(vectors).reshape(-1, size)


def make_guarantee(epsilon: float, delta: float, theorem: str, link: str, **details: Any) -> Guarantee:
    """Return a guarantee for the record in a message; a `reason` among the `details` makes it unsound."""
    stated = {"protects": "query", "unit": "record", "relation": "replace", **details}
    stated["sound"] = not details.get("reason")
    return Guarantee(epsilon=epsilon, delta=delta, basis=Basis(theorem, link), **stated)


def make_noise_guarantee(
    epsilon: float, delta: float, noises: Sequence[GaussianNoise | LaplaceNoise], theorem: str, link: str
) -> Guarantee:
    """Return the guarantee of a message with noises that compose; what samplers add to delta is included."""
    events, extra_delta = tuple(noise.event for noise in noises), sum(noise.extra_delta for noise in noises)
    costs = {"events": events, "extra_delta": extra_delta}
    return make_guarantee(float(epsilon), max(float(delta), extra_delta), theorem, link, **costs)


def _make_read_only(value: Any) -> None:
    """Make arrays read-only, also inside dataclasses, tuples and sparse arrays."""
    if isinstance(value, np.ndarray):
        value.setflags(write=False)
    elif isinstance(value, scipy.sparse.csr_array):
        _make_read_only((value.data, value.indices, value.indptr))
    elif isinstance(value, tuple):
        for part in value:
            _make_read_only(part)
    elif is_dataclass(value):
        _make_read_only(tuple(vars(value).values()))


check_fraction = NumberCheck(
    "be a fraction of the gallery, above 0 and at most 1", lambda number: 0 < number <= 1, "candidates"
)


def candidate_count(candidates: float, items: int) -> int:
    """Return floor(f N), the number of candidates in an answer; at least 1."""
    count = math.floor(check_fraction(candidates) * items + _ROUNDING)
    if count < 1:
        raise ValueError(f"candidates must be at least 1/{items}, one item of this gallery")
    return count


def check_labels(y: ArrayLike, n_rows: int, name: str) -> NDArray[np.int64]:
    """Check integer labels, one for each row."""
    labels = np.asarray(y)
    if labels.shape != (n_rows,):
        raise ValueError(f"{name} must hold one label for each of the {n_rows} rows")
    if labels.dtype.kind not in "iu":
        raise ValueError(f"{name} must be integers; encode names with numpy.unique(..., return_inverse=True)")
    return labels.astype(np.int64)


def choose_source(rng: Source | None) -> Source:
    """Return `rng` after a check, or the operating system's source."""
    if rng is None:
        return secure_source()
    if not (hasattr(rng, "words") and hasattr(rng, "sound")):
        raise ValueError("rng must be secure_source(), or unsafe_seeded(seed) in tests")
    return rng


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
