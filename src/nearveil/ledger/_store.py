"""What is read and written inside one transaction: an account under its lock, and entries appended to it."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from nearveil.ledger._budget import Amounts, Budget, budget_of
from nearveil.ledger._events import canonical_json
from nearveil.ledger._witness import GENESIS, Receipt, Row, Witness, digest, slot_of
from nearveil.ledger.errors import AccountError, CorruptLedgerError, NewerLedgerError, RolledBackError

_VERSION_TABLE = "nearveil_ledger_version"
_MIGRATION_LOCK = 0x6E6561727665696C  # "nearveil": of this ledger, among all that lock in the same server

_metadata = sa.MetaData()


def _text(name: str, *, primary_key: bool = False) -> "sa.Column[str]":
    return sa.Column(name, sa.Text, primary_key=primary_key)


accounts = sa.Table(
    "nearveil_account",
    _metadata,
    _text("name", primary_key=True),
    *map(_text, ("opening", "terms", "totals")),
    sa.Column("sequence", sa.BigInteger),
    _text("head"),
)
quotas = sa.Table(
    "nearveil_quota",
    _metadata,
    _text("account", primary_key=True),
    _text("client", primary_key=True),
    *map(_text, ("terms", "totals")),
    sa.Column("sequence", sa.BigInteger),
)
ledgers = sa.Table("nearveil_ledger", _metadata, _text("identity", primary_key=True))
entries = sa.Table(
    "nearveil_entry",
    _metadata,
    _text("account", primary_key=True),
    sa.Column("sequence", sa.BigInteger, primary_key=True, autoincrement=False),
    *map(_text, ("kind", "time", "key", "client", "nonce", "payload", "state", "client_state", "hash", "slot")),
)


@lru_cache(maxsize=1)
def _scripts() -> ScriptDirectory:
    return ScriptDirectory(Path(__file__).parent / "migrations")


def _version(connection: sa.Connection) -> str | None:
    return MigrationContext.configure(connection, opts={"version_table": _VERSION_TABLE}).get_current_revision()


def find_version(connection: sa.Connection) -> str | None:
    """Return the version of the tables, None where there are none; raise if it is a newer one."""
    version = _version(connection)
    known = {script.revision for script in _scripts().walk_revisions()}
    if version is not None and version not in known:
        raise NewerLedgerError(
            f"this ledger is of version {version}, which this nearveil does not know: install a newer nearveil"
        )
    return version


def is_current(connection: sa.Connection) -> bool:
    """Return whether the tables are of this version; raise if they are of a newer one."""
    return find_version(connection) == _scripts().get_current_head()


def find_identity(connection: sa.Connection) -> str | None:
    """Return what all copies of this ledger have, and no other; None where its tables are of an earlier version."""
    return connection.execute(sa.select(ledgers.c.identity)).scalar_one() if is_current(connection) else None


def migrate(connection: sa.Connection) -> None:
    """Bring the tables to this version, inside the caller's write transaction; others wait for the lock."""
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_MIGRATION_LOCK)))
    if is_current(connection):
        return
    scripts = _scripts()
    context = MigrationContext.configure(
        connection,
        opts={
            "version_table": _VERSION_TABLE,
            "transactional_ddl": True,
            "fn": lambda version, _: scripts._upgrade_revs("head", version),
        },
    )
    with Operations.context(context):
        context.run_migrations()


_FIELDS = tuple(field.name for field in fields(Row))


@dataclass(frozen=True)
class Held:
    """Terms and totals of an account or of a client's quota, and where they were last written."""

    terms: str
    totals: Amounts
    sequence: int

    @property
    def budget(self) -> Budget:
        """The budget that the terms tell of."""
        return budget_of(self.terms)

    @property
    def text(self) -> str:
        """The totals as they are kept."""
        return canonical_json(self.totals)

    @property
    def state(self) -> str:
        """The digest that entries carry."""
        return digest(self.terms, self.text)


@dataclass(frozen=True)
class Book:
    """An account inside a transaction."""

    name: str
    opening: str
    held: Held
    head: str

    @property
    def about(self) -> dict[str, Any]:
        """Owner, what is protected, unit and relation."""
        return dict(json.loads(self.opening))

    @property
    def receipt(self) -> Receipt:
        """How far the account has come."""
        return Receipt(self.name, self.held.sequence, self.head)


def find_book(connection: sa.Connection, name: str, *, lock: bool = False) -> Book | None:
    """Return an account, for writing if `lock`, or None."""
    query = sa.select(accounts).where(accounts.c.name == name)
    row = connection.execute(query.with_for_update() if lock else query).one_or_none()
    if row is None:
        return None
    return Book(row.name, row.opening, Held(row.terms, _totals(row.totals, name), row.sequence), row.head)


def all_receipts(connection: sa.Connection) -> list[Receipt]:
    """Return how far every account has come."""
    rows = connection.execute(sa.select(accounts.c.name, accounts.c.sequence, accounts.c.head))
    return [Receipt(row.name, row.sequence, row.head) for row in rows]


def load_book(connection: sa.Connection, name: str, witness: Witness | None, *, lock: bool = False) -> Book:
    """Return an account that agrees with its last entry and with its witness."""
    book = witnessed_book(connection, name, witness, lock=lock)
    if book is None:
        raise AccountError(f"account {name!r} does not exist: open_account makes one, accounts() lists them")
    last, previous = entry_at(connection, name, book.held.sequence), hash_at(connection, name, book.held.sequence - 1)
    told = digest(book.opening, book.held.state)
    if last is None or previous is None or last.hash(previous) != book.head or last.state != told:
        raise CorruptLedgerError(
            f"account {name!r} does not agree with its last entry: somebody changed the database by hand. "
            "verify() says where; nothing may be spent"
        )
    return book


