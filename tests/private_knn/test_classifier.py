"""Private-kNN as an estimator: what it answers, what it declines, what it costs, and what never leaves it."""

import copy
import logging
import math
import pickle
import time
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import Normalizer
from sklearn.utils.estimator_checks import parametrize_with_checks

import nearveil
from nearveil.ledger import Ledger, OverBudgetError
from nearveil.privacy.noise import unsafe_seeded
from nearveil.private_knn import Answers, ExhaustedError, PrivateKNeighborsClassifier
from nearveil.private_knn.estimator import _choose_abstain_label
from nearveil.private_knn.neighbors import NO_VOTER, NeighborSearch, draw_voters
from nearveil.private_knn.plan import UNIT, PoissonSample
from nearveil.private_knn.records import make_hard_votes, make_label_votes, make_soft_votes
from nearveil.private_knn.spending import MemorySpending
from tests.estimators import run_check

DIGITS, LABELS = load_digits(return_X_y=True)
QUIET: dict[str, Any] = {"n_neighbors": 5, "vote_noise": 0.01, "max_answered": 10**6}  # next to no noise, no promise

NOISY = "a promise (epsilon 1, 1,000 answers) on a few dozen records is kept by noise that drowns them"
COPIED = "a pickle carries no allowance: two copies would answer twice what was promised"
DIFFERS = "two fits draw noise of their own, so their answers differ"
CLEAR = {"check_estimators_pickle": COPIED, "check_fit_idempotent": DIFFERS}
EXPECTED_FAILED_CHECKS = {
    **CLEAR,
    "check_classifiers_train": NOISY,
    "check_supervised_y_2d": DIFFERS,
}


@parametrize_with_checks(  # type: ignore[untyped-decorator]
    [
        PrivateKNeighborsClassifier(1.0, max_screened=0, source=unsafe_seeded(0)),  # fails the same always
        PrivateKNeighborsClassifier(**(QUIET | {"n_neighbors": 1})),
    ],
    expected_failed_checks=lambda estimator: CLEAR if estimator.vote_noise else EXPECTED_FAILED_CHECKS,
)
def test_scikit_learn_accepts_it(estimator: Any, check: Any) -> None:
    run_check(check, estimator)


def quiet(**parameters: Any) -> PrivateKNeighborsClassifier:
    return PrivateKNeighborsClassifier(**(QUIET | parameters))


def test_without_noise_it_is_k_nearest_neighbours() -> None:
    voter = quiet().fit(DIGITS[:1500], LABELS[:1500])
    answers = voter.answer(DIGITS[1500:])
    assert answers.answered.all()
    assert np.mean(answers.labels == LABELS[1500:]) > 0.94
    np.testing.assert_allclose(answers.votes.sum(axis=1), 5, atol=0.3)


def test_a_promise_that_is_kept_still_answers() -> None:
    voter = nearveil.PrivateKNeighborsClassifier(
        epsilon=4.0, max_answered=20, max_screened=40, classes=range(10), source=unsafe_seeded(0)
    )
    answers = voter.fit(DIGITS[:1500], LABELS[:1500]).answer(DIGITS[1500:1540])
    assert 10 <= answers.answered.sum() <= 20
    assert np.mean(answers.labels == LABELS[1500:1540], where=answers.answered) > 0.8
    np.testing.assert_array_equal(answers.labels[~answers.answered], -1)
    assert np.isnan(answers.votes[~answers.answered]).all()
    assert 3.99 < voter.guarantee.epsilon <= 4


def test_agreement_is_screened() -> None:
    """Queries whose neighbours agree pass; those between two classes do not."""
    angles = np.concatenate([np.linspace(0.0, 0.1, 400), np.linspace(1.4, 1.5, 400)])
    X, y = np.stack([np.cos(angles), np.sin(angles)], axis=1), np.repeat([0, 1], 400)
    voter = PrivateKNeighborsClassifier(
        n_neighbors=400, screening_noise=15.0, threshold=300.0, vote_noise=10.0, max_screened=200, max_answered=100,
        source=unsafe_seeded(1),
    )  # fmt: skip
    between = [[np.cos(0.75), np.sin(0.75)]]
    answers = voter.fit(X, y).answer(np.concatenate([X[:50], np.repeat(between, 50, axis=0)]))
    assert answers.answered[:50].all()
    assert not answers.answered[50:].any()


