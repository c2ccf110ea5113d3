"""What every release finds between floor and ceiling, for which classes, and what a budget buys."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nearveil.mechanisms import Release
from nearveil.mechanisms.covers.covers import MappedRelease
from nearveil.search.ceiling import neighbor_ceiling
from nearveil.search.evaluation import true_neighbors
from studies import _figures as draw
from studies import _search as trials
from studies._report import show
from studies._search import BUDGET, DELTA, NAMES, QUERIES, SETS, SETTINGS, Items, K, Search, count_payable
from studies._study import Case, Row, Study, list_cases, select, summarise
from studies.baselines import Cells

EPSILONS = (0.01, 0.1, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
FRACTIONS = (0.05, 0.1, 0.2)
SEEDS = (0, 1, 2, 3, 4)
SPLIT = 0  # which images are in the gallery: one choice, because a map is learned for each epsilon and f
CLASS_EPSILONS = (1.0, 2.0, 4.0, 8.0)
CLASS_FRACTION = 0.1
CLASS_METHODS = ("covers", "k-means cells", "unary, symmetric", "PrivUnit", "LATENT")
LACKS = ("the public rows", "the public rows and the gallery")
BEST = ("covers", "k-means cells", "balanced cells, subset", "PrivUnit", "PrivUnit, all dimensions", "unary, symmetric",
        "LATENT")  # fmt: skip
OTHERS = ("unary, optimised", "analytic Gaussian", "von Mises-Fisher", "PrivateMail, Gaussian", "PrivateMail, Laplace",
          "DP-dSNE", "random projection", "OME")  # fmt: skip
BY_CLASS = ("covers", "k-means cells", "PrivUnit", "LATENT", "PrivateMail, Gaussian", "OME")
BUDGET_FRACTION = 0.1
LEAST_GAINING = 0.5  # epsilon below which what one query gains is lost in chance
NEAR = 0.9  # of the ceiling: "within 10%"
SMALL = f"{DELTA:.0e}".replace("e-0", "e-")
WAYS = {"pure": "delta 0", "plan": f"delta {SMALL}"}
_PAID = (
    ("a pure message", "pure", "pure, delta 0"),
    ("a pure message", "plan", f"pure, delta {SMALL}"),
    ("analytic Gaussian", "plan", f"Gaussian, delta {SMALL}"),
)
_KNOWN_GAIN = ("covers", "k-means cells", "analytic Gaussian")
_SLACK = 0.005  # seeds that all agree have an interval of no width
_SHOWN = (0.01, 1.0, 2.0, 4.0, 8.0, 16.0)
_SLOW = "covers"  # seconds for each map: a case for each


@cache
def load_search(data: str) -> Search:
    """Return the one split of a set that all seeds search."""
    return trials.build_search(trials.split(data, SPLIT))


def select_queries(seed: int, queries: int) -> Items:
    """Return which of the held-out queries a seed asks: no two seeds ask the same."""
    each = queries // len(SEEDS)
    order = np.random.default_rng(SPLIT).permutation(queries)
    return order[seed * each : (seed + 1) * each]


def cases() -> list[Case]:
    """Return every method on every set; of covers, every map; then classes and budgets."""
    one_by_one = {"fractions": [[fraction] for fraction in FRACTIONS], "epsilons": [[epsilon] for epsilon in EPSILONS]}
    together = {"fractions": [list(FRACTIONS)], "epsilons": [list(EPSILONS)]}
    others = [method for method in SETTINGS if method != _SLOW]
    return [
        *list_cases(part=["recall"], data=SETS, method=[_SLOW], **one_by_one),
        *list_cases(part=["recall"], data=SETS, method=others, **together),
        *list_cases(part=["classes"], data=SETS, lacks=LACKS, half=(0, 1), method=CLASS_METHODS),
        *list_cases(part=["budget"], method=trials.PRICED, epsilon=EPSILONS),
    ]


def measure(case: Case) -> list[Row]:
    """Measure one case."""
    if case["part"] == "recall":
        return measure_recall(case)
    if case["part"] == "classes":
        return _measure_classes(case)
    return [{**case, "budget": BUDGET, **count_payable(case["method"], case["epsilon"])}]


def measure_recall(case: Case) -> list[Row]:
    """Ask all seeds' queries with one mechanism."""
    search, method, fractions = load_search(case["data"]), case["method"], case["fractions"]
    common = {name: case[name] for name in ("part", "data", "method")}
    rows: list[Row] = []
    for group in [[fraction] for fraction in fractions] if method in trials.MAPPED else [fractions]:
        for epsilon, mechanism in _make_mechanisms(method, case["epsilons"], group[0], search):
            for seed in SEEDS:
                which = select_queries(seed, len(search.queries))
                same = search.trial.gallery_y[search.truth[which]] == search.trial.query_y[which, None]
                for row in trials.ask({**common, "epsilon": epsilon, "seed": seed}, mechanism, search, which, group):
                    pure_ceiling = neighbor_ceiling(epsilon, row["f"], search.counts)
                    unprotected = float(same.any(axis=1).mean())
                    rows.append({**row, "pure_ceiling": pure_ceiling, "recall_unprotected": unprotected})
    return rows


