import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from numpy.typing import NDArray
from scipy.sparse import csr_array
from sklearn.datasets import load_digits
from sklearn.exceptions import NotFittedError

from nearveil.cluster import SpreadRows
from nearveil.mechanisms import Covers, Message, MessageError, PublicMap, Release, default
from nearveil.mechanisms.covers import learning
from nearveil.mechanisms.covers.channels import set_guarantee
from nearveil.mechanisms.covers.maps import MapError, usual_number
from nearveil.mechanisms.covers.members import find_near, find_prototypes_of, fit_coverage, measure_around
from nearveil.metrics import METRICS, Metric, ScoreSpace
from nearveil.privacy.accounting import make_loss_curves
from nearveil.privacy.events import NamedSets, PureDp
from nearveil.privacy.noise import unsafe_seeded
from studies.baselines import Cells
from tests.mechanisms.conformance import Floats
from tests.mechanisms.test_cells import MappedContract
from tests.metrics import make_vectors


class TestCovers(MappedContract):
    def make(self, epsilon: float) -> Release:
        return Covers(epsilon, 0.25, n_sets=4)


@pytest.fixture(scope="module")
def digits() -> tuple[Floats, Floats, Floats]:
    X = load_digits().data
    return X[:300], X[300:1500], X[1500:]


def _recall(release: Release, gallery: Floats, queries: Floats) -> float:
    """Return the expected NN-recall@8 over the channel, for queries that no map has seen."""
    items, rows = release.features(gallery), release.features(queries)
    top = np.argsort(-rows @ items.T, axis=1)[:, :8]
    coverage = release.members_.toarray()[:, top].mean(axis=2).T
    good = release.map_.choose(rows)
    hit, n_sets = release._channel.hit, release.map_.n_sets
    own = coverage[np.arange(len(rows)), good]
    return float(np.mean(hit * own + (1 - hit) / (n_sets - 1) * (coverage.sum(axis=1) - own)))


@pytest.mark.parametrize("epsilon", [1.0, 4.0])
def test_covers_beat_cells_on_queries_that_no_map_has_seen(
    digits: tuple[Floats, Floats, Floats], epsilon: float
) -> None:
    public, gallery, queries = digits
    learned = Covers(epsilon, 0.1).fit(public).index(gallery)
    plain = Cells(epsilon, 0.1).fit(public).index(gallery)
    assert _recall(learned, gallery, queries) > 1.02 * _recall(plain, gallery, queries)


def test_sampled_answers_agree_with_the_expectation(digits: tuple[Floats, Floats, Floats]) -> None:
    public, gallery, queries = digits
    covers = Covers(2.0, 0.1, n_sets=6).fit(public).index(gallery)
    items, rows = covers.features(gallery), covers.features(queries)
    top = np.argsort(-rows @ items.T, axis=1)[:, :8]
    found = [
        covers.rank(message, gallery)[near].mean()
        for message, near in zip(covers.release(queries, rng=unsafe_seeded(4)), top, strict=True)
    ]
    assert np.mean(found) == pytest.approx(_recall(covers, gallery, queries), abs=4 * np.std(found) / len(found) ** 0.5)


def _clusters(n: int, seed: int, count: int = 40, dimension: int = 8) -> NDArray[np.float32]:
    generator = np.random.default_rng(seed)
    rows = generator.standard_normal((count, dimension))[generator.integers(0, count, n)]
    rows += generator.standard_normal(rows.shape)
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True), dtype=np.float32)


def space_of(features: NDArray[np.float32]) -> ScoreSpace:
    return ScoreSpace("cosine", np.zeros(features.shape[1]))


def _lists(features: NDArray[np.float32], ranks: int = learning.RANKS) -> learning.Lists:
    return learning.neighbor_lists(SpreadRows.cut(features), space_of(features), np.arange(len(features)), ranks)


def _named(coverage: Floats, epsilon: float, softness: float) -> Floats:
    """Return how often each set is named for each query, all of it dense."""
    good = np.exp(softness * (coverage - coverage.max(axis=1, keepdims=True)))
    good /= good.sum(axis=1, keepdims=True)
    return np.asarray((1 + np.expm1(epsilon) * good) / (np.exp(epsilon) + coverage.shape[1] - 1))


