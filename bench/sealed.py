"""Sealed search: what it finds, sends, keeps and computes, beside exact search and the rate of memory.

Galleries are real features, enlarged: ``photos`` mixes each image of CUB-200 and Cars-196 with a near image of its
class and adds a little noise (1,280 dimensions); ``digits`` turns, shifts and scales MNIST's (784 pixels). Queries are
images that were held out::

    python bench/sealed.py --data photos --items 1000000 --shapes 64 128:1554:21 192:1036:14 256:780:10
    python bench/sealed.py --data photos --items 10000000 --project 64 --queries 100 --served

A shape is the numbers of a code, cells and colours. With ``--project`` features are cut to their leading principal
directions before they are enlarged, so that ten million fit into memory. With ``--served`` records hold the features,
and questions are asked of a server process, too. Figures go to a JSON file. Time is told as a
ratio to reading memory in the same run.
"""

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from nearveil.sealed import SealedClient, SealedIndex

NEAREST = 8
FETCHED = (16, 32, 64, 128)
_BLOCK = 20_000
_NOISE = 0.05  # of a mixed feature's length

Singles = NDArray[np.float32]


def unit(rows: NDArray[Any]) -> Singles:
    """Return rows of length 1."""
    values = np.asarray(rows, dtype=np.float32)
    return np.asarray(values / np.linalg.norm(values, axis=1, keepdims=True), dtype=np.float32)


def load_photos(folder: Path, n_queries: int) -> tuple[Singles, NDArray[np.int64], Singles]:
    """Return features and classes of what is enlarged, and queries."""
    features, labels = [], []
    for shift, name in ((0, "cub200_cropped_lite0"), (1000, "cars196_cropped_lite0")):
        with np.load(next((folder / name).glob("*.npz"))) as stored:
            features.append(stored["features"].astype(np.float32))
            labels.append(stored["labels"].astype(np.int64) + shift)
    rows, classes = np.concatenate(features), np.concatenate(labels)
    rows = unit(rows - rows.mean(axis=0))
    order = np.random.default_rng(1).permutation(len(rows))
    return rows[order[n_queries:]], classes[order[n_queries:]], rows[order[:n_queries]]


def enlarge_photos(rows: Singles, classes: NDArray[np.int64], count: int) -> Iterator[Singles]:
    """Yield blocks of features: real ones first, then mixtures of two near ones of a class, with a little noise."""
    rng = np.random.default_rng(2)
    near = np.empty((len(rows), 10), np.int64)
    for one in np.unique(classes):
        own = np.flatnonzero(classes == one)
        ranked = np.argsort(-(rows[own] @ rows[own].T), axis=1)[:, 1:11]
        near[own] = own[np.resize(ranked, (len(own), 10)) if ranked.shape[1] < 10 else ranked]
    for start in range(0, count, _BLOCK):
        size = min(_BLOCK, count - start)
        which = np.arange(start, start + size) % len(rows)
        first, second = rows[which], rows[near[which, rng.integers(0, 10, size)]]
        share = rng.uniform(0.5, 1, (size, 1)).astype(np.float32)
        noise = rng.normal(size=first.shape).astype(np.float32) * np.float32(_NOISE / np.sqrt(first.shape[1]))
        made = unit(share * first + (1 - share) * second + noise)
        real = np.arange(start, start + size) < len(rows)
        made[real] = first[real]
        yield made


def load_digits(folder: Path, n_queries: int) -> tuple[Singles, Singles]:
    """Return pictures to be deformed, and queries."""
    with np.load(next((folder / "mnist").glob("*.npz"))) as stored:
        train, test = stored["x_train"], stored["x_test"]
    return np.asarray(train, np.float32).reshape(-1, 28, 28), np.asarray(test[:n_queries], np.float32).reshape(-1, 784)


def enlarge_digits(pictures: Singles, count: int) -> Iterator[Singles]:
    """Yield blocks of pictures, turned by up to 12 degrees, shifted by up to 2 pixels, scaled by up to a tenth."""
    import torch

    rng = np.random.default_rng(3)
    for start in range(0, count, _BLOCK):
        size = min(_BLOCK, count - start)
        angle, scale = rng.uniform(-0.21, 0.21, size), rng.uniform(0.9, 1.1, size)
        moves = np.empty((size, 2, 3), np.float32)
        moves[:, 0, 0], moves[:, 0, 1] = scale * np.cos(angle), -scale * np.sin(angle)
        moves[:, 1, 0], moves[:, 1, 1] = scale * np.sin(angle), scale * np.cos(angle)
        moves[:, :, 2] = rng.uniform(-2 / 14, 2 / 14, (size, 2))
        chosen = torch.from_numpy(pictures[np.arange(start, start + size) % len(pictures)])[:, None]
        grid = torch.nn.functional.affine_grid(torch.from_numpy(moves), list(chosen.shape), align_corners=False)
        made = torch.nn.functional.grid_sample(chosen, grid, align_corners=False).numpy()
        yield unit(made.reshape(size, -1))


