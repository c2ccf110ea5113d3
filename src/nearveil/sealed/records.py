"""Records in a grid: the code that places them, their entries, and the choice of which bucket asks for which record.

Positions are spread over a square of blocks. A bucket is a row or a column of blocks, so a record can be fetched by
either of two buckets, and a question asks every bucket for one column of it. Records are stored once.
"""

import hashlib
import math
from collections.abc import Sequence

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from nearveil.sealed.layout import Layout, SealedError
from nearveil.sealed.lwe import Bytes, Longs
from nearveil.sealed.parameters import ENTRY_BITS
from nearveil.sealed.sizes import RecordLayout, bound_row_norm

_HALF = 1 << (ENTRY_BITS - 1)
_AES_BLOCK = 16
_ROUNDS = 6  # that spread positions
_STEP = 1 << 12  # records that are encoded at a time
_WEIGHTS = 1 << np.arange(ENTRY_BITS - 1, -1, -1)

Octets = NDArray[np.uint8]


def place_records(layout: RecordLayout, seed: bytes, positions: NDArray[np.integer]) -> tuple[Longs, Longs, Longs]:
    """Return block, column and number in the column of the records at positions, spread evenly over the blocks."""
    # A Feistel network on pairs: each round changes one part by a hash of the other, so it is a permutation.
    sizes = layout.side, layout.side * layout.block_size
    parts = [*np.divmod(np.asarray(positions, np.int64), layout.side)][::-1]
    key = hashlib.shake_256(b"nearveil sealed places\0" + seed).digest(8 * _ROUNDS)
    for number, word in enumerate(np.frombuffer(key, "<u8").astype(np.uint64)):
        part, size = parts[number % 2], sizes[number % 2]
        parts[number % 2] = (part + (_mix(parts[1 - number % 2], word) % size).astype(np.int64)) % size
    rank, row = np.divmod(parts[1], layout.side)
    return row * layout.side + parts[0], rank // layout.per_column, rank % layout.per_column


def _mix(values: Longs, key: np.uint64) -> NDArray[np.uint64]:
    """Return hashes of 32 bits (splitmix64)."""
    with np.errstate(over="ignore"):
        mixed = values.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + key
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed >> np.uint64(32)


