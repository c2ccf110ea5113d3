"""A published student, and its bytes: numbers and JSON, no code, so that reading never runs any."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import numpy as np
from dp_accounting import DpEvent, GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from numpy.typing import ArrayLike, NDArray
from sklearn.decomposition import PCA
from sklearn.dummy import DummyClassifier
from sklearn.linear_model._base import LinearClassifierMixin
from sklearn.metrics.pairwise import rbf_kernel
from sklearn.svm import SVC, LinearSVC

from nearveil.features.extractor import hog
from nearveil.ledger.budget import format_event, parse_event
from nearveil.mechanisms.messages import Message, fingerprint
from nearveil.privacy import Basis, Guarantee
from nearveil.privacy.events import GaussianNoisyMax, LaplaceNoisyMax, NoisyScreening, VoteHistogram
from nearveil.private_knn import published
from nearveil.private_knn.scaling import EXACT, Rows, multiply_exactly
from nearveil.wire.frames import MOST_FEATURES

Features = Callable[[NDArray[Any]], NDArray[Any]]
Kind = Literal["constant", "linear", "kernel", "network"]

AT_ONCE = 4096  # rows that are mapped, or of a kernel matrix
_NAME = "student"
_LINK = "docs/theory/private-knn.md"
_MOST_ROWS = 1 << 20  # support vectors
_MOST_NUMBERS = 1 << 24  # of a network
_MOST_TIMES = 10**6  # queries of one event
_MOST_SCREENED = 20_000  # as many as plans compose exactly
_MOST_VOTERS = 10_000  # of a screening: to compose 20 of 100,000 voters takes a minute
_MOST_EVENTS = 2  # screenings and votes
_BATCH = 1024  # rows that are compared with the support vectors
_EVENTS = (GaussianNoisyMax, LaplaceNoisyMax, NoisyScreening, VoteHistogram)
_ARRAYS: published.Forms = {
    "about": ("|u1", (published.MOST_TEXT,)),
    "codes": ("<i8", (published.MOST_CLASSES,)),
    "components": ("<f8", (MOST_FEATURES, MOST_FEATURES)),
    "mean": ("<f8", (MOST_FEATURES,)),
    "scale": ("<f8", (MOST_FEATURES,)),
    "weights": ("<f8", (published.MOST_CLASSES, MOST_FEATURES)),
    "biases": ("<f8", (published.MOST_CLASSES,)),
    "vectors": ("<f8", (_MOST_ROWS, MOST_FEATURES)),
    "coefficients": ("<f8", (published.MOST_CLASSES, _MOST_ROWS)),
    "intercepts": ("<f8", (published.MOST_CLASSES * (published.MOST_CLASSES - 1) // 2,)),
    "supports": ("<i8", (published.MOST_CLASSES,)),
    "network": ("<f4", (_MOST_NUMBERS,)),
}


@dataclass(frozen=True)
class ImageFormat:
    """The bytes of a class of classifiers that take images: parameters and numbers."""

    classifier: type
    flatten: Callable[[Any], tuple[dict[str, Any], NDArray[np.float32]]]
    restore: Callable[
        [dict[str, Any], NDArray[Any], NDArray[np.float32]], Any
    ]  # parameters and classes are not trusted


IMAGE_FORMATS: dict[Kind, ImageFormat] = {}
"""Formats by kind; ``studies.networks`` adds "network"."""
_FIELDS = {"features", "model", "parameters", "whitening"}


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


@dataclass(frozen=True, eq=False)
class HalfWhitening:
    """Principal components of the public rows, each scaled by its variance to the power of -1/4."""

    # May be used on private rows: an image depends on its own row alone, bit for bit
    # (tests/private_knn/test_student.py).

    components: Rows = field(repr=False)  # whole numbers: multiples of a public step
    mean: Rows = field(repr=False)  # the image of the public mean, without the scale
    scale: Rows = field(repr=False)
    reach: float  # the largest public magnitude: larger values are cut off
    bits: int  # of a rounded row, and of a component

    @classmethod
    def learn(cls, public: Rows, n_components: int = 64) -> Self:
        """Learn the components from public rows."""
        n, d = public.shape
        if not np.ptp(public, axis=0).any():
            raise ValueError("public must hold rows that differ")
        pca = PCA(min(n_components, n - 1, d), random_state=0).fit(public)
        varied = pca.explained_variance_ > 1e-9 * pca.explained_variance_[0]
        bits = (EXACT - math.ceil(math.log2(d + 1))) // 2
        reach = float(np.abs(public).max()) or 1.0
        components = np.rint(pca.components_[varied].T * 2.0**bits)
        mean = multiply_exactly(pca.mean_[None], components, reach, bits)[0]
        scale = pca.explained_variance_[varied] ** -0.25 * reach * 4.0**-bits
        return cls(components, mean, scale, reach, bits)

    def transform(self, rows: Rows) -> Rows:
        """Map rows."""
        n_features = len(self.components)
        if rows.shape[1] != n_features:
            raise ValueError(f"X must have {n_features:,} features for each row, as in fit; it has {rows.shape[1]:,}")
        return (multiply_exactly(rows, self.components, self.reach, self.bits) - self.mean) * self.scale


def normalize_rows(rows: Rows) -> Rows:
    """Return rows of norm 1; rows of zeros stay."""
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(norms > 0, norms, 1.0)


def extract_rows(X: NDArray[Any], features: Features | None) -> Rows:
    """Return the features of images; without a function, the rows themselves."""
    extract = features if features is not None else hog if X.ndim > 2 else np.asarray
    rows = np.asarray(extract(X), dtype=np.float64)
    if rows.ndim != 2 or len(rows) != len(X) or not np.isfinite(rows).all():
        raise ValueError("features must return one row of finite numbers for each image")
    return rows


def map_rows(X: NDArray[Any], features: Features | None, space: HalfWhitening) -> Rows:
    """Return half-whitened features, in parts."""
    parts = range(0, len(X), AT_ONCE)
    return np.concatenate([space.transform(extract_rows(X[i : i + AT_ONCE], features)) for i in parts])


def check_rows(X: ArrayLike, name: str) -> NDArray[Any]:
    """Return rows or images of finite numbers."""
    try:
        array = np.asarray(X)
    except ValueError:
        raise ValueError(f"{name} must hold rows of one shape") from None
    if array.ndim not in (2, 3, 4) or not len(array):
        raise ValueError(f"{name} must contain at least one row, or one image, of one shape")
    if array.dtype.kind not in "biuf" or not np.isfinite(array).all():
        raise ValueError(f"{name} must hold finite numbers")
    return array


@dataclass(frozen=True, eq=False)
class PublicStudent(published.PublicModel):
    """A trained student, to be published: it predicts, and states its guarantee for the private records.

    It holds no record, no voter and no account. Made by :meth:`Student.export`; publish :meth:`to_bytes`.

    Examples
    --------
    >>> from nearveil.private_knn import PrivateKNeighborsClassifier, Student
    >>> X, y = np.random.default_rng(0).normal(size=(600, 4)), np.repeat([0, 1], 300)
    >>> voter = PrivateKNeighborsClassifier(epsilon=2.0, max_answered=20, max_screened=0, classes=range(2))
    >>> public = Student(voter, random_state=0).fit(X[:500], y[:500], public=X[500:]).export()
    >>> again = PublicStudent.from_bytes(public.to_bytes())
    >>> bool((again.predict(X) == public.predict(X)).all()), f"{public.guarantee.epsilon:.2f}"
    (True, '2.00')
    """

    classes: NDArray[Any]  #: shape (n_classes,)
    guarantee: Guarantee  #: for the private records
    _classifier: Any = field(repr=False)
    _features: Features | None = field(repr=False)
    _space: HalfWhitening | None = field(repr=False)  # None if the classifier takes images

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """Classify rows or images. Costs nothing."""
        rows = check_rows(X, "X")
        if self._space is not None:
            rows = normalize_rows(map_rows(rows, self._features, self._space))
        return np.asarray(self._classifier.predict(rows))

    def to_bytes(self) -> bytes:
        """Return the student as bytes: numbers and JSON, no code.

        Of the default, a linear classifier or ``studies.networks.NetworkStudent``: others have no format without code.
        """
        space = self._space
        has_function = space is not None and self._features not in (None, hog)
        kind, parameters, arrays = _list_model(self._classifier)
        events = [format_event(event) for event in self.guarantee.events]
        if space is not None:
            arrays |= {name: getattr(space, name) for name in ("components", "mean", "scale")}
        arrays["codes"] = np.searchsorted(self.classes, self._classifier.classes_)
        arrays["about"] = published.encode_about(
            self.classes,
            self.guarantee,
            {"basis": self.guarantee.basis.name, "events": events},
            features="own" if has_function else "default",
            model=kind,
            parameters=parameters,
            whitening=None if space is None else {"reach": space.reach, "bits": space.bits},
        )
        arrays = {name: values.astype(_ARRAYS[name][0]) for name, values in arrays.items()}
        data = Message(_NAME, _fingerprint(arrays), arrays).to_bytes()
        with published.open_model(data, _NAME, _ARRAYS, _FIELDS):  # refuses a model that readers would refuse
            _read_events(events)
        return data

    @classmethod
    def from_bytes(cls, data: bytes, *, features: Features | None = None) -> Self:
        """Read a student, or raise a MessageError. Nothing in the bytes is trusted, and nothing in them is run.

        `features` are those of the :class:`Student`, if it had any.
        """
        with published.open_model(data, _NAME, _ARRAYS, _FIELDS) as (message, about):
            parts = _read_parts(message, about)
        if _fingerprint(dict(message.arrays)) != message.public_id:
            raise published.ModelError("data is corrupted: its fingerprint does not match")
        if (about["features"] == "own") != (features is not None):
            raise ValueError(
                "features must be left out: the student was trained without a function"
                if features is not None
                else "features must be the function that the student was trained with"
            )
        return cls(*parts[:3], features, parts[3])


def _fingerprint(arrays: dict[str, NDArray[Any]]) -> str:
    return fingerprint(*(part for item in sorted(arrays.items()) for part in item))


def _list_model(classifier: Any) -> tuple[Kind, dict[str, Any], dict[str, NDArray[Any]]]:
    """Return the kind of a classifier, its parameters and its arrays."""
    for kind, form in IMAGE_FORMATS.items():
        if isinstance(classifier, form.classifier):
            parameters, numbers = form.flatten(classifier)
            return kind, parameters, {"network": numbers}
    if isinstance(classifier, DummyClassifier) and len(classifier.classes_) == 1:
        return "constant", {}, {}
    if isinstance(classifier, KernelModel):
        names = ("vectors", "coefficients", "intercepts", "supports")
        return "kernel", {"gamma": classifier.gamma}, {name: getattr(classifier, name) for name in names}
    if type(classifier) is SVC and classifier.kernel == "rbf" and not classifier.break_ties:
        svc = classifier
        arrays = {"vectors": svc.support_vectors_, "coefficients": svc.dual_coef_, "intercepts": svc.intercept_}
        return "kernel", {"gamma": float(svc._gamma)}, arrays | {"supports": svc.n_support_}
    if isinstance(classifier, LinearClassifierMixin) and hasattr(classifier, "coef_"):
        weights = np.atleast_2d(classifier.coef_)
        biases = np.broadcast_to(np.atleast_1d(classifier.intercept_), len(weights))
        return "linear", {}, {"weights": weights, "biases": biases}
    raise ValueError(
        f"student {type(classifier).__name__} has no format without code: take the default, a NetworkStudent or a "
        "linear classifier of scikit-learn, or publish the model in its library's format"
    )


def _read_parts(message: Message, about: dict[str, Any]) -> tuple[NDArray[Any], Guarantee, Any, HalfWhitening | None]:
    classes = published.read_classes(about["classes"], about["kind"])
    if not np.array_equal(np.unique(classes), classes) or about["features"] not in ("own", "default"):
        raise published.ModelError("classes must be sorted, and features known")
    codes = message["codes"]
    if codes.ndim != 1 or not len(codes) or codes[0] < 0 or codes[-1] >= len(classes) or np.any(np.diff(codes) <= 0):
        raise published.ModelError("codes must be those of classes, in their order")
    whitening = None if about["whitening"] is None else _read_whitening(message, about["whitening"])
    if (whitening is None) != (about["model"] == "network"):
        raise published.ModelError("whitening must be given for rows, and not for images")
    width = None if whitening is None else len(whitening.scale)
    classifier = _read_model(message, about["model"], about["parameters"], classes[codes], width)
    fields = about["guarantee"]
    published.check_words(fields["basis"])
    guarantee = published.read_guarantee(fields, Basis(fields["basis"], _LINK), _read_events(fields["events"]))
    return classes, guarantee, classifier, whitening


def _read_whitening(message: Message, fields: dict[str, Any]) -> HalfWhitening:
    components, mean, scale = (message[name] for name in ("components", "mean", "scale"))
    reach, bits = fields["reach"], fields["bits"]
    if type(reach) is not float or not 0 < reach < math.inf or type(bits) is not int or not 1 <= bits <= 52:
        raise published.ModelError("whitening must have a positive reach, and from 1 to 52 bits")
    if not min(components.shape) or mean.shape != scale.shape or scale.shape != components.shape[1:]:
        raise published.ModelError("whitening must have a mean and a scale for each component")
    return HalfWhitening(components, mean, scale, reach, bits)


def _read_model(message: Message, kind: Any, fields: Any, classes: NDArray[Any], width: int | None) -> Any:
    n_classes = len(classes)
    if kind == "constant" and n_classes == 1:
        return DummyClassifier().fit(np.zeros((1, 1)), classes)
    if n_classes < 2:
        raise published.ModelError("codes must be at least two, except for a constant")
    n_scores, n_pairs = 1 if n_classes == 2 else n_classes, n_classes * (n_classes - 1) // 2
    if kind == "linear":
        weights, biases = message["weights"], message["biases"]
        _require(weights.shape == (n_scores, width) and biases.shape == (n_scores,))
        linear = LinearSVC()
        linear.classes_, linear.coef_, linear.intercept_ = classes, weights, biases
        return linear
    if kind == "kernel":
        vectors, coefficients, intercepts = message["vectors"], message["coefficients"], message["intercepts"]
        supports, gamma, n_vectors = message["supports"], fields["gamma"], len(vectors)
        _require(vectors.shape == (n_vectors, width) and n_vectors > 0)
        _require(coefficients.shape == (n_classes - 1, n_vectors))
        _require(intercepts.shape == (n_pairs,) and supports.shape == (n_classes,))
        _require(bool(np.all((supports >= 0) & (supports <= n_vectors))) and int(supports.sum()) == n_vectors)
        _require(type(gamma) is float and 0 < gamma < math.inf)
        return KernelModel(classes, gamma, vectors, coefficients, intercepts, supports)
    if kind == "network" and kind not in IMAGE_FORMATS:
        raise published.ModelError("data holds a network: import studies.networks, of nearveil-studies, to read it")
    _require(kind in IMAGE_FORMATS)
    return IMAGE_FORMATS[kind].restore(fields, classes, message["network"])


def _require(fits: bool) -> None:
    if not fits:
        raise published.ModelError("the arrays of the classifier must fit its classes and features")


def _read_events(texts: Any) -> tuple[DpEvent, ...]:
    if not isinstance(texts, list) or not 1 <= len(texts) <= _MOST_EVENTS:
        raise published.ModelError(f"events must be 1 to {_MOST_EVENTS}")
    return tuple(_read_event(text) for text in texts)


def _read_event(text: Any) -> DpEvent:
    """Return votes or screenings, a limited number of times: other events could take long to price."""
    event = parse_event(text) if isinstance(text, str) and len(text) <= 1000 else None
    if not isinstance(event, SelfComposedDpEvent) or not 1 <= event.count <= _MOST_TIMES:
        raise published.ModelError(f"events must be votes or screenings, 1 to {_MOST_TIMES:,} of them")
    inner = event.event.event if isinstance(event.event, PoissonSampledDpEvent) else event.event
    if isinstance(inner, NoisyScreening) and (inner.n_neighbors > _MOST_VOTERS or event.count > _MOST_SCREENED):
        raise published.ModelError(
            f"events must be at most {_MOST_SCREENED:,} screenings of at most {_MOST_VOTERS:,} voters"
        )
    if not isinstance(inner, (*_EVENTS, GaussianDpEvent)):
        raise published.ModelError("events must be votes or screenings")
    return event
