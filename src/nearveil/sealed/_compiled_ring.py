"""The server's work for tokens, compiled by Numba: transforms, diagonals, and sums of products modulo primes.

Numbers are from 0 to p - 1 in 32 bits, and primes are below 2^29. A sum of 35 products and an earlier number times 2^32
is below ``35 p^2 + 2^32 p``, and Montgomery's method adds less than ``2^32 p``: together they are below 2^63.7. The
quotient by 2^32 is below 7 p, so three subtractions where possible, of 4 p, 2 p and p, reduce it exactly.

Vectors are written in LLVM's language: a processor without 512 bits takes several steps.
"""

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from nearveil.sealed._compiled import compile_cached
from nearveil.sealed.parameters import RING

_N, _T, _BABY = RING.degree, RING.plain_modulus, RING.baby_steps
_GIANTS, _HALF, _L = RING.giant_steps, _N // 2, len(RING.primes)
TILE = 64  # slots whose products are next to each other
TERMS = _BABY + _L  # of a sum: diagonals, and digits of the last sum's public part
_STEP = 32  # slots that are multiplied at once
_TILE_BYTES = TERMS * TILE * 4
_COLUMNS = 16  # polynomials that are transformed at once
_U = np.uint64
_MASK = np.uint64((1 << 32) - 1)
_VECTOR = ir.VectorType(ir.IntType(64), _STEP // 2)


def _make_product(terms, stride):
    """Return a function that adds `terms` products of numbers to earlier ones, modulo p, for 32 slots.

    Its arguments are addresses of factors, with terms `stride` bytes apart, of the earlier numbers and of the
    result; then p and -1/p modulo 2^32. One of the factors is in Montgomery's form.
    """

    @intrinsic
    def multiply(typing, left, right, earlier, out, modulus, factor):
        del typing, left, right, earlier, out, modulus, factor

        def generate(context, builder, signature, arguments):
            del signature
            left, right, earlier, out, modulus, factor = arguments
            constant = lambda value: ir.Constant(_VECTOR, [value] * _VECTOR.count)  # noqa: E731
            word, mask = constant(32), constant((1 << 32) - 1)

            def spread(value):
                single = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), value, ir.IntType(32)(0))
                zeros = ir.Constant(ir.VectorType(ir.IntType(32), _VECTOR.count), None)
                return builder.shuffle_vector(single, ir.Constant(_VECTOR, ir.Undefined), zeros)

            def locate(base, offset):
                return builder.inttoptr(builder.add(base, ir.Constant(base.type, offset)), _VECTOR.as_pointer())

            moduli, factors = spread(modulus), spread(factor)

            def reduce_sum(total):
                quotient = builder.and_(builder.mul(builder.and_(total, mask), factors), mask)
                total = builder.lshr(builder.add(total, builder.mul(quotient, moduli)), word)
                for bits in (2, 1, 0):  # a negative difference wraps, and is larger
                    less = builder.sub(total, builder.shl(moduli, constant(bits)))
                    total = builder.select(builder.icmp_unsigned("<", less, total), less, total)
                return total

            numbers = builder.load(locate(earlier, 0), align=1)  # in pairs: even slots in the lower halves
            even, odd = builder.shl(numbers, word), builder.shl(builder.lshr(numbers, word), word)
            for term in range(terms):
                a, b = (builder.load(locate(base, term * stride), align=1) for base in (left, right))
                even = builder.add(even, builder.mul(builder.and_(a, mask), builder.and_(b, mask)))
                odd = builder.add(odd, builder.mul(builder.lshr(a, word), builder.lshr(b, word)))
            pairs = builder.or_(reduce_sum(even), builder.shl(reduce_sum(odd), word))
            builder.store(pairs, locate(out, 0), align=1)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 4, types.uint64, types.uint64), generate

    return multiply


_multiply_tile = _make_product(TERMS, 4 * TILE)
_multiply_keys = _make_product(_L, 4 * _N)


