"""Public projections of features to fewer dimensions, with norm one again. They cost no privacy."""

import copy
from abc import abstractmethod
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, get_args

import joblib
import numpy as np
from numpy.typing import NDArray
from sklearn.decomposition import PCA
from sklearn.exceptions import NotFittedError
from sklearn.utils.validation import check_is_fitted

from nearveil.mechanisms.base import TractableRelease
from nearveil.mechanisms.messages import Floats, fingerprint
from nearveil.metrics import scale_to_unit
from nearveil.privacy.checks import check_integer, check_rows
from nearveil.privatemail.manifold import SupervisedManifold

Kind = Literal["pca", "random", "manifold"]

_COMPONENTS = 64  # the default, if there are as many


@dataclass(frozen=True, eq=False)
class Projection:
    """A public map of features, followed by a division by the norm."""

    n_components: int  # columns of the output
    public_id: str  # fingerprint of its parameters, besides the public rows
    matrix: Floats | None = None  # of a linear map
    transformer: Any = None  # of any other map; without either, features stay unchanged

    def __call__(self, features: Floats) -> Floats:
        """Project rows to norm one. Zero and infinite images become the first axis: an error would reveal them."""
        mapped = features @ self.matrix if self.matrix is not None else self._transform(features)
        mapped = np.where(np.isfinite(mapped).all(axis=1, keepdims=True), mapped, 0.0)
        mapped[:, 0] = np.where(mapped.any(axis=1), mapped[:, 0], 1.0)
        return scale_to_unit(mapped)

    def _transform(self, features: Floats) -> Floats:
        if self.transformer is None:
            return features.copy()
        mapped = np.zeros((len(features), self.n_components))
        nonzero = features.any(axis=1)  # public rows can be zeros, which some transformers refuse
        if nonzero.any():
            mapped[nonzero] = np.asarray(self.transformer.transform(features[nonzero]), dtype=np.float64)
        return mapped


@dataclass(eq=False, repr=False)
class ProjectedRelease(TractableRelease):
    """A release of rows after a public projection to fewer dimensions."""

    _: KW_ONLY
    projection: Any = None
    n_components: int | None = None
    projection_seed: int = 0

    def _fit(self, features: Floats, labels: NDArray[np.int64] | None) -> None:
        self._validate_params()
        seed = self.projection_seed
        self.projection_ = fit_projection(self.projection, features, labels, n_components=self.n_components, seed=seed)
        self._calibrate(features)

    @abstractmethod
    def _calibrate(self, features: Floats) -> None:
        """Choose the noise for rows of `projection_`."""

    def _prepare(self, features: Floats) -> Floats:
        return self.projection_(features)

    def _public_parts(self) -> tuple[object, ...]:
        return self.projection_.n_components, self.projection_.public_id


def fit_projection(
    projection: object,
    features: Floats,
    labels: NDArray[np.int64] | None,
    *,
    n_components: int | None = None,
    seed: int = 0,
) -> Projection:
    """Learn a projection from public features of norm one (or zero), or check the one that was passed."""
    if isinstance(projection, str):
        return _learn_projection(projection, features, labels, n_components, seed)
    if n_components is not None:
        raise ValueError('n_components must be None unless projection is "pca", "random" or "manifold"')
    if projection is None:
        return Projection(features.shape[1], "none")
    if hasattr(projection, "transform"):
        return _wrap_transformer(projection, features)
    matrix = check_rows(projection, "projection")  # type: ignore[arg-type]
    if matrix.shape[0] != features.shape[1]:
        raise ValueError(f"projection must have {features.shape[1]} rows, one for each feature")
    return Projection(matrix.shape[1], fingerprint(matrix), matrix=matrix.copy())


def _learn_projection(
    kind: str, features: Floats, labels: NDArray[np.int64] | None, n_components: int | None, seed: int
) -> Projection:
    if kind not in get_args(Kind):
        raise ValueError('projection must be None, "pca", "random", "manifold", a matrix or a fitted transformer')
    rows = features[features.any(axis=1)]
    n, d = rows.shape
    most = {"pca": min(n, d), "random": d, "manifold": n}[kind]
    if most == 0:
        raise ValueError("public_X must contain a row that differs from the mean, to learn a projection")
    size = min(_COMPONENTS, most) if n_components is None else check_integer(n_components, "n_components", 1, most)
    seed = check_integer(seed, "projection_seed", 0, (1 << 32) - 1)
    public_id = fingerprint(kind, size, seed)
    if kind == "pca":  # not its centring: features are already centred
        return Projection(size, public_id, matrix=PCA(size, svd_solver="full").fit(rows).components_.T)
    if kind == "random":
        directions, triangle = np.linalg.qr(np.random.default_rng(seed).standard_normal((d, size)))
        signs = np.where(np.diagonal(triangle) < 0, -1.0, 1.0)  # depend on the library; both sides need the same
        return Projection(size, public_id, matrix=directions * signs)
    row_labels = None if labels is None else labels[features.any(axis=1)]
    manifold = SupervisedManifold(size, random_state=seed)
    return Projection(size, public_id, transformer=manifold.fit(rows, row_labels))


def _wrap_transformer(transformer: Any, features: Floats) -> Projection:
    try:
        check_is_fitted(transformer)
    except (NotFittedError, AttributeError, TypeError):
        raise ValueError(
            "projection must be a scikit-learn transformer that is fitted on public rows; clone() resets it unless it "
            "is in a FrozenEstimator"
        ) from None
    probe = features[features.any(axis=1)][:1]
    if len(probe) == 0:
        raise ValueError("public_X must contain a row that differs from the mean, to try the projection")
    mapped = np.asarray(transformer.transform(probe))
    if mapped.ndim != 2 or len(mapped) != 1 or mapped.shape[1] == 0 or mapped.dtype.kind not in "fiu":
        raise ValueError("projection must map rows to rows of numbers; its transform returned something else")
    # Copy it: callers can modify the parameter.
    return Projection(mapped.shape[1], str(joblib.hash(transformer)), transformer=copy.deepcopy(transformer))
