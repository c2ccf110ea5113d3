"""Copies of an estimator: pickles, forks, threads and refits together do what one estimator stated, and no more."""

import os
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits

from nearveil.ledger import Account, Ledger, LedgerUnavailableError, OverBudgetError
from nearveil.privacy.events import PureDp
from nearveil.privacy.noise import unsafe_seeded
from nearveil.private_knn import (
    ExhaustedError,
    PrivateKNeighborsClassifier,
    PrivateKNeighborsRegressor,
    Student,
    estimator,
)
from nearveil.private_knn.estimator import VotingEstimator
from nearveil.private_knn.spending import AccountSpending, open_spending
from studies.pate import PateClassifier

DIGITS, LABELS = load_digits(return_X_y=True)
X, Y, QUERIES = DIGITS[:300], LABELS[:300], DIGITS[400:440]
ABOUT: dict[str, Any] = {"owner": "me", "protects": "database", "unit": "record", "relation": "add-remove"}
SCREENED: dict[str, Any] = {"screening_noise": 90.0, "threshold": -1e4, "max_screened": 40, "vote_noise": 50.0}


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(tmp_path / "budget.db") as opened:
        yield opened


def wide(ledger: Ledger, **changed: Any) -> Account:
    """An account without a plan, that could pay for much more than one estimator does."""
    return ledger.open_account("wide", **{**ABOUT, "epsilon": 12.0, "delta": 1e-5, **changed})


def voter(account: Account | None, **changed: Any) -> PrivateKNeighborsClassifier:
    given: dict[str, Any] = {"vote_noise": 9.0, "max_answered": 5, "max_screened": 0, "classes": range(10)}
    found = PrivateKNeighborsClassifier(account=account, engine="numpy", **(given | changed))
    found.fit(X, Y)
    return found


def count(one: Any) -> int:
    """How many of ten queries are answered."""
    try:
        return int(one.answer(QUERIES[:10]).answered.sum())
    except ExhaustedError:
        return 0


