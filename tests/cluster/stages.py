"""Functions of tests that workers import."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearveil.cluster import StoredPart


def add(part: NDArray[Any], other: NDArray[Any]) -> float:
    return float(part.sum() + other.sum())


def refuse(part: int) -> int:
    if part == 2:
        raise ValueError("row 7 must be finite")
    return part


def die_once(part: NDArray[Any], other: NDArray[Any], mark: str) -> float:
    """Kill the own process at the third partition, the first time."""
    if part[0] == 3 and not Path(mark).exists():
        Path(mark).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return add(part, other)


def die_always(part: int) -> int:
    if part == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return part


def wait_and_add(part: NDArray[Any], other: NDArray[Any]) -> float:
    time.sleep(0.3)
    return add(part, other)


def join(first: str, second: str) -> str:
    return f"({first}{second})"


class Stored(StoredPart):
    """A partition that tells who read it."""

    def __init__(self, number: int) -> None:
        self.number = number

    def load(self) -> tuple[int, int]:
        return self.number, os.getpid()


def tell_reader(part: tuple[int, int]) -> tuple[int, int]:
    return part


def tell_place(rows: NDArray[Any], _: int) -> set[str]:
    """Return the address of the worker, after a while in which others have nothing to do."""
    import distributed

    time.sleep(0.05)
    return {distributed.get_worker().address}


def read_rows(place: str, start: int) -> NDArray[Any]:
    """Read rows, and write down that they were read."""
    with Path(f"{place}.read").open("a") as log:
        log.write("x")
    rows: NDArray[Any] = np.load(place)
    return rows[start : start + 150]


def quote_rows(kind: type[Exception]) -> NDArray[Any]:
    """Raise an error that quotes a row; for an OSError the text becomes its `strerror`."""
    text = "could not convert string to float: 'Bob Smith'"
    raise kind(5, text) if kind is OSError else kind(text)
