"""``nearveil audit``: attack every promise, and print the epsilon that could be shown."""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from nearveil.audit import Entry, Report, mechanisms, specimens
from nearveil.audit import audit as attack
from nearveil.audit._page import number, write_page

_STYLES = {"kept": "green", "broken": "red", "undecided": "yellow"}
_LEAST = 400
_SURE = 1 - 1e-6


def audit(
    name: Annotated[str, typer.Argument(metavar="NAME|all", help="A mechanism, the first letters of some, or all.")],
    epsilon: Annotated[float, typer.Option(help="What the mechanisms promise.")] = 4.0,
    confidence: Annotated[float, typer.Option(help="Of every interval.")] = 0.95,
    effort: Annotated[float, typer.Option(help="Runs, as a multiple of the usual number.")] = 1.0,
    out: Annotated[Path | None, typer.Option(help="A folder for a page, pictures and JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Attack a promise, or all of them: run the mechanism many times and show as much epsilon as can be shown.

    "all" also attacks specimens that are broken on purpose: if one of them is not caught, the audit is blind.
    A promise that is proved and looks broken is audited again, with runs of its own, at a confidence of 0.999999; that
    report stands. The exit code is 1 if it is broken still, or if a specimen is not.

    [bold]Examples[/bold]

    nearveil audit privunit

    nearveil audit all --out out/audit

    nearveil audit "cells (subset)" --epsilon 1 --confidence 0.999 --json
    """
    if not 0 < confidence < 1:
        raise typer.BadParameter("must lie between 0 and 1", param_hint="--confidence")
    if not 0 < effort <= 100:
        raise typer.BadParameter("must lie between 0 and 100", param_hint="--effort")
    if not 0.01 <= epsilon <= 12:
        raise typer.BadParameter("must be from 0.01 to 12", param_hint="--epsilon")
    sections = _wanted(name, epsilon)
    if out is not None:
        _make_folder(out)  # before half an hour is spent
    found: dict[str, list[Report]] = {}
    with _bar() as start:
        for heading, entries in sections.items():
            found[heading] = [_audited(entry, confidence, effort, start) for entry in entries]
    wrong = [
        f"{entry.name} must be {entry.expected}, and is {report.verdict}"
        for heading, entries in sections.items()
        for entry, report in zip(entries, found[heading], strict=True)
        if _contradicts(entry, report)
    ]
    if out is not None:
        _write(found, out)
    _print(found, wrong, out, as_json=as_json)
    if wrong:
        raise typer.Exit(1)


def _wanted(name: str, epsilon: float) -> dict[str, Sequence[Entry]]:
    known, broken = mechanisms(epsilon), specimens()
    if name == "all":
        return {"Mechanisms": known, "Broken on purpose: each must be caught": broken}
    exact = [entry for entry in (*known, *broken) if entry.name == name]
    chosen = exact or [entry for entry in (*known, *broken) if entry.name.startswith(name)]
    if not chosen:
        names = ", ".join(entry.name for entry in (*known, *broken))
        raise typer.BadParameter(f"{name!r} is none of: all, {names}", param_hint="NAME")
    return {"Mechanisms": chosen}


def _audited(entry: Entry, confidence: float, effort: float, start: "Start") -> Report:
    experiment = replace(entry.make(), name=entry.name)
    runs = max(_LEAST, int(experiment.trials * effort))
    report = attack(experiment, confidence=confidence, trials=runs, progress=start(entry.name, 2 * runs))
    if entry.expected != "kept" or report.verdict != "broken" or confidence >= _SURE:
        return report
    # Of forty intervals at 0.95 some are wrong: a promise that is proved has a second, surer look.
    again = attack(experiment, confidence=_SURE, trials=2 * runs, progress=start(f"{entry.name}, again", 4 * runs))
    note = f"at confidence {confidence:g} {report.shown_epsilon:.4g} was shown; this is a second audit, of fresh runs"
    return replace(again, notes=(*again.notes, note))


def _contradicts(entry: Entry, report: Report) -> bool:
    if entry.expected == "open":
        return False
    return (report.verdict == "broken") != (entry.expected == "broken")


class Start:
    """Starts a bar for the next mechanism."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=1)

    def __call__(self, name: str, runs: int) -> "Tick":
        """Return what moves the bar."""
        self._progress.reset(self._task, total=runs, description=name)
        return Tick(self._progress, self._task)


class Tick:
    """Moves a bar."""

    def __init__(self, progress: Progress, task: object) -> None:
        self._progress, self._task = progress, task

    def __call__(self, runs: int) -> None:
        """Say that so many runs were made."""
        self._progress.advance(self._task, runs)  # type: ignore[arg-type]


@contextmanager
def _bar() -> Iterator[Start]:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield Start(progress)


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "audit.json").touch()
    except OSError as error:
        raise typer.BadParameter(f"{out} cannot be written: {error.strerror}", param_hint="--out") from None


def _write(found: dict[str, list[Report]], out: Path) -> None:
    (out / "audit.json").write_text(json.dumps(_plain(found), indent=1) + "\n", encoding="utf-8")
    write_page(found, out)


def _plain(found: dict[str, list[Report]]) -> dict[str, object]:
    return {heading: [report.as_dict() for report in reports] for heading, reports in found.items()}


def _print(found: dict[str, list[Report]], wrong: list[str], out: Path | None, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"sections": _plain(found), "wrong": wrong}))
        return
    console = Console(highlight=False)
    for heading, reports in found.items():
        grid = Table(title=heading)
        for column in ("mechanism", "promised", "shown", "share", "one run", "verdict"):
            wraps = column == "mechanism"  # so that figures are never cut off
            grid.add_column(
                column, justify="left" if column in ("mechanism", "verdict") else "right", no_wrap=not wraps
            )
        for report in reports:
            grid.add_row(
                report.mechanism,
                number(report.promised_epsilon) if math.isfinite(report.promised_epsilon) else "nothing",
                number(report.shown_epsilon),
                f"{report.share:.0%}" if math.isfinite(report.promised_epsilon) else "",
                "" if report.one_run is None else number(report.one_run),
                Text(report.verdict_words, style=_STYLES[report.verdict]),
            )
        console.print(grid)
    console.print(
        "Shown is a lower bound on epsilon. 'Kept' is no proof: no attack of these found more than was promised."
    )
    if out is not None:
        console.print(f"The page is {out / 'index.html'}", soft_wrap=True)
    for line in wrong:
        console.print(Text(line, style="red"), soft_wrap=True)
