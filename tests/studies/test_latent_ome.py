"""The study of LATENT and OME in miniature, against vectors that were computed with 40 digits."""

from pathlib import Path
from typing import Any

import pytest

from studies import latent_ome, retrieval
from studies._report import write
from studies._study import as_frame, mean, run, summarise
from tests.studies.small_sets import small_sets

pytestmark = pytest.mark.usefixtures("quick_figures")


@pytest.mark.parametrize(
    ("name", "alpha", "nominal", "expected"),
    [
        ("LATENT", 7.0, 1.0, {"exact": 0.875341263200171, "correction": 4.58214282226576, "at_delta": 0.085968093}),
        ("LATENT", 1.0, 8.0, {"exact": 4.049995, "at_delta": 1.191876}),
        ("OME", 7.0, 1.0, {"exact": 456.56882117991, "correction": -2058.33360390343}),
        (latent_ome.DEFAULT, 100.0, 10.0, {"exact": 3796.52933745542}),
    ],
)
def test_budgets_are_the_known_ones(name: str, alpha: float, nominal: float, expected: dict[str, Any]) -> None:
    row = latent_ome._compute_budget(name, alpha, nominal)
    assert {key: row[key] for key in expected} == pytest.approx(expected, rel=1e-6)
    assert row["claim_holds"] == (name == "LATENT")
    assert row["bits"] == (550 if name == latent_ome.DEFAULT else 160)


def test_latent_and_ome_in_miniature(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small_sets(monkeypatch, tmp_path)
    monkeypatch.setattr(latent_ome, "NOMINALS", (1.0, 10.0))
    monkeypatch.setattr(latent_ome, "ALPHAS", (1.0, 7.0, 100.0))
    monkeypatch.setattr(latent_ome, "EPSILONS", (1.0, 8.0))
    monkeypatch.setattr(latent_ome, "METHODS", ("PrivUnit", "unary, symmetric", "LATENT", "OME"))
    measured = run(latent_ome.STUDY, tmp_path / "out", jobs=1)
    page = write(latent_ome.STUDY, measured, tmp_path / "out").read_text()
    retrieval.load_search.cache_clear()
    prices = [row for row in measured.rows if row["part"] == "budget"]
    for row in prices:
        assert row["code_word_bound"] <= row["exact"]
        assert row["at_delta"] <= row["exact"]
    latent = [row for row in prices if row["mechanism"] == "LATENT"]
    assert all(row["claimed"] / 2 <= row["exact"] <= row["claimed"] for row in latent)
    ome = [row for row in prices if row["mechanism"] == "OME"]
    below = sum(row["correction"] < row["exact"] for row in ome)
    negative = sum(row["correction"] < 0 for row in ome)
    assert f"the correction is below the exact epsilon in {below} and negative in {negative}" in " ".join(page.split())
    found = [row for row in measured.rows if row["part"] == "recall"]
    keys = ["method", "epsilon"]
    tops = as_frame(found).groupby(keys, sort=False)["ceiling"].first()
    assert (summarise(as_frame(found), "nn_recall", *keys)["low"] <= tops + 0.005).all()
    claimed = [row for row in measured.rows if row["part"] == "claimed" and row["epsilon"] == 1.0]
    ceiling = next(row["ceiling"] for row in found if row["epsilon"] == 1.0)
    assert mean(row["nn_recall"] for row in claimed).low > ceiling  # what its own claim makes impossible
    assert "above the ceiling at claimed epsilon 1" in " ".join(page.split())
