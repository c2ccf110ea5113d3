"""Encryption of questions by learning with errors (Regev 2005), and the arithmetic around it.

All arithmetic is exact: BLAS multiplies integers in 64-bit floats, and every partial sum stays below 2^53.

A question is ``u = A s + e + message`` modulo Q. The client sends its leading bits only: rounding a ciphertext costs a
little accuracy and no privacy. The server multiplies its matrix D (8 bits an entry) by the question, modulo 2^24.
``D u - (D A) s`` is ``D message`` up to ``D e`` and rounding; the client has the hint ``D A`` in advance.
"""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from nearveil.privacy.noise import Source, gaussian_integers
from nearveil.sealed.parameters import LweParameters

WORD_BITS = 24  # of the numbers that servers multiply
ANSWER_BITS = 16
SEED_BYTES = 32
LARGEST_DRAW = 119  # of secrets and errors: where the tables of sigma 6.4 end
_AES_BLOCK = 16
_ROWS = 1 << 7  # rows of the public matrix at a time: as 64-bit numbers they fit in a core's cache
_HINT_ROWS = 1 << 10  # of a database at a time
_EXACT = 1 << 13  # columns of D for which a product with the public matrix stays below 2^53: 7 + 31 + 13 bits

_PLACES = np.arange(0, 24, 6, dtype=np.uint32)  # of the upper bits of four numbers in three bytes

Words = NDArray[np.uint32]
Longs = NDArray[np.int64]
Doubles = NDArray[np.float64]
Bytes = NDArray[np.int8]


