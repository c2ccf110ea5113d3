"""Publications of a protected gallery: its records, what is checked before they are used, and who pays."""

import hashlib
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from sqlalchemy.engine import make_url

from nearveil.gallery import Index
from nearveil.ledger import Account, AccountError, Ledger
from nearveil.ledger.budget import PlanBudget
from nearveil.privacy import Guarantee
from nearveil.privacy.checks import is_integer
from nearveil.privacy.noise import secure_source
from nearveil.private_knn.discriminant import plan_publications
from nearveil.private_knn.discriminant_model import MOST_CLASSES
from nearveil.private_knn.plan import VotePlan
from nearveil.private_knn.spending import find_account
from nearveil.wire.schema import Promise

_AT_ONCE = 1024
_SAME = 1e-5  # two features of one image differ by less, in each number


@dataclass(frozen=True, eq=False)
class Records:
    """Private features and labels, as they are at one moment."""

    features: NDArray[np.float32] = field(repr=False)
    labels: NDArray[np.str_] = field(repr=False)
    stray: bool = field(repr=False)  # whether there are records of no class. They are left out

    def __repr__(self) -> str:
        return "Records(private)"


def read_records(index: Index, classes: Sequence[str]) -> Records:
    """Read all records. The label of one is the first folder of its name.

    Whether a record is left out depends on that record alone, so two galleries that differ in one record still do.
    """
    now = index.snapshot()
    labels: dict[int, str] = {}
    for some in _chunks(len(now)):
        # One may have been deleted since the snapshot: then it is left out.
        items = index.items(now.ids[some], lenient=True, originals=False)
        labels |= {item.id: item.name.partition("/")[0] if "/" in item.name else "" for item in items}
    known = set(classes)
    counted = np.array([labels.get(number) in known for number in now.ids.tolist()], dtype=np.bool_)
    ids = now.ids[counted].tolist()
    stray = any(label not in known for label in labels.values())
    return Records(now.features[counted], np.array([labels[number] for number in ids], np.str_), stray)


def share_images(records: Records, public: Index) -> bool:
    """Return whether an image is in both indexes, as far as features tell."""
    rows = records.features
    if not len(public):
        return False
    for some in _chunks(len(rows)):
        nearest = public.features(public.search(rows[some], 1)[0][:, 0])
        if (np.abs(nearest - rows[some]).max(axis=1) < _SAME).any():
            return True
    return False


def _chunks(count: int) -> Iterator[slice]:
    return (slice(start, start + _AT_ONCE) for start in range(0, count, _AT_ONCE))


_LONGEST_CLASS = 200


class Places(Protocol):
    """Where the parts of a gallery are; settings are that."""

    @property
    def kind(self) -> str: ...

    @property
    def index(self) -> str: ...

    @property
    def public(self) -> str | None: ...

    @property
    def ledger(self) -> str | None: ...

    @property
    def account(self) -> str | None: ...


def check_classes(classes: Sequence[str]) -> tuple[str, ...]:
    """Return the public list of classes, sorted."""
    given = [] if isinstance(classes, str) else list(classes)
    fits = all(
        isinstance(one, str) and 0 < len(one) <= _LONGEST_CLASS and "/" not in one and one.isprintable()
        for one in given
    )
    if not fits or not 2 <= len(given) <= MOST_CLASSES or len(set(given)) != len(given):
        raise ValueError(
            f"classes must list 2 to {MOST_CLASSES} different names of folders, of at most {_LONGEST_CLASS} characters"
        )
    return tuple(sorted(given))


def check_indexes(private: Index, public: Index) -> None:
    """Refuse a pair that cannot keep the guarantee."""
    if private._database.url == public._database.url:
        raise ValueError("private and public must be different indexes: what is published is not protected")
    public.assert_open()
    private.assert_row_exact()
    if (private.extractor, private.dimension) != (public.extractor, public.dimension):
        raise ValueError("private and public must have the features of one extractor")


def check_records(records: Records, public: Index) -> None:
    """Refuse records that cannot be protected: said to whoever publishes, before anything is paid, naming no record."""
    if not len(public):
        raise ValueError("public: it holds no image, and the model needs some: add images that anybody may see")
    if records.stray:
        raise ValueError(
            "private holds a record whose first folder is not in classes: the list must be complete, and public"
        )
    if not len(records.labels):
        raise ValueError("private holds no record: there is nothing to publish")
    if share_images(records, public):
        raise ValueError(
            "an image is in both indexes, private and public: the public one is not protected; delete it from one"
        )


def check_binding(private: Index, account: Account) -> None:
    """Bind records to their account, and keep them private from then on, in every process.

    Records of another account are refused: each account would promise as if there were no other.
    """
    opening = account.history()[0].hash
    if private.bind(opening) != opening:
        raise ValueError(
            "ledger, account: a model of this index was paid for from another account, and a second one would add to "
            "what the first has promised. Give the first; for a second promise, index the records anew"
        )


def check_apart(told: Sequence[Places]) -> None:
    """Refuse galleries of one server that would break each other's guarantee."""
    private = [_place(one.index) for one in told if one.kind == "protected"]
    shown = {_place(one.index) for one in told if one.kind == "open"}
    shown |= {_place(one.public) for one in told if one.public is not None}
    if len(set(private)) < len(private) or shown & set(private):
        raise ValueError(
            "galleries: the private index of a protected gallery must not be served by another, open or protected"
        )
    accounts = [(_place(one.ledger), one.account) for one in told if one.ledger is not None]
    if len(set(accounts)) < len(accounts):
        raise ValueError("galleries: two protected galleries must not publish from one account: records differ")


def _place(where: str) -> str:
    """Return where something is, the same for all ways to write it, as far as can be seen."""
    if "://" not in where:
        return str(Path(where).expanduser().resolve())
    url = make_url(where)
    return f"{url.host}:{url.port or 5432}/{url.database}?{sorted(url.query.items())}"


_KEY = re.compile(r"model:([0-9]{1,9})")
_CLOSE = 0.99  # of the epsilon that was asked for: what a calibrated plan costs at least, and more
_POLL = 0.02
_BEFORE = "nearveil.service"  # owner of accounts that paid for votes on sets


@dataclass(frozen=True)
class Terms:
    """What a gallery's account is opened for: it never changes. Epsilon and delta are of all publications together."""

    epsilon: float
    delta: float
    publications: int
    unit: str  # what one record is

    def __post_init__(self) -> None:
        if not is_integer(self.publications, 1):
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
