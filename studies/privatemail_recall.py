"""Recall@8 over epsilon, of PrivateMail and everything it was compared with (figure 6 of 2022, figure 4 of 2021)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nearveil.release._privatemail_published import step_epsilon
from studies._privatemail import (
    ANCHORS,
    DELTA,
    EPSILONS,
    SETS,
    averaged,
    ceiling,
    files,
    floor,
    images,
    shown,
)
from studies._privatemail_methods import (
    DSNE_ANCHORS,
    FIRST,
    FIRST_DELTAS,
    FIRST_EPSILONS,
    GROUPS,
    PAPER,
    PCA_COLUMNS,
    PLAIN,
    PROGRAM,
    PROJECTION_2012,
    SETS_OF,
    UNSOUND,
    methods_of,
)
from studies._report import table
from studies._study import Case, Row, Study, grouped
from studies._style import ceiling as draw_ceiling
from studies._style import curve, epsilon_axis, legend_below
from studies._style import floor as draw_floor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DATA: tuple[Any, ...] = ("cub200", "cars196", "cifar100")
FIRST_DATA = ("cub200", "cars196")  # figure 4 of 2021 has these two
SEEDS = (0, 1, 2)
GALLERY = 4000
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
    return [
        {"data": data, "seed": seed, "group": group}
        for data in DATA
        for seed in SEEDS
        for group in GROUPS
        if group != "first" or data in FIRST_DATA
    ]


def measure(case: Case) -> list[Row]:
    """Ask all methods of a group at all epsilons."""
    data, seed = case["data"], case["seed"]
    drawn = images(data, seed, gallery=GALLERY)
    rows = []
    for found in GROUPS[case["group"]](data, drawn, seed):
        epsilon, delta = found["epsilon"], found["delta"]
        top = None if epsilon is None else ceiling(epsilon, drawn.n_classes, delta)
        sound = found["method"] not in (*UNSOUND, *PLAIN)
        limits = {"ceiling": top, "floor": floor(drawn.n_classes), "classes": drawn.n_classes, "sound": sound}
        rows.append({"data": data, "seed": seed, **found, **limits, "queries": len(drawn.queries)})
    return rows


def figures(rows: Sequence[Row]) -> "dict[str, Figure]":
    """Draw figure 6 of 2022, a column a set, and figure 4 g, h of 2021."""
    return {"epsilon": _second(rows), "strong-composition": _first(rows)}


def _second(rows: Sequence[Row]) -> "Figure":
    from matplotlib.figure import Figure

    rows = [row for row in rows if row["method"] != FIRST]
    figure = Figure(figsize=(10.8, 7.6), layout="constrained")
    panels = figure.subplots(2, len(grouped(rows, "data")), sharey=True, squeeze=False)
    for column, ((data,), own) in zip(panels.T, grouped(rows, "data").items(), strict=True):
        for axes, methods, kind in (
            (column[0], ABOVE, "do not protect the query"),
            (column[1], BELOW, "protect the query"),
        ):
            _limits(axes, own[0]["classes"], EPSILONS)
            for method in methods:
                _drawn(axes, own, method)
            for method in PLAIN:
                found = averaged([row for row in own if row["method"] == method])
                label = LABELS.get(method, method)
                curve(axes, method, [EPSILONS[0], EPSILONS[-1]], [found, found], label=label)
            axes.set_title(f"{SETS[data].title}: {kind}")
            epsilon_axis(axes, (0.01, 0.1, 1, 4, 16))
            axes.set_ylim(0, 1.03)
    for axes in panels[:, 0]:
        axes.set_ylabel("Recall@8, straight from the ranking")
    legend_below(figure, [panels[0][0], panels[1][0]], ncols=3)
    return figure


def _drawn(axes: "Axes", rows: Sequence[Row], method: str) -> None:
    groups = grouped([row for row in rows if row["method"] == method], "epsilon")
    means = [averaged(group) for group in groups.values()]
    label = LABELS.get(method, method)
    curve(axes, method, [key[0] for key in groups], means, sound=method not in UNSOUND, label=label)


def _limits(axes: "Axes", n_classes: int, epsilons: Sequence[float], delta: float = DELTA) -> None:
    x = np.geomspace(epsilons[0], epsilons[-1], 60).tolist()
    draw_ceiling(axes, x, [ceiling(epsilon, n_classes, delta) for epsilon in x], top=1.03)
    draw_floor(axes, floor(n_classes))


def _first(rows: Sequence[Row]) -> "Figure":
    from matplotlib.figure import Figure

    ours = grouped([row for row in rows if row["method"] == FIRST], "data")
    figure = Figure(figsize=(9.6, 4.6), layout="constrained")
    panels = figure.subplots(1, max(1, len(ours)), sharey=True, squeeze=False)[0]
    for axes, ((data,), own) in zip(panels, ours.items(), strict=False):
        _limits(axes, own[0]["classes"], FIRST_EPSILONS)
        for place, ((delta,), group) in enumerate(grouped(own, "delta").items()):
            points = {key[0]: averaged(part) for key, part in grouped(group, "epsilon").items()}
            label = f"{FIRST}, delta {delta:g}"
            curve(axes, label, list(points), list(points.values()), sound=False, place=place + 1)
        raw = averaged([row for row in rows if (row["data"], row["method"]) == (data, "no privacy")])
        curve(axes, "no privacy", [FIRST_EPSILONS[0], FIRST_EPSILONS[-1]], [raw, raw], label="raw features, no privacy")
        axes.set_title(f"{SETS[data].title}: two noisy iterations, strong composition")
        epsilon_axis(axes, FIRST_EPSILONS, label="epsilon of one query, as the paper composes it")
        axes.set_xticks(FIRST_EPSILONS, [f"{epsilon:.2g}" for epsilon in FIRST_EPSILONS])  # the last two are close
        axes.set_ylim(0, 1.03)
    panels[0].set_ylabel("Recall@8, straight from the ranking")
    legend_below(figure, panels, ncols=2)
    return figure


def tell(rows: Sequence[Row]) -> str:
    """Show both figures and say which curves leak."""
    return "\n\n".join(
        [
            "## Figure 6 of 2022",
            "![Recall@8 over epsilon on three sets. Above, methods that do not protect the query: the authors' program "
            "lies mostly in the impossible region. Below, methods that do: covers follow the ceiling, the "
            "others stay near the floor.](privatemail-recall-epsilon.svg)",
            _leaks(rows),
            _above(rows),
            _figure_6_table(rows),
            "## Figure 4 (g, h) of 2021",
            "![Recall@8 over epsilon with strong composition, at delta 0.99 and at delta 0.00001, on two sets.]"
            "(privatemail-recall-strong-composition.svg)",
            _first_words(rows),
            _first_table(rows),
        ]
    )


def _leaks(rows: Sequence[Row]) -> str:
    """Say which curves pass the ceiling, each by the interval over seeds."""
    found: dict[str, list[str]] = {}
    for (method, data, epsilon), group in grouped([r for r in rows if r["method"] != FIRST], *_POINT).items():
        if epsilon is not None and averaged(group).low > group[0]["ceiling"]:
            found.setdefault(method, []).append(f"{SETS[data].title} at {epsilon:g}")
    sound = [method for method in found if method in BELOW]
    lines = [f"- {method}: {', '.join(places)}" for method, places in found.items()]
    return (
        "**Above the ceiling**, with the whole 95% interval, are:\n\n"
        + "\n".join(lines or ["- none"])
        + "\n\nNone of them promises anything about the query: the program uses the query's own label after the noise "
        "([what its recall is made of](label-leak.md)), private PCA sends the query's projection in the clear and "
        "its epsilon is for the set that the directions come from (at a small epsilon they are mostly noise, and a "
        "query in the clear is found by such directions, too), and the random projections of 2012 hide one attribute, "
        "not a record. "
        + (f"**Sound methods above the ceiling: {', '.join(sound)}.**" if sound else "No sound method is among them.")
    )


def _above(rows: Sequence[Row]) -> str:
    """Say how the sound ones do at one epsilon."""
    parts = []
    for (data,), own in grouped(rows, "data").items():
        here = [row for row in own if row["epsilon"] == _MIDDLE and row["method"] in BELOW]
        by = {key[0]: averaged(group).value for key, group in grouped(here, "method").items()}
        best = ", ".join(f"{LABELS.get(name, name)} {by[name]:.2f}" for name in sorted(by, key=lambda name: -by[name]))
        top = ceiling(_MIDDLE, own[0]["classes"])
        parts.append(f"{SETS[data].title}: {best} (ceiling {top:.2f}, floor {own[0]['floor']:.2f})")
    return (
        f"Of those that do protect the query, at epsilon {_MIDDLE:g}: " + "; ".join(parts) + ". Eight random items "
        "have eight classes that may coincide, so a method can lie somewhat below the floor. The paper's own "
        "algorithm, label and all, finds no more than chance: its label weights do not sort by class, as those of the "
        "program do ([over iterations](privatemail-convergence.md))."
    )


def _figure_6_table(rows: Sequence[Row]) -> str:
    head = ["data", "method", "protects the query", *(f"eps {epsilon:g}" for epsilon in EPSILONS)]
    lines = []
    rows = [row for row in rows if row["method"] != FIRST]
    for (data,), own in grouped(rows, "data").items():
        for method in (name for name in (*BELOW, *ABOVE, *PLAIN) if name in methods_of(own)):
            groups = grouped([row for row in own if row["method"] == method], "epsilon")
            cells = [f"{averaged(groups[key,]).value:.2f}" if (key,) in groups else "" for key in EPSILONS]
            if method in PLAIN:  # at no epsilon, and better than at any
                cells[-1] = f"{averaged(groups[None,]).value:.2f} without"
            lines.append([SETS[data].title, LABELS.get(method, method), "yes" if method in BELOW else "no", *cells])
        tops = [f"{ceiling(epsilon, own[0]['classes']):.2f}" for epsilon in EPSILONS]
        lines.append([SETS[data].title, "*ceiling*", "", *tops])
    return table(head, lines) + "\n\nMeans over seeds; the intervals are in the figure, all values in the CSV."


def _first_words(rows: Sequence[Row]) -> str:
    ours = [row for row in rows if row["method"] == FIRST]
    best = max((averaged(group).value for group in grouped(ours, "data", "delta", "epsilon").values()), default=0.0)
    least = step_epsilon(FIRST_EPSILONS[0], 2, FIRST_DELTAS[0])
    return (
        "The axis of the paper's figure says *for delta = 0.99*. A promise that may fail with a probability of 0.99 "
        f"excludes nothing: the ceiling there is {ceiling(FIRST_EPSILONS[0], 98, FIRST_DELTAS[0]):.2f} at every "
        f"epsilon, and two iterations of epsilon {least:.3f} each are stated as {FIRST_EPSILONS[0]:g} together. "
        f"The grey region is for delta {DELTA:g}, where the same two iterations get less epsilon each. The "
        f"figure's rise could not be reproduced from the text: whatever delta, recall is at most {best:.2f} with the "
        "noise of Corollary 1.1, the label weights of the text and the query's label."
    )


def _first_table(rows: Sequence[Row]) -> str:
    head = ["data", "delta", "epsilon, composed", "epsilon of an iteration", "Recall@8", "ceiling"]
    lines = []
    for (data, delta, epsilon), group in grouped(
        [row for row in rows if row["method"] == FIRST], "data", "delta", "epsilon"
    ).items():
        cells = [f"{delta:g}", f"{epsilon:g}", f"{group[0]['step']:.4f}", shown(averaged(group))]
        lines.append([SETS[data].title, *cells, f"{group[0]['ceiling']:.2f}"])
    return table(head, lines)


_POINT = ("method", "data", "epsilon")
_MIDDLE = 4.0

STUDY = Study(
    name="privatemail-recall",
    title="PrivateMail 2022, figure 6, and 2021, figure 4: recall over epsilon",
    about=(
        "Every method answers with eight items, straight from the server's ranking, as in the papers; nothing is "
        "re-ranked by the client, because Recall@8 by class then hardly measures the message. Classes up to the middle "
        "are public, gallery and queries are of the others. Queries are not in the gallery, and as many of each "
        "class, so that Theorem C of the [theory](../../theory/ceiling.md) holds for them: no (epsilon, delta)-private "
        "message finds the class among eight more often than the grey region's edge. The floor is an answer of eight "
        "classes that is the same for everybody.\n\n"
        "Published versions have the parameters of the paper's Table 2 and are told the query's label, as they ask. "
        "PrivateMail made sound has the same bandwidth and columns, noise by a proved sensitivity, and no label. "
        "Covers name one of the server's sets; the server, which knows its labels (as the papers' does), answers with "
        "an item of each of the set's eight commonest classes. In normal use the client gets the whole set and "
        "re-ranks it, which finds more. How many sets there are at which epsilon was chosen among 10, 20 and 40 by a "
        "look at queries of CUB. SMLQ without privacy is our out-of-sample map, which knows no label of the query, "
        "with two columns and its default bandwidth of 0.4. "
        "Features are those of EfficientNet-Lite0, where the paper has CGD and ResNet-50: raw features stand for its "
        "non-private state of the art. The seed draws images, starts and noise."
    ),
    cases=cases,
    measure=measure,
    figures=figures,
    tell=tell,
    data=files("cub200", "cars196", "cifar100"),
    parameters={
        "delta": DELTA,
        "anchors": ANCHORS,
        "gallery at most": GALLERY,
        "DP-dSNE anchors": DSNE_ANCHORS,
        "private PCA columns": PCA_COLUMNS,
        "random projection columns": 64,
        "covers, sets by epsilon": {f"{epsilon:g}:": count for epsilon, count in SETS_OF.items()},
        "covers, maps learned for": "epsilon 1, 2, 4 and 8, the nearest",
    },
    seeds=SEEDS,
)
