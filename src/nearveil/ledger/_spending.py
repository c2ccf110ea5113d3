"""Debits: durable before the mechanism runs, and there to stay."""

import base64
import os
import random
import secrets
import sqlite3
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn, Self, TypeVar

import sqlalchemy as sa
from dp_accounting import DpEvent
from sqlalchemy.engine import URL

from nearveil import storage
from nearveil.ledger._store import (
    Book,
    Held,
    Receipt,
    Row,
    Witness,
    append_entry,
    find_entry_by_key,
    load_book,
    load_quota,
)
from nearveil.ledger.budget import (
    Charge,
    PlanBudget,
    UnpricedError,
    add_amounts,
    canonical_json,
    read_charge,
    repeat_charge,
)
from nearveil.ledger.errors import (
    CorruptLedgerError,
    KeyConflictError,
    KeySpentError,
    LedgerError,
    LedgerFullError,
    LedgerUnavailableError,
)
from nearveil.ledger.history import make_preview, make_refusal
from nearveil.storage import describe_url, find_error, is_transient

T = TypeVar("T")

_BUSY = 0.025  # seconds: SQLite's own waiting grows longer and longer, which starves the late; short rounds are fair
_JITTER = random.SystemRandom()


class LedgerDatabase(storage.Database):
    """A database whose transactions are tried again until they stand.

    `timeout`: Seconds to wait for a lock, or for a database that went away.
    `read_only`: Leave a SQLite file as it is, also one that is no ledger.
    """

    def __init__(self, url: URL, timeout: float, *, read_only: bool = False) -> None:
        if url.get_backend_name() == "sqlite" and not read_only:
            with suppress(OSError):  # SQLite says what is wrong
                storage.make_private_file(Path(str(url.database)))
        prepare = _prepare_postgres
        if url.get_backend_name() == "sqlite":
            prepare = _forbid_writing if read_only else storage.prepare_durable
        try:
            super().__init__(url, timeout, prepare=prepare, busy=_BUSY, ping=False)
        except ModuleNotFoundError as missing:
            raise LedgerError("PostgreSQL needs psycopg: pip install nearveil[postgres]") from missing

    def write(self, work: Callable[[sa.Connection], T]) -> T:
        """Run `work` in one durable transaction of its own, and try again where the connection died.

        A connection may die during the commit, and then nobody knows. So `work` runs again, and must itself see, under
        the lock, whether its first attempt stands: by the nonce.
        """
        return self._until_done(work, self.begin_write)

    def read(self, work: Callable[[sa.Connection], T]) -> T:
        """Run `work` on one consistent view of everything, writing nothing."""
        return self._until_done(work, self.begin_read)

    def copy_to(self, target: Path) -> None:
        """Copy a SQLite file to a new one, consistently, while others write."""
        try:
            os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            raise LedgerError(f"backup: {target} exists; a backup overwrites nothing, give another path") from None
        except OSError as error:
            raise LedgerError(f"backup: {target} cannot be written: {error.strerror}") from error
        try:
            with closing(sqlite3.connect(self.path)) as source, closing(sqlite3.connect(target)) as copy:
                source.backup(copy)
        except sqlite3.Error as error:
            target.unlink(missing_ok=True)  # a backup is whole, or it is not there
            raise explain_error(sa.exc.DBAPIError("backup", {}, error), self.url) from error

    def _until_done(
        self, work: Callable[[sa.Connection], T], begin: Callable[[], AbstractContextManager[sa.Connection]]
    ) -> T:
        deadline = time.monotonic() + self.timeout
        while True:
            try:
                return self._attempt(work, begin)
            except (sa.exc.DBAPIError, sa.exc.TimeoutError) as error:
                if not is_transient(error) or time.monotonic() > deadline:
                    raise explain_error(error, self.url) from error
            # Everybody who waits asks equally often, so everybody has the same chance.
            time.sleep(_JITTER.uniform(0.0005, 0.004) if self.is_sqlite else _JITTER.uniform(0.01, 0.1))

    def _attempt(
        self, work: Callable[[sa.Connection], T], begin: Callable[[], AbstractContextManager[sa.Connection]]
    ) -> T:
        with begin() as connection:
            return work(connection)


