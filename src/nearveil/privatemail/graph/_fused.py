"""The exact Gaussian graph on a GPU: one Triton kernel that never writes a weight to memory.

Needs PyTorch and Triton. A program owns a block of rows, loops over all columns, computes a tile of weights in
registers and adds it to the sums of up to four columns of values at once.

* Rows of float32 are split into two 16-bit parts, 22 bits together; three tensor-core products give
  the inner products to about 1e-7. Rows of float16 or bfloat16 need one product.
* The exponent is a single fused multiply-add: the scale of the split is a power of two, so that
  ``inner * slope - shift`` rounds once and a weight near 1 keeps its digits.
* Weights and values are multiplied in 32-bit arithmetic, and tile sums are added with compensation:
  over a million columns a plain 32-bit sum would lose two digits.
* Only the tiles that touch the diagonal pay for masking it.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl

_GROUP = 4  # columns of values that one walk serves
_ROWS = 128  # rows of a program; the columns of a tile must divide it, or the diagonal would be missed
_SPLIT_SCALE = 64.0  # keeps the second 16-bit part of an entry of a unit row out of the subnormal range


def product(A: Any, B: Any, Z: Any, sharpness: float, *, skip_diagonal: bool) -> Any:
    """Multiply the (m, n) weights ``exp(sharpness (a.b - 1))`` of unit rows on one CUDA device, d <= 128, with `Z`."""
    rows = _split_rows(A)
    columns = rows if B is A else _split_rows(B)
    groups = [Z[:, c : c + _GROUP].contiguous() for c in range(0, Z.shape[1], _GROUP)]
    sums = [_launch(rows, columns, group, sharpness, skip_diagonal) for group in groups]
    return torch.cat(sums, dim=1) if sums else Z.new_zeros((A.shape[0], 0))


def _split_rows(X: Any) -> tuple[Any, Any]:
    """Return the rows as 16-bit tensors: unchanged, or two parts that sum to ``64 X`` with 22 bits."""
    if X.dtype != torch.float32:
        return X.contiguous(), None
    scaled = X * _SPLIT_SCALE
    first = scaled.to(torch.float16)
    return first.contiguous(), (scaled - first).to(torch.float16).contiguous()


def _launch(rows: tuple[Any, Any], columns: tuple[Any, Any], Z: Any, sharpness: float, skip: bool) -> Any:
    (a, a_rest), (b, b_rest) = rows, columns
    split = a_rest is not None
    shift = sharpness * math.log2(math.e)
    out = Z.new_empty((a.shape[0], Z.shape[1]))
    if a.shape[0]:
        _weights_times_values[(triton.cdiv(a.shape[0], _ROWS),)](
            a, a_rest if split else a, b, b_rest if split else b, Z, out,
            a.shape[0], b.shape[0], a.shape[1], Z.shape[1], shift / (_SPLIT_SCALE**2 if split else 1.0), shift,
            D=max(16, triton.next_power_of_2(a.shape[1])), ROWS=_ROWS, COLUMNS=64 if split else 128,
            SPLIT=split, SKIP=skip, num_warps=4, num_stages=3,
        )  # fmt: skip
    return out


@triton.jit
def _add(total, lost, part):
    """Add with compensation: return the sum and its rounding error."""
    part -= lost
    grown = total + part
    return grown, (grown - total) - part


@triton.jit
def _walk(
    first, last, t0, t1, t2, t3, l0, l1, l2, l3, a, a_rest, rows, b_ptr, b_rest_ptr, z_ptr, n, d, k, slope, shift,
    D: tl.constexpr, COLUMNS: tl.constexpr, SPLIT: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Add the weights of the columns from `first` to `last` times their values to the totals."""
    features = tl.arange(0, D)
    for start in range(first, last, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        inside = columns < n
        b_at = columns[None, :].to(tl.int64) * d + features[:, None]
        b_in = inside[None, :] & (features[:, None] < d)
        b = tl.load(b_ptr + b_at, mask=b_in, other=0.0)
        if SPLIT:
            b_rest = tl.load(b_rest_ptr + b_at, mask=b_in, other=0.0)
            inner = tl.dot(a_rest, b)
            inner = tl.dot(a, b_rest, inner)
            inner = tl.dot(a, b, inner)
        else:
            inner = tl.dot(a, b)
        weights = tl.exp2(inner * slope - shift)
        if MASK:
            weights = tl.where(rows[:, None] == columns[None, :], 0.0, weights)
        z_at = z_ptr + columns * k
        z0 = tl.load(z_at, mask=inside, other=0.0)
        z1 = tl.load(z_at + 1, mask=inside & (k > 1), other=0.0)
        z2 = tl.load(z_at + 2, mask=inside & (k > 2), other=0.0)
        z3 = tl.load(z_at + 3, mask=inside & (k > 3), other=0.0)
        t0, l0 = _add(t0, l0, tl.sum(weights * z0[None, :], axis=1))
        t1, l1 = _add(t1, l1, tl.sum(weights * z1[None, :], axis=1))
        t2, l2 = _add(t2, l2, tl.sum(weights * z2[None, :], axis=1))
        t3, l3 = _add(t3, l3, tl.sum(weights * z3[None, :], axis=1))
    return t0, t1, t2, t3, l0, l1, l2, l3


@triton.jit
def _weights_times_values(
    a_ptr, a_rest_ptr, b_ptr, b_rest_ptr, z_ptr, out_ptr, m, n, d, k, slope, shift,
    D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPLIT: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    """Sum ``exp2(slope * a.b - shift) * z`` over all columns b, for a block of rows a."""
    here = tl.program_id(0) * ROWS
    rows = here + tl.arange(0, ROWS)
    features = tl.arange(0, D)
    a_at = rows[:, None].to(tl.int64) * d + features[None, :]
    a_in = (rows[:, None] < m) & (features[None, :] < d)
    a = tl.load(a_ptr + a_at, mask=a_in, other=0.0)
    a_rest = tl.load(a_rest_ptr + a_at, mask=a_in, other=0.0) if SPLIT else a
    zero = tl.zeros((ROWS,), tl.float32)
    begin = min(here, n) if SKIP else n
    end = min(here + ROWS, n)
    t0, t1, t2, t3, l0, l1, l2, l3 = _walk(
        0, begin, zero, zero, zero, zero, zero, zero, zero, zero,
        a, a_rest, rows, b_ptr, b_rest_ptr, z_ptr, n, d, k, slope, shift, D, COLUMNS, SPLIT, False,
    )  # fmt: skip
    if SKIP:
        t0, t1, t2, t3, l0, l1, l2, l3 = _walk(
            begin, end, t0, t1, t2, t3, l0, l1, l2, l3,
            a, a_rest, rows, b_ptr, b_rest_ptr, z_ptr, n, d, k, slope, shift, D, COLUMNS, SPLIT, True,
        )  # fmt: skip
        t0, t1, t2, t3, l0, l1, l2, l3 = _walk(
            end, n, t0, t1, t2, t3, l0, l1, l2, l3,
            a, a_rest, rows, b_ptr, b_rest_ptr, z_ptr, n, d, k, slope, shift, D, COLUMNS, SPLIT, False,
        )  # fmt: skip
    inside = rows < m
    out_at = out_ptr + rows.to(tl.int64) * k
    tl.store(out_at, t0, mask=inside)
    tl.store(out_at + 1, t1, mask=inside & (k > 1))
    tl.store(out_at + 2, t2, mask=inside & (k > 2))
    tl.store(out_at + 3, t3, mask=inside & (k > 3))
