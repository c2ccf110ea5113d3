"""Measure releases: messages per second at 1280 dimensions, against the authors' procedure; and map building.

The rival is what the authors of PrivateMail do for each query: 1,001 rows, dense weights of features and
labels, five steps. Everything is timed in one run, on rows that no one needs to download: clusters on a sphere.
"""

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np

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
    from nearveil.mechanisms import Covers

    rows, _ = draw_clusters(n, MAP_DIMENSION, 2)
    covers = Covers(EPSILON, CANDIDATES).fit(rows[:1000])
    start = time.perf_counter()
    covers.index(rows)
    return {
        "items": n,
        "seconds": time.perf_counter() - start,
        "peak_gib": measure_peak_gib(),
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
    options = parser.parse_args()
    records = speeds()
    maps = [run_in_new_process(f"{__file__}:build", n=n) for n in options.maps]
    show(records, maps)
    options.out.mkdir(parents=True, exist_ok=True)
    summary = {"machine": platform.machine(), "releases": records, "maps": maps}
    (options.out / "release.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(f"kept in {options.out / 'release.json'}")


if __name__ == "__main__":
    main()
