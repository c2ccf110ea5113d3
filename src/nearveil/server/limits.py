"""How much a client may ask for: how often, how much at once, how large, how slowly, and each key for one request."""

import asyncio
import fcntl
import hashlib
import logging
import math
import mmap
import os
import tempfile
import threading
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from multiprocessing import reduction
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

import sqlalchemy as sa

from nearveil.server.errors import (
    BusyError,
    LengthError,
    RateError,
    ReplayedError,
    SlowError,
    TooLargeError,
    UnavailableError,
)
from nearveil.server.tokens import open_store, store_url
from nearveil.storage import create_tables, is_of_database

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
# A pass over 16 MiB of codes takes 2.3 ms of a processor, and a list of galleries 0.5 ms.
BYTES_PER_REQUEST = 16 << 20  # of a pass, a body or an answer, that count as one more request
STRANGERS = 60.0, 120, 4096  # refusals a minute of one address, at once after a pause, and addresses that are known
STRANGERS_WAIT = 1.0  # seconds that an address beyond that waits for each refusal
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class Buckets:
    """A bucket of `burst` requests for each token, filled at `rate` requests a minute; None is no limit.

    Beyond `most` buckets, the one that was used least recently is forgotten.

    Examples
    --------
    >>> now = [0.0]
    >>> buckets = Buckets(60, 2, clock=lambda: now[0])
    >>> buckets.take("ann"); buckets.take("ann")
    >>> buckets.take("ann")
    Traceback (most recent call last):
    nearveil.server.errors.RateError: this token asks too often: wait, and ask again
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
        level, now = self._fill(token)
        if level < 1:
            self._held[token] = level, now
            raise RateError(self._words, max(1, math.ceil((1 - level) / self._second)))
        self._held[token] = level - 1, now

    def charge(self, token: str, n_bytes: int) -> None:
        """Take the cost of a large request, below zero if need be: later requests wait until the bucket has one again.

        An admitted request is not refused for its cost: its message may be paid for.
        """
        if self._second is not None:
            level, now = self._fill(token)
            self._held[token] = level - n_bytes / BYTES_PER_REQUEST, now

    def _fill(self, token: str) -> tuple[float, float]:
        """Return the level of a bucket and the time, as the most recently used one."""
        assert self._second is not None
        now = self._clock()
        level, filled = self._held.get(token, (self._burst, now))
        if self._most is not None:
            self._held.pop(token, None)
            if len(self._held) >= self._most:
                del self._held[next(iter(self._held))]
        return min(self._burst, level + (now - filled) * self._second), now


class UnderWay:
    """Counts the requests of each token that are under way, at most `most` for one token.

    Examples
    --------
    >>> under_way = UnderWay(1)
    >>> under_way.enter("ann"); under_way.enter("bob"); under_way.leave("ann"); under_way.enter("ann")
    >>> under_way.enter("bob")
    Traceback (most recent call last):
    nearveil.server.errors.RateError: too many requests of this token are under way: wait for an answer
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