def test_neither_step_lowers_the_recall() -> None:
    features = np.random.default_rng(1).standard_normal((300, 4)).astype(np.float32)
    wanted, plan = learning.Demand.of(_lists(features), 300).training, learning.Plan(5, 40, 2.0)
    start = np.random.default_rng(2).integers(0, 5, 300)
    sets = learning.fill_sets(wanted, learning.Shares.assign(start, 5), plan)
    last = 0.0
    for _ in range(8):
        coverage = learning.measure_coverage(wanted, sets)
        shares = learning.Shares.of(coverage, 1e5)
        reached = shares.measure(coverage, plan)
        assert reached >= last - 1e-6
        sets = learning.fill_sets(wanted, shares, plan)
        last = shares.measure(learning.measure_coverage(wanted, sets), plan)
        assert last >= reached - 1e-6


@pytest.mark.parametrize("softness", [3.0, 30.0, 1e5])
@pytest.mark.parametrize("epsilon", [1.0, 4.0])
def test_a_sparse_pass_is_a_dense_one(epsilon: float, softness: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "_MIN_SHARE", 0.0)
    features = _clusters(600, 5, 12, 5)
    wanted, plan = learning.Demand.of(_lists(features), 600).training, learning.Plan(7, 60, epsilon)
    start = learning.nearest_centre(features, learning.centres(features, 7, 0))
    sets = learning.fill_sets(wanted, learning.Shares.assign(start, 7), plan)
    assert sets.sum(axis=1).tolist() == [60.0] * 7
    coverage = learning.measure_coverage(wanted, sets)
    dense = (wanted.toarray() @ sets.toarray().T).astype(float)
    np.testing.assert_allclose(coverage.toarray(), dense, atol=1e-6)
    shares, named = learning.Shares.of(coverage, softness), _named(dense, epsilon, softness)
    assert shares.measure(coverage, plan) == pytest.approx(float((named * dense).sum() / 600), rel=1e-4)
    wish = named.T @ wanted.toarray()
    found = (wish * learning.fill_sets(wanted, shares, plan).toarray()).sum(axis=1)
    assert found == pytest.approx(np.sort(wish, axis=1)[:, -60:].sum(axis=1), rel=1e-4)


def test_neighbor_lists_are_those_of_brute_force_without_the_item_itself() -> None:
    features = np.random.default_rng(2).standard_normal((120, 6)).astype(np.float32)
    features[7] = features[3]  # twins: each has the other, never itself
    similar = features @ features.T
    np.fill_diagonal(similar, -np.inf)
    lists = _lists(features, 10)
    assert (lists != np.arange(120)[:, None]).all()
    best = np.sort(similar, axis=1)[:, ::-1][:, :10]
    assert np.take_along_axis(similar, lists, axis=1) == pytest.approx(best, abs=1e-4)


def test_inverted_lists_find_nearly_all(monkeypatch: pytest.MonkeyPatch) -> None:
    features = np.random.default_rng(3).standard_normal((3000, 8)).astype(np.float32)
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    exact = _lists(features, 8)
    monkeypatch.setattr(learning, "_EXACT", 1000)
    near = _lists(features, 8)
    shared = [len(set(a) & set(b)) for a, b in zip(exact.tolist(), near.tolist(), strict=True)]
    assert np.mean(shared) > 7


def test_a_large_gallery_is_learned_from_a_part_and_stands_for_itself_by_centroids(
    monkeypatch: pytest.MonkeyPatch, digits: tuple[Floats, Floats, Floats]
) -> None:
    public, gallery, queries = digits
    whole = Covers(4.0, 0.2).fit(public).index(gallery)
    monkeypatch.setattr(learning, "_EXACT", 1000)
    monkeypatch.setattr(learning, "MOST_QUERIES", 800)
    monkeypatch.setattr(learning, "_ANNEALED", 400)
    monkeypatch.setattr(learning, "_QUERIES_A_SET", 1)
    monkeypatch.setattr("nearveil.mechanisms.covers.maps.PROTOTYPES", 128)
    parted = Covers(4.0, 0.2).fit(public).index(gallery)
    assert len(parted.map_.prototypes) == 128
    assert _recall(parted, gallery, queries) > 0.93 * _recall(whole, gallery, queries)


