"""``nearveil audit``: attack guarantees."""

import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.text import Text

from nearveil.cli import _output as output
from nearveil.cli._options import JSON, argument, command, option

if TYPE_CHECKING:
    from nearveil.audit import Report
    from nearveil.audit.registry import AuditEntry
    from nearveil.audit.report import Verdict

_STYLES = {"kept": "green", "broken": "red", "undecided": "yellow"}
_EXIT_CODES = {"kept": 0, "broken": 1, "undecided": 3}  # 2 is a usage error
_SPECIMENS = "Broken on purpose: each must be caught"
_LEGEND = (
    "broken: an attack shows more epsilon than promised, or a check of the mechanism's behaviour failed; a sound "
    "mechanism is called broken with a probability of at most 1e-6",
    "kept: neither, and the best attack may show at most the guarantee plus a tenth (plus 0.05); this is no proof",
    "undecided: too few runs; use more (--effort)",
    "unsound, beside a verdict: the mechanism itself states that its guarantee is not proved",
    '"shown" is a lower bound on epsilon.',
)


@command(extra="audit")
def audit(
    name: str = argument("A mechanism, the first letters of several, or all.", default="", metavar="NAME|all"),
    epsilon: float = option("Epsilon of the mechanisms.", default=4.0),
    confidence: float = option("Confidence of every interval.", default=0.95),
    effort: float = option("Number of runs, as a multiple of the usual number.", default=1.0),
    out: Path | None = option("Folder for audit.json; with the studies also audit.md and audit.png.", metavar="DIR"),
    as_json: bool = JSON,
    list_all: bool = option("List the mechanisms that can be audited.", "--list"),
) -> None:
    """Attack a guarantee, or all of them: run the mechanism many times and show the largest possible epsilon.

    The audit also uses each mechanism as clients do, and checks its stated laws, limits, accounts, copies and labels.
    "all" also attacks specimens that are broken on purpose: if one goes undetected, the audit is unreliable. A proved
    guarantee that is undecided is audited again with twice the runs, and the second report counts. The exit code is 0
    if all is as it must be, 1 if a guarantee that must be kept is broken or a specimen is not caught, and 3 if a
    guarantee that must be kept is undecided.

    For example:
        nearveil audit privunit
        nearveil audit all --out out/audit
        nearveil audit --list
    """
    output.check(0.01 <= epsilon <= 12, "must be from 0.01 to 12", "--epsilon")
    output.check(0 < confidence < 1, "must be between 0 and 1", "--confidence")
    output.check(0 < effort <= 100, "must be between 0 and 100", "--effort")
    if list_all:
        return _print_list(epsilon, as_json=as_json)
    sections = _choose(name, epsilon)
    output.make_folder(out, "--out")  # before half an hour of work
    began = time.process_time()
    reports, outcome, wrong = _run_audit(sections, confidence, effort)
    minutes = (time.process_time() - began) / 60
    result = {
        "sections": {heading: [report.as_dict() for report in section] for heading, section in reports.items()},
        "wrong": wrong,
        "outcome": outcome,
        "exit_status": _EXIT_CODES[outcome],
    }
    if out is not None:
        (out / "audit.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        if output.has_studies():
            from studies.audits.page import write_markdown

            command = f"nearveil {shlex.join(sys.argv[1:])}"
            write_markdown(reports, out, outcome, wrong, command=command, minutes=minutes)
    if as_json:
        output.print_json(result)
    else:
        _print_reports(reports, wrong, out)
    raise typer.Exit(_EXIT_CODES[outcome])


def _choose(name: str, epsilon: float) -> "dict[str, Sequence[AuditEntry]]":
    output.check(name != "", "required: a mechanism of --list, or all", "NAME")
    mechanisms, specimens = _load_entries(epsilon)
    if name == "all":
        output.check(output.has_studies(), f"all also audits specimens of the studies: {output.NOT_INSTALLED}", "NAME")
        return {"Mechanisms": mechanisms, _SPECIMENS: specimens}
    entries = [*mechanisms, *specimens]
    exact = [entry for entry in entries if entry.name == name]
    chosen = exact or [entry for entry in entries if entry.name.startswith(name)]
    more = "" if output.has_studies() else "; for estimators and baselines, pip install nearveil-studies"
    output.check(bool(chosen), f"{name!r} is none of: all, {', '.join(entry.name for entry in entries)}{more}", "NAME")
    return {"Mechanisms": chosen}


def _load_entries(epsilon: float) -> "tuple[list[AuditEntry], list[AuditEntry]]":
    """Return mechanisms and specimens; estimators, baselines, side channels and specimens come with the studies."""
    from nearveil import audit

    mechanisms = audit.list_mechanisms(epsilon)
    if not output.has_studies():
        return mechanisms, []
    from studies import audits

    more = (audits.list_estimators, audits.list_baselines, audits.list_side_channels)
    return [*mechanisms, *(entry for list_entries in more for entry in list_entries(epsilon))], audits.list_specimens()


def _run_audit(
    sections: "dict[str, Sequence[AuditEntry]]", confidence: float, effort: float
) -> "tuple[dict[str, list[Report]], Verdict, list[str]]":
    """Audit all entries; return the reports, the outcome and the failures."""
    from nearveil.audit.auditing import audit_entry, judge_reports

    reports: dict[str, list[Report]] = {}
    with output.show_bars() as start:
        for heading, entries in sections.items():
            reports[heading] = [
                audit_entry(entry, confidence=confidence, effort=effort, start=start) for entry in entries
            ]
    return reports, *judge_reports(
        pair for heading, entries in sections.items() for pair in zip(entries, reports[heading], strict=True)
    )


def _print_reports(reports: "dict[str, list[Report]]", wrong: list[str], out: Path | None) -> None:
    headings = ["mechanism", "promised", "shown", "share", "one run", "checks", "verdict"]
    for title, section in reports.items():
        rows = []
        for report in section:
            *cells, verdict = (report.cells[heading] for heading in headings)
            rows.append((*cells, Text(verdict, style=_STYLES[report.verdict])))
        output.print_table(
            headings, rows, title=title, right=headings[1:-1], no_wrap=headings[1:]
        )  # never cut off figures
    output.print_lines(*_LEGEND, *([] if out is None else [f"Wrote the report to {out}."]))
    output.print_lines(*wrong, style="red")


def _print_list(epsilon: float, *, as_json: bool) -> None:
    """Print all mechanisms and specimens that can be audited by name, and the public names that cannot."""
    from nearveil.audit.registry import list_not_audited

    mechanisms, specimens = _load_entries(epsilon)
    entries, missing = [*mechanisms, *specimens], list_not_audited()
    if as_json:
        names = [{"name": entry.name, "audits": entry.subject, "must_be": entry.expected} for entry in entries]
        output.print_json({"auditable": names, "not_auditable": missing})
        return
    rows = [(entry.name, entry.subject or "a specimen", entry.expected) for entry in entries]
    output.print_table(["name", "audits", "must be"], rows, title="Can be audited")
    output.print_table(["public name", "why not"], missing.items(), title="Not auditable")
