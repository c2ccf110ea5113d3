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

from nearveil.mechanisms import Cells, Covers
from nearveil.mechanisms.covers.covers import MappedRelease
from nearveil.mechanisms.covers.learning import projection
from nearveil.search.ceiling import best_channel
from nearveil.search.evaluation import true_neighbors
from studies import _figures as draw
from studies._report import interval
from studies._search import FILES, NAMES, QUERIES, SETS, K, Search, build_search, split
from studies._study import Case, Row, Study, summarise

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
    good = coverage.argmax(axis=1) if knowing else release.map_.choose(search.queries.astype(np.float64))
    group = coverage[np.arange(len(coverage)), good]
    channel = release._channel
    other = (coverage.sum(axis=1) - group) / (channel.n_sets - 1)
    return float(np.mean(channel.hit * group + (1 - channel.hit) * other))


def search_by_codes(search: Search) -> float:
    """Return the NN-recall@8 of a search among 64 dimensions of every item, in 8 bits: no message, epsilon 0."""
    components = projection(search.gallery, CODE_BYTES)
    placed = search.gallery @ components
    scale = np.abs(placed).max(axis=1, keepdims=True) / 127
    results = true_neighbors(search.queries @ components, np.rint(placed / scale) * scale, K)
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
        cells = cells.with_epsilon(epsilon)  # cells are the same at every epsilon
        everything = Covers(epsilon, candidates, reach=1.0).fit(public).index(gallery)
        best = best_channel(epsilon, candidates, search.counts)
        ceiling = best.ceiling
        results.append(
            {
                "epsilon": epsilon,
                "items": len(gallery),
                "n_sets": covers.map_.n_sets,
                "ceiling": ceiling,
                "share": compute_expected(covers, search) / ceiling,
                "knowing": compute_expected(covers, search, knowing=True) / ceiling,
                "usual_number": compute_expected(usual, search) / ceiling,
                "kmeans": compute_expected(cells, search) / ceiling,
                "reach": covers.reach_,
                "reached": compute_expected(everything, search) / ceiling,
                "lower": float(best.chances[search.truth].mean()) / ceiling,
                "codes": codes,
            }
        )
    return results


def cases() -> list[Case]:
    """Return every set, split and fraction."""
    return [
        {"data": data, "seed": seed, "f": fraction, "epsilons": list(EPSILONS)}
        for data in SETS
        for seed in SEEDS
        for fraction in FRACTIONS
    ]


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
    figure, panels = draw.make_panels(1, len(groups), (10.5, 3.7), sharey=True)
    for axes, ((data, fraction), part) in zip(panels[0], groups, strict=True):
        epsilons = sorted(part["epsilon"].unique())
        draw.ceiling(axes, epsilons, [1.0] * len(epsilons), top=1.05)
        axes.axhline(NEAR, color="0.45", linewidth=1.0, linestyle="--", label="within 10% of the ceiling")
        for position, (column, name) in enumerate(COLUMNS.items()):
            draw.curve(axes, name, summarise(part, column, "epsilon").sort_index(), index=position + 3)
        draw.epsilon_axis(axes, epsilons)
        axes.set_title(f"{NAMES.get(data, data)}, answers of {fraction:.0%}")
        axes.set_ylim(0.5, 1.03)
    panels[0, 0].set_ylabel("expected NN-recall@8,\nshare of the ceiling")
    draw.finish(figure, panels[0], ncols=6)
    return {"shares": figure}


def facts(rows: pd.DataFrame) -> dict[str, Any]:
    """Return what each part of covers is worth."""
    rows = rows.assign(data=rows["data"].replace(NAMES))
    groups = rows.groupby(["data", "f", "epsilon"], sort=False)
    shares, group = groups[list(COLUMNS)].mean(), summarise(rows, "share", "data", "f", "epsilon")
    gains = shares["share"] / shares["usual_number"] - 1
    cells = {
        "sets": groups["n_sets"].agg(lambda counts: " ".join(map(str, counts.unique()))),
        "covers (95% over seeds)": group.apply(interval, axis=1, args=(".3f",)),
        "true good set": shares["knowing"].map("{:.3f}".format),
        "1/f sets": shares["usual_number"].map("{:.3f}".format),
        "k-means cells": shares["kmeans"].map("{:.3f}".format),
        "items in any set": groups["reach"].mean().map("{:.0%}".format),
        "covers, reach 1": groups["reached"].mean().map("{:.3f}".format),
        "lower estimate of D": groups["lower"].mean().map("{:.3f}".format),
    }
    lines = pd.DataFrame(cells).reset_index()
    costs = (1 - groups["reached"].mean() / shares["share"]).round(2) + 0.0  # no -0%
    sets = rows.groupby("data", sort=False).agg(codes=("codes", "mean"), items=("items", "first"))
    return {
        "least_reach": groups["reach"].mean().min(),
        "costs": [(epsilon, part.min(), part.max()) for epsilon, part in costs.groupby("epsilon")],
        "lower": (groups["lower"].mean().min(), groups["lower"].mean().max()),
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
