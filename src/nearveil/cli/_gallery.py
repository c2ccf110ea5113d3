"""Words for searching a gallery: what a plan allows."""

import json
import math
import re
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from nearveil.search import plan as advise

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def plan(
    items: Annotated[int, typer.Option(min=1, help="How many items the gallery holds.")],
    epsilon: Annotated[float, typer.Option(help="Of one query.")],
    answer: Annotated[str, typer.Option(metavar="SIZE", help="What an answer may take, such as 2MB.")],
    delta: Annotated[float, typer.Option(help="Of one query.")] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of sentences.")] = False,
) -> None:
    """Say which release to use for a gallery, and what it will find.

    Says so, too, when the whole gallery's codes fit into the answer and nothing need be asked, and when
    no private release can work, why, and what would.

    [bold]Examples[/bold]

    nearveil plan --items 100000 --epsilon 4 --answer 2MB

    nearveil plan --items 1000000 --epsilon 1 --answer 100kB --json
    """
    try:
        found = advise(items, epsilon, size(answer), delta=delta)
    except ValueError as wrong:
        raise typer.BadParameter(str(wrong)) from None
    if as_json:
        # JSON has no infinity: an answer with no room for one item needs an infinite epsilon.
        fields = {name: None if value == math.inf else value for name, value in asdict(found).items()}
        typer.echo(json.dumps({**fields, "advice": str(found)}, allow_nan=False))
    else:
        Console().print(str(found), highlight=False)


def size(text: str) -> int:
    """Read a number of bytes: 2MB is 2,000,000, 2MiB is 2,097,152.

    Examples
    --------
    >>> size("2MB"), size("1.5 KiB"), size("100")
    (2000000, 1536, 100)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?i?b?)", text.strip().lower())
    unit = match[2].upper() if match else "?"
    unit = unit if unit in _UNITS else unit + "B"
    if match is None or unit not in _UNITS:
        raise typer.BadParameter(f"{text!r} is not a size, such as 500kB, 2MB or 1GiB", param_hint="--answer")
    return int(float(match[1]) * _UNITS[unit])
