"""What the page says of a map before a question: compared with what is found when it is asked."""

import math
from dataclasses import replace

import numpy as np
import pytest
from sklearn.preprocessing import normalize

from nearveil import Client
from nearveil.features.extractor import unit_rows
from nearveil.gallery import Index, Item
from nearveil.mechanisms import Covers, PublicMap
from nearveil.mechanisms.covers.channels import RandomizedResponse
from nearveil.search.ceiling import popular_floor
from nearveil.search.evaluation import true_neighbors
from nearveil.search.outlook import Outlook, make_outlook
from nearveil.wire.client import K, encode_queries, find_share, project_rows
from nearveil.wire.messages import PublicPart
from studies._search import count_popularity
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
        index.publish(3.0, 0.1, n_sets=9, reach=0.0)
    with Client(place) as client:
        return client.map()


def measured(public: PublicPart, rows: np.ndarray, epsilon: float) -> float:
    """Return the mean share of the true neighbours of new rows among the candidates: with all coins counted."""
    release = Covers(epsilon, public.candidates).fit_space(public.space, public.public_digest).use_map(public.map)
    gallery, queries = (release.features(some).astype(np.float32) for some in (rows[:COUNT], rows[COUNT:]))
    truth = true_neighbors(queries, gallery, K)
    # Prototypes are the items in an order of their own; each item's own nearest prototype is itself.
    places = public.map.nearest(
        project_rows(public, encode_queries(public, rows[:COUNT]).directions).astype(np.float64), 1
    )[:, 0]
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
    by_hand = count_popularity(normalize(public.map.prototypes.astype(np.float32)), K)
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
    directions = encode_queries(public, rows[COUNT]).directions
    good = int(public.map.choose(directions)[0])
    shares = [find_share(public, directions, number) for number in range(public.map.n_sets)]
    assert all((8 * one) == pytest.approx(round(8 * one)) for one in shares)
    assert shares[good] >= max(shares) - 0.25


@pytest.mark.parametrize("empty", [True, False])
def test_strange_maps_have_an_outlook(public: PublicPart, empty: bool) -> None:
    full = public.map
    prototypes = np.zeros((40, full.prototypes.shape[1]), np.int8) if empty else full.prototypes[:2]
    coverage = np.ones((len(prototypes), 4), np.uint8)
    sparse = PublicMap(full.components, prototypes, coverage, full.n_items, full.set_size)
    assert 0 <= make_outlook(replace(public, map=sparse)).expected(1.0) <= 1
