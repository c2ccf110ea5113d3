"""The study of students in miniature: small digits stand for MNIST and SVHN."""

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

from nearveil.privacy.events import NoisyScreening
from studies import accounting, private_knn
from studies._report import write
from studies._study import mean, run
from studies.data import CachedFeatures, DataMissingError, extract_digit_features, load_digit_images, straighten

pytestmark = pytest.mark.usefixtures("quick_figures")

pytest.importorskip("skimage", reason="scikit-image is not installed (the extra `images`)")

PRIVATE, HELD = 400, 60


@pytest.fixture
def few_digits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    X, y = load_digits(return_X_y=True)
    images = np.kron(X.reshape(-1, 8, 8) / 16 * 255, np.ones((3, 3))).astype(np.uint8)[:600]
    images = np.pad(images, ((0, 0), (2, 2), (2, 2)))
    for folder, shown in (("mnist", images), ("svhn_digits", np.repeat(images[..., None], 3, axis=3))):
        (tmp_path / folder).mkdir()
        parts = {
            "x_train": shown[:PRIVATE],
            "y_train": y[:PRIVATE],
            "x_test": shown[PRIVATE:],
            "y_test": y[PRIVATE:600],
        }
        np.savez(tmp_path / folder / f"{folder}.npz", **parts)
    monkeypatch.setenv("NEARVEIL_DATA", str(tmp_path))
    monkeypatch.setattr(private_knn, "HELD", HELD)
    monkeypatch.setattr(private_knn, "SEEDS", (0, 1))
    monkeypatch.setattr(private_knn, "ANSWERS", 60)
    monkeypatch.setattr(private_knn, "SCREENED", (40,))
    monkeypatch.setattr(private_knn, "RATES", (0.5, 0.8))
    monkeypatch.setattr(private_knn, "EPSILONS", {"mnist": (0.05, 40.0), "svhn": (40.0,)})
    monkeypatch.setattr(private_knn, "TEACHERS", {"mnist": 20, "svhn": 10})
    pate = {"threshold": 20, "screening_noise": 10, "vote_noise": 5, "max_screened": 60, "max_answered": 40}
    monkeypatch.setattr(private_knn, "PATE_PUBLISHED", dict.fromkeys(("mnist", "svhn"), pate))
    make_pate = private_knn.make_pate  # teachers of few digits are few
    monkeypatch.setattr(private_knn, "make_pate", lambda teachers, *a, **b: make_pate(min(teachers, 40), *a, **b))
    for name in ("MNIST", "SVHN"):
        plan = accounting.PLANS[name]
        easy = NoisyScreening(noise=5.0, threshold=10.0, n_neighbors=20)
        monkeypatch.setitem(
            accounting.PLANS, name, replace(plan, screening=easy, sampling_rate=0.5, screened=100, answered=80)
        )
    load_digit_images.cache_clear()
    yield y
    load_digit_images.cache_clear()


def test_the_study_in_miniature(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, few_digits: Any) -> None:
    known = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "torch" else known(name))
    found = run(private_knn.STUDY, tmp_path / "out", jobs=1)
    page = write(private_knn.STUDY, found, tmp_path / "out").read_text()
    assert "The network student is left out: torch is not installed" in page
    rows = [row for row in found.rows if "left_out" not in row]

    def at(data: str, way: str) -> list[dict[str, Any]]:
        return [row for row in rows if (row["data"], row["way"]) == (data, way)]

    # The floor is counted anew; at next to no epsilon nothing is learned, at a large one much is.
    y, order = few_digits, np.random.default_rng(1).permutation(200)
    commonest = np.bincount(y[:PRIVATE]).argmax()
    floor = {row["seed"]: row["accuracy"] for row in at("mnist", "commonest class")}
    assert floor[1] == np.mean(y[PRIVATE:600][order[:HELD]] == commonest)
    low, high = (
        mean(row["accuracy"] for row in at("mnist", "ours") if (row["epsilon"] > 1) == large).value
        for large in (False, True)
    )
    top = mean(row["accuracy"] for row in at("mnist", "true labels")).value
    assert low < 0.5
    assert 0.75 < high < top + 0.05
    assert all(39 < row["epsilon"] <= 40 for row in at("svhn", "ours") + at("svhn", "PATE"))
    # Published parameters stand at what they cost, not at what is claimed.
    plan = accounting.PLANS["MNIST"]
    for row in at("mnist", "published parameters"):
        assert row["epsilon"] == pytest.approx(accounting.compute_cost(plan, accounting.BEST), rel=1e-3)
        assert row["epsilon"] > plan.claimed
        assert row["answered"] <= plan.answered
    assert f"| 0.47 | {row['epsilon']:.4f} |" in page
    # Repeating gives the same: a seed draws the split and the noise.
    again = private_knn.measure({"data": "svhn", "way": "ours", "seed": 1})
    assert again == [row for row in at("svhn", "ours") if row["seed"] == 1]


def test_the_network_is_a_student_too(monkeypatch: pytest.MonkeyPatch, few_digits: Any) -> None:
    pytest.importorskip("torch", reason="torch is not installed (the extra `torch`)")
    made: list[str] = []

    def stand_in(name: str, epochs: int) -> LogisticRegression:  # a network takes seconds; it has tests of its own
        made.append(f"{name}, {epochs} epochs")
        return LogisticRegression(max_iter=500)

    monkeypatch.setattr(private_knn, "NetworkStudent", stand_in)
    monkeypatch.setattr(private_knn, "NETWORK_EPSILON", 30.0)
    (row,) = private_knn.measure({"data": "mnist", "way": private_knn.NETWORK, "seed": 0})
    assert made == [f"mnist, {private_knn.EPOCHS} epochs"]
    assert row["answered"] == 60
    assert 29 < row["epsilon"] <= 30


def test_data_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NEARVEIL_DATA", str(tmp_path))
    load_digit_images.cache_clear()
    with pytest.raises(DataMissingError, match=r"mnist\.npz"):
        private_knn.measure({"data": "mnist", "way": "ours", "seed": 0})


def test_the_cheapest_epsilon_that_is_good_enough() -> None:
    curve = pd.DataFrame({"value": [0.99, 0.98]}, index=[2.0, 1.0])
    assert private_knn.find_cheapest(curve, 0.975) == 1.0
    assert private_knn.find_cheapest(curve, 0.985) == 2.0
    assert private_knn.find_cheapest(curve, 0.999) is None


def test_features_are_those_of_each_image() -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (5, 28, 28), dtype=np.uint8)
    rows = extract_digit_features("mnist", images)
    assert rows.shape == (5, 648)
    assert np.array_equal(extract_digit_features("mnist", images[3:4]), rows[3:4])
    assert np.array_equal(CachedFeatures(images, rows)(images[[4, 0]]), rows[[4, 0]])
    assert not straighten(np.zeros((28, 28), dtype=np.uint8)).any()
    slanted = np.zeros((28, 28), dtype=np.uint8)
    for row in range(6, 22):
        slanted[row, 20 - row // 2] = 255  # a stroke that leans to the right
    assert [int(np.ptp(np.nonzero(image > 100)[1])) for image in (slanted, straighten(slanted))] == [7, 1]
