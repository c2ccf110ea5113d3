"""What every request passes: its token, how often it may ask, and the line that is written of it. Plain ASGI."""

import asyncio
import ipaddress
import logging
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from nearveil.service.schema import KEY_HEADER, Problem
from nearveil.service.server.errors import RateError, ServiceError, UnavailableError, UnknownError
from nearveil.service.server.limits import STRANGERS, STRANGERS_WAIT, Buckets, Sending, UnderWay
from nearveil.service.server.logs import LineWriter, Metrics, described
from nearveil.service.server.requests import GONE, OWNER, VISIT, Look, RequestContext, raise_unauthorized
from nearveil.service.server.tokens import Token, TokenStore, TokenStoreError


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
_KEY = KEY_HEADER.lower().encode()
_LOG = logging.getLogger(__name__)


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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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

    def _question(self, scope: Scope) -> APIRoute | None:
        """Return the route of a private question, with the gallery's name in the scope; None for all else."""
        if scope["method"] != "POST" or not scope["path"].startswith(_BEFORE_NAME):
            return None
        name, _, what = scope["path"].removeprefix(_BEFORE_NAME).rpartition("/")
        route = self._asked.get(what)
        if route is None or "/" in name:
            return None
        scope["route"], scope["path_params"] = route, {"gallery": name}
        return route

    async def _enter(self, visit: RequestContext, scope: Scope) -> None:
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
            elif name == _KEY:
                visit.key = value
        known = self._hosts is None or (hosts == 1 and _without_port(host) in self._hosts)
        if not known and scope["path"] != _HEALTH:  # who watches over processes knows addresses, not names
            raise HostError("the Host header names another machine than this server is told to be")
        await self._admit(visit, scope, bearer)

    async def _admit(self, visit: RequestContext, scope: Scope, bearer: bytes) -> None:
        """Ask for the token where one is needed; let everybody see what is open, at a rate."""
        if scope["path"].startswith(_GUARDED):
            visit.token = await self._token(bearer)
            scope.get(OWNER, _forget)(visit.token.id)
            self._buckets.take(visit.token.id)
        elif scope["path"] in _OPEN:
            self._watchers.take(network_of(scope.get("client")))
        else:
            raise UnknownError("there is nothing at this address")

    def _again(self, visit: RequestContext, error: Exception, scope: Scope) -> Exception:
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
        self, visit: RequestContext, error: Exception, scope: Scope, receive: Receive, send: Send
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

    def _told(self, visit: RequestContext, scope: Scope, seconds: float) -> None:
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
