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
import os
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

RECORD = 140  # bytes: an id, a code of 124 bytes, a short name


def make_random_index(items: int, dimension: int) -> Any:
    """Return an index of random bytes, with tables of random hints: their time does not depend on their values."""
    from nearveil.sealed import SealedIndex
    from nearveil.sealed.index import _Tokens
    from nearveil.sealed.layout import Layout
    from nearveil.sealed.parameters import RING
    from nearveil.sealed.sizes import choose_shape, choose_side, count_secrets, count_slots, shape_records
    from nearveil.sealed.tokens import TokenTables

    rng, cores = np.random.default_rng(0), os.cpu_count() or 1
    n_cells, n_colours = choose_shape(items, dimension)
    n_slots, columns = count_slots(items, n_cells), n_cells // n_colours * dimension
    records = shape_records(n_cells * n_slots, RECORD + 1, choose_side(items, RECORD + 1))
    layout = Layout(
        version=1,
        seed=bytes(32),
        n_colours=n_colours,
        n_slots=n_slots,
        n_secrets=count_secrets(n_colours, columns),
        reach=300,
        projection=rng.normal(size=(dimension, dimension)).astype(np.float32),
        centroids=rng.normal(size=(n_cells, dimension)).astype(np.float32),
        counts=np.full(n_cells, n_slots, np.uint16),
        records=records,
    )
    tokens = {}
    for name, stage in layout.stages.items():
        hints = [rng.integers(0, RING.plain_modulus, (n, RING.dimension), np.uint32) for n in stage.secret_rows]
        tables = TokenTables.build(name, layout.seed, hints, cores)
        tokens[name] = _Tokens([], tables, [set() for _ in hints])
    shapes = (n_colours, n_slots, columns), (records.n_blocks, records.n_rows, records.stored_columns)
    matrices = [rng.integers(-31, 32, shape, np.int8) for shape in shapes]
    numbers = np.arange(n_cells * n_slots).reshape(n_cells, n_slots)
    return SealedIndex(
        layout, matrices[0], scale=1.0, normalize=True, items=numbers, records=matrices[1], tokens=tokens
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
        answers.index, answers.layout, answers.tokens = sealed, sealed.layout.to_bytes(), sealed.get_public_tokens()
        settings = Settings(tokens=str(folder / "tokens.db"), rate=None, log_file=folder / "log")
        server = uvicorn.Server(uvicorn.Config(create_app([gallery], tokens, settings), log_config=None))
        at = socket.create_server(("127.0.0.1", 0))
        told.send([at.getsockname()[1], tokens.create("bench")[1]])

        def stop(_: object) -> None:
            server.should_exit = True

        threading.Thread(target=lambda: stop(told.recv()), daemon=True).start()
        server.run(sockets=[at])


def read_usage(process: int) -> tuple[float, float]:
    """Return the processor seconds of a process, and the gigabytes that it holds."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds, int(fields[21]) * os.sysconf("SC_PAGE_SIZE") / 1e9


def ask(client: Any, post: Callable[..., bytes], row: Any) -> tuple[dict[str, float], dict[str, int]]:
    """Ask one question; return the seconds of its parts, and sizes in bytes."""
    taken: dict[str, float] = {}
    taken["begin_pads"], request = timed(client.begin_pads)
    taken["token"], token = timed(partial(post, request.data, "/tokens"))
    taken["finish_pads"], _ = timed(partial(client.finish_pads, request, token))
    started = time.perf_counter()
    taken["ask"], question = timed(partial(client.ask, row))
    taken["scores"], answer = timed(partial(post, question.data))
    taken["read"], matches = timed(partial(client.read_scores, question, answer, client.layout.records.n_candidates))
    taken["ask_records"], fetch = timed(partial(client.ask_records, [match.position for match in matches]))
    taken["records"], last = timed(partial(post, fetch.data))
    taken["read_records"], _ = timed(partial(client.read_records, fetch, last))
    taken["online"] = time.perf_counter() - started
    frames = {"token_request": request.data, "token": token, "scores": question.data, "scores_answer": answer}
    frames |= {"records": fetch.data, "records_answer": last}
    return taken, {name: len(data) for name, data in frames.items()}


@contextmanager
def run_server(make: Callable[[], Any], dimension: int) -> Iterator[tuple[str, str, int]]:
    """Run a server process; yield its address, a token and its number."""
    with tempfile.TemporaryDirectory() as name:
        make_index(Path(name) / "index", 200, dimension)
        here, there = PROCESSES.Pipe()
        process = PROCESSES.Process(target=serve, args=(str(Path(name) / "index"), make, there))
        process.start()
        port, token = here.recv()
        yield f"http://127.0.0.1:{port}", token, process.pid or 0
        here.send("end")
        process.join(60)


def ask_server(address: str, token: str, process: int, rows: Any) -> dict[str, Any]:
    """Ask a server about rows; return what each part took."""
    import httpx

    from nearveil.sealed import SealedClient
    from nearveil.wire.schema import FRAME, KEY_HEADER

    url = f"{address}/v1/galleries/bench/sealed"
    with httpx.Client(headers={"Authorization": f"Bearer {token}"}, timeout=600, trust_env=False) as http:
        frames = [http.get(url + end).raise_for_status().content for end in ("", "/tokens")]
        client = SealedClient(*frames)

        def post(data: bytes, end: str = "") -> bytes:
            headers = {"Content-Type": FRAME, KEY_HEADER: secrets.token_hex(16)}
            return http.post(url + end, content=data, headers=headers).raise_for_status().content

        ask(client, post, rows[0])
        before, _ = read_usage(process)
        results = [ask(client, post, row) for row in rows]
        after, held = read_usage(process)
    parts = {part: [1e3 * taken[part] for taken, _ in results] for part in results[0][0]}
    sizes = results[0][1]
    return {
        "kept_bytes": [len(data) for data in frames],
        "bytes": sizes | {"all": sum(sizes.values()), "first": sum(sizes.values()) + sum(map(len, frames))},
        "median_ms": {part: statistics.median(times) for part, times in parts.items()},
        "least_ms": {part: min(times) for part, times in parts.items()},
        "server_cpu_ms": 1e3 * (after - before) / len(rows),
        "server_gb": held,
    }


def measure(items: int, dimension: int, questions: int) -> dict[str, Any]:
    """Serve, and ask."""
    from nearveil import Client

    rows = np.random.default_rng(1).normal(size=(questions, dimension))
    with run_server(partial(make_random_index, items, dimension), dimension) as (address, token, process):
        report = ask_server(address, token, process, rows)
        first = []
        for row in rows[:5]:
            with Client(address, token) as client:
                first.append(timed(partial(client.nearest, row, k=8, epsilon=0, by="sealed"))[0])
        with Client(address, token) as client:
            nearest = partial(client.nearest, k=8, epsilon=0, by="sealed")
            nearest(rows[0])
            in_a_row = [timed(partial(nearest, row))[0] for row in rows]
            prepared, paced = [], []
            for row in rows:
                prepared.append(timed(client.prepare_sealed)[0])
                paced.append(timed(partial(nearest, row))[0])
    times = {"nearest": paced, "nearest_in_a_row": in_a_row, "first_of_a_client": first, "prepare": prepared}
    summary = {
        f"{name}_ms": {"median": 1e3 * statistics.median(values), "least": 1e3 * min(values)}
        for name, values in times.items()
    }
    return {"items": items, "dimension": dimension, **report, **summary}


def main() -> None:
    """Measure, print, and keep it."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--items", type=int, default=1_000_000)
    options.add_argument("--dimension", type=int, default=64)
    options.add_argument("--questions", type=int, default=20)
    options.add_argument("--out", type=Path, default=Path("out/bench"))
    given = options.parse_args()
    report = measure(given.items, given.dimension, given.questions)
    print(json.dumps(report, indent=1))
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / f"sealed-http-{given.items}-{given.dimension}.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
