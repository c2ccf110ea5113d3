"""What a client asks of a gallery, and how a reply comes back: the same over HTTP and in this process."""

from dataclasses import dataclass, field
from typing import Literal, Protocol

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

    async def send(self, request: Request) -> Response:
        """Send one request and return its reply."""
        ...

    async def close(self) -> None:
        """Close what it holds open."""
        ...
