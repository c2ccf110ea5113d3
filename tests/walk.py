"""Measure how much of this library one warm question runs through: ``python -m tests.walk``.

A served question runs a real server in a thread of this process; a local one asks the same index without a server.
The first question, which opens everything and fetches the map, does not count. Then two questions are measured: one
with an answer that the gallery has cached, and one with an answer that it must make. The worse figure counts.
"""

import asyncio
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar
from dataclasses import astuple, dataclass
from dis import opmap
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
import uvicorn
from numpy.typing import NDArray

import nearveil
from nearveil import Client
from nearveil.client import Nearest
from nearveil.gallery import Index
from nearveil.ledger import Ledger
from nearveil.server import OpenGallery, Settings, TokenStore, create_app
from nearveil.server import app as app_module
from tests.gallery.index_places import unit_rows
from tests.service.serving import index_of

T = TypeVar("T")
_ROOT = str(Path(nearveil.__file__).parent)
_BEGIN = (opmap["RESUME"], 0)  # the instruction that begins a call; after a yield or an await, its argument is not 0
_FILE: ContextVar[str] = ContextVar("file")  # of the last call; a task or job begins with that of its caller
_ANONYMOUS = {"<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>", "<lambda>", "<module>"}


@dataclass(frozen=True)
class Cost:
    """What a reader of one question pays."""

    functions: int  # distinct functions of the library
    file_changes: int  # consecutive calls of one task or job whose functions are in different files
    depth: int  # frames of the library on one stack

    @staticmethod
    def worst(costs: "list[Cost]") -> "Cost":
        """Return the largest of each figure."""
        return Cost(*(max(figures) for figures in zip(*map(astuple, costs), strict=True)))


class Walk:
    """Record the calls of the library's functions, in every thread that begins inside its context."""

    def __init__(self) -> None:
        self.calls: Counter[CodeType] = Counter()
        self.file_changes: Counter[tuple[str, str]] = Counter()
        self._depth, self._is_recording = 0, False

    def __enter__(self) -> "Walk":
        threading.setprofile(self._record)
        sys.setprofile(self._record)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _record(self, frame: FrameType, event: str, _: Any) -> None:
        code, offset = frame.f_code, frame.f_lasti
        if not self._is_recording or event != "call" or not code.co_filename.startswith(_ROOT):
            return
        if code.co_name in _ANONYMOUS or tuple(code.co_code[offset : offset + 2]) != _BEGIN:
            return
        self.calls[code] += 1
        last = _FILE.get(code.co_filename)
        if last != code.co_filename:
            self.file_changes[last, code.co_filename] += 1
        _FILE.set(code.co_filename)
        depth, caller = 0, frame.f_back
        while caller is not None:
            depth += caller.f_code.co_filename.startswith(_ROOT) and caller.f_code.co_name not in _ANONYMOUS
            caller = caller.f_back
        self._depth = max(self._depth, depth + 1)

    def measure(self, work: Callable[[], T]) -> tuple[Cost, T]:
        """Return the cost and the result of one piece of work."""
        self.calls.clear()
        self.file_changes.clear()
        self._depth, self._is_recording = 0, True
        result = Context().run(work)
        self._is_recording = False
        return Cost(len(self.calls), self.file_changes.total(), self._depth), result

    def list_functions(self) -> list[str]:
        """Return the functions of the last piece of work, by file, with how often each was called."""
        lines = [(code.co_filename[len(_ROOT) + 1 :], code.co_qualname, n) for code, n in self.calls.items()]
        return [f"{path}: {name} x{n}" for path, name, n in sorted(lines)]


@contextmanager
def _server(index: Index, folder: Path) -> Iterator[tuple[str, str, Callable[[], bool]]]:
    """Serve an index from a thread that is profiled from its first moment; yield URL, token, and whether it works."""
    settings = Settings.load(tokens=str(folder / "tokens.db"), log_file=folder / "log.jsonl")
    with (
        patch.multiple(app_module, _POLL_INTERVAL=3600.0, HEARTBEAT_INTERVAL=3600.0),  # no part of a question
        TokenStore(settings.tokens) as store,
    ):
        secret = store.create("ann")[1]
        app = create_app([OpenGallery(index, "birds")], store, settings)
        state = app.state.nearveil
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
        thread.start()
        while not server.started:
            pass
        port = server.servers[0].sockets[0].getsockname()[1]
        lines = state.log._queue
        yield f"http://127.0.0.1:{port}", secret, lambda: any(state.in_flight.values()) or lines.unfinished_tasks > 0
        server.should_exit = True
        thread.join()


def _walk(
    walk: Walk, client: Client, row: NDArray[np.float32], is_busy: Callable[[], bool] = lambda: False
) -> tuple[Cost, list[str]]:
    """Ask until an answer was cached and another was not; return the worst cost, and the functions of both."""

    def ask() -> Nearest:
        result = client.nearest(row, epsilon=0.1)
        while client._portal._asked or is_busy():  # the ends of a question and of its requests are parts of it
            time.sleep(0.001)
        return result

    cached = {ask().set}
    costs: dict[bool, Cost] = {}
    functions: set[str] = set()
    while len(costs) < 2:
        cost, result = walk.measure(ask)
        costs[result.set in cached] = cost
        cached.add(result.set)
        functions.update(walk.list_functions())
    return Cost.worst(list(costs.values())), sorted(functions)


def walks(folder: Path) -> dict[str, tuple[Cost, list[str]]]:
    """Return the costs of a served and of a local question, with their functions."""
    index, row = index_of(folder / "birds"), unit_rows(1)[0]
    costs: dict[str, tuple[Cost, list[str]]] = {}
    with Ledger(folder / "budget.db") as ledger:
        account = ledger.open_account(
            "mine", owner="me", protects="query", unit="image", relation="replace", epsilon=99.0, delta=0.0
        )
        with Walk() as walk:
            with Client(index, account=account, extractor=None) as client:
                costs["local"] = _walk(walk, client, row)
            with (
                _server(index, folder) as (url, secret, is_busy),
                Client(url, secret, account=account, extractor=None) as client,
            ):
                costs["served"] = _walk(walk, client, row, is_busy)
    return costs


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as root:
        for name, (cost, functions) in walks(Path(root)).items():
            print(f"a {name} question: {cost}", *functions, sep="\n  ")  # noqa: T201
