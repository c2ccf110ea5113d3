"""Verification: replay every entry, and compare with the stored rows, the witness and receipts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import sqlalchemy as sa

from nearveil.ledger._store import find_account, find_hash, find_quota, list_accounts, quotas, read_entries
from nearveil.ledger.account import find_plan_cost
from nearveil.ledger.budget import (
    Amounts,
    Budget,
    Charge,
    FilterBudget,
    PlanBudget,
    PureBudget,
    UnpricedError,
    add_amounts,
    parse_budget,
)
from nearveil.ledger.database import LedgerDatabase
from nearveil.ledger.entries import (
    CAP,
    DEBIT,
    GENESIS,
    MESSAGE,
    OPENED,
    QUOTA,
    TAKE,
    AccountRow,
    BudgetState,
    Entry,
    Receipt,
    digest,
    make_slot,
)
from nearveil.ledger.errors import CorruptLedgerError

_SLACK = 10**9  # accountants of different versions may differ by one part in this many

Witnessed = Mapping[str, tuple[int, str]]
"""The records of the witness: sequence and hash by the digest of an account's name."""


@dataclass(frozen=True)
class LedgerProblem:
    """One problem of a ledger."""

    account: str
    sequence: int | None  #: the entry, if it is about one
    text: str

    def __str__(self) -> str:
        subject = f"account {self.account}" + ("" if self.sequence is None else f", entry {self.sequence}")
        return f"{subject}: {self.text}"


@dataclass(frozen=True)
class Verification:
    """The result of :meth:`Ledger.verify`; true if there are no problems.

    Examples
    --------
    >>> print(Verification(1, 2, (LedgerProblem("camera", 2, "does not match its hash"),)))
    2 entries of 1 accounts checked: 1 problems.
    account camera, entry 2: does not match its hash
    """

    accounts: int  #: number of accounts checked
    entries: int
    problems: tuple[LedgerProblem, ...]

    @property
    def ok(self) -> bool:
        """Whether there are no problems."""
        return not self.problems

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        checked = f"{self.entries} entries of {self.accounts} accounts"
        if self.ok:
            return f"{checked} checked: all is well."
        return "\n".join([f"{checked} checked: {len(self.problems)} problems.", *map(str, self.problems)])


def verify(database: LedgerDatabase, account: str | None, receipts: Sequence[Receipt]) -> Verification:
    """Verify one account, or all."""
    # Read the witness before the database: spends continue, and it must not be ahead of the snapshot.
    witness = database.witness
    witnessed: Witnessed = {} if witness is None or not witness.exists() else witness.read()

    def work(connection: sa.Connection) -> Verification:
        names = [account] if account is not None else list_accounts(connection)
        problems = [] if account is not None else _find_missing_accounts(names, witnessed, receipts)
        count = 0
        for name in names:
            marks = [(*witnessed[digest(name)], "its witness")] if digest(name) in witnessed else []
            marks += [(item.sequence, item.hash, "a receipt") for item in receipts if item.account == name]
            replay = _Replay(connection, name, marks)
            problems += replay.run()
            count += replay.count
        return Verification(len(names), count, tuple(problems))

    return database.read(work)


def find_witness_problems(database: LedgerDatabase, witnessed: Witnessed) -> list[str]:
    """Return the problems of a database that is behind its witness, without a replay."""

    def work(connection: sa.Connection) -> list[str]:
        names = list_accounts(connection)
        problems = [problem.text for problem in _find_missing_accounts(names, witnessed, ())]
        for name in names:
            sequence, hash_ = witnessed.get(digest(name), (0, GENESIS))
            if find_hash(connection, name, sequence) != hash_:
                problems.append(f"account {name!r} does not hold entry {sequence} as its witness has seen it")
        return problems

    return database.read(work)


def _find_missing_accounts(
    names: Sequence[str], witnessed: Witnessed, receipts: Sequence[Receipt]
) -> list[LedgerProblem]:
    problems = []
    missing = set(witnessed) - {digest(name) for name in names}
    if missing:
        text = f"{len(missing)} account(s) that the witness has seen are not in the database"
        problems.append(LedgerProblem("?", None, text))
    for receipt in receipts:
        if receipt.account not in names:
            text = "there is a receipt of this account, and it is not in the database"
            problems.append(LedgerProblem(receipt.account, None, text))
    return problems


