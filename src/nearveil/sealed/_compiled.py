"""Products of 8-bit rows with words, modulo 2^32, compiled by Numba. Eight rows share each load of a question."""

from typing import Any

import numba
import numpy as np
from numba.core import types

_I = np.int32
_OPTIONS: Any = {"nogil": True, "boundscheck": False}
_DATABASE = types.Array(types.int8, 3, "C", readonly=True)  # it may be mapped from a file


def compile_cached(signature=None):
    """Compile a function now if it has a signature, and keep its code on the disk: compiling takes seconds."""

    def compile_function(function):
        try:
            return numba.njit(signature, cache=True, **_OPTIONS)(function)
        except (RuntimeError, OSError):  # neither the package's folder nor the user's can be written
            return numba.njit(signature, **_OPTIONS)(function)

    return compile_function


@compile_cached()
def _multiply_rows(rows, words, out):
    """Fill ``out[k] = rows[k] @ words``; eight rows at a time."""
    n, width = rows.shape
    for k in range(0, n - 7, 8):
        r0, r1, r2, r3 = rows[k], rows[k + 1], rows[k + 2], rows[k + 3]
        r4, r5, r6, r7 = rows[k + 4], rows[k + 5], rows[k + 6], rows[k + 7]
        a0, a1, a2, a3, a4, a5, a6, a7 = _I(0), _I(0), _I(0), _I(0), _I(0), _I(0), _I(0), _I(0)
        for c in range(width):
            x = words[c]
            a0 += _I(r0[c]) * x
            a1 += _I(r1[c]) * x
            a2 += _I(r2[c]) * x
            a3 += _I(r3[c]) * x
            a4 += _I(r4[c]) * x
            a5 += _I(r5[c]) * x
            a6 += _I(r6[c]) * x
            a7 += _I(r7[c]) * x
        out[k], out[k + 1], out[k + 2], out[k + 3] = a0, a1, a2, a3
        out[k + 4], out[k + 5], out[k + 6], out[k + 7] = a4, a5, a6, a7
    for k in range(n - n % 8, n):
        row, a = rows[k], _I(0)
        for c in range(width):
            a += _I(row[c]) * words[c]
        out[k] = a


@compile_cached(types.void(_DATABASE, types.int32[:, :, ::1], types.int32[:, :, ::1], types.int64[:, ::1]))
def multiply_parts(database, words, out, parts):
    """Fill ``out[b, j, k] = database[b, k] @ words[b, j]`` for parts: a colour, its first row, and where rows end.

    A part stays in a core's cache while all questions are multiplied by it.
    """
    for part in range(len(parts)):
        colour, first, last = parts[part]
        for j in range(words.shape[1]):
            _multiply_rows(database[colour][first:last], words[colour, j], out[colour, j, first:last])
