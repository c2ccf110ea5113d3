"""How far one record can move the first step: as published, as proved, and as a search finds."""

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nearveil.graph import Encoding
from nearveil.privacy import _sensitivity_replace as replace
from nearveil.privacy import _sensitivity_target as target
from nearveil.privacy._sensitivity_common import checked_start, label_floor
from nearveil.privacy.sensitivity import published_2022
from studies import _style
from studies._report import table
from studies._sensitivity_search import found_replace, found_target, unit
from studies._study import Case, Mean, Row, Study, grouped, mean, of
from studies._trial import FILES, NAMES
from studies.data import load_features

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
    ("published", "published 2022", False),
    ("plain", "Theorem A or B", True),
    ("sharp", "sharpened, A' or B'", True),
)


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
    rows = [{**case, "released": name, **_target(X, start, bandwidth, rng)} for name, X in _anchors(n, rng).items()]
    rows += [
        {**case, "released": name, **_all(start[1:], bandwidth, encoding, private, rng)}
        for name, (encoding, private) in ALL.items()
    ]
    return rows


def _target(anchors: Floats, start: Floats, bandwidth: float, rng: np.random.Generator) -> dict[str, Any]:
    public = target.collect(
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
        "published": _published(start[1:], bandwidth),
        "plain": target.target_a(public),
        "sharp": target.target_a_prime(public),
        "found": found_target(anchors, start[1:], bandwidth=bandwidth, rng=rng),
    }


def _all(
    start: Floats, bandwidth: float, encoding: Encoding, private: bool, rng: np.random.Generator
) -> dict[str, Any]:
    setting: dict[str, Any] = {"bandwidth": bandwidth, "label_weight": LABEL_WEIGHT, "n_classes": CLASSES}
    floor = label_floor(CLASSES, encoding, bandwidth)
    box = replace.Box(float(np.exp(-2 * bandwidth**-2)), floor, LABEL_WEIGHT, private)
    centred = checked_start(start)
    found = None
    if len(start) <= MOST_SEARCHED:
        found = found_replace(start, rng=rng, encoding=encoding, private_labels=private, **SEARCHES, **setting)
    return {
        "published": _published(start, bandwidth),
        "plain": replace.theorem_b(centred, box, bandwidth, "l2"),
        "sharp": replace.theorem_b_prime(centred, box, bandwidth, "l2"),
        "found": found,
    }


def _published(start: Floats, bandwidth: float) -> float | None:
    try:
        return published_2022(start, bandwidth=bandwidth, label_weight=LABEL_WEIGHT, n_classes=CLASSES)
    except ValueError:  # its theorem asks for n exp(-2 / s^2) > 1
        return None


@cache
def _features(name: str) -> Floats:
    return load_features(name).features.astype(np.float64)


def _anchors(n: int, rng: np.random.Generator) -> dict[str, Floats]:
    """Return random anchors, and real ones: centred, as a release has them."""
    sets = {RANDOM: unit(rng.normal(size=(n, FEATURES)))}
    for label, name in ANCHORS.items():
        features = _features(name)
        rows = features[rng.choice(len(features), n, replace=False)]
        sets[label] = unit(rows - features.mean(axis=0))
    return sets


def figures(rows: Sequence[Row]) -> "dict[str, Figure]":
    """Draw the bounds over n and over the bandwidth."""
    from matplotlib.figure import Figure

    over_n = Figure(figsize=(10.8, 5.9), layout="constrained")
    panels = over_n.subplots(len(SIZE_BANDWIDTHS), len(SHOWN), squeeze=False, sharex=True, sharey="row")
    for line, bandwidth in zip(panels, SIZE_BANDWIDTHS, strict=True):
        for axes, released in zip(line, SHOWN, strict=True):
            _panel(axes, of(rows, released=released, bandwidth=bandwidth), "rows")
            axes.set_title(f"{released}\nbandwidth {bandwidth:g}", fontsize=9.5)
            axes.set_xlabel("rows n" if bandwidth == SIZE_BANDWIDTHS[-1] else "")
        line[0].set_ylabel("L2 sensitivity of the first step")
    _style.legend_below(over_n, list(panels.ravel()), ncols=4)
    over_bandwidth = Figure(figsize=(10.8, 3.6), layout="constrained")
    line = over_bandwidth.subplots(1, len(SHOWN), sharey=True)
    for axes, released in zip(line, SHOWN, strict=True):
        here = of(rows, released=released, rows=BANDWIDTH_SIZE)
        _panel(axes, here, "bandwidth")
        axes.set_title(f"{released}\n{BANDWIDTH_SIZE:,} rows", fontsize=9.5)
        axes.set_xlabel("bandwidth s")
        ticks = sorted({row["bandwidth"] for row in here})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    line[0].set_ylabel("L2 sensitivity of the first step")
    _style.legend_below(over_bandwidth, list(line), ncols=4)
    return {"over-n": over_n, "over-bandwidth": over_bandwidth}


def _panel(axes: "Axes", here: Sequence[Row], over: str) -> None:
    for place, (column, name, sound) in enumerate(_LINES):
        _style.curve(axes, name, *_means(here, column, over), sound=sound, place=(1, 3, 0)[place])
    x, found = _means(here, "found", over)
    axes.plot(x, [one.value for one in found], "k+", markersize=7, label="found by a search")
    axes.set_xscale("log")
    axes.set_yscale("log")


