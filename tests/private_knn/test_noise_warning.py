"""Answers that can only be noise are announced: to the owner of the records, or from what is public."""

import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits, load_iris

from nearveil.private_knn import (
    NoiseWarning,
    PrivateDiscriminant,
    PrivateKNeighborsClassifier,
    PrivateKNeighborsRegressor,
    PublicDiscriminant,
)
from nearveil.private_knn.discriminant import _warn_of_noise
from studies.pate import PateClassifier

IRIS, IRIS_Y = load_iris(return_X_y=True)
DIGITS, DIGITS_Y = load_digits(return_X_y=True)
FEW: dict[str, Any] = {"epsilon": 1.0, "max_answered": 50}
NOISY = {
    "classifier": (PrivateKNeighborsClassifier(**FEW), "at most 50 records of one class"),
    "unscreened": (PrivateKNeighborsClassifier(**FEW, max_screened=0), "at most 50 records of one class"),
    "few neighbours": (PrivateKNeighborsClassifier(**FEW, max_screened=0, n_neighbors=9), "9 voters take part"),
    "sampled": (PrivateKNeighborsClassifier(vote_noise=1.0, n_neighbors=20, sampling_rate=0.1), "at most 50 records"),
    "mean": (PrivateKNeighborsRegressor(0, 2, **FEW), "at most 150 records in all"),
    "median": (PrivateKNeighborsRegressor(0, 2, **FEW, method="median"), "at most 150 records in all"),
    "teachers": (PateClassifier(20, **FEW), "there are 20 teachers"),
    "discriminant": (PrivateDiscriminant(0.1), "3 of 3 classes"),
}


@pytest.mark.parametrize(("model", "figure"), NOISY.values(), ids=NOISY)
def test_answers_that_can_only_be_noise_are_announced(model: Any, figure: str) -> None:
    with pytest.warns(NoiseWarning, match=figure) as caught:
        model.fit(IRIS, IRIS_Y)
    (warning,) = caught
    assert "larger epsilon" in str(warning.message)
    assert Path(warning.filename).name == Path(__file__).name
    assert "more records" in str(warning.message)
    if not isinstance(model, PrivateDiscriminant | PateClassifier):
        assert "9 voters" in figure or "for you alone" in str(warning.message)


@pytest.mark.parametrize(
    "model",
    [
        PrivateKNeighborsClassifier(4.0, max_answered=20),
        PrivateKNeighborsClassifier(4.0, max_answered=20, max_screened=0),
        PrivateKNeighborsRegressor(0, 9, epsilon=4.0, max_answered=5),
        PrivateKNeighborsRegressor(0, 9, epsilon=4.0, max_answered=5, method="median"),
        PateClassifier(60, epsilon=4.0, max_answered=20, mechanism="gnmax"),
        PrivateDiscriminant(2.0),
    ],
)
def test_answers_that_stand_out_are_not(model: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", NoiseWarning)
        model.fit(DIGITS, DIGITS_Y)


def test_the_warning_of_a_model_follows_from_what_is_published() -> None:
    with pytest.warns(NoiseWarning) as caught:
        model = PrivateDiscriminant(0.1, classes=range(3)).fit(IRIS, IRIS_Y).export()
    with pytest.warns(NoiseWarning) as again:
        _warn_of_noise(PublicDiscriminant.from_bytes(model.to_bytes()))
    assert str(caught[0].message) == str(again[0].message)


def test_no_warning_is_kept() -> None:
    with pytest.warns(NoiseWarning, match="for you alone"):
        voter = PrivateKNeighborsClassifier(**FEW).fit(IRIS, IRIS_Y)
    assert b"for you alone" not in pickle.dumps(voter)
    assert not {name for name in vars(voter) if "noise" in name} - {"vote_noise", "screening_noise"}
    assert np.isnan(voter.answer(IRIS[:5]).votes).any()
