"""Accounts and their debits: a debit is durable before the mechanism runs, and is never undone."""

from __future__ import annotations

import base64
import json
import os
import secrets
from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias, cast

import sqlalchemy as sa

from nearveil.ledger import budget as budgets
from nearveil.ledger import store
from nearveil.ledger.budget import Budget, Charge, Events, FilterBudget, PlanBudget, UnpricedError
from nearveil.ledger.errors import (
    AccountError,
    CorruptLedgerError,
    KeyConflictError,
    KeySpentError,
    LedgerError,
    OverBudgetError,
)
from nearveil.ledger.history import Balance, Preview, make_balance, make_preview, make_refusal
from nearveil.ledger.store import CAP, DEBIT, LOG, MESSAGE, QUOTA, TAKE, BudgetRow, Entry, Receipt, UnaffordableError
from nearveil.privacy import Basis, Guarantee
from nearveil.privacy.checks import check_count, check_text
from nearveil.privacy.guarantee import FilterTerms, Protects, Relation

if TYPE_CHECKING:
    from dp_accounting import DpEvent

    from nearveil.ledger._ledger import Ledger

LARGEST_MESSAGE: Final = 16 * 2**20
_LARGEST_LOG: Final = 64 * 2**20  # of one entry
_LOG_STEP: Final = 32  # entries of a log that are looked up at once

Parts: TypeAlias = Iterable[tuple[Guarantee, int]]
"""Several releases, each with a count."""


def new_key() -> str:
    """Return a fresh key: 128 random bits, in hexadecimal.

    Examples
    --------
    >>> len(new_key()), new_key() == new_key()
    (32, False)
    """
    return secrets.token_hex(16)


class Debit(AbstractContextManager["Debit"]):
    """A durable debit. Use it as a context: run the mechanism inside, then `store` the message, then send it.

    :meth:`Account.spend` returns one; the example of :class:`Ledger` shows it.

    Attributes
    ----------
    key : str
    client : str or None
    repeated : bool
        Whether the key was spent before. If so, do not run the mechanism: send `message` again.
    message : bytes or None
        The public message: stored by an earlier spend with this key, or by this debit.
    nonce : str
        128 random bits, drawn when the key was first spent and stored in the ledger. Derive public names of the
        release from it: a name derived from the key could be guessed.
    """

    def __init__(
        self,
        account: Account,
        charge: Charge,
        *,
        key: str,
        client: str | None,
        nonce: str,
        row: BudgetRow,
        repeated: bool,
        message: bytes | None = None,
    ) -> None:
        self.key, self.client, self.nonce = key, client, nonce
        self.repeated, self.message, self._row = repeated, message, row
        self._account, self._charge, self._process, self._open = account, charge, os.getpid(), True

    @property
    def receipt(self) -> Receipt:
        """The latest entry of the account, as of this debit."""
        return self._row.receipt

    @property
    def events(self) -> tuple[tuple[DpEvent, int], ...]:
        """The single mechanisms that were paid for."""
        return budgets.read_charge(self._charge)

    def balance(self) -> Balance:
        """Return the balance of the account after this debit."""
        return make_balance(self._row)

    def store(self, message: bytes) -> None:
        """Store the public message, durably, so that the same key returns it. Store first, then send.

        Store only public bytes: anyone who can read the ledger can read the message.
        """
        if not isinstance(message, bytes) or len(message) > LARGEST_MESSAGE:
            raise ValueError(f"message must be bytes, at most {LARGEST_MESSAGE} of them")
        if self.repeated or self.message is not None:
            raise LedgerError("a message is stored already for this key; a key releases one message, once")
        if not self._open or os.getpid() != self._process:
            raise LedgerError("only the owner of a debit stores its message: inside the context, in the same process")
        account, database = self._account, self._account._ledger._database
        content = {"message": base64.b64encode(message).decode("ascii")}
        call: Any = {"time": database.now(), "nonce": self.nonce, "key": self.key}

        def append(connection: sa.Connection) -> tuple[BudgetRow, Receipt]:
            row = store.load_account(connection, account.name, database.witness, lock=True)
            debit, stored = store.find_entries_by_key(connection, account.name, self.key)
            if debit is None or debit.nonce != self.nonce:
                raise LedgerError("this debit is no longer in the ledger: release nothing, and verify the ledger")
            if stored is None:
                row = store.append_entry(connection, row, MESSAGE, content, **call)
            elif stored.message != message:  # the same message: an attempt of this call without a reply
                raise LedgerError("another message is stored already for this key; a key releases one message, once")
            return row, row.receipt

        self._row = database.write(append)
        self.message = message

    def __exit__(self, *error: object) -> None:
        self._open = False  # the debit stays, whatever happened inside

    def __reduce__(self) -> NoReturn:
        raise TypeError("a debit belongs to the process that made it: it is not copied or sent")

    def __repr__(self) -> str:
        return f"Debit(key={self.key!r}, repeated={self.repeated}, entry={self.receipt.sequence})"


