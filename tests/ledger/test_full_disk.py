"""A full disk: a clear error, nothing released, nothing lost, and all is well again when there is room."""

import os
import random
import sqlite3
import tempfile
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sa

from nearveil.ledger import Account, KeySpentError, Ledger, LedgerError
from nearveil.ledger.errors import LedgerFullError
from nearveil.ledger.store import Entry
from nearveil.privacy.events import PureDp

from ..small_disk import fill, mounted
from .conftest import ABOUT
from .postgres import Postgres
from .stating import stated

EVENT = PureDp(0.001)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MiB."""
    yield from mounted(tmp_path / "small disk", "2m")


def spend_until_full(account: Account, prefix: str, size: int) -> tuple[set[str], str, LedgerError]:
    """Pay, store, release; return what was released, the key that failed, and how."""
    released: set[str] = set()
    for step in range(10_000):
        key = f"{prefix}-{step}"
        try:
            with account.spend(stated(EVENT), key) as debit:
                debit.store(random.Random(step).randbytes(size))  # noqa: S311
                released.add(key)
        except LedgerError as error:
            return released, key, error
    raise AssertionError("the disk never got full")


def check(account: Account, before: list[Entry], released: set[str], failed: set[str]) -> list[Entry]:
    """Check that nothing is lost, and that a key that failed is either free or spent and never pays twice."""
    history = account.history()
    assert history[: len(before)] == before
    paid = [str(entry.key) for entry in history if entry.kind == "debit"]
    stored = {entry.key for entry in history if entry.kind == "message"}
    assert released <= stored
    assert len(paid) == len(set(paid))
    assert set(paid) <= released | failed
    for key in failed:
        if key in paid and key not in stored:
            with pytest.raises(KeySpentError):
                account.spend(stated(EVENT), key)
        else:
            assert account.spend(stated(EVENT), key).repeated == (key in paid)
    history = account.history()
    assert round(account.balance().spent * 1000) == sum(entry.kind == "debit" for entry in history)
    assert account._ledger.verify()
    return history


def test_a_disk_that_is_full_at_every_point_of_a_spend(small_disk: Path) -> None:
    before, released, failed = list[Entry](), set[str](), set[str]()
    with Ledger(small_disk / "ledger.db", timeout=2.0) as ledger:
        account = ledger.open_account("images", **ABOUT, epsilon=50.0, delta=0.0)
        for turn in range(24):
            ballast = fill(small_disk, leave=turn)
            paid_for, key, error = spend_until_full(account, f"{turn}", (10, 3000, 40_000)[turn % 3])
            assert isinstance(error, LedgerFullError), error
            assert "full" in str(error)
            released, failed = released | paid_for, failed | {key}
            ballast.unlink()
            if turn % 2:
                ledger.close()  # the next connection finds what the last one left
            before = check(account, before, released, failed)
    with Ledger(small_disk / "ledger.db") as ledger:
        assert ledger.account("images").history() == before


def open_until_full(ledger: Ledger, prefix: str) -> None:
    for number in range(1000):
        ledger.open_account(f"{prefix}-{number}", **ABOUT, epsilon=1.0, delta=0.0)


def test_new_accounts_on_a_full_disk(small_disk: Path) -> None:
    for leave in range(20):
        with Ledger(small_disk / "ledger.db", timeout=2.0) as ledger:
            ballast = fill(small_disk, leave)
            # Of the witness the message has the system's words: the account is there by then, and the disk full.
            with pytest.raises(LedgerError, match=r"full|No space left"):
                open_until_full(ledger, f"{leave}")
            ballast.unlink()
            assert ledger.verify()
            account = ledger.open_account(f"{leave}", **ABOUT, epsilon=1.0, delta=0.0)
            account.spend(stated(EVENT))
    with Ledger(small_disk / "ledger.db") as ledger:
        assert len([account for account in ledger.accounts() if account.balance().spent]) == 20
        assert ledger.verify()


def use_until_full(path: Path) -> None:
    with Ledger(path, timeout=1.0) as ledger:
        account = ledger.open_account("images", **ABOUT, epsilon=50.0, delta=0.0)
        raise spend_until_full(account, "a", 3000)[2]


def test_a_new_ledger_on_a_full_disk(small_disk: Path) -> None:
    for leave in range(0, 40, 3):
        path, ballast = small_disk / f"{leave}.db", fill(small_disk, leave)
        with pytest.raises(LedgerError, match=r"full|No space left"):
            use_until_full(path)
        ballast.unlink()
        with Ledger(path) as ledger:
            assert ledger.verify()
            ledger.open_account("after", **ABOUT, epsilon=1.0, delta=0.0).spend(stated(EVENT))
        for file in small_disk.iterdir():
            file.unlink()


def test_a_limit_on_pages_is_a_full_disk(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.db") as ledger:
        account = ledger.open_account("images", **ABOUT, epsilon=50.0, delta=0.0)

        @sa.event.listens_for(ledger._database.engine, "checkout")
        def limit(connection: sqlite3.Connection, *_: object) -> None:
            connection.execute(f"PRAGMA max_page_count = {pages}")

        pages = 40
        released, key, error = spend_until_full(account, "a", 3000)
        assert isinstance(error, LedgerFullError)
        assert "full" in str(error)
        pages = 4000
        check(account, [], released, {key})


def test_a_full_disk_of_the_server(small_disk: Path, postgres: Postgres, postgres_url: str) -> None:
    if "user" in postgres._as:
        os.chown(small_disk, postgres._as["user"], postgres._as["group"])
    for folder in takewhile(lambda folder: str(folder) != tempfile.gettempdir(), small_disk.parents):
        folder.chmod(folder.stat().st_mode | 0o011)
    name = f"small{os.getpid()}"
    with psycopg.connect(postgres.url(), autocommit=True) as connection:
        connection.execute(f"CREATE TABLESPACE {name} LOCATION '{small_disk}'".encode())
        try:
            fill_tablespace(f"{postgres_url}%20-cdefault_tablespace%3D{name}", small_disk)
        finally:
            connection.execute(f"DROP SCHEMA {postgres_url.rpartition('%3D')[2]} CASCADE".encode())
            connection.execute("CHECKPOINT")
            connection.execute(f"DROP TABLESPACE {name}".encode())


def fill_tablespace(url: str, disk: Path) -> None:
    before, released, failed = list[Entry](), set[str](), set[str]()
    with Ledger(url, timeout=5.0) as ledger:
        account = ledger.open_account("images", **ABOUT, epsilon=50.0, delta=0.0)
        for turn in range(4):
            ballast = fill(disk, leave=16 * turn)
            paid_for, key, error = spend_until_full(account, f"{turn}", (10, 20_000)[turn % 2])
            assert isinstance(error, LedgerFullError), error
            released, failed = released | paid_for, failed | {key}
            ballast.unlink()
            before = check(account, before, released, failed)
