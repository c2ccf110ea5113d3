"""Bounds on the cost of screenings, for comparison with the accountants."""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtr
from scipy.stats import binom

from nearveil.privacy.checks import MAX_EPSILON, check_choice, check_count, check_delta, check_positive, check_rate
from nearveil.privacy.events import NoisyScreening

Direction = Literal["add", "remove"]


def compute_fixed_pair_epsilon(
    n: int,
    screening: NoisyScreening,
    pair: tuple[int, int],
    *,
    sampling_rate: float,
    delta: float,
    direction: Direction,
) -> float:
    """Return the exact epsilon of `n` screenings of one pair of max-votes, a lower bound on any accountant.

    The first max-vote is that without the record, the second that with it, where it is sampled.
    """
    n, rate, delta = check_count(n, "n"), check_rate(sampling_rate), check_delta(delta)
    check_choice(direction, "direction", Direction)
    without, sampled = (float(ndtr((t - screening.threshold) / screening.noise)) for t in pair)
    with_record = without + rate * (sampled - without)
    p, q = (without, with_record) if direction == "add" else (with_record, without)
    passes = np.arange(n + 1)
    log_p, log_q = binom.logpmf(passes, n, p), binom.logpmf(passes, n, q)
    log_p, log_q = log_p[log_p > -np.inf], log_q[log_p > -np.inf]

    def surplus(epsilon: float) -> float:
        return float(np.sum(np.exp(log_p) * np.maximum(-np.expm1(np.minimum(epsilon + log_q - log_p, 0)), 0))) - delta

    if surplus(0.0) <= 0:
        return 0.0
    highest = min(float(np.max(log_p - log_q)) + 1e-9, MAX_EPSILON)
    return float(brentq(surplus, 0.0, highest, xtol=1e-13)) if surplus(highest) < 0 else math.inf


@dataclass(frozen=True)
class AsymptoticCost:
    """An epsilon of the supplement's Theorem 2, for comparison."""

    epsilon: float
    applies: bool  # whether the theorem's assumptions hold; without them the value is meaningless


def compute_private_knn_asymptotic(
    n_screened: int,
    n_answered: int,
    *,
    sampling_rate: float,
    noise: float,
    vote_noise: float,
    delta: float,
    as_published: bool = False,
) -> AsymptoticCost:
    """Return Theorem 2 of the Private-kNN supplement, for comparison: 15 to 25 times looser than exact accounting.

    `as_published` takes the printed constant 20; the proof gives ``4 sqrt(12) = 13.86``.
    """
    m, answered = check_count(n_screened, "n_screened"), check_count(n_answered, "n_answered")
    rate, log_delta = check_rate(sampling_rate), -math.log(check_delta(delta))
    s1, s2 = check_positive(noise, "noise"), check_positive(vote_noise, "vote_noise")
    constant = 20.0 if as_published else 4 * math.sqrt(12)
    epsilon = constant * rate * math.sqrt(log_delta) * (math.sqrt(m) / s1 + math.sqrt(answered) / s2)
    room = min(s1, s2) ** 2 * math.log(rate) ** 2 - 2
    applies = (
        rate < 0.1
        and s1 >= math.sqrt(5)
        and s2 >= 2 * math.sqrt(5)
        and room > 0
        and 4 * log_delta * s1**2 / (rate**2 * room) <= m <= s1**2 * log_delta / (3 * rate**2)
        and answered <= s2**2 * log_delta / (6 * rate**2)
    )
    return AsymptoticCost(epsilon, applies)
