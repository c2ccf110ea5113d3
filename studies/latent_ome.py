"""LATENT and OME: the budget that is claimed, the one that was corrected in print, and the exact one."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from nearveil.mechanisms import OME, Latent
from studies import _figures as draw
from studies._search import FILES, QUERIES, SETTINGS, ask
from studies._study import Case, Row, Study, list_cases, select, summarise
from studies.bit_budgets import compute_budgets
from studies.retrieval import SEEDS, draw_neighbours, find_limits, load_search, measure_recall, select_queries

DEFAULT = "OME, its paper's code"
NOMINALS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
ALPHAS = (0.5, 1.0, 2.0, 4.0, 7.0, 20.0, 100.0)
DELTA = 1e-5
CODES: dict[str, dict[str, int]] = {
    "LATENT": {"values": 16, "integer_bits": 4, "fraction_bits": 5},
    "OME": {"values": 16, "integer_bits": 4, "fraction_bits": 5},
    DEFAULT: {"values": 50, "integer_bits": 5, "fraction_bits": 5},  # as its paper has it: 550 bits
}
DATA = "cub200_cropped_lite0"
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
FRACTION = 0.1
METHODS = ("covers", "PrivUnit", "unary, symmetric", "unary, optimised", "LATENT", "OME")
CLAIMED_ALPHA = 100.0  # of OME's paper
SHOWN_ALPHAS = (1.0, 7.0, 100.0)
SHOWN_NOMINALS = (0.1, 1.0, 10.0, 100.0)
_LINES = {  # columns: words, and the place of their look
    "claimed": ("claimed", 3),
    "correction": ("corrected in print: no LDP bound", 1),
    "exact": ("exact", 0),
    "at_delta": ("exact, at delta 1e-5", 4),
}


def cases() -> list[Case]:
    """Return all settings of a budget, then what is found at equal exact epsilon, and at OME's claimed one."""
    each = [[epsilon] for epsilon in EPSILONS]
    return [
        *list_cases(part=["budget"], mechanism=CODES, alpha=ALPHAS),
        *list_cases(part=["recall"], data=[DATA], method=METHODS, epsilons=each, fractions=[[FRACTION]]),
        {"part": "claimed", "data": DATA},
    ]


def measure(case: Case) -> list[Row]:
    """Compute or measure one case."""
    if case["part"] == "budget":
        return [_compute_budget(case["mechanism"], case["alpha"], nominal) for nominal in NOMINALS]
    return measure_recall(case) if case["part"] == "recall" else _measure_claimed()


def _compute_budget(name: str, alpha: float, nominal: float) -> Row:
    code = dict(CODES[name])
    kind: Any = Latent if name == "LATENT" else OME
    values = code.pop("values")
    # Budgets depend on the number of values alone, whatever the public rows are.
    public = np.random.default_rng(0).standard_normal((values + 1, values))
    results = compute_budgets(kind(nominal_epsilon=nominal, alpha=alpha, **code).fit(public), DELTA)
    return {
        "part": "budget",
        "mechanism": name,
        "bits": results.n_bits,
        "alpha": alpha,
        "claimed": nominal,
        "correction": results.published_correction,
        "exact": results.exact.per_vector,
        "code_word_bound": results.code_word_bound.per_vector,
        "at_delta": results.exact.per_vector_at_delta,
        "code_words_at_delta": results.code_word_bound.per_vector_at_delta,
        "claim_holds": results.claim_holds,
    }


def _measure_claimed() -> list[Row]:
    """Ask with OME as its paper has it, at epsilons that it claims."""
    search, rows = load_search(DATA), []
    directions = search.directions[:, : CODES[DEFAULT]["values"]]
    for epsilon in EPSILONS:
        mechanism = OME(nominal_epsilon=epsilon, alpha=CLAIMED_ALPHA, projection=directions)
        mechanism = mechanism.fit(search.trial.public, search.trial.public_y)
        common = {"part": "claimed", "data": DATA, "method": "OME", "epsilon": epsilon}
        common["exact"] = mechanism.guarantee.epsilon
        for seed in SEEDS:
            which = select_queries(seed, len(search.queries))
            rows += ask({**common, "seed": seed}, mechanism, search, which, [FRACTION])
    return rows


def figures(rows: pd.DataFrame) -> dict[str, Figure]:
    """Draw the budgets, and what is found."""
    return {
        "latent": _draw_budgets(rows, [("LATENT", alpha) for alpha in SHOWN_ALPHAS], (9.5, 3.9)),
        "ome": _draw_budgets(rows, [*(("OME", alpha) for alpha in SHOWN_ALPHAS), (DEFAULT, 100.0)], (10.8, 3.9)),
        "recall": _draw_recall(rows),
    }


