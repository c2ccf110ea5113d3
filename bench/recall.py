"""Measure what every mechanism finds on real images at equal exact epsilon, between floor and ceiling.

Birds (CUB-200-2011), answers of a tenth of the gallery, re-ranked by whole features. What a mechanism protects is
printed beside it: only those that protect the query are comparable.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

EPSILONS = (1.0, 4.0, 8.0, 16.0)
CANDIDATES = 0.1
QUERIES = 400
DATA = "cub200_cropped_lite0"


def mechanisms() -> dict[str, Callable[[float], Any]]:
    """Return how to build every mechanism that protects a query, by epsilon."""
    from nearveil import release as r

    return {
        "covers": lambda e: r.Covers(e, CANDIDATES),
        "k-means cells": lambda e: r.Cells(e, CANDIDATES),
        "balanced cells, subset": lambda e: r.Cells(e, CANDIDATES, response="subset"),
        "unary, symmetric, 64 cells": lambda e: r.Unary(e, "symmetric"),
        "unary, optimised, 64 cells": lambda e: r.Unary(e, "optimised"),
        "PrivUnit, PCA to 64": lambda e: r.PrivUnit(e, projection="pca", n_components=64),
        "PrivUnit, 1280 dimensions": r.PrivUnit,
        "LATENT, signs, PCA to 8": lambda e: r.Latent(e, projection="pca", n_components=8),
        "OME, 11 bits, alpha 1, PCA to 8": lambda e: r.OME(e, pairs="code words", projection="pca", n_components=8),
        "analytic Gaussian, PCA to 64": lambda e: r.AnalyticGaussian(e, projection="pca", n_components=64),
        "random projection to 64": r.RandomProjection,
        "von Mises-Fisher, PCA to 64": lambda e: r.VonMisesFisher(e, projection="pca", n_components=64),
        "PrivateMail, Gaussian, k 16": lambda e: r.PrivateMail(e, n_components=16, n_anchors=1000),
        "PrivateMail, Laplace, k 2": lambda e: r.PrivateMail(e, noise="laplace", n_anchors=1000),
        "DP-dSNE, 300 anchors": lambda e: r.DPdSNE(e, n_anchors=300),
    }


def others(public: Any) -> dict[str, Any]:
    """Return what does not protect the query, built."""
    from nearveil import release as r

    pca = r.PrivatePCA(4.0, n_components=16)
    return {
        "raw features": r.RawFeatures(),
        "LDA": r.PlainLDA(),
        "SMLQ, k 16": r.PlainManifold(16),
        "private PCA, eps 4 for a record of the set": r.PrivatePCARelease(pca.fit(public)),
    }


def found(mechanism: Any, trial: Any) -> dict[str, float]:
    """Evaluate one mechanism."""
    from nearveil.privacy.noise import unsafe_seeded
    from nearveil.retrieval import Retriever, evaluate

    retriever = Retriever(mechanism, candidates=CANDIDATES, code_bytes=None)
    retriever.fit(trial.public, trial.public_y).index(trial.gallery)
    result = evaluate(retriever, trial.queries[:QUERIES], rng=unsafe_seeded(0))
    return {
        "recall": result.nn_recall.value,
        "low": result.nn_recall.low,
        "high": result.nn_recall.high,
        "ceiling": result.ceiling.value,
        "floor": result.floor.value,
    }


def collect(epsilons: tuple[float, ...]) -> list[dict[str, Any]]:
    """Evaluate all of them."""
    from rich.progress import Progress

    from nearveil.study.releases import split

    trial = split(DATA, 0)
    jobs: list[tuple[str, float | None, Any]] = [
        (name, epsilon, make(epsilon)) for name, make in mechanisms().items() for epsilon in epsilons
    ]
    jobs += [(name, None, built) for name, built in others(trial.public).items()]
    records = []
    with Progress(transient=True) as progress:
        task = progress.add_task("mechanisms", total=len(jobs))
        for name, epsilon, mechanism in jobs:
            progress.update(task, description=name)
            records.append({"name": name, "epsilon": epsilon, **found(mechanism, trial)})
            progress.advance(task)
    return records


def show(records: list[dict[str, Any]], epsilons: tuple[float, ...]) -> None:
    """Print one row a mechanism."""
    from rich.console import Console
    from rich.table import Table

    grid = Table(title=f"NN-recall@8 on {DATA}, f {CANDIDATES:g}, {QUERIES} queries; floor {records[0]['floor']:.3f}")
    for heading in ("mechanism", *(f"eps {epsilon:g}" for epsilon in epsilons), "no query promise"):
        grid.add_column(heading, justify="left" if heading == "mechanism" else "right")
    by: dict[str, dict[float | None, dict[str, Any]]] = {}
    for record in records:
        by.setdefault(record["name"], {})[record["epsilon"]] = record
    for name, row in by.items():
        cells = [f"{row[epsilon]['recall']:.3f}" if epsilon in row else "" for epsilon in (*epsilons, None)]
        grid.add_row(name, *cells)
    ceilings = {record["epsilon"]: record["ceiling"] for record in records if record["name"] == "covers"}
    grid.add_row("ceiling", *(f"{ceilings[epsilon]:.3f}" for epsilon in epsilons), "")
    Console(width=120).print(grid)


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder for the JSON")
    parser.add_argument("--epsilons", type=float, nargs="+", default=EPSILONS)
    options = parser.parse_args()
    from nearveil.study.data import DataMissingError

    try:
        records = collect(tuple(options.epsilons))
    except DataMissingError as missing:
        print(f"no recall was measured: {missing}")
        return
    show(records, tuple(options.epsilons))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "recall.json").write_text(json.dumps(records, indent=1) + "\n")
    print(f"kept in {options.out / 'recall.json'}")


if __name__ == "__main__":
    main()
