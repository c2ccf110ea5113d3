"""Random projection with Gaussian noise, for a record and as published."""

import math
from dataclasses import KW_ONLY, MISSING, dataclass

import numpy as np
from numpy.typing import NDArray

from nearveil.mechanisms._gaussian import LINK, NoisyVector, bound_computed_norm
from nearveil.mechanisms.messages import Floats, make_guarantee
from nearveil.privacy import Guarantee
from nearveil.privacy.noise import GaussianNoise, calibrate_gaussian, choose_gaussian_grid
from nearveil.privacy.parameters import COMPONENTS, DELTA, EPSILON, SEED, parameter

REASON = "its noise is for a change of one attribute by at most one, but another record differs in all of them"


@dataclass(eq=False, repr=False)
class RandomProjection(NoisyVector):
    """Project to fewer dimensions by a public random matrix and add noise (Kenthapadi et al. 2012).

    The matrix has independent entries of variance ``1 / n_components``, drawn from a public seed. The noise covers
    twice its largest singular value, the largest change when a row of norm one is replaced (Theorem 2 of
    ``docs/theory/baselines.md``). The paper only protects one attribute that changes by at most one, with less noise:
    set `as_published`.

    Parameters
    ----------
    epsilon : float
        From 1e-6 to 64.
    delta : float, default=1e-5
        Below 1/2 if `as_published`.
    n_components : int, default=64
        Can exceed the number of features.
    projection_seed : int, default=0
        Public: the server needs it too.
    as_published : bool, default=False
        Use the noise of the paper. Unsound for a record.
    allow_unsound : bool, default=False
        Required for `as_published`.

    Attributes
    ----------
    matrix_ : ndarray of shape (d, n_components)
    noise_ : GaussianNoise
        Noise of one row.

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
    _public_names = ("n_components", "projection_seed")

    epsilon: float = parameter(MISSING, EPSILON)
    _: KW_ONLY
    delta: float = parameter(1e-5, DELTA)
    n_components: int = parameter(64, COMPONENTS)
    projection_seed: int = parameter(0, SEED)
    as_published: bool = parameter(False, "boolean")
    allow_unsound: bool = parameter(False, "boolean")

    def _make_guarantee(self) -> Guarantee:
        if not self.as_published:
            return super()._make_guarantee()
        return make_guarantee(float(self.epsilon), float(self.delta), "as published (2012)", LINK, reason=REASON)

    def _fit(self, features: Floats, labels: NDArray[np.int64] | None) -> None:
        del labels
        self._validate_params()
        if self.as_published and not self.allow_unsound:
            raise ValueError(f"as_published has no guarantee: {REASON}. Set allow_unsound=True to use it anyway")
        d, k = features.shape[1], int(self.n_components)
        self.matrix_ = np.random.default_rng(self.projection_seed).standard_normal((d, k)) / math.sqrt(k)
        if self.as_published:
            self.noise_ = compute_published_noise(self.matrix_, self.epsilon, self.delta)
        else:
            change = record_sensitivity(self.matrix_)
            self.noise_ = calibrate_gaussian(self.epsilon, self.delta, sensitivity=change, size=k)

    def _prepare(self, features: Floats) -> Floats:
        return np.asarray(features @ self.matrix_)


def record_sensitivity(matrix: Floats) -> float:
    """Bound the distance between projections of two unit rows: ``2 |P|`` in spectral norm, with rounding errors."""
    # Theorem 2 of docs/theory/baselines.md; `test_the_projection_moves_as_far_as_the_bound_and_no_farther`.
    d, k = matrix.shape
    rounding = 4 * (d + k) * 2.0**-52 * float(np.linalg.norm(matrix))
    return float(2 * (np.linalg.norm(matrix, 2) * bound_computed_norm(d) + rounding))


def compute_published_noise(matrix: Floats, epsilon: float, delta: float) -> GaussianNoise:
    """Return the paper's noise: ``w sqrt(2 (ln(1 / (2 delta)) + epsilon)) / epsilon`` for the largest row norm w."""
    # Sufficient for a change of one attribute by one (docs/theory/baselines.md, Theorem 3).
    if not delta < 0.5:
        raise ValueError("delta must be below 1/2 for the published calibration")
    change, size = float(np.linalg.norm(matrix, axis=1).max()), matrix.shape[1]
    scale = change * math.sqrt(2 * (math.log(1 / (2 * delta)) + epsilon)) / epsilon
    grid = choose_gaussian_grid(min(change, scale), size)
    return GaussianNoise(sensitivity=change, scale=scale, size=size, grid=grid)