def _prepare_postgres(connection: Any) -> None:
    # Every lookup has an index. A plan made while the tables were small would read them whole, and be kept.
    connection.execute("SET enable_seqscan = off")
    connection.commit()


def _forbid_writing(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA query_only = ON")  # a journal mode, too, would be written to the file


_ERRORS: dict[int | str, tuple[type[LedgerError], str]] = {
    sqlite3.SQLITE_FULL: (LedgerFullError, "the disk is full: make room, then try again"),
    sqlite3.SQLITE_READONLY: (LedgerError, "the file or its directory is read-only: give this user the right to write"),
    sqlite3.SQLITE_CANTOPEN: (LedgerError, "it cannot be opened: the directory must exist and be writable"),
    sqlite3.SQLITE_PERM: (LedgerError, "this user may not open it"),
    sqlite3.SQLITE_NOTADB: (
        CorruptLedgerError,
        "the file is no SQLite database: give the path of a ledger, or a new path",
    ),
    sqlite3.SQLITE_CORRUPT: (
        CorruptLedgerError,
        "the file is damaged: put the newest backup back, and treat what is missing as spent",
    ),
    sqlite3.SQLITE_IOERR: (
        LedgerUnavailableError,
        "the disk does not answer; a debit may stand or not. Release nothing, and see to the disk",
    ),
    sqlite3.SQLITE_ERROR: (CorruptLedgerError, "its tables are not those of a ledger: put the newest backup back"),
    sqlite3.SQLITE_BUSY: (LedgerUnavailableError, "others held its lock all the time; release nothing, try again"),
    "53100": (LedgerFullError, "the server's disk is full: make room, then try again"),
    "55P03": (LedgerUnavailableError, "others held the account's lock all the time; release nothing, try again"),
    "42P01": (CorruptLedgerError, "its tables are not those of a ledger: put the newest backup back"),
    "42501": (LedgerError, "this role may not use the ledger's tables: grant it the right"),
    "25006": (LedgerError, "the server is read-only (a replica?): connect to the primary"),
    "28P01": (LedgerError, "the server refuses the password"),
    "3D000": (LedgerError, "the server has no such database: create it first"),
}


def explain_error(error: Exception, url: URL) -> LedgerError:
    """Return a database error as one that says what to do, without what was being written."""
    where = f"ledger {describe_url(url)}"
    found, kind = find_error(error, _ERRORS), type(getattr(error, "orig", None) or error).__name__
    if found is not None:
        return found[0](f"{where}: {found[1]}")
    if not is_transient(error):
        return LedgerError(
            f"{where}: the database refused ({kind}): check its address, the role and its rights. Release nothing"
        )
    return LedgerUnavailableError(
        f"{where}: the database did not answer ({kind}). A debit may stand or not; "
        "release nothing, and try again with the same key"
    )


Clock = Callable[[], datetime]


def utc_now() -> datetime:
    """Return the time of the system's clock."""
    return datetime.now(UTC)


def new_key() -> str:
    """Return a fresh key: 128 random bits, in hexadecimal.

    Examples
    --------
    >>> len(new_key()), new_key() == new_key()
    (32, False)
    """
    return secrets.token_hex(16)


@dataclass(frozen=True)
class Core:
    """One open ledger."""

    database: LedgerDatabase
    witness: Witness | None
    clock: Clock
    read_only: bool

    def now(self) -> str:
        """Return the time as it is written, in UTC. It informs people; nothing is decided by it."""
        return self.clock().astimezone(UTC).isoformat(timespec="microseconds")

    def write(self, work: Callable[[sa.Connection], tuple[T, Receipt | None]]) -> T:
        """Run `work` in one durable transaction, then tell the witness how far the account has come."""
        if self.read_only:
            raise LedgerError("this ledger was opened with read_only=True: open it without, to spend")
        result, receipt = self.database.write(work)
        if self.witness is not None and receipt is not None:
            self.witness.raise_to(receipt)
        return result

    def read(self, work: Callable[[sa.Connection], T]) -> T:
        """Run `work` on one consistent view."""
        return self.database.read(work)


LARGEST_MESSAGE = 16 * 2**20


@dataclass(frozen=True)
class SpendRequest:
    """What one call of `spend` asks for. The nonce is its own, however often it is tried."""

    account: str
    charge: Charge
    key: str
    client: str | None
    cap: str | None
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))


