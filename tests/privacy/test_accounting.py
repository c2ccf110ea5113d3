"""Accountants: one suite that all inherit, the test vectors, and attacks on every bound."""

import math
from collections.abc import Callable
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    NonPrivateDpEvent,
    NoOpDpEvent,
    PoissonSampledDpEvent,
    RandomizedResponseDpEvent,
    SelfComposedDpEvent,
    UnsupportedDpEvent,
    UnsupportedEventError,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr
from scipy.stats import binom

from nearveil.privacy.accounting import (
    FILTER_ORDERS,
    LIBRARY_ROUNDING,
    Accountant,
    AdditionAccountant,
    BudgetExceededError,
    PldAccountant,
    RdpAccountant,
    RenyiFilter,
    calibrate,
    screening_curve,
)
from nearveil.privacy.accounting.binary import compute_binary_rdp
from nearveil.privacy.events import (
    ClippedVotes,
    GaussianNoisyMax,
    LaplaceNoisyMax,
    NoisyScreening,
    PureDp,
    VoteHistogram,
    split_event,
)
from studies.accounting import compute_private_knn_asymptotic

SCREENING = NoisyScreening(noise=20.0, threshold=30.0, n_neighbors=50)
EVENTS: list[DpEvent] = [
    GaussianDpEvent(5.0),
    LaplaceDpEvent(4.0),
    PureDp(0.3),
    SCREENING,
    VoteHistogram(9.0),
    ClippedVotes(20.0, 3.0, "binary"),
    GaussianNoisyMax(15.0),
    LaplaceNoisyMax(12.0),
    PoissonSampledDpEvent(0.2, GaussianDpEvent(2.0)),
    PoissonSampledDpEvent(0.2, VoteHistogram(3.0)),
    PoissonSampledDpEvent(0.2, SCREENING),
    PoissonSampledDpEvent(0.2, PureDp(1.0)),
    PoissonSampledDpEvent(0.2, ComposedDpEvent([SCREENING, VoteHistogram(9.0)])),
]


def gaussian_delta(multiplier: float, epsilon: float) -> float:
    """The exact delta of the Gaussian mechanism (Balle and Wang 2018)."""
    half = 0.5 / multiplier
    return float(ndtr(half - epsilon * multiplier) - math.exp(epsilon) * ndtr(-half - epsilon * multiplier))


def randomised_response_epsilon(epsilon: float, count: int, delta: float) -> float:
    """The exact epsilon of repeated randomised response on one bit."""
    yes, k = 1 / (1 + math.exp(-epsilon)), np.arange(count + 1)
    log_p, log_q = binom.logpmf(k, count, yes), binom.logpmf(k, count, 1 - yes)
    gap = lambda e: np.sum(np.maximum(np.exp(log_p) - np.exp(e + log_q), 0)) - delta  # noqa: E731
    return float(brentq(gap, 0, count * epsilon + 1, xtol=1e-12))


