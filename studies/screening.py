"""Figures 1 to 3 of the Private-kNN supplement: where a noisy screening costs most, and what many of them cost.

Every max-vote from 0 to k is tried, at every order.
"""

import math
from collections.abc import Iterable
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
from dp_accounting import rdp as dp_rdp
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import ndtr
from scipy.stats import binom

from nearveil.privacy.accounting import screening_curve
from nearveil.privacy.accounting.binary import compute_binary_rdp, log_pairs
from nearveil.privacy.checks import MAX_EPSILON, check_choice, check_count, check_delta, check_rate
from nearveil.privacy.events import NoisyScreening
from studies import _figures as draw
from studies._study import Case, Row, Study, select

Floats = NDArray[np.float64]
Direction = Literal["add", "remove"]
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)

SCREENING = NoisyScreening(noise=85.0, threshold=210.0, n_neighbors=300)
THRESHOLD, MOST = int(SCREENING.threshold), SCREENING.n_neighbors
SAMPLING_RATE = 0.25
DELTA = 1e-5
FIXED_VOTES = (210, 221, 300, 113, 30)  # T, the worst at order 20, k, the worst at order 150, k / 10 classes
SURFACE_ORDERS = np.array([1.5, *range(2, 51)])
SURFACE_VOTES = range(0, MOST + 1, 3)
SURFACE_STRIDE = 2  # of the orders that are kept for all max-votes
ORDERS = np.arange(2.0, 301.0, 2.0)
COST_ORDERS = np.concatenate(
    [np.arange(2.0, 257.0), np.geomspace(260.0, 65536.0, 80)]  # few screenings want large orders
)
COUNTS = tuple(2**i for i in range(14))
SHOWN = (2, 20, 50, 80, 100, 150, 200, 300)
MARKED = (20, 80, 150, 300)
_STRIDE = 10  # of the coarse search for the worst fixed pair
_WIDE: Any = {"color": "0.75", "linewidth": 7, "solid_capstyle": "butt", "zorder": 1}


def cases() -> list[Case]:
    """Return the figures; of the third, every number of screenings is a case."""
    return [{"figure": 1}, {"figure": 2}, *({"figure": 3, "screenings": count} for count in COUNTS)]


def measure(case: Case) -> list[Row]:
    """Compute a figure, or a point of the third."""
    if case["figure"] == 1:
        fixed = _compute_divergences(SURFACE_ORDERS[::SURFACE_STRIDE], SURFACE_VOTES)
        rows = [*fixed, *find_worst(SURFACE_ORDERS, 0), *find_worst(SURFACE_ORDERS, -1)]
    elif case["figure"] == 2:
        rows = [*_compute_divergences(ORDERS, FIXED_VOTES), *find_worst(ORDERS, -1)]
    else:
        rows = compute_costs(case["screenings"])
    return [{**case, **row} for row in rows]


def _compute_divergences(orders: Floats, votes: Iterable[int]) -> list[Row]:
    results = compute_rdp(orders, SCREENING)
    return [
        {"kind": "at", "order": float(order), "votes": t, "rdp": float(values[t])}
        for order, values in zip(orders, results, strict=True)
        for t in votes
    ]


def find_worst(orders: Floats, which: int) -> list[Row]:
    """Return the maximum over all max-votes, at the first or the last that attains it."""
    base, moved, votes = log_pairs(SCREENING, 1.0)  # each pair in both orders, so one direction is enough
    rows = []
    for order in map(float, orders):
        values = compute_binary_rdp(order, base, moved)
        t, u = sorted(map(tuple, votes[values >= values.max() * (1 - 1e-12)]))[which]
        rows.append({"kind": "worst", "order": order, "votes": int(t), "neighbour": int(u), "rdp": float(values.max())})
    return rows


def compute_rdp(orders: Floats, screening: NoisyScreening, *, sampling_rate: float = 1.0) -> Floats:
    """Return the Renyi divergence of one screening, the worst neighbour and direction of each max-vote."""
    base, moved, votes = log_pairs(screening, sampling_rate)
    out = np.zeros((len(orders), screening.n_neighbors + 1))
    for row, order in zip(out, orders, strict=True):
        both = np.maximum(compute_binary_rdp(float(order), base, moved), compute_binary_rdp(float(order), moved, base))
        np.maximum.at(row, votes[:, 0], both)
    return out


