import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import linprog

from nearveil.mechanisms.messages import candidate_count
from nearveil.search.ceiling import (
    answer_ceiling,
    best_channel,
    class_ceiling,
    neighbor_ceiling,
    popular_floor,
    reference_line,
    utility_ceiling,
)

Floats = NDArray[np.float64]


def best_of_all_channels(prior: Floats, utility: Floats, epsilon: float, delta: float = 0.0) -> float:
    """Return the most expected utility of any (epsilon, delta)-LDP channel; rows are inputs, columns answers.

    Variables: P(O|x), then for each ordered pair and answer how far the pure promise is broken there.
    """
    n, m = utility.shape
    pairs = list(itertools.permutations(range(n), 2))
    broken = len(pairs) * m
    limits: list[Floats] = []
    rights: list[float] = []
    for number, (x, other) in enumerate(pairs):
        total = np.zeros(n * m + broken)
        for o in range(m):
            row = np.zeros(n * m + broken)
            row[x * m + o], row[other * m + o], row[n * m + number * m + o] = 1, -math.exp(epsilon), -1
            total[n * m + number * m + o] = 1
            limits.append(row)
            rights.append(0.0)
        limits.append(total)
        rights.append(delta)
    sums = np.zeros((n, n * m + broken))
    for x in range(n):
        sums[x, x * m : (x + 1) * m] = 1
    cost = np.zeros(n * m + broken)
    cost[: n * m] = -(prior[:, None] * utility).ravel()
    return -float(linprog(cost, A_ub=np.array(limits), b_ub=rights, A_eq=sums, b_eq=np.ones(n)).fun)


def theorem_d(epsilon: float, count: int, shares: Floats) -> float:
    """Return the maximum as Theorem D states it: over m, c_i and the gain u_i of each item."""
    n, ratio = len(shares), math.exp(epsilon)
    eye, zero, one = np.eye(n), np.zeros((n, n)), np.ones((n, 1))
    rows = [
        np.hstack([0 * one, -ratio * eye, eye]),
        np.hstack([one, -eye, eye]),
        np.hstack([-one, eye, zero]),
        np.hstack([[[-count]], np.ones((1, n)), np.zeros((1, n))]),
    ]
    rights = np.concatenate([np.zeros(n), np.ones(n), np.zeros(n), [0.0]])
    bounds = [(1 / ratio, 1.0)] + [(0.0, None)] * n + [(None, None)] * n
    cost = np.concatenate([np.zeros(n + 1), -shares])
    return -float(linprog(cost, A_ub=np.vstack(rows), b_ub=rights, bounds=bounds).fun)


def answers(items: int, size: int) -> Floats:
    """Return which items (rows) are in which answer of `size` items (columns)."""
    sets = list(itertools.combinations(range(items), size))
    return np.array([[float(i in chosen) for chosen in sets] for i in range(items)])


@pytest.mark.parametrize(("classes", "k"), [(3, 1), (4, 2), (5, 1)])
@pytest.mark.parametrize("epsilon", [0.0, 0.4, 2.0])
@pytest.mark.parametrize("delta", [0.0, 0.01, 0.2])
def test_class_ceiling_is_the_best_of_all_channels(classes: int, k: int, epsilon: float, delta: float) -> None:
    best = best_of_all_channels(np.full(classes, 1 / classes), answers(classes, k), epsilon, delta)
    assert class_ceiling(epsilon, classes, k, delta) == pytest.approx(best, abs=1e-8)


@pytest.mark.parametrize("seed", range(12))
def test_utility_ceiling_is_never_passed(seed: int) -> None:
    generator = np.random.default_rng(seed)
    n, m = generator.integers(2, 5, 2)
    prior, utility = generator.dirichlet(np.ones(n)), generator.random((n, m)) ** generator.choice([0.3, 1, 3])
    epsilon, delta = generator.choice([0.1, 1.0, 3.0]), generator.choice([0.0, 0.01, 0.2])
    floor = float((prior @ utility).max())
    best = best_of_all_channels(prior, utility, epsilon, delta)
    assert floor - 1e-9 <= best <= utility_ceiling(epsilon, delta, floor) + 1e-9


