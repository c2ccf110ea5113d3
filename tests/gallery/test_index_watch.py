"""What stands for the state of an index: it changes with every change, whoever makes it, and with nothing else."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearveil.gallery.errors import IndexStoreError, StaleMapError
from nearveil.gallery.index import Index
from nearveil.gallery.publishing import Published, select_first
from nearveil.mechanisms import Message
from tests.programs import Program

from .index_places import filled, index_server, index_url, one_thread, plain_items, unit_rows, where

__all__ = ["index_server", "index_url", "one_thread", "where"]  # fixtures


def test_a_state_changes_with_every_change(where: str) -> None:
    with filled(where, unit_rows(30)) as index, Index.open(where) as other:
        states = [index.state()]

        def changed() -> bool:
            states.append(index.state())
            assert index.state() == states[-1]
            return states[-1] != states[-2]

        assert not changed()
        other.publish(4.0, 0.2, n_sets=2, reach=0.0)
        assert changed()
        other.delete([3])
        assert changed()
        index.delete([4])  # by this one itself
        assert changed()
        other.add(plain_items(unit_rows(2, seed=4)))
        assert changed()
        other.publish(4.0, 0.2, n_sets=2, reach=0.0, keep=1)
        assert changed()
        other.items([5])
        other.snapshot()
        other.verify()
        assert not changed()
        assert states[-1] == other.state()
        assert [state.revision for state in states if state] == [1, 1, 1, 2, 3, 4, 4, 4]
        assert [state.maps for state in states if state][-1] == (2,)


def test_alive_excludes_deleted_items(where: str) -> None:
    with filled(where, unit_rows(30)) as index, Index.open(where) as other:
        published = index.publish(4.0, 0.2, n_sets=2, reach=0.0)
        assert index.alive(published).all()
        other.add(plain_items(unit_rows(2, seed=4)))
        assert index.alive(published).all()
        other.delete([3, 7])
        alive = index.alive(published)
        assert np.flatnonzero(~alive).tolist() == [3, 7]
        with pytest.raises(ValueError, match="read-only"):
            alive[0] = False


def test_a_directory_that_is_moved_or_replaced(tmp_path: Path) -> None:
    with filled(tmp_path / "one", unit_rows(30)) as index:
        published = index.publish(4.0, 0.2, n_sets=2, reach=0.0)
        filled(tmp_path / "two", unit_rows(30)).close()
        index.delete([1])
        with Index.open(tmp_path / "two") as two:
            two.publish(4.0, 0.2, n_sets=2, reach=0.0)
            two.delete([2])
        assert np.flatnonzero(~index.alive(published)).tolist() == [1]
        state = index.state()
        (tmp_path / "one").rename(tmp_path / "away")
        with pytest.raises(IndexStoreError, match="its file is gone"):
            index.state()
        (tmp_path / "away").rename(tmp_path / "one")
        assert index.state() == state
        (tmp_path / "one").rename(tmp_path / "away")
        (tmp_path / "two").rename(tmp_path / "one")
        assert index.state() != state
        assert index.state()[1:] == state[1:]  # the same revision and maps in another file
        assert np.flatnonzero(~index.alive(published)).tolist() == [2]
        assert index.ids().tolist() == [number for number in range(30) if number != 2]


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
        return index.publish(4.0, 0.25, n_sets=4, reach=0.0)
