"""The promise: what it refuses, what it says, and that it cannot be changed or added."""

import copy
import dataclasses
import math
import pickle
import re
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from dp_accounting import (
    ComposedDpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
)
from hypothesis import given
from hypothesis import strategies as st

from nearveil.privacy import Basis, Guarantee
from nearveil.privacy.events import Budgeted, NoisyScreening, PureDp, VoteHistogram
from nearveil.privacy.guarantee import FilterTerms, count_events, freeze_event
from nearveil.privacy.noise import analytic_gaussian_scale, secure_source, unsafe_seeded


def promise(**changes: Any) -> Guarantee:
    epsilon = changes.get("epsilon", 2.0)
    fields: dict[str, Any] = {
        "epsilon": 2.0,
        "delta": 0.0,
        "protects": "query",
        "unit": "image",
        "relation": "replace",
        "basis": Basis("a theorem", "docs/theory/noise.md"),
        "events": (PureDp(epsilon),) if 0 <= epsilon < math.inf else (),
    }
    return Guarantee(**fields | changes)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {},
            "Seeing this message changes the odds between any two images by at most a factor of 7.4.",
        ),
        (
            {"epsilon": 0.5, "delta": 1e-5, "protects": "database", "relation": "add-remove", "unit": "person"},
            "Seeing the answers makes any conclusion about whether any one person is in the database at most 1.65 times"
            + " as likely as it would be otherwise, plus 1.0e-5.",
        ),
        (
            {"epsilon": 0.0, "delta": 0.5},
            "Seeing this message makes any conclusion about which image was queried at most 1 times as likely as it"
            + " would be otherwise, plus 0.5.",
        ),
        (
            {"unit": "person with all images"},
            "Seeing this message changes the odds between any two persons with all images by at most a factor of 7.4.",
        ),
        (
            {"protects": "database", "relation": "add-remove"},
            "Seeing the answers changes the odds about whether any one image is in the database"
            + " by at most a factor of 7.4.",
        ),
        ({"epsilon": 0.0}, "Nothing is revealed about which image was queried: no message depends on it."),
        (
            {"epsilon": 0.001},
            "Seeing this message changes the odds between any two images by at most a factor of 1.0011.",
        ),
        (
            {"epsilon": 20.0},
            "Anyone who sees the message may be almost certain about which image was queried: "
            + "a factor of more than a million protects nothing.",
        ),
        ({"epsilon": math.inf}, "Nothing is guaranteed about which image was queried."),
        (
            {"protects": "database", "delta": 1.0},
            "Nothing is guaranteed about which image any one record of the database is.",
        ),
        (
            {"sound": False, "reason": "the label of the target is used after the noise"},
            "No guarantee about which image was queried: the label of the target is used after the noise.",
        ),
    ],
)
def test_it_says_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    assert str(promise(**changes)) == sentence


@given(epsilon=st.floats(1e-9, 13), delta=st.floats(5e-324, 0.99))
def test_the_sentence_never_promises_more_than_the_figures(epsilon: float, delta: float) -> None:
    match = re.search(r"at most (\S+) times .* plus (\S+)\.$", str(promise(epsilon=epsilon, delta=delta)))
    assert match is not None
    assert Decimal(match[1]) >= Decimal(repr(epsilon)).exp()
    assert Decimal(match[2]) >= Decimal(repr(delta))
    assert float(match[1]) <= 1 + 1.2 * math.expm1(epsilon)
    pure = re.search(r"factor of (\S+)\.$", str(promise(epsilon=epsilon)))
    assert pure is not None
    assert pure[1] == match[1]


@pytest.mark.parametrize(
    "event",
    [
        PoissonSampledDpEvent(0.1, GaussianDpEvent(1.0)),
        VoteHistogram(5.0),
        SelfComposedDpEvent(ComposedDpEvent([GaussianDpEvent(1.0), NoisyScreening(5.0, 3.0, 7)]), 4),
    ],
)
def test_what_is_priced_for_one_record_more_or_less_is_no_replacement(event: Any) -> None:
    with pytest.raises(ValueError, match='relation must be "add-remove"'):
        promise(protects="database", events=(event,))
    guarantee = promise(epsilon=30.0, delta=1e-5, protects="database", relation="add-remove", events=[event])
    assert count_events(guarantee.events) == count_events([freeze_event(event)])


def test_it_is_frozen_and_carries_what_happened() -> None:
    guarantee = promise(delta=1e-5, events=(GaussianDpEvent(3.0),))
    assert guarantee.events == (GaussianDpEvent(3.0),)
    assert guarantee.basis.link == "docs/theory/noise.md"
    with pytest.raises(dataclasses.FrozenInstanceError):
        guarantee.epsilon = 1.0  # type: ignore[misc]


