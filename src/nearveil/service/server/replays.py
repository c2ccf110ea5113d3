"""Keys of requests that were used before: in a table that all processes share, or in memory where there is one."""

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa

from nearveil.service.server.errors import ReplayedError, ServiceError, UnavailableError
from nearveil.service.server.limits import Workers
from nearveil.service.server.tokens import make_file, open_store, store_url
from nearveil.storage import create_tables, describe_url

_MOST = 1 << 16  # keys that one process remembers: at 1,000 requests a second the last minute's
_KEPT = 86_400.0  # seconds that a table remembers them

# One statement, as text: with every question asked, SQLAlchemy's own would cost more than the database.
_NOTE = (
    "INSERT INTO nearveil_replay (key, what, time) VALUES ({0}, {0}, {0}) "
    "ON CONFLICT (key) DO UPDATE SET time = nearveil_replay.time RETURNING what"
)

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
    """The table that all processes of a service share. It lies beside the tokens.

    `where`: As of tokens: a file, or a PostgreSQL URL.
    """

    def __init__(self, where: str, timeout: float) -> None:
        url = store_url(where)
        if url.get_backend_name() == "sqlite":
            # In a file of its own: who looks for changed tokens need not look at every request.
            url = url.set(database=f"{url.database}.replays")
            make_file(Path(str(url.database)))
        self._where = describe_url(url)
        self._database = open_store(url, timeout, durable=False)
        with self._database.begin_write() as connection:
            create_tables(connection, _metadata)
        self._note = _NOTE.format("?" if self._database.is_sqlite else "%s")
        self._pruned = time.monotonic()

    def use(self, uses: Sequence[Use]) -> list[bytes]:
        """Note uses of keys that are new, and return what each key was first used for."""
        try:
            with self._database.begin_write() as connection:
                now, ask = int(time.time()), connection.exec_driver_sql
                found = {  # by rising keys, so that no two processes wait for each other
                    use.key: bytes(ask(self._note, (use.key, use.what, now)).scalar_one())
                    for use in sorted(uses, key=lambda use: use.key)
                }
                if time.monotonic() - self._pruned > _KEPT / 24:
                    self._pruned = time.monotonic()
                    connection.execute(sa.delete(_replays).where(_replays.c.time < now - _KEPT))
        except sa.exc.SQLAlchemyError:
            raise UnavailableError("keys cannot be checked now: ask again later") from None
        return [found[use.key] for use in uses]

    def close(self) -> None:
        """Close all connections."""
        self._database.close()


class Replays:
    """Lets a key pass that is new, or comes again with the same bytes from the same token for the same gallery.

    `store`: Where several processes answer; then what one of them has not seen is looked up there. Requests that
    come together are looked up together.
    `workers`: Threads that ask the store.
    `most`: Keys that this process remembers.

    Examples
    --------
    >>> async def ask(data):
    ...     await replays.check("a-random-key", "ann", "birds/query", data)
    >>> replays = Replays()
    >>> asyncio.run(ask(b"message"))
    >>> asyncio.run(ask(b"message"))
    >>> asyncio.run(ask(b"another"))
    Traceback (most recent call last):
    nearveil.service.server.errors.ReplayedError: this key was used before, for another request: take a new key
    """

    def __init__(self, store: ReplayStore | None = None, workers: Workers | None = None, most: int = _MOST) -> None:
        self._store, self._workers, self._most = store, workers, most
        self._seen: OrderedDict[bytes, bytes] = OrderedDict()
        self._waiting: list[tuple[Use, asyncio.Future[bytes]]] = []
        self._asking: asyncio.Task[None] | None = None

    async def check(self, key: str, token: str, place: str, data: bytes) -> None:
        """Raise ReplayedError where a key was used for something else."""
        use = Use.of(key, token, place, data)
        first = self._seen.get(use.key)
        if first is None and self._store is not None:
            first = await self._first_use(use)
        if self._seen.setdefault(use.key, first or use.what) != use.what:
            raise ReplayedError("this key was used before, for another request: take a new key")
        self._seen.move_to_end(use.key)
        if len(self._seen) > self._most:
            self._seen.popitem(last=False)

    def close(self) -> None:
        """Close the store."""
        if self._store is not None:
            self._store.close()

    async def _first_use(self, use: Use) -> bytes:
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting.append((use, future))
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask())
        return await future

    async def _ask(self) -> None:
        """Look up all that wait, together, until none does."""
        assert self._store is not None
        assert self._workers is not None
        store = self._store
        try:
            while self._waiting:
                together, self._waiting = self._waiting, []
                uses = [use for use, _ in together]
                try:
                    found = await self._workers.run(lambda uses=uses: store.use(uses))  # type: ignore[misc]
                except ServiceError as error:
                    for _, future in together:
                        if not future.done():
                            future.set_exception(error)
                    continue
                for (_, future), first in zip(together, found, strict=True):
                    if not future.done():
                        future.set_result(first)
        finally:
            self._asking = None
