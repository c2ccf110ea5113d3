"""Encryption of questions by learning with errors (Regev 2005), and the arithmetic around it.

All arithmetic is exact: BLAS multiplies integers in 64-bit floats, and every partial sum stays below 2^53.

A question is ``u = A s + e + message`` modulo Q. The client sends its leading bits only: rounding a ciphertext costs a
little accuracy and no privacy. The server multiplies its matrix D (8 bits an entry) by the question, modulo 2^24.
``D u - (D A) s`` is ``D message`` up to ``D e`` and rounding. The server has the hint ``H = D A``, rounded to modulo t;
the client obtains the mask ``H s`` modulo t from an encryption of ``s``, a token, before the question is known.

A question has groups: the colours of scores, the buckets of records. With K secrets, group g uses matrix ``g // K`` and
secret ``g % K``, so no two groups share both.
"""

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from numpy.typing import NDArray

from nearveil.privacy.noise import Source, gaussian_integers
from nearveil.sealed.parameters import ANSWER_BITS, LWE, RING, WORD_BITS

SEED_BYTES = 32
LARGEST_DRAW = 119  # of secrets and errors: where the tables of sigma 6.4 end
_AES_BLOCK = 16
_ROW_BYTES = 4 * LWE.dimension  # of the key stream, for a row of the public matrix
_ROWS = 1 << 7  # rows of the public matrix at a time: as 64-bit numbers they fit in a core's cache
_HINT_ROWS = 1 << 10  # of a database at a time
_HINT_COLUMNS = 1 << 11  # at a time; products stay below 7 + 25 + 11 bits

Words = NDArray[np.uint32]
Longs = NDArray[np.int64]
Doubles = NDArray[np.float64]
Bytes = NDArray[np.int8]


def expand_matrix(stage: str, seed: bytes, start: int, stop: int) -> NDArray[np.int32]:
    """Return rows of a stage's public matrices modulo Q, centred at 0: the key stream of AES-256 in counter mode."""
    stream = _open_stream(stage, seed, start).update(bytes((stop - start) * _ROW_BYTES))
    words = np.frombuffer(stream, "<i4").reshape(stop - start, LWE.dimension)
    return np.asarray(words >> (32 - LWE.modulus_bits), dtype=np.int32)