class ByteBudget:
    """Limits the bytes that all requests of a process hold together, and those of each token to half of that.

    A token that holds nothing may have one request of any size unless two others hold something: so one token alone
    never keeps the others out, and all hold at most `limit` bytes or two requests of the largest size.

    Examples
    --------
    >>> budget = ByteBudget(100, "too many bytes are in flight: ask again later")
    >>> budget.resize("ann", 0, 70), budget.resize("bob", 0, 40), budget.resize("ann", 70, 0)
    (70, 40, 0)
    >>> budget.resize("bob", 0, 20)
    Traceback (most recent call last):
    nearveil.server.errors.BusyError: too many bytes are in flight: ask again later
    """

    def __init__(self, limit: int, message: str) -> None:
        self._limit, self._message = limit, message
        self._bytes: dict[str, int] = {}  # by token

    @property
    def used(self) -> int:
        """Bytes that are in use."""
        return sum(self._bytes.values())

    def resize(self, token: str, old: int, new: int) -> int:
        """Let a request of a token hold `new` bytes instead of `old`, and return `new`; BusyError if it is too much."""
        rest = self._bytes.get(token, 0) - old  # of the token's other requests
        if new > old:
            total, n_others = self.used - old + new, len(self._bytes.keys() - {token})
            exceeds = total > self._limit and (rest > 0 or n_others > 1)
            if exceeds or (rest and rest + new > self._limit // 2):
                raise BusyError(self._message)
        self._bytes[token] = rest + new
        if not self._bytes[token]:
            del self._bytes[token]
        return new


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
    `concurrent.futures`: their futures and asyncio's around them cost more than most of the work. After `patience`
    seconds a request is given up; its thread goes on, and counts until it is done.
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
        """Do some work in a thread, if `may_begin`, asked in the thread, allows it: otherwise SlowError.

        BusyError if too much waits already, or the work takes more than `patience` seconds.
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
                del job.work  # the queue keeps the job, and must not keep a body with it

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


def check_length(length: bytes | None, chunked: bool, lengths: range | frozenset[int]) -> int:
    """Return the most bytes that a body will have, from its headers; `lengths` are those that are accepted."""
    if length is None:
        if chunked and isinstance(lengths, range):
            return lengths[-1]
        raise LengthError("The request must have the header Content-Length.")
    if len(length) > 18 or not length.isdigit() or int(length) not in lengths:
        if isinstance(lengths, range):
            raise TooLargeError(f"the body must be at most {lengths[-1]} bytes")
        words = " or ".join(map(str, sorted(lengths)))
        raise TooLargeError(f"A sealed question must have {words} bytes. Fetch the layout again: it may have changed.")
    return int(length)


async def read_body(receive: Receive, limit: int, seconds: float) -> bytearray:
    """Return a body of at most `limit` bytes, if all of it comes within `seconds`."""
    body, more = bytearray(), True  # not a list of parts: parts of two bytes would take twenty times as much
    try:
        async with asyncio.timeout(seconds):
            while more:
                message = await receive()
                if message["type"] != "http.request":
                    raise SlowError("the client went away before its request was complete")
                body += message.get("body", b"")
                more = message.get("more_body", False)
                if len(body) > limit:
                    raise TooLargeError(f"the body must be at most {limit} bytes")
    except TimeoutError:
        raise SlowError("the body did not come in time") from None
    return body


_KEPT = 86_400.0  # seconds that PostgreSQL remembers keys

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


class Use(NamedTuple):
    """A key and what it was used for, as digests: nothing of a message is kept."""

    key: bytes
    what: bytes

    @classmethod
    def of(cls, key: str, token: str, place: str, data: bytes) -> "Use":
        """Return the use of a key by a token for some bytes. Of megabytes, this is work for a thread."""
        what = hashlib.sha256(f"{token} {place} ".encode())
        what.update(data)
        return cls(hashlib.sha256(key.encode()).digest(), what.digest())


class ReplayStore:
    """The table in PostgreSQL that all hosts of a service share. Any thread may use it."""

    def __init__(self, where: str, timeout: float) -> None:
        self._database = open_store(store_url(where), timeout)
        with self._database.begin_write() as connection:
            create_tables(connection, _metadata)
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
                    note = _NOTE.format(", ".join(["(%s, %s, %s)"] * len(some)))
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
    """Return the rows of a statement of psycopg."""
    rows: list[tuple[Any, ...]] = connection.execute(statement, values).fetchall()
    return rows


class Refresher:
    """Looks at one database in a thread of its own, and notes there the keys of questions that wait for it.

    A question waits for both, but for one thread only. A look is good for requests that come up to `believed` seconds
    after its beginning. `is_current` says without waiting whether a look would find nothing new: a thread takes ten
    times as long as most looks. The log gets one line when `name` goes down, and one when it is up again.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], None],
        patience: float,
        believed: float = 0.0,
        store: ReplayStore | None = None,
        is_current: Callable[[], bool] | None = None,
    ) -> None:
        self.workers = Workers(1, 1, patience)
        self._name, self._is_up = name, True
        self._work, self._believed, self._store, self._is_current = work, believed, store, is_current
        self._began = -math.inf  # of the last look that succeeded
        self._looking: asyncio.Task[None] | None = None
        self._noting: list[tuple[Use, asyncio.Future[bytes]]] = []

    async def wait(self, came: float | None = None) -> None:
        """Return when a look is good that began after a request came (now by default), or not long before it."""
        if not (self._is_up and self._is_current is not None and self._is_current()):
            await self.look((time.monotonic() if came is None else came) - self._believed)

    async def look(self, earliest: float) -> None:
        """Return when a look has succeeded that did not begin before `earliest`."""
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
            if not self._is_up:
                self._is_up = True
                _LOG.warning("%s is up again", self._name)
            for (_, future), first in zip(together, found, strict=True):
                if not future.done():
                    future.set_result(first)
        except Exception as error:
            if self._is_up:
                self._is_up = False
                _LOG.error("%s is down (%s): retrying", self._name, type(error).__name__)  # its text may be private
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


