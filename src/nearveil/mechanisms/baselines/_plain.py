"""Baselines without noise, and random projection."""

import importlib
import math
import pickle
from abc import abstractmethod
from numbers import Integral, Real
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import cdist
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.utils._param_validation import Interval

from nearveil.manifold import SupervisedManifold
from nearveil.mechanisms.base import Floats, Release
from nearveil.mechanisms.message import Message, MessageError
from nearveil.mechanisms.vectors._analytic import DELTA, EPSILON, LINK, SEED, NoisyVector, computed_norm
from nearveil.privacy import Basis, Guarantee
from nearveil.privacy.noise import GaussianNoise, Source, calibrate_gaussian, gaussian_grid

Labels = NDArray[np.int64]

_COMPONENTS = Interval(Integral, 1, 4096, closed="both")


class EmbeddedRelease(Release):
    """A message says where the row lies in an embedding; the server embeds its gallery alike, and looks who is near."""

    @abstractmethod
    def _embed(self, features: Floats) -> Floats:
        """Embed rows of norm one (or zero), without noise, shape (n, k)."""

    def _prepare(self, features: Floats) -> Floats:
        return self._embed(features)

    def _rank(self, message: Message, prepared: Floats) -> Floats:
        point = message["embedding"]
        if point.dtype != np.float32 or point.shape != (prepared.shape[1],):
            raise MessageError(f"arrays: 'embedding' must hold {prepared.shape[1]} floats of 32 bits")
        return np.asarray(-cdist(point[None].astype(np.float64), prepared)[0])


class PlainRelease(EmbeddedRelease):
    """Sends where the row lies, without noise. Nothing is promised."""

    def _make_guarantee(self) -> Guarantee:
        """Nothing."""
        return Guarantee(
            epsilon=math.inf,
            delta=0.0,
            protects="query",
            unit="record",
            relation="replace",
            basis=Basis("no protection", LINK),
        )

    def _fit(self, features: Floats, labels: Labels | None) -> None:
        self._validate_params()
        known = features.any(axis=1)
        self._fit_map(features[known], None if labels is None else labels[known])

    def _release(self, features: Floats, source: Source) -> list[Message]:
        return self._messages(source, embedding=self._embed(features).astype(np.float32))

    def _embed(self, features: Floats) -> Floats:
        # Rows that equal the public mean have no direction; they are put where the others' middle is.
        given = features.any(axis=1)
        if given.all():
            return self._map(features)
        mapped = self._map(features[given]) if given.any() else np.zeros((0, self._columns()))
        found = np.zeros((len(features), mapped.shape[1]))
        found[given] = mapped
        return found

    @abstractmethod
    def _fit_map(self, features: Floats, labels: Labels | None) -> None:
        """Learn the embedding from public rows of norm one."""

    @abstractmethod
    def _map(self, features: Floats) -> Floats:
        """Embed rows of norm one."""

    @abstractmethod
    def _columns(self) -> int:
        """Return the number of columns of the embedding."""


class RawFeatures(PlainRelease):
    """Send the feature itself, centred and of norm one. Not private: what all releases are measured by.

    Examples
    --------
    >>> rows = np.random.default_rng(0).standard_normal((200, 32))
    >>> release = RawFeatures().fit(rows[:100])
    >>> int(np.argmax(release.rank(release.release(rows[150]), rows[100:])))
    50
    >>> print(release.guarantee)
    Nothing is promised about which record was asked for.
    """

    name = "raw"

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {}

    def _fit_map(self, features: Floats, labels: Labels | None) -> None:
        del features, labels

    def _map(self, features: Floats) -> Floats:
        return features

    def _columns(self) -> int:
        return int(self.n_features_in_)

    def _public_parts(self) -> tuple[object, ...]:
        return ()


