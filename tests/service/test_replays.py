"""Keys that were used before: in memory that processes share, and in a table that hosts share."""

import asyncio
import fcntl
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
import sqlalchemy as sa

from nearveil.server import limits
from nearveil.server.errors import ReplayedError, UnavailableError
from nearveil.server.limits import Refresher, ReplayStore, Use, UsedKeys

from ..gallery.index_places import index_server, index_url

__all__ = ["index_server", "index_url"]  # fixtures
PROCESSES = multiprocessing.get_context("spawn")


class Host:
    """What one host knows of keys."""

    def __init__(self, where: str) -> None:
        self.store, self.keys = ReplayStore(where, 5.0), UsedKeys(2, 2)
        self.look = Refresher("keys", lambda: None, 30.0, store=self.store)

    async def check(self, *use: str | bytes) -> None:
        await self.keys.check(Use.of(*use), self.look)  # type: ignore[arg-type]

    def close(self) -> None:
        self.look.workers.close()
        self.store.close()


def test_keys_are_remembered_up_to_a_number() -> None:
    async def run() -> None:
        keys = UsedKeys(1, 3)
        for key in "abc":
            await keys.check(Use.of(key, "ann", "birds", b"1"))
        await keys.check(Use.of("a", "ann", "birds", b"1"))  # used again, so remembered longer
        await keys.check(Use.of("d", "ann", "birds", b"1"))
        for same in (("a", "bob", "birds", b"1"), ("a", "ann", "cars", b"1"), ("a", "ann", "birds", b"2")):
            with pytest.raises(ReplayedError):
                await keys.check(Use.of(*same))
        await keys.check(Use.of("b", "ann", "birds", b"2"))  # forgotten
        with pytest.raises(ReplayedError):
            await keys.check(Use.of("b", "ann", "birds", b"1"))

    asyncio.run(run())


def test_none_of_the_last_65536_keys_is_forgotten() -> None:
    async def run() -> None:
        keys = UsedKeys()
        for number in range(100_000):
            await keys.check(Use.of(str(number), "ann", "birds", b"1"))
        for number in range(100_000 - 65_536, 100_000):
            with pytest.raises(ReplayedError):
                await keys.check(Use.of(str(number), "ann", "birds", b"2"))

    asyncio.run(run())


def test_nobody_finds_keys_that_fill_the_row_of_another() -> None:
    """Whoever has the program knows the rows of a memory of its own, and of no server's."""

    async def run() -> None:
        server, own = UsedKeys(64, 4), UsedKeys(64, 4)

        async def find_row(key: str) -> int:
            async with own._locked(Use.of(key, "", "", b"").key) as start:
                return start

        await server.check(Use.of("victim", "ann", "birds", b"1"))
        row = await find_row("victim")
        same = [key for key in map(str, range(2000)) if await find_row(key) == row]
        for key in same[:8]:
            await server.check(Use.of(key, "eve", "birds", b"1"))
        with pytest.raises(ReplayedError):
            await server.check(Use.of("victim", "ann", "birds", b"2"))

    asyncio.run(run())


def use_keys(keys: UsedKeys, count: int, data: bytes, results: "multiprocessing.Queue[list[int]]") -> None:
    """Use keys as one process of a server, each for the same bytes; tell which of them were refused."""

    async def run() -> list[int]:
        refused = []
        for number in range(count):
            try:
                await keys.check(Use.of(str(number), "ann", "birds", data))
            except ReplayedError:
                refused.append(number)
        return refused

    results.put(asyncio.run(run()))


def test_of_two_processes_that_use_a_key_one_is_refused() -> None:
    keys, results, count = UsedKeys(64, 128), PROCESSES.Queue(), 2000
    some = [PROCESSES.Process(target=use_keys, args=(keys, count, data, results)) for data in (b"1", b"2")]
    for process in some:
        process.start()
    refused = results.get(timeout=60) + results.get(timeout=60)
    assert sorted(refused) == list(range(count))
    for process in some:
        process.join()
    # What a process noted outlives it, and a third one may not use its keys, either.
    third = PROCESSES.Process(target=use_keys, args=(keys, count, b"3", results))
    third.start()
    assert results.get(timeout=60) == list(range(count))
    third.join()


