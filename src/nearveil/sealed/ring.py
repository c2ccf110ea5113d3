"""Tokens, the client's half: encrypt LWE secrets ``s`` in a ring, and decrypt masks ``H s`` modulo t.

A client sends a :class:`TokenKey`'s request, before any query. The server multiplies its hint H by the encrypted
secrets (:mod:`nearveil.sealed.tokens`) and returns a token, which the key reads once. The scheme is BFV (Fan and
Vercauteren 2012) with N slots modulo t; docs/theory/sealed.md has the bounds. All arithmetic is in whole numbers and
exact, so all processors agree to the last bit.

A slot is the value of a polynomial at an odd power of a root of unity. Slots are in two rows of N / 2, and a rotation
by k moves each row k places to the left. A sum of products modulo p is reduced by Montgomery's method.
"""

import hashlib
from collections.abc import Sequence
from functools import cache
from typing import Any, NoReturn, Self, TypeAlias

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from nearveil.privacy.noise import Source, gaussian_integers
from nearveil.sealed.lwe import Longs, Words
from nearveil.sealed.pads import get_process
from nearveil.sealed.parameters import PUBLIC_BITS, RING, SECRET_BITS, TOKEN_BITS
from nearveil.wire.frames import WireError

Limbs = NDArray[np.uint64]
TokenRequest: TypeAlias = tuple[Words, Words]  # encrypted secrets and rotation keys, as read_request returns them

N, T, PRIMES = RING.degree, RING.plain_modulus, RING.primes
L = len(PRIMES)
PRIME_BITS = 29
_DROPPED = RING.modulus.bit_length() - SECRET_BITS
_WORD = 32  # Montgomery's radix is 2^32
_MASK = (1 << _WORD) - 1


def make_columns(values: Sequence[int]) -> Limbs:
    """Return one number for each prime, to be combined with residues of shape (L, N)."""
    return np.array(values, np.uint64)[:, None]


_MODULI = make_columns(PRIMES)


def add(left: Limbs, right: Limbs) -> Limbs:
    """Return sums modulo each prime."""
    total = left + right
    return np.asarray(np.minimum(total, total - _MODULI), np.uint64)


