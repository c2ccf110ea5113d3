"""Mechanisms of the papers for a served gallery: the public rows and parameters that client and server share."""

import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from nearveil.mechanisms._bitwise import OME, Latent
from nearveil.mechanisms._gaussian import AnalyticGaussian
from nearveil.mechanisms._privunit import PrivUnit
from nearveil.mechanisms.base import Release
from nearveil.mechanisms.catalog import REGISTRY, MechanismEntry
from nearveil.mechanisms.covers.channels import check_channel_epsilon
from nearveil.mechanisms.covers.maps import MOST_ITEMS, MapError
from nearveil.mechanisms.messages import Floats, Message, MessageError, fingerprint
from nearveil.privacy.checks import OUT_OF_RANGE, is_in_range
from nearveil.privatemail.mechanism import PrivateMail

_NAME = "release"  # of its encoding, which has the format of messages
_LARGEST = {"rows": (2_000, 16_000), "labels": (2_000,), "header": (1 << 20,)}
_FIELDS = {"mechanism": str, "epsilon": float, "classes": list, "n_items": int, "set_size": int, "public_digest": str}
SERVED = {
    entry.name: entry for entry in REGISTRY if entry.kind in (PrivateMail, PrivUnit, AnalyticGaussian, Latent, OME)
}
"""The mechanisms that a gallery can be published for, besides covers."""
_DUMMIES = "privatemail (as published 2022)"  # Algorithm 1 has one dummy of each class


def check_served(name: str, *, allow_unsound: bool = False) -> MechanismEntry:
    """Return the entry of a mechanism that a gallery can be published for; an unsound one needs `allow_unsound`."""
    entry = SERVED.get(name)
    if entry is None:
        raise ValueError(f"mechanism: {name!r} cannot be served; use covers, {', '.join(SERVED)}")
    if entry.labelled and not allow_unsound:
        raise ValueError(
            f"mechanism: {name} is unsound, and only for comparison: its messages reveal the query, whatever epsilon "
            "says. To use it with data that need no protection, add --allow-unsound (allow_unsound=True)"
        )
    return entry


