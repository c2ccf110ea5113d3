"""The client that waits: interrupts at every moment, threads, forks, and clients that nobody closes."""

import asyncio
import contextvars
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, cast

import numpy as np
import pytest

from nearveil import Client
from nearveil.client.errors import QuestionError
from nearveil.client.transport import LocalTransport, Request, Response
from nearveil.ledger import Debit, Ledger
from nearveil.privacy import Guarantee
from tests.service.asking import QUERIES, Scene, new_account

PRIVATE = QUERIES[0]
NOTE = ["key='mine' repeats the query: it is paid for at most once"]


def interrupt() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def loops() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "nearveil"]


def wait_for(true: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def in_thread(work: Callable[[], Any]) -> Callable[[], Any]:
    """Do work in a thread that a failed test leaves behind; return what waits for its result."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(20)
        assert not thread.is_alive()
        return found[0]

    return result


class Slow:
    """Pays when it is told to."""

    def __init__(self, here: Scene) -> None:
        self.begun, self.go_on, self._account = threading.Event(), threading.Event(), here.account

    def spend(self, promise: Guarantee, key: str, /) -> Debit:
        self.begun.set()
        assert self.go_on.wait(20)
        return self._account.spend(promise, key)


@contextmanager
def interrupted_at(number: int) -> Iterator[list[int]]:
    """Interrupt this thread at one line of the client, or of anyio's portal."""
    left = [number]

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if "nearveil/client" not in name and "from_thread" not in name:
            return None
        if event == "line":
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield left
    finally:
        sys.settrace(before)


def test_an_interrupt_at_any_line_ends_the_question_and_leaves_the_client_whole(made: Path) -> None:
    """Tried with a question that costs nothing."""
    with Client(made) as model:
        names = [one.name for one in model.galleries()]
    for number in range(1, 400):
        client = Client(made)
        left = [number]
        try:
            with interrupted_at(number) as left:
                client.galleries()
        except KeyboardInterrupt:
            pass
        assert [one.name for one in client.galleries()] == names, number
        client.close()
        if left[0] > 0:
            break
    assert 5 < number < 399


@pytest.mark.parametrize("moment", ["new_event_loop", "start"])
def test_an_interrupt_while_a_client_starts_does_not_hang(
    made: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    owner: Any = asyncio if moment == "new_event_loop" else threading.Thread
    begin = getattr(owner, moment)

    def late(*given: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():  # the loop starts threads of its own as it ends
            return begin(*given)
        if moment == "start":
            begin(*given)
        interrupt()
        time.sleep(0.2)
        return begin(*given)

    before = set(loops())
    with monkeypatch.context() as only:
        only.setattr(owner, moment, late)
        with pytest.raises(KeyboardInterrupt):
            Client(made)
    wait_for(lambda: set(loops()) <= before)
    with Client(made) as client:
        assert client.galleries()


def test_who_interrupts_again_and_again_waits_for_the_debit_and_is_told_the_key(here: Scene) -> None:
    slow = Slow(here)
    client, wire = here.client(account=slow)

    def impatient() -> None:
        slow.begun.wait(20)
        for _ in range(5):
            interrupt()
            time.sleep(0.05)
        slow.go_on.set()

    result = in_thread(impatient)
    with pytest.raises(KeyboardInterrupt) as raised:
        client.nearest(PRIVATE, epsilon=4.0, key="mine")
    result()
    assert raised.value.__notes__ == NOTE
    assert [entry.kind for entry in here.account.history()] == ["opened", "debit", "message"]
    assert wire.posts == []
    assert client.nearest(PRIVATE, epsilon=4.0, key="mine").repeated


def test_a_signal_that_raises_an_error_of_its_own_says_the_key_too(here: Scene) -> None:
    slow = Slow(here)
    client, _ = here.client(account=slow)

    def expire(*_: object) -> None:
        raise TimeoutError("enough")

    before = signal.signal(signal.SIGUSR1, expire)
    try:

        def send() -> None:
            slow.begun.wait(20)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            time.sleep(0.05)
            slow.go_on.set()

        result = in_thread(send)
        with pytest.raises(TimeoutError, match="enough") as raised:
            client.nearest(PRIVATE, epsilon=4.0, key="mine")
        result()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert raised.value.__notes__ == NOTE


def test_an_interrupt_does_not_wait_for_features(made: Path, tmp_path: Path) -> None:
    go_on = threading.Event()

    class Endless:
        fingerprint = name = "toy"
        dimension = 8

        def extract(self, pixels: Any) -> Any:
            interrupt()
            assert go_on.wait(20)
            return np.stack([PRIVATE for _ in pixels])

    with new_account(tmp_path / "budget.db") as account:
        client = Client(made, account=account, extractor=cast("Any", Endless()))
        try:
            with pytest.raises(KeyboardInterrupt):
                client.nearest(np.zeros((9, 9, 3), np.uint8), epsilon=4.0)
            assert not go_on.is_set()
        finally:
            go_on.set()
            client.close()
        assert account.balance().spent == 0.0


def test_a_payer_that_exits_ends_no_loop(here: Scene) -> None:
    class Exits:
        def spend(self, promise: Guarantee, key: str, /) -> Debit:
            del promise, key
            raise SystemExit(3)

    client, _ = here.client(account=Exits())
    with pytest.raises(SystemExit):
        client.nearest(PRIVATE, epsilon=4.0)
    assert in_thread(client.galleries)()[0].name == "birds"


@pytest.mark.parametrize("asked", [False, True])
def test_a_forked_process_drops_a_client_and_waits_for_nobody(made: Path, asked: bool) -> None:
    client = Client(made)
    if asked:
        client.galleries()
    child = os.fork()
    if not child:
        signal.alarm(15)
        code = 1
        try:
            client.galleries()
        except RuntimeError:
            code = 7
        del client
        gc.collect()
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert client.galleries()
    client.close()


def test_a_client_that_nobody_closes_ends_its_thread_and_closes_what_it_opened(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[object] = []
    close = LocalTransport.close

    async def closing(self: LocalTransport) -> None:
        await close(self)
        closed.append(self)

    monkeypatch.setattr(LocalTransport, "close", closing)
    before = set(loops())
    for _ in range(20):
        Client(made).galleries()  # who drops it last, this thread or that of the loop, is a matter of chance
    gc.collect()
    wait_for(lambda: set(loops()) <= before)
    assert len(closed) == 20


def test_a_collection_in_the_thread_of_the_loop_ends_the_client(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(loops())
    client = Client(made)
    client.galleries()
    client.itself = client  # type: ignore[attr-defined]
    place = weakref.ref(client)
    (thread,) = set(loops()) - before
    loop = find_loop(thread)
    gc.disable()
    try:
        del client
        loop.call_soon_threadsafe(gc.collect)
        wait_for(lambda: place() is None)
        wait_for(lambda: not thread.is_alive())
    finally:
        gc.enable()


def find_loop(thread: threading.Thread) -> asyncio.AbstractEventLoop:
    """Return the loop that runs in a thread."""
    every = (one for one in gc.get_objects() if isinstance(one, asyncio.BaseEventLoop))
    return next(one for one in every if getattr(one, "_thread_id", None) == thread.ident)


def test_closing_waits_for_questions_and_refuses_others(here: Scene) -> None:
    slow = Slow(here)
    client, _ = here.client(account=slow)
    asked = in_thread(lambda: client.nearest(PRIVATE, 3, epsilon=4.0))
    assert slow.begun.wait(20)
    closed = in_thread(client.close)
    wait_for(lambda: isinstance(in_thread(client.galleries)(), RuntimeError))
    slow.go_on.set()
    assert len(asked().matches) == 3
    assert closed() is None


def test_a_closed_client_says_so_and_closes_again(made: Path) -> None:
    before = set(loops())
    for asks in (False, True):
        client = Client(made)
        if asks:
            client.galleries()
        for _ in range(2):
            client.close()
            with pytest.raises(RuntimeError, match="the client is closed"):
                client.galleries()
        assert set(loops()) <= before


def test_many_threads_ask_one_client_and_one_of_them_closes_it(made: Path, tmp_path: Path) -> None:
    with new_account(tmp_path / "budget.db") as account:
        client = Client(made, account=account)
        results = [in_thread(lambda row=row: client.nearest(row, 3, 1.0)) for row in QUERIES[:8]]  # type: ignore[misc]
        assert all(len(one().matches) == 3 for one in results)
        late = [in_thread(client.galleries) for _ in range(8)]
        client.close()
        for one in late:
            found = one()
            assert isinstance(found, tuple) or "the client is closed" in str(found)


def test_the_thread_of_the_loop_cannot_wait_for_itself(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(made)
    send = LocalTransport.send

    async def asks_itself(self: LocalTransport, request: Request) -> Response:
        with pytest.raises(RuntimeError, match="thread"):
            client.galleries()
        return await send(self, request)

    monkeypatch.setattr(LocalTransport, "send", asks_itself)
    assert in_thread(client.galleries)()[0].name == "local"
    client.close()


def test_it_works_in_a_running_loop_and_with_the_context_of_who_asks(made: Path, tmp_path: Path) -> None:
    who: contextvars.ContextVar[str] = contextvars.ContextVar("who", default="nobody")
    seen: list[str] = []

    class Payer:
        def spend(self, promise: Guarantee, key: str, /) -> Debit:
            seen.append(who.get())
            return account.spend(promise, key)

    async def ask(client: Client) -> None:
        who.set("loop")
        client.nearest(PRIVATE, epsilon=4.0)
        await asyncio.to_thread(client.nearest, PRIVATE, epsilon=4.0)

    with new_account(tmp_path / "budget.db") as account, Client(made, account=Payer()) as client:
        asyncio.run(ask(client))
        client.nearest(PRIVATE, epsilon=4.0)
    assert seen == ["loop", "loop", "nobody"]


def test_an_error_does_not_keep_the_image(here: Scene) -> None:
    """No cycle holds it: it is gone with the error, not with some later collection."""

    class Image(np.ndarray[Any, Any]):
        pass

    client, _ = here.client()
    client.galleries()
    gc.disable()
    try:
        image = np.ones(5, np.float32).view(Image)
        place = weakref.ref(image)
        with pytest.raises(QuestionError) as raised:
            client.nearest(image, epsilon=4.0)
        del image, raised
        wait_for(lambda: place() is None)
    finally:
        gc.enable()


EXITS = """
import contextlib, os, sys, threading, time
import numpy as np
import nearveil.server.galleries
from nearveil import Client
from nearveil.ledger import Account
from nearveil.client.transport import LocalTransport

place, folder, *moments = sys.argv[1:]
for when in moments:  # each is a process that ends as a program does; they share what was imported
    if not os.fork():
        break
    print(when, os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
else:
    sys.exit()
ledger = f"{folder}/{when}.db"
begun = threading.Event()
client = Client(place, account="me", ledger=ledger)
client.galleries()
spend, send = Account.spend, LocalTransport.send
def slowly(*given):
    found = spend(*given)
    begun.set()
    time.sleep(0.3)
    return found
async def never(self, request):
    import asyncio
    if request.endpoint != "query":
        return await send(self, request)
    begun.set()
    await asyncio.sleep(1000)
if when == "debit":
    Account.spend = slowly
if when == "send":
    LocalTransport.send = never
if when != "idle":
    def ask():
        with contextlib.suppress(Exception):  # the program may end before, or after, it is told that there is no answer
            client.nearest(np.ones(8, np.float32), 3, epsilon=4.0, key="mine")
    threading.Thread(target=ask, daemon=True).start()
    begun.wait()
"""


def test_a_program_that_ends_waits_for_a_debit_alone(made: Path, tmp_path: Path) -> None:
    expected = {"idle": ["opened"], "debit": ["opened", "debit", "message"], "send": ["opened", "debit", "message"]}
    for when in expected:
        with new_account(tmp_path / f"{when}.db"):
            pass
    command = [sys.executable, "-W", "error", "-c", EXITS, str(made), str(tmp_path), *expected]
    ended = subprocess.run(command, capture_output=True, check=False, timeout=300, text=True)  # noqa: S603
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines() == [f"{when} 0" for when in expected]
    for when, kinds in expected.items():
        with Ledger(tmp_path / f"{when}.db", read_only=True) as ledger:
            assert [entry.kind for entry in ledger.account("me").history()] == kinds, when