def compute_costs(count: int) -> list[Row]:
    """Return the epsilon of many screenings: as published, at fixed max-votes, and by better accounting.

    "classic" and "tight" take the true maximum at every order; "Bellman" is the exact adaptive composition, from above;
    no sound accountant is below "fixed pair".
    """
    rdp = compute_rdp(COST_ORDERS, SCREENING, sampling_rate=SAMPLING_RATE)
    worst, penalty = rdp.max(axis=1), -np.log(DELTA) / (COST_ORDERS - 1)
    results = {
        "classic": np.min(count * worst + penalty),
        "tight": dp_rdp.compute_epsilon(COST_ORDERS, count * worst, DELTA)[0],
        "Bellman": screening_curve(count, SCREENING, sampling_rate=SAMPLING_RATE).epsilon(DELTA),
    }
    least, (votes, neighbour) = find_worst_pair(count, SCREENING, sampling_rate=SAMPLING_RATE, delta=DELTA)
    return [
        *({"kind": "at", "votes": t, "epsilon": float(np.min(count * rdp[:, t] + penalty))} for t in FIXED_VOTES),
        *({"kind": kind, "epsilon": float(epsilon)} for kind, epsilon in results.items()),
        {"kind": "fixed pair", "votes": votes, "neighbour": neighbour, "epsilon": float(least)},
    ]


def compute_fixed_pair_epsilon(
    n: int,
    screening: NoisyScreening,
    pair: tuple[int, int],
    *,
    sampling_rate: float,
    delta: float,
    direction: Direction,
) -> float:
    """Return the exact epsilon of `n` screenings of one pair of max-votes, a lower bound on any accountant.

    The first max-vote is that without the record, the second that with it, where it is sampled.
    """
    n, rate, delta = check_count(n, "n"), check_rate(sampling_rate), check_delta(delta)
    check_choice(direction, "direction", Direction)
    without, sampled = (float(ndtr((t - screening.threshold) / screening.noise)) for t in pair)
    with_record = without + rate * (sampled - without)
    p, q = (without, with_record) if direction == "add" else (with_record, without)
    passes = np.arange(n + 1)
    log_p, log_q = binom.logpmf(passes, n, p), binom.logpmf(passes, n, q)
    log_p, log_q = log_p[log_p > -np.inf], log_q[log_p > -np.inf]

    def surplus(epsilon: float) -> float:
        return float(np.sum(np.exp(log_p) * np.maximum(-np.expm1(np.minimum(epsilon + log_q - log_p, 0)), 0))) - delta

    if surplus(0.0) <= 0:
        return 0.0
    highest = min(float(np.max(log_p - log_q)) + 1e-9, MAX_EPSILON)
    return float(brentq(surplus, 0.0, highest, xtol=1e-13)) if surplus(highest) < 0 else math.inf


def find_worst_pair(
    count: int, screening: NoisyScreening, *, sampling_rate: float, delta: float
) -> tuple[float, tuple[int, int]]:
    """Search for the costliest fixed pair; one that is missed only makes the lower bound weaker."""
    compute = partial(compute_fixed_pair_epsilon, count, screening, sampling_rate=sampling_rate, delta=delta)

    def best(lower_votes: Iterable[int]) -> tuple[float, tuple[int, int]]:
        return max(
            (compute(pair, direction=direction), pair)
            for t in lower_votes
            for pair in ((t, t + 1), (t + 1, t))
            for direction in DIRECTIONS
        )

    last = screening.n_neighbors - 1
    coarse = best([*range(0, last, _STRIDE), last])
    near = min(coarse[1])
    return max(coarse, best(range(max(near - _STRIDE + 1, 0), min(near + _STRIDE, last + 1))))


def figures(rows: pd.DataFrame) -> dict[str, Figure]:
    """Draw the three figures."""
    return {
        "surface": draw_surface(select(rows, figure=1)),
        "worst": draw_worst(select(rows, figure=2)),
        "cost": draw_costs(select(rows, figure=3)),
    }


