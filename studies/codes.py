"""What compact codes lose on real features, what a code must know, and whose popularity counts."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

from nearveil.release import Covers
from nearveil.release._base import candidate_count
from nearveil.retrieval._codes import Codes, Singles, make_codes
from nearveil.retrieval._truth import Copies, popularity, true_neighbors
from nearveil.retrieval.ceiling import popular_floor
from studies import _style
from studies._report import table
from studies._study import Case, Row, Study, grouped, mean
from studies._trial import FILES, NAMES, QUERIES, SETS, Trial, split

if TYPE_CHECKING:
    from matplotlib.figure import Figure

K = 8
SIZES = (0, 128, 256, 512)  # bytes of a candidate; 0 for whole features
ONE_SEED = (256, 512)  # their tables take up to a minute
SEEDS = (0, 1, 2)
MOST = 0.01  # the loss that "auto" allows
POPULAR = 0.2
_BLOCK = 200


def rows_of(trial: Trial) -> tuple[Singles, Singles]:
    """Return gallery and queries: centred by the mean of the public rows, of norm one."""
    mechanism = Covers(1.0).fit(trial.public)
    return mechanism.features(trial.gallery).astype(np.float32), mechanism.features(trial.queries).astype(np.float32)


def loss(gallery: Singles, queries: Singles, codes: Codes) -> float:
    """Return the part of the true neighbours that ranking the whole gallery by codes misses."""
    truth, copies = true_neighbors(queries, gallery, K), Copies(gallery)
    written = codes.encode(gallery)
    found = 0.0
    for start in range(0, len(queries), _BLOCK):
        scores = codes.scores(queries[start : start + _BLOCK], written)
        chosen: NDArray[np.intp] = np.argpartition(-scores, K, axis=1)[:, :K]
        found += copies.recall(truth[start : start + _BLOCK], chosen).sum()
    return 1 - found / len(queries)


def needed(gallery: Singles, queries: Singles, most: float = MOST, seed: int = 0) -> tuple[float, float]:
    """Return the noise of scores that loses `most`, and the bytes that a Gaussian source needs for so little.

    The source has independent coordinates with the gallery's variances along its principal directions. An error along
    a direction counts as much as queries vary there. Shannon's rate, by reverse water-filling.
    """
    truth, copies, scores = true_neighbors(queries, gallery, K), Copies(gallery), queries @ gallery.T
    drawn = np.random.default_rng(seed).standard_normal(scores.shape, dtype=np.float32)

    def excess(log_noise: float) -> float:
        chosen = np.argpartition(-(scores + np.float32(np.exp(log_noise)) * drawn), K, axis=1)[:, :K]
        return 1 - float(copies.recall(truth, chosen).mean()) - most

    noise = float(np.exp(brentq(excess, np.log(1e-5), np.log(1e-2), xtol=0.02)))
    centre = gallery.mean(axis=0)
    variances, directions = np.linalg.eigh(np.cov((gallery - centre).T))
    variances = np.maximum(variances, 1e-12)
    weights = np.mean(((queries - centre) @ directions) ** 2, axis=0, dtype=np.float64)

    def distortions(log_level: float) -> NDArray[np.float64]:
        return np.asarray(np.minimum(variances, np.exp(log_level) / weights))

    level = brentq(lambda log_level: np.sqrt(weights @ distortions(log_level)) - noise, -60, 0)
    return noise, float(0.5 * np.log2(variances / distortions(level)).sum() / 8)


def cases() -> list[Case]:
    """Return every set and split: sizes one by one, then popularity and what a loss of 0.01 takes."""
    return [
        *(
            {"part": "loss", "data": data, "bytes": size, "seed": seed}
            for data in SETS
            for size in SIZES
            for seed in SEEDS
            if size not in ONE_SEED or seed == SEEDS[0]
        ),
        *({"part": "gallery", "data": data, "seed": seed} for data in SETS for seed in SEEDS),
    ]


def measure(case: Case) -> list[Row]:
    """Measure one case."""
    gallery, queries = rows_of(split(case["data"], case["seed"]))
    if case["part"] == "loss":
        codes = make_codes(gallery, case["bytes"] or None)
        size = case["bytes"] or 4 + codes.width
        return [{**case, "bytes": size, "table_bytes": codes.nbytes, "loss": loss(gallery, queries, codes)}]
    noise, rate = needed(gallery, queries, seed=case["seed"])
    counts = popularity(gallery, K)
    asked = np.bincount(true_neighbors(queries, gallery, K).ravel(), minlength=len(gallery))
    top = np.argsort(-counts, kind="stable")[: candidate_count(POPULAR, len(gallery))]
    return [
        {
            **case,
            "noise": noise,
            "rate_bytes": rate,
            "by_gallery": popular_floor(POPULAR, counts),
            "by_queries": popular_floor(POPULAR, asked),
            "by_gallery_on_queries": float(asked[top].sum() / asked.sum()),
        }
    ]


def figures(rows: Sequence[Row]) -> "dict[str, Figure]":
    """Draw the loss over the bytes of a candidate."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 3.6), layout="constrained")
    axes = figure.subplots()
    lost = [row for row in rows if row["part"] == "loss"]
    for place, ((data,), some) in enumerate(grouped(lost, "data").items()):
        groups = {size: group for (size,), group in grouped(some, "bytes").items()}
        sizes = sorted(groups)
        found = [mean(row["loss"] for row in groups[size]) for size in sizes]
        _style.curve(axes, NAMES.get(data, data), sizes, found, place=place)
    axes.axhline(MOST, color="0.45", linewidth=1.0, linestyle="--", label="what the default allows")
    axes.set_xscale("log")
    axes.set_yscale("log")
    ticks = sorted({row["bytes"] for row in lost})
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("bytes of a candidate")
    axes.set_ylabel("part of the true top 8 lost")
    axes.legend()
    return {"loss": figure}


