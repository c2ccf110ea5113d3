"""What an audit found."""

import json
import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Verdict = Literal["kept", "broken", "undecided"]

FALSE_ALARM = 5e-7
"""The probability with which one audit may call a sound mechanism broken, all attacks and checks together."""

_SHOWN, _BORDER, _AREA = "#1b4f9c", "#b3261e", "#f6d9d6"  # colours
_TOLERANCE = (0.1, 0.05)  # of the guarantee, and at least: how far an interval may reach beyond it and still be "kept"


@dataclass(frozen=True)
class Attack:
    """What one attack showed."""

    name: str
    pair: str = ""  # the inputs that it told apart best on the choosing half; empty where it was not measured
    interval: tuple[float, float] | None = None  # of its epsilon, at the report's confidence
    refutes: bool = False  # whether it shows more than was promised, at its share of `FALSE_ALARM`
    note: str = ""  # why it was not measured


@dataclass(frozen=True)
class Check:
    """What one check of the mechanism's conduct found.

    Attributes
    ----------
    name : str
        What was checked: "the stated law", "caps".
    result : {"passed", "failed", "not run"}
        "failed" breaks the guarantee.
    detail : str
        What was found, or why the check was not run.
    """

    name: str
    result: Literal["passed", "failed", "not run"]
    detail: str = ""


