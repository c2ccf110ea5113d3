"""Serve galleries over HTTP."""

from typing import TYPE_CHECKING

from nearveil.lazy import import_later

if TYPE_CHECKING:
    from nearveil.server.app import create_app
    from nearveil.server.galleries import OpenGallery
    from nearveil.server.protected import ProtectedGallery
    from nearveil.server.serving import open_galleries, serve
    from nearveil.server.settings import GallerySettings, Settings
    from nearveil.server.tokens import TokenStore

__all__ = [
    "GallerySettings",
    "OpenGallery",
    "ProtectedGallery",
    "Settings",
    "TokenStore",
    "create_app",
    "open_galleries",
    "serve",
]

__getattr__ = import_later(
    __name__,
    {
        ".app": "create_app",
        ".galleries": "OpenGallery",
        ".protected": "ProtectedGallery",
        ".serving": "open_galleries serve",
        ".settings": "GallerySettings Settings",
        ".tokens": "TokenStore",
    },
)
