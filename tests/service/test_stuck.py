"""Work that never comes back: others are served, it is noticed, and the server still ends."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from nearveil.retrieval import Item
from nearveil.service import _galleries

from ..retrieval.index_places import WEBP, unit_rows
from .serving import index_of, serving
from .test_serve import Process, started


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


def test_a_gallery_that_hangs_is_noticed_and_holds_up_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()

    def hang(_: _galleries.OpenGallery, __: int) -> bytes:
        go.wait()
        return b"late"

    with serving(tmp_path, concurrency=4, work_timeout=0.05) as server:
        monkeypatch.setattr(_galleries.OpenGallery, "original", hang)
        try:
            assert server.get("/health", None).status_code == 200
            assert server.get("/v1/galleries/birds/items/1/original").status_code == 503
            time.sleep(0.1)
            assert server.get("/health", None).status_code == 503  # files have one thread here, and it does not end
            assert server.get("/v1/galleries/birds/map").status_code == 200
            assert server.answer(server.query()).ids.size
            assert server.get("/ready", None).status_code == 200
        finally:
            go.set()
