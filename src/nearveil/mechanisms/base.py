"""The one interface of all releases (fit on what is public, release what is private, rank), and their messages."""

import copy
import hashlib
import json
import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self

import numpy as np
import scipy.sparse
from dp_accounting import DpEvent
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator
from sklearn.exceptions import NotFittedError

from nearveil.errors import NearveilError
from nearveil.privacy import Basis, Guarantee
from nearveil.privacy.checks import check_integer, check_numbers, check_rows
from nearveil.privacy.noise import Source, secure_source

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


Floats = NDArray[np.float64]

CODE_BYTES = 128  # of a candidate in an answer with compact codes, its id included
_ROUNDING = 1e-9  # 0.29 of 100 items is 29 of them, though the product of the floats is below


class Release(BaseEstimator, ABC):  # type: ignore[misc]
    """A mechanism that tells a server about a private record no more than its guarantee says.

    Both sides fit the same public rows. The client calls :meth:`release` and sends the message; the server calls
    :meth:`rank`. Features are centred by the public mean and brought to norm one first.

    Fitting freezes parameters and guarantee together (``docs/theory/guarantee.md``): after a parameter is changed,
    everything that needs a fit raises an error until `fit` is called again, and what was learned cannot be assigned.

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

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "guarantee" in vars(cls):
            raise TypeError(f"{cls.__name__} must define _make_guarantee: fit keeps what it returns as guarantee")

    def fit(self, public_X: ArrayLike, public_y: ArrayLike | None = None) -> Self:
        """Learn what both sides share from public rows and, where a mechanism uses them, their integer labels.

        Never give it private rows: they would be in the open.
        """
        rows = check_rows(public_X, "public_X")
        labels = None if public_y is None else check_labels(public_y, len(rows), "public_y")
        given = self.get_params(deep=False)
        # A twin learns, from copies of the parameters: nobody can reach into what it has learned, and where it fails,
        # or another thread is at work, nothing is half fitted.
        twin = self._with_attributes(copy.deepcopy(given))
        twin._learn(rows, labels)
        learned = {name: value for name, value in vars(twin).items() if name not in given}
        _make_read_only(tuple(learned.values()))
        fitted_with = {name: _copy_parameter(value) for name, value in given.items()}
        object.__setattr__(self, "__dict__", {**given, **learned, "_fitted_with": fitted_with})
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse what a fit has learned, and anything else but a parameter: the guarantee is that of the fit."""
        if name not in vars(self).get("_fitted_with", (name,)):
            raise self._make_refusal(name)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        """Refuse, once this is fitted, as assigning does."""
        if "_fitted_with" in vars(self):
            raise self._make_refusal(name)
        super().__delattr__(name)

    def _make_refusal(self, name: str) -> AttributeError:
        return AttributeError(
            f"{name} of a fitted {type(self).__name__} belongs to its guarantee: change parameters and call fit again"
        )

    def _store(self, *, without: tuple[str, ...] = (), **learned: Any) -> None:
        """Store, read-only, what was learned besides the fit, and forget what is named in `without`."""
        _make_read_only(tuple(learned.values()))
        kept = {name: value for name, value in vars(self).items() if name not in without}
        object.__setattr__(self, "__dict__", {**kept, **learned})

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Lock again what was learned: pickles and deep copies hold arrays that can be written to."""
        super().__setstate__(state)
        given = self.get_params(deep=False)
        _make_read_only(tuple(value for name, value in vars(self).items() if name not in given))

    def _learn(self, rows: Floats, labels: NDArray[np.int64] | None) -> None:
        self.n_features_in_ = rows.shape[1]
        with np.errstate(over="ignore"):  # told below, in words
            self.mean_ = rows.mean(axis=0)
        # Of what was given, not of what is computed from it: sums differ in their last bits between machines.
        self._public_digest = fingerprint(rows, labels)
        self._fit(self._unit_rows(rows, "public_X", lenient=True), labels)
        self._guarantee = self._make_guarantee()

    def features(self, X: ArrayLike, name: str = "X", *, lenient: bool = False) -> Floats:
        """Centre rows by the public mean and bring them to norm one.

        Parameters
        ----------
        X : array-like of shape (n, d)
        name : str, default="X"
            What an error calls them.
        lenient : bool, default=False
            Whether a row that equals the public mean becomes zeros instead of an error. For public rows alone.

        Returns
        -------
        ndarray of shape (n, d)
        """
        self._check_fitted()
        return self._unit_rows(X, name, lenient=lenient)

    def _unit_rows(self, X: ArrayLike, name: str, *, lenient: bool) -> Floats:
        checked = check_rows(X, name)
        if checked.shape[1] != self.n_features_in_:
            raise ValueError(f"{name} must have {self.n_features_in_} columns, as public_X had")
        with np.errstate(over="ignore"):
            rows: Floats = checked - self.mean_
        if not np.isfinite(rows).all():
            raise ValueError(f"{name} holds numbers so large that their differences overflow: scale them down")
        if not lenient and not rows.any(axis=1).all():
            raise ValueError(f"{name} must not hold a row that equals the public mean: centred, it is zero")
        return scale_to_unit(rows)

    def release(self, X: ArrayLike, *, rng: Source | None = None) -> Any:
        """Make a message of a private row, or of each row of a batch. Spends the guarantee once for every row.

        Parameters
        ----------
        X : array-like of shape (d,) or (n, d)
            Private.
        rng : Source, optional
            The operating system's by default. :func:`nearveil.privacy.noise.unsafe_seeded` voids the guarantee.

        Returns
        -------
        Message or list of Message
        """
        fitted = self._snapshot()
        source = secure_source() if rng is None else check_source(rng)
        rows = check_numbers(X, "X")
        single = rows.ndim == 1
        found = fitted._release(fitted.features(rows[None] if single else rows), source)
        return found[0] if single else found

    def rank(self, message: Message, gallery: ArrayLike) -> Floats:
        """Score the server's items by what the message tells.

        Parameters
        ----------
        message : Message
            Of this mechanism, fitted on the same public rows.
        gallery : array-like of shape (n, d)

        Returns
        -------
        ndarray of shape (n,)
            The higher, the nearer.
        """
        fitted = self._snapshot()
        fitted._check_messages([message])
        return fitted._rank(message, fitted._prepare(fitted.features(gallery, "gallery", lenient=True)))

    def answer_bytes(self, n: int) -> int:
        """Return the bytes of an answer with compact codes that holds `n` candidates for each target of a message."""
        return CODE_BYTES * check_integer(n, "n")

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee of one message, with randomness from the operating system: as it was when this was fitted."""
        return self._snapshot()._guarantee

    def guarantee_of(self, message: Message) -> Guarantee:
        """Return the guarantee of a message of this mechanism: none where its noise came from a seed."""
        self._check_messages([message])
        return self.guarantee.as_seeded() if message.seeded else self.guarantee

    @property
    def gallery_guarantee(self) -> Guarantee:
        """The guarantee for the server's items: none. Answers, and the public map, are made of them."""
        return replace(
            make_guarantee(math.inf, 0.0, "an open gallery", "docs/theory/covers.md"), protects="database", unit="item"
        )

    @property
    def public_id(self) -> str:
        """The fingerprint of all that both sides must share. Messages carry it."""
        self._check_fitted()
        return fingerprint(self.name, self._public_digest, *self._public_parts())

    @abstractmethod
    def _fit(self, features: Floats, labels: NDArray[np.int64] | None) -> None:
        """Learn from public features of norm one (or zero)."""

    @abstractmethod
    def _make_guarantee(self) -> Guarantee:
        """Return the guarantee of one message; called once, after :meth:`_fit`."""

    @abstractmethod
    def _release(self, features: Floats, source: Source) -> list[Message]:
        """Make a message of each row; rows have norm one."""

    def _prepare(self, features: Floats) -> Any:
        """Return what a server computes once of its gallery, features of norm one (or zero), for :meth:`_rank`."""
        return features

    @abstractmethod
    def _rank(self, message: Message, prepared: Any) -> Floats:
        """Score the items of a gallery that was prepared."""

    @abstractmethod
    def _public_parts(self) -> tuple[object, ...]:
        """Return parameters and public arrays, other than the fitted rows, that a message's meaning depends on."""

    def _messages(self, source: Source, /, **batches: NDArray[Any]) -> list[Message]:
        """Make one message of the first entries of all batches, one of the second, and so on."""
        public_id = self.public_id
        rows = zip(*batches.values(), strict=True)
        return [
            Message(self.name, public_id, dict(zip(batches, row, strict=True)), seeded=not source.sound) for row in rows
        ]

    def _check_messages(self, messages: Sequence[Message]) -> None:
        public_id = self.public_id
        for message in messages:
            if not isinstance(message, Message):
                raise MessageError("message must be a Message; Message.from_bytes reads one")
            if message.mechanism != self.name:
                raise MessageError(f"message must come from {self.name!r}; it comes from {message.mechanism!r}")
            if message.public_id != public_id:
                raise MessageError(
                    "message was made with other public rows, parameters or map: fetch the map and ask anew"
                )

    def _snapshot(self) -> Self:
        """Return this mechanism as it is now, with the parameters of its fit, whatever other threads change."""
        one = self._with_attributes(vars(self).copy())
        one._check_fitted()
        return one

    def _with_attributes(self, attributes: dict[str, Any]) -> Self:
        other = object.__new__(type(self))
        other.__dict__ = attributes
        return other

    def _check_fitted(self) -> None:
        fitted_with = vars(self).get("_fitted_with")
        if fitted_with is None:
            raise NotFittedError(f"{type(self).__name__} must be fitted on public rows first: call fit(public_X)")
        changed = [name for name, value in fitted_with.items() if not _is_same(getattr(self, name), value)]
        if changed:
            raise NotFittedError(f"parameters changed after fit ({', '.join(changed)}): call fit again")


