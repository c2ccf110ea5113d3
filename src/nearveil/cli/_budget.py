"""``nearveil budget``: accounts and their history. It never spends."""

import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from nearveil.cli._accounts import find_account
from nearveil.cli._options import REQUIRED, Json, LedgerOptions, argument, command, option
from nearveil.cli._output import clean, print_json, print_lines, print_table

if TYPE_CHECKING:
    from dp_accounting import DpEvent

    from nearveil.ledger import Account
    from nearveil.ledger.history import Balance

app = typer.Typer(
    help="Privacy budgets: open accounts, see what has been spent, and detect changes to the history.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
)

METAVAR = "COUNTxEPSILON"
Name: TypeAlias = Annotated[str, typer.Argument(metavar="ACCOUNT", help="Name of the account.")]
OptionalName: TypeAlias = Annotated[
    str | None, typer.Argument(metavar="ACCOUNT", help="One account; all accounts by default.")
]
OptionalPlan: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(metavar=METAVAR, help="A plan: all releases that will ever be made, such as 500x0.5."),
]
PlanMechanism: TypeAlias = Literal["pure", "laplace", "gaussian"]
Mechanism: TypeAlias = Annotated[
    PlanMechanism,
    typer.Option(help="Type of each release: any pure epsilon-private one, Laplace noise, or Gaussian noise."),
]
_ACCOUNTING = {"pure": "pure epsilon, summed", "filter": "Renyi filter", "plan": "fixed plan, composed by PLD"}
_KEY_LETTERS = 12  # of a key or client name in the table of entries


@command(app, plan="the plan")
def create(
    name: Name,
    options: LedgerOptions,
    epsilon: float = option("The budget, above 0.", default=REQUIRED),
    owner: str = option("Who is responsible for the account.", default=REQUIRED),
    plan: OptionalPlan = None,
    delta: float = option("Delta of the budget; 0 sums pure epsilons.", default=1e-5),
    protects: Literal["query", "database"] = option(
        "Protect the queries of clients, or records of a database.", default="query"
    ),
    unit: str | None = option(
        'Unit of protection, such as "person with all images"; by default "image" for queries and "record" '
        "for databases. Releases paid from the account must have the same unit."
    ),
    relation: Literal["replace", "add-remove"] = option("How neighbouring inputs differ.", default="replace"),
    mechanism: Mechanism = "pure",
    as_json: Json = False,
) -> None:
    """Open an account, and create the ledger if there is none. The terms of an account never change.

    With a plan, all releases are fixed now and composed by PLD. Without, a Renyi filter limits the account; with
    --delta 0, the sum of the epsilons does.

    For example:
        nearveil budget create camera --owner me --epsilon 4
        nearveil budget create photo 100x0.1 5x1 --owner me --epsilon 10 --delta 1e-6
    """
    if not 0 < epsilon < math.inf:
        raise typer.BadParameter("must be a finite number above 0", param_hint="--epsilon")
    events = read_plan(plan, mechanism, delta) if plan else None
    with options.open(create=True) as ledger:
        from nearveil.ledger import AccountError, BudgetWarning, LedgerError

        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", BudgetWarning)
                account = ledger.open_account(
                    name,
                    owner=owner,
                    protects=protects,
                    unit=unit or ("image" if protects == "query" else "record"),
                    relation=relation,
                    epsilon=epsilon,
                    delta=delta,
                    plan=events,
                )
        except AccountError:
            raise LedgerError(
                f"Account {name!r} exists already, and its terms never change. Use another name, or see "
                "`nearveil budget show`."
            ) from None
        for warning in caught:
            print_lines(str(warning.message), stderr=True)
        _print_accounts([account], details=True, as_json=as_json)


@command(app)
def show(options: LedgerOptions, account: OptionalName = None, as_json: Json = False) -> None:
    """Draw a bar for each account: the epsilon spent (rounded up) and left (rounded down).

    For example:
        nearveil budget show
        nearveil budget show camera --ledger postgresql://me@host/budgets --json
    """
    with options.open(read_only=True) as ledger:
        accounts = ledger.accounts() if account is None else [find_account(ledger, account)]
        _print_accounts(accounts, details=account is not None, as_json=as_json)


