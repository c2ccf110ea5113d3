"""Individual accounting: what one record can change, and that no copy, crash or choice of queries changes more."""

import copy
import math
import os
import pickle
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats
from scipy.optimize import brentq
from sklearn.datasets import load_digits

from nearveil.ledger import Ledger, OverBudgetError
from nearveil.ledger.errors import CorruptLedgerError
from nearveil.privacy.noise import unsafe_seeded
from nearveil.private_knn import (
    ExhaustedError,
    NoiseWarning,
    PrivateDiscriminant,
    PrivateKNeighborsClassifier,
    PrivateKNeighborsRegressor,
    PublicStudent,
    Student,
    individual,
)
from nearveil.private_knn.discriminant import merge_groups, sum_classes
from nearveil.private_knn.discriminant_model import SENSITIVITY
from nearveil.private_knn.individual import QueryLog, RadiusRule, Terms, find_budget
from nearveil.private_knn.neighbors import IntegerRows, NeighborSearch
from studies import pate
from studies.pate import PateClassifier

DIGITS, LABELS = load_digits(return_X_y=True)
ORDER = np.random.default_rng(0).permutation(len(DIGITS))
DIGITS, LABELS = DIGITS[ORDER], LABELS[ORDER]
X, Y, PUBLIC, QUERIES, TRUTH = DIGITS[:1000], LABELS[:1000], DIGITS[1000:1400], DIGITS[1400:1500], LABELS[1400:1500]
TERMS: dict[str, Any] = {"epsilon": 4.0, "max_answered": 100, "max_screened": 0, "classes": range(10)}
Counts = NDArray[np.int64]


def make_voter(**changed: Any) -> PrivateKNeighborsClassifier:
    return PrivateKNeighborsClassifier(**(TERMS | {"least_records": 1000, "accounting": "individual"} | changed))


def fit(*, rows: Any = X, labels: Any = Y, groups: Any = None, **changed: Any) -> PrivateKNeighborsClassifier:
    singles = None if groups is None else range(len(PUBLIC))
    return make_voter(**changed).fit(rows, labels, public=PUBLIC, groups=groups, public_groups=singles)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(tmp_path / "budget.db") as opened:
        yield opened


def count_votes(voter: PrivateKNeighborsClassifier, terms: Terms, earlier: Any = ()) -> Counts:
    return voter._poll._count_within(list(earlier), terms, None)


def make_terms(queries: NDArray[np.int16], radii: Any, max_votes: int) -> Terms:
    return Terms(queries, np.asarray(radii, dtype=np.int32), max_votes, 1.0, 1.0, 1.0, 1)


# What one record changes


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 6), st.integers(0, 39))
def test_a_record_left_out_changes_no_vote_of_the_others(seed: int, max_votes: int, out: int) -> None:
    """Bit for bit: the counts with and without it differ by its own votes alone, and these are at most its budget."""
    rng = np.random.default_rng(seed)
    rows, labels = rng.integers(-3, 4, size=(40, 3)), rng.integers(0, 3, size=40)
    rest = np.arange(40) != out
    whole, less = (
        fit_rows(rows[part], labels[part], rows[rng.integers(0, 40, size=20)]) for part in (rest | True, rest)
    )
    queries = whole._poll._search.round(rng.integers(-3, 4, size=(30, 3)))
    radii = rng.integers(-(2364**2), 2364**2, size=30)
    terms, earlier = make_terms(queries[:20], radii[:20], max_votes), [make_terms(queries[20:], radii[20:], max_votes)]
    difference = count_votes(whole, terms, earlier) - count_votes(less, terms, earlier)
    assert set(np.unique(difference)) <= {0, 1}
    assert not difference[:, np.arange(3) != labels[out]].any()
    passes = sum(passes_of(whole, part, out) for part in earlier)
    expected = np.cumsum(passes_of_each(whole, terms, out)) + passes
    np.testing.assert_array_equal(
        difference[:, labels[out]], passes_of_each(whole, terms, out) & (expected <= max_votes)
    )
    assert difference.sum() <= max_votes


def fit_rows(rows: Any, labels: Any, public: Any) -> PrivateKNeighborsClassifier:
    return make_voter(classes=range(3), least_records=1).fit(rows, labels, public=public)