class PlainManifold(PlainRelease):
    """Send where the supervised manifold learning query puts the row. Not private.

    Parameters
    ----------
    n_components : int, default=2
    bandwidth : float, default=0.4
    label_weight : float, default=0.6
    n_iter : int, default=20
    public_seed : int, default=0
        Of the start.

    Examples
    --------
    >>> rows = np.random.default_rng(0).standard_normal((200, 8))
    >>> PlainManifold().fit(rows[:100], np.arange(100) % 3).release(rows[150])["embedding"].shape
    (2,)
    """

    name = "plain-manifold"

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        "n_components": [_COMPONENTS],
        "bandwidth": [Interval(Real, 0, None, closed="neither")],
        "label_weight": [Interval(Real, 0, None, closed="left")],
        "n_iter": [Interval(Integral, 1, None, closed="left")],
        "public_seed": [SEED],
    }

    def __init__(
        self,
        n_components: int = 2,
        *,
        bandwidth: float = 0.4,
        label_weight: float = 0.6,
        n_iter: int = 20,
        public_seed: int = 0,
    ) -> None:
        self.n_components = n_components
        self.bandwidth = bandwidth
        self.label_weight = label_weight
        self.n_iter = n_iter
        self.public_seed = public_seed

    def _fit_map(self, features: Floats, labels: Labels | None) -> None:
        self._manifold = SupervisedManifold(
            int(self.n_components),
            bandwidth=self.bandwidth,
            label_weight=self.label_weight,
            n_iter=int(self.n_iter),
            random_state=int(self.public_seed),
        ).fit(features, labels)

    def _map(self, features: Floats) -> Floats:
        return np.asarray(self._manifold.transform(features), dtype=np.float64)

    def _columns(self) -> int:
        return int(self.n_components)

    def _public_parts(self) -> tuple[object, ...]:
        return (
            *(int(number) for number in (self.n_components, self.n_iter, self.public_seed)),
            float(self.bandwidth),
            float(self.label_weight),
        )


class PlainTSNE(PlainRelease):
    """Send where t-SNE puts the row among public rows (openTSNE; the extra of that name). Not private.

    Parameters
    ----------
    n_components : int, default=2
        1 or 2.
    perplexity : float, default=30.0
        A third of the public rows at most.
    public_seed : int, default=0
    """

    name = "plain-tsne"

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        "n_components": [Interval(Integral, 1, 2, closed="both")],
        "perplexity": [Interval(Real, 1, None, closed="left")],
        "public_seed": [SEED],
    }

    def __init__(self, n_components: int = 2, *, perplexity: float = 30.0, public_seed: int = 0) -> None:
        self.n_components = n_components
        self.perplexity = perplexity
        self.public_seed = public_seed

    def _fit_map(self, features: Floats, labels: Labels | None) -> None:
        del labels
        try:
            library = importlib.import_module("openTSNE")
        except ImportError:
            raise ImportError("PlainTSNE needs openTSNE: pip install openTSNE") from None
        if len(features) < 10:
            raise ValueError("public_X must have at least 10 rows that differ from their mean, for t-SNE")
        embedding = library.TSNE(
            int(self.n_components),
            perplexity=min(float(self.perplexity), (len(features) - 1) / 3),
            neighbors="exact",
            negative_gradient_method="bh",
            random_state=int(self.public_seed),
            n_jobs=1,  # sums in one order, so that both sides come to the same place
        ).fit(features)
        self._embedding = pickle.dumps(embedding)

    def _map(self, features: Floats) -> Floats:
        # Read anew each time: the library's search tree counts what it is asked.
        embedding = pickle.loads(self._embedding)  # noqa: S301
        return np.asarray(embedding.transform(features), dtype=np.float64)

    def _columns(self) -> int:
        return int(self.n_components)

    def _public_parts(self) -> tuple[object, ...]:
        return int(self.n_components), float(self.perplexity), int(self.public_seed)


class PlainLDA(PlainRelease):
    """Send the row's linear discriminants, learned from public labels. Not private.

    Parameters
    ----------
    n_components : int, optional
        At most the number of classes less one, which is the default where there are as many features.

    Examples
    --------
    >>> rows = np.random.default_rng(0).standard_normal((200, 8))
    >>> PlainLDA().fit(rows[:100], np.arange(100) % 3).release(rows[150])["embedding"].shape
    (2,)
    """

    name = "plain-lda"

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {"n_components": [_COMPONENTS, None]}

    def __init__(self, n_components: int | None = None) -> None:
        self.n_components = n_components

    def _fit_map(self, features: Floats, labels: Labels | None) -> None:
        if labels is None or len(np.unique(labels)) < 2:
            raise ValueError("public_y must label the rows with at least two classes, for LDA")
        most = min(features.shape[1], len(np.unique(labels)) - 1)
        if self.n_components is not None and self.n_components > most:
            raise ValueError(f"n_components must be at most {most} for these rows and classes")
        self._discriminants = LinearDiscriminantAnalysis(n_components=self.n_components).fit(features, labels)

    def _map(self, features: Floats) -> Floats:
        return np.asarray(self._discriminants.transform(features), dtype=np.float64)

    def _columns(self) -> int:
        return int(self._discriminants.transform(np.zeros((1, self.n_features_in_))).shape[1])

    def _public_parts(self) -> tuple[object, ...]:
        return (self.n_components,)


REASON = (
    "its noise is for a change of one attribute by at most one, and another record differs in all attributes at once"
)