def encode_records(layout: RecordLayout, seed: bytes, positions: NDArray[np.integer], padded: Octets) -> Bytes:
    """Return the entries of padded records at positions, shape (n, n_entries): whitened, six bits each, centred."""
    entries, n_bits = np.empty((len(padded), layout.n_entries), np.int8), layout.n_entries * ENTRY_BITS
    for start in range(0, len(padded), _STEP):
        block = slice(start, start + _STEP)
        stream = _whiten(seed, positions[block], -(-n_bits // 8))  # also the spare bits of the last entry
        stream[:, : layout.width] ^= padded[block]
        bits = np.unpackbits(stream, axis=1, count=n_bits)
        entries[block] = bits.reshape(len(bits), -1, ENTRY_BITS) @ _WEIGHTS - _HALF
    return entries


def decode_records(
    layout: RecordLayout, seed: bytes, positions: NDArray[np.integer], entries: NDArray[np.integer]
) -> Octets:
    """Return the padded records, shape (n, width), of entries modulo 2^6, shape (n, n_entries)."""
    values = ((entries + _HALF) % (2 * _HALF)).astype(np.uint8)
    bits = np.unpackbits(values[:, :, None], axis=2)[:, :, 8 - ENTRY_BITS :].reshape(len(values), -1)
    return np.packbits(bits[:, : 8 * layout.width], axis=1) ^ _whiten(seed, positions, layout.width)


def _whiten(seed: bytes, positions: NDArray[np.integer], width: int) -> Octets:
    """Return a public stream of bytes for each position: entries are then as random ones, so noise has one bound."""
    key = hashlib.sha256(b"nearveil sealed whitening\0" + seed).digest()
    blocks = -(-width // _AES_BLOCK)
    counters = np.zeros((len(positions), blocks, 2), ">u8")
    counters[:, :, 0], counters[:, :, 1] = np.asarray(positions)[:, None], np.arange(blocks)
    encrypt = Cipher(algorithms.AES(key), modes.ECB()).encryptor().update  # noqa: S305 (of counters)
    return np.frombuffer(encrypt(counters.tobytes()), np.uint8).reshape(len(positions), -1)[:, :width].copy()


def find_buckets(layout: RecordLayout, blocks: Longs) -> Longs:
    """Return the two buckets of blocks, shape (n, 2): the row, and the column."""
    return np.stack([blocks // layout.side, layout.side + blocks % layout.side], axis=1)


def match_buckets(buckets: Longs, is_real: Sequence[bool], n_buckets: int) -> list[int]:
    """Return which record each bucket asks for, -1 for none: each is placed if it can be, the first ones first.

    Greedy augmentation is optimal for any weights that fall with the rank: the sets of records that can be placed are
    the independent sets of a matroid. The number of steps depends on shapes alone.
    """
    owners = [-1] * n_buckets
    pairs = [(*map(int, pair), int(pair[0]) + int(pair[1])) for pair in buckets]
    for record, (first, second, _) in enumerate(pairs):
        placed = not is_real[record]
        for start in (first, second):
            # A record that gives way has one other bucket, so an augmenting path is a walk without choices.
            path, bucket, length = [start], start, 0
            for step in range(n_buckets):
                owner = owners[bucket]
                if owner < 0:
                    length = length or step + 1
                else:
                    bucket = pairs[owner][2] - bucket
                path.append(bucket)
            if length and not placed:
                moved = [owners[bucket] for bucket in path[: length - 1]]
                for bucket, owner in zip(path[:length], [record, *moved], strict=True):
                    owners[bucket] = owner
                placed = True
    return owners


def pad_records(records: Sequence[bytes], width: int) -> Octets:
    """Return records as rows, shape (n, width): bytes, an end mark, and zeros."""
    out = np.zeros((len(records), width), np.uint8)
    for row, record in zip(out, records, strict=True):
        if not isinstance(record, bytes) or len(record) >= width:
            raise SealedError(f"records must be bytes, each of fewer than {width} bytes")
        row[: len(record) + 1] = np.frombuffer(record + b"\1", np.uint8)
    return out


def unpad_record(stored: Octets) -> bytes:
    """Return the record that :func:`pad_records` wrote; other input gives arbitrary bytes."""
    # All bytes are compared, in NumPy: stripping zeros takes longer for short records, and stops other threads.
    length = int(((stored != 0) * np.arange(1, len(stored) + 1)).max())
    return stored[: max(length - 1, 0)].tobytes()


def lay_out_records(layout: Layout, positions: Longs, records: Sequence[bytes]) -> Bytes:
    """Return the matrix of records, shape (blocks, rows, columns), for the layout of an index."""
    shape, count = layout.records, layout.counts.size * layout.n_slots
    assert shape is not None
    stored = np.zeros((shape.n_blocks, shape.per_column, shape.n_entries, shape.stored_columns), np.int8)
    padded, row_of = pad_records(records, shape.width), np.full(count, -1)
    filled = np.flatnonzero(positions.ravel() >= 0)
    row_of[filled] = positions.ravel()[filled]
    for start in range(0, count, _STEP):
        numbers = np.arange(start, min(start + _STEP, count))
        rows = np.where(row_of[numbers, None] >= 0, padded[row_of[numbers]], 0)
        block, column, number = place_records(shape, layout.seed, numbers)
        stored[block, number, :, column] = encode_records(shape, layout.seed, numbers, rows)
    matrix = stored.reshape(shape.n_blocks, shape.n_rows, shape.stored_columns)
    sums = [np.square(block, dtype=np.int32).sum(axis=1) for block in matrix]
    squares = np.stack(sums).reshape(shape.side, shape.side, -1)
    longest = max(int(squares.sum(axis=axis).max()) for axis in (0, 1))
    if math.sqrt(longest) > bound_row_norm(shape.stage.n_columns):
        raise SealedError("noise could change the records of this index: build it again, with another seed")
    return matrix


def get_bucket(layout: RecordLayout, stored: Bytes, bucket: int) -> Bytes:
    """Return the matrix of a bucket, shape (rows, samples)."""
    grid = stored.reshape(layout.side, layout.side, *stored.shape[1:])[..., : layout.n_columns]
    blocks = grid[bucket] if bucket < layout.side else grid[:, bucket - layout.side]
    return np.ascontiguousarray(blocks.transpose(1, 0, 2)).reshape(layout.n_rows, -1)
