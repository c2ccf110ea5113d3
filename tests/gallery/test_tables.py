"""``sync_table``: vectors of a table come in, replace and go out by their ids, and the map follows."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nearveil.cluster import Cluster, ClusterError
from nearveil.features.vectors import VectorFile, VectorTable
from nearveil.gallery import Index
from nearveil.gallery.publishing import MapTerms, Published
from nearveil.gallery.sync import SyncReport, sync_table

ROWS = np.random.default_rng(5).standard_normal((50, 6)).astype(np.float32)
IDS = [f"a{number}" for number in range(50)]


def map_of(report: SyncReport) -> Published:
    assert report.published is not None
    return report.published


def test_a_table_is_kept(tmp_path: Path) -> None:
    seen: list[str] = []

    def progress(words: str, total: int | None) -> object:
        seen.append(words)
        return lambda _: None

    first = sync_table(VectorTable(ROWS, IDS), tmp_path / "i", n_sets=3, reach=0.0, candidates=0.2, progress=progress)  # type: ignore[arg-type]
    assert (first.items, first.added, first.deleted, first.dimension, first.learned) == (50, 50, 0, 6, True)
    assert map_of(first).map.n_sets == 3
    assert seen
    same = sync_table(VectorTable(ROWS, IDS), tmp_path / "i")
    assert (same.added, same.deleted, same.learned, same.revision) == (0, 0, False, first.revision)
    assert map_of(same).public_id == map_of(first).public_id

    # Rows with known ids are replaced, and those that the table lacks stay.
    changed = VectorTable(np.concatenate([-ROWS[:1], ROWS[1:2]]), ["a0", "b"])
    next_ = sync_table(changed, tmp_path / "i", delete=["a49"])
    assert (next_.items, next_.learned) == (50, True)
    assert (next_.added, next_.replaced, next_.deleted) == (1, 1, 1)
    with Index.open(tmp_path / "i") as index:
        held = {item.external_id for item in index.items(index.ids())}
        assert held == {*IDS[:49], "b"}
        np.testing.assert_allclose(index.features(["a0"])[0], -ROWS[0] / np.linalg.norm(ROWS[0]), atol=1e-6)
        assert not index.current().stale
        index.verify()


def test_reach_is_kept_with_the_map(tmp_path: Path) -> None:
    free = sync_table(VectorTable(ROWS, IDS), tmp_path / "i", n_sets=5, reach=0.0, candidates=0.2)
    assert map_of(free).reach < 1
    reached = sync_table(VectorTable(ROWS, IDS), tmp_path / "i", reach=1.0)
    assert (reached.learned, map_of(reached).reach) == (True, 1.0)
    other = sync_table(VectorTable(ROWS, IDS), tmp_path / "i", epsilon=2.0)
    assert (other.learned, map_of(other).reach) == (True, 1.0)
    for given, words in (({"reach": 1.5}, "from 0 to 1"), ({"n_sets": 4}, "n_sets must be larger")):
        with pytest.raises(ValueError, match=words):
            sync_table(VectorTable(ROWS, IDS), tmp_path / "i", **given)


def test_every_item_can_be_returned_by_default(tmp_path: Path) -> None:
    rows = np.random.default_rng(6).standard_normal((400, 6)).astype(np.float32)
    ids = [f"a{number}" for number in range(400)]
    report = sync_table(VectorTable(rows, ids), tmp_path / "i")
    assert (map_of(report).reach, map_of(report).terms.reach) == (1.0, 1.0)
    for number in range(3):  # an update of a smaller gallery has smaller sets, and they still contain every item
        report = sync_table(None, tmp_path / "i", delete=[f"a{number}"])
        assert (map_of(report).reach, map_of(report).release.drift_ > 0) == (1.0, True)
    with pytest.raises(ValueError, match="candidates must be larger, or reach smaller"):
        MapTerms(4.0, 1e-4).check(100_000_000)
    with Index.create(tmp_path / "j", dimension=6) as index:
        index.add_table(rows, ids)
        assert index.publish(4.0).reach == 1.0
        assert index.publish(1.0, reach=0.0).reach < 1


def test_what_is_wrong_changes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no index at"):
        sync_table(None, tmp_path / "i", delete=["a0"])
    with pytest.raises(ValueError, match="epsilon"):
        sync_table(VectorTable(ROWS, IDS), tmp_path / "i", epsilon=-1.0)
    assert not (tmp_path / "i").exists()
    made = sync_table(VectorTable(ROWS, IDS), tmp_path / "i", n_sets=3, reach=0.0, candidates=0.2)
    with pytest.raises(ValueError, match="does not hold b; nothing was changed"):
        sync_table(VectorTable(ROWS, IDS), tmp_path / "i", delete=["a0", "b"])
    with pytest.raises(ValueError, match="6"):
        sync_table(VectorTable(ROWS[:, :4], IDS), tmp_path / "i")
    new = VectorTable(-ROWS, [f"b{number}" for number in range(50)])
    wrong = ({"epsilon": -1.0}, {"candidates": 2.0}, {"candidates": 1e-3}, {"n_sets": 101}, {"reach": 1.5})
    for given in (*wrong, {"n_sets": 4, "reach": 1.0}):
        with pytest.raises(ValueError, match="nothing was changed"):
            sync_table(new, tmp_path / "i", delete=["a0"], **given)
    with Index.open(tmp_path / "i") as index:
        assert (len(index), index.revision) == (50, made.revision)
    # How many rows there will be is known when they are there.
    with pytest.raises(ValueError, match="the index has changed, and its map is as before"):
        sync_table(VectorTable(-ROWS[:1], ["a0"]), tmp_path / "i", n_sets=51, reach=0.0)
    Index.create(tmp_path / "images", dimension=6, extractor="toy").close()
    with pytest.raises(ValueError, match="this index has features of images"):
        sync_table(VectorTable(ROWS, IDS), tmp_path / "images")


def test_a_wrong_row_deletes_nothing(tmp_path: Path) -> None:
    made = sync_table(VectorTable(ROWS, IDS), tmp_path / "i", n_sets=3, reach=0.0, candidates=0.2)
    wrong = ROWS[:3].copy()
    wrong[2, 1] = np.nan
    np.save(tmp_path / "b.npy", wrong)
    for table in (VectorFile(tmp_path / "b.npy"), VectorTable(wrong, IDS[:3]), VectorTable(ROWS[:2], ["b", "b"])):
        with pytest.raises(ValueError, match=r"finite|NaN|every id once"):
            sync_table(table, tmp_path / "i", delete=["a5"])
    with Index.open(tmp_path / "i") as index:
        assert (index.revision, len(index)) == (made.revision, 50)
    # What is deleted and in the table, too, is as the table has it: unchanged, changed.
    both = VectorTable(np.concatenate([ROWS[:1], -ROWS[1:2]]), ["a0", "a1"])
    report = sync_table(both, tmp_path / "i", delete=["a0", "a1", "a2"])
    assert report.items == 49
    with Index.open(tmp_path / "i") as index:
        assert {item.external_id for item in index.items(index.ids())} == {*IDS} - {"a2"}
        assert np.sign(index.features(["a1"])[0, 0]) == -np.sign(ROWS[1, 0])


def test_a_failure_after_a_change_says_that_it_stands(tmp_path: Path) -> None:
    class Lost(Cluster):
        def map(self, *given: Any, stage: str, **options: Any) -> Iterator[Any]:
            if stage == "making codes":
                raise ClusterError("cluster: it was lost")
            return super().map(*given, stage=stage, **options)

    made = sync_table(VectorTable(ROWS, IDS), tmp_path / "i", n_sets=3, reach=0.0, candidates=0.2)
    with pytest.raises(ClusterError) as caught:
        sync_table(VectorTable(ROWS[:1], ["b"]), tmp_path / "i", delete=["a5"], epsilon=2.0, cluster=Lost())
    assert caught.value.__notes__ == ["earlier additions and deletions were saved: run it again to finish"]
    with Index.open(tmp_path / "i") as index:
        assert {item.external_id for item in index.items(index.ids())} == {*IDS, "b"} - {"a5"}
        assert index.current().published.public_id == map_of(made).public_id
    again = sync_table(VectorTable(ROWS[:1], ["b"]), tmp_path / "i", epsilon=2.0)
    assert (again.added, again.learned) == (0, True)


def test_one_item_is_deleted_and_added_without_learning_the_map_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = np.random.default_rng(0).standard_normal((600, 8)).astype(np.float32)
    ids: list[Any] = [f"doc-{n}" for n in range(600)]
    learned = sync_table(VectorTable(rows, ids), tmp_path / "index").published
    assert learned is not None

    def learn(*_: Any, **__: Any) -> Any:
        raise AssertionError("it takes minutes for a large gallery")

    monkeypatch.setattr(Published, "learn", learn)
    for table, deleted, count in ((None, ["doc-7", "doc-300"], 598), (VectorTable(rows[7:8], ids[7:8]), [], 599)):
        report = sync_table(table, tmp_path / "index", delete=deleted)
        assert (report.items, report.learned) == (count, True)
        assert report.published is not None
        assert (report.published.reach, report.published.code_recall) == (1.0, learned.code_recall)
    with Index.open(tmp_path / "index") as index:
        earlier = index.snapshot()
        index.delete(["doc-0", "doc-100", "doc-101", "doc-599"])
        changed, (published, _) = index.snapshot(), index.current()
        assert np.array_equal(changed.features, earlier.features[np.isin(earlier.ids, changed.ids)])
        with Index.open(tmp_path / "index") as fresh:
            assert np.array_equal(fresh.snapshot().features, changed.features)
        assert published.release.drift_ > 0
