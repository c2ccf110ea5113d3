"""Embeddings: plain ones without noise, and DP-dSNE with clipped and noised gradient steps."""

import importlib
import math
import pickle
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from numbers import Integral, Real
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import cdist
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.manifold import TSNE
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils._param_validation import Interval
from threadpoolctl import threadpool_limits

from nearveil.manifold import SupervisedManifold
from nearveil.mechanisms.base import Floats, Message, Release, make_guarantee, read_vector
from nearveil.mechanisms.privatemail._sound import calibrate_steps, choose_anchors
from nearveil.mechanisms.vectors._gaussian import COMPONENTS, DELTA, EPSILON, LINK, SEED
from nearveil.privacy import Guarantee
from nearveil.privacy.noise import GaussianNoise, Source, add_noise

Labels = NDArray[np.int64]

_BLOCK = 1 << 21  # affinities at a time
_BISECTIONS = 50


class EmbeddedRelease(Release):
    """A message says where the row lies in an embedding; the server embeds its gallery alike and ranks by distance."""

    @abstractmethod
    def _prepare(self, features: Floats) -> Floats:
        """Embed rows of norm one (or zero), without noise, shape (n, k)."""

    def _rank(self, message: Message, prepared: Floats) -> Floats:
        point = read_vector(message, "embedding", "float32", prepared.shape[1])
        return np.asarray(-cdist(point[None], prepared)[0])


class PlainRelease(EmbeddedRelease):
    """Sends where the row lies, without noise or guarantee."""

    def _make_guarantee(self) -> Guarantee:
        return make_guarantee(math.inf, 0.0, "no protection", LINK)

    def _fit(self, features: Floats, labels: Labels | None) -> None:
        self._validate_params()
        known = features.any(axis=1)
        self._transformer = self._fit_map(features[known], None if labels is None else labels[known])
        self._columns = int(self._map(features[known][:1]).shape[1]) if known.any() else features.shape[1]

    def _release(self, features: Floats, source: Source) -> list[Message]:
        return self._messages(source, embedding=self._prepare(features).astype(np.float32))

    def _prepare(self, features: Floats) -> Floats:
        # Rows that equal the public mean have no direction; they are put where the others' middle is.
        given = features.any(axis=1)
        found = np.zeros((len(features), self._columns))
        if given.any():
            found[given] = self._map(features[given])
        return found

    def _map(self, features: Floats) -> Floats:
        """Embed rows of norm one."""
        return np.asarray(self._transformer.transform(features), dtype=np.float64)

    @abstractmethod
    def _fit_map(self, features: Floats, labels: Labels | None) -> Any:
        """Return a transformer that was fitted on public rows of norm one."""


class RawFeatures(PlainRelease):
    """Send the feature itself, centred and of norm one. Not private: what all releases are measured by.

    Examples
    --------
    >>> rows = np.random.default_rng(0).standard_normal((200, 32))
    >>> release = RawFeatures().fit(rows[:100])
    >>> int(np.argmax(release.rank(release.release(rows[150]), rows[100:])))
    50
    >>> print(release.guarantee)
    Nothing is guaranteed about which record was asked for.
    """

    name = "raw"

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {}

    def _fit_map(self, features: Floats, labels: Labels | None) -> Any:
        del features, labels
        return FunctionTransformer()

    def _public_parts(self) -> tuple[object, ...]:
        return ()


@dataclass(eq=False, repr=False)
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
        "n_components": [COMPONENTS],
        "bandwidth": [Interval(Real, 0, None, closed="neither")],
        "label_weight": [Interval(Real, 0, None, closed="left")],
        "n_iter": [Interval(Integral, 1, None, closed="left")],
        "public_seed": [SEED],
    }

    n_components: int = 2
    _: KW_ONLY
    bandwidth: float = 0.4
    label_weight: float = 0.6
    n_iter: int = 20
    public_seed: int = 0

    def _fit_map(self, features: Floats, labels: Labels | None) -> Any:
        return SupervisedManifold(
            int(self.n_components),
            bandwidth=self.bandwidth,
            label_weight=self.label_weight,
            n_iter=int(self.n_iter),
            random_state=int(self.public_seed),
        ).fit(features, labels)

    def _public_parts(self) -> tuple[object, ...]:
        return (
            *(int(number) for number in (self.n_components, self.n_iter, self.public_seed)),
            float(self.bandwidth),
            float(self.label_weight),
        )


