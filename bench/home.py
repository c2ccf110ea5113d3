"""Measure search at home: a first copy against a plain download of as many bytes, a change, and a search against FAISS.

One server process on loopback hands out codes as ``nearveil serve`` does; a bare endpoint of the same process sends a
file of as many bytes, which is written to the disk. Both downloads take turns. The search compares single queries with
FAISS's flat index over the same rows.
"""

import argparse
import asyncio
import json
import multiprocessing
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from index import clustered

from nearveil.wire.schema import Offer

PROCESSES = multiprocessing.get_context("spawn")
ROUNDS = 3
QUERIES = 50


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return seconds and the result."""
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def make_index(place: Path, items: int, dimension: int) -> None:
    """Make an index with names, and publish a small map: its learning plays no part here."""
    from nearveil.gallery import Index

    with Index.create(place, dimension=dimension, extractor="bench") as index:
        index.add_table(clustered(items, dimension, 0), names=[f"item {number}" for number in range(items)])
        index.publish(4.0, 0.5, n_sets=2, reach=0.0)


def serve(
    place: str, file: str, told: Connection, folder: Path | None = None, offers: Sequence[Offer] = ("names", "codes")
) -> None:
    """Serve an index and a plain file, until a word comes; tokens and logs are in `folder`, or beside the index."""
    import socket

    import uvicorn
    from fastapi.responses import FileResponse

    from nearveil.gallery import Index
    from nearveil.server import OpenGallery, Settings, TokenStore, create_app

    folder = folder or Path(place).parent
    with Index.open(place) as index, TokenStore(folder / "tokens.db") as tokens:
        gallery = OpenGallery(index, "bench", offers=offers)
        gallery.prepare()
        settings = Settings(tokens=str(folder / "tokens.db"), rate=None, log_file=folder / "log")
        app = create_app([gallery], tokens, settings)
        bare = uvicorn.Config(_bare(FileResponse(file)), log_config=None)
        servers = [uvicorn.Server(uvicorn.Config(app, log_config=None)), uvicorn.Server(bare)]
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in servers]
        told.send([*(one.getsockname()[1] for one in sockets), tokens.create("bench")[1]])

        async def run() -> None:
            tasks = [asyncio.create_task(one.serve([at])) for one, at in zip(servers, sockets, strict=True)]
            while await asyncio.to_thread(told.recv) == "delete":
                await asyncio.to_thread(index.delete, [0])
                told.send("deleted")
            for one in servers:
                one.should_exit = True
            await asyncio.gather(*tasks)

        asyncio.run(run())


def _bare(answer: Any) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await answer(scope, receive, send)

    return app


def download(url: str, into: Path) -> None:
    """Fetch a file as it is."""
    import httpx

    with httpx.stream("GET", url, timeout=600) as reply, into.open("wb") as file:
        for part in reply.iter_raw():
            file.write(part)


def measure(items: int, dimension: int) -> dict[str, Any]:
    """Measure one size."""
    import faiss

    from nearveil import Client

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "plain").write_bytes(b"")
        seconds_build, _ = timed(lambda: make_index(folder / "index", items, dimension))
        here, there = PROCESSES.Pipe()
        arguments = (str(folder / "index"), str(folder / "plain"), there)
        process = PROCESSES.Process(target=serve, args=arguments)
        process.start()
        ours, bare, token = here.recv()
        with Client(f"http://127.0.0.1:{ours}", token, home=folder / "first") as client:
            cold, copy = timed(client.sync)  # the server reads every name
        size = sum(path.stat().st_size for path in copy.folder.iterdir())
        (folder / "plain").write_bytes(np.random.default_rng(0).bytes(size))
        synced, plain = [], []
        for number in range(ROUNDS):
            with Client(f"http://127.0.0.1:{ours}", token, home=folder / f"copy{number}") as client:
                synced.append(timed(client.sync)[0])
            plain.append(timed(lambda: download(f"http://127.0.0.1:{bare}/", folder / "downloaded"))[0])
        here.send("delete")
        here.recv()
        with Client(f"http://127.0.0.1:{ours}", token, home=folder / "copy0") as client:
            seconds_change, copy = timed(client.sync)
        here.send("end")
        process.join(60)
        seconds_load, _ = timed(lambda: copy.load().search(np.ones((1, dimension)), 8))
        rows = copy.load().public.table.decode(copy.load().codes)
        flat = faiss.IndexFlatIP(rows.shape[1])
        flat.add(rows)
        queries = clustered(QUERIES, dimension, 1)
        at_home = [timed(lambda row=row: copy.load().search(row[None], 8))[0] for row in queries]  # type: ignore[misc]
        by_faiss = [timed(lambda row=row: flat.search(row[None], 8))[0] for row in queries]  # type: ignore[misc]
    return {
        "items": items, "dimension": dimension, "build_s": seconds_build, "bytes": size, "first_s": cold,
        "sync_s": statistics.median(synced), "plain_s": statistics.median(plain),
        "sync_ratio": statistics.median(plain) / statistics.median(synced), "change_s": seconds_change,
        "change_bytes": copy.fetched, "load_s": seconds_load, "search_ms": 1e3 * statistics.median(at_home),
        "faiss_ms": 1e3 * statistics.median(by_faiss),
        "search_ratio": statistics.median(by_faiss) / statistics.median(at_home),
    }  # fmt: skip


def main() -> None:
    """Measure, print a table, and keep it."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--items", type=int, nargs="+", default=[10_000, 100_000])
    options.add_argument("--dimension", type=int, default=64)
    options.add_argument("--out", type=Path, default=Path("out/bench"))
    given = options.parse_args()
    print(f"search at home; {platform.processor() or platform.machine()}, {given.dimension} dimensions, made-up rows")
    records = [measure(items, given.dimension) for items in given.items]
    for record in records:
        print(json.dumps({name: round(value, 4) for name, value in record.items()}))
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "home.json").write_text(json.dumps(records, indent=1))


if __name__ == "__main__":
    main()
