"""Accounts and their debits: a debit is durable before the mechanism runs, and is never undone."""

import base64
import os
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self, TypeAlias, cast

import sqlalchemy as sa
from dp_accounting import DpEvent, SelfComposedDpEvent

from nearveil.ledger._store import (
    append_entry,
    find_entry_by_key,
    find_quota,
    insert_quota,
    load_account,
    load_quota,
    read_entries,
)
from nearveil.ledger.budget import (
    Budget,
    Charge,
    Events,
    FilterBudget,
    PlanBudget,
    PureBudget,
    UnpricedError,
    add_amounts,
    canonical_json,
    charge_guarantee,
    find_pld_epsilon,
    join_charges,
    make_charge,
    read_charge,
    repeat_charge,
)
from nearveil.ledger.database import LedgerDatabase
from nearveil.ledger.entries import CAP, DEBIT, MESSAGE, QUOTA, TAKE, AccountRow, BudgetState, Entry, Receipt
from nearveil.ledger.errors import AccountError, KeyConflictError, KeySpentError, LedgerError
from nearveil.ledger.history import Balance, Preview, is_affordable, make_balance, make_preview, make_refusal
from nearveil.privacy import Basis, Guarantee
from nearveil.privacy.checks import check_count, check_text
from nearveil.privacy.events import Budgeted
from nearveil.privacy.guarantee import FilterTerms, Protects, Relation

if TYPE_CHECKING:
    from nearveil.ledger._ledger import Ledger

LARGEST_MESSAGE: Final = 16 * 2**20

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


@dataclass(frozen=True)
class SpendRequest:
    """The arguments of one call of `spend` or `take`. All its attempts share the nonce."""

    charge: Charge
    key: str
    nonce: str
    client: str | None
    cap: str | None


