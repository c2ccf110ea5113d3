"""Sealed questions over HTTP: what they find, what is sent, and what servers of bad will bring about."""

import asyncio
import hashlib
import re
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

pytest.importorskip("cryptography")

from nearveil import AsyncClient, Client
from nearveil.client.errors import QuestionError, ReplyError
from nearveil.client.home import HomeCopies
from nearveil.client.sealed import CachedSeal, _decode_text, sealed_periods
from nearveil.errors import NearveilError
from nearveil.gallery import Index, Item
from nearveil.gallery.answers import LONGEST_ID, ItemDetails
from nearveil.gallery.codes import ProductCodes, ScalarCodes, _hash_arrays, codes_from_bytes
from nearveil.gallery.errors import IndexStoreError
from nearveil.mechanisms import Message
from nearveil.sealed import SealedClient, SealedIndex
from nearveil.sealed.layout import Layout
from nearveil.sealed.sizes import RecordLayout
from nearveil.server import limits, requests, sealed_builds
from nearveil.server.errors import ServiceError
from nearveil.server.limits import TokenBuckets
from nearveil.wire import sealed
from nearveil.wire.frames import HEADER_BYTES, Kind, Reader, WireError, frame, unframe, write_fields
from nearveil.wire.schema import FRAME, GALLERY_NAME, KEY_HEADER
from nearveil.wire.server import ServedMap
from tests.service.asking import COUNT, QUERIES, URL, Scene, framed, make_index, opened, scene

pytestmark = pytest.mark.usefixtures("no_pauses")
OFFERS = ("names", "thumbnails", "sealed")


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setattr(CachedSeal, "prepare_next", lambda *_: None)  # every question requests its token itself
    with scene(made, tmp_path, offers=OFFERS) as found:
        found.gallery.prepare()  # type: ignore[attr-defined]  # a busy machine takes longer than a question waits
        yield found


def list_bodies(wire: Any, path: str = "/sealed") -> list[bytes]:
    """Return the bodies that were sent to a path: of questions, or of requests for tokens."""
    return [body for _, url, _, body in wire.posts if url.endswith(path)]


def test_sealed_questions_find_the_nearest_and_pay_nothing(here: Scene) -> None:
    client, wire = here.client()
    every = [client.nearest(row, 5, epsilon=0, by="sealed") for row in QUERIES[:4]]
    assert here.paid == 0
    features = here.gallery.index.snapshot().features  # type: ignore[attr-defined]
    hits = 0
    for row, found in zip(QUERIES, every, strict=False):
        cosines = features @ row / np.linalg.norm(row)
        best = np.argsort(-cosines)[:5]
        assert found.matches[0].id == best[0]
        hits += len({match.id for match in found.matches} & set(best.tolist()))
        assert all(match.name == f"bird {match.id}.png" for match in found.matches)
        assert all(abs(match.similarity - cosines[match.id]) < 5e-3 for match in found.matches)
    assert hits >= 18  # of 20
    guarantee = every[0].guarantee
    assert (guarantee.epsilon, guarantee.sound, guarantee.is_computational) == (0.0, True, True)
    assert len({found.bytes_sent for found in every}) == 1
    assert [url.rpartition("/")[2] for _, url, _, _ in wire.posts] == ["tokens", "sealed", "sealed"] * 4
    for bodies in (list_bodies(wire, "/tokens"), list_bodies(wire)[::2], list_bodies(wire)[1::2]):
        assert len(set(bodies)) == 4
        assert len({len(body) for body in bodies}) == 1
    fetched = [url for method, url, _, _ in wire.requests if method == "GET" and url.endswith("/sealed/tokens")]
    assert len(fetched) == 1  # once for a layout


