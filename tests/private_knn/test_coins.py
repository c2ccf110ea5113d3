"""The sampler draws what "toss a coin for every record, then search" would draw."""

import itertools
from collections import Counter, defaultdict

import numpy as np
import pytest
from dp_accounting import PoissonSampledDpEvent
from numpy.typing import NDArray
from scipy.stats import chisquare

from nearveil.privacy.events import VoteHistogram
from nearveil.privacy.noise import unsafe_seeded
from nearveil.private_knn.neighbors import NO_VOTER, NeighborSearch, draw_voters
from nearveil.private_knn.plan import PoissonSample

RATE, K, N = 0.4, 2, 6
LEAST_P = 1e-6  # a right sampler fails one run in a million; seeds are fixed


def voters_by_brute_force() -> dict[tuple[int, ...], float]:
    """Toss all coins of the records 0, 1, ..., N - 1, which stand in the order of their distance; then search."""
    found: dict[tuple[int, ...], float] = defaultdict(float)
    for coins in itertools.product((0, 1), repeat=N):
        kept = tuple(np.flatnonzero(coins)[:K])
        found[(*kept, *[NO_VOTER] * (K - len(kept)))] += RATE ** sum(coins) * (1 - RATE) ** (N - sum(coins))
    return dict(found)


def rows_in_order(n: int) -> NDArray[np.float64]:
    angles = np.linspace(0, 1, n)
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def test_drawn_voters_have_the_distribution_of_sample_then_search() -> None:
    queries = np.tile([[1.0, 0.0]], (20_000, 1))
    search, sample = NeighborSearch(rows_in_order(N)), PoissonSample(RATE)
    drawn: Counter[tuple[int, ...]] = Counter()
    pairs: Counter[tuple[int, ...]] = Counter()
    for first, second in draw_voters(search, queries, sample, K, unsafe_seeded(1), draws=2):
        drawn.update(map(tuple, first.tolist()))
        pairs.update(zip(first[:, 0].tolist(), second[:, 0].tolist(), strict=True))
    expected = voters_by_brute_force()
    assert set(drawn) <= set(expected)
    outcomes = sorted(expected)
    assert chisquare([drawn[o] for o in outcomes], [20_000 * expected[o] for o in outcomes]).pvalue > LEAST_P
    # Screening and vote have coins of their own: the nearest voters of both are independent.
    nearest = {o: RATE * (1 - RATE) ** o for o in range(N)} | {NO_VOTER: (1 - RATE) ** N}
    joint = list(itertools.product(nearest, repeat=2))
    wanted = [20_000 * nearest[a] * nearest[b] for a, b in joint]
    assert chisquare([pairs[pair] for pair in joint], wanted).pvalue > LEAST_P


@pytest.mark.parametrize("rate", [0.7, 0.15, 0.0005])
def test_gaps_are_geometric_also_beyond_the_table(rate: float) -> None:
    ranks = PoissonSample(rate).ranks(20_000, 3, unsafe_seeded(2))
    gaps = np.diff(ranks, axis=1, prepend=-1).ravel()
    assert gaps.min() >= 1
    edges = np.unique(np.ceil(np.log1p(-np.linspace(0, 0.98, 30)) / np.log1p(-rate)).astype(int))
    observed = np.histogram(gaps, bins=[*(edges + 1), np.inf])[0]
    tails = np.append((1 - rate) ** edges.astype(float), 0.0)
    assert chisquare(observed, -np.diff(tails) * len(gaps)).pvalue > LEAST_P


@pytest.mark.parametrize(
    ("k", "rate", "length"), [(300, 0.15, 2851), (300, 0.05, 8699), (300, 0.25, 1680), (800, 0.05, 20199)]
)
def test_list_lengths_are_the_least_that_suffice(k: int, rate: float, length: int) -> None:
    assert PoissonSample(rate).list_length(k) == length


def test_a_list_that_runs_out_is_lengthened_and_its_coins_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.random.default_rng(0).standard_normal((200, 5))
    search, sample, queries = NeighborSearch(rows), PoissonSample(0.3), rows[:40] + 0.1

    def all_voters() -> NDArray[np.int32]:
        return np.vstack([one for (one,) in draw_voters(search, queries, sample, 20, unsafe_seeded(3), draws=1)])

    long_enough = all_voters()
    monkeypatch.setattr(PoissonSample, "list_length", lambda *_: 25)  # far too short: 20 of 25 are hardly ever kept
    np.testing.assert_array_equal(all_voters(), long_enough)


def test_fewer_vote_only_at_the_true_end() -> None:
    rows = rows_in_order(10)
    (voters,), *_ = draw_voters(
        NeighborSearch(rows), rows[:1].repeat(500, axis=0), PoissonSample(0.5), 8, unsafe_seeded(4), draws=1
    )
    there = np.maximum((voters != NO_VOTER).sum(axis=1), 2)  # of 10, with probability 1/2 each: binomial, cut at 8
    observed = np.bincount(there, minlength=9)[2:]
    assert chisquare(observed, 500 * np.array([56, 120, 210, 252, 210, 120, 56]) / 1024).pvalue > LEAST_P


def test_everybody_votes_without_sampling() -> None:
    sample = PoissonSample(1.0)
    assert sample.event(VoteHistogram(3.0)) == VoteHistogram(3.0)
    assert sample.list_length(7) == 7
    rows = rows_in_order(5)
    ((first, second),) = draw_voters(NeighborSearch(rows), rows[:1], sample, 7, unsafe_seeded(0), draws=2)
    np.testing.assert_array_equal(first, [[0, 1, 2, 3, 4]])
    np.testing.assert_array_equal(first, second)


def test_sampler_and_event_have_one_rate() -> None:
    assert PoissonSample(0.2).event(VoteHistogram(3.0)) == PoissonSampledDpEvent(0.2, VoteHistogram(3.0))


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.1, float("nan"), 1e-9])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="sampling_rate"):
        PoissonSample(rate)
