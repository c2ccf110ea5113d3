"""Search at home: a copy is fetched by command alone, a search sends nothing, and a hostile server changes nothing."""

import asyncio
import hashlib
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from nearveil import AsyncClient, Client
from nearveil.client import Nearest
from nearveil.client.copies import HomeError, LoadedCopy
from nearveil.client.errors import DeclinedError, QuestionError, ReplyError
from nearveil.gallery import Index
from nearveil.gallery.answers import LARGEST_DETAILS, encode_details
from nearveil.wire import codes
from nearveil.wire.codes import Block, CodesGroup, CodesManifest
from nearveil.wire.frames import Kind, WireError
from tests.service.asking import COUNT, QUERIES, Scene, framed, make_index, scene
from tests.small_disk import fill, mounted

pytestmark = pytest.mark.usefixtures("no_pauses")
OFFERS = ("names", "thumbnails", "codes")


@pytest.fixture
def made(tmp_path: Path) -> Path:
    return make_index(tmp_path / "birds")


@pytest.fixture
def here(made: Path, tmp_path: Path) -> Iterator[Scene]:
    with scene(made, tmp_path, offers=OFFERS) as found:
        yield found


def test_a_search_at_home_finds_the_nearest_sends_nothing_and_pays_nothing(here: Scene, tmp_path: Path) -> None:
    client, wire = here.client(home=tmp_path / "home")
    seen: list[tuple[int, int]] = []
    assert len(client.sync(progress=lambda done, of: seen.append((done, of)))) == COUNT
    assert seen == [(0, 1), (1, 1)]
    sent = len(wire.requests)
    every = [client.nearest(row, 5, epsilon=0) for row in QUERIES[:6]]
    assert len(wire.requests) == sent
    assert here.paid == 0
    index = here.gallery.index  # type: ignore[attr-defined]
    for row, found in zip(QUERIES, every, strict=False):
        cosines = index.snapshot().features @ row / np.linalg.norm(row)
        best = np.argsort(-cosines)[:5]
        ids = [match.id for match in found.matches]
        assert np.allclose(cosines[ids], cosines[best], atol=5e-3)  # as precise as the codes
        assert np.allclose([match.similarity for match in found.matches], cosines[ids], atol=5e-3)
        assert [match.name for match in found.matches] == [f"bird {number}.png" for number in ids]
    guarantee = every[0].guarantee
    assert (guarantee.epsilon, guarantee.delta, guarantee.sound) == (0.0, 0.0, True)
    assert (every[0].set, every[0].bytes_sent, every[0].n_candidates) == (None, 0, COUNT)


def test_no_account_and_no_server_are_needed_to_search_a_copy(here: Scene, tmp_path: Path) -> None:
    first, _ = here.client(home=tmp_path / "home")
    first.sync()
    nobody = httpx.MockTransport(lambda request: pytest.fail(f"{request.url} was asked for"))
    second, _ = here.client(home=tmp_path / "home", account=None, wire=nobody)
    assert second.nearest(QUERIES[0], 5, epsilon=0).matches == first.nearest(QUERIES[0], 5, epsilon=0).matches
    assert second.nearest(QUERIES[0], 5, 0, gallery="birds", by="home").matches


def test_a_question_without_a_copy_is_refused_and_sends_nothing_of_it(here: Scene, tmp_path: Path) -> None:
    client, wire = here.client(home=tmp_path / "home")
    with pytest.raises(QuestionError, match="nearveil sync"):
        client.nearest(QUERIES[0], epsilon=0)
    assert [url.rpartition("/")[2] for _, url, _, _ in wire.requests] == ["galleries"]  # does it answer sealed ones?
    with pytest.raises(QuestionError, match="nearveil sync"):
        client.nearest(QUERIES[0], epsilon=0, by="home")
    assert len(wire.requests) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"by": "message"}, "above 0"),
        ({"by": "home", "epsilon": 4.0}, "leave epsilon out"),
        ({"by": "magic"}, "one of"),
        ({"thumbnails": True}, "no images"),
        ({"candidates": 0.1}, "candidates: it applies to messages only"),
        ({"k": COUNT + 1}, "at most"),
        ({"query": np.ones(3)}, "numbers"),
    ],
)
def test_what_does_not_fit_a_search_at_home_is_refused(
    here: Scene, tmp_path: Path, options: dict[str, object], words: str
) -> None:
    client, wire = here.client(home=tmp_path / "home")
    client.sync()
    sent = len(wire.requests)
    with pytest.raises(QuestionError, match=words):
        client.nearest(**({"query": QUERIES[0], "epsilon": 0} | options))
    assert (len(wire.requests), here.paid) == (sent, 0)


