"""The ledger: accounts in a database, safe against crashes and concurrent spends."""

from __future__ import annotations

import csv
import io
import json
import math
import secrets
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Literal
from weakref import WeakValueDictionary

import sqlalchemy as sa
from sqlalchemy.engine import URL

from nearveil.ledger import store
from nearveil.ledger._verify import Verification, find_witness_problems, verify
from nearveil.ledger.account import Account
from nearveil.ledger.budget import Events, Releases, canonical_json, find_plan_cost, format_up, open_budget
from nearveil.ledger.database import Clock, LedgerDatabase, read_utc_clock
from nearveil.ledger.errors import AccountError, BudgetWarning, LedgerError, OverBudgetError, RolledBackError
from nearveil.ledger.store import OPENED, BudgetRow, Entry, Receipt
from nearveil.ledger.witness import Witness
from nearveil.privacy.checks import check_choice, check_text
from nearveil.privacy.guarantee import Protects, Relation
from nearveil.storage import data_folder, describe_url, make_data_folder, parse_url, without_secrets

_VACUOUS = 100.0  # epsilon: odds may change by a factor of 10^43


class Ledger(AbstractContextManager["Ledger"]):
    """Accounts in a database: a SQLite file, or PostgreSQL.

    A pickle holds the address without its password. When it is loaded, libpq reads the password from PGPASSWORD or
    ~/.pgpass; a process that has the ledger open uses that one.

    Parameters
    ----------
    url : str, Path or sqlalchemy.URL, default="nearveil.db"
        A path, or a URL such as ``postgresql://user@host/database``.
    witness : str or Path, optional
        A file outside the database that detects a restored old copy, or a replica that lags. By default next to the
        SQLite file (``nearveil.db.witness``); for PostgreSQL in this user's data folder
        (``~/.local/share/nearveil/witness/``), named by the identity that all copies of a ledger share.
    clock : callable, optional
        Returns the time, with its time zone. Informative only.
    timeout : float, default=30.0
        Timeout for locks, and for a database that is not available, in seconds.
    read_only : bool, default=False
        Only read and verify: works even if spending is refused, writes nothing, creates no file.

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
    ...     for attempt in range(2):
    ...         with account.spend(quarter, key="first") as debit:
    ...             if not debit.repeated:
    ...                 debit.store(b"the public message")
    ...         print(debit.repeated, debit.message)
    ...     print(account.balance())
    False b'the public message'
    True b'the public message'
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
        self._database = database = LedgerDatabase(parse_url(url, "url"), timeout, clock, read_only=read_only)
        self._witness_path = None if witness is None else Path(witness).expanduser().absolute()
        if self._witness_path is not None:
            database.witness = Witness(self._witness_path)
        elif database.is_file:
            database.witness = Witness(Path(f"{database.path}.witness"))
        try:
            self._check_path()
            if not read_only:
                self._prepare()
            elif database.read(store.find_version) is None:
                raise LedgerError(f"{self!r} is not a ledger: open it once without read_only")
            if database.witness is None:
                database.witness = self._find_witness()
            if not read_only:
                self._check_witness()
        except BaseException:
            database.close()
            raise
        _OPEN[self._arguments] = self

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
        releases: Releases = "any",
    ) -> Account:
        """Open an account. Its terms never change.

        Parameters
        ----------
        name, owner : str
        protects, unit, relation : {"query", "database"}, str, {"replace", "add-remove"}
            The protected record, the unit of protection ("image", "person with all images"), and the neighbouring
            relation.
        epsilon, delta : float
            Epsilon is above 0 and finite; above 100 there is a :class:`BudgetWarning`. With a delta above 0, a plan is
            composed by PLD, and without a plan a Renyi filter pays for parameters chosen adaptively. With delta 0, pure
            epsilons are summed.
        plan : DpEvent, or iterable of DpEvent or (DpEvent, int), optional
            All mechanisms that may ever be paid, in any order.
        releases : {"any", "gaussian"}, default="any"
            "gaussian": only Gaussian noise without sampling, chosen adaptively, by a Gaussian filter, which allows more
            than the Renyi filter of any releases. It needs a delta above 0, and an epsilon of at most 64.

        Raises
        ------
        OverBudgetError
            If the plan costs more than the budget.
        AccountError
            If the account exists.
        """
        for text, field in ((name, "name"), (owner, "owner"), (unit, "unit")):
            check_text(text, field)
        check_choice(protects, "protects", Protects)
        check_choice(relation, "relation", Relation)
        opening = canonical_json({"owner": owner, "protects": protects, "unit": unit, "relation": relation})
        budget = open_budget(epsilon, delta, plan, relation, releases)
        if budget.epsilon > _VACUOUS:
            factor = math.floor(budget.epsilon / math.log(10))
            warnings.warn(
                f"epsilon {budget.epsilon:g} guarantees nothing about a record that all of it is spent on: the odds "
                f"may change by a factor of 10^{factor}. Each release still has its own guarantee.",
                BudgetWarning,
                stacklevel=2,
            )
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
        nonce, time, database = secrets.token_hex(16), self._database.now(), self._database
        opened = BudgetRow(name, None, budget.terms(), budget.zero, opening=opening)
        content = {"opening": opening, "terms": opened.terms, "cost": cost}

        def work(connection: sa.Connection) -> tuple[None, Receipt | None]:
            try:
                row = store.load_account(connection, name, database.witness, lock=True)
            except AccountError:
                row = store.append_entry(connection, opened, OPENED, content, time=time, nonce=nonce)
            else:  # perhaps by an attempt of this call without a reply
                first = store.find_entries(connection, name, 1).get(1)
                if first is None or first.nonce != nonce:
                    raise AccountError(f"account {name!r} exists already: account() returns it")
            return None, row.receipt

        database.write(work)
        return self.account(name)

    def account(self, name: str) -> Account:
        """Return an account."""
        account = Account(self, check_text(name, "name"))
        try:
            account._load()
        except AccountError:
            if self.accounts():
                raise
            words = "has no accounts: correct its path if it has some elsewhere, or open one with open_account()"
            raise AccountError(f"{self!r} {words}") from None
        return account

    def accounts(self) -> list[Account]:
        """Return all accounts, by name."""
        return [Account(self, name) for name in self._database.read(store.list_accounts)]

    @property
    def has_witness(self) -> bool:
        """Whether a witness records the latest entries, so that a restored old copy is detected."""
        return self._database.witness is not None and self._database.witness.exists()

    def verify(self, account: str | None = None, *, receipts: Sequence[Receipt | str] = ()) -> Verification:
        """Recompute hashes, totals and budgets, and compare them with the witness and with receipts.

        Checks all accounts by default. `receipts` come from :meth:`Account.receipt` and were stored elsewhere, as
        objects or as printed.
        """
        parsed = [Receipt.parse(receipt) if isinstance(receipt, str) else receipt for receipt in receipts]
        return verify(self._database, None if account is None else check_text(account, "account"), parsed)

    def history(self) -> list[Entry]:
        """Return the entries of all accounts, account by account."""
        return self._database.read(
            lambda connection: [
                entry for name in store.list_accounts(connection) for entry in store.read_entries(connection, name)
            ]
        )

    def export(self, format: Literal["json", "csv"] = "json") -> str:  # noqa: A002
        """Return all entries of all accounts as text, with their hashes."""
        rows = [asdict(entry) for entry in self.history()]
        if format == "json":
            return json.dumps(rows, indent=1)
        if format != "csv":
            raise ValueError('format must be "json" or "csv"')
        output = io.StringIO()
        writer = csv.DictWriter(output, [field.name for field in fields(Entry)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return output.getvalue()

    def backup(self, path: str | Path) -> None:
        """Copy a SQLite ledger to a new file, which must not exist, consistently, while others spend.

        A backup protects against a disk failure. It is not a second ledger: a spend in one is not a spend in the other.
        """
        if not self._database.is_file:
            raise LedgerError("PostgreSQL is backed up by its own tools: pg_dump; export() gives the entries as text")
        self._database.copy_to(Path(path).expanduser().absolute())

    def close(self) -> None:
        """Close the connections. The ledger opens new ones if it is used again."""
        self._database.close()

    def _check_path(self) -> None:
        path, problem = self._database.path, ""
        if not self._database.is_file:
            return
        if not path.parent.is_dir():
            problem = "its directory does not exist; create it, or use another path"
        elif path.is_dir():
            problem = "this is a directory; use the path of a file"
        elif self._database.read_only and not path.exists():
            problem = "no such file, and read_only creates none"
        if problem:
            raise LedgerError(f"ledger {path}: {problem}")

    def _prepare(self) -> None:
        """Create or migrate the tables, and create the witness of a new ledger."""
        database, witness = self._database, self._database.witness
        if witness is not None and not witness.exists():
            has_file = not database.is_file or database.path.exists()
            if not (has_file and database.read(lambda link: store.is_current(link) and store.list_accounts(link))):
                witness.create()
            elif not witness.exists():  # another process may have created it since, and then an account
                raise RolledBackError(
                    f"witness {witness.path} is missing: without it, an old copy of the database would not be "
                    "detected. Restore it; an empty file in its place accepts the database as it is"
                )
        if not database.read(store.is_current):
            database.write(store.migrate)

    def _find_witness(self) -> Witness | None:
        """Return the witness of a PostgreSQL ledger in this user's data folder; create it on first use."""
        identity = self._database.read(store.find_identity)
        if identity is None:  # an earlier version, opened read-only
            return None
        witness = Witness(data_folder() / "witness" / identity)
        if self._database.read_only or witness.exists():
            return witness
        receipts = self._database.read(store.read_receipts)
        try:
            make_data_folder("witness")
        except OSError as error:
            raise LedgerError(
                f"witness cannot be created at {witness.path} ({error.strerror}): use another path (witness=), or a "
                "writable data folder (XDG_DATA_HOME)"
            ) from error
        witness.create()
        for receipt in receipts:
            witness.advance(receipt)
        return witness

    def _check_witness(self) -> None:
        """Raise if the database is behind its witness."""
        # Read the witness before the database: it must not be ahead of the snapshot.
        witness = self._database.witness
        problems = [] if witness is None else find_witness_problems(self._database, witness.read())
        if problems:
            raise RolledBackError(
                f"{'; '.join(problems)}: an old or another copy of the database was restored, or this is a replica "
                "that lags. Restore the newest copy. "
                "Ledger(..., read_only=True).verify() lists the problems"
            )

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def _arguments(self) -> tuple[Any, ...]:
        """The arguments that open the ledger again, without the password."""
        database = self._database
        return without_secrets(database.url), self._witness_path, database.clock, database.timeout, database.read_only

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, self._arguments

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ledger) and self._arguments[0] == other._arguments[0]

    def __hash__(self) -> int:
        return hash(self._arguments[0])

    def __repr__(self) -> str:
        return f"Ledger({describe_url(self._database.url)!r})"


_OPEN: WeakValueDictionary[tuple[Any, ...], Ledger] = WeakValueDictionary()


def _reopen(url: URL, witness: Path | None, clock: Clock, timeout: float, read_only: bool) -> Ledger:
    """Return the ledger of a pickle: the one that this process has open, with its password, or a new one without."""
    ledger = _OPEN.get((url, witness, clock, timeout, read_only))
    return ledger or Ledger(url, witness=witness, clock=clock, timeout=timeout, read_only=read_only)
