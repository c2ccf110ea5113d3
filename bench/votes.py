"""Measure the search for voters: queries a second against the published loop, growth, memory.

A query is done when the records that vote on it are known. The published loop draws 15% of the private rows for
each query, subtracts, takes norms, sorts and keeps 300. Ours lists the nearest of all rows in their exact order,
then tosses the coins of the same sampling (rate 0.15, k 300), or takes the list as it is (rate 1, k 2000). The
floor is the float32 product of queries and rows alone. Every figure comes from a process of its own, so that
its peak memory is its own; times are the best of two to nine runs.
"""

import argparse
import hashlib
import json
import math
import os
import platform
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from studies._cost_votes import (
    CPU,
    FEATURES,
    PRIVATE,
    RIVAL,
    Contender,
    Floats,
    Work,
    load_rows,
    split,
    use_listed,
    use_published,
    use_sampled,
)
from studies._timing import measure_peak_gib, run_in_new_process, time_repeatedly

SIZES = (7_500, 15_000, 30_000, 60_000)
COUNTS = (1, 16, 128, 1024, 8192)


def product_on_device(rows: Floats) -> Work:
    """Multiply on the GPU, in true float32, and look at nothing."""
    import torch

    torch.backends.cuda.matmul.fp32_precision = "ieee"
    private = torch.from_numpy(rows).cuda()

    def work(queries: Floats) -> None:
        for part in torch.split(torch.from_numpy(queries).cuda(), 1024):
            _ = part @ private.T
        torch.cuda.synchronize()

    return work


CUDA = (
    Contender(RIVAL, use_published("float32"), 64, grows=True),
    Contender("floor: one product, torch", product_on_device, 8192, grows=True),
    Contender("rate 0.15, k 300 (ours, cuda)", use_sampled("cuda"), 8192, grows=True),
    Contender("rate 1, k 2000 (ours, cuda)", use_listed("cuda"), 8192, grows=True),
    Contender("rate 1, k 2000 (ours, numpy)", use_listed("numpy"), 8192),
)


def contenders(device: str) -> Sequence[Contender]:
    """Return who is measured on a device."""
    return CUDA if device == "cuda" else CPU


def features(given: Path | None, folder: Path) -> tuple[Path, str]:
    """Return a file of rows, private ones first, and what they are."""
    if given:
        return given, f"rows of {given.name}"
    path = folder / "rows.npy"
    found, data = load_rows()
    np.save(path, found)
    return path, data


def measure(index: int, n: int, count: int, device: str, path: str) -> dict[str, Any]:
    """Time one contender at one size, in this process."""
    contender = contenders(device)[index]
    private, queries = split(np.load(path, mmap_mode="r"), n, count)
    start = time.perf_counter()
    work = contender.prepare(private)
    prepared = time.perf_counter() - start
    work(queries[:2])
    times = time_repeatedly(lambda: work(queries), seconds=3)
    record = {
        "name": contender.name,
        "rows": len(private),
        "queries": count,
        "per_second": count / min(times),
        "prepare_seconds": prepared,
        "peak_gib": measure_peak_gib(),
    }
    if device == "cuda" and "cuda" in contender.name:
        import torch

        record["device_gib"] = torch.cuda.max_memory_allocated() / 2**30
    if "rate 1" in contender.name:
        found = np.vstack(work(queries[:256]))
        record["found"] = hashlib.sha256(found.tobytes()).hexdigest()[:16]
    return record


def collect(device: str, path: Path) -> list[dict[str, Any]]:
    """Run every contender, and those that grow at all sizes and counts, each in a new process."""
    from rich.progress import Progress

    jobs = []
    for index, contender in enumerate(contenders(device)):
        jobs.append((index, PRIVATE, contender.queries))
        if contender.grows:
            jobs += [(index, n, contender.queries) for n in SIZES[:-1]]
        if "ours" in contender.name and contender.grows:
            jobs += [(index, PRIVATE, count) for count in COUNTS if count != contender.queries]
    records = []
    with Progress(transient=True) as progress:
        task = progress.add_task("measuring", total=len(jobs))
        for index, n, count in jobs:
            progress.update(task, description=f"{contenders(device)[index].name} {n:,}")
            given = {"index": index, "n": n, "count": count, "device": device, "path": str(path)}
            try:
                records.append(run_in_new_process(f"{__file__}:measure", **given))
            except RuntimeError as reason:
                print(f"{contenders(device)[index].name} did not run: {reason}")
            progress.advance(task)
    return records


