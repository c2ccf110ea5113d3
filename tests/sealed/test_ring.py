"""The client's half of tokens: exact arithmetic, fresh keys that are used once, and tokens from hostile servers."""

import copy
import hashlib
import os
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearveil.privacy.noise import secure_source, unsafe_seeded
from nearveil.sealed import ring
from nearveil.sealed.parameters import RING
from nearveil.sealed.ring import (
    PRIMES,
    L,
    N,
    T,
    TokenKey,
    derive_public,
    get_transform,
    pack_bits,
    public_bytes,
    read_request,
    request_bytes,
    rotate,
    round_fractions,
    token_bytes,
    unpack_bits,
)
from nearveil.wire.frames import WireError

SEED = bytes(range(32))
RNG = np.random.default_rng(0)
EACH_PRIME = pytest.mark.parametrize("prime", [*PRIMES, T])
NUMBERS = [0, RING.modulus - 1, RING.modulus // 2, (1 << 36) - 1] + [
    int.from_bytes(RNG.bytes(16), "little") % RING.modulus for _ in range(N - 4)
]
RESIDUES = np.array([[number % p for number in NUMBERS] for p in PRIMES], np.uint64)


def make_key(n_secrets: int = 1, stage: str = "scores") -> TokenKey:
    secrets = np.random.default_rng(1).integers(-119, 120, (n_secrets, RING.dimension))
    return TokenKey.make(stage, SEED, secrets, unsafe_seeded(5))


def move_powers(coefficients: np.ndarray, power: int, prime: int) -> np.ndarray:
    """Replace X by a power of it, modulo ``X^N + 1``."""
    places = np.arange(N) * power % (2 * N)
    moved = np.zeros(N, np.uint64)
    moved[places % N] = np.where(places < N, coefficients, (prime - coefficients) % prime)
    return moved


@EACH_PRIME
def test_slots_multiply_as_polynomials(prime: int) -> None:
    transform = get_transform(prime)
    left = RNG.integers(0, prime, N, dtype=np.uint64)
    right = np.zeros(N, np.uint64)
    right[1], right[4000] = 1, prime - 1
    shifted = [np.append((prime - left[N - k :]) % prime, left[: N - k]) for k in (1, 4000)]
    product = transform.to_coefficients(transform.to_slots(left) * transform.to_slots(right) % prime)
    np.testing.assert_array_equal(product, (shifted[0] + prime - shifted[1]) % prime)


@EACH_PRIME
def test_transforms_are_exact_at_the_ends(prime: int) -> None:
    transform = get_transform(prime)
    for values in (np.full((3, N), prime - 1, np.uint64), RNG.choice(np.array([0, prime - 1], np.uint64), (3, N))):
        slots = transform.to_slots(values)
        assert slots.max() < prime
        np.testing.assert_array_equal(transform.to_coefficients(slots), values)


@EACH_PRIME
def test_a_rotation_turns_both_rows_of_slots(prime: int) -> None:
    transform, values = get_transform(prime), RNG.integers(0, prime, N, dtype=np.uint64)
    moved = move_powers(values, pow(5, 3, 2 * N), prime)
    np.testing.assert_array_equal(transform.to_slots(moved), rotate(transform.to_slots(values), 3))


def test_primes_are_as_the_parameters_say() -> None:
    sympy = pytest.importorskip("sympy")
    assert all(sympy.isprime(p) and p % (2 * N) == 1 and p < 1 << 29 for p in PRIMES)
    terms = RING.baby_steps + L
    assert terms * max(PRIMES) ** 2 + 2 * (max(PRIMES) << 32) < 1 << 64


def test_public_parts_are_digests_of_everything_that_names_them() -> None:
    names = [
        ("scores", SEED, "secret", 0),
        ("scores", SEED, "secret", 1),
        ("scores", SEED, "baby", 0),
        ("scores", SEED, "giant", 0),
        ("records", SEED, "secret", 0),
        ("scores", bytes(32), "secret", 0),
    ]
    parts = [derive_public(*name) for name in names]
    assert len({part.tobytes() for part in parts}) == len(parts)
    digest = hashlib.sha256(parts[0].astype("<u8").tobytes()).hexdigest()
    assert digest[:16] == "79dc8081f82398f6"  # clients and servers of all releases agree


