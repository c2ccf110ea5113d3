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

from nearveil.server.errors import RateError, ServiceError, UnavailableError, UnknownError
from nearveil.server.limits import UNAUTHENTICATED, UNAUTHENTICATED_DELAY, AddressLimit, TokenBuckets
from nearveil.server.logs import describe_error
from nearveil.server.requests import (
    CONTEXT,
    DISCONNECTED,
    MANAGEMENT,
    SET_OWNER,
    AppState,
    RequestContext,
    raise_unauthorized,
)
from nearveil.server.tokens import Token, TokenStoreError
from nearveil.wire.schema import Problem

UNMATCHED = "unmatched"
_CLOSING = frozenset((408, 411, 413))  # statuses after which the rest of the body is not read
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
_HEALTH = "/health"
_PROBES = AddressLimit(600.0, 600)  # requests without a token for open paths
_MAX_DISCARDED = 1 << 16  # bytes of an unused body that are read
_DISCARD_TIMEOUT = 2.0  # seconds for that
_SINGLE_HEADERS = (b"host", b"authorization")
_GUARDED = ("/v1", "/metrics")
_OPEN = (_HEALTH, "/ready", "/openapi.json")
_MANAGED = frozenset((_HEALTH, "/ready", "/metrics"))  # on the management port alone, if there is one
_SECURITY_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"no-referrer"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
]


class HostError(ServiceError):
    """The Host header names another machine."""

    code = "host"


class FailedError(ServiceError):
    """Unexpected server error."""

    status, code = 500, "failed"


class GuardMiddleware:
    """Admit requests by host, token and rate; turn errors into responses, and log every request."""

    def __init__(self, app: ASGIApp, *, state: AppState) -> None:
        self._app, self._state = app, state
        self._hosts = None if "*" in state.settings.hosts else state.settings.hosts
        self._refusals = make_address_buckets(UNAUTHENTICATED, "Too many requests without a valid token.")
        self._probes = make_address_buckets(_PROBES, "Too many requests from this address.")

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context, started = RequestContext(scope.get(DISCONNECTED, lambda: False)), perf_counter()
        scope[CONTEXT] = context
        send = _with_headers(context, send, self._state)
        self._state.metrics.in_flight.inc()
        try:
            bearer = self._read_headers(context, scope)
            await self._admit(context, scope, bearer)
            if context.token is not None:
                context.resources.enter_context(self._state.in_flight.hold(context.token.id))
            await self._app(scope, receive, send)
        except Exception as error:
            await self._send_problem(context, self._limit_refusals(context, error, scope), scope, receive, send)
        finally:
            context.resources.close()
            self._state.metrics.in_flight.dec()
            self._record(context, scope, perf_counter() - started)

    def _read_headers(self, context: RequestContext, scope: AsgiScope) -> bytes:
        """Check the host and return the Authorization header."""
        hosts, bearers = ([value for name, value in scope["headers"] if name == key] for key in _SINGLE_HEADERS)
        headers = dict(scope["headers"])
        context.content_type = headers.get(b"content-type", b"")
        context.length = None if b"transfer-encoding" in headers else headers.get(b"content-length")
        is_trusted = self._hosts is None or (len(hosts) == 1 and _strip_port(hosts[0]) in self._hosts)
        # Probes use addresses, not names.
        if not is_trusted and scope["path"] != _HEALTH and not scope.get(MANAGEMENT, False):
            raise HostError("The Host header is not one of trusted_hosts.")
        return bearers[0] if len(bearers) == 1 else b""

    async def _admit(self, context: RequestContext, scope: AsgiScope, bearer: bytes) -> None:
        """Check the token, or the rate of the address on open paths.

        The management port has no rate: no client can use up the rate of the health checks of a proxy.
        """
        is_management = scope.get(MANAGEMENT, False)
        if self._state.settings.management_port is not None and (scope["path"] in _MANAGED) != is_management:
            raise UnknownError("Not found.")
        if scope["path"].startswith(_GUARDED):
            context.token = await self._check_token(bearer)
            self._set_owner(scope, context.token.id)
            self._state.rate.take(context.token.id)
        elif scope["path"] in _OPEN:
            if not is_management:
                self._probes.take(get_network(scope.get("client")))
        else:
            raise UnknownError("Not found.")

    async def _check_token(self, bearer: bytes) -> Token:
        scheme, _, text = bearer.partition(b" ")
        if scheme.lower() != b"bearer":
            raise_unauthorized()
        try:
            await self._state.token_poller.wait()
        except TokenStoreError:
            raise UnavailableError("Tokens cannot be checked now. Try again later.") from None
        token = self._state.tokens.verify_cached(text.decode("latin-1"))
        if token is None:
            raise_unauthorized()
        return token

    def _limit_refusals(self, context: RequestContext, error: Exception, scope: AsgiScope) -> Exception:
        """Return the error to send: RateError if the address had too many refusals without a valid token.

        While the token store is down no token can be checked, and connections keep their owner.
        """
        if context.token is None and isinstance(error, ServiceError):
            if error.status < 500:
                self._set_owner(scope, None)
            try:
                self._refusals.take(get_network(scope.get("client")))
            except RateError as rate_error:
                return rate_error
        return error

    def _set_owner(self, scope: AsgiScope, token_id: str | None) -> None:
        if SET_OWNER in scope:
            scope[SET_OWNER](token_id)

    async def _send_problem(
        self, context: RequestContext, error: Exception, scope: AsgiScope, receive: Receive, send: Send
    ) -> None:
        if not isinstance(error, ServiceError):
            context.error = describe_error(error)
            if context.status:  # an answer has started: the connection is closed before it is complete
                return
            error = FailedError("Unexpected server error.")
        self._state.metrics.count_refusal(error.code)
        if error.status not in _CLOSING and context.has_small_unread_body(_MAX_DISCARDED):
            await _discard_body(receive)  # otherwise the connection is closed, and the client may miss the response
        must_delay = context.token is None and isinstance(error, RateError)
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


def make_address_buckets(limit: AddressLimit, message: str = "") -> TokenBuckets:
    """Return token buckets for clients by address."""
    return TokenBuckets(limit.per_minute, limit.burst, max_buckets=limit.max_addresses, message=message)


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
