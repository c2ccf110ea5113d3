"""DP-dSNE: the gradient, the clipping, the accounting; and all baselines in a retriever."""

from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import approx_fprime
from scipy.spatial.distance import cdist

from nearveil.mechanisms import Message, Release
from nearveil.mechanisms._gaussian import AnalyticGaussian
from nearveil.privacy.accounting import PldAccountant
from nearveil.privacy.noise import unsafe_seeded
from nearveil.search import Retriever, evaluate
from studies.baselines import (
    DPdSNE,
    PlainLDA,
    PlainManifold,
    PrivatePCA,
    PrivatePCARelease,
    RandomProjection,
    RawFeatures,
    VonMisesFisher,
)
from studies.baselines.embeddings import clip_rows, compute_affinities, compute_gradient
from tests.mechanisms.conformance import Contract, Floats, sample_messages


class TestOneStep(Contract):
    samples = 15_000
    power = 0.5
    setting: ClassVar[dict[str, Any]] = {"n_steps": 1}

    def public(self) -> tuple[Floats, Any]:
        # Two opposite heaps: the gradients of their middles are opposite, and both are clipped.
        heap = 0.1 * np.random.default_rng(0).standard_normal((8, 3))
        heap = heap + np.array([5.0, 0, 0])
        return np.vstack([heap, -heap]) + 2, np.arange(16) % 2

    def make(self, epsilon: float) -> Release:
        return DPdSNE(epsilon, delta=0.05, clip=1e-3, perplexity=5, **self.setting)

    def pairs(self, release: Any) -> list[tuple[Floats, Floats]]:
        x = np.array([1.0, 0, 0])
        return [(release.mean_ + x, release.mean_ - x)]

    def statistic(self, release: Any, messages: list[Message], x: Floats, other: Floats) -> Floats:
        exact = release._prepare(release.features(np.stack([x, other])))
        return np.asarray(np.array([message["embedding"] for message in messages]) @ (exact[0] - exact[1]))


class TestThreeSteps(TestOneStep):
    # So small a rate that all steps see the same gradient: their sum tells what the three of them tell.
    setting: ClassVar[dict[str, Any]] = {"n_steps": 3, "learning_rate": 1.0}


