"""Measure the index: build, open, search, memory; both stores, against plain FAISS.

Plain FAISS is ``IndexFlatIP``: rows in memory, nothing on the disk. Every case runs in a process of its own, in which
ours and FAISS search by turns for the same queries, one at a time. Both stores are durable: each addition of 10,000
items waits for the disk. Memory is what the process grew by; PostgreSQL's own is in its server and not counted.
"""

import argparse
import ctypes
import json
import multiprocessing
import os
import platform
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

PROCESSES = multiprocessing.get_context("spawn")
CASES = ((10_000, 128), (10_000, 1280), (100_000, 128))
LARGE = (1_000_000, 128)
STORES = ("directory", "PostgreSQL")
BATCH = 10_000
K = 10


def clustered(n: int, dimension: int, seed: int) -> Any:
    """Return rows of norm one around 1,000 centres, as features of images lie."""
    generator = np.random.default_rng(seed)
    centres = np.random.default_rng(99).standard_normal((1000, dimension), dtype=np.float32)
    rows = np.empty((n, dimension), np.float32)
    for start in range(0, n, BATCH):
        some = rows[start : start + BATCH]
        some[:] = centres[generator.integers(0, 1000, len(some))]
        some += 0.8 * generator.standard_normal(some.shape, dtype=np.float32)
        some /= np.linalg.norm(some, axis=1, keepdims=True)
    return rows


def resident() -> float:
    """Return the memory of this process, in MB."""
    ctypes.CDLL(None).malloc_trim(0)  # what was freed does not count
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return seconds and the result."""
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def build(where: str, rows: Any) -> None:
    """Make an index of rows."""
    from nearveil.gallery.index import Index
    from nearveil.gallery.items import Item

    with Index.create(where, dimension=rows.shape[1], timeout=600) as index:
        for start in range(0, len(rows), BATCH):
            some = enumerate(rows[start : start + BATCH], start)
            index.add(Item(row, f"photos/{number}.jpg") for number, row in some)


def searched(ways: dict[str, Callable[[Any], Any]], queries: Any) -> dict[str, float]:
    """Return the median milliseconds of one query for each way; the ways take turns."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way(queries[:1])
    for row in queries:
        for name, way in ways.items():
            times[name].append(timed(lambda way=way, row=row: way(row[None]))[0])  # type: ignore[misc]
    return {name: 1000 * float(np.median(spent)) for name, spent in times.items()}


def disk(where: str) -> float:
    """Return what an index takes on the disk, in MB."""
    if not where.startswith("postgresql"):
        return sum(file.stat().st_size for file in Path(where).iterdir()) / 1e6
    import psycopg

    with psycopg.connect(where) as server:
        row = server.execute("SELECT sum(pg_total_relation_size(relid)) FROM pg_stat_user_tables").fetchone()
    return float(row[0]) / 1e6 if row else 0.0


def measure(store: str, where: str, n: int, dimension: int, count: int, threads: int) -> dict[str, Any]:
    """Measure one store at one size."""
    import faiss

    from nearveil.gallery.index import Index

    faiss.omp_set_num_threads(threads)
    rows, queries = clustered(n, dimension, 0), clustered(count, dimension, 1)
    seconds_build, _ = timed(lambda: build(where, rows))
    before = resident()
    plain = faiss.IndexFlatIP(dimension)
    seconds_plain, _ = timed(lambda: plain.add(rows))
    plain_memory, before = resident() - before, resident()
    seconds_open, index = timed(lambda: Index.open(where, timeout=600))
    exact = searched({"ours": lambda row: index.search(row, K), "plain": lambda row: plain.search(row, K)}, queries)
    memory = resident() - before
    want = plain.search(queries, K)[1]
    agreed = np.mean([np.isin(a, b).mean() for a, b in zip(want, index.search(queries, K)[0], strict=True)])
    record = {
        "store": store, "items": n, "dimension": dimension, "build_s": seconds_build, "plain_build_s": seconds_plain,
        "open_s": seconds_open, "exact_ms": exact["ours"], "plain_ms": exact["plain"], "agreed": float(agreed),
        "memory_mb": memory, "plain_memory_mb": plain_memory, "disk_mb": disk(where),
    }  # fmt: skip
    index.close()
    return record


def measure_table(n: int = 100_000, dimension: int = 128, rounds: int = 5) -> dict[str, float]:
    """Return the median seconds of building plain FAISS and writing its file, and of `add_table`; they take turns."""
    import faiss

    from nearveil.gallery.index import Index

    rows, own = clustered(n, dimension, 0), [f"doc-{number}" for number in range(n)]
    times: dict[str, list[float]] = {"plain_s": [], "table_s": [], "table_ids_s": []}
    with tempfile.TemporaryDirectory() as folder:

        def write_plain() -> None:
            plain = faiss.IndexFlatIP(dimension)
            plain.add(rows)
            faiss.write_index(plain, f"{folder}/plain")

        def write_table(where: str, ids: list[str] | None) -> None:
            with Index.create(where, dimension=dimension) as index:
                index.add_table(rows, ids)

        for turn in range(rounds):
            times["plain_s"].append(timed(write_plain)[0])
            times["table_s"].append(timed(lambda turn=turn: write_table(f"{folder}/{turn}", None))[0])  # type: ignore[misc]
            times["table_ids_s"].append(timed(lambda turn=turn: write_table(f"{folder}/{turn}i", own))[0])  # type: ignore[misc]
    return {name: float(np.median(spent)) for name, spent in times.items()}


