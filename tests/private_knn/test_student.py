"""The student: what its rounds cost, what it learns, and that nothing private is left in it."""

import pickle
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import NearestCentroid
from sklearn.svm import SVC

from nearveil.features import TorchExtractor
from nearveil.ledger import Ledger, OverBudgetError
from nearveil.privacy import compose
from nearveil.privacy.noise import unsafe_seeded
from nearveil.private_knn import ExhaustedError, PrivateKNeighborsClassifier, Student
from nearveil.private_knn.scaling import multiply_exactly
from nearveil.private_knn.student import build_graph, choose_typical, regress_votes, spread_labels
from nearveil.private_knn.student_model import HalfWhitening, map_rows, normalize_rows
from studies.pate import PateClassifier

X, Y = load_digits(return_X_y=True)
PRIVATE, PRIVATE_Y, PUBLIC, PUBLIC_Y = X[:800], Y[:800], X[800:1400], Y[800:1400]
HELD, HELD_Y = X[1400:], Y[1400:]


def voter(**parameters: Any) -> PrivateKNeighborsClassifier:
    usual: dict[str, Any] = {
        "epsilon": 8.0,
        "max_answered": 60,
        "max_screened": 0,
        "classes": range(10),
        "source": unsafe_seeded(1),
    }
    return PrivateKNeighborsClassifier(**(usual | parameters))


def fitted(student: Student) -> Student:
    student.fit(PRIVATE, PRIVATE_Y, PUBLIC)
    return student


@pytest.mark.filterwarnings("ignore:only")
def test_it_learns_more_than_the_noisy_answers_say() -> None:
    student = fitted(Student(voter(epsilon=0.45), random_state=0))
    (asked,) = student.rounds_
    answers = np.mean(asked.answers.labels == PUBLIC_Y[asked.rows])
    assert answers < 0.75  # the noise is as large as that
    assert np.mean(asked.labels == PUBLIC_Y) > answers + 0.05
    assert student.score(HELD, HELD_Y) > 0.65


def test_with_little_noise_it_is_good() -> None:
    assert fitted(Student(voter(epsilon=60.0), random_state=0)).score(HELD, HELD_Y) > 0.85


def test_a_second_round_in_the_students_features_is_asked_and_right() -> None:
    student = fitted(Student(voter(epsilon=60.0), rounds=2, shares=[0.6, 0.4], random_state=0))
    assert [len(asked.rows) for asked in student.rounds_] == [36, 24]
    assert all(step.answers.answered.all() for step in student.rounds_)
    assert student.score(HELD, HELD_Y) > 0.8


@pytest.mark.parametrize("accounting", ["individual", "worst-case"])
@pytest.mark.parametrize("rounds", [1, 3])
def test_the_promise_is_the_composition_of_all_rounds(rounds: int, accounting: str) -> None:
    terms: dict[str, Any] = {"accounting": accounting, "least_records": 700}
    student = fitted(Student(voter(epsilon=2.0, **terms), rounds=rounds, random_state=0))
    terms |= {"epsilon": None, "vote_noise": student.plan_.vote_noise, "max_screened": None}
    public = PUBLIC if accounting == "individual" else None
    parts = [
        voter(**terms, max_answered=len(asked.rows)).fit(PRIVATE, PRIVATE_Y, public=public) for asked in student.rounds_
    ]
    whole = compose([part.guarantee for part in parts], delta=1e-5)
    assert sum(len(asked.rows) for asked in student.rounds_) == 60
    assert student.guarantee.epsilon == pytest.approx(whole.epsilon, rel=1e-6)
    assert 0.99 * 2.0 < student.guarantee.epsilon <= 2.0
    assert student.guarantee.protects == "database"


def test_rounds_with_screening_stay_within_the_caps() -> None:
    chosen = voter(epsilon=10.0, max_answered=40, max_screened=60)
    student = fitted(Student(chosen, rounds=2, random_state=0))
    assert sum(len(asked.rows) for asked in student.rounds_) <= 60
    assert sum(int(step.answers.answered.sum()) for step in student.rounds_) <= 40
    assert student.guarantee.epsilon <= 10.0