def in_a_fork(work: Callable[[], int]) -> int:
    """Return the small number that `work` returns in a child process."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, bytes([work()]))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as told:
        found = told.read()
    os.waitpid(child, 0)
    assert len(found) == 1, "the child failed"
    return found[0]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("kind", ["filter", "larger plan"])
def test_pickles_and_forks_of_five_answers_give_five_together(ledger: Ledger, kind: str) -> None:
    """Six copies with caps of their own gave thirty-five."""
    event = voter(None).plan_.votes.event
    account = wide(ledger, **({} if kind == "filter" else {"plan": [(event, 100)]}))
    first = voter(account)
    copies = [pickle.loads(pickle.dumps(first)) for _ in range(3)]  # noqa: S301
    forked = [in_a_fork(lambda: count(first)) for _ in range(3)]
    assert sum(forked) + sum(count(one) for one in [*copies, first]) == 5
    assert sum(times for entry in account.history() if entry.kind == "debit" for _, times in entry.events) == 5
    assert ledger.verify()
    assert count(voter(account)) == 5  # another fit states a guarantee of its own, and the account adds them up


def test_screenings_and_votes_are_both_capped_in_the_ledger(ledger: Ledger) -> None:
    first = voter(wide(ledger), **SCREENED | {"max_screened": 12})
    copies = [pickle.loads(pickle.dumps(first)) for _ in range(3)]  # noqa: S301
    assert [count(one) for one in (first, *copies)] == [5, 0, 0, 0]
    debits = [entry.events for entry in ledger.account("wide").history() if entry.kind == "debit"]
    assert [times for events in debits for _, times in events] == [10, 5]


@pytest.mark.parametrize("again", [PateClassifier, PrivateKNeighborsRegressor])
def test_the_other_voters_share_their_caps_too(ledger: Ledger, again: Any) -> None:
    given: dict[str, Any] = {"max_answered": 3, "vote_noise": 9.0, "account": wide(ledger)}
    if again is PateClassifier:
        one = PateClassifier(5, mechanism="gnmax", classes=range(10), **given).fit(X, Y)
        assert [count(pickle.loads(pickle.dumps(one))) for _ in range(3)] == [3, 0, 0]  # noqa: S301
        return
    first = PrivateKNeighborsRegressor(0, 9, engine="numpy", **given).fit(X, Y)
    pickle.loads(pickle.dumps(first)).predict(QUERIES[:2])  # noqa: S301
    assert np.isfinite(first.predict(QUERIES[:5])).sum() == 1


def test_what_is_released_is_the_count_with_the_noise_of_the_plan(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = voter(wide(ledger))
    ((sums, _),) = asked._poll._count_votes(QUERIES[:1])
    seen, release = [], VotingEstimator._release

    def released(self: Any, counts: Any) -> Any:
        seen.append(counts)
        return release(self, counts)

    monkeypatch.setattr(VotingEstimator, "_release", released)
    votes = asked.answer(QUERIES[:1]).votes
    np.testing.assert_array_equal(seen[0], sums)
    assert 0 < np.abs(votes - sums).max() < 7 * asked.plan_.vote_noise  # more once in 10^10 runs


@pytest.mark.parametrize("late", [False, True])
def test_a_cap_counts_what_the_ledger_counts_whatever_the_error(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """A debit that stands is in the cap, though its answer was lost; one that does not stand is not."""
    asked, pay = voter(wide(ledger)), Account.take

    def dead(self: Account, *told: Any, **more: Any) -> None:
        if late:
            pay(self, *told, **more)
        raise LedgerUnavailableError("the database went away")

    with monkeypatch.context() as broken:
        broken.setattr(Account, "take", dead)
        for _ in range(2):
            with pytest.raises(LedgerUnavailableError):
                asked.answer(QUERIES[:1])
    assert count(pickle.loads(pickle.dumps(asked))) == (3 if late else 5)  # noqa: S301
    assert count(asked) == 0


def test_a_cap_that_somebody_empties_just_now_grants_what_is_left(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, take = voter(wide(ledger)), Account.take
    twin = pickle.loads(pickle.dumps(first))  # noqa: S301

    def raced(self: Account, *told: Any, **more: Any) -> Any:
        monkeypatch.setattr(Account, "take", take)
        assert twin.answer(QUERIES[:2]).answered.all()  # between our look and our debit
        return take(self, *told, **more)

    monkeypatch.setattr(Account, "take", raced)
    assert count(first) == 3


@pytest.mark.parametrize("screened", [False, True])
def test_everything_is_debited_before_it_is_counted_and_released(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, screened: bool
) -> None:
    account = wide(ledger)
    asked, order = voter(account, **(SCREENED if screened else {})), []
    counting = type(asked._poll)
    count, release = counting._count_votes, VotingEstimator._release

    def paid() -> int:
        return sum(times for entry in account.history() if entry.kind == "debit" for _, times in entry.events)

    def counted(self: Any, *arguments: Any) -> Any:
        order.append(("count", paid()))
        return count(self, *arguments)

    def released(self: Any, sums: Any) -> Any:
        order.append(("release", paid()))
        return release(self, sums)

    monkeypatch.setattr(counting, "_count_votes", counted)
    monkeypatch.setattr(VotingEstimator, "_release", released)
    assert asked.answer(QUERIES[:3]).answered.all()
    assert order == [("count", 3), ("release", 6 if screened else 3)]


def test_nothing_is_answered_that_was_not_granted(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, take, calls = voter(wide(ledger), **SCREENED), Account.take, []

    def granted(self: Account, *told: Any, **more: Any) -> int:
        calls.append(told)
        return take(self, *told, **more) if len(calls) == 1 else 0  # the votes are gone when the screening is done

    monkeypatch.setattr(Account, "take", granted)
    assert not asked.answer(QUERIES[:4]).answered.any()
    assert len(calls) == 2


def test_threads_share_the_cap_of_an_account(ledger: Ledger) -> None:
    first = voter(wide(ledger), max_answered=13)
    copies = [pickle.loads(pickle.dumps(first)) for _ in range(4)]  # noqa: S301

    def ask(one: PrivateKNeighborsClassifier) -> int:
        try:
            return int(one.answer(QUERIES[:2]).answered.sum())
        except ExhaustedError:
            return 0

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(ask, [first, *copies] * 4)) == 13


@pytest.mark.parametrize("changed", [{}, SCREENED], ids=["votes", "screenings"])
def test_a_cap_that_another_copy_uses_up_meanwhile_declines(
    ledger: Ledger, changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = voter(wide(ledger), **changed)
    twin = pickle.loads(pickle.dumps(first))  # noqa: S301

    def open_until_now(_: AccountSpending) -> None:
        monkeypatch.undo()
        assert count(twin) == 5

    monkeypatch.setattr(AccountSpending, "assert_open", open_until_now)
    assert not first.answer(QUERIES[:2]).answered.any()


def test_an_account_that_cannot_pay_takes_nothing_from_the_cap(ledger: Ledger) -> None:
    account = wide(ledger, epsilon=1.0)
    asked = voter(account, vote_noise=15.0, max_answered=9)
    with pytest.raises(OverBudgetError):
        asked.answer(QUERIES[:9])
    assert account.balance().spent == 0
    assert asked.answer(QUERIES[:1]).answered.all()
    while account.balance().left > 0:
        try:
            asked.answer(QUERIES[:1])
        except OverBudgetError:
            break
    assert 1 < sum(entry.kind == "debit" for entry in account.history()) < 9


def test_a_pure_account_does_not_pay_for_votes(ledger: Ledger) -> None:
    with pytest.raises(ValueError, match="this account cannot pay"):
        voter(wide(ledger, delta=0.0))
    assert [entry.kind for entry in ledger.account("wide").history()] == ["opened"]


def test_an_account_with_the_very_plan_is_its_own_cap(ledger: Ledger) -> None:
    event = voter(None).plan_.votes.event
    account = wide(ledger, plan=[(event, 5)])
    first = voter(account)
    assert [entry.kind for entry in account.history()] == ["opened"]
    assert count(first) == 5
    assert count(voter(account)) == 0


@pytest.mark.parametrize("plan", [True, False])
def test_an_answer_reads_counts_and_composes_nothing(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, plan: bool
) -> None:
    """Each answer composed the privacy loss of all that was taken before, a second after 900 screenings."""
    given = SCREENED | {"max_answered": 40}
    account = wide(ledger, **({"plan": voter(None, **given).plan_.events} if plan else {}))
    asked = voter(account, **given)

    def composed(*_: Any) -> None:
        raise AssertionError("an answer was priced")

    monkeypatch.setattr("nearveil.ledger.budget.find_pld_epsilon", composed)
    for number in range(1, 5):
        assert asked.answer(QUERIES[:1]).answered.all()
        assert asked.answer(QUERIES[:number]).answered.sum() <= number


def test_a_refit_does_not_mix_its_rows_with_an_answer_under_way() -> None:
    """The old rows voted with the labels, the noise and the caps of the new fit."""
    asked = PrivateKNeighborsClassifier(
        n_neighbors=40, vote_noise=1e-3, max_answered=3000, max_screened=0, classes=range(10), engine="numpy"
    )
    asked.fit(X, Y)
    queries = DIGITS[400:1400]
    before = np.rint(asked.answer(queries).votes)
    begun, refitted = threading.Event(), threading.Event()

    def pause(_: int) -> None:
        begun.set()
        assert refitted.wait(60)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(asked.answer, queries, progress=pause)
        assert begun.wait(60)
        asked.set_params(vote_noise=500.0, n_neighbors=7, max_answered=3, classes=range(20), abstain_label=-9)
        asked.fit(X[:200, :50], Y[:200] + 10)
        refitted.set()
        answers = waiting.result()
    np.testing.assert_array_equal(np.rint(answers.votes), before)
    assert answers.votes.shape == (len(queries), 10)
    assert asked.answer(DIGITS[400:401, :50]).votes.shape == (1, 20)


def test_a_refit_does_not_mix_the_values_of_a_regressor() -> None:
    asked = PrivateKNeighborsRegressor(0, 9, n_neighbors=20, vote_noise=1e-3, max_answered=3000, engine="numpy")
    asked.fit(X, Y)
    before = asked.answer(QUERIES)

    def refit(_: int) -> None:
        asked.set_params(low=100, high=900, n_neighbors=2, vote_noise=300.0).fit(X[:100], np.full(100, 900.0))

    np.testing.assert_allclose(asked.answer(QUERIES, progress=refit), before, atol=0.1)
    assert asked.answer(QUERIES[:3]).min() >= 100


def test_a_refit_does_not_mix_teachers() -> None:
    asked = PateClassifier(7, mechanism="gnmax", vote_noise=1e-3, max_answered=5000, classes=range(10)).fit(X, Y)
    before = asked.answer(DIGITS[:1500]).votes

    def refit(_: int) -> None:
        asked.set_params(n_teachers=3, classes=range(20)).fit(X, Y + 10)

    np.testing.assert_allclose(asked.answer(DIGITS[:1500], progress=refit).votes, before, atol=0.1)


class Late:
    """Labels that call something as they are read: another thread, at its worst moment."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call, self.shape = call, Y.shape

    def __len__(self) -> int:
        return len(Y)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        self.call()
        return np.array(Y, dtype=dtype)


