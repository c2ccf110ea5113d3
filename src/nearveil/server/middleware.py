"""The outermost middleware: hosts, tokens and rates before a request, errors, headers and the log after it."""

import asyncio
import ipaddress
import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Send
from starlette.types import Scope as AsgiScope

from nearveil.server import limits
from nearveil.server.errors import ServiceError
from nearveil.server.limits import ByteBudget, Reservation, TokenBuckets
from nearveil.server.logs import describe_error
from nearveil.server.tokens import PREFIX, Scope, Token, TokenStoreError
from nearveil.wire.schema import Problem

if TYPE_CHECKING:
    from nearveil.server.galleries import Gallery
    from nearveil.server.requests import AppState

CONTEXT = "nearveil.context"  # keys of an ASGI scope: the context of the request
DISCONNECTED = "nearveil.disconnected"  # a function that returns whether the client has disconnected
SET_OWNER = "nearveil.set_owner"  # a function that gets the id of the request's valid token, or None
MANAGEMENT = "nearveil.management"  # whether the request came to the management port
UNMATCHED = "unmatched"
_CLOSING = frozenset((408, 411, 413))  # statuses after which the rest of the body is not read
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
_HEALTH = "/health"
_PROBES = 600.0, 600, 4096  # requests without a token for open paths; as for `UNAUTHENTICATED`
_MAX_DISCARDED = 1 << 16  # bytes of an unused body that are read
_DISCARD_TIMEOUT = 2.0  # seconds for that
GUARDED = ("/v1", "/metrics")  # paths that need a token
_OPEN = (_HEALTH, "/ready", "/openapi.json")
_MANAGED = frozenset((_HEALTH, "/ready", "/metrics"))  # on the management port alone, if there is one
_SECURITY_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"no-referrer"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
]


