"""OME: an exact price that its nominal epsilon does not move, and a claim that an attack passes."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearveil.mechanisms._bitwise import OME
from studies.bit_budgets import compute_budgets
from tests.mechanisms.conformance import Floats, sample_messages, shown_epsilon
from tests.mechanisms.test_latent import BitwiseContract, evidence, worst_pair


class TestPlain(BitwiseContract):
    dimension = 2
    samples = 15_000
    power = 0.35  # four bits; all must agree with the cause for most of epsilon to show

    def make(self, epsilon: float) -> OME:
        return OME(epsilon, integer_bits=0, fraction_bits=1, pairs="code words")


class TestAlpha(TestPlain):
    def make(self, epsilon: float) -> OME:
        return OME(epsilon, alpha=1.1, integer_bits=0, fraction_bits=1, pairs="code words")


class TestElevenBits(BitwiseContract):
    samples = 2_000
    power = 0.0  # half of 33 bits differ, and the messages in which most agree with the cause are too rare to count

    def make(self, epsilon: float) -> OME:
        return OME(epsilon)


@pytest.fixture(scope="module")
def rows() -> Floats:
    return np.random.default_rng(0).standard_normal((300, 50))


def test_vector_11(rows: Floats) -> None:
    release = OME(nominal_epsilon=1.0, alpha=7.0, integer_bits=4).fit(rows[:, :16])
    budgets = compute_budgets(release)
    assert (budgets.n_bits, budgets.claimed) == (160, 1.0)
    assert budgets.exact.per_vector == pytest.approx(456.56882117991, rel=1e-14)
    assert budgets.exact.per_vector == pytest.approx(80 * math.log(301), rel=1e-14)
    assert budgets.published_correction == pytest.approx(-2058.33360390343, rel=1e-14)
    assert not budgets.claim_holds
    assert "1 (false)" in str(budgets)
    assert release.guarantee.epsilon == budgets.exact.per_vector
    assert "may be almost certain" in str(release.guarantee)


def test_vector_12(rows: Floats) -> None:
    budgets = compute_budgets(OME(nominal_epsilon=10.0, alpha=100.0).fit(rows))
    assert budgets.n_bits == 550
    assert budgets.exact.per_vector == pytest.approx(3796.52933745542, rel=1e-14)
    assert budgets.code_word_bound.per_vector < budgets.exact.per_vector / 2
    assert budgets.claimed == 10.0
    assert not budgets.claim_holds


@given(st.floats(1.01, 50), st.floats(0.001, 1.0))
@settings(max_examples=40, deadline=None)
def test_the_nominal_epsilon_does_not_matter_up_to_two_log_alpha(alpha: float, share: float) -> None:
    public = np.random.default_rng(1).standard_normal((20, 4))
    nominal = share * 2 * math.log(alpha) * 44
    exact = OME(nominal_epsilon=nominal, alpha=alpha).fit(public).guarantee.epsilon
    assert exact == pytest.approx(22 * math.log(alpha**3 - alpha**2 + alpha), rel=1e-9)


def test_an_attack_passes_the_claim() -> None:
    """Two rows that can occur, a few thousand messages: the claimed epsilon is disproved, the exact one is not."""
    release = OME(nominal_epsilon=1.0, alpha=7.0).fit(np.random.default_rng(1).standard_normal((60, 2)))
    x, other = worst_pair(release)
    drawn = [
        evidence(release, sample_messages(release, row, 5_000, seed), x, other) for seed, row in enumerate((x, other))
    ]
    shown = shown_epsilon(drawn[0], drawn[1], 0.0)
    budgets = compute_budgets(release)
    assert shown > 3 * budgets.claimed
    assert shown <= budgets.code_word_bound.per_vector <= release.guarantee.epsilon


def test_the_published_correction_is_no_bound() -> None:
    """As counted over a grid of settings: mostly below the truth, and mostly negative."""
    public = np.random.default_rng(1).standard_normal((20, 2))
    found = []
    for alpha in (1.5, 2.0, 7.0, 20.0, 100.0):
        for nominal in (0.1, 1.0, 5.0, 20.0):
            budgets = compute_budgets(OME(nominal_epsilon=nominal, alpha=alpha).fit(public))
            found.append((budgets.published_correction < budgets.exact.per_vector, budgets.published_correction < 0))
    below, negative = np.mean(found, axis=0)
    assert below > 0.7
    assert negative > 0.5


@pytest.mark.parametrize("alpha", [1.0, 1.05, 0.95])
@pytest.mark.parametrize("pairs", ["strings", "code words"])
def test_epsilon_is_the_exact_one(rows: Floats, alpha: float, pairs: str) -> None:
    release = OME(9.0, alpha=alpha, pairs=pairs).fit(rows[:, :6])  # type: ignore[arg-type]
    assert 9.0 * (1 - 1e-6) <= release.guarantee.epsilon <= 9.0
    budgets = compute_budgets(release)
    price = budgets.exact if pairs == "strings" else budgets.code_word_bound
    assert price.per_vector == release.guarantee.epsilon


def test_where_no_nominal_epsilon_exists_the_error_says_what_is_reachable(rows: Floats) -> None:
    floor = 22 * math.log(1.5**3 - 1.5**2 + 1.5)
    with pytest.raises(ValueError, match=f"epsilon must be at least {floor:.6g} for OME") as caught:
        OME(8.0, alpha=1.5).fit(rows[:, :4])
    assert "alpha closer to 1" in str(caught.value)
    reached = OME(floor + 0.01, alpha=1.5).fit(rows[:, :4])
    assert reached.guarantee.epsilon == pytest.approx(floor + 0.01, rel=1e-6)
    assert reached.nominal_epsilon_ > 2 * math.log(1.5) * 44


def test_a_code_needs_a_magnitude(rows: Floats) -> None:
    with pytest.raises(ValueError, match="integer_bits \\+ fraction_bits must be from 1"):
        OME(1.0, integer_bits=0, fraction_bits=0).fit(rows)
    with pytest.raises(ValueError, match="'alpha' parameter"):
        OME(1.0, alpha=None).fit(rows)  # type: ignore[arg-type]


def test_nothing_is_clipped_by_eleven_bits(rows: Floats) -> None:
    release = OME(nominal_epsilon=10.0, alpha=100.0).fit(rows)
    assert release.measure_clipping(rows) == 0.0
    assert OME(1.0, integer_bits=0).fit(np.eye(3)).measure_clipping(np.eye(3)) == 0.0
    assert OME(1.0, integer_bits=0, scale=3.0).fit(rows[:, :2]).measure_clipping(rows[:, :2]) > 0.5