def test_fine_centroids_lie_nearly_as_close_as_plain_ones() -> None:
    rows = np.asarray(load_digits().data, dtype=np.float32)
    fine = learning.fine_centres(rows, 300)
    found, nearest = fine.centroids, fine.find(rows)
    assert found.shape == (300, 64)
    assert len(np.unique(nearest)) == 300
    plain = learning.centres(rows, 300, 0)
    apart = ((rows - plain[learning.nearest_centre(rows, plain)]) ** 2).sum()
    assert ((rows - found[nearest]) ** 2).sum() < 1.15 * apart


def test_soft_passes_gain() -> None:
    features = _clusters(3000, 6)
    demand, plan = learning.Demand.of(_lists(features), 3000), learning.Plan(12, 150, 4.0)
    start = learning.nearest_centre(features, learning.centres(features, 12, 0))
    first = learning.fill_sets(demand.training, learning.Shares.assign(start, 12), plan)
    hard, soft = learning.refine(demand.training, first, plan), learning.learn(demand.training, start, plan)
    assert learning.measure_recall(demand, soft, plan) > learning.measure_recall(demand, hard, plan)


def test_the_set_is_dropped_that_is_missed_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "_PASSES_A_DROP", 0)
    features = _clusters(900, 7, 12, 5)
    wanted = learning.Demand.of(_lists(features), 900).training
    plan, fewer = learning.Plan(8, 90, 2.0), learning.Plan(7, 90, 2.0)
    start = learning.nearest_centre(features, learning.centres(features, 7, 0))
    sets = learning.fill_sets(wanted, learning.Shares.assign(start, 8), plan)
    sets = csr_array(np.vstack([sets.toarray()[:7], sets.toarray()[2:3]]))  # two are the same
    kept = learning.drop_sets(wanted, sets, fewer).toarray()

    def recall(some: Floats) -> float:
        coverage = learning.measure_coverage(wanted, csr_array(some))
        return learning.Shares.of(coverage, 1e5).measure(coverage, fewer)

    assert recall(kept) == pytest.approx(max(recall(np.delete(sets.toarray(), one, axis=0)) for one in range(8)))


def test_more_sets_than_wanted_are_a_better_start() -> None:
    features = _clusters(3000, 6)
    lists, plan = _lists(features), learning.Plan(12, 150, 4.0)
    demand = learning.Demand.of(lists, 3000)
    start = learning.nearest_centre(features, learning.centres(features, 12, 0))
    plain = learning.learn(demand.training, start, plan)
    found = learning.learn_sets(
        SpreadRows.cut(features), space_of(features), 150, 4.0, 12, lambda _stage, _part: None
    ).sets
    assert found.shape == plain.shape
    assert learning.measure_recall(demand, found, plan) > learning.measure_recall(demand, plain, plan)


def test_a_fitted_map_comes_nearer_to_what_queries_find() -> None:
    features = _clusters(2000, 8)
    lists, held = _lists(features), np.random.default_rng(0).integers(0, 2, (5, 2000))
    held[:, :1000] = features[:1000, :5].T > 0  # sets with a place, too
    members = csr_array(held.astype(np.uint8))
    fine = learning.fine_centres(features, 200)
    prototypes, nearest = fine.centroids, fine.find(features)
    near = find_prototypes_of(features, prototypes, 24)
    found = (learning.Demand.of(lists, 2000).top @ members.T.astype(np.float32)).toarray()
    weights = np.exp(-np.arange(24) / 8) / np.exp(-np.arange(24) / 8).sum()

    def error(coverage: NDArray[np.float32]) -> float:
        return float(((np.einsum("r,nrs->ns", weights, coverage[near]) - found) ** 2).mean())

    coverage = measure_around(nearest, members, 200)
    before = error(coverage)
    fit_coverage(coverage, near, lists, members)
    assert error(coverage) < 0.9 * before
    assert coverage.min() >= 0
    assert coverage.max() <= 1


def test_the_number_of_sets_starts_from_a_rule() -> None:
    assert usual_number(1_000_000, 1_000, 4.0, 2, 4096) == 720
    assert usual_number(1_000_000, 1_000, 12.0, 2, 4096) == 4096
    assert usual_number(100, 90, 0.1, 2, 512) == 2


