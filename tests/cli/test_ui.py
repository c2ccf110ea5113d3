"""``nearveil ui``: what it refuses before a page is there, who pays, and what it prints."""

import os
import queue
import stat
import tempfile
import threading
import webbrowser
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pytest

pytest.importorskip("PIL")
pytest.importorskip("skimage")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

import nearveil.ui
from nearveil.cli import _ui
from nearveil.ledger import Ledger
from nearveil.ui._app import PortError, bind_port
from nearveil.ui.session import PageSession
from tests.cli.galleries import fine, gallery, refused, run


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
    assert (desk.location, port, desk.payer.account.name) == (str(index), 8322, "queries")
    assert (here / "data" / "nearveil" / "ledger.db").exists()
    assert "account queries" in fine("ui", "--index", index, "--no-browser", "--port", 9000)


@dataclass
class Seen:
    """What a browser was given, and the file behind it while the page was there."""

    argument: str
    text: str
    modes: tuple[int, int]  # of the file and its folder


@pytest.fixture
def browsers(monkeypatch: pytest.MonkeyPatch) -> list[Seen]:
    """Take the place of the page and of browsers; the page ends when a browser has read its file."""
    found: list[Seen] = []
    looked = threading.Event()

    def browse(argument: str) -> None:
        path = Path(url2pathname(urlsplit(argument).path))
        modes = stat.S_IMODE(path.stat().st_mode), stat.S_IMODE(path.parent.stat().st_mode)
        found.append(Seen(argument, path.read_text(), modes))
        looked.set()

    def serve(desk: PageSession, *, port: int, ready: Any, stopping: Any) -> None:
        del desk, stopping
        ready(f"http://127.0.0.1:{port}/?t=token")
        assert looked.wait(30)

    monkeypatch.setattr(webbrowser, "open", browse)
    monkeypatch.setattr(nearveil.ui, "serve_page", serve)
    return found


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
    assert opened.get(timeout=30).startswith("file:///")
    assert (opened.qsize(), len(desks)) == (0, 2)


def test_the_browser_gets_a_private_file_in_place_of_the_token(
    index: Path, here: Path, browsers: list[Seen], monkeypatch: pytest.MonkeyPatch
) -> None:
    created: list[tuple[int, int]] = []
    open_file = os.open

    def record(path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
        if str(path).endswith(".html"):
            created.append((mode, flags & (os.O_CREAT | os.O_EXCL)))
        return open_file(path, flags, mode, **more)

    monkeypatch.setattr(os, "open", record)
    umask = os.umask(0)
    try:
        fine("ui", "--index", index)
    finally:
        os.umask(umask)
    (seen,) = browsers
    assert "token" not in seen.argument
    assert 'content="0;url=http://127.0.0.1:8322/?t=token"' in seen.text
    assert seen.modes == (0o600, 0o700)
    assert created == [(0o600, os.O_CREAT | os.O_EXCL)]  # private from the first moment on
    assert list((here / "data" / "nearveil").glob("*.html")) == []


def test_the_file_is_gone_when_the_page_ends_at_once(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webbrowser, "open", lambda _: None)
    monkeypatch.setattr(threading, "Timer", Mock())  # it would end this process
    with ExitStack() as files:
        _ui._open_browser("http://127.0.0.1:8322/?t=token", files)
        assert len(list((here / "data" / "nearveil").glob("*.html"))) == 1
        _ui._exit_soon(files)
        assert list((here / "data" / "nearveil").glob("*.html")) == []


def test_without_a_file_no_browser_is_opened(index: Path, desks: Any, here: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(webbrowser, "open", Mock(side_effect=AssertionError))
    monkeypatch.setattr(tempfile, "mkstemp", Mock(side_effect=OSError(28, "No space left on device")))
    text = fine("ui", "--index", index)
    assert "No browser was opened: No space left on device. Open the address yourself." in text
    assert len(desks) == 1


def test_an_account_of_ones_own(index: Path, desks: list[tuple[PageSession, int]], here: Path) -> None:
    with Ledger(here / "mine.db") as ledger:
        ledger.open_account(
            "trip", owner="me", protects="query", unit="image", relation="replace", epsilon=3.0, delta=0.0
        )
    words = ("--index", index, "--ledger", "mine.db", "--no-browser")
    assert "account trip: budget epsilon 3" in fine("ui", *words, "--account", "trip")
    assert len(desks) == 1
    assert "No account 'nobody'" in refused("ui", *words, "--account", "nobody")


def test_what_is_wrong_is_said_before_there_is_a_page(
    index: Path, desks: list[tuple[PageSession, int]], here: Path
) -> None:
    for words, said in {
        ("--index", "nowhere"): "No index at",
        ("--server", "birds.example"): "--server: must be a URL such as https://host:8321",
        ("--server", "http://birds.example:1", "--token", "x"): "unless --insecure allows it",
        ("--server", "https://birds.example:1"): "--token: a server needs",
        ("--index", str(index), "--account", "me"): "No ledger",
        ("--index", str(index), "--gallery", "birds"): "--gallery: a local index has one gallery",
    }.items():
        assert said in refused("ui", *words, "--no-browser"), words
    assert run("ui", "--index", index, "--host", "0.0.0.0").exit_code == 2  # noqa: S104 - there is no such option
    assert run("ui", "--index", index, "--port", 70_000).exit_code == 2
    assert desks == []


def test_the_page_listens_on_loopback_alone() -> None:
    with bind_port(0) as sock:
        host, port = sock.getsockname()
        assert host == "127.0.0.1"
        with pytest.raises(PortError, match=f"cannot listen at 127.0.0.1:{port}: .*; use --port 0 for a free port"):
            bind_port(port)
