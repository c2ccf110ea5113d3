import numpy as np
import pytest
import scipy.sparse
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.exceptions import NotFittedError

from nearveil.mechanisms import Cells, Covers, Message, MessageError, PublicMap, Release, default
from nearveil.mechanisms.covers import learning
from nearveil.mechanisms.covers.covers import MapError
from nearveil.privacy.noise import unsafe_seeded
from tests.mechanisms.conformance import Floats
from tests.mechanisms.test_cells import MappedContract


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
    hit, n_sets = release._channel(release.map_).hit, release.map_.n_sets
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


def test_neither_step_lowers_the_recall() -> None:
    generator = np.random.default_rng(1)
    features = generator.standard_normal((300, 4)).astype(np.float32)
    demand = learning.Demand.of(learning.neighbor_lists(features), 300)
    sets = learning.most_wanted(generator.random((5, 300)).astype(np.float32), 40)
    last = -1.0
    for _ in range(8):
        coverage = demand.wanted @ sets.T
        named = learning.naming(coverage, 2.0)
        assert named.sum(axis=1) == pytest.approx(np.ones(300), abs=1e-5)
        assert np.unique(np.round(named / named.min(), 3)).tolist() == pytest.approx([1, np.exp(2.0)], abs=1e-2)
        before = float((named * coverage).sum())
        assert before >= last - 1e-3
        sets = learning.most_wanted((demand.wanted_by @ named).T, 40)
        last = float((named * (demand.wanted @ sets.T)).sum())
        assert last >= before - 1e-3


def test_neighbor_lists_are_those_of_brute_force_without_the_item_itself() -> None:
    features = np.random.default_rng(2).standard_normal((120, 6)).astype(np.float32)
    features[7] = features[3]  # twins: each has the other, never itself
    similar = features @ features.T
    np.fill_diagonal(similar, -np.inf)
    lists = learning.neighbor_lists(features, 10)
    assert (lists != np.arange(120)[:, None]).all()
    best = np.sort(similar, axis=1)[:, ::-1][:, :10]
    assert np.take_along_axis(similar, lists, axis=1) == pytest.approx(best, abs=1e-4)


def test_inverted_lists_find_nearly_all(monkeypatch: pytest.MonkeyPatch) -> None:
    features = np.random.default_rng(3).standard_normal((3000, 8)).astype(np.float32)
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    exact = learning.neighbor_lists(features, 8)
    monkeypatch.setattr(learning, "_EXACT", 1000)
    near = learning.neighbor_lists(features, 8)
    shared = [len(set(a) & set(b)) for a, b in zip(exact.tolist(), near.tolist(), strict=True)]
    assert np.mean(shared) > 7


def test_a_large_gallery_is_learned_from_a_part_and_stands_for_itself_by_centroids(
    monkeypatch: pytest.MonkeyPatch, digits: tuple[Floats, Floats, Floats]
) -> None:
    public, gallery, queries = digits
    whole = Covers(4.0, 0.2).fit(public).index(gallery)
    monkeypatch.setattr(learning, "_EXACT", 600)
    monkeypatch.setattr("nearveil.mechanisms.covers.covers.PROTOTYPES", 128)
    parted = Covers(4.0, 0.2).fit(public).index(gallery)
    assert len(parted.map_.prototypes) == 128
    assert _recall(parted, gallery, queries) > 0.93 * _recall(whole, gallery, queries)


@pytest.mark.parametrize("epsilon", [1.0, 4.0])
def test_a_step_of_a_large_gallery_is_that_of_a_small_one(epsilon: float) -> None:
    features = np.random.default_rng(5).standard_normal((600, 5)).astype(np.float32)
    demand = learning.Demand.of(learning.neighbor_lists(features), 600)
    start = learning.clustering(features, 7, 0)
    first = np.zeros((600, 7), dtype=np.float32)
    first[np.arange(600), start] = 1
    wanted = (demand.wanted_by @ learning.naming(first, epsilon)).T
    popular = np.asarray(demand.wanted.sum(axis=0), dtype=np.float32)
    sets = learning._most_wanted(learning._wanted_by_sets(demand.wanted, start, 7), popular, 60, np.exp(epsilon) - 1)
    assert sets.sum(axis=1).tolist() == [60.0] * 7
    # Of items that are wanted as much any may be taken.
    held = (wanted * learning.most_wanted(wanted, 60)).sum(axis=1)
    assert (wanted * sets.toarray()).sum(axis=1) == pytest.approx(held, rel=1e-5)
    coverage = demand.wanted @ sets.toarray().T
    good, by_good, by_all = learning._good_sets(demand.wanted, sets)
    assert coverage[np.arange(600), good] == pytest.approx(coverage.max(axis=1), rel=1e-5)
    assert (by_good, by_all) == pytest.approx((coverage.max(axis=1).mean(), coverage.sum(axis=1).mean()), rel=1e-5)


