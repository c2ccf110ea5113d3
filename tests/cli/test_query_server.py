"""``nearveil query --server``: the same words for a gallery elsewhere; and what is new for one here."""

import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL")
pytest.importorskip("skimage")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

import uvicorn

from nearveil import Client
from nearveil.client.session import RetryPolicy
from nearveil.client.timing import EXTRACTION_PERIOD
from nearveil.gallery import Index
from nearveil.ledger import Ledger
from nearveil.server import OpenGallery, Settings, TokenStore, create_app
from nearveil.server.errors import ServiceError
from tests.cli.galleries import colour, fine, gallery, picture, refused, run, told
from tests.clocks import Watched, hurry, watched

__all__ = ["watched"]

SURE = ("--epsilon", 40)  # the set that suits the image is named, but for a chance of 1e-16


@dataclass
class Served:
    """A server on loopback, its gallery and a token for it."""

    url: str
    token: str
    gallery: OpenGallery
    folder: Path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    gallery(folder / "photos")
    fine("index", folder / "photos", "--into", folder / "index", "--extractor", "hog", "--candidates", 0.2)
    with Index.open(folder / "index") as index, TokenStore(folder / "tokens.db") as tokens:
        held = OpenGallery(index, "photos", offers=("names", "thumbnails", "codes"))
        settings = Settings(tokens=str(folder / "tokens.db"), log_file=folder / "log", rate=None)
        server = uvicorn.Server(uvicorn.Config(create_app([held], tokens, settings), log_config=None))
        with socket.create_server(("127.0.0.1", 0)) as listening:
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
            thread.start()
            while not server.started:
                time.sleep(0.01)
            port = listening.getsockname()[1]
            yield Served(f"http://127.0.0.1:{port}", tokens.create("test")[1], held, folder)
            server.should_exit = True
            thread.join()


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


@pytest.fixture
def image(here: Path) -> Path:
    """Return an image that looks like number 7 of the gallery, and is not in it."""
    return picture(here / "private.png", colour(7), seed=1000)


@pytest.fixture
def words(served: Served, here: Path) -> tuple[Any, ...]:
    (here / "token.txt").write_text(f"{served.token}\n")
    (here / "token.txt").chmod(0o600)
    return ("--server", served.url, "--token-file", here / "token.txt")


def debits(here: Path) -> int:
    place = here / "data" / "nearveil" / "ledger.db"
    if not place.exists():
        return 0
    with Ledger(place, read_only=True) as book:
        return sum(entry.kind == "debit" for one in book.accounts() for entry in one.history())


def test_a_server_is_asked_with_the_same_words(image: Path, served: Served, words: tuple[Any, ...], here: Path) -> None:
    far = told("query", image, *SURE, "-k", 3, *words)
    near = told("query", image, *SURE, "-k", 3, "--index", served.folder / "index")
    assert far["found"] == near["found"]
    assert far["server_saw"] == near["server_saw"]
    assert far.keys() == near.keys()
    assert (far["server"], near["server"]) == (served.url, None)
    assert (far["paid"], far["left"], near["left"], far["candidates"]) == (40.0, 60.0, 20.0, 8)
    assert 0 < far["bytes_sent"] < 1000 < far["bytes_received"]


def test_a_token_that_others_may_read_is_reported(image: Path, words: tuple[Any, ...], here: Path) -> None:
    assert "can read the token" not in fine("query", image, "--epsilon", 4, *words)
    (here / "token.txt").chmod(0o644)
    assert "other users can read the token" in fine("query", image, "--epsilon", 4, *words)


def test_a_question_goes_out_when_public_sizes_say_so(image: Path, words: tuple[Any, ...], watched: Watched) -> None:
    seen = set()
    for work in (0.0, 0.0078125, 0.03125):
        watched.work(decoding=work, extracting=work, paying=work, choosing=work, ranking=work)
        fine("query", image, "--epsilon", 4, *words)
        seen.add(tuple(watched.gaps()))
    ((to_map, to_question),) = seen
    assert to_map == ("map", EXTRACTION_PERIOD)
    assert to_question[0] == "query"
    assert to_question[1] > 0.1


