"""What a client knows of galleries, and how it sends: shared by all questions of one client.

Requests are a function of messages, of nonces and of public things: never of the feature, of scores or of what was
chosen (``docs/theory/service.md``; attacked by ``tests/service/test_client_wire.py``).

Private work lies in a slot that begins with a public event, such as a reply, and ends at a multiple of a period after
it. The period follows from public sizes and is far longer than the work, so the slot ends after one period. On a
machine that is overloaded it ends after two or more: all that is seen is how many (attacked by
``tests/service/test_client_clock.py`` and ``nearveil audit "covers: clock"``).
"""

import asyncio
import contextvars
import hashlib
import hmac
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from numpy.typing import NDArray

from nearveil.frames import DEFAULT_LIMITS, HEADER_BYTES
from nearveil.gallery.items import LARGEST_ORIGINAL
from nearveil.mechanisms.message import MessageError
from nearveil.protocol.wire import PublicPart, decode_frame
from nearveil.service.client.errors import QuestionError, ReplyError, UnreachableError
from nearveil.service.client.images import FeatureMaker, Images, decode_images
from nearveil.service.client.payment import Payer
from nearveil.service.client.transport import (
    AGAIN,
    Patience,
    Request,
    Response,
    Tally,
    Transport,
    make_printable,
    make_refusal,
    read_bytes,
    read_etag,
    read_frame,
    read_json,
)
from nearveil.service.schema import MOST_MODEL, Galleries, GalleryInfo, GalleryKind

if TYPE_CHECKING:
    from nearveil.votes import PublicDiscriminant

T = TypeVar("T")

EXTRACTION_PERIOD = 1.0  # seconds: decoding and extracting images; a photograph of 12 megapixels takes 0.3
CHECK_AGAIN = 3600.0  # seconds that a model is used before the gallery is asked whether it has a newer one
_SAME = 1e-9  # of fractions
_MOST_MAPS = 4  # that are kept
_LEAST_REPLY = 1 << 16  # bytes: there must be room for words
_KINDS: dict[GalleryKind, str] = {
    "open": "it is protected, and answers classify only: it shows no candidates",
    "protected": "it is open, and has no model: nearest asks it",
}
_NONE: dict[GalleryKind, str] = {
    "open": "none is open, and a protected one answers classify only",
    "protected": "none is protected, and only a protected one has a model",
}


class Clock:
    """The time of a client. Tests have one of their own."""

    def now(self) -> float:
        """Return seconds since some moment."""
        return time.monotonic()

    async def until(self, moment: float) -> None:
        """Wait for a moment."""
        while (left := moment - self.now()) > 0:
            await asyncio.sleep(left)

    async def pause(self, seconds: float) -> None:
        """Wait before a request is sent again."""
        await asyncio.sleep(seconds)


def slot_end(since: float, period: float, now: float) -> float:
    """Return the first multiple of a period after `since` that has not passed.

    Examples
    --------
    >>> slot_end(10.0, 0.25, 10.1), slot_end(10.0, 0.25, 10.25), slot_end(10.0, 0.25, 10.6)
    (10.25, 10.25, 10.75)
    """
    return since + period * max(1, math.ceil((now - since) / period))


async def finish_in_thread(work: Callable[[], T]) -> T:
    """Do work in a thread, and finish it before a cancellation: a debit is not left half made."""
    # No task: one that raises SystemExit ends the loop.
    task = asyncio.get_running_loop().run_in_executor(None, contextvars.copy_context().run, work)
    stopped: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            stopped = error
    if stopped is not None:
        task.exception()  # looked at, so that nobody is told that it was not
        raise stopped
    return task.result()


@dataclass(frozen=True)
class KeptModel:
    """A model, the gallery that it is of, and when that was last asked about it."""

    info: GalleryInfo
    model: "PublicDiscriminant"
    checked: float


