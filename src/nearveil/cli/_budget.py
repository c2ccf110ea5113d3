"""``nearveil budget`` (accounts and history; it never spends), ``nearveil cost``, ``plan`` and ``mechanisms``."""

import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from nearveil.cli._shared import (
    PATIENCE,
    Json,
    LedgerPlace,
    Witness,
    clean,
    find_account,
    find_ledger,
    print_json,
    print_lines,
    print_table,
    report_errors,
)

if TYPE_CHECKING:
    from dp_accounting import DpEvent

    from nearveil.ledger import Account, Ledger
    from nearveil.ledger.entries import Entry
    from nearveil.ledger.history import Balance, Preview

app = typer.Typer(
    help="Budgets that last: open accounts, see what is left, check that nobody changed the past.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
)


METAVAR = "COUNTxEPSILON"
Name: TypeAlias = Annotated[str, typer.Argument(metavar="ACCOUNT", help="Name of the account.")]
Names: TypeAlias = Annotated[str | None, typer.Argument(metavar="ACCOUNT", help="One account; all by default.")]
Plan: TypeAlias = Annotated[
    list[str], typer.Argument(metavar=METAVAR, help="Releases, as 10x0.5 for 10 at epsilon 0.5.")
]
OptionalPlan: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(metavar=METAVAR, help="A plan: all that may ever be released, as 500x0.5."),
]
Client: TypeAlias = Annotated[str | None, typer.Option(help="The client whose quota pays, too.")]
Kind: TypeAlias = Literal["pure", "laplace", "gaussian"]
Known: TypeAlias = Annotated[
    Kind,
    typer.Option(help="What each release is: any pure epsilon-private one, Laplace noise, or Gaussian noise."),
]
_LARGEST = 500  # epsilon of a budget
_KINDS = {"pure": "pure epsilons, added up", "filter": "a Renyi filter", "plan": "a plan, composed by PLD"}


@app.command()
def create(
    name: Name,
    plan: OptionalPlan = None,
    epsilon: Annotated[float, typer.Option(help="The budget: above 0, and at most 500.")] = ...,  # type: ignore[assignment]
    delta: Annotated[float, typer.Option(help="Of the budget; 0 adds up pure epsilons.")] = 1e-5,
    owner: Annotated[str, typer.Option(help="Who answers for the account.")] = ...,  # type: ignore[assignment]
    protects: Annotated[Literal["query", "database"], typer.Option(help="Whose record is protected.")] = "query",
    unit: Annotated[
        str | None,
        typer.Option(
            help='What is protected, such as "person with all images"; "image" for queries, "record" for databases by '
            "default. What pays from the account must have the same unit."
        ),
    ] = None,
    relation: Annotated[
        Literal["replace", "add-remove"], typer.Option(help="How inputs that shall look alike differ.")
    ] = "replace",
    mechanism: Known = "pure",
    ledger: LedgerPlace = None,
    witness: Witness = None,
    as_json: Json = False,
) -> None:
    """Open an account, and the ledger if there is none. The terms of an account never change.

    With a plan, all is fixed now and composed by PLD; without, a Renyi filter guards it, or with --delta 0 the sum.

    [bold]Examples[/bold]

    nearveil budget create camera --owner me --epsilon 4

    nearveil budget create photo 100x0.1 5x1 --owner me --epsilon 10 --delta 1e-6
    """
    if not 0 < epsilon <= _LARGEST:
        raise typer.BadParameter(f"must be above 0 and at most {_LARGEST}", param_hint="--epsilon")
    events = read_plan(plan, mechanism, delta) if plan else None
    with report_errors():
        from nearveil.ledger import AccountError, Ledger, LedgerError

        with Ledger(find_ledger(ledger, make=True), witness=witness, timeout=PATIENCE) as book:
            try:
                account = book.open_account(
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
                    f"account {name!r} exists already, and its terms never change: take another name, or see "
                    "`nearveil budget show`"
                ) from None
            _show([account], details=True, as_json=as_json)


@app.command()
def show(account: Names = None, ledger: LedgerPlace = None, witness: Witness = None, as_json: Json = False) -> None:
    """Draw a bar for each account: what is spent (rounded up) and what is left (rounded down).

    [bold]Examples[/bold]

    nearveil budget show

    nearveil budget show camera --ledger postgresql://me@host/budgets --json
    """
    with _open_to_read(ledger, witness) as book:
        accounts = book.accounts() if account is None else [find_account(book, account)]
        _show(accounts, details=account is not None, as_json=as_json)


