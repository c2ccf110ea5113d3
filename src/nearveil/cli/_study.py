"""``nearveil study`` makes tables and figures; ``nearveil audit`` attacks guarantees."""

import importlib.util
import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from nearveil.cli._shared import (
    CLUSTER_OPTIONS,
    ClusterAuthorities,
    ClusterOptions,
    ClusterPlace,
    InsecureCluster,
    OwnCertificate,
    OwnKey,
    connect_cluster,
    make_folder,
    print_json,
    print_lines,
    print_table,
    report_errors,
    show_bars,
)

if TYPE_CHECKING:
    from studies._study import Study


def study(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME...|all", help="Studies, or all; none lists what there is.")
    ] = None,
    out: Annotated[Path, typer.Option(help="A folder; each study has one of its own in it.")] = Path("out/study"),
    docs: Annotated[
        Path | None, typer.Option(help="A folder of results: pages go to its study/, findings to its index.md.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure everything again.")] = False,
    jobs: Annotated[int, typer.Option(help="Processes; studies of time take one.", min=1, max=64)] = 2,
    cluster: ClusterPlace = None,
    ca: ClusterAuthorities = None,
    cert: OwnCertificate = None,
    key: OwnKey = None,
    insecure: InsecureCluster = False,
) -> None:
    """Make tables and figures: of the papers, and of this library. Each is CSV, JSON, SVG, PNG and a page.

    A study that was stopped goes on where it was: what it has measured is kept, case by case. Most need real data (see
    the variable NEARVEIL_DATA); "all" leaves out what is not there, and says so.

    [bold]Examples[/bold]

    nearveil study

    nearveil study sensitivity

    nearveil study all --docs docs/results
    """
    _find_studies()
    from studies import load_studies
    from studies._report import write_findings

    console, studies = Console(), load_studies()
    if not names:
        print_table(["name", "what it shows"], [(name, one.title) for name, one in studies.items()], title="Studies")
        return
    unknown = [name for name in names if name not in studies and name != "all"]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is none of: all, {', '.join(studies)}", param_hint="NAME")
    chosen = list(studies) if "all" in names else list(dict.fromkeys(names))
    make_folder(out, "--out")
    make_folder(docs, "--docs")
    begin = time.monotonic()
    with report_errors(**CLUSTER_OPTIONS), connect_cluster(ClusterOptions(cluster, ca, cert, key, insecure)) as place:
        workers = None if cluster is None else place
        left_out = [name for name in chosen if not _run_study(studies[name], out, docs, fresh, jobs, console, workers)]
    if docs is not None:
        write_findings(docs)
    if len(chosen) > 1:
        console.print(f"{len(chosen) - len(left_out)} studies in {(time.monotonic() - begin) / 60:.1f} minutes")
    if left_out:
        raise typer.Exit(0 if len(left_out) < len(chosen) else 1)


def _find_studies() -> None:
    """Say how to get the studies: they are in the repository beside the library, and not in what pip installs."""
    if importlib.util.find_spec("studies") is None:
        raise typer.BadParameter(
            "the studies are not installed with nearveil: clone its repository, run pip install -e '.[study]' there, "
            "and run this command again",
            param_hint="NAME",
        )


def _run_study(
    one: "Study", out: Path, docs: Path | None, fresh: bool, jobs: int, console: Console, workers: Any
) -> bool:
    """Run a study; return whether it could be."""
    from studies._report import publish, write
    from studies._study import run
    from studies.data import DataMissingError

    if one.note:
        console.print(f"{one.name}: {one.note}", soft_wrap=True, highlight=False)
    folder = out / one.name
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    try:
        with bar as progress:
            task = progress.add_task(one.name)
            measured = run(
                one,
                folder,
                jobs=jobs,
                fresh=fresh,
                advance=lambda done, all_: progress.update(task, completed=done, total=all_),
                cluster=workers,
            )
        page = write(one, measured, folder)
    except (DataMissingError, ModuleNotFoundError) as missing:
        console.print(f"[yellow]{one.name} left out:[/yellow] {missing}", soft_wrap=True)
        return False
    except OSError as error:
        console.print(
            f"[red]{one.name}: {error.strerror or error}; what was measured is kept in {folder}", soft_wrap=True
        )
        raise typer.Exit(1) from None
    if docs is not None:
        publish(one, folder, docs / "study")
    console.print(f"{one.name}: {page} ({measured.seconds:.0f} s measured)", soft_wrap=True)
    return True


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
    out: Annotated[Path | None, typer.Option(help="Folder for audit.md, audit.png and audit.json.")] = None,
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
    from nearveil.audit.report import write_markdown

    began = time.process_time()
    found, outcome, wrong = _run_audit(sections, confidence, effort)
    minutes = (time.process_time() - began) / 60
    result = {"sections": _as_dict(found), "wrong": wrong, "outcome": outcome, "exit_status": _STATUSES[outcome]}
    if out is not None:
        (out / "audit.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        command = f"nearveil {shlex.join(sys.argv[1:])}"
        write_markdown(found, out, outcome, wrong, command=command, minutes=minutes)
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


def _run_audit(
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
    print_lines(*_LEGEND.splitlines(), *([] if out is None else [f"The report is {out / 'audit.md'}"]))
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