def _open_stream(stage: str, seed: bytes, start: int) -> CipherContext:
    """Return the key stream from a row on."""
    # The key is a digest of the seed, so nobody can choose a matrix by choosing a seed.
    key = hashlib.sha256(b"nearveil sealed matrix\0" + stage.encode() + b"\0" + seed).digest()
    counter = (start * _ROW_BYTES // _AES_BLOCK).to_bytes(_AES_BLOCK, "big")
    return Cipher(algorithms.AES(key), modes.CTR(counter)).encryptor()


def draw_gaussians(shape: tuple[int, int], source: Source) -> Longs:
    """Return secrets or errors: independent draws of the exact discrete Gaussian."""
    return gaussian_integers(LWE.sigma, shape[0] * shape[1], source).reshape(shape)


def encrypt_zeros(
    stage: str, seed: bytes, shape: tuple[int, int], n_secrets: int, source: Source
) -> tuple[Words, Longs]:
    """Return encryptions of zero, ``A s + e`` modulo Q (groups, C), and their secrets (n_secrets, n), drawn here."""
    n_groups, samples = shape
    if -(-n_groups // n_secrets) * samples > LWE.most_samples:
        raise ValueError(f"a secret must have at most {LWE.most_samples} samples: security is not estimated above")
    secrets = draw_gaussians((n_secrets, LWE.dimension), source)
    zeros = draw_gaussians(shape, source)
    factors, stream = secrets.astype(np.float64), _open_stream(stage, seed, 0)
    # The same memory holds all rows in turn: new pages would take time.
    nothing, words = memoryview(bytes(_ROWS * _ROW_BYTES)), np.empty(_ROWS * LWE.dimension + _AES_BLOCK, "<i4")
    matrix = np.empty((_ROWS, LWE.dimension))
    for first in range(0, n_groups, n_secrets):
        groups = zeros[first : first + n_secrets]
        for start in range(0, samples, _ROWS):
            count = min(_ROWS, samples - start)
            stream.update_into(nothing[: count * _ROW_BYTES], words.view(np.uint8).data)
            words >>= 32 - LWE.modulus_bits
            matrix[:count] = words[: count * LWE.dimension].reshape(count, -1)
            for group, factor in zip(groups, factors, strict=False):  # products of one vector are faster than of two
                group[start : start + count] += (matrix[:count] @ factor).astype(np.int64)  # below 25 + 7 + 10 bits
    return (zeros & ((1 << LWE.modulus_bits) - 1)).astype(np.uint32), secrets


def add_messages(zeros: Words, messages: Longs, question_bits: int) -> Words:
    """Return the rounded ciphertexts modulo 2^24 of messages modulo Q, one for each encryption of zero."""
    drop, values = LWE.modulus_bits - question_bits, zeros + messages
    odd = (values >> drop) & 1  # round half to even: biased errors would add up in a sum
    sent = ((values + (1 << (drop - 1)) - 1 + odd) >> drop) & ((1 << question_bits) - 1)
    return sent.astype(np.uint32) << np.uint32(WORD_BITS - question_bits)


def make_hint(stage: str, seed: bytes, matrix: int, groups: Sequence[Bytes], n_jobs: int = 1) -> list[Words]:
    """Return hints modulo t of groups that share a public matrix: D A, rounded, shape (rows, n), for D (rows, C)."""
    sums = [np.zeros((len(rows), LWE.dimension), np.int64) for rows in groups]
    samples = groups[0].shape[1]
    tasks = [(rows, total, start) for rows, total in zip(groups, sums, strict=True)
             for start in range(0, len(rows), _HINT_ROWS)]  # fmt: skip
    with ThreadPoolExecutor(n_jobs) as threads:
        for start in range(0, samples, _HINT_COLUMNS):
            stop = min(start + _HINT_COLUMNS, samples)
            factors = expand_matrix(stage, seed, matrix * samples + start, matrix * samples + stop).astype(np.float64)

            def add(task: Any, factors: Doubles = factors, columns: slice = slice(start, stop)) -> None:
                rows, total, first = task
                block = slice(first, first + _HINT_ROWS)
                total[block] += (rows[block, columns].astype(np.float64) @ factors).astype(np.int64)

            list(threads.map(add, tasks))
    return [round_to_masks(total) for total in sums]


def round_to_masks(hint: Longs) -> Words:
    """Return numbers modulo Q as the nearest multiples of Q / t, counted modulo t."""
    scaled = 2 * RING.plain_modulus * (hint & ((1 << LWE.modulus_bits) - 1)) + (1 << LWE.modulus_bits)
    return ((scaled >> (LWE.modulus_bits + 1)) % RING.plain_modulus).astype(np.uint32)


def remove_masks(values: Words, masks: Longs) -> Longs:
    """Return answers modulo 2^16 less masks modulo t, in whole numbers modulo ``2^16 t``."""
    return (values.astype(np.int64) * RING.plain_modulus - (masks << ANSWER_BITS)) % (RING.plain_modulus << ANSWER_BITS)


def round_down_to(values: NDArray[np.integer], from_bits: int, to_bits: int) -> Words:
    """Return values modulo 2^from_bits rounded to multiples of 2^(from_bits - to_bits), counted in those."""
    drop = from_bits - to_bits
    half = 1 << (drop - 1) if drop else 0
    return (((values.astype(np.int64) + half) >> drop) & ((1 << to_bits) - 1)).astype(np.uint32)


def pack_question(values: Words, bits: int) -> bytes:
    """Return the leading bits, 17 to 24, of numbers modulo 2^24: the lower 16 of all, then the others."""
    words = values >> np.uint32(WORD_BITS - bits)
    upper = np.unpackbits((words >> np.uint32(16)).astype(np.uint8)[:, None], axis=1)[:, 24 - bits :]
    return words.astype("<u2").tobytes() + np.packbits(upper).tobytes()


def unpack_question(data: bytes, bits: int, count: int) -> Words:
    """Return the numbers that :func:`pack_question` wrote, their lower bits zero."""
    packed = np.unpackbits(np.frombuffer(data, np.uint8, offset=2 * count), count=count * (bits - 16))
    upper = np.packbits(np.pad(packed.reshape(count, -1), ((0, 0), (24 - bits, 0))), axis=1)[:, 0].astype(np.uint32)
    words = np.frombuffer(data, "<u2", count).astype(np.uint32) | (upper << np.uint32(16))
    return words << np.uint32(WORD_BITS - bits)
