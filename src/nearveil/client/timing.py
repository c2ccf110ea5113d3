"""Private steps: work on private values in a thread that ends at a public deadline.

An observer of the network sees when a client sends and when it disconnects. So private work starts at a public event,
such as a reply, and ends at a multiple of a period after it, on success and on error. The period follows from public
sizes and is far longer than the work, so a step usually takes one period. On an overloaded machine it takes two or
more, and an observer sees how many (``docs/theory/service.md``, tested by ``tests/service/test_client_clock.py`` and
``nearveil audit "covers: clock"``; ``bench/private_steps.py`` compares work and periods at the largest sizes).
"""

import asyncio
import contextvars
import math
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from nearveil.gallery.codes import Codes
from nearveil.mechanisms import PublicMap

if TYPE_CHECKING:
    from nearveil.client.session import Session
    from nearveil.wire.messages import PublicPart

T = TypeVar("T")

EXTRACTION_PERIOD = 1.0  # seconds to decode and extract an image; a photograph of 12 megapixels takes 0.3
_MORE_VECTOR = 0.002  # seconds for each vector after the first
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


def next_deadline(since: float, period: float, now: float) -> float:
    """Return the first multiple of a period after `since` that has not passed."""
    return since + period * max(1, math.ceil((now - since) / period))


def needs_extraction(image: Any) -> bool:
    """Return whether a query is an image, by its type alone; otherwise it is a vector."""
    if isinstance(image, np.ndarray):
        return image.ndim == 3 and image.dtype == np.uint8
    if isinstance(image, (str, os.PathLike)):
        return not os.fspath(image).lower().endswith(".npy")
    return isinstance(image, bytes) or (callable(getattr(image, "save", None)) and hasattr(image, "getexif"))


def extraction_period(images: Iterable[Any]) -> float:
    """Return the seconds for making features of images, by their number and types."""
    extracted = [needs_extraction(image) for image in images]
    vectors = len(extracted) - sum(extracted)
    return EXTRACTION_PERIOD * sum(extracted) + (VECTOR_PERIOD + _MORE_VECTOR * (vectors - 1) if vectors else 0.0)


_BASE = 0.1  # seconds: a debit, and all that does not grow
_DEBIT = 0.01  # seconds for each debit after the first: it takes 0.003
_MORE = 1 / 8  # of the seconds for the operations of a question, for each one after the first: they take 1/20
_MESSAGE = 5e-3  # seconds, besides its operations
_RELEASE = 1.0  # seconds for each message of another mechanism than covers: they take up to 0.1
_BYTE = 2e-8  # seconds to read one
_OPERATION = 5e-9  # seconds
_NETWORK = 256  # operations for each prototype, besides its products
_CANDIDATE = 256  # operations for each candidate, besides its score
_NUMBER = 6e-8  # seconds for each number of decoded codes: decoding and its product take 3 to 12e-9 on an idle core
FILTERING = 5e-5  # seconds for each item that a filter reads
TEXT = 5e-5  # seconds for the texts of an item, besides their bytes: they take 1 to 15e-6
_TEXT_BYTE = 3e-7  # seconds for each byte of texts of an answer: hostile JSON takes 85e-9, read twice


def question_period(public: "PublicPart", questions: int = 1) -> float:
    """Return the seconds for reading a public part, paying and making messages."""
    table, more = public.map, questions - 1
    if not isinstance(table, PublicMap):
        return float(_BASE + _BYTE * (table.nbytes + public.table.nbytes) + _RELEASE * questions)
    features, dimensions = table.components.shape
    work = features * dimensions + len(table.prototypes) * (dimensions + _NETWORK + table.coverage.shape[1])
    size = table.components.nbytes + table.prototypes.nbytes + table.coverage.nbytes + public.table.nbytes
    return float(_BASE + _MESSAGE + _BYTE * size + _OPERATION * work * (1 + _MORE * more) + _DEBIT * more)


def choice_period(
    public: "PublicPart", *, texts: int = 0, text_bytes: int = 0, filtered: bool = False, questions: int = 1
) -> float:
    """Return the seconds for ranking the answers of `questions`, and reading `texts` of each, of `text_bytes`."""
    table, has_sets = public.map, isinstance(public.map, PublicMap)
    count, features = table.set_size, public.space.width
    ranking = _OPERATION * len(table.prototypes) * (table.prototypes.shape[1] + _NETWORK) if has_sets else 0.0
    ranking += _OPERATION * _CANDIDATE * count + scoring_period(public.table, features, count)
    reading = _TEXT_BYTE * (1 + filtered) * text_bytes + TEXT * texts + filtered * FILTERING * count
    more = questions - 1
    return float(_BASE / 2 + ranking * (1 + _MORE * more) + _MESSAGE * more + reading * questions)


def scoring_period(table: Codes, n_features: int, n_codes: int) -> float:
    """Return the seconds for scoring codes against a row of `n_features` numbers."""
    columns = table.columns
    return _NUMBER * columns * n_codes + _OPERATION * columns * n_features


@asynccontextmanager
async def private_step(session: "Session", since: float, period: float) -> AsyncIterator[None]:
    """End private work at a public deadline: the first multiple of `period` after `since` that has not passed."""
    # `since` is the time of a public event; `period`, in seconds, depends on public sizes alone. The body awaits
    # only threads. An error waits for the deadline as a result does; a cancellation does not: the caller times it.
    if not 0 < period < math.inf:
        raise ValueError("period must be a positive number of seconds")
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    try:
        if session.pad_timing:
            await session.clock.until(next_deadline(since, period, session.clock.now()))
        if error is not None:
            raise error
    finally:
        del error  # it holds this frame


async def run_to_end(work: Callable[[], T]) -> T:
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
