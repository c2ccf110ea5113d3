"""Poisson sampling without drawing the sample: coins for ranks, exact, and the event they are charged as.

Each record is kept by its own coin, and a coin knows nothing of its record's rank. So the ranks that are kept among
the ordered neighbours are sums of independent geometric gaps, and only the kept ones need be looked up
(``docs/theory/private-knn.md``; attacked by ``tests/votes/test_coins.py``).
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
from dp_accounting import DpEvent, PoissonSampledDpEvent
from numpy.typing import NDArray
from scipy.stats import binom

from nearveil.privacy.checks import check_rate
from nearveil.privacy.noise import Source
from nearveil.privacy.noise.samplers import Table, alias_table, look_up

_BITS = 320  # of weights while a table is made
_REACH = 4095  # a longer gap starts anew behind the table: coins have no memory
_LEAST_RATE = 2.0**-20
_DELTA_PER_GAP = 2.0**-100  # tables are within 2^-240 of the truth, and epsilon is at most 64


@dataclass(frozen=True)
class PoissonSample:
    """Keep every record with probability `rate`, independently: the sampler and its accounting event in one.

    Examples
    --------
    >>> from nearveil.privacy.events import VoteHistogram
    >>> from nearveil.privacy.noise import unsafe_seeded
    >>> sample = PoissonSample(0.15)
    >>> sample.event(VoteHistogram(25.0)).sampling_probability
    0.15
    >>> ranks = sample.ranks(1000, 300, unsafe_seeded(0))  # of the 300 nearest that are kept, for 1,000 queries
    >>> ranks.shape, int(ranks[:, -1].mean())
    ((1000, 300), 2003)
    >>> sample.list_length(300)
    2851
    """

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
        """Draw, for each query afresh, which ranks its sample keeps, up to `n_neighbors` of them.

        Returns: Rising in each row, from rank 0, the nearest. A rank beyond the last record is no record.
        """
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

        `failure`: No part of the promise: a list that runs out is lengthened, and its coins are kept.
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
