"""Measure releases: messages per second at 1280 dimensions, against the authors' procedure; and map building.

The rival is what the authors of PrivateMail do for each query: 1,001 rows, dense weights of features and
labels, five steps. Everything is timed in one run, on rows that no one needs to download: clusters on a sphere.
"""

import argparse
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from nearveil.cluster import SpreadRows
from nearveil.mechanisms import Covers
from nearveil.mechanisms.covers import learning
from nearveil.search.ceiling import neighbor_ceiling
from studies._cost_release import (
    AUTHORS,
    BATCH,
    CANDIDATES,
    DIMENSION,
    EPSILON,
    draw_clusters,
    list_releases,
    measure_speed,
)
from studies._timing import measure_peak_gib, run_in_new_process

GALLERY = 5000
MAP_SIZES = (10_000, 100_000, 1_000_000)
MAP_DIMENSION = 64
QUERIES = 2000
POPULAR = 250_000  # items whose neighbours are counted, for the ceiling


def speeds() -> list[dict[str, Any]]:
    """Time all mechanisms and the rival."""
    records = []
    for name in (AUTHORS, *list_releases()):
        found = measure_speed(name, GALLERY)
        middle = {column: float(np.median(found[column])) for column in ("single", "batched")}
        records.append({"name": name, **middle, "bytes": found["bytes"]})
    return records


def build(n: int) -> dict[str, Any]:
    """Time the map of a large gallery, in this process."""
    rows, _ = draw_clusters(n + QUERIES, MAP_DIMENSION, 2)
    gallery, queries = rows[:n], rows[n:]
    covers = Covers(EPSILON, CANDIDATES).fit(rows[:1000])
    ends: dict[str, float] = {}
    start, processor = time.perf_counter(), time.process_time()
    covers = covers.index(gallery, report=lambda stage, _done: ends.__setitem__(stage, time.perf_counter() - start))
    seconds, processor, peak = time.perf_counter() - start, time.process_time() - processor, measure_peak_gib()
    recall, ceiling = expect_recall(covers, gallery, queries)
    return {
        "items": n,
        "seconds": seconds,
        "processor_seconds": processor,
        "stages_end": ends,
        "load": os.getloadavg()[0],
        "peak_gib": peak,
        "recall": recall,
        "ceiling": ceiling,
        "sets": covers.map_.n_sets,
        "map_bytes": covers.map_.nbytes,
    }


def expect_recall(covers: Covers, gallery: NDArray[np.float32], queries: NDArray[np.float32]) -> tuple[float, float]:
    """Return the expected NN-recall@8 of queries that the gallery does not hold, and Theorem D's ceiling (plug-in)."""
    items, asked = covers.features(gallery).astype(np.float32), covers.features(queries)
    exact = faiss.IndexFlatIP(items.shape[1])
    exact.add(items)
    truth = exact.search(asked.astype(np.float32), 8)[1]
    found = covers.members_.T.tocsr()[truth.ravel()].toarray().reshape(*truth.shape, -1).mean(axis=1)
    own, hit = found[np.arange(len(found)), covers.map_.choose(asked)], covers._channel.hit
    recall = float(np.mean(hit * own + (1 - hit) * (found.sum(axis=1) - own) / (found.shape[1] - 1)))
    counted = np.random.default_rng(1).permutation(len(items))[:POPULAR]
    counts = np.bincount(
        learning.neighbor_lists(SpreadRows.cut(items), covers.space_, counted, 8).ravel(), minlength=len(items)
    )
    return recall, neighbor_ceiling(EPSILON, CANDIDATES, counts)


def show(records: list[dict[str, Any]], maps: list[dict[str, Any]]) -> None:
    """Print both tables."""
    from rich.console import Console
    from rich.table import Table

    rival = records[0]["single"] if records else 0
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
    for heading in ("items", "seconds", "of the processor", "peak GiB", "sets", "NN-recall@8", "share", "map bytes"):
        scale.add_column(heading, justify="right")
    for m in maps:
        scale.add_row(
            f"{m['items']:,}", f"{m['seconds']:.0f}", f"{m['processor_seconds']:.0f}", f"{m['peak_gib']:.1f}",
            str(m["sets"]), f"{m['recall']:.3f}", f"{m['recall'] / m['ceiling']:.3f}", f"{m['map_bytes']:,}",
        )  # fmt: skip
    console = Console(width=120)
    if records:
        console.print(grid)
    console.print(scale)


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder for the JSON")
    parser.add_argument("--maps", type=int, nargs="*", default=MAP_SIZES, help="sizes of galleries to map")
    parser.add_argument("--maps-only", action="store_true", help="leave out messages a second")
    options = parser.parse_args()
    records = [] if options.maps_only else speeds()
    maps = [run_in_new_process(f"{__file__}:build", n=n) for n in options.maps]
    show(records, maps)
    options.out.mkdir(parents=True, exist_ok=True)
    summary = {"machine": platform.machine(), "releases": records, "maps": maps}
    (options.out / "release.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(f"kept in {options.out / 'release.json'}")


if __name__ == "__main__":
    main()
