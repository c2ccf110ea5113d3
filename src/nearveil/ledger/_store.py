"""The tables of a ledger: migration, lookups that check what they load, and the one function that appends entries."""

import json
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from nearveil.ledger.budget import Amounts
from nearveil.ledger.entries import GENESIS, AccountRow, BudgetState, Entry, Receipt, make_slot
from nearveil.ledger.errors import AccountError, CorruptLedgerError, LedgerError, RolledBackError
from nearveil.ledger.witness import Witness

_VERSION_TABLE = "nearveil_ledger_version"
_MIGRATION_LOCK = 0x6E6561727665696C  # "nearveil": the advisory lock of migrations in PostgreSQL

_metadata = sa.MetaData()


def _make_text_column(name: str, *, primary_key: bool = False) -> "sa.Column[str]":
    return sa.Column(name, sa.Text, primary_key=primary_key)


accounts = sa.Table(
    "nearveil_account",
    _metadata,
    _make_text_column("name", primary_key=True),
    *map(_make_text_column, ("opening", "terms", "totals")),
    sa.Column("sequence", sa.BigInteger),
    _make_text_column("head"),
)
quotas = sa.Table(  # quotas of clients, and caps
    "nearveil_quota",
    _metadata,
    _make_text_column("account", primary_key=True),
    _make_text_column("client", primary_key=True),
    *map(_make_text_column, ("terms", "totals")),
    sa.Column("sequence", sa.BigInteger),
)
ledgers = sa.Table("nearveil_ledger", _metadata, _make_text_column("identity", primary_key=True))
entries = sa.Table(
    "nearveil_entry",
    _metadata,
    _make_text_column("account", primary_key=True),
    sa.Column("sequence", sa.BigInteger, primary_key=True, autoincrement=False),
    *map(
        _make_text_column,
        ("kind", "time", "key", "client", "nonce", "payload", "state", "client_state", "hash", "slot"),
    ),
)
_ENTRY_FIELDS = tuple(field.name for field in fields(Entry))


@lru_cache(maxsize=1)
def _load_scripts() -> ScriptDirectory:
    folder = Path(__file__).parent / "migrations"
    return ScriptDirectory(folder, version_locations=[folder])


def find_version(connection: sa.Connection) -> str | None:
    """Return the version of the tables, None if there are none; raise if it is newer than this nearveil."""
    version = MigrationContext.configure(connection, opts={"version_table": _VERSION_TABLE}).get_current_revision()
    supported = {script.revision for script in _load_scripts().walk_revisions()}
    if version is not None and version not in supported:
        raise LedgerError(f"this ledger has version {version}, which is newer: install a newer nearveil")
    return version


def is_current(connection: sa.Connection) -> bool:
    """Return whether the tables have the current version; raise if it is newer."""
    return find_version(connection) == _load_scripts().get_current_head()


def find_identity(connection: sa.Connection) -> str | None:
    """Return the identity that all copies of a ledger share; None if the tables have an earlier version."""
    return connection.execute(sa.select(ledgers.c.identity)).scalar_one() if is_current(connection) else None


def migrate(connection: sa.Connection) -> tuple[None, None]:
    """Migrate the tables to the current version, inside the caller's write transaction."""
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_MIGRATION_LOCK)))
    if not is_current(connection):
        scripts = _load_scripts()
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
    return None, None


def list_accounts(connection: sa.Connection) -> list[str]:
    """Return the names of all accounts, including those whose row was removed."""
    names = sa.union(sa.select(accounts.c.name), sa.select(entries.c.account))
    return sorted(connection.execute(names).scalars())


def read_receipts(connection: sa.Connection) -> list[Receipt]:
    """Return the receipts of all accounts."""
    rows = connection.execute(sa.select(accounts.c.name, accounts.c.sequence, accounts.c.head))
    return [Receipt(row.name, row.sequence, row.head) for row in rows]


def find_account(connection: sa.Connection, name: str, *, lock: bool = False) -> AccountRow | None:
    """Return the row of an account, with a row lock if `lock`, or None."""
    query = sa.select(accounts).where(accounts.c.name == name)
    row = connection.execute(query.with_for_update() if lock else query).one_or_none()
    if row is None:
        return None
    state = BudgetState(row.terms, _parse_totals(row.totals, name), row.sequence)
    return AccountRow(row.name, row.opening, state, row.head)


def find_witnessed_account(
    connection: sa.Connection, name: str, witness: Witness | None, *, lock: bool
) -> AccountRow | None:
    """Return the row of an account, or None, after a check against the witness."""
    for is_last in (False, True):
        row = find_account(connection, name, lock=lock)
        sequence, head = (0, GENESIS) if row is None else (row.state.sequence, row.head)
        try:
            if witness is not None:
                witness.check(name, sequence, head, lambda earlier: find_hash(connection, name, earlier))
        except RolledBackError:
            # A missing account has no row to lock: another process may have opened it since, and spent.
            if is_last or row is not None:
                raise
        else:
            break
    return row


def load_account(connection: sa.Connection, name: str, witness: Witness | None, *, lock: bool = False) -> AccountRow:
    """Return the row of an account after a check against its latest entry and the witness."""
    row = find_witnessed_account(connection, name, witness, lock=lock)
    if row is None:
        raise AccountError(f"account {name!r} does not exist: open_account() opens one, accounts() lists them")
    last = find_entry(connection, name, row.state.sequence)
    previous = find_hash(connection, name, row.state.sequence - 1)
    if last is None or previous is None or last.compute_hash(previous) != row.head or last.state != row.digest:
        raise CorruptLedgerError(
            f"account {name!r} does not match its latest entry: the database was edited. "
            "verify() lists the problems; nothing can be spent"
        )
    return row


