"""A discriminant's arithmetic (public projection to whole numbers, linear model of noisy sums) and its public export.

The projection depends on the row alone, to the last bit; the model sees no private record.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
from numpy.typing import ArrayLike, NDArray
from scipy.linalg import eigh
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, softmax
from sklearn.decomposition import PCA
from sklearn.neighbors import NearestNeighbors
from sklearn.preprocessing import normalize
from sklearn.utils import check_array

from nearveil.mechanisms.messages import Message, fingerprint
from nearveil.privacy import Basis, Guarantee
from nearveil.private_knn import published
from nearveil.private_knn.neighbors import LONGEST, IntegerRows
from nearveil.private_knn.scaling import EXACT, ColumnBounds, Rows, multiply_exactly
from nearveil.wire.frames import MOST_FEATURES

_LARGEST_SCALE = 1e200  # of a projection: times 2^54, the largest difference from an offset, it is finite
_COMPONENT_BITS = 15  # of a component, so that it fits into 16 bits with its sign
_FLAT = 1e-9  # directions with less than this share of the largest variance are left out
MOST_COMPONENTS = 128
_NEIGHBORS = 5
_SAMPLE = 4096  # rows to search neighbours of
_RIDGE = 0.05  # share of their mean variance that is added to the variances of neighbours


@dataclass(frozen=True, eq=False)
class ClassProjection:
    """Centre, project, scale and round rows. Everything in it is public; without public rows `components` is None."""

    # Products of rounded rows with `components`, and all partial sums, are integers below 2^53: exact in any order, on
    # any machine. IntegerRows then scales the image to norm one and rounds it: none is longer than ``LONGEST``
    # (docs/theory/private-discriminant.md; attacked by tests/private_knn/test_discriminant.py).

    components: NDArray[np.int16] | None = field(repr=False)
    offset: Rows = field(repr=False)  # the projected public mean
    scale: Rows = field(repr=False)  # the factor of each direction
    reach: float  # larger values are cut off
    n_features: int
    bounds: ColumnBounds | None = None  # columns are scaled by them before anything else

    def __post_init__(self) -> None:
        # A row's image is finite within these bounds. An error for some rows alone would depend on a private row.
        bounds = (("offset", self.offset, 2.0**EXACT), ("scale", self.scale, _LARGEST_SCALE))
        for name, values, bound in (*bounds, ("reach", np.array(self.reach), _LARGEST_SCALE)):
            if not (np.abs(values) <= bound).all():
                raise published.ModelError(f"projection must have a {name} of finite numbers, none beyond {bound:g}")

    @classmethod
    def learn(cls, public: Rows, n_components: int, bounds: ColumnBounds | None = None) -> Self:
        """Learn the directions of public rows in which neighbours differ least, compared with all rows."""
        scaled: Rows = public if bounds is None else bounds.scale(public)
        if len(scaled) < 2 or not np.ptp(scaled, axis=0).any():
            raise ValueError("public must hold at least two rows, and rows that differ")
        axes, step = _find_directions(scaled, n_components), 2.0**_COMPONENT_BITS - 1
        peaks = np.abs(axes).max(axis=0)
        components = np.rint(axes / peaks * step).astype(np.int16)
        n_directions, reach = axes.shape[1], float(np.abs(scaled).max())
        bare = cls(components, np.zeros(n_directions), np.ones(n_directions), reach, scaled.shape[1], bounds)
        offset = bare._project(scaled.mean(axis=0, keepdims=True))[0]
        return replace(bare, offset=offset, scale=peaks / step * reach * 2.0**-bare._bits)

    @classmethod
    def none(cls, n_features: int) -> Self:
        """Return the projection without public rows: nothing but norm one. In bounds, `offset` is a noisy mean."""
        return cls(None, np.zeros(n_features), np.ones(n_features), 1.0, n_features)

    @property
    def is_centred_by_noise(self) -> bool:
        """Whether `offset` is a mean of private rows, released with noise for `CENTRE_SHARE` of the budget."""
        return self.bounds is not None and self.components is None

    @property
    def sums_share(self) -> float:
        """Share of the budget that the sums of classes are released for."""
        return 1 - CENTRE_SHARE if self.is_centred_by_noise else 1.0

    @property
    def n_directions(self) -> int:
        """The number of directions of an image."""
        return len(self.offset)

    def round(self, rows: Rows, name: str = "X") -> NDArray[np.int16]:
        """Map rows, which errors call `name`, to whole numbers; the length of none is above ``LONGEST``."""
        if self.bounds is not None:
            rows = self.bounds.scale(rows) - (self.offset if self.components is None else 0.0)
        if self.components is not None:
            with np.errstate(over="ignore", under="ignore"):  # a warning would depend on a row
                rows = (self._project(rows) - self.offset) * self.scale
        return IntegerRows(self.n_directions).round(rows, name=name)

    def transform(self, rows: Rows) -> Rows:
        """Return the same with a length of at most one."""
        return self.round(rows) / float(LONGEST)

    @property
    def _bits(self) -> int:
        """The number of bits of a rounded row: with more, sums of products would not be exact."""
        return EXACT - 1 - _COMPONENT_BITS - math.ceil(math.log2(self.n_features + 1))

    def _project(self, rows: Rows) -> Rows:
        assert self.components is not None
        return multiply_exactly(rows, self.components, self.reach, self._bits)


def _find_directions(public: Rows, n_components: int) -> Rows:
    """Return directions as columns, by the variance of all rows over that of neighbours, mostly of one class."""
    n_axes = min(max(n_components, MOST_COMPONENTS), len(public) - 1, public.shape[1])
    pca = PCA(n_axes, random_state=0).fit(public)
    varied = pca.explained_variance_ > _FLAT * pca.explained_variance_[0]
    axes = pca.components_[varied].T
    rows = (public - pca.mean_) @ axes
    sample = rows[:: -(-len(rows) // _SAMPLE)]
    search = NearestNeighbors(n_neighbors=min(_NEIGHBORS + 1, len(rows))).fit(normalize(rows))
    neighbors = search.kneighbors(normalize(sample), return_distance=False)[:, 1:]  # the nearest is the row itself
    apart = (sample[:, None] - rows[neighbors]).reshape(-1, rows.shape[1])
    near, all_rows = apart.T @ apart / len(apart) / 2, np.cov(rows.T, ddof=0).reshape(rows.shape[1], -1)
    near += (_RIDGE * np.trace(near) + _FLAT * np.trace(all_rows)) / len(near) * np.eye(len(near))
    _, ratio_axes = eigh(all_rows, near)
    return np.asarray(axes @ ratio_axes[:, ::-1][:, :n_components])


CENTRE_SHARE = 0.2
"""Share of the budget for the mean of rows in public bounds: without it, rows of norm one are much alike."""
COUNT_UNIT = LONGEST // 4
"""A record adds this to the count of its class. Counts get four times the noise of sums; they need less precision."""
SENSITIVITY = math.hypot(LONGEST, COUNT_UNIT) * (1 + 2.0**-50)
"""The L2 sensitivity of all sums and counts to one added or removed record: Theorem 2 of
``docs/theory/private-discriminant.md``, attacked by ``tests/private_knn/test_discriminant.py``."""
_LEAST_COUNT = 0.3  # of the mean count: the least count of a class, unless the noise is small enough
_LEAST_SPREAD = 0.05  # of the squared mean count: the least variance of counts
_SHARES = (0.02, 0.9)  # bounds on the share of a direction's variance that is between classes
_MEAN_SHARES = (0.05, 0.8)  # the same, for all directions together
_SHARE_SPREAD = 0.1  # deviation of the shares of directions from their mean
_BETWEEN = 0.7  # share of the variance between noisy means that is subtracted from the public covariance
_LEAST_VARIANCE = 0.02  # of the mean variance of a direction
SHRINKAGE = 0.005
_SIMULATED = 2000  # rows for the calibration of a temperature
_LEAST_TEMPERATURE, _MOST_TEMPERATURE = 1.2, 20.0


@dataclass(frozen=True)
class NoisyStatistics:
    """The released sums and counts, in units of one record. Public."""

    sums: Rows = field(repr=False)
    counts: Rows = field(repr=False)
    noise: float  # standard deviation of the noise on each number of `sums`
    count_noise: float  # the same of `counts`


@dataclass(frozen=True)
class PublicMoments:
    """Mean, variances and axes of public rows. The axes are columns."""

    centre: Rows = field(repr=False)
    variances: Rows = field(repr=False)
    axes: Rows = field(repr=False)

    @classmethod
    def measure(cls, public_rows: Rows) -> Self:
        """Measure rows, shape (n_public, n_directions); without any, return the moments of rows of norm one."""
        size = public_rows.shape[1]
        if not len(public_rows):
            return cls(np.zeros(size), np.full(size, 1 / size), np.eye(size))
        variances, axes = np.linalg.eigh(np.cov(public_rows.T, ddof=0).reshape(size, size))
        return cls(public_rows.mean(axis=0), np.maximum(variances, 1e-9 * variances[-1]), axes)


@dataclass(frozen=True)
class ClassMeans:
    """Posterior means and variances of the class means, in axes of the public covariance."""

    public: PublicMoments
    between: Rows = field(repr=False)  # variances of the means of classes
    counts: Rows = field(repr=False)  # positive
    means: Rows = field(repr=False)
    posterior_variances: Rows = field(repr=False)


@dataclass(frozen=True)
class LinearScores:
    """Scores of classes that are linear in an image."""

    weights: Rows = field(repr=False)
    biases: Rows = field(repr=False)

    def score(self, rows: Rows) -> Rows:
        """Return the score of each class, shape (n, n_classes)."""
        return np.asarray(rows @ self.weights.T + self.biases)


def estimate_means(statistics: NoisyStatistics, public: PublicMoments) -> ClassMeans:
    """Return the means of classes by empirical Bayes (docs/theory/private-discriminant.md)."""
    counts, variances = estimate_counts(statistics.counts, statistics.count_noise), public.variances
    observed = (statistics.sums / counts[:, None] - public.centre) @ public.axes
    noise = (statistics.noise / counts[:, None]) ** 2
    between = _estimate_shares(observed, noise, variances, counts) * variances
    # The prior variance of a mean is `between`, and the variance of its observation is `error`.
    error = (variances - between) / counts[:, None] + noise
    weights = between / (between + error)
    return ClassMeans(public, between, counts, observed * weights, error * weights)


def fit_discriminant(means: ClassMeans, shrinkage: float) -> LinearScores:
    """Return the linear discriminant; `shrinkage` is the share of the covariance's trace added to its diagonal."""
    covariance = _find_covariance(means) + np.diag(means.posterior_variances.mean(axis=0))
    covariance += shrinkage * np.trace(covariance) * np.eye(len(covariance))
    weights = np.linalg.solve(covariance, means.means.T).T
    biases = -0.5 * np.einsum("cd,cd->c", weights, means.means)
    turned = weights @ means.public.axes.T
    return LinearScores(turned, biases - turned @ means.public.centre)


