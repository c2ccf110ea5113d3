"""The page of an audit, as Markdown with a figure."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from nearveil.audit.report import Report, Verdict, draw_intervals

_OUTCOMES = {
    "kept": "All guarantees that must be kept are, and every specimen was caught (exit status 0).",
    "broken": "Something is broken that must be kept, or a specimen was not caught (exit status 1).",
    "undecided": "Nothing is broken that must be kept, but something is undecided (exit status 3).",
}
_OMITTED_COLUMNS = ("share", "pair")  # of the Markdown table, which would be too wide
_SHARP, _BLUNT = 0.9, 0.5  # share of the guarantee that was shown


def write_markdown(
    sections: Mapping[str, Sequence[Report]],
    folder: Path,
    outcome: Verdict,
    problems: Sequence[str] = (),
    *,
    command: str,
    minutes: float,
) -> Path:
    """Write ``audit.md`` and ``audit.png``, with the command and its minutes of processor time."""
    reports = [report for section in sections.values() for report in section]
    levels = ", ".join(f"{level:g}" for level in sorted({report.confidence for report in reports}))
    seeded = " Some runs used a seed." if any(report.seeded for report in reports) else ""
    lines = [
        f"# Results of the audit\n\nConfidence {levels}:\n\n```sh\n{command}\n```\n",
        f"It took {minutes:.1f} minutes of processor time. {_OUTCOMES[outcome]}{seeded}",
        "*Shown* is a lower bound on the true epsilon. Read [the limits of an audit](../theory/audit.md).",
        "The numbers vary a little between runs, because the randomness comes from the operating system.\n",
        *(f"- {problem}" for problem in problems),
    ]
    for heading, section in sections.items():
        columns = [name for name in section[0].cells if name not in _OMITTED_COLUMNS]
        rows = [columns, ["---"] * len(columns), *([report.cells[name] for name in columns] for report in section)]
        lines += [f"## {heading}\n", *(f"| {' | '.join(row)} |" for row in rows), ""]
    lines += ["![Promised and shown epsilon of each mechanism](audit.png)\n", "## Summary\n", *_list_remarks(reports)]
    bars = [(report.mechanism, report.interval, report) for report in reports if math.isfinite(report.promised_epsilon)]
    draw_intervals(bars).savefig(folder / "audit.png", dpi=110)
    page = folder / "audit.md"
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return page


def _list_remarks(reports: Sequence[Report]) -> Iterator[str]:
    def join_names(selected: Sequence[Report]) -> str:
        return ", ".join(report.mechanism for report in selected) or "none"

    promising = [report for report in reports if math.isfinite(report.promised_epsilon) and report.verdict != "broken"]
    sharp = [report for report in promising if report.share >= _SHARP]
    blunt = [report for report in promising if report.share < _BLUNT]
    yield f"- At least {_SHARP:.0%} of the guarantee was shown, so the calibration is tight: {join_names(sharp)}."
    yield f"- Less than {_BLUNT:.0%} was shown; the attacks are weak or the bound is loose: {join_names(blunt)}."
    yield f"- Undecided: {join_names([report for report in reports if report.verdict == 'undecided'])}."
    yield "- Broken, and why:"
    for report in reports:
        if report.verdict == "broken":
            yield f"  - {report.mechanism}: {'; '.join(report.reasons)}."
