"""Tokens on a GPU, in torch and Triton: baby steps, sums of products and modulus switching for several requests.

The sum over giant steps g of a block is ``sum_g turn(S_g, 32 g)`` for sums of 35 products S_g, because the digits of
the public parts are known. So each result reads turned products, and no step waits for another. Slots are numbered
``32 k + c``: a turn by 32 moves k alone, and a program computes all k of one c for one block, prime and four requests.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from nearveil.sealed.parameters import RING
from nearveil.sealed.ring import COFACTORS, PRIMES, QUOTIENTS, TOKEN_BITS, L, N, TokenRequest, get_transform

_BABY, _GIANTS = RING.baby_steps, RING.giant_steps
_TERMS = _BABY + L
_TURNS = N // _BABY  # values of k, of which each row of slots has half
_TOGETHER = 4  # requests of one program
_SIDE = 64  # a transform is two products with matrices of this side
_SPLIT = 15  # bits of the lower parts of their entries: sums of 64 products with 29 bits stay below 2^53
_MASK = (1 << 32) - 1


@triton.jit
def _reduce(total, modulus, factor):
    """Return total / 2^32 modulo p, below 7 p: see `_compiled_ring`."""
    quotient = ((total & 0xFFFFFFFF) * factor) & 0xFFFFFFFF
    return (total + quotient * modulus) >> 32


@triton.jit
def _multiply(
    blocks, factors, out, numbers, n_blocks, n_groups, request_size, size,
    COLUMNS: tl.constexpr, TURNS: tl.constexpr, TERMS: tl.constexpr, GIANTS: tl.constexpr,
):  # fmt: skip
    """Fill one column of the results of four requests for one block and prime."""
    program = tl.program_id(0)
    group, block, column = program % n_groups, program // n_groups % n_blocks, program // n_groups // n_blocks
    modulus, factor = tl.load(numbers + 2 * (column // 32)), tl.load(numbers + 2 * (column // 32) + 1)
    modulus, factor = modulus.to(tl.uint64), factor.to(tl.uint64)
    turns = tl.arange(0, TURNS)
    row = turns // (TURNS // 2) * (TURNS // 2)
    table = tl.load(blocks + block).to(tl.pointer_type(tl.uint32)) + column * (GIANTS * TERMS * TURNS)
    f0 = factors + group.to(tl.int64) * 4 * request_size + column * (TERMS * TURNS)
    f1, f2, f3 = f0 + request_size, f0 + 2 * request_size, f0 + 3 * request_size
    a0 = tl.zeros([TURNS], tl.uint64)
    a1, a2, a3 = a0, a0, a0
    for g in range(GIANTS):
        source = row + (turns + g) % (TURNS // 2)
        s0 = tl.zeros([TURNS], tl.uint64)
        s1, s2, s3 = s0, s0, s0
        for i in tl.static_range(TERMS):
            d = tl.load(table + (g * TERMS + i) * TURNS + source).to(tl.uint64)
            s0 += d * tl.load(f0 + i * TURNS + source).to(tl.uint32, bitcast=True).to(tl.uint64)
            s1 += d * tl.load(f1 + i * TURNS + source).to(tl.uint32, bitcast=True).to(tl.uint64)
            s2 += d * tl.load(f2 + i * TURNS + source).to(tl.uint32, bitcast=True).to(tl.uint64)
            s3 += d * tl.load(f3 + i * TURNS + source).to(tl.uint32, bitcast=True).to(tl.uint64)
        a0 += _reduce(s0, modulus, factor)
        a1 += _reduce(s1, modulus, factor)
        a2 += _reduce(s2, modulus, factor)
        a3 += _reduce(s3, modulus, factor)
    target = out + group.to(tl.int64) * 4 * size + (block.to(tl.int64) * COLUMNS + column) * TURNS + turns
    tl.store(target, (a0 % modulus).to(tl.int32))
    tl.store(target + size, (a1 % modulus).to(tl.int32))
    tl.store(target + 2 * size, (a2 % modulus).to(tl.int32))
    tl.store(target + 3 * size, (a3 % modulus).to(tl.int32))


class DeviceTables:
    """A copy of the tables of tokens on a device. Blocks that `previous` has are not copied again."""

    def __init__(
        self,
        device: str,
        digits: NDArray[Any],
        blocks: Sequence[NDArray[Any]],
        owners: NDArray[Any],
        previous: "DeviceTables | None" = None,
    ) -> None:
        self.device = torch.device(device)
        self._numbers = self._load([(p, get_transform(p).factor) for p in PRIMES])
        self._order = self._load(_order_slots())
        self._passes = [self._make_matrices(i, p) for i, p in enumerate(PRIMES)]
        self._digits, self._owners = self._load(digits.view(np.int32)), owners
        copies = {} if previous is None else {id(block): copy for block, copy in previous._blocks}
        pairs = ((block, copies.get(id(block))) for block in blocks)
        self._blocks: list[tuple[Any, Any]] = [
            (block, self.load_block(block) if copy is None else copy) for block, copy in pairs
        ]

    def answer(self, requests: Sequence[TokenRequest]) -> list[bytes]:
        """Return the tokens of checked requests."""
        secrets, keys = (self._load(np.stack(parts).astype(np.int64)) for parts in zip(*requests, strict=True))
        tokens = []
        for k, digits in enumerate(self._digits):
            factors = self.make_factors(secrets[:, k], keys, digits)
            blocks = [copy for (_, copy), owner in zip(self._blocks, self._owners, strict=True) if owner == k]
            tokens.append(self.switch(self.multiply(blocks, factors)))
        return [token.tobytes() for token in torch.cat(tokens, dim=1).cpu().numpy()]

    def _load(self, values: Any, kind: Any = None) -> Any:
        return torch.as_tensor(np.ascontiguousarray(values), dtype=kind).to(self.device)

    def _make_matrices(self, number: int, prime: int) -> tuple[Any, ...]:
        """Return the matrix of a transform of 64, in two parts, and what its results are multiplied by."""
        root = get_transform(prime).root
        powers = np.empty(2 * N, np.int64)
        powers[0] = 1
        for k in range(1, 2 * N):
            powers[k] = int(powers[k - 1]) * pow(root, -1, prime) % prime
        side = np.arange(_SIDE)
        matrix = powers[2 * _SIDE * np.outer(side, side) % (2 * N)]
        twiddles = powers[2 * np.outer(side, side) % (2 * N)]
        last = powers[side[:, None] + _SIDE * side] * (pow(N, -1, prime) * int(COFACTORS[number, 0]) % prime) % prime
        halves = [self._load(part, torch.float64) for part in (matrix >> _SPLIT, matrix & ((1 << _SPLIT) - 1))]
        return (*halves, self._load(twiddles), self._load(last))

    def load_block(self, block: Any) -> Any:
        """Return the tables of a block, arranged by columns: shape (L, c, giant steps, TERMS, k)."""
        tiles = torch.as_tensor(np.asarray(block).view(np.int32)).to(self.device)
        halves = tiles.view(L, _GIANTS, _TURNS // 2, _TERMS, 2, _BABY)
        return halves.permute(0, 5, 1, 3, 2, 4).reshape(L, _BABY, _GIANTS, _TERMS, _TURNS)

    def make_factors(self, secrets: Any, keys: Any, digits: Any) -> Any:
        """Return the factors of requests, shape (requests, L, c, TERMS, k), for one secret of each.

        Shapes are (requests, L, N), (requests, 2, L, L, N) and (L, baby steps - 1, L, N).
        """
        moduli, inverses = (self._numbers[:, k, None] for k in range(2))
        baby = keys[:, 0].transpose(1, 2)
        steps = torch.empty((len(secrets), _TERMS, L, N), dtype=torch.int64, device=self.device)
        steps[:, 0], steps[:, _BABY:] = secrets, keys[:, 1]
        for i in range(1, _BABY):
            sums = (digits[:, i - 1].long() * baby).sum(dim=2)  # below 3 p^2
            sums = (sums + ((sums & _MASK) * inverses & _MASK) * moduli) >> 32
            turned = steps[:, i - 1].view(-1, L, 2, N // 2).roll(-1, 3).view(-1, L, N)
            steps[:, i] = (sums + turned) % moduli
        columns = steps.to(torch.int32).view(-1, _TERMS, L, _TURNS, _BABY)
        return columns.permute(0, 2, 4, 1, 3).contiguous()

    def multiply(self, blocks: Sequence[Any], factors: Any) -> Any:
        """Return the sums of blocks for requests, shape (requests, blocks, L, c, k)."""
        addresses = torch.tensor([block.data_ptr() for block in blocks], device=self.device)
        count = len(factors)
        padded = torch.nn.functional.pad(factors, (0, 0) * 4 + (0, -count % _TOGETHER))
        out = torch.empty((len(padded), len(blocks), L, _BABY, _TURNS), dtype=torch.int32, device=self.device)
        n_groups = len(padded) // _TOGETHER
        _multiply[(n_groups * len(blocks) * L * _BABY,)](
            addresses, padded, out, self._numbers, len(blocks), n_groups, padded[0].numel(), out[0].numel(),
            COLUMNS=L * _BABY, TURNS=_TURNS, TERMS=_TERMS, GIANTS=_GIANTS, num_warps=4,
        )  # fmt: skip
        return out[:count]

    def switch(self, sums: Any) -> Any:
        """Return the coefficients of sums, rounded to the bits of a token: as bytes, shape (requests, -1)."""
        count = len(sums)
        slots = sums.reshape(-1, L, _BABY, _TURNS)
        fractions = torch.zeros((len(slots), _SIDE, _SIDE), dtype=torch.int64, device=self.device)
        for i, prime in enumerate(PRIMES):
            high, low, twiddles, last = self._passes[i]
            ordered = slots[:, i].transpose(1, 2).reshape(-1, N)[:, self._order]
            values = ordered.view(-1, _SIDE, _SIDE).double()
            values = _combine(high @ values, low @ values, prime) * twiddles % prime
            values = values.double()
            values = _combine(values @ high, values @ low, prime) * last % prime
            fractions += values * int(QUOTIENTS[i, 0])  # modulo 2^64
        rounded = (fractions + (1 << (63 - TOKEN_BITS))) >> (64 - TOKEN_BITS) & ((1 << TOKEN_BITS) - 1)
        pairs = rounded.transpose(1, 2).reshape(count, -1, 2)
        both = pairs[..., 0] | pairs[..., 1] << TOKEN_BITS
        return torch.stack([both >> 8 * k & 255 for k in range(2 * TOKEN_BITS // 8)], dim=-1).byte().view(count, -1)


def _order_slots() -> np.ndarray:
    """Return the slot of the value at each odd power of the root, in their order."""
    powers = np.array([pow(5, k, 2 * N) for k in range(N // 2)])
    order = np.empty(N, np.int64)
    order[(np.concatenate([powers, 2 * N - powers]) - 1) // 2] = np.arange(N)
    return order


def _combine(high: Any, low: Any, prime: int) -> Any:
    """Return a product modulo a prime from those with the upper and lower bits."""
    return ((high.long() % prime << _SPLIT) + low.long()) % prime