# Places for keys: with the last 65,536 a row is a quarter full. The oldest of these is forgotten if 32 others came into
# its row: with probability P(Poisson(8) >= 32) = 1.3e-10, and any at all with less than 4e-7.
_ROWS, _WAYS = 1 << 13, 32
_SECRET = 32  # bytes
_DIGEST = 32  # bytes
_USE = 2 * _DIGEST
_TRIES, _PAUSE = 100, 0.001  # to lock a row at once, some microseconds each; and seconds between two after that


class UsedKeys:
    """Lets a key pass that is new, or comes again with the same bytes from the same token for the same gallery.

    The last keys lie in memory that all processes of a server share. It is no file: no disk is waited for. A digest
    with a secret says which of the `rows`, of `ways` keys each, a key is in, so that nobody can find keys that fill the
    row of another; a row has its newest use first. Who changes a row holds its lock, which the system takes away from a
    process that dies. One event loop of a process uses it.

    Examples
    --------
    >>> keys = UsedKeys()
    >>> asyncio.run(keys.check(Use.of("a-random-key", "ann", "birds/query", b"message")))
    >>> asyncio.run(keys.check(Use.of("a-random-key", "ann", "birds/query", b"message")))
    >>> asyncio.run(keys.check(Use.of("a-random-key", "ann", "birds/query", b"another")))
    Traceback (most recent call last):
    nearveil.server.errors.ReplayedError: this key was used before, for another request: take a new key
    """

    def __init__(
        self,
        rows: int = _ROWS,
        ways: int = _WAYS,
        patience: float = 5.0,
        shared: tuple[int, bytes] | None = None,  # the memory of another process, and its secret
    ) -> None:
        self._rows, self._row, self._patience = rows, ways * _USE, patience
        if shared is None:
            shared = _open_memory(), os.urandom(_SECRET)
            os.truncate(shared[0], rows * self._row)
        file, self._secret = shared
        self._file, self._memory = file, mmap.mmap(file, rows * self._row)
        weakref.finalize(self, os.close, file)

    def __reduce__(self) -> tuple[Any, ...]:
        """Give the same memory to a process that is being started."""
        file = reduction.DupFd(self._file)
        return _share_keys, (self._rows, self._row // _USE, self._patience, file, self._secret)

    async def check(self, use: Use, look: "Refresher | None" = None) -> None:
        """Raise ReplayedError where a key was used for something else: here or, by `look`, on any host."""
        first = use
        if look is not None:
            first = Use(use.key, await self._find(use.key) or await look.note(use))
        if await self._note(first) != use.what:
            raise ReplayedError("this key was used before, for another request: take a new key")

    async def _find(self, key: bytes) -> bytes | None:
        """Return what a key was first used for, if it is known."""
        async with self._locked(key) as start:
            found = self._memory.find(key, start, start + self._row)
            return None if found < 0 else self._memory[found + _DIGEST : found + _USE]

    async def _note(self, use: Use) -> bytes:
        """Return what a key was first used for, which is now its row's newest."""
        memory = self._memory
        async with self._locked(use.key) as start:
            found, what = memory.find(use.key, start, start + self._row), use.what
            if found < 0:
                found = start + self._row - _USE  # the oldest, which is forgotten
            else:
                what = memory[found + _DIGEST : found + _USE]
            memory[start : found + _USE] = use.key + what + memory[start:found]
            return what

    @asynccontextmanager
    async def _locked(self, key: bytes) -> AsyncIterator[int]:
        """Lock the row of a key; give where it starts. Others hold it for microseconds, unless they were stopped."""
        digest = hashlib.blake2b(key, digest_size=8, key=self._secret).digest()
        start = int.from_bytes(digest, "big") % self._rows * self._row
        until = time.monotonic() + self._patience
        tries = 0
        while not self._try_lock(start):
            if time.monotonic() > until:
                raise UnavailableError("keys cannot be checked now: ask again later")
            tries += 1
            if tries > _TRIES:
                await asyncio.sleep(_PAUSE)
        try:
            yield start
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, start)

    def _try_lock(self, start: int) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, start)
        except OSError:
            return False
        return True


def _open_memory() -> int:
    """Return a file that lies in memory, or one without a name where the system has none such."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("nearveil-keys")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _share_keys(rows: int, ways: int, patience: float, file: Any, secret: bytes) -> UsedKeys:
    return UsedKeys(rows, ways, patience, (file.detach(), secret))
