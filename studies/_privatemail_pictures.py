"""Pictures of embeddings: readable in grey, and few enough dots to see them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from studies._privatemail import averaged
from studies._privatemail_methods import FIRST, PAPER, PROGRAM
from studies._study import Row, grouped
from studies._style import COLOURS, curve, epsilon_axis, legend_below, look

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ROLES = {  # of the pictures of an alignment: colour, marker, size, what it is
    "server": (COLOURS["sky"], "s", 12, "public anchors, the server's embedding"),
    "client": (COLOURS["red"], "x", 12, "public anchors, the client's noisy embedding"),
    "target": (COLOURS["black"], "*", 130, "the private target"),
}
_NAMES = {PROGRAM: "the authors' program", PAPER: "as published, eq. 4"}


def iterations(points: Sequence[Row], spread: Sequence[Row]) -> "Figure":
    """Draw a row a method and a column an iteration."""
    from matplotlib.figure import Figure

    methods, steps = grouped(points, "method"), [key[0] for key in grouped(points, "step")]
    figure = Figure(figsize=(10.8, 2.35 * len(methods) + 0.7), layout="constrained")
    panels = figure.subplots(len(methods), len(steps), squeeze=False)
    for line, ((method,), own) in zip(panels, methods.items(), strict=True):
        for axes, step in zip(line, steps, strict=True):
            _scatter(axes, [row for row in own if row["step"] == step])
            within = averaged([r for r in spread if (r["method"], r["step"]) == (method, step)], "within").value
            axes.set_title(f"iteration {step}", fontsize=9.5)
            axes.set_xlabel(f"within classes: {within:.0%}", fontsize=8.5)
        line[0].set_ylabel(_NAMES[method])
    legend_below(figure, [panels[0][0]], ncols=9)
    return figure


def _scatter(axes: "Axes", rows: Sequence[Row]) -> None:
    for place, ((label,), own) in enumerate(
        sorted(grouped(rows, "class").items(), key=lambda item: -1 if item[0][0] is None else item[0][0])
    ):
        x, y = [row["x"] for row in own], [row["y"] for row in own]
        if label is None:
            axes.scatter(x, y, s=7, color="0.8", linewidths=0, label="other classes", rasterized=True)
        else:
            style = look("", place - 1)
            axes.scatter(
                x,
                y,
                s=16,
                color=style.colour,
                marker=style.marker,
                linewidths=0.4,
                edgecolors="white",
                label=f"class {label}",
                rasterized=True,
            )
    _bare(axes)


def alignment(points: Sequence[Row], title: str) -> "Figure":
    """Draw the client's and the server's anchors, before alignment above, after it below, a column an epsilon."""
    from matplotlib.figure import Figure

    columns = grouped(points, "epsilon")
    figure = Figure(figsize=(10.2, 6.4), layout="constrained")
    figure.suptitle(title, fontsize=11)
    panels = figure.subplots(2, len(columns), squeeze=False)
    for column, ((epsilon,), own) in zip(panels.T, columns.items(), strict=True):
        for axes, when in zip(column, ("before", "after"), strict=True):
            for role, (colour, marker, size, name) in _ROLES.items():
                here = [row for row in own if (row["when"], row["role"]) == (when, role)]
                x, y = [row["x"] for row in here], [row["y"] for row in here]
                axes.scatter(x, y, s=size, color=colour, marker=marker, linewidths=0.9, label=name, rasterized=True)
            axes.set_title(f"epsilon {epsilon:g}, {when} alignment", pad=15)  # room for the axis's factor
            axes.locator_params(nbins=4)
            axes.ticklabel_format(style="sci", scilimits=(-2, 3))
    legend_below(figure, [panels[0][0]], ncols=3)
    return figure


def errors(rows: Sequence[Row]) -> "Figure":
    """Draw the error after alignment over epsilon, a curve a version."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.4, 4.2), layout="constrained")
    axes = figure.subplots()
    for (method,), own in grouped(rows, "method").items():
        groups = grouped(own, "epsilon")
        means = [averaged(group, "after") for group in groups.values()]
        data = "CUB-200-2011" if method == FIRST else "Cars196"
        curve(axes, method, [key[0] for key in groups], means, sound=False, label=f"{method}, {data}")
    axes.axhline(1, color="black", linewidth=1.3, linestyle=(0, (1, 2.5)), label="noise alone")
    axes.axhline(0, color=COLOURS["blue"], linewidth=1.6, label="PrivateMail made sound: anchors are public")
    epsilon_axis(axes, (0.01, 0.1, 1, 4, 16), label="nominal epsilon of one query")
    axes.set_ylabel("anchors' error after alignment,\nin units of the server's spread")
    axes.set_ylim(-0.05, 1.1)
    legend_below(figure, [axes], ncols=1)
    return figure


def _bare(axes: "Axes") -> None:
    axes.set(xticks=[], yticks=[])
    axes.grid(visible=False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("0.8")
