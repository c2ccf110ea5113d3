"""Uvicorn, with what it has no settings for: signals that come early, the time that TLS may take."""

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType

import uvicorn


class Server(uvicorn.Server):
    """A server that stops on SIGTERM and SIGINT, however early they come.

    `ready`: Called when requests are answered.
    `stopping`: Called at the first signal.
    """

    def __init__(
        self, config: uvicorn.Config, ready: Callable[[], None], stopping: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(config)
        self._ready, self._stopping = ready, stopping

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Stop on a signal that comes before uvicorn listens for it; when uvicorn has stopped, it raises it again."""
        with ExitStack() as stack:
            for one in (signal.SIGTERM, signal.SIGINT):
                stack.callback(signal.signal, one, signal.signal(one, self._stop))
            yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop; at once on a second Ctrl-C."""
        if not self.should_exit:
            self._stopping()
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to answer."""
        if self.config.ssl is not None:
            loop, seconds = asyncio.get_running_loop(), self.config.http.header_seconds  # type: ignore[union-attr]
            timeouts = {"ssl_handshake_timeout": seconds, "ssl_shutdown_timeout": seconds}
            loop.create_server = partial(loop.create_server, **timeouts)  # type: ignore[method-assign]
        await super().startup(sockets=sockets)
        if self.started:
            self._ready()

    def _stop(self, *_: object) -> None:
        if not self.should_exit:
            self._stopping()
        self.should_exit = True
