"""A small set that stands in for the real ones, so that the studies of retrieval run in miniature."""

from pathlib import Path

import numpy as np
import pytest

from studies import _search, covers, data, retrieval

CLASSES, ROWS, DIMENSIONS = 16, 800, 56
QUERIES = 100


def small_sets(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Write features around centres where the real ones are looked for, and forget what was loaded before."""
    for number, name in enumerate(_search.NAMES):
        rng = np.random.default_rng(number)
        labels = rng.permutation(np.arange(ROWS) % CLASSES)
        features = rng.normal(size=(CLASSES, DIMENSIONS))[labels] + 0.9 * rng.normal(size=(ROWS, DIMENSIONS))
        (folder / name).mkdir()
        np.savez(folder / name / f"{name}.npz", features=features.astype(np.float32), labels=labels)
    first, *others = _search.SETS
    monkeypatch.setitem(_search.SETS, first, CLASSES // 2)
    for name in others:  # their files are there, for the checksum
        monkeypatch.delitem(_search.SETS, name)
    monkeypatch.setattr(_search, "QUERIES", QUERIES)
    monkeypatch.setenv(data.VARIABLE, str(folder))
    for kept in (retrieval.load_search, retrieval._load_halves, covers._load_search):
        kept.cache_clear()
