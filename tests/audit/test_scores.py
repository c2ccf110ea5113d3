"""Each way to score by itself: another that also works must not hide that one has gone blind."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from nearveil.audit._experiment import Outcomes
from nearveil.audit._scores import (
    Score,
    find_last_bits,
    learn_finest_bit,
    learn_line,
    learn_low_bits,
    learn_table,
    learn_trees,
)


def apart(learn: Callable[[Outcomes, Outcomes], Score | None], draw: Callable[..., NDArray[Any]]) -> float:
    """Train on some outcomes; return how often a new one of the first world scores above one of the second."""
    generator = np.random.default_rng(0)
    train, new = ([Outcomes(draw(generator, world), None) for world in (1, 0)] for _ in range(2))
    score = learn(train[0], train[1])
    assert score is not None
    first, second = (score(one) for one in new)
    return float((first > second).mean() + (first == second).mean() / 2)


def shifted(generator: np.random.Generator, world: int) -> NDArray[Any]:
    return np.asarray(generator.normal(0, 1, (2_000, 6)) + world * np.array([0, 0, 1.5, 0, -1.5, 0]))


def crossed(generator: np.random.Generator, world: int) -> NDArray[Any]:
    rows = generator.normal(0, 1, (2_000, 2))
    rows[:, 1] = np.abs(rows[:, 1]) * np.sign(rows[:, 0]) * (1 if world else -1)
    return rows


def words(generator: np.random.Generator, world: int) -> NDArray[Any]:
    return generator.choice([7, 3, 90, 41], (2_000, 1), p=[0.4, 0.1, 0.4, 0.1] if world else [0.1, 0.4, 0.1, 0.4])


def test_a_shift_is_told_by_a_line_and_by_trees() -> None:
    assert apart(learn_line, shifted) > 0.9
    assert apart(learn_trees, shifted) > 0.9


def test_what_no_line_tells_trees_do() -> None:
    assert apart(learn_line, crossed) == pytest.approx(0.5, abs=0.06)
    assert apart(learn_trees, crossed) > 0.98


def test_words_without_an_order_are_told_by_a_table() -> None:
    # Right with 0.8 * 0.8 of the pairs, wrong with 0.2 * 0.2, and half of the others are ties: 0.8.
    assert apart(learn_table, words) == pytest.approx(0.8, abs=0.04)
    assert learn_table(Outcomes(np.arange(50.0)[:, None], None), Outcomes(np.arange(60.0, 110)[:, None], None)) is None


def test_low_bits_are_told_by_the_finest_and_by_trees() -> None:
    def half_fine(generator: np.random.Generator, world: int) -> NDArray[Any]:
        scale = 2.0**40 if world else 2.0**20
        return np.asarray(np.rint(generator.normal(0, 1, (2_000, 1)) * scale) / scale)

    assert apart(lambda a, b: learn_finest_bit(b, a), half_fine) < 0.05  # finer bits score lower
    assert apart(learn_low_bits, half_fine) > 0.98
    whole = Outcomes(np.ones((40, 1), dtype=np.int64), None)
    assert learn_finest_bit(whole, whole) is None
    assert learn_low_bits(whole, whole) is None
    assert find_last_bits(np.array([0.0, -0.75, 2.0**-1060])).tolist() == [2000.0, -2.0, -1060.0]


def test_nothing_to_learn_from_is_no_score() -> None:
    same = Outcomes(np.ones((400, 2)), None)
    assert learn_line(same, same) is None
    assert learn_trees(same, same) is None
    wide = Outcomes(np.random.default_rng(0).normal(size=(20, 600)), None)
    assert learn_line(wide, wide) is None
    assert learn_trees(wide, wide) is None