def tell(rows: Sequence[Row]) -> str:
    """Return the page's text."""
    lost = grouped([row for row in rows if row["part"] == "loss"], "bytes", "data")
    lines = []
    for size in sorted({size for size, _ in lost}):
        first = next(group for (one, _), group in lost.items() if one == size)
        public = f"{first[0]['table_bytes'] / 1e6:.1f} MB" if first[0]["table_bytes"] > 1000 else "none"
        cells = [_figure([row["loss"] for row in lost[size, data]], 4) for data in SETS if (size, data) in lost]
        lines.append([f"{size:,}", public, *cells])
    galleries = grouped([row for row in rows if row["part"] == "gallery"], "data")
    names = [NAMES.get(data, data) for (data,) in galleries]
    popular = [
        [words, *(_figure([row[column] for row in some], 3) for some in galleries.values())]
        for column, words in (
            ("by_gallery", "the gallery's items, each with itself left out"),
            ("by_queries", f"the {QUERIES:,} test queries"),
            ("by_gallery_on_queries", "chosen by the first, measured on the second"),
        )
    ]
    takes = [
        f"{NAMES.get(data, data)}: noise of a score below {mean(row['noise'] for row in some).value:.5f}, "
        f"{mean(row['rate_bytes'] for row in some).value:.0f} bytes"
        for (data,), some in galleries.items()
    ]
    return "\n\n".join(
        [
            "![The part of the true eight nearest that codes lose, over the bytes of a candidate](codes-loss.svg)",
            f"In brackets the 95% interval over seeds; {' and '.join(map(str, ONE_SEED))} bytes were measured "
            "with one.",
            table(["bytes a candidate", "public table", *names], lines),
            f"What a loss of {MOST:g} takes, by the rate of a Gaussian source with the variances of these "
            f"features: {'; '.join(takes)} an item. Real features are not "
            "Gaussian, so this is an estimate and not a bound.",
            "## Whose popularity",
            f"What the {POPULAR:.0%} most popular items hold of the true top 8, by who is asked. [Why it "
            "matters](../../theory/ceiling.md): the first is what the ceiling is computed from, "
            "the third is the floor.",
            table(["asked", *names], popular),
        ]
    )


def _figure(values: Sequence[float], digits: int) -> str:
    one = mean(values)
    if len(values) == 1:
        return f"{one.value:.{digits}f}"
    return f"{one.value:.{digits}f} ({one.low:.{digits}f} to {one.high:.{digits}f})"


ABOUT = f"""
An answer holds, for every candidate, its feature or a code of it, by which the client chooses eight. Codes are
product quantised, in directions and with centroids of the gallery that the client fetches once as a public table. The
query itself is never quantised. The loss is the part of the true eight nearest items, of the whole gallery, that the
eight best by codes miss: all candidates are there, the hardest among them. A seed splits anew: {QUERIES:,} queries,
the gallery is the rest.
"""

STUDY = Study(
    name="codes",
    title="What compact codes lose",
    about=ABOUT,
    cases=cases,
    measure=measure,
    figures=figures,
    tell=tell,
    data=FILES,
    parameters={"bytes": SIZES[1:], "k": K, "held-out queries": QUERIES, "popular items": POPULAR},
    seeds=SEEDS,
)
