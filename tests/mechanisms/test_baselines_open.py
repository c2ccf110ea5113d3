"""The baselines that protect something else than the query, or nothing: private PCA, plain embeddings."""

import importlib.util
import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.frozen import FrozenEstimator

from nearveil.mechanisms import Message, Release
from nearveil.privacy.noise import unsafe_seeded
from studies.baselines import PlainLDA, PlainManifold, PlainTSNE, PrivatePCA, PrivatePCARelease, RawFeatures
from studies.baselines.pca import (
    add_covariance_noise,
    calibrate_covariance_noise,
    draw_bingham,
    draw_directions,
    find_complement,
    run_bingham_chain,
)
from tests.mechanisms.conformance import Contract, Floats

needs_tsne = pytest.mark.skipif(importlib.util.find_spec("openTSNE") is None, reason="openTSNE is not installed")


class OpenContract(Contract):
    """For mechanisms that do not protect the query: four tests of the contract speak of that alone and are replaced."""

    def statistic(self, release: Release, messages: list[Message], x: Floats, other: Floats) -> Floats:
        raise NotImplementedError

    def test_sampled_likelihood_ratios_keep_the_promise(self) -> None:  # type: ignore[override]
        """There are none to keep: every message tells its row from another."""
        release = self.prepared()
        x, other = self.pairs(release)[1]
        first, second = release.release(np.stack([x, other]))
        assert first != second
        assert first == release.release(x)

    def test_guarantee_is_that_of_a_query(self) -> None:
        promise = self.prepared().guarantee
        assert promise.epsilon == math.inf
        assert str(promise) == "Nothing is guaranteed about which record was queried."

    def test_global_random_state_plays_no_part(self) -> None:
        release = self.prepared()
        np.random.seed(0)  # noqa: NPY002
        release.release(self.pairs(release)[0][0])
        following = np.random.random()  # noqa: NPY002
        np.random.seed(0)  # noqa: NPY002
        assert following == np.random.random()  # noqa: NPY002

    def test_absurd_epsilon(self) -> None:
        assert "epsilon" not in self.make(1.0).get_params()


class TestRaw(OpenContract):
    def make(self, epsilon: float) -> Release:
        del epsilon
        return RawFeatures()


class TestManifold(OpenContract):
    def make(self, epsilon: float) -> Release:
        del epsilon
        return PlainManifold()


@needs_tsne
class TestTSNE(OpenContract):
    def make(self, epsilon: float) -> Release:
        del epsilon
        return PlainTSNE()


class TestLDA(OpenContract):
    def make(self, epsilon: float) -> Release:
        del epsilon
        return PlainLDA()


class TestPrivatePCARelease(OpenContract):
    def make(self, epsilon: float) -> Release:
        projector = PrivatePCA(epsilon, n_components=2, mean=np.zeros(self.dimension))
        return PrivatePCARelease(FrozenEstimator(projector.fit(self.gallery(), rng=unsafe_seeded(0))))

    def test_guarantee_is_that_of_a_query(self) -> None:
        """It is not: a record of the projector's set is protected, and the sentence says so."""
        projector = PrivatePCA(1.0, n_components=2).fit(self.gallery())
        promise = PrivatePCARelease(projector).fit(*self.public()).guarantee
        assert promise is projector.guarantee
        assert promise.protects == "database"
        assert "covariance" in str(promise)
        assert "asked for" not in str(promise)
        assert promise.sound

    @pytest.mark.parametrize("epsilon", [0.0, -1.0, float("nan"), float("inf"), "1", None])
    def test_absurd_epsilon(self, epsilon: Any) -> None:
        with pytest.raises(ValueError, match="epsilon"):
            self.make(epsilon)


def unit(vectors: Floats) -> Floats:
    return np.asarray(vectors / np.linalg.norm(vectors, axis=-1, keepdims=True))


def as_released(moments: Floats) -> Floats:
    """The numbers that noise is added to."""
    i, j = np.triu_indices(len(moments))
    return np.asarray(moments[i, j] * np.where(i == j, 1.0, math.sqrt(2)))


