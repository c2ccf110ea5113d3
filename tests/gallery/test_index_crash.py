"""Killed, cut off, out of room: an index is as it was before or after, and what was acknowledged stands."""

import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from nearveil.gallery.errors import IndexStoreError, NotAnIndexError
from nearveil.gallery.index import Index
from nearveil.gallery.items import Item

from ..ledger.postgres import Postgres
from ..small_disk import fill, mounted
from .index_places import DIMENSION, WEBP, filled, index_server, index_url, one_thread, plain_items, unit_rows, where

__all__ = ["index_server", "index_url", "one_thread", "where"]  # fixtures

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

BATCH = 3


def batch(step: int) -> list[Item]:
    rows = unit_rows(BATCH, seed=step)
    return [Item(row, f"{step}-{n}", WEBP + bytes([step % 256] * 50), bytes([n] * 2000)) for n, row in enumerate(rows)]


def do(index: Index, step: int) -> None:
    """Do one step of a fixed course; the revision counts them. Each third deletes half of what stands."""
    if step % 3 == 2:
        index.delete(index.ids()[::2])
    else:
        index.add(batch(step))


def course(steps: int) -> dict[int, tuple[int, int]]:
    """Return what stands after so many steps: by id, the step and the number of the item."""
    held: dict[int, tuple[int, int]] = {}
    given = 0
    for step in range(steps):
        if step % 3 == 2:
            for number in list(held)[::2]:
                del held[number]
        else:
            held.update({given + n: (step, n) for n in range(BATCH)})
            given += BATCH
    return held


def check(index: Index) -> int:
    """Check that an index stands exactly at some step of the course, and return it."""
    index.verify()
    now = index.snapshot()
    held = course(now.revision)
    assert now.ids.tolist() == list(held)
    assert len(index) == len(held)
    if held:
        rows = np.stack([unit_rows(BATCH, seed=step)[n] for step, n in held.values()])
        assert now.features.tobytes() == rows.tobytes()
    for item, (step, n) in zip(index.items(now.ids), held.values(), strict=True):
        want = batch(step)[n]
        assert (item.name, item.thumbnail, item.original) == (want.name, want.thumbnail, want.original)
    return now.revision


def in_child(work: Callable[[Callable[[int], None]], None]) -> tuple[int, int]:
    """Fork; return the child's process and where to read what it acknowledges."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reading)
            told = os.fdopen(writing, "w")
            work(lambda step: print(step, file=told, flush=True))
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    return child, reading


def killed_after(child: int, reading: int, lines: int, delay: float) -> list[int]:
    """Kill a child some time after it acknowledged so many steps; return all that it acknowledged."""
    heard = b""
    while heard.count(b"\n") < lines:
        more = os.read(reading, 4096)
        assert more, "the child died by itself"
        heard += more
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    while more := os.read(reading, 4096):
        heard += more
    os.close(reading)
    os.waitpid(child, 0)
    return [int(line) for line in heard.split()]


def test_kill_9_at_random_moments(where: str) -> None:
    Index.create(where, dimension=DIMENSION).close()
    chance, step = random.Random(3), 0  # noqa: S311

    def work(first: int, tell: Callable[[int], None]) -> None:
        with Index.open(where) as index:
            for number in range(first, 10**6):
                do(index, number)
                tell(number + 1)

    for turn in range(10):
        child, reading = in_child(lambda tell, first=step: work(first, tell))  # type: ignore[misc]
        told = killed_after(child, reading, turn % 4, chance.uniform(0, 0.03))
        acknowledged = told[-1] if told else step
        with Index.open(where) as index:
            step = settled(index, acknowledged)
        assert step in (acknowledged, acknowledged + 1)
    assert step >= 13


def settled(index: Index, acknowledged: int) -> int:
    """Wait until a server has noticed that its client is gone: the change in flight may be finished by it."""
    deadline = time.monotonic() + 2
    while True:
        found = check(index)
        assert found >= acknowledged
        if "postgresql" not in repr(index) or time.monotonic() > deadline or others(index) == 0:
            return check(index)
        time.sleep(0.02)


def others(index: Index) -> int:
    with index._database.begin_read() as connection:
        count = (
            "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
        )
        return int(connection.exec_driver_sql(count).scalar_one())


def test_an_open_index_survives_the_death_of_a_writer(where: str) -> None:
    """One process serves all the time while others add, delete and are killed."""
    with Index.create(where, dimension=DIMENSION) as index:
        step = 0

        def work(first: int, tell: Callable[[int], None]) -> None:
            for number in range(first, 10**6):  # the parent's index, in a child of its own
                do(index, number)
                tell(number + 1)

        for turn in range(3):
            child, reading = in_child(lambda tell, first=step: work(first, tell))  # type: ignore[misc]
            told = killed_after(child, reading, 2, 0.005 * turn)
            step = settled(index, told[-1])
            assert step in (told[-1], told[-1] + 1)


def test_every_cut_of_the_log_is_a_step_of_the_course(tmp_path: Path) -> None:
    """A loss of power may leave any beginning of the log, and rubbish after it."""
    source = tmp_path / "source"
    with Index.create(source, dimension=DIMENSION) as index:
        for step in range(3):
            do(index, step)  # the deletion empties the log
        for step in (3, 4):
            do(index, step)
        data, log = ((source / name).read_bytes() for name in ("index.db", "index.db-wal"))
        assert check(index) == 5
    frame, chance = (32 << 10) + 24, random.Random(0)  # noqa: S311
    frames = (len(log) - 32) // frame
    assert frames >= 6
    cuts = sorted({0, 31, 32, len(log), *(32 + n * frame + at for n in range(frames) for at in (0, 24, frame - 1))})
    reached = []
    for cut in cuts:
        for rubbish in (b"", chance.randbytes(5000)):
            place = tmp_path / "cut"
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            (place / "index.db").write_bytes(data)
            (place / "index.db-wal").write_bytes(log[:cut] + rubbish)
            with Index.open(place) as index:
                reached.append(check(index))
                index.add(batch(99))  # and it goes on from there
    assert reached == sorted(reached)
    assert set(reached) == {3, 4, 5}


def test_killed_while_it_is_made(tmp_path: Path) -> None:
    made = 0
    for turn in range(16):
        place = tmp_path / f"{turn}"
        child, reading = in_child(lambda _, place=place: Index.create(place, dimension=DIMENSION).close())  # type: ignore[misc]
        killed_after(child, reading, 0, 0.002 * turn)
        try:
            Index.open(place).close()
            made += 1
        except NotAnIndexError:
            Index.create(place, dimension=DIMENSION).close()
        with Index.open(place) as index:
            assert (len(index), index.revision) == (0, 0)
            do(index, 0)
            assert check(index) == 1
    assert made < 16


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 8 MiB: pages are of 32 KiB."""
    yield from mounted(tmp_path / "small disk", "8m")