def draw_surface(rows: pd.DataFrame) -> Figure:
    """Draw figure 1: the divergence as a share of the worst at its order, and where the worst is."""
    figure, ((axes,),) = draw.make_panels(1, 1, (7, 4.6))
    axes.grid(visible=False)
    worst = select(rows, kind="worst")
    cells = select(rows, kind="at").pivot(index="votes", columns="order", values="rdp")
    share = cells / worst.groupby("order")["rdp"].last()[cells.columns]
    shading: Any = {"cmap": "cividis", "vmin": 0, "vmax": 1, "shading": "gouraud", "rasterized": True}
    image = axes.pcolormesh(cells.columns, cells.index, share, **shading)
    figure.colorbar(image, ax=axes, label="divergence, as a share of the largest at this order")
    half = worst["order"].nunique()
    for branch, label in ((worst[:half], "the true worst (one on either side)"), (worst[half:], None)):
        axes.plot(branch["order"], branch["votes"], color="black", linewidth=2.2, label=label)
    threshold = worst["votes"].iloc[0]  # at the lowest order the worst is T itself
    axes.axhline(threshold, color="white", linestyle=(0, (4, 3)), label=f"published: T = {threshold}")
    ends = (cells.columns[0], cells.columns[-1])
    axes.set(xlabel="order of the Rényi divergence", ylabel="max-vote t", xlim=ends)
    axes.legend(loc="lower right", frameon=True, framealpha=0.92, facecolor="0.75").set_zorder(5)
    return figure


def draw_worst(rows: pd.DataFrame) -> Figure:
    """Draw figure 2: fixed max-votes and the maximum, absolute and as a share of the Gaussian's divergence."""
    figure, (panels,) = draw.make_panels(1, 2, (10.5, 4.6))
    worst = select(rows, kind="worst").set_index("order")
    fixed = select(rows, kind="at").set_index("order")
    gaussian = pd.Series(worst.index / (2 * SCREENING.noise**2), worst.index)
    for axes, unit in zip(panels, (1.0, gaussian), strict=True):
        top = worst["rdp"] / unit
        axes.plot(top.index, top, label="the true maximum (marks: its t)", **_WIDE)
        for position, (votes, results) in enumerate(fixed.groupby("votes", sort=False)["rdp"]):
            _draw_line(axes, results / unit, position, _name_votes(votes))
        for order in top.index.intersection(MARKED):
            at = (order, top[order])
            axes.plot(*at, marker="o", color="black", markersize=4, linestyle="")
            axes.annotate(f"{worst.loc[order, 'votes']}", at, (-2, 8), textcoords="offset points", ha="right")
        axes.set(xlabel="order of the Rényi divergence", ylim=(0, 1.14 * top.max()))
    panels[1].set_ylabel("as a share of the Gaussian mechanism's")
    draw.finish(figure, panels, "divergence of one screening")
    return figure


def draw_costs(rows: pd.DataFrame) -> Figure:
    """Draw figure 3: the published curves, and all accountants divided by the exact cost."""
    figure, ((left, right),) = draw.make_panels(1, 2, (10.5, 4.8))
    results = {kind: group.set_index("screenings")["epsilon"] for kind, group in rows.groupby("kind", sort=False)}
    exact = results["Bellman"]
    fixed = dict(iter(select(rows, kind="at").set_index("screenings").groupby("votes", sort=False)["epsilon"]))
    left.plot(exact.index, exact, label="Bellman: exact, rounded up", **_WIDE)
    right.axhline(1, label="Bellman: exact, rounded up", **_WIDE)
    for position, (votes, points) in enumerate(fixed.items()):
        _draw_line(left, points, position, f"{_name_votes(votes)} (unsound)", dotted=True)
        if votes in (THRESHOLD, MOST):
            _draw_line(right, points / exact, position, f"{_name_votes(votes)} (unsound)", dotted=True)
    for kind, marker in (("classic", "D"), ("tight", "X")):
        style: Any = {"color": draw.COLOURS["grey"], "marker": marker, "linestyle": "-."}
        right.plot(exact.index, results[kind] / exact, label=f"Rényi maximum, {kind} conversion", **style)
    lowest = results["fixed pair"] / exact
    right.plot(lowest.index, lowest, color="black", linewidth=1.2, label="fixed pair: a lower bound")
    right.fill_between(lowest.index, 0, lowest, color="0.9", linewidth=0, zorder=0)
    for axes in (left, right):
        axes.set(xscale="log", xlabel="screenings")
        draw.set_ticks(axes, [1, 10, 100, 1000, 8192], ["1", "10", "100", "1,000", "8,192"])
    left.set(yscale="log")
    right.set(ylabel="epsilon divided by the exact one (below 1: too low)", ylim=(0, None))
    draw.finish(figure, [left, right], "epsilon at delta 1e-5")
    return figure


