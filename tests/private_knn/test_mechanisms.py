"""A screening is the coin that is charged; noise is at least what is charged."""

import math

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from numpy.typing import NDArray
from scipy.special import ndtr
from scipy.stats import kstest

from nearveil.privacy.events import LaplaceNoisyMax, NoisyScreening, VoteHistogram
from nearveil.privacy.noise import unsafe_seeded
from nearveil.private_knn.plan import UNIT, Ballot, NoisySums, PoissonSample, Screening

ALL = PoissonSample(1.0)


class Words:
    """A source that says what it is told."""

    sound = False

    def __init__(self, words: list[int]) -> None:
        self._words = np.array(words, dtype=np.uint64)

    def words(self, count: int) -> NDArray[np.uint64]:
        return self._words[:count]


@pytest.mark.parametrize("t", [0, 100, 179, 180, 181, 240, 300])
def test_a_toss_passes_with_the_probability_that_is_composed(t: int) -> None:
    screening = Screening(PoissonSample(0.15), 75.0, 180.0, 300)
    probability = float(ndtr((t - 180) / 75))
    # Find by bisection the number of words that pass: it must be the probability, to the last bit of a double.
    passes_low = bool(screening.toss(np.array([float(t)]), Words([0]))[0])
    low, high = 0, 2**64 - 1
    while high - low > 1:
        middle = (low + high) // 2
        same = bool(screening.toss(np.array([float(t)]), Words([middle]))[0]) == passes_low
        low, high = (middle, high) if same else (low, middle)
    found = high / 2**64 if passes_low else 1 - high / 2**64
    assert found == pytest.approx(probability, abs=2.0**-52)


def test_far_votes_are_certain_and_their_tails_are_kept() -> None:
    screening = Screening(ALL, 1.0, 50.0, 100)
    assert not screening.toss(np.zeros(1000), unsafe_seeded(0)).any()
    assert screening.toss(np.full(1000, 100.0), unsafe_seeded(0)).all()
    # Seven deviations below, about 2^-40 of the words pass, not none.
    assert screening.toss(np.array([43.0]), Words([2**20]))[0]


def test_tosses_are_frequent_as_promised() -> None:
    screening = Screening(ALL, 4.0, 10.0, 20)
    votes = np.repeat(np.arange(21.0), 4000)
    passed = screening.toss(votes, unsafe_seeded(5)).reshape(21, 4000).sum(axis=1)
    expected = 4000 * ndtr((np.arange(21) - 10) / 4)
    statistic = np.sum((passed - expected) ** 2 / (expected * (1 - expected / 4000)))
    assert statistic < 70  # chi-square with 21 degrees of freedom passes that once in a million


def test_events() -> None:
    sample = PoissonSample(0.15)
    assert Screening(sample, 75.0, 180.0, 300).event == PoissonSampledDpEvent(0.15, NoisyScreening(75.0, 180.0, 300))
    assert Screening(sample, 75.0, 180.0, 300, whole=False).event == PoissonSampledDpEvent(0.15, GaussianDpEvent(75.0))
    assert NoisySums(ALL, Ballot(VoteHistogram, 4), 3.0, 10).event == VoteHistogram(3.0)


@pytest.mark.parametrize("noise", [0.05, 3.0, 400.0])
@pytest.mark.parametrize("unit", [1.0, UNIT])
def test_gaussian_noise_is_what_is_charged(noise: float, unit: float) -> None:
    votes = NoisySums(ALL, Ballot(VoteHistogram, 5, unit), noise, 10)
    specification = votes._noise(4)
    assert specification.effective_scale >= noise  # type: ignore[union-attr]
    assert specification.scale < noise * (1 + 1e-6)
    released = votes.release(np.full((4000, 5), 7, dtype=np.int64), unsafe_seeded(6)) - 7 * unit
    assert kstest(released.ravel(), "norm", args=(0, noise)).pvalue > 1e-6


def test_laplace_noise_is_what_is_charged() -> None:
    votes = NoisySums(ALL, Ballot(LaplaceNoisyMax, 5), 20.0, 10)
    released = votes.release(np.zeros((4000, 5), dtype=np.int64), unsafe_seeded(7))
    assert kstest(released.ravel(), "laplace", args=(0, 20.0)).pvalue > 1e-6


def test_nothing_is_released_for_no_query() -> None:
    votes = NoisySums(ALL, Ballot(VoteHistogram, 4), 3.0, 10)
    assert votes.release(np.zeros((0, 4), dtype=np.int64), Words([])).shape == (0, 4)


def test_what_samplers_cost_is_stated() -> None:
    screening = Screening(PoissonSample(0.15), 75.0, 180.0, 300)
    assert screening.extra_delta(1.0) == screening.extra_delta(0.1) < 2e-14
    assert screening.extra_delta(10.0) == pytest.approx((1 + math.exp(10)) * 2.0**-51)
    assert NoisySums(PoissonSample(0.15), Ballot(VoteHistogram, 10), 3.0, 300).extra_delta == 311 * 2.0**-100
