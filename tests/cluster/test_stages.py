"""Stages on a cluster: what comes out does not depend on workers or partitions, and faults leave nothing half done."""

import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from nearveil import cluster
from nearveil.cluster import Cluster, PartitionError, SpreadRows, connect
from nearveil.features import gallery_features
from nearveil.features.vectors import VectorFile
from nearveil.gallery import Index, store
from nearveil.gallery.errors import NotPublishedError
from nearveil.gallery.sync import sync_table
from nearveil.mechanisms.covers import learning
from nearveil.metrics import ScoreSpace
from nearveil.private_knn.neighbors import NeighborSearch
from tests.features.files import picture, saved
from tests.gallery.index_places import unit_rows
from tests.gallery.test_index_published import to_bytes
from tests.small_disk import fill, mounted

from . import stages
from .dying import DyingExtractor
from .processes import Processes

COUNT, DIMENSION = 1400, 12
ROWS = unit_rows(COUNT, DIMENSION)
SPACE = ScoreSpace("cosine", np.zeros(DIMENSION))
TERMS: dict[str, Any] = {"n_sets": 4, "reach": 0.0, "candidates": 0.1, "code_bytes": 64}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "ROWS", 300)
    monkeypatch.setattr(cluster, "_WORKER_TIMEOUT", 15.0)
    monkeypatch.setattr(learning, "_EXACT", 1 << 20)  # inverted lists, as of large galleries


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    return write_parquet(tmp_path / "emb.parquet", ROWS, 100)


def write_parquet(place: Path, rows: NDArray[np.float32], group: int) -> Path:
    pa, writer = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pa.table({"key": [f"k{number}" for number in range(len(rows))], "v": list(rows)})
    writer.write_table(table, place, row_group_size=group)
    return place


def test_results_do_not_depend_on_workers_or_partitions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maps, answers, stored, near = [], [], [], []
    blocks = pytest.importorskip("dask.array").from_array(ROWS, chunks=(50, DIMENSION))

    def index(where: Any, turn: int, group: int) -> None:
        monkeypatch.setattr(store, "_MOST_ROWS", turn % 2)  # rows are read from where they lie; for 1 and 5, too
        file = VectorFile(write_parquet(tmp_path / f"{turn}.parquet", ROWS, group), ids="key")
        report = sync_table(file, tmp_path / f"index {turn}", cluster=where, epsilon=4.0, **TERMS)
        assert (report.added, report.items) == (COUNT, COUNT)
        assert report.published is not None
        maps.append(to_bytes(report.published))
        with Index.open(tmp_path / f"index {turn}") as found:
            stored.append(found.snapshot().features.tobytes())
            answers.append([item.external_id for item in found.items(found.ids()[[0, 1399]])])
            found.verify()

    index(None, 0, 100)
    with Processes(tmp_path, 1) as processes:
        for more, count, group in ((0, 1, 1400), (1, 2, 100), (3, 5, 77)):
            if more:
                processes.add_workers(more)
            processes.client.wait_for_workers(count, timeout=60)
            assert len(processes.client.nthreads()) == count
            index(processes.client, count, group)
            with processes.client.as_current():
                near.append(NeighborSearch(blocks.persist()).nearest(ROWS[:20], 9).tobytes())
    assert set(near) == {NeighborSearch(ROWS).nearest(ROWS[:20], 9).tobytes()}
    assert len(set(maps)) == len(set(stored)) == 1
    assert answers == [["k0", "k1399"]] * 4


def test_the_number_of_sets_and_prototypes_are_found_alike(workers: Any) -> None:
    sets, prototypes = [], []
    for where in (None, workers):
        with connect(where) as place:
            sets.append(
                learning.learn_sets(SpreadRows.cut(ROWS, place), SPACE, 140, 4.0, None, lambda _, __: None).sets
            )
            prototypes.append(learning.fine_centres(ROWS, 200, place).centroids)
    assert sets[0].shape == sets[1].shape
    np.testing.assert_array_equal(sets[0].indices, sets[1].indices)
    np.testing.assert_array_equal(prototypes[0], prototypes[1])


def test_partitions_find_what_the_whole_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "_EXACT", 1 << 36)
    parted = learning.neighbor_lists(SpreadRows.cut(ROWS), SPACE, np.arange(COUNT))
    monkeypatch.setattr(cluster, "ROWS", COUNT)
    np.testing.assert_array_equal(parted, learning.neighbor_lists(SpreadRows.cut(ROWS), SPACE, np.arange(COUNT)))