def test_a_sealed_question_takes_more_of_the_rate_than_a_list_of_galleries(
    here: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, wire = here.client()
    client.nearest(QUERIES[0], 1, epsilon=0, by="sealed")
    wire.requests.clear()
    state, pass_bytes = here.server.app.state.nearveil, here.gallery.sealed_pass_bytes(tokens=False)
    state.rate = TokenBuckets(60, 10**7, clock=lambda: 0.0)
    monkeypatch.setattr(limits, "BYTES_PER_REQUEST", pass_bytes)
    client.galleries()
    client.nearest(QUERIES[0], 1, epsilon=0, by="sealed")
    (request,), questions = list_bodies(wire, "/tokens"), list_bodies(wire)
    table_bytes = here.gallery.sealed_pass_bytes(tokens=True)
    work = table_bytes + len(request) + sum(pass_bytes + len(body) for body in questions)
    expected = len(wire.requests) + work / pass_bytes
    ((level, _),) = state.rate._buckets.values()
    assert table_bytes > pass_bytes == here.gallery._get_sealed().index.nbytes > 0  # type: ignore[attr-defined]
    assert len(questions) == 2
    assert 10**7 - level == pytest.approx(expected)


def test_without_a_copy_at_home_epsilon_0_is_a_sealed_question(here: Scene, tmp_path: Path) -> None:
    client, wire = here.client(home=tmp_path / "home")
    assert client.nearest(QUERIES[0], 3, epsilon=0).guarantee.is_computational
    assert len(list_bodies(wire)) == 2


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
        here.gallery.prepare()  # type: ignore[attr-defined]
        client, _ = here.client()
        first = client.nearest(QUERIES[0], 1, epsilon=0, by="sealed").matches[0].id
        with Index.open(place) as index:
            index.delete([first])
            index.publish(4.0, 0.1)
        here.gallery.prepare()  # type: ignore[attr-defined]
        assert client.nearest(QUERIES[0], 1, epsilon=0, by="sealed").matches[0].id != first


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"epsilon": 4.0}, "sealed costs nothing: leave epsilon out; it is 4"),
        ({"thumbnails": True}, "no images"),
        ({"candidates": 0.1}, "candidates: it applies to messages only"),
        ({"where": {"colour": "red"}}, "no metadata"),
        ({"k": COUNT + 1}, "at most"),
        ({"query": np.ones(3)}, "numbers"),
    ],
)
def test_what_cannot_be_asked_is_refused(here: Scene, options: dict[str, Any], words: str) -> None:
    client, wire = here.client()
    asked: dict[str, Any] = {"query": QUERIES[0], "k": 5, "epsilon": 0, "by": "sealed"} | options
    with pytest.raises(QuestionError, match=words):
        client.nearest(**asked)
    assert not wire.posts


def test_a_gallery_that_does_not_offer_it_says_so(made: Path, tmp_path: Path) -> None:
    with scene(made, tmp_path, offers=("names",)) as here:
        client, _ = here.client()
        with pytest.raises(QuestionError, match="offers no sealed queries"):
            client.nearest(QUERIES[0], epsilon=0, by="sealed")


@pytest.mark.parametrize(("cut", "posts"), [(0, 2), (2, 1)])
def test_noise_for_answers_gives_no_further_request(here: Scene, cut: int, posts: int) -> None:
    def lie(request: httpx.Request, reply: httpx.Response) -> httpx.Response:
        if request.method != "POST" or request.url.path.endswith("/tokens"):
            return reply
        kind, flags, body = unframe(read_body(reply))
        noise = np.random.default_rng(0).bytes(len(body) - 8 - cut)
        return framed(frame(kind, body[:8] + noise, flags))

    client, wire = here.client(lie)
    with suppress(ReplyError):
        client.nearest(QUERIES[0], 3, epsilon=0, by="sealed")
    assert len(list_bodies(wire)) == posts


@pytest.mark.parametrize("spoiled", ["token", "public"])
def test_noise_for_tokens_is_not_noticed(here: Scene, spoiled: str) -> None:
    """A client that reacted to a bad token would be an oracle for its ring secret."""

    def lie(request: httpx.Request, reply: httpx.Response) -> httpx.Response:
        is_token = request.method == "POST"
        if not request.url.path.endswith("/sealed/tokens") or is_token != (spoiled == "token"):
            return reply
        kind, flags, body = unframe(read_body(reply))
        reader, rng = Reader(body), np.random.default_rng(0)
        fields: list[Any] = [reader.read_int()]
        fields += [rng.bytes(len(reader.read_bytes())) for _ in range(2)]
        return framed(frame(kind, write_fields(*fields), flags))

    every = []
    for transform in (None, lie):
        client, wire = here.client(transform)
        for row in QUERIES[:2]:
            client.nearest(row, 3, epsilon=0, by="sealed")
        every.append([(method, url, len(body)) for method, url, _, body in wire.requests])
    assert every[0] == every[1]


