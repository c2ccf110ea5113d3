"""Measure the ledger: debits per second and latency on SQLite and PostgreSQL, against plain inserts in the same run.

Everybody is as durable as the ledger: each commit waits until the disk has it (SQLite: write-ahead log with
``synchronous=FULL``; PostgreSQL: ``fsync`` and ``synchronous_commit`` on). The rivals check nothing and chain nothing.
All processes of a run spend from one account and begin at once. Rounds of the contenders alternate, so that they see
the same machine.
"""

import argparse
import json
import multiprocessing
import platform
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["nearveil.ledger", "psycopg", "sqlalchemy.dialects.postgresql.psycopg"])
COUNTS = (1, 16)
EARLY, LATE, AROUND = 100, 10_000, 50
ABOUT: dict[str, Any] = {"owner": "bench", "protects": "query", "unit": "image", "relation": "replace"}
MESSAGE, PAYLOAD = b"m" * 200, "p" * 500
INSERT = "INSERT INTO bench_entry (worker, step, payload) VALUES ({0}, {0}, {0})"
UPDATE = "UPDATE bench_account SET spent = spent + 1"


def open_account(ledger: Any, kind: str, name: str) -> Any:
    """Open an account that is never used up, of the kind whose parameters are chosen along the way, or with a plan."""
    plan = [(event(), 10**6)] if kind == "plan" else None
    return ledger.open_account(name, **ABOUT, epsilon=100.0, delta=1e-5, plan=plan)


def event() -> Any:
    """Return what is released."""
    from dp_accounting import GaussianDpEvent

    return GaussianDpEvent(1000.0)


def guarantee() -> Any:
    """Return what is paid for."""
    from nearveil.privacy import Basis, compose_events

    about = {name: ABOUT[name] for name in ("protects", "unit", "relation")}
    return compose_events([event()], delta=1e-5, basis=Basis("Gaussian mechanism"), **about)


@contextmanager
def ours(url: str, worker: int, *, store: bool) -> Iterator[Callable[[int], object]]:
    """Pay with a Renyi filter; and store a message where asked."""
    from nearveil.ledger import Ledger

    del worker
    with Ledger(url) as ledger:
        account, what = ledger.account("filter"), guarantee()

        def once(step: int) -> None:
            del step
            with account.spend(what) as debit:
                if store:
                    debit.store(MESSAGE)

        yield once


@contextmanager
def plain(url: str, worker: int, *, balance: bool) -> Iterator[Callable[[int], object]]:
    """Insert a row in a transaction of its own; with a balance, also raise one number that all share."""
    if url.startswith("postgresql"):
        import psycopg

        with psycopg.connect(url, autocommit=True) as server:
            insert = INSERT.format("%s").encode()

            def once(step: int) -> None:
                with server.transaction():
                    if balance:
                        server.execute(UPDATE)
                    server.execute(insert, (worker, step, PAYLOAD))

            yield once
        return
    file = sqlite3.connect(url, timeout=60, isolation_level=None)
    file.execute("PRAGMA synchronous = FULL")

    def in_file(step: int) -> None:
        file.execute("BEGIN IMMEDIATE")
        if balance:
            file.execute(UPDATE)
        file.execute(INSERT.format("?"), (worker, step, PAYLOAD))
        file.execute("COMMIT")

    yield in_file
    file.close()


WAYS = {
    "spend (ours)": partial(ours, store=False),
    "spend and store (ours)": partial(ours, store=True),
    "plain INSERT": partial(plain, balance=False),
    "INSERT and UPDATE of one balance": partial(plain, balance=True),
}


def prepare(url: str) -> None:
    """Make what the contenders need."""
    from nearveil.ledger import Ledger

    with Ledger(url) as ledger:
        open_account(ledger, "filter", "filter")
    tables = ("CREATE TABLE bench_entry (worker INTEGER, step INTEGER, payload TEXT, PRIMARY KEY (worker, step))",
              "CREATE TABLE bench_account (spent BIGINT)", "INSERT INTO bench_account VALUES (0)")  # fmt: skip
    if url.startswith("postgresql"):
        import psycopg

        with psycopg.connect(url) as server:
            for statement in tables:
                server.execute(statement.encode())
        return
    with sqlite3.connect(url) as file:
        for statement in tables:
            file.execute(statement)
    file.close()


def hammer(pipe: Connection, barrier: Barrier, way: str, url: str, worker: int, seconds: float) -> None:
    """Do it again and again; send when it began, when it ended and how long each took."""
    with WAYS[way](url, worker) as once:
        times: list[float] = []
        once(-1)  # the first connects
        barrier.wait(120)
        start = now = time.perf_counter()
        while now < start + seconds:
            once(len(times))
            times.append(-now + (now := time.perf_counter()))
    pipe.send((start, now, times))