def test_it_is_not_added_by_hand() -> None:
    with pytest.raises(TypeError, match="asks an accountant"):
        promise() + promise()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epsilon": -0.1}, "epsilon must be a number from 0 upwards"),
        ({"epsilon": math.nan}, "epsilon must be a number from 0 upwards"),
        ({"delta": -1e-9}, "delta must be a probability"),
        ({"delta": 1.1}, "delta must be a probability"),
        ({"delta": math.nan}, "delta must be a probability"),
        ({"protects": "everyone"}, 'protects must be "query" or "database"'),
        ({"relation": "similar"}, 'relation must be "replace" or "add-remove"'),
        ({"unit": " "}, "unit must say what one record is"),
        ({"basis": "trust me"}, "basis must be a Basis"),
        ({"sound": False}, "a reason that says why"),
        ({"sound": False, "reason": " "}, "a reason that says why"),
        ({"sound": 2, "reason": "seeded"}, "a reason that says why"),
        ({"sound": None}, "a reason that says why"),
        ({"reason": "because"}, "a reason that says why"),
        ({"events": ("gaussian",)}, "events must be dp-accounting events"),
        ({"extra_delta": 0.1}, "extra_delta must be a part of delta"),
        ({"events": ()}, "events must not be empty"),
        ({"source": "dice"}, 'source must be "system" or "seeded"'),
        ({"source": "seeded"}, "sound must be False if the source is seeded"),
        ({"epsilon": 65.0, "delta": 1e-5, "extra_delta": 1e-9}, "epsilon must be at most 64, or infinity"),
        ({"within": FilterTerms(3.0, 0.0)}, "must be those of the filter"),
        ({"events": (PureDp(2.1),), "within": FilterTerms(2.0, 0.0)}, "within the filter"),
        ({"delta": 1e-5, "events": (GaussianDpEvent(1.0),), "within": FilterTerms(2.0, 1e-5, (8.0,))}, "within the fi"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        promise(**changes)


COSTS: list[tuple[Any, float, float]] = [  # an event, and an epsilon and delta that it just costs
    (PureDp(2.0), 2.0, 0.0),
    (SelfComposedDpEvent(PureDp(0.1), 20), 2.0, 0.0),
    (LaplaceDpEvent(0.5), 2.0, 0.0),
    (GaussianDpEvent(analytic_gaussian_scale(1.0, 2.0, 1e-5)), 2.0, 1e-5),
    (SelfComposedDpEvent(GaussianDpEvent(10 * analytic_gaussian_scale(1.0, 2.0, 1e-5)), 100), 2.0, 1e-5),
    (SelfComposedDpEvent(PureDp(0.1), 100), 4.31, 1e-5),
    (SelfComposedDpEvent(PoissonSampledDpEvent(0.1, GaussianDpEvent(2.0)), 50), 1.66, 1e-5),
    (SelfComposedDpEvent(NoisyScreening(5.0, 3.0, 7), 40), 4.53, 1e-5),
]


@pytest.mark.parametrize(("event", "epsilon", "delta"), COSTS)
def test_it_never_states_less_than_its_events_cost(event: Any, epsilon: float, delta: float) -> None:
    stated = promise(epsilon=epsilon, delta=delta, protects="database", relation="add-remove", events=(event,))
    less: list[dict[str, Any]] = [{"epsilon": 0.99 * epsilon}, {"events": (event, event)}]
    for changes in [*less, {"extra_delta": delta / 2}] if delta else less:
        with pytest.raises(ValueError, match="epsilon must be at least what the events cost"):
            dataclasses.replace(stated, **changes)
    unsound = dataclasses.replace(stated, epsilon=0.01, sound=False, reason="a claim, not checked")
    assert unsound.epsilon == 0.01


def test_nobody_changes_what_happened_afterwards() -> None:
    parts = [PureDp(1.0), PureDp(1.0)]
    guarantee = promise(events=(ComposedDpEvent(parts),))
    parts.append(PureDp(50.0))
    assert count_events(guarantee.events) == ((PureDp(1.0), 2),)
    assert hash(guarantee) == hash(promise(events=(ComposedDpEvent(parts[:2]),)))


def test_a_seed_is_never_sound() -> None:
    system = promise()
    assert system.with_source(secure_source()) is system
    seeded = system.with_source(unsafe_seeded(7))
    assert (seeded.sound, seeded.source) == (False, "seeded")
    assert "seed" in seeded.reason
    assert seeded.with_source(secure_source()) is seeded  # what a seed foretold stays so
    for flags in ({}, {"sound": None}, {"sound": 1}, {"sound": "yes"}):  # only a plain True is a statement
        assert not system.with_source(SimpleNamespace(words=np.zeros, **flags)).sound
    with pytest.raises(ValueError, match="sound must be False"):
        dataclasses.replace(seeded, sound=True, reason="")
    twice = promise(sound=False, reason="it leaks").with_source(unsafe_seeded(7))
    assert twice.reason.startswith("it leaks; ")


def test_a_part_has_the_figures_of_its_whole() -> None:
    vote = VoteHistogram(40.0)
    whole = promise(delta=1e-5, protects="database", relation="add-remove", events=(SelfComposedDpEvent(vote, 30),))
    part = whole.part(vote, 7)
    assert (part.epsilon, part.delta, part.whole) == (whole.epsilon, whole.delta, whole)
    assert count_events(part.events) == count_events((SelfComposedDpEvent(vote, 7),))
    assert part.part(vote, 2).whole is whole
    for event, count in ((vote, 31), (VoteHistogram(39.0), 1), (PureDp(0.1), 1)):
        with pytest.raises(ValueError, match="events must be a part of the whole"):
            whole.part(event, count)
    changed: list[dict[str, Any]] = [{"epsilon": 1.0}, {"delta": 1e-6}, {"unit": "person"}, {"extra_delta": 1e-6}]
    for changes in changed:
        with pytest.raises(ValueError, match="whole"):
            dataclasses.replace(part, **changes)


def test_a_budget_is_stated_within_itself_alone() -> None:
    budget = promise(epsilon=8.0, events=(Budgeted(8.0, 0.0),), within=FilterTerms(8.0, 0.0))
    changed: list[dict[str, Any]] = [
        {"within": None},
        {"within": None, "epsilon": 0.0},
        {"within": FilterTerms(1.0, 0.0), "epsilon": 1.0},
        {"within": FilterTerms(9.0, 0.0), "epsilon": 9.0, "events": (Budgeted(8.0, 0.0), PureDp(2.0))},
    ]
    for changes in changed:
        with pytest.raises(ValueError, match=r"what the events cost|within the filter"):
            dataclasses.replace(budget, **changes)


def test_figures_do_not_change_in_place() -> None:
    figures = {name: np.array(value) for name, value in (("epsilon", 2.0), ("delta", 0.5), ("extra_delta", 0.1))}
    terms = FilterTerms(figures["epsilon"], np.array(0.0))  # type: ignore[arg-type]
    stated = promise(**figures, within=terms, events=(PureDp(2.0),))
    for figure in figures.values():
        figure[...] = 0.01
    assert (stated.epsilon, stated.delta, stated.extra_delta, terms.epsilon) == (2.0, 0.5, 0.1, 2.0)
    assert {type(figure) for figure in (stated.epsilon, stated.delta, stated.extra_delta, terms.delta)} == {float}


class Forged:
    """Pickles as an object of another class, with a state that this class would refuse."""

    def __init__(self, kind: type, state: dict[str, Any]) -> None:
        self.kind, self.state = kind, state

    def __reduce__(self) -> tuple[Any, ...]:
        return object.__new__, (self.kind,), self.state


HONEST = promise(delta=1e-5, events=(GaussianDpEvent(2.5),), extra_delta=1e-20)


@pytest.mark.parametrize(
    ("kind", "state", "words"),
    [
        (Guarantee, {**vars(HONEST), "epsilon": 0.01}, "epsilon must be at least what the events cost"),
        (Guarantee, {**vars(HONEST), "delta": 1e-9}, "epsilon must be at least what the events cost"),
        (Guarantee, {**vars(HONEST), "events": ()}, "events must not be empty"),
        (Guarantee, {**vars(HONEST), "source": "seeded"}, "sound must be False if the source is seeded"),
        (Guarantee, {**vars(HONEST), "as_seeded": None}, "as_seeded"),
        (Guarantee, {"sound": True}, "epsilon"),
        (Guarantee, {**vars(promise()), "events": (Forged(PureDp, {"epsilon": -9.0}),)}, "number of at least 0"),
        (FilterTerms, {"epsilon": 1.0, "delta": 0.0, "orders": (2.0,)}, "no orders where delta is 0"),
    ],
)
def test_a_pickle_that_was_changed_is_checked_again(kind: type, state: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        pickle.loads(pickle.dumps(Forged(kind, state)))  # noqa: S301


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_copies_and_pickles_are_equal(protocol: int) -> None:
    within = FilterTerms(3.0, 1e-5, (2.0, 8.0))
    adaptive = promise(epsilon=3.0, delta=1e-5, events=(Budgeted(3.0, 1e-5),), within=within)
    for guarantee in (HONEST, HONEST.as_seeded(), HONEST.part(GaussianDpEvent(2.5)), adaptive):
        loaded = pickle.loads(pickle.dumps(guarantee, protocol))  # noqa: S301
        assert loaded == copy.copy(guarantee) == copy.deepcopy(guarantee) == guarantee
