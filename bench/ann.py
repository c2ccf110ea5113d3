"""Compare ways to search on a public benchmark: FAISS without privacy, a local copy, sealed queries, and messages.

Each way searches for the 10 nearest of the same queries, one at a time, in a process of its own. Ways of nearveil go
through ``nearveil.Client``: client and gallery share the process, so a rate is the work of both. "HTTP" is the time of
one question to a server on loopback, with the pauses that hide timing::

    python bench/ann.py --data digits
    python bench/ann.py --data glove-100-angular.hdf5
    python bench/ann.py --data sift_base.fvecs sift_query.fvecs sift_groundtruth.ivecs --metric euclidean
    python bench/ann.py --data base.10M.fbin query.public.10K.fbin groundtruth.public.10K.ibin --metric euclidean

Recall is the share of the 10 nearest; an item that ties with the tenth counts. Bytes are those of bodies: up and down
for each question, and once for the copy, layout or map that the client keeps. For FAISS they are those of a plain
request: the vector as float32, and ids of 8 and scores of 4 bytes. Memory is the growth of the process that searches,
with index, client, and libraries that are loaded meanwhile.
"""

import argparse
import json
import os
import platform
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent))
from ann_data import NAMES, DataError, K, load
from home import PROCESSES, timed
from index import resident

FAISS = ("flat", "ivf-pq", "hnsw")
WAYS = (*FAISS, "whole", "copy", "sealed", "messages")
EPSILONS = (2.0, 4.0, 8.0)
LEARNED_FOR = 4.0  # epsilon of the map that all messages are for
NO_LIMIT = 1 << 40  # bytes of a copy
COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "recall@10": lambda row: f"{row['recall']:.3f}",
    "queries/s": lambda row: (
        f"{row['queries_per_s']:,.0f}" if row["queries_per_s"] >= 10 else f"{row['queries_per_s']:.1f}"
    ),
    "of FAISS flat": lambda row: f"{row['rate_ratio']:.3g}" if "rate_ratio" in row else "",
    "HTTP, s": lambda row: f"{row['http_s']:.2f}" if "http_s" in row else "",
    "bytes up": lambda row: f"{row['bytes_up']:,.0f}",
    "bytes down": lambda row: f"{row['bytes_down']:,.0f}",
    "bytes kept": lambda row: f"{row['bytes_kept']:,.0f}",
    "build, s": lambda row: f"{row['build_s']:.1f}",
    "memory, MB": lambda row: f"{row['memory_mb']:,.0f}",
}
_BLOCK = 50_000
_CHUNK = 20  # questions between two signs of progress
_TRAINED = 39  # items for each centroid that FAISS wants
_FAISS_ITEM = 12  # bytes of an id and a score
_SAME = 1e-6  # a smaller relative difference of values is rounding

Singles = NDArray[np.float32]
Values = NDArray[np.float64]


def log(text: str) -> None:
    """Print a line with the time to standard error."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def read_blocks(rows: Any) -> Iterator[tuple[int, Singles]]:
    """Yield the first position and the rows of each block, as float32."""
    for start in range(0, len(rows), _BLOCK):
        yield start, np.ascontiguousarray(rows[start : start + _BLOCK], np.float32)


def normalize(rows: Singles, metric: str) -> Singles:
    """Divide rows by their norms, for the cosine only."""
    if metric != "cosine":
        return rows
    return np.asarray(rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30), np.float32)


def measure_items(queries: Singles, items: Any, ids: NDArray[np.int64], metric: str) -> Values:
    """Return the exact values of items, shape (q, k), by their ids: larger is nearer, -inf for the id -1."""
    values = np.full(ids.shape, -np.inf)
    for row, (query, chosen) in enumerate(zip(queries.astype(np.float64), ids, strict=True)):
        present = chosen >= 0
        rows = np.asarray(items[chosen[present]], np.float64)
        if metric == "euclidean":
            values[row, present] = -np.linalg.norm(rows - query, axis=1)
        else:
            norms = np.linalg.norm(rows, axis=1) * np.linalg.norm(query) if metric == "cosine" else 1.0
            values[row, present] = rows @ query / norms
    return values


def find_limits(queries: Singles, items: Any, neighbors: NDArray[np.int64] | None, metric: str) -> Values:
    """Return the exact value of each query's tenth nearest item; found by FAISS flat unless neighbours are given."""
    import faiss

    if neighbors is None:
        is_distance = metric == "euclidean"
        kind = faiss.METRIC_L2 if is_distance else faiss.METRIC_INNER_PRODUCT
        rows = normalize(queries, metric)
        best = np.full((len(rows), K), np.inf if is_distance else -np.inf, np.float32)
        neighbors = np.full((len(rows), K), -1, np.int64)
        for start, block in read_blocks(items):
            scores, nearest = faiss.knn(rows, normalize(block, metric), min(K, len(block)), metric=kind)
            both, ids = np.concatenate([best, scores], axis=1), np.concatenate([neighbors, nearest + start], axis=1)
            order = np.argsort(both if is_distance else -both, axis=1, kind="stable")[:, :K]
            best, neighbors = np.take_along_axis(both, order, axis=1), np.take_along_axis(ids, order, axis=1)
    return np.asarray(measure_items(queries, items, neighbors, metric).min(axis=1))


