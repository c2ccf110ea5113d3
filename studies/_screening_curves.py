"""What the figures of the Private-kNN supplement show, computed: every max-vote from 0 to k, at every order."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from dp_accounting import rdp as dp_rdp
from numpy.typing import NDArray

from nearveil.privacy._accounting_screening import _log_pairs, binary_rdp
from nearveil.privacy.accounting import fixed_pair_epsilon, screening_curve, screening_rdp
from nearveil.privacy.events import NoisyScreening

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SCREENING = NoisyScreening(noise=85.0, threshold=210.0, n_neighbors=300)
SAMPLING_RATE = 0.25
DELTA = 1e-5
FIXED_VOTES = (210, 221, 300, 113, 30)  # T, the worst at order 20, k, the worst at order 150, k / 10 classes
COST_ORDERS = np.concatenate(
    [np.arange(2.0, 257.0), np.geomspace(260.0, 65536.0, 80)]
)  # few screenings want large orders
COUNTS = tuple(2**i for i in range(14))
_STRIDE = 10  # of the coarse search for the worst fixed pair


@dataclass(frozen=True)
class Surface:
    """Figure 1: the Renyi divergence of one screening for every order and max-vote."""

    orders: Floats
    votes: Ints
    rdp: Floats
    worst_rdp: Floats
    least_worst: Ints
    most_worst: Ints


@dataclass(frozen=True)
class WorstCases:
    """Figure 2: the divergence at some fixed max-votes, and its true maximum."""

    orders: Floats
    fixed_votes: Ints
    fixed_rdp: Floats
    worst_rdp: Floats
    worst_pairs: Ints
    noise: float


@dataclass(frozen=True)
class Costs:
    """Figure 3: epsilon over the number of screenings."""

    counts: Ints
    fixed_votes: Ints
    fixed: Floats
    classic: Floats
    tight: Floats
    bellman: Floats
    lower: Floats
    lower_pairs: Ints


def rdp_by_votes(orders: Floats, screening: NoisyScreening, *, sampling_rate: float = 1.0) -> Floats:
    """Return the Renyi divergence of one screening from a neighbour's, the worst for a given max-vote.

    Both neighbours, one vote more and one less, and both directions are tried.
    """
    base, moved, votes = _log_pairs(screening, sampling_rate, 0)
    out = np.zeros((len(orders), screening.n_neighbors + 1))
    for row, order in zip(out, orders, strict=True):
        both = np.maximum(binary_rdp(float(order), base, moved), binary_rdp(float(order), moved, base))
        np.maximum.at(row, votes[:, 0], both)
    return out


def surface(orders: Floats | None = None, screening: NoisyScreening = SCREENING) -> Surface:
    """Return figure 1."""
    orders = np.arange(1.5, 50.5, 0.5) if orders is None else orders
    worst = [screening_rdp(float(order), screening) for order in orders]
    return Surface(
        orders=orders,
        votes=np.arange(screening.n_neighbors + 1),
        rdp=rdp_by_votes(orders, screening),
        worst_rdp=np.array([case.value for case in worst]),
        least_worst=np.array([case.pairs[0] for case in worst]),
        most_worst=np.array([case.pairs[-1] for case in worst]),
    )


def worst_cases(
    orders: Floats | None = None, screening: NoisyScreening = SCREENING, fixed_votes: Sequence[int] = FIXED_VOTES
) -> WorstCases:
    """Return figure 2."""
    whole = surface(np.arange(2.0, 301.0) if orders is None else orders, screening)
    return WorstCases(
        orders=whole.orders,
        fixed_votes=np.array(fixed_votes),
        fixed_rdp=whole.rdp[:, list(fixed_votes)],
        worst_rdp=whole.worst_rdp,
        worst_pairs=whole.most_worst,
        noise=screening.noise,
    )


def screening_costs(
    counts: Sequence[int] = COUNTS,
    screening: NoisyScreening = SCREENING,
    *,
    sampling_rate: float = SAMPLING_RATE,
    delta: float = DELTA,
    fixed_votes: Sequence[int] = FIXED_VOTES,
) -> Costs:
    """Return figure 3."""
    rdp = rdp_by_votes(COST_ORDERS, screening, sampling_rate=sampling_rate)
    worst = rdp.max(axis=1)
    penalty = -np.log(delta) / (COST_ORDERS - 1)
    rows, lowest = [], []
    for count in counts:
        fixed = np.min(count * rdp[:, list(fixed_votes)] + penalty[:, None], axis=0)
        tight = dp_rdp.compute_epsilon(COST_ORDERS, count * worst, delta)[0]
        bellman = screening_curve(count, screening, sampling_rate=sampling_rate).epsilon(delta)
        lowest.append(worst_fixed_pair(count, screening, sampling_rate=sampling_rate, delta=delta))
        rows.append((*fixed, np.min(count * worst + penalty), tight, bellman, lowest[-1][0]))
    table = np.array(rows)
    return Costs(
        counts=np.array(counts),
        fixed_votes=np.array(fixed_votes),
        fixed=table[:, :-4],
        classic=table[:, -4],
        tight=table[:, -3],
        bellman=table[:, -2],
        lower=table[:, -1],
        lower_pairs=np.array([pair for _, pair in lowest]),
    )


def worst_fixed_pair(
    count: int, screening: NoisyScreening, *, sampling_rate: float, delta: float
) -> tuple[float, tuple[int, int]]:
    """Return what the costliest fixed pair costs, and the pair: a search, coarse and then fine.

    Any pair gives a lower bound, so a better one that the search misses only makes the bound weaker.
    """
    directions: tuple[Literal["add", "remove"], ...] = ("add", "remove")

    def best(lower_votes: Sequence[int]) -> tuple[float, tuple[int, int]]:
        return max(
            (
                fixed_pair_epsilon(
                    count, screening, pair, sampling_rate=sampling_rate, delta=delta, direction=direction
                ),
                pair,
            )
            for t in lower_votes
            for pair in ((t, t + 1), (t + 1, t))
            for direction in directions
        )

    last = screening.n_neighbors - 1
    coarse = best([*range(0, last, _STRIDE), last])
    near = min(coarse[1])
    return max(coarse, best(range(max(near - _STRIDE + 1, 0), min(near + _STRIDE, last + 1))))
