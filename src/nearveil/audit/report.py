"""Reports of audits, as text, JSON and plots."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Verdict = Literal["kept", "broken", "undecided"]

FALSE_ALARM = 5e-7
"""Probability that one audit calls a sound mechanism broken, for all attacks and checks together."""

_TOLERANCE = (0.1, 0.05)  # relative, absolute: how far the interval of a "kept" guarantee may exceed it
_COLOURS = {"kept": "#1b6e3a", "broken": "#b3261e", "undecided": "#8a6100"}


@dataclass(frozen=True)
class Attack:
    """The result of one attack."""

    name: str
    pair: str = ""  # the inputs it separated best on the choosing half; empty if not measured
    interval: tuple[float, float] | None = None  # of its epsilon, at the report's confidence; None if not measured
    refutes: bool = False  # shows more than was promised, at its share of `FALSE_ALARM`
    note: str = ""  # why it was not measured


@dataclass(frozen=True)
class Check:
    """The result of one check of the mechanism's conduct."""

    name: str  #: for example "the stated law" or "caps"
    result: Literal["passed", "failed", "not run"]  #: "failed" breaks the guarantee
    detail: str = ""  #: why the check failed or was not run


def judge(name: str, problem: str | None) -> Check:
    """Return the check that failed because of a problem, or passed without one."""
    return Check(name, "passed") if problem is None else Check(name, "failed", problem)


