"""Plain embeddings, and DP-dSNE with clipped and noisy gradient steps."""

import importlib
import math
import pickle
from abc import abstractmethod
from dataclasses import KW_ONLY, MISSING, dataclass, replace
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import cdist
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.manifold import TSNE
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils._param_validation import Interval
from threadpoolctl import threadpool_limits

from nearveil.cluster import cut_rows
from nearveil.mechanisms._gaussian import LINK
from nearveil.mechanisms.base import Release, make_noise_guarantee
from nearveil.mechanisms.messages import Floats, Message, make_guarantee, read_vector
from nearveil.privacy import Guarantee
from nearveil.privacy.noise import Source, add_noise
from nearveil.privacy.parameters import (
    COMPONENTS,
    DELTA,
    EPSILON,
    SEED,
    WEIGHT,
    allow_integers,
    allow_reals,
    parameter,
)
from nearveil.privatemail.engines import calibrate_steps, choose_anchors
from nearveil.privatemail.manifold import SupervisedManifold

Labels = NDArray[np.int64]

_BLOCK = 1 << 21  # affinities at a time
_BISECTIONS = 50
WIDTH = Interval(Real, 1, None, closed="left")  # perplexity


class EmbeddedRelease(Release):
    """Send the row's position in an embedding; the server embeds its gallery the same way and ranks by distance."""

    @abstractmethod
    def _embed(self, features: Floats, source: Source | None) -> Floats:
        """Embed rows of norm one (or zero), shape (n, k); without a source, without noise."""

    def _release(self, features: Floats, source: Source) -> list[Message]:
        return self._messages(source, embedding=self._embed(features, source).astype(np.float32))

    def _prepare(self, features: Floats) -> Floats:
        return self._embed(features, None)

    def _rank(self, message: Message, prepared: Floats) -> Floats:
        point = read_vector(message, "embedding", "float32", prepared.shape[1])
        return np.asarray(-cdist(point[None], prepared)[0])


class PlainRelease(EmbeddedRelease):
    """Send the row's position in an embedding, without noise or guarantee."""

    def _make_guarantee(self) -> Guarantee:
        return make_guarantee(math.inf, 0.0, "no protection", LINK)

    def _fit(self, features: Floats, labels: Labels | None) -> None:
        self._validate_params()
        nonzero = features.any(axis=1)
        self._transformer = self._fit_map(features[nonzero], None if labels is None else labels[nonzero])
        self._columns = int(self._map(features[nonzero][:1]).shape[1]) if nonzero.any() else features.shape[1]

    def _embed(self, features: Floats, source: Source | None) -> Floats:
        del source
        embedding = np.zeros((len(features), self._columns))  # zero for rows that equal the public mean
        nonzero = features.any(axis=1)
        if nonzero.any():
            embedding[nonzero] = self._map(features[nonzero])
        return embedding

    def _map(self, features: Floats) -> Floats:
        """Embed rows of norm one."""
        return np.asarray(self._transformer.transform(features), dtype=np.float64)

    @abstractmethod
    def _fit_map(self, features: Floats, labels: Labels | None) -> Any:
        """Return a transformer fitted on public rows of norm one."""


class RawFeatures(PlainRelease):
    """Send the feature itself, centred and of norm one. Not private; a reference for other releases.

    Examples
    --------
    >>> rows = np.random.default_rng(0).standard_normal((200, 32))
    >>> release = RawFeatures().fit(rows[:100])
    >>> int(np.argmax(release.rank(release.release(rows[150]), rows[100:])))
    50
    >>> print(release.guarantee)
    Nothing is guaranteed about which record was queried.
    """

    name = "raw"
    _public_names = ()

    def _fit_map(self, features: Floats, labels: Labels | None) -> Any:
        del features, labels
        return FunctionTransformer()


@dataclass(eq=False, repr=False)
class PlainManifold(PlainRelease):
    """Send the row's position by the supervised manifold learning query. Not private.

    Parameters
    ----------
    n_components, bandwidth, label_weight, n_iter
        As for :class:`~nearveil.privatemail.manifold.SupervisedManifold`.
    public_seed : int, default=0
        Seed of the start.

    Examples
    --------
    >>> rows = np.random.default_rng(0).standard_normal((200, 8))
    >>> PlainManifold().fit(rows[:100], np.arange(100) % 3).release(rows[150])["embedding"].shape
    (2,)
    """

    name = "plain-manifold"
    _public_names = ("n_components", "n_iter", "public_seed", "bandwidth", "label_weight")

    n_components: int = parameter(2, COMPONENTS)
    _: KW_ONLY
    bandwidth: float = parameter(0.4, allow_reals(0))
    label_weight: float = parameter(0.6, WEIGHT)
    n_iter: int = parameter(20, allow_integers(1))
    public_seed: int = parameter(0, SEED)

    def _fit_map(self, features: Floats, labels: Labels | None) -> Any:
        options = self.get_params()
        return SupervisedManifold(random_state=int(options.pop("public_seed")), **options).fit(features, labels)