@compile_cached()
def _halve(product, modulus, factor):
    """Return product / 2^32 modulo p, below 2 p, for a product below 4 p^2."""
    return (product + ((product & _MASK) * factor & _MASK) * modulus) >> _U(32)


@compile_cached()
def _subtract(value, bound):
    """Return value or value - bound, where it is not negative."""
    return min(value, value - bound)


@compile_cached("void(u8[:, ::1], u8[::1], u8, u8)")
def run_forward(work, roots, modulus, factor):
    """As :meth:`~nearveil.sealed.ring.Transform.run_forward`."""
    flat, count, half = work.ravel(), 1, work.size // 2
    double = _U(2) * modulus
    while count < _N:
        for block in range(count):
            root = roots[count + block]
            left = flat[2 * block * half : (2 * block + 1) * half]
            right = flat[(2 * block + 1) * half : (2 * block + 2) * half]
            for k in range(half):
                a, b = _subtract(left[k], double), _halve(right[k] * root, modulus, factor)
                left[k], right[k] = a + b, a - b + double
        count, half = 2 * count, half // 2
    for k in range(flat.size):
        flat[k] = _subtract(_subtract(flat[k], double), modulus)


@compile_cached("void(u8[:, ::1], u8[::1], u8, u8, u8)")
def run_inverse(work, roots, modulus, factor, degree):
    """As :meth:`~nearveil.sealed.ring.Transform.run_inverse`."""
    flat, count, half = work.ravel(), _N // 2, work.size // _N
    double = _U(2) * modulus
    while count:
        for block in range(count):
            root = roots[count + block]
            left = flat[2 * block * half : (2 * block + 1) * half]
            right = flat[(2 * block + 1) * half : (2 * block + 2) * half]
            for k in range(half):
                a, b = left[k], right[k]
                left[k], right[k] = _subtract(a + b, double), _halve((a - b + double) * root, modulus, factor)
        count, half = count // 2, 2 * half
    for k in range(flat.size):
        flat[k] = _subtract(_halve(flat[k] * degree, modulus, factor), modulus)