def rotate(slots: NDArray[Any], steps: int) -> NDArray[Any]:
    """Move both rows of slots to the left."""
    rows = slots.reshape(*slots.shape[:-1], 2, N // 2)
    return np.roll(rows, -steps, -1).reshape(slots.shape)


class Transform:
    """The transform between coefficients and slots modulo a prime, for arrays with a last axis of N."""

    def __init__(self, prime: int) -> None:
        self.prime = prime
        self.factor = -pow(prime, -1, 1 << _WORD) % (1 << _WORD)
        reversed_bits = _reverse_bits()
        self.root = _find_root(prime)
        bases = self.root, pow(self.root, -1, prime)
        self.roots, self.inverse_roots = (self._raise(base)[reversed_bits] for base in bases)
        self.degree = pow(N, -1, prime) * (1 << _WORD) % prime
        powers = [pow(5, k, 2 * N) for k in range(N // 2)]
        odd = np.array(powers + [2 * N - power for power in powers])
        self.places = reversed_bits[(odd - 1) // 2]  # where the transform leaves the value of each slot

    def _raise(self, base: int) -> Limbs:
        """Return the powers of a number, in Montgomery's form."""
        powers = np.array([(1 << _WORD) % self.prime], np.uint64)
        while len(powers) < N:
            powers = np.append(powers, powers * pow(base, len(powers), self.prime) % self.prime)
        return powers

    def to_slots(self, values: NDArray[Any]) -> Limbs:
        """Return the slots of polynomials with coefficients from 0 to p - 1."""
        work = np.array(values.reshape(-1, N).T, np.uint64, order="C")
        self.run_forward(work)
        slots: Limbs = work[self.places].T.reshape(values.shape)
        return slots

    def to_coefficients(self, slots: NDArray[Any]) -> Limbs:
        """Return the coefficients, from 0 to p - 1."""
        work = np.empty((N, slots.size // N), np.uint64)
        work[self.places] = slots.reshape(-1, N).T
        self.run_inverse(work)
        return work.T.reshape(slots.shape)

    # Butterflies after Harvey (2014): numbers stay below 4 p forward and 2 p back, and are reduced in the end.

    def run_forward(self, work: Limbs) -> None:
        """Transform columns of shape (N, count) in place, into another order of slots."""
        double, count = 2 * self.prime, 1
        while count < N:
            pairs = work.reshape(count, 2, N // count // 2, -1)
            left = np.minimum(pairs[:, 0], pairs[:, 0] - double)
            right = self._halve(pairs[:, 1] * self.roots[count : 2 * count, None, None])
            pairs[:, 0], pairs[:, 1] = left + right, left - right + double
            count *= 2
        for bound in (double, self.prime):
            np.minimum(work, work - bound, out=work)  # a negative difference wraps, and is larger

    def run_inverse(self, work: Limbs) -> None:
        """Undo :meth:`run_forward`."""
        double, count = 2 * self.prime, N // 2
        while count:
            pairs = work.reshape(count, 2, N // count // 2, -1)
            total, difference = pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1] + double
            pairs[:, 0] = np.minimum(total, total - double)
            pairs[:, 1] = self._halve(difference * self.inverse_roots[count : 2 * count, None, None])
            count //= 2
        work[:] = self._halve(work * self.degree)
        np.minimum(work, work - self.prime, out=work)

    def _halve(self, products: Limbs) -> Limbs:
        """Return products / 2^32 modulo p, below 2 p, for products below 4 p^2 (Montgomery's reduction)."""
        return np.asarray((products + ((products & _MASK) * self.factor & _MASK) * self.prime) >> _WORD, np.uint64)


def _reverse_bits() -> Longs:
    """Return the numbers below N with their bits reversed."""
    numbers = np.zeros(1, np.int64)
    while len(numbers) < N:
        numbers = np.concatenate([2 * numbers, 2 * numbers + 1])
    return numbers


def _find_root(prime: int) -> int:
    """Return a root of unity of order 2 N modulo a prime."""
    roots = (pow(base, (prime - 1) // (2 * N), prime) for base in range(2, prime))
    return next(root for root in roots if pow(root, N, prime) == prime - 1)


@cache
def get_transform(prime: int) -> Transform:
    """Return the transform of a prime; its tables are made once."""
    return Transform(prime)


def to_slots(values: Longs) -> Limbs:
    """Return the slots, shape (..., L, N), of polynomials with whole coefficients between -p and p, shape (..., N)."""
    limbs = [get_transform(p).to_slots((values + (values < 0) * p).astype(np.uint64)) for p in PRIMES]
    return np.stack(limbs, axis=-2)


def to_coefficients(slots: NDArray[Any]) -> Limbs:
    """Return the coefficients of polynomials modulo each prime, shape (..., L, N)."""
    return np.stack([get_transform(p).to_coefficients(slots[..., i, :]) for i, p in enumerate(PRIMES)], axis=-2)


def derive_public(stage: str, seed: bytes, kind: str, number: int) -> Limbs:
    """Return a public ring element, shape (L, N), in slots. Nobody chooses it: its key is a digest of the arguments.

    A slot is 128 bits of the key stream of AES-256, modulo p: within 2^-98 of uniform, and all of a request within
    2^-80, so nothing is rejected.
    """
    name = b"\0".join((b"nearveil sealed ring", stage.encode(), kind.encode(), number.to_bytes(4, "little"), seed))
    cipher = Cipher(algorithms.AES(hashlib.sha256(name).digest()), modes.CTR(bytes(16)))
    stream = np.frombuffer(cipher.encryptor().update(bytes(16 * L * N)), "<u8").reshape(L, N, 2)
    radix = make_columns([(1 << 64) % p for p in PRIMES])
    return np.asarray((stream[..., 0] % _MODULI * radix + stream[..., 1] % _MODULI) % _MODULI, np.uint64)


def derive_keys(stage: str, seed: bytes) -> Limbs:
    """Return the public parts of the rotation keys, shape (2, L, L, N): of baby steps, then of giant steps."""
    return np.stack([[derive_public(stage, seed, kind, q) for q in range(L)] for kind in ("baby", "giant")])


def pack_bits(values: NDArray[np.integer], width: int) -> bytes:
    """Return whole numbers of `width` bits, 8 to 57, one after the other, the lowest bit first."""
    groups = np.ascontiguousarray(values, np.uint64).reshape(-1, 8)
    data = np.zeros(len(groups) * width + 8, np.uint8)
    for k, (start, shift) in enumerate(divmod(k * width, 8) for k in range(8)):  # eight numbers fill `width` bytes
        view = np.ndarray(len(groups), "<u8", data, start, (width,))
        view |= groups[:, k] << np.uint64(shift)
    return data[:-8].tobytes()


def unpack_bits(data: bytes, width: int) -> Limbs:
    """Return the numbers that :func:`pack_bits` wrote: a multiple of eight."""
    padded = data + bytes(8)
    out = np.empty((len(data) // width, 8), np.uint64)
    for k, (start, shift) in enumerate(divmod(k * width, 8) for k in range(8)):
        out[:, k] = np.ndarray(len(out), "<u8", padded, start, (width,)) >> np.uint64(shift)
    out &= np.uint64((1 << width) - 1)
    return out.ravel()


_KEY_BYTES = 2 * L * L * N * PRIME_BITS // 8
_SECRET_BYTES = N * SECRET_BITS // 8


def count_blocks(n_rows: Sequence[int]) -> list[int]:
    """Return the ring elements that hold the rows of each secret."""
    return [-(-rows // N) for rows in n_rows]


def request_bytes(n_secrets: int) -> int:
    """Return the size of a request."""
    return n_secrets * _SECRET_BYTES + _KEY_BYTES


def token_bytes(n_rows: Sequence[int]) -> int:
    """Return the size of a token for so many rows of each secret."""
    return sum(count_blocks(n_rows)) * N * TOKEN_BITS // 8


def public_bytes(n_rows: Sequence[int]) -> int:
    """Return the size of the public parts of tokens."""
    return sum(count_blocks(n_rows)) * N * PUBLIC_BITS // 8


class TokenKey:
    """A ring secret for one stage of one question, and the request that it makes. It reads one token.

    Every key has a new ring secret and encrypts each number once, so no two encryptions share a secret and a public
    part. It cannot be copied or pickled, and a child of a fork cannot use it.

    Examples
    --------
    >>> from nearveil.privacy.noise import secure_source
    >>> secrets = np.random.default_rng(0).integers(-20, 20, (1, 1024))
    >>> len(TokenKey.make("scores", bytes(32), secrets, secure_source()).request)
    293376
    """

    def __init__(self, request: bytes, ring_secret: Limbs) -> None:
        """Use :meth:`make`."""
        self._request, self._ring_secrets, self._process = request, [ring_secret], get_process()

    @classmethod
    def make(cls, stage: str, seed: bytes, secrets: Longs, source: Source) -> Self:
        """Draw a ring secret, and encrypt secrets of shape (K, n), each under a public part of its own."""
        count = 1 + 2 * L + len(secrets)
        return cls._encrypt(stage, seed, secrets, gaussian_integers(RING.sigma, count * N, source).reshape(-1, N))

    @classmethod
    def _encrypt(cls, stage: str, seed: bytes, secrets: Longs, drawn: Longs) -> Self:
        """Encrypt with a ring secret and the errors of keys and of secrets; the audit passes weaker ones."""
        ring_secret, *errors = to_slots(drawn)
        publics = derive_keys(stage, seed)
        keys = np.empty_like(publics)
        for k, steps in enumerate((1, RING.baby_steps)):
            turned = rotate(ring_secret, steps)
            for q in range(L):
                gadget = np.zeros_like(turned)  # 1 modulo one prime, 0 modulo the others
                gadget[q] = turned[q]
                keys[k, q] = add(_hide(publics[k, q], ring_secret, errors[k * L + q]), gadget)
        masked = [
            add(_hide(derive_public(stage, seed, "secret", k), ring_secret, errors[2 * L + k]), message)
            for k, message in enumerate(_encode(secrets))
        ]
        body = pack_bits(_round_off(to_coefficients(np.stack(masked))), SECRET_BITS)
        return cls(body + pack_bits(keys, PRIME_BITS), ring_secret)

    @property
    def request(self) -> bytes:
        """The bytes to send: always the same."""
        self._check_process()
        return self._request

    def read(self, token: bytes, public: bytes, n_rows: Sequence[int]) -> list[Longs]:
        """Decrypt the masks modulo t of each secret, once. Any token of the right size has masks: nothing is checked.

        Raises :class:`~nearveil.wire.frames.WireError` for sizes, which are public, alone.
        """
        self._check_process()
        if len(token) != token_bytes(n_rows) or len(public) != public_bytes(n_rows):
            raise WireError("the token or its public part has the wrong size")
        try:
            ring_secret = self._ring_secrets.pop()
        except IndexError:
            raise RuntimeError("The token key was used; make a new one.") from None
        products = _multiply_exactly(np.frombuffer(public, "<i4").reshape(-1, N).astype(np.int64), ring_secret)
        upper = unpack_bits(token, TOKEN_BITS).reshape(-1, N) << np.uint64(PUBLIC_BITS - TOKEN_BITS)
        phases = (upper + products) & _MASK  # in steps of q / 2^32
        plain = (phases * T + (1 << (PUBLIC_BITS - 1))) >> np.uint64(PUBLIC_BITS)
        masks = get_transform(T).to_slots(plain * (plain != T)).astype(np.int64)
        ends = np.cumsum(count_blocks(n_rows))[:-1]
        parts = zip(np.split(masks, ends), n_rows, strict=True)
        return [part.ravel()[:rows] for part, rows in parts]

    def _check_process(self) -> None:
        if self._process != get_process():
            raise RuntimeError("The token key belongs to another process; make a new one.")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("A token key cannot be copied or pickled.")


def read_request(data: bytes, n_secrets: int) -> TokenRequest:
    """Return coefficients of the encrypted secrets, shape (K, L, N), and rotation keys in slots, (2, L, L, N)."""
    if len(data) != request_bytes(n_secrets):
        raise WireError(f"the request must have {request_bytes(n_secrets)} bytes")
    rounded = unpack_bits(data[: n_secrets * _SECRET_BYTES], SECRET_BITS).reshape(n_secrets, 1, N)
    keys = unpack_bits(data[n_secrets * _SECRET_BYTES :], PRIME_BITS).reshape(2, L, L, N)
    if (keys >= _MODULI).any() or (rounded > (RING.modulus >> _DROPPED) + 1).any():
        raise WireError("the request has numbers that are out of range")
    residues = rounded % _MODULI * make_columns([(1 << _DROPPED) % p for p in PRIMES]) % _MODULI
    return residues.astype(np.uint32), keys.astype(np.uint32)


QUOTIENTS = make_columns([(1 << 64) // p for p in PRIMES])
COFACTORS = make_columns([pow(RING.modulus // p, -1, p) for p in PRIMES])


def round_fractions(coefficients: Limbs, bits: int) -> Limbs:
    """Return numbers c modulo q, given as residues of shape (..., L, N), as ``2^bits c / q`` modulo 2^bits, rounded.

    c / q is, modulo 1, the sum over primes of ``(c (q / p)^-1 mod p) / p``. In units of 2^-64 and modulo 2^64 every
    term is at most p too small, so the sum is off by less than 3 * 2^29 units: 2^-33 before it is rounded.
    """
    terms = coefficients * COFACTORS % _MODULI * QUOTIENTS
    fractions: Limbs = terms.sum(axis=-2, dtype=np.uint64)
    return (fractions + np.uint64(1 << (63 - bits))) >> np.uint64(64 - bits)


def _hide(public: Limbs, ring_secret: Limbs, error: Limbs) -> Limbs:
    """Return an encryption of zero: ``error - public ring_secret``."""
    return add(_MODULI - public * ring_secret % _MODULI, error)


def _encode(secrets: Longs) -> Limbs:
    """Return the slots of ``round(m q / t)``, shape (K, L, N), for polynomials m with the secrets in their slots."""
    repeated = np.tile(secrets + (secrets < 0) * T, (1, N // secrets.shape[1]))
    plain = get_transform(T).to_coefficients(repeated)  # q = t quotient + rest: m q / t = m quotient + m rest / t
    quotient, rest = divmod(RING.modulus, T)
    limbs = [plain * (quotient % p) + (plain * rest + T // 2) // T for p in PRIMES]
    return np.stack([get_transform(p).to_slots(limb % p) for p, limb in zip(PRIMES, limbs, strict=True)], axis=1)


def _round_off(coefficients: Limbs) -> Limbs:
    """Return numbers modulo q, given as residues of shape (..., L, N), without their last bits, rounded."""
    first, second, third = PRIMES
    c0, c1, c2 = (coefficients[..., i, :] for i in range(L))
    # Mixed radix: c = c0 + first (d1 + second d2), with digits below their primes.
    d1 = (c1 + second - c0 % second) * pow(first, -1, second) % second
    d2 = (c2 + third - (c0 + first * d1) % third) * pow(first * second, -1, third) % third
    high, low = divmod(first * second, 1 << _WORD)
    rest = c0 + first * d1 + low * d2 + (1 << (_DROPPED - 1))  # below 2^62
    return np.asarray((high * d2 + (rest >> _WORD)) >> (_DROPPED - _WORD), np.uint64)


def _multiply_exactly(values: Longs, ring_secret: Limbs) -> Limbs:
    """Return products of polynomials with the ring secret as whole numbers modulo 2^64.

    Two primes are enough: a coefficient is below 2^31 * 119 * 4096 < 2^50, half their product 2^57.
    """
    first, second = PRIMES[:2]
    c0, c1 = (
        transform.to_coefficients(transform.to_slots((values % p).astype(np.uint64)) * ring_secret[i] % p)
        for i, (p, transform) in enumerate((p, get_transform(p)) for p in PRIMES[:2])
    )
    whole = c0 + first * ((c1 + second - c0 % second) * pow(first, -1, second) % second)
    return whole - (whole > first * second // 2) * np.uint64(first * second)
