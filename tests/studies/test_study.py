"""Data that is not there is named."""

from pathlib import Path

import pytest

from studies import data


def test_data_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NEARVEIL_DATA", str(tmp_path))
    assert data.data_folder() == tmp_path
    with pytest.raises(data.DataMissingError, match="set NEARVEIL_DATA to the folder that holds cub200"):
        data.load_features("cub200_cropped_lite0")


def test_data_is_looked_for_next_to_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NEARVEIL_DATA", raising=False)
    assert data.data_folder() == Path("../shared/data")


def test_features_come_with_labels(birds: data.FeatureSet) -> None:
    assert birds.features.shape == (11788, 1280)
    assert set(birds.labels) == set(range(200))
