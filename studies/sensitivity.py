"""How far one record can move the first step: as published, as proved, and as a search finds."""

from functools import cache
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from nearveil.graph import Encoding
from nearveil.privacy.sensitivity import bounds, published_2022
from nearveil.privacy.sensitivity.bounds import checked_start, label_floor
from studies import _figures as draw
from studies._sensitivity_search import normalise, search_replace, search_target
from studies._study import Case, Row, Study, select, summarise
from studies._trial import FILES, NAMES
from studies.data import load_features

Floats = NDArray[np.float64]

SIZES = (50, 100, 200, 500, 1000, 2000, 5000)
BANDWIDTHS = (0.5, 1.0, 2.0, 4.0, 6.0, 8.0)
SIZE_BANDWIDTHS = (6.0, 1.0)  # at which n varies
BANDWIDTH_SIZE = 500  # at which the bandwidth varies
TABLE_SIZE = 1000
MOST_SEARCHED = 1000  # rows that are all free to move
SEEDS = (0, 1, 2)
CLASSES = 98
LABEL_WEIGHT = 0.6
COLUMNS = 2
FEATURES = 64
SEARCHES: dict[str, Any] = {"starts": 4, "iterations": 30}
RANDOM = "target, random anchors"
ANCHORS = {f"target, {label} anchors": name for name, label in NAMES.items()}
ALL: dict[str, tuple[Encoding, bool]] = {
    "all, integer labels": ("integer", True),
    "all, one-hot labels": ("one-hot", True),
    "all, public labels": ("integer", False),
}
SHOWN = (RANDOM, *ALL)
_LINES = (
    ("published", "published 2022", False, 1),
    ("plain", "Theorem A or B", True, 3),
    ("sharp", "sharpened, A' or B'", True, 0),
)
_VALUES = ("published", "plain", "sharp", "found")


def cases() -> list[Case]:
    """Return every number of rows at two bandwidths, and every bandwidth at one number of rows."""
    pairs = [(n, bandwidth) for bandwidth in SIZE_BANDWIDTHS for n in SIZES]
    pairs += [(BANDWIDTH_SIZE, bandwidth) for bandwidth in BANDWIDTHS]
    return [
        {"rows": n, "bandwidth": bandwidth, "seed": seed} for n, bandwidth in dict.fromkeys(pairs) for seed in SEEDS
    ]


def measure(case: Case) -> list[Row]:
    """Compute all bounds for one start, and search."""
    n, bandwidth = case["rows"], case["bandwidth"]
    rng = np.random.default_rng(case["seed"])
    start = rng.normal(size=(n + 1, COLUMNS))
    rows = [
        {**case, "released": name, **_bound_target(X, start, bandwidth, rng)}
        for name, X in _make_anchors(n, rng).items()
    ]
    rows += [
        {**case, "released": name, **_bound_all(start[1:], bandwidth, encoding, private, rng)}
        for name, (encoding, private) in ALL.items()
    ]
    return rows


def _bound_target(anchors: Floats, start: Floats, bandwidth: float, rng: np.random.Generator) -> dict[str, Any]:
    public = bounds.collect_figures(
        anchors,
        None,
        checked_start(start),
        bandwidth=bandwidth,
        label_weight=LABEL_WEIGHT,
        label_encoding="integer",
        label_bandwidth=bandwidth,
        norm="l2",
    )
    return {
        "published": _bound_as_published(start[1:], bandwidth),
        "plain": bounds.target_a(public),
        "sharp": bounds.target_a_prime(public),
        "found": search_target(anchors, start[1:], bandwidth=bandwidth, rng=rng),
    }


def _bound_all(
    start: Floats, bandwidth: float, encoding: Encoding, private: bool, rng: np.random.Generator
) -> dict[str, Any]:
    setting: dict[str, Any] = {"bandwidth": bandwidth, "label_weight": LABEL_WEIGHT, "n_classes": CLASSES}
    floor = label_floor(CLASSES, encoding, bandwidth)
    box = bounds.Box(float(np.exp(-2 * bandwidth**-2)), floor, LABEL_WEIGHT, private)
    centred = checked_start(start)
    found = None
    if len(start) <= MOST_SEARCHED:
        found = search_replace(start, rng=rng, encoding=encoding, private_labels=private, **SEARCHES, **setting)
    return {
        "published": _bound_as_published(start, bandwidth),
        "plain": bounds.theorem_b(centred, box, bandwidth, "l2"),
        "sharp": bounds.theorem_b_prime(centred, box, bandwidth, "l2"),
        "found": found,
    }


def _bound_as_published(start: Floats, bandwidth: float) -> float | None:
    try:
        return published_2022(start, bandwidth=bandwidth, label_weight=LABEL_WEIGHT, n_classes=CLASSES)
    except ValueError:  # its theorem asks for n exp(-2 / s^2) > 1
        return None


@cache
def _load_features(name: str) -> Floats:
    return load_features(name).features.astype(np.float64)