def calibrate_scores(scores: LinearScores, means: ClassMeans, public_rows: Rows) -> LinearScores:
    """Return scores divided by the temperature that makes the classes of simulated rows most likely."""
    # An image is a class's drawn mean plus a public deviation, scaled to the variance within. The seed is public.
    temperature = _LEAST_TEMPERATURE
    if len(public_rows):
        simulated, class_numbers = _simulate(means, public_rows)
        simulated_scores, rows = scores.score(simulated), np.arange(len(class_numbers))

        def surprise(logarithm: float) -> float:
            return -float(log_softmax(simulated_scores * np.exp(-logarithm), axis=1)[rows, class_numbers].mean())

        bounds = np.log([_LEAST_TEMPERATURE, _MOST_TEMPERATURE])
        temperature = float(np.exp(minimize_scalar(surprise, bounds=bounds, method="bounded").x))
    return LinearScores(scores.weights / temperature, scores.biases / temperature)


def _simulate(means: ClassMeans, public_rows: Rows) -> tuple[Rows, NDArray[np.int64]]:
    """Return simulated rows of each class, and their classes."""
    rng, public = np.random.default_rng(0), means.public
    class_numbers = np.arange(max(_SIMULATED, len(means.means))) % len(means.means)
    apart = (public_rows[rng.integers(0, len(public_rows), len(class_numbers))] - public.centre) @ public.axes
    moved = means.means[class_numbers] + np.sqrt(means.posterior_variances[class_numbers]) * rng.standard_normal(
        apart.shape
    )
    simulated = moved + apart * np.sqrt(1 - means.between / public.variances)
    return public.centre + simulated @ public.axes.T, class_numbers


