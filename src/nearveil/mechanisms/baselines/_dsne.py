"""DP-dSNE: t-SNE of a private row among public anchors, by gradient steps that are clipped and noised."""

import math
from collections.abc import Callable
from dataclasses import replace
from numbers import Integral, Real
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import cdist
from sklearn.manifold import TSNE
from sklearn.utils._param_validation import Interval
from threadpoolctl import threadpool_limits

from nearveil.mechanisms.base import Floats
from nearveil.mechanisms.baselines._plain import EmbeddedRelease
from nearveil.mechanisms.message import Message
from nearveil.mechanisms.privatemail._steps import calibrated
from nearveil.mechanisms.vectors._analytic import DELTA, EPSILON, LINK, SEED
from nearveil.privacy import Basis, Guarantee
from nearveil.privacy.noise import GaussianNoise, Source, add_noise

_BLOCK = 1 << 21  # affinities at a time
_BISECTIONS = 50


class DPdSNE(EmbeddedRelease):
    """Find the row's place among public anchors by t-SNE, each gradient clipped and noised (after Saha et al. 2021).

    The anchors have a public t-SNE embedding and stay where they are. A private row starts in their middle and
    takes `n_steps` gradient steps on its own Kullback-Leibler divergence. A clipped gradient changes by at most
    ``2 clip`` when the row is replaced, whatever the steps before, so all steps together cost what so many Gaussian
    mechanisms cost. The server takes the same steps with its gallery, without noise.

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

    def __init__(
        self,
        epsilon: float,
        *,
        delta: float = 1e-5,
        n_components: int = 2,
        n_steps: int = 10,
        clip: float = 0.1,
        learning_rate: float | None = None,
        perplexity: float = 30.0,
        n_anchors: int | None = None,
        public_seed: int = 0,
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.n_components = n_components
        self.n_steps = n_steps
        self.clip = clip
        self.learning_rate = learning_rate
        self.perplexity = perplexity
        self.n_anchors = n_anchors
        self.public_seed = public_seed

    def _make_guarantee(self) -> Guarantee:
        """Theorem 7 of docs/theory/baselines.md."""
        return Guarantee(
            epsilon=float(self.epsilon),
            delta=float(self.delta),
            protects="query",
            unit="record",
            relation="replace",
            basis=Basis("clipped gradients with Gaussian noise, composed", LINK),
            events=tuple(noise.event for noise in self.noises_),
            extra_delta=sum(noise.extra_delta for noise in self.noises_),
        )

    def _fit(self, features: Floats, labels: NDArray[np.int64] | None) -> None:
        del labels
        self._validate_params()
        anchors = self._choose(features)
        perplexity = min(float(self.perplexity), (len(anchors) - 1) / 3)
        k = int(self.n_components)
        self.embedding_ = _tsne(anchors, k, perplexity, int(self.public_seed))
        self.anchors_, self._perplexity = anchors, perplexity
        reach = float(np.linalg.norm(self.embedding_, axis=1).max())
        self._rate = 2 * reach / (self.n_steps * self.clip) if self.learning_rate is None else float(self.learning_rate)
        change = 2 * float(self.clip) * (1 + 2.0**-40)
        self.noises_ = calibrated("gaussian", self.epsilon, self.delta, [change] * int(self.n_steps), k)

    def _choose(self, features: Floats) -> Floats:
        kept = np.flatnonzero(features.any(axis=1))
        if self.n_anchors is not None:
            if self.n_anchors > len(kept):
                raise ValueError(f"n_anchors must be at most the {len(kept)} public rows that differ from their mean")
            generator = np.random.default_rng([int(self.public_seed), 2])
            kept = np.sort(generator.choice(kept, int(self.n_anchors), replace=False))
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

    def _embed(self, features: Floats) -> Floats:
        return self._walk(features, lambda _, gradients: gradients)

    def _walk(self, features: Floats, noised: Callable[[int, Floats], Floats]) -> Floats:
        """Take all steps of all rows, a block at a time."""
        block = max(1, _BLOCK // len(self.anchors_))
        return np.concatenate([self._steps(features[i : i + block], noised) for i in range(0, len(features), block)])

    def _steps(self, features: Floats, noised: Callable[[int, Floats], Floats]) -> Floats:
        pull = affinities(cdist(features, self.anchors_, "sqeuclidean"), self._perplexity)
        places = np.zeros((len(features), int(self.n_components)))
        for step in range(int(self.n_steps)):
            gradients = clipped(gradient(places, self.embedding_, pull), float(self.clip))
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
    """Return t-SNE's probabilities of the anchors for each row: Gaussian weights of a given perplexity.

    `squared`: Squared distances.
    `perplexity`: Below m.
    Returns: Rows sum to one.

    Examples
    --------
    >>> found = affinities(np.array([[0.0, 1.0, 4.0, 9.0]]), 2.0)
    >>> f"{np.exp(-np.sum(found * np.log(found))):.4f}"
    '2.0000'
    """
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


def clipped(gradients: Floats, clip: float) -> Floats:
    """Scale rows down to a norm of at most `clip`.

    Returns: A row that is not finite becomes zero: an error would tell something about it.

    Examples
    --------
    >>> clipped(np.array([[3.0, 4.0], [0.3, 0.4]]), 1.0)
    array([[0.6, 0.8],
           [0.3, 0.4]])
    """
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
