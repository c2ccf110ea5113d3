"""A published student as bytes: numbers and JSON, no code. Reading runs nothing that the bytes bring."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from dp_accounting import DpEvent, GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from numpy.typing import NDArray
from sklearn.dummy import DummyClassifier
from sklearn.linear_model._base import LinearClassifierMixin
from sklearn.metrics.pairwise import rbf_kernel
from sklearn.svm import SVC

from nearveil.ledger.budget import format_event, parse_event
from nearveil.mechanisms.base import Message, fingerprint
from nearveil.privacy import Basis, Guarantee
from nearveil.privacy.events import GaussianNoisyMax, LaplaceNoisyMax, NoisyScreening, VoteHistogram
from nearveil.private_knn._networks import NetworkStudent, flatten_network, restore_network
from nearveil.private_knn.published import (
    MOST_CLASSES,
    MOST_TEXT,
    ModelError,
    check_dtype,
    check_words,
    decode_about,
    encode_about,
    list_classes,
    list_guarantee,
    read_classes,
    read_guarantee,
    translate_errors,
)
from nearveil.wire.frames import MOST_FEATURES

Rows = NDArray[np.float64]
Kind = Literal["constant", "linear", "kernel", "network"]

_NAME = "student"
_LINK = "docs/theory/private-knn.md"
_MOST_ROWS = 1 << 20  # support vectors
_MOST_NUMBERS = 1 << 24  # of a network
_MOST_SIDE = 512  # of an image
_MOST_TIMES = 10**6  # queries of one event
_MOST_SCREENED = 20_000  # as many as plans compose exactly
_MOST_VOTERS = 10_000  # of a screening: to compose 20 of 100,000 voters takes a minute
_MOST_EVENTS = 2  # screenings and votes
_BATCH = 1024  # rows that are compared with the support vectors
_EVENTS = (GaussianNoisyMax, LaplaceNoisyMax, NoisyScreening, VoteHistogram)
_LARGEST = {
    "about": (MOST_TEXT,),
    "codes": (MOST_CLASSES,),
    "components": (MOST_FEATURES, MOST_FEATURES),
    "mean": (MOST_FEATURES,),
    "scale": (MOST_FEATURES,),
    "weights": (MOST_CLASSES, MOST_FEATURES),
    "biases": (MOST_CLASSES,),
    "vectors": (_MOST_ROWS, MOST_FEATURES),
    "coefficients": (MOST_CLASSES, _MOST_ROWS),
    "intercepts": (MOST_CLASSES * (MOST_CLASSES - 1) // 2,),
    "supports": (MOST_CLASSES,),
    "network": (_MOST_NUMBERS,),
}
_FIELDS = {"classes", "kind", "features", "guarantee", "model", "parameters", "whitening"}


@dataclass(frozen=True, eq=False)
class LinearModel:
    """Scores of classes that are linear in a row; of two classes, one score. Without features, a constant."""

    classes_: NDArray[Any]
    weights: Rows = field(repr=False)  # (n_scores, n_features)
    biases: Rows = field(repr=False)

    def predict(self, rows: Rows) -> NDArray[Any]:
        """Return the label of each row."""
        if len(self.classes_) == 1:
            return np.repeat(self.classes_, len(rows))
        scores = rows @ self.weights.T + self.biases
        chosen = scores.argmax(axis=1) if scores.shape[1] > 1 else (scores[:, 0] > 0).astype(np.intp)
        return np.asarray(self.classes_[chosen])


@dataclass(frozen=True, eq=False)
class KernelModel:
    """A support vector machine with a Gaussian kernel: each pair of classes votes, as libsvm's do."""

    classes_: NDArray[Any]
    gamma: float
    vectors: Rows = field(repr=False)  # ordered by class
    coefficients: Rows = field(repr=False)  # (n_classes - 1, n_vectors)
    intercepts: Rows = field(repr=False)  # of each pair of classes
    supports: NDArray[np.int64] = field(repr=False)  # vectors of each class

    def predict(self, rows: Rows) -> NDArray[Any]:
        """Return the label of each row."""
        parts = [self._vote(rows[i : i + _BATCH]) for i in range(0, len(rows), _BATCH)]
        return np.asarray(self.classes_[np.concatenate(parts)])

    def _vote(self, rows: Rows) -> NDArray[np.intp]:
        kernel = rbf_kernel(rows, self.vectors, gamma=self.gamma)
        n_classes, ends = len(self.classes_), np.cumsum(self.supports)
        parts = [slice(end - count, end) for end, count in zip(ends, self.supports, strict=True)]
        if n_classes == 2:
            return np.asarray(kernel @ self.coefficients[0] + self.intercepts[0] > 0, dtype=np.intp)
        votes, pair = np.zeros((len(rows), n_classes)), 0
        for i in range(n_classes):
            for j in range(i + 1, n_classes):
                first = kernel[:, parts[i]] @ self.coefficients[j - 1, parts[i]]
                second = kernel[:, parts[j]] @ self.coefficients[i, parts[j]]
                wins = first + second + self.intercepts[pair] > 0
                votes[:, i] += wins
                votes[:, j] += ~wins
                pair += 1
        return np.asarray(votes.argmax(axis=1))


