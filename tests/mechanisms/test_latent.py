"""LATENT: the exact price, the claim that holds, the correction that bounds nothing."""

from decimal import Context, localcontext
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from nearveil.mechanisms import Message, MessageError, Release
from nearveil.mechanisms._bitwise import BitwiseRelease, Latent
from nearveil.privacy import compose
from nearveil.privacy.noise import unsafe_seeded
from studies.bit_budgets import compute_budgets, compute_published_correction
from tests.mechanisms.conformance import Contract, Floats, sample_messages, shown_epsilon


def evidence(release: Release, messages: list[Message], x: Floats, other: Floats) -> Floats:
    assert isinstance(release, BitwiseRelease)
    ratios = release.log_density(messages, np.stack([x, other]))
    return np.asarray(ratios[:, 0] - ratios[:, 1])


def worst_pair(release: Release, tried: int = 150) -> tuple[Floats, Floats]:
    """Return the two of many rows whose code words' largest loss is greatest."""
    assert isinstance(release, BitwiseRelease)
    rows = np.random.default_rng(7).standard_normal((tried, release.n_features_in_))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    codes = release.encoding_.encode(release.projection_(rows)).astype(float)
    one, zero = (
        np.resize([getattr(law, side) for law in release.string_.laws], codes.shape[1]) for side in ("one", "zero")
    )
    losses = (codes * one) @ (1 - codes).T + ((1 - codes) * zero) @ codes.T
    first, second = np.unravel_index(losses.argmax(), losses.shape)
    return release.mean_ + rows[first], release.mean_ + rows[second]


class BitwiseContract(Contract):
    samples = 8_000

    def pairs(self, release: Release) -> list[tuple[Floats, Floats]]:
        return [worst_pair(release)]

    def statistic(self, release: Release, messages: list[Message], x: Floats, other: Floats) -> Floats:
        return evidence(release, messages, x, other)


class TestSigns(BitwiseContract):
    power = 0.65

    def make(self, epsilon: float) -> Latent:
        return Latent(epsilon)


class TestAlpha(BitwiseContract):
    samples = 30_000
    power = 0.6

    def make(self, epsilon: float) -> Latent:
        return Latent(epsilon, alpha=3.0, projection="random", n_components=2)


class TestFractions(BitwiseContract):
    dimension = 2
    samples = 15_000
    power = 0.45

    def make(self, epsilon: float) -> Latent:
        return Latent(epsilon, fraction_bits=1, pairs="code words")


@pytest.fixture(scope="module")
def rows() -> Floats:
    return np.random.default_rng(0).standard_normal((300, 16))


# --- budgets ---


def test_vector_10(rows: Floats) -> None:
    release = Latent(nominal_epsilon=1.0, alpha=7.0, integer_bits=4, fraction_bits=5).fit(rows)
    budgets = compute_budgets(release)
    assert (budgets.n_bits, budgets.n_values, budgets.claimed) == (160, 16, 1.0)
    assert budgets.exact.per_vector == pytest.approx(0.875341263200171, rel=1e-14)
    assert budgets.exact.per_value == pytest.approx(0.875341263200171 / 16, rel=1e-14)
    assert budgets.exact.per_vector_at_delta == pytest.approx(0.085968093, abs=5e-10)
    assert budgets.published_correction == pytest.approx(4.58214282226576, rel=1e-14)
    assert "(not an LDP bound)" in str(budgets)
    assert budgets.claim_holds
    assert release.guarantee.epsilon == budgets.exact.per_vector
    assert "4.58214 (not an LDP bound)" in str(budgets)


@pytest.mark.parametrize("alpha", [None, 7.0])
def test_the_applications_decimal_context_plays_no_part(rows: Floats, alpha: float | None) -> None:
    release = Latent(nominal_epsilon=1.0, alpha=alpha).fit(rows)
    with localcontext(Context(prec=3)):
        other = Latent(nominal_epsilon=1.0, alpha=alpha).fit(rows)
        assert other.string_ == release.string_
        budgets = compute_budgets(other)
    assert budgets == compute_budgets(release)


def test_vector_13(rows: Floats) -> None:
    budgets = compute_budgets(Latent(nominal_epsilon=8.0, alpha=1.0, integer_bits=4, fraction_bits=5).fit(rows))
    assert budgets.exact.per_vector == pytest.approx(4.049995, abs=5e-7)
    assert budgets.exact.per_vector_at_delta == pytest.approx(1.191876, abs=5e-7)