class Session:
    """Knows the galleries with their maps and models, and sends requests, again where no reply came.

    `account`: Who pays.
    `token`: Keys of requests differ between tokens: a server refuses a key that another token has used.
    `watched`: Whether somebody else sees when requests are sent. A gallery in this process is nobody else.
    """

    def __init__(
        self,
        transport: Transport,
        account: Payer | None,
        features: FeatureMaker,
        patience: Patience,
        token: str,
        *,
        watched: bool,
    ) -> None:
        self.transport, self.account, self.features, self.clock = transport, account, features, Clock()
        self._patience, self._token, self._watched = patience, token, watched
        self._infos: tuple[GalleryInfo, ...] | None = None
        self._maps: dict[tuple[str, float | None], tuple[str, PublicPart]] = {}
        self._models: dict[str | None, KeptModel] = {}  # by the name that was asked for

    async def end_slot(self, since: float, period: float) -> None:
        """Wait for the end of a slot of private work, if somebody watches.

        `since`: When it began: the moment of a public event.
        `period`: Seconds, from public sizes alone.
        """
        if self._watched:
            await self.clock.until(slot_end(since, period, self.clock.now()))

    async def find_payer(self, gallery: str | None) -> Payer:
        """Return who pays, or say that there must be somebody, unless the gallery cannot be asked at all."""
        if self.account is None:
            await self.find_gallery(gallery, "open")
            raise QuestionError("account", "somebody must pay: give the client an account of a ledger")
        return self.account

    async def fetch_galleries(self, tally: Tally | None = None) -> tuple[GalleryInfo, ...]:
        """Ask for the galleries that there are."""
        self._infos = read_json(await self._send(Request("galleries"), tally or Tally()), Galleries).galleries
        return self._infos

    async def find_gallery(self, name: str | None, kind: GalleryKind, tally: Tally | None = None) -> GalleryInfo:
        """Return what is known of a gallery: of the one that is named, or of the only one of its kind."""
        infos = self._find_list(name)
        return _choose_gallery(await self.fetch_galleries(tally) if infos is None else infos, name, kind)

    async def prepare_features(self, images: Images, name: str | None) -> tuple[GalleryInfo, list[NDArray[Any]]]:
        """Return an open gallery and the features of images for it, before the first request of their question.

        Images are decoded before anything is sent, and made features as well if the extractor was given, or the gallery
        listed before. If not, the list is asked for in between. After either a slot ends.
        """
        tally = Tally(heard=self.clock.now())
        infos = self._find_list(name)  # now: another question's list may come while images are decoded
        given = await asyncio.to_thread(decode_images, images)
        if self.features.needs_gallery(given):
            if infos is None:
                await self.end_slot(tally.heard, EXTRACTION_PERIOD)
                infos = await self.fetch_galleries(tally)
            info = _choose_gallery(infos, name, "open")
            rows = await asyncio.to_thread(self.features.extract, given, info)
            await self.end_slot(tally.heard, EXTRACTION_PERIOD)
        else:
            rows = await asyncio.to_thread(self.features.extract, given)
            if any(image.ndim > 1 for image in given):
                await self.end_slot(tally.heard, EXTRACTION_PERIOD)
            infos = await self.fetch_galleries() if infos is None else infos
            info = _choose_gallery(infos, name, "open")
        self.features.check(given, rows, info)
        return info, rows

    async def fetch_map(self, info: GalleryInfo, candidates: float | None, tally: Tally) -> PublicPart:
        """Return the map of a gallery as it is now. What is held already is not sent again."""
        etag, kept = self._maps.get((info.name, candidates), ("", None))
        most = HEADER_BYTES + DEFAULT_LIMITS.public_part
        response = await self._send(Request("map", info.name, candidates=candidates, etag=etag, most=most), tally)
        if response.status == 304 and kept is not None:
            return kept
        with self._forgetting(info.name):
            if response.status != 200:
                raise make_refusal(response)
            data = read_frame(response)
            public: PublicPart = await asyncio.to_thread(decode_frame, data, PublicPart)
            if candidates is not None and abs(public.candidates - candidates) > _SAME:
                raise ReplyError("the server sent the map of another fraction than candidates asks for")
            if public.fingerprint != info.fingerprint or len(public.mean) != info.dimension:
                raise ReplyError("the gallery has other features than when it was listed: ask again")
        self._maps[info.name, candidates] = read_etag(response), public
        self._drop(list(self._maps)[:-_MOST_MAPS])
        return public

    async def fetch_model(self, gallery: str | None) -> KeptModel:
        """Return the model of a gallery: asked for once, and whether there is a newer one at most once an hour."""
        now = self.clock.now()
        kept = self._models.get(gallery)
        if kept is not None and 0 <= now - kept.checked < CHECK_AGAIN:
            return kept
        await self.fetch_galleries()
        info = await self.find_gallery(gallery, "protected")
        if kept is None or kept.info.version != info.version:
            model = await self._download_model(info)
        else:
            model = kept.model
        self._models[gallery] = found = KeptModel(info, model, now)
        return found

    async def fetch_original(self, number: int, gallery: str | None) -> bytes:
        """Ask for one original: the request says which one."""
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 1 << 32:
            raise QuestionError("id", "it must be the id of an item, a whole number of 32 bits")
        info = await self.find_gallery(gallery, "open")
        request = Request("original", info.name, number=number, most=LARGEST_ORIGINAL)
        return read_bytes(await self._send(request, Tally()))

    async def send_query(self, info: GalleryInfo, body: bytes, nonce: str, *, most: int, tally: Tally) -> Response:
        """Send the frame of a query. The same frame with the same nonce is the same request, at any time.

        The key of a debit is not sent in any form: it may be short, and the server could guess it.
        """
        text = f"{self._token}\0query\0{info.name}\0".encode() + body
        key = hmac.digest(nonce.encode(), text, "sha256").hex()[:32]
        return await self._send(Request("query", info.name, body, key, most=max(most, _LEAST_REPLY)), tally)

    async def _send(self, request: Request, tally: Tally) -> Response:
        """Send a request until there is a reply that another attempt would not better. Every attempt is the same."""
        for attempt in range(self._patience.retries + 1):
            last = attempt == self._patience.retries
            tally.sent += len(request.body)
            try:
                response = await self.transport.send(request)
            except UnreachableError as error:
                if last or not error.again:
                    raise
                await self.clock.pause(self._patience.pause(attempt, None))
                continue
            tally.heard = self.clock.now()
            tally.received += len(response.body)
            if last or response.status not in AGAIN:
                return response
            await self.clock.pause(self._patience.pause(attempt, response.retry_after))
        raise AssertionError("the last attempt returns or raises")

    async def _download_model(self, info: GalleryInfo) -> "PublicDiscriminant":
        body = read_bytes(await self._send(Request("model", info.name, most=MOST_MODEL), Tally()))
        if hashlib.sha256(body).hexdigest() != info.version:
            raise ReplyError(
                "the model is another than the gallery names: it may have published one just now; ask again"
            )
        model = await asyncio.to_thread(_read_model, body)
        if model.n_features != info.dimension:
            raise ReplyError("the model is of other features than the gallery's")
        return model

    def _find_list(self, name: str | None) -> tuple[GalleryInfo, ...] | None:
        """Return the galleries that are known, if the one that is asked for is among them."""
        infos = self._infos
        return infos if infos is not None and any(name in (None, one.name) for one in infos) else None

    @contextmanager
    def _forgetting(self, gallery: str) -> Iterator[None]:
        """Look anew next time if a gallery is not what it was."""
        try:
            yield
        except ValueError:
            self._infos = None
            self._drop([place for place in list(self._maps) if place[0] == gallery])
            raise

    def _drop(self, places: list[tuple[str, float | None]]) -> None:
        for place in places:
            self._maps.pop(place, None)


