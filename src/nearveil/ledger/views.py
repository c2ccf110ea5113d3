"""Accounts, balances, previews and history as plain values for JSON, and plans as text.

No view holds a stored message, only its length.
"""

import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from dp_accounting import DpEvent, GaussianDpEvent, LaplaceDpEvent

from nearveil.ledger.account import Account
from nearveil.ledger.budget import format_event
from nearveil.ledger.entries import QUOTA, Entry
from nearveil.ledger.history import Balance, Preview
from nearveil.privacy import Guarantee
from nearveil.privacy.events import PureDp
from nearveil.privacy.noise import analytic_gaussian_scale

PlanMechanism = Literal["pure", "laplace", "gaussian"]


def parse_part(text: str) -> tuple[int, float]:
    """Parse COUNTxEPSILON.

    Examples
    --------
    >>> parse_part("500x0.5")
    (500, 0.5)
    """
    match = re.fullmatch(r"(\d+)x(\d*\.?\d+(?:e-?\d+)?)", text.strip().lower())
    count, epsilon = (int(match[1]), float(match[2])) if match else (0, 0.0)
    if not (1 <= count <= 10**9 and 1e-6 <= epsilon <= 50):
        raise ValueError(
            f"{text!r} is not COUNTxEPSILON with a count from 1 to 1,000,000,000 and an epsilon from 1e-6 to 50, "
            "such as 500x0.5"
        )
    return count, epsilon


def parse_plan(plan: Sequence[str], mechanism: PlanMechanism, delta: float) -> list[tuple[DpEvent, int]]:
    """Return the events of a plan, with their counts, for :meth:`Ledger.open_account`.

    Examples
    --------
    >>> parse_plan(["500x0.5"], "laplace", 0.0)
    [(LaplaceDpEvent(noise_multiplier=2.0), 500)]
    """
    return [(make_event(mechanism, epsilon, delta), count) for count, epsilon in map(parse_part, plan)]


def make_event(mechanism: PlanMechanism, epsilon: float, delta: float) -> DpEvent:
    """Return one release; Gaussian noise is scaled for this epsilon at `delta`."""
    if mechanism == "laplace":
        return LaplaceDpEvent(1 / epsilon)
    if mechanism == "gaussian":
        return GaussianDpEvent(analytic_gaussian_scale(1.0, epsilon, delta))
    return PureDp(epsilon)


def describe_event(event: DpEvent) -> str:
    """Return a short text of an event.

    Examples
    --------
    >>> from dp_accounting import PoissonSampledDpEvent
    >>> describe_event(PoissonSampledDpEvent(0.1, GaussianDpEvent(20.0)))
    'PoissonSampled(0.1, Gaussian(20))'
    """
    return _describe(json.loads(format_event(event)))


def _describe(value: Any) -> str:
    if isinstance(value, dict):
        inside = [_describe(field) for name, field in reversed(value.items()) if name != "type"]
        return f"{value['type'].removesuffix('DpEvent')}({', '.join(inside)})"
    if isinstance(value, list):
        return f"[{', '.join(map(_describe, value))}]"
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def describe_events(events: Iterable[tuple[DpEvent, int]]) -> str:
    """Return a short text of events with counts."""
    return ", ".join(f"{count:,} x {describe_event(event)}" for event, count in events)


def replace_infinity(value: float) -> float | None:
    """Return a number for JSON: infinity is null."""
    return value if math.isfinite(value) else None


def list_quotas(account: Account) -> list[Balance]:
    """Return the balances of all clients with a quota."""
    names = [entry.client for entry in account.history() if entry.kind == QUOTA]
    return [account.balance(client=name) for name in names]


def count_affordable(account: Account, guarantee: Guarantee, most: int) -> int:
    """Return the number of releases that an account can pay for, at most `most`."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if account.preview([(guarantee, middle)]).allowed:
            low = middle
        else:
            high = middle - 1
    return low


def describe_balance(balance: Balance) -> dict[str, Any]:
    """Return the figures of an account or of a quota."""
    events = _list_event_dicts(balance.remaining)
    return {**vars(balance), "spent": replace_infinity(balance.spent), "remaining": events}


def describe_account(account: Account) -> dict[str, Any]:
    """Return an account with its figures, its receipt and its quotas."""
    about = {name: getattr(account, name) for name in ("owner", "protects", "unit", "relation")}
    quotas = [describe_balance(client) for client in list_quotas(account)]
    return {**describe_balance(account.balance()), **about, "receipt": str(account.receipt()), "clients": quotas}


def describe_preview(preview: Preview) -> dict[str, Any]:
    """Return the cost of a spend."""
    figures = {name: replace_infinity(getattr(preview, name)) for name in ("alone", "cost", "total", "left")}
    return {**vars(preview), **figures, "before": describe_balance(preview.before)}


def describe_entry(entry: Entry) -> dict[str, Any]:
    """Return an entry of a history; only the length of a message."""
    plain = {name: getattr(entry, name) for name in ("account", "sequence", "kind", "time", "key", "client", "hash")}
    size = None if entry.message is None else len(entry.message)
    return {**plain, "events": _list_event_dicts(entry.events), "message_bytes": size}


def _list_event_dicts(events: Iterable[tuple[DpEvent, int]]) -> list[dict[str, Any]]:
    return [{"count": count, "event": json.loads(format_event(event))} for event, count in events]