def test_caps_decline_and_then_raise() -> None:
    voter = quiet(max_answered=7).fit(DIGITS[:200], LABELS[:200])
    first = voter.answer(DIGITS[200:205])
    second = voter.answer(DIGITS[205:215])
    assert first.answered.sum() == 5
    np.testing.assert_array_equal(np.flatnonzero(second.answered), [0, 1])
    np.testing.assert_array_equal(second.labels[2:], -1)
    with pytest.raises(ExhaustedError, match="max_answered is reached"):
        voter.predict(DIGITS[:1])


def test_a_cap_ends_answers_in_the_order_of_queries() -> None:
    """To answer the surest queries first would tell which of them have most votes, without noise."""
    rows, labels = np.repeat([[1.0, 0.0], [0.0, 1.0]], 5, axis=0), [0, 0, 0, 0, 1, 1, 1, 1, 1, 1]
    voter = quiet(max_answered=2, max_screened=9, screening_noise=0.1, threshold=1.0).fit(rows, labels)
    answered = voter.answer(rows[[0, 0, 5, 5]]).answered  # four of five neighbours agree, and then all
    np.testing.assert_array_equal(np.flatnonzero(answered), [0, 1])


def test_the_cap_on_screenings_declines_too() -> None:
    voter = quiet(max_answered=50, max_screened=6, screening_noise=0.1, threshold=1.0).fit(DIGITS[:200], LABELS[:200])
    np.testing.assert_array_equal(np.flatnonzero(voter.answer(DIGITS[200:210]).answered), range(6))
    with pytest.raises(ExhaustedError, match="max_screened is reached"):
        voter.predict(DIGITS[:1])


def test_the_guarantee_is_that_of_the_caps() -> None:
    voter = PrivateKNeighborsClassifier(
        n_neighbors=300, sampling_rate=0.15, screening_noise=75.0, threshold=180.0, vote_noise=25.0, max_screened=1000,
        max_answered=735, classes=range(10),
    ).fit(DIGITS, LABELS)  # fmt: skip
    assert voter.guarantee.epsilon == pytest.approx(0.871049, abs=1e-4)
    before = voter.guarantee
    voter.predict(DIGITS[:3])
    assert voter.guarantee == before
    assert (before.protects, before.relation, before.unit, before.delta) == ("database", "add-remove", "record", 1e-5)
    assert before.sound
    inferred = quiet().fit(DIGITS, LABELS)
    assert inferred.guarantee.unit == "record of a class that occurs anyway"


def test_a_seed_voids_the_promise() -> None:
    voter = quiet(source=unsafe_seeded(0)).fit(DIGITS[:50], LABELS[:50])
    assert not voter.guarantee.sound


def test_an_account_pays_first_and_is_shared(tmp_path: Path) -> None:
    ledger = Ledger(str(tmp_path / "budget.db"))
    known = {"epsilon": 2.0, "max_answered": 10, "max_screened": 0, "classes": range(10)}
    voter = PrivateKNeighborsClassifier(**known, ledger=ledger, account="digits")  # type: ignore[arg-type]
    voter.fit(DIGITS[:500], LABELS[:500]).predict(DIGITS[500:504])
    account = ledger.account("digits")
    assert account.kind == "plan"
    ((_, left),) = account.balance().remaining
    assert left == 6
    again = clone(voter).fit(DIGITS[:500], LABELS[:500])  # the same records, another object: the account remembers
    assert again.answer(DIGITS[500:510]).answered.sum() == 6
    with pytest.raises(ExhaustedError):
        voter.predict(DIGITS[:1])
    loaded = pickle.loads(pickle.dumps(again))  # noqa: S301
    with pytest.raises(ExhaustedError):
        loaded.predict(DIGITS[:1])


def test_a_filter_account_refuses_what_is_too_much(tmp_path: Path) -> None:
    ledger = Ledger(str(tmp_path / "budget.db"))
    account = ledger.open_account(
        "all", owner="me", protects="database", unit="record", relation="add-remove", epsilon=1.5, delta=1e-5
    )
    voter = PrivateKNeighborsClassifier(
        epsilon=2.0, max_answered=10, max_screened=0, account=account, classes=range(10)
    )
    voter.fit(DIGITS[:500], LABELS[:500])
    with pytest.raises(OverBudgetError):
        voter.predict(DIGITS[:10])
    assert account.balance().spent == 0
    assert voter.answer(DIGITS[:1]).answered.all()  # the refusal took nothing from the caps
    assert account.balance().spent > 0


