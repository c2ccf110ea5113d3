"""PATE: one record moves one teacher, noise is what is charged, and the interface is that of the other voters."""

import itertools
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, LaplaceDpEvent
from numpy.typing import NDArray
from scipy.integrate import quad
from scipy.special import ndtr
from scipy.stats import chi2, laplace, norm
from sklearn.base import BaseEstimator, ClassifierMixin, clone
from sklearn.datasets import make_blobs
from sklearn.linear_model import RidgeClassifier
from sklearn.naive_bayes import GaussianNB
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.tree import DecisionTreeClassifier
from sklearn.utils.estimator_checks import parametrize_with_checks

from nearveil.ledger import Ledger
from nearveil.privacy.accounting import PldAccountant, screening_curve
from nearveil.privacy.events import GaussianNoisyMax, LaplaceNoisyMax, NoisyScreening
from nearveil.privacy.noise import analytic_gaussian_scale, unsafe_seeded
from nearveil.private_knn.spending import ExhaustedError
from studies import pate
from studies.pate import PateClassifier, Teachers, assign_records, train_teachers
from tests.estimators import run_check

X, Y = make_blobs(120, centers=3, cluster_std=2.0, random_state=0)
EASY_X, EASY_Y = make_blobs(120, centers=3, cluster_std=0.6, random_state=0)
QUERIES = np.random.default_rng(1).uniform(-8, 8, (60, 2))
RANDOM_TREES = make_pipeline(StandardScaler(), DecisionTreeClassifier(splitter="random"))


class Script:
    """A source whose calls are known: first one word for each record, then the teachers' seeds."""

    sound = False

    def __init__(self, *calls: NDArray[np.uint64]) -> None:
        self._calls = iter(calls)

    def words(self, count: int) -> NDArray[np.uint64]:
        words = next(self._calls)
        assert len(words) == count
        return words


def votes_of_each(teachers: Teachers) -> NDArray[np.int64]:
    """What every teacher says to every query, shape (n_teachers, n_queries)."""
    alone = [Teachers((member,), teachers.n_classes).count_votes(QUERIES).argmax(axis=1) for member in teachers.members]
    return np.stack(alone)


def changed_teachers(estimator: BaseEstimator, n_records: int) -> list[int]:
    """Remove each record in turn, the others keeping their coins: how many teachers say anything else?"""
    X_part, y_part, words = X[:n_records], Y[:n_records].astype(np.int64), unsafe_seeded(3)
    coins, seeds = words.words(n_records), words.words(6)
    known: dict[str, Any] = {"n_teachers": 6, "n_classes": 3}
    before = votes_of_each(train_teachers(estimator, X_part, y_part, source=Script(coins, seeds), **known))
    changed = []
    for gone in range(n_records):
        left = np.delete(np.arange(n_records), gone)
        source = Script(coins[left], seeds)
        after = votes_of_each(train_teachers(estimator, X_part[left], y_part[left], source=source, **known))
        changed.append(int(np.sum(np.any(before != after, axis=1))))
    return changed


@pytest.mark.parametrize("estimator", [RidgeClassifier(), RANDOM_TREES], ids=["linear", "random trees"])
def test_removing_any_record_moves_at_most_one_teacher(estimator: BaseEstimator) -> None:
    np.random.seed(0)  # noqa: NPY002  (what a shared generator would do must not matter)
    changed = changed_teachers(estimator, 60)
    assert max(changed) == 1


