"""Opening: what is no ledger says so, and what to do."""

import builtins
import os
import sqlite3
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from dp_accounting import GaussianDpEvent

from nearveil.ledger import Account, BudgetWarning, Ledger, LedgerError, OverBudgetError
from nearveil.ledger.database import LedgerDatabase, explain_error
from nearveil.ledger.errors import CorruptLedgerError, LedgerFullError
from nearveil.privacy.events import NoisyScreening, PureDp
from nearveil.storage import describe_url, parse_url

from .conftest import ABOUT
from .stating import stated


@pytest.mark.parametrize("url", ["", ":memory:", "sqlite://", "sqlite:///:memory:", "mysql://host/x", "a://b c://"])
def test_places_where_no_ledger_can_be_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="url must"):
        Ledger(url)


def test_paths_that_cannot_be_are_told(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="directory does not exist"):
        Ledger(tmp_path / "no" / "l.db")
    with pytest.raises(LedgerError, match="is a directory"):
        Ledger(tmp_path)
    with pytest.raises(LedgerError, match="no such file"):
        Ledger(tmp_path / "l.db", read_only=True)
    with pytest.raises(ValueError, match="timeout"):
        Ledger(tmp_path / "l.db", timeout=0.0)
    assert list(tmp_path.iterdir()) == []


def test_all_ways_to_name_a_file_lead_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "with space, 100% & #?.db"
    with Ledger(path) as ledger:
        ledger.open_account("images", **ABOUT, epsilon=1.0, delta=0.0)
    for url in (str(path), path.name, parse_url(path, "url")):
        with Ledger(url) as ledger:
            assert [account.name for account in ledger.accounts()] == ["images"]
    assert sorted(file.name for file in tmp_path.iterdir()) == [path.name, f"{path.name}.witness"]


def test_what_is_no_database_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a database, and longer than the header of one\n" * 100)
    with pytest.raises(CorruptLedgerError, match="not a SQLite database"):
        Ledger(path)
    assert path.read_text().startswith("not a database")


def test_a_damaged_file_says_so(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    with Ledger(path) as ledger:
        account = ledger.open_account("images", **ABOUT, epsilon=100.0, delta=0.0)
        for _ in range(100):
            account.spend(stated(PureDp(0.125)))
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)
    path.write_bytes(content)
    with pytest.raises(CorruptLedgerError, match="corrupted"):
        Ledger(path)


def test_a_ledger_of_a_newer_version_is_left_alone(url: str, tmp_path: Path) -> None:
    Ledger(url, witness=tmp_path / "w").close()
    Ledger(url, witness=tmp_path / "w").close()
    engine = sa.create_engine(parse_url(url, "url"))
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE nearveil_ledger_version SET version_num = '9999'")
    engine.dispose()
    for read_only in (False, True):
        with pytest.raises(LedgerError, match="install a newer nearveil"):
            Ledger(url, witness=tmp_path / "w", read_only=read_only)


def test_a_database_without_a_ledger_is_not_changed_by_looking(postgres_url: str) -> None:
    with pytest.raises(LedgerError, match="is not a ledger"):
        Ledger(postgres_url, read_only=True)
    engine = sa.create_engine(parse_url(postgres_url, "url"))
    assert sa.inspect(engine).get_table_names() == []
    engine.dispose()


def test_postgresql_without_its_driver_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "psycopg":
            raise ModuleNotFoundError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(LedgerError, match=r"pip install .nearveil\[postgres\]"):
        Ledger("postgresql://nowhere/x")


def test_a_database_that_does_not_exist_is_told_at_once(postgres_url: str) -> None:
    with pytest.raises(LedgerError, match="check address") as error:
        Ledger(postgres_url.replace("postgres@", "postgres:secret@") + "&dbname=nowhere")
    assert "secret" not in str(error.value)


def test_passwords_are_not_shown(postgres_url: str) -> None:
    with Ledger(postgres_url.replace("postgres@", "postgres:secret@")) as ledger:
        assert "secret" not in repr(ledger)
        assert "postgres:***@" in repr(ledger)


def test_a_full_disk_spends_nothing_and_the_ledger_lives_on(tmp_path: Path) -> None:
    with Ledger(tmp_path / "l.db") as ledger:
        account = ledger.open_account("images", **ABOUT, epsilon=1.0, delta=0.0)
        engine = ledger._database.engine
        account.spend(stated(PureDp(0.125)), "before")

        def limited(connection: sqlite3.Connection, *_: object) -> None:
            pages = connection.execute("PRAGMA page_count").fetchone()[0]
            connection.execute(f"PRAGMA max_page_count = {pages}")

        sa.event.listen(engine, "checkout", limited)
        with (
            account.spend(stated(PureDp(0.125)), "small") as debit,
            pytest.raises(LedgerFullError, match="free some space"),
        ):
            debit.store(b"x" * 100_000)
        sa.event.remove(engine, "checkout", limited)
        engine.dispose()
        assert [entry.key for entry in account.history()] == [None, "before", "small"]
        account.spend(stated(PureDp(0.125)), "after")
        assert ledger.verify()


