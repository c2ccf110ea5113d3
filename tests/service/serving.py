"""A small server to test with: a gallery, tokens, and requests to the application in this process."""

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from fastapi import FastAPI

from nearveil.gallery import Index, Item
from nearveil.gallery.answers import Answer, Extras
from nearveil.mechanisms import Message
from nearveil.server import OpenGallery, Settings, TokenStore, create_app
from nearveil.wire.messages import Query
from nearveil.wire.schema import FRAME, KEY_HEADER

from ..gallery.index_places import WEBP, unit_rows

COUNT, F, EPSILON, SETS = 60, 0.25, 4.0, 4
_KEYS = itertools.count()


def index_of(where: str | Path, *, picture: Path | None = None, seed: int = 0) -> Index:
    """Return a new index of 60 items with names, thumbnails and some originals, published."""
    index = Index.create(where, dimension=12, extractor="tests")
    originals: list[Any] = [picture, b"an original", None]
    index.add(
        Item(row, f"item {number}", WEBP + b"%d" % number, originals[number % 3])
        for number, row in enumerate(unit_rows(COUNT, seed=seed))
    )
    index.publish(EPSILON, F, n_sets=SETS, reach=0.0)
    return index


class InProcess:
    """Asks an application in this process, on a loop that runs only meanwhile."""

    def __init__(self, app: FastAPI, runner: asyncio.Runner) -> None:
        self.app, self.runner = app, runner
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self._client = httpx.AsyncClient(transport=transport, base_url="http://localhost")

    def request(self, method: str, path: str, **more: Any) -> httpx.Response:
        return self.runner.run(self._client.request(method, path, **more))

    def get(self, path: str, **more: Any) -> httpx.Response:
        return self.request("GET", path, **more)

    def post(self, path: str, **more: Any) -> httpx.Response:
        return self.request("POST", path, **more)


@dataclass
class Server:
    """The application, what is behind it, and words to ask it."""

    index: Index
    store: TokenStore
    settings: Settings
    gallery: OpenGallery
    secret: str
    client: InProcess
    others: dict[str, str] = field(default_factory=dict)

    def query(self, number: int = 0, extras: Extras = "none") -> bytes:
        """Return the frame of a message that names one set of the newest map."""
        public_id = self.index.current().published.public_id
        return Query(Message("covers", public_id, {"sets": np.array([number], np.int32)}), extras).to_bytes()

    def get(self, path: str, token: str | None = "", **headers: str) -> httpx.Response:
        return self.client.get(path, headers={**self._auth(token), **headers})

    def ask(
        self,
        data: Any,
        *,
        token: str | None = "",
        key: str | None = None,
        gallery: str = "birds",
        kind: str = FRAME,
        **headers: str,
    ) -> httpx.Response:
        own = {"content-type": kind, KEY_HEADER: key or f"test-key-{next(_KEYS)}", **self._auth(token), **headers}
        return self.client.post(f"/v1/galleries/{gallery}/query", content=data, headers=own)

    def answer(self, data: bytes, **more: Any) -> Answer:
        response = self.ask(data, **more)
        assert response.status_code == 200, response.text
        return Answer.from_bytes(response.content)

    def token(self, label: str, **more: Any) -> str:
        return self.store.create(label, **more)[1]

    def _auth(self, token: str | None) -> dict[str, str]:
        return {} if token is None else {"authorization": f"Bearer {token or self.secret}"}


@contextmanager
def serving(folder: Path, index: Index | None = None, **told: Any) -> Iterator[Server]:
    """Run the application in this process, with its start and its end."""
    picture = folder / "picture.jpg"
    picture.write_bytes(b"a picture")
    held = index or index_of(folder / "birds", picture=picture)
    settings = Settings.load(tokens=str(folder / "tokens.db"), log_file=folder / "log.jsonl", **told)
    with TokenStore(settings.tokens) as store:
        gallery = OpenGallery(held, "birds", offers=("names", "thumbnails", "originals"))
        app = create_app([gallery], store, settings)
        _, secret = store.create("ann", scopes=["query", "originals", "metrics"])
        try:
            with asyncio.Runner() as runner:
                life = app.router.lifespan_context(app)
                runner.run(life.__aenter__())
                yield Server(held, store, settings, gallery, secret, InProcess(app, runner))
                runner.run(life.__aexit__(None, None, None))
        finally:
            gallery.close()


def lines(folder: Path) -> str:
    """Return what was logged."""
    log = folder / "log.jsonl"
    return log.read_text() if log.exists() else ""
