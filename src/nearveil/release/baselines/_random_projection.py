"""Private random projection: a public Gaussian matrix, then Gaussian noise."""

import math
from numbers import Integral
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from sklearn.utils._param_validation import Interval

from nearveil.privacy import Basis, Guarantee
from nearveil.privacy.noise import GaussianNoise, calibrate_gaussian, gaussian_grid
from nearveil.release._base import Floats
from nearveil.release.vectors._analytic import DELTA, EPSILON, LINK, SEED, NoisyVector, computed_norm

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
