from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from sklearn.exceptions import NotFittedError

from nearveil.mechanisms import Message, Release
from nearveil.mechanisms.covers.maps import MapError
from nearveil.privacy.noise import unsafe_seeded
from studies.baselines.cells import Cells, assign_balanced
from tests.mechanisms.conformance import Contract, Floats


class MappedContract(Contract):
    """For mechanisms whose messages name sets: the likelihood ratio takes few values, and the attack sees them."""

    samples = 20_000
    power = 0.8

    def prepared(self, epsilon: float = 1.0) -> Release:
        return super().prepared(epsilon).index(self.gallery())  # type: ignore[no-any-return]

    def pairs(self, release: Release) -> list[tuple[Floats, Floats]]:
        """Return a pair of items that lie on the two sides of a border between good sets."""
        items = self.gallery()
        good = release.map_.choose(release.features(items))
        other = int(np.flatnonzero(good != good[0])[0])
        return [(items[0], items[other]), (release.mean_ + items[0], release.mean_ - items[0])]

    def statistic(self, release: Release, messages: list[Message], x: Floats, other: Floats) -> Floats:
        ratios = release.log_density(messages, np.stack([x, other]))
        return np.asarray(ratios[:, 0] - ratios[:, 1])


class TestKmeans(MappedContract):
    def make(self, epsilon: float) -> Release:
        return Cells(epsilon, 0.25)


class TestBalanced(MappedContract):
    def make(self, epsilon: float) -> Release:
        return Cells(epsilon, 0.25, kind="balanced", n_cells=6)


class TestSubset(MappedContract):
    def make(self, epsilon: float) -> Release:
        return Cells(epsilon, 0.25, response="subset")


@pytest.fixture
def rows() -> Floats:
    return np.random.default_rng(0).standard_normal((403, 5))


@pytest.mark.parametrize("parameters", [{}, {"kind": "balanced"}, {"response": "subset"}, {"n_cells": 31}])
def test_no_answer_holds_more_than_the_fraction(rows: Floats, parameters: dict[str, Any]) -> None:
    cells = Cells(1.0, 0.1, **parameters).fit(rows).index(rows)
    sizes = [int(cells.rank(message, rows).sum()) for message in cells.release(rows[:200], rng=unsafe_seeded(0))]
    assert max(sizes) <= 40
    if not parameters:
        assert set(sizes) == {40}


def test_kmeans_sets_are_the_items_nearest_to_a_centroid(rows: Floats) -> None:
    cells = Cells(1.0, 0.1).fit(rows).index(rows)
    features = cells.features(rows)
    for number in range(cells.map_.n_sets):
        inside = cells.members_[[number]].toarray()[0] > 0
        centre = features[inside].mean(axis=0)
        assert (
            np.linalg.norm(features[inside] - centre, axis=1).mean()
            < np.linalg.norm(features[~inside] - centre, axis=1).mean()
        )


def test_the_good_cell_is_that_of_the_nearest_centroid(rows: Floats) -> None:
    cells = Cells(9.0, 0.2, kind="balanced").fit(rows).index(rows)
    named = [int(message["sets"][0]) for message in cells.release(rows, rng=unsafe_seeded(1))]
    own = np.asarray(cells.members_.toarray().argmax(axis=0))
    assert np.mean(named == own) > 0.8  # balance moves some items to the next cell


@given(st.integers(1, 40), st.integers(2, 8), st.integers(0, 2**32))
def test_balanced_cells_have_one_size_and_stay_near(n: int, count: int, seed: int) -> None:
    distances = np.random.default_rng(seed).random((n, count)).astype(np.float32)
    cells = assign_balanced(distances)
    sizes = np.bincount(cells, minlength=count)
    assert sizes.sum() == n
    assert sizes.max() <= -(-n // count)
    reached = float(distances[np.arange(n), cells].sum())
    assert reached <= distances.mean() * n + 1e-4 or reached <= _best(distances, sizes) + 0.35 * n


def _best(distances: NDArray[np.float32], sizes: NDArray[np.int64]) -> float:
    seats = np.repeat(distances, sizes, axis=1)
    return float(seats[linear_sum_assignment(seats)].sum())


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"kind": "round"}, "kind must"),
        ({"response": "loud"}, "response must"),
        ({"n_cells": 1}, "n_cells must"),
        ({"n_cells": 3, "kind": "balanced"}, "n_cells must"),
        ({"candidates": 0.0}, "candidates must"),
        ({"candidates": 1.5}, "candidates must"),
        ({"candidates": "a"}, "candidates must"),
        ({"candidates": 0.0001}, "at least 1/403"),
    ],
)
def test_bad_parameters(rows: Floats, parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Cells(1.0, **{"candidates": 0.1, **parameters}).fit(rows).index(rows)


def test_maps_and_galleries_that_do_not_belong_together(rows: Floats) -> None:
    other = Cells(8.0, 0.1).fit(rows).index(rows[:200])
    server = Cells(8.0, 0.1).fit(rows).index(rows)
    message = server.release(rows[0])
    with pytest.raises(ValueError, match="the indexed one"):
        server.rank(message, rows[::-1])
    with pytest.raises(NotFittedError, match="index"):
        server.use_map(server.map_).rank(message, rows)
    with pytest.raises(MapError, match="the candidates of this release"):
        Cells(8.0, 0.5).fit(rows).use_map(other.map_)
    refitted = Cells(8.0, 0.1).fit(rows).index(rows).fit(rows + 5)
    with pytest.raises(NotFittedError, match="needs a map"):
        refitted.release(rows[0])


def test_a_whole_gallery_needs_no_cells(rows: Floats) -> None:
    with pytest.raises(ValueError, match="less than the whole gallery"):
        Cells(4.0, 1.0).fit(rows).index(rows)


def test_many_dimensions_and_few_items_take_no_time() -> None:
    """A square of 4,000 dimensions would be factorised otherwise, for a minute."""
    wide = np.random.default_rng(0).standard_normal((60, 4000))
    assert Cells(4.0, 0.2).fit(wide).index(wide).map_.components.shape == (4000, 60)
