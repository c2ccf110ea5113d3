"""Baselines: plain embeddings, DP-dSNE with clipped and noisy gradient steps, and private principal components."""

import importlib
import math
import pickle
from abc import abstractmethod
from dataclasses import KW_ONLY, MISSING, dataclass, replace
from fractions import Fraction
from numbers import Real
from typing import Any, Literal, Self, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq
from scipy.spatial.distance import cdist
from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.manifold import TSNE
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils._param_validation import Interval, StrOptions
from sklearn.utils.validation import check_is_fitted
from threadpoolctl import threadpool_limits

from nearveil.cluster import cut_rows
from nearveil.mechanisms._gaussian import LINK, bound_computed_norm
from nearveil.mechanisms.base import (
    Floats,
    Message,
    Release,
    VectorRelease,
    choose_source,
    make_guarantee,
    make_noise_guarantee,
    read_vector,
)
from nearveil.metrics import scale_to_unit
from nearveil.privacy import Guarantee
from nearveil.privacy.checks import check_rows
from nearveil.privacy.events import PureDp
from nearveil.privacy.noise import GaussianNoise, Source, add_noise, calibrate_gaussian, gaussian_integers
from nearveil.privacy.parameters import (
    COMPONENTS,
    DELTA,
    EPSILON,
    SEED,
    WEIGHT,
    Parameters,
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
    Nothing is guaranteed about which record was asked for.
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


_BATCH = 64  # proposals at a time
_GAUSS_BITS = 46


def draw_bingham(scores: Floats, source: Source) -> Floats:
    """Draw a unit vector of density proportional to ``exp(v' scores v)``, exact except for rounding."""
    # Rejection from an angular central Gaussian (Kent, Ganeiber and Mardia 2013). With A = (largest eigenvalue) -
    # scores, q dimensions and any b from 1 to q, the density ``exp(-u)``, u = v'Av, is at most ``exp((b - q) / 2) (q /
    # b)^(q/2)`` times ``(1 + 2u / b)^(-q/2)``; b minimises rejections.
    values, vectors = np.linalg.eigh(scores)
    gaps = values[-1] - values
    q = len(gaps)
    b = 1.0 if q == 1 else float(brentq(lambda b: np.sum(1 / (b + 2 * gaps)) - 1, 1.0, float(q)))
    while True:
        gauss = gaussian_integers(Fraction(1 << _GAUSS_BITS), _BATCH * q, source).reshape(_BATCH, q)
        proposals = gauss / np.sqrt(1 + 2 * gaps / b)
        with np.errstate(invalid="ignore"):  # a proposal of zeros is never accepted
            proposals /= np.linalg.norm(proposals, axis=1, keepdims=True)
        u = proposals**2 @ gaps
        log_accept = -u + q / 2 * np.log1p(2 * u / b) + (q - b) / 2 - q / 2 * np.log(q / b)
        accepted = np.flatnonzero(np.log(_draw_uniform(_BATCH, source)) < log_accept)
        if len(accepted):
            return np.asarray(vectors @ proposals[accepted[0]])


def run_bingham_chain(scores: Floats, n_components: int, n_sweeps: int, source: Source) -> Floats:
    """Run a Gibbs chain towards the density ``exp(tr(V' scores V))`` on orthonormal columns (Hoff 2009)."""
    # No bound on the distance from the limit is proved. One column needs no chain and is exact.
    d = len(scores)
    gauss = gaussian_integers(Fraction(1 << _GAUSS_BITS), d * n_components, source).reshape(d, n_components)
    columns, _ = np.linalg.qr(gauss * 2.0**-_GAUSS_BITS)
    for _ in range(1 if n_components == 1 else n_sweeps):
        for number in range(n_components):
            basis = find_complement(np.delete(columns, number, axis=1))
            columns[:, number] = basis @ draw_bingham(basis.T @ scores @ basis, source)
    return np.asarray(columns)


def find_complement(columns: Floats) -> Floats:
    """Return an orthonormal basis of the complement of orthonormal columns."""
    d, k = columns.shape
    return np.asarray(np.linalg.qr(np.hstack([columns, np.eye(d)]))[0][:, k:d]) if k else np.eye(d)


def _draw_uniform(count: int, source: Source) -> Floats:
    """Return uniform numbers above 0 with the full precision of doubles, however small."""
    words = source.words(2 * count).astype(np.float64)
    return np.asarray((words[:count] + (words[count:] + 0.5) * 2.0**-64) * 2.0**-64)


Method = Literal["gaussian", "bingham", "gibbs"]

CHAIN = "the Gibbs chain is stopped after some sweeps, and how far it is from its limit is not proved"
FLOATS = "its proof is about real numbers, and does not cover the rounding of floating-point numbers"
_METHODS = StrOptions(set(get_args(Method)))
UNSOUND: dict[str, str] = {"bingham": FLOATS, "gibbs": CHAIN}
_COARSE = 2.0**20  # directions are released in steps of 2^-20: the proof does not cover low bits of doubles
_DIRECTIONS = "record of the set that the directions are learned from"
_BASES = {  # theorem and unit of the guarantee
    "gaussian": ("Gaussian covariance", "record of the set whose covariance is released"),
    "bingham": ("exponential mechanism on the Bingham distribution", _DIRECTIONS),
    "gibbs": ("exponential mechanism by a Gibbs chain", _DIRECTIONS),
}


@dataclass(eq=False, repr=False)
class PrivatePCA(ClassNamePrefixFeaturesOutMixin, TransformerMixin, Parameters):  # type: ignore[misc]
    """Learn principal directions from a private set, with a guarantee for each of its records.

    Rows are centred by a public mean and scaled to norm one. The guarantee protects records that are passed to `fit`,
    not rows that are transformed later. Theorems 5 and 6 of ``docs/theory/baselines.md``.

    Parameters
    ----------
    epsilon : float
        From 1e-6 to 64, for all directions.
    n_components : int, default=8
    method : {"gaussian", "bingham", "gibbs"}, default="gaussian"
        "gaussian": the covariance with symmetric Gaussian noise (Dwork et al. 2014, "Analyze Gauss"). "bingham": the
        exponential mechanism (Chaudhuri, Sarwate and Sinha 2013), one direction at a time, each with an equal part of
        epsilon. "gibbs": all directions at once, by the paper's Gibbs chain. The guarantees of the last two are not
        proved.
    delta : float, default=1e-5
        Only for "gaussian".
    mean : array-like of shape (d,), optional
        Public; zero by default.
    n_sweeps : int, default=50
        Only for "gibbs".
    allow_unsound : bool, default=False
        Required for "bingham" and "gibbs".

    Attributes
    ----------
    components_ : ndarray of shape (n_components, d)
        Orthonormal rows, public.
    n_features_in_ : int

    Examples
    --------
    >>> rows = np.random.default_rng(0).standard_normal((2000, 6)) * [9, 6, 1, 1, 1, 1]
    >>> learned = PrivatePCA(1.0, n_components=2).fit(rows)
    >>> bool(np.linalg.norm(learned.components_[:, :2]) > 1.3)
    True
    >>> learned.transform(rows[:5]).shape
    (5, 2)
    >>> learned.guarantee.protects, learned.guarantee.unit
    ('database', 'record of the set whose covariance is released')
    """

    epsilon: float = parameter(MISSING, EPSILON)
    _: KW_ONLY
    n_components: int = parameter(8, allow_integers(1))
    method: Method = parameter("gaussian", _METHODS)
    delta: float = parameter(1e-5, DELTA)
    mean: ArrayLike | None = parameter(None, "array-like", None)
    n_sweeps: int = parameter(50, allow_integers(1))
    allow_unsound: bool = parameter(False, "boolean")

    def fit(self, X: ArrayLike, y: object = None, *, rng: Source | None = None) -> Self:
        """Learn the directions. Uses the guarantee once.

        Parameters
        ----------
        X : array-like of shape (n, d)
            Private; the number of rows is public.
        y : None
        rng : Source, optional
            The operating system's by default; a seed voids the guarantee.
        """
        del y
        # Copy the parameters: another thread may set them during the fit.
        fixed = type(self)(**self.get_params(deep=False))
        fixed._validate_params()
        reason = UNSOUND.get(fixed.method, "")
        if reason and not fixed.allow_unsound:
            raise ValueError(
                f'method="{fixed.method}" has no proved guarantee: {reason}. Set allow_unsound=True to run it'
            )
        source = choose_source(rng)
        rows = fixed._unit_rows(X)
        if not fixed.n_components <= rows.shape[1]:
            raise ValueError(f"n_components must be at most the {rows.shape[1]} columns of X")
        columns, delta, costs = fixed._learn(rows, source)
        theorem, unit = _BASES[fixed.method]
        stated = {"protects": "database", "unit": unit, "reason": reason, **costs}
        self._guarantee = make_guarantee(float(fixed.epsilon), delta, theorem, LINK, **stated).with_source(source)
        self.components_ = columns.T
        self.n_features_in_ = rows.shape[1]
        self._n_features_out = len(self.components_)
        return self

    @property
    def guarantee(self) -> Guarantee:
        """Guarantee for a record of the private set, as computed by :meth:`fit`."""
        check_is_fitted(self, "components_")
        return self._guarantee

    def transform(self, X: ArrayLike) -> Floats:
        """Centre rows, scale them to norm one and project them to shape (n, n_components), without protection."""
        check_is_fitted(self, "components_")
        rows = self._unit_rows(X)
        if rows.shape[1] != self.n_features_in_:
            raise ValueError(f"X must have {self.n_features_in_} columns, as in fit")
        return np.asarray(rows @ self.components_.T)

    def _unit_rows(self, X: ArrayLike) -> Floats:
        """Centre and normalise; a row that equals the mean stays zero, because an error would reveal it."""
        rows = check_rows(X, "X")
        if self.mean is not None:
            mean = check_rows(np.atleast_2d(np.asarray(self.mean)), "mean")
            if mean.shape != (1, rows.shape[1]):
                raise ValueError(f"mean must contain {rows.shape[1]} numbers, one for each column of X")
            rows = rows - mean
        return scale_to_unit(rows.copy())

    def _learn(self, rows: Floats, source: Source) -> tuple[Floats, float, dict[str, Any]]:
        """Return directions as columns, their delta, and its part for samplers and the events."""
        moments, k, epsilon = rows.T @ rows, int(self.n_components), float(self.epsilon)
        if self.method == "gaussian":
            noise = calibrate_covariance_noise(len(rows), rows.shape[1], epsilon, self.delta)
            columns = np.linalg.eigh(add_covariance_noise(moments, noise, source))[1][:, ::-1][:, :k]
            return columns, float(self.delta), {"events": (noise.event,), "extra_delta": noise.extra_delta}
        if self.method == "gibbs":
            columns = _round_directions(run_bingham_chain(epsilon / 2 * moments, k, int(self.n_sweeps), source))
            return columns, 0.0, {}
        return draw_directions(moments, k, epsilon, source), 0.0, {"events": (PureDp(epsilon / k),) * k}


def calibrate_covariance_noise(n: int, d: int, epsilon: float, delta: float) -> GaussianNoise:
    """Return the noise for a sum of n outer products xx' if one is replaced: sqrt(2) in Frobenius norm."""
    # Theorem 5 of docs/theory/baselines.md; `test_the_covariance_moves_as_far_as_the_bound_and_no_farther`. Sums of
    # doubles have n rounding errors; the norms of the terms add up to n. It is for the d (d + 1) / 2 entries on the
    # diagonal and, times sqrt(2), above it.
    change = math.sqrt(2) * bound_computed_norm(d) ** 2 + 2 * (n + 8) * n * 2.0**-52
    return calibrate_gaussian(epsilon, delta, sensitivity=change, size=d * (d + 1) // 2)


def add_covariance_noise(moments: Floats, noise: GaussianNoise, source: Source) -> Floats:
    """Add symmetric noise: 1 / sqrt(2) of its scale off the diagonal, as the norm counts these entries twice."""
    i, j = np.triu_indices(len(moments))
    weights = np.where(i == j, 1.0, math.sqrt(2))
    noisy = np.zeros_like(moments)
    noisy[i, j] = add_noise(moments[i, j] * weights, noise, source=source) / weights
    return np.asarray(noisy + np.triu(noisy, 1).T)


def draw_directions(moments: Floats, k: int, epsilon: float, source: Source) -> Floats:
    """Draw k orthogonal directions by exponential mechanisms of epsilon / k each, of sensitivity one (Theorem 6)."""
    d = len(moments)
    columns = np.zeros((d, 0))
    for _ in range(k):
        # The next draw may only depend on rounded directions, which are released.
        basis = find_complement(columns)
        drawn = basis @ draw_bingham(epsilon / (2 * k) * (basis.T @ moments @ basis), source)
        columns = _round_directions(np.column_stack([columns, drawn]))
    return columns


def _round_directions(columns: Floats) -> Floats:
    """Round directions to a coarse grid and make them orthonormal again."""
    return np.asarray(np.linalg.qr(np.rint(columns * _COARSE) / _COARSE)[0])


@dataclass(eq=False, repr=False)
class PrivatePCARelease(VectorRelease):
    """Send a query's projection on private principal directions, in the clear.

    The guarantee protects the set that the directions were learned from. **The query is not protected.**

    Parameters
    ----------
    projector : PrivatePCA
        Fitted; in a ``sklearn.frozen.FrozenEstimator`` if you clone this object.

    Examples
    --------
    >>> rows = np.random.default_rng(0).standard_normal((900, 16))
    >>> projector = PrivatePCA(1.0, n_components=4, mean=rows[:300].mean(axis=0)).fit(rows[300:600])
    >>> release = PrivatePCARelease(projector).fit(rows[:300])
    >>> release.release(rows[700])["vector"].shape
    (4,)
    >>> release.guarantee.protects
    'database'
    """

    name = "private-pca"

    projector: PrivatePCA

    def _make_guarantee(self) -> Guarantee:
        return self.projector.guarantee

    def _fit(self, features: Floats, labels: NDArray[np.int64] | None) -> None:
        del labels
        if not hasattr(self.projector, "components_"):
            raise ValueError("projector must be a PrivatePCA that is fitted on its private set")
        if self.projector.components_.shape[1] != features.shape[1]:
            raise ValueError(f"projector must have been fitted on {features.shape[1]} columns, as public_X has")
        self.components_: Floats = self.projector.components_

    def _release(self, features: Floats, source: Source) -> list[Message]:
        return self._messages(source, vector=self._prepare(features).astype(np.float32))

    def _prepare(self, features: Floats) -> Floats:
        return np.asarray(features @ self.components_.T, dtype=np.float64)

    def _public_parts(self) -> tuple[object, ...]:
        return (self.components_,)