def witnessed_book(connection: sa.Connection, name: str, witness: Witness | None, *, lock: bool) -> Book | None:
    """Return an account, or None, that agrees with its witness."""
    book = find_book(connection, name, lock=lock)
    try:
        _check_witness(connection, name, book, witness)
    except RolledBackError:
        # An account that is not there has no row to lock: somebody may have opened it since we looked, and spent.
        if book is not None:
            raise
        book = find_book(connection, name, lock=lock)
        _check_witness(connection, name, book, witness)
    return book


def _check_witness(connection: sa.Connection, name: str, book: Book | None, witness: Witness | None) -> None:
    """Raise if the witness has seen more of an account than there is."""
    if witness is not None:
        sequence, head = (0, GENESIS) if book is None else (book.held.sequence, book.head)
        witness.check(name, sequence, head, lambda earlier: hash_at(connection, name, earlier))


def load_quota(connection: sa.Connection, name: str, client: str) -> Held:
    """Return a client's quota, or a cap, which agrees with the last entry about it."""
    quota = find_quota(connection, name, client)
    if quota is None:
        raise AccountError(f"client {client!r} has no quota, and no cap, in account {name!r}: quota() gives one")
    last = entry_at(connection, name, quota.sequence)
    if last is None or last.client != client or last.client_state != quota.state:
        raise CorruptLedgerError(
            f"the quota of client {client!r} does not agree with its last entry: somebody changed the database by "
            "hand. verify() says where; nothing may be spent"
        )
    return quota


def find_quota(connection: sa.Connection, name: str, client: str) -> Held | None:
    """Return a client's quota, or None."""
    query = sa.select(quotas).where(quotas.c.account == name, quotas.c.client == client)
    row = connection.execute(query).one_or_none()
    return None if row is None else Held(row.terms, _totals(row.totals, name), row.sequence)


def entry_at(connection: sa.Connection, name: str, sequence: int) -> Row | None:
    """Return an entry by its place."""
    row = connection.execute(
        sa.select(entries).where(entries.c.account == name, entries.c.sequence == sequence)
    ).one_or_none()
    return None if row is None else as_row(row)


def hash_at(connection: sa.Connection, name: str, sequence: int) -> str | None:
    """Return an entry's hash by its place; the one before the first is known."""
    if sequence == 0:
        return GENESIS
    query = sa.select(entries.c.hash).where(entries.c.account == name, entries.c.sequence == sequence)
    return connection.execute(query).scalar_one_or_none()


def entry_with_key(connection: sa.Connection, name: str, key: str, kind: str) -> Row | None:
    """Return the debit or the message of a key."""
    query = sa.select(entries).where(entries.c.slot == slot_of(name, key, kind))
    row = connection.execute(query).one_or_none()
    return None if row is None else as_row(row)


def all_entries(connection: sa.Connection, name: str) -> Iterator[tuple[Row, str]]:
    """Yield the entries of an account in their order, each with the hash that is kept with it."""
    query = sa.select(entries).where(entries.c.account == name).order_by(entries.c.sequence)
    for row in connection.execution_options(yield_per=500).execute(query):
        yield as_row(row), row.hash


def as_row(row: Any) -> Row:
    """Return a database row as an entry."""
    return Row(**{name: getattr(row, name) for name in _FIELDS})


def append(
    connection: sa.Connection,
    book: Book,
    *,
    kind: str,
    time: str,
    nonce: str,
    payload: str,
    key: str | None = None,
    client: str | None = None,
    quota: Held | None = None,
) -> Book:
    """Write the next entry, and the account and the quota as they are after it.

    `book.held` and `quota` hold the new totals already.
    """
    sequence = book.held.sequence + 1
    held = replace(book.held, sequence=sequence)
    row = Row(
        account=book.name,
        sequence=sequence,
        kind=kind,
        time=time,
        key=key,
        client=client,
        nonce=nonce,
        payload=payload,
        state=digest(book.opening, held.state),
        client_state=None if quota is None else quota.state,
        slot=slot_of(book.name, key, kind),
    )
    after = replace(book, held=held, head=row.hash(book.head))
    values = {"totals": held.text, "sequence": sequence, "head": after.head}
    connection.execute(sa.update(accounts).where(accounts.c.name == book.name).values(values))
    connection.execute(sa.insert(entries).values({**asdict(row), "hash": after.head}))
    if quota is not None and client is not None:
        here = (quotas.c.account == book.name, quotas.c.client == client)
        connection.execute(sa.update(quotas).where(*here).values({"totals": quota.text, "sequence": sequence}))
    return after


def insert_book(connection: sa.Connection, name: str, opening: str, terms: str) -> Book:
    """Write a new account that has no entry yet."""
    held = Held(terms, budget_of(terms).nothing, 0)
    values = {"name": name, "opening": opening, "terms": terms, "totals": held.text, "sequence": 0, "head": GENESIS}
    connection.execute(sa.insert(accounts).values(values))
    return Book(name, opening, held, GENESIS)


def insert_quota(connection: sa.Connection, name: str, client: str, terms: str) -> Held:
    """Write a new quota."""
    held = Held(terms, budget_of(terms).nothing, 0)
    values = {"account": name, "client": client, "terms": terms, "totals": held.text, "sequence": 0}
    connection.execute(sa.insert(quotas).values(values))
    return held


def _totals(text: str, name: str) -> Amounts:
    try:
        return tuple(None if total is None else int(total) for total in json.loads(text))
    except (TypeError, ValueError):
        raise CorruptLedgerError(f"account {name!r}: its totals cannot be read; verify() says more") from None