@dataclass(frozen=True)
class Curve:
    """What the measured runs looked like, in a few hundred points."""

    # "event": how often a score passed each threshold, in either world. "divergence": the hockey-stick divergence at
    # each epsilon, and the bound from below.
    kind: Literal["event", "divergence"]
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...]
    chosen: tuple[float, float]  # the point that decided


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was promised, what could be shown, and how.

    Attributes
    ----------
    mechanism : str
    promised_epsilon, promised_delta : float
    shown_epsilon : float
        The lower end of the interval: no smaller epsilon can be true, at this confidence.
    interval : (float, float)
        Of the epsilon of this attack on this pair, not of the mechanism: another attack may show more.
    verdict : {"kept", "broken", "undecided"}
        "broken" if an attack shows more than was promised or a check failed, which happens to a sound mechanism with a
        probability of at most 5e-7. "kept" if not, and the interval neither begins above the guarantee nor ends beyond
        `limit`. Else "undecided": more trials would decide.
    limit : float
        How far the interval of a guarantee that is "kept" may reach: a tenth beyond it, and at least 0.05.
    attack : str
        The one that showed most on the choosing half.
    pair : str
        The inputs that it told apart.
    one_run : float or None
        What a single run with many records shows.
    trials : int
        Runs of either input, both halves.
    confidence : float
    sound : bool
        Whether the mechanism's own guarantee calls itself proved.
    seeded : bool
        Whether the runs came from a seed.
    attacks : tuple of Attack
        All of them, the one that decided first.
    checks : tuple of Check
    notes : tuple of str
    curve : Curve

    Examples
    --------
    >>> from nearveil.audit import audit
    >>> from nearveil.privacy.noise import unsafe_seeded
    >>> from nearveil.mechanisms import Cells
    >>> report = audit(Cells(1.0), trials=20_000, source=unsafe_seeded(0))  # a seed, so that this repeats
    >>> report.verdict, report.promised_epsilon, 0.8 < report.shown_epsilon <= 1.0
    ('kept', 1.0, True)
    """

    mechanism: str
    promised_epsilon: float
    promised_delta: float
    shown_epsilon: float
    interval: tuple[float, float]
    attack: str
    pair: str
    one_run: float | None
    trials: int
    confidence: float
    sound: bool
    seeded: bool
    attacks: tuple[Attack, ...] = ()
    checks: tuple[Check, ...] = ()
    notes: tuple[str, ...] = ()
    curve: Curve = field(repr=False)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the guarantee is broken; empty where it is not."""
        shown = [
            f"{one.name} shows epsilon {one.interval[0]:.4g} on {one.pair}"
            for one in self.attacks
            if one.refutes and one.interval is not None
        ]
        return (*shown, *(f"{one.name}: {one.detail}" for one in self.checks if one.result == "failed"))

    @property
    def passed(self) -> str:
        """How many checks passed, of those that were run; empty where none was."""
        run = [one for one in self.checks if one.result != "not run"]
        return f"{sum(one.result == 'passed' for one in run)}/{len(run)}" if run else ""

    @property
    def limit(self) -> float:
        """How far the interval of a guarantee that is "kept" may reach."""
        return self.promised_epsilon + max(_TOLERANCE[0] * self.promised_epsilon, _TOLERANCE[1])

    @property
    def verdict(self) -> Verdict:
        """What attacks and checks say about the guarantee."""
        if self.reasons:
            return "broken"
        low, high = self.interval
        return "kept" if low <= self.promised_epsilon and high <= self.limit else "undecided"

    @property
    def verdict_words(self) -> str:
        """The verdict, and whether the guarantee is marked unsound: then "kept" means that no attack here saw why."""
        doubtful = not self.sound and math.isfinite(self.promised_epsilon)
        return f"{self.verdict}, unsound" if doubtful else self.verdict

    @property
    def cells(self) -> dict[str, str]:
        """The report in print, by column."""
        finite, (low, high) = math.isfinite(self.promised_epsilon), self.interval
        return {
            "mechanism": self.mechanism,
            "promised": show_epsilon(self.promised_epsilon) if finite else "nothing",
            "delta": f"{self.promised_delta:.2g}",
            "shown": show_epsilon(self.shown_epsilon),
            "interval": f"{show_epsilon(low)} to {show_epsilon(high)}",
            "share": f"{self.share:.0%}" if finite else "",
            "one run": "" if self.one_run is None else show_epsilon(self.one_run),
            "checks": self.passed,
            "verdict": self.verdict_words,
            "attack": self.attack,
            "pair": self.pair,
            "runs": f"{self.trials:,}",
        }

    @property
    def share(self) -> float:
        """The shown part of the guarantee: how sharp the audit was. Above 1 the guarantee is broken."""
        if math.isinf(self.promised_epsilon):
            return 0.0
        return self.shown_epsilon / self.promised_epsilon if self.promised_epsilon > 0 else math.inf

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values; infinite ones as text."""
        return dict(_plain({**asdict(self), "verdict": self.verdict, "reasons": self.reasons, "limit": self.limit}))

    def to_json(self) -> str:
        """Return everything as JSON."""
        return json.dumps(self.as_dict(), allow_nan=False)

    def plot(self, ax: "Axes | None" = None) -> "Figure":
        """Draw what was measured, and what the guarantee allows.

        Parameters
        ----------
        ax : matplotlib Axes, optional

        Returns
        -------
        matplotlib Figure
        """
        from matplotlib.figure import Figure

        if ax is None:
            ax = Figure(figsize=(4.6, 3.8), layout="constrained").subplots()
        (_draw_events if self.curve.kind == "event" else _draw_divergence)(self, ax)
        ax.set_title(f"{self.mechanism}: {self.verdict}", fontsize=10)
        ax.tick_params(labelsize=8)
        ax.legend(fontsize=7, loc="best")
        figure = ax.figure
        assert isinstance(figure, Figure)
        return figure

    def __str__(self) -> str:
        """Return what was found in one line."""
        return (
            f"{self.mechanism}: {self.verdict_words}. Promised epsilon {self.promised_epsilon:.4g}"
            f" (delta {self.promised_delta:.2g}), shown {self.shown_epsilon:.4g} by {self.attack} on {self.pair}."
            + "".join(f" {reason}." for reason in self.reasons)
        )


def show_epsilon(value: float) -> str:
    """Return an epsilon in print.

    Examples
    --------
    >>> show_epsilon(3.14159), show_epsilon(float("inf"))
    ('3.142', '∞')
    """
    return "∞" if math.isinf(value) else f"{value:.4g}"


def _plain(value: Any) -> Any:
    """Turn what JSON does not know into what it does."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, (float, np.floating)):
        return float(value) if math.isfinite(value) else str(float(value))
    return value


def _draw_events(report: Report, ax: "Axes") -> None:
    """Draw how often events come in either world; above the border the guarantee says they cannot be."""
    x, y = np.array(report.curve.x), np.array(report.curve.y)
    least = min(max(min((v for v in (*x, *y) if v > 0), default=1e-4), 1e-7), 0.5)
    grid = np.geomspace(least, 1.0, 200)
    if report.promised_epsilon < 700:
        allowed = np.minimum(1.0, math.exp(report.promised_epsilon) * grid + report.promised_delta)
        ax.plot(grid, allowed, color=_BORDER, lw=1.2, label="most that the guarantee allows")
        ax.fill_between(grid, allowed, 1.0, color=_AREA, lw=0)
    ax.plot(np.maximum(x, least), np.maximum(y, least), color=_SHOWN, lw=1.5, label="measured, all thresholds")
    ax.plot(*(max(v, least) for v in report.curve.chosen), "o", color=_SHOWN, ms=6, label="the event that was chosen")
    ax.set(xscale="log", yscale="log", xlim=(least, 1.0), ylim=(least, 1.05))
    ax.set_xlabel("probability in the other world", fontsize=8)
    ax.set_ylabel("probability in the event's world", fontsize=8)


def _draw_divergence(report: Report, ax: "Axes") -> None:
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
