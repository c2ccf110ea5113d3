"""``nearveil study``: tables and figures of the papers and of this library."""

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from nearveil.cli import _output as output
from nearveil.cli._options import JSON, ClusterOptions, argument, command, option

if TYPE_CHECKING:
    from studies._study import Study


@command(extra="study")
def study(
    options: ClusterOptions,
    names: list[str] | None = argument("Studies, or all; without a name, list them.", metavar="NAME|all"),
    out: Path = option("Output folder, with one subfolder per study.", default=Path("out/study"), metavar="DIR"),
    docs: Path | None = option("Documentation folder, for pages and findings.", metavar="DIR"),
    fresh: bool = option("Measure everything again."),
    quick: bool = option("Few cases on few rows, in seconds; the figures are rough. Output goes to OUT/quick."),
    jobs: int = option("Number of processes; timing studies use one.", default=2, min=1, max=64),
    as_json: bool = JSON,
) -> None:
    """Make tables and figures of the papers and of this library, as CSV, JSON, SVG, PNG and a page.

    An interrupted study resumes: measured cases are stored. Most studies need real data (variable NEARVEIL_DATA);
    "all" skips and reports studies without their data.

    For example:
        nearveil study
        nearveil study sensitivity --quick
        nearveil study all --docs docs/results
    """
    output.check(output.has_studies(), output.NOT_INSTALLED, "NAME")
    try:
        from studies import load_studies
        from studies._quick import shrink
        from studies._report import write_findings
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(f"{missing.name} is not installed: {output.NOT_INSTALLED}") from None

    studies = load_studies()
    if not names:
        titles = {name: study.title for name, study in studies.items()}
        if as_json:
            output.print_json(titles)
        else:
            output.print_table(["name", "shows"], titles.items(), title="Studies")
        return
    unknown = [name for name in names if name not in studies and name != "all"]
    output.check(not unknown, f"{', '.join(unknown)!r} is none of: all, {', '.join(studies)}", "NAME")
    chosen = list(studies) if "all" in names else list(dict.fromkeys(names))
    output.check(not (quick and docs), "figures of --quick are rough: publish those of a whole run", "--docs")
    out = out / "quick" if quick else out
    output.make_folder(out, "--out")
    output.make_folder(docs, "--docs")
    results = []
    with options.connect() as connected:
        cluster = None if options.cluster is None else connected
        for name in chosen:
            with shrink(studies[name]) if quick else nullcontext(studies[name]) as chosen_study:
                results.append(_run_study(chosen_study, out, docs, fresh or quick, jobs, cluster))
            if not as_json:
                page, reason, seconds = (results[-1][key] for key in ("page", "left_out", "seconds"))
                outcome = f"{name} left out: {reason}" if reason else f"{name}: {page} ({seconds:.0f} s measured)"
                output.print_lines(outcome, style="yellow" if reason else "")
    if docs is not None:
        write_findings(docs)
    if as_json:
        output.print_json(results)
    if all(result["left_out"] for result in results):
        raise typer.Exit(1)


def _run_study(study: "Study", out: Path, docs: Path | None, fresh: bool, jobs: int, cluster: Any) -> dict[str, Any]:
    """Run a study; say why it is left out if its data or a package is missing."""
    from studies._report import publish, write
    from studies._study import run
    from studies.data import DataMissingError

    if study.note and not study.parameters.get("quick"):
        output.print_lines(f"{study.name}: {study.note}", stderr=True)
    folder = out / study.name
    try:
        with output.show_bars() as start:
            advance = output.show_done(start, study.name)
            measured = run(study, folder, jobs=jobs, fresh=fresh, advance=advance, cluster=cluster)
        page = write(study, measured, folder)
    except (DataMissingError, ModuleNotFoundError) as missing:
        return {"study": study.name, "page": None, "seconds": 0.0, "left_out": str(missing)}
    except OSError as error:
        output.fail(f"{study.name}: {error.strerror or error}; the measurements so far are in {folder}")
    if docs is not None:
        publish(study, folder, docs / "study")
    return {"study": study.name, "page": str(page), "seconds": measured.seconds, "left_out": None}
