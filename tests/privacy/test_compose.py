"""Guarantees become one through an accountant."""

from dataclasses import replace
from typing import Any

import pytest
from dp_accounting import GaussianDpEvent, SelfComposedDpEvent, UnsupportedEventError

from nearveil.privacy import Basis, Guarantee, compose, compose_events
from nearveil.privacy.accounting import PldAccountant, RenyiFilter
from nearveil.privacy.events import Budgeted, PureDp
from nearveil.privacy.guarantee import Assumption, FilterTerms
from nearveil.privacy.noise import secure_source, unsafe_seeded


def promise(epsilon: float = 0.1, **changes: Any) -> Guarantee:
    fields: dict[str, Any] = {
        "epsilon": epsilon,
        "delta": 0.0,
        "protects": "query",
        "unit": "image",
        "relation": "replace",
        "basis": Basis("randomised response"),
        "events": (PureDp(epsilon),),
    }
    return Guarantee(**fields | changes)


def test_fixed_parameters_are_composed_by_losses() -> None:
    whole = compose([promise(0.1)] * 40 + [promise(0.3)], delta=1e-5)
    expected = PldAccountant().compose(PureDp(0.1), 40).compose(PureDp(0.3)).epsilon(1e-5)
    assert whole.epsilon == pytest.approx(expected)
    assert 0.3 < whole.epsilon < 4.3
    assert whole.delta == 1e-5
    assert len(whole.events) == 41
    assert "fixed beforehand" in whole.basis.name


def test_parameters_chosen_along_the_way_have_the_promise_of_their_filter() -> None:
    gate = RenyiFilter(3.0, 1e-5)
    guarantees = [promise(1.0, delta=1e-5, events=(GaussianDpEvent(noise),)) for noise in (10.0, 12.0, 10.0)]
    with pytest.raises(ValueError, match="exactly these events"):
        compose(guarantees, within=gate)
    for guarantee in guarantees:
        gate.spend(guarantee.events[0])
    whole = compose(guarantees, within=gate)
    assert whole.epsilon == 3.0
    assert whole.delta == 1e-5
    with pytest.raises(AttributeError):
        gate.epsilon = 0.01  # type: ignore[misc]
    assert compose(guarantees[::-1], within=gate).epsilon == 3.0
    assert whole.epsilon > compose(guarantees, delta=1e-5).epsilon
    assert "chosen adaptively" in whole.basis.name


def test_what_was_chosen_along_the_way_is_never_relabelled_as_fixed() -> None:
    gate = RenyiFilter(3.0, 1e-5)
    guarantees = [promise(1.0, delta=1e-5, events=(GaussianDpEvent(noise),)) for noise in (10.0, 12.0, 10.0)]
    for guarantee in guarantees:
        gate.spend(guarantee.events[0])
    whole = compose(guarantees, within=gate)
    assert (whole.adaptivity, guarantees[0].adaptivity) == ("adaptive", "fixed")
    assert whole.within == FilterTerms(3.0, 1e-5, gate.orders)
    for again in ([whole], [*guarantees, whole]):
        with pytest.raises(ValueError, match="within must be given"):
            compose(again, delta=1e-5)
    with pytest.raises(ValueError, match="those of the filter"):
        replace(whole, epsilon=0.705)
    wider = RenyiFilter(4.0, 1e-5)
    for event in (*whole.events, GaussianDpEvent(9.0)):
        wider.spend(event)
    more = compose([whole, promise(1.0, delta=1e-5, events=(GaussianDpEvent(9.0),))], within=wider)
    assert (more.epsilon, more.within) == (4.0, FilterTerms(4.0, 1e-5, wider.orders))


def test_beyond_64_nothing_is_promised_where_samplers_cost_something() -> None:
    noisy = GaussianDpEvent(0.2)
    for extra_delta, epsilon in ((0.0, 70.0), (1e-20, float("inf"))):
        gate = RenyiFilter(70.0, 1e-5)
        gate.spend(noisy)
        alone = promise(50.0, delta=1e-5, events=(noisy,), extra_delta=extra_delta)
        assert compose([alone], within=gate).epsilon == epsilon
        many = promise(60.0, events=(PureDp(60.0),), delta=extra_delta, extra_delta=extra_delta)
        assert (compose([many] * 2, delta=1e-5).epsilon > 64) is True
        assert (compose([many] * 2, delta=1e-5).epsilon == float("inf")) is bool(extra_delta)


def test_one_seeded_release_makes_the_whole_seeded() -> None:
    whole = compose([promise(), promise().with_source(unsafe_seeded(7))], delta=1e-5)
    assert (whole.sound, whole.source) == (False, "seeded")


def test_the_whole_rests_on_the_assumptions_of_all_parts() -> None:
    first, second = Assumption("LWE is hard", 132), Assumption("another problem is hard", 128)
    parts = [promise(), promise(assumptions=(first,)), promise(assumptions=(first, second))]
    for order in (parts, parts[::-1]):
        whole = compose(order, delta=1e-5)
        assert whole.is_computational
        assert set(whole.assumptions) == {first, second}
        assert len(whole.assumptions) == 2
        assert str(whole).startswith("As long as ")