def test_progress_rises_to_the_end(digits: tuple[Floats, Floats, Floats]) -> None:
    told: list[tuple[str, float]] = []
    Covers(2.0, 0.2).fit(digits[0]).index(digits[1], report=lambda *step: told.append(step))
    parts = [part for _, part in told]
    assert parts == sorted(parts)
    assert parts[-1] == 1.0
    assert len(dict(told)) == 3


def test_reach_makes_every_item_returnable(digits: tuple[Floats, Floats, Floats]) -> None:
    public, gallery, queries = digits
    free = Covers(2.0, 0.1).fit(public).index(gallery)
    assert free.reach_ == len(set(free.members_.indices.tolist())) / len(gallery) < 0.9
    for reach in (0.9, 1.0):
        reached = Covers(2.0, 0.1, reach=reach).fit(public).index(gallery)
        assert reached.reach_ >= reach
        assert np.diff(reached.members_.indptr).tolist() == [reached.map_.set_size] * reached.map_.n_sets
        assert len(set(reached.members_.indices[: reached.map_.set_size].tolist())) == reached.map_.set_size
        assert (
            _recall(free, gallery, queries) > _recall(reached, gallery, queries) > 0.7 * _recall(free, gallery, queries)
        )
    with pytest.raises(ValueError, match="n_sets must be at least 10"):
        Covers(2.0, 0.1, n_sets=9, reach=1.0).fit(public).index(gallery)
    with pytest.raises(ValueError, match="reach must be from 0 to 1"):
        Covers(2.0, 0.1, reach=1.5).fit(public)