def test_no_screening_is_bought_for_votes_that_cannot_be(tmp_path: Path) -> None:
    ledger = Ledger(str(tmp_path / "budget.db"))
    account = ledger.open_account(
        "all", owner="me", protects="database", unit="record", relation="add-remove", epsilon=1.0, delta=1e-5
    )
    voter = quiet(
        n_neighbors=50, screening_noise=200.0, threshold=30.0, vote_noise=5.0, max_screened=10, max_answered=10
    )
    voter.set_params(account=account, classes=range(10)).fit(DIGITS[:500], LABELS[:500])
    with pytest.raises(OverBudgetError, match="nothing was spent"):
        voter.predict(DIGITS[:10])
    assert account.balance().spent == 0


def test_accounts_of_something_else_are_refused(tmp_path: Path) -> None:
    ledger = Ledger(str(tmp_path / "budget.db"))
    queries = ledger.open_account(
        "mine", owner="me", protects="query", unit="record", relation="replace", epsilon=0.5, delta=1e-5
    )
    with pytest.raises(ValueError, match="account must protect"):
        quiet(account=queries, classes=range(10)).fit(DIGITS[:50], LABELS[:50])
    with pytest.raises(ValueError, match="ledger must be given"):
        quiet(account="mine").fit(DIGITS[:50], LABELS[:50])
    with pytest.raises(ValueError, match="account must be the name"):
        quiet(ledger=ledger).fit(DIGITS[:50], LABELS[:50])


def test_copies_share_their_caps_and_pickles_have_none() -> None:
    voter = quiet(max_answered=5).fit(DIGITS[:50], LABELS[:50])
    twin = copy.deepcopy(voter)
    twin.predict(DIGITS[:5])
    with pytest.raises(ExhaustedError):
        voter.predict(DIGITS[:1])
    with pytest.raises(ExhaustedError, match="was pickled"):
        pickle.loads(pickle.dumps(quiet().fit(DIGITS[:50], LABELS[:50]))).predict(DIGITS[:1])  # noqa: S301


def test_batches_and_engines_change_no_vote() -> None:
    queries, few = DIGITS[500:700], {"max_answered": 10**4, "source": unsafe_seeded(0)}
    whole = quiet(n_neighbors=40, **few).fit(DIGITS[:500], LABELS[:500])
    votes = np.rint(whole.answer(queries).votes)
    np.testing.assert_array_equal(
        np.rint(np.vstack([whole.answer(row[None]).votes for row in queries[:40]])), votes[:40]
    )
    other = quiet(n_neighbors=40, engine="numpy", **few).fit(DIGITS[:500], LABELS[:500])
    np.testing.assert_array_equal(np.rint(other.answer(queries).votes), votes)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_one_record_moves_one_vote(data: st.DataObject) -> None:
    """Remove any record, with the coins of the others as they were: sensitivities 1, 2 and sqrt(2), ties included."""
    n, k = data.draw(st.integers(2, 12)), data.draw(st.integers(1, 6))
    rows = np.array(data.draw(st.lists(st.sampled_from([(1, 0), (0, 1), (1, 1), (2, 1)]), min_size=n, max_size=n)))
    labels = np.array(data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n)))
    kept = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    gone = data.draw(st.integers(0, n - 1))
    query = np.array([[1.0, 0.5]])

    def counts(present: NDArray[np.bool_]) -> NDArray[np.int64]:
        sampled = np.flatnonzero(present & kept)
        _, ballots, _ = make_hard_votes(labels[sampled], [0, 1, 2]) if len(sampled) else (0, None, 0)
        if ballots is None:
            return np.zeros(3, dtype=np.int64)
        voters = draw_voters(NeighborSearch(rows[sampled]), query, PoissonSample(1.0), k, unsafe_seeded(0), draws=1)
        return np.asarray(ballots.count(next(voters)[0])[0])

    everybody = np.ones(n, dtype=bool)
    change = counts(everybody) - counts(everybody & (np.arange(n) != gone))
    assert np.abs(change).sum() <= 2
    assert np.sum(change**2) <= 2
    assert abs(counts(everybody).max() - counts(everybody & (np.arange(n) != gone)).max()) <= 1


