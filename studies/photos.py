"""``make demo``: a private search among photographs, from files to a contact sheet, by a client and a server.

Photographs of birds if they are on this machine, with the best features that are installed; else the handwritten
digits that scikit-learn carries, which need no decoding. One part is the gallery: it goes into an index, which
publishes a map, and a server on loopback serves it. Twenty others are private: each asks once at every epsilon, as a
client would from anywhere, and an account of its own pays.
"""

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress, track
from rich.table import Column, Table
from sklearn.datasets import load_digits

from nearveil import Client
from nearveil.client import Nearest, QuestionError
from nearveil.features import Extractor, HogColor, default_extractor, gallery_features, load_image
from nearveil.features.extractor import unit_rows
from nearveil.features.gallery import FeatureCache
from nearveil.features.images import Pixels, thumbnail
from nearveil.gallery import Index, Item, Published
from nearveil.gallery.contact_sheet import ContactSheet
from nearveil.ledger import Account, Ledger
from nearveil.metrics import ScoreSpace
from nearveil.search.ceiling import neighbor_ceiling, popular_floor
from nearveil.search.evaluation import Copies, Estimate, count_popularity, estimate_mean, true_neighbors
from nearveil.server import TokenStore
from nearveil.wire.server import serve_maps
from studies.data import DataMissingError, find

_GRACE = 30.0  # seconds to stop


@dataclass(frozen=True)
class Loopback:
    """Where the server is, and what it asks for."""

    url: str
    token: str = field(repr=False)
    process: int


@contextmanager
def serve_on_loopback(index: Path, *options: str) -> Iterator[Loopback]:
    """Serve an index on a free port of loopback; stop when the context ends."""
    with tempfile.TemporaryDirectory() as folder:
        tokens, log = Path(folder) / "tokens.db", Path(folder) / "log"
        with TokenStore(tokens) as store:
            _, token = store.create("demo", scopes=("query",), days=1)
        arguments = ["--port", "0", "--tokens", str(tokens), "--log-file", str(log), *options]
        command = [sys.executable, "-m", "nearveil", "serve", str(index), *arguments]
        # Settings of the one who runs this are for their own server.
        plain = {name: value for name, value in os.environ.items() if not name.startswith("NEARVEIL_SERVER_")}
        plain.pop("NEARVEIL_CONFIG", None)
        plain["NEARVEIL_SERVER_SHUTDOWN_DELAY"] = "0"  # nobody else asks it
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=plain) as process:  # noqa: S603
            try:
                assert process.stdout is not None
                url = process.stdout.readline().split()[-1:]
                if not url:
                    raise RuntimeError(f"the server did not start: exit code {process.wait(_GRACE)}")
                yield Loopback(url[0], token, process.pid)
            finally:
                process.send_signal(signal.SIGTERM)
                code = process.wait(_GRACE)
        if code:
            raise RuntimeError(f"the server stopped with exit code {code}")


PHOTOS = "birds_photos"
EPSILONS = (1.0, 2.0, 4.0, 6.0)
SHOWN = 4.0  # the epsilon of the contact sheet
CANDIDATES = 0.1
QUERIES = 20
K = 8
PAGE_FRACTIONS = (0.2, 0.1)  # of the page; the last is the newest, so it begins with it
PAGE_EPSILON = 4.0
MOST_PAGE_ITEMS = 600  # items of a gallery whose features are made here


@dataclass(frozen=True, eq=False)
class Photos:
    """A gallery and private queries."""

    what: str  # what they are, in words
    extractor: str  # what made their features, in words
    gallery: NDArray[np.float32] = field(repr=False)
    gallery_y: NDArray[np.intp] = field(repr=False)
    queries: NDArray[np.float32] = field(repr=False)
    query_y: NDArray[np.intp] = field(repr=False)
    thumbnails: Sequence[bytes] = field(repr=False)
    pictures: Sequence[Pixels] = field(repr=False)
    names: Sequence[str] = field(repr=False)
    fingerprint: str = ""  # of the extractor; empty where the features are not made of pictures


@dataclass(frozen=True)
class Figures:
    """What was found at one epsilon."""

    recall: Estimate  # how often an item of the query's class is among the K chosen
    nn_recall: Estimate  # the part of the true K nearest items among the K chosen
    fraction: float  # of the gallery in an answer
    floor: float
    ceiling: float
    public_bytes: int
    message_bytes: int
    answer_bytes: int


def load_photos(cache: FeatureCache, console: Console) -> Photos:
    """Return the birds, if they and an extractor are here, else the digits; say which and why."""
    try:
        folder, extractor = find(PHOTOS), default_extractor()
        extractor.extract([np.zeros((32, 32, 3), np.uint8)])  # whether what it needs is installed
        return load_birds(folder, extractor, cache)
    except (DataMissingError, ModuleNotFoundError) as missing:
        console.print(f"no photographs of birds ({missing}): handwritten digits instead", highlight=False)
        return load_digit_photos()


