"""Limits: how often, how much at once, how large, how slowly."""

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nearveil.service._cache import ByteCache
from nearveil.service._errors import BusyError, LengthError, RateError, ReplayedError, SlowError, TooLargeError
from nearveil.service._limits import Buckets, Replays, Workers, read_body

from ..retrieval.index_places import one_thread
from .serving import serving

__all__ = ["one_thread"]  # fixture


def test_a_bucket_fills_again() -> None:
    now = [100.0]
    buckets = Buckets(30, 3, clock=lambda: now[0])
    for _ in range(3):
        buckets.take("ann")
    with pytest.raises(RateError) as error:
        buckets.take("ann")
    assert error.value.retry_after == 2
    buckets.take("bob")  # has his own
    now[0] += 1.9
    with pytest.raises(RateError) as error:
        buckets.take("ann")
    assert error.value.retry_after == 1
    now[0] += 0.2
    buckets.take("ann")
    now[0] += 1000
    for _ in range(3):  # no more than it holds
        buckets.take("ann")
    with pytest.raises(RateError):
        buckets.take("ann")
    free = Buckets(None, 1)
    for _ in range(1000):
        free.take("ann")


def test_a_token_that_asks_too_often(tmp_path: Path) -> None:
    with serving(tmp_path, rate=1, burst=4) as server:
        statuses = [server.get("/v1/galleries").status_code for _ in range(6)]
        assert statuses == [200] * 4 + [429] * 2
        refused = server.ask(server.query())
        assert (refused.status_code, refused.json()["code"]) == (429, "rate_limited")
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert server.get("/v1/galleries", server.token("bob")).status_code == 200
        assert server.get("/v1/galleries", None).status_code == 401  # costs nobody anything
        assert server.get("/health", None).status_code == 200


def test_work_waits_in_a_queue_that_ends() -> None:
    async def run() -> None:
        workers, go = Workers(2, 3, 30.0), threading.Event()
        under_way = [asyncio.create_task(workers.run(go.wait)) for _ in range(5)]
        await asyncio.sleep(0)
        assert workers.pending == 5
        with pytest.raises(BusyError):
            await workers.run(go.wait)
        go.set()
        assert await asyncio.gather(*under_way) == [True] * 5
        assert workers.pending == 0
        assert await workers.run(max, 1, 2) == 2
        workers.close()

    asyncio.run(run())


def test_work_that_takes_too_long_is_given_up_but_counts_on() -> None:
    async def run() -> None:
        workers, go = Workers(1, 0, 0.05), threading.Event()
        with pytest.raises(BusyError, match="too long"):
            await workers.run(go.wait)
        with pytest.raises(BusyError, match="at once"):  # its thread is not free yet
            await workers.run(max, 1, 2)
        go.set()
        while workers.pending:
            await asyncio.sleep(0.005)
        assert await workers.run(max, 1, 2) == 2
        workers.close()

    asyncio.run(run())


def test_an_error_of_the_work_is_its_own() -> None:
    async def run() -> None:
        workers = Workers(1, 0, 5.0)
        with pytest.raises(ValueError, match="invalid literal"):
            await workers.run(int, "x")
        workers.close()

    asyncio.run(run())


def test_a_server_that_is_full_says_so(tmp_path: Path) -> None:
    with serving(tmp_path, concurrency=1, queue=0) as server:
        server.ask(server.query())  # whatever is to be read is read
        workers, go = server.client.app.state.desk.workers, threading.Event()
        while workers.pending:
            time.sleep(0.001)

        async def hold() -> asyncio.Task[bool]:
            task = asyncio.create_task(workers.run(go.wait))
            await asyncio.sleep(0)
            return task

        task = server.client.runner.run(hold())
        full = server.get("/v1/galleries")
        assert (full.status_code, full.json()["code"], full.headers["retry-after"]) == (503, "busy", "1")
        assert server.ask(server.query()).status_code == 200  # known: needs no thread
        assert server.get("/health", None).status_code == 200
        go.set()

        async def done() -> bool:
            return await task

        assert server.client.runner.run(done())
        assert server.get("/v1/galleries").status_code == 200


def body(*parts: bytes, pause: float = 0.0, gone: bool = False) -> Callable[[], Any]:
    left = list(parts)

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(pause)
        if gone and not left:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left) or gone}

    return receive


def test_bodies() -> None:
    def read(length: bytes | None, receive: Callable[[], Any], chunked: bool = False, seconds: float = 5.0) -> bytes:
        return asyncio.run(read_body(length, chunked, receive, 10, seconds))

    assert read(b"6", body(b"abc", b"def")) == b"abcdef"
    assert read(None, body(b"abc", b""), chunked=True) == b"abc"
    with pytest.raises(LengthError):
        read(None, body(b""))
    for length in (b"11", b"-1", b"x", b"", b"9" * 5000, "²".encode()):
        with pytest.raises(TooLargeError):
            read(length, body(b"abc"))
    with pytest.raises(TooLargeError):
        read(None, body(*[b"abc"] * 9), chunked=True)
    with pytest.raises(TooLargeError):
        read(b"3", body(b"abc" * 9))
    with pytest.raises(SlowError, match="in time"):
        read(b"6", body(b"abc", b"def", pause=0.05), seconds=0.02)
    with pytest.raises(SlowError, match="went away"):
        read(b"6", body(b"abc", gone=True))


def test_keys_are_remembered_up_to_a_number() -> None:
    replays = Replays(most=3)
    for key in "abc":
        replays.check(key, "ann", "birds", b"1")
    replays.check("a", "ann", "birds", b"1")  # used again, so remembered longer
    replays.check("d", "ann", "birds", b"1")
    for same in (("a", "bob", "birds", b"1"), ("a", "ann", "cars", b"1"), ("a", "ann", "birds", b"2")):
        with pytest.raises(ReplayedError):
            replays.check(*same)
    replays.check("b", "ann", "birds", b"2")  # forgotten
    assert len(replays._seen) == 3


def test_a_cache_holds_what_it_may() -> None:
    cache = ByteCache(10_000)
    for number in range(100):
        cache.put(b"%d" % number, bytes(750))
        cache.get(b"0")
    assert cache.get(b"0") is not None  # asked for all the time
    assert cache.get(b"50") is None
    assert len(cache) == 9
    cache.put(b"0", b"new")
    assert cache.get(b"0") == b"new"
    cache.put(b"large", bytes(3000))
    assert cache.get(b"large") is None
    for number in range(1000):
        cache.put(b"same", bytes(number))
    assert len(cache) <= 10
    ByteCache(0).put(b"a", b"b")