@dataclass(eq=False, repr=False)
class PlainTSNE(PlainRelease):
    """Send where t-SNE puts the row among public rows (openTSNE; the extra of that name). Not private.

    Parameters
    ----------
    n_components : int, default=2
        1 or 2.
    perplexity : float, default=30.0
        A third of the public rows at most.
    public_seed : int, default=0

    Examples
    --------
    >>> PlainTSNE(perplexity=10.0)
    PlainTSNE(perplexity=10.0)
    """

    name = "plain-tsne"

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        "n_components": [Interval(Integral, 1, 2, closed="both")],
        "perplexity": [Interval(Real, 1, None, closed="left")],
        "public_seed": [SEED],
    }

    n_components: int = 2
    _: KW_ONLY
    perplexity: float = 30.0
    public_seed: int = 0

    def _fit_map(self, features: Floats, labels: Labels | None) -> Any:
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
        return pickle.dumps(embedding)

    def _map(self, features: Floats) -> Floats:
        # Read anew each time: the library's search tree counts what it is asked.
        embedding = pickle.loads(self._transformer)  # noqa: S301
        return np.asarray(embedding.transform(features), dtype=np.float64)

    def _public_parts(self) -> tuple[object, ...]:
        return int(self.n_components), float(self.perplexity), int(self.public_seed)


@dataclass(eq=False, repr=False)
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

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {"n_components": [COMPONENTS, None]}

    n_components: int | None = None

    def _fit_map(self, features: Floats, labels: Labels | None) -> Any:
        if labels is None or len(np.unique(labels)) < 2:
            raise ValueError("public_y must label the rows with at least two classes, for LDA")
        most = min(features.shape[1], len(np.unique(labels)) - 1)
        if self.n_components is not None and self.n_components > most:
            raise ValueError(f"n_components must be at most {most} for these rows and classes")
        return LinearDiscriminantAnalysis(n_components=self.n_components).fit(features, labels)

    def _public_parts(self) -> tuple[object, ...]:
        return (self.n_components,)


