"""Measure a sealed question over HTTP: one server process and one client on loopback, and what each part takes.

Codes, records and hints are random bytes of the shapes that an index of so many items has: neither side's time depends
on what they hold, and matches mean nothing here. A question is one request for scores and one for records, as
``nearveil.Client`` sends them. What does not depend on a question is prepared before it, and timed by itself. Parts
are timed without the pauses that hide how long private work took; the whole call with them, with what it needs
prepared, and one call after the other, where each waits until that is done::

    python bench/sealed_http.py --items 1000000 --dimension 64 --out out/bench
"""

import argparse
import json
import secrets
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from home import PROCESSES, make_index, timed

QUESTIONS = 20
RECORD = 140  # bytes: an id, a code of 124 bytes, a short name


def make_random_index(items: int, dimension: int) -> Any:
    """Return an index of random bytes."""
    from nearveil.sealed import SealedIndex
    from nearveil.sealed.layout import Layout, RecordLayout
    from nearveil.sealed.parameters import FETCH, SCORES
    from nearveil.sealed.sizes import N_FETCHED, choose_shape, count_slots, shape_records

    rng = np.random.default_rng(0)
    n_cells, n_colours = choose_shape(items, dimension)
    n_slots, width = count_slots(items, n_cells), RECORD + 1
    per_column, n_columns = shape_records(n_cells * n_slots, width)
    kept = RecordLayout(width, per_column, n_columns, N_FETCHED)
    shape = n_colours, n_slots, n_cells // n_colours * dimension
    layout = Layout(
        version=1,
        seed=bytes(32),
        n_colours=n_colours,
        n_slots=n_slots,
        reach=300,
        projection=rng.normal(size=(dimension, dimension)).astype(np.float32),
        centroids=rng.normal(size=(n_cells, dimension)).astype(np.float32),
        counts=np.full(n_cells, n_slots, np.uint16),
        records=kept,
    )
    return SealedIndex(
        layout,
        np.frombuffer(rng.bytes(shape[0] * shape[1] * shape[2]), np.int8).reshape(shape),
        np.zeros((n_colours, n_slots, SCORES.dimension), np.uint32),
        scale=1.0,
        normalize=True,
        items=np.arange(n_cells * n_slots).reshape(n_cells, n_slots),
        records=np.frombuffer(rng.bytes(kept.n_rows * n_columns), np.int8).reshape(kept.n_rows, n_columns),
        record_hint=np.zeros((kept.n_rows, FETCH.dimension), np.uint32),
    )


def serve(place: str, make: Callable[[], Any], told: Connection) -> None:
    """Serve a small gallery whose sealed questions are answered by an index that is made, until a word comes."""
    import socket

    import uvicorn

    from nearveil.gallery import Index
    from nearveil.server import OpenGallery, Settings, TokenStore, create_app

    folder = Path(place).parent
    with Index.open(place) as index, TokenStore(folder / "tokens.db") as tokens:
        gallery = OpenGallery(index, "bench", offers=("names", "sealed"))
        gallery.prepare()
        answers, sealed = gallery._get_sealed(), make()
        answers.index, answers.layout, answers.hints = sealed, sealed.layout.to_bytes(), sealed.get_hints()
        settings = Settings(tokens=str(folder / "tokens.db"), rate=None, log_file=folder / "log")
        server = uvicorn.Server(uvicorn.Config(create_app([gallery], tokens, settings), log_config=None))
        at = socket.create_server(("127.0.0.1", 0))
        told.send([at.getsockname()[1], tokens.create("bench")[1]])

        def stop(_: object) -> None:
            server.should_exit = True

        threading.Thread(target=lambda: stop(told.recv()), daemon=True).start()
        server.run(sockets=[at])


