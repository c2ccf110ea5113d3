"""What is written down of a request, and what is not."""

import asyncio
import gc
import io
import json
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nearveil.client.clients import _hide_password
from nearveil.server import logs
from nearveil.server.logs import LOGGERS, JsonLog, install

from ..gallery.index_places import one_thread
from .serving import lines, serving

__all__ = ["one_thread"]  # fixture


def test_a_line_of_each_request_and_nothing_of_what_was_asked(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        stranger = server.token("eve", galleries=["cars"])
        data = server.query(3)
        reply = server.ask(data, key="key-in-a-header", **{"user-agent": "agent-in-a-header"})
        server.ask(b"body-that-is-no-frame" * 3, key="another-key-in-it")
        server.get("/v1/galleries/birds/map?candidates=0.31415", stranger)
        server.get("/nothing-here-at-all?query-string=x", None)
        server.client.request("BREW", "/health")
        server.client.app.state.nearveil.log._queue.join()
        text = lines(tmp_path)
    told = [json.loads(line) for line in text.splitlines()]
    assert [one["event"] for one in told] == ["request"] * 5
    first = told[0]
    assert {key: first[key] for key in ("method", "route", "status", "gallery")} == {
        "method": "POST",
        "route": "/v1/galleries/{gallery}/query",
        "status": 200,
        "gallery": "birds",
    }
    assert first["request"] == reply.headers["nearveil-request"]
    assert first["token"] == server.secret.split("_")[1]
    assert first["bytes"] == len(reply.content)
    assert first["ms"] > 0
    assert first["time"].endswith("+00:00")
    assert set(first) == {"time", "event", "request", "method", "route", "status", "ms", "bytes", "token", "gallery"}
    assert [(one["status"], one["gallery"]) for one in told[1:]] == [
        (400, "birds"),
        (404, None),  # not hers: which one she asked for is not written down
        (404, None),
        (405, None),
    ]
    assert [told[3]["route"], told[4]["method"]] == ["unmatched", "other"]
    for private in (
        "key-in-a-header",
        "another-key",
        "agent-in-a-header",
        "body-that",
        "query-string",
        "nothing-here",
        "0.31415",
        "BREW",
        server.secret[20:],
        server.index.current().published.public_id,
        str(tmp_path),
    ):
        assert private not in text


@contextmanager
def installed(path: Path) -> Iterator[None]:
    """Let libraries log to a file meanwhile."""
    held = {name: (logging.getLogger(name).handlers, logging.getLogger(name).propagate) for name in LOGGERS}
    levels = {name: logging.getLogger(name).level for name in LOGGERS}
    writer = JsonLog(path)
    install(writer, "info")
    try:
        yield
    finally:
        for name, (handlers, propagate) in held.items():
            logging.getLogger(name).handlers, logging.getLogger(name).propagate = handlers, propagate
            logging.getLogger(name).setLevel(levels[name])
        writer.close()


def test_the_event_loop_logs_nothing_of_what_failed(tmp_path: Path) -> None:
    async def failing() -> None:
        raise ValueError("a private value")

    def called(_: str) -> None:
        raise ValueError("a private value")

    async def run() -> None:
        task = asyncio.create_task(failing())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        del task
        gc.collect()
        asyncio.get_running_loop().call_soon(called, "a private argument")
        await asyncio.sleep(0)

    with installed(tmp_path / "log"):
        asyncio.run(run())
    told = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [(one["message"], one["error"]) for one in told] == [("on the event loop", "ValueError")] * 2
    assert all("test_logs.py:" in one["at"] for one in told)
    assert "private" not in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("postgresql://me:hunter2@host:5/index?password=hunter2", "postgresql://me:***@host:5/index"),
        ("https://me:hunter2@host/a", "https://me:***@host/a"),
        ("https://host:8321", "https://host:8321"),
        ("https://me:hunter2@host:hunter2/", "a URL that cannot be read"),
        ("birds", "birds"),
    ],
)
def test_a_client_shows_where_it_asks_without_a_password(where: str, said: str) -> None:
    assert _hide_password(where) == said


def test_libraries_log_to_the_same_lines_without_what_errors_say(tmp_path: Path) -> None:
    with installed(tmp_path / "log"):
        try:
            raise ValueError("a private value")
        except ValueError:
            logging.getLogger("nearveil.anything").exception("it failed")
            logging.getLogger("uvicorn.error").exception("Exception in ASGI application\n")
        logging.getLogger("nearveil").debug("not at this level")
        logging.getLogger("uvicorn.error").info("nor this")
    told = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [one["message"] for one in told] == ["it failed", "Exception in ASGI application"]
    assert {one["error"] for one in told} == {"ValueError"}
    assert all("test_logs.py:" in one["at"] for one in told)
    assert "private" not in (tmp_path / "log").read_text()


def test_a_log_that_is_moved_away_goes_on_in_a_new_file(tmp_path: Path) -> None:
    writer = JsonLog(tmp_path / "log")
    writer.write({"n": 1})
    writer._queue.join()
    (tmp_path / "log").rename(tmp_path / "log.1")
    writer.write({"n": 2})
    writer.close()
    assert [json.loads((tmp_path / name).read_text())["n"] for name in ("log.1", "log")] == [1, 2]


def test_a_log_that_cannot_be_written_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = JsonLog(tmp_path / "no" / "such" / "folder")
    writer.write({"n": 1})
    writer.close()
    assert writer.dropped == 1
    monkeypatch.setattr(logs, "_MAX_QUEUED", 2)
    reading = threading.Event()

    class Stuck(io.StringIO):
        def write(self, text: str) -> int:
            reading.wait(5)
            return len(text)

    monkeypatch.setattr(sys, "stderr", Stuck())
    end = JsonLog()
    for number in range(10):
        end.write({"n": number})
    assert 7 <= end.dropped <= 8
    reading.set()
    end.close()
