"""The protocol: a message goes out, candidates come back, and the client chooses among them at home."""

from typing import TYPE_CHECKING

from nearveil.frames import WireError
from nearveil.lazy import import_later
from nearveil.protocol.client import ClientProtocol, OutdatedMapError, ProtocolError

if TYPE_CHECKING:
    from nearveil.protocol.server import ServerProtocol, serve_maps

__all__ = [
    "ClientProtocol",
    "OutdatedMapError",
    "ProtocolError",
    "ServerProtocol",
    "WireError",
    "serve_maps",
]

__getattr__ = import_later(__name__, {"server": "ServerProtocol serve_maps"})
