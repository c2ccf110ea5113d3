"""Where the client's half of the protocol stops, and what to do then."""

from nearveil.errors import NearveilError
from nearveil.retrieval._wire_schema import MapChanged, Refusal, RefusalCode


class ProtocolError(NearveilError, ValueError):
    """The protocol does not go on from here: a step is out of turn, or the server offers what cannot be used."""


class OutdatedMapError(ProtocolError):
    """The server has another map now. The message is spent; asking anew with the new public part is paid anew.

    Attributes
    ----------
    revision : int
        That the server serves.
    """

    def __init__(self, changed: MapChanged) -> None:
        super().__init__(
            f"the map of {changed.gallery!r} has changed, to revision {changed.revision}: fetch the public part, and "
            "ask anew with a new debit"
        )
        self.revision = changed.revision


class RefusedError(ProtocolError):
    """The server refused. The same message may be sent again; that costs nothing.

    Attributes
    ----------
    code : RefusalCode
    """

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(f"the server refused ({refusal.code.name.lower()}): {refusal.words}")
        self.code: RefusalCode = refusal.code
