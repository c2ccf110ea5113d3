"""What a frame of the protocol is called in HTTP."""

from nearveil.frames import Kind
from nearveil.protocol.wire import Refusal, RefusalCode, decode_frame

KIND, FLAGS = 4, 5  # where a frame says what it holds
_REFUSALS = {
    RefusalCode.MALFORMED: 400,
    RefusalCode.VERSION: 400,
    RefusalCode.NOT_OFFERED: 403,
    RefusalCode.TOO_LARGE: 413,
    RefusalCode.FAILED: 503,
}


def frame_status(reply: bytes) -> int:
    """Return the status of a reply to a query.

    `reply`: The frame of an answer, of a map that has changed, or of a refusal; our own, not a stranger's.

    Examples
    --------
    >>> frame_status(Refusal(RefusalCode.TOO_LARGE, "too large").to_bytes())
    413
    """
    if reply[KIND] == Kind.ANSWER:
        return 200
    return 409 if reply[KIND] == Kind.MAP_CHANGED else _REFUSALS[decode_frame(reply, Refusal).code]