def test_positions_in_place_of_coins_would_move_many(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_position(n_records: int, n_teachers: int, source: Any) -> list[NDArray[np.int64]]:
        source.words(n_records)
        return [np.arange(one, n_records, n_teachers) for one in range(n_teachers)]

    monkeypatch.setattr(pate, "assign_records", by_position)
    assert max(changed_teachers(RidgeClassifier(), 60)) > 3


def test_random_numbers_of_a_shared_generator_would_move_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second attack has teeth too: a generator that all teachers draw from, one after the other."""
    shared = np.random.RandomState(0)

    def together(estimator: Any, X: Any, y: Any, seed: int) -> Any:
        return clone(estimator).set_params(decisiontreeclassifier__random_state=shared.randint(2**31)).fit(X, y)

    monkeypatch.setattr(pate, "_train_teacher", together)
    assert max(changed_teachers(RANDOM_TREES, 60)) > 1


def test_counts_change_as_is_charged() -> None:
    n, coins = 60, unsafe_seeded(3)
    words, seeds = coins.words(n), coins.words(6)
    known: dict[str, Any] = {"n_teachers": 6, "n_classes": 3}
    y = Y.astype(np.int64)
    before = train_teachers(RidgeClassifier(), X[:n], y[:n], source=Script(words, seeds), **known).count_votes(QUERIES)
    largest = []
    for gone in range(n):
        left = np.delete(np.arange(n), gone)
        source = Script(words[left], seeds)
        change = (
            train_teachers(RidgeClassifier(), X[left], y[left], source=source, **known).count_votes(QUERIES) - before
        )
        largest.append(np.sum(change**2, axis=1).max())
        assert np.abs(change).sum(axis=1).max() <= 2
        assert np.all(np.sum(change, axis=1) == 0)
    assert max(largest) == 2  # L2 sensitivity sqrt(2), attained


def test_parts_are_disjoint_complete_and_each_record_is_free_of_the_others() -> None:
    parts = assign_records(500, 7, unsafe_seeded(0))
    assert sorted(np.concatenate(parts).tolist()) == list(range(500))
    words = unsafe_seeded(1).words(500)
    whole = {int(row): one for one, part in enumerate(assign_records(500, 7, Script(words))) for row in part}
    rest = {int(row): one for one, part in enumerate(assign_records(499, 7, Script(words[1:]))) for row in part}
    assert all(rest[row] == whole[row + 1] for row in range(499))
    sizes = np.array([len(part) for part in assign_records(70_000, 7, unsafe_seeded(2))])
    assert np.sum((sizes - 10_000) ** 2 / 10_000) < chi2.isf(1e-6, 6)


def test_a_part_with_one_class_names_it_and_an_empty_one_names_the_first() -> None:
    words = np.array([0, 0, 1, 1, 1], dtype=np.uint64)  # teacher 2 has nobody, teacher 0 one class
    y = np.array([2, 2, 0, 1, 1])
    known: dict[str, Any] = {"n_teachers": 3, "n_classes": 3}
    teachers = train_teachers(RidgeClassifier(), X[:5], y, source=Script(words, words[:3]), **known)
    assert teachers.members[0] == 2
    assert teachers.members[2] == 0
    assert np.all(teachers.count_votes(QUERIES).sum(axis=1) == 3)
    assert np.all(teachers.count_votes(QUERIES)[:, 2] == 1)


def fitted(counts: list[int], **parameters: Any) -> PateClassifier:
    """An estimator whose teachers always vote with the same counts."""
    voter = PateClassifier(sum(counts), classes=range(len(counts)), source=unsafe_seeded(11), **parameters)
    voter.fit(X, np.zeros(len(X), dtype=int))
    teachers = Teachers(tuple(np.repeat(np.arange(len(counts)), counts).tolist()), len(counts))
    voter._poll._teachers = teachers
    return voter


def winning(counts: list[int], law: Any) -> list[float]:
    """The chance of each class to have the largest noisy count, by integration."""

    def chance(one: int) -> float:
        others = [c for j, c in enumerate(counts) if j != one]
        return float(
            quad(
                lambda z: law.pdf(z) * math.prod(law.cdf(z + counts[one] - c) for c in others), -8000, 8000, points=[0]
            )[0]
        )

    return [chance(one) for one in range(len(counts))]


@pytest.mark.parametrize(("mechanism", "law"), [("gnmax", norm(scale=200.0)), ("lnmax", laplace(scale=200.0))])
def test_winners_are_as_frequent_as_the_noise_says(mechanism: Any, law: Any) -> None:
    counts, queries = [400, 300, 100], np.zeros((6000, 2))
    voter = fitted(counts, mechanism=mechanism, vote_noise=200.0, max_answered=6000)
    answers = voter.answer(queries)
    expected = 6000 * np.array(winning(counts, law))
    assert expected.sum() == pytest.approx(6000, rel=1e-6)
    found = np.bincount(answers.labels, minlength=3)
    assert np.sum((found - expected) ** 2 / expected) < chi2.isf(1e-6, 2)
    np.testing.assert_array_equal(answers.labels, answers.votes.argmax(axis=1))


def test_screened_queries_pass_as_often_as_the_coin_says() -> None:
    noise = {"screening_noise": 300.0, "threshold": 600.0, "vote_noise": 200.0}
    voter = fitted([500, 300], mechanism="confident-gnmax", max_screened=1500, max_answered=1500, **noise)
    answers = voter.answer(np.zeros((1500, 2)))
    passing = 1500 * ndtr((500 - 600.0) / 300.0)
    assert (answers.answered.sum() - passing) ** 2 / (passing * (1 - passing / 1500)) < chi2.isf(1e-6, 1)
    assert np.all((answers.labels == -1) == ~answers.answered)
    assert np.all(np.isnan(answers.votes).all(axis=1) == ~answers.answered)
    expected = answers.answered.sum() * np.array(winning([500, 300], norm(scale=200.0)))
    found = np.bincount(answers.labels[answers.answered], minlength=2)
    assert np.sum((found - expected) ** 2 / expected) < chi2.isf(1e-6, 1)


def test_what_is_charged_is_the_mechanism() -> None:
    gnmax = fitted([4, 3, 1], mechanism="gnmax", vote_noise=9.0, max_answered=40).guarantee
    lnmax = fitted([4, 3, 1], mechanism="lnmax", vote_noise=9.0, max_answered=40).guarantee
    both = fitted([4, 3, 1], vote_noise=9.0, screening_noise=12.0, threshold=5.0, max_answered=40, max_screened=70)
    assert gnmax.epsilon == pytest.approx(
        PldAccountant().compose(GaussianDpEvent(9 / math.sqrt(80))).epsilon(1e-5), rel=1e-6
    )
    assert lnmax.epsilon == pytest.approx(PldAccountant().compose(LaplaceDpEvent(9.0), 80).epsilon(1e-5), rel=1e-6)
    assert [event for event, _ in both.plan_.events] == [NoisyScreening(12.0, 5.0, 8), GaussianNoisyMax(9.0)]
    assert [count for _, count in both.plan_.events] == [70, 40]
    screenings = screening_curve(70, NoisyScreening(12.0, 5.0, 8)).epsilon(1e-5)
    assert max(screenings, gnmax.epsilon) < both.guarantee.epsilon < screenings + gnmax.epsilon
    assert (both.guarantee.protects, both.guarantee.relation) == ("database", "add-remove")
    assert not both.guarantee.sound  # from a seed
    assert 0 < both.guarantee.extra_delta < 1e-11


def test_calibration_spends_the_budget_and_no_more() -> None:
    gnmax = PateClassifier(20, mechanism="gnmax", epsilon=0.7, max_answered=30).fit(X, Y)
    lnmax = PateClassifier(20, mechanism="lnmax", epsilon=0.7, max_answered=30).fit(X, Y)
    confident = PateClassifier(20, epsilon=0.7, max_answered=20).fit(X, Y)
    for voter in (gnmax, lnmax, confident):
        assert 0.998 * 0.7 <= voter.guarantee.epsilon <= 0.7
        assert voter.guarantee.sound
    exact = analytic_gaussian_scale(1.0, 0.7, 1e-5) * math.sqrt(2 * 30)
    assert exact <= gnmax.plan_.vote_noise <= 1.002 * exact
    assert (confident.plan_.n_neighbors, confident.plan_.threshold, confident.plan_.max_screened) == (20, 12.0, 30)
    assert isinstance(lnmax.plan_.votes.mechanism, LaplaceNoisyMax)


def test_it_learns() -> None:
    known: dict[str, Any] = {"mechanism": "gnmax", "vote_noise": 0.05, "max_answered": 200}
    assert np.mean(PateClassifier(10, **known).fit(EASY_X, EASY_Y).predict(EASY_X) == EASY_Y) > 0.9
    named = np.array(["plum", "fig", "pear"])[EASY_Y]
    voter = PateClassifier(10, GaussianNB(), abstain_label="none", **known).fit(EASY_X, named)
    assert np.mean(voter.predict(EASY_X) == named) > 0.9


def test_caps_decline_and_then_refuse() -> None:
    voter = PateClassifier(8, mechanism="gnmax", vote_noise=5.0, max_answered=7).fit(X, Y)
    steps: list[int] = []
    answers = voter.answer(QUERIES[:10], progress=steps.append)
    assert answers.answered.tolist() == [True] * 7 + [False] * 3
    assert sum(steps) == 7
    with pytest.raises(ExhaustedError, match="max_answered is reached"):
        voter.predict(QUERIES[:1])


def test_an_account_opens_where_the_ledger_composes_a_little_coarser(tmp_path: Path) -> None:
    X, y = make_blobs(60, centers=3, random_state=0)
    with Ledger(tmp_path / "ledger.db") as ledger:
        voter = PateClassifier(
            5, mechanism="gnmax", vote_noise=4.0, max_answered=2, classes=range(3), ledger=ledger, account="teachers"
        ).fit(X, y)
        account = ledger.account("teachers")
        assert account.epsilon == pytest.approx(voter.guarantee.epsilon, rel=1e-3)
        assert account.epsilon >= voter.guarantee.epsilon
        assert len(voter.predict(X[:2])) == 2


def test_an_account_pays_and_is_shared(tmp_path: Path) -> None:
    with Ledger(str(tmp_path / "ledger.db"), witness=tmp_path / "witness") as ledger:
        terms: dict[str, Any] = {"mechanism": "lnmax", "epsilon": 2.0, "max_answered": 12, "classes": range(3)}
        first = PateClassifier(8, ledger=ledger, account="blobs", **terms).fit(X, Y)
        first.predict(QUERIES[:5])
        noise = first.plan_.vote_noise  # an answer is two Laplace mechanisms
        assert ledger.account("blobs").balance().remaining == ((LaplaceDpEvent(noise), 14),)
        second = PateClassifier(8, ledger=ledger, account="blobs", **terms).fit(X, Y)
        assert second.answer(QUERIES[:10]).answered.sum() == 7
        for voter in (first, second):
            with pytest.raises(ExhaustedError):
                voter.predict(QUERIES[:1])
        spent = ledger.account("blobs").balance()
        assert spent.remaining == ()
        assert 1.99 < spent.spent <= 2.0


class Talkative(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Tells what it was given: in an error, a warning, or a wrong prediction."""

    def __init__(self, how: str = "error") -> None:
        self.how = how

    def fit(self, X: Any, y: Any) -> "Talkative":
        self.classes_ = np.unique(y)
        if self.how == "error":
            raise RuntimeError(f"cannot learn {X[0]}")
        return self

    def predict(self, X: Any) -> Any:
        return np.full(len(X), 0.5 if self.how == "fraction" else 7)


def test_errors_name_no_record() -> None:
    with pytest.raises(ValueError, match=r"estimator could not be trained .*\(RuntimeError\)") as caught:
        PateClassifier(4, Talkative(), mechanism="gnmax", vote_noise=30.0, max_answered=60).fit(X, Y)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    for how in ("fraction", "beyond"):
        voter = PateClassifier(4, Talkative(how), mechanism="gnmax", vote_noise=30.0, max_answered=60).fit(X, Y)
        with pytest.raises(ValueError, match="estimator must be a classifier"):
            voter.predict(QUERIES)
    assert "members" not in repr(voter._poll._teachers)
    assert repr(voter) == repr(clone(voter))  # parameters alone


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"mechanism": "gnmax", "threshold": 5.0}, "threshold must not be given"),
        ({"mechanism": "lnmax", "screening_noise": 5.0}, "screening_noise must not be given"),
        ({"mechanism": "gnmax", "max_screened": 5}, "max_screened must not be given"),
        ({"vote_noise": 5.0}, "screening_noise and threshold must be given"),
        ({"max_screened": 0}, "max_screened"),
        ({"n_teachers": 0}, "n_teachers"),
        ({"mechanism": "max"}, "mechanism"),
        ({"epsilon": math.nan}, "epsilon"),
        ({"epsilon": 65.0}, "epsilon must be at most 64"),
        ({"delta": 0.0}, "delta"),
        ({"vote_noise": math.inf, "mechanism": "gnmax"}, "vote_noise"),
        ({"classes": [0, 1], "mechanism": "gnmax"}, "y holds a label that is not in classes"),
        ({"abstain_label": 2, "mechanism": "gnmax"}, "abstain_label must not be a class"),
        ({"estimator": "ridge"}, "estimator"),
        ({"account": "blobs", "mechanism": "gnmax", "vote_noise": 3.0}, "ledger must be given"),
    ],
)
def test_what_means_nothing_is_refused_by_name(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PateClassifier(**{"n_teachers": 4, "max_answered": 5, **parameters}).fit(X, Y)


def test_the_unit_says_whether_the_classes_were_public() -> None:
    known: dict[str, Any] = {"mechanism": "gnmax", "vote_noise": 9.0, "max_answered": 9}
    assert PateClassifier(4, classes=range(3), **known).fit(X, Y).guarantee.unit == "record"
    assert "class that occurs anyway" in PateClassifier(4, **known).fit(X, Y).guarantee.unit


def test_a_pickle_answers_nothing() -> None:
    voter = PateClassifier(4, mechanism="gnmax", vote_noise=9.0, max_answered=9).fit(X, Y)
    with pytest.raises(ExhaustedError, match="pickled"):
        pickle.loads(pickle.dumps(voter)).predict(QUERIES)  # noqa: S301


def test_more_teachers_than_records() -> None:
    voter = PateClassifier(300, mechanism="gnmax", vote_noise=50.0, max_answered=60).fit(X, Y)
    assert set(voter.predict(QUERIES)) <= {0, 1, 2}
    assert sum(itertools.chain.from_iterable(voter._poll._teachers.count_votes(QUERIES[:1]).tolist())) == 300


# With one teacher and hardly any noise nothing is left to chance; what remains is what privacy makes impossible.
CHECKED = PateClassifier(1, mechanism="gnmax", vote_noise=0.01, max_answered=100_000)
NO_PICKLE = "a pickle carries no allowance: a copy must not spend what another has"
EXPECTED_FAILED_CHECKS = {
    "check_estimators_pickle": NO_PICKLE,
    "check_fit_idempotent": "two fits draw noise of their own, so their votes differ",
}


@parametrize_with_checks([CHECKED], expected_failed_checks=lambda _: EXPECTED_FAILED_CHECKS)  # type: ignore[untyped-decorator]
def test_it_is_a_scikit_learn_estimator(estimator: Any, check: Any) -> None:
    run_check(check, estimator)