@pytest.mark.parametrize(
    "model",
    [
        PrivateKNeighborsClassifier(vote_noise=9.0, classes=range(10), engine="numpy"),
        PrivateKNeighborsRegressor(0, 9, vote_noise=9.0, engine="numpy"),
        PateClassifier(4, mechanism="gnmax", vote_noise=9.0, classes=range(10)),
    ],
)
def test_what_another_thread_sets_during_a_fit_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, model: VotingEstimator[Any]
) -> None:
    """The guarantee was made for one source of noise, and the noise was drawn from another."""

    def swapped(*arguments: Any) -> Any:
        model.set_params(source=unsafe_seeded(0))
        return open_spending(*arguments)

    monkeypatch.setattr(estimator, "open_spending", swapped)
    assert model.fit(X, Y).guarantee.sound
    assert model._poll._source.sound


@pytest.mark.parametrize(
    "model",
    [
        PrivateKNeighborsClassifier(vote_noise=9.0, engine="numpy"),
        PateClassifier(4, mechanism="gnmax", vote_noise=9.0),
    ],
)
def test_classes_that_are_read_from_labels_are_told_whatever_is_set_meanwhile(model: Any) -> None:
    """The guarantee was that of a public list, and the list was read from the labels."""
    model.fit(X, Late(lambda: model.set_params(classes=range(10))))
    assert "of a class that occurs anyway" in model.guarantee.unit


