"""What columns, label weight and bandwidth do to PrivateMail, with noise and without (figure 5 of 2022)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nearveil.privacy.noise import unsafe_seeded
from nearveil.release import PrivateMail
from studies._privatemail import (
    ANCHORS,
    DELTA,
    SETS,
    Images,
    K,
    PartlyLabelled,
    averaged,
    bound,
    ceiling,
    files,
    floor,
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
from studies._style import ceiling as draw_ceiling
from studies._style import curve, legend_below
from studies._style import floor as draw_floor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DATA: tuple[Any, ...] = ("cub200", "cars196")
SEEDS = (0, 1, 2)
EPSILON = 0.1
GALLERY = 2000
STEPS = 5
VALUES: dict[str, tuple[float, ...]] = {
    "n_components": (2, 4, 8, 16, 32),
    "label_weight": (0.0, 0.1, 0.3, 0.6, 1.0),
    "bandwidth": (1.0, 2.0, 4.0, 6.0, 10.0),
}
NAMES = {"n_components": "columns k", "label_weight": "label weight alpha", "bandwidth": "bandwidth sigma"}
PROGRAM = "PrivateMail 2022, the authors' program"
PROGRAM_PLAIN = "SMLQ, no privacy"
SOUND = "PrivateMail, Gaussian"
SOUND_PLAIN = "sound, without noise"


def cases() -> list[Case]:
    """Return one case a set, seed and parameter: its values share the images."""
    return [{"data": data, "seed": seed, "parameter": name} for data in DATA for seed in SEEDS for name in VALUES]


def measure(case: Case) -> list[Row]:
    """Vary one parameter, the others being those of Table 2."""
    data, seed, name = case["data"], case["seed"], case["parameter"]
    drawn = images(data, seed, gallery=GALLERY)
    gallery, queries = unit_rows(drawn)
    together = np.vstack([gallery, queries])
    cosines = together @ together.T
    rows = []
    for value in VALUES[name]:
        setting: dict[str, Any] = {"n_components": 2, **table_2(data), name: value}
        setting["n_components"] = int(setting["n_components"])
        found = {
            PROGRAM: _program(drawn, data, seed, setting),
            PROGRAM_PLAIN: _plain(drawn, cosines, seed, **setting),
            **_sound(drawn, seed, setting),
        }
        common = {"data": data, "parameter": name, "value": float(value), "seed": seed, "epsilon": EPSILON}
        limits = {"ceiling": ceiling(EPSILON, drawn.n_classes), "floor": floor(drawn.n_classes)}
        rows += [{**common, "method": method, "recall": share, **limits} for method, share in found.items()]
    return rows


def _program(drawn: Images, data: Any, seed: int, setting: dict[str, Any]) -> float:
    """Return the recall of the authors' program, with its noise and the target's label."""
    mail = PrivateMail.published(
        "2022-code", data, epsilon=EPSILON, public_seed=seed, allow_unsound=True, **setting
    ).fit(drawn.anchors, drawn.anchor_labels)
    server = mail.embed_gallery(drawn.gallery, drawn.gallery_labels)
    messages = mail.release(drawn.queries, labels=drawn.query_labels, rng=unsafe_seeded(seed))
    chosen = np.stack([np.argpartition(-mail.rank_each(message, server)[0], K)[:K] for message in messages])
    return recall(chosen, drawn.gallery_labels, drawn.query_labels)


def _plain(
    drawn: Images, cosines: Any, seed: int, *, n_components: int, bandwidth: float, label_weight: float
) -> float:
    """Return the recall of the program's query, all labels known, the targets' among them, without noise."""
    labels = np.concatenate([drawn.gallery_labels, drawn.query_labels])
    start = np.random.default_rng([seed, n_components]).normal(size=(len(labels), n_components))
    repel, narrow = PartlyLabelled(labels), bandwidth / np.sqrt(2)  # the program divides by sigma^2
    *_, Z = walk(cosines, repel, start, bandwidth=narrow, label_weight=label_weight, steps=STEPS)
    n = len(drawn.gallery_labels)
    return recall(nearest(Z[n:], Z[:n]), drawn.gallery_labels, drawn.query_labels)


def _sound(drawn: Images, seed: int, setting: dict[str, Any]) -> dict[str, float]:
    """Return the recall of the sound version, with its noise and, for comparison, without."""
    mail = PrivateMail(EPSILON, delta=DELTA, n_public_steps=STEPS, public_seed=seed, **setting)
    mail.fit(drawn.anchors, drawn.anchor_labels)
    server = mail.embed_gallery(drawn.gallery)
    messages = mail.release(drawn.queries, rng=unsafe_seeded(seed))
    places = {
        SOUND: np.vstack([message["embedding"] for message in messages]),
        SOUND_PLAIN: mail.embed_gallery(drawn.queries).gallery,
    }
    return {
        name: recall(nearest(Z, server.gallery), drawn.gallery_labels, drawn.query_labels) for name, Z in places.items()
    }


def figures(rows: Sequence[Row]) -> "dict[str, Figure]":
    """Draw a column a parameter; above as published, below what is sound."""
    from matplotlib.figure import Figure

    found = {}
    for (data,), own in grouped(rows, "data").items():
        figure = Figure(figsize=(10.5, 6.6), layout="constrained")
        panels = figure.subplots(2, len(VALUES), sharey=True)
        for column, ((name,), group) in zip(panels.T, grouped(own, "parameter").items(), strict=True):
            for axes, noisy, plain, kind in (
                (column[0], PROGRAM, PROGRAM_PLAIN, "as published"),
                (column[1], SOUND, SOUND_PLAIN, "sound"),
            ):
                _panel(axes, group, noisy, plain)
                axes.set(title=f"{SETS[data].title}, {kind}", xlabel=NAMES[name])
        for axes in panels[:, 0]:
            axes.set_ylabel("Recall@8")
        legend_below(figure, [panels[0][0], panels[1][0]], ncols=2)
        found[data] = figure
    return found


def _panel(axes: "Axes", rows: Sequence[Row], noisy: str, plain: str) -> None:
    values = [key[0] for key in grouped(rows, "value")]
    places = list(range(len(values)))
    edges = [-0.3, len(values) - 0.7]
    draw_ceiling(axes, edges, [rows[0]["ceiling"]] * 2, top=1.03)
    draw_floor(axes, rows[0]["floor"])
    for method in (noisy, plain):
        groups = grouped([row for row in rows if row["method"] == method], "value")
        label = {
            PROGRAM: f"the authors' program, nominal epsilon {EPSILON:g}, target's label in it",
            PROGRAM_PLAIN: "the same without noise, target's label in it",
            SOUND: f"PrivateMail made sound, epsilon {EPSILON:g}",
            SOUND_PLAIN: "the same without noise (not private)",
        }[method]
        means = [averaged(group) for group in groups.values()]
        curve(axes, method, places, means, sound=method != PROGRAM, label=label, place=2)
    axes.set_xticks(places, [f"{value:g}" for value in values])
    axes.set(ylim=(0, 1.03), xlim=edges)


def tell(rows: Sequence[Row]) -> str:
    """Say how much each parameter does."""
    pictures, lines = [], []
    for (data,), own in grouped(rows, "data").items():
        pictures.append(
            f"![{SETS[data].title}: Recall@8 over columns, label weight and bandwidth. The published curves lie in the "
            "impossible region, unless the label weight is small; the sound ones with noise lie on the floor.]"
            f"(privatemail-parameters-{data}.svg)"
        )
        for (name, method), group in grouped(own, "parameter", "method").items():
            means = {key[0]: averaged(part) for key, part in grouped(group, "value").items()}
            best = max(means, key=lambda value: means[value].value)
            worst = min(means, key=lambda value: means[value].value)
            lines.append(
                [
                    SETS[data].title,
                    NAMES[name],
                    method,
                    f"{worst:g}: {shown(means[worst])}",
                    f"{best:g}: {shown(means[best])}",
                ]
            )
    top, bottom = max(row["ceiling"] for row in rows), min(row["floor"] for row in rows)
    none = averaged([row for row in rows if (row["method"], row["parameter"], row["value"]) == _NO_LABELS])
    return (
        "\n\n".join(pictures)
        + f"\n\nNo message that keeps epsilon {EPSILON:g} passes {bound(top)}; a constant answer reaches {bottom:.3f}. "
        f"With label weight 0 the authors' program, which then uses no label, finds {none.value:.2f}; what it "
        "finds at other weights comes with [the target's label](label-leak.md). The sound version uses no label of "
        "the target at all.\n\n"
        + table(["data", "parameter", "method", "lowest, at", "highest, at"], lines)
        + "\n\nMeans over seeds with 95% intervals."
    )


_NO_LABELS = (PROGRAM, "label_weight", 0.0)

STUDY = Study(
    name="privatemail-parameters",
    title="PrivateMail 2022, figure 5: columns, label weight, bandwidth",
    about=(
        "Each parameter is varied, the others being those of the paper's Table 2, with noise and without. Above, "
        "the authors' program: it embeds the target with its own label. Below, the sound version: the same query, a "
        "target without label, noise by a proved sensitivity, and five public steps. Eight items are taken straight "
        "from the server's ranking. Queries are not in the gallery, one of each class.\n\n"
        "The grey region is what no message can reach that keeps the epsilon; the curves without noise promise "
        "nothing, so they may lie there. Features are those of EfficientNet-Lite0, not of CGD. The seed draws images, "
        "start and noise."
    ),
    cases=cases,
    measure=measure,
    figures=figures,
    tell=tell,
    data=files("cub200", "cars196"),
    parameters={
        "epsilon": EPSILON,
        "delta": DELTA,
        "anchors": ANCHORS,
        "gallery": GALLERY,
        "public steps": STEPS,
        "others": "Table 2 of the 2022 paper",
    },
    seeds=SEEDS,
)
