"""The three kinds of budget, and the text of events: attacked as pure functions."""

import itertools
import json
import math
from fractions import Fraction
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting import DpEvent, GaussianDpEvent, LaplaceDpEvent
from hypothesis import given, settings
from hypothesis import strategies as st

from nearveil.ledger.budget import (
    UNITS,
    Budget,
    FilterBudget,
    PlanBudget,
    PureBudget,
    UnpricedError,
    add_amounts,
    find_pld_epsilon,
    format_down,
    format_event,
    format_up,
    make_charge,
    parse_budget,
    parse_event,
    round_float_down,
    round_float_up,
    round_units_down,
    round_units_up,
    to_exact_decimal,
)
from nearveil.privacy import events as own
from nearveil.privacy.accounting import RdpAccountant, RenyiFilter
from nearveil.privacy.events import PureDp, SampledScreening, split_event

positive = st.floats(1e-6, 1e6)
counts = st.integers(1, 10**6)
screenings = st.builds(own.NoisyScreening, positive, st.floats(-1e6, 1e6), st.integers(1, 1000))
singles = st.one_of(
    st.builds(dp.NoOpDpEvent),
    st.builds(dp.NonPrivateDpEvent),
    st.builds(GaussianDpEvent, positive),
    st.builds(LaplaceDpEvent, positive),
    st.builds(dp.RandomizedResponseDpEvent, st.floats(0, 1), st.integers(2, 99)),
    st.builds(dp.ZCDpEvent, positive, st.floats(0, 1)),
    st.builds(PureDp, st.floats(0, 50)),
    screenings,
    st.builds(own.VoteHistogram, positive),
    st.builds(own.ClippedVotes, positive, positive, st.sampled_from(["binary", "nonnegative", "signed"])),
    st.builds(own.GaussianNoisyMax, positive),
    st.builds(own.LaplaceNoisyMax, positive),
    st.builds(SampledScreening, st.floats(0.01, 1), screenings),
)
all_events = st.recursive(
    singles,
    lambda inner: st.one_of(
        st.builds(dp.ComposedDpEvent, st.lists(inner, max_size=3)),
        st.builds(dp.SelfComposedDpEvent, inner, counts),
        st.builds(dp.PoissonSampledDpEvent, st.floats(0, 1), inner),
        st.builds(dp.dp_event.RepeatAndSelectDpEvent, inner, positive, st.floats(-1, 9)),
    ),
    max_leaves=5,
)


@given(all_events)
def test_the_text_of_an_event_is_the_event(event: DpEvent) -> None:
    text = format_event(event)
    assert parse_event(text) == event
    assert format_event(parse_event(text)) == text
    assert json.loads(text)["type"] == type(event).__name__


