"""What the published recall is made of: the target's label, which was to be hidden."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nearveil.privacy.noise import unsafe_seeded
from nearveil.release import PrivateMail
from studies._privatemail import (
    ANCHORS,
    DELTA,
    SETS,
    K,
    averaged,
    bound,
    ceiling,
    files,
    floor,
    images,
    recall,
    shown,
)
from studies._report import table
from studies._study import Case, Row, Study, grouped
from studies._style import COLOURS, FLOOR, IMPOSSIBLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DATA: tuple[Any, ...] = ("cars196", "cub200")
SEEDS = (0, 1, 2, 3, 4)
EPSILON = 0.01
GALLERY = 4000
BARS = (("true", "true"), ("random", "true"), ("true", "random"), ("random", "random"))  # features, label


def cases() -> list[Case]:
    """Return one case a set and seed: the four bars share the server's embedding."""
    return [{"data": data, "seed": seed} for data in DATA for seed in SEEDS]


def measure(case: Case) -> list[Row]:
    """Ask the authors' program with true and random features, and true and random labels."""
    data, seed = case["data"], case["seed"]
    drawn = images(data, seed, gallery=GALLERY)
    mail = PrivateMail.published("2022-code", data, epsilon=EPSILON, public_seed=seed, allow_unsound=True)
    mail.fit(drawn.anchors, drawn.anchor_labels)
    server = mail.embed_gallery(drawn.gallery, drawn.gallery_labels)
    generator = np.random.default_rng([seed, 7])
    features = {"true": drawn.queries, "random": generator.normal(size=drawn.queries.shape)}
    labels = {
        "true": drawn.query_labels,
        "random": generator.integers(0, drawn.n_classes, len(drawn.query_labels)),
    }
    rows = []
    for number, (asked, told) in enumerate(BARS):
        messages = mail.release(features[asked], labels=labels[told], rng=unsafe_seeded(10 * seed + number))
        chosen = np.stack([np.argsort(-mail.rank_each(message, server)[0])[:K] for message in messages])
        rows.append(
            {
                "data": data,
                "features": asked,
                "label": told,
                "epsilon": EPSILON,
                "seed": seed,
                "recall": recall(chosen, drawn.gallery_labels, drawn.query_labels),
                "recall_of_told_label": recall(chosen, drawn.gallery_labels, labels[told]),
                "queries": len(chosen),
                "classes": drawn.n_classes,
                "ceiling": ceiling(EPSILON, drawn.n_classes),
                "floor": floor(drawn.n_classes),
            }
        )
    return rows


