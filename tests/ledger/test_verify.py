"""The check finds every kind of tampering; history, export and backup tell the same story."""

import csv
import fcntl
import io
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from dp_accounting import GaussianDpEvent

from nearveil.ledger import Account, AccountError, Ledger, LedgerError, LedgerUnavailableError, Receipt
from nearveil.ledger.errors import CorruptLedgerError, RolledBackError
from nearveil.ledger.store import read_entries
from nearveil.privacy.events import PureDp
from nearveil.storage import parse_url

from .conftest import ABOUT
from .stating import stated

Open = Callable[..., Account]


def by_hand(url: str, *statements: str) -> None:
    """What somebody with a database shell can do."""
    engine = sa.create_engine(parse_url(url, "url"))
    with engine.begin() as connection:
        for statement in statements:
            assert connection.exec_driver_sql(statement).rowcount > 0
    engine.dispose()


@pytest.fixture
def account(open_account: Open) -> Account:
    """Entries: 1 opened, 2 quota, 3 debit, 4 message, 5 debit of the client, 6 debit."""
    account = open_account(delta=0.0)
    account.quota("ann", epsilon=0.5)
    with account.spend(stated(PureDp(0.125)), "first") as debit:
        debit.store(b"public")
    account.spend(stated(PureDp(0.25)), "hers", client="ann")
    account.spend(stated(PureDp(0.125)), "last")
    return account


ENTRY = "UPDATE nearveil_entry SET {} WHERE sequence = {}"
TAMPERING = {
    "payload": (ENTRY.format("payload = replace(payload, '0.125', '0.025')", 3),),
    "price": (ENTRY.format("payload = replace(payload, '125000000000000000', '1')", 3),),
    "message": (ENTRY.format('payload = \'{"message":"AAAA"}\'', 4),),
    "time": (ENTRY.format("time = '1999'", 3),),
    "key": (ENTRY.format("key = 'second'", 3),),
    "client": (ENTRY.format("client = NULL", 5),),
    "kind": (ENTRY.format("kind = 'message'", 6),),
    "nonce": (ENTRY.format("nonce = 'x'", 6),),
    "unreadable": (ENTRY.format("payload = '['", 3),),
    "slot": (ENTRY.format("slot = NULL", 3),),
    "hash": (ENTRY.format("hash = 'x'", 3),),
    "removed": ("DELETE FROM nearveil_entry WHERE sequence = 3",),
    "removed at the end": ("DELETE FROM nearveil_entry WHERE sequence = 6",),
    "removed and closed up": (
        "DELETE FROM nearveil_entry WHERE sequence = 4",
        ENTRY.format("sequence = 4", 5),
        ENTRY.format("sequence = 5", 6),
        "UPDATE nearveil_account SET sequence = 5",
    ),
    "re-ordered": (ENTRY.format("sequence = 99", 3), ENTRY.format("sequence = 3", 5), ENTRY.format("sequence = 5", 99)),
    "inserted": (
        "INSERT INTO nearveil_entry SELECT account, 7, kind, time, 'forged', client, nonce, payload, state, "
        "client_state, hash, 'forged' FROM nearveil_entry WHERE sequence = 6",
    ),
    "account: totals": ("UPDATE nearveil_account SET totals = '[0]'",),
    "account: unreadable": ("UPDATE nearveil_account SET totals = 'x'",),
    "account: terms": (
        "UPDATE nearveil_account SET terms = replace(terms, '1000000000000000000', '9000000000000000000')",
    ),
    "account: owner": ("UPDATE nearveil_account SET opening = replace(opening, 'archive', 'thief')",),
    "account: head": ("UPDATE nearveil_account SET head = 'x'",),
    "account: sequence": ("UPDATE nearveil_account SET sequence = 5",),
    "quota: totals": ("UPDATE nearveil_quota SET totals = '[0]'",),
    "quota: terms": ("UPDATE nearveil_quota SET terms = replace(terms, '500000000000000000', '900000000000000000')",),
    "quota: removed": ("DELETE FROM nearveil_quota",),
}


@pytest.mark.parametrize("what", TAMPERING)
def test_tampering_is_found(what: str, url: str, ledger: Ledger, account: Account) -> None:
    before = ledger.verify()
    assert before, before
    assert str(before) == "6 entries of 1 accounts checked: all is well."
    by_hand(url, *TAMPERING[what])
    after = ledger.verify()
    assert not after
    assert {problem.account for problem in after.problems} == {"images"}
    assert not ledger.verify("images").ok
    assert "problem" in str(after)