def estimate_counts(counts: Rows, noise: float) -> Rows:
    """Return positive counts, shrunk to their mean in proportion to the noise."""
    mean = max(float(counts.mean()), 1.0)
    spread = max(float(counts.var()) - noise**2, _LEAST_SPREAD * mean**2)
    drawn = mean + (counts - mean) * spread / (spread + noise**2)
    return np.asarray(np.maximum(drawn, max(1.0, min(_LEAST_COUNT * mean, 2 * noise))))


def _estimate_shares(observed: Rows, noise: Rows, variances: Rows, counts: Rows) -> Rows:
    """Return the share of each direction's variance between classes, shrunk to the mean share."""
    sampling = float((1 / counts).mean())  # of the variance within classes, in the mean of a class's records
    seen = ((observed**2 - noise).mean(axis=0) / variances - sampling) / max(1 - sampling, _LEAST_VARIANCE)
    relative = noise.mean() / variances + sampling
    weights = (relative + 0.3) ** -2.0
    mean = float(np.clip((seen * weights).sum() / weights.sum(), *_MEAN_SHARES))
    error = 2 / len(observed) * (relative + mean) ** 2
    drawn = (seen * _SHARE_SPREAD**2 + mean * error) / (_SHARE_SPREAD**2 + error)
    return np.asarray(np.clip(drawn, *_SHARES))