def _make_anchors(n: int, rng: np.random.Generator) -> dict[str, Floats]:
    """Return random anchors, and real ones: centred, as a release has them."""
    sets = {RANDOM: normalise(rng.normal(size=(n, FEATURES)))}
    for label, name in ANCHORS.items():
        features = _load_features(name)
        rows = features[rng.choice(len(features), n, replace=False)]
        sets[label] = normalise(rows - features.mean(axis=0))
    return sets


def figures(rows: pd.DataFrame) -> dict[str, Figure]:
    """Draw the bounds over n and over the bandwidth."""
    over_n, panels = draw.make_panels(len(SIZE_BANDWIDTHS), len(SHOWN), (10.8, 5.9), sharex=True, sharey="row")
    for line, bandwidth in zip(panels, SIZE_BANDWIDTHS, strict=True):
        for axes, released in zip(line, SHOWN, strict=True):
            _draw_panel(axes, select(rows, released=released, bandwidth=bandwidth), "rows")
            axes.set_title(f"{released}\nbandwidth {bandwidth:g}", fontsize=9.5)
            axes.set_xlabel("rows n" if bandwidth == SIZE_BANDWIDTHS[-1] else "")
        line[0].set_ylabel("L2 sensitivity of the first step")
    draw.legend_below(over_n, panels.ravel(), ncols=4)
    over_bandwidth, (line,) = draw.make_panels(1, len(SHOWN), (10.8, 3.6), sharey=True)
    for axes, released in zip(line, SHOWN, strict=True):
        here = select(rows, released=released, rows=BANDWIDTH_SIZE)
        _draw_panel(axes, here, "bandwidth")
        axes.set_title(f"{released}\n{BANDWIDTH_SIZE:,} rows", fontsize=9.5)
        draw.epsilon_axis(axes, here["bandwidth"].unique(), label="bandwidth s")
    line[0].set_ylabel("L2 sensitivity of the first step")
    draw.legend_below(over_bandwidth, line, ncols=4)
    return {"over-n": over_n, "over-bandwidth": over_bandwidth}


def _draw_panel(axes: Axes, here: pd.DataFrame, over: str) -> None:
    for column, name, sound, place in _LINES:
        found = here.dropna(subset=[column]) if column in here else here[:0].assign(**{column: 0.0})
        draw.curve(axes, name, summarise(found, column, over).sort_index(), sound=sound, place=place)
    found = here.dropna(subset=["found"]).astype({"found": float}).groupby(over)["found"].mean()
    axes.plot(found.index, found, "k+", markersize=7, label="found by a search")
    axes.set(xscale="log", yscale="log")


def facts(rows: pd.DataFrame) -> dict[str, Any]:
    """Return how bounds compare with what searches found."""
    rows = rows.reindex(columns=["released", "rows", "bandwidth", "seed", *_VALUES]).astype(
        dict.fromkeys(_VALUES, float)
    )
    searched = rows.dropna(subset=["found"])
    searched = searched.assign(ratio=searched[["plain", "sharp"]].min(axis=1) / searched["found"])
    stated = searched.dropna(subset=["published"])
    waste = stated["published"] / stated["found"]
    target = stated["released"].isin([RANDOM, *ANCHORS])
    tables = {bandwidth: _compare(rows, searched, bandwidth) for bandwidth in SIZE_BANDWIDTHS}
    return {
        "columns": COLUMNS,
        "label_weight": LABEL_WEIGHT,
        "classes": CLASSES,
        "features": FEATURES,
        "most_searched": MOST_SEARCHED,
        "table_size": TABLE_SIZE,
        "searches": len(searched),
        "broken": int((searched["ratio"] < 1 - 1e-9).sum()),
        "below": int((waste < 1).sum()),
        "silent": len(searched) - len(stated),
        "waste": {"a single target": waste[target], "all rows private": waste[~target]},
        "looseness": searched.groupby("bandwidth")["ratio"].max(),
        "tables": tables,
    }


def _compare(rows: pd.DataFrame, searched: pd.DataFrame, bandwidth: float) -> pd.DataFrame:
    """Return all bounds at one number of rows, beside what was found."""
    here = select(rows, rows=TABLE_SIZE, bandwidth=bandwidth)
    means = here.groupby("released", sort=False)[[name for name in _VALUES if name in here]].mean()
    cells = means.map(lambda value: f"{value:,.0f}" if value >= 100 else f"{value:.3g}")
    spread = summarise(here, "found", "released")
    cells["found"] += spread.apply(lambda one: f" ({one.low:.3g} to {one.high:.3g})", axis=1)
    cells["ratio"] = searched.loc[here.index].groupby("released", sort=False)["ratio"].mean().map("{:.2f}".format)
    names = {"plain": "A or B", "sharp": "A' or B'", "found": "found (95% over seeds)"}
    return cells.rename(columns=names).reset_index()


PARAMETERS = {
    "rows": SIZES,
    "at bandwidths": SIZE_BANDWIDTHS,
    "bandwidths": BANDWIDTHS,
    "at rows": BANDWIDTH_SIZE,
    "columns": COLUMNS,
    "classes": CLASSES,
    "label weight": LABEL_WEIGHT,
    "dimensions of random anchors": FEATURES,
    "searches": SEARCHES,
}
STUDY = Study("sensitivity", cases, measure, figures, facts, FILES, PARAMETERS, SEEDS)