class RequestContext:
    """The state of one request, for its handler and its log line."""

    def __init__(self, scope: AsgiScope, send: Send, state: "AppState") -> None:
        self.id = secrets.token_hex(8)
        self.is_disconnected: Callable[[], bool] = scope.get(DISCONNECTED, lambda: False)
        self.set_owner: Callable[[str | None], None] = scope.get(SET_OWNER, lambda _: None)
        self.headers: dict[bytes, bytes] = {}
        for name, value in scope["headers"]:  # a repeated header is invalid: no host or token has a comma
            self.headers[name] = self.headers[name] + b"," + value if name in self.headers else value
        self.length = None if b"transfer-encoding" in self.headers else self.headers.get(b"content-length")
        self.token: Token | None = None
        self.gallery: str | None = None
        self.has_read_body = False
        self.status, self.sent = 0, 0
        self.error: dict[str, str] | None = None
        self.resources = ExitStack()  # released when the request ends
        self.body: Reservation | None = None  # bytes of the body in memory
        self.answer: Reservation | None = None  # bytes of a large answer that the client has not read
        self._send, self._state = send, state

    def require(self, scope: Scope) -> Token:
        """Return the token of the client, if it has a scope."""
        if self.token is None:
            raise _make_unauthorized()
        if scope not in self.token.scopes:
            raise ServiceError("not_offered", f"This token lacks the scope {scope}.")
        return self.token

    def get_gallery(self, name: str) -> "Gallery":
        """Return a gallery that the token of the client may use; others do not exist for it."""
        token, gallery = self.require("query"), self._state.galleries.get(name)
        if gallery is None or not token.may_use(name):
            raise ServiceError("unknown", "No such gallery, or this token may not use it.")
        self.gallery = name
        return gallery

    def reserve(self, budget: ByteBudget) -> Reservation:
        """Return a reservation of no bytes yet, which is released when the request ends."""
        reservation = Reservation(budget, "" if self.token is None else self.token.id)
        self.resources.callback(reservation.resize, 0)
        return reservation

    async def send(self, message: Message) -> None:
        """Send a part of the response; add our headers, and record status and size."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message["headers"], *_SECURITY_HEADERS, (b"nearveil-request", self.id.encode())]
            if self._state.is_stopping and (b"connection", b"close") not in message["headers"]:
                message["headers"].append((b"connection", b"close"))
        else:
            self.sent += len(message.get("body", b""))
        await self._send(message)


class GuardMiddleware:
    """Admit requests by host, token and rate; turn errors into responses, and log every request."""

    def __init__(self, app: ASGIApp, *, state: "AppState") -> None:
        self._app, self._state = app, state
        self._hosts = None if "*" in state.settings.hosts else state.settings.hosts
        self._refusals, self._probes = TokenBuckets(*limits.UNAUTHENTICATED), TokenBuckets(*_PROBES)

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Admit a request, and call its route."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = perf_counter()
        context = scope[CONTEXT] = RequestContext(scope, send, self._state)
        with self._state.metrics.in_flight.track_inprogress(), context.resources:
            try:
                await self._admit(context, scope)
                await self._app(scope, receive, context.send)
            except Exception as error:
                await self._send_error(context, error, scope, receive)
            finally:
                self._record(context, scope, perf_counter() - started)

    async def _admit(self, context: RequestContext, scope: AsgiScope) -> None:
        """Check host, port, token, rate and requests in flight. The token becomes the owner of the connection."""
        # Probes use addresses, not names, and the management port has no rate: no client can use up the rate of the
        # health checks of a proxy.
        state, path, is_management = self._state, scope["path"], scope.get(MANAGEMENT, False)
        host = context.headers.get(b"host", b"").decode("latin-1").lower()
        name, colon, port = host.rpartition(":")
        is_trusted = self._hosts is None or (name if colon and port.isdigit() else host) in self._hosts
        if not is_trusted and path != _HEALTH and not is_management:
            raise ServiceError("host", "The Host header is not one of trusted_hosts.")
        if state.settings.management_port is not None and (path in _MANAGED) != is_management:
            raise ServiceError("unknown", "Not found.")
        if not path.startswith(GUARDED):
            if path not in _OPEN:
                raise ServiceError("unknown", "Not found.")
            if not is_management and (wait := self._probes.take(get_network(scope["client"]))):
                raise ServiceError("rate_limited", "Too many requests from this address.", wait)
            return
        token = context.token = await self._authenticate(context)
        context.set_owner(token.id)
        if wait := state.rate.take(token.id):
            raise ServiceError("rate_limited", "Too many requests with this token. Try again later.", wait)
        if state.in_flight[token.id] >= state.settings.per_token:
            raise ServiceError("rate_limited", "Too many requests in flight with this token. Wait for an answer.", 1)
        state.in_flight[token.id] += 1
        context.resources.callback(state.in_flight.subtract, [token.id])

    async def _authenticate(self, context: RequestContext) -> Token:
        """Return the token of a request, by the database of tokens as it is now or by the identity provider."""
        state = self._state
        scheme, _, data = context.headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":
            raise _make_unauthorized()
        text, workers = data.decode("latin-1"), state.token_workers
        if state.identity is not None and not text.startswith(PREFIX):
            token = await state.identity.authenticate(text, workers)
        else:
            try:
                token = await workers.run(partial(state.tokens.verify, text))
            except TokenStoreError as error:
                state.token_poller.outages.record(error)
                raise ServiceError("unavailable", "Tokens cannot be checked now. Try again later.") from None
            state.token_poller.outages.record(None)
        if token is None:
            raise _make_unauthorized()
        return token

    async def _send_error(self, context: RequestContext, error: Exception, scope: AsgiScope, receive: Receive) -> None:
        """Send an error; without a valid token, at most so many of them to one address."""
        must_delay = False
        if not isinstance(error, ServiceError):
            context.error = describe_error(error)
            if context.status:  # an answer has started: the connection is closed before it is complete
                return
            error = ServiceError("failed", "Unexpected server error.")
        elif context.token is None:
            if error.status < 500:  # while the token store is down no token can be checked
                context.set_owner(None)
            wait = self._refusals.take(get_network(scope["client"]))
            must_delay = wait > 0 or error.code == "rate_limited"
            if wait:
                error = ServiceError("rate_limited", "Too many requests without a valid token.", wait)
        self._state.metrics.refused.labels(error.code).inc()
        length = context.length or b""
        is_small = length.isdigit() and 0 < int(length[:6]) <= _MAX_DISCARDED
        if error.status not in _CLOSING and is_small and not context.has_read_body:
            with suppress(ServiceError):  # if the body is not read, the connection is closed before the response
                await limits.read_body(receive, _MAX_DISCARDED, _DISCARD_TIMEOUT)
        if must_delay:
            await _delay_until_disconnect(receive, limits.UNAUTHENTICATED_DELAY)
        await make_problem(error, close=must_delay)(scope, receive, context.send)

    def _record(self, context: RequestContext, scope: AsgiScope, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", UNMATCHED)
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._state.metrics.count(method, route, context.gallery, context.status, seconds, context.sent)
        fields: dict[str, Any] = {
            "event": "request",
            "request": context.id,
            "method": method,
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
            self._state.log.write_unauthenticated(fields)
        else:
            self._state.log.write(fields)


def _make_unauthorized() -> ServiceError:
    return ServiceError("unauthorized", "Invalid or revoked token. `nearveil token create` on the server makes one.")


def make_problem(error: ServiceError, *, close: bool = False) -> Response:
    """Return the response for an error; if `close`, it is the last of its connection."""
    body = Problem(code=error.code, message=str(error)[:1000]).model_dump_json().encode()
    headers = {}
    if error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if close or error.status in _CLOSING:
        headers["connection"] = "close"
    return Response(body, error.status, headers, "application/json")


def get_network(client: Sequence[Any] | None) -> str:
    """Return the address that limits count by; of IPv6 the network, because one machine has all its addresses."""
    address = str(client[0]) if client else ""
    if ":" not in address:
        return address
    with suppress(ValueError):
        return str(ipaddress.IPv6Network((address.partition("%")[0], 64), strict=False))
    return address


async def _delay_until_disconnect(receive: Receive, seconds: float) -> None:
    """Wait, or return when the client disconnects."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while (await receive())["type"] != "http.disconnect":
                pass
