"""What every release finds between floor and ceiling, for which classes, and what a budget buys."""

from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING

import numpy as np

from nearveil.privacy.noise import unsafe_seeded
from nearveil.release import Cells, Release
from nearveil.release._mapped import MappedRelease
from nearveil.retrieval._truth import true_neighbors
from nearveil.retrieval.ceiling import neighbor_ceiling
from studies import _retrieval_figures as draw
from studies._finding import Items, K, Search, find, search_of, unasked
from studies._retrieval_budget import BUDGET, DELTA, PRICED, payable
from studies._retrieval_text import told
from studies._rivals import MAPPED, SETTINGS, Public, rival
from studies._study import Case, Row, Study
from studies._trial import FILES, QUERIES, SETS, Halves, split, split_classes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EPSILONS = (0.01, 0.1, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
FRACTIONS = (0.05, 0.1, 0.2)
SEEDS = (0, 1, 2, 3, 4)
SPLIT = 0  # which images are in the gallery: one choice, because a map is learned for each epsilon and f
CLASS_EPSILONS = (1.0, 2.0, 4.0, 8.0)
CLASS_FRACTION = 0.1
CLASS_METHODS = ("covers", "k-means cells", "unary, symmetric", "PrivUnit", "LATENT")
_SLOW = "covers"  # seconds for each map: a case for each


@cache
def _search(data: str) -> tuple[Search, Public]:
    found = split(data, SPLIT)
    return search_of(found), Public(found.public, found.public_y)


def asked(seed: int, queries: int) -> Items:
    """Return which of the held-out queries a seed asks: no two seeds ask the same."""
    each = queries // len(SEEDS)
    order = np.random.default_rng(SPLIT).permutation(queries)
    return order[seed * each : (seed + 1) * each]


def cases() -> list[Case]:
    """Return every method on every set; of covers, every map; then classes and budgets."""
    main = [
        {"part": "recall", "data": data, "method": method, "epsilons": [epsilon], "fractions": [fraction]}
        for data in SETS
        for method in SETTINGS
        if method == _SLOW
        for fraction in FRACTIONS
        for epsilon in EPSILONS
    ]
    main += [
        {"part": "recall", "data": data, "method": method, "epsilons": list(EPSILONS), "fractions": list(FRACTIONS)}
        for data in SETS
        for method in SETTINGS
        if method != _SLOW
    ]
    classes = [
        {"part": "classes", "data": data, "method": method, "half": half, "lacks": lacks}
        for data in SETS
        for lacks in draw.LACKS
        for half in (0, 1)
        for method in CLASS_METHODS
    ]
    budgets = [{"part": "budget", "method": method, "epsilon": epsilon} for method in PRICED for epsilon in EPSILONS]
    return [*main, *classes, *budgets]


def measure(case: Case) -> list[Row]:
    """Measure one case."""
    if case["part"] == "recall":
        search, public = _search(case["data"])
        return recall_rows(search, public, case)
    if case["part"] == "classes":
        return _class_rows(case)
    return [{**case, "budget": BUDGET, **payable(case["method"], case["epsilon"])}]


def recall_rows(search: Search, public: Public, case: Case) -> list[Row]:
    """Ask all seeds' queries with one mechanism."""
    method, fractions = case["method"], case["fractions"]
    groups = [[fraction] for fraction in fractions] if method in MAPPED else [fractions]
    queries = {seed: asked(seed, len(search.trial.queries)) for seed in SEEDS}
    free = {(seed, f): unasked(search, which, f) for seed, which in queries.items() for f in fractions}
    rows: list[Row] = []
    for group in groups:
        for epsilon, mechanism in _mechanisms(method, case["epsilons"], group[0], search, public):
            delta = mechanism.guarantee.delta
            for seed, which in queries.items():
                found = find(mechanism, search, which, group, unsafe_seeded(seed))
                rows += [
                    {
                        "part": case["part"],
                        "data": case["data"],
                        "method": method,
                        "f": fraction,
                        "epsilon": epsilon,
                        "delta": delta,
                        "seed": seed,
                        "nn_recall": float(one.neighbours.mean()),
                        "recall": float(one.same_class.mean()),
                        "ceiling": neighbor_ceiling(epsilon, fraction, search.counts, delta),
                        "pure_ceiling": neighbor_ceiling(epsilon, fraction, search.counts),
                        "floor": float(free[seed, fraction].neighbours.mean()),
                        "recall_floor": float(free[seed, fraction].same_class.mean()),
                        "recall_unprotected": _unprotected(search, which),
                    }
                    for fraction, one in found.items()
                ]
    return rows


def _mechanisms(
    method: str, epsilons: Sequence[float], fraction: float, search: Search, public: Public
) -> Iterator[tuple[float, Release]]:
    """Build a mechanism for every epsilon; cells, which are the same at all of them, once."""
    known: Release | None = None
    for epsilon in epsilons:
        if isinstance(known, Cells):
            known = known.with_epsilon(epsilon)
        else:
            known = rival(method, epsilon, fraction, public)
            if isinstance(known, MappedRelease):
                known.index(search.trial.gallery)
        yield epsilon, known


def _unprotected(search: Search, which: Items) -> float:
    same = search.trial.gallery_y[search.truth[which]] == search.trial.query_y[which, None]
    return float(same.any(axis=1).mean())


@lru_cache(maxsize=2)
def _halves(data: str, half: int, whole: bool) -> tuple[Halves, Search, Public]:
    found = split_classes(data, SPLIT, half, whole_gallery=whole)
    return found, search_of(found.trial), Public(found.trial.public, found.trial.public_y)


def _class_rows(case: Case) -> list[Row]:
    whole = case["lacks"] == draw.LACKS[0]
    halves, search, public = _halves(case["data"], case["half"], whole)
    centred = rival("k-means cells", 1.0, CLASS_FRACTION, public)
    strange = true_neighbors(centred.features(halves.others).astype(np.float32), search.gallery, K)
    # Where the gallery has their classes all queries are of one kind; else strangers have favourites of their own.
    favourites = {
        True: search.counts,
        False: search.counts if whole else np.bincount(strange.ravel(), minlength=len(search.gallery)),
    }
    rows: list[Row] = []
    for epsilon, mechanism in _mechanisms(case["method"], CLASS_EPSILONS, CLASS_FRACTION, search, public):
        for seed in SEEDS:
            which = asked(seed, len(halves.known))
            for known in (True, False):
                some = which[halves.known[which] == known]
                found = find(mechanism, search, some, [CLASS_FRACTION], unsafe_seeded(seed))[CLASS_FRACTION]
                popular = favourites[known]
                rows.append(
                    {
                        **case,
                        "known": known,
                        "f": CLASS_FRACTION,
                        "epsilon": epsilon,
                        "delta": mechanism.guarantee.delta,
                        "seed": seed,
                        "queries": len(some),
                        "nn_recall": float(found.neighbours.mean()),
                        "recall": float(found.same_class.mean()),
                        "ceiling": neighbor_ceiling(epsilon, CLASS_FRACTION, popular),
                        "floor": float(unasked(search, some, CLASS_FRACTION, popular).neighbours.mean()),
                    }
                )
    return rows


def figures(rows: Sequence[Row]) -> "dict[str, Figure]":
    """Draw everything."""
    return {
        "nn-recall": draw.neighbours(rows, draw.BEST),
        "others": draw.neighbours(rows, draw.OTHERS),
        "recall": draw.same_class(rows),
        "classes": draw.classes(rows),
        "budget": draw.budget(rows),
    }


ABOUT = f"""
A client asks a gallery of images for what is nearest to its own, with one private message. The server answers with a
fraction f of the gallery, and the client chooses eight of that by its true feature, at home. How many of the true
eight nearest does it find?

*NN-recall@8* is the part of the true eight nearest items, by cosine, that the client ends with. *Recall@8* is how
often one of its eight is of the query's class. The [ceiling](../../theory/ceiling.md) is Theorem D: no message with
this epsilon finds more neighbours on average. It is a bound, but for the popularity of items, which is counted among
the gallery's own. The *floor* sends the most popular items to everybody and asks nothing. All else is measured.

Half of the classes are public: their images give the mean, principal directions, cells and anchors. The other half's
images are the gallery, and {QUERIES:,} of them are held out as queries: **every figure of the first two sections is
about classes that the public rows lack**. A seed asks {QUERIES // len(SEEDS)} of the held-out queries, no two seeds
the same, with noise of its own. The gallery, and so the map of covers, is one for all seeds: intervals (95%,
Student's t over {len(SEEDS)} seeds) are about queries and noise. Of covers and k-means cells every query is asked
four times. Candidates are re-ranked by whole features.

Features are those of an EfficientNet-Lite0, centred by the public mean, and not those of the papers' networks.
Epsilon is the exact one of the whole message, for every mechanism.
"""

STUDY = Study(
    name="retrieval",
    title="What every release finds, between floor and ceiling",
    about=ABOUT,
    cases=cases,
    measure=measure,
    figures=figures,
    tell=told,
    data=FILES,
    parameters={
        "epsilons": EPSILONS,
        "f": FRACTIONS,
        "k": K,
        "held-out queries": QUERIES,
        "seed of the split": SPLIT,
        "epsilons for classes": CLASS_EPSILONS,
        "f for classes": CLASS_FRACTION,
        "budget": BUDGET,
        "delta of the budget": DELTA,
        "methods": SETTINGS,
    },
    seeds=SEEDS,
)
