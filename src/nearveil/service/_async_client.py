"""The client for event loops."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from nearveil.features import Extractor
from nearveil.ledger import Ledger
from nearveil.privacy.noise import Source
from nearveil.protocol.wire import PublicPart
from nearveil.service._client import shown
from nearveil.service._connect import Options, Where, address, asker, here, is_url
from nearveil.service._dummies import Payer
from nearveil.service._model import GalleryInfo
from nearveil.service._private_image import Image, Images
from nearveil.service._replies import Now, Pause, Steps, Until, Work
from nearveil.service._results import Classified, Nearest
from nearveil.service._schedule import Clock
from nearveil.service._steps_classify import classify, current_model
from nearveil.service._steps_nearest import Asked, nearest
from nearveil.service._transport import AsyncTransport, GalleryTransport, Request, Response

if TYPE_CHECKING:
    import httpx

    from nearveil.votes import PublicDiscriminant

T = TypeVar("T")


class AsyncClient:
    """As :class:`nearveil.Client`, to be awaited; the same requests, in the same order.

    Features, debits and rankings are made in threads. A question that is cancelled after it began to pay finishes its
    debit first; the error then has a note with the key that asks again.

    Parameters
    ----------
    where, token, account, ledger, extractor, retries, timeout, insecure, ca, certificate, proxies, transport
        As of :class:`nearveil.Client`.
    """

    def __init__(
        self,
        where: Where,
        token: str | None = None,
        *,
        account: Payer | str | None = None,
        ledger: str | Path | Ledger | None = None,
        extractor: Extractor | None = None,
        retries: int = 3,
        timeout: float = 60.0,
        insecure: bool = False,
        ca: str | Path | None = None,
        certificate: str | Path | tuple[str | Path, str | Path] | None = None,
        proxies: bool = False,
        transport: "httpx.AsyncBaseTransport | None" = None,
    ) -> None:
        options = Options(
            where,
            token,
            account,
            ledger,
            extractor,
            retries,
            timeout,
            insecure,
            ca,
            certificate,
            proxies,
            transport,
        )
        self._shown, self._clock = shown(where), Clock()
        self._asker, self._ledger = asker(options)
        try:
            self._transport = _transport(options)
        except BaseException:
            if self._ledger is not None:
                self._ledger.close()
            raise

    async def nearest(
        self,
        image: Image,
        k: int | None = 8,
        epsilon: float = 4.0,
        candidates: float | None = None,
        *,
        gallery: str | None = None,
        thumbnails: bool = False,
        originals: bool = False,
        dummies: Images = (),
        key: str | None = None,
        rng: Source | None = None,
    ) -> Nearest:
        """Find the nearest images of an open gallery: :meth:`nearveil.Client.nearest`."""
        asked = Asked(image, k, epsilon, candidates, gallery, thumbnails, originals, dummies, key, rng)
        return await self._driven(nearest(self._asker, asked))

    async def classify(self, image: Image, *, gallery: str | None = None) -> Classified:
        """Classify an image by the model of a protected gallery: :meth:`nearveil.Client.classify`."""
        return await self._driven(classify(self._asker, image, gallery))

    async def original_not_private(self, id: int, *, gallery: str | None = None) -> bytes:  # noqa: A002
        """Fetch one original by its id. NOT PRIVATE: see :meth:`nearveil.Client.original_not_private`."""
        return await self._driven(self._asker.original(id, gallery))

    async def galleries(self) -> tuple[GalleryInfo, ...]:
        """Return what there is to ask."""
        return await self._driven(self._asker.galleries())

    async def map(self, candidates: float | None = None, *, gallery: str | None = None) -> PublicPart:
        """Return the public map of a gallery as it is now: :meth:`nearveil.Client.map`."""
        return await self._driven(self._asker.map(gallery, candidates))

    async def model(self, *, gallery: str | None = None) -> "PublicDiscriminant":
        """Return the model of a protected gallery: :meth:`nearveil.Client.model`."""
        return (await self._driven(current_model(self._asker, gallery))).model

    async def close(self) -> None:
        """Close connections, and what the client itself has opened."""
        await self._transport.close()
        if self._ledger is not None:
            await asyncio.to_thread(self._ledger.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"AsyncClient({self._shown!r})"

    async def _driven(self, steps: Steps[T]) -> T:
        try:
            step = next(steps)
            while True:
                try:
                    found = await self._done(step)
                except BaseException as error:  # the steps decide what it means
                    step = steps.throw(error)
                else:
                    step = steps.send(found)
        except StopIteration as end:
            result: T = end.value
            return result

    async def _done(self, step: Any) -> Any:
        if isinstance(step, Pause):
            return await asyncio.sleep(step.seconds)
        if isinstance(step, Now):
            return self._clock.now()
        if isinstance(step, Until):
            return await self._clock.until_async(step.moment)
        return await (_in_thread(step.run) if isinstance(step, Work) else self._transport.send(step))


class _Threads:
    """A transport that waits, in threads."""

    def __init__(self, inner: GalleryTransport) -> None:
        self._inner = inner

    async def send(self, request: Request) -> Response:
        return await asyncio.to_thread(self._inner.send, request)

    async def close(self) -> None:
        await asyncio.to_thread(self._inner.close)


async def _in_thread(run: Callable[[], T]) -> T:
    """Do work in a thread. If this is cancelled the work is finished first: a debit is not left half made."""
    work = asyncio.ensure_future(asyncio.to_thread(run))
    stopped: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:
            stopped = error
    if stopped is not None:
        work.exception()  # looked at, so that nobody is told that it was not
        raise stopped
    return work.result()


def _transport(options: Options) -> AsyncTransport:
    if not is_url(options.where):
        return _Threads(here(options.where))
    where = address(options)
    from nearveil.service._http import HttpTransport

    return HttpTransport(where)
