"""``nearveil audit``: attack every guarantee, check the conduct, and print the epsilon that could be shown."""

import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from nearveil.cli._shared import make_folder, print_json, print_lines, print_table, show_bars

if TYPE_CHECKING:
    from nearveil.audit import Report
    from nearveil.audit.registry import AuditEntry
    from nearveil.audit.report import Verdict

_STYLES = {"kept": "green", "broken": "red", "undecided": "yellow"}
_STATUSES = {"kept": 0, "broken": 1, "undecided": 3}  # 2 is that of a command that was not understood
_SPECIMENS = "Broken on purpose: each must be caught"
_LEGEND = """\
broken     an attack shows more than was promised, or a check of the mechanism's conduct failed; a sound mechanism is
           called broken with a probability of at most 1e-6
kept       neither, and the best attack may show at most the guarantee and a tenth (and 0.05) more; no proof
undecided  the runs do not say; more of them do (--effort)
unsound    beside a verdict: the mechanism says itself that its guarantee is not proved
Shown is a lower bound on epsilon. Exit status: 0 all that must be kept is, 1 something is broken that must not be or a
specimen was not caught, 3 undecided."""


def audit(
    name: Annotated[
        str, typer.Argument(metavar="[NAME|all]", help="A mechanism, the first letters of some, or all.")
    ] = "",
    epsilon: Annotated[float, typer.Option(help="What the mechanisms guarantee.")] = 4.0,
    confidence: Annotated[float, typer.Option(help="Of every interval.")] = 0.95,
    effort: Annotated[float, typer.Option(help="Runs, as a multiple of the usual number.")] = 1.0,
    out: Annotated[Path | None, typer.Option(help="A folder for a page, pictures and JSON.")] = None,
    docs: Annotated[Path | None, typer.Option(help="A folder for audit.md and audit.png, as in docs/results.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    list_all: Annotated[bool, typer.Option("--list", help="Print what can be audited, and what cannot.")] = False,
) -> None:
    """Attack a guarantee, or all of them: run the mechanism many times and show as much epsilon as can be shown.

    Besides, the mechanism is used as its users use it: stated laws, caps, accounts, copies and labels are checked.
    "all" also attacks specimens that are broken on purpose: if one of them is not caught, the audit is blind.
    A guarantee that is proved and undecided is audited again, with twice the runs; that report stands.
    The exit status is 0 if all is as it must be, 1 if a guarantee is broken that must be kept or a specimen is not
    caught, and 3 if a guarantee that must be kept is undecided.

    [bold]Examples[/bold]

    nearveil audit privunit

    nearveil audit all --out out/audit

    nearveil audit "cells (subset)" --epsilon 1 --confidence 0.999 --json

    nearveil audit --list
    """
    _check_numbers(epsilon, confidence, effort)
    if list_all:
        return _print_list(epsilon, as_json=as_json)
    sections = _choose(name, epsilon)
    make_folder(out, "--out")  # before half an hour is spent
    make_folder(docs, "--docs")
    from nearveil.audit.page import write_markdown, write_page

    began = time.process_time()
    found, outcome, wrong = _run(sections, confidence, effort)
    minutes = (time.process_time() - began) / 60
    result = {"sections": _as_dict(found), "wrong": wrong, "outcome": outcome, "exit_status": _STATUSES[outcome]}
    if out is not None:
        (out / "audit.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        write_page(found, out, outcome, wrong)
    if docs is not None:
        write_markdown(found, docs, outcome, command=f"nearveil {shlex.join(sys.argv[1:])}", minutes=minutes)
    if as_json:
        print_json(result)
    else:
        _print(found, wrong, out)
    raise typer.Exit(_STATUSES[outcome])


def _check_numbers(epsilon: float, confidence: float, effort: float) -> None:
    if not 0 < confidence < 1:
        raise typer.BadParameter("must lie between 0 and 1", param_hint="--confidence")
    if not 0 < effort <= 100:
        raise typer.BadParameter("must lie between 0 and 100", param_hint="--effort")
    if not 0.01 <= epsilon <= 12:
        raise typer.BadParameter("must be from 0.01 to 12", param_hint="--epsilon")


def _choose(name: str, epsilon: float) -> "dict[str, Sequence[AuditEntry]]":
    if not name:
        raise typer.BadParameter("must be given: a mechanism of --list, or all", param_hint="NAME")
    from nearveil.audit import list_mechanisms, list_specimens

    known, broken = list_mechanisms(epsilon), list_specimens()
    if name == "all":
        return {"Mechanisms": known, _SPECIMENS: broken}
    exact = [entry for entry in (*known, *broken) if entry.name == name]
    chosen = exact or [entry for entry in (*known, *broken) if entry.name.startswith(name)]
    if not chosen:
        names = ", ".join(entry.name for entry in (*known, *broken))
        raise typer.BadParameter(f"{name!r} is none of: all, {names}", param_hint="NAME")
    return {"Mechanisms": chosen}


def _run(
    sections: "dict[str, Sequence[AuditEntry]]", confidence: float, effort: float
) -> "tuple[dict[str, list[Report]], Verdict, list[str]]":
    """Audit all entries, and say how that ended and what is not as it must be."""
    from nearveil.audit.auditing import audit_entry, judge_reports

    found: dict[str, list[Report]] = {}
    with show_bars() as start:
        for heading, entries in sections.items():
            found[heading] = [
                audit_entry(entry, confidence=confidence, effort=effort, start=start) for entry in entries
            ]
    return found, *judge_reports(
        pair for heading, entries in sections.items() for pair in zip(entries, found[heading], strict=True)
    )


def _as_dict(found: "dict[str, list[Report]]") -> dict[str, object]:
    return {heading: [report.as_dict() for report in reports] for heading, reports in found.items()}


def _print(found: "dict[str, list[Report]]", wrong: list[str], out: Path | None) -> None:
    headings = ["mechanism", "promised", "shown", "share", "one run", "checks", "verdict"]
    for title, reports in found.items():
        rows = []
        for report in reports:
            *cells, verdict = (report.cells[heading] for heading in headings)
            rows.append((*cells, Text(verdict, style=_STYLES[report.verdict])))
        print_table(headings, rows, title=title, right=headings[1:-1], whole=headings[1:])  # figures are never cut off
    print_lines(*_LEGEND.splitlines(), *([] if out is None else [f"The page is {out / 'index.html'}"]))
    print_lines(*wrong, style="red")


def _print_list(epsilon: float, *, as_json: bool) -> None:
    """Print every mechanism and specimen that can be audited by name, and the public names that cannot."""
    from nearveil.audit import list_mechanisms, list_specimens
    from nearveil.audit.registry import list_not_audited

    entries, missing = [*list_mechanisms(epsilon), *list_specimens()], list_not_audited()
    if as_json:
        names = [{"name": one.name, "audits": one.subject, "must_be": one.expected} for one in entries]
        print_json({"auditable": names, "not_auditable": missing})
        return
    rows = [(one.name, one.subject or "a specimen", one.expected) for one in entries]
    print_table(["name", "audits", "must be"], rows, title="Can be audited")
    print_table(["public name", "why not"], missing.items(), title="Not auditable")
