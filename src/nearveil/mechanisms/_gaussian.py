"""Gaussian noise on vectors: the analytic Gaussian mechanism."""

from dataclasses import KW_ONLY, MISSING, dataclass, replace

import numpy as np

from nearveil.mechanisms.base import TractableRelease, VectorRelease, make_noise_guarantee
from nearveil.mechanisms.messages import Floats, Message
from nearveil.mechanisms.projection import ProjectedRelease
from nearveil.privacy import Guarantee
from nearveil.privacy.noise import GaussianNoise, Source, add_noise, calibrate_gaussian
from nearveil.privacy.parameters import DELTA, EPSILON, SEED, parameter

LINK = "docs/theory/baselines.md"


class NoisyVector(VectorRelease, TractableRelease):
    """Send the mapped row with Gaussian noise."""

    epsilon: float
    delta: float
    noise_: GaussianNoise

    def _make_guarantee(self) -> Guarantee:
        """Theorems 1 and 2 of docs/theory/baselines.md."""
        return make_noise_guarantee(self.epsilon, self.delta, (self.noise_,), "analytic Gaussian mechanism", LINK)

    def _release(self, features: Floats, source: Source) -> list[Message]:
        values = self._prepare(features)
        # The calibration covers one row, a batch has many. Rounding to single precision is post-processing.
        noisy = add_noise(values, replace(self.noise_, size=values.size), source=source)
        return self._messages(source, vector=noisy.astype(np.float32))

    def _log_density(self, messages: list[Message], features: Floats) -> Floats:
        rows = self._prepare(features)
        vectors = self._read_vectors(messages, self.noise_.size)
        half = vectors @ rows.T - np.einsum("ij,ij->i", rows, rows) / 2
        return np.asarray(half / self.noise_.scale**2)


@dataclass(eq=False, repr=False)
class AnalyticGaussian(ProjectedRelease, NoisyVector):
    """Send the feature itself with the least Gaussian noise that keeps the guarantee (Balle and Wang 2018).

    Two rows of norm one are at most 2 apart, so every coordinate gets noise for sensitivity 2 (Theorem 1 of
    ``docs/theory/baselines.md``). The message has the form of PrivUnit's, with three times the noise.

    Parameters
    ----------
    epsilon : float
        From 1e-6 to 64.
    delta : float, default=1e-5
    projection, n_components, projection_seed
        A public map to fewer dimensions, as for :class:`~nearveil.mechanisms.PrivUnit`.

    Attributes
    ----------
    noise_ : GaussianNoise
        Noise of one row.
    projection_ : Projection

    Examples
    --------
    >>> rows = np.random.default_rng(0).standard_normal((200, 32))
    >>> release = AnalyticGaussian(4.0).fit(rows[:100])
    >>> release.release(rows[100])["vector"].shape
    (32,)
    >>> f"{release.noise_.scale:.2f}"
    '2.16'
    """

    name = "analytic-gaussian"

    epsilon: float = parameter(MISSING, EPSILON)
    _: KW_ONLY
    delta: float = parameter(1e-5, DELTA)
    projection_seed: int = parameter(0, SEED)

    def _calibrate(self, features: Floats) -> None:
        del features
        size = self.projection_.n_components
        self.noise_ = calibrate_gaussian(self.epsilon, self.delta, sensitivity=2 * bound_computed_norm(size), size=size)


def bound_computed_norm(dimension: int) -> float:
    """Bound the norm of a row divided by its norm in doubles: d errors in the sum, half in the root, one more."""
    return 1 + (dimension + 8) * 2.0**-52
