"""Words for the table of all mechanisms."""

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from nearveil.mechanisms.catalog import CLASSES, DIMENSION, EPSILON, ROWS, catalog


def mechanisms(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List every mechanism: what it protects, whether its promise is proved, and how much it sends.

    Mechanisms that protect different things are not comparable at equal epsilon: read the second column first.

    [bold]Examples[/bold]

    nearveil mechanisms

    nearveil mechanisms --json
    """
    rows = catalog()
    if as_json:
        example = {"epsilon": EPSILON, "rows": ROWS, "features": DIMENSION, "classes": CLASSES}
        typer.echo(json.dumps({"example": example, "mechanisms": [asdict(row) for row in rows]}))
        return
    grid = Table(title="Mechanisms")
    for heading in ("name", "what it protects", "proved", "promise", "bytes", "source"):
        grid.add_column(heading, justify="right" if heading == "bytes" else "left")
    for row in rows:
        size = "not installed" if row.message_bytes is None else f"{row.message_bytes:,}"
        proved = "" if row.kind == "none" else "yes" if row.sound else "no"
        grid.add_row(row.name, row.protects, proved, row.kind, size, row.source)
    console = Console()
    console.print(grid)
    console.print(
        f"Bytes of one message at epsilon {EPSILON:g}, fitted on {ROWS} rows of {DIMENSION} features "
        f"in {CLASSES} classes.",
        highlight=False,
    )
    for row in rows:
        if not row.sound:
            console.print(f"{row.name}: {row.reason}.", highlight=False)
