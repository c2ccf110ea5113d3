"""HTTP connections with limits on time, size, queued requests, and how many one client may hold; on uvicorn."""

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

_LARGEST_HEAD = 32 << 10  # bytes of the request line and the headers
_MOST_PER_OWNER = 64  # connections of one token, or of strangers at one address
_MOST_QUEUED = 8  # requests of one connection that wait while an earlier one is answered
_LARGEST_FRAMING = 16 << 10  # bytes in a row, after the headers, that belong to no body: sizes of chunks, trailers
_CHUNKED = 8  # times the size of a body that it may take in chunks: those of one byte take six
_BAD = Problem(code="http", message="this is not HTTP").model_dump_json().encode()
_HEAVY = Problem(code="headers", message="the headers are too large").model_dump_json().encode()
_LARGE = Problem(code="too_large", message="the body is too large").model_dump_json().encode()
_LOG = logging.getLogger("nearveil.server.http")
_LOG.setLevel(logging.ERROR)  # uvicorn warns of every malformed request: strangers would fill the log
_PLAIN = b"content-type: application/json\r\nx-content-type-options: nosniff\r\ncache-control: no-store\r\n"


class Place(Enum):
    """Where in a request a connection is."""

    BETWEEN = 0
    HEAD = 1
    REST = 2


class RefusedHeadError(Exception):
    """The parser must stop: the headers are too large, or too many requests wait."""


class Share:
    """Connections of one kind, at most so many in all and of one owner. The least recently used is closed."""

    def __init__(self, most: int, most_per_owner: int) -> None:
        self._most, self._most_per_owner = most, most_per_owner
        self._all: OrderedDict[Connection, str] = OrderedDict()
        self._held: dict[str, OrderedDict[Connection, None]] = {}

    def put(self, connection: "Connection", owner: str) -> None:
        """Take a connection, or note that it is used again."""
        self.drop(connection)
        self._all[connection] = owner
        self._held.setdefault(owner, OrderedDict())[connection] = None
        if len(self._held[owner]) > self._most_per_owner:
            self._close(next(iter(self._held[owner])))
        if len(self._all) > self._most:
            self._close(next(iter(self._all)))

    def drop(self, connection: "Connection") -> None:
        """Forget a connection."""
        owner = self._all.pop(connection, None)
        if owner is not None:
            del self._held[owner][connection]
            if not self._held[owner]:
                del self._held[owner]

    def _close(self, connection: "Connection") -> None:
        self.drop(connection)
        connection.abort()


