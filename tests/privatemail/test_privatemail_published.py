"""PrivateMail as published: what each version does, that it is refused, and what its recall is made of."""

import math
import pickle
import sys
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from threadpoolctl import threadpool_limits

from nearveil.mechanisms import Message, MessageError
from nearveil.privacy.noise import add_noise, compute_classical_scale, unsafe_seeded
from nearveil.privatemail.manifold import umeyama
from nearveil.privatemail.mechanism import PrivateMail
from nearveil.privatemail.published import ENGINES
from nearveil.privatemail.sensitivity import published_2022
from studies.data import DataMissingError, load_features
from studies.published import CentredDistances, compose_strongly, find_code_scale, published_2021, step_epsilon
from tests.reference import dense_label_weights, dense_weights, laplacian

VERSIONS = ["2022", "2021", "2022-code"]


def rows_and_labels(n: int = 40, d: int = 5, seed: int = 0) -> tuple[Any, Any]:
    generator = np.random.default_rng(seed)
    return generator.normal(size=(n, d)) + 2, np.arange(n) % 4


def make(version: Any, **setting: Any) -> PrivateMail:
    return PrivateMail(
        **{"epsilon": 1.0, "n_public_steps": 3, "as_published": version, "allow_unsound": True, **setting}
    )


def centred_distances(labels: Any) -> Any:
    """The program's label "Laplacian", dense: degree minus double-centred kernel."""
    n = len(labels)
    J = np.eye(n) - 1 / n
    kernel = -0.5 * J @ np.abs(labels[:, None] - labels[None, :]) @ J
    return np.diag(kernel.sum(axis=0)) - kernel


@pytest.mark.parametrize("version", VERSIONS)
def test_refused_unless_asked_for_and_never_called_sound(version):  # type: ignore[no-untyped-def]
    X, y = rows_and_labels()
    with pytest.raises(ValueError, match="allow_unsound=True"):
        make(version, allow_unsound=False).fit(X, y)
    mail = make(version).fit(X, y)
    promise = mail.guarantee
    assert not promise.sound
    assert "label" in promise.reason
    assert str(promise).startswith("No guarantee")
    assert PrivateMail(1.0).fit(X, y).guarantee.sound


def test_other_versions_name_the_package_that_they_need(monkeypatch):  # type: ignore[no-untyped-def]
    for version in ("2021", "2022-code"):
        monkeypatch.delitem(ENGINES, version)
        monkeypatch.setitem(sys.modules, "studies.published", None)
        with pytest.raises(ImportError, match="studies is not installed: pip install nearveil-studies"):
            make(version).fit(*rows_and_labels())
    assert not make("2022").fit(*rows_and_labels()).guarantee.sound


@pytest.mark.parametrize(("data", "sigma", "alpha"), [("cars196", 6, 0.6), ("cub200", 5, 0.5), ("cifar100", 6, 0.6)])
def test_published_takes_the_parameters_of_table_2(data, sigma, alpha):  # type: ignore[no-untyped-def]
    for version in ("2022", "2022-code"):
        found = PrivateMail.published(version, data).get_params()
        assert (found["bandwidth"], found["label_weight"], found["n_components"]) == (sigma, alpha, 2)
        assert (found["start_scale"], found["n_public_steps"]) == (1e-8, 5)
        assert (found["epsilon"], found["delta"], found["as_published"]) == (0.1, 1e-5, version)
    first = PrivateMail.published("2021", data).get_params()
    assert (first["n_private_steps"], first["n_public_steps"], first["bandwidth"]) == (2, 2, sigma)