def test_a_retry_of_each_message_is_the_same_to_the_byte(here: Scene) -> None:
    """Two encryptions of one secret with other errors would average out."""
    failed: list[bytes] = []

    def fail_once(request: httpx.Request, reply: httpx.Response) -> httpx.Response:
        if request.method != "POST" or (body := request.content) in failed:
            return reply
        failed.append(body)
        if len(failed) % 2:
            raise httpx.ReadError("broken pipe", request=request)
        return framed(b'{"code": "busy", "message": "later"}', 503, "application/json")

    client, wire = here.client(fail_once, retries=3)
    assert client.nearest(QUERIES[0], 3, epsilon=0, by="sealed").matches
    posts = [(url, body) for _, url, _, body in wire.posts]
    assert len(posts) == 6  # a request for tokens and two questions, each sent twice
    assert posts[::2] == posts[1::2]
    assert len(set(posts)) == 3


def test_each_question_prepares_the_next(made: Path, tmp_path: Path) -> None:
    with scene(made, tmp_path, offers=OFFERS) as here:
        here.gallery.prepare()  # type: ignore[attr-defined]
        client, wire = here.client()
        client.prepare_sealed(2)
        assert (len(list_bodies(wire, "/tokens")), len(list_bodies(wire))) == (2, 0)
        found = [client.nearest(row, 3, epsilon=0, by="sealed") for row in QUERIES[:3]]
        seal = client._client._sealed["birds"]
        client.galleries()  # lets the loop run
        until = time.monotonic() + 60
        while seal.client.n_prepared < 1 and time.monotonic() < until:
            time.sleep(0.01)
        assert seal.client.n_prepared == 1
        assert len({result.bytes_sent for result in found}) == 1  # with the token's, whenever it was requested
        bodies = list_bodies(wire, "/tokens")
        assert len(set(bodies)) == len(bodies) == 4


