"""The study of the bridge on two views of hidden things, and without photographs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from studies import bridge
from studies._report import write
from studies._study import run
from studies.data import DataMissingError

pytestmark = pytest.mark.usefixtures("quick_figures")


def test_the_study_in_miniature(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(20), 12)
    hidden = rng.normal(size=(20, 40))[labels] + 0.3 * rng.normal(size=(240, 40))
    views = [hidden @ np.linalg.qr(rng.normal(size=(40, 40)))[0] for _ in range(2)]
    both = [(view / np.linalg.norm(view, axis=1, keepdims=True)).astype(np.float32) for view in views]
    monkeypatch.setenv("NEARVEIL_DATA", str(tmp_path))
    (tmp_path / "birds_photos").mkdir()
    (tmp_path / "birds_photos" / "PROVENANCE.txt").write_text("made")
    monkeypatch.setattr(bridge, "MobileNetV2", object)
    monkeypatch.setattr(bridge, "EfficientNetLite0", object)
    monkeypatch.setattr(bridge, "extract_features", lambda *_: (both, labels))
    found = run(bridge.STUDY, tmp_path / "out")
    page = write(bridge.STUDY, found, tmp_path / "out").read_text()

    def of(way: str, name: str) -> list[Any]:
        return [row[name] for row in found.rows if row["way"] == way]

    assert of("the gallery's network alone", "agreement") == [1.0] * len(bridge.SEEDS)
    assert min(of("bridge", "agreement")) > 0.99
    # Eight of 119 others, eleven of them of the query's class, in ten classes of a half.
    chance = 1 - np.prod([(119 - 11 - i) / (119 - i) for i in range(8)])
    assert np.mean(of("items at random", "recall")) == pytest.approx(chance, abs=0.06)
    assert f"| bridge | {np.mean(of('bridge', 'recall')):.3f} (" in page
    assert len({row["agreement"] for row in found.rows if row["way"] == "items at random"}) > 1  # seeds differ


def test_photographs_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NEARVEIL_DATA", str(tmp_path))
    with pytest.raises(DataMissingError, match="birds_photos"):
        bridge.measure(bridge.cases()[0])
