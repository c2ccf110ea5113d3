"""The questions of a client: the nearest images of an open gallery, and the class of an image by a published model.

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
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from io import BytesIO
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar, get_args

import numpy as np
from dp_accounting import NoOpDpEvent
from numpy.typing import ArrayLike, NDArray

from nearveil.features import Extractor, ImageError, load_image
from nearveil.features.backbones import find_extractor
from nearveil.features.images import COLOURS, Pixels
from nearveil.frames import DEFAULT_LIMITS, HEADER_BYTES, Reader, WireError, Writer
from nearveil.gallery.answers import (
    ID_BYTES,
    IMAGE_HEADER_BYTES,
    LARGEST_ORIGINAL,
    LONGEST_NAME,
    Answer,
    Extras,
    ItemDetails,
    read_details,
)
from nearveil.mechanisms import Message
from nearveil.mechanisms.base import MessageError
from nearveil.mechanisms.covers.covers import checked_epsilon
from nearveil.privacy import Basis, Guarantee, compose_events
from nearveil.privacy.checks import as_rows, check_text, normalize_rows
from nearveil.privacy.noise import Source, secure_source
from nearveil.protocol.client import (
    OUT_OF_RANGE,
    ClientProtocol,
    Found,
    ProtocolError,
    PublicPart,
    Query,
    decode_frame,
    find_share,
    is_in_range,
)
from nearveil.service.client.errors import QuestionError, ReplyError, UnansweredError, UnreachableError, unanswered
from nearveil.service.client.results import Classified, Match, Nearest
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
    from nearveil.ledger import Debit
    from nearveil.votes import PublicDiscriminant

Image: TypeAlias = "str | os.PathLike[str] | bytes | NDArray[Any] | Any"
"""A path, the bytes of a file, an image of Pillow, pixels (height, width, 3) in uint8; or a feature of any library."""
Images: TypeAlias = "Sequence[Image] | NDArray[Any]"
"""Several of them; the rows of a matrix are features."""


class FeatureMaker:
    """Makes features with the given extractor, or else with the gallery's own, which it keeps."""

    def __init__(self, extractor: Extractor | None) -> None:
        self._given = extractor
        self._found: dict[str, Extractor] = {}

    def rows(self, images: Images, info: GalleryInfo) -> list[NDArray[Any]]:
        """Return features of the private image, then of dummies; those that are features already are passed through."""
        given = decode_images(images)
        found = self.extract(given, info)
        self.check(given, found, info)
        return found

    def needs_gallery(self, given: Sequence[NDArray[Any]]) -> bool:
        """Return whether only the gallery says which extractor makes features of what was given."""
        return self._given is None and any(image.ndim == 3 for image in given)

    def extract(self, given: Sequence[NDArray[Any]], info: GalleryInfo | None = None) -> list[NDArray[Any]]:
        """Return features of pixels, by the extractor that was given or by that of the gallery."""
        pixels = [image for image in given if image.ndim == 3]
        made = iter(self._extractor(info).extract(pixels) if pixels else ())
        rows = [image if image.ndim == 1 else next(made) for image in given]
        for number, row in enumerate(rows):
            if not is_in_range(row):
                raise QuestionError(_argument(number), f"its feature {OUT_OF_RANGE}")
            if not np.any(row):
                raise QuestionError(_argument(number), "its feature must not be all zeros: it has no direction")
        return [normalize_rows(row[None], "rows:")[0] for row in rows]  # as a gallery's own

    def check(self, given: Sequence[NDArray[Any]], rows: Sequence[NDArray[Any]], info: GalleryInfo) -> None:
        """Refuse features that a gallery cannot compare with its own."""
        own = self._given
        if own is not None and own.fingerprint != info.fingerprint and any(image.ndim == 3 for image in given):
            raise QuestionError(
                "extractor",
                f"the gallery has features of another extractor than {own.name}, and they do not compare: "
                "leave it out, or ask another gallery",
            )
        for number, row in enumerate(rows):
            if len(row) != info.dimension:
                words = f"a feature must have {info.dimension} numbers, as those of the gallery; it has {len(row)}"
                raise QuestionError(_argument(number), words)

    def _extractor(self, info: GalleryInfo | None) -> Extractor:
        if self._given is not None:
            return self._given
        assert info is not None
        if info.fingerprint not in self._found:
            try:
                self._found[info.fingerprint] = find_extractor(info.fingerprint)
            except ValueError as error:
                raise QuestionError("extractor", str(error)) from None
        return self._found[info.fingerprint]