def _make_mechanisms(
    method: str, epsilons: Sequence[float], fraction: float, search: Search
) -> Iterator[tuple[float, Release]]:
    """Build a mechanism for every epsilon; cells, which are the same at all of them, once."""
    mechanism: Release | None = None
    for epsilon in epsilons:
        if isinstance(mechanism, Cells):
            mechanism = mechanism.with_epsilon(epsilon)
        else:
            mechanism = trials.make_rival(method, epsilon, fraction, search)
            if isinstance(mechanism, MappedRelease):
                mechanism = mechanism.index(search.trial.gallery)
        yield epsilon, mechanism


@lru_cache(maxsize=2)
def _load_halves(data: str, half: int, whole: bool) -> tuple[trials.Halves, Search]:
    halves = trials.split_classes(data, SPLIT, half, whole_gallery=whole)
    return halves, trials.build_search(halves.trial)


def _measure_classes(case: Case) -> list[Row]:
    whole = case["lacks"] == LACKS[0]
    halves, search = _load_halves(case["data"], case["half"], whole)
    favourites = {True: search.counts, False: search.counts}
    if not whole:  # where the gallery lacks their classes, strangers have favourites of their own
        strange = true_neighbors(trials.centre(halves.trial, halves.others).astype(np.float32), search.gallery, K)
        favourites[False] = np.bincount(strange.ravel(), minlength=len(search.gallery))
    rows: list[Row] = []
    for epsilon, mechanism in _make_mechanisms(case["method"], CLASS_EPSILONS, CLASS_FRACTION, search):
        for seed in SEEDS:
            which = select_queries(seed, len(halves.known))
            for seen in (True, False):
                part = which[halves.known[which] == seen]
                common = {**case, "known": seen, "epsilon": epsilon, "seed": seed, "queries": len(part)}
                rows += trials.ask(common, mechanism, search, part, [CLASS_FRACTION], favourites[seen])
    return rows


def find_limits(results: pd.DataFrame) -> tuple[pd.Series, float]:
    """Return the ceiling of pure messages at every epsilon, and the floor."""
    first = results[results["method"] == results["method"].iloc[0]]
    return results.groupby("epsilon")["pure_ceiling"].last(), float(first["floor"].mean())


def figures(rows: pd.DataFrame) -> dict[str, Figure]:
    """Draw what is found over epsilon, for which classes, and what a budget buys."""
    results = select(rows, part="recall")
    return {
        "nn-recall": _draw_grid(results, partial(draw_neighbours, only=BEST), "NN-recall@8"),
        "others": _draw_grid(results, partial(draw_neighbours, only=OTHERS), "NN-recall@8"),
        "recall": _draw_grid(results, _draw_same_class, "Recall@8 (same class)"),
        "classes": _draw_classes(rows),
        "budget": _draw_budget(rows),
    }


def _draw_grid(results: pd.DataFrame, draw_panel: Callable[[Axes, pd.DataFrame], None], label: str) -> Figure:
    """Draw a line of panels for each set, a column for each f."""
    results = results.sort_values(["data", "f"], ascending=[False, True], kind="stable")
    size = (10.5, 0.9 + 2.75 * results["data"].nunique())
    figure, panels, cells = draw.make_grid(results, size, line="data", column="f", sharex=True, sharey=True)
    for axes, (data, fraction), here in cells:
        draw_panel(axes, here)
        axes.set(title=f"{NAMES.get(data, data)}, answers of {fraction:.0%}", ylim=(0, 1.005))
        draw.epsilon_axis(axes, here["epsilon"].unique(), label="epsilon of one query" if axes in panels[-1] else "")
    draw.finish(figure, panels, label, ncols=5)
    return figure


