"""The public map in step with the gallery: kept, answered by, and never answered wrongly when it changed."""

import io
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
from numpy.typing import NDArray

from nearveil.gallery import store as _store
from nearveil.gallery.answers import Answer, Extras
from nearveil.gallery.codes import ExactCodes, ProductCodes, ScalarCodes
from nearveil.gallery.errors import CorruptedIndexError, MapChangedError, NotPublishedError, StaleMapError
from nearveil.gallery.index import Index
from nearveil.gallery.items import IndexSnapshot, Item
from nearveil.gallery.publishing import MapTerms, Published
from nearveil.gallery.store import load_header
from nearveil.mechanisms import Covers, Message, MessageError, PublicMap
from nearveil.privacy.noise import unsafe_seeded
from nearveil.wire import server as _server
from nearveil.wire.client import ClientProtocol
from nearveil.wire.frames import Kind
from nearveil.wire.messages import MapChanged, Query, Refusal, RefusalCode, decode_frame
from nearveil.wire.server import ServerProtocol, serve_maps

from ..wire.wiring import ask
from .index_places import (
    DIMENSION,
    WEBP,
    filled,
    index_server,
    index_url,
    one_thread,
    plain_items,
    true_nearest,
    unit_rows,
    where,
)

__all__ = ["index_server", "index_url", "one_thread", "where"]  # fixtures

EPSILON, F = 8.0, 0.25
TOO_LARGE = "the images are larger than the limit: request fewer extras"


def client_of(published: Published) -> Covers:
    """Build the client's half from what goes over the wire: the mean, the map and the terms."""
    public_map = PublicMap.from_bytes(published.map.to_bytes())
    client = Covers(published.release.epsilon, published.release.candidates)
    return client.fit_space(published.space, published.public_digest).use_map(public_map)


