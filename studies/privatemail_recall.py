"""Recall@8 over epsilon, of PrivateMail and everything it was compared with (figure 6 of 2022, figure 4 of 2021)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from studies import _figures as draw
from studies import _privatemail as shared
from studies._privatemail import DELTA, EPSILONS, FIRST, FIRST_EPSILONS, PAPER, PLAIN, PROGRAM, PROJECTION_2012, SETS
from studies._study import Case, Row, Study, list_cases, mean, select, summarise
from studies.published import step_epsilon

DATA: tuple[Any, ...] = ("cub200", "cars196", "cifar100")
FIRST_DATA = ("cub200", "cars196")  # figure 4 of 2021 has these two
SEEDS = (0, 1, 2)
GALLERY = 4000
_MIDDLE = 4.0  # the epsilon of which the text speaks
ABOVE = (PROGRAM, PAPER, "private PCA", PROJECTION_2012)
BELOW = ("covers", "PrivateMail, Gaussian", "PrivateMail, Laplace", "DP-dSNE", "random projection")
LABELS = {
    PROGRAM: "PrivateMail 2022, authors' program",
    "private PCA": "private PCA, query in the clear",
    "no privacy": "raw features, no privacy",
    "PrivateMail, Gaussian": "PrivateMail made sound, Gaussian",
    "PrivateMail, Laplace": "PrivateMail made sound, Laplace",
}


def cases() -> list[Case]:
    """Return one case a set, seed and group of methods."""
    everything = list_cases(data=DATA, seed=SEEDS, group=shared.GROUPS)
    return [case for case in everything if case["group"] != "first" or case["data"] in FIRST_DATA]


def measure(case: Case) -> list[Row]:
    """Ask all methods of a group at all epsilons."""
    data, seed = case["data"], case["seed"]
    drawn = shared.sample_images(data, seed, gallery=GALLERY)
    rows = []
    for results in shared.GROUPS[case["group"]](data, drawn, seed):
        epsilon, delta = results["epsilon"], results["delta"]
        top = None if epsilon is None else shared.compute_ceiling(epsilon, drawn.n_classes, delta)
        sound = results["method"] not in (*shared.UNSOUND, *PLAIN)
        limits = {"ceiling": top, "floor": shared.compute_floor(drawn.n_classes), "classes": drawn.n_classes}
        rows.append({"data": data, "seed": seed, **results, **limits, "sound": sound, "queries": len(drawn.queries)})
    return rows


def figures(rows: pd.DataFrame) -> dict[str, Figure]:
    """Draw figure 6 of 2022, a column a set, and figure 4 g, h of 2021."""
    return {"epsilon": _draw_second(rows), "strong-composition": _draw_first(rows)}


def _draw_second(rows: pd.DataFrame) -> Figure:
    rows = rows[rows["method"] != FIRST]
    figure, panels = draw.make_panels(2, rows["data"].nunique(), (10.8, 7.6), sharey=True)
    kinds = ((ABOVE, "do not protect the query"), (BELOW, "protect the query"))
    for column, (data, group) in zip(panels.T, rows.groupby("data", sort=False), strict=True):
        for axes, (methods, kind) in zip(column, kinds, strict=True):
            _draw_limits(axes, group["classes"].iloc[0], EPSILONS)
            draw.curves(axes, group, "recall", "epsilon", only=methods, labels=LABELS, unsound=shared.UNSOUND)
            for method in PLAIN:
                results = draw.level(mean(select(group, method=method)["recall"]), EPSILONS)
                draw.curve(axes, method, results, label=LABELS.get(method, method))
            axes.set_title(f"{SETS[data].title}: {kind}")
            draw.epsilon_axis(axes, (0.01, 0.1, 1, 4, 16))
    draw.finish(figure, panels, "Recall@8 of the server's ranking")
    return figure


def _draw_limits(axes: Axes, n_classes: int, epsilons: Sequence[float]) -> None:
    x = np.geomspace(epsilons[0], epsilons[-1], 60).tolist()
    draw.ceiling(axes, x, [shared.compute_ceiling(epsilon, n_classes) for epsilon in x], top=1.03)
    draw.floor(axes, shared.compute_floor(n_classes))
    axes.set_ylim(0, 1.03)


def _draw_first(rows: pd.DataFrame) -> Figure:
    ours = select(rows, method=FIRST)
    figure, (panels,), cells = draw.make_grid(ours, (9.6, 4.6), column="data", sharey=True)
    for axes, data, subset in cells:
        _draw_limits(axes, subset["classes"].iloc[0], FIRST_EPSILONS)
        for position, (delta, group) in enumerate(subset.groupby("delta", sort=False)):
            label = f"{FIRST}, delta {delta:g}"
            draw.curve(axes, label, summarise(group, "recall", "epsilon"), sound=False, index=position + 1)
        raw = draw.level(mean(select(rows, data=data, method="no privacy")["recall"]), FIRST_EPSILONS)
        draw.curve(axes, "no privacy", raw, label="raw features, no privacy")
        axes.set_title(f"{SETS[data].title}: two noisy iterations, strong composition")
        draw.epsilon_axis(axes, FIRST_EPSILONS, label="epsilon of one query, as the paper composes it")
        axes.set_xticks(FIRST_EPSILONS, [f"{epsilon:.2g}" for epsilon in FIRST_EPSILONS])  # the last two are close
    draw.finish(figure, panels, "Recall@8 of the server's ranking", ncols=2)
    return figure


def facts(rows: pd.DataFrame) -> dict[str, Any]:
    """Return which curves leak, and all recalls."""
    second, ours = rows[rows["method"] != FIRST], select(rows, method=FIRST)
    keys = ["method", "data", "epsilon"]
    means = summarise(second, "recall", *keys)
    over = means["low"] > second.groupby(keys, sort=False, dropna=False)["ceiling"].first().astype(float)
    leaks: dict[str, list[str]] = {}
    for method, data, epsilon in over.index[over]:
        leaks.setdefault(method, []).append(f"{SETS[data].title} at {epsilon:g}")
    first = summarise(ours, "recall", "data", "delta", "epsilon")["value"]
    return {
        "leaks": leaks,
        "sound_leaks": [method for method in leaks if method in BELOW],
        "middle": _MIDDLE,
        "sets": [_rank_sound(data, group) for data, group in second.groupby("data", sort=False)],
        "recalls": pd.concat([_list_recalls(data, group) for data, group in second.groupby("data", sort=False)]),
        "first_ceiling": shared.compute_ceiling(FIRST_EPSILONS[0], 98, shared.FIRST_DELTAS[0]),
        "first_step": step_epsilon(FIRST_EPSILONS[0], 2, shared.FIRST_DELTAS[0]),
        "first_best": first.max(),
        "first_recalls": _list_first(ours),
    }


def _rank_sound(data: Any, rows: pd.DataFrame) -> dict[str, Any]:
    """Return how the sound methods do at one epsilon, the best first."""
    here = rows[(rows["epsilon"] == _MIDDLE) & rows["method"].isin(BELOW)]
    means = here.groupby("method", sort=False)["recall"].mean().sort_values(ascending=False, kind="stable")
    return {
        "title": SETS[data].title,
        "best": ", ".join(f"{LABELS.get(name, name)} {value:.2f}" for name, value in means.items()),
        "ceiling": shared.compute_ceiling(_MIDDLE, rows["classes"].iloc[0]),
        "floor": rows["floor"].iloc[0],
    }


def _list_recalls(data: Any, rows: pd.DataFrame) -> pd.DataFrame:
    """Return the table of a set: methods that protect the query, those that do not, and the ceiling."""
    order = [name for name in (*BELOW, *ABOVE, *PLAIN) if name in set(rows["method"])]
    means = rows.groupby(["method", "epsilon"], dropna=False)["recall"].mean().unstack().loc[order]
    cells = means.reindex(columns=EPSILONS).map(lambda value: "" if np.isnan(value) else f"{value:.2f}")
    for method in set(PLAIN) & set(order):  # at no epsilon, and better than at any
        cells.loc[method, EPSILONS[-1]] = f"{means.loc[method].max():.2f} without"
    cells.insert(0, "protects the query", ["yes" if name in BELOW else "no" for name in order])
    n_classes = rows["classes"].iloc[0]
    cells.loc["*ceiling*"] = ["", *(f"{shared.compute_ceiling(epsilon, n_classes):.2f}" for epsilon in EPSILONS)]
    cells = cells.rename(index=LABELS, columns={epsilon: f"eps {epsilon:g}" for epsilon in EPSILONS})
    cells = cells.rename_axis("method").reset_index()
    cells.insert(0, "data", SETS[data].title)
    return cells


def _list_first(ours: pd.DataFrame) -> pd.DataFrame:
    keys = ["data", "delta", "epsilon"]
    groups = ours.groupby(keys, sort=False)
    lines = pd.DataFrame(
        {
            "epsilon of an iteration": groups["step"].first().map("{:.4f}".format),
            "Recall@8": shared.show(ours, "recall", *keys),
            "ceiling": groups["ceiling"].first().map("{:.2f}".format),
        }
    ).reset_index()
    lines = lines.assign(data=[SETS[name].title for name in lines["data"]])
    lines[["delta", "epsilon"]] = lines[["delta", "epsilon"]].map("{:g}".format)
    return lines.rename(columns={"epsilon": "epsilon, composed"})


PARAMETERS = {
    "delta": DELTA,
    "anchors": shared.ANCHORS,
    "gallery at most": GALLERY,
    "DP-dSNE anchors": shared.DSNE_ANCHORS,
    "private PCA columns": shared.PCA_COLUMNS,
    "random projection columns": 64,
    "covers, sets by epsilon": {f"{epsilon:g}:": count for epsilon, count in shared.SETS_OF.items()},
    "covers, maps learned for": "epsilon 1, 2, 4 and 8, the nearest",
}
STUDY = Study("privatemail-recall", cases, measure, figures, facts, shared.list_files(*DATA), PARAMETERS, SEEDS)
