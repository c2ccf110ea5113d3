"""Commands that compute without data: ``nearveil cost``, ``nearveil plan`` and ``nearveil mechanisms``."""

import math
import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from nearveil.cli._budget import METAVAR, Known, read_plan
from nearveil.cli._shared import Json, print_json, print_lines, print_table

if TYPE_CHECKING:
    from nearveil.search.planning import SearchPlan

_LEAST_DELTA = 1e-18  # for which noise is calibrated
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def cost(
    plan: Annotated[
        list[str], typer.Argument(metavar=METAVAR, help="Releases, as 500x0.5 for 500 at epsilon 0.5 each.")
    ],
    delta: Annotated[float, typer.Option(help="The delta of the whole plan.")] = 1e-5,
    mechanism: Known = "pure",
    as_json: Json = False,
) -> None:
    """Price a plan before it runs: by addition, by RDP and by PLD, side by side.

    All releases are about the same record, and their parameters are fixed before the first.

    [bold]Examples[/bold]

    nearveil cost 500x0.5

    nearveil cost 100x0.1 5x1 --delta 1e-6 --json
    """
    if not 0 < delta < 1:
        raise typer.BadParameter("must lie between 0 and 1", param_hint="--delta")
    if delta < _LEAST_DELTA:
        raise typer.BadParameter(
            f"must be at least {_LEAST_DELTA:g}: noise is calibrated for no less", param_hint="--delta"
        )
    events = read_plan(plan, mechanism, delta)
    from nearveil.privacy.accounting import AdditionAccountant, PldAccountant, RdpAccountant
    from nearveil.privacy.guarantee import format_factor, format_rounded_up

    prices = {}
    for name, accountant in (("addition", AdditionAccountant()), ("RDP", RdpAccountant()), ("PLD", PldAccountant())):
        for event, count in events:
            accountant.compose(event, count)
        prices[name] = accountant.epsilon(delta)
    releases = sum(count for _, count in events)
    if as_json:
        print_json({"releases": releases, "mechanism": mechanism, "delta": delta, "epsilon": prices})
        return
    print_table(
        ["composed by", "epsilon", "e^epsilon, at most"],
        [
            (name, format_rounded_up(epsilon, 5), format_factor(epsilon) if epsilon < 14 else "beyond a million")
            for name, epsilon in prices.items()
        ],
        title=f"{releases:,} releases about one record, {mechanism}: {' + '.join(plan)}; delta {delta:g}",
        right=("epsilon", "e^epsilon, at most"),
    )
    print_lines(f"PLD is what an account is charged: {prices['PLD'] / prices['addition']:.1%} of plain addition.")


def plan(
    items: Annotated[int, typer.Option(min=1, help="How many items the gallery holds.")],
    epsilon: Annotated[float, typer.Option(help="Of one query.")],
    answer: Annotated[str, typer.Option(metavar="SIZE", help="What an answer may take, such as 2MB.")],
    dimension: Annotated[
        int, typer.Option(min=1, help="Of a feature; 1280 is that of images by EfficientNet-Lite0.")
    ] = 1280,
    storage: Annotated[str, typer.Option(metavar="SIZE", help="What a client may keep, such as 2GiB.")] = "2GiB",
    delta: Annotated[float, typer.Option(help="Of one query.")] = 0.0,
    as_json: Json = False,
) -> None:
    """Weigh the ways to ask a gallery: what each finds, what the server learns, and what to type.

    A copy at home and sealed questions tell the server nothing; a message pays epsilon. Where a message cannot work,
    its commands are those of a larger answer and of a larger epsilon.

    [bold]Examples[/bold]

    nearveil plan --items 100000 --epsilon 4 --answer 2MB

    nearveil plan --items 1000000 --epsilon 1 --answer 100kB --dimension 128 --json
    """
    from nearveil.search import plan as advise

    try:
        limits = {"dimension": dimension, "storage": parse_size(storage, "--storage")}
        found = advise(items, epsilon, parse_size(answer, "--answer"), delta=delta, **limits)
    except ValueError as wrong:
        raise typer.BadParameter(str(wrong)) from None
    if as_json:
        # JSON has no infinity: an answer with no room for one item needs an infinite epsilon.
        fields = {name: None if value == math.inf else value for name, value in asdict(found).items()}
        print_json({**fields, "advice": str(found), "commands": list(found.commands)})
    else:
        _print_ways(found)


_COSTS = ("way", "you keep", "you send", "you get", "server reads", "finds up to")


def _print_ways(found: "SearchPlan") -> None:
    """Print the ways side by side, and each with its reason and what to type."""
    from nearveil.search.planning import write_bytes

    print_table(
        [*_COSTS, ""],
        [
            (
                way.name,
                *map(write_bytes, (way.keeps, way.sends, way.gets, way.passes)),
                f"{way.found:.0%}",
                "advised" if way.advised else "",
            )
            for way in found.ways
        ],
        right=_COSTS[1:],
    )
    for way in found.ways:
        said = str(found).splitlines() if way.name == "message" else []
        lines = [f"  {line}" for line in way.commands]
        print_lines(f"{way.name}: the server learns {way.learns}; {way.why}.", *said, *lines)


def parse_size(text: str, option: str) -> int:
    """Read a number of bytes: 2MB is 2,000,000, 2MiB is 2,097,152.

    Examples
    --------
    >>> parse_size("2MB", "--answer"), parse_size("1.5 KiB", "--answer"), parse_size("100", "--answer")
    (2000000, 1536, 100)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?i?b?)", text.strip().lower())
    unit = match[2].upper() if match else "?"
    unit = unit if unit in _UNITS else unit + "B"
    if match is None or unit not in _UNITS:
        raise typer.BadParameter(f"{text!r} is not a size, such as 500kB, 2MB or 1GiB", param_hint=option)
    return int(float(match[1]) * _UNITS[unit])


def mechanisms(as_json: Json = False) -> None:
    """List every mechanism: what it protects, whether its guarantee is proved, and how much it sends.

    Mechanisms that protect different things are not comparable at equal epsilon: read the second column first.

    [bold]Examples[/bold]

    nearveil mechanisms

    nearveil mechanisms --json
    """
    from nearveil.mechanisms import catalog

    rows = catalog.describe_mechanisms()
    if as_json:
        example = {
            "epsilon": catalog.EPSILON,
            "rows": catalog.ROWS,
            "features": catalog.DIMENSION,
            "classes": catalog.CLASSES,
        }
        print_json({"example": example, "mechanisms": [asdict(row) for row in rows]})
        return
    print_table(
        ["name", "what it protects", "proved", "guarantee", "bytes", "source"],
        [
            (
                row.name,
                row.protects,
                "" if row.kind == "none" else "yes" if row.sound else "no",
                row.kind,
                "not installed" if row.message_bytes is None else f"{row.message_bytes:,}",
                row.source,
            )
            for row in rows
        ],
        title="Mechanisms",
        right=("bytes",),
    )
    print_lines(
        f"Bytes of one message at epsilon {catalog.EPSILON:g}, fitted on {catalog.ROWS} rows of {catalog.DIMENSION} "
        f"features in {catalog.CLASSES} classes.",
        *(f"{row.name}: {row.reason}." for row in rows if not row.sound),
    )
