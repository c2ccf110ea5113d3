"""Servers of bad will: every reply is read within limits, and what is said of it depends on the reply alone."""

import asyncio
import gzip
import json
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from nearveil import AsyncClient, Client
from nearveil.client.errors import ReplyError, UnansweredError, UnreachableError
from nearveil.client.transport import ENDPOINTS
from nearveil.gallery import answers as _answer
from nearveil.gallery import codes as _codes
from nearveil.gallery.answers import Answer
from nearveil.mechanisms.covers import maps as _map
from nearveil.private_knn import published
from nearveil.wire import frames as _wire
from nearveil.wire import schema
from nearveil.wire.frames import MOST_FEATURES, Kind, frame
from nearveil.wire.messages import MapChanged, Refusal, RefusalCode
from nearveil.wire.schema import FRAME
from tests.service.asking import (
    CANDIDATES,
    QUERIES,
    Endless,
    Scene,
    framed,
    head_of,
    is_post,
    make_index,
    public_of,
    raw_server,
    scene,
)

IDS = np.arange(CANDIDATES, dtype=np.uint32)
NAMES = tuple(b"bird %d" % n for n in range(CANDIDATES))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_index(tmp_path_factory.mktemp("made") / "birds")


@pytest.fixture(scope="module")
def here(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with scene(made, tmp_path_factory.mktemp("here"), epsilon=500.0) as found:
        yield found


@pytest.fixture(autouse=True)
def no_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)


@pytest.fixture
def unpaid(here: Scene) -> Iterator[None]:
    """Check that a test costs nothing."""
    before = here.paid
    yield
    assert here.paid == before


def answer(here: Scene, count: int = CANDIDATES, wider: int = 0, extras: Any = "names", contents: Any = NAMES) -> bytes:
    codes = np.zeros((count, public_of(here.gallery).table.width + wider), np.uint8)
    return Answer(np.arange(count, dtype=np.uint32), codes, extras, contents).to_bytes()


def with_names(here: Scene, name: bytes) -> bytes:
    """Return an answer with one bad name, its checksum right."""
    good = answer(here, contents=(b"x" * len(name), *NAMES[1:]))
    return frame(Kind.ANSWER, good[14:].replace(b"x" * len(name), name, 1), flags=3)


Reply = Callable[[Scene], httpx.Response]
QUERY_REPLIES: dict[str, tuple[Reply, str]] = {
    "too few": (lambda s: framed(answer(s, CANDIDATES - 1, contents=NAMES[1:])), "must hold 12 candidates"),
    "too many": (lambda s: framed(answer(s, CANDIDATES + 1, contents=(b"", *NAMES))), "must hold 12 candidates"),
    "wider codes": (lambda s: framed(answer(s, wider=1)), "must have codes of"),
    "other extras": (lambda s: framed(answer(s, extras="originals")), "must have names as extras"),
    "no extras": (lambda s: framed(answer(s, extras="none", contents=())), "must have names as extras"),
    "no UTF-8": (lambda s: framed(with_names(s, b"\xff\xfe")), "names must be UTF-8"),
    "an escape": (lambda s: framed(with_names(s, b"\x1b[2J")), "without control characters"),
    "a line break": (lambda s: framed(with_names(s, b"a\nb")), "without control characters"),
    "empty": (lambda _: framed(b""), "not of the nearveil protocol"),
    "truncated": (lambda s: framed(answer(s)[:-1]), "truncated"),
    "longer": (lambda s: framed(answer(s) + b"\0"), "after its end"),
    "another kind": (lambda s: framed(s.gallery.map()), "not expected here"),
    "a refusal as 200": (lambda _: framed(Refusal(RefusalCode.FAILED, "no disk").to_bytes()), "no disk"),
    "an answer as 400": (lambda s: framed(answer(s), 400), "not that of a nearveil server"),
    "a page": (lambda _: framed(b"<html>", 200, "text/html"), "not that of a nearveil server"),
    "no type": (lambda s: framed(answer(s), 200, ""), "not that of a nearveil server"),
    "JSON for a frame": (lambda _: framed(b"{}", 200, "application/json"), "not that of a nearveil server"),
    "a problem": (
        lambda _: framed(b'{"code": "x", "message": "\\u001b[2Jno."}', 403, "application/json"),
        r"declined \(403 x\): \?\[2Jno\.",
    ),
    "no problem": (lambda _: framed(b'{"code": [1]}', 403, "application/json"), "without the reason"),
    "deep JSON": (lambda _: framed(b"[" * 60_000, 403, "application/json"), "without the reason"),
    "server error": (lambda _: framed(b"", 500, "text/plain"), r"reply \(500\) is not"),
    "strange status": (lambda _: framed(b"", 299, FRAME), "not that of a nearveil server"),
    "packed": (
        lambda _: framed(gzip.compress(bytes(1 << 20)), 200, FRAME, **{"content-encoding": "gzip"}),
        "compressed, but",
    ),
    "claims to be huge": (
        lambda _: framed(b"", 200, FRAME, **{"content-length": "999999999"}),
        "larger than 19[0-9]{4} bytes",
    ),
    "endless": (
        lambda _: httpx.Response(200, headers={"content-type": FRAME}, stream=Endless()),
        "larger than 19[0-9]{4} bytes",
    ),
}


