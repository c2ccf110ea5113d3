"""What one row is: an account pays for its own unit alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nearveil.ledger import Ledger
from nearveil.private_knn import PrivateKNeighborsClassifier, PrivateKNeighborsRegressor, Student
from studies.pate import PateClassifier

PERSON = "person with all images"
ROWS, LABELS = np.random.default_rng(0).normal(size=(60, 3)), np.arange(60) % 2
TERMS: dict[str, Any] = {"epsilon": 1.0, "max_answered": 4}


def voters(**given: Any) -> list[Any]:
    return [
        PrivateKNeighborsClassifier(**TERMS, max_screened=0, classes=[0, 1], **given),
        PrivateKNeighborsRegressor(0, 1, **TERMS, **given),
        PateClassifier(5, **TERMS, classes=[0, 1], **given),
    ]


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(str(tmp_path / "budget.db"))


def account(ledger: Ledger, unit: str) -> Any:
    return ledger.open_account(
        unit, owner="me", protects="database", unit=unit, relation="add-remove", epsilon=5.0, delta=1e-5
    )


def test_votes_of_records_are_not_paid_by_an_account_of_persons(ledger: Ledger) -> None:
    persons = account(ledger, PERSON)
    for voter in voters(account=persons):
        with pytest.raises(ValueError, match=f"unit must be the account's, '{PERSON}'"):
            voter.fit(ROWS, LABELS)
    with pytest.raises(ValueError, match="unit must be the account's"):
        Student(voters(account=persons)[0]).fit(ROWS, LABELS, ROWS.copy())
    assert persons.balance().spent == 0


def test_votes_of_persons_are_not_paid_by_an_account_of_records(ledger: Ledger) -> None:
    for voter in voters(account=account(ledger, "record"), unit=PERSON):
        with pytest.raises(ValueError, match="unit must be the account's, 'record'"):
            voter.fit(ROWS, LABELS)


def test_who_says_that_a_row_is_a_person_is_believed(ledger: Ledger) -> None:
    persons = account(ledger, PERSON)
    for voter in voters(account=persons, unit=PERSON):
        assert voter.fit(ROWS, LABELS).guarantee.unit == PERSON
        assert PERSON in str(voter.guarantee)
        assert persons.preview(voter.guarantee).allowed


def test_an_account_that_is_opened_has_the_unit_that_is_said(ledger: Ledger) -> None:
    voters(ledger=ledger, account="new", unit=PERSON)[0].fit(ROWS, LABELS)
    assert ledger.account("new").unit == PERSON
    with pytest.raises(ValueError, match="unit must be the account's"):
        voters(ledger=ledger, account="new")[0].fit(ROWS, LABELS)


def test_classes_read_from_labels_are_told_in_the_unit(ledger: Ledger) -> None:
    guessed = PrivateKNeighborsClassifier(**TERMS, unit=PERSON, account=account(ledger, PERSON))
    with pytest.raises(ValueError, match="classes must be given"):
        guessed.fit(ROWS, LABELS)
    assert (
        guessed.set_params(account=None).fit(ROWS, LABELS).guarantee.unit == f"{PERSON} of a class that occurs anyway"
    )


def test_a_unit_must_say_something() -> None:
    with pytest.raises(ValueError, match="unit must say what one record is"):
        voters(unit=" ")[0].fit(ROWS, LABELS)


def test_the_ledger_takes_no_guarantee_of_another_unit(ledger: Ledger) -> None:
    persons = account(ledger, PERSON)
    records = voters()[0].fit(ROWS, LABELS).guarantee
    for ask in (persons.preview, persons.spend):
        with pytest.raises(ValueError, match="guarantee is about the unit 'record'"):
            ask(records)
    assert persons.balance().spent == 0
    assert persons.preview(replace(records, unit=PERSON)).allowed