def test_the_worst_strings_mix_both_directions(rows: Floats) -> None:
    """All ones against all zeros, in either order, have less than the exact epsilon at a delta."""
    release = Latent(nominal_epsilon=8.0, alpha=1.0, integer_bits=4, fraction_bits=5).fit(rows)
    law, epsilon = release.string_.laws[0], compute_budgets(release).exact.per_vector_at_delta
    seen = np.arange(161)
    ones, zeros = (binom.pmf(seen, 160, share) for share in (law.p, law.q))
    for first, second in ((ones, zeros), (zeros, ones)):
        assert np.maximum(first - np.exp(epsilon) * second, 0).sum() < 0.9999e-5


@given(st.floats(0.01, 100), st.floats(0.01, 100), st.integers(1, 16))
@settings(max_examples=40, deadline=None)
def test_the_claim_is_valid_and_conservative(nominal: float, alpha: float, dimension: int) -> None:
    public = np.random.default_rng(1).standard_normal((30, dimension))
    release = Latent(nominal_epsilon=nominal, alpha=alpha, fraction_bits=2).fit(public)
    exact = release.guarantee.epsilon
    assert nominal / 2 * (1 - 1e-12) <= exact <= nominal * (1 + 1e-12)
    assert compute_published_correction(release) > nominal  # it makes a true claim worse


def test_an_attack_stays_below_the_claim() -> None:
    """The likelihood ratio of real code words reaches the exact epsilon, near enough, and not the claim."""
    public = np.random.default_rng(1).standard_normal((60, 2))
    release = Latent(nominal_epsilon=3.0).fit(public)
    assert release.guarantee.epsilon == pytest.approx(1.5)
    x, other = worst_pair(release)
    drawn = [
        evidence(release, sample_messages(release, row, 10_000, seed), x, other) for seed, row in enumerate((x, other))
    ]
    assert 1.2 < shown_epsilon(drawn[0], drawn[1], 0.0) <= 1.5


@given(st.floats(0.01, 40), st.one_of(st.none(), st.floats(0.01, 100)), st.sampled_from(["strings", "code words"]))
@settings(max_examples=30, deadline=None)
def test_epsilon_is_the_exact_one(epsilon: float, alpha: float | None, pairs: Any) -> None:
    public = np.random.default_rng(1).standard_normal((30, 5))
    release = Latent(epsilon, alpha=alpha, fraction_bits=2, pairs=pairs).fit(public)
    assert epsilon * (1 - 1e-6) <= release.guarantee.epsilon <= epsilon
    budgets = compute_budgets(release)
    price = budgets.exact if pairs == "strings" else budgets.code_word_bound
    assert price.per_vector == release.guarantee.epsilon
    assert budgets.claimed == release.nominal_epsilon_


def test_no_alpha_is_the_best_alpha(rows: Floats) -> None:
    """At equal exact epsilon, symmetric odds keep a bit's signal largest."""
    best = Latent(16.0).fit(rows).string_.laws[0]
    assert best.p + best.q == pytest.approx(1)
    for alpha in (0.2, 0.5, 1.0, 7.0):
        law = Latent(16.0, alpha=alpha).fit(rows).string_.laws[0]
        assert law.p - law.q < best.p - best.q


def test_messages_compose_bit_by_bit(rows: Floats) -> None:
    promise = Latent(1.0).fit(rows).guarantee
    assert 1 - 1e-7 < compose([promise], delta=1e-13).epsilon <= 1.0  # a delta takes off the last digits
    assert compose([promise] * 20, delta=1e-5).epsilon < 0.4 * 20


# --- encoding and decoding ---


def test_clipping_is_told(rows: Floats) -> None:
    assert Latent(1.0, integer_bits=1).fit(rows).measure_clipping(rows) == 0.0
    release = Latent(1.0, fraction_bits=3, scale=8.0).fit(rows)
    expected = float((np.abs(release.features(rows)) * 8 >= 1).mean())
    assert 0.1 < release.measure_clipping(rows) == expected
    highest = release.encoding_.encode(np.array([[0.9]]))
    assert highest.tolist() == release.encoding_.encode(np.array([[0.2]])).tolist() == [[0, 1, 1, 1]]


