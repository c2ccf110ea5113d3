"""``python -m nearveil.study.label_weight``: what the labels of the query do to rows it has not seen.

Held-out rows are placed without labels, and five nearest neighbours among the fitted rows, placed the
same way, name their class. Means over random starts; floor and ceiling as in the demonstration.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.model_selection import train_test_split

from nearveil import SupervisedManifold
from nearveil.study.data import DataMissingError, load_features
from nearveil.study.demo import Split, digits, limits, neighbours_accuracy

BANDWIDTHS = (0.3, 0.4, 0.5, 6.0)
LABEL_WEIGHTS = (0.0, 0.003, 0.03, 0.1, 0.6)
STARTS = 5
BIRD_CLASSES = 20


def birds() -> Split:
    """Split the features of the first 20 classes of birds, centred by the mean of the public half."""
    everything = load_features("cub200_cropped_lite0")
    chosen = everything.labels < BIRD_CLASSES
    X = everything.features[chosen] - everything.features[everything.labels < 100].mean(axis=0)
    y = everything.labels[chosen]
    X_fit, X_new, y_fit, y_new = train_test_split(X, y, test_size=0.3, random_state=0, stratify=y)
    return Split(X_fit, y_fit, X_new, y_new)


def accuracy(split: Split, bandwidth: float, label_weight: float) -> float:
    """Return the held-out accuracy of two-column embeddings, a mean over random starts."""
    scores = []
    for seed in range(STARTS):
        manifold = SupervisedManifold(bandwidth=bandwidth, label_weight=label_weight, random_state=seed)
        manifold.fit(split.X, split.y)
        placed, placed_new = manifold.transform(split.X), manifold.transform(split.X_new)
        scores.append(neighbours_accuracy(placed, split.y, placed_new, split.y_new))
    return float(np.mean(scores))


def picture(results: dict[str, Any], path: Path) -> None:
    """Draw accuracy over label weight, a line for each bandwidth, between floor and ceiling."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * len(results), 4.2), layout="constrained")
    for axes, (name, (scores, floor, ceiling)) in zip(
        np.atleast_1d(figure.subplots(1, len(results), sharey=True)), results.items(), strict=True
    ):
        for bandwidth, row in zip(BANDWIDTHS, scores, strict=True):
            axes.plot(range(len(LABEL_WEIGHTS)), row, marker="o", label=f"bandwidth {bandwidth:g}")
        axes.axhline(floor, color="#c44e52", linestyle="--", label="floor")
        axes.axhline(ceiling, color="#55a868", linestyle="--", label="ceiling")
        axes.set_xticks(range(len(LABEL_WEIGHTS)), [f"{weight:g}" for weight in LABEL_WEIGHTS])
        axes.set(title=name, xlabel="label weight", ylabel="held-out accuracy", ylim=(0, 1.02))
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the study."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the picture")
    out = parser.parse_args(arguments).out
    console = Console()
    splits = {"digits (10 classes)": digits()}
    try:
        splits[f"birds ({BIRD_CLASSES} classes)"] = birds()
    except DataMissingError as missing:
        console.print(f"without birds: {missing}")
    results = {}
    for name, split in splits.items():
        floor, ceiling = limits(split)
        rows = [
            [accuracy(split, bandwidth, weight) for weight in LABEL_WEIGHTS]
            for bandwidth in track(BANDWIDTHS, name, console=console)
        ]
        results[name] = (rows, floor, ceiling)
        grid = Table(title=f"{name}: floor {floor:.3f}, ceiling {ceiling:.3f}; 20 steps, 2 columns, {STARTS} starts")
        for heading in ("bandwidth", *(f"weight {weight:g}" for weight in LABEL_WEIGHTS)):
            grid.add_column(heading, justify="right")
        for bandwidth, row in zip(BANDWIDTHS, rows, strict=True):
            grid.add_row(f"{bandwidth:g}", *(f"{score:.3f}" for score in row))
        console.print(grid)
    picture(results, out / "label-weight.png")
    console.print(f"picture: {out / 'label-weight.png'}", soft_wrap=True)


if __name__ == "__main__":
    main()
