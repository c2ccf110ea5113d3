"""Encryption, hints and rounding: exact against whole numbers, and as far off as the theory says."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearveil.privacy.noise import unsafe_seeded
from nearveil.sealed.accuracy import bound_fetch_failure, bound_score_error, find_score_deviation
from nearveil.sealed.lwe import (
    LARGEST_DRAW,
    WORD_BITS,
    add_messages,
    centre,
    draw_gaussians,
    encrypt_zeros,
    expand_matrix,
    make_hint,
    pack,
    pack_question,
    round_down_to,
    unpack,
    unpack_question,
)
from nearveil.sealed.parameters import FETCH, SCORES, LweParameters

SEED = bytes(range(32))
BOTH = pytest.mark.parametrize("parameters", [SCORES, FETCH], ids=lambda one: one.name)


@BOTH
def test_the_matrix_is_uniform_and_rows_do_not_depend_on_where_reading_began(parameters: LweParameters) -> None:
    whole = expand_matrix(parameters, SEED, 0, 200)
    np.testing.assert_array_equal(expand_matrix(parameters, SEED, 37, 111), whole[37:111])
    half = 2.0 ** (parameters.modulus_bits - 1)
    assert -half <= whole.min() < -0.99 * half
    assert 0.99 * half < whole.max() < half
    counts = np.histogram(whole, bins=64, range=(-half, half))[0]
    expected = whole.size / 64
    assert np.sum((counts - expected) ** 2 / expected) < 63 + 10 * np.sqrt(126)  # chi square, ten deviations


def test_sets_and_seeds_have_matrices_of_their_own() -> None:
    first = expand_matrix(SCORES, SEED, 0, 2)
    assert not np.array_equal(first, expand_matrix(SCORES, bytes(32), 0, 2))
    assert not np.array_equal(first[0], expand_matrix(FETCH, SEED, 0, 1)[0, :1024] >> 6)


@BOTH
def test_a_ciphertext_is_the_matrix_times_its_secret_plus_a_small_error(parameters: LweParameters) -> None:
    rng = np.random.default_rng(0)
    messages = rng.integers(0, 1 << parameters.modulus_bits, (3, 1500))
    zeros, secrets = encrypt_zeros(parameters, SEED, messages.shape, unsafe_seeded(1))
    sent = add_messages(parameters, zeros, messages)
    matrix = expand_matrix(parameters, SEED, 0, 1500).astype(np.int64)
    drop, rounded = parameters.modulus_bits - WORD_BITS, parameters.modulus_bits - parameters.question_bits
    errors = centre((sent.astype(np.int64) << drop) - secrets @ matrix.T - messages, parameters.modulus_bits)
    expected = float(parameters.sigma) ** 2 + 4.0**rounded / 12
    assert errors.std() == pytest.approx(np.sqrt(expected), rel=0.1)
    assert np.abs(errors).max() <= LARGEST_DRAW + 2 ** (rounded - 1)
    assert secrets.std() == pytest.approx(6.4, rel=0.1)


@BOTH
def test_rounding_a_question_leans_to_neither_side(parameters: LweParameters) -> None:
    drop = parameters.modulus_bits - parameters.question_bits
    values = np.arange(1 << (drop + 1), dtype=np.int64)  # every part of a step, after an even and an odd number
    sent = add_messages(parameters, np.zeros_like(values, dtype=np.uint32), values).astype(np.int64)
    errors = centre((sent << (parameters.modulus_bits - WORD_BITS)) - values, parameters.modulus_bits)
    assert errors.sum() == 0
    assert np.abs(errors).max() == 1 << (drop - 1)


def test_secrets_and_errors_are_fresh() -> None:
    source = unsafe_seeded(3)
    first, secrets = encrypt_zeros(SCORES, SEED, (2, 64), source)
    second, others = encrypt_zeros(SCORES, SEED, (2, 64), source)
    assert len({secret.tobytes() for secret in (*secrets, *others)}) == 4
    assert not np.array_equal(first, second)


def test_draws_end_where_the_bound_says() -> None:
    drawn = draw_gaussians(SCORES, (100, 1000), unsafe_seeded(0))
    assert np.abs(drawn).max() <= LARGEST_DRAW
    assert drawn.var() == pytest.approx(6.4**2, rel=0.05)


def test_more_samples_than_were_estimated_are_refused() -> None:
    with pytest.raises(ValueError, match="messages must have at most 65536"):
        encrypt_zeros(SCORES, SEED, (1, SCORES.most_samples + 1), unsafe_seeded(0))


@BOTH
def test_hints_are_exact(parameters: LweParameters) -> None:
    rng = np.random.default_rng(2)
    database = rng.choice([-128, -127, 127], (3, 8200)).astype(np.int8)
    matrix = expand_matrix(parameters, SEED, 0, 8200).astype(object)
    expected = (database.astype(object) @ matrix[:, :5]) % (1 << parameters.modulus_bits)
    np.testing.assert_array_equal(make_hint(parameters, SEED, database)[:, :5], expected.astype(np.uint32))


@given(st.lists(st.integers(0, (1 << 24) - 1), min_size=1, max_size=20), st.sampled_from([3, 4]))
@settings(max_examples=50, deadline=None)
def test_packing_is_undone(values: list[int], width: int) -> None:
    data = pack(np.array(values, np.uint32), width)
    assert len(data) == width * len(values)
    assert unpack(data, width).tolist() == values


@given(st.lists(st.integers(0, (1 << 22) - 1), min_size=1, max_size=20), st.sampled_from([22, 24]))
@settings(max_examples=50, deadline=None)
def test_a_question_is_packed_without_its_lower_bits(values: list[int], bits: int) -> None:
    words = np.array(values, np.uint32) << np.uint32(2)
    data = pack_question(words, bits)
    assert len(data) == (3 * len(values) if bits == 24 else 11 * -(-len(values) // 4))
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
    variance = (40.96 + 2**16 / 12) * 8000.0**2 + 1280 * 40.96 * 2**16 / 12 + 2**32 / 12
    assert bound_fetch_failure(8000.0) == pytest.approx(2 * np.exp(-(2.0**46) / (2 * variance)), rel=1e-6)
