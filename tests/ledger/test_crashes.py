"""Many at once, killed, cut off: never over-spent, never a release without a debit, every debit found again."""

import os
import random
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from nearveil.ledger import (
    Account,
    AccountError,
    Debit,
    KeySpentError,
    Ledger,
    LedgerError,
    LedgerUnavailableError,
    OverBudgetError,
)
from nearveil.ledger.database import LedgerDatabase
from nearveil.ledger.witness import Witness
from nearveil.privacy.events import PureDp

from .conftest import ABOUT
from .postgres import Postgres
from .stating import stated

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

Open = Callable[..., Account]


def debits(account: Account) -> list[str | None]:
    return [entry.key for entry in account.history() if entry.kind == "debit"]


def in_child(work: Callable[[Callable[[str], None]], None]) -> tuple[int, int]:
    """Fork; return the child's process and where to read the lines that it releases."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work(lambda line: void(os.write(writing, f"{line}\n".encode())))
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    return child, reading


def void(_: Any) -> None:
    return None


def lines(child: int, reading: int) -> tuple[list[str], int]:
    with os.fdopen(reading) as stream:
        output = stream.read().splitlines()
    return output, os.waitpid(child, 0)[1]


def test_eight_processes_spend_one_budget_once(open_account: Open, ledger: Ledger) -> None:
    account = open_account(delta=0.0)
    account.spend(stated(PureDp(0.0)))  # the parent's connection is open, and the children must not use it

    def work(number: int, release: Callable[[str], None]) -> None:
        for turn in range(100):
            key = f"{number}-{turn}"
            try:
                with account.spend(stated(PureDp(0.025)), key):
                    release(key)
            except OverBudgetError:
                return

    children = [in_child(lambda release, number=number: work(number, release)) for number in range(8)]  # type: ignore[misc]
    outputs = [lines(*child) for child in children]
    assert [code for _, code in outputs] == [0] * 8
    released = [key for keys, _ in outputs for key in keys]
    assert len(released) == 40
    assert sorted(released) == sorted(filter(None, debits(account)[1:]))
    assert account.balance().left == 0.0
    assert ledger.verify()


def test_the_same_key_from_many_processes_is_released_once(open_account: Open) -> None:
    account = open_account(delta=0.0)

    def work(number: int, release: Callable[[str], None]) -> None:
        try:
            with account.spend(stated(PureDp(0.5)), "one") as debit:
                if not debit.repeated:
                    debit.store(str(number).encode())
                release(f"{debit.repeated} {debit.message!r}")
        except KeySpentError:
            release("spent")

    children = [in_child(lambda release, number=number: work(number, release)) for number in range(8)]  # type: ignore[misc]
    output = [line for child in children for line in lines(*child)[0]]
    assert len(output) == 8
    assert sum(line.startswith("False") for line in output) == 1
    assert len({line.split()[1] for line in output if line != "spent"}) == 1
    assert account.balance().spent == 0.5


def test_kill_9_at_random_moments_loses_no_debit(open_account: Open, ledger: Ledger) -> None:
    account = open_account(delta=0.0, epsilon=100.0)
    chance, released = random.Random(4), []  # noqa: S311

    def work(turn: int, release: Callable[[str], None]) -> None:
        for step in range(10**6):
            key = f"{turn}-{step}"
            with account.spend(stated(PureDp(0.001)), key) as debit:
                release(key)
                debit.store(key.encode())

    for turn in range(12):
        child, reading = in_child(lambda release, turn=turn: work(turn, release))  # type: ignore[misc]
        heard = b""
        while turn % 4 and heard.count(b"\n") < 3:  # the fourth is killed while it starts
            heard += os.read(reading, 4096)
        time.sleep(chance.uniform(0.0, 0.02))
        os.kill(child, signal.SIGKILL)
        output, _ = lines(child, reading)
        released += (heard.decode() + "".join(f"{line}\n" for line in output)).split()
        there = debits(account)
        assert set(released) <= set(there)
        assert len(there) <= len(released) + turn + 1  # at most one debit of each killed child was not released
    assert len(released) >= 3 * 9
    assert ledger.verify()
    history = account.history()
    stored = {entry.key: entry.message for entry in history if entry.kind == "message"}
    for key in filter(None, debits(account)):
        if key in stored:
            assert account.spend(stated(PureDp(0.001)), key).message == key.encode()
        else:
            with pytest.raises(KeySpentError):
                account.spend(stated(PureDp(0.001)), key)
    assert account.history() == history


def lost_answer(url: str) -> Exception:
    """What is raised when the connection dies after the commit, before its answer."""
    if url.startswith("postgresql"):
        original: Exception = psycopg.OperationalError("server closed the connection unexpectedly")
    else:
        original = sqlite3.OperationalError("database is locked")
        original.sqlite_errorcode = sqlite3.SQLITE_BUSY
    return sa.exc.OperationalError("COMMIT", {}, original)


def lose_answers(url: str, monkeypatch: pytest.MonkeyPatch, every: int = 2) -> list[int]:
    """Lose every second answer from now on, after the commit; return the number of answers, in a list."""
    begin, answers = LedgerDatabase.begin_write, [0]

    @contextmanager
    def losing(self: LedgerDatabase) -> Iterator[sa.Connection]:
        with begin(self) as connection:
            yield connection
        answers[0] += 1
        if answers[0] % every == every - 1:
            raise lost_answer(url)

    monkeypatch.setattr(LedgerDatabase, "begin_write", losing)
    return answers


def test_a_commit_whose_answer_is_lost_is_found_again(
    url: str, ledger: Ledger, open_account: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = lose_answers(url, monkeypatch)
    account = open_account(delta=0.0)
    account.quota("ann", epsilon=0.5)
    for key in ("a", "b", "c"):
        with account.spend(stated(PureDp(0.125)), key, client="ann") as debit:
            assert not debit.repeated
            debit.store(key.encode())
    assert losses[0] > 10
    monkeypatch.undo()
    assert [entry.kind for entry in account.history()] == ["opened", "quota", *["debit", "message"] * 3]
    assert account.balance().spent == 0.375
    assert ledger.verify()


def test_where_nobody_can_tell_nothing_is_released(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Ledger(url, witness=tmp_path / "w", timeout=0.3) as ledger:
        account = ledger.open_account("images", **ABOUT, epsilon=1.0, delta=0.0)
        lose_answers(url, monkeypatch, every=1)
        with pytest.raises(LedgerUnavailableError, match="release nothing"):
            account.spend(stated(PureDp(0.5)), "k")
        monkeypatch.undo()
        with pytest.raises(KeySpentError):  # the debit stands, against the spender
            account.spend(stated(PureDp(0.5)), "k")
        assert account.balance().spent == 0.5
        assert ledger.verify()


def test_a_lock_that_is_never_given_up_is_waited_for_in_vain(url: str, tmp_path: Path) -> None:
    with Ledger(url, witness=tmp_path / "w", timeout=0.3) as ledger:
        account = ledger.open_account("images", **ABOUT, epsilon=1.0, delta=0.0)
        with ledger._database.engine.connect() as holder:
            if not url.startswith("postgresql"):
                holder.exec_driver_sql("BEGIN IMMEDIATE")
            holder.exec_driver_sql("UPDATE nearveil_account SET head = head")
            with pytest.raises(LedgerUnavailableError, match="timeout: other processes hold"):
                account.spend(stated(PureDp(0.5)), "k")
            holder.rollback()
        account.spend(stated(PureDp(0.5)), "k")


def test_a_spend_reads_no_more_when_much_was_spent(postgres_url: str) -> None:
    """Counted, not timed: what the server read from the indexes of a table of which it has no statistics yet."""
    with Ledger(postgres_url) as ledger, psycopg.connect(postgres_url, autocommit=True) as monitor:
        account = ledger.open_account("images", **ABOUT, epsilon=1.0, delta=0.0)
        read: list[int] = []
        for _ in range(2):
            for _ in range(150):
                account.spend(stated(PureDp(0.001)))
            ledger.close()  # a server process hands its counts over when it ends
            read.append(index_reads(monitor, 2 * 150 * (len(read) + 1)))
        assert read[1] - read[0] <= read[0] <= 4 * 150


def index_reads(monitor: "psycopg.Connection[Any]", least: int) -> int:
    """Entries read through the indexes, once at least so many lookups are counted; and no table was read whole."""
    deadline = time.monotonic() + 10
    while True:
        row = monitor.execute(
            "SELECT sum(idx_scan), sum(idx_tup_read) FROM pg_stat_user_indexes "
            "WHERE relname = 'nearveil_entry' AND schemaname = current_schema()"
        ).fetchone()
        assert row is not None
        if row[0] >= least or time.monotonic() > deadline:
            assert row[0] >= least
            return int(row[1])
        time.sleep(0.05)


def spend_in_threads(account: Account, count: int, threads: int = 4) -> tuple[list[str], list[Exception]]:
    released: list[str] = []
    failed: list[Exception] = []

    def work(number: int) -> None:
        for turn in range(count):
            key = f"{number}-{turn}"
            try:
                with account.spend(stated(PureDp(0.001)), key):
                    released.append(key)
            except LedgerError as error:
                failed.append(error)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return released, failed


def test_threads_share_a_ledger(open_account: Open, ledger: Ledger) -> None:
    account = open_account(delta=0.0)
    released, failed = spend_in_threads(account, 10)
    assert failed == []
    assert sorted(released) == sorted(filter(None, debits(account)))
    assert len(released) == 40
    assert ledger.verify()


def test_connections_that_are_cut_again_and_again(postgres_url: str, postgres: Postgres) -> None:
    with Ledger(postgres_url) as ledger, psycopg.connect(postgres.url(), autocommit=True) as cutter:
        account, done = ledger.open_account("images", **ABOUT, epsilon=10.0, delta=0.0), threading.Event()

        def cut() -> None:
            while not done.is_set():
                cutter.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
                time.sleep(0.05)

        cutting = threading.Thread(target=cut)
        cutting.start()
        released, failed = spend_in_threads(account, 15)
        done.set()
        cutting.join()
        there = debits(account)
        assert set(released) <= set(there)
        assert len(there) <= len(released) + len(failed)
        assert len(released) > 30
        assert ledger.verify()


def test_a_server_that_goes_away_and_returns(postgres_url: str, postgres: Postgres) -> None:
    with Ledger(postgres_url) as ledger:
        account = ledger.open_account("images", **ABOUT, epsilon=10.0, delta=0.0)
        released: list[str] = []
        spending = threading.Thread(target=lambda: released.extend(spend_in_threads(account, 50)[0]))
        spending.start()
        time.sleep(0.1)
        postgres.stop("immediate")
        postgres.start()
        spending.join()
        assert len(released) == 200
        assert sorted(released) == sorted(filter(None, debits(account)))
        assert ledger.verify()
    postgres.stop("immediate")
    try:
        with pytest.raises(LedgerUnavailableError, match="did not answer"):
            Ledger(postgres_url, timeout=0.2)
    finally:
        postgres.start()


def test_an_account_opened_and_spent_while_another_opens_it_is_no_rollback(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Ledger(postgres_url, witness=tmp_path / "w") as ledger, Ledger(postgres_url, witness=tmp_path / "w") as other:
        real = Witness.check

        def overtaken(self: Witness, *arguments: Any) -> None:
            monkeypatch.undo()
            other.open_account("images", **ABOUT, epsilon=1.0, delta=0.0).spend(stated(PureDp(0.5)))
            real(self, *arguments)

        monkeypatch.setattr(Witness, "check", overtaken)
        with pytest.raises(AccountError, match="exists already"):
            ledger.open_account("images", **ABOUT, epsilon=1.0, delta=0.0)
        assert ledger.account("images").balance().spent == 0.5
        assert ledger.verify()


def test_many_open_a_new_ledger_at_once(url: str, tmp_path: Path) -> None:
    def work(number: int, release: Callable[[str], None]) -> None:
        with Ledger(url, witness=tmp_path / "w") as ledger:
            try:
                ledger.open_account("shared", **ABOUT, epsilon=1.0, delta=0.0)
                release("opened")
            except LedgerError as error:
                release(str(error))
            ledger.open_account(f"own {number}", **ABOUT, epsilon=1.0, delta=0.0).spend(stated(PureDp(0.5)))

    children = [in_child(lambda release, number=number: work(number, release)) for number in range(8)]  # type: ignore[misc]
    outputs = [lines(*child) for child in children]
    assert [code for _, code in outputs] == [0] * 8
    assert [line for text, _ in outputs for line in text].count("opened") == 1
    with Ledger(url, witness=tmp_path / "w") as ledger:
        assert len(ledger.accounts()) == 9
        assert ledger.verify()


def test_a_forked_process_does_not_store_for_its_parent(open_account: Open, ledger: Ledger) -> None:
    """Two processes that hold one debit would release two messages for one payment."""
    account = open_account(delta=0.0)

    def work(debit: Debit, release: Callable[[str], None]) -> None:
        try:
            debit.store(b"of the child")
        except LedgerError as error:
            release(str(error))

    with account.spend(stated(PureDp(0.5)), "k") as debit:
        (line,), _ = lines(*in_child(lambda release: work(debit, release)))
        assert "in the same process" in line
        debit.store(b"of the parent")
    assert [entry.message for entry in account.history() if entry.kind == "message"] == [b"of the parent"]
    assert ledger.verify()