def passes_of_each(voter: PrivateKNeighborsClassifier, terms: Terms, row: int) -> NDArray[np.bool_]:
    """Whether a record is within each radius, by a score in whole numbers of its own."""
    table = voter._poll._search._engine.table[row, :-1].astype(object)  # type: ignore[union-attr]
    scores = [2 * int(np.dot(query.astype(object), table)) - int(np.dot(table, table)) for query in terms.queries]
    return np.array(scores) >= terms.radii


def passes_of(voter: PrivateKNeighborsClassifier, terms: Terms, row: int) -> int:
    return int(passes_of_each(voter, terms, row).sum())


def count_nearest_capped(order: NDArray[np.intp], labels: Counts, k: int, max_votes: int) -> list[Counts]:
    """Count the votes of the k nearest records that have votes left: the mechanism that must not be built."""
    left, counts = np.full(len(labels), max_votes), []
    for ranks in order:
        voters = [row for row in ranks if left[row] > 0][:k]
        left[voters] -= 1
        counts.append(np.bincount(labels[voters], minlength=2))
    return counts


def test_the_cascade_of_at_most_k_is_not_ours() -> None:
    """With personal caps and "at most k", one record changes every answer; with a public radius only its own votes."""
    n = 100
    angles = np.linspace(0.01, 0.02, n + 1)
    rows, labels = np.column_stack([np.cos(angles), np.sin(angles)]), np.arange(n + 1) % 2
    order = np.tile(np.arange(n + 1), (n, 1))
    whole, less = (np.array(count_nearest_capped(order[:, i:], labels, 1, 1)) for i in (0, 1))
    assert (whole != less).any(axis=1).all()  # all 100 answers turn around
    voters = [
        make_voter(classes=range(2), least_records=1).fit(rows[i:], labels[i:], public=rows[::5].copy()) for i in (0, 1)
    ]
    query = np.repeat(voters[0]._poll._search.round([[1.0, 0.0]]), n, axis=0)
    terms = make_terms(query, np.full(n, -(2**24)), 1)  # every record passes
    difference = count_votes(voters[0], terms) - count_votes(voters[1], terms)
    assert np.abs(difference).sum() == 1


def test_all_ties_at_the_radius_vote() -> None:
    voter = fit_rows([[1, 0]] * 7 + [[0, 1]] * 3, [0] * 7 + [1] * 3, [[1, 0]] * 10)
    query = voter._poll._search.round([[1.0, 0.0]])
    (score,) = voter._poll._rule.search.rank(query, 1)[1][0]
    np.testing.assert_array_equal(count_votes(voter, make_terms(query, [score], 9)), [[7, 0, 0]])
    np.testing.assert_array_equal(count_votes(voter, make_terms(query, [score + 1], 9)), [[0, 0, 0]])


