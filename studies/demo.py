"""``make demo``: a private search of words, then of photographs, and a page to try it.

A server on this machine serves two galleries: English words (:func:`nearveil.datasets.load_words`) and details of
photographs that are free to ship (:mod:`studies.pictures`). A client asks for the neighbours of a private word in three
ways; the table says what the server saw, the price, and the recall of 20 words.
"""

import argparse
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress as Bars
from rich.prompt import Confirm
from rich.table import Column, Table

from studies.pictures import PHOTOGRAPHS, write_details
from studies.serving import Loopback, serve_on_loopback

if TYPE_CHECKING:
    from nearveil.client import Client, Nearest
    from nearveil.ledger import Account
    from nearveil.progress import Progress, Tick

WORD = "hospital"
QUERIES = 20  # private words, which are not in the gallery
DETAILS = 48  # of each photograph
EPSILON = 4.0
K = 10
WAYS = (("home", "local copy"), ("sealed", "sealed query"), ("message", "message"))
_CONFIG = """[[galleries]]
name = "words"
index = "{words}"
offers = ["names", "codes", "sealed"]

[[galleries]]
name = "photos"
index = "{photos}"
offers = ["names", "thumbnails"]
"""

Say = Callable[[str], None]


class Words(NamedTuple):
    """Words of the gallery, and private ones, with their vectors."""

    gallery: list[str]
    rows: NDArray[np.float32]
    private: list[str]
    queries: NDArray[np.float32]


class Way(NamedTuple):
    """Answers that were found in one way, and the seconds of one of them."""

    name: str
    answers: list["Nearest"]
    seconds: float
    downloaded: int  # once, before the first query


