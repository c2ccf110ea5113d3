"""The check: replay every entry from the first, and compare with what the database, the witness and receipts say."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import sqlalchemy as sa

from nearveil.ledger._store import (
    GENESIS,
    Held,
    Receipt,
    Row,
    accounts,
    digest,
    entries,
    find_book,
    find_quota,
    make_slot,
    quotas,
    read_entries,
)
from nearveil.ledger.account import Core, find_plan_cost
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
from nearveil.ledger.errors import CorruptLedgerError

_SLACK = 10**9  # accountants of different versions may differ by one part in this many

Seen = Mapping[str, tuple[int, str]]
"""Of the witness: sequence and hash by the digest of an account's name."""


@dataclass(frozen=True)
class LedgerProblem:
    """Something that does not fit."""

    account: str
    sequence: int | None  #: the entry, where it is about one
    text: str

    def __str__(self) -> str:
        where = f"account {self.account}" + ("" if self.sequence is None else f", entry {self.sequence}")
        return f"{where}: {self.text}"


@dataclass(frozen=True)
class Verification:
    """What :meth:`Ledger.verify` found; true in a condition if all is well.

    Examples
    --------
    >>> print(Verification(1, 2, (LedgerProblem("camera", 2, "does not fit its hash"),)))
    2 entries of 1 accounts checked: 1 problems.
    account camera, entry 2: does not fit its hash
    """

    accounts: int  #: how many were checked
    entries: int
    problems: tuple[LedgerProblem, ...]

    @property
    def ok(self) -> bool:
        """Whether all is well."""
        return not self.problems

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        checked = f"{self.entries} entries of {self.accounts} accounts"
        if self.ok:
            return f"{checked} checked: all is well."
        return "\n".join([f"{checked} checked: {len(self.problems)} problems.", *map(str, self.problems)])


def verify(core: Core, account: str | None, receipts: Sequence[Receipt]) -> Verification:
    """Check one account, or all."""
    # The witness first: spends go on, and it must not have seen more than the view that is checked.
    seen: Seen = {} if core.witness is None or not core.witness.exists() else core.witness.known()

    def work(connection: sa.Connection) -> Verification:
        names = [account] if account is not None else list_accounts(connection)
        problems = [LedgerProblem(name, None, text) for name, text in _find_lost(names, account, seen, receipts)]
        counted = 0
        for name in names:
            marks = [(seen[digest(name)], "its witness")] if digest(name) in seen else []
            marks += [((one.sequence, one.hash), "a receipt") for one in receipts if one.account == name]
            check = _Replay(connection, name)
            problems += check.run(marks)
            counted += check.counted
        return Verification(len(names), counted, tuple(problems))

    return core.read(work)


def find_witness_problems(core: Core, seen: Seen) -> list[str]:
    """Return where the database falls short of what the witness has seen, without replaying anything."""

    def work(connection: sa.Connection) -> list[str]:
        names = list_accounts(connection)
        problems = [text for _, text in _find_lost(names, None, seen, ())]
        for name in names:
            if digest(name) in seen:
                sequence, value = seen[digest(name)]
                query = sa.select(entries.c.hash).where(entries.c.account == name, entries.c.sequence == sequence)
                if connection.execute(query).scalar_one_or_none() != value:
                    problems.append(f"account {name!r} does not hold entry {sequence} as its witness has seen it")
        return problems

    return core.read(work)


def list_accounts(connection: sa.Connection) -> list[str]:
    """Return the names of all accounts, also of those whose row was removed."""
    rows = sa.union(sa.select(accounts.c.name), sa.select(entries.c.account))
    return sorted(connection.execute(rows).scalars())


def _find_lost(
    names: list[str], asked: str | None, seen: Seen, receipts: Sequence[Receipt]
) -> Iterator[tuple[str, str]]:
    """Yield accounts that somebody remembers and that are not there."""
    if asked is None:
        missing = set(seen) - {digest(name) for name in names}
        if missing:
            yield "?", f"{len(missing)} account(s) that the witness has seen are not in the database"
    for receipt in receipts:
        if asked is None and receipt.account not in names:
            yield receipt.account, "a receipt knows this account, and it is not in the database"