def load_quota(connection: sa.Connection, name: str, client: str) -> BudgetState:
    """Return a client's quota, or a cap, after a check against its latest entry."""
    quota = find_quota(connection, name, client)
    if quota is None:
        raise AccountError(f"client {client!r} has no quota, and no cap, in account {name!r}: quota() opens one")
    last = find_entry(connection, name, quota.sequence)
    if last is None or last.client != client or last.client_state != quota.digest:
        raise CorruptLedgerError(
            f"the quota of client {client!r} does not match its latest entry: the database was edited. "
            "verify() lists the problems; nothing can be spent"
        )
    return quota


def find_quota(connection: sa.Connection, name: str, client: str) -> BudgetState | None:
    """Return a client's quota, or a cap, or None."""
    query = sa.select(quotas).where(quotas.c.account == name, quotas.c.client == client)
    row = connection.execute(query).one_or_none()
    return None if row is None else BudgetState(row.terms, _parse_totals(row.totals, name), row.sequence)


def list_shares(connection: sa.Connection, name: str) -> dict[str | None, BudgetState]:
    """Return all quotas and caps of an account, by name."""
    rows = connection.execute(sa.select(quotas).where(quotas.c.account == name))
    return {row.client: BudgetState(row.terms, _parse_totals(row.totals, name), row.sequence) for row in rows}


def find_entry(connection: sa.Connection, name: str, sequence: int) -> Entry | None:
    """Return an entry by its sequence number."""
    query = sa.select(entries).where(entries.c.account == name, entries.c.sequence == sequence)
    return _make_entry(connection.execute(query).one_or_none())


def find_hash(connection: sa.Connection, name: str, sequence: int) -> str | None:
    """Return the hash of an entry by its sequence number; 0 stands for the hash before the first."""
    if sequence == 0:
        return GENESIS
    query = sa.select(entries.c.hash).where(entries.c.account == name, entries.c.sequence == sequence)
    return connection.execute(query).scalar_one_or_none()


def find_entry_by_key(connection: sa.Connection, name: str, key: str, kind: str) -> Entry | None:
    """Return the debit or the message of a key."""
    query = sa.select(entries).where(entries.c.slot == make_slot(name, key, kind))
    return _make_entry(connection.execute(query).one_or_none())


def read_entries(connection: sa.Connection, name: str) -> Iterator[Entry]:
    """Yield the entries of an account in order."""
    query = sa.select(entries).where(entries.c.account == name).order_by(entries.c.sequence)
    for row in connection.execution_options(yield_per=500).execute(query):
        entry = _make_entry(row)
        assert entry is not None
        yield entry


def _make_entry(row: Any) -> Entry | None:
    return None if row is None else Entry(**{name: getattr(row, name) for name in _ENTRY_FIELDS})


def append_entry(
    connection: sa.Connection,
    row: AccountRow,
    *,
    kind: str,
    time: str,
    nonce: str,
    payload: str,
    key: str | None = None,
    client: str | None = None,
    quota: BudgetState | None = None,
) -> AccountRow:
    """Insert the next entry, update account and quota; `row.state` and `quota` hold the totals after the entry."""
    sequence = row.state.sequence + 1
    row = replace(row, state=replace(row.state, sequence=sequence))
    entry = Entry(
        account=row.name,
        sequence=sequence,
        kind=kind,
        time=time,
        key=key,
        client=client,
        payload=payload,
        state=row.digest,
        client_state=None if quota is None else quota.digest,
        nonce=nonce,
        slot=make_slot(row.name, key, kind),
    )
    row = replace(row, head=entry.compute_hash(row.head))
    values = {"totals": row.state.totals_text, "sequence": sequence, "head": row.head}
    connection.execute(sa.update(accounts).where(accounts.c.name == row.name).values(values))
    connection.execute(sa.insert(entries).values({**asdict(entry), "hash": row.head}))
    if quota is not None and client is not None:
        is_quota = (quotas.c.account == row.name, quotas.c.client == client)
        connection.execute(
            sa.update(quotas).where(*is_quota).values({"totals": quota.totals_text, "sequence": sequence})
        )
    return row


def insert_account(connection: sa.Connection, name: str, opening: str, terms: str) -> AccountRow:
    """Insert an account without entries."""
    state = BudgetState.open(terms)
    values = {"name": name, "opening": opening, "terms": terms, "totals": state.totals_text}
    connection.execute(sa.insert(accounts).values({**values, "sequence": 0, "head": GENESIS}))
    return AccountRow(name, opening, state, GENESIS)


def insert_quota(connection: sa.Connection, name: str, client: str, terms: str) -> BudgetState:
    """Insert a quota or a cap."""
    state = BudgetState.open(terms)
    values = {"account": name, "client": client, "terms": terms, "totals": state.totals_text, "sequence": 0}
    connection.execute(sa.insert(quotas).values(values))
    return state


def _parse_totals(text: str, name: str) -> Amounts:
    try:
        return tuple(None if total is None else int(total) for total in json.loads(text))
    except (TypeError, ValueError):
        raise CorruptLedgerError(f"account {name!r}: its totals are corrupted; verify() lists the problems") from None
