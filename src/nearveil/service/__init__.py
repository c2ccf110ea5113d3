"""Private retrieval as a service: a server for galleries, and clients that ask it."""

from typing import TYPE_CHECKING

from nearveil.lazy import import_later

if TYPE_CHECKING:
    from nearveil.service.client.errors import (
        QuestionError,
        ReplyError,
        UnansweredError,
        UnfinishedError,
        UnreachableError,
    )
    from nearveil.service.client.results import Match, Nearest
    from nearveil.service.schema import GalleryInfo
    from nearveil.service.server.app import create_app
    from nearveil.service.server.galleries import OpenGallery
    from nearveil.service.server.protected import ProtectedGallery
    from nearveil.service.server.serving import open_galleries, serve
    from nearveil.service.server.settings import GallerySettings, Settings
    from nearveil.service.server.tokens import TokenStore

__all__ = [
    "GalleryInfo",
    "GallerySettings",
    "Match",
    "Nearest",
    "OpenGallery",
    "ProtectedGallery",
    "QuestionError",
    "ReplyError",
    "Settings",
    "TokenStore",
    "UnansweredError",
    "UnfinishedError",
    "UnreachableError",
    "create_app",
    "open_galleries",
    "serve",
]

__getattr__ = import_later(
    __name__,
    {
        "client.errors": "QuestionError ReplyError UnansweredError UnfinishedError UnreachableError",
        "client.results": "Match Nearest",
        "schema": "GalleryInfo",
        "server.app": "create_app",
        "server.galleries": "OpenGallery",
        "server.protected": "ProtectedGallery",
        "server.serving": "open_galleries serve",
        "server.settings": "GallerySettings Settings",
        "server.tokens": "TokenStore",
    },
)
