"""How much a client may ask for: how often, how much at once, how large, how slowly, and each key for one request."""

import asyncio
import hashlib
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import sqlalchemy as sa

from nearveil.service.server.errors import (
    BusyError,
    LengthError,
    RateError,
    ReplayedError,
    SlowError,
    TooLargeError,
    UnavailableError,
)
from nearveil.service.server.tokens import make_file, open_store, store_url
from nearveil.storage import create_tables, is_of_database

T = TypeVar("T")
STRANGERS = 60.0, 120, 4096  # refusals a minute of one address, at once after a pause, and addresses that are known
STRANGERS_WAIT = 1.0  # seconds that an address beyond that waits for each refusal
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class Buckets:
    """A bucket of requests for each token, filled at a steady rate.

    `rate`: Requests a minute; None is no limit.
    `burst`: What a bucket holds.
    `most`: Buckets that are kept; then the one that was used least recently is forgotten. All by default.
    `words`: What is said where a bucket is empty.

    Examples
    --------
    >>> now = [0.0]
    >>> buckets = Buckets(60, 2, clock=lambda: now[0])
    >>> buckets.take("ann"); buckets.take("ann")
    >>> buckets.take("ann")
    Traceback (most recent call last):
    nearveil.service.server.errors.RateError: this token asks too often: wait, and ask again
    >>> now[0] = 1.0
    >>> buckets.take("ann")
    """

    def __init__(
        self,
        rate: float | None,
        burst: int,
        *,
        most: int | None = None,
        words: str = "this token asks too often: wait, and ask again",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._second, self._burst, self._clock = None if rate is None else rate / 60, float(burst), clock
        self._most, self._words = most, words
        self._held: dict[str, tuple[float, float]] = {}  # in the order of their use, where that counts

    def take(self, token: str) -> None:
        """Take one request from a bucket, or raise RateError."""
        if self._second is None:
            return
        now = self._clock()
        held, then = self._held.get(token, (self._burst, now))
        held = min(self._burst, held + (now - then) * self._second)
        if self._most is not None:
            self._held.pop(token, None)
            if len(self._held) >= self._most:
                del self._held[next(iter(self._held))]
        if held < 1:
            self._held[token] = held, now
            raise RateError(self._words, max(1, math.ceil((1 - held) / self._second)))
        self._held[token] = held - 1, now


class UnderWay:
    """How many requests of each token are under way.

    `most`: For one token.

    Examples
    --------
    >>> under_way = UnderWay(1)
    >>> under_way.enter("ann"); under_way.enter("bob"); under_way.leave("ann"); under_way.enter("ann")
    >>> under_way.enter("bob")
    Traceback (most recent call last):
    nearveil.service.server.errors.RateError: too many requests of this token are under way: wait for an answer
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._counts: dict[str, int] = {}

    def enter(self, token: str) -> None:
        """Count a request, or raise RateError."""
        count = self._counts.get(token, 0)
        if count >= self._most:
            raise RateError("too many requests of this token are under way: wait for an answer", 1)
        self._counts[token] = count + 1

    def leave(self, token: str) -> None:
        """Count a request no more."""
        count = self._counts.pop(token) - 1
        if count:
            self._counts[token] = count


class Sending:
    """How many bytes of answers wait to be read by clients.

    `most`: For all together. An answer that is larger is sent where it is the only one.

    Examples
    --------
    >>> sending = Sending(100)
    >>> sending.hold(0, 70), sending.hold(70, 120), sending.hold(120, 0), sending.hold(0, 90)
    (70, 120, 0, 90)
    >>> sending.hold(0, 20)
    Traceback (most recent call last):
    nearveil.service.server.errors.BusyError: too many answers wait to be read by clients: ask again later
    """

    def __init__(self, most: int) -> None:
        self._most, self._held = most, 0

    def hold(self, before: int, now: int) -> int:
        """Let one request hold so many bytes in place of what it held before; BusyError where it may not."""
        others = self._held - before
        if now > before and others and others + now > self._most:
            raise BusyError("too many answers wait to be read by clients: ask again later")
        self._held = others + now
        return now


class _Job:
    """Some work, and who waits for it."""

    __slots__ = ("future", "is_taken", "loop", "may_begin", "work")

    def __init__(self, work: Callable[[], Any], may_begin: Callable[[], bool] | None) -> None:
        self.work, self.may_begin = work, may_begin
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()
        self.is_taken = False  # by a thread, or given up before one did

    def do(self) -> tuple[Any, BaseException | None]:
        """Return the result, or the error."""
        try:
            if self.may_begin is not None and not self.may_begin():
                raise SlowError("the client went away before its turn came")
            return self.work(), None
        except BaseException as error:  # whoever waits gets it
            return None, error

    def deliver(self, result: Any, error: BaseException | None) -> None:
        """Give the result to who waits, if somebody still does; on the event loop."""
        if self.future.done():
            return
        if error is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(error)


class Workers:
    """Threads for work that may wait for a disk or a database, and a bounded queue before them.

    The threads are daemons: one that never comes back does not keep the process from ending. Not those of
    `concurrent.futures`: their futures and asyncio's around them cost more than most of the work.

    `patience`: Seconds after which a request is given up. Its thread goes on, and counts until it is done.
    """

    def __init__(self, threads: int, queue: int, patience: float) -> None:
        self._threads, self._most, self._patience = threads, threads + queue, patience
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._pending = self._started = 0
        self._began: dict[int, float] = {}  # when each busy thread began its work

    @property
    def pending(self) -> int:
        """How many jobs are under way or wait."""
        return self._pending

    def is_stuck(self) -> bool:
        """Return whether every thread has been busy with one job for longer than a request waits."""
        with self._lock:
            late = time.monotonic() - self._patience
            return len(self._began) == self._threads and all(began < late for began in self._began.values())

    async def run(
        self, work: Callable[[], T], *, patience: float | None = None, may_begin: Callable[[], bool] | None = None
    ) -> T:
        """Do some work in a thread.

        `patience`: Seconds, if not those of all work.
        `may_begin`: Asked in the thread before the work begins.
        Raises BusyError: If too much waits already, or the work takes too long.
        Raises SlowError: If it may not begin any more.
        """
        with self._lock:
            if self._pending >= self._most:
                raise BusyError("too much is asked of this server at once: ask again later")
            self._pending += 1
            begins = self._started < min(self._pending, self._threads)
            self._started += begins
        job = _Job(work, may_begin)
        self._jobs.put(job)
        if begins:
            threading.Thread(target=self._work, name="nearveil-work", daemon=True).start()
        try:
            async with asyncio.timeout(self._patience if patience is None else patience):
                result: T = await job.future
                return result
        except TimeoutError:
            raise BusyError("it took too long: ask again later") from None
        finally:
            self._give_up(job)

    def close(self) -> None:
        """Let no more work begin."""
        with suppress(Empty):
            while job := self._jobs.get_nowait():
                self._give_up(job)
                job.loop.call_soon_threadsafe(job.future.cancel)
        for _ in range(self._threads):
            self._jobs.put(None)

    def _give_up(self, job: _Job) -> None:
        """Let a job not begin, if no thread has taken it."""
        with self._lock:
            if not job.is_taken:
                job.is_taken = True
                self._pending -= 1

    def _work(self) -> None:
        while job := self._jobs.get():
            self._do(job)
            del job  # with what it gave: the next may be long in coming

    def _do(self, job: _Job) -> None:
        thread = threading.get_ident()
        with self._lock:
            if job.is_taken:
                return
            job.is_taken = True
            self._began[thread] = time.monotonic()
        result, error = job.do()
        with self._lock:
            del self._began[thread]
            self._pending -= 1
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            job.loop.call_soon_threadsafe(job.deliver, result, error)


async def read_body(length: bytes | None, chunked: bool, receive: Receive, most: int, seconds: float) -> bytes:
    """Return the body of a request, if it is small enough and comes in time.

    `length`: What the header says.
    `chunked`: Whether the length comes with the parts.
    `receive`: As ASGI has it.
    `most`: Bytes.
    `seconds`: For all of it.
    """
    if length is None and not chunked:
        raise LengthError("the request must say how long its body is")
    if length is not None and (len(length) > 18 or not length.isdigit() or int(length) > most):
        raise TooLargeError(f"the body must be at most {most} bytes")
    parts: list[bytes] = []
    held = 0
    try:
        async with asyncio.timeout(seconds):
            more = True
            while more:
                message = await receive()
                if message["type"] != "http.request":
                    raise SlowError("the client went away before its request was complete")
                parts.append(message.get("body", b""))
                held += len(parts[-1])
                more = message.get("more_body", False)
                if held > most:
                    raise TooLargeError(f"the body must be at most {most} bytes")
    except TimeoutError:
        raise SlowError("the body did not come in time") from None
    return b"".join(parts)


_MOST = 1 << 16  # keys that one process remembers: at 1,000 requests a second the last minute's
_KEPT = 86_400.0  # seconds that a table remembers them

# One statement for all that came together.
_NOTE = (
    "INSERT INTO nearveil_replay (key, what, time) VALUES {} "
    "ON CONFLICT (key) DO UPDATE SET time = nearveil_replay.time RETURNING key, what"
)
_SOME = 500  # keys in one statement

_metadata = sa.MetaData()
_replays = sa.Table(
    "nearveil_replay",
    _metadata,
    sa.Column("key", sa.LargeBinary(32), primary_key=True),
    sa.Column("what", sa.LargeBinary(32), nullable=False),
    sa.Column("time", sa.BigInteger, nullable=False, index=True),
)


@dataclass(frozen=True)
class Use:
    """A key and what it was used for, as digests: nothing of a message is kept."""

    key: bytes
    what: bytes

    @classmethod
    def of(cls, key: str, token: str, place: str, data: bytes) -> "Use":
        """Return the use of a key by a token for some bytes."""
        what = hashlib.sha256(f"{token} {place} ".encode() + data).digest()
        return cls(hashlib.sha256(key.encode()).digest(), what)


class ReplayStore:
    """The table that all processes of a service share. It lies beside the tokens. Any thread may use it.

    `where`: As of tokens: a file, or a PostgreSQL URL.
    """

    def __init__(self, where: str, timeout: float) -> None:
        url = store_url(where)
        if url.get_backend_name() == "sqlite":
            # In a file of its own: who looks for changed tokens need not look at every request.
            url = url.set(database=f"{url.database}.replays")
            make_file(Path(str(url.database)))
        self._database = open_store(url, timeout, durable=False)
        with self._database.begin_write() as connection:
            create_tables(connection, _metadata)
        self._row = "(?, ?, ?)" if self._database.is_sqlite else "(%s, %s, %s)"
        self._lock = threading.Lock()
        self._pruned = time.monotonic()

    def use(self, uses: Sequence[Use]) -> list[bytes]:
        """Note uses of keys that are new, and return what each key was first used for."""
        # A key once, the first that came; by rising keys, so that no two processes wait for each other.
        first = sorted({use.key: use.what for use in reversed(uses)}.items())
        found: dict[bytes, bytes] = {}
        now = int(time.time())
        try:
            with self._lock:
                for start in range(0, len(first), _SOME):
                    some = first[start : start + _SOME]
                    note = _NOTE.format(", ".join([self._row] * len(some)))
                    values = tuple(value for use in some for value in (*use, now))
                    rows = self._database.run_direct(partial(_fetch, statement=note, values=values))
                    found.update((bytes(key), bytes(what)) for key, what in rows)
                if time.monotonic() - self._pruned > _KEPT / 24:
                    self._pruned = time.monotonic()
                    with self._database.begin_write() as connection:
                        connection.execute(sa.delete(_replays).where(_replays.c.time < now - _KEPT))
        except Exception as error:
            if not is_of_database(error):
                raise
            raise UnavailableError("keys cannot be checked now: ask again later") from None
        return [found[use.key] for use in uses]

    def close(self) -> None:
        """Close all connections, unless one of them is waited for: it ends with the process."""
        if self._lock.acquire(timeout=0.1):
            self._database.close()
            self._lock.release()


def _fetch(connection: Any, statement: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Return the rows of a statement, whichever driver it is."""
    rows: list[tuple[Any, ...]] = connection.execute(statement, values).fetchall()
    return rows


class Look:
    """A look at one database, by a thread of its own, and the keys of questions that wait for it.

    `work`: The look.
    `patience`: Seconds after which who waits for it is told to ask later.
    `believed`: Seconds, from its beginning, that a look is good for requests that come later.
    `store`: Where keys are noted, in the same thread: a question waits for both, but for one thread only.
    """

    def __init__(
        self, work: Callable[[], None], patience: float, believed: float = 0.0, store: ReplayStore | None = None
    ) -> None:
        self.workers = Workers(1, 1, patience)
        self._work, self._believed, self._store = work, believed, store
        self._began = -math.inf  # of the last look that succeeded
        self._looking: asyncio.Task[None] | None = None
        self._noting: list[tuple[Use, asyncio.Future[bytes]]] = []

    async def take(self, came: float | None = None) -> None:
        """Return when a look is good that began after a request came (now by default), or not long before it."""
        earliest = (time.monotonic() if came is None else came) - self._believed
        while self._began < earliest:
            await asyncio.shield(self._begin())

    async def note(self, use: Use) -> bytes:
        """Return what a key was first used for; a look that began after this was called is good by then."""
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._noting.append((use, future))
        self._begin()
        return await future

    def _begin(self) -> "asyncio.Task[None]":
        """Return the look that is under way; begin one if there is none."""
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
            self._looking.add_done_callback(_retrieve)
        return self._looking

    async def _look(self) -> None:
        began = time.monotonic()
        together, self._noting = self._noting, []
        try:
            found = await self.workers.run(partial(self._do, [use for use, _ in together]))
            self._began = began
            for (_, future), first in zip(together, found, strict=True):
                if not future.done():
                    future.set_result(first)
        except Exception as error:
            for _, future in together:
                if not future.done():
                    future.set_exception(error)
            raise
        finally:
            self._looking = None
            if self._noting:  # they came while this one was under way
                self._begin()

    def _do(self, uses: list[Use]) -> list[bytes]:
        self._work()
        return self._store.use(uses) if uses and self._store is not None else []


def _retrieve(task: "asyncio.Task[None]") -> None:
    """Take an error from a task: those who wait for it get it, and where all of them have gone nobody needs it."""
    if not task.cancelled():
        task.exception()


class Replays:
    """Lets a key pass that is new, or comes again with the same bytes from the same token for the same gallery.

    `is_shared`: Whether several processes answer; then a key that this one has not seen is noted by a look.
    `most`: Keys that this process remembers.

    Examples
    --------
    >>> async def ask(data):
    ...     await replays.check("a-random-key", "ann", "birds/query", data, Look(lambda: None, 10.0))
    >>> replays = Replays()
    >>> asyncio.run(ask(b"message"))
    >>> asyncio.run(ask(b"message"))
    >>> asyncio.run(ask(b"another"))
    Traceback (most recent call last):
    nearveil.service.server.errors.ReplayedError: this key was used before, for another request: take a new key
    """

    def __init__(self, *, is_shared: bool = False, most: int = _MOST) -> None:
        self._is_shared, self._most = is_shared, most
        self._seen: OrderedDict[bytes, bytes] = OrderedDict()

    async def check(self, key: str, token: str, place: str, data: bytes, look: Look) -> None:
        """Raise ReplayedError where a key was used for something else."""
        use = Use.of(key, token, place, data)
        first = self._seen.get(use.key)
        if first is None and self._is_shared:
            first = await look.note(use)
        if self._seen.setdefault(use.key, first or use.what) != use.what:
            raise ReplayedError("this key was used before, for another request: take a new key")
        self._seen.move_to_end(use.key)
        if len(self._seen) > self._most:
            self._seen.popitem(last=False)
