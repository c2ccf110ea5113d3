"""Attack a server on loopback as strangers do, and say what it cost those who hold a token.

Beside each attack one client asks with a token, one question at a time. Every round measures the client's waiting times
without the attack and then under it; figures are medians of the rounds. Strangers are processes of their own, of the
lowest priority: what they compute themselves is not the server's affair.
"""

import argparse
import contextlib
import http.client
import json
import os
import secrets
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from service import NAME, PATH, PROCESSES, build, questions, running

QUEUED = b"GET /x HTTP/1.1\r\nHost: localhost\r\n\r\n"
UNFINISHED = b"GET /health HTTP/1.1\r\nHost: loc"
ITEMS = 2000
_HOLD = 5.0  # seconds before connections are opened anew


class Stranger:
    """One process of an attack: it acts until it is told to stop."""

    def __init__(self, port: int, stop: Any, tried: Any) -> None:
        self.port, self.stop, self.tried = port, stop, tried

    def run(self, act: "Act") -> None:
        """Act again and again; a server that hangs up is no reason to stop."""
        os.nice(19)
        while not self.stop.is_set():
            with contextlib.suppress(OSError):
                act(self)

    def connect(self) -> socket.socket:
        """Open a connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=1)

    def count(self, more: int = 1) -> None:
        """Count what was tried."""
        with self.tried.get_lock():
            self.tried.value += more


Act = Callable[[Stranger], None]
Figures = dict[str, float]


def queue_requests(stranger: Stranger) -> None:
    """Send requests without reading a reply."""
    with stranger.connect() as connection:
        while not stranger.stop.is_set():
            stranger.count(connection.send(QUEUED * 3000) // len(QUEUED))


def hold_connections(stranger: Stranger) -> None:
    """Hold a thousand connections and say nothing."""
    _hold(stranger, 1000, b"")


def leave_unfinished(stranger: Stranger) -> None:
    """Begin 500 requests and end none."""
    _hold(stranger, 500, UNFINISHED)


def _hold(stranger: Stranger, count: int, said: bytes) -> None:
    with ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(stranger.connect()).send(said)
            stranger.count()
        stranger.stop.wait(_HOLD)


def send_garbage(stranger: Stranger) -> None:
    """Send what is not HTTP."""
    with stranger.connect() as connection:
        connection.send(os.urandom(4000))
        connection.recv(4000)
        stranger.count()


def guess_tokens(stranger: Stranger) -> None:
    """Ask with a token that is not good."""
    with stranger.connect() as connection:
        connection.send(b"GET /v1/galleries HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer nv_guess\r\n\r\n")
        connection.recv(4000)
        stranger.count()


ATTACKS: dict[str, tuple[Act, int]] = {
    "requests queued on 6 sockets": (queue_requests, 6),
    "1,000 idle connections": (hold_connections, 1),
    "500 unfinished requests": (leave_unfinished, 1),
    "garbage on 4 sockets": (send_garbage, 4),
    "bad tokens on 4 sockets": (guess_tokens, 4),
}


@contextmanager
def attacked(port: int, act: Act, processes: int) -> Any:
    """Attack a server meanwhile; yield the count of what was tried."""
    stop, tried = PROCESSES.Event(), PROCESSES.Value("q", 0)
    strangers = [
        PROCESSES.Process(target=Stranger(port, stop, tried).run, args=(act,), daemon=True) for _ in range(processes)
    ]
    for stranger in strangers:
        stranger.start()
    try:
        while not tried.value:
            time.sleep(0.1)
        time.sleep(2)  # until all of them are there
        yield tried
    finally:
        stop.set()
        for stranger in strangers:
            stranger.join(10)


def ask(port: int, token: str, bodies: Sequence[bytes], seconds: float) -> tuple[list[float], int]:
    """Ask with a token for a while; return milliseconds, and how many questions had no good answer."""
    times, lost, until = [], 0, time.monotonic() + seconds
    headers = {"authorization": f"Bearer {token}", "content-type": "application/vnd.nearveil.frame"}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    while time.monotonic() < until:
        began = time.perf_counter()
        try:
            key = {"nearveil-key": secrets.token_hex(16)}
            connection.request("POST", PATH, secrets.choice(bodies), {**headers, **key})
            reply = connection.getresponse()
            reply.read()
            lost += reply.status != 200
        except (OSError, http.client.HTTPException):
            lost += 1
            connection.close()
        times.append(1000 * (time.perf_counter() - began))
    connection.close()
    return times, lost


def resident(pid: int) -> float:
    """Return the megabytes of memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def sockets(pid: int) -> int:
    """Return how many sockets a process holds."""
    held = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            held += str(entry.readlink()).startswith("socket:")
    return held


