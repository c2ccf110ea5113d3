"""One query, one key, one payment: the votes are in the ledger before anybody sees them, and stay what they are."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits

from nearveil.ledger import (
    AccountError,
    Debit,
    KeyConflictError,
    KeySpentError,
    Ledger,
    LedgerUnavailableError,
    OverBudgetError,
)
from nearveil.private_knn import ExhaustedError, PateClassifier, PrivateKNeighborsClassifier
from nearveil.private_knn.estimator import VotingEstimator, decode_votes, encode_votes

DIGITS, LABELS = load_digits(return_X_y=True)
X, Y = DIGITS[:300], LABELS[:300]
QUERY = DIGITS[400]


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(tmp_path / "budget.db") as opened:
        yield opened


def voter(ledger: Ledger, **changed: Any) -> PrivateKNeighborsClassifier:
    given: dict[str, Any] = {"vote_noise": 9.0, "max_answered": 3, "max_screened": 0, "classes": range(10)}
    found = PrivateKNeighborsClassifier(ledger=ledger, **({"account": "digits"} | given | changed))
    found.fit(X, Y)
    return found


def debits(ledger: Ledger) -> int:
    return sum(entry.kind == "debit" for entry in ledger.account("digits").history())


def test_a_key_is_paid_for_once_and_says_the_same_for_ever(ledger: Ledger) -> None:
    first = voter(ledger).answer_once(QUERY, "one")
    assert first.votes.shape == (1, 10)
    assert first.answered.tolist() == [True]
    assert first.labels[0] == first.votes[0].argmax()
    for again in (voter(ledger).answer_once(QUERY, "one"), voter(ledger).answer_once(DIGITS[7], "one")):
        np.testing.assert_array_equal(again.votes, first.votes)
        np.testing.assert_array_equal(again.labels, first.labels)
    others = voter(ledger).fit(X[:100], (Y[:100] + 1) % 10)
    np.testing.assert_array_equal(others.answer_once(QUERY, "one").votes, first.votes)  # whatever became of the records
    assert debits(ledger) == 1
    assert not np.array_equal(voter(ledger).answer_once(QUERY, "two").votes, first.votes)
    assert debits(ledger) == 2


def test_it_is_paid_for_before_the_count_and_stored_before_it_is_told(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, order = voter(ledger), []
    counting, store = type(asked._poll), Debit.store
    count = counting._count_votes

    def counted(self: Any, *arguments: Any) -> Any:
        order.append(("count", debits(ledger)))
        return count(self, *arguments)

    def stored(self: Debit, message: bytes) -> None:
        order.append(("store", debits(ledger)))
        store(self, message)

    monkeypatch.setattr(counting, "_count_votes", counted)
    monkeypatch.setattr(Debit, "store", stored)
    told = asked.answer_once(QUERY, "one")
    assert order == [("count", 1), ("store", 1)]
    (message,) = (entry.message for entry in ledger.account("digits").history() if entry.message is not None)
    np.testing.assert_array_equal(decode_votes(message, asked.classes_, 10), told.votes)


def test_what_is_released_is_the_count_with_the_noise_of_the_plan(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = voter(ledger)
    ((sums, _),) = asked._poll._count_votes(QUERY[None])
    seen, release = [], VotingEstimator._release

    def released(self: Any, counts: Any) -> Any:
        seen.append(counts)
        return release(self, counts)

    monkeypatch.setattr(VotingEstimator, "_release", released)
    votes = asked.answer_once(QUERY, "one").votes
    np.testing.assert_array_equal(seen[0], sums)
    assert 0 < np.abs(votes - sums).max() < 7 * asked.plan_.vote_noise  # more once in 10^10 runs


def test_a_crash_after_the_payment_leaves_a_key_that_is_never_counted_again(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = voter(ledger)

    def dead(*_: Any) -> None:
        raise LedgerUnavailableError("the database went away")

    with monkeypatch.context() as broken:
        broken.setattr(Debit, "store", dead)
        with pytest.raises(LedgerUnavailableError):
            asked.answer_once(QUERY, "one")
    with pytest.raises(KeySpentError):
        asked.answer_once(QUERY, "one")
    assert debits(ledger) == 1
    assert [asked.answer_once(QUERY, key).answered.all() for key in ("two", "three")] == [True, True]
    with pytest.raises((OverBudgetError, ExhaustedError)):  # the crash stays paid for
        asked.answer_once(QUERY, "four")


def test_caps_hold_for_new_keys_alone(ledger: Ledger) -> None:
    asked = voter(ledger)
    known = [asked.answer_once(QUERY, key).votes for key in ("a", "b", "c")]
    for one in (asked, voter(ledger)):
        with pytest.raises(ExhaustedError, match="answered before"):
            one.answer_once(QUERY, "d")
    np.testing.assert_array_equal(asked.answer_once(QUERY, "a").votes, known[0])
    np.testing.assert_array_equal(voter(ledger).answer_once(QUERY, "c").votes, known[2])


def test_repeating_and_refusing_use_up_nothing_of_the_cap_either(ledger: Ledger) -> None:
    account = ledger.open_account(
        "wide", owner="me", protects="database", unit="record", relation="add-remove", epsilon=50.0, delta=1e-5
    )
    asked = PrivateKNeighborsClassifier(
        vote_noise=9.0, max_answered=2, max_screened=0, classes=range(10), account=account
    )
    asked.fit(X, Y).answer_once(QUERY, "a")
    for _ in range(5):
        asked.answer_once(QUERY, "a")
    with pytest.raises(AccountError, match="has no quota"):
        asked.answer_once(QUERY, "b", client="nobody")
    asked.answer_once(QUERY, "b")
    with pytest.raises(ExhaustedError):
        asked.answer_once(QUERY, "c")


def test_a_client_pays_from_its_quota_and_owns_its_key(ledger: Ledger) -> None:
    asked = voter(ledger)
    account = ledger.account("digits")
    account.quota("alice", plan=[(asked.plan_.votes.event, 1)])
    asked.answer_once(QUERY, "a", client="alice")
    with pytest.raises(OverBudgetError):
        asked.answer_once(QUERY, "b", client="alice")
    with pytest.raises(KeyConflictError):
        asked.answer_once(QUERY, "a")
    asked.answer_once(QUERY, "b")


def test_what_it_needs_is_said(ledger: Ledger) -> None:
    with pytest.raises(ValueError, match="account must be given"):
        PrivateKNeighborsClassifier(vote_noise=9.0, max_answered=3).fit(X, Y).answer_once(QUERY, "a")
    with pytest.raises(ValueError, match="max_screened must be 0"):
        voter(ledger, account="s", max_screened=5, screening_noise=50.0, threshold=9.0).answer_once(QUERY, "a")
    asked = voter(ledger)
    for bad, words in ((X[:2], "one row"), (QUERY[:3], "features"), (np.full(64, np.nan), "NaN")):
        with pytest.raises(ValueError, match=words):
            asked.answer_once(bad, "a")
    with pytest.raises(ValueError, match="key must be a text"):
        asked.answer_once(QUERY, "")
    assert debits(ledger) == 0


def test_another_list_of_classes_does_not_read_old_votes(ledger: Ledger) -> None:
    voter(ledger).answer_once(QUERY, "a")
    with pytest.raises(ValueError, match="other classes"):
        voter(ledger, classes=range(11)).answer_once(QUERY, "a")
    for message in (b"", b"[]", b'{"votes":[1]}', b'{"classes":["0"],"votes":["x"]}', b'{"classes":["0"],"votes":[]}'):
        with pytest.raises(ValueError, match="other classes"):
            decode_votes(message, np.arange(1), 1)
    kept = np.array([[0.1, -1e-300, 3.0]])
    np.testing.assert_array_equal(
        decode_votes(encode_votes(np.array(["a", "b", "c"]), kept), np.array(["a", "b", "c"]), 3), kept
    )


def test_teachers_answer_once_too(ledger: Ledger) -> None:
    pate = PateClassifier(
        5, mechanism="gnmax", vote_noise=9.0, max_answered=2, classes=range(10), ledger=ledger, account="t"
    )
    first = pate.fit(X, Y).answer_once(QUERY, "a")
    np.testing.assert_array_equal(pate.answer_once(QUERY, "a").votes, first.votes)
