"""``nearveil study``: tables and figures of the papers and of this library."""

import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from nearveil.cli._options import ClusterOptions, argument, command, option
from nearveil.cli._output import (
    NOT_INSTALLED,
    check,
    has_studies,
    make_folder,
    print_lines,
    print_table,
    show_bars,
    show_done,
)

if TYPE_CHECKING:
    from studies._study import Study


@command()
def study(
    options: ClusterOptions,
    names: list[str] | None = argument("Studies, or all; without a name, list them.", metavar="NAME|all"),
    out: Path = option("Output folder, with one subfolder per study.", default=Path("out/study"), metavar="DIR"),
    docs: Path | None = option(
        "Documentation folder: pages go to its study/, findings to its index.md.", metavar="DIR"
    ),
    fresh: bool = option("Measure everything again."),
    quick: bool = option("Few cases on few rows, in seconds; the figures are rough. Output goes to OUT/quick."),
    jobs: int = option("Number of processes; timing studies use one.", default=2, min=1, max=64),
) -> None:
    """Make tables and figures of the papers and of this library, as CSV, JSON, SVG, PNG and a page.

    An interrupted study resumes: measured cases are stored. Most studies need real data (variable NEARVEIL_DATA);
    "all" skips and reports studies without their data.

    For example:
        nearveil study
        nearveil study sensitivity --quick
        nearveil study all --docs docs/results
    """
    check(has_studies(), NOT_INSTALLED, "NAME")
    from studies import load_studies
    from studies._quick import shrink
    from studies._report import write_findings

    studies = load_studies()
    if not names:
        print_table(["name", "shows"], [(name, study.title) for name, study in studies.items()], title="Studies")
        return
    unknown = [name for name in names if name not in studies and name != "all"]
    check(not unknown, f"{', '.join(unknown)!r} is none of: all, {', '.join(studies)}", "NAME")
    chosen = list(studies) if "all" in names else list(dict.fromkeys(names))
    check(not (quick and docs), "figures of --quick are rough: publish those of a whole run", "--docs")
    out = out / "quick" if quick else out
    make_folder(out, "--out")
    make_folder(docs, "--docs")
    begin = time.monotonic()
    with options.connect() as connected:
        cluster = None if options.cluster is None else connected
        made = []
        for name in chosen:
            with shrink(studies[name]) if quick else nullcontext(studies[name]) as chosen_study:
                if _run_study(chosen_study, out, docs, fresh or quick, jobs, cluster):
                    made.append(name)
    if docs is not None:
        write_findings(docs)
    if len(chosen) > 1:
        print_lines(f"{len(made)} studies in {(time.monotonic() - begin) / 60:.1f} minutes")
    if not made:
        raise typer.Exit(1)


def _run_study(study: "Study", out: Path, docs: Path | None, fresh: bool, jobs: int, cluster: Any) -> bool:
    """Run a study; return False if its data or a package is missing."""
    from studies._report import publish, write
    from studies._study import run
    from studies.data import DataMissingError

    if study.note and not study.parameters.get("quick"):
        print_lines(f"{study.name}: {study.note}")
    folder = out / study.name
    try:
        with show_bars() as start:
            advance = show_done(start, study.name)
            measured = run(study, folder, jobs=jobs, fresh=fresh, advance=advance, cluster=cluster)
        page = write(study, measured, folder)
    except (DataMissingError, ModuleNotFoundError) as missing:
        print_lines(f"{study.name} left out: {missing}", style="yellow")
        return False
    except OSError as error:
        reason = error.strerror or error
        print_lines(f"{study.name}: {reason}; the measurements so far are in {folder}", style="red")
        raise typer.Exit(1) from None
    if docs is not None:
        publish(study, folder, docs / "study")
    print_lines(f"{study.name}: {page} ({measured.seconds:.0f} s measured)")
    return True