@dataclass(eq=False, repr=False)
class DPdSNE(EmbeddedRelease):
    """Find the row's place among public anchors by t-SNE, each gradient clipped and noised (after Saha et al. 2021).

    The anchors have a public t-SNE embedding and stay where they are. A private row starts in their middle and takes
    `n_steps` gradient steps on its own Kullback-Leibler divergence. A clipped gradient changes by at most ``2 clip``
    when the row is replaced, so the steps cost what so many Gaussian mechanisms cost. The server takes the same steps
    with its gallery, without noise.

    Parameters
    ----------
    epsilon : float
        From 1e-6 to 64, for all steps together.
    delta : float, default=1e-5
    n_components : int, default=2
    n_steps : int, default=10
    clip : float, default=0.1
        The largest norm of a gradient.
    learning_rate : float, optional
        By default such that all steps together could cross the anchors' embedding.
    perplexity : float, default=30.0
        A third of the anchors at most.
    n_anchors : int, optional
        How many public rows, drawn by `public_seed`, are anchors; all unless given.
    public_seed : int, default=0
        Of the anchors and their embedding.

    Attributes
    ----------
    anchors_ : ndarray of shape (m, d)
    embedding_ : ndarray of shape (m, n_components)
    noises_ : tuple of GaussianNoise
        Of each step, for one row.

    Examples
    --------
    >>> rows = np.random.default_rng(0).standard_normal((80, 8))
    >>> release = DPdSNE(4.0, n_steps=5).fit(rows[:40])
    >>> release.release(rows[50])["embedding"].shape
    (2,)
    >>> len(release.guarantee.events)
    5
    """

    name = "dp-dsne"

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        "epsilon": [EPSILON],
        "delta": [DELTA],
        "n_components": [Interval(Integral, 1, 64, closed="both")],
        "n_steps": [Interval(Integral, 1, 1000, closed="both")],
        "clip": [Interval(Real, 1e-6, 1e6, closed="both")],
        "learning_rate": [Interval(Real, 1e-9, 1e9, closed="both"), None],
        "perplexity": [Interval(Real, 1, None, closed="left")],
        "n_anchors": [Interval(Integral, 4, None, closed="left"), None],
        "public_seed": [SEED],
    }

    epsilon: float
    _: KW_ONLY
    delta: float = 1e-5
    n_components: int = 2
    n_steps: int = 10
    clip: float = 0.1
    learning_rate: float | None = None
    perplexity: float = 30.0
    n_anchors: int | None = None
    public_seed: int = 0

    def _make_guarantee(self) -> Guarantee:
        """Theorem 7 of docs/theory/baselines.md."""
        return make_guarantee(
            float(self.epsilon),
            float(self.delta),
            "clipped gradients with Gaussian noise, composed",
            LINK,
            events=tuple(noise.event for noise in self.noises_),
            extra_delta=sum(noise.extra_delta for noise in self.noises_),
        )

    def _fit(self, features: Floats, labels: NDArray[np.int64] | None) -> None:
        del labels
        self._validate_params()
        anchors = self._choose_anchors(features)
        perplexity = min(float(self.perplexity), (len(anchors) - 1) / 3)
        k = int(self.n_components)
        self.embedding_ = _tsne(anchors, k, perplexity, int(self.public_seed))
        self.anchors_, self._perplexity = anchors, perplexity
        reach = float(np.linalg.norm(self.embedding_, axis=1).max())
        self._rate = 2 * reach / (self.n_steps * self.clip) if self.learning_rate is None else float(self.learning_rate)
        change = 2 * float(self.clip) * (1 + 2.0**-40)
        self.noises_ = calibrate_steps("gaussian", self.epsilon, self.delta, [change] * int(self.n_steps), k)

    def _choose_anchors(self, features: Floats) -> Floats:
        kept = choose_anchors(features, self.n_anchors, self.public_seed)
        if len(kept) < max(4, int(self.n_components) + 1):
            raise ValueError(
                "public_X must have at least 4 rows that differ from their mean, and more than n_components"
            )
        return features[kept]

    def _release(self, features: Floats, source: Source) -> list[Message]:
        def noised(step: int, gradients: Floats) -> Floats:
            noise = self.noises_[step]
            assert isinstance(noise, GaussianNoise)
            return add_noise(gradients, replace(noise, size=gradients.size), source=source)

        return self._messages(source, embedding=self._walk(features, noised).astype(np.float32))

    def _prepare(self, features: Floats) -> Floats:
        return self._walk(features, lambda _, gradients: gradients)

    def _walk(self, features: Floats, noised: Callable[[int, Floats], Floats]) -> Floats:
        """Take all steps of all rows, a block at a time."""
        block = max(1, _BLOCK // len(self.anchors_))
        return np.concatenate([self._steps(features[i : i + block], noised) for i in range(0, len(features), block)])

    def _steps(self, features: Floats, noised: Callable[[int, Floats], Floats]) -> Floats:
        pull = affinities(cdist(features, self.anchors_, "sqeuclidean"), self._perplexity)
        places = np.zeros((len(features), int(self.n_components)))
        for step in range(int(self.n_steps)):
            gradients = clip_rows(gradient(places, self.embedding_, pull), float(self.clip))
            places = places - self._rate * noised(step, gradients)
        return places

    def _public_parts(self) -> tuple[object, ...]:
        return (
            *(int(number) for number in (self.n_components, self.n_steps, self.public_seed)),
            *(float(number) for number in (self.clip, self.perplexity)),
            None if self.learning_rate is None else float(self.learning_rate),
            None if self.n_anchors is None else int(self.n_anchors),
        )


def affinities(squared: Floats, perplexity: float) -> Floats:
    """Return t-SNE's probabilities of the anchors for each row, by squared distances: weights of a perplexity."""
    squared = squared - squared.min(axis=1, keepdims=True)
    low, high = np.full((len(squared), 1), -20.0), np.full((len(squared), 1), 20.0)  # logarithms of the precision
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        weights = np.exp(-squared * np.exp(middle))
        total = weights.sum(axis=1, keepdims=True)
        entropy = np.log(total) + np.exp(middle) * (weights * squared).sum(axis=1, keepdims=True) / total
        wide = entropy > math.log(perplexity)
        low, high = np.where(wide, middle, low), np.where(wide, high, middle)
    return np.asarray(weights / total)


def gradient(places: Floats, embedding: Floats, pull: Floats) -> Floats:
    """Return the gradient of each row's Kullback-Leibler divergence, the anchors staying where they are.

    ``4 sum_j (p_j - q_j) (1 + |y - y_j|^2)^-1 (y - y_j)``, q_j being the Student weights of the anchors.
    """
    student = 1 / (1 + cdist(places, embedding, "sqeuclidean"))
    forces = 4 * (pull - student / student.sum(axis=1, keepdims=True)) * student
    return np.asarray(forces.sum(axis=1, keepdims=True) * places - forces @ embedding)


def clip_rows(gradients: Floats, clip: float) -> Floats:
    """Scale rows down to a norm of at most `clip`; one that is not finite becomes zero, since an error would tell."""
    safe = np.where(np.isfinite(gradients).all(axis=1, keepdims=True), gradients, 0.0)
    return np.asarray(safe * np.minimum(1.0, clip / np.maximum(np.linalg.norm(safe, axis=1, keepdims=True), 1e-300)))


def _tsne(anchors: Floats, n_components: int, perplexity: float, seed: int) -> Floats:
    """Embed the public anchors, centred."""
    method = "barnes_hut" if n_components < 4 else "exact"
    # Principal components first, where there are as many; their signs are fixed by the library.
    init = "pca" if n_components <= min(anchors.shape) else "random"
    found = TSNE(n_components, perplexity=perplexity, init=init, random_state=seed, method=method, n_jobs=1)
    with threadpool_limits(1):  # sums in one order, so that both sides come to the same place
        embedding = found.fit_transform(anchors).astype(np.float64)
    return np.asarray(embedding - embedding.mean(axis=0))
