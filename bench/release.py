"""Measure releases: messages per second at 1280 dimensions, against the authors' procedure; and map building.

The rival is what the authors of PrivateMail do for each query: 1,001 rows, dense weights of features and
labels, five steps. Everything is timed in one run, on rows that no one needs to download: clusters on a sphere.
"""

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

DIMENSION, PUBLIC, GALLERY, BATCH = 1280, 1000, 5000, 1000
EPSILON, CANDIDATES = 4.0, 0.1
MAP_SIZES = (10_000, 100_000, 1_000_000)
MAP_DIMENSION = 64
Floats = NDArray[np.float64]


def clustered(n: int, dimension: int, seed: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return rows around centres, and which centre; the more rows the more centres."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(0).standard_normal((max(20, n // 500), dimension)).astype(np.float32)
    y = rng.integers(0, len(centres), n)
    return centres[y] + 0.8 * rng.standard_normal((n, dimension)).astype(np.float32), y


def authors(anchors: Floats, labels: NDArray[np.int64]) -> Callable[[Floats], Floats]:
    """Return the authors' procedure for one query: dense, all of it anew for every target."""
    n, s, alpha, steps = len(anchors) + 1, 6.0, 0.6, 5
    start = 1e-8 * np.random.default_rng(1).standard_normal((n, 2))

    def answer(x: Floats) -> Floats:
        rows = np.vstack([x, anchors])
        squares = (rows**2).sum(axis=1)
        W = np.exp(-(squares[:, None] + squares - 2 * rows @ rows.T) / s**2)
        gaps = np.abs(np.subtract.outer([labels[0], *labels], [labels[0], *labels])).astype(float)
        V = -(gaps - gaps.mean(axis=0) - gaps.mean(axis=1)[:, None] + gaps.mean()) / 2
        np.fill_diagonal(W, 0)
        L_X, L_Y = np.diag(W.sum(axis=1)) - W, np.diag(V.sum(axis=1)) - V
        D = np.linalg.inv(np.diag(np.diag(L_X)))
        Z = start
        for step in range(steps):
            Z = Z - D @ (L_X @ Z - alpha * (L_Y @ Z)) / 2
            if step == 0:
                Z = Z + 1e-16 * np.random.default_rng().standard_normal(Z.shape)
            Z = Z * np.sqrt(n) / np.linalg.norm(Z)
        return np.asarray(Z)

    return answer


def releases() -> dict[str, Any]:
    """Return every mechanism, unfitted."""
    from nearveil.release import Cells, Covers, PrivateMail, PrivUnit

    return {
        "covers": Covers(EPSILON, CANDIDATES),
        "k-means cells": Cells(EPSILON, CANDIDATES),
        "balanced cells, subset": Cells(EPSILON, CANDIDATES, response="subset"),
        "PrivUnit": PrivUnit(EPSILON),
        "PrivUnit, PCA to 64": PrivUnit(EPSILON, projection="pca", n_components=64),
        "PrivateMail, Gaussian": PrivateMail(EPSILON),
        "PrivateMail, Laplace": PrivateMail(EPSILON, noise="laplace"),
    }


def rate(work: Callable[[], object], count: int, seconds: float = 2.0) -> float:
    """Return how many messages a second `work` makes, `count` at a time; the median of repeats."""
    times: list[float] = []
    work()
    while len(times) < 3 or (sum(times) < seconds and len(times) < 2000):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return count / float(np.median(times))


def speeds() -> list[dict[str, Any]]:
    """Time all mechanisms and the rival."""
    public, labels = clustered(PUBLIC, DIMENSION, 1)
    gallery, _ = clustered(GALLERY, DIMENSION, 2)
    queries, _ = clustered(BATCH, DIMENSION, 3)
    unit = (public / np.linalg.norm(public, axis=1, keepdims=True)).astype(float)
    dense = authors(unit, labels)
    rival = rate(lambda: dense(queries[0].astype(float)), 1)
    records = [{"name": "authors' procedure, dense", "single": rival, "batched": rival, "bytes": 8 * 2 * (PUBLIC + 1)}]
    for name, release in releases().items():
        release.fit(public, labels)
        if hasattr(release, "index"):
            release.index(gallery)
        records.append(
            {
                "name": name,
                "single": rate(lambda made=release: made.release(queries[0]), 1),  # type: ignore[misc]
                "batched": rate(lambda made=release: made.release(queries), BATCH),  # type: ignore[misc]
                "bytes": release.release(queries[0]).nbytes,
            }
        )
    return records


def build(n: int) -> dict[str, Any]:
    """Time the map of a large gallery, in this process."""
    from nearveil.release import Covers

    rows, _ = clustered(n, MAP_DIMENSION, 2)
    covers = Covers(EPSILON, CANDIDATES).fit(rows[:1000])
    start = time.perf_counter()
    covers.index(rows)
    return {
        "items": n,
        "seconds": time.perf_counter() - start,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "sets": covers.map_.n_sets,
        "map_bytes": covers.map_.nbytes,
    }


def show(records: list[dict[str, Any]], maps: list[dict[str, Any]]) -> None:
    """Print both tables."""
    from rich.console import Console
    from rich.table import Table

    rival = records[0]["single"]
    grid = Table(title=f"Messages a second, {DIMENSION} dimensions, epsilon {EPSILON:g}, f {CANDIDATES:g}")
    grid.add_column("release", no_wrap=True)
    for heading in ("one by one", f"{BATCH} at a time", "times the authors', single", "batched", "message bytes"):
        grid.add_column(heading, justify="right")
    for r in records:
        grid.add_row(
            r["name"], f"{r['single']:,.0f}", f"{r['batched']:,.0f}", f"{r['single'] / rival:,.0f}",
            f"{r['batched'] / rival:,.0f}", f"{r['bytes']:,}",
        )  # fmt: skip
    scale = Table(title=f"The map of learned covers, {MAP_DIMENSION} dimensions")
    for heading in ("items", "seconds", "peak GiB", "sets", "map bytes"):
        scale.add_column(heading, justify="right")
    for m in maps:
        cells = (f"{m['items']:,}", f"{m['seconds']:.0f}", f"{m['peak_gib']:.1f}", str(m["sets"]))
        scale.add_row(*cells, f"{m['map_bytes']:,}")
    console = Console(width=120)
    console.print(grid)
    console.print(scale)


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder for the JSON")
    parser.add_argument("--maps", type=int, nargs="*", default=MAP_SIZES, help="sizes of galleries to map")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(build(options.one)))
        return
    records = speeds()
    maps = []
    for n in options.maps:
        command = [sys.executable, __file__, "--one", str(n)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        maps.append(json.loads(done.stdout.splitlines()[-1]))
    show(records, maps)
    options.out.mkdir(parents=True, exist_ok=True)
    summary = {"machine": platform.machine(), "releases": records, "maps": maps}
    (options.out / "release.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(f"kept in {options.out / 'release.json'}")


if __name__ == "__main__":
    main()