@command(app, plan="the plan")
def preview(
    account: Name,
    options: LedgerOptions,
    plan: list[str] = argument("Releases: 10x0.5 is 10 at epsilon 0.5.", default=REQUIRED, metavar=METAVAR),
    client: str | None = option("Also charge the quota of this client."),
    mechanism: Mechanism = "pure",
    as_json: Json = False,
) -> None:
    """Compute the cost of releases and the budget left after them. Spends nothing. Exit code 1 if they don't fit.

    For example:
        nearveil budget preview camera 10x0.1
        nearveil budget preview archive 5x0.2 --client ann --mechanism gaussian
    """
    with options.open(read_only=True) as ledger:
        from nearveil.ledger.views import describe_preview
        from nearveil.privacy import Basis, compose_events

        payer = find_account(ledger, account)
        terms: Any = {"protects": payer.protects, "unit": payer.unit, "relation": payer.relation, "delta": payer.delta}
        events = read_plan(plan, mechanism, payer.delta)
        basis = Basis("a plan of releases")
        forecast = payer.preview(
            [(compose_events([event], basis=basis, **terms), count) for event, count in events], client=client
        )
    if as_json:
        print_json(describe_preview(forecast))
    else:
        before = forecast.before
        grid = Table.grid(padding=(0, 1), expand=True)
        grid.add_column(no_wrap=True, max_width=20)
        grid.add_column(ratio=1)
        bar = Bar(before.epsilon, before.spent, forecast.total)
        grid.add_row(Text(clean(before.client or before.account), "bold"), bar)
        Console(highlight=False).print(grid, Text(clean(forecast)))
    raise typer.Exit(0 if forecast.allowed else 1)


@command(app, plan="the plan")
def quota(
    account: Name,
    options: LedgerOptions,
    client: str = argument("Name of the client.", default=REQUIRED, metavar="CLIENT"),
    plan: OptionalPlan = None,
    epsilon: float | None = option("The quota, in an account without a plan."),
    delta: float | None = option("Delta of the quota; the account's by default."),
    mechanism: Mechanism = "pure",
    as_json: Json = False,
) -> None:
    """Give a client a share of an account: an epsilon, or a part of the account's plan. A quota never changes.

    For example:
        nearveil budget quota archive ann --epsilon 0.5
        nearveil budget quota photo ann 20x0.1
    """
    with options.open() as ledger:
        from nearveil.ledger.views import describe_balance

        payer = find_account(ledger, account)
        events = read_plan(plan, mechanism, payer.delta) if plan else None
        balance = payer.quota(client, epsilon=epsilon, delta=delta, plan=events)
        if as_json:
            print_json(describe_balance(balance))
        else:
            _print_balances([payer.balance(), balance])


@command(app)
def history(
    options: LedgerOptions,
    account: OptionalName = None,
    last: int = option("Number of entries of each account; 0 for all.", default=20, min=0),
    as_json: Json = False,
) -> None:
    """List the entries of accounts in order. Of a stored message, only the length is shown. Times are informative.

    For example:
        nearveil budget history camera
        nearveil budget history --last 0 --json
    """
    with options.open(read_only=True) as ledger:
        from nearveil.ledger.views import describe_entry, describe_events

        accounts = ledger.accounts() if account is None else [find_account(ledger, account)]
        entries_by_account = {account.name: account.history() for account in accounts}
    if as_json:
        print_json([describe_entry(entry) for entries in entries_by_account.values() for entry in entries[-last:]])
        return
    for name, entries in entries_by_account.items():
        print_lines(name, style="bold")
        print_table(
            ["#", "time (UTC)", "entry", "key", "client", "details"],
            [
                (
                    entry.sequence,
                    entry.time[:19].replace("T", " "),
                    entry.kind,
                    (entry.key or "")[:_KEY_LETTERS],
                    (entry.client or "")[:_KEY_LETTERS],
                    describe_events(entry.events) if entry.message is None else f"{len(entry.message):,} bytes",
                )
                for entry in entries[-last:]
            ],
            right=("#",),
            no_wrap=("#", "time (UTC)", "entry"),
        )
        if 0 < last < len(entries):
            print_lines(f"and {len(entries) - last:,} earlier entries; --last 0 lists all")