@dataclass(frozen=True)
class StudentParts:
    """All that a published student holds."""

    classes: NDArray[Any]
    guarantee: Guarantee
    classifier: Any = field(repr=False)
    own_features: bool  # whether the reader must bring the function that makes features
    whitening: dict[str, Any] | None = field(repr=False)  # None where the classifier takes images

    def to_bytes(self) -> bytes:
        """Return the parts as bytes."""
        model, parameters, arrays = _list_model(self.classifier)
        events = [format_event(event) for event in self.guarantee.events]
        labels, kind = list_classes(self.classes)
        about = {
            "classes": labels,
            "kind": kind,
            "features": "own" if self.own_features else "default",
            "guarantee": {
                **list_guarantee(self.guarantee),
                "basis": self.guarantee.basis.name,
                "events": events,
            },
            "model": model,
            "parameters": parameters,
            "whitening": None,
        }
        arrays["codes"] = np.searchsorted(self.classes, self.classifier.classes_).astype("<i8")
        if self.whitening is not None:
            about["whitening"] = {name: self.whitening[name] for name in ("reach", "bits")}
            arrays |= {name: self.whitening[name].astype("<f8") for name in ("components", "mean", "scale")}
        arrays["about"] = encode_about(about)
        data = Message(_NAME, _fingerprint(arrays), arrays).to_bytes()
        Message.from_bytes(data, _LARGEST)  # refuses a model that no reader would take, as the next line does
        _read_events(events)
        return data

    @classmethod
    def from_bytes(cls, data: bytes) -> "StudentParts":
        """Read parts. Nothing in the bytes is trusted, and sizes are checked before anything is read."""
        message = Message.from_bytes(data, _LARGEST)
        if message.mechanism != _NAME:
            raise ModelError("data is not a student")
        with translate_errors("student"):
            parts = _read_parts(message, decode_about(message["about"], _FIELDS))
        if _fingerprint(dict(message.arrays)) != message.public_id:
            raise ModelError("data is not the student that it says it is")
        return parts


def _fingerprint(arrays: dict[str, NDArray[Any]]) -> str:
    return fingerprint(*(part for item in sorted(arrays.items()) for part in item))


def _list_model(classifier: Any) -> tuple[Kind, dict[str, Any], dict[str, NDArray[Any]]]:
    """Return the kind of a classifier, its parameters and its arrays."""
    if isinstance(classifier, NetworkStudent):
        parameters = {"architecture": classifier.architecture, "shape": list(classifier._shape)}
        return "network", parameters, {"network": flatten_network(classifier)}
    if isinstance(classifier, DummyClassifier) and classifier.strategy == "most_frequent":
        return "constant", {}, {}
    if isinstance(classifier, KernelModel):
        return "kernel", {"gamma": classifier.gamma}, _list_kernel(classifier)
    if isinstance(classifier, LinearModel):
        kind: Kind = "constant" if len(classifier.classes_) == 1 else "linear"
        return kind, {}, {"weights": classifier.weights, "biases": classifier.biases} if kind == "linear" else {}
    if type(classifier) is SVC and classifier.kernel == "rbf" and not classifier.break_ties:
        model = KernelModel(
            classifier.classes_,
            float(classifier._gamma),
            np.asarray(classifier.support_vectors_),
            np.asarray(classifier.dual_coef_),
            np.asarray(classifier.intercept_),
            np.asarray(classifier.n_support_, dtype=np.int64),
        )
        return _list_model(model)
    if isinstance(classifier, LinearClassifierMixin) and hasattr(classifier, "coef_"):
        weights, biases = np.atleast_2d(classifier.coef_), np.atleast_1d(classifier.intercept_)
        biases = np.broadcast_to(biases, len(weights))
        return "linear", {}, {"weights": weights.astype("<f8"), "biases": biases.astype("<f8")}
    raise ValueError(
        f"student {type(classifier).__name__} has no format without code: take the default, a NetworkStudent or a "
        "linear classifier of scikit-learn, or publish the model in a format of its own library"
    )


def _list_kernel(model: KernelModel) -> dict[str, NDArray[Any]]:
    floats = ("vectors", "coefficients", "intercepts")
    return {
        **{name: getattr(model, name).astype("<f8") for name in floats},
        "supports": model.supports.astype("<i8"),
    }


