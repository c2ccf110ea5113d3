"""Recall@8 over the iterations of the query, with and without the label of what is looked for (figure 3 of 2022)."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from nearveil.privatemail.published import EXPERIMENTS
from studies import _figures as draw
from studies import _privatemail as shared
from studies._privatemail import SETS, K, Labels, follow_paper, follow_program, show
from studies._study import Case, Row, Study, list_cases, select

DATA: tuple[Any, ...] = ("cub200", "cars196", "cifar100")
SEEDS = (0, 1, 2, 3, 4)
COLUMNS = (2, 16)
STEPS = 10
GALLERY = 3000
NARROW = 0.4  # a bandwidth at which features matter; the default of SupervisedManifold
PROGRAM, PROGRAM_HONEST = "program, told the query's label", "program, query without label"
PAPER, PAPER_HONEST = "paper, told the query's label", "paper, query without label"
UNLABELLED = f"bandwidth {NARROW:g}, no labels at all"
RAW = "no privacy"
METHODS = (PROGRAM, PROGRAM_HONEST, PAPER, PAPER_HONEST, UNLABELLED)


def cases() -> list[Case]:
    """Return one case a set, seed and number of columns: its curves share the cosines."""
    return list_cases(data=DATA, seed=SEEDS, k=COLUMNS)


def measure(case: Case) -> list[Row]:
    """Follow gallery and queries, embedded together, for ten steps."""
    data, seed, k = case["data"], case["seed"], case["k"]
    drawn = shared.sample_images(data, seed, gallery=GALLERY)
    gallery, queries = shared.normalise_rows(drawn)
    rows = np.vstack([gallery, queries])
    start = np.random.default_rng([seed, k]).normal(size=(len(rows), k))
    seen = np.concatenate([drawn.gallery_labels, drawn.query_labels])
    hidden = np.concatenate([drawn.gallery_labels, np.full(len(queries), -1)])
    published: Any = EXPERIMENTS[data]
    ways = {
        PROGRAM: follow_program(seen, **published),
        PROGRAM_HONEST: follow_program(hidden, **published),
        PAPER: follow_paper(seen, **published),
        PAPER_HONEST: follow_paper(hidden, **published),
        UNLABELLED: {"bandwidth": NARROW},
    }
    common = {"data": data, "k": k, "seed": seed, "chance": _compute_chance(drawn.gallery_labels, drawn.query_labels)}

    def score(Z: Any) -> float:
        return drawn.score(shared.find_nearest(Z[len(gallery) :], Z[: len(gallery)]))

    measured: list[Row] = [{**common, "method": RAW, "step": None, "recall": score(rows)}]
    cosines = rows @ rows.T
    for method, way in ways.items():
        for step, Z in enumerate(shared.walk(cosines, start, steps=STEPS, **way)):
            measured.append({**common, "method": method, "step": step, "recall": score(Z)})
    return measured


def _compute_chance(gallery_labels: Labels, query_labels: Labels) -> float:
    """Return the Recall@8 of eight random items."""
    shares = np.bincount(gallery_labels, minlength=int(query_labels.max()) + 1) / len(gallery_labels)
    return float(np.mean(1 - (1 - shares[query_labels]) ** K))


def figures(rows: pd.DataFrame) -> dict[str, Figure]:
    """Draw a column a set and a line a number of columns of the embedding."""
    size = (10.5, 3.1 * rows["k"].nunique() + 0.9)
    figure, panels, cells = draw.make_grid(rows, size, line="k", column="data", sharex=True, sharey=True)
    for axes, (k, name), group in cells:
        raw = select(group, method=RAW)["recall"].mean()
        axes.axhline(raw, color="black", linestyle="-.", linewidth=1.4, label="raw features, no label")
        draw.curves(axes, group, "recall", "step", only=METHODS)
        draw.floor(axes, group["chance"].iloc[0], label="chance: eight random items")
        axes.set_title(f"{SETS[name].title}, {k} columns")
        axes.set(ylim=(0, 1.03), xticks=range(0, STEPS + 1, 2))
    for axes in panels[-1]:
        axes.set_xlabel("iterations of the query")
    draw.finish(figure, panels, "Recall@8")
    return {"recall": figure}


def facts(rows: pd.DataFrame) -> dict[str, Any]:
    """Return where the curves end."""
    rows = rows.assign(data=rows["data"].map(lambda name: SETS[name].title))
    raw = select(rows, method=RAW)
    lines = show(select(rows, step=STEPS), "recall", "data", "k", "method").unstack(sort=False)[list(METHODS)]
    lines["raw features"] = show(raw, "recall", "data", "k")
    lines["chance"] = raw.groupby(["data", "k"])["chance"].first().map("{:.2f}".format)
    seventh = select(rows, step=7, k=COLUMNS[0]).groupby(["data", "method"], sort=False)["recall"].mean()
    reached = seventh.unstack(sort=False)[[PROGRAM, PROGRAM_HONEST]]
    return {
        "reached": list(reached.itertuples(name=None)),
        "raw": list(select(raw, k=COLUMNS[0]).groupby("data", sort=False)["recall"].mean()),
        "ends": lines.reset_index().rename(columns={"k": "columns"}),
    }


PARAMETERS = {
    "gallery at most": GALLERY,
    "columns": COLUMNS,
    "iterations": STEPS,
    "bandwidth and label weight": "Table 2 of the 2022 paper",
}
STUDY = Study("privatemail-convergence", cases, measure, figures, facts, shared.list_files(*DATA), PARAMETERS, SEEDS)
