"""One truth for what is found and for the ceiling, on galleries with copies and ties."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from nearveil.search.ceiling import neighbor_ceiling, popular_floor
from nearveil.search.evaluation import Copies, true_neighbors
from studies._search import count_popularity
from tests.search.test_ceiling import best_of_all_channels

Singles = NDArray[np.float32]


def whole_rows(rows: list[tuple[int, ...]]) -> Singles:
    return np.array(rows, dtype=np.float32)


def rows_of(width: int, least: int, most: int) -> st.SearchStrategy[Singles]:
    """Draw rows of small whole numbers: their products are exact, and copies and ties are many."""
    row = st.tuples(*[st.integers(-1, 2)] * width)
    return st.lists(row, min_size=least, max_size=most).map(whole_rows)


GALLERIES = st.integers(1, 3).flatmap(lambda width: st.tuples(rows_of(width, 4, 12), rows_of(width, 1, 6)))


def by_hand(query: Singles, gallery: Singles, k: int, own: int | None = None) -> Counter[tuple[float, ...]]:
    """Return how many of the k nearest lie at which point; of points at one distance the first in the gallery."""
    points = [tuple(row.tolist()) for row in gallery]
    items = [place for place in range(len(points)) if place != own]
    items.sort(key=lambda place: (-float(gallery[place] @ query), points.index(points[place])))
    return Counter(points[place] for place in items[:k])


@settings(max_examples=150, deadline=None, derandomize=True)
@given(GALLERIES, st.integers(1, 3))
def test_every_query_has_k_true_neighbours_that_a_plain_sort_finds(drawn: tuple[Singles, Singles], k: int) -> None:
    gallery, queries = drawn
    for rows, leave_out in ((queries, False), (gallery, True)):
        truth = true_neighbors(rows, gallery, k, leave_out=leave_out)
        for place, found in enumerate(truth):
            own = place if leave_out else None
            assert len(set(found.tolist())) == k
            assert Counter(map(tuple, gallery[found].tolist())) == by_hand(rows[place], gallery, k, own)
    assert count_popularity(gallery, k).sum() == len(gallery) * k


@settings(max_examples=100, deadline=None, derandomize=True)
@given(GALLERIES, st.integers(1, 3), st.randoms(use_true_random=False))
def test_recall_counts_copies_as_each_other(drawn: tuple[Singles, Singles], k: int, random: object) -> None:
    gallery, queries = drawn
    truth, copies = true_neighbors(queries, gallery, k), Copies(gallery)
    answers = np.array([random.sample(range(len(gallery)), 4) for _ in queries])  # type: ignore[attr-defined]
    points = [tuple(row.tolist()) for row in gallery]
    for answer, wanted, found in zip(answers, truth, copies.recall(truth, answers), strict=True):
        both = Counter(points[item] for item in answer) & Counter(points[item] for item in wanted)
        assert found == pytest.approx(both.total() / k)
        assert copies.recall(wanted[None], answer)[0] == found
        held = copies.canonical(answer)
        assert Counter(points[item] for item in held) == Counter(points[item] for item in answer)
        assert len(set(held.tolist())) == 4


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.integers(1, 2).flatmap(lambda width: st.tuples(rows_of(width, 4, 6), rows_of(width, 2, 4))),
    st.integers(1, 2),
    st.integers(1, 3),
    st.sampled_from([0.1, 1.0, 3.0]),
)
def test_no_channel_at_all_is_above_the_ceiling(
    drawn: tuple[Singles, Singles], k: int, count: int, epsilon: float
) -> None:
    """Theorem D with copies (docs/theory/ceiling.md), against a linear programme over all private channels."""
    gallery, queries = drawn
    truth, copies = true_neighbors(queries, gallery, k), Copies(gallery)
    answers = [np.array(answer) for answer in itertools.combinations(range(len(gallery)), count)]
    utility = np.stack([copies.recall(truth, answer) for answer in answers], axis=1)
    counts = np.bincount(truth.ravel(), minlength=len(gallery))
    best = best_of_all_channels(np.full(len(queries), 1 / len(queries)), utility, epsilon)
    ceiling = neighbor_ceiling(epsilon, count / len(gallery), counts)
    assert best <= ceiling + 1e-8
    # The floor is one of these channels: the same answer for everybody.
    floor = popular_floor(count / len(gallery), counts)
    assert floor == pytest.approx(utility.mean(axis=0).max(), abs=1e-12)
    assert floor <= ceiling + 1e-12


def test_equal_rows_are_equal_whatever_their_zeros() -> None:
    copies = Copies(np.array([[0.0, 1.0], [-0.0, 1.0], [1.0, 0.0]], dtype=np.float32))
    assert copies.point.tolist() == [0, 0, 1]
    assert copies.first.tolist() == [0, 2]


def test_a_gallery_of_one_point() -> None:
    gallery = np.ones((6, 3), dtype=np.float32)
    assert true_neighbors(gallery, gallery, 5, leave_out=True).tolist() == [[0, 1, 2, 3, 4]] * 6
    assert Copies(gallery).recall(np.array([[0, 1]]), np.array([4, 5])).tolist() == [1.0]