def measure_publish(items: int, dimension: int) -> tuple[float, float]:
    """Return the seconds, by the clock and of the processor, of publishing a map at epsilon 4, f 0.1."""
    from nearveil.gallery import Index

    with (
        tempfile.TemporaryDirectory() as folder,
        Index.create(f"{folder}/index", dimension=dimension, extractor="bench") as index,
    ):
        index.add_table(clustered(items, dimension, 0))
        clock, processor = time.perf_counter(), time.process_time()
        index.publish(4.0, 0.1)
        return time.perf_counter() - clock, time.process_time() - processor


@contextmanager
def server(count: int) -> Iterator[list[str]]:
    """Start a durable PostgreSQL; yield the URLs of so many databases on it."""
    import psycopg

    from tests.ledger.postgres import Postgres

    class Durable(Postgres):
        """The tests' server does not wait for the disk; this one does."""

        def start(self) -> None:
            options = f"-h '' -k {self._folder} -c shared_buffers=1GB -c max_wal_size=4GB"
            self._call("pg_ctl", "-w", "-D", self._data, "-l", str(self._folder / "log"), "-o", options, "start")

    running = Durable()
    try:
        with psycopg.connect(running.url(), autocommit=True) as connection:
            for number in range(count):
                connection.execute(f"CREATE DATABASE bench{number}".encode())
        yield [running.url(f"bench{number}") for number in range(count)]
    finally:
        running.remove()


def run(cases: Sequence[tuple[int, int]], stores: Sequence[str], queries: int, threads: int) -> list[dict[str, Any]]:
    """Measure all cases on the stores."""
    from rich.progress import Progress

    records = []
    with tempfile.TemporaryDirectory() as folder, server(len(cases)) as urls, Progress(transient=True) as progress:
        task = progress.add_task("measuring", total=len(stores) * len(cases))
        for number, (n, dimension) in enumerate(cases):
            places = {"directory": f"{folder}/{number}", "PostgreSQL": urls[number]}
            for store, where in ((store, places[store]) for store in stores):
                progress.update(task, description=f"{store}, {n:,} x {dimension}")
                with PROCESSES.Pool(1) as pool:  # a process of its own: its memory is that of this case
                    records.append(pool.apply(measure, (store, where, n, dimension, queries, threads)))
                progress.advance(task)
    return records


def show(records: Sequence[dict[str, Any]]) -> None:
    """Print a table; ratios are to plain FAISS in the same process."""
    from rich.console import Console
    from rich.table import Table

    grid = Table(title=f"Index: k = {K}, one query at a time, medians; in brackets the ratio to plain FAISS")
    headings = ("store", "items x dims", "build, s", "open, s", "search, ms", "memory, MB", "disk, MB")  # fmt: skip
    for heading in headings:
        grid.add_column(heading, justify="left" if heading == "store" else "right", no_wrap=True)
    for r in records:
        grid.add_row(
            r["store"], f"{r['items']:,} x {r['dimension']}", f"{r['build_s']:.1f}", f"{r['open_s']:.2f}",
            f"{r['exact_ms']:.2f} ({r['exact_ms'] / r['plain_ms']:.2f})",
            f"{r['memory_mb']:.0f} ({r['memory_mb'] / r['plain_memory_mb']:.2f})", f"{r['disk_mb']:.0f}",
        )  # fmt: skip
    Console(width=170).print(grid)


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder for the JSON")
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1, help="of FAISS; PostgreSQL has its own workers")
    parser.add_argument("--stores", nargs="+", choices=STORES, default=STORES)
    parser.add_argument("--large", action="store_true", help="a million items, too: many minutes")
    parser.add_argument("--table", action="store_true", help="measure add_table alone, against writing plain FAISS")
    parser.add_argument("--publish", nargs=2, type=int, metavar=("ITEMS", "DIMENSION"), help="measure publish alone")
    options = parser.parse_args()
    if options.publish:
        clock, processor = measure_publish(*options.publish)
        print(f"{clock:.1f} s, {processor:.1f} s of the processor")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"peak memory {peak:.2f} GiB; load average {os.getloadavg()[0]:.1f}")
        return
    if options.table:
        found = measure_table()
        ratios = (found["table_s"] / found["plain_s"], found["table_ids_s"] / found["plain_s"])
        print(f"FAISS {found['plain_s']:.3f} s; add_table {ratios[0]:.1f} times that, with ids {ratios[1]:.1f} times")
        return
    cases = (*CASES, LARGE) if options.large else CASES
    records = run(cases, options.stores, options.queries, options.threads)
    show(records)
    options.out.mkdir(parents=True, exist_ok=True)
    kept = {"machine": platform.machine(), "processors": os.cpu_count(), "threads": options.threads, "records": records}
    (options.out / "index.json").write_text(json.dumps(kept, indent=1) + "\n")
    print(f"kept in {options.out / 'index.json'}")


if __name__ == "__main__":
    main()
