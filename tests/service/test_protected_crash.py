"""Processes that die or race: each set is paid for once, once more after a crash, and one answer is shown."""

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nearveil.service import _protected
from nearveil.votes._classifier import NeighborPoll
from tests.service.protected import SETS, ask, copied, debits, gallery, make, newest

WORKER = """
import json, os, signal, sys, time
from pathlib import Path
from nearveil.ledger import Debit
from tests.service.protected import SETS, ask, gallery
from tests.service.test_protected_crash import slowly

place, dies = Path(sys.argv[1]), sys.argv[2] == "dies"
found = gallery(place)
if dies:
    Debit.store = lambda self, message: os.kill(os.getpid(), signal.SIGKILL)
    ask(found, 0)
(place / "ready").touch()
with slowly():
    print(json.dumps([ask(found, number, "another").model_dump() for number in range(SETS)]))
"""


@contextmanager
def slowly() -> Iterator[None]:
    """Count so slowly that whoever races is at it too."""
    count = NeighborPoll.tallies

    def slow(self: Any, *arguments: Any) -> Any:
        time.sleep(0.1)
        return count(self, *arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(NeighborPoll, "tallies", slow)
        yield


def worker(place: Path, how: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", WORKER, str(place), how]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])  # noqa: S603


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = make(tmp_path_factory.mktemp("crash"))
    gallery(place).close()  # the account is opened once
    return place


@pytest.fixture
def made(template: Path, tmp_path: Path) -> Path:
    return copied(template, tmp_path)


def test_a_process_that_dies_after_the_debit_costs_one_more_and_never_another(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = worker(made, "dies")
    dead.communicate(timeout=120)
    assert dead.returncode == -signal.SIGKILL
    monkeypatch.setattr(_protected, "_PATIENCE", 0.05)
    found = gallery(made)
    assert debits(found) == 1
    assert all(entry.message is None for entry in found.terms.account.history())
    told = ask(found, 0)
    assert debits(found) == 2
    keys = [entry.key for entry in found.terms.account.history() if entry.kind == "debit"]
    assert keys == [f"{newest(found)}:0:{attempt}" for attempt in (0, 1)]
    assert ask(found, 0) == told
    found.close()
    again = gallery(made)
    assert ask(again, 0) == told
    assert debits(again) == 2
    assert isinstance(ask(again, 1).votes, dict)
    assert debits(again) == 3
    again.close()


def test_two_processes_race_and_pay_once(made: Path) -> None:
    found, other = gallery(made), worker(made, "races")
    while not (made / "ready").exists():
        assert other.poll() is None
        time.sleep(0.001)
    with slowly():
        told = [ask(found, number).model_dump() for number in range(SETS)]
    assert json.loads(other.communicate(timeout=120)[0]) == told
    assert debits(found) == SETS
    found.close()


def test_who_was_given_up_too_early_shows_what_was_shown_meanwhile(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process stalls between count and store; another gives it up, pays again and answers. Then the first goes on."""
    monkeypatch.setattr(_protected, "_PATIENCE", 0.05)
    stalled, go_on = threading.Event(), threading.Event()
    count = NeighborPoll.tallies
    slow, quick = gallery(made), gallery(made)

    def stalling(self: Any, *arguments: Any) -> Any:
        if threading.current_thread() is first:
            stalled.set()
            assert go_on.wait(60)
        return count(self, *arguments)

    told: list[Any] = []
    first = threading.Thread(target=lambda: told.append(ask(slow, 0)))
    monkeypatch.setattr(NeighborPoll, "tallies", stalling)
    first.start()
    assert stalled.wait(60)
    shown = ask(quick, 0)
    go_on.set()
    first.join(60)
    assert told == [shown]
    kinds = [(entry.kind, (entry.key or "").rpartition(":")[2]) for entry in quick.terms.account.history()[1:]]
    assert kinds == [("debit", "0"), ("debit", "1"), ("message", "1"), ("message", "0")]  # both are paid for
    slow.close()
    quick.close()
    again = gallery(made)
    assert ask(again, 0) == shown
    again.close()
