"""What may be published: a student's export. No pickle holds private rows that it need not, or a password."""

import pickle
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.linear_model import RidgeClassifier
from sklearn.pipeline import make_pipeline

from nearveil.ledger import Ledger
from nearveil.private_knn import (
    PrivateDiscriminant,
    PrivateKNeighborsClassifier,
    PrivateKNeighborsRegressor,
    Student,
)
from nearveil.private_knn.student_model import PublicStudent
from studies.networks import NetworkStudent
from studies.pate import PateClassifier

X, Y = load_digits(return_X_y=True)
RNG = np.random.default_rng(5)
PRIVATE = X[:300] + RNG.normal(scale=1e-3, size=(300, 64))  # no row is anywhere else
PRIVATE_Y = Y[:300]
PUBLIC, HELD = X[800:1100], X[1400:1500]
PASSWORD = "hunter2-and-more"  # noqa: S105
VOTERS: list[Any] = [
    PrivateKNeighborsClassifier,
    partial(PrivateKNeighborsRegressor, 0.0, 1.0),
    PateClassifier,
    PrivateDiscriminant,
]
ADDRESSES = [
    f"postgresql://me:{PASSWORD}@host/db",
    f"postgresql://host/db?sslpassword={PASSWORD}",
    f"postgresql+psycopg://me:{PASSWORD}@host/db?password={PASSWORD}",
]


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(tmp_path / "the place of the ledger.db") as opened:
        yield opened


def voter(**changed: Any) -> PrivateKNeighborsClassifier:
    given: dict[str, Any] = {"epsilon": 8.0, "max_answered": 30, "max_screened": 0, "classes": range(10)}
    return PrivateKNeighborsClassifier(**given | changed)


