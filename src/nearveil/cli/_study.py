"""``nearveil study``: tables and figures of the papers and of this library."""

import importlib.util
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from nearveil.cli._options import ClusterOptions, argument, command, option
from nearveil.cli._output import make_folder, print_table

if TYPE_CHECKING:
    from studies._study import Study


@command()
def study(
    options: ClusterOptions,
    names: list[str] | None = argument("Studies, or all; without a name, list them.", metavar="NAME...|all"),
    out: Path = option("Output folder, with one subfolder per study.", default=Path("out/study")),
    docs: Path | None = option("Documentation folder: pages go to its study/, findings to its index.md."),
    fresh: bool = option("Measure everything again."),
    jobs: int = option("Number of processes; timing studies use one.", default=2, min=1, max=64),
) -> None:
    """Make tables and figures of the papers and of this library, as CSV, JSON, SVG, PNG and a page.

    An interrupted study resumes: measured cases are stored. Most studies need real data (variable NEARVEIL_DATA);
    "all" skips and reports studies without their data.

    For example:
        nearveil study
        nearveil study sensitivity
        nearveil study all --docs docs/results
    """
    _require_studies()
    from studies import load_studies
    from studies._report import write_findings

    console, studies = Console(), load_studies()
    if not names:
        rows = [(name, study.title) for name, study in studies.items()]
        print_table(["name", "shows"], rows, title="Studies")
        return
    unknown = [name for name in names if name not in studies and name != "all"]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is none of: all, {', '.join(studies)}", param_hint="NAME")
    chosen = list(studies) if "all" in names else list(dict.fromkeys(names))
    make_folder(out, "--out")
    make_folder(docs, "--docs")
    begin = time.monotonic()
    with options.connect() as connected:
        cluster = None if options.cluster is None else connected
        skipped = [name for name in chosen if not _run_study(studies[name], out, docs, fresh, jobs, console, cluster)]
    if docs is not None:
        write_findings(docs)
    if len(chosen) > 1:
        console.print(f"{len(chosen) - len(skipped)} studies in {(time.monotonic() - begin) / 60:.1f} minutes")
    if skipped:
        raise typer.Exit(0 if len(skipped) < len(chosen) else 1)


def _require_studies() -> None:
    """Fail if the studies are missing: they are in the repository, and not in the package."""
    if importlib.util.find_spec("studies") is None:
        raise typer.BadParameter(
            "the studies are not installed with nearveil: clone its repository, run pip install -e '.[study]' there, "
            "and run this command again",
            param_hint="NAME",
        )


def _run_study(
    study: "Study", out: Path, docs: Path | None, fresh: bool, jobs: int, console: Console, cluster: Any
) -> bool:
    """Run a study; return False if its data or a package is missing."""
    from studies._report import publish, write
    from studies._study import run
    from studies.data import DataMissingError

    if study.note:
        console.print(f"{study.name}: {study.note}", soft_wrap=True, highlight=False)
    folder = out / study.name
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    try:
        with bar as progress:
            task = progress.add_task(study.name)
            measured = run(
                study,
                folder,
                jobs=jobs,
                fresh=fresh,
                advance=lambda done, total: progress.update(task, completed=done, total=total),
                cluster=cluster,
            )
        page = write(study, measured, folder)
    except (DataMissingError, ModuleNotFoundError) as missing:
        console.print(f"[yellow]{study.name} left out:[/yellow] {missing}", soft_wrap=True)
        return False
    except OSError as error:
        console.print(
            f"[red]{study.name}: {error.strerror or error}; the measurements so far are in {folder}", soft_wrap=True
        )
        raise typer.Exit(1) from None
    if docs is not None:
        publish(study, folder, docs / "study")
    console.print(f"{study.name}: {page} ({measured.seconds:.0f} s measured)", soft_wrap=True)
    return True
