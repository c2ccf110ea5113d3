"""``nearveil budget``: accounts and their history. It never spends."""

import json
import math
import os
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from nearveil.cli._options import JSON, LedgerOptions, argument, command, make_app, option
from nearveil.cli._output import check, clean, print_json, print_lines, print_table

if TYPE_CHECKING:
    from dp_accounting import DpEvent

    from nearveil.ledger import Account, Ledger
    from nearveil.ledger.history import Balance
    from nearveil.ledger.store import Entry

app = make_app("Privacy budgets: open accounts, see what has been spent, and detect changes to the history.")

METAVAR = "COUNTxEPSILON"
_NAME = argument("Name of the account.", metavar="ACCOUNT")
_ACCOUNT = argument("One account; all accounts by default.", metavar="ACCOUNT")
_PLAN = argument("A plan: all releases that will ever be made, such as 500x0.5.", metavar=METAVAR)
PlanMechanism: TypeAlias = Literal["pure", "laplace", "gaussian"]
MECHANISM = option(
    "Type of each release: any pure epsilon-private one, Laplace noise, or Gaussian noise.", default="pure"
)
SETS = option(
    "Number of sets in the gallery's map, for messages that name one: they cost less.", min=2, max=2**20, metavar="INT"
)
_ACCOUNTING = {
    "pure": "pure epsilon, summed",
    "filter": "Renyi filter",
    "gaussian": "Gaussian filter",
    "plan": "fixed plan, composed by PLD",
}
_EXAMPLES = (1.0, 2.0, 4.0)  # epsilons of messages
_EXAMPLE_SETS, _EXAMPLE_NOISE, _EXAMPLE_DELTA = 20, 100.0, 1e-6
_KEY_LETTERS = 12  # of a key or client name in the table of entries


@dataclass(frozen=True)
class TermOptions:
    """Terms of an account."""

    epsilon: float = option("The budget, above 0.")
    owner: str = option("Who is responsible for the account.")
    delta: float | None = option("Delta of the budget; 0 sums pure epsilons. Default: 0 for messages, otherwise 1e-5.")
    protects: Literal["query", "database"] = option("Protect queries, or records of a database.", default="query")
    relation: Literal["replace", "add-remove"] = option("How neighbouring inputs differ.", default="replace")
    releases: Literal["any", "gaussian"] = option(
        "Pay for any releases, or for more of Gaussian noise without sampling.", default="any"
    )


@command(app, plan="the plan")
def create(
    terms: TermOptions,
    options: LedgerOptions,
    name: str = _NAME,
    plan: list[str] | None = _PLAN,
    unit: str | None = option('Unit of protection, such as "person with all images"; "image" or "record" by default.'),
    mechanism: PlanMechanism = MECHANISM,
    sets: int | None = SETS,
    as_json: bool = JSON,
) -> None:
    """Open an account, and create the ledger if there is none. The terms of an account never change.

    With a plan, all releases are fixed now and composed by PLD. Without, a Renyi filter limits the account; with
    --delta 0, the sum of the epsilons does. The last line says what the delta buys.

    For example:
        nearveil budget create camera --owner me --epsilon 4
        nearveil budget create album --owner me --epsilon 40 --delta 1e-6 --sets 20
        nearveil budget create photo 100x0.1 5x1 --owner me --epsilon 10 --delta 1e-6
    """
    check(0 < terms.epsilon < math.inf, "must be a finite number above 0", "--epsilon")
    is_pure = terms.protects == "query" and terms.releases == "any" and not plan
    delta = terms.delta if terms.delta is not None else 0.0 if is_pure else 1e-5
    events = read_plan(plan, mechanism, delta, sets) if plan else None
    unit = unit or ("image" if terms.protects == "query" else "record")
    with options.open(create=True) as ledger:
        from nearveil.ledger import BudgetWarning

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", BudgetWarning)
            account = ledger.open_account(name, **asdict(terms) | {"delta": delta}, unit=unit, plan=events)
        for warning in caught:
            print_lines(str(warning.message), stderr=True)
        _print_accounts([account], details=True, as_json=as_json)
        if not (plan or as_json):
            print_lines(_explain_delta(account, sets or _EXAMPLE_SETS))