def test_commits_are_durable_whatever_the_database_would_do_by_itself(url: str, tmp_path: Path) -> None:
    if url.startswith("postgresql"):
        url = url.replace("options=", "options=-csynchronous_commit%3Doff%20")
    with Ledger(url, witness=tmp_path / "w") as ledger:
        database = ledger._database

        def told(connection: sa.Connection) -> list[Any]:
            names = ("synchronous", "journal_mode") if database.is_file else ("synchronous_commit",)
            word = "PRAGMA" if database.is_file else "SHOW"
            return [connection.exec_driver_sql(f"{word} {name}").scalar() for name in names]

        assert database.write(lambda connection: (told(connection), None)) == (
            [2, "wal"] if database.is_file else ["on"]
        )
        assert database.is_file or database.read(told) == ["off"]


def as_somebody_else(work: Callable[[], str]) -> str:
    """Return what `work` returns in a child process that has no special rights."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            os.write(writing, work().encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_directory_that_may_not_be_written_is_told() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        Ledger(folder / "l.db").close()
        (folder / "l.db").chmod(0o444)
        folder.chmod(0o555)

        def opened(file: str) -> str:
            try:
                Ledger(folder / file)
            except LedgerError as error:
                return str(error)
            return "opened"

        try:
            old, new = (as_somebody_else(partial(opened, file)) for file in ("l.db", "new.db"))
        finally:
            folder.chmod(0o755)
    assert "read-only" in old or "cannot be opened" in old
    assert f"ledger and witness cannot be created in {folder}" in new


def test_a_witness_that_another_process_makes_just_now_is_no_missing_one(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    witness = tmp_path / "elsewhere"
    read = LedgerDatabase.read

    def slowly(self: LedgerDatabase, work: Callable[[sa.Connection], Any]) -> Any:
        monkeypatch.setattr(LedgerDatabase, "read", read)
        with Ledger(url, witness=witness) as other:  # created between the two checks
            other.open_account("mine", **ABOUT, epsilon=1.0, delta=0.0)
        return read(self, work)

    monkeypatch.setattr(LedgerDatabase, "read", slowly)
    if not url.startswith("postgresql"):
        Path(url).touch()
    with Ledger(url, witness=witness) as ledger:
        assert [account.name for account in ledger.accounts()] == ["mine"]


def test_no_password_is_shown_wherever_it_stands_in_the_address() -> None:
    address = sa.make_url("postgresql://me:first@host/db?password=second&sslpassword=third")
    assert describe_url(address) == "postgresql://me:***@host/db"
    message = str(explain_error(ValueError("nothing"), address))
    assert not any(word in message for word in ("first", "second", "third"))


def test_what_was_being_written_is_not_told(tmp_path: Path) -> None:
    with Ledger(tmp_path / "budget.db") as ledger:
        engine = ledger._database.engine
        with pytest.raises(sa.exc.OperationalError) as error, engine.connect() as connection:
            connection.execute(sa.text("INSERT INTO nowhere VALUES (:word)"), {"word": "a private word"})
    assert "a private word" not in str(error.value)


def test_a_ledger_is_for_its_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        with Ledger(tmp_path / "ledger.db") as ledger:
            ledger.open_account("images", **ABOUT, epsilon=1.0, delta=0.0)
            modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    finally:
        os.umask(before)
    assert {"ledger.db", "ledger.db.witness"} <= set(modes)
    assert set(modes.values()) == {0o600}


@pytest.mark.parametrize(
    ("terms", "adaptivity", "orders"),
    [
        ({"epsilon": 2.0, "delta": 0.0}, "adaptive", 0),
        ({"epsilon": 2.0, "delta": 1e-5}, "adaptive", 8),
        (
            {"epsilon": 2.0, "delta": 1e-5, "plan": [(GaussianDpEvent(20.0), 50), NoisyScreening(9.0, 3.0, 5)]},
            "fixed",
            0,
        ),
    ],
)
def test_an_account_has_the_guarantee_of_all_that_it_may_pay_for(
    open_account: Callable[..., Account], terms: dict[str, Any], adaptivity: str, orders: int
) -> None:
    account = open_account(**terms)
    guarantee = account.guarantee
    assert (guarantee.epsilon, guarantee.delta, guarantee.sound, guarantee.adaptivity) == (
        2.0,
        terms["delta"],
        True,
        adaptivity,
    )
    assert (guarantee.protects, guarantee.unit, guarantee.relation) == (
        account.protects,
        account.unit,
        account.relation,
    )
    assert len(guarantee.within.orders if guarantee.within else ()) == orders
    with pytest.raises(ValueError, match=r"of the filter|what the events cost"):
        replace(guarantee, epsilon=0.5)
    with pytest.raises(ValueError, match="what the events cost"):
        replace(guarantee, within=None, epsilon=0.0, delta=0.0)


@pytest.mark.parametrize("delta", [0.0, 1e-6])
def test_any_finite_budget_is_accepted_with_a_warning_where_it_guarantees_nothing(tmp_path: Path, delta: float) -> None:
    with Ledger(tmp_path / "budget.db") as ledger:
        with pytest.warns(BudgetWarning, match=r"factor of 10\^434"):
            account = open_large(ledger, 1000.0, delta)
        account.spend(stated(PureDp(400.0)), "first")
        account.spend(stated(PureDp(400.0)), "second")
        with pytest.raises(OverBudgetError):
            account.spend(stated(PureDp(400.0)), "third")
        for epsilon in (0.0, -1.0, float("inf"), float("nan")):
            with pytest.raises(ValueError, match="finite number above 0"):
                open_large(ledger, epsilon, delta)


def open_large(ledger: Ledger, epsilon: float, delta: float) -> Account:
    return ledger.open_account("large", **ABOUT | {"epsilon": epsilon, "delta": delta})
