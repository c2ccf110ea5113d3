"""`python -m tests.mutants`: plant the defects of the list, and print what survived."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from tests.mutants.runner import Mutant, MutantError, Outcome, check_green, load, run, select_part

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
_GREEN_TIMEOUT = 1800.0


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    console = Console(highlight=False, soft_wrap=True)
    try:
        outcomes = _run(_select(options), options, console)
    except MutantError as error:
        console.print(Text(str(error)))
        return 2
    alive = [outcome for outcome in outcomes if outcome.verdict != "killed"]
    if alive:
        console.print(_table(alive))
        for outcome in alive:
            tests = " ".join(outcome.mutant.tests)
            console.print(Text(f"--- {outcome.mutant.name}: {outcome.verdict} by {tests}\n{outcome.said[-3000:]}"))
    console.print(f"{len(outcomes) - len(alive)} of {len(outcomes)} mutants killed, {len(alive)} not")
    return 1 if alive else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--part", metavar="K/N", help="only the K-th of N parts")
    parser.add_argument("--only", metavar="NAME", action="append", help="only this mutant; may be repeated")
    parser.add_argument("--jobs", type=int, default=2, help="how many run at a time (default: 2)")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds for each mutant (default: 180)")
    parser.add_argument("--tested", action="store_true", help="all tests have passed: do not run them without mutants")
    return parser.parse_args(arguments)


def _select(options: argparse.Namespace) -> list[Mutant]:
    mutants = load(HERE)
    if options.part:
        part, _, parts = options.part.partition("/")
        if not (part.isdecimal() and parts.isdecimal()):
            raise MutantError("a part must be K/N with K from 1 to N")
        mutants = select_part(mutants, int(part), int(parts))
    if options.only:
        unknown = set(options.only) - {mutant.name for mutant in mutants}
        if unknown:
            raise MutantError(f"no such mutant: {', '.join(sorted(unknown))}")
        mutants = [mutant for mutant in mutants if mutant.name in options.only]
    return mutants


def _run(mutants: Sequence[Mutant], options: argparse.Namespace, console: Console) -> list[Outcome]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("tests without mutants", total=len(mutants))
        if not options.tested:
            console.print(f"{len(mutants)} mutants; first their tests without them")
            check_green(mutants, ROOT, jobs=options.jobs, timeout=_GREEN_TIMEOUT)
        progress.update(task, description="mutants")

        def report(outcome: Outcome) -> None:
            console.print(f"{outcome.verdict:9} {outcome.seconds:5.1f} s  {outcome.mutant.name}")
            progress.advance(task)

        return run(mutants, ROOT, jobs=options.jobs, timeout=options.timeout, report=report)


def _table(alive: Sequence[Outcome]) -> Table:
    table = Table("mutant", "file", "verdict", "what it would give away")
    for column in table.columns:
        column.overflow = "fold"
    for outcome in alive:
        verdict = "timed out: not a kill" if outcome.verdict == "timed out" else outcome.verdict
        table.add_row(outcome.mutant.name, outcome.mutant.file, verdict, outcome.mutant.why)
    return table


if __name__ == "__main__":
    sys.exit(main())
