"""Run blocking work in threads, and poll a database without asking it for every request."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from nearveil.server.errors import ServiceError
from nearveil.storage import name_error

T = TypeVar("T")
POLL_TIMEOUT = 2.0  # seconds that a store has to show that it can be read
_NAME = "nearveil-work"  # of threads
_LOG = logging.getLogger(__name__)


class Workers:
    """Run blocking functions in at most `threads` threads, with at most `queue` more calls waiting."""

    # Each call has a daemon thread, so a disk that never answers does not keep the process from ending: threads of
    # anyio and `concurrent.futures` are joined at exit. A call that times out still counts until its thread ends.

    def __init__(self, threads: int, queue: int, timeout: float) -> None:
        self._threads, self._max_pending, self._timeout = threads, threads + queue, timeout
        self._free = asyncio.Semaphore(threads)
        self._started_at: dict[asyncio.Future[Any], float] = {}
        self.pending = 0  # calls that run or wait

    def is_stuck(self) -> bool:
        """Return whether every thread has been busy with one call for longer than the timeout."""
        overdue = time.monotonic() - self._timeout
        return len(self._started_at) == self._threads and all(start < overdue for start in self._started_at.values())

    async def run(
        self, work: Callable[[], T], *, timeout: float | None = None, is_canceled: Callable[[], bool] = lambda: False
    ) -> T:
        """Run `work` in a thread; ServiceError if too many calls wait, on a timeout, or if `is_canceled` by then."""
        if self.pending >= self._max_pending:
            raise ServiceError("busy", "The server is busy. Try again later.")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self.pending += 1
        try:
            async with asyncio.timeout(self._timeout if timeout is None else timeout):
                await self._free.acquire()
                self._started_at[future] = time.monotonic()
                if is_canceled():
                    error = ServiceError("timeout", "The client disconnected before its request was processed.")
                    self._end(future, future.set_exception, error)
                else:
                    threading.Thread(target=self._call, args=(work, future, loop), name=_NAME, daemon=True).start()
                return await future
        except TimeoutError:
            raise ServiceError("busy", "The request took too long. Try again later.") from None
        finally:
            if future not in self._started_at and not future.done():  # no thread was free
                self.pending -= 1

    def _call(self, work: Callable[[], Any], future: asyncio.Future[Any], loop: asyncio.AbstractEventLoop) -> None:
        try:
            deliver, result = future.set_result, work()
        except BaseException as error:
            deliver, result = future.set_exception, error
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self._end, future, deliver, result)

    def _end(self, future: asyncio.Future[Any], deliver: Callable[[Any], object], result: Any) -> None:
        """Free the thread of a call, and deliver its result unless it timed out."""
        del self._started_at[future]
        self._free.release()
        self.pending -= 1
        if not future.done():
            deliver(result)


class OutageLog:
    """Log one line when `name` goes down, and one when it is up again."""

    def __init__(self, name: str) -> None:
        self._name, self.is_up = name, True

    def record(self, error: Exception | None) -> None:
        """Record a success (None) or a failure."""
        was_up, self.is_up = self.is_up, error is None
        if error is None and not was_up:
            _LOG.warning("%s is up again", self._name)
        elif error is not None and was_up:
            _LOG.error("%s is down (%s): retrying", self._name, name_error(error))


class Poller:
    """Run `refresh` in another thread; the log gets a line when `name` goes down or up."""

    def __init__(self, name: str, refresh: Callable[[], object], timeout: float) -> None:
        self.workers, self.outages = Workers(1, 1, timeout), OutageLog(name)
        self._refresh = refresh

    async def poll(self) -> None:
        """Return when a run succeeded."""
        try:
            await self.workers.run(self._refresh, timeout=POLL_TIMEOUT)
        except Exception as error:
            self.outages.record(error)
            raise
        self.outages.record(None)
