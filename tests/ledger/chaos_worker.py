"""What the processes of the chaos tests do. They come from a fork server, so they share nothing with the tests."""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from dp_accounting import DpEvent, GaussianDpEvent

from nearveil.ledger import Account, AccountError, KeySpentError, Ledger, LedgerUnavailableError, OverBudgetError
from nearveil.privacy.events import PureDp
from tests.programs import PROCESSES

from .stating import stated

KILLS = int(os.environ.get("NEARVEIL_CHAOS", "40"))
ABOUT: dict[str, Any] = {"owner": "the archive", "protects": "database", "unit": "image", "relation": "add-remove"}
EVENTS: dict[str, DpEvent] = {"pure": PureDp(0.0125), "plan": PureDp(0.0125), "filter": GaussianDpEvent(25.0)}


def together(work: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Run `work` in one process for each tuple of arguments, all beginning at once; return what they return."""
    barrier = PROCESSES.Barrier(len(arguments))
    pipes = [PROCESSES.Pipe(duplex=False) for _ in arguments]
    workers = [
        PROCESSES.Process(target=_answer, args=(writing, barrier, work, *argument))
        for (_, writing), argument in zip(pipes, arguments, strict=True)
    ]
    for worker in workers:
        worker.start()
    for _, writing in pipes:
        writing.close()  # so that a worker that dies is noticed
    answers = [reading.recv() for reading, _ in pipes]
    for worker in workers:
        worker.join()
    return answers


def _answer(pipe: Connection, barrier: Barrier, work: Callable[..., Any], *arguments: Any) -> None:
    barrier.wait(60)
    pipe.send(work(*arguments))


def spend_all(url: str, witness: Path, kind: str, number: int) -> list[str]:
    """Spend until the budget is gone; return the keys that were paid for."""
    paid: list[str] = []
    with Ledger(url, witness=witness) as ledger:
        account = ledger.account(kind)
        with suppress(OverBudgetError):
            while True:
                key = f"{number}-{len(paid)}"
                with account.spend(stated(EVENTS[kind]), key):
                    paid.append(key)
    return paid


def share_keys(url: str, witness: Path, keys: int, number: int) -> list[str]:
    """Spend keys that everybody else spends, too; say for each whether the mechanism ran, and what came of it."""
    lines = []
    with Ledger(url, witness=witness) as ledger:
        account = ledger.account("images")
        for key in range(keys):
            try:
                with account.spend(stated(PureDp(0.5)), f"{key}") as debit:
                    if not debit.repeated:
                        debit.store(b"%d" % number)
                    lines.append(f"{'again' if debit.repeated else 'ran'} {(debit.message or b'').decode()}")
            except KeySpentError:
                lines.append("spent")
    return lines


def opened(ledger: Ledger, name: str) -> Account:
    """Open an account that others may be opening."""
    with suppress(AccountError):
        return ledger.open_account(name, **ABOUT, epsilon=100.0, delta=0.0)
    return ledger.account(name)


def amount(step: int) -> PureDp:
    """What a worker spends in its `step`."""
    return PureDp((1 + step % 7) / 1000)


def release(file: int, key: str, account: Account, debit: Any) -> None:
    """Release: a line on the disk, with the proof that it was paid for."""
    os.write(file, f"{key} {debit.receipt.sequence} {debit.receipt.hash}\n".encode())
    os.fsync(file)


def spend_for_ever(url: str, witness: Path, name: str, path: Path) -> None:
    """Pay, release, store, until killed."""
    file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    with Ledger(url, witness=witness) as ledger:
        account = opened(ledger, name)
        for step in range(10**9):
            key = f"{path.name}-{step}"
            with account.spend(stated(amount(step)), key) as debit:
                release(file, key, account, debit)
                debit.store(key.encode())


def spend_in_a_storm(url: str, path: Path, count: int) -> int:
    """Pay, release, store `count` times, however often the database goes away; return how many keys were given up."""
    file, given_up = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND), 0
    with Ledger(url, timeout=5.0) as ledger:
        account = ledger.account("images")
        for step in range(count):
            given_up += not _spend_once(account, file, f"{path.name}-{step}", amount(step))
    return given_up


def _spend_once(account: Account, file: int, key: str, event: DpEvent) -> bool:
    while True:
        try:
            debit = account.spend(stated(event), key)
        except LedgerUnavailableError:
            continue
        except KeySpentError:  # the debit of a try that nobody could tell about
            return False
        with debit:
            assert not debit.repeated
            release(file, key, account, debit)
            with suppress(LedgerUnavailableError):
                debit.store(key.encode())
        return True