def make_gallery(
    data: str, count: int, n_queries: int, project: int | None
) -> tuple[NDArray[np.float16], Singles, NDArray[np.int64]]:
    """Return rows in 16 bits, queries, and the exact nearest of each query."""
    folder = Path(os.environ.get("NEARVEIL_DATA", "../shared/data"))
    if data == "photos":
        rows, classes, queries = load_photos(folder, n_queries)
        if project is not None:
            directions = np.linalg.eigh(rows.T @ rows)[1][:, ::-1][:, :project]
            rows, queries = unit(rows @ directions), unit(queries @ directions)
        blocks = enlarge_photos(rows, classes, count)
    else:
        pictures, queries = load_digits(folder, n_queries)
        queries, blocks = unit(queries), enlarge_digits(pictures, count)
    gallery = np.empty((count, queries.shape[1]), np.float16)
    best, at = np.full((len(queries), NEAREST), -np.inf, np.float32), 0
    nearest = np.zeros((len(queries), NEAREST), np.int64)
    for block in blocks:
        gallery[at : at + len(block)] = block
        scores, found = faiss.knn(queries, block, NEAREST, metric=faiss.METRIC_INNER_PRODUCT)
        both, ids = np.concatenate([best, scores], axis=1), np.concatenate([nearest, found + at], axis=1)
        order = np.argsort(-both, axis=1)[:, :NEAREST]
        best, nearest = np.take_along_axis(both, order, axis=1), np.take_along_axis(ids, order, axis=1)
        at += len(block)
    return gallery, queries, nearest


