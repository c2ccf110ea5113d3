"""``nearveil protect``: what a model of private records would be worth, and its publication."""

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nearveil.cli._serve import _INSTALL
from nearveil.cli._shared import clean, report_errors

if TYPE_CHECKING:
    from nearveil.service import ProtectedGallery
    from nearveil.service._settings import GallerySettings
    from nearveil.votes import Forecast


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
        try:
            from nearveil.gallery import Index
            from nearveil.service import Settings
            from nearveil.service._protected_checks import check_apart
            from nearveil.service._serve import open_protected
        except ModuleNotFoundError as missing:
            raise ModuleNotFoundError(_INSTALL) from missing
        settings = Settings.load(config)
        check_apart(settings.galleries)
        told, wait = _chosen(settings.galleries, name), settings.database_timeout
        with (
            closing(Index.open(told.index, timeout=wait)) as index,
            closing(open_protected(told, index, wait)) as found,
        ):
            _show(found, told, found.forecast())
            if publish:
                done = found.publish(insist=insist or bool(told.insist))
                typer.echo(f"Published: model {done.number} of {told.name}, version {done.version[:16]}.")


def _chosen(galleries: "tuple[GallerySettings, ...]", name: str | None) -> "GallerySettings":
    protected = [one for one in galleries if one.kind == "protected" and name in (None, one.name)]
    if len(protected) != 1:
        there = ", ".join(one.name for one in galleries if one.kind == "protected") or "none"
        raise ValueError(f"NAME: it must be that of a protected gallery in the file; there are: {there}")
    return protected[0]


def _show(gallery: "ProtectedGallery", told: "GallerySettings", forecast: "Forecast") -> None:
    """Say what to expect, and why, on the terminal."""
    grid = Table(title="For you alone: computed from the records, without protection")
    grid.add_column("class", overflow="fold")
    grid.add_column("records", justify="right")
    grid.add_column("noise on the count", justify="right")
    for label, count in forecast.records_per_class.items():
        grid.add_row(Text(clean(str(label))), f"{count:,}", f"± {forecast.noise_per_class:,.1f}")
    console = Console(highlight=False)
    console.print(grid)
    left = gallery.publications_left
    for line in (
        f"Expected accuracy: {forecast.accuracy:.2f}; without noise {forecast.without_noise:.2f}; by guessing "
        f"{forecast.floor:.2f}. Each class counts the same.",
        *(["This would be noise alone: the noise hides the records of each class."] if forecast.is_noise else []),
        f"All models together: epsilon {told.epsilon:g}, delta {told.delta:g}. Publications left: {left}.",
    ):
        console.print(Text(clean(line)), soft_wrap=True)
