"""What the tests of clients share: a small gallery behind a server in this process, and all that it is sent."""

import socket
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

import httpx

from nearveil import Client
from nearveil.gallery import Index, Item
from nearveil.ledger import Account, Ledger
from nearveil.privacy.noise import Source, unsafe_seeded
from nearveil.server.app import create_app
from nearveil.server.galleries import Gallery, OpenGallery
from nearveil.server.settings import Settings
from nearveil.server.tokens import TokenStore
from nearveil.wire.messages import PublicPart, decode_frame
from nearveil.wire.schema import FRAME
from tests.search.standins import clustered

DIMENSION, COUNT, FRACTION, SETS = 8, 120, 0.1, 6
CANDIDATES = 12
WEBP = b"RIFF\x04\0\0\0WEBP"
URL = "https://birds.example:8321"
Change = Callable[[httpx.Request, httpx.Response], httpx.Response]


def unit(rows: NDArray[Any]) -> NDArray[np.float32]:
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True), dtype=np.float32)


QUERIES = unit(clustered(3, 40, DIMENSION)[0])


def make_index(place: Path, fractions: tuple[float, ...] = (FRACTION,)) -> Path:
    """Make an index, publish its maps and return where it is."""
    rows = unit(clustered(2, COUNT, DIMENSION)[0])
    with Index.create(place, dimension=DIMENSION, extractor="toy") as index:
        index.add(
            Item(row, f"bird {n}.png", WEBP + bytes([n]), b"original %d" % n if n % 3 else None)
            for n, row in enumerate(rows)
        )
        for fraction in fractions:
            index.publish(4.0, fraction, n_sets=SETS, reach=0.0)
    return place


@contextmanager
def opened(
    place: Path, name: str = "birds", *, offers: tuple[Any, ...] = ("names", "thumbnails", "originals")
) -> Iterator[OpenGallery]:
    with Index.open(place) as index:
        yield OpenGallery(index, name, offers=offers)


@contextmanager
def new_account(place: Path, epsilon: float = 100.0) -> Iterator[Account]:
    with Ledger(place) as ledger:
        yield opened_account(ledger, "me", epsilon)


def opened_account(ledger: Ledger, name: str, epsilon: float = 100.0) -> Account:
    return ledger.open_account(
        name, owner="me", protects="query", unit="image", relation="replace", epsilon=epsilon, delta=0.0
    )


Seen = tuple[str, str, tuple[tuple[bytes, bytes], ...], bytes]
"""Method, URL, headers and body of a request, to the byte."""


@dataclass
class Wire(httpx.AsyncBaseTransport):
    """Carries requests to an application in this process, keeps them, and may change or lose the replies."""

    inner: httpx.AsyncBaseTransport
    change: Change | None = None
    before: Callable[[httpx.Request], object] | None = None
    requests: list[Seen] = field(default_factory=list)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = await request.aread()
        self.requests.append((request.method, str(request.url), tuple(request.headers.raw), body))
        if self.before is not None:
            self.before(request)
        reply = await self.inner.handle_async_request(request)
        return reply if self.change is None else self.change(request, reply)

    @property
    def posts(self) -> list[Seen]:
        return [seen for seen in self.requests if seen[0] == "POST"]


class Server:
    """The application of a server, with a token for it."""

    def __init__(self, place: Path, *galleries: Gallery) -> None:
        self.tokens = TokenStore(place)
        self.token = self.tokens.create("test", scopes=("query", "originals"))[1]
        told = Settings(tokens=str(place), trusted_hosts=("*",), rate=None, log_file=place.with_suffix(".log"))
        self.app = create_app(galleries, self.tokens, told)

    def wire(self, change: Change | None = None) -> Wire:
        return Wire(httpx.ASGITransport(self.app), change)

    def close(self) -> None:
        self.app.state.nearveil.close()
        self.tokens.close()


@dataclass
class Scene:
    """A gallery, a server before it, an account, and clients."""

    gallery: Gallery
    server: Server
    account: Account
    stack: ExitStack

    def client(self, change: Change | None = None, **options: Any) -> tuple[Client, Wire]:
        """Return a client of the server, and all that it will send."""
        wire = options.pop("wire", None) or self.server.wire(change)
        given: dict[str, Any] = {"account": self.account, "transport": wire} | options
        return self.stack.enter_context(Client(URL, self.server.token, **given)), wire

    def another(self, name: str) -> Account:
        """Open one more account, in the same ledger."""
        return opened_account(self.account._ledger, name)

    @property
    def paid(self) -> int:
        """How often the account was debited."""
        return sum(entry.kind == "debit" for entry in self.account.history())


@contextmanager
def scene(made: Path, folder: Path, epsilon: float = 100.0, **options: Any) -> Iterator[Scene]:
    with ExitStack() as stack:
        gallery = stack.enter_context(opened(made, **options))
        server = Server(folder / "tokens.db", gallery)
        stack.callback(server.close)
        account = stack.enter_context(new_account(folder / "budget.db", epsilon))
        yield Scene(gallery, server, account, stack)


def is_post(request: httpx.Request) -> bool:
    return request.method == "POST"


class Body(httpx.AsyncByteStream):
    """A body, in pieces."""

    def __init__(self, *parts: bytes) -> None:
        self._parts = parts

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self._parts:
            yield part


def framed(data: bytes, status: int = 200, kind: str = FRAME, **headers: str) -> httpx.Response:
    return httpx.Response(status, headers={"content-type": kind, **headers}, stream=Body(data))


class Endless(httpx.AsyncByteStream):
    """A body that does not end; it counts what was taken of it."""

    taken = 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            self.taken += 1 << 16
            yield bytes(1 << 16)


def public_of(gallery: Gallery) -> PublicPart:
    found: PublicPart = decode_frame(gallery.map(), PublicPart)
    return found


class _Rehearsed:
    """Words of a seed that are said to be sound: accounts pay for nothing else. Only a test may say so."""

    sound = True

    def __init__(self, seed: int) -> None:
        self.words = unsafe_seeded(seed).words


def seeded(seed: int = 5) -> Source:
    return _Rehearsed(seed)


@contextmanager
def raw_server(answer: Callable[[socket.socket], None], context: ssl.SSLContext | None = None) -> Iterator[int]:
    """Listen on loopback, do `answer` with every connection, and yield the port."""
    listening = socket.create_server(("127.0.0.1", 0))
    stopped = threading.Event()

    def serve() -> None:
        while not stopped.is_set():
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=one, args=(connection,), daemon=True).start()

    def one(connection: socket.socket) -> None:
        with suppress(OSError), connection:
            connection.settimeout(10)
            if context is None:
                answer(connection)
                return
            with context.wrap_socket(connection, server_side=True) as wrapped:
                answer(wrapped)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listening.getsockname()[1]
    finally:
        stopped.set()
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join(5)


def head_of(connection: socket.socket) -> bytes:
    """Read a request up to the end of its headers."""
    taken = b""
    while b"\r\n\r\n" not in taken:
        part = connection.recv(65536)
        if not part:
            break
        taken += part
    return taken
