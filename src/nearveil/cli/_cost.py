"""``nearveil cost``: what a plan of releases costs."""

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from nearveil.cli._plan import MECHANISM_HELP, METAVAR, Mechanism, event, part
from nearveil.privacy.accounting import Accountant, AdditionAccountant, PldAccountant, RdpAccountant
from nearveil.privacy.guarantee import format_factor, format_rounded_up

_LEAST_DELTA = 1e-18  # for which noise is calibrated


def cost(
    plan: Annotated[
        list[str], typer.Argument(metavar=METAVAR, help="Releases, as 500x0.5 for 500 at epsilon 0.5 each.")
    ],
    delta: Annotated[float, typer.Option(help="The delta of the whole plan.")] = 1e-5,
    mechanism: Annotated[Mechanism, typer.Option(help=MECHANISM_HELP)] = Mechanism.pure,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Price a plan before it runs: by addition, by RDP and by PLD, side by side.

    All releases are about the same record, and their parameters are fixed before the first.

    [bold]Examples[/bold]

    nearveil cost 500x0.5

    nearveil cost 100x0.1 5x1 --delta 1e-6 --json
    """
    parts = [part(text) for text in plan]
    if not 0 < delta < 1:
        raise typer.BadParameter("must lie between 0 and 1", param_hint="--delta")
    if delta < _LEAST_DELTA:
        raise typer.BadParameter(
            f"must be at least {_LEAST_DELTA:g}: noise is calibrated for no less", param_hint="--delta"
        )
    accountants: dict[str, Accountant] = {
        "addition": AdditionAccountant(),
        "RDP": RdpAccountant(),
        "PLD": PldAccountant(),
    }
    for count, epsilon in parts:
        for accountant in accountants.values():
            accountant.compose(event(mechanism, epsilon, delta), count)
    releases = sum(count for count, _ in parts)
    prices = {name: accountant.epsilon(delta) for name, accountant in accountants.items()}
    if as_json:
        typer.echo(json.dumps({"releases": releases, "mechanism": mechanism, "delta": delta, "epsilon": prices}))
        return
    grid = Table(title=f"{releases:,} releases about one record, {mechanism}: {' + '.join(plan)}; delta {delta:g}")
    for heading in ("composed by", "epsilon", "e^epsilon, at most"):
        grid.add_column(heading, justify="left" if heading == "composed by" else "right")
    for name, epsilon in prices.items():
        grid.add_row(
            name, format_rounded_up(epsilon, 5), format_factor(epsilon) if epsilon < 14 else "beyond a million"
        )
    console = Console()
    console.print(grid)
    console.print(f"PLD is what an account is charged: {prices['PLD'] / prices['addition']:.1%} of plain addition.")
