"""What the labels of the query do to rows that it has not seen."""

import functools
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.dummy import DummyClassifier
from sklearn.model_selection import train_test_split
from sklearn.neighbors import KNeighborsClassifier

from nearveil import SupervisedManifold
from studies import _figures as draw
from studies._study import Case, Row, Study, list_cases, summarise
from studies.data import load_features

BANDWIDTHS = (0.3, 0.4, 0.5, 6.0)
LABEL_WEIGHTS = (0.0, 0.003, 0.03, 0.1, 0.6)
SEEDS = (0, 1, 2, 3, 4)
BIRD_CLASSES = 20
TITLES = {"digits": "digits, 10 classes", "birds": f"CUB-200-2011, {BIRD_CLASSES} classes"}


class Split(NamedTuple):
    """Fitted rows and held-out rows, with their labels."""

    X: Any
    y: Any
    X_new: Any
    y_new: Any


@functools.cache
def split(data: str) -> Split:
    """Return digits, or the first 20 classes of birds, centred by the mean of the public half."""
    if data == "digits":
        X, y = load_digits(return_X_y=True)
        X_fit, X_new, y_fit, y_new = train_test_split(X, y, test_size=0.3, random_state=0, stratify=y)
        mean = X_fit.mean(axis=0)
        return Split(X_fit - mean, y_fit, X_new - mean, y_new)
    everything = load_features("cub200_cropped_lite0")
    chosen = everything.labels < BIRD_CLASSES
    X = everything.features[chosen] - everything.features[everything.labels < 100].mean(axis=0)
    y = everything.labels[chosen]
    X_fit, X_new, y_fit, y_new = train_test_split(X, y, test_size=0.3, random_state=0, stratify=y)
    return Split(X_fit, y_fit, X_new, y_new)


def score_neighbours(rows: Any, labels: Any, new: Any, new_labels: Any) -> float:
    """Return how often five nearest neighbours among `rows` name the label of a new row."""
    return float(KNeighborsClassifier(5).fit(rows, labels).score(new, new_labels))


def compute_limits(split: Split) -> tuple[float, float]:
    """Return the floor (the most common class) and the ceiling (neighbours in the raw features)."""
    floor = float(DummyClassifier().fit(split.X, split.y).score(split.X_new, split.y_new))
    return floor, score_neighbours(split.X, split.y, split.X_new, split.y_new)


def cases() -> list[Case]:
    """Return one case a set and bandwidth."""
    return list_cases(data=TITLES, bandwidth=BANDWIDTHS)


def measure(case: Case) -> list[Row]:
    """Embed fitted and held-out rows from several starts, at every label weight."""
    group = split(case["data"])
    bottom, top = compute_limits(group)
    rows = []
    for weight in LABEL_WEIGHTS:
        for seed in SEEDS:
            manifold = SupervisedManifold(bandwidth=case["bandwidth"], label_weight=weight, random_state=seed)
            manifold.fit(group.X, group.y)
            placed, placed_new = manifold.transform(group.X), manifold.transform(group.X_new)
            score = score_neighbours(placed, group.y, placed_new, group.y_new)
            rows.append({**case, "label_weight": weight, "seed": seed, "accuracy": score, "floor": bottom, "raw": top})
    return rows


def figures(rows: pd.DataFrame) -> dict[str, Figure]:
    """Draw accuracy over label weight, a curve a bandwidth."""
    figure, panels, cells = draw.make_grid(rows, (5 * rows["data"].nunique(), 4.4), column="data", sharey=True)
    for axes, data, group in cells:
        weights = list(group["label_weight"].unique())
        axes.axhline(group["raw"].iloc[0], color="black", linestyle="-.", linewidth=1.4, label="raw features")
        labels = {bandwidth: f"bandwidth {bandwidth:g}" for bandwidth in group["bandwidth"].unique()}
        places = group.assign(position=group["label_weight"].map(weights.index))
        draw.curves(axes, places, "accuracy", "position", by="bandwidth", labels=labels)
        draw.floor(axes, group["floor"].iloc[0], label="floor: the most common class")
        axes.set_xticks(range(len(weights)), [f"{weight:g}" for weight in weights])
        axes.set(title=TITLES[data], xlabel="label weight alpha", ylim=(0, 1.03))
    draw.finish(figure, panels, "held-out accuracy, 5 neighbours")
    return {"accuracy": figure}


def facts(rows: pd.DataFrame) -> dict[str, Any]:
    """Return at which weight each bandwidth is best, and all accuracies."""
    return {"sets": [_describe_set(TITLES[data], group) for data, group in rows.groupby("data", sort=False)]}


def _describe_set(title: str, rows: pd.DataFrame) -> dict[str, Any]:
    results = summarise(rows, "accuracy", "bandwidth", "label_weight")
    best = results["value"].unstack("label_weight", sort=False).idxmax(axis=1)
    cells = results.apply(lambda row: f"{row.value:.3f} ({row.low:.2f} to {row.high:.2f})", axis=1)
    lines = cells.unstack("label_weight", sort=False).rename(index="{:g}".format, columns="weight {:g}".format)
    return {
        "title": title,
        "floor": rows["floor"].iloc[0],
        "raw": rows["raw"].iloc[0],
        "best": ", ".join(f"{weight:g} at bandwidth {bandwidth:g}" for bandwidth, weight in best.items()),
        "accuracies": lines.reset_index(),
    }


PARAMETERS = {"columns": 2, "steps": 20, "held out": 0.3}
DATA = ("digits of scikit-learn", "cub200_cropped_lite0/cub200_cropped_lite0.npz")
STUDY = Study("label-weight", cases, measure, figures, facts, DATA, PARAMETERS, SEEDS)