@given(st.lists(st.tuples(singles, counts), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_two_ways_to_say_the_same_have_one_text(pairs: list[tuple[DpEvent, int]], chance: Any) -> None:
    mechanisms = [leaf for event, times in pairs for leaf in split_event(event, times)]
    if not mechanisms:
        return
    charge = make_charge(pairs, "add-remove")
    shuffled = chance.sample(pairs, len(pairs))
    assert make_charge([dp.SelfComposedDpEvent(event, times) for event, times in shuffled], "add-remove") == charge
    assert make_charge(dp.ComposedDpEvent([dp.SelfComposedDpEvent(*pair) for pair in pairs]), "add-remove") == charge
    assert sum(times for _, times in charge) == sum(times for _, times in mechanisms)


def test_numbers_of_other_libraries_and_whole_numbers_have_the_same_text() -> None:
    texts = {format_event(GaussianDpEvent(number)) for number in (4, 4.0, np.float64(4), np.int32(4))}
    assert texts == {'{"noise_multiplier":4.0,"type":"GaussianDpEvent"}'}
    assert format_event(GaussianDpEvent(0.1 + 0.2)) != format_event(GaussianDpEvent(0.3))


class Stranger(DpEvent):  # type: ignore[misc]
    pass


@pytest.mark.parametrize(
    "event",
    [Stranger(), dp.UnsupportedDpEvent(), GaussianDpEvent(math.nan), GaussianDpEvent(math.inf), GaussianDpEvent("x")],
)
def test_events_without_a_text_are_refused(event: DpEvent) -> None:
    with pytest.raises(ValueError, match="events"):
        format_event(event)


@pytest.mark.parametrize(
    "text",
    [
        '{"type":"os.system"}',
        '{"type":"GaussianDpEvent"}',
        '{"type":"GaussianDpEvent","noise_multiplier":1.0,"more":2}',
        '{"type":"PureDp","epsilon":-1.0}',
        '{"type":"PureDp","epsilon":"x"}',
        "{}",
    ],
)
def test_texts_of_no_event_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"events|epsilon"):
        parse_event(text)


@given(st.fractions(Fraction(-(10**6)), 10**6))
def test_amounts_round_against_the_spender(number: Fraction) -> None:
    up, down = round_units_up(number), round_units_down(number)
    assert up is not None
    assert Fraction(up - 1, UNITS) < number <= Fraction(up, UNITS)
    assert Fraction(down, UNITS) <= number < Fraction(down + 1, UNITS)
    assert to_exact_decimal(round_float_down(number)) <= number <= to_exact_decimal(round_float_up(number))
    assert round_float_up(number) <= math.nextafter(round_float_down(number), math.inf)


@given(st.floats(0, 1e6))
def test_figures_for_people_round_against_the_spender(number: float) -> None:
    assert float(format_up(number)) >= number >= float(format_down(number))
    assert float(format_up(number)) <= number * 1.0011 + 1e-300


BUDGETS: list[Budget] = [
    PureBudget.open(1.0),
    FilterBudget.open(1.0, 1e-5),
    PlanBudget.open(3.0, 1e-5, make_charge([(PureDp(0.1), 6), (LaplaceDpEvent(9.0), 7)], "replace")),
]
charges = st.lists(
    st.tuples(st.sampled_from([PureDp(0.1), LaplaceDpEvent(9.0)]), st.integers(1, 3)), min_size=1, max_size=3
)


@settings(deadline=None)
@given(st.sampled_from(BUDGETS), st.lists(charges, min_size=1, max_size=8))
def test_totals_do_not_depend_on_the_order_and_only_grow(budget: Budget, steps: list[Any]) -> None:
    prices = [budget.price(make_charge(step, "replace")) for step in steps]
    forward, backward = budget.zero, budget.zero
    ended = False
    for price, reversed_price in zip(prices, prices[::-1], strict=True):
        forward, backward = add_amounts(forward, price), add_amounts(backward, reversed_price)
        assert not (ended and budget.allows(forward))
        ended = not budget.allows(forward)
    assert forward == backward
    together = [pair for step in steps for pair in step]
    assert budget.price(make_charge(together, "replace")) == forward


@pytest.mark.parametrize("budget", BUDGETS)
def test_terms_survive_their_text(budget: Budget) -> None:
    assert parse_budget(budget.terms()) == budget
    assert budget.allows(budget.zero)
    assert budget.spent(budget.zero) == 0
    assert budget.contains(budget)


def test_a_filter_counts_divergences_from_above_and_its_limits_from_below() -> None:
    budget, gate = FilterBudget.open(1.0, 1e-5), RenyiFilter(1.0, 1e-5)
    event = dp.PoissonSampledDpEvent(0.01, GaussianDpEvent(3.0))
    exact = RdpAccountant(orders=gate.orders).compose(event).rdp
    for amount, divergence in zip(budget.price(make_charge(event, "add-remove")), exact, strict=True):
        assert amount is not None
        assert 0 <= Fraction(amount, UNITS) - Fraction(float(divergence)) < Fraction(1, UNITS)
    for limit, allowed in zip(budget.limits, gate.budgets, strict=True):
        assert 0 <= Fraction(allowed) - Fraction(limit, UNITS) < Fraction(1, UNITS)


@pytest.mark.parametrize("budget", BUDGETS)
def test_every_repeat_is_charged(budget: Budget) -> None:
    once, often = (budget.price(make_charge([(PureDp(0.1), times)], "replace")) for times in (1, 5))
    assert any(once)
    assert often == tuple(5 * (amount or 0) for amount in once)


def test_a_part_is_no_more_than_the_whole() -> None:
    for more in (PureBudget.open(1.1), FilterBudget.open(1.1, 1e-5), FilterBudget.open(1.0, 2e-5)):
        assert not any(budget.contains(more) for budget in BUDGETS)


def test_a_million_small_debits_do_not_drift() -> None:
    budget = PureBudget.open(1.0)
    (price,) = budget.price(make_charge(PureDp(1e-6), "replace"))
    assert price is not None
    assert budget.allows((price * 10**6,))
    assert not budget.allows((price * 10**6 + 1,))
    third = PureBudget.open(1.0).price(make_charge(LaplaceDpEvent(3.0), "replace"))
    assert third == (UNITS // 3 + 1,)


def test_an_order_that_has_no_divergence_is_out_and_stays_out() -> None:
    budget = FilterBudget.open(5.0, 1e-5)
    price = budget.price(make_charge(dp.NonPrivateDpEvent(), "replace"))
    assert price == (None,) * len(budget.orders)
    assert not budget.allows(add_amounts(budget.zero, price))
    assert budget.spent(price) is None


def test_what_a_budget_has_no_price_for_is_refused() -> None:
    for budget, event in zip(
        BUDGETS, (GaussianDpEvent(1.0), dp.SampledWithReplacementDpEvent, PureDp(0.2)), strict=True
    ):
        if isinstance(event, DpEvent):
            with pytest.raises(UnpricedError):
                budget.price(make_charge(event, "replace"))
    inside = dp.PoissonSampledDpEvent(0.5, dp.ComposedDpEvent([LaplaceDpEvent(2.0), GaussianDpEvent(1.0)]))
    with pytest.raises(UnpricedError, match="Renyi"):
        BUDGETS[1].price(make_charge(inside, "add-remove"))
    with pytest.raises(UnpricedError, match="privacy loss"):
        find_pld_epsilon(make_charge(inside, "add-remove"), 1e-5)


def exact_delta(steps: tuple[float, ...], epsilon: float) -> float:
    """The delta of randomised responses on one bit, all about the same bit, summed over all transcripts."""
    total = 0.0
    for answers in itertools.product((1, -1), repeat=len(steps)):
        p = math.prod(1 / (1 + math.exp(-answer * step)) for answer, step in zip(answers, steps, strict=True))
        q = math.prod(1 / (1 + math.exp(answer * step)) for answer, step in zip(answers, steps, strict=True))
        total += max(p - math.exp(epsilon) * q, 0.0)
    return total


def best_adaptive_delta(left: dict[float, int], ratio: float, epsilon: float) -> float:
    """The largest delta of whoever picks the next response of the plan after each answer, or stops; per unit of P."""
    stop = max(1 - math.exp(epsilon) * ratio, 0.0)
    best = stop
    for step in [step for step, times in left.items() if times]:
        rest = {**left, step: left[step] - 1}
        truth = 1 / (1 + math.exp(-step))
        value = truth * best_adaptive_delta(rest, ratio * (1 - truth) / truth, epsilon)
        value += (1 - truth) * best_adaptive_delta(rest, ratio * truth / (1 - truth), epsilon)
        best = max(best, value)
    return best


@pytest.mark.parametrize("delta", [0.02, 0.1, 0.3])
def test_no_order_of_a_plan_passes_its_cost(delta: float) -> None:
    """Theorem 1 of docs/theory/ledger.md: all adaptive orders and stops of a small plan, solved exactly."""
    plan = {0.4: 3, 1.0: 2, 2.0: 1}
    cost = find_pld_epsilon(make_charge([(PureDp(step), times) for step, times in plan.items()], "replace"), delta)
    worst = best_adaptive_delta(plan, 1.0, cost)
    fixed = exact_delta((0.4, 0.4, 0.4, 1.0, 1.0, 2.0), cost)
    assert worst == pytest.approx(fixed, rel=1e-9)
    assert worst <= delta
    assert worst >= 0.95 * delta  # half the cost would be caught
    assert best_adaptive_delta(plan, 1.0, cost / 2) > delta
