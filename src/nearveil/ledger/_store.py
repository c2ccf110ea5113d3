"""The tables of a ledger, the chain of entries, and the witness that shows that nobody changed the past."""

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from nearveil.ledger.budget import Amounts, Budget, canonical_json, parse_budget
from nearveil.ledger.errors import (
    AccountError,
    CorruptLedgerError,
    LedgerError,
    LedgerUnavailableError,
    RolledBackError,
)

GENESIS = "0" * 64
"""What the first entry of an account has before it."""


def digest(*texts: str) -> str:
    """Return the SHA-256 of texts, in hexadecimal; where one ends and the next begins counts."""
    return hashlib.sha256(canonical_json(texts).encode()).hexdigest()


def make_slot(account: str, key: str | None, kind: str) -> str | None:
    """Return what is unique to the debit, and to the message, of a key; None for entries without a key."""
    return None if key is None else digest(account, key, kind)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One entry as it is kept. Nothing in it is private."""

    account: str
    sequence: int  # 1, 2, 3, ... in every account
    kind: str
    time: str  # UTC, for people; nothing is decided by it
    key: str | None
    client: str | None  # whose quota the entry is about, or which cap
    nonce: str  # random; tells whose attempt wrote it
    payload: str  # JSON: terms, charge and price, price alone, or message
    state: str  # digest of the account's terms and totals after the entry
    client_state: str | None  # likewise for the quota or the cap, where the entry is about one
    slot: str | None  # what `make_slot` gives; no two entries have the same

    def hash(self, previous: str) -> str:
        """Return the entry's hash, given the one before it."""
        return hashlib.sha256(canonical_json({**asdict(self), "previous": previous}).encode()).hexdigest()

    @property
    def content(self) -> dict[str, Any]:
        """The payload, read."""
        return dict(json.loads(self.payload))


@dataclass(frozen=True)
class Receipt:
    """What to keep elsewhere, to be shown to :meth:`Ledger.verify` one day.

    Examples
    --------
    >>> print(Receipt("images", 3, "0" * 64))
    3:0000000000000000000000000000000000000000000000000000000000000000:images
    """

    account: str
    sequence: int
    hash: str

    def __str__(self) -> str:
        return f"{self.sequence}:{self.hash}:{self.account}"

    @classmethod
    def parse(cls, text: str) -> "Receipt":
        """Return the receipt that was written as `text`.

        Examples
        --------
        >>> Receipt.parse(str(Receipt("images", 3, "0" * 64))).sequence
        3
        """
        sequence, _, rest = text.strip().partition(":")
        value, _, account = rest.partition(":")
        if not (sequence.isdecimal() and len(value) == len(GENESIS) and account):
            raise ValueError("receipt must be SEQUENCE:HASH:ACCOUNT, as it was printed")
        return cls(account, int(sequence), value)


_SIZE = 256
_PATIENCE = 30.0  # seconds
_WHAT_TO_DO = (
    "Put the newest copy of the database back. If there is none, treat the account as spent; an empty file in place of "
    "the witness makes it forget, and what was spent since is then spent twice"
)


