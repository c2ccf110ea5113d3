"""The discriminant that is published: it predicts for everybody, and states its guarantee for the records."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
from numpy.typing import ArrayLike, NDArray
from scipy.special import softmax
from sklearn.utils import check_array

from nearveil.frames import MOST_FEATURES
from nearveil.mechanisms.base import Message, MessageError, fingerprint
from nearveil.privacy import Basis, Guarantee
from nearveil.votes.discriminant_model import COUNT_UNIT, SENSITIVITY, ClassProjection, Rows

_NAME = "discriminant"
MOST_CLASSES = 4096
MOST_PUBLICATIONS = 1_000_000
_MOST_TEXT = 1 << 20  # bytes of the names of all classes and of the guarantee
_LONGEST_WORDS = 1000  # characters of one text
_LARGEST = {
    "about": (_MOST_TEXT,),
    "components": (MOST_FEATURES, MOST_FEATURES),
    "offset": (MOST_FEATURES,),
    "scale": (MOST_FEATURES,),
    "reach": (1,),
    "weights": (MOST_CLASSES, MOST_FEATURES),
    "biases": (MOST_CLASSES,),
    "counts": (MOST_CLASSES,),
}
CLEAR = 5
"""A class is learned well if it has this many times as many records as there is noise on their count."""
BASIS = Basis("Gaussian mechanism on whole-number sums, priced by PLD", "docs/theory/private-discriminant.md")
_KINDS = {"U": str, "i": int, "f": float, "b": bool}


class ModelError(MessageError):
    """Bytes are not a discriminant: truncated, of another version, too large, or with parts that do not fit."""


@dataclass(frozen=True, eq=False)
class PublicDiscriminant:
    """A private discriminant, to be published: it holds no record and no account. Made by ``export()``.

    Attributes
    ----------
    classes : ndarray of shape (n_classes,)
        Sorted.
    guarantee : Guarantee
        What holds for the private records, whoever has the model.
    projection : Projection
        Learned from public rows.
    weights : ndarray of shape (n_classes, n_directions), float32
    biases : ndarray of shape (n_classes,), float32
    counts : ndarray of shape (n_classes,), float32
        Noisy numbers of records, as they were released: negative where there is much noise.

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> from nearveil.votes import PrivateDiscriminant
    >>> X, y = load_digits(return_X_y=True)
    >>> model = PrivateDiscriminant(2.0, classes=range(10)).fit(X[:1000], y[:1000], public=X[1000:1500]).export()
    >>> again = PublicDiscriminant.from_bytes(model.to_bytes())
    >>> bool((again.predict(X[1500:]) == model.predict(X[1500:])).all())
    True
    """

    classes: NDArray[Any]
    guarantee: Guarantee
    projection: ClassProjection = field(repr=False)
    weights: NDArray[np.float32] = field(repr=False)
    biases: NDArray[np.float32] = field(repr=False)
    counts: NDArray[np.float32] = field(repr=False)

    def __post_init__(self) -> None:
        for name in ("classes", "weights", "biases", "counts"):
            values = np.array(getattr(self, name), dtype=None if name == "classes" else np.float32, order="C")
            values.setflags(write=False)
            object.__setattr__(self, name, values)
        n_classes = len(self.classes)
        if not 1 <= n_classes <= MOST_CLASSES or self.classes.ndim != 1:
            raise ModelError(f"classes must be a list of 1 to {MOST_CLASSES} labels")
        shapes = [self.weights.shape, self.biases.shape, self.counts.shape]
        if shapes != [(n_classes, self.projection.n_directions), (n_classes,), (n_classes,)]:
            raise ModelError("weights, biases and counts must fit the classes and the projection")
        if not all(np.isfinite(values).all() for values in (self.weights, self.biases, self.counts)):
            raise ModelError("weights, biases and counts must be finite")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).from_bytes, (self.to_bytes(),)

    @property
    def n_features(self) -> int:
        """How many numbers a row has."""
        return self.projection.n_features

    @property
    def model_id(self) -> str:
        """A fingerprint of everything in the model, 32 hexadecimal digits."""
        return fingerprint(*self._arrays().values())

    @property
    def noise_per_class(self) -> float:
        """Standard deviation of the noise on each of `counts`, in records: that of the noise in the guarantee."""
        (event,) = self.guarantee.events
        return float(event.event.noise_multiplier * SENSITIVITY / COUNT_UNIT)

    @property
    def noisy_classes(self) -> NDArray[Any]:
        """Classes with fewer than five times as many records as there is noise on their count, as far as is known."""
        noisy: NDArray[Any] = self.classes[self.counts < CLEAR * self.noise_per_class]
        return noisy

    def decision_function(self, X: ArrayLike) -> Rows:
        """Score rows. Costs nothing.

        Parameters
        ----------
        X : array-like of shape (n, n_features)

        Returns
        -------
        ndarray of shape (n, n_classes), or (n,) for two classes
            Logarithms of the probabilities, up to a constant for each row; for two classes, the second's minus the
            first's.
        """
        scores = self._scores(X)
        return scores[:, 1] - scores[:, 0] if len(self.classes) == 2 else scores

    def predict_proba(self, X: ArrayLike) -> Rows:
        """Return the probability of each class, where all classes are equally common. Costs nothing.

        Parameters
        ----------
        X : array-like of shape (n, n_features)

        Returns
        -------
        ndarray of shape (n, n_classes)
        """
        probabilities: Rows = softmax(self._scores(X), axis=1)
        return probabilities

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """Classify rows. Costs nothing.

        Parameters
        ----------
        X : array-like of shape (n, n_features)

        Returns
        -------
        ndarray of shape (n,)
        """
        found: NDArray[Any] = self.classes[np.argmax(self._scores(X), axis=1)]
        return found

    def _scores(self, X: ArrayLike) -> Rows:
        rows: Rows = check_array(X, dtype=np.float64, input_name="X")
        if rows.shape[1] != self.n_features:
            raise ValueError(f"X must have {self.n_features} features, as the model has; it has {rows.shape[1]}")
        return self.projection.transform(rows) @ self.weights.T.astype(np.float64) + self.biases

    def to_bytes(self) -> bytes:
        """Return the model as bytes: numbers and JSON, no code. Whoever reads them needs nothing of yours.

        Returns
        -------
        bytes
        """
        return Message(_NAME, self.model_id, self._arrays()).to_bytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read a model. Nothing in the bytes is trusted, and sizes are checked before anything is read.

        Parameters
        ----------
        data : bytes
            As :meth:`to_bytes` made them.

        Returns
        -------
        PublicDiscriminant

        Raises
        ------
        MessageError
            If they are not a model.
        """
        read = Message.from_bytes(data, _LARGEST)
        if read.mechanism != _NAME:
            raise ModelError("data is not a discriminant")
        about = _parse_about(read["about"])
        try:
            model = cls(
                classes=_read_classes(about["classes"], about["kind"]),
                guarantee=_read_guarantee(about["guarantee"]),
                projection=_read_projection(read, int(about["n_features"])),
                weights=_check_type(read["weights"], "<f4"),
                biases=_check_type(read["biases"], "<f4"),
                counts=_check_type(read["counts"], "<f4"),
            )
        except (KeyError, TypeError, OverflowError):
            raise ModelError("data is not a discriminant: a part is missing or of another kind") from None
        except ModelError:
            raise
        except ValueError as error:
            raise ModelError(f"data is not a valid discriminant: {error}") from None
        if model.model_id != read.public_id:
            raise ModelError("data is not the model that it says it is")
        return model

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model to a file.

        Parameters
        ----------
        path : str or path-like
        """
        Path(path).write_bytes(self.to_bytes())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a model from a file, as :meth:`from_bytes` does.

        Parameters
        ----------
        path : str or path-like

        Returns
        -------
        PublicDiscriminant
        """
        return cls.from_bytes(Path(path).read_bytes())

    def _arrays(self) -> dict[str, NDArray[Any]]:
        projection = self.projection
        about = {
            "classes": _list_classes(self.classes),
            "kind": _kind_of(self.classes),
            "n_features": projection.n_features,
            "guarantee": _guarantee_fields(self.guarantee),
        }
        arrays: dict[str, NDArray[Any]] = {
            "about": np.frombuffer(json.dumps(about, sort_keys=True).encode(), dtype=np.uint8),
            "offset": projection.offset.astype("<f8"),
            "scale": projection.scale.astype("<f8"),
            "reach": np.array([projection.reach], dtype="<f8"),
            "weights": self.weights,
            "biases": self.biases,
            "counts": self.counts,
        }
        return arrays if projection.components is None else {**arrays, "components": projection.components}


