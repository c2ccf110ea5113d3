"""From noisy sums to a linear discriminant. Nothing here sees a private record."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from nearveil.votes._integers import LONGEST

Rows = NDArray[np.float64]

COUNT_UNIT = LONGEST
"""A record adds this to the count of its class, so that counts have about as much noise as sums."""
_LEAST_COUNT = 1.0


@dataclass(frozen=True)
class NoisyStatistics:
    """What was released, in units of one record. All of it is public.

    Attributes
    ----------
    sums : ndarray of shape (n_classes, n_directions)
    counts : ndarray of shape (n_classes,)
    noise : float
        Standard deviation of the noise on each number of `sums`, and on each of `counts` too.
    """

    sums: Rows = field(repr=False)
    counts: Rows = field(repr=False)
    noise: float


@dataclass(frozen=True)
class LinearScores:
    """Scores of classes that are linear in an image.

    Attributes
    ----------
    weights : ndarray of shape (n_classes, n_directions)
    biases : ndarray of shape (n_classes,)
    """

    weights: Rows = field(repr=False)
    biases: Rows = field(repr=False)


def fit_discriminant(found: NoisyStatistics, public: Rows, shrinkage: float) -> LinearScores:
    """Return the linear discriminant of noisy means with the covariance of public images."""
    counts = np.maximum(found.counts, max(_LEAST_COUNT, found.noise))
    means = found.sums / counts[:, None]
    d = means.shape[1]
    covariance = np.cov(public.T).reshape(d, d) if len(public) else np.eye(d) / d
    covariance = covariance + shrinkage * np.trace(covariance) * np.eye(d)
    weights = np.linalg.solve(covariance, means.T).T
    return LinearScores(weights, -0.5 * np.einsum("cd,cd->c", weights, means))
