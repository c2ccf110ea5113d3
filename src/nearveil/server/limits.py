"""Limits on clients: request rates, bytes in memory, and the size and duration of bodies."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.types import Receive

from nearveil.server.errors import ServiceError

# A pass over 16 MiB of codes takes 2.3 ms of a processor, and a list of galleries 0.5 ms.
BYTES_PER_REQUEST = 16 << 20  # bytes of a pass, a body or an answer that count as one more request


UNAUTHENTICATED = 60.0, 120, 4096  # refusals without a valid token a minute, and at once; addresses remembered
UNAUTHENTICATED_DELAY = 1.0  # seconds before each refusal beyond that


class TokenBuckets:
    """Token buckets of `burst` requests, one for each name, filled at `rate` requests a minute; None is no limit."""

    def __init__(
        self,
        rate: float | None,
        burst: int,
        max_buckets: int | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._per_second, self._burst, self._clock = None if rate is None else rate / 60, float(burst), clock
        self._max_buckets = max_buckets
        self._buckets: dict[str, tuple[float, float]] = {}  # level and time; least recently used first if bounded

    def take(self, name: str) -> int:
        """Take one request from a bucket and return 0, or take nothing and return the seconds to wait."""
        if self._per_second is None:
            return 0
        level = self._drain(name, 0.0)
        if level < 1:
            return max(1, math.ceil((1 - level) / self._per_second))
        self._drain(name, 1.0)
        return 0

    def charge(self, name: str, n_bytes: int) -> None:
        """Take the cost of a large request, below zero if necessary: an admitted one may be paid for."""
        if self._per_second is not None:
            self._drain(name, n_bytes / BYTES_PER_REQUEST)

    def _drain(self, name: str, cost: float) -> float:
        """Fill a bucket by the time that has passed, take `cost` requests, and return its level."""
        assert self._per_second is not None
        now = self._clock()
        level, filled_at = self._buckets.pop(name, (self._burst, now))
        if self._max_buckets is not None and len(self._buckets) >= self._max_buckets:
            del self._buckets[next(iter(self._buckets))]
        level = min(self._burst, level + (now - filled_at) * self._per_second) - cost
        self._buckets[name] = level, now
        return level


@dataclass(eq=False)
class ByteBudget:
    """Limit the bytes that all requests of a process hold together, and those of each token to half of that."""

    # A token that holds nothing may have one request of any size unless two others hold something: so one token alone
    # never keeps the others out, and all hold at most `limit` bytes or two requests of the largest size.

    limit: int
    message: str
    bytes_by_token: Counter[str] = field(default_factory=Counter)


@dataclass(eq=False)
class Reservation:
    """The bytes of a budget that one request of a token holds."""

    budget: ByteBudget
    token: str
    size: int = 0

    def resize(self, size: int) -> None:
        """Change the reservation to `size` bytes; ServiceError if that is too much."""
        budget, sizes = self.budget, self.budget.bytes_by_token
        rest = sizes[self.token] - self.size  # of the token's other requests
        if size > self.size:
            total, n_others = sizes.total() - self.size + size, len(sizes.keys() - {self.token})
            exceeds = total > budget.limit and (rest > 0 or n_others > 1)
            if exceeds or (rest and rest + size > budget.limit // 2):
                raise ServiceError("busy", budget.message)
        self.size, sizes[self.token] = size, rest + size
        if not sizes[self.token]:
            del sizes[self.token]


def check_length(length: bytes | None, lengths: range | frozenset[int]) -> int:
    """Return the length of a body, from its header; `lengths` are those that are accepted."""
    if length is None:
        raise ServiceError("length_required", "Missing header Content-Length.")
    if len(length) > 18 or not length.isdigit() or int(length) not in lengths:
        if isinstance(lengths, range):
            raise ServiceError("too_large", f"The body must be at most {lengths[-1]} bytes.")
        choices = " or ".join(map(str, sorted(lengths)))
        raise ServiceError("too_large", f"A sealed request must have {choices} bytes: fetch the layout again.")
    return int(length)


async def read_body(receive: Receive, length: int, timeout: float) -> bytearray:
    """Read a body of at most `length` bytes within `timeout` seconds."""
    body, more = bytearray(), True  # not a list of parts: parts of two bytes would take twenty times as much
    try:
        async with asyncio.timeout(timeout):
            while more:
                message = await receive()
                if message["type"] != "http.request":
                    raise ServiceError("timeout", "The client disconnected before its request was complete.")
                body += message.get("body", b"")
                more = message.get("more_body", False)
                if len(body) > length:
                    raise ServiceError("too_large", f"The body must be at most {length} bytes.")
    except TimeoutError:
        raise ServiceError("timeout", "The body did not arrive in time.") from None
    return body
