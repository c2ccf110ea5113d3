"""``python -m nearveil.study.releases``: how near releases come to the ceiling, on galleries of images.

Every release answers the same held-out queries with the same fraction of the gallery. What counts is the
part of the true eight nearest items that the client ends with; it lies between the floor, which asks
nothing, and the ceiling, which nothing private can pass.
"""

import argparse
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from nearveil.privacy.noise import unsafe_seeded
from nearveil.release import Cells, Covers, PrivUnit, Release
from nearveil.retrieval import Retriever, evaluate
from nearveil.study.data import DataMissingError, load_features

QUERIES = 1200
EPSILONS = (1.0, 2.0, 4.0, 6.0)
FRACTIONS = (0.2, 0.1)
SETS = {"cub200_cropped_lite0": 100, "cars196_cropped_lite0": 98}  # classes below are public, the others searched
RELEASES: dict[str, Callable[[float, float], Release]] = {
    "covers": Covers,
    "k-means cells": Cells,
    "PrivUnit, PCA to 64": lambda epsilon, _: PrivUnit(epsilon, projection="pca", n_components=64),
}
MARKS = {"covers": "o-", "k-means cells": "s--", "PrivUnit, PCA to 64": "^:"}


@dataclass(frozen=True)
class Trial:
    """Public rows, a gallery, and queries that are in neither.

    Attributes
    ----------
    public, gallery, queries : ndarray of shape (n, d)
    public_y, gallery_y, query_y : ndarray of shape (n,)
    """

    public: NDArray[np.float32]
    public_y: NDArray[np.int64]
    gallery: NDArray[np.float32]
    gallery_y: NDArray[np.int64]
    queries: NDArray[np.float32]
    query_y: NDArray[np.int64]


@dataclass(frozen=True)
class Measured:
    """One release at one epsilon and fraction."""

    data: str
    release: str
    candidates: float
    epsilon: float
    nn_recall: float
    low: float
    high: float
    recall: float
    ceiling: float
    floor: float
    share: float
    message_bytes: int
    answer_bytes: int


def split(name: str, seed: int) -> Trial:
    """Return the public classes, and `QUERIES` seeded queries removed from the images of the others.

    Parameters
    ----------
    name : str
    seed : int

    Returns
    -------
    Trial
    """
    found = load_features(name)
    public = found.labels < SETS[name]
    rest = np.random.default_rng(seed).permutation(np.flatnonzero(~public))
    queries, gallery = rest[:QUERIES], np.sort(rest[QUERIES:])
    X, y = found.features, found.labels
    return Trial(X[public], y[public], X[gallery], y[gallery], X[queries], y[queries])


def measure(names: Iterable[str], seed: int, code_bytes: int | None) -> list[Measured]:
    """Evaluate every release on every set, fraction and epsilon.

    Parameters
    ----------
    names : iterable of str
    seed : int
        Of the choice of queries, and of the noise: nothing here is kept secret.
    code_bytes : int or None
        Bytes of a candidate; None re-ranks by whole features.

    Returns
    -------
    list of Measured
    """
    cases = [
        (name, label, fraction, epsilon)
        for name in names
        for label in RELEASES
        for fraction in FRACTIONS
        for epsilon in EPSILONS
    ]
    trials = {name: split(name, seed) for name in names}
    return [_measured(trials[case[0]], *case, seed, code_bytes) for case in track(cases, "releases")]


def _measured(
    trial: Trial, name: str, label: str, fraction: float, epsilon: float, seed: int, code_bytes: int | None
) -> Measured:
    mechanism = RELEASES[label](epsilon, fraction)
    retriever = Retriever(mechanism, candidates=fraction, code_bytes=code_bytes)
    retriever.fit(trial.public, trial.public_y).index(trial.gallery, trial.gallery_y)
    found = evaluate(retriever, trial.queries, trial.query_y, rng=unsafe_seeded(seed), repeats=2)
    return Measured(
        data=name,
        release=label,
        candidates=fraction,
        epsilon=epsilon,
        nn_recall=found.nn_recall.value,
        low=found.nn_recall.low,
        high=found.nn_recall.high,
        recall=float("nan") if found.recall is None else found.recall.value,
        ceiling=found.ceiling.value,
        floor=found.floor.value,
        share=found.share.value,
        message_bytes=found.message_bytes,
        answer_bytes=found.answer_bytes,
    )


