"""Randomised bits: thresholds, budgets over strings and code words, and the unary encodings."""

import math
from decimal import Decimal
from itertools import product
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nearveil.mechanisms import Message, Release
from nearveil.mechanisms._bitwise import (
    WORD,
    BitLaw,
    BitString,
    Encoding,
    bound_code_word_epsilon,
    compute_pure_epsilon,
    find_largest_nominal,
)
from nearveil.privacy.noise import unsafe_seeded
from studies.baselines.unary import Unary, make_unary_law
from studies.bit_budgets import Budgets, compute_epsilon_at, compute_prices
from tests.mechanisms.conformance import Contract, Floats
from tests.mechanisms.test_channel import Words

_PARTS = 10**28
shares = st.integers(_PARTS // 10**6, _PARTS - _PARTS // 10**6)


def laws(count: int, seed: int) -> tuple[BitLaw, ...]:
    odds = np.random.default_rng(seed).uniform(0.05, 0.95, (count, 2))
    return tuple(BitLaw.nearest_to(Decimal(float(p)), Decimal(float(q))) for p, q in odds)


# --- a bit ---


@given(shares, shares)
@example(_PARTS // 3, _PARTS // 7)
def test_thresholds_lose_no_more_than_the_odds_they_stand_for(p: int, q: int) -> None:
    law = BitLaw.nearest_to(Decimal(p) / _PARTS, Decimal(q) / _PARTS)  # 28 digits: no whole number of words
    assert abs(law.if_one - p * WORD // _PARTS) <= 1
    assert abs(law.if_zero - q * WORD // _PARTS) <= 1
    with mpmath.workprec(300):
        allowed, lost = (
            [max(mpmath.log(a / b), mpmath.log((1 - a) / (1 - b))) for a, b in ((one, zero), (zero, one))]
            for one, zero in (
                (mpmath.mpf(p) / _PARTS, mpmath.mpf(q) / _PARTS),
                (mpmath.mpf(law.if_one) / WORD, mpmath.mpf(law.if_zero) / WORD),
            )
        )
        for most, true, stated in zip(allowed, lost, (law.one, law.zero), strict=True):
            assert true <= most
            assert true <= stated <= true * (1 + mpmath.mpf(2) ** -48)  # stated from above, and hardly above


def test_every_word_makes_the_bit_that_the_thresholds_count() -> None:
    string = BitString((BitLaw(700, 300), BitLaw(200, 900)), 3)
    bits = np.array([[1, 1, 0], [0, 0, 1]], dtype=np.uint8)
    for words, expected in (
        ([699, 199, 299, 299, 899, 699], [[1, 1, 1], [1, 1, 1]]),
        ([700, 200, 300, 300, 900, 700], [[0, 0, 0], [0, 0, 0]]),
    ):
        assert string.sample(bits, Words(words)).tolist() == expected


def test_odds_nearer_than_a_word_tell_nothing() -> None:
    law = BitLaw.nearest_to(Decimal("0.5"), Decimal("0.5"))
    assert law.epsilon == 0
    assert BitString((law,), 1).unbiased(np.array([[1]], dtype=np.uint8)).tolist() == [[0.0]]


@given(st.integers(0, 1000))
@settings(max_examples=20)
def test_evidence_and_unbiased_estimates(seed: int) -> None:
    string = BitString(laws(2, seed), 4)
    for true in ([0, 0, 0, 0], [1, 1, 1, 1]):
        chances = [law.p if bit else law.q for bit, law in zip(true, 2 * string.laws, strict=True)]
        total, mean = 0.0, np.zeros(4)
        for seen in product((0, 1), repeat=4):
            bits = np.array(seen, dtype=np.uint8)
            density = string.log_if_zero(bits).sum() + string.evidence(bits) @ np.array(true)
            expected = math.prod(c if bit else 1 - c for c, bit in zip(chances, seen, strict=True))
            assert math.exp(density) == pytest.approx(expected, rel=1e-12)
            total, mean = total + expected, mean + expected * string.unbiased(bits)
        assert total == pytest.approx(1)
        assert mean == pytest.approx(true, abs=1e-9)


# --- strings ---


def all_deltas(string: BitString, epsilon: float) -> float:
    """Return the largest hockey-stick divergence of any two strings, by listing all of them and all outputs."""
    outputs = np.array(list(product((0, 1), repeat=string.length)), dtype=np.uint8)
    density = np.exp(
        string.log_if_zero(outputs).sum(axis=1, keepdims=True) + string.evidence(outputs) @ outputs.T.astype(float)
    )  # outputs by true strings
    pairs = density[:, :, None] - math.exp(epsilon) * density[:, None, :]
    return float(np.maximum(pairs, 0).sum(axis=0).max())


def largest_ratio(string: BitString) -> float:
    outputs = np.array(list(product((0, 1), repeat=string.length)), dtype=np.uint8)
    scores = string.evidence(outputs) @ outputs.T.astype(float)
    return float((scores.max(axis=1) - scores.min(axis=1)).max())


@given(st.integers(1, 2), st.integers(1, 5), st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_pure_epsilon_is_the_largest_ratio_of_all_strings(count: int, length: int, seed: int) -> None:
    string = BitString(laws(count, seed), length)
    assert compute_pure_epsilon(string) == pytest.approx(largest_ratio(string), rel=1e-9, abs=1e-12)


@given(st.integers(1, 2), st.integers(1, 5), st.integers(0, 10_000), st.sampled_from([1e-5, 0.01, 0.1, 0.3]))
@settings(max_examples=40, deadline=None)
def test_at_delta_against_all_pairs_of_strings(count: int, length: int, seed: int, delta: float) -> None:
    string = BitString(laws(count, seed), length)
    epsilon = compute_epsilon_at(string.laws, string.counts(), delta)
    assert all_deltas(string, epsilon) <= delta * (1 + 1e-9)
    if count == 1 and epsilon > 1e-3:
        assert all_deltas(string, epsilon - 1e-6) > delta  # exact
    if epsilon > 1e-3:
        assert all_deltas(string, 0.98 * epsilon - 1e-3) > 0.9 * delta  # and never far off


def test_more_bits_than_are_listed_fall_back_to_an_upper_bound() -> None:
    law = BitLaw.nearest_to(Decimal("0.51"), Decimal("0.5"))
    listed, bounded = (compute_epsilon_at((law,), (count,), 1e-5) for count in (1024, 1025))
    assert listed < bounded < 1.02 * listed
    assert bounded < 0.3 * 1025 * law.epsilon


# --- code words ---


def test_code_words_by_hand() -> None:
    down, near = Encoding(1, 2, 1.0, "down"), Encoding(1, 2, 1.0, "nearest")
    rows = np.array([[-0.2, 0.24, -0.99, 7.0]])
    assert down.encode(rows).reshape(4, 4).tolist() == [[1, 0, 0, 0], [0, 0, 0, 0], [1, 0, 1, 1], [0, 1, 1, 1]]
    assert near.encode(rows).reshape(4, 4).tolist() == [[1, 0, 0, 1], [0, 0, 0, 1], [1, 1, 0, 0], [0, 1, 1, 1]]
    assert near.encode(np.array([[-0.1]])).tolist() == [[0, 0, 0, 0]]  # zero has no sign
    ome = Encoding(5, 5, 1.0, "nearest")
    assert ome.encode(np.array([[-1.0]])).tolist() == [[1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0]]
    assert ome.word_bits == 11


@pytest.mark.parametrize("rounding", ["down", "nearest"])
def test_words_are_those_that_values_have(rounding: Any) -> None:
    encoding = Encoding(1, 3, 1.3, rounding)
    values = np.linspace(-1, 1, 4001)[:, None]
    found = {tuple(word) for word in encoding.encode(values).tolist()}
    words, middle = encoding.words()
    assert found == {tuple(word) for word in words.tolist()}
    assert np.array_equal(encoding.encode(middle[:, None]), words)  # the value of a word has that word
    half = 0.5 / encoding.steps + 1e-12
    known = dict(zip(map(tuple, words.tolist()), middle, strict=True))
    read = np.array([known[tuple(word)] for word in encoding.encode(values).tolist()])
    assert np.abs(read - values[:, 0]).max() <= half


@given(
    st.integers(0, 1),
    st.integers(1, 3),
    st.floats(0.5, 3),
    st.sampled_from(["down", "nearest"]),
    st.integers(1, 2),
    st.integers(0, 10_000),
)
@settings(max_examples=25, deadline=None)
def test_no_two_unit_rows_pass_the_bound(
    whole: int, fraction: int, scale: float, rounding: Any, count: int, seed: int
) -> None:
    encoding = Encoding(whole, fraction, scale, rounding)
    string = BitString(laws(count, seed), 2 * encoding.word_bits)
    angles = np.linspace(0, 2 * math.pi, 1441)
    codes = np.unique(encoding.encode(np.stack([np.cos(angles), np.sin(angles)], axis=1)), axis=0).astype(float)
    one, zero = (np.resize([getattr(law, side) for law in string.laws], string.length) for side in ("one", "zero"))
    found = float(((codes * one) @ (1 - codes).T + ((1 - codes) * zero) @ codes.T).max())
    bound = bound_code_word_epsilon(string, encoding, 2)
    assert found <= bound * (1 + 1e-12)
    assert bound <= compute_pure_epsilon(string) * (1 + 1e-12)
    assert found >= 0.5 * bound  # two values leave a gap between the bound and rows; many values close it


def test_code_words_are_an_upper_bound() -> None:
    """Enumerated, two values lose less than is stated: the bound must not be called exact."""
    encoding = Encoding(1, 2, 1.0, "down")
    law = BitLaw.nearest_to(Decimal(math.e) / (1 + Decimal(math.e)), 1 / (1 + Decimal(math.e)))  # epsilon 1
    string = BitString((law,), 2 * encoding.word_bits)
    angles = np.linspace(0, 2 * math.pi, 14_401)
    codes = np.unique(encoding.encode(np.stack([np.cos(angles), np.sin(angles)], axis=1)), axis=0).astype(int)
    exact = law.epsilon * (codes[:, None] != codes).sum(axis=2).max()
    strings, words = compute_prices(string, encoding, 1e-5)
    assert exact == pytest.approx(6)
    assert words.per_vector == pytest.approx(7.1)
    assert strings.per_vector == pytest.approx(8)
    budgets = str(Budgets(8.0, 8.0, strings, words, 1e-5, string.length, 2))
    assert "code words, at most   7.1 " in budgets
    assert "exact, code words" not in budgets


def test_prices_are_ordered() -> None:
    encoding = Encoding(5, 5, 1.0, "nearest")
    strings, words = compute_prices(BitString(laws(2, 3), 6 * 11), encoding, 1e-5)
    for price in (strings, words):
        assert price.per_value_at_delta <= price.per_value < price.per_vector
        assert price.per_vector_at_delta < price.per_vector
    assert words.per_value < strings.per_value
    assert words.per_vector < strings.per_vector
    assert words.per_vector_at_delta < strings.per_vector_at_delta
    # Four of the integer bits are always zero, and only +-1 has the fifth.
    assert words.per_value <= strings.per_value * 7 / 11 * 2


@given(st.floats(0.01, 30), st.floats(0.1, 3))
def test_solving_never_passes_what_was_asked(epsilon: float, slope: float) -> None:
    found = find_largest_nominal(lambda nominal: slope * nominal**1.1, epsilon, 0.0, 20)
    assert epsilon * (1 - 1e-9) <= slope * found**1.1 <= epsilon


# --- unary encodings ---


class TestOptimised(Contract):
    samples = 8_000
    power = 0.6
    kind: Any = "optimised"

    def make(self, epsilon: float) -> Unary:
        return Unary(epsilon, self.kind, n_cells=6)

    def pairs(self, release: Release) -> list[tuple[Floats, Floats]]:
        assert isinstance(release, Unary)
        return [(release.mean_ + release.centroids_[0], release.mean_ + release.centroids_[1])]

    def statistic(self, release: Release, messages: list[Message], x: Floats, other: Floats) -> Floats:
        assert isinstance(release, Unary)
        ratios = release.log_density(messages, np.stack([x, other]))
        return np.asarray(ratios[:, 0] - ratios[:, 1])


class TestSymmetric(TestOptimised):
    kind = "symmetric"


@given(st.floats(1e-3, 40), st.sampled_from(["symmetric", "optimised"]))
def test_two_bits_have_the_exact_epsilon(epsilon: float, kind: Any) -> None:
    law = make_unary_law(epsilon, kind)
    with mpmath.workprec(300):
        one, zero = law.if_one, law.if_zero
        odds = mpmath.mpf(one * (WORD - zero)) / (zero * (WORD - one))
        exact = mpmath.mpf(repr(epsilon))
        assert mpmath.log(odds) <= exact
        if epsilon < 20:
            assert mpmath.log(odds) >= exact * (1 - mpmath.mpf(10) ** -9)


def test_unary_messages_name_the_cell() -> None:
    rows = np.random.default_rng(0).standard_normal((200, 3))
    release = Unary(30.0, "symmetric", n_cells=5).fit(rows)
    for message, cell in zip(
        release.release(rows[:50], rng=unsafe_seeded(0)), release._cells(release.features(rows[:50])), strict=True
    ):
        assert np.unpackbits(message["bits"], count=5).tolist() == np.eye(5)[cell].tolist()
        assert np.argmax(release.rank(message, release.mean_ + release.centroids_)) == cell


@pytest.mark.parametrize(
    ("parameters", "words"),
    [({"kind": "loud"}, "kind must"), ({"n_cells": 1}, "n_cells must"), ({"n_cells": 1000}, "n_cells must")],
)
def test_absurd_unary_parameters(parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Unary(1.0, **parameters).fit(np.random.default_rng(0).standard_normal((60, 3)))
