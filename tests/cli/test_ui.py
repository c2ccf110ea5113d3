"""``nearveil ui``: what it refuses before a page is there, who pays, and what it prints."""

import queue
import threading
import webbrowser
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL")
pytest.importorskip("skimage")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

import nearveil.ui
from nearveil.ledger import Ledger
from nearveil.ui._app import PortError, bind_port
from nearveil.ui.session import PageSession
from tests.cli.galleries import fine, gallery, picture, refused, run


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ui")
    gallery(folder / "photos")
    fine("index", folder / "photos", "--into", folder / "index", "--extractor", "hog", "--candidates", 0.2)
    return folder / "index"


@pytest.fixture
def desks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[PageSession, int]]:
    """Take the place of the page: keep the desk that it would be shown for."""
    found: list[tuple[PageSession, int]] = []

    def serve(desk: PageSession, *, port: int, ready: Any, stopping: Any) -> None:
        desk.galleries()
        found.append((desk, port))
        ready(f"http://127.0.0.1:{port}/?t=token")

    monkeypatch.setattr(nearveil.ui, "serve_page", serve)
    return found


def test_an_index_here_and_the_usual_account(index: Path, desks: list[tuple[PageSession, int]], here: Path) -> None:
    text = fine("ui", "--index", index, "--no-browser")
    assert "account queries: budget epsilon 100 at delta 0, spent 0, left 100" in text
    assert text.endswith("http://127.0.0.1:8322/?t=token\n")
    ((desk, port),) = desks
    assert (desk.where, port, desk.purse.account.name) == (str(index), 8322, "queries")
    assert (here / "data" / "nearveil" / "ledger.db").exists()
    assert "account queries" in fine("ui", "--index", index, "--no-browser", "--port", 9000)


def test_the_browser_is_opened_unless_told(
    index: Path, desks: list[tuple[PageSession, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: queue.Queue[str] = queue.Queue()
    answered = threading.Event()

    def browse(address: str) -> None:
        assert answered.wait(30)  # as one that ends when it has shown the page: which must not wait for it, in turn
        opened.put(address)

    monkeypatch.setattr(webbrowser, "open", browse)
    fine("ui", "--index", index, "--no-browser")
    fine("ui", "--index", index)
    answered.set()
    assert opened.get(timeout=30) == "http://127.0.0.1:8322/?t=token"
    assert (opened.qsize(), len(desks)) == (0, 2)


def test_an_account_of_ones_own_and_dummies(index: Path, desks: list[tuple[PageSession, int]], here: Path) -> None:
    with Ledger(here / "mine.db") as ledger:
        ledger.open_account(
            "trip", owner="me", protects="query", unit="image", relation="replace", epsilon=3.0, delta=0.0
        )
    picture(here / "public" / "one.png", (10, 20, 30))
    words = ("--index", index, "--ledger", "mine.db", "--no-browser", "--dummies", "public")
    assert "account trip: budget epsilon 3" in fine("ui", *words, "--account", "trip")
    assert len(desks[0][0]._dummies) == 1
    assert "there is no account 'nobody'" in refused("ui", *words, "--account", "nobody")


def test_what_is_wrong_is_said_before_there_is_a_page(
    index: Path, desks: list[tuple[PageSession, int]], here: Path
) -> None:
    for words, said in {
        ("--index", "nowhere"): "there is no index at",
        ("--server", "birds.example"): "--server: it must look like https://host:8321",
        ("--server", "http://birds.example:1", "--token", "x"): "unless --insecure allows it",
        ("--server", "https://birds.example:1"): "--token: a server needs one",
        ("--index", str(index), "--account", "me"): "there is no ledger",
        ("--index", str(index), "--dummies", "nowhere"): "--dummies: there is no folder",
        ("--index", str(index), "--gallery", "birds"): "--gallery: an index here has one gallery",
    }.items():
        assert said in refused("ui", *words, "--no-browser"), words
    assert run("ui", "--index", index, "--host", "0.0.0.0").exit_code == 2  # noqa: S104 - there is no such option
    assert run("ui", "--index", index, "--port", 70_000).exit_code == 2
    assert desks == []


def test_the_page_listens_on_loopback_alone() -> None:
    with bind_port(0) as sock:
        host, port = sock.getsockname()
        assert host == "127.0.0.1"
        with pytest.raises(PortError, match=f"cannot listen at 127.0.0.1:{port}: .*; --port 0 takes a free one"):
            bind_port(port)
