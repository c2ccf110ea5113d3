"""Measure a sealed question over HTTP: one server process and one client on loopback, and what each part takes.

The gallery is made up: rows around centres, with names. A question is one request for scores and one for records, as
``nearveil.Client`` sends them; parts are timed without the pauses that hide how long private work took, and the whole
call with them::

    python bench/sealed_http.py --items 1000000 --out out/bench
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from home import PROCESSES, make_index, serve, timed
from index import clustered

QUESTIONS = 20


def measure(items: int, dimension: int) -> dict[str, Any]:
    """Build a gallery, serve it, ask it."""
    import httpx

    from nearveil import Client
    from nearveil.gallery import Index
    from nearveil.protocol.sealed import open_sealed_index
    from nearveil.protocol.server import serve_maps
    from nearveil.sealed import SealedClient

    rows = clustered(QUESTIONS, dimension, 1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "plain").write_bytes(b"")
        make_index(folder / "index", items, dimension)
        with Index.open(folder / "index") as index:
            built, _ = timed(lambda: open_sealed_index(serve_maps(index, "bench", offers=("names",))[0]))
        size = (folder / "index" / "index.sealed").stat().st_size
        here, there = PROCESSES.Pipe()
        arguments = (str(folder / "index"), str(folder / "plain"), there, ("names", "sealed"))
        process = PROCESSES.Process(target=serve, args=arguments)
        process.start()
        port, _, token = here.recv()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/vnd.nearveil.frame"}
        where = f"http://127.0.0.1:{port}/v1/galleries/bench/sealed"
        parts: dict[str, list[float]] = {}
        with httpx.Client(headers=headers, timeout=600, trust_env=False) as http:
            fetched, frames = timed(lambda: [http.get(f"{where}{end}").content for end in ("", "/0", "/1")])
            client = SealedClient(frames[0], frames[1:])

            def post(number: int, data: bytes) -> bytes:
                reply = http.post(where, content=data, headers={"Nearveil-Key": f"{number:032x}"})
                return reply.raise_for_status().content

            def ask(number: int) -> dict[str, float]:
                taken = {}
                count = 0 if client.layout.records is None else client.layout.records.n_fetched
                taken["ask"], question = timed(partial(client.ask, rows[number]))
                taken["scores"], answer = timed(partial(post, 2 * number, question.data))
                taken["read"], found = timed(partial(client.read_scores, question, answer, count))
                taken["ask_records"], fetch = timed(partial(client.ask_records, [one.position for one in found]))
                taken["records"], answer = timed(partial(post, 2 * number + 1, fetch.data))
                taken["read_records"], _ = timed(partial(client.read_records, fetch, answer))
                sizes.update(question=len(question.data), fetch=len(fetch.data))
                return taken

            sizes: dict[str, int] = {}
            for number in range(QUESTIONS):
                began = time.perf_counter()
                taken = ask(number)
                taken["all"] = time.perf_counter() - began
                for part, seconds in taken.items():
                    parts.setdefault(part, []).append(seconds)
        with Client(f"http://127.0.0.1:{port}", token) as asking:
            asking.nearest(rows[0], 8, epsilon=0, by="sealed")
            paced = [timed(lambda row=row: asking.nearest(row, 8, epsilon=0, by="sealed"))[0] for row in rows[:5]]  # type: ignore[misc]
        here.send("end")
        process.join(60)
    return {
        "items": items, "dimension": client.layout.dimension, "build_s": built, "file_bytes": size,
        "hint_bytes": [len(one) for one in frames[1:]], "first_s": fetched, "bytes": sizes,
        "ms": {part: 1e3 * statistics.median(times) for part, times in parts.items()},
        "least_ms": {part: 1e3 * min(times) for part, times in parts.items()},
        "with_pauses_ms": 1e3 * statistics.median(paced),
    }  # fmt: skip


def main() -> None:
    """Measure, print, and keep it."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--items", type=int, default=100_000)
    options.add_argument("--dimension", type=int, default=64)
    options.add_argument("--out", type=Path, default=Path("out/bench"))
    given = options.parse_args()
    report = measure(given.items, given.dimension)
    print(json.dumps(report, indent=1))
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / f"sealed-http-{given.items}.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
