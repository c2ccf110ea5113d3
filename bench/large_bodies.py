"""Attack `nearveil serve` on loopback with large bodies and with sealed questions during a rebuild.

An attacker with a good token holds 64 connections. One client with another token asks ordinary questions meanwhile, one
at a time. The attacks are bounded in number and time:

- `large`: bodies of 31 MB for sealed questions.
- `exact`: bodies of the length of a sealed question, all zeros.
- `rebuild`: 5.5 % of the items are deleted, so that the sealed index is rebuilt, and 16 bodies of 100 bytes follow.

The table has the resident memory of the server and its children before each attack and its peak under it, the median
waiting time of the client without the attack and under it, the longest wait, and the longest wait for `/ready`::

    python bench/large_bodies.py --out out/bench
"""

import argparse
import collections
import contextlib
import http.client
import json
import os
import secrets
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parent))
from service import NAME, PROCESSES, build, questions
from strangers import ask

CONNECTIONS, LARGE, SMALL, SMALL_REQUESTS = 64, 31_000_000, 100, 16
_CHUNK = bytes(1 << 20)
_DELETED = 0.055  # of the items: beyond 5 % the sealed index is rebuilt
_WAIT = 60.0  # seconds for one reply


def post(port: int, token: str, length: int, seconds: float) -> str:
    """Post a body of zeros until the server replies; return the status of the reply."""
    lines = (
        f"POST /v1/galleries/{NAME}/sealed HTTP/1.1",
        "Host: localhost",
        f"Authorization: Bearer {token}",
        f"Nearveil-Key: {secrets.token_hex(16)}",
        "Content-Type: application/vnd.nearveil.frame",
        f"Content-Length: {length}",
    )
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=seconds) as connection:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall("\r\n".join((*lines, "", "")).encode())
                for start in range(0, length, len(_CHUNK)):
                    if select.select([connection], [], [], 0)[0]:  # the reply came before the end of the body
                        break
                    connection.sendall(_CHUNK[: length - start])
            return connection.recv(4096).decode().split(" ")[1]
    except TimeoutError:
        return "none"
    except (OSError, IndexError):
        return "reset"


def attack(port: int, token: str, length: int, connections: int, seconds: float, again: bool) -> dict[str, int]:
    """Post bodies on so many connections at a time; return how many replies had each status."""
    os.nice(19)  # its own computing is not the server's
    counts: collections.Counter[str] = collections.Counter()
    until = time.monotonic() + seconds

    def run() -> None:
        while True:
            counts.update([post(port, token, length, max(0.1, until - time.monotonic()))])
            if not again or time.monotonic() > until:
                return

    threads = [threading.Thread(target=run) for _ in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return dict(counts)


def measure_resident(pid: int) -> float:
    """Return the resident megabytes of a process and of its children."""
    total = 0
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            number, _, rest = entry.read_text().partition(" (")
            if pid in (int(number), int(rest.rpartition(") ")[2].split()[1])):
                total += int((entry.parent / "statm").read_text().split()[1])
    return total * os.sysconf("SC_PAGE_SIZE") / 1e6


@contextmanager
def sample(measure: Callable[[], float], period: float = 0.02) -> Iterator[list[float]]:
    """Measure something again and again in a thread."""
    values, stop = [measure()], threading.Event()

    def run() -> None:
        while not stop.wait(period):
            values.append(measure())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield values
    finally:
        stop.set()
        thread.join()


def time_ready(port: int) -> float:
    """Return the milliseconds until `/ready` says 200; the time limit where it does not."""
    began = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_WAIT)
    try:
        connection.request("GET", "/ready")
        good = connection.getresponse().status == 200
    except OSError:
        good = False
    finally:
        connection.close()
    return 1000 * (time.perf_counter() - began if good else _WAIT)