class Witness:
    """The witness file of one ledger."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offsets: dict[str, int] = {}  # records never move, so where one was found it stays

    def exists(self) -> bool:
        """Return whether the file is there; an empty one is, too."""
        return self.path.exists()

    def create(self) -> None:
        """Make an empty witness where there is none."""
        try:
            self.path.touch(mode=0o600, exist_ok=True)
        except OSError as error:
            raise LedgerError(
                f"ledger and witness cannot be created in {self.path.parent}: {error.strerror}; give another path"
            ) from error

    def known(self) -> dict[str, tuple[int, str]]:
        """Return sequence and hash by the digest of each account's name."""
        with self._open(fcntl.LOCK_SH) as handle:
            return {name: (sequence, value) for _, name, sequence, value in _read_records(handle, self.path)}

    def check(self, account: str, sequence: int, head: str, find_hash: Callable[[int], str | None]) -> None:
        """Raise unless an account at `sequence` (0: unknown here) with the hash `head` continues what was witnessed."""
        with self._open(fcntl.LOCK_SH) as handle:
            found = self._find(handle, digest(account))
        if found is None:
            return
        seen = found[1:]
        if seen[0] > sequence:
            raise RolledBackError(
                f"account {account!r} is at entry {sequence}, but its witness has seen entry {seen[0]}: an old copy of "
                f"the database was put back, or this is a replica that lags. {_WHAT_TO_DO}"
            )
        if seen[1] != (head if seen[0] == sequence else find_hash(seen[0])):
            raise RolledBackError(
                f"account {account!r} has another entry {seen[0]} than its witness has seen: its history was replaced. "
                f"{_WHAT_TO_DO}"
            )

    def raise_to(self, receipt: Receipt) -> None:
        """Remember how far an account has come, unless more is known already."""
        with self._open(fcntl.LOCK_EX) as handle:
            name = digest(receipt.account)
            offset, sequence, _ = self._find(handle, name) or (_find_end(handle), 0, "")
            if sequence < receipt.sequence:
                _write_record(handle, offset, name, receipt)

    def _find(self, handle: int, name: str) -> tuple[int, int, str] | None:
        """Return where the record of a name is, and its sequence and hash."""
        if name in self._offsets:
            for offset, known, sequence, value in _read_records(handle, self.path, self._offsets[name], _SIZE):
                if known == name:
                    return offset, sequence, value
        for offset, known, sequence, value in _read_records(handle, self.path):
            if known == name:
                self._offsets[name] = offset
                return offset, sequence, value
        return None

    @contextmanager
    def _open(self, lock: int) -> Iterator[int]:
        try:
            handle = os.open(
                self.path, os.O_RDWR | os.O_CLOEXEC if lock == fcntl.LOCK_EX else os.O_RDONLY | os.O_CLOEXEC
            )
        except OSError as error:
            raise RolledBackError(
                f"witness {self.path} cannot be read ({error.strerror}): without it, an old copy of the database would "
                "not be noticed. Put it back; an empty file in its place accepts the database as it is"
            ) from error
        try:
            _lock(handle, lock, self.path)
            yield handle
        except OSError as error:
            raise LedgerError(f"witness {self.path} cannot be read or written: {error.strerror}") from error
        finally:
            os.close(handle)


def _lock(handle: int, lock: int, path: Path) -> None:
    """Wait for the lock, but not for ever: its holder may have been stopped."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            return fcntl.flock(handle, lock | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise LedgerUnavailableError(f"witness {path} was locked all the time; release nothing") from None
            time.sleep(0.001)


def _find_end(handle: int) -> int:
    """Return where the next record goes: over a piece of one that a full disk cut short."""
    size = os.fstat(handle).st_size
    return size - size % _SIZE


def _write_record(handle: int, offset: int, name: str, receipt: Receipt) -> None:
    body = f"{receipt.sequence:020d} {receipt.hash} {name}"
    check = hashlib.sha256(body.encode()).hexdigest()[:32]
    record = f"{body} {check}".ljust(_SIZE - 1) + "\n"
    if os.pwrite(handle, record.encode(), offset) != _SIZE:
        raise LedgerError("witness could not be written whole: is the disk full? Release nothing")


def _read_records(
    handle: int, path: Path, start: int = 0, size: int | None = None
) -> Iterator[tuple[int, str, int, str]]:
    content = os.pread(handle, _find_end(handle) if size is None else size, start).decode("ascii", "replace")
    for offset in range(0, len(content), _SIZE):
        parts = content[offset : offset + _SIZE].split()
        if len(parts) != 4 or hashlib.sha256(" ".join(parts[:3]).encode()).hexdigest()[:32] != parts[3]:
            raise CorruptLedgerError(
                f"witness {path} is damaged. Verify the ledger against receipts kept elsewhere, then put an empty file "
                "in its place"
            )
        yield start + offset, parts[2], int(parts[0]), parts[1]


_VERSION_TABLE = "nearveil_ledger_version"
_MIGRATION_LOCK = 0x6E6561727665696C  # "nearveil": of this ledger, among all that lock in the same server

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
quotas = sa.Table(
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


@lru_cache(maxsize=1)
def _load_scripts() -> ScriptDirectory:
    folder = Path(__file__).parent / "migrations"
    return ScriptDirectory(folder, version_locations=[folder])


def _read_version(connection: sa.Connection) -> str | None:
    return MigrationContext.configure(connection, opts={"version_table": _VERSION_TABLE}).get_current_revision()


def find_version(connection: sa.Connection) -> str | None:
    """Return the version of the tables, None where there are none; raise if it is a newer one."""
    version = _read_version(connection)
    known = {script.revision for script in _load_scripts().walk_revisions()}
    if version is not None and version not in known:
        raise LedgerError(
            f"this ledger is of version {version}, which this nearveil does not know: install a newer nearveil"
        )
    return version


def is_current(connection: sa.Connection) -> bool:
    """Return whether the tables are of this version; raise if they are of a newer one."""
    return find_version(connection) == _load_scripts().get_current_head()


def find_identity(connection: sa.Connection) -> str | None:
    """Return what all copies of this ledger have, and no other; None where its tables are of an earlier version."""
    return connection.execute(sa.select(ledgers.c.identity)).scalar_one() if is_current(connection) else None


def migrate(connection: sa.Connection) -> None:
    """Bring the tables to this version, inside the caller's write transaction; others wait for the lock."""
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_MIGRATION_LOCK)))
    if is_current(connection):
        return
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
        return parse_budget(self.terms)

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
    return Book(row.name, row.opening, Held(row.terms, _parse_totals(row.totals, name), row.sequence), row.head)


