"""What every request passes (its token, its rate, the line that is logged of it), and the state that all share."""

import asyncio
import hashlib
import ipaddress
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NoReturn, TypeVar

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as AsgiScope

from nearveil.gallery.answers import EXTRAS
from nearveil.ledger import LedgerError
from nearveil.service.schema import FRAME, KEY, KEY_HEADER, MOST_GALLERIES, GalleryInfo, Problem
from nearveil.service.server.errors import (
    FieldError,
    MediaError,
    NotOfferedError,
    RateError,
    ServiceError,
    UnauthorizedError,
    UnavailableError,
    UnknownError,
)
from nearveil.service.server.galleries import FLAGS, Gallery, QuickGallery, frame_status
from nearveil.service.server.limits import (
    STRANGERS,
    STRANGERS_WAIT,
    Buckets,
    Look,
    Replays,
    ReplayStore,
    Sending,
    UnderWay,
    Workers,
    read_body,
)
from nearveil.service.server.logs import GalleryFigures, LineWriter, Metrics, described, tell_alive
from nearveil.service.server.settings import Settings
from nearveil.service.server.tokens import Scope, Token, TokenError, TokenStore, TokenStoreError

VISIT = "nearveil.visit"  # where a scope of ASGI holds what is known of a request
GONE = "nearveil.gone"  # where it holds a function that says whether the client has gone
OWNER = "nearveil.owner"  # where it holds a function that is told whose good token the connection's request had
_LITTLE = 1 << 16  # bytes that a body is read that is not wanted


class RequestContext:
    """What is known of one request: for its handler, and for the line that is written of it."""

    __slots__ = (
        "came", "chunked", "content_type", "error", "gallery", "gone", "held", "id", "key", "length", "read", "sent",
        "status", "token", "under_way",
    )  # fmt: skip

    def __init__(self, gone: Callable[[], bool]) -> None:
        self.id = secrets.token_hex(8)
        self.gone = gone
        self.status, self.sent, self.held = 0, 0, 0  # held: of the bytes that all answers under way may have
        self.read = False  # whether its body was read
        self.came: float | None = None  # when that was
        self.under_way: UnderWay | None = None
        self.token: Token | None = None
        self.gallery: str | None = None
        self.error: dict[str, str] | None = None
        self.length: bytes | None = None
        self.chunked, self.content_type, self.key = False, b"", b""

    def may(self, scope: Scope) -> Token:
        """Return the token of the client, if it is good for a scope."""
        if self.token is None:
            raise_unauthorized()
        if not self.token.may(scope):
            raise NotOfferedError(f"this token may not do that: it needs the scope {scope}")
        return self.token

    def begin(self, under_way: UnderWay) -> None:
        """Count as a request of its token until it ends."""
        if self.token is not None:
            under_way.enter(self.token.id)
            self.under_way = under_way

    def end(self, sending: Sending) -> None:
        """Count no more."""
        if self.under_way is not None and self.token is not None:
            self.under_way.leave(self.token.id)
        if self.held:
            self.held = sending.hold(self.held, 0)

    def has_a_little_to_read(self) -> bool:
        """Return whether the client is about to send a small body that nobody has read."""
        if self.read or self.length is None:
            return self.chunked and not self.read
        return self.length.isdigit() and 0 < int(self.length[:6]) <= _LITTLE


def raise_unauthorized() -> NoReturn:
    """Refuse a request without a good token."""
    raise UnauthorizedError("Invalid or revoked token. Send one: Authorization: Bearer nv_...")


T = TypeVar("T")

_LOG = logging.getLogger(__name__)
_KEY, _FRAME = re.compile(KEY), FRAME.encode()
_OWN_THREADS = 4
_LOOK = 2.0  # seconds that a gallery has to show that it can be read
_READY = 1.0  # seconds that a look at all galleries is believed: anybody may ask for one
_MAPS = 8  # of a gallery whose digests are remembered
_SMALL = 1 << 16  # bytes of an answer that a connection takes without waiting, and that are not counted
_ORIGINALS = bytes([EXTRAS.index("originals")])