def test_soft_votes_are_charged_as_gaussian_screenings() -> None:
    y = np.zeros((600, 3))
    y[:300, 0], y[300:, 1], y[:, 2] = 0.9, 0.8, 0.1
    X = np.where(np.arange(600)[:, None] < 300, [[1.0, 0.1]], [[0.1, 1.0]])
    voter = PrivateKNeighborsClassifier(
        votes="soft", n_neighbors=200, screening_noise=9.0, threshold=140.0, vote_noise=6.0, max_screened=20,
        max_answered=20, classes=["a", "b", "c"], abstain_label="", source=unsafe_seeded(0),
    ).fit(X, y)  # fmt: skip
    answers = voter.answer([[1.0, 0.0], [0.0, 1.0]])
    assert answers.labels.tolist() == ["a", "b"]
    np.testing.assert_allclose(answers.votes, [[180, 0, 20], [0, 160, 20]], atol=30)
    whole = PrivateKNeighborsClassifier(
        n_neighbors=200, screening_noise=9.0, threshold=140.0, vote_noise=6.0, max_screened=20, max_answered=20
    ).fit(X, y.argmax(axis=1))
    assert voter.guarantee.epsilon > whole.guarantee.epsilon  # whole votes have the exact composition


@pytest.mark.parametrize("kind", ["binary", "nonnegative", "signed"])
def test_many_labels_are_clipped_and_charged_honestly(kind: Any) -> None:
    rng = np.random.default_rng(0)
    y = (rng.random((200, 6)) < 0.5).astype(float)
    if kind == "signed":
        y = 2 * y - 1
    _, votes, ballot = make_label_votes(y, None, 2.0, kind)
    rows = votes.units[:-1] * ballot.unit
    assert np.abs(rows[:, :6]).sum(axis=1).max() <= 2.0
    squares = max(float(np.sum((a - b) ** 2)) for a in rows[:60] for b in rows[:60])
    assert squares <= ballot.event(1.0).sensitivity ** 2 + 1e-9
    voter = quiet(votes=kind, clip=6.0).fit(DIGITS[:200], y)
    found = voter.predict(DIGITS[:20])
    assert found.shape == (20, 6)
    assert set(np.unique(found)) <= {0, 1}


def test_worst_pairs_of_clipped_votes_attain_the_stated_sensitivity() -> None:
    for kind, rows, clip in (
        ("binary", [[1.0, 1.0, 0, 0], [0, 0, 1.0, 1.0]], 2.0),
        ("nonnegative", [[2.0, 0], [0, 2.0]], 2.0),
        ("signed", [[9.0], [-9.0]], 2.0),
    ):
        _, votes, ballot = make_label_votes(np.array(rows), None, clip, kind)  # type: ignore[arg-type]
        gap = (votes.units[0] - votes.units[1]) * ballot.unit
        assert np.sum(gap**2) == pytest.approx(ballot.event(1.0).sensitivity ** 2)


def test_soft_rows_never_sum_to_more_than_one() -> None:
    rows = np.random.default_rng(0).dirichlet(np.ones(7), 500) * (1 + 1e-7)
    _, votes, ballot = make_soft_votes(rows, None)
    assert votes.units.sum(axis=1).max() * ballot.unit <= 1


def test_soft_rows_that_rounding_lifted_above_one_are_scaled_back() -> None:
    """Whole units lose nothing to rounding, so that only the scaling keeps their sum."""
    rows = np.array([[0.5 + UNIT, 0.5, 0.0], [1 + UNIT, 0.0, 0.0], [0.25, 0.25, 0.5 + UNIT], [0.25, 0.25, 0.5]])
    _, votes, ballot = make_soft_votes(rows, None)
    sums = votes.units[:-1].sum(axis=1) * ballot.unit
    assert sums.max() <= 1
    assert sums.tolist() == pytest.approx([1] * 4, abs=3 * UNIT)


def test_soft_rows_with_negative_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="y must hold weights of at least 0"):
        make_soft_votes([[3.0, -2.0], [0.5, 0.5]], None)