@app.command()
def preview(
    account: Name,
    plan: Plan,
    client: Client = None,
    mechanism: Known = "pure",
    ledger: LedgerPlace = None,
    witness: Witness = None,
    as_json: Json = False,
) -> None:
    """Say what releases would cost and what would be left. Nothing is spent. Exit code 1 if they would be refused.

    [bold]Examples[/bold]

    nearveil budget preview camera 10x0.1

    nearveil budget preview archive 5x0.2 --client ann --mechanism gaussian
    """
    with _open_to_read(ledger, witness) as book:
        from nearveil.ledger.views import describe_preview
        from nearveil.privacy import Basis, compose_events

        held = find_account(book, account)
        about: Any = {"protects": held.protects, "unit": held.unit, "relation": held.relation, "delta": held.delta}
        events = read_plan(plan, mechanism, held.delta)
        asked = [(compose_events([one], basis=Basis("a plan of releases"), **about), count) for one, count in events]
        answer = held.preview(asked, client=client)
    if as_json:
        print_json(describe_preview(answer))
    else:
        console = Console(highlight=False)
        console.print(_draw_preview(answer))
        console.print(Text(clean(answer)))
    raise typer.Exit(0 if answer.allowed else 1)


@app.command()
def quota(
    account: Name,
    client: Annotated[str, typer.Argument(metavar="CLIENT", help="Name of the client.")],
    plan: OptionalPlan = None,
    epsilon: Annotated[float | None, typer.Option(help="The quota, in an account without a plan.")] = None,
    delta: Annotated[float | None, typer.Option(help="Of the quota; the account's by default.")] = None,
    mechanism: Known = "pure",
    ledger: LedgerPlace = None,
    witness: Witness = None,
    as_json: Json = False,
) -> None:
    """Give a client a part of an account: an epsilon, or of an account with a plan a part of that. It never changes.

    [bold]Examples[/bold]

    nearveil budget quota archive ann --epsilon 0.5

    nearveil budget quota photo ann 20x0.1
    """
    with report_errors():
        from nearveil.ledger import Ledger
        from nearveil.ledger.views import describe_balance

        with Ledger(find_ledger(ledger), witness=witness, timeout=PATIENCE) as book:
            held = find_account(book, account)
            events = read_plan(plan, mechanism, held.delta) if plan else None
            given = held.quota(client, epsilon=epsilon, delta=delta, plan=events)
            if as_json:
                print_json(describe_balance(given))
            else:
                Console(highlight=False).print(_draw_balances([held.balance(), given]))


@app.command()
def history(
    account: Names = None,
    last: Annotated[int, typer.Option(min=0, help="How many entries of each account; 0 for all.")] = 20,
    ledger: LedgerPlace = None,
    witness: Witness = None,
    as_json: Json = False,
) -> None:
    """List what happened, in its order. Of a stored message only its length is told. Times are informative.

    [bold]Examples[/bold]

    nearveil budget history camera

    nearveil budget history --last 0 --json
    """
    with _open_to_read(ledger, witness) as book:
        accounts = book.accounts() if account is None else [find_account(book, account)]
        books = {held.name: held.history() for held in accounts}
    if as_json:
        from nearveil.ledger.views import describe_entry

        print_json([describe_entry(entry) for entries in books.values() for entry in entries[-last:]])
        return
    for name, entries in books.items():
        print_lines(name, style="bold")
        Console(highlight=False).print(_draw_history(entries[-last:]))
        if 0 < last < len(entries):
            print_lines(f"and {len(entries) - last:,} before these: --last 0 lists all")