@pytest.mark.parametrize("seed", range(12))
def test_neighbor_ceiling_is_attained_where_queries_have_one_neighbor(seed: int) -> None:
    generator = np.random.default_rng(seed)
    items = int(generator.integers(3, 6))
    count = int(generator.integers(1, items))
    shares = generator.dirichlet(np.full(items, generator.choice([0.5, 2.0, 50.0])))
    epsilon = float(generator.choice([0.0, 0.3, 1.0, 3.0]))
    best = best_of_all_channels(shares, answers(items, count), epsilon)
    pure = neighbor_ceiling(epsilon, count / items, shares)
    assert pure == pytest.approx(best, abs=1e-8)
    # Delta does help such channels, so a ceiling that forgot it would be passed here.
    with_delta = best_of_all_channels(shares, answers(items, count), epsilon, 0.01)
    assert pure < with_delta <= neighbor_ceiling(epsilon, count / items, shares, 0.01) + 1e-9


@pytest.mark.parametrize("seed", range(8))
def test_neighbor_ceiling_holds_for_several_neighbors_and_delta(seed: int) -> None:
    generator = np.random.default_rng(seed)
    items, count, queries, k = 4, int(generator.integers(1, 4)), 4, 2
    near = np.array([generator.choice(items, k, replace=False) for _ in range(queries)])
    prior = generator.dirichlet(np.ones(queries))
    member = answers(items, count)
    utility = member[near].mean(axis=1)
    shares = np.bincount(near.ravel(), weights=np.repeat(prior / k, k), minlength=items)
    epsilon = float(generator.choice([0.3, 1.0, 3.0]))
    for delta in (0.0, 1e-3, 0.05, 0.5):
        best = best_of_all_channels(prior, utility, epsilon, delta)
        assert best <= neighbor_ceiling(epsilon, count / items, shares, delta) + 1e-9


@pytest.mark.parametrize("seed", range(4))
def test_answer_ceiling_is_the_best_of_all_channels(seed: int) -> None:
    """Theorem E is exact: it agrees with a linear programme over all channels, and is below Theorem D."""
    rng = np.random.default_rng(seed)
    items, size, epsilon = 6, 2, float(rng.uniform(0.2, 3))
    wants = np.array([rng.permutation(items)[:3] for _ in range(4)])
    recalls = answers(items, size).T[:, wants].mean(axis=2)
    best = best_of_all_channels(np.full(4, 0.25), recalls.T, epsilon)
    assert answer_ceiling(epsilon, recalls) == pytest.approx(best, abs=2e-4)
    assert answer_ceiling(epsilon, recalls) >= best - 1e-9
    counts = np.bincount(wants.ravel(), minlength=items)
    assert answer_ceiling(epsilon, recalls) <= neighbor_ceiling(epsilon, size / items, counts) + 2e-4


@pytest.mark.parametrize("recalls", [[], [[1.5]], [[np.nan]], [0.5]])
def test_recalls_that_are_none(recalls: Any) -> None:
    with pytest.raises(ValueError, match="recalls must be"):
        answer_ceiling(1.0, recalls)


def test_a_tiny_delta_raises_the_ceiling_by_a_tiny_amount() -> None:
    shares = np.random.default_rng(0).pareto(1.5, 200)
    pure = neighbor_ceiling(2.0, 0.1, shares)
    assert pure < neighbor_ceiling(2.0, 0.1, shares, 1e-12) < pure + 1e-9
    assert pure < neighbor_ceiling(2.0, 0.1, shares, 0.3) <= utility_ceiling(2.0, 0.3, popular_floor(0.1, shares))


counts = st.lists(st.integers(0, 6), min_size=2, max_size=14).filter(lambda values: sum(values) > 0)


@settings(max_examples=60, deadline=None)
@given(counts, st.floats(0.01, 1), st.sampled_from([0.01, 0.7, 2.0, 5.0]))
def test_neighbor_ceiling_is_the_maximum_that_the_theorem_states(
    popularity: list[int], part: float, epsilon: float
) -> None:
    count = max(1, int(part * len(popularity)))
    shares = np.array(popularity) / sum(popularity)
    found = best_channel(epsilon, count / len(shares), popularity)
    assert found.ceiling == pytest.approx(theorem_d(epsilon, count, shares), abs=1e-8)
    assert shares @ found.chances == pytest.approx(found.ceiling, abs=1e-9)
    assert found.chances.min() >= 0
    assert found.chances.max() <= 1