class RandomProjection(NoisyVector):
    """Project to fewer dimensions by a public random matrix and add noise (Kenthapadi et al. 2012).

    The matrix has independent entries of variance ``1 / n_components``, drawn from a public seed. Replacing a row
    of norm one moves its projection by at most twice the matrix's largest singular value, which both sides
    compute; the noise is for that.

    The paper protects less: one attribute that changes by at most one. `as_published` has its noise, which is smaller.

    Parameters
    ----------
    epsilon : float
        From 1e-6 to 64.
    delta : float, default=1e-5
        Below 1/2 as published.
    n_components : int, default=64
        May exceed the number of features.
    projection_seed : int, default=0
        Public: the server needs it too.
    as_published : bool, default=False
        Calibrate as the paper does. Unsound for a record.
    allow_unsound : bool, default=False
        Must be set for `as_published`.

    Attributes
    ----------
    matrix_ : ndarray of shape (d, n_components)
    noise_ : GaussianNoise
        Of one row.

    Examples
    --------
    >>> rows = np.random.default_rng(0).standard_normal((200, 32))
    >>> release = RandomProjection(4.0, n_components=16).fit(rows[:100])
    >>> release.release(rows[100])["vector"].shape
    (16,)
    >>> largest = np.linalg.norm(release.matrix_, 2)
    >>> f"{release.noise_.sensitivity / largest:.4f}"
    '2.0000'
    """

    name = "random-projection"

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        "epsilon": [EPSILON],
        "delta": [DELTA],
        "n_components": [Interval(Integral, 1, 4096, closed="both")],
        "projection_seed": [SEED],
        "as_published": ["boolean"],
        "allow_unsound": ["boolean"],
    }

    def __init__(
        self,
        epsilon: float,
        *,
        delta: float = 1e-5,
        n_components: int = 64,
        projection_seed: int = 0,
        as_published: bool = False,
        allow_unsound: bool = False,
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.n_components = n_components
        self.projection_seed = projection_seed
        self.as_published = as_published
        self.allow_unsound = allow_unsound

    def _make_guarantee(self) -> Guarantee:
        if not self.as_published:
            return super()._make_guarantee()
        return Guarantee(
            epsilon=float(self.epsilon),
            delta=float(self.delta),
            protects="query",
            unit="record",
            relation="replace",
            basis=Basis("as published (2012)", LINK),
            sound=False,
            reason=REASON,
        )

    def _fit_map(self, features: Floats, labels: NDArray[np.int64] | None) -> GaussianNoise:
        del labels
        if self.as_published and not self.allow_unsound:
            raise ValueError(f"as_published keeps no promise: {REASON}. Set allow_unsound=True to run it all the same")
        d, k = features.shape[1], int(self.n_components)
        self.matrix_ = np.random.default_rng(self.projection_seed).standard_normal((d, k)) / math.sqrt(k)
        if self.as_published:
            return published_noise(self.matrix_, self.epsilon, self.delta)
        return calibrate_gaussian(self.epsilon, self.delta, sensitivity=record_sensitivity(self.matrix_), size=k)

    def _map(self, features: Floats) -> Floats:
        return np.asarray(features @ self.matrix_)

    def _public_parts(self) -> tuple[object, ...]:
        return int(self.n_components), int(self.projection_seed)


def record_sensitivity(matrix: Floats) -> float:
    """Bound how far apart the projections of two rows of norm one lie: ``2 |P|``, in the spectral norm.

    Attained by the matrix's first singular direction and its opposite (Theorem 2 of docs/theory/baselines.md;
    `test_the_projection_moves_as_far_as_the_bound_and_no_farther`). What doubles may add is added: d
    roundings in each inner product, and as many in the singular value.
    """
    d, k = matrix.shape
    rounding = 4 * (d + k) * 2.0**-52 * float(np.linalg.norm(matrix))
    return float(2 * (np.linalg.norm(matrix, 2) * computed_norm(d) + rounding))


def published_noise(matrix: Floats, epsilon: float, delta: float) -> GaussianNoise:
    """Return the paper's noise: ``w sqrt(2 (ln(1 / (2 delta)) + epsilon)) / epsilon``, w the largest row's norm.

    A row of P is what a change of one attribute by one adds. For that change the noise suffices
    (docs/theory/baselines.md, Theorem 3).

    `delta`: Below 1/2.
    """
    if not delta < 0.5:
        raise ValueError("delta must be below 1/2 for the published calibration")
    change, size = float(np.linalg.norm(matrix, axis=1).max()), matrix.shape[1]
    scale = change * math.sqrt(2 * (math.log(1 / (2 * delta)) + epsilon)) / epsilon
    return GaussianNoise(sensitivity=change, scale=scale, size=size, grid=gaussian_grid(min(change, scale), size))
