"""The questions of a client: the nearest images of an open gallery, and the class of an image by a published model.

Requests are a function of messages, of nonces and of public things: never of the feature, of scores or of what was
chosen (``docs/theory/service.md``; attacked by ``tests/service/test_client_wire.py``).

All work on private values runs in a :class:`~nearveil.client.timing.PrivateStep`, which ends at a moment that
public sizes fix, on success and on error.
"""

import asyncio
import hashlib
import hmac
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, get_args

import numpy as np
from dp_accounting import NoOpDpEvent
from numpy.typing import ArrayLike, NDArray

from nearveil.client.errors import QuestionError, ReplyError, UnansweredError, UnreachableError, unanswered
from nearveil.client.results import Classified, Match, Nearest
from nearveil.client.timing import Clock, PrivateStep, extraction_period, needs_extraction
from nearveil.client.transport import (
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
from nearveil.features import Extractor, ImageError, load_image
from nearveil.features.backbones import find_extractor
from nearveil.features.images import COLOURS, Pixels
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
from nearveil.mechanisms.covers.channels import check_channel_epsilon
from nearveil.privacy import Basis, Guarantee
from nearveil.privacy.checks import as_rows, check_text, is_integer, normalize_rows
from nearveil.privacy.noise import Source
from nearveil.wire.client import (
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
from nearveil.wire.frames import DEFAULT_LIMITS, HEADER_BYTES
from nearveil.wire.schema import MOST_MODEL, Galleries, GalleryInfo, GalleryKind

if TYPE_CHECKING:
    from nearveil.ledger import Debit
    from nearveil.private_knn import PublicDiscriminant

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
        """Return the features of images; vectors are passed through."""
        given = decode_images(images)
        found = self.extract(given, info)
        self.check(given, found, info)
        return found

    def needs_gallery(self, images: Images) -> bool:
        """Return whether the extractor of these images is known only from the gallery."""
        return self._given is None and any(map(needs_extraction, images))

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
    return "image" if number == 0 else f"images[{number}]"


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
    if needs_extraction(image):
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


class Payer(Protocol):
    """Who pays: an account, or what opens one when there is something to pay."""

    def spend(self, guarantee: Guarantee, key: str, /) -> "Debit":
        """Debit a guarantee under a key, durably, or find the debit of that key."""
        ...


def pay_for_message(
    client: ClientProtocol, row: ArrayLike, account: Payer, key: str, rng: Source | None
) -> tuple["Debit", Message]:
    """Debit the account, then make the message and store it; a key that was paid before returns its stored message."""
    debits: list[Debit] = []

    def spend(guarantee: Guarantee) -> "Debit":
        debits.append(account.spend(guarantee, key))
        if debits[0].repeated:
            read_stored_message(debits[0].message)
        return debits[0]

    try:
        query: Query = decode_frame(client.ask(row, spend=spend, rng=rng), Query)
    except ProtocolError:
        if not (debits and debits[0].repeated):
            raise
        raise UnansweredError("the gallery has another map than when this key was paid for", key, again=False) from None
    return debits[0], query.message


def read_stored_message(data: bytes | None) -> Message:
    """Return the message that was stored with a debit."""
    try:
        if data is not None:
            return Message.from_bytes(data)
    except ValueError:
        pass
    raise QuestionError(
        "key", "this key paid for something else, or for a question with dummies in version 0.2; use a new key"
    )


OPEN_ACCOUNT = (
    "`nearveil budget create me --owner me --epsilon 40 --delta 0 --ledger budget.db` opens an account, and "
    'Client(..., account="me", ledger="budget.db") pays from it'
)
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


@dataclass(frozen=True)
class KeptModel:
    """A model, the gallery that it is of, and when that was last asked about it."""

    info: GalleryInfo
    model: "PublicDiscriminant"
    checked: float


class Session:
    """Knows the galleries with their maps and models, and sends requests, again where no reply came.

    `token` makes request keys differ: a server refuses a key that another token has used. `pad_timing` says whether
    private steps wait for their deadlines: not for a gallery in this process, where nobody else sees requests.
    """

    def __init__(
        self,
        transport: Transport,
        account: Payer | None,
        features: FeatureMaker,
        patience: Patience,
        token: str,
        *,
        pad_timing: bool,
    ) -> None:
        self.transport, self.account, self.features, self.clock = transport, account, features, Clock()
        self._patience, self._token, self.pad_timing = patience, token, pad_timing
        self._listed: tuple[GalleryInfo, ...] = ()
        self._chosen: dict[tuple[str | None, GalleryKind], GalleryInfo] = {}  # by the name that was asked for
        self._maps: dict[tuple[str, float | None], tuple[str, PublicPart]] = {}
        self._models: dict[str | None, KeptModel] = {}  # by the name that was asked for

    def private_step(self, since: float, period: float) -> PrivateStep:
        """Return the context for private work; `since` is the time of a public event, `period` from public sizes."""
        return PrivateStep(self.clock, since, period, pad_timing=self.pad_timing)

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

        Images are decoded before anything is sent.
        """
        if isinstance(images, (str, bytes, os.PathLike)) or not hasattr(images, "__iter__"):
            raise QuestionError("images", "it must be a list of images; prepare_sealed(n) prepares sealed questions")
        tally, period = Tally(heard=self.clock.now()), extraction_period(images)
        info = self._find_listed(name, "open")  # now: another question's list may come while images are decoded
        rows: list[NDArray[Any]] | None = None
        async with self.private_step(tally.heard, period) as step:
            pixels = await step.run(decode_images, images)
            if info is not None or not self.features.needs_gallery(images):
                rows = await step.run(self.features.extract, pixels, info)
        info = info or await self.look_up(name, "open", tally)
        if rows is None:
            async with self.private_step(tally.heard, period) as step:
                rows = await step.run(self.features.extract, pixels, info)
        self.features.check(pixels, rows, info)
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
        if not is_integer(number, 0, (1 << 32) - 1):
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
    from nearveil.private_knn import PublicDiscriminant

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


_CLASSIFYING = 0.1  # seconds to classify, besides the numbers of the model
_CLASSIFYING_NUMBER = 2e-8  # seconds for each number of the projection and the weights
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
_TEXTS = ("names", "metadata")  # extras that are text
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
    key: str | None
    rng: Source | None
    by: Way = "auto"
    where: Filter | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self._check_way()
        if self.epsilon != 0:
            check_channel_epsilon(self.epsilon)
        if self.k is not None and not is_integer(self.k, 1):
            raise QuestionError("k", "it must be a whole number of at least 1")
        fraction = self.candidates
        if fraction is not None and not (isinstance(fraction, (int, float)) and 0 < fraction <= 1):
            raise QuestionError("candidates", "it must be a fraction of the gallery, above 0 and at most 1")
        if self.thumbnails and self.originals:
            raise QuestionError("originals", "ask for thumbnails or for originals, not for both")
        if self.key is not None:
            check_text(self.key, "key")
        if not (self.where is None or callable(self.where) or isinstance(self.where, Mapping)):
            raise QuestionError("where", "it must be a mapping of metadata, or a function of a match")

    def _check_way(self) -> None:
        if self.by not in get_args(Way):
            raise QuestionError("by", f"it must be one of {', '.join(get_args(Way))}")
        if (self.epsilon == 0) == (self.by == "message") and self.by != "auto":
            free = f"{self.by} tells nothing and costs nothing: pass epsilon=0; it is {self.epsilon} (4.0 by default)"
            words = "a message needs an epsilon above 0: home and sealed are for 0" if self.by == "message" else free
            raise QuestionError("by", words)


async def ask_nearest(session: Session, question: NearestQuestion) -> Nearest:
    """Find the nearest images with one differentially private message: find the map, pay, ask, choose.

    The order is the guarantee: the debit is durable before the message exists, and nothing is sent after the choice.
    """
    tally = Tally()
    with _unpaid():
        account = await session.find_payer(question.gallery)
        info, (row,) = await session.prepare_features([question.image], question.gallery)
        _check_filter(question.where, info)
        public = await session.fetch_map(info, question.candidates, tally)
    client = await asyncio.to_thread(ClientProtocol, question.epsilon, public=public)
    count, plan = count_matches(question.k, client.n_candidates), _plan_extras(question, public)
    key = make_key(question.key)
    with _attach_retry_note(key):
        async with session.private_step(tally.heard, client.question_period()) as step:
            debit, message = await step.run_to_end(lambda: pay_for_message(client, row, account, key, question.rng))
        try:
            replies: list[tuple[Extras, bytes]] = []
            for extras in plan:
                body, most = Query(message, extras).to_bytes(), _most(public, extras)
                response = await session.send_query(info, body, debit.nonce, most=most, tally=tally)
                replies.append((extras, _read_reply(client, response, extras)))
            size = sum(len(data) for _, data in replies)
            text_bytes = sum(len(data) for extras, data in replies if extras in _TEXTS)
            filtered = question.where is not None
            period = client.choice_period(len(replies), size, text_bytes=text_bytes, filtered=filtered)
            async with session.private_step(tally.heard, period) as step:
                return await step.run(_choose, client, row, replies, count, debit, message, tally, question.where)
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
    since, period = session.clock.now(), extraction_period([image]) + classification_period(kept.model)
    async with session.private_step(since, period) as step:
        return await step.run(_classify, session.features, kept, image)


def classification_period(model: "PublicDiscriminant") -> float:
    """Return the seconds for classifying a row, by the sizes of the model."""
    directions = model.projection.n_directions
    return _CLASSIFYING + _CLASSIFYING_NUMBER * directions * (model.n_features + len(model.classes))


def _classify(features: FeatureMaker, kept: KeptModel, image: Image) -> Classified:
    """Extract the feature of an image and classify it. Any model gives finite probabilities."""
    (row,) = features.rows([image], kept.info)
    with np.errstate(all="ignore"):  # were numpy told to raise, an underflow for some features would be an error
        shares = kept.model.predict_proba(row[None])[0].tolist()
    probabilities = dict(zip(kept.model.classes.tolist(), shares, strict=True))
    label = max(probabilities, key=probabilities.__getitem__)
    return Classified(label, probabilities, NOTHING_TOLD, kept.model.guarantee, _caution(kept.model))


def _caution(model: "PublicDiscriminant") -> str:
    """Return a warning of much noise, or nothing. It depends on the model alone."""
    noisy = len(model.noisy_classes)
    if not noisy:
        return ""
    return (
        f"The model has much noise: {noisy} of its {len(model.classes)} classes have fewer than five times as many "
        f"records as there is noise on their count (± {model.noise_per_class:.2g}). Expect wrong answers."
    )


@contextmanager
def _attach_retry_note(key: str) -> Iterator[None]:
    """Add the retry key to an interrupt or cancellation of a question that may be paid for."""
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
    debit: "Debit",
    message: Message,
    tally: Tally,
    where: Filter | None,
) -> Nearest:
    """Rank the candidates of an answer that came in several replies, and filter them."""
    best = client.best_set()
    answers = [client.read_answer(data, extras) for extras, data in replies]
    details: dict[int, ItemDetails] = {}
    for answer in answers:
        if answer.extras in _TEXTS:
            read = read_details if answer.extras == "metadata" else lambda data: ItemDetails(data.decode())
            details |= {number: read(data) for number, data in zip(answer.ids.tolist(), answer.images, strict=True)}
    ranking = client.choose(answers[0], k if where is None else client.n_candidates)
    has_images = answers[0].extras in ("thumbnails", "originals")
    images: Sequence[bytes | None] = ranking.images if has_images else [None] * len(ranking.ids)
    no_details = ItemDetails()
    matches = [
        Match(number, about.name, min(score, 1.0), image, about.external_id, about.metadata)  # rounding may pass 1
        for number, score, image in zip(ranking.ids.tolist(), ranking.scores.tolist(), images, strict=True)
        for about in (details.get(number, no_details),)
    ]
    places = select_matches(matches, where, k)
    if where is not None:
        pictures = tuple(ranking.images[place] for place in places) if ranking.images else ()
        ranking = Found(ranking.ids[places], ranking.codes[places], pictures, ranking.answer, ranking.scores[places])
    named_set = int(message["sets"][0])
    return Nearest(
        matches=tuple(matches[place] for place in places),
        guarantee=client.guarantee,
        key=debit.key,
        repeated=debit.repeated,
        n_candidates=len(ranking.answer.ids),
        set=named_set,
        n_sets=client.public.map.n_sets,
        bytes_sent=tally.sent,
        bytes_received=tally.received,
        found=ranking,
        names={number: about.name for number, about in details.items()},
        named_best_set=best == named_set,
        expected_share=find_share(client.public, row, named_set),
    )