def test_zarr_is_read_by_chunks(tmp_path: Path, workers: Any) -> None:
    zarr = pytest.importorskip("zarr")
    group = zarr.create_group(tmp_path / "emb.zarr")
    group.create_array("v", data=ROWS, chunks=(128, DIMENSION))
    group.create_array("key", data=np.arange(COUNT), chunks=(1400,))
    zarr.create_array(tmp_path / "bare.zarr", data=ROWS, chunks=(400, 5))
    for name, ids, first in (("emb.zarr", "key", "0"), ("bare.zarr", None, "bare.zarr:0")):
        file = VectorFile(tmp_path / name, ids=ids)
        assert file.cut()[-1].stop == COUNT
        with Index.create(tmp_path / f"index {name}", dimension=DIMENSION) as index:
            index.add_file(file, cluster=workers)
            np.testing.assert_allclose(index.snapshot().features, ROWS, atol=1e-6)
            assert index.items(index.ids()[:1])[0].external_id == first
    (tmp_path / "empty.zarr").mkdir()
    with pytest.raises(ValueError, match="cannot be read"):
        VectorFile(tmp_path / "empty.zarr").cut()


def test_a_poisoned_partition_is_named_and_nothing_is_made(tmp_path: Path, workers: Any) -> None:
    bad = ROWS.copy()
    bad[1017, 3] = np.nan
    file = VectorFile(write_parquet(tmp_path / "bad.parquet", bad, 100), ids="key")
    words = r"rows 900 to 1,199 of bad.parquet: rows: number 117 must be finite"
    for where in (None, workers):
        with pytest.raises(PartitionError, match=words):
            sync_table(file, tmp_path / "new", cluster=where, **TERMS)
        assert not (tmp_path / "new").exists()
    with Index.create(tmp_path / "old", dimension=DIMENSION) as index:
        index.add_table(ROWS[:5])
        with pytest.raises(PartitionError, match=words):
            index.add_file(file, cluster=workers)
        assert (len(index), index.revision) == (5, 1)
        index.verify()


def test_an_id_that_is_there_twice_in_a_file_changes_nothing(tmp_path: Path) -> None:
    pa, writer = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    keys = [f"k{number % 1399}" for number in range(COUNT)]
    writer.write_table(pa.table({"key": keys, "v": list(ROWS)}), tmp_path / "twice.parquet", row_group_size=100)
    with Index.create(tmp_path / "index", dimension=DIMENSION) as index:
        with pytest.raises(ValueError, match="'k0' is repeated; nothing was changed"):
            index.add_file(VectorFile(tmp_path / "twice.parquet", ids="key"), replace=True)
        assert (len(index), index.revision) == (0, 0)


def write_images(folder: Path, count: int) -> list[Path]:
    files = [folder / f"{number:03}.png" for number in range(count)]
    for number, file in enumerate(files):
        file.write_bytes(saved(picture(8, 8, number), "PNG"))
    return files


def kill(client: Any) -> None:
    """Kill one worker with -9; its nanny starts another."""

    def die() -> None:
        import os

        os.kill(os.getpid(), signal.SIGKILL)

    address = next(iter(client.scheduler_info(n_workers=-1)["workers"]))
    with suppress(OSError):
        client.run(die, workers=[address], on_error="ignore")


class KillingCluster(Cluster):
    """A cluster whose workers are killed, one in each stage."""

    def __init__(self, client: Any, inner: Cluster) -> None:
        self.client, self.inner, self.stages = client, inner, list[str]()

    def place(self, parts: Any) -> Any:
        return self.inner.place(parts)

    def share(self, value: Any) -> Any:
        return self.inner.share(value)

    def map(self, *given: Any, stage: str, **options: Any) -> Iterator[Any]:
        for number, found in enumerate(self.inner.map(*given, stage=stage, **options)):
            if number == 0:
                self.kill_in(stage)
            yield found

    def reduce(self, *given: Any, stage: str, **options: Any) -> Any:
        return self.inner.reduce(*given, stage=stage, **{**options, "tick": lambda _: self.kill_in(stage)})

    def kill_in(self, stage: str) -> None:
        """Kill a worker, once in each stage."""
        if stage not in self.stages:
            self.stages.append(stage)
            kill(self.client)