def arrays(value: Any, seen: set[int]) -> Iterator[np.ndarray[Any, Any]]:
    """Every array that hangs on an object."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, np.ndarray):
        yield value
    ours = type(value).__module__.startswith("nearveil.private_knn")
    inside = vars(value) if ours and hasattr(value, "__dict__") else value if isinstance(value, dict) else {}
    for one in (*inside.values(), *(value if isinstance(value, list | tuple) else ())):
        yield from arrays(one, seen)


def traces(fitted: PrivateKNeighborsClassifier) -> list[bytes]:
    """Bytes that tell of a private row or label: as they were given, and as a fitted voter holds them."""
    held = [one for one in arrays(fitted._poll, set()) if one.ndim and len(one) >= len(PRIVATE)]
    rows = [one[17] for one in (PRIVATE, PRIVATE.astype(np.float32), *held) if one[17].nbytes >= 64]
    assert len(rows) >= 3
    flat = [one for one in (PRIVATE_Y, *held) if one.ndim == 1 and one.dtype.kind in "iu"]
    return [row.tobytes() for row in rows] + [one.tobytes() for one in flat]


def test_a_pickle_of_a_student_holds_no_private_row_and_no_label(ledger: Ledger) -> None:
    """The voter that was given had been fitted, and the pickle held its records."""
    fitted = voter(ledger=ledger, account="digits").fit(PRIVATE, PRIVATE_Y)
    secrets = traces(fitted)
    student = Student(fitted, rounds=2, random_state=0).fit(PRIVATE, PRIVATE_Y, PUBLIC)
    assert any(secret in pickle.dumps(fitted) for secret in secrets)  # this test sees them where they are
    stored = pickle.dumps(student)
    assert not any(secret in stored for secret in secrets)
    loaded = pickle.loads(stored)  # noqa: S301
    assert not hasattr(loaded.voter, "_poll")
    assert loaded.voter.account == "digits"  # whoever fits it again pays from the same account
    np.testing.assert_array_equal(loaded.predict(HELD), student.predict(HELD))


def test_teachers_and_students_that_were_fitted_before_do_not_go_along() -> None:
    rival = PateClassifier(5, mechanism="gnmax", vote_noise=2.0, max_answered=30, classes=range(10))
    secret = RidgeClassifier().fit(PRIVATE, PRIVATE_Y)
    student = Student(rival.fit(PRIVATE, PRIVATE_Y), secret, random_state=0).fit(PRIVATE, PRIVATE_Y, PUBLIC)
    private = [secret, *(one for one in rival._poll._teachers.members if isinstance(one, RidgeClassifier))]
    assert len(private) == 6
    for stored in (pickle.dumps(student), pickle.dumps(student.export())):
        assert not any(one.coef_[0].tobytes() in stored for one in private)


@pytest.mark.parametrize("rounds", [1, 2])
def test_an_export_is_the_model_and_its_guarantee_and_nothing_else(ledger: Ledger, rounds: int) -> None:
    fitted = voter(ledger=ledger, account="the account").fit(PRIVATE, PRIVATE_Y)
    secrets = traces(fitted)
    student = Student(fitted, rounds=rounds, random_state=0).fit(PRIVATE, PRIVATE_Y, PUBLIC)
    stored = pickle.dumps(student.export())
    words = (b"the account", b"the place of the ledger", b"PrivateKNeighbors", b"Ledger", b"nearveil.ledger")
    assert not any(secret in stored for secret in (*secrets, *words))
    student.set_params(features=lambda rows: 0 * rows)  # an export is what was fitted
    loaded = pickle.loads(stored)  # noqa: S301
    assert isinstance(loaded, PublicStudent)
    np.testing.assert_array_equal(loaded.predict(HELD), student.predict(HELD))
    np.testing.assert_array_equal(loaded.classes, range(10))
    assert loaded.guarantee == student.guarantee
    assert loaded.guarantee.epsilon <= 8.0


def test_a_network_is_exported_too() -> None:
    pytest.importorskip("torch", reason="torch is not installed (the extra `torch`)")
    images = np.kron((X / 16).reshape(-1, 8, 8), np.ones((2, 2))).astype(np.float32)
    network = NetworkStudent(epochs=1, batch_size=64, device="cpu", random_state=0)
    fitted = voter().fit(images[:200].reshape(200, -1), Y[:200])
    student = Student(fitted, network, features=flat, self_training=0, random_state=0)
    student.fit(images[:200], Y[:200], images[800:1000])
    stored = pickle.dumps(student.export())
    assert not any(image.tobytes() in stored for image in images[:200])
    assert Y[:200].tobytes() not in stored
    loaded = pickle.loads(stored)  # noqa: S301
    np.testing.assert_array_equal(loaded.predict(images[1400:1420]), student.predict(images[1400:1420]))


def flat(images: Any) -> Any:
    return np.asarray(images, dtype=np.float64).reshape(len(images), -1)


@pytest.mark.parametrize("address", ADDRESSES, ids=["user", "option", "driver"])
@pytest.mark.parametrize("make", VOTERS, ids=lambda make: type(make()).__name__)
def test_no_estimator_takes_the_password_of_a_ledger(make: Any, address: str) -> None:
    """Scikit-learn shows parameters: fitted or not, alone, in a Student, in a pipeline, as text and as HTML."""
    asked = make(account="digits")
    nested = make_pipeline(Student(asked))
    for take in (
        lambda: make(ledger=address, account="digits"),
        lambda: asked.set_params(ledger=address),
        lambda: nested.set_params(student__voter__ledger=address),
        lambda: setattr(asked, "ledger", address),
    ):
        with pytest.raises(ValueError, match="ledger must be an address without a password") as refused:
            take()
        assert PASSWORD not in str(refused.value)
    for one in (asked, nested):
        shown = (repr(one), one._repr_html_(), str(one.get_params()), str(pickle.dumps(one)))
        assert not any(PASSWORD in text for text in shown)


@pytest.mark.parametrize("make", VOTERS, ids=lambda make: type(make()).__name__)
def test_an_address_without_a_password_stays_as_it_is(make: Any) -> None:
    for address in ("postgresql://me@host/db", "a:b.db"):
        asked = make(ledger=address)
        assert asked.ledger == clone(asked).ledger == pickle.loads(pickle.dumps(asked)).ledger == address  # noqa: S301


def test_a_ledger_that_is_given_shows_no_password(ledger: Ledger) -> None:
    fitted = voter(ledger=ledger, account="digits").fit(PRIVATE, PRIVATE_Y)
    assert repr(ledger) in repr(fitted)


def test_an_export_needs_a_fit() -> None:
    with pytest.raises(Exception, match="not fitted"):
        Student(voter()).export()
