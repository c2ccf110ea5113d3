"""A student as bytes: it predicts as before, holds nothing private, and bytes that are wrong are refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dp_accounting import SelfComposedDpEvent
from sklearn.datasets import load_digits
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression, RidgeClassifier
from sklearn.svm import SVC, LinearSVC

from nearveil.ledger.budget import format_event
from nearveil.mechanisms.messages import Message, MessageError
from nearveil.privacy.events import NoisyScreening, PureDp
from nearveil.private_knn import PrivateKNeighborsClassifier, PublicStudent, Student
from nearveil.private_knn.student_model import IMAGE_FORMATS, _fingerprint
from studies.networks import NetworkStudent

X, Y = load_digits(return_X_y=True)
HELD = X[1000:]
NAMES = np.array([f"digit {number}" for number in range(10)])


def export(student: Any = None, *, n_classes: int = 10, names: bool = False, **options: Any) -> PublicStudent:
    rows = n_classes > Y[:600]
    labels = (NAMES[Y] if names else Y)[:600][rows]
    classes = NAMES[:n_classes] if names else range(n_classes)
    voter = PrivateKNeighborsClassifier(
        **{"vote_noise": 2.0, "n_neighbors": 15, "max_answered": 60, "classes": classes, **options.pop("voter", {})}
    )
    fitted = Student(voter, student, random_state=0, **options).fit(X[:600][rows], labels, public=X[600:900])
    return fitted.export()


@pytest.fixture(scope="module")
def public() -> PublicStudent:
    return export()


@pytest.mark.parametrize(
    ("student", "options"),
    [
        (None, {}),
        (None, {"n_classes": 2}),
        (None, {"n_classes": 3, "names": True}),
        (None, {"n_classes": 1}),
        (None, {"voter": {"screening_noise": 3.0, "threshold": 5.0, "max_screened": 80, "sampling_rate": 0.5}}),
        (SVC(C=0.2, gamma=0.3, decision_function_shape="ovr"), {}),
        (LogisticRegression(), {"names": True}),
        (LogisticRegression(), {"n_classes": 2}),
        (RidgeClassifier(), {}),
        (LinearSVC(fit_intercept=False), {}),
    ],
)
def test_a_student_read_from_bytes_predicts_as_before(student: Any, options: dict[str, Any], tmp_path: Path) -> None:
    before = export(student, **options)
    before.save(tmp_path / "student")
    after = PublicStudent.load(tmp_path / "student")
    np.testing.assert_array_equal(after.predict(HELD), before.predict(HELD))
    np.testing.assert_array_equal(after.classes, before.classes)
    assert after.guarantee == before.guarantee
    assert after.to_bytes() == before.to_bytes()


def test_rows_of_another_width_are_refused(public: PublicStudent) -> None:
    with pytest.raises(ValueError, match=r"X must have \d+ features for each row, as in fit; it has 1$"):
        public.predict(HELD[:, :1])


def test_a_network_read_from_bytes_predicts_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="torch is not installed (the extra `torch`)")
    rng = np.random.default_rng(0)
    images = np.clip(np.repeat(np.repeat(X.reshape(-1, 8, 8), 3, axis=1), 3, axis=2) / 16, 0, 1)
    network = NetworkStudent(epochs=1, random_state=0)
    voter = PrivateKNeighborsClassifier(vote_noise=2.0, n_neighbors=15, max_answered=40, classes=range(10))
    student = Student(voter, network, self_training=0, random_state=0)
    before = student.fit(images[:300], Y[:300], public=images[300:400]).export()
    data = before.to_bytes()
    after = PublicStudent.from_bytes(data)
    asked = rng.permutation(images[400:])[:50]
    np.testing.assert_array_equal(after.predict(asked), before.predict(asked))
    assert after.to_bytes() == data
    for shape, words in (([1, 512, 512], "as many numbers"), ([1, 1, 1], "too small"), ([9, 24, 24], "must fit")):
        with pytest.raises(MessageError, match=words):
            PublicStudent.from_bytes(forge(data, parameters={"architecture": "mnist", "shape": shape}))
    with pytest.raises(MessageError, match="architecture is not known"):
        PublicStudent.from_bytes(forge(data, parameters={"architecture": "load", "shape": [1, 24, 24]}))
    monkeypatch.delitem(IMAGE_FORMATS, "network")
    with pytest.raises(MessageError, match=r"import studies\.networks"):
        PublicStudent.from_bytes(data)


@pytest.mark.parametrize("student", [RandomForestClassifier(5), SVC(kernel="linear"), SVC(break_ties=True)])
def test_a_classifier_without_a_format_is_refused(student: Any) -> None:
    with pytest.raises(ValueError, match="has no format without code"):
        export(student).to_bytes()


def test_own_features_are_brought_by_the_reader() -> None:
    before = export(features=halve)
    data = before.to_bytes()
    assert b"halve" not in data
    np.testing.assert_array_equal(PublicStudent.from_bytes(data, features=halve).predict(HELD), before.predict(HELD))
    with pytest.raises(ValueError, match="features must be the function"):
        PublicStudent.from_bytes(data)


def test_features_that_were_not_used_are_refused(public: PublicStudent) -> None:
    with pytest.raises(ValueError, match="features must be left out"):
        PublicStudent.from_bytes(public.to_bytes(), features=halve)


def halve(rows: Any) -> Any:
    return np.asarray(rows)[:, ::2]


def test_bytes_hold_no_private_row_and_no_account(tmp_path: Path) -> None:
    address = str(tmp_path / "budget.db")
    data = export(voter={"ledger": address, "account": "the name of an account", "vote_noise": 9.0}).to_bytes()
    assert not any(row.tobytes() in data for row in X[:600])
    assert address.encode() not in data
    assert b"the name of an account" not in data


def forge(data: bytes, arrays: dict[str, Any] | None = None, **changes: Any) -> bytes:
    """Return bytes with other arrays and another description, and with the fingerprint that fits them."""
    message = Message.from_bytes(data)
    about = {**json.loads(message["about"].tobytes()), **changes}
    parts = {**message.arrays, "about": np.frombuffer(json.dumps(about).encode(), dtype=np.uint8), **(arrays or {})}
    parts = {name: values for name, values in parts.items() if values is not None}
    return Message("student", _fingerprint(parts), parts).to_bytes()


def guarantee(data: bytes, **changes: Any) -> dict[str, Any]:
    return {"guarantee": {**json.loads(Message.from_bytes(data)["about"].tobytes())["guarantee"], **changes}}


def repeat(event: Any, count: int) -> str:
    inner = json.loads(format_event(event))
    return json.dumps({"type": "SelfComposedDpEvent", "event": inner, "count": count})


HOSTILE: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "truncated": ("truncated", lambda data: data[:-1]),
    "of another kind": ("not a student", lambda _: Message("covers", "0", {"codes": np.arange(2)}).to_bytes()),
    "flipped": ("fingerprint does not match", lambda data: data[:-1] + bytes([data[-1] ^ 1])),
    "a lower epsilon": ("epsilon must be at least", lambda data: forge(data, **guarantee(data, epsilon=0.1))),
    "no events": ("events must be 1 to 2", lambda data: forge(data, **guarantee(data, events=[]))),
    "other events": (
        "votes or screenings",
        lambda data: forge(data, **guarantee(data, events=[repeat(PureDp(1.0), 2)])),
    ),
    "too many votes": (
        "votes or screenings",
        lambda data: forge(data, **guarantee(data, events=[repeat(NoisyScreening(1e9, 1.0, 9), 10**7)])),
    ),
    "too many screenings": (
        "at most 20,000 screenings",
        lambda data: forge(data, **guarantee(data, events=[repeat(NoisyScreening(1e9, 1.0, 9), 10**5)])),
    ),
    "screenings of too many voters": (
        "at most 10,000 voters",
        lambda data: forge(data, **guarantee(data, events=[repeat(NoisyScreening(1e9, 1.0, 20_000), 1)])),
    ),
    "a unit that does not print": (
        "characters that print",
        lambda data: forge(data, **guarantee(data, unit="a\x1b[2J")),
    ),
    "no classes": ("1 to 4096 labels", lambda data: forge(data, classes=[])),
    "unsorted classes": ("sorted", lambda data: forge(data, classes=[9, 8, 7, 6, 5, 4, 3, 2, 1, 0])),
    "codes beyond the classes": ("codes must be", lambda data: forge(data, {"codes": np.arange(1, 11)})),
    "negative codes": ("codes must be", lambda data: forge(data, {"codes": np.arange(-1, 9)})),
    "supports that overlap": ("must fit", lambda data: forge(data, {"supports": change_supports(data)})),
    "few intercepts": ("must fit", lambda data: forge(data, {"intercepts": np.zeros(3)})),
    "narrow vectors": ("must fit", lambda data: forge(data, {"vectors": np.zeros((5, 2))})),
    "whole vectors": ("another type", lambda data: forge(data, {"vectors": np.zeros((5, 2), dtype=np.int8)})),
    "no gamma": ("missing", lambda data: forge(data, parameters={})),
    "an endless gamma": ("must fit", lambda data: forge(data, parameters={"gamma": 1e999})),
    "many bits": ("1 to 52 bits", lambda data: forge(data, whitening={"reach": 1.0, "bits": 4000})),
    "no reach": ("positive reach", lambda data: forge(data, whitening={"reach": 0.0, "bits": 20})),
    "no whitening": ("not for images", lambda data: forge(data, whitening=None)),
    "a wide mean": ("for each component", lambda data: forge(data, {"mean": np.zeros(99)})),
    "an array too many": ("unexpected array", lambda data: forge(data, {"code": np.zeros(1)})),
    "no components": ("must hold 'components'", lambda data: forge(data, {"components": None})),
    "another model": ("must fit", lambda data: forge(data, model="pickle")),
    "a constant of ten classes": ("must fit", lambda data: forge(data, model="constant")),
    "a field too many": ("description cannot be read", lambda data: forge(data, code="import os")),
}


def change_supports(data: bytes) -> Any:
    supports = Message.from_bytes(data)["supports"].copy()
    supports[0] += supports[1] + 1
    supports[1] = -1
    return supports


@pytest.mark.parametrize("name", list(HOSTILE))
def test_hostile_bytes_are_refused(name: str, public: PublicStudent) -> None:
    words, spoil = HOSTILE[name]
    data = spoil(public.to_bytes())
    with pytest.raises(MessageError, match=words):
        PublicStudent.from_bytes(data)


def test_events_that_no_reader_takes_are_not_written(public: PublicStudent) -> None:
    event = SelfComposedDpEvent(NoisyScreening(1e9, 1.0, 20_000), 1)
    student = replace(public, guarantee=replace(public.guarantee, events=(event,)))
    with pytest.raises(MessageError, match="at most 10,000 voters"):
        student.to_bytes()


def test_no_changed_byte_gives_another_student(public: PublicStudent) -> None:
    data, rng = public.to_bytes(), np.random.default_rng(0)
    for place in [*range(400), *rng.integers(0, len(data), 200)]:
        changed = bytearray(data)
        changed[place] ^= 1 << int(rng.integers(8))
        with pytest.raises(MessageError):
            PublicStudent.from_bytes(bytes(changed))
