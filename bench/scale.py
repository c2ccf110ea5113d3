"""Measure growth: vectors of a Parquet file become a published map and a question is answered, on 1 and 2 workers.

Time and peak memory of every stage, of the process that asks and all workers together (memory that they share counts
once: PSS). In the same run, on the same rows: FAISS's inverted lists, built on the disk, and Dask-ML's k-means. Times
are those of a busy or an idle machine as it was: the load is printed beside them.
"""

import argparse
import json
import math
import os
import platform
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from nearveil import Client
from nearveil.cluster import ROWS, Cluster, connect
from nearveil.features.vectors import VectorFile
from nearveil.gallery import Index
from nearveil.ledger import Ledger
from nearveil.mechanisms.covers import learning

DIMENSION = 128
CANDIDATES = 0.01
EPSILON = 4.0
PAUSE = 0.2  # seconds between two looks at the memory
LISTS = 1024  # of FAISS's index
CENTROIDS = 64  # of Dask-ML's k-means
PASSES = 3


def write_rows(place: Path, n: int) -> None:
    """Write rows around 1,000 centres to Parquet, one row group for each partition."""
    import pyarrow as pa
    from pyarrow import parquet

    centres = np.random.default_rng(99).standard_normal((1000, DIMENSION), dtype=np.float32)
    generator = np.random.default_rng(n)
    kind = pa.list_(pa.float32(), DIMENSION)
    with parquet.ParquetWriter(place, pa.schema([("v", kind)]), compression="none") as writer:
        for start in range(0, n, ROWS):
            rows = centres[generator.integers(0, 1000, min(ROWS, n - start))]
            rows += 0.8 * generator.standard_normal(rows.shape, dtype=np.float32)
            rows /= np.linalg.norm(rows, axis=1, keepdims=True)
            column = pa.FixedSizeListArray.from_arrays(rows.ravel(), DIMENSION)
            writer.write_table(pa.table({"v": column}), row_group_size=ROWS)


class Watch:
    """Measures stages: seconds, and the largest memory of this process and its workers."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.peaks: dict[str, float] = {}
        self._stage, self._since = "starting", time.perf_counter()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def enter(self, stage: str) -> str:
        """Begin a stage, and return the one before it."""
        now, before = time.perf_counter(), self._stage
        self.seconds[before] = self.seconds.get(before, 0.0) + now - self._since
        self._stage, self._since = stage, now
        return before

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measure a block as a stage."""
        before = self.enter(name)
        try:
            yield
        finally:
            self.enter(before)

    def end(self) -> None:
        """Stop looking."""
        self.enter("ended")
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(PAUSE):
            self.peaks[self._stage] = max(self.peaks.get(self._stage, 0.0), measure_memory())