class AccountantContract:
    """What every accountant must do; subclasses say which one."""

    def make(self) -> Accountant:
        raise NotImplementedError

    def test_nothing_costs_nothing(self) -> None:
        for accountant in (self.make(), self.make().compose(NoOpDpEvent()), self.make().compose(PureDp(1.0), 0)):
            assert accountant.epsilon(1e-5) == 0
            assert accountant.delta(0.5) == 0
            assert accountant.spent == ()

    def test_what_is_not_private_costs_everything(self) -> None:
        accountant = self.make().compose(PureDp(0.1)).compose(NonPrivateDpEvent())
        assert accountant.epsilon(1e-5) == math.inf
        assert accountant.delta(3.0) == 1

    @pytest.mark.parametrize("event", EVENTS, ids=str)
    def test_every_event_has_a_price(self, event: DpEvent) -> None:
        accountant = self.make()
        assert accountant.supports(event)
        assert accountant.spent == ()
        once, often = accountant.copy().compose(event), accountant.copy().compose(event, 20)
        assert 0 <= once.epsilon(1e-6) < often.epsilon(1e-6) < math.inf
        assert once.epsilon(1e-3) <= once.epsilon(1e-6)

    @pytest.mark.parametrize("event", [UnsupportedDpEvent(), PoissonSampledDpEvent(0.5, UnsupportedDpEvent())], ids=str)
    def test_the_unknown_is_refused_and_leaves_no_trace(self, event: DpEvent) -> None:
        accountant = self.make().compose(PureDp(0.1))
        before = accountant.spent
        inside = ComposedDpEvent([PureDp(1.0), SelfComposedDpEvent(event, 2)])
        for refused in (event, inside):
            assert not accountant.supports(refused)
            with pytest.raises(UnsupportedEventError, match="cannot price"):
                accountant.compose(refused)
        assert accountant.spent == before

    def test_compose_changes_the_accountant_and_copies_are_apart(self) -> None:
        accountant = self.make()
        accountant.compose(GaussianDpEvent(5.0))
        first, other = accountant.epsilon(1e-5), accountant.copy()
        other.compose(GaussianDpEvent(5.0))
        assert first > 0
        assert accountant.epsilon(1e-5) == first < other.epsilon(1e-5)
        accountant.compose(GaussianDpEvent(5.0))
        assert accountant.epsilon(1e-5) == other.epsilon(1e-5)

    def test_nesting_and_order_do_not_matter(self) -> None:
        a, b = GaussianDpEvent(6.0), PureDp(0.2)
        ways = [
            self.make().compose(a, 4).compose(b, 6),
            self.make().compose(b).compose(SelfComposedDpEvent(a, 4)).compose(b, 5),
            self.make().compose(SelfComposedDpEvent(ComposedDpEvent([a, b, NoOpDpEvent(), a, b, b]), 2)),
        ]
        assert [way.epsilon(1e-5) for way in ways] == pytest.approx([ways[0].epsilon(1e-5)] * 3, rel=1e-9)

    def test_epsilon_and_delta_agree(self) -> None:
        accountant = self.make().compose(GaussianDpEvent(4.0), 3).compose(PureDp(0.1), 5)
        for delta in (1e-3, 1e-6):
            epsilon = accountant.epsilon(delta)
            assert accountant.delta(epsilon) == pytest.approx(delta, rel=1e-2)

    @pytest.mark.parametrize(("multiplier", "count"), [(1.0, 1), (5.0, 20), (30.0, 1000)])
    def test_never_below_the_exact_gaussian(self, multiplier: float, count: int) -> None:
        epsilon = self.make().compose(GaussianDpEvent(multiplier), count).epsilon(1e-5)
        assert gaussian_delta(multiplier / math.sqrt(count), epsilon) <= 1e-5

    @pytest.mark.parametrize(("epsilon", "count"), [(0.5, 500), (0.05, 200), (2.0, 3)])
    def test_never_below_exact_randomised_response(self, epsilon: float, count: int) -> None:
        exact = randomised_response_epsilon(epsilon, count, 1e-5)
        share = 2 / (1 + math.exp(epsilon))  # dp-accounting's parameter: how often the answer is a coin
        for event in (PureDp(epsilon), RandomizedResponseDpEvent(share, 2)):
            assert self.make().compose(event, count).epsilon(1e-5) >= exact

    def test_bad_numbers_are_named(self) -> None:
        accountant = self.make()
        for delta in (0.0, 1.0, -1e-5, math.nan, None):
            with pytest.raises(ValueError, match=r"^delta must"):
                accountant.epsilon(delta)  # type: ignore[arg-type]
        for epsilon in (-0.1, math.nan, math.inf, 1e6):
            with pytest.raises(ValueError, match=r"^epsilon must"):
                accountant.delta(epsilon)
        for count in (-1, 0.5, math.nan):
            with pytest.raises(ValueError, match=r"^count must"):
                accountant.compose(PureDp(1.0), count)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"^count must"):
            accountant.compose(SelfComposedDpEvent(PureDp(1.0), -1))
        for event in (GaussianDpEvent(0.0), LaplaceDpEvent(math.nan)):
            with pytest.raises(ValueError, match=r"^noise_multiplier must"):
                accountant.compose(event)
        for rate in (-0.1, 1.1, math.nan):
            with pytest.raises(ValueError, match=r"^sampling_probability must"):
                accountant.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(1.0)))
        with pytest.raises(TypeError, match="event must be a DpEvent"):
            accountant.compose("gaussian")


