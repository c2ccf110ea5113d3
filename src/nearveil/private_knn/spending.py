"""Caps on queries, and the account that pays before anything is released."""

import os
import sys
import threading
import warnings
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from sklearn.utils._param_validation import HasMethods

from nearveil.errors import NearveilError
from nearveil.ledger import Account, AccountError, Ledger, OverBudgetError
from nearveil.ledger.budget import UnpricedError, check_samplers, find_plan_cost, open_budget
from nearveil.privacy import Guarantee
from nearveil.privacy.noise import Source, secure_source
from nearveil.privacy.parameters import PROBABILITY, Parameters, allow_reals, parameter
from nearveil.private_knn.plan import Part, VotePlan
from nearveil.storage import parse_url, without_secrets

OWNER = "nearveil.votes"
"""Stored in ledgers: the owner of accounts that estimators open."""


class ExhaustedError(NearveilError, RuntimeError):
    """All queries of the plan are used up; nothing more is answered."""


class Spending(ABC):
    """The remaining queries of a fitted estimator. Its copies share them, or have none."""

    @abstractmethod
    def left(self) -> dict[Part, int]:
        """Return the remaining numbers of queries to screen and to answer."""

    @abstractmethod
    def take(self, part: Part, count: int) -> int:
        """Pay for at most `count` queries; return the number that were paid for."""

    @abstractmethod
    def read_log(self) -> list[bytes]:
        """Return the public log: the queries of individual accounting and their answers, in their order."""

    @abstractmethod
    def append_log(self, position: int, entry: bytes, part: Part | None = None, times: int = 1) -> bool:
        """Append an entry to the log and pay for it, durably; False, at no cost, if it ends elsewhere by now."""

    def assert_affordable(self, n_queries: int) -> None:  # noqa: B027
        """Raise, before anything is spent, unless the account can pay even if every query passes its screening."""

    def assert_open(self) -> None:
        """Raise if no further query may be answered."""
        spent = [part for part, left in self.left().items() if not left]
        if spent:
            raise ExhaustedError(
                f"max_{spent[0]} is reached: the guarantee covers no further query. Fit again with a new budget; "
                "its cost is added to this one"
            )

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class MemorySpending(Spending):
    """Caps in the memory of one process. A pickle or a fork does not share them, so it has no queries left."""

    def __init__(self, caps: dict[Part, int], process: int | None = None) -> None:
        self._left, self._lock, self._process = dict(caps), threading.Lock(), process or os.getpid()
        self._log: list[bytes] = []

    def left(self) -> dict[Part, int]:
        if self._process != os.getpid():
            raise ExhaustedError(
                "this estimator was pickled or its process forked, and its copies must not each spend the budget: give "
                "it a ledger and an account before fit, then copies share one budget"
            )
        return dict(self._left)

    def take(self, part: Part, count: int) -> int:
        with self._lock:
            granted = min(count, self.left()[part])
            self._left[part] -= granted
        return granted

    def read_log(self) -> list[bytes]:
        self.left()
        return list(self._log)

    def append_log(self, position: int, entry: bytes, part: Part | None = None, times: int = 1) -> bool:
        with self._lock:
            left = self.left()
            if len(self._log) != position or (part is not None and left[part] < times):
                return False
            if part is not None:
                self._left[part] -= times
            self._log.append(entry)
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        return MemorySpending, ({}, -1)


class AccountSpending(Spending):
    """Caps that are counted in the ledger with the debits: copies, pickles, forks and processes share them."""

    def __init__(self, account: Account, plan: VotePlan, guarantee: Guarantee, log: str) -> None:
        self.account = account  # pays, durably, for everything
        self.parts = {part: guarantee.part(event) for part, event in plan.parts.items()}  # charges of one query
        self.caps = plan.caps
        self.cap = account.open_cap(plan.events)  # None if the account was opened with this plan, which is the cap
        self.log = f"log {log} {self.cap or ''}"

    def left(self) -> dict[Part, int]:
        count = self.account.count_left
        return {part: count(charge, self.caps[part], cap=self.cap) for part, charge in self.parts.items()}

    def assert_affordable(self, n_queries: int) -> None:
        if self.account.kind != "plan":  # a plan declines queries over its caps
            counts = {part: min(n_queries, left) for part, left in self.left().items()}
            self.account.assert_affordable((self.parts[part], times) for part, times in counts.items() if times)

    def take(self, part: Part, count: int) -> int:
        return self.account.take(self.parts[part], count, cap=self.cap)

    def read_log(self) -> list[bytes]:
        return self.account.read_log(self.log)

    def append_log(self, position: int, entry: bytes, part: Part | None = None, times: int = 1) -> bool:
        charge = None if part is None or not times else self.parts[part]
        try:
            return self.account.append_log(self.log, position, entry, charge, times=times, cap=self.cap)
        except OverBudgetError:
            if part is not None and self.left()[part] < times:
                return False  # another process has taken it since
            raise


def open_spending(account: Account | None, plan: VotePlan, guarantee: Guarantee, log: str = "") -> Spending:
    """Open the caps of a plan, and the public log of this name: in an account, or in memory without one."""
    return MemorySpending(plan.caps) if account is None else AccountSpending(account, plan, guarantee, log)