class TractableRelease(Release):
    """A release whose messages have a density that can be computed."""

    def log_density(self, messages: Message | Sequence[Message], X: ArrayLike) -> Floats:
        """Return the log-density of messages for each row that may have caused them, shape (n_messages, n_rows).

        Up to a constant: the difference between two rows is a message's evidence for one against the other.
        """
        given = [messages] if isinstance(messages, Message) else list(messages)
        features = self.features(X)
        self._check_messages(given)
        return self._log_density(given, features)

    @abstractmethod
    def _log_density(self, messages: list[Message], features: Floats) -> Floats:
        """Return the log-density of messages that were checked, for features of norm one."""


def make_guarantee(
    epsilon: float,
    delta: float,
    theorem: str,
    link: str,
    *,
    events: tuple[DpEvent, ...] = (),
    extra_delta: float = 0.0,
    reason: str = "",
) -> Guarantee:
    """Return the guarantee about the record that a message is made of; `reason` says why it is not sound."""
    return Guarantee(
        epsilon=epsilon,
        delta=delta,
        protects="query",
        unit="record",
        relation="replace",
        basis=Basis(theorem, link),
        sound=not reason,
        reason=reason,
        events=events,
        extra_delta=extra_delta,
    )


def _copy_parameter(value: Any) -> Any:
    """Return a parameter to compare with: arrays and lists as copies, anything else as itself."""
    if isinstance(value, np.ndarray):
        return value.copy()
    return type(value)(map(_copy_parameter, value)) if type(value) in (list, tuple) else value


