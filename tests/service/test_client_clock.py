"""When a client sends: moments that public sizes fix, however long its private work takes."""

import asyncio
import io
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from nearveil import AsyncClient, Client
from nearveil.client.errors import QuestionError, UnansweredError
from nearveil.client.home import search_period
from nearveil.client.questions import classification_period
from nearveil.client.timing import (
    EXTRACTION_PERIOD,
    TEXT,
    VECTOR_PERIOD,
    choice_period,
    extraction_period,
    next_deadline,
    private_step,
    question_period,
)
from nearveil.features import ImageError
from nearveil.gallery.codes import WholeCodes
from nearveil.mechanisms import PublicMap
from nearveil.metrics import ScoreSpace
from tests.clocks import SetClock, Watched, watched
from tests.service.asking import QUERIES, URL, Scene, framed, is_post, public_of, scene, seeded
from tests.service.protected import make, published, rows
from tests.service.test_client_classify import protected

__all__ = ["watched"]

WORK = (0.0, 0.0078125, 0.03125)  # seconds that private work takes, all shorter than a period
PERIOD = EXTRACTION_PERIOD


@pytest.fixture
def here(made: Path, tmp_path: Path) -> Iterator[Scene]:
    with scene(made, tmp_path, epsilon=500.0) as found:
        yield found


class Toy:
    """The extractor of the gallery."""

    fingerprint = name = "toy"
    dimension = 8

    def extract(self, pixels: list[NDArray[np.uint8]]) -> NDArray[np.float32]:
        return np.stack([QUERIES[int(image[0, 0, 0])] for image in pixels])


def png(number: int) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.full((4, 4, 3), number, np.uint8)).save(out, "PNG")
    return out.getvalue()


@pytest.mark.parametrize("images", [False, True])
def test_a_question_goes_out_when_public_sizes_say_so(here: Scene, watched: Watched, images: bool) -> None:
    client, _ = here.client()
    client.galleries()
    public = public_of(here.gallery)
    period = question_period(public)
    requests, ends = 2 if images else 1, set()
    for work in WORK:
        watched.work(paying=work, choosing=work / 4, ranking=work)
        client.nearest(QUERIES[0], epsilon=4.0, thumbnails=images, rng=seeded())
        (_, came) = watched.heard[0]
        assert watched.sent[0][0] == "map"
        assert watched.sent[1] == ("query", came + period)  # to the last bit
        assert watched.gaps()[1:] == [("query", 0.0)] * (requests - 1)
        ends.add(round(watched.clock.time - watched.heard[-1][1], 9))  # until the call returns
    (end,) = ends
    assert end > choice_period(public, texts=8)  # names come with the last answer


def test_late_work_is_seen_as_a_number_of_periods(here: Scene, watched: Watched) -> None:
    client, _ = here.client()
    client.galleries()
    period = question_period(public_of(here.gallery))
    for work, count in ((0.9, 1), (1.1, 2), (1.9, 2), (2.5, 3)):
        watched.work(paying=work * period)
        client.nearest(QUERIES[0], epsilon=4.0)
        assert watched.sent[1][1] == watched.heard[0][1] + count * period


def test_a_retry_goes_by_the_same_rule(here: Scene, watched: Watched) -> None:
    busy = True

    def refuse(request: httpx.Request, reply: httpx.Response) -> httpx.Response:
        if busy and is_post(request):
            return framed(b'{"code": "busy", "message": "later"}', 503, "application/json")
        return reply

    client, _ = here.client(refuse)
    client.galleries()
    seen = set()
    for work in WORK:
        busy = True
        watched.work(paying=work, choosing=work)
        with pytest.raises(UnansweredError) as lost:
            client.nearest(QUERIES[1], epsilon=4.0)
        first = tuple(watched.gaps())
        busy = False
        watched.work()
        client.nearest(QUERIES[1], epsilon=4.0, key=lost.value.key)
        seen.add((first, tuple(watched.gaps())))
    ((first, again),) = seen
    assert [what for what, _ in first] == ["query"] * 4
    assert first[0] == again[0]  # made anew, or found in the ledger