def _read_model(body: bytes) -> "PublicDiscriminant":
    from nearveil.votes import PublicDiscriminant

    try:
        model = PublicDiscriminant.from_bytes(body)
    except MessageError as error:
        raise ReplyError(f"the model cannot be used: {make_printable(str(error))}") from None
    if model.classes.dtype.kind != "U":
        raise ReplyError("the model holds names that are no text")
    return model


def _choose_gallery(infos: tuple[GalleryInfo, ...], name: str | None, kind: GalleryKind) -> GalleryInfo:
    if name is None:
        fitting = [one for one in infos if one.kind == kind]
        if len(fitting) != 1:
            many = "name one of them" if fitting else _NONE[kind]
            raise QuestionError("gallery", f"there are {_list_names(infos)}: {many}")
        return _check_published(fitting[0])
    found = next((one for one in infos if one.name == name), None)
    if found is None:
        name = make_printable(str(name))
        raise QuestionError("gallery", f"there is none named {name!r}; there are {_list_names(infos)}")
    if found.kind != kind:
        raise QuestionError("gallery", f"{found.name}: {_KINDS[kind]}")
    return _check_published(found)


def _check_published(info: GalleryInfo) -> GalleryInfo:
    if not info.is_published:
        what = "map" if info.kind == "open" else "model"
        raise QuestionError("gallery", f"{info.name} has no {what} yet: publish one, or ask another")
    return info


def _list_names(infos: tuple[GalleryInfo, ...]) -> str:
    return ", ".join(f"{one.name} ({one.kind})" for one in infos) or "no galleries"