class TestRdp(AccountantContract):
    def make(self) -> Accountant:
        return RdpAccountant()


class TestRdpClassic(AccountantContract):
    def make(self) -> Accountant:
        return RdpAccountant(conversion="classic")


class TestPld(AccountantContract):
    def make(self) -> Accountant:
        return PldAccountant()


class TestAddition(AccountantContract):
    def make(self) -> Accountant:
        return AdditionAccountant()


def sampled(rate: float, noise: float, sensitivity: float = 1.0) -> DpEvent:
    return PoissonSampledDpEvent(rate, GaussianDpEvent(noise / sensitivity))


def test_vectors_1_to_3_published_and_tight() -> None:
    at_21 = RdpAccountant(orders=(21,), conversion="classic").compose(sampled(0.15, 75))
    assert at_21.rdp[0] - LIBRARY_ROUNDING == pytest.approx(4.2021751210993e-5, rel=1e-12)
    votes = RdpAccountant(orders=(21,)).compose(PoissonSampledDpEvent(0.15, VoteHistogram(25)))
    assert votes.rdp[0] - LIBRARY_ROUNDING == pytest.approx(7.63124836531632e-4, rel=1e-12)
    at_21.compose(sampled(0.15, 75), 999).compose(PoissonSampledDpEvent(0.15, VoteHistogram(25)), 735)
    assert at_21.epsilon(1e-5) - 1735 * LIBRARY_ROUNDING == pytest.approx(1.17856477931025, rel=1e-13)
    tight = RdpAccountant(orders=(18,)).compose(sampled(0.15, 75), 1000)
    tight.compose(PoissonSampledDpEvent(0.15, VoteHistogram(25)), 735)
    assert tight.epsilon(1e-5) - 1735 * LIBRARY_ROUNDING == pytest.approx(0.966239486641195, rel=1e-13)
    assert RdpAccountant(spent=tight.spent).epsilon(1e-5) == pytest.approx(0.966239, abs=1e-6)


def test_vector_9_gaussian_by_pld() -> None:
    mnist = (
        PldAccountant().compose(sampled(0.15, 75), 1000).compose(PoissonSampledDpEvent(0.15, VoteHistogram(25)), 735)
    )
    assert 0.88332541 <= mnist.epsilon(1e-5) <= 0.88332541 + 1e-4
    assert 0.99265172 <= PldAccountant().compose(sampled(0.25, 85), 8192).epsilon(1e-5) <= 0.99265172 + 1e-4


def test_screenings_by_bellman_and_votes_by_pld() -> None:
    screening = NoisyScreening(noise=75, threshold=180, n_neighbors=300)
    alone = PldAccountant().compose(PoissonSampledDpEvent(0.15, screening), 1000)
    screening = NoisyScreening(noise=75, threshold=180, n_neighbors=300)
    curve = screening_curve(1000, screening, sampling_rate=0.15).epsilon(1e-5)
    assert curve <= alone.epsilon(1e-5) <= curve + 1e-5
    alone.compose(PoissonSampledDpEvent(0.15, VoteHistogram(25)), 735)
    assert 0.871 <= alone.epsilon(1e-5) <= 0.871049 + 1e-3
    rdp = RdpAccountant(spent=alone.spent).epsilon(1e-5)
    assert alone.epsilon(1e-5) < rdp < 0.966


