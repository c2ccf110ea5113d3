"""What a ledger stores: entries, rows with the state they add up to, and their tables. Nothing in it is private."""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, TypeVar

import sqlalchemy as sa

from nearveil.ledger import budget as budgets
from nearveil.ledger.budget import Amounts, Budget, Charge, UnpricedError
from nearveil.ledger.errors import AccountError, CorruptLedgerError, LedgerError, RolledBackError
from nearveil.privacy.checks import check_text
from nearveil.storage import create_tables

if TYPE_CHECKING:
    from dp_accounting import DpEvent

    from nearveil.ledger.witness import Witness

T = TypeVar("T")

# Kinds of entries, as ledgers store them.
OPENED: Final = "opened"
QUOTA: Final = "quota"
CAP: Final = "cap"
DEBIT: Final = "debit"
TAKE: Final = "take"  # counts the debit before it in a cap
MESSAGE: Final = "message"
LOG: Final = "log"  # of public facts, such as queries, that are stored before they are answered

GENESIS = "0" * 64
"""The hash before the first entry of an account."""


def digest(*texts: str) -> str:
    """Return the SHA-256 of a sequence of texts, in hexadecimal."""
    return hashlib.sha256(json.dumps(texts, separators=(",", ":")).encode()).hexdigest()


def make_slot(account: str, key: str | None, kind: str) -> str | None:
    """Return the unique index value of the debit, or the message, of a key; None for entries without a key."""
    return None if key is None else digest(account, key, kind)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One entry of an account's history. Its hash covers it and, through the previous hash, all entries before it."""

    account: str
    sequence: int  #: 1, 2, 3, ... in every account; times are only informative
    #: "opened", "quota", "cap", "debit", "take" (the previous debit counts in a cap, too), "message" or "log"
    kind: str
    time: str  #: UTC, from the clock of the writer
    key: str | None
    client: str | None  #: the client of a quota, or the name of a cap
    payload: str  #: JSON: terms, charge and price, price alone, or message
    state: str  #: digest of the account's terms and totals after the entry
    client_state: str | None  #: the same for the quota or the cap, if the entry changes one
    nonce: str  #: random; identifies the call that wrote the entry
    slot: str | None  #: unique; see `make_slot`
    hash: str = ""

    def compute_hash(self, previous: str) -> str:
        """Return the hash of the entry after the hash `previous`."""
        fields = asdict(self)
        del fields["hash"]
        return hashlib.sha256(budgets.canonical_json({**fields, "previous": previous}).encode()).hexdigest()

    @property
    def content(self) -> dict[str, Any]:
        """The parsed payload."""
        content = json.loads(self.payload)
        if not isinstance(content, dict):
            raise TypeError("payload must be a JSON object")
        return content

    @property
    def charge(self) -> Charge:
        """The charge of a debit; empty for other kinds of entries."""
        return tuple((str(text), int(times)) for text, times in self.content.get("charge", ()))

    @property
    def events(self) -> tuple[tuple[DpEvent, int], ...]:
        """The single mechanisms that a debit paid for, with counts."""
        return self._decode(lambda: budgets.read_charge(self.charge))

    @property
    def event_values(self) -> list[dict[str, Any]]:
        """The same as JSON values, read without an accountant."""
        return self._decode(lambda: [{"count": times, "event": dict(json.loads(text))} for text, times in self.charge])

    @cached_property
    def message(self) -> bytes | None:
        """The stored message, or the text of a log; None for other kinds of entries."""
        text = self._decode(lambda: self.content.get("message", self.content.get("log")))
        return None if text is None else self._decode(lambda: base64.b64decode(text, validate=True))

    def _decode(self, decode: Callable[[], T]) -> T:
        try:
            return decode()
        except (AttributeError, TypeError, ValueError):
            raise CorruptLedgerError(
                f"Entry {self.sequence} of account {self.account!r} is corrupted; verify() lists the problems."
            ) from None


@dataclass(frozen=True)
class Receipt:
    """The latest entry of an account. Store it outside the ledger and pass it to :meth:`Ledger.verify` later.

    Examples
    --------
    >>> print(Receipt("images", 3, "0" * 64))
    3:0000000000000000000000000000000000000000000000000000000000000000:images
    >>> Receipt.parse(f"3:{'0' * 64}:images").sequence
    3
    """

    account: str
    sequence: int
    hash: str

    def __str__(self) -> str:
        return f"{self.sequence}:{self.hash}:{self.account}"

    @classmethod
    def parse(cls, text: str) -> Receipt:
        """Parse a printed receipt."""
        sequence, _, rest = text.strip().partition(":")
        hash_, _, account = rest.partition(":")
        if not (sequence.isdecimal() and len(hash_) == len(GENESIS) and account):
            raise ValueError("receipt must be SEQUENCE:HASH:ACCOUNT, as it was printed")
        return cls(account, int(sequence), hash_)


