"""The price of a message that names sets: the exact law, attacked by brute force and by servers that choose the map."""

import ast
import itertools
import math
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

import dp_accounting as dp
import mpmath
import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, RandomizedResponseDpEvent
from dp_accounting.pld import privacy_loss_distribution as pld
from hypothesis import given, settings
from hypothesis import strategies as st

import nearveil
from nearveil.ledger.budget import find_pld_epsilon, make_charge
from nearveil.mechanisms.covers.channels import RandomizedResponse
from nearveil.privacy.accounting import (
    DEFAULT_ORDERS,
    PldAccountant,
    RdpAccountant,
    RenyiFilter,
    calibrate,
    make_loss_curves,
)
from nearveil.privacy.events import NamedSets, PureDp
from nearveil.privacy.noise import secure_source
from studies.baselines.cells import SubsetSelection

WORDS = 1 << 64
channels = st.one_of(
    st.builds(RandomizedResponse, st.floats(1e-3, 12), st.integers(2, 24)),
    st.builds(SubsetSelection, st.floats(1e-3, 12), st.integers(4, 6), st.integers(1, 3)),
)


def law(channel: RandomizedResponse | SubsetSelection, good: int) -> dict[tuple[int, ...], Fraction]:
    """Return the exact probability of each message, from the words that the sampler compares."""
    subsets = list(itertools.combinations(range(channel.n_sets), channel.size))
    hits = Fraction(
        channel._threshold if isinstance(channel, SubsetSelection) else WORDS - (channel.n_sets - 1) * channel._miss,
        WORDS,
    )
    n_good = sum(good in subset for subset in subsets)
    return {each: hits / n_good if good in each else (1 - hits) / (len(subsets) - n_good) for each in subsets}


def exact(number: Fraction) -> mpmath.mpf:
    return mpmath.mpf(number.numerator) / number.denominator


def divergence(p: dict[Any, Fraction], q: dict[Any, Fraction], a: float) -> float:
    return float(sum(max(p[message] - Fraction(a) * q[message], Fraction(0)) for message in p))


@settings(deadline=None, max_examples=25)
@given(channels, st.floats(-1, 1))
def test_the_curve_is_that_of_the_words_that_are_drawn(channel: Any, share: float) -> None:
    """Theorem 10: never below the channel's own law, for any two good sets, and at most a rounding above it."""
    log = share * channel.epsilon
    curve = make_loss_curves(channel.event, 1).remove
    bound = float(curve(np.array([log]))[0]) + max(1 - math.exp(log), 0.0)
    worst = max(divergence(law(channel, 0), law(channel, other), math.exp(log)) for other in range(channel.n_sets))
    assert worst <= bound * (1 + 1e-12)  # the rounding of e^log above
    assert bound == pytest.approx(worst, rel=1e-9, abs=1e-11)


@settings(deadline=None, max_examples=25)
@given(channels, st.sampled_from(DEFAULT_ORDERS))
def test_the_divergence_is_that_of_the_words_that_are_drawn(channel: Any, order: float) -> None:
    p, q = law(channel, 0), law(channel, 1)
    with mpmath.workdps(60):
        ratios = {m: p[m] / q[m] for m in p}
        terms = (exact(p[m]) * exact(ratios[m]) ** (order - 1) for m in p)
        true = float(mpmath.log(mpmath.fsum(terms)) / (order - 1))
    price = RdpAccountant(orders=(order,)).compose(channel.event).rdp[0]
    assert true <= price * (1 + 1e-15)
    assert price == pytest.approx(true, rel=1e-8, abs=1e-12)


def test_two_sets_cost_as_any_pure_mechanism_and_more_sets_cost_less() -> None:
    for make in (PldAccountant, RdpAccountant):
        costs = [make().compose(NamedSets(1.0, k), 50).epsilon(1e-6) for k in (2, 3, 20, 60, 1000)]
        assert costs[0] == pytest.approx(make().compose(PureDp(1.0), 50).epsilon(1e-6), rel=1e-12)
        assert costs == sorted(costs, reverse=True)
    assert NamedSets(0.0, 9).exposure == pytest.approx(1 / 9)
    assert PldAccountant().compose(NamedSets(0.0, 9), 99).epsilon(1e-9) == 0
    assert PldAccountant().compose(NamedSets(1.0, 20)).epsilon(1e-12) <= 1.0
    assert max(RdpAccountant().compose(NamedSets(40.0, 2**20)).rdp) <= 40


