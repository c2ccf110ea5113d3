"""``nearveil protect``: what a model of private records would be worth, and its publication."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nearveil.cli._shared import clean, name_extra, report_errors

if TYPE_CHECKING:
    from nearveil.service.server.settings import GallerySettings
    from nearveil.votes.discriminant import Forecast


def protect(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Of a protected gallery in the file.")] = None,
    config: Annotated[
        Path | None, typer.Option(envvar="NEARVEIL_CONFIG", help="The TOML file of `nearveil serve`.")
    ] = None,
    publish: Annotated[bool, typer.Option("--publish", help="Pay for a publication, and publish the model.")] = False,
    insist: Annotated[bool, typer.Option("--insist", help="Publish also where noise alone is to be expected.")] = False,
) -> None:
    """Tell what accuracy the model of a protected gallery would have; with --publish, publish it.

    The figures are computed from the private records without any noise of their own. They are for you alone: do not
    show them, and do not write them to a log. Without --publish nothing is paid and nothing changes. Each publication
    takes one of those that the gallery was opened for. A server that runs takes up the new model by itself.

    [bold]Examples[/bold]

    nearveil protect --config nearveil.toml

    nearveil protect scans --config nearveil.toml --publish
    """
    with report_errors():
        with name_extra("service"):
            from nearveil.gallery import Index
            from nearveil.service import Settings
            from nearveil.service.server.publications import check_apart
            from nearveil.service.server.serving import open_protected
        settings = Settings.load(config)
        check_apart(settings.galleries)
        told, wait = _chosen(settings.galleries, name), settings.database_timeout
        with (
            closing(Index.open(told.index, timeout=wait)) as index,
            closing(open_protected(told, index, wait)) as found,
        ):
            _show(found.forecast(), told)
            if publish:
                done = found.publish(insist=insist or bool(told.insist))
                typer.echo(f"Published: model {done.number} of {told.name}, version {done.version[:16]}.")
            typer.echo(f"Publications left: {found.publications_left}.")


def _chosen(galleries: "tuple[GallerySettings, ...]", name: str | None) -> "GallerySettings":
    protected = [one for one in galleries if one.kind == "protected" and name in (None, one.name)]
    if len(protected) != 1:
        there = ", ".join(one.name for one in galleries if one.kind == "protected") or "none"
        raise ValueError(f"NAME: it must be that of a protected gallery in the file; there are: {there}")
    return protected[0]


def _show(forecast: "Forecast", told: "GallerySettings") -> None:
    """Say what to expect, and why, on the terminal."""
    grid = Table(title="For you alone: computed from the records, without protection")
    grid.add_column("class", overflow="fold")
    for heading in ("records", "noise on the count", "accuracy"):
        grid.add_column(heading, justify="right")
    for label, count in forecast.records_per_class.items():
        right = forecast.class_accuracy.get(label)
        noise, share = f"± {forecast.noise_per_class:,.1f}", "" if right is None else f"{right:.2f}"
        grid.add_row(Text(clean(str(label))), f"{count:,}", noise, share)
    console = Console(highlight=False)
    console.print(grid)
    for line in _expectations(forecast):
        console.print(Text(clean(line)), soft_wrap=True)
    console.print(f"All models together: epsilon {told.epsilon:g}, delta {told.delta:g}.")


def _expectations(forecast: "Forecast") -> Iterator[str]:
    low, high = forecast.accuracy_range
    yield (
        f"Expected accuracy: {forecast.accuracy:.2f}, and between {low:.2f} and {high:.2f} in 8 of 10 draws of the "
        f"noise; without noise {forecast.without_noise:.2f}; by guessing {forecast.floor:.2f}. Each class counts the "
        "same."
    )
    if forecast.is_noise:
        yield "This would be noise alone: the noise hides the records of each class."
    elif small := len(forecast.small_classes):
        yield (
            f"{small} of {len(forecast.records_per_class)} classes have fewer than five times as many records as there "
            "is noise on their count. That is too few to rely on: gather more, join classes, or open the gallery with "
            "a larger epsilon or fewer publications."
        )
