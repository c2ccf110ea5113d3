"""Measure the noise: seconds for 64 and for a million values, against OpenDP and NumPy in the same run.

Every figure comes from a process of its own, so that its peak memory and its first call are its own. What is
timed is what a caller waits for: values in, noisy values out. Calibration is done before.
"""

import argparse
import json
import math
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

EPSILON, DELTA, SENSITIVITY = 1.0, 1e-5, 1.0
SIZES = (64, 1_000_000)
Kind = Literal["gaussian", "laplace"]


@dataclass(frozen=True)
class Contender:
    """A way to add noise: given a specification, it returns a function of the values."""

    name: str
    floats_safe: bool
    prepare: Callable[[Kind, Any], Callable[[Any], Any]]


def ours(kind: Kind, noise: Any) -> Callable[[Any], Any]:
    """Use our noise with the operating system's random bits."""
    from nearveil.privacy.noise import add_noise

    del kind
    return lambda values: add_noise(values, noise)


def opendp(same_grid: bool) -> Callable[[Kind, Any], Callable[[Any], Any]]:
    """Use OpenDP's measurement on vectors of floats, with its own granularity or with our grid."""

    def prepare(kind: Kind, noise: Any) -> Callable[[Any], Any]:
        import opendp.prelude as dp

        dp.enable_features("contrib")
        granularity = {"k": round(math.log2(noise.grid))} if same_grid else {}
        domain = dp.vector_domain(dp.atom_domain(T=float, nan=False), size=noise.size)
        if kind == "gaussian":
            measurement = dp.m.make_gaussian(domain, dp.l2_distance(T=float), scale=noise.scale, **granularity)
        else:
            measurement = dp.m.make_laplace(domain, dp.l1_distance(T=float), scale=noise.scale, **granularity)
        return lambda values: np.array(measurement(values.tolist()))

    return prepare


def floating_point(kind: Kind, noise: Any) -> Callable[[Any], Any]:
    """Use NumPy's floating-point noise: fast, foreseeable and leaking in its low bits."""
    rng = np.random.default_rng()
    draw = rng.normal if kind == "gaussian" else rng.laplace
    return lambda values: values + draw(scale=noise.scale, size=values.shape)


CONTENDERS = (
    Contender("ours", True, ours),
    Contender("OpenDP, our grid", True, opendp(same_grid=True)),
    Contender("OpenDP, default grid", True, opendp(same_grid=False)),
    Contender("NumPy, floating point", False, floating_point),
)


def specification(kind: Kind, size: int) -> Any:
    """Return the noise that every contender adds."""
    from nearveil.privacy.noise import calibrate_gaussian, calibrate_laplace

    if kind == "gaussian":
        return calibrate_gaussian(EPSILON, DELTA, sensitivity=SENSITIVITY, size=size)
    return calibrate_laplace(EPSILON, sensitivity=SENSITIVITY, size=size)


def measure(index: int, size: int, kind: Kind) -> dict[str, Any]:
    """Time one contender at one size, in this process."""
    contender, noise = CONTENDERS[index], specification(kind, size)
    values = np.random.default_rng(0).normal(size=size)
    add = contender.prepare(kind, noise)
    times: list[float] = []
    while len(times) < 2 or (len(times) < 200 and sum(times) < 3):
        start = time.perf_counter()
        released = add(values)
        times.append(time.perf_counter() - start)
        if times[0] > 10:
            break
    deviation = noise.scale * (1.0 if kind == "gaussian" else math.sqrt(2))
    return {
        "name": contender.name,
        "kind": kind,
        "size": size,
        "floats_safe": contender.floats_safe,
        "seconds": float(np.median(times[1:] or times)),
        "first_seconds": times[0],
        "repeats": len(times),
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "deviation_ratio": float(np.std(released - values) / deviation),
    }


def collect(sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Run every contender at every size, each in a new process."""
    from rich.progress import Progress

    kinds: tuple[Kind, ...] = ("gaussian", "laplace")
    jobs = [(kind, size, index) for kind in kinds for size in sizes for index in range(len(CONTENDERS))]
    records = []
    with Progress(transient=True) as progress:
        task = progress.add_task("measuring", total=len(jobs))
        for kind, size, index in jobs:
            progress.update(task, description=f"{kind} {size:,} {CONTENDERS[index].name}")
            command = [sys.executable, __file__, "--one", kind, str(size), str(index)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
                print(f"{CONTENDERS[index].name}, {kind}, {size:,} did not run: {reason}")
            else:
                records.append(json.loads(done.stdout.splitlines()[-1]))
            progress.advance(task)
    return records


def random_bytes_per_second() -> float:
    """Return how fast the operating system hands out random bytes: the floor of any such sampler."""
    import os

    start = time.perf_counter()
    for _ in range(100):
        os.urandom(1 << 18)
    return 100 * (1 << 18) / (time.perf_counter() - start)


def show(records: Sequence[dict[str, Any]]) -> None:
    """Print the table: each row with its ratios to the rivals at the same size, from the same run."""
    from rich.console import Console
    from rich.table import Table

    rivals = [contender.name for contender in CONTENDERS if contender.name != "ours"]
    grid = Table(title=f"Noise for epsilon {EPSILON:g}, delta {DELTA:g}, sensitivity {SENSITIVITY:g}")
    grid.add_column("way", no_wrap=True)
    for heading in ("noise", "values", "seconds", "first call", *(f"times faster than {name}" for name in rivals),
                    "peak GiB", "deviation / wanted"):  # fmt: skip
        grid.add_column(heading, justify="right")
    for r in records:
        alike = {o["name"]: o["seconds"] for o in records if (o["kind"], o["size"]) == (r["kind"], r["size"])}
        ratios = [f"{alike[name] / r['seconds']:.3g}" if name in alike else "" for name in rivals]
        grid.add_row(
            r["name"], r["kind"], f"{r['size']:,}", f"{r['seconds']:.3g}", f"{r['first_seconds']:.3g}", *ratios,
            f"{r['peak_gib']:.2f}", f"{r['deviation_ratio']:.3f}",
        )  # fmt: skip
    Console(width=170).print(grid)


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder for the JSON")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of values")
    parser.add_argument("--one", nargs=3, metavar=("KIND", "SIZE", "CONTENDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        kind, size, index = options.one
        print(json.dumps(measure(int(index), int(size), kind)))
        return
    records, rate = collect(options.sizes), random_bytes_per_second()
    show(records)
    print(f"the operating system's random bytes: {rate / 1e6:.0f} MB/s, so 8 MB take {8e6 / rate:.3f} s")
    options.out.mkdir(parents=True, exist_ok=True)
    summary = {"machine": platform.machine(), "records": records, "random_bytes_per_second": rate}
    (options.out / "noise.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(f"kept in {options.out / 'noise.json'}")


if __name__ == "__main__":
    main()
