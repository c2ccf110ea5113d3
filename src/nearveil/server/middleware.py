"""The outermost middleware: hosts, tokens and rates before a request, errors, headers and the log after it."""

import asyncio
import ipaddress
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as AsgiScope

from nearveil.server.errors import ServiceError
from nearveil.server.limits import UNAUTHENTICATED, UNAUTHENTICATED_DELAY, AddressLimit, TokenBuckets
from nearveil.server.logs import describe_error
from nearveil.server.requests import CONTEXT, MANAGEMENT, SET_OWNER, AppState, RequestContext, raise_unauthorized
from nearveil.server.tokens import TokenStoreError
from nearveil.wire.schema import Problem

UNMATCHED = "unmatched"
_CLOSING = frozenset((408, 411, 413))  # statuses after which the rest of the body is not read
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
_HEALTH = "/health"
_PROBES = AddressLimit(600.0, 600)  # requests without a token for open paths
_MAX_DISCARDED = 1 << 16  # bytes of an unused body that are read
_DISCARD_TIMEOUT = 2.0  # seconds for that
_GUARDED = ("/v1", "/metrics")
_OPEN = (_HEALTH, "/ready", "/openapi.json")
_MANAGED = frozenset((_HEALTH, "/ready", "/metrics"))  # on the management port alone, if there is one
_SECURITY_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"no-referrer"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
]


class GuardMiddleware:
    """Admit requests by host, token and rate; turn errors into responses, and log every request."""

    def __init__(self, app: ASGIApp, *, state: AppState) -> None:
        self._app, self._state = app, state
        self._hosts = None if "*" in state.settings.hosts else state.settings.hosts
        self._refusals, self._probes = TokenBuckets(*UNAUTHENTICATED), TokenBuckets(*_PROBES)

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Check the host, the token, its rate and its requests in flight; then call the route.

        The management port has no rate: no client can use up the rate of the health checks of a proxy.
        """
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state, path, started = self._state, scope["path"], perf_counter()
        context = scope[CONTEXT] = RequestContext(scope)
        send = _with_headers(context, send, state)
        with state.metrics.in_flight.track_inprogress(), context.resources:
            try:
                self._check_address(scope)
                if path.startswith(_GUARDED):
                    await self._authenticate(context, scope)
                    state.admit(context)
                elif path not in _OPEN:
                    raise ServiceError("unknown", "Not found.")
                elif not scope.get(MANAGEMENT, False) and (wait := self._probes.take(get_network(scope["client"]))):
                    raise ServiceError("rate_limited", "Too many requests from this address.", wait)
                await self._app(scope, receive, send)
            except Exception as error:
                await self._send_problem(context, error, scope, receive, send)
            finally:
                self._record(context, scope, perf_counter() - started)

    def _check_address(self, scope: AsgiScope) -> None:
        """Check the Host header and the port; probes use addresses, not names."""
        is_management = scope.get(MANAGEMENT, False)
        is_trusted = self._hosts is None or _strip_port(_get_single(scope, b"host")) in self._hosts
        if not is_trusted and scope["path"] != _HEALTH and not is_management:
            raise ServiceError("host", "The Host header is not one of trusted_hosts.")
        if self._state.settings.management_port is not None and (scope["path"] in _MANAGED) != is_management:
            raise ServiceError("unknown", "Not found.")

    async def _authenticate(self, context: RequestContext, scope: AsgiScope) -> None:
        """Set the token of a request, which is from now on the owner of its connection."""
        scheme, _, text = _get_single(scope, b"authorization").partition(b" ")
        if scheme.lower() != b"bearer":
            raise_unauthorized()
        try:
            await self._state.token_poller.wait()
        except TokenStoreError:
            raise ServiceError("unavailable", "Tokens cannot be checked now. Try again later.") from None
        context.token = self._state.tokens.verify_cached(text.decode("latin-1"))
        if context.token is None:
            raise_unauthorized()
        if SET_OWNER in scope:
            scope[SET_OWNER](context.token.id)

    async def _send_problem(
        self, context: RequestContext, error: Exception, scope: AsgiScope, receive: Receive, send: Send
    ) -> None:
        """Send an error; without a valid token, at most so many of them to one address.

        While the token store is down no token can be checked, and connections keep their owner.
        """
        must_delay = False
        if not isinstance(error, ServiceError):
            context.error = describe_error(error)
            if context.status:  # an answer has started: the connection is closed before it is complete
                return
            error = ServiceError("failed", "Unexpected server error.")
        elif context.token is None:
            if error.status < 500 and SET_OWNER in scope:
                scope[SET_OWNER](None)
            wait = self._refusals.take(get_network(scope["client"]))
            must_delay = wait > 0 or error.code == "rate_limited"
            if wait:
                error = ServiceError("rate_limited", "Too many requests without a valid token.", wait)
        self._state.metrics.refused.labels(error.code).inc()
        if error.status not in _CLOSING and context.has_small_unread_body(_MAX_DISCARDED):
            await _discard_body(receive)  # otherwise the connection is closed, and the client may miss the response
        if must_delay:
            await _delay_until_disconnect(receive, UNAUTHENTICATED_DELAY)
        await make_problem(error, close=must_delay)(scope, receive, send)

    def _record(self, context: RequestContext, scope: AsgiScope, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", UNMATCHED)
        self._state.metrics.count(route, context.status, seconds, context.sent)
        fields: dict[str, Any] = {
            "event": "request",
            "request": context.id,
            "method": scope["method"] if scope["method"] in _METHODS else "other",
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
    """Return the address that limits count by; of IPv6 the network, because one machine has all its addresses.

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


def _with_headers(
    context: RequestContext, send: Send, state: AppState
) -> Callable[[MutableMapping[str, Any]], Awaitable[None]]:
    """Return `send` that adds our headers and records status and size."""

    async def send_with_headers(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            context.status = message["status"]
            request_id = (b"nearveil-request", context.id.encode())
            message["headers"] = [*message["headers"], *_SECURITY_HEADERS, request_id]
            if state.is_stopping and (b"connection", b"close") not in message["headers"]:
                message["headers"].append((b"connection", b"close"))
        else:
            context.sent += len(message.get("body", b""))
        await send(message)

    return send_with_headers


def _get_single(scope: AsgiScope, name: bytes) -> bytes:
    """Return a header that must not be repeated; empty if it is missing or repeated."""
    values = [value for header, value in scope["headers"] if header == name]
    return values[0] if len(values) == 1 else b""


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


async def _discard_body(receive: Receive) -> None:
    """Read the rest of a small body."""
    more, left = True, _MAX_DISCARDED
    with suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_TIMEOUT):
            while more and left >= 0:
                message = await receive()
                more = message.get("more_body", False)
                left -= len(message.get("body", b""))


async def _delay_until_disconnect(receive: Receive, seconds: float) -> None:
    """Wait, or return when the client disconnects."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while (await receive())["type"] != "http.disconnect":
                pass
