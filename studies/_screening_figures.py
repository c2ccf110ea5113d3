"""How figures 1 to 3 of the Private-kNN supplement are drawn."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

from nearveil.privacy.events import NoisyScreening
from studies._study import Row, grouped
from studies._style import COLOURS, legend_below, look

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKED = (20, 80, 150, 300)
_WIDE = {"color": "0.75", "linewidth": 7, "solid_capstyle": "butt", "zorder": 1}


def name_of(votes: int, screening: NoisyScreening) -> str:
    """Return what a fixed max-vote is called."""
    k = screening.n_neighbors
    known = {int(screening.threshold): " (T)", k: " (k)", k // 10: " (k/10)"}
    return f"t = {votes}{known.get(votes, '')}"


def surface_figure(rows: Sequence[Row]) -> Figure:
    """Draw figure 1: the divergence as a share of the worst at its order, and where the worst is."""
    figure = Figure(figsize=(7, 4.6), layout="constrained")
    axes = figure.subplots()
    axes.grid(visible=False)
    kinds = grouped(rows, "kind")
    worst = kinds["worst",]
    top = {row["order"]: row["rdp"] for row in worst}
    cells = kinds["at",]
    orders, votes = sorted({row["order"] for row in cells}), sorted({row["votes"] for row in cells})
    share = np.array([row["rdp"] / top[row["order"]] for row in cells]).reshape(len(orders), len(votes)).T
    image = axes.pcolormesh(orders, votes, share, cmap="cividis", vmin=0, vmax=1, shading="gouraud", rasterized=True)
    figure.colorbar(image, ax=axes, label="divergence, as a share of the worst at this order")
    for place, branch in enumerate((worst[: len(top)], worst[len(top) :])):
        axes.plot(
            [row["order"] for row in branch],
            [row["votes"] for row in branch],
            color="black",
            linewidth=2.2,
            label=None if place else "the true worst (one on either side)",
        )
    threshold = worst[0]["votes"]  # at the lowest order the worst is T itself
    axes.axhline(threshold, color="white", linestyle=(0, (4, 3)), label=f"published: T = {threshold}")
    axes.set(xlabel="order of the Rényi divergence", ylabel="max-vote t", xlim=(orders[0], orders[-1]))
    shown = axes.legend(loc="lower right", frameon=True, framealpha=0.92, facecolor="0.75")
    shown.set_zorder(5)
    return figure


def worst_figure(rows: Sequence[Row], screening: NoisyScreening) -> Figure:
    """Draw figure 2: fixed max-votes and the maximum, absolute and as a share of the Gaussian's divergence."""
    figure = Figure(figsize=(10.5, 4.6), layout="constrained")
    panels = figure.subplots(1, 2)
    worst = [row for row in rows if row["kind"] == "worst"]
    for axes, relative in zip(panels, (False, True), strict=True):
        unit = {row["order"]: row["order"] / (2 * screening.noise**2) if relative else 1.0 for row in worst}
        x, y = _points(worst, unit)
        axes.plot(x, y, label="the true maximum (marks: its t)", **_WIDE)
        for place, ((votes,), found) in enumerate(grouped(_fixed(rows), "votes").items()):
            _line(axes, *_points(found, unit), place, name_of(votes, screening))
        for row in worst:
            if row["order"] in MARKED:
                at = (row["order"], row["rdp"] / unit[row["order"]])
                axes.plot(*at, marker="o", color="black", markersize=4, linestyle="")
                axes.annotate(f"{row['votes']}", at, (-2, 8), textcoords="offset points", ha="right")
        axes.set(xlabel="order of the Rényi divergence", ylim=(0, 1.14 * max(y)))
    panels[0].set_ylabel("divergence of one screening")
    panels[1].set_ylabel("as a share of the Gaussian mechanism's")
    legend_below(figure, list(panels))
    return figure


def costs_figure(rows: Sequence[Row], screening: NoisyScreening) -> Figure:
    """Draw figure 3: the published curves, and all accountants divided by the exact cost."""
    figure = Figure(figsize=(10.5, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    kinds = grouped(rows, "kind")
    exact = {row["screenings"]: row["epsilon"] for row in kinds["Bellman",]}
    one = dict.fromkeys(exact, 1.0)
    fixed = grouped(_fixed(rows), "votes")
    left.plot(*_points(kinds["Bellman",], one, "screenings", "epsilon"), label="Bellman: exact, rounded up", **_WIDE)
    right.axhline(1, label="Bellman: exact, rounded up", **_WIDE)
    for place, ((votes,), found) in enumerate(fixed.items()):
        points = _points(found, one, "screenings", "epsilon")
        _line(left, *points, place, f"{name_of(votes, screening)} (unsound)", dotted=True)
    for votes, place in ((int(screening.threshold), 0), (screening.n_neighbors, 2)):
        points = _points(fixed[votes,], exact, "screenings", "epsilon")
        _line(right, *points, place, f"{name_of(votes, screening)} (unsound)", dotted=True)
    for kind, marker, label in (
        ("classic", "D", "Rényi maximum, classic conversion"),
        ("tight", "X", "Rényi maximum, tight conversion"),
    ):
        points = _points(kinds[kind,], exact, "screenings", "epsilon")
        right.plot(*points, color=COLOURS["grey"], marker=marker, linestyle="-.", label=label)
    lowest = _points(kinds["fixed pair",], exact, "screenings", "epsilon")
    right.plot(*lowest, color="black", linewidth=1.2, label="fixed pair: a lower bound")
    right.fill_between(lowest[0], 0, lowest[1], color="0.9", linewidth=0, zorder=0)
    for axes in (left, right):
        axes.set(xscale="log", xlabel="screenings")
        axes.set_xticks([1, 10, 100, 1000, 8192], ["1", "10", "100", "1,000", "8,192"])
        axes.minorticks_off()
    left.set(yscale="log", ylabel="epsilon at delta 1e-5")
    right.set(ylabel="epsilon divided by the exact one (below 1: too low)", ylim=(0, None))
    legend_below(figure, [left, right])
    return figure


def _fixed(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["kind"] == "at"]


def _points(
    rows: Sequence[Row], unit: dict[float, float], x: str = "order", y: str = "rdp"
) -> tuple[list[float], list[float]]:
    return [row[x] for row in rows], [row[y] / unit[row[x]] for row in rows]


def _line(
    axes: "Axes", x: Sequence[float], y: Sequence[float], place: int, label: str, *, dotted: bool = False
) -> None:
    style = look("", place)
    axes.plot(
        x,
        y,
        color=style.colour,
        marker=style.marker,
        markerfacecolor="white" if dotted else style.colour,
        markevery=max(1, len(x) // 8),
        linestyle=":" if dotted else style.dashes,
        label=label,
    )