def test_the_published_noise_would_have_to_be_three_times_as_large() -> None:
    screening = RdpAccountant(conversion="classic").compose(sampled(0.15, 75), 1000)

    def votes(noise: float) -> DpEvent:
        return SelfComposedDpEvent(PoissonSampledDpEvent(0.15, VoteHistogram(noise)), 735)

    noise = calibrate(0.47, votes, delta=1e-5, bracket=(25, 200), accountant=screening)
    assert noise == pytest.approx(78.4, abs=0.05)
    assert PldAccountant().compose(sampled(0.15, 75), 1000).compose(votes(78.4)).epsilon(1e-5) == pytest.approx(
        0.329, abs=1e-3
    )


def test_addition_shares_delta() -> None:
    pair = AdditionAccountant().compose(GaussianDpEvent(2.0), 2)
    assert pair.epsilon(1e-5) == pytest.approx(2 * PldAccountant().compose(GaussianDpEvent(2.0)).epsilon(5e-6))
    assert AdditionAccountant().compose(PureDp(0.5), 500).epsilon(1e-5) == 250


def test_pure_epsilons_never_cost_more_than_their_sum() -> None:
    assert PldAccountant().compose(PureDp(3000.0)).epsilon(1e-5) == 3000
    assert PldAccountant().compose(PureDp(1.0)).compose(LaplaceDpEvent(2.0)).epsilon(1e-9) <= 1.5
    assert PldAccountant().compose(PureDp(1.0)).delta(1.0) == 0


def test_the_library_forgets_a_count_and_we_do_not() -> None:
    event = RandomizedResponseDpEvent(0.5, 2)
    library = dp.pld.PLDAccountant(dp.NeighboringRelation.REPLACE_ONE).compose(event, 50)
    ours = PldAccountant().compose(event, 50)
    exact = randomised_response_epsilon(math.log(3), 50, 1e-5)
    assert library.get_epsilon(1e-5) < 1.2 < exact <= ours.epsilon(1e-5) < exact * 1.01


def test_one_sample_for_screening_and_votes_is_amplified_as_one() -> None:
    shared = PoissonSampledDpEvent(0.1, ComposedDpEvent([NoisyScreening(8.0, 30, 50), VoteHistogram(6.0)]))
    [(leaf, times)] = split_event(shared, 3)
    assert (times, leaf.sampling_probability) == (3, 0.1)
    assert leaf.event.noise_multiplier**-2 == pytest.approx(8.0**-2 + 2 * 6.0**-2)
    fresh = ComposedDpEvent([PoissonSampledDpEvent(0.1, e) for e in shared.event.events])
    assert PldAccountant().compose(shared, 50).epsilon(1e-6) > PldAccountant().compose(fresh, 50).epsilon(1e-6)


def test_repetitions_on_one_sample_are_amplified_together() -> None:
    """Ten answers from one sample are one answer with a tenth of the variance, on one sample."""
    often = PoissonSampledDpEvent(0.1, SelfComposedDpEvent(GaussianDpEvent(10.0), 10))
    once = PoissonSampledDpEvent(0.1, GaussianDpEvent(10.0 / math.sqrt(10)))
    for accountant in (RdpAccountant, PldAccountant):
        costs = [accountant().compose(event).epsilon(1e-5) for event in (often, once)]
        assert costs[1] <= costs[0] <= costs[1] * (1 + 1e-9)


def test_repetitions_of_repetitions_multiply() -> None:
    inner = ComposedDpEvent([SelfComposedDpEvent(GaussianDpEvent(20.0), 3), PureDp(0.1)])
    spent = RdpAccountant().compose(SelfComposedDpEvent(inner, 5), 2).spent
    assert spent == ((GaussianDpEvent(20.0), 30), (PureDp(0.1), 10))


