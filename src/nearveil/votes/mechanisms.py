"""What is released about votes: samples of the records, a screening's yes or no, noisy counts. Each knows its event."""

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache

import numpy as np
from dp_accounting import DpEvent, PoissonSampledDpEvent
from numpy.typing import NDArray
from scipy.special import ndtr
from scipy.stats import binom

from nearveil.privacy.checks import check_positive, check_rate
from nearveil.privacy.events import LaplaceNoisyMax, NoisyScreening
from nearveil.privacy.noise import GaussianNoise, LaplaceNoise, Source, add_noise
from nearveil.privacy.noise.samplers import Table, alias_table, look_up

_BITS = 320  # of weights while a table is made
_REACH = 4095  # a longer gap starts anew behind the table: coins have no memory
_LEAST_RATE = 2.0**-20
_DELTA_PER_GAP = 2.0**-100  # tables are within 2^-240 of the truth, and epsilon is at most 64


@dataclass(frozen=True)
class PoissonSample:
    """Keep every record with probability `rate`, independently: the sampler and its accounting event in one."""

    rate: float  # from 2^-20 to 1. At 1 all records are kept, no coin is tossed and nothing is amplified

    def __post_init__(self) -> None:
        """Refuse a rate that is none."""
        if check_rate(self.rate) < _LEAST_RATE:
            raise ValueError(f"sampling_rate must be at least {_LEAST_RATE:.1e}")

    def event(self, mechanism: DpEvent) -> DpEvent:
        """Return what happens when a mechanism runs on one fresh sample."""
        return mechanism if self.rate == 1 else PoissonSampledDpEvent(self.rate, mechanism)

    def extra_delta(self, n_neighbors: int) -> float:
        """Return what the finite table adds to delta for one sample."""
        return 0.0 if self.rate == 1 else (n_neighbors + 1) * _DELTA_PER_GAP

    def ranks(self, n_queries: int, n_neighbors: int, source: Source) -> NDArray[np.int64]:
        """Draw, for each query afresh, the first `n_neighbors` ranks that its sample keeps; 0 is the nearest's."""
        if self.rate == 1:
            return np.broadcast_to(np.arange(n_neighbors), (n_queries, n_neighbors))
        table, count = _gaps(self.rate), n_queries * n_neighbors
        gaps = look_up(table, source.words(count), source)
        longer = np.flatnonzero(gaps == _REACH)
        while len(longer):
            more = look_up(table, source.words(len(longer)), source)
            gaps[longer] += more
            longer = longer[more == _REACH]
        return np.cumsum(gaps.reshape(n_queries, n_neighbors) + 1, axis=1) - 1

    def list_length(self, n_neighbors: int, failure: float = 1e-12) -> int:
        """Return how many neighbours to list, so that the sample wants more with a probability below `failure`.

        `failure`: No part of the guarantee: a list that runs out is lengthened, and its coins are kept.
        """
        if self.rate == 1:
            return n_neighbors
        log_odds = -math.log(failure)
        # Chernoff's bound is long enough; the exact length lies below it.
        low, high = (
            n_neighbors - 1,
            math.ceil((n_neighbors + log_odds + math.sqrt(log_odds**2 + 2 * n_neighbors * log_odds)) / self.rate),
        )
        while high - low > 1:
            middle = (low + high) // 2
            short = binom.cdf(n_neighbors - 1, middle, self.rate) >= failure
            low, high = (middle, high) if short else (low, middle)
        return high


@lru_cache(maxsize=16)
def _gaps(rate: float) -> Table:
    """Return the table of how many records are left out before the next that is kept; the last cell means "more"."""
    keep = int(Fraction(rate) * (1 << _BITS))  # whole: a rate from 2^-20 has no bit below 2^-72
    leave, weight = (1 << _BITS) - keep, keep
    weights, rest = [], 1 << _BITS
    for _ in range(_REACH):
        weights.append(weight)
        weight = weight * leave >> _BITS
        rest = rest * leave >> _BITS
    return alias_table([*weights, rest])


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
        """Return what finite precision adds to the delta of a guarantee of `epsilon`, for one screening."""
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
        """Add noise to sums, which are in units, all at once."""
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