def test_a_second_time_only_what_changed_is_fetched(here: Scene, tmp_path: Path) -> None:
    client, wire = here.client(home=tmp_path / "home")
    client.sync()
    before = len(wire.requests)
    client.sync()
    assert [url.rpartition("/")[2] for _, url, _, _ in wire.requests[before:]] == ["galleries", "codes"]
    here.gallery.index.delete([7])  # type: ignore[attr-defined]
    before = len(wire.requests)
    assert len(client.sync()) == COUNT - 1
    asked = [url.rpartition("birds/")[2] for _, url, _, _ in wire.requests[before:]]
    assert asked[1:] == ["codes", "codes/0?blocks=none", "codes/0?blocks=0"]
    assert 7 not in [match.id for match in client.nearest(QUERIES[0], COUNT - 1, epsilon=0).matches]


def test_a_gallery_that_is_published_anew_is_fetched_anew(here: Scene, tmp_path: Path) -> None:
    client, _ = here.client(home=tmp_path / "home")
    client.sync()
    index = here.gallery.index  # type: ignore[attr-defined]
    index.delete(range(40))
    index.publish(4.0, 0.1, n_sets=6, reach=0.0)
    assert len(client.sync()) == COUNT - 40
    assert min(match.id for match in client.nearest(QUERIES[0], 5, epsilon=0).matches) >= 40


def test_a_gallery_must_offer_its_codes(made: Path, tmp_path: Path) -> None:
    with scene(made, tmp_path) as here:
        client, wire = here.client(home=tmp_path / "home")
        with pytest.raises(QuestionError, match="offers no copy of its codes"):
            client.sync()
        assert len(wire.requests) == 1
        told, _ = here.client(_say_codes, home=tmp_path / "other")  # one that asks all the same
        with pytest.raises(DeclinedError, match="does not offer its codes"):
            told.sync()


def _say_codes(request: httpx.Request, reply: httpx.Response) -> httpx.Response:
    """Let the list say that codes are offered."""
    if not request.url.path.endswith("/galleries"):
        return reply
    stream = reply.stream

    class Changed(httpx.AsyncByteStream):
        async def __aiter__(self):  # type: ignore[no-untyped-def]
            data = b"".join([part async for part in stream])  # type: ignore[union-attr]
            yield data.replace(b'"names"', b'"codes"')

    headers = {"content-type": "application/json"}
    return httpx.Response(reply.status_code, headers=headers, stream=Changed())


def test_a_server_that_sends_other_codes_than_it_named_changes_nothing(here: Scene, tmp_path: Path) -> None:
    client, _ = here.client(home=tmp_path / "home")
    client.sync()
    here.gallery.index.delete([3])  # type: ignore[attr-defined]
    group = CodesGroup(0, {0: bytes(32)}, {})

    def swap(request: httpx.Request, reply: httpx.Response) -> httpx.Response:
        return framed(group.to_bytes()) if "/codes/" in request.url.path else reply

    hostile, wire = here.client(swap, home=tmp_path / "home")
    with pytest.raises(ReplyError, match="changes faster"):
        hostile.sync()
    assert sum("/codes/" in url for _, url, _, _ in wire.requests) <= 6
    assert here.client(home=tmp_path / "home")[0].nearest(QUERIES[0], 5, epsilon=0).n_candidates == COUNT


@pytest.mark.parametrize("size", [1, 400])
def test_a_manifest_that_is_too_large_is_refused_before_anything_is_fetched(
    here: Scene, tmp_path: Path, size: int
) -> None:
    client, wire = here.client(home=tmp_path / "home")
    with pytest.raises(QuestionError, match="the limit is"):
        client.sync(most=size)
    assert not any("/codes/" in url for _, url, _, _ in wire.requests)
    with pytest.raises(QuestionError, match="number of bytes"):
        client.sync(most=0)