@pytest.mark.parametrize("prototypes", [8192, 128])
@pytest.mark.parametrize("reach", [0.0, 1.0])
def test_an_update_finds_nearly_what_learning_anew_finds(
    digits: tuple[Floats, Floats, Floats], prototypes: int, reach: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nearveil.mechanisms.covers.maps.PROTOTYPES", prototypes)
    public, gallery, queries = digits
    covers = Covers(4.0, 0.2, n_sets=8, reach=reach).fit(public).index(gallery[:1100])
    before = np.concatenate([np.arange(50, 1100), np.full(100, -1)])
    old = covers.map_.map_id
    covers = covers.update(gallery[50:], before)
    assert covers.map_.map_id != old
    assert (covers.map_.n_items, covers.map_.set_size) == (1150, 230)
    assert np.diff(covers.members_.indptr).tolist() == [230] * 8
    assert covers.drift_ == pytest.approx(150 / 1150)
    assert covers.reach_ >= reach
    assert int(covers.rank(covers.release(queries[0]), gallery[50:]).sum()) == 230
    anew = Covers(4.0, 0.2, n_sets=8, reach=reach).fit(public).index(gallery[50:])
    part = 0.97 if prototypes > 1150 else 0.92  # a prototype that stands for nine items tells less of a new one
    assert _recall(covers, gallery[50:], queries) > part * _recall(anew, gallery[50:], queries)


@pytest.mark.parametrize("reach", [0.0, 1.0])
def test_an_update_of_a_large_gallery_reads_new_items_and_a_sample(
    digits: tuple[Floats, Floats, Floats], reach: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nearveil.mechanisms.covers.maps.PROTOTYPES", 128)
    monkeypatch.setattr("nearveil.mechanisms.covers.covers._REPLACEMENTS", 100)
    monkeypatch.setattr("nearveil.mechanisms.covers.covers._REPLACEMENTS_A_CHANGE", 1)
    placed: list[int] = []

    def count(features: SpreadRows, *more: Any) -> Any:
        placed.append(len(features))
        return find_near(features, *more)

    public, gallery, queries = digits
    covers = Covers(4.0, 0.2, n_sets=8, reach=reach).fit(public).index(gallery[:1140])
    monkeypatch.setattr("nearveil.mechanisms.covers.members.find_near", count)
    before = np.concatenate([np.arange(30, 1140), np.full(60, -1)])
    updated = covers.update(gallery[30:], before)
    assert 190 <= placed[0] <= 190 + 60
    assert updated.map_.coverage.tobytes() == covers.map_.coverage.tobytes()
    assert np.diff(updated.members_.indptr).tolist() == [234] * 8
    assert updated.reach_ >= reach
    # Remaining items outside of the sample keep their sets.
    moved = (covers.members_[:, 30:].toarray() != updated.members_.toarray()[:, :1110]).any(axis=0)
    assert moved.sum() <= 190
    anew = Covers(4.0, 0.2, n_sets=8, reach=reach).fit(public).index(gallery[30:])
    assert _recall(updated, gallery[30:], queries) > 0.95 * _recall(anew, gallery[30:], queries)


def test_an_update_of_nothing_changes_nothing(digits: tuple[Floats, Floats, Floats]) -> None:
    public, gallery, _ = digits
    covers = Covers(4.0, 0.2, n_sets=8).fit(public).index(gallery)
    old, members = covers.map_.map_id, covers.members_
    covers = covers.update(gallery, np.arange(len(gallery)))
    assert (covers.map_.map_id, covers.drift_) == (old, 0.0)
    assert (covers.members_ != members).nnz == 0


@pytest.mark.parametrize("before", [[0, 1], [0.5] * 40, [-2] * 40, [40] * 40, [0] * 40])
def test_an_update_refuses_places_that_are_none(before: list[float]) -> None:
    rows = np.random.default_rng(8).standard_normal((40, 3))
    covers = Covers(1.0, 0.2, n_sets=3).fit(rows).index(rows)
    with pytest.raises(ValueError, match="before must"):
        covers.update(rows, before)


def test_a_client_needs_the_map_alone(digits: tuple[Floats, Floats, Floats]) -> None:
    public, gallery, queries = digits
    server = Covers(2.0, 0.2, n_sets=5).fit(public).index(gallery)
    fetched = PublicMap.from_bytes(server.map_.to_bytes())
    client = Covers(2.0, 0.2).fit(public).use_map(fetched)
    assert client.public_id == server.public_id
    assert client.release(queries, rng=unsafe_seeded(1)) == server.release(queries, rng=unsafe_seeded(1))
    with pytest.raises(NotFittedError, match="index"):
        client.rank(client.release(queries[0]), gallery)
    with pytest.raises(NotFittedError, match="use_map"):
        Covers(2.0).fit(public).release(queries[0])
    other = Covers(2.0, 0.2, n_sets=4).fit(public).index(gallery)
    with pytest.raises(MessageError, match="other public rows, parameters or map"):
        other.rank(client.release(queries[0]), gallery)
    with pytest.raises(ValueError, match="the indexed one"):
        server.rank(client.release(queries[0]), gallery[:-1])
    with pytest.raises(MessageError, match="name 1 of the 5 sets"):
        server.rank(Message("covers", server.public_id, {"sets": np.array([5], dtype=np.int32)}), gallery)


def _map(**changed: object) -> PublicMap:
    parts: dict[str, object] = {
        "components": np.ones((3, 2), dtype=np.float16),
        "prototypes": np.ones((4, 2), dtype=np.int8),
        "coverage": np.ones((4, 5), dtype=np.uint8),
        "n_items": 10,
        "set_size": 2,
    }
    return PublicMap(**{**parts, **changed})  # type: ignore[arg-type]


def _many(prototypes: int, n_sets: int) -> dict[str, object]:
    coverage = np.ones((prototypes, n_sets), dtype=np.uint8)
    return {"prototypes": np.ones((prototypes, 2), dtype=np.int8), "coverage": coverage}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"components": np.full((3, 2), np.nan, dtype=np.float16)}, "components must be finite"),
        ({"components": np.ones((3, 3), dtype=np.float16)}, "equally many columns"),
        ({"components": np.ones(3, dtype=np.float16)}, "components must be a table"),
        ({"prototypes": np.ones((4, 2))}, "prototypes must be a table"),
        ({"prototypes": np.ones((5, 2), dtype=np.int8)}, "equally many columns"),
        ({"coverage": np.ones((4, 1), dtype=np.uint8)}, "2 to 4096 sets"),
        ({"coverage": np.ones((4, 4097), dtype=np.uint8)}, "coverage must be an array of at most 32768 x 4096"),
        ({"prototypes": np.ones((32769, 2), dtype=np.int8)}, "prototypes must be an array of at most 32768 x 64"),
        (_many(8193, 5), "coverage must be 0 or 255 with more than 8192 prototypes"),
        (_many(8193, 4096), "coverage must hold at most 33554432 numbers"),
        ({"components": np.ones((3, 65), dtype=np.float16)}, "components must be an array of at most 16000 x 64"),
        ({"components": np.ones((16_001, 2), dtype=np.float16)}, "components must be an array of at most"),
        ({"n_items": (1 << 32) + 1}, "n_items must be at most"),
        ({"coverage": np.ones((0, 5), dtype=np.uint8)}, "coverage must be a table"),
        ({"set_size": 0}, "set_size"),
        ({"set_size": 11}, "set_size"),
    ],
)
def test_maps_that_are_none(changed: dict[str, object], words: str) -> None:
    with pytest.raises(MapError, match=words):
        _map(**changed)