def split_words() -> Words:
    """Take private words from all parts of the list, :data:`WORD` first."""
    from nearveil.datasets import load_words

    words, rows = load_words()
    first = words.index(WORD)
    private = [first, *(number for number in range(100, len(words), len(words) // QUERIES) if number != first)][
        :QUERIES
    ]
    others = np.setdiff1d(np.arange(len(words)), private)
    return Words([words[n] for n in others], rows[others], [words[n] for n in private], rows[private])


@contextmanager
def show_bars(console: Console) -> "Iterator[Progress]":
    """Yield a function that starts a progress bar; it shows nothing where the output is no terminal."""
    with Bars(console=console, transient=True, disable=not console.is_terminal) as bars:

        def start(text: str, total: int | None) -> "Tick":
            task = bars.add_task(text, total=total)
            return lambda count: bars.advance(task, count)

        yield start


def build_words(words: Words, folder: Path, progress: "Progress | None" = None) -> None:
    """Index the words."""
    from nearveil import Index

    with Index.create(folder, dimension=words.rows.shape[1], metric="cosine") as index:
        index.add_table(words.rows, names=words.gallery, progress=progress)
        index.publish(EPSILON, progress=progress)


def build_photos(folder: Path, private: Path, index: Path, progress: "Progress | None" = None) -> int:
    """Write the details of photographs as files, and index them with two maps; return how many."""
    from nearveil import Index
    from nearveil.features import HogColor
    from nearveil.gallery.sync import sync_folder

    write_details(folder, private, DETAILS)
    report = sync_folder(folder, index, extractor=HogColor(), epsilon=EPSILON, candidates=0.2, progress=progress)
    with Index.open(index) as gallery:
        gallery.publish(EPSILON, 0.1, progress=progress)
    return report.items


def ask_words(words: Words, server: Loopback, account: "Account", home: Path, say: Say) -> list[Way]:
    """Ask for the neighbours of all private words in every way."""
    from nearveil import Client

    ways = []
    for method, name in WAYS:
        say(f"Ask for {WORD!r} and {QUERIES - 1} other private words: {name}")
        with Client(server.url, server.token, account=account, home=home) as client:
            ways.append(_ask_all(client, words, method, name))
    return ways


def _ask_all(client: "Client", words: Words, method: Any, name: str) -> Way:
    epsilon = EPSILON if method == "message" else None
    if method == "home":
        client.sync(gallery="words")
    first = client.nearest(words.queries[0], K, epsilon, gallery="words", by=method)  # fetches the public part
    started = time.perf_counter()
    answers = [client.nearest(row, K, epsilon, gallery="words", by=method) for row in words.queries[1:]]
    seconds = (time.perf_counter() - started) / len(answers)
    copy = client.home(gallery="words") if method == "home" else None
    once = first.bytes_received - answers[0].bytes_received if copy is None else copy.fetched
    return Way(name, [first, *answers], seconds, once)


def compute_recall(words: Words, answers: list["Nearest"]) -> float:
    """Return the mean share of the true nearest words that were found."""
    order = np.argsort(-(words.queries @ words.rows.T), axis=1)[:, :K]
    shares = [
        len({words.gallery[n] for n in row} & {match.name for match in answer.matches}) / K
        for row, answer in zip(order, answers, strict=True)
    ]
    return float(np.mean(shares))


def show_neighbours(ways: list[Way]) -> Table:
    """Return the neighbours of the first word in each way."""
    table = Table.grid(padding=(0, 2))
    for way in ways:
        table.add_row(f"  {way.name}", ", ".join(match.name for match in way.answers[0].matches))
    return table


def make_table(words: Words, ways: list[Way]) -> Table:
    """Return what each way revealed and cost."""
    right = [Column(name, justify="right") for name in ("epsilon", "recall", "kB once", "kB out", "kB in", "s")]
    table = Table(
        *(Column(name, no_wrap=True) for name in ("way", "the server saw")), *right, box=SIMPLE, padding=(0, 1, 0, 0)
    )
    for way in ways:
        first, later = way.answers[0], way.answers[1]
        sizes = (
            f"{size / 1000:,.{1 if size < 1e4 else 0}f}"
            for size in (way.downloaded, later.bytes_sent, later.bytes_received)
        )
        recall = f"{compute_recall(words, way.answers):.2f}"
        table.add_row(way.name, describe_view(first), f"{first.paid:g}", recall, *sizes, f"{way.seconds:.2f}")
    return table


def describe_view(answer: "Nearest") -> str:
    """Return what the server saw of a query."""
    if answer.sealed:
        return f"noise {answer.sealed[0][22:24].hex(' ')}..."
    return "nothing" if answer.set is None else f"set {answer.set + 1} of {answer.n_sets}"


def ask_photo(server: Loopback, account: "Account", image: Path, path: Path) -> str:
    """Send one message about a private image, and draw the views of server and client; return why no second is sent."""
    from nearveil import Client
    from nearveil.features import load_image
    from nearveil.gallery.contact_sheet import ContactSheet
    from nearveil.ledger import OverBudgetError

    with Client(server.url, server.token, account=account) as client:
        answer = client.nearest(image, 8, EPSILON, gallery="photos", thumbnails=True)
        refusal = ""
        try:
            client.nearest(image, 8, EPSILON, gallery="photos")
        except OverBudgetError as error:
            refusal = str(error)
    assert answer.set is not None
    assert answer.answer is not None
    sheet = ContactSheet(
        query=load_image(image),
        named=answer.set,
        n_sets=answer.n_sets,
        candidates=answer.answer.contents,
        matches=[match.image or b"" for match in answer.matches],
        captions=[f"{Path(match.name).parent}\n{match.similarity:.3f}" for match in answer.matches],
        epsilon=answer.guarantee.epsilon,
    )
    sheet.save(path, force=True)
    return refusal


def offer_page(gallery: Path, out: Path, console: Console) -> None:
    """Open the page on the photographs if a person agrees; else print the command."""
    program = Path(os.path.relpath(Path(sys.executable).parent / "nearveil"))
    command = [str(program), "ui", "--index", str(gallery), "--ledger", str(out / "budget.db")]
    console.print(
        f"\nA page offers the same choice. Drop a picture of {out / 'private'} on it:\n\n    {shlex.join(command)}\n",
        soft_wrap=True,
    )
    if console.is_terminal and sys.stdin.isatty() and Confirm.ask("Open it now?", console=console, default=True):
        os.execv(command[0], command)  # noqa: S606 - the command shown


def main(arguments: list[str] | None = None) -> None:
    """Build the galleries, serve them, ask, and offer the page."""
    parser = argparse.ArgumentParser(description="A private search of words and photographs.")
    parser.add_argument("--out", type=Path, default=Path("out"))
    out: Path = parser.parse_args(arguments).out / "demo"
    console, started = Console(highlight=False), time.perf_counter()

    def say(text: str) -> None:
        console.print(f"[{time.perf_counter() - started:3.0f} s] {text}", markup=False)

    say("Load the library")
    from nearveil.ledger import Ledger

    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    words, private = split_words(), out / "private"
    say(f"Index {len(words.gallery):,} English words by their GloVe vectors")
    with show_bars(console) as progress:
        build_words(words, out / "words", progress)
    say(f"Index {DETAILS} details of each of {len(PHOTOGRAPHS)} free photographs")
    with show_bars(console) as progress:
        n_photos = build_photos(out / "photos", private, out / "gallery", progress)
    config = out / "server.toml"
    config.write_text(_CONFIG.format(words=(out / "words").resolve(), photos=(out / "gallery").resolve()))
    say("Start a server for both galleries")
    with Ledger(out / "budget.db") as ledger, serve_on_loopback("--config", config) as server:
        terms: dict[str, Any] = {"owner": "me", "protects": "query", "unit": "record", "relation": "replace"}
        payer = ledger.open_account("words", **terms, epsilon=QUERIES * EPSILON, delta=0.0)
        ways = ask_words(words, server, payer, out / "copies", say)
        console.print(
            f"\nThe words nearest to {WORD!r}, best first:\n", show_neighbours(ways), make_table(words, ways), sep="\n"
        )
        console.print(
            f"recall: the share of the {K} nearest words that was found, over {QUERIES} private words.\nThe "
            f"message is hidden by differential privacy: at epsilon {EPSILON:g} it changes the odds between any two "
            f"words by at most a factor of {np.exp(EPSILON):.0f}.\n"
        )
        say(f"Ask for the neighbours of a private photograph among {n_photos} by a message")
        account = ledger.open_account("photo", **terms, epsilon=EPSILON, delta=0.0)
        refusal = ask_photo(server, account, private / "chelsea.png", out / "photo.png")
        console.print(f"What the server saw, and what the client got: {out / 'photo.png'}", soft_wrap=True)
        console.print(f"A second message about it is refused: {refusal}")
        console.print(f"The ledger: {ledger.verify()}")
    say("Done")
    offer_page(out / "gallery", out, console)


if __name__ == "__main__":
    main()
