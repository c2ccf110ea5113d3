"""Processes that die or race: a publication is paid for once, once more after a crash, and never two for one debit."""

import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from nearveil.private_knn import PrivateDiscriminant
from nearveil.server import protected
from nearveil.server.protected import PublicationError
from tests.programs import Program
from tests.service.protected import copied, debits, gallery, make

WORKER = """
import os, signal, sys, time
from pathlib import Path
from nearveil.ledger import Debit
from nearveil.private_knn import PrivateDiscriminant
from tests.service.protected import gallery

place, how = Path(sys.argv[1]), sys.argv[2]
found = gallery(place)
if how == "dies":
    Debit.store = lambda self, message: os.kill(os.getpid(), signal.SIGKILL)
fit = PrivateDiscriminant.fit
def slow(self, *arguments, **named):
    time.sleep(0.5)
    return fit(self, *arguments, **named)
PrivateDiscriminant.fit = slow
(place / f"ready {how}").touch()
while how == "races" and not (place / "go").exists():
    time.sleep(0.001)
print(found.publish().version)
"""


def worker(place: Path, how: str) -> Program:
    return Program("-c", WORKER, str(place), how)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("crash"))


@pytest.fixture
def made(template: Path, tmp_path: Path) -> Path:
    return copied(template, tmp_path)


def test_a_process_that_is_killed_between_debit_and_store_costs_one_publication(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = worker(made, "dies")
    dead.read(120)
    assert dead.returncode == -signal.SIGKILL
    monkeypatch.setattr(protected, "_STORE_TIMEOUT", 0.05)
    found = gallery(made)
    assert found.account is not None
    assert (debits(found), found.publications_left) == (1, 2)
    assert not found.info().is_published
    assert all(entry.message is None for entry in found.account.history())
    told = found.publish()
    assert (debits(found), found.publications_left) == (2, 1)
    keys = [entry.key for entry in found.account.history() if entry.kind == "debit"]
    assert keys == ["model:0", "model:1"]
    found.close()
    again = gallery(made)
    assert (again.model(), debits(again)) == (told.model, 2)
    again.close()


def test_two_processes_publish_at_once_and_pay_once(made: Path) -> None:
    """One that decided to publish, before it saw that another was at it, takes the other's model."""
    other, found = worker(made, "races"), gallery(made)
    while not (made / "ready races").exists():
        assert other.poll() is None
        time.sleep(0.001)
    begun, fit = threading.Event(), PrivateDiscriminant.forecast

    def forecast(self: Any, **arguments: Any) -> Any:  # between our look into the ledger and our debit
        if not begun.is_set():
            begun.set()
            (made / "go").touch()
            while debits_of(made) == 0:
                time.sleep(0.001)
        return fit(self, **arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(PrivateDiscriminant, "forecast", forecast)
        told = found.publish()
    assert other.read(120).strip() == told.version
    assert (debits(found), found.publications_left) == (1, 2)
    found.close()


def debits_of(place: Path) -> int:
    """Return how often the account was debited, seen by somebody else."""
    other = gallery(place)
    try:
        return debits(other)
    finally:
        other.close()


def test_who_comes_while_another_is_at_it_waits_for_its_model(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stalled, go_on, fit = threading.Event(), threading.Event(), PrivateDiscriminant.fit
    slow, late = gallery(made), gallery(made)

    def stalling(self: Any, *arguments: Any, **named: Any) -> Any:
        stalled.set()
        assert go_on.wait(60)
        return fit(self, *arguments, **named)

    monkeypatch.setattr(PrivateDiscriminant, "fit", stalling)
    monkeypatch.setattr("nearveil.server.protected.time.sleep", lambda _: go_on.set())  # who comes late looks again
    told: list[Any] = []
    first = threading.Thread(target=lambda: told.append(slow.publish()))
    first.start()
    assert stalled.wait(60)
    assert not go_on.is_set()
    shown = late.publish()
    first.join(60)
    assert told == [shown]
    assert debits(late) == 1
    slow.close()
    late.close()


def test_who_was_given_up_too_early_changes_nothing_that_was_shown(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process stalls between debit and store; another gives it up, pays and publishes. Then the first goes on."""
    monkeypatch.setattr(protected, "_STORE_TIMEOUT", 0.05)
    stalled, go_on, fit = threading.Event(), threading.Event(), PrivateDiscriminant.fit
    slow, quick = gallery(made), gallery(made)

    def stalling(self: Any, *arguments: Any, **named: Any) -> Any:
        if threading.current_thread() is first:
            stalled.set()
            assert go_on.wait(60)
        return fit(self, *arguments, **named)

    told: list[Any] = []
    first = threading.Thread(target=lambda: told.append(slow.publish()))
    monkeypatch.setattr(PrivateDiscriminant, "fit", stalling)
    first.start()
    assert stalled.wait(60)
    shown = quick.publish()
    go_on.set()
    first.join(60)
    assert told == [shown]
    assert quick.account is not None
    kinds = [(entry.kind, entry.key) for entry in quick.account.history()[1:]]
    assert kinds == [("debit", "model:0"), ("debit", "model:1"), ("message", "model:1"), ("message", "model:0")]
    quick.refresh()
    assert quick.model() == shown.model
    slow.close()
    quick.close()


def test_who_finds_its_key_taken_by_the_dead_says_so(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protected, "_STORE_TIMEOUT", 0.05)
    found, other, forecast = gallery(made), gallery(made), PrivateDiscriminant.forecast

    def late(self: Any, **arguments: Any) -> Any:  # another pays between our look and our debit, and stores nothing
        with monkeypatch.context() as patched:
            patched.setattr(PrivateDiscriminant, "forecast", forecast)
            patched.setattr(PrivateDiscriminant, "export", lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                other.publish()
        return forecast(self, **arguments)

    with monkeypatch.context() as patched:
        patched.setattr(PrivateDiscriminant, "forecast", late)
        with pytest.raises(PublicationError, match="another process paid for this publication"):
            found.publish()
    assert debits(found) == 1
    assert found.publish().number == 2
    found.close()
    other.close()
