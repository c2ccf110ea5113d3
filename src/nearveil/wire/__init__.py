"""Everything that crosses the network: the codec, and the client's and the server's half of the protocol."""

from typing import TYPE_CHECKING

from nearveil.lazy import import_later

if TYPE_CHECKING:
    from nearveil.wire.client import ClientProtocol, OutdatedMapError, ProtocolError
    from nearveil.wire.frames import WireError
    from nearveil.wire.server import ServerProtocol, serve_maps

__all__ = ["ClientProtocol", "OutdatedMapError", "ProtocolError", "ServerProtocol", "WireError", "serve_maps"]

__getattr__ = import_later(
    __name__,
    {
        ".client": "ClientProtocol OutdatedMapError ProtocolError",
        ".frames": "WireError",
        ".server": "ServerProtocol serve_maps",
    },
)
