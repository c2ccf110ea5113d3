"""What the number of sets, learning and the client's rule are worth to covers.

Recalls are expectations over the channel, for queries that no gallery holds, as shares of Theorem D's ceiling. No
noise is drawn, so differences of a percent can be seen.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray

from nearveil.mechanisms import Covers
from nearveil.mechanisms.covers.covers import MappedRelease
from nearveil.mechanisms.covers.learning import projection
from nearveil.search.ceiling import best_channel
from nearveil.search.evaluation import true_neighbors
from studies import _figures as draw
from studies._report import show
from studies._search import FILES, NAMES, QUERIES, SETS, K, Search, build_search, split
from studies._study import Case, Row, Study, list_cases
from studies.baselines import Cells

EPSILONS = (1.0, 2.0, 4.0, 6.0)
FRACTIONS = (0.1, 0.2)
SEEDS = (0, 1, 2)
CODE_BYTES = 64
NEAR = 0.9  # of the ceiling: "within 10%"
COLUMNS = {
    "share": "covers",
    "knowing": "covers, true good set",
    "usual_number": "covers, 1/f sets",
    "kmeans": "k-means cells",
}


def compute_expected(release: MappedRelease, search: Search, *, knowing: bool = False) -> float:
    """Return the expected NN-recall@8."""
    members = release.members_
    sets = np.split(members.indices, members.indptr[1:-1])
    coverage = np.stack([search.copies.recall(search.truth, items) for items in sets], axis=1)
    queries = None if knowing else search.queries.astype(np.float64)
    return expect_over_channel(release, coverage, queries)


def expect_over_channel(release: MappedRelease, coverage: NDArray[Any], queries: NDArray[Any] | None) -> float:
    """Return the expected recall of queries, or of a client that knows its best set, if all sets are named by chance.

    `coverage` is the part of its neighbours that each query finds in each set.
    """
    good = coverage.argmax(axis=1) if queries is None else release.map_.choose(queries)
    named, hit = coverage[np.arange(len(coverage)), good], release._channel.hit
    other = (coverage.sum(axis=1) - named) / (coverage.shape[1] - 1)
    return float(np.mean(hit * named + (1 - hit) * other))


def search_by_codes(search: Search) -> float:
    """Return the NN-recall@8 of a search among 64 dimensions of every item, in 8 bits: no message, epsilon 0."""
    components = projection(search.gallery, CODE_BYTES)
    projected = search.gallery @ components
    scale = np.abs(projected).max(axis=1, keepdims=True) / 127
    results = true_neighbors(search.queries @ components, np.rint(projected / scale) * scale, K)
    return float(search.copies.recall(search.truth, results).mean())


def compare(search: Search, candidates: float, epsilons: Sequence[float]) -> list[dict[str, Any]]:
    """Measure one gallery and fraction."""
    public, gallery = search.trial.public, search.trial.gallery
    cells = Cells(epsilons[0], candidates).fit(public).index(gallery)
    codes = search_by_codes(search)
    results = []
    for epsilon in epsilons:
        covers = Covers(epsilon, candidates).fit(public).index(gallery)
        usual = Covers(epsilon, candidates, n_sets=round(1 / candidates)).fit(public).index(gallery)
        everything = Covers(epsilon, candidates, reach=1.0).fit(public).index(gallery)
        best = best_channel(epsilon, candidates, search.counts)
        recalls = {
            "share": compute_expected(covers, search),
            "knowing": compute_expected(covers, search, knowing=True),
            "usual_number": compute_expected(usual, search),
            "kmeans": compute_expected(cells.with_epsilon(epsilon), search),  # the same cells at every epsilon
            "reached": compute_expected(everything, search),
            "lower": float(best.chances[search.truth].mean()),
        }
        shares = {name: recall / best.ceiling for name, recall in recalls.items()}
        about = {"items": len(gallery), "n_sets": covers.map_.n_sets, "reach": covers.reach_, "codes": codes}
        results.append({"epsilon": epsilon, "ceiling": best.ceiling, **shares, **about})
    return results


def cases() -> list[Case]:
    """Return every set, split and fraction."""
    return list_cases(data=SETS, seed=SEEDS, f=FRACTIONS, epsilons=[list(EPSILONS)])


@lru_cache(maxsize=1)
def _load_search(data: str, seed: int) -> Search:
    return build_search(split(data, seed))


def measure(case: Case) -> list[Row]:
    """Measure one case."""
    common = {name: case[name] for name in ("data", "f", "seed")}
    results = compare(_load_search(case["data"], case["seed"]), case["f"], case["epsilons"])
    return [{**common, **entry} for entry in results]


def figures(rows: pd.DataFrame) -> dict[str, Figure]:
    """Draw shares of the ceiling over epsilon."""
    groups = rows.groupby(["data", "f"], sort=False)
    figure, (panels,) = draw.make_panels(1, len(groups), (10.5, 3.7), sharey=True)
    for axes, ((data, fraction), part) in zip(panels, groups, strict=True):
        draw.shares(axes, part, COLUMNS)
        near: Any = {"color": "0.45", "linewidth": 1.0, "linestyle": "--", "zorder": 1.9}
        axes.axhline(NEAR, label="within 10% of the ceiling", **near)
        axes.set(title=f"{NAMES.get(data, data)}, answers of {fraction:.0%}", ylim=(0.5, 1.03))
    draw.finish(figure, panels, "expected NN-recall@8,\nshare of the ceiling", ncols=6)
    return {"shares": figure}


def facts(rows: pd.DataFrame) -> dict[str, Any]:
    """Return what each part of covers is worth."""
    rows = rows.assign(data=rows["data"].replace(NAMES))
    groups = rows.groupby(["data", "f", "epsilon"], sort=False)
    shares = groups[[*COLUMNS, "reach", "reached", "lower"]].mean()
    printed = shares.map("{:.3f}".format)
    gains = shares["share"] / shares["usual_number"] - 1
    cells = {
        "sets": groups["n_sets"].agg(lambda counts: " ".join(map(str, counts.unique()))),
        "covers (95% over seeds)": show(rows, "share", "data", "f", "epsilon"),
        "true good set": printed["knowing"],
        "1/f sets": printed["usual_number"],
        "k-means cells": printed["kmeans"],
        "items in any set": shares["reach"].map("{:.0%}".format),
        "covers, reach 1": printed["reached"],
        "lower estimate of D": printed["lower"],
    }
    lines = pd.DataFrame(cells).reset_index()
    costs = (1 - shares["reached"] / shares["share"]).round(2) + 0.0  # no -0%
    sets = rows.groupby("data", sort=False).agg(codes=("codes", "mean"), items=("items", "first"))
    return {
        "least_reach": shares["reach"].min(),
        "costs": [(epsilon, part.min(), part.max()) for epsilon, part in costs.groupby("epsilon")],
        "lower": (shares["lower"].min(), shares["lower"].max()),
        "near": int((shares["share"] >= NEAR).sum()),
        "total": len(shares),
        "rule": (rows["knowing"] - rows["share"]).max(),
        "gain": gains.max(),
        "gain_at": gains.idxmax(),
        "shares": lines.assign(f=lines["f"].map("{:g}".format), epsilon=lines["epsilon"].map("{:g}".format)),
        "sets": sets.assign(kilobytes=(CODE_BYTES + 4) * sets["items"] / 1000).reset_index().to_dict("records"),
    }


PARAMETERS = {"epsilons": EPSILONS, "f": FRACTIONS, "k": K, "held-out queries": QUERIES}
STUDY = Study("covers", cases, measure, figures, facts, FILES, PARAMETERS, SEEDS)