def test_what_another_thread_sets_between_the_rounds_of_a_student_changes_nothing() -> None:
    """The guarantee is that of the first round's voter, and the second round drew its noise from a seed."""
    asked = PrivateKNeighborsClassifier(8.0, max_answered=40, max_screened=0, classes=range(10), engine="numpy")
    student = Student(asked, rounds=2, random_state=0)
    told = []

    class Spy:
        sound = False

        def words(self, count: int) -> Any:
            told.append(count)
            return unsafe_seeded(0).words(count)

    student.fit(X, Y, DIGITS[600:900], progress=lambda _: asked.set_params(source=Spy()))
    assert len(student.rounds_) == 2
    assert student.guarantee.sound
    assert not told


def test_a_fit_that_fails_leaves_everything_as_it_was() -> None:
    asked = voter(None)
    with pytest.raises(ValueError, match="vote_noise is too small"):
        asked.set_params(epsilon=1e-3).fit(X[:, :50], Y)
    assert asked.n_features_in_ == 64
    assert asked.answer(QUERIES[:1]).votes.shape == (1, 10)


def test_what_was_opened_before_has_no_cap_and_still_works(ledger: Ledger) -> None:
    account = wide(ledger)
    with pytest.raises(ValueError, match="no cap"):
        account.remaining("nobody's")
    assert account.open_cap([(PureDp(0.5), 2)]) is not None


def test_an_account_covers_what_the_samplers_of_a_plan_cost(ledger: Ledger) -> None:
    """Screenings cost 1e-14 each, which no event tells of: an account with a delta of 1e-15 stated nothing of it."""
    account = wide(ledger, delta=1e-15)
    with pytest.raises(ValueError, match="extra_delta is above 1e-05 of this account's delta"):
        voter(account, **SCREENED)
    assert [entry.kind for entry in account.history()] == ["opened"]
    for delta in (1e-5, 1e-9):
        assert count(voter(ledger.open_account(f"of {delta}", **ABOUT, epsilon=3.0, delta=delta), **SCREENED)) == 5


def test_screenings_are_judged_at_the_epsilon_of_the_account(ledger: Ledger) -> None:
    """Their coins are off by 2^-51, which costs e^epsilon times as much: everything at 50, where 1e-14 was stated."""
    for epsilon in (50.0, 20.0, 13.0):
        account = ledger.open_account(f"of {epsilon}", **ABOUT, epsilon=epsilon, delta=1e-5)
        with pytest.raises(ValueError, match=r"extra_delta is above 1e-05 .* smaller epsilon"):
            voter(account, **SCREENED)
        assert [entry.kind for entry in account.history()] == ["opened"]
        assert count(voter(account)) == 5  # votes cost the same at any epsilon
    assert count(voter(ledger.open_account("of 12", **ABOUT, epsilon=12.0, delta=1e-5), **SCREENED)) == 5
