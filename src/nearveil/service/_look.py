"""Looks at databases that may have changed: in a thread, since any look may hang, and once for all who wait."""

import asyncio
import math
import time
from collections.abc import Callable

from nearveil.service._limits import Workers


class Look:
    """A look at one database, by a thread of its own.

    `work`: The look.
    `patience`: Seconds after which who waits for it is told to ask later.
    `believed`: Seconds, from its beginning, that a look is good for requests that come later.
    """

    def __init__(self, work: Callable[[], None], patience: float, believed: float = 0.0) -> None:
        self.workers = Workers(1, 1, patience)
        self._work, self._believed = work, believed
        self._began = -math.inf  # of the last look that succeeded
        self._looking: asyncio.Task[None] | None = None

    async def take(self) -> None:
        """Return when a look is good that began after the request came, or not long before it."""
        earliest = time.monotonic() - self._believed
        while self._began < earliest:
            if self._looking is None:
                self._looking = asyncio.create_task(self._look())
                self._looking.add_done_callback(_retrieve)
            await asyncio.shield(self._looking)

    async def _look(self) -> None:
        began = time.monotonic()
        try:
            await self.workers.run(self._work)
            self._began = began
        finally:
            self._looking = None


def _retrieve(task: "asyncio.Task[None]") -> None:
    """Take an error from a task: those who wait for it get it, and where all of them have gone nobody needs it."""
    if not task.cancelled():
        task.exception()
