"""Free abstention: what declining by a noisy margin gains with individual accounting."""

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from nearveil.private_knn import PrivateKNeighborsClassifier
from studies import _figures as draw
from studies import individual as shared
from studies._study import Case, Row, Study, list_cases, select, summarise
from studies.accounting import DELTA

SEEDS = (0, 1, 2)
DRAWS = 2  # of the noise
EPSILONS = (0.5, 1.0, 2.0)
QUERIES = 500
MARGINS = (0.0, 1.0, 2.0, 4.0, 8.0)
DEFAULT = 2.0


def cases() -> list[Case]:
    """Return every split of every set."""
    return list_cases(data=shared.SIZES, seed=SEEDS)


def measure(case: Case) -> list[Row]:
    """Answer the same queries with every margin."""
    private, public, (rows, truth) = shared.split_rows(case["data"], case["seed"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # answers that are mostly noise are a part of the study
        return [{**case, **row} for row in _score(private, public, (rows[:QUERIES], truth[:QUERIES]))]


def _score(private: shared.Part, public: shared.Part, queries: shared.Part) -> Iterator[Row]:
    rows, truth = queries
    for epsilon in EPSILONS:
        for margin in MARGINS:
            shares = []
            for _ in range(DRAWS):
                voter = PrivateKNeighborsClassifier(
                    epsilon,
                    DELTA,
                    len(rows),
                    max_screened=0,
                    classes=np.unique(private[1]),
                    accounting="individual",
                    margin=margin,
                )
                answers = voter.fit(*private, public=public[0]).answer(rows)
                right = (answers.labels == truth)[answers.answered]
                shares.append((answers.answered.mean(), right.mean() if len(right) else np.nan))
            answered, accuracy = np.nanmean(shares, axis=0)
            yield {"epsilon": epsilon, "margin": margin, "answered": float(answered), "right": float(accuracy)}


def figures(rows: pd.DataFrame) -> dict[str, Figure]:
    """Draw the share of right answers over the margin, a curve for each epsilon."""
    names = [name for name in shared.SIZES if name in set(rows["data"])]
    figure, (panels,) = draw.make_panels(1, len(names), (3.2 * len(names), 3.6), sharey=True)
    for axes, name in zip(panels, names, strict=True):
        for position, epsilon in enumerate(EPSILONS):
            here = select(rows, data=name, epsilon=epsilon)
            draw.curve(axes, f"epsilon {epsilon:g}", summarise(here, "right", "margin"), index=position)
        axes.set(title=shared.TITLES[name], xlabel="margin, in units of noise", ylim=(0, 1.02))
    draw.finish(figure, panels, "right of the answered queries")
    return {"accuracy": figure}


def facts(rows: pd.DataFrame) -> dict[str, Any]:
    """Return a table for each set, and what the default margin gains."""
    tables = {
        shared.TITLES[name]: _tabulate(select(rows, data=name)) for name in shared.SIZES if name in set(rows["data"])
    }
    mean = rows.astype({"answered": float, "right": float}).groupby(["margin"])[["answered", "right"]].mean()
    return {
        "tables": tables,
        "answered": mean["answered"][DEFAULT],
        "right": mean["right"][DEFAULT],
        "right_of_all": mean["right"][MARGINS[0]],
    }


def _tabulate(rows: pd.DataFrame) -> pd.DataFrame:
    means = rows.astype({"answered": float, "right": float}).groupby(["epsilon", "margin"], sort=False)
    table = means[["answered", "right"]].mean().reset_index()
    printed = {"epsilon": "{:g}", "margin": "{:g}", "answered": "{:.1%}", "right": "{:.1%}"}
    return pd.DataFrame({name: table[name].map(text.format).replace("nan%", "") for name, text in printed.items()})


PARAMETERS = {"delta": DELTA, "queries": QUERIES, "draws of noise": DRAWS, "rows": shared.PARAMETERS[shared.ROWS]}
STUDY = Study("abstention", cases, measure, figures, facts, shared.DATA, PARAMETERS, SEEDS)