@settings(max_examples=80, deadline=None)
@given(counts, st.floats(0.08, 1), st.floats(0, 30), st.floats(0, 5))
def test_order_of_the_bounds(popularity: list[int], part: float, epsilon: float, more: float) -> None:
    part = max(part, 1 / len(popularity))
    floor, ceiling = popular_floor(part, popularity), neighbor_ceiling(epsilon, part, popularity)
    assert floor - 1e-12 <= ceiling <= utility_ceiling(epsilon, 0.0, floor) + 1e-9
    line = reference_line(epsilon, candidate_count(part, len(popularity)) / len(popularity))
    assert line - 1e-9 <= ceiling <= 1
    assert ceiling <= neighbor_ceiling(epsilon + more, part, popularity) + 1e-12
    assert neighbor_ceiling(0.0, part, popularity) == pytest.approx(floor, abs=1e-12)
    assert neighbor_ceiling(math.inf, part, popularity) == 1


@pytest.mark.parametrize("epsilon", [0.5, 2.0, 6.0])
def test_equal_items_give_the_reference_line(epsilon: float) -> None:
    assert neighbor_ceiling(epsilon, 0.2, np.ones(50)) == pytest.approx(reference_line(epsilon, 0.2), abs=1e-12)
    ratio = math.exp(epsilon)
    assert reference_line(epsilon, 0.2) == pytest.approx(0.2 * ratio / (0.2 * ratio + 0.8), abs=1e-15)


def test_a_million_items_agree_with_a_search_over_m() -> None:
    shares = np.sort(np.random.default_rng(1).pareto(1.5, 1_000_000))[::-1]
    shares /= shares.sum()
    count, ratio, best = 10_000, math.exp(2.0), 0.0
    sums = np.concatenate([[0.0], np.cumsum(shares)])
    lows = np.searchsorted(-shares, -shares[: count + 1] / ratio, side="left")
    for m in np.linspace(1 / ratio, 1, 401)[:-1]:
        # Greedy by slope: e^eps shares up to the kink, shares beyond it; both in falling order.
        kink = (1 - m) / (ratio - 1)
        spent = np.arange(len(lows)) * (m - kink) + lows * kink
        full = int(np.searchsorted(spent, count * m, side="right")) - 1
        rest = (count * m - full * (m - kink)) / kink
        whole = min(int(rest), len(shares))
        value = sums[full] * (1 - ratio * kink) + ratio * kink * sums[whole]
        best = max(best, float(value))
    exact = neighbor_ceiling(2.0, 0.01, shares)
    assert best <= exact + 1e-9
    assert best == pytest.approx(exact, abs=1e-3)


def test_popular_floor_by_hand() -> None:
    assert popular_floor(0.29, np.arange(1, 101)) == pytest.approx(sum(range(72, 101)) / 5050)
    assert popular_floor(1.0, [0, 3, 1]) == 1


def test_published_recall_is_far_above_the_ceiling() -> None:
    assert class_ceiling(0.01, 98, 8) == pytest.approx(0.0823855, abs=1e-7)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: class_ceiling(-1, 5, 1), "epsilon must be"),
        (lambda: class_ceiling(math.nan, 5, 1), "epsilon must be"),
        (lambda: class_ceiling("1", 5, 1), "epsilon must be"),  # type: ignore[arg-type]
        (lambda: class_ceiling(1, 5, 6), "k must be at most"),
        (lambda: class_ceiling(1, 5, 0), "k must be an integer"),
        (lambda: class_ceiling(1, 2.5, 1), "n_classes must be"),  # type: ignore[arg-type]
        (lambda: class_ceiling(1, 5, 1, 2), "delta must be"),
        (lambda: utility_ceiling(1, math.nan, 0.5), "delta must be"),
        (lambda: utility_ceiling(1, 0, 1.5), "floor must be"),
        (lambda: reference_line(1, 0), "candidates must be a fraction"),
        (lambda: reference_line(1, math.nan), "candidates must be a fraction"),
        (lambda: popular_floor(0.01, [1, 2]), "candidates must be at least 1/2"),
        (lambda: neighbor_ceiling(1, 0.5, []), "popularity must hold"),
        (lambda: neighbor_ceiling(1, 0.5, [[1, 2]]), "popularity must hold"),
        (lambda: neighbor_ceiling(1, 0.5, [1, -1]), "popularity must be finite"),
        (lambda: neighbor_ceiling(1, 0.5, [1, math.nan]), "popularity must be finite"),
        (lambda: neighbor_ceiling(1, 0.5, [0, 0]), "popularity must have"),
        (lambda: neighbor_ceiling(math.nan, 0.5, [1, 2]), "epsilon must be"),
    ],
)
def test_absurd_input(call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()
