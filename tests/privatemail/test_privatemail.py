"""The sound PrivateMail: attacked by sampling, compared with the dense query, continued by others."""

import pickle
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from nearveil.mechanisms import Message, MessageError
from nearveil.privacy.accounting import PldAccountant
from nearveil.privacy.noise import choose_gaussian_grid, unsafe_seeded
from nearveil.privatemail.engines import bound_sensitivities, compute_averages, take_private_steps
from nearveil.privatemail.mechanism import PrivateMail
from nearveil.privatemail.sensitivity import target_only
from studies.all_rows import bound_all_rows
from tests.mechanisms.conformance import Contract, Floats, sample_messages
from tests.reference import dense_label_weights, dense_step, dense_weights


def exact(mail: PrivateMail, rows: Floats) -> Floats:
    """Where the private steps put rows without noise."""
    engine: Any = mail._engine
    return take_private_steps(engine.public, compute_averages(engine.public, mail.features(rows)))


def quiet(mail: PrivateMail) -> PrivateMail:
    """The same with next to no noise, to see what is underneath."""
    engine: Any = mail._engine
    (noise,) = engine.noises
    small = noise.sensitivity * 1e-6
    quieter = replace(noise, scale=small, grid=choose_gaussian_grid(small, 2))
    mail.__dict__["_engine"] = replace(engine, noises=(quieter,))
    return mail


def far_pair(mail: PrivateMail, dimension: int) -> tuple[Floats, Floats]:
    """Two unit directions whose targets land as far apart as a search finds."""
    rows = np.random.default_rng(1).standard_normal((600, dimension))
    rows = mail.mean_ + rows / np.linalg.norm(rows, axis=1, keepdims=True)
    apart = np.linalg.norm(exact(mail, rows)[:, None] - exact(mail, rows)[None], axis=2)
    return tuple(rows[i] for i in np.unravel_index(np.argmax(apart), apart.shape))


class _Mail(Contract):
    samples = 30_000
    setting: ClassVar[dict[str, Any]] = {}

    def public(self) -> tuple[Floats, Any]:
        # Two opposite anchors attain the bound, so the attack can find nearly all of epsilon.
        return np.array([[3.0, 0, 0], [-3.0, 0, 0]]) + 7, np.array([0, 1])

    def make(self, epsilon: float) -> PrivateMail:
        return PrivateMail(epsilon, **{"bandwidth": 1.0, "n_components": 1, **self.setting})

    def pairs(self, release: Any) -> list[tuple[Floats, Floats]]:
        return [far_pair(release, self.dimension)]


class TestGaussian(_Mail):
    # A large delta, so that 30,000 samples see the events that decide.
    setting: ClassVar[dict[str, Any]] = {"delta": 0.05}

    def statistic(self, release: Any, messages: list[Message], x: Floats, other: Floats) -> Floats:
        gap = exact(release, x[None]) - exact(release, other[None])
        return np.asarray(np.array([message["released"][0] for message in messages]) @ gap[0])


class TestLaplace(_Mail):
    setting: ClassVar[dict[str, Any]] = {"noise": "laplace"}

    def statistic(self, release: Any, messages: list[Message], x: Floats, other: Floats) -> Floats:
        rows = np.array([message["released"][0] for message in messages])
        losses = np.abs(rows - exact(release, other[None])) - np.abs(rows - exact(release, x[None]))
        return np.asarray(losses.sum(axis=1))


class TestTwoPrivateSteps(_Mail):
    setting: ClassVar[dict[str, Any]] = {"delta": 0.05, "n_private_steps": 2}
    power = 0.4  # the message holds the last row alone: less than the two that were paid for
    statistic = TestGaussian.statistic


class TestPublicSteps(_Mail):
    """Steps after the release show no more; resuming and ranking work from the message."""

    samples = 5_000
    power = 0.0
    setting: ClassVar[dict[str, Any]] = {"delta": 0.05, "n_public_steps": 3, "n_components": 2}
    statistic = TestGaussian.statistic

    def public(self) -> tuple[Floats, Any]:
        return np.vstack([np.eye(3), -np.eye(3)]) * [3, 1, 1] + 7, np.array([0, 0, 1, 1, 2, 2])


def rows_and_labels(n: int = 40, d: int = 5, seed: int = 0) -> tuple[Floats, Any]:
    generator = np.random.default_rng(seed)
    return generator.normal(size=(n, d)) + 2, generator.integers(0, 4, n)


