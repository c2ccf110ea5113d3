"""The query's side: mechanisms that tell a server about a private record no more than they promise."""

from nearveil.release._base import Release
from nearveil.release._cells import Cells
from nearveil.release._covers import Covers
from nearveil.release._default import default
from nearveil.release._map import MapError, PublicMap
from nearveil.release._message import Message, MessageError
from nearveil.release._privatemail import PrivateMail
from nearveil.release._privatemail_common import GalleryEmbedding
from nearveil.release._privunit import PrivUnit

__all__ = [
    "Cells",
    "Covers",
    "GalleryEmbedding",
    "MapError",
    "Message",
    "MessageError",
    "PrivUnit",
    "PrivateMail",
    "PublicMap",
    "Release",
    "default",
]