@dataclass(eq=False, repr=False)
class PlainTSNE(PlainRelease):
    """Send the row's t-SNE position among public rows (needs openTSNE). Not private.

    Parameters
    ----------
    n_components : int, default=2
        1 or 2.
    perplexity : float, default=30.0
        At most a third of the public rows.
    public_seed : int, default=0

    Examples
    --------
    >>> PlainTSNE(perplexity=10.0)
    PlainTSNE(perplexity=10.0)
    """

    name = "plain-tsne"
    _public_names = ("n_components", "perplexity", "public_seed")

    n_components: int = parameter(2, allow_integers(1, 2))
    _: KW_ONLY
    perplexity: float = parameter(30.0, WIDTH)
    public_seed: int = parameter(0, SEED)

    def _fit_map(self, features: Floats, labels: Labels | None) -> Any:
        del labels
        try:
            library = importlib.import_module("openTSNE")
        except ImportError:
            raise ImportError("PlainTSNE needs openTSNE: pip install openTSNE") from None
        if len(features) < 10:
            raise ValueError("public_X must have at least 10 rows that differ from their mean for t-SNE")
        embedding = library.TSNE(
            int(self.n_components),
            perplexity=min(float(self.perplexity), (len(features) - 1) / 3),
            neighbors="exact",
            negative_gradient_method="bh",
            random_state=int(self.public_seed),
            n_jobs=1,  # a fixed order of sums: both sides need the same result
        ).fit(features)
        return pickle.dumps(embedding)

    def _map(self, features: Floats) -> Floats:
        # Unpickle for each call: the library's search tree has mutable state.
        embedding = pickle.loads(self._transformer)  # noqa: S301
        return np.asarray(embedding.transform(features), dtype=np.float64)


@dataclass(eq=False, repr=False)
class PlainLDA(PlainRelease):
    """Send the row's linear discriminants, learned from public labels. Not private.

    Parameters
    ----------
    n_components : int, optional
        At most, and by default, the number of classes less one, or the number of features if that is smaller.

    Examples
    --------
    >>> rows = np.random.default_rng(0).standard_normal((200, 8))
    >>> PlainLDA().fit(rows[:100], np.arange(100) % 3).release(rows[150])["embedding"].shape
    (2,)
    """

    name = "plain-lda"
    _public_names = ("n_components",)

    n_components: int | None = parameter(None, COMPONENTS, None)

    def _fit_map(self, features: Floats, labels: Labels | None) -> Any:
        if labels is None or len(np.unique(labels)) < 2:
            raise ValueError("public_y must contain at least two classes for LDA")
        most = min(features.shape[1], len(np.unique(labels)) - 1)
        if self.n_components is not None and self.n_components > most:
            raise ValueError(f"n_components must be at most {most} for these rows and classes")
        return LinearDiscriminantAnalysis(n_components=self.n_components).fit(features, labels)