def test_every_round_is_paid_from_the_account(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    chosen = voter(source=None, ledger=url, account="digits")
    student = fitted(Student(chosen, rounds=2, shares=[0.5, 0.5], random_state=0))
    account = Ledger(url).account("digits")
    assert not [count for _, count in account.balance().remaining if count]
    assert [len(asked.rows) for asked in student.rounds_] == [30, 30]
    with pytest.raises((OverBudgetError, ExhaustedError)):
        fitted(Student(chosen, random_state=0))


def test_noise_is_not_drawn_twice() -> None:
    """A copied source would give both rounds the same noise, and their difference none."""
    student = fitted(Student(voter(n_neighbors=1, vote_noise=5.0, epsilon=None), rounds=2, random_state=0))
    first, second = (step.answers.votes for step in student.rounds_)
    assert np.abs(first - second).max() > 5


def test_other_voters_and_students() -> None:
    rival = PateClassifier(20, mechanism="gnmax", epsilon=30.0, max_answered=60, classes=range(10))
    student = Student(rival, LogisticRegression(max_iter=500), rounds=2, self_training=0, random_state=0)
    assert fitted(student).score(HELD, HELD_Y) > 0.7
    assert student.guarantee.epsilon <= 30.0
    assert isinstance(student.student_, LogisticRegression)


def test_two_classes_have_one_score_and_work() -> None:
    few = PRIVATE_Y < 2
    student = Student(voter(epsilon=60.0, classes=[0, 1], max_answered=20), rounds=2, random_state=0)
    student.fit(PRIVATE[few], PRIVATE_Y[few], PUBLIC[np.isin(PUBLIC_Y, [0, 1])])
    held = np.isin(HELD_Y, [0, 1])
    assert student.score(HELD[held], HELD_Y[held]) > 0.95


def test_a_single_class_among_the_answers_is_learned_too() -> None:
    student = Student(voter(epsilon=60.0), random_state=0).fit(PRIVATE, np.full(800, 3), PUBLIC)
    assert set(student.predict(HELD)) == {3}


def test_images_get_hog() -> None:
    pytest.importorskip("skimage", reason="scikit-image is not installed (the extra `images`)")
    images = np.kron((X / 16).reshape(-1, 8, 8), np.ones((2, 2)))
    student = Student(voter(max_answered=40), random_state=0).fit(images[:600], Y[:600], images[600:1000])
    assert student.score(images[1000:1300], Y[1000:1300]) > 0.7
    assert student._space.reach <= 1  # HOG's range, not that of pixels


def test_it_is_an_estimator() -> None:
    student = Student(voter(), SVC(C=2.0), rounds=2)
    copy = clone(student.set_params(voter__max_answered=7))
    assert copy.get_params()["voter__max_answered"] == 7
    assert copy.get_params()["student__C"] == 2.0
    assert not hasattr(copy, "student_")


def test_a_fitted_student_is_public() -> None:
    student = fitted(Student(voter(source=None), rounds=2, random_state=0))
    stored = pickle.dumps(student)
    whitened = student._space.transform(PRIVATE)
    for rows in (PRIVATE, PRIVATE.astype(np.float32), whitened):
        assert rows[17].tobytes() not in stored
    assert len(stored) < PRIVATE.nbytes
    loaded = pickle.loads(stored)  # noqa: S301
    assert np.array_equal(loaded.predict(HELD), student.predict(HELD))
    assert "800" not in repr(student)


def test_a_seed_fixes_everything_but_the_noise_of_the_voters() -> None:
    one, other = (fitted(Student(voter(source=unsafe_seeded(3)), rounds=2, random_state=5)) for _ in range(2))
    assert np.array_equal(one.predict(HELD), other.predict(HELD))
    fresh = fitted(Student(voter(source=None), rounds=2, random_state=5))
    assert np.array_equal(fresh.rounds_[0].rows, one.rounds_[0].rows)
    assert not np.array_equal(fresh.rounds_[0].answers.votes, one.rounds_[0].answers.votes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shares": [0.5, 0.6], "rounds": 2}, "shares must hold a positive number"),
        ({"shares": [1.0], "rounds": 2}, "shares must hold a positive number"),
        ({"shares": [1.0, 0.0], "rounds": 2}, "shares must hold a positive number"),
        ({"rounds": 0}, "'rounds' parameter"),
        ({"voter": voter(votes="binary", classes=None)}, "voter must vote on classes"),
        ({"features": lambda rows: rows[:, 0]}, "features must return one row"),
        ({"features": lambda rows: rows * np.nan}, "features must return one row"),
    ],
)
def test_bad_parameters(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fitted(Student(**({"voter": voter()} | change)))


def test_a_student_without_features_has_no_second_round() -> None:
    class Mute(NearestCentroid):  # type: ignore[misc]
        decision_function = property()
        predict_proba = property()

    with pytest.raises(ValueError, match="student must have one of transform, decision_function, predict_proba"):
        fitted(Student(voter(), Mute(), rounds=2))


@pytest.mark.parametrize(
    ("private", "labels", "public", "message"),
    [
        (PRIVATE, PRIVATE_Y[:-1], PUBLIC, "y must have one label for each row of X"),
        (PRIVATE, PRIVATE_Y, PUBLIC[:, 1:], "public must have rows of the same shape as X"),
        (PRIVATE, PRIVATE_Y, PUBLIC[:1], "public must hold at least two rows"),
        (PRIVATE, PRIVATE_Y, PUBLIC[:0], "public must contain at least one row"),
        (PRIVATE * np.nan, PRIVATE_Y, PUBLIC, "X must hold finite numbers"),
        (PRIVATE, PRIVATE_Y, np.full_like(PUBLIC, np.inf), "public must hold finite numbers"),
        (PRIVATE.astype(str), PRIVATE_Y, PUBLIC, "X must hold finite numbers"),
        (PRIVATE[:, 0], PRIVATE_Y, PUBLIC, "X must contain at least one row"),
        ([[1.0, 2.0], [3.0]], [0, 1], PUBLIC, "X must hold rows of one shape"),
    ],
)
def test_bad_data_is_named_and_not_shown(private: Any, labels: Any, public: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        Student(voter()).fit(private, labels, public)
    assert "800" not in str(error.value)
    assert "799" not in str(error.value)


@pytest.mark.parametrize("part", [slice(None), slice(0, 9), slice(None, None, -1)])
def test_private_rows_that_are_given_as_public_are_refused(part: slice) -> None:
    """The support vectors of a published student are public rows."""
    rows = PRIVATE.copy()
    with pytest.raises(ValueError, match="public must not be X"):
        Student(voter()).fit(rows, PRIVATE_Y, rows[part])
    listed = rows.tolist()
    with pytest.raises(ValueError, match="public must not be X"):
        Student(voter()).fit(listed, PRIVATE_Y, listed)


def test_all_declined_is_an_error_that_says_what_to_do() -> None:
    strict = voter(epsilon=None, vote_noise=1.0, screening_noise=1.0, threshold=1e6, max_screened=50)
    with pytest.raises(ValueError, match="voter declined every public row"):
        fitted(Student(strict))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 400), st.sampled_from([1e-3, 1.0, 1e4]))