@command(app)
def export(
    options: LedgerOptions,
    file: Path = argument("A new file: .json or .csv.", default=REQUIRED),
) -> None:
    """Write all entries with their hashes to a new file, readable only by you. It contains the stored messages.

    For example:
        nearveil budget export entries.json
        nearveil budget export entries.csv --ledger postgresql://me@host/budgets
    """
    if file.suffix not in (".json", ".csv"):
        raise typer.BadParameter("must end in .json or .csv", param_hint="FILE")
    with options.open(read_only=True) as ledger:
        text = ledger.export("json" if file.suffix == ".json" else "csv")
        with os.fdopen(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w", encoding="utf-8") as out:
            out.write(text)
    print_lines(f"Wrote all entries to {file}.")


@command(app)
def verify(
    options: LedgerOptions,
    account: OptionalName = None,
    receipt: list[str] | None = option("A receipt stored elsewhere, as printed by `show ACCOUNT`; may be repeated."),
    as_json: Json = False,
) -> None:
    """Recompute every hash and total. Exit code 1 if an entry was edited, removed or added, or a copy restored.

    For example:
        nearveil budget verify
        nearveil budget verify camera --receipt 3:1f0c...:camera
    """
    with options.open(read_only=True) as ledger:
        name = None if account is None else find_account(ledger, account).name
        report = ledger.verify(name, receipts=receipt or ())
        has_witness = ledger.has_witness
    if as_json:
        counts = {"ok": report.ok, "accounts": report.accounts, "entries": report.entries, "witness": has_witness}
        print_json({**counts, "problems": [asdict(problem) for problem in report.problems]})
    else:
        for number, line in enumerate(str(report).splitlines()):
            print_lines(line, style="green" if report.ok else "" if number else "bold red")
        if not has_witness:
            print_lines("There is no witness: only a receipt (--receipt) can reveal that an old copy was restored.")
    raise typer.Exit(0 if report.ok else 1)


@command(app)
def backup(
    options: LedgerOptions,
    file: Path = argument("A new file.", default=REQUIRED),
) -> None:
    """Copy a SQLite ledger while other processes spend. Use the copy only if the ledger is lost, never beside it.

    For example:
        nearveil budget backup /elsewhere/nearveil-2026-11-15.db
    """
    with options.open(read_only=True) as ledger:
        ledger.backup(file)
    print_lines(f"Wrote the backup to {file}.")


def read_plan(plan: list[str], mechanism: PlanMechanism, delta: float) -> "list[tuple[DpEvent, int]]":
    """Return the events of a plan."""
    from nearveil.ledger.views import parse_plan

    if mechanism == "gaussian" and not 0 < delta < 1:
        raise typer.BadParameter(
            "Gaussian noise is not pure: it needs an account with a delta", param_hint="--mechanism"
        )
    try:
        return parse_plan(plan, mechanism, delta)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="PLAN") from None


def _print_accounts(accounts: "list[Account]", *, details: bool, as_json: bool) -> None:
    from nearveil.ledger.views import describe_account, describe_events, list_quotas

    if as_json:
        print_json([describe_account(account) for account in accounts])
        return
    if not accounts:
        print_lines("No accounts yet. Open one with `nearveil budget create`.")
        return
    _print_balances([balance for account in accounts for balance in (account.balance(), *list_quotas(account))])
    for account in accounts if details else ():
        print_lines(
            f"Account: {account.name}. Owner: {account.owner}. Protects: {account.protects}. Unit: {account.unit} "
            f"({account.relation}).",
            f"Accounting: {_ACCOUNTING[account.kind]}.",
        )
        if account.kind == "plan":
            print_lines(f"Left of the plan: {describe_events(account.balance().remaining) or 'nothing'}.")
        print_lines(f"Receipt, to store elsewhere: {account.receipt()}")


def _print_balances(balances: "Sequence[Balance]") -> None:
    """Print a row with a bar for each account, and below it one for each of its clients."""
    from nearveil.ledger.budget import format_down, format_up

    grid = Table(box=SIMPLE_HEAD, pad_edge=False, expand=True)
    grid.add_column("account", max_width=20, overflow="fold")
    grid.add_column("", ratio=1, min_width=20)
    for heading in ("spent", "left", "epsilon", "delta"):
        grid.add_column(heading, justify="right", no_wrap=True)
    for balance in balances:
        is_account = balance.client is None
        grid.add_row(
            Text(clean(balance.account), "bold") if is_account else Text(f"  {clean(balance.client)}"),
            Bar(balance.epsilon, balance.spent, balance.spent),
            format_up(balance.spent),
            format_down(balance.left),
            f"{balance.epsilon:.4g}",
            f"{balance.delta:g}",
        )
    Console(highlight=False).print(grid)


@dataclass(frozen=True)
class Bar:
    """A budget as a bar: spent, requested, left. A cell that is partly spent counts as spent."""

    epsilon: float
    spent: float
    total: float  # spent after the request; `spent` without one

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        spent, total = (self._count_cells(width, amount) for amount in (self.spent, self.total))
        signs = "█▒░" if console.encoding.startswith("utf") else "#+."  # readable without colours
        bar = Text(no_wrap=True)
        for sign, cells, style in zip(
            signs, (spent, total - spent, width - total), ("red", "yellow", "green"), strict=True
        ):
            bar.append(sign * cells, style)
        yield bar

    def _count_cells(self, width: int, amount: float) -> int:
        return min(width, math.ceil(width * min(1.0, amount / self.epsilon)))
