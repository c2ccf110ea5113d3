"""The client for event loops: the loop goes on, and a question that is cancelled says how to go on."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from nearveil import AsyncClient, Client
from nearveil.client import images, questions
from nearveil.client.errors import QuestionError, UnansweredError
from nearveil.client.transport import Request, Response
from nearveil.gallery import Index
from nearveil.ledger import Debit, Ledger, OverBudgetError
from nearveil.privacy import Guarantee
from nearveil.wire.client import rank_answer
from tests.service.asking import (
    QUERIES,
    URL,
    Scene,
    Seen,
    Wire,
    framed,
    is_post,
    new_account,
    seeded,
)

PRIVATE = QUERIES[0]


class Silent(Wire):
    """Loses queries: it says when one is there, and never answers."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if not is_post(request):
            return await super().handle_async_request(request)
        body = await request.aread()
        self.requests.append((request.method, str(request.url), tuple(request.headers.raw), body))
        self.arrived.set()
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    @property
    def arrived(self) -> asyncio.Event:
        if not hasattr(self, "_arrived"):
            self._arrived = asyncio.Event()
        return self._arrived


def test_an_index_here_is_asked_with_the_same_words(made: Path, tmp_path: Path) -> None:
    async def ask() -> None:
        with new_account(tmp_path / "a.db") as account:
            async with AsyncClient(made, account=account) as client:
                assert [one.name for one in await client.galleries()] == ["local"]
                found = await client.nearest(PRIVATE, 3, epsilon=4.0, thumbnails=True, rng=seeded())
                assert await client.original_not_private(4) == b"original 4"
                with pytest.raises(QuestionError, match="k: at most"):
                    await client.nearest(PRIVATE, 99, epsilon=4.0)
                await client.nearest(PRIVATE, 3, 40.0)
                await client.nearest(PRIVATE, 3, 40.0)
                with pytest.raises(OverBudgetError):
                    await client.nearest(PRIVATE, 3, 40.0)
            assert repr(client) == f"AsyncClient({str(made)!r})"
            with new_account(tmp_path / "b.db") as other, Client(made, account=other) as waiting:
                assert waiting.nearest(PRIVATE, 3, epsilon=4.0, thumbnails=True, rng=seeded()).matches == found.matches

    asyncio.run(ask())


def test_features_debits_and_rankings_are_made_in_threads(
    here: Scene, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: dict[str, set[int]] = {}

    class Payer:
        def spend(self, promise: Guarantee, key: str, /) -> Debit:
            places.setdefault("debit", set()).add(threading.get_ident())
            return here.account.spend(promise, key)

    def watched(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def running(*told: Any) -> Any:
            places.setdefault(name, set()).add(threading.get_ident())
            return run(*told)

        return running

    monkeypatch.setattr(questions, "rank_answer", watched("ranking", rank_answer))
    monkeypatch.setattr(images, "_decode_image", watched("feature", images._decode_image))

    async def ask() -> None:
        for where, token, wire in ((URL, here.server.token, here.server.wire()), (made, None, None)):
            async with AsyncClient(where, token, account=Payer(), transport=wire) as client:
                await client.nearest(PRIVATE, epsilon=4.0)

    asyncio.run(ask())
    assert places.keys() == {"debit", "ranking", "feature"}
    assert not any(threading.get_ident() in threads for threads in places.values())


def test_who_cancels_after_the_debit_is_told_the_key(here: Scene) -> None:
    async def ask() -> tuple[Seen, str]:
        silent = Silent(httpx.ASGITransport(here.server.app))
        async with AsyncClient(URL, here.server.token, account=here.account, transport=silent) as client:
            task = asyncio.create_task(client.nearest(PRIVATE, epsilon=4.0))
            await silent.arrived.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError) as raised:
                await task
        (note,) = raised.value.__notes__
        assert "repeats the query: it is paid for at most once" in note
        return silent.posts[0], note.split("'")[1]

    sent, key = asyncio.run(ask())
    assert here.paid == 1
    client, wire = here.client()
    assert client.nearest(PRIVATE, epsilon=4.0, key=key).repeated
    assert wire.posts[0] == sent
    assert here.paid == 1


def test_who_cancels_many_questions_is_told_all_keys(here: Scene) -> None:
    async def ask() -> list[str]:
        silent = Silent(httpx.ASGITransport(here.server.app))
        async with AsyncClient(URL, here.server.token, account=here.account, transport=silent) as client:
            task = asyncio.create_task(client.nearest_many(QUERIES[:3], 3, 4.0, keys=["a", "b", "c"]))
            await silent.arrived.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError) as raised:
                await task
        return raised.value.__notes__

    assert asyncio.run(ask())[-1] == "keys=['a', 'b', 'c'] repeat the queries: each is paid for at most once"
    assert here.paid == 3  # together


