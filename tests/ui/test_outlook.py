"""What the page says of a map before a question: compared with what is found when it is asked."""

import math
from dataclasses import replace

import numpy as np
import pytest

from nearveil import Client
from nearveil.features.extractor import unit_rows
from nearveil.gallery import Index, Item
from nearveil.mechanisms import Covers, PublicMap
from nearveil.mechanisms.covers.covers import RandomizedResponse
from nearveil.search.ceiling import popular_floor
from nearveil.search.evaluation import count_popularity, true_neighbors
from nearveil.search.outlook import Outlook, make_outlook, unit_prototypes
from nearveil.ui._views import Candidate, Picture, Trouble, place_codes
from nearveil.wire.client import K, PublicPart, find_share, project_rows
from tests.search.standins import clustered

COUNT, DIMENSION = 500, 16
EPSILONS = (0.5, 2.0, 4.0, 8.0)


@pytest.fixture(scope="module")
def rows() -> np.ndarray:
    return unit_rows(clustered(3, COUNT + 400, DIMENSION)[0])[0]


@pytest.fixture(scope="module")
def public(rows: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> PublicPart:
    place = tmp_path_factory.mktemp("outlook") / "index"
    with Index.create(place, dimension=DIMENSION, extractor="toy") as index:
        index.add(Item(row, f"item {n}") for n, row in enumerate(rows[:COUNT]))
        index.publish(3.0, 0.1, n_sets=9)
    with Client(place) as client:
        return client.map()


def measured(public: PublicPart, rows: np.ndarray, epsilon: float) -> float:
    """Return the mean share of the true neighbours of new rows among the candidates: with all coins counted."""
    release = Covers(epsilon, public.candidates).fit_mean(public.mean, public.public_digest).use_map(public.map)
    gallery, queries = (release.features(some).astype(np.float32) for some in (rows[:COUNT], rows[COUNT:]))
    truth = true_neighbors(queries, gallery, K)
    # Prototypes are the items in an order of their own; each item's own nearest prototype is itself.
    places = public.map.nearest(project_rows(public, rows[:COUNT]).astype(np.float64), 1)[:, 0]
    covered = (public.map.coverage[places] > 127).astype(float)[truth].mean(axis=1)
    good = public.map.choose(queries.astype(np.float64))
    hit = RandomizedResponse(epsilon, public.map.n_sets).hit
    right = covered[np.arange(len(good)), good]
    other = (covered.sum(axis=1) - right) / (public.map.n_sets - 1)
    return float((hit * right + (1 - hit) * other).mean())


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_what_is_expected_is_found(public: PublicPart, rows: np.ndarray, epsilon: float) -> None:
    found = make_outlook(public)
    assert found.whole
    assert found.expected(epsilon) == pytest.approx(measured(public, rows, epsilon), abs=0.04)
    assert found.expected(epsilon) <= found.ceiling(epsilon) + 1e-9


def test_no_point_is_a_neighbour_of_its_own(public: PublicPart) -> None:
    found = make_outlook(public)
    assert found.popularity is not None
    by_hand = count_popularity(unit_prototypes(public.map), K)
    assert np.abs(found.popularity - by_hand).sum() <= 0.005 * K * COUNT  # where the rule's whole numbers are equal


def test_floor_ceiling_and_line_are_in_order(public: PublicPart) -> None:
    found = make_outlook(public)
    assert found.popularity is not None
    assert found.popularity.sum() == K * COUNT
    assert found.floor == popular_floor(0.1, found.popularity) > 0.1
    ceilings = [found.ceiling(epsilon) for epsilon in EPSILONS]
    assert ceilings == sorted(ceilings)
    assert found.ceiling(1e-6) == pytest.approx(found.floor, abs=1e-4)
    assert found.right > found.other


def test_a_map_of_centroids_has_a_reference_line(public: PublicPart) -> None:
    large = replace(public, map=_thinned(public.map, 100_000))
    found = make_outlook(large)
    assert (found.whole, found.popularity, found.floor) == (False, None, 0.1)
    assert found.ceiling(2.0) == pytest.approx(0.1 * math.e**2 / (0.1 * math.e**2 + 0.9))
    assert found.expected(8.0) == pytest.approx(make_outlook(public).expected(8.0), abs=0.35)


def _thinned(held: PublicMap, n_items: int) -> PublicMap:
    return PublicMap(held.components, held.prototypes[::2], held.coverage[::2], n_items, n_items // 10)


def test_the_line_by_hand() -> None:
    found = Outlook(5, 0.9, 0.1, True, 0.2, 1.0, np.ones(10, dtype=np.int64))
    hit = math.e**2 / (math.e**2 + 4)
    assert found.expected(2.0) == pytest.approx(0.9 * hit + 0.1 * (1 - hit))


def test_the_share_around_a_row_is_that_of_its_neighbours(public: PublicPart, rows: np.ndarray) -> None:
    good = int(public.map.choose(unit_rows(rows[COUNT:] - public.mean)[0].astype(np.float64))[0])
    shares = [find_share(public, rows[COUNT], number) for number in range(public.map.n_sets)]
    assert all((8 * one) == pytest.approx(round(8 * one)) for one in shares)
    assert shares[good] >= max(shares) - 0.25


def test_the_picture_has_neighbours_side_by_side(public: PublicPart, rows: np.ndarray) -> None:
    picture = Picture(public)
    assert picture.points.shape == (COUNT, 2)
    assert picture.points.min() == 0
    assert picture.points.max() == 1
    placed_rows = picture.place(project_rows(public, rows[:COUNT]))
    near = true_neighbors(rows[:COUNT].astype(np.float32), rows[:COUNT].astype(np.float32), K, leave_out=True)
    to_near = np.linalg.norm(placed_rows[:, None] - placed_rows[near], axis=2).mean()
    to_all = np.linalg.norm(placed_rows[:, None] - placed_rows[None], axis=2).mean()
    assert to_near < 0.4 * to_all


def test_what_is_drawn_of_answers(public: PublicPart, rows: np.ndarray) -> None:
    picture = Picture(public)
    codes = public.table.encode(unit_rows(rows[:3] - public.mean)[0])
    where = place_codes(public, codes)
    assert np.abs(where - project_rows(public, rows[:3])).max() < 0.05
    seen = {7: Candidate("seven", b"", where[0], frozenset({1})), 9: Candidate("nine", b"", where[1], frozenset({2}))}
    told = picture.draw(seen, rows[0], 1, lambda image: f"<{len(image)}>")
    assert [(one["id"], one["named"], one["image"]) for one in told["seen"]] == [(7, True, "<0>"), (9, False, "<0>")]
    assert told["you"] == pytest.approx(told["seen"][0]["place"], abs=0.05)  # the query is that item
    inside = np.array([[x, y] for x, y, within in told["points"] if within])
    assert len(inside) == (public.map.coverage[:, 1] > 127).sum()
    assert told["reported"] == pytest.approx(inside.mean(axis=0), abs=1e-3)
    nothing = picture.draw({}, None, None, str)
    assert (nothing["you"], nothing["reported"], nothing["seen"]) == (None, None, [])


def test_strange_maps_are_drawn_or_refused(public: PublicPart) -> None:
    held = public.map
    alike = np.repeat(held.prototypes[:1], 40, axis=0)
    one = PublicMap(held.components, alike, np.zeros((40, 4), np.uint8), held.n_items, held.set_size)
    with pytest.raises(Trouble, match="in one place"):
        Picture(replace(public, map=one))
    none = PublicMap(held.components, held.prototypes, 0 * held.coverage, held.n_items, held.set_size)
    picture = Picture(replace(public, map=none))
    assert np.isfinite(picture.points).all()
    assert picture.draw({}, None, 1, str)["reported"] is None
    for empty in (np.zeros((40, held.prototypes.shape[1]), np.int8), held.prototypes[:2]):
        few = PublicMap(held.components, empty, np.ones((len(empty), 4), np.uint8), held.n_items, held.set_size)
        with pytest.raises(Trouble, match="too few points"):
            Picture(replace(public, map=few))
        assert 0 <= make_outlook(replace(public, map=few)).expected(1.0) <= 1
