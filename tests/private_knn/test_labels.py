"""Votes on many labels: a label that most neighbours have is found, however many labels a record has."""

import itertools
import math
from typing import Any

import numpy as np
import pytest

from nearveil.privacy.noise import unsafe_seeded
from nearveil.private_knn import PrivateKNeighborsClassifier
from nearveil.private_knn.records import make_label_votes

N_LABELS = 14
N_RECORDS = 200
CLIPS = (1.0, 2.0, 3.0, 4.0)
KINDS = ("binary", "nonnegative")


def make_voter(kind: Any, clip: float, **options: Any) -> PrivateKNeighborsClassifier:
    return PrivateKNeighborsClassifier(
        votes=kind,
        clip=clip,
        **{"n_neighbors": N_RECORDS, "vote_noise": 0.5, "max_answered": 50, "source": unsafe_seeded(0), **options},
    )


def make_rows() -> Any:
    return np.random.default_rng(0).normal(size=(N_RECORDS, 3))


def ask(kind: Any, clip: float, labels: Any, **options: Any) -> Any:
    """Let all records vote on ten queries, and return how often each label is given."""
    return make_voter(kind, clip, **options).fit(make_rows(), labels).predict(make_rows()[:10]).mean(axis=0)


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("kind", KINDS)
def test_unanimous_labels_are_found_whatever_their_number(kind: Any, clip: float) -> None:
    for n_labels in range(1, 13):
        labels = np.zeros((N_RECORDS, N_LABELS))
        labels[:, :n_labels] = 1
        shares = ask(kind, clip, labels)
        assert shares[:n_labels].min() == 1, n_labels
        assert shares[n_labels:].max() == 0, n_labels


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("kind", KINDS)
def test_labels_of_most_records_are_found_and_those_of_few_are_not(kind: Any, clip: float) -> None:
    """Seven of ten records have one label, three of ten another; `n_labels` more are shared by all."""
    for n_labels in range(12):
        labels = np.zeros((N_RECORDS, N_LABELS))
        labels[:, :n_labels] = 1
        share = np.arange(N_RECORDS) % 10
        labels[share < 7, 12] = 1
        labels[share >= 7, 13] = 1
        shares = ask(kind, clip, labels)
        assert shares[:n_labels].min(initial=1) == 1, n_labels
        assert shares[12] == 1, n_labels
        assert shares[13] == 0, n_labels


@pytest.mark.parametrize("kind", KINDS)
def test_records_with_different_numbers_of_labels_share_a_threshold(kind: Any) -> None:
    """Record i has the first 1 to 12 labels: all have the first, and with their weights none has the last."""
    counts = 1 + np.arange(N_RECORDS) % 12
    labels = (np.arange(N_LABELS) < counts[:, None]).astype(float)
    weights = np.minimum(1, 2 / counts)
    expected = (labels * weights[:, None]).sum(axis=0) > weights.sum() / 2
    np.testing.assert_array_equal(ask(kind, 2.0, labels), expected)
    assert expected[0]
    assert not expected[11]


@pytest.mark.parametrize("kind", KINDS)
def test_missing_neighbours_do_not_raise_the_threshold(kind: Any) -> None:
    labels = np.tile([1.0, 0.0], (N_RECORDS, 1))
    assert ask(kind, 1.0, labels, n_neighbors=10 * N_RECORDS).tolist() == [1, 0]