class Slots:
    """Limits how many connections each owner may hold, of `most` in all.

    A connection belongs to a token while its last request had a good one, else to a stranger at an address. Strangers
    have a quarter of all. Beyond a limit an old connection is closed, not the new one, so nobody is locked out by those
    who hold many and do nothing.
    """

    def __init__(self, most: int) -> None:
        strangers = max(1, most // 4)
        self._strangers = Share(strangers, max(1, min(_MOST_PER_OWNER, strangers // 2)))
        self._known = Share(max(1, most - strangers), _MOST_PER_OWNER)
        self._refusals = make_address_buckets(UNAUTHENTICATED)

    def put(self, connection: "Connection", token: str | None) -> None:
        """Note who used a connection last."""
        if token is None:
            self._known.drop(connection)
            self._strangers.put(connection, get_network(connection.client))
        else:
            self._strangers.drop(connection)
            self._known.put(connection, token)

    def may_refuse_at_once(self, connection: "Connection") -> bool:
        """Count a malformed request; return whether its address sent few of them lately."""
        try:
            self._refusals.take(get_network(connection.client))
        except RateError:
            return False
        return True

    def drop(self, connection: "Connection") -> None:
        """Forget a connection."""
        self._strangers.drop(connection)
        self._known.drop(connection)


class Connection(HttpToolsProtocol):
    """A connection of uvicorn with limits of its own.

    It is closed if its headers or body come too late or are too large, if too many requests queue, if its client does
    not read answers, if it is answered before all of its request was read, or as the oldest of too many (`Slots`). One
    that queues too many requests, or whose address sends malformed ones without end, is first held unread for a while,
    so that its client cannot try again at once. Headers after the body are ignored: they came after all checks.
    """

    header_seconds = 10.0
    body_seconds = 20.0
    send_seconds = 60.0
    largest_body = 1 << 16
    larger_bodies: ClassVar[dict[str, int]] = {}  # by the last part of the path
    slots: ClassVar[Slots] = Slots(1000)
    is_management: ClassVar[bool] = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = _LOG
        self._read_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self._place = Place.BETWEEN
        self._turned = False  # whether headers or a request were complete in what came last
        self._fed = False  # whether there was something of a body in it
        self._head = self._unparsed = 0  # bytes of the request line and headers; what came before they were complete
        self._rest = self._framing = self._body = 0  # bytes; framing: since the last piece of a body
        self._most = self.largest_body  # bytes that the body of this request may have
        self._held = False  # whether nothing more is read before it is closed
        self._keep = True  # whether the connection stays open if the whole request is read
        self._unanswered: list[RequestResponseCycle] = []

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for headers."""
        super().connection_made(transport)
        self.slots.put(self, None)
        self._wait_for_more()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timers and the slot."""
        self.slots.drop(self)
        self._stop_reading()
        self._stop_send()
        for cycle in self._unanswered:  # uvicorn tells the last alone; the others would write to what is closed
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count what comes of a request that is not complete: the parser keeps some of it, however long."""
        if self._held:
            self.flow.pause_reading()  # uvicorn reads on while a request is answered
            return
        self._turned = self._fed = False
        super().data_received(data)
        if self._place is Place.BETWEEN and self._turned:
            return
        self._wait_for_more()
        if self._place is Place.REST:
            self._count_rest(len(data))
        elif not self._turned:
            self._unparsed += len(data)
            if self._unparsed > _LARGEST_HEAD:
                self._refuse(431, _HEAVY)

    def on_message_begin(self) -> None:
        """Take headers."""
        super().on_message_begin()
        self._place, self._head = Place.HEAD, 0

    def on_url(self, url: bytes) -> None:
        """Take a piece of the URL."""
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, if it comes before the body: what comes after it would get round all checks."""
        if self._place is Place.HEAD:
            self._count_head(len(name) + len(value) + 4)
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin with the body. An answer that is sent before the end of it is the last on this connection."""
        if len(self.pipeline) >= _MOST_QUEUED:
            self._hold(self.abort)
            raise RefusedHeadError  # the parser stops: what else was read is not looked at
        super().on_headers_complete()  # raises where the URL has no path, as that of CONNECT
        self._unanswered = [*(cycle for cycle in self._unanswered if not cycle.response_complete), self.cycle]
        self._stop_reading()
        self._place, self._turned = Place.REST, True
        self._rest = self._framing = self._body = 0
        self._most = self.larger_bodies.get(self.cycle.scope["path"].rpartition("/")[2], self.largest_body)
        # What follows a wish for another protocol is not parsed.
        self._keep = self.cycle.keep_alive and not self.parser.should_upgrade()
        self.cycle.keep_alive = False
        self.cycle.scope[DISCONNECTED] = self.transport.is_closing  # type: ignore[literal-required]
        self.cycle.scope[SET_OWNER] = self.belong_to  # type: ignore[literal-required]
        self.cycle.scope[MANAGEMENT] = self.is_management  # type: ignore[literal-required]

    def belong_to(self, token: str | None) -> None:
        """Note whose good token a request had; None if it had none."""
        if not self.transport.is_closing():
            self.slots.put(self, token)

    def on_body(self, body: bytes) -> None:
        """Take a piece of a body, up to a size; who reads it may have a smaller one."""
        self._fed = True
        self._body += len(body)
        if self._body > self._most:
            self._refuse(413, _LARGE)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Count anew, and let the connection be used again."""
        self._stop_reading()
        self._place, self._turned, self._unparsed = Place.BETWEEN, True, 0
        if not self.cycle.response_started:
            self.cycle.keep_alive = self._keep
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Where this was the last answer: wait for the client to read it, but not for ever."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._wait_for_reader()
        elif self.pipeline or self._held:
            self.flow.pause_reading()  # uvicorn reads on, however many requests wait

    def timeout_keep_alive_handler(self) -> None:
        """Close what is idle, also where the client has not read all."""
        super().timeout_keep_alive_handler()
        self._wait_for_reader()

    def shutdown(self) -> None:
        """Let the answer that is under way be the last."""
        self._keep = False
        super().shutdown()

    def pause_writing(self) -> None:
        """Begin to wait for a client that does not read."""
        super().pause_writing()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        """Wait no more: it reads."""
        if not self.transport.is_closing():
            self._stop_send()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Say that it is not HTTP, or too much of it, as all problems are said."""
        del msg
        if self._head > _LARGEST_HEAD:
            self._refuse(431, _HEAVY)
        else:
            self._refuse(400, _BAD)

    def _count_head(self, count: int) -> None:
        self._head += count
        if self._head > _LARGEST_HEAD:
            raise RefusedHeadError

    def _count_rest(self, count: int) -> None:
        if self._turned:  # some of it were headers
            return
        self._rest += count
        self._framing = 0 if self._fed else self._framing + count
        if self._framing > _LARGEST_FRAMING or self._rest > _CHUNKED * self._most + _LARGEST_HEAD:
            self._refuse(431, _HEAVY)

    def _refuse(self, status: int, body: bytes) -> None:
        if self._held or self.transport.is_closing():
            return
        if self._is_answering() or (self._place is Place.REST and self.cycle.response_started):
            self.abort()  # another answer is on its way, which this one must not look like
        elif self.slots.may_refuse_at_once(self):
            self._end(status, body)
        else:
            self._hold(partial(self._end, status, body))

    def _hold(self, then: Callable[[], None]) -> None:
        self._held = True
        self.pipeline.clear()
        self.flow.pause_reading()
        self._stop_reading()
        self._read_timer = self.loop.call_later(UNAUTHENTICATED_DELAY, then)

    def _end(self, status: int, body: bytes) -> None:
        length = b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + _PLAIN + length + body)
        self.transport.close()
        self._wait_for_reader()

    def _wait_for_more(self) -> None:
        if self._read_timer is None:
            seconds = self.body_seconds if self._place is Place.REST else self.header_seconds
            self._read_timer = self.loop.call_later(seconds, self._late)

    def _late(self) -> None:
        """Close, unless the client waits for us: nothing more may be read while an earlier request is answered."""
        self._read_timer = None
        if self._is_answering():
            self._wait_for_more()
        else:
            self.abort()

    def _is_answering(self) -> bool:
        """Return whether a request is under way that came before the one that is read now."""
        if self._place is Place.REST:
            return bool(self.pipeline)
        return self.cycle is not None and not self.cycle.response_complete

    def _stop_reading(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _wait_for_reader(self) -> None:
        if self._send_timer is None:
            self._send_timer = self.loop.call_later(self.send_seconds, self.abort)

    def _stop_send(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def abort(self) -> None:
        """Close at once."""
        # Not close(), which would first wait for the client to read what is left.
        self.transport.abort()
