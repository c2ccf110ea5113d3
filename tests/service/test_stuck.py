"""Work that never comes back: others are served, it is noticed, and the server still ends."""

import asyncio
import fcntl
import json
import os
import signal
import socket
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from nearveil.gallery import Item
from nearveil.server import app, galleries
from nearveil.wire.schema import FRAME, KEY_HEADER

from ..gallery.index_places import WEBP, unit_rows
from .protected import CLASSES, make, published
from .serving import Server, index_of, serving
from .test_serve import Process, started
from .test_workers import FORKED


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    """Run a server of two galleries; the originals of one are files."""
    index_of(tmp_path / "cars").close()
    photos = [tmp_path / f"photo-{number}" for number in range(20)]
    with index_of(tmp_path / "birds") as index:
        for photo in photos:
            photo.write_bytes(b"a photograph")
        index.add([Item(row, "photo", WEBP, path) for row, path in zip(unit_rows(20), photos, strict=True)])
    galleries = [{"name": name, "index": str(tmp_path / name), "offers": ["originals"]} for name in ("birds", "cars")]
    found = started(tmp_path, GALLERIES=json.dumps(galleries), WORK_TIMEOUT="1", SHUTDOWN_GRACE="1")
    yield found
    found.end()


def test_a_pipe_in_place_of_an_original_holds_up_nobody(process: Process, tmp_path: Path) -> None:
    for photo in tmp_path.glob("photo-*"):
        photo.unlink()
        os.mkfifo(photo)
    with httpx.Client(base_url=process.url, headers={"authorization": f"Bearer {process.secret}"}) as client:
        for number in range(60, 80):
            assert client.get(f"/v1/galleries/birds/items/{number}/original").status_code == 404
        assert client.get("/ready").status_code == 200
    process.running.send_signal(signal.SIGTERM)
    assert process.running.wait(20) == 0


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Let the originals of galleries hang, as files on a disk that does not answer."""
    go = threading.Event()

    def hang(_: galleries.OpenGallery, __: int) -> bytes:
        go.wait()
        return b"late"

    monkeypatch.setattr(galleries.OpenGallery, "original", hang)
    yield monkeypatch
    go.set()


def wait_until_stuck(server: Server) -> None:
    until = time.monotonic() + 20
    while server.get("/health", None).status_code == 200:
        assert time.monotonic() < until
        time.sleep(0.05)
    assert server.get("/health", None).status_code == 503


def test_a_gallery_that_hangs_is_noticed_and_holds_up_no_other(tmp_path: Path, hanging: pytest.MonkeyPatch) -> None:
    del hanging
    with serving(tmp_path, concurrency=4, work_timeout=0.5) as server:
        assert server.get("/health", None).status_code == 200
        assert server.get("/v1/galleries/birds/items/1/original").status_code == 503
        wait_until_stuck(server)  # files have one thread here, and it does not end
        assert server.get("/v1/galleries/birds/map").status_code == 200
        assert server.answer(server.query()).ids.size
        assert server.get("/ready", None).status_code == 200


def test_systemd_hears_of_a_server_while_it_can_work(tmp_path: Path, hanging: pytest.MonkeyPatch) -> None:
    hanging.setattr(app, "HEARTBEAT_INTERVAL", 0.01)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd, hanging.context() as within:
        systemd.bind(str(tmp_path / "notify"))
        systemd.setblocking(False)
        within.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        with serving(tmp_path, concurrency=4, work_timeout=0.5) as server:
            server.client.runner.run(asyncio.sleep(0.1))
            assert systemd.recv(1000) == b"READY=1\nWATCHDOG=1"
            assert server.get("/v1/galleries/birds/items/1/original").status_code == 503
            wait_until_stuck(server)
            with suppress(BlockingIOError):
                while systemd.recv(1000):  # what was said before
                    pass
            server.client.runner.run(asyncio.sleep(0.1))
            with pytest.raises(BlockingIOError):
                systemd.recv(1000)


@contextmanager
def locked(path: Path, how: str) -> Iterator[None]:
    """Hold the lock of a database, as a writer that never ends."""
    with closing(sqlite3.connect(path, isolation_level=None, timeout=20)) as writer:
        writer.execute(f"BEGIN {how}")
        yield
        writer.execute("ROLLBACK")


def test_a_writer_that_never_ends_holds_up_nobody_who_reads(tmp_path: Path) -> None:
    """Tokens, an index, a ledger and used keys, each locked by another process while all of them are served."""
    index_of(tmp_path / "birds").close()
    make(tmp_path)
    published(tmp_path, ledger=tmp_path / "votes.db", epsilon=2.0, publications=2).close()
    told = {"kind": "protected", "index": "private", "public": "public", "ledger": "votes.db", "account": "scans"}
    terms = {"classes": CLASSES, "epsilon": 2.0, "delta": 1e-6, "publications": 2}
    galleries = [{"name": "birds", "index": "birds"}, {"name": "scans", **told, **terms}]
    waits = {"DATABASE_TIMEOUT": "1", "SHUTDOWN_GRACE": "1"}
    process = started(tmp_path, "--workers", "2", program=["-c", FORKED], GALLERIES=json.dumps(galleries), **waits)
    reads = ["/health", "/ready", "/metrics", *(f"/v1/galleries{one}" for one in ("", "/birds/map", "/scans/model"))]
    headers = {"authorization": f"Bearer {process.secret}"}
    asked = {**headers, "content-type": FRAME}
    try:
        with httpx.Client(base_url=process.url, headers=headers, timeout=60) as client:

            def ask(key: str) -> int:
                path = "/v1/galleries/birds/query"
                return client.post(path, content=b"no message", headers={**asked, KEY_HEADER: key}).status_code

            for how in ("IMMEDIATE", "EXCLUSIVE"):
                assert ask(f"{how}-a-key-of-a-client") == 400
                with ExitStack() as stack:
                    for name in ("tokens.db", "votes.db", "birds/index.db", "private/index.db"):
                        stack.enter_context(locked(tmp_path / name, how))
                    for path in reads:
                        assert client.get(path).status_code == 200, path
                    assert ask(f"{how}-another-key-of-a-client") == 400
                    with locked(tmp_path / "tokens.db.keys", how):
                        assert ask(f"{how}-a-third-key-of-a-client") == 503  # whether it was used cannot be known
                        assert [client.get(path).status_code for path in reads] == [200] * len(reads)
                    assert ask(f"{how}-a-third-key-of-a-client") == 400
                    if how == "EXCLUSIVE":
                        process.running.send_signal(signal.SIGTERM)
                        assert process.running.wait(30) == 0
    finally:
        process.end()


READ_LOCKS = 123, 5  # bytes of the shared memory of a write-ahead log, by which SQLite keeps its readers apart


@contextmanager
def without_readers(path: Path) -> Iterator[None]:
    """Hold all places that a database has for readers: SQLite tries for ten seconds to get one."""
    with path.with_name(f"{path.name}-shm").open("r+b") as memory:
        first, count = READ_LOCKS
        fcntl.lockf(memory, fcntl.LOCK_EX, count, first)
        yield


def status_of(connection: socket.socket) -> int:
    connection.settimeout(60)
    return int(connection.recv(12)[9:])


@pytest.mark.parametrize("name", ["tokens.db", "birds/index.db"])
def test_a_database_without_a_place_for_readers_holds_up_its_own_requests_alone(
    process: Process, tmp_path: Path, name: str
) -> None:
    headers = {"authorization": f"Bearer {process.secret}"}
    path = "/v1/galleries/birds/map"
    assert httpx.get(process.url + path, headers=headers).status_code == 200
    with process.connect() as waiting, httpx.Client(base_url=process.url, timeout=8) as others:
        with without_readers(tmp_path / name):
            waiting.sendall(process.head(path))
            time.sleep(0.2)
            assert others.get("/health").status_code == 200
            if name != "tokens.db":
                assert others.get("/v1/galleries/cars/map", headers=headers).status_code == 200
        assert status_of(waiting) in (200, 503)  # 503: it took longer than a request waits
        assert others.get("/ready").status_code == 200