@dataclass(frozen=True, eq=False)
class PublicRelease:
    """The public map of a gallery for a mechanism of the papers: both sides fit the same rows."""

    reach_: ClassVar = 1.0  # messages can return every item

    mechanism: str  #: its name in the registry
    epsilon: float  #: of each message; messages of another epsilon mean something else
    rows: NDArray[np.float32] = field(repr=False)  #: anchors, shape (m, d)
    labels: NDArray[np.int64] = field(repr=False)  #: of the rows; empty without classes
    classes: tuple[str, ...]  #: names of the labels
    n_items: int  #: items of the gallery
    set_size: int  #: items of every answer
    public_digest: str  #: the fingerprint of its space and codes: messages for other codes are refused

    def __post_init__(self) -> None:
        try:
            check_served(self.mechanism, allow_unsound=True)
            check_channel_epsilon(self.epsilon)
        except ValueError as error:
            raise MapError(str(error)) from None
        if self.rows.dtype != np.float32 or self.rows.ndim != 2 or len(self.rows) < 2:
            raise MapError("rows must be a table of at least two rows of type f4")
        if not is_in_range(self.rows):
            raise MapError(f"rows {OUT_OF_RANGE}")
        if self.labels.dtype != np.int64 or self.labels.shape not in ((0,), (len(self.rows),)):
            raise MapError("labels must hold one number for each row, or none")
        if len(self.labels) and not (self.labels.min() >= 0 and self.labels.max() < len(self.classes)):
            raise MapError("labels must be positions of classes")
        if not all(isinstance(name, str) and name.isprintable() for name in self.classes):
            raise MapError("classes must be printable text")
        if not 1 <= self.set_size <= self.n_items <= MOST_ITEMS:
            raise MapError("set_size must be from 1 to n_items")
        for array in (self.rows, self.labels):
            array.setflags(write=False)

    @property
    def n_features(self) -> int:
        """The number of columns of the rows."""
        return int(self.rows.shape[1])

    @property
    def is_sound(self) -> bool:
        """Whether messages have a guarantee."""
        return not SERVED[self.mechanism].labelled

    @property
    def map_(self) -> Self:
        """What clients need: all of it."""
        return self

    @property
    def public_id(self) -> str:
        """The fingerprint of the mechanism with its rows, in every message."""
        return self.release.public_id

    @property
    def nbytes(self) -> int:
        """Size in bytes; a client fetches it once."""
        return len(self.to_bytes())

    @cached_property
    def release(self) -> Release:
        """The mechanism, fitted to the rows."""
        made: Release = SERVED[self.mechanism].make(float(self.epsilon))
        labels = self.labels if len(self.labels) else None
        try:
            fitted: Any
            if self.mechanism == _DUMMIES:  # of the other half of the rows: among the anchors they would be recognised
                fitted = made.fit(self.rows[::2], self.labels[::2])
                fitted = fitted.with_dummies(self.rows[1::2], self.labels[1::2])
            else:
                fitted = made.fit(self.rows, labels)
            digest = fingerprint(fitted._public_digest, self.public_digest)
            return fitted._with_attributes(_public_digest=digest)  # type: ignore[no-any-return]
        except (ValueError, ImportError) as error:
            raise MapError(f"{self.mechanism} cannot be fitted to the public rows: {error}") from None

    def make_message(self, row: Floats, label: str | None, source: Any) -> Message:
        """Make a message from a private row; an unsound mechanism needs its class, too."""
        release: Any = self.release
        if not (row - release.mean_).any():
            # A server may choose rows with a suspect's feature as their mean: an error would reveal it.
            row = row + np.eye(1, len(row))[0]
        labels = {} if self.is_sound else {"labels": self.find_label(label)}
        return release.release(row, rng=source, **labels)  # type: ignore[no-any-return]

    def find_label(self, label: str | None) -> int:
        """Return the number of a class."""
        if label not in self.classes:
            raise ValueError(
                f"label: {self.mechanism} uses the class of the query: name one of {', '.join(self.classes[:20])}"
            )
        return self.classes.index(label)

    def prepare(self, gallery: NDArray[np.float32], labels: NDArray[np.int64]) -> Any:
        """Return the server's half, prepared for many messages: features, projections or an embedding."""
        release = self.release
        if not self.is_sound:
            embedded: Any = release
            return embedded.embed_gallery(gallery, labels)
        return release._prepare(release.gallery_features(gallery).astype(np.float32))

    def rank(self, message: Message, prepared: Any) -> Floats:
        """Score the items of a prepared gallery; of several targets, each ranks it, and the best rank counts."""
        release: Any = self.release
        release._check_messages([message])
        if isinstance(release, PrivateMail):
            self._check_targets(message)
        if self.is_sound:
            return np.asarray(release._rank(message, prepared))
        scores = release.rank_each(message, prepared)
        return np.asarray(scores.argsort(axis=1, kind="stable").argsort(axis=1, kind="stable").max(axis=0), np.float64)

    def _check_targets(self, message: Message) -> None:
        """Refuse a message with more targets or steps than clients make: each one embeds or ranks the gallery again."""
        release, most = self.release, len(self.classes) if self.mechanism == _DUMMIES else 1
        assert isinstance(release, PrivateMail)
        steps = message.arrays.get("steps", release.n_public_steps)
        if np.any(steps != release.n_public_steps) or len(release._engine.read(message)[0]) > most:
            raise MessageError(f"message must have at most {most} targets, and {release.n_public_steps} public steps")

    def to_bytes(self) -> bytes:
        """Serialize it, in the format of messages."""
        header = {name: getattr(self, name) for name in _FIELDS} | {"classes": list(self.classes)}
        text = np.frombuffer(json.dumps(header, sort_keys=True).encode(), np.uint8)
        arrays: dict[str, NDArray[Any]] = {"rows": self.rows, "labels": self.labels, "header": text}
        return Message(_NAME, fingerprint(*arrays.values()), arrays).to_bytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Parse untrusted bytes, or raise a MessageError."""
        parts = Message.from_bytes(data, _LARGEST)
        try:
            header = json.loads(parts["header"].tobytes())
        except (ValueError, RecursionError):
            raise MapError("data is not a public release: the header is corrupted") from None
        if parts.mechanism != _NAME or not isinstance(header, dict) or set(header) != set(_FIELDS):
            raise MapError("data is not a public release")
        if any(type(header[name]) is not kind for name, kind in _FIELDS.items()):
            raise MapError("data is not a public release: the header has values of other types")
        return cls(rows=parts["rows"], labels=parts["labels"], **header | {"classes": tuple(header["classes"])})
