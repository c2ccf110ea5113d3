"""A page that holds everything: no script, no font, no picture from anywhere else."""

import base64
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearveil.audit._report import Report, Verdict

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
neither, and what the best attack may show ends at the promise or at most a tenth (and 0.05) beyond it. It is no proof,
and the share of the promise that was shown says how hard was looked. <b>Undecided</b>: the runs do not say; more of
them do."""
OUTCOMES = {
    "kept": "All guarantees that must be kept are, and every specimen was caught (exit status 0).",
    "broken": "Something is broken that must be kept, or a specimen was not caught (exit status 1).",
    "undecided": "Nothing is broken that must be kept, but something is undecided (exit status 3).",
}


def number(value: float) -> str:
    """Write an epsilon.

    Examples
    --------
    >>> number(3.14159), number(float("inf"))
    ('3.142', '∞')
    """
    return "∞" if math.isinf(value) else f"{value:.4g}"


def write_page(
    sections: Mapping[str, Sequence[Report]], folder: Path, outcome: Verdict = "kept", wrong: Sequence[str] = ()
) -> Path:
    """Write the page and its pictures.

    `sections`: Headings and what stands below them.
    `folder`: Made if it is not there. Gets ``index.html`` and ``plots/``, every picture as PNG and as SVG.
    `outcome`: Of all of them together, by what must be found of each.
    `wrong`: What is not as it must be.
    Returns: Of the page.
    """
    plots = folder / "plots"
    plots.mkdir(parents=True, exist_ok=True)
    every = [report for reports in sections.values() for report in reports]
    body = [f"<h1>What could be shown</h1><p>{_READ}</p>", f'<p class="{outcome}">{OUTCOMES[outcome]}</p>']
    body.extend(f"<p>{escape(line)}</p>" for line in wrong)
    body.append(f'<p>{_conditions(every)}</p><div class="wide">')
    body.append(f"{_saved(summary_picture(every), plots, 'summary')}</div>")
    for heading, reports in sections.items():
        body.append(f"<h2>{escape(heading)}</h2>{_table(reports)}")
    body.append('<h2>What was measured</h2><div class="grid">')
    body.extend(_figure(report, plots) for report in every)
    page = folder / "index.html"
    page.write_text(
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>nearveil audit</title>'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'\">"
        f"<style>{_STYLE}</style></head><body>{''.join(body)}</div></body></html>\n",
        encoding="utf-8",
    )
    return page


def _conditions(reports: Sequence[Report]) -> str:
    levels = sorted({report.confidence for report in reports})
    seeded = " Some runs came from a seed." if any(report.seeded for report in reports) else ""
    return f"Confidence of every interval: {', '.join(f'{level:g}' for level in levels)}.{seeded}"


def _table(reports: Sequence[Report]) -> str:
    heads = (
        "mechanism",
        "promised",
        "delta",
        "shown",
        "interval",
        "share",
        "one run",
        "checks",
        "verdict",
        "attack",
        "pair",
        "runs",
    )
    numeric = set(heads[1:8]) | {"runs"}
    head = "".join(f"<th{' class=n' if one in numeric else ''}>{one}</th>" for one in heads)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(map(_row, reports))}</tbody></table>"


def _row(report: Report) -> str:
    low, high = report.interval
    cells: list[tuple[str, bool]] = [
        (escape(report.mechanism), False),
        (number(report.promised_epsilon) if math.isfinite(report.promised_epsilon) else "nothing", True),
        (f"{report.promised_delta:.2g}", True),
        (number(report.shown_epsilon), True),
        (f"{number(low)} to {number(high)}", True),
        (f"{report.share:.0%}" if math.isfinite(report.promised_epsilon) else "", True),
        ("" if report.one_run is None else number(report.one_run), True),
        (report.passed, True),
        (f'<span class="{report.verdict}">{report.verdict_words}</span>', False),
        (escape(report.attack), False),
        (escape(report.pair), False),
        (f"{report.trials:,}", True),
    ]
    return "<tr>" + "".join(f"<td{' class=n' if right else ''}>{text}</td>" for text, right in cells) + "</tr>"


def _figure(report: Report, plots: Path) -> str:
    name = "".join(letter if letter.isalnum() else "-" for letter in report.mechanism)
    notes = "".join(f"<br>{escape(note)}" for note in report.notes)
    details = f"<details><summary>attacks and checks</summary><ul>{''.join(_findings(report))}</ul></details>"
    picture = _saved(report.plot(), plots, name)
    return f"<figure>{picture}<figcaption>{escape(str(report))}{notes}{details}</figcaption></figure>"


def _findings(report: Report) -> Iterator[str]:
    for attack in report.attacks:
        if attack.interval is None:
            yield f"<li>{escape(attack.name)}: not run, {escape(attack.note)}</li>"
        else:
            low, high = map(number, attack.interval)
            yield f"<li>{escape(attack.name)}: {low} to {high} on {escape(attack.pair)}</li>"
    for check in report.checks:
        detail = f", {escape(check.detail)}" if check.detail else ""
        yield f"<li>{escape(check.name)}: {check.result}{detail}</li>"


def _saved(figure: "Figure", plots: Path, name: str) -> str:
    """Save a picture twice, and return it as part of the page."""
    held = io.BytesIO()
    figure.savefig(held, format="png", dpi=110)
    (plots / f"{name}.png").write_bytes(held.getvalue())
    # No date, and ids by a fixed salt: the same figures give the same file.
    import matplotlib as mpl

    with mpl.rc_context({"svg.hashsalt": name}):
        figure.savefig(plots / f"{name}.svg", format="svg", metadata={"Date": None})
    data = base64.b64encode(held.getvalue()).decode()
    return f'<img alt="{escape(name)}" src="data:image/png;base64,{data}">'


def summary_picture(reports: Sequence[Report]) -> "Figure":
    """Draw shown against promised, for all that promise something."""
    from matplotlib.figure import Figure

    drawn: list[Any] = [report for report in reports if math.isfinite(report.promised_epsilon)][::-1]
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
