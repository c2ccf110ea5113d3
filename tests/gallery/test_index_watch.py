"""What stands for the state of an index: it changes with every change, whoever makes it, and with nothing else."""

import fcntl
import json
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearveil import storage
from nearveil.gallery import publishing as _index_publishing
from nearveil.gallery.errors import IndexStoreError, StaleMapError
from nearveil.gallery.index import Index
from nearveil.gallery.publishing import Published, Stamp
from nearveil.mechanisms import Message
from nearveil.search.retriever import select_first
from nearveil.storage import FileWatch
from tests.programs import Program

from .index_places import filled, index_server, index_url, one_thread, plain_items, unit_rows, where

__all__ = ["index_server", "index_url", "one_thread", "where"]  # fixtures


def test_a_stamp_changes_with_every_change(where: str) -> None:
    with filled(where, unit_rows(30)) as index, Index.open(where) as other:
        stamps = [index.stamp()]

        def changed() -> bool:
            stamps.append(index.stamp())
            assert index.stamp() == stamps[-1]
            return stamps[-1] != stamps[-2]

        assert not changed()
        other.publish(4.0, 0.2, n_sets=2)
        assert changed()
        other.delete([3])
        assert changed()
        index.delete([4])  # by this one itself
        assert changed()
        other.add(plain_items(unit_rows(2, seed=4)))
        assert changed()
        other.publish(4.0, 0.2, n_sets=2, keep=1)
        assert changed()
        other.items([5])
        other.snapshot()
        other.verify()
        assert not changed()
        assert stamps[-1] == other.stamp()
        assert [stamp.revision for stamp in stamps if stamp] == [1, 1, 1, 2, 3, 4, 4, 4]
        assert [stamp.maps for stamp in stamps if stamp][-1] == (2,)


