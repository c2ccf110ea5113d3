"""Measure growth: vectors of a Parquet file become a published map and a server answers, on 1 and 2 workers.

Time and peak memory of every stage, of the process that asks, all workers and the server together (memory that they
share counts once: PSS). In the same run, on the same rows: FAISS's inverted lists, built on the disk, and Dask-ML's
k-means. Times are those of a busy or an idle machine as it was: the load is printed beside them.

`--postgres ROWS` does the same with a gallery in PostgreSQL, `--model ROWS` says what larger galleries would take, and
simulates what travels between machines.
"""

import argparse
import heapq
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from nearveil import Client
from nearveil.cluster import ROWS, Cluster, connect, cut_rows
from nearveil.features.vectors import VectorFile
from nearveil.gallery import Index
from nearveil.ledger import Ledger
from nearveil.mechanisms.covers import learning
from nearveil.server import TokenStore

DIMENSION = 128
CANDIDATES = 0.01
EPSILON = 4.0
PAUSE = 1.0  # seconds between two looks at the memory, which take some of the processor
LISTS = 1024  # of FAISS's index
CENTROIDS = 64  # of Dask-ML's k-means
PASSES = 3


def write_rows(place: Path, n: int, dimension: int) -> None:
    """Write rows of norm one around 1,000 random centres to Parquet, one row group for each partition."""
    import pyarrow as pa
    from pyarrow import parquet

    centres = np.random.default_rng(99).standard_normal((1000, dimension), dtype=np.float32)
    generator = np.random.default_rng(n)
    kind = pa.list_(pa.float32(), dimension)
    with parquet.ParquetWriter(place, pa.schema([("v", kind)]), compression="none") as writer:
        for start in range(0, n, ROWS):
            rows = centres[generator.integers(0, 1000, min(ROWS, n - start))]
            rows += 0.8 * generator.standard_normal(rows.shape, dtype=np.float32)
            rows /= np.linalg.norm(rows, axis=1, keepdims=True)
            column = pa.FixedSizeListArray.from_arrays(rows.ravel(), dimension)
            writer.write_table(pa.table({"v": column}), row_group_size=ROWS)


