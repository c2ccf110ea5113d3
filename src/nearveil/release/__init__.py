"""The query's side: mechanisms that tell a server about a private record no more than they promise."""

from nearveil.release._base import Release
from nearveil.release._message import Message, MessageError

__all__ = ["Message", "MessageError", "Release"]