def expand_matrix(parameters: LweParameters, seed: bytes, start: int, stop: int) -> NDArray[np.int32]:
    """Return rows of the public matrix A, modulo Q and centred at 0: the key stream of AES-256 in counter mode."""
    # The key is a digest of the seed, so nobody can choose a matrix by choosing a seed.
    key = hashlib.sha256(b"nearveil sealed matrix\0" + parameters.name.encode() + b"\0" + seed).digest()
    row_bytes = 4 * parameters.dimension
    counter = (start * row_bytes // _AES_BLOCK).to_bytes(_AES_BLOCK, "big")
    stream = Cipher(algorithms.AES(key), modes.CTR(counter)).encryptor().update(bytes((stop - start) * row_bytes))
    words = np.frombuffer(stream, "<i4").reshape(stop - start, parameters.dimension)
    return np.asarray(words >> (32 - parameters.modulus_bits), dtype=np.int32)


def draw_gaussians(parameters: LweParameters, shape: tuple[int, int], source: Source) -> Longs:
    """Return secrets or errors: independent draws of the exact discrete Gaussian."""
    return gaussian_integers(parameters.sigma, shape[0] * shape[1], source).reshape(shape)


def encrypt_zeros(
    parameters: LweParameters, seed: bytes, shape: tuple[int, int], source: Source
) -> tuple[Words, Longs]:
    """Return encryptions of zero, ``A s + e`` modulo Q (count, C), and their own secrets (count, n), drawn here."""
    count, samples = shape
    if samples > parameters.most_samples:
        raise ValueError(
            f"messages must have at most {parameters.most_samples} numbers: security is not estimated above"
        )
    secrets = draw_gaussians(parameters, (count, parameters.dimension), source)
    zeros = draw_gaussians(parameters, shape, source)
    factors = secrets.T.astype(np.float64)
    for start, stop in split_range(samples, _ROWS):
        product = expand_matrix(parameters, seed, start, stop).astype(np.float64) @ factors  # below 31 + 7 + 11 bits
        zeros[:, start:stop] += product.T.astype(np.int64)
    return (zeros & ((1 << parameters.modulus_bits) - 1)).astype(np.uint32), secrets


def add_messages(parameters: LweParameters, zeros: Words, messages: Longs) -> Words:
    """Return the rounded ciphertexts modulo 2^24 of messages modulo Q, one for each encryption of zero."""
    drop, values = parameters.modulus_bits - parameters.question_bits, zeros + messages
    odd = (values >> drop) & 1  # round half to even: biased errors would add up in a sum
    sent = ((values + (1 << (drop - 1)) - 1 + odd) >> drop) & ((1 << parameters.question_bits) - 1)
    return sent.astype(np.uint32) << np.uint32(WORD_BITS - parameters.question_bits)


def make_hint(parameters: LweParameters, seed: bytes, database: Bytes, n_jobs: int = 1) -> Words:
    """Return D A modulo Q for D of shape (rows, C); the result has shape (rows, n). Threads share the rows."""
    hint = np.zeros((len(database), parameters.dimension), np.int64)
    with ThreadPoolExecutor(n_jobs) as threads:
        for start, stop in split_range(database.shape[1], _EXACT):
            matrix = expand_matrix(parameters, seed, start, stop).astype(np.float64)

            def add(rows: tuple[int, int], matrix: Doubles = matrix, columns: slice = slice(start, stop)) -> None:
                block = slice(*rows)
                hint[block] += (database[block, columns].astype(np.float64) @ matrix).astype(np.int64)

            list(threads.map(add, split_range(len(database), _HINT_ROWS)))
    return (hint & ((1 << parameters.modulus_bits) - 1)).astype(np.uint32)


def round_down_to(values: NDArray[np.integer], from_bits: int, to_bits: int) -> Words:
    """Return values modulo 2^from_bits rounded to multiples of 2^(from_bits - to_bits), counted in those."""
    drop = from_bits - to_bits
    half = 1 << (drop - 1) if drop else 0
    return (((values.astype(np.int64) + half) >> drop) & ((1 << to_bits) - 1)).astype(np.uint32)


def centre(values: Longs, bits: int) -> Longs:
    """Return the representatives of values modulo 2^bits from -2^(bits - 1) to 2^(bits - 1) - 1."""
    half = 1 << (bits - 1)
    return ((values + half) & ((1 << bits) - 1)) - half


def pack(values: Words, width: int) -> bytes:
    """Return whole numbers in `width` bytes each, the lowest byte first."""
    return np.ascontiguousarray(values, "<u4").view(np.uint8).reshape(-1, 4)[:, :width].tobytes()


def unpack(data: bytes, width: int) -> Words:
    """Return the whole numbers that :func:`pack` wrote."""
    wide = np.zeros((len(data) // width, 4), np.uint8)
    wide[:, :width] = np.frombuffer(data, np.uint8).reshape(-1, width)
    return wide.view("<u4").ravel().astype(np.uint32, copy=False)


def pack_question(values: Words, bits: int) -> bytes:
    """Return the leading bits, 22 or all 24, of numbers modulo 2^24."""
    # Of 22, the lower 16 of all numbers come first, then the upper six, those of four numbers in three bytes.
    if bits == WORD_BITS:
        return pack(values, WORD_BITS // 8)
    words = np.resize(values >> np.uint32(WORD_BITS - bits), -(-len(values) // 4) * 4)
    upper = (words >> np.uint32(16)).reshape(-1, 4) << _PLACES
    return words.astype("<u2").tobytes() + pack(np.bitwise_or.reduce(upper, axis=1), 3)


def unpack_question(data: bytes, bits: int, count: int) -> Words:
    """Return the numbers that :func:`pack_question` wrote, their lower bits zero."""
    if bits == WORD_BITS:
        return unpack(data, WORD_BITS // 8)
    fours = -(-count // 4)
    upper = (unpack(data[8 * fours :], 3)[:, None] >> _PLACES) & np.uint32(63)
    words = np.frombuffer(data, "<u2", 4 * fours).astype(np.uint32) | (upper.ravel() << np.uint32(16))
    return words[:count] << np.uint32(WORD_BITS - bits)


def split_range(length: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield the start and stop of each part of a range."""
    for start in range(0, length, step):
        yield start, min(start + step, length)