@command(app)
def show(options: LedgerOptions, account: str | None = _ACCOUNT, as_json: bool = JSON) -> None:
    """Draw a bar for each account: the epsilon spent (rounded up) and left (rounded down).

    For example:
        nearveil budget show camera --ledger postgresql://me@host/budgets --json
    """
    with options.open(read_only=True) as ledger:
        accounts = _list_accounts(ledger, account)
        _print_accounts(accounts, details=account is not None, as_json=as_json)


@command(app, plan="the plan")
def preview(
    options: LedgerOptions,
    account: str = _NAME,
    plan: list[str] = argument("Releases: 10x0.5 is 10 at epsilon 0.5.", metavar=METAVAR),
    client: str | None = option("Also charge the quota of this client."),
    mechanism: PlanMechanism = MECHANISM,
    sets: int | None = SETS,
    as_json: bool = JSON,
) -> None:
    """Compute the cost of releases and the budget left after them. Spends nothing. Exit code 1 if they don't fit.

    For example:
        nearveil budget preview archive 5x0.2 --client ann --mechanism gaussian
    """
    with options.open(read_only=True) as ledger:
        from nearveil.privacy import Basis, compose_events

        payer = ledger.account(account)
        terms: Any = {"protects": payer.protects, "unit": payer.unit, "relation": payer.relation, "delta": payer.delta}
        events = read_plan(plan, mechanism, payer.delta, sets)
        basis = Basis("a plan of releases")
        forecast = payer.preview(
            [(compose_events([event], basis=basis, **terms), count) for event, count in events], client=client
        )
    if as_json:
        print_json({**vars(forecast), "before": _describe_balance(forecast.before)})
    else:
        before = forecast.before
        print_lines(before.client or before.account, style="bold")
        Console(highlight=False).print(Bar(before.epsilon, before.spent, forecast.total))
        print_lines(forecast)
    raise typer.Exit(0 if forecast.allowed else 1)


@command(app, plan="the plan")
def quota(
    options: LedgerOptions,
    account: str = _NAME,
    client: str = argument("Name of the client.", metavar="CLIENT"),
    plan: list[str] | None = _PLAN,
    epsilon: float | None = option("The quota, in an account without a plan."),
    delta: float | None = option("Delta of the quota; the account's by default."),
    mechanism: PlanMechanism = MECHANISM,
    sets: int | None = SETS,
    as_json: bool = JSON,
) -> None:
    """Give a client a share of an account: an epsilon, or a part of the account's plan. A quota never changes.

    For example:
        nearveil budget quota archive ann --epsilon 0.5
        nearveil budget quota photo ann 20x0.1
    """
    with options.open() as ledger:
        payer = ledger.account(account)
        events = read_plan(plan, mechanism, payer.delta, sets) if plan else None
        balance = payer.quota(client, epsilon=epsilon, delta=delta, plan=events)
        if as_json:
            print_json(_describe_balance(balance))
        else:
            _print_balances([payer.balance(), balance])


@command(app)
def history(
    options: LedgerOptions,
    account: str | None = _ACCOUNT,
    last: int = option("Number of entries of each account; 0 for all.", default=20, min=0),
    as_json: bool = JSON,
) -> None:
    """List the entries of accounts in order. Of a stored message, only the length is shown. Times are informative.

    For example:
        nearveil budget history --last 0 --json
    """
    with options.open(read_only=True) as ledger:
        accounts = _list_accounts(ledger, account)
        entries_by_account = {account.name: account.history() for account in accounts}
    if as_json:
        print_json([_describe_entry(entry) for entries in entries_by_account.values() for entry in entries[-last:]])
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
                    _format_events(entry.event_values) if entry.message is None else f"{len(entry.message):,} bytes",
                )
                for entry in entries[-last:]
            ],
            right=("#",),
            no_wrap=("#", "time (UTC)", "entry"),
        )
        if 0 < last < len(entries):
            print_lines(f"and {len(entries) - last:,} earlier entries; --last 0 lists all")


