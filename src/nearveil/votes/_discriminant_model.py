"""From noisy sums to a linear discriminant. Nothing here sees a private record."""

import math
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax

from nearveil.votes.neighbors import LONGEST

Rows = NDArray[np.float64]

COUNT_UNIT = LONGEST // 4
"""A record adds this to the count of its class: counts get four times the noise of sums, which they can bear."""
SENSITIVITY = math.hypot(LONGEST, COUNT_UNIT) * (1 + 2.0**-50)
"""How far one record more or less moves all sums and counts together, in the L2 norm."""
_LEAST_COUNT = 0.3  # of the mean count: no class is taken to be smaller, unless the noise is small enough to tell
_LEAST_SPREAD = 0.05  # of the mean count, squared: the variance of counts is taken to be at least this
_SHARES = (0.02, 0.9)  # bounds on the share of a direction's variance that lies between classes
_MEAN_SHARES = (0.05, 0.8)  # the same, for all directions together
_SHARE_SPREAD = 0.1  # how far the shares of directions lie from their mean
_BETWEEN = 0.7  # of the variance between noisy means is taken from the public covariance
_LEAST_VARIANCE = 0.02  # of the mean variance of a direction
SHRINKAGE = 0.005
_SIMULATED = 2000  # images that a temperature is found by
_LEAST_TEMPERATURE, _MOST_TEMPERATURE = 1.2, 20.0


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
class PublicMoments:
    """Mean, variances and axes of public images. The axes are columns."""

    centre: Rows = field(repr=False)
    variances: Rows = field(repr=False)
    axes: Rows = field(repr=False)

    @classmethod
    def measure(cls, images: Rows) -> Self:
        """Return those of images, shape (n_public, n_directions); where there are none, of rows of norm one."""
        size = images.shape[1]
        if not len(images):
            return cls(np.zeros(size), np.full(size, 1 / size), np.eye(size))
        variances, axes = np.linalg.eigh(np.cov(images.T, ddof=0).reshape(size, size))
        return cls(images.mean(axis=0), np.maximum(variances, 1e-9 * variances[-1]), axes)


@dataclass(frozen=True)
class ClassMeans:
    """What noisy sums and public images tell of the means of classes, in the axes of the public covariance.

    Attributes
    ----------
    public : PublicMoments
    between : ndarray of shape (n_directions,)
        Variances of the means of classes.
    counts : ndarray of shape (n_classes,)
        Positive.
    means, doubts : ndarray of shape (n_classes, n_directions)
        The best guess of each mean, and the variance that remains.
    """

    public: PublicMoments
    between: Rows = field(repr=False)
    counts: Rows = field(repr=False)
    means: Rows = field(repr=False)
    doubts: Rows = field(repr=False)


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

    def of(self, images: Rows) -> Rows:
        """Return the score of each class, shape (n, n_classes)."""
        scores: Rows = images @ self.weights.T + self.biases
        return scores


def estimate_means(found: NoisyStatistics, public: PublicMoments) -> ClassMeans:
    """Return the means of classes by empirical Bayes (docs/theory/private-discriminant.md).

    Parameters
    ----------
    found : NoisyStatistics
    public : PublicMoments

    Returns
    -------
    ClassMeans
    """
    counts, variances = estimate_counts(found.counts, found.count_noise), public.variances
    observed = (found.sums / counts[:, None] - public.centre) @ public.axes
    noise = (found.noise / counts[:, None]) ** 2
    between = _shares_between(observed, noise, variances, counts) * variances
    # A mean is drawn with variance `between` and observed with variance `error`: the best guess, and how far off it is.
    error = (variances - between) / counts[:, None] + noise
    kept = between / (between + error)
    return ClassMeans(public, between, counts, observed * kept, error * kept)