def measure_memory() -> float:
    """Return the memory of this process and those below it, in MB."""
    total, waiting = 0, [os.getpid()]
    while waiting:
        number = waiting.pop()
        try:
            lines = Path(f"/proc/{number}/smaps_rollup").read_text().splitlines()
            total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
            for task in Path(f"/proc/{number}/task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
        except (OSError, StopIteration):
            continue
    return total * 1024 / 1e6


class WatchedCluster(Cluster):
    """A cluster whose stages are measured, and the bytes that are sent to workers counted."""

    def __init__(self, inner: Cluster, watch: Watch) -> None:
        self._inner, self._watch, self.sent = inner, watch, 0

    def place(self, parts: Sequence[Any]) -> Sequence[Any]:
        """Count and place partitions."""
        self.sent += sum(_count_bytes(part) for part in parts)
        return self._inner.place(parts)

    def share(self, value: Any) -> Any:
        """Share a value."""
        return self._inner.share(value)

    def map(self, *given: Any, stage: str, **options: Any) -> Iterator[Any]:
        """Measure a stage."""
        found = self._inner.map(*given, stage=stage, **options)
        while True:
            with self._watch.stage(stage):
                try:
                    one = next(found)
                except StopIteration:
                    return
            yield one


def _count_bytes(part: Any) -> int:
    return sum(_count_bytes(one) for one in part) if isinstance(part, tuple) else int(getattr(part, "nbytes", 0))


def run(folder: Path, source: Path, n: int, workers: int, n_sets: int) -> dict[str, Any]:
    """Index a file, publish its map, ask a question; return what each stage took."""
    watch = Watch()
    where = folder / f"index-{n}-{workers}"
    with connect(f"local:{workers}") as inner:
        cluster = WatchedCluster(inner, watch)
        watch.enter("writing the index")
        index = Index.create(where, dimension=DIMENSION)
        index.add_file(VectorFile(source), cluster=cluster)
        watch.enter("at the driver, while publishing")
        published = index.publish(EPSILON, CANDIDATES, n_sets=n_sets, cluster=cluster)
        sent = cluster.sent
    watch.enter("a question")
    with Ledger(folder / f"ledger-{n}-{workers}.db") as ledger:
        account = ledger.open_account(
            "me", owner="me", protects="query", unit="row", relation="replace", epsilon=100.0, delta=0.0
        )
        with Client(index, account=account) as client:
            row = index.features(index.ids()[:1])[0]
            matches = len(client.nearest(row, k=8, epsilon=EPSILON).matches)
    watch.end()
    index.close()
    seconds = {name: round(value, 2) for name, value in watch.seconds.items() if name not in {"starting", "ended"}}
    peaks = {name: round(value) for name, value in watch.peaks.items()}
    return {
        "rows": n,
        "workers": workers,
        "sets": n_sets,
        "seconds": seconds,
        "peak_mb": peaks,
        "sent_mb": round(sent / 1e6),
        "map": published.map.map_id,
        "matches": matches,
        "load": round(os.getloadavg()[0], 1),
    }


def run_rivals(folder: Path, source: Path, n: int) -> dict[str, Any]:
    """Build FAISS's lists on the disk, and Dask-ML's k-means, of the same rows on two workers."""
    import faiss
    from faiss.contrib.ondisk import merge_ondisk

    file = VectorFile(source)
    parts = file.cut()
    found: dict[str, Any] = {"rows": n}

    def build() -> None:
        quantiser = faiss.IndexFlatIP(DIMENSION)
        empty = faiss.IndexIVFFlat(quantiser, DIMENSION, LISTS, faiss.METRIC_INNER_PRODUCT)
        empty.train(file.read(parts[0]).rows)
        names = []
        for number, part in enumerate(parts):
            some = faiss.clone_index(empty)
            rows = file.read(part).rows
            some.add_with_ids(rows, np.arange(part.start, part.stop))
            names.append(str(folder / f"block-{number}.faiss"))
            faiss.write_index(some, names[-1])
        merge_ondisk(empty, names, str(folder / "merged.ivfdata"))
        for name in names:
            Path(name).unlink()

    found["faiss_lists_seconds"] = _time(build)
    rows = np.concatenate([file.read(part).rows for part in parts])
    with connect("local:2") as cluster:
        start = time.perf_counter()
        prototypes, nearest = learning.fine_centres(rows, 8192, cluster)
        found["our_prototypes_seconds"] = round(time.perf_counter() - start, 2)
        found["our_prototypes_error"] = float(((rows[::50] - prototypes[nearest[::50]]) ** 2).sum(axis=1).mean())
    found |= _run_dask_ml(rows)
    return found


def _run_dask_ml(rows: Any) -> dict[str, Any]:
    try:
        from dask_ml.cluster import KMeans
    except ImportError as error:
        return {"dask_ml": f"not measured: {error}"}
    da, distributed = (import_module(name) for name in ("dask.array", "distributed"))
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as local,
        distributed.Client(local),
    ):
        table = da.from_array(rows, chunks=(ROWS, DIMENSION)).persist()
        distributed.wait(table)
        means = KMeans(CENTROIDS, init="random", max_iter=PASSES, random_state=0)
        seconds = _time(lambda: means.fit(table))
    ours = _time(lambda: learning.centres(rows, CENTROIDS, 0, PASSES))
    return {
        "dask_ml_kmeans_64_seconds": seconds,
        "dask_ml_passes": int(means.n_iter_),
        "our_kmeans_64_seconds": ours,
        "our_kmeans_64_note": "FAISS in this process, on at most 256 rows for each centroid",
    }


