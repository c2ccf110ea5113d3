"""Products of 8-bit rows with words, modulo 2^32, compiled by Numba. Several rows share one load of a question.

Processors that multiply and add four pairs of bytes in one step (AVX512-VNNI) are used so: for them a question is as
many digits to base 256 as it has bytes, and a word is put together again from the answers to its digits.
"""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, config, types
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic

_I = np.int32
_ROWS, _DIGITS = 4, 6  # of a tile: its sums stay in registers
_STEP = 64  # bytes that are multiplied at once
_WORD = ir.IntType(32)
_WORDS = ir.VectorType(_WORD, _STEP // 4)
DIGITS = 3  # of a number of a question

_OPTIONS: Any = {"nogil": True, "boundscheck": False}

HAS_DOTS = config.CPU_NAME is None and config.CPU_FEATURES is None and "+avx512vnni" in get_host_cpu_features()
"""Whether :func:`multiply_dots` runs here."""


def _compile(function):
    """Compile a function when it is first called, and keep its code on the disk: compiling takes seconds."""
    try:
        return numba.njit(cache=True, **_OPTIONS)(function)
    except RuntimeError:  # neither the package's folder nor the user's can be written
        return numba.njit(**_OPTIONS)(function)


@numba.njit(**_OPTIONS)
def _multiply_one(rows, words, out):
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


@numba.njit(**_OPTIONS)
def _multiply_fours(rows, words, out):
    """Fill ``out[j, k] = rows[k] @ words[j]`` for questions in fours; four rows at a time."""
    n, width = rows.shape
    for k in range(0, n - 3, 4):
        r0, r1, r2, r3 = rows[k], rows[k + 1], rows[k + 2], rows[k + 3]
        for j in range(0, len(words), 4):
            w0, w1, w2, w3 = words[j], words[j + 1], words[j + 2], words[j + 3]
            a0, a1, a2, a3, b0, b1, b2, b3 = _I(0), _I(0), _I(0), _I(0), _I(0), _I(0), _I(0), _I(0)
            c0, c1, c2, c3, d0, d1, d2, d3 = _I(0), _I(0), _I(0), _I(0), _I(0), _I(0), _I(0), _I(0)
            for c in range(width):
                x0, x1, x2, x3 = _I(r0[c]), _I(r1[c]), _I(r2[c]), _I(r3[c])
                y0, y1, y2, y3 = w0[c], w1[c], w2[c], w3[c]
                a0 += x0 * y0
                a1 += x1 * y0
                a2 += x2 * y0
                a3 += x3 * y0
                b0 += x0 * y1
                b1 += x1 * y1
                b2 += x2 * y1
                b3 += x3 * y1
                c0 += x0 * y2
                c1 += x1 * y2
                c2 += x2 * y2
                c3 += x3 * y2
                d0 += x0 * y3
                d1 += x1 * y3
                d2 += x2 * y3
                d3 += x3 * y3
            out[j, k], out[j, k + 1], out[j, k + 2], out[j, k + 3] = a0, a1, a2, a3
            out[j + 1, k], out[j + 1, k + 1], out[j + 1, k + 2], out[j + 1, k + 3] = b0, b1, b2, b3
            out[j + 2, k], out[j + 2, k + 1], out[j + 2, k + 2], out[j + 2, k + 3] = c0, c1, c2, c3
            out[j + 3, k], out[j + 3, k + 1], out[j + 3, k + 2], out[j + 3, k + 3] = d0, d1, d2, d3
    for k in range(n - n % 4, n):
        for j in range(len(words)):
            row, a = rows[k], _I(0)
            for c in range(width):
                a += _I(row[c]) * words[j, c]
            out[j, k] = a


@_compile
def multiply_one(database, words, out, parts):
    """Fill ``out[b, 0, k] = database[b, k] @ words[b, 0]`` for parts: a colour, its first row, and where rows end."""
    for part in range(len(parts)):
        colour, first, last = parts[part]
        _multiply_one(database[colour][first:last], words[colour, 0], out[colour, 0, first:last])


@_compile
def multiply_fours(database, words, out, parts):
    """As :func:`multiply_one`, for questions in multiples of four: ``out[b, j, k]`` for a question j."""
    for part in range(len(parts)):
        colour, first, last = parts[part]
        _multiply_fours(database[colour][first:last], words[colour], out[colour, :, first:last])


@intrinsic
def _add_tile(typing, rows, row_stride, digits, digit_stride, steps, sums):
    """Add to ``sums[r, p]``, 4 x 6 words, the products of rows with digits, 64 bytes a step; all are addresses."""
    del typing, rows, row_stride, digits, digit_stride, steps, sums

    def generate(context, builder, signature, arguments):
        del signature
        rows, row_stride, digits, digit_stride, steps, sums = arguments
        of_words = ir.FunctionType(_WORDS, [_WORDS] * 3)
        dot = cgutils.get_or_insert_function(builder.module, of_words, "llvm.x86.avx512.vpdpbusd.512")
        add = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_WORD, [_WORDS]), "llvm.vector.reduce.add.v16i32"
        )
        zero = ir.Constant(_WORDS, [0] * (_STEP // 4))
        totals = [[cgutils.alloca_once_value(builder, zero) for _ in range(_DIGITS)] for _ in range(_ROWS)]
        of_rows = [builder.add(rows, builder.mul(row_stride, steps.type(r))) for r in range(_ROWS)]
        of_digits = [builder.add(digits, builder.mul(digit_stride, steps.type(p))) for p in range(_DIGITS)]

        def load(base, offset):
            return builder.load(builder.inttoptr(builder.add(base, offset), _WORDS.as_pointer()), align=1)

        with cgutils.for_range(builder, steps, intp=steps.type) as loop:
            offset = builder.mul(loop.index, steps.type(_STEP))
            signed = [load(base, offset) for base in of_rows]
            for p, base in enumerate(of_digits):
                unsigned = load(base, offset)
                for r in range(_ROWS):
                    total = totals[r][p]
                    builder.store(builder.call(dot, [builder.load(total), unsigned, signed[r]]), total)
        out = builder.inttoptr(sums, _WORD.as_pointer())
        for position, total in enumerate(total for row in totals for total in row):
            target = builder.gep(out, [ir.Constant(_WORD, position)])
            builder.store(builder.add(builder.load(target), builder.call(add, [builder.load(total)])), target)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 6), generate


@_compile
def multiply_dots(database, digits, out, parts):
    """As :func:`multiply_one`, for digits of words, unsigned, in multiples of six: ``out[b, k, p]`` for a digit p."""
    whole = database.shape[2] // _STEP
    sums = np.empty((_ROWS, _DIGITS), np.int32)
    for part in range(len(parts)):
        colour, first, last = parts[part]
        rows, block = database[colour], digits[colour]
        tiled = last - (last - first) % _ROWS
        for k in range(first, tiled, _ROWS):
            for p in range(0, len(block), _DIGITS):
                sums[:] = 0
                _add_tile(
                    rows.ctypes.data + k * rows.strides[0],
                    rows.strides[0],
                    block.ctypes.data + p * block.strides[0],
                    block.strides[0],
                    whole,
                    sums.ctypes.data,
                )
                out[colour, k : k + _ROWS, p : p + _DIGITS] = sums
        for k in range(first, last):
            start = whole * _STEP if k < tiled else 0
            for p in range(len(block)):
                rest = _I(0)
                for c in range(start, database.shape[2]):
                    rest += _I(rows[k, c]) * _I(block[p, c])
                out[colour, k, p] = rest + (out[colour, k, p] if k < tiled else _I(0))
