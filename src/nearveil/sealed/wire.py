"""The frames of sealed search besides its layout: hints, questions and answers, all of bounded size."""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from nearveil.sealed.layout import Layout, SealedError
from nearveil.sealed.lwe import Words, pack, pack_question, unpack
from nearveil.sealed.parameters import FETCH, SCORES, LweParameters
from nearveil.sealed.sizes import ANSWER_BYTES, HINT_BYTES, count_question_bytes
from nearveil.wire.frames import HEADER_BYTES, Kind, Reader, WireError, frame, open_frame, unframe, write_fields

_PARTS = ("scores", "records")  # as flags of a frame
_SETS = {"scores": SCORES, "records": FETCH}


@dataclass(frozen=True, eq=False)
class Hint:
    """Rounded rows of the hint of scores or records: all, or those that changed. `values` has shape (len(rows), n)."""

    part: str
    version: int
    rows: NDArray[np.uint32]
    values: Words

    def to_bytes(self) -> bytes:
        """Return the rows as a frame."""
        rows = self.rows.astype("<u4").tobytes()
        body = write_fields(self.version, rows, pack(self.values, HINT_BYTES[self.part]))
        return frame(Kind.SEALED_HINT, body, _PARTS.index(self.part))

    @classmethod
    def from_bytes(cls, data: bytes, part: str, n_rows: int) -> Self:
        """Read rows of a hint that has `n_rows` in all. Nothing in it is trusted."""
        reader = Reader(open_frame(data, Kind.SEALED_HINT, _PARTS.index(part)))
        version, listed = reader.read_int(), reader.read_bytes()
        rows = np.frombuffer(listed, "<u4", count=len(listed) // 4).astype(np.uint32)
        if len(listed) % 4 or (rows >= n_rows).any() or len(np.unique(rows)) != len(rows):
            raise WireError("the hint has rows that do not exist, or repeated rows")
        packed, width = reader.read_bytes(), get_parameters(part).dimension
        reader.check_end()
        if len(packed) != len(rows) * width * HINT_BYTES[part]:
            raise WireError("the hint must have as many numbers as its rows need")
        return cls(part, version, rows, unpack(packed, HINT_BYTES[part]).reshape(len(rows), width))


def get_parameters(part: str) -> LweParameters:
    """Return the parameters of scores or of records."""
    return _SETS[part]


def write_question(part: str, version: int, ciphertexts: Words) -> bytes:
    """Return a question as a frame; its length depends on the layout alone."""
    packed = pack_question(ciphertexts.ravel(), get_parameters(part).question_bits)
    return frame(Kind.SEALED_QUESTION, write_fields(version) + packed, _PARTS.index(part))


def measure_questions(layout: Layout) -> dict[str, int]:
    """Return the length of the frame of a question for each part, in bytes."""
    numbers = {"scores": layout.n_colours * layout.n_samples}
    if layout.records is not None:
        numbers["records"] = layout.records.n_fetched * layout.records.n_columns
    return {part: HEADER_BYTES + 8 + count_question_bytes(_SETS[part], count) for part, count in numbers.items()}


def read_question(data: bytes) -> tuple[str, int, bytes]:
    """Return the part of a question, the version of its layout, and its packed numbers."""
    kind, flags, body = unframe(data)
    if kind is not Kind.SEALED_QUESTION or flags >= len(_PARTS):
        raise WireError("data is not a sealed question")
    reader = Reader(body)
    return _PARTS[flags], reader.read_int(), body[8:]


def write_answer(part: str, version: int, values: Words) -> bytes:
    """Return an answer as a frame."""
    return frame(Kind.SEALED_ANSWER, write_fields(version) + pack(values.ravel(), ANSWER_BYTES), _PARTS.index(part))


def read_answer(data: bytes, part: str, version: int, count: int) -> Words:
    """Return the numbers of an answer; their number and the version are known beforehand."""
    body = open_frame(data, Kind.SEALED_ANSWER, _PARTS.index(part))
    reader = Reader(body)
    if reader.read_int() != version:
        raise SealedError("the index has changed since its layout was fetched: update the client and try again")
    if len(body) != 8 + count * ANSWER_BYTES:
        raise WireError("the answer must have one number for each row of the index")
    return unpack(body[8:], ANSWER_BYTES)
