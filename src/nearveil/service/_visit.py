"""One request, from its first byte to its last."""

import secrets
from collections.abc import Callable
from typing import NoReturn

from nearveil.service._errors import NotOfferedError, UnauthorizedError
from nearveil.service._limits import Sending, UnderWay
from nearveil.service._token import Scope, Token

VISIT = "nearveil.visit"  # where a scope of ASGI holds what is known of a request
GONE = "nearveil.gone"  # where it holds a function that says whether the client has gone
OWNER = "nearveil.owner"  # where it holds a function that is told whose good token the connection's request had
_LITTLE = 1 << 16  # bytes that a body is read that is not wanted


class Visit:
    """What is known of one request: for its handler, and for the line that is written of it."""

    __slots__ = (
        "chunked", "content_type", "error", "gallery", "gone", "held", "id", "key", "length", "read", "sent", "status",
        "token", "under_way",
    )  # fmt: skip

    def __init__(self, gone: Callable[[], bool]) -> None:
        self.id = secrets.token_hex(8)
        self.gone = gone
        self.status, self.sent, self.held = 0, 0, 0  # held: of the bytes that all answers under way may have
        self.read = False  # whether its body was read
        self.under_way: UnderWay | None = None
        self.token: Token | None = None
        self.gallery: str | None = None
        self.error: dict[str, str] | None = None
        self.length: bytes | None = None
        self.chunked, self.content_type, self.key = False, b"", b""

    def may(self, scope: Scope) -> Token:
        """Return the token of the client, if it is good for a scope."""
        if self.token is None:
            unauthorized()
        if not self.token.may(scope):
            raise NotOfferedError(f"this token may not do that: it needs the scope {scope}")
        return self.token

    def begin(self, under_way: UnderWay) -> None:
        """Count as a request of its token until it ends."""
        if self.token is not None:
            under_way.enter(self.token.id)
            self.under_way = under_way

    def end(self, sending: Sending) -> None:
        """Count no more."""
        if self.under_way is not None and self.token is not None:
            self.under_way.leave(self.token.id)
        if self.held:
            self.held = sending.hold(self.held, 0)

    def has_a_little_to_read(self) -> bool:
        """Return whether the client is about to send a small body that nobody has read."""
        if self.read or self.length is None:
            return self.chunked and not self.read
        return self.length.isdigit() and 0 < int(self.length[:6]) <= _LITTLE


def unauthorized() -> NoReturn:
    raise UnauthorizedError("a token is needed that is good: Authorization: Bearer nv_...")
