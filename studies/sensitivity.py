"""How far one record can move the first step: as published, as proved, and as a search finds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.optimize import minimize

from nearveil.privatemail.graph.labels import Encoding
from nearveil.privatemail.sensitivity import (
    Norm,
    bound_target_a,
    bound_target_a_prime,
    check_start,
    published_2022,
)
from studies import _figures as draw
from studies import replacement
from studies._search import FILES, NAMES
from studies._study import Case, Row, Study, select, summarise
from studies.data import load_features

Floats = NDArray[np.float64]

STARTS = 4
POLE, JITTER = np.array([1.0, 0.0, 0.0]), 0.3  # of the two clusters that a search begins with


def normalise(rows: Floats) -> Floats:
    """Divide each row by its norm."""
    return np.asarray(rows / np.linalg.norm(rows, axis=-1, keepdims=True))


@dataclass(frozen=True)
class Neighbours:
    """Two data sets that differ in one record."""

    X: Floats
    other: Floats
    V: Floats
    V_other: Floats
    record: int


def label_weights(labels: Sequence[int] | NDArray[np.int64], bandwidth: float, encoding: Encoding) -> Floats:
    """Return the dense label weights; -1 means unlabelled."""
    y = np.asarray(labels, dtype=np.float64)
    gaps = np.subtract.outer(y, y) ** 2 if encoding == "integer" else 2.0 * np.not_equal.outer(y, y)
    weights = np.exp(-gaps / (2 * bandwidth**2))
    weights[y == -1, :] = weights[:, y == -1] = 0
    np.fill_diagonal(weights, 0)
    return np.asarray(weights)


def step(X: Floats, V: Floats, start: Floats, bandwidth: float, label_weight: float) -> tuple[Floats, Floats, Floats]:
    """Take one dense step; return it with the weights and the degrees."""
    W = np.exp((X @ X.T - 1) / bandwidth**2)
    np.fill_diagonal(W, 0)
    degree = W.sum(axis=1)
    pull = label_weight * V - W
    return start + (pull.sum(axis=1)[:, None] * start - pull @ start) / (2 * degree[:, None]), W, degree


def change(pair: Neighbours, start: Floats, bandwidth: float, label_weight: float) -> Floats:
    """Return the difference of the steps of two neighbours, shape (n, k)."""
    X_other = pair.X.copy()
    X_other[pair.record] = pair.other
    before, *_ = step(pair.X, pair.V, start, bandwidth, label_weight)
    after, *_ = step(X_other, pair.V_other, start, bandwidth, label_weight)
    return before - after


def _compute_gradient(
    slope: Floats, X: Floats, moved: tuple[Floats, Floats, Floats], start: Floats, bandwidth: float
) -> Floats:
    """Carry the derivative with respect to the step back to the rows."""
    F, W, degree = moved
    along = ((slope * start).sum(axis=1)[:, None] - slope @ start.T) / 2
    through_degree = (slope * (F - start)).sum(axis=1)
    H = -(along + through_degree[:, None]) / degree[:, None]
    return np.asarray((((H + H.T) * W) @ X) / bandwidth**2)


def climb(
    pair: Neighbours,
    start: Floats,
    *,
    bandwidth: float,
    label_weight: float,
    free: bool,
    norm: Norm = "l2",
    rows: slice | NDArray[np.int64] = slice(None),
    iterations: int = 60,
) -> float:
    """Move the record before and after, and with `free` all other rows too, to change `rows` the most."""
    n, d = pair.X.shape
    released = np.zeros((n, 1))
    released[rows] = 1
    best = [0.0]

    def objective(flat: Floats) -> tuple[float, Floats]:
        Z = flat.reshape(-1, d)
        size = np.linalg.norm(Z, axis=1, keepdims=True)
        here = Z / size
        X, X_other = ((here[:n] if free else pair.X).copy() for _ in range(2))
        X[pair.record], X_other[pair.record] = here[-2:]
        before = step(X, pair.V, start, bandwidth, label_weight)
        after = step(X_other, pair.V_other, start, bandwidth, label_weight)
        gap = released * (before[0] - after[0])
        value = float(np.abs(gap).sum() if norm == "l1" else np.linalg.norm(gap))
        best[0] = max(best[0], value)
        slope = np.sign(gap) if norm == "l1" else gap / max(value, 1e-300)
        gradient = _compute_gradient(slope, X, before, start, bandwidth)
        gradient_other = _compute_gradient(-slope, X_other, after, start, bandwidth)
        rise = np.zeros_like(Z)
        if free:
            rise[:n] = gradient + gradient_other
            rise[pair.record] = 0
        rise[-2], rise[-1] = gradient[pair.record], gradient_other[pair.record]
        rise = (rise - here * (rise * here).sum(axis=1, keepdims=True)) / size
        return -value, -rise.ravel()

    ends = np.stack([pair.X[pair.record], pair.other])
    begin = np.concatenate([pair.X, ends]) if free else ends
    minimize(objective, begin.ravel(), jac=True, method="L-BFGS-B", options={"maxiter": iterations})
    return best[0]


def climb_target(anchors: Floats, values: Floats, bandwidth: float, ends: Floats) -> float:
    """Move two targets apart, from `ends` of shape (2, d): the row of the target alone, in O(m d) a step."""
    u = bandwidth**-2
    best = [0.0]

    def place(z: Floats) -> tuple[Floats, Floats, Floats, float]:
        size = float(np.linalg.norm(z))
        x = z / size
        exponents = u * (anchors @ x)
        p = np.exp(exponents - exponents.max())
        p /= p.sum()
        return p, p @ values, x, size

    def rise(slope: Floats, at: tuple[Floats, Floats, Floats, float]) -> Floats:
        p, mean, x, size = at
        gradient = u / 2 * (anchors.T @ (p * ((values - mean) @ slope)))
        return np.asarray((gradient - x * (x @ gradient)) / size)

    def objective(flat: Floats) -> tuple[float, Floats]:
        first, second = (place(z) for z in flat.reshape(2, -1))
        gap = (first[1] - second[1]) / 2
        value = float(np.linalg.norm(gap))
        best[0] = max(best[0], value)
        slope = gap / max(value, 1e-300)
        return -value, -np.concatenate([rise(slope, first), -rise(slope, second)])

    minimize(objective, ends.ravel(), jac=True, method="L-BFGS-B", options={"maxiter": 80})
    return best[0]


def search_target(
    anchors: Floats, values: Floats, *, bandwidth: float, rng: np.random.Generator, starts: int = STARTS
) -> float:
    """Search for the two targets whose rows are farthest apart."""
    d = anchors.shape[1]
    together = np.linalg.svd((anchors - anchors.mean(axis=0)).T @ (values - values.mean(axis=0)), full_matrices=False)
    best = 0.0
    for number in range(starts):
        if number < min(starts // 2, together[0].shape[1]):
            axis = together[0][:, number]
            ends = np.stack([axis, -axis])
        elif number % 2 or len(anchors) < 2:
            ends = rng.normal(size=(2, d))
        else:
            ends = anchors[rng.choice(len(anchors), 2, replace=False)] + 0.01 * rng.normal(size=(2, d))
        best = max(best, climb_target(anchors, values, bandwidth, normalise(ends)))
    return best


def _make_opposed(
    side: NDArray[np.int64],
    record: int,
    last: int,
    private_label: bool,
    rng: np.random.Generator,
    weigh: Callable[[NDArray[np.int64]], Floats],
) -> Neighbours:
    """Return the data set that Theorem B' fears, shaken: two opposite clusters, two extreme labels.

    Rows on each side share a pole and a label; the record jumps between them.
    Labels are 0 and `last`.
    """
    X = normalise(-side[:, None] * POLE + JITTER * rng.normal(size=(len(side), 3)))
    X[record] = normalise(POLE + JITTER * rng.normal(size=3))
    other = normalise(-POLE + JITTER * rng.normal(size=3))
    y = np.where(side > 0, 0, last)
    y[record] = 0
    y_other = y.copy()
    y_other[record] = last if private_label else 0
    return Neighbours(X, other, weigh(y), weigh(y_other), record)


def search_replace(
    start: Floats,
    *,
    bandwidth: float,
    label_weight: float,
    n_classes: int,
    rng: np.random.Generator,
    encoding: Encoding = "integer",
    private_labels: bool = True,
    starts: int = STARTS,
    norm: Norm = "l2",
    iterations: int = 60,
) -> float:
    """Search for the two data sets whose steps are farthest apart: the outermost records, both ways."""
    weigh = partial(label_weights, bandwidth=bandwidth, encoding=encoding)
    ascent: Any = {"bandwidth": bandwidth, "label_weight": label_weight, "norm": norm, "iterations": iterations}
    outward = start - start.mean(axis=0)
    outermost = np.argsort(-np.linalg.norm(outward, axis=1))
    best = 0.0
    for number in range(starts):
        record = int(outermost[(number // 2) % len(start)])
        direction = outward[record] / max(float(np.linalg.norm(outward[record])), 1e-12)
        direction = direction + 0.2 * (number % 2) * rng.normal(size=direction.shape)
        shift = 0.0 if number % 2 else float(rng.normal()) * 0.1
        side = np.where(direction @ (start[record] - start).T + shift > 0, 1, -1)
        pair = _make_opposed(side, record, n_classes - 1, private_labels, rng, weigh)
        poles = np.where(pair.X[:, :1] > 0, 1.0, -1.0) * POLE
        at_poles = replace(pair, X=poles, other=-poles[record])
        best = max(best, *(climb(sharp, start, free=True, **ascent) for sharp in (pair, at_poles)))
    return best


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
    return [{"rows": n, "bandwidth": s, "seed": seed} for n, s in dict.fromkeys(pairs) for seed in SEEDS]


def measure(case: Case) -> list[Row]:
    """Compute all bounds for one start, and search."""
    n, bandwidth = case["rows"], case["bandwidth"]
    rng = np.random.default_rng(case["seed"])
    start = rng.normal(size=(n + 1, COLUMNS))
    try:
        published = published_2022(start[1:], bandwidth=bandwidth, label_weight=LABEL_WEIGHT, n_classes=CLASSES)
    except ValueError:  # its theorem asks for n exp(-2 / s^2) > 1
        published = None
    bounded = {name: _bound_target(X, start, bandwidth, rng) for name, X in _make_anchors(n, rng).items()}
    for name, (encoding, private) in ALL.items():
        bounded[name] = _bound_all(start[1:], bandwidth, encoding, private, rng)
    return [{**case, "released": name, "published": published, **values} for name, values in bounded.items()]


def _bound_target(anchors: Floats, start: Floats, bandwidth: float, rng: np.random.Generator) -> dict[str, Any]:
    anchor_start = check_start(start)[1:]
    return {
        "plain": bound_target_a(anchor_start, bandwidth, "l2"),
        "sharp": bound_target_a_prime(anchors, anchor_start, bandwidth, "l2"),
        "found": search_target(anchors, start[1:], bandwidth=bandwidth, rng=rng),
    }


def _bound_all(
    start: Floats, bandwidth: float, encoding: Encoding, private: bool, rng: np.random.Generator
) -> dict[str, Any]:
    setting: dict[str, Any] = {"bandwidth": bandwidth, "label_weight": LABEL_WEIGHT, "n_classes": CLASSES}
    floor = replacement.label_floor(CLASSES, encoding, bandwidth)
    box = replacement.Box(float(np.exp(-2 * bandwidth**-2)), floor, LABEL_WEIGHT, private)
    centred = check_start(start)
    results = None
    if len(start) <= MOST_SEARCHED:
        results = search_replace(start, rng=rng, encoding=encoding, private_labels=private, **SEARCHES, **setting)
    return {
        "plain": replacement.bound_by_theorem_b(centred, box, bandwidth, "l2"),
        "sharp": replacement.bound_by_theorem_b_prime(centred, box, bandwidth, "l2"),
        "found": results,
    }


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
    shown = rows[rows["released"].isin(SHOWN)]
    part = shown[shown["bandwidth"].isin(SIZE_BANDWIDTHS)]
    grid: Any = {"line": "bandwidth", "column": "released", "sharex": True, "sharey": "row"}
    over_n, panels, cells = draw.make_grid(part, (10.8, 5.9), **grid)
    for axes, (bandwidth, released), here in cells:
        _draw_panel(axes, here, "rows")
        axes.set_title(f"{released}\nbandwidth {bandwidth:g}", fontsize=9.5)
        axes.set_xlabel("rows n" if axes in panels[-1] else "")
    part = select(shown, rows=BANDWIDTH_SIZE)
    over_bandwidth, line, cells = draw.make_grid(part, (10.8, 3.6), column="released", sharey=True)
    for axes, released, here in cells:
        _draw_panel(axes, here, "bandwidth")
        axes.set_title(f"{released}\n{BANDWIDTH_SIZE:,} rows", fontsize=9.5)
        draw.epsilon_axis(axes, here["bandwidth"].unique(), label="bandwidth s")
    for figure, drawn in ((over_n, panels), (over_bandwidth, line)):
        draw.finish(figure, drawn, "L2 sensitivity of the first step", ncols=4)
    return {"over-n": over_n, "over-bandwidth": over_bandwidth}


def _draw_panel(axes: Axes, here: pd.DataFrame, over: str) -> None:
    for column, name, sound, position in _LINES:
        results = here.dropna(subset=[column]) if column in here else here[:0].assign(**{column: 0.0})
        draw.curve(axes, name, summarise(results, column, over).sort_index(), sound=sound, index=position)
    results = here.dropna(subset=["found"]).astype({"found": float}).groupby(over)["found"].mean()
    axes.plot(results.index, results, "k+", markersize=7, label="found by a search")
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
    cells["found"] += spread.apply(lambda row: f" ({row.low:.3g} to {row.high:.3g})", axis=1)
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
