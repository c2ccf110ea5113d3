"""The frames of sealed search besides its layout: requests for tokens, tokens, questions and answers.

All have lengths that the layout fixes.
"""

from collections.abc import Sequence

import numpy as np

from nearveil.sealed.layout import Layout, SealedError
from nearveil.sealed.lwe import Words, pack_question
from nearveil.sealed.parameters import ANSWER_BITS
from nearveil.sealed.ring import request_bytes
from nearveil.wire.frames import HEADER_BYTES, Kind, Reader, WireError, frame, open_frame, unframe, write_fields

_PARTS = ("scores", "records")  # as flags of a frame
_ANSWER_BYTES = ANSWER_BITS // 8


def write_question(part: str, version: int, ciphertexts: Words, bits: int) -> bytes:
    """Return a question as a frame; its length depends on the layout alone."""
    body = write_fields(version) + pack_question(ciphertexts.ravel(), bits)
    return frame(Kind.SEALED_QUESTION, body, _PARTS.index(part))


def measure_requests(layout: Layout) -> dict[str, int]:
    """Return the length of the frame of a question for each part, and of a request for tokens, in bytes."""
    lengths = {part: HEADER_BYTES + 8 + stage.question_bytes for part, stage in layout.stages.items()}
    requests = (4 + request_bytes(stage.n_secrets) for stage in layout.stages.values())
    return lengths | {"tokens": HEADER_BYTES + 8 + sum(requests)}


def read_question(data: bytes) -> tuple[str, int, bytes]:
    """Return the part of a question, the version of its layout, and its packed numbers."""
    kind, flags, body = unframe(data)
    if kind is not Kind.SEALED_QUESTION or flags >= len(_PARTS):
        raise WireError("data is not a sealed question")
    reader = Reader(body)
    return _PARTS[flags], reader.read_int(), body[8:]


def write_answer(part: str, version: int, values: Words) -> bytes:
    """Return an answer as a frame."""
    return frame(Kind.SEALED_ANSWER, write_fields(version) + values.astype("<u2").tobytes(), _PARTS.index(part))


def read_answer(data: bytes, part: str, version: int, count: int) -> Words:
    """Return the numbers of an answer; their number and the version are known beforehand."""
    body = open_frame(data, Kind.SEALED_ANSWER, _PARTS.index(part))
    reader = Reader(body)
    if reader.read_int() != version:
        raise SealedError("the index has changed since its layout was fetched: update the client and try again")
    if len(body) != 8 + count * _ANSWER_BYTES:
        raise WireError("the answer must have one number for each row of the index")
    return np.frombuffer(body, "<u2", offset=8).astype(np.uint32)


def write_parts(kind: Kind, version: int, parts: Sequence[bytes]) -> bytes:
    """Return requests for tokens, tokens or their public parts, one for each stage, as a frame."""
    return frame(kind, write_fields(version, *parts))


def read_parts(data: bytes, kind: Kind, version: int, lengths: Sequence[int]) -> list[bytes]:
    """Read what :func:`write_parts` wrote; the version and all lengths are known beforehand."""
    reader = Reader(open_frame(data, kind))
    if reader.read_int() != version:
        raise SealedError("the index has changed since its layout was fetched: update the client and try again")
    parts = [reader.read_bytes() for _ in lengths]
    reader.check_end()
    if [len(part) for part in parts] != list(lengths):
        raise WireError("tokens must have the lengths that the layout says")
    return parts