@given(st.integers(2, 12), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_the_covariance_moves_as_far_as_the_bound_and_no_farther(d: int, seed: int) -> None:
    x, y = unit(np.random.default_rng(seed).standard_normal((2, d)))
    bound = calibrate_covariance_noise(100, d, 1.0, 1e-5).sensitivity
    assert np.linalg.norm(as_released(np.outer(x, x) - np.outer(y, y))) <= bound
    y = unit(y - (x @ y) * x)
    reached = np.linalg.norm(as_released(np.outer(x, x) - np.outer(y, y)))
    assert bound * (1 - 1e-6) <= reached <= bound


def test_noise_of_the_covariance_is_symmetric_and_of_its_scale() -> None:
    noise = calibrate_covariance_noise(100, 40, 1.0, 1e-5)
    found = add_covariance_noise(np.zeros((40, 40)), noise, unsafe_seeded(0))
    assert np.array_equal(found, found.T)
    above = found[np.triu_indices(40, 1)]
    assert above.std() == pytest.approx(noise.scale / math.sqrt(2), rel=0.1)
    assert np.diagonal(found).std() == pytest.approx(noise.scale, rel=0.4)


def test_the_exponential_mechanism_keeps_its_epsilon_and_needs_all_of_it() -> None:
    # In the plane, by the densities themselves: many records at one place, and one that is replaced by its opposite.
    epsilon, angles = 2.0, np.linspace(0, math.pi, 20_001)
    worst = 0.0
    for copies in (0, 1, 10, 1000):
        fixed = copies * np.cos(angles) ** 2
        logs = [epsilon / 2 * (fixed + own) for own in (np.cos(angles) ** 2, np.sin(angles) ** 2)]
        logs = [log - np.logaddexp.reduce(log) for log in logs]
        worst = max(worst, float(np.abs(logs[0] - logs[1]).max()))
        assert worst <= epsilon
    assert worst > 0.99 * epsilon


@pytest.mark.parametrize("values", [[6.0, 1.0, 0.0], [40.0, 39.0, 0.0], [0.0, 0.0, 0.0]])
def test_bingham_draws_have_the_moments_of_the_density(values: list[float]) -> None:
    turn = np.linalg.qr(np.random.default_rng(1).standard_normal((3, 3)))[0]
    scores = turn @ np.diag(values) @ turn.T
    source = unsafe_seeded(5)
    drawn = np.array([draw_bingham(scores, source) for _ in range(1500)]) @ turn
    assert np.allclose(np.linalg.norm(drawn, axis=1), 1)
    # Quadrature over the sphere: heights and angles.
    z, angle = np.meshgrid(np.linspace(-1, 1, 1201), np.linspace(0, 2 * np.pi, 600, endpoint=False))
    ring = np.sqrt(1 - z**2)
    squares = np.stack([z**2, (ring * np.cos(angle)) ** 2, (ring * np.sin(angle)) ** 2], axis=-1)
    weights = np.exp(squares @ values - max(values))
    mean = (weights[..., None] * squares).sum(axis=(0, 1)) / weights.sum()
    second = (weights[..., None] * squares**2).sum(axis=(0, 1)) / weights.sum()
    error = np.sqrt((second - mean**2) / 1500) + 2e-3
    assert (np.abs((drawn**2).mean(axis=0) - mean) < 4 * error).all()


def test_bingham_in_many_dimensions_still_accepts() -> None:
    values = np.concatenate([[300.0, 200.0], np.zeros(126)])
    drawn = draw_bingham(np.diag(values), unsafe_seeded(1))
    assert drawn[0] ** 2 > 0.5
    assert abs(draw_bingham(np.array([[3.0]]), unsafe_seeded(1))[0]) == 1


def test_complements_are_orthonormal_and_across() -> None:
    columns = np.linalg.qr(np.random.default_rng(0).standard_normal((6, 2)))[0]
    basis = find_complement(columns)
    assert np.allclose(basis.T @ basis, np.eye(4))
    assert np.allclose(columns.T @ basis, 0)
    assert np.array_equal(find_complement(np.zeros((3, 0))), np.eye(3))


def data(n: int = 3000) -> Floats:
    return np.random.default_rng(0).standard_normal((n, 6)) * [9, 6, 1, 1, 1, 1]


@pytest.mark.parametrize("method", ["gaussian", "bingham", "gibbs"])
def test_directions_are_those_of_the_data_where_there_are_many(method: Any) -> None:
    learned = PrivatePCA(2.0, n_components=2, method=method, n_sweeps=3, allow_unsound=True)
    learned.fit(data(), rng=unsafe_seeded(0))
    assert np.allclose(learned.components_ @ learned.components_.T, np.eye(2), atol=1e-9)
    assert np.linalg.norm(learned.components_[:, :2]) > 1.4
    little = PrivatePCA(1e-3, n_components=2, method=method, n_sweeps=3, allow_unsound=True)
    assert np.linalg.norm(little.fit(data(20), rng=unsafe_seeded(0)).components_[:, :2]) < 1.3


def test_a_row_counts_by_its_direction_alone() -> None:
    seeds = [unsafe_seeded(4), unsafe_seeded(4)]
    first, second = (
        PrivatePCA(1.0, n_components=2).fit(rows, rng=seed)
        for rows, seed in zip((data(50), data(50) * 1e200), seeds, strict=True)
    )
    assert np.allclose(first.components_, second.components_)
    with_zero = np.vstack([data(49), np.zeros((1, 6))])
    assert np.isfinite(PrivatePCA(1.0, n_components=2).fit(with_zero).components_).all()


def test_every_row_counts_with_norm_one() -> None:
    learned = PrivatePCA(1.0, n_components=6).fit(data(50))
    assert np.linalg.norm(learned.transform(data(50)), axis=1) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize(("method", "delta", "events"), [("gaussian", 1e-5, 1), ("bingham", 0.0, 3), ("gibbs", 0.0, 0)])
def test_guarantees_say_what_is_protected(method: Any, delta: float, events: int) -> None:
    learned = PrivatePCA(1.5, n_components=3, method=method, n_sweeps=2, allow_unsound=True).fit(data(200))
    promise = learned.guarantee
    assert (promise.epsilon, promise.delta, len(promise.events)) == (1.5, delta, events)
    assert promise.protects == "database"
    assert promise.unit.startswith("record of the set")
    assert promise.sound is (method == "gaussian")
    if not promise.sound:
        with pytest.raises(ValueError, match="Set allow_unsound=True"):
            PrivatePCA(1.5, n_components=3, method=method).fit(data(200))
    if method == "bingham":
        assert "floating-point" in promise.reason
        assert sum(event.epsilon for event in promise.events) == pytest.approx(1.5)
    seeded = PrivatePCA(1.5, method=method, n_components=1, allow_unsound=True).fit(data(50), rng=unsafe_seeded(0))
    assert not seeded.guarantee.sound


def test_what_another_thread_sets_during_a_fit_changes_nothing() -> None:
    """Directions of a method without a proof had the guarantee of the one that was asked for."""
    learned = PrivatePCA(1.0, n_components=2)

    class Late:
        def __array__(self, dtype: Any = None, copy: bool | None = None) -> Floats:
            learned.set_params(method="bingham", epsilon=9.0)
            return data(200)

    learned.fit(Late())
    assert learned.guarantee.epsilon == 1.0
    assert learned.guarantee.basis.name == "Gaussian covariance"


def test_sequential_directions_spend_an_equal_part_each() -> None:
    # Of k directions the first has the density exp(epsilon / (2 k) v' M v).
    moments = np.diag([12.0, 4.0, 0.0])
    first = np.array([draw_directions(moments, 3, 3.0, unsafe_seeded(i))[:, 0] for i in range(400)])
    alone = np.array([draw_bingham(moments / 2, unsafe_seeded(i + 999)) for i in range(400)])
    assert abs((first[:, 0] ** 2).mean() - (alone[:, 0] ** 2).mean()) < 0.08


def test_one_column_of_the_chain_is_exact() -> None:
    scores = np.diag([5.0, 0.0, 0.0])
    drawn = np.array([run_bingham_chain(scores, 1, 99, unsafe_seeded(i))[:, 0] for i in range(400)])
    exact = np.array([draw_bingham(scores, unsafe_seeded(i + 5000)) for i in range(400)])
    assert abs((drawn[:, 0] ** 2).mean() - (exact[:, 0] ** 2).mean()) < 0.06


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"n_components": 7}, "n_components must"),
        ({"method": "gibbs"}, "allow_unsound"),
        ({"method": "exact"}, "method"),
        ({"delta": 0.0}, "delta"),
        ({"mean": [1.0, 2.0]}, "mean must contain 6"),
        ({"mean": [math.nan] * 6}, "mean must be finite"),
    ],
)
def test_bad_parameters_of_the_projector(parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PrivatePCA(1.0, **{"n_components": 2, **parameters}).fit(data(20))


def test_bad_rows_of_the_projector() -> None:
    learned = PrivatePCA(1.0, n_components=2).fit(data(20))
    for rows, words in ((np.full((2, 6), np.nan), "finite"), (np.zeros((0, 6)), "at least one"), ([1.0], "rows and")):
        with pytest.raises(ValueError, match=words):
            PrivatePCA(1.0, n_components=2).fit(rows)
    with pytest.raises(ValueError, match="6 columns"):
        learned.transform(np.ones((2, 5)))
    with pytest.raises(ValueError, match="rng must be"):
        learned.fit(data(20), rng=np.random.default_rng(0))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not fitted yet"):
        PrivatePCA(1.0).transform(data(20))
    with pytest.raises(ValueError, match="is fitted"):
        PrivatePCARelease(PrivatePCA(1.0)).fit(data(20))
    with pytest.raises(ValueError, match="fitted on 5 columns"):
        PrivatePCARelease(learned).fit(np.random.default_rng(0).standard_normal((9, 5)))


@pytest.mark.parametrize(
    ("release", "labels", "words"),
    [
        (PlainLDA(), None, "public_y must contain"),
        (PlainLDA(), np.zeros(30, dtype=int), "at least two classes"),
        (PlainLDA(3), np.arange(30) % 3, "n_components must be at most 2"),
        (PlainManifold(0), None, "n_components"),
        (PlainManifold(bandwidth=0.0), None, "bandwidth"),
        (PlainTSNE(3), None, "n_components"),
    ],
)
def test_bad_parameters_of_plain_releases(release: Release, labels: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        release.fit(data(30), labels)


def test_tsne_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr("studies.baselines.embeddings.importlib.import_module", missing)
    with pytest.raises(ImportError, match="pip install openTSNE"):
        PlainTSNE().fit(data(30))


@pytest.mark.parametrize(
    ("release", "least"),
    [
        (RawFeatures(), 0.9),
        (PlainManifold(), 0.7),
        (PlainLDA(), 0.9),
        pytest.param(PlainTSNE(), 0.9, marks=needs_tsne),
    ],
)
def test_plain_releases_find_their_class(release: Release, least: float) -> None:
    generator = np.random.default_rng(3)
    labels = np.arange(150) % 3
    rows = 6 * np.eye(5)[labels] + generator.standard_normal((150, 5))
    release = release.fit(rows[:90], labels[:90])
    found = [int(np.argmax(release.rank(m, rows[90:130]))) for m in release.release(rows[130:])]
    assert np.mean(labels[90:130][found] == labels[130:]) > least


def test_a_gallery_is_embedded_anew_when_it_changes_and_stays_out_of_pickles() -> None:
    labels = np.arange(40) % 3
    release = PlainLDA().fit(data(40), labels)
    message, gallery = release.release(data(1)[0]), data(30)
    first = release.rank(message, gallery)
    before = len(pickle.dumps(release))
    changed = gallery.copy()
    changed[0] = -changed[0]
    second = release.rank(message, changed)
    assert first[0] != second[0]
    assert np.array_equal(first[1:], second[1:])
    assert np.array_equal(release.rank(message, gallery), first)
    assert len(pickle.dumps(release)) == before


@pytest.mark.parametrize("release", [RawFeatures(), PlainManifold(), PlainLDA()])
def test_rows_without_direction_have_a_place_in_the_gallery(release: Release) -> None:
    release = release.fit(data(40), np.arange(40) % 3)
    scores = release.rank(release.release(data(1)[0]), np.stack([release.mean_, data(3)[2]]))
    assert np.isfinite(scores).all()
    assert np.isfinite(release.rank(release.release(data(1)[0]), release.mean_[None])).all()
