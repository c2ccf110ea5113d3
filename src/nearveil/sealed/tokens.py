"""Tokens, the server's half: multiply a hint by encrypted secrets, with the diagonals of Halevi and Shoup (2018).

A block of 4096 rows of H times s is a sum over 32 giant steps, each over 32 baby steps: diagonals times the secret,
which is turned by i slots in baby step i; the sum is turned by 32 slots in each giant step. A rotation changes the key
of a ciphertext (b, a), and adds the digits of a times the rotation key to turn it back.

All a parts depend on public seeds and on H alone. They are computed here once for a version of the hint, and clients
fetch those of the results. A token then takes one sum of 35 products for each giant step, prime and slot: 32
diagonals times baby steps, and 3 digits times the key.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from nearveil.sealed import _compiled_ring as compiled
from nearveil.sealed import ring
from nearveil.sealed.lwe import Words
from nearveil.sealed.parameters import PUBLIC_BITS, RING, TOKEN_BITS
from nearveil.sealed.ring import PRIMES, L, Limbs, N, T, TokenRequest, Transform

_BABY, _GIANTS, _HALF = RING.baby_steps, RING.giant_steps, N // 2
_TILES = N // compiled.TILE
_FACTORS_SHAPE = L, _TILES, compiled.TERMS, compiled.TILE
_BLOCK_SHAPE = L, _GIANTS, *_FACTORS_SHAPE[1:]
BATCH = 32  # requests that are answered together
_TOGETHER = 4  # of these in one pass of a processor: a core's cache holds their factors


class _FastTransform(Transform):
    """A transform that Numba computes, also modulo t."""

    def run_forward(self, work: Limbs) -> None:
        compiled.run_forward(work, self.roots, self.prime, self.factor)

    def run_inverse(self, work: Limbs) -> None:
        compiled.run_inverse(work, self.inverse_roots, self.prime, self.factor, self.degree)


_TRANSFORMS, _PLAIN = [_FastTransform(prime) for prime in PRIMES], _FastTransform(T)
_ROOTS = np.stack([transform.roots for transform in _TRANSFORMS])
_NUMBERS = np.array([(t.prime, t.factor, (1 << 64) % t.prime) for t in _TRANSFORMS], np.uint64)


class TokenTables:
    """The tables of one stage, from which tokens are computed. They change with the hint; several threads may use them.

    `stage` and `seed` name the public a parts; clients derive them as well. `n_rows` are the rows of the hint of each
    secret. `arrays` are as :attr:`arrays` has them, perhaps mapped from a file. On a GPU of torch as `device`, there is
    a copy of them, and tokens are computed there; blocks that `previous` tables have there are not copied again.
    """

    def __init__(
        self,
        stage: str,
        seed: bytes,
        n_rows: Sequence[int],
        arrays: Sequence[NDArray[Any]],
        n_threads: int = 1,
        device: str = "cpu",
        previous: "TokenTables | None" = None,
    ) -> None:
        self._stage, self._seed, self.n_rows = stage, seed, tuple(n_rows)
        self._digits, self._public, *self._blocks = arrays
        self._owners = np.repeat(np.arange(len(n_rows)), ring.count_blocks(n_rows))
        shapes = [(len(n_rows), L, _BABY - 1, L, N), (len(self._owners), N), *[_BLOCK_SHAPE] * len(self._owners)]
        if [array.shape for array in arrays] != shapes or {array.dtype.str for array in arrays} != {"<u4"}:
            raise ValueError("the tables do not fit the rows; build them again")  # compiled code checks no bounds
        self._n_threads = n_threads
        self._device, self._on_device = device, None
        if device != "cpu":
            from nearveil.sealed._device_ring import DeviceTables

            copies = None if previous is None else previous._on_device
            self._on_device = DeviceTables(device, self._digits, self._blocks, self._owners, copies)

    @classmethod
    def build(cls, stage: str, seed: bytes, hints: Sequence[Words], n_threads: int = 1, device: str = "cpu") -> Self:
        """Build the tables of hints modulo t, one for each secret, each of shape (rows, n): 0.1 s a block and core."""
        n_rows = [len(hint) for hint in hints]
        sources = [_PublicSource(stage, seed, k) for k in range(len(hints))]
        parts = [(k, block) for k, count in enumerate(ring.count_blocks(n_rows)) for block in range(count)]
        blocks, public = _make_blocks(sources, hints, parts, n_threads)
        arrays = [np.stack([source.digits for source in sources]), np.stack(public), *blocks]
        return cls(stage, seed, n_rows, arrays, n_threads, device)

    def rebuild(self, hints: Sequence[Words], changed: Sequence[set[int]]) -> "TokenTables":
        """Return tables for changed hints. Blocks without a row of `changed`, one set for each secret, are shared."""
        parts = sorted({(k, row // N) for k, rows in enumerate(changed) for row in rows})
        firsts = np.cumsum([0, *ring.count_blocks(self.n_rows)])
        sources = [_PublicSource(self._stage, self._seed, k) for k in range(len(hints))]
        blocks, public = list(self._blocks), self._public.copy()
        for (k, block), tables, fresh in zip(parts, *_make_blocks(sources, hints, parts, self._n_threads), strict=True):
            blocks[firsts[k] + block], public[firsts[k] + block] = tables, fresh
        arrays = [self._digits, public, *blocks]
        return TokenTables(self._stage, self._seed, self.n_rows, arrays, self._n_threads, self._device, self)

    @property
    def public(self) -> bytes:
        """The a parts of tokens, 32 bits a row, which clients need to read any token of this version."""
        return self._public.tobytes()

    @property
    def arrays(self) -> list[NDArray[Any]]:
        """The tables, for a file."""
        return [self._digits, self._public, *self._blocks]

    @property
    def nbytes(self) -> int:
        """Bytes of the tables."""
        return sum(array.nbytes for array in self.arrays)

    def answer(self, requests: Sequence[TokenRequest]) -> list[bytes]:
        """Return the tokens of checked requests, of which several share a pass over the tables."""
        if self._on_device is not None:
            return self._on_device.answer(requests)
        tokens = []
        with ThreadPoolExecutor(self._n_threads) as threads:  # of this call: a child of a fork would wait for others
            for start in range(0, len(requests), _TOGETHER):
                tokens += self._answer_batch(requests[start : start + _TOGETHER], threads)
        return tokens

    def _answer_batch(self, requests: Sequence[TokenRequest], threads: ThreadPoolExecutor) -> list[bytes]:
        factors = np.empty((len(self.n_rows), len(requests), *_FACTORS_SHAPE), np.uint32)

        def fill(pair: tuple[int, int]) -> None:
            k, number = pair
            secrets, keys = requests[number]
            slots = np.stack([t.to_slots(secrets[k, i]) for i, t in enumerate(_TRANSFORMS)]).astype(np.uint32)
            compiled.fill_factors(slots, keys, self._digits[k].ctypes.data, _NUMBERS, factors[k, number])

        def multiply(number: int) -> Limbs:
            sums = np.empty((len(requests), L, N), np.uint32)
            compiled.multiply_block(self._blocks[number].ctypes.data, factors[self._owners[number]], _NUMBERS, sums)
            return ring.round_fractions(_to_coefficients(sums), TOKEN_BITS)

        list(threads.map(fill, np.ndindex(factors.shape[:2])))
        rounded = np.stack(list(threads.map(multiply, range(len(self._blocks)))), axis=1)
        return [ring.pack_bits(token, TOKEN_BITS) for token in rounded]


def _make_blocks(
    sources: "Sequence[_PublicSource]", hints: Sequence[Words], parts: Sequence[tuple[int, int]], n_threads: int
) -> tuple[list[NDArray[Any]], list[NDArray[Any]]]:
    """Return the tables of blocks of rows, each of a secret, and the a parts of their results."""
    with ThreadPoolExecutor(n_threads) as threads:
        pairs = list(threads.map(lambda part: sources[part[0]].make_block(hints[part[0]], part[1] * N), parts))
    return [tables for tables, _ in pairs], [public for _, public in pairs]


class _PublicSource:
    """The a parts of one secret's baby steps, the digits of these, and the a parts of results."""

    def __init__(self, stage: str, seed: bytes, number: int) -> None:
        baby, giant = ring.derive_keys(stage, seed)
        public = ring.derive_public(stage, seed, "secret", number)
        steps = np.empty((compiled.TERMS, L, N), np.uint32)
        steps[0], steps[_BABY:] = public, giant
        self.digits = np.empty((L, _BABY - 1, L, N), np.uint32)
        for i in range(1, _BABY):
            digits = _split_digits(ring.rotate(steps[i - 1], 1))
            self.digits[:, i - 1] = _to_montgomery(digits).swapaxes(0, 1)
            steps[i] = (digits * baby % _MODULI).sum(axis=0, dtype=np.uint64) % _MODULI
        tiles = steps.reshape(compiled.TERMS, L, _TILES, compiled.TILE)
        self._factors = np.ascontiguousarray(tiles.transpose(1, 2, 0, 3))

    def make_block(self, hint: Words, start: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """Return the tables of a block of rows, and the a part of its results."""
        tables = np.zeros(_BLOCK_SHAPE, np.uint32)
        rows = np.ascontiguousarray(hint[start : start + N], np.uint32)
        plain = _PLAIN.places, _PLAIN.inverse_roots, _PLAIN.factor, _PLAIN.degree
        compiled.fill_diagonals(rows, *plain, _ROOTS, _NUMBERS, tables)
        sums = np.zeros((L, N), np.uint32)
        nothing, out = (np.zeros((1, 2, _HALF + _BABY), np.uint32) for _ in range(2))
        for g in range(_GIANTS - 1, -1, -1):
            if g < _GIANTS - 1:  # the first sum has no last one
                digits = _to_montgomery(_split_digits(ring.rotate(sums, _BABY))).reshape(L, L, _TILES, compiled.TILE)
                tables[:, g, :, _BABY:] = digits.transpose(1, 2, 0, 3)
            for i, transform in enumerate(_TRANSFORMS):
                addresses = tables[i, g].ctypes.data, self._factors[i].ctypes.data
                compiled.multiply_step(*addresses, 0, nothing, out, transform.prime, transform.factor)
                sums[i] = out[0, :, :_HALF].ravel()
        return tables, ring.round_fractions(_to_coefficients(sums), PUBLIC_BITS).astype(np.uint32)


_MODULI = np.array(PRIMES, np.uint64)[:, None]


def _to_montgomery(values: Limbs) -> Limbs:
    return (values << np.uint64(32)) % _MODULI


def _to_coefficients(slots: NDArray[Any]) -> Limbs:
    """Return the coefficients of polynomials modulo each prime, shape (..., L, N)."""
    return np.stack([t.to_coefficients(slots[..., i, :]) for i, t in enumerate(_TRANSFORMS)], axis=-2)


def _split_digits(slots: NDArray[Any]) -> Limbs:
    """Return the residues modulo each prime, as small numbers, in slots modulo all primes, shape (L, L, N)."""
    centred = _to_coefficients(slots).astype(np.int64)
    centred -= (centred > _MODULI.astype(np.int64) // 2) * _MODULI.astype(np.int64)
    return np.stack([t.to_slots((centred + (centred < 0) * t.prime).astype(np.uint64)) for t in _TRANSFORMS], axis=1)
