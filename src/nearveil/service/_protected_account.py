"""The one account of a protected gallery: its terms, and the models that it has paid for and stored."""

import hashlib
import re
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from nearveil.ledger import Account, AccountError, Ledger
from nearveil.ledger.budget import PlanBudget
from nearveil.privacy import Guarantee
from nearveil.privacy.noise import secure_source
from nearveil.service.schema import Promise
from nearveil.votes._discriminant import plan_publications
from nearveil.votes.plan import VotePlan
from nearveil.votes.spending import find_account

_KEY = re.compile(r"model:([0-9]{1,9})")
_CLOSE = 0.99  # of the epsilon that was asked for: what a calibrated plan costs at least, and more
_POLL = 0.02
_BEFORE = "nearveil.service"  # owner of accounts that paid for votes on sets


@dataclass(frozen=True)
class Terms:
    """What a gallery's account is opened for. It never changes.

    `epsilon, delta`: Of all publications together.
    """

    epsilon: float
    delta: float
    publications: int
    unit: str  # what one record is

    def __post_init__(self) -> None:
        count = self.publications
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError("publications must be a whole number of at least 1")

    def check(self, account: Account) -> None:
        """Raise ValueError where an account was opened for something else."""
        if account.owner == _BEFORE:
            raise ValueError(
                "account: an earlier version opened it for records that vote on sets, and this one publishes a model. "
                "What was answered stays told. For a model, give a new account, and index the records anew: both "
                "guarantees then hold for the records, one on top of the other"
            )
        budget = account._budget
        if not isinstance(budget, PlanBudget) or (account.protects, account.relation) != ("database", "add-remove"):
            raise ValueError("account must have been opened for a protected gallery, with a plan: take another name")
        if not _CLOSE * self.epsilon <= account.epsilon <= self.epsilon / _CLOSE or account.delta != self.delta:
            raise ValueError(
                f"epsilon and delta must be those of the account, {account.epsilon:.4g} and {account.delta:.4g}: they "
                "never change"
            )
        if self.unit != account.unit:
            raise ValueError(
                f"unit must be that of the account, {account.unit!r}: it says what one record is, to clients too, and "
                "never changes"
            )
        if budget.limits != (self.publications,):
            raise ValueError(f"publications must be those of the account, {budget.limits[0]}: they never change")

    def plan(self) -> tuple[VotePlan, Guarantee]:
        """Return what all publications cost, and their guarantee; ValueError where that cannot be promised."""
        plan = plan_publications(self.epsilon, self.delta, self.publications)
        return plan, plan.guarantee(self.delta, unit=self.unit, source=secure_source())


def look_up(ledger: Ledger | None, account: Account | str) -> Account | None:
    """Return the account of a gallery, or None where it is not opened yet."""
    if isinstance(account, Account):
        return account
    if ledger is None:
        raise ValueError("ledger must be given: account is only a name")
    with suppress(AccountError):
        return ledger.account(account)
    return None


def open_account(ledger: Ledger | None, account: Account | str, plan: VotePlan, guarantee: Guarantee) -> Account:
    """Return the account of a gallery, opened with its plan where there is none of that name."""
    with suppress(AccountError):  # another process was faster
        find_account(ledger, account, plan, guarantee)
    found = find_account(ledger, account, plan, guarantee)
    assert found is not None
    return found


def open_ledger(ledger: Ledger | Path | str | None, account: Account | str) -> tuple[Ledger | None, bool]:
    """Return a ledger, and whether it was opened here."""
    if ledger is not None and isinstance(account, Account):
        raise ValueError("account must be the name of an account in the ledger")
    if ledger is None or isinstance(ledger, Ledger):
        return ledger, False
    return Ledger(ledger), True


@dataclass(frozen=True)
class Publication:
    """A model that was paid for and stored: it is shown to everybody.

    Attributes
    ----------
    number : int
        From 1.
    model : bytes
    """

    number: int
    model: bytes = field(repr=False)

    @cached_property
    def version(self) -> str:
        """The SHA-256 of the model."""
        return hashlib.sha256(self.model).hexdigest()


@dataclass(eq=False)
class Publications:
    """What an account has paid for and stored. One key is one debit and one model."""

    account: Account
    paid: int = 0
    _stored: dict[int, Publication] = field(default_factory=dict, repr=False)
    _seen: int = -1

    @property
    def newest(self) -> Publication | None:
        """The newest model that is stored."""
        return self._stored[max(self._stored)] if self._stored else None

    @cached_property
    def promise(self) -> Promise:
        """What the account promises, for everything that is ever paid from it."""
        guarantee = self.account.guarantee
        return Promise(
            epsilon=guarantee.epsilon,
            delta=guarantee.delta,
            protects=guarantee.protects,
            unit=guarantee.unit,
            sound=guarantee.sound,
            words=str(guarantee),
        )

    @property
    def next_key(self) -> str:
        """The key of the next debit."""
        return f"model:{self.paid}"

    def refresh(self) -> None:
        """Read what anybody has paid for and stored since. One caller at a time."""
        if self.account.receipt().sequence == self._seen:
            return
        for entry in self.account.history():
            if entry.sequence <= self._seen:
                continue
            self._seen = entry.sequence
            known = _KEY.fullmatch(entry.key or "")
            if known is None:
                continue
            if entry.kind == "debit":
                self.paid = max(self.paid, int(known[1]) + 1)
            elif entry.message is not None:
                self._stored[int(known[1])] = Publication(int(known[1]) + 1, entry.message)

    def wait_for_others(self, seconds: float) -> Publication | None:
        """Return the model that somebody else is at, when it is stored; None if nobody is, or it takes too long."""
        until = time.monotonic() + seconds
        self.refresh()
        if not self.paid or self.paid - 1 in self._stored:
            return None
        while time.monotonic() < until:
            time.sleep(_POLL)
            self.refresh()
            if self.paid - 1 in self._stored:
                return self.newest
        return None
