"""Limits: how often, how much at once, how large, how slowly."""

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nearveil.server import limits, logs, requests
from nearveil.server.errors import ServiceError
from nearveil.server.galleries import ByteCache
from nearveil.server.keys import IdempotencyStore
from nearveil.server.limits import BYTES_PER_REQUEST, TokenBuckets, check_length, read_body
from nearveil.server.middleware import DISCONNECTED
from nearveil.server.workers import Poller, Workers
from nearveil.wire.schema import FRAME, KEY_HEADER

from ..gallery.index_places import one_thread
from .serving import Server, lines, serving

__all__ = ["one_thread"]  # fixture


def test_a_bucket_fills_again() -> None:
    now = [100.0]
    buckets = TokenBuckets(30, 3, clock=lambda: now[0])
    assert [buckets.take("ann") for _ in range(4)] == [0, 0, 0, 2]
    assert buckets.take("bob") == 0  # has his own
    now[0] += 1.9
    assert buckets.take("ann") == 1
    now[0] += 0.2
    assert buckets.take("ann") == 0
    now[0] += 1000
    assert [buckets.take("ann") for _ in range(4)] == [0, 0, 0, 2]  # no more than it holds
    free = TokenBuckets(None, 1)
    assert [free.take("ann") for _ in range(1000)] == [0] * 1000


def test_a_large_request_is_paid_back_before_the_next() -> None:
    now = [0.0]
    buckets = TokenBuckets(60, 3, clock=lambda: now[0])
    buckets.take("ann")
    buckets.charge("ann", 10 * BYTES_PER_REQUEST)
    for now[0], seconds in ((0.0, 9), (4.0, 5), (8.9, 1), (9.0, 0)):
        assert buckets.take("ann") == seconds
    TokenBuckets(None, 1).charge("ann", 1)


def test_large_answers_count_as_several_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BYTES_PER_REQUEST", 1)
    monkeypatch.setattr(requests, "_SMALL", 100)
    with serving(tmp_path, rate=1, burst=50) as server:
        assert [server.get("/v1/galleries").status_code for _ in range(3)] == [200] * 3
        assert server.ask(server.query()).status_code == 200
        assert server.get("/v1/galleries").status_code == 429
        assert server.get("/v1/galleries", server.token("bob")).status_code == 200


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


def test_buckets_are_forgotten_beyond_a_number() -> None:
    buckets = TokenBuckets(1, 1, 3)
    assert [buckets.take(name) for name in "abc"] == [0, 0, 0]
    assert buckets.take("a") == 60  # used again, so remembered longer
    buckets.take("d")
    assert set(buckets._buckets) == {"a", "c", "d"}
    buckets.take("b")
    assert len(buckets._buckets) == 3


def test_requests_without_a_valid_token_are_rate_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "UNAUTHENTICATED", (1.0, 5, 10))
    monkeypatch.setattr(limits, "UNAUTHENTICATED_DELAY", 0.0)
    monkeypatch.setattr(logs, "_UNAUTHENTICATED", (1.0, 7))
    with serving(tmp_path) as server:
        bad = "nv_" + "0" * 16 + "_" + "a" * 43
        replies = [server.get("/v1/galleries", bad if number % 2 else None) for number in range(40)]
        assert [reply.status_code for reply in replies] == [401] * 5 + [429] * 35
        assert replies[-1].json()["code"] == "rate_limited"
        assert 1 <= int(replies[-1].headers["retry-after"]) <= 60
        assert server.get("/v1/galleries").status_code == 200  # from the same address
        assert 'nearveil_refused_total{code="rate_limited"} 35.0' in server.get("/metrics").text
        server.client.app.state.nearveil.log._queue.join()
        told = [json.loads(line) for line in lines(tmp_path).splitlines()]
        assert [one["status"] for one in told if one["event"] == "request"] == [401] * 5 + [429] * 2 + [200] * 2
        assert [one["count"] for one in told if one["event"] == "unauthenticated"] == [1]


