"""Load a server on loopback: questions a second and waiting times, against a bare endpoint that returns the same bytes.

Both servers are processes of their own, with the same uvicorn settings: ours is what ``nearveil serve`` runs (tokens,
limits, logs, checks, deletions looked up for every answer), the bare one is a FastAPI endpoint that reads the request
and returns constant bytes, and nothing else. A third process asks: so many connections, each with one question at a
time, written on sockets directly so that the asker costs little. The two servers take turns; each figure is the median
of the rounds. Every question names a set at random and has a key of its own. The processor time of a question is that
of the server's processes: it depends less than rates on what else runs on the machine.

Before the rounds the server is asked for every set until a whole pass makes no answer anew, in any of its processes.
What answers cost that are not kept is measured with a server that keeps none (cold).
"""

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import platform
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, cast
from urllib.parse import urlsplit

import httpx
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from index import BATCH, clustered

PROCESSES = multiprocessing.get_context("spawn")
CANDIDATES = 1000  # of an answer
DIMENSION = 128
EPSILON = 4.0
CODE_BYTES = 128  # of a candidate, without its name
CONNECTIONS = (1, 8, 64)
NAME = "gallery"
PATH = f"/v1/galleries/{NAME}/query"


class Asker(asyncio.Protocol):
    """One connection with one question at a time."""

    def __init__(
        self, head: bytes, bodies: Sequence[bytes], until: float, most: int | None, times: list[float]
    ) -> None:
        self._head, self._bodies, self._until, self._times = head, bodies, until, times
        self._questions_left = most  # None: as many as there is time for
        self.done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._number, self._left, self._seen = secrets.randbelow(1 << 30), -1, bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to ask."""
        self._transport = cast("asyncio.Transport", transport)
        self._ask()

    def _ask(self) -> None:
        self._number += 1
        body = self._bodies[self._number % len(self._bodies)]
        key = b"Nearveil-Key: %s\r\n" % secrets.token_hex(16).encode()
        self._began = time.perf_counter()
        self._transport.write(self._head + key + b"Content-Length: %d\r\n\r\n" % len(body) + body)

    def data_received(self, data: bytes) -> None:
        """Count the bytes of a reply down, and ask again at its end."""
        if self._left < 0:
            self._seen += data
            end = self._seen.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(self._seen[:end]).lower()
            if not head.startswith(b"http/1.1 200"):
                self._finish(head.partition(b"\r\n")[0].decode())
                return
            length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
            self._left = length - (len(self._seen) - end - 4)
            self._seen.clear()
        else:
            self._left -= len(data)
        if self._left == 0:
            self._left = -1
            now = time.perf_counter()
            self._times.append(now - self._began)
            if self._questions_left is not None:
                self._questions_left -= 1
            if now < self._until and self._questions_left != 0:
                self._ask()
            else:
                self._finish("")

    def connection_lost(self, error: Exception | None) -> None:
        """Tell that the server hung up."""
        self._finish(f"connection lost: {error}")

    def _finish(self, words: str) -> None:
        if not self.done.done():
            self.done.set_result(words)
            self._transport.close()


def load(
    url: str,
    tokens: Sequence[str],
    bodies: Sequence[bytes],
    connections: int,
    seconds: float = math.inf,
    most: int | None = None,
) -> dict[str, float]:
    """Ask for a while, or up to a number of questions on each connection.

    Returns questions a second, and the median and 99th percentile of milliseconds.
    """
    place = urlsplit(url)
    at = (place.hostname or "", place.port or 0)

    def head(number: int) -> bytes:
        lines = (f"POST {PATH} HTTP/1.1", f"Host: {place.netloc}", f"Authorization: Bearer {tokens[number]}")
        return "\r\n".join((*lines, "Content-Type: application/vnd.nearveil.frame", "")).encode()

    async def run() -> dict[str, float]:
        times: list[float] = []
        began = time.perf_counter()
        loop = asyncio.get_running_loop()
        askers = []
        for number in range(connections):
            asker = partial(Asker, head(number), bodies, began + seconds, most, times)
            askers.append((await loop.create_connection(asker, *at))[1])
        said = await asyncio.gather(*(asker.done for asker in askers))
        if any(said):
            raise RuntimeError(f"the server said: {next(word for word in said if word)}")
        spent = time.perf_counter() - began
        p50, p99 = (1000 * float(value) for value in np.percentile(times, [50, 99]))
        return {"rate": len(times) / spent, "p50": p50, "p99": p99, "asked": len(times)}

    import uvloop

    return uvloop.run(run())


def build(place: str, items: int, fraction: float, sets: int | None) -> dict[str, float]:
    """Make an index of rows around 1,000 centres, with its map; return seconds."""
    from nearveil.gallery import Index, Item

    rows = clustered(items, DIMENSION, 0)
    began = time.perf_counter()
    with Index.create(place, dimension=DIMENSION, extractor="bench", timeout=600) as index:
        for start in range(0, items, BATCH):
            some = enumerate(rows[start : start + BATCH], start)
            index.add(Item(row, f"photos/{number}.jpg") for number, row in some)
        added = time.perf_counter()
        index.publish(EPSILON, fraction, n_sets=sets, reach=0.0, code_bytes=CODE_BYTES)
    return {"add_s": added - began, "publish_s": time.perf_counter() - added}


def questions(place: str) -> tuple[list[bytes], bytes, int]:
    """Return a question for each set, an answer, and the bytes of the public part."""
    from nearveil.gallery import Index
    from nearveil.mechanisms import Message
    from nearveil.wire import ServerProtocol
    from nearveil.wire.messages import Query
    from nearveil.wire.server import serve_maps

    with Index.open(place) as index:
        published = index.current().published
        messages = [
            Message(published.release.name, published.public_id, {"sets": np.array([number], np.int32)})
            for number in range(published.map.n_sets)
        ]
        bodies = [Query(message, "names").to_bytes() for message in messages]
        galleries = serve_maps(index, NAME, offers=("names",))
        answer = ServerProtocol(*galleries).answer(bodies[0])
    return bodies, answer, published.map.nbytes


def count_made(url: str, token: str) -> int:
    """Return how many answers a server has made, in all its processes."""
    told = httpx.get(f"{url}/metrics", headers={"authorization": f"Bearer {token}"}).raise_for_status().text
    return round(float(told.partition("\nnearveil_answers_made_total ")[2].partition("\n")[0]))


def warm(url: str, tokens: Sequence[str], bodies: Sequence[bytes]) -> tuple[int, int]:
    """Ask for all sets until no answer is made; return how many were made, and how many the last pass made."""
    before = last = count_made(url, tokens[0])
    fewest, passes = math.inf, 0
    while True:
        load(url, tokens, bodies, 8, most=len(bodies))  # connections stay with a process: each asks for every set
        now = count_made(url, tokens[0])
        made, last, passes = now - last, now, passes + 1
        if made == 0 or (passes > 4 and made >= fewest):  # all are kept, or they do not fit
            return now - before, made
        fewest = min(fewest, made)


def serve_ours(place: str, tokens: str, log: str, workers: str, cache: str = str(1 << 28)) -> None:
    """Be the server."""
    from nearveil.server import Settings, serve

    settings = Settings(
        galleries=({"name": NAME, "index": place, "offers": ("names",)},),  # type: ignore[arg-type]
        tokens=tokens,
        port=0,
        rate=None,
        log_file=Path(log),
        workers=int(workers),
        cache=int(cache),
    )
    serve(settings, ready=lambda url: print(url, flush=True))


def serve_bare(answer: str, workers: str) -> None:
    """Be the bare endpoint, with the same uvicorn settings, in as many processes."""
    from nearveil.server.serving import bind_socket, make_url
    from nearveil.server.settings import Settings

    settings = Settings(port=0)
    sock = bind_socket(settings)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # uvicorn raises it again: then the others end, too
    others = [PROCESSES.Process(target=_bare, args=(sock, answer), daemon=True) for _ in range(int(workers) - 1)]
    for process in others:
        process.start()
    print(make_url(settings, sock), flush=True)
    _bare(sock, answer)


def _bare(sock: socket.socket, answer: str) -> None:
    from fastapi import FastAPI, Request, Response

    from nearveil.server.listener import Server
    from nearveil.server.serving import make_config
    from nearveil.server.settings import Settings

    constant = Path(answer).read_bytes()
    app = FastAPI()

    @app.post(PATH)
    async def query(request: Request) -> Response:
        await request.body()
        return Response(constant, media_type="application/vnd.nearveil.frame")

    settings = Settings(port=0)
    Server(make_config(app, settings), lambda: None).run(sockets=[sock])


@contextmanager
def running(kind: str, *told: str) -> Iterator[tuple[str, int]]:
    """Run a server as a process; yield its address and its number."""
    process = subprocess.Popen([sys.executable, __file__, "--be", kind, *told], stdout=subprocess.PIPE, text=True)
    try:
        url = cast("IO[str]", process.stdout).readline().strip()
        if not url:
            raise RuntimeError(f"the {kind} server did not start")
        yield url, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def processor_seconds(pid: int) -> float:
    """Return the processor time of a process and of its children that live."""
    total = 0
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            number, _, rest = entry.read_text().partition(" (")
            told = rest.rpartition(") ")[2].split()
            if pid in (int(number), int(told[1])):
                total += int(told[11]) + int(told[12])
    return total / os.sysconf("SC_CLK_TCK")


def measure_turn(pool: Any, url: str, pid: int, told: tuple[Any, ...]) -> dict[str, float]:
    """Load a server; return what :func:`load` does, and milliseconds of the server's processors for a question."""
    before = processor_seconds(pid)
    turn: dict[str, float] = pool.apply(load, (url, *told))
    return {**turn, "cpu": 1000 * (processor_seconds(pid) - before) / turn["asked"]}


