"""What a client asks of a gallery, and the way to one that is here: the same words as over HTTP."""

import hashlib
from dataclasses import dataclass, field
from typing import Literal, Protocol

from nearveil.service._errors import ServiceError
from nearveil.service._frames import frame_status
from nearveil.service._galleries import Gallery
from nearveil.service._model import FRAME, Galleries, Problem

What = Literal["galleries", "map", "query", "model", "original"]
JSON, BYTES = "application/json", "application/octet-stream"


@dataclass(frozen=True)
class Request:
    """One request. It is made of messages and of public things alone (``docs/theory/service.md``)."""

    what: What
    gallery: str = ""
    body: bytes = field(default=b"", repr=False)  # the frame of a query
    key: str = ""  # names a query; a retry has the same
    candidates: float | None = None  # of a map
    etag: str = ""  # of the map that the client holds
    number: int = 0  # of an item
    most: int = 1 << 20  # bytes of a reply that are read


@dataclass(frozen=True)
class Response:
    """One reply. Nothing in it is trusted."""

    status: int  # as of HTTP
    kind: str  # the media type
    body: bytes = field(repr=False)
    etag: str = ""
    retry_after: float | None = None  # seconds


class Transport(Protocol):
    """Carries requests. `UnreachableError` where no reply came."""

    def send(self, request: Request) -> Response:
        """Send one request and return its reply."""
        ...

    def close(self) -> None:
        """Close what it holds open."""
        ...


class AsyncTransport(Protocol):
    """The same, for an event loop."""

    async def send(self, request: Request) -> Response:
        """Send one request and return its reply."""
        ...

    async def close(self) -> None:
        """Close what it holds open."""
        ...


class GalleryTransport:
    """The way to a gallery in this process.

    `owned`: Whether closing closes the gallery.
    """

    def __init__(self, gallery: Gallery, *, owned: bool) -> None:
        self._gallery, self._owned = gallery, owned

    def send(self, request: Request) -> Response:
        """Ask the gallery, and return what a server would."""
        try:
            return self._reply(request)
        except ServiceError as error:
            said = Problem(code=error.code, message=str(error))
            return Response(error.status, JSON, said.model_dump_json().encode(), retry_after=error.retry_after)

    def close(self) -> None:
        """Close the gallery if it is the transport's own."""
        if self._owned:
            self._gallery.close()

    def _reply(self, request: Request) -> Response:
        if request.what == "galleries":
            return Response(200, JSON, Galleries(galleries=(self._gallery.info(),)).model_dump_json().encode())
        if request.what == "map":
            return _unless_known(self._gallery.map(request.candidates), request.etag)
        if request.what == "query":
            return _framed(self._gallery.query(request.body))
        if request.what == "model":
            return Response(200, BYTES, self._gallery.model())
        return Response(200, BYTES, self._gallery.original(request.number))


def _unless_known(data: bytes, etag: str) -> Response:
    now = f'"{hashlib.sha256(data).hexdigest()}"'
    return Response(304, FRAME, b"", now) if now == etag else Response(200, FRAME, data, now)


def _framed(data: bytes) -> Response:
    return Response(frame_status(data), FRAME, data)