def fit_discriminant(found: ClassMeans, shrinkage: float) -> LinearScores:
    """Return the linear discriminant.

    Parameters
    ----------
    found : ClassMeans
    shrinkage : float
        Share of the covariance's trace that is added to its diagonal.

    Returns
    -------
    LinearScores
    """
    covariance = _within(found) + np.diag(found.doubts.mean(axis=0))
    covariance += shrinkage * np.trace(covariance) * np.eye(len(covariance))
    weights = np.linalg.solve(covariance, found.means.T).T
    biases = -0.5 * np.einsum("cd,cd->c", weights, found.means)
    turned = weights @ found.public.axes.T
    return LinearScores(turned, biases - turned @ found.public.centre)


def calibrate(scores: LinearScores, found: ClassMeans, images: Rows) -> LinearScores:
    """Return scores divided by a temperature, so that probabilities are as sure as they may be.

    The order of classes stays. Images are simulated: a class's mean within its doubt, plus a public image's deviation
    from the public mean, less what lies between classes. The temperature is the one that makes their classes most
    likely, and at least `_LEAST_TEMPERATURE`. Everything here is public, so the simulation has a fixed seed.
    """
    temperature = _LEAST_TEMPERATURE
    if len(images):
        simulated, codes = _simulate(found, images)
        known, rows = scores.of(simulated), np.arange(len(codes))

        def surprise(logarithm: float) -> float:
            return -float(log_softmax(known * np.exp(-logarithm), axis=1)[rows, codes].mean())

        bounds = np.log([_LEAST_TEMPERATURE, _MOST_TEMPERATURE])
        temperature = float(np.exp(minimize_scalar(surprise, bounds=bounds, method="bounded").x))
    return LinearScores(scores.weights / temperature, scores.biases / temperature)


def _simulate(found: ClassMeans, images: Rows) -> tuple[Rows, NDArray[np.int64]]:
    """Return images of each class as they might be, and their classes."""
    rng, public = np.random.default_rng(0), found.public
    codes = np.arange(max(_SIMULATED, len(found.means))) % len(found.means)
    apart = (images[rng.integers(0, len(images), len(codes))] - public.centre) @ public.axes
    moved = found.means[codes] + np.sqrt(found.doubts[codes]) * rng.standard_normal(apart.shape)
    simulated = moved + apart * np.sqrt(1 - found.between / public.variances)
    return public.centre + simulated @ public.axes.T, codes


def estimate_counts(counts: Rows, noise: float) -> Rows:
    """Return positive counts: noisy ones drawn to their mean, the more the noisier they are."""
    mean = max(float(counts.mean()), 1.0)
    spread = max(float(counts.var()) - noise**2, _LEAST_SPREAD * mean**2)
    drawn = mean + (counts - mean) * spread / (spread + noise**2)
    least: Rows = np.maximum(drawn, max(1.0, min(_LEAST_COUNT * mean, 2 * noise)))
    return least


def _shares_between(observed: Rows, noise: Rows, variances: Rows, counts: Rows) -> Rows:
    """Return the share of each direction's variance that lies between classes, drawn to the mean share."""
    sampling = float((1 / counts).mean())  # of the variance within classes, in the mean of a class's records
    seen = ((observed**2 - noise).mean(axis=0) / variances - sampling) / max(1 - sampling, _LEAST_VARIANCE)
    relative = noise.mean() / variances + sampling
    weights = (relative + 0.3) ** -2.0
    mean = float(np.clip((seen * weights).sum() / weights.sum(), *_MEAN_SHARES))
    error = 2 / len(observed) * (relative + mean) ** 2
    drawn = (seen * _SHARE_SPREAD**2 + mean * error) / (_SHARE_SPREAD**2 + error)
    clipped: Rows = np.clip(drawn, *_SHARES)
    return clipped


def _within(found: ClassMeans) -> Rows:
    """Return the covariance within classes: the public one, less most of that between the means."""
    weights, variances = found.counts / found.counts.sum(), found.public.variances
    apart = found.means - weights @ found.means
    values, vectors = np.linalg.eigh(np.diag(variances) - _BETWEEN * (apart * weights[:, None]).T @ apart)
    within: Rows = (vectors * np.maximum(values, _LEAST_VARIANCE * variances.mean())) @ vectors.T
    return within
