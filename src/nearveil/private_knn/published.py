"""The parts that published models share: bytes of numbers and JSON, in which a reader trusts nothing."""

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
from dp_accounting import DpEvent
from numpy.typing import NDArray

from nearveil.mechanisms.messages import Message, MessageError
from nearveil.privacy import Basis, Guarantee
from nearveil.wire.frames import MOST_FEATURES

MOST_CLASSES = 4096
MOST_TEXT = 1 << 20  # bytes of the names of all classes and of the guarantee
_LONGEST_WORDS = 1000  # characters of one text
_GUARANTEE_FIELDS = ("epsilon", "delta", "unit", "reason", "source", "extra_delta")
_KINDS = {"U": str, "i": int, "f": float, "b": bool}


class ModelError(MessageError):
    """Bytes are not a published model: truncated, of another version, too large, or with parts that do not fit."""


class PublicModel(ABC):
    """A model that may be published."""

    @abstractmethod
    def to_bytes(self) -> bytes:
        """Return the model as bytes: numbers and JSON, no code."""

    @classmethod
    @abstractmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read a model, or raise a MessageError. Nothing in the bytes is trusted."""

    @classmethod
    def load(cls, path: str | os.PathLike[str], **options: Any) -> Self:
        """Read a model from a file, with the options of :meth:`from_bytes`."""
        return cls.from_bytes(Path(path).read_bytes(), **options)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`to_bytes` to a file."""
        Path(path).write_bytes(self.to_bytes())


Forms = dict[str, tuple[str, tuple[int, ...]]]
"""Names of the arrays that a model may have, each with its dtype and its largest shape."""


@contextmanager
def open_model(data: bytes, name: str, forms: Forms, fields: set[str]) -> Iterator[tuple[Message, dict[str, Any]]]:
    """Yield the arrays of a published model and its description. Errors of reading their parts become a ModelError."""
    message = Message.from_bytes(data, {array: largest for array, (_, largest) in forms.items()})
    if message.mechanism != name:
        raise ModelError(f"data is not a {name}")
    if any(values.dtype != np.dtype(forms[array][0]) for array, values in message.arrays.items()):
        raise ModelError("data is not a model: numbers of another type")
    try:
        about = json.loads(message["about"].tobytes())
    except (ValueError, RecursionError):
        about = None
    if not isinstance(about, dict) or set(about) != fields | {"classes", "kind", "guarantee"}:
        raise ModelError("data is not a model: its description cannot be read")
    try:
        yield message, about
    except (KeyError, TypeError, OverflowError, RecursionError, AttributeError):
        raise ModelError(f"data is not a {name}: a part is missing or of another kind") from None
    except MessageError:
        raise
    except ValueError as error:
        raise ModelError(f"data is not a valid {name}: {error}") from None


def encode_about(
    classes: NDArray[Any], guarantee: Guarantee, events: dict[str, Any], **fields: Any
) -> NDArray[np.uint8]:
    """Encode the description of a published model as JSON; `events` describes those of the guarantee."""
    labels, kind = list_classes(classes)
    promise = {name: getattr(guarantee, name) for name in _GUARANTEE_FIELDS} | events
    about = {"classes": labels, "kind": kind, "guarantee": promise, **fields}
    return np.frombuffer(json.dumps(about, sort_keys=True).encode(), dtype=np.uint8)


def list_classes(classes: NDArray[Any]) -> tuple[list[Any], str]:
    """Return labels as values of JSON, and their kind."""
    kind = {"u": "i", "O": "U"}.get(classes.dtype.kind, classes.dtype.kind)
    if kind not in _KINDS:
        raise ValueError("classes must be text or numbers")
    return list(map(_KINDS[kind], classes.tolist())), kind


def read_classes(labels: Any, kind: Any) -> NDArray[Any]:
    """Return the labels of a published model, or raise a ModelError."""
    expected = _KINDS.get(kind) if isinstance(kind, str) else None
    if expected is None or not isinstance(labels, list) or not 1 <= len(labels) <= MOST_CLASSES:
        raise ModelError(f"classes must be a list of 1 to {MOST_CLASSES} labels")
    if not all(type(label) is expected for label in labels):
        raise ModelError("classes must be labels of one type")
    if expected is str and not all(_is_showable(label) for label in labels):
        raise ModelError(f"classes must be labels of at most {_LONGEST_WORDS} characters that print")
    classes = np.array(labels)
    if classes.dtype.kind != kind or len(np.unique(classes)) != len(classes):
        raise ModelError("classes must be different labels")
    return classes


def _is_showable(text: Any) -> bool:
    """Return whether it is text that can be shown: no control characters, none that turn the direction of others."""
    return isinstance(text, str) and len(text) <= _LONGEST_WORDS and text.isprintable()


def read_guarantee(fields: dict[str, Any], basis: Basis, events: tuple[DpEvent, ...]) -> Guarantee:
    """Return the guarantee that a model states; an accountant checks it against its events."""
    check_words(fields["unit"], fields["reason"])
    return Guarantee(
        epsilon=float(fields["epsilon"]),
        delta=float(fields["delta"]),
        protects="database",
        unit=fields["unit"],
        relation="add-remove",
        basis=basis,
        sound=not fields["reason"],
        reason=fields["reason"],
        events=events,
        extra_delta=float(fields["extra_delta"]),
        source=fields["source"],
    )


def check_words(*texts: Any) -> None:
    """Refuse text of a published model that is too long, or that would not print as it is."""
    if not all(map(_is_showable, texts)):
        raise ModelError(f"unit and reason must be text of at most {_LONGEST_WORDS} characters that print")


def check_publishable(classes: NDArray[Any], n_features: int, unit: str) -> None:
    """Refuse classes, features and units that no published model can hold, before anything is paid."""
    check_words(unit)
    labels, kind = list_classes(classes)
    read_classes(labels, kind)
    if len(json.dumps(labels)) > MOST_TEXT // 2:
        raise ValueError(f"classes must be at most {MOST_TEXT // 2:,} bytes of text together")
    if n_features > MOST_FEATURES:
        raise ValueError(f"X must have at most {MOST_FEATURES:,} features; reduce their number before")