def _means(rows: Sequence[Row], column: str, over: str) -> tuple[list[float], list[Mean]]:
    groups = grouped([row for row in rows if row[column] is not None], over)
    x = sorted(key for (key,) in groups)
    return x, [mean(row[column] for row in groups[one,]) for one in x]


def tell(rows: Sequence[Row]) -> str:
    """Return the page's text."""
    searched = [row for row in rows if row["found"] is not None]
    broken = [row for row in searched if min(row["plain"], row["sharp"]) < row["found"] * (1 - 1e-9)]
    stated = [row for row in searched if row["published"] is not None]
    below = [row for row in stated if row["published"] < row["found"]]
    verdict = (
        f"In {len(searched)} searches nothing above our bounds was found"
        if not broken
        else f"**In {len(broken)} of {len(searched)} searches a bound was passed: it is wrong**"
    )
    parts = [
        "![The sensitivity over the number of rows, at bandwidths 6 and 1: the published bound lies orders of "
        "magnitude above "
        "ours, and what a search finds lies on the sharpened bound or just below](sensitivity-over-n.svg)",
        "![The sensitivity over the bandwidth at one number of rows](sensitivity-over-bandwidth.svg)",
        f"{verdict}; the published bound was passed in {len(below)}. It is drawn as unsound nevertheless, because "
        "it is "
        "[false for other parameters](../../theory/sensitivity.md). Waste is what the published bound asks for, "
        "over what was found: "
        f"{_waste(stated)}.",
    ]
    parts.append(_looseness(searched, len(searched) - len(stated)))
    for bandwidth in SIZE_BANDWIDTHS:
        parts += [f"Bandwidth {bandwidth:g}, {TABLE_SIZE:,} rows, means over seeds:", _table(rows, bandwidth)]
    parts.append(
        "*Target*: only the target's row is released, all other rows are public anchors (random ones of "
        f"{FEATURES} dimensions, or images, centred). *All*: every row is private and all are released; one "
        "record is replaced, "
        "with its label unless labels are public. *Ratio* is the bound that the library returns, the smallest "
        "that is proved, over what was found: "
        "the noise that is more than needed, at most."
    )
    return "\n\n".join(parts)


def _looseness(searched: Sequence[Row], silent: int) -> str:
    ratios = {
        bandwidth: max(min(row["plain"], row["sharp"]) / row["found"] for row in some)
        for (bandwidth,), some in grouped(searched, "bandwidth").items()
    }
    listed = ", ".join(f"{ratios[bandwidth]:.3g} at bandwidth {bandwidth:g}" for bandwidth in sorted(ratios))
    words = f"The smallest proved bound is at most so many times what was found: {listed}."
    if not silent:
        return words
    return f"{words} The published theorem asks for n exp(-2 / s^2) > 1; in {silent} searches it said nothing."


def _waste(stated: Sequence[Row]) -> str:
    parts = []
    for name, kinds in (("a single target", (RANDOM, *ANCHORS)), ("all rows private", tuple(ALL))):
        ratios = [row["published"] / row["found"] for row in stated if row["released"] in kinds]
        parts.append(f"{min(ratios):,.0f} to {max(ratios):,.0f} times for {name}")
    return ", ".join(parts)


def _table(rows: Sequence[Row], bandwidth: float) -> str:
    lines = []
    for (released,), some in grouped(of(rows, rows=TABLE_SIZE, bandwidth=bandwidth), "released").items():
        values = [mean(row[column] for row in some) for column in ("published", "plain", "sharp", "found")]
        ratio = mean(min(row["plain"], row["sharp"]) / row["found"] for row in some)
        spread = mean(row["found"] for row in some)
        cells = [f"{one.value:,.0f}" if one.value >= 100 else f"{one.value:.3g}" for one in values]
        lines.append(
            [released, *cells[:3], f"{cells[3]} ({spread.low:.3g} to {spread.high:.3g})", f"{ratio.value:.2f}"]
        )
    return table(["released", "published", "A or B", "A' or B'", "found (95% over seeds)", "ratio"], lines)


ABOUT = f"""
Noise is scaled to how far one record can move what is released: here the first step of the supervised manifold query.
*Published* is Theorem 2 of the 2022 paper. *A or B* and *A' or B'* are [our theorems](../../theory/sensitivity.md):
bounds, all proved. *Found* is the largest change that gradient ascent on the sphere finds from several starts, a
lower bound: no sound bound can be below it. Where every row is private, searches stop at {MOST_SEARCHED:,} rows.

A seed draws the start Q (standard normal, {COLUMNS} columns), the anchors and where searches begin. Label weight
{LABEL_WEIGHT:g}, {CLASSES} classes; the L2 norm throughout.
"""

STUDY = Study(
    name="sensitivity",
    title="Sensitivity: published, proved, sharpened, found",
    about=ABOUT,
    cases=cases,
    measure=measure,
    figures=figures,
    tell=tell,
    data=FILES,
    parameters={
        "rows": SIZES,
        "at bandwidths": SIZE_BANDWIDTHS,
        "bandwidths": BANDWIDTHS,
        "at rows": BANDWIDTH_SIZE,
        "columns": COLUMNS,
        "classes": CLASSES,
        "label weight": LABEL_WEIGHT,
        "dimensions of random anchors": FEATURES,
        "searches": SEARCHES,
    },
    seeds=SEEDS,
)