def check_publishable(classes: NDArray[Any], n_features: int, unit: str) -> None:
    """Refuse what no published model can hold: before anything is paid."""
    _check_words(unit)
    if _kind_of(classes) not in _KINDS:
        raise ValueError("classes must be text or numbers")
    labels = _list_classes(classes)
    _read_classes(labels, _kind_of(classes))
    if len(json.dumps(labels)) > _MOST_TEXT // 2:
        raise ValueError(f"classes must be at most {_MOST_TEXT // 2:,} bytes of text together")
    if n_features > MOST_FEATURES:
        raise ValueError(f"X must have at most {MOST_FEATURES:,} features; reduce their number before")


def _kind_of(classes: NDArray[Any]) -> str:
    kind = classes.dtype.kind
    return {"u": "i", "O": "U"}.get(kind, kind)


def _list_classes(classes: NDArray[Any]) -> list[Any]:
    return list(map(_KINDS[_kind_of(classes)], classes.tolist()))


def _parse_about(values: NDArray[Any]) -> dict[str, Any]:
    try:
        about = json.loads(_check_type(values, "|u1").tobytes())
    except (ValueError, RecursionError):
        about = None
    if not isinstance(about, dict) or set(about) != {"classes", "kind", "n_features", "guarantee"}:
        raise ModelError("data is not a discriminant: what it says about itself cannot be read")
    return about