@pytest.mark.parametrize("value", [1, 127, 128, 254])
def test_one_number_that_is_no_bit_is_found(value: int) -> None:
    coverage = 255 * np.random.default_rng(0).integers(0, 2, (8193, 5)).astype(np.uint8)
    coverage[8192, 4] = value
    with pytest.raises(MapError, match="coverage must be 0 or 255"):
        _map(**_many(8193, 5) | {"coverage": coverage})


def test_a_map_of_many_prototypes_holds_bits() -> None:
    coverage = 255 * np.random.default_rng(0).integers(0, 2, (8193, 13)).astype(np.uint8)
    held = _map(**_many(8193, 13) | {"coverage": coverage})
    assert held.nbytes < 8193 * (2 + 2) + 500
    read = PublicMap.from_bytes(held.to_bytes())
    np.testing.assert_array_equal(read.coverage, coverage)
    assert read.map_id == held.map_id


@pytest.mark.parametrize(
    ("shape", "sizes", "words"),
    [
        ((8193, 2), [9000, 10, 17], "one for each set"),
        ((8193, 2), [9000, 10, 8], "one for each set"),
        ((8193, 0), [9000, 10, -3], "2 to 4096 sets"),
        ((8193, 0), [9000, 10, 0], "2 to 4096 sets"),
        ((8193, 1), [9000, 10, 1], "2 to 4096 sets"),
        ((8193, 512), [9000, 10, 4096], "at most 33554432 numbers"),
        ((8193, 513), [9000, 10, 4104], "bits must be an array of at most 32768 x 512"),
        ((4, 2), [9000, 10, 13], "over 8192 prototypes"),
        ((4, 2), [9000], "not a map"),
    ],
)
def test_bits_that_are_no_map(shape: tuple[int, int], sizes: list[int], words: str) -> None:
    arrays: dict[str, NDArray[Any]] = {
        "components": np.ones((3, 2), np.float16).view(np.uint16),
        "prototypes": np.ones((shape[0], 2), np.int8),
        "bits": np.zeros(shape, np.uint8),
        "sizes": np.array(sizes),
    }
    with pytest.raises(MessageError, match=words):
        PublicMap.from_bytes(Message("map", "0", arrays).to_bytes())


def test_small_answers_have_more_prototypes(
    monkeypatch: pytest.MonkeyPatch, digits: tuple[Floats, Floats, Floats]
) -> None:
    public, gallery, queries = digits
    for name, value in (("PROTOTYPES", 64), ("MOST_GRADED", 64), ("MOST_PROTOTYPES", 512)):
        monkeypatch.setattr(f"nearveil.mechanisms.covers.maps.{name}", value)
    monkeypatch.setattr("nearveil.mechanisms.covers.members.MOST_GRADED", 64)
    many = Covers(4.0, 0.025).fit(public).index(gallery)
    assert (len(many.map_.prototypes), set(np.unique(many.map_.coverage))) == (512, {0, 255})
    assert len(Covers(4.0, 0.03).fit(public).index(gallery).map_.prototypes) == 64
    monkeypatch.setattr("nearveil.mechanisms.covers.maps._SMALL_ANSWER", 0.0)
    few = Covers(4.0, 0.025).fit(public).index(gallery)
    assert len(few.map_.prototypes) == 64
    assert _recall(many, gallery, queries) > 1.03 * _recall(few, gallery, queries)
    size, before = len(gallery), np.concatenate([np.arange(20, len(gallery)), np.full(20, -1)])
    changed = np.concatenate([gallery[20:], queries[:20]])
    updated = many.update(changed, before)
    assert (len(updated.map_.prototypes), updated.map_.n_items) == (512, size)


