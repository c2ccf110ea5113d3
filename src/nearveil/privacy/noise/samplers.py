"""Where random bits come from: the operating system, or, for tests and studies alone, a seed."""

import itertools
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from nearveil.privacy.checks import check_integer


class Source(Protocol):
    """A stream of uniform, independent 64-bit words.

    A guarantee made with a source that is not `sound` is void.

    Examples
    --------
    >>> source: Source = secure_source()
    >>> source.words(2).dtype, source.sound
    (dtype('uint64'), True)
    """

    @property
    def sound(self) -> bool:
        """Whether nobody can foresee the words."""
        ...

    def words(self, count: int) -> NDArray[np.uint64]:
        """Return the next `count` words, shape (count,)."""
        ...


class _Secure:
    sound = True

    def words(self, count: int) -> NDArray[np.uint64]:
        return np.frombuffer(os.urandom(8 * count), dtype=np.uint64)

    def __repr__(self) -> str:
        return "secure_source()"


class _UnsafeSeeded:
    sound = False

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generator = np.random.PCG64(seed)

    def words(self, count: int) -> NDArray[np.uint64]:
        return np.asarray(self._generator.random_raw(count), dtype=np.uint64)

    def __repr__(self) -> str:
        return f"unsafe_seeded({self._seed})"


def secure_source() -> Source:
    """Return the operating system's cryptographic generator; the default everywhere.

    It has no state of its own, so a forked process repeats nothing.

    Examples
    --------
    >>> secure_source().words(3).shape, secure_source().sound
    ((3,), True)
    """
    return _Secure()


def unsafe_seeded(seed: int) -> Source:
    """Return words that the seed foretells: for tests and for studies that must repeat.

    Whoever knows or guesses the seed subtracts the noise. ``sound`` is false, and a guarantee for what was released
    with it says so. It is independent of NumPy's global state.

    Examples
    --------
    >>> bool((unsafe_seeded(7).words(5) == unsafe_seeded(7).words(5)).all()), unsafe_seeded(7).sound
    (True, False)
    """
    return _UnsafeSeeded(check_integer(seed, "seed"))


TOTAL_BITS = 255  # a table's probabilities are multiples of 2^-255
_FIRST_BITS = 63  # index and first bits of the coin, from one word; its top bit is the sign
_TIE_WORDS = (TOTAL_BITS - _FIRST_BITS) // 64
_WORKING_BITS = 320  # of weights while a table is made; the 65 bits more than kept absorb all rounding
_DECIMAL = Context(prec=120)  # exp() is correctly rounded by the standard; 120 digits are 398 bits

_REACH = 17  # a layer of scale c ends at 17 c: beyond lies less than 2^-207
_FINE = 3  # a fine layer's scale in steps of the next coarser layer
_TOP = 8  # the least scale of the coarsest layer, in its own steps
_GAP = 9  # bits between Gaussian layers: tables of 2^15 cells, which a core's cache holds
_EXPONENT_REACH = 140  # exponential variables end at 140 times their mean: beyond lies e^-140 < 2^-201
_DIGITS = 10  # the most digits of a group

_CHUNK = 1 << 15  # values at a time: a chunk and a table fit into a core's cache together


@dataclass(frozen=True)
class Table:
    """An alias table: cell i gives i below its threshold and ``alias[i]`` from it on."""

    bits: int  # there are 2^bits cells
    first: NDArray[np.uint64]  # the threshold's first 63 - bits bits
    rest: tuple[int, ...]  # the threshold's remaining 192 bits
    alias: NDArray[np.int64]