def draw_neighbours(axes: Axes, here: pd.DataFrame, only: Sequence[str] | None = None) -> None:
    """Draw NN-recall over epsilon, between floor and ceiling."""
    ceilings, bottom = find_limits(here)
    draw.ceiling(axes, ceilings.index.to_list(), ceilings.to_list())
    draw.floor(axes, bottom)
    draw.curves(axes, here, "nn_recall", "epsilon", only=only)


def _draw_same_class(axes: Axes, here: pd.DataFrame) -> None:
    draw.floor(axes, here["recall_floor"].mean())
    top, style = here["recall_unprotected"].mean(), draw.look("no privacy")
    axes.axhline(top, color=style.colour, linestyle=style.dashes, linewidth=1.2, label="no privacy")
    draw.curves(axes, here, "recall", "epsilon", only=BY_CLASS)


def _draw_classes(rows: pd.DataFrame) -> Figure:
    """Draw the difference of recall between queries of missing and of known classes, for each seed."""
    results = compute_differences(rows).sort_values("data", ascending=False, kind="stable")
    size = (9.0, 0.8 + 2.7 * results["data"].nunique())
    figure, panels, cells = draw.make_grid(results, size, line="data", column="lacks", sharey=True, sharex=True)
    for axes, (data, lacks), here in cells:
        axes.axhline(0, color="black", linewidth=1.0)
        draw.curves(axes, here, "difference", "epsilon")
        axes.set_title(f"{NAMES.get(data, data)}: {lacks} lack the class")
        draw.epsilon_axis(axes, here["epsilon"].unique(), label="epsilon of one query" if axes in panels[-1] else "")
    draw.finish(figure, panels, "NN-recall@8, missing minus known", ncols=5)
    return figure


def _draw_budget(rows: pd.DataFrame) -> Figure:
    """Draw how many queries a budget pays for, and what they find beyond the floor."""
    figure, ((left, *rest),) = draw.make_panels(1, 3, (10.5, 4.4))
    paid = select(rows, part="budget").sort_values("epsilon")
    for position, (kind, way, name) in enumerate(_PAID):
        count = select(paid, method=kind).set_index("epsilon")[way]
        draw.curve(left, name, draw.without_interval(count), index=position)
    left.set(yscale="log", title=f"Queries that epsilon {BUDGET:g} pays for", ylabel="queries")
    left.legend(loc="upper right")
    draw.epsilon_axis(left, paid["epsilon"].unique())
    results = compute_gains(rows)
    results = results[(results["data"] == results["data"].max()) & (results["epsilon"] >= LEAST_GAINING)]
    top = 1.3 * select(results, method="covers")["gain"].max()
    for axes, (way, title) in zip(rest, WAYS.items(), strict=True):
        here = select(results, way=way)
        bound = select(here, method="ceiling").groupby("epsilon")["gain"].mean()
        draw.ceiling(axes, bound.index.to_list(), bound.to_list(), top=2 * top)
        draw.floor(axes, 0.0)
        answers = here.groupby("method", sort=False)["queries"].max()
        draw.curves(axes, here[here["method"] != "ceiling"], "gain", "epsilon", only=answers.index[answers > 0])
        axes.set_title(f"Found beyond the floor, {title}")
        axes.set(ylabel="true neighbours in total", ylim=(-0.6 * top, top))
        draw.epsilon_axis(axes, bound.index)
    draw.finish(figure, rest, ncols=5)
    return figure


def compute_differences(rows: pd.DataFrame) -> pd.DataFrame:
    """Return, for each seed, what queries find while their classes are lacking, less while they are known."""
    part = select(rows, part="classes")
    keys, columns = ["data", "lacks", "method", "epsilon", "seed"], ["nn_recall", "ceiling", "floor"]
    by = [part[key] for key in (*keys, "known")]
    sums = part[columns].astype(float).mul(part["queries"], axis=0).groupby(by, sort=False).sum()
    both = sums.div(part["queries"].groupby(by, sort=False).sum(), axis=0)
    seen, lacking = (both.xs(which, level="known") for which in (True, False))
    results = seen.add_prefix("known_").join(lacking.add_prefix("lacking_")).reset_index()
    return results.assign(difference=results["lacking_nn_recall"] - results["known_nn_recall"])


