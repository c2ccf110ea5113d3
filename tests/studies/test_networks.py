"""The networks of the supplement's tables 1 and 2."""

import builtins
import pickle
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.utils import get_tags

from nearveil.privacy.noise import unsafe_seeded
from nearveil.private_knn import PrivateKNeighborsClassifier, Student
from studies.networks import NetworkStudent, _compute_loss, augment, build_network

torch = pytest.importorskip("torch", reason="torch is not installed (the extra `torch`)")

DIGITS, Y = load_digits(return_X_y=True)
IMAGES = np.kron((DIGITS / 16).reshape(-1, 8, 8), np.ones((2, 2))).astype(np.float32)  # 16 x 16
QUICK: dict[str, Any] = {"epochs": 4, "batch_size": 64, "device": "cpu", "random_state": 0}


def test_table_1() -> None:
    network = build_network("mnist", (1, 28, 28), 10)
    assert [tuple(weight.shape) for weight in network.parameters() if weight.ndim > 1] == [
        (64, 1, 5, 5),
        (128, 64, 5, 5),
        (384, 2048),
        (192, 384),
        (10, 192),
    ]


def test_table_2() -> None:
    network = build_network("svhn", (3, 32, 32), 10)
    shapes = [tuple(weight.shape) for weight in network.parameters() if weight.ndim > 1]
    assert [(shape[0], shape[2]) for shape in shapes[:7]] == [(96, 3)] * 3 + [(192, 3)] * 3 + [(192, 5)]
    assert [shape[0] for shape in shapes[7:]] == [192, 192, 10]


@pytest.fixture(scope="module")
def trained() -> NetworkStudent:
    """Trained on labels a fifth of which are wrong."""
    rng = np.random.default_rng(0)
    wrong = rng.random(800) < 0.2
    labels = np.where(wrong, rng.integers(0, 10, 800), Y[:800])
    network = NetworkStudent(**(QUICK | {"epochs": 8}))
    network.fit(IMAGES[:800], labels)
    return network


def test_wrong_labels_are_outvoted(trained: NetworkStudent) -> None:
    assert trained.score(IMAGES[1200:], Y[1200:]) > 0.88


def test_probabilities_and_features(trained: NetworkStudent) -> None:
    chances = trained.predict_proba(IMAGES[:50])
    assert chances.sum(axis=1) == pytest.approx(1, abs=1e-5)
    assert np.array_equal(trained.classes_[chances.argmax(axis=1)], trained.predict(IMAGES[:50]))
    features = trained.transform(IMAGES[:50])
    head = trained._network[1]
    logits = features @ head.weight.detach().numpy().T + head.bias.detach().numpy()
    assert np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True) == pytest.approx(chances, abs=1e-5)


def test_uint8_and_floats_are_the_same_images(trained: NetworkStudent) -> None:
    grey = np.rint(255 * IMAGES[:9]).astype(np.uint8)
    assert trained.predict_proba(grey) == pytest.approx(trained.predict_proba(grey / 255), abs=1e-5)


def test_it_can_be_stored(trained: NetworkStudent) -> None:
    loaded = pickle.loads(pickle.dumps(trained))  # noqa: S301
    assert np.array_equal(loaded.predict(IMAGES[:99]), trained.predict(IMAGES[:99]))


def test_a_seed_fixes_the_network_and_leaves_the_worlds_seed_alone() -> None:
    before = torch.get_rng_state()
    threads = torch.get_num_threads()
    one, other = (NetworkStudent(**(QUICK | {"epochs": 1})).fit(IMAGES[:200], Y[:200]) for _ in range(2))
    assert np.array_equal(one.transform(IMAGES[:20]), other.transform(IMAGES[:20]))
    one.transform(IMAGES[:1])
    assert torch.equal(before, torch.get_rng_state())
    assert torch.get_num_threads() == threads
    different = NetworkStudent(**(QUICK | {"epochs": 1, "random_state": 1})).fit(IMAGES[:200], Y[:200])
    assert not np.array_equal(one.transform(IMAGES[:20]), different.transform(IMAGES[:20]))


