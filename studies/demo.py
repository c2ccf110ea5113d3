"""``make demo``: the supervised manifold on the digits that scikit-learn carries.

For every way to embed, the table says how well five nearest neighbours tell the digits of held-out
rows, which are placed without their labels. Below every row stand the floor (guessing the commonest
digit) and the ceiling (the same neighbours in the raw features).
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table
from sklearn.datasets import load_digits
from sklearn.dummy import DummyClassifier
from sklearn.model_selection import train_test_split
from sklearn.neighbors import KNeighborsClassifier

from studies.baselines.solvers import ReferenceManifold

SETTINGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("query", {}),
    ("no labels", {"label_weight": 0.0}),
    ("papers' setting", {"bandwidth": 6.0, "n_iter": 5}),
    ("cccp (2021)", {"solver": "cccp", "n_iter": 5}),
    ("spectral", {"solver": "spectral"}),
    ("8 columns", {"n_components": 8}),
)


class Split(NamedTuple):
    """Fitted rows and held-out rows, with their labels."""

    X: Any
    y: Any
    X_new: Any
    y_new: Any


class Outcome(NamedTuple):
    """What one way to embed came to."""

    name: str
    manifold: ReferenceManifold
    seconds: float
    accuracy: float


def split_digits() -> Split:
    """Split scikit-learn's 1,797 handwritten digits, centred by the mean of the fitted part."""
    X, y = load_digits(return_X_y=True)
    X_fit, X_new, y_fit, y_new = train_test_split(X, y, test_size=0.3, random_state=0, stratify=y)
    mean = X_fit.mean(axis=0)
    return Split(X_fit - mean, y_fit, X_new - mean, y_new)


def score_neighbours(rows: Any, labels: Any, new: Any, new_labels: Any) -> float:
    """Return how often five nearest neighbours among `rows` name the label of a new row."""
    return float(KNeighborsClassifier(5).fit(rows, labels).score(new, new_labels))


def embed(name: str, parameters: dict[str, Any], split: Split) -> Outcome:
    """Fit one manifold and score its held-out rows among the fitted ones, placed the same way."""
    manifold = ReferenceManifold(random_state=0, **parameters)
    start = time.perf_counter()
    manifold.fit(split.X, split.y)
    seconds = time.perf_counter() - start
    placed, placed_new = manifold.transform(split.X), manifold.transform(split.X_new)
    return Outcome(name, manifold, seconds, score_neighbours(placed, split.y, placed_new, split.y_new))


def compute_limits(split: Split) -> tuple[float, float]:
    """Return the floor (commonest digit) and the ceiling (neighbours in the raw features)."""
    floor = float(DummyClassifier().fit(split.X, split.y).score(split.X_new, split.y_new))
    return floor, score_neighbours(split.X, split.y, split.X_new, split.y_new)


def make_table(outcomes: Sequence[Outcome], floor: float, ceiling: float) -> Table:
    """Lay the outcomes out for a terminal."""
    headings = ("columns", "bandwidth", "steps", "graph", "seconds", "accuracy")
    title = "Supervised manifold on 1,797 digits: 1,257 fitted, 540 held out"
    grid = Table("embedding", *(Column(heading, justify="right") for heading in headings), title=title)
    for name, manifold, seconds, accuracy in outcomes:
        parameters = (f"{manifold.n_components}", f"{manifold.bandwidth:g}", f"{manifold.n_iter_}")
        grid.add_row(name, *parameters, manifold.graph_.method, f"{seconds:.2f}", f"{accuracy:.3f}")
    grid.add_section()
    grid.add_row("floor: guess", *[""] * 5, f"{floor:.3f}")
    grid.add_row("ceiling: raw", "64", *[""] * 4, f"{ceiling:.3f}")
    return grid


def draw_picture(split: Split, outcomes: Sequence[Outcome], floor: float, ceiling: float, path: Path) -> None:
    """Draw the fitted rows, the held-out rows and the accuracies between floor and ceiling."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 4.4), layout="constrained")
    *panels, bars = figure.subplots(1, 4, width_ratios=(1, 1, 1, 1.1))
    query, unlabelled = outcomes[0].manifold, outcomes[1].manifold
    for axes, points, labels, title in (
        (panels[0], query.embedding_, split.y, "query: fitted rows, with labels"),
        (panels[1], query.transform(split.X_new), split.y_new, "query: held-out rows"),
        (panels[2], unlabelled.transform(split.X_new), split.y_new, "no labels: held-out rows"),
    ):
        dots = axes.scatter(*points.T, c=labels, cmap="tab10", vmin=-0.5, vmax=9.5, s=9, linewidths=0)
        low, high = np.percentile(points, [3, 97], axis=0)
        margin = 0.1 * (high - low)
        axes.set(title=title, xticks=[], yticks=[], xlabel="(the middle 94% of the points)")
        axes.set_xlim(low[0] - margin[0], high[0] + margin[0])
        axes.set_ylim(low[1] - margin[1], high[1] + margin[1])
    figure.colorbar(dots, ax=panels[2], ticks=range(10), label="digit")
    bars.barh([outcome.name for outcome in outcomes], [outcome.accuracy for outcome in outcomes], color="#4c72b0")
    bars.axvline(floor, color="#c44e52", linestyle="--", label=f"floor {floor:.2f}")
    bars.axvline(ceiling, color="#55a868", linestyle="--", label=f"ceiling {ceiling:.2f}")
    bars.invert_yaxis()
    bars.set(title="held-out accuracy of 5 nearest neighbours", xlim=(0, 1.02))
    bars.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=2, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the demonstration."""
    parser = argparse.ArgumentParser(description="Fit the supervised manifold on the digits of scikit-learn.")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the picture")
    out = parser.parse_args(arguments).out
    console = Console()
    split = split_digits()
    floor, ceiling = compute_limits(split)
    outcomes = [embed(name, parameters, split) for name, parameters in track(SETTINGS, "embedding", console=console)]
    console.print(make_table(outcomes, floor, ceiling))
    console.print("Nothing here is private yet: this is the query that the releases will protect.")
    draw_picture(split, outcomes, floor, ceiling, out / "demo.png")
    console.print(f"picture: {out / 'demo.png'}", soft_wrap=True)


if __name__ == "__main__":
    main()