def figures(rows: Sequence[Row]) -> "dict[str, Figure]":
    """Draw four bars a set, under the ceiling."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 4.6), layout="constrained")
    panels = figure.subplots(1, len(grouped(rows, "data")), sharey=True, squeeze=False)[0]
    for axes, ((data,), own) in zip(panels, grouped(rows, "data").items(), strict=True):
        _bars(axes, own)
        axes.set_title(f"{SETS[data].title}: {own[0]['classes']} classes, nominal epsilon {EPSILON:g}")
    panels[0].set_ylabel("Recall@8")
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3)
    return {"bars": figure}


def _bars(axes: "Axes", rows: Sequence[Row]) -> None:
    top = rows[0]["ceiling"]
    axes.axhspan(top, 1.04, color="0.86", linewidth=0, zorder=0.5, label=IMPOSSIBLE)
    axes.axhline(top, color="0.35", linewidth=1.2, zorder=0.6)
    for place, bar in enumerate(BARS):
        found = averaged([row for row in rows if (row["features"], row["label"]) == bar])
        leaks = found.low > top
        axes.bar(
            place,
            found.value,
            width=0.62,
            color=COLOURS["red"] if leaks else COLOURS["blue"],
            hatch="//" if leaks else None,
            edgecolor="white",
            zorder=2,
        )
        spread = [[found.value - max(found.low, 0)], [found.high - found.value]]
        axes.errorbar(place, found.value, yerr=spread, color="black", capsize=4, linewidth=1.1, zorder=3)
        height = min(max(found.high, top) + 0.015, 0.98)
        axes.text(place, height, f"{found.value:.2f}", ha="center", va="bottom", zorder=4, weight="bold")
        if leaks:
            axes.text(
                place,
                found.value / 2 + top / 2,
                "the label\nleaked",
                ha="center",
                va="center",
                zorder=4,
                weight="bold",
                bbox={"facecolor": "white", "edgecolor": COLOURS["red"], "boxstyle": "round"},
            )
    axes.axhline(rows[0]["floor"], color="black", linewidth=1.3, linestyle=(0, (1, 2.5)), label=FLOOR, zorder=2.5)
    axes.text(2.5, 0.6, "impossible for\na private message", ha="center", va="center", fontsize=12, color="0.2")
    axes.annotate(
        f"ceiling {bound(top)}", (2.5, top), (2.5, 0.3), ha="center", color="0.2", arrowprops={"arrowstyle": "->"}
    )
    axes.set_xticks(range(4), [f"{features}\nfeatures,\n{label}\nlabel" for features, label in BARS])
    axes.set(ylim=(0, 1.04), xlim=(-0.5, 3.5))
    axes.grid(visible=False, axis="x")


def tell(rows: Sequence[Row]) -> str:
    """Say what the bars say, in numbers."""
    head = ["data", "features", "label", "Recall@8", "of the label that was told", "ceiling", "floor"]
    lines, story = [], []
    for (data,), own in grouped(rows, "data").items():
        by = {key: averaged(group) for key, group in grouped(own, "features", "label").items()}
        top = own[0]["ceiling"]
        story.append(
            f"{SETS[data].title}: {by['true', 'true'].value:.2f} with true features and the true label, "
            f"{by['random', 'true'].value:.2f} with *random* features and the true label, "
            f"{by['true', 'random'].value:.2f} with true features and a random label. "
            f"No message that keeps epsilon {EPSILON:g} can pass {bound(top)}."
        )
        for (features, label), group in grouped(own, "features", "label").items():
            limits = [bound(top), f"{group[0]['floor']:.3f}"]
            told = shown(averaged(group, "recall_of_told_label"))
            lines.append([SETS[data].title, features, label, shown(averaged(group)), told, *limits])
    return (
        "![Bars of Recall@8. With the true label they are far above the ceiling, whatever the features; with a random "
        "label they are at chance, whatever the features.](label-leak-bars.svg)\n\n"
        + "\n\n".join(story)
        + "\n\nThe label that is told comes back, whether it is the right one or not. The features play no part.\n\n"
        + table(head, lines)
        + "\n\nMeans over seeds with 95% intervals. The ceiling is Theorem C of the "
        "[theory](../../theory/ceiling.md) for eight answered classes; the floor is an answer with items of eight "
        "classes that is the same for everybody."
    )


STUDY = Study(
    name="label-leak",
    title="The label leaks: what PrivateMail's published recall is made of",
    about=(
        "The authors' program reports a Recall@8 of 0.815 on Cars196 at epsilon 0.01. Here it runs as they run it "
        "(1,000 public anchors, a gallery of 4,000 images, one noisy step, five more that use the target's label), and "
        "is asked four times: with the query's features or with random ones, and with the query's label or with a "
        "random one. A private message would have to hide both.\n\n"
        "Queries are not in the gallery, one of each class. Our features are those of EfficientNet-Lite0, not of CGD: "
        "as the bars show, it makes no difference. The seed draws the images, the starts and the noise."
    ),
    cases=cases,
    measure=measure,
    figures=figures,
    tell=tell,
    data=files("cars196", "cub200"),
    parameters={
        "nominal epsilon": EPSILON,
        "delta": DELTA,
        "anchors": ANCHORS,
        "gallery": GALLERY,
        "queries a class": 1,
        "others": "Table 2 of the 2022 paper",
    },
    seeds=SEEDS,
)