@given(st.integers(0, 10**6), st.floats(0.3, 8), st.floats(0, 2), st.integers(1, 3), st.integers(1, 4))
@settings(max_examples=25, deadline=None)
def test_the_row_is_the_querys(seed, bandwidth, weight, steps, k):  # type: ignore[no-untyped-def]
    X, y = rows_and_labels(seed=seed)
    setting: Any = {"bandwidth": bandwidth, "label_weight": weight, "n_private_steps": steps, "n_components": k}
    mail = PrivateMail(1.0, **setting).fit(X, y)
    x = X[:1] + 1
    public = mail._engine.public  # type: ignore[union-attr]
    Z = np.vstack([public.start, public.embeddings[0]])
    features, labels = np.vstack([mail.features(x), mail.features(X)]), np.concatenate([[-1], y])
    weights, label_weights = dense_weights(features, bandwidth), dense_label_weights(labels, bandwidth)
    for step in range(steps):
        moved = dense_step(Z, weights, label_weights, weight)
        # The anchors move among themselves: the target pulls at none of them.
        alone = dense_step(Z[1:], weights[1:, 1:], label_weights[1:, 1:], weight)
        assert np.allclose(public.embeddings[step + 1], alone, rtol=1e-9, atol=1e-12)
        Z = np.vstack([moved[:1], alone])
    assert np.allclose(exact(mail, x)[0], Z[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("noise", "norm"), [("gaussian", "l2"), ("laplace", "l1")])
def test_noise_is_that_of_the_smallest_bound_and_of_public_things_alone(noise, norm):  # type: ignore[no-untyped-def]
    X, y = rows_and_labels()
    mail = PrivateMail(2.0, noise=noise, bandwidth=2.0).fit(X, y)
    public, (spec,) = mail._engine.public, mail.noises_  # type: ignore[union-attr]
    start = np.vstack([public.start, public.embeddings[0]])
    setting: Any = {"bandwidth": 2.0, "norm": norm}
    bound = target_only(mail.features(X), start, **setting)
    assert bound < spec.sensitivity < bound * (1 + 1e-9)  # and what rounding may add
    assert spec.sensitivity < bound_all_rows(mail.features(X), y, start, label_weight=0.6, **setting)
    released = np.array([m["released"][0] for m in sample_messages(mail, X[0], 20_000, 0)])
    spread = spec.scale * (1 if noise == "gaussian" else np.sqrt(2))
    assert np.allclose(released.std(axis=0), spread, rtol=0.03)
    assert np.allclose(released.mean(axis=0), exact(mail, X[:1])[0], atol=5 * spread / np.sqrt(20_000))
    noised = (released - public.start / 2) / spec.grid  # what is private, with its noise, lies on the grid
    assert np.allclose(noised, np.rint(noised), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("epsilon", "steps"), [(0.5, 2), (2.0, 3)])
def test_private_steps_cost_what_the_accountant_says(epsilon, steps):  # type: ignore[no-untyped-def]
    mail = PrivateMail(epsilon, n_private_steps=steps).fit(*rows_and_labels())
    promise = mail.guarantee
    assert len(promise.events) == steps
    accountant = PldAccountant()
    for event in promise.events:
        accountant.compose(event)
    spent = accountant.epsilon(promise.delta - promise.extra_delta)
    assert 0.999 * epsilon < spent < 1.0001 * epsilon
    pure = PrivateMail(epsilon, noise="laplace", n_private_steps=steps).fit(*rows_and_labels())
    assert sum(1 / event.noise_multiplier for event in pure.guarantee.events) == pytest.approx(epsilon, rel=1e-9)
    assert pure.guarantee.delta == pure.guarantee.extra_delta < 1e-28


def test_the_bound_does_not_depend_on_where_the_noisy_row_is():  # type: ignore[no-untyped-def]
    mail = PrivateMail(1.0, n_private_steps=3, bandwidth=1.0).fit(*rows_and_labels())
    public = mail._engine.public  # type: ignore[union-attr]
    known = [noise.sensitivity for noise in mail.noises_]
    elsewhere = bound_sensitivities(replace(public, start=public.start + np.array([1e3, -50])), "gaussian")
    assert np.allclose(elsewhere, known, rtol=1e-7)
    assert len(set(known)) == 3


@pytest.mark.parametrize("bandwidth", [0.06, 1.0, 6.0, 1e8])
@pytest.mark.parametrize("norm", ["l2", "l1"])
def test_rounding_stays_within_what_is_paid_for_it(bandwidth, norm):  # type: ignore[no-untyped-def]
    X, y = rows_and_labels(300)
    mail = PrivateMail(1.0, bandwidth=bandwidth, noise="gaussian" if norm == "l2" else "laplace").fit(X, y)
    public: Any = mail._engine.public  # type: ignore[union-attr]
    start = np.vstack([public.start, public.embeddings[0]])
    paid = (mail.noises_[0].sensitivity - target_only(public.anchors, start, bandwidth=bandwidth, norm=norm)) / 2
    targets = rows_and_labels(200, seed=1)[0]
    exponents = mail.features(targets).astype(np.longdouble) @ public.anchors.T.astype(np.longdouble) / bandwidth**2
    weights = np.exp(exponents - exponents.max(axis=1, keepdims=True))
    rows = (public.start + weights @ public.embeddings[0] / weights.sum(axis=1, keepdims=True)) / 2
    off = np.linalg.norm((exact(mail, targets) - rows).astype(float), ord=2 if norm == "l2" else 1, axis=1)
    assert 0 < off.max() <= paid


def test_start_scale_and_labels_change_nothing_but_the_unit():  # type: ignore[no-untyped-def]
    X, y = rows_and_labels()
    setting: Any = {"bandwidth": 1.0}
    one, four = (PrivateMail(1.0, start_scale=scale, **setting).fit(X, y) for scale in (1.0, 4.0))
    unlabelled = PrivateMail(1.0, **setting).fit(X)
    first, scaled, other = (m.release(X[0] + 1, rng=unsafe_seeded(4))["released"] for m in (one, four, unlabelled))
    assert np.array_equal(4 * first, scaled)
    assert np.array_equal(first, other)


@pytest.mark.parametrize("dummies", [False, True])
def test_public_steps_are_the_querys_on_the_released_embedding(dummies):  # type: ignore[no-untyped-def]
    X, y = rows_and_labels()
    mail = PrivateMail(1.0, bandwidth=1.5).fit(X, y)
    client = mail.with_dummies(*rows_and_labels(seed=3)) if dummies else mail
    message = client.release(X[0] + 1, rng=unsafe_seeded(0))
    released, anchors = message["released"], mail._engine.public.embeddings[-1]  # type: ignore[union-attr]
    assert released.shape == (5 if dummies else 1, 2)
    continued = mail.continue_embedding(message, 4)
    assert np.array_equal(continued["released"], released)
    assert continued["steps"] == 4
    label_weights = dense_label_weights(np.append(-1, y), 1.5)
    for row, found in zip(released, continued["embedding"], strict=True):
        Z = np.vstack([row, anchors])
        weights = dense_weights(Z, 1.5)  # rebuilt once, from what was released
        for _ in range(4):
            own = dense_step(Z, weights, label_weights, 0.6)[:1]
            alone = dense_step(Z[1:], weights[1:, 1:], label_weights[1:, 1:], 0.6)  # nobody pulls at the anchors
            Z = np.vstack([own, alone]) * np.sqrt(len(anchors)) / np.linalg.norm(alone)
        assert np.allclose(found, Z[0], rtol=1e-9, atol=1e-12)


def test_anybody_resumes_from_bytes():  # type: ignore[no-untyped-def]
    X, y = rows_and_labels()
    setting: Any = {"bandwidth": 1.0}
    client = PrivateMail(1.0, n_public_steps=5, **setting).fit(X, y)
    other = PrivateMail(3.0, noise="laplace", **setting).fit(X, y)  # who continues need not know the noise
    whole = client.release(X[0] + 1, rng=unsafe_seeded(2))
    start = PrivateMail(1.0, **setting).fit(X, y).release(X[0] + 1, rng=unsafe_seeded(2))
    for split in (0, 2, 5):
        there = other.continue_embedding(Message.from_bytes(start.to_bytes()), split)
        back = client.continue_embedding(Message.from_bytes(there.to_bytes()), 5 - split)
        assert back.seeded
        assert back["steps"] == 5
        assert np.allclose(back["embedding"], whole["embedding"], rtol=1e-12, atol=1e-14)
        assert np.allclose(other.rank(back, X), client.rank(whole, X), rtol=1e-9)
    batch = client.release(np.stack([X[0] + 1, X[1]]), rng=unsafe_seeded(2))
    first = {"released": batch[1]["released"], "embedding": batch[1]["released"], "steps": np.array(0)}
    again = other.continue_embedding(Message(batch[1].mechanism, batch[1].public_id, first), 5)
    assert np.allclose(again["embedding"], batch[1]["embedding"], rtol=1e-12)


@pytest.mark.parametrize("bandwidth", [0.06, 0.3, 6.0])
def test_rows_out_of_reach_stay_and_nothing_overflows(bandwidth):  # type: ignore[no-untyped-def]
    X, y = rows_and_labels()
    mail = PrivateMail(1.0, bandwidth=bandwidth, label_weight=5.0).fit(X, y)
    message = mail.release(X[0])
    far = np.array([[1e6, 0.0]])
    lost = Message(message.mechanism, message.public_id, {"released": far, "embedding": far, "steps": np.array(0)})
    continued = mail.continue_embedding(lost, 100)
    assert continued["embedding"][0, 1] == 0
    assert np.isfinite(mail.rank(continued, X)).all()


@pytest.mark.parametrize("steps", [0, 3])
def test_with_little_noise_the_nearest_item_is_the_target(steps):  # type: ignore[no-untyped-def]
    X, y = rows_and_labels(60)
    mail = quiet(PrivateMail(1.0, bandwidth=1.0, n_components=5, n_public_steps=steps).fit(X, y))
    gallery = rows_and_labels(100, seed=9)[0]
    messages = mail.release(gallery[:50], rng=unsafe_seeded(0))
    first = [int(np.argmax(mail.rank(message, gallery))) for message in messages]
    assert first == list(range(50))


def test_the_server_aligns_on_the_anchors():  # type: ignore[no-untyped-def]
    X, y = rows_and_labels()
    mail = PrivateMail(2.0, bandwidth=1.0, n_public_steps=2).fit(X, y)
    message = mail.release(X[0] + 1)
    embedded = mail.embed_gallery(X)
    assert np.array_equal(mail.rank_each(message, embedded)[0], mail.rank(message, X))
    # A server whose own embedding is turned, stretched and elsewhere sees the same, in its unit.
    turn = 3 * np.array([[0.6, -0.8], [0.8, 0.6]])
    elsewhere = replace(embedded, gallery=embedded.gallery @ turn + 5, anchors=embedded.anchors @ turn + 5)
    assert np.allclose(mail.rank_each(message, elsewhere), 3 * mail.rank_each(message, embedded), rtol=1e-9)
    with pytest.raises(MessageError, match="3 public steps"):
        mail.rank_each(mail.continue_embedding(message, 1), embedded)


def test_dummies_are_sent_alike_in_an_order_that_tells_nothing():  # type: ignore[no-untyped-def]
    X, y = rows_and_labels(60)
    rows, labels = rows_and_labels(30, seed=5)
    server = quiet(PrivateMail(1.0, bandwidth=0.7, n_components=5).fit(X, y))
    client = server.with_dummies(rows, labels)
    target = rows_and_labels(1, seed=8)[0][0]
    messages, positions = client.release_with_position(np.tile(target, (4000, 1)), rng=unsafe_seeded(1))
    assert messages[0]["released"].shape == (5, 5)
    assert set(messages[0].arrays) == {"embedding", "released", "steps"}
    assert chisquare(np.bincount(positions, minlength=5)).pvalue > 1e-6
    # Who is nearest to what: the target at its position, at the others one dummy of each class.
    noisy, exactly = np.array([m["released"] for m in messages[:200]]), exact(server, np.vstack([target, rows]))
    found = np.argmin(np.linalg.norm(noisy[:, :, None] - exactly, axis=3), axis=2)
    assert np.all(found[np.arange(200), positions[:200]] == 0)
    classes = np.concatenate([[-1], labels])[found]
    assert np.array_equal(np.sort(classes, axis=1), np.tile([-1, 0, 1, 2, 3], (200, 1)))
    assert len(np.unique(found)) == 31  # drawn afresh

    gallery = np.vstack([rows_and_labels(50, seed=9)[0], target])
    message, position = client.release_with_position(target, rng=unsafe_seeded(3))
    scores = server.rank_each(message, gallery)
    assert scores.shape == (5, 51)
    assert np.argmax(scores[position]) == 50
    assert np.array_equal(server.rank(message, gallery), scores.max(axis=0))
    honest = PrivateMail(1.0, bandwidth=0.7, n_components=5).fit(X, y)
    assert honest.with_dummies(rows, labels).guarantee == honest.guarantee
    assert client.public_id == server.public_id
    assert server.release(target)["released"].shape == (1, 5)


def test_public_rows_without_direction_are_left_out():  # type: ignore[no-untyped-def]
    X, y = rows_and_labels(10)
    X, y = np.vstack([X, X.mean(axis=0)]), np.append(y, 0)
    mail = PrivateMail(1.0).fit(X, y)
    left_out = ~mail.features(X, lenient=True).any(axis=1)
    assert len(mail._engine.public.anchors) == 11 - left_out.sum()  # type: ignore[union-attr]
    assert np.isfinite(mail.rank(mail.release(X[0]), X)).all()


def test_anchors_are_drawn_by_the_public_seed():  # type: ignore[no-untyped-def]
    X, y = rows_and_labels()
    first, again, other = (PrivateMail(1.0, n_anchors=9, public_seed=seed).fit(X, y) for seed in (1, 1, 2))
    anchors = [mail._engine.public.anchors for mail in (first, again, other)]  # type: ignore[union-attr]
    assert anchors[0].shape == (9, 5)
    assert np.array_equal(anchors[0], anchors[1])
    assert not np.array_equal(anchors[0], anchors[2])
    assert pickle.dumps(first) == pickle.dumps(again)
    with pytest.raises(MessageError, match="other public rows"):
        other.rank(first.release(X[0]), X)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"epsilon": 65.0}, "epsilon"),
        ({"epsilon": 1e-9}, "epsilon"),
        ({"delta": 0.0}, "delta"),
        ({"delta": 1.0}, "delta"),
        ({"noise": "uniform"}, "noise"),
        ({"n_components": 0}, "n_components"),
        ({"n_components": 40}, "more than n_components=40 rows"),
        ({"bandwidth": 0.0}, "bandwidth"),
        ({"bandwidth": float("nan")}, "bandwidth"),
        ({"label_weight": -0.1}, "label_weight"),
        ({"n_private_steps": 0}, "n_private_steps"),
        ({"n_public_steps": -1}, "n_public_steps"),
        ({"n_public_steps": 101}, "n_public_steps"),
        ({"start_scale": 0.0}, "start_scale"),
        ({"label_encoding": "names"}, "label_encoding"),
        ({"n_anchors": 1}, "n_anchors"),
        ({"n_anchors": 41}, "n_anchors must be at most"),
        ({"public_seed": -1}, "public_seed"),
        ({"as_published": "2020"}, "as_published"),
    ],
)
def test_bad_parameters(setting, words):  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=words):
        PrivateMail(**{"epsilon": 1.0, **setting}).fit(*rows_and_labels())


