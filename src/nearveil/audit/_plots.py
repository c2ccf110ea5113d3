"""Pictures of a report: what was measured, and the border that the promise draws."""

import math
from typing import TYPE_CHECKING

import numpy as np

from nearveil.audit._report import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SHOWN, _BORDER, _AREA = "#1b4f9c", "#b3261e", "#f6d9d6"


def draw(report: Report, ax: "Axes | None" = None) -> "Figure":
    """Draw a report."""
    from matplotlib.figure import Figure

    if ax is None:
        ax = Figure(figsize=(4.6, 3.8), layout="constrained").subplots()
    (_events if report.curve.kind == "event" else _divergence)(report, ax)
    ax.set_title(f"{report.mechanism}: {report.verdict}", fontsize=10)
    ax.tick_params(labelsize=8)
    ax.legend(fontsize=7, loc="best")
    figure = ax.figure
    assert isinstance(figure, Figure)
    return figure


def _events(report: Report, ax: "Axes") -> None:
    """Draw how often events come in either world; above the border the promise says they cannot be."""
    x, y = np.array(report.curve.x), np.array(report.curve.y)
    least = min(max(min((v for v in (*x, *y) if v > 0), default=1e-4), 1e-7), 0.5)
    grid = np.geomspace(least, 1.0, 200)
    if report.promised_epsilon < 700:
        allowed = np.minimum(1.0, math.exp(report.promised_epsilon) * grid + report.promised_delta)
        ax.plot(grid, allowed, color=_BORDER, lw=1.2, label="most that the promise allows")
        ax.fill_between(grid, allowed, 1.0, color=_AREA, lw=0)
    ax.plot(np.maximum(x, least), np.maximum(y, least), color=_SHOWN, lw=1.5, label="measured, all thresholds")
    ax.plot(*(max(v, least) for v in report.curve.chosen), "o", color=_SHOWN, ms=6, label="the event that was chosen")
    ax.set(xscale="log", yscale="log", xlim=(least, 1.0), ylim=(least, 1.05))
    ax.set_xlabel("probability in the other world", fontsize=8)
    ax.set_ylabel("probability in the event's world", fontsize=8)


def _divergence(report: Report, ax: "Axes") -> None:
    """Draw the divergence at each epsilon; at the promised one it must not be above the promised delta."""
    x = np.array(report.curve.x)
    least = max(report.promised_delta, 1e-9) / 10
    ax.plot(x, np.maximum(report.curve.y, least), color=_SHOWN, lw=1.5, label="estimated divergence")
    ax.plot(x, np.maximum(report.curve.low, least), color=_SHOWN, lw=1.0, ls="--", label="lower bound")
    top = max(1.0, *report.curve.y)
    if math.isfinite(report.promised_epsilon):
        ax.axvline(report.promised_epsilon, color=_BORDER, lw=1.2, label="promised epsilon")
        ax.axhline(max(report.promised_delta, least), color=_BORDER, lw=1.2, ls=":", label="promised delta")
        beyond = x >= report.promised_epsilon
        ax.fill_between(x[beyond], max(report.promised_delta, least), top, color=_AREA, lw=0)
    ax.set(yscale="log", ylim=(least, 1.5 * top), xlim=(0, max(x)))
    ax.set_xlabel("epsilon", fontsize=8)
    ax.set_ylabel("hockey-stick divergence", fontsize=8)
