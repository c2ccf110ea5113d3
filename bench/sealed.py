"""Sealed search: what it finds, sends, keeps and computes, beside exact search.

Galleries are real features. ``glove`` are words of GloVe-100. The others are enlarged: ``photos`` mixes each image of
CUB-200 and Cars-196 with a near image of its class and adds a little noise (1,280 dimensions); ``digits`` turns, shifts
and scales MNIST's (784 pixels). Queries are images or words that were held out::

    python bench/sealed.py --data glove --items 299500
    python bench/sealed.py --data photos --items 1000000 --project 128 --queries 100
    python bench/sealed.py --data photos --items 100000 --shapes 256 128:540:60

A shape is the numbers of a code, cells and colours; by default those of the library. With ``--project`` features are
cut to their leading principal directions before they are enlarged. Every question is encrypted, with tokens of its own,
and records of 140 bytes are fetched and compared. Figures go to a JSON file; times are processor time.
"""

import argparse
import json
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from nearveil.sealed import SealedClient, SealedIndex

NEAREST = 10
SCORED = 40
RECORD_BYTES = 140
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


def load_words(folder: Path, count: int, n_queries: int) -> tuple[Iterator[Singles], Singles]:
    """Return blocks of words, and queries."""
    with np.load(folder / "glove100" / "glove100.npz") as stored:
        rows = unit(stored["vectors"])
    order = np.random.default_rng(5).permutation(len(rows))
    base, queries = rows[order[:count]], rows[order[count : count + n_queries]]
    return (base[start : start + _BLOCK] for start in range(0, count, _BLOCK)), queries


def make_gallery(
    data: str, count: int, n_queries: int, project: int | None
) -> tuple[NDArray[np.float16], Singles, NDArray[np.int64]]:
    """Return rows in 16 bits, queries, and the exact nearest of each query."""
    folder = Path(os.environ.get("NEARVEIL_DATA", "../shared/data"))
    if data == "glove":
        blocks, queries = load_words(folder, count, n_queries)
    elif data == "photos":
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