def test_bad_calls():  # type: ignore[no-untyped-def]
    X, y = rows_and_labels()
    mail = PrivateMail(1.0).fit(X, y)
    message = mail.release(X[0])
    for call, words in (
        (lambda: mail.release(X[0], labels=1), "labels must not be given"),
        (lambda: mail.rank_each(message, X, y), "gallery_labels must not be given"),
        (lambda: PrivateMail(1.0).fit(X, y - 3), "public_y must hold labels from 0"),
        (lambda: PrivateMail(1.0).fit(np.tile(X[0], (5, 1))), "rows that differ from their mean"),
        (lambda: mail.continue_embedding(message, -1), "steps must be"),
        (lambda: mail.continue_embedding(message, True), "steps must be"),
        (
            lambda: mail.continue_embedding(message, 1.5),  # type: ignore[arg-type]
            "steps must be",
        ),
        (lambda: mail.embed_gallery(X, steps=101), "steps must be"),
        (lambda: mail.continue_embedding(mail.continue_embedding(message, 60), 60), "beyond 100"),
        (lambda: mail.with_dummies(X, y[:3]), "labels must hold one label"),
        (lambda: mail.with_dummies(np.full((2, 5), np.nan), [0, 1]), "rows must be finite"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def test_messages_that_lie_are_refused():  # type: ignore[no-untyped-def]
    X, y = rows_and_labels()
    mail = PrivateMail(1.0, n_public_steps=1).fit(X, y)
    message = mail.release(X[0])
    for wrong in (
        {"steps": np.array(101)},
        {"steps": np.array(-1)},
        {"steps": np.array(1.0)},
        {"released": np.zeros((2, 2))},
        {"released": np.zeros((0, 2))},
        {"released": np.zeros((1, 2), dtype=np.float32)},
        {"embedding": np.zeros((2, 2))},
        {"embedding": np.zeros((1, 3))},
        {"released": np.zeros((20_000, 2)), "embedding": np.zeros((20_000, 2))},
    ):
        with pytest.raises(MessageError):
            mail.rank(Message(message.mechanism, message.public_id, {**message.arrays, **wrong}), X)
