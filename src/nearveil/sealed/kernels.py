"""Kernels of the server: products of 8-bit matrices with encrypted questions, exact modulo 2^24.

Numba compiles the kernel of CPUs. That of GPUs, in torch, multiplies 8-bit matrices by the three balanced digits to
base 256 of each number of a question.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import joblib
import numpy as np

from nearveil.sealed._compiled import multiply_parts
from nearveil.sealed.lwe import Bytes, Words
from nearveil.sealed.parameters import WORD_BITS

_MASK = (1 << WORD_BITS) - 1
_BLOCK = 1 << 19  # entries of a matrix that one thread multiplies at a time: they fit in a core's cache
_TASKS = 4  # for each thread
_TILE = 8  # a GPU multiplies matrices with sides that are multiples of this
_LEAST_ROWS = 17  # least rows of a matrix on a GPU


class Kernel(Protocol):
    """Multiplies a database, shape (colours, rows, columns), by questions modulo 2^24."""

    def multiply(self, questions: Words) -> Words:
        """Return answers, shape (q, colours, rows), to questions, shape (q, colours, columns)."""
        ...


def make_kernel(database: Bytes, device: str = "cpu") -> Kernel:
    """Return a kernel for a database: compiled, or in torch on another device, which gets a copy."""
    return CompiledKernel(database) if device == "cpu" else TorchKernel(database, device)


class CompiledKernel:
    """A compiled kernel in integers modulo 2^32; threads, by default one for each core, divide the rows."""

    def __init__(self, database: Bytes, n_threads: int | None = None) -> None:
        count = n_threads or joblib.cpu_count()
        self._database, self._threads = database, ThreadPoolExecutor(count)
        n_colours, n_rows, n_columns = database.shape
        step = max(8, _BLOCK // n_columns // 8 * 8)
        parts = [
            (colour, start, min(start + step, n_rows))
            for colour in range(n_colours)
            for start in range(0, n_rows, step)
        ]
        # Few tasks: passing one to a thread takes as long as reading a megabyte.
        n_tasks = min(len(parts), 1 if count == 1 else _TASKS * count)
        self._tasks = [np.array(parts[first::n_tasks], np.int64) for first in range(n_tasks)]

    def multiply(self, questions: Words) -> Words:
        words = np.ascontiguousarray(questions.transpose(1, 0, 2)).view(np.int32)
        answers = np.empty((*words.shape[:2], self._database.shape[1]), np.int32)
        list(self._threads.map(lambda parts: multiply_parts(self._database, words, answers, parts), self._tasks))
        return np.asarray(answers.transpose(1, 0, 2) & _MASK, np.uint32)


class TorchKernel:
    """A kernel of 8-bit products with three digits of each number; sums stay below 2^31 up to 2^16 columns."""

    def __init__(self, database: Bytes, device: str) -> None:
        import torch

        self._torch, self._device = torch, device
        _, self._n_rows, columns = database.shape
        padding = (0, -columns % _TILE, 0, -(-max(self._n_rows, _LEAST_ROWS) // _TILE) * _TILE - self._n_rows)
        self._database = torch.nn.functional.pad(torch.from_numpy(database), padding).to(device)

    def multiply(self, questions: Words) -> Words:
        missing = self._database.shape[2] - questions.shape[2]
        padded = np.pad(questions.astype(np.int32), ((0, 0), (0, 0), (0, missing)))
        words = self._torch.from_numpy(padded).to(self._device)
        answers = multiply_digits(self._torch, self._database, words)[:, :, : self._n_rows]
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