class Account:
    """A durable budget. :class:`Ledger` creates accounts, and its example shows one.

    Copies, deep copies, pickles and scikit-learn clones are handles on the same account.
    """

    def __init__(self, ledger: Ledger, name: str) -> None:
        self._ledger, self.name = ledger, name

    @property
    def owner(self) -> str:
        """The owner of the account."""
        return str(self._details["owner"])

    @property
    def protects(self) -> Protects:
        """The protected record, "query" or "database"."""
        return cast("Protects", self._details["protects"])

    @property
    def unit(self) -> str:
        """The unit of protection: one record."""
        return str(self._details["unit"])

    @property
    def relation(self) -> Relation:
        """The neighbouring relation, "replace" or "add-remove"."""
        return cast("Relation", self._details["relation"])

    @property
    def kind(self) -> str:
        """The kind of budget: "plan", "filter" (Renyi), "gaussian" (filter) or "pure"."""
        return self._budget.kind

    @property
    def epsilon(self) -> float:
        """The epsilon of the budget."""
        return self._budget.epsilon

    @property
    def delta(self) -> float:
        """The delta of the budget."""
        return self._budget.delta

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee of everything that is ever paid from the account: the whole plan, or all that a filter allows.

        Samplers of finite precision may add to delta, at most 1e-5 of it (or 1e-20, if that is more) with each
        mechanism; screenings more, if the account's epsilon is above their plan's. See docs/theory/ledger.md.
        """
        from dp_accounting import SelfComposedDpEvent

        from nearveil.privacy.events import Budgeted

        events, within = (Budgeted(self.epsilon, self.delta),), None
        if isinstance(self._budget, PlanBudget):
            charge = tuple(zip(self._budget.plan, self._budget.limits, strict=True))
            events = tuple(SelfComposedDpEvent(event, times) for event, times in budgets.read_charge(charge))
        else:
            orders = self._budget.orders if isinstance(self._budget, FilterBudget) else ()
            within = FilterTerms(self.epsilon, self.delta, orders)
        return Guarantee(
            epsilon=self.epsilon,
            delta=self.delta,
            protects=self.protects,
            unit=self.unit,
            relation=self.relation,
            basis=Basis(f"a budget ({self.kind}) that is debited before each release", "docs/theory/ledger.md"),
            events=events,
            within=within,
        )

    def balance(self, *, client: str | None = None) -> Balance:
        """Return the spent and the remaining budget of the account, or of a client's quota."""
        return make_balance(self._load(client))

    def remaining(self, cap: str | None = None) -> tuple[tuple[DpEvent, int], ...]:
        """Return the remaining mechanisms of the account's plan, or of a cap; empty for accounts without a plan."""
        row = self._load(cap)
        return budgets.read_charge(row.budget.left(row.totals)) if isinstance(row.budget, PlanBudget) else ()

    def assert_affordable(self, guarantee: Guarantee | Parts) -> None:
        """Raise OverBudgetError, with figures, unless all of it could be paid now. Nothing is spent."""
        charge, row = self._charge_all(guarantee), self._load()
        try:
            row.after(charge)  # not a preview: its figures take time
        except UnaffordableError:
            raise make_refusal(make_preview(row, charge)) from None

    def preview(self, guarantee: Guarantee | Parts, *, client: str | None = None) -> Preview:
        """Return the cost of a spend and the budget after it, without spending.

        With a `client`, the figures are those of the budget that refuses, else those of the client's quota.
        """
        charge = self._charge_all(guarantee)
        preview = make_preview(self._load(), charge)
        return make_preview(self._load(client), charge) if client is not None and preview.allowed else preview

    def spend(
        self,
        guarantee: Guarantee,
        key: str | None = None,
        *,
        client: str | None = None,
        cap: str | None = None,
        times: int = 1,
    ) -> Debit:
        """Pay *before* the mechanism runs: when this returns, the debit is durable and stays.

        Parameters
        ----------
        guarantee : Guarantee
            The guarantee of the release: sound, and about the record that the account protects. Its events are paid.
        key : str, optional
            The name of this release; :func:`new_key` by default. The same key with the same events never pays twice:
            it returns the stored message. Never derive it from the record: the ledger stores it in the clear.
        client : str, optional
            The client with a quota that pays as well, in the same transaction.
        cap : str, optional
            The cap that counts the debit as well, in the same transaction; see :meth:`open_cap`.
        times : int, default=1
            How often the mechanism will run.

        Raises
        ------
        OverBudgetError, KeySpentError, KeyConflictError
            The budget does not cover it, with figures; the key was spent and no message stored; the key was used for
            something else. Nothing is spent.
        LedgerUnavailableError
            The debit may be stored or not; release nothing.
        """
        key, nonce = new_key() if key is None else check_text(key, "key"), secrets.token_hex(16)
        charge, database = self._charge(guarantee, times), self._ledger._database
        with suppress(UnpricedError):  # fill the cache of prices before the transaction: other writers wait for it
            self._budget.price(charge)
        call: Any = {"time": database.now(), "nonce": nonce, "key": key}

        def append_debit(connection: sa.Connection) -> tuple[dict[str, Any], Receipt | None]:
            row = store.load_account(connection, self.name, database.witness, lock=True)
            shares = [store.load_share(connection, self.name, name) for name in (client, cap) if name is not None]
            earlier, stored = store.find_entries_by_key(connection, self.name, key)
            if earlier is not None and earlier.nonce != nonce:
                message = _require_message(earlier, stored, client, charge)
                return {"nonce": earlier.nonce, "row": row, "repeated": True, "message": message}, None
            if earlier is None:  # else an attempt of this call was committed, and its reply was lost
                paid = {each.client: each.after(charge) for each in (row, *shares)}  # all of them, or none
                (row, price), quota = paid[None], None
                content: dict[str, Any] = {"charge": charge, "price": price}
                if client is not None:
                    quota, content["client_price"] = paid[client]
                row = store.append_entry(connection, row, DEBIT, content, share=quota, **call)
                if cap is not None:
                    limit, price = paid[cap]
                    row = store.append_entry(connection, row, TAKE, {"price": price}, share=limit, **call)
            return {"nonce": nonce, "row": row, "repeated": False}, row.receipt

        try:
            facts = database.write(append_debit)  # durable, and recorded by the witness
            return Debit(self, charge, key=key, client=client, **facts)
        except UnaffordableError as error:
            refused = error.row
        raise make_refusal(make_preview(refused, charge))  # figures take time: computed without the lock

    def read_log(self, name: str) -> list[bytes]:
        """Return the entries of a public log, in their order."""

        def work(connection: sa.Connection) -> list[bytes]:
            entries: list[bytes] = []
            while True:
                keys = [_make_log_key(name, len(entries) + step) for step in range(_LOG_STEP)]
                stored = store.find_log(connection, self.name, keys)
                if not stored.keys() <= set(keys[: len(stored)]):
                    raise CorruptLedgerError(f"A log of account {self.name!r} has gaps; verify() lists the problems.")
                entries += [stored[key].message or b"" for key in keys[: len(stored)]]
                if len(stored) < _LOG_STEP:
                    return entries

        return self._ledger._database.read(work)

    def append_log(
        self,
        name: str,
        position: int,
        entry: bytes,
        guarantee: Guarantee | None = None,
        *,
        times: int = 1,
        cap: str | None = None,
    ) -> bool:
        """Append an entry to a public log, and pay `times` for a guarantee in the same durable transaction.

        Returns False, and pays nothing, if the log has an entry at `position` already: another process was faster.
        Raises as :meth:`spend`. Log only what may be public: anyone who can read the ledger can read it.
        """
        if len(entry) > _LARGEST_LOG:
            raise ValueError(f"an entry of a log must be at most {_LARGEST_LOG:,} bytes: send fewer queries at a time")
        charge = None if guarantee is None else self._charge(guarantee, times)
        content, database = {"log": base64.b64encode(entry).decode("ascii")}, self._ledger._database
        key = _make_log_key(name, position)
        call: Any = {"time": database.now(), "nonce": secrets.token_hex(16), "key": key}

        def append(connection: sa.Connection) -> tuple[bool, Receipt | None]:
            row = store.load_account(connection, self.name, database.witness, lock=True)
            earlier = store.find_log(connection, self.name, [key]).get(key)
            if earlier is not None:  # perhaps by an attempt of this call without a reply
                return earlier.nonce == call["nonce"], None
            if charge is not None:
                limit = None if cap is None else store.load_share(connection, self.name, cap).after(charge)
                row, price = row.after(charge)
                row = store.append_entry(connection, row, DEBIT, {"charge": charge, "price": price}, **call)
                if limit is not None:
                    row = store.append_entry(connection, row, TAKE, {"price": limit[1]}, share=limit[0], **call)
            row = store.append_entry(connection, row, LOG, content, **call)
            return True, row.receipt

        try:
            return database.write(append)
        except UnaffordableError as error:
            refused = error.row
        raise make_refusal(make_preview(refused, charge or ()))

    def take(self, guarantee: Guarantee, most: int, *, cap: str | None = None) -> int:
        """Pay for a release as often as a cap, and the account's plan if it has one, still allow, at most `most` times.

        Returns the number of releases that are paid for. Raises as :meth:`spend`: an account without a plan pays for
        all that the cap allows, or for none.
        """
        check_count(most, "most")
        granted = self.count_left(guarantee, most, cap=cap)
        while granted:
            try:
                self.spend(guarantee, cap=cap, times=granted)
            except OverBudgetError:
                refused, granted = granted, self.count_left(guarantee, granted, cap=cap)
                if granted == refused:
                    raise
            else:
                break
        return granted

    def count_left(self, guarantee: Guarantee, most: int, *, cap: str | None = None) -> int:
        """Return how often a guarantee remains of the plan, if there is one, and of a cap, at most `most`."""
        charge, rows = self._charge(guarantee), map(self._load, {None, cap})
        counts = [row.budget.count_left(row.totals, charge) for row in rows if isinstance(row.budget, PlanBudget)]
        return min([most, *counts])

    def quota(
        self, client: str, *, epsilon: float | None = None, delta: float | None = None, plan: Events | None = None
    ) -> Balance:
        """Give a client a part of the budget. The sum of all quotas may exceed the account: its own limit always holds.

        Accounts without a plan need an `epsilon` (`delta` is the account's by default), accounts with one a part of it.
        """
        check_text(client, "client")
        if isinstance(self._budget, PlanBudget):
            if plan is None or epsilon is not None or delta is not None:
                raise ValueError("quota of an account with a plan must be a part of it: pass plan, and nothing else")
            epsilon = self.epsilon
        elif plan is not None or epsilon is None:
            raise ValueError("quota of an account without a plan must have an epsilon, and no plan")
        delta = self.delta if delta is None else delta
        budget = budgets.open_budget(epsilon, delta, plan, self.relation, self._budget.releases)
        if not self._budget.contains(budget):
            raise ValueError("quota must be a part of the account's budget: smaller, and at no larger delta")
        return make_balance(self._open_share(QUOTA, client, budget))

    def open_cap(self, plan: Events) -> str | None:
        """Open a cap: a limit on how often each mechanism may run, shared by all who know its name.

        An estimator opens one when it is fitted. Its copies, its pickles and the processes that it forks take from the
        same counts, so together they do what one estimator stated, whatever else the account could pay. Returns its
        name, for :meth:`spend` and :meth:`remaining`, or None if the account has this very plan and caps it itself.
        """
        if self.has_plan(plan):
            return None
        name = f"cap {new_key()}"
        self._open_share(CAP, name, budgets.open_budget(self.epsilon, self.delta, plan, self.relation))
        return name

    def has_plan(self, plan: Events) -> bool:
        """Return whether the account was opened with this very plan."""
        return self._budget == budgets.open_budget(self.epsilon, self.delta, plan, self.relation)

    def _open_share(self, kind: str, name: str, budget: Budget) -> BudgetRow:
        """Open a quota or a cap, unless it exists with the same terms."""
        database = self._ledger._database
        call: Any = {"time": database.now(), "nonce": secrets.token_hex(16)}
        opened = BudgetRow(self.name, name, budget.terms(), budget.zero)

        def work(connection: sa.Connection) -> tuple[BudgetRow, Receipt | None]:
            row = store.load_account(connection, self.name, database.witness, lock=True)
            share = store.find_row(connection, self.name, name)
            if share is None:
                row = store.append_entry(connection, row, kind, {"terms": opened.terms}, share=opened, **call)
            elif share.terms != opened.terms:
                raise AccountError(f"client {name!r} has another quota already: quotas do not change")
            return share or opened, row.receipt

        return database.write(work)

    def receipt(self) -> Receipt:
        """Return the receipt of the latest entry. Store it elsewhere and pass it to :meth:`Ledger.verify` later."""
        return self._load().receipt

    def history(self) -> list[Entry]:
        """Return all entries, in order."""
        return self._ledger._database.read(lambda connection: list(store.read_entries(connection, self.name)))

    def _charge(self, guarantee: Guarantee, times: int = 1) -> Charge:
        if not isinstance(guarantee, Guarantee):
            raise TypeError(
                "guarantee must be a Guarantee: the ledger pays for guarantees only. Mechanisms have one "
                "(release.guarantee); nearveil.privacy.compose_events makes one of your own events"
            )
        terms = (self._details[name] for name in ("protects", "unit", "relation"))
        charge = budgets.charge_guarantee(guarantee, *terms, delta=self._budget.delta)
        return charge if times == 1 else budgets.repeat_charge(charge, times)

    def _charge_all(self, guarantee: Guarantee | Parts) -> Charge:
        if not isinstance(guarantee, Iterable):
            return self._charge(guarantee)
        pairs = [part if isinstance(part, tuple) and len(part) == 2 else (part, 1) for part in guarantee]
        return budgets.join_charges(self._charge(part, times) for part, times in pairs)

    def _load(self, client: str | None = None) -> BudgetRow:
        """Load the account, or a quota or a cap of it. A database that was rolled back is read: verify() reports it."""
        if client is None:
            return self._ledger._database.read(lambda connection: store.load_account(connection, self.name, None))
        return self._ledger._database.read(lambda connection: store.load_share(connection, self.name, client))

    @cached_property
    def _budget(self) -> Budget:
        return self._load().budget

    @cached_property
    def _details(self) -> dict[str, Any]:
        """The owner, the protected record, its unit and the relation, which never change."""
        return dict(json.loads(self._load().opening))

    def __reduce__(self) -> tuple[type[Account], tuple[Any, ...]]:
        return Account, (self._ledger, self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Account) and (self.name, self._ledger) == (other.name, other._ledger)

    def __hash__(self) -> int:
        return hash((self.name, self._ledger))

    def __repr__(self) -> str:
        return f"Account({self.name!r} of {self._ledger!r})"


def _make_log_key(name: str, position: int) -> str:
    return f"{name} {position}"


def _require_message(debit: Entry, stored: Entry | None, client: str | None, charge: Charge) -> bytes:
    """Return the stored message of a key that was spent before; raise unless it was spent for the same release."""
    if debit.client != client or budgets.drop_sets(debit.charge) != budgets.drop_sets(charge):
        # The same text for both: a client that tries the key of another learns nothing more.
        raise KeyConflictError("key was used before, for something else: take a new one (new_key())")
    if stored is None or stored.message is None:
        raise KeySpentError("key was spent, and its message never stored: release nothing for it, and take a new key")
    return stored.message
