"""Compare the work of every private step of a client with its period, at usual sizes and at the largest accepted ones.

A step that takes longer than its period ends after two: an observer sees that. The table prints the slowest of some
runs and its share of the period. Data: random numbers, because the work depends on sizes alone.

    OMP_NUM_THREADS=1 python bench/private_steps.py --out out/bench

Work is processor time, so that other programs do not count.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nearveil.client.sealed import sealed_periods
from nearveil.client.timing import VECTOR_PERIOD, choice_period, question_period
from nearveil.gallery.answers import Answer
from nearveil.gallery.codes import Codes, ProductCodes, WholeCodes
from nearveil.mechanisms import PublicMap
from nearveil.metrics import ScoreSpace
from nearveil.privacy.checks import normalize_rows
from nearveil.privacy.noise import secure_source
from nearveil.sealed.client import choose_best, make_messages
from nearveil.sealed.layout import Layout
from nearveil.sealed.lwe import add_messages
from nearveil.sealed.records import find_buckets, match_buckets, place_records
from nearveil.sealed.sizes import RecordLayout
from nearveil.wire.client import ClientProtocol, encode_queries, find_share, rank_answer
from nearveil.wire.messages import PublicPart

_RUNS = 5
_RNG = np.random.default_rng(0)


def make_product(n_features: int, columns: int) -> ProductCodes:
    """Return product codes with random tables."""
    centroids = _RNG.normal(size=(columns // 4, 256, 4)).astype(np.float32)
    ones = np.ones(columns, np.float32)
    projection = _RNG.normal(size=(n_features, columns)).astype(np.float32)
    return ProductCodes(projection, ones, 0 * ones, centroids)


def make_public(n_features: int, n_prototypes: int, n_sets: int, set_size: int, table: Codes) -> PublicPart:
    """Return a public part with random tables."""
    held = PublicMap(
        _RNG.normal(size=(n_features, 64)).astype(np.float16),
        _RNG.integers(-127, 128, (n_prototypes, 64)).astype(np.int8),
        _RNG.integers(0, 256, (n_prototypes, n_sets)).astype(np.uint8),
        10 * set_size,
        set_size,
    )
    return PublicPart(
        "g", 1, "covers", 4.0, 0.1, "0" * 32, "x", "x", ScoreSpace("cosine", np.zeros(n_features)), held, table
    )


def time_slowest(work: Callable[[], object]) -> float:
    """Return the seconds of the slowest run after the first."""
    work()
    seconds = []
    for _ in range(_RUNS):
        start = time.thread_time()
        work()
        seconds.append(time.thread_time() - start)
    return max(seconds)


def measure_message(size: str, public: PublicPart) -> Iterator[dict[str, Any]]:
    """Yield the steps of a question by message; the debit is left out."""
    row, client, count = _RNG.normal(size=public.dimension), ClientProtocol(public, 4.0), public.map.set_size
    codes = _RNG.integers(0, 100, (count, public.table.width)).astype(np.uint8)
    answer = Answer(np.arange(count, dtype=np.uint32), codes)

    def choose() -> None:
        _, _, queries, directions = encode_queries(public, row)
        public.map.choose(directions)
        rank_answer(public.table, queries, answer, 8)
        find_share(public, directions, 0)

    def make_message() -> None:
        client._make_message(encode_queries(public, row), secure_source(), None)

    with np.errstate(all="ignore"):
        yield describe("message: question", size, time_slowest(make_message), question_period(public))
        yield describe("message: choice", size, time_slowest(choose), choice_period(public))
        asked, chosen = (period(public, questions=2) - period(public) for period in (question_period, choice_period))
        yield describe("message: next question", size, time_slowest(make_message), asked)
        yield describe("message: next choice", size, time_slowest(choose), chosen)


def measure_sealed(size: str, layout: Layout, public: PublicPart) -> Iterator[dict[str, Any]]:
    """Yield the steps of a sealed question that depend on the layout and on the table."""
    row, periods = _RNG.normal(size=public.dimension), sealed_periods(layout, public)
    n_fetched = 0 if layout.records is None else layout.records.n_buckets
    codes = _RNG.integers(0, 100, (n_fetched, public.table.width)).astype(np.uint8)
    question = time_slowest(lambda: make_messages(layout, encode_queries(public, row).queries[0]))
    yield describe("sealed: question", size, question, periods.question)
    if layout.records is not None:
        yield describe("sealed: choice", size, time_slowest(partial(choose_records, layout)), periods.choice)
    with np.errstate(all="ignore"):
        ranking = time_slowest(lambda: public.table.scores(row[None], codes))
    yield describe("sealed: ranking", size, ranking, periods.ranking)


def choose_records(layout: Layout) -> None:
    """Choose the best of random scores, and the bucket of each."""
    records = layout.records
    assert records is not None  # noqa: S101
    scores = _RNG.integers(0, 1 << 32, (layout.n_colours, layout.n_slots))
    best = choose_best(scores, np.ones(scores.shape, bool), records.n_candidates)
    buckets = find_buckets(records, place_records(records, layout.seed, best)[0])
    owners = np.array(match_buckets(buckets, [True] * len(buckets), records.n_buckets))
    messages = (np.arange(records.stage.n_columns) == owners[:, None]) * np.int64(1 << 20)
    add_messages(np.zeros(messages.shape, np.uint32), messages, records.stage.question_bits)


def describe(step: str, size: str, work: float, period: float) -> dict[str, Any]:
    """Return one row of the table."""
    return {"step": step, "size": size, "work_s": work, "period_s": period, "share": work / period}


def make_layout(n_features: int, dimension: int, n_colours: int, n_cells: int, n_fetched: int) -> Layout:
    """Return a layout with random tables."""
    return Layout(
        1,
        bytes(32),
        n_colours,
        16,
        1,
        100,
        _RNG.normal(size=(n_features, dimension)).astype(np.float32),
        _RNG.normal(size=(n_cells, dimension)).astype(np.float32),
        np.ones(n_cells, np.uint16),
        RecordLayout(64, n_fetched // 2, 16, 1024, 1),
    )


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    out: Path = parser.parse_args().out
    usual = make_public(512, 4096, 60, 1000, make_product(512, 128))
    largest = make_public(16_000, 8192, 4096, 1000, WholeCodes(16_000))
    wide = make_public(2048, 4096, 60, 20_000, make_product(2048, 4096))
    rows = [
        describe(
            "vector",
            "16,000 numbers",
            time_slowest(lambda: normalize_rows(_RNG.normal(size=(1, 16_000)), "rows:")),
            VECTOR_PERIOD,
        ),
        *measure_message("usual: 512 features, 1,000 candidates", usual),
        *measure_message("16,000 features, 8,192 x 4,096 coverage", largest),
        *measure_message("2,048 features, 4,096 columns, 20,000 candidates", wide),
        *measure_sealed("usual: 512 to 256, 40 fetched", make_layout(512, 256, 8, 1024, 40), usual),
        *measure_sealed("2,048 to 2,048, 4,096 cells, 256 fetched", make_layout(2048, 2048, 64, 4096, 256), wide),
        *measure_sealed(
            "16,000 to 512, 256 fetched", make_layout(16_000, 512, 16, 4096, 256), replace(largest, gallery="g")
        ),
    ]
    print(f"{'step':24} {'sizes':52} {'work':>9} {'period':>9} {'share':>6}")
    for row in rows:
        print(
            f"{row['step']:24} {row['size']:52} {1e3 * row['work_s']:6.1f} ms {1e3 * row['period_s']:6.0f} ms "
            f"{row['share']:6.2f}"
        )
    out.mkdir(parents=True, exist_ok=True)
    (out / "private_steps.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
