"""``nearveil.cluster``: stages over partitions, in this process and on workers that die, refuse and come back."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from nearveil import cluster
from nearveil.cluster import LOCAL, ClusterError, PartitionError, connect, cut_rows, use_one_thread

from . import stages

PARTS = [np.full(10, number) for number in range(8)]
OTHER = np.ones(3)
TOTALS = [10.0 * number + 3 for number in range(8)]


def test_partitions_are_cut_by_rows_alone() -> None:
    assert cut_rows(0) == []
    assert [some.stop for some in cut_rows(10, 4)] == [4, 8, 10]
    assert cut_rows(cluster.ROWS + 1)[1] == slice(cluster.ROWS, cluster.ROWS + 1)


def test_a_stage_is_the_same_here_and_there(workers: Any) -> None:
    for where in (None, workers):
        with connect(where) as found:
            done: list[int] = []
            parts, other = found.place(PARTS), found.share(OTHER)
            assert list(found.map(stages.add, parts, other, stage="adding", tick=done.append)) == TOTALS
            assert done == [1] * 8
            assert list(found.map(stages.add, PARTS[:1], OTHER, stage="adding")) == TOTALS[:1]
            assert list(found.map(stages.add, [], OTHER, stage="adding")) == []
            with connect(found) as same:
                assert same is found


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 7, 8])
def test_a_tree_of_merges_is_fixed_by_the_number_of_partitions(workers: Any, count: int) -> None:
    found = []
    for where in (None, workers):
        with connect(where) as place:
            done: list[int] = []
            parts = place.place([f"{number}" for number in range(count)])
            found.append(place.reduce(str, stages.join, parts, stage="joining", tick=done.append))
            assert sum(done) == count
    assert found[0] == found[1]
    assert found[0].replace("(", "").replace(")", "") == "01234567"[:count]


def test_a_cluster_of_this_machine_is_started_and_ended(tmp_path: Path) -> None:
    """Its workers read stored partitions by themselves; other workers are sent them."""
    with connect("local:1") as found:
        assert str(found.dashboard).startswith("http://127.0.0.1:")
        assert list(found.map(stages.add, found.place(PARTS), OTHER, stage="adding")) == TOTALS
        read = found.map(stages.tell_reader, found.place([stages.Stored(3), stages.Stored(4)]), stage="reading")
        assert [(number, reader != os.getpid()) for number, reader in read] == [(3, True), (4, True)]


def test_dask_knows_how_large_a_result_is() -> None:
    from dask.sizeof import sizeof

    rows = np.zeros((1000, 50))
    assert sizeof(cluster._Outcome((rows, rows))) > 2 * rows.nbytes


def test_stored_partitions_are_sent_to_other_machines(workers: Any) -> None:
    for where in (None, workers):
        with connect(where) as found:
            parts = found.place([stages.Stored(3), stages.Stored(4)])
            assert list(found.map(stages.tell_reader, parts, stage="reading")) == [(3, os.getpid()), (4, os.getpid())]


def test_an_error_names_the_partition(workers: Any) -> None:
    for where in (None, workers):
        with connect(where) as found:
            with pytest.raises(PartitionError, match=r"^reading, partition 2 of 3: row 7 must be finite$"):
                list(found.map(stages.refuse, [1, 2, 3], stage="reading"))
            with pytest.raises(PartitionError, match=r"^reading, rows 5 to 9: row 7 must be finite$"):
                list(found.map(stages.refuse, [1, 2], stage="reading", names=["rows 0 to 4", "rows 5 to 9"]))
            with pytest.raises(PartitionError, match=r"^reading, partition 2 of 3: row 7 must be finite$"):
                found.reduce(stages.refuse, max, [1, 2, 3], stage="reading")
            with pytest.raises(ValueError, match=r"^row 7 must be finite$"):
                list(found.map(stages.refuse, [2], stage="reading"))
            assert list(found.map(stages.refuse, [1, 3], stage="reading")) == [1, 3]


def test_a_worker_killed_in_a_stage_changes_nothing(workers: Any, tmp_path: Path) -> None:
    with connect(workers) as found:
        parts, other = found.place(PARTS), found.share(OTHER)
        for turn in range(2):  # the second time, what the dead worker held is placed already
            mark = str(tmp_path / f"mark {turn}")
            assert list(found.map(stages.die_once, parts, other, mark, stage="adding")) == TOTALS
            assert Path(mark).exists()
        mark = str(tmp_path / "mark of a tree")
        assert found.reduce(stages.die_once, max, parts, other, mark, stage="adding") == max(TOTALS)
        assert Path(mark).exists()


def test_a_partition_that_kills_every_worker_is_named(workers: Any) -> None:
    words = r"^adding, partition 2 of 3: every worker that had it died"
    with connect(workers) as found:
        with pytest.raises(PartitionError, match=words):
            list(found.map(stages.die_always, [0, 1, 2], stage="adding"))
        with pytest.raises(PartitionError, match=words):
            found.reduce(stages.die_always, max, [0, 1, 2], stage="adding")


@pytest.mark.parametrize("where", ["local:0", "local:", "nowhere", "tls://host", "http://host:1", "tcp://host:x", ""])
def test_an_address_that_is_none(where: str) -> None:
    with pytest.raises(ValueError, match="cluster must be local, local:N"), connect(where):
        pass


def test_nothing_goes_to_another_machine_in_the_clear() -> None:
    with pytest.raises(ValueError, match="not encrypted"), connect("tcp://198.51.100.7:8786"):
        pass


def test_a_cluster_that_is_not_there() -> None:
    import dask

    with (
        dask.config.set({"distributed.comm.timeouts.connect": "0.5s"}),
        pytest.raises(ClusterError, match=r"tcp://127\.0\.0\.1:9 cannot be reached"),
        connect("tcp://127.0.0.1:9"),
    ):
        pass


def test_without_dask_there_is_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "distributed", None)
    with connect() as found:
        assert found is LOCAL
        assert found.dashboard is None
    with pytest.raises(ModuleNotFoundError, match=r"nearveil\[cluster\]"), connect("local"):
        pass


def count_threads() -> list[int]:
    return [one["num_threads"] for one in threadpool_info() if one["user_api"] == "blas"]


def test_threads_are_limited_until_the_last_one_has_ended() -> None:
    with threadpool_limits(2, user_api="blas"):
        before, first, second = count_threads(), use_one_thread(), use_one_thread()
        first.__enter__()
        second.__enter__()
        assert set(count_threads()) == {1}
        first.__exit__(None, None, None)
        assert set(count_threads()) == {1}
        second.__exit__(None, None, None)
        assert count_threads() == before