def _draw_budgets(rows: pd.DataFrame, settings: Sequence[tuple[str, float]], size: tuple[float, float]) -> Figure:
    """Draw budgets over the claimed epsilon, a panel for each alpha."""
    figure, (line,) = draw.make_panels(1, len(settings), size, sharey=True)
    budgets = select(rows, part="budget").sort_values("claimed")
    groups = [select(budgets, mechanism=name, alpha=alpha).set_index("claimed", drop=False) for name, alpha in settings]
    shown = pd.concat([here[list(_LINES)] for here in groups])
    least = shown.where(shown > 0).min(axis=None)
    for axes, (name, alpha), here in zip(line, settings, groups, strict=True):
        for column, (words, position) in _LINES.items():
            sound = column in ("exact", "at_delta") or bool((here[column] >= here["exact"]).all())
            points = here.loc[here[column] > 0, column]
            if len(points):
                draw.curve(axes, words, draw.without_interval(points), sound=sound, index=position)
        lost = here.index[here["correction"] <= 0]
        if len(lost):
            marks = {"color": "black", "markerfacecolor": "white", "label": "correction is negative"}
            axes.plot(lost, [least / 2] * len(lost), "v", **marks)
        axes.set(xscale="log", yscale="log", xlabel="claimed epsilon of a vector")
        axes.set_title(f"{name}\n{here['bits'].iloc[0]} bits, alpha {alpha:g}", fontsize=9.5)
    draw.finish(figure, line, "epsilon of a vector")
    return figure


def _draw_recall(rows: pd.DataFrame) -> Figure:
    """Draw NN-recall at equal exact epsilon, and what OME finds at the epsilon that it claims."""
    figure, ((axes,),) = draw.make_panels(1, 1, (7.2, 5.2))
    results = select(rows, part="recall")
    draw_neighbours(axes, results)
    claimed = summarise(select(rows, part="claimed"), "nn_recall", "epsilon").sort_index()
    draw.curve(axes, "OME", claimed, sound=False, label="OME at its claimed epsilon")
    epsilons = results["epsilon"].unique()
    draw.epsilon_axis(axes, epsilons, label="epsilon of one query (exact, except for the dotted curve)")
    axes.set(ylim=(0, 1.005))
    draw.finish(figure, axes, "NN-recall@8")
    return figure


def facts(rows: pd.DataFrame) -> dict[str, Any]:
    """Return what was claimed, corrected and computed, and what is found."""
    budgets = select(rows, part="budget")
    latent = select(budgets, mechanism="LATENT")
    ratios = latent["correction"] / latent["exact"]
    default = select(budgets, mechanism=DEFAULT, alpha=100.0, claimed=10.0)
    holds = int(latent["claim_holds"].sum())
    return {
        "queries": QUERIES // len(SEEDS),
        "latent": {"holds": holds, "total": len(latent), "least": ratios.min(), "most": ratios.max()},
        "ome": [_count_failures(name, select(budgets, mechanism=name)) for name in ("OME", DEFAULT)],
        "default": default.to_dict("records"),
        "budgets": _list_budgets(budgets),
        **_find_leaks(select(rows, part="recall"), select(rows, part="claimed")),
    }


def _count_failures(name: str, rows: pd.DataFrame) -> dict[str, Any]:
    return {
        "name": name,
        "bits": rows["bits"].iloc[0],
        "total": len(rows),
        "false": int((~rows["claim_holds"].astype(bool)).sum()),
        "below": int((rows["correction"] < rows["exact"]).sum()),
        "negative": int((rows["correction"] < 0).sum()),
    }


def _list_budgets(budgets: pd.DataFrame) -> pd.DataFrame:
    shown = budgets[budgets["alpha"].isin(SHOWN_ALPHAS) & budgets["claimed"].isin(SHOWN_NOMINALS)]
    columns = {
        "claimed": "claimed",
        "correction": "corrected (not an LDP bound)",
        "exact": "exact",
        "code_word_bound": "code words, at most",
        "at_delta": "exact, at delta",
    }
    numbers = shown[list(columns)].map("{:,.4g}".format).rename(columns=columns)
    names = {"method": shown["mechanism"], "bits": shown["bits"], "alpha": shown["alpha"].map("{:g}".format)}
    return pd.concat([pd.DataFrame(names), numbers], axis=1)


def _find_leaks(results: pd.DataFrame, claimed: pd.DataFrame) -> dict[str, Any]:
    """Return the table of recalls, and where OME as claimed is above the ceiling, which is a leak."""
    ceilings, bottom = find_limits(results)
    both = pd.concat([results, claimed.assign(method="*OME at its claimed epsilon*")])
    means = summarise(both, "nn_recall", "method", "epsilon")
    cells = means.apply(lambda row: f"{row.value:.3f} ± {row.high - row.value:.3f}", axis=1).unstack(sort=False)
    cells = cells.sort_index(axis=1)
    cells.loc["*ceiling*"] = ceilings.map("{:.3f}".format)
    cells.loc["*floor*"] = f"{bottom:.3f}"
    low = summarise(claimed, "nn_recall", "epsilon")["low"]
    exact = sorted({round(value) for value in claimed["exact"]})
    return {
        "recalls": cells.rename(columns="eps {:g}".format).rename_axis("method").reset_index(),
        "leaks": ", ".join(f"{epsilon:g}" for epsilon in ceilings.index if low[epsilon] > ceilings[epsilon]),
        "claimed_exact": " to ".join(f"{value:,}" for value in dict.fromkeys((exact[0], exact[-1]))),
    }


PARAMETERS = {
    "nominal epsilons": NOMINALS,
    "alphas": ALPHAS,
    "delta": DELTA,
    "codes": CODES,
    "epsilons": EPSILONS,
    "f": FRACTION,
    "methods": {name: SETTINGS[name] for name in METHODS},
    "OME as claimed": f"PCA to 50, 550 bits, alpha {CLAIMED_ALPHA:g}",
}
STUDY = Study("latent-ome", cases, measure, figures, facts, FILES[:1], PARAMETERS, SEEDS)
