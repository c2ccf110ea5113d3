import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearveil.mechanisms import Covers, Message
from nearveil.privacy import Guarantee
from nearveil.privacy.noise import Source, unsafe_seeded
from nearveil.search import Retriever, evaluate
from nearveil.search.ceiling import neighbor_ceiling, popular_floor
from nearveil.search.evaluation import Estimate, estimate_mean, true_neighbors
from studies._search import count_popularity
from tests.search.standins import Floats, Plain, RandomCells, clustered, promise

PUBLIC, _ = clustered(1, 80)
GALLERY, LABELS = clustered(2, 400)
QUERIES, QUERY_LABELS = clustered(3, 150)


def cells(epsilon: float, f: float = 0.1, **options: Any) -> Retriever:
    return Retriever(RandomCells(epsilon, f), **options).fit(PUBLIC).index(GALLERY, LABELS)


def test_figures_agree_with_a_plain_count() -> None:
    retriever = cells(2.0)
    found = evaluate(retriever, QUERIES, QUERY_LABELS, k=4, rng=unsafe_seeded(0))
    chosen = retriever.nearest(QUERIES, 4, rng=unsafe_seeded(0))
    a, b = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (QUERIES, GALLERY))
    scores = a @ b.T
    truth = np.argsort(-scores, axis=1)[:, :4]
    recalls = [len(set(t) & set(c)) / 4 for t, c in zip(truth.tolist(), chosen.tolist(), strict=True)]
    hits = [QUERY_LABELS[i] in LABELS[row] for i, row in enumerate(chosen)]
    assert found.nn_recall.value == pytest.approx(np.mean(recalls), abs=1e-9)
    assert found.recall is not None
    assert found.recall.value == pytest.approx(np.mean(hits), abs=1e-9)
    assert found.candidates == 0.1
    assert found.answer_bytes == 22 + 40 * 22
    assert found.share.value == pytest.approx(found.nn_recall.value / found.ceiling.value)
    assert found.covered.value >= found.nn_recall.value - 0.02


def test_ceiling_and_floor_come_from_the_gallery_left_out_one_by_one() -> None:
    found = evaluate(cells(2.0), QUERIES, k=4, rng=unsafe_seeded(0))
    b = GALLERY / np.linalg.norm(GALLERY, axis=1, keepdims=True)
    scores = b @ b.T
    np.fill_diagonal(scores, -2)
    counts = np.bincount(np.argsort(-scores, axis=1)[:, :4].ravel(), minlength=400)
    assert found.ceiling.value == pytest.approx(neighbor_ceiling(2.0, 0.1, counts), abs=1e-9)
    truth = np.argsort(-(QUERIES @ b.T), axis=1)[:, :4]
    top = np.argsort(-counts, kind="stable")[:40]
    assert found.floor.value == pytest.approx(np.isin(truth, top).mean(), abs=1e-9)
    # Chosen on the gallery, measured elsewhere: below what it was chosen for, above an answer at random.
    assert 0.1 < found.floor.value < popular_floor(0.1, counts)


def test_private_answers_stay_below_the_ceiling_and_a_leak_does_not() -> None:
    for epsilon in (0.1, 1.0, 3.0):
        found = evaluate(cells(epsilon, code_bytes=None), QUERIES, k=4, rng=unsafe_seeded(1), repeats=3)
        assert found.nn_recall.low <= found.ceiling.high
    leak = Retriever(Leak(0.1, 0.1), code_bytes=None).fit(PUBLIC).index(GALLERY)
    found = evaluate(leak, QUERIES, k=4, rng=unsafe_seeded(1))
    assert found.nn_recall.low > found.ceiling.high


class Leak(RandomCells):
    """Draws with more than the epsilon that it promises."""

    def _make_guarantee(self) -> Guarantee:
        return promise(self.epsilon / 50)

    def __init__(self, epsilon: float, candidates: float) -> None:
        super().__init__(50 * epsilon, candidates)


def test_no_promise_has_a_ceiling_of_one() -> None:
    retriever = Retriever(Plain(), 0.2, code_bytes=None).fit(PUBLIC).index(GALLERY)
    found = evaluate(retriever, QUERIES, k=4)
    assert found.ceiling.value == 1
    assert found.nn_recall.value > 0.99
    assert found.recall is None
    assert "no labels" in str(found)


def test_ceiling_interval_brackets_the_populations() -> None:
    # The population: items of a large gallery have known, unequal chances to be a neighbour.
    retriever = cells(1.0, 0.2)
    many, _ = clustered(17, 40_000)
    mechanism = retriever.mechanism
    truth = true_neighbors(mechanism.features(many).astype(np.float32), retriever.features, 4)
    population = neighbor_ceiling(1.0, 0.2, np.bincount(truth.ravel(), minlength=400))
    found = evaluate(retriever, QUERIES, k=4, rng=unsafe_seeded(0))
    assert found.ceiling.low < population < found.ceiling.high
    # The queries alone would promise more: 150 of them favour whom they happen to favour.
    own = true_neighbors(mechanism.features(QUERIES).astype(np.float32), retriever.features, 4)
    assert neighbor_ceiling(1.0, 0.2, np.bincount(own.ravel(), minlength=400)) > found.ceiling.value


def test_popularity_counts_every_place_once() -> None:
    rows = np.random.default_rng(0).standard_normal((50, 5)).astype(np.float32)
    counts = count_popularity(rows, 3)
    assert counts.sum() == 150
    assert counts.max() <= 49


@pytest.mark.parametrize("chance", [0.02, 0.3, 0.97])
def test_intervals_cover_as_often_as_they_say(chance: float) -> None:
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(2000):
        found = estimate_mean(generator.binomial(4, chance, 80) / 4, 0.9)
        covered += found.low <= chance <= found.high
    assert 0.88 <= covered / 2000 <= 0.97


