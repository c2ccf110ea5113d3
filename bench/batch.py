"""Measure questions about many rows against as many single ones, a filter against none, and a change of one item.

One server process on loopback answers as ``nearveil serve`` does. The client waits for its public deadlines, so rates
follow from periods (``nearveil.client.timing``) as well as from work.

    python bench/batch.py --items 200000 --dimension 256 --out out/bench
"""

import argparse
import json
import multiprocessing
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from home import serve, timed
from index import clustered

PROCESSES = multiprocessing.get_context("spawn")
WAYS: dict[str, dict[str, Any]] = {"home": {}, "sealed": {"by": "sealed"}, "message": {"epsilon": 4.0}}
KINDS = 10  # values of the metadata that is filtered by
ROUNDS = 3


def make_gallery(path: Path, items: int, dimension: int) -> None:
    """Create a gallery with external ids and metadata, and publish a map with default terms."""
    from nearveil.features.vectors import VectorTable
    from nearveil.gallery.sync import sync_table

    rows = clustered(items, dimension, 0)
    ids, metadata = [f"doc-{n}" for n in range(items)], [{"kind": n % KINDS} for n in range(items)]
    sync_table(VectorTable(rows, ids, None, metadata), path)


def measure_change(path: Path, row: Any) -> Iterator[tuple[str, float]]:
    """Yield the seconds that ``nearveil index`` takes to delete an item and to add one."""
    from typer.testing import CliRunner

    from nearveil.cli import app

    file = path.parent / "row.npz"
    np.savez(file, vectors=row[None], ids=np.array(["doc-0"]))

    def run(words: list[str]) -> None:
        result = CliRunner().invoke(app, ["index", *words, "--into", str(path)])
        if result.exit_code:
            raise RuntimeError(result.output)

    for name, words in (("delete", ["--delete", "doc-0"]), ("add", [str(file), "--ids", "ids"])):
        yield name, timed(partial(run, words))[0]


def measure_ways(client: Any, queries: Any, ways: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the seconds of single questions and of one about all rows, for each way."""

    def ask_each(options: dict[str, Any]) -> None:
        for row in queries:
            client.nearest(row, **options)

    for way in ways:
        options = WAYS[way]
        client.nearest(queries[0], **options)  # fetches what every question needs
        if way == "sealed":  # work that needs no query
            client.prepare_sealed(4 * len(queries))
        single = min(timed(partial(ask_each, options))[0] for _ in range(2))
        many = min(timed(partial(client.nearest_many, queries, **options))[0] for _ in range(2))
        print(f"{way:8} {len(queries)} single {single:7.2f} s, nearest_many {many:7.2f} s, ratio {single / many:.1f}")
        yield {"way": way, "single_s": single, "many_s": many, "ratio": single / many}


def measure_filter(client: Any, query: Any) -> dict[str, float]:
    """Return the seconds of a search in a local copy without and with a filter."""

    def search(where: Any) -> Callable[[], Any]:
        return lambda: client.nearest(query, where=where)

    plain, filtered = (min(timed(search(where))[0] for _ in range(ROUNDS)) for where in (None, {"kind": 3}))
    return {"plain_s": plain, "filtered_s": filtered, "ratio": filtered / plain}


@contextmanager
def connect(folder: Path, path: Path, offers: tuple[str, ...], account: Any = None) -> Iterator[Any]:
    """Yield a client, with a copy, of a server process that offers `offers`."""
    from nearveil import Client

    here, there = PROCESSES.Pipe()
    process = PROCESSES.Process(
        target=serve, daemon=True, args=(str(path), str(folder / "plain"), there, folder, offers)
    )
    process.start()
    port, _, token = here.recv()
    url = f"http://127.0.0.1:{port}"
    with Client(url, token, home=folder / f"copy{len(offers)}", account=account, timeout=600) as client:
        client.sync()
        yield client
    here.send("end")
    process.join(60)


def measure(folder: Path, path: Path, rows: int, ways: list[str]) -> dict[str, Any]:
    """Measure a gallery."""
    from nearveil.gallery import Index
    from nearveil.ledger import Ledger

    (folder / "plain").write_bytes(b"")
    with Index.open(path) as index:
        items, dimension = len(index), index.dimension
    queries = clustered(rows, dimension, 1)
    record: dict[str, Any] = {"items": items, "dimension": dimension, "rows": rows}
    offers = ("codes", "sealed") if "sealed" in ways else ("codes",)
    with Ledger(folder / "ledger.db") as ledger:
        terms: Any = {"owner": "me", "protects": "query", "unit": "row", "relation": "replace"}
        account = ledger.open_account("me", **terms, epsilon=4000.0, delta=0.0)
        with connect(folder, path, offers, account) as client:
            record["ways"] = list(measure_ways(client, queries, ways))
    with connect(folder, path, ("codes", "metadata")) as client:
        record["where"] = measure_filter(client, queries[0])
    record |= {f"{name}_s": seconds for name, seconds in measure_change(path, queries[0])}
    return record


def main() -> None:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=20_000)
    parser.add_argument("--dimension", type=int, default=256)
    parser.add_argument("--rows", type=int, default=10, help="in one question about many")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--gallery", type=Path, help="a gallery of an earlier run, instead of a new one")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = options.gallery or folder / "gallery"
        if not path.exists():
            seconds, _ = timed(lambda: make_gallery(path, options.items, options.dimension))
            print(f"gallery made in {seconds:.0f} s")
        record = measure(folder, path, options.rows, options.ways)
    where = record["where"]
    print(f"where    {where['filtered_s']:.3f} s, without {where['plain_s']:.3f} s: {where['ratio']:.2f} times")
    print(f"nearveil index: delete one item {record['delete_s']:.2f} s, add one {record['add_s']:.2f} s")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "batch.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