def machine(device: str) -> dict[str, Any]:
    """Say where this runs."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"cpu": platform.machine(), "cores": len(os.sched_getaffinity(0)), "load_before": os.getloadavg()[0]}
    names = Path("/proc/cpuinfo")
    if names.exists():
        models = [line.partition(":")[2].strip() for line in names.read_text().splitlines() if "model name" in line]
        found["cpu"] = models[0] if models else found["cpu"]
    for package in ("numpy", "torch", "faiss-cpu"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    if device == "cuda":
        import torch

        found["device"] = torch.cuda.get_device_name()
    return found


def base(records: Sequence[dict[str, Any]], n: int) -> float:
    """Return what the published loop did with n rows, in the same run."""
    return next((r["per_second"] for r in records if r["name"] == RIVAL and r["rows"] == n), math.nan)


def largest(records: Sequence[dict[str, Any]], device: str) -> list[dict[str, Any]]:
    """Return the record of each contender with all rows and as many queries as it is meant for."""
    full = max(r["rows"] for r in records)
    wanted = {c.name: c.queries for c in contenders(device)}
    return [r for r in records if r["rows"] == full and r["queries"] == wanted[r["name"]]]


def show(records: Sequence[dict[str, Any]], device: str, data: str) -> None:
    """Print the tables: all ways with all rows, growth with rows, growth with queries."""
    from rich.console import Console
    from rich.table import Table

    console, full = Console(width=130), max(r["rows"] for r in records)
    grid = Table(title=f"{data}: {full:,} private rows, {FEATURES} features")
    grid.add_column("way", no_wrap=True)
    for heading in (
        "queries",
        "queries a second",
        "times the published loop",
        "prepared in s",
        "peak GiB",
        "on device",
    ):
        grid.add_column(heading, justify="right")
    for r in largest(records, device):
        faster = f"{r['per_second'] / base(records, full):.1f}"
        held = f"{r['device_gib']:.2f}" if "device_gib" in r else ""
        grid.add_row(
            r["name"], f"{r['queries']:,}", f"{r['per_second']:,.0f}", faster, f"{r['prepare_seconds']:.1f}",
            f"{r['peak_gib']:.2f}", held,
        )  # fmt: skip
    console.print(grid)
    growing = [c for c in contenders(device) if c.grows]
    rows = Table("way", *(f"{n:,}" for n in SIZES), title="Queries a second by private rows (times the published loop)")
    for c in growing:
        found = {r["rows"]: r["per_second"] for r in records if r["name"] == c.name and r["queries"] == c.queries}
        cells = [f"{found[n]:,.0f} ({found[n] / base(records, n):.1f})" if n in found else "" for n in SIZES]
        rows.add_row(c.name, *cells)
    console.print(rows)
    counts = Table(
        "way", *(f"{m:,}" for m in COUNTS), title=f"Queries a second by queries asked at once, {full:,} rows"
    )
    for c in (c for c in growing if "ours" in c.name):
        asked = {r["queries"]: r["per_second"] for r in records if r["name"] == c.name and r["rows"] == full}
        counts.add_row(c.name, *(f"{asked[m]:,.0f}" if m in asked else "" for m in COUNTS))
    console.print(counts)


def picture(records: Sequence[dict[str, Any]], device: str, path: Path) -> None:
    """Draw queries a second over private rows and over queries asked at once."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    full = max(r["rows"] for r in records)
    for color, c in enumerate(c for c in contenders(device) if c.grows):
        mine = [r for r in records if r["name"] == c.name]
        by_rows = sorted((r["rows"], r["per_second"]) for r in mine if r["queries"] == c.queries)
        left.loglog(*zip(*by_rows, strict=True), marker="o", color=f"C{color}", label=c.name)
        by_count = sorted((r["queries"], r["per_second"]) for r in mine if r["rows"] == full)
        if len(by_count) > 1:
            right.loglog(*zip(*by_count, strict=True), marker="o", color=f"C{color}", label=c.name)
    left.set(xlabel="private rows", ylabel="queries a second")
    right.set(xlabel="queries asked at once", ylabel="queries a second", title=f"{full:,} private rows")
    right.axhline(base(records, full), color="C0", linestyle="--", label=RIVAL)
    for axes in (left, right):
        axes.grid(which="both", alpha=0.25)
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure, print, draw and keep."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder for the JSON and the picture")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--features", type=Path, help="rows in a .npy file, 60,000 private ones first, then queries")
    options = parser.parse_args()
    place = machine(options.device)
    print(", ".join(f"{key}: {value}" for key, value in place.items()))
    with tempfile.TemporaryDirectory() as folder:
        path, data = features(options.features, Path(folder))
        records = collect(options.device, path)
    show(records, options.device, data)
    found = {r["name"]: r["found"] for r in largest(records, options.device) if "found" in r}
    same = "yes" if len(set(found.values())) == 1 else "NO"
    print(f"{len(found)} engines list the same records in the same order: {same}")
    options.out.mkdir(parents=True, exist_ok=True)
    kept = options.out / f"votes-speed-{options.device}.json"
    kept.write_text(json.dumps({"machine": place, "data": data, "records": records}, indent=1) + "\n")
    picture(records, options.device, kept.with_suffix(".png"))
    print(f"kept in {kept} and {kept.with_suffix('.png')}")


if __name__ == "__main__":
    main()
