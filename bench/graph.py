"""Measure the graphs: time, memory, error and growth, against the dense way and named rivals.

Every figure comes from a process of its own, so that its peak memory is its own. A step is what the
manifold needs of a graph: build the operator, then one product with the Laplacian, degrees included.
Error is the largest relative error of a weight over all edges of two rows. At 100,000 rows the dense
way would need 80 GB and pyKeOps minutes, so they stop at 20,000. Times are the best of two to nine runs.
"""

import argparse
import json
import math
import platform
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import joblib
import numpy as np

from studies._cost_graph import (
    BANDWIDTH,
    COLUMNS,
    CPU,
    FEATURES,
    TOLERANCE,
    Contender,
    Product,
    draw_in_dtype,
    draw_rows_and_values,
    use_attention,
    use_ours,
)
from studies._timing import measure_peak_gib, run_in_new_process, time_repeatedly

CPU_SIZES = (2_000, 5_000, 20_000, 100_000, 1_000_000)
CUDA_SIZES = (131_072, 1_048_576, 10_000_000)


def device_tiles(X: Any) -> Product:
    """Multiply 32-bit tiles on the GPU with library products, weights through memory."""
    import torch

    from nearveil.privatemail.graph import gaussian

    def product(Z: Any) -> tuple[Any, Any]:
        both = torch.cat([torch.ones_like(Z[:, :1]), Z], dim=1)
        sums = gaussian._multiply_symmetric(X, both, BANDWIDTH**-2, gaussian.DEVICE_TILE)
        return sums[:, :1] * Z - sums[:, 1:], sums[:, :1]

    return product


CUDA = (
    Contender("fused attention, torch", "bfloat16", 1_048_576, use_attention),
    Contender("fused attention, torch", "float16", 1_048_576, use_attention),
    Contender("32-bit tiles, torch", "float32", 1_048_576, device_tiles),
    Contender("exact (ours)", "float16", 1_048_576, use_ours("exact")),
    Contender("exact (ours)", "float32", 1_048_576, use_ours("exact")),
    Contender("series (ours)", "float32", 10_000_000, use_ours("series")),
)