def test_a_manifest_of_another_gallery_or_none_is_refused(here: Scene, tmp_path: Path) -> None:
    manifest = CodesManifest.from_bytes(here.gallery.codes())
    other = CodesManifest(**(vars(manifest) | {"gallery": "cars"}))

    def swap(request: httpx.Request, reply: httpx.Response) -> httpx.Response:
        return framed(other.to_bytes()) if request.url.path.endswith("/codes") else reply

    with pytest.raises(ReplyError, match="another gallery"):
        here.client(swap, home=tmp_path / "home")[0].sync()

    def spoil(request: httpx.Request, reply: httpx.Response) -> httpx.Response:
        return framed(b"NVW" + bytes(40)) if request.url.path.endswith("/codes") else reply

    with pytest.raises(WireError):
        here.client(spoil, home=tmp_path / "home")[0].sync()


def test_an_index_here_is_searched_at_home_too(made: Path, tmp_path: Path) -> None:
    with Index.open(made) as index, Client(index, home=tmp_path / "home") as client:
        client.sync()
        assert len(client.nearest(QUERIES[0], 5, epsilon=0).matches) == 5


def test_two_galleries_have_a_copy_each(here: Scene, tmp_path: Path) -> None:
    client, _ = here.client(home=tmp_path / "home")
    client.sync()
    (tmp_path / "home" / "cars").mkdir()
    for path in (tmp_path / "home" / "birds").iterdir():
        (tmp_path / "home" / "cars" / path.name).write_bytes(path.read_bytes())
    fresh, _ = here.client(home=tmp_path / "home")
    with pytest.raises(QuestionError, match="birds, cars: name one"):
        fresh.nearest(QUERIES[0], epsilon=0)
    assert fresh.nearest(QUERIES[0], epsilon=0, gallery="cars").matches


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    with Index.create(tmp_path / "texts", dimension=QUERIES.shape[1]) as index:
        index.add_table(
            np.random.default_rng(1).standard_normal((300, QUERIES.shape[1])),
            ids=[f"doc-{n}" for n in range(300)],
            metadata=[{"n": n, "rare": n % 50 == 0} for n in range(300)],
        )
        index.publish(4.0, 0.1, n_sets=6, reach=0.0)
    return tmp_path / "texts"


def test_metadata_comes_with_a_copy_and_filters_there(texts: Path, tmp_path: Path) -> None:
    with scene(texts, tmp_path, offers=("names", "metadata", "codes")) as here:
        client, wire = here.client(home=tmp_path / "home")
        client.sync()
        sent = len(wire.requests)
        everything = client.nearest(QUERIES[0], 300, epsilon=0)
        for match in everything.matches:
            assert match.external_id == f"doc-{match.metadata['n']}"
        rare = [match.id for match in everything.matches if match.metadata["rare"]]
        assert len(rare) == 6
        # However far behind they lie, the nearest of those that are wanted are found.
        assert [one.id for one in client.nearest(QUERIES[0], 4, epsilon=0, where={"rare": True}).matches] == rare[:4]
        few = client.nearest(QUERIES[0], 8, epsilon=0, where=lambda match: match.metadata["rare"])
        assert [one.id for one in few.matches] == rare
        assert client.nearest(QUERIES[0], 8, epsilon=0, where={"no such": 1}).matches == ()
        assert (len(wire.requests), here.paid) == (sent, 0)