def ask(client: Any, post: Callable[[bytes], bytes], row: Any) -> tuple[dict[str, float], dict[str, int], list[bytes]]:
    """Ask one question; return the seconds of its parts, sizes in bytes, and the records that came."""
    taken: dict[str, float] = {}
    taken["prepare"], _ = timed(client.prepare)
    began = time.perf_counter()
    taken["ask"], question = timed(partial(client.ask, row))
    taken["scores"], answer = timed(partial(post, question.data))
    taken["read"], found = timed(partial(client.read_scores, question, answer, client.layout.records.n_fetched))
    taken["ask_records"], fetch = timed(partial(client.ask_records, [one.position for one in found]))
    taken["records"], last = timed(partial(post, fetch.data))
    taken["read_records"], records = timed(partial(client.read_records, fetch, last))
    taken["all"] = time.perf_counter() - began
    sizes = {"question": len(question.data), "answer": len(answer), "fetch": len(fetch.data), "records": len(last)}
    return taken, sizes, records


@contextmanager
def run_server(make: Callable[[], Any], dimension: int) -> Iterator[tuple[str, str]]:
    """Run a server process; yield its address and a token."""
    with tempfile.TemporaryDirectory() as name:
        make_index(Path(name) / "index", 200, dimension)
        here, there = PROCESSES.Pipe()
        process = PROCESSES.Process(target=serve, args=(str(Path(name) / "index"), make, there))
        process.start()
        port, token = here.recv()
        yield f"http://127.0.0.1:{port}", token
        here.send("end")
        process.join(60)


def ask_server(address: str, token: str, rows: Any) -> tuple[dict[str, Any], list[list[bytes]]]:
    """Ask a server about rows; return what each part took, and the records that came for each row."""
    import httpx

    from nearveil.sealed import SealedClient
    from nearveil.wire.schema import FRAME, KEY_HEADER

    where = f"{address}/v1/galleries/bench/sealed"
    with httpx.Client(headers={"Authorization": f"Bearer {token}"}, timeout=600, trust_env=False) as http:
        fetched, frames = timed(lambda: [http.get(f"{where}{end}").content for end in ("", "/0", "/1")])
        client = SealedClient(frames[0], frames[1:])

        def post(data: bytes) -> bytes:
            headers = {"Content-Type": FRAME, KEY_HEADER: secrets.token_hex(16)}
            return http.post(where, content=data, headers=headers).raise_for_status().content

        asked = [ask(client, post, row) for row in rows]
    parts = {part: [1e3 * taken[part] for taken, _, _ in asked] for part in asked[0][0]}
    report = {
        "hint_bytes": [len(one) for one in frames[1:]], "first_s": fetched, "bytes": asked[0][1],
        "median_ms": {part: statistics.median(times) for part, times in parts.items()},
        "least_ms": {part: min(times) for part, times in parts.items()},
    }  # fmt: skip
    return report, [records for _, _, records in asked]


def measure(items: int, dimension: int) -> dict[str, Any]:
    """Serve, and ask."""
    from nearveil import Client

    rows = np.random.default_rng(1).normal(size=(QUESTIONS, dimension))
    with run_server(partial(make_random_index, items, dimension), dimension) as (address, token):
        report, _ = ask_server(address, token, rows)
        with Client(address, token) as asking:
            asking.nearest(rows[0], 8, epsilon=0, by="sealed")
            nearest = partial(asking.nearest, k=8, epsilon=0, by="sealed")
            in_a_row = [timed(partial(nearest, row))[0] for row in rows]
            paced = []
            for row in rows:
                asking.prepare_sealed()
                paced.append(timed(partial(nearest, row))[0])
    return {
        "items": items, "dimension": dimension, **report,
        "nearest_ms": {"median": 1e3 * statistics.median(paced), "least": 1e3 * min(paced)},
        "nearest_in_a_row_ms": {"median": 1e3 * statistics.median(in_a_row), "least": 1e3 * min(in_a_row)},
    }  # fmt: skip


def main() -> None:
    """Measure, print, and keep it."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--items", type=int, default=1_000_000)
    options.add_argument("--dimension", type=int, default=64)
    options.add_argument("--out", type=Path, default=Path("out/bench"))
    given = options.parse_args()
    report = measure(given.items, given.dimension)
    print(json.dumps(report, indent=1))
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / f"sealed-http-{given.items}-{given.dimension}.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
