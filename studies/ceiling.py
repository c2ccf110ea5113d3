"""Theorem D, the true optimum and covers, where all answers can be enumerated."""

import itertools
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.sparse import csr_array

from nearveil.mechanisms.covers import learning
from nearveil.search.ceiling import answer_ceiling, neighbor_ceiling
from nearveil.search.evaluation import true_neighbors
from studies import _figures as draw
from studies._search import count_popularity
from studies._study import Case, Row, Study, list_cases

SHAPES = ((24, 3), (30, 3))  # items, and items of an answer
EPSILONS = (1.0, 2.0, 3.0)
SEEDS = (0, 1, 2)
NEIGHBORS = 3
DIMENSION = 3
STARTS = 8  # of covers, for each number of sets
MOST_SETS = 10
COLUMNS = {"optimum": "optimum of all messages", "covers": "covers"}


def draw_gallery(items: int, seed: int) -> NDArray[np.float32]:
    """Return points on a sphere; some are near to many."""
    rows = np.random.default_rng(seed).standard_normal((items, DIMENSION)).astype(np.float32)
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True), dtype=np.float32)


def find_optimum(lists: NDArray[np.intp], items: int, size: int, epsilon: float) -> float:
    """Return the most that any message finds, over all answers of `size` items."""
    answers = np.array(list(itertools.combinations(range(items), size)))
    inside = np.zeros((len(answers), items))
    np.put_along_axis(inside, answers, 1, axis=1)
    return answer_ceiling(epsilon, np.mean([inside[:, lists[:, rank]] for rank in range(lists.shape[1])], axis=0))


def find_covers(lists: NDArray[np.intp], items: int, size: int, epsilon: float) -> float:
    """Return the most that randomised response over learned sets finds, over their number and many starts."""
    n, count = lists.shape
    values, columns = np.full(lists.size, 1 / count, np.float32), lists.ravel().astype(np.int32)
    weights = csr_array((values, columns, np.arange(0, lists.size + 1, count)), shape=(n, items))
    rng, best = np.random.default_rng(0), 0.0
    for n_sets in range(2, MOST_SETS + 1):
        plan = learning.Plan(n_sets, size, epsilon)
        for _ in range(STARTS):
            start = np.asarray(rng.integers(0, n_sets, size=n), dtype=np.int64)
            sets = learning.learn(weights, start, plan)
            coverage = learning.measure_coverage(weights, sets)
            best = max(best, learning.Shares.of(coverage, 1e5).measure(coverage, plan))
    return best


def cases() -> list[Case]:
    """Return every shape, epsilon and seed."""
    shapes = [{"items": items, "size": size} for items, size in SHAPES]
    return [{**shape, **case} for shape in shapes for case in list_cases(epsilon=EPSILONS, seed=SEEDS)]


def measure(case: Case) -> list[Row]:
    """Compare the three on items that act as queries, each left out of its own neighbours."""
    gallery = draw_gallery(case["items"], case["seed"])
    lists = true_neighbors(gallery, gallery, NEIGHBORS, leave_out=True)
    ceiling = neighbor_ceiling(case["epsilon"], case["size"] / case["items"], count_popularity(gallery, NEIGHBORS))
    part = (lists, case["items"], case["size"], case["epsilon"])
    optimum, covers = find_optimum(*part), find_covers(*part)
    return [{**case, "ceiling": ceiling, "optimum": optimum / ceiling, "covers": covers / ceiling}]


def figures(rows: pd.DataFrame) -> dict[str, Figure]:
    """Draw both as shares of Theorem D."""
    groups = rows.groupby(["items", "size"], sort=False)
    figure, (panels,) = draw.make_panels(1, len(groups), (7.5, 3.4), sharey=True)
    for axes, ((items, size), part) in zip(panels, groups, strict=True):
        draw.shares(axes, part, COLUMNS)
        axes.set(title=f"{size} of {items} items", ylim=(0.7, 1.03))
    draw.finish(figure, panels, "expected recall of the\nnearest 3, share of D")
    return {"shares": figure}


def facts(rows: pd.DataFrame) -> dict[str, Any]:
    """Return the ranges of both."""
    part = rows["covers"] / rows["optimum"]
    means = rows.assign(part=part).groupby(["items", "size", "epsilon"], sort=False)
    lines = means[["ceiling", "optimum", "covers", "part"]].mean().map("{:.3f}".format).reset_index()
    names = ["items", "in an answer", "epsilon", "D", "optimum / D", "covers / D", "covers / optimum"]
    return {
        "optimum": (rows["optimum"].min(), rows["optimum"].max()),
        "part": (part.min(), part.max()),
        "lines": lines.set_axis(names, axis=1),
    }


PARAMETERS = {"shapes": [list(shape) for shape in SHAPES], "epsilons": EPSILONS, "neighbours": NEIGHBORS}
STUDY = Study("ceiling", cases, measure, figures, facts, ("points on a sphere",), PARAMETERS, SEEDS)
