"""Reports as an HTML page, which holds everything itself, and as a page of the documentation."""

import base64
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from nearveil.audit.report import Report, Verdict, show_epsilon

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
