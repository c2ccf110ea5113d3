"""Count the files of this library that one question walks through: ``python -m tests.walk``.

A served question runs a real server in a thread of this process; a local one asks the same index without a server.
The first question, which opens everything and fetches the map, does not count. Then questions are asked until one
has an answer that was kept and one an answer that is made anew: what is counted are the files of both together.
"""

import asyncio
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import uvicorn
from numpy.typing import NDArray

import nearveil
from nearveil import Client
from nearveil.gallery import Index
from nearveil.ledger import Ledger
from nearveil.server import OpenGallery, Settings, TokenStore, create_app
from tests.gallery.index_places import unit_rows
from tests.service.serving import index_of

_ROOT = Path(nearveil.__file__).parent


class Walk:
    """Notes the files of the library whose functions run, in every thread that begins inside its context."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._is_noting = False

    def __enter__(self) -> "Walk":
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if self._is_noting and event == "call":
            self._seen.add(frame.f_code.co_filename)

    def files(self, work: Callable[[], object]) -> list[str]:
        """Return the files that one piece of work walks through."""
        self._seen.clear()
        self._is_noting = True
        work()
        self._is_noting = False
        inside = (Path(one) for one in self._seen if one.startswith(str(_ROOT)))
        return sorted(str(path.relative_to(_ROOT)) for path in inside)


@contextmanager
def _server(index: Index, folder: Path) -> Iterator[tuple[str, str]]:
    """Serve an index from a thread that is profiled from its first moment."""
    settings = Settings.load(tokens=str(folder / "tokens.db"), log_file=folder / "log.jsonl")
    with TokenStore(settings.tokens) as store:
        secret = store.create("ann")[1]
        app = create_app([OpenGallery(index, "birds")], store, settings)
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
        thread.start()
        while not server.started:
            pass
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}", secret
        server.should_exit = True
        thread.join()


def _walk(walk: Walk, client: Client, row: NDArray[np.float32]) -> list[str]:
    asked = {client.nearest(row, epsilon=0.1).set}

    def ask() -> None:
        kinds: set[bool] = set()
        while len(kinds) < 2:
            named = client.nearest(row, epsilon=0.1).set
            kinds.add(named in asked)
            asked.add(named)

    return walk.files(ask)


def walks(folder: Path) -> dict[str, list[str]]:
    """Return the files of a served and of a local question."""
    index, row = index_of(folder / "birds"), unit_rows(1)[0]
    found: dict[str, list[str]] = {}
    with Ledger(folder / "budget.db") as ledger:
        account = ledger.open_account(
            "mine", owner="me", protects="query", unit="image", relation="replace", epsilon=99.0, delta=0.0
        )

        with Walk() as walk:
            with Client(index, account=account, extractor=None) as client:
                found["local"] = _walk(walk, client, row)
            with (
                _server(index, folder) as (url, secret),
                Client(url, secret, account=account, extractor=None) as client,
            ):
                found["served"] = _walk(walk, client, row)
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as where:
        for name, files in walks(Path(where)).items():
            print(f"a {name} question: {len(files)} files", *files, sep="\n  ")  # noqa: T201