def decode_images(images: Images) -> list[NDArray[Any]]:
    """Return features as they are, and the pixels of everything else."""
    return [_decode(image, _argument(number)) for number, image in enumerate(images)]


def _argument(number: int) -> str:
    return "image" if number == 0 else f"dummies[{number - 1}]"


def _decode(image: Image, name: str) -> NDArray[Any]:
    """Return a feature as it is, and the pixels of everything else."""
    try:
        return _read_image(image, name)
    except ImageError as error:
        if name == "image":
            raise
        raise QuestionError(name, error.reason) from None


def _read_image(image: Image, name: str) -> NDArray[Any]:
    if isinstance(image, np.ndarray):
        if image.ndim == 3 and image.dtype == np.uint8:
            return image
        if image.dtype.kind not in "fiu" or image.shape not in ((image.size,), (1, image.size)):
            raise QuestionError(name, "an array must be one row of numbers, or pixels (height, width, 3) in uint8")
        row = image.ravel() if image.dtype.kind == "f" else image.ravel().astype(np.float64)
        if not is_in_range(row):
            raise QuestionError(name, f"feature {OUT_OF_RANGE}")
        return row.astype(np.float32) if row.dtype == np.float16 else row
    if isinstance(image, (str, os.PathLike)) and os.fspath(image).lower().endswith(".npy"):
        return _read_image(_read_vector(image, name), name)
    if isinstance(image, (str, os.PathLike, bytes)):
        return load_image(image)
    if callable(getattr(image, "save", None)) and hasattr(image, "getexif"):
        return _pillow_pixels(image)
    try:
        return _read_image(as_rows(image), name)
    except QuestionError:
        raise
    except ValueError:
        raise QuestionError(
            name, "it must be a path, bytes, an image of Pillow, an array of pixels, or one row of numbers"
        ) from None


def _read_vector(path: "str | os.PathLike[str]", name: str) -> NDArray[Any]:
    from nearveil.features.vectors import read_vector

    try:
        return read_vector(path)
    except ValueError as error:
        raise QuestionError(name, str(error).removeprefix("vectors: ")) from None


def _pillow_pixels(image: Any) -> Pixels:
    """Return the pixels of Pillow's image, by the rules for files: what is transparent lies on white."""
    from PIL import ImageOps

    out = BytesIO()
    try:
        turned = ImageOps.exif_transpose(image)
        (turned.convert("RGB") if turned.mode == "CMYK" else turned).save(out, "PNG", compress_level=1)
    except (OSError, ValueError):
        raise ImageError(COLOURS) from None
    return load_image(out.getvalue())


MOST = 4096  # dummies of one question
MOST_REPEATED = 64  # messages about one image
_MESSAGE = b"NVM"  # what the bytes of one message begin with


class Payer(Protocol):
    """Who pays: an account, or what opens one when there is something to pay."""

    def spend(self, guarantee: Guarantee, key: str, /) -> "Debit":
        """Debit a guarantee under a key, durably, or find the debit of that key."""
        ...


@dataclass
class _Free:
    """Pays nothing: a public image has no guarantee to keep."""

    repeated: bool = False
    message: bytes | None = None

    def store(self, message: bytes, /) -> None:
        """Keep nothing."""


