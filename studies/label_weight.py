"""What the labels of the query do to rows that it has not seen."""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sklearn.model_selection import train_test_split

from nearveil import SupervisedManifold
from studies._report import table
from studies._study import Case, Row, Study, grouped, mean
from studies._style import curve, floor, legend_below
from studies.data import load_features
from studies.demo import Split, digits, limits, neighbours_accuracy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BANDWIDTHS = (0.3, 0.4, 0.5, 6.0)
LABEL_WEIGHTS = (0.0, 0.003, 0.03, 0.1, 0.6)
SEEDS = (0, 1, 2, 3, 4)
BIRD_CLASSES = 20
TITLES = {"digits": "digits, 10 classes", "birds": f"CUB-200-2011, {BIRD_CLASSES} classes"}


@functools.cache
def split(data: str) -> Split:
    """Return digits, or the first 20 classes of birds, centred by the mean of the public half."""
    if data == "digits":
        return digits()
    everything = load_features("cub200_cropped_lite0")
    chosen = everything.labels < BIRD_CLASSES
    X = everything.features[chosen] - everything.features[everything.labels < 100].mean(axis=0)
    y = everything.labels[chosen]
    X_fit, X_new, y_fit, y_new = train_test_split(X, y, test_size=0.3, random_state=0, stratify=y)
    return Split(X_fit, y_fit, X_new, y_new)


def cases() -> list[Case]:
    """Return one case a set and bandwidth."""
    return [{"data": data, "bandwidth": bandwidth} for data in TITLES for bandwidth in BANDWIDTHS]


def measure(case: Case) -> list[Row]:
    """Embed fitted and held-out rows from several starts, at every label weight."""
    own = split(case["data"])
    bottom, top = limits(own)
    rows = []
    for weight in LABEL_WEIGHTS:
        for seed in SEEDS:
            manifold = SupervisedManifold(bandwidth=case["bandwidth"], label_weight=weight, random_state=seed)
            manifold.fit(own.X, own.y)
            placed, placed_new = manifold.transform(own.X), manifold.transform(own.X_new)
            score = neighbours_accuracy(placed, own.y, placed_new, own.y_new)
            rows.append({**case, "label_weight": weight, "seed": seed, "accuracy": score, "floor": bottom, "raw": top})
    return rows


def figures(rows: Sequence[Row]) -> "dict[str, Figure]":
    """Draw accuracy over label weight, a curve a bandwidth."""
    from matplotlib.figure import Figure

    sets = grouped(rows, "data")
    figure = Figure(figsize=(5 * len(sets), 4.4), layout="constrained")
    panels = figure.subplots(1, len(sets), sharey=True, squeeze=False)[0]
    for axes, ((data,), own) in zip(panels, sets.items(), strict=True):
        axes.axhline(own[0]["raw"], color="black", linestyle="-.", linewidth=1.4, label="raw features")
        for place, ((bandwidth,), group) in enumerate(grouped(own, "bandwidth").items()):
            means = [_accuracy(part) for part in grouped(group, "label_weight").values()]
            curve(axes, f"bandwidth {bandwidth:g}", range(len(means)), means, place=place)
        floor(axes, own[0]["floor"], label="floor: the commonest class")
        weights = [key[0] for key in grouped(own, "label_weight")]
        axes.set_xticks(range(len(weights)), [f"{weight:g}" for weight in weights])
        axes.set(title=TITLES[data], xlabel="label weight alpha", ylim=(0, 1.03))
    panels[0].set_ylabel("held-out accuracy, 5 neighbours")
    legend_below(figure, panels, ncols=3)
    return {"accuracy": figure}


def tell(rows: Sequence[Row]) -> str:
    """Say at which weight each bandwidth is best."""
    parts = [
        "![Held-out accuracy over label weight: at narrow bandwidths it falls as the weight grows; at bandwidth 6 "
        "it is low throughout.](label-weight-accuracy.svg)"
    ]
    for (data,), own in grouped(rows, "data").items():
        lines, best = [], []
        for (bandwidth,), group in grouped(own, "bandwidth").items():
            found = {key[0]: _accuracy(part) for key, part in grouped(group, "label_weight").items()}
            top = max(found, key=lambda weight: found[weight].value)
            best.append(f"{top:g} at bandwidth {bandwidth:g}")
            cells = [f"{one.value:.3f} ({one.low:.2f} to {one.high:.2f})" for one in found.values()]
            lines.append([f"{bandwidth:g}", *cells])
        weights = [f"weight {key[0]:g}" for key in grouped(own, "label_weight")]
        parts += [
            f"{TITLES[data]}: floor {own[0]['floor']:.3f}, raw features {own[0]['raw']:.3f}. The best label weight is "
            f"{', '.join(best)}.",
            table(["bandwidth", *weights], lines),
        ]
    parts.append(
        "The label graph is strongest within a class and enters with a minus sign: the query pushes a class apart "
        "([why](../../theory/manifold.md)). Means over starts with 95% intervals."
    )
    return "\n\n".join(parts)


def _accuracy(rows: Sequence[Row]) -> Any:
    return mean(row["accuracy"] for row in rows)


STUDY = Study(
    name="label-weight",
    title="Labels do not help rows that have none",
    about=(
        "The supervised manifold is fitted with labels, and rows that it has not seen are placed without. *Accuracy* "
        "is how often five nearest neighbours among the fitted rows, placed the same way, name the class. Nothing here "
        "is private. The seed draws the start."
    ),
    cases=cases,
    measure=measure,
    figures=figures,
    tell=tell,
    data=("digits of scikit-learn", "cub200_cropped_lite0/cub200_cropped_lite0.npz"),
    parameters={"columns": 2, "steps": 20, "held out": 0.3},
    seeds=SEEDS,
)
