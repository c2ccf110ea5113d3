"""When a client sends: at moments that follow from public things, however long its private work took.

Private work lies in a slot that begins with a public event, such as a reply, and ends at a multiple of a period after
it. The period follows from public sizes and is far longer than the work, so the slot ends after one period. On a
machine that is overloaded it ends after two or more: all that is seen is how many (``docs/theory/service.md``; attacked
by ``tests/service/test_client_clock.py`` and ``nearveil audit "covers: clock"``).
"""

import asyncio
import math
import time

from nearveil.service._replies import Now, Steps, Until

EXTRACTION_PERIOD = 1.0  # seconds: decoding and extracting images; a photograph of 12 megapixels takes 0.3


class Clock:
    """The time of a client. Tests have one of their own."""

    def now(self) -> float:
        """Return seconds since some moment."""
        return time.monotonic()

    def until(self, moment: float) -> None:
        """Wait for a moment."""
        while (left := moment - self.now()) > 0:
            time.sleep(left)

    async def until_async(self, moment: float) -> None:
        """Wait for a moment without holding the event loop."""
        while (left := moment - self.now()) > 0:
            await asyncio.sleep(left)


def slot_end(since: float, period: float, now: float) -> float:
    """Return the first multiple of a period after `since` that has not passed.

    Examples
    --------
    >>> slot_end(10.0, 0.25, 10.1), slot_end(10.0, 0.25, 10.25), slot_end(10.0, 0.25, 10.6)
    (10.25, 10.25, 10.75)
    """
    return since + period * max(1, math.ceil((now - since) / period))


def end_slot(since: float, period: float) -> Steps[None]:
    """Wait for the end of a slot.

    `since`: When it began: the moment of a public event.
    `period`: Seconds, from public sizes alone.
    """
    now: float = yield Now()
    yield Until(slot_end(since, period, now))