def test_the_token_may_come_from_the_environment(
    image: Path, served: Served, monkeypatch: pytest.MonkeyPatch, here: Path
) -> None:
    assert "--token: a server needs" in refused("query", image, "--epsilon", 4, "--server", served.url)
    monkeypatch.setenv("NEARVEIL_TOKEN", served.token)
    asked = ("query", image, "--epsilon", 4, "--server", served.url, "--gallery", "photos", "--key", "mine")
    text = fine(*asked, "--sheet", "found.png")
    saw = told(*asked)["server_saw"]
    assert f"The server saw: set {saw['set']} of {saw['of']}" in text  # one count for people and for programs
    assert 1 <= saw["set"] <= saw["of"]
    assert (here / "found.png").exists()
    assert served.token not in text + fine("query", "--help")


def test_a_wrong_token_is_not_shown_and_costs_nothing(image: Path, served: Served, here: Path) -> None:
    for token in ("nv_0123456789abcdef_wrong", "a b", "x\ny"):
        text = refused("query", image, "--epsilon", 4, "--server", served.url, "--token", token)
        assert "Invalid or revoked token" in text or "--token: a server needs" in text
        assert token not in text
    (here / "bytes").write_bytes(b"\xff" * 2000)
    assert "--token: a server needs" in refused(
        "query", image, "--epsilon", 4, "--server", served.url, "--token-file", "bytes"
    )
    assert "No such file" in refused("query", image, "--epsilon", 4, "--server", served.url, "--token-file", "nowhere")
    assert debits(here) == 0


def test_what_is_refused_costs_nothing(image: Path, served: Served, words: tuple[Any, ...], here: Path) -> None:
    for more, said in {
        (*words, "--gallery", "cars"): "--gallery: there is none named 'cars'; there are photos (open)",
        (*words, "--candidates", "0.5"): "404 unknown",
        (*words, "--candidates", "0"): "--candidates: it must be a fraction",
        (*words, "-k", "9"): "-k: at most 8, the items of an answer",
        (*words, "--extractor", "nothing"): "--extractor must be one of",
        (*words, "--ca", "nowhere.pem"): "--ca: the file of certificates must be there",
        (*words, "--cert", "nowhere.pem"): "--cert: the files of certificate and key must be there",
        (*words, "--cert-key", "nowhere.pem"): "--cert-key: requires --cert",
        ("--server", "http://birds.example", "--token", "x"): "to the network, unless --insecure allows it",
        ("--server", "birds.example", "--token", "x"): "--server: must be a URL such as https://host:8321",
        ("--gallery", "birds"): "--gallery: a local index has one gallery",
    }.items():
        text = refused("query", image, "--epsilon", 4, *more)
        assert said in text, text
        assert "private.png" not in text
    assert debits(here) == 0