@pytest.mark.parametrize("what", [what for what in TAMPERING if what.startswith(("account", "quota"))])
def test_edited_rows_are_not_spent_from(what: str, url: str, ledger: Ledger, account: Account) -> None:
    by_hand(url, *TAMPERING[what])
    with pytest.raises((CorruptLedgerError, RolledBackError, AccountError)):
        account.spend(stated(PureDp(0.01)), client="ann")
    assert len(account.history()) == 6


@pytest.mark.parametrize("payload", ["[", "[]", '{"charge":3,"message":3}', '{"charge":[["x",1]],"message":"*"}'])
def test_a_corrupted_payload_is_an_error_of_the_ledger(
    payload: str, url: str, ledger: Ledger, account: Account
) -> None:
    by_hand(url, ENTRY.format(f"payload = '{payload}'", 3))
    entry = account.history()[2]
    for name in ("events", "message"):
        with pytest.raises(CorruptLedgerError, match=r"Entry 3 of account 'images' is corrupted; verify\(\)"):
            getattr(entry, name)
    assert not ledger.verify()


def test_an_entry_that_was_changed_together_with_its_hash_is_found(url: str, ledger: Ledger, account: Account) -> None:
    rows = ledger._database.read(lambda connection: list(read_entries(connection, "images")))
    debit, message = rows[2:4]
    forged = replace(message, payload='{"message":"AAAA"}')
    by_hand(url, ENTRY.format(f"payload = '{forged.payload}', hash = '{forged.compute_hash(debit.hash)}'", 4))
    assert not ledger.verify()


def test_a_history_that_was_recomputed_by_a_forger_falls_to_a_receipt(tmp_path: Path) -> None:
    honest, forged = tmp_path / "honest.db", tmp_path / "forged.db"
    receipts = []
    for path, spends in ((honest, 4), (forged, 2)):
        with Ledger(path) as ledger:
            account = ledger.open_account("images", **ABOUT, epsilon=1.0, delta=0.0)
            for _ in range(spends):
                account.spend(stated(PureDp(0.125)))
            receipts.append(account.receipt())
    receipt = receipts[0]
    with Ledger(forged) as ledger:
        assert ledger.verify()
        report = ledger.verify(receipts=[Receipt.parse(str(receipt))])
        assert "ends at entry 3, and a receipt has seen entry 5" in str(report)
        earlier = Receipt("images", 2, receipt.hash)
        assert "entry 2: differs from what a receipt has seen" in str(ledger.verify(receipts=[earlier]))
        assert "not in the database" in str(ledger.verify(receipts=[Receipt("lost", 1, receipt.hash)]))
    with Ledger(honest) as ledger:
        ledger.account("images").spend(stated(PureDp(0.125)))
        assert ledger.verify(receipts=[receipt])
    for wrong in ("", "1:ab:images", "x:" + "0" * 64 + ":images", "1:" + "0" * 64 + ":"):
        with pytest.raises(ValueError, match="receipt must be"):
            Receipt.parse(wrong)


def test_a_budget_that_was_passed_is_found_even_if_every_hash_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Ledger(tmp_path / "l.db") as ledger:
        account = ledger.open_account("images", **ABOUT, epsilon=1.0, delta=0.0)
        with monkeypatch.context() as patched:
            patched.setattr("nearveil.ledger.budget.PureBudget.allows", lambda *_: True)
            account.spend(stated(PureDp(2.0)))
        assert [problem.text for problem in ledger.verify().problems] == ["exceeds the budget"]
        with monkeypatch.context() as patched:
            patched.setattr("nearveil.ledger.budget.PureBudget.allows", lambda *_: True)
            patched.setattr("nearveil.ledger.budget.PureBudget.price", lambda *_: (1,))
            account.spend(stated(PureDp(0.5)))
        assert "was charged less than its events cost" in str(ledger.verify())


def sqlite_files(path: Path) -> list[Path]:
    return [path, *(Path(f"{path}{end}") for end in ("-wal", "-shm"))]


def put_back(saved: Path, path: Path) -> None:
    for file in sqlite_files(path):
        file.unlink(missing_ok=True)
    shutil.copy(saved, path)


