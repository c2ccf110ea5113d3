"""What a server answers, and to whom: over the whole application, in this process."""

import json
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from nearveil.features import HogColor
from nearveil.gallery import Index, IndexStoreError
from nearveil.gallery.answers import Answer
from nearveil.mechanisms import Message
from nearveil.server import TokenStore
from nearveil.server.galleries import OpenGallery
from nearveil.wire.messages import MapChanged, PublicPart, Query, Refusal, RefusalCode, decode_frame
from nearveil.wire.schema import FRAME, KEY_HEADER, Galleries

from ..gallery.index_places import index_server, index_url, one_thread, plain_items, unit_rows
from .serving import COUNT, EPSILON, SETS, F, Server, index_of, lines, serving

__all__ = ["index_server", "index_url", "one_thread"]  # fixtures


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for the tests that change nothing."""
    with serving(tmp_path_factory.mktemp("shared"), rate=None) as server:
        yield server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path, rate=None) as found:
        yield found


def problem(response: object) -> tuple[int, str]:
    told = response.json()  # type: ignore[attr-defined]
    assert set(told) == {"code", "message"}
    return response.status_code, told["code"]  # type: ignore[attr-defined]


def test_a_client_finds_galleries_a_map_and_candidates(shared: Server) -> None:
    told = shared.get("/v1/galleries")
    assert "metadata_keys" not in told.json()["galleries"][0]  # a client of 0.2 refuses what it does not know
    listed = Galleries.model_validate_json(told.content).galleries
    assert [(one.name, one.kind, one.candidates, one.dimension) for one in listed] == [("birds", "open", (F,), 12)]
    assert listed[0].offers == ("names", "thumbnails", "originals")
    reply = shared.get("/v1/galleries/birds/map")
    assert reply.headers["content-type"] == FRAME
    part = decode_frame(reply.content, PublicPart)
    assert (part.gallery, part.map.n_sets, part.map.set_size) == ("birds", SETS, COUNT * F)
    for number in range(SETS):
        message = Message("covers", shared.index.current().published.public_id, {"sets": np.array([number], np.int32)})
        assert shared.ask(shared.query(number)).content == shared.index.answer(message).to_bytes()


def test_a_map_is_sent_once(shared: Server) -> None:
    first = shared.get("/v1/galleries/birds/map")
    etag = first.headers["etag"]
    again = shared.get("/v1/galleries/birds/map", **{"if-none-match": etag})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
    for header in (f'"other", {etag}', f"W/{etag}", "*"):
        assert shared.get("/v1/galleries/birds/map", **{"if-none-match": header}).status_code == 304
    assert shared.get("/v1/galleries/birds/map", **{"if-none-match": '"other"'}).content == first.content


def test_a_map_for_a_fraction(server: Server) -> None:
    server.index.publish(EPSILON, 0.5, n_sets=2, reach=0.0)
    of = {f: server.get(f"/v1/galleries/birds/map?candidates={f}") for f in ("0.25", "0.5", "0.2500000000001")}
    assert [decode_frame(reply.content, PublicPart).candidates for reply in of.values()] == [0.25, 0.5, 0.25]
    assert of["0.25"].headers["etag"] != of["0.5"].headers["etag"]
    assert server.get("/v1/galleries/birds/map").content == of["0.5"].content  # the newest
    assert server.get("/v1/galleries").json()["galleries"][0]["candidates"] == [0.5, 0.25]
    missing = server.get("/v1/galleries/birds/map?candidates=0.1")
    assert problem(missing) == (404, "unknown")
    assert "0.5, 0.25" in missing.json()["message"]
    for wrong in ("0", "1.1", "nan", "inf", "x", "-1"):
        assert problem(server.get(f"/v1/galleries/birds/map?candidates={wrong}")) == (422, "invalid")


def test_extras_come_for_all_candidates(shared: Server) -> None:
    plain = shared.answer(shared.query(1))
    names = shared.answer(shared.query(1, "names"))
    assert (names.ids == plain.ids).all()
    assert [name.decode() for name in names.contents] == [f"item {number}" for number in plain.ids]
    thumbnails = shared.answer(shared.query(1, "thumbnails"))
    assert all(image.endswith(b"%d" % number) for number, image in zip(plain.ids, thumbnails.contents, strict=True))
    originals = shared.answer(shared.query(1, "originals"))
    assert set(originals.contents) == {b"a picture", b"an original", b""}


def test_originals_by_number_are_for_those_who_may(shared: Server) -> None:
    place = "/v1/galleries/birds/items/{}/original"
    found = shared.get(place.format(1))
    assert (found.status_code, found.content) == (200, b"an original")
    assert found.headers["content-type"] == "application/octet-stream"
    assert found.headers["x-content-type-options"] == "nosniff"
    assert shared.get(place.format(0)).content == b"a picture"  # a file elsewhere
    assert problem(shared.get(place.format(2))) == (404, "unknown")  # has none
    assert problem(shared.get(place.format(COUNT))) == (404, "unknown")
    for wrong in ("-1", str(1 << 32), "x", "1.5", "9" * 30):
        assert problem(shared.get(place.format(wrong))) == (422, "invalid")
    assert problem(shared.get(place.format(1), shared.token("bob"))) == (403, "not_offered")


def test_originals_of_all_candidates_are_for_those_who_may(shared: Server) -> None:
    asker = shared.token("bob", scopes=["query"])
    for _ in range(2):  # also when the answer is known
        refused = shared.ask(shared.query(1, "originals"), token=asker, key="originals-of-bob")
        assert problem(refused) == (403, "not_offered")
        assert "scope originals" in refused.json()["message"]
        assert shared.ask(shared.query(1, "originals")).status_code == 200
    assert shared.ask(shared.query(1, "names"), token=asker).status_code == 200
    assert shared.ask(shared.query(1), token=asker, key="originals-of-bob").status_code == 200  # it was not used


def test_every_answer_is_guarded(shared: Server) -> None:
    replies = [shared.get("/health", None), shared.get("/v1/galleries"), shared.get("/no", None), shared.ask(b"x")]
    for reply in replies:
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["cache-control"] == "no-store"
        assert reply.headers["referrer-policy"] == "no-referrer"
        assert "default-src 'none'" in reply.headers["content-security-policy"]
        assert "access-control-allow-origin" not in reply.headers
    assert len({reply.headers["nearveil-request"] for reply in replies}) == len(replies)


def test_without_a_good_token_nothing_is_told(server: Server) -> None:
    id_, good = server.secret.split("_")[1], server.secret
    revoked, expired = server.token("eve"), server.token("old", days=1e-9)
    server.store.revoke(revoked.split("_")[1])
    wrong = [None, "x", good[:-1], good + "x", f"nv_{id_}_{'A' * 43}", f"nv_{'0' * 16}_{good[20:]}", revoked, expired]
    replies = [server.get("/v1/galleries", token) for token in wrong]
    replies += [server.get("/metrics", token) for token in wrong]
    replies += [server.ask(server.query(), token=token) for token in wrong]
    replies += [
        server.get("/v1/galleries/none/map", None),
        server.get("/v1/no", None),
        server.client.post("/v1", json=1),
    ]
    assert {reply.status_code for reply in replies} == {401}
    assert len({reply.content for reply in replies}) == 1
    assert all(reply.headers["www-authenticate"] == "Bearer" for reply in replies)
    for header in (f"Basic {good}", good, f"Bearer  {good}", f"Bearer {good} x", "Bearer", ""):
        assert server.client.get("/v1/galleries", headers={"authorization": header}).status_code == 401
    twice = server.client.get("/v1/galleries", headers=[("authorization", f"Bearer {good}")] * 2)
    assert twice.status_code == 401
    assert server.get("/v1/galleries").status_code == 200


def test_a_gallery_of_others_is_as_if_it_were_not_there(shared: Server) -> None:
    stranger = shared.token("bob", galleries=["cars"])
    assert shared.get("/v1/galleries", stranger).json() == {"galleries": []}
    for path in ("/map", "/items/1/original"):
        theirs = shared.get(f"/v1/galleries/birds{path}", stranger)
        missing = shared.get(f"/v1/galleries/cars{path}", stranger)
        assert theirs.status_code == missing.status_code == 404
        assert theirs.content == missing.content
    assert shared.ask(shared.query(), token=stranger).content == shared.ask(b"", token=stranger, gallery="cars").content
    invalid = [
        shared.ask(b"", token=token, gallery=name, key="?") for token in ("", stranger) for name in ("birds", "cars")
    ]
    assert {(reply.status_code, reply.content) for reply in invalid} == {(422, invalid[0].content)}


def test_scopes(shared: Server) -> None:
    watcher, asker = shared.token("prometheus", scopes=["metrics"]), shared.token("asker", scopes=["query"])
    assert shared.get("/metrics", watcher).status_code == 200
    assert problem(shared.get("/v1/galleries", watcher)) == (403, "not_offered")
    assert problem(shared.ask(shared.query(), token=watcher)) == (403, "not_offered")
    assert problem(shared.get("/metrics", asker)) == (403, "not_offered")
    assert problem(shared.get("/v1/galleries/birds/items/1/original", shared.token("o", scopes=["originals"]))) == (
        403,
        "not_offered",
    )


def test_messages_that_make_no_sense(shared: Server) -> None:
    good = shared.query()
    flipped = good[:-1] + bytes([good[-1] ^ 1])
    other = Query(Message("covers", "0f" * 16, {"sets": np.array([0], np.int32)})).to_bytes()
    beyond = Query(Message("covers", shared.index.current().published.public_id, {"sets": np.array([99], np.int32)}))
    refusals = {
        b"": RefusalCode.MALFORMED,
        b"GET / HTTP/1.1": RefusalCode.MALFORMED,
        good[:-1]: RefusalCode.MALFORMED,
        good + b"x": RefusalCode.MALFORMED,
        flipped: RefusalCode.MALFORMED,
        good[:3] + b"\x02" + good[4:]: RefusalCode.VERSION,
        MapChanged("birds", 1).to_bytes(): RefusalCode.MALFORMED,
        beyond.to_bytes(): RefusalCode.MALFORMED,
        MapChanged("birds", 1).to_bytes(): RefusalCode.MALFORMED,
    }
    for data, code in refusals.items():
        reply = shared.ask(data)
        assert (reply.status_code, reply.headers["content-type"]) == (400, FRAME)
        assert decode_frame(reply.content, Refusal).code == code
    changed = shared.ask(other)
    assert (changed.status_code, decode_frame(changed.content, MapChanged)) == (409, MapChanged("birds", 1))


def test_bodies_of_other_kinds_and_sizes(shared: Server) -> None:
    good = shared.query()
    for kind in ("application/json", "text/plain", "", "multipart/form-data"):
        assert problem(shared.ask(good, kind=kind)) == (415, "media_type")
    assert shared.ask(good, kind=f"{FRAME}; charset=x").status_code == 200
    for size in (shared.settings.max_body + 1, 5_000_000):
        reply = shared.ask(bytes(size))
        assert problem(reply) == (413, "too_large")
        assert reply.headers["connection"] == "close"
    assert shared.ask(bytes(shared.settings.max_body)).status_code == 400  # read, and refused for what it is

    async def parts(count: int) -> AsyncIterator[bytes]:
        for _ in range(count):
            yield bytes(10_000)

    assert problem(shared.ask(parts(2))) == (411, "length_required")  # chunks have no length to reserve


def test_keys_are_used_once(shared: Server) -> None:
    first, other = shared.query(0), shared.query(1)
    one = shared.ask(first, key="key-of-ann-1")
    assert shared.ask(first, key="key-of-ann-1").content == one.content  # a retry
    assert problem(shared.ask(other, key="key-of-ann-1")) == (409, "replayed")
    assert problem(shared.ask(first, key="key-of-ann-1", token=shared.token("eve"))) == (409, "replayed")
    assert shared.ask(first, key="key-of-ann-1").status_code == 200
    for key in ("short", "x" * 129, "with space in it", "umlaut-ä-key", "a/slash/key"):
        reply = shared.client.post(
            "/v1/galleries/birds/query",
            content=first,
            headers={"authorization": f"Bearer {shared.secret}", "content-type": FRAME, KEY_HEADER: key.encode()},
        )
        assert problem(reply) == (422, "invalid")
    missing = shared.client.post(
        "/v1/galleries/birds/query",
        content=first,
        headers={"authorization": f"Bearer {shared.secret}", "content-type": FRAME},
    )
    assert problem(missing) == (422, "invalid")


def test_paths_that_try_something(shared: Server) -> None:
    tricks = [
        "/v1/galleries/..%2f..%2fetc%2fpasswd/map",
        "/v1/galleries/%2e%2e/map",
        "/v1/galleries/birds%00/map",
        "/v1//galleries",
        "//v1/galleries",
        "/v1/galleries/",
        "/v1/galleries/birds/map/",
        "/v1/galleries/BIRDS/map",
        "/v1/galleries/birds%0d%0aset-cookie:%20a=b/map",
        f"/v1/galleries/{'a' * 5000}/map",
        "/v1/galleries/birds/items/1/../../../../original",
        "/docs",
        "/redoc",
        "/v1/galleries/bi%72ds/nothing",
    ]
    for path in tricks:
        for reply in (shared.get(path), shared.client.post(path, headers={"authorization": f"Bearer {shared.secret}"})):
            assert reply.status_code in (404, 405, 422), path
            assert set(reply.json()) == {"code", "message"}
            assert "location" not in reply.headers
            assert "set-cookie" not in reply.headers
            assert "etc" not in reply.text
    assert shared.get("/v1/galleries/bi%72ds/map").status_code == 200  # the same name, written otherwise
    for name in ("..", "a/b", "birds%00", "%2e%2e"):
        assert shared.ask(shared.query(), gallery=name).status_code in (404, 405, 422)


def test_other_methods(shared: Server) -> None:
    for method, path in (("DELETE", "/v1/galleries"), ("PUT", "/v1/galleries/birds/query"), ("POST", "/health")):
        reply = shared.client.request(method, path, headers={"authorization": f"Bearer {shared.secret}"})
        assert problem(reply) == (405, "method")
        assert reply.headers["allow"]
    assert shared.get("/v1/galleries/birds/query").status_code == 405


def test_other_hosts(shared: Server) -> None:
    for host in ("evil.example", "localhost.evil.example", "localhost@evil", "", "localhost:80:80"):
        assert problem(shared.get("/ready", None, host=host)) == (400, "host")
        assert problem(shared.get("/v1/galleries", host=host)) == (400, "host")
        assert shared.get("/health", None, host=host).status_code == 200  # tells nothing
    for host in ("localhost", "LOCALHOST:8321", "127.0.0.1:1", "[::1]:8321"):
        assert shared.get("/ready", None, host=host).status_code == 200


def test_a_deleted_item_is_in_no_answer_that_begins_later(server: Server, tmp_path: Path) -> None:
    with Index.open(tmp_path / "birds") as other:  # as another process has it
        for extras in ("none", "names"):
            before = server.answer(server.query(2, extras))
            server.answer(server.query(2, extras))
            other.delete(before.ids[:2])
            after = server.answer(server.query(2, extras))
            assert not np.isin(before.ids[:2], after.ids).any()
            assert len(after.ids) == len(before.ids)
        other.add(plain_items(unit_rows(3, seed=5)))
        same = server.answer(server.query(2))
        assert (same.ids == server.answer(server.query(2)).ids).all()


def test_a_new_map_is_served_at_once_and_the_old_one_answered(server: Server, tmp_path: Path) -> None:
    old = server.query(1)
    assert server.ask(old).status_code == 200
    etag = server.get("/v1/galleries/birds/map").headers["etag"]
    with Index.open(tmp_path / "birds") as other:
        other.add(plain_items(unit_rows(20, seed=5)))
        other.publish(EPSILON, F, n_sets=3, reach=0.0)
    reply = server.get("/v1/galleries/birds/map", **{"if-none-match": etag})
    assert (reply.status_code, decode_frame(reply.content, PublicPart).revision) == (200, 2)
    assert len(server.answer(old).ids) == COUNT * F
    assert len(server.answer(server.query(2)).ids) == (COUNT + 20) * F
    server.index.publish(EPSILON, F, n_sets=2, reach=0.0, keep=1)
    assert decode_frame(server.ask(old).content, MapChanged) == MapChanged("birds", 2)


def test_a_gallery_that_is_gone_and_comes_back(server: Server, tmp_path: Path) -> None:
    data = server.query()
    answer = server.ask(data).content
    assert server.get("/ready", None).status_code == 200
    (tmp_path / "birds").rename(tmp_path / "elsewhere")
    gone = server.ask(data)
    assert problem(gone) == (503, "unavailable")
    assert gone.headers["retry-after"] == "2"
    assert problem(server.get("/v1/galleries")) == (503, "unavailable")
    assert problem(server.get("/v1/galleries/birds/map")) == (503, "unavailable")
    assert server.get("/health", None).status_code == 200
    assert 'nearveil_gallery_up{gallery="birds"} 0.0' in server.get("/metrics").text
    (tmp_path / "elsewhere").rename(tmp_path / "birds")
    assert server.ask(data).content == answer
    assert 'nearveil_gallery_up{gallery="birds"} 1.0' in server.get("/metrics").text


def test_another_index_in_its_place_is_another(server: Server, tmp_path: Path) -> None:
    """As when a backup is put back: the same numbers of revisions, other contents."""
    data, victim = server.query(), 0
    for number in range(SETS):
        server.ask(server.query(number))
    index_of(tmp_path / "backup").close()
    with Index.open(tmp_path / "backup") as backup:
        victim = int(server.answer(data).ids[0])
        backup.delete([victim])
    server.index.delete([int(server.answer(data).ids[-1])])  # the same revision now
    assert victim in server.answer(data).ids
    (tmp_path / "birds").rename(tmp_path / "old")
    (tmp_path / "backup").rename(tmp_path / "birds")
    assert victim not in server.answer(data).ids


def test_a_pipe_in_place_of_an_index_is_no_index(server: Server, tmp_path: Path) -> None:
    data = server.query()
    server.answer(data)
    place = tmp_path / "birds" / "index.db"
    place.rename(tmp_path / "away")
    os.mkfifo(place)
    assert problem(server.ask(data)) == (503, "unavailable")
    with pytest.raises(IndexStoreError, match="not a regular file"):
        Index.open(tmp_path / "birds")
    place.unlink()
    (tmp_path / "away").rename(place)
    assert server.answer(data).ids.size


def test_the_extractor_is_named_without_being_configured(tmp_path: Path) -> None:
    for given, told in (("", "HOG and colour"), ("ours", "ours")):
        index = Index.create(tmp_path / f"birds{given}", dimension=12, extractor=HogColor().fingerprint)
        index.add(plain_items(unit_rows(30)))
        index.publish(EPSILON, F, n_sets=SETS, reach=0.0)
        with closing(OpenGallery(index, "birds", extractor=given)) as gallery:
            assert gallery.info().extractor == told
            assert decode_frame(gallery.map(), PublicPart).extractor == told


def test_nothing_published_yet(tmp_path: Path) -> None:
    index = Index.create(tmp_path / "empty", dimension=12, extractor="tests")
    index.add(plain_items(unit_rows(30)))
    with serving(tmp_path, index) as server:
        assert server.get("/v1/galleries").json()["galleries"][0]["candidates"] == []
        assert problem(server.get("/v1/galleries/birds/map")) == (404, "unknown")
        asked = Query(Message("covers", "0f" * 16, {"sets": np.array([0], np.int32)})).to_bytes()
        assert server.ask(asked).status_code == 409
        assert server.get("/ready", None).json() == {"status": "unavailable"}
        index.publish(EPSILON, F, n_sets=SETS, reach=0.0)
        assert server.get("/v1/galleries/birds/map").status_code == 200


def test_an_index_in_postgresql_and_its_server_restarted(tmp_path: Path, index_url: str, index_server: object) -> None:
    with serving(tmp_path, index_of(index_url), database_timeout=2.0) as server:
        data = server.query()
        before = server.answer(data)
        with Index.open(index_url) as other:
            other.delete(before.ids[:1])
        after = server.answer(data)
        assert before.ids[0] not in after.ids
        index_server.stop("immediate")  # type: ignore[attr-defined]
        try:
            assert problem(server.ask(data)) == (503, "unavailable")
            assert server.get("/health", None).status_code == 200
        finally:
            index_server.start()  # type: ignore[attr-defined]
        assert (server.answer(data).ids == after.ids).all()


def test_what_nobody_thought_of_is_not_told(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> bytes:
        raise RuntimeError("a secret in an error")

    for name in ("map", "query"):
        monkeypatch.setattr(server.gallery, name, broken)
    for reply in (server.get("/v1/galleries/birds/map"), server.ask(server.query())):
        assert problem(reply) == (500, "failed")
        assert "secret" not in reply.text
    server.client.app.state.nearveil.log._queue.join()
    log = lines(tmp_path)
    assert "a secret" not in log
    told = [json.loads(line) for line in log.splitlines()]
    assert [one["error"] for one in told if one.get("status") == 500] == ["RuntimeError"] * 2


def test_a_token_that_nobody_uses_ends_for_good(server: Server, tmp_path: Path) -> None:
    """The exploit: a token expires, nobody asks, the server stops, and the clock is set back."""
    secret, now = server.token("bob", days=1), time.time()
    server.store._clock = lambda: now + 2 * 86_400
    server.client.runner.run(server.client.app.state.nearveil.refresh())  # as every five seconds
    with TokenStore(tmp_path / "tokens.db") as later:
        assert later.verify(secret) is None
        assert later.verify(server.secret) is not None


def test_figures_for_prometheus(server: Server) -> None:
    for _ in range(3):
        server.ask(server.query(extras="thumbnails"))
    server.ask(b"x", token=None)
    server.get("/nothing/of/the/kind/secret-path", None)
    text = server.get("/metrics").text
    assert "nearveil_answers_made_total 1.0" in text  # the others were kept
    assert 'nearveil_requests_total{route="/v1/galleries/{gallery}/query",status="200"} 3.0' in text
    assert 'nearveil_requests_total{route="unmatched",status="404"} 1.0' in text
    assert 'nearveil_refused_total{code="unauthorized"} 1.0' in text
    assert 'nearveil_gallery_revision{gallery="birds"} 1.0' in text
    assert 'nearveil_gallery_stale{gallery="birds"} 0.0' in text
    assert "nearveil_in_flight 1.0" in text
    assert "secret-path" not in text
    sent = [
        line
        for line in text.splitlines()
        if line.startswith('nearveil_answer_bytes_total{route="/v1/galleries/{gallery}/query')
    ]
    expected = 3 * len(server.ask(server.query()).content)
    assert float(sent[0].split()[-1]) >= expected
    server.index.add(plain_items(unit_rows(2, seed=8)))
    assert 'nearveil_gallery_stale{gallery="birds"} 1.0' in server.get("/metrics").text


def test_figures_tell_of_no_gallery_of_others_and_not_of_the_process(server: Server) -> None:
    watcher = server.token("prometheus", scopes=["metrics"], galleries=["cars"])
    assert 'gallery="birds"' in server.get("/metrics").text
    text = server.get("/metrics", watcher).text
    assert "nearveil_requests_total{" in text
    assert "birds" not in text
    assert "process_" not in server.get("/metrics").text  # memory grows with a protected gallery's records


def test_answers_are_cut_for_no_one(shared: Server) -> None:
    """All answers of a map have one size: what comes back tells no observer which set was named."""
    assert len({len(shared.ask(shared.query(number)).content) for number in range(SETS)}) == 1
    assert Answer.from_bytes(shared.ask(shared.query()).content).codes.shape[0] == COUNT * F
