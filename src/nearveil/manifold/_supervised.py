"""The supervised manifold as a scikit-learn estimator."""

from numbers import Integral, Real
from typing import Any, ClassVar, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin, _fit_context
from sklearn.utils import check_random_state
from sklearn.utils._array_api import get_namespace
from sklearn.utils._param_validation import Interval, StrOptions
from sklearn.utils.validation import check_is_fitted, validate_data

from nearveil.graph import Encoding, LabelGraph, Method, gaussian_graph, label_graph
from nearveil.manifold._solvers import SOLVERS, to_kind_of
from nearveil.manifold._step import Array, Query


class SupervisedManifold(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Embed rows by the supervised manifold learning query (SMLQ).

    The query of Vepakomma, Balla and Raskar: rows attract each other with Gaussian weights of their
    features and repel each other with Gaussian weights of their labels, which are largest within a
    class. It lowers ``v(Z) = Tr(Z' L_X Z) - alpha Tr(Z' L_Y Z)`` without inverse or step size, and in
    linear time where the bandwidth allows the series.

    Nothing here is private: this is the query that :mod:`nearveil.release` protects.

    Parameters
    ----------
    n_components : int, default=2
        Columns of the embedding.
    bandwidth : float, default=0.4
        The s of ``exp(-|x_i - x_j|^2 / (2 s^2))``. Rows are brought to norm one first, so distances
        go from 0 to 2. The papers take 5 or 6, where all rows attract each other about equally and the
        features hardly matter, but a step is cheap.
    label_weight : float, default=0.6
        The alpha: how strongly labels repel. 0 ignores them.
    n_iter : int, default=20
        Steps to take ("spectral" takes none). More is not better: in the end all columns lie in the
        space of one eigenvalue, and mostly are multiples of one vector.
    init : "random" or array-like of shape (n, n_components), default="random"
        Where to start. "random" draws from the standard normal distribution and takes out the mean
        that the steps would keep, weighted by the degrees: such a start depends on the rows, so the
        sensitivity bounds do not cover it. Give a public array where privacy is at stake.
    rescale : bool, default=True
        Scale the embedding to Frobenius norm sqrt(n) after each step; without it the rows collapse
        to a point or run away.
    graph : {"auto", "exact", "series", "neighbors"}, default="auto"
        How the weights of the features are applied; see :func:`nearveil.graph.gaussian_graph`.
    tolerance : float, default=1e-6
        Largest relative error of such a weight.
    random_state : int, RandomState instance or None, default=None
        Seeds the random start. Not a source of privacy.
    solver : {"majorize", "cccp", "spectral"}, default="majorize"
        "majorize" is the query, eq. 4 of the 2022 paper. "cccp" is the first pass of the 2021 paper
        (its eq. 6), "spectral" the eigenvectors of ``L_X - alpha L_Y`` (its eq. 3), for comparison.
    n_neighbors : int, default=15
        For ``graph="neighbors"``.
    label_encoding : {"integer", "one-hot"}, default="integer"
        See :func:`nearveil.graph.label_graph`. "integer" is the papers'; "one-hot" suits classes
        whose order means nothing, and names.
    label_bandwidth : float, optional
        Bandwidth of the label weights; that of the features where it is not given, as in the papers.

    Attributes
    ----------
    embedding_ : array of shape (n, n_components)
        Where the rows of the fit lie.
    objective_ : float
        v of the embedding.
    objective_history_ : list of float
        v of the start and of each iterate. It never rises where ``rescale=False`` and the solver is
        "majorize".
    graph_ : GaussianGraph
        The graph of the features.
    n_iter_ : int
        Steps taken.
    n_features_in_ : int
    feature_names_in_ : ndarray of shape (d,)
        Where the features had names.

    See Also
    --------
    nearveil.manifold.smlq_step : One step, on graphs of your own.

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> from nearveil import SupervisedManifold
    >>> X, y = load_digits(return_X_y=True)
    >>> manifold = SupervisedManifold(random_state=0).fit(X[:1000], y[:1000])
    >>> manifold.embedding_.shape
    (1000, 2)
    >>> manifold.transform(X[1000:]).shape
    (797, 2)
    """

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        "n_components": [Interval(Integral, 1, None, closed="left")],
        "bandwidth": [Interval(Real, 0, None, closed="neither")],
        "label_weight": [Interval(Real, 0, None, closed="left")],
        "n_iter": [Interval(Integral, 1, None, closed="left")],
        "init": [StrOptions({"random"}), "array-like"],
        "rescale": ["boolean"],
        "graph": [StrOptions({"auto", "exact", "series", "neighbors"})],
        "tolerance": [Interval(Real, 0, None, closed="neither")],
        "random_state": ["random_state"],
        "solver": [StrOptions(set(SOLVERS))],
        "n_neighbors": [Interval(Integral, 1, None, closed="left")],
        "label_encoding": [StrOptions({"integer", "one-hot"})],
        "label_bandwidth": [Interval(Real, 0, None, closed="neither"), None],
    }

    def __init__(
        self,
        n_components: int = 2,
        *,
        bandwidth: float = 0.4,
        label_weight: float = 0.6,
        n_iter: int = 20,
        init: Any = "random",
        rescale: bool = True,
        graph: Method = "auto",
        tolerance: float = 1e-6,
        random_state: Any = None,
        solver: str = "majorize",
        n_neighbors: int = 15,
        label_encoding: Encoding = "integer",
        label_bandwidth: float | None = None,
    ) -> None:
        self.n_components = n_components
        self.bandwidth = bandwidth
        self.label_weight = label_weight
        self.n_iter = n_iter
        self.init = init
        self.rescale = rescale
        self.graph = graph
        self.tolerance = tolerance
        self.random_state = random_state
        self.solver = solver
        self.n_neighbors = n_neighbors
        self.label_encoding = label_encoding
        self.label_bandwidth = label_bandwidth

    @_fit_context(prefer_skip_nested_validation=True)  # type: ignore[untyped-decorator]
    def fit(self, X: Array, y: Array | None = None) -> Self:
        """Embed the rows of `X`.

        Parameters
        ----------
        X : array-like of shape (n, d)
            Finite rows, none of them zero; they are brought to norm one.
        y : array-like of shape (n,), optional
            Labels; -1 marks a row without. None means that no row has one.

        Returns
        -------
        SupervisedManifold
            The fitted estimator.
        """
        X = self._checked(X, ensure_min_samples=2)
        n = X.shape[0]
        if self.n_components > n:
            raise ValueError(f"n_components={self.n_components} must be at most the number of rows, {n}")
        labels = self._label_graph(y, n)
        graph = gaussian_graph(
            _unit_rows(X), self.bandwidth, method=self.graph, tolerance=self.tolerance, n_neighbors=self.n_neighbors
        )
        query = Query(graph, labels, self.label_weight)
        start = self._start(X, query)
        with np.errstate(over="ignore", invalid="ignore"):  # the solvers look for it and say what to do
            embedding, history = SOLVERS[self.solver](query, start, self.n_iter, self.rescale)
        self.graph_ = graph
        self.embedding_ = embedding
        self.objective_history_ = history
        self.objective_ = history[-1]
        self.n_iter_ = max(len(history) - 1, 1)
        return self

    def fit_transform(self, X: Array, y: Array | None = None) -> Array:
        """Embed the rows of `X` and return where they lie.

        With labels this is not what ``transform`` returns for the same rows: `transform` treats
        every row as new and unlabelled.

        Parameters
        ----------
        X : array-like of shape (n, d)
        y : array-like of shape (n,), optional

        Returns
        -------
        array of shape (n, n_components)
        """
        return self.fit(X, y).embedding_

    def transform(self, X: Array) -> Array:
        """Embed new rows without labels.

        Each lands where the step would leave it at rest: on the average of the fitted rows, weighted
        by the Gaussian kernel of the features.

        Parameters
        ----------
        X : array-like of shape (m, d)

        Returns
        -------
        array of shape (m, n_components)
        """
        check_is_fitted(self)
        X = self._checked(X, reset=False)
        return self.graph_.interpolate(_unit_rows(X), self.embedding_)

    def _checked(self, X: Array, **options: Any) -> Array:
        """Let scikit-learn check the rows, and keep what it says free of their values."""
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
            raise ValueError("y has one class only, so its labels tell no rows apart: give at least 2, or y=None")
        return labels

    def _start(self, X: Array, query: Query) -> Array:
        n = X.shape[0]
        if not isinstance(self.init, str):
            start = np.asarray(self.init, dtype=np.float64)
            if start.shape != (n, self.n_components):
                raise ValueError(f"init must have shape ({n}, {self.n_components}); got {start.shape}")
            if not np.isfinite(start).all():
                raise ValueError("init holds NaN or infinity")
            return to_kind_of(start, X)
        start = to_kind_of(check_random_state(self.random_state).normal(size=(n, self.n_components)), X)
        return start - query.mean(start)

    @property
    def _n_features_out(self) -> int:
        return int(self.embedding_.shape[1])

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        tags.array_api_support = True
        return tags


def _unit_rows(X: Array) -> Array:
    """Divide each row by its norm; a zero row has no direction and raises."""
    largest = abs(X).max(axis=1)
    largest = getattr(largest, "values", largest)  # torch returns where it is, too
    if not bool((largest > 0).all()):
        row = int(largest.argmin())
        raise ValueError(f"X holds a row of zeros (row {row}), which has no direction: remove it")
    X = X / largest[:, None]  # so that squares neither overflow nor vanish
    return X / ((X * X).sum(axis=1) ** 0.5)[:, None]