def table(results: list[Measured]) -> Table:
    """Return NN-recall@8 and its share of the ceiling, a row for each set, fraction and release."""
    shown = Table(title=f"NN-recall@8 (share of the ceiling); {QUERIES} queries that no gallery holds")
    for column in ("data", "f", "release", *(f"eps {epsilon:g}" for epsilon in EPSILONS)):
        shown.add_column(column)
    groups: dict[tuple[str, float, str], dict[float, Measured]] = {}
    for one in results:
        groups.setdefault((one.data, one.candidates, one.release), {})[one.epsilon] = one
    for (data, fraction, release), row in sorted(groups.items(), key=lambda group: (group[0][0], -group[0][1])):
        cells = [f"{row[epsilon].nn_recall:.3f} ({row[epsilon].share:.2f})" for epsilon in EPSILONS]
        shown.add_row(data.split("_")[0], f"{fraction:g}", release, *cells)
    return shown


def picture(results: list[Measured], path: Path) -> None:
    """Draw every release between floor and ceiling.

    Parameters
    ----------
    results : list of Measured
    path : Path
        Of the PNG.
    """
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    names = sorted({one.data for one in results})
    figure, panels = plt.subplots(len(names), len(FRACTIONS), figsize=(9, 3.4 * len(names)), squeeze=False, sharey=True)
    for row, name in zip(panels, names, strict=True):
        for panel, fraction in zip(row, FRACTIONS, strict=True):
            here = [one for one in results if (one.data, one.candidates) == (name, fraction)]
            ceilings = {one.epsilon: one.ceiling for one in here}
            edge = [ceilings[epsilon] for epsilon in EPSILONS]
            panel.fill_between(EPSILONS, edge, 1, color="0.85", label="impossible: above the ceiling")
            panel.plot(EPSILONS, edge, color="0.4", linewidth=1)
            panel.axhline(here[0].floor, color="black", linewidth=1, linestyle=(0, (1, 3)), label="floor: asks nothing")
            for label, mark in MARKS.items():
                line = [next(o for o in here if (o.release, o.epsilon) == (label, epsilon)) for epsilon in EPSILONS]
                spread = [[o.nn_recall - o.low for o in line], [o.high - o.nn_recall for o in line]]
                found = [o.nn_recall for o in line]
                panel.errorbar(EPSILONS, found, yerr=spread, fmt=mark, label=label, markersize=5, capsize=2)
            panel.set(title=f"{name.split('_')[0]}, {fraction:.0%} of the gallery", xlabel="epsilon of one query")
            panel.set(ylim=(0, 1), xticks=EPSILONS)
        row[0].set_ylabel("NN-recall@8")
    panels[0][0].legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and write a picture and JSON."""
    parser = argparse.ArgumentParser(description="How near releases come to the ceiling.")
    parser.add_argument("--out", type=Path, default=Path("out/releases"))
    parser.add_argument("--data", choices=sorted(SETS), action="append", help="a set; all by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--code-bytes", type=int, help="bytes of a candidate; whole features by default")
    chosen = parser.parse_args(arguments)
    console = Console()
    try:
        results = measure(chosen.data or sorted(SETS), chosen.seed, chosen.code_bytes)
    except DataMissingError as missing:
        console.print(f"[red]{missing}")
        raise SystemExit(1) from None
    chosen.out.mkdir(parents=True, exist_ok=True)
    (chosen.out / "releases.json").write_text(json.dumps([asdict(one) for one in results], indent=1) + "\n")
    picture(results, chosen.out / "releases.png")
    console.print(table(results))
    console.print(f"floor: {', '.join(sorted({f'{o.data[:4]} f {o.candidates:g} {o.floor:.3f}' for o in results}))}")
    console.print(f"queries removed with seed {chosen.seed}; picture and figures in {chosen.out}")


if __name__ == "__main__":
    main()
