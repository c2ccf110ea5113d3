"""The study of individual accounting in miniature: small digits stand for MNIST."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from studies import individual
from studies._report import write
from studies._study import as_frame, run

pytestmark = pytest.mark.usefixtures("quick_figures")

pytest.importorskip("skimage", reason="scikit-image is not installed (the extra `images`)")


@pytest.fixture
def few_digits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    X, y = load_digits(return_X_y=True)
    images = np.pad(np.kron(X.reshape(-1, 8, 8) / 16 * 255, np.ones((3, 3))).astype(np.uint8), ((0, 0), (2, 2), (2, 2)))
    (tmp_path / "mnist").mkdir()
    parts = {"x_train": images[:900], "y_train": y[:900], "x_test": images[900:1000], "y_test": y[900:1000]}
    np.savez(tmp_path / "mnist" / "mnist.npz", **parts)
    monkeypatch.setenv("NEARVEIL_DATA", str(tmp_path))
    for name, value in {
        "SIZES": {"mnist": (600, 250, 120)},
        "SEEDS": (0,),
        "QUERIES": (40, 120),
        "EPSILONS": (8.0,),
        "CROWD_EPSILONS": (8.0,),
        "PERSON_IMAGES": 2,
        "PERSON_QUERIES": 60,
        "PERSON_EPSILONS": (20.0,),
        "STUDENT_ANSWERS": 60,
        "STUDENT_EPSILONS": (8.0,),
    }.items():
        monkeypatch.setattr(individual, name, value)


def test_the_study_in_miniature(few_digits: None, tmp_path: Path) -> None:
    study = replace(individual.STUDY, data=("mnist/mnist.npz",))
    measured = run(study, tmp_path / "cases", jobs=1)
    rows = as_frame(measured.rows)
    assert set(rows["kind"]) == {individual.CALM, individual.CROWD, individual.PERSONS, individual.STUDENTS}
    calm = rows[rows["kind"] == individual.CALM].set_index(["way", "queries"])["right"].astype(float)
    for count in individual.QUERIES:
        assert calm[individual.INDIVIDUAL, count] > calm[individual.WORST, count]
    facts = individual.facts(rows)
    assert facts["least"] > 0
    assert facts["weak"] + facts["clear"] == facts["settings"] == 2
    page = write(study, measured, tmp_path / "out").read_text(encoding="utf-8")
    for title in ("Calm queries", "All queries about one class", "Students", "Whole persons"):
        assert f"## {title}" in page
