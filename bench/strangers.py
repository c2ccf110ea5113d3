"""Attack a server on loopback as strangers do, and say what it cost those who hold a token.

Each attack runs beside one client that asks with a token, one question at a time. Printed for each: what was tried,
connections held, memory before and after, the client's waiting times idle and under attack, and what it lost.
"""

import argparse
import contextlib
import json
import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from service import build, running

PIPELINED = b"GET /x HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3000
TRICKLE = b"GET /health HTTP/1.1\r\nHost: loc"
ITEMS = 2000


class Attack(threading.Thread):
    """Something that strangers do until they are told to stop."""

    def __init__(self, port: int, act: Callable[["Attack"], None]) -> None:
        super().__init__(daemon=True)
        self.port, self.stop, self.tried, self.held = port, threading.Event(), 0, 0
        self._act = act

    def run(self) -> None:
        """Act until told to stop; a server that hangs up is no reason to."""
        while not self.stop.is_set():
            with contextlib.suppress(OSError):
                self._act(self)

    def connect(self) -> socket.socket:
        """Open a connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=1)


def queue_requests(attack: Attack) -> None:
    """Send requests without reading a reply."""
    with attack.connect() as connection:
        while not attack.stop.is_set():
            attack.tried += connection.send(PIPELINED) // 37


def hold_idle(attack: Attack) -> None:
    """Hold a thousand connections and say nothing."""
    with contextlib.ExitStack() as stack:
        for _ in range(1000):
            stack.enter_context(attack.connect())
            attack.tried += 1
        attack.held = 1000
        attack.stop.wait(5)


def trickle(attack: Attack) -> None:
    """Begin requests that never end."""
    with contextlib.ExitStack() as stack:
        for _ in range(500):
            stack.enter_context(attack.connect()).send(TRICKLE)
            attack.tried += 1
        attack.stop.wait(5)


def send_garbage(attack: Attack) -> None:
    """Send what is not HTTP."""
    with attack.connect() as connection:
        connection.send(os.urandom(4000))
        connection.recv(4000)
        attack.tried += 1


ATTACKS = {"requests queued on 6 sockets": (queue_requests, 6), "1,000 idle connections": (hold_idle, 1),
           "500 unfinished requests": (trickle, 1), "garbage on 4 sockets": (send_garbage, 4)}  # fmt: skip


def ask(port: int, token: str, seconds: float) -> tuple[list[float], int]:
    """Ask with a token for a while; return milliseconds and how many questions failed."""
    times, lost, until = [], 0, time.monotonic() + seconds
    connection = HTTPConnection("127.0.0.1", port, timeout=5)
    while time.monotonic() < until:
        began = time.perf_counter()
        try:
            connection.request("GET", "/v1/galleries/gallery/map", headers={"authorization": f"Bearer {token}"})
            good = connection.getresponse()
            good.read()
            lost += good.status != 200
        except OSError:
            lost += 1
            connection.close()
        times.append(1000 * (time.perf_counter() - began))
    connection.close()
    return times, lost


def resident(pid: int) -> float:
    """Return the megabytes of memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def p99(times: list[float]) -> float:
    """Return the 99th percentile."""
    return statistics.quantiles(times, n=100)[98]


def measure(url: str, pid: int, token: str, seconds: float) -> list[dict[str, Any]]:
    """Run all attacks, one after the other."""
    port = int(url.rpartition(":")[2])
    ask(port, token, 1.0)
    idle, _ = ask(port, token, seconds)
    records = []
    for name, (act, threads) in ATTACKS.items():
        before = resident(pid)
        attacks = [Attack(port, act) for _ in range(threads)]
        for attack in attacks:
            attack.start()
        time.sleep(1)
        times, lost = ask(port, token, seconds)
        under = resident(pid)
        for attack in attacks:
            attack.stop.set()
        for attack in attacks:
            attack.join(10)
        records.append({
            "attack": name, "tried": sum(attack.tried for attack in attacks), "memory_before": before,
            "memory_under": under, "idle_p99": p99(idle), "p99": p99(times), "asked": len(times), "lost": lost,
        })  # fmt: skip
    return records


def main() -> None:
    """Attack, print and keep."""
    from rich.console import Console
    from rich.table import Table

    from nearveil.service import TokenStore

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder for the JSON")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each attack")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build(str(folder / "index"), ITEMS, 0.05, None)
        with TokenStore(folder / "tokens.db") as store:
            token = store.create("client")[1]
        files = (str(folder / "index"), str(folder / "tokens.db"), str(folder / "log"), "1")
        with running("ours", *files) as (url, pid):
            records = measure(url, pid, token, options.seconds)
        log = (folder / "log").stat().st_size
    grid = Table(title=f"Strangers against a server of {ITEMS:,} items, one client with a token beside them")
    for heading in ("attack", "tried", "MB before", "MB under it", "idle p99, ms", "p99, ms", "ratio", "asked", "lost"):
        grid.add_column(heading, justify="left" if heading == "attack" else "right")
    for r in records:
        grid.add_row(
            r["attack"], f"{r['tried']:,}", f"{r['memory_before']:.0f}", f"{r['memory_under']:.0f}",
            f"{r['idle_p99']:.2f}", f"{r['p99']:.2f}", f"{r['p99'] / r['idle_p99']:.1f}", f"{r['asked']:,}",
            str(r["lost"]),
        )  # fmt: skip
    Console(width=130).print(grid)
    print(f"the log has {log / 1000:,.0f} kB")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "strangers.json").write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
