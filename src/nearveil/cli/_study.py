"""``nearveil study``: the papers' tables and figures, and ours, from one command."""

import importlib.util
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

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
    print_table,
    report_errors,
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
        left_out = [name for name in chosen if not _run(studies[name], out, docs, fresh, jobs, console, workers)]
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


def _run(one: "Study", out: Path, docs: Path | None, fresh: bool, jobs: int, console: Console, workers: Any) -> bool:
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