class Debit:
    """A spend that stands. Use it as a context; run the mechanism inside, then `store` the message, then send it.

    :meth:`Account.spend` returns one; the example of :class:`Ledger` shows it.

    Attributes
    ----------
    key : str
    client : str or None
    repeated : bool
        Whether the key was spent before. Then run nothing: `message` is what was released.
    message : bytes or None
        The public message: of an earlier spend with this key, or as stored here.
    nonce : str
        128 random bits, drawn when the key was first spent and kept in the ledger. Who must name the release to
        others derives a name from it: one made from the key could be guessed.
    receipt : Receipt
        How far the account had come.
    """

    def __init__(
        self, core: Core, request: SpendRequest, receipt: Receipt, message: bytes | None, *, repeated: bool
    ) -> None:
        self.key, self.client = request.key, request.client
        self.repeated, self.message, self.receipt = repeated, message, receipt
        self.nonce = request.nonce
        self._core, self._request, self._process, self._open = core, request, os.getpid(), True

    @property
    def events(self) -> tuple[tuple[DpEvent, int], ...]:
        """The single mechanisms that were paid for."""
        return read_charge(self._request.charge)

    def store(self, message: bytes) -> None:
        """Keep the public message, durably, so that the same key returns it. Store first, then send.

        Give what is released, and nothing else: whoever reads the ledger reads it.
        """
        if not isinstance(message, bytes) or len(message) > LARGEST_MESSAGE:
            raise ValueError(f"message must be bytes, at most {LARGEST_MESSAGE} of them")
        if self.repeated or self.message is not None:
            raise LedgerError("a message is stored already for this key; a key releases one message, once")
        if not self._open or os.getpid() != self._process:
            raise LedgerError("only who holds the debit stores its message: inside the context, in the same process")
        payload = canonical_json({"message": base64.b64encode(message).decode("ascii")})
        self.receipt = self._core.write(
            lambda connection: _append_message(connection, self._core, self._request, payload)
        )
        self.message = message

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._open = False  # the debit stays, whatever happened inside

    def __reduce__(self) -> NoReturn:
        raise TypeError("a debit belongs to the process that made it: it is not copied or sent")

    def __repr__(self) -> str:
        return f"Debit(key={self.key!r}, repeated={self.repeated}, entry={self.receipt.sequence})"


class _RefusedSpendError(Exception):
    """Leaves a transaction without a trace; the figures are computed outside, where nobody waits."""

    def __init__(self, client: str | None, held: Held) -> None:
        super().__init__()
        self.client, self.held = client, held


def spend(core: Core, request: SpendRequest, terms: str) -> Debit:
    """Debit an account durably, or find the debit of the same key.

    `terms`: Of the account, to price the charge before anybody is made to wait.
    """
    with suppress(UnpricedError):
        Held(terms, (), 0).budget.price(request.charge)
    try:
        return core.write(lambda connection: _debit(connection, core, request))
    except _RefusedSpendError as refused:
        held, client = refused.held, refused.client
    raise make_refusal(make_preview(request.account, client, held, request.charge))


def take(core: Core, request: SpendRequest, most: int) -> int:
    """Debit an account durably for a charge as often as its plan and the cap still allow, at most `most` times.

    `request`: Its charge is of one time.
    Returns: How often. 0 writes nothing.
    """

    def work(connection: sa.Connection) -> tuple[int, Receipt | None]:
        book = load_book(connection, request.account, core.witness, lock=True)
        earlier = find_entry_by_key(connection, request.account, request.key, "debit")
        if earlier is not None:  # our own, whose answer was lost: nobody else has the key
            return dict(earlier.content["charge"])[request.charge[0][0]] // request.charge[0][1], book.receipt
        cap = None if request.cap is None else load_quota(connection, request.account, request.cap)
        granted = min(_times(held, request.charge, most) for held in (book.held, cap) if held is not None)
        if not granted:
            return 0, None
        book = _append(
            connection, core, book, replace(request, charge=repeat_charge(request.charge, granted)), None, cap
        )
        return granted, book.receipt

    try:
        return core.write(work)
    except _RefusedSpendError as refused:
        held = refused.held
    raise make_refusal(make_preview(request.account, None, held, repeat_charge(request.charge, most)))