def faults(log: Path) -> int:
    """Return how many requests of a log failed by the server's fault."""
    lines = map(json.loads, log.read_text().splitlines())
    return sum("error" in line or line.get("status", 0) >= 500 for line in lines)


def measure_round(url: str, pid: int, asking: tuple[str, Sequence[bytes]], attack: str, seconds: float) -> Figures:
    """Measure one attack once."""
    port = int(url.rpartition(":")[2])
    idle, _ = ask(port, *asking, seconds)
    before, alone = resident(pid), sockets(pid)
    with attacked(port, *ATTACKS[attack]) as tried:
        times, lost = ask(port, *asking, seconds)
        under, held = resident(pid), sockets(pid) - alone
    idle_p99, p99 = (statistics.quantiles(some, n=100)[98] for some in (idle, times))
    return {
        "tried": tried.value, "held": held, "memory_before": before, "memory_under": under, "asked": len(times),
        "lost": lost, "idle_p50": statistics.median(idle), "p50": statistics.median(times), "idle_p99": idle_p99,
        "p99": p99, "ratio": p99 / idle_p99,
    }  # fmt: skip


def measure(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run all attacks, one after the other."""
    from nearveil.server import TokenStore

    place, tokens, log = str(folder / "index"), str(folder / "tokens.db"), folder / "log"
    build(place, ITEMS, 0.05, None)
    with TokenStore(tokens) as store:
        asking = store.create("client", galleries=(NAME,))[1], questions(place)[0]
    records: list[dict[str, Any]] = []
    with running("ours", place, tokens, str(log), "1") as (url, pid):
        ask(int(url.rpartition(":")[2]), *asking, 3.0)
        for attack in ATTACKS:
            rounds = [measure_round(url, pid, asking, attack, options.seconds) for _ in range(options.rounds)]
            record = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
            sums = {key: sum(one[key] for one in rounds) for key in ("tried", "asked", "lost")}
            time.sleep(0.5)
            sums["faults"] = faults(log) - sum(one["faults"] for one in records)
            records.append({"attack": attack, **record, **sums, "load": os.getloadavg()[0]})
    return records


def show(records: Sequence[dict[str, Any]]) -> None:
    """Print a table."""
    from rich.console import Console
    from rich.table import Table

    grid = Table(title=f"Strangers against a server of {ITEMS:,} items, one client with a token beside them")
    headings = ("attack", "tried", "held", "MB before", "under it", "p50, ms", "p99", "idle p50", "p99", "p99 ratio",
                "asked", "lost", "faults", "load")  # fmt: skip
    for heading in headings:
        grid.add_column(heading, justify="left" if heading == "attack" else "right")
    for r in records:
        grid.add_row(
            r["attack"], f"{r['tried']:,}", f"{r['held']:.0f}", f"{r['memory_before']:.0f}", f"{r['memory_under']:.0f}",
            *(f"{r[key]:.2f}" for key in ("p50", "p99", "idle_p50", "idle_p99")), f"{r['ratio']:.1f}",
            f"{r['asked']:,}", str(r["lost"]), str(r["faults"]), f"{r['load']:.1f}",
        )  # fmt: skip
    Console(width=150).print(grid)


def main() -> None:
    """Attack, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder for the JSON")
    parser.add_argument("--seconds", type=float, default=5.0, help="of one round, and as long without the attack")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        records = measure(Path(folder), options)
    show(records)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "strangers.json").write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