def test_what_is_alive_is_read_once(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with filled(where, unit_rows(30)) as index, Index.open(where) as other:
        published = index.publish(4.0, 0.2, n_sets=2)
        alive = index.alive(published)
        assert alive.all()
        with monkeypatch.context() as patch:
            patch.setattr(_index_publishing, "find_deleted_since", None)
            assert index.alive(published) is alive
        other.add(plain_items(unit_rows(2, seed=4)))
        assert index.alive(published) is alive  # nothing of this map was deleted
        other.delete([3, 7])
        now = index.alive(published)
        assert np.flatnonzero(~now).tolist() == [3, 7]
        with pytest.raises(ValueError, match="read-only"):
            now[0] = False


def test_a_directory_that_is_moved_or_replaced(tmp_path: Path) -> None:
    with filled(tmp_path / "one", unit_rows(30)) as index:
        published = index.publish(4.0, 0.2, n_sets=2)
        filled(tmp_path / "two", unit_rows(30)).close()
        index.delete([1])
        with Index.open(tmp_path / "two") as two:
            two.publish(4.0, 0.2, n_sets=2)
            two.delete([2])
        assert np.flatnonzero(~index.alive(published)).tolist() == [1]
        stamp = index.stamp()
        (tmp_path / "one").rename(tmp_path / "away")
        with pytest.raises(IndexStoreError, match="its file is gone"):
            index.stamp()
        (tmp_path / "away").rename(tmp_path / "one")
        assert index.stamp() == stamp
        (tmp_path / "one").rename(tmp_path / "away")
        (tmp_path / "two").rename(tmp_path / "one")
        assert index.stamp() != stamp
        assert index.stamp()[:2] == stamp[:2]  # of the same revision, and yet
        assert np.flatnonzero(~index.alive(published)).tolist() == [2]
        assert index.ids().tolist() == [number for number in range(30) if number != 2]


def known_at_once(index: Index) -> Stamp:
    """Return the stamp of now, which is then known without waiting."""
    for _ in range(3):  # that it is wanted, where the file lies, what stands there
        stamp = index.stamp()
        if index.is_at(stamp):
            return stamp
    raise AssertionError("the state is not known")


def test_that_nothing_changed_is_known_without_waiting(tmp_path: Path) -> None:
    place = tmp_path / "one"
    with filled(place, unit_rows(30)) as index, Index.open(place) as other:
        changes: list[Callable[[], object]] = [
            lambda: other.publish(4.0, 0.2, n_sets=2),
            lambda: other.delete([3]),
            lambda: index.delete([4]),
            lambda: other.add(plain_items(unit_rows(2, seed=4))),
            lambda: delete_elsewhere(place, 5),
        ]
        for change in changes:
            stamp = known_at_once(index)
            other.items([5])
            other.verify()
            assert index.is_at(stamp)
            change()
            assert not index.is_at(stamp)
        stamp = known_at_once(index)
        for _ in range(3):  # others come and go, and empty the log
            with closing(sqlite3.connect(place / "index.db")) as connection:
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        assert index.stamp() == stamp
        stamp = known_at_once(index)
        with closing(sqlite3.connect(place / "index.db")) as connection:
            connection.execute("PRAGMA user_version = 7")
        assert not index.is_at(stamp)
        known_at_once(index)
        place.rename(tmp_path / "away")
        assert not index.is_at(stamp)
        (tmp_path / "away").rename(place)


DELETE = """
import sys
from nearveil.gallery import Index
with Index.open(sys.argv[1]) as index:
    index.delete([int(sys.argv[2])])
    print(index.ids().tolist())
"""


def delete_elsewhere(place: Path, number: int) -> list[int]:
    """Delete an item in another process; return what is left there."""
    found: list[int] = json.loads(Program("-c", DELETE, str(place), str(number)).read(60))
    return found


def test_what_is_written_to_an_index_that_was_opened_twice_is_not_lost(tmp_path: Path) -> None:
    """To open and close its file would take its locks away: another process would delete the log in use."""
    with filled(tmp_path / "one", unit_rows(30)) as index, Index.open(tmp_path / "one") as twice:
        assert 1 not in delete_elsewhere(tmp_path / "one", 1)
        index.delete([2])
        twice.delete([3])
        assert delete_elsewhere(tmp_path / "one", 4) == [0, *range(5, 30)]
        assert index.ids().tolist() == twice.ids().tolist() == [0, *range(5, 30)]


def test_a_commit_in_the_middle_of_a_look_is_seen_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with filled(tmp_path / "one", unit_rows(30)) as index, Index.open(tmp_path / "one") as other:
        known_at_once(index)
        read, left = FileWatch._read_header, [7, 8]

        def read_and_commit(watch: FileWatch) -> bytes:
            header = read(watch)
            if left:
                other.delete([left.pop()])
            return header

        with monkeypatch.context() as patch:
            patch.setattr(FileWatch, "_read_header", read_and_commit)
            stamp = index.stamp()
        left.clear()
        assert stamp.revision == other.revision
        assert not index.is_at(stamp)  # its mark may be of before the commit, or of after it
        assert index.is_at(known_at_once(index))


def test_a_file_that_somebody_holds_for_itself(tmp_path: Path) -> None:
    path = tmp_path / "file.db"
    with sqlite3.connect(path, isolation_level=None) as writer:
        writer.execute("CREATE TABLE t (x)")
        watch = FileWatch(path)
        first_mark = watch.mark()
        assert first_mark == watch.mark() is not None
        writer.execute("BEGIN EXCLUSIVE")
        writer.execute("INSERT INTO t VALUES (1)")
        assert watch.mark() is None  # at once: it waits for no writer
        writer.execute("COMMIT")
        assert watch.mark() not in (None, first_mark)
    writer.close()
    watch.close()
    path.unlink()
    with pytest.raises(FileNotFoundError):
        watch.mark()
    watch.close()


@pytest.mark.parametrize("watch_first", [True, False])
def test_files_that_are_closed_leave_no_descriptors(tmp_path: Path, *, watch_first: bool) -> None:
    path, before = tmp_path / "file.db", len(storage._SHARED_FILES)
    for number in range(20):
        writer = sqlite3.connect(path, isolation_level=None)
        writer.execute("PRAGMA journal_mode=WAL")
        writer.execute(f"CREATE TABLE t{number} (x)")
        watch = FileWatch(path)
        watch.is_at(watch.mark())  # type: ignore[arg-type]
        watch.mark()
        mark = watch.mark()
        assert mark is not None
        assert watch.is_at(mark)
        closers = [watch.close, writer.close]
        for close in closers if watch_first else closers[::-1]:
            close()
        assert len(storage._SHARED_FILES) <= before + watch_first


def is_in_use(path: Path) -> bool:
    """Return whether a process holds the lock that SQLite's connections share on the index of a log (byte 128)."""
    child = os.fork()  # locks are of a process: it does not stop itself
    if not child:
        try:
            fcntl.lockf(os.open(path, os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 128)
        except BlockingIOError:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_a_watch_that_is_closed_takes_no_locks_away(tmp_path: Path) -> None:
    with filled(tmp_path / "one", unit_rows(30)) as index:
        index.delete([29])
        watch = FileWatch(index._database.path)
        watch.is_at(watch.mark())  # type: ignore[arg-type]
        watch.mark()
        watch.close()
        assert is_in_use(tmp_path / "one" / "index.db-shm")
        assert 1 not in delete_elsewhere(tmp_path / "one", 1)
        index.delete([2])
        assert delete_elsewhere(tmp_path / "one", 3) == [0, *range(4, 29)]
        assert index.ids().tolist() == [0, *range(4, 29)]


def test_a_child_looks_through_its_own_connection(tmp_path: Path) -> None:
    path = tmp_path / "file.db"
    with sqlite3.connect(path, isolation_level=None) as writer:
        writer.execute("CREATE TABLE t (x)")
    writer.close()
    watch = FileWatch(path)
    mark = watch.mark()
    child = os.fork()
    if not child:
        now = watch.mark()
        os._exit(0 if watch.mark() == now and now is not None and now.opening == 2 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert watch.mark() == mark
    watch.close()


def by_scores(published: Published, message: Message, alive: np.ndarray) -> list[int]:
    """Answer by scoring the whole gallery, as `rank` does: the definition."""
    scores = published.release._rank(message, np.empty((0, 0)))
    scores[~alive] = -np.inf
    return sorted(published.ids[select_first(scores, published.map.set_size)].tolist())


@settings(max_examples=60, derandomize=True, deadline=None, database=None)
@given(dead=st.sets(st.integers(0, 39), max_size=34), number=st.integers(0, 3))
def test_an_answer_is_what_the_scores_say(gallery: Published, dead: set[int], number: int) -> None:
    message = Message("covers", gallery.public_id, {"sets": np.array([number], np.int32)})
    alive = ~np.isin(np.arange(40), list(dead))
    if alive.sum() < gallery.map.set_size:
        with pytest.raises(StaleMapError):
            gallery.answer(message, alive)
        return
    answer = gallery.answer(message, alive)
    assert answer.ids.tolist() == by_scores(gallery, message, alive)
    assert (answer.codes == gallery.codes[np.searchsorted(gallery.ids, answer.ids)]).all()


@pytest.fixture(scope="module")
def gallery(tmp_path_factory: pytest.TempPathFactory) -> Published:
    with filled(tmp_path_factory.mktemp("i") / "i", unit_rows(40)) as index:
        return index.publish(4.0, 0.25, n_sets=4)