def test_values_of_a_filter_are_equal_as_in_python(tmp_path: Path) -> None:
    values: list[Any] = [1, 1.0, True, "1", 0, None, [1, 2], [1.0, 2.0], {"a": [1]}, 0.5, 1e300, "\ud7ff", "", 2**70]
    queries: list[Any] = [
        *values,
        (1, 2),
        (1.0, 2),
        np.array([1, 2]),
        np.float32(0.5),
        np.int64(1),
        np.str_("1"),
        [2, 1],
    ]
    with Index.create(tmp_path / "texts", dimension=QUERIES.shape[1]) as index:
        rows = np.random.default_rng(1).standard_normal((40, QUERIES.shape[1]))
        index.add_table(rows, metadata=[{"v": v} for v in values] + [{"other": 1}] * (40 - len(values)))
        index.publish(4.0, 1.0)
    with scene(tmp_path / "texts", tmp_path, offers=("metadata", "codes"), epsilon=100.0) as here:
        client, wire = here.client(home=tmp_path / "home")
        copy = client.sync().load()
        assert copy.count_pairs() == 40
        for number, query in enumerate(queries):
            wanted = query.tolist() if hasattr(query, "tolist") else list(query) if isinstance(query, tuple) else query
            expected = [number for number, value in enumerate(values) if value == wanted]
            assert np.flatnonzero(copy.find_matching({"v": query})).tolist() == expected, query
            for epsilon in (0, 4.0):  # in a copy, and in a message
                found = client.nearest(QUERIES[0], 20, epsilon=epsilon, where={"v": query}, key=f"{number}").matches
                assert sorted(match.id for match in found) == expected, query
        paid, sent = here.paid, len(wire.requests)
        for wrong in ({1, 2}, float("nan"), object(), b"1", np.array([np.inf]), 10**5000, [object()]):
            for epsilon in (0, 4.0):
                with pytest.raises(QuestionError, match="where: its values must be values of JSON"):
                    client.nearest(QUERIES[0], epsilon=epsilon, where={"v": wrong})
        assert (here.paid, len(wire.requests)) == (paid, sent)
        assert not copy.find_matching({"v": 1, "other": 1}).any()
        assert copy.find_matching({}).all()


def test_a_filtered_search_ranks_as_an_unfiltered_one(texts: Path, tmp_path: Path) -> None:
    with scene(texts, tmp_path, offers=("metadata", "codes")) as here:
        client, _ = here.client(home=tmp_path / "home")
        client.sync()
        for query in QUERIES[:5]:
            everything = client.nearest(query, 300, epsilon=0).matches
            for rare in (True, False):
                found = client.nearest(query, 9, epsilon=0, where={"rare": rare}).matches
                assert found == tuple(match for match in everything if match.metadata["rare"] is rare)[:9]


def test_a_copy_without_metadata_filters_by_names_alone(here: Scene, tmp_path: Path) -> None:
    client, _ = here.client(home=tmp_path / "home")
    client.sync()
    with pytest.raises(QuestionError, match="where: this copy holds no metadata"):
        client.nearest(QUERIES[0], epsilon=0, where={"colour": "red"})
    found = client.nearest(QUERIES[0], 2, epsilon=0, where=lambda match: match.name.endswith("7.png"))
    assert [match.name.endswith("7.png") for match in found.matches] == [True, True]


@pytest.mark.parametrize("spoiled", [b"[1]", b"{", b"\xff", b'{"name": 1}', b"[" * 5000])
def test_invalid_metadata_of_an_item_counts_as_empty(texts: Path, tmp_path: Path, spoiled: bytes) -> None:
    """A server spoils the item nearest to a suspect. An error about it would show that the suspect was searched for."""
    filters = (None, bool)
    with scene(texts, tmp_path, offers=("metadata", "codes")) as here:
        client, _ = here.client(home=tmp_path / "home")
        client.sync()
        honest = [client.nearest(QUERIES[0], 3, epsilon=0, where=where).matches for where in filters]
    suspect, encode = honest[0][0], encode_details
    with scene(texts, tmp_path / "other", offers=("metadata", "codes")) as here, pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "nearveil.gallery.index.encode_details",
            lambda details: spoiled if details.metadata == suspect.metadata else encode(details),
        )
        client, wire = here.client(home=tmp_path / "spoiled")
        client.sync()
        n_requests = len(wire.requests)
        for where, expected in zip(filters, honest, strict=True):
            nearest = client.nearest(QUERIES[0], 3, epsilon=0, where=where).matches
            assert [match.id for match in nearest] == [match.id for match in expected]
            assert (nearest[0].metadata, nearest[1].metadata) == ({}, expected[1].metadata)
        assert len(wire.requests) == n_requests