def state(index: Index) -> tuple[int, list[str]]:
    return index.revision, [item.name for item in index.items(index.ids())]


def add_until_it_fails(index: Index, step: int) -> tuple[tuple[int, list[str]], IndexStoreError]:
    """Return what stood before the addition that failed, and how it failed."""
    for _ in range(1000):
        before = state(index)
        try:
            index.add(batch(step))
        except IndexStoreError as error:
            return before, error
    raise AssertionError("the disk never got full")


def test_a_full_disk_at_every_point(small_disk: Path) -> None:
    with Index.create(small_disk / "i", dimension=DIMENSION) as index:
        for leave in range(12):
            ballast = fill(small_disk, 8 * leave)
            before, error = add_until_it_fails(index, leave)
            assert isinstance(error, IndexStoreError)
            assert "full" in str(error)
            assert state(index) == before
            index.verify()
            if leave % 3 == 0:
                index.close()  # the next connection finds what the last one left
            ballast.unlink()
            index.add(batch(leave))
            index.delete(index.ids())
            assert state(index) == (before[0] + 2, [])
    with Index.open(small_disk / "i") as index:
        index.verify()


def test_readers_are_served_while_a_large_addition_goes_on(where: str) -> None:
    with filled(where, unit_rows(50)) as index, Index.open(where) as other:
        done = threading.Event()
        errors: list[BaseException] = []

        def add() -> None:
            try:
                other.add(plain_items(unit_rows(20_000, seed=4)))
            except BaseException as error:
                errors.append(error)
            finally:
                done.set()

        thread = threading.Thread(target=add)
        thread.start()
        seen = set()
        while not done.is_set():
            seen.add(len(index.search(unit_rows(1), 5)[0][0]) and len(index))
        thread.join()
        assert not errors
        assert seen <= {50, 20_050}
        assert 50 in seen
        assert len(index.snapshot()) == 20_050


def test_a_server_that_is_stopped(index_server: Postgres, index_url: str) -> None:
    with filled(index_url, unit_rows(10)) as index:
        index_server.stop("immediate")
        try:
            with pytest.raises(IndexStoreError, match=r"unexpected database error .* may have been saved or not"):
                index.add(plain_items(unit_rows(1)))
            with pytest.raises(IndexStoreError, match=r"unexpected database error .*; nothing was being written$"):
                index.items([0])
        finally:
            index_server.start()
        assert (len(index), index.revision) == (10, 1)
        index.verify()
