"""The protocol: a message goes out, candidates come back, and the client chooses among them at home."""

from typing import TYPE_CHECKING

from nearveil.frames import Limits, WireError
from nearveil.gallery.answers import Answer
from nearveil.lazy import import_later
from nearveil.protocol.client import ClientProtocol, Found
from nearveil.protocol.wire import OutdatedMapError, ProtocolError, PublicPart, RefusedError

if TYPE_CHECKING:
    from nearveil.protocol.server import ServerProtocol

__all__ = [
    "Answer",
    "ClientProtocol",
    "Found",
    "Limits",
    "OutdatedMapError",
    "ProtocolError",
    "PublicPart",
    "RefusedError",
    "ServerProtocol",
    "WireError",
]

__getattr__ = import_later(__name__, {"server": ("ServerProtocol",)})