def test_public_parts_are_uniform() -> None:
    for slots, p in zip(derive_public("scores", SEED, "secret", 0), PRIMES, strict=True):
        counts = np.histogram(slots, bins=64, range=(0, p))[0]
        assert slots.max() < p
        assert np.sum((counts - N / 64) ** 2 / (N / 64)) < 63 + 10 * np.sqrt(126)  # chi square, ten deviations


@pytest.mark.parametrize("width", [8, 20, 29, 51, 57])
def test_packed_bits_come_back(width: int) -> None:
    values = RNG.integers(0, 1 << width, 64, dtype=np.uint64)
    data = pack_bits(values, width)
    assert len(data) == 8 * width
    np.testing.assert_array_equal(unpack_bits(data, width), values)
    whole = sum(int(value) << (width * k) for k, value in enumerate(values))
    assert int.from_bytes(data, "little") == whole


def test_ciphertexts_are_rounded_exactly() -> None:
    rounded = ring._round_off(RESIDUES)
    assert rounded.tolist() == [(number + (1 << 35)) >> 36 for number in NUMBERS]


@pytest.mark.parametrize("bits", [20, 32])
def test_fractions_are_rounded_within_the_bound(bits: int) -> None:
    exact = [((2 * number << bits) + RING.modulus) // (2 * RING.modulus) for number in NUMBERS]
    fractions = [(number << 64) / RING.modulus / 2.0 ** (64 - bits) for number in NUMBERS]
    rounded = round_fractions(RESIDUES, bits).tolist()
    for value, expected, fraction in zip(rounded, exact, fractions, strict=True):
        # The bound of the docstring: another result only where the fraction is within 2^-33 of a half.
        near_half = abs(fraction % 1 - 0.5) < 2.0 ** (bits - 33)
        assert (expected - value) % (1 << bits) in ((0, 1) if near_half else (0,))


def split_request(key: TokenKey, n_secrets: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the ring secret, and the errors of the keys and of the secrets, from a key that did not read yet."""
    ring_secret = key._ring_secrets[0]
    coefficients, keys = read_request(key.request, n_secrets)
    moduli = np.array(PRIMES, np.uint64)[:, None]
    publics = ring.derive_keys("scores", SEED)
    errors = []
    for k, steps in enumerate((1, RING.baby_steps)):
        for q in range(L):
            phase = (keys[k, q] + publics[k, q] * ring_secret) % moduli
            phase[q] = (phase[q] + moduli[q] - rotate(ring_secret, steps)[q]) % moduli[q]
            errors.append(lift(phase))
    phases = [
        (coefficients[k] + ring.to_coefficients(derive_public("scores", SEED, "secret", k) * ring_secret % moduli))
        % moduli
        for k in range(n_secrets)
    ]
    return lift(ring_secret), np.array(errors), np.array(phases)


def lift(slots: np.ndarray) -> np.ndarray:
    """Return the small coefficients of an element that is the same modulo all primes."""
    coefficients = ring.to_coefficients(slots).astype(np.int64)
    centred = [np.where(row > p // 2, row - p, row) for row, p in zip(coefficients, PRIMES, strict=True)]
    assert all((row == centred[0]).all() for row in centred)
    return np.asarray(centred[0])


def test_secrets_and_errors_have_the_width_of_the_estimates() -> None:
    ring_secret, errors, phases = split_request(make_key(2), 2)
    for drawn in (ring_secret, *errors):
        assert 6 < drawn.std() < 6.8
        assert abs(drawn).max() <= 119
    drawn = [row.tobytes() for row in (ring_secret, *errors)]
    assert len(set(drawn)) == len(drawn)
    # A ciphertext is q / t times the encoded secrets, an error, and up to half of what is rounded off.
    rounded = round_fractions(phases, 50).astype(np.float64) * T / 2.0**50
    noise = (rounded - np.rint(rounded)) / T * RING.modulus
    expected = np.sqrt((2.0**36) ** 2 / 12 + 6.4**2 + (2.0**-33 * RING.modulus) ** 2 / 12)
    assert noise.std() < 1.1 * expected


def test_a_request_uses_each_public_part_once(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[tuple[Any, ...]] = []
    derive = ring.derive_public

    def note_name(*name: Any) -> np.ndarray:
        names.append(name)
        return derive(*name)

    monkeypatch.setattr(ring, "derive_public", note_name)
    make_key(4, "records")
    assert len(names) == len(set(names)) == 2 * L + 4
    assert {name[0] for name in names} == {"records"}


def test_every_key_has_a_new_ring_secret() -> None:
    secrets = np.zeros((1, RING.dimension), np.int64)
    keys = [TokenKey.make("scores", SEED, secrets, secure_source()) for _ in range(3)]
    assert len({key._ring_secrets[0].tobytes() for key in keys}) == 3
    assert len({key.request for key in keys}) == 3


@pytest.mark.parametrize("n_secrets", [1, 4])
def test_sizes_depend_on_counts_alone(n_secrets: int) -> None:
    assert len(make_key(n_secrets).request) == request_bytes(n_secrets) == n_secrets * 26112 + 267264
    assert token_bytes([1, 4097]) == 3 * 10240
    assert public_bytes([1, 4097]) == 3 * 16384


def test_a_retry_sends_identical_bytes() -> None:
    key = make_key()
    assert key.request == key.request


@pytest.mark.parametrize("fill", [b"\0", b"\xff", None])
def test_any_token_has_masks(fill: bytes | None) -> None:
    n_rows = [5000, 1]
    rng = np.random.default_rng(2)
    token, public = (
        rng.bytes(size) if fill is None else fill * size for size in (token_bytes(n_rows), public_bytes(n_rows))
    )
    masks = make_key(2).read(token, public, n_rows)
    assert [len(part) for part in masks] == n_rows
    assert all(((part >= 0) & (part < T)).all() for part in masks)


def test_sizes_are_refused_before_the_key_is_used() -> None:
    key, rows = make_key(), [10]
    token, public = bytes(token_bytes(rows)), bytes(public_bytes(rows))
    for wrong in ((token[:-1], public), (token, public + b"\0"), (b"", b"")):
        with pytest.raises(WireError, match="wrong size"):
            key.read(*wrong, rows)
    key.read(token, public, rows)
    with pytest.raises(RuntimeError, match="was used"):
        key.read(token, public, rows)


@pytest.mark.parametrize("copy_key", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"])
def test_keys_are_not_copied(copy_key: Any) -> None:
    with pytest.raises(TypeError, match="cannot be copied"):
        copy_key(make_key())


def test_a_child_cannot_use_a_key_of_its_parent() -> None:
    key, rows = make_key(), [1]
    if (child := os.fork()) == 0:  # pragma: no cover
        refused = 0
        for use in (
            lambda: key.request,
            lambda: key.read(bytes(token_bytes(rows)), bytes(public_bytes(rows)), rows),
        ):
            try:
                use()
            except RuntimeError:
                refused += 1
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    assert key.request


@settings(max_examples=20, deadline=None)
@given(st.integers(0, request_bytes(1) - 1), st.integers(0, 255))
def test_a_changed_request_is_read_or_refused(place: int, value: int) -> None:
    data = bytearray(REQUEST)
    data[place] = value
    try:
        ciphertexts, keys = read_request(bytes(data), 1)
    except WireError:
        return
    assert all((part < np.array(PRIMES)[:, None]).all() for part in (ciphertexts, keys))


REQUEST = make_key().request


def test_residues_that_are_too_large_are_refused() -> None:
    largest = pack_bits(np.full(2 * L * L * N, PRIMES[-1] - 1), 29)
    secret = bytes(request_bytes(1) - len(largest))
    read_request(secret + largest, 1)
    with pytest.raises(WireError, match="out of range"):
        read_request(secret + pack_bits(np.full(2 * L * L * N, PRIMES[-1]), 29), 1)
    with pytest.raises(WireError, match="out of range"):
        read_request(b"\xff" * len(secret) + largest, 1)
    for size in (0, request_bytes(1) - 1, request_bytes(2)):
        with pytest.raises(WireError, match="must have"):
            read_request(bytes(size), 1)