def test_sets_of_a_large_gallery_find_as_much_as_those_of_a_small_one() -> None:
    generator = np.random.default_rng(6)
    features = (generator.standard_normal((40, 8))[generator.integers(0, 40, 4000)]).astype(np.float32)
    features += generator.standard_normal(features.shape).astype(np.float32)
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    demand, start = learning.Demand.of(learning.neighbor_lists(features), 4000), learning.clustering(features, 20, 0)
    dense = learning.learn(demand, start, 20, 200, 4.0)
    sparse = learning.learn_large(demand.wanted, start, 20, 200, 4.0).toarray()
    assert learning.recall(sparse, demand, 4.0) > 0.97 * learning.recall(dense, demand, 4.0)


def test_the_number_of_sets_of_a_huge_gallery_follows_a_rule() -> None:
    assert learning.usual_number(1_000_000, 1_000, 4.0, 4096) == 815
    assert learning.usual_number(1_000_000, 1_000, 12.0, 4096) == 4096
    assert learning.usual_number(100, 90, 0.1, 512) == 2


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
    with pytest.raises(ValueError, match="the one that was indexed"):
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


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"components": np.full((3, 2), np.nan, dtype=np.float16)}, "components must be finite"),
        ({"components": np.ones((3, 3), dtype=np.float16)}, "fit each other"),
        ({"components": np.ones(3, dtype=np.float16)}, "components must be a table"),
        ({"prototypes": np.ones((4, 2))}, "prototypes must be a table"),
        ({"prototypes": np.ones((5, 2), dtype=np.int8)}, "fit each other"),
        ({"coverage": np.ones((4, 1), dtype=np.uint8)}, "2 to 4096 sets"),
        ({"coverage": np.ones((4, 4097), dtype=np.uint8)}, "coverage must be an array of at most 8192 x 4096"),
        ({"prototypes": np.ones((8193, 2), dtype=np.int8)}, "prototypes must be an array of at most 8192 x 64"),
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
    assert (chances.max(axis=1) / chances.min(axis=1)).max() <= np.e * (1 + 1e-12)


def test_strange_bytes_are_no_map(digits: tuple[Floats, Floats, Floats]) -> None:
    good = _map()
    with pytest.raises(MapError, match="not a map"):
        PublicMap.from_bytes(Message("other", "x", {"components": np.zeros((2, 2), np.uint16)}).to_bytes())
    with pytest.raises(MapError, match="not the map that it says"):
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


def test_a_map_that_changes_during_a_release_is_read_once(
    digits: tuple[Floats, Floats, Floats], monkeypatch: pytest.MonkeyPatch
) -> None:
    public, gallery, queries = digits
    client = Covers(2.0, 0.2, n_sets=9).fit(public).index(gallery)
    wide, narrow = client.map_, Covers(2.0, 0.2, n_sets=2).fit(public).index(gallery).map_
    choose = PublicMap.choose

    def slowly(self: PublicMap, features: Floats) -> NDArray[np.int64]:
        client.use_map(narrow)  # another thread refreshes the map just now
        return choose(self, features)

    monkeypatch.setattr(PublicMap, "choose", slowly)
    messages = client.release(queries, rng=unsafe_seeded(0))
    client.use_map(wide)
    assert {message.public_id for message in messages} == {client.public_id}
    assert {int(message["sets"][0]) for message in messages} == set(range(9))


def test_the_default_is_covers() -> None:
    assert isinstance(default(3.0, 0.2), Covers)
    assert default(3.0, 0.2).get_params() == {"epsilon": 3.0, "candidates": 0.2, "n_sets": None}


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
