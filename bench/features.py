"""Measure photographs a second, beside a plain loop of torch, idle and while other programs use all cores.

Every way runs in a process of its own, and all ways take turns within a round, so that noise hits them alike. A way
gets the paths of JPEG files and returns features. `gallery_features` also hashes every file and makes its thumbnail;
the plain loop reads, decodes, resizes and computes, one photograph after the other, on one thread.

"At most 1.3 times as long under load" means: T threads of a way compete with a busy loop for each of C cores. A way
that loses nothing else takes (T + C) / max(T, C) times as long: 2 with a thread for each core, 1.5 for the plain loop
on two cores. A way may take 1.3 times that, and 1.3 times the CPU of its idle rounds.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

QUERIES = 10
LIMIT = 1.3
BUSY = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(10**6):
        pass
"""
Compute = Callable[[list[Path]], Any]


def plain() -> Compute:
    """Plain loop of torch."""
    import numpy as np
    import torch
    from PIL import Image

    from nearveil.features.backbones import backbone

    torch.set_num_threads(1)
    network = backbone("EfficientNet-Lite0")

    def compute(paths: list[Path]) -> Any:
        rows = []
        for path in paths:
            with Image.open(path) as image:
                small = image.convert("RGB").resize((224, 224), Image.Resampling.BICUBIC)
            pixels = (np.asarray(small, dtype=np.float32) - 127) / 128
            with torch.inference_mode():
                row = network(torch.from_numpy(pixels.transpose(2, 0, 1)[None].copy())).mean(dim=(2, 3))[0].numpy()
            rows.append(row / np.linalg.norm(row))
        return np.array(rows)

    return compute


def make_gallery_way(extractor: Any) -> Compute:
    """Return a function that computes the features of files."""
    from nearveil.features import gallery_features

    return lambda paths: gallery_features(paths, extractor).features


def lite0() -> Compute:
    """EfficientNet-Lite0."""
    from nearveil.features import EfficientNetLite0

    return make_gallery_way(EfficientNetLite0())


def lite0_torch() -> Compute:
    """EfficientNet-Lite0 without ONNX Runtime."""
    sys.modules["onnxruntime"] = None  # type: ignore[assignment]
    return lite0()


def mobilenet() -> Compute:
    """MobileNetV2."""
    from nearveil.features.backbones import MobileNetV2

    return make_gallery_way(MobileNetV2())


def hog_color() -> Compute:
    """HOG and colour."""
    from nearveil.features import HogColor

    return make_gallery_way(HogColor())


WAYS: dict[str, Callable[[], Compute]] = {
    way.__name__: way for way in (plain, lite0, lite0_torch, mobilenet, hog_color)
}


def write_photographs(folder: Path, count: int, width: int | None) -> list[Path]:
    """Write JPEG files of three photographs that scikit-image carries; return their paths."""
    from PIL import Image
    from skimage import data

    pictures: Any = data
    images = [Image.fromarray(array) for array in (pictures.chelsea(), pictures.coffee(), pictures.astronaut())]
    if width is not None:
        images = [image.resize((width, round(width * image.height / image.width))) for image in images]
    paths = [folder / f"{number:05}.jpg" for number in range(count)]
    for number, path in enumerate(paths):
        images[number % 3].save(path, quality=90)
    sizes = sorted({image.size for image in images})
    average = sum(path.stat().st_size for path in paths) / count / 1024
    print(f"data: {count} JPEG files, {sizes} pixels, {average:.0f} KiB on average")
    return paths


