"""Kernels of the server: products of 8-bit matrices with encrypted questions, exact modulo 2^24.

There are three implementations: NumPy, Numba for CPUs, and torch for GPUs. The torch kernel multiplies 8-bit matrices
by the three balanced digits to base 256 of each number of a question.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, Literal, Protocol

import joblib
import numpy as np
from numpy.typing import NDArray

from nearveil.privacy.checks import check_choice
from nearveil.sealed.lwe import Bytes, Words, centre
from nearveil.sealed.parameters import WORD_BITS

KernelName = Literal["auto", "numpy", "numba", "torch"]
_MASK = (1 << WORD_BITS) - 1
_BLOCK = 1 << 21  # entries of a matrix that one thread multiplies at a time
_TASKS = 4  # for each thread
_NO_PARTS = np.empty((0, 3), np.int64)
_FOUR = 4  # questions in one compiled product
_TILE = 8  # a GPU multiplies matrices with sides that are multiples of this
_LEAST_ROWS = 17  # least rows of a matrix on a GPU


class Kernel(Protocol):
    """Multiplies a database, shape (colours, rows, columns), by questions modulo 2^24."""

    def multiply(self, questions: Words) -> Words:
        """Return answers, shape (q, colours, rows), to questions, shape (q, colours, columns)."""
        ...

    def refresh(self) -> None:
        """Load changes of the database."""
        ...


def make_kernel(
    database: Bytes, kind: KernelName = "auto", device: str = "cpu", n_threads: int | None = None
) -> Kernel:
    """Return a kernel for a database; "auto" is Numba if installed, else NumPy. `device` is for torch."""
    check_choice(kind, "kernel", KernelName)
    if kind == "auto":
        kind = "numba" if find_spec("numba") is not None else "numpy"
    if kind == "torch":
        return _TorchKernel(database, device)
    if kind == "numba":
        return _NumbaKernel(database, n_threads)
    return _NumpyKernel(database)


class _NumpyKernel:
    """A kernel in 64-bit floats, which are exact: products and their sums stay below 7 + 23 + 17 bits."""

    def __init__(self, database: Bytes) -> None:
        self._database = database

    def multiply(self, questions: Words) -> Words:
        answers = np.empty((len(questions), *self._database.shape[:2]), np.uint32)
        step = max(1, _BLOCK // self._database.shape[2])
        for colour, matrix in enumerate(self._database):
            words = centre(questions[:, colour].astype(np.int64), WORD_BITS).astype(np.float64).T
            for start in range(0, len(matrix), step):
                product = (matrix[start : start + step].astype(np.float64) @ words).astype(np.int64)
                answers[:, colour, start : start + step] = (product & _MASK).T
        return answers

    def refresh(self) -> None:
        pass


class _NumbaKernel:
    """A compiled kernel in integers modulo 2^32; threads divide the rows."""

    def __init__(self, database: Bytes, n_threads: int | None) -> None:
        from nearveil.sealed import _compiled

        self._compiled, self._database = _compiled, database
        count = n_threads or joblib.cpu_count()
        self._threads = ThreadPoolExecutor(count)
        step = max(8, _BLOCK // database.shape[2] // 8 * 8)
        n_colours, n_rows, _ = database.shape
        parts = [
            (colour, start, min(start + step, n_rows))
            for colour in range(n_colours)
            for start in range(0, n_rows, step)
        ]
        tasks = (
            1 if count == 1 else _TASKS * count
        )  # few: passing a task to a thread takes as long as reading a megabyte
        self._tasks = [np.array(parts[first::tasks], np.int64) for first in range(min(tasks, len(parts)))]
        self._compile()

    def _compile(self) -> None:
        """Compile now, because compilation takes longer than the timeout of a question."""
        n_colours, n_rows, n_columns = self._database.shape
        words, answers = (np.empty((n_colours, 1, size), np.int32) for size in (n_columns, n_rows))
        with suppress(OSError):  # on a full disk the compiled code is not cached
            self._compiled.multiply_one(self._database, words, answers, _NO_PARTS)
        with suppress(OSError):
            if self._compiled.HAS_DOTS:
                self._compiled.multiply_dots(self._database, words.view(np.uint8), answers, _NO_PARTS)
            else:
                self._compiled.multiply_fours(self._database, words, answers, _NO_PARTS)

    def multiply(self, questions: Words) -> Words:
        if len(questions) == 1:
            answers = self._multiply_words(self._compiled.multiply_one, questions)
        elif self._compiled.HAS_DOTS:
            answers = self._multiply_digits(questions)
        else:
            padded = np.pad(questions, ((0, -len(questions) % _FOUR), (0, 0), (0, 0)))
            answers = self._multiply_words(self._compiled.multiply_fours, padded)
        return (answers[: len(questions)] & _MASK).astype(np.uint32)

    def _multiply_words(self, multiply: Any, questions: Words) -> NDArray[np.int32]:
        words = np.ascontiguousarray(questions.transpose(1, 0, 2)).view(np.int32)
        answers = np.empty((*words.shape[:2], self._database.shape[1]), np.int32)
        self._run_tasks(multiply, words, answers)
        return answers.transpose(1, 0, 2)

    def _multiply_digits(self, questions: Words) -> NDArray[np.int32]:
        n_digits = self._compiled.DIGITS
        n_questions, n_colours, n_columns = questions.shape
        words = np.zeros((n_colours, n_questions + n_questions % 2, n_digits, n_columns), np.uint8)
        split = np.ascontiguousarray(questions, "<u4").view(np.uint8).reshape(*questions.shape, -1)
        words[:, :n_questions] = split.transpose(1, 0, 3, 2)[:, :, :n_digits]
        answers = np.empty((n_colours, self._database.shape[1], words.shape[1] * n_digits), np.int32)
        self._run_tasks(self._compiled.multiply_dots, words.reshape(n_colours, -1, n_columns), answers)
        parts = answers.reshape(*answers.shape[:2], -1, n_digits)
        parts <<= 8 * np.arange(n_digits, dtype=np.int32)
        return np.asarray(parts.sum(axis=3, dtype=np.int32).transpose(2, 0, 1))

    def _run_tasks(self, multiply: Any, words: NDArray[Any], answers: NDArray[np.int32]) -> None:
        list(self._threads.map(lambda parts: multiply(self._database, words, answers, parts), self._tasks))

    def refresh(self) -> None:
        pass


class _TorchKernel:
    """A kernel of 8-bit products with three digits of each number; sums stay below 2^31 up to 2^16 columns."""

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
        words = self._torch.from_numpy(padded).to(self._device)
        answers = multiply_digits(self._torch, self._database, words)[:, :, : self._source.shape[1]]
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
