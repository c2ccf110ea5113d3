"""Conduct: each check by itself, on an estimator that breaks it and on one that does not."""

import math
from dataclasses import replace
from typing import Any, Self

import numpy as np
import pytest

from nearveil.audit import Check
from nearveil.audit._experiment import LawTest, make_frozen_check
from nearveil.mechanisms import Covers, PrivUnit
from nearveil.privacy import Guarantee
from nearveil.privacy.noise import unsafe_seeded
from nearveil.private_knn import (
    Answers,
    PrivateKNeighborsClassifier,
    PrivateKNeighborsRegressor,
    Student,
)
from studies.audits import specimens as planted
from studies.audits.conduct import _check_account, _check_caps, _check_copies, _check_predict, _check_price
from studies.audits.estimators import make_student_experiment
from studies.audits.readers import make_reader, make_twin
from studies.pate import PateClassifier

DELTA = 1e-2


class Splitting(planted.EndlessVotes):
    """Keeps its cap, and gives every deep copy one of its own."""

    def answer(self, X: Any, *, progress: Any = None) -> Answers:
        return PrivateKNeighborsClassifier.answer(self, X, progress=progress)

    def __deepcopy__(self, memo: Any) -> Self:
        return type(self)(**self.get_params(deep=False)).fit(*self._records)


class Reopening(planted.EndlessVotes):
    """Keeps its cap, and opens another one wherever its pickle is loaded and an account pays."""

    def answer(self, X: Any, *, progress: Any = None) -> Answers:
        return PrivateKNeighborsClassifier.answer(self, X, progress=progress)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if state.get("account") is not None and "_records" in state:  # not in the poll
            self.fit(*self._records)


class Silent(PrivateKNeighborsClassifier):
    """Adds no noise at all."""

    def _release(self, sums: Any) -> Any:
        return sums.astype(float)


def neighbors(answered: int = 1, screened: int = 0, **more: Any) -> PrivateKNeighborsClassifier:
    return PrivateKNeighborsClassifier(2.0, DELTA, answered, max_screened=screened, **more)


VOTERS: dict[str, Any] = {
    "classes": neighbors(),
    "classes at a rate": neighbors(sampling_rate=0.5, vote_noise=1.5, n_neighbors=9),
    "distances": neighbors(feature_norm=100.0),
    "screened": neighbors(2, 3),
    "soft": neighbors(votes="soft"),
    "binary": neighbors(votes="binary", clip=3.0),
    "binary, a small clip": neighbors(votes="binary", clip=0.5),
    "nonnegative": neighbors(votes="nonnegative", clip=2.0),
    "signed": neighbors(votes="signed", clip=1.5),
    "mean": PrivateKNeighborsRegressor(-1, 3, epsilon=2.0, delta=DELTA, max_answered=1),
    "median": PrivateKNeighborsRegressor(-1, 3, epsilon=2.0, delta=DELTA, max_answered=1, method="median"),
    "gnmax": PateClassifier(10, mechanism="gnmax", epsilon=2.0, delta=DELTA, max_answered=1),
    "lnmax": PateClassifier(10, mechanism="lnmax", epsilon=2.0, delta=DELTA, max_answered=1),
    "confident-gnmax": PateClassifier(10, epsilon=2.0, delta=DELTA, max_answered=1, max_screened=2),
}


@pytest.mark.parametrize("name", list(VOTERS))
def test_what_the_audit_takes_records_to_say_is_what_they_say(name: str) -> None:
    """With hardly any noise, answers are the sums that the audit reckons with, in every database of every pair."""
    reader = make_reader(VOTERS[name])
    for database in (one for pair in reader.pairs for one in (pair.first, pair.second)):
        noise = 0.01 if name == "lnmax" else 1e-9  # no accountant composes so little Laplace noise
        quiet = make_twin(reader, unsafe_seeded(0)).set_params(vote_noise=noise)
        if reader.plan.screening is not None:
            quiet.set_params(threshold=-1e6)
        if reader.plan.sampling_rate < 1:
            quiet.set_params(sampling_rate=1.0)
        read = reader.read(quiet.fit(database.X, database.y).answer(np.tile(reader.query, (4, 1))))
        assert read.answered.all()
        assert reader.are_consistent(read).all()
        if name == "median":  # all turns go where the surplus is
            assert (read.values == (database.sums > 0)).all() or database.sums == 0
        else:
            np.testing.assert_allclose(read.values, np.tile(database.sums, (4, 1)), atol=20 * noise)


@pytest.mark.parametrize("name", [one for one in VOTERS if one not in ("classes at a rate", "confident-gnmax")])
def test_the_records_are_as_far_apart_as_they_can_be(name: str) -> None:
    """Their distance, over the noise, is what is charged for one vote."""
    reader = make_reader(VOTERS[name])
    votes: Any = reader.derive_events(reader.plan)["answered"]
    apart = max(np.linalg.norm(pair.first.sums - pair.second.sums) for pair in reader.pairs) / reader.plan.vote_noise
    if name == "lnmax":
        assert apart == pytest.approx(math.sqrt(2) / votes.noise)
    elif name == "median":  # each of eight turns sees one vote of a record
        assert apart / 4 * math.sqrt(8) == pytest.approx(1 / votes.noise_multiplier)
    else:
        charged = votes if hasattr(votes, "noise_multiplier") else votes.gaussian
        assert apart == pytest.approx(1 / charged.noise_multiplier)


