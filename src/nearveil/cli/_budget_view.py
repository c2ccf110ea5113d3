"""What ``nearveil budget`` prints: bars and tables for people, plain values for JSON. No message is ever shown."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dp_accounting import DpEvent
from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from nearveil.ledger import Account, Balance, Entry
from nearveil.ledger.budget import format_down, format_event, format_up
from nearveil.ledger.history import Preview

_KINDS = {"pure": "pure epsilons, added up", "filter": "a Renyi filter", "plan": "a plan, composed by PLD"}


def clean(text: object) -> str:
    """Return a text of the database without what would steer a terminal."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in str(text))


@dataclass(frozen=True)
class Bar:
    """A budget as a bar: what is spent, what is asked for, what is left. A cell that is begun counts as gone."""

    epsilon: float
    spent: float
    total: float  # what would be spent then; `spent` where nothing is asked for

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        gone, then = (self._cells(width, amount) for amount in (self.spent, self.total))
        signs = "█▒░" if console.encoding.startswith("utf") else "#+."  # one reads them without colours, too
        bar = Text(no_wrap=True)
        for sign, cells, style in zip(
            signs, (gone, then - gone, width - then), ("red", "yellow", "green"), strict=True
        ):
            bar.append(sign * cells, style)
        yield bar

    def _cells(self, width: int, amount: float) -> int:
        return min(width, math.ceil(width * min(1.0, amount / self.epsilon)))


def told(event: DpEvent) -> str:
    """Return an event in few letters.

    Examples
    --------
    >>> from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    >>> told(PoissonSampledDpEvent(0.1, GaussianDpEvent(20.0)))
    'PoissonSampled(0.1, Gaussian(20))'
    """
    return _told(json.loads(format_event(event)))


def _told(value: Any) -> str:
    if isinstance(value, dict):
        inside = [_told(field) for name, field in reversed(value.items()) if name != "type"]
        return f"{value['type'].removesuffix('DpEvent')}({', '.join(inside)})"
    if isinstance(value, list):
        return f"[{', '.join(map(_told, value))}]"
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def told_all(events: Iterable[tuple[DpEvent, int]]) -> str:
    """Return events with their counts."""
    return ", ".join(f"{count:,} x {told(event)}" for event, count in events)


def balances_table(lines: Sequence[Balance]) -> Table:
    """Return a row with a bar for each account, and below it one for each of its clients."""
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
            f"{line.epsilon:g}",
            f"{line.delta:g}",
        )
    return grid


def account_text(account: Account, balance: Balance) -> str:
    """Return what an account is, in words."""
    lines = [
        f"{clean(account.name)} belongs to {clean(account.owner)} and protects the {account.protects}; one record is: "
        f"{clean(account.unit)} ({account.relation}).",
        f"It is {_KINDS[account.kind]}.",
    ]
    if account.kind == "plan":
        lines.append(f"Left of the plan: {told_all(balance.remaining) or 'nothing'}.")
    lines.append(f"Receipt, to be kept elsewhere: {account.receipt()}")
    return "\n".join(lines)


def preview_table(preview: Preview) -> Table:
    """Return the bar of a budget with what a spend would take."""
    before = preview.before
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(no_wrap=True, max_width=20)
    grid.add_column(ratio=1)
    grid.add_row(Text(clean(before.client or before.account), "bold"), Bar(before.epsilon, before.spent, preview.total))
    return grid


def history_table(entries: Sequence[Entry]) -> Table:
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
        grid.add_row(*(Text(cell) for cell in (*cells, *who, _what(entry))))
    return grid


def _what(entry: Entry) -> str:
    return told_all(entry.events) if entry.message is None else f"{len(entry.message):,} bytes"


def number(value: float) -> float | None:
    """Return a number as JSON has it: infinity is null."""
    return value if math.isfinite(value) else None


def events_json(events: Iterable[tuple[DpEvent, int]]) -> list[dict[str, Any]]:
    """Return events with their counts for JSON."""
    return [{"count": count, "event": json.loads(format_event(event))} for event, count in events]


def balance_json(balance: Balance) -> dict[str, Any]:
    """Return figures for JSON."""
    return {
        "account": balance.account,
        "client": balance.client,
        "kind": balance.kind,
        "epsilon": balance.epsilon,
        "delta": balance.delta,
        "spent": number(balance.spent),
        "left": balance.left,
        "remaining": events_json(balance.remaining),
    }


def account_json(account: Account, balance: Balance, clients: Sequence[Balance]) -> dict[str, Any]:
    """Return an account with its figures for JSON."""
    about = {"owner": account.owner, "protects": account.protects, "unit": account.unit, "relation": account.relation}
    quotas = [balance_json(client) for client in clients]
    return {**balance_json(balance), **about, "receipt": str(account.receipt()), "clients": quotas}


def preview_json(preview: Preview) -> dict[str, Any]:
    """Return a preview for JSON."""
    figures = {name: number(getattr(preview, name)) for name in ("alone", "cost", "total", "left")}
    return {"before": balance_json(preview.before), **figures, "allowed": preview.allowed, "reason": preview.reason}


def entry_json(entry: Entry) -> dict[str, Any]:
    """Return an entry for JSON; of a message, only how long it is."""
    plain = {name: getattr(entry, name) for name in ("account", "sequence", "kind", "time", "key", "client", "hash")}
    size = None if entry.message is None else len(entry.message)
    return {**plain, "events": events_json(entry.events), "message_bytes": size}