def test_a_row_is_mapped_alike_in_every_batch(seed: int, width: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    space = HalfWhitening.learn(scale * rng.normal(size=(60, width)), 16)
    rows = 2 * scale * rng.normal(size=(37, width))
    whole = space.transform(rows)
    for part in (slice(0, 1), slice(3, 20), slice(30, 37)):
        assert np.array_equal(whole[part], space.transform(np.asfortranarray(rows[part])))
    assert np.array_equal(whole[::-1], space.transform(rows[::-1]))


@pytest.mark.parametrize("width", [2, 7, 63, 400])
def test_sums_of_whole_rows_are_exact_where_they_are_largest(width: int) -> None:
    """All values of a row at the border, each with the sign of its component: no order of summation may round."""
    rng = np.random.default_rng(width)
    space = HalfWhitening.learn(rng.normal(size=(60, 1)) + 0.05 * rng.normal(size=(60, width)), 4)
    signs = np.sign(space.components.T)
    rows = space.reach * np.concatenate([signs * (1 - 1e-3 * rng.random(signs.shape)) for _ in range(9)])
    found = multiply_exactly(rows, space.components, space.reach, space.bits)
    parts = [[int(value) for value in column] for column in space.components.T]
    whole = np.rint(rows / space.reach * 2.0**space.bits)
    exact = [[sum(int(a) * b for a, b in zip(row, part, strict=True)) for part in parts] for row in whole]
    assert [[int(value) for value in row] for row in found] == exact
    assert width * 4**space.bits < 2**53


def test_values_beyond_those_of_the_public_rows_are_cut_off() -> None:
    rng = np.random.default_rng(1)
    space = HalfWhitening.learn(rng.normal(size=(60, 5)), 4)
    rows = 1e9 * rng.normal(size=(20, 5))
    assert np.array_equal(space.transform(rows), space.transform(space.reach * np.sign(rows)))


class Batchwise(NearestCentroid):  # type: ignore[misc]
    """A student whose features of a row depend on the batch it comes in."""

    def transform(self, X: Any) -> Any:
        return X + X.mean(axis=0)


def test_private_rows_are_mapped_one_by_one() -> None:
    student = fitted(Student(voter(epsilon=60.0), Batchwise(), rounds=2, random_state=0))
    rows = PRIVATE[:30]
    mapped = map_rows(rows, student.features, student._space)
    inputs = normalize_rows(map_rows(PUBLIC, student.features, student._space))
    whole, space = student._transform_rows(mapped, inputs)
    without, same = student._transform_rows(mapped[1:], inputs)
    assert np.array_equal(space, same)
    assert np.array_equal(whole[1:], without)


def test_half_whitening_is_principal_components() -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(500, 3)) * [9.0, 4.0, 1.0]
    mapped = HalfWhitening.learn(rows, 3).transform(rows)
    assert mapped.mean(axis=0) == pytest.approx(0, abs=1e-5)
    # Variance v becomes v^(1/2).
    assert mapped.var(axis=0, ddof=1) == pytest.approx(np.sqrt(np.sort(np.linalg.eigvalsh(np.cov(rows.T)))[::-1]), 1e-4)