def make_dummy_messages(
    rows: Sequence[ArrayLike], public: PublicPart, epsilon: float, rng: Source | None
) -> tuple[Message, ...]:
    """Return the messages of public images, each through the channel that the private one goes through."""
    return tuple(_make_dummy(row, number, public, epsilon, rng) for number, row in enumerate(rows))


def _make_dummy(row: ArrayLike, number: int, public: PublicPart, epsilon: float, rng: Source | None) -> Message:
    client = ClientProtocol(epsilon, public=public)
    try:
        question = client.ask(row, spend=lambda _: nullcontext(_Free()), rng=rng)
    except ValueError as error:
        raise QuestionError(f"dummies[{number}]", str(error)) from None
    found: Query = decode_frame(question, Query)
    return found.message


class PaidMessages:
    """Spends once for a message and puts it at a random place among others. What is stored is what is sent.

    Were the dummies drawn anew for a retry, the one message that comes twice would be the paid one. Its place is not
    kept: the client looks at the candidates of all.
    """

    def __init__(
        self,
        account: Payer,
        key: str,
        dummies: Sequence[Message],
        rng: Source | None,
        more: Callable[[], Sequence[Message]] = tuple,
        repeat: int = 1,
    ) -> None:
        self._account, self._key, self._dummies, self._more, self.repeat = account, key, dummies, more, repeat
        self._rng = secure_source() if rng is None else rng
        self.messages: tuple[Message, ...] = ()

    def ask(self, client: ClientProtocol, row: ArrayLike) -> bytes:
        """Return the question of a message, paid for now or before; UnansweredError if the map has changed since."""
        try:
            return client.ask(row, spend=self.spend, rng=self._rng)
        except ProtocolError:
            if not self.messages:
                raise
        raise UnansweredError("the gallery has another map than when this key was paid for", self._key, again=False)

    def spend(self, guarantee: Guarantee) -> AbstractContextManager["PaidMessages"]:
        """Debit the account, or find the debit of this key."""
        self._debit = self._account.spend(multiply_guarantee(guarantee, self.repeat), self._key)
        if self.repeated:
            assert self._debit.message is not None
            self.messages = unpack_messages(self._debit.message)
        return self

    @property
    def repeated(self) -> bool:
        """Whether the key was spent before."""
        return self._debit.repeated

    @property
    def nonce(self) -> str:
        """What the keys of this question's requests are made from. It is not sent."""
        return self._debit.nonce

    @property
    def message(self) -> bytes | None:
        """One of those that were stored: all are for one map."""
        return self.messages[0].to_bytes() if self.messages else None

    def store(self, message: bytes, /) -> None:
        """Keep all messages, in the order in which they will be sent."""
        found = [Message.from_bytes(message), *self._more(), *self._dummies]
        self.messages = tuple(found[place] for place in _shuffle(len(found), self._rng))
        self._debit.store(_pack(self.messages))

    def __enter__(self) -> "PaidMessages":
        self._debit.__enter__()
        return self

    def __exit__(self, *told: object) -> None:
        self._debit.__exit__(None, None, None)


def multiply_guarantee(guarantee: Guarantee, repeat: int) -> Guarantee:
    """Return what as many messages about one image promise together: pure epsilons add up."""
    if repeat == 1:
        return guarantee
    about: Any = {name: getattr(guarantee, name) for name in ("protects", "unit", "relation", "basis")}
    together = compose_events(guarantee.events * repeat, delta=0.0, **about)
    return replace(guarantee, epsilon=together.epsilon, events=together.events)


def _shuffle(count: int, source: Source) -> list[int]:
    """Return a uniformly random order: by random words, drawn anew should two be equal."""
    while True:
        words = source.words(count)
        if len(np.unique(words)) == count:
            return [int(place) for place in np.argsort(words)]


def _pack(messages: Sequence[Message]) -> bytes:
    if len(messages) == 1:
        return messages[0].to_bytes()
    out = Writer()
    out.write_int(len(messages))
    for message in messages:
        out.write_bytes(message.to_bytes())
    return out.to_bytes()