def test_published_is_asked_for_twice_and_takes_changes():  # type: ignore[no-untyped-def]
    X, y = rows_and_labels()
    with pytest.raises(ValueError, match="allow_unsound=True"):
        PrivateMail.published("2022").fit(X, y)
    mail = PrivateMail.published("2022-code", "cub200", epsilon=2.0, n_components=3, allow_unsound=True).fit(X, y)
    assert (mail.epsilon, mail.n_components, mail.guarantee.sound) == (2.0, 3, False)
    published: Any = PrivateMail.published
    for asked, changes, words in (
        (("2023",), {}, "version must be one of 2022, 2021, 2022-code"),
        (("2022", "cars"), {}, "data must be one of cars196"),
        (("2022",), {"wide": 1}, "wide"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            published(*asked, **changes)


@given(st.lists(st.integers(0, 50), min_size=2, max_size=20), st.integers(0, 99))
def test_label_laplacian_of_the_program(labels, seed):  # type: ignore[no-untyped-def]
    y = np.array(labels)
    Z = np.random.default_rng(seed).normal(size=(len(y), 2))
    assert np.allclose(CentredDistances(y).laplacian_matmul(Z), centred_distances(y) @ Z, atol=1e-9)


def test_sensitivity_of_the_program():  # type: ignore[no-untyped-def]
    start = np.random.default_rng(0).normal(size=(300, 2))
    setting: Any = {"bandwidth": 6.0, "label_weight": 0.6}
    # c and c^2 are the same for two classes; beyond, the program's bound is the smaller one.
    assert published_2022(start, n_classes=2, **setting, as_programmed=True) == pytest.approx(
        published_2022(start, n_classes=2, **setting), rel=1e-12
    )
    assert published_2022(start, n_classes=98, **setting, as_programmed=True) < 0.96 * published_2022(
        start, n_classes=98, **setting
    )
    assert find_code_scale(3.0, 0.1, 1e-5) == pytest.approx(compute_classical_scale(3.0, 0.1, 1e-5) ** 2, rel=1e-12)
    with pytest.raises(ValueError, match="use a larger bandwidth"):
        published_2022(start, bandwidth=0.3, label_weight=0.6, n_classes=2, as_programmed=True)


@given(st.floats(1e-4, 30), st.integers(1, 20), st.floats(1e-12, 0.99))
def test_strong_composition_is_inverted(total, steps, delta):  # type: ignore[no-untyped-def]
    each = step_epsilon(total, steps, delta)
    by_hand = each * math.sqrt(2 * steps * math.log(1 / delta)) + steps * each * math.expm1(each) / (math.exp(each) + 1)
    assert by_hand == pytest.approx(total, rel=1e-6)
    assert compose_strongly(each, steps, delta) == pytest.approx(total, rel=1e-6)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_client_does_what_the_publication_does(version):  # type: ignore[no-untyped-def]
    X, y = rows_and_labels()
    mail = make(version, n_private_steps=2, bandwidth=3.0, start_scale=1e-3).fit(X, y)
    x, label = X[0] + 1, 2
    features, labels = np.vstack([mail.features(x[None]), mail.features(X)]), np.append(label, y)
    start = np.random.default_rng([0, 0]).normal(scale=1e-3, size=(41, 2))
    start = np.vstack([start[-1:], start[:-1]])
    noise, source = mail._engine.noise(start), unsafe_seeded(5)  # type: ignore[union-attr]
    setting: Any = {"bandwidth": 3.0, "label_weight": 0.6, "n_classes": 4}
    if version == "2021":
        beta = Decimal(10) ** -math.ceil(4 * 2 * 41 / math.log(10))
        assert noise.sensitivity == published_2021(41, 2, 1e-3, beta=beta, **setting)
        assert compose_strongly(noise.sensitivity / noise.scale, 2, 1e-5) == pytest.approx(1.0)
    elif version == "2022":
        assert noise.sensitivity == published_2022(start, **setting)
        assert noise.scale == compute_classical_scale(noise.sensitivity, 1.0, 1e-5)
    else:
        assert noise.sensitivity == published_2022(start, **setting, as_programmed=True)
        assert noise.scale == pytest.approx(compute_classical_scale(noise.sensitivity, 1.0, 1e-5) ** 2, rel=1e-12)
    s = 3 / np.sqrt(2) if version == "2022-code" else 3.0

    def stepped(Z: Any, weights: Any) -> Any:
        encoding = "one-hot" if version == "2021" else "integer"
        L_Y = (
            centred_distances(labels)
            if version == "2022-code"
            else laplacian(dense_label_weights(labels, 3.0, encoding))
        )
        return Z + np.diag(0.5 / weights.sum(axis=1)) @ (0.6 * L_Y - laplacian(weights)) @ Z

    Z = start
    for _ in range(2 if version == "2021" else 1):
        Z = add_noise(stepped(Z, dense_weights(features, s)), noise, source=source)
    rebuilt = dense_weights(Z, s)
    for _ in range(3):
        Z = stepped(Z, rebuilt)
        Z = Z * np.sqrt(41) / np.linalg.norm(Z) if version == "2022-code" else Z
    message = mail.release(x, labels=label, rng=unsafe_seeded(5))
    assert np.allclose(message["embedding"], Z, rtol=1e-7, atol=1e-9 * np.abs(Z).max())


@pytest.mark.parametrize("version", VERSIONS)
def test_the_server_embeds_with_its_labels_and_aligns(version):  # type: ignore[no-untyped-def]
    X, y = rows_and_labels()
    G, g = rows_and_labels(30, seed=1)
    mail = make(version, bandwidth=3.0, start_scale=1e-3).fit(X, y)
    message = mail.release(X[0] + 1, labels=2, rng=unsafe_seeded(5))
    rows, labels = np.vstack([mail.features(G), mail.features(X)]), np.concatenate([g, y])
    Z = np.random.default_rng([0, 1]).normal(scale=1e-3, size=(70, 2))
    weights = dense_weights(rows, 3 / np.sqrt(2) if version == "2022-code" else 3.0)
    for _ in range(4 if version == "2021" else 3):
        encoding = "one-hot" if version == "2021" else "integer"
        L_Y = (
            centred_distances(labels)
            if version == "2022-code"
            else laplacian(dense_label_weights(labels, 3.0, encoding))
        )
        Z = Z + np.diag(0.5 / weights.sum(axis=1)) @ (0.6 * L_Y - laplacian(weights)) @ Z
        Z = Z * np.sqrt(70) / np.linalg.norm(Z) if version == "2022-code" else Z
    target = umeyama(message["embedding"][1:], Z[30:]).apply(message["embedding"][0])
    distances = np.linalg.norm(Z[:30] - target, axis=1)
    assert np.allclose(mail.rank_each(message, G, g)[0], -distances, rtol=1e-4, atol=1e-4 * distances.max())


@pytest.mark.parametrize("version", VERSIONS)
def test_the_label_is_in_what_comes_out(version):  # type: ignore[no-untyped-def]
    X, y = rows_and_labels()
    mail = make(version, start_scale=1e-8).fit(X, y)
    before = pickle.dumps(mail)
    first, again, other = (mail.release(X[0] + 1, labels=y0, rng=unsafe_seeded(1)) for y0 in (0, 0, 3))
    assert first == again
    assert not np.allclose(first["embedding"][0], other["embedding"][0], rtol=1e-3, atol=0)
    assert first.seeded
    assert pickle.dumps(mail) == before
    assert first.public_id != PrivateMail(1.0).fit(X, y).public_id


def test_dummies_of_the_2022_paper_leave_out_the_targets_class():  # type: ignore[no-untyped-def]
    X, y = rows_and_labels()
    mail = make("2022", start_scale=1e-3).fit(X, y)
    client = mail.with_dummies(*rows_and_labels(12, seed=2))
    messages, positions = client.release_with_position(np.tile(X[0] + 1, (60, 1)), labels=np.full(60, 1))
    assert {m["embedding"].shape for m in messages} == {(44, 2)}
    assert set(positions) == {0, 1, 2, 3}
    assert mail.rank_each(messages[0], X, y).shape == (4, 40)


def test_bad_calls():  # type: ignore[no-untyped-def]
    X, y = rows_and_labels()
    mail = make("2022-code").fit(X, y)
    message = mail.release(X[0], labels=1)
    flat = np.vstack([X, mail.mean_])
    for call, words in (
        (lambda: make("2022").fit(X), "public_y must label every row"),
        (lambda: make("2022").fit(X, y - 1), "public_y must label every row"),
        (lambda: mail.release(X[0]), "labels must be given"),
        (lambda: mail.release(X[0], labels=-1), "labels must be numbered from 0"),
        (lambda: mail.release(X[:2], labels=[1]), "labels must hold one label"),
        (lambda: mail.release(X[0], labels="car"), "labels must be integers"),
        (lambda: mail.rank(message, X), "gallery_labels must be given"),
        (lambda: mail.rank_each(message, X, y - 1), "gallery_labels must be numbered"),
        (lambda: mail.rank_each(message, flat, np.append(y, 0)), "gallery must not hold a row that equals"),
        (lambda: mail.continue_embedding(message, 1), "target's own label"),
        (lambda: mail.with_dummies(X, y).release(X[0], labels=1), "dummies are no part"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    for rows in (np.zeros((40, 2)), np.zeros((41, 3))):
        with pytest.raises(MessageError):
            mail.rank_each(Message(message.mechanism, message.public_id, {"embedding": rows}), X, y)


def test_recall_of_the_program_is_the_label():  # type: ignore[no-untyped-def]
    """Cars196 at nominal epsilon 0.01: 0.84 with the true label, whatever the features; 0.05 with a random one.

    For the default start. The figure moves with the start: 0.875 on average over 16 runs, with a standard
    deviation of 0.04, so that not every start is within 0.05 of 0.84.
    """
    try:
        cars = load_features("cars196_cropped_lite0")
    except DataMissingError as missing:
        pytest.skip(str(missing))
    generator = np.random.default_rng(0)
    public = generator.permutation(np.flatnonzero(cars.labels < 98))[:1000]
    own = generator.permutation(np.flatnonzero(cars.labels >= 98))[:4000]
    gallery, labels = cars.features[own], cars.labels[own] - 98
    setting: Any = {"epsilon": 0.01, "bandwidth": 6.0, "start_scale": 1e-8, "n_public_steps": 5}
    mail = make("2022-code", **setting).fit(cars.features[public], cars.labels[public])
    server = mail.embed_gallery(gallery, labels)
    asked = generator.choice(4000, 150, replace=False)

    def recall(features: Any, told: Any) -> float:
        hits = []
        with threadpool_limits(1):  # small products: threads would only wait for each other
            messages = mail.release(features, labels=told, rng=unsafe_seeded(0))
        for position, message in zip(asked, messages, strict=True):
            scores = mail.rank_each(message, server)[0]
            scores[position] = -np.inf  # an item is not its own answer
            hits.append(labels[position] in labels[np.argsort(-scores)[:8]])
        return float(np.mean(hits))

    assert recall(gallery[asked], labels[asked]) == pytest.approx(0.84, abs=0.05)
    assert recall(generator.normal(size=(150, 1280)), labels[asked]) == pytest.approx(0.85, abs=0.05)
    assert recall(gallery[asked], generator.integers(0, 98, 150)) == pytest.approx(0.05, abs=0.05)
