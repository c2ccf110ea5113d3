"""A uvicorn server that stops without resetting connections, and reloads certificates on SIGHUP."""

import asyncio
import ctypes
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from types import FrameType

import uvicorn

from nearveil.server.connections import Connection

_LAST_REQUESTS = 0.5  # seconds for handshakes and first requests that have started when new connections are refused
_SO_ATTACH_FILTER = 26
# A BPF program for packets of a listening socket: drop those with the SYN flag (bit 2 of byte 13).
_DROP_SYN = ((0x30, 0, 0, 13), (0x45, 0, 1, 2), (0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFF_FFFF))


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
        sock.setsockopt(
            socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", len(_DROP_SYN), ctypes.addressof(program))
        )