def unpack_messages(data: bytes) -> tuple[Message, ...]:
    """Return the messages that were stored with a debit."""
    try:
        if data.startswith(_MESSAGE):
            return (Message.from_bytes(data),)
        taken = Reader(data)
        messages = tuple(Message.from_bytes(taken.read_bytes()) for _ in range(min(taken.read_int(), MOST + 1)))
        taken.check_end()
    except (WireError, ValueError):
        messages = ()
    if not messages:
        raise QuestionError("key", "it was paid for something else than a question: take another")
    return messages


T = TypeVar("T")

OPEN_ACCOUNT = (
    "`nearveil budget create me --owner me --epsilon 40 --delta 0 --ledger budget.db` opens an account, and "
    'Client(..., account="me", ledger="budget.db") pays from it'
)
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

    `token` makes request keys differ: a server refuses a key that another token has used. `watched` says whether
    somebody else sees when requests are sent: not so for a gallery in this process.
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
        self._patience, self._token, self.watched = patience, token, watched
        self._listed: tuple[GalleryInfo, ...] = ()
        self._chosen: dict[tuple[str | None, GalleryKind], GalleryInfo] = {}  # by the name that was asked for
        self._maps: dict[tuple[str, float | None], tuple[str, PublicPart]] = {}
        self._models: dict[str | None, KeptModel] = {}  # by the name that was asked for

    async def end_slot(self, since: float, period: float) -> None:
        """Wait for the end of a slot of private work, if somebody watches.

        `since` is the time of a public event; `period`, in seconds, depends on public sizes alone.
        """
        if self.watched:
            await self.clock.until(slot_end(since, period, self.clock.now()))

    async def find_payer(self, gallery: str | None) -> Payer:
        """Return who pays, or say that there must be somebody, unless the gallery cannot be asked at all."""
        if self.account is None:
            await self.find_gallery(gallery, "open")
            raise QuestionError("account", f"somebody must pay: {OPEN_ACCOUNT}; or ask with epsilon=0")
        return self.account

    async def fetch_galleries(self, tally: Tally | None = None) -> tuple[GalleryInfo, ...]:
        """Ask for the galleries that there are."""
        listed = read_json(await self.send(Request("galleries"), tally or Tally()), Galleries).galleries
        self._listed, self._chosen = listed, {}
        return listed

    async def find_gallery(self, name: str | None, kind: GalleryKind) -> GalleryInfo:
        """Return what is known of a gallery: of the one that is named, or of the only one of its kind."""
        return self._find_listed(name, kind) or await self.look_up(name, kind)

    def _find_listed(self, name: str | None, kind: GalleryKind) -> GalleryInfo | None:
        """Return a gallery of the list that is kept, chosen once; None where it must be looked up."""
        known = self._chosen.get((name, kind))
        if known is None and any(name in (None, one.name) for one in self._listed):
            known = self._chosen[name, kind] = _choose_gallery(self._listed, name, kind)
        return known

    async def look_up(self, name: str | None, kind: GalleryKind, tally: Tally | None = None) -> GalleryInfo:
        """Ask for the list, and choose a gallery of it."""
        listed = await self.fetch_galleries(tally)
        self._chosen[name, kind] = found = _choose_gallery(listed, name, kind)
        return found

    async def prepare_features(self, images: Images, name: str | None) -> tuple[GalleryInfo, list[NDArray[Any]]]:
        """Return an open gallery and the features of images for it, before the first request of their question.

        Images are decoded before anything is sent, and a slot ends between private work and what is sent next.
        """
        if isinstance(images, (str, bytes, os.PathLike)) or not hasattr(images, "__iter__"):
            raise QuestionError("images", "it must be a list of images; prepare_sealed(n) prepares sealed questions")
        tally = Tally(heard=self.clock.now())
        info = self._find_listed(name, "open")  # now: another question's list may come while images are decoded
        given = await asyncio.to_thread(decode_images, images)
        if self.features.needs_gallery(given):
            if info is None:
                await self.end_slot(tally.heard, EXTRACTION_PERIOD)
                info = await self.look_up(name, "open", tally)
            rows = await asyncio.to_thread(self.features.extract, given, info)
            await self.end_slot(tally.heard, EXTRACTION_PERIOD)
        else:
            rows = await asyncio.to_thread(self.features.extract, given)
            if any(image.ndim > 1 for image in given):
                await self.end_slot(tally.heard, EXTRACTION_PERIOD)
            info = info or await self.look_up(name, "open")
        self.features.check(given, rows, info)
        return info, rows

    async def fetch_map(self, info: GalleryInfo, candidates: float | None, tally: Tally) -> PublicPart:
        """Return the map of a gallery as it is now. What is held already is not sent again."""
        etag, kept = self._maps.get((info.name, candidates), ("", None))
        most = HEADER_BYTES + DEFAULT_LIMITS.public_part
        response = await self.send(Request("map", info.name, candidates=candidates, etag=etag, most=most), tally)
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
        info = await self.look_up(gallery, "protected")
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
        return read_bytes(await self.send(request, Tally()))

    async def send_query(self, info: GalleryInfo, body: bytes, nonce: str, *, most: int, tally: Tally) -> Response:
        """Send the frame of a query. The same frame with the same nonce is the same request, at any time.

        The key of a debit is not sent in any form: it may be short, and the server could guess it.
        """
        text = f"{self._token}\0query\0{info.name}\0".encode() + body
        key = hmac.digest(nonce.encode(), text, "sha256").hex()[:32]
        return await self.send(Request("query", info.name, body, key, most=max(most, _LEAST_REPLY)), tally)

    async def send(self, request: Request, tally: Tally) -> Response:
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
        body = read_bytes(await self.send(Request("model", info.name, most=MOST_MODEL), Tally()))
        if hashlib.sha256(body).hexdigest() != info.version:
            raise ReplyError(
                "the model is another than the gallery names: it may have published one just now; ask again"
            )
        model = await asyncio.to_thread(_read_model, body)
        if model.n_features != info.dimension:
            raise ReplyError("the model is of other features than the gallery's")
        return model

    @contextmanager
    def _forgetting(self, gallery: str) -> Iterator[None]:
        """Look anew next time if a gallery is not what it was."""
        try:
            yield
        except ValueError:
            self._listed, self._chosen = (), {}
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


