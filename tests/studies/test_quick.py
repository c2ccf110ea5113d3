"""Every study runs in miniature; where the data is missing too."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from nearveil.cli import app
from studies import NAMES, _quick, _search, data, load_studies, retrieval
from studies._quick import CHANGES, shrink, write_digits, write_sets
from studies._study import run


def test_every_study_has_its_miniature() -> None:
    assert set(CHANGES) == set(NAMES)
    for changes in CHANGES.values():
        for target in changes:
            _quick._look_up(target)  # a constant that is gone would change nothing


def test_a_miniature_leaves_everything_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEARVEIL_DATA", str(tmp_path))
    study, before = load_studies()["retrieval"], dict(os.environ)
    searched, epsilons = dict(_search.SETS), retrieval.EPSILONS
    with shrink(study) as small:
        assert len(retrieval.EPSILONS) < len(epsilons)
        assert len(_search.SETS) < len(searched)
        assert len(small.cases()) > 0
        assert small.data == tuple(f"made-up rows in place of {name.partition('/')[0]}" for name in study.data)
        assert f"Data: {small.data[0]}; " in small.page
        assert small.parameters != study.parameters  # nothing of it is taken for a result of the whole study
    assert epsilons == retrieval.EPSILONS
    assert searched == _search.SETS
    assert dict(os.environ) == before


@pytest.mark.parametrize("here", [True, False])
def test_rows_are_real_where_there_are_some(here: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tmp_path / "real"
    real.mkdir()
    labels = np.arange(200).repeat(7)
    rows: Any = {"features": np.ones((1400, 3), np.float16), "labels": labels}
    if here:
        for name in _quick.CLASSES:
            _quick._save(real, name, rows)
    monkeypatch.setenv("NEARVEIL_DATA", str(real))
    made = tmp_path / "made"
    made.mkdir()
    write_sets(made)
    write_digits(made)
    monkeypatch.setenv("NEARVEIL_DATA", str(made))
    features = data.load_features("cub200_cropped_lite0")
    assert np.bincount(features.labels).tolist() == [_quick.PER_CLASS] * 200
    assert features.features.shape[1] == (3 if here else _quick.DIMENSIONS)
    with np.load(made / "svhn_digits" / "svhn_digits.npz") as arrays:
        assert arrays["x_train"].shape[0] == _quick.DIGITS["train"]
        assert arrays["x_test"].shape[3] == 3


@pytest.mark.parametrize("name", ["growth", "covers", "codes", "bridge", "svhn-student", "abstention"])
def test_studies_run_in_miniature_without_data(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_figures: None
) -> None:
    monkeypatch.setenv("NEARVEIL_DATA", str(tmp_path / "nothing"))
    made = CliRunner().invoke(app, ["study", name, "--quick", "--out", str(tmp_path)])
    assert made.exit_code == 0, made.output
    if "left out" not in made.output:
        assert "**A quick run:**" in (tmp_path / "quick" / name / f"{name}.md").read_text(encoding="utf-8")


def test_a_quick_run_measures_again_and_is_not_published(tmp_path: Path) -> None:
    out = ["--quick", "--out", str(tmp_path)]
    refused = CliRunner().invoke(app, ["study", "ceiling", *out, "--docs", str(tmp_path / "docs")])
    assert refused.exit_code == 2
    assert "publish those of a whole run" in " ".join(refused.output.replace("│", " ").split())
    calls = []
    with shrink(load_studies()["smooth-sensitivity"]) as small:
        run(small, tmp_path, advance=lambda done, of: calls.append((done, of)), fresh=True)
    assert calls[0][0] == 0