class Watch:
    """Measures stages: seconds, and the largest memory of this process and its workers."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.peaks: dict[str, float] = {}
        self.driver: dict[str, float] = {}
        self.roots = [os.getpid()]  # processes that are counted, with those below them
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
            for peaks, found in (
                (self.peaks, measure_memory(*self.roots)),
                (self.driver, measure_memory(os.getpid(), below=False)),
            ):
                peaks[self._stage] = max(peaks.get(self._stage, 0.0), found)


def measure_memory(*roots: int, below: bool = True) -> float:
    """Return the memory of processes and those below them, in MB."""
    total, waiting = 0, list(roots)
    while waiting:
        number = waiting.pop()
        try:
            lines = Path(f"/proc/{number}/smaps_rollup").read_text().splitlines()
            total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
            for task in Path(f"/proc/{number}/task").iterdir() if below else ():
                waiting += map(int, (task / "children").read_text().split())
        except (OSError, StopIteration):
            continue
    return total * 1024 / 1e6


class WatchedCluster(Cluster):
    """A cluster whose stages are measured, and the bytes counted that go to workers, between them and back."""

    def __init__(self, inner: Any, watch: Watch) -> None:
        self._inner, self._watch = inner, watch
        self.sent, self.back, self.between = 0, 0, 0

    def place(self, parts: Sequence[Any]) -> Sequence[Any]:
        """Count and place partitions."""
        self.sent += sum(_count_bytes(part) for part in parts)
        placed: Sequence[Any] = self._inner.place(parts)
        return placed

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
            self.back += _count_bytes(one)
            yield one

    def reduce(self, *given: Any, stage: str, **options: Any) -> Any:
        """Measure a stage whose results are merged by workers."""
        before = self._count_received()
        with self._watch.stage(stage):
            found = self._inner.reduce(*given, stage=stage, **options)
        if stage == NEIGHBOURS:
            self.between = self._count_received() - before
        self.back += _count_bytes(found)
        return found

    def _count_received(self) -> int:
        """Return the bytes that workers received from workers."""
        counts = self._inner._client.run(_count_received)
        return sum(counts.values())


def _count_received(dask_worker: Any) -> int:
    return sum(one["total"] for one in dask_worker.transfer_incoming_log)


def _count_bytes(part: Any) -> int:
    if isinstance(part, tuple):
        return sum(_count_bytes(one) for one in part)
    return int(getattr(part, "nbytes", 0)) + int(getattr(getattr(part, "features", None), "nbytes", 0))


def run(folder: Path, source: Path, n: int, workers: int, given: argparse.Namespace, where: str = "") -> dict[str, Any]:
    """Index a file, publish its map, serve it and ask a question; return what each stage took.

    `where`: A URL of PostgreSQL; a folder otherwise.
    """
    watch = Watch()
    if where:
        watch.roots.append(given.postmaster)
    place = where or str(folder / f"index-{n}-{workers}")
    with connect(f"local:{workers}") as inner:
        cluster = WatchedCluster(inner, watch)
        watch.enter("writing the index")
        index = Index.create(place, dimension=given.dimension)
        index.add_file(VectorFile(source), cluster=cluster)
        watch.enter(DRIVER)
        published = index.publish(EPSILON, CANDIDATES, n_sets=given.sets, reach=0.0, cluster=cluster)
    watch.enter("ended")
    index.close()
    name, held = published.map.map_id, len(published.codes)
    del index, published
    matches = ask_server(place, source, folder, watch)
    watch.end()
    seconds = {stage: round(value, 2) for stage, value in watch.seconds.items() if stage not in {"starting", "ended"}}
    return {
        "rows": n,
        "workers": workers,
        "sets": given.sets,
        "seconds": seconds,
        "total_seconds": round(sum(seconds.values()), 1),
        "peak_mb": {stage: round(value) for stage, value in watch.peaks.items()},
        "driver_mb": {stage: round(value) for stage, value in watch.driver.items()},
        "sent_mb": round(cluster.sent / 1e6),
        "back_mb": round(cluster.back / 1e6),
        "between_workers_mb": round(cluster.between / 1e6),
        "map": name,
        "items": held,
        "matches": matches,
        "load": round(os.getloadavg()[0], 1),
    }


def ask_server(place: str, source: Path, folder: Path, watch: Watch) -> int:
    """Start `nearveil serve`, and ask it two questions; return how many matches came."""
    file = VectorFile(source)
    row = file.read(file.cut()[0]).rows[0]
    tokens = folder / "tokens.db"
    with TokenStore(tokens) as store:
        secret = store.create(f"asks {time.time_ns()}")[1]
    watch.enter("starting the server")
    words = ("-m", "nearveil", "serve", place, "--port", "0", "--tokens", str(tokens))
    with (
        subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True) as server,
        Ledger(folder / f"ledger-{time.time_ns()}.db") as ledger,
    ):
        try:
            url = next(iter(server.stdout or [])).split()[-1]
            account = ledger.open_account(
                "me", owner="me", protects="query", unit="row", relation="replace", epsilon=100.0, delta=0.0
            )
            with Client(url, secret, account=account, extractor=None) as client:
                watch.enter("the first question")
                found = client.nearest(row, k=8, epsilon=EPSILON)
                watch.enter("another question")
                client.nearest(row, k=8, epsilon=EPSILON)
                watch.enter("ended")
        finally:
            server.terminate()
    return len(found.matches)


def measure_control() -> dict[str, Any]:
    """Measure how much faster two processes are than one at arithmetic alone, which nothing but the cores limits."""
    with ProcessPoolExecutor(2) as pool:
        list(pool.map(_multiply, [1, 1]))
        one = _time(lambda: list(pool.map(_multiply, [8])))
        two = _time(lambda: list(pool.map(_multiply, [4, 4])))
    return {"one_process_seconds": one, "two_processes_seconds": two, "speedup": round(one / two, 2)}


def _multiply(count: int) -> float:
    table = np.random.default_rng(0).standard_normal((2048, 2048), dtype=np.float32)
    with threadpool_limits(1):
        return float(sum((table @ table)[0, 0] for _ in range(10 * count)))


def run_rivals(folder: Path, source: Path, n: int, dimension: int) -> dict[str, Any]:
    """Build FAISS's lists on the disk, and Dask-ML's k-means, of the same rows on two workers."""
    import faiss
    from faiss.contrib.ondisk import merge_ondisk

    file = VectorFile(source)
    parts = file.cut()
    found: dict[str, Any] = {"rows": n}

    def build() -> None:
        quantiser = faiss.IndexFlatIP(dimension)
        empty = faiss.IndexIVFFlat(quantiser, dimension, LISTS, faiss.METRIC_INNER_PRODUCT)
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
    rows = np.concatenate([file.read(part).rows for part in parts[:16]])  # as many as prototypes are learned from
    with connect("local:2") as cluster:
        start = time.perf_counter()
        fine = learning.fine_centres(rows, 8192, cluster)
        found["our_prototypes_seconds"] = round(time.perf_counter() - start, 2)
        found["our_prototypes_error"] = float(
            ((rows[::50] - fine.centroids[fine.find(rows[::50])]) ** 2).sum(axis=1).mean()
        )
    found |= _run_dask_ml(file, rows)
    return found


def _run_dask_ml(file: VectorFile, rows: Any) -> dict[str, Any]:
    try:
        from dask_ml.cluster import KMeans
    except ImportError as error:
        return {"dask_ml": f"not measured: {error}"}
    dask, da, distributed = (import_module(name) for name in ("dask", "dask.array", "distributed"))
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as local,
        distributed.Client(local),
    ):
        blocks = [
            da.from_delayed(dask.delayed(_read_rows)(file, part), (part.stop - part.start, rows.shape[1]), np.float32)
            for part in file.cut()
        ]
        table = da.concatenate(blocks).persist()
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


def _read_rows(file: VectorFile, part: Any) -> Any:
    return file.read(part).rows


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


DRIVER = "at the driver, while publishing"
NEIGHBOURS = "looking for neighbours"  # grows with the rows and with the inverted lists, up to 4,096 of them
FIXED = ("learning sets", "placing prototypes", "starting the server", "the first question", "another question", DRIVER)
LISTED = 49  # neighbours that a list has for each query
GIGABIT = 1e9 / 8  # bytes a second


def simulate(
    parts: int, workers: int, size: int, *, link: float = 10 * GIGABIT, compute: float = 3.0, merge: float = 0.4
) -> dict[str, float]:
    """Simulate the search for neighbours: who computes and merges what when, and what travels over which link.

    Runs of partitions that follow each other are given to one worker, as Dask does. A free worker merges what it can,
    or computes its next run. Two lists are merged where the first is. Every machine has one link, which carries one
    list at a time in each direction. The last list goes to the driver.

    `size`: Bytes of a list. `link`: Bytes a second. `compute`, `merge`: Seconds for a partition, and for a merge.
    """
    runs = cut_rows(parts, 1 << max(0, (parts // (4 * workers)).bit_length() - 1))
    jobs: list[list[tuple[int, int]]] = [[] for _ in range(workers)]  # merges for which a worker has both lists
    idle, out, into = set(range(workers)), [0.0] * workers, [0.0] * workers
    where: dict[tuple[int, int], int] = {}  # a list's row and place in the tree, and who has it
    events: list[tuple[float, int, bool, tuple[int, int]]] = []  # when, at which worker, whether it is made there, what
    left = [[number for number in range(len(runs)) if number * workers // len(runs) == one] for one in range(workers)]
    between = 0

    def begin(worker: int, now: float) -> None:
        idle.discard(worker)
        if jobs[worker]:
            heapq.heappush(events, (now + merge, worker, True, jobs[worker].pop(0)))
        elif left[worker]:
            number = left[worker].pop(0)
            count = runs[number].stop - runs[number].start
            heapq.heappush(events, (now + count * compute + (count - 1) * merge, worker, True, (0, number)))
        else:
            idle.add(worker)

    for worker in range(workers):
        begin(worker, 0.0)
    while events:
        now, worker, is_made, some = heapq.heappop(events)
        if not is_made:
            jobs[worker].append(some)
            if worker in idle:
                begin(worker, now)
            continue
        begin(worker, now)
        level, number = _rise(*some, len(runs))
        where[level, number] = worker
        pair = [(level, number - number % 2), (level, number - number % 2 + 1)]
        if all(one in where for one in pair):
            at, away = (where[one] for one in pair)
            if at != away:
                now = out[away] = into[at] = max(now, out[away], into[at]) + size / link
                between += size
            heapq.heappush(events, (now, at, False, (level + 1, number // 2)))
    alone = (parts * compute + (parts - 1) * merge) / workers
    return {"between": float(between), "seconds": now + size / link, "alone": alone}


def _rise(level: int, number: int, leaves: int) -> tuple[int, int]:
    """Return where in the tree a list is merged: further up where it has no neighbour."""
    while number % 2 == 0 and number + 1 == -(-leaves >> level) and number:
        level, number = level + 1, number // 2
    return level, number


def print_model(found: dict[str, Any], sizes: Sequence[int], price: float, workers: int) -> None:
    """Print what larger galleries would take, by the largest run: stages grow with the rows, or not at all."""
    run = max(found["runs"], key=lambda one: (one["rows"], one["workers"]))
    seconds, width = run["seconds"], 2 * found["dimension"]
    fixed = sum(seconds.get(stage, 0.0) for stage in FIXED)
    search = seconds[NEIGHBOURS] * run["workers"] / (run["rows"] * _count_lists(run["rows"]))
    linear = (sum(seconds.values()) - fixed - seconds[NEIGHBOURS]) * run["workers"] / run["rows"]
    again = simulate(-(-run["rows"] // ROWS), run["workers"], min(run["rows"], learning.MOST_QUERIES) * LISTED * 8)
    print(f"between workers, as simulated: {again['between'] / 1e6:.0f} MB; counted: {run['between_workers_mb']} MB")
    print(f"{workers} workers, {price} dollars for an hour of a core, links of 10 Gbit/s")
    columns = ("rows", "to workers, GB", "to each, GB", "between workers, GB", "codes back, GB", "core hours", "hours")
    print(" | ".join((*columns, "dollars", "neighbours, s", "of these waiting, s")))
    for n in sizes:
        asked = min(n, learning.MOST_QUERIES)
        each = asked * 4 * (found["dimension"] + 48 + 2 * 8) / 1e9
        parts, at_once = -(-n // ROWS), n * _count_lists(n) * search
        sim = simulate(parts, workers, asked * LISTED * 8, compute=at_once / parts)
        hours = (n * linear + at_once + fixed) / 3600
        wall = ((n * linear) / workers + sim["seconds"] + fixed) / 3600
        print(
            f"{n:,} | {n * 4 * found['dimension'] / 1e9:,.1f} | {each:,.2f} | {sim['between'] / 1e9:,.1f} | "
            f"{n * width / 1e9:,.1f} | {hours:,.2f} | {wall:,.2f} | {hours * price:,.2f} | "
            f"{sim['seconds']:,.0f} | {sim['seconds'] - sim['alone']:,.0f}"
        )


def _count_lists(n: int) -> int:
    return min(int(2 * math.sqrt(n)), 4096)


def measure_postgres(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Fill a gallery in PostgreSQL, publish, serve and ask."""
    from tests.ledger.postgres import Postgres

    source, server = folder / "rows.parquet", Postgres()
    try:
        write_rows(source, given.postgres, given.dimension)
        given.postmaster = int((Path(server._data) / "postmaster.pid").read_text().split()[0])
        found = run(folder, source, given.postgres, 2, given, server.url())
        with import_module("psycopg").connect(server.url()) as connection:
            query = "SELECT relname, pg_total_relation_size(oid) FROM pg_class WHERE relkind = 'r'"
            sizes = connection.execute(query).fetchall()
        found["tables_mb"] = {name: round(size / 1e6) for name, size in sizes if size > 1e6}
        return found
    finally:
        server.remove()


