"""What the client's half of the protocol is given to pay with, and what it gives back."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from nearveil.privacy import Guarantee
from nearveil.retrieval._answer import Answer
from nearveil.retrieval._codes import Bytes


class Payment(Protocol):
    """A debit that stands, as :class:`nearveil.ledger.Debit` is one."""

    @property
    def repeated(self) -> bool:
        """Whether its key was spent before: then nothing is made, and `message` is sent again."""
        ...

    @property
    def message(self) -> bytes | None:
        """What was stored."""
        ...

    def store(self, message: bytes, /) -> None:
        """Keep the message before it is sent."""
        ...


Spend = Callable[[Guarantee], AbstractContextManager[Payment]]


@dataclass(frozen=True)
class Found:
    """What the client chose, and all that it chose from.

    Attributes
    ----------
    ids : ndarray of shape (k,), int64
        Of the chosen candidates, best first.
    codes : ndarray of shape (k, b), uint8
    images : tuple of k bytes, or of none
        Thumbnails or originals of the chosen, where they were asked for; empty where the gallery has none.
    answer : Answer
        Every candidate: what the server knows of the choice.
    scores : ndarray of shape (k,), float32
        What the chosen were ranked by: the similarity that the table reads from each code. Finite for any table.
    """

    ids: NDArray[np.int64]
    codes: Bytes = field(repr=False)
    images: tuple[bytes, ...] = field(repr=False)
    answer: Answer = field(repr=False)
    scores: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32), repr=False)