@command(app)
def export(options: LedgerOptions, file: Path = argument("A new file: .json or .csv."), as_json: bool = JSON) -> None:
    """Write all entries with their hashes to a new file, readable only by you. It contains the stored messages.

    For example:
        nearveil budget export entries.csv --ledger postgresql://me@host/budgets
    """
    check(file.suffix in (".json", ".csv"), "must end in .json or .csv", "FILE")
    with options.open(read_only=True) as ledger:
        text = ledger.export("json" if file.suffix == ".json" else "csv")
        with os.fdopen(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w", encoding="utf-8") as out:
            out.write(text)
    _report_file("all entries", file, as_json=as_json)


@command(app)
def verify(
    options: LedgerOptions,
    account: str | None = _ACCOUNT,
    receipt: list[str] | None = option("A receipt stored elsewhere, as printed by `show ACCOUNT`; may be repeated."),
    as_json: bool = JSON,
) -> None:
    """Recompute every hash and total. Exit code 1 if an entry was edited, removed or added, or a copy restored.

    For example:
        nearveil budget verify camera --receipt 3:1f0c...:camera
    """
    with options.open(read_only=True) as ledger:
        name = None if account is None else ledger.account(account).name
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
def backup(options: LedgerOptions, file: Path = argument("A new file."), as_json: bool = JSON) -> None:
    """Copy a SQLite ledger while other processes spend. Use the copy only if the ledger is lost, never beside it.

    For example:
        nearveil budget backup /elsewhere/nearveil-2026-11-15.db
    """
    with options.open(read_only=True) as ledger:
        ledger.backup(file)
    _report_file("the backup", file, as_json=as_json)


def _report_file(content: str, file: Path, *, as_json: bool) -> None:
    if as_json:
        print_json({"file": str(file)})
    else:
        print_lines(f"Wrote {content} to {file}.")


def _explain_delta(account: "Account", n_sets: int) -> str:
    """Describe what a delta buys: how many equal releases an account pays for, with it and without."""
    from dp_accounting import GaussianDpEvent

    from nearveil.ledger.budget import count_affordable, open_budget
    from nearveil.privacy.events import NamedSets

    def count(event: "DpEvent", delta: float, releases: Literal["any", "gaussian"] = "any") -> str:
        return f"{count_affordable(open_budget(account.epsilon, delta, None, account.relation, releases), event):,}"

    delta = account.delta or _EXAMPLE_DELTA
    if account.protects == "database" or account.kind == "gaussian":
        noise = GaussianDpEvent(_EXAMPLE_NOISE)
        more = f", {count(noise, delta, 'gaussian')} with --releases gaussian" if account.epsilon <= 64 else ""
        return (
            f"What delta buys: Gaussian noise needs one. Of answers with noise of {_EXAMPLE_NOISE:g} times the "
            f"sensitivity, a delta of {delta:g} pays for {count(noise, delta)}{more}."
        )
    parts = [
        f"{count(NamedSets(epsilon, n_sets), delta)} at epsilon {epsilon:g} ({count(NamedSets(epsilon, n_sets), 0.0)})"
        for epsilon in _EXAMPLES
    ]
    return (
        f"What delta buys: messages that name one of {n_sets} sets, if nothing else is paid, with a delta of {delta:g} "
        f"(and with delta 0): {', '.join(parts)}. With more sets a message costs less; --sets compares."
    )


def read_plan(
    plan: list[str], mechanism: PlanMechanism, delta: float, sets: int | None = None
) -> "list[tuple[DpEvent, int]]":
    """Return the events of a plan; Gaussian noise is scaled for its epsilon at `delta`."""
    from dp_accounting import GaussianDpEvent, LaplaceDpEvent

    from nearveil.privacy.events import NamedSets, PureDp
    from nearveil.privacy.noise import analytic_gaussian_scale

    check(sets is None or mechanism == "pure", "only messages name sets: use it with --mechanism pure", "--sets")
    is_priced = mechanism != "gaussian" or 0 < delta < 1
    check(is_priced, "Gaussian noise is not pure: it needs an account with a delta", "--mechanism")
    make_event: dict[PlanMechanism, Callable[[float], DpEvent]] = {
        "pure": lambda epsilon: PureDp(epsilon) if sets is None else NamedSets(epsilon, sets),
        "laplace": lambda epsilon: LaplaceDpEvent(1 / epsilon),
        "gaussian": lambda epsilon: GaussianDpEvent(analytic_gaussian_scale(1.0, epsilon, delta)),
    }
    return [(make_event[mechanism](epsilon), count) for count, epsilon in map(_parse_part, plan)]


def _parse_part(text: str) -> tuple[int, float]:
    """Parse COUNTxEPSILON."""
    match = re.fullmatch(r"(\d+)x(\d*\.?\d+(?:e-?\d+)?)", text.strip().lower())
    count, epsilon = (int(match[1]), float(match[2])) if match else (0, 0.0)
    check(
        1 <= count <= 10**9 and 1e-6 <= epsilon <= 50,
        f"{text!r} is not COUNTxEPSILON with a count from 1 to 1,000,000,000 and an epsilon from 1e-6 to 50, such as "
        "500x0.5",
        "PLAN",
    )
    return count, epsilon


def _list_accounts(ledger: "Ledger", name: str | None) -> "list[Account]":
    return ledger.accounts() if name is None else [ledger.account(name)]


def _list_quotas(account: "Account") -> "list[Balance]":
    names = [entry.client for entry in account.history() if entry.kind == "quota"]
    return [account.balance(client=name) for name in names]


def _describe_balance(balance: "Balance") -> dict[str, Any]:
    return {**vars(balance), "remaining": _describe_events(balance.remaining)}


def _describe_account(account: "Account") -> dict[str, Any]:
    about = {name: getattr(account, name) for name in ("owner", "protects", "unit", "relation")}
    quotas = [_describe_balance(balance) for balance in _list_quotas(account)]
    return {**_describe_balance(account.balance()), **about, "receipt": str(account.receipt()), "clients": quotas}


def _describe_entry(entry: "Entry") -> dict[str, Any]:
    plain = {name: getattr(entry, name) for name in ("account", "sequence", "kind", "time", "key", "client", "hash")}
    size = None if entry.message is None else len(entry.message)  # and never the message
    return {**plain, "events": entry.event_values, "message_bytes": size}


def _describe_events(events: "Iterable[tuple[DpEvent, int]]") -> list[dict[str, Any]]:
    from nearveil.ledger.budget import format_event

    return [{"count": count, "event": json.loads(format_event(event))} for event, count in events]


def _format_events(values: list[dict[str, Any]]) -> str:
    return ", ".join(f"{value['count']:,} x {_format_value(value['event'])}" for value in values)


def _format_value(value: Any) -> str:
    """Return the short text of an event or of a parameter, such as PoissonSampled(0.1, Gaussian(20))."""
    if isinstance(value, dict):
        parameters = [_format_value(field) for name, field in reversed(value.items()) if name != "type"]
        return f"{str(value.get('type')).removesuffix('DpEvent')}({', '.join(parameters)})"
    if isinstance(value, list):
        return f"[{', '.join(map(_format_value, value))}]"
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def _print_accounts(accounts: "list[Account]", *, details: bool, as_json: bool) -> None:
    if as_json:
        print_json([_describe_account(account) for account in accounts])
        return
    if not accounts:
        print_lines("No accounts yet. Open one with `nearveil budget create`.")
        return
    _print_balances([balance for account in accounts for balance in (account.balance(), *_list_quotas(account))])
    for account in accounts if details else ():
        print_lines(
            f"Account: {account.name}. Owner: {account.owner}. Protects: {account.protects}. Unit: {account.unit} "
            f"({account.relation}).",
            f"Accounting: {_ACCOUNTING[account.kind]}.",
        )
        if account.kind == "plan":
            print_lines(f"Left of the plan: {_format_events(_describe_events(account.remaining())) or 'nothing'}.")
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
        shares = (min(1.0, amount / self.epsilon) for amount in (self.spent, self.total))
        spent, total = (min(width, math.ceil(width * share)) for share in shares)
        signs = "█▒░" if console.encoding.startswith("utf") else "#+."  # readable without colours
        bar = Text(no_wrap=True)
        for sign, cells, style in zip(
            signs, (spent, total - spent, width - total), ("red", "yellow", "green"), strict=True
        ):
            bar.append(sign * cells, style)
        yield bar
