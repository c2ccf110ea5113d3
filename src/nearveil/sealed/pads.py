"""Pads: what hides one question and reads its answer. They are made before a question is known, and used once.

Two questions under one pad differ by what they ask for, and by small errors: whoever sees both reads it. So a pad has
one way out of a stock, which is there no longer when it is used.
"""

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nearveil.sealed.lwe import Longs, Words, split_range

_ROWS = 256  # of a hint at a time: they stay in a core's cache as 64-bit numbers


@dataclass(frozen=True, eq=False, repr=False)
class Pad:
    """Encryptions of zero, ``A s + e`` modulo Q, and a server's answers to them, ``H s``, for secrets ``s``.

    A question is its messages plus `zeros`; what was asked for is its answer less `masks`. Shapes are, in order,
    (count, C), (count, rows of the hint that belong to it) and (count, n).
    """

    zeros: Words
    masks: Longs
    secrets: Longs


class PadStock:
    """Pads that were made ahead, each for one thread of one process, in memory alone. No pad is used twice.

    A pad leaves the stock before it is used. A copy of a stock, also by pickle or in the child of a fork, is empty.
    """

    def __init__(self) -> None:
        self._held: tuple[object, deque[Pad]] = _get_process(), deque()  # in one name: threads see both or neither

    def fill(self, count: int, make: Callable[[], Pad]) -> None:
        """Make pads until so many are there."""
        while len(pads := self._open()) < count:
            pads.append(make())  # a child that a fork made meanwhile puts it where nobody looks

    def take(self) -> Pad | None:
        """Return a pad that nobody had before, if there is one."""
        try:
            return self._open().popleft()
        except IndexError:
            return None

    def __len__(self) -> int:
        return len(self._open())

    def _open(self) -> deque[Pad]:
        process, pads = self._held
        if process != _get_process():
            pads = deque()
            self._held = _get_process(), pads
        return pads

    def __reduce__(self) -> tuple[type["PadStock"], tuple[()]]:
        return PadStock, ()


def multiply_hint(hint: NDArray[np.unsignedinteger], secrets: Longs) -> Longs:
    """Return a hint, shape (rows, n), times each secret, shape (secrets, rows). Exact: below 24 + 7 + 11 bits."""
    factors, found = secrets.T.astype(np.float64), np.empty((len(secrets), len(hint)), np.int64)
    for start, stop in split_range(len(hint), _ROWS):
        found[:, start:stop] = (hint[start:stop].astype(np.float64) @ factors).T
    return found


_process = object()  # another one in every process


def _get_process() -> tuple[object, int]:
    """Return what is another in every process, also after a fork that Python did not make."""
    return _process, os.getpid()


def _begin_process() -> None:
    global _process  # noqa: PLW0603
    _process = object()


os.register_at_fork(after_in_child=_begin_process)