def test_an_old_copy_put_back_is_refused(tmp_path: Path) -> None:
    path, saved = tmp_path / "l.db", tmp_path / "saved.db"
    with Ledger(path) as ledger:
        account = ledger.open_account("images", **ABOUT, epsilon=1.0, delta=0.0)
        account.spend(stated(PureDp(0.5)), "a")
        ledger.backup(saved)
        account.spend(stated(PureDp(0.5)), "b")
    put_back(saved, path)
    with pytest.raises(RolledBackError, match=r"'images' does not hold entry 3.*newest"):
        Ledger(path)
    with Ledger(path, read_only=True) as reader:
        assert "rolled back: it ends at entry 2, and its witness has seen entry 3" in str(reader.verify())
        assert len(reader.account("images").history()) == 2
        with pytest.raises(LedgerError, match="read_only"):
            reader.account("images").spend(stated(PureDp(0.5)))
    # Whoever has it open already is refused as well.
    Path(f"{path}.witness").rename(tmp_path / "aside")
    Path(f"{path}.witness").touch()
    with Ledger(path) as ledger:
        account = ledger.account("images")
        (tmp_path / "aside").replace(f"{path}.witness")
        with pytest.raises(RolledBackError, match="witness has seen entry 3"):
            account.spend(stated(PureDp(0.5)), "c")
        with pytest.raises(RolledBackError):
            account.quota("ann", epsilon=0.1)
    for file in sqlite_files(path):
        file.unlink(missing_ok=True)
    with pytest.raises(RolledBackError, match="not in the database"):
        Ledger(path)


def test_another_history_of_the_same_length_is_refused(url: str, tmp_path: Path) -> None:
    with Ledger(url, witness=tmp_path / "one") as ledger:
        account = ledger.open_account("images", **ABOUT, epsilon=1.0, delta=0.0)
        account.spend(stated(PureDp(0.5)), "a")
    record = (tmp_path / "one").read_text()
    assert len(record) == 256
    with Ledger(tmp_path / "other.db", witness=tmp_path / "two") as other:
        other.open_account("images", **ABOUT, epsilon=1.0, delta=0.0).spend(stated(PureDp(0.5)), "b")
    shutil.copy(tmp_path / "two", tmp_path / "one")
    with pytest.raises(RolledBackError, match="as its witness has seen it"):
        Ledger(url, witness=tmp_path / "one")


def test_a_witness_of_another_history_stops_who_has_the_ledger_open(tmp_path: Path) -> None:
    with Ledger(tmp_path / "a.db") as ledger, Ledger(tmp_path / "b.db") as other:
        account = ledger.open_account("images", **ABOUT, epsilon=1.0, delta=0.0)
        other.open_account("images", **ABOUT, epsilon=1.0, delta=0.0)
        shutil.copy(tmp_path / "b.db.witness", tmp_path / "a.db.witness")
        with pytest.raises(RolledBackError, match="another entry 1 than its witness has seen"):
            account.spend(stated(PureDp(0.5)))


def test_a_witness_that_is_missing_or_damaged_is_not_passed_over(tmp_path: Path) -> None:
    path, witness = tmp_path / "l.db", tmp_path / "l.db.witness"
    with Ledger(path) as ledger:
        account = ledger.open_account("images", **ABOUT, epsilon=1.0, delta=0.0)
        content = witness.read_text()
        witness.unlink()
        with pytest.raises(RolledBackError, match="cannot be read"):
            account.spend(stated(PureDp(0.125)))
    with pytest.raises(RolledBackError, match="missing"):
        Ledger(path)
    witness.write_text(content.replace("1 ", "0 ", 1))
    with pytest.raises(CorruptLedgerError, match="corrupted"):
        Ledger(path)
    witness.write_text("")
    with Ledger(path) as ledger:
        ledger.account("images").spend(stated(PureDp(0.125)))
        assert int(witness.read_text().split()[0]) == 2


def test_the_witness_lags_at_most_and_is_never_lowered(tmp_path: Path) -> None:
    with Ledger(tmp_path / "l.db") as ledger:
        accounts = [ledger.open_account(f"n{i}", **ABOUT, epsilon=1.0, delta=0.0) for i in range(5)]
        old = accounts[2].receipt()
        for account in accounts:
            account.spend(stated(PureDp(0.125)))
        witness = ledger._database.witness
        assert witness is not None
        records = witness.read()
        witness.advance(old)
        assert witness.read() == records
        assert sorted(records.values()) == sorted((2, account.receipt().hash) for account in accounts)
        assert witness.path.stat().st_size == 5 * 256


