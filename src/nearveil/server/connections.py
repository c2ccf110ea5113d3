"""HTTP connections of uvicorn with limits on time, size, queued requests, and connections of one client."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from nearveil.server.errors import RateError
from nearveil.server.limits import UNAUTHENTICATED, UNAUTHENTICATED_DELAY
from nearveil.server.middleware import get_network, make_address_buckets
from nearveil.server.requests import DISCONNECTED, MANAGEMENT, SET_OWNER
from nearveil.wire.schema import Problem

_MAX_HEADER_BYTES = 32 << 10  # bytes of the request line and the headers
_MAX_PER_OWNER = 64  # connections of one token, or of unauthenticated clients at one address
_MAX_QUEUED = 8  # requests of one connection that wait while an earlier one is answered
_MAX_FRAMING_BYTES = 16 << 10  # consecutive bytes after the headers that are not body: sizes of chunks, trailers
_CHUNK_OVERHEAD = 8  # times the size of a body for it in chunks: chunks of one byte take six times
_MALFORMED = Problem(code="http", message="Malformed HTTP request.").model_dump_json().encode()
_LARGE_HEADERS = Problem(code="headers", message="The headers are too large.").model_dump_json().encode()
_LARGE_BODY = Problem(code="too_large", message="The body is too large.").model_dump_json().encode()
_LOG = logging.getLogger("nearveil.server.http")
_LOG.setLevel(logging.ERROR)  # uvicorn warns of every malformed request: anybody could fill the log
_HEADERS = b"content-type: application/json\r\nx-content-type-options: nosniff\r\ncache-control: no-store\r\n"


class ParseState(Enum):
    """Which part of a request a connection reads next."""

    IDLE = 0
    HEADERS = 1
    BODY = 2


class RefusedHeadersError(Exception):
    """Stop the parser: the headers are too large, or too many requests are queued."""


class ConnectionGroup:
    """Limit connections in all and by owner; beyond a limit, close the least recently used."""

    def __init__(self, maximum: int, max_per_owner: int) -> None:
        self._maximum, self._max_per_owner = maximum, max_per_owner
        self._all: OrderedDict[Connection, str] = OrderedDict()
        self._by_owner: dict[str, OrderedDict[Connection, None]] = {}

    def put(self, connection: "Connection", owner: str) -> None:
        """Add a connection, or mark it as used."""
        self.drop(connection)
        self._all[connection] = owner
        self._by_owner.setdefault(owner, OrderedDict())[connection] = None
        if len(self._by_owner[owner]) > self._max_per_owner:
            self._close(next(iter(self._by_owner[owner])))
        if len(self._all) > self._maximum:
            self._close(next(iter(self._all)))

    def drop(self, connection: "Connection") -> None:
        """Remove a connection."""
        owner = self._all.pop(connection, None)
        if owner is not None:
            del self._by_owner[owner][connection]
            if not self._by_owner[owner]:
                del self._by_owner[owner]

    def _close(self, connection: "Connection") -> None:
        self.drop(connection)
        connection.abort()


class Slots:
    """Limit connections to `maximum`, and those of each owner.

    The owner of a connection is the valid token of its last request, or else the address of the client. A quarter of
    all slots is for clients without a valid token. Beyond a limit an old connection is closed, not the new one: nobody
    is locked out by idle connections.
    """

    def __init__(self, maximum: int) -> None:
        unauthenticated = max(1, maximum // 4)
        self._unauthenticated = ConnectionGroup(unauthenticated, max(1, min(_MAX_PER_OWNER, unauthenticated // 2)))
        self._authenticated = ConnectionGroup(max(1, maximum - unauthenticated), _MAX_PER_OWNER)
        self._refusals = make_address_buckets(UNAUTHENTICATED)

    def put(self, connection: "Connection", token: str | None) -> None:
        """Set the owner of a connection: the token of its last request, or its address."""
        if token is None:
            self._authenticated.drop(connection)
            self._unauthenticated.put(connection, get_network(connection.client))
        else:
            self._unauthenticated.drop(connection)
            self._authenticated.put(connection, token)

    def may_refuse_at_once(self, connection: "Connection") -> bool:
        """Count a malformed request; return whether its address has sent few of them recently."""
        try:
            self._refusals.take(get_network(connection.client))
        except RateError:
            return False
        return True

    def drop(self, connection: "Connection") -> None:
        """Remove a connection."""
        self._unauthenticated.drop(connection)
        self._authenticated.drop(connection)


class Connection(HttpToolsProtocol):
    """A connection of uvicorn with limits.

    It is closed if its headers or body are late or too large, if too many requests are queued, if its client does not
    read answers, if it is answered before its request was read completely, or as the oldest of too many (`Slots`).
    Before a connection with too many queued requests or from an address with too many malformed ones is closed, it is
    not read for a while: its client cannot retry at once. Trailers are ignored: they arrive after all checks.
    """

    header_timeout = 10.0
    body_timeout = 20.0
    send_timeout = 60.0
    max_body = 1 << 16
    max_body_by_path: ClassVar[dict[str, int]] = {}  # by the last part of the path
    slots: ClassVar[Slots] = Slots(1000)
    is_management: ClassVar[bool] = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = _LOG
        self._read_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self._parse_state = ParseState.IDLE
        self._progressed = False  # whether the last data completed headers or a request
        self._got_body = False  # whether the last data had a part of a body
        self._header_bytes = 0  # of the request line and the headers
        self._unparsed_bytes = 0  # received since the last complete headers or request
        self._received_bytes = self._body_bytes = 0  # after the headers, with and without framing
        self._framing_bytes = 0  # since the last part of the body
        self._max_body = self.max_body  # of this request
        self._is_paused = False  # whether the connection will be closed without reading more
        self._keep_alive = True  # whether the connection stays open after a complete request
        self._cycles: list[RequestResponseCycle] = []

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timeout of the headers."""
        super().connection_made(transport)
        self.slots.put(self, None)
        self._start_read_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Release the timers and the slot."""
        self.slots.drop(self)
        self._stop_read_timer()
        self._stop_send_timer()
        for cycle in self._cycles:  # uvicorn notifies only the last; others would write to a closed transport
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse data, and count the bytes of an incomplete request: the parser buffers them without a limit."""
        if self._is_paused:
            self.flow.pause_reading()  # uvicorn resumes it while a request is answered
            return
        self._progressed = self._got_body = False
        super().data_received(data)
        if self._parse_state is ParseState.IDLE and self._progressed:
            return
        self._start_read_timer()
        if self._parse_state is ParseState.BODY:
            self._count_body(len(data))
        elif not self._progressed:
            self._unparsed_bytes += len(data)
            if self._unparsed_bytes > _MAX_HEADER_BYTES:
                self._refuse(431, _LARGE_HEADERS)

    def on_message_begin(self) -> None:
        """Start to read headers."""
        super().on_message_begin()
        self._parse_state, self._header_bytes = ParseState.HEADERS, 0

    def on_url(self, url: bytes) -> None:
        """Read a part of the URL."""
        self._count_headers(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Read a header; ignore trailers, which would bypass all checks."""
        if self._parse_state is ParseState.HEADERS:
            self._count_headers(len(name) + len(value) + 4)
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start to read the body. A response that is sent before its end is the last on this connection."""
        if len(self.pipeline) >= _MAX_QUEUED:
            self._pause_then(self.abort)
            raise RefusedHeadersError  # the parser drops the rest of the data
        super().on_headers_complete()  # raises if the URL has no path, as in CONNECT
        self._cycles = [*(cycle for cycle in self._cycles if not cycle.response_complete), self.cycle]
        self._stop_read_timer()
        self._parse_state, self._progressed = ParseState.BODY, True
        self._received_bytes = self._framing_bytes = self._body_bytes = 0
        self._max_body = self.max_body_by_path.get(self.cycle.scope["path"].rpartition("/")[2], self.max_body)
        # Data after a request to upgrade is not parsed.
        self._keep_alive = self.cycle.keep_alive and not self.parser.should_upgrade()
        self.cycle.keep_alive = False
        self.cycle.scope[DISCONNECTED] = self.transport.is_closing  # type: ignore[literal-required]
        self.cycle.scope[SET_OWNER] = self.set_owner  # type: ignore[literal-required]
        self.cycle.scope[MANAGEMENT] = self.is_management  # type: ignore[literal-required]

    def set_owner(self, token: str | None) -> None:
        """Set the owner: the id of the valid token of the last request, or None."""
        if not self.transport.is_closing():
            self.slots.put(self, token)

    def on_body(self, body: bytes) -> None:
        """Read a part of a body, up to a maximum; `read_body` may have a smaller one."""
        self._got_body = True
        self._body_bytes += len(body)
        if self._body_bytes > self._max_body:
            self._refuse(413, _LARGE_BODY)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Reset the counters, and let the connection be reused."""
        self._stop_read_timer()
        self._parse_state, self._progressed, self._unparsed_bytes = ParseState.IDLE, True, 0
        if not self.cycle.response_started:
            self.cycle.keep_alive = self._keep_alive
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Start the timeout of the client to read the last response; limit queued requests."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._start_send_timer()
        elif self.pipeline or self._is_paused:
            self.flow.pause_reading()  # uvicorn resumes it, however many requests are queued

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, even if its client has not read everything."""
        super().timeout_keep_alive_handler()
        self._start_send_timer()

    def shutdown(self) -> None:
        """Close the connection after the current response."""
        self._keep_alive = False
        super().shutdown()

    def pause_writing(self) -> None:
        """Start the timeout of a client that does not read."""
        super().pause_writing()
        self._start_send_timer()

    def resume_writing(self) -> None:
        """Stop the timeout: the client reads."""
        if not self.transport.is_closing():
            self._stop_send_timer()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Send the error in the format of all errors."""
        del msg
        if self._header_bytes > _MAX_HEADER_BYTES:
            self._refuse(431, _LARGE_HEADERS)
        else:
            self._refuse(400, _MALFORMED)

    def _count_headers(self, count: int) -> None:
        self._header_bytes += count
        if self._header_bytes > _MAX_HEADER_BYTES:
            raise RefusedHeadersError

    def _count_body(self, count: int) -> None:
        if self._progressed:  # the data includes headers
            return
        self._received_bytes += count
        self._framing_bytes = 0 if self._got_body else self._framing_bytes + count
        maximum = _CHUNK_OVERHEAD * self._max_body + _MAX_HEADER_BYTES
        if self._framing_bytes > _MAX_FRAMING_BYTES or self._received_bytes > maximum:
            self._refuse(431, _LARGE_HEADERS)

    def _refuse(self, status: int, body: bytes) -> None:
        if self._is_paused or self.transport.is_closing():
            return
        if self._is_answering() or (self._parse_state is ParseState.BODY and self.cycle.response_started):
            self.abort()  # the client must not take the error for another response
        elif self.slots.may_refuse_at_once(self):
            self._respond_and_close(status, body)
        else:
            self._pause_then(partial(self._respond_and_close, status, body))

    def _pause_then(self, then: Callable[[], None]) -> None:
        self._is_paused = True
        self.pipeline.clear()
        self.flow.pause_reading()
        self._stop_read_timer()
        self._read_timer = self.loop.call_later(UNAUTHENTICATED_DELAY, then)

    def _respond_and_close(self, status: int, body: bytes) -> None:
        length = b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + _HEADERS + length + body)
        self.transport.close()
        self._start_send_timer()

    def _start_read_timer(self) -> None:
        if self._read_timer is None:
            seconds = self.body_timeout if self._parse_state is ParseState.BODY else self.header_timeout
            self._read_timer = self.loop.call_later(seconds, self._on_read_timeout)

    def _on_read_timeout(self) -> None:
        """Close the connection, unless the client waits for an earlier response: nothing is read meanwhile."""
        self._read_timer = None
        if self._is_answering():
            self._start_read_timer()
        else:
            self.abort()

    def _is_answering(self) -> bool:
        """Return whether an earlier request than the one that is read is in flight."""
        if self._parse_state is ParseState.BODY:
            return bool(self.pipeline)
        return self.cycle is not None and not self.cycle.response_complete

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _start_send_timer(self) -> None:
        if self._send_timer is None:
            self._send_timer = self.loop.call_later(self.send_timeout, self.abort)

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def abort(self) -> None:
        """Close immediately: close() would first wait for the client to read everything."""
        self.transport.abort()