def _times(held: Held, charge: Charge, most: int) -> int:
    """Return how often a charge is left of a plan, or `most`."""
    if not isinstance(held.budget, PlanBudget):
        return most
    left = dict(held.budget.left(held.totals))
    return min(most, *(left.get(text, 0) // times for text, times in charge))


def _debit(connection: sa.Connection, core: Core, request: SpendRequest) -> tuple[Debit, Receipt | None]:
    book = load_book(connection, request.account, core.witness, lock=True)
    earlier = find_entry_by_key(connection, request.account, request.key, "debit")
    if earlier is not None and earlier.nonce == request.nonce:
        # Our own: the connection died after the commit, before it could say so.
        return Debit(core, request, book.receipt, None, repeated=False), book.receipt
    quota, cap = (
        None if name is None else load_quota(connection, request.account, name)
        for name in (request.client, request.cap)
    )
    if earlier is not None:
        message = _stored(connection, request, earlier)
        request = replace(request, nonce=earlier.nonce)
        return Debit(core, request, book.receipt, message, repeated=True), None
    book = _append(connection, core, book, request, quota, cap)
    return Debit(core, request, book.receipt, None, repeated=False), book.receipt


def _append(
    connection: sa.Connection, core: Core, book: Book, request: SpendRequest, quota: Held | None, cap: Held | None
) -> Book:
    """Write the debit of an account, a client and a cap, or leave the transaction."""
    held, price = _pay(book.held, request.charge, None)
    paid = {"charge": request.charge, "price": price}
    if quota is not None:
        quota, paid["client_price"] = _pay(quota, request.charge, request.client)
    about = {"time": core.now(), "nonce": request.nonce, "key": request.key}
    book, payload = replace(book, held=held), canonical_json(paid)
    book = append_entry(connection, book, kind="debit", payload=payload, client=request.client, quota=quota, **about)
    if cap is not None:
        cap, price = _pay(cap, request.charge, request.cap)
        payload = canonical_json({"price": price})
        book = append_entry(connection, book, kind="take", payload=payload, client=request.cap, quota=cap, **about)
    return book


def _pay(held: Held, charge: Charge, client: str | None) -> tuple[Held, Any]:
    try:
        price = held.budget.price(charge)
    except UnpricedError:
        raise _RefusedSpendError(client, held) from None
    totals = add_amounts(held.totals, price)
    if not held.budget.allows(totals):
        raise _RefusedSpendError(client, held)
    return replace(held, totals=totals), price


def _stored(connection: sa.Connection, request: SpendRequest, earlier: Row) -> bytes:
    """Return the message of a key that was spent before."""
    charged = tuple((text, times) for text, times in earlier.content["charge"])
    if earlier.client != request.client or charged != request.charge:
        # One sentence for both: whoever tries another's key learns nothing more.
        raise KeyConflictError("key was used before, for something else: take a new one (new_key())")
    message = find_entry_by_key(connection, request.account, request.key, "message")
    if message is None:
        raise KeySpentError(
            "key was spent and its message never stored: it is spent. Release nothing for it; to release, spend again "
            "with a new key"
        )
    return base64.b64decode(message.content["message"])


def _append_message(
    connection: sa.Connection, core: Core, request: SpendRequest, payload: str
) -> tuple[Receipt, Receipt | None]:
    book: Book = load_book(connection, request.account, core.witness, lock=True)
    debit = find_entry_by_key(connection, request.account, request.key, "debit")
    if debit is None or debit.nonce != request.nonce:
        raise LedgerError("this debit is no longer in the ledger: release nothing, and verify the ledger")
    stored = find_entry_by_key(connection, request.account, request.key, "message")
    if stored is not None and stored.payload == payload:
        return book.receipt, book.receipt  # our own, whose answer was lost: nobody else holds the debit
    if stored is not None:
        raise LedgerError("another message is stored already for this key; a key releases one message, once")
    book = append_entry(
        connection, book, kind="message", time=core.now(), nonce=request.nonce, payload=payload, key=request.key
    )
    return book.receipt, book.receipt
