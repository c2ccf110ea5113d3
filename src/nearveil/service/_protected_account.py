"""The one account of a protected gallery: its terms, and what it has paid for and stored."""

import math
import re
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from dp_accounting import DpEvent, GaussianDpEvent

from nearveil.ledger import Account, AccountError, Ledger
from nearveil.ledger._budget import PlanBudget
from nearveil.ledger._events import text_event
from nearveil.privacy.events import VoteHistogram
from nearveil.service._model import Promise
from nearveil.votes._base import votes_from_bytes
from nearveil.votes._plan import Ballot, Wish, make_plan

_KEY = re.compile(r"([0-9a-f]{32}):([0-9]{1,9}):([0-9]{1,9})")
SPARE = 4  # one answer more for so many sets: a crash may cost one, and a new map has sets of its own
_CLOSE = 0.99  # of the epsilon that was asked for: what a calibrated plan costs at least, and more


@dataclass(frozen=True)
class Terms:
    """What an account was opened for. It never changes.

    Attributes
    ----------
    account : Account
    noise : float
        On every count of votes.
    answers : int
        At most so many are ever paid for.
    """

    account: Account
    noise: float
    answers: int

    @property
    def event(self) -> DpEvent:
        """What one answer is charged as."""
        return VoteHistogram(self.noise)


def open_terms(
    ledger: Ledger | None,
    account: Account | str,
    *,
    n_classes: int,
    epsilon: float,
    delta: float,
    answers: int | None,
    unit: str,
    sets: int,
) -> Terms:
    """Return the terms of an account, opened where there is none of that name.

    Of an account that is there the noise is read, not calibrated again: another version of an accountant may find
    another last digit, and its plan knows one noise alone.

    Parameters
    ----------
    ledger : Ledger or None
    account : Account or str
    n_classes : int
    epsilon, delta : float
    answers : int or None
        A quarter more than there are sets by default, where an account is opened; as many as it has, where it is
        there.
    unit : str
        What one record is.
    sets : int

    Returns
    -------
    Terms
    """
    if isinstance(account, Account):
        found = account
    elif ledger is None:
        raise ValueError("ledger must be given: account is only a name")
    else:
        found = _named(
            ledger,
            account,
            n_classes,
            epsilon=epsilon,
            delta=delta,
            answers=answers or sets + -(-sets // SPARE),
            unit=unit,
        )
    budget = found._budget
    if not isinstance(budget, PlanBudget) or (found.protects, found.relation) != ("database", "add-remove"):
        raise ValueError("account must have been opened for a protected gallery, with a plan: take another name")
    noises = [_noise(text_event(text)) for text in budget.plan]
    if len(noises) != 1 or noises[0] is None:
        raise ValueError("account must have a plan of votes and nothing else: take another name")
    if not _CLOSE * epsilon <= found.epsilon <= epsilon or found.delta != delta:
        raise ValueError(
            f"epsilon and delta must be those of the account, {found.epsilon:g} and {found.delta:g}: they never change"
        )
    if unit != found.unit:
        raise ValueError(
            f"unit must be that of the account, {found.unit!r}: it says what one record is, to clients too, and never "
            "changes"
        )
    if answers is not None and answers != budget.limits[0]:
        raise ValueError(f"answers must be those of the account, {budget.limits[0]}: they never change")
    return Terms(found, noises[0], budget.limits[0])


def _named(
    ledger: Ledger, name: str, n_classes: int, *, epsilon: float, delta: float, answers: int, unit: str
) -> Account:
    with suppress(AccountError):
        return ledger.account(name)
    wish = Wish(epsilon=epsilon, delta=delta, max_answered=answers, max_screened=0)
    plan = make_plan(wish, Ballot(VoteHistogram, n_classes))
    with suppress(AccountError):  # another process was faster
        ledger.open_account(
            name,
            owner="nearveil.service",
            protects="database",
            unit=unit,
            relation="add-remove",
            epsilon=epsilon,
            delta=delta,
            plan=plan.events,
        )
    return ledger.account(name)


def _noise(event: DpEvent) -> float | None:
    """Return the noise of votes that are charged as just this event, else nothing could be paid."""
    if not isinstance(event, GaussianDpEvent):
        return None
    noise = float(event.noise_multiplier) * math.sqrt(2)
    return noise if VoteHistogram(noise).gaussian == event else None


@dataclass(eq=False)
class Paid:
    """What an account has paid for and stored, by map and set.

    A set has one answer: of all that were stored, the first. So whoever counted twice, by accident, shows one.

    Parameters
    ----------
    account : Account
    classes : tuple of str
        Sorted.
    """

    account: Account
    classes: tuple[str, ...]
    _votes: dict[tuple[str, int], tuple[float, ...]] = field(default_factory=dict, repr=False)
    _open: dict[tuple[str, int], set[int]] = field(default_factory=dict, repr=False)
    _attempts: dict[tuple[str, int], int] = field(default_factory=dict, repr=False)
    _seen: int = -1

    def votes(self, public_id: str, number: int) -> tuple[float, ...] | None:
        """Return the votes that were stored for a set, if this object has seen any."""
        return self._votes.get((public_id, number))

    def attempts(self, public_id: str, number: int) -> int:
        """Return how often a set was paid for."""
        return self._attempts.get((public_id, number), 0)

    def unfinished(self, public_id: str, number: int) -> int | None:
        """Return the last attempt at a set whose votes are not stored: its process died, or is still counting."""
        return max(self._open.get((public_id, number), ()), default=None)

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
            place, attempt = (known[1], int(known[2])), int(known[3])
            if entry.kind == "debit":
                self._attempts[place] = max(self._attempts.get(place, 0), attempt + 1)
                self._open.setdefault(place, set()).add(attempt)
            elif entry.message is not None:
                self._open[place].discard(attempt)
                votes = votes_from_bytes(entry.message, np.array(self.classes))[0]
                self._votes.setdefault(place, tuple(votes.tolist()))


def set_key(public_id: str, number: int, attempt: int) -> str:
    """Return the key of a debit.

    Examples
    --------
    >>> set_key("0" * 32, 7, 0)
    '00000000000000000000000000000000:7:0'
    """
    return f"{public_id}:{number}:{attempt}"


def opened(ledger: Ledger | Path | str | None, account: Account | str) -> tuple[Ledger | None, bool]:
    """Return a ledger, and whether it was opened here."""
    if ledger is not None and isinstance(account, Account):
        raise ValueError("account must be the name of an account in the ledger")
    if ledger is None or isinstance(ledger, Ledger):
        return ledger, False
    return Ledger(ledger), True


def promise_of(account: Account) -> Promise:
    """Return what an account promises, for everything that is ever paid from it.

    Parameters
    ----------
    account : Account

    Returns
    -------
    Promise
    """
    guarantee = account.guarantee
    return Promise(
        epsilon=guarantee.epsilon,
        delta=guarantee.delta,
        protects=guarantee.protects,
        unit=guarantee.unit,
        sound=guarantee.sound,
        words=str(guarantee),
    )
