"""One look for all figures: readable in grey and by colour-blind readers, and plain about what is sound.

A method has the same colour, line and marker everywhere. What keeps its guarantee is drawn solid with full markers;
what does not is dotted with hollow ones and says so. What no private message can reach is grey, and what a release must
beat is a dotted black line.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rc_params_from_file
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from studies._study import TEMPLATES, Mean, select, summarise

STYLE = rc_params_from_file(TEMPLATES / "figures.mplstyle", use_default_template=False)
# Okabe and Ito's colours, without yellow, which is lost on white.
COLOURS = {
    "blue": "#0072B2",
    "orange": "#E69F00",
    "green": "#009E73",
    "red": "#D55E00",
    "purple": "#CC79A7",
    "sky": "#56B4E9",
    "black": "#000000",
    "grey": "#7F7F7F",
}
IMPOSSIBLE = "impossible: above the ceiling"
FLOOR = "floor: no query"


@dataclass(frozen=True)
class Look:
    """How a method is drawn."""

    colour: str
    marker: str
    dashes: Any = "-"


LOOKS: dict[str, Look] = {
    "covers": Look(COLOURS["blue"], "o"),
    "k-means cells": Look(COLOURS["green"], "s", (0, (6, 2))),
    "balanced cells, subset": Look(COLOURS["green"], "P", (0, (3, 2))),
    "unary, symmetric": Look(COLOURS["sky"], "p", (0, (6, 2, 1, 2))),
    "unary, optimised": Look(COLOURS["sky"], "v", (0, (3, 1, 1, 1))),
    "PrivUnit": Look(COLOURS["orange"], "^", (0, (4, 2))),
    "PrivUnit, all dimensions": Look(COLOURS["orange"], ">", (0, (2, 2))),
    "analytic Gaussian": Look(COLOURS["purple"], "v", (0, (5, 2, 1, 2))),
    "von Mises-Fisher": Look(COLOURS["purple"], "<", (0, (2, 1))),
    "PrivateMail, Gaussian": Look(COLOURS["red"], "D", (0, (6, 2))),
    "PrivateMail, Laplace": Look(COLOURS["red"], "d", (0, (3, 2))),
    "DP-dSNE": Look(COLOURS["grey"], "X", (0, (4, 2))),
    "random projection": Look(COLOURS["grey"], "*", (0, (2, 2))),
    "private PCA": Look(COLOURS["black"], "1", (0, (6, 2, 1, 2))),
    "LATENT": Look(COLOURS["red"], "*", (0, (6, 1))),
    "OME": Look(COLOURS["black"], "x", (0, (4, 3))),
    "random projection, as published": Look(COLOURS["blue"], "o"),
    "PrivateMail 2022, as published": Look(COLOURS["red"], "o"),
    "PrivateMail 2021, as published": Look(COLOURS["orange"], "v"),
    "PrivateMail 2022, the authors' program": Look(COLOURS["purple"], "s"),
    "no privacy": Look(COLOURS["black"], "", "-."),
    "t-SNE, no privacy": Look(COLOURS["grey"], "", "-."),
    "SMLQ, no privacy": Look(COLOURS["sky"], "", "-."),
    "ours": Look(COLOURS["blue"], "o"),
    "PATE": Look(COLOURS["orange"], "s", (0, (5, 2))),
    "published parameters": Look(COLOURS["red"], "^", (0, (2, 2))),
    "PATE, published parameters": Look(COLOURS["purple"], "D", (0, (2, 2))),
}
_OTHERS = (
    Look(COLOURS["blue"], "o"),
    Look(COLOURS["red"], "s", (0, (6, 2))),
    Look(COLOURS["green"], "^", (0, (3, 2))),
    Look(COLOURS["orange"], "D", (0, (6, 2, 1, 2))),
    Look(COLOURS["purple"], "v", (0, (2, 1))),
    Look(COLOURS["sky"], "p", (0, (4, 1))),
    Look(COLOURS["grey"], "<", (0, (1, 1))),
    Look(COLOURS["black"], ">", "-."),
)


def look(name: str, index: int = 0) -> Look:
    """Return how a method is drawn; one that has no look of its own takes that of its place among the others."""
    return LOOKS.get(name, _OTHERS[index % len(_OTHERS)])


def make_panels(lines: int, columns: int, size: tuple[float, float], **shared: Any) -> tuple[Figure, Any]:
    """Return a figure, and its axes as an array of shape (lines, columns)."""
    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(lines, columns, squeeze=False, **shared)


def make_grid(
    frame: pd.DataFrame, size: tuple[float, float], *, column: str, line: str | None = None, **shared: Any
) -> tuple[Figure, Any, list[tuple[Axes, Any, pd.DataFrame]]]:
    """Return a figure, and a panel with its values and rows for each value of `column`, and of `line` if given."""
    names = [column] if line is None else [line, column]
    values = [frame[name].unique() for name in names]
    figure, panels = make_panels(len(values[0]) if line else 1, len(values[-1]), size, **shared)
    cells = []
    for axes, keys in zip(panels.flat, product(*values), strict=True):
        group = select(frame, **dict(zip(names, keys, strict=True)))
        cells.append((axes, keys if line else keys[0], group))
    return figure, panels, cells


def curve(
    axes: Axes, name: str, results: pd.DataFrame, *, sound: bool = True, index: int = 0, label: str | None = None
) -> None:
    """Draw means over the index of a summary, with their intervals where they are known."""
    style, shown = look(name, index), label if label is not None else name
    spread = [results["value"] - results["low"], results["high"] - results["value"]]
    axes.errorbar(
        results.index.to_numpy(),
        results["value"].to_numpy(),
        yerr=[side.fillna(0).to_numpy() for side in spread],
        color=style.colour,
        marker=style.marker,
        linestyle=style.dashes if sound else ":",
        markerfacecolor=style.colour if sound else "white",
        capsize=2,
        elinewidth=0.9,
        label=shown if sound else f"{shown} (unsound)",
    )


def curves(
    axes: Axes,
    frame: pd.DataFrame,
    column: str,
    over: str,
    *,
    by: str = "method",
    only: Iterable[Any] | None = None,
    labels: Mapping[Any, str] | None = None,
    unsound: Sequence[Any] = (),
    index: int = 0,
) -> None:
    """Draw the means of a column over another: a curve for each value of a third that was measured."""
    groups = dict(iter(frame.groupby(by, sort=False)))
    for number, name in enumerate(groups if only is None else only, index):
        if name in groups:
            results = summarise(groups[name], column, over).sort_index()
            label = (labels or {}).get(name, str(name))
            curve(axes, str(name), results, sound=name not in unsound, index=number, label=label)


def without_interval(values: pd.Series) -> pd.DataFrame:
    """Return values as a summary whose intervals have no width."""
    return pd.DataFrame({"value": values, "low": values, "high": values})


def level(results: Mean, ends: Sequence[float]) -> pd.DataFrame:
    """Return a mean that is the same over all of an axis."""
    return pd.DataFrame([results, results], index=[ends[0], ends[-1]])


def dots(axes: Axes, results: pd.DataFrame, *, shift: float = 0.0, **style: Any) -> None:
    """Draw means from left to right, a line for each of their names."""
    value, low, high = (results[name] for name in ("value", "low", "high"))
    spread = [(value - low).clip(upper=0.99 * value), high - value]
    heights = [row + shift for row in range(len(results))]
    axes.errorbar(value, heights, xerr=spread, linestyle="", capsize=2, **style)
    axes.set_ylim(len(results) - 0.5, -0.5)
    axes.set_yticks(range(len(results)), list(results.index))


def ceiling(axes: Axes, x: Sequence[float], y: Sequence[float], *, top: float = 1.0) -> None:
    """Shade what no private message can reach, from a line to the top."""
    axes.fill_between(x, y, [max(top, value) for value in y], color="0.86", linewidth=0, label=IMPOSSIBLE, zorder=0.5)
    axes.plot(x, y, color="0.45", linewidth=1.0, zorder=0.6)


def floor(axes: Axes, y: float, label: str = FLOOR, **style: Any) -> None:
    """Draw what is found without a message: what a release must beat."""
    axes.axhline(y, color="black", linewidth=1.3, linestyle=(0, (1, 2.5)), label=label, **style)


def epsilon_axis(axes: Axes, epsilons: Iterable[float], *, label: str = "epsilon of one query") -> None:
    """Let x be epsilon, a logarithmic axis with a plain number at some of the values."""
    axes.set_xscale("log")
    ticks = sorted(epsilons)
    set_ticks(axes, ticks, [f"{epsilon:g}" for epsilon in ticks])
    axes.set_xlabel(label)


def shares(axes: Axes, frame: pd.DataFrame, names: Mapping[str, str]) -> None:
    """Draw columns that are shares of the ceiling over epsilon, each under its name."""
    epsilons = sorted(frame["epsilon"].unique())
    ceiling(axes, epsilons, [1.0] * len(epsilons), top=1.05)
    for position, (column, name) in enumerate(names.items()):
        curve(axes, name, summarise(frame, column, "epsilon").sort_index(), index=position + 3)
    epsilon_axis(axes, epsilons)


def set_ticks(axes: Axes, ticks: Sequence[float], names: Sequence[str]) -> None:
    """Write names at some values of a logarithmic axis, and nothing between them."""
    axes.set_xticks(ticks, names)
    axes.minorticks_off()


def finish(figure: Figure, panels: Any, ylabel: str = "", *, ncols: int = 3) -> None:
    """Name y beside the first column of panels, and put one legend for all of them below: each label once."""
    grid = np.atleast_2d(np.asarray(panels, dtype=object))
    for axes in grid[:, 0] if ylabel else ():
        axes.set_ylabel(ylabel)
    handles: dict[str, Any] = {}
    for axes in grid.flat:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=ncols)
