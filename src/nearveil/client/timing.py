"""Private steps: work on private values in a thread, with an end that public sizes fix.

Somebody who watches the network sees when a client sends, and when it hangs up. So work on private values begins with a
public event, such as a reply, and ends at a multiple of a period after it, on success and on error. The period follows
from public sizes and is far longer than the work, so a step usually takes one period. On an overloaded machine it takes
two or more: an observer sees how many (``docs/theory/service.md``, attacked by ``tests/service/test_client_clock.py``
and ``nearveil audit "covers: clock"``; ``bench/private_steps.py`` compares work and periods at the largest sizes).
"""

import asyncio
import contextvars
import math
import os
import time
from collections.abc import Callable, Iterable
from typing import Any, Self, TypeVar, TypeVarTuple

import numpy as np

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

EXTRACTION_PERIOD = 1.0  # seconds to decode and extract an image; a photograph of 12 megapixels takes 0.3
VECTOR_PERIOD = 0.02  # seconds to read, check and normalize a vector of at most 16,000 numbers: it takes 0.001


class Clock:
    """The clock of a client. Tests replace it."""

    def now(self) -> float:
        """Return the monotonic time in seconds."""
        return time.monotonic()

    async def until(self, moment: float) -> None:
        """Wait until a moment."""
        while (left := moment - self.now()) > 0:
            await asyncio.sleep(left)

    async def pause(self, seconds: float) -> None:
        """Wait before a retry."""
        await asyncio.sleep(seconds)


def slot_end(since: float, period: float, now: float) -> float:
    """Return the first multiple of a period after `since` that has not passed.

    Examples
    --------
    >>> slot_end(10.0, 0.25, 10.1), slot_end(10.0, 0.25, 10.25), slot_end(10.0, 0.25, 10.6)
    (10.25, 10.25, 10.75)
    """
    return since + period * max(1, math.ceil((now - since) / period))


def needs_extraction(image: Any) -> bool:
    """Return whether a query is an image, by its type alone; otherwise it is a vector.

    Examples
    --------
    >>> needs_extraction("bird.jpg"), needs_extraction("bird.npy"), needs_extraction([0.5, 0.5])
    (True, False, False)
    """
    if isinstance(image, np.ndarray):
        return image.ndim == 3 and image.dtype == np.uint8
    if isinstance(image, (str, os.PathLike)):
        return not os.fspath(image).lower().endswith(".npy")
    return isinstance(image, bytes) or (callable(getattr(image, "save", None)) and hasattr(image, "getexif"))


def extraction_period(images: Iterable[Any]) -> float:
    """Return the seconds for making features of images, by their number and types."""
    return sum(EXTRACTION_PERIOD if needs_extraction(image) else VECTOR_PERIOD for image in images)


class PrivateStep:
    """Run private work in threads, and leave at a public deadline: ``async with session.private_step(...) as step``.

    `since` is the time of a public event. `period`, in seconds, depends on public sizes alone. The body awaits nothing
    but :meth:`run` and :meth:`run_to_end`. An error waits for the deadline as a result does; a cancellation does not,
    because its time is the caller's choice.
    """

    def __init__(self, clock: Clock, since: float, period: float, *, pad_timing: bool) -> None:
        if not 0 < period < math.inf:
            raise ValueError("period must be a positive number of seconds")
        self._clock, self._since, self._period, self._pad_timing = clock, since, period, pad_timing

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        if self._pad_timing and (kind is None or issubclass(kind, Exception)):
            await self._clock.until(slot_end(self._since, self._period, self._clock.now()))

    async def run(self, work: Callable[[*Arguments], T], *arguments: *Arguments) -> T:
        """Run work in a thread: other questions go on meanwhile."""
        return await asyncio.to_thread(work, *arguments)

    async def run_to_end(self, work: Callable[[], T]) -> T:
        """Run work in a thread, and finish it before a cancellation: a debit is not left half made."""
        # No task: one that raises SystemExit ends the loop.
        future = asyncio.get_running_loop().run_in_executor(None, contextvars.copy_context().run, work)
        cancellation: asyncio.CancelledError | None = None
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError as error:
                cancellation = error
        if cancellation is not None:
            future.exception()  # retrieved, so that asyncio does not log it
            raise cancellation
        return future.result()