CLASSIFYING_PERIOD = 0.1  # seconds: a matrix of at most 16 MiB and a row
NOTHING_TOLD = Guarantee(
    epsilon=0.0,
    delta=0.0,
    protects="query",
    unit="record",
    relation="replace",
    basis=Basis("no request depends on the image", "docs/theory/service.md"),
    events=(NoOpDpEvent(),),
)
USUAL = 8  # neighbours
Way = Literal["auto", "message", "home", "sealed"]
Filter: TypeAlias = Mapping[str, Any] | Callable[[Match], bool]
"""Which matches are wanted: those whose metadata has these values, or those for which a function is true."""
_UTF8 = 4  # bytes of a character, at most


@dataclass(frozen=True)
class NearestQuestion:
    """A question as the user puts it, checked as far as that is possible without a gallery."""

    image: Image = field(repr=False)
    k: int | None
    epsilon: float
    candidates: float | None
    gallery: str | None
    thumbnails: bool
    originals: bool
    dummies: Images = field(repr=False)
    key: str | None
    rng: Source | None
    by: Way = "auto"
    repeat: int = 1
    where: Filter | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self._check_way()
        if self.epsilon != 0:
            checked_epsilon(self.epsilon)
        if self.k is not None and (isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 1):
            raise QuestionError("k", "it must be a whole number of at least 1")
        fraction = self.candidates
        if fraction is not None and not (isinstance(fraction, (int, float)) and 0 < fraction <= 1):
            raise QuestionError("candidates", "it must be a fraction of the gallery, above 0 and at most 1")
        if self.thumbnails and self.originals:
            raise QuestionError("originals", "ask for thumbnails or for originals, not for both")
        if len(self.dummies) > MOST:
            raise QuestionError("dummies", f"at most {MOST}")
        if self.key is not None:
            check_text(self.key, "key")
        if not (self.where is None or callable(self.where) or isinstance(self.where, Mapping)):
            raise QuestionError("where", "it must be a mapping of metadata, or a function of a match")

    def _check_way(self) -> None:
        if self.by not in get_args(Way):
            raise QuestionError("by", f"it must be one of {', '.join(get_args(Way))}")
        if (self.epsilon == 0) == (self.by == "message") and self.by != "auto":
            free = f"{self.by} tells nothing and costs nothing, so epsilon must be 0, and is {self.epsilon}"
            words = "a message needs an epsilon above 0: home and sealed are for 0" if self.by == "message" else free
            raise QuestionError("by", words)
        if isinstance(self.repeat, bool) or not isinstance(self.repeat, int) or not 1 <= self.repeat <= MOST_REPEATED:
            raise QuestionError("repeat", f"it must be a whole number from 1 to {MOST_REPEATED}")
        if self.repeat > 1 and self.epsilon == 0:
            raise QuestionError("repeat", "at epsilon 0 nothing is sent: leave it out")


