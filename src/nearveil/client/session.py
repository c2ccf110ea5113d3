"""The state of a client between questions: galleries, maps and models; and requests, with retries."""

import asyncio
import hashlib
import hmac
import os
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

from numpy.typing import NDArray

from nearveil.client.errors import QuestionError, ReplyError, UnreachableError
from nearveil.client.images import FeatureMaker, Images, decode_images
from nearveil.client.timing import Clock, extraction_period, private_step
from nearveil.client.transport import (
    ENDPOINTS,
    HttpTransport,
    LocalTransport,
    Request,
    Response,
    make_printable,
    read_body,
    read_etag,
    read_galleries,
)
from nearveil.mechanisms.messages import MessageError
from nearveil.privacy.checks import is_integer
from nearveil.wire.client import ClientProtocol
from nearveil.wire.client import Payer as _Payer
from nearveil.wire.messages import PublicPart, decode_frame
from nearveil.wire.schema import GalleryInfo, GalleryKind

if TYPE_CHECKING:
    from nearveil.ledger import Debit
    from nearveil.ledger.history import Balance
    from nearveil.private_knn import PublicDiscriminant

Payer: TypeAlias = "_Payer[Debit]"
"""An account, or an object that opens one when it must spend."""

RETRY_STATUSES = (429, 502, 503, 504)
OPEN_ACCOUNT = (
    "`nearveil budget create me --owner me --epsilon 40 --delta 0 --ledger budget.db` opens an account, and "
    'Client(..., account="me", ledger="budget.db") pays from it'
)
MODEL_MAX_AGE = 3600.0  # seconds that a model is used before the client asks for a newer one
_SAME = 1e-9  # difference of fractions that are equal
_MAX_MAPS = 4  # in the cache
_LEAST_REPLY = 1 << 16  # bytes: room for an error message
_WRONG_KIND: dict[GalleryKind, str] = {
    "open": "it is protected, and answers classify only: it shows no candidates",
    "protected": "it is open, and has no model: nearest() queries it",
}
_NONE_OF_KIND: dict[GalleryKind, str] = {
    "open": "none is open, and a protected one answers classify only",
    "protected": "none is protected, and only a protected one has a model",
}


@dataclass(frozen=True)
class RetryPolicy:
    """The number of retries and the pauses between them. Nothing private plays a part."""

    retries: int
    first_pause: float = 0.5  # seconds; doubled before each further retry
    longest_pause: float = 20.0  # seconds, even if the server asks for more

    def pause(self, attempt: int, retry_after: float | None) -> float:
        """Return the seconds to wait after an attempt, counted from 0."""
        seconds = self.first_pause * 2**attempt if retry_after is None else retry_after
        return min(max(seconds, 0.0), self.longest_pause)


@dataclass
class Traffic:
    """Bytes of the bodies of a call, and the time of the last reply."""

    sent: int = 0
    received: int = 0
    last_reply_at: float = 0.0


@dataclass(frozen=True)
class CachedModel:
    """A model of a protected gallery, and the time when the gallery was last asked for a newer one."""

    info: GalleryInfo
    model: "PublicDiscriminant"
    checked_at: float