def test_token_store_outage_is_logged_once_and_rate_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(limits, "UNAUTHENTICATED", (1.0, 5, 10))
    monkeypatch.setattr(limits, "UNAUTHENTICATED_DELAY", 0.0)
    monkeypatch.setattr(logs, "_UNAUTHENTICATED", (1.0, 7))
    logger = logging.getLogger("nearveil.server.workers")
    monkeypatch.setattr(logger, "propagate", False)  # servers of other tests may have changed its parents
    logger.addHandler(caplog.handler)
    try:
        with serving(tmp_path) as server:
            (tmp_path / "tokens.db").rename(tmp_path / "away.db")
            statuses = [server.get("/v1/galleries").status_code for _ in range(60)]
            assert statuses == [503] * 5 + [429] * 55
            assert [record.getMessage() for record in caplog.records] == [
                "token store is down (TokenStoreError): retrying"
            ]
            (tmp_path / "away.db").rename(tmp_path / "tokens.db")
            assert server.get("/v1/galleries").status_code == 200
            assert [record.getMessage() for record in caplog.records[1:]] == ["token store is up again"]
            server.client.app.state.nearveil.log._queue.join()
            events = [json.loads(line)["event"] for line in lines(tmp_path).splitlines()]
            assert len(events) <= 10
    finally:
        logger.removeHandler(caplog.handler)


def test_a_poll_that_hangs_takes_one_thread_and_keeps_nobody_waiting() -> None:
    go = threading.Event()

    def hang() -> None:
        go.wait(60)

    async def run() -> None:
        look = Poller("store", hang, 0.05)
        for _ in range(5):
            with pytest.raises(ServiceError, match=r"busy|too long"):
                await look.poll()
        assert look.workers.pending == 1
        assert look.workers.is_stuck()
        go.set()
        while look.workers.pending:
            await asyncio.sleep(0.01)
        await look.poll()
        assert not look.workers.is_stuck()

    asyncio.run(run())


class Reader:
    """A client on the other side of the application: it asks, and reads when it is told to."""

    def __init__(self, server: Server, method: str, path: str, body: bytes = b"") -> None:
        self._server, self._body, self.reads, self.gone = server, body, asyncio.Event(), False
        headers = [(b"host", b"localhost"), (b"authorization", f"Bearer {server.secret}".encode())]
        headers += [(b"content-type", FRAME.encode()), (b"content-length", b"%d" % len(body))]
        headers += [(KEY_HEADER.lower().encode(), f"reader-{id(self)}".encode())]
        self._scope = {
            "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
            "headers": headers, "http_version": "1.1", "scheme": "http", "client": ("192.0.2.1", 1), "root_path": "",
            DISCONNECTED: lambda: self.gone,
        }  # fmt: skip
        self.said: list[Any] = []
        self.began = asyncio.Event()

    async def ask(self) -> int:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": self._body, "more_body": False}

        async def send(message: Any) -> None:
            if self.said and self.said[-1].get("body"):
                self.began.set()
                await self.reads.wait()  # as uvicorn waits before it writes more
            self.said.append(message)

        await self._server.client.app(self._scope, receive, send)
        return int(self.said[0]["status"])

    async def begun(self) -> None:
        """Wait until there is something to read."""
        async with asyncio.timeout(5):
            await self.began.wait()

    @property
    def header(self) -> dict[bytes, bytes]:
        return dict(self.said[0]["headers"])

    @property
    def body(self) -> bytes:
        return b"".join(one.get("body", b"") for one in self.said[1:])


def test_answers_that_nobody_reads_stop_others_before_memory_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "_SMALL", 100)
    with serving(tmp_path, sending=800) as server:
        data = server.query(1, "names")
        size = len(server.ask(data).content)
        assert 400 < size < 800
        path = "/v1/galleries/birds/query"

        async def run() -> None:
            slow, other = Reader(server, "POST", path, data), Reader(server, "POST", path, data)
            waiting = asyncio.create_task(slow.ask())
            await slow.begun()
            assert await other.ask() == 503
            assert other.header[b"retry-after"] == b"1"
            assert await Reader(server, "GET", "/v1/galleries/birds/map").ask() == 503
            assert await Reader(server, "GET", "/health").ask() == 200  # small
            slow.reads.set()
            assert await waiting == 200
            assert len(slow.body) == size
            again = Reader(server, "POST", path, data)
            again.reads.set()
            assert await again.ask() == 200

        server.client.runner.run(run())


