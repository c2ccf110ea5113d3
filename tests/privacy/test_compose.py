"""Guarantees become one through an accountant."""

from dataclasses import replace
from typing import Any

import pytest
from dp_accounting import GaussianDpEvent

from nearveil.privacy import Basis, Guarantee, compose
from nearveil.privacy.accounting import PldAccountant, RenyiFilter
from nearveil.privacy.events import PureDp


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
    guarantees = [promise(0.1, events=(GaussianDpEvent(noise),)) for noise in (10.0, 12.0, 10.0)]
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
    assert "chosen along the way" in whole.basis.name


def test_one_way_to_compose_must_be_named() -> None:
    for ways in ({}, {"delta": 1e-5, "within": RenyiFilter(1.0, 1e-5)}):
        with pytest.raises(ValueError, match="one of the two"):
            compose([promise()], **ways)  # type: ignore[arg-type]


def test_what_samplers_cost_is_taken_out_of_delta() -> None:
    costly = promise(0.1, events=(GaussianDpEvent(10.0),), delta=5e-6, extra_delta=2.5e-6)
    free = replace(costly, extra_delta=0.0)
    whole = compose([costly] * 2, delta=1e-5)
    assert whole.epsilon == pytest.approx(compose([free] * 2, delta=5e-6).epsilon)
    assert (whole.delta, whole.extra_delta) == (1e-5, 5e-6)
    assert compose([replace(costly, events=(GaussianDpEvent(0.05),))], delta=1e-5).epsilon == float("inf")


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
        ([promise(), promise(events=())], 1e-5, "must say what happened"),
        ([promise()], 0.0, "delta must lie between"),
        ([promise()], 1.0, "delta must lie between"),
        ([promise()], float("nan"), "delta must lie between"),
    ],
)
def test_what_cannot_be_composed_is_refused(guarantees: list[Guarantee], delta: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compose(guarantees, delta=delta)