def _find_covariance(means: ClassMeans) -> Rows:
    """Return the covariance within classes: the public one, less most of that between the means."""
    weights, variances = means.counts / means.counts.sum(), means.public.variances
    apart = means.means - weights @ means.means
    values, vectors = np.linalg.eigh(np.diag(variances) - _BETWEEN * (apart * weights[:, None]).T @ apart)
    return np.asarray((vectors * np.maximum(values, _LEAST_VARIANCE * variances.mean())) @ vectors.T)


_NAME = "discriminant"
MOST_PUBLICATIONS = 1_000_000
_ARRAYS: published.Forms = {
    "about": ("|u1", (published.MOST_TEXT,)),
    "components": ("<i2", (MOST_FEATURES, MOST_FEATURES)),
    "offset": ("<f8", (MOST_FEATURES,)),
    "scale": ("<f8", (MOST_FEATURES,)),
    "reach": ("<f8", (1,)),
    "bounds": ("<f8", (2, MOST_FEATURES)),
    "weights": ("<f4", (published.MOST_CLASSES, MOST_FEATURES)),
    "biases": ("<f4", (published.MOST_CLASSES,)),
    "counts": ("<f4", (published.MOST_CLASSES,)),
}
CLEAR = 5
"""A class is learned well if its count is at least this many times the noise on it."""
BASIS = Basis("Gaussian mechanism on whole-number sums, priced by PLD", "docs/theory/private-discriminant.md")


class LinearPredictions(ABC):
    """Predictions by scores of classes that are linear in a row."""

    @abstractmethod
    def _score(self, X: ArrayLike) -> tuple[Rows, NDArray[Any]]:
        """Return the score of each class for each row, and the classes."""

    def decision_function(self, X: ArrayLike) -> Rows:
        """Return log-probabilities (n, n_classes), up to a constant per row; of two classes, (n,) differences."""
        scores, classes = self._score(X)
        return scores[:, 1] - scores[:, 0] if len(classes) == 2 else scores

    def predict_proba(self, X: ArrayLike) -> Rows:
        """Return the probability of each class, (n, n_classes), where all classes are equally common. Costs nothing."""
        return np.asarray(softmax(self._score(X)[0], axis=1))

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """Classify rows. Costs nothing."""
        scores, classes = self._score(X)
        return np.asarray(classes[np.argmax(scores, axis=1)])