@pytest.mark.parametrize(
    ("epsilon", "n_sets", "cost"),
    [
        (1.0, 2, 83.5307),
        (1.0, 20, 27.6713),
        (1.0, 60, 15.6791),
        (2.0, 2, 199.6064),
        (2.0, 20, 97.0346),
        (2.0, 60, 54.7284),
    ],
)
def test_a_hundred_messages(epsilon: float, n_sets: int, cost: float) -> None:
    """By PLD, and by an independent convolution of the exact law; the documentation has these figures."""
    ours = PldAccountant().compose(NamedSets(epsilon, n_sets), 100)
    assert ours.epsilon(1e-6) == pytest.approx(cost, abs=1e-4)
    up = NamedSets(epsilon, n_sets).exposure
    steps = np.zeros(201)
    steps[100] = 1.0
    for _ in range(100):
        steps = (
            up * np.roll(steps, 1)
            + up * math.exp(-epsilon) * np.roll(steps, -1)
            + (1 - up * (1 + math.exp(-epsilon))) * steps
        )
    losses = epsilon * np.arange(-100, 101)

    def delta(at: float) -> float:
        return float(np.sum(steps * np.maximum(-np.expm1(np.minimum(at - losses, 0)), 0)))

    assert delta(cost) == pytest.approx(1e-6, rel=1e-3)
    assert delta(ours.epsilon(1e-6)) <= 1e-6


@pytest.mark.parametrize(("n_sets", "size"), [(3, 1), (4, 1), (4, 2), (5, 3)])
def test_composition_is_exact(n_sets: int, size: int) -> None:
    """All transcripts of four messages by brute force: never below, and tight to rounding."""
    channel = SubsetSelection(0.8, n_sets, size) if size > 1 else RandomizedResponse(0.8, n_sets)
    p, q = law(channel, 0), law(channel, 1)
    accountant = PldAccountant().compose(channel.event, 4)
    for epsilon in (0.3, 1.1, 2.3):
        true = 0.0
        for transcript in itertools.product(p, repeat=4):
            true += max(
                float(math.prod(p[m] for m in transcript))
                - math.exp(epsilon) * float(math.prod(q[m] for m in transcript)),
                0,
            )
        assert true <= accountant.delta(epsilon) * (1 + 1e-12)
        assert accountant.delta(epsilon) == pytest.approx(true, rel=1e-4)
        assert accountant.delta(epsilon / 2) > true


MENU = tuple(NamedSets(1.0, k) for k in (2, 3, 8, 40))


def outcomes(event: NamedSets) -> Iterator[tuple[float, float]]:
    """Return each privacy loss with its probability."""
    up = event.exposure
    down = up * math.exp(-event.epsilon)
    yield from ((event.epsilon, up), (-event.epsilon, down), (0.0, 1 - up - down))


def test_no_server_that_adapts_the_number_of_sets_beats_the_filter() -> None:
    """After every message the server picks the sets of the next map, or stops: all histories, exactly."""
    epsilon, delta, orders = 2.0, 0.05, (2.0, 8.0)
    costs = [RdpAccountant(orders=orders).compose(event).rdp for event in MENU]
    budgets = np.array(RenyiFilter(epsilon, delta, orders).budgets)

    def play(loss: float, left: Any, rounds: int, epsilon: float) -> float:
        best = max(-math.expm1(epsilon - loss), 0.0)
        for event, cost in zip(MENU, costs, strict=True):
            if rounds and np.any(left - cost >= 0):
                best = max(
                    best, sum(p * play(loss + step, left - cost, rounds - 1, epsilon) for step, p in outcomes(event))
                )
        return best

    leak = play(0.0, budgets, 5, epsilon)
    assert 0 < leak <= delta
    assert play(0.0, 5 * budgets, 5, epsilon) > delta


@pytest.mark.parametrize("delta", [0.01, 0.1])
def test_a_plan_for_a_number_of_sets_pays_for_larger_maps(delta: float) -> None:
    """Each of five maps has at least three sets, as planned, and is chosen after the earlier messages, exactly."""
    plan = [(NamedSets(1.0, 3), 5)]
    cost = find_pld_epsilon(make_charge(plan, "replace"), delta)

    @lru_cache
    def play(steps: int, left: int, menu: tuple[NamedSets, ...], epsilon: float) -> float:
        best = max(-math.expm1(epsilon - steps), 0.0)
        if left:
            for event in menu:
                best = max(
                    best, sum(p * play(steps + round(step), left - 1, menu, epsilon) for step, p in outcomes(event))
                )
        return best

    assert 0.95 * delta <= play(0, 5, MENU[1:], cost) <= delta
    assert play(0, 5, MENU, cost) > delta  # a map with two sets is not in the plan


