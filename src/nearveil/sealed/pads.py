"""Pads, which hide one question and decrypt its answer. They are made in advance and used once.

The difference of two questions under one pad reveals both, up to small errors. So a pad leaves the stock before it is
used.
"""

import os
from collections import deque
from dataclasses import dataclass

from nearveil.sealed.lwe import Longs, Words


@dataclass(frozen=True, eq=False, repr=False)
class Pad:
    """Encryptions of zero, ``A s + e`` modulo Q, and a server's answers to them, ``H s`` modulo t."""

    zeros: Words  # a question is its messages plus these, shape (groups, columns)
    masks: Longs  # the decrypted answer is the answer less these, shape (groups, rows)
    secrets: Longs  # of all groups, shape (n_secrets, n)


class PadStock:
    """Pads made in advance, each used once. A copy, also by pickle or in the child of a fork, is empty."""

    def __init__(self) -> None:
        self._state: tuple[object, deque[Pad]] = get_process(), deque()  # one attribute: threads see both or neither

    def add(self, pad: Pad, process: object) -> bool:
        """Add a pad unless it was begun in another process; return whether it was added."""
        owner, pads = self._open()
        if owner == process:
            pads.append(pad)  # in a child of a fork, the pad goes into the deque of the parent, which is dropped
        return owner == process

    def trim(self, count: int) -> None:
        """Drop pads until at most `count` are left."""
        while len(self) > count:
            self.take()

    def take(self) -> Pad | None:
        """Remove and return a pad; None if the stock is empty."""
        try:
            return self._open()[1].popleft()
        except IndexError:
            return None

    def __len__(self) -> int:
        return len(self._open()[1])

    def _open(self) -> tuple[object, deque[Pad]]:
        state = self._state
        if state[0] != (process := get_process()):
            self._state = state = process, deque()
        return state

    def __reduce__(self) -> tuple[type["PadStock"], tuple[()]]:
        return PadStock, ()


_process = object()  # different in every process


def get_process() -> tuple[object, int]:
    """Return an id of this process, which also changes in forks that Python did not make."""
    return _process, os.getpid()


def _begin_process() -> None:
    global _process  # noqa: PLW0603
    _process = object()


os.register_at_fork(after_in_child=_begin_process)