@dataclass(frozen=True, eq=False)
class PublicDiscriminant(LinearPredictions, published.PublicModel):
    """A private discriminant, to be published: it holds no record and no account. Made by ``export()``.

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> from nearveil.private_knn import PrivateDiscriminant
    >>> X, y = load_digits(return_X_y=True)
    >>> model = PrivateDiscriminant(2.0, classes=range(10)).fit(X[:1000], y[:1000], public=X[1000:1500]).export()
    >>> again = PublicDiscriminant.from_bytes(model.to_bytes())
    >>> bool((again.predict(X[1500:]) == model.predict(X[1500:])).all())
    True
    """

    classes: NDArray[Any]  #: sorted
    guarantee: Guarantee  #: for the private records
    projection: ClassProjection = field(repr=False)  #: learned from public rows
    weights: NDArray[np.float32] = field(repr=False)  #: shape (n_classes, n_directions)
    biases: NDArray[np.float32] = field(repr=False)  #: of each class
    counts: NDArray[np.float32] = field(repr=False)  #: released numbers of records; large noise may make them negative

    def __post_init__(self) -> None:
        for name in ("classes", "weights", "biases", "counts"):
            values = np.array(getattr(self, name), dtype=None if name == "classes" else np.float32, order="C")
            values.setflags(write=False)
            object.__setattr__(self, name, values)
        n_classes = len(self.classes)
        if not 1 <= n_classes <= published.MOST_CLASSES or self.classes.ndim != 1:
            raise published.ModelError(f"classes must be a list of 1 to {published.MOST_CLASSES} labels")
        shapes = [self.weights.shape, self.biases.shape, self.counts.shape]
        if shapes != [(n_classes, self.projection.n_directions), (n_classes,), (n_classes,)]:
            raise published.ModelError("weights, biases and counts must fit the classes and the projection")
        if not all(np.isfinite(values).all() for values in (self.weights, self.biases, self.counts)):
            raise published.ModelError("weights, biases and counts must be finite")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).from_bytes, (self.to_bytes(),)

    @property
    def n_features(self) -> int:
        """The number of features of a row."""
        return self.projection.n_features

    @property
    def model_id(self) -> str:
        """A fingerprint of everything in the model, 32 hexadecimal digits."""
        return fingerprint(*self._arrays().values())

    @property
    def noise_per_class(self) -> float:
        """Standard deviation of the noise on each of `counts`, in records: that of the noise in the guarantee."""
        (event,) = self.guarantee.events
        noise = event.event.noise_multiplier * SENSITIVITY / math.sqrt(self.projection.sums_share)
        return float(noise / COUNT_UNIT)

    @property
    def noisy_classes(self) -> NDArray[Any]:
        """Classes with noisy counts below five times the noise."""
        return np.asarray(self.classes[self.counts < CLEAR * self.noise_per_class])

    def _score(self, X: ArrayLike) -> tuple[Rows, NDArray[Any]]:
        rows: Rows = check_array(X, dtype=np.float64, input_name="X")
        if rows.shape[1] != self.n_features:
            raise ValueError(f"X must have {self.n_features} features, as the model has; it has {rows.shape[1]}")
        return self.projection.transform(rows) @ self.weights.T.astype(np.float64) + self.biases, self.classes

    def to_bytes(self) -> bytes:
        """Return the model as bytes: numbers and JSON, no code."""
        return Message(_NAME, self.model_id, self._arrays()).to_bytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read a model, or raise a MessageError. Nothing in the bytes is trusted; sizes are checked first."""
        with published.open_model(data, _NAME, _ARRAYS, {"n_features"}) as (message, about):
            model = cls(
                classes=published.read_classes(about["classes"], about["kind"]),
                guarantee=published.read_guarantee(about["guarantee"], BASIS, (_read_event(about["guarantee"]),)),
                projection=_read_projection(message, int(about["n_features"])),
                weights=message["weights"],
                biases=message["biases"],
                counts=message["counts"],
            )
        if model.model_id != message.public_id:
            raise published.ModelError("data is corrupted: its fingerprint does not match")
        return model

    def _arrays(self) -> dict[str, NDArray[Any]]:
        projection, (event,) = self.projection, self.guarantee.events
        noise = {"noise_multiplier": event.event.noise_multiplier, "publications": event.count}
        arrays: dict[str, NDArray[Any]] = {
            "about": published.encode_about(self.classes, self.guarantee, noise, n_features=projection.n_features),
            "offset": projection.offset,
            "scale": projection.scale,
            "reach": np.array([projection.reach]),
            "weights": self.weights,
            "biases": self.biases,
            "counts": self.counts,
        }
        if projection.bounds is not None:
            arrays["bounds"] = np.stack([projection.bounds.low, projection.bounds.high])
        if projection.components is not None:
            arrays["components"] = projection.components
        return {name: values.astype(_ARRAYS[name][0], copy=False) for name, values in arrays.items()}


def _read_projection(message: Message, n_features: int) -> ClassProjection:
    offset, scale, reach = (message[name] for name in ("offset", "scale", "reach"))
    components = message.arrays.get("components")
    shape = (n_features, len(offset)) if components is None else components.shape
    if offset.ndim != 1 or not len(offset) or scale.shape != offset.shape or reach.shape != (1,) or reach[0] <= 0:
        raise published.ModelError("projection must have an offset and a scale for each direction, and a reach above 0")
    if shape != (n_features, len(offset)) or (components is None and n_features != len(offset)) or n_features < 1:
        raise published.ModelError("projection must fit the number of features")
    bounds = ColumnBounds.make(message["bounds"], n_features) if "bounds" in message.arrays else None
    return ClassProjection(components, offset, scale, float(reach[0]), n_features, bounds)


def _read_event(fields: dict[str, Any]) -> SelfComposedDpEvent:
    publications = fields["publications"]
    if type(publications) is not int or not 1 <= publications <= MOST_PUBLICATIONS:
        raise published.ModelError(f"publications must be from 1 to {MOST_PUBLICATIONS}")
    return SelfComposedDpEvent(GaussianDpEvent(float(fields["noise_multiplier"])), publications)
