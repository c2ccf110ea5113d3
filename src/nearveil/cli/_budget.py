"""``nearveil budget``: accounts, their bars, their history. It looks and opens; spending belongs to who releases."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeAlias

import typer
from dp_accounting import DpEvent
from rich.console import Console
from rich.text import Text

from nearveil.cli import _budget_view as view
from nearveil.cli._plan import MECHANISM_HELP, METAVAR, Mechanism, event, part
from nearveil.ledger import Account, AccountError, Balance, Ledger, LedgerError, Receipt
from nearveil.privacy import Basis, compose_events
from nearveil.privacy.guarantee import Protects, Relation
from nearveil.storage import data_folder, make_data_folder, parse_url

app = typer.Typer(
    help="Budgets that last: open accounts, see what is left, check that nobody changed the past.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
)

Where: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--ledger",
        envvar="NEARVEIL_LEDGER",
        metavar="PATH_OR_URL",
        help="SQLite file or PostgreSQL URL; ~/.local/share/nearveil/ledger.db by default.",
    ),
]
Watch: TypeAlias = Annotated[
    Path | None,
    typer.Option("--witness", envvar="NEARVEIL_WITNESS", help="The ledger's witness, where it is not the default."),
]
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
Known: TypeAlias = Annotated[Mechanism, typer.Option(help=MECHANISM_HELP)]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_PATIENCE = 10.0  # seconds: a person waits
_SPOKEN = {  # what errors say to programs, in the words of the command line
    "Ledger(..., read_only=True).verify() says more": "`nearveil budget verify` says more",
    "take a new one (new_key())": "take another, or leave it out",
    "Index.create makes one": "`nearveil index DIR --into` makes one",
}


@app.command()
def create(
    name: Name,
    plan: OptionalPlan = None,
    epsilon: Annotated[float, typer.Option(help="The budget.")] = ...,  # type: ignore[assignment]
    delta: Annotated[float, typer.Option(help="Of the budget; 0 adds up pure epsilons.")] = 1e-5,
    owner: Annotated[str, typer.Option(help="Who answers for the account.")] = ...,  # type: ignore[assignment]
    protects: Annotated[Protects, typer.Option(help="Whose record is protected.")] = "query",
    unit: Annotated[
        str | None,
        typer.Option(
            help='What is protected, such as "person with all images"; "image" for queries, "record" for databases by '
            "default. What pays from the account must have the same unit."
        ),
    ] = None,
    relation: Annotated[Relation, typer.Option(help="How inputs that shall look alike differ.")] = "replace",
    mechanism: Known = Mechanism.pure,
    ledger: Where = None,
    witness: Watch = None,
    as_json: Json = False,
) -> None:
    """Open an account, and the ledger if there is none. The terms of an account never change.

    With a plan, all is fixed now and composed by PLD; without, a Renyi filter guards it, or with --delta 0 the sum.

    [bold]Examples[/bold]

    nearveil budget create camera --owner me --epsilon 4

    nearveil budget create photo 100x0.1 5x1 --owner me --epsilon 10 --delta 1e-6
    """
    events = _events(plan, mechanism, delta) if plan else None
    with _words(), Ledger(made_place(ledger), witness=witness, timeout=_PATIENCE) as book:
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
def show(account: Names = None, ledger: Where = None, witness: Watch = None, as_json: Json = False) -> None:
    """Draw a bar for each account: what is spent (rounded up) and what is left (rounded down).

    [bold]Examples[/bold]

    nearveil budget show

    nearveil budget show camera --ledger postgresql://me@host/budgets --json
    """
    with _reading(ledger, witness) as book:
        accounts = book.accounts() if account is None else [_account(book, account)]
        _show(accounts, details=account is not None, as_json=as_json)


@app.command()
def preview(
    account: Name,
    plan: Plan,
    client: Client = None,
    mechanism: Known = Mechanism.pure,
    ledger: Where = None,
    witness: Watch = None,
    as_json: Json = False,
) -> None:
    """Say what releases would cost and what would be left. Nothing is spent. Exit code 1 if they would be refused.

    [bold]Examples[/bold]

    nearveil budget preview camera 10x0.1

    nearveil budget preview archive 5x0.2 --client ann --mechanism gaussian
    """
    with _reading(ledger, witness) as book:
        held = _account(book, account)
        about: Any = {"protects": held.protects, "unit": held.unit, "relation": held.relation, "delta": held.delta}
        events = _events(plan, mechanism, held.delta)
        asked = [(compose_events([one], basis=Basis("a plan of releases"), **about), count) for one, count in events]
        answer = held.preview(asked, client=client)
    if as_json:
        _print_json(view.preview_json(answer))
    else:
        console = _console()
        console.print(view.preview_table(answer))
        console.print(Text(view.clean(answer)))
    raise typer.Exit(0 if answer.allowed else 1)


@app.command()
def quota(
    account: Name,
    client: Annotated[str, typer.Argument(metavar="CLIENT", help="Name of the client.")],
    plan: OptionalPlan = None,
    epsilon: Annotated[float | None, typer.Option(help="The quota, in an account without a plan.")] = None,
    delta: Annotated[float | None, typer.Option(help="Of the quota; the account's by default.")] = None,
    mechanism: Known = Mechanism.pure,
    ledger: Where = None,
    witness: Watch = None,
    as_json: Json = False,
) -> None:
    """Give a client a part of an account: an epsilon, or of an account with a plan a part of that. It never changes.

    [bold]Examples[/bold]

    nearveil budget quota archive ann --epsilon 0.5

    nearveil budget quota photo ann 20x0.1
    """
    _must_exist(ledger)
    with _words(), Ledger(place(ledger), witness=witness, timeout=_PATIENCE) as book:
        held = _account(book, account)
        events = _events(plan, mechanism, held.delta) if plan else None
        given = held.quota(client, epsilon=epsilon, delta=delta, plan=events)
        if as_json:
            _print_json(view.balance_json(given))
        else:
            _console().print(view.balances_table([held.balance(), given]))


@app.command()
def history(
    account: Names = None,
    last: Annotated[int, typer.Option(min=0, help="How many entries of each account; 0 for all.")] = 20,
    ledger: Where = None,
    witness: Watch = None,
    as_json: Json = False,
) -> None:
    """List what happened, in its order. Of a stored message only its length is told. Times are informative.

    [bold]Examples[/bold]

    nearveil budget history camera

    nearveil budget history --last 0 --json
    """
    with _reading(ledger, witness) as book:
        accounts = book.accounts() if account is None else [_account(book, account)]
        books = {held.name: held.history() for held in accounts}
    if as_json:
        _print_json([view.entry_json(entry) for entries in books.values() for entry in entries[-last:]])
        return
    console = _console()
    for name, entries in books.items():
        console.print(Text(view.clean(name), "bold"))
        console.print(view.history_table(entries[-last:]))
        if 0 < last < len(entries):
            console.print(f"and {len(entries) - last:,} before these: --last 0 lists all")


@app.command()
def export(
    file: Annotated[Path, typer.Argument(help="A new file: .json or .csv.")],
    ledger: Where = None,
    witness: Watch = None,
) -> None:
    """Write all entries with their hashes to a new file, readable by you alone. It holds the stored messages.

    [bold]Examples[/bold]

    nearveil budget export entries.json

    nearveil budget export entries.csv --ledger postgresql://me@host/budgets
    """
    if file.suffix not in (".json", ".csv"):
        raise typer.BadParameter("must end in .json or .csv", param_hint="FILE")
    with _reading(ledger, witness) as book:
        text = book.export("json" if file.suffix == ".json" else "csv")
        with os.fdopen(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w", encoding="utf-8") as out:
            out.write(text)
    _say(f"all entries are in {file}")


@app.command()
def verify(
    account: Names = None,
    receipt: Annotated[
        list[str] | None, typer.Option(help="A receipt kept elsewhere, as `show ACCOUNT` printed it; may be repeated.")
    ] = None,
    ledger: Where = None,
    witness: Watch = None,
    as_json: Json = False,
) -> None:
    """Recompute every hash and total. Exit code 1 if something was edited, removed, added or put back.

    [bold]Examples[/bold]

    nearveil budget verify

    nearveil budget verify camera --receipt 3:1f0c...:camera
    """
    with _reading(ledger, witness) as book:
        name = None if account is None else _account(book, account).name
        found = book.verify(name, receipts=[Receipt.parse(text) for text in receipt or ()])
        asked = book._core.witness is not None and book._core.witness.exists()
    if as_json:
        problems = [{"account": one.account, "sequence": one.sequence, "text": one.text} for one in found.problems]
        counts = {"accounts": found.accounts, "entries": found.entries}
        _print_json({"ok": found.ok, **counts, "witness": asked, "problems": problems})
    else:
        for number, line in enumerate(str(found).splitlines()):
            _console().print(Text(view.clean(line), "green" if found.ok else "" if number else "bold red"))
        if not asked:
            _say("There is no witness: only a receipt (--receipt) would tell that an old copy was put back.")
    raise typer.Exit(0 if found.ok else 1)


@app.command()
def backup(
    file: Annotated[Path, typer.Argument(help="A new file.")], ledger: Where = None, witness: Watch = None
) -> None:
    """Copy a SQLite ledger while others spend. For the day the disk dies: a backup is no second ledger.

    [bold]Example[/bold]

    nearveil budget backup /elsewhere/nearveil-2026-11-15.db
    """
    with _reading(ledger, witness) as book:
        book.backup(file)
    _say(f"the backup is {file}")


@contextmanager
def _words() -> Iterator[None]:
    """Turn what a user can mend into a sentence and exit code 1."""
    try:
        yield
    except FileExistsError as error:
        _fail(f"{error.filename} exists; nothing is overwritten, give another path")
    except OSError as error:
        _fail(f"{error.filename}: {error.strerror}")
    except (LedgerError, ValueError) as error:
        _fail(str(error))


def _fail(text: str) -> NoReturn:
    for python, spoken in _SPOKEN.items():
        text = text.replace(python, spoken)
    message = Text.assemble(("Error: ", "bold red"), view.clean(text))
    Console(stderr=True, highlight=False).print(message, soft_wrap=True)
    raise typer.Exit(1)


@contextmanager
def _reading(ledger: str | None, witness: Path | None) -> Iterator[Ledger]:
    """Open a ledger that is there, in whatever state, to look at it."""
    _must_exist(ledger)
    with _words(), Ledger(place(ledger), witness=witness, timeout=_PATIENCE, read_only=True) as book:
        yield book


def place(ledger: str | None) -> str:
    """Return where the ledger is: as given, or the default of all commands."""
    return str(data_folder() / "ledger.db") if ledger is None else ledger


def made_place(ledger: str | None) -> str:
    """Return the same; the default folder is made if it is not there, for its owner alone."""
    if ledger is None:
        make_data_folder()
    return place(ledger)


def _must_exist(ledger: str | None) -> None:
    with _words():
        url = parse_url(place(ledger), "url")
        if url.get_backend_name() == "sqlite" and not Path(str(url.database)).exists():
            raise LedgerError(
                f"there is no ledger at {url.database}: `nearveil budget create` makes one; --ledger or "
                "NEARVEIL_LEDGER names another"
            )


def _account(book: Ledger, name: str) -> Account:
    try:
        return book.account(name)
    except AccountError:
        raise LedgerError(f"there is no account {name!r} here: `nearveil budget show` lists them") from None


def _events(plan: list[str], mechanism: Mechanism, delta: float) -> list[tuple[DpEvent, int]]:
    if mechanism == Mechanism.gaussian and not 0 < delta < 1:
        raise typer.BadParameter(
            "Gaussian noise is not pure: it needs an account with a delta", param_hint="--mechanism"
        )
    return [(event(mechanism, epsilon, delta), count) for count, epsilon in map(part, plan)]


def _clients(account: Account) -> list[Balance]:
    names = [entry.client for entry in account.history() if entry.kind == "quota"]
    return [account.balance(client=name) for name in names]


def _show(accounts: list[Account], *, details: bool, as_json: bool) -> None:
    books = [(account, account.balance(), _clients(account)) for account in accounts]
    if as_json:
        _print_json([view.account_json(*book) for book in books])
        return
    if not books:
        _say("no accounts yet: `nearveil budget create` opens one")
        return
    console = _console()
    console.print(view.balances_table([line for _, balance, clients in books for line in (balance, *clients)]))
    if details:
        for account, balance, _ in books:
            console.print(Text(view.account_text(account, balance)), soft_wrap=True)


def _console() -> Console:
    return Console(highlight=False)


def _say(text: str) -> None:
    _console().print(Text(text), soft_wrap=True)


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, allow_nan=False))