def test_a_verdict_depends_on_no_other_row_and_no_batch() -> None:
    """Scores near a radius are whole numbers: each row alone, each query alone, and any blocks give the same."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(300, 37)) * np.float64(10.0) ** rng.integers(-8, 8, size=(300, 1))
    whole = NeighborSearch(rows, engine="numpy")
    queries = whole.round(rows[:40] + 1e-3 * rng.normal(size=(40, 37)))
    radii = whole.rank(queries, 30)[1][:, -1]
    together = [set(ids.tolist()) for ids in whole.within(queries, radii)]
    for number in range(40):
        (alone,) = whole.within(queries[number : number + 1], radii[number : number + 1])
        assert set(alone.tolist()) == together[number]
    for row in range(0, 300, 7):
        single = NeighborSearch(rows[row : row + 1], engine="numpy")
        passes = [len(ids) == 1 for ids in single.within(queries, radii)]
        assert passes == [row in ids for ids in together]


# What it costs


def find_epsilon(multiplier: float, delta: float) -> float:
    """Epsilon of one Gaussian mechanism, by its closed form."""

    def excess(epsilon: float) -> float:
        mu = 1 / multiplier
        first = stats.norm.cdf(mu / 2 - epsilon / mu)
        return float(first - math.exp(epsilon) * stats.norm.cdf(-mu / 2 - epsilon / mu) - delta)

    return float(brentq(excess, 0, 100))


def test_a_record_that_votes_as_often_as_it_may_pays_what_is_promised() -> None:
    """The game: is the canary among the records? Its votes in all answers are a draw at distance sqrt(B) / s."""
    voter = fit(source=unsafe_seeded(3), max_answered=30, epsilon=2.0)
    queries = np.repeat(QUERIES[:1], 30, axis=0) + np.arange(30)[:, None] * 1e-3 * QUERIES[1]  # all near the canary
    canary = fit(
        source=unsafe_seeded(4), max_answered=30, epsilon=2.0, rows=np.vstack([X, QUERIES[:1]]), labels=[*Y, 7]
    )
    answers = [world.answer(queries) for world in (voter, canary)]
    logs = [world._poll._spending.read_log()[0] for world in (voter, canary)]
    assert logs[0] == logs[1]  # terms and log do not know the canary
    (terms,) = QueryLog.read(logs[:1]).asked
    counts = [count_votes(world, terms) for world in (voter, canary)]
    voted = counts[1] - counts[0]
    assert voted.sum() == voted[:, 7].sum() == terms.max_votes > 5
    votes = replace(voter.plan_.votes, noise=terms.noise)
    losses = []
    for number, (world, answer) in enumerate(zip(counts, answers, strict=True)):
        assert np.std(answer.votes - world) == pytest.approx(terms.noise, rel=0.15)  # 300 draws
        drawn = votes.release(np.tile(world[:, 7], (4000, 1)), unsafe_seeded(number)) - counts[0][:, 7]
        losses.append((drawn @ voted[:, 7] - terms.max_votes / 2) / terms.noise**2)
    mean, deviation = terms.max_votes / 2 / terms.noise**2, math.sqrt(terms.max_votes) / terms.noise
    np.testing.assert_allclose([-losses[0].mean(), losses[1].mean()], mean, atol=5 * deviation / math.sqrt(4000))
    np.testing.assert_allclose([np.std(loss) for loss in losses], deviation, rtol=0.06)
    cost = find_epsilon(terms.noise / math.sqrt(terms.max_votes), 1e-5)
    assert 1.99 < cost <= voter.guarantee.epsilon <= 2.0  # attained, and not exceeded


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=5))
def test_batches_share_the_budget_of_one_gaussian(sizes: list[int]) -> None:
    """Theorem 13: B / s^2 of all batches together is at most that of the plan, however queries are divided."""
    voter = fit(max_answered=100)
    start, squares = 0, 0.0
    for size in sizes:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NoiseWarning)
            try:
                forecast = voter.answer(DIGITS[1400 + start : 1400 + start + size]).forecast
            except ExhaustedError:
                break
        start += size
        assert forecast is not None
        squares += forecast.max_votes / forecast.noise**2
    assert squares <= 100 / voter.plan_.vote_noise**2
    assert find_epsilon(1 / math.sqrt(squares), 1e-5) <= 4.0


def test_replacing_a_record_costs_root_two_more() -> None:
    """The record and its replacement vote B times each: the distance is sqrt(2 B) / s, and not 2 sqrt(B) / s."""
    rows = np.vstack([X, QUERIES[:1]])
    first, second = (fit(rows=rows, labels=np.append(Y, label)) for label in (3, 4))
    query = np.repeat(first._poll._search.round(QUERIES[:1]), 20, axis=0)
    radius = first._poll._rule.search.rank(query, 5)[1][:, -1]
    difference = count_votes(first, make_terms(query, radius, 9)) - count_votes(second, make_terms(query, radius, 9))
    assert np.sum(difference**2) == 2 * 9


@pytest.mark.parametrize(
    ("unit", "n_records", "n_classes", "crowd"),
    [(20, 1000, 10, 0), (60, 1000, 10, 0), (15, 400, 2, 0), (5, 5000, 200, 0), (40, 1000, 10, 1), (200, 1000, 10, 1)],
)
def test_the_rule_is_that_of_the_theory(unit: float, n_records: float, n_classes: int, crowd: bool) -> None:
    """Against loops: the least radius with 30 votes, 12 for a unit of noise, and the least budget that keeps 90%."""
    rule = RadiusRule(PUBLIC, n_classes)
    queries = rule.search.round(QUERIES[:1] + np.arange(100)[:, None] * 1e-3 if crowd else QUERIES)
    terms = rule.plan_batch(queries, unit, n_records)
    table = rule.search.round(PUBLIC).astype(np.int64)
    scores = 2 * queries.astype(np.int64) @ table.T - (table**2).sum(axis=1)
    ranks = np.argsort(np.argsort(-scores, axis=1, kind="stable"), axis=1)
    cap = max(5, math.floor(min(0.1, max(1 / (2 * n_classes), 0.01)) * 400))
    end, ratio = cap, 12.0
    for m in range(5, 401):
        votes = (ranks < m).sum(axis=0)
        budget = next(b for b in range(1, 101) if np.minimum(votes, b).sum() >= 0.9 * votes.sum())
        noise, voters = unit * math.sqrt(budget / 100), n_records * m / 400
        if m == cap:
            crowded = budget > 2.5 * 100 * m / 400
            assert crowded == crowd
            end, ratio = (200, 8.0) if crowded else (math.floor(min(3 / (2 * n_classes), 0.25) * 400), 4.0)
        if voters >= max(ratio * noise, 30) or m >= max(cap, end):
            break
    assert (terms.rank, terms.max_votes) == (m, budget)
    assert terms.noise == pytest.approx(noise)
    np.testing.assert_array_equal(terms.radii, np.sort(scores, axis=1)[:, -m])
    assert find_budget(votes) == budget


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.int64, list])
def test_private_rows_are_no_public_rows(kind: Any) -> None:
    """A radius from private rows would protect nobody. Rows are converted to doubles first, in a copy."""
    rows = X.tolist() if kind is list else X.astype(kind)
    for public in (rows,) if kind is list else (rows, rows[:400]):
        with pytest.raises(ValueError, match="public must not be X"):
            make_voter().fit(rows, Y, public=public)


# State is the public log


def test_repeated_queries_get_the_stored_answer_for_free() -> None:
    voter = fit(max_answered=60)
    first = voter.answer(QUERIES[:40])
    again = voter.answer(np.vstack([QUERIES[10:20], QUERIES[5:8], QUERIES[5:8]]))
    np.testing.assert_array_equal(again.votes[:10], first.votes[10:20])
    np.testing.assert_array_equal(again.votes[10:13], again.votes[13:])
    assert again.forecast is None
    assert voter._poll._spending.left()["answered"] == 20
    rest = voter.answer(QUERIES[30:70])  # 10 stored, 20 paid for, 10 declined
    np.testing.assert_array_equal(np.flatnonzero(rest.answered), range(30))
    with pytest.raises(ExhaustedError, match="max_answered is reached"):
        voter.predict(QUERIES[80:81])
    np.testing.assert_array_equal(voter.answer(QUERIES[:40]).votes, first.votes)  # also now


def test_answers_of_any_number_are_stored(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry of a log has a limit. If all answers were in one, a large batch would fail after it was paid for."""
    monkeypatch.setattr(individual, "_MOST_VOTES", 70)
    voter = fit(ledger=ledger, account="digits")
    first = voter.answer(QUERIES[:31])
    assert len(voter._poll._spending.read_log()) == 1 + 5
    np.testing.assert_array_equal(voter.answer(QUERIES[30::-1]).votes, first.votes[::-1])