def _read_parts(message: Message, about: dict[str, Any]) -> StudentParts:
    classes = read_classes(about["classes"], about["kind"])
    if not np.array_equal(np.unique(classes), classes) or about["features"] not in ("own", "default"):
        raise ModelError("classes must be sorted, and features known")
    codes = check_dtype(message["codes"], "<i8")
    if codes.ndim != 1 or not len(codes) or codes[0] < 0 or codes[-1] >= len(classes) or np.any(np.diff(codes) <= 0):
        raise ModelError("codes must be those of classes, in their order")
    whitening = None
    if about["whitening"] is not None:
        whitening = _read_whitening(message, about["whitening"])
    if (whitening is None) != (about["model"] == "network"):
        raise ModelError("whitening must be given for rows, and for rows alone")
    width = None if whitening is None else len(whitening["scale"])
    classifier = _read_model(message, about["model"], about["parameters"], classes[codes], width)
    fields = about["guarantee"]
    check_words(fields["basis"])
    guarantee = read_guarantee(fields, Basis(fields["basis"], _LINK), _read_events(fields["events"]))
    return StudentParts(classes, guarantee, classifier, about["features"] == "own", whitening)


def _read_whitening(message: Message, fields: dict[str, Any]) -> dict[str, Any]:
    components, mean, scale = (check_dtype(message[name], "<f8") for name in ("components", "mean", "scale"))
    reach, bits = fields["reach"], fields["bits"]
    if type(reach) is not float or not 0 < reach < math.inf or type(bits) is not int or not 1 <= bits <= 52:
        raise ModelError("whitening must have a positive reach, and from 1 to 52 bits")
    if not min(components.shape) or mean.shape != scale.shape or scale.shape != components.shape[1:]:
        raise ModelError("whitening must have a mean and a scale for each component")
    return {"components": components, "mean": mean, "scale": scale, "reach": reach, "bits": bits}


def _read_model(message: Message, kind: Any, fields: Any, classes: NDArray[Any], width: int | None) -> Any:
    n_classes = len(classes)
    if kind == "constant" and n_classes == 1:
        return LinearModel(classes, np.zeros((1, 0)), np.zeros(1))
    if n_classes < 2:
        raise ModelError("codes must be at least two, but for a constant")
    n_scores, n_pairs = 1 if n_classes == 2 else n_classes, n_classes * (n_classes - 1) // 2
    if kind == "linear":
        weights, biases = (check_dtype(message[name], "<f8") for name in ("weights", "biases"))
        _require(weights.shape == (n_scores, width) and biases.shape == (n_scores,))
        return LinearModel(classes, weights, biases)
    if kind == "kernel":
        arrays = {name: check_dtype(message[name], "<f8") for name in ("vectors", "coefficients", "intercepts")}
        supports, gamma = check_dtype(message["supports"], "<i8"), fields["gamma"]
        n_vectors = len(arrays["vectors"])
        _require(arrays["vectors"].shape == (n_vectors, width) and n_vectors > 0)
        _require(arrays["coefficients"].shape == (n_classes - 1, n_vectors))
        _require(arrays["intercepts"].shape == (n_pairs,) and supports.shape == (n_classes,))
        _require(bool(np.all((supports >= 0) & (supports <= n_vectors))) and int(supports.sum()) == n_vectors)
        _require(type(gamma) is float and 0 < gamma < math.inf)
        return KernelModel(classes, gamma, **arrays, supports=supports)
    _require(kind == "network")
    shape = fields["shape"]
    _require(isinstance(shape, list) and len(shape) == 3 and all(type(side) is int for side in shape))
    _require(1 <= shape[0] <= 4 and all(1 <= side <= _MOST_SIDE for side in shape[1:]))
    values = check_dtype(message["network"], "<f4")
    return restore_network(fields["architecture"], (shape[0], shape[1], shape[2]), classes, values)


def _require(fits: bool) -> None:
    if not fits:
        raise ModelError("the arrays of the classifier must fit its classes and features")


def _read_events(texts: Any) -> tuple[DpEvent, ...]:
    if not isinstance(texts, list) or not 1 <= len(texts) <= _MOST_EVENTS:
        raise ModelError(f"events must be 1 to {_MOST_EVENTS}")
    return tuple(_read_event(text) for text in texts)


def _read_event(text: Any) -> DpEvent:
    """Return votes or screenings, a limited number of times: an accountant prices no others here, nor for long."""
    event = parse_event(text) if isinstance(text, str) and len(text) <= 1000 else None
    if not isinstance(event, SelfComposedDpEvent) or not 1 <= event.count <= _MOST_TIMES:
        raise ModelError(f"events must be votes or screenings, 1 to {_MOST_TIMES:,} of them")
    inner = event.event.event if isinstance(event.event, PoissonSampledDpEvent) else event.event
    if isinstance(inner, NoisyScreening) and (inner.n_neighbors > _MOST_VOTERS or event.count > _MOST_SCREENED):
        raise ModelError(f"events must be at most {_MOST_SCREENED:,} screenings of at most {_MOST_VOTERS:,} voters")
    if not isinstance(inner, (*_EVENTS, GaussianDpEvent)):
        raise ModelError("events must be votes or screenings")
    return event
