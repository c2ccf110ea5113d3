"""Private principal components: noise on the covariance, and exponential mechanisms."""

import math
from dataclasses import KW_ONLY, MISSING, dataclass
from fractions import Fraction
from typing import Any, Literal, Self, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq
from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils._param_validation import StrOptions
from sklearn.utils.validation import check_is_fitted

from nearveil.mechanisms._gaussian import LINK, bound_computed_norm
from nearveil.mechanisms.base import VectorRelease, choose_source
from nearveil.mechanisms.messages import Floats, Message, make_guarantee
from nearveil.metrics import scale_to_unit
from nearveil.privacy import Guarantee
from nearveil.privacy.checks import check_rows
from nearveil.privacy.events import PureDp
from nearveil.privacy.noise import GaussianNoise, Source, add_noise, calibrate_gaussian, gaussian_integers
from nearveil.privacy.parameters import (
    DELTA,
    EPSILON,
    Parameters,
    allow_integers,
    parameter,
)

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

    name = "private-pca"

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

    name = PrivatePCA.name

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
