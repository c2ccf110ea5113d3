"""What columns, label weight and bandwidth do to PrivateMail, with noise and without (figure 5 of 2022)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nearveil.privacy.noise import unsafe_seeded
from nearveil.privatemail import PrivateMail
from nearveil.privatemail.published import EXPERIMENTS
from studies import _figures as draw
from studies import _privatemail as shared
from studies._privatemail import DELTA, SETS, Images, find_nearest
from studies._report import interval, round_up
from studies._study import Case, Row, Study, list_cases, select, summarise

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
_PAIRS = ((PROGRAM, PROGRAM_PLAIN), (SOUND, SOUND_PLAIN))
_LABELS = {
    PROGRAM: f"the authors' program, nominal epsilon {EPSILON:g}, target's label in it",
    PROGRAM_PLAIN: "the same without noise, target's label in it",
    SOUND: f"PrivateMail made sound, epsilon {EPSILON:g}",
    SOUND_PLAIN: "the same without noise (not private)",
}


def cases() -> list[Case]:
    """Return one case a set, seed and parameter: its values share the images."""
    return list_cases(data=DATA, seed=SEEDS, parameter=VALUES)


def measure(case: Case) -> list[Row]:
    """Vary one parameter, the others being those of Table 2."""
    data, seed, name = case["data"], case["seed"], case["parameter"]
    drawn = shared.sample_images(data, seed, gallery=GALLERY)
    together = np.vstack(shared.normalise_rows(drawn))
    cosines = together @ together.T
    top, bottom = shared.compute_ceiling(EPSILON, drawn.n_classes), shared.compute_floor(drawn.n_classes)
    rows = []
    for value in VALUES[name]:
        setting: dict[str, Any] = {"n_components": 2, **EXPERIMENTS[data], name: value}
        program = shared.make_published("2022-code", data, drawn, seed, epsilon=EPSILON, **setting)
        server = program.embed_gallery(drawn.gallery, drawn.gallery_labels)
        results = {
            PROGRAM: shared.ask_with_label(program, server, drawn, seed),
            PROGRAM_PLAIN: _ask_without_noise(drawn, cosines, seed, **setting),
            **_ask_sound(drawn, seed, setting),
        }
        common = {"data": data, "parameter": name, "value": float(value), "seed": seed, "epsilon": EPSILON}
        limits = {"ceiling": top, "floor": bottom}
        rows += [{**common, "method": method, "recall": share, **limits} for method, share in results.items()]
    return rows


def _ask_without_noise(drawn: Images, cosines: Any, seed: int, *, n_components: int, **setting: float) -> float:
    """Return the recall of the program's query, all labels known, the targets' among them, without noise."""
    labels, n = np.concatenate([drawn.gallery_labels, drawn.query_labels]), len(drawn.gallery_labels)
    start = np.random.default_rng([seed, n_components]).normal(size=(len(labels), n_components))
    *_, Z = shared.walk(cosines, start, steps=STEPS, **shared.follow_program(labels, **setting))
    return drawn.score(find_nearest(Z[n:], Z[:n]))


def _ask_sound(drawn: Images, seed: int, setting: dict[str, Any]) -> dict[str, float]:
    """Return the recall of the sound version, with its noise and, for comparison, without."""
    mail = PrivateMail(EPSILON, delta=DELTA, n_public_steps=STEPS, public_seed=seed, **setting)
    mail = mail.fit(drawn.anchors, drawn.anchor_labels)
    server = mail.embed_gallery(drawn.gallery)
    messages = mail.release(drawn.queries, rng=unsafe_seeded(seed))
    places = {
        SOUND: np.vstack([message["embedding"] for message in messages]),
        SOUND_PLAIN: mail.embed_gallery(drawn.queries).gallery,
    }
    return {name: drawn.score(find_nearest(Z, server.gallery)) for name, Z in places.items()}


def figures(rows: pd.DataFrame) -> dict[str, Figure]:
    """Draw a column a parameter; above as published, below what is sound."""
    results = {}
    for data, subset in rows.groupby("data", sort=False):
        figure, panels = draw.make_panels(2, len(VALUES), (10.5, 6.6), sharey=True)
        for column, (name, group) in zip(panels.T, subset.groupby("parameter", sort=False), strict=True):
            for axes, methods, kind in zip(column, _PAIRS, ("as published", "sound"), strict=True):
                _draw_panel(axes, group, methods)
                axes.set(title=f"{SETS[data].title}, {kind}", xlabel=NAMES[name])
        draw.finish(figure, panels, "Recall@8", ncols=2)
        results[data] = figure
    return results


def _draw_panel(axes: Axes, rows: pd.DataFrame, methods: Sequence[str]) -> None:
    values = list(rows["value"].unique())
    edges = [-0.3, len(values) - 0.7]
    draw.ceiling(axes, edges, [rows["ceiling"].iloc[0]] * 2, top=1.03)
    draw.floor(axes, rows["floor"].iloc[0])
    places = rows.assign(position=rows["value"].map(values.index))
    for method in methods:
        draw.curves(axes, places, "recall", "position", only=[method], labels=_LABELS, unsound=[PROGRAM], index=2)
    axes.set_xticks(range(len(values)), [f"{value:g}" for value in values])
    axes.set(ylim=(0, 1.03), xlim=edges)


def facts(rows: pd.DataFrame) -> dict[str, Any]:
    """Return how much each parameter does."""
    keys = ["data", "parameter", "method"]
    means = summarise(rows, "recall", *keys, "value")
    ends = means["value"].groupby(level=keys, sort=False).agg(["idxmin", "idxmax"])
    cells = ends.map(lambda key: f"{key[-1]:g}: {interval(means.loc[key], '.2f', 0, 1)}")
    lines = cells.set_axis(["lowest, at", "highest, at"], axis=1).reset_index()
    return {
        "sets": {name: SETS[name].title for name in rows["data"].unique()},
        "ceiling": round_up(rows["ceiling"].max()),
        "floor": rows["floor"].min(),
        "without_labels": select(rows, method=PROGRAM, parameter="label_weight", value=0.0)["recall"].mean(),
        "ends": lines.assign(
            data=[SETS[name].title for name in lines["data"]], parameter=lines["parameter"].map(NAMES)
        ),
    }


PARAMETERS = {
    "epsilon": EPSILON,
    "delta": DELTA,
    "anchors": shared.ANCHORS,
    "gallery": GALLERY,
    "public steps": STEPS,
    "others": "Table 2 of the 2022 paper",
}
STUDY = Study("privatemail-parameters", cases, measure, figures, facts, shared.list_files(*DATA), PARAMETERS, SEEDS)
