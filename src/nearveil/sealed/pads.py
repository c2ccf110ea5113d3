"""Pads, which hide one question and decrypt its answer. They are made in advance and used once.

The difference of two questions under one pad reveals both, up to small errors. So a pad leaves the stock before it is
used.
"""

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nearveil.sealed.lwe import Longs, Words, split_range

_ROWS = 256  # rows of a hint at a time: as 64-bit numbers they fit in a core's cache


@dataclass(frozen=True, eq=False, repr=False)
class Pad:
    """Encryptions of zero, ``A s + e`` modulo Q, and a server's answers to them, ``H s``, for secrets ``s``."""

    zeros: Words  # a question is its messages plus these, shape (count, C)
    masks: Longs  # the decrypted answer is the answer less these, shape (count, rows of the hint that belong to it)
    secrets: Longs  # shape (count, n)


class PadStock:
    """Pads made in advance, each used once. A copy, also by pickle or in the child of a fork, is empty."""

    def __init__(self) -> None:
        self._state: tuple[object, deque[Pad]] = get_process(), deque()  # one attribute: threads see both or neither

    def fill(self, count: int, make: Callable[[], Pad]) -> None:
        """Make pads until the stock has `count`."""
        while len(pads := self._open()) < count:
            pads.append(make())  # in a child of a fork, the pad goes into the deque of the parent, which is dropped

    def take(self) -> Pad | None:
        """Remove and return a pad; None if the stock is empty."""
        try:
            return self._open().popleft()
        except IndexError:
            return None

    def __len__(self) -> int:
        return len(self._open())

    def _open(self) -> deque[Pad]:
        process, pads = self._state
        if process != get_process():
            pads = deque()
            self._state = get_process(), pads
        return pads

    def __reduce__(self) -> tuple[type["PadStock"], tuple[()]]:
        return PadStock, ()


def multiply_hint(hint: NDArray[np.unsignedinteger], secrets: Longs) -> Longs:
    """Return a hint, shape (rows, n), times each secret, shape (secrets, rows). Exact: below 24 + 7 + 11 bits."""
    factors, masks = secrets.T.astype(np.float64), np.empty((len(secrets), len(hint)), np.int64)
    for start, stop in split_range(len(hint), _ROWS):
        masks[:, start:stop] = (hint[start:stop].astype(np.float64) @ factors).T
    return masks


_process = object()  # different in every process


def get_process() -> tuple[object, int]:
    """Return an id of this process, which also changes in forks that Python did not make."""
    return _process, os.getpid()


def _begin_process() -> None:
    global _process  # noqa: PLW0603
    _process = object()


os.register_at_fork(after_in_child=_begin_process)
