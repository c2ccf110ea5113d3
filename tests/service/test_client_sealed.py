"""Sealed questions over HTTP: what they find, what is sent, and what servers of bad will bring about."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

pytest.importorskip("cryptography")

from nearveil import Client
from nearveil.errors import NearveilError
from nearveil.frames import Kind, frame, unframe
from nearveil.gallery import Index
from nearveil.protocol import sealed
from nearveil.sealed import SealedClient
from nearveil.service.client.errors import QuestionError, ReplyError
from nearveil.service.schema import FRAME, KEY_HEADER
from nearveil.service.server import limits
from nearveil.service.server.errors import BusyError
from nearveil.service.server.galleries import OpenGallery
from nearveil.service.server.limits import Buckets
from tests.service.asking import COUNT, QUERIES, URL, Scene, framed, make_index, opened, scene

pytestmark = pytest.mark.usefixtures("no_pauses")
OFFERS = ("names", "thumbnails", "sealed")


@pytest.fixture
def here(made: Path, tmp_path: Path) -> Iterator[Scene]:
    with scene(made, tmp_path, offers=OFFERS) as found:
        found.gallery.prepare()  # type: ignore[attr-defined]  # a busy machine takes longer than a question waits
        yield found


def test_sealed_questions_find_the_nearest_and_pay_nothing(here: Scene) -> None:
    client, wire = here.client()
    every = [client.nearest(row, 5, epsilon=0, by="sealed") for row in QUERIES[:4]]
    assert here.paid == 0
    features = here.gallery.index.snapshot().features  # type: ignore[attr-defined]
    centred = features - features.mean(0)
    hits = 0
    for row, found in zip(QUERIES, every, strict=False):
        query = row - features.mean(0)
        cosines = centred @ query / np.linalg.norm(centred, axis=1) / np.linalg.norm(query)
        best = np.argsort(-cosines)[:5]
        assert found.matches[0].id == best[0]
        hits += len({match.id for match in found.matches} & set(best.tolist()))
        assert all(match.name == f"bird {match.id}.png" for match in found.matches)
        assert all(abs(match.similarity - cosines[match.id]) < 2e-3 for match in found.matches)
    assert hits >= 18  # of 20
    guarantee = every[0].guarantee
    assert (guarantee.epsilon, guarantee.sound, guarantee.is_computational) == (0.0, True, True)
    assert len({found.bytes_sent for found in every}) == 1
    assert [url.rpartition("/")[2] for _, url, _, _ in wire.posts] == ["sealed"] * 8
    assert len({len(body) for _, _, _, body in wire.posts[::2]}) == 1
    assert len({len(body) for _, _, _, body in wire.posts[1::2]}) == 1
    assert len([url for _, url, _, _ in wire.requests if "/sealed/" in url]) == 2  # hints are fetched once


def test_a_sealed_question_takes_more_of_the_rate_than_a_list_of_galleries(
    here: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, wire = here.client()
    client.nearest(QUERIES[0], 1, epsilon=0, by="sealed")  # fetches hints, which are large
    wire.requests.clear()
    state, pass_bytes = here.server.app.state.nearveil, here.gallery.sealed_pass_bytes
    state.buckets = Buckets(60, 1000, clock=lambda: 0.0)
    monkeypatch.setattr(limits, "BYTES_PER_REQUEST", pass_bytes)
    client.galleries()
    client.nearest(QUERIES[0], 1, epsilon=0, by="sealed")
    expected = len(wire.requests) + len(wire.posts) + sum(len(body) for *_, body in wire.posts) / pass_bytes
    ((level, _),) = state.buckets._held.values()
    assert pass_bytes == here.gallery._sealed[1].result().index.nbytes > 0  # type: ignore[attr-defined]
    assert len(wire.posts) == 2
    assert 1000 - level == pytest.approx(expected)


def test_without_a_copy_at_home_epsilon_0_is_a_sealed_question(here: Scene, tmp_path: Path) -> None:
    client, wire = here.client(home=tmp_path / "home")
    assert client.nearest(QUERIES[0], 3, epsilon=0).guarantee.is_computational
    assert len(wire.posts) == 2


def test_an_owner_asks_an_index_here_in_the_same_way(made: Path) -> None:
    with Index.open(made) as index, Client(index) as client:
        found = client.nearest(QUERIES[0], 3, epsilon=0, by="sealed")
    assert len(found.matches) == 3


@pytest.mark.parametrize("offers", [("names", "metadata", "sealed"), ("metadata", "sealed"), ("names", "sealed")])
def test_the_owners_ids_come_where_metadata_is_offered(tmp_path: Path, offers: tuple[str, ...]) -> None:
    ids = ["b\u00e4r", *(f"doc-{number}" * (number % 3 + 1) for number in range(1, COUNT))]
    rows = np.random.default_rng(0).standard_normal((COUNT, 8))
    with Index.create(tmp_path / "texts", dimension=8) as index:
        index.add_table(rows, ids=ids, names=[f"text {number}" for number in range(COUNT)])
        index.publish(4.0, 0.2)
    with scene(tmp_path / "texts", tmp_path, offers=offers) as here:
        here.gallery.prepare()  # type: ignore[attr-defined]
        client, _ = here.client()
        every = [client.nearest(rows[number], 1, epsilon=0, by="sealed") for number in (0, 1, 5)]
    told = [found.matches[0].external_id for found in every]
    assert told == ([ids[0], ids[1], ids[5]] if "metadata" in offers else [None] * 3)
    assert [found.matches[0].name for found in every] == ["text 0", "text 1", "text 5"]
    assert len({tuple(map(len, found.sealed)) for found in every}) == 1
    assert len({found.bytes_received for found in every[1:]}) == 1


def test_a_gallery_that_changed_is_read_anew(tmp_path: Path) -> None:
    place = make_index(tmp_path / "changing")
    with scene(place, tmp_path, offers=OFFERS) as here:
        client, _ = here.client()
        first = client.nearest(QUERIES[0], 1, epsilon=0, by="sealed").matches[0].id
        with Index.open(place) as index:
            index.delete([first])
            index.publish(4.0, 0.1)
        assert client.nearest(QUERIES[0], 1, epsilon=0, by="sealed").matches[0].id != first


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"epsilon": 4.0}, "sealed tells nothing and costs nothing, so epsilon must be 0, and is 4"),
        ({"thumbnails": True}, "no images"),
        ({"candidates": 0.1}, "tells nothing"),
        ({"where": {"colour": "red"}}, "no metadata"),
        ({"k": COUNT + 1}, "at most"),
        ({"image": np.ones(3)}, "numbers"),
    ],
)
def test_what_cannot_be_asked_is_refused(here: Scene, options: dict[str, Any], words: str) -> None:
    client, wire = here.client()
    asked: dict[str, Any] = {"image": QUERIES[0], "k": 5, "epsilon": 0, "by": "sealed"} | options
    with pytest.raises(QuestionError, match=words):
        client.nearest(**asked)
    assert not wire.posts


def test_a_gallery_that_does_not_offer_it_says_so(made: Path, tmp_path: Path) -> None:
    with scene(made, tmp_path, offers=("names",)) as here:
        client, _ = here.client()
        with pytest.raises(QuestionError, match="answers no sealed questions"):
            client.nearest(QUERIES[0], epsilon=0, by="sealed")


@pytest.mark.parametrize(("cut", "posts"), [(0, 2), (2, 1)])
def test_noise_for_answers_gives_no_further_request(here: Scene, cut: int, posts: int) -> None:
    def lie(request: httpx.Request, reply: httpx.Response) -> httpx.Response:
        if request.method != "POST":
            return reply
        kind, flags, body = unframe(read_body(reply))
        noise = np.random.default_rng(0).bytes(len(body) - 8 - cut)
        return framed(frame(kind, body[:8] + noise, flags))

    client, wire = here.client(lie)
    with suppress(ReplyError):
        client.nearest(QUERIES[0], 3, epsilon=0, by="sealed")
    assert len(wire.posts) == posts


def read_body(reply: httpx.Response) -> bytes:
    async def read() -> bytes:
        return await reply.aread()

    done = read()
    try:
        done.send(None)
    except StopIteration as ended:
        return bytes(ended.value)
    raise AssertionError("the body is not there yet")


@pytest.mark.parametrize("body", [b"nothing", b"NVW" + bytes(40), frame(Kind.SEALED_QUESTION, bytes(8)), b""])
def test_the_server_refuses_what_is_no_question(here: Scene, body: bytes) -> None:
    async def post() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(here.server.app), base_url=URL) as client:
            headers = {"Authorization": f"Bearer {here.server.token}", "Content-Type": FRAME, KEY_HEADER: "k" * 16}
            return await client.post("/v1/galleries/birds/sealed", content=body, headers=headers)

    reply = asyncio.run(post())
    assert reply.status_code in (400, 409)
    assert reply.json()["code"] in ("frame", "conflict")


def test_a_feature_that_a_server_takes_as_its_mean_is_asked_about_like_any_other(here: Scene) -> None:
    client, wire = here.client()
    client.nearest(QUERIES[0], 5, epsilon=0, by="sealed")
    mean, every = client.map().mean, []
    for row in (QUERIES[1], mean):
        before = len(wire.requests)
        client.nearest(row, 5, epsilon=0, by="sealed")
        every.append([(one[0], one[1], len(one[3])) for one in wire.requests[before:]])
    assert every[0] == every[1]


@pytest.mark.parametrize("records", [[], [b""], [b"\7"] * 16, [b"\xff" * 900], [bytes(4)]])
def test_records_that_a_server_spoiled_are_wrong_matches_and_no_error(
    here: Scene, monkeypatch: pytest.MonkeyPatch, records: list[bytes]
) -> None:
    client, wire = here.client()
    monkeypatch.setattr(SealedClient, "read_records", lambda *_: records)
    with np.errstate(all="raise"):  # a program may have said so
        found = client.nearest(QUERIES[0], 3, epsilon=0, by="sealed")
    assert len(found.matches) == 1
    assert len(wire.posts) == 2


def test_an_image_that_cannot_be_read_is_refused_before_anything_is_sent(here: Scene, tmp_path: Path) -> None:
    client, wire = here.client(home=tmp_path / "home")
    for by in ("auto", "sealed", "home"):
        with pytest.raises(NearveilError):
            client.nearest(b"no image", 3, epsilon=0, by=by)
    assert not wire.requests


def test_only_what_changed_of_the_hints_is_sent_again(tmp_path: Path) -> None:
    place = make_index(tmp_path / "changing")
    with scene(place, tmp_path, offers=OFFERS) as here:
        client, wire = here.client()
        first = client.nearest(QUERIES[0], 3, epsilon=0, by="sealed")
        with Index.open(place) as index:
            index.delete([first.matches[0].id])
        second = client.nearest(QUERIES[0], 3, epsilon=0, by="sealed")
        assert second.matches[0].id == first.matches[1].id
        assert second.bytes_received < first.bytes_received / 2
        asked = [url.partition("?")[2] for _, url, _, _ in wire.requests if "/sealed/" in url]
        assert [bool(words) for words in asked] == [False, False, True, True]
        third = client.nearest(QUERIES[0], 3, epsilon=0, by="sealed")
        assert [match.id for match in third.matches] == [match.id for match in second.matches]


def test_an_index_that_takes_long_is_made_meanwhile(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, build = threading.Event(), sealed.open_sealed_index

    def slowly(served: Any) -> Any:
        assert go.wait(60)
        return build(served)

    monkeypatch.setattr(sealed, "open_sealed_index", slowly)
    monkeypatch.setattr(OpenGallery._read_sealed, "__defaults__", (0.01,))
    with opened(made, offers=OFFERS) as gallery:
        with pytest.raises(BusyError, match="is being made"):
            gallery.sealed()
        with pytest.raises(BusyError, match="`nearveil index --sealed` makes it beforehand"):
            gallery.prepare(0.01)
        go.set()
        gallery.prepare()
        assert gallery.sealed()


def test_a_client_of_an_index_here_waits_until_it_is_made(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = sealed.open_sealed_index

    def slowly(served: Any) -> Any:
        time.sleep(0.2)
        return build(served)

    monkeypatch.setattr(sealed, "open_sealed_index", slowly)
    monkeypatch.setattr(OpenGallery._read_sealed, "__defaults__", (0.01,))
    with Client(made) as client:
        assert len(client.nearest(QUERIES[0], 3, epsilon=0, by="sealed").matches) == 3