def run(way: str, url: str, processes: int, seconds: float, first: int) -> dict[str, Any]:
    """Let processes begin at once; return the rate of all together and each latency."""
    barrier = PROCESSES.Barrier(processes)
    pipes = [PROCESSES.Pipe(duplex=False) for _ in range(processes)]
    workers = [
        PROCESSES.Process(target=hammer, args=(writing, barrier, way, url, first + number, seconds))
        for number, (_, writing) in enumerate(pipes)
    ]
    for worker in workers:
        worker.start()
    for _, writing in pipes:
        writing.close()
    answers = [reading.recv() for reading, _ in pipes]
    for worker in workers:
        worker.join()
    times = [one for _, _, times in answers for one in times]
    elapsed = max(end for _, end, _ in answers) - min(start for start, _, _ in answers)
    return {"rate": len(times) / elapsed, "times": times}


def others() -> float:
    """Return which share of the machine others use, over half a second in which the bench sleeps."""

    def ticks() -> Any:
        return np.array(Path("/proc/stat").read_text().split("\n")[0].split()[1:9], dtype=float)

    before = ticks()
    time.sleep(0.5)
    spent = ticks() - before
    return float(1 - spent[3:5].sum() / spent.sum())  # idle, and waiting for the disk


def rates(databases: dict[str, str], seconds: float, rounds: int) -> list[dict[str, Any]]:
    """Measure every way with every number of processes on every database."""
    from rich.progress import Progress

    jobs = [(base, count, way) for base in databases for count in COUNTS for way in WAYS]
    found: dict[tuple[str, int, str], list[dict[str, Any]]] = {job: [] for job in jobs}
    with Progress(transient=True) as progress:
        task = progress.add_task("measuring", total=rounds * len(jobs))
        for turn in range(rounds):
            for base, count, way in jobs:
                progress.update(task, description=f"{base}, {count} processes, {way}")
                busy = others()
                first = 1000 * (turn * len(jobs) + jobs.index((base, count, way)))
                found[base, count, way].append({**run(way, databases[base], count, seconds, first), "others": busy})
                progress.advance(task)
    return [summary(*job, records) for job, records in found.items()]


