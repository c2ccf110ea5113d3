"""Recall@8 over the iterations of the query, with and without the label of what is looked for (figure 3 of 2022)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nearveil.graph import label_graph
from studies._privatemail import (
    SETS,
    K,
    Labels,
    PartlyLabelled,
    Repel,
    averaged,
    files,
    images,
    nearest,
    recall,
    shown,
    table_2,
    unit_rows,
    walk,
)
from studies._report import table
from studies._study import Case, Row, Study, grouped
from studies._style import curve, floor, legend_below

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    return [{"data": data, "seed": seed, "k": k} for data in DATA for seed in SEEDS for k in COLUMNS]


def measure(case: Case) -> list[Row]:
    """Follow gallery and queries, embedded together, for ten steps."""
    data, seed, k = case["data"], case["seed"], case["k"]
    drawn = images(data, seed, gallery=GALLERY)
    gallery, queries = unit_rows(drawn)
    rows = np.vstack([gallery, queries])
    start = np.random.default_rng([seed, k]).normal(size=(len(rows), k))
    known = np.concatenate([drawn.gallery_labels, drawn.query_labels])
    hidden = np.concatenate([drawn.gallery_labels, np.full(len(queries), -1)])
    common = {"data": data, "k": k, "seed": seed, "chance": _chance(drawn.gallery_labels, drawn.query_labels)}

    def found(Z: Any) -> float:
        return recall(nearest(Z[len(gallery) :], Z[: len(gallery)]), drawn.gallery_labels, drawn.query_labels)

    measured: list[Row] = [{**common, "method": RAW, "step": None, "recall": found(rows)}]
    cosines = rows @ rows.T
    for method in METHODS:
        repel, setting = _query(method, data, hidden if method in (PROGRAM_HONEST, PAPER_HONEST) else known)
        for step, Z in enumerate(walk(cosines, repel, start, steps=STEPS, **setting)):
            measured.append({**common, "method": method, "step": step, "recall": found(Z)})
    return measured


def _query(method: str, data: Any, labels: Labels) -> tuple[Repel | None, dict[str, float]]:
    """Return what repels, and bandwidth and label weight."""
    setting = table_2(data)
    if method == UNLABELLED:
        return None, {"bandwidth": NARROW, "label_weight": 0.0}
    if method in (PROGRAM, PROGRAM_HONEST):  # the program divides by sigma^2, not by 2 sigma^2
        return PartlyLabelled(labels), {**setting, "bandwidth": setting["bandwidth"] / np.sqrt(2)}
    return label_graph(labels, setting["bandwidth"], "integer"), setting


def _chance(gallery_labels: Labels, query_labels: Labels) -> float:
    """Return the Recall@8 of eight random items."""
    shares = np.bincount(gallery_labels, minlength=int(query_labels.max()) + 1) / len(gallery_labels)
    return float(np.mean(1 - (1 - shares[query_labels]) ** K))


def figures(rows: Sequence[Row]) -> "dict[str, Figure]":
    """Draw a column a set and a row a number of columns of the embedding."""
    from matplotlib.figure import Figure

    data, columns = [key[0] for key in grouped(rows, "data")], [key[0] for key in grouped(rows, "k")]
    figure = Figure(figsize=(10.5, 3.1 * len(columns) + 0.9), layout="constrained")
    panels = figure.subplots(len(columns), len(data), sharex=True, sharey=True, squeeze=False)
    for line, k in zip(panels, columns, strict=True):
        for axes, name in zip(line, data, strict=True):
            own = [row for row in rows if (row["data"], row["k"]) == (name, k)]
            raw = averaged([row for row in own if row["method"] == RAW])
            axes.axhline(raw.value, color="black", linestyle="-.", linewidth=1.4, label="raw features, no label")
            for place, method in enumerate(METHODS):
                steps = grouped([row for row in own if row["method"] == method], "step")
                x = [key[0] for key in steps]
                curve(axes, method, x, [averaged(group) for group in steps.values()], place=place)
            floor(axes, own[0]["chance"], label="chance: eight random items")
            axes.set_title(f"{SETS[name].title}, {k} columns")
            axes.set(ylim=(0, 1.03), xticks=range(0, STEPS + 1, 2))
        line[0].set_ylabel("Recall@8")
    for axes in panels[-1]:
        axes.set_xlabel("iterations of the query")
    legend_below(figure, [panels[0][0]], ncols=3)
    return {"recall": figure}


def tell(rows: Sequence[Row]) -> str:
    """Say where the curves end."""
    last = [row for row in rows if row["step"] == STEPS]
    raw = {key: averaged(group) for key, group in grouped([r for r in rows if r["method"] == RAW], "data", "k").items()}
    lines = []
    for (data, k), own in grouped(last, "data", "k").items():
        by = {key[0]: shown(averaged(group)) for key, group in grouped(own, "method").items()}
        chance, best = f"{own[0]['chance']:.2f}", shown(raw[data, k])
        lines.append([SETS[data].title, str(k), *(by[method] for method in METHODS), best, chance])
    two = [row for row in rows if row["k"] == COLUMNS[0] and row["step"] == 7]
    means = {key: averaged(group).value for key, group in grouped(two, "data", "method").items()}
    names = [key[0] for key in grouped(two, "data")]
    reached = "; ".join(
        f"{SETS[name].title} {means[name, PROGRAM]:.2f} with the label, {means[name, PROGRAM_HONEST]:.2f} without"
        for name in names
    )
    return (
        "![Recall@8 over iterations. Only the program's curve with the query's own label rises to nearly one; "
        "without that label it ends at chance or below.](privatemail-convergence-recall.svg)\n\n"
        f"The authors' program after seven iterations, two columns: {reached}. The raw features, which know no "
        f"label, find {', '.join(f'{raw[name, COLUMNS[0]].value:.2f}' for name in names)}: where a curve passes "
        "them, it cannot be the features that it finds more with. The paper's own formula (label weights that are "
        "largest within a class, and repel) does not sort by label, so it stays low with the label, too.\n\n"
        f"After {STEPS} iterations:\n\n"
        + table(["data", "columns", *METHODS, "raw features", "chance"], lines)
        + "\n\nMeans over seeds with 95% intervals."
    )


STUDY = Study(
    name="privatemail-convergence",
    title="PrivateMail 2022, figure 3: recall over iterations",
    about=(
        "The paper shows that recall converges within five to seven iterations of the query. In its figure all rows "
        "are embedded with their labels, those of the images that are looked for among them. Here the same is "
        "done twice: with the labels of the queries, and without (a query then has no part in what the labels do; "
        "the gallery keeps its labels). Nothing is private here, so there is no ceiling; what counts is the raw "
        "features' recall.\n\n"
        "*Program* is the authors' code: it puts double-centred distances between labels where the paper has label "
        "weights. *Paper* is its equation 4. Both are rescaled after each step, as the program does. The "
        "last curve has our default bandwidth and no labels. Gallery and queries, one of each class (two on "
        "CIFAR-100), are embedded together; features are those of EfficientNet-Lite0, not of CGD. The seed draws "
        "images and start."
    ),
    cases=cases,
    measure=measure,
    figures=figures,
    tell=tell,
    data=files("cub200", "cars196", "cifar100"),
    parameters={
        "gallery at most": GALLERY,
        "columns": COLUMNS,
        "iterations": STEPS,
        "bandwidth and label weight": "Table 2 of the 2022 paper",
    },
    seeds=SEEDS,
)
