"""What compact codes lose on real features, what a code must know, and whose popularity counts."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.optimize import brentq

from nearveil.gallery.codes import Codes, Singles, make_codes
from nearveil.mechanisms.messages import candidate_count
from nearveil.search.ceiling import popular_floor
from nearveil.search.evaluation import Copies, true_neighbors
from studies import _figures as draw
from studies._report import show
from studies._search import FILES, NAMES, QUERIES, SETS, centre, count_popularity, split
from studies._study import Case, Row, Study, list_cases, select

K = 8
SIZES = (0, 128, 256, 512)  # bytes of a candidate; 0 for whole features
ONE_SEED = (256, 512)  # their tables take up to a minute
SEEDS = (0, 1, 2)
MOST = 0.01  # the loss that "auto" allows
POPULAR = 0.2
_BLOCK = 200


def measure_loss(gallery: Singles, queries: Singles, codes: Codes) -> float:
    """Return the part of the true neighbours that ranking the whole gallery by codes misses."""
    truth, copies = true_neighbors(queries, gallery, K), Copies(gallery)
    written = codes.encode(gallery)
    results = 0.0
    for start in range(0, len(queries), _BLOCK):
        scores = codes.scores(queries[start : start + _BLOCK], written)
        chosen: NDArray[np.intp] = np.argpartition(-scores, K, axis=1)[:, :K]
        results += copies.recall(truth[start : start + _BLOCK], chosen).sum()
    return 1 - results / len(queries)


def estimate_needs(gallery: Singles, queries: Singles, seed: int = 0) -> tuple[float, float]:
    """Return the noise of scores that loses `MOST`, and the bytes that a Gaussian source needs for so little.

    Shannon's rate, by reverse water-filling over principal directions; errors count as much as queries vary there.
    """
    truth, copies, scores = true_neighbors(queries, gallery, K), Copies(gallery), queries @ gallery.T
    drawn = np.random.default_rng(seed).standard_normal(scores.shape, dtype=np.float32)

    def excess(log_noise: float) -> float:
        chosen = np.argpartition(-(scores + np.float32(np.exp(log_noise)) * drawn), K, axis=1)[:, :K]
        return 1 - float(copies.recall(truth, chosen).mean()) - MOST

    noise = float(np.exp(brentq(excess, np.log(1e-5), np.log(1e-2), xtol=0.02)))
    mean = gallery.mean(axis=0)
    variances, directions = np.linalg.eigh(np.cov((gallery - mean).T))
    variances = np.maximum(variances, 1e-12)
    weights = np.mean(((queries - mean) @ directions) ** 2, axis=0, dtype=np.float64)

    def distortions(log_level: float) -> NDArray[np.float64]:
        return np.asarray(np.minimum(variances, np.exp(log_level) / weights))

    level = brentq(lambda log_level: np.sqrt(weights @ distortions(log_level)) - noise, -60, 0)
    return noise, float(0.5 * np.log2(variances / distortions(level)).sum() / 8)


def cases() -> list[Case]:
    """Return every set and split: sizes one by one, then popularity and what a loss of 0.01 takes."""
    losses = list_cases(part=["loss"], data=SETS, bytes=SIZES, seed=SEEDS)
    measured = [case for case in losses if case["bytes"] not in ONE_SEED or case["seed"] == SEEDS[0]]
    return [*measured, *list_cases(part=["gallery"], data=SETS, seed=SEEDS)]


def measure(case: Case) -> list[Row]:
    """Measure one case."""
    trial = split(case["data"], case["seed"])
    gallery, queries = (centre(trial, rows).astype(np.float32) for rows in (trial.gallery, trial.queries))
    if case["part"] == "loss":
        codes = make_codes(gallery, case["bytes"] or None)
        size = case["bytes"] or 4 + codes.width
        return [{**case, "bytes": size, "table_bytes": codes.nbytes, "loss": measure_loss(gallery, queries, codes)}]
    noise, rate = estimate_needs(gallery, queries, seed=case["seed"])
    counts = count_popularity(gallery, K)
    query_counts = np.bincount(true_neighbors(queries, gallery, K).ravel(), minlength=len(gallery))
    top = np.argsort(-counts, kind="stable")[: candidate_count(POPULAR, len(gallery))]
    return [
        {
            **case,
            "noise": noise,
            "rate_bytes": rate,
            "by_gallery": popular_floor(POPULAR, counts),
            "by_queries": popular_floor(POPULAR, query_counts),
            "by_gallery_on_queries": float(query_counts[top].sum() / query_counts.sum()),
        }
    ]


def figures(rows: pd.DataFrame) -> dict[str, Figure]:
    """Draw the loss over the bytes of a candidate."""
    figure, ((axes,),) = draw.make_panels(1, 1, (5.6, 3.6))
    lost = select(rows, part="loss")
    draw.curves(axes, lost, "loss", "bytes", by="data", labels=NAMES)
    axes.axhline(MOST, color="0.45", linewidth=1.0, linestyle="--", label="limit of the default")
    axes.set(xscale="log", yscale="log", xlabel="bytes per candidate", ylabel="share of the true top 8 lost")
    ticks = sorted(lost["bytes"].unique())
    draw.set_ticks(axes, ticks, [f"{tick:,}" for tick in ticks])
    axes.legend()
    return {"loss": figure}


def facts(rows: pd.DataFrame) -> dict[str, Any]:
    """Return what codes lose, what a small loss takes, and whose popularity counts."""
    lost, galleries = select(rows, part="loss"), select(rows, part="gallery")
    popular = {
        "the gallery's items, each without itself": show(galleries, "by_gallery", "data"),
        f"the {QUERIES:,} test queries": show(galleries, "by_queries", "data"),
        "items chosen by the first, measured on the second": show(galleries, "by_gallery_on_queries", "data"),
    }
    losses = show(lost, "loss", "bytes", "data", spec=".4f").unstack("data", sort=False)
    tables = lost.groupby("bytes")["table_bytes"].first().map(lambda n: f"{n / 1e6:.1f} MB" if n > 1000 else "none")
    losses.insert(0, "public table", tables)
    losses = losses.sort_index().rename(columns=NAMES, index="{:,}".format).rename_axis("bytes per candidate")
    return {
        "one_seed": " and ".join(map(str, ONE_SEED)),
        "losses": losses.reset_index(),
        "needs": [
            {"name": NAMES.get(data, data), "noise": group["noise"].mean(), "bytes": group["rate_bytes"].mean()}
            for data, group in galleries.groupby("data", sort=False)
        ],
        "popular": pd.DataFrame(popular).T.rename(columns=NAMES).rename_axis("queries").reset_index(),
    }


PARAMETERS = {"bytes": SIZES[1:], "k": K, "held-out queries": QUERIES, "popular items": POPULAR}
STUDY = Study("codes", cases, measure, figures, facts, FILES, PARAMETERS, SEEDS)