def test_sampling_of_pure_and_of_samples() -> None:
    for epsilon in (0.01, 0.9, 1.1, 1000.0):
        [(leaf, _)] = split_event(PoissonSampledDpEvent(0.25, PureDp(epsilon)))
        expected = math.log1p(0.25 * math.expm1(epsilon)) if epsilon < 700 else epsilon + math.log(0.25)
        assert leaf.epsilon == pytest.approx(expected, rel=1e-12)
    twice = split_event(PoissonSampledDpEvent(0.5, PoissonSampledDpEvent(0.4, SCREENING)))
    assert twice == split_event(PoissonSampledDpEvent(0.2, SCREENING))
    assert split_event(PoissonSampledDpEvent(0.0, SCREENING)) == []
    assert split_event(PoissonSampledDpEvent(1.0, SCREENING)) == split_event(SCREENING)


def test_events_are_frozen_and_travel_as_named_tuples() -> None:
    events: list[Any] = [SCREENING, PureDp(1.0), VoteHistogram(2.0)]
    for event in events:
        assert DpEvent.from_named_tuple(event.to_named_tuple()) == event
        with pytest.raises(AttributeError):
            event.noise = 1.0


def clip(votes: Any, tau: float) -> Any:
    return votes * np.minimum(tau / np.maximum(np.sum(np.abs(votes), axis=-1, keepdims=True), 1e-300), 1)


@pytest.mark.parametrize("tau", [0.5, 1.0, 2.0, 2.5, 4.0])
@pytest.mark.parametrize("kind", ["binary", "nonnegative", "signed"])
def test_clipped_votes_no_pair_of_neighbours_moves_the_sum_further(kind: Any, tau: float) -> None:
    rng = np.random.default_rng(0)
    shape = (20000, 10)
    kinds: dict[str, Callable[[], Any]] = {
        "binary": lambda: (rng.random(shape) < rng.random((shape[0], 1))).astype(float),
        "nonnegative": lambda: 3 * tau * rng.random(shape) ** 12,
        "signed": lambda: 3 * tau * rng.random(shape) ** 12 * rng.choice([-1, 1], shape),
    }
    enters, leaves_ = kinds[kind](), kinds[kind]()
    if kind != "binary":  # the corners: all on one label
        enters[:2], leaves_[:2] = np.eye(10)[:2] * 5 * tau, np.eye(10)[2:4] * 5 * tau
        if kind == "signed":
            leaves_[:2] = -enters[:2]
    largest = float(np.max(np.linalg.norm(clip(enters, tau) - clip(leaves_, tau), axis=1)))
    bound = ClippedVotes(1.0, tau, kind).sensitivity
    assert largest <= bound * (1 + 1e-12)
    assert largest >= bound * (0.8 if tau == 2.5 else 0.999)


def test_clipped_votes_cost_what_the_supplement_says_for_binary_votes_only() -> None:
    orders, tau, noise = (2.0, 10.0, 50.0), 3.0, 20.0
    costs = {
        kind: RdpAccountant(orders=orders).compose(ClippedVotes(noise, tau, kind)).rdp
        for kind in ("binary", "nonnegative", "signed")
    }
    assert costs["binary"] == pytest.approx(np.array(orders) * tau / noise**2)
    assert costs["nonnegative"] == pytest.approx(np.array(orders) * tau**2 / noise**2)
    assert costs["signed"] == pytest.approx(np.array(orders) * 2 * tau**2 / noise**2)


@given(order=st.floats(1.5, 60), noise=st.floats(1, 60), lead=st.integers(0, 300))
@settings(max_examples=150, deadline=None)
def test_gaussian_noisy_max_with_two_classes_stays_below_its_price(order: float, noise: float, lead: int) -> None:
    here = np.array([[lead / (math.sqrt(2) * noise)]])
    log_p = np.concatenate([log_ndtr(here), log_ndtr(-here)])
    for step in (-2, 2):
        there = np.array([[(lead + step) / (math.sqrt(2) * noise)]])
        log_q = np.concatenate([log_ndtr(there), log_ndtr(-there)])
        true = float(compute_binary_rdp(order, log_p, log_q)[0])
        assert true <= RdpAccountant(orders=(order,)).compose(GaussianNoisyMax(noise)).rdp[0]