def load_birds(folder: Path, extractor: Extractor, cache: FeatureCache) -> Photos:
    """Return photographs: the last of each species is private, the others are the gallery."""
    species = sorted(path for path in folder.iterdir() if path.is_dir())
    each = [sorted(path.glob("*.jpg")) for path in species]
    private = [files.pop() for files in each if files][:QUERIES]
    files = [path for part in each for path in part]
    with Progress(transient=True) as progress:
        task = progress.add_task("features", total=len(files))
        made = gallery_features(files, extractor, cache=cache, tick=lambda count: progress.advance(task, count))
    pictures = [load_image(path) for path in private]
    labels = {path: number for number, path in enumerate(species)}
    return Photos(
        what=f"photographs of {len(species)} species of birds",
        extractor=extractor.name,
        gallery=made.features,
        gallery_y=np.array([labels[path.parent] for path in made.paths], dtype=np.intp),
        queries=extractor.extract(pictures),
        query_y=np.array([labels[path.parent] for path in private], dtype=np.intp),
        thumbnails=[thumbnail(load_image(path)) for path in made.paths],
        pictures=pictures,
        names=[f"{path.parent.name}/{path.name}" for path in made.paths],
        fingerprint=extractor.fingerprint,
    )


def load_digit_photos() -> Photos:
    """Return scikit-learn's handwritten digits; their features are their pixels."""
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    rows = unit_rows(data.data[order])[0]
    y = data.target[order].astype(np.intp)
    ink = np.kron(data.images[order], np.ones((8, 8)))  # 64 x 64 pixels, as thumbnails are
    pixels = np.repeat((255 - ink * (255 / 16)).astype(np.uint8)[..., None], 3, axis=-1)
    return Photos(
        what="handwritten digits",
        extractor="their pixels",
        gallery=rows[QUERIES:],
        gallery_y=y[QUERIES:],
        queries=rows[:QUERIES],
        query_y=y[:QUERIES],
        thumbnails=_make_thumbnails(pixels[QUERIES:]),
        pictures=list(pixels[:QUERIES]),
        names=[f"digit {label}" for label in y[QUERIES:]],
    )


def _make_thumbnails(pixels: NDArray[np.uint8]) -> list[bytes]:
    try:
        return [thumbnail(image) for image in pixels]
    except ModuleNotFoundError:
        return [b""] * len(pixels)


def build(data: Photos, path: Path) -> Index:
    """Put the gallery into a new index."""
    index = Index.create(path, dimension=data.gallery.shape[1], extractor=data.extractor)
    index.add(Item(row, thumbnail=image) for row, image in zip(data.gallery, data.thumbnails, strict=True))
    return index


def ask(server: Loopback, feature: NDArray[np.float32], epsilon: float, account: Account) -> Nearest:
    """Ask one question as a client would: the account pays, then the server sees requests for its map and a message."""
    with Client(server.url, server.token, account=account) as client:
        return client.nearest(feature, K, epsilon, thumbnails=True)


def _compare_all(data: Photos, space: ScoreSpace) -> tuple[NDArray[np.float32], NDArray[np.intp]]:
    """Return the encoded rows of the gallery, and the true neighbours of each query by the metric."""
    gallery = space.encode(data.gallery).astype(np.float32)
    return gallery, true_neighbors(space.make_queries(space.encode(data.queries)).astype(np.float32), gallery, K)


def _list_ids(answers: Sequence[Nearest]) -> NDArray[np.int64]:
    return np.array([[match.id for match in answer.matches] for answer in answers])


def measure(data: Photos, published: Published, answers: Sequence[Nearest], public_bytes: int) -> Figures:
    """Compare what was found with labels, true neighbours and ceilings, as :func:`nearveil.search.evaluate` does."""
    gallery, truth = _compare_all(data, published.space)
    chosen = _list_ids(answers)
    hits = (data.gallery_y[chosen] == data.query_y[:, None]).any(axis=1)
    fraction = published.map.set_size / len(gallery)
    counts = count_popularity(gallery, K, published.space)
    return Figures(
        recall=estimate_mean(hits.astype(np.float64), 0.95),
        nn_recall=estimate_mean(Copies(gallery).recall(truth, chosen), 0.95),
        fraction=fraction,
        floor=popular_floor(fraction, counts),
        ceiling=neighbor_ceiling(published.release.epsilon, fraction, counts),
        public_bytes=public_bytes,
        message_bytes=max(entry.bytes_sent for entry in answers),
        answer_bytes=max(entry.bytes_received for entry in answers) - public_bytes,
    )


