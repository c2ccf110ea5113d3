"""Encryption, hints and rounding: exact against whole numbers, and as far off as the theory says."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearveil.privacy.noise import unsafe_seeded
from nearveil.sealed.accuracy import bound_fetch_failure, bound_score_error, find_score_deviation
from nearveil.sealed.lwe import (
    LARGEST_DRAW,
    add_messages,
    draw_gaussians,
    encrypt_zeros,
    expand_matrix,
    make_hint,
    pack_question,
    remove_masks,
    round_down_to,
    round_to_masks,
    unpack_question,
)
from nearveil.sealed.parameters import LWE, RING, SCORE_BITS, WORD_BITS

SEED = bytes(range(32))
STAGES = pytest.mark.parametrize("stage", ["scores", "records"])


def centre(values: np.ndarray, bits: int) -> np.ndarray:
    """Return the representatives of values modulo 2^bits from -2^(bits - 1) to 2^(bits - 1) - 1."""
    half = 1 << (bits - 1)
    return ((values + half) & ((1 << bits) - 1)) - half


@STAGES
def test_the_matrix_is_uniform_and_rows_do_not_depend_on_where_reading_began(stage: str) -> None:
    whole = expand_matrix(stage, SEED, 0, 200)
    np.testing.assert_array_equal(expand_matrix(stage, SEED, 37, 111), whole[37:111])
    half = 2.0 ** (LWE.modulus_bits - 1)
    assert -half <= whole.min() < -0.99 * half
    assert 0.99 * half < whole.max() < half
    counts = np.histogram(whole, bins=64, range=(-half, half))[0]
    expected = whole.size / 64
    assert np.sum((counts - expected) ** 2 / expected) < 63 + 10 * np.sqrt(126)  # chi square, ten deviations


def test_stages_and_seeds_have_matrices_of_their_own() -> None:
    first = expand_matrix("scores", SEED, 0, 2)
    assert not np.array_equal(first, expand_matrix("scores", bytes(32), 0, 2))
    assert not np.array_equal(first, expand_matrix("records", SEED, 0, 2))


@pytest.mark.parametrize("n_secrets", [1, 2, 4])
def test_a_ciphertext_is_its_matrix_times_its_secret_plus_a_small_error(n_secrets: int) -> None:
    rng = np.random.default_rng(0)
    messages = rng.integers(0, 1 << LWE.modulus_bits, (5, 700))
    zeros, secrets = encrypt_zeros("scores", SEED, messages.shape, n_secrets, unsafe_seeded(1))
    assert secrets.shape == (n_secrets, 1024)
    sent = add_messages(zeros, messages, SCORE_BITS)
    drop, rounded = LWE.modulus_bits - WORD_BITS, LWE.modulus_bits - SCORE_BITS
    for group, (words, message) in enumerate(zip(sent, messages, strict=True)):
        matrix, secret = divmod(group, n_secrets)  # no two groups have both in common
        rows = expand_matrix("scores", SEED, 700 * matrix, 700 * (matrix + 1)).astype(np.int64)
        errors = centre((words.astype(np.int64) << drop) - rows @ secrets[secret] - message, LWE.modulus_bits)
        expected = float(LWE.sigma) ** 2 + 4.0**rounded / 12
        assert errors.std() == pytest.approx(np.sqrt(expected), rel=0.15)
        assert np.abs(errors).max() <= LARGEST_DRAW + 2 ** (rounded - 1)
    assert secrets.std() == pytest.approx(6.4, rel=0.1)


@pytest.mark.parametrize("bits", [17, 20, 22, 24])
def test_rounding_a_question_leans_to_neither_side(bits: int) -> None:
    drop = LWE.modulus_bits - bits
    values = np.arange(1 << (drop + 1), dtype=np.int64)  # every part of a step, after an even and an odd number
    sent = add_messages(np.zeros_like(values, dtype=np.uint32), values, bits).astype(np.int64)
    errors = centre((sent << (LWE.modulus_bits - WORD_BITS)) - values, LWE.modulus_bits)
    assert errors.sum() == 0
    assert np.abs(errors).max() == 1 << (drop - 1)


def test_secrets_and_errors_are_fresh() -> None:
    source = unsafe_seeded(3)
    first, secrets = encrypt_zeros("scores", SEED, (2, 64), 2, source)
    second, others = encrypt_zeros("scores", SEED, (2, 64), 2, source)
    assert len({secret.tobytes() for secret in (*secrets, *others)}) == 4
    assert not np.array_equal(first, second)


def test_draws_end_where_the_bound_says() -> None:
    drawn = draw_gaussians((100, 1000), unsafe_seeded(0))
    assert np.abs(drawn).max() <= LARGEST_DRAW
    assert drawn.var() == pytest.approx(6.4**2, rel=0.05)


def test_more_samples_than_were_estimated_are_refused() -> None:
    columns = LWE.most_samples // 2
    for shape in ((1, LWE.most_samples + 1), (3, columns), (5, columns)):
        with pytest.raises(ValueError, match=f"must have at most {LWE.most_samples} samples"):
            encrypt_zeros("scores", SEED, shape, 1 if shape[0] < 5 else 2, unsafe_seeded(0))


def test_hints_are_exact_before_they_are_rounded_to_the_modulus_of_masks() -> None:
    rng = np.random.default_rng(2)
    groups = list(rng.choice([-128, -127, 127], (2, 3, 4200)).astype(np.int8))
    matrix = expand_matrix("records", SEED, 3 * 4200, 4 * 4200).astype(object)
    for database, hint in zip(groups, make_hint("records", SEED, 3, groups), strict=True):
        exact = (database.astype(object) @ matrix[:, :5]) % (1 << LWE.modulus_bits)
        expected = (exact * 2 * 65537 // (1 << LWE.modulus_bits) + 1) // 2 % 65537
        np.testing.assert_array_equal(hint[:, :5], expected.astype(np.uint32))


def test_masks_are_removed_exactly() -> None:
    values, masks = np.array([0, 65535, 7, 40000], np.uint32), np.array([0, 65536, 65536, 3])
    expected = [(int(y) * 65537 - int(m) * 65536) % (65537 * 65536) for y, m in zip(values, masks, strict=True)]
    assert remove_masks(values, masks).tolist() == expected
    assert round_to_masks(np.array([-1, 0, 1 << 25, 511, 513])).tolist() == [0, 0, 32769, 0, 1]
    assert RING.plain_modulus == 65537


@given(st.lists(st.integers(0, (1 << 24) - 1), min_size=1, max_size=20), st.integers(17, 24))
@settings(max_examples=100, deadline=None)
def test_a_question_is_packed_without_its_lower_bits(values: list[int], bits: int) -> None:
    words = (np.array(values, np.uint32) >> (24 - bits) << (24 - bits)).astype(np.uint32)
    data = pack_question(words, bits)
    assert len(data) == 2 * len(values) + -(-len(values) * (bits - 16) // 8)
    np.testing.assert_array_equal(unpack_question(data, bits, len(values)), words)


@given(st.integers(-(1 << 40), 1 << 40), st.sampled_from([(26, 22), (32, 24), (24, 16), (24, 24)]))
@settings(max_examples=100, deadline=None)
def test_rounding_moves_a_number_by_half_a_step_at_most(value: int, bits: tuple[int, int]) -> None:
    drop = bits[0] - bits[1]
    rounded = int(round_down_to(np.array([value]), *bits)[0])
    assert 0 <= rounded < 1 << bits[1]
    off = int(centre(np.array([(rounded << drop) - value]), bits[0])[0])
    assert abs(off) <= (1 << drop) // 2


def test_bounds_say_what_the_theory_computes_by_hand() -> None:
    # sigma^2 + 4^4 / 12 = 62.2933; 1024 * 40.96 * 2^20 / 12 + 2^20 / 12 + reach^2 / 12
    variance = 62.29333333 * 2500.0**2 + (1024 * 40.96 + 1) * 2**20 / 12 + 1000.0**2 / 12
    assert find_score_deviation(2500.0, 1000.0) == pytest.approx(np.sqrt(variance) * 2.1 / 2**26, rel=1e-6)
    assert bound_score_error(2500.0, 1000.0, 0.02) == pytest.approx(
        2 * np.exp(-(0.02**2) / (2 * variance * 2.1**2 / 2**52)), rel=1e-6
    )
    assert bound_score_error(2500.0, 1000.0, 0.0) == 1
    variance = (40.96 + 4**6 / 12) * 1300.0**2 + (1024 * 40.96 + 1) * 2**20 / 12
    assert bound_fetch_failure(1300.0, 20) == pytest.approx(2 * np.exp(-(2.0**38) / (2 * variance)), rel=1e-6)