@pytest.mark.parametrize("clip", [0.5, 1.0, 1.5, 2.0, 3.0, 4.0])
def test_no_swap_of_binary_records_moves_the_sums_further(clip: float) -> None:
    """All numbers of labels, with and without common ones, against the bound: it holds and is attained."""
    n_labels = 400
    counts = [*range(14), 37, n_labels // 2]
    rows = np.zeros((2 * len(counts), n_labels))
    for i, count in enumerate(counts):
        rows[2 * i, :count] = 1
        rows[2 * i + 1, n_labels - count :] = 1
    check_sensitivity(rows, clip, "binary", attained=0.999 if clip in (0.5, 1, 2, 3, 4) else 0.8)


@pytest.mark.parametrize("clip", [0.5, 1.0, 2.5, 4.0])
def test_no_swap_of_nonnegative_records_moves_the_sums_further(clip: float) -> None:
    rng = np.random.default_rng(0)
    sizes = 10.0 ** rng.uniform(-2, 5, (60, 1))
    spread = sizes * rng.dirichlet(np.full(8, 0.3), 60)
    single = 10.0 ** rng.uniform(-1, 5, 40)[:, None] * np.eye(8)[rng.integers(0, 8, 40)]
    corners = np.vstack([np.zeros(8), clip * np.eye(8), 1e6 * np.eye(8), clip / 2 * (np.eye(8) + np.eye(8)[::-1])])
    check_sensitivity(np.vstack([spread, single, corners]), clip, "nonnegative", attained=0.999)


def check_sensitivity(rows: Any, clip: float, kind: Any, *, attained: float) -> None:
    """Compare the largest change, one record in, perhaps one out, with what is charged."""
    _, votes, ballot = make_label_votes(rows, None, clip, kind)
    assert ballot.size == rows.shape[1] + 1
    units = votes.units * ballot.unit  # the last row is nobody's
    squares = (units**2).sum(axis=1)
    changes = squares[:, None] + squares - 2 * units @ units.T
    bound = ballot.event(1.0).sensitivity ** 2
    assert changes.max() <= bound * (1 + 1e-9)
    assert changes.max() >= attained * bound


@pytest.mark.parametrize("kind", KINDS)
def test_the_weight_alone_attains_the_sensitivity(kind: Any) -> None:
    """A record of weight 1 enters, and one of hardly any weight leaves: a larger scale would pass the bound."""
    short, long = np.zeros((2, 20_000))
    short[:4], long[:] = 1, 1 if kind == "binary" else 1e6
    if kind == "nonnegative":
        short[:4] = [4, 0, 0, 0]
    _, votes, ballot = make_label_votes(np.stack([short, long]), None, 4.0, kind)
    change = (votes.units[0] - votes.units[1]) * ballot.unit
    assert float(change @ change) == pytest.approx(ballot.event(1.0).sensitivity ** 2, rel=2e-3)
    assert change[-1] == pytest.approx(math.sqrt(4) if kind == "binary" else 4, rel=1e-3)


def test_votes_follow_the_rounded_weight() -> None:
    """The proof needs one weight for votes and released weight, also after rounding."""
    for kind, clip, count in itertools.product(KINDS, (1.0, 1.7, 3.0), range(1, 30)):
        _, votes, ballot = make_label_votes(np.ones((1, count)), None, clip, kind)  # type: ignore[arg-type]
        assert votes.weight_scale is not None
        weight = votes.units[0, -1] * ballot.unit / votes.weight_scale
        assert votes.units[0, :-1].max() * ballot.unit <= weight * (1 + 1e-15)
        assert 0 <= min(1, clip / count, clip**2 / count if kind == "nonnegative" else 1) - weight < 4e-6


def test_declined_queries_have_no_weight() -> None:
    voter = make_voter("binary", 1.0, max_answered=1, abstain_label=7).fit(make_rows(), np.ones((N_RECORDS, 2)))
    answers = voter.answer(make_rows()[:2])
    assert answers.labels.tolist() == [[1, 1], [7, 7]]
    assert answers.weight is not None
    assert answers.weight[0] == pytest.approx(N_RECORDS / 2, abs=9)
    assert np.isnan(answers.weight[1])


def test_signed_votes_have_no_weight() -> None:
    voter = make_voter("signed", 1.0).fit(make_rows(), np.tile([1.0, -1.0], (N_RECORDS, 1)))
    answers = voter.answer(make_rows()[:1])
    assert answers.weight is None
    assert answers.labels.tolist() == [[1, 0]]


@pytest.mark.parametrize("clip", [1e-4, 2e6])
def test_a_clip_that_units_cannot_hold_is_refused(clip: float) -> None:
    with pytest.raises(ValueError, match=r"clip must be from 0\.001 to a million"):
        make_label_votes(np.ones((1, 2)), None, clip, "binary")