@dataclass(frozen=True, kw_only=True)
class Report:
    """The promised epsilon, the epsilon that attacks showed, and the verdict.

    Examples
    --------
    >>> from nearveil.audit import audit
    >>> from nearveil.privacy.noise import unsafe_seeded
    >>> from nearveil.mechanisms import Covers
    >>> report = audit(Covers(1.0, n_sets=10), trials=20_000, source=unsafe_seeded(0))  # a seed, so that this repeats
    >>> report.verdict, report.promised_epsilon, 0.8 < report.shown_epsilon <= 1.0
    ('kept', 1.0, True)
    """

    mechanism: str
    promised_epsilon: float
    promised_delta: float
    shown_epsilon: float  #: the lower end of the interval: the true epsilon is at least this, at this confidence
    interval: tuple[float, float]  #: of the epsilon of the best attack on its pair; another may show more
    attack: str  #: the one that showed most on the choosing half
    pair: str  #: the inputs of that attack
    one_run: float | None  #: the epsilon that a single run with many records shows
    trials: int  #: runs of either input, both halves
    confidence: float
    sound: bool  #: whether the mechanism's guarantee is marked as proved
    seeded: bool  #: whether the runs used a seed
    attacks: tuple[Attack, ...] = ()  #: all of them, the decisive one first
    checks: tuple[Check, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the guarantee is broken; empty if it is not."""
        shown = [
            f"{attack.name} shows epsilon {attack.interval[0]:.4g} on {attack.pair}"
            for attack in self.attacks
            if attack.refutes and attack.interval is not None
        ]
        return (*shown, *(f"{check.name}: {check.detail}" for check in self.checks if check.result == "failed"))

    @property
    def passed(self) -> str:
        """Passed checks out of those run, as "2/3"; empty if none was run."""
        results = [check.result for check in self.checks if check.result != "not run"]
        return f"{results.count('passed')}/{len(results)}" if results else ""

    @property
    def limit(self) -> float:
        """The largest upper end of the interval of a "kept" guarantee: 10% above the guarantee, and at least 0.05."""
        return self.promised_epsilon + max(_TOLERANCE[0] * self.promised_epsilon, _TOLERANCE[1])

    @property
    def verdict(self) -> Verdict:
        """The judgement of attacks and checks about the guarantee: "kept", "broken" or "undecided".

        "broken" if an attack shows more than was promised or a check failed; the probability of that is at most 5e-7
        for a sound mechanism. "kept" if not, and the interval starts at or below the guarantee and ends at or below
        `limit`. Otherwise "undecided": run more trials.
        """
        if self.reasons:
            return "broken"
        low, high = self.interval
        return "kept" if low <= self.promised_epsilon and high <= self.limit else "undecided"

    @property
    def verdict_words(self) -> str:
        """The verdict, with "unsound" if the guarantee is not proved: then "kept" only means that no attack worked."""
        doubtful = not self.sound and math.isfinite(self.promised_epsilon)
        return f"{self.verdict}, unsound" if doubtful else self.verdict

    @property
    def cells(self) -> dict[str, str]:
        """The report as text, by column."""
        finite, (low, high) = math.isfinite(self.promised_epsilon), self.interval
        return {
            "mechanism": self.mechanism,
            "promised": _show_epsilon(self.promised_epsilon) if finite else "nothing",
            "delta": f"{self.promised_delta:.2g}",
            "shown": _show_epsilon(self.shown_epsilon),
            "interval": f"{_show_epsilon(low)} to {_show_epsilon(high)}",
            "share": f"{self.share:.0%}" if finite else "",
            "one run": "" if self.one_run is None else _show_epsilon(self.one_run),
            "checks": self.passed,
            "verdict": self.verdict_words,
            "attack": self.attack,
            "pair": self.pair,
            "runs": f"{self.trials:,}",
        }

    @property
    def share(self) -> float:
        """Shown epsilon divided by promised epsilon: the sharpness of the audit. Above 1, the guarantee is broken."""
        if math.isinf(self.promised_epsilon):
            return 0.0
        return self.shown_epsilon / self.promised_epsilon if self.promised_epsilon > 0 else math.inf

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON values; infinite numbers become text."""
        values = {**asdict(self), "verdict": self.verdict, "reasons": self.reasons, "limit": self.limit}
        return dict(json.loads(json.dumps(values, default=float), parse_constant=lambda name: str(float(name))))

    def to_json(self) -> str:
        """Return the report as JSON."""
        return json.dumps(self.as_dict(), allow_nan=False)

    def plot(self) -> "Figure":
        """Return a plot of the interval of each attack beside the promised epsilon."""
        bars = [(attack.name, attack.interval, self) for attack in self.attacks if attack.interval is not None]
        return draw_intervals(bars, title=f"{self.mechanism}: {self.verdict}")

    def __str__(self) -> str:
        """Summarize the report in one line."""
        return (
            f"{self.mechanism}: {self.verdict_words}. Promised epsilon {self.promised_epsilon:.4g}"
            f" (delta {self.promised_delta:.2g}), shown {self.shown_epsilon:.4g} by {self.attack} on {self.pair}."
            + "".join(f" {reason}." for reason in self.reasons)
        )


def _show_epsilon(value: float) -> str:
    return "∞" if math.isinf(value) else f"{value:.4g}"


def draw_intervals(bars: Sequence[tuple[str, tuple[float, float], Report]], title: str = "") -> "Figure":
    """Plot named intervals, each beside the epsilon that its report promises."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.9 + 0.24 * len(bars)), layout="constrained")
    ax = figure.subplots()
    for y, (_, (low, high), report) in enumerate(reversed(bars)):
        promised = report.promised_epsilon if math.isfinite(report.promised_epsilon) else 0.0
        colour = _COLOURS[report.verdict]
        ax.plot([low, min(high, 3 * max(promised, low))], [y, y], color=colour, lw=1.2, alpha=0.6)
        ax.plot(low, y, "o", color=colour, ms=4.5)
        if promised:
            ax.plot(promised, y, "|", color="black", ms=11, mew=1.6)
    ax.set_title(title, fontsize=10)
    ax.set_yticks(range(len(bars)), [name for name, _, _ in reversed(bars)], fontsize=7.5)
    ax.set_xlabel("epsilon: promised (bar), shown (dot), interval of the attack (line)", fontsize=8)
    ax.set_xscale("symlog", linthresh=0.5)
    ax.set_xlim(left=-0.02)
    ax.set_ylim(-0.7, len(bars) - 0.3)
    ax.grid(axis="x", alpha=0.3)
    ax.tick_params(axis="x", labelsize=8)
    return figure