def summary(base: str, count: int, way: str, records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the median rate of the rounds, and the latencies of all."""
    milliseconds = 1000 * np.concatenate([record["times"] for record in records])
    return {
        "database": base,
        "processes": count,
        "way": way,
        "per_second": float(np.median([record["rate"] for record in records])),
        "rates": [record["rate"] for record in records],
        "p50_ms": float(np.quantile(milliseconds, 0.5)),
        "p99_ms": float(np.quantile(milliseconds, 0.99)),
        "worst_ms": float(np.max(milliseconds)),
        "debits": len(milliseconds),
        "others": float(np.mean([record["others"] for record in records])),
    }


def growth(base: str, kind: str, urls: tuple[str, str]) -> dict[str, Any]:
    """Time spend number 10,000 of one ledger and number 100 of another, by turns: both see the same machine."""
    from rich.progress import track

    from nearveil.ledger import Ledger

    what = guarantee()

    def timed(account: Any) -> float:
        start = time.perf_counter()
        account.spend(what)
        return time.perf_counter() - start

    with Ledger(urls[0]) as young, Ledger(urls[1]) as old:
        accounts = [open_account(ledger, kind, kind) for ledger in (young, old)]
        way = [timed(accounts[1]) for _ in track(range(LATE - AROUND // 2), f"{base}, {kind}", transient=True)]
        for _ in range(EARLY - AROUND // 2):
            timed(accounts[0])
        pairs = [[timed(account) for account in accounts] for _ in range(AROUND)]
    early, late = 1000 * np.median(pairs, axis=0)
    curve = [1000 * float(np.median(way[start : start + 475])) for start in range(0, len(way), 475)]
    return {
        "database": base,
        "kind": kind,
        "early_ms": early,
        "late_ms": late,
        "ratio": late / early,
        "curve_ms": curve,
    }


def show(records: Sequence[dict[str, Any]], grown: Sequence[dict[str, Any]]) -> None:
    """Print the tables: each way with its ratio to the plain INSERT of the same run."""
    from rich.console import Console
    from rich.table import Table

    console, base = Console(width=120), "plain INSERT"
    plain_rates = {(r["database"], r["processes"]): r["per_second"] for r in records if r["way"] == base}
    grid = Table(title="Durable commits into one account")
    for heading in ("database", "processes", "way", "per second", f"of a {base}", "p50, ms", "p99, ms", "worst, ms"):
        grid.add_column(
            heading, justify="left" if heading in ("database", "way") else "right", no_wrap=heading == "way"
        )
    for r in records:
        ratio = r["per_second"] / plain_rates[r["database"], r["processes"]]
        grid.add_row(
            r["database"], f"{r['processes']}", r["way"], f"{r['per_second']:,.0f}", f"{ratio:.0%}",
            f"{r['p50_ms']:.2f}", f"{r['p99_ms']:.2f}", f"{r['worst_ms']:,.0f}",
        )  # fmt: skip
    console.print(grid)
    console.print(f"Others used {np.mean([r['others'] for r in records]):.0%} of the machine just before the rounds.")
    grid = Table(title=f"Spend number {LATE:,} against number {EARLY}: medians of {AROUND} around, by turns")
    for heading in ("database", "account", f"number {EARLY}, ms", f"number {LATE:,}, ms", "ratio"):
        grid.add_column(heading, justify="left" if heading in ("database", "account") else "right")
    for g in grown:
        grid.add_row(g["database"], g["kind"], f"{g['early_ms']:.2f}", f"{g['late_ms']:.2f}", f"{g['ratio']:.2f}")
    console.print(grid)


def picture(records: Sequence[dict[str, Any]], grown: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw rates as bars, and the time of a spend over its number."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    bars, lines = figure.subplots(1, 2, width_ratios=(3, 2))
    groups = list(dict.fromkeys((r["database"], r["processes"]) for r in records))
    fills = (("0.15", ""), ("0.45", "//"), ("0.9", ""), ("0.7", ".."))
    for index, (way, (grey, hatch)) in enumerate(zip(WAYS, fills, strict=True)):
        heights = [r["per_second"] for r in records if r["way"] == way]
        places = np.arange(len(groups)) + 0.2 * (index - 1.5)
        drawn = bars.bar(places, heights, 0.19, color=grey, hatch=hatch, edgecolor="black", label=way)
        bars.bar_label(drawn, fmt="{:,.0f}", fontsize=7)
    names = [f"{base}\n{count} process{'es' if count > 1 else ''}" for base, count in groups]
    bars.set_xticks(range(len(groups)), names)
    bars.set(ylabel="durable commits per second", yscale="log", title="One account")
    bars.set_ylim(top=5 * max(r["per_second"] for r in records))  # room for the legend
    bars.legend(fontsize=8, ncols=2, loc="upper center")
    for style, g in zip(("k-", "k--", "k:", "k-."), grown, strict=False):
        numbers = 475 * (np.arange(len(g["curve_ms"])) + 0.5)
        lines.plot(numbers, g["curve_ms"], style, label=f"{g['database']}, {g['kind']}")
    lines.set(xlabel="number of the spend", ylabel="median of 475, ms", title="Does it grow?")
    lines.set_ylim(0, 1.6 * max(max(g["curve_ms"]) for g in grown))
    lines.legend(fontsize=8)
    figure.savefig(path, dpi=110)


@contextmanager
def places(folder: Path) -> Iterator[tuple[dict[str, str], dict[str, list[str]]]]:
    """Start a durable PostgreSQL; yield where to measure rates, and enough other places for the growth."""
    from tests.ledger.postgres import Postgres

    class Durable(Postgres):
        """The tests' server does not wait for the disk; this one does."""

        def start(self) -> None:
            options = f"-h '' -k {self._folder} -c max_connections=80"
            self._call("pg_ctl", "-w", "-D", self._data, "-l", str(self._folder / "log"), "-o", options, "start")

    server = Durable()
    try:
        import psycopg

        with psycopg.connect(server.url(), autocommit=True) as connection:
            for number in range(5):
                connection.execute(f"CREATE DATABASE bench{number}".encode())
        sqlite, postgres = ([str(folder / f"{n}.db") for n in range(5)], [server.url(f"bench{n}") for n in range(5)])
        every = {"SQLite": sqlite, "PostgreSQL": postgres}
        yield {base: urls[0] for base, urls in every.items()}, {base: urls[1:] for base, urls in every.items()}
    finally:
        server.remove()


def main() -> None:
    """Measure, print, draw and keep."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder for the JSON and the picture")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each round")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, places(Path(folder)) as (databases, others):
        for url in databases.values():
            prepare(url)
        records = rates(databases, options.seconds, options.rounds)
        grown = [
            growth(base, kind, (urls[2 * number], urls[2 * number + 1]))
            for base, urls in others.items()
            for number, kind in enumerate(("filter", "plan"))
        ]
    show(records, grown)
    options.out.mkdir(parents=True, exist_ok=True)
    kept = {"machine": platform.machine(), "records": records, "growth": grown}
    (options.out / "ledger.json").write_text(json.dumps(kept, indent=1) + "\n")
    picture(records, grown, options.out / "ledger.png")
    print(f"kept in {options.out / 'ledger'}.json and .png")


if __name__ == "__main__":
    main()