def _is_same(now: Any, then: Any) -> bool:
    """Return whether a parameter is unchanged: by value, or for other objects by identity, as `fit` copied them."""
    if now is then:
        return True
    if type(now) is not type(then):
        return False
    if isinstance(then, np.ndarray):
        return now.dtype == then.dtype and np.array_equal(now, then)
    if isinstance(then, list | tuple):
        return len(now) == len(then) and all(map(_is_same, now, then))
    return isinstance(then, int | float | str | np.generic) and bool(now == then)


def _make_read_only(value: Any) -> None:
    """Lock the arrays that a fit has learned, also inside dataclasses, tuples and sparse arrays."""
    if isinstance(value, np.ndarray):
        value.setflags(write=False)
    elif isinstance(value, scipy.sparse.csr_array):
        _make_read_only((value.data, value.indices, value.indptr))
    elif isinstance(value, tuple):
        for part in value:
            _make_read_only(part)
    elif is_dataclass(value):
        _make_read_only(tuple(vars(value).values()))


def scale_to_unit(rows: Floats) -> Floats:
    """Divide rows by their norms, in place; rows of zeros stay zeros."""
    # Scaled first: squares of tiny or huge numbers leave the range of a float.
    largest = np.abs(rows).max(axis=1, keepdims=True)
    np.divide(rows, largest, out=rows, where=largest > 0)
    norms = np.sqrt(np.einsum("ij,ij->i", rows, rows))[:, None]
    np.divide(rows, norms, out=rows, where=norms > 0)
    return rows


def candidate_count(candidates: float, items: int) -> int:
    """Return floor(f N), how many candidates an answer holds, or say that f is too small for one."""
    count = math.floor(check_fraction(candidates) * items + _ROUNDING)
    if count < 1:
        raise ValueError(f"candidates must be at least 1/{items}, one item of this gallery")
    return count


def check_fraction(candidates: float) -> float:
    """Return the fraction of a gallery that an answer holds, or say what is wrong with it."""
    if isinstance(candidates, bool) or not isinstance(candidates, (int, float, np.number)) or not 0 < candidates <= 1:
        raise ValueError("candidates must be a fraction of the gallery, above 0 and at most 1")
    return float(candidates)


def check_number(value: float, name: str) -> float:
    """Return a real number as a float, or say that it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise ValueError(f"{name} must be a number")
    return float(value)


def check_labels(y: ArrayLike, n_rows: int, name: str) -> NDArray[np.int64]:
    """Return integer labels, one a row."""
    labels = np.asarray(y)
    if labels.shape != (n_rows,):
        raise ValueError(f"{name} must hold one label for each of the {n_rows} rows")
    if labels.dtype.kind not in "iu":
        raise ValueError(f"{name} must be integers; numpy.unique(..., return_inverse=True) numbers names")
    return labels.astype(np.int64)


def check_source(rng: Source) -> Source:
    """Return the source, or refuse what is none."""
    if not (hasattr(rng, "words") and hasattr(rng, "sound")):
        raise ValueError("rng must be secure_source(), or unsafe_seeded(seed) where a test asks for it")
    return rng


def fingerprint(*parts: object) -> str:
    """Return 32 hexadecimal digits that stand for arrays, numbers and text, on every machine alike."""
    total = hashlib.sha256()
    for part in parts:
        if isinstance(part, np.ndarray):
            small = np.ascontiguousarray(part, dtype=part.dtype.newbyteorder("<"))
            total.update(f"{small.dtype.str}{small.shape};".encode())
            total.update(small.reshape(-1).view(np.uint8).data)
        else:
            total.update(f"{type(part).__name__}:{part!r};".encode())
    return total.hexdigest()[:32]
