"""The private search and the studies of releases run as a person runs them."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from nearveil.privacy.noise import unsafe_seeded
from nearveil.release import Cells, Covers
from nearveil.retrieval import Retriever, evaluate
from nearveil.retrieval._evaluate import popularity
from nearveil.retrieval.ceiling import neighbor_ceiling
from nearveil.study import covers, data, releases, search


def test_the_search_stays_between_floor_and_ceiling(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(search, "EPSILONS", (2.0, 6.0))
    search.main(["--out", str(tmp_path)])
    printed = " ".join(capsys.readouterr().out.split())
    assert "query 5 refused: account demo: budget epsilon 18 at delta 0, spent 16, left 2" in printed
    assert "all is well" in printed
    rows = re.findall(r"│ [26] │ (0\.\d{3}) │ (0\.\d{3}) │ (0\.\d{3}) │", printed)
    assert len(rows) == 2
    for found, ceiling, floor in (map(float, row) for row in rows):
        assert floor < found < ceiling + 0.03  # a few hundred queries: the sample may pass what its mean cannot
    assert (tmp_path / "search.png").read_bytes().startswith(b"\x89PNG")


def _trial() -> releases.Trial:
    digits = search.digits()
    nobody = np.zeros(len(digits.public), dtype=np.int64)
    small = np.float32
    return releases.Trial(
        digits.public.astype(small), nobody, digits.gallery.astype(small), digits.gallery_y,
        digits.queries.astype(small), digits.query_y,
    )  # fmt: skip


def test_expected_recall_is_what_sampling_finds() -> None:
    trial = _trial()
    retriever = Retriever(Covers(2.0, 0.2, n_sets=5), code_bytes=None).fit(trial.public).index(trial.gallery)
    release = retriever.mechanism
    assert isinstance(release, Covers)
    sampled = evaluate(retriever, trial.queries, rng=unsafe_seeded(0), repeats=20, confidence=0.9999).covered
    assert sampled.low < covers.expected(release, trial) < sampled.high
    assert covers.expected(release, trial) <= covers.expected(release, trial, knowing=True)


def test_covers_are_compared_with_cells() -> None:
    found = covers.compare("digits", _trial(), 0.2, 2.0)
    assert found.kmeans < found.share <= found.knowing < 1
    assert found.usual_number < found.share + 0.02


def test_the_study_of_releases_draws_and_keeps_what_it_prints(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(releases, "split", lambda *_: _trial())
    monkeypatch.setattr(releases, "RELEASES", {"k-means cells": Cells})
    monkeypatch.setattr(releases, "MARKS", {"k-means cells": "o-"})
    monkeypatch.setattr(releases, "EPSILONS", (1.0, 4.0))
    monkeypatch.setenv("COLUMNS", "200")
    releases.main(["--out", str(tmp_path), "--data", "cub200_cropped_lite0"])
    kept = json.loads((tmp_path / "releases.json").read_text())
    printed = capsys.readouterr().out
    assert len(kept) == 4
    for one in kept:
        assert 0.1 < one["nn_recall"] < one["ceiling"] + 0.03  # cells may well fall below the floor
        assert f"{one['nn_recall']:.3f} ({one['share']:.2f})" in printed
    assert (tmp_path / "releases.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("study", [releases, covers])
def test_missing_data_is_said(
    study: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NEARVEIL_DATA", str(tmp_path))
    with pytest.raises(SystemExit):
        study.main(["--out", str(tmp_path)])  # type: ignore[attr-defined]
    assert data.VARIABLE in capsys.readouterr().out


@pytest.mark.parametrize(("epsilon", "candidates", "least"), [(1.0, 0.1, 0.85), (4.0, 0.2, 0.91)])
def test_covers_come_near_the_ceiling_on_real_images(
    birds: data.FeatureSet, epsilon: float, candidates: float, least: float
) -> None:
    """Shares that a prototype of learned covers had reached, less its error; measured on queries never seen."""
    assert len(birds.labels) == 11788
    trial = releases.split("cub200_cropped_lite0", 3)
    release = Covers(epsilon, candidates).fit(trial.public).index(trial.gallery)
    counts = popularity(release.features(trial.gallery).astype(np.float32), 8)
    assert least < covers.expected(release, trial) / neighbor_ceiling(epsilon, candidates, counts) < 1
