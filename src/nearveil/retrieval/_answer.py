"""What comes back: every candidate with its code, and nothing left to ask for."""

import struct
from dataclasses import dataclass, field
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from nearveil.retrieval._codes import Bytes

_MAGIC = b"NVA"
_HEADER = struct.Struct("<3sBII")  # magic, version, candidates, bytes of a code
_LARGEST = 1 << 32  # bytes of an answer that a client will read


class AnswerError(ValueError):
    """Bytes are not an answer, or an answer does not fit the public table that shall read it."""


@dataclass(frozen=True)
class Answer:
    """The server's answer: ids and codes of all candidates.

    A client chooses among them by itself. There is no second request, because which candidates it
    would ask about is what the message hid.

    Parameters
    ----------
    ids : ndarray of shape (n,), uint32
        Positions in the gallery, rising: their order tells nothing.
    codes : ndarray of shape (n, b), uint8
        What to re-rank by.

    Examples
    --------
    >>> answer = Answer(np.array([3, 7], np.uint32), np.zeros((2, 5), np.uint8))
    >>> answer.nbytes, Answer.from_bytes(answer.to_bytes()).ids.tolist()
    (30, [3, 7])
    """

    version: ClassVar[int] = 1
    header_bytes: ClassVar[int] = _HEADER.size

    ids: NDArray[np.uint32]
    codes: Bytes = field(repr=False)

    def __post_init__(self) -> None:
        if self.ids.ndim != 1 or self.ids.dtype != np.uint32 or not len(self.ids):
            raise AnswerError("ids must be at least one 32-bit position")
        if self.codes.dtype != np.uint8 or self.codes.ndim != 2 or len(self.codes) != len(self.ids):
            raise AnswerError("codes must hold a row of bytes for each id")
        if (self.ids[1:] <= self.ids[:-1]).any():
            raise AnswerError("ids must rise, each once")

    @property
    def nbytes(self) -> int:
        """How many bytes go over the wire."""
        return _HEADER.size + 4 * len(self.ids) + self.codes.size

    def to_bytes(self) -> bytes:
        """Return the answer as bytes, the same on every machine."""
        header = _HEADER.pack(_MAGIC, self.version, len(self.ids), self.codes.shape[1])
        return header + self.ids.astype("<u4").tobytes() + self.codes.tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read an answer. Nothing in it is trusted.

        Parameters
        ----------
        data : bytes

        Returns
        -------
        Answer
        """
        if len(data) > _LARGEST:
            raise AnswerError(f"data must be at most {_LARGEST} bytes")
        if len(data) < _HEADER.size or data[:3] != _MAGIC:
            raise AnswerError("data is not a nearveil answer")
        _, version, count, width = _HEADER.unpack_from(data)
        if version != cls.version:
            raise AnswerError(f"data has version {version} of the format; this program reads version {cls.version}")
        if len(data) != _HEADER.size + count * (4 + width):
            raise AnswerError("data is truncated, or has bytes after its end")
        middle = _HEADER.size + 4 * count
        ids = np.frombuffer(data[_HEADER.size : middle], dtype="<u4").astype(np.uint32)
        return cls(ids, np.frombuffer(data[middle:], dtype=np.uint8).reshape(count, width))