def test_events_are_composed_at_once() -> None:
    about: dict[str, Any] = {"protects": "query", "unit": "image", "relation": "replace", "basis": Basis("noise")}
    tenfold = compose_events([SelfComposedDpEvent(PureDp(0.1), 10)], delta=0.0, **about)
    assert tenfold.epsilon == pytest.approx(1.0)
    assert compose_events([GaussianDpEvent(4.0)], delta=0.0, **about).epsilon == float("inf")
    assert compose_events([GaussianDpEvent(4.0)], delta=1e-5, **about).epsilon == pytest.approx(0.9263, abs=1e-4)


def test_one_way_to_compose_must_be_named() -> None:
    for ways in ({}, {"delta": 1e-5, "within": RenyiFilter(1.0, 1e-5)}):
        with pytest.raises(ValueError, match="pass exactly one of"):
            compose([promise()], **ways)  # type: ignore[arg-type]


def test_what_samplers_cost_is_taken_out_of_delta() -> None:
    costly = promise(0.5, events=(GaussianDpEvent(10.0),), delta=5e-6, extra_delta=2.5e-6)
    free = replace(costly, extra_delta=0.0)
    whole = compose([costly] * 2, delta=1e-5)
    assert whole.epsilon == pytest.approx(compose([free] * 2, delta=5e-6).epsilon)
    assert (whole.delta, whole.extra_delta) == (1e-5, 5e-6)


def test_one_that_is_not_sound_makes_the_whole_unsound() -> None:
    broken = replace(promise(), sound=False, reason="a seed that a test asked for by name")
    whole = compose([promise(), broken, broken], delta=1e-5)
    assert not whole.sound
    assert whole.reason == "a seed that a test asked for by name"


@pytest.mark.parametrize(
    ("guarantees", "delta", "message"),
    [
        ([], 1e-5, "at least one guarantee"),
        ([promise(), promise(unit="person")], 1e-5, "agree in unit"),
        ([promise(), promise(protects="database")], 1e-5, "agree in protects"),
        ([promise(), promise(relation="add-remove")], 1e-5, "agree in relation"),
        ([promise(), promise(events=(), sound=False, reason="a claim")], 1e-5, "must have events"),
        ([promise()], 0.0, "delta must be between"),
        ([promise()], 1.0, "delta must be between"),
        ([promise()], float("nan"), "delta must be between"),
    ],
)
def test_what_cannot_be_composed_is_refused(guarantees: list[Guarantee], delta: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compose(guarantees, delta=delta)


def test_parts_of_a_plan_are_not_composed_as_if_only_they_had_been_fixed() -> None:
    """Whoever stops when the answers please counts 7 of 30; the plan of 30 is what was fixed."""
    noisy = GaussianDpEvent(40.0)
    whole = promise(1.0, delta=1e-5, events=(SelfComposedDpEvent(noisy, 30),))
    with pytest.raises(ValueError, match="must be wholes, not parts"):
        compose([whole.part(noisy, 7)], delta=1e-5)
    assert (
        compose([whole], delta=1e-5).epsilon
        > compose_events(
            [SelfComposedDpEvent(noisy, 7)],
            delta=1e-5,
            protects="query",
            unit="image",
            relation="replace",
            basis=whole.basis,
        ).epsilon
    )


@pytest.mark.parametrize("nothing", [{"epsilon": float("inf")}, {"delta": 1.0}])
def test_what_promises_nothing_is_not_composed(nothing: dict[str, float]) -> None:
    """Nobody checked its events; composing them would make a promise of it."""
    for ways in ({"delta": 1e-5}, {"within": RenyiFilter(1.0, 1e-5)}):
        with pytest.raises(ValueError, match="must guarantee something"):
            compose([replace(promise(), **nothing)], **ways)  # type: ignore[arg-type]


def test_the_budget_of_an_account_is_not_composed_as_if_nothing_had_happened() -> None:
    budget = promise(8.0, events=(Budgeted(8.0, 0.0),), within=FilterTerms(8.0, 0.0))
    once, gate = promise(0.1), RenyiFilter(1.0, 1e-5)
    gate.spend(once.events[0])
    with pytest.raises(ValueError, match="exactly these events"):
        compose([budget, budget, once], within=gate)
    with pytest.raises(ValueError, match="within must be given"):
        compose([budget, once], delta=1e-5)
    with pytest.raises(UnsupportedEventError):
        gate.spend(budget.events[0])


def test_the_library_keeps_filter_and_source_whatever_is_made_of_a_guarantee() -> None:
    gate = RenyiFilter(3.0, 1e-5)
    gate.spend(GaussianDpEvent(10.0), 2)
    once = promise(1.0, delta=1e-5, events=(GaussianDpEvent(10.0),))
    whole = compose([once, once.as_seeded()], within=gate)
    for guarantee in (whole, whole.part(GaussianDpEvent(10.0)), whole.with_source(secure_source())):
        assert (guarantee.within, guarantee.source, guarantee.sound) == (
            FilterTerms(3.0, 1e-5, gate.orders),
            "seeded",
            False,
        )
