"""Who counts: caps that no call passes, and the account that pays before anything is released."""

import threading
from collections.abc import Callable
from typing import Any, Literal, Self

from dp_accounting import DpEvent

from nearveil.ledger import Account, AccountError, Ledger, OverBudgetError
from nearveil.ledger._figures import refusal
from nearveil.privacy import Guarantee
from nearveil.privacy._accounting_leaves import leaves
from nearveil.votes._plan import VotePlan

Part = Literal["screened", "answered"]


class ExhaustedError(RuntimeError):
    """All queries of the plan are used up; nothing more is answered."""


class Spending:
    """What a fitted estimator may still do. Copies in one process share it; a pickle carries no allowance.

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
        self._plan, self._account, self._lock, self._pickled = plan, account, threading.Lock(), False

    def assert_open(self) -> None:
        """Raise where no further query may be answered."""
        if self._pickled and self._account is None:
            raise ExhaustedError(
                "this estimator was pickled, and a copy must not spend what another has: give it a ledger and an "
                "account before fit, then copies share one budget"
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
        return _unpickled, (self._plan, self._account)


def _unpickled(plan: VotePlan, account: Account | None) -> Spending:
    spending = Spending(plan, account)
    spending._pickled = True
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
    if account is None or isinstance(account, Account):
        if ledger is not None:
            raise ValueError("account must be the name of an account in the ledger")
        found = account
    elif ledger is None:
        raise ValueError("ledger must be given: account is only a name")
    else:
        found = _named(Ledger(ledger) if isinstance(ledger, str) else ledger, account, plan, promise)
    if found is not None and (found.protects, found.relation) != ("database", "add-remove"):
        raise ValueError('account must protect the "database", with relation "add-remove"')
    return found


def _named(ledger: Ledger, name: str, plan: VotePlan, promise: Guarantee) -> Account:
    try:
        return ledger.account(name)
    except AccountError:
        return ledger.open_account(
            name,
            owner="nearveil.votes",
            protects="database",
            unit=promise.unit,
            relation="add-remove",
            epsilon=promise.epsilon,
            delta=promise.delta,
            plan=plan.events,
        )
