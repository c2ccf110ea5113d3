"""The supervised manifold learning query (step, iteration, scikit-learn estimator) and Umeyama alignment."""

import math
from dataclasses import KW_ONLY, dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin, _fit_context
from sklearn.utils import check_random_state
from sklearn.utils._array_api import get_namespace
from sklearn.utils._param_validation import StrOptions
from sklearn.utils.validation import check_is_fitted, validate_data

from nearveil.cluster import is_dask_array
from nearveil.privacy.checks import check_numbers, check_rows
from nearveil.privacy.parameters import WEIGHT, Parameters, allow_integers, allow_reals, parameter
from nearveil.privatemail.graph import GaussianGraph, LabelGraph, gaussian_graph, label_graph
from nearveil.privatemail.graph._base import Array, find_limits
from nearveil.privatemail.graph.gaussian import Method
from nearveil.privatemail.graph.labels import Encoding

__all__ = ["smlq_step", "umeyama"]

Floats = NDArray[np.float64]
Result = tuple[Array, list[float]]

_TINY = 1e-35  # dividing by less would overflow float32
_ROUNDING = 16  # machine epsilons of the mean size of a column: a smaller mean is rounding error
_FLAT = 1e-14  # smaller singular values of unit clouds are rounding error


@dataclass(frozen=True)
class ManifoldQuery:
    """The parameters of the objective: two graphs and the weight between them."""

    graph: GaussianGraph
    labels: LabelGraph | None
    label_weight: float

    def gradient(self, Z: Array) -> Array:
        """Return ``(L_X - alpha L_Y) Z``, half the gradient of the objective."""
        attraction = self.graph.laplacian_matmul(Z)
        if self.labels is None or self.label_weight == 0:
            return attraction
        return attraction - self.label_weight * self.labels.laplacian_matmul(Z)

    def objective(self, Z: Array) -> float:
        """Return ``v(Z) = Tr(Z' L_X Z) - alpha Tr(Z' L_Y Z)``."""
        return float((Z * self.gradient(Z)).sum())

    def step(self, Z: Array) -> tuple[Array, float]:
        """Return the next iterate by eq. 4, and v(Z)."""
        gradient = self.gradient(Z)
        return Z - gradient / (2 * self.graph.degree[:, None]), float((Z * gradient).sum())

    def mean(self, Z: Array) -> Array:
        """Return the mean of the rows weighted by degree, which a step preserves."""
        degree = self.graph.degree
        return (degree[:, None] * Z).sum(axis=0) / degree.sum()


def smlq_step(
    Z: Array, graph: GaussianGraph, labels: LabelGraph | None = None, label_weight: float = 1.0
) -> tuple[Array, float]:
    """Take one step of the supervised manifold learning query; return the moved rows, and v(Z) before the step.

    Eq. 4 of the 2022 paper: ``Z + 1/2 Diag(L_X)^-1 (alpha L_Y - L_X) Z``. A step never raises
    ``v(Z) = Tr(Z' L_X Z) - alpha Tr(Z' L_Y Z)``, nor moves the degree-weighted mean (``docs/theory/manifold.md``).

    `graph` has the weights w of the attraction, `labels` the weights v of the repulsion; `label_weight` is alpha.

    Examples
    --------
    Two rows that attract each other meet half-way:

    >>> from nearveil.privatemail.graph import gaussian_graph
    >>> moved, objective = smlq_step(np.array([[0.0], [1.0]]), gaussian_graph(np.eye(2), bandwidth=1.0))
    >>> moved.ravel(), round(objective, 4)
    (array([0.5, 0.5]), 0.3679)
    """
    if not label_weight >= 0:
        raise ValueError(f"label_weight must be at least 0; got {label_weight!r}")
    return ManifoldQuery(graph, labels, label_weight).step(Z)


def majorize(query: ManifoldQuery, start: Array, n_iter: int, rescale: bool) -> Result:
    """Iterate eq. 4 of the 2022 paper; return the embedding, and v(Z) of every iterate, including the start."""
    # Each step restores the mean, whose rounding error rescaling would amplify.
    Z = start * find_norm_factor(start) if rescale else start
    mean = query.mean(Z)
    mean = mean * (abs(mean) > _ROUNDING * find_limits(Z).eps * query.mean(abs(Z)))
    history = []
    for _ in range(n_iter):
        moved, objective = query.step(Z)
        if not math.isfinite(objective):
            break
        history.append(objective)
        Z = moved - (query.mean(moved) - mean)
        if rescale:
            factor = find_norm_factor(Z)
            Z, mean = Z * factor, mean * factor
    history.append(query.objective(Z))
    if not math.isfinite(history[-1]):
        raise ValueError("the embedding overflows: use rescale=True, a smaller label_weight or fewer n_iter")
    return Z, history