@dataclass
class _Replay:
    """One account, replayed."""

    connection: sa.Connection
    name: str
    counted: int = 0
    head: str = GENESIS
    opening: str = ""
    held: Held | None = None
    clients: dict[str, Held] = field(default_factory=dict)
    debits: dict[str, Charge] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    answered: set[str] = field(default_factory=set)

    def run(self, marks: Sequence[tuple[tuple[int, str], str]]) -> list[LedgerProblem]:
        wanted = {
            sequence: [(value, who) for (at, value), who in marks if at == sequence] for (sequence, _), _ in marks
        }
        problems: list[LedgerProblem] = []
        last = 0
        for row, kept in read_entries(self.connection, self.name):
            found = list(self._entry(row, kept, last))
            found += [
                f"differs from what {who} has seen" for value, who in wanted.get(row.sequence, ()) if value != kept
            ]
            problems += [LedgerProblem(self.name, row.sequence, text) for text in found]
            self.head, last, self.counted = kept, row.sequence, self.counted + 1
        late = [(at, who) for (at, _), who in marks if at > last]
        problems += [
            LedgerProblem(self.name, None, f"rolled back: it ends at entry {last}, and {who} has seen entry {at}")
            for at, who in late
        ]
        return problems + [LedgerProblem(self.name, None, text) for text in self._rows(last)]

    def _entry(self, row: Row, kept: str, last: int) -> Iterator[str]:
        if row.sequence != last + 1:
            yield f"entries {last + 1} to {row.sequence - 1} are missing"
        if row.slot != make_slot(row.account, row.key, row.kind):
            yield "is not found by its key"
        if row.hash(self.head) != kept:
            yield "does not fit its hash: it was changed, or what comes before it"
        steps: dict[str, Callable[[Row], Iterator[str]]] = {
            "opened": self._opened,
            "quota": self._quota,
            "cap": self._cap,
            "debit": self._debit,
            "take": self._take,
            "message": self._message,
        }
        try:
            if row.kind not in steps or (row.kind == "opened") != (self.held is None):
                yield "is of a kind that has no place here"
                return
            yield from steps[row.kind](row)
        except (AttributeError, KeyError, TypeError, ValueError):
            yield "cannot be read"
            return
        yield from self._states(row)

    def _states(self, row: Row) -> Iterator[str]:
        if self.held is not None and row.state != digest(self.opening, self.held.state):
            yield "tells other totals than the entries up to it add up to"
        client = self.clients.get(row.client) if row.client is not None else None
        if row.client_state != (None if client is None else client.state):
            yield "tells other totals of the client than the entries up to it add up to"

    def _opened(self, row: Row) -> Iterator[str]:
        content = row.content
        self.opening, terms = content["opening"], content["terms"]
        budget = parse_budget(terms)
        self.held = Held(terms, budget.nothing, row.sequence)
        cost = find_plan_cost(budget)
        if cost is not None and cost > budget.epsilon * (1 + 1 / _SLACK):
            yield "opened a plan that costs more than its budget"
        yield from _check_limits(budget)

    def _quota(self, row: Row) -> Iterator[str]:
        budget = parse_budget(row.content["terms"])
        if row.client is None or row.client in self.clients or self.held is None:
            yield "gives a quota that cannot be"
            return
        self.clients[row.client] = Held(budget.terms(), budget.nothing, row.sequence)
        if not self.held.budget.contains(budget):
            yield "gives a quota that is no part of the account"
        yield from _check_limits(budget)

    def _cap(self, row: Row) -> Iterator[str]:
        budget = parse_budget(row.content["terms"])
        if row.client is None or row.client in self.clients or not isinstance(budget, PlanBudget):
            yield "opens a cap that cannot be"
            return
        self.clients[row.client] = Held(budget.terms(), budget.nothing, row.sequence)

    def _debit(self, row: Row) -> Iterator[str]:
        content = row.content
        charge = tuple((str(text), int(times)) for text, times in content["charge"])
        if row.key is None or row.key in self.debits or self.held is None:
            yield "debits a key that was spent before, or none"
            return
        self.debits[row.key] = charge
        self.held, wrong = _replay_payment(self.held, charge, tuple(content["price"]), row.sequence)
        yield from wrong
        if row.client is not None:
            if row.client not in self.clients:
                yield "debits a client that has no quota"
                return
            price = tuple(content["client_price"])
            self.clients[row.client], wrong = _replay_payment(self.clients[row.client], charge, price, row.sequence)
            yield from (f"{text} (of the client)" for text in wrong)

    def _take(self, row: Row) -> Iterator[str]:
        if row.key not in self.debits or row.key in self.taken or row.client not in self.clients:
            yield "counts in a cap what has no debit, or was counted, or in none that is there"
            return
        self.taken.add(row.key)
        held, price = self.clients[row.client], tuple(row.content["price"])
        self.clients[row.client], wrong = _replay_payment(held, self.debits[row.key], price, row.sequence)
        yield from (f"{text} (of the cap)" for text in wrong)

    def _message(self, row: Row) -> Iterator[str]:
        if row.key not in self.debits or row.key in self.answered:
            yield "stores a message for a key that has no debit, or has a message"
        if row.key is not None:
            self.answered.add(row.key)
        if not isinstance(row.content["message"], str):
            yield "holds no message"

    def _rows(self, last: int) -> Iterator[str]:
        """Compare with the rows that spending reads."""
        try:
            book = find_book(self.connection, self.name)
            if book is None:
                yield "has entries and no row of its own" if last else "does not exist"
                return
            told = (book.opening, book.held.terms, book.held.totals, book.held.sequence, book.head)
            if self.held is None or told != (self.opening, self.held.terms, self.held.totals, last, self.head):
                yield "its row is not what its entries add up to"
            here = sa.select(quotas.c.client).where(quotas.c.account == self.name)
            for client in sorted({*self.clients, *self.connection.execute(here).scalars()}):
                if find_quota(self.connection, self.name, client) != self.clients.get(client):
                    yield f"the quota of client {client!r} is not what the entries add up to"
        except CorruptLedgerError:
            yield "its row, or that of a quota, cannot be read"