def serve_way(name: str) -> None:
    """Answer requests: one line with paths in, one line with measurements out."""
    compute = WAYS[name]()
    for line in sys.stdin:
        paths = [Path(path) for path in json.loads(line)]
        start, cpu = time.perf_counter(), time.process_time()
        rows = compute(paths)
        record = {
            "seconds": time.perf_counter() - start,
            "cpu": time.process_time() - cpu,
            "dimension": rows.shape[1],
            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
        print(json.dumps(record), flush=True)


class Way:
    """A way in a process of its own."""

    def __init__(self, name: str) -> None:
        self.name, self.title = name, (WAYS[name].__doc__ or name).rstrip(".")
        command = [sys.executable, __file__, "--way", name]
        self._process: Any = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, paths: list[Path]) -> dict[str, Any]:
        """Compute the features of files; return what it took."""
        self._process.stdin.write(json.dumps([str(path) for path in paths]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.title}: the process ended")
        record: dict[str, Any] = json.loads(line)
        return record

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Keep cores busy with programs that do nothing useful."""
    loops = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def measure(ways: list[Way], paths: list[Path], rounds: int, cores: int) -> list[dict[str, Any]]:
    """Let the ways take turns, idle and under load; return one record for each."""
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    queries: dict[str, list[float]] = {way.name: [] for way in ways}
    for way in ways:
        way.run(paths[:3])  # prepares
    for _ in range(rounds):
        for way in ways:
            runs.setdefault((way.name, "idle"), []).append(way.run(paths))
            queries[way.name] += [1000 * way.run(paths[:1])["seconds"] for _ in range(QUERIES)]
        with busy_loops(cores):
            for way in ways:
                runs.setdefault((way.name, "load"), []).append(way.run(paths))
    records = []
    for way in ways:
        record: dict[str, Any] = {"way": way.name, "title": way.title, "query_ms": median(queries[way.name])}
        threads = 1 if way.name == "plain" else cores
        for state in ("idle", "load"):
            done = runs[way.name, state]
            against = runs["plain", state]
            record[state] = {
                "photographs_per_second": len(paths) / median(run["seconds"] for run in done),
                "cpu_ms": 1000 * median(run["cpu"] for run in done) / len(paths),
                "ratio": median(
                    slow["seconds"] / run["seconds"] for slow, run in zip(against, done, strict=True)
                ),  # to the plain loop of the same round
            }
        idle, load = record["idle"], record["load"]
        record["slowdown"] = idle["photographs_per_second"] / load["photographs_per_second"]
        record["fair_slowdown"] = (threads + cores) / max(threads, cores)
        record["slowdown_ratio"] = record["slowdown"] / record["fair_slowdown"]
        record["cpu_ratio"] = load["cpu_ms"] / idle["cpu_ms"]
        record |= {name: runs[way.name, "load"][-1][name] for name in ("dimension", "peak_mib")}
        records.append(record)
    return records


def show(records: list[dict[str, Any]]) -> None:
    """Print one row for each way."""
    from rich.console import Console
    from rich.table import Table

    grid = Table(title="JPEG files to features; x: in times of the plain loop in the same round")
    headings = ["way", "dims", "a second", "x", "CPU ms", "query ms", "MiB"]
    headings += ["loaded: a second", "x", "CPU ms", "slowdown / fair", "CPU / idle"]
    for heading in headings:
        grid.add_column(heading, justify="left" if heading == "way" else "right")
    for record in records:
        idle, load = record["idle"], record["load"]
        grid.add_row(
            record["title"],
            str(record["dimension"]),
            f"{idle['photographs_per_second']:.1f}",
            f"{idle['ratio']:.2f}",
            f"{idle['cpu_ms']:.1f}",
            f"{record['query_ms']:.1f}",
            f"{record['peak_mib']:.0f}",
            f"{load['photographs_per_second']:.1f}",
            f"{load['ratio']:.2f}",
            f"{load['cpu_ms']:.1f}",
            f"{record['slowdown']:.2f} / {record['fair_slowdown']:.2f} = {record['slowdown_ratio']:.2f}",
            f"{record['cpu_ratio']:.2f}",
        )
    Console(width=150).print(grid)
    for record in records[1:]:
        if record["way"].startswith("lite0"):
            faster = record["idle"]["ratio"] >= 1.5
            steady = record["slowdown_ratio"] <= LIMIT and record["cpu_ratio"] <= LIMIT
            print(f"{record['title']}: 1.5 times the plain loop: {faster}; at most {LIMIT} under load: {steady}")


def describe_machine(cores: int) -> dict[str, Any]:
    """Return what the figures depend on."""
    facts: dict[str, Any] = {"python": platform.python_version(), "machine": platform.machine(), "cores": cores}
    for name in ("torch", "onnxruntime", "pillow", "numpy"):
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            facts[name] = "none"
    return facts | {"load_before": round(os.getloadavg()[0], 1)}


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder for the JSON")
    parser.add_argument("--images", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, help="width of the photographs in pixels; default: 451 to 600")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        serve_way(options.way)
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ["OMP_NUM_THREADS"] = str(cores)
    machine = describe_machine(cores)
    print("parameters:", ", ".join(f"{name} {value}" for name, value in machine.items()))
    print(f"rounds: {options.rounds}; load: {cores} busy loops; medians")
    ways = [Way(name) for name in dict.fromkeys(["plain", *options.ways])]
    try:
        with tempfile.TemporaryDirectory() as folder:
            paths = write_photographs(Path(folder), options.images, options.width)
            records = measure(ways, paths, options.rounds, cores)
    finally:
        for way in ways:
            way.close()
    show(records)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "features.json").write_text(json.dumps({"machine": machine, "records": records}, indent=1))


if __name__ == "__main__":
    main()