def find_norm_factor(Z: Array) -> float:
    """Return the factor that scales `Z` to Frobenius norm sqrt(n)."""
    largest = float(abs(Z).max())  # divide by it first: squares could overflow or vanish
    if not _TINY < largest < math.inf:
        raise ValueError(
            "the embedding cannot be rescaled: its rows have met in one point, or overflowed. Start elsewhere (init), "
            "give labels or more rows, or use fewer n_iter"
        )
    scaled = Z / largest
    return math.sqrt(Z.shape[0] / float((scaled * scaled).sum())) / largest


def convert_like(values: Any, model: Array) -> Array:
    """Convert a NumPy array to the library, device and dtype of `model`."""
    if isinstance(model, np.ndarray):
        return values.astype(model.dtype, copy=False)
    return model.new_tensor(values)


@dataclass(eq=False, repr=False)
class SupervisedManifold(ClassNamePrefixFeaturesOutMixin, TransformerMixin, Parameters):  # type: ignore[misc]
    """Embed rows by the supervised manifold learning query (SMLQ).

    The query of Vepakomma, Balla and Raskar: rows attract each other with Gaussian weights of their features and repel
    each other with Gaussian weights of their labels, which are largest within a class. It lowers
    ``v(Z) = Tr(Z' L_X Z) - alpha Tr(Z' L_Y Z)`` without inverse or step size, in linear time if the bandwidth allows
    the series. It is not private: :class:`nearveil.privatemail.PrivateMail` protects its query.

    In a pipeline, the next step is fitted on `fit_transform`, which uses labels, but predicts from `transform`, which
    does not, so training scores mean little. To treat both alike, fit the next step on ``manifold.transform(X)``.

    Parameters
    ----------
    n_components : int, default=2
    bandwidth : float, default=0.4
        The s of ``exp(-|x_i - x_j|^2 / (2 s^2))``, for rows of norm one. The papers use 5 or 6, where all rows attract
        each other about equally and the features hardly matter.
    label_weight : float, default=0.6
        The alpha, the strength of the repulsion between labels. 0 ignores them.
    n_iter : int, default=20
        Number of steps. More is not better: all columns converge to the eigenspace of
        one eigenvalue, usually to multiples of one vector.
    init : "random" or array-like of shape (n, n_components), default="random"
        The start. "random" draws from the standard normal distribution and subtracts the degree-weighted mean. Such a
        start depends on the rows, so the sensitivity bounds do not cover it: for privacy, pass a public array.
    rescale : bool, default=True
        Scale the embedding to Frobenius norm sqrt(n) after each step, or the rows collapse to a point or diverge.
    graph : {"auto", "exact", "series"}, default="auto"
        With `tolerance`, as in :func:`nearveil.privatemail.graph.gaussian_graph`.
    tolerance : float, default=1e-6
    random_state : int, RandomState instance or None, default=None
        Seed of the random start. Not a source of privacy.
    label_encoding : {"integer", "one-hot"}, default="integer"
        See :func:`nearveil.privatemail.graph.label_graph`. The papers use "integer"; "one-hot" suits names.
    label_bandwidth : float, optional
        Bandwidth of the label weights. Default: `bandwidth`, as in the papers.

    Attributes
    ----------
    embedding_ : array of shape (n, n_components)
    objective_ : float
        v of the embedding.
    objective_history_ : list of float
        v of the start and of each iterate. It never rises if ``rescale=False``.
    graph_ : GaussianGraph

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> X, y = load_digits(return_X_y=True)
    >>> manifold = SupervisedManifold(random_state=0).fit(X[:1000], y[:1000])
    >>> manifold.embedding_.shape, manifold.transform(X[1000:]).shape
    ((1000, 2), (797, 2))
    """

    n_components: int = parameter(2, allow_integers(1))
    _: KW_ONLY
    bandwidth: float = parameter(0.4, allow_reals(0))
    label_weight: float = parameter(0.6, WEIGHT)
    n_iter: int = parameter(20, allow_integers(1))
    init: Any = parameter("random", StrOptions({"random"}), "array-like")
    rescale: bool = parameter(True, "boolean")
    graph: Method = parameter("auto", StrOptions({"auto", "exact", "series"}))
    tolerance: float = parameter(1e-6, allow_reals(0))
    random_state: Any = parameter(None, "random_state")
    label_encoding: Encoding = parameter("integer", StrOptions({"integer", "one-hot"}))
    label_bandwidth: float | None = parameter(None, allow_reals(0), None)

    @_fit_context(prefer_skip_nested_validation=True)  # type: ignore[untyped-decorator]
    def fit(self, X: Array, y: Array | None = None) -> Self:
        """Embed the rows of `X`.

        Rows are finite and not zero; they are scaled to norm one. Blocks of a Dask array stay on their workers, with a
        graph by "series" or "exact"; the embedding is a NumPy array. A label of -1 marks an unlabelled row.
        """
        X = self._check_input(X, ensure_min_samples=2)
        n = X.shape[0]
        if self.n_components > n:
            raise ValueError(f"n_components={self.n_components} must be at most the number of rows, {n}")
        labels = self._label_graph(y, n)
        graph = gaussian_graph(_normalise_rows(X), self.bandwidth, self.graph, self.tolerance)
        query = ManifoldQuery(graph, labels, self.label_weight)
        start = self._start(n, np.empty(0, X.dtype) if is_dask_array(X) else X, query)
        with np.errstate(over="ignore", invalid="ignore"):  # checked afterwards
            embedding, history = self._solve(query, start)
        self.graph_, self.embedding_ = graph, embedding
        self.objective_history_, self.objective_ = history, history[-1]
        self.n_iter_ = max(len(history) - 1, 1)
        return self

    def _solve(self, query: ManifoldQuery, start: Array) -> Result:
        return majorize(query, start, self.n_iter, self.rescale)

    def fit_transform(self, X: Array, y: Array | None = None) -> Array:
        """Embed the rows of `X` and return the embedding.

        With labels, ``transform`` embeds the same rows differently: it treats every row as new and unlabelled.
        """
        return self.fit(X, y).embedding_

    def transform(self, X: Array) -> Array:
        """Embed new rows without labels.

        Each is placed at the fixed point of the step: the average of the fitted rows, weighted by the kernel.
        """
        check_is_fitted(self)
        X = self._check_input(X, reset=False)
        return self.graph_.interpolate(_normalise_rows(X), self.embedding_)

    def _check_input(self, X: Array, **options: Any) -> Array:
        """Validate the rows with scikit-learn, and remove values from its errors."""
        if is_dask_array(X) and options.get("reset", True):  # workers check its blocks
            self.n_features_in_ = int(X.shape[1])
            return X
        xp, _ = get_namespace(X)
        try:
            return validate_data(self, X, dtype=[xp.float64, xp.float32], **options)
        except ValueError as error:
            first, *rest = str(error).splitlines()
            if first.startswith("could not convert"):
                first = "X holds text or objects where numbers are expected"
            advice = [line for line in rest if line.startswith("Reshape your data")]
            raise ValueError(" ".join([first, *advice])) from None

    def _label_graph(self, y: Array | None, n: int) -> LabelGraph | None:
        if y is None:
            return None
        labels = label_graph(y, self.label_bandwidth or self.bandwidth, self.label_encoding)
        if labels.shape[0] != n:
            raise ValueError(f"y must have a label for each row of X: it has {labels.shape[0]} for {n} rows")
        if len(labels.classes) == 1:
            raise ValueError("y has one class only: give at least 2, or y=None")
        return labels

    def _start(self, n: int, X: Array, query: ManifoldQuery) -> Array:
        if not isinstance(self.init, str):
            start = check_rows(self.init, "init")
            if start.shape != (n, self.n_components):
                raise ValueError(f"init must have shape ({n}, {self.n_components}); got {start.shape}")
            return convert_like(start, X)
        start = convert_like(check_random_state(self.random_state).normal(size=(n, self.n_components)), X)
        return start - query.mean(start)

    @property
    def _n_features_out(self) -> int:
        return int(self.embedding_.shape[1])

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        tags.array_api_support = True
        return tags


