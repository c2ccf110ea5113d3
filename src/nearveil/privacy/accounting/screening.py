"""The cost of one noisy screening, and of many together.

With t the max-vote of the sample and Phi the normal distribution function, a screening passes with probability
``Phi((t - threshold) / noise)``. One record, kept by the Poisson sample with probability `sampling_rate`, turns
t into t - 1, t or t + 1. A sample may hold fewer than `n_neighbors` records, so t runs from 0.
The direction "remove" compares the database with the record to the one without it, "add" the other way round.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr, logsumexp, ndtr

from nearveil.privacy.accounting.binary import Moves, PrivacyCurve, compose_binary
from nearveil.privacy.checks import check_count, check_order, check_rate
from nearveil.privacy.events import NoisyScreening


def compute_binary_rdp(order: float, log_p: NDArray[np.float64], log_q: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the Renyi divergence of P from Q, given logarithms of their two probabilities, without cancellation."""
    check_order(order)
    ratio = log_p - log_q
    # sum_o Q(o) (P/Q - 1) = 0, so a multiple of it can be subtracted: the remaining terms are positive.
    near = np.clip(ratio, -1 / order, 1 / order)
    small = np.sum(np.exp(log_q) * (np.expm1(order * near) - order * np.expm1(near)), axis=0)
    large = logsumexp(log_q + order * ratio, axis=0)
    divergence = np.where(np.all(near == ratio, axis=0), np.log1p(small), large)
    return np.asarray(np.maximum(divergence, 0) / (order - 1))


def compute_screening_rdp(order: float, screening: NoisyScreening, sampling_rate: float = 1.0) -> float:
    """Return the Renyi divergence of one screening, the largest over both directions and all max-votes."""
    # Exact: Renyi's divergence is quasi-convex, so the mixture over all samples costs no more than its worst sample
    # (docs/theory/accounting.md, Theorem 3; test_screening.py has it to 12 digits).
    base, moved, _ = log_pairs(screening, sampling_rate)
    values = np.concatenate([compute_binary_rdp(order, base, moved), compute_binary_rdp(order, moved, base)])
    return float(np.max(values))


@lru_cache(maxsize=64)
def screening_curve(n: int, screening: NoisyScreening, *, sampling_rate: float = 1.0) -> PrivacyCurve:
    """Return delta over epsilon for `n` adaptively chosen screenings, each with a fresh Poisson sample.

    An upper bound (``docs/theory/accounting.md``, Theorem 4), attacked by ``test_screening.py``: exact values of all
    strategies for small n, of fixed ones for large n. Its `excess_at` composes with other mechanisms, in any order.

    Examples
    --------
    >>> screening = NoisyScreening(noise=75, threshold=180, n_neighbors=300)
    >>> f"{screening_curve(10, screening, sampling_rate=0.15).epsilon(1e-5):.5f}"
    '0.01346'
    """
    return compose_binary(_make_moves(screening, check_rate(sampling_rate)), check_count(n, "n"))


def log_pairs(
    screening: NoisyScreening, sampling_rate: float
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    """Return log-probabilities of (pass, fail) without the record and with it, each (2, n_pairs), and the votes."""
    rate, votes = check_rate(sampling_rate), np.arange(screening.n_neighbors + 1)
    score = (votes - screening.threshold) / screening.noise
    logs = np.stack([log_ndtr(score), log_ndtr(-score)])
    low, high = np.arange(len(votes) - 1), np.arange(1, len(votes))
    start, end = np.concatenate([low, high]), np.concatenate([high, low])
    base, step = logs[:, start], logs[:, end] - logs[:, start]
    # Two forms of log(1 - rate + rate * exp(step)): the first keeps all digits, the second cannot overflow.
    with np.errstate(divide="ignore", over="ignore"):
        near = np.log1p(rate * np.expm1(np.minimum(step, 1.0)))
        far = np.logaddexp(np.log1p(-rate), np.log(rate) + step)
    moved = base + (step if rate == 1 else np.where(step < 1, near, far))
    return base, moved, np.stack([votes[start], votes[end]], axis=1)


def _make_moves(screening: NoisyScreening, sampling_rate: float) -> Moves:
    score = (np.arange(screening.n_neighbors + 1) - screening.threshold) / screening.noise
    passes, fails = ndtr(score), ndtr(-score)
    # The difference of two probabilities, taken on the side where both are small and have all their digits.
    gap = sampling_rate * np.where(score[1:] < 0, np.diff(passes), -np.diff(fails))
    return Moves(
        rising=np.concatenate([passes[:-1], fails[1:]]),
        falling=np.concatenate([fails[:-1], passes[1:]]),
        gain=np.concatenate([gap, gap]),
    )
