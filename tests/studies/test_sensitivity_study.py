"""The study of sensitivity in miniature."""

import math
from pathlib import Path

import numpy as np
import pytest

from studies import data, sensitivity
from studies._report import render, write
from studies._study import as_frame, run
from tests.studies.small_sets import small_sets

pytestmark = pytest.mark.usefixtures("quick_figures")


def test_sensitivity_in_miniature(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small_sets(monkeypatch, tmp_path)
    sensitivity._load_features.cache_clear()
    monkeypatch.setattr(sensitivity, "SIZES", (20, 40))
    monkeypatch.setattr(sensitivity, "BANDWIDTHS", (0.5, 6.0))
    monkeypatch.setattr(sensitivity, "BANDWIDTH_SIZE", 20)
    monkeypatch.setattr(sensitivity, "TABLE_SIZE", 20)
    monkeypatch.setattr(sensitivity, "MOST_SEARCHED", 20)
    monkeypatch.setattr(sensitivity, "SEEDS", (0, 1))
    measured = run(sensitivity.STUDY, tmp_path / "out", jobs=1)
    page = write(sensitivity.STUDY, measured, tmp_path / "out").read_text()
    sensitivity._load_features.cache_clear()
    searched = [row for row in measured.rows if row["found"] is not None]
    assert {row["rows"] for row in searched if row["released"].startswith("all")} == {20}
    for row in searched:
        bound = min(row["plain"], row["sharp"])
        assert row["found"] <= bound * (1 + 1e-9)
        if row["bandwidth"] == 6:
            assert bound < 1.15 * row["found"]
    assert f"In {len(searched)} searches nothing above our bounds was found" in page
    for row in measured.rows:
        # The theorem behind the published figure asks for n exp(-2 / s^2) > 1.
        assert (row["published"] is None) == (row["rows"] * math.exp(-2 / row["bandwidth"] ** 2) <= 1)


def test_a_broken_bound_is_said() -> None:
    row = {"released": sensitivity.RANDOM, "rows": 1000, "seed": 0, "published": 5.0, "plain": 2.0, "sharp": 1.0}
    kinds = (sensitivity.RANDOM, "all, integer labels")
    rows = [
        {**row, "released": kind, "bandwidth": bandwidth, "found": 1.5} for kind in kinds for bandwidth in (6.0, 1.0)
    ]
    assert "**In 4 of 4 searches a bound was passed: it is wrong**" in render(sensitivity.STUDY, as_frame(rows))


def test_theorem_a_is_the_one_that_is_proved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """D0 = tanh(1 / s^2) / 2 times the diameter of the anchors' starts, by hand."""
    small_sets(monkeypatch, tmp_path)
    sensitivity._load_features.cache_clear()
    rows = sensitivity.measure({"rows": 30, "bandwidth": 2.0, "seed": 5})
    sensitivity._load_features.cache_clear()
    start = np.random.default_rng(5).normal(size=(31, 2))[1:]
    wide = max(float(np.linalg.norm(a - b)) for a in start for b in start)
    target = next(row for row in rows if row["released"] == sensitivity.RANDOM)
    assert target["plain"] == pytest.approx(math.tanh(0.25) / 2 * wide, rel=1e-6)


def test_missing_data_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(data.VARIABLE, str(tmp_path))
    sensitivity._load_features.cache_clear()
    with pytest.raises(data.DataMissingError, match=data.VARIABLE):
        sensitivity.measure({"rows": 20, "bandwidth": 6.0, "seed": 0})