def test_a_record_of_the_witness_that_a_full_disk_cut_short_is_written_over(tmp_path: Path) -> None:
    with Ledger(tmp_path / "l.db") as ledger:
        account = ledger.open_account("images", **ABOUT, epsilon=1.0, delta=0.0)
        witness = ledger._database.witness
        assert witness is not None
        with witness.path.open("a") as file:
            file.write("0000000000000")
        account.spend(stated(PureDp(0.125)))
        ledger.open_account("more", **ABOUT, epsilon=1.0, delta=0.0)
        assert sorted(sequence for sequence, _ in witness.read().values()) == [1, 2]
        assert witness.path.stat().st_size == 2 * 256


def test_a_witness_that_stays_locked_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nearveil.ledger.witness._LOCK_TIMEOUT", 0.05)
    with Ledger(tmp_path / "l.db") as ledger:
        account = ledger.open_account("images", **ABOUT, epsilon=1.0, delta=0.0)
        with (tmp_path / "l.db.witness").open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            with pytest.raises(LedgerUnavailableError, match="release nothing"):
                account.spend(stated(PureDp(0.125)), "k")
        assert account.balance().spent == 0.0
        account.spend(stated(PureDp(0.125)), "k")


def test_tables_that_are_gone_are_told(url: str, ledger: Ledger, account: Account) -> None:
    engine = sa.create_engine(parse_url(url, "url"))
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE nearveil_entry")
    engine.dispose()
    with pytest.raises(CorruptLedgerError, match="not those of a ledger"):
        account.spend(stated(PureDp(0.125)))


def test_history_and_exports_tell_the_same(ledger: Ledger, account: Account) -> None:
    history = account.history()
    assert [(entry.kind, entry.key, entry.client) for entry in history] == [
        ("opened", None, None),
        ("quota", None, "ann"),
        ("debit", "first", None),
        ("message", "first", None),
        ("debit", "hers", "ann"),
        ("debit", "last", None),
    ]
    assert history[2].events == ((PureDp(0.125), 1),)
    assert history[3].message == b"public"
    assert history == ledger.history()
    lines: list[dict[str, Any]] = json.loads(ledger.export())
    rows = list(csv.DictReader(io.StringIO(ledger.export("csv"))))
    for entry, line, row in zip(history, lines, rows, strict=True):
        assert (line["sequence"], line["kind"], line["hash"]) == (entry.sequence, entry.kind, entry.hash)
        assert (int(row["sequence"]), row["kind"], row["hash"]) == (entry.sequence, entry.kind, entry.hash)
        assert row["payload"] == line["payload"]
    with pytest.raises(ValueError, match="format"):
        ledger.export("xml")  # type: ignore[arg-type]


def test_a_backup_is_whole_and_overwrites_nothing(ledger: Ledger, account: Account, tmp_path: Path, url: str) -> None:
    target = tmp_path / "a backup.db"
    if url.startswith("postgresql"):
        with pytest.raises(LedgerError, match="pg_dump"):
            ledger.backup(target)
        return
    before = os.umask(0)
    try:
        ledger.backup(target)
    finally:
        os.umask(before)
    assert target.stat().st_mode & 0o777 == 0o600  # it holds keys and messages
    with pytest.raises(LedgerError, match="overwrites nothing"):
        ledger.backup(target)
    with pytest.raises(LedgerError, match="cannot be written"):
        ledger.backup(tmp_path / "no such" / "x.db")
    with Ledger(target, read_only=True) as copy:
        assert copy.export() == ledger.export()
        assert copy.verify()
    with pytest.raises(RolledBackError, match="missing"):
        Ledger(target)


def test_a_filter_and_a_plan_are_replayed_too(ledger: Ledger, open_account: Open) -> None:
    gate, planned = open_account(), open_account("planned", plan=[(GaussianDpEvent(12.0), 3)])
    gate.quota("ann", epsilon=0.5)
    planned.quota("ann", plan=GaussianDpEvent(12.0))
    for account in (gate, planned):
        account.spend(stated(GaussianDpEvent(12.0)))
        account.spend(stated(GaussianDpEvent(12.0)), client="ann")
    report = ledger.verify()
    assert report, report
    assert (report.accounts, report.entries) == (2, 8)