class Session:
    """The galleries of a server with their maps and models, and requests to it with retries."""

    # `token` makes request keys differ: a server refuses a key that was used with another token. `pad_timing` is False
    # for a gallery in this process, where nobody observes requests: private steps do not wait for their deadlines.

    def __init__(
        self,
        transport: HttpTransport | LocalTransport,
        account: "Payer | None",
        features: FeatureMaker,
        retry_policy: RetryPolicy,
        token: str,
        *,
        pad_timing: bool,
    ) -> None:
        self.transport, self.account, self.features, self.clock = transport, account, features, Clock()
        self._retry_policy, self._token, self.pad_timing = retry_policy, token, pad_timing
        self._galleries: tuple[GalleryInfo, ...] = ()
        self._maps: dict[tuple[str, float | None], tuple[str, PublicPart]] = {}
        self._models: dict[str | None, CachedModel] = {}  # by the requested name

    async def require_account(self, gallery: str | None) -> Payer:
        """Return the account that pays; report a missing gallery before a missing account."""
        if self.account is None:
            await self.find_gallery(gallery, "open")
            raise QuestionError("account", f"an account must pay: {OPEN_ACCOUNT}; or leave epsilon out")
        return self.account

    async def fetch_galleries(self, traffic: Traffic | None = None) -> tuple[GalleryInfo, ...]:
        """Fetch the list of galleries."""
        self._galleries = read_galleries(await self.send(Request("galleries"), traffic or Traffic()))
        return self._galleries

    async def find_gallery(
        self,
        name: str | None,
        kind: GalleryKind,
        traffic: Traffic | None = None,
        *,
        refresh: bool = False,
        published: bool = True,
    ) -> GalleryInfo:
        """Return the gallery of a name, or the only one of its kind; fetch the list if it is not cached."""
        if refresh or not self._is_listed(name):
            await self.fetch_galleries(traffic)
        infos = self._galleries
        listing = ", ".join(f"{info.name} ({info.kind})" for info in infos) or "no galleries"
        matching = [info for info in infos if (info.kind == kind if name is None else info.name == name)]
        if name is None and len(matching) != 1:
            remedy = "name one of them" if matching else _NONE_OF_KIND[kind]
            raise QuestionError("gallery", f"there are {listing}: {remedy}")
        if not matching:
            raise QuestionError("gallery", f"there is none named {make_printable(str(name))!r}; there are {listing}")
        info = matching[0]
        if info.kind != kind:
            raise QuestionError("gallery", f"{info.name}: {_WRONG_KIND[kind]}")
        if published and not info.is_published:
            missing = "map" if info.kind == "open" else "model"
            raise QuestionError("gallery", f"{info.name} has no {missing} yet: publish one, or query another")
        return info

    def _is_listed(self, name: str | None) -> bool:
        return any(name in (None, info.name) for info in self._galleries)

    async def prepare_features(self, images: Images, name: str | None) -> tuple[GalleryInfo, list[NDArray[Any]]]:
        """Return an open gallery and the features of images, which are decoded before the first request is sent."""
        if isinstance(images, (str, bytes, os.PathLike)) or not hasattr(images, "__iter__"):
            raise QuestionError("images", "it must be a list of queries; prepare_sealed(n) prepares sealed queries")
        # Now: the list of another question may come while images are decoded.
        info = await self.find_gallery(name, "open") if self._is_listed(name) else None
        traffic, period = Traffic(last_reply_at=self.clock.now()), extraction_period(images)
        rows: list[NDArray[Any]] | None = None
        async with private_step(self, traffic.last_reply_at, period):
            arrays = await asyncio.to_thread(decode_images, images)
            if info is not None or not self.features.needs_gallery(images):
                fingerprint = None if info is None else info.fingerprint
                rows = await asyncio.to_thread(self.features.extract, arrays, fingerprint)
        info = info or await self.find_gallery(name, "open", traffic, refresh=True)
        if rows is None:
            await asyncio.to_thread(self.features.load, info.fingerprint)  # seconds, if it is a network
            async with private_step(self, self.clock.now(), period):
                rows = await asyncio.to_thread(self.features.extract, arrays, info.fingerprint)
        self.features.check(arrays, rows, info.fingerprint, info.dimension, info.metric)
        return info, rows

    async def fetch_map(self, info: GalleryInfo, candidates: float | None, traffic: Traffic) -> PublicPart:
        """Fetch the current map of a gallery, unless it is cached."""
        etag, cached = self._maps.get((info.name, candidates), ("", None))
        response = await self.send(Request("map", info.name, candidates=candidates, etag=etag), traffic)
        if response.status == 304 and cached is not None:
            return cached
        try:
            public: PublicPart = await asyncio.to_thread(decode_frame, read_body(response), PublicPart)
            if candidates is not None and abs(public.candidates - candidates) > _SAME:
                raise ReplyError("The server sent the map of another fraction than `candidates`")
            listed = (info.fingerprint, info.dimension, info.metric)
            if (public.fingerprint, public.dimension, public.space.metric) != listed:
                raise ReplyError("The features of the gallery have changed since it was listed; query it again")
        except ValueError:  # the gallery has changed in an unexpected way: forget it
            self._galleries = ()
            self._maps = {place: entry for place, entry in self._maps.items() if place[0] != info.name}
            raise
        self._maps[info.name, candidates] = read_etag(response), public
        for oldest in list(self._maps)[:-_MAX_MAPS]:
            del self._maps[oldest]
        return public

    async def fetch_model(self, gallery: str | None) -> CachedModel:
        """Return the model of a gallery; fetch it once, and ask for a newer one at most once an hour."""
        now = self.clock.now()
        cached = self._models.get(gallery)
        if cached is not None and 0 <= now - cached.checked_at < MODEL_MAX_AGE:
            return cached
        info = await self.find_gallery(gallery, "protected", refresh=True)
        if cached is not None and cached.info.version == info.version:
            model = cached.model
        else:
            body = await self.fetch(Request("model", info.name), Traffic())
            if hashlib.sha256(body).hexdigest() != info.version:
                raise ReplyError("The model is not the listed one: the gallery may have published a new one; try again")
            model = await asyncio.to_thread(_read_model, body)
            if model.n_features != info.dimension:
                raise ReplyError("The model has other features than the gallery")
        self._models[gallery] = CachedModel(info, model, now)
        return self._models[gallery]

    async def fetch_original(self, number: int, gallery: str | None) -> bytes:
        """Fetch one original. The request names it."""
        if not is_integer(number, 0, (1 << 32) - 1):
            raise QuestionError("id", "it must be the id of an item, a whole number of 32 bits")
        info = await self.find_gallery(gallery, "open")
        return await self.fetch(Request("original", info.name, number=number), Traffic())

    async def send_query(self, info: GalleryInfo, body: bytes, nonce: str, most: int, traffic: Traffic) -> Response:
        """Send the frame of a query. The same frame with the same nonce is the same request, at any time."""
        # The key of a debit is never sent, not even hashed: it may be short, and the server could guess it.
        text = f"{self._token}\0query\0{info.name}\0".encode() + body
        key = hmac.digest(nonce.encode(), text, "sha256").hex()[:32]
        return await self.send(Request("query", info.name, body, key, most=max(most, _LEAST_REPLY)), traffic)

    async def fetch(self, request: Request, traffic: Traffic) -> bytes:
        """Send a request and return the body of a successful reply; raise the reason of any other."""
        return read_body(await self.send(request, traffic), ENDPOINTS[request.endpoint].media_type)

    async def send(self, request: Request, traffic: Traffic) -> Response:
        """Send a request, and retry it without a change until there is a final reply."""
        for attempt in range(self._retry_policy.retries + 1):
            is_last = attempt == self._retry_policy.retries
            traffic.sent += len(request.body)
            try:
                response = await self.transport.send(request)
            except UnreachableError as error:
                if is_last or not error.again:
                    raise
                await self.clock.pause(self._retry_policy.pause(attempt, None))
                continue
            traffic.last_reply_at = self.clock.now()
            traffic.received += len(response.body)
            if is_last or response.status not in RETRY_STATUSES:
                return response
            await self.clock.pause(self._retry_policy.pause(attempt, response.retry_after))
        raise AssertionError("the last attempt returns or raises")


def read_balance(account: "Payer | None") -> "Balance | None":
    """Return the balance of an account; None if there is none, or it is a payer without a balance."""
    read = getattr(account, "balance", None)
    return None if read is None else read()


@lru_cache(maxsize=8)
def fit_protocol(public: PublicPart, epsilon: float, *, allow_unsound: bool = False) -> ClientProtocol:
    """Return the client's half for a map, fitted once: a map is the same object as long as a session caches it."""
    return ClientProtocol(public, epsilon, allow_unsound)


def _read_model(body: bytes) -> "PublicDiscriminant":
    from nearveil.private_knn import PublicDiscriminant

    try:
        model = PublicDiscriminant.from_bytes(body)
    except MessageError as error:
        raise ReplyError(f"The model cannot be used: {make_printable(str(error))}") from None
    if model.classes.dtype.kind != "U":
        raise ReplyError("The model has class names that are not text")
    return model
