"""What every request passes (its token, its rate, the line that is logged of it), and the state that all share."""

import asyncio
import hashlib
import ipaddress
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal, NoReturn, TypeVar

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as AsgiScope

from nearveil.gallery.answers import EXTRAS
from nearveil.ledger import LedgerError
from nearveil.server.errors import (
    FieldError,
    MediaError,
    NotOfferedError,
    RateError,
    ServiceError,
    UnauthorizedError,
    UnavailableError,
    UnknownError,
)
from nearveil.server.galleries import FLAGS, Gallery, QuickGallery, frame_status
from nearveil.server.limits import (
    STRANGERS,
    STRANGERS_WAIT,
    Buckets,
    ByteBudget,
    Refresher,
    ReplayStore,
    UnderWay,
    Use,
    UsedKeys,
    Workers,
    check_length,
    read_body,
)
from nearveil.server.logs import GalleryFigures, LineWriter, Metrics, described, tell_alive
from nearveil.server.settings import Settings
from nearveil.server.tokens import Scope, Token, TokenError, TokenStore, TokenStoreError
from nearveil.wire.schema import FRAME, KEY, KEY_HEADER, MOST_GALLERIES, GalleryInfo, Problem

CONTEXT = "nearveil.context"  # where a scope of ASGI holds what is known of a request
GONE = "nearveil.gone"  # where it holds a function that says whether the client has gone
OWNER = "nearveil.owner"  # where it holds a function that is told whose good token the connection's request had
MANAGEMENT = "nearveil.management"  # where it holds whether the request came to the management port
_LITTLE = 1 << 16  # bytes that a body is read that is not wanted


class RequestContext:
    """What is known of one request: for its handler, and for the line that is written of it."""

    __slots__ = (
        "body", "came", "chunked", "content_type", "error", "gallery", "gone", "held", "id", "key", "length", "read",
        "sent", "status", "token", "under_way",
    )  # fmt: skip

    def __init__(self, gone: Callable[[], bool]) -> None:
        self.id = secrets.token_hex(8)
        self.gone = gone
        self.status, self.sent, self.held = 0, 0, 0  # held: of the bytes that all answers under way may have
        self.read = False  # whether its body was read
        self.came: float | None = None  # when that was
        self.under_way: UnderWay | None = None
        self.body: tuple[ByteBudget, int] | None = None  # the bytes that are reserved for its body
        self.token: Token | None = None
        self.gallery: str | None = None
        self.error: dict[str, str] | None = None
        self.length: bytes | None = None
        self.chunked, self.content_type, self.key = False, b"", b""

    @property
    def token_id(self) -> str:
        """The id of the token; empty where none is needed."""
        return "" if self.token is None else self.token.id

    def require(self, scope: Scope) -> Token:
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

    def reserve_body(self, budget: ByteBudget, length: int) -> None:
        """Reserve the bytes of the body before any of it is read; BusyError where too many are reserved."""
        self.body = budget, budget.resize(self.token_id, 0, length)

    def release_body(self) -> None:
        """Release the bytes of the body."""
        if self.body is not None:
            budget, length = self.body
            budget.resize(self.token_id, length, 0)
            self.body = None

    def end(self, sending: ByteBudget) -> None:
        """Count no more."""
        self.release_body()
        if self.under_way is not None and self.token is not None:
            self.under_way.leave(self.token.id)
        if self.held:
            self.held = sending.resize(self.token_id, self.held, 0)

    def has_a_little_to_read(self) -> bool:
        """Return whether the client is about to send a small body that nobody has read."""
        if self.read or self.length is None:
            return self.chunked and not self.read
        return self.length.isdigit() and 0 < int(self.length[:6]) <= _LITTLE


def raise_unauthorized() -> NoReturn:
    """Refuse a request without a good token."""
    raise UnauthorizedError("Invalid or revoked token. The operator of the server makes one: `nearveil token create`")


T = TypeVar("T")
PoolName = Literal["answers", "files", "sealed"]