def take_time(action: Callable[[], object], repeats: int) -> float:
    """Return the least seconds of a few runs."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)


def measure_rates(index: SealedIndex, client: SealedClient, row: Singles, repeats: int) -> dict[str, float]:
    """Return how fast a pass is beside reading as many bytes of memory by two threads, runs of both in turn."""
    from concurrent.futures import ThreadPoolExecutor

    words = index._database.reshape(-1).view(np.int64)
    halves = np.array_split(words, 2)
    question = client.ask(row)
    _, asked = index.check_question(question.data)
    kernel = index._kernels["scores"]
    batch = np.repeat(asked, 32, axis=0)
    kernel.multiply(asked), kernel.multiply(batch)
    read, one, many = [], [], []
    with ThreadPoolExecutor(2) as pool:
        for _ in range(repeats):
            read.append(take_time(lambda: list(pool.map(np.bitwise_or.reduce, halves)), 1))
            one.append(take_time(lambda: kernel.multiply(asked), 1))
            many.append(take_time(lambda: kernel.multiply(batch), 1))
    return {
        "memory_bytes_per_s": words.nbytes / min(read),
        "pass_bytes_per_s": index.nbytes / min(one),
        "pass_ms": 1e3 * min(one),
        "ratio_to_memory": (index.nbytes / min(one)) / (words.nbytes / min(read)),
        "batch_of_32_ms": 1e3 * min(many),
        "questions_per_s": 32 / min(many),
        "ask_ms": 1e3 * take_time(lambda: client.ask(row), 5),
        "read_ms": 1e3 * take_time(lambda: client.read_scores(question, index.answer(question.data)), 3)
        - 1e3 * take_time(lambda: index.answer(question.data), 3),
    }


def measure_recall(
    index: SealedIndex, client: SealedClient, gallery: NDArray[np.float16], queries: Singles, nearest: NDArray[np.int64]
) -> dict[str, float]:
    """Return which part of the nearest is found: by codes, and end to end by the best that are ranked at home."""
    layout = index.layout
    items = index._items.ravel()
    shape = (layout.n_colours, layout.n_slots, layout.cells_per_colour, layout.dimension)
    filled = np.flatnonzero(items >= 0)
    codes = np.ascontiguousarray(index._database.reshape(shape).transpose(0, 2, 1, 3)).reshape(-1, layout.dimension)
    projected = queries @ layout.projection
    exact = np.full((len(queries), 4 * NEAREST), -1, np.int64)
    best = np.full((len(queries), 4 * NEAREST), -np.inf, np.float32)
    for start in range(0, len(filled), 1 << 17):
        some = filled[start : start + (1 << 17)]
        scores, found = faiss.knn(
            projected, codes[some].astype(np.float32), 4 * NEAREST, metric=faiss.METRIC_INNER_PRODUCT
        )
        both, ids = np.concatenate([best, scores], axis=1), np.concatenate([exact, some[found]], axis=1)
        order = np.argsort(-both, axis=1)[:, : 4 * NEAREST]
        best, exact = np.take_along_axis(both, order, axis=1), np.take_along_axis(ids, order, axis=1)
    kinds = ("codes", "codes_in_16", "probed", "nearest_cells", "codes_alone_32", "codes_of_cells_32")
    sums = dict.fromkeys(kinds, 0.0)
    sums |= {f"end_to_end_{count}": 0.0 for count in FETCHED}
    for query, own, true, by_code in zip(queries, projected, nearest, exact, strict=True):
        question = client.ask(query)
        positions = [
            match.position for match in client.read_scores(question, index.answer(question.data), max(FETCHED))
        ]
        cells = np.array(question.positions) // layout.n_slots
        wanted = set(by_code[:NEAREST].tolist())
        sums["codes"] += len(wanted & set(positions[:NEAREST])) / NEAREST
        sums["codes_in_16"] += len(wanted & set(positions[: 2 * NEAREST])) / NEAREST
        sums["probed"] += np.isin(by_code[:NEAREST] // layout.n_slots, cells).mean()
        away = np.square(layout.centroids - own).sum(axis=1)  # as many cells, whatever their colours
        near = np.argsort(away)[: layout.n_colours]
        sums["nearest_cells"] += np.isin(by_code[:NEAREST] // layout.n_slots, near).mean()
        tried = [(f"end_to_end_{count}", positions[:count]) for count in FETCHED]
        looked = (cells[:, None] * layout.n_slots + np.arange(layout.n_slots)).ravel()
        looked = looked[items[looked] >= 0]
        clear = looked[np.argsort(-(codes[looked].astype(np.float32) @ own))[: 4 * NEAREST]]
        tried += [("codes_alone_32", by_code.tolist()), ("codes_of_cells_32", clear.tolist())]
        for name, listed in tried:
            chosen = items[listed]
            ranked = chosen[np.argsort(-(gallery[chosen].astype(np.float32) @ query))][:NEAREST]
            sums[name] += len(set(ranked.tolist()) & set(true.tolist())) / NEAREST
    return {name: total / len(queries) for name, total in sums.items()}


def ask_served(
    place: Path, gallery: NDArray[np.float16], queries: Singles, nearest: NDArray[np.int64]
) -> dict[str, Any]:
    """Serve an index by a process of its own, and ask it; records are ranked as a client does."""
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from sealed_http import ask_server, run_server

    with run_server(partial(SealedIndex.load, place), gallery.shape[1]) as (address, token):
        report, answers = ask_server(address, token, queries)
    found = 0.0
    for query, records, true in zip(queries, answers, nearest, strict=True):
        rows = np.array([np.frombuffer(record, np.float16) for record in records if len(record)], np.float32)
        best = rows[np.argsort(-(rows @ query))[:NEAREST]] @ query
        least = (gallery[true].astype(np.float32) @ query).min()
        found += np.count_nonzero(best >= least - 1e-6) / NEAREST
    return {**report, "found": found / len(queries)}


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", choices=("photos", "digits"), default="photos")
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--shapes", nargs="+", default=["64"], help="numbers of a code:cells:colours")
    parser.add_argument("--project", type=int)
    parser.add_argument("--served", action="store_true")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    given = parser.parse_args()
    gallery, queries, nearest = make_gallery(given.data, given.items, given.queries, given.project)
    reports = [measure_shape(shape, gallery, queries, nearest, given) for shape in given.shapes]
    given.out.mkdir(parents=True, exist_ok=True)
    name = f"sealed-{given.data}-{given.items}.json"
    (given.out / name).write_text(json.dumps({"data": given.data, "shapes": reports}, indent=1) + "\n")


def measure_shape(
    shape: str, gallery: NDArray[np.float16], queries: Singles, nearest: NDArray[np.int64], options: argparse.Namespace
) -> dict[str, Any]:
    """Build an index of a shape, save and load it, and measure."""
    given: dict[str, Any] = dict(zip(("dimension", "n_cells", "n_colours"), map(int, shape.split(":")), strict=False))
    start = time.perf_counter()
    records = [row.tobytes() for row in gallery] if options.served else None
    index = SealedIndex.build(gallery, records=records, n_jobs=2, **given)
    del records
    built = time.perf_counter() - start
    with tempfile.TemporaryDirectory() as folder:
        index.save(Path(folder) / "sealed")
        loading = take_time(lambda: SealedIndex.load(Path(folder) / "sealed"), 1)
        index = SealedIndex.load(Path(folder) / "sealed")
        hints = index.get_hints()
        client = SealedClient(index.layout.to_bytes(), hints)
        layout = index.layout
        report: dict[str, Any] = {
            "items": len(gallery),
            "dimension": layout.dimension,
            "cells": len(layout.centroids),
            "colours": layout.n_colours,
            "slots": layout.n_slots,
            "question_bytes": len(client.ask(queries[0]).data),
            "answer_bytes": len(index.answer(client.ask(queries[0]).data)),
            "hint_bytes": len(hints[0]),
            "layout_bytes": len(layout.to_bytes()),
            "codes_bytes": len(gallery) * layout.dimension,
            "build_s": built,
            "load_s": loading,
            **measure_rates(index, client, queries[0], options.repeats),
            "recall": measure_recall(index, client, gallery, queries, nearest),
            "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20),
        }
        if options.served:
            report["served"] = ask_served(Path(folder) / "sealed", gallery, queries, nearest)
    print(json.dumps(report, indent=1), flush=True)
    return report


if __name__ == "__main__":
    main()
