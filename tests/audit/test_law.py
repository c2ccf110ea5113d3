"""Stated laws: false ones are found, true ones are called false as seldom as was said, exactly."""

import math
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom

from nearveil.audit import Law
from nearveil.audit._experiment import (
    _SETS,
    LawTest,
    _Counts,
    bound_repeat_chance,
    compute_uniforms,
    hash_rows,
)
from nearveil.audit._scores import Slices

ALPHA = 1e-9


def judged(values: Any, look: Any = compute_uniforms) -> str | None:
    test = LawTest(Law(uniforms=lambda seen, given: [look(seen - given)]))
    test.add("zero", values, 0.0)
    return test.find_misfit(ALPHA)


def normal(count: int = 4_000) -> Any:
    return np.random.default_rng(0).normal(size=count)


def test_true_laws_pass() -> None:
    assert judged(normal()) is None
    assert judged(np.random.default_rng(1).laplace(size=4_000), partial(compute_uniforms, laplace=True)) is None
    assert judged(np.array([])) is None


@pytest.mark.parametrize(
    "values",
    [
        0.8 * normal(),
        1.25 * normal(),
        normal() + 0.2,
        np.clip(normal(), -2, 2),
        np.where(np.arange(4_000) % 200 == 0, 1e-7 * normal(), normal()),  # hardly any noise in one of 200 runs
        np.where(np.arange(4_000) % 100 == 0, 6.0, normal()),
        np.random.default_rng(1).laplace(size=4_000) / math.sqrt(2),
    ],
    ids=["too little", "too much", "moved", "cut off", "almost none at times", "an outlier at times", "other tails"],
)
def test_false_laws_are_found(values: Any) -> None:
    assert judged(values) is not None
    assert judged(values[:20]) is None or len(np.unique(values[:20])) < 20  # and not by a trick


@pytest.mark.parametrize("chance", [0.01, 0.3, 0.999])
@pytest.mark.parametrize("alpha", [0.2, 0.01])
def test_a_true_coin_is_called_false_as_seldom_as_was_said(chance: float, alpha: float) -> None:
    """Over all counts, exactly; and a coin that is off by a fifth is found by enough tosses."""
    runs = 200
    coins = [_Counts(np.array([chance]), runs=runs, hits=k) for k in range(runs + 1)]
    wrong = [coin.hits for coin in coins if coin.find_misfit(alpha) is not None]
    assert binom.pmf(wrong, runs, chance).sum() <= alpha
    off = _Counts(np.array([chance]), runs=10_000, hits=round(10_000 * chance**1.3))
    assert off.find_misfit(alpha) is not None or chance > 0.9


def test_a_true_law_is_called_false_as_seldom_as_was_said() -> None:
    """300 looks at uniform numbers, at an error of a tenth: more than 60 have a probability below 1e-7."""
    generator = np.random.default_rng(2)
    found = 0
    for _ in range(300):
        test = LawTest(Law(uniforms=lambda seen, _: [seen[:, 0], seen[:, 1]]))
        test.add("zero", generator.random((200, 2)), None)
        found += test.find_misfit(0.1) is not None
    assert found <= 60
    assert len(_SETS) + 1 == 93


def test_cells_of_a_grid_are_forgiven_where_they_are_stated() -> None:
    """Noise on a grid of a hundredth of its scale: a small set around the middle holds one cell, or none."""
    coarse = np.rint(normal(40_000) * 100) / 100

    def law(largest: float) -> Law:
        return Law(lambda seen, _: [compute_uniforms(seen[:, 0])], values=lambda seen: seen, largest_value=largest)

    for largest, fits in ((0.004, True), (1e-7, False)):
        test = LawTest(law(largest))
        test.add("zero", coarse[:, None], None)
        assert (test.find_misfit(ALPHA) is None) is fits


