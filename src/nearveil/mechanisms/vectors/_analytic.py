"""The analytic Gaussian mechanism on features: the plainest private release of a vector."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from numbers import Integral, Real
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.utils._param_validation import Interval

from nearveil.mechanisms.base import Floats, Release
from nearveil.mechanisms.message import Message, MessageError
from nearveil.mechanisms.projection import fit_projection
from nearveil.privacy import Basis, Guarantee
from nearveil.privacy.noise import LARGEST_EPSILON, GaussianNoise, Source, add_noise, calibrate_gaussian

EPSILON = Interval(Real, 1e-6, LARGEST_EPSILON, closed="both")
DELTA = Interval(Real, 1e-18, 0.999, closed="both")
SEED = Interval(Integral, 0, (1 << 32) - 1, closed="both")
LINK = "docs/theory/baselines.md"


class NoisyVector(Release):
    """A vector that the row is mapped to, plus Gaussian noise; the server ranks by inner products with it.

    Subclasses say in `_fit_map` what the map is and how much noise its sensitivity needs.
    """

    epsilon: float
    delta: float
    noise_: GaussianNoise

    def _make_guarantee(self) -> Guarantee:
        """Theorems 1 and 2 of docs/theory/baselines.md."""
        return Guarantee(
            epsilon=float(self.epsilon),
            delta=float(self.delta),
            protects="query",
            unit="record",
            relation="replace",
            basis=Basis("analytic Gaussian mechanism", LINK),
            events=(self.noise_.event,),
            extra_delta=self.noise_.extra_delta,
        )

    def log_density(self, messages: Message | Sequence[Message], X: ArrayLike) -> Floats:
        """Return the log-density of messages for each row that may have caused them, up to a constant.

        Parameters
        ----------
        messages : Message or sequence of Message
        X : array-like of shape (n_rows, d)

        Returns
        -------
        ndarray of shape (n_messages, n_rows)
        """
        given = [messages] if isinstance(messages, Message) else list(messages)
        rows = self._map(self.features(X))
        vectors = np.array([self._vector(message) for message in given]).reshape(-1, self.noise_.size)
        half = vectors @ rows.T - np.einsum("ij,ij->i", rows, rows) / 2
        return np.asarray(half / self.noise_.scale**2)

    @abstractmethod
    def _fit_map(self, features: Floats, labels: NDArray[np.int64] | None) -> GaussianNoise:
        """Learn the map and return the noise of one row."""

    @abstractmethod
    def _map(self, features: Floats) -> Floats:
        """Map features of norm one (or zero), without noise."""

    def _fit(self, features: Floats, labels: NDArray[np.int64] | None) -> None:
        self._validate_params()
        self.noise_ = self._fit_map(features, labels)

    def _release(self, features: Floats, source: Source) -> list[Message]:
        values = self._map(features)
        # The calibration is for one row; a batch is many of them. Single precision is post-processing.
        noisy = add_noise(values, replace(self.noise_, size=values.size), source=source)
        return self._messages(source, vector=noisy.astype(np.float32))

    def _prepare(self, features: Floats) -> Floats:
        return self._map(features)

    def _rank(self, message: Message, prepared: Floats) -> Floats:
        return np.asarray(prepared @ self._vector(message), dtype=np.float64)

    def _vector(self, message: Message) -> Floats:
        self._check_message(message)
        vector = message["vector"]
        if vector.dtype != np.float32 or vector.shape != (self.noise_.size,):
            raise MessageError(f"arrays: 'vector' must hold {self.noise_.size} floats of 32 bits")
        return vector.astype(np.float64)


class AnalyticGaussian(NoisyVector):
    """Send the feature itself with the least Gaussian noise that keeps the promise (Balle and Wang 2018).

    Two rows of norm one are at most 2 apart, so the noise is that of sensitivity 2 on every coordinate. It is
    what PrivUnit is to be compared with: the same kind of message, three times the noise.

    Parameters
    ----------
    epsilon : float
        From 1e-6 to 64.
    delta : float, default=1e-5
    projection : None, "pca", "random", "manifold", array-like or fitted transformer, default=None
        A public map to fewer dimensions, after which rows are brought to norm one again, as for
        :class:`~nearveil.mechanisms.PrivUnit`.
    n_components : int, optional
        For "pca", "random" and "manifold"; 64 by default, or as many as there can be.
    projection_seed : int, default=0
        Public.

    Attributes
    ----------
    noise_ : GaussianNoise
        Of one row.
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

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        "epsilon": [EPSILON],
        "delta": [DELTA],
        "projection": "no_validation",  # type: ignore[dict-item]
        "n_components": "no_validation",  # type: ignore[dict-item]
        "projection_seed": [SEED],
    }

    def __init__(
        self,
        epsilon: float,
        *,
        delta: float = 1e-5,
        projection: Any = None,
        n_components: int | None = None,
        projection_seed: int = 0,
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.projection = projection
        self.n_components = n_components
        self.projection_seed = projection_seed

    def _fit_map(self, features: Floats, labels: NDArray[np.int64] | None) -> GaussianNoise:
        projection = fit_projection(
            self.projection, features, labels, n_components=self.n_components, seed=self.projection_seed
        )
        size = projection.n_components
        noise = calibrate_gaussian(self.epsilon, self.delta, sensitivity=2 * computed_norm(size), size=size)
        self.projection_ = projection
        return noise

    def _map(self, features: Floats) -> Floats:
        return self.projection_(features)

    def _public_parts(self) -> tuple[object, ...]:
        return self.noise_.size, self.projection_.public_id


def computed_norm(dimension: int) -> float:
    """Bound the norm of a row that was divided by its norm in doubles.

    A sum of d squares is off by d roundings at most, its root by half of that, the quotient by one more.

    Examples
    --------
    >>> computed_norm(1280) - 1 < 1e-12
    True
    """
    return 1 + (dimension + 8) * 2.0**-52