def test_nobody_votes_for_nothing() -> None:
    _, votes, _ = make_hard_votes([0, 1, 1], [0, 1])
    assert votes.count(np.array([[0, 1, NO_VOTER], [NO_VOTER, NO_VOTER, NO_VOTER]], dtype=np.int32)).tolist() == [
        [1, 1],
        [0, 0],
    ]


def test_the_label_of_declined_answers_is_no_class() -> None:
    labels = [_choose_abstain_label(classes) for classes in ([0, 1], [-1, 1], ["", "declined"])]
    assert labels == [-1, -2, "declined_"]


def test_names_of_classes_and_declined_answers() -> None:
    names = np.array(["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"])
    voter = quiet(max_answered=2, abstain_label="?").fit(DIGITS[:400], names[LABELS[:400]])
    assert voter.predict(DIGITS[:3]).tolist()[2] == "?"
    for classes in (names, names.astype(object)):
        plain = quiet(max_answered=2).fit(DIGITS[:400], classes[LABELS[:400]]).predict(DIGITS[:3])
        assert plain.tolist()[2] == ""
        assert {type(one) for one in plain.tolist()} == {str}
    with pytest.raises(ValueError, match="abstain_label must be a text, as the classes are"):
        quiet(abstain_label=-1).fit(DIGITS[:400], names[LABELS[:400]])
    with pytest.raises(ValueError, match="abstain_label must be a whole number, as the classes are"):
        quiet(abstain_label="?").fit(DIGITS[:400], LABELS[:400])


def test_probabilities_are_shares_of_the_noisy_votes() -> None:
    voter = PrivateKNeighborsClassifier(
        n_neighbors=3, vote_noise=4.0, max_screened=0, max_answered=60, source=unsafe_seeded(0)
    ).fit(DIGITS[:400], LABELS[:400])
    shares = voter.predict_proba(DIGITS[400:470])
    assert shares.shape == (70, 10)
    np.testing.assert_allclose(shares[:60].sum(axis=1), 1)
    assert shares[:60].min() >= 0
    assert np.isnan(shares[60:]).all()  # declined
    clear = quiet().fit(DIGITS[:400], LABELS[:400])
    np.testing.assert_array_equal(clear.predict_proba(DIGITS[:50]).argmax(axis=1), clear.predict(DIGITS[:50]))
    assert clear._poll._spending.left()["answered"] == clear.max_answered - 100  # both were paid for
    many = PrivateKNeighborsClassifier(votes="binary", clip=1.0, max_screened=0)
    assert not hasattr(many, "predict_proba")


def test_nobody_wins_where_all_votes_are_negative() -> None:
    voter = PrivateKNeighborsClassifier(
        n_neighbors=1, vote_noise=50.0, max_screened=0, max_answered=400, classes=["a", "b"], source=unsafe_seeded(0)
    ).fit([[1.0, 0.0]], ["a"])
    answers, shares = voter.answer(np.ones((200, 2))), voter.predict_proba(np.ones((200, 2)))
    assert (answers.votes < 0).all(axis=1).any()
    assert (shares == 0.5).all(axis=1).any()


