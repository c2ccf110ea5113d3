"""The results as a page of the documentation."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from nearveil.audit._page import OUTCOMES, number, summary_picture
from nearveil.audit._report import Report, Verdict

_HEADS = ("mechanism", "promised", "delta", "shown", "interval", "one run", "checks", "verdict", "attack", "runs")
_SHARP, _BLUNT = 0.9, 0.5  # share of the promise that was shown


def write_markdown(
    sections: Mapping[str, Sequence[Report]], folder: Path, outcome: Verdict, *, command: str, minutes: float
) -> Path:
    """Write ``audit.md`` and ``audit.png``.

    `sections`: Headings and what stands below them.
    `folder`: Made if it is not there.
    `command`: That made the reports.
    `minutes`: Of processor time that it took.
    Returns: Of the page.
    """
    folder.mkdir(parents=True, exist_ok=True)
    every = [report for reports in sections.values() for report in reports]
    levels = ", ".join(f"{level:g}" for level in sorted({report.confidence for report in every}))
    lines = [
        f"# What the audit showed\n\nConfidence {levels}:\n\n```sh\n{command}\n```\n",
        f"It took {minutes:.1f} minutes of processor time. {OUTCOMES[outcome]}",
        "*Shown* is a lower bound on the true epsilon; [what it cannot show](../theory/audit.md) stands elsewhere.",
        "The figures move a little from run to run, because the randomness is the operating system's.\n",
    ]
    for heading, reports in sections.items():
        lines += [f"## {heading}\n", f"| {' | '.join(_HEADS)} |", f"|{'---|' * len(_HEADS)}", *map(_row, reports), ""]
    lines += ["![What was promised, and what was shown](audit.png)\n", "## What stands out\n", *_remarks(every)]
    summary_picture(every).savefig(folder / "audit.png", dpi=110)
    page = folder / "audit.md"
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return page


def _row(report: Report) -> str:
    low, high = report.interval
    cells = (
        report.mechanism,
        number(report.promised_epsilon) if math.isfinite(report.promised_epsilon) else "nothing",
        f"{report.promised_delta:.2g}",
        number(report.shown_epsilon),
        f"{number(low)} to {number(high)}",
        "" if report.one_run is None else number(report.one_run),
        report.passed,
        report.verdict_words,
        report.attack,
        f"{report.trials:,}",
    )
    return f"| {' | '.join(cells)} |"


def _remarks(reports: Sequence[Report]) -> Iterator[str]:
    def names(chosen: Sequence[Report]) -> str:
        return ", ".join(report.mechanism for report in chosen) or "none"

    promising = [report for report in reports if math.isfinite(report.promised_epsilon) and report.verdict != "broken"]
    yield (
        f"- {_SHARP:.0%} of the promise and more was shown, so that little room is left for an error of the "
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
