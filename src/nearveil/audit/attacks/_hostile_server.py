"""A hostile server in this process, and a real client that asks it."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import perf_counter

import httpx

from nearveil.audit._experiment import Floats
from nearveil.audit.attacks._clock import DIMENSION, EPSILON, QuestionTimer
from nearveil.audit.attacks._wire import FreeAccount
from nearveil.client import GalleryInfo, UnansweredError
from nearveil.client.clients import Client
from nearveil.wire.messages import PublicPart
from nearveil.wire.schema import FRAME, Galleries

ETAG = '"map"'
_URL = "https://hostile.example"
_JSON = "application/json"
_LIST = Galleries(
    galleries=(
        GalleryInfo(
            name="hostile",
            kind="open",
            candidates=(0.1,),
            offers=(),
            extractor="",
            fingerprint="hostile",
            dimension=DIMENSION,
            revision=1,
        ),
    )
)


class HostileServer(httpx.AsyncBaseTransport):
    """Publishes a map, measures the time from the map to the question (`gap`), and answers no question."""

    def __init__(self, public: PublicPart) -> None:
        self._map = public.to_bytes()
        self._sent_at = self.gap = 0.0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Reply, and measure the time."""
        now, path = perf_counter(), request.url.path
        if path.endswith("/galleries"):
            return _make_reply(200, _JSON, _LIST.model_dump_json().encode())
        if path.endswith("/map"):
            cached = request.headers.get("If-None-Match") == ETAG
            reply = _make_reply(304, FRAME, b"") if cached else _make_reply(200, FRAME, self._map)
            self._sent_at = perf_counter()
            return reply
        self.gap = now - self._sent_at
        return _make_reply(400, _JSON, b'{"code": "hostile", "message": "no answer"}')


def _make_reply(status: int, kind: str, body: bytes) -> httpx.Response:
    return httpx.Response(status, headers={"content-type": kind, "etag": ETAG}, stream=httpx.ByteStream(body))


@contextmanager
def open_hostile_client(public: PublicPart) -> Iterator[tuple[Client, QuestionTimer]]:
    """Open a client of a server that publishes `public`, and a function that asks it and returns the server's time."""
    server = HostileServer(public)
    with Client(_URL, "token", account=FreeAccount(), retries=0, transport=server) as client:

        def ask(feature: Floats) -> float:
            with suppress(UnansweredError):
                client.nearest(feature, epsilon=EPSILON)
            return server.gap

        yield client, ask
