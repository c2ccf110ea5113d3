"""One look for all figures: readable in grey and by colour-blind readers, and plain about what is sound.

A method has the same colour, line and marker everywhere. What keeps its promise is drawn solid with full markers; what
does not is dotted with hollow ones and says so. What no private message can reach is grey, and what a release must
beat is a dashed black line.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from studies._study import Mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLE: Any = {
    "font.size": 9.5,
    "font.family": "DejaVu Sans",
    "axes.titlesize": 10.5,
    "axes.labelsize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "0.9",
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.6,
    "lines.markersize": 5.0,
    "figure.dpi": 110,
    "savefig.dpi": 150,
    "savefig.facecolor": "white",
    "svg.hashsalt": "nearveil",
    "svg.fonttype": "path",
}
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
FLOOR = "floor: asks nothing"


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
_OTHERS = tuple(
    Look(colour, marker, dashes)
    for colour, marker, dashes in zip(
        (COLOURS[name] for name in ("blue", "red", "green", "orange", "purple", "sky", "grey", "black")),
        "os^Dvp<>",
        ("-", (0, (6, 2)), (0, (3, 2)), (0, (6, 2, 1, 2)), (0, (2, 1)), (0, (4, 1)), (0, (1, 1)), "-."),
        strict=True,
    )
)


def look(name: str, place: int = 0) -> Look:
    """Return how a method is drawn; one that has no look of its own takes that of its place among the others."""
    return LOOKS.get(name, _OTHERS[place % len(_OTHERS)])


def curve(
    axes: "Axes",
    name: str,
    x: Sequence[float],
    found: Sequence[Mean],
    *,
    sound: bool = True,
    place: int = 0,
    label: str | None = None,
) -> None:
    """Draw means with their intervals."""
    style = look(name, place)
    y = [point.value for point in found]
    # Where an interval is not known there is none to draw.
    below = [0 if math.isnan(point.low) else point.value - point.low for point in found]
    above = [0 if math.isnan(point.high) else point.high - point.value for point in found]
    shown = label if label is not None else name
    axes.errorbar(
        x,
        y,
        yerr=[below, above],
        color=style.colour,
        marker=style.marker,
        linestyle=style.dashes if sound else ":",
        markerfacecolor=style.colour if sound else "white",
        capsize=2,
        elinewidth=0.9,
        label=shown if sound else f"{shown} (unsound)",
    )


def ceiling(axes: "Axes", x: Sequence[float], y: Sequence[float], *, top: float = 1.0) -> None:
    """Shade what no private message can reach, from a line to the top."""
    axes.fill_between(x, y, [max(top, value) for value in y], color="0.86", linewidth=0, label=IMPOSSIBLE, zorder=0.5)
    axes.plot(x, y, color="0.45", linewidth=1.0, zorder=0.6)


def floor(axes: "Axes", y: float | Sequence[float], x: Sequence[float] | None = None, label: str = FLOOR) -> None:
    """Draw what is found without a message: what a release must beat."""
    dashes = (0, (1, 2.5))
    if isinstance(y, Sequence):
        if x is None:
            raise ValueError("x must be given where the floor is no constant")
        axes.plot(x, y, color="black", linewidth=1.3, linestyle=dashes, label=label)
    else:
        axes.axhline(y, color="black", linewidth=1.3, linestyle=dashes, label=label)


def epsilon_axis(axes: "Axes", epsilons: Sequence[float], *, label: str = "epsilon of one query") -> None:
    """Let x be epsilon, a logarithmic axis with a plain number at some of the values."""
    axes.set_xscale("log")
    axes.set_xticks(list(epsilons), [f"{epsilon:g}" for epsilon in epsilons])
    axes.minorticks_off()
    axes.set_xlabel(label)


def legend_below(figure: Any, axes: Sequence["Axes"], ncols: int = 3) -> None:
    """Put one legend for all axes below them: each label once, the first time that it comes."""
    found: dict[str, Any] = {}
    for one in axes:
        for handle, label in zip(*one.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    figure.legend(list(found.values()), list(found), loc="outside lower center", ncols=ncols)
