"""Accounts and their debits: durable before the mechanism runs, and there to stay."""

import base64
import os
import random
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, TypeAlias, TypeVar, cast

import sqlalchemy as sa
from dp_accounting import DpEvent, SelfComposedDpEvent
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
    find_quota,
    insert_quota,
    load_book,
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
from nearveil.ledger.errors import (
    AccountError,
    CorruptLedgerError,
    KeyConflictError,
    KeySpentError,
    LedgerError,
    LedgerFullError,
    LedgerUnavailableError,
)
from nearveil.ledger.history import (
    Balance,
    Entry,
    Preview,
    is_affordable,
    make_balance,
    make_entry,
    make_preview,
    make_refusal,
)
from nearveil.privacy import Basis, Guarantee
from nearveil.privacy.checks import check_count, check_text
from nearveil.privacy.events import Budgeted
from nearveil.privacy.guarantee import FilterTerms, Protects, Relation
from nearveil.storage import describe_url, find_error, is_connection_refused, is_transient

if TYPE_CHECKING:
    from nearveil.ledger._ledger import Ledger

T = TypeVar("T")

_BUSY = 0.025  # seconds: SQLite's own waiting grows longer and longer, which starves the late; short rounds are fair
_JITTER = random.SystemRandom()


class LedgerDatabase(storage.Database):
    """A database whose transactions are tried again until they stand; `read_only` leaves any SQLite file as it is."""

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

        A commit may stand whose connection died: `work` must see that itself, under the lock, by the nonce.
        """
        return self._run_until_done(work, self.begin_write)

    def read(self, work: Callable[[sa.Connection], T]) -> T:
        """Run `work` on one consistent view of everything, writing nothing."""
        return self._run_until_done(work, self.begin_read)

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

    def _run_until_done(
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
        "the disk is full or does not answer; a debit may stand or not. Release nothing, and see to the disk",
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
    if is_connection_refused(error):
        return LedgerUnavailableError(
            f"{where}: connection refused: no server listens there. Start it, or check host and port; release nothing, "
            "and try again with the same key"
        )
    if not is_transient(error):
        return LedgerError(
            f"{where}: the database refused ({kind}): check its address, the role and its rights. Release nothing"
        )
    return LedgerUnavailableError(
        f"{where}: the database did not answer ({kind}). A debit may stand or not; "
        "release nothing, and try again with the same key"
    )


Clock = Callable[[], datetime]


def read_utc_clock() -> datetime:
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
    ...                 debit.store(b"what is sent")
    ...         print(debit.repeated, debit.message)
    False b'what is sent'
    True b'what is sent'
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
        granted = min(_count_times(held, request.charge, most) for held in (book.held, cap) if held is not None)
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


def _count_times(held: Held, charge: Charge, most: int) -> int:
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
        message = _find_message(connection, request, earlier)
        request = replace(request, nonce=earlier.nonce)
        return Debit(core, request, book.receipt, message, repeated=True), None
    book = _append(connection, core, book, request, quota, cap)
    return Debit(core, request, book.receipt, None, repeated=False), book.receipt


def _append(
    connection: sa.Connection, core: Core, book: Book, request: SpendRequest, quota: Held | None, cap: Held | None
) -> Book:
    """Write the debit of an account, a client and a cap, or leave the transaction."""
    held, price = _pay_charge(book.held, request.charge, None)
    paid = {"charge": request.charge, "price": price}
    if quota is not None:
        quota, paid["client_price"] = _pay_charge(quota, request.charge, request.client)
    about = {"time": core.now(), "nonce": request.nonce, "key": request.key}
    book, payload = replace(book, held=held), canonical_json(paid)
    book = append_entry(connection, book, kind="debit", payload=payload, client=request.client, quota=quota, **about)
    if cap is not None:
        cap, price = _pay_charge(cap, request.charge, request.cap)
        payload = canonical_json({"price": price})
        book = append_entry(connection, book, kind="take", payload=payload, client=request.cap, quota=cap, **about)
    return book


def _pay_charge(held: Held, charge: Charge, client: str | None) -> tuple[Held, Any]:
    try:
        price = held.budget.price(charge)
    except UnpricedError:
        raise _RefusedSpendError(client, held) from None
    totals = add_amounts(held.totals, price)
    if not held.budget.allows(totals):
        raise _RefusedSpendError(client, held)
    return replace(held, totals=totals), price


def _find_message(connection: sa.Connection, request: SpendRequest, earlier: Row) -> bytes:
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


Parts: TypeAlias = Iterable[tuple[Guarantee, int]]
"""Several releases, and how often each happens."""


class Account:
    """A budget that lasts, and the way to spend it. Made by :class:`Ledger`, whose example shows one; never directly.

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
        """Whose account it is."""
        return str(self._about["owner"])

    @property
    def protects(self) -> Protects:
        """Whose record is protected, "query" or "database"."""
        return cast("Protects", self._about["protects"])

    @property
    def unit(self) -> str:
        """What one record is."""
        return str(self._about["unit"])

    @property
    def relation(self) -> Relation:
        """How two inputs that shall look alike differ, "replace" or "add-remove"."""
        return cast("Relation", self._about["relation"])

    @property
    def kind(self) -> str:
        """Plan, filter or pure."""
        return self._budget.kind

    @property
    def epsilon(self) -> float:
        """The budget."""
        return self._budget.epsilon

    @property
    def delta(self) -> float:
        """The budget."""
        return self._budget.delta

    @property
    def guarantee(self) -> Guarantee:
        """What holds for everything that is ever paid from it: all of a plan, or whatever a filter lets pass.

        Samplers of finite precision may add to delta, at most 1e-5 of it (or 1e-20, if that is more) with each
        mechanism; screenings more, where the account's epsilon is above their plan's. See docs/theory/ledger.md.
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
        """Return what is spent and what is left, of the account or of a client's quota."""
        return make_balance(self.name, client, self._held(client))

    def remaining(self, cap: str | None = None) -> tuple[tuple[DpEvent, int], ...]:
        """Return what may still be taken of the account's plan, or of a cap; empty for accounts without a plan."""
        held = self._held(cap)
        return read_charge(held.budget.left(held.totals)) if isinstance(held.budget, PlanBudget) else ()

    def assert_affordable(self, guarantee: Guarantee | Parts) -> None:
        """Raise OverBudgetError, with figures, unless all of it could be paid now. Nothing is spent."""
        charge, held = self._charge(guarantee), self._held(None)
        if not is_affordable(held, charge):
            raise make_refusal(make_preview(self.name, None, held, charge))

    def preview(self, guarantee: Guarantee | Parts, *, client: str | None = None) -> Preview:
        """Return what a spend would cost and leave, spending nothing.

        With a `client`, whose quota would pay too, the figures are of whichever refuses, else of the quota.
        """
        charge = self._charge(guarantee)
        whole = make_preview(self.name, None, self._held(None), charge)
        if client is None or not whole.allowed:
            return whole
        return make_preview(self.name, client, self._held(client), charge)

    def spend(
        self, guarantee: Guarantee, key: str | None = None, *, client: str | None = None, cap: str | None = None
    ) -> Debit:
        """Pay, *before* the mechanism runs: when this returns, the debit is durable and stays.

        Parameters
        ----------
        guarantee : Guarantee
            Of what is about to be released: sound, and about what the account protects. Its events are what is paid.
        key : str, optional
            Names this release; :func:`new_key` by default. The same key with the same events never pays twice: it
            gives back the stored message. Never derive it from the record: the ledger keeps it in the clear.
        client : str, optional
            Whose quota pays as well, in the same transaction.
        cap : str, optional
            The cap that counts it as well, in the same transaction; see :meth:`open_cap`.

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
            Whether a debit stands is not known; release nothing.
        """
        key = new_key() if key is None else check_text(key, "key")
        if client is not None:
            check_text(client, "client")
        request = SpendRequest(self.name, self._charge_once(guarantee), key, client, cap)
        return spend(self._core, request, self._book.held.terms)

    def take(self, guarantee: Guarantee, most: int, *, cap: str | None = None) -> int:
        """Pay for a release as often as a cap, and the account's plan if it has one, still allow, at most `most` times.

        Returns how many are paid for, and may happen. Raises as :meth:`spend`: an account without a plan pays for all
        that the cap allows, or for nothing.
        """
        check_count(most, "most")
        return take(self._core, SpendRequest(self.name, self._charge_once(guarantee), new_key(), None, cap), most)

    def quota(
        self, client: str, *, epsilon: float | None = None, delta: float | None = None, plan: Events | None = None
    ) -> Balance:
        """Give a client a part of the budget. Quotas may add up to more than the account: its own limit always holds.

        Accounts without a plan need an `epsilon` (`delta` is the account's by default), accounts with one a part of it.
        """
        check_text(client, "client")
        part = self._part(epsilon, delta, plan)
        if not self._budget.contains(part):
            raise ValueError("quota must be a part of the account's budget: smaller, and at no larger delta")
        return make_balance(self.name, client, self._give("quota", client, part.terms()))

    def open_cap(self, plan: Events) -> str | None:
        """Open a cap: how often each mechanism may happen at all, for whoever knows its name.

        An estimator opens one when it is fitted. Its copies, its pickles and the processes that it forks take from the
        same counts, so together they do what one estimator stated, whatever else the account could pay. Returns its
        name, for :meth:`spend` and :meth:`remaining`, or None where the account has this very plan and caps it itself.
        """
        if self.has_plan(plan):
            return None
        name = f"cap {new_key()}"
        self._give("cap", name, self._plan_budget(plan).terms())
        return name

    def has_plan(self, plan: Events) -> bool:
        """Return whether the account was opened with this very plan."""
        return self._budget == self._plan_budget(plan)

    def _plan_budget(self, plan: Events) -> PlanBudget:
        return PlanBudget.open(self.epsilon, self.delta, make_charge(plan, self.relation))

    def _give(self, kind: Literal["quota", "cap"], name: str, terms: str) -> Held:
        """Write a quota or a cap that is not there yet."""
        nonce, core = secrets.token_hex(16), self._core

        def work(connection: sa.Connection) -> tuple[Held, Receipt | None]:
            book = load_book(connection, self.name, core.witness, lock=True)
            there = find_quota(connection, self.name, name)
            if there is not None:
                if there.terms == terms:
                    return there, book.receipt  # given already, perhaps by an attempt of ours whose answer was lost
                raise AccountError(f"client {name!r} has another quota already: quotas do not change")
            held, payload = insert_quota(connection, self.name, name, terms), canonical_json({"terms": terms})
            book = append_entry(
                connection, book, kind=kind, time=core.now(), nonce=nonce, payload=payload, client=name, quota=held
            )
            return held, book.receipt

        return core.write(work)

    def receipt(self) -> Receipt:
        """Return how far the account has come, to be kept elsewhere and shown to :meth:`Ledger.verify`."""
        return self._load().receipt

    def history(self) -> list[Entry]:
        """Return all entries, in their order."""
        return self._core.read(lambda connection: [make_entry(*line) for line in read_entries(connection, self.name)])

    def _charge(self, guarantee: Guarantee | Parts) -> Charge:
        if isinstance(guarantee, Guarantee) or not isinstance(guarantee, Iterable):
            return self._charge_once(guarantee)
        pairs = [part if isinstance(part, tuple) and len(part) == 2 else (part, 1) for part in guarantee]
        return join_charges(
            repeat_charge(self._charge_once(one), check_count(times, "times", least=1)) for one, times in pairs
        )

    def _charge_once(self, guarantee: Guarantee) -> Charge:
        return charge_guarantee(guarantee, self.protects, self.unit, self.relation, self.delta)

    @property
    def _core(self) -> Core:
        return self._ledger._core

    @cached_property
    def _book(self) -> Book:
        """The account when it was first asked for; only what never changes is read from it."""
        return self._load()

    @property
    def _about(self) -> dict[str, Any]:
        return self._book.about

    @property
    def _budget(self) -> Budget:
        return self._book.held.budget

    def _load(self) -> Book:
        # What a reader finds out of step with the witness is told by verify; only spending is refused.
        return self._core.read(lambda connection: load_book(connection, self.name, None))

    def _held(self, client: str | None) -> Held:
        if client is None:
            return self._load().held
        name = check_text(client, "client")
        return self._core.read(lambda connection: load_quota(connection, self.name, name))

    def _part(self, epsilon: float | None, delta: float | None, plan: Events | None) -> Budget:
        if isinstance(self._budget, PlanBudget):
            if plan is None or epsilon is not None or delta is not None:
                raise ValueError("quota of an account with a plan must be a part of it: give plan, and nothing else")
            return self._plan_budget(plan)
        if plan is not None or epsilon is None:
            raise ValueError("quota of an account without a plan must have an epsilon, and no plan")
        return open_budget(epsilon, self.delta if delta is None else delta, None, self.relation)

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


def open_budget(epsilon: float, delta: float, plan: Events | None, relation: Relation) -> Budget:
    """Return the budget of an account: a plan, a filter, or pure epsilons."""
    if plan is not None:
        return PlanBudget.open(epsilon, delta, make_charge(plan, relation))
    return PureBudget.open(epsilon) if delta == 0 else FilterBudget.open(epsilon, delta)


def find_plan_cost(budget: Budget) -> float | None:
    """Return what a plan costs at its delta, by PLD; None where there is no plan."""
    if not isinstance(budget, PlanBudget):
        return None
    try:
        return find_pld_epsilon(tuple(zip(budget.plan, budget.limits, strict=True)), budget.delta)
    except UnpricedError as refused:
        raise ValueError(f"plan cannot be composed: {refused}") from refused