def test_a_time_limit_of_ones_own(here: Scene) -> None:
    async def ask() -> None:
        silent = Silent(httpx.ASGITransport(here.server.app))
        async with AsyncClient(URL, here.server.token, account=here.account, transport=silent) as client:

            async def limited() -> None:
                async with asyncio.timeout(None) as limit:
                    task = asyncio.ensure_future(client.nearest(PRIVATE, epsilon=4.0, key="mine"))
                    await silent.arrived.wait()
                    limit.reschedule(0)
                    await task

            with pytest.raises(TimeoutError) as raised:
                await limited()
            assert "key='mine'" in raised.value.__cause__.__notes__[0]  # type: ignore[union-attr]

    asyncio.run(ask())


def test_a_debit_that_has_begun_is_finished_before_a_cancellation(here: Scene) -> None:
    """Else the same key, tried at once, would find a debit without its message, and all would be lost."""
    begun, go_on = threading.Event(), threading.Event()

    class Slow:
        def spend(self, promise: Guarantee, key: str, /) -> Debit:
            begun.set()
            assert go_on.wait(10)
            return here.account.spend(promise, key)

    async def ask() -> int:
        wire = here.server.wire()
        async with AsyncClient(URL, here.server.token, account=Slow(), transport=wire) as client:
            task = asyncio.create_task(client.nearest(PRIVATE, epsilon=4.0, key="mine"))
            await asyncio.to_thread(begun.wait)
            task.cancel()
            await asyncio.sleep(0.05)
            task.cancel()  # whoever is impatient
            await asyncio.sleep(0.05)
            assert not task.done()
            go_on.set()
            with pytest.raises(asyncio.CancelledError) as raised:
                await task
            assert "key='mine'" in raised.value.__notes__[0]
        return len(wire.posts)

    assert asyncio.run(ask()) == 0
    assert [entry.kind for entry in here.account.history()] == ["opened", "debit", "message"]
    assert here.client()[0].nearest(PRIVATE, epsilon=4.0, key="mine").repeated


def test_who_interrupts_is_told_the_key(here: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupt comes in the thread that waits, while the question is under way in another."""
    client, wire = here.client()
    client.galleries()
    send = client._client._transport.send

    async def interrupted(request: Request) -> Response:
        if request.endpoint != "query":
            return await send(request)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        await asyncio.sleep(60)
        raise AssertionError

    with monkeypatch.context() as only:
        only.setattr(client._client._transport, "send", interrupted)
        with pytest.raises(KeyboardInterrupt) as raised:
            client.nearest(PRIVATE, epsilon=4.0, key="mine")
    assert raised.value.__notes__ == ["key='mine' repeats the query: it is paid for at most once"]
    assert [entry.kind for entry in here.account.history()] == ["opened", "debit", "message"]
    assert client.nearest(PRIVATE, epsilon=4.0, key="mine").repeated
    assert wire.posts


def test_a_forked_process_has_no_client(here: Scene) -> None:
    client, _ = here.client()
    client.galleries()
    child = os.fork()
    if not child:
        try:
            client.galleries()
        except RuntimeError:
            client.close()  # does nothing, and waits for nobody
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert client.galleries()


def test_questions_at_once(here: Scene) -> None:
    async def ask() -> None:
        wire = here.server.wire()
        async with AsyncClient(URL, here.server.token, account=here.account, transport=wire) as client:
            found = await asyncio.gather(*(client.nearest(row, 3, 2.0) for row in QUERIES[:6]))
        assert len({one.key for one in found}) == len(wire.posts) == 6

    asyncio.run(ask())
    assert here.paid == 6


def test_retries_wait_without_holding_the_loop(here: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    sleep = asyncio.sleep

    async def hurried(seconds: float) -> None:
        slept.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", hurried)

    def busy(request: httpx.Request, reply: httpx.Response) -> httpx.Response:
        return framed(b"{}", 503, "application/json") if is_post(request) else reply

    async def ask() -> list[Seen]:
        wire = here.server.wire(busy)
        async with AsyncClient(URL, here.server.token, account=here.account, transport=wire, retries=2) as client:
            with pytest.raises(UnansweredError, match="It is paid for"):
                await client.nearest(PRIVATE, epsilon=4.0)
        return wire.posts

    posts = asyncio.run(ask())
    assert len(posts) == 3
    assert len(set(posts)) == 1
    assert slept == [0.5, 1.0]


def test_what_it_opened_is_closed(made: Path, tmp_path: Path) -> None:
    with new_account(tmp_path / "budget.db"):
        pass

    async def ask() -> None:
        async with AsyncClient(str(made), account="me", ledger=tmp_path / "budget.db") as client:
            await client.nearest(PRIVATE, epsilon=4.0)
        with pytest.raises(QuestionError, match=r"^token: "):
            AsyncClient(URL, account="me", ledger=tmp_path / "budget.db")

    asyncio.run(ask())
    with Ledger(tmp_path / "budget.db") as ledger, Index.open(made) as index:
        assert ledger.account("me").balance().left == 96.0
        assert np.isfinite(index.features(index.ids())).all()