def probes(n: int) -> Any:
    """Return two columns of the identity: a Laplacian times them is minus the weights of all their edges."""
    columns = np.zeros((n, COLUMNS), dtype=np.float32)
    columns[[0, n // 2], [0, 1]] = 1
    return columns


def edge_error(result: Any, X: Any) -> float:
    """Return the largest relative error of the weights that the product with the probes shows."""
    exact = X.astype(np.float64)
    exact /= np.sqrt(np.vecdot(exact, exact))[:, None]
    chosen = np.array([0, len(X) // 2])
    weights = np.exp((exact @ exact[chosen].T - 1) / BANDWIDTH**2)
    error = np.abs(-result / weights - 1)
    error[chosen, [0, 1]] = 0  # the degree stands there, not a weight
    return float(np.max(error))


def measure(index: int, n: int, device: str) -> dict[str, Any]:
    """Time one contender at one size, in this process, whose peak memory is taken, data included."""
    contender = (CUDA if device == "cuda" else CPU)[index]
    rows, values = draw_rows_and_values(n)
    if device == "cuda":
        times, peak, result = _on_device(contender, rows, values)
    else:
        X, Z = draw_in_dtype(n, contender.dtype)
        times, peak = time_repeatedly(lambda: contender.step(X, Z)), measure_peak_gib()
        rows, result = X, contender.step(X, probes(n).astype(contender.dtype))
    bound = None
    if contender.name.startswith("series"):
        from nearveil.privatemail.graph import gaussian_graph

        bound = gaussian_graph(rows[:2], BANDWIDTH, method="series", tolerance=TOLERANCE).error_bound
    return {
        "name": contender.name,
        "dtype": contender.dtype,
        "n": n,
        "seconds": min(times),
        "first_seconds": times[0],
        "peak_gib": peak,
        "error": edge_error(np.asarray(result, dtype=np.float64), rows),
        "certified_error": bound,
    }


def _on_device(contender: Contender, rows: Any, values: Any) -> tuple[list[float], float, Any]:
    """Time a contender on the GPU; return also its peak memory there and its product with the probes."""
    import torch

    X, Z = torch.from_numpy(rows).cuda(), torch.from_numpy(values).cuda()
    X = torch.nn.functional.normalize(X.double(), dim=1).to(getattr(torch, contender.dtype))
    torch.cuda.reset_peak_memory_stats()

    def step() -> None:
        contender.step(X, Z)
        torch.cuda.synchronize()

    times, peak = time_repeatedly(step), torch.cuda.max_memory_allocated() / 2**30
    return times, peak, contender.step(X, torch.from_numpy(probes(len(rows))).cuda()).double().cpu().numpy()


def label_seconds() -> float:
    """Time a Laplacian product of the label graph: a million rows, 200 classes, built from scratch."""
    from nearveil.privatemail.graph import label_graph

    rng = np.random.default_rng(0)
    y, Z = rng.integers(0, 200, 1_000_000), rng.normal(size=(1_000_000, COLUMNS))
    start = time.perf_counter()
    label_graph(y, BANDWIDTH).laplacian_matmul(Z)
    return time.perf_counter() - start


def rates() -> tuple[float, float]:
    """Return what this machine can do at most: 32-bit tile products (FLOP/s) and exponentials (1/s)."""
    from nearveil.privatemail.graph import gaussian

    cores, tile, repeats = joblib.cpu_count(), gaussian.HOST_TILE, 300
    rows = np.full((tile, FEATURES), 0.1, dtype=np.float32)

    def products(_: int) -> None:
        out = np.empty((tile, tile), dtype=np.float32)
        for _ in range(repeats):
            np.matmul(rows, rows[::-1].T, out=out)

    def exponentials(_: int) -> None:
        exponents = np.full((tile, tile), -0.01, dtype=np.float32)
        out = np.empty_like(exponents)
        for _ in range(repeats):
            np.exp(exponents, out=out)

    seconds = []
    with gaussian._BLAS.limit(limits=1, user_api="blas"), ThreadPoolExecutor(cores) as pool:
        for work in (products, exponentials):
            list(pool.map(work, range(cores)))
            start = time.perf_counter()
            list(pool.map(work, range(cores)))
            seconds.append(time.perf_counter() - start)
    tiles = cores * repeats * tile**2
    return 2 * FEATURES * tiles / seconds[0], tiles / seconds[1]


def exponent(records: Sequence[dict[str, Any]]) -> float:
    """Fit the slope of log time over log n, from 20,000 rows on where there are several."""
    large = [r for r in records if r["n"] >= 20_000]
    points = large if len(large) > 1 else records
    return float(np.polyfit([math.log(r["n"]) for r in points], [math.log(r["seconds"]) for r in points], 1)[0])


def collect(device: str, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Run every contender at every size that it is asked for, each in a new process."""
    from rich.progress import Progress

    jobs = [
        (index, contender, n)
        for index, contender in enumerate(CUDA if device == "cuda" else CPU)
        for n in sizes
        if n <= contender.largest
    ]
    records = []
    with Progress(transient=True) as progress:
        task = progress.add_task("measuring", total=len(jobs))
        for index, contender, n in jobs:
            progress.update(task, description=f"{contender.name} {contender.dtype} {n:,}")
            try:
                records.append(run_in_new_process(f"{__file__}:measure", index=index, n=n, device=device))
            except RuntimeError as reason:
                print(f"{contender.name} {contender.dtype} at {n:,} did not run: {reason}")
            progress.advance(task)
    return records


def show(records: Sequence[dict[str, Any]], rival: str) -> None:
    """Print the table: each row with its ratio to `rival` at the same size, from the same run."""
    from rich.console import Console
    from rich.table import Table

    grid = Table(title=f"One step: unit rows, d={FEATURES}, bandwidth {BANDWIDTH:g}, {COLUMNS} columns")
    grid.add_column("way", no_wrap=True)
    for heading in ("dtype", "rows", "seconds", f"times faster than {rival}", "peak GiB", "error", "growth"):
        grid.add_column(heading, justify="right")
    base = {r["n"]: r["seconds"] for r in reversed(records) if r["name"].startswith(rival)}
    for r in records:
        family = [other for other in records if (other["name"], other["dtype"]) == (r["name"], r["dtype"])]
        faster = f"{base[r['n']] / r['seconds']:.3g}" if r["n"] in base else ""
        growth = f"n^{exponent(family):.2f}" if r is family[-1] and len(family) > 1 else ""
        grid.add_row(
            r["name"], r["dtype"], f"{r['n']:,}", f"{r['seconds']:.4f}", faster,
            f"{r['peak_gib']:.2f}", f"{r['error']:.1e}", growth,
        )  # fmt: skip
    Console(width=150).print(grid)


def picture(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw time over rows, a line for each way."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.subplots()
    for name, dtype in dict.fromkeys((r["name"], r["dtype"]) for r in records):
        family = [r for r in records if (r["name"], r["dtype"]) == (name, dtype)]
        style = {"float64": "--", "float32": "-", "float16": ":", "bfloat16": "-."}[dtype]
        color = f"C{list(dict.fromkeys(r['name'] for r in records)).index(name)}"
        axes.loglog([r["n"] for r in family], [r["seconds"] for r in family], style, marker="o", color=color,
                    label=f"{name}, {dtype}")  # fmt: skip
    axes.set(xlabel="rows", ylabel="seconds for one step", title=f"d={FEATURES}, bandwidth {BANDWIDTH:g}")
    axes.grid(which="both", alpha=0.25)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure, print, draw and keep."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder for the JSON and the picture")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--sizes", type=int, nargs="+", help="rows to measure at")
    options = parser.parse_args()
    records = collect(options.device, options.sizes or (CUDA_SIZES if options.device == "cuda" else CPU_SIZES))
    show(records, "dense" if options.device == "cpu" else "fused attention")
    labels = label_seconds()
    print(f"label graph, 1,000,000 rows, 200 classes, built and multiplied: {labels:.3f} s")
    summary = {"machine": platform.machine(), "records": records, "label_graph_seconds": labels}
    if options.device == "cpu":
        flops, exponentials = rates()
        summary |= {"tile_flop_per_second": flops, "exponentials_per_second": exponentials}
        pairs = 20_000**2
        print(
            f"this machine, all cores, float32: {flops / 1e9:.0f} GFLOP/s in tile products, {exponentials:.2g} "
            f"exponentials/s. Floor at 20,000 rows: {pairs * FEATURES / flops + pairs / 2 / exponentials:.2f} s with "
            f"symmetry (ours), {4 * pairs * FEATURES / flops + pairs / exponentials:.2f} s for fused attention"
        )
    options.out.mkdir(parents=True, exist_ok=True)
    name = f"graph-{options.device}"
    (options.out / f"{name}.json").write_text(json.dumps(summary, indent=1) + "\n")
    picture(records, options.out / f"{name}.png")
    print(f"kept in {options.out / name}.json and .png")


if __name__ == "__main__":
    main()