def test_the_only_answer_may_always_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "_SMALL", 100)
    with serving(tmp_path, sending=1) as server:
        for _ in range(3):
            assert server.ask(server.query(1, "names")).status_code == 200


def test_memory_is_asked_for_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the size of an answer is known from the one before, no thread makes it in vain."""
    monkeypatch.setattr(requests, "_SMALL", 100)
    with serving(tmp_path, sending=1000, cache=0) as server:
        made = []
        query = server.gallery.query

        def making(asked: bytes) -> bytes:
            made.append(1)
            return query(asked)

        monkeypatch.setattr(server.gallery, "query", making)
        path, data = "/v1/galleries/birds/query", server.query(1, "originals")

        async def run() -> None:
            slow, other = Reader(server, "POST", path, data), Reader(server, "POST", path, data)
            waiting = asyncio.create_task(slow.ask())
            await slow.begun()
            assert await other.ask() == 503
            slow.reads.set()
            assert await waiting == 200

        assert server.ask(data).status_code == 200
        server.client.runner.run(run())
        assert len(made) == 2


def test_a_token_may_have_so_many_requests_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "_SMALL", 100)
    with serving(tmp_path, per_token=2) as server:
        data, path = server.query(1, "names"), "/v1/galleries/birds/query"

        async def run() -> None:
            slow = [Reader(server, "POST", path, data), Reader(server, "GET", "/v1/galleries/birds/map")]
            waiting = [asyncio.create_task(one.ask()) for one in slow]
            for one in slow:
                await one.begun()
            for third in (Reader(server, "POST", path, data), Reader(server, "GET", "/v1/galleries")):
                assert await third.ask() == 429
                assert b"rate_limited" in third.body
                assert third.header[b"retry-after"] == b"1"
            others = await server.client._client.get(
                "/v1/galleries", headers={"authorization": f"Bearer {server.token('bob')}"}
            )
            assert others.status_code == 200
            for one in slow:
                one.reads.set()
            assert await asyncio.gather(*waiting) == [200, 200]
            assert await Reader(server, "GET", "/v1/galleries").ask() == 200

        server.client.runner.run(run())
        assert server.client.app.state.nearveil.in_flight.total() == 0


def test_work_is_not_begun_for_those_who_have_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path, concurrency=1) as server:
        workers, go, made = server.client.app.state.nearveil.pools["birds"]["files"], threading.Event(), []

        def original(number: int) -> bytes:
            made.append(number)
            return b"x"

        monkeypatch.setattr(server.gallery, "original", original)

        async def run() -> list[int]:
            holding = asyncio.create_task(workers.run(go.wait))
            asked = [Reader(server, "GET", f"/v1/galleries/birds/items/{number}/original") for number in range(3)]
            waiting = [asyncio.create_task(one.ask()) for one in asked]
            while workers.pending < 4:
                await asyncio.sleep(0.001)
            asked[1].gone = True
            go.set()
            await holding
            return await asyncio.gather(*waiting)

        assert server.client.runner.run(run()) == [200, 408, 200]
        assert sorted(made) == [0, 2]


def test_work_waits_in_a_queue_that_ends() -> None:
    async def run() -> None:
        workers, go = Workers(2, 3, 30.0), threading.Event()
        under_way = [asyncio.create_task(workers.run(go.wait)) for _ in range(5)]
        await asyncio.sleep(0)
        assert workers.pending == 5
        with pytest.raises(ServiceError, match=r"busy|too long"):
            await workers.run(go.wait)
        go.set()
        assert await asyncio.gather(*under_way) == [True] * 5
        assert workers.pending == 0
        assert await workers.run(lambda: 2) == 2

    asyncio.run(run())


def test_work_that_takes_too_long_is_given_up_but_counts_on() -> None:
    async def run() -> None:
        workers, go = Workers(1, 0, 0.05), threading.Event()
        with pytest.raises(ServiceError, match="too long"):
            await workers.run(go.wait)
        with pytest.raises(ServiceError, match="busy"):  # its thread is not free yet
            await workers.run(lambda: 2)
        go.set()
        while workers.pending:
            await asyncio.sleep(0.005)
        assert await workers.run(lambda: 2) == 2

    asyncio.run(run())


def test_workers_that_never_come_back_are_noticed() -> None:
    async def run() -> None:
        workers, go = Workers(2, 0, 0.05), threading.Event()
        for _ in range(2):
            assert not workers.is_stuck()
            with pytest.raises(ServiceError, match="too long"):
                await workers.run(go.wait)
        await asyncio.sleep(0.06)
        assert workers.is_stuck()
        go.set()
        while workers.pending:
            await asyncio.sleep(0.005)
        assert await workers.run(lambda: 2) == 2
        assert not workers.is_stuck()

    asyncio.run(run())


def test_an_error_of_the_work_is_its_own() -> None:
    async def run() -> None:
        workers = Workers(1, 0, 5.0)
        with pytest.raises(ValueError, match="invalid literal"):
            await workers.run(lambda: int("x"))

    asyncio.run(run())


def test_a_server_that_is_full_says_so(tmp_path: Path) -> None:
    with serving(tmp_path, concurrency=1, queue=0) as server:
        server.ask(server.query())  # whatever is to be read is read
        workers, go = server.client.app.state.nearveil.pools["birds"]["answers"], threading.Event()
        while workers.pending:
            time.sleep(0.001)

        async def hold() -> asyncio.Task[bool]:
            task = asyncio.create_task(workers.run(go.wait))
            await asyncio.sleep(0)
            return task

        task = server.client.runner.run(hold())
        assert server.get("/ready", None).status_code == 200  # it has threads of its own
        full = server.get("/v1/galleries")
        assert (full.status_code, full.json()["code"], full.headers["retry-after"]) == (503, "busy", "1")
        assert server.ask(server.query()).status_code == 503
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
    def read(length: bytes | None, receive: Callable[[], Any], seconds: float = 5.0) -> bytes:
        return bytes(asyncio.run(read_body(receive, check_length(length, range(11)), seconds)))

    assert read(b"6", body(b"abc", b"def")) == b"abcdef"
    with pytest.raises(ServiceError, match="Content-Length"):
        read(None, body(b""))
    for length in (b"11", b"-1", b"x", b"", b"9" * 5000, "²".encode()):
        with pytest.raises(ServiceError, match="at most"):
            read(length, body(b"abc"))
    with pytest.raises(ServiceError, match="at most"):
        read(b"3", body(b"abc" * 9))
    with pytest.raises(ServiceError, match="in time"):
        read(b"6", body(b"abc", b"def", pause=0.05), seconds=0.02)
    with pytest.raises(ServiceError, match="disconnected"):
        read(b"6", body(b"abc", gone=True))


def test_a_sealed_question_must_have_a_length_of_the_layout() -> None:
    lengths = frozenset((40, 70))
    assert [check_length(length, lengths) for length in (b"40", b"70")] == [40, 70]
    for length in (b"0", b"39", b"41", b"69", b"71", b"31000000", b"x"):
        with pytest.raises(ServiceError, match="must have 40 or 70 bytes"):
            check_length(length, lengths)
    with pytest.raises(ServiceError, match="Content-Length"):
        check_length(None, lengths)


class Sender:
    """A client whose body comes when the test says so."""

    def __init__(self, server: Server, path: str, length: int, token: str = "") -> None:
        self._server, self.asked, self.parts = server, asyncio.Event(), asyncio.Queue[bytes]()
        self._length, self._left, self.said = length, length, list[Any]()
        headers = {
            "host": "localhost", "authorization": f"Bearer {token or server.secret}", "content-type": FRAME,
            "content-length": str(length), KEY_HEADER.lower(): f"sender-{id(self)}",
        }  # fmt: skip
        self._scope = {
            "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()], "http_version": "1.1",
            "scheme": "http", "client": ("192.0.2.1", 1), "root_path": "",
        }  # fmt: skip

    async def send(self) -> tuple[int, dict[bytes, bytes]]:
        """Return status and headers of the reply; `asked` is set when the application wants the body."""

        async def receive() -> dict[str, Any]:
            self.asked.set()
            part = await self.parts.get()
            self._left -= len(part)
            return {"type": "http.request", "body": part, "more_body": self._left > 0}

        async def send(message: Any) -> None:
            self.said.append(message)

        await self._server.client.app(self._scope, receive, send)
        return int(self.said[0]["status"]), dict(self.said[0]["headers"])


def test_bodies_in_flight_are_counted_before_they_are_read(tmp_path: Path) -> None:
    with serving(tmp_path, receiving=140_000, per_token=3) as server:
        state, path = server.client.app.state.nearveil, "/v1/galleries/birds/query"
        budget, bob, carol = state.receiving["query"], server.token("bob"), server.token("carol")

        async def run() -> None:
            first = Sender(server, path, 65_540)
            task = asyncio.create_task(first.send())
            async with asyncio.timeout(5):
                await first.asked.wait()
            assert budget.bytes_by_token.total() == 65_540  # nothing of it has come
            second = Sender(server, path, 65_540, bob)
            other = asyncio.create_task(second.send())
            async with asyncio.timeout(5):
                await second.asked.wait()
            third = Sender(server, path, 65_540, carol)
            status, headers = await third.send()
            assert (status, headers[b"retry-after"]) == (503, b"1")
            assert not third.asked.is_set()
            small = [Sender(server, path, 50) for _ in range(2)]
            tasks = [asyncio.create_task(one.send()) for one in small]
            async with asyncio.timeout(5):
                await asyncio.gather(*(one.asked.wait() for one in small))
            fourth = Sender(server, path, 1)  # of a token that has three requests in flight
            fourth.parts.put_nowait(b"x")  # which is thrown away
            assert (await fourth.send())[0] == 429
            for one, length in ((first, 65_540), (second, 65_540), *((one, 50) for one in small)):
                one.parts.put_nowait(bytes(length))
            assert [status for status, _ in await asyncio.gather(task, other, *tasks)] == [400] * 4

        server.client.runner.run(run())
        assert (budget.bytes_by_token.total(), state.in_flight.total()) == (0, 0)


@pytest.mark.parametrize("receiving", [1000, 140_000])
def test_slow_bodies_of_one_token_keep_no_other_out(tmp_path: Path, receiving: int) -> None:
    """Neither where two large bodies are within the limit, nor where one alone is above it."""
    with serving(tmp_path, receiving=receiving) as server:
        path, bob = "/v1/galleries/birds/query", server.token("bob")

        async def run() -> None:
            slow = Sender(server, path, 65_540)
            task = asyncio.create_task(slow.send())
            async with asyncio.timeout(5):
                await slow.asked.wait()
            assert (await Sender(server, path, 65_540).send())[0] == 503
            other = Sender(server, path, 65_540, bob)
            other.parts.put_nowait(bytes(65_540))
            async with asyncio.timeout(5):
                assert (await other.send())[0] == 400  # it was read: zeros are no message
            slow.parts.put_nowait(bytes(65_540))
            assert (await task)[0] == 400

        server.client.runner.run(run())
        assert server.client.app.state.nearveil.receiving["query"].bytes_by_token.total() == 0


def test_the_reservation_of_a_body_ends_with_its_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that does not read its answer keeps nobody from asking."""
    monkeypatch.setattr(requests, "_SMALL", 100)
    with serving(tmp_path) as server:

        async def run() -> None:
            slow = Reader(server, "POST", "/v1/galleries/birds/query", server.query(1, "names"))
            waiting = asyncio.create_task(slow.ask())
            await slow.begun()
            assert server.client.app.state.nearveil.receiving["query"].bytes_by_token.total() == 0
            slow.reads.set()
            assert await waiting == 200

        server.client.runner.run(run())


def test_the_reservation_of_a_body_ends_with_its_refusal(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        statuses = [server.ask(server.query(number), key="one-key-of-a-client").status_code for number in (0, 1)]
        assert statuses == [200, 409]
        assert server.client.app.state.nearveil.receiving["query"].bytes_by_token.total() == 0


def test_bodies_are_hashed_by_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: dict[int, str] = {}
    store = IdempotencyStore.store

    def watch(keys: IdempotencyStore, key: str, token: str, path: str, body: bytes) -> bytes:
        threads[len(body)] = threading.current_thread().name
        return store(keys, key, token, path, body)

    monkeypatch.setattr(IdempotencyStore, "store", watch)
    with serving(tmp_path, max_body=1 << 20) as server:
        assert server.ask(bytes(1 << 19)).status_code == 400
    assert threads == {1 << 19: "nearveil-work"}


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