def read_receipts(connection: sa.Connection) -> list[Receipt]:
    """Return how far every account has come."""
    rows = connection.execute(sa.select(accounts.c.name, accounts.c.sequence, accounts.c.head))
    return [Receipt(row.name, row.sequence, row.head) for row in rows]


def load_book(connection: sa.Connection, name: str, witness: Witness | None, *, lock: bool = False) -> Book:
    """Return an account that agrees with its last entry and with its witness."""
    book = load_witnessed_book(connection, name, witness, lock=lock)
    if book is None:
        raise AccountError(f"account {name!r} does not exist: open_account makes one, accounts() lists them")
    last, previous = (
        find_entry(connection, name, book.held.sequence),
        find_hash(connection, name, book.held.sequence - 1),
    )
    told = digest(book.opening, book.held.state)
    if last is None or previous is None or last.hash(previous) != book.head or last.state != told:
        raise CorruptLedgerError(
            f"account {name!r} does not agree with its last entry: somebody changed the database by hand. "
            "verify() says where; nothing may be spent"
        )
    return book


def load_witnessed_book(connection: sa.Connection, name: str, witness: Witness | None, *, lock: bool) -> Book | None:
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
        witness.check(name, sequence, head, lambda earlier: find_hash(connection, name, earlier))


def load_quota(connection: sa.Connection, name: str, client: str) -> Held:
    """Return a client's quota, or a cap, which agrees with the last entry about it."""
    quota = find_quota(connection, name, client)
    if quota is None:
        raise AccountError(f"client {client!r} has no quota, and no cap, in account {name!r}: quota() gives one")
    last = find_entry(connection, name, quota.sequence)
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
    return None if row is None else Held(row.terms, _parse_totals(row.totals, name), row.sequence)


def find_entry(connection: sa.Connection, name: str, sequence: int) -> Row | None:
    """Return an entry by its place."""
    row = connection.execute(
        sa.select(entries).where(entries.c.account == name, entries.c.sequence == sequence)
    ).one_or_none()
    return None if row is None else make_row(row)


def find_hash(connection: sa.Connection, name: str, sequence: int) -> str | None:
    """Return an entry's hash by its place; the one before the first is known."""
    if sequence == 0:
        return GENESIS
    query = sa.select(entries.c.hash).where(entries.c.account == name, entries.c.sequence == sequence)
    return connection.execute(query).scalar_one_or_none()


def find_entry_by_key(connection: sa.Connection, name: str, key: str, kind: str) -> Row | None:
    """Return the debit or the message of a key."""
    query = sa.select(entries).where(entries.c.slot == make_slot(name, key, kind))
    row = connection.execute(query).one_or_none()
    return None if row is None else make_row(row)


def read_entries(connection: sa.Connection, name: str) -> Iterator[tuple[Row, str]]:
    """Yield the entries of an account in their order, each with the hash that is kept with it."""
    query = sa.select(entries).where(entries.c.account == name).order_by(entries.c.sequence)
    for row in connection.execution_options(yield_per=500).execute(query):
        yield make_row(row), row.hash


def make_row(row: Any) -> Row:
    """Return a database row as an entry."""
    return Row(**{name: getattr(row, name) for name in _FIELDS})


def append_entry(
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
    """Write the next entry, the account and the quota; `book.held` and `quota` hold the totals after it already."""
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
        slot=make_slot(book.name, key, kind),
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
    held = Held(terms, parse_budget(terms).nothing, 0)
    values = {"name": name, "opening": opening, "terms": terms, "totals": held.text, "sequence": 0, "head": GENESIS}
    connection.execute(sa.insert(accounts).values(values))
    return Book(name, opening, held, GENESIS)


def insert_quota(connection: sa.Connection, name: str, client: str, terms: str) -> Held:
    """Write a new quota."""
    held = Held(terms, parse_budget(terms).nothing, 0)
    values = {"account": name, "client": client, "terms": terms, "totals": held.text, "sequence": 0}
    connection.execute(sa.insert(quotas).values(values))
    return held


def _parse_totals(text: str, name: str) -> Amounts:
    try:
        return tuple(None if total is None else int(total) for total in json.loads(text))
    except (TypeError, ValueError):
        raise CorruptLedgerError(f"account {name!r}: its totals cannot be read; verify() says more") from None