@pytest.mark.parametrize("given", [False, True])
def test_images_are_features_before_the_first_request(
    here: Scene, watched: Watched, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy: Any = Toy()
    monkeypatch.setattr("nearveil.client.images.find_extractor", lambda _: toy)
    seen = set()
    for number, work in enumerate(WORK):
        watched.work(decoding=work, extracting=work)
        client, _ = here.client(extractor=toy if given else None)
        start = watched.clock.time
        client.nearest(png(number), epsilon=4.0)
        assert watched.sent[0] == ("galleries", start + PERIOD)
        assert watched.gaps()[0] == ("map", 0.0 if given else PERIOD)
        seen.add(tuple(watched.gaps()))
        watched.work(decoding=2 * work, extracting=2 * work)
        start = watched.clock.time
        client.nearest(png(number), epsilon=4.0)  # the gallery is listed: the extractor is known
        assert watched.sent[0] == ("map", start + PERIOD)
        seen.add(tuple(watched.gaps()))
    assert len(seen) == 2


def test_loading_an_extractor_is_no_part_of_a_private_step(
    here: Scene, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the first query of a process would take several periods, and their number could depend on the image."""
    toy: Any = Toy()
    monkeypatch.setattr("nearveil.client.images.find_extractor", lambda _: toy)
    for number, work in enumerate(WORK):
        watched.work(decoding=work, extracting=work, loading=2.25)
        client, _ = here.client()
        client.nearest(png(number), epsilon=4.0)
        assert watched.gaps()[0] == ("map", 2.25 + PERIOD)


def test_the_accountant_is_loaded_before_the_first_request(here: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the first payment of a process, as of each command, would take several periods."""
    client, wire = here.client()
    loaded: list[tuple[str, int]] = []
    load = "nearveil.client.questions.import_module"
    monkeypatch.setattr(load, lambda name: loaded.append((name, len(wire.requests))))
    client.nearest(QUERIES[0], epsilon=4.0)
    assert loaded == [("nearveil.privacy.accounting", 0)]


@pytest.mark.parametrize("made_by", ["user", "given extractor", "extractor of a listed gallery"])
def test_features_that_cannot_be_compared_are_refused_before_the_first_request(
    here: Scene, monkeypatch: pytest.MonkeyPatch, made_by: str
) -> None:
    """Were the map asked for and then nothing, the server would learn that the feature is such a one."""
    bad = [np.full(8, 2e6), np.full(8, np.nan), np.r_[np.zeros(7), -np.inf], np.full(8, np.inf, np.float16)]
    toy: Any = Toy()
    toy.extract = lambda pixels: [[*bad, QUERIES[0]][image[0, 0, 0]] for image in pixels]
    monkeypatch.setattr("nearveil.client.images.find_extractor", lambda _: toy)
    client, wire = here.client(extractor=toy if made_by == "given extractor" else None)
    if made_by == "extractor of a listed gallery":
        client.galleries()
        wire.requests.clear()
    images: list[Any] = [*bad, QUERIES[0]] if made_by == "user" else [png(number) for number in range(5)]
    for image in images[:-1]:
        with pytest.raises(QuestionError, match=r"^query: .*feature must be finite, with no number beyond"):
            client.nearest(image, epsilon=4.0)
    assert (wire.requests, here.paid) == ([], 0)


def test_vectors_are_checked_in_a_short_step_before_the_first_request(here: Scene, watched: Watched) -> None:
    client, _ = here.client()
    start = watched.clock.time
    client.nearest(QUERIES[0], epsilon=4.0)
    assert watched.sent[0] == ("galleries", start + VECTOR_PERIOD)
    assert watched.gaps()[0] == ("map", 0.0)


def test_event_loops_keep_the_same_time(here: Scene, watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    toy: Any = Toy()
    monkeypatch.setattr("nearveil.client.images.find_extractor", lambda _: toy)

    async def asked(image: Any) -> tuple[tuple[str, float], ...]:
        async with AsyncClient(URL, here.server.token, account=here.account, transport=here.server.wire()) as client:
            await client.nearest(image, epsilon=4.0)
        return tuple(watched.gaps())

    seen = set()
    for number, work in enumerate(WORK):
        watched.work(decoding=work, extracting=work, paying=work, choosing=work / 8, ranking=work)
        seen.add(asyncio.run(asked(png(number))))
    (gaps,) = seen
    client, _ = here.client()
    watched.work()
    client.nearest(png(0), epsilon=4.0)
    assert tuple(watched.gaps()) == gaps


def test_a_class_is_returned_when_a_private_step_ends(
    tmp_path: Path, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever hangs up, or asks something else, right after does not tell how long the image took."""

    class Small(Toy):
        def extract(self, pixels: list[NDArray[np.uint8]]) -> NDArray[np.float32]:
            return rows(3, 7)[0][[int(image[0, 0, 0]) % 3 for image in pixels]]

    toy: Any = Small()
    monkeypatch.setattr("nearveil.client.images.find_extractor", lambda _: toy)
    published(make(tmp_path / "made")).close()
    with protected(tmp_path / "made", tmp_path / "here") as here:
        client, _ = here.client()
        model = client.model()
        for image, extraction in ((png, EXTRACTION_PERIOD), (lambda n: rows(3, 7)[0][n], VECTOR_PERIOD)):
            period = extraction + classification_period(model)
            for number, work in enumerate(WORK):
                watched.work(decoding=work, extracting=work)
                start = watched.clock.time
                client.classify(image(number))
                assert watched.clock.time == pytest.approx(start + period, abs=1e-9)
                assert watched.sent == []


def test_nobody_watches_a_gallery_in_this_process(made: Path, here: Scene, watched: Watched) -> None:
    start = watched.clock.time
    with Client(made, account=here.another("local")) as client:
        client.nearest(QUERIES[0], epsilon=4.0)
    assert watched.clock.time == start


def test_private_steps_end_at_multiples() -> None:
    for work in (0.0, 0.1, 0.99, 1.0):
        assert next_deadline(5.0, 1.0, 5.0 + work) == 6.0
    assert next_deadline(5.0, 1.0, 6.01) == 7.0


def test_the_period_of_extraction_depends_on_types_alone() -> None:
    """How large a private image or file is does not show."""
    large = np.zeros((3000, 2000, 3), np.uint8)
    images: tuple[Any, ...] = (b"", bytes(6 << 20), "a.png", "b" * 200, Path("c"), large, Image.fromarray(large))
    assert {extraction_period([image]) for image in images} == {EXTRACTION_PERIOD}
    vectors: tuple[Any, ...] = (np.zeros(2), np.ones(16_000), [0.5], "d.npy", np.zeros((1, 8), np.float16))
    assert {extraction_period([vector]) for vector in vectors} == {VECTOR_PERIOD}
    assert extraction_period([large, images[1], vectors[1]]) == 2 * EXTRACTION_PERIOD + VECTOR_PERIOD


def test_periods_grow_with_sizes_and_with_nothing_else(here: Scene) -> None:
    public = public_of(here.gallery)
    held = public.map
    other = PublicMap(held.components * 0, held.prototypes[::-1], 255 - held.coverage, held.n_items, held.set_size)
    assert question_period(replace(public, map=other)) == question_period(public) > 0.1
    assert choice_period(public, filtered=True) > choice_period(public) > 0.05
    read = [choice_period(public, text_bytes=size, filtered=True) for size in (10**6, 10**7)]
    assert read[1] - read[0] == pytest.approx(9e6 * 2 * 3e-7)  # a hostile value is read, and encoded to be compared
    texts = choice_period(public, texts=8, text_bytes=10**6) - choice_period(public)
    assert texts == pytest.approx(0.3 + 5e-5 * 8)
    for period in (question_period, choice_period):
        one, two, many = (period(public, questions=count) for count in (1, 2, 10))
        assert many - one == pytest.approx(9 * (two - one))
        assert 0 < two - one < one
    # At the caps, as docs/theory/service.md states it.
    for count, n_sets in ((8192, 4096), (32_768, 1024)):
        tables = np.zeros((count, 64), np.int8), np.zeros((count, n_sets), np.uint8)
        largest = PublicMap(np.zeros((16_000, 64), np.float16), *tables, 8192, 1)
        part = replace(
            public,
            map=largest,
            space=ScoreSpace("cosine", np.zeros(16_000)),
            candidates=1 / 8192,
            table=WholeCodes(16_000),
        )
        assert 0.9 < question_period(part) < 1.1


def test_sealed_questions_go_out_when_public_sizes_say_so(
    made: Path, tmp_path: Path, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cryptography")
    from nearveil.client.sealed import CachedSeal
    from nearveil.sealed import SealedClient

    monkeypatch.setattr(CachedSeal, "prepare_next", lambda *_: None)
    seconds = {"ask": 0.0, "read_scores": 0.0, "ask_records": 0.0, "read_records": 0.0, "begin_pads": 0.0}

    def slow(name: str, real: Any) -> None:
        def worked(*given: Any) -> Any:
            watched.clock.time += seconds[name]
            return real(*given)

        monkeypatch.setattr(SealedClient, name, worked)

    for name in seconds:
        slow(name, getattr(SealedClient, name))
    read_scores, is_empty = SealedClient.read_scores, False
    monkeypatch.setattr(SealedClient, "read_scores", lambda *given: [] if is_empty else read_scores(*given))
    with scene(made, tmp_path, offers=("names", "sealed")) as here:
        here.gallery.prepare()  # type: ignore[attr-defined]
        client, _ = here.client()
        client.nearest(QUERIES[0], epsilon=0, by="sealed")
        seen = set()
        for work, is_empty in product((0.0, 0.001, 0.004), (False, True)):  # noqa: B007 - of the cells' items
            seconds |= dict.fromkeys(("ask", "read_scores", "ask_records", "read_records"), work)
            client.prepare_sealed()
            watched.work()
            client.nearest(QUERIES[1], epsilon=0, by="sealed")
            seen.add((tuple(watched.gaps()), round(watched.clock.time - watched.heard[-1][1], 9)))
        (((layout, scores, records), end),) = seen
        assert [what for what, _ in (layout, scores, records)] == ["layout", "sealed", "sealed"]
        assert min(scores[1], records[1], end) > 0.01


def test_the_way_without_an_epsilon_is_chosen_before_the_query_is_read(
    made: Path, tmp_path: Path, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list is requested at the call, whatever the query is; the rest when public sizes say so."""
    pytest.importorskip("cryptography")
    from nearveil.client.sealed import CachedSeal

    monkeypatch.setattr(CachedSeal, "prepare_next", lambda *_: None)
    with scene(made, tmp_path, offers=("names", "sealed")) as here:
        here.gallery.prepare()  # type: ignore[attr-defined]
        seen = set()
        for number, work in enumerate((*WORK, None)):
            client, wire = here.client(extractor=Toy(), home=tmp_path / f"home {number}")
            begun = watched.clock.time
            watched.work(decoding=work or 0.0, extracting=work or 0.0)
            if work is None:
                with pytest.raises(ImageError):
                    client.nearest(b"no image")
                assert [url.rpartition("/")[2] for _, url, _, _ in wire.requests] == ["galleries"]
                continue
            client.nearest(png(number))
            first, at = watched.sent[0]
            seen.add((first, at - begun, watched.gaps()[0]))
        assert seen == {("galleries", 0.0, ("map", PERIOD))}


def test_a_sealed_question_that_finds_nothing_prepares_the_next_one_too(
    made: Path, tmp_path: Path, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question that is not prepared goes out later: it would show that the one before found nothing."""
    pytest.importorskip("cryptography")
    from nearveil.sealed import SealedClient

    read_scores, is_empty = SealedClient.read_scores, False
    monkeypatch.setattr(SealedClient, "read_scores", lambda *given: [] if is_empty else read_scores(*given))
    with scene(made, tmp_path, offers=("names", "sealed")) as here:
        here.gallery.prepare()  # type: ignore[attr-defined]
        client, _ = here.client()
        for is_empty in (False, True):
            found = client.nearest(QUERIES[0], epsilon=0, by="sealed")
            assert bool(found.matches) is not is_empty
            seal = client._client._sealed["birds"]
            assert seal.timer is not None
            seal.timer = None


def test_a_private_step_ends_on_success_and_on_error() -> None:
    clock = SetClock()
    session: Any = SimpleNamespace(clock=clock, pad_timing=True)

    async def take(error: BaseException | None, seconds: float, period: float = 0.25) -> float:
        start = clock.now()

        def work() -> None:
            clock.time += seconds
            if error is not None:
                raise error

        try:
            async with private_step(session, start, period):
                await asyncio.to_thread(work)
        except BaseException as raised:
            if raised is not error:
                raise
        return clock.now() - start

    assert asyncio.run(take(None, 0.1)) == 0.25
    assert asyncio.run(take(ValueError(), 0.1)) == 0.25
    assert asyncio.run(take(ValueError(), 0.3)) == 0.5
    assert asyncio.run(take(asyncio.CancelledError(), 0.125)) == 0.125
    for period in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="period"):
            asyncio.run(take(None, 0.1, period))


class FilterError(Exception):
    """What a filter of the user raises."""


def refuse(_: Any) -> bool:
    raise FilterError


@pytest.mark.parametrize("way", ["message", "home", "classify"])
def test_errors_end_when_results_do(made: Path, tmp_path: Path, watched: Watched, way: str) -> None:
    """A broken image, a feature that is refused, and a filter that raises take as long as an answer."""
    bad = {"broken image": b"no image", "far vector": np.full(8, 2e6), "filter": QUERIES[0]}

    def ask(client: Client, image: Any, where: Any) -> None:
        if way == "classify":
            client.classify(image)
        else:
            options: Any = {"by": way, "epsilon": 2.0 if way == "message" else 0}
            client.nearest(image, where=where, rng=seeded(), **options)

    if way == "classify":
        published(make(tmp_path / "made")).close()
        opened, bad = protected(tmp_path / "made", tmp_path / "here"), {**bad, "filter": np.full(6, np.nan)}
    else:
        opened = scene(made, tmp_path, offers=("names", "codes"), epsilon=500.0)
    with opened as here:
        client, _ = here.client(home=tmp_path / "home")
        if way == "classify":
            client.model()
        else:
            client.galleries()
            client.sync()
        for name, image in bad.items():
            ends = set()
            for work in WORK:
                watched.work(decoding=work, ranking=work)
                start = watched.clock.time
                with pytest.raises((ValueError, FilterError)):
                    ask(client, image, refuse if name == "filter" else None)
                since = watched.heard[-1][1] if watched.heard else start
                ends.add(round(watched.clock.time - since, 9))
            (end,) = ends
            assert end >= VECTOR_PERIOD, name


def test_a_search_at_home_returns_at_its_deadline(
    made: Path, tmp_path: Path, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nearveil.client.copies import LoadedCopy

    seconds, real = 0.0, LoadedCopy.search

    def search(self: LoadedCopy, *arguments: Any) -> Any:
        watched.clock.time += seconds
        return real(self, *arguments)

    monkeypatch.setattr(LoadedCopy, "search", search)
    filters: tuple[Any, ...] = (None, lambda match: match.id % 2 == 0, {"lang": "de"}, {})
    with scene(made, tmp_path, offers=("names", "metadata", "codes")) as here:
        client, _ = here.client(home=tmp_path / "home")
        copy = client.sync().load()
        for where in filters:
            pairs = copy.count_pairs() if isinstance(where, dict) else None
            period = VECTOR_PERIOD + search_period(copy, 8, filtered=callable(where), pairs=pairs)
            many = extraction_period(QUERIES[:5]) + search_period(
                copy, 8, filtered=callable(where), pairs=pairs, questions=5
            )
            for work in WORK:
                seconds = work
                watched.work()
                start = watched.clock.time
                client.nearest(QUERIES[0], epsilon=0, by="home", where=where)
                assert watched.clock.time == pytest.approx(start + period, abs=1e-9)
                results = client.nearest_many(QUERIES[:5], where=where)
                assert watched.clock.time == pytest.approx(start + period + many, abs=1e-9)
                assert watched.sent == []
                assert [found.matches for found in results] == [
                    client.nearest(row, where=where).matches for row in QUERIES[:5]
                ]


def test_periods_of_a_search_at_home_grow_with_public_sizes(made: Path, tmp_path: Path) -> None:
    with scene(made, tmp_path, offers=("names", "codes")) as here:
        copy = here.client(home=tmp_path / "home")[0].sync().load()
        assert search_period(copy, 8, filtered=True) > search_period(copy, 8, filtered=False)
        periods = [search_period(copy, 8, filtered=False, pairs=pairs) for pairs in (None, 0, 10**7)]
        assert periods[0] < periods[1] < periods[2] < periods[0] + 1
        assert search_period(copy, 16, filtered=False) - 8 * TEXT > search_period(copy, 8, filtered=False) > 0.1
        copy.text_bytes, copy.longest_text = 10**7, 10**6
        assert search_period(copy, 8, filtered=True) > 1.0
        assert 0.9 > search_period(copy, 8, filtered=False) - 0.1 > 0.7
        before, copy.manifest = search_period(copy, 8, filtered=False), replace(copy.manifest, items=10**8)
        assert search_period(copy, 8, filtered=False) > before + 10  # a heap takes 3 s for 10^8 scores that rise
