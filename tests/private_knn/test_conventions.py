"""Private estimators as scikit-learn's users meet them: epsilon, scores, labels, tags and cross-validation."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.metrics import accuracy_score, r2_score
from sklearn.model_selection import cross_val_score
from sklearn.utils import get_tags

from nearveil.ledger import Ledger
from nearveil.privacy.noise import unsafe_seeded
from nearveil.private_knn import (
    AnsweredScore,
    ExhaustedError,
    PrivateDiscriminant,
    PrivateKNeighborsClassifier,
    PrivateKNeighborsRegressor,
    Student,
)
from nearveil.private_knn.records import make_hard_votes
from studies.pate import PateClassifier

X, Y = load_digits(return_X_y=True)
QUIET: dict[str, Any] = {"n_neighbors": 5, "vote_noise": 0.01, "max_answered": 10**6}
ESTIMATORS = [PrivateDiscriminant(), PrivateKNeighborsClassifier(), PrivateKNeighborsRegressor(0, 9), PateClassifier()]


@pytest.mark.parametrize("model", ESTIMATORS, ids=lambda model: type(model).__name__)
def test_nobody_but_the_owner_chooses_epsilon(model: Any) -> None:
    assert clone(model).get_params()["epsilon"] is None
    with pytest.raises(ValueError, match="epsilon must be given"):
        model.fit(X[:50], Y[:50])
    if isinstance(model, PrivateDiscriminant):
        with pytest.raises(ValueError, match="epsilon must be given"):
            model.forecast(X[:50], Y[:50])


def test_a_student_needs_a_voter_with_an_epsilon() -> None:
    with pytest.raises(ValueError, match="voter must be given"):
        Student().fit(X[:50], Y[:50], public=X[50:100])
    with pytest.raises(ValueError, match="epsilon must be given"):
        Student(PrivateKNeighborsClassifier()).fit(X[:50], Y[:50], public=X[50:100])


@pytest.mark.parametrize("model", [*ESTIMATORS, Student()], ids=lambda model: type(model).__name__)
def test_they_say_that_two_fits_differ(model: Any) -> None:
    assert get_tags(model).non_deterministic


# Scores


def test_declined_queries_are_not_wrong_answers() -> None:
    voter = PrivateKNeighborsClassifier(**(QUIET | {"max_answered": 30})).fit(X[:1000], Y[:1000])
    answers = clone(voter).fit(X[:1000], Y[:1000]).answer(X[1000:1040])
    assert answers.answered.sum() == 30
    weights = np.arange(40) + 1.0
    twin = clone(voter).fit(X[:1000], Y[:1000])
    expected = accuracy_score(Y[1000:1030], answers.labels[:30], sample_weight=weights[:30])
    score = twin.score_answered(X[1000:1040], Y[1000:1040], weights)
    assert isinstance(score, AnsweredScore)
    assert score == pytest.approx((expected, 0.75))
    assert voter.score(X[1000:1040], Y[1000:1040]) == pytest.approx(np.mean(answers.labels[:30] == Y[1000:1030]))
    with pytest.raises(ExhaustedError):  # a score is paid for as answers are
        voter.score(X[1000:1040], Y[1000:1040])


def test_a_score_of_no_answer_is_not_a_number() -> None:
    voter = PrivateKNeighborsClassifier(**QUIET, screening_noise=0.01, threshold=100.0, max_screened=10)
    score, answered = voter.fit(X[:100], Y[:100]).score_answered(X[100:105], Y[100:105])
    assert math.isnan(score)
    assert answered == 0


def test_labels_that_do_not_fit_cost_nothing() -> None:
    voter = PrivateKNeighborsClassifier(**(QUIET | {"max_answered": 5})).fit(X[:100], Y[:100])
    with pytest.raises(ValueError, match="inconsistent"):
        voter.score(X[:5], Y[:4])
    assert voter.answer(X[:5]).answered.all()


def test_a_regressor_scores_what_it_answered() -> None:
    voter = PrivateKNeighborsRegressor(0, 9, **(QUIET | {"max_answered": 60}), source=unsafe_seeded(0))
    values = clone(voter).fit(X[:1000], Y[:1000]).predict(X[1000:1080])
    assert np.isnan(values[60:]).all()
    score, answered = voter.fit(X[:1000], Y[:1000]).score_answered(X[1000:1080], Y[1000:1080])
    assert answered == 0.75
    assert score == pytest.approx(r2_score(Y[1000:1060], values[:60]), abs=0.01)


@pytest.mark.filterwarnings("ignore:a search or cross-validation fits")
def test_cross_validation_scores_answers_and_spends_for_every_fold(tmp_path: Path) -> None:
    names = np.array([f"digit {number}" for number in range(10)])[Y]
    for labels in (Y, names, Y.astype(object), Y > 4):
        with pytest.warns(UserWarning, match="each has its own budget: together they cost epsilon times"):
            scores = cross_val_score(PrivateKNeighborsClassifier(**(QUIET | {"max_answered": 100})), X, labels, cv=3)
        assert scores.min() > 0.85  # 100 of 599 queries of a fold are answered, and the others are not wrong
    with Ledger(tmp_path / "ledger.db") as ledger:
        terms: dict[str, Any] = {"max_answered": 250, "max_screened": 0, "n_neighbors": 40, "classes": range(10)}
        voter = PrivateKNeighborsClassifier(16.0, **terms, ledger=ledger, account="digits")
        voter.fit(X, Y)
        voter.set_params(ledger=None, account=ledger.account("digits"))  # copies draw on one account, not on copies
        with pytest.warns(UserWarning, match="Scoring failed"):
            scores = cross_val_score(voter, X, Y, cv=3)
        assert np.isfinite(scores).tolist() == [True, False, False]  # the first fold took all 250 answers
        assert ledger.account("digits").remaining() == ()


# Labels


@pytest.mark.parametrize("make", [lambda labels: labels > 4, lambda labels: (labels > 4).astype(object)])
def test_boolean_labels_stay_boolean(make: Any) -> None:
    voter = PrivateKNeighborsClassifier(**(QUIET | {"max_answered": 20})).fit(X[:1000], make(Y[:1000]))
    assert voter.classes_.dtype == bool
    labels = voter.predict(X[1000:1010])
    assert labels.dtype == bool
    assert np.mean(labels == (Y[1000:1010] > 4)) > 0.8
    labels = voter.predict(X[1010:1030])
    assert {type(label) for label in labels[:10].tolist()} == {bool}
    assert labels[10:].tolist() == [-1] * 10
    assert PateClassifier(1, mechanism="gnmax", vote_noise=0.01).fit(X[:200], Y[:200] > 4).predict(X[:5]).dtype == bool
    assert PrivateDiscriminant(8.0).fit(X, make(Y)).predict(X[:5]).dtype == bool


def test_whole_numbers_in_an_array_of_objects_are_whole_numbers() -> None:
    labels = Y.astype(object)
    voter = PrivateKNeighborsClassifier(**QUIET, classes=np.arange(10).astype(object)).fit(X, labels)
    assert voter.predict(X[:5]).dtype == voter.classes_.dtype == int
    assert PrivateDiscriminant(8.0).fit(X, labels).classes_.dtype == int
    with pytest.raises(ValueError, match="y must hold labels of one type"):
        make_hard_votes(np.array([1, "1", 2], dtype=object), None)
    with pytest.raises(ValueError, match="y must hold labels of one type"):
        make_hard_votes(np.array([1, 2.0, 2], dtype=object), None)
    with pytest.raises(ValueError, match="classes must hold labels of one type"):
        make_hard_votes([1, 2], np.array([1, "2"], dtype=object))


@pytest.mark.parametrize(
    ("classes", "declined"),
    [(["", "a"], "declined"), (["", "declined"], "declined_"), (["a", "b"], ""), ([-1, 1], -2), ([-5, -1], -6)],
)
def test_no_class_is_taken_for_a_declined_answer(classes: list[Any], declined: Any) -> None:
    labels = np.array(classes)[Y % 2]
    voter = PrivateKNeighborsClassifier(**(QUIET | {"max_answered": 40})).fit(X[:1000], labels[:1000])
    answers = voter.answer(X[1000:1050])
    assert np.mean(answers.labels[:40] == labels[1000:1040]) > 0.8
    assert answers.labels[40:].tolist() == [declined] * 10