@app.command()
def export(
    file: Annotated[Path, typer.Argument(help="A new file: .json or .csv.")],
    ledger: LedgerPlace = None,
    witness: Witness = None,
) -> None:
    """Write all entries with their hashes to a new file, readable by you alone. It holds the stored messages.

    [bold]Examples[/bold]

    nearveil budget export entries.json

    nearveil budget export entries.csv --ledger postgresql://me@host/budgets
    """
    if file.suffix not in (".json", ".csv"):
        raise typer.BadParameter("must end in .json or .csv", param_hint="FILE")
    with _open_to_read(ledger, witness) as book:
        text = book.export("json" if file.suffix == ".json" else "csv")
        with os.fdopen(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w", encoding="utf-8") as out:
            out.write(text)
    print_lines(f"all entries are in {file}")


@app.command()
def verify(
    account: Names = None,
    receipt: Annotated[
        list[str] | None, typer.Option(help="A receipt kept elsewhere, as `show ACCOUNT` printed it; may be repeated.")
    ] = None,
    ledger: LedgerPlace = None,
    witness: Witness = None,
    as_json: Json = False,
) -> None:
    """Recompute every hash and total. Exit code 1 if something was edited, removed, added or put back.

    [bold]Examples[/bold]

    nearveil budget verify

    nearveil budget verify camera --receipt 3:1f0c...:camera
    """
    with _open_to_read(ledger, witness) as book:
        from nearveil.ledger import Receipt

        name = None if account is None else find_account(book, account).name
        found = book.verify(name, receipts=[Receipt.parse(text) for text in receipt or ()])
        asked = book.has_witness
    if as_json:
        problems = [{"account": one.account, "sequence": one.sequence, "text": one.text} for one in found.problems]
        counts = {"accounts": found.accounts, "entries": found.entries}
        print_json({"ok": found.ok, **counts, "witness": asked, "problems": problems})
    else:
        for number, line in enumerate(str(found).splitlines()):
            print_lines(line, style="green" if found.ok else "" if number else "bold red")
        if not asked:
            print_lines("There is no witness: only a receipt (--receipt) would tell that an old copy was put back.")
    raise typer.Exit(0 if found.ok else 1)


@app.command()
def backup(
    file: Annotated[Path, typer.Argument(help="A new file.")], ledger: LedgerPlace = None, witness: Witness = None
) -> None:
    """Copy a SQLite ledger while others spend. For the day the disk dies: a backup is no second ledger.

    [bold]Example[/bold]

    nearveil budget backup /elsewhere/nearveil-2026-11-15.db
    """
    with _open_to_read(ledger, witness) as book:
        book.backup(file)
    print_lines(f"the backup is {file}")


@contextmanager
def _open_to_read(ledger: str | None, witness: Path | None) -> Iterator["Ledger"]:
    """Open a ledger that is there, in whatever state, to look at it."""
    with report_errors():
        from nearveil.ledger import Ledger

        with Ledger(find_ledger(ledger), witness=witness, timeout=PATIENCE, read_only=True) as book:
            yield book


def read_plan(plan: list[str], mechanism: Kind, delta: float) -> "list[tuple[DpEvent, int]]":
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


def _show(accounts: "list[Account]", *, details: bool, as_json: bool) -> None:
    from nearveil.ledger.views import describe_account, list_quotas

    if as_json:
        print_json([describe_account(account) for account in accounts])
        return
    if not accounts:
        print_lines("no accounts yet: `nearveil budget create` opens one")
        return
    lines = [line for account in accounts for line in (account.balance(), *list_quotas(account))]
    Console(highlight=False).print(_draw_balances(lines))
    if details:
        for account in accounts:
            print_lines(*_describe_account(account))


def _describe_account(account: "Account") -> list[str]:
    from nearveil.ledger.views import describe_events

    lines = [
        f"{account.name} belongs to {account.owner} and protects the {account.protects}; one record is: {account.unit} "
        f"({account.relation}).",
        f"It is {_KINDS[account.kind]}.",
    ]
    if account.kind == "plan":
        lines.append(f"Left of the plan: {describe_events(account.balance().remaining) or 'nothing'}.")
    return [*lines, f"Receipt, to be kept elsewhere: {account.receipt()}"]


@dataclass(frozen=True)
class Bar:
    """A budget as a bar: what is spent, what is asked for, what is left. A cell that is begun counts as gone."""

    epsilon: float
    spent: float
    total: float  # what would be spent then; `spent` where nothing is asked for

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        gone, then = (self._count_cells(width, amount) for amount in (self.spent, self.total))
        signs = "█▒░" if console.encoding.startswith("utf") else "#+."  # one reads them without colours, too
        bar = Text(no_wrap=True)
        for sign, cells, style in zip(
            signs, (gone, then - gone, width - then), ("red", "yellow", "green"), strict=True
        ):
            bar.append(sign * cells, style)
        yield bar

    def _count_cells(self, width: int, amount: float) -> int:
        return min(width, math.ceil(width * min(1.0, amount / self.epsilon)))


def _draw_balances(lines: "Sequence[Balance]") -> Table:
    """Return a row with a bar for each account, and below it one for each of its clients."""
    from nearveil.ledger.budget import format_down, format_up

    grid = Table(box=SIMPLE_HEAD, pad_edge=False, expand=True)
    grid.add_column("account", max_width=20, overflow="fold")
    grid.add_column("", ratio=1, min_width=20)
    for heading in ("spent", "left", "epsilon", "delta"):
        grid.add_column(heading, justify="right", no_wrap=True)
    for line in lines:
        who = Text(clean(line.account), "bold") if line.client is None else Text(f"  {clean(line.client)}")
        grid.add_row(
            who,
            Bar(line.epsilon, line.spent, line.spent),
            format_up(line.spent),
            format_down(line.left),
            f"{line.epsilon:.4g}",
            f"{line.delta:g}",
        )
    return grid


def _draw_preview(preview: "Preview") -> Table:
    """Return the bar of a budget with what a spend would take."""
    before = preview.before
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(no_wrap=True, max_width=20)
    grid.add_column(ratio=1)
    grid.add_row(Text(clean(before.client or before.account), "bold"), Bar(before.epsilon, before.spent, preview.total))
    return grid


def _draw_history(entries: "Sequence[Entry]") -> Table:
    """Return entries as a table; of a message, only how long it is."""
    clients = any(entry.client is not None for entry in entries)
    grid = Table(box=SIMPLE_HEAD, pad_edge=False)
    grid.add_column("#", justify="right", no_wrap=True)
    grid.add_column("time (UTC)", no_wrap=True)
    grid.add_column("entry", no_wrap=True)
    for heading in ("key", "client") if clients else ("key",):
        grid.add_column(heading, no_wrap=True, overflow="ellipsis", max_width=12)
    grid.add_column("what")
    for entry in entries:
        who = [clean(entry.client or "")] if clients else []
        cells = [
            f"{entry.sequence}",
            clean(entry.time)[:19].replace("T", " "),
            clean(entry.kind),
            clean(entry.key or ""),
        ]
        grid.add_row(*(Text(cell) for cell in (*cells, *who, _describe_entry(entry))))
    return grid


def _describe_entry(entry: "Entry") -> str:
    from nearveil.ledger.views import describe_events

    return describe_events(entry.events) if entry.message is None else f"{len(entry.message):,} bytes"


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
    epsilon: Annotated[float, typer.Option(min=0, max=40, help="Of one query.")],
    answer: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="What an answer may take, such as 2MB; a tenth of the gallery by default."),
    ] = None,
    dimension: Annotated[
        int, typer.Option(min=1, help="Of a feature; 1280 is that of images by EfficientNet-Lite0.")
    ] = 1280,
    storage: Annotated[str, typer.Option(metavar="SIZE", help="What a client may keep, such as 2GiB.")] = "2GiB",
    delta: Annotated[float, typer.Option(min=0, max=1, help="Of one query.")] = 0.0,
    as_json: Json = False,
) -> None:
    """Weigh the ways to ask a gallery: what each finds, what the server learns, and what to type.

    A copy at home and sealed questions tell the server nothing; a message pays epsilon. Where a message cannot work,
    its commands are those of a larger answer and of a larger epsilon. DIR, GALLERY, IMAGE and URL stand for yours;
    `nearveil token create NAME > TOKEN` makes the token.

    [bold]Examples[/bold]

    nearveil plan --items 100000 --epsilon 4

    nearveil plan --items 100000 --epsilon 4 --answer 2MB

    nearveil plan --items 1000000 --epsilon 1 --answer 100kB --dimension 128 --json
    """
    from nearveil.search import plan as advise

    try:
        limits = {"dimension": dimension, "storage": parse_size(storage, "--storage")}
        size = None if answer is None else parse_size(answer, "--answer")
        found = advise(items, epsilon, size, delta=delta, **limits)
    except ValueError as wrong:
        raise typer.BadParameter(str(wrong)) from None
    if as_json:
        # JSON has no infinity: an answer with no room for one item needs an infinite epsilon.
        fields = {name: None if value == math.inf else value for name, value in asdict(found).items()}
        print_json({**fields, "advice": str(found), "commands": list(found.commands)})
    else:
        _print_ways(found)


_COSTS = ("way", "epsilon", "kept once", "sent", "received", "server reads", "finds")


def _print_ways(found: "SearchPlan") -> None:
    """Print the ways side by side, and each with its reason and what to type."""
    from nearveil.search.planning import write_bytes

    print_table(
        [*_COSTS, ""],
        [
            (
                way.name,
                f"{way.epsilon:g}",
                *map(write_bytes, (way.stored_bytes, way.sent_bytes, way.received_bytes, way.scanned_bytes)),
                "-".join(dict.fromkeys(f"{100 * part:.0f}" for part in way.recall)) + "%",
                "advised" if way.recommended else "",
            )
            for way in found.ways
        ],
        title=f"One question to {found.items:,} items: what it takes, and which part of the 8 nearest it finds",
        right=_COSTS[1:],
    )
    for way in found.ways:
        said = [str(found)] if way.name == "message" else []
        print_lines(
            f"{way.name}: the server learns {way.server_learns}; {way.reason}.",
            *said,
            *(f"  {line}" for line in way.commands),
        )
    if all(way.name != "message" for way in found.ways):
        print_lines(f"message: none. {found}")


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
