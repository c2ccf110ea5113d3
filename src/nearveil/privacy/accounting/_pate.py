"""PATE's noisy max, with and without a look at the votes, and the asymptotic theorem of Private-kNN."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import erfc

from nearveil.privacy._checks import check_count, check_delta, check_order, check_positive, check_rate


@dataclass(frozen=True)
class DataDependentCost:
    """A Renyi divergence that was computed from the private votes themselves.

    Attributes
    ----------
    rdp : float
        Bounds the divergence of this database from its neighbours, not that of every pair of neighbours.
    private : bool
        True where the votes entered: the value tells something about them. It must not be published as it is, nor
        amplified by sampling (other samples have other votes).
    """

    rdp: float
    private: bool


@dataclass(frozen=True)
class AsymptoticCost:
    """An epsilon of the supplement's Theorem 2, for comparison.

    Attributes
    ----------
    epsilon : float
    applies : bool
        Whether the theorem's assumptions hold; without them the value says nothing.
    """

    epsilon: float
    applies: bool


def gaussian_max_rdp(order: float, *, noise: float, votes: ArrayLike | None = None) -> DataDependentCost:
    """Return the Renyi divergence of one GNMax answer (Papernot et al. 2018, Theorem 6, Propositions 7 and 10).

    Parameters
    ----------
    order : float
    noise : float
        Standard deviation on each count.
    votes : array-like of shape (n_classes,), optional
        Without them the divergence is ``order / noise^2`` for any database.

    Returns
    -------
    DataDependentCost

    Examples
    --------
    >>> gaussian_max_rdp(10, noise=40.0).rdp
    0.00625
    >>> cost = gaussian_max_rdp(10, noise=40.0, votes=[230, 10, 10])
    >>> cost.rdp < 1e-4, cost.private
    (True, True)
    """
    order, noise = check_order(order), check_positive(noise, "noise")
    anyway = order / noise**2
    if votes is None:
        return DataDependentCost(anyway, private=False)
    q = float(np.sum(erfc(_margins(votes) / (2 * noise)))) / 2
    return DataDependentCost(min(anyway, _theorem_6(order, noise, q)), private=True)


def _theorem_6(order: float, noise: float, q: float) -> float:
    """Return Theorem 6 of Papernot et al. with the orders of Proposition 10; infinity where it does not apply."""
    if q <= 0:  # underflow: the smallest number is still an upper bound on the probability
        q = 5e-324
    if q >= 1:
        return math.inf
    second = noise * math.sqrt(-math.log(q))
    first = second + 1
    if second <= 1 or order > first:
        return math.inf
    cost_1, cost_2 = first / noise**2, second / noise**2
    limit = (second - 1) * cost_2 - second * math.log(first / (first - 1) * second / (second - 1))
    if math.log(q) > limit or math.log(q) + cost_2 >= 0:
        return math.inf
    log_a = math.log1p(-q) - math.log1p(-math.exp((math.log(q) + cost_2) * (second - 1) / second))
    log_b = cost_1 - math.log(q) / (first - 1)
    total = np.logaddexp(math.log1p(-q) + (order - 1) * log_a, math.log(q) + (order - 1) * log_b)
    return max(float(total), 0.0) / (order - 1)


def laplace_max_rdp(order: float, *, noise: float, votes: ArrayLike | None = None) -> DataDependentCost:
    """Return the Renyi divergence of one LNMax answer (Papernot et al. 2017, Theorems 2 and 3, Lemma 4).

    Parameters
    ----------
    order : float
    noise : float
        Scale of the Laplace noise, ``1 / gamma`` in the paper.
    votes : array-like of shape (n_classes,), optional
        Without them the divergence is that of two Laplace mechanisms, for any database.

    Returns
    -------
    DataDependentCost

    Examples
    --------
    >>> f"{laplace_max_rdp(10, noise=20.0).rdp:.4f}"
    '0.0237'
    >>> cost = laplace_max_rdp(10, noise=20.0, votes=[230, 10, 10])
    >>> cost.rdp < 1e-3, cost.private
    (True, True)
    """
    order, noise = check_order(order), check_positive(noise, "noise")
    anyway = 2 * _laplace_rdp(order, noise)
    if votes is None:
        return DataDependentCost(anyway, private=False)
    margins, epsilon = _margins(votes) / noise, 2 / noise
    q = float(np.sum((2 + margins) / 4 * np.exp(-margins)))
    if q >= 1 / (math.exp(min(epsilon, 700.0)) + 1):  # the theorem does not apply
        return DataDependentCost(anyway, private=True)
    moments = order - 1
    usual = math.log1p(-q) + moments * (math.log1p(-q) - math.log1p(-math.exp(epsilon) * q))
    unusual = (math.log(q) if q > 0 else -745.0) + epsilon * moments
    return DataDependentCost(min(anyway, max(float(np.logaddexp(usual, unusual)), 0.0) / moments), private=True)


def _laplace_rdp(order: float, noise: float) -> float:
    """Return the Renyi divergence of the Laplace mechanism of sensitivity 1 (Mironov 2017, Proposition 6)."""
    step = 1 / noise
    # expm1 of both exponentials: their weights sum to 1, so that 1 may be taken out.
    first = order / (2 * order - 1)
    with np.errstate(over="ignore"):
        excess = first * np.expm1((order - 1) * step) + (1 - first) * np.expm1(-order * step)
    if np.isinf(excess):
        return math.log(first) / (order - 1) + step
    return float(np.log1p(excess)) / (order - 1)


def _margins(votes: ArrayLike) -> NDArray[np.float64]:
    """Return by how much the winner leads each other class."""
    counts = np.asarray(votes, dtype=np.float64)
    if counts.ndim != 1 or len(counts) < 2:
        raise ValueError("votes must hold one count for each of at least two classes")
    if not np.all(np.isfinite(counts)) or np.any(counts < 0):
        raise ValueError("votes must be finite and not negative")
    return np.asarray(np.max(counts) - np.delete(counts, np.argmax(counts)))


def private_knn_asymptotic(
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

    Parameters
    ----------
    n_screened, n_answered : int
    sampling_rate : float
    noise, vote_noise : float
        Standard deviations of the screening's noise and the votes'.
    delta : float
    as_published : bool, default=False
        Use the printed constant 20. The proof gives ``4 sqrt(12) = 13.86``.

    Returns
    -------
    AsymptoticCost
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