@contextmanager
def serve(folder: Path) -> Iterator[tuple[int, int]]:
    """Run `nearveil serve` with its default limits, and yield its port and its process id."""
    command = [
        sys.executable, "-m", "nearveil", "serve", str(folder / "index"), "--name", NAME, "--offer", "sealed", "--port",
        "0", "--tokens", str(folder / "tokens.db"), "--log-file", str(folder / "log"),
    ]  # fmt: skip
    environment = {**os.environ, "NEARVEIL_SERVER_RATE": "1000000", "NEARVEIL_SERVER_BURST": "1000000"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        port = int(cast("IO[str]", process.stdout).readline().strip().rpartition(":")[2])
        yield port, process.pid
    finally:
        process.terminate()
        process.wait(30)


def read_question_length(folder: Path) -> int:
    """Return the bytes of a sealed question for scores."""
    from nearveil.gallery import Index
    from nearveil.sealed import SealedIndex
    from nearveil.sealed.wire import measure_requests

    with Index.open(str(folder / "index")) as index:
        path = cast("Path", index.sealed_file)
    return measure_requests(SealedIndex.load(path).layout)["scores"]


def delete_items(folder: Path, items: int) -> None:
    """Delete so many items that the sealed index must be rebuilt."""
    from nearveil.gallery import Index

    with Index.open(str(folder / "index")) as index:
        index.delete(index.snapshot().ids[: round(_DELETED * items)].tolist())


def measure(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run all attacks, one after the other."""
    from nearveil.server import TokenStore

    with PROCESSES.Pool(1) as pool:
        pool.apply(build, (str(folder / "index"), options.items, 1000 / options.items, None))
        bodies = pool.apply(questions, (str(folder / "index"),))[0]
    with TokenStore(str(folder / "tokens.db")) as store:
        attacker, client = (store.create(label, galleries=(NAME,))[1] for label in ("attacker", "client"))
    records = []
    with serve(folder) as (port, pid), PROCESSES.Pool(1) as pool:
        exact = read_question_length(folder)
        attacks = {
            "large": (LARGE, CONNECTIONS, options.seconds, True),
            "exact": (exact, CONNECTIONS, options.seconds, True),
            "rebuild": (SMALL, SMALL_REQUESTS, _WAIT, False),
        }
        ask(port, client, bodies, 2.0)
        for name, (length, *told) in attacks.items():
            idle, _ = ask(port, client, bodies, options.seconds)
            before = measure_resident(pid)
            with sample(lambda: measure_resident(pid)) as memory, sample(lambda: time_ready(port), 0.3) as ready:
                if name == "rebuild":
                    delete_items(folder, options.items)
                result = pool.apply_async(attack, (port, attacker, length, *told))
                time.sleep(0.5)
                times, lost = ask(port, client, bodies, options.seconds)
                statuses = result.get(2 * _WAIT)
            records.append({
                "attack": name, "bytes": length, "replies": statuses, "memory_before": before,
                "memory_peak": max(memory), "idle_p50": statistics.median(idle), "p50": statistics.median(times),
                "ratio": statistics.median(times) / statistics.median(idle), "longest": max(times), "lost": lost,
                "ready": max(ready), "load": os.getloadavg()[0],
            })  # fmt: skip
    return records


def show(records: Sequence[dict[str, Any]]) -> None:
    """Print a table."""
    from rich.console import Console
    from rich.table import Table

    grid = Table(title=f"{CONNECTIONS} connections of one token against `nearveil serve`, one client beside them")
    headings = ("attack", "bytes", "MB before", "peak", "rise", "idle p50, ms", "p50", "ratio", "longest", "lost",
                "/ready, ms", "replies")  # fmt: skip
    for heading in headings:
        grid.add_column(heading, justify="left" if heading in ("attack", "replies") else "right")
    for r in records:
        rise = r["memory_peak"] - r["memory_before"]
        statuses = ", ".join(f"{count} of {status}" for status, count in sorted(r["replies"].items()))
        grid.add_row(
            r["attack"], f"{r['bytes']:,}", f"{r['memory_before']:.0f}", f"{r['memory_peak']:.0f}", f"{rise:.0f}",
            f"{r['idle_p50']:.2f}", f"{r['p50']:.2f}", f"{r['ratio']:.2f}", f"{r['longest']:.0f}", str(r["lost"]),
            f"{r['ready']:.0f}", statuses,
        )  # fmt: skip
    Console(width=160).print(grid)


def main() -> None:
    """Attack, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder for the JSON")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each attack, and as long without it")
    parser.add_argument("--items", type=int, default=20_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        records = measure(Path(folder), options)
    show(records)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "large-bodies.json").write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
