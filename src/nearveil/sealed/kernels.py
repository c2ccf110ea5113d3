"""The server's pass: products of matrices of 8-bit numbers with encrypted questions, exact modulo 2^24.

One interface, three ways. NumPy needs nothing else. Numba is for processors. Torch is for a GPU: its product of 8-bit
matrices runs on the three balanced digits to base 256 of each number of a question.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, Literal, Protocol

import joblib
import numpy as np
from numpy.typing import NDArray

from nearveil.privacy.checks import check_choice
from nearveil.sealed.lwe import WORD_BITS, Bytes, Words, centre

KernelName = Literal["auto", "numpy", "numba", "torch"]
_MASK = (1 << WORD_BITS) - 1
_AT_ONCE = 1 << 21  # entries of a matrix that one thread multiplies at a time
_TASKS = 4  # for each thread
_NO_PARTS = np.empty((0, 3), np.int64)
_FOUR = 4  # questions that the compiled product takes at once
_TILE = 8  # a GPU multiplies matrices whose sides are multiples of this
_LEAST_ROWS = 17  # and have at least so many rows


class Kernel(Protocol):
    """Multiplies a database, shape (colours, rows, columns), by questions modulo 2^24."""

    def multiply(self, questions: Words) -> Words:
        """Return answers, shape (q, colours, rows), to questions, shape (q, colours, columns)."""
        ...

    def refresh(self) -> None:
        """Take over what changed in the database."""
        ...


def make_kernel(
    database: Bytes, kind: KernelName = "auto", device: str = "cpu", n_threads: int | None = None
) -> Kernel:
    """Return a kernel for a database; "auto" is Numba where it is installed, else NumPy. `device` is for torch."""
    check_choice(kind, "kernel", KernelName)
    if kind == "auto":
        kind = "numba" if find_spec("numba") is not None else "numpy"
    if kind == "torch":
        return _TorchKernel(database, device)
    if kind == "numba":
        return _NumbaKernel(database, n_threads)
    return _NumpyKernel(database)


class _NumpyKernel:
    """In 64-bit floating point: products and their sums stay below 7 + 23 + 17 bits, so all of it is exact."""

    def __init__(self, database: Bytes) -> None:
        self._database = database

    def multiply(self, questions: Words) -> Words:
        found = np.empty((len(questions), *self._database.shape[:2]), np.uint32)
        step = max(1, _AT_ONCE // self._database.shape[2])
        for colour, matrix in enumerate(self._database):
            asked = centre(questions[:, colour].astype(np.int64), WORD_BITS).astype(np.float64).T
            for start in range(0, len(matrix), step):
                product = (matrix[start : start + step].astype(np.float64) @ asked).astype(np.int64)
                found[:, colour, start : start + step] = (product & _MASK).T
        return found

    def refresh(self) -> None:
        pass


class _NumbaKernel:
    """Compiled products in whole numbers, which wrap at 2^32; rows are shared out among threads."""

    def __init__(self, database: Bytes, n_threads: int | None) -> None:
        from nearveil.sealed import _compiled

        self._compiled, self._database = _compiled, database
        count = n_threads or joblib.cpu_count()
        self._threads = ThreadPoolExecutor(count)
        step = max(8, _AT_ONCE // database.shape[2] // 8 * 8)
        n_colours, n_rows, _ = database.shape
        parts = [
            (colour, start, min(start + step, n_rows))
            for colour in range(n_colours)
            for start in range(0, n_rows, step)
        ]
        tasks = 1 if count == 1 else _TASKS * count  # few: handing one to a thread takes as long as reading a megabyte
        self._tasks = [np.array(parts[first::tasks], np.int64) for first in range(min(tasks, len(parts)))]
        self._compile()

    def _compile(self) -> None:
        """Compile now: a first question would wait for it, for longer than servers let it."""
        n_colours, n_rows, n_columns = self._database.shape
        asked, found = (np.empty((n_colours, 1, size), np.int32) for size in (n_columns, n_rows))
        with suppress(OSError):  # on a full disk the code is not kept, and works
            self._compiled.multiply_one(self._database, asked, found, _NO_PARTS)
        with suppress(OSError):
            if self._compiled.HAS_DOTS:
                self._compiled.multiply_dots(self._database, asked.view(np.uint8), found, _NO_PARTS)
            else:
                self._compiled.multiply_fours(self._database, asked, found, _NO_PARTS)

    def multiply(self, questions: Words) -> Words:
        if len(questions) == 1:
            found = self._multiply_words(self._compiled.multiply_one, questions)
        elif self._compiled.HAS_DOTS:
            found = self._multiply_digits(questions)
        else:
            padded = np.pad(questions, ((0, -len(questions) % _FOUR), (0, 0), (0, 0)))
            found = self._multiply_words(self._compiled.multiply_fours, padded)
        return (found[: len(questions)] & _MASK).astype(np.uint32)

    def _multiply_words(self, multiply: Any, questions: Words) -> NDArray[np.int32]:
        asked = np.ascontiguousarray(questions.transpose(1, 0, 2)).view(np.int32)
        found = np.empty((*asked.shape[:2], self._database.shape[1]), np.int32)
        self._share_out(multiply, asked, found)
        return found.transpose(1, 0, 2)

    def _multiply_digits(self, questions: Words) -> NDArray[np.int32]:
        n_digits = self._compiled.DIGITS
        n_questions, n_colours, n_columns = questions.shape
        asked = np.zeros((n_colours, n_questions + n_questions % 2, n_digits, n_columns), np.uint8)
        split = np.ascontiguousarray(questions, "<u4").view(np.uint8).reshape(*questions.shape, -1)
        asked[:, :n_questions] = split.transpose(1, 0, 3, 2)[:, :, :n_digits]
        found = np.empty((n_colours, self._database.shape[1], asked.shape[1] * n_digits), np.int32)
        self._share_out(self._compiled.multiply_dots, asked.reshape(n_colours, -1, n_columns), found)
        parts = found.reshape(*found.shape[:2], -1, n_digits)
        parts <<= 8 * np.arange(n_digits, dtype=np.int32)
        return np.asarray(parts.sum(axis=3, dtype=np.int32).transpose(2, 0, 1))

    def _share_out(self, multiply: Any, asked: NDArray[Any], found: NDArray[np.int32]) -> None:
        list(self._threads.map(lambda parts: multiply(self._database, asked, found, parts), self._tasks))

    def refresh(self) -> None:
        pass


class _TorchKernel:
    """Products of 8-bit matrices with three digits of each number; sums stay below 2^31 up to 2^16 columns."""

    def __init__(self, database: Bytes, device: str) -> None:
        import torch

        self._torch, self._device, self._source = torch, device, database
        self.refresh()

    def refresh(self) -> None:
        torch = self._torch
        rows, columns = self._source.shape[1:]
        missing = (-columns % _TILE, max(rows, _LEAST_ROWS) + (-max(rows, _LEAST_ROWS) % _TILE) - rows)
        self._database = torch.nn.functional.pad(torch.from_numpy(self._source), (0, missing[0], 0, missing[1])).to(
            self._device
        )

    def multiply(self, questions: Words) -> Words:
        missing = self._database.shape[2] - questions.shape[2]
        padded = np.pad(questions.astype(np.int32), ((0, 0), (0, 0), (0, missing)))
        asked = self._torch.from_numpy(padded).to(self._device)
        answers = multiply_digits(self._torch, self._database, asked)[:, :, : self._source.shape[1]]
        return np.asarray(answers.cpu().numpy(), dtype=np.uint32)


def multiply_digits(torch: Any, database: Any, questions: Any) -> Any:
    """Return the answers, shape (q, colours, rows), of tensors on one device; sides must be multiples of eight."""
    count = len(questions)
    answers = torch.empty((count, *database.shape[:2]), dtype=torch.int32, device=database.device)
    for colour, matrix in enumerate(database):
        values, digits = questions[:, colour], []
        for _ in range(3):  # balanced: from -128 to 127
            low = ((values + 128) & 255) - 128
            digits.append(low.to(torch.int8))
            values = (values - low) >> 8
        planes = torch.cat(digits)  # (3 q, columns)
        planes = torch.nn.functional.pad(planes, (0, 0, 0, -len(planes) % _TILE))
        parts = torch._int_mm(matrix, planes.T).T
        low, middle, high = (parts[at * count : (at + 1) * count] for at in range(3))
        answers[:, colour] = (low + (middle << 8) + (high << 16)) & _MASK
    return answers