async def ask_nearest(session: Session, question: NearestQuestion) -> Nearest:
    """Find the nearest images: find the map, pay, ask, choose. Nothing is sent after the choice."""
    tally = Tally()
    with _unpaid():
        account = await session.find_payer(question.gallery)
        info, rows = await session.prepare_features([question.image, *question.dummies], question.gallery)
        _check_filter(question.where, info)
        public = await session.fetch_map(info, question.candidates, tally)
    client = await asyncio.to_thread(ClientProtocol, question.epsilon, public=public)
    count, plan = count_matches(question.k, client.n_candidates), _plan_extras(question, public)
    key = make_key(question.key)

    def pay() -> PaidMessages:
        def repeat() -> tuple[Message, ...]:
            return make_dummy_messages(rows[:1] * (question.repeat - 1), public, question.epsilon, question.rng)

        dummies = make_dummy_messages(rows[1:], public, question.epsilon, question.rng)
        paid = PaidMessages(account, key, dummies, question.rng, repeat, question.repeat)
        paid.ask(client, rows[0])
        return paid

    with _noting(key):
        paid = await finish_in_thread(pay)
        await session.end_slot(tally.heard, client.question_period(len(rows) - 1 + question.repeat))
        try:
            replies: list[tuple[Extras, bytes]] = []
            for message in paid.messages:
                for extras in plan:
                    body, most = Query(message, extras).to_bytes(), _most(public, extras)
                    response = await session.send_query(info, body, paid.nonce, most=most, tally=tally)
                    replies.append((extras, _read_reply(client, response, extras)))
            result = await asyncio.to_thread(_choose, client, rows[0], replies, count, paid, key, tally, question.where)
            # Whatever the caller does next, such as hanging up, must not tell how long the choice took.
            size = sum(len(data) for _, data in replies)
            await session.end_slot(tally.heard, client.choice_period(len(replies), size))
            return result
        except Exception as error:
            raise unanswered(error, key) from error


@contextmanager
def _unpaid() -> Iterator[None]:
    """Say of a server that cannot be reached that nothing was paid."""
    try:
        yield
    except UnreachableError as error:
        raise UnreachableError(f"{error}; nothing was paid", again=error.again) from None


def _check_filter(where: Filter | None, info: GalleryInfo) -> None:
    """Refuse a filter that no item passes because none has such a key. Nothing is sent for it: a filter is private."""
    keys = info.metadata_keys
    if isinstance(where, Mapping) and keys is not None and (unknown := where.keys() - set(keys)):
        there = ", ".join(keys) or "none"
        words = f"no item has {min(unknown)!r} in its metadata; the keys are: {there} (client.galleries() looks again)"
        raise QuestionError("where", words)