def test_a_search_that_spends_many_times_warns() -> None:
    grid = {"n_neighbors": [3, 5]}
    with pytest.warns(UserWarning, match="fits PrivateKNeighborsClassifier many times, and each has its own budget"):
        GridSearchCV(quiet(), grid, cv=2).fit(DIGITS[:200], LABELS[:200])
    with pytest.warns(UserWarning, match="cost epsilon times the number of fits"):
        cross_val_score(make_pipeline(Normalizer(), quiet()), DIGITS[:200], LABELS[:200], cv=2)
    with pytest.warns(UserWarning, match="fits PrivateDiscriminant many times"):
        cross_val_score(nearveil.PrivateDiscriminant(4.0), DIGITS[:200], LABELS[:200], cv=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clone(quiet()).fit(DIGITS[:200], LABELS[:200])
        GridSearchCV(quiet(source=unsafe_seeded(0)), grid, cv=2).fit(DIGITS[:200], LABELS[:200])  # a simulation


def test_screening_and_vote_have_samples_of_their_own() -> None:
    """One record, kept by half of the samples: that it was kept for the screening says nothing about the vote."""
    voter = PrivateKNeighborsClassifier(
        n_neighbors=1, sampling_rate=0.5, screening_noise=0.01, threshold=0.5, vote_noise=0.01, max_screened=1000,
        max_answered=1000, source=unsafe_seeded(3),
    ).fit([[1.0, 0.0]], ["a"])  # fmt: skip
    answers = voter.answer(np.ones((1000, 2)))
    assert 420 < answers.answered.sum() < 580
    assert 0.4 < np.rint(answers.votes[answers.answered, 0]).mean() < 0.6
    poll, queries = voter._poll, np.ones((1000, 2))
    votes = np.rint(poll._release(np.concatenate([sums for sums, _ in poll._count_votes(queries)])))
    largest = np.concatenate([maxima for _, maxima in poll._count_votes(queries) if maxima is not None])
    assert 0.4 < votes.mean() < 0.6
    assert 0.4 < largest.mean() < 0.6


def test_every_screening_and_every_vote_is_debited(tmp_path: Path) -> None:
    ledger = Ledger(str(tmp_path / "budget.db"))
    voter = PrivateKNeighborsClassifier(
        n_neighbors=60, screening_noise=20.0, threshold=30.0, vote_noise=15.0, max_screened=40, max_answered=30,
        classes=range(10), ledger=ledger, account="digits",
    ).fit(DIGITS[:500], LABELS[:500])  # fmt: skip
    answered = voter.answer(DIGITS[500:525]).answered.sum()
    left = sorted(count for _, count in ledger.account("digits").balance().remaining)
    assert 0 < answered < 25
    assert left == sorted([40 - 25, 30 - answered])


def test_threads_share_the_caps(monkeypatch: pytest.MonkeyPatch) -> None:
    voter = quiet(max_answered=50).fit(DIGITS[:100], LABELS[:100])
    left = MemorySpending.left

    def slow(self: MemorySpending) -> Any:
        found = left(self)
        time.sleep(0.005)
        return found

    monkeypatch.setattr(MemorySpending, "left", slow)
    with ThreadPoolExecutor(8) as pool:
        counts = [one.answered.sum() for one in pool.map(lambda _: voter.answer(DIGITS[:6]), range(8))]
    assert sum(counts) == 48
    assert voter.answer(DIGITS[:6]).answered.sum() == 2


def test_a_forked_process_may_not_answer_without_an_account(monkeypatch: pytest.MonkeyPatch) -> None:
    voter = quiet(max_answered=50).fit(DIGITS[:100], LABELS[:100])
    monkeypatch.setattr("nearveil.private_knn.spending.os.getpid", lambda: -7)
    with pytest.raises(ExhaustedError, match="forked"):
        voter.predict(DIGITS[:1])


def test_the_last_one_may_be_taken_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    voter = quiet(max_answered=50, max_screened=6, screening_noise=0.1, threshold=1.0).fit(DIGITS[:200], LABELS[:200])
    monkeypatch.setattr(MemorySpending, "take", lambda *_: 0)
    assert not voter.answer(DIGITS[:3]).answered.any()


def test_a_fit_that_fails_changes_nothing() -> None:
    voter = quiet().fit(DIGITS[:500], LABELS[:500])
    before = np.rint(voter.answer(DIGITS[500:520]).votes)
    with pytest.raises(ValueError, match="vote_noise is too small"):
        voter.set_params(epsilon=0.1).fit(DIGITS[501:1003], (LABELS[501:1003] + 1) % 10)
    np.testing.assert_array_equal(np.rint(voter.answer(DIGITS[500:520]).votes), before)


def test_seeds_and_accounts_of_other_plans_do_not_go_together(tmp_path: Path) -> None:
    ledger = Ledger(str(tmp_path / "budget.db"))
    known = {"epsilon": 2.0, "max_answered": 5, "max_screened": 0, "ledger": ledger, "account": "digits"}
    with pytest.raises(ValueError, match="source must be sound"):
        PrivateKNeighborsClassifier(**known, source=unsafe_seeded(0)).fit(DIGITS[:50], LABELS[:50])  # type: ignore[arg-type]
    PrivateKNeighborsClassifier(**known, classes=range(10)).fit(DIGITS[:50], LABELS[:50])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="classes must be given"):
        PrivateKNeighborsClassifier(**known).fit(DIGITS[:50], LABELS[:50])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="account cannot pay for this estimator"):
        PrivateKNeighborsClassifier(**(known | {"epsilon": 1.0}), classes=range(10)).fit(DIGITS[:50], LABELS[:50])  # type: ignore[arg-type]


