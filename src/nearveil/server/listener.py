"""A uvicorn server that stops without resetting connections, and limits their time, size, bytes and number."""

import asyncio
import ctypes
import logging
import signal
import socket
import struct
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any, ClassVar

import h11
import uvicorn
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from nearveil.server.limits import UNAUTHENTICATED, UNAUTHENTICATED_DELAY, TokenBuckets
from nearveil.server.middleware import DISCONNECTED, MANAGEMENT, SET_OWNER, get_network
from nearveil.wire.schema import Problem

MAX_HEADER_BYTES = 32 << 10  # bytes of an incomplete request line and headers
_MAX_PER_OWNER = 64  # connections of one token, or of unauthenticated clients at one address
_MAX_QUEUED_BYTES = 64 << 10  # of later requests, while a request is answered
_PIECE = 16 << 10  # bytes that are parsed at once: chunks of one byte take ten microseconds each
_REFUSALS = {
    400: Problem(code="http", message="Malformed HTTP request."),
    431: Problem(code="headers", message="The headers are too large."),
}
_HEADERS = [("content-type", "application/json"), ("x-content-type-options", "nosniff"), ("cache-control", "no-store")]
_LOG = logging.getLogger("nearveil.server.http")
_LOG.setLevel(logging.ERROR)  # uvicorn warns of every malformed request: anybody could fill the log
_LAST_REQUESTS = 0.5  # seconds for handshakes and first requests that have started when new connections are refused
_SO_ATTACH_FILTER = 26
# A BPF program for packets of a listening socket: drop those with the SYN flag (bit 2 of byte 13).
_DROP_SYN = ((0x30, 0, 0, 13), (0x45, 0, 1, 2), (0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFF_FFFF))


