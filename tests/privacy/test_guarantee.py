"""The promise: what it refuses, what it says, and that it cannot be changed or added."""

import dataclasses
import math
import re
from typing import Any

import pytest
from dp_accounting import GaussianDpEvent
from hypothesis import given
from hypothesis import strategies as st

from nearveil.privacy import Basis, Guarantee


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
            "Whoever sees the answers can change their odds about whether any one person is in the database"
            + " by at most a factor of 1.65, except with a probability of at most 1e-05.",
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


@given(epsilon=st.floats(1e-6, 13), delta=st.floats(1e-30, 0.99))
def test_the_sentence_never_promises_more_than_the_figures(epsilon: float, delta: float) -> None:
    said = re.search(
        r"factor of (\S+), except with a probability of at most (\S+)\.$", str(promise(epsilon=epsilon, delta=delta))
    )
    assert said is not None
    assert float(said[1]) >= math.exp(epsilon) * (1 - 1e-6)
    assert float(said[2]) >= delta * (1 - 1e-6)
    assert float(said[1]) <= 1 + 1.2 * math.expm1(epsilon)


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
        ({"sound": False}, "reason must say why"),
        ({"reason": "because"}, "reason must say why"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        promise(**changes)
