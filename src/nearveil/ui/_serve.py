"""The page on a port of loopback, until somebody stops it."""

import socket
from collections.abc import Callable
from contextlib import ExitStack

import uvicorn

from nearveil.errors import NearveilError
from nearveil.features.images import MOST_BYTES
from nearveil.service._connections import Connection, Slots
from nearveil.service._server import Server
from nearveil.ui._app import create_app
from nearveil.ui._desk import Desk
from nearveil.ui._entry import Entry

HOST = "127.0.0.1"  # and no other: the page shows what is private
PORT = 8322
_CONNECTIONS = 200
_GRACE = 6  # seconds for what is under way when it is stopped; `nearveil ui` ends before that


class _Limited(Connection):
    """Everybody on the machine can connect: nobody may send headers without end, or hold connections for ever."""

    body_seconds = 300.0  # the way may be a tunnel
    largest_body = MOST_BYTES + (1 << 16)  # beyond MOST_BYTES the page itself says why


class PortError(NearveilError, ValueError):
    """The page cannot listen there."""


def serve(
    desk: Desk, *, port: int = PORT, ready: Callable[[str], None], stopping: Callable[[], None] = lambda: None
) -> None:
    """Show the page at 127.0.0.1 until SIGINT or SIGTERM.

    Parameters
    ----------
    desk : Desk
    port : int, default=8322
        0 takes a free one.
    ready : callable
        Told the address when it answers. The address holds a token that is good once.
    stopping : callable, optional
        Called at the signal. A question that is under way is waited for, as long as its server takes.
    """
    with ExitStack() as stack:
        listening = bound(port)
        stack.callback(listening.close)
        number = int(listening.getsockname()[1])
        entry = Entry()
        address = f"http://{HOST}:{number}/?t={entry.token}"
        server = Server(config(desk, entry, number), lambda: ready(address), stopping)
        stack.enter_context(server.signals())
        server.run(sockets=[listening])


def bound(port: int) -> socket.socket:
    """Return a socket of loopback."""
    try:
        return socket.create_server((HOST, port))
    except (OSError, OverflowError) as error:
        words = getattr(error, "strerror", None) or "there is no such port"
        raise PortError(f"--port: cannot listen at {HOST}:{port}: {words}; --port 0 takes a free one") from None


def config(desk: Desk, entry: Entry, port: int) -> uvicorn.Config:
    """Return how uvicorn serves the page: no log of requests, no words about itself."""
    return uvicorn.Config(
        create_app(desk, entry, port),
        http=type("LimitedConnection", (_Limited,), {"slots": Slots(_CONNECTIONS)}),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=_GRACE,
    )