@dataclass(frozen=True)
class BudgetRow:
    """The stored state of an account, or of a quota or a cap of it: terms that never change, and totals."""

    account: str
    client: str | None  # the client of a quota, or the name of a cap; None for the account itself
    terms: str
    totals: Amounts
    sequence: int = 0  # of the latest entry that changed it
    opening: str = ""  # of an account, JSON: owner, protects, unit, relation
    head: str = GENESIS  # of an account: the hash of its latest entry

    @property
    def budget(self) -> Budget:
        """The budget of the terms."""
        return budgets.parse_budget(self.terms)

    @property
    def digest(self) -> str:
        """The digest that entries record."""
        state = digest(self.terms, budgets.canonical_json(self.totals))
        return digest(self.opening, state) if self.client is None else state

    @property
    def receipt(self) -> Receipt:
        """The receipt of the latest entry of an account."""
        return Receipt(self.account, self.sequence, self.head)

    def after(self, charge: Charge) -> tuple[BudgetRow, Amounts]:
        """Return the state after a charge, and its price; raise UnaffordableError if the budget does not cover it."""
        budget = self.budget
        try:
            price = budget.price(charge)
        except UnpricedError:
            raise UnaffordableError(self) from None
        totals = budgets.add_amounts(self.totals, price)
        if not budget.allows(totals):
            raise UnaffordableError(self)
        return replace(self, totals=totals), price


class UnaffordableError(Exception):
    """The budget of `row` does not cover a charge: rolls the transaction back."""

    def __init__(self, row: BudgetRow) -> None:
        super().__init__()
        self.row = row


_VERSION = "0002"
_EARLIER_VERSIONS = ("0001",)  # without an identity

_metadata = sa.MetaData()


def _make_column(name: str, *rules: Any, type_: Any = sa.Text, nullable: bool = False, **options: Any) -> Any:
    return sa.Column(name, type_, *rules, nullable=nullable, **options)


versions = sa.Table(
    "nearveil_ledger_version", _metadata, _make_column("version_num", type_=sa.String(32), primary_key=True)
)
ledgers = sa.Table("nearveil_ledger", _metadata, _make_column("identity", primary_key=True))
accounts = sa.Table(
    "nearveil_account",
    _metadata,
    _make_column("name", primary_key=True),
    *map(_make_column, ("opening", "terms", "totals")),
    _make_column("sequence", type_=sa.BigInteger),
    _make_column("head"),
)
quotas = sa.Table(  # quotas of clients, and caps
    "nearveil_quota",
    _metadata,
    _make_column("account", sa.ForeignKey("nearveil_account.name"), primary_key=True),
    _make_column("client", primary_key=True),
    *map(_make_column, ("terms", "totals")),
    _make_column("sequence", type_=sa.BigInteger),
)
entries = sa.Table(
    "nearveil_entry",
    _metadata,
    _make_column("account", sa.ForeignKey("nearveil_account.name"), primary_key=True),
    _make_column("sequence", type_=sa.BigInteger, primary_key=True, autoincrement=False),
    *map(_make_column, ("kind", "time")),
    *(_make_column(name, nullable=True) for name in ("key", "client")),
    *map(_make_column, ("nonce", "payload", "state")),
    _make_column("client_state", nullable=True),
    _make_column("hash"),
    # Each lookup has exactly one index. With a second one, the planner of a new table, which has no statistics, might
    # choose and keep an index that reads all entries of the account.
    _make_column("slot", nullable=True, unique=True),
)
_ENTRY_COLUMNS = [entries.c[field.name] for field in fields(Entry)]


def find_version(connection: sa.Connection) -> str | None:
    """Return the version of the tables, None if there are none; raise if it is newer than this nearveil."""
    if not sa.inspect(connection).has_table(versions.name):
        return None
    version = connection.execute(sa.select(versions.c.version_num)).scalar_one_or_none()
    if version not in (None, _VERSION, *_EARLIER_VERSIONS):
        raise LedgerError(f"this ledger has version {version}, which is newer: install a newer nearveil")
    return version