_KEY, _FRAME = re.compile(KEY), FRAME.encode()
_OWN_THREADS = 4
_LOOK = 2.0  # seconds that a gallery has to show that it can be read
_READY = 1.0  # seconds that a look at all galleries is believed: anybody may ask for one
_MAPS = 8  # of a gallery whose digests are remembered
_SMALL = 1 << 16  # bytes of an answer that a connection takes without waiting, and that are not counted
_POOLS: dict[str, PoolName] = {"query": "answers", "sealed": "sealed"}
_HASHED = 1 << 18  # bytes of a body that the event loop hashes: under a millisecond
_RECEIVING = "The server is receiving too many bytes. Try again later."
MESSAGE, SEALED = "query", "sealed"  # the last part of the path of a question
_ORIGINALS = bytes([EXTRAS.index("originals")])


class LargeResponse(Response):
    """An answer whose end is sent when its client has read the rest: until then, its request is under way."""

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Send it."""
        del scope, receive
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@dataclass(frozen=True)
class Pools:
    """Threads of one gallery: no other gallery waits for its database, and no message for files or sealed questions."""

    answers: Workers
    files: Workers
    sealed: Workers

    @classmethod
    def of(cls, settings: Settings) -> "Pools":
        """Return pools of the sizes that a server is told."""
        few = max(1, settings.concurrency // 4)
        return cls(
            Workers(settings.concurrency, settings.queue, settings.work_timeout),
            Workers(few, settings.queue, settings.work_timeout),
            Workers(settings.concurrency, settings.queue, settings.work_timeout),
        )

    def get(self, name: "PoolName") -> Workers:
        """Return one of them."""
        workers: Workers = getattr(self, name)
        return workers


@dataclass(eq=False)
class AppState:
    """All that one server has. Made by `create_app`."""

    galleries: dict[str, Gallery]
    tokens: TokenStore
    settings: Settings
    buckets: Buckets
    under_way: UnderWay
    sending: ByteBudget
    receiving: dict[str, ByteBudget]  # for messages and for sealed questions: neither keeps the other out
    workers: Workers  # for what belongs to no gallery
    pools: dict[str, Pools]
    keys: UsedKeys
    store: ReplayStore | None  # of keys, where several hosts answer
    metrics: Metrics = field(default_factory=Metrics)
    lines: LineWriter = field(default_factory=LineWriter)
    tell_alive: Callable[[], None] = tell_alive
    is_stopping: bool = False  # whether every connection is closed after its next answer

    def __post_init__(self) -> None:
        self._quick = {
            name: gallery if isinstance(gallery, QuickGallery) else None for name, gallery in self.galleries.items()
        }
        self._etags: dict[str, list[tuple[bytes, str]]] = {name: [] for name in self.galleries}
        self._sizes: dict[tuple[str, bytes], int] = {}  # of large answers: what the next one will take
        self._ready, self._looked = False, -_READY
        self.token_refresher = Refresher(
            "token store", self.tokens.refresh, self.settings.work_timeout, self.tokens.believed
        )
        # Questions have looks of their own: where keys cannot be noted, what everybody may read is read all the same.
        self._refreshers: dict[str, Refresher] = {}
        self._question_refreshers: dict[str, Refresher] = {}
        for name, gallery in self.galleries.items():
            quick, seconds = self._quick[name], self.settings.work_timeout
            is_current = None if quick is None else quick.is_current
            title = f"gallery {name}"
            self._refreshers[name] = Refresher(title, gallery.refresh, seconds, is_current=is_current)
            work = _nothing if quick is None else gallery.refresh
            self._question_refreshers[name] = Refresher(
                f"{title} (questions)", work, seconds, store=self.store, is_current=is_current
            )

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
            ByteBudget(settings.sending, "too many answers wait to be read by clients: ask again later"),
            {what: ByteBudget(settings.receiving, _RECEIVING) for what in (MESSAGE, SEALED)},
            Workers(_OWN_THREADS, settings.queue, settings.work_timeout),
            {name: Pools.of(settings) for name in named},
            UsedKeys(patience=settings.database_timeout),
            ReplayStore(settings.tokens, settings.database_timeout) if settings.shared else None,
            lines=LineWriter(settings.log_file),
        )

    def get_gallery(self, context: RequestContext, name: str) -> Gallery:
        """Return a gallery that the token of a request may use. Others are as if they were not there."""
        token = context.require("query")
        found = self.galleries.get(name)
        if found is None or not token.may_use(name):
            raise UnknownError("there is no such gallery, or this token may not use it")
        context.gallery = name
        return found

    async def read_infos(self, context: RequestContext) -> list[GalleryInfo]:
        """Return what may be known of all galleries that a token may use; one that does not answer hides no other."""
        token = context.require("query")

        async def info(gallery: Gallery) -> GalleryInfo | ServiceError:
            try:
                return await self.pools[gallery.name].answers.run(gallery.info, patience=_LOOK)
            except ServiceError as error:
                return error

        galleries = [gallery for name, gallery in self.galleries.items() if token.may_use(name)]
        replies = await asyncio.gather(*(info(gallery) for gallery in galleries))
        infos = [reply for reply in replies if isinstance(reply, GalleryInfo)]
        errors = [reply for reply in replies if isinstance(reply, ServiceError)]
        if errors and not infos:
            raise errors[0]
        return infos

    async def read_figures(self, gallery: Gallery) -> GalleryFigures:
        """Return the figures of a gallery."""
        try:
            return await self.pools[gallery.name].answers.run(lambda: GalleryFigures.of(gallery), patience=_LOOK)
        except (ServiceError, LedgerError):
            return GalleryFigures(gallery.name)

    async def run(
        self, context: RequestContext, gallery: Gallery, work: Callable[[], T], pool: PoolName = "answers"
    ) -> T:
        """Do some work of a gallery for a request in a thread, if its client is still there when its turn comes."""
        return await self.pools[gallery.name].get(pool).run(work, may_begin=lambda: not context.gone())

    async def read_question(self, request: Request, what: str = MESSAGE) -> tuple[Gallery, bytes]:
        """Return the gallery and the frame of a question, under a key that fits it.

        The body is counted before it is read: its length must be one that is accepted, its token must have few requests
        in flight, and all bodies in flight must leave room for it.
        """
        context = get_context(request)
        name = request.path_params["gallery"]
        token, gallery = context.require("query"), self.get_gallery(context, name)
        key = context.key.decode("latin-1")
        if not _KEY.fullmatch(key):
            raise FieldError(f"{KEY_HEADER}: it must be there, and fit {KEY}")
        if context.content_type.partition(b";")[0].strip().lower() != _FRAME:
            raise MediaError(f"the body must be of the type {FRAME}")
        lengths = gallery.sealed_lengths() if what == SEALED else range(self.settings.max_body + 1)
        length = check_length(context.length, context.chunked, lengths)
        context.begin(self.under_way)
        context.reserve_body(self.receiving[what], length)
        body = await read_body(request.receive, length, self.settings.body_timeout)
        context.read, context.came = True, time.monotonic()

        def identify() -> tuple[bytes, Use]:
            data = bytes(body)
            return data, Use.of(key, token.id, f"{name}/{what}", data)

        data, use = identify() if len(body) <= _HASHED else await self.run(context, gallery, identify, _POOLS[what])
        if data[FLAGS : FLAGS + 1] == _ORIGINALS:
            context.require("originals")
        await self.keys.check(use, None if self.store is None else self._question_refreshers[name])
        return gallery, data

    async def read_map(self, context: RequestContext, gallery: Gallery, candidates: float | None) -> tuple[bytes, str]:
        """Return the frame of a map and its ETag."""
        quick, frame = self._quick[gallery.name], None
        if quick is not None:
            await self._refreshers[gallery.name].wait()
            frame = quick.known_map(candidates)
        if frame is None:
            frame = await self.run(context, gallery, lambda: gallery.map(candidates))
        return frame, self.get_etag(gallery, frame)

    def get_etag(self, gallery: Gallery, content: bytes) -> str:
        """Return the ETag of a map or a model of a gallery; it is made once."""
        known = self._etags[gallery.name]
        for held, etag in known:
            if held is content:
                return etag
        etag = f'"{hashlib.sha256(content).hexdigest()}"'
        self._etags[gallery.name] = [*known[1 - _MAPS :], (content, etag)]
        return etag

    async def answer(self, context: RequestContext, gallery: Gallery, data: bytes) -> Response:
        """Ask a gallery for candidates: at once where it can, else in a thread."""
        quick, reply = self._quick[gallery.name], None
        if quick is not None:
            await self._question_refreshers[gallery.name].wait(context.came)
            reply = quick.known(data)
        if reply is None:
            kind = gallery.name, data[FLAGS : FLAGS + 1]
            size = self._sizes.get(kind, 0)
            context.held = self.sending.resize(context.token_id, context.held, size)  # before memory is taken for it
            pool: PoolName = "files" if data[FLAGS : FLAGS + 1] == _ORIGINALS else "answers"
            reply = await self.run(context, gallery, lambda: gallery.query(data), pool)
            self.metrics.made.inc()
            if len(reply) > _SMALL:
                self._sizes[kind] = len(reply)
        return self.respond_with_frame(context, reply)

    def charge(self, context: RequestContext, n_bytes: int) -> None:
        """Let a request with a token count as more than one, by the public size of what it reads or sends."""
        if context.token is not None:
            self.buckets.charge(context.token.id, n_bytes)

    def respond_with_frame(self, context: RequestContext, reply: bytes) -> Response:
        """Return a frame with the status that belongs to what it says."""
        status = frame_status(reply)
        return self.respond(context, reply, FRAME, status, {"retry-after": "2"} if status == 503 else None)

    def respond(
        self,
        context: RequestContext,
        body: bytes,
        kind: str,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """Return an answer; BusyError where it is large, and too much waits for clients to read it."""
        context.release_body()
        large = len(body) > _SMALL
        context.held = self.sending.resize(context.token_id, context.held, len(body) if large else 0)
        if large:
            self.charge(context, len(body))
        return (LargeResponse if large else Response)(body, status, headers, kind)

    def respond_once(self, context: RequestContext, body: bytes, kind: str, etag: str, known: str | None) -> Response:
        """Return an answer, or 304 where a header If-None-Match names its ETag."""
        if known is not None and any(one.strip().removeprefix("W/") in (etag, "*") for one in known.split(",")):
            return Response(status_code=304, headers={"etag": etag})
        return self.respond(context, body, kind, headers={"etag": etag})

    def is_alive(self) -> bool:
        """Return whether every pool still has a thread that can begin some work."""
        return not any(workers.is_stuck() for workers in self._all_workers())

    def stop(self) -> None:
        """Be ready no more, and let clients connect elsewhere: what comes all the same is answered."""
        self.is_stopping = True

    async def is_ready(self) -> bool:
        """Return whether tokens and galleries can be read, each has published something, and the log can be written."""
        if self.is_stopping:
            return False
        if time.monotonic() - self._looked >= _READY:
            self._looked = time.monotonic()
            self._ready = await self._check_ready()
        return self._ready

    async def refresh(self) -> None:
        """Look whether something new was published; the log is told where a store is down."""
        refreshers = (self.token_refresher, *self._refreshers.values())
        await asyncio.gather(*(refresher.wait() for refresher in refreshers), return_exceptions=True)

    def close(self) -> None:
        """Let no more work begin, and write what is left to write."""
        for workers in self._all_workers():
            workers.close()
        if self.store is not None:
            self.store.close()
        self.lines.close()

    def _all_workers(self) -> Iterator[Workers]:
        yield self.workers
        yield from (
            look.workers
            for look in (self.token_refresher, *self._refreshers.values(), *self._question_refreshers.values())
        )
        for pools in self.pools.values():
            yield from (pools.answers, pools.files, pools.sealed)

    async def _check_ready(self) -> bool:
        """Look by the threads that do nothing else: those of requests may all be busy."""
        try:
            async with asyncio.timeout(_LOOK):
                await self.token_refresher.wait()
                now, looks = time.monotonic(), (self._refreshers[name] for name, quick in self._quick.items() if quick)
                await asyncio.gather(*(refresher.look(now) for refresher in looks))
                if self.lines.failing or not await self.workers.run(self.tokens.has_room):
                    return False
        except (ServiceError, TokenError, TimeoutError):
            return False
        return all(gallery.is_published for gallery in self.galleries.values())


def _nothing() -> None:
    """Look at nothing."""


def get_context(request: Request) -> RequestContext:
    """Return what is known of a request."""
    context: RequestContext = request.scope[CONTEXT]
    return context


def get_network(client: Sequence[Any] | None) -> str:
    """Return whose limits count: an address; of IPv6 the network, because one machine has all addresses of it.

    Examples
    --------
    >>> [get_network(client) for client in (("192.0.2.1", 5), ("2001:db8::1:2", 5), None)]
    ['192.0.2.1', '2001:db8::/64', '']
    """
    address = str(client[0]) if client else ""
    if ":" not in address:
        return address
    with suppress(ValueError):
        return str(ipaddress.IPv6Network((address.partition("%")[0], 64), strict=False))
    return address


QUESTIONS = "/v1/galleries/{gallery}/"  # where private questions are asked: of the rest, one word is left
UNMATCHED = "unmatched"
_CLOSING = frozenset((408, 411, 413))  # what is left of the body is not read
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
_HEALTH = "/health"
_WATCHERS = 600.0, 600, 4096  # requests a minute of one address for what anybody may ask, at once, and addresses
_LINGER = 2.0  # seconds that a body is read that is not wanted
_GUARDED = ("/v1", "/metrics")
_OPEN = (_HEALTH, "/ready", "/openapi.json")
_MANAGED = frozenset((_HEALTH, "/ready", "/metrics"))  # on the management port alone, where there is one
_BEFORE_NAME = QUESTIONS.partition("{")[0]
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

    It finds the routes of private questions itself: the way through all of FastAPI takes as long as the whole answer.
    """

    def __init__(self, app: ASGIApp, *, state: AppState, questions: Sequence[APIRoute] = ()) -> None:
        self._app, self._state = app, state
        self._hosts = None if "*" in state.settings.hosts else state.settings.hosts
        rate, burst, most = STRANGERS
        self._strangers = Buckets(rate, burst, most=most, words="too many requests without a good token: wait")
        rate, burst, most = _WATCHERS
        self._watchers = Buckets(rate, burst, most=most, words="too many requests from this address: wait")
        self._questions = {route.path.removeprefix(QUESTIONS): route for route in questions}

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Let a request in, or say why not."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context, began = RequestContext(scope.get(GONE, _stays)), perf_counter()
        scope[CONTEXT] = context
        marked = _add_headers(context, send, self._state)
        self._state.metrics.in_flight.inc()
        try:
            await self._read_headers(context, scope)
            route = self._match_question(scope)
            if route is None:
                context.begin(self._state.under_way)
                await self._app(scope, receive, marked)
            else:
                response = await route.endpoint(Request(scope, receive))
                await response(scope, receive, marked)
        except Exception as error:
            await self._send_problem(context, self._limit_stranger(context, error, scope), scope, receive, marked)
        finally:
            context.end(self._state.sending)
            self._state.metrics.in_flight.dec()
            self._record(context, scope, perf_counter() - began)

    def _match_question(self, scope: AsgiScope) -> APIRoute | None:
        """Return the route of a private question, with the gallery's name in the scope; None for all else."""
        if scope["method"] != "POST" or not scope["path"].startswith(_BEFORE_NAME):
            return None
        name, _, what = scope["path"].removeprefix(_BEFORE_NAME).rpartition("/")
        route = self._questions.get(what)
        if route is None or "/" in name:
            return None
        scope["route"], scope["path_params"] = route, {"gallery": name}
        return route

    async def _read_headers(self, context: RequestContext, scope: AsgiScope) -> None:
        """Read the headers, each that counts only once."""
        host, bearer, hosts = b"", b"", 0
        for name, value in scope["headers"]:
            if name == b"host":
                host, hosts = value, hosts + 1
            elif name == b"authorization":
                bearer = value if not bearer else b"two"
            elif name == b"content-length":
                context.length = value
            elif name == b"content-type":
                context.content_type = value
            elif name == b"transfer-encoding":
                context.chunked = True
            elif name == _KEY_NAME:
                context.key = value
        known = self._hosts is None or (hosts == 1 and _strip_port(host) in self._hosts)
        # Probes know addresses, not names.
        if not known and scope["path"] != _HEALTH and not scope.get(MANAGEMENT, False):
            raise HostError("the Host header names another machine than this server is told to be")
        await self._admit(context, scope, bearer)

    async def _admit(self, context: RequestContext, scope: AsgiScope, bearer: bytes) -> None:
        """Ask for the token where one is needed; let everybody see what is open, at a rate.

        Nobody's requests use up what the checks of a proxy need: on the management port there is no rate.
        """
        is_management = scope.get(MANAGEMENT, False)
        if self._state.settings.management_port is not None and (scope["path"] in _MANAGED) != is_management:
            raise UnknownError("there is nothing at this address")
        if scope["path"].startswith(_GUARDED):
            context.token = await self._check_token(bearer)
            scope.get(OWNER, _forget)(context.token.id)
            self._state.buckets.take(context.token.id)
        elif scope["path"] in _OPEN:
            if not is_management:
                self._watchers.take(get_network(scope.get("client")))
        else:
            raise UnknownError("there is nothing at this address")

    def _limit_stranger(self, context: RequestContext, error: Exception, scope: AsgiScope) -> Exception:
        """Return the error to send; RateError to an address that was refused too often without a good token.

        While the token store is down no token is known to be good, and connections keep their owner.
        """
        if context.token is None and isinstance(error, ServiceError):
            if error.status < 500:
                scope.get(OWNER, _forget)(None)
            try:
                self._strangers.take(get_network(scope.get("client")))
            except RateError as too_often:
                return too_often
        return error

    async def _check_token(self, bearer: bytes) -> Token:
        scheme, _, text = bearer.partition(b" ")
        if scheme.lower() != b"bearer":
            raise_unauthorized()
        try:
            await self._state.token_refresher.wait()
        except TokenStoreError:
            raise UnavailableError("tokens cannot be checked now: ask again later") from None
        token = self._state.tokens.look(text.decode("latin-1"))
        if token is None:
            raise_unauthorized()
        return token

    async def _send_problem(
        self, context: RequestContext, error: Exception, scope: AsgiScope, receive: Receive, send: Send
    ) -> None:
        if not isinstance(error, ServiceError):
            context.error = described(error)
            if context.status:  # an answer has begun: the connection is closed before it is whole
                return
            error = FailedError("the server could not do this")
        self._state.metrics.refuse(error.code)
        if error.status not in _CLOSING and context.has_a_little_to_read():
            await _read_to_the_end(receive)  # else the connection is closed, and the client may miss what it is told
        stranger = context.token is None and isinstance(error, RateError)
        if stranger:
            await _stay(receive, STRANGERS_WAIT)
        await make_problem(error, close=stranger)(scope, receive, send)

    def _record(self, context: RequestContext, scope: AsgiScope, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", UNMATCHED)
        self._state.metrics.count(route, context.status, seconds, context.sent)
        method = scope["method"]
        fields: dict[str, Any] = {
            "event": "request",
            "request": context.id,
            "method": method if method in _METHODS else "other",
            "route": route,
            "status": context.status,
            "ms": round(1000 * seconds, 3),
            "bytes": context.sent,
            "token": None if context.token is None else context.token.id,
            "gallery": context.gallery,
        }
        if context.error is not None:
            fields.update(context.error)
        if context.token is None and context.error is None:
            self._state.lines.write_stranger(fields)
        else:
            self._state.lines.write(fields)


def make_problem(error: ServiceError, *, close: bool = False) -> Response:
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


def _add_headers(
    context: RequestContext, send: Send, state: AppState
) -> Callable[[MutableMapping[str, Any]], Awaitable[None]]:
    """Return `send` with our headers, and with a look at what goes out."""

    async def marked(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            context.status = message["status"]
            message["headers"] = [*message["headers"], *_SECURITY, (b"nearveil-request", context.id.encode())]
            if state.is_stopping and (b"connection", b"close") not in message["headers"]:
                message["headers"].append((b"connection", b"close"))
        else:
            context.sent += len(message.get("body", b""))
        await send(message)

    return marked


def _strip_port(host: bytes) -> str:
    """Return a Host header without its port.

    Examples
    --------
    >>> [_strip_port(host) for host in (b"Example.org:8321", b"[::1]:80", b"[::1]", b"localhost")]
    ['example.org', '[::1]', '[::1]', 'localhost']
    """
    text = host.decode("latin-1").lower()
    name, colon, port = text.rpartition(":")
    return name if colon and port.isdigit() else text


async def _read_to_the_end(receive: Receive) -> None:
    """Read what is left of a body, for a while and as much of it as is little."""
    more, left = True, _LITTLE
    with suppress(TimeoutError):
        async with asyncio.timeout(_LINGER):
            while more and left >= 0:
                message = await receive()
                more = message.get("more_body", False)
                left -= len(message.get("body", b""))


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