async def classify_image(session: Session, image: Image, gallery: str | None) -> Classified:
    """Classify an image at home. All requests are sent before the image is looked at; most calls send none."""
    kept = await session.fetch_model(gallery)
    since = session.clock.now()
    given = await asyncio.to_thread(decode_images, [image])
    (row,) = await asyncio.to_thread(session.features.extract, given, kept.info)
    session.features.check(given, [row], kept.info)
    chances = await asyncio.to_thread(_find_probabilities, kept.model, row)
    # Whatever the caller does next, such as hanging up, must not tell how long this took.
    await session.end_slot(since, EXTRACTION_PERIOD if given[0].ndim > 1 else CLASSIFYING_PERIOD)
    found = dict(zip(kept.model.classes.tolist(), chances, strict=True))
    label = max(found, key=found.__getitem__)
    return Classified(label, found, NOTHING_TOLD, kept.model.guarantee, _caution(kept.model))


def _caution(model: "PublicDiscriminant") -> str:
    """Return a warning of much noise, or nothing. It depends on the model alone."""
    noisy = len(model.noisy_classes)
    if not noisy:
        return ""
    return (
        f"The model has much noise: {noisy} of its {len(model.classes)} classes have fewer than five times as many "
        f"records as there is noise on their count (± {model.noise_per_class:.2g}). Expect wrong answers."
    )


def _find_probabilities(model: "PublicDiscriminant", row: NDArray[Any]) -> list[float]:
    with np.errstate(all="ignore"):  # a model of bad will may hold numbers of any size
        try:
            found = model.predict_proba(row[None])[0]
        except ValueError:
            found = np.array([np.nan])
    if not np.isfinite(found).all():
        raise ReplyError("the model gives no probabilities: its numbers are beyond all bounds")
    chances: list[float] = found.tolist()
    return chances


@contextmanager
def _noting(key: str) -> Iterator[None]:
    """Tell whoever interrupts or cancels a question that may be paid for how to go on."""
    try:
        yield
    except Exception:
        raise
    except BaseException as stopped:
        stopped.add_note(note_key(key))
        raise


def note_key(key: str) -> str:
    """Return how to go on with a question that was stopped."""
    return f"key={key!r} asks the same again: it is paid for at most once"


def make_key(key: str | None) -> str:
    """Return the key that was given, or a new one."""
    if key is not None:
        return key
    from nearveil.ledger import new_key  # a client that never pays loads no ledger

    return new_key()


def check_many(rows: Any, keys: Sequence[str] | None) -> tuple[NDArray[np.float32], list[str]]:
    """Return rows to ask about, and a key for each; nothing was asked where one is wrong."""
    given = as_rows(rows)
    if not is_in_range(given):
        raise QuestionError("rows", OUT_OF_RANGE)
    names = [make_key(None) for _ in given] if keys is None else list(keys)
    for key in names:
        check_text(key, "keys")
    if len(names) != len(given) or len(set(names)) != len(names):
        raise QuestionError("keys", f"there must be {len(given):,}, one for each row, and no two the same")
    return normalize_rows(given, "rows:"), names


def count_matches(k: int | None, candidates: int) -> int:
    """Return how many matches there will be, or say that so many cannot be."""
    if k is None:
        return min(USUAL, candidates)
    if k > candidates:
        raise QuestionError("k", f"at most {candidates}, the items of an answer")
    return k


def _plan_extras(question: NearestQuestion, public: PublicPart) -> tuple[Extras, ...]:
    """Return what comes with all candidates; each in a request of its own."""
    wanted: list[Extras] = []
    for word, asks in (("thumbnails", question.thumbnails), ("originals", question.originals)):
        if asks and word not in public.offers:
            raise QuestionError(word, f"this gallery does not offer {word}")
        if asks:
            wanted.append(word)  # type: ignore[arg-type]
    if isinstance(question.where, Mapping) and "metadata" not in public.offers:
        raise QuestionError("where", "this gallery does not offer metadata")
    if "metadata" in public.offers:
        wanted.append("metadata")  # the names are in it
    elif "names" in public.offers:
        wanted.append("names")
    return tuple(wanted) or ("none",)