def is_current(connection: sa.Connection) -> bool:
    """Return whether the tables have the current version; raise if it is newer."""
    return find_version(connection) == _VERSION


def find_identity(connection: sa.Connection) -> str | None:
    """Return the identity that all copies of a ledger share; None if the tables have an earlier version."""
    return connection.execute(sa.select(ledgers.c.identity)).scalar_one() if is_current(connection) else None


def migrate(connection: sa.Connection) -> tuple[None, None]:
    """Create or migrate the tables, inside the caller's write transaction."""
    create_tables(connection, _metadata)  # one process at a time
    if not is_current(connection):
        # Copies of version 0001 must get the same identity: the hash of the first account's opening.
        first = sa.select(entries.c.hash).where(entries.c.sequence == 1).order_by(entries.c.time, entries.c.hash)
        hash_ = connection.execute(first.limit(1)).scalar_one_or_none()
        identity = secrets.token_hex(16) if hash_ is None else hash_[:32]
        connection.execute(sa.insert(ledgers).values(identity=identity))
        connection.execute(sa.delete(versions))
        connection.execute(sa.insert(versions).values(version_num=_VERSION))
    return None, None


def list_accounts(connection: sa.Connection) -> list[str]:
    """Return the names of all accounts, including those with a removed row."""
    names = sa.union(sa.select(accounts.c.name), sa.select(entries.c.account))
    return sorted(connection.execute(names).scalars())


def read_receipts(connection: sa.Connection) -> list[Receipt]:
    """Return the receipts of all accounts."""
    rows = connection.execute(sa.select(accounts.c.name, accounts.c.sequence, accounts.c.head))
    return [Receipt(*row) for row in rows]


def find_row(
    connection: sa.Connection, account: str, client: str | None = None, *, lock: bool = False
) -> BudgetRow | None:
    """Return the row of an account (with a row lock if `lock`), or of a quota or a cap of it, or None."""
    if client is None:
        query = sa.select(accounts).where(accounts.c.name == account)
    else:
        query = sa.select(quotas).where(quotas.c.account == account, quotas.c.client == client)
    row = connection.execute(query.with_for_update() if lock else query).one_or_none()
    if row is None:
        return None
    try:
        totals = tuple(None if total is None else int(total) for total in json.loads(row.totals))
    except (TypeError, ValueError):
        raise CorruptLedgerError(f"account {account!r}: totals are corrupted; verify() lists the problems") from None
    values = {name: value for name, value in row._mapping.items() if name != "name"}
    return BudgetRow(**{"client": None, **values, "account": account, "totals": totals})


def list_shares(connection: sa.Connection, account: str) -> dict[str | None, BudgetRow | None]:
    """Return all quotas and caps of an account, by name."""
    names = connection.execute(sa.select(quotas.c.client).where(quotas.c.account == account)).scalars()
    return {name: find_row(connection, account, name) for name in names.all()}


def load_account(connection: sa.Connection, name: str, witness: Witness | None, *, lock: bool = False) -> BudgetRow:
    """Return the row of an account (with a row lock if `lock`), checked against its latest entry and the witness."""
    for is_last in (False, True):
        row = find_row(connection, name, lock=lock)
        sequence, head = (0, GENESIS) if row is None else (row.sequence, row.head)
        try:
            if witness is not None:
                witness.check(name, sequence, head, lambda earlier: find_hash(connection, name, earlier))
        except RolledBackError:
            # A missing account has no row to lock: another process may have opened it since, and spent.
            if is_last or row is not None:
                raise
        else:
            break
    if row is None:
        raise AccountError(f"No account {name!r} in this ledger: open_account() opens one, accounts() lists them")
    stored = find_entries(connection, name, row.sequence - 1, row.sequence)
    previous = stored[row.sequence - 1].hash if row.sequence - 1 in stored else GENESIS
    last = stored.get(row.sequence)
    if last is None or last.compute_hash(previous) != row.head or last.state != row.digest:
        raise CorruptLedgerError(
            f"account {name!r} does not match its latest entry: the database was edited. "
            "verify() lists the problems; nothing can be spent"
        )
    return row