def measure_seconds(action: Callable[[], object], repeats: int = 3) -> float:
    """Return the least processor seconds of a few runs."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        action()
        times.append(time.process_time() - start)
    return min(times)


def measure_work(index: SealedIndex, client: SealedClient, row: Singles) -> dict[str, float]:
    """Return milliseconds of the steps of a question, on the client and on the server."""
    requests = [client.begin_pads() for _ in range(3)]
    tokens = [index.answer(request.data) for request in requests]
    pairs = iter(zip(requests, tokens, strict=True))
    report = {
        "client_begins_pads": measure_seconds(client.begin_pads),
        "server_token": measure_seconds(lambda: index.answer(requests[0].data)),
        "client_finishes_pads": measure_seconds(lambda: client.finish_pads(*next(pairs))),
    }
    question = client.ask(row)
    answer = index.answer(question.data)
    matches = client.read_scores(question, answer, 100)
    fetch = client.ask_records([match.position for match in matches])
    fetched = index.answer(fetch.data)
    report |= {
        "client_asks_scores": measure_seconds(lambda: client.ask(row), 1),
        "server_scores": measure_seconds(lambda: index.answer(question.data), 5),
        "client_reads_scores": measure_seconds(lambda: client.read_scores(question, answer, 100)),
        "client_asks_records": measure_seconds(lambda: client.ask_records([match.position for match in matches]), 1),
        "server_records": measure_seconds(lambda: index.answer(fetch.data), 5),
        "client_reads_records": measure_seconds(lambda: client.read_records(fetch, fetched)),
    }
    return {name: round(1e3 * seconds, 2) for name, seconds in report.items()}


def measure_bytes(index: SealedIndex, client: SealedClient, row: Singles) -> dict[str, int]:
    """Return what a client keeps and exchanges, and what a server holds."""
    request = client.begin_pads()
    token = index.answer(request.data)
    client.finish_pads(request, token)
    questions = [client.ask(row).data, client.ask_records([]).data]
    answers = [index.answer(question) for question in questions]
    report = {
        "kept_layout": len(index.layout.to_bytes()),
        "kept_tokens": len(index.get_public_tokens()),
        "sent_token_request": len(request.data),
        "received_token": len(token),
        "sent_scores": len(questions[0]),
        "received_scores": len(answers[0]),
        "sent_records": len(questions[1]),
        "received_records": len(answers[1]),
        "server_codes": index.nbytes,
        "server_records": index._kernels["records"]._database.nbytes,  # type: ignore[attr-defined]
        "server_tables": sum(tokens.tables.nbytes for tokens in index._tokens.values()),
        "server_hints": sum(hint.nbytes for tokens in index._tokens.values() for hint in tokens.hints),
    }
    parts = {name: sum(value for key, value in report.items() if key.startswith(name)) for name in ("kept", "sent")}
    received = sum(value for key, value in report.items() if key.startswith("received"))
    return report | {"kept": parts["kept"], "exchanged": parts["sent"] + received}


def measure_change(index: SealedIndex, row: Singles, record: bytes) -> dict[str, float]:
    """Return the seconds until an index with one item more answers, as a server makes it, and those of its parts."""
    clocks = {"clock": time.perf_counter, "processor": time.process_time}
    start = {name: now() for name, now in clocks.items()}
    changed = index.copy()
    position = changed.add(row[None], [record])[0]
    changed.prepare_tokens(2)
    client = SealedClient(changed.layout.to_bytes(), changed.get_public_tokens())
    seconds = {name: round(now() - start[name], 2) for name, now in clocks.items()}
    if position not in [match.position for match in client.search(row, changed.answer, 100)]:
        raise RuntimeError("the new item is not found")
    return seconds


def measure_recall(
    index: SealedIndex,
    client: SealedClient,
    gallery: NDArray[np.float16],
    queries: Singles,
    nearest: NDArray[np.int64],
    records: list[bytes],
) -> dict[str, float]:
    """Return which share of the nearest is probed, among the best scores, and found end to end; check all records."""
    layout, items = index.layout, index._items.ravel()
    cell_of = np.empty(int(items.max()) + 1, np.int64)
    cell_of[items[items >= 0]] = np.flatnonzero(items >= 0) // layout.n_slots
    sums = dict.fromkeys(("probed", "nearest_cells", f"scored_{SCORED}", "found"), 0.0)
    fetched = wrong = 0
    for query, true in zip(queries, nearest, strict=True):
        client.prepare(1, index.answer)
        question = client.ask(query)
        matches = client.read_scores(question, index.answer(question.data), 100)
        positions = [match.position for match in matches]
        fetch = client.ask_records(positions)
        contents = client.read_records(fetch, index.answer(fetch.data))
        fetched += len(contents)
        wrong += sum(record != records[items[place]] for record, place in zip(contents, fetch.positions, strict=True))
        chosen = np.array([int.from_bytes(record[:4], "little") % len(gallery) for record in contents])
        ranked = chosen[np.argsort(-(gallery[chosen].astype(np.float32) @ query), kind="stable")][:NEAREST]
        away = np.square(layout.centroids - query @ layout.projection).sum(axis=1)
        near = np.argsort(away)[: layout.n_colours]  # as many cells, whatever their colours
        sums["probed"] += np.isin(cell_of[true], np.array(question.positions) // layout.n_slots).mean()
        sums["nearest_cells"] += np.isin(cell_of[true], near).mean()
        sums[f"scored_{SCORED}"] += np.isin(true, items[positions[:SCORED]]).mean()
        sums["found"] += np.isin(true, ranked).mean()
    means = {name: total / len(queries) for name, total in sums.items()}
    return means | {"fetched": fetched / len(queries), "wrong_records": wrong}


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", choices=("photos", "digits", "glove"), default="photos")
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--shapes", nargs="+", default=[""], help="numbers of a code:cells:colours")
    parser.add_argument("--project", type=int)
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    options = parser.parse_args()
    data = make_gallery(options.data, options.items, options.queries, options.project)
    reports = [measure_shape(shape, *data) for shape in options.shapes]
    options.out.mkdir(parents=True, exist_ok=True)
    name = f"sealed-{options.data}-{options.items}.json"
    (options.out / name).write_text(json.dumps({"data": options.data, "shapes": reports}, indent=1) + "\n")


def measure_shape(
    shape: str, gallery: NDArray[np.float16], queries: Singles, nearest: NDArray[np.int64]
) -> dict[str, Any]:
    """Build an index of a shape, save and load it, and measure."""
    numbers = [int(number) for number in shape.split(":") if number]
    given: dict[str, Any] = dict(zip(("dimension", "n_cells", "n_colours"), numbers, strict=False))
    fillers = np.random.default_rng(6).bytes(len(gallery) * (RECORD_BYTES - 4))
    size = RECORD_BYTES - 4
    records = [n.to_bytes(4, "little") + fillers[n * size : (n + 1) * size] for n in range(len(gallery))]
    start = time.process_time()
    index = SealedIndex.build(gallery, records=records, **given)
    built = time.process_time()
    index.prepare_tokens()
    prepared = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        index.save(Path(folder) / "sealed")
        index = SealedIndex.load(Path(folder) / "sealed")
        client = SealedClient(index.layout.to_bytes(), index.get_public_tokens())
        layout = index.layout
        report: dict[str, Any] = {
            "items": len(gallery),
            "features": gallery.shape[1],
            "dimension": layout.dimension,
            "cells": len(layout.centroids),
            "colours": layout.n_colours,
            "slots": layout.n_slots,
            "rows": layout.n_colours * layout.n_slots,
            "records": repr(layout.records),
            "bytes": measure_bytes(index, client, queries[0]),
            "milliseconds": measure_work(index, client, queries[0]),
            "build_s": round(built - start, 1),
            "tokens_s": round(prepared - built, 1),
            "change_s": measure_change(index, queries[0], records[0]),
            "recall": measure_recall(index, client, gallery, queries, nearest, records),
            "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20),
        }
    print(json.dumps(report, indent=1), flush=True)
    return report


if __name__ == "__main__":
    main()