@given(order=st.floats(1.5, 60), noise=st.floats(0.5, 60), lead=st.integers(2, 300))
@settings(max_examples=150, deadline=None)
def test_laplace_noisy_max_with_two_classes_stays_below_its_price(order: float, noise: float, lead: int) -> None:
    def logs(margin: float) -> Any:
        loses = (2 + margin / noise) / 4 * math.exp(-margin / noise)
        return np.log(np.array([[-math.expm1(math.log(loses))], [loses]]))

    for step in (-2, 2):
        true = float(compute_binary_rdp(order, logs(lead), logs(lead + step))[0])
        assert true <= RdpAccountant(orders=(order,)).compose(LaplaceNoisyMax(noise)).rdp[0]


@pytest.fixture
def bank() -> Any:
    """autodp's formulas, where they are right (its noisy screening looks at two max-votes and keeps the last)."""
    return pytest.importorskip("autodp.rdp_bank", reason="autodp does not import here", exc_type=ImportError)


def test_autodp_agrees(bank: Any) -> None:
    for order in (2.0, 7.5, 40.0):

        def ours(event: DpEvent, order: float = order) -> float:
            return float(RdpAccountant(orders=(order,)).compose(event).rdp[0])

        assert ours(GaussianDpEvent(3.0)) == pytest.approx(bank.RDP_gaussian({"sigma": 3.0}, order), rel=1e-12)
        assert ours(LaplaceDpEvent(3.0)) == pytest.approx(bank.RDP_laplace({"b": 3.0}, order), rel=1e-9)
        assert ours(PureDp(0.7)) == pytest.approx(bank.RDP_pureDP({"eps": 0.7}, order), rel=1e-9)
        assert ours(GaussianNoisyMax(9.0)) == pytest.approx(bank.RDP_inde_pate_gaussian({"sigma": 9.0}, order))


def test_theorem_2_published_and_right() -> None:
    plan: Any = {"sampling_rate": 0.05, "noise": 10.0, "vote_noise": 10.0, "delta": 1e-5}
    ours = compute_private_knn_asymptotic(4000, 500, **plan)
    published = compute_private_knn_asymptotic(4000, 500, **plan, as_published=True)
    assert ours.applies
    assert published.applies
    assert published.epsilon / ours.epsilon == pytest.approx(20 / 13.8564, rel=1e-5)
    exact = (
        PldAccountant().compose(sampled(0.05, 10), 4000).compose(PoissonSampledDpEvent(0.05, VoteHistogram(10)), 500)
    )
    assert 10 < ours.epsilon / exact.epsilon(1e-5) < 30
    assert not compute_private_knn_asymptotic(
        1000, 735, sampling_rate=0.15, noise=75, vote_noise=25, delta=1e-5
    ).applies
    assert not compute_private_knn_asymptotic(10, 5, **plan).applies


def test_calibrate_rounds_against_the_spender() -> None:
    noise = calibrate(1.0, GaussianDpEvent, delta=1e-5, bracket=(0.5, 50))
    assert noise == pytest.approx(3.730632, abs=1e-4)
    assert PldAccountant().compose(GaussianDpEvent(noise)).epsilon(1e-5) <= 1.0

    def answers(n: float) -> DpEvent:
        return SelfComposedDpEvent(PureDp(0.1), int(n))

    count = calibrate(2.0, answers, delta=1e-6, bracket=(1, 2000), integer=True)
    cost = [PldAccountant().compose(answers(count + more)).epsilon(1e-6) for more in (0, 1)]
    assert cost[0] <= 2.0 < cost[1]

    def sample(rate: float) -> DpEvent:
        return SelfComposedDpEvent(PoissonSampledDpEvent(rate, SCREENING), 50)

    rate = calibrate(0.5, sample, delta=1e-6, bracket=(0.01, 1), accountant=RdpAccountant())
    cost = [RdpAccountant().compose(sample(rate * more)).epsilon(1e-6) for more in (1, 1.001)]
    assert cost[0] <= 0.5 < cost[1]


