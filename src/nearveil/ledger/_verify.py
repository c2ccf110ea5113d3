"""Verification: replay every entry, and compare with the stored rows, the witness and receipts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import sqlalchemy as sa

from nearveil.ledger import budget as budgets
from nearveil.ledger import store
from nearveil.ledger.budget import Charge, PlanBudget, UnpricedError
from nearveil.ledger.database import LedgerDatabase
from nearveil.ledger.errors import CorruptLedgerError
from nearveil.ledger.store import BudgetRow, Entry, Receipt

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
        names = [account] if account is not None else store.list_accounts(connection)
        problems: list[LedgerProblem] = []
        count = 0
        if account is None:
            problems += [LedgerProblem("?", None, text) for text in _find_missing_accounts(names, witnessed)]
            text = "there is a receipt of this account, and it is not in the database"
            problems += [LedgerProblem(item.account, None, text) for item in receipts if item.account not in names]
        for name in names:
            marks = [(*witnessed[store.digest(name)], "its witness")] if store.digest(name) in witnessed else []
            marks += [(item.sequence, item.hash, "a receipt") for item in receipts if item.account == name]
            replay = _Replay(connection, name, marks)
            problems += replay.run()
            count += replay.count
        return Verification(len(names), count, tuple(problems))

    return database.read(work)


def find_witness_problems(database: LedgerDatabase, witnessed: Witnessed) -> list[str]:
    """Return the problems of a database that is behind its witness, without a replay."""

    def work(connection: sa.Connection) -> list[str]:
        names = store.list_accounts(connection)
        problems = _find_missing_accounts(names, witnessed)
        for name in names:
            sequence, hash_ = witnessed.get(store.digest(name), (0, store.GENESIS))
            if store.find_hash(connection, name, sequence) != hash_:
                problems.append(f"account {name!r} does not hold entry {sequence} as its witness has seen it")
        return problems

    return database.read(work)


def _find_missing_accounts(names: Sequence[str], witnessed: Witnessed) -> list[str]:
    missing = set(witnessed) - set(map(store.digest, names))
    return [f"{len(missing)} account(s) that the witness has seen are not in the database"] if missing else []


class _Replay:
    """The replay of one account: repeats every entry and compares the result with the hashes, states and rows."""

    def __init__(self, connection: sa.Connection, name: str, marks: Sequence[tuple[int, str, str]]) -> None:
        self.connection, self.name, self.count = connection, name, 0
        self._marks = marks  # (sequence, hash, source) of entries that the witness or a receipt has seen
        self._sequence, self._head = 0, store.GENESIS
        self._rows: dict[str | None, BudgetRow] = {}  # quotas and caps by name, and the account under None
        self._charges: dict[str | None, Charge] = {}  # of debits, by key
        self._slots: set[str | None] = set()
        self._problems: list[LedgerProblem] = []

    def run(self) -> list[LedgerProblem]:
        """Return the problems of the account."""
        for entry in store.read_entries(self.connection, self.name):
            self._check_chain(entry)
            try:
                self._apply(entry)
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
        if entry.slot != store.make_slot(entry.account, entry.key, entry.kind) or entry.slot in self._slots:
            self._report(entry, "has the index value of another entry")
        self._slots |= {entry.slot} - {None}
        if entry.compute_hash(self._head) != entry.hash:
            self._report(entry, "does not match its hash: it was edited, or an entry before it")
        for sequence, hash_, source in self._marks:
            if sequence == entry.sequence and hash_ != entry.hash:
                self._report(entry, f"differs from what {source} has seen")

    def _apply(self, entry: Entry) -> None:
        """Repeat the effect of an entry on the account, its quotas and its caps; compare the totals after it."""
        content = entry.content
        if entry.kind == store.OPENED and None not in self._rows:
            self._open(entry, opening=content["opening"])
        elif None not in self._rows:
            self._report(entry, "comes before the account is opened")
        elif entry.kind in (store.QUOTA, store.CAP) and entry.client is not None and entry.client not in self._rows:
            self._open(entry)
        elif entry.kind == store.DEBIT and entry.key is not None:
            self._charges[entry.key] = entry.charge
            self._replay_debit(entry, None, content["price"])
            if entry.client is not None:
                self._replay_debit(entry, entry.client, content["client_price"])
        elif entry.kind == store.TAKE and entry.key in self._charges:
            self._replay_debit(entry, str(entry.client), content["price"])
        elif not (
            (entry.kind == store.MESSAGE and entry.key in self._charges and isinstance(content["message"], str))
            or (entry.kind == store.LOG and entry.key is not None and isinstance(content["log"], str))
        ):
            self._report(entry, "does not follow from the entries before it")
        if None in self._rows and entry.state != self._rows[None].digest:
            self._report(entry, "records other totals than the sum of the entries up to it")
        share = None if entry.client is None else self._rows.get(entry.client)
        if entry.client_state != (None if share is None else share.digest):
            self._report(entry, "records other totals of the client than the sum of the entries up to it")

    def _open(self, entry: Entry, opening: str = "") -> None:
        """Open the account, a quota or a cap, and check that its limits are not wider than its budget."""
        budget = budgets.parse_budget(entry.content["terms"])
        terms = entry.content["terms"]
        self._rows[entry.client] = BudgetRow(self.name, entry.client, terms, budget.zero, entry.sequence, opening)
        if entry.kind == store.CAP:
            if not isinstance(budget, PlanBudget):
                self._report(entry, "opens a cap without a plan")
            return
        if entry.kind == store.QUOTA and not self._rows[None].budget.contains(budget):
            self._report(entry, "opens a quota that is not a part of the account")
        cost = budgets.find_plan_cost(budget)
        if cost is not None:
            is_wide = cost > budget.epsilon * (1 + 1 / _SLACK)
        else:
            fresh = budgets.open_budget(budget.epsilon, budget.delta, None, "replace", budget.releases)
            # The limits of another version, which chose other orders, cannot be compared.
            limits = fresh.limits if replace(fresh, limits=budget.limits) == budget else budget.limits
            pairs = zip(budget.limits, limits, strict=True)
            is_wide = any(stored > limit + abs(limit) // _SLACK for stored, limit in pairs)
        if is_wide:
            self._report(entry, "has limits that are wider than its budget")

    def _replay_debit(self, entry: Entry, client: str | None, price: Sequence[int | None]) -> None:
        """Add a recorded price to the totals; report one that is too low, and a budget that is exceeded."""
        row, payer = self._rows.get(client), "" if client is None else f" (of client {client})"
        if row is None:
            self._report(entry, "debits a quota or a cap that was not opened")
            return
        try:
            due = row.budget.price(self._charges[entry.key])
            if not all(_is_enough(*pair) for pair in zip(price, due, strict=True)):
                self._report(entry, f"was charged less than its events cost{payer}")
        except UnpricedError:
            self._report(entry, f"pays for events that this budget cannot price{payer}")
        totals = budgets.add_amounts(row.totals, tuple(price))
        self._rows[client] = replace(row, totals=totals, sequence=entry.sequence)
        if not row.budget.allows(totals):
            self._report(entry, f"exceeds the budget{payer}")

    def _check_rows(self) -> None:
        """Compare the replayed states with the rows that spending reads."""
        account = self._rows.pop(None, None)
        try:
            stored = store.find_row(self.connection, self.name)
            if stored is None:
                self._report(None, "has entries but no row" if self._sequence else "does not exist")
                return
            if stored != (account and replace(account, sequence=self._sequence, head=self._head)):
                self._report(None, "its row is not the sum of its entries")
            if store.list_shares(self.connection, self.name) != self._rows:
                self._report(None, "the quotas and caps are not the sum of its entries")
        except CorruptLedgerError:
            self._report(None, "its row, or that of a quota, is corrupted")


def _is_enough(recorded: int | None, due: int | None) -> bool:
    if recorded is None or due is None:
        return recorded is None
    return recorded >= due - due // _SLACK
