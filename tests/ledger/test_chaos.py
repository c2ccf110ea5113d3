"""Chaos: many at once, killed at random, cut off, with mad clocks.

Never over-spent, never a release without a debit, every debit found again. ``NEARVEIL_CHAOS=1000`` kills a thousand
processes for each database instead of a few.
"""

import os
import random
import signal
import time
from collections import Counter
from datetime import UTC, datetime, timedelta, timezone
from fractions import Fraction
from pathlib import Path
from typing import Any

import psycopg
import pytest

from nearveil.ledger import Account, KeySpentError, Ledger, OverBudgetError
from nearveil.ledger.store import Entry
from nearveil.privacy.accounting import RenyiFilter
from nearveil.privacy.events import PureDp
from tests.programs import PROCESSES

from . import chaos_worker as chaos
from .chaos_worker import KILLS
from .conftest import ABOUT
from .postgres import Postgres
from .stating import stated

AT_ONCE, AN_ACCOUNT = 4, 40  # processes that spend together, kills before a new account is opened


def debits(history: list[Entry]) -> dict[str, Entry]:
    """The debits by their keys; a key that was debited twice is an error."""
    entries = [entry for entry in history if entry.kind == "debit"]
    assert max(Counter(entry.key for entry in entries).values(), default=1) == 1
    return {str(entry.key): entry for entry in entries}


def check(account: Account, history: list[Entry], lines: list[str]) -> None:
    """Check an account against what was released: every line was paid for, and everything adds up."""
    paid = debits(history)
    for line in lines:
        key, sequence, hashed = line.split(" ")
        assert key in paid
        assert (history[int(sequence) - 1].key, history[int(sequence) - 1].hash) == (key, hashed)
    keys = [line.split(" ")[0] for line in lines]
    assert len(keys) == len(set(keys))
    for key, entry in paid.items():
        assert entry.events == ((chaos.amount(int(key.rpartition("-")[2])), 1),)
    for entry in history:
        if entry.kind == "message":
            assert entry.message == str(entry.key).encode()
            assert entry.key in keys
    total = sum(Fraction(repr(event.epsilon)) * n for entry in paid.values() for event, n in entry.events)
    assert Fraction(repr(account.balance().spent)) == total
    assert account._ledger.verify(account.name)


def whole_lines(path: Path) -> list[str]:
    return path.read_text().split("\n")[:-1] if path.exists() else []


@pytest.mark.parametrize("kind", ["pure", "filter", "plan"])
def test_eight_processes_spend_exactly_what_there_is(url: str, ledger: Ledger, tmp_path: Path, kind: str) -> None:
    event, affordable = chaos.EVENTS[kind], 80
    delta, plan = (0.0 if kind == "pure" else 1e-5), ([(event, 80)] if kind == "plan" else None)
    account = ledger.open_account(kind, **ABOUT, epsilon=1.0, delta=delta, plan=plan)
    if kind == "filter":
        gate = RenyiFilter(1.0, delta)
        affordable = max(count for count in range(1, 400) if gate.may_spend(event, count))
    released = chaos.together(chaos.spend_all, [(url, tmp_path / "witness", kind, number) for number in range(8)])
    keys = [key for keys in released for key in keys]
    assert len(keys) == affordable > 8
    assert set(keys) == set(debits(account.history()))
    assert not account.preview(stated(event)).allowed
    with pytest.raises(OverBudgetError):
        account.spend(stated(event))
    assert ledger.verify()


def test_eight_processes_with_the_same_keys_run_once(url: str, ledger: Ledger, tmp_path: Path) -> None:
    account, keys = ledger.open_account("images", **ABOUT, epsilon=100.0, delta=0.0), 6
    results = chaos.together(chaos.share_keys, [(url, tmp_path / "witness", keys, number) for number in range(8)])
    for of_one_key in zip(*results, strict=True):
        (winner,) = [line.split()[1] for line in of_one_key if line.startswith("ran")]
        assert {line for line in of_one_key if not line.startswith("ran")} <= {"spent", f"again {winner}"}
    assert len(debits(account.history())) == keys
    assert account.balance().spent == keys * 0.5
    assert ledger.verify()


def kill_some(url: str, witness: Path, name: str, paths: list[Path], chance: random.Random) -> None:
    """Start a process for each path and kill it: one while it starts, the others some time after they released."""
    workers = [PROCESSES.Process(target=chaos.spend_for_ever, args=(url, witness, name, path)) for path in paths]
    for worker in workers:
        worker.start()
    early = chance.randrange(len(workers))
    for number, (worker, path) in enumerate(zip(workers, paths, strict=True)):
        while number != early and worker.is_alive() and not (path.exists() and path.stat().st_size):
            time.sleep(0.002)
        time.sleep(chance.uniform(0.0, 0.05))
        worker.kill()
    for worker in workers:
        worker.join()
        assert worker.exitcode == -signal.SIGKILL


