"""The five findings are made of rows, and stand where a reader looks first."""

import json
from pathlib import Path
from typing import Any

import pytest

from studies._report import BEGIN, END, FINDINGS, describe_finding, list_findings, write_findings

Rows = list[dict[str, Any]]


def leak() -> Rows:
    recalls = {("true", "true"): 0.8, ("random", "true"): 0.7, ("true", "random"): 0.1}
    return [
        {"data": "cars196", "features": f, "label": y, "epsilon": 0.01, "seed": seed, "recall": value + seed / 10,
         "ceiling": 0.0824}
        for (f, y), value in recalls.items() for seed in (0, 1)
    ]  # fmt: skip


def retrieval() -> Rows:
    found = {"covers": 0.95, "PrivUnit": 0.5, "PrivateMail, Gaussian": 0.2, "DP-dSNE": 0.1}
    common = {"part": "recall", "data": "birds", "seed": 0, "ceiling": 1.0, "floor": 0.3}
    rows = [{**common, "method": name, "f": 0.1, "epsilon": 4.0, "nn_recall": value} for name, value in found.items()]
    return [*rows, {**common, "method": "covers", "f": 0.2, "epsilon": 4.0, "nn_recall": 0.85}]


def sensitivity() -> Rows:
    rows: Rows = [
        {"released": "target, random anchors", "published": 500.0, "plain": 0.1, "sharp": 0.012, "found": 0.01},
        {"released": "all, integer labels", "published": 500.0, "plain": 1.5, "sharp": 2.0, "found": 1.0},
        {"released": "all, integer labels", "published": None, "plain": 1.5, "sharp": 2.0, "found": None},
    ]
    other = {**rows[0], "rows": 50, "bandwidth": 0.5, "sharp": 0.03}
    return [*({**row, "rows": 1000, "bandwidth": 6.0} for row in rows), other]


def accounting() -> Rows:
    rows = [{"kind": "upper", "plan": plan, "part": "all", "epsilon": epsilon} for plan, epsilon in
            (("MNIST", 0.9), ("MNIST", 0.871), ("SVHN", 3.3))]  # fmt: skip
    return [*rows, {"kind": "lower", "plan": "MNIST", "part": "all", "epsilon": 0.867}]


def bits() -> Rows:
    common = {"part": "budget", "alpha": 100.0, "claimed": 10.0}
    return [
        {**common, "mechanism": "OME", "bits": 160, "exact": 900.0, "correction": 1000.0},
        {**common, "mechanism": "OME, defaults", "bits": 550, "exact": 3796.5, "correction": -5.0},
        {**common, "mechanism": "LATENT", "bits": 160, "exact": 5.0, "correction": 50.0},
    ]


ROWS = {"label-leak": leak, "retrieval": retrieval, "sensitivity": sensitivity, "accounting": accounting,
        "latent-ome": bits}  # fmt: skip
WORDS = {
    "label-leak": (
        "Recall@8 of 0.85 with an image's features",
        "0.75 with random ones",
        "0.15 with its",
        "exceed 0.083",
    ),
    "retrieval": (
        "in 1 of the 2 measured settings",
        "lowest share of it is 0.85",
        "find 0.95",
        "PrivateMail 0.20",
        "most popular items contain 0.30",
    ),
    "sensitivity": ("50,000 to 50,000 times", "500 to 500 times", "at most 1.50 times", "(3.0 times over all"),
    "accounting": (
        "on MNIST 0.871 by the tightest accountant instead of 0.47",
        "(at least 0.867 by",
        "on SVHN 3.300 by",
    ),
    "latent-ome": ("epsilon of 3,796, not 10", "in 1 of 2 settings"),
}


@pytest.mark.parametrize("study", FINDINGS)
def test_a_sentence_says_what_its_rows_say(study: str) -> None:
    finding = describe_finding(study, ROWS[study]())
    assert [word for word in WORDS[study] if word not in finding] == []


def test_findings_lead_the_results(tmp_path: Path) -> None:
    (tmp_path / "study").mkdir()
    write_findings(tmp_path)  # no page, nothing to do
    (tmp_path / "index.md").write_text(f"# Results\n\n{BEGIN}\nformer findings\n{END}\n\nmore\n")
    for name in ("label-leak", "latent-ome"):
        (tmp_path / f"study/{name}.json").write_text(json.dumps({"rows": ROWS[name]()}))
    write_findings(tmp_path)
    page = (tmp_path / "index.md").read_text()
    assert page.startswith(f"# Results\n\n{BEGIN}\n\n1. **The published recall is a leaked label.**")
    assert page.endswith(f"{END}\n\nmore\n")
    assert "former findings" not in page
    assert "2. **OME" in page
    assert "![" in page
    assert "(study/label-leak-bars.svg)" in page
    assert "Check it: `nearveil study latent-ome` ([page](study/latent-ome.md))" in page
    write_findings(tmp_path)
    assert (tmp_path / "index.md").read_text() == page
    assert list_findings(tmp_path / "study") in page