def test_nobody_listens(image: Path, words: tuple[Any, ...], here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RetryPolicy, "pause", lambda *_: 0.0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    text = refused("query", image, "--epsilon", 4, *words[2:], "--server", f"http://127.0.0.1:{port}")
    assert "Cannot reach" in text
    assert debits(here) == 0


def test_what_was_paid_for_can_be_asked_again(
    image: Path, served: Served, words: tuple[Any, ...], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RetryPolicy, "pause", lambda *_: 0.0)

    def gone(self: OpenGallery, data: bytes) -> bytes:
        raise ServiceError("unavailable", "the gallery cannot be read now")

    with monkeypatch.context() as patch:
        patch.setattr(OpenGallery, "query", gone)
        text = refused("query", image, "--epsilon", 4, *words)
    assert "the gallery cannot be read now" in text
    key = text.split("with --key ")[1].split()[0]
    found = told("query", image, "--epsilon", 4, *words, "--key", key)
    assert (found["paid"], found["repeated"]) == (0.0, True)
    assert debits(here) == 1


def test_a_certificate_of_ones_own_is_shown(image: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def made(self: Client, *told: Any, **more: Any) -> None:
        given.append(more["certificate"])
        raise ValueError("enough")

    monkeypatch.setattr(Client, "__init__", made)
    asked = ("query", image, "--epsilon", 4, "--server", "https://birds.example", "--token", "x")
    refused(*asked)
    refused(*asked, "--cert", "me.pem")
    refused(*asked, "--cert", "me.pem", "--cert-key", "me.key")
    assert given == [None, Path("me.pem"), (Path("me.pem"), Path("me.key"))]


def test_a_key_of_another_map_is_of_no_use(image: Path, served: Served, here: Path) -> None:
    fine("index", served.folder / "photos", "--into", here / "index", "--extractor", "hog", "--candidates", 0.2)
    fine("query", image, "--epsilon", 4, "--index", here / "index", "--key", "mine")
    fine("index", served.folder / "photos", "--into", here / "index", "--candidates", 0.3)
    text = refused("query", image, "--epsilon", 4, "--index", here / "index", "--key", "mine")
    assert "another map than when this key was paid for" in text
    assert "a new query, with a new key, costs again" in text
    assert debits(here) == 1


def test_a_key_that_paid_for_something_else_is_told_in_words(image: Path, served: Served, here: Path) -> None:
    fine("query", image, "--epsilon", 4, "--index", served.folder / "index", "--key", "mine")
    text = refused("query", image, "--index", served.folder / "index", "--key", "mine", "--epsilon", 1)
    assert "--key was used before, for something else: use another key, or leave out --key" in text


def test_one_ledger_for_queries_and_budgets(image: Path, served: Served, here: Path) -> None:
    text = fine("query", image, "--epsilon", 4, "--index", served.folder / "index")
    assert "See `nearveil budget show`." in text
    assert "queries" in fine("budget", "show")
    fine("budget", "create", "holiday", "--owner", "me", "--epsilon", 8, "--delta", 0)
    assert (
        told("query", image, "--epsilon", 4, "--index", served.folder / "index", "--account", "holiday")["left"] == 4.0
    )
    again = told("query", image, "--epsilon", 4, "--index", served.folder / "index", "--ledger", "my own.db")
    assert again["notes"][0].endswith("See `nearveil budget show --ledger 'my own.db'`.")


def test_who_interrupts_is_told_the_key(
    image: Path, words: tuple[Any, ...], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nearest = Client.nearest

    def interrupted(self: Client, *told: Any, **more: Any) -> Any:
        nearest(self, *told, **more)
        raise KeyboardInterrupt

    monkeypatch.setattr(Client, "nearest", interrupted)
    result = run("query", image, "--epsilon", 4, *words, "--key", "mine")
    assert result.exit_code != 0
    assert "The query is paid for: repeat it at no cost with --key mine" in result.output
    assert debits(here) == 1


def test_a_nameless_image_is_shown_as_such(image: Path, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def unnamed(_: Index, ids: Any, kind: Any) -> list[bytes]:
        del kind
        return [b""] * len(ids)  # deleted while it is asked for

    monkeypatch.setattr(Index, "texts", unnamed)
    found = told("query", image, "--epsilon", 4, "--index", served.folder / "index")
    assert all(one["name"] == f"item {one['id']}" for one in found["found"])


def test_a_copy_is_fetched_by_command_and_searched_for_nothing(
    image: Path, served: Served, words: tuple[Any, ...], here: Path
) -> None:
    assert "nearveil sync" in refused("query", image, "--epsilon", 0, *words)
    fetched = told("sync", served.url, *words[2:])
    assert fetched["items"] == told("sync", *words)["items"] == 40
    assert "URL: give the URL of the server once" in refused("sync")
    assert Path(fetched["folder"]).is_relative_to(here / "data")
    far = told("query", image, "--epsilon", 0, "-k", 3, *words)
    sure = told("query", image, *SURE, "-k", 3, *words)
    pairs = zip(far["found"], sure["found"], strict=True)
    assert all(home["similarity"] >= asked["similarity"] for home, asked in pairs)  # of all items, not of one set
    assert (far["paid"], far["account"], far["server_saw"], far["bytes_sent"]) == (0.0, None, {}, 0)
    assert "The server saw nothing" in fine("query", image, "--epsilon", 0, *words)
    assert "--sheet" in refused("query", image, "--epsilon", 0, "--sheet", "found.png", *words)
    near = told("query", image, "--epsilon", 0, "-k", 3, "--index", served.folder / "index")
    assert [match["id"] for match in near["found"]] == [match["id"] for match in far["found"]]
    assert debits(here) == 1


def test_without_an_epsilon_nothing_is_paid_and_the_ways_are_named(
    image: Path, words: tuple[Any, ...], here: Path
) -> None:
    text = refused("query", image, *words)
    assert "--epsilon: there is no local copy of photos: `nearveil sync` downloads one at no cost" in text
    assert "--epsilon 4, for example, costs 4, from your account" in text
    assert debits(here) == 0