class Debit:
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
    receipt : Receipt
        The latest entry of the account.

    Examples
    --------
    >>> import tempfile
    >>> from nearveil.ledger import Ledger
    >>> from nearveil.privacy import Basis, compose_events
    >>> from nearveil.privacy.events import PureDp
    >>> about = {"protects": "query", "unit": "image", "relation": "replace"}
    >>> quarter = compose_events([PureDp(0.25)], delta=0.0, basis=Basis("randomised response"), **about)
    >>> with tempfile.TemporaryDirectory() as folder, Ledger(f"{folder}/budget.db") as ledger:
    ...     account = ledger.open_account("camera", owner="me", epsilon=1.0, delta=0.0, **about)
    ...     for attempt in range(2):
    ...         with account.spend(quarter, key="first") as debit:
    ...             if not debit.repeated:
    ...                 debit.store(b"the public message")
    ...         print(debit.repeated, debit.message)
    False b'the public message'
    True b'the public message'
    """

    def __init__(
        self, account: "Account", request: SpendRequest, receipt: Receipt, message: bytes | None, *, repeated: bool
    ) -> None:
        self.key, self.client, self.nonce = request.key, request.client, request.nonce
        self.repeated, self.message, self.receipt = repeated, message, receipt
        self._account, self._charge, self._process, self._open = account, request.charge, os.getpid(), True

    @property
    def events(self) -> tuple[tuple[DpEvent, int], ...]:
        """The single mechanisms that were paid for."""
        return read_charge(self._charge)

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
        payload = canonical_json({"message": base64.b64encode(message).decode("ascii")})
        self.receipt = self._account._database.write(lambda connection: self._append_message(connection, payload))
        self.message = message

    def _append_message(self, connection: sa.Connection, payload: str) -> tuple[Receipt, Receipt]:
        account = self._account
        row = load_account(connection, account.name, account._database.witness, lock=True)
        debit = find_entry_by_key(connection, account.name, self.key, DEBIT)
        if debit is None or debit.nonce != self.nonce:
            raise LedgerError("this debit is no longer in the ledger: release nothing, and verify the ledger")
        stored = find_entry_by_key(connection, account.name, self.key, MESSAGE)
        if stored is not None and stored.payload != payload:
            raise LedgerError("another message is stored already for this key; a key releases one message, once")
        if stored is None:  # else an attempt of this call was committed, and its reply was lost
            time = account._database.now()
            row = append_entry(
                connection, row, kind=MESSAGE, time=time, nonce=self.nonce, payload=payload, key=self.key
            )
        return row.receipt, row.receipt

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._open = False  # the debit stays, whatever happened inside

    def __reduce__(self) -> NoReturn:
        raise TypeError("a debit belongs to the process that made it: it is not copied or sent")

    def __repr__(self) -> str:
        return f"Debit(key={self.key!r}, repeated={self.repeated}, entry={self.receipt.sequence})"


class _RefusedSpendError(Exception):
    """Rolls a transaction back. The figures of the refusal are computed after it, without a lock."""

    def __init__(self, client: str | None, state: BudgetState) -> None:
        super().__init__()
        self.client, self.state = client, state


class Account:
    """A durable budget. :class:`Ledger` creates accounts, and its example shows one.

    Copies, deep copies, pickles and scikit-learn clones are handles on the same account.

    Examples
    --------
    >>> import tempfile
    >>> from nearveil.ledger import Ledger
    >>> about = {"owner": "me", "protects": "query", "unit": "image", "relation": "replace"}
    >>> with tempfile.TemporaryDirectory() as folder, Ledger(f"{folder}/budget.db") as ledger:
    ...     account = ledger.open_account("camera", epsilon=1.0, delta=0.0, **about)
    ...     print(account.kind, account.epsilon, account.balance(), sep="; ")
    pure; 1.0; account camera: budget epsilon 1 at delta 0, spent 0, left 1
    """

    def __init__(self, ledger: "Ledger", name: str) -> None:
        self._ledger, self.name = ledger, name

    @property
    def owner(self) -> str:
        """The owner of the account."""
        return str(self._row.details["owner"])

    @property
    def protects(self) -> Protects:
        """The protected record, "query" or "database"."""
        return cast("Protects", self._row.details["protects"])

    @property
    def unit(self) -> str:
        """The unit of protection: one record."""
        return str(self._row.details["unit"])

    @property
    def relation(self) -> Relation:
        """The neighbouring relation, "replace" or "add-remove"."""
        return cast("Relation", self._row.details["relation"])

    @property
    def kind(self) -> str:
        """The kind of budget: "plan", "filter" or "pure"."""
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
        events, within = (Budgeted(self.epsilon, self.delta),), None
        if isinstance(self._budget, PlanBudget):
            charge = tuple(zip(self._budget.plan, self._budget.limits, strict=True))
            events = tuple(SelfComposedDpEvent(event, times) for event, times in read_charge(charge))
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
        return make_balance(self.name, client, self._load_state(client))

    def remaining(self, cap: str | None = None) -> tuple[tuple[DpEvent, int], ...]:
        """Return the remaining mechanisms of the account's plan, or of a cap; empty for accounts without a plan."""
        state = self._load_state(cap)
        return read_charge(state.budget.left(state.totals)) if isinstance(state.budget, PlanBudget) else ()

    def assert_affordable(self, guarantee: Guarantee | Parts) -> None:
        """Raise OverBudgetError, with figures, unless all of it could be paid now. Nothing is spent."""
        charge, state = self._charge(guarantee), self._load_state(None)
        if not is_affordable(state, charge):
            raise make_refusal(make_preview(self.name, None, state, charge))

    def preview(self, guarantee: Guarantee | Parts, *, client: str | None = None) -> Preview:
        """Return the cost of a spend and the budget after it, without spending.

        With a `client`, the figures are those of the budget that refuses, else those of the client's quota.
        """
        charge = self._charge(guarantee)
        preview = make_preview(self.name, None, self._load_state(None), charge)
        if client is None or not preview.allowed:
            return preview
        return make_preview(self.name, client, self._load_state(client), charge)

    def spend(
        self, guarantee: Guarantee, key: str | None = None, *, client: str | None = None, cap: str | None = None
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

        Returns
        -------
        Debit
            A context; see there.

        Raises
        ------
        OverBudgetError
            With figures; nothing is spent.
        KeySpentError
            The key was spent and no message stored.
        KeyConflictError
            The key was used for something else.
        LedgerUnavailableError
            The debit may be stored or not; release nothing.
        """
        key = new_key() if key is None else check_text(key, "key")
        if client is not None:
            check_text(client, "client")
        request = SpendRequest(self._charge_once(guarantee), key, secrets.token_hex(16), client, cap)
        with suppress(UnpricedError):  # fill the cache of prices before the transaction: other writers wait for it
            self._budget.price(request.charge)

        def pay(connection: sa.Connection) -> tuple[Debit, Receipt | None]:
            row = load_account(connection, self.name, self._database.witness, lock=True)
            shares = self._load_shares(connection, request)
            earlier = find_entry_by_key(connection, self.name, key, DEBIT)
            if earlier is None:
                row = self._append_debit(connection, row, shares, request)
            elif earlier.nonce != request.nonce:
                message = self._find_message(connection, request, earlier)
                return Debit(self, replace(request, nonce=earlier.nonce), row.receipt, message, repeated=True), None
            # The same nonce: an attempt of this call was committed, and its reply was lost.
            return Debit(self, request, row.receipt, None, repeated=False), row.receipt

        try:
            return self._database.write(pay)  # durable, and recorded by the witness
        except _RefusedSpendError as error:
            refused = error
        raise make_refusal(make_preview(self.name, refused.client, refused.state, request.charge))

    def take(self, guarantee: Guarantee, most: int, *, cap: str | None = None) -> int:
        """Pay for a release as often as a cap, and the account's plan if it has one, still allow, at most `most` times.

        Returns the number of releases that are paid for. Raises as :meth:`spend`: an account without a plan pays for
        all that the cap allows, or for nothing.
        """
        check_count(most, "most")
        request = SpendRequest(self._charge_once(guarantee), new_key(), secrets.token_hex(16), None, cap)

        def pay(connection: sa.Connection) -> tuple[int, Receipt | None]:
            row = load_account(connection, self.name, self._database.witness, lock=True)
            earlier = find_entry_by_key(connection, self.name, request.key, DEBIT)
            if earlier is not None:  # an attempt of this call, whose reply was lost: the key is new
                (event, times), *_ = request.charge
                return dict(earlier.content["charge"])[event] // times, row.receipt
            shares = self._load_shares(connection, request)
            granted = min(_count_remaining(state, request.charge, most) for state in (row.state, *shares.values()))
            if not granted:
                return 0, None
            charge = repeat_charge(request.charge, granted)
            return granted, self._append_debit(connection, row, shares, replace(request, charge=charge)).receipt

        try:
            return self._database.write(pay)
        except _RefusedSpendError as error:
            refused = error
        raise make_refusal(make_preview(self.name, None, refused.state, repeat_charge(request.charge, most)))

    def _load_shares(self, connection: sa.Connection, request: SpendRequest) -> dict[str, BudgetState]:
        """Load the quota and the cap that pay with the account, by name."""
        names = [name for name in (request.client, request.cap) if name is not None]
        return {name: load_quota(connection, self.name, name) for name in names}

    def _append_debit(
        self, connection: sa.Connection, row: AccountRow, shares: dict[str, BudgetState], request: SpendRequest
    ) -> AccountRow:
        """Debit the account, the quota and the cap, or raise to roll the transaction back."""
        state, price = _add_charge(row.state, request.charge, None)
        payload, quota = {"charge": request.charge, "price": price}, None
        if request.client is not None:
            quota, payload["client_price"] = _add_charge(shares[request.client], request.charge, request.client)
        common = {"time": self._database.now(), "nonce": request.nonce, "key": request.key}
        row = append_entry(
            connection,
            replace(row, state=state),
            kind=DEBIT,
            payload=canonical_json(payload),
            client=request.client,
            quota=quota,
            **common,
        )
        if request.cap is not None:
            cap, price = _add_charge(shares[request.cap], request.charge, request.cap)
            payload = {"price": price}
            row = append_entry(
                connection, row, kind=TAKE, payload=canonical_json(payload), client=request.cap, quota=cap, **common
            )
        return row

    def _find_message(self, connection: sa.Connection, request: SpendRequest, earlier: Entry) -> bytes:
        """Return the stored message of a key that was spent before."""
        charge = tuple((text, times) for text, times in earlier.content["charge"])
        if earlier.client != request.client or charge != request.charge:
            # The same text for both: a client that tries the key of another learns nothing more.
            raise KeyConflictError("key was used before, for something else: take a new one (new_key())")
        stored = find_entry_by_key(connection, self.name, request.key, MESSAGE)
        if stored is None or stored.message is None:
            raise KeySpentError(
                "key was spent, but its message was never stored. Release nothing for it; to release, spend again with "
                "a new key"
            )
        return stored.message

    def quota(
        self, client: str, *, epsilon: float | None = None, delta: float | None = None, plan: Events | None = None
    ) -> Balance:
        """Give a client a part of the budget. The sum of all quotas may exceed the account: its own limit always holds.

        Accounts without a plan need an `epsilon` (`delta` is the account's by default), accounts with one a part of it.
        """
        check_text(client, "client")
        budget = self._make_quota_budget(epsilon, delta, plan)
        if not self._budget.contains(budget):
            raise ValueError("quota must be a part of the account's budget: smaller, and at no larger delta")
        return make_balance(self.name, client, self._open_share(QUOTA, client, budget.terms()))

    def open_cap(self, plan: Events) -> str | None:
        """Open a cap: a limit on how often each mechanism may run, shared by all who know its name.

        An estimator opens one when it is fitted. Its copies, its pickles and the processes that it forks take from the
        same counts, so together they do what one estimator stated, whatever else the account could pay. Returns its
        name, for :meth:`spend` and :meth:`remaining`, or None if the account has this very plan and caps it itself.
        """
        if self.has_plan(plan):
            return None
        name = f"cap {new_key()}"
        self._open_share(CAP, name, self._make_plan_budget(plan).terms())
        return name

    def has_plan(self, plan: Events) -> bool:
        """Return whether the account was opened with this very plan."""
        return self._budget == self._make_plan_budget(plan)

    def _make_plan_budget(self, plan: Events) -> PlanBudget:
        return PlanBudget.open(self.epsilon, self.delta, make_charge(plan, self.relation))

    def _make_quota_budget(self, epsilon: float | None, delta: float | None, plan: Events | None) -> Budget:
        if isinstance(self._budget, PlanBudget):
            if plan is None or epsilon is not None or delta is not None:
                raise ValueError("quota of an account with a plan must be a part of it: pass plan, and nothing else")
            return self._make_plan_budget(plan)
        if plan is not None or epsilon is None:
            raise ValueError("quota of an account without a plan must have an epsilon, and no plan")
        return open_budget(epsilon, self.delta if delta is None else delta, None, self.relation)

    def _open_share(self, kind: str, name: str, terms: str) -> BudgetState:
        """Open a quota or a cap, unless it exists with the same terms."""
        nonce = secrets.token_hex(16)

        def work(connection: sa.Connection) -> tuple[BudgetState, Receipt | None]:
            row = load_account(connection, self.name, self._database.witness, lock=True)
            state = find_quota(connection, self.name, name)
            if state is None:
                state, payload = insert_quota(connection, self.name, name, terms), canonical_json({"terms": terms})
                time = self._database.now()
                row = append_entry(
                    connection, row, kind=kind, time=time, nonce=nonce, payload=payload, client=name, quota=state
                )
            elif state.terms != terms:
                raise AccountError(f"client {name!r} has another quota already: quotas do not change")
            return state, row.receipt

        return self._database.write(work)

    def receipt(self) -> Receipt:
        """Return the receipt of the latest entry. Store it elsewhere and pass it to :meth:`Ledger.verify` later."""
        return self._load().receipt

    def history(self) -> list[Entry]:
        """Return all entries, in order."""
        return self._database.read(lambda connection: list(read_entries(connection, self.name)))

    def _charge(self, guarantee: Guarantee | Parts) -> Charge:
        if isinstance(guarantee, Guarantee) or not isinstance(guarantee, Iterable):
            return self._charge_once(guarantee)
        pairs = [part if isinstance(part, tuple) and len(part) == 2 else (part, 1) for part in guarantee]
        return join_charges(
            repeat_charge(self._charge_once(part), check_count(times, "times", least=1)) for part, times in pairs
        )

    def _charge_once(self, guarantee: Guarantee) -> Charge:
        return charge_guarantee(guarantee, self.protects, self.unit, self.relation, self.delta)

    @property
    def _database(self) -> LedgerDatabase:
        return self._ledger._database

    @cached_property
    def _row(self) -> AccountRow:
        """The account when it was first loaded; read only its terms and details, which never change."""
        return self._load()

    @property
    def _budget(self) -> Budget:
        return self._row.state.budget

    def _load(self) -> AccountRow:
        # Readers may see a database that was rolled back, and verify() reports it; only spending is refused.
        return self._database.read(lambda connection: load_account(connection, self.name, None))

    def _load_state(self, client: str | None) -> BudgetState:
        if client is None:
            return self._load().state
        name = check_text(client, "client")
        return self._database.read(lambda connection: load_quota(connection, self.name, name))

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Callable[..., "Account"], tuple[Any, ...]]:
        return Account, (self._ledger, self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Account) and (self.name, self._ledger) == (other.name, other._ledger)

    def __hash__(self) -> int:
        return hash((self.name, self._ledger))

    def __repr__(self) -> str:
        return f"Account({self.name!r} of {self._ledger!r})"


def _add_charge(state: BudgetState, charge: Charge, client: str | None) -> tuple[BudgetState, Any]:
    """Return the state after a charge, and its price; raise if the budget does not allow it."""
    try:
        price = state.budget.price(charge)
    except UnpricedError:
        raise _RefusedSpendError(client, state) from None
    totals = add_amounts(state.totals, price)
    if not state.budget.allows(totals):
        raise _RefusedSpendError(client, state)
    return replace(state, totals=totals), price


def _count_remaining(state: BudgetState, charge: Charge, most: int) -> int:
    """Return how often a charge remains of a plan, at most `most`; `most` without a plan."""
    if not isinstance(state.budget, PlanBudget):
        return most
    remaining = dict(state.budget.left(state.totals))
    return min(most, *(remaining.get(text, 0) // times for text, times in charge))


def open_budget(epsilon: float, delta: float, plan: Events | None, relation: Relation) -> Budget:
    """Return the budget of an account: a plan, a filter, or pure epsilons."""
    if plan is not None:
        return PlanBudget.open(epsilon, delta, make_charge(plan, relation))
    return PureBudget.open(epsilon) if delta == 0 else FilterBudget.open(epsilon, delta)


def find_plan_cost(budget: Budget) -> float | None:
    """Return the cost of a plan at its delta, by PLD; None without a plan."""
    if not isinstance(budget, PlanBudget):
        return None
    try:
        return find_pld_epsilon(tuple(zip(budget.plan, budget.limits, strict=True)), budget.delta)
    except UnpricedError as refused:
        raise ValueError(f"plan cannot be composed: {refused}") from refused