@compile_cached("void(u4[:, ::1], i8[::1], u8[::1], u8, u8, u8[:, ::1], u8[:, ::1], u4[:, :, :, :, ::1])")
def fill_diagonals(hint, places, plain_roots, plain_factor, plain_degree, roots, numbers, out):
    """Fill the diagonals of a block, shape (rows, n), as slots modulo each prime, in Montgomery's form, in tiles.

    Diagonal i of giant step g is turned back by the giant steps that follow. `numbers` has, for each prime, p, -1/p
    modulo 2^32, and 2^64 modulo p; `out` has the shape (L, giant steps, tiles, TERMS, TILE).
    """
    width = hint.shape[1]
    plain, limb = np.empty((_N, _COLUMNS), np.uint64), np.empty((_N, _COLUMNS), np.uint64)
    for task in range(out.shape[1] * _BABY // _COLUMNS):
        g, first = task // (_BABY // _COLUMNS), task % (_BABY // _COLUMNS) * _COLUMNS
        for slot in range(_N):
            turn = slot % _HALF
            row = slot - turn + (turn - g * _BABY) % _HALF
            for i in range(_COLUMNS):
                column = (turn + first + i) % width
                plain[places[slot], i] = hint[row, column] if row < len(hint) else 0
        run_inverse(plain, plain_roots, _U(_T), plain_factor, plain_degree)
        for prime in range(_L):
            modulus, factor, square = numbers[prime]
            for k in range(_N):
                for i in range(_COLUMNS):
                    value = plain[k, i]
                    limb[k, i] = value + (modulus - _U(_T) if value > _U(_T // 2) else _U(0))
            run_forward(limb, roots[prime], modulus, factor)
            for slot in range(_N):
                for i in range(_COLUMNS):
                    value = _subtract(_halve(limb[places[slot], i] * square, modulus, factor), modulus)
                    out[prime, g, slot // TILE, first + i, slot % TILE] = value


@compile_cached("void(intp, intp, intp, u4[:, :, ::1], u4[:, :, ::1], u8, u8)")
def multiply_step(tables, factors, stride, before, after, modulus, factor):
    """Take a giant step modulo a prime, for several requests: add products to the last sums, turned by a giant step.

    `tables` and `factors` are addresses of tiles; factors of requests are `stride` bytes apart. Each row of slots of
    `before` and `after`, shape (requests, 2, HALF + baby steps), ends with a copy of its first slots.
    """
    for tile in range(_N // TILE):
        row, start = tile // (_HALF // TILE), tile % (_HALF // TILE) * TILE
        shift = 4 * (row * (_HALF + _BABY) + start)
        for k in range(len(before)):
            source, target = before[k].ctypes.data + shift + 4 * _BABY, after[k].ctypes.data + shift
            for part in range(0, 4 * TILE, 4 * _STEP):
                offset = tile * _TILE_BYTES + part
                right = factors + k * stride + offset
                _multiply_tile(tables + offset, right, source + part, target + part, modulus, factor)
    after[:, :, _HALF:] = after[:, :, :_BABY]


@compile_cached("void(intp, u4[:, :, :, :, ::1], u8[:, ::1], u4[:, :, ::1])")
def multiply_block(tables, factors, numbers, out):
    """Multiply a block by the factors of several requests, shape (requests, L, tiles, TERMS, TILE), in one pass."""
    count, size = len(factors), _N // TILE * _TILE_BYTES
    sums = np.empty((2, count, 2, _HALF + _BABY), np.uint32)
    for prime in range(_L):
        sums[:] = 0
        modulus, factor = numbers[prime, 0], numbers[prime, 1]
        right = factors.ctypes.data + prime * size
        for g in range(_GIANTS - 1, -1, -1):
            left = tables + (prime * _GIANTS + g) * size
            multiply_step(left, right, _L * size, sums[g % 2], sums[1 - g % 2], modulus, factor)
        out[:, prime, :_HALF] = sums[1, :, 0, :_HALF]
        out[:, prime, _HALF:] = sums[1, :, 1, :_HALF]


@compile_cached("void(u4[:, ::1], u4[:, :, :, ::1], intp, u8[:, ::1], u4[:, :, :, ::1])")
def fill_factors(secret, keys, digits, numbers, out):
    """Fill the factors of a request: the secret turned by all baby steps, then the keys of giant steps.

    `keys` has the shape (2, L of q, L of p, N) and `digits`, an address, (L of p, baby steps - 1, L of q, N).
    """
    sums = np.empty((2, 2, _HALF + _STEP), np.uint32)
    for prime in range(_L):
        key = np.ascontiguousarray(keys[0, :, prime])
        for i in range(_BABY):
            before, after = sums[1 - i % 2], sums[i % 2]
            for slot in range(0, _N, _STEP):
                row, start = slot // _HALF, slot % _HALF
                if i == 0:
                    after[row, start : start + _STEP] = secret[prime, slot : slot + _STEP]
                else:
                    _multiply_keys(
                        digits + 4 * (((prime * (_BABY - 1) + i - 1) * _L) * _N + slot),
                        key.ctypes.data + 4 * slot,
                        before.ctypes.data + 4 * (row * (_HALF + _STEP) + start + 1),
                        after.ctypes.data + 4 * (row * (_HALF + _STEP) + start),
                        numbers[prime, 0],
                        numbers[prime, 1],
                    )
                out[prime, slot // TILE, i, slot % TILE : slot % TILE + _STEP] = after[row, start : start + _STEP]
            after[:, _HALF:] = after[:, :_STEP]
        for tile in range(_N // TILE):
            for q in range(_L):
                out[prime, tile, _BABY + q] = keys[1, q, prime, tile * TILE : (tile + 1) * TILE]