def _time(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return round(time.perf_counter() - start, 2)


def find_exponents(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return how the seconds of each stage grow with the rows, from the smallest to the largest run of 2 workers."""
    two = sorted((one for one in runs if one["workers"] == 2), key=lambda one: one["rows"])
    if len(two) < 2:
        return {}
    first, last = two[0], two[-1]
    grown = math.log(last["rows"] / first["rows"])
    return {
        stage: round(math.log(last["seconds"][stage] / first["seconds"][stage]) / grown, 2)
        for stage in first["seconds"]
        if first["seconds"][stage] > 0 and last["seconds"].get(stage, 0) > 0
    }


LINEAR = ("reading", "writing the index", "making codes")
NEIGHBOURS = "looking for neighbours"  # grows with the rows and with the inverted lists, up to 4,096 of them
QUERIES, LISTED = 250_000, 49  # items that act as queries at most, and the neighbours that a partition names for each


def print_model(found: dict[str, Any], sizes: Sequence[int], price: float) -> None:
    """Print what larger galleries would take, by the largest run: bytes by formula, core hours by growth of stages."""
    run = max(found["runs"], key=lambda one: (one["rows"], one["workers"]))
    linear = sum(run["seconds"].get(stage, 0.0) for stage in LINEAR) * run["workers"] / run["rows"]
    search = run["seconds"][NEIGHBOURS] * run["workers"] / (run["rows"] * _count_lists(run["rows"]))
    fixed = sum(value for stage, value in run["seconds"].items() if stage not in (*LINEAR, NEIGHBOURS))
    print("rows | to workers, GB | to each worker, GB | back from neighbours, GB | core hours | dollars")
    for n in sizes:
        asked = min(n, QUERIES)
        sent = n * 4 * (found["dimension"] + 64) / 1e9
        each = asked * 4 * (found["dimension"] + 48) / 1e9
        back = -(-n // ROWS) * asked * LISTED * 12 / 1e9
        hours = (n * linear + n * _count_lists(n) * search + fixed) / 3600
        print(f"{n:,} | {sent:,.2f} | {each:,.2f} | {back:,.1f} | {hours:,.2f} | {hours * price:,.2f}")


def _count_lists(n: int) -> int:
    return min(int(2 * math.sqrt(n)), 4096)


def main() -> None:
    """Measure, and write a JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--sets", type=int, default=64)
    parser.add_argument("--no-rivals", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    parser.add_argument("--model", type=int, nargs="+", help="print what so many rows would take, and measure nothing")
    parser.add_argument("--price", type=float, default=0.05, help="dollars for an hour of a core")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    place = given.out / "scale.json"
    found: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "dimension": DIMENSION,
        "epsilon": EPSILON,
        "candidates": CANDIDATES,
        "runs": [],
        "rivals": [],
    }
    if place.exists():  # further sizes join those that were measured before
        found = json.loads(place.read_text())
    if given.model:
        print_model(found, given.model, given.price)
        return
    for n in given.rows:
        with tempfile.TemporaryDirectory(prefix="nearveil-scale-") as name:
            source = Path(name) / f"rows-{n}.parquet"
            write_rows(source, n)
            for workers in given.workers:
                found["runs"].append(run(Path(name), source, n, workers, given.sets))
                print(json.dumps(found["runs"][-1]), flush=True)
            if not given.no_rivals:
                found["rivals"].append(run_rivals(Path(name), source, n))
                print(json.dumps(found["rivals"][-1]), flush=True)
        found["exponents"] = find_exponents(found["runs"])
        place.write_text(json.dumps(found, indent=1))
    print(json.dumps(found["exponents"]))


if __name__ == "__main__":
    main()