def test_the_renyi_filter_buys_149_questions_where_a_plan_has_178() -> None:
    gate, message = RenyiFilter(40.0, 1e-6), NamedSets(1.0, 20)
    assert [gate.may_spend(message, n) for n in (149, 150)] == [True, False]
    assert [gate.may_spend(PureDp(1.0), n) for n in (40, 41)] == [True, False]
    plans = [PldAccountant().compose(message, n).epsilon(1e-6) for n in (178, 179)]
    assert plans[0] <= 40 < plans[1]


def test_the_accountant_of_the_library_ignores_a_count() -> None:
    """100 questions at epsilon 1 with 20 sets: 1.00 by its accountant, 27.67 by its own composed distribution."""
    n_sets, count = 20, 100
    share = n_sets / (math.e + n_sets - 1)  # uniform answers
    event = RandomizedResponseDpEvent(share, n_sets)
    library = dp.pld.PLDAccountant(dp.NeighboringRelation.REPLACE_ONE).compose(event, count).get_epsilon(1e-6)
    composed = pld.from_randomized_response(share, n_sets).self_compose(count).get_epsilon_for_delta(1e-6)
    ours = [PldAccountant().compose(each, count).epsilon(1e-6) for each in (event, NamedSets(1.0, n_sets))]
    assert library == pytest.approx(1.0, abs=1e-3)
    assert composed == pytest.approx(27.67, abs=0.01)
    assert ours == pytest.approx([composed] * 2, abs=0.01)
    assert min(ours) >= 27.671


def test_the_accountant_of_the_library_is_out_of_reach() -> None:
    for library in (dp.pld.PLDAccountant(), dp.rdp.RdpAccountant()):
        with pytest.raises(TypeError, match="may lose counts"):
            calibrate(1.0, GaussianDpEvent, delta=1e-5, bracket=(1, 50), accountant=library)
    root = Path(nearveil.__file__).parent
    for path in (*root.rglob("*.py"), *(root.parents[1] / "studies").glob("*.py")):
        names = {getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(ast.parse(path.read_text()))}
        assert "PLDAccountant" not in names, path


@pytest.mark.parametrize(
    "fields", [(1.0, 1), (1.0, 2**20 + 1), (1.0, 2.5), (1.0, 4, 4), (1.0, 4, 0), (-1.0, 4), (math.inf, 4)]
)
def test_nonsense_is_refused(fields: Any) -> None:
    with pytest.raises(ValueError, match=r"n_sets|size|epsilon"):
        NamedSets(*fields)


def test_the_draws_follow_the_law_that_is_charged() -> None:
    """20,000 messages of a subset channel: the share of each kind of message is that of the event, 6 sigma."""
    channel, rows = SubsetSelection(1.5, 9, 3), 20_000
    sets = channel.sample(np.zeros(rows, np.int64), secure_source())
    exposed = float(np.mean((sets == 0).any(axis=1) & ~(sets == 4).any(axis=1)))
    expected = channel.event.exposure
    assert abs(exposed - expected) < 6 * math.sqrt(expected * (1 - expected) / rows)


def test_a_filter_by_privacy_loss_distributions_is_beaten() -> None:
    """Why accounts have none: every list of maps is within (2.5, 0.003) exactly, and the best strategy is not."""
    menu, epsilon, delta, rounds = (NamedSets(1.0, 4), NamedSets(1.0, 20)), 2.5, 0.003, 6

    @lru_cache
    def price(counts: tuple[int, ...]) -> float:
        return PldAccountant(tuple(part for part in zip(menu, counts, strict=True) if part[1])).delta(epsilon)

    @lru_cache
    def play(steps: int, counts: tuple[int, ...]) -> float:
        best = max(-math.expm1(epsilon - steps), 0.0)
        for number, event in enumerate(menu):
            after = tuple(count + (number == each) for each, count in enumerate(counts))
            if sum(after) <= rounds and price(after) <= delta:
                best = max(best, sum(p * play(steps + round(step), after) for step, p in outcomes(event)))
        return best

    assert play(0, (0, 0)) == pytest.approx(1.40 * delta, rel=0.01)
