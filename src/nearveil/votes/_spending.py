"""Who counts: caps that no call passes, and the account that pays before anything is released."""

import os
import threading
from collections.abc import Callable
from typing import Any, Literal, Self

from dp_accounting import DpEvent

from nearveil.ledger import Account, AccountError, Debit, KeySpentError, Ledger, OverBudgetError
from nearveil.ledger._account import open_budget, plan_cost
from nearveil.ledger._budget import RefusedError
from nearveil.ledger._events import charge_of
from nearveil.ledger._figures import refusal
from nearveil.privacy import Guarantee
from nearveil.privacy._accounting_leaves import leaves
from nearveil.votes._plan import VotePlan

Part = Literal["screened", "answered"]


class ExhaustedError(RuntimeError):
    """All queries of the plan are used up; nothing more is answered."""


class Spending:
    """What a fitted estimator may still do. Copies in one process share it.

    A pickle, or a process that was forked, cannot know what the others spend: without an account it may do nothing.

    Parameters
    ----------
    plan : VotePlan
    account : Account or None
        Pays, durably, for everything.
    """

    def __init__(self, plan: VotePlan, account: Account | None) -> None:
        self._events: dict[Part, DpEvent] = {"answered": plan.votes.event}
        self._left: dict[Part, int] = {"answered": plan.max_answered}
        if plan.screening is not None:
            self._events["screened"] = plan.screening.event
            self._left["screened"] = plan.max_screened
        self._plan, self._account, self._lock, self._process = plan, account, threading.Lock(), os.getpid()

    def assert_open(self) -> None:
        """Raise where no further query may be answered."""
        if self._process != os.getpid() and self._account is None:
            raise ExhaustedError(
                "this estimator was pickled or its process forked, and a copy must not spend what another has: give it "
                "a ledger and an account before fit, then copies share one budget"
            )
        spent = [part for part in self._left if self._allowed(part) == 0]
        if spent:
            raise ExhaustedError(
                f"max_{spent[0]} is reached: the promise covers no further query. Fit again with a budget of its own; "
                "what that tells about the records comes on top"
            )

    def assert_affordable(self, n_queries: int) -> None:
        """Raise, before anything is spent, where the account could not pay if every query passed its screening.

        Parameters
        ----------
        n_queries : int
        """
        if self._account is not None and self._account.kind != "plan":  # a plan declines what it cannot pay
            events = [(self._events[part], min(n_queries, left)) for part, left in self._left.items()]
            preview = self._account.preview(events)
            if not preview.allowed:
                raise refusal(preview)

    def take(self, part: Part, wanted: int) -> int:
        """Pay for up to `wanted` queries and return for how many.

        Parameters
        ----------
        part : {"screened", "answered"}
        wanted : int

        Returns
        -------
        int
        """
        with self._lock:
            granted = min(wanted, self._allowed(part))
            self._left[part] -= granted
        if self._account is not None and granted:
            try:
                self._account.spend([(self._events[part], granted)])
            except OverBudgetError:
                with self._lock:
                    self._left[part] += granted  # nothing was spent, nothing will be released
                raise
        return granted

    def take_once(self, key: str, client: str | None) -> Debit:
        """Pay for one vote under a key, or find what was paid and stored under it before, which costs nothing.

        Parameters
        ----------
        key : str
        client : str or None
            Whose quota pays as well.

        Returns
        -------
        Debit
        """
        if self._account is None:
            raise ValueError("account must be given before fit: what was answered under a key is kept in its ledger")
        with self._lock:
            taken = min(self._left["answered"], 1)
            self._left["answered"] -= taken
        if not taken and all(entry.key != key for entry in self._account.history()):
            raise ExhaustedError("max_answered is reached: only keys that were answered before are answered again")
        spent = True
        try:
            debit = self._account.spend([(self._events["answered"], 1)], key, client=client)
            spent = not debit.repeated
        except (OverBudgetError, KeySpentError, ValueError):
            spent = False  # of all other errors nobody knows
            raise
        finally:
            if not spent:
                with self._lock:
                    self._left["answered"] += taken
        return debit

    def _allowed(self, part: Part) -> int:
        left = self._left[part]
        if self._account is None or self._account.kind != "plan":
            return left
        (wanted, times), *_ = leaves(self._events[part])
        remaining = (count // times for event, count in self._account.balance().remaining if event == wanted)
        return min(left, next(remaining, 0))

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Callable[..., "Spending"], tuple[Any, ...]]:
        return _unpickled, (self._plan, self._account, dict(self._left))


def _unpickled(plan: VotePlan, account: Account | None, left: dict[Part, int]) -> Spending:
    spending = Spending(plan, account)
    spending._left, spending._process = left, -1
    return spending


def find_account(
    ledger: Ledger | str | None, account: Account | str | None, plan: VotePlan, promise: Guarantee
) -> Account | None:
    """Return the account that pays, opened with the plan where there is none of that name.

    Parameters
    ----------
    ledger : Ledger, str or None
    account : Account, str or None
    plan : VotePlan
    promise : Guarantee

    Returns
    -------
    Account or None
    """
    if account is not None and not promise.sound:
        raise ValueError("source must be sound where an account pays: no budget covers coins that a seed foretells")
    if account is None or isinstance(account, Account):
        if ledger is not None:
            raise ValueError("account must be the name of an account in the ledger")
        found = account
    elif ledger is None:
        raise ValueError("ledger must be given: account is only a name")
    else:
        found = _named(Ledger(ledger) if isinstance(ledger, str) else ledger, account, plan, promise)
    if found is not None:
        _check_account(found, plan, promise)
    return found


def inferred_unit(unit: str) -> str:
    """Return what is protected where the classes are read from the labels."""
    return f"{unit} of a class that occurs anyway"


def _check_account(account: Account, plan: VotePlan, promise: Guarantee) -> None:
    if (account.protects, account.relation) != ("database", "add-remove"):
        raise ValueError('account must protect the "database", with relation "add-remove"')
    if promise.unit == inferred_unit(account.unit):
        raise ValueError(
            f"classes must be given: without the public list, the account's {account.unit!r} is not protected"
        )
    if promise.unit != account.unit:
        raise ValueError(
            f"unit must be the account's, {account.unit!r}: it says what one row is. Give it only if no two rows are "
            "of one such unit; else open another account"
        )
    try:
        account._budget.price(charge_of(plan.events, "add-remove"))
    except RefusedError as refused:
        raise ValueError(f"account does not pay for what this estimator does: {refused}") from None


def _named(ledger: Ledger, name: str, plan: VotePlan, promise: Guarantee) -> Account:
    try:
        return ledger.account(name)
    except AccountError:
        # The ledger composes plans on a grid of its own, which may find a little more than the promise says.
        cost = plan_cost(open_budget(promise.epsilon, promise.delta, plan.events, "add-remove"))
        return ledger.open_account(
            name,
            owner="nearveil.votes",
            protects="database",
            unit=promise.unit,
            relation="add-remove",
            epsilon=max(promise.epsilon, cost or 0.0),
            delta=promise.delta,
            plan=plan.events,
        )