def compute_gains(rows: pd.DataFrame) -> pd.DataFrame:
    """Return how many true neighbours a budget finds beyond the floor; no method passes "ceiling"."""
    results, paid = select(rows, part="recall", f=BUDGET_FRACTION), select(rows, part="budget")
    results = results[results["method"].isin(_KNOWN_GAIN)]
    kinds = results["method"].where(results["method"] == "analytic Gaussian", "a pure message")
    prices = paid.rename(columns={"method": "kind"}).melt(
        ["kind", "epsilon"], list(WAYS), var_name="way", value_name="queries"
    )
    results = results.assign(kind=kinds).merge(prices, on=["kind", "epsilon"])
    top = results[results["method"] == "covers"]
    return pd.concat(
        [
            results.assign(gain=K * results["queries"] * (results["nn_recall"] - results["floor"])),
            top.assign(gain=K * top["queries"] * (top["pure_ceiling"] - top["floor"]), method="ceiling"),
        ]
    )[["data", "method", "epsilon", "seed", "way", "queries", "gain"]]


def facts(rows: pd.DataFrame) -> dict[str, Any]:
    """Return what the page says; every number is one of the rows."""
    results = select(rows, part="recall")
    return {
        "queries_a_seed": QUERIES // len(SEEDS),
        "sets": " and ".join(NAMES.get(name, name) for name in results["data"].unique()),
        "slack": _SLACK,
        **compare_with_floor(results),
        "above": find_above(results),
        "recalls": _list_recalls(results),
        **_compare_with_ceiling(results),
        **_compare_by_class(results),
        **_compare_classes(compute_differences(rows)),
        **_compare_budgets(rows),
    }


def compare_with_floor(results: pd.DataFrame) -> dict[str, Any]:
    """Return who is better than asking nothing, and from which epsilon on everywhere."""
    passes = _mean_of(results.assign(gain=results["nn_recall"] - results["floor"]), "gain") > 0
    count = passes.groupby("method").sum()
    ordered = sorted(((int(good), name) for name, good in count.items()), reverse=True)
    everywhere = passes.groupby(["method", "epsilon"]).all()
    least = {}
    for method in results["method"].unique():
        run = everywhere[method].sort_index(ascending=False).cummin()
        if run.any():
            least[method] = run[run].index.min()
    return {
        "n_settings": int(passes.groupby("method").size().iloc[0]),
        "passing": [(good, name) for good, name in ordered if good],
        "never": [name for good, name in ordered if not good],
        "everywhere": least,
    }


def _mean_of(results: pd.DataFrame, column: str) -> pd.Series:
    return summarise(results, column, "method", "data", "f", "epsilon")["value"]


def find_above(results: pd.DataFrame) -> list[str]:
    """Return which means are above the ceiling beyond their interval: sound releases must not be."""
    keys = ["data", "method", "f", "epsilon"]
    tops = results.groupby(keys, sort=False)["ceiling"].first()
    over = summarise(results, "nn_recall", *keys)["low"] > tops + _SLACK
    return [
        f"{method} ({NAMES.get(data, data)}, f {fraction:g}, epsilon {epsilon:g})"
        for data, method, fraction, epsilon in over.index[over]
    ]


def _list_recalls(results: pd.DataFrame) -> pd.DataFrame:
    """Return NN-recall and its share of the ceiling, with ceiling and floor below, at one f."""
    here = results[(results["f"] == BUDGET_FRACTION) & results["epsilon"].isin(_SHOWN)]
    parts = []
    for data, part in here.groupby("data", sort=False):
        groups = part.groupby(["method", "epsilon"], sort=False)
        both = groups.agg(value=("nn_recall", "mean"), ceiling=("ceiling", "first"))
        cells = both.apply(lambda row: f"{row.value:.3f} ({row.value / row.ceiling:.2f})", axis=1).unstack(sort=False)
        ceilings, bottom = find_limits(part)
        cells.loc["*ceiling, delta 0*"] = ceilings.map("{:.3f}".format)
        cells.loc["*floor*"] = f"{bottom:.3f}"
        cells = cells.rename(columns="eps {:g}".format).rename_axis(f"f {BUDGET_FRACTION:g}").reset_index()
        cells.insert(0, "data", NAMES.get(data, data))
        parts.append(cells)
    return pd.concat(parts)