def _check_type(values: NDArray[Any], kind: str) -> NDArray[Any]:
    if values.dtype != np.dtype(kind):
        raise ModelError("data is not a discriminant: numbers of another type")
    return values


def _read_classes(labels: Any, kind: Any) -> NDArray[Any]:
    expected = _KINDS.get(kind) if isinstance(kind, str) else None
    if expected is None or not isinstance(labels, list) or not 1 <= len(labels) <= MOST_CLASSES:
        raise ModelError(f"classes must be a list of 1 to {MOST_CLASSES} labels")
    if not all(type(label) is expected for label in labels):
        raise ModelError("classes must be labels of one type")
    if expected is str and not all(_fits(label) for label in labels):
        raise ModelError(f"classes must be labels of at most {_LONGEST_WORDS} characters that print")
    found = np.array(labels)
    if found.dtype.kind != kind or len(np.unique(found)) != len(found):
        raise ModelError("classes must be different labels")
    return found


def _fits(text: Any) -> bool:
    """Return whether it is text that can be shown: no control characters, none that turn the direction of others."""
    return isinstance(text, str) and len(text) <= _LONGEST_WORDS and text.isprintable()


def _read_projection(read: Message, n_features: int) -> ClassProjection:
    offset, scale, reach = (_check_type(read[name], "<f8") for name in ("offset", "scale", "reach"))
    components = _check_type(read["components"], "<i2") if "components" in read.arrays else None
    shape = (n_features, len(offset)) if components is None else components.shape
    if offset.ndim != 1 or not len(offset) or scale.shape != offset.shape or reach.shape != (1,) or reach[0] <= 0:
        raise ModelError("projection must have an offset and a scale for each direction, and a reach above 0")
    if shape != (n_features, len(offset)) or (components is None and n_features != len(offset)) or n_features < 1:
        raise ModelError("projection must fit the number of features")
    return ClassProjection(components, offset, scale, float(reach[0]), n_features)


def _guarantee_fields(guarantee: Guarantee) -> dict[str, Any]:
    (event,) = guarantee.events
    return {
        "epsilon": guarantee.epsilon,
        "delta": guarantee.delta,
        "unit": guarantee.unit,
        "reason": guarantee.reason,
        "source": guarantee.source,
        "extra_delta": guarantee.extra_delta,
        "noise_multiplier": event.event.noise_multiplier,
        "publications": event.count,
    }


def _read_guarantee(fields: dict[str, Any]) -> Guarantee:
    """Return the guarantee that a model states; an accountant checks it against its events."""
    publications, reason, unit = fields["publications"], fields["reason"], fields["unit"]
    if type(publications) is not int or not 1 <= publications <= MOST_PUBLICATIONS:
        raise ModelError(f"publications must be from 1 to {MOST_PUBLICATIONS}")
    _check_words(unit, reason)
    return Guarantee(
        epsilon=float(fields["epsilon"]),
        delta=float(fields["delta"]),
        protects="database",
        unit=unit,
        relation="add-remove",
        basis=BASIS,
        sound=not reason,
        reason=reason,
        events=(SelfComposedDpEvent(GaussianDpEvent(float(fields["noise_multiplier"])), publications),),
        extra_delta=float(fields["extra_delta"]),
        source=fields["source"],
    )


def _check_words(*texts: Any) -> None:
    if not all(map(_fits, texts)):
        raise ModelError(f"unit and reason must be text of at most {_LONGEST_WORDS} characters that print")