def test_images_without_labels_do_no_harm() -> None:
    two = np.flatnonzero(np.isin(Y, [0, 1]))
    X, labels = IMAGES[two], Y[two]
    network = NetworkStudent(**(QUICK | {"epochs": 10})).fit(X[:20], labels[:20], unlabeled=X[20:250])
    assert network.score(X[250:], labels[250:]) > 0.95


def test_an_image_counts_once_the_network_is_sure() -> None:
    out = torch.zeros((3, 4), requires_grad=True)
    estimates = torch.tensor([[0.7, 0.1, 0.1, 0.1], [0.3, 0.3, 0.2, 0.2], [0.1, 0.1, 0.1, 0.7]])
    _compute_loss(torch, out, estimates, torch.tensor([True, False, True]), decided=True).backward()
    assert not out.grad[1].any()
    assert out.grad.argmin(dim=1)[[0, 2]].tolist() == [0, 3]  # towards the largest opinion


def test_variations_are_small_and_keep_the_shape() -> None:
    images = torch.from_numpy(IMAGES[:64])[:, None]
    assert torch.allclose(augment(torch, images, 0.0), images, atol=1e-5)
    varied = augment(torch, images, 1.0)
    assert varied.shape == images.shape
    assert not torch.allclose(varied, images, atol=0.1)
    mirrored = torch.flip(images, dims=[3])
    assert (varied - images).square().mean() < (varied - mirrored).square().mean()


def test_as_the_student_of_private_votes() -> None:
    voter = PrivateKNeighborsClassifier(
        epsilon=40.0, max_answered=60, max_screened=0, classes=range(10), source=unsafe_seeded(0)
    )
    network = NetworkStudent(**(QUICK | {"epochs": 5, "random_state": None}))
    student = Student(
        voter,
        network,
        features=lambda images: images.reshape(len(images), -1),
        rounds=2,
        self_training=0,
        random_state=0,
    )
    student.fit(IMAGES[:500], Y[:500], IMAGES[500:1200])
    assert student.score(IMAGES[1200:], Y[1200:]) > 0.6  # by chance 0.1
    assert student.guarantee.epsilon <= 40.0
    assert get_tags(network).input_tags.three_d_array


@pytest.mark.parametrize(
    ("X", "labels", "message"),
    [
        (DIGITS[:20], Y[:20], "X must hold images"),
        (IMAGES[:0], Y[:0], "X must hold images"),
        (IMAGES[:20] * 20, Y[:20], "uint8, or floats from 0 to 1"),
        (IMAGES[:20] * np.nan, Y[:20], "uint8, or floats from 0 to 1"),
        (IMAGES[:20], Y[:19], "one label for each image"),
        (IMAGES[:20], np.zeros(20), "at least two classes"),
    ],
)
def test_bad_images(X: Any, labels: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NetworkStudent(**QUICK).fit(X, labels)


def test_shapes_must_agree(trained: NetworkStudent) -> None:
    with pytest.raises(ValueError, match="X must hold images of the shape"):
        trained.predict(IMAGES[:3, :12])
    with pytest.raises(ValueError, match="unlabeled must hold images of the same shape"):
        NetworkStudent(**QUICK).fit(IMAGES[:20], Y[:20], unlabeled=IMAGES[:3, :12])


def test_parameters() -> None:
    with pytest.raises(ValueError, match="'architecture' parameter"):
        NetworkStudent("lenet").fit(IMAGES[:20], Y[:20])
    assert clone(NetworkStudent("svhn", epochs=3)).get_params()["epochs"] == 3


def test_without_torch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **named: Any) -> Any:
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'")
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ModuleNotFoundError, match=r"nearveil\[torch\]"):
        NetworkStudent(**QUICK).fit(IMAGES[:20], Y[:20])