def find_account(
    ledger: Ledger | Path | str | None, account: Account | str | None, plan: VotePlan, guarantee: Guarantee
) -> Account | None:
    """Return the account that pays. It is opened with the plan if it is missing."""
    if account is not None and not guarantee.sound:
        raise ValueError("source must be sound if an account pays: no budget covers random bits from a seed")
    if isinstance(account, str):
        if ledger is None:
            raise ValueError("ledger must be given: account is only a name")
        account = _open_named(ledger if isinstance(ledger, Ledger) else Ledger(ledger), account, plan, guarantee)
    elif ledger is not None:
        raise ValueError("account must be the name of an account in the ledger")
    if account is not None:
        _check_account(account, guarantee)
        # Coins of screenings cost more at a larger epsilon, and the account's may be larger than the plan's.
        check_samplers(guarantee.events, plan.extra_delta(account.epsilon), account.delta)
    return account


def can_pay(ledger: Ledger | Path | str | None, account: Account | str | None, guarantee: Guarantee) -> bool:
    """Return whether an account can pay for a guarantee, or does not exist yet."""
    if isinstance(account, str) and ledger is not None:
        try:
            account = (ledger if isinstance(ledger, Ledger) else Ledger(ledger)).account(account)
        except AccountError:
            return True
    try:
        if isinstance(account, Account):
            _check_account(account, guarantee)
    except ValueError:
        return False
    return True


def name_group_unit(unit: str) -> str:
    """Return the unit of protection if records have groups."""
    return "group of records" if unit == "record" else unit


def name_inferred_unit(unit: str) -> str:
    """Return the unit of protection if the classes are read from the labels."""
    return f"{unit} of a class that occurs anyway"


def _check_account(account: Account, guarantee: Guarantee) -> None:
    if (account.protects, account.relation) != ("database", "add-remove"):
        raise ValueError('account must protect the "database", with relation "add-remove"')
    if guarantee.unit == name_inferred_unit(account.unit):
        raise ValueError(
            f"classes must be given: without the public list, the account's {account.unit!r} is not protected"
        )
    if guarantee.unit != account.unit:
        raise ValueError(
            f"unit must be the account's, {account.unit!r}: it says what one row is. Give it only if no two rows are "
            "of one such unit; else open another account"
        )
    try:
        account._budget.price(account._charge(guarantee))
    except UnpricedError as refused:
        raise ValueError(f"this account cannot pay for this estimator: {refused}") from None


def _open_named(ledger: Ledger, name: str, plan: VotePlan, guarantee: Guarantee) -> Account:
    with suppress(AccountError):
        return ledger.account(name)
    # The ledger composes plans on another grid, which may give a slightly larger cost than the guarantee.
    cost = find_plan_cost(open_budget(guarantee.epsilon, guarantee.delta, plan.events, "add-remove"))
    with suppress(AccountError):  # another process has opened it in the meantime
        return ledger.open_account(
            name,
            owner=OWNER,
            protects="database",
            unit=guarantee.unit,
            relation="add-remove",
            epsilon=max(guarantee.epsilon, cost or 0.0),
            delta=guarantee.delta,
            plan=plan.events,
        )
    return ledger.account(name)


@dataclass(eq=False, repr=False, kw_only=True)
class PayingEstimator(Parameters):
    """An estimator of private records that pays for every release."""

    epsilon: float | None = parameter(None, allow_reals(0), None)
    delta: float = parameter(1e-5, PROBABILITY)
    unit: str = parameter("record", str)
    ledger: Ledger | str | None = parameter(None, Ledger, str, None)
    account: Account | str | None = parameter(None, Account, str, None)
    source: Source | None = parameter(None, HasMethods(["words"]), None)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse a ledger's password, since scikit-learn shows parameters."""
        if name == "ledger" and isinstance(value, str) and "://" in value:
            url = parse_url(value, "url")
            if url != without_secrets(url):
                raise ValueError(
                    "ledger must be an address without a password, as an estimator shows its parameters: leave it "
                    "to PGPASSWORD or ~/.pgpass, or give a Ledger"
                )
        super().__setattr__(name, value)

    def _warn_of_parameter_search(self) -> None:
        """Warn before a fit by a grid search or a cross-validation."""
        if self.source is None and _is_in_search():
            account = "all spend from one account" if self.account is not None else "each has its own budget"
            warnings.warn(
                f"a search or cross-validation fits {type(self).__name__} many times, and {account}: together they "
                "cost epsilon times the number of fits. Choose parameters on public records instead",
                stacklevel=3,
            )

    def _copy_parameters(self) -> Self:
        """Return a checked copy of the parameters: another thread may change them during a fit."""
        copy = type(self)(**self.get_params(deep=False))
        copy._validate_params()
        return copy

    def _set_fitted(self, copy: Self, **learned: Any) -> Self:
        """Set all fitted attributes at once: the public ones of a fitted copy, and those that are given."""
        self.__dict__.pop("feature_names_in_", None)
        self.__dict__.update({name: value for name, value in vars(copy).items() if name.endswith("_")}, **learned)
        return self

    @property
    def _source(self) -> Source:
        return secure_source() if self.source is None else self.source

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.non_deterministic = True
        return tags


def _is_in_search() -> bool:
    """Return whether scikit-learn's model selection is among the callers."""
    frame = sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        if str(frame.f_globals.get("__name__")).startswith("sklearn.model_selection."):
            return True
    return False
