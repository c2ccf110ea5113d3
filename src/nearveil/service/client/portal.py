"""An event loop in a thread of its own, for programs that wait.

The portal of anyio is not used: an interrupt while it starts hangs, and a finalizer cannot end it from its own thread.
"""

import asyncio
import contextlib
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class _Answer(Future[T], Generic[T]):
    """What a coroutine returns or raises. An interrupt of who waits for `arrived` leaves no lock behind."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived: SimpleQueue[None] = SimpleQueue()
        arrived = self.arrived
        self.add_done_callback(lambda _: arrived.put(None))


class Portal:
    """Runs coroutines on an event loop in a thread, which the first one starts. Any thread may use it.

    `last`: What the loop runs before it ends.
    """

    def __init__(self, last: Callable[[], Awaitable[None]]) -> None:
        self._last, self._process = last, os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()  # of threads that would serve: no interrupt comes to them
        self._stopped, self._ended = asyncio.Event(), Future[None]()
        self._asked: dict[_Answer[Any], asyncio.Task[None] | None] = {}

    def run(self, ask: Callable[[], Awaitable[T]], note: str = "") -> T:
        """Run a coroutine on the loop, and wait for it. An interrupt cancels it, and waits until it has ended.

        `note`: Goes with an interrupt.
        """
        if not self._is_here():
            raise RuntimeError("a client belongs to the process that made it: make another one here")
        loop, answer = self._start(), _Answer[T]()
        try:
            self._asked[answer] = None
            try:
                loop.call_soon_threadsafe(self._begin, answer, ask)
            except RuntimeError:  # the loop has ended
                answer.cancel()
            answer.arrived.get()
        except BaseException as interrupt:
            if note:
                interrupt.add_note(note)
            self._cancel(loop, answer)
            raise
        try:
            if answer.cancelled():
                raise RuntimeError("the client is closed: make another one")
            return answer.result()
        finally:
            del answer  # the error holds this frame: it would hold itself, and the question, until a collection

    def stop(self) -> None:
        """Let the loop end when its coroutines have ended. Nobody is waited for: a finalizer may run anywhere."""
        if self._loop is None:
            self._stopped.set()
        elif self._is_here():
            with contextlib.suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self._stopped.set)

    def close(self) -> None:
        """End the loop, and wait for it."""
        if self._is_here():
            self._start()
            self.stop()
            self._thread.join()
            self._ended.result()

    def _is_here(self) -> bool:
        return os.getpid() == self._process

    def _start(self) -> asyncio.AbstractEventLoop:
        """Return the loop. If an interrupt comes, the thread that was started, or another one, serves the next time."""
        if self._loop is None:
            started: SimpleQueue[OSError | None] = SimpleQueue()
            threading.Thread(target=self._serve, args=(started,), name="nearveil", daemon=True).start()
            if (error := started.get()) is not None:
                raise error
        assert self._loop is not None
        if asyncio._get_running_loop() is self._loop:
            raise RuntimeError("a client cannot wait for itself: this is the thread that would answer")
        return self._loop

    def _cancel(self, loop: asyncio.AbstractEventLoop, answer: _Answer[Any]) -> None:
        """Cancel a coroutine and wait for its end, however often that is interrupted: it may be paying."""

        def cancel() -> None:
            if (task := self._asked.get(answer)) is not None:
                task.cancel()
            else:  # it has ended, or never began
                self._asked.pop(answer, None)
                answer.cancel()

        while not (answer.done() or self._ended.done()):
            with contextlib.suppress(KeyboardInterrupt, RuntimeError):
                loop.call_soon_threadsafe(cancel)
                answer.arrived.get()

    def _serve(self, started: "SimpleQueue[OSError | None]") -> None:
        """Be the thread of the loop, unless there is one."""
        error: OSError | None = None
        with self._lock:
            is_served = self._loop is not None
            if not is_served:
                self._thread = threading.current_thread()
                try:
                    self._loop = asyncio.new_event_loop()
                except OSError as failed:  # no more files can be opened
                    error = failed
        started.put(error)
        loop = self._loop
        if is_served or loop is None:
            return
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(self._wait_for_end())
        except BaseException as failed:
            self._ended.set_exception(failed)
        else:
            self._ended.set_result(None)
        for answer in list(self._asked):  # too late
            answer.cancel()

    async def _wait_for_end(self) -> None:
        await self._stopped.wait()
        while tasks := [task for task in list(self._asked.values()) if task]:  # others ask meanwhile
            await asyncio.wait(tasks)
        await self._last()

    def _begin(self, answer: _Answer[T], ask: Callable[[], Awaitable[T]]) -> None:
        def end(_: "asyncio.Task[None]") -> None:
            self._asked.pop(answer, None)
            answer.cancel()  # one that was cancelled before it began; the others are done

        if self._stopped.is_set():
            answer.cancel()
        else:
            self._asked[answer] = task = asyncio.get_running_loop().create_task(_run(answer, ask))
            task.add_done_callback(end)


async def _run(answer: _Answer[T], ask: Callable[[], Awaitable[T]]) -> None:
    """Run a coroutine; its error goes to who asked, and never ends the loop."""
    try:
        answer.set_result(await ask())
    except BaseException as error:
        answer.set_exception(error)
    finally:
        del answer  # as above