def ask_in_three_ways(data: Photos, published: Published, server: Loopback, account: Account, home: Path) -> Table:
    """Ask the same pictures by a message, at home, and by sealed questions; return the ways side by side."""
    gallery, truth = _compare_all(data, published.space)
    sizes = (Column(heading, justify="right") for heading in ("found", "epsilon", "kept", "up", "down", "s"))
    title = f"The same pictures in three ways: NN-recall@{K}; bytes and seconds of one question"
    shown = Table("way", "the server saw", *sizes, title=title)
    ways: Any = (("message", SHOWN), ("home", 0.0), ("sealed", 0.0))
    for way, epsilon in ways:
        with Client(server.url, server.token, account=account, home=home) as client:
            if way == "home":
                client.sync()
            try:
                first = client.nearest(data.queries[0], K, epsilon, by=way)
            except QuestionError as error:  # cryptography is not installed
                shown.add_row(way, str(error))
                continue
            started = time.perf_counter()
            answers = [client.nearest(row, K, epsilon, by=way) for row in data.queries[1:]]
            seconds = (time.perf_counter() - started) / len(answers)
        sent, received = (
            np.mean([getattr(answer, name) for answer in answers]) for name in ("bytes_sent", "bytes_received")
        )
        copy = client.home()
        fetched = copy.fetched if way == "home" and copy is not None else first.bytes_received - received
        recall = Copies(gallery).recall(truth[1:], _list_ids(answers)).mean()
        kilobytes = (f"{size / 1000:,.0f} kB" for size in (fetched, sent, received))
        shown.add_row(way, _describe_seen(first), f"{recall:.2f}", f"{epsilon:g}", *kilobytes, f"{seconds:.2f}")
    return shown


def make_table(data: Photos, results: dict[float, Figures]) -> Table:
    """Return what was found at each epsilon."""
    headings = ("epsilon", f"Recall@{K}", f"NN-recall@{K}", "floor", "ceiling", "f")
    title = f"{QUERIES} private {data.what} ask a gallery of {len(data.gallery):,}; in brackets 95% intervals"
    shown = Table(*(Column(heading, justify="right") for heading in headings), title=title)
    for epsilon, entry in results.items():
        shown.add_row(
            f"{epsilon:g}",
            *(f"{part.value:.2f} ({part.low:.2f}-{part.high:.2f})" for part in (entry.recall, entry.nn_recall)),
            *(f"{value:.2f}" for value in (entry.floor, entry.ceiling, entry.fraction)),
        )
    return shown


def score_without_privacy(data: Photos) -> float:
    """Return Recall@K of a search that sees the queries."""
    _, truth = _compare_all(data, ScoreSpace.fit("cosine", data.gallery))
    return float((data.gallery_y[truth] == data.query_y[:, None]).any(axis=1).mean())


def _describe_seen(answer: Nearest) -> str:
    """Return what the server saw of a question."""
    if answer.sealed:
        return f"noise: {answer.sealed[0][22:25].hex(' ')} ..."
    return "nothing" if answer.set is None else f"set {answer.set + 1} of {answer.n_sets}"


def draw_sheet(data: Photos, answer: Nearest, number: int) -> bytes:
    """Draw the contact sheet of one question."""
    assert answer.set is not None
    assert answer.answer is not None
    kinds = ("same" if data.gallery_y[match.id] == data.query_y[number] else "another" for match in answer.matches)
    return ContactSheet(
        query=data.pictures[number],
        named=answer.set,
        n_sets=answer.n_sets,
        candidates=answer.answer.contents,
        matches=tuple(match.image or b"" for match in answer.matches),
        captions=[f"{kind} kind\n{match.similarity:.3f}" for kind, match in zip(kinds, answer.matches, strict=True)],
        epsilon=answer.guarantee.epsilon,
    ).to_png()