def test_a_client_that_closes_prepares_nothing(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nearveil.client.sealed._PAUSE", 60.0)  # a busy machine closes later
    with scene(made, tmp_path, offers=OFFERS) as here:
        here.gallery.prepare()  # type: ignore[attr-defined]
        client, wire = here.client()
        for count in (1, 2):  # the second query stops the timer of the first
            client.nearest(QUERIES[count], 3, epsilon=0, by="sealed")
            assert len(list_bodies(wire, "/tokens")) == count
        seal = client._client._sealed["birds"]
        client.close()
        assert seal.preparing is None
        assert seal.timer is not None
        assert seal.timer.cancelled()
        assert len(list_bodies(wire, "/tokens")) == 2


def test_the_next_process_downloads_no_layout_that_it_has(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    with scene(made, tmp_path, offers=OFFERS) as here:
        here.gallery.prepare()  # type: ignore[attr-defined]
        results = []
        for _ in range(2):  # a command is a process of its own
            client, _wire = here.client()
            results.append(client.nearest(QUERIES[0], 3, epsilon=0, by="sealed"))
        (stored,) = (tmp_path / "data").rglob("*.layout")
        assert stored.stat().st_mode & 0o777 == 0o600
        content = stored.read_bytes()
        assert results[0].bytes_received - results[1].bytes_received == len(content)
        assert results[0].matches == results[1].matches
        for corrupted in (content[:-100], content[:-1] + bytes([content[-1] ^ 1]), b""):
            stored.write_bytes(corrupted)
            assert here.client()[0].nearest(QUERIES[0], 3, epsilon=0, by="sealed").matches == results[0].matches
            assert stored.read_bytes() == content


def test_a_stored_layout_names_its_content_and_nothing_that_a_server_chose(tmp_path: Path) -> None:
    """Else a server would recognise the machine whatever its token is."""
    copies, layout = HomeCopies(tmp_path, "https://server.example"), b"a layout"
    assert copies.read_layout("birds") == ("", b"")
    copies.write_layout("birds", layout)
    assert copies.read_layout("birds") == (f'"{hashlib.sha256(layout).hexdigest()}"', layout)
    (stored,) = tmp_path.iterdir()
    assert stored.read_bytes() == layout
    assert not re.fullmatch(GALLERY_NAME, stored.name)  # else it would be in the way of the copy of that gallery


def test_a_reply_without_content_needs_a_stored_layout(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    with scene(made, tmp_path, offers=OFFERS) as here:
        here.gallery.prepare()  # type: ignore[attr-defined]

        def answer(request: httpx.Request, reply: httpx.Response) -> httpx.Response:
            is_layout = request.method == "GET" and request.url.path.endswith("/sealed")
            return framed(b"", 304, etag='"chosen"') if is_layout else reply

        with pytest.raises(ReplyError):
            here.client(answer)[0].nearest(QUERIES[0], 3, epsilon=0, by="sealed")


def test_no_pad_is_used_after_a_change(tmp_path: Path) -> None:
    place = make_index(tmp_path / "changing")
    with scene(place, tmp_path, offers=OFFERS) as here:
        here.gallery.prepare()  # type: ignore[attr-defined]
        client, wire = here.client()
        client.prepare_sealed(2)
        first = client.nearest(QUERIES[0], 3, epsilon=0, by="sealed")
        with Index.open(place) as index:
            index.delete([first.matches[0].id])
        here.gallery.prepare()  # type: ignore[attr-defined]
        second = client.nearest(QUERIES[0], 3, epsilon=0, by="sealed")
        assert second.matches[0].id == first.matches[1].id
        asked = [(method, url.rpartition("/")[2]) for method, url, _, _ in wire.requests if "/sealed" in url]
        fetched = [name for method, name in asked if method == "GET"]
        assert fetched == ["sealed", "tokens", "sealed", "sealed", "tokens"]  # the layout, and public parts twice
        last = max(place for place, request in enumerate(asked) if request == ("GET", "tokens"))
        assert asked[last + 1 : last + 4] == [("POST", "tokens"), ("POST", "sealed"), ("POST", "sealed")]


def read_body(reply: httpx.Response) -> bytes:
    async def read() -> bytes:
        return await reply.aread()

    done = read()
    try:
        done.send(None)
    except StopIteration as ended:
        return bytes(ended.value)
    raise AssertionError("the body is not there yet")


def post_sealed(here: Scene, body: bytes | AsyncIterator[bytes], path: str = "sealed") -> httpx.Response:
    async def post() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(here.server.app), base_url=URL) as client:
            key = secrets.token_hex(16)
            headers = {"Authorization": f"Bearer {here.server.token}", "Content-Type": FRAME, KEY_HEADER: key}
            return await client.post(f"/v1/galleries/birds/{path}", content=body, headers=headers)

    return asyncio.run(post())


def test_the_server_reads_only_bodies_of_the_lengths_that_the_layout_fixes(
    here: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, wire = here.client()
    client.nearest(QUERIES[0], 3, epsilon=0, by="sealed")
    lengths, (request,) = set(map(len, list_bodies(wire))), list_bodies(wire, "/tokens")
    assert here.gallery.sealed_lengths(tokens=False) == lengths
    assert here.gallery.sealed_lengths(tokens=True) == {len(request)}
    assert len(lengths) == 2

    async def send_parts() -> AsyncIterator[bytes]:
        yield bytes(min(lengths))

    def read(*_: Any) -> Any:
        raise AssertionError("the body was read")

    with monkeypatch.context() as patch:
        patch.setattr(requests, "read_body", read)
        wrong = {0, 100, 31_000_000, *(length + change for length in lengths for change in (-1, 1))}
        for length in sorted(wrong):
            reply = post_sealed(here, bytes(length))
            assert (reply.status_code, reply.json()["code"]) == (413, "too_large"), length
            assert post_sealed(here, bytes(length), "sealed/tokens").status_code == 413
        assert post_sealed(here, send_parts()).status_code == 411
    for length in lengths:
        head = frame(Kind.SEALED_QUESTION, bytes(length - HEADER_BYTES))
        for body, status in ((bytes(length), 400), (b"NVW" + bytes(length - 3), 400), (head, 409)):
            assert post_sealed(here, body).status_code == status
    head = frame(Kind.SEALED_TOKEN_REQUEST, bytes(len(request) - HEADER_BYTES))
    for body, status in ((bytes(len(request)), 400), (head, 409), (request, 200)):
        assert post_sealed(here, body, "sealed/tokens").status_code == status


def test_a_feature_that_a_server_takes_as_its_mean_is_asked_about_like_any_other(here: Scene) -> None:
    client, wire = here.client()
    client.nearest(QUERIES[0], 5, epsilon=0, by="sealed")
    public, row = client.map(), np.eye(QUERIES.shape[1])[1]
    maps, every = client._client._session._maps, []
    for mean in (public.space.mean, row):  # the normalized feature, to the last bit
        maps["birds", None] = maps["birds", None][0], replace(public, space=replace(public.space, mean=mean))
        before = len(wire.requests)
        client.nearest(row, 5, epsilon=0, by="sealed")
        every.append([(one[0], one[1], len(one[3])) for one in wire.requests[before:]])
    assert every[0] == every[1]


@pytest.mark.parametrize("records", [[], [b""], [b"\7"] * 16, [b"\xff" * 900], [bytes(4)]])
def test_records_that_a_server_spoiled_are_wrong_matches_and_no_error(
    here: Scene, monkeypatch: pytest.MonkeyPatch, records: list[bytes]
) -> None:
    client, wire = here.client()
    monkeypatch.setattr(
        SealedClient, "read_records", lambda _, fetch, __: (records * len(fetch.positions))[: len(fetch.positions)]
    )
    with np.errstate(all="raise"):  # a program may have said so
        found = client.nearest(QUERIES[0], 3, epsilon=0, by="sealed")
    assert len(found.matches) == 1
    assert len(list_bodies(wire)) == 2


def test_an_image_that_cannot_be_read_is_refused_before_anything_is_sent(here: Scene, tmp_path: Path) -> None:
    client, wire = here.client(home=tmp_path / "home")
    for by in ("sealed", "home"):
        with pytest.raises(NearveilError):
            client.nearest(b"no image", 3, epsilon=0, by=by)
    assert not wire.requests
    with pytest.raises(NearveilError):
        client.nearest(b"no image", 3)
    assert [url.rpartition("/")[2] for _, url, _, _ in wire.requests] == ["galleries"]  # what it offers: for any image


@contextmanager
def slow_builds(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[ServedMap], Callable[[], None]]]:
    """Yield the maps that indexes were built for, and a function that lets the next build go on."""
    build, begun, turns = sealed.open_sealed_index, list[ServedMap](), threading.Semaphore(0)

    def open_slowly(served: ServedMap, **options: Any) -> Any:
        begun.append(served)
        assert turns.acquire(timeout=60)
        return build(served, **options)

    monkeypatch.setattr(sealed, "open_sealed_index", open_slowly)
    monkeypatch.setattr(sealed, "update_sealed_index", lambda *_: None)
    yield begun, turns.release
    turns.release(1000)


def await_builds(begun: list[Any], count: int) -> None:
    """Wait until so many builds have begun."""
    until = time.monotonic() + 60
    while len(begun) < count and time.monotonic() < until:
        time.sleep(0.001)
    assert len(begun) == count


def test_nobody_waits_for_an_index_that_is_being_built(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with slow_builds(monkeypatch) as (begun, go_on), opened(made, offers=OFFERS) as gallery:
        for _ in range(3):
            with pytest.raises(ServiceError, match=r"is being built.*`nearveil index --sealed` builds it in advance"):
                gallery.sealed()
        calls = (lambda: gallery.sealed_lengths(tokens=False), lambda: gallery.ask_sealed(b""))
        for refused in (*calls, gallery.sealed_tokens, lambda: gallery.prepare(0.01)):
            with pytest.raises(ServiceError, match="is being built") as error:
                refused()
            assert (error.value.status, error.value.retry_after) == (503, 5)
        go_on()
        gallery.prepare()
        assert gallery.sealed()
        assert len(begun) == 1


def test_a_start_that_waits_for_a_build_says_so(
    made: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sealed_builds, "_NOTICE_DELAY", 0.01)
    with slow_builds(monkeypatch) as (_, go_on), opened(made, offers=OFFERS) as gallery:
        threading.Timer(0.1, go_on).start()
        gallery.prepare()
        assert gallery.sealed()
        gallery.prepare()
    assert [record.message.partition("after")[0] for record in caplog.records] == [
        f"Building the sealed index of {gallery.name} ...",
        f"The sealed index of {gallery.name}: ready ",
    ]


def test_requests_during_a_build_take_no_threads_from_messages(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with slow_builds(monkeypatch) as (begun, _), scene(made, tmp_path, offers=OFFERS) as here:
        with pytest.raises(ServiceError, match="is being built"):
            here.gallery.sealed()
        await_builds(begun, 1)
        assert {post_sealed(here, bytes(100)).status_code for _ in range(16)} == {503}
        state = here.server.app.state.nearveil
        assert [pool.pending for pool in (state.pools["birds"]["answers"], state.pools["birds"]["sealed"])] == [0, 0]


def test_one_builder_takes_the_newest_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = make_index(tmp_path / "changing")
    with (
        slow_builds(monkeypatch) as (begun, go_on),
        opened(place, offers=OFFERS) as gallery,
        Index.open(place) as index,
    ):
        for number in range(4):
            with pytest.raises(ServiceError, match="is being built"):
                gallery.sealed()
            await_builds(begun, 1)
            index.delete([number])
        gallery.refresh()
        for _ in range(2):
            go_on()
        gallery.prepare()
        assert [len(served.read_alive()[0]) for served in begun] == [COUNT, COUNT - 4]
        assert gallery._get_sealed().index.get_items().tolist() == list(range(4, COUNT))


def test_the_previous_index_answers_until_the_next_is_built_unless_an_item_was_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = make_index(tmp_path / "changing")
    with (
        slow_builds(monkeypatch) as (begun, go_on),
        opened(place, offers=OFFERS) as gallery,
        Index.open(place) as index,
    ):
        gallery.refresh()
        assert not begun  # nobody asked
        go_on()
        gallery.prepare()
        layout = gallery.sealed()
        index.add([Item(QUERIES[0], "new.png")])
        index.republish()
        gallery.refresh()
        await_builds(begun, 2)
        assert gallery.sealed() == layout
        index.delete([5])
        with pytest.raises(ServiceError, match="is being built"):
            gallery.sealed()
        with pytest.raises(ServiceError, match="is being built"):
            gallery.ask_sealed(b"")
        for _ in range(2):
            go_on()
        gallery.prepare()
        assert gallery._get_sealed().index.get_items().tolist() == [*range(5), *range(6, COUNT + 1)]


def test_a_change_is_answered_while_the_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, save, turns, saving = make_index(tmp_path / "changing"), SealedIndex.save, threading.Event(), []

    def save_slowly(index: SealedIndex, path: Path) -> None:
        saving.append(len(index))
        assert turns.wait(60)
        save(index, path)

    with opened(place, offers=OFFERS) as gallery, Index.open(place) as index:
        gallery.prepare()
        monkeypatch.setattr(SealedIndex, "save", save_slowly)
        index.delete([5])
        gallery.refresh()
        await_builds(saving, 1)
        items = gallery._get_sealed().index.get_items()
        turns.set()
        gallery.prepare()
        assert saving == [COUNT - 1]
        assert 5 not in items
        assert gallery._get_sealed().index.get_items().tolist() == items.tolist()
        assert 5 not in SealedIndex.load(place / "index.sealed").get_items()


def test_a_build_that_fails_is_tried_again(
    made: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    build = sealed.open_sealed_index

    def fail(*_: Any, **__: Any) -> Any:
        time.sleep(0.2)
        raise IndexStoreError("a private path")

    with opened(made, offers=OFFERS) as gallery:
        monkeypatch.setattr(sealed_builds, "_NOTICE_DELAY", 0.0)
        monkeypatch.setattr(sealed, "open_sealed_index", fail)
        with pytest.raises(ServiceError, match="Try again later"):
            gallery.prepare()
        with pytest.raises(ServiceError, match="is being built"):
            gallery.sealed_lengths(tokens=False)
        assert "cannot be built: IndexStoreError" in caplog.text
        assert "Building the sealed index" in caplog.text
        assert "ready after" not in caplog.text
        assert "private" not in caplog.text
        monkeypatch.setattr(sealed, "open_sealed_index", build)
        gallery.prepare()
        assert gallery.sealed()


def test_a_client_of_an_index_here_waits_until_it_is_made(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = sealed.open_sealed_index

    def slowly(served: Any, **options: Any) -> Any:
        time.sleep(0.2)
        return build(served, **options)

    monkeypatch.setattr(sealed, "open_sealed_index", slowly)
    with Client(made) as client:
        assert len(client.nearest(QUERIES[0], 3, epsilon=0, by="sealed").matches) == 3


@pytest.mark.parametrize("ids", ["distinct", "repeated", "none", "short"])
def test_all_fetched_records_are_scored(here: Scene, monkeypatch: pytest.MonkeyPatch, ids: str) -> None:
    """A hostile server sends distinct ids in one region and one repeated id in another: the work is the same."""
    client, wire = here.client()
    client.nearest(QUERIES[0], 3, epsilon=0, by="sealed")
    n_buckets = client._client._sealed["birds"].client.layout.records.n_buckets  # type: ignore[union-attr]
    table, shapes = client.map().table, []
    width, scores = table.width, type(table).scores

    def records(_: Any, fetch: Any, __: Any) -> list[bytes]:
        numbers = range(len(fetch.positions)) if ids == "distinct" else [7] * len(fetch.positions)
        return [number.to_bytes(4, "little") + bytes(0 if ids == "short" else width) for number in numbers]

    def count(self: Any, rows: Any, codes: Any) -> Any:
        shapes.append(codes.shape)
        return scores(self, rows, codes)

    monkeypatch.setattr(SealedClient, "read_records", records)
    monkeypatch.setattr(type(table), "scores", count)
    if ids == "none":  # the cells of this query hold nothing
        monkeypatch.setattr(SealedClient, "read_scores", lambda *_: [])
    found = client.nearest(QUERIES[1], 3, epsilon=0, by="sealed")
    assert shapes == [(n_buckets, width)]
    assert len(found.matches) == {"distinct": 3, "none": 0}.get(ids, 1)
    assert [len(post[3]) for post in wire.posts[3:]] == [len(post[3]) for post in wire.posts[:3]]


def test_private_work_of_a_question_does_not_delay_another(here: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranking of one question stands still until another question was asked and answered."""
    import nearveil.client.sealed as module

    real, done, ranked = module._rank, threading.Event(), []

    def rank(*arguments: Any) -> Any:
        ranked.append(threading.get_ident())
        if len(ranked) == 1:
            done.wait(5)
        return real(*arguments)

    monkeypatch.setattr(module, "_rank", rank)

    async def ask() -> None:
        async with AsyncClient(URL, here.server.token, transport=here.server.wire()) as client:
            await client.prepare_sealed(2)
            first = asyncio.create_task(client.nearest(QUERIES[0], 3, 0, by="sealed"))
            while not ranked:
                await asyncio.sleep(0.01)
            await client.nearest(QUERIES[1], 3, 0, by="sealed")
            is_delayed.append(first.done())
            done.set()
            await first

    is_delayed: list[bool] = []
    asyncio.run(ask())
    assert is_delayed == [False]
    assert threading.get_ident() not in ranked


def test_periods_charge_columns_dimension_and_projection(here: Scene) -> None:
    client, _ = here.client()
    client.nearest(QUERIES[0], 3, epsilon=0, by="sealed")
    layout, public = client._client._sealed["birds"].client.layout, client.map()
    usual = sealed_periods(layout, public)
    long: Any = SimpleNamespace(table=public.table, space=SimpleNamespace(width=10**6))
    assert sealed_periods(layout, long).question > usual.question + 0.04 * layout.dimension
    table = SimpleNamespace(width=public.table.width, columns=16_000)
    wide: Any = SimpleNamespace(table=table, space=public.space)
    assert sealed_periods(layout, wide).ranking > usual.ranking + 0.015
    assert layout.records is not None
    more = replace(layout, records=replace(layout.records, side=2 * layout.records.side))
    assert sealed_periods(more, public).choice > usual.choice + 0.02  # of matching records to buckets
    assert sealed_periods(more, public).ranking > usual.ranking


@pytest.mark.parametrize("form", [ScalarCodes, ProductCodes])
def test_tables_of_many_columns_are_refused(form: Any) -> None:
    """They would make the client's ranking slow enough to be measured."""

    def table(columns: int) -> bytes:
        projection, row = np.zeros((8, columns), np.float32), np.ones(columns, np.float32)
        arrays: dict[str, Any] = {"projection": projection}
        if form is ScalarCodes:
            arrays |= {"lowest": row, "steps": row, "double": np.array(0, "<i8")}
        else:
            arrays |= {"weights": row, "mean": row, "centroids": np.zeros((columns // 4, 256, 4), np.float32)}
        return Message(form.form, _hash_arrays(arrays), arrays).to_bytes()

    assert codes_from_bytes(table(16)).columns == 16
    with pytest.raises(WireError, match="two columns"):
        codes_from_bytes(table(20))


@pytest.mark.parametrize(
    "sizes",
    [
        {"n_slots": 65_535, "n_colours": 2000},
        {"records": RecordLayout(1, 128, 100_000, 1, 1)},
        {"records": RecordLayout(1, 128, 1, 1 << 10, 1)},
    ],
)
def test_layouts_that_would_take_terabytes_are_refused(here: Scene, sizes: dict[str, Any]) -> None:
    """A layout of 1.2 MB must not make a client allocate more than an answer or a question may be."""
    client, _ = here.client()
    client.nearest(QUERIES[0], 3, epsilon=0, by="sealed")
    layout = client._client._sealed["birds"].client.layout
    n_cells = 4000 if "n_colours" in sizes else len(layout.centroids)
    huge = replace(
        layout,
        centroids=np.zeros((n_cells, layout.dimension), np.float32),
        counts=np.zeros(n_cells, np.uint16),
        **({"records": None} | sizes),
    ).to_bytes()
    assert len(huge) < 1_300_000
    with pytest.raises(WireError, match="too large for a question or an answer"):
        Layout.from_bytes(huge)

    def forge(request: httpx.Request, reply: httpx.Response) -> httpx.Response:
        is_layout = request.method == "GET" and request.url.path.endswith("/sealed")
        return framed(huge) if is_layout else reply

    other, _ = here.client(forge)
    with pytest.raises(ReplyError, match="too large for a question or an answer"):
        other.nearest(QUERIES[0], 3, epsilon=0, by="sealed")


def test_long_texts_of_records_are_not_decoded_whole() -> None:
    """Decoding stops all threads, so a record of a megabyte would delay other questions."""
    decoded = []

    class Text(bytes):
        def __getitem__(self, part: Any) -> Any:
            return Text(super().__getitem__(part))

        def partition(self, separator: Any) -> Any:
            return tuple(map(Text, super().partition(separator)))

        def decode(self, *arguments: Any, **options: Any) -> str:
            decoded.append(len(self))
            return super().decode(*arguments, **options)

    about = _decode_text(Text(b"\xff" * 10**6 + b"\0" + b"\xff" * 10**6))
    assert (len(about.name), len(about.external_id or "")) == (500, LONGEST_ID)
    assert len(decoded) == 2
    assert max(decoded) <= 2048
    assert _decode_text("é\0ä".encode()) == ItemDetails("é", "ä")