def alias_table(weights: Sequence[int]) -> Table:
    """Return the table with probabilities of ``weights[k] / sum(weights)``; none is negative, and not all are zero.

    All but the first are rounded down; the first takes what that leaves, fewer units than there are weights.
    """
    bits, total = max(1, (len(weights) - 1).bit_length()), sum(weights)
    shares = [(weight << TOTAL_BITS) // total for weight in weights]
    shares[0] += (1 << TOTAL_BITS) - sum(shares)
    shares += [0] * ((1 << bits) - len(shares))
    capacity = 1 << (TOTAL_BITS - bits)
    alias = list(range(1 << bits))
    small = [k for k, share in enumerate(shares) if share < capacity]
    large = [k for k, share in enumerate(shares) if share > capacity]
    while small and large:  # fill a cell that is too empty from one that is too full (Vose 1991), exactly
        empty, full = small.pop(), large[-1]
        alias[empty] = full
        shares[full] -= capacity - shares[empty]
        if shares[full] <= capacity:
            large.pop()
            if shares[full] < capacity:
                small.append(full)
    assert not small
    assert not large
    low = TOTAL_BITS - _FIRST_BITS
    return Table(
        bits=bits,
        first=np.array([share >> low for share in shares], dtype=np.uint64),
        rest=tuple(share & ((1 << low) - 1) for share in shares),
        alias=np.array(alias, dtype=np.int64),
    )


def look_up(table: Table, words: NDArray[np.uint64], source: Source) -> NDArray[np.int64]:
    """Return a draw from the table for each word, whose top bit is not used.

    The source is asked only where a coin ties, with probability 2^(bits - 63) for each word.
    """
    coin_bits = _FIRST_BITS - table.bits
    cells = (words >> np.uint64(coin_bits)).view(np.int64) & ((1 << table.bits) - 1)
    coins = words & np.uint64((1 << coin_bits) - 1)
    thresholds = table.first.take(cells)
    drawn = np.where(coins < thresholds, cells, table.alias.take(cells))
    for i in np.flatnonzero(coins == thresholds):
        coin = int.from_bytes(source.words(_TIE_WORDS).tobytes(), "little")
        if coin < table.rest[cells[i]]:
            drawn[i] = cells[i]
    return drawn


@dataclass(frozen=True)
class Layer:
    """A table whose draws count in steps of 2^shift."""

    shift: int
    table: Table


def gaussian_integers(ratio: Fraction, count: int, source: Source) -> NDArray[np.int64]:
    """Draw from the discrete Gaussian, P(k) proportional to exp(-k^2 / (2 ratio^2)), for a ratio of at least 4.

    Each is within 2^-204 of that distribution (Theorem 3 of docs/theory/noise.md).
    """
    layers, out = gaussian_layers(ratio), np.zeros(count, dtype=np.int64)
    for start in range(0, count, _CHUNK):
        chunk = out[start : start + _CHUNK]
        for layer in layers:
            words = source.words(len(chunk))
            minus = words.view(np.int64) >> 63  # the top bit, as 0 or -1
            chunk += ((look_up(layer.table, words, source) ^ minus) - minus) << layer.shift
    return out


def laplace_integers(ratio: Fraction, count: int, source: Source) -> NDArray[np.int64]:
    """Draw the continuous Laplace distribution of scale `ratio`, rounded to the nearest integer.

    Let E be exponential with mean 2 ratio: D = floor(E) has independent binary digits, and ``floor((D + 1) / 2)`` is
    E / 2 rounded to the nearest integer. A fair sign makes it Laplace. Each is within 2^-200 of that distribution
    (Theorem 4 of docs/theory/noise.md).
    """
    layers, out = exponential_layers(2 * ratio), np.zeros(count, dtype=np.int64)
    for start in range(0, count, _CHUNK):
        chunk = out[start : start + _CHUNK]
        for layer in layers:
            words = source.words(len(chunk))
            chunk += look_up(layer.table, words, source) << layer.shift
        minus = words.view(np.int64) >> 63  # a bit of the last words that no look-up has used
        chunk[:] = (((chunk + 1) >> 1) ^ minus) - minus
    return out


@lru_cache(maxsize=16)
def gaussian_layers(ratio: Fraction) -> tuple[Layer, ...]:
    """Split a discrete Gaussian into layers, the coarsest first: variances add up to ratio^2, exactly.

    The coarsest has steps of 2^e and a scale of at least 8 of them. Each finer one has a scale of three steps of the
    next coarser.
    """
    variance, shift = ratio**2, 0
    while _top_variance(variance, shift + 1) >= _TOP**2:
        shift += 1
    layers = [Layer(shift, _half_gaussian(_top_variance(variance, shift)))]
    for finer, coarser in _pairs(shift):
        layers.append(Layer(finer, _half_gaussian(Fraction(_FINE**2 << 2 * (coarser - finer)))))
    return tuple(layers)


def _pairs(shift: int) -> Iterable[tuple[int, int]]:
    """Yield the shifts of neighbouring layers, finer first, from the top at `shift` down to 0."""
    while shift > 0:
        finer = max(0, shift - _GAP)
        yield finer, shift
        shift = finer


def _top_variance(variance: Fraction, shift: int) -> Fraction:
    """Return what the finer layers leave of the variance, in the top's steps of 2^shift."""
    finer = sum(_FINE**2 << 2 * coarser for _, coarser in _pairs(shift))
    return (variance - finer) / (1 << 2 * shift)


@lru_cache(maxsize=64)
def _half_gaussian(variance: Fraction) -> Table:
    """Return the table of |k| for the discrete Gaussian of that variance parameter."""
    reach = _REACH * (math.isqrt(math.floor(variance)) + 1)
    # exp(-(k+1)^2 c) = exp(-k^2 c) * exp(-(2k+1) c), and the second factor falls by exp(-2 c) a step.
    ratio = _fixed_exp(-1 / (2 * variance))
    square = ratio * ratio >> _WORKING_BITS
    weight, weights = 1 << _WORKING_BITS, [1 << _WORKING_BITS]
    for _ in range(reach):
        weight = weight * ratio >> _WORKING_BITS
        ratio = ratio * square >> _WORKING_BITS
        weights.append(2 * weight)  # one for each sign
    return alias_table(weights)


@lru_cache(maxsize=16)
def exponential_layers(mean: Fraction) -> tuple[Layer, ...]:
    """Split the digits of floor(E), E exponential of that mean, into independent groups."""
    digits = max(1, math.ceil(_EXPONENT_REACH * mean).bit_length())
    groups = -(-digits // _DIGITS)
    cuts = [digits * group // groups for group in range(groups + 1)]
    layers = []
    for low, high in itertools.pairwise(cuts):
        ratio = _fixed_exp(-(2**low) / mean)
        weights = [1 << _WORKING_BITS]
        for _ in range((1 << (high - low)) - 1):
            weights.append(weights[-1] * ratio >> _WORKING_BITS)
        layers.append(Layer(low, alias_table(weights)))
    return tuple(layers)


def _fixed_exp(exponent: Fraction) -> int:
    """Return exp(exponent) in units of 2^-320, at most one unit off, for exponents of at most 0."""
    quotient = _DECIMAL.divide(Decimal(exponent.numerator), Decimal(exponent.denominator))
    return int(_DECIMAL.multiply(_DECIMAL.exp(quotient), Decimal(1 << _WORKING_BITS)))
