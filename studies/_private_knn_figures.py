"""How the accuracy of students is drawn over what their teachers cost."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from studies._private_knn_ways import FIGURE_4, GIVEN, OURS, PATE, PATE_GIVEN
from studies._study import Mean
from studies._style import COLOURS, curve, epsilon_axis, floor

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Curves = Mapping[str, Sequence[tuple[float, Mean, Any]]]
TICKS = (0.01, 0.1, 1, 10)
AXIS = "epsilon of all answers"


def accuracy_figure(curves: Mapping[Any, Curves], claimed: Mapping[Any, float], titles: Mapping[Any, str]) -> Figure:
    """Draw accuracy over epsilon: MNIST, the upper end of MNIST, SVHN."""
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    panels = figure.subplots(1, 3)
    shown = (("mnist", titles["mnist"], (0, 1.02)), ("mnist", "MNIST, from 0.94 on", (0.94, 1)))
    for axes, (name, title, limits) in zip(panels, (*shown, ("svhn", titles["svhn"], (0, 1.02))), strict=True):
        _panel(axes, curves[name], claimed[name])
        axes.set(title=title, ylim=limits)
    panels[0].set_ylabel("accuracy of the student on held images")
    _legend(figure, panels)
    return figure


def _panel(axes: "Axes", found: Curves, claimed: float) -> None:
    for way in (OURS, PATE, GIVEN, PATE_GIVEN):
        points = found[way]
        curve(axes, way, [epsilon for epsilon, _, _ in points], [level for _, level, _ in points])
    for way, points in found.items():
        if way == "ours, network":
            curve(axes, way, [e for e, _, _ in points], [level for _, level, _ in points], place=7)
    ((honest, level, _),) = found[GIVEN]
    axes.plot([claimed, honest], [level.value] * 2, color=COLOURS["red"], linestyle=":", linewidth=1.2)
    curve(axes, GIVEN, [claimed], [level], sound=False, label="published parameters, at the epsilon claimed")
    _references(axes, found)
    epsilon_axis(axes, TICKS, label=AXIS)


def _references(axes: "Axes", found: Curves) -> None:
    ((_, low, _),), ((_, top, _),), ((_, near, _),) = (
        found[way] for way in ("commonest class", "true labels", "neighbours, no privacy")
    )
    floor(axes, low.value, label="floor: the commonest class")
    axes.axhline(top.value, color="black", linestyle="-.", linewidth=1.1, label="the same student, true labels")
    axes.axhline(near.value, color="0.5", linestyle=(0, (6, 2)), linewidth=1.1, label="neighbours, no privacy")


def trade_off_figure(found: Curves) -> Figure:
    """Draw figure 4 of the supplement: sampling rates and numbers of queries, ours, and PATE."""
    figure = Figure(figsize=(9.5, 4.6), layout="constrained")
    panels = figure.subplots(1, 2)
    for axes, limits in zip(panels, ((0, 1.02), (0.94, 1)), strict=True):
        for place, way in enumerate((*FIGURE_4, PATE, OURS)):
            points = found[way]
            label = f"{way}, queries varied" if way in FIGURE_4 else way
            curve(axes, way, [e for e, _, _ in points], [level for _, level, _ in points], place=place + 1, label=label)
        _references(axes, found)
        epsilon_axis(axes, TICKS, label=AXIS)
        axes.set(ylim=limits, title="MNIST" if limits[0] == 0 else "MNIST, from 0.94 on")
    panels[0].set_ylabel("accuracy of the student on held images")
    _legend(figure, panels)
    return figure


def _legend(figure: Figure, panels: Any) -> None:
    from studies._style import legend_below

    legend_below(figure, list(panels))
