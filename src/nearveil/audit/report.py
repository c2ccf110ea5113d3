"""What an audit found, as text, JSON and a page."""

import base64
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
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
        return dict(
            _to_plain_value({**asdict(self), "verdict": self.verdict, "reasons": self.reasons, "limit": self.limit})
        )

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


def _to_plain_value(value: Any) -> Any:
    """Turn what JSON does not know into what it does."""
    if isinstance(value, dict):
        return {name: _to_plain_value(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_plain_value(one) for one in value]
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


if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = {"kept": "#1b6e3a", "broken": "#b3261e", "undecided": "#8a6100"}
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:72rem;padding:0 1rem;color:#1d1f23;background:#fff}
h1{font-size:1.6rem;margin-bottom:.2rem}h2{font-size:1.2rem;margin-top:2rem}
table{border-collapse:collapse;width:100%;font-size:.86rem}
th,td{padding:.3rem .6rem;border-bottom:1px solid #dcdfe4;text-align:left}
th{background:#f3f4f6}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
.kept{color:#1b6e3a;font-weight:600}.broken{color:#b3261e;font-weight:600}.undecided{color:#8a6100;font-weight:600}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(20rem,1fr));gap:1rem}
figure{margin:0;border:1px solid #dcdfe4;border-radius:6px;padding:.5rem}figure img,.wide img{width:100%;height:auto}
figcaption{font-size:.8rem;color:#4a4f57}
"""
_READ = """An audit runs a mechanism many times on two inputs that it promises to make look alike, and looks for a test
that tells them apart. <em>Shown</em> is a lower bound on the true epsilon: half of the runs chose the attacks, the
other half measured all of them. It also uses the mechanism as its users do, and checks that outcomes follow the law
that is stated, and that caps, accounts, copies and labels keep to the plan. <b>Broken</b>: an attack shows more than
was promised, or a check failed; a sound mechanism is called broken with a probability of at most 1e-6. <b>Kept</b>:
neither, and what the best attack may show ends at the guarantee or at most a tenth (and 0.05) beyond. It is no proof,
and the share of the guarantee that was shown says how hard was looked. <b>Undecided</b>: the runs do not say; more of
them do."""
_OUTCOMES = {
    "kept": "All guarantees that must be kept are, and every specimen was caught (exit status 0).",
    "broken": "Something is broken that must be kept, or a specimen was not caught (exit status 1).",
    "undecided": "Nothing is broken that must be kept, but something is undecided (exit status 3).",
}
_WORDS = ("mechanism", "verdict", "attack", "pair")  # columns that are no numbers
_LEFT_OUT = ("share", "pair")  # columns that the page of the documentation has no room for
_SHARP, _BLUNT = 0.9, 0.5  # share of the guarantee that was shown

Sections = Mapping[str, Sequence[Report]]  # by heading


def write_page(sections: Sections, folder: Path, outcome: Verdict = "kept", wrong: Sequence[str] = ()) -> Path:
    """Write ``index.html`` and ``plots/``, every picture as PNG and SVG; `wrong` is what is not as it must be."""
    plots = folder / "plots"
    plots.mkdir(parents=True, exist_ok=True)
    every = [report for reports in sections.values() for report in reports]
    seeded = " Some runs came from a seed." if any(report.seeded for report in every) else ""
    body = [
        f'<h1>What could be shown</h1><p>{_READ}</p><p class="{outcome}">{_OUTCOMES[outcome]}</p>',
        *(f"<p>{escape(line)}</p>" for line in wrong),
        f"<p>Confidence of every interval: {_list_levels(every)}.{seeded}</p>",
        f'<div class="wide">{_save_twice(draw_summary(every), plots, "summary")}</div>',
        *(f"<h2>{escape(heading)}</h2>{_make_table(reports)}" for heading, reports in sections.items()),
        '<h2>What was measured</h2><div class="grid">',
        *(_make_figure(report, plots) for report in every),
    ]
    page = folder / "index.html"
    page.write_text(
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>nearveil audit</title>'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'\">"
        f"<style>{_STYLE}</style></head><body>{''.join(body)}</div></body></html>\n",
        encoding="utf-8",
    )
    return page


def write_markdown(sections: Sections, folder: Path, outcome: Verdict, *, command: str, minutes: float) -> Path:
    """Write ``audit.md`` and ``audit.png``: what `command` showed in so many minutes of processor time."""
    folder.mkdir(parents=True, exist_ok=True)
    every = [report for reports in sections.values() for report in reports]
    lines = [
        f"# What the audit showed\n\nConfidence {_list_levels(every)}:\n\n```sh\n{command}\n```\n",
        f"It took {minutes:.1f} minutes of processor time. {_OUTCOMES[outcome]}",
        "*Shown* is a lower bound on the true epsilon; [what it cannot show](../theory/audit.md) stands elsewhere.",
        "The figures move a little from run to run, because the randomness is the operating system's.\n",
    ]
    for heading, reports in sections.items():
        table = [{name: cell for name, cell in one.cells.items() if name not in _LEFT_OUT} for one in reports]
        rows = [list(table[0]), ["---"] * len(table[0]), *(list(cells.values()) for cells in table)]
        lines += [f"## {heading}\n", *(f"| {' | '.join(row)} |" for row in rows), ""]
    lines += ["![What was promised, and what was shown](audit.png)\n", "## What stands out\n", *_list_remarks(every)]
    draw_summary(every).savefig(folder / "audit.png", dpi=110)
    page = folder / "audit.md"
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return page


def _list_levels(reports: Sequence[Report]) -> str:
    return ", ".join(f"{level:g}" for level in sorted({report.confidence for report in reports}))


def _make_table(reports: Sequence[Report]) -> str:
    def row(tag: str, cells: Mapping[str, str]) -> str:
        marked = (f"<{tag}{'' if name in _WORDS else ' class=n'}>{cell}</{tag}>" for name, cell in cells.items())
        return f"<tr>{''.join(marked)}</tr>"

    rows = []
    for report in reports:
        cells = {name: escape(cell) for name, cell in report.cells.items()}
        rows.append(row("td", cells | {"verdict": f'<span class="{report.verdict}">{report.verdict_words}</span>'}))
    head = row("th", {name: name for name in reports[0].cells})
    return f"<table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>"


def _make_figure(report: Report, plots: Path) -> str:
    name = "".join(letter if letter.isalnum() else "-" for letter in report.mechanism)
    notes = "".join(f"<br>{escape(note)}" for note in report.notes)
    found = "".join(f"<li>{escape(line)}</li>" for line in _list_findings(report))
    details = f"<details><summary>attacks and checks</summary><ul>{found}</ul></details>"
    picture = _save_twice(report.plot(), plots, name)
    return f"<figure>{picture}<figcaption>{escape(str(report))}{notes}{details}</figcaption></figure>"


def _list_findings(report: Report) -> Iterator[str]:
    for attack in report.attacks:
        if attack.interval is None:
            yield f"{attack.name}: not run, {attack.note}"
        else:
            low, high = map(show_epsilon, attack.interval)
            yield f"{attack.name}: {low} to {high} on {attack.pair}"
    for check in report.checks:
        yield f"{check.name}: {check.result}{', ' if check.detail else ''}{check.detail}"


def _list_remarks(reports: Sequence[Report]) -> Iterator[str]:
    def names(chosen: Sequence[Report]) -> str:
        return ", ".join(report.mechanism for report in chosen) or "none"

    promising = [report for report in reports if math.isfinite(report.promised_epsilon) and report.verdict != "broken"]
    yield (
        f"- {_SHARP:.0%} of the guarantee and more was shown, so that little room is left for an error of the "
        f"calibration: {names([report for report in promising if report.share >= _SHARP])}."
    )
    yield (
        f"- Less than {_BLUNT:.0%} was shown, where the attacks are weak or the bound is loose: "
        f"{names([report for report in promising if report.share < _BLUNT])}."
    )
    yield f"- Undecided: {names([report for report in reports if report.verdict == 'undecided'])}."
    yield "- Broken, and why:"
    for report in reports:
        if report.verdict == "broken":
            yield f"  - {report.mechanism}: {'; '.join(report.reasons)}."


def _save_twice(figure: "Figure", plots: Path, name: str) -> str:
    """Save a picture as PNG and SVG, and return it as part of the page."""
    import matplotlib as mpl

    held = io.BytesIO()
    figure.savefig(held, format="png", dpi=110)
    (plots / f"{name}.png").write_bytes(held.getvalue())
    # No date, and ids by a fixed salt: the same figures give the same file.
    with mpl.rc_context({"svg.hashsalt": name}):
        figure.savefig(plots / f"{name}.svg", format="svg", metadata={"Date": None})
    data = base64.b64encode(held.getvalue()).decode()
    return f'<img alt="{escape(name)}" src="data:image/png;base64,{data}">'


def draw_summary(reports: Sequence[Report]) -> "Figure":
    """Draw shown against promised, for all that guarantee something."""
    from matplotlib.figure import Figure

    drawn = [report for report in reports if math.isfinite(report.promised_epsilon)][::-1]
    figure = Figure(figsize=(9, 0.9 + 0.24 * len(drawn)), layout="constrained")
    ax = figure.subplots()
    for place, report in enumerate(drawn):
        high = min(report.interval[1], 3 * max(report.promised_epsilon, report.shown_epsilon))
        colour = _COLOURS[report.verdict]
        ax.plot([report.interval[0], high], [place, place], color=colour, lw=1.2, alpha=0.6)
        ax.plot(report.shown_epsilon, place, "o", color=colour, ms=4.5)
        ax.plot(report.promised_epsilon, place, "|", color="black", ms=11, mew=1.6)
    ax.set_yticks(range(len(drawn)), [report.mechanism for report in drawn], fontsize=7.5)
    ax.set_xlabel("epsilon: promised (bar), shown (dot), interval of the attack (line)", fontsize=8)
    ax.set_xscale("symlog", linthresh=0.5)
    ax.set_xlim(left=-0.02)
    ax.set_ylim(-0.7, len(drawn) - 0.3)
    ax.grid(axis="x", alpha=0.3)
    ax.tick_params(axis="x", labelsize=8)
    return figure
