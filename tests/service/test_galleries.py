"""Open galleries: the same answers as the index gives, remembered as long as they are right."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nearveil.gallery import Index
from nearveil.gallery.answers import Answer
from nearveil.gallery.errors import CorruptedIndexError
from nearveil.gallery.publishing import Published
from nearveil.mechanisms import Message
from nearveil.server import OpenGallery
from nearveil.server.errors import ServiceError
from nearveil.wire.messages import MapChanged, PublicPart, Query, Refusal, RefusalCode, decode_frame
from nearveil.wire.server import ServedMap

from ..gallery.index_places import index_server, index_url, one_thread, plain_items, unit_rows, where
from .serving import COUNT, EPSILON, SETS, F, index_of

__all__ = ["index_server", "index_url", "one_thread", "where"]  # fixtures


@pytest.fixture
def gallery(where: str) -> Iterator[OpenGallery]:
    found = OpenGallery(index_of(where), "birds")
    yield found
    found.close()


def asking(gallery: OpenGallery, number: int, extras: Any = "none") -> bytes:
    public_id = gallery.index.current().published.public_id
    return Query(Message("covers", public_id, {"sets": np.array([number], np.int32)}), extras).to_bytes()


def test_answers_are_those_of_the_index_and_remembered(gallery: OpenGallery, monkeypatch: pytest.MonkeyPatch) -> None:
    queries = [asking(gallery, number) for number in range(SETS)]
    expected = [gallery.index.answer(decode_frame(data, Query).message).to_bytes() for data in queries]
    assert [gallery.query(data) for data in queries] == expected
    named = gallery.query(asking(gallery, 0, "names"))
    monkeypatch.setattr(ServedMap, "read_extras", None)
    monkeypatch.setattr(ServedMap, "answer", None)
    assert [gallery.query(data) for data in queries] == expected
    assert gallery.query(asking(gallery, 0, "names")) == named


def test_a_new_map_that_cannot_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Index.open(index_of(tmp_path / "i")._location) as other:
        gallery = OpenGallery(Index.open(tmp_path / "i"), "birds")
        gallery.refresh()
        other.publish(EPSILON, F, n_sets=SETS + 1, reach=0.0)

        def refuse(_: Any) -> Published:
            raise CorruptedIndexError("it is broken")

        with monkeypatch.context() as patch:
            patch.setattr(Published, "read", refuse)
            for _ in range(2):
                with pytest.raises(ServiceError, match="Try again later"):
                    gallery.refresh()
        gallery.refresh()
        gallery.close()


def test_originals_are_not_remembered(tmp_path: Path) -> None:
    picture = tmp_path / "picture"
    picture.write_bytes(b"before")
    gallery = OpenGallery(index_of(tmp_path / "i", picture=picture), "birds", offers=["originals"])
    data = asking(gallery, 0, "originals")
    assert b"before" in Answer.from_bytes(gallery.query(data)).contents
    picture.write_bytes(b"after")
    now = Answer.from_bytes(gallery.query(data)).contents
    assert b"before" not in now
    assert b"after" not in now  # it is not what was added
    with pytest.raises(ServiceError, match="no original"):
        gallery.original(0)
    gallery.close()


def test_what_is_offered_and_what_is_not(gallery: OpenGallery) -> None:
    assert gallery.info().offers == ("names", "thumbnails")
    assert decode_frame(gallery.map(), PublicPart).offers == ("thumbnails", "names")
    assert decode_frame(gallery.query(asking(gallery, 0, "originals")), Refusal).code == RefusalCode.NOT_OFFERED
    with pytest.raises(ServiceError, match="originals"):
        gallery.original(1)
    with pytest.raises(ServiceError, match="open"):
        gallery.model()
    with pytest.raises(ServiceError, match=r"has a map for: 0\.25"):
        gallery.map(0.5)
    before = gallery.stale
    gallery.index.add(plain_items(unit_rows(1, seed=2)))
    assert (before, gallery.stale) == (False, True)
    assert gallery.info().revision == 1


def test_a_query_is_answered_by_the_map_that_it_names(gallery: OpenGallery) -> None:
    old = asking(gallery, 0)
    gallery.index.publish(EPSILON, 0.5, n_sets=2, reach=0.0)
    assert len(Answer.from_bytes(gallery.query(old)).ids) == COUNT * F
    assert len(Answer.from_bytes(gallery.query(asking(gallery, 0))).ids) == COUNT * 0.5
    assert gallery.info().candidates == (0.5, F)
    gallery.index.publish(EPSILON, 0.5, n_sets=3, reach=0.0, keep=1)
    assert decode_frame(gallery.query(old), MapChanged) == MapChanged("birds", 1)


def test_deletions_under_load(tmp_path: Path) -> None:
    """Threads ask while another process deletes: no answer that begins after a deletion holds the item."""
    index_of(tmp_path / "i").close()
    gallery, gone, wrong = OpenGallery(Index.open(tmp_path / "i"), "birds"), set[int](), list[int]()
    data, done = [asking(gallery, number) for number in range(SETS)], threading.Event()

    def ask() -> None:
        turn = 0
        while not done.is_set():
            turn += 1
            before = set(gone)
            if turn % 2:
                gallery.refresh()
            reply = gallery.query(data[turn % SETS])
            if reply is not None:
                wrong.extend(before & set(Answer.from_bytes(reply).ids.tolist()))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    with Index.open(tmp_path / "i") as other:
        for number in range(0, 40, 2):
            other.delete([number])
            gone.add(number)
    done.set()
    for thread in threads:
        thread.join()
    assert len(gone) == 20
    assert wrong == []
    gallery.close()


def test_names(tmp_path: Path) -> None:
    index = index_of(tmp_path / "i")
    for name in ("", "A", "a b", "-a", "a/", "x" * 65, "a\n", 3):
        with pytest.raises(ValueError, match="name must be"):
            OpenGallery(index, name)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="offers must be of"):
        OpenGallery(index, "a", offers=["secrets"])  # type: ignore[list-item]
    index.close()
