"""The promise: what it refuses, what it says, and that it cannot be changed or added."""

import dataclasses
import math
import re
from decimal import Decimal
from typing import Any

import pytest
from dp_accounting import ComposedDpEvent, GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from hypothesis import given
from hypothesis import strategies as st

from nearveil.privacy import Basis, Guarantee
from nearveil.privacy.events import NoisyScreening, VoteHistogram


def promise(**changes: Any) -> Guarantee:
    fields: dict[str, Any] = {
        "epsilon": 2.0,
        "delta": 0.0,
        "protects": "query",
        "unit": "image",
        "relation": "replace",
        "basis": Basis("a theorem", "docs/theory/noise.md"),
    }
    return Guarantee(**fields | changes)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {},
            "Whoever sees the message can change their odds about which image was asked for"
            + " by at most a factor of 7.4.",
        ),
        (
            {"epsilon": 0.5, "delta": 1e-5, "protects": "database", "relation": "add-remove", "unit": "person"},
            "Whoever sees the answers comes to any conclusion about whether any one person is in the database with"
            + " at most 1.65 times the probability that it would have otherwise, plus 1.0e-5.",
        ),
        (
            {"epsilon": 0.0, "delta": 0.5},
            "Whoever sees the message comes to any conclusion about which image was asked for with at most 1 times the"
            + " probability that it would have otherwise, plus 0.5.",
        ),
        ({"epsilon": 0.0}, "Whoever sees the message learns nothing about which image was asked for."),
        (
            {"epsilon": 0.001},
            "Whoever sees the message can change their odds about which image was asked for"
            + " by at most a factor of 1.0011.",
        ),
        (
            {"epsilon": 20.0},
            "Whoever sees the message may be next to certain about which image was asked for: "
            + "a factor of more than a million protects nothing.",
        ),
        ({"epsilon": math.inf}, "Nothing is promised about which image was asked for."),
        (
            {"protects": "database", "delta": 1.0},
            "Nothing is promised about which image any one record of the database is.",
        ),
        (
            {"sound": False, "reason": "the label of the target is used after the noise"},
            "No promise about which image was asked for: the label of the target is used after the noise.",
        ),
    ],
)
def test_it_says_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    assert str(promise(**changes)) == sentence


@given(epsilon=st.floats(1e-9, 13), delta=st.floats(5e-324, 0.99))
def test_the_sentence_never_promises_more_than_the_figures(epsilon: float, delta: float) -> None:
    said = re.search(r"at most (\S+) times .* plus (\S+)\.$", str(promise(epsilon=epsilon, delta=delta)))
    assert said is not None
    assert Decimal(said[1]) >= Decimal(repr(epsilon)).exp()
    assert Decimal(said[2]) >= Decimal(repr(delta))
    assert float(said[1]) <= 1 + 1.2 * math.expm1(epsilon)
    pure = re.search(r"factor of (\S+)\.$", str(promise(epsilon=epsilon)))
    assert pure is not None
    assert pure[1] == said[1]


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
    assert promise(protects="database", relation="add-remove", events=[event]).events == (event,)


def test_it_is_frozen_and_carries_what_happened() -> None:
    guarantee = promise(events=(GaussianDpEvent(3.0),))
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
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        promise(**changes)