@pytest.mark.parametrize("case", QUERY_REPLIES)
def test_what_is_said_of_an_answer_depends_on_the_answer_alone(here: Scene, case: str) -> None:
    make, words = QUERY_REPLIES[case]

    def hostile(request: httpx.Request, reply: httpx.Response) -> httpx.Response:
        return make(here) if is_post(request) else reply

    client, wire = here.client(hostile)
    said = set()
    for number, row in enumerate([*QUERIES[:3], -QUERIES[0], np.full(8, 1e-30), np.full(8, 1e6)]):
        with pytest.raises(UnansweredError, match=words) as raised:
            client.nearest(row, 3, 0.5, key=f"{case} {number}")
        said.add(raised.value.reason)
        assert str(raised.value).isprintable()
    assert len(said) == 1
    assert len(wire.posts) == 6  # nothing is sent again, or afterwards


def test_an_answer_that_does_not_end_is_not_kept(here: Scene) -> None:
    body = Endless()

    def endless(request: httpx.Request, reply: httpx.Response) -> httpx.Response:
        return httpx.Response(200, headers={"content-type": FRAME}, stream=body) if is_post(request) else reply

    client, _ = here.client(endless)
    client.galleries()
    tracemalloc.start()
    try:
        with pytest.raises(UnansweredError, match="larger than"):
            client.nearest(QUERIES[0], epsilon=4.0)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert body.taken < 1 << 19


def info(**changed: Any) -> bytes:
    one = {
        "name": "birds",
        "kind": "open",
        "candidates": [0.1],
        "offers": ["names"],
        "extractor": "",
        "fingerprint": "toy",
        "dimension": 8,
        "revision": 1,
    }
    return json.dumps({"galleries": [one | changed]}).encode()


@pytest.mark.usefixtures("unpaid")
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"null",
        b"\xff",
        b"[" * 60_000,
        b'{"galleries": 3}',
        b'{"galleries": [], "more": 1}',
        info(name="../etc/passwd"),
        info(name="birds\n"),
        info(kind="both"),
        info(dimension="many"),
        info(dimension=0),
        info(dimension=16_001),
        info(revision=-1),
        info(revision=1 << 64),
        info(candidates=[0.1] * 101),
        info(candidates=[1.5]),
        info(offers=["names"] * 9),
        json.dumps({"galleries": json.loads(info())["galleries"] * 1001}).encode(),
        info(candidates=["x"]),
        info(offers=["secrets"]),
        info(extractor="\x1b[2J"),
        info(fingerprint="x" * 2000),
    ],
)
def test_lists_of_galleries_that_are_none(here: Scene, body: bytes) -> None:
    def hostile(request: httpx.Request, reply: httpx.Response) -> httpx.Response:
        return framed(body, 200, "application/json") if request.url.path.endswith("/galleries") else reply

    client, wire = here.client(hostile)
    with pytest.raises(ReplyError, match=r"not that of a nearveil server|unprintable"):
        client.nearest(QUERIES[0], epsilon=4.0)
    assert len(wire.requests) == 1


@pytest.mark.usefixtures("unpaid")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda _: framed(b"", 304), "is not that of a nearveil server|redirects"),
        (lambda _: framed(b"NVW", 200), "not of the nearveil protocol"),
        (lambda s: framed(s.gallery.map()[:-1], 200), "truncated"),
        (lambda s: framed(s.gallery.map(), 200, "text/plain"), "not that of a nearveil server"),
        (lambda s: framed(s.gallery.map(), 206), "not that of a nearveil server"),
        (lambda _: framed(MapChanged("birds", 1).to_bytes(), 200), "not expected here"),
        (lambda _: framed(b'{"code": "unknown", "message": "no"}', 404, "application/json"), "404 unknown"),
        (lambda _: framed(b"", 200, FRAME, **{"content-length": "99999999"}), "larger than"),
    ],
)
def test_maps_that_are_none_cost_nothing(here: Scene, make: Reply, words: str) -> None:
    def hostile(request: httpx.Request, reply: httpx.Response) -> httpx.Response:
        return make(here) if request.url.path.endswith("/map") else reply

    client, wire = here.client(hostile)
    with pytest.raises(ValueError, match=words):
        client.nearest(QUERIES[0], epsilon=4.0)
    assert wire.posts == []


@pytest.mark.usefixtures("unpaid")
def test_the_map_of_another_fraction_is_refused(here: Scene) -> None:
    def hostile(request: httpx.Request, reply: httpx.Response) -> httpx.Response:
        return framed(here.gallery.map()) if request.url.path.endswith("/map") else reply

    client, _ = here.client(hostile)
    with pytest.raises(ReplyError, match="another fraction"):
        client.nearest(QUERIES[0], epsilon=4.0, candidates=0.3)