def test_calibrate_starts_where_the_accountant_stands() -> None:
    before = RdpAccountant().compose(GaussianDpEvent(8.0), 4)
    noise = calibrate(1.5, GaussianDpEvent, delta=1e-5, bracket=(0.5, 100), accountant=before)
    assert before.spent == ((GaussianDpEvent(8.0), 4),)
    assert before.copy().compose(GaussianDpEvent(noise)).epsilon(1e-5) <= 1.5
    assert before.copy().compose(GaussianDpEvent(noise * 0.999)).epsilon(1e-5) > 1.5


def test_calibrate_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="bracket must hold"):
        calibrate(1.0, GaussianDpEvent, delta=1e-5, bracket=(10, 50))
    with pytest.raises(ValueError, match="target_epsilon must"):
        calibrate(1e7, GaussianDpEvent, delta=1e-5, bracket=(1, 50))
    with pytest.raises(ValueError, match="target_epsilon must"):
        calibrate(0.0, GaussianDpEvent, delta=1e-5, bracket=(1, 50))
    with pytest.raises(ValueError, match="delta must"):
        calibrate(1.0, GaussianDpEvent, delta=0.0, bracket=(1, 50))
    with pytest.raises(ValueError, match="bracket must"):
        calibrate(1.0, GaussianDpEvent, delta=1e-5, bracket=(1, math.nan))


def test_the_filter_stops_in_time() -> None:
    gate, spent = RenyiFilter(1.0, 1e-5), 0
    while gate.may_spend(GaussianDpEvent(20.0)):
        gate.spend(GaussianDpEvent(20.0))
        spent += 1
    before = gate.spent
    with pytest.raises(BudgetExceededError, match="release nothing"):
        gate.spend(GaussianDpEvent(20.0))
    assert gate.spent == before == ((GaussianDpEvent(20.0), spent),)
    # The union over 8 orders costs something, and not much: 19 of 27 that a fixed plan could have.
    assert gaussian_delta(20 / math.sqrt(spent), 1.0) <= 1e-5
    best = max(n for n in range(1, 60) if gaussian_delta(20 / math.sqrt(n), 1.0) <= 1e-5)
    assert 0.5 * best < spent < best


def test_a_filter_covers_many_at_once_or_none() -> None:
    gate = RenyiFilter(1.0, 1e-5)
    assert gate.may_spend(GaussianDpEvent(20.0))
    assert not gate.may_spend(GaussianDpEvent(20.0), 1000)
    with pytest.raises(BudgetExceededError):
        gate.spend(GaussianDpEvent(20.0), 1000)
    assert gate.spent == ()


def test_no_adaptive_adversary_beats_the_filter() -> None:
    """After every answer the adversary picks which randomised response to ask next; all histories, exactly."""
    epsilon, delta, orders, menu = 1.0, 0.05, (2.0, 8.0), (0.15, 0.3, 0.45)
    costs = {e: RdpAccountant(orders=orders).compose(PureDp(e)).rdp for e in menu}
    budget = np.array(RenyiFilter(epsilon, delta, orders).budgets)

    def value(a: float, left: Any, rounds: int) -> float:
        best = max(1 - a, 0.0)
        for e in menu:
            rest = left - costs[e]
            if rounds and np.any(rest >= 0):
                yes = 1 / (1 + math.exp(-e))
                expected = yes * value(a * math.exp(-e), rest, rounds - 1)
                best = max(best, expected + (1 - yes) * value(a * math.exp(e), rest, rounds - 1))
        return best

    leak = value(math.exp(epsilon), budget, 7)
    assert 0 < leak <= delta
    assert value(math.exp(epsilon), 4 * budget, 7) > leak


