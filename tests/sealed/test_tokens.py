"""Tokens: every mask is exact, the noise is what the theorem says, and compiled code agrees with NumPy."""

import importlib.util
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nearveil.privacy.noise import unsafe_seeded
from nearveil.sealed import _compiled_ring as compiled
from nearveil.sealed import ring, tokens
from nearveil.sealed.accuracy import bound_token_failure, find_token_deviation
from nearveil.sealed.parameters import RING, TOKEN_BITS
from nearveil.sealed.ring import PRIMES, L, N, T, TokenKey, get_transform, pack_bits, request_bytes, token_bytes
from nearveil.sealed.tokens import TokenTables
from nearveil.wire.frames import WireError

SEED = bytes(range(32))
RNG = np.random.default_rng(0)
MODULI = np.array(PRIMES, np.uint64)[:, None]


def make_hint(rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, T, (rows, RING.dimension), dtype=np.uint32)


def multiply_plainly(hint: np.ndarray, secrets: np.ndarray) -> np.ndarray:
    return np.asarray(hint.astype(np.int64) @ secrets % T)


def lift(slots: np.ndarray) -> np.ndarray:
    """Return small coefficients from slots modulo the first prime."""
    coefficients = get_transform(PRIMES[0]).to_coefficients(slots[0]).astype(np.int64)
    return np.where(coefficients > PRIMES[0] // 2, coefficients - PRIMES[0], coefficients)


def answer(tables: TokenTables, requests: Sequence[bytes]) -> list[bytes]:
    return tables.answer([ring.read_request(request, len(tables.n_rows)) for request in requests])


def ask(tables: TokenTables, secrets: np.ndarray, stage: str = "scores", seed: int = 3) -> list[np.ndarray]:
    key = TokenKey.make(stage, SEED, secrets, unsafe_seeded(seed))
    (token,) = answer(tables, [key.request])
    return key.read(token, tables.public, tables.n_rows)


@pytest.fixture(scope="module")
def hint() -> np.ndarray:
    return make_hint(N)


@pytest.fixture(scope="module")
def tables(hint: np.ndarray) -> TokenTables:
    return TokenTables.build("scores", SEED, [hint])


@pytest.mark.parametrize("n_rows", [[1], [N + 1], [5, 300, 20]], ids=str)
def test_masks_are_the_hint_times_each_secret(n_rows: Sequence[int]) -> None:
    hints = [make_hint(rows, seed) for seed, rows in enumerate(n_rows)]
    made = TokenTables.build("records", SEED, hints, n_threads=2)
    secrets = RNG.integers(-119, 120, (len(n_rows), RING.dimension))
    for masks, part, secret in zip(ask(made, secrets, "records"), hints, secrets, strict=True):
        np.testing.assert_array_equal(masks, multiply_plainly(part, secret))


def test_masks_are_exact_at_the_ends() -> None:
    # The noise is largest where the diagonals' coefficients are: random or constant rows, and the largest numbers.
    hint = np.zeros((N, RING.dimension), np.uint32)
    hint[:1000] = T - 1
    hint[1000:2000] = T // 2
    hint[2000:3000] = RNG.choice([T // 2, T // 2 + 1], (1000, RING.dimension))
    hint[3000:] = np.eye(1096, RING.dimension) * (T // 2)
    made = TokenTables.build("scores", SEED, [hint])
    for secret in (np.full((1, RING.dimension), 119), np.resize([119, -119], (1, RING.dimension))):
        np.testing.assert_array_equal(ask(made, secret)[0], multiply_plainly(hint, secret[0]))


def test_requests_of_one_pass_do_not_disturb_each_other(hint: np.ndarray, tables: TokenTables) -> None:
    secrets = RNG.integers(-30, 30, (6, 1, RING.dimension))
    keys = [TokenKey.make("scores", SEED, secret, unsafe_seeded(seed)) for seed, secret in enumerate(secrets)]
    answers = answer(tables, [key.request for key in keys])
    assert answers[5] == answer(tables, [keys[5].request])[0]
    for key, token, secret in zip(keys, answers, secrets, strict=True):
        np.testing.assert_array_equal(key.read(token, tables.public, [N])[0], multiply_plainly(hint, secret[0]))


def test_the_noise_is_as_predicted(hint: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    # Residues are caught before they are rounded (docs/theory/sealed.md, Theorem 4).
    kept: list[np.ndarray] = []

    def keep(values: np.ndarray, bits: int) -> np.ndarray:
        kept.append(values)
        return round_fractions(values, bits)

    round_fractions = ring.round_fractions
    monkeypatch.setattr(ring, "round_fractions", keep)
    made = TokenTables.build("scores", SEED, [hint])
    secret = np.rint(RNG.normal(0, 6.4, (1, RING.dimension))).astype(np.int64)
    key = TokenKey.make("scores", SEED, secret, unsafe_seeded(4))
    ring_secret = key._ring_secrets[0]
    answer(made, [key.request])
    public, sums = (
        np.stack([get_transform(p).to_slots(part.reshape(L, N)[i]) for i, p in enumerate(PRIMES)]) for part in kept
    )
    residues = ring.to_coefficients((sums + public * ring_secret) % MODULI)
    phases = ring.round_fractions(residues, 50).astype(np.float64) * T / 2.0**50
    noise = phases - np.rint(phases)
    masks = get_transform(T).to_slots(np.rint(phases).astype(np.uint64) % T)
    np.testing.assert_array_equal(masks.astype(np.int64), multiply_plainly(hint, secret[0]))
    assert 0.92 < noise.std() / find_token_deviation() < 1.03  # a bound half as large fails
    assert abs(noise).max() < 6 * noise.std()


def test_wrong_masks_are_as_rare_as_the_theorem_says(hint: np.ndarray, tables: TokenTables) -> None:
    assert bound_token_failure(4, 100) < 2**-140
    # What rounding to 20 bits adds to the noise is bounded, and does not move a coefficient to another number.
    key = TokenKey.make("scores", SEED, np.ones((1, RING.dimension), np.int64), unsafe_seeded(4))
    ring_secret = lift(key._ring_secrets[0]).astype(object)
    (token,) = answer(tables, [key.request])
    row, public = ring.unpack_bits(token, TOKEN_BITS).astype(object), np.frombuffer(tables.public, "<u4").astype(object)
    errors = []
    for place in range(0, N, 64):  # a coefficient of the product with the ring secret is a sum of N terms
        turned = np.concatenate([ring_secret[place::-1], -ring_secret[:place:-1]])
        phase = ((int(row[place]) << 12) + int((turned * public).sum())) % (1 << 32) * T / 2.0**32
        errors.append(phase - round(phase))
    limit = T / 2.0 ** (TOKEN_BITS + 1)
    assert np.abs(errors).max() < limit + 6 * find_token_deviation() < 0.1
    assert np.std(errors) > 0.8 * limit / np.sqrt(3)


def test_digits_have_the_norms_and_the_spectrum_of_the_theorem() -> None:
    # Theorem 4 takes the trace of a quadratic form, and a largest eigenvalue below a hundredth of it.
    digits = tokens._PublicSource("scores", SEED, 0).digits[0].astype(np.uint64)  # modulo the largest prime
    slots = digits * np.uint64(pow(1 << 32, -1, PRIMES[0])) % np.uint64(PRIMES[0])
    coefficients = get_transform(PRIMES[0]).to_coefficients(slots).astype(np.int64)
    coefficients -= (coefficients > PRIMES[0] // 2) * PRIMES[0]
    norms = (coefficients.astype(float) ** 2).sum(axis=2)
    np.testing.assert_allclose(norms, N * PRIMES[0] ** 2 / 12, rtol=0.1)
    values = np.fft.ifft(coefficients * np.exp(1j * np.pi * np.arange(N) / N)) * N  # at odd powers of a root of unity
    powers = np.array([pow(5, k, 2 * N) for k in range(N // 2)])
    values = values[:, :, (powers - 1) // 2]  # a rotation by one is a shift by one
    trace = (np.abs(values) ** 2).sum(axis=(1, 2)) @ np.arange(len(values), 0, -1)
    vector = RNG.normal(size=(L, N // 2)) + 1j * RNG.normal(size=(L, N // 2))
    for _ in range(20):
        vector /= np.linalg.norm(vector)
        sums = [np.zeros(N // 2, complex)]
        for step in values:
            sums.append(np.roll(sums[-1], -1) + (step * vector).sum(axis=0))
        turned, vector = np.zeros(N // 2, complex), np.zeros_like(vector)
        for step, last in zip(values[::-1], sums[:0:-1], strict=True):
            turned = last + np.roll(turned, 1)
            vector += step.conj() * turned
    assert np.linalg.norm(vector) / (2 * trace) < 1 / 1000  # each eigenvalue occurs twice


@pytest.mark.parametrize("prime", [*PRIMES, T])
def test_compiled_transforms_agree_with_numpy(prime: int) -> None:
    transform = get_transform(prime)
    largest, mixed = np.full((N, 3), prime - 1, np.uint64), RNG.integers(0, prime, (N, 3), dtype=np.uint64)
    for values in (largest, mixed):
        plain, fast = values.copy(), values.copy()
        transform.run_forward(plain)
        compiled.run_forward(fast, transform.roots, prime, transform.factor)
        np.testing.assert_array_equal(plain, fast)
        transform.run_inverse(plain)
        compiled.run_inverse(fast, transform.inverse_roots, prime, transform.factor, transform.degree)
        np.testing.assert_array_equal(plain, fast)
        np.testing.assert_array_equal(fast, values)


@pytest.mark.parametrize("largest", [False, True])
def test_compiled_sums_are_exact(*, largest: bool) -> None:
    shape = (N // compiled.TILE, compiled.TERMS, compiled.TILE)
    for prime in PRIMES:
        low = prime - 1 if largest else 0
        left, right = (RNG.integers(low, prime, shape, dtype=np.uint32) for _ in range(2))
        earlier = RNG.integers(low, prime, (1, 2, N // 2), dtype=np.uint32)
        steps = RING.baby_steps
        before, after = np.concatenate([earlier, earlier[:, :, :steps]], axis=2), np.empty((1, 2, N // 2 + steps), "u4")
        factor = get_transform(prime).factor
        compiled.multiply_step(left.ctypes.data, right.ctypes.data, 0, before, after, prime, factor)
        products = (left.astype(object) * right).sum(axis=1).reshape(2, -1) * pow(1 << 32, -1, prime)
        expected = (products + np.roll(earlier[0], -steps, axis=1)) % prime
        np.testing.assert_array_equal(after[0, :, : N // 2], expected.astype(np.uint32))
        np.testing.assert_array_equal(after[0, :, N // 2 :], after[0, :, :steps])


def test_diagonals_agree_with_numpy(hint: np.ndarray, tables: TokenTables) -> None:
    # Diagonal i of giant step g multiplies the secret turned by i, and is turned back by 32 g.
    block = tables.arrays[2]
    slots = np.arange(N // 2)
    for g, i in ((0, 0), (3, 5), (31, 31)):
        rows = (slots - 32 * g) % (N // 2)
        diagonal = np.concatenate([hint[first + rows, (slots + i) % RING.dimension] for first in (0, N // 2)])
        plain = get_transform(T).to_coefficients(diagonal.astype(np.uint64)).astype(np.int64)
        expected = ring.to_slots(plain - (plain > T // 2) * T) * (1 << 32) % MODULI
        np.testing.assert_array_equal(block[:, g, :, i].reshape(L, N), expected)


def test_a_rebuild_shares_the_blocks_that_did_not_change() -> None:
    hints = [make_hint(2 * N, 1), make_hint(10, 2)]
    old = TokenTables.build("scores", SEED, hints)
    changed = [hints[0].copy(), hints[1]]
    changed[0][N + 7] = 1
    new = old.rebuild(changed, [{N + 7}, set()])
    fresh = TokenTables.build("scores", SEED, changed)
    shared = [a is b for a, b in zip(old.arrays[2:], new.arrays[2:], strict=True)]
    assert shared == [True, False, True]
    assert new.public == fresh.public
    for part, other in zip(new.arrays, fresh.arrays, strict=True):
        np.testing.assert_array_equal(part, other)
    secrets = RNG.integers(-20, 20, (2, RING.dimension))
    assert ask(old, secrets)[0][N + 7] == multiply_plainly(hints[0][N + 7 :][:1], secrets[0])[0]
    assert ask(new, secrets)[0][N + 7] == secrets[0].sum() % T


def test_tables_work_from_arrays_that_cannot_be_written(tables: TokenTables) -> None:
    arrays = [array.copy() for array in tables.arrays]
    for array in arrays:
        array.flags.writeable = False
    same = TokenTables("scores", SEED, tables.n_rows, arrays, 1)
    request = TokenKey.make("scores", SEED, np.ones((1, RING.dimension), np.int64), unsafe_seeded(1)).request
    assert answer(same, [request]) == answer(tables, [request])


def test_a_child_answers_after_its_parent(tables: TokenTables) -> None:
    request = ring.read_request(
        TokenKey.make("scores", SEED, np.ones((1, 1024), np.int64), unsafe_seeded(1)).request, 1
    )
    tokens = tables.answer([request])
    if (child := os.fork()) == 0:  # pragma: no cover
        signal.alarm(60)
        os._exit(0 if tables.answer([request]) == tokens else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("damage", ["fewer blocks", "other tiles", "other numbers"])
def test_tables_that_do_not_fit_are_refused(tables: TokenTables, damage: str) -> None:
    digits, public, block = tables.arrays
    arrays = {
        "fewer blocks": [digits, public],
        "other tiles": [digits, public, block.reshape(*block.shape[:2], -1, *block.shape[3:-1], block.shape[-1] // 2)],
        "other numbers": [digits, public, block.view(np.int32)],
    }[damage]
    with pytest.raises(ValueError, match="do not fit the rows"):
        TokenTables("scores", SEED, tables.n_rows, arrays)


@pytest.mark.parametrize("prime", [*PRIMES, 0])
def test_hostile_requests_are_answered_or_refused(tables: TokenTables, prime: int) -> None:
    keys = pack_bits(np.full(2 * L * L * N, max(prime - 1, 0)), 29)
    request = bytes(request_bytes(1) - len(keys)) + keys
    if prime in (0, PRIMES[-1]):  # the smallest of all: these are residues modulo each
        assert len(answer(tables, [request])[0]) == token_bytes([N])
    else:
        with pytest.raises(WireError, match="out of range"):
            answer(tables, [request])
    with pytest.raises(WireError, match="must have"):
        answer(tables, [request[1:]])


@pytest.fixture(scope="module")
def bench_module() -> Any:
    """The benchmark for GPUs, which builds tables without Numba."""
    path = str(Path(__file__).parents[2] / "bench" / "sealed_device.py")
    spec = importlib.util.spec_from_file_location("sealed_device", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_agree_with_numpy(bench_module: Any, hint: np.ndarray, tables: TokenTables) -> None:
    digits, block, public = bench_module.make_tables(hint)
    for compiled_part, plain in zip(tables.arrays, (digits, public[None], block), strict=True):
        np.testing.assert_array_equal(compiled_part, plain)


def test_stages_of_a_gpu_agree(tables: TokenTables, monkeypatch: pytest.MonkeyPatch) -> None:
    # Triton does not run here: its sums are checked by bench/sealed_device.py; the rest is torch.
    torch = pytest.importorskip("torch")
    language = SimpleNamespace(constexpr=None)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(jit=lambda function: function, language=language))
    monkeypatch.setitem(sys.modules, "triton.language", language)
    module = importlib.import_module("nearveil.sealed._device_ring")
    monkeypatch.delitem(sys.modules, "nearveil.sealed._device_ring")
    device = module.DeviceTables("cpu", tables.arrays[0], tables.arrays[2:], np.zeros(1, int))
    key = TokenKey.make("scores", SEED, np.ones((1, RING.dimension), np.int64), unsafe_seeded(1))
    coefficients, keys = ring.read_request(key.request, 1)
    slots = np.stack([get_transform(p).to_slots(coefficients[0, i]) for i, p in enumerate(PRIMES)])
    on_device, device_keys = (torch.as_tensor(part.astype(np.int64)[None]) for part in (coefficients, keys))
    np.testing.assert_array_equal(device.to_slots(on_device)[0, 0], slots)
    factors = np.empty((1, L, N // compiled.TILE, compiled.TERMS, compiled.TILE), np.uint32)
    numbers = tokens._NUMBERS
    compiled.fill_factors(slots.astype(np.uint32), keys, tables.arrays[0].ctypes.data, numbers, factors[0])
    made = device.make_factors(device.to_slots(on_device), device_keys)[0]
    turned = made.permute(0, 1, 3, 4, 2).reshape(1, L, compiled.TERMS, N)
    np.testing.assert_array_equal(turned, factors.swapaxes(2, 3).reshape(turned.shape))
    sums = np.empty((1, L, N), np.uint32)
    compiled.multiply_block(tables.arrays[2].ctypes.data, factors, numbers, sums)
    columns = torch.as_tensor(sums.view(np.int32)).view(1, 1, L, N // 32, 32).transpose(3, 4)
    assert device.switch(columns)[0].numpy().tobytes() == answer(tables, [key.request])[0]