def _normalise_rows(X: Array) -> Array:
    """Divide each row by its norm, or raise if a row is zero."""
    largest = abs(X).max(axis=1)
    largest = getattr(largest, "values", largest)  # torch also returns positions
    if not bool((largest > 0).all()):
        row = int(largest.argmin())
        raise ValueError(f"X holds a row of zeros (row {row}), which has no direction: remove it")
    X = X / largest[:, None]  # squares could overflow or vanish
    return X / ((X * X).sum(axis=1) ** 0.5)[:, None]


@dataclass(frozen=True, eq=False)
class SimilarityTransform:
    """The map ``x -> scale * rotation @ x + translation``.

    Examples
    --------
    >>> SimilarityTransform(2.0, np.eye(2), np.array([1.0, 0.0])).apply([1.0, 1.0])
    array([3., 2.])
    """

    scale: float
    rotation: Floats  # orthogonal, shape (d, d); its determinant is 1 unless a reflection was allowed and fits better
    translation: Floats  # shape (d,)

    def __post_init__(self) -> None:
        for array in (self.rotation, self.translation):
            array.setflags(write=False)

    def apply(self, points: ArrayLike) -> Floats:
        """Map `points` of shape (n, d), or one point of shape (d,)."""
        array = check_numbers(points, "points")
        if array.ndim not in (1, 2) or array.shape[-1] != len(self.translation):
            raise ValueError(f"points must have {len(self.translation)} columns; got shape {array.shape}")
        return np.asarray(self.scale * array @ self.rotation.T + self.translation)