@pytest.mark.parametrize("name", list(VOTERS))
def test_conduct_of_honest_estimators(name: str) -> None:
    reader = make_reader(VOTERS[name])
    assert _check_predict(reader, unsafe_seeded(2), 1e-9) is None
    assert _check_price(reader) is None
    assert _check_caps(reader) is None
    assert _check_copies(reader) is None


def test_accounts_and_keys_of_honest_estimators() -> None:
    """A cap of four, so that keys run out too."""
    assert _check_account(make_reader(VOTERS["mean"])) is None


def test_a_guarantee_that_costs_more_than_it_states() -> None:
    class Cheap(PrivateKNeighborsClassifier):
        @property
        def guarantee(self) -> Guarantee:
            return replace(super().guarantee, epsilon=1.9, sound=False, reason="a claim")

    assert "states epsilon 1.9 for a cost of" in str(_check_price(make_reader(Cheap(2.0, DELTA, 1, max_screened=0))))


def test_predictions_without_noise() -> None:
    """Where `answer` is honest, and `predict` is not."""

    class Blurting(planted.NoiselessLabels):
        def answer(self, X: Any, *, progress: Any = None) -> Answers:
            return PrivateKNeighborsClassifier.answer(self, X, progress=progress)

        def predict(self, X: Any) -> Any:
            return planted.NoiselessLabels.answer(self, X).labels

    found = _check_predict(make_reader(Blurting(2.0, DELTA, 1, max_screened=0)), unsafe_seeded(3), 1e-9)
    assert "a record that flips the plurality (first input), coin 1" in str(found)


def test_copies_that_count_for_themselves() -> None:
    reader = make_reader(Splitting(2.0, DELTA, 3, max_screened=0))
    assert _check_caps(reader) is None
    assert _check_copies(reader) == "copies together: 6 queries were answered where 3 are allowed"


def test_pickles_on_an_account_that_count_for_themselves() -> None:
    reader = make_reader(Reopening(2.0, DELTA, 3, max_screened=0))
    assert _check_caps(reader) is None
    assert _check_copies(reader) == "copies together: 9 queries were answered where 3 are allowed"


def test_parameters_that_are_set_later() -> None:
    class Loose:
        """States whatever epsilon it was given last."""

        def __init__(self, epsilon: float) -> None:
            self.epsilon = epsilon

        def get_params(self, deep: bool = True) -> dict[str, float]:
            del deep
            return {"epsilon": self.epsilon}

        def set_params(self, *, epsilon: float) -> Self:
            self.epsilon = epsilon
            return self

        @property
        def guarantee(self) -> Guarantee:
            return replace(make_reader(neighbors()).guarantee, epsilon=self.epsilon, sound=False, reason="a claim")

    def check(estimator: Any) -> Check:
        return make_frozen_check(estimator)(unsafe_seeded(0), 1e-9)

    assert check(Loose(2.0)).result == "failed"
    rows = np.random.default_rng(0).standard_normal((40, 4))
    assert check(PrivUnit(2.0).fit(rows)).result == "passed"
    assert check(Covers(2.0).fit(rows).index(rows)).result == "passed"
    assert check(neighbors().fit(rows, np.arange(40) % 2)).result == "passed"


def test_students_are_read_in_all_rounds() -> None:
    """Their votes follow the stated law; without noise they do not."""
    verdicts = []
    for voter in (neighbors(8), Silent(2.0, DELTA, 8, max_screened=0)):
        experiment = make_student_experiment(Student(voter, rounds=2, random_state=0))
        test = LawTest(experiment.law)
        (pair,) = experiment.pairs
        seen = experiment.observe(pair, 0, 6, unsafe_seeded(4), test)
        assert seen.numbers.shape == (6, 20)
        assert test.find_contradictions() is None
        verdicts.append((test.find_misfit(1e-9), test.find_repeats(1e-9)))
    assert verdicts[0] == (None, None)
    assert "does not have the stated spread" in str(verdicts[1][0])
    assert "the same outcome came 48 times in 48 runs" in str(verdicts[1][1])


def test_students_pay_for_all_rounds() -> None:
    found = [check(unsafe_seeded(0), 1e-9) for check in make_student_experiment(Student(neighbors(8), rounds=2)).checks]
    assert found == [Check("the account", "passed"), Check("the export", "passed")]


def test_students_that_publish_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = make_student_experiment(Student(neighbors(8), features=np.asarray))
    export = Student.export

    def careless(student: Student) -> Any:
        return replace(export(student), classes=experiment.pairs[0].first.X[3])

    monkeypatch.setattr(Student, "export", careless)
    assert experiment.checks[1](unsafe_seeded(0), 1e-9) == Check("the export", "failed", "it holds a private row")
    monkeypatch.setattr(Student, "export", lambda student: student)
    assert experiment.checks[1](unsafe_seeded(0), 1e-9).detail == "it holds the address of the ledger"
