"""The budget page: accounts, their history, whether it is whole, and what a plan would cost."""

import math
from typing import Any

from nearveil.ledger import Account, Entry, Ledger
from nearveil.ledger.budget import shown_down, shown_up
from nearveil.privacy import Basis, Guarantee, compose_events
from nearveil.privacy.events import PureDp
from nearveil.privacy.guarantee import factor
from nearveil.ui._errors import Trouble

LAST = 100  # entries that are listed
_MOST_QUESTIONS = 10**6
_FAR = 14  # an epsilon whose odds are beyond a million


def odds(epsilon: float) -> str:
    """Return by which factor odds can change at most, rounded up.

    Examples
    --------
    >>> odds(4.0), odds(40.0)
    ('55', 'more than a million')
    """
    return factor(epsilon) if epsilon < _FAR else "more than a million"


def balance_of(account: Account) -> dict[str, Any]:
    """Return what is spent and what is left of an account, as figures and in words."""
    held = account.balance()
    return {
        "account": held.account,
        "epsilon": held.epsilon,
        "delta": held.delta,
        "spent": held.spent if math.isfinite(held.spent) else held.epsilon,
        "left": held.left,
        "odds": odds(held.spent) if held.delta == 0 and held.spent > 0 else None,  # a delta has no such factor
        "spent_words": shown_up(held.spent),
        "left_words": shown_down(held.left),
    }


def previewed(account: Account, guarantee: Guarantee, count: int = 1) -> dict[str, Any]:
    """Return what a release would cost an account, so many times, spending nothing."""
    found = account.preview([(guarantee, count)])
    return {
        "allowed": found.allowed,
        "cost": shown_up(found.cost),
        "before": shown_down(found.before.left),
        "after": shown_down(found.left) if found.allowed else shown_down(found.before.left),
        "words": found.reason if not found.allowed else str(found),
    }


def accounts(ledger: Ledger, paying: str) -> list[dict[str, Any]]:
    """Return all accounts, the one that pays for questions first."""
    found = [
        {
            **balance_of(one),
            "owner": one.owner,
            "protects": one.protects,
            "unit": one.unit,
            "kind": one.kind,
            "pays": one.name == paying,
        }
        for one in ledger.accounts()
    ]
    return sorted(found, key=lambda one: (not one["pays"], one["account"]))


def history(ledger: Ledger, name: str) -> dict[str, Any]:
    """Return the last entries of an account, the newest first."""
    entries = ledger.account(name).history()
    return {
        "account": name,
        "total": len(entries),
        "entries": [_line(entry) for entry in reversed(entries[-LAST:])],
    }


def verified(ledger: Ledger) -> dict[str, Any]:
    """Recompute everything, and return what was found."""
    found = ledger.verify()
    return {"ok": found.ok, "words": str(found)}


def planned(account: Account, count: int, epsilon: float) -> dict[str, Any]:
    """Return whether so many questions fit into an account, and how many would."""
    if not 1 <= count <= _MOST_QUESTIONS or not 1e-6 <= epsilon <= 40:
        raise Trouble(422, "question", "A plan has 1 to a million questions, each at an epsilon from 0.000001 to 40.")
    about: Any = {"protects": account.protects, "unit": account.unit, "relation": account.relation}
    question = compose_events([PureDp(epsilon)], delta=0.0, basis=Basis("a question", "docs/theory/covers.md"), **about)
    found, fits = previewed(account, question, count), _most(account, question, count)
    asks = f"{count:,} question{'s' * (count != 1)} at epsilon {epsilon:g}"
    if found["allowed"]:
        words = f"{asks} fit: they cost {found['cost']}, and {found['after']} would be left."
    else:
        words = f"{asks} do not fit: they cost {found['cost']}, and {found['before']} is left. {fits:,} would fit."
    return {**found, "fits": fits, "words": words}


def _most(account: Account, question: Guarantee, most: int) -> int:
    """Return how many questions fit, up to a number."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if account.preview([(question, middle)]).allowed:
            low = middle
        else:
            high = middle - 1
    return low


def _line(entry: Entry) -> dict[str, Any]:
    what = {
        "opened": "Account opened",
        "quota": "Quota given",
        "cap": "Cap opened",
        "debit": "Paid",
        "take": "Counted in a cap",
        "message": "Message stored",
    }
    paid = ", ".join(f"{count} times {_event(event)}" if count > 1 else _event(event) for event, count in entry.events)
    size = "" if entry.message is None else f"{len(entry.message):,} bytes"
    return {
        "sequence": entry.sequence,
        "what": what.get(entry.kind, entry.kind),
        "time": entry.time,
        "key": entry.key or "",
        "detail": paid or size,
    }


def _event(event: Any) -> str:
    return f"epsilon {event.epsilon:g}" if isinstance(event, PureDp) else type(event).__name__