def hold_rows(keys: UsedKeys, ready: Callable[[], None]) -> None:
    """Be stopped while all rows are locked."""
    fcntl.lockf(keys._file, fcntl.LOCK_EX)
    ready()
    os.kill(os.getpid(), signal.SIGSTOP)


def test_a_process_that_was_stopped_holds_up_no_loop_and_one_that_died_holds_nothing() -> None:
    keys, locked = UsedKeys(patience=0.3), PROCESSES.Event()
    holder = PROCESSES.Process(target=hold_rows, args=(keys, locked.set))
    holder.start()
    assert locked.wait(60)
    threading.Timer(10, holder.kill).start()  # whoever waits for its lock shall fail, and not for ever

    async def run() -> None:
        beats: list[float] = []

        async def beat() -> None:
            while True:
                beats.append(time.monotonic())
                await asyncio.sleep(0.005)

        beating = asyncio.create_task(beat())
        with pytest.raises(UnavailableError):
            await keys.check(Use.of("a", "ann", "birds", b"1"))
        assert len(beats) > 10  # all that while the loop has done something else, too
        holder.kill()
        holder.join()
        await keys.check(Use.of("a", "ann", "birds", b"1"))
        beating.cancel()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_two_hosts_share_what_they_know(index_url: str) -> None:
    async def run() -> None:
        one, other = (Host(index_url) for _ in range(2))
        await one.check("a", "ann", "birds", b"1")
        await other.check("a", "ann", "birds", b"1")  # a retry
        third = Host(index_url)
        opened = one, other, third
        for same in (("a", "bob", "birds", b"1"), ("a", "ann", "cars", b"1"), ("a", "ann", "birds", b"2")):
            with pytest.raises(ReplayedError):
                await third.check(*same)
        many = [f"key {number % 20}" for number in range(200)]
        await asyncio.gather(*(store.check(key, "ann", "birds", b"1") for key in many for store in (one, other)))
        both = await asyncio.gather(
            *(store.check("new", "ann", "birds", data) for store, data in ((one, b"1"), (other, b"2"))),
            return_exceptions=True,
        )
        assert sorted(type(outcome).__name__ for outcome in both) == ["NoneType", "ReplayedError"]
        for host in opened:
            host.close()

    asyncio.run(run())


def test_a_table_that_does_not_answer_lets_nobody_pass(index_url: str) -> None:
    async def run() -> None:
        host = Host(index_url)
        with host.store._database.begin_write() as connection:
            connection.execute(sa.text("DROP TABLE nearveil_replay"))
        outcomes = await asyncio.gather(
            *(host.check(key, "ann", "birds", b"1") for key in "abc"), return_exceptions=True
        )
        assert [type(outcome) for outcome in outcomes] == [UnavailableError] * 3
        host.close()

    asyncio.run(run())


def test_of_one_key_that_comes_twice_at_once_the_first_use_counts(index_url: str) -> None:
    store = ReplayStore(index_url, 5.0)
    first, second = (Use.of("a", "ann", "birds", data) for data in (b"1", b"2"))
    others = [Use.of(f"key {number}", "ann", "birds", b"1") for number in range(limits._SOME)]
    assert store.use([first, *others, second]) == [first.what, *(use.what for use in others), first.what]
    assert store.use([second]) == [first.what]
    store.close()


def test_old_keys_are_forgotten(index_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_KEPT", -100.0)
    store, use = ReplayStore(index_url, 5.0), Use.of("a", "ann", "birds", b"1")
    assert store.use([use]) == [use.what]
    other = Use.of("a", "ann", "birds", b"2")
    assert store.use([other]) == [other.what]
    store.close()