def run(data: Photos, folder: Path, console: Console) -> tuple[dict[float, Figures], bytes]:
    """Index, publish, ask, measure."""
    results: dict[float, Figures] = {}
    drawn = b""
    path = folder / "index"
    with build(data, path) as index, Ledger(folder / "ledger.db") as ledger:
        published = index.publish(EPSILONS[0], CANDIDATES, reach=0.0)
        terms: dict[str, Any] = {"owner": "me", "protects": "query", "unit": "image", "relation": "replace"}
        accounts = [
            ledger.open_account(f"image {number + 1}", **terms, epsilon=sum(EPSILONS), delta=0.0)
            for number in range(len(data.queries))
        ]
        with serve_on_loopback(path, "--offer", "codes", "--offer", "sealed") as server:
            console.print(f"A server at {server.url}; {len(accounts)} clients ask it.")
            for epsilon in track(EPSILONS, "asking", transient=True):
                if published.release.epsilon != epsilon:  # while the index is served: the next question is about it
                    published = index.publish(epsilon, CANDIDATES, reach=0.0)
                answers = [ask(server, row, epsilon, who) for row, who in zip(data.queries, accounts, strict=True)]
                public = serve_maps(index, path.name)[0].make_public_part().to_bytes()
                results[epsilon] = measure(data, published, answers, len(public))
                if epsilon == SHOWN or not drawn:
                    drawn = draw_sheet(data, answers[0], 0)
            payer = ledger.open_account("three ways", **terms, epsilon=SHOWN * len(data.queries), delta=0.0)
            console.print(ask_in_three_ways(data, published, server, payer, folder / "home"))
        console.print("The server has stopped.")
        console.print(f"Every image has an account of its own, which paid first; {accounts[0].balance()}.")
        console.print(f"The ledger: {ledger.verify()}")
    return results, drawn


def add_extractor(data: Photos) -> Photos:
    """Return a gallery whose features can be made of a file that is dropped: digits become pictures."""
    if data.fingerprint:
        return data
    extractor, first = HogColor(), slice(MOST_PAGE_ITEMS)
    features = extractor.extract([load_image(image) for image in data.thumbnails[first]])
    parts = {name: getattr(data, name)[first] for name in ("gallery_y", "thumbnails", "names")}
    return replace(data, extractor=extractor.name, fingerprint=extractor.fingerprint, gallery=features, **parts)


def keep_gallery(data: Photos, out: Path) -> tuple[Path, Path]:
    """Make the gallery anew, and write the private pictures beside it."""
    from PIL import Image

    gallery, pictures = out / "gallery", out / "pictures"
    for old in (gallery, pictures):
        shutil.rmtree(old, ignore_errors=True)
    with Index.create(gallery, dimension=data.gallery.shape[1], extractor=data.fingerprint) as index:
        index.add(
            Item(row, name, image) for row, name, image in zip(data.gallery, data.names, data.thumbnails, strict=True)
        )
        for fraction in PAGE_FRACTIONS:
            index.publish(PAGE_EPSILON, fraction, reach=0.0)
    pictures.mkdir()
    for number, picture in enumerate(data.pictures):
        Image.fromarray(picture).save(pictures / f"{number + 1:02}.png")
    return gallery, pictures


def offer_page(data: Photos, out: Path, console: Console) -> None:
    """Keep the gallery and the private pictures, and say how to open the page on them."""
    try:
        import nearveil.ui  # noqa: F401

        gallery, pictures = keep_gallery(add_extractor(data), out)
    except ModuleNotFoundError as missing:
        console.print(f'The page needs more ({missing}): pip install "nearveil[images,service]"')
        return
    program = Path(os.path.relpath(Path(sys.executable).parent / "nearveil"))
    command = shlex.join([str(program), "ui", "--index", str(gallery), "--ledger", str(out / "budget.db")])
    console.print(
        f"To see what a server sees, open the page and drop a picture of {pictures} on it:\n\n    {command}\n",
        soft_wrap=True,
    )


def main(arguments: list[str] | None = None) -> None:
    """Index, ask, print, and draw."""
    parser = argparse.ArgumentParser(description="A private search among photographs, or digits where there are none.")
    parser.add_argument("--out", type=Path, default=Path("out"))
    out: Path = parser.parse_args(arguments).out
    out.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False)
    data = load_photos(FeatureCache(out / "photos.features"), console)
    console.print(
        f"{len(data.gallery):,} {data.what} in the gallery, {len(data.queries)} private ones; features: "
        f"{data.extractor}, {data.gallery.shape[1]:,} dimensions"
    )
    with tempfile.TemporaryDirectory() as folder:
        results, drawn = run(data, Path(folder), console)
    console.print(make_table(data, results))
    console.print(
        f"f is the part of the gallery in an answer. The floor asks nothing; nothing private passes the ceiling, but "
        f"for luck with {len(data.queries)} queries. A search that sees the images has Recall@{K} "
        f"{score_without_privacy(data):.3f}, and its NN-recall@{K} is 1."
    )
    largest = max(results.values(), key=lambda entry: entry.answer_bytes)
    console.print(
        f"Over the wire: {largest.public_bytes / 1000:,.0f} kB of public map once, then {largest.message_bytes} bytes "
        f"out and {largest.answer_bytes / 1000:,.0f} kB back for a question."
    )
    path = out / "photos.png"
    path.write_bytes(drawn)
    console.print(f"contact sheet: {path}")
    offer_page(data, out, console)


if __name__ == "__main__":
    main()