def test_without_noise_the_expected_value_is_the_row(rows: Floats) -> None:
    release = Latent(nominal_epsilon=39.0 * 16 * 8, fraction_bits=7).fit(rows)
    features = release.features(rows[:20])
    for row, message in zip(features, release.release(rows[:20], rng=unsafe_seeded(0)), strict=True):
        assert np.abs(release.decode(message) - row).max() <= 2.0**-7
        assert np.argmax(release.rank(message, rows)) == np.argmax(release.features(rows) @ row)


def test_the_unbiased_decoder_is(rows: Floats) -> None:
    release = Latent(32.0, fraction_bits=1, scale=2.0, decoder="unbiased").fit(rows)
    x = rows[0]
    words, values = release.encoding_.words()
    codes = release.encoding_.encode(release.features(x[None])).reshape(16, -1)
    true = np.array([values[np.flatnonzero((words == code).all(axis=1))[0]] for code in codes])
    read = np.array([release.decode(m) for m in sample_messages(release, x, 4000, 1)])
    assert np.abs(read.mean(axis=0) - true).max() < 5 * (read.std(axis=0) / np.sqrt(4000)).max()
    assert np.abs(true).min() > 0.1


def test_the_expected_decoder_errs_least(rows: Floats) -> None:
    errors = []
    for decoder in ("expected", "unbiased"):
        release = Latent(16.0, fraction_bits=1, scale=3.0, decoder=decoder).fit(rows)
        found = [release.decode(message) for message in release.release(rows, rng=unsafe_seeded(2))]
        errors.append(float(((np.array(found) - release.features(rows)) ** 2).sum(axis=1).mean()))
    assert errors[0] < 1 < errors[1]  # one is what knowing nothing costs


def test_density_is_one_in_all(rows: Floats) -> None:
    release = Latent(2.0).fit(rows[:, :3])
    every = [
        Message("latent", release.public_id, {"bits": np.packbits(np.array(bits, dtype=np.uint8))})
        for bits in np.ndindex(2, 2, 2)
    ]
    density = release.log_density(every, rows[:4, :3])
    assert np.exp(density).sum(axis=0) == pytest.approx(1)
    assert np.ptp(density, axis=1).max() <= 2.0


def test_bits_after_the_end_are_refused(rows: Floats) -> None:
    release = Latent(2.0).fit(rows[:, :3])
    message = release.release(rows[0, :3])
    assert message["bits"].shape == (1,)
    wrong = Message("latent", release.public_id, {"bits": message["bits"] | np.uint8(1)})
    with pytest.raises(MessageError, match="zeros after them"):
        release.rank(wrong, rows[:, :3])


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({}, "epsilon must be given"),
        ({"epsilon": 1.0, "nominal_epsilon": 1.0}, "and not both"),
        ({"epsilon": 41.0}, "epsilon must be"),
        ({"epsilon": 1e-9}, "epsilon must be"),
        ({"nominal_epsilon": 1e9}, "nominal_epsilon must be from"),
        ({"nominal_epsilon": float("nan")}, "nominal_epsilon must be from"),
        ({"nominal_epsilon": "1"}, "nominal_epsilon must be from"),
        ({"epsilon": 1.0, "alpha": 0.0}, "'alpha' parameter"),
        ({"epsilon": 1.0, "alpha": 1e9}, "'alpha' parameter"),
        ({"epsilon": 1.0, "integer_bits": -1}, "'integer_bits' parameter"),
        ({"epsilon": 1.0, "fraction_bits": 2.5}, "'fraction_bits' parameter"),
        ({"epsilon": 1.0, "integer_bits": 8, "fraction_bits": 8}, "integer_bits \\+ fraction_bits must"),
        ({"epsilon": 1.0, "scale": -1.0}, "'scale' parameter"),
        ({"epsilon": 1.0, "pairs": "all"}, "'pairs' parameter"),
        ({"epsilon": 1.0, "decoder": "best"}, "'decoder' parameter"),
        ({"epsilon": 1.0, "n_components": 3}, "n_components must be None"),
    ],
)
def test_absurd_parameters(rows: Floats, parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Latent(**parameters).fit(rows)


def test_absurd_delta(rows: Floats) -> None:
    release = Latent(1.0).fit(rows)
    for delta in (0.0, 1.0, float("nan")):
        with pytest.raises(ValueError, match="delta"):
            compute_budgets(release, delta)