def measure(folder: Path, items: int, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure one gallery at all numbers of connections."""
    from nearveil.server import TokenStore
    from nearveil.server.tokens import Scope

    place, about = str(folder / f"{items}"), folder / f"{items}.json"
    with PROCESSES.Pool(1) as pool:
        if not about.exists():
            about.write_text(json.dumps(pool.apply(build, (place, items, CANDIDATES / items, options.sets))))
        bodies, answer, map_bytes = pool.apply(questions, (place,))
    built = json.loads(about.read_text())
    (folder / "answer").write_bytes(answer)
    with TokenStore(str(folder / "tokens.db")) as tokens:
        scopes: tuple[Scope, ...] = ("query", "metrics")
        secret = [
            tokens.create(f"client {number}", scopes=scopes, galleries=(NAME,))[1] for number in range(max(CONNECTIONS))
        ]
    workers = str(options.workers)
    told = place, str(folder / "tokens.db"), str(folder / "log"), workers
    with running("ours", *told, "0") as (url, pid), PROCESSES.Pool(1) as pool:
        first = pool.apply(load, (url, secret, bodies, 1, math.inf, 1))
        pool.apply(load, (url, secret, bodies, 8, math.inf, 4))
        cold = measure_turn(pool, url, pid, (secret, bodies, 8, options.seconds))
    ours, bare = running("ours", *told, str(options.workers << 28)), running("bare", str(folder / "answer"), workers)
    with ours as (our_url, our_pid), bare as (bare_url, bare_pid), PROCESSES.Pool(1) as pool:
        made, made_last = pool.apply(warm, (our_url, secret, bodies))
        for connections in CONNECTIONS:
            turns: dict[str, list[dict[str, float]]] = {"ours": [], "bare": []}
            for _ in range(options.rounds):
                for kind, url, pid in (("bare", bare_url, bare_pid), ("ours", our_url, our_pid)):
                    turns[kind].append(measure_turn(pool, url, pid, (secret, bodies, connections, options.seconds)))
            medians = {
                f"{kind}_{what}": statistics.median(turn[what] for turn in some)
                for kind, some in turns.items()
                for what in ("rate", "p50", "p99", "cpu")
            }
            yield {
                "items": items, "fraction": CANDIDATES / items,
                "sets": len(bodies), "connections": connections, "workers": options.workers, **built,
                "cold_rate": cold["rate"], "cold_p50": cold["p50"], "cold_p99": cold["p99"], "cold_cpu": cold["cpu"],
                "first": first["p50"], "made": made, "made_last": made_last,
                "answer_bytes": len(answer), "question_bytes": len(bodies[0]), "map_bytes": map_bytes, **medians,
                "ratio": medians["ours_rate"] / medians["bare_rate"], "load": os.getloadavg()[0],
            }  # fmt: skip


def show(records: Sequence[dict[str, Any]]) -> None:
    """Print a table."""
    from rich.console import Console
    from rich.table import Table

    told = f"{DIMENSION} dimensions, codes of {CODE_BYTES} bytes, epsilon {EPSILON:g}"
    grid = Table(title=f"Server on loopback, {told}; ratio to the bare endpoint")
    headings = ("items", "f", "sets", "answer, kB", "clients", "questions/s", "p50, ms", "p99, ms", "cpu, ms", "bare/s",
                "p50", "p99", "cpu", "ratio", "load")  # fmt: skip
    for heading in headings:
        grid.add_column(heading, justify="right", no_wrap=True)
    for r in records:
        grid.add_row(
            f"{r['items']:,}", f"{r['fraction']:g}", str(r["sets"]), f"{r['answer_bytes'] / 1000:.1f}",
            str(r["connections"]), f"{r['ours_rate']:,.0f}", f"{r['ours_p50']:.2f}", f"{r['ours_p99']:.2f}",
            f"{r['ours_cpu']:.2f}", f"{r['bare_rate']:,.0f}", f"{r['bare_p50']:.2f}", f"{r['bare_p99']:.2f}",
            f"{r['bare_cpu']:.2f}", f"{r['ratio']:.2f}", f"{r['load']:.1f}",
        )  # fmt: skip
    Console(width=150).print(grid)
    for items in dict.fromkeys(r["items"] for r in records):
        r = next(r for r in records if r["items"] == items)
        print(
            f"{items:,} items: added in {r['add_s']:.0f} s, map of {r['map_bytes'] / 1000:,.0f} kB learned in "
            f"{r['publish_s']:.0f} s; a question has {r['question_bytes']} bytes; {r['workers']} process(es); "
            f"before the rounds {r['made']:,} answers were made, {r['made_last']:,} of them in the last pass; "
            f"where none is kept, 8 clients: {r['cold_rate']:,.0f} a second, p50 {r['cold_p50']:.1f} ms, "
            f"p99 {r['cold_p99']:.1f} ms, {r['cold_cpu']:.2f} ms of processor; the first took {r['first']:.0f} ms"
        )


def main() -> None:
    """Measure, print and keep; or be one of the servers."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder for the JSON")
    parser.add_argument("--seconds", type=float, default=3.0, help="of one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--items",
        type=int,
        nargs="+",
        default=[10_000],
        help="of galleries; the map of a million takes minutes to learn",
    )
    parser.add_argument("--workers", type=int, default=1, help="processes of each server")
    parser.add_argument("--folder", type=Path, help="where galleries are kept for the next run; nowhere by default")
    parser.add_argument("--sets", type=int, help="of the map; what is found best by default")
    parser.add_argument("--be", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.be:
        be: Callable[..., None] = serve_ours if options.be[0] == "ours" else serve_bare
        be(*options.be[1:])
        return
    records: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for items in options.items:
            records.extend(measure(options.folder or Path(folder), items, options))
    show(records)
    options.out.mkdir(parents=True, exist_ok=True)
    kept = {"machine": platform.machine(), "processors": os.cpu_count(), "records": records}
    (options.out / "service.json").write_text(json.dumps(kept, indent=1) + "\n")
    print(f"kept in {options.out / 'service.json'}")


if __name__ == "__main__":
    main()
