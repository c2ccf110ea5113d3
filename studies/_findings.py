"""Five findings: a sentence made of measured rows, a figure, and the command that checks it."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from studies._study import Row, grouped, mean, of
from studies._trial import NAMES

BEGIN, END = "<!-- findings: written by nearveil study -->", "<!-- end of findings -->"
NEAR = 0.9  # of the ceiling


@dataclass(frozen=True)
class Finding:
    """What a reader should take away, and where to look."""

    study: str
    figure: str
    shows: str
    sentence: Callable[[Sequence[Row]], str]


def _leak(rows: Sequence[Row]) -> str:
    data = "cars196" if of(rows, data="cars196") else rows[0]["data"]
    here = of(rows, data=data)

    def bar(features: str, label: str) -> str:
        return f"{mean(row['recall'] for row in of(here, features=features, label=label)).value:.2f}"

    return (
        "**The published recall is a leaked label.** The authors' program of PrivateMail, at a nominal epsilon of "
        f"{here[0]['epsilon']:g}, has a Recall@8 of {bar('true', 'true')} with an image's features, "
        f"{bar('random', 'true')} with random ones, and {bar('true', 'random')} with its features and a random label. "
        f"No message that keeps this epsilon can pass {math.ceil(here[0]['ceiling'] * 1000) / 1000:.3f}."
    )


def _covers(rows: Sequence[Row]) -> str:
    covers = grouped(of(rows, part="recall", method="covers"), "data", "f", "epsilon")
    shares = [mean(row["nn_recall"] / row["ceiling"] for row in some).value for some in covers.values()]
    near = sum(share >= NEAR for share in shares)
    data = rows[0]["data"]

    def found(method: str) -> float:
        some = of(rows, part="recall", data=data, method=method, f=0.1, epsilon=4.0)
        return mean(row["nn_recall"] for row in some).value

    floor = mean(row["floor"] for row in of(rows, part="recall", data=data, method="covers", f=0.1)).value
    return (
        f"**Learned covers come within 10% of the ceiling in {near} of {len(shares)} settings, and nowhere below "
        f"{min(shares):.2f} of it.** At epsilon 4, with answers of a tenth of {NAMES.get(data, data)}, they find "
        f"{found('covers'):.2f} of the true eight nearest; PrivUnit finds {found('PrivUnit'):.2f}, PrivateMail made "
        f"sound {found('PrivateMail, Gaussian'):.2f}, DP-dSNE {found('DP-dSNE'):.2f}. Asking nothing finds {floor:.2f}."
    )


def _sensitivity(rows: Sequence[Row]) -> str:
    found = [row for row in rows if row["found"] is not None]
    stated = [row for row in of(found, rows=1000, bandwidth=6.0) if row["published"] is not None]

    def times(word: str, column: str) -> str:
        ratios = [row[column] / row["found"] for row in stated if row["released"].startswith(word)]
        return f"{min(ratios):,.0f} to {max(ratios):,.0f}"

    near, most = (max(min(row["plain"], row["sharp"]) / row["found"] for row in some) for some in (stated, found))
    return (
        f"**The published sensitivity is {times('target', 'published')} times too large for one target**, at the "
        f"paper's bandwidth and 1,000 rows, and {times('all', 'published')} times where every row is private. Ours is "
        f"proved, and there at most {near:.2f} times what a search finds ({most:.1f} over all bandwidths)."
    )


def _claims(rows: Sequence[Row]) -> str:
    parts = []
    for plan, claimed in (("MNIST", 0.47), ("SVHN", 0.49)):
        upper = [row["epsilon"] for row in of(rows, kind="upper", plan=plan, part="all")]
        lower = [row["epsilon"] for row in of(rows, kind="lower", plan=plan, part="all")]
        least = f" (no less than {max(lower):.3f} from sensitivities, noise and sampling alone)" if lower else ""
        parts.append(f"{claimed:g} on {plan} is {min(upper):.3f} by the tightest accountant{least}")
    return f"**Private-kNN's published parameters cost more than is claimed for them:** {'; '.join(parts)}."


def _bits(rows: Sequence[Row]) -> str:
    budgets = of(rows, part="budget")
    ome = [row for row in budgets if row["mechanism"] != "LATENT"]
    default = max(of(ome, alpha=100.0, claimed=10.0), key=lambda row: row["bits"])
    below = sum(row["correction"] < row["exact"] for row in ome)
    return (
        f"**OME with its published parameters has an epsilon of {default['exact']:,.0f}, not "
        f"{default['claimed']:g}.** The correction in print is below the exact value in {below} of {len(ome)} "
        "settings. LATENT's claim, which was corrected too, had been right."
    )


FINDINGS = (
    Finding(
        "label-leak",
        "bars",
        "Recall with true and random features and labels, under the ceiling: it follows the label",
        _leak,
    ),
    Finding("retrieval", "nn-recall", "NN-recall over epsilon, between floor and ceiling", _covers),
    Finding("sensitivity", "over-n", "Published, proved and found sensitivity over the number of rows", _sensitivity),
    Finding("accounting", "claims", "Claimed and honest epsilon of the published parameters", _claims),
    Finding("latent-ome", "ome", "Claimed, corrected and exact epsilon of OME", _bits),
)


def told(folder: Path, base: str = "study") -> str:
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


def put(docs: Path) -> None:
    """Write the findings into the page that leads the results, between two marks."""
    page = docs / "index.md"
    if not page.exists():
        return
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if begin and end:
        page.write_text(f"{before}{BEGIN}\n\n{told(docs / 'study')}\n\n{END}{after}", encoding="utf-8")