def test_intervals_of_agreeing_queries_have_a_width() -> None:
    found = estimate_mean(np.ones(20), 0.95)
    assert found.value == found.high == 1
    assert 0.75 < found.low < 0.9
    assert str(Estimate(0.5, 0.25, 0.75)) == "0.500 (0.250 to 0.750)"


def test_the_table_names_every_figure() -> None:
    text = str(evaluate(cells(2.0), QUERIES, QUERY_LABELS, k=4, rng=unsafe_seeded(0), repeats=2))
    for name in ("NN-recall@4", "ceiling", "floor", "share of ceiling", "Recall@4", "0.100 of the gallery", "bytes"):
        assert name in text
    assert "150 x 2, intervals of 95%" in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"confidence": 1.0}, "confidence must be"),
        ({"confidence": math.nan}, "confidence must be"),
        ({"repeats": 0}, "repeats must be"),
        ({"repeats": 1.5}, "repeats must be"),
        ({"k": 41}, "k must be a whole number from 1 to 40"),
        ({"k": 400}, "k must be"),
        ({"query_labels": [1, 2]}, "query_labels must hold"),
    ],
)
def test_absurd_input(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        evaluate(cells(1.0), QUERIES, **options)


def test_labels_of_queries_need_those_of_the_gallery() -> None:
    retriever = Retriever(Plain(), 0.2).fit(PUBLIC).index(GALLERY)
    with pytest.raises(ValueError, match="gallery_y"):
        evaluate(retriever, QUERIES, QUERY_LABELS)


def test_duplicates_are_as_good_as_each_other() -> None:
    few = GALLERY[:20]
    retriever = Retriever(Plain(), 1.0, code_bytes=None).fit(PUBLIC).index(np.repeat(few, 20, axis=0))
    found = evaluate(retriever, QUERIES, rng=unsafe_seeded(0))
    assert found.nn_recall.value == found.covered.value == 1.0


@pytest.mark.parametrize("epsilon", [1.0, 2.0])
def test_covers_stay_below_the_ceiling_of_a_gallery_of_copies(epsilon: float) -> None:
    """They reached 1.3 times the ceiling when copies counted for what is found and not for popularity."""
    generator = np.random.default_rng(0)
    points, gallery = (rows := generator.standard_normal((100, 16))), np.tile(rows, (20, 1))
    retriever = Retriever(Covers(epsilon, 0.1), code_bytes=None).fit(generator.standard_normal((200, 16)))
    retriever.index(gallery)
    strangers = 0.3 + generator.standard_normal((400, 16))  # their favourites are not the gallery's
    for queries in (np.repeat(points, 2, axis=0), strangers):
        found = evaluate(retriever, queries, rng=unsafe_seeded(1), repeats=10)
        assert 0.6 < found.share.value < 1
        assert found.floor.value < found.ceiling.value
    # An answer of 200 items has room for all that these want, and they show it.
    assert evaluate(retriever, np.repeat(points[:25], 4, axis=0), rng=unsafe_seeded(1)).ceiling.value > 0.99


class Named(RandomCells):
    """Always names one cell: what it finds is no matter of luck."""

    def __init__(self, epsilon: float, candidates: float, cell: int) -> None:
        super().__init__(epsilon, candidates)
        self.cell = cell

    def _release(self, features: Floats, source: Source) -> list[Message]:
        return self._messages(source, cell=np.full(len(features), self.cell, np.int32))


def expected_recall(epsilon: float, fraction: float, gallery: Floats, queries: Floats, k: int) -> float:
    """Return what random cells find on average: all that they may name, weighted by its probability."""
    total = 0.0
    for cell in range(round(1 / fraction)):
        retriever = Retriever(Named(epsilon, fraction, cell), code_bytes=None).fit(MIDDLE[:, : gallery.shape[1]])
        mechanism: Any = retriever.index(gallery).mechanism
        own = (mechanism.features(queries) @ mechanism.centres_.T).argmax(axis=1)
        keep = np.exp(epsilon) / (np.exp(epsilon) + len(mechanism.centres_) - 1)
        for right in np.unique(own):
            found = evaluate(retriever, queries[own == right], k=k).nn_recall.value * (own == right).mean()
            total += found * (keep if right == cell else (1 - keep) / (len(mechanism.centres_) - 1))
    return total


MIDDLE = np.full((2, 9), 0.3)
TIES: dict[str, Any] = {
    "lattice": np.copy,
    "copies": lambda rows: np.tile(rows, (4, 1)),
    "columns": lambda rows: np.column_stack([rows, np.ones(len(rows)), np.zeros(len(rows))]),
}


@pytest.mark.parametrize("tie", TIES)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.integers(0, 10**6),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from([0.01, 0.5, 2.0]),
    st.lists(st.integers(0, 23), min_size=1, max_size=8),
)
def test_ties_raise_nobody_above_the_ceiling(
    tie: str, seed: int, width: int, k: int, epsilon: float, asked: list[int]
) -> None:
    """Whole numbers, one-dimensional ones too, in which ties abound; exactly, whoever asks."""
    drawn = np.random.default_rng(seed).integers(-2, 3, (24, width)).astype(np.float64)
    gallery, queries = TIES[tie](drawn[:12]), TIES[tie](drawn)[asked]
    retriever = Retriever(RandomCells(epsilon, 1 / 3), code_bytes=None).fit(MIDDLE[:, : gallery.shape[1]])
    found = evaluate(retriever.index(gallery), queries, k=k, rng=unsafe_seeded(0))
    assert expected_recall(epsilon, 1 / 3, gallery, queries, k) <= found.ceiling.high + 1e-9
    assert found.floor.value <= found.ceiling.high + 1e-9