def measure_recall(values: Values, limits: Values) -> float:
    """Return the share of the ten nearest among answers with these values; items that tie with the tenth count."""
    least = limits - _SAME * (1 + np.abs(limits))
    return float((values >= least[:, None]).sum(axis=1).clip(max=K).mean() / K)


def make_faiss(way: str, dimension: int, count: int, metric: str) -> Any:
    """Return an empty index of FAISS."""
    import faiss

    kind = faiss.METRIC_L2 if metric == "euclidean" else faiss.METRIC_INNER_PRODUCT
    if way == "flat":
        return faiss.IndexFlat(dimension, kind)
    if way == "hnsw":
        graph = faiss.IndexHNSWFlat(dimension, 32, kind)
        graph.hnsw.efConstruction, graph.hnsw.efSearch = 100, 128
        return graph
    lists = max(1, min(int(4 * count**0.5), count // _TRAINED))
    parts = max(part for part in range(1, min(max(dimension // 2, 1), 64) + 1) if dimension % part == 0)
    bits = min(8, max(1, int(np.log2(count / _TRAINED))))
    # The random rotation costs little, and k-means cannot fail for want of different values, as of black pixels.
    index = faiss.index_factory(dimension, f"RR{dimension},IVF{lists},PQ{parts}x{bits}", kind)
    inner: Any = faiss.downcast_index(faiss.extract_index_ivf(index))
    inner.nprobe = max(1, lists // 16)
    inner.do_polysemous_training = False  # takes minutes, for filters that are not used
    return index


def search_faiss(folder: Path, way: str, metric: str) -> tuple[dict[str, float], NDArray[np.int64]]:
    """Build and search an index of FAISS, with one thread; return figures, and ids."""
    import faiss

    faiss.omp_set_num_threads(1)
    queries = normalize(np.load(folder / "queries.npy"), metric)
    before = resident()
    began = time.perf_counter()
    items = np.load(folder / "items.npy", mmap_mode="r")
    index = make_faiss(way, items.shape[1], len(items), metric)
    if not index.is_trained:
        count = 64 * max(faiss.extract_index_ivf(index).nlist, 256)
        sample = np.sort(np.random.default_rng(0).permutation(len(items))[:count])
        index.train(normalize(items[sample], metric))
    for start, block in read_blocks(items):
        log(f"{way}: adding items, {start / len(items):.0%}")
        index.add(normalize(block, metric))
    del items
    build = time.perf_counter() - began
    index.search(queries[:1], K)
    seconds, answers = timed(lambda: [index.search(query[None], K)[1][0] for query in queries])
    return {
        "queries_per_s": len(queries) / seconds, "bytes_up": 4.0 * queries.shape[1], "bytes_down": _FAISS_ITEM * K,
        "bytes_kept": 0.0, "build_s": build, "memory_mb": resident() - before,
    }, np.stack(answers)  # fmt: skip


def build_index(folder: Path, metric: Any, candidates: float, *, whole: bool) -> dict[str, float]:
    """Index and publish the items, as an operator does; with whole features, the map plays no part and is small."""
    from nearveil.cli._output import show_bars
    from nearveil.gallery import Index

    items = np.load(folder / "items.npy", mmap_mode="r")
    place = folder / ("whole" if whole else "index")
    began = time.perf_counter()
    with show_bars() as bars, Index.create(place, dimension=items.shape[1], metric=metric) as index:
        tick = bars("adding items", len(items))
        for _, block in read_blocks(items):
            index.add_table(block)
            tick(len(block))
        if whole:
            published = index.publish(4.0, 0.5, n_sets=2, reach=0.0, code_bytes=None, progress=bars)
        else:
            published = index.publish(LEARNED_FOR, candidates, progress=bars)
    from studies._timing import measure_peak_gib

    return {
        "build_s": time.perf_counter() - began, "build_peak_gib": measure_peak_gib(),
        "code_bytes": published.table.width, "code_recall": published.code_recall or 0.0,
        "sets": published.map.n_sets, "reach": published.reach,
    }  # fmt: skip


@contextmanager
def serve(gallery: Any, folder: Path) -> Iterator[tuple[str, str]]:
    """Serve a gallery on loopback by a thread; yield its address and a token."""
    import uvicorn

    from nearveil.server import Settings, TokenStore, create_app

    with TokenStore(folder / "tokens.db") as tokens, socket.create_server(("127.0.0.1", 0)) as listening:
        settings = Settings(tokens=str(folder / "tokens.db"), rate=None, log_file=folder / "log")
        server = uvicorn.Server(uvicorn.Config(create_app([gallery], tokens, settings), log_config=None))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}", tokens.create(folder.name)[1]
        finally:
            server.should_exit = True
            thread.join()


def search_client(
    folder: Path, way: str, epsilon: float | None, n_http: int
) -> tuple[dict[str, float], NDArray[np.int64]]:
    """Ask all queries through a client; return figures, and ids."""
    import warnings

    from nearveil import Client
    from nearveil.gallery import Index
    from nearveil.ledger import Ledger
    from nearveil.server import OpenGallery

    queries = np.load(folder / "queries.npy")
    offers: Any = {"whole": ("codes",), "copy": ("codes",), "sealed": ("sealed",), "messages": ()}[way]
    before = resident()
    with (
        tempfile.TemporaryDirectory() as name,
        Index.open(folder / ("whole" if way == "whole" else "index")) as index,
        Ledger(Path(name) / "ledger.db") as ledger,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # the account pays for all queries: its sum guarantees nothing about one
        account = ledger.open_account(
            "bench", owner="bench", protects="query", unit="row", relation="replace", epsilon=1e6, delta=0.0
        )
        gallery = OpenGallery(index, "bench", offers=offers)
        seconds, _ = timed(partial(gallery.prepare, None))  # the sealed index, if it is offered
        options: dict[str, Any] = {"account": account, "home": Path(name) / "home"}
        with Client(gallery, **options) as client:
            if "codes" in offers:
                figures, ids = search_copy(client.sync(most=NO_LIMIT), queries, way)
            else:
                figures, ids = ask_queries(client, queries, way, epsilon)
        figures |= {"build_s": seconds, "memory_mb": resident() - before}
        if n_http:
            with serve(gallery, Path(name)) as (address, token), Client(address, token, **options) as client:
                if "codes" in offers:
                    client.sync(most=NO_LIMIT)
                figures["http_s"] = ask_server(client, queries[: n_http + 1], epsilon)
        return figures, ids


def search_copy(copy: Any, queries: Singles, way: str) -> tuple[dict[str, float], NDArray[np.int64]]:
    """Search the client's copy itself: a client of a gallery in its process would update it before each question."""
    log(f"{way}: searching")
    loaded = copy.load()
    loaded.search(queries[:1], K)
    seconds, answers = timed(lambda: [loaded.search(query[None], K)[0][0] for query in queries])
    size = sum(path.stat().st_size for path in copy.folder.iterdir())
    figures = {"queries_per_s": len(queries) / seconds, "bytes_up": 0.0, "bytes_down": 0.0, "bytes_kept": float(size)}
    return figures, np.stack(answers).astype(np.int64)


def ask_queries(
    client: Any, queries: Singles, way: str, epsilon: float | None
) -> tuple[dict[str, float], NDArray[np.int64]]:
    """Ask; the first question is repeated, because it also fetches what the client keeps."""
    (first,) = client.nearest_many(queries[:1], K, epsilon)
    results, seconds = [], 0.0
    for start in range(0, len(queries), _CHUNK):
        taken, answers = timed(partial(client.nearest_many, queries[start : start + _CHUNK], K, epsilon))
        results += answers
        seconds += taken
        if start // _CHUNK % 5 == 0:
            log(f"{way}: {len(results)} of {len(queries)} queries, {len(results) / seconds:.1f} a second")
    ids = np.full((len(queries), K), -1, np.int64)
    for row, result in enumerate(results):
        numbers = list(dict.fromkeys(match.id for match in result.matches))
        ids[row, : len(numbers)] = numbers
    down = statistics.median(result.bytes_received for result in results)
    return {
        "queries_per_s": len(queries) / seconds, "bytes_up": statistics.median(result.bytes_sent for result in results),
        "bytes_down": down, "bytes_kept": first.bytes_received - down,
    }, ids  # fmt: skip


def ask_server(client: Any, queries: Singles, epsilon: float | None) -> float:
    """Return the median seconds of a question to a server; the first fetches what the client keeps."""
    client.nearest(queries[0], K, epsilon)
    return statistics.median(timed(partial(client.nearest, query, K, epsilon))[0] for query in queries[1:])


def run_apart(work: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Return the result of work in a process of its own, whose memory is its own."""
    with ProcessPoolExecutor(1, mp_context=PROCESSES) as pool:
        return pool.submit(work, *arguments, **options).result()


def list_rows(only: Sequence[str]) -> list[tuple[str, str, float | None]]:
    """Return label, way and epsilon of each row of the table."""
    labels = {
        "flat": "FAISS flat", "ivf-pq": "FAISS IVF-PQ", "hnsw": "FAISS HNSW", "whole": "local copy, whole features",
        "copy": "local copy, codes", "sealed": "sealed",
    }  # fmt: skip
    rows: list[tuple[str, str, float | None]] = [(labels[way], way, None) for way in WAYS[:-1] if way in only]
    if "messages" in only:
        rows += [(f"message, epsilon {epsilon:g}", "messages", epsilon) for epsilon in EPSILONS]
    return rows


def run(benchmark: Any, only: Sequence[str], candidates: float, n_http: int) -> dict[str, Any]:
    """Measure the ways on a benchmark."""
    metric, items = benchmark.metric, benchmark.items
    queries = np.ascontiguousarray(benchmark.queries, np.float32)
    log(f"{benchmark.name}: {len(items):,} items x {items.shape[1]}, {metric}, {len(queries)} queries")
    records: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stored = np.lib.format.open_memmap(folder / "items.npy", "w+", np.float32, items.shape)
        for start, block in read_blocks(items):
            stored[start : start + len(block)] = block
        stored.flush()
        np.save(folder / "queries.npy", queries)
        source = "computed by FAISS flat" if benchmark.neighbors is None else "of the file"
        log(f"nearest neighbours: {source}")
        limits = find_limits(queries, stored, benchmark.neighbors, metric)
        indexes: dict[bool, dict[str, float]] = {}
        for label, way, epsilon in list_rows(only):
            whole = way == "whole"
            if way not in FAISS and whole not in indexes:
                log(f"{label}: building the index")
                indexes[whole] = run_apart(build_index, folder, metric, candidates, whole=whole)
            log(f"{label}: starting")
            if way in FAISS:
                figures, ids = run_apart(search_faiss, folder, way, metric)
            else:
                figures, ids = run_apart(search_client, folder, way, epsilon, n_http)
                figures["build_s"] += indexes[whole]["build_s"]
            recall = measure_recall(measure_items(queries, stored, ids, metric), limits)
            records.append({"way": label, "recall": recall, **figures})
            log(f"{label}: recall {recall:.3f}")
    rates = {record["way"]: record["queries_per_s"] for record in records}
    for record in records:
        if "FAISS flat" in rates:
            record["rate_ratio"] = record["queries_per_s"] / rates["FAISS flat"]
    return {
        "data": benchmark.name, "metric": metric, "items": len(items), "dimension": items.shape[1],
        "queries": len(queries), "k": K, "neighbors": source, "candidates": candidates,
        "machine": platform.machine(), "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1),
        "index": indexes.get(False), "ways": records,
    }  # fmt: skip


def format_table(report: dict[str, Any]) -> str:
    """Return a table in Markdown."""
    cells = [["", *COLUMNS]]
    cells += [[record["way"], *(show(record) for show in COLUMNS.values())] for record in report["ways"]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = []
    for row in cells:
        label, *figures = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append(f"| {' | '.join([label, *(cell.strip().rjust(len(cell)) for cell in figures)])} |")
    lines.insert(1, "|" + "|".join("---:" if column else "---" for column in range(len(cells[0]))) + "|")
    return "\n".join(lines)


def draw(reports: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw recall over the bytes of a question; a line leads to the bytes of a first question, with what is kept."""
    from matplotlib.figure import Figure

    columns = min(2, len(reports))
    rows = -(-len(reports) // columns)
    figure = Figure(figsize=(6 * columns, 4.2 * rows), layout="constrained", dpi=90)
    markers = "osD^vP*Xh"
    for number, report in enumerate(reports):
        axes = figure.add_subplot(rows, columns, number + 1)
        for order, record in enumerate(report["ways"]):
            question = record["bytes_up"] + record["bytes_down"]
            first = question + record["bytes_kept"]
            (line,) = axes.plot([question, first], [record["recall"]] * 2, linewidth=1, alpha=0.6)
            style: dict[str, Any] = {
                "color": line.get_color(),
                "markersize": 13 - order,
                "fillstyle": "none",
                "linestyle": "",
            }
            axes.plot(question, record["recall"], markers[order % len(markers)], label=record["way"], **style)
        axes.set_xscale("symlog", linthresh=100)
        axes.set_xlim(-10, None)
        axes.set_ylim(0, 1.03)
        axes.set_title(
            f"{report['data']}: {report['items']:,} x {report['dimension']}, {report['metric']}", fontsize=10
        )
        axes.set_xlabel("bytes of a question, up and down; line: with what is kept")
        axes.set_ylabel("recall@10")
        axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(path)


def main() -> None:
    """Measure, print a table, and write JSON and a picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", metavar="FILE", help=f"files, or one of {', '.join(NAMES)}")
    parser.add_argument("--items", type=int, help="only the first so many items")
    parser.add_argument("--queries", type=int, default=500)
    parser.add_argument("--metric", choices=("cosine", "dot", "euclidean"), help="where a file does not state it")
    parser.add_argument("--only", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--candidates", type=float, default=0.1, help="part of the items in the answer to a message")
    parser.add_argument("--http", type=int, default=10, help="questions to a server on loopback, for each way")
    parser.add_argument("--draw", nargs="+", type=Path, metavar="JSON", help="only draw earlier results together")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.draw:
        draw([json.loads(path.read_text()) for path in options.draw], options.out / "ann.png")
        return
    if not options.data:
        parser.error("--data is required: a file, or one of " + ", ".join(NAMES))
    log(f"reading {options.data[0]}")
    try:
        benchmark = load(options.data, options.items, options.queries, options.metric)
    except DataError as error:
        parser.error(str(error))
    except FileNotFoundError as error:
        print(f"skipped: {error}")
        return
    report = run(benchmark, options.only, options.candidates, options.http)
    print(format_table(report))
    (options.out / f"ann-{benchmark.name}.json").write_text(json.dumps(report, indent=1) + "\n")
    draw([report], options.out / f"ann-{benchmark.name}.png")
    log(f"written: {options.out}/ann-{benchmark.name}.json and .png")


if __name__ == "__main__":
    main()