@dataclass(eq=False, repr=False)
class DPdSNE(EmbeddedRelease):
    """Find the row's position among public anchors by t-SNE with clipped, noisy gradients (after Saha et al. 2021).

    The anchors have a fixed, public t-SNE embedding. A private row starts in its centre and takes `n_steps` gradient
    steps on its own Kullback-Leibler divergence, each a Gaussian mechanism (Theorem 7 of ``docs/theory/baselines.md``).
    The server takes the same steps with its gallery, without noise.

    Parameters
    ----------
    epsilon : float
        From 1e-6 to 64, for all steps.
    delta : float, default=1e-5
    n_components : int, default=2
    n_steps : int, default=10
    clip : float, default=0.1
        The largest norm of a gradient.
    learning_rate : float, optional
        By default, all steps together can cross the anchors' embedding.
    perplexity : float, default=30.0
        At most a third of the anchors.
    n_anchors : int, optional
        Number of public rows, drawn by `public_seed`, to use as anchors; all by default.
    public_seed : int, default=0

    Attributes
    ----------
    anchors_, embedding_ : ndarray of shape (m, d) and (m, n_components)
    noises_ : tuple of GaussianNoise
        Noise of each step, for one row.

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
    _public_names = ("n_components", "n_steps", "public_seed", "clip", "perplexity", "learning_rate", "n_anchors")

    epsilon: float = parameter(MISSING, EPSILON)
    _: KW_ONLY
    delta: float = parameter(1e-5, DELTA)
    n_components: int = parameter(2, allow_integers(1, 64))
    n_steps: int = parameter(10, allow_integers(1, 1000))
    clip: float = parameter(0.1, allow_reals(1e-6, 1e6))
    learning_rate: float | None = parameter(None, allow_reals(1e-9, 1e9), None)
    perplexity: float = parameter(30.0, WIDTH)
    n_anchors: int | None = parameter(None, allow_integers(4), None)
    public_seed: int = parameter(0, SEED)

    def _make_guarantee(self) -> Guarantee:
        """Theorem 7 of docs/theory/baselines.md."""
        theorem = "clipped gradients with Gaussian noise, composed"
        return make_noise_guarantee(self.epsilon, self.delta, self.noises_, theorem, LINK)

    def _fit(self, features: Floats, labels: NDArray[np.int64] | None) -> None:
        del labels
        self._validate_params()
        k, steps = int(self.n_components), int(self.n_steps)
        anchors = features[choose_anchors(features, self.n_anchors, self.public_seed)]
        if len(anchors) < max(4, k + 1):
            raise ValueError(
                "public_X must have at least 4 rows that differ from their mean, and more than n_components"
            )
        self._perplexity = min(float(self.perplexity), (len(anchors) - 1) / 3)
        self.anchors_ = anchors
        self.embedding_ = _embed_anchors(anchors, k, self._perplexity, int(self.public_seed))
        radius = float(np.linalg.norm(self.embedding_, axis=1).max())
        self._rate = 2 * radius / (steps * self.clip) if self.learning_rate is None else float(self.learning_rate)
        change = 2 * float(self.clip) * (1 + 2.0**-40)
        self.noises_ = calibrate_steps("gaussian", self.epsilon, self.delta, [change] * steps, k)

    def _embed(self, features: Floats, source: Source | None) -> Floats:
        """Take all steps for all rows, one block of rows at a time."""
        positions = np.zeros((len(features), int(self.n_components)))
        for block in cut_rows(len(features), max(1, _BLOCK // len(self.anchors_))):
            pull = compute_affinities(cdist(features[block], self.anchors_, "sqeuclidean"), self._perplexity)
            for noise in self.noises_:
                gradients = clip_rows(compute_gradient(positions[block], self.embedding_, pull), float(self.clip))
                if source is not None:
                    gradients = add_noise(gradients, replace(noise, size=gradients.size), source=source)
                positions[block] -= self._rate * gradients
        return positions


def compute_affinities(squared: Floats, perplexity: float) -> Floats:
    """Return t-SNE's probabilities of the anchors for each row, from squared distances and a perplexity."""
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


def compute_gradient(positions: Floats, embedding: Floats, pull: Floats) -> Floats:
    """Return the gradient of each row's Kullback-Leibler divergence (t-SNE) with fixed anchors."""
    student = 1 / (1 + cdist(positions, embedding, "sqeuclidean"))
    forces = 4 * (pull - student / student.sum(axis=1, keepdims=True)) * student
    return np.asarray(forces.sum(axis=1, keepdims=True) * positions - forces @ embedding)


def clip_rows(gradients: Floats, clip: float) -> Floats:
    """Scale rows down to a norm of at most `clip`. Infinite rows become zero, because an error would reveal them."""
    safe = np.where(np.isfinite(gradients).all(axis=1, keepdims=True), gradients, 0.0)
    return np.asarray(safe * np.minimum(1.0, clip / np.maximum(np.linalg.norm(safe, axis=1, keepdims=True), 1e-300)))


def _embed_anchors(anchors: Floats, n_components: int, perplexity: float, seed: int) -> Floats:
    """Embed the public anchors, centred."""
    method = "barnes_hut" if n_components < 4 else "exact"
    # Start from principal components if there are enough; the library fixes their signs.
    init = "pca" if n_components <= min(anchors.shape) else "random"
    tsne = TSNE(n_components, perplexity=perplexity, init=init, random_state=seed, method=method, n_jobs=1)
    with threadpool_limits(1):  # a fixed order of sums: both sides need the same result
        embedding = tsne.fit_transform(anchors).astype(np.float64)
    return np.asarray(embedding - embedding.mean(axis=0))