def test_kill_9_at_random_moments(url: str, tmp_path: Path) -> None:
    witness, chance, released = tmp_path / "witness", random.Random(9), 0  # noqa: S311
    for block in range(-(-KILLS // AN_ACCOUNT)):
        name, lines, before = f"block {block}", list[str](), list[Entry]()
        for turn in range(min(AN_ACCOUNT, KILLS - block * AN_ACCOUNT) // AT_ONCE):
            paths = [tmp_path / f"{block}-{turn}-{number}" for number in range(AT_ONCE)]
            kill_some(url, witness, name, paths, chance)
            lines += [line for path in paths for line in whole_lines(path)]
            with Ledger(url, witness=witness) as ledger:  # it opens again
                account = chaos.opened(ledger, name)
                history = account.history()
                assert history[: len(before)] == before
                check(account, history, lines)
                assert len(debits(history)) <= len(lines) + (turn + 1) * AT_ONCE  # one at most of each that was killed
                before = history
        with Ledger(url, witness=witness) as ledger:
            check_keys_stay_spent(ledger.account(name), before)
        released += len(lines)
    assert released >= KILLS // 2
    with Ledger(url, witness=witness) as ledger:
        assert ledger.verify()


def check_keys_stay_spent(account: Account, history: list[Entry]) -> None:
    stored = {entry.key for entry in history if entry.kind == "message"}
    for key, entry in debits(history).items():
        if key in stored:
            assert account.spend(stated(*entry.events), key).message == key.encode()
        else:
            with pytest.raises(KeySpentError):
                account.spend(stated(*entry.events), key)
    assert account.history() == history


def test_kill_9_while_a_ledger_is_made(url: str, tmp_path: Path) -> None:
    chance = random.Random(1)  # noqa: S311
    for turn in range(max(4, KILLS // 12)):
        where, witness, path = fresh(url, turn), tmp_path / f"witness {turn}", tmp_path / f"lines-{turn}"
        worker = PROCESSES.Process(target=chaos.spend_for_ever, args=(where, witness, "images", path))
        worker.start()
        while worker.is_alive() and not path.exists():  # made just before it opens the ledger
            time.sleep(0.001)
        time.sleep(chance.uniform(0.0, 0.04))
        worker.kill()
        worker.join()
        with Ledger(where, witness=witness) as ledger:
            account = chaos.opened(ledger, "images")
            check(account, account.history(), whole_lines(path))
            account.spend(stated(PureDp(1.0)))


def fresh(url: str, turn: int) -> str:
    """A place where no ledger was: another file, or the schema emptied."""
    if not url.startswith("postgresql"):
        return f"{url}.{turn}"
    schema = url.rpartition("%3D")[2]
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"DROP SCHEMA {schema} CASCADE; CREATE SCHEMA {schema}".encode())
    return url


def kill_server(server: Postgres) -> None:
    """Kill the postmaster and start another as soon as the dead one's children are gone."""
    lock = Path(server._data) / "postmaster.pid"
    os.kill(int(lock.read_text().split("\n")[0]), signal.SIGKILL)
    deadline = time.monotonic() + 30
    while True:
        try:
            server.start()
            return
        except Exception:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def test_a_database_that_goes_away_under_load_and_returns(doomed: Postgres, tmp_path: Path) -> None:
    count, url = max(60, KILLS), doomed.url()
    paths = [tmp_path / f"w{number}" for number in range(4)]
    with Ledger(url) as ledger:
        ledger.open_account("images", **ABOUT, epsilon=100.0, delta=0.0)
        workers = [PROCESSES.Process(target=chaos.spend_in_a_storm, args=(url, path, count)) for path in paths]
        for worker in workers:
            worker.start()
        for storm in range(4):
            seen = sum(len(whole_lines(path)) for path in paths)
            while sum(len(whole_lines(path)) for path in paths) < min(seen + 20, count * 4 - 20):
                time.sleep(0.005)
            if storm % 2:
                kill_server(doomed)
            else:
                with psycopg.connect(url, autocommit=True) as cutter:
                    cutter.execute(
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
                    )
        for worker in workers:
            worker.join()
            assert worker.exitcode == 0
        account = ledger.account("images")
        lines = [line for path in paths for line in whole_lines(path)]
        check(account, account.history(), lines)
        assert len(lines) > count * 4 - 4 * 4  # at most one key of each worker is given up in each storm
        check_keys_stay_spent(account, account.history())


def mad_clock(chance: random.Random) -> Any:
    """A clock that jumps by years, back and forth, through all zones."""

    def now() -> datetime:
        zone = timezone(timedelta(minutes=chance.randrange(-1400, 1400)))
        return datetime(2026, 11, 15, tzinfo=UTC).astimezone(zone) + timedelta(seconds=chance.uniform(-1e9, 1e9))

    return now


def test_clocks_that_jump_change_nothing(url: str, tmp_path: Path) -> None:
    chance = random.Random(3)  # noqa: S311
    clocks = [mad_clock(chance), mad_clock(chance)]
    ledgers = [Ledger(url, witness=tmp_path / "w", clock=clock) for clock in clocks]
    ledgers[0].open_account("images", **ABOUT, epsilon=1.0, delta=0.0)
    for step in range(20):
        with ledgers[step % 2].account("images").spend(stated(PureDp(0.05)), f"{step}") as debit:
            debit.store(b"%d" % step)
        repeated = ledgers[chance.randrange(2)].account("images").spend(stated(PureDp(0.05)), f"{step}")
        assert (repeated.repeated, repeated.message) == (True, b"%d" % step)
    account = ledgers[0].account("images")
    with pytest.raises(OverBudgetError):
        account.spend(stated(PureDp(0.05)))
    history = account.history()
    assert [entry.key for entry in history if entry.kind == "debit"] == [f"{step}" for step in range(20)]
    assert [entry.sequence for entry in history] == list(range(1, 42))
    times = [datetime.fromisoformat(entry.time) for entry in history]
    assert times != sorted(times)
    assert {time.utcoffset() for time in times} == {timedelta(0)}
    assert ledgers[1].verify()
    for ledger in ledgers:
        ledger.close()
    with Ledger(url, witness=tmp_path / "w", clock=lambda: datetime(1970, 1, 1, tzinfo=UTC)) as ledger:
        assert ledger.account("images").balance().left == 0.0