def _compare_with_ceiling(results: pd.DataFrame) -> dict[str, Any]:
    """Return how near covers come to the ceiling."""
    covers = select(results, method="covers")
    covers = covers.assign(share=covers["nn_recall"] / covers["ceiling"], data=covers["data"].replace(NAMES))
    shares = summarise(covers, "share", "data", "f", "epsilon")["value"]
    cells = shares.map(lambda share: f"{share:.3f}" if share >= NEAR else f"*{share:.3f}*").unstack(sort=False)
    lines = cells.sort_index(axis=1).rename(columns="eps {:g}".format).reset_index()
    return {
        "near": int((shares >= NEAR).sum()),
        "n_shares": len(shares),
        "far": [f"{data} f {f:g} epsilon {epsilon:g}" for data, f, epsilon in shares.index[shares < NEAR]],
        "shares": lines.assign(f=lines["f"].map("{:g}".format)),
    }


def _compare_by_class(results: pd.DataFrame) -> dict[str, Any]:
    """Return what popular items find by class, and where covers, which are learned for neighbours, find less."""
    covers = select(results, method="covers")
    covers = covers.assign(gain=covers["recall"] - covers["recall_floor"])
    below = summarise(covers, "gain", "data", "f", "epsilon")["high"] < 0
    floors = results.groupby(["data", "f"], sort=False)["recall_floor"].mean()
    return {
        "class_floors": ", ".join(f"{share:.2f} ({NAMES.get(d, d)}, f {f:g})" for (d, f), share in floors.items()),
        "below_class_floor": int(below.sum()),
        "n_covers": len(below),
    }


def _compare_classes(results: pd.DataFrame) -> dict[str, Any]:
    """Return what is found for classes that are known, and for those that are lacking."""
    epsilon = 4.0 if (results["epsilon"] == 4.0).any() else results["epsilon"].iloc[0]
    here = select(results, epsilon=epsilon)
    groups = here.groupby(["data", "lacks", "method"], sort=False)
    sides = [f"{side}_{name}" for side in ("known", "lacking") for name in ("nn_recall", "ceiling", "floor")]
    gap = show(here, "difference", "data", "lacks", "method", spec="+.3f")
    lines = groups[sides].mean().map("{:.3f}".format).assign(difference=gap)
    lines = lines.rename(index=NAMES, level="data").reset_index()
    head = ["data", "missing from", "method", "known", "ceiling", "floor", "missing", "ceiling", "floor", "difference"]
    worst = summarise(results, "difference", "lacks", "method", "data", "epsilon")["value"]
    worst = worst.groupby(["lacks", "method"], sort=False).min()
    return {
        "class_epsilon": epsilon,
        "known_and_lacking": lines.set_axis(head, axis=1),
        "gaps": {lacks: worst[lacks].to_dict() for lacks in LACKS},
    }


def _compare_budgets(rows: pd.DataFrame) -> dict[str, Any]:
    """Return how many queries a budget pays for, and what covers find with them."""
    results, paid = compute_gains(rows), select(rows, part="budget").set_index(["method", "epsilon"]).sort_index()
    covers, data = select(results, method="covers"), results["data"].max()
    total = show(select(covers, data=data), "gain", "way", "epsilon", spec=",.1f")
    epsilons = sorted(results["epsilon"].unique())
    pure, gaussian = (paid.loc[kind].loc[epsilons, list(WAYS)].map("{:,}".format) for kind in trials.PRICED)
    lines = pd.DataFrame(
        {
            "epsilon of a query": [f"{epsilon:g}" for epsilon in epsilons],
            "queries, delta 0": pure["pure"].to_list(),
            f"queries, delta {SMALL}": pure["plan"].to_list(),
            f"Gaussian queries, delta {SMALL}": gaussian["plan"].to_list(),
            **{f"covers find, {words}": total[way].loc[epsilons].to_list() for way, words in WAYS.items()},
        }
    )
    certain = covers[covers["epsilon"] >= LEAST_GAINING]
    means = certain.groupby(["data", "way", "epsilon"], sort=False)["gain"].mean()
    tops = means.groupby(["data", "way"], sort=False).idxmax()
    return {
        "budget_data": NAMES.get(data, data),
        "budgets": lines,
        "best": [(NAMES.get(key[0], key[0]), WAYS[key[1]], key[2], means[key]) for key in tops],
    }


PARAMETERS = {
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
}
STUDY = Study("retrieval", cases, measure, figures, facts, trials.FILES, PARAMETERS, SEEDS)
