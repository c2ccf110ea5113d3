"""What is released about the votes: a screening's yes or no, and noisy counts. Each knows its sampler and its event."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from dp_accounting import DpEvent
from numpy.typing import NDArray
from scipy.special import ndtr

from nearveil.privacy.checks import check_positive
from nearveil.privacy.events import LaplaceNoisyMax, NoisyScreening
from nearveil.privacy.noise import GaussianNoise, LaplaceNoise, Source, add_noise
from nearveil.votes._coins import PoissonSample

UNIT = 2.0**-20
"""What a vote that is not whole is rounded to, towards zero, so that sums of votes are exact."""

_TOSS = 2.0**-51  # total variation between a toss and the coin that the accountant composes, generously
_DELTA_PER_VALUE = 2.0**-100  # as nearveil.privacy.noise states for its tables
_FINEST = 2.0**-16  # the noise's grid, as a share of its scale
_ROUNDING_VARIANCE = 7  # in grid steps squared: what rounding takes of Gaussian noise (docs/theory/noise.md, Theorem 3)


@dataclass(frozen=True)
class Screening:
    """Say whether the votes of a fresh sample agree: max-vote + N(0, noise^2) >= threshold.

    The answer is a coin whose probability depends on the max-vote alone, so that coin is tossed: there is no noise
    whose low bits could tell more. Probabilities are those that the accountant composes, to the last bit of a double
    (``docs/theory/private-knn.md``; attacked by ``tests/votes/test_mechanisms.py``).

    `whole`: Whether a vote is 0 or 1. If not, max-votes are any numbers and the event is the Gaussian mechanism's.
    """

    sample: PoissonSample
    noise: float  # standard deviation
    threshold: float
    n_neighbors: int  # the largest max-vote
    whole: bool = True

    @cached_property
    def event(self) -> DpEvent:
        """What one screening is charged as."""
        screening = NoisyScreening(self.noise, self.threshold, self.n_neighbors)
        return self.sample.event(screening if self.whole else screening.gaussian)

    def extra_delta(self, epsilon: float) -> float:
        """Return what finite precision adds to the delta of a promise of `epsilon`, for one screening."""
        return (1 + math.exp(min(max(epsilon, 3.0), 64.0))) * _TOSS + self.sample.extra_delta(self.n_neighbors)

    def toss(self, max_votes: NDArray[np.float64], source: Source) -> NDArray[np.bool_]:
        """Return who passes."""
        score = (max_votes - self.threshold) / self.noise
        # The rarer outcome's probability has all its digits; 2^64 times it is a whole number of words, rounded down.
        rare = np.ldexp(ndtr(-np.abs(score)), 64).astype(np.uint64)
        return np.asarray((source.words(len(score)) < rare) == (score < 0))


@dataclass(frozen=True)
class NoisySums:
    """Release sums over the voters of a fresh sample with noise on each."""

    sample: PoissonSample
    mechanism: DpEvent  # the event of one release, without the sampling; it knows the sensitivity
    noise: float  # standard deviation of Gaussian noise, or the scale of Laplace noise
    n_neighbors: int
    unit: float = 1.0  # sums are whole multiples of it; a power of two

    @cached_property
    def event(self) -> DpEvent:
        """What one release is charged as."""
        return self.sample.event(self.mechanism)

    def extra_delta(self, size: int) -> float:
        """Return what finite tables add to delta for one release of `size` sums."""
        return size * _DELTA_PER_VALUE + self.sample.extra_delta(self.n_neighbors)

    def check(self) -> None:
        """Raise where noise of this scale cannot be sampled."""
        try:
            self._noise(1)
        except (ValueError, OverflowError):
            raise ValueError("vote_noise cannot be sampled: it must lie between 1e-250 and 1e12") from None

    def release(self, sums: NDArray[np.int64], source: Source) -> NDArray[np.float64]:
        """Add noise to sums, all at once.

        `sums`: In units.
        """
        if sums.size == 0:
            return np.zeros(sums.shape)
        return add_noise(sums * self.unit, self._noise(sums.size), source=source)

    def _noise(self, size: int) -> GaussianNoise | LaplaceNoise:
        # Sums lie on the grid, so rounding moves nothing; only what it takes of Gaussian noise is made up for.
        grid = min(self.unit, math.ldexp(1.0, math.floor(math.log2(check_positive(self.noise, "noise") * _FINEST))))
        if isinstance(self.mechanism, LaplaceNoisyMax):
            return LaplaceNoise(sensitivity=self.unit, scale=self.noise, size=size, grid=grid)
        scale = math.hypot(self.noise, math.sqrt(_ROUNDING_VARIANCE) * grid) * (1 + 2.0**-45)
        noise = GaussianNoise(sensitivity=self.unit, scale=scale, size=size, grid=grid)
        assert noise.effective_scale >= self.noise
        return noise