@pytest.mark.parametrize(
    "coverage",
    [
        np.eye(40, dtype=np.uint8) * 255,  # a cell for each item
        np.zeros((40, 3), dtype=np.uint8),  # nothing covers anything
        np.full((40, 2), 255, dtype=np.uint8),
    ],
)
def test_a_hostile_map_cannot_break_the_promise(coverage: NDArray[np.uint8]) -> None:
    """The odds of any two messages stay within e^epsilon, for every pair of rows, whatever the map says."""
    rows = np.random.default_rng(8).standard_normal((40, 3))
    hostile = PublicMap(
        components=np.eye(3, dtype=np.float16) * 60_000,
        prototypes=np.rint(rows * 30).clip(-127, 127).astype(np.int8),
        coverage=coverage,
        n_items=40,
        set_size=1,
    )
    client = Covers(1.0, 0.025).fit(rows).use_map(hostile)
    messages = [
        Message("covers", client.public_id, {"sets": np.array([number], dtype=np.int32)})
        for number in range(hostile.n_sets)
    ]
    chances = np.exp(client.log_density(messages, rows))
    chances /= chances.sum(axis=0)
    assert (chances.max(axis=1) / chances.min(axis=1)).max() <= math.e * (1 + 1e-12)


@pytest.mark.parametrize("metric", METRICS)
def test_the_odds_of_messages_do_not_depend_on_the_metric(metric: Metric) -> None:
    """Exactly for all pairs of rows, and drawn: Theorem 2 of docs/theory/metrics.md."""
    rows = make_vectors(200)
    server = Covers(1.0, 0.2, n_sets=5).fit_space(ScoreSpace.fit(metric, rows)).index(rows)
    client = Covers(1.0, 0.2).fit_space(server.space_, server.public_digest).use_map(server.map_)
    queries = np.concatenate([make_vectors(50, seed=1), 1e6 * np.eye(16), 1e-12 * np.eye(16), server.space_.mean[None]])
    messages = [Message("covers", client.public_id, {"sets": np.array([number], np.int32)}) for number in range(5)]
    chances = np.exp(client.log_density(messages, queries))
    chances /= chances.sum(axis=0)
    ratio = (chances.max(axis=1) / chances.min(axis=1)).max()
    assert math.e * (1 - 1e-6) < ratio <= math.e * (1 + 1e-12)
    assert client.guarantee == Covers(1.0, 0.2, n_sets=5).fit(rows).index(rows).guarantee
    source, draws = unsafe_seeded(7), 4000
    for row in (0, 3):
        sets = [int(one["sets"][0]) for one in client.release(np.repeat(queries[row][None], draws, axis=0), rng=source)]
        counts = np.bincount(sets, minlength=5)
        assert np.abs(counts / draws - chances[:, row]).max() < 5 * 0.5 / np.sqrt(draws)


def test_strange_bytes_are_no_map(digits: tuple[Floats, Floats, Floats]) -> None:
    good = _map()
    with pytest.raises(MapError, match="not a map"):
        PublicMap.from_bytes(Message("other", "x", {"components": np.zeros((2, 2), np.uint16)}).to_bytes())
    with pytest.raises(MapError, match="does not match its map_id"):
        PublicMap.from_bytes(Message("map", "0" * 32, dict(Message.from_bytes(good.to_bytes()).arrays)).to_bytes())
    edited = bytearray(good.to_bytes())
    edited[-1] ^= 1
    with pytest.raises(MessageError):
        PublicMap.from_bytes(bytes(edited))
    with pytest.raises(MessageError):
        PublicMap.from_bytes(good.to_bytes()[:-4])
    with pytest.raises(MapError, match="64 features"):
        Covers(1.0).fit(digits[0]).use_map(good)
    with pytest.raises(MapError, match="must be a PublicMap"):
        Covers(1.0).fit(digits[0]).use_map(good.to_bytes())  # type: ignore[arg-type]


def test_prototypes_do_not_tell_which_item_they_are(digits: tuple[Floats, Floats, Floats]) -> None:
    """A map whose prototypes stood in the gallery's order would be the gallery's codes with their ids."""
    public, gallery, _ = digits
    first = Covers(2.0, 0.2, n_sets=5).fit(public).index(gallery)
    turned = Covers(2.0, 0.2, n_sets=5).fit(public).index(gallery[::-1])
    apart = first.map_.prototypes.astype(int) - turned.map_.prototypes.astype(int)
    assert np.abs(apart).max() <= 1  # sums in another order