def test_the_log_is_written_before_records_are_read(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that fails after it was logged stays counted, in other processes too."""
    voter = fit(ledger=ledger, account="digits", crowding=1.0)
    entries: list[bytes] = []

    def crash(poll: Any, *arguments: Any) -> Counts:
        entries.extend(poll._spending.read_log())
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PrivateKNeighborsClassifier, "_count_within", crash)
        with pytest.raises(KeyboardInterrupt):
            voter.predict(QUERIES[:10])
    (logged,) = QueryLog.read(entries).asked
    np.testing.assert_array_equal(logged.queries, voter._poll._search.round(QUERIES[:10]))
    restarted = pickle.loads(pickle.dumps(voter))  # noqa: S301
    seen: list[Any] = []

    def watch(poll: Any, earlier: Any, terms: Terms, progress: Any) -> Counts:
        seen.extend(earlier)
        return count(poll, earlier, terms, progress)

    count = PrivateKNeighborsClassifier._count_within
    monkeypatch.setattr(PrivateKNeighborsClassifier, "_count_within", watch)
    restarted.predict(QUERIES[10:12])
    assert [len(terms.radii) for terms in seen] == [10]  # the crashed call counts
    assert ledger.verify().ok


def test_copies_pickles_and_refits_share_one_log(ledger: Ledger) -> None:
    first = fit(ledger=ledger, account="digits")
    answers = first.answer(QUERIES[:30])
    copies = [pickle.loads(pickle.dumps(first)), copy.deepcopy(first), fit(ledger=ledger, account="digits")]  # noqa: S301
    for number, other in enumerate(copies):
        np.testing.assert_array_equal(other.answer(QUERIES[:30]).votes, answers.votes)
        other.predict(QUERIES[30 + 20 * number : 50 + 20 * number])
    total = sum(len(terms.radii) for terms in QueryLog.read(first._poll._spending.read_log()).asked)
    assert total == 90
    assert copies[2].answer(QUERIES[80:]).answered.sum() == 20  # 10 stored, the last 10 paid for
    for voter in (first, *copies):
        with pytest.raises(ExhaustedError):
            voter.predict(DIGITS[1500:1501])
    assert ledger.verify().ok


def test_a_stream_pays_again_after_a_fit(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that changed between fits has passed other queries by the log, and would vote as often again."""
    terms: dict[str, Any] = {"ledger": ledger, "account": "digits", "crowding": 1.0}
    first = fit(**terms)
    answers = first.answer(QUERIES[:5])
    assert first._poll._spending.left()["answered"] == 0  # a stream pays all with its first query
    monkeypatch.setattr(PrivateKNeighborsClassifier, "_count_within", None)  # nothing reads a record
    for voter in (fit(**terms), fit(rows=np.roll(X, 1, axis=0), **terms)):
        assert voter._poll._spending.read_log() == []
        with pytest.raises(ExhaustedError):
            voter.predict(QUERIES[:5])
    restarted = pickle.loads(pickle.dumps(first))  # noqa: S301
    np.testing.assert_array_equal(restarted.answer(QUERIES[:5]).votes, answers.votes)


def test_a_pickle_or_fork_without_an_account_refuses() -> None:
    voter = fit()
    before = voter.answer(QUERIES[:5])
    np.testing.assert_array_equal(copy.deepcopy(voter).answer(QUERIES[:5]).votes, before.votes)
    with pytest.raises(ExhaustedError, match="copies must not each spend"):
        pickle.loads(pickle.dumps(voter)).answer(QUERIES[:5])  # noqa: S301
    child = os.fork()
    if child == 0:
        try:
            voter.answer(QUERIES[5:9])
        except ExhaustedError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_two_calls_at_once_never_log_at_one_position(ledger: Ledger) -> None:
    account = fit(ledger=ledger, account="digits")._poll._spending.account  # type: ignore[attr-defined]
    assert account.append_log("log", 0, b"a")
    assert not account.append_log("log", 0, b"b")
    assert account.append_log("log", 1, b"c")
    assert account.read_log("log") == [b"a", b"c"]
    for number in range(2, 70):
        account.append_log("log", number, str(number).encode())
    assert account.read_log("log")[2:] == [str(number).encode() for number in range(2, 70)]


def test_a_log_with_a_gap_is_refused(ledger: Ledger) -> None:
    """Its other entries would be taken for those before them, and a call that appends would retry for ever."""
    voter = fit(ledger=ledger, account="digits")
    voter.predict(QUERIES[:3])
    with ledger._database.engine.begin() as connection:
        connection.execute(sa.text("DELETE FROM nearveil_entry WHERE kind = 'log' AND key LIKE '% 0'"))
    with pytest.raises(CorruptLedgerError, match="has gaps"):
        voter.predict(QUERIES[3:6])
    assert not ledger.verify().ok


def test_an_account_that_cannot_pay_logs_nothing(ledger: Ledger) -> None:
    about: dict[str, Any] = {"owner": "me", "protects": "database", "unit": "record", "relation": "add-remove"}
    account = ledger.open_account("small", epsilon=0.5, delta=1e-5, **about)
    voter = fit(account=account)
    with pytest.raises(OverBudgetError):
        voter.predict(QUERIES)
    assert voter._poll._spending.read_log() == []


def dump_state(voter: PrivateKNeighborsClassifier) -> bytes:
    """Everything but the caps and the log."""
    return pickle.dumps({name: value for name, value in vars(voter._poll).items() if name != "_spending"})


def test_nothing_private_is_stored() -> None:
    """Terms, log and forecast are the same whether or not records are used up, and whatever the labels are."""
    logs = []
    for labels in (Y, np.zeros(1000, dtype=int)):
        voter = fit(labels=labels, crowding=1.0)
        before = dump_state(voter)
        voter.predict(np.vstack([QUERIES[:1] + 1e-3 * step for step in range(20)]))
        voter.predict(QUERIES[5:9])
        logs.append([entry for entry in voter._poll._spending.read_log() if b"queries" in entry])
        assert dump_state(voter) == before
    assert logs[0] == logs[1]


# Queries chosen to exhaust somebody


def test_queries_about_one_corner_use_up_its_records_and_decline_publicly() -> None:
    crowd = QUERIES[:1] + 1e-2 * np.random.default_rng(0).normal(size=(200, 64))
    voter = fit(max_answered=300, crowding=1.0, epsilon=8.0)
    first = voter.answer(crowd)
    assert 0 < first.answered.sum() < 200  # public rows near it are used up, and this is declined without cost
    last = np.flatnonzero(first.answered)[-1]
    assert last == first.answered.sum() - 1
    calm = voter.answer(QUERIES[10:60])
    assert calm.answered.mean() > 0.6
    assert np.mean(calm.labels == TRUTH[10:60], where=calm.answered) > 0.85


def test_one_class_batches_are_planned_for() -> None:
    """The budget is read off the batch: queries of one class get a larger one, and stay right."""
    ones = np.flatnonzero(LABELS[1400:] == 1) + 1400
    voter = fit(epsilon=8.0, max_answered=len(ones))
    answers = voter.answer(DIGITS[ones])
    calm = fit(epsilon=8.0, max_answered=len(ones)).answer(DIGITS[1400 : 1400 + len(ones)])
    assert answers.forecast is not None
    assert calm.forecast is not None
    assert answers.forecast.max_votes > 2 * calm.forecast.max_votes
    assert np.mean(answers.labels == 1) > 0.8


# Choices


def test_auto_is_individual_where_it_may_be(ledger: Ledger) -> None:
    def choose(public: Any = PUBLIC, **changed: Any) -> bool:
        return make_voter(**{"accounting": "auto"} | changed).fit(X, Y, public=public).plan_.individual

    assert choose()
    assert not choose(None)
    with pytest.warns(NoiseWarning, match=r'299 public rows: "auto" needs 300, .*; the worst case is charged'):
        assert not choose(PUBLIC[:299])
    assert choose(PUBLIC[:299], accounting="individual")
    with pytest.raises(ValueError, match="this is worst-case: n_neighbors must be left out"):
        make_voter(accounting="auto", n_neighbors=30).fit(X, Y, public=PUBLIC).forecast(QUERIES)
    assert not choose(vote_noise=50.0, epsilon=None)
    assert not choose(n_neighbors=30)
    assert not choose(max_screened=100)
    assert not choose(sampling_rate=0.5)
    assert not choose(accounting="worst-case")
    paid: dict[str, Any] = {"ledger": ledger, "account": "digits", "least_records": None}
    assert not choose(None, **paid)  # opens the account for the worst case
    assert not choose(**paid)  # which stays so
    for problem, changed in (
        ("public", {}),
        ("n_neighbors", {"n_neighbors": 5}),
        ("sampling_rate", {"sampling_rate": 0.5}),
    ):
        with pytest.raises(ValueError, match=problem):
            make_voter(**changed).fit(X, Y, public=None if problem == "public" else PUBLIC)


def test_the_number_of_records_is_released_once(ledger: Ledger) -> None:
    voter = fit(least_records=None, ledger=ledger, account="digits")
    assert voter.plan_.caps == {"answered": 100, "counted": 1}
    first, second = voter.forecast(QUERIES[:50]), voter.forecast(QUERIES)
    assert first.n_records == second.n_records
    noise = voter.plan_.count_noise or 0.0
    assert first.n_records == pytest.approx(1000 - 2 * noise, abs=6 * noise)
    again = fit(least_records=None, ledger=ledger, account="digits")
    assert again.forecast(QUERIES).n_records == first.n_records
    assert voter.guarantee.epsilon <= 4
    assert fit().plan_.vote_noise < voter.plan_.vote_noise < 1.01 * fit().plan_.vote_noise


def test_a_forecast_warns_before_anything_is_paid() -> None:
    voter = fit(epsilon=0.2)
    assert not voter.forecast(QUERIES).is_clear
    with warnings.catch_warnings():
        warnings.simplefilter("error", NoiseWarning)
        with pytest.raises(NoiseWarning, match="PrivateDiscriminant"):
            voter.predict(QUERIES)
    assert voter._poll._spending.left()["answered"] == 100
    assert fit(epsilon=8.0).forecast(QUERIES).is_clear


def test_close_calls_are_declined_for_free() -> None:
    voter = fit(epsilon=2.0, margin=2.0)
    answers = voter.answer(QUERIES)
    votes = np.array([voter._poll._read_log().answers[row.tobytes()][0] for row in voter._poll._search.round(QUERIES)])
    order = np.sort(votes, axis=1)
    assert answers.forecast is not None
    np.testing.assert_array_equal(answers.answered, order[:, -1] - order[:, -2] >= 2 * answers.forecast.noise)
    right = np.mean(answers.labels == TRUTH, where=answers.answered)
    assert right > np.mean(np.argmax(votes, axis=1) == TRUTH)
    assert fit(epsilon=2.0).answer(QUERIES).answered.all()


def test_it_is_better_than_the_worst_case() -> None:
    right = {
        public is not None: np.mean(
            [
                np.mean(
                    PrivateKNeighborsClassifier(2.0, max_answered=100, max_screened=0, classes=range(10))
                    .fit(X, Y, public=public)
                    .predict(QUERIES)
                    == TRUTH
                )
                for _ in range(3)
            ]
        )
        for public in (None, PUBLIC)
    }
    assert right[True] > right[False] + 0.1


def test_a_student_learns_by_it_and_is_published() -> None:
    student = Student(make_voter(accounting="auto", least_records=None, max_answered=300), rounds=2, random_state=0)
    student.fit(X, Y, public=PUBLIC)
    assert student.plan_.individual
    assert sum(len(step.rows) for step in student.rounds_) == 300
    forecasts = [step.answers.forecast for step in student.rounds_]
    squares = sum(each.max_votes / each.noise**2 for each in forecasts if each is not None)
    assert 299 / student.plan_.vote_noise**2 <= squares <= 300 / student.plan_.vote_noise**2
    read = PublicStudent.from_bytes(student.export().to_bytes())
    np.testing.assert_array_equal(read.predict(QUERIES), student.predict(QUERIES))
    assert read.guarantee.epsilon == student.guarantee.epsilon
    assert np.mean(student.predict(QUERIES) == TRUTH) > 0.7


def test_declined_queries_of_a_round_are_paid_for() -> None:
    voter = make_voter(accounting="auto", max_answered=300, max_screened=None, margin=4.0)
    student = Student(voter, rounds=2, random_state=0).fit(X, Y, public=PUBLIC)
    assert not student.rounds_[0].answers.answered.all()
    assert sum(len(step.rows) for step in student.rounds_) == 300


def test_a_round_does_not_pay_for_a_stream() -> None:
    """Each of two rounds paid for all queries that were left: 1.5 times the variance that the plan states."""
    student = Student(make_voter(crowding=2.0), rounds=2, random_state=0)
    with pytest.raises(ValueError, match="crowding of voter must be None"):
        student.fit(X, Y, public=PUBLIC)


def test_a_student_goes_on_after_a_crash(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first round is answered from the log. The number of records is not released again, and has no price."""
    voter = make_voter(least_records=None, ledger=ledger, account="digits")

    def fit_student() -> Student:
        return Student(voter, rounds=2, random_state=0).fit(X, Y, public=PUBLIC)

    with monkeypatch.context() as patch:
        patch.setattr(Student, "_transform_rows", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            fit_student()
    assert len(fit_student().rounds_) == 2


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


# Whole persons


def test_a_person_is_one_voter_however_many_images_it_has() -> None:
    rows = np.vstack([X, np.repeat(QUERIES[:1], 50, axis=0)])
    labels, groups = [*Y, *[3] * 50], [*range(1000), *[1000] * 50]
    with_person, without = fit(rows=rows, labels=labels, groups=groups), fit(groups=range(1000))
    query = np.repeat(with_person._poll._search.round(QUERIES[:1]), 30, axis=0)
    radii = np.full(30, with_person._poll._rule.search.rank(query[:1], 20)[1][0, -1])
    terms = make_terms(query, radii, 7)
    difference = count_votes(with_person, terms) - count_votes(without, terms)
    assert difference[:7, 3].tolist() == [1] * 7
    assert np.abs(difference).sum() == 7


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 12))
def test_the_nearest_groups_vote_each_by_its_nearest_image(seed: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    rows, labels, groups = rng.normal(size=(60, 3)), rng.integers(0, 3, size=60), rng.integers(0, 12, size=60)
    voter = PrivateKNeighborsClassifier(n_neighbors=k, vote_noise=0.01, max_answered=99, classes=range(3))
    votes = voter.fit(rows, labels, groups=groups).answer(rows[:9] + 0.1).votes
    order = NeighborSearch(rows).nearest(rows[:9] + 0.1, 60)
    for listed, counts in zip(order, votes, strict=True):
        firsts = {groups[row]: row for row in listed[::-1]}
        ranks = {row: rank for rank, row in enumerate(listed)}
        chosen = sorted(firsts.values(), key=ranks.__getitem__)[:k]
        np.testing.assert_allclose(counts, np.bincount(labels[chosen], minlength=3), atol=0.2)
    out = groups != groups[0]
    less = voter.fit(rows[out], labels[out], groups=groups[out]).answer(rows[:9] + 0.1).votes
    assert np.max(np.sum(np.rint(votes - less) ** 2, axis=1)) <= 2  # a whole person, and sqrt 2
    assert voter.guarantee.unit == "group of records"


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.booleans())
def test_a_group_adds_no_more_to_a_discriminant_than_a_record(seed: int, alike: bool) -> None:
    rng = np.random.default_rng(seed)
    rows = IntegerRows(6).round(rng.normal(size=(50, 6)) + 9 * alike)
    classes, groups = rng.integers(0, 3, size=50) * (not alike), rng.integers(0, 8, size=50)
    whole = sum_classes(*merge(rows, classes, groups))
    for out in range(8):
        rest = groups != out
        less = sum_classes(*merge(rows[rest], classes[rest], groups[rest]))
        assert np.linalg.norm(whole - less) <= SENSITIVITY
    single = np.arange(50)
    np.testing.assert_array_equal(sum_classes(*merge(rows, classes, single)), sum_classes(rows, classes, 3))


def merge(rows: Any, classes: Any, groups: Any) -> Any:
    merged, numbers, counts = merge_groups(rows, classes, groups)
    return merged, numbers, 3, counts


def test_groups_are_whole_for_every_estimator() -> None:
    groups = np.arange(1000) // 5
    model = PrivateDiscriminant(4.0, classes=range(10)).fit(X, Y, PUBLIC, groups=groups)
    assert model.guarantee.unit == "group of records"
    assert model.score(QUERIES, TRUTH) > 0.5
    regressor = PrivateKNeighborsRegressor(0, 9, epsilon=8.0, max_answered=5, n_neighbors=50)
    assert regressor.fit(X, Y, groups=groups).guarantee.unit == "group of records"
    assert np.isfinite(regressor.predict(QUERIES[:5])).all()
    persons: dict[str, Any] = {"accounting": "auto", "least_records": 200, "unit": "person"}
    with pytest.warns(NoiseWarning, match="public_groups must be given with groups; the worst case is charged"):
        voter = make_voter(**persons).fit(X, Y, groups=groups, public=PUBLIC)
    assert not voter.plan_.individual  # how often a person passes is not known
    order = np.argsort(LABELS[1000:1400], kind="stable")
    public = PUBLIC[order]
    voter = make_voter(**persons | {"accounting": "individual"}).fit(
        X, Y, groups=groups, public=public, public_groups=np.arange(400) // 5
    )
    assert voter.guarantee.unit == "person"
    assert voter.answer(QUERIES[:60]).forecast.max_votes > 10  # type: ignore[union-attr]
    pate = PateClassifier(20, mechanism="gnmax", epsilon=8.0, max_answered=5, classes=range(10), unit="person")
    assert pate.fit(X, Y, groups=groups).guarantee.unit == "person"
    with pytest.raises(ValueError, match="groups must have one name"):
        make_voter().fit(X, Y, public=PUBLIC, groups=groups[:9])


def test_a_student_of_whole_persons() -> None:
    persons: dict[str, Any] = {"groups": np.arange(1000) // 2, "public_groups": np.arange(400) // 2}
    for voter in (make_voter(least_records=500), PateClassifier(30, mechanism="gnmax", epsilon=8.0, max_answered=50)):
        student = Student(voter, random_state=0).fit(X, Y, PUBLIC, **persons)
        assert "group of records" in student.guarantee.unit
        assert not hasattr(student, "_groups")


def test_a_group_has_one_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def watch(_: Any, X: NDArray[Any], *rest: Any) -> int:
        seen.append(set(X[:, 0].tolist()))
        return 0

    monkeypatch.setattr(pate, "_train_teacher", watch)
    groups = np.arange(60) // 6
    pate.train_teachers(
        PrivateDiscriminant(),
        groups[:, None].astype(float), np.zeros(60, int), n_teachers=4, n_classes=9, source=unsafe_seeded(0),
        groups=groups,
    )  # fmt: skip
    assert sorted(group for part in seen for group in part) == list(range(10))