def _name_votes(votes: int) -> str:
    """Return what a fixed max-vote is called."""
    return f"t = {votes}{ {THRESHOLD: ' (T)', MOST: ' (k)', MOST // 10: ' (k/10)'}.get(votes, '') }"


def _draw_line(axes: Axes, points: pd.Series, index: int, label: str, *, dotted: bool = False) -> None:
    style = draw.look("", index)
    line: Any = {"color": style.colour, "linestyle": ":" if dotted else style.dashes, "label": label}
    marks: Any = {"markerfacecolor": "white" if dotted else style.colour, "markevery": max(1, len(points) // 8)}
    axes.plot(points.index, points, marker=style.marker, **line, **marks)


def facts(rows: pd.DataFrame) -> dict[str, Any]:
    """Return what the figures show; every number is one of the rows."""
    first, second = select(rows, figure=1, kind="worst"), select(rows, figure=2)
    at = select(second, kind="at").pivot(index="order", columns="votes", values="rdp")
    worst = select(second, kind="worst").set_index("order")
    elsewhere = first.loc[first["votes"] != THRESHOLD, "order"].min()
    last = first["order"].max()
    branches = select(first, order=last)["votes"]
    end = max(SHOWN)
    return {
        "until": first.loc[first["order"] < elsewhere, "order"].max(),
        "last": last,
        "branches": (branches.min(), branches.max()),
        "share": at.loc[50, THRESHOLD] / worst.loc[50, "rdp"],
        "divergences": _list_divergences(at.loc[list(SHOWN)], worst.loc[list(SHOWN)]),
        "beats": at.index[at[MOST] > at[THRESHOLD]].min(),
        "lower": worst.index[worst["votes"] < THRESHOLD].min(),
        "end": end,
        "short": 1 - at.loc[end, [THRESHOLD, MOST]].max() / worst.loc[end, "rdp"],
        **_compare_costs(select(rows, figure=3)),
    }


def _list_divergences(at: pd.DataFrame, worst: pd.DataFrame) -> pd.DataFrame:
    pairs = worst["votes"].map("{:.0f}, ".format) + worst["neighbour"].map("{:.0f}".format)
    divergences = {"maximum": worst["rdp"], "at $T$": at[THRESHOLD], "at $k$": at[MOST]}
    lines = {"worst pair $t, t'$": pairs, **{name: rdp.map("{:.6e}".format) for name, rdp in divergences.items()}}
    return pd.DataFrame(lines).rename("{:.0f}".format).rename_axis("order").reset_index()


def _compare_costs(rows: pd.DataFrame) -> dict[str, Any]:
    """Return the cost of many screenings by all accountants, and where the published rule is too low."""
    rule = select(rows, kind="at").pivot(index="screenings", columns="votes", values="epsilon")[[THRESHOLD, MOST]]
    rest = rows[rows["kind"] != "at"].pivot(index="screenings", columns="kind", values="epsilon")
    costs = rule.set_axis(["at $T$", "at $k$"], axis=1).join(rest[["classic", "tight", "Bellman", "fixed pair"]])
    pair, published = costs["fixed pair"], rule.max(axis=1)
    most = costs.iloc[-1]
    return {
        "costs": costs.map("{:.6f}".format).rename(index="{:,}".format).reset_index(),
        "too_low": [(count, published[count], pair[count]) for count in costs.index[published < pair]],
        "most": costs.index[-1],
        "waste": most["classic"] / most["Bellman"] - 1,
        "saved": (most["classic"] - most["tight"]) / (most["classic"] - most["Bellman"]),
        "gap": (costs["Bellman"] / pair - 1).max(),
    }


PARAMETERS = {
    "neighbours": SCREENING.n_neighbors,
    "threshold": SCREENING.threshold,
    "screening noise": SCREENING.noise,
    "fixed max-votes": list(FIXED_VOTES),
    "sampling rate of figure 3": SAMPLING_RATE,
    "delta": DELTA,
}
STUDY = Study("screening", cases, measure, figures, facts, ("none: all figures are computed",), PARAMETERS, ())