def test_more_voters_than_records_need_no_memory() -> None:
    voter = quiet(n_neighbors=10**9, vote_noise=5.0).fit(DIGITS[:50], LABELS[:50])
    assert voter.answer(DIGITS[:5]).votes.shape == (5, 10)


HIDDEN = "a private word"


@pytest.mark.parametrize(
    ("parameters", "X", "y"),
    [
        ({"votes": "soft"}, np.eye(4), np.arange(771_230.0, 771_234.0)),
        ({"votes": "soft"}, np.eye(2), [[HIDDEN, 1], [0, 1]]),
        ({"votes": "binary", "clip": 1.0}, np.eye(2), [[HIDDEN, 1], [0, 1]]),
        ({}, [[HIDDEN, 1.0], [0.0, 1.0]], [0, 1]),
        ({}, np.array([771_234.5 + 1j, 1, 2, 3]).reshape(2, 2), [0, 1]),
    ],
)
def test_errors_show_no_private_value(parameters: dict[str, Any], X: Any, y: Any) -> None:
    with pytest.raises((ValueError, TypeError)) as error:
        PrivateKNeighborsClassifier(**parameters).fit(X, y)
    told = "".join(traceback.format_exception_only(error.value))
    assert HIDDEN not in told
    assert "7712" not in told
    assert error.value.__context__ is None


PRIVATE = 771_234  # a label that must never be seen


def test_nothing_private_is_shown(caplog: pytest.LogCaptureFixture) -> None:
    y = np.where(np.arange(300) == 17, PRIVATE, LABELS[:300])
    with pytest.raises(ValueError, match="not in classes") as error:
        quiet(classes=range(10)).fit(DIGITS[:300], y)
    seen = [str(error.value)]
    voter = quiet(abstain_label=-5).fit(DIGITS[:300], np.where(y == PRIVATE, 3, y))
    with caplog.at_level(logging.DEBUG):
        voter.predict(DIGITS[300:310])
    for bad in (np.full((1, 64), np.nan), np.zeros((1, 3)), np.zeros((0, 64))):
        with pytest.raises(ValueError, match=r"NaN|features|sample") as error:
            voter.predict(bad)
        seen.append(str(error.value))
    seen += [repr(voter), str(voter), voter._repr_html_(), repr(voter.plan_), repr(voter.guarantee), caplog.text]
    seen += [repr(value) for value in vars(voter).values()]
    tally = next(voter._poll._count_votes(DIGITS[300:302]))
    seen += [repr(tally)]
    assert not any(str(PRIVATE) in text for text in seen)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"epsilon": 0.0}, "epsilon"),
        ({"epsilon": math.nan}, "epsilon"),
        ({"epsilon": 1e9}, "epsilon"),
        ({"delta": 0.0}, "delta"),
        ({"max_answered": 0}, "max_answered"),
        ({"sampling_rate": 0.0}, "sampling_rate"),
        ({"abstain_label": 3}, "abstain_label must not be a class"),
        ({"votes": "none"}, "votes"),
        ({"votes": "binary"}, "clip must be given"),
        ({"votes": "soft"}, "y must hold weights"),
        ({"classes": [1, 1]}, "classes must be a list of different labels"),
        ({"feature_norm": -1.0}, "feature_norm"),
        ({"engine": "abacus"}, "engine"),
        ({"threshold": math.inf, "max_screened": 10}, "threshold"),
    ],
)
def test_bad_parameters_are_named(parameters: dict[str, Any], message: str) -> None:
    y = LABELS[:50][:, None] if parameters.get("votes") in ("binary", "soft") else LABELS[:50]
    with pytest.raises(ValueError, match=message):
        PrivateKNeighborsClassifier(**({"epsilon": 1.0, "max_answered": 5} | parameters)).fit(DIGITS[:50], y)


def test_progress_is_told() -> None:
    done: list[int] = []
    voter = quiet().fit(DIGITS[:50], LABELS[:50])
    assert isinstance(voter.answer(DIGITS[:30], progress=done.append), Answers)
    assert sum(done) == 30