def _most(public: PublicPart, extras: Extras) -> int:
    """Return how many bytes an answer may have."""
    whole = HEADER_BYTES + DEFAULT_LIMITS.answer
    if extras not in ("none", "names"):
        return whole
    name = IMAGE_HEADER_BYTES + _UTF8 * LONGEST_NAME if extras == "names" else 0
    return min(whole, Answer.header_bytes + public.map.set_size * (ID_BYTES + public.table.width + name))


def _read_reply(client: ClientProtocol, response: Response, extras: Extras) -> bytes:
    """Return the frame of an answer, as it came; raise if the server does not answer."""
    data = read_frame(response)
    if response.status != 200:
        client.read_answer(data, extras)  # says why
        raise make_refusal(response)
    return data


def select_matches(matches: Sequence[Match], where: Filter | None, k: int) -> list[int]:
    """Return the places of the first k matches that a filter takes. It sees all of them: their number is public.

    Examples
    --------
    >>> found = [Match(0, "a", 0.9, metadata={"lang": "de"}), Match(1, "b", 0.8, metadata={"lang": "en"})]
    >>> select_matches(found, {"lang": "en"}, 8), select_matches(found, lambda match: match.similarity > 0.5, 8)
    ([1], [0, 1])
    """
    if where is None:
        return list(range(min(k, len(matches))))
    if isinstance(where, Mapping):
        nothing, pairs = object(), list(where.items())
        kept = [all(match.metadata.get(name, nothing) == value for name, value in pairs) for match in matches]
    else:
        kept = [bool(where(match)) for match in matches]
    return [place for place, wanted in enumerate(kept) if wanted][:k]


def _choose(
    client: ClientProtocol,
    row: NDArray[Any],
    replies: Sequence[tuple[Extras, bytes]],
    k: int,
    paid: PaidMessages,
    key: str,
    tally: Tally,
    where: Filter | None,
) -> Nearest:
    best = client.best_set()
    answers = [client.read_answer(data, extras) for extras, data in replies]
    first = answers[0].extras
    told: dict[int, ItemDetails] = {}
    for answer in answers:
        if answer.extras in ("names", "metadata"):
            for number, data in zip(answer.ids.tolist(), answer.images, strict=True):
                told.setdefault(number, ItemDetails(data.decode()) if answer.extras == "names" else read_details(data))
    found = client.choose([one for one in answers if one.extras == first], k if where is None else client.n_candidates)
    images: Sequence[bytes | None] = found.images if first in ("thumbnails", "originals") else [None] * len(found.ids)
    nothing = ItemDetails()
    ranked = [
        Match(number, about.name, min(score, 1.0), image, about.external_id, about.metadata)  # rounding may pass 1
        for number, score, image in zip(found.ids.tolist(), found.scores.tolist(), images, strict=True)
        for about in (told.get(number, nothing),)
    ]
    places = select_matches(ranked, where, k)
    if where is not None:
        kept = tuple(found.images[place] for place in places) if found.images else ()
        found = Found(found.ids[places], found.codes[places], kept, found.answer, found.scores[places])
    names = {number: about.name for number, about in told.items()}
    sets = tuple(int(message["sets"][0]) for message in paid.messages)
    return Nearest(
        matches=tuple(ranked[place] for place in places),
        guarantee=multiply_guarantee(client.guarantee, paid.repeat),
        key=key,
        repeated=paid.repeated,
        n_candidates=len(found.answer.ids),
        sets=sets,
        n_sets=client.public.map.n_sets,
        bytes_sent=tally.sent,
        bytes_received=tally.received,
        found=found,
        names=names,
        repeat=paid.repeat,
        named_best_set=best in sets,
        expected_share=find_share(client.public, row, sets),
    )