class LargeAnswer(Response):
    """An answer whose end is sent when its client has read the rest: until then, its request is under way."""

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Send it."""
        del scope, receive
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@dataclass(frozen=True)
class Pools:
    """Threads of one gallery: no other gallery waits for its database, and no answer from codes for its files."""

    answers: Workers
    files: Workers

    @classmethod
    def of(cls, settings: Settings) -> "Pools":
        """Return pools of the sizes that a server is told."""
        few = max(1, settings.concurrency // 4)
        return cls(
            Workers(settings.concurrency, settings.queue, settings.work_timeout),
            Workers(few, settings.queue, settings.work_timeout),
        )


@dataclass(eq=False)
class AppState:
    """All that one server has. Made by `create_app`."""

    galleries: dict[str, Gallery]
    tokens: TokenStore
    settings: Settings
    buckets: Buckets
    under_way: UnderWay
    sending: Sending
    workers: Workers  # for what belongs to no gallery
    pools: dict[str, Pools]
    replays: Replays
    store: ReplayStore | None  # of keys, where several processes answer
    metrics: Metrics = field(default_factory=Metrics)
    lines: LineWriter = field(default_factory=LineWriter)
    tell_alive: Callable[[], None] = tell_alive

    def __post_init__(self) -> None:
        self._quick = {
            name: gallery if isinstance(gallery, QuickGallery) else None for name, gallery in self.galleries.items()
        }
        self._etags: dict[str, list[tuple[bytes, str]]] = {name: [] for name in self.galleries}
        self._sizes: dict[tuple[str, bytes], int] = {}  # of large answers: what the next one will take
        self._ready, self._looked = False, -_READY
        self.look_at_tokens = Look(self.tokens.refresh, self.settings.work_timeout, self.tokens.believed)
        self._looks = {name: Look(one.refresh, self.settings.work_timeout) for name, one in self.galleries.items()}
        # Questions have looks of their own: where keys cannot be noted, what everybody may read is read all the same.
        self._asking = {
            name: Look(one.refresh if self._quick[name] else _nothing, self.settings.work_timeout, store=self.store)
            for name, one in self.galleries.items()
        }

    @classmethod
    def of(cls, galleries: Sequence[Gallery], tokens: TokenStore, settings: Settings) -> "AppState":
        """Return what a server with these settings has."""
        named = {gallery.name: gallery for gallery in galleries}
        if len(named) != len(galleries):
            raise ValueError("galleries must have names of their own")
        if len(named) > MOST_GALLERIES:
            raise ValueError(f"galleries must be at most {MOST_GALLERIES}: clients read no longer list")
        return cls(
            named,
            tokens,
            settings,
            Buckets(settings.rate, settings.burst),
            UnderWay(settings.per_token),
            Sending(settings.sending),
            Workers(_OWN_THREADS, settings.queue, settings.work_timeout),
            {name: Pools.of(settings) for name in named},
            Replays(is_shared=settings.shared),
            ReplayStore(settings.tokens, settings.database_timeout) if settings.shared else None,
            lines=LineWriter(settings.log_file),
        )

    def gallery(self, visit: RequestContext, name: str) -> Gallery:
        """Return a gallery that the token of a request may use. Others are as if they were not there."""
        token = visit.may("query")
        found = self.galleries.get(name)
        if found is None or not token.may_use(name):
            raise UnknownError("there is no such gallery, or this token may not use it")
        visit.gallery = name
        return found

    async def infos(self, visit: RequestContext) -> list[GalleryInfo]:
        """Return what may be known of all galleries that a token may use; one that does not answer hides no other."""
        token = visit.may("query")
        found = await self.look([gallery for name, gallery in self.galleries.items() if token.may_use(name)])
        known = [info for info in found if isinstance(info, GalleryInfo)]
        errors = [error for error in found if isinstance(error, ServiceError)]
        if errors and not known:
            raise errors[0]
        return known

    async def look(self, galleries: Sequence[Gallery]) -> list[GalleryInfo | ServiceError]:
        """Return what may be known of each gallery, or why it cannot be read now."""

        async def info(gallery: Gallery) -> GalleryInfo | ServiceError:
            try:
                return await self.pools[gallery.name].answers.run(gallery.info, patience=_LOOK)
            except ServiceError as error:
                return error

        return await asyncio.gather(*(info(gallery) for gallery in galleries))

    async def figures(self, gallery: Gallery) -> GalleryFigures:
        """Return the figures of a gallery."""
        try:
            return await self.pools[gallery.name].answers.run(lambda: GalleryFigures.of(gallery), patience=_LOOK)
        except (ServiceError, LedgerError):
            return GalleryFigures(gallery.name)

    async def run(self, visit: RequestContext, gallery: Gallery, work: Callable[[], T], *, files: bool = False) -> T:
        """Do some work of a gallery for a request in a thread, if its client is still there when its turn comes."""
        pools = self.pools[gallery.name]
        workers = pools.files if files else pools.answers
        return await workers.run(work, may_begin=lambda: not visit.gone())

    async def question(self, request: Request, what: str = "query", most: int | None = None) -> tuple[Gallery, bytes]:
        """Return which gallery is asked what: of a request that holds a frame, under a key that fits it.

        `most`: Bytes of the frame; those of a query by default.
        """
        visit = get_context(request)
        name = request.path_params["gallery"]
        token, gallery = visit.may("query"), self.gallery(visit, name)
        key = visit.key.decode("latin-1")
        if not _KEY.fullmatch(key):
            raise FieldError(f"{KEY_HEADER}: it must be there, and fit {KEY}")
        if visit.content_type.partition(b";")[0].strip().lower() != _FRAME:
            raise MediaError(f"the body must be of the type {FRAME}")
        settings = self.settings
        limit = settings.max_body if most is None else most
        data = await read_body(visit.length, visit.chunked, request.receive, limit, settings.body_timeout)
        visit.read, visit.came = True, time.monotonic()
        visit.begin(self.under_way)
        if data[FLAGS : FLAGS + 1] == _ORIGINALS:
            visit.may("originals")
        await self.replays.check(key, token.id, f"{name}/{what}", data, self._asking[name])
        return gallery, data

    async def map(self, visit: RequestContext, gallery: Gallery, candidates: float | None) -> tuple[bytes, str]:
        """Return the frame of a map and its ETag."""
        quick, frame = self._quick[gallery.name], None
        if quick is not None:
            await self._looks[gallery.name].take()
            frame = quick.known_map(candidates)
        if frame is None:
            frame = await self.run(visit, gallery, lambda: gallery.map(candidates))
        return frame, self.etag(gallery, frame)

    def etag(self, gallery: Gallery, content: bytes) -> str:
        """Return the ETag of a map or a model of a gallery; it is made once."""
        known = self._etags[gallery.name]
        for held, etag in known:
            if held is content:
                return etag
        etag = f'"{hashlib.sha256(content).hexdigest()}"'
        self._etags[gallery.name] = [*known[1 - _MAPS :], (content, etag)]
        return etag

    async def query(self, visit: RequestContext, gallery: Gallery, data: bytes) -> Response:
        """Ask a gallery for candidates: at once where it can, else in a thread."""
        quick, reply = self._quick[gallery.name], None
        if quick is not None:
            await self._asking[gallery.name].take(visit.came)
            reply = quick.known(data)
        if reply is None:
            kind = gallery.name, data[FLAGS : FLAGS + 1]
            visit.held = self.sending.hold(visit.held, self._sizes.get(kind, 0))  # before memory is taken for it
            files = data[FLAGS : FLAGS + 1] == _ORIGINALS
            reply = await self.run(visit, gallery, lambda: gallery.query(data), files=files)
            self.metrics.made.inc()
            if len(reply) > _SMALL:
                self._sizes[kind] = len(reply)
        return self.framed(visit, reply)

    def framed(self, visit: RequestContext, reply: bytes) -> Response:
        """Return a frame with the status that belongs to what it says."""
        status = frame_status(reply)
        return self.reply(visit, reply, FRAME, status, {"retry-after": "2"} if status == 503 else None)

    def reply(
        self, visit: RequestContext, body: bytes, kind: str, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> Response:
        """Return an answer; BusyError where it is large, and too much waits for clients to read it."""
        large = len(body) > _SMALL
        visit.held = self.sending.hold(visit.held, len(body) if large else 0)
        return (LargeAnswer if large else Response)(body, status, headers, kind)

    def alive(self) -> bool:
        """Return whether every pool still has a thread that can begin some work."""
        return not any(workers.is_stuck() for workers in self._all_workers())

    async def ready(self) -> bool:
        """Return whether tokens and galleries can be read, each has published something, and the log can be written."""
        if time.monotonic() - self._looked >= _READY:
            self._looked = time.monotonic()
            self._ready = await self._look()
        return self._ready

    async def refresh(self) -> None:
        """Look whether something new was published."""
        looks = {"tokens": self.look_at_tokens, **{f"gallery {name}": one for name, one in self._looks.items()}}
        await asyncio.gather(*(_refresh(words, look) for words, look in looks.items()))

    def close(self) -> None:
        """Let no more work begin, and write what is left to write."""
        for workers in self._all_workers():
            workers.close()
        if self.store is not None:
            self.store.close()
        self.lines.close()

    def _all_workers(self) -> Iterator[Workers]:
        yield self.workers
        yield from (look.workers for look in (self.look_at_tokens, *self._looks.values(), *self._asking.values()))
        for pools in self.pools.values():
            yield from (pools.answers, pools.files)

    async def _look(self) -> bool:
        try:
            async with asyncio.timeout(_LOOK):
                await self.look_at_tokens.take()
                if self.lines.failing or not await self.workers.run(self.tokens.has_room):
                    return False
        except (ServiceError, TokenError, TimeoutError):
            return False
        found = await self.look(list(self.galleries.values()))
        return all(isinstance(info, GalleryInfo) and info.is_published for info in found)


def _nothing() -> None:
    """Look at nothing."""


async def _refresh(words: str, look: Look) -> None:
    """Look, and tell the log what is wrong."""
    try:
        await look.take()
    except ServiceError as error:
        _LOG.warning("%s cannot be read: %s", words, error.code)
    except Exception as error:  # the others go on; what it says may be private
        _LOG.error("%s cannot be read: %s", words, type(error).__name__)


def get_context(request: Request) -> RequestContext:
    """Return what is known of a request."""
    visit: RequestContext = request.scope[VISIT]
    return visit


def network_of(client: Sequence[Any] | None) -> str:
    """Return whose limits count: an address; of IPv6 the network, because one machine has all addresses of it.

    Examples
    --------
    >>> [network_of(client) for client in (("192.0.2.1", 5), ("2001:db8::1:2", 5), None)]
    ['192.0.2.1', '2001:db8::/64', '']
    """
    address = str(client[0]) if client else ""
    if ":" not in address:
        return address
    with suppress(ValueError):
        return str(ipaddress.IPv6Network((address.partition("%")[0], 64), strict=False))
    return address


ASKED = "/v1/galleries/{gallery}/"  # where private questions are asked: of the rest, one word is left
UNMATCHED = "unmatched"
_CLOSING = frozenset((408, 411, 413))  # what is left of the body is not read
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
_HEALTH = "/health"
_WATCHERS = 600.0, 600, 4096  # requests a minute of one address for what anybody may ask, at once, and addresses
_LINGER = 2.0  # seconds that a body is read that is not wanted
_GUARDED = ("/v1", "/metrics")
_OPEN = (_HEALTH, "/ready", "/openapi.json")
_BEFORE_NAME = ASKED.partition("{")[0]
_SECURITY = [
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"no-referrer"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
]
_KEY_NAME = KEY_HEADER.lower().encode()


class HostError(ServiceError):
    """The Host header names another machine."""

    code = "host"


class FailedError(ServiceError):
    """Something went wrong that nobody thought of."""

    status, code = 500, "failed"


class GuardMiddleware:
    """The outermost part of the application.

    `hosts`: What the Host header may say; ``*`` for anything.
    `asked`: Of private questions. They are found here, and their functions called with the request alone: the way
    through all of FastAPI takes as long as the whole answer.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        tokens: TokenStore,
        look: Look,
        hosts: frozenset[str],
        buckets: Buckets,
        under_way: UnderWay,
        sending: Sending,
        metrics: Metrics,
        lines: LineWriter,
        asked: Sequence[APIRoute] = (),
    ) -> None:
        self._app, self._tokens, self._look, self._buckets = app, tokens, look, buckets
        self._hosts = None if "*" in hosts else hosts
        self._metrics, self._lines = metrics, lines
        self._under_way, self._sending = under_way, sending
        rate, burst, most = STRANGERS
        self._strangers = Buckets(rate, burst, most=most, words="too many requests without a good token: wait")
        rate, burst, most = _WATCHERS
        self._watchers = Buckets(rate, burst, most=most, words="too many requests from this address: wait")
        self._asked = {route.path.removeprefix(ASKED): route for route in asked}

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Let a request in, or say why not."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        visit, began = RequestContext(scope.get(GONE, _stays)), perf_counter()
        scope[VISIT] = visit
        marked = _marked(visit, send)
        self._metrics.in_flight.inc()
        try:
            await self._enter(visit, scope)
            route = self._question(scope)
            if route is None:
                visit.begin(self._under_way)
                await self._app(scope, receive, marked)
            else:
                response = await route.endpoint(Request(scope, receive))
                await response(scope, receive, marked)
        except Exception as error:
            await self._failed(visit, self._again(visit, error, scope), scope, receive, marked)
        finally:
            visit.end(self._sending)
            self._metrics.in_flight.dec()
            self._told(visit, scope, perf_counter() - began)

    def _question(self, scope: AsgiScope) -> APIRoute | None:
        """Return the route of a private question, with the gallery's name in the scope; None for all else."""
        if scope["method"] != "POST" or not scope["path"].startswith(_BEFORE_NAME):
            return None
        name, _, what = scope["path"].removeprefix(_BEFORE_NAME).rpartition("/")
        route = self._asked.get(what)
        if route is None or "/" in name:
            return None
        scope["route"], scope["path_params"] = route, {"gallery": name}
        return route

    async def _enter(self, visit: RequestContext, scope: AsgiScope) -> None:
        """Read the headers, each that counts only once."""
        host, bearer, hosts = b"", b"", 0
        for name, value in scope["headers"]:
            if name == b"host":
                host, hosts = value, hosts + 1
            elif name == b"authorization":
                bearer = value if not bearer else b"two"
            elif name == b"content-length":
                visit.length = value
            elif name == b"content-type":
                visit.content_type = value
            elif name == b"transfer-encoding":
                visit.chunked = True
            elif name == _KEY_NAME:
                visit.key = value
        known = self._hosts is None or (hosts == 1 and _without_port(host) in self._hosts)
        if not known and scope["path"] != _HEALTH:  # who watches over processes knows addresses, not names
            raise HostError("the Host header names another machine than this server is told to be")
        await self._admit(visit, scope, bearer)

    async def _admit(self, visit: RequestContext, scope: AsgiScope, bearer: bytes) -> None:
        """Ask for the token where one is needed; let everybody see what is open, at a rate."""
        if scope["path"].startswith(_GUARDED):
            visit.token = await self._token(bearer)
            scope.get(OWNER, _forget)(visit.token.id)
            self._buckets.take(visit.token.id)
        elif scope["path"] in _OPEN:
            self._watchers.take(network_of(scope.get("client")))
        else:
            raise UnknownError("there is nothing at this address")

    def _again(self, visit: RequestContext, error: Exception, scope: AsgiScope) -> Exception:
        """Return what a client is told: one without a good token, that it asks too often, where that is so."""
        if visit.token is None and isinstance(error, ServiceError) and error.status < 500:
            scope.get(OWNER, _forget)(None)
            try:
                self._strangers.take(network_of(scope.get("client")))
            except RateError as too_often:
                return too_often
        return error

    async def _token(self, bearer: bytes) -> Token:
        scheme, _, text = bearer.partition(b" ")
        if scheme.lower() != b"bearer":
            raise_unauthorized()
        try:
            await self._look.take()
        except TokenStoreError:
            _LOG.warning("the store of tokens does not answer")
            raise UnavailableError("tokens cannot be checked now: ask again later") from None
        token = self._tokens.look(text.decode("latin-1"))
        if token is None:
            raise_unauthorized()
        return token

    async def _failed(
        self, visit: RequestContext, error: Exception, scope: AsgiScope, receive: Receive, send: Send
    ) -> None:
        if not isinstance(error, ServiceError):
            visit.error = described(error)
            if visit.status:  # an answer has begun: the connection is closed before it is whole
                return
            error = FailedError("the server could not do this")
        self._metrics.refuse(error.code)
        if error.status not in _CLOSING and visit.has_a_little_to_read():
            await _read_to_the_end(receive)  # else the connection is closed, and the client may miss what it is told
        stranger = visit.token is None and isinstance(error, RateError)
        if stranger:
            await _stay(receive, STRANGERS_WAIT)
        await problem(error, close=stranger)(scope, receive, send)

    def _told(self, visit: RequestContext, scope: AsgiScope, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", UNMATCHED)
        self._metrics.count(route, visit.status, seconds, visit.sent)
        method = scope["method"]
        fields: dict[str, Any] = {
            "event": "request",
            "request": visit.id,
            "method": method if method in _METHODS else "other",
            "route": route,
            "status": visit.status,
            "ms": round(1000 * seconds, 3),
            "bytes": visit.sent,
            "token": None if visit.token is None else visit.token.id,
            "gallery": visit.gallery,
        }
        if visit.error is not None:
            fields.update(visit.error)
        if visit.token is None and visit.error is None:
            self._lines.write_stranger(fields)
        else:
            self._lines.write(fields)


def problem(error: ServiceError, *, close: bool = False) -> Response:
    """Return an error as a client gets it, and whether its connection is closed then."""
    body = Problem(code=error.code, message=str(error)[:1000]).model_dump_json().encode()
    headers = {}
    if error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if close or error.status in _CLOSING:
        headers["connection"] = "close"
    return Response(body, error.status, headers, "application/json")


def _marked(visit: RequestContext, send: Send) -> Callable[[MutableMapping[str, Any]], Awaitable[None]]:
    """Return `send` with our headers, and with a look at what goes out."""

    async def marked(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            visit.status = message["status"]
            message["headers"] = [*message["headers"], *_SECURITY, (b"nearveil-request", visit.id.encode())]
        else:
            visit.sent += len(message.get("body", b""))
        await send(message)

    return marked


def _without_port(host: bytes) -> str:
    """Return a Host header without its port.

    Examples
    --------
    >>> [_without_port(host) for host in (b"Example.org:8321", b"[::1]:80", b"[::1]", b"localhost")]
    ['example.org', '[::1]', '[::1]', 'localhost']
    """
    text = host.decode("latin-1").lower()
    name, colon, port = text.rpartition(":")
    return name if colon and port.isdigit() else text


async def _read_to_the_end(receive: Receive) -> None:
    """Read what is left of a body, for a while."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_LINGER):
            while (await receive()).get("more_body", False):
                pass


async def _stay(receive: Receive, seconds: float) -> None:
    """Wait for a while, or until the client goes."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while (await receive())["type"] != "http.disconnect":
                pass


def _forget(_: str | None) -> None:
    """Note nothing, where nothing is known of a connection."""


def _stays() -> bool:
    """Say that a client is there, where nothing is known of it."""
    return False
