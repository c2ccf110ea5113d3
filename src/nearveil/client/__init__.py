"""Ask a gallery: `Client`, `AsyncClient`, their results and errors."""

from typing import TYPE_CHECKING

from nearveil.lazy import import_later

if TYPE_CHECKING:
    from nearveil.client.clients import AsyncClient, Client
    from nearveil.client.errors import QuestionError, ReplyError, UnansweredError, UnfinishedError, UnreachableError
    from nearveil.client.results import Match, Nearest
    from nearveil.wire.schema import GalleryInfo

__all__ = [
    "AsyncClient",
    "Client",
    "GalleryInfo",
    "Match",
    "Nearest",
    "QuestionError",
    "ReplyError",
    "UnansweredError",
    "UnfinishedError",
    "UnreachableError",
]

__getattr__ = import_later(
    __name__,
    {
        ".clients": "AsyncClient Client",
        ".errors": "QuestionError ReplyError UnansweredError UnfinishedError UnreachableError",
        ".results": "Match Nearest",
        "nearveil.wire.schema": "GalleryInfo",
    },
)
