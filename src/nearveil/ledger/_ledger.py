"""The ledger: budgets that survive crashes and cannot be raced."""

import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self
from weakref import WeakValueDictionary

import sqlalchemy as sa
from sqlalchemy.engine import URL

from nearveil.ledger._store import (
    Receipt,
    Row,
    Witness,
    append_entry,
    find_entry,
    find_identity,
    find_version,
    insert_book,
    is_current,
    load_witnessed_book,
    migrate,
    read_entries,
    read_receipts,
)
from nearveil.ledger._verify import Verification, find_witness_problems, list_accounts, verify
from nearveil.ledger.account import Account, Clock, Core, LedgerDatabase, find_plan_cost, open_budget, read_utc_clock
from nearveil.ledger.budget import Events, canonical_json, format_up
from nearveil.ledger.errors import AccountError, LedgerError, OverBudgetError, RolledBackError
from nearveil.ledger.history import Entry, export_rows, make_entry
from nearveil.privacy.checks import check_choice, check_text
from nearveil.privacy.guarantee import Protects, Relation
from nearveil.storage import data_folder, describe_url, make_data_folder, parse_url, without_secrets


class Ledger:
    """Accounts in a database: a SQLite file, or PostgreSQL.

    A pickle holds the address without its password. Where it is loaded, PostgreSQL's library finds the password in
    PGPASSWORD or ~/.pgpass; a process that has the ledger open goes on with that one.

    Parameters
    ----------
    url : str, Path or sqlalchemy.URL, default="nearveil.db"
        A path, or a URL such as ``postgresql://user@host/database``.
    witness : str or Path, optional
        A file outside the database that notices an old copy put back, or a replica that lags. By default beside a
        SQLite file (``nearveil.db.witness``); for PostgreSQL in this user's data folder
        (``~/.local/share/nearveil/witness/``), by the ledger's identity, which its copies share.
    clock : callable, optional
        Returns the time, with its zone. Informative only.
    timeout : float, default=30.0
        Seconds to wait for locks, or for a database that went away.
    read_only : bool, default=False
        For looking and verifying only: works where spending is refused, writes nothing, makes no file.

    Examples
    --------
    >>> import tempfile
    >>> from nearveil.privacy import Basis, compose_events
    >>> from nearveil.privacy.events import PureDp
    >>> about = {"protects": "query", "unit": "image", "relation": "replace"}
    >>> quarter = compose_events([PureDp(0.25)], delta=0.0, basis=Basis("randomised response"), **about)
    >>> folder = tempfile.TemporaryDirectory()
    >>> with Ledger(Path(folder.name) / "budget.db") as ledger:
    ...     account = ledger.open_account("camera", owner="me", epsilon=1.0, delta=0.0, **about)
    ...     with account.spend(quarter) as debit:
    ...         debit.store(b"what is sent")
    ...     print(account.balance())
    account camera: budget epsilon 1 at delta 0, spent 0.25, left 0.75
    >>> folder.cleanup()
    """

    def __init__(
        self,
        url: str | Path | URL = "nearveil.db",
        *,
        witness: str | Path | None = None,
        clock: Clock = read_utc_clock,
        timeout: float = 30.0,
        read_only: bool = False,
    ) -> None:
        if not timeout > 0:
            raise ValueError("timeout must be a positive number of seconds")
        database = LedgerDatabase(parse_url(url, "url"), timeout, read_only=read_only)
        self._witness = None if witness is None else Path(witness).expanduser().absolute()
        beside = Path(f"{database.path}.witness") if witness is None and database.is_sqlite else self._witness
        self._core = Core(database, None if beside is None else Witness(beside), clock, read_only)
        try:
            self._check_place()
            if read_only:
                self._check_version()
            else:
                self._prepare()
            if self._core.witness is None:
                self._core = replace(self._core, witness=self._find_witness())
            if not read_only:
                self._check_witness()
        except BaseException:
            database.close()
            raise
        _OPEN[self._terms] = self

    def open_account(
        self,
        name: str,
        *,
        owner: str,
        protects: Protects,
        unit: str,
        relation: Relation,
        epsilon: float,
        delta: float,
        plan: Events | None = None,
    ) -> Account:
        """Open an account; its terms never change.

        Parameters
        ----------
        name, owner : str
        protects : {"query", "database"}
            Whose record it is.
        unit : str
            What one record is: "image", "person with all images".
        relation : {"replace", "add-remove"}
            How two inputs that shall look alike differ.
        epsilon : float
        delta : float
            Above 0: a plan composed by PLD, or without one a Renyi filter, for parameters chosen along the way.
            0: pure epsilons are added up.
        plan : DpEvent, or iterable of DpEvent or (DpEvent, int), optional
            Everything that may ever be spent, in any order.

        Raises
        ------
        OverBudgetError
            If the plan costs more than the budget.
        AccountError
            If there is an account of that name.
        """
        check_text(name, "name")
        opening = canonical_json(_make_opening(owner, protects, unit, relation))
        budget = open_budget(epsilon, delta, plan, relation)
        cost = find_plan_cost(budget)
        if cost is not None and cost > budget.epsilon:
            raise OverBudgetError(
                f"plan costs epsilon {format_up(cost)} at delta {budget.delta:g}, which is more than the budget of "
                f"{budget.epsilon:g}; no account was opened",
                epsilon=budget.epsilon,
                spent=0.0,
                cost=cost,
                left=budget.epsilon,
            )
        nonce, core, terms = secrets.token_hex(16), self._core, budget.terms()

        def work(connection: sa.Connection) -> tuple[None, Receipt | None]:
            book = load_witnessed_book(connection, name, core.witness, lock=True)
            if book is not None:
                first = find_entry(connection, name, 1)
                if first is not None and first.nonce == nonce:
                    return None, book.receipt
                raise AccountError(f"account {name!r} exists already: account() returns it")
            book = insert_book(connection, name, opening, terms)
            payload = canonical_json({"opening": opening, "terms": terms, "cost": cost})
            return None, append_entry(
                connection, book, kind="opened", time=core.now(), nonce=nonce, payload=payload
            ).receipt

        core.write(work)
        return self.account(name)

    def account(self, name: str) -> Account:
        """Return an account."""
        account = Account(self, check_text(name, "name"))
        account._load()
        return account

    def accounts(self) -> list[Account]:
        """Return all accounts, by name."""
        return [Account(self, name) for name in self._core.read(list_accounts)]

    @property
    def has_witness(self) -> bool:
        """Whether a witness remembers the newest entries, so that an old copy would be noticed."""
        return self._core.witness is not None and self._core.witness.exists()

    def verify(self, account: str | None = None, *, receipts: Sequence[Receipt | str] = ()) -> Verification:
        """Recompute everything: hashes, totals, budgets; compare with the witness and with receipts.

        Checks all accounts by default. `receipts` are those that :meth:`Account.receipt` gave and that were kept
        elsewhere, as they are or as they were printed.
        """
        known = [Receipt.parse(one) if isinstance(one, str) else one for one in receipts]
        return verify(self._core, None if account is None else check_text(account, "account"), known)

    def history(self) -> list[Entry]:
        """Return the entries of all accounts, account by account."""
        return [make_entry(*line) for line in self._read_all()]

    def export(self, format: Literal["json", "csv"] = "json") -> str:  # noqa: A002
        """Return everything as text: all entries of all accounts, with their hashes."""
        return export_rows(self._read_all(), format)

    def _read_all(self) -> list[tuple[Row, str]]:
        return self._core.read(
            lambda connection: [line for name in list_accounts(connection) for line in read_entries(connection, name)]
        )

    def backup(self, path: str | Path) -> None:
        """Copy a SQLite ledger to a new file, which must not exist, consistently, while others spend.

        A backup is for the day the disk dies. It is no second ledger: what is spent in one is not spent in the other.
        """
        if not self._core.database.is_sqlite:
            raise LedgerError("PostgreSQL is backed up by its own tools: pg_dump; export() gives the entries as text")
        self._core.database.copy_to(Path(path).expanduser().absolute())

    def close(self) -> None:
        """Close the connections. The ledger opens new ones if it is used again."""
        self._core.database.close()

    def _check_place(self) -> None:
        database = self._core.database
        if not database.is_sqlite:
            return
        if not database.path.parent.is_dir():
            raise LedgerError(f"ledger {database.path}: its directory does not exist; make it, or give another path")
        if database.path.is_dir():
            raise LedgerError(f"ledger {database.path}: this is a directory; give the path of a file")
        if self._core.read_only and not database.path.exists():
            raise LedgerError(f"ledger {database.path}: there is none, and read_only makes none")

    def _prepare(self) -> None:
        """Make the tables, or bring them up to date."""
        database, witness = self._core.database, self._core.witness
        if witness is not None and not witness.exists():
            if (database.is_sqlite and not database.path.exists()) or not self._has_accounts():
                witness.create()
            elif not witness.exists():  # another process may have made it, and then an account, since we looked
                raise RolledBackError(
                    f"witness {witness.path} is missing: without it, an old copy of the database would not be noticed. "
                    "Put it back beside the database; an empty file in its place accepts the database as it is"
                )
        if not database.read(is_current):
            database.write(migrate)

    def _find_witness(self) -> Witness | None:
        """Return the witness of a PostgreSQL ledger in this user's data folder, made when the ledger is first seen."""
        identity = self._core.read(find_identity)
        if identity is None:  # of an earlier version, and only looked at
            return None
        watching = Witness(data_folder() / "witness" / identity)
        if self._core.read_only or watching.exists():
            return watching
        receipts = self._core.read(read_receipts)
        try:
            make_data_folder("witness")
        except OSError as error:
            raise LedgerError(
                f"witness cannot be created at {watching.path} ({error.strerror}): give a path of your own (witness=), "
                "or a data folder that can be written (XDG_DATA_HOME)"
            ) from error
        watching.create()
        for receipt in receipts:
            watching.raise_to(receipt)
        return watching

    def _check_witness(self) -> None:
        """Raise if the witness has seen more than the database has."""
        # The witness is read before the database: it must not have seen more than we shall see.
        witness = self._core.witness
        problems = [] if witness is None else find_witness_problems(self._core, witness.known())
        if problems:
            raise RolledBackError(
                f"{'; '.join(problems)}: an old or another copy of the database was put here, or this is a replica "
                "that lags. Put the newest one back. "
                "Ledger(..., read_only=True).verify() says more"
            )

    def _has_accounts(self) -> bool:
        return self._core.read(lambda connection: is_current(connection) and bool(list_accounts(connection)))

    def _check_version(self) -> None:
        if self._core.read(find_version) is None:
            raise LedgerError(f"{self!r} holds no ledger: open it once without read_only")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def _terms(self) -> tuple[Any, ...]:
        """What opens it again, but for the password."""
        core = self._core
        return without_secrets(core.database.url), self._witness, core.clock, core.database.timeout, core.read_only

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, self._terms

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ledger) and self._terms[0] == other._terms[0]

    def __hash__(self) -> int:
        return hash(self._terms[0])

    def __repr__(self) -> str:
        return f"Ledger({describe_url(self._core.database.url)!r})"


_OPEN: WeakValueDictionary[tuple[Any, ...], Ledger] = WeakValueDictionary()


def _reopen(where: URL, witness: Path | None, clock: Clock, timeout: float, read_only: bool) -> Ledger:
    """Return the ledger of a pickle: the one that this process has open, with its password, or a new one without."""
    found = _OPEN.get((where, witness, clock, timeout, read_only))
    return found or Ledger(where, witness=witness, clock=clock, timeout=timeout, read_only=read_only)


def _make_opening(owner: str, protects: Protects, unit: str, relation: Relation) -> dict[str, str]:
    check_choice(protects, "protects", Protects)
    check_choice(relation, "relation", Relation)
    owner, unit = check_text(owner, "owner"), check_text(unit, "unit")
    return {"owner": owner, "protects": protects, "unit": unit, "relation": relation}