def measure(published: Published, queries: NDArray[np.float32], codes: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Return the metric's values of codes, as a client computes them."""
    encoded = published.space.encode(queries)
    return published.space.measure(encoded, published.table.scores(published.space.make_queries(encoded), codes))


def message_to(published: Published, row: NDArray[np.float32], seed: int = 0) -> Message:
    message: Message = client_of(published).release(row, rng=unsafe_seeded(seed))
    return message


def naming(published: Published, number: int) -> Message:
    """Return a message that names one set."""
    return Message("covers", published.public_id, {"sets": np.array([number], np.int32)})


def test_an_answer_holds_the_set_by_stable_ids(where: str) -> None:
    rows = unit_rows(160)
    with filled(where, rows) as index:
        index.delete(np.arange(0, 80, 2))  # so that ids are not positions
        index.add(plain_items(unit_rows(40, seed=3)))
        published = index.publish(EPSILON, F, n_sets=6, reach=0.0)
        assert (published.revision, len(published.ids), published.map.n_sets) == (3, 160, 6)
        now = index.snapshot()
        for number in range(6):
            answer = index.answer(naming(published, number))
            inside = np.flatnonzero(published.release.members_.toarray()[number])
            assert answer.ids.tolist() == now.ids[inside].tolist()
            assert len(answer.ids) == 40
            encoded = published.release.gallery_features(now.features[inside])
            assert (answer.codes == published.table.encode(encoded)).all()
        # A private query finds its neighbours: most of them, at this epsilon, with every set's odds known.
        queries, found = unit_rows(40, seed=11), []
        true = true_nearest(now.ids, now.features, queries, 8)[0]
        for seed, query in enumerate(queries):
            answer = index.answer(message_to(published, query, seed))
            found.append(np.isin(true[seed], answer.ids).mean())
        assert np.mean(found) > 2 * F
        # The client ranks by codes, as good as by features: they are whole or nearly so.
        values = measure(published, queries[:1], answer.codes)
        np.testing.assert_allclose(values[0], queries[0] @ now.features[np.isin(now.ids, answer.ids)].T, atol=1e-2)


def test_a_restart_need_not_learn_again(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_store, "_PART", 1000)  # so that there are many parts
    with filled(where, unit_rows(60)) as index:
        published = index.publish(EPSILON, F, n_sets=4, reach=0.0, public=unit_rows(9, seed=50))
        message = message_to(published, unit_rows(1, seed=1)[0])
        answer = index.answer(message)
    with monkeypatch.context() as patch:
        patch.setattr(Covers, "index", None)  # learns no more
        with Index.open(where) as again:
            kept, stale = again.current()
            assert not stale
            assert again.current().published is kept  # and reads no more
            assert kept.public_id == published.public_id
            assert kept.release.get_params() == published.release.get_params()
            assert again.answer(message).to_bytes() == answer.to_bytes()
            features = again.snapshot().features
            assert (kept.release.rank(message, features) == published.release.rank(message, features)).all()


def to_bytes(published: Published) -> bytes:
    file = io.BytesIO()
    published.write(file)
    return file.getvalue()


@pytest.mark.parametrize(("code_bytes", "kind"), [(None, ExactCodes), (40, ScalarCodes), (12, ProductCodes)])
def test_all_kinds_of_codes_are_kept(tmp_path_factory: pytest.TempPathFactory, code_bytes: int, kind: type) -> None:
    rows = unit_rows(50)
    with filled(tmp_path_factory.mktemp("i") / "i", rows) as index:
        published = index.publish(2.0, F, n_sets=3, reach=0.0, code_bytes=code_bytes)
    again = Published.read(io.BytesIO(to_bytes(published)))
    assert type(again.table) is type(published.table) is kind
    assert again.codes.tobytes() == published.codes.tobytes()
    assert (again.table.width, again.table.nbytes) == (published.table.width, published.table.nbytes)
    assert (again.table.scores(rows, again.codes) == published.table.scores(rows, published.codes)).all()
    assert to_bytes(again) == to_bytes(published)


def test_a_map_does_not_depend_on_the_number_of_threads() -> None:
    """Products of matrices differ in their last bits where more threads make them: k-means came to other places."""
    rows = np.random.default_rng(0).normal(size=(3000, 64)).astype(np.float32)
    rows[:, :8] *= 4
    snapshot = IndexSnapshot(
        1, np.arange(len(rows), dtype=np.uint32), rows / np.linalg.norm(rows, axis=1, keepdims=True)
    )
    before, found = faiss.omp_get_max_threads(), set()
    for threads in (1, 2):
        faiss.omp_set_num_threads(threads)
        found.add(Published.learn(snapshot, MapTerms(n_sets=12, reach=0.0)).public_id)
    faiss.omp_set_num_threads(before)
    assert len(found) == 1


def test_stale_and_back_in_step(where: str) -> None:
    with filled(where, unit_rows(60)) as index:
        with pytest.raises(NotPublishedError, match=r"publish\(epsilon\)"):
            index.current()
        with pytest.raises(NotPublishedError):
            index.answer(Message("covers", "0f", {"sets": np.array([0], np.int32)}))
        first = index.publish(EPSILON, F, n_sets=4, reach=0.0, public=np.zeros(DIMENSION), code_bytes=None)
        assert index.revision == 1  # publishing changes no item
        assert index.republish().public_id == first.public_id
        added = index.add(plain_items(unit_rows(20, seed=9)))
        assert index.current().stale
        assert index.current().published.public_id == first.public_id
        second = index.republish()
        assert not index.current().stale
        assert index.current().published.public_id == second.public_id != first.public_id
        assert (second.revision, len(second.ids), second.map.set_size) == (2, 80, 20)
        assert (second.release.epsilon, second.release.n_sets, second.terms.code_bytes) == (EPSILON, 4, None)
        assert (first.space.mean == 0).all()
        assert (second.space.mean != 0).any()  # learned again, from the gallery
        assert np.isin(added, second.ids).all()


def test_a_map_that_changed_is_told(where: str) -> None:
    with filled(where, unit_rows(60)) as index, Index.open(where) as server:
        maps, messages, answers = [], [], []
        for turn in range(3):
            maps.append(index.publish(EPSILON, F, n_sets=3 + turn, reach=0.0))
            messages.append(message_to(maps[-1], unit_rows(1)[0]))
            answers.append(server.answer(messages[-1]).to_bytes())
            index.add(plain_items(unit_rows(8, seed=20 + turn)))
        # The one before the newest is still answered, by its own sets.
        assert server.answer(messages[2]).to_bytes() == answers[2]
        assert server.answer(messages[1]).to_bytes() == answers[1]
        with pytest.raises(MapChangedError, match="fetch the public part and send a new message") as error:
            server.answer(messages[0])
        told = error.value
        assert (told.asked, told.current, told.revision) == (maps[0].public_id, maps[2].public_id, 3)
        assert isinstance(told, MessageError)
        copy = pickle.loads(pickle.dumps(told))  # noqa: S301
        assert (copy.asked, copy.current, copy.revision, str(copy)) == (told.asked, told.current, 3, str(told))
        for hostile in ("", "\0", "'; DROP TABLE nearveil_published", "x" * 10**6, "\udcff"):
            with pytest.raises(MapChangedError) as error:
                server.answer(Message("covers", hostile, {"sets": np.array([0], np.int32)}))
            assert len(str(error.value)) < 500
        newest = index.publish(EPSILON, F, n_sets=3, reach=0.0, keep=1)
        with pytest.raises(MapChangedError):
            server.answer(messages[2])
        assert server.current().published.public_id == newest.public_id


def test_a_message_for_this_map_that_makes_no_sense(where: str) -> None:
    with filled(where, unit_rows(30)) as index:
        published = index.publish(EPSILON, F, n_sets=3, reach=0.0)
        for sets in ([3], [-1], [0, 1], []):
            with pytest.raises(MessageError, match="must name 1 of the 3 sets"):
                index.answer(Message("covers", published.public_id, {"sets": np.array(sets, np.int32)}))
        with pytest.raises(MessageError):
            index.answer(Message("cells", published.public_id, {"sets": np.array([0], np.int32)}))
        with pytest.raises(MessageError, match="must be a Message"):
            index.answer(b"bytes")  # type: ignore[arg-type]


def test_deleted_means_gone(where: str) -> None:
    with filled(where, unit_rows(60)) as index, Index.open(where) as server:
        old = index.publish(EPSILON, F, n_sets=4, reach=0.0)
        index.add(plain_items(unit_rows(10, seed=2)))
        new = index.publish(EPSILON, F, n_sets=3, reach=0.0)
        before = {p.public_id: [server.answer(naming(p, n)).ids for n in range(p.map.n_sets)] for p in (old, new)}
        popular = int(np.bincount(np.concatenate(before[old.public_id])).argmax())
        for victims in ([popular], before[new.public_id][0][:5].tolist()):
            index.delete(np.intersect1d(victims, index.ids()))
            for published in (old, new):
                for number, was in enumerate(before[published.public_id]):
                    answer = server.answer(naming(published, number))
                    left = was[np.isin(was, index.ids())]
                    assert np.isin(left, answer.ids).all()
                    assert np.isin(answer.ids, index.ids()).all()
                    assert len(answer.ids) == published.map.set_size  # others took the places, from the same map
                    assert np.isin(answer.ids, published.ids).all()
                    positions = np.searchsorted(published.ids, answer.ids)
                    assert (answer.codes == published.codes[positions]).all()
        with Index.open(where) as again:  # also after a restart
            answer = again.answer(naming(old, 0))
            assert np.isin(answer.ids, index.ids()).all()
        index.delete(index.ids()[:-10])
        with pytest.raises(StaleMapError, match="publish a new map"):
            server.answer(naming(old, 0))


def make_query(index: Index, row: Any, extras: Extras = "none") -> bytes:
    return ask(ClientProtocol(serve_maps(index, "birds")[0].make_public_part(), EPSILON), row, extras=extras)


def test_the_protocol_serves_an_index(where: str, tmp_path: Path) -> None:
    """From bytes to bytes: a client asks, items are deleted, the map changes."""
    picture = tmp_path / "picture.jpg"
    picture.write_bytes(b"a picture")
    rows = unit_rows(60)
    with Index.create(where, dimension=DIMENSION, extractor="model 1") as index:
        with pytest.raises(NotPublishedError):
            serve_maps(index, "birds")
        originals: list[bytes | Path | None] = [picture, tmp_path / "no longer there.jpg", b"bytes", None]
        index.add(Item(row, "", WEBP + bytes([n]), originals[n % 4]) for n, row in enumerate(rows))
        index.publish(EPSILON, F, n_sets=4, reach=0.0)
        server = ServerProtocol(*serve_maps(index, "birds", extractor="a model", offers=("thumbnails", "originals")))

        def ask(extras: Extras) -> Answer:
            return Answer.from_bytes(server.answer(make_query(index, rows[0], extras)))

        answer = ask("thumbnails")
        assert answer.contents == tuple(WEBP + bytes([n]) for n in answer.ids)
        answer = ask("originals")
        contents = (b"a picture", b"", b"bytes", b"")
        assert answer.contents == tuple(contents[n % 4] for n in answer.ids)
        index.delete(answer.ids[:5])
        assert not np.isin(answer.ids[:5], ask("none").ids).any()
        query = make_query(index, rows[0])
        index.republish()
        server = ServerProtocol(*serve_maps(index, "birds"))
        assert isinstance(
            decode_frame(server.answer(query), Answer, MapChanged), Answer
        )  # the one before is still kept
        index.publish(EPSILON, F, n_sets=4, reach=0.0, keep=1)
        server = ServerProtocol(*serve_maps(index, "birds"))
        assert decode_frame(server.answer(query), Answer, MapChanged) == MapChanged("birds", 2)


def test_names_come_for_all_candidates(where: str) -> None:
    rows = unit_rows(60)
    odd = {3: "two\nlines", 4: "\x1b[2J", 5: "été \U0001f426\u200d.png", 6: "x" * 4096}
    with Index.create(where, dimension=DIMENSION) as index:
        index.add(Item(row, odd.get(n, f"bird {n}")) for n, row in enumerate(rows))
        published = index.publish(EPSILON, F, n_sets=4, reach=0.0)
        gallery = serve_maps(index, "birds", offers=("names",))
        for one in range(4):
            answer = Answer.from_bytes(
                ServerProtocol(*gallery).answer(Query(naming(published, one), "names").to_bytes())
            )
            assert answer.extras == "names"
            for number, name in zip(answer.ids.tolist(), answer.contents, strict=True):
                shown = odd.get(number, f"bird {number}").replace("\n", "\ufffd").replace("\x1b", "\ufffd")
                assert name.decode() == shown
        index.delete([7])
        assert gallery[0].read_extras(np.array([7, 8], np.uint32), "names", 100) == [b"", b"bird 8"]
        refusal = ServerProtocol(*serve_maps(index, "birds")).answer(Query(naming(published, 0), "names").to_bytes())
        assert decode_frame(refusal, Refusal).code == RefusalCode.NOT_OFFERED


def test_codes_are_never_read_by_another_table(where: str) -> None:
    """The same gallery and map, published again with other codes: old clients are told, or answered in old codes."""
    rows = unit_rows(60)
    with filled(where, rows) as index:
        first = index.publish(EPSILON, F, n_sets=4, reach=0.0, code_bytes=40)
        asked = make_query(index, rows[0])
        second = index.publish(EPSILON, F, n_sets=4, reach=0.0, code_bytes=None)
        assert first.map.map_id == second.map.map_id
        assert first.public_id != second.public_id
        assert index.maps()[0].public_id == second.public_id  # also when it was read again
        answer = Answer.from_bytes(ServerProtocol(*serve_maps(index, "birds")).answer(asked))
        assert (answer.codes == first.codes[np.searchsorted(first.ids, answer.ids)]).all()
        index.publish(EPSILON, F, n_sets=4, reach=0.0, code_bytes=None, keep=1)
        assert isinstance(
            decode_frame(ServerProtocol(*serve_maps(index, "birds")).answer(asked), Answer, MapChanged), MapChanged
        )


def test_a_slow_publisher_does_not_hide_a_newer_map(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with filled(where, unit_rows(40)) as index, Index.open(where) as other:
        index.publish(EPSILON, F, n_sets=3, reach=0.0)
        real = Covers.index_features
        late = iter([True])

        def slow(self: Covers, *given: Any, **options: Any) -> Covers:
            if next(late, False):
                other.add(plain_items(unit_rows(8, seed=4)))
                other.publish(EPSILON, F, n_sets=3, reach=0.0, keep=1)
            return real(self, *given, **options)

        monkeypatch.setattr(Covers, "index_features", slow)
        with pytest.raises(StaleMapError, match="published meanwhile"):
            index.publish(EPSILON, F, n_sets=3, reach=0.0, keep=1)
        assert [published.revision for published in index.maps()] == [2]
        index.add(plain_items(unit_rows(8, seed=5)))
        late = iter([True])
        assert index.republish().revision == 4  # theirs, which is in step
        assert not index.current().stale


def test_a_map_that_was_learned_waits_for_a_long_writer(where: str) -> None:
    with filled(where, unit_rows(60)) as index, Index.open(where, timeout=0.3) as hasty:
        learned = Published.learn(hasty.snapshot(), MapTerms(4.0, 0.2, n_sets=3, reach=0.0))
        began = threading.Event()

        def write_long() -> None:
            with index._database.begin_write() as connection:
                load_header(connection, "here", lock=True)
                began.set()
                time.sleep(1.0)

        with ThreadPoolExecutor(1) as threads:
            writing = threads.submit(write_long)
            assert began.wait(60)
            hasty._save_map(learned, 1)
            writing.result(60)
        assert index.current().published.public_id == learned.public_id


def test_images_that_are_too_many_are_not_read(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, picture = unit_rows(40), tmp_path / "picture.jpg"
    picture.write_bytes(bytes(3000))
    with Index.create(where, dimension=DIMENSION) as index:
        index.add(Item(row, "", WEBP, bytes(3000) if n % 2 else picture) for n, row in enumerate(rows))
        published = index.publish(EPSILON, F, n_sets=4, reach=0.0)
        gallery = serve_maps(index, "birds", offers=("thumbnails", "originals"))
        read_files: list[Path] = []
        loaded: list[bool] = []
        open_file, items = Path.open, Index.items

        def opened(self: Path, *arguments: Any, **options: Any) -> Any:
            read_files.append(self)
            return open_file(self, *arguments, **options)

        def listed(self: Index, ids: Any, **options: Any) -> Any:
            loaded.append(options["originals"])
            found = items(self, ids, **options)
            assert options["originals"] or all(not isinstance(item.original, bytes) for item in found)
            return found

        monkeypatch.setattr(Path, "open", opened)
        monkeypatch.setattr(Index, "items", listed)

        def ask(extras: Extras, limit: int) -> Answer | Refusal:
            query = Query(naming(published, 0), extras).to_bytes()
            monkeypatch.setattr(Kind.ANSWER, "limit", limit)
            found: Answer | Refusal = decode_frame(ServerProtocol(*gallery).answer(query), Answer, Refusal)
            return found

        assert isinstance(ask("thumbnails", 5000), Answer)
        assert loaded == [False]  # bytes of originals are not asked for where thumbnails are
        stored = sum(3000 for number in np.flatnonzero(published.release.members_.toarray()[0]) if number % 2)
        for limit in (2500, stored - 1):  # known from the database alone
            assert ask("originals", limit) == Refusal(RefusalCode.TOO_LARGE, TOO_LARGE)
        assert loaded == [False]
        assert ask("originals", 30_000) == Refusal(RefusalCode.TOO_LARGE, TOO_LARGE)  # known when files are looked at
        assert picture not in read_files
        whole = ask("originals", 40_000)
        assert isinstance(whole, Answer)
        assert set(map(len, whole.contents)) == {3000}
        read_files.clear()
        monkeypatch.setattr(_server, "LARGEST_ORIGINAL", 2999)
        assert ask("originals", 40_000) == Refusal(RefusalCode.TOO_LARGE, TOO_LARGE)
        assert picture not in read_files


def test_items_deleted_while_a_map_is_learned(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with filled(where, unit_rows(60)) as index, Index.open(where) as other:
        real = Covers.index_features

        def slow(self: Covers, *given: Any, **options: Any) -> Covers:
            other.delete([1, 2, 3])
            return real(self, *given, **options)

        monkeypatch.setattr(Covers, "index_features", slow)
        published = index.publish(EPSILON, F, n_sets=4, reach=0.0)
        assert index.current().stale
        handed = np.concatenate([index.answer(naming(published, number)).ids for number in range(4)])
        assert not np.isin(handed, [1, 2, 3]).any()


def test_wrong_terms(where: str) -> None:
    with Index.create(where, dimension=DIMENSION) as index:
        with pytest.raises(ValueError, match="at least two items"):
            index.publish(1.0)
        index.add(plain_items(unit_rows(20)))
        for epsilon, candidates, terms, words in (
            (0.0, F, {}, "epsilon"),
            (float("nan"), F, {}, "epsilon"),
            (1.0, 0.0, {}, "candidates"),
            (1.0, 0.01, {}, "candidates"),
            (1.0, F, {"public": np.zeros(3)}, "public must have 12 columns"),
            (1.0, F, {"public": np.full(DIMENSION, np.nan)}, "public must be finite"),
            (1.0, F, {"n_sets": 1}, "n_sets"),
            (1.0, F, {"keep": 0}, "keep"),
            (1.0, F, {"code_bytes": 3}, "code_bytes"),
        ):
            with pytest.raises(ValueError, match=words):
                index.publish(epsilon, candidates, **terms)
        with pytest.raises(NotPublishedError):
            index.current()


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE nearveil_published SET revision = revision + 1",
        "UPDATE nearveil_published SET digest = 'x'",
        "UPDATE nearveil_published_part SET data = ''",
    ],
)
def test_corruption_of_a_map_is_detected(where: str, change: str) -> None:
    with filled(where, unit_rows(20)) as index:
        index.publish(1.0, F, n_sets=3, reach=0.0)
        with index._database.begin_write() as connection:
            connection.exec_driver_sql(change)
    with Index.open(where) as index, pytest.raises(CorruptedIndexError, match="a published map is corrupted"):
        index.current()


@pytest.mark.parametrize("code_bytes", ["auto", 12, None])
def test_small_changes_update_the_map(tmp_path: Path, code_bytes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes of what stayed are kept, new items have codes by the same table, and nothing is learned."""
    with filled(tmp_path / "i", unit_rows(300)) as index:
        ticks: list[int] = []
        first = index.publish(
            EPSILON, F, n_sets=4, reach=0.0, code_bytes=code_bytes, progress=lambda _, __: ticks.append
        )
        assert sum(ticks) == 100
    with Index.open(tmp_path / "i") as index:
        index.delete([1, 7])
        new = index.add(plain_items(unit_rows(5, seed=9)))
        monkeypatch.setattr(Covers, "index", None)
        second = index.republish()
        assert (second.revision, second.public_digest) == (index.revision, first.public_digest)
        assert second.ids.tolist() == index.ids().tolist()
        stayed = np.isin(second.ids, first.ids)
        assert second.codes[stayed].tobytes() == first.codes[np.isin(first.ids, second.ids)].tobytes()
        close = np.diag(measure(second, index.features(new), second.codes[~stayed]))
        np.testing.assert_allclose(close, 1, atol={12: 0.35, "auto": 0.1, None: 1e-5}[code_bytes])
        assert second.release.drift_ == pytest.approx(7 / 303)
        assert index.republish().public_id == second.public_id
        monkeypatch.undo()
        index.add(plain_items(unit_rows(40, seed=10)))  # now more than a tenth has changed
        third = index.republish()
        assert third.release.drift_ == 0
        assert len(third.ids) == 343