def main() -> None:
    """Measure, and write a JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--sets", type=int, default=64)
    parser.add_argument("--dimension", type=int, default=DIMENSION)
    parser.add_argument("--no-rivals", action="store_true")
    parser.add_argument(
        "--postgres", type=int, help="measure a gallery of so many rows in PostgreSQL, and nothing else"
    )
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    parser.add_argument("--model", type=int, nargs="+", help="print what so many rows would take, and measure nothing")
    parser.add_argument("--price", type=float, default=0.05, help="dollars for an hour of a core")
    parser.add_argument("--machines", type=int, default=64, help="of the model: workers, each with one core")
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
        "postgres": [],
        "control": [],
    }
    if place.exists():  # further sizes join those that were measured before
        found |= json.loads(place.read_text())
    if given.model:
        print_model(found, given.model, given.price, given.machines)
        return
    if given.postgres:
        with tempfile.TemporaryDirectory(prefix="nearveil-scale-") as name:
            found["postgres"].append(measure_postgres(Path(name), given))
            print(json.dumps(found["postgres"][-1]), flush=True)
        place.write_text(json.dumps(found, indent=1))
        return
    if len(given.workers) > 1:
        found["control"].append(measure_control())
        print(json.dumps(found["control"][-1]), flush=True)
    for n in given.rows:
        with tempfile.TemporaryDirectory(prefix="nearveil-scale-") as name:
            source = Path(name) / f"rows-{n}.parquet"
            write_rows(source, n, given.dimension)
            for workers in given.workers:
                found["runs"].append(run(Path(name), source, n, workers, given))
                print(json.dumps(found["runs"][-1]), flush=True)
                place.write_text(json.dumps(found, indent=1))
            if not given.no_rivals:
                found["rivals"].append(run_rivals(Path(name), source, n, given.dimension))
                print(json.dumps(found["rivals"][-1]), flush=True)
        found["exponents"] = find_exponents(found["runs"])
        place.write_text(json.dumps(found, indent=1))
    print(json.dumps(found["exponents"]))


if __name__ == "__main__":
    main()