def umeyama(
    source: ArrayLike, target: ArrayLike, *, scale: bool = True, reflection: bool = False
) -> SimilarityTransform:
    """Find the similarity transform that maps `source` closest to `target`.

    Least squares over rotation, translation and (optionally) scale and reflection, in closed form by a singular value
    decomposition (Kabsch 1976, Umeyama 1991). Points that do not determine a rotation are refused.

    Without `scale`, lengths are kept (Kabsch); with `reflection`, the transform may mirror.

    Examples
    --------
    >>> import numpy as np
    >>> corner = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]])
    >>> turned = 3 * corner @ np.array([[0.0, 1.0], [-1.0, 0.0]]) + [5, 6]
    >>> transform = umeyama(corner, turned)
    >>> round(transform.scale, 6), np.allclose(transform.apply(corner), turned)
    (3.0, True)
    """
    source_, target_ = check_rows(source, "source"), check_rows(target, "target")
    if source_.shape != target_.shape:
        raise ValueError(f"source and target must have one shape; got {source_.shape} and {target_.shape}")
    n, d = source_.shape
    # Mean zero and size one make the singular values independent of the units.
    source_, source_mean, source_size = _centre_cloud(source_, "source")
    target_, target_mean, target_size = _centre_cloud(target_, "target")
    left, spread, right = np.linalg.svd(target_.T @ source_)
    needed = d if reflection else max(d - 1, 1)
    if np.sum(spread > _FLAT) < needed:
        raise ValueError(
            f"source and target leave the rotation open: {n} points span fewer than {needed} "
            f"of {d} dimensions; use more points, or points in general position"
        )
    signs = np.ones(d)
    if not reflection and np.linalg.det(left) * np.linalg.det(right) < 0:
        signs[-1] = -1
        if np.sum(spread * signs) <= _FLAT or (d > 1 and spread[-2] - spread[-1] <= _FLAT):
            raise ValueError(
                "source and target leave the rotation open: one mirrors the other and no rotation fits best; "
                "use reflection=True, or points in general position"
            )
    rotation = (left * signs) @ right
    factor = float(np.sum(spread * signs)) * (target_size / source_size) if scale else 1.0
    return SimilarityTransform(factor, rotation, target_mean - factor * rotation @ source_mean)


def _centre_cloud(cloud: Floats, name: str) -> tuple[Floats, Floats, float]:
    """Return the cloud with mean zero and size one, its mean, and its size."""
    shifted = cloud - cloud[0]  # exactly zero if all points are equal
    largest = float(np.max(np.abs(shifted)))
    if largest <= 4 * np.finfo(float).eps * float(np.max(np.abs(cloud))):
        raise ValueError(f"all points of {name} are equal, which leaves rotation and scale open")
    shifted = shifted / largest
    mean = shifted.mean(axis=0)
    centred = shifted - mean
    size = float(np.linalg.norm(centred))
    return centred / size, cloud[0] + largest * mean, largest * size
