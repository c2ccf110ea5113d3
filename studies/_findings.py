"""Five findings: a sentence made of measured rows, a figure, and the command that checks it."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from studies._privatemail import round_up
from studies._report import fill_template
from studies._study import TEMPLATES, as_frame, select
from studies._trial import NAMES

BEGIN, END = "<!-- findings: written by nearveil study -->", "<!-- end of findings -->"
NEAR = 0.9  # of the ceiling


@dataclass(frozen=True)
class Finding:
    """What a reader should take away, and where to look."""

    study: str  # whose rows it is made of, and whose command checks it
    figure: str
    shows: str  # what the figure shows, for those who do not see it
    facts: Callable[[pd.DataFrame], Mapping[str, Any]]

    def sentence(self, rows: list[dict[str, Any]]) -> str:
        """Return the finding in Markdown."""
        text = (TEMPLATES / "findings" / f"{self.study}.md").read_text(encoding="utf-8")
        return fill_template(text, self.facts(as_frame(rows)))


def _find_leak(rows: pd.DataFrame) -> dict[str, Any]:
    here = select(rows, data="cars196" if "cars196" in set(rows["data"]) else rows["data"].iloc[0])
    recall = here.groupby(["features", "label"])["recall"].mean().to_dict()
    return {"epsilon": here["epsilon"].iloc[0], "recall": recall, "ceiling": round_up(here["ceiling"].iloc[0])}


def _compare_covers(rows: pd.DataFrame) -> dict[str, Any]:
    found = select(rows, part="recall")
    covers = select(found, method="covers")
    shares = (covers["nn_recall"] / covers["ceiling"]).groupby([covers[key] for key in ("data", "f", "epsilon")]).mean()
    first = select(found, data=found["data"].iloc[0], f=0.1)
    return {
        "near": int((shares >= NEAR).sum()),
        "total": len(shares),
        "least": shares.min(),
        "data": NAMES.get(first["data"].iloc[0], first["data"].iloc[0]),
        "found": select(first, epsilon=4.0).groupby("method")["nn_recall"].mean(),
        "floor": select(first, method="covers")["floor"].mean(),
    }


def _compare_sensitivity(rows: pd.DataFrame) -> dict[str, Any]:
    found = rows.dropna(subset=["found"])
    stated = select(found, rows=1000, bandwidth=6.0).dropna(subset=["published"])
    waste = stated["published"] / stated["found"]
    target = stated["released"].str.startswith("target")
    near, most = ((some[["plain", "sharp"]].min(axis=1) / some["found"]).max() for some in (stated, found))
    return {"target": waste[target], "all": waste[~target], "near": near, "most": most}


def _compare_claims(rows: pd.DataFrame) -> dict[str, Any]:
    costs = select(rows, part="all").groupby(["plan", "kind"])["epsilon"].agg(["min", "max"])
    return {
        "plans": [
            {
                "name": plan,
                "claimed": claimed,
                "upper": costs["min"][plan, "upper"],
                "lower": costs["max"].get((plan, "lower")),
            }
            for plan, claimed in (("MNIST", 0.47), ("SVHN", 0.49))
        ]
    }


def _compare_bits(rows: pd.DataFrame) -> dict[str, Any]:
    budgets = select(rows, part="budget")
    ome = budgets[budgets["mechanism"] != "LATENT"]
    default = select(ome, alpha=100.0, claimed=10.0).sort_values("bits").iloc[-1]
    below = int((ome["correction"] < ome["exact"]).sum())
    return {"exact": default["exact"], "claimed": default["claimed"], "below": below, "total": len(ome)}


FINDINGS = (
    Finding(
        "label-leak",
        "bars",
        "Recall with true and random features and labels, under the ceiling: it follows the label",
        _find_leak,
    ),
    Finding("retrieval", "nn-recall", "NN-recall over epsilon, between floor and ceiling", _compare_covers),
    Finding(
        "sensitivity", "over-n", "Published, proved and found sensitivity over the number of rows", _compare_sensitivity
    ),
    Finding("accounting", "claims", "Claimed and honest epsilon of the published parameters", _compare_claims),
    Finding("latent-ome", "ome", "Claimed, corrected and exact epsilon of OME", _compare_bits),
)


def list_findings(folder: Path, base: str = "study") -> str:
    """Return the findings of all studies that were made, in Markdown."""
    parts: list[str] = []
    for finding in FINDINGS:
        path = folder / f"{finding.study}.json"
        if not path.exists():
            continue
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        parts.append(
            f"{len(parts) + 1}. {finding.sentence(rows)}\n\n"
            f"   ![{finding.shows}]({base}/{finding.study}-{finding.figure}.svg)\n\n"
            f"   Check it: `nearveil study {finding.study}` ([page]({base}/{finding.study}.md))"
        )
    return "\n\n".join(parts)


def write_findings(docs: Path) -> None:
    """Write the findings into the page that leads the results, between two marks."""
    page = docs / "index.md"
    if not page.exists():
        return
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if begin and end:
        page.write_text(f"{before}{BEGIN}\n\n{list_findings(docs / 'study')}\n\n{END}{after}", encoding="utf-8")
