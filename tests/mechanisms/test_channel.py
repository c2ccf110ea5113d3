"""Theorem 1 of docs/theory/covers.md: the odds of a channel are integers, and never above e^epsilon."""

from collections import Counter
from decimal import ROUND_UP, localcontext
from fractions import Fraction
from itertools import combinations
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import chisquare

from nearveil.mechanisms.covers.channels import RandomizedResponse, compute_exp
from nearveil.privacy.noise import unsafe_seeded
from studies.baselines.cells import SubsetSelection


class Words:
    """A source that tells given words."""

    sound = False

    def __init__(self, words: list[int]) -> None:
        self._words = np.array(words, dtype=np.uint64)

    def words(self, count: int) -> NDArray[np.uint64]:
        taken, self._words = self._words[:count], self._words[count:]
        return taken


@given(st.floats(1e-6, 40), st.integers(2, 5000), st.data())
def test_odds_never_pass_the_promise(epsilon: float, n_sets: int, data: Any) -> None:
    size = data.draw(st.integers(1, n_sets - 1))
    with mpmath.workprec(300):
        most = mpmath.e ** mpmath.mpf(repr(epsilon))
        for channel in (RandomizedResponse(epsilon, n_sets), SubsetSelection(epsilon, n_sets, size)):
            odds = mpmath.mpf(channel.odds.numerator) / channel.odds.denominator
            assert odds <= most
            if epsilon < 20:
                assert odds >= most * (1 - mpmath.mpf(2) ** -20)  # next to nothing is given away


@given(st.floats(0.01, 20), st.integers(2, 50), st.data())
def test_every_word_names_the_set_that_the_odds_count(epsilon: float, n_sets: int, data: Any) -> None:
    """Count words instead of sampling: the borders between sets lie where `odds` says."""
    good = data.draw(st.integers(0, n_sets - 1))
    channel = RandomizedResponse(epsilon, n_sets)
    miss = channel._miss
    first = 2**64 - (n_sets - 1) * miss
    assert channel.odds == Fraction(first, miss)
    others = [cell for cell in range(n_sets) if cell != good]
    words = [0, first - 1, *(first + k * miss for k in range(n_sets - 1)), 2**64 - 1]
    named = channel.sample(np.full(len(words), good), Words(words))
    assert named.tolist() == [good, good, *others, others[-1]]


@pytest.mark.parametrize(("epsilon", "n_sets"), [(0.5, 2), (2.0, 7)])
def test_randomized_response_has_its_frequencies(epsilon: float, n_sets: int) -> None:
    n = 200_000
    named = RandomizedResponse(epsilon, n_sets).sample(np.full(n, 1), unsafe_seeded(1))
    weights = np.where(np.arange(n_sets) == 1, np.exp(epsilon), 1.0)
    assert chisquare(np.bincount(named, minlength=n_sets), n * weights / weights.sum()).pvalue > 1e-4


@pytest.mark.parametrize(("epsilon", "size"), [(1.0, 1), (1.0, 2), (2.0, 3)])
def test_subsets_have_their_frequencies(epsilon: float, size: int) -> None:
    n, n_sets, good = 200_000, 5, 2
    named = SubsetSelection(epsilon, n_sets, size).sample(np.full(n, good), unsafe_seeded(2))
    assert (np.diff(named, axis=1) > 0).all()
    counts = Counter(map(tuple, named.tolist()))
    subsets = list(combinations(range(n_sets), size))
    weights = np.array([np.exp(epsilon) if good in subset else 1.0 for subset in subsets])
    assert chisquare([counts[subset] for subset in subsets], n * weights / weights.sum()).pvalue > 1e-4


def test_one_cell_is_randomised_response() -> None:
    pair = RandomizedResponse(1.5, 9), SubsetSelection(1.5, 9, 1)
    assert pair[0].hit == pytest.approx(pair[1].hit, abs=1e-15)


def test_equal_keys_are_drawn_anew() -> None:
    channel = SubsetSelection(1.0, 3, 1)
    source = Words([2**64 - 1, 5, 5, 1, 3, 2, 9])  # a miss; keys with a tie; keys without
    assert channel.sample(np.array([0]), source).tolist() == [[1]]


@pytest.mark.parametrize("epsilon", [0, -1, 1e-7, float("nan"), 41, True, "1"])
def test_absurd_epsilons(epsilon: Any) -> None:
    with pytest.raises(ValueError, match="epsilon must"):
        RandomizedResponse(epsilon, 5)


@pytest.mark.parametrize(("n_sets", "size", "words"), [(1, 1, "n_sets"), (5, 0, "size"), (5, 5, "size")])
def test_absurd_sizes(n_sets: int, size: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SubsetSelection(1.0, n_sets, size)
    if words == "n_sets":
        with pytest.raises(ValueError, match=words):
            RandomizedResponse(1.0, n_sets)


@pytest.mark.parametrize("digits", [3, 9, 28])
def test_the_decimal_context_of_an_application_changes_nothing(digits: int) -> None:
    usual = [RandomizedResponse(0.7, 300).odds, SubsetSelection(0.7, 10, 3).odds]
    compute_exp.cache_clear()
    with localcontext(prec=digits, rounding=ROUND_UP):
        assert [RandomizedResponse(0.7, 300).odds, SubsetSelection(0.7, 10, 3).odds] == usual
    compute_exp.cache_clear()


@given(st.floats(1e-6, 1e-3), st.integers(2, 5000))
def test_the_good_set_is_never_the_less_likely_by_more_than_the_promise(epsilon: float, n_sets: int) -> None:
    assert 1 / RandomizedResponse(epsilon, n_sets).odds <= Fraction(epsilon) + 1
    assert 1 / SubsetSelection(epsilon, n_sets, max(1, n_sets // 3)).odds <= Fraction(epsilon) + 1


@pytest.mark.parametrize("good", [-1, 5])
def test_a_good_set_out_of_range_is_refused_before_anything_is_drawn(good: int) -> None:
    for channel in (RandomizedResponse(1.0, 5), SubsetSelection(1.0, 5, 2)):
        with pytest.raises(ValueError, match="one of the 5 sets"):
            channel.sample(np.array([0, good]), Words([]))