class Slots:
    """Limit connections to `maximum`, and those of each owner."""

    # The owner of a connection is the valid token of its last request, or else the address of the client. A quarter of
    # all slots is for clients without a valid token. Beyond a limit the least recently used connection is closed, not
    # the new one: nobody is locked out by idle connections.

    def __init__(self, maximum: int) -> None:
        unauthenticated = max(1, maximum // 4)
        self._maximum = {False: unauthenticated, True: max(1, maximum - unauthenticated)}  # by whether it has a token
        self._max_per_owner = {False: max(1, min(_MAX_PER_OWNER, unauthenticated // 2)), True: _MAX_PER_OWNER}
        self._owners: dict[Connection, tuple[bool, str]] = {}  # least recently used first
        self._counts: Counter[tuple[bool, str] | bool] = Counter()
        self._refusals = TokenBuckets(*UNAUTHENTICATED)

    def put(self, connection: "Connection", token: str | None) -> None:
        """Set the owner of a connection, which is now the most recently used: a token, or its address."""
        self.drop(connection)
        owner = (token is not None, token or get_network(connection.client))
        self._owners[connection] = owner
        self._counts.update((owner, owner[0]))
        for group, maximum in ((owner, self._max_per_owner[owner[0]]), (owner[0], self._maximum[owner[0]])):
            if self._counts[group] > maximum:
                oldest = next(other for other, its_owner in self._owners.items() if group in (its_owner, its_owner[0]))
                self.drop(oldest)
                oldest.abort()

    def drop(self, connection: "Connection") -> None:
        """Remove a connection."""
        owner = self._owners.pop(connection, None)
        for group in () if owner is None else (owner, owner[0]):
            self._counts[group] -= 1
            if not self._counts[group]:
                del self._counts[group]

    def may_refuse_at_once(self, connection: "Connection") -> bool:
        """Count a malformed request; return whether its address has sent few of them recently."""
        return not self._refusals.take(get_network(connection.client))


class Connection(H11Protocol):
    """A connection of uvicorn that is closed when its client is slow, sends too much, or is the oldest of too many."""

    # An address that sends many malformed requests waits for each refusal. Bodies in chunks are not read.

    header_timeout = 10.0
    body_timeout = 20.0
    send_timeout = 60.0
    slots: ClassVar[Slots] = Slots(1000)
    is_management: ClassVar[bool] = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = _LOG
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._is_refusing = False  # whether the connection will be closed without reading more

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timeout of the headers."""
        super().connection_made(transport)
        self.slots.put(self, None)
        self._start_timer("headers", self.header_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        """Release the timers and the slot."""
        self.slots.drop(self)
        self._stop_timers("headers", "body", "send")
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse data, except later chunks of a body, and of a connection that is about to be closed."""
        for start in range(0, len(data), _PIECE):
            is_chunked = self.conn.their_state is h11.SEND_BODY and b"transfer-encoding" in dict(self.headers)
            if is_chunked or self._is_refusing:
                self.flow.pause_reading()  # uvicorn resumes it while a request is answered
                return
            if self.transport.is_closing():
                return
            super().data_received(data[start : start + _PIECE])
        if self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) > _MAX_QUEUED_BYTES:
            self.abort()

    def handle_events(self) -> None:
        """Parse the received data; start the timeout of the missing part."""
        last = self.cycle
        super().handle_events()
        if self.cycle is not last:
            self.cycle.scope[DISCONNECTED] = self.transport.is_closing  # type: ignore[literal-required]
            self.cycle.scope[SET_OWNER] = self.set_owner  # type: ignore[literal-required]
            self.cycle.scope[MANAGEMENT] = self.is_management  # type: ignore[literal-required]
        state = self.conn.their_state
        if state is h11.SEND_BODY:
            self._stop_timers("headers")
            self._start_timer("body", self.body_timeout)
            if self.cycle is not last:
                self.headers.append(CLOSE_HEADER)  # a response before the end of its request is the last
        elif state is h11.IDLE:
            if self.conn.trailing_data[0]:
                self._start_timer("headers", self.header_timeout)
        else:
            self._stop_timers("headers", "body")
            headers = [] if self.cycle is None else self.cycle.scope["headers"]  # Starlette copies the list
            if CLOSE_HEADER in headers and not self.cycle.response_started:
                headers.remove(CLOSE_HEADER)  # type: ignore[attr-defined]

    def set_owner(self, token: str | None) -> None:
        """Set the owner: the id of the valid token of the last request, or None."""
        if not self.transport.is_closing():
            self.slots.put(self, token)

    def on_response_complete(self) -> None:
        """Start the timeout of the client to read the last response."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._start_timer("send", self.send_timeout)

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, even if its client has not read everything."""
        super().timeout_keep_alive_handler()
        self._start_timer("send", self.send_timeout)

    def pause_writing(self) -> None:
        """Start the timeout of a client that does not read."""
        super().pause_writing()
        self._start_timer("send", self.send_timeout)

    def resume_writing(self) -> None:
        """Stop the timeout: the client reads."""
        if not self.transport.is_closing():
            self._stop_timers("send")
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Send the error in the format of all errors; late if the address has sent many malformed requests."""
        del msg
        hint = getattr(sys.exception(), "error_status_hint", 400)
        respond = partial(self._respond_and_close, hint if hint in _REFUSALS else 400)
        if self.cycle is not None and not self.cycle.response_complete:
            self.abort()
        elif self.slots.may_refuse_at_once(self):
            respond()
        else:
            self._is_refusing = True
            self.flow.pause_reading()
            self._start_timer("send", UNAUTHENTICATED_DELAY, respond)

    def _respond_and_close(self, status: int) -> None:
        body = _REFUSALS[status].model_dump_json().encode()
        headers = [*_HEADERS, ("content-length", str(len(body))), ("connection", "close")]
        response = h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status])
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
        self._start_timer("send", self.send_timeout)

    def _start_timer(self, name: str, seconds: float, action: Callable[[], None] | None = None) -> None:
        """Call `action` later, by default abort the connection, unless the timer runs."""
        if name not in self._timers:
            self._timers[name] = self.loop.call_later(seconds, self._end_timer, name, action or self.abort)

    def _end_timer(self, name: str, action: Callable[[], None]) -> None:
        del self._timers[name]
        action()

    def _stop_timers(self, *names: str) -> None:
        for name in names:
            timer = self._timers.pop(name, None)
            if timer is not None:
                timer.cancel()

    def abort(self) -> None:
        """Close immediately: close() would first wait for the client to read everything."""
        self.transport.abort()


class Server(uvicorn.Server):
    """A server that stops on SIGTERM and SIGINT, however early they come, and reloads on SIGHUP."""

    # For `shutdown_delay` seconds after SIGTERM, requests are still answered. Then new connections are refused, open
    # ones have half a second for a first request, and uvicorn finishes requests in flight.

    def __init__(
        self,
        config: uvicorn.Config,
        ready: Callable[[], None],
        stopping: Callable[[], None] = lambda: None,
        *,
        reload: Callable[[], None] | None = None,
        shutdown_delay: float = 0.0,
        management: tuple[socket.socket, type[Connection]] | None = None,
    ) -> None:
        super().__init__(config)
        self._ready, self._stopping, self._reload = ready, stopping, reload
        self._shutdown_delay, self._management = shutdown_delay, management

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Handle signals that arrive before uvicorn handles them; uvicorn raises them again when it has stopped."""
        with ExitStack() as stack:
            for number in (signal.SIGTERM, signal.SIGINT):
                stack.callback(signal.signal, number, signal.signal(number, self.handle_exit))
            if self._reload is not None:
                stack.callback(signal.signal, signal.SIGHUP, signal.signal(signal.SIGHUP, signal.SIG_IGN))
                signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGHUP,))  # blocked by the supervisor until now
            yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop; at once on a second Ctrl-C."""
        if not self.should_exit:
            if sig != signal.SIGTERM:
                self._shutdown_delay = 0.0  # Ctrl-C: a person waits
            self._stopping()
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to answer requests."""
        loop = asyncio.get_running_loop()
        if self._reload is not None:
            loop.add_signal_handler(signal.SIGHUP, self._reload)
        create_server = loop.create_server
        if self.config.ssl is not None:
            seconds = self.config.http.header_timeout  # type: ignore[union-attr]
            timeouts = {"ssl_handshake_timeout": seconds, "ssl_shutdown_timeout": seconds}
            loop.create_server = partial(create_server, **timeouts)  # type: ignore[method-assign]
        await super().startup(sockets=sockets)
        if self._management is not None:
            sock, protocol = self._management
            make = partial(protocol, config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
            self.servers.append(await create_server(make, sock=sock))
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer for the shutdown delay, refuse new connections, and finish requests in flight."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._shutdown_delay
        while loop.time() < end and not self.force_exit:
            await asyncio.sleep(0.1)
        if self._shutdown_delay:
            for sock in sockets or ():
                refuse_connections(sock)
            await asyncio.sleep(_LAST_REQUESTS)
        await super().shutdown(sockets)


def refuse_connections(sock: socket.socket) -> None:
    """Start no more handshakes at a listening socket, where the system can (Linux); finish those in progress."""
    # To close the socket would reset connections that are not accepted yet. Clients send SYN again after a second.
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in _DROP_SYN))
    with suppress(OSError):
        filter_ = struct.pack("HL", len(_DROP_SYN), ctypes.addressof(program))
        sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filter_)
