"""What the tests of the page share: a small gallery of pictures, a session, and the page in this process."""

import asyncio
import io
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx")
pytest.importorskip("PIL")
pytest.importorskip("skimage")

import httpx
from PIL import Image

from nearveil import Client
from nearveil.features import HogColor, load_image
from nearveil.features.images import thumbnail
from nearveil.gallery import Index, Item
from nearveil.ledger import Account, Ledger
from nearveil.ui._app import create_app
from nearveil.ui.auth import PAGE_HEADER, PageEntry
from nearveil.ui.session import PageSession, RecordingPayer

PORT = 8322
HOST = f"127.0.0.1:{PORT}"
COUNT = 60
ORIGIN = {"origin": f"http://{HOST}"}


def png(seed: int, size: int = 48) -> bytes:
    """Return a picture: one of six kinds of stripes, in a colour of its own, with some noise."""
    rng = np.random.default_rng(seed)
    kind = seed % 6
    y, x = np.mgrid[:size, :size]
    waves = np.sin((x * np.cos(kind) + y * np.sin(kind)) * (0.2 + 0.1 * kind))
    colour = np.array([(40 * kind) % 256, 200 - 30 * kind, (90 * kind + 60) % 256])
    pixels = colour + 60 * waves[..., None] + rng.integers(-25, 26, (size, size, 3))
    out = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(out, "PNG")
    return out.getvalue()


def make_index(place: Path, fractions: tuple[float, ...] = (0.25, 0.2)) -> Path:
    """Make an index of pictures and publish a map for each fraction; the last is the newest."""
    extractor = HogColor()
    pictures = [load_image(png(number)) for number in range(COUNT)]
    rows = extractor.extract(pictures)
    with Index.create(place, dimension=extractor.dimension, extractor=extractor.fingerprint) as index:
        index.add(Item(row, f"kind {n % 6}/{n}.png", thumbnail(pictures[n])) for n, row in enumerate(rows))
        for fraction in fractions:
            index.publish(4.0, fraction, n_sets=5, reach=0.0)
    return place


def pieces(image: bytes) -> list[bytes]:
    """Return what must be nowhere: stretches of the file, and numbers of its feature in two widths."""
    feature = HogColor().extract([load_image(image)])[0]
    told = feature[np.abs(feature) > 1e-3][:200]
    found = [image[at : at + 16] for at in range(64, len(image) - 16, 16)]
    return found + [np.asarray(part, kind).tobytes() for part in told for kind in ("<f4", "<f8")]


def open_account(ledger: Ledger, name: str, epsilon: float) -> Account:
    return ledger.open_account(
        name, owner="me", protects="query", unit="image", relation="replace", epsilon=epsilon, delta=0.0
    )


@dataclass
class Page:
    """The page in this process, and a browser that knows its cookie."""

    session: PageSession
    entry: PageEntry
    app: Any
    runner: asyncio.Runner
    cookies: dict[str, str] = field(default_factory=dict)
    secret: str = ""

    def request(self, method: str, path: str, *, cookie: bool = True, **more: Any) -> httpx.Response:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            given = dict(self.cookies) if cookie else {}
            more["headers"] = [
                (PAGE_HEADER.encode(), self.secret.encode()),
                *httpx.Headers(more.get("headers", {})).raw,
            ]
            async with httpx.AsyncClient(transport=transport, base_url=f"http://{HOST}", cookies=given) as client:
                return await client.request(method, path, **more)

        return self.runner.run(ask())

    def get(self, path: str, **more: Any) -> httpx.Response:
        return self.request("GET", path, **more)

    def post(self, path: str, content: Any = b"", **more: Any) -> httpx.Response:
        headers = {**ORIGIN, **more.pop("headers", {})}
        return self.request("POST", path, content=content, headers=headers, **more)

    def enter(self) -> None:
        reply = self.get(f"/?t={self.entry.token}", cookie=False)
        assert reply.status_code == 200
        self.take(reply)

    def take(self, reply: httpx.Response) -> None:
        """Keep the cookie and the secret of a reply, as a browser and the page do."""
        (self.secret,) = re.findall(r'name="page-secret" content="([\w-]{43})"', reply.text)
        self.cookies = dict(reply.cookies)

    def ask(self, image: bytes, epsilon: float = 4.0, gallery: str = "local", **more: Any) -> httpx.Response:
        return self.post("/api/ask", image, params={"gallery": gallery, "epsilon": epsilon, **more})

    def again(self, key: str) -> httpx.Response:
        return self.post("/api/again", params={"key": key})

    @property
    def waiting(self) -> list[dict[str, Any]]:
        return list(self.get("/api/about").json()["waiting"])

    @property
    def left(self) -> float:
        return self.session.payer.account.balance().left

    @property
    def debits(self) -> int:
        return sum(entry.kind == "debit" for entry in self.session.payer.account.history())


@contextmanager
def page(folder: Path, where: Any, *, epsilon: float = 12.0, entered: bool = True, **more: Any) -> Iterator[Page]:
    """Run the page in this process, for an index or a gallery, or with a client of one's own."""
    with ExitStack() as stack:
        ledger = stack.enter_context(Ledger(folder / "budget.db"))
        payer = RecordingPayer()
        payer.account = open_account(ledger, "holiday", epsilon)
        options = {
            name: more.pop(name) for name in ("token", "transport", "retries", "extractor", "home") if name in more
        }
        client = stack.enter_context(Client(where, account=payer, **options))
        session, entry = PageSession(client, payer, ledger, "a gallery", **more), PageEntry()
        runner = stack.enter_context(asyncio.Runner())
        found = Page(session, entry, create_app(session, entry, PORT), runner)
        if entered:
            found.enter()
        yield found
