"""What the published recall is made of: the target's label, which was to be hidden."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nearveil.privacy.noise import unsafe_seeded
from studies import _figures as draw
from studies import _privatemail as shared
from studies._privatemail import SETS, K
from studies._report import round_up
from studies._study import Case, Row, Study, list_cases, summarise

PAPERS: tuple[Any, ...] = ("cars196", "cub200")
DATA = PAPERS if shared.has_files(*PAPERS) else ("digits",)
NOTE = (
    ""
    if DATA == PAPERS
    else "The papers' images are not on this machine (NEARVEIL_DATA names their folder). These are the digits that "
    "scikit-learn carries: 100 classes are tenths of a digit's images along their first principal component; the 50 of "
    "the digits 0 to 4 are public, and those of 5 to 9 are searched. So there are some 900 anchors and a gallery of "
    "some 850 images, the features are pixels, and the ceiling is higher, as there are fewer classes. The label leaks "
    "less here than with the papers' images."
)
SEEDS = (0, 1, 2, 3, 4)
EPSILON = 0.01
GALLERY = 4000
BARS = (("true", "true"), ("random", "true"), ("true", "random"), ("random", "random"))  # features, label
APART = "true, numbered apart"  # classes of gallery and queries numbered after those of the anchors, not from 0


def cases() -> list[Case]:
    """Return one case a set and seed: the four bars share the server's embedding."""
    return list_cases(data=DATA, seed=SEEDS)


def measure(case: Case) -> list[Row]:
    """Ask the authors' program with true and random features, and true and random labels."""
    data, seed = case["data"], case["seed"]
    drawn = shared.sample_images(data, seed, gallery=GALLERY)
    table = "cars196" if data == "digits" else data
    mail = shared.make_published("2022-code", table, drawn, seed, epsilon=EPSILON)
    server = mail.embed_gallery(drawn.gallery, drawn.gallery_labels)
    generator = np.random.default_rng([seed, 7])
    features = {"true": drawn.queries, "random": generator.normal(size=drawn.queries.shape)}
    first = int(drawn.anchor_labels.max()) + 1
    labels = {
        "true": drawn.query_labels,
        "random": generator.integers(0, drawn.n_classes, len(drawn.query_labels)),
        APART: drawn.query_labels + first,
    }
    servers = {APART: mail.embed_gallery(drawn.gallery, drawn.gallery_labels + first)}
    top, bottom = shared.compute_ceiling(EPSILON, drawn.n_classes), shared.compute_floor(drawn.n_classes)
    limits: Row = {"queries": len(drawn.queries), "classes": drawn.n_classes, "ceiling": top, "floor": bottom}
    rows = []
    for number, (feature_kind, label_kind) in enumerate((*BARS, ("true", APART))):
        messages = mail.release(
            features[feature_kind], labels=labels[label_kind], rng=unsafe_seeded(10 * seed + number)
        )
        embedded = servers.get(label_kind, server)
        chosen = np.stack([np.argsort(-mail.rank_each(message, embedded)[0])[:K] for message in messages])
        input_recall = drawn.score(chosen, labels[label_kind] - (first if label_kind == APART else 0))
        kind: Row = {"features": feature_kind, "label": label_kind, "epsilon": EPSILON}
        rows.append({**case, **kind, "recall": drawn.score(chosen), "recall_of_told_label": input_recall, **limits})
    return rows


def figures(rows: pd.DataFrame) -> dict[str, Figure]:
    """Draw four bars a set, under the ceiling."""
    figure, panels, cells = draw.make_grid(rows, (9.6, 4.6), column="data", sharey=True)
    for axes, data, group in cells:
        _draw_bars(axes, group)
        axes.set_title(f"{SETS[data].title}: {group['classes'].iloc[0]} classes, nominal epsilon {EPSILON:g}")
    draw.finish(figure, panels, "Recall@8")
    return {"bars": figure}


def _draw_bars(axes: Axes, rows: pd.DataFrame) -> None:
    top = rows["ceiling"].iloc[0]
    means = summarise(rows, "recall", "features", "label")
    axes.axhspan(top, 1.04, color="0.86", linewidth=0, zorder=0.5, label=draw.IMPOSSIBLE)
    axes.axhline(top, color="0.35", linewidth=1.2, zorder=0.6)
    for position, bar in enumerate(BARS):
        results = means.loc[bar]
        leaks = results.low > top
        colour, hatch = (draw.COLOURS["red"], "//") if leaks else (draw.COLOURS["blue"], None)
        axes.bar(position, results.value, width=0.62, color=colour, hatch=hatch, edgecolor="white", zorder=2)
        spread = [[results.value - max(results.low, 0)], [results.high - results.value]]
        axes.errorbar(position, results.value, yerr=spread, color="black", capsize=4, linewidth=1.1, zorder=3)
        words: Any = {"ha": "center", "zorder": 4, "weight": "bold"}
        axes.text(position, min(max(results.high, top) + 0.015, 0.98), f"{results.value:.2f}", va="bottom", **words)
        if leaks:
            frame = {"facecolor": "white", "edgecolor": draw.COLOURS["red"], "boxstyle": "round"}
            axes.text(position, results.value / 2 + top / 2, "the label\nleaked", va="center", bbox=frame, **words)
    draw.floor(axes, rows["floor"].iloc[0], zorder=2.5)
    axes.text(2.5, 0.6, "impossible for\na private message", ha="center", va="center", fontsize=12, color="0.2")
    arrow = {"arrowstyle": "->"}
    axes.annotate(f"ceiling {round_up(top)}", (2.5, top), (2.5, 0.3), ha="center", color="0.2", arrowprops=arrow)
    axes.set_xticks(range(4), [f"{features}\nfeatures,\n{label}\nlabel" for features, label in BARS])
    axes.set(ylim=(0, 1.04), xlim=(-0.5, 3.5))
    axes.grid(visible=False, axis="x")


def facts(rows: pd.DataFrame) -> dict[str, Any]:
    """Return what the bars say, in numbers."""
    keys = ["data", "features", "label"]
    lines = pd.DataFrame(
        {
            "Recall@8": shared.show(rows, "recall", *keys),
            "Recall@8 of the label in the input": shared.show(rows, "recall_of_told_label", *keys),
            "ceiling": rows.groupby(keys, sort=False)["ceiling"].first().map(round_up),
            "floor": rows.groupby(keys, sort=False)["floor"].first().map("{:.3f}".format),
        }
    ).reset_index()
    means = rows.groupby(keys, sort=False)["recall"].mean()
    return {
        "sets": [
            {
                "title": SETS[data].title,
                "recall": [means[data, *bar] for bar in BARS],
                "apart": means[data, "true", APART],
                "ceiling": round_up(group["ceiling"].iloc[0]),
            }
            for data, group in rows.groupby("data", sort=False)
        ],
        "recalls": lines.assign(data=[SETS[name].title for name in lines["data"]]),
    }


PARAMETERS = {
    "nominal epsilon": EPSILON,
    "delta": shared.DELTA,
    "anchors": shared.ANCHORS,
    "gallery": GALLERY,
    "queries per class": 1,
    "others": "Table 2 of the 2022 paper",
}
STUDY = Study("label-leak", cases, measure, figures, facts, shared.list_files(*DATA), PARAMETERS, SEEDS, note=NOTE)
