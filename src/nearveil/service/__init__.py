"""Private retrieval as a service: a server for galleries, and clients that ask it."""

from typing import TYPE_CHECKING

from nearveil.lazy import import_later

if TYPE_CHECKING:
    from nearveil.service._app import create_app
    from nearveil.service._errors import ServiceError
    from nearveil.service._galleries import Gallery, OpenGallery
    from nearveil.service._protected import ProtectedGallery, PublicationError
    from nearveil.service._protected_account import Publication
    from nearveil.service._serve import open_galleries, serve
    from nearveil.service._settings import GallerySettings, Settings
    from nearveil.service._token import Token
    from nearveil.service._tokens import TokenStore
    from nearveil.service.client.clients import AsyncClient, Client
    from nearveil.service.client.errors import (
        DeclinedError,
        QuestionError,
        ReplyError,
        UnansweredError,
        UnreachableError,
    )
    from nearveil.service.client.results import Classified, Match, Nearest
    from nearveil.service.schema import Galleries, GalleryInfo, Problem, Promise

__all__ = [
    "AsyncClient",
    "Classified",
    "Client",
    "DeclinedError",
    "Galleries",
    "Gallery",
    "GalleryInfo",
    "GallerySettings",
    "Match",
    "Nearest",
    "OpenGallery",
    "Problem",
    "Promise",
    "ProtectedGallery",
    "Publication",
    "PublicationError",
    "QuestionError",
    "ReplyError",
    "ServiceError",
    "Settings",
    "Token",
    "TokenStore",
    "UnansweredError",
    "UnreachableError",
    "create_app",
    "open_galleries",
    "serve",
]

__getattr__ = import_later(
    __name__,
    {
        "_app": ("create_app",),
        "_errors": ("ServiceError",),
        "_galleries": (
            "Gallery",
            "OpenGallery",
        ),
        "_protected": (
            "ProtectedGallery",
            "PublicationError",
        ),
        "_protected_account": ("Publication",),
        "_serve": (
            "open_galleries",
            "serve",
        ),
        "_settings": (
            "GallerySettings",
            "Settings",
        ),
        "_token": ("Token",),
        "_tokens": ("TokenStore",),
        "client.clients": (
            "AsyncClient",
            "Client",
        ),
        "client.errors": (
            "DeclinedError",
            "QuestionError",
            "ReplyError",
            "UnansweredError",
            "UnreachableError",
        ),
        "client.results": (
            "Classified",
            "Match",
            "Nearest",
        ),
        "schema": (
            "Galleries",
            "GalleryInfo",
            "Problem",
            "Promise",
        ),
    },
)