def test_a_sync_during_a_search_fails_no_search(here: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server deletes the items near a suspect: an error would show that the suspect was searched for."""
    client, _ = here.client(home=tmp_path / "home")
    copy, search = client.sync(), LoadedCopy.search
    other, _ = here.client()
    other._client._copies = client._client._copies

    def search_and_sync(self: LoadedCopy, rows: Any, k: int = 8, *more: Any) -> Any:
        result = search(self, rows, k, *more)
        here.gallery.index.delete(result[0][0].tolist())  # type: ignore[attr-defined]
        other.sync()
        return result

    n_items = len(copy)
    expected = client.nearest(QUERIES[0], 5, epsilon=0).matches
    monkeypatch.setattr(LoadedCopy, "search", search_and_sync)
    assert client.nearest(QUERIES[0], 5, epsilon=0).matches == expected
    assert len(copy) == n_items - 5


def test_a_group_that_has_its_digest_and_no_meaning_leaves_the_copy_as_it_was(here: Scene, tmp_path: Path) -> None:
    honest, _ = here.client(home=tmp_path / "home")
    told = honest.sync().manifest
    assert told is not None
    nonsense = CodesGroup(0, {0: hashlib.sha256(b"nonsense").digest()}, {0: b"nonsense"})
    forged = replace(told, groups={0: nonsense.digest}).to_bytes()

    def lie(request: httpx.Request, reply: httpx.Response) -> httpx.Response:
        if request.url.path.endswith("/codes"):
            return framed(forged)
        if "/codes/" in request.url.path:
            wanted = request.url.params.get("blocks") != "none"
            return framed(nonsense.to_bytes() if wanted else CodesGroup(0, nonsense.digests).to_bytes())
        return reply

    liar, _ = here.client(lie, home=tmp_path / "home")
    with pytest.raises(WireError):
        liar.sync()
    assert len(honest.nearest(QUERIES[0], 5, epsilon=0).matches) == 5
    again, _ = here.client(home=tmp_path / "home")
    assert len(again.nearest(QUERIES[0], 5, epsilon=0).matches) == 5


def test_questions_at_once_about_an_index_here_wait_for_each_other(made: Path, tmp_path: Path) -> None:
    async def ask() -> list[Nearest]:
        async with AsyncClient(made, home=tmp_path / "home") as client:
            return list(await asyncio.gather(*(client.nearest(row, 3, epsilon=0) for row in QUERIES[:20])))

    assert all(len(found.matches) == 3 for found in asyncio.run(ask()))


def test_a_gallery_whose_texts_are_too_long_for_a_copy_says_so(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with scene(texts, tmp_path, offers=("names", "codes", "metadata")) as here:
        client, _ = here.client(home=tmp_path / "home")
        assert len(client.sync()) == 300
    monkeypatch.setattr(Kind.CODES_GROUP, "limit", 1000)
    with scene(texts, tmp_path / "again", offers=("names", "codes", "metadata")) as here:
        client, _ = here.client(home=tmp_path / "other")
        with pytest.raises(DeclinedError, match="too long for a local copy"):
            client.sync()


def _files(copy: Path) -> list[Path]:
    return sorted(path for path in (copy / "birds").iterdir() if path.name != "lock")


@pytest.mark.parametrize("damage", ["truncated", "one bit", "empty", "missing"])
@pytest.mark.parametrize("kind", ["codes", "manifest", "public"])
def test_a_corrupted_copy_is_refused_and_fetched_again(here: Scene, tmp_path: Path, kind: str, damage: str) -> None:
    client, _ = here.client(home=tmp_path / "home")
    client.sync()
    expected = client.nearest(QUERIES[0], 5, epsilon=0).matches
    (path,) = [path for path in _files(tmp_path / "home") if kind in path.name]
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]
        path.write_bytes({"truncated": content[:-7], "one bit": flipped, "empty": b""}[damage])
    fresh, wire = here.client(home=tmp_path / "home")
    if not (damage == "missing" and kind != "codes"):  # then there is no copy
        with pytest.raises(QuestionError, match=r"^home: The local copy in .* is corrupted; run `nearveil sync`"):
            fresh.nearest(QUERIES[0], 5, epsilon=0, by="home")
        assert wire.requests == []
    fresh.sync()
    assert fresh.nearest(QUERIES[0], 5, epsilon=0, by="home").matches == expected
    assert path.read_bytes() == content


def test_files_and_folder_of_a_copy_are_durable(here: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file is flushed before it has its name, and the folder after all of them."""
    events: list[str] = []
    fsync, rename = os.fsync, Path.replace

    def flush(descriptor: int) -> None:
        name = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        if name.startswith(str(tmp_path / "home")):
            events.append("folder" if Path(name).is_dir() else "file")
        fsync(descriptor)

    def replaced(self: Path, target: Path) -> Path:
        events.append("name")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(Path, "replace", replaced)
    client, _ = here.client(home=tmp_path / "home")
    client.sync()
    assert events == ["file", "name"] * 3 + ["folder"]


def test_a_full_disk_is_named_and_the_copy_stays(here: Scene, small_disk: Path) -> None:
    client, _ = here.client(home=small_disk / "home")
    client.sync()
    before = {path: path.read_bytes() for path in _files(small_disk / "home")}
    (codes,) = [path for path in before if "codes" in path.name]
    codes.write_bytes(b"")
    ballast = fill(small_disk, leave=0)
    with pytest.raises(HomeError, match=r"Cannot write the local copy in .*home/birds: No space left on device\. Free"):
        client.sync()
    assert {path.name for path in _files(small_disk / "home")} == {path.name for path in before}
    ballast.unlink()
    client.sync()
    assert {path: path.read_bytes() for path in _files(small_disk / "home")} == before


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    yield from mounted(tmp_path / "disk", "1m")


def test_groups_that_unpack_to_much_are_refused(here: Scene, tmp_path: Path) -> None:
    """A group of some kilobytes unpacks to many megabytes: they count, and one group at a time is unpacked."""
    honest, _ = here.client(home=tmp_path / "home")
    manifest = honest.sync().manifest
    assert manifest is not None
    width, unpacking = manifest.width, []

    def bomb(number: int) -> CodesGroup:
        ids = np.arange(256, dtype=np.uint32) + (number << codes.GROUP_BITS)
        block = Block.make(ids, np.zeros((256, width), np.uint8), [[b"x" * 40_000] * 256]).to_bytes()
        return CodesGroup(number, {0: hashlib.sha256(block).digest()}, {0: block})

    groups = {number: bomb(number) for number in range(4)}
    forged = replace(manifest, items=4 * 256, groups={number: group.digest for number, group in groups.items()})

    def forge(request: httpx.Request, reply: httpx.Response) -> httpx.Response:
        if request.url.path.endswith("/codes"):
            return framed(forged.to_bytes())
        if "/codes/" in request.url.path:
            return framed(groups[int(request.url.path.rpartition("/")[2])].to_bytes())
        return reply

    read = CodesGroup.from_bytes

    def watch(data: bytes) -> CodesGroup:
        unpacking.append(1)
        most.append(len(unpacking))
        try:
            time.sleep(0.1)  # without a lock the other downloads arrive meanwhile
            return read(data)
        finally:
            unpacking.pop()

    most: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CodesGroup, "from_bytes", watch)
        client, _ = here.client(forge, home=tmp_path / "bomb")
        with pytest.raises(
            QuestionError, match=r"most: the gallery's codes and texts have more than .* bytes, unpacked"
        ):
            client.sync(most=20 << 20)
        assert sum(len(group.to_bytes()) for group in groups.values()) < 1 << 20
        while unpacking:  # the thread of the refused copy ends by itself
            time.sleep(0.01)
        client.sync(most=64 << 20)
    assert max(most) == 1


def test_texts_beyond_their_limit_are_refused() -> None:
    for size, is_valid in ((LARGEST_DETAILS, True), (LARGEST_DETAILS + 1, False)):
        data = Block.make(np.arange(2, dtype=np.uint32), np.zeros((2, 3), np.uint8), [[b"", b"x" * size]]).to_bytes()
        if is_valid:
            assert len(Block.from_bytes(data, 3, 1).ids) == 2
        else:
            with pytest.raises(WireError, match="each of at most"):
                Block.from_bytes(data, 3, 1)


def test_a_client_without_a_home_directory_asks_by_messages(monkeypatch: pytest.MonkeyPatch, here: Scene) -> None:
    """A container may run under a user that no file knows."""

    def fail() -> Path:
        raise RuntimeError("could not determine the home directory")

    monkeypatch.setattr("nearveil.client.home.data_folder", fail)
    client, _ = here.client()
    assert client.nearest(QUERIES[0], epsilon=4.0, key="mine").way == "message"