class _Replay:
    """The replay of one account."""

    def __init__(self, connection: sa.Connection, name: str, marks: Sequence[tuple[int, str, str]]) -> None:
        self.connection, self.name, self.count = connection, name, 0
        self._marks = marks  # sequence, hash and source of what was seen elsewhere
        self._row: AccountRow | None = None
        self._sequence, self._head = 0, GENESIS
        self._shares: dict[str, BudgetState] = {}  # quotas and caps
        self._debits: dict[str, Charge] = {}
        self._counted: set[str] = set()  # keys that were counted in a cap
        self._answered: set[str] = set()  # keys with a message
        self._problems: list[LedgerProblem] = []

    def run(self) -> list[LedgerProblem]:
        """Return the problems of the account."""
        for entry in read_entries(self.connection, self.name):
            self._check_chain(entry)
            try:
                self._apply(entry)
                self._check_states(entry)
            except (AttributeError, KeyError, TypeError, ValueError):
                self._report(entry, "is corrupted")
            self._sequence, self._head, self.count = entry.sequence, entry.hash, self.count + 1
        for sequence, _, source in self._marks:
            if sequence > self._sequence:
                text = f"rolled back: it ends at entry {self._sequence}, and {source} has seen entry {sequence}"
                self._report(None, text)
        self._check_rows()
        return self._problems

    def _report(self, entry: Entry | None, text: str) -> None:
        self._problems.append(LedgerProblem(self.name, None if entry is None else entry.sequence, text))

    def _check_chain(self, entry: Entry) -> None:
        if entry.sequence != self._sequence + 1:
            self._report(entry, f"entries {self._sequence + 1} to {entry.sequence - 1} are missing")
        if entry.slot != make_slot(entry.account, entry.key, entry.kind):
            self._report(entry, "has the index value of another key")
        if entry.compute_hash(self._head) != entry.hash:
            self._report(entry, "does not match its hash: it was edited, or an entry before it")
        for sequence, hash_, source in self._marks:
            if sequence == entry.sequence and hash_ != entry.hash:
                self._report(entry, f"differs from what {source} has seen")

    def _apply(self, entry: Entry) -> None:
        """Repeat the effect of an entry on account, quotas and caps."""
        steps = {
            OPENED: self._open_account,
            QUOTA: self._open_share,
            CAP: self._open_share,
            DEBIT: self._debit,
            TAKE: self._count_in_cap,
            MESSAGE: self._store_message,
        }
        if entry.kind not in steps or (entry.kind == OPENED) != (self._row is None):
            self._report(entry, "has a kind that is not allowed here")
        else:
            steps[entry.kind](entry)

    def _check_states(self, entry: Entry) -> None:
        if self._row is not None and entry.state != self._row.digest:
            self._report(entry, "records other totals than the sum of the entries up to it")
        share = self._shares.get(entry.client) if entry.client is not None else None
        if entry.client_state != (None if share is None else share.digest):
            self._report(entry, "records other totals of the client than the sum of the entries up to it")

    def _open_account(self, entry: Entry) -> None:
        state = BudgetState.open(entry.content["terms"])
        self._row = AccountRow(self.name, entry.content["opening"], state, GENESIS)
        cost = find_plan_cost(state.budget)
        if cost is not None and cost > state.budget.epsilon * (1 + 1 / _SLACK):
            self._report(entry, "opens a plan that costs more than its budget")
        if _has_wide_limits(state.budget):
            self._report(entry, "has limits that are wider than its budget")

    def _open_share(self, entry: Entry) -> None:
        budget = parse_budget(entry.content["terms"])
        if entry.client is None or entry.client in self._shares or self._row is None:
            self._report(entry, "opens a quota or a cap without a name, or twice")
            return
        self._shares[entry.client] = BudgetState.open(budget.terms(), entry.sequence)
        if entry.kind == CAP and not isinstance(budget, PlanBudget):
            self._report(entry, "opens a cap without a plan")
        if entry.kind == QUOTA and not self._row.state.budget.contains(budget):
            self._report(entry, "opens a quota that is not a part of the account")
        if entry.kind == QUOTA and _has_wide_limits(budget):
            self._report(entry, "has limits that are wider than its budget")

    def _debit(self, entry: Entry) -> None:
        content = entry.content
        charge = tuple((str(text), int(times)) for text, times in content["charge"])
        if entry.key is None or entry.key in self._debits or self._row is None:
            self._report(entry, "debits a key that was spent before, or no key")
            return
        self._debits[entry.key] = charge
        state = self._pay(entry, self._row.state, charge, content["price"], "")
        self._row = replace(self._row, state=state)
        if entry.client is not None and entry.client not in self._shares:
            self._report(entry, "debits a client without a quota")
        elif entry.client is not None:
            quota = self._shares[entry.client]
            self._shares[entry.client] = self._pay(entry, quota, charge, content["client_price"], " (of the client)")

    def _count_in_cap(self, entry: Entry) -> None:
        if entry.key not in self._debits or entry.key in self._counted or entry.client not in self._shares:
            self._report(entry, "counts a key without a debit, or twice, or in a cap that does not exist")
            return
        self._counted.add(entry.key)
        cap, charge = self._shares[entry.client], self._debits[entry.key]
        self._shares[entry.client] = self._pay(entry, cap, charge, entry.content["price"], " (of the cap)")

    def _store_message(self, entry: Entry) -> None:
        if entry.key not in self._debits or entry.key in self._answered:
            self._report(entry, "stores a message for a key that has no debit, or has a message")
        if entry.key is not None:
            self._answered.add(entry.key)
        if not isinstance(entry.content["message"], str):
            self._report(entry, "has no message")

    def _pay(
        self, entry: Entry, state: BudgetState, charge: Charge, recorded: list[int | None], of: str
    ) -> BudgetState:
        """Return the state after a recorded price, and report a price that is too low or a budget that is exceeded."""
        price: Amounts = tuple(recorded)
        try:
            due = state.budget.price(charge)
            if not all(_is_enough(*pair) for pair in zip(price, due, strict=True)):
                self._report(entry, f"was charged less than its events cost{of}")
        except UnpricedError:
            self._report(entry, f"pays for events that this budget cannot price{of}")
        state = replace(state, totals=add_amounts(state.totals, price), sequence=entry.sequence)
        if not state.budget.allows(state.totals):
            self._report(entry, f"exceeds the budget{of}")
        return state

    def _check_rows(self) -> None:
        """Compare the replayed states with the rows that spending reads."""
        try:
            stored = find_account(self.connection, self.name)
            if stored is None:
                self._report(None, "has entries but no row" if self._sequence else "does not exist")
                return
            replayed = self._row and replace(
                self._row, state=replace(self._row.state, sequence=self._sequence), head=self._head
            )
            if stored != replayed:
                self._report(None, "its row is not the sum of its entries")
            clients = sa.select(quotas.c.client).where(quotas.c.account == self.name)
            for client in sorted({*self._shares, *self.connection.execute(clients).scalars()}):
                if find_quota(self.connection, self.name, client) != self._shares.get(client):
                    self._report(None, f"the quota of client {client!r} is not the sum of its entries")
        except CorruptLedgerError:
            self._report(None, "its row, or that of a quota, is corrupted")


def _has_wide_limits(budget: Budget) -> bool:
    """Return whether limits are wider than those of a new budget with the same epsilon and delta."""
    if isinstance(budget, PureBudget):
        limits = PureBudget.open(budget.epsilon).limits
    elif isinstance(budget, FilterBudget):
        fresh = FilterBudget.open(budget.epsilon, budget.delta)
        if fresh.orders != budget.orders:  # of another version, which chose other orders
            return False
        limits = fresh.limits
    else:
        return False
    return any(stored > right + abs(right) // _SLACK for stored, right in zip(budget.limits, limits, strict=True))


def _is_enough(recorded: int | None, due: int | None) -> bool:
    if recorded is None or due is None:
        return recorded is None
    return recorded >= due - due // _SLACK