def load_share(connection: sa.Connection, name: str, client: str) -> BudgetRow:
    """Return a client's quota, or a cap, after a check against its latest entry."""
    row = find_row(connection, name, check_text(client, "client"))
    if row is None:
        raise AccountError(f"client {client!r} has no quota, and no cap, in account {name!r}: quota() opens one")
    last = find_entries(connection, name, row.sequence).get(row.sequence)
    if last is None or last.client != client or last.client_state != row.digest:
        raise CorruptLedgerError(
            f"the quota of client {client!r} does not match its latest entry: the database was edited. "
            "verify() lists the problems; nothing can be spent"
        )
    return row


def find_entries(connection: sa.Connection, name: str, *sequences: int) -> dict[int, Entry]:
    """Return entries of an account by their sequence numbers."""
    query = sa.select(*_ENTRY_COLUMNS).where(entries.c.account == name, entries.c.sequence.in_(sequences))
    return {row.sequence: Entry(**row._mapping) for row in connection.execute(query)}


def find_hash(connection: sa.Connection, name: str, sequence: int) -> str | None:
    """Return the hash of an entry by its sequence number; 0 stands for the hash before the first."""
    if sequence == 0:
        return GENESIS
    query = sa.select(entries.c.hash).where(entries.c.account == name, entries.c.sequence == sequence)
    return connection.execute(query).scalar_one_or_none()


def find_entries_by_key(connection: sa.Connection, name: str, key: str) -> tuple[Entry | None, Entry | None]:
    """Return the debit and the message of a key."""
    slots = [make_slot(name, key, kind) for kind in (DEBIT, MESSAGE)]
    rows = connection.execute(sa.select(*_ENTRY_COLUMNS).where(entries.c.slot.in_(slots)))
    stored = {row.slot: Entry(**row._mapping) for row in rows}
    return stored.get(slots[0]), stored.get(slots[1])


def find_log(connection: sa.Connection, name: str, keys: Iterable[str]) -> dict[str | None, Entry]:
    """Return entries of public logs by their keys."""
    slots = [make_slot(name, key, LOG) for key in keys]
    rows = connection.execute(sa.select(*_ENTRY_COLUMNS).where(entries.c.slot.in_(slots)))
    return {row.key: Entry(**row._mapping) for row in rows}


def read_entries(connection: sa.Connection, name: str) -> Iterator[Entry]:
    """Yield the entries of an account in order."""
    query = sa.select(*_ENTRY_COLUMNS).where(entries.c.account == name).order_by(entries.c.sequence)
    for row in connection.execution_options(yield_per=500).execute(query):
        yield Entry(**row._mapping)


def append_entry(
    connection: sa.Connection,
    row: BudgetRow,
    kind: str,
    content: dict[str, Any],
    *,
    time: str,
    nonce: str,
    key: str | None = None,
    share: BudgetRow | None = None,
) -> BudgetRow:
    """Insert the next entry; update the account and a quota or cap, `share`. Both hold the totals after the entry."""
    if kind in (OPENED, QUOTA, CAP):
        _insert_row(connection, share or row)
    row = replace(row, sequence=row.sequence + 1)
    entry = Entry(
        account=row.account,
        sequence=row.sequence,
        kind=kind,
        time=time,
        key=key,
        client=None if share is None else share.client,
        payload=budgets.canonical_json(content),
        state=row.digest,
        client_state=None if share is None else share.digest,
        nonce=nonce,
        slot=make_slot(row.account, key, kind),
    )
    row = replace(row, head=entry.compute_hash(row.head))
    values = {"totals": budgets.canonical_json(row.totals), "sequence": row.sequence, "head": row.head}
    connection.execute(sa.update(accounts).where(accounts.c.name == row.account).values(values))
    connection.execute(sa.insert(entries).values({**asdict(entry), "hash": row.head}))
    if share is not None:
        is_share = (quotas.c.account == row.account, quotas.c.client == share.client)
        values = {"totals": budgets.canonical_json(share.totals), "sequence": row.sequence}
        connection.execute(sa.update(quotas).where(*is_share).values(values))
    return row


def _insert_row(connection: sa.Connection, row: BudgetRow) -> None:
    """Insert an account, a quota or a cap without entries."""
    values = {"terms": row.terms, "totals": budgets.canonical_json(row.totals), "sequence": 0}
    if row.client is None:
        table, more = accounts, {"name": row.account, "opening": row.opening, "head": row.head}
    else:
        table, more = quotas, {"account": row.account, "client": row.client}
    connection.execute(sa.insert(table).values({**values, **more}))