def test_a_worker_killed_in_every_stage_changes_nothing(workers: Any, tmp_path: Path, parquet: Path) -> None:
    file = VectorFile(parquet, ids="key")
    calm = sync_table(file, tmp_path / "calm", epsilon=4.0, candidates=0.1, code_bytes=64)
    with connect(workers) as inner:
        killing = KillingCluster(workers, inner)
        report = sync_table(file, tmp_path / "index", cluster=killing, epsilon=4.0, candidates=0.1, code_bytes=64)
    assert report.published is not None
    assert calm.published is not None
    assert to_bytes(report.published) == to_bytes(calm.published)
    assert killing.stages == [
        "checking",
        "reading",
        "taking rows",
        "measuring",
        "making codes",
        "taking queries",
        "measuring codes",
        "taking items",
        "making lists",
        "choosing lists",
        "looking for neighbours",
        "learning sets",
        "placing items",
        "taking fingerprints",
    ]


def test_items_deleted_while_a_map_is_learned_are_in_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a large gallery are read as they are needed: what is gone by then is zeros, which nobody is sent."""
    monkeypatch.setattr(store, "_MOST_ROWS", 1)
    with Index.create(tmp_path / "index", dimension=DIMENSION) as index:
        index.add_table(ROWS)
        before = index.snapshot()
        gone = [0, *range(290, 310), 1399]

        class Deleting(Cluster):
            def reduce(self, *given: Any, **options: Any) -> Any:
                if len(index) == COUNT:
                    index.delete(gone)
                return super().reduce(*given, **options)

        published = index.publish(4.0, 0.3, n_sets=2, reach=0.0, cluster=Deleting())
        assert len(published.ids) == COUNT
        assert not before.features[gone].any()
        assert not before.in_memory
        np.testing.assert_array_equal(before.features[1:290], index.features(range(1, 290)))
        release = published.release
        for row in ROWS[:20]:
            message = release.release(row)
            assert not set(index.answer(message).ids.tolist()) & set(gone)


class FailingCluster(KillingCluster):
    """A cluster that fails in the stage of a name."""

    def __init__(self, client: Any, inner: Cluster, failing: str) -> None:
        super().__init__(client, inner)
        self.failing = failing

    def map(self, *given: Any, stage: str, **options: Any) -> Iterator[Any]:
        if stage == self.failing:
            return self.inner.map(stages.die_always, [1, 0], stage=stage)
        return self.inner.map(*given, stage=stage, **options)


def test_nothing_is_half_published(workers: Any, tmp_path: Path) -> None:
    failing = "making codes"  # the last stage
    with Index.create(tmp_path / "index", dimension=DIMENSION) as index, connect(workers) as inner:
        index.add_table(ROWS)
        with pytest.raises(PartitionError, match=rf"^{failing}, partition 1 of 2: every worker that had it died"):
            index.publish(4.0, cluster=FailingCluster(workers, inner, failing), **TERMS)
        with pytest.raises(NotPublishedError):
            index.current()


def test_features_are_made_on_workers_one_of_which_dies(workers: Any, tmp_path: Path) -> None:
    files = write_images(tmp_path, 130)
    files[70].write_bytes(b"broken")
    mark = tmp_path / "mark"
    extractor = DyingExtractor(mark)
    found = gallery_features(files, extractor, cluster=workers)
    assert mark.exists()
    here = gallery_features(files, extractor)
    np.testing.assert_array_equal(found.features, here.features)
    assert found.paths == here.paths
    assert [path for path, _ in found.skipped] == [files[70]]


def test_private_images_stay_on_this_machine(workers: Any, tmp_path: Path) -> None:
    files, extractor = write_images(tmp_path, 3), DyingExtractor(tmp_path)  # which kills nobody
    with pytest.raises(ValueError, match=r"^cluster: features of private images .* on this machine only"):
        gallery_features(files, extractor, row_exact=True, cluster=workers)
    here = cluster._DaskCluster(workers, is_local=True)  # as of `local`
    found = gallery_features(files, extractor, row_exact=True, cluster=here)
    np.testing.assert_array_equal(found.features, gallery_features(files, extractor, row_exact=True).features)


def test_the_full_disk_of_a_worker_is_told(workers: Any, tmp_path: Path) -> None:
    from nearveil.features.gallery import FeatureCache

    files = write_images(tmp_path, 70)
    mark = tmp_path / "mark"
    mark.touch()
    for disk in mounted(tmp_path / "disk", "200k"):
        cache = FeatureCache(disk / "cache")
        fill(disk, 0)
        with pytest.raises(PartitionError, match=r"^making features, files 0 to 63, from .*No space left on device"):
            gallery_features(files, DyingExtractor(mark), cache=cache, cluster=workers)
