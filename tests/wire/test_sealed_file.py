"""The index for sealed questions that a gallery keeps: made once, shared, and changed where the gallery changed."""

import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cryptography")

from nearveil.cluster import Cluster, ClusterError
from nearveil.gallery import Index, Item
from nearveil.gallery.errors import PrivateIndexError
from nearveil.sealed import SealedClient, SealedIndex
from nearveil.wire import sealed
from nearveil.wire.sealed import open_sealed_index, update_sealed_file
from nearveil.wire.server import serve_maps
from tests.gallery.index_places import index_server, index_url
from tests.service.asking import COUNT, make_index

__all__ = ["index_server", "index_url"]  # fixtures


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = make_index(tmp_path_factory.mktemp("kept") / "birds")
    with Index.open(place) as index:
        open_sealed_index(serve_maps(index, "birds", offers=("names",))[0])
    return place


@pytest.fixture
def index(made: Path, tmp_path: Path) -> Iterator[Index]:
    shutil.copytree(made, tmp_path / "birds")
    with Index.open(tmp_path / "birds") as index:
        yield index


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows whenever an index is built anew."""
    counted: list[int] = []
    build = SealedIndex.build

    def count(rows: np.ndarray, **options: object) -> SealedIndex:
        counted.append(len(rows))
        return build(rows, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(SealedIndex, "build", count)
    return counted


def open_kept(index: Index, name: str = "birds", *, names: bool = True) -> SealedIndex:
    return open_sealed_index(serve_maps(index, name, offers=("names",) if names else ())[0])


def test_it_is_made_once_and_mapped_by_all(index: Index, built: list[int]) -> None:
    first, second = open_kept(index), open_kept(index, "another name")
    assert not built
    assert first.layout.version == second.layout.version
    assert isinstance(first._database, np.memmap)
    assert index.sealed_file is not None
    assert index.sealed_file.stat().st_mode & 0o077 == 0


def test_deleted_items_are_gone(index: Index, built: list[int]) -> None:
    before = open_kept(index)
    index.delete([5, 17])
    after = open_kept(index)
    assert not built
    assert sorted(set(range(COUNT)) - {5, 17}) == after.get_items().tolist()
    assert after.layout.version != before.layout.version
    assert not any(changed for tokens in after._tokens.values() for changed in tokens.changed)
    again = open_kept(index)
    assert again.layout.version == after.layout.version


def test_items_that_came_are_found_after_the_map_was_brought_in_step(index: Index, built: list[int]) -> None:
    (number,) = index.add([Item(np.eye(8, dtype=np.float32)[0], "new.png")])
    assert number not in open_kept(index).get_items()  # no map holds it yet
    published = index.current().published
    republished = index.republish()
    assert republished.public_digest == published.public_digest
    after = open_kept(index)
    assert not built
    assert number in after.get_items()
    assert after._read_record(int(np.flatnonzero(after._items.ravel() == number)[0])).endswith(b"new.png")


def test_many_changes_other_codes_and_records_without_names_build_it_anew(index: Index, built: list[int]) -> None:
    index.delete(np.arange(20))
    assert len(open_kept(index)) == COUNT - 20
    assert built == [COUNT - 20]
    open_kept(index, names=False)
    index.publish(4.0, 0.2, public=np.zeros(8))
    open_kept(index)
    assert len(built) == 3


def test_records_that_tell_ids_are_kept_in_step_as_such(index: Index, built: list[int]) -> None:
    told = open_sealed_index(serve_maps(index, "birds", offers=("names", "metadata"))[0])
    assert built == [COUNT]
    assert told._read_record(int(np.flatnonzero(told._items.ravel() == 7)[0])).endswith(b"bird 7.png\0")
    index.delete([5])
    update_sealed_file(index)
    after = open_sealed_index(serve_maps(index, "birds", offers=("names", "metadata"))[0])
    assert built == [COUNT]
    assert len(after) == COUNT - 1


def test_workers_make_the_hints(index: Index) -> None:
    stages: list[str] = []

    class Watched(Cluster):
        def map(self, *given: Any, stage: str, **options: Any) -> Iterator[Any]:
            stages.append(stage)
            return super().map(*given, stage=stage, **options)

    class Lost(Cluster):
        def map(self, *_: Any, **__: Any) -> Iterator[Any]:
            raise ClusterError("cluster: it was lost")

    path = index.sealed_file
    assert path is not None
    before = path.read_bytes()
    path.unlink()
    with pytest.raises(ClusterError):  # which is no fault of the disk: it is not made here in silence
        update_sealed_file(index, Lost())
    assert not path.exists()
    update_sealed_file(index, Watched())
    assert stages == ["making hints"] * 2
    assert path.read_bytes() == before


@pytest.mark.parametrize("damage", [b"", b"not an index", None])
def test_a_damaged_file_is_replaced(index: Index, built: list[int], damage: bytes | None) -> None:
    path = index.sealed_file
    assert path is not None
    path.write_bytes(path.read_bytes()[:-1] if damage is None else damage)
    assert len(open_kept(index)) == COUNT
    open_kept(index)
    assert built == [COUNT]


def test_a_full_disk_keeps_it_in_memory(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    path = index.sealed_file
    assert path is not None
    path.unlink()

    def fail(self: SealedIndex, path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SealedIndex, "save", fail)
    assert len(open_kept(index)) == COUNT
    assert not path.exists()


def test_private_rows_leave_no_file(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    path, served = index.sealed_file, serve_maps(index, "birds", offers=("names",))[0]
    assert path is not None
    index.protect()
    assert not path.exists()
    monkeypatch.setattr(sealed, "_read", lambda *_: (np.eye(COUNT, 8) + 1, [b"x"] * COUNT))  # rows were read before
    monkeypatch.setattr(type(served), "read_alive", lambda _: (np.arange(COUNT), None))
    with pytest.raises(PrivateIndexError):
        open_sealed_index(served)
    assert not path.exists()


def test_one_of_many_makes_it_and_the_others_wait(index: Index, built: list[int]) -> None:
    path = index.sealed_file
    assert path is not None
    path.unlink()
    start = threading.Barrier(4)

    def work(_: int) -> int:
        with Index.open(path.parent) as own:
            start.wait()
            return open_kept(own).layout.version

    with ThreadPoolExecutor(4) as pool:
        versions = set(pool.map(work, range(4)))
    assert (len(versions), built) == (1, [COUNT])


def test_without_a_file_the_previous_index_is_copied_and_changed(index_url: str, made: Path, built: list[int]) -> None:
    with Index.open(made) as source, Index.create(index_url, dimension=8, extractor="toy") as index:
        index.add([Item(row, f"bird {number}.png") for number, row in enumerate(source.snapshot().features)])
        index.publish(4.0, 0.1)
        first = open_sealed_index(serve_maps(index, "birds", offers=("names",))[0])
        database, public = first._database.copy(), first.get_public_tokens()
        index.delete([5, 17])
        second = open_sealed_index(serve_maps(index, "birds", offers=("names",))[0], previous=first)
        assert built == [COUNT]  # once
        assert sorted(set(range(COUNT)) - {5, 17}) == second.get_items().tolist()
        assert np.array_equal(first._database, database)
        assert first.get_public_tokens() == public
        assert len(first.get_items()) == COUNT
        row = source.snapshot().features[40] - source.snapshot().features.mean(0)
        for answering in (first, second):
            client = SealedClient(answering.layout.to_bytes(), answering.get_public_tokens())
            best = client.search(row, answering.answer, 1)[0].record
            assert best is not None
            assert best.endswith(b"bird 40.png")
        again = open_sealed_index(serve_maps(index, "birds", offers=("names",))[0], previous=second)
        assert again is second
        index.publish(4.0, 0.2, public=np.zeros(8))
        open_sealed_index(serve_maps(index, "birds", offers=("names",))[0], previous=second)
        assert built == [COUNT, COUNT - 2]  # other codes