def rows(n: int = 60, d: int = 5, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal((n, d))


@given(st.integers(0, 2**32), st.floats(1.5, 8))
@settings(max_examples=25, deadline=None)
def test_affinities_have_their_perplexity(seed: int, perplexity: float) -> None:
    found = compute_affinities(np.random.default_rng(seed).random((4, 12)) * 4, perplexity)
    assert np.allclose(found.sum(axis=1), 1)
    entropy = -(found * np.log(np.maximum(found, 1e-300))).sum(axis=1)
    assert np.allclose(np.exp(entropy), perplexity, rtol=1e-6)


def test_the_gradient_is_that_of_the_divergence() -> None:
    embedding, pull = rows(7, 2), compute_affinities(cdist(rows(1, 3), rows(7, 3, 1), "sqeuclidean"), 3.0)

    def divergence(y: Floats) -> float:
        student = 1 / (1 + ((y - embedding) ** 2).sum(axis=1))
        return float((pull[0] * np.log(pull[0] / (student / student.sum()))).sum())

    y = np.array([0.3, -0.7])
    # t-SNE's 4 is that of a symmetric sum; of one row's divergence it is twice the gradient.
    assert np.allclose(compute_gradient(y[None], embedding, pull)[0], 2 * approx_fprime(y, divergence), rtol=1e-5)


@given(st.integers(0, 2**32), st.floats(1e-3, 1e3), st.floats(-300, 300))
@settings(max_examples=60, deadline=None)
def test_clipped_rows_are_at_most_twice_the_clip_apart(seed: int, clip: float, exponent: float) -> None:
    given_rows = np.random.default_rng(seed).standard_normal((2, 3)) * 10.0 ** (exponent / 2)
    first, second = clip_rows(given_rows, clip)
    assert np.linalg.norm(first - second) <= 2 * clip * (1 + 2.0**-40)
    assert np.array_equal(clip_rows(np.array([[np.nan, 1.0], [np.inf, 0.0]]), clip), np.zeros((2, 2)))


@pytest.mark.parametrize(("epsilon", "steps"), [(1.0, 1), (1.0, 10), (4.0, 50)])
def test_all_steps_together_cost_epsilon(epsilon: float, steps: int) -> None:
    release = DPdSNE(epsilon, n_steps=steps, clip=0.3).fit(rows(20))
    promise = release.guarantee
    assert len(promise.events) == steps
    assert all(noise.sensitivity == pytest.approx(0.6) for noise in release.noises_)
    accountant = PldAccountant()
    for event in promise.events:
        accountant.compose(event)
    assert 0.999 * epsilon < accountant.epsilon(promise.delta - promise.extra_delta) < 1.0001 * epsilon


def test_noise_comes_with_every_step() -> None:
    release = DPdSNE(2.0, n_steps=4, clip=1e-3, learning_rate=1.0).fit(rows(20))
    drawn = np.array([m["embedding"] for m in sample_messages(release, rows()[0], 5000, 0)])
    spread = np.sqrt(sum(noise.scale**2 for noise in release.noises_))
    assert np.allclose(drawn.std(axis=0), spread, rtol=0.05)


def test_without_noise_rows_come_to_their_own_heap() -> None:
    labels = np.arange(90) % 3
    X = 6 * np.eye(5)[labels] + rows(90)
    release = DPdSNE(64.0, n_steps=40).fit(X[:60])
    places = release._prepare(release.features(X))
    nearest = cdist(places[60:], places[:60]).argmin(axis=1)
    assert np.mean(labels[:60][nearest] == labels[60:]) > 0.9


def test_anchors_are_drawn_by_the_public_seed() -> None:
    first, again, other = (DPdSNE(1.0, n_anchors=12, public_seed=seed).fit(rows()) for seed in (1, 1, 2))
    assert first.anchors_.shape == (12, 5)
    assert np.array_equal(first.embedding_, again.embedding_)
    assert first.public_id == again.public_id != other.public_id
    assert not np.array_equal(first.anchors_, other.anchors_)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"n_anchors": 61}, "n_anchors must be at most"),
        ({"n_steps": 0}, "n_steps"),
        ({"clip": 0.0}, "clip"),
        ({"perplexity": 0.5}, "perplexity"),
        ({"learning_rate": -1.0}, "learning_rate"),
        ({"delta": 0.0}, "delta"),
    ],
)
def test_bad_parameters(parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DPdSNE(1.0, **parameters).fit(rows())


def test_too_few_anchors() -> None:
    with pytest.raises(ValueError, match="at least 4 rows"):
        DPdSNE(1.0).fit(rows(3))


def _projector() -> PrivatePCA:
    return PrivatePCA(1.0, n_components=3).fit(rows(200, 6, 9))


@pytest.mark.parametrize(
    ("mechanism", "least"),
    [
        (AnalyticGaussian(64.0), 0.8),
        (RandomProjection(64.0, n_components=32), 0.6),
        (VonMisesFisher(64.0), 0.6),
        (DPdSNE(64.0), 0.3),
        (PrivatePCARelease(_projector()), 0.4),
        (RawFeatures(), 0.999),
        (PlainManifold(), 0.3),
        (PlainLDA(), 0.3),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_all_take_part_in_a_retriever(mechanism: Release, least: float) -> None:
    X, y = rows(400, 6, 1), np.arange(400) % 4
    retriever = Retriever(mechanism, candidates=0.2, code_bytes=None).fit(X[:100], y[:100]).index(X[100:360])
    found = evaluate(retriever, X[360:], k=4, rng=unsafe_seeded(0))
    # By chance it would be 0.2.
    assert found.covered.value >= least
