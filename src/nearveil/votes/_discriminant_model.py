"""From noisy sums to a linear discriminant. Nothing here sees a private record."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from nearveil.votes._integers import LONGEST

Rows = NDArray[np.float64]

COUNT_UNIT = LONGEST // 4
"""A record adds this to the count of its class: counts get four times the noise of sums, which they can bear."""
_LEAST_COUNT = 0.3  # of the mean count: no class is taken to be smaller, unless the noise is small enough to tell
_LEAST_SPREAD = 0.05  # of the mean count, squared: the variance of counts is taken to be at least this
_SHARES = (0.02, 0.9)  # bounds on the share of a direction's variance that lies between classes
_MEAN_SHARES = (0.05, 0.8)  # the same, for all directions together
_SHARE_SPREAD = 0.1  # how far the shares of directions lie from their mean
_BETWEEN = 0.7  # of the variance between noisy means is taken from the public covariance
_LEAST_VARIANCE = 0.02  # of the mean variance of a direction
SHRINKAGE = 0.005


@dataclass(frozen=True)
class NoisyStatistics:
    """What was released, in units of one record. All of it is public.

    Attributes
    ----------
    sums : ndarray of shape (n_classes, n_directions)
    counts : ndarray of shape (n_classes,)
    noise : float
        Standard deviation of the noise on each number of `sums`.
    count_noise : float
        The same of `counts`.
    """

    sums: Rows = field(repr=False)
    counts: Rows = field(repr=False)
    noise: float
    count_noise: float


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
    """Return the linear discriminant of noisy sums, by empirical Bayes (docs/theory/private-discriminant.md).

    Parameters
    ----------
    found : NoisyStatistics
    public : ndarray of shape (n_public, n_directions)
        Images of public rows; none where there are no public rows.
    shrinkage : float
        Share of the covariance's trace that is added to its diagonal.

    Returns
    -------
    LinearScores
    """
    centre, variances, axes = _public_moments(public, found.sums.shape[1])
    counts = estimate_counts(found.counts, found.count_noise)
    observed = (found.sums / counts[:, None] - centre) @ axes
    noise = (found.noise / counts[:, None]) ** 2
    between = _shares_between(observed, noise, variances) * variances
    # A mean is drawn with variance `between` and observed with variance `error`: the best guess, and how far off it is.
    error = (variances - between) / counts[:, None] + noise
    means = observed * between / (between + error)
    doubt = (between * error / (between + error)).mean(axis=0)
    covariance = _within(means, counts, variances) + np.diag(doubt)
    covariance += shrinkage * np.trace(covariance) * np.eye(len(covariance))
    weights = np.linalg.solve(covariance, means.T).T
    biases = -0.5 * np.einsum("cd,cd->c", weights, means)
    turned = weights @ axes.T
    return LinearScores(turned, biases - turned @ centre)


def estimate_counts(counts: Rows, noise: float) -> Rows:
    """Return positive counts: noisy ones drawn to their mean, the more the noisier they are."""
    mean = max(float(counts.mean()), 1.0)
    spread = max(float(counts.var()) - noise**2, _LEAST_SPREAD * mean**2)
    drawn = mean + (counts - mean) * spread / (spread + noise**2)
    least: Rows = np.maximum(drawn, max(1.0, min(_LEAST_COUNT * mean, 2 * noise)))
    return least


def _public_moments(public: Rows, size: int) -> tuple[Rows, Rows, Rows]:
    """Return mean, variances and axes of the public images."""
    if not len(public):
        return np.zeros(size), np.full(size, 1 / size), np.eye(size)
    variances, axes = np.linalg.eigh(np.cov(public.T, ddof=0).reshape(size, size))
    return public.mean(axis=0), np.maximum(variances, 1e-9 * variances[-1]), axes


def _shares_between(observed: Rows, noise: Rows, variances: Rows) -> Rows:
    """Return the share of each direction's variance that lies between classes, drawn to the mean share."""
    seen, relative = ((observed**2 - noise).mean(axis=0) / variances), noise.mean() / variances
    weights = (relative + 0.3) ** -2.0
    mean = float(np.clip((seen * weights).sum() / weights.sum(), *_MEAN_SHARES))
    error = 2 / len(observed) * (relative + mean) ** 2
    drawn = (seen * _SHARE_SPREAD**2 + mean * error) / (_SHARE_SPREAD**2 + error)
    clipped: Rows = np.clip(drawn, *_SHARES)
    return clipped


def _within(means: Rows, counts: Rows, variances: Rows) -> Rows:
    """Return the covariance within classes: the public one, less most of that between the means."""
    weights = counts / counts.sum()
    apart = means - weights @ means
    values, vectors = np.linalg.eigh(np.diag(variances) - _BETWEEN * (apart * weights[:, None]).T @ apart)
    within: Rows = (vectors * np.maximum(values, _LEAST_VARIANCE * variances.mean())) @ vectors.T
    return within