def test_another_map_is_another_release(digits: tuple[Floats, Floats, Floats]) -> None:
    public, gallery, queries = digits
    client = Covers(2.0, 0.2, n_sets=9).fit(public).index(gallery)
    narrow = client.use_map(Covers(2.0, 0.2, n_sets=2).fit(public).index(gallery).map_)
    assert (narrow.map_.n_sets, client.map_.n_sets) == (2, 9)
    messages = client.release(queries, rng=unsafe_seeded(0))
    assert {message.public_id for message in messages} == {client.public_id} != {narrow.public_id}
    assert {int(message["sets"][0]) for message in messages} == set(range(9))


def test_the_default_is_covers() -> None:
    assert isinstance(default(3.0, 0.2), Covers)
    assert default(3.0, 0.2).get_params() == {"epsilon": 3.0, "candidates": 0.2, "n_sets": None, "reach": 0.0}


@pytest.mark.parametrize("n_sets", [1, 0, 41])
def test_bad_numbers_of_sets(n_sets: int) -> None:
    rows = np.random.default_rng(8).standard_normal((40, 3))
    with pytest.raises(ValueError, match="n_sets must"):
        Covers(1.0, 0.2, n_sets=n_sets).fit(rows).index(rows)


def test_tiny_galleries() -> None:
    rows = np.random.default_rng(8).standard_normal((5, 3))
    covers = Covers(2.0, 0.4).fit(rows).index(rows)
    assert int(covers.rank(covers.release(rows[0]), rows).sum()) == 2
    assert isinstance(covers.members_, scipy.sparse.csr_array)
    with pytest.raises(ValueError, match="at least two items"):
        Covers(2.0, 0.9).fit(rows).index(rows[:1])


@pytest.mark.parametrize("epsilon", [1e-6, 1.4999e-6, 0.1234567891, math.nextafter(4.0, 5.0), 39.99999999])
def test_a_message_states_and_costs_its_epsilon_to_the_last_bit(epsilon: float) -> None:
    for event in (PureDp(epsilon), NamedSets(epsilon, 20)):
        guarantee = set_guarantee(event)
        assert guarantee.epsilon == epsilon
        assert guarantee.events == (event,)


@pytest.mark.parametrize("kind", ["as learned", "no items", "all sets alike", "one set for each prototype"])
def test_a_hostile_map_cannot_change_what_a_message_costs(kind: str) -> None:
    """The event is the client's own law: it counts the sets that the client draws from, whatever they contain."""
    rows = np.random.default_rng(0).standard_normal((300, 8))
    honest = Covers(1.0, 0.1, n_sets=5).fit(rows).index(rows).map_
    coverage = {
        "as learned": honest.coverage,
        "no items": np.zeros_like(honest.coverage),
        "all sets alike": np.full_like(honest.coverage, 255),
        "one set for each prototype": 255 * np.eye(len(honest.prototypes), dtype=np.uint8),
    }[kind]
    client = Covers(1.0, 0.1).fit(rows)
    assert client.guarantee.events == (PureDp(1.0),)  # any number of sets
    client = client.use_map(replace(honest, coverage=coverage))
    assert client.guarantee.events == (NamedSets(1.0, coverage.shape[1]),)
    channel = client._channel
    assert channel.n_sets == coverage.shape[1] == client.map_.n_sets
    messages = client.release(np.repeat(rows[:2], 40, axis=0), rng=unsafe_seeded(4))
    assert max(int(client.read_sets(message)[0]) for message in messages) < channel.n_sets
    # The odds of any two rows, exactly: all messages, from the words that the client compares.
    densities = client.log_density(
        [Message("covers", client.public_id, {"sets": np.array([i], np.int32)}) for i in range(channel.n_sets)], rows
    )
    masses = np.exp(densities) / np.exp(densities).sum(axis=0)
    gain = (masses[:, :, None] - masses[:, None, :]).clip(min=0).sum(axis=0).max()  # at epsilon 0
    assert gain <= float(make_loss_curves(client.guarantee.events[0], 1).remove(np.zeros(1))[0]) * (1 + 1e-12)