def test_public_rows_that_are_all_alike_teach_nothing() -> None:
    with pytest.raises(ValueError, match="public must hold rows that differ"):
        HalfWhitening.learn(np.ones((5, 4)), 3)


def test_regression_averages_noise_away() -> None:
    rng = np.random.default_rng(0)
    rows = normalize_rows(np.concatenate([rng.normal([5, 0, 0], 0.3, (300, 3)), rng.normal([0, 5, 0], 0.3, (300, 3))]))
    truth = np.repeat(np.eye(2), 300, axis=0)
    asked = choose_typical(rows, 100, seed=0)
    assert len(np.unique(asked)) == 100
    noisy = truth[asked] + rng.normal(0, 1.0, (100, 2))
    assert np.mean(noisy.argmax(axis=1) == truth[asked].argmax(axis=1)) < 0.9
    scores = regress_votes(rows, asked, noisy, 1.0)
    assert np.mean(scores.argmax(axis=1) == truth.argmax(axis=1)) == 1


def test_spreading_reaches_every_row_of_a_cluster() -> None:
    rng = np.random.default_rng(0)
    rows = np.concatenate([rng.normal(0, 1, (50, 2)), rng.normal(30, 1, (50, 2))])
    scores = np.zeros((100, 2))
    scores[0, 0] = scores[50, 1] = 1.0
    assert np.array_equal(spread_labels(build_graph(rows), scores).argmax(axis=1), np.repeat([0, 1], 50))


def test_typical_rows_may_be_all_of_them() -> None:
    assert np.array_equal(np.sort(choose_typical(X[:20], 50, seed=0)), np.arange(20))


def test_features_of_a_network_must_be_exact() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed (the extra `torch`)")
    extractor = TorchExtractor(torch.nn.Conv2d(3, 4, 3), side=8)
    images = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), dtype=np.uint8)
    exactly: Any = partial(extractor.extract, row_exact=True)
    batched: list[Any] = [extractor.extract, partial(extractor.extract), partial(extractor.extract, row_exact=False)]
    voter = PrivateKNeighborsClassifier(vote_noise=0.1, max_answered=4, max_screened=0, n_neighbors=3, classes=[0, 1])
    for features in [*batched, partial(exactly, row_exact=False), partial(partial(extractor.extract), progress=None)]:
        with pytest.raises(ValueError, match="features must be row-exact"):
            Student(voter, features=features).fit(images[:20], np.arange(20) % 2, images[20:])
    assert Student(voter, features=exactly).fit(images[:20], np.arange(20) % 2, images[20:]).rounds_
