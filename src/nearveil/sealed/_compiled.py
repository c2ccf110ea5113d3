"""Products of 8-bit rows with words, modulo 2^32, compiled by Numba. Several rows share what is read of a question."""

import numba
import numpy as np

_I = np.int32


@numba.njit(nogil=True, boundscheck=False)
def multiply_one(rows, words, out):
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


@numba.njit(nogil=True, boundscheck=False)
def multiply_fours(rows, words, out):
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


@numba.njit(nogil=True, boundscheck=False)
def multiply_parts(database, words, out, parts):
    """Fill ``out[b, j, k] = database[b, k] @ words[b, j]`` for parts: a colour, its first row, and where rows end."""
    for part in range(len(parts)):
        colour, first, last = parts[part]
        rows = database[colour][first:last]
        if words.shape[1] == 1:
            multiply_one(rows, words[colour, 0], out[colour, 0, first:last])
        else:
            multiply_fours(rows, words[colour], out[colour, :, first:last])