@pytest.mark.parametrize("orders", [(2.0, 8.0), (8.0,), FILTER_ORDERS])
def test_the_orders_of_a_filter_share_its_delta(orders: tuple[float, ...]) -> None:
    """By Theorem 1 each order turns its budget into a delta; together they are the promise, neither more nor less."""
    gate = RenyiFilter(1.5, 1e-4, orders)
    deltas = [
        (1 - 1 / alpha) ** (alpha - 1) / alpha * math.exp((alpha - 1) * (budget - 1.5))
        for alpha, budget in zip(gate.orders, gate.budgets, strict=True)
    ]
    assert sum(deltas) == pytest.approx(1e-4, rel=1e-9)
    assert max(deltas) == pytest.approx(min(deltas), rel=1e-9)


def test_the_filter_refuses_nonsense() -> None:
    for epsilon in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="epsilon must"):
            RenyiFilter(epsilon, 1e-5)
    for delta in (0.0, 1.0, math.nan):
        with pytest.raises(ValueError, match="delta must"):
            RenyiFilter(1.0, delta)
    with pytest.raises(ValueError, match="orders are too small"):
        RenyiFilter(0.01, 1e-5, orders=(2.0,))
    with pytest.raises(ValueError, match="orders must"):
        RenyiFilter(1.0, 1e-5, orders=(1.0,))


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: PureDp(-0.1), "epsilon"),
        (lambda: PureDp(math.inf), "epsilon"),
        (lambda: NoisyScreening(0.0, 1.0, 3), "noise"),
        (lambda: NoisyScreening(1.0, math.nan, 3), "threshold"),
        (lambda: NoisyScreening(1.0, 1.0, 0), "n_neighbors"),
        (lambda: VoteHistogram(-1.0), "noise"),
        (lambda: ClippedVotes(1.0, 0.0), "clip"),
        (lambda: ClippedVotes(math.nan, 1.0), "noise"),
        (lambda: ClippedVotes(1.0, 1.0, "ternary"), "votes"),  # type: ignore[arg-type]
        (lambda: GaussianNoisyMax(0.0), "noise"),
        (lambda: LaplaceNoisyMax(math.inf), "noise"),
        (lambda: RdpAccountant(orders=()), "orders"),
        (lambda: RdpAccountant(orders=(0.5,)), "orders"),
        (lambda: RdpAccountant(conversion="loose"), "conversion"),  # type: ignore[arg-type]
        (
            lambda: compute_private_knn_asymptotic(-1, 0, sampling_rate=0.1, noise=1, vote_noise=1, delta=0.1),
            "n_screened",
        ),
    ],
)
def test_bad_parameters_are_named(make: Callable[[], Any], field: str) -> None:
    with pytest.raises(ValueError, match=rf"^{field} must"):
        make()


@pytest.mark.parametrize(
    ("event", "count", "least"),
    [
        (dp.PoissonSampledDpEvent(0.30323446194999565, dp.GaussianDpEvent(50212083.92265192)), 2**62, 50.0),
        (dp.PoissonSampledDpEvent(0.06072948305952279, dp.GaussianDpEvent(34486732.21684461)), 866010516915910656, 7.0),
        (dp.RandomizedResponseDpEvent(0.9999999999642936, 1720), 171609984421775360, 3.0),
    ],
)
def test_divergences_below_the_rounding_of_the_library_are_not_free(
    event: dp.DpEvent, count: int, least: float
) -> None:
    """The lower ends are estimates by the central limit theorem; a curve of rounding errors would say 0 or 1."""
    assert RdpAccountant().compose(event, count).epsilon(1e-5) > least
    assert not RenyiFilter(1.0, 1e-5).may_spend(event, count)


def test_counts_are_not_rounded() -> None:
    assert AdditionAccountant().compose(PureDp(1.0), 2**53 + 1).spent == ((PureDp(1.0), 2**53 + 1),)


@pytest.mark.parametrize("event", [GaussianDpEvent(1e-3), PoissonSampledDpEvent(0.15, GaussianDpEvent(1e-3))])
def test_hardly_any_noise_promises_nothing_and_needs_no_memory(event: DpEvent) -> None:
    accountant = PldAccountant().compose(event, 100)
    assert accountant.epsilon(1e-5) == math.inf
    assert accountant.delta(10.0) == 1.0