@pytest.mark.parametrize("etag", ['"a\r\nX: y"', "naked", '"' + "x" * 300 + '"', '"ü"', ""])
def test_tags_that_cannot_stand_in_a_header_are_dropped(here: Scene, etag: str) -> None:
    def hostile(request: httpx.Request, reply: httpx.Response) -> httpx.Response:
        if request.url.path.endswith("/map"):
            reply.headers["etag"] = etag
        return reply

    client, wire = here.client(hostile)
    for _ in range(2):
        client.nearest(QUERIES[0], 3, epsilon=4.0)
    sent = [dict(headers).get(b"If-None-Match") for _, url, headers, _ in wire.requests if url.endswith("/map")]
    assert sent == [None, None]


def drip(connection: socket.socket, start: bytes, piece: bytes) -> None:
    """Send a start, then a piece now and then, without an end."""
    head_of(connection)
    connection.sendall(start)
    for _ in range(200):
        connection.sendall(piece)
        threading.Event().wait(0.05)


SLOW: dict[str, Callable[[socket.socket], None]] = {
    "says nothing": lambda connection: drip(connection, b"", b""),
    "headers without an end": lambda connection: drip(connection, b"HTTP/1.1 200 OK\r\nX: ", b"x"),
    "continues for ever": lambda connection: drip(connection, b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "a body by drops": lambda connection: drip(
        connection, b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 9999\r\n\r\n", b" "
    ),
    "chunks by drops": lambda connection: drip(
        connection,
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"1\r\n \r\n",
    ),
}


@pytest.mark.parametrize("way", SLOW)
def test_a_slow_server_does_not_keep_a_client(way: str) -> None:
    """Each drop comes in time; all of them together do not. Without a limit on the whole, this would take 10 s."""
    with raw_server(SLOW[way]) as port:
        with (
            Client(f"http://127.0.0.1:{port}", "token", timeout=0.3, retries=0) as client,
            pytest.raises(UnreachableError, match=r"no complete reply from .* within 0.3 s"),
        ):
            client.galleries()

        async def ask() -> None:
            async with AsyncClient(f"http://127.0.0.1:{port}", "token", timeout=0.3, retries=0) as client:
                await client.galleries()

        with pytest.raises(UnreachableError, match=r"no complete reply from .* within 0.3 s"):
            asyncio.run(ask())


BROKEN: dict[str, bytes] = {
    "closes": b"",
    "no HTTP": b"SSH-2.0-OpenSSH_9.9\r\n",
    "half a head": b"HTTP/1.1 200 OK\r\nContent-",
    "half a body": b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n{",
    "a huge head": b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 40_000,
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n12345",
}


@pytest.mark.parametrize("way", BROKEN)
def test_a_broken_server_is_one_clear_error(way: str) -> None:
    def answered(connection: socket.socket) -> None:
        head_of(connection)
        connection.sendall(BROKEN[way])

    with raw_server(answered) as port, Client(f"http://127.0.0.1:{port}", "token", retries=0) as client:
        with pytest.raises(UnreachableError, match=r"Cannot reach .* or it disconnected") as raised:
            client.galleries()
        assert str(raised.value).isprintable()
        assert raised.value.__cause__ is None


def test_nobody_listens() -> None:
    with raw_server(lambda _: None) as port:
        pass
    with (
        Client(f"http://127.0.0.1:{port}", "token", retries=0) as client,
        pytest.raises(UnreachableError, match=f"Cannot reach http://127.0.0.1:{port}, .*; nothing was paid$"),
    ):
        client.nearest(np.ones(4), epsilon=4.0)


def test_the_documented_caps_are_those_of_the_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "theory" / "service.md").read_text(encoding="utf-8")
    table = page.split("## How much a server may send")[1].split("## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    stated = {name: int(most.split()[0]) for name, most in rows}
    assert stated == {
        "galleries in the list": schema.MOST_GALLERIES,
        "maps of a gallery in the list": schema.MOST_MAPS,
        "text: names, extractors, labels, reasons": _wire.LONGEST_TEXT,
        "name of an item": _answer.LONGEST_NAME,
        "dimensions of a feature": MOST_FEATURES,
        "dimensions of a projected feature": _map.MOST_DIMENSIONS,
        "prototypes of a map": _map.MOST_PROTOTYPES,
        "coverage of a map: prototypes times sets": _map.MOST_COVERAGE,
        "sets of a map": _map.MOST_SETS,
        "items of a gallery": _map.MOST_ITEMS,
        "columns of a table of codes": _codes.MOST_COLUMNS,
        "dimensions for a byte of a product code": _codes._MOST_DIMENSIONS,
        "classes of a model": published.MOST_CLASSES,
        "bytes of the list": ENDPOINTS["galleries"].most,
        "bytes of a model": schema.MOST_MODEL,
        "bytes of a public part": Kind.PUBLIC_PART.limit,
        "bytes of an answer": Kind.ANSWER.limit,
    }
