"""Balances, previews and history, for people and for other programs."""

import base64
import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Literal

from dp_accounting import DpEvent

from nearveil.ledger._store import Held, Row
from nearveil.ledger.budget import (
    Charge,
    PlanBudget,
    UnpricedError,
    add_amounts,
    find_alone_epsilon,
    format_down,
    format_up,
    read_charge,
    round_float_down,
    round_float_up,
    to_exact_decimal,
)
from nearveil.ledger.errors import CorruptLedgerError, OverBudgetError


@dataclass(frozen=True, kw_only=True)
class Balance:
    """What an account, or a client's quota, has and what is left of it; :meth:`Account.balance` returns one.

    Examples
    --------
    >>> figures = {"kind": "pure", "epsilon": 1.0, "delta": 0.0, "spent": 0.25, "left": 0.75, "remaining": ()}
    >>> print(Balance(account="camera", client=None, **figures))
    account camera: budget epsilon 1 at delta 0, spent 0.25, left 0.75
    """

    account: str
    client: str | None
    kind: str  #: "plan", "filter" or "pure"
    epsilon: float  #: the budget, which holds however it is spent
    delta: float
    #: Rounded up. Of a plan: the epsilon of what was taken, by PLD. Of a filter: the share of the budget that is used,
    #: times epsilon; no guarantee by itself. Of pure epsilons: their sum.
    spent: float
    left: float  #: ``epsilon - spent``, rounded down
    remaining: tuple[tuple[DpEvent, int], ...]  #: what may still be taken of a plan; empty for the other kinds

    def __str__(self) -> str:
        whose = f"account {self.account}" if self.client is None else f"client {self.client} in account {self.account}"
        return (
            f"{whose}: budget epsilon {self.epsilon:.4g} at delta {self.delta:g}, spent {format_up(self.spent)}, "
            f"left {format_down(self.left)}"
        )


@dataclass(frozen=True, kw_only=True)
class Preview:
    """What a spend would cost; nothing was spent."""

    before: Balance
    alone: float  #: the epsilon of the events by themselves at the budget's delta
    cost: float  #: what they would add to what is spent; infinity where they have no finite cost here
    total: float  #: what would then be spent
    left: float  #: what would then be left
    allowed: bool
    reason: str  #: why not, in figures; empty where it is allowed

    @property
    def spent(self) -> float:
        """What is spent now."""
        return self.before.spent

    def __str__(self) -> str:
        if not self.allowed:
            return f"Refused: {self.reason}"
        return (
            f"Allowed: this costs {format_up(self.cost)} of epsilon {self.before.epsilon:g}; "
            f"then {format_up(self.total)} is spent and {format_down(self.left)} left "
            f"(alone it would be epsilon {format_up(self.alone)} at delta {self.before.delta:g})."
        )


def make_balance(account: str, client: str | None, held: Held) -> Balance:
    """Return the figures of an account or a quota."""
    budget = held.budget
    spent = budget.spent(held.totals)
    return Balance(
        account=account,
        client=client,
        kind=budget.kind,
        epsilon=budget.epsilon,
        delta=budget.delta,
        spent=_round_up(spent),
        left=_compute_left(budget.epsilon, spent),
        remaining=read_charge(budget.left(held.totals)) if isinstance(budget, PlanBudget) else (),
    )


def is_affordable(held: Held, charge: Charge) -> bool:
    """Return whether a charge could be paid now. Reads totals alone: no figure is computed."""
    try:
        return held.budget.allows(add_amounts(held.totals, held.budget.price(charge)))
    except UnpricedError:
        return False


def make_preview(account: str, client: str | None, held: Held, charge: Charge) -> Preview:
    """Return what a charge would cost an account or a quota."""
    before, budget = make_balance(account, client, held), held.budget
    alone = find_alone_epsilon(charge, budget.delta)
    try:
        price = budget.price(charge)
    except UnpricedError as unpriced:
        reason = _make_reason(before, math.inf, str(unpriced))
        nothing = {"cost": math.inf, "total": math.inf, "left": 0.0}
        return Preview(before=before, alone=alone, allowed=False, reason=reason, **nothing)
    totals = add_amounts(held.totals, price)
    allowed = budget.allows(totals)
    spent, total = budget.spent(held.totals), budget.spent(totals)
    cost = math.inf if total is None or spent is None else round_float_up(max(total - spent, Fraction(0)))
    return Preview(
        before=before,
        alone=alone,
        cost=cost,
        total=_round_up(total),
        left=_compute_left(budget.epsilon, total),
        allowed=allowed,
        reason="" if allowed else _make_reason(before, cost, budget.shortage(held.totals, price)),
    )


def make_refusal(preview: Preview) -> OverBudgetError:
    """Return the error of a spend that is refused."""
    return OverBudgetError(
        preview.reason,
        epsilon=preview.before.epsilon,
        spent=preview.before.spent,
        cost=preview.cost,
        left=preview.before.left,
    )


def _round_up(spent: Fraction | None) -> float:
    return math.inf if spent is None else round_float_up(spent)


def _compute_left(epsilon: float, spent: Fraction | None) -> float:
    return 0.0 if spent is None else max(0.0, round_float_down(to_exact_decimal(epsilon) - spent))


def _make_reason(before: Balance, cost: float, more: str) -> str:
    said = f"{before}; this costs {format_up(cost)}; nothing was spent"
    return f"{said} ({more})" if more else said


_COLUMNS = [
    "account",
    "sequence",
    "kind",
    "time",
    "key",
    "client",
    "payload",
    "state",
    "client_state",
    "nonce",
    "slot",
    "hash",
]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One line of an account's history; :meth:`Account.history` returns them."""

    account: str
    sequence: int  #: the order of things; times are only informative
    kind: str  #: "opened", "quota", "cap", "debit", "take" (the debit before it counts in a cap, too) or "message"
    time: str  #: UTC, as the clock said
    key: str | None
    client: str | None  #: or the name of a cap
    events: tuple[tuple[DpEvent, int], ...]  #: what a debit paid for: single mechanisms, counted
    message: bytes | None
    hash: str  #: covers the entry and all before it


def make_entry(row: Row, kept_hash: str) -> Entry:
    """Return a row as a line of history."""
    try:
        content = row.content
        message, charge = content.get("message"), content.get("charge", ())
        return Entry(
            account=row.account,
            sequence=row.sequence,
            kind=row.kind,
            time=row.time,
            key=row.key,
            client=row.client,
            events=read_charge(tuple((text, times) for text, times in charge)),
            message=None if message is None else base64.b64decode(message),
            hash=kept_hash,
        )
    except (AttributeError, TypeError, ValueError):
        raise CorruptLedgerError(
            f"entry {row.sequence} of account {row.account!r} cannot be read: it was changed by "
            "hand; verify() says more"
        ) from None


def export_rows(rows: Sequence[tuple[Row, str]], format: Literal["json", "csv"]) -> str:  # noqa: A002
    """Return entries as text, with their hashes."""
    if format not in ("json", "csv"):
        raise ValueError('format must be "json" or "csv"')
    lines = [{**asdict(row), "hash": kept} for row, kept in rows]
    if format == "json":
        return json.dumps(lines, indent=1)
    out = io.StringIO()
    table = csv.DictWriter(out, _COLUMNS, lineterminator="\n")
    table.writeheader()
    table.writerows(lines)
    return out.getvalue()