def _check_limits(budget: Budget) -> Iterator[str]:
    """Complain of limits that are wider than the budget they stand for."""
    if isinstance(budget, PureBudget):
        fresh: Budget = PureBudget.open(budget.epsilon)
    elif isinstance(budget, FilterBudget):
        fresh = FilterBudget.open(budget.epsilon, budget.delta)
        if fresh.orders != budget.orders:  # of another version, which chose other orders
            return
    else:
        return
    if any(kept > right + abs(right) // _SLACK for kept, right in zip(budget.limits, fresh.limits, strict=True)):
        yield "has limits that are wider than its budget"


def _replay_payment(held: Held, charge: Charge, price: Amounts, sequence: int) -> tuple[Held, list[str]]:
    """Return what is held after a recorded price was paid, and what is wrong with it."""
    wrong = []
    try:
        right = held.budget.price(charge)
        if not all(_is_enough(recorded, due) for recorded, due in zip(price, right, strict=True)):
            wrong.append("was charged less than its events cost")
    except UnpricedError:
        wrong.append("pays for events that this budget does not take")
    after = replace(held, totals=add_amounts(held.totals, price), sequence=sequence)
    if not held.budget.allows(after.totals):
        wrong.append("passes the budget")
    return after, wrong


def _is_enough(recorded: int | None, due: int | None) -> bool:
    if recorded is None or due is None:
        return recorded is None
    return recorded >= due - due // _SLACK
