"""Tokens on a GPU, in torch and Triton: baby steps, sums of products and modulus switching for several requests.

Slots are numbered ``32 k + c``: a giant step turns k alone, so a program computes all k of one c, for two blocks, a
prime and four requests. Transforms are products with matrices of side 64, exact in 64-bit floats: their entries are
split, and sums stay below 2^53.
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
def _load(address, offsets):
    """Load numbers below 2^31 as 64 bits without a sign."""
    return tl.load(address + offsets).to(tl.uint32, bitcast=True).to(tl.uint64)


@triton.jit
def _multiply(
    blocks, factors, out, numbers, n_blocks, n_pairs, n_groups, request_size, size,
    COLUMNS: tl.constexpr, TURNS: tl.constexpr, TERMS: tl.constexpr, GIANTS: tl.constexpr,
):  # fmt: skip
    """Fill one column of the results of four requests for two blocks and a prime."""
    program = tl.program_id(0)
    group, pair, column = program % n_groups, program // n_groups % n_pairs, program // n_groups // n_pairs
    first, second = 2 * pair, tl.minimum(2 * pair + 1, n_blocks - 1)  # the last may be computed twice
    modulus = tl.load(numbers + 2 * (column // 32)).to(tl.uint64)
    factor = tl.load(numbers + 2 * (column // 32) + 1).to(tl.uint64)
    turns, request = tl.arange(0, TURNS)[None, :], tl.arange(0, 4)[:, None]
    after = turns // (TURNS // 2) * (TURNS // 2) + (turns + 1) % (TURNS // 2) + 0 * request
    table = column.to(tl.int64) * (GIANTS * TERMS * TURNS) + turns
    left = tl.load(blocks + first).to(tl.pointer_type(tl.int32)) + table
    right = tl.load(blocks + second).to(tl.pointer_type(tl.int32)) + table
    requests = group.to(tl.int64) * 4 + request
    factors += requests * request_size + column * (TERMS * TURNS) + turns
    left_sums = tl.zeros([4, TURNS], tl.uint64)
    right_sums = left_sums
    for step in range(GIANTS):
        start = (GIANTS - 1 - step) * TERMS * TURNS
        left_total = tl.zeros([4, TURNS], tl.uint64)
        right_total = left_total
        for i in tl.static_range(TERMS):
            x = _load(factors, i * TURNS)
            left_total += _load(left, start + i * TURNS) * x
            right_total += _load(right, start + i * TURNS) * x
        left_sums = tl.gather(left_sums, after, 1) + _reduce(left_total, modulus, factor)
        right_sums = tl.gather(right_sums, after, 1) + _reduce(right_total, modulus, factor)
    target = out + requests * size + column * TURNS + turns
    tl.store(target + first.to(tl.int64) * COLUMNS * TURNS, (left_sums % modulus).to(tl.int32))
    tl.store(target + second.to(tl.int64) * COLUMNS * TURNS, (right_sums % modulus).to(tl.int32))


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
        self._forward, self._inverse = (
            [self._make_matrices(p, pow(get_transform(p).root, sign, p)) for p in PRIMES] for sign in (1, -1)
        )
        self._twists = [self._make_twists(i, p) for i, p in enumerate(PRIMES)]
        self._digits, self._owners = self._load(digits.view(np.int32)).long(), owners
        copies = {} if previous is None else {id(block): copy for block, copy in previous._blocks}
        pairs = ((block, copies.get(id(block))) for block in blocks)
        self._blocks: list[tuple[Any, Any]] = [
            (block, self.load_block(block) if copy is None else copy) for block, copy in pairs
        ]

    def answer(self, requests: Sequence[TokenRequest]) -> list[bytes]:
        """Return the tokens of checked requests."""
        parts = zip(*requests, strict=True)
        coefficients, keys = (self._load(np.stack(part).view(np.int32)).long() for part in parts)
        factors, tokens = self.make_factors(self.to_slots(coefficients), keys), []
        for k, part in enumerate(factors):
            blocks = [copy for (_, copy), owner in zip(self._blocks, self._owners, strict=True) if owner == k]
            tokens.append(self.switch(self.multiply(blocks, part)))
        packed = torch.cat(tokens, dim=1)
        landing = torch.empty(packed.shape, dtype=torch.uint8, pin_memory=packed.is_cuda)
        return [token.tobytes() for token in landing.copy_(packed).numpy()]

    def _load(self, values: Any, kind: Any = None) -> Any:
        return torch.as_tensor(np.ascontiguousarray(values), dtype=kind).to(self.device)

    def _make_matrices(self, prime: int, root: int) -> tuple[Any, ...]:
        """Return the matrix of a transform of 64, in two parts, and the factors between two of them."""
        side, powers = np.arange(_SIDE), _list_powers(root, prime)
        matrix, between = (powers[k * np.outer(side, side) % (2 * N)] for k in (2 * _SIDE, 2))
        halves = (self._load(part, torch.float64) for part in (matrix >> _SPLIT, matrix & ((1 << _SPLIT) - 1)))
        return (*halves, self._load(between))

    def _make_twists(self, number: int, prime: int) -> tuple[Any, Any]:
        """Return the factors before a forward transform, and after an inverse one, which scale residues, too."""
        root, side = get_transform(prime).root, np.arange(_SIDE)
        scale = pow(N, -1, prime) * int(COFACTORS[number, 0]) % prime
        before = _list_powers(root, prime)[_SIDE * side[:, None] + side]
        after = _list_powers(pow(root, -1, prime), prime)[side[:, None] + _SIDE * side] * scale % prime
        return self._load(before), self._load(after)

    def _transform(self, values: Any, matrices: tuple[Any, ...], prime: int) -> Any:
        """Return products of matrices of side 64 with the matrix of a transform, from both sides."""
        high, low, between = matrices
        values = values.double()
        values = (_combine(high @ values, low @ values, prime) * between % prime).double()
        return _combine(values @ high, values @ low, prime)

    def to_slots(self, coefficients: Any) -> Any:
        """Return the slots of residues modulo each prime, shape (..., L, N)."""
        slots = torch.empty_like(coefficients)
        for i, prime in enumerate(PRIMES):
            values = coefficients[..., i, :].reshape(-1, _SIDE, _SIDE) * self._twists[i][0] % prime
            ordered = self._transform(values, self._forward[i], prime).transpose(1, 2).reshape(slots[..., i, :].shape)
            slots[..., i, self._order] = ordered
        return slots

    def load_block(self, block: Any) -> Any:
        """Return the tables of a block, arranged by columns: shape (L, c, giant steps, TERMS, k)."""
        tiles = torch.as_tensor(np.asarray(block).view(np.int32)).to(self.device)
        halves = tiles.view(L, _GIANTS, _TURNS // 2, _TERMS, 2, _BABY)
        return halves.permute(0, 5, 1, 3, 2, 4).reshape(L, _BABY, _GIANTS, _TERMS, _TURNS).contiguous()

    def make_factors(self, secrets: Any, keys: Any) -> Any:
        """Return the factors of requests, shape (K, requests, L, c, TERMS, k).

        Shapes of secrets and keys are (requests, K, L, N) and (requests, 2, L, L, N).
        """
        moduli, inverses = (self._numbers[:, k, None] for k in range(2))
        baby = keys[:, None, 0].transpose(2, 3)
        steps = torch.empty((_TERMS, *secrets.shape), dtype=torch.int64, device=self.device)
        steps[0], steps[_BABY:] = secrets, keys[:, 1].transpose(0, 1)[:, :, None]
        for i in range(1, _BABY):
            sums = (self._digits[:, :, i - 1] * baby).sum(dim=3)  # below 3 p^2
            sums = (sums + ((sums & _MASK) * inverses & _MASK) * moduli) >> 32
            turned = steps[i - 1].view(-1, 2, N // 2).roll(-1, 2).view(secrets.shape)
            steps[i] = (sums + turned) % moduli
        columns = steps.to(torch.int32).view(*steps.shape[:-1], _TURNS, _BABY)
        return columns.permute(2, 1, 3, 5, 0, 4).contiguous()

    def multiply(self, blocks: Sequence[Any], factors: Any) -> Any:
        """Return the sums of blocks for requests, shape (requests, blocks, L, c, k)."""
        addresses = torch.tensor([block.data_ptr() for block in blocks], device=self.device)
        count = len(factors)
        padded = torch.nn.functional.pad(factors, (0, 0) * 4 + (0, -count % _TOGETHER))
        out = torch.empty((len(padded), len(blocks), L, _BABY, _TURNS), dtype=torch.int32, device=self.device)
        n_groups, n_pairs = len(padded) // _TOGETHER, -(-len(blocks) // 2)
        _multiply[(n_groups * n_pairs * L * _BABY,)](
            addresses, padded, out, self._numbers, len(blocks), n_pairs, n_groups, padded[0].numel(), out[0].numel(),
            COLUMNS=L * _BABY, TURNS=_TURNS, TERMS=_TERMS, GIANTS=_GIANTS, num_warps=4,
        )  # fmt: skip
        return out[:count]

    def switch(self, sums: Any) -> Any:
        """Return the coefficients of sums, rounded to the bits of a token: as bytes, shape (requests, -1)."""
        count = len(sums)
        slots = sums.reshape(-1, L, _BABY, _TURNS)
        fractions = torch.zeros((len(slots), _SIDE, _SIDE), dtype=torch.int64, device=self.device)
        for i, prime in enumerate(PRIMES):
            ordered = slots[:, i].transpose(1, 2).reshape(-1, N)[:, self._order]
            values = self._transform(ordered.view(-1, _SIDE, _SIDE), self._inverse[i], prime) * self._twists[i][1]
            fractions += values % prime * int(QUOTIENTS[i, 0])  # modulo 2^64
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


def _list_powers(base: int, prime: int) -> np.ndarray:
    """Return the powers below 2 N of a number."""
    powers = np.ones(1, np.int64)
    while len(powers) < 2 * N:
        powers = np.append(powers, powers * pow(base, len(powers), prime) % prime)
    return powers


def _combine(high: Any, low: Any, prime: int) -> Any:
    """Return a product modulo a prime from those with the upper and lower bits."""
    return ((high.long() % prime << _SPLIT) + low.long()) % prime