def test_repeats_are_as_rare_as_the_bound_says() -> None:
    """Of all ways to draw 6 times from 4 outcomes: no value comes m times more often than the bound allows."""
    chances = np.array([0.4, 0.3, 0.2, 0.1])
    worst = dict.fromkeys((2, 3, 4, 5, 6), 0.0)
    for draws in product(range(4), repeat=6):
        most = max(np.bincount(draws))
        for times in worst:
            worst[times] += float(np.prod(chances[list(draws)])) * (most >= times)
    assert all(worst[times] <= bound_repeat_chance(times, 6, 0.4) + 1e-12 for times in worst)
    assert bound_repeat_chance(6, 6, 0.4) == pytest.approx(0.4**5)
    assert bound_repeat_chance(1, 6, 0.4) == 1.0


def test_an_exact_outcome_in_one_of_2000_runs_repeats() -> None:
    law = Law(values=lambda seen: seen, largest_value=1e-5, largest_row=1e-10)
    values = np.random.default_rng(3).normal(size=(20_000, 2))
    honest, slips = LawTest(law), LawTest(law)
    honest.add("zero", values, None)
    slips.add("zero", np.where(np.arange(20_000)[:, None] % 2000 == 0, 7.0, values), None)
    assert honest.find_repeats(ALPHA) is None
    assert "the same outcome came 10 times in 20,000 runs" in str(slips.find_repeats(ALPHA))
    one = LawTest(law)
    one.add("zero", np.where(np.arange(20_000)[:, None] % 500 == 0, [[7.0, math.nan]], values)[:, :1], None)
    assert "the same" in str(one.find_repeats(ALPHA))


def test_chunks_count_together() -> None:
    law = Law(values=lambda seen: seen, largest_value=1e-9, largest_row=1e-9)
    test = LawTest(law)
    for _ in range(4):
        test.add("zero", np.array([[1.0], [2.0 + len(test._rows.get("zero", []))]]), None)
    assert "the same outcome came 4 times in 8 runs" in str(test.find_repeats(ALPHA))


def test_hashes_tell_rows_apart() -> None:
    rows = np.array([[0.0, 1.0], [1.0, 0.0], [-0.0, 1.0], [0.0, 2.0]])
    hashes = hash_rows(rows)
    assert hashes[0] == hashes[2]
    assert len(np.unique(hashes)) == 3
    assert len(np.unique(hash_rows(np.arange(30_000).reshape(-1, 3)))) == 10_000


def test_what_contradicts_itself_is_counted() -> None:
    test = LawTest(Law(consistent=lambda seen: seen > 0))
    test.add("zero", np.array([1, 2, 3]), None)
    assert test.find_contradictions() is None
    test.add("zero", np.array([1, 0]), None)
    assert test.find_contradictions() == "1 of 5 outcomes contradict themselves"


@pytest.mark.parametrize("alpha", [0.1, 0.5])
def test_a_true_density_is_called_false_as_seldom_as_was_said(alpha: float) -> None:
    """Randomised response of epsilon 1, over all counts, exactly."""
    hit, runs = math.e / (1 + math.e), 60
    slices = Slices.choose(np.array([-1.0] * 300 + [1.0] * 300))
    assert (slices.low.tolist(), slices.high.tolist()) == ([-1.0, 1.0], [-1.0, 1.0])
    wrong = 0.0
    for first, second in product(range(runs + 1), repeat=2):
        losses = [np.repeat([1.0, -1.0], [ones, runs - ones]) for ones in (first, second)]
        if slices.find_misfit(losses[0], losses[1], alpha) is not None:
            wrong += float(binom.pmf(first, runs, hit) * binom.pmf(second, runs, 1 - hit))
    assert wrong <= alpha
    boast = [2 * np.repeat([1.0, -1.0], counts) for counts in ([731, 269], [269, 731])]
    assert Slices.choose(np.concatenate(boast)).find_misfit(boast[0], boast[1], ALPHA) is not None
