"""Estimators, evaluation, hints and studies on a cluster: as in one process."""

import itertools
import operator
import os
import signal
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from nearveil import PrivateKNeighborsClassifier, SupervisedManifold
from nearveil.cluster import Cluster, PartitionError, SpreadRows
from nearveil.mechanisms import Covers
from nearveil.private_knn.neighbors import NeighborSearch
from nearveil.privatemail.graph import gaussian_graph
from nearveil.search import Retriever, evaluate
from tests.gallery.index_places import unit_rows

from . import stages

dask: Any = pytest.importorskip("dask")
da: Any = pytest.importorskip("dask.array", reason="Dask is not installed (the extra `cluster`)")
ROWS = unit_rows(600).astype(np.float64)
QUERIES = unit_rows(40, seed=9).astype(np.float64)


@pytest.fixture
def current(workers: Any) -> Any:
    """The workers as those of the default client."""
    with workers.as_current():
        yield workers


@pytest.mark.parametrize("method", ["series", "exact"])
def test_a_graph_of_blocks_is_that_of_the_whole(current: Any, method: Any) -> None:
    bandwidth = 2.0 if method == "exact" else 6.0
    whole = gaussian_graph(ROWS, bandwidth, method)
    Z = np.random.default_rng(0).normal(size=(600, 2))
    parted = gaussian_graph(da.from_array(ROWS, chunks=(250, 5)), bandwidth, method)
    assert (parted.method, parted.shape, parted.error_bound) == (method, (600, 600), whole.error_bound)
    np.testing.assert_allclose(parted.matmul(Z), whole.matmul(Z), rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(parted.laplacian_matmul(Z), whole.laplacian_matmul(Z), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(parted.interpolate(QUERIES, Z), whole.interpolate(QUERIES, Z), rtol=1e-9, atol=1e-9)


def test_a_manifold_of_blocks_is_that_of_the_whole(current: Any) -> None:
    labels = np.arange(600) % 3
    options: dict[str, Any] = {"bandwidth": 6.0, "n_iter": 5, "random_state": 0, "graph": "series"}
    whole = SupervisedManifold(**options).fit(ROWS, labels)
    parted = SupervisedManifold(**options).fit(da.from_array(ROWS, chunks=(200, 12)), labels)
    np.testing.assert_allclose(parted.embedding_, whole.embedding_, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(parted.transform(QUERIES), whole.transform(QUERIES), rtol=1e-6, atol=1e-8)


def test_blocks_without_workers_are_computed_one_by_one() -> None:
    whole = gaussian_graph(ROWS, 6.0, "series")
    parted = gaussian_graph(da.from_array(ROWS, chunks=(100, 12)), 6.0, "series")
    np.testing.assert_allclose(parted.degree, whole.degree, rtol=1e-10)


def test_what_is_wrong_with_a_dask_array() -> None:
    bad = ROWS.copy()
    bad[450, 3] = np.nan
    with pytest.raises(PartitionError, match=r"partition 5 of 6: .*first in row 50"):
        _ = gaussian_graph(da.from_array(bad, chunks=(100, 12)), 6.0, "series").degree
    with pytest.raises(ValueError, match="floating-point"):
        gaussian_graph(da.from_array(np.eye(3, dtype=int)), 6.0)
    unknown = da.from_array(ROWS, chunks=(100, 12))
    with pytest.raises(ValueError, match="compute_chunk_sizes"):
        gaussian_graph(unknown[unknown[:, 0] > 0], 6.0)
    with pytest.raises(PartitionError, match=r"^checking private records, partition 5 of 6: rows must be finite"):
        NeighborSearch(da.from_array(bad, chunks=(100, 12)))


@pytest.mark.parametrize("chunk", [600, 130])
def test_private_neighbours_are_the_same_ties_and_all(current: Any, chunk: int) -> None:
    rows = np.concatenate([ROWS[:300], ROWS[:300]])  # every record twice: ties everywhere
    there, here = NeighborSearch(da.from_array(rows, chunks=(chunk, 12))), NeighborSearch(rows)
    for length in (1, 7, 600, 900):
        np.testing.assert_array_equal(there.nearest(QUERIES, length), here.nearest(QUERIES, length))


def test_private_rows_that_change_after_fit_are_noticed(tmp_path: Path) -> None:
    """Labels belong to the rows of the beginning: others, or rows in another order, are not searched."""
    place = tmp_path / "rows.npy"
    np.save(place, ROWS)
    read = dask.delayed(lambda start: np.load(place)[start : start + 150])
    blocks = [da.from_delayed(read(start), (150, 12), ROWS.dtype) for start in range(0, 600, 150)]
    search = NeighborSearch(da.concatenate(blocks))
    found = search.nearest(QUERIES, 5)
    rows = ROWS.copy()
    rows[[160, 161]] = rows[[161, 160]]
    np.save(place, rows)
    with pytest.raises(PartitionError, match=r"partition 2 of 4: the rows of this block have changed since fit"):
        search.nearest(QUERIES, 5)
    np.save(place, ROWS)
    np.testing.assert_array_equal(search.nearest(QUERIES, 5), found)


class NoScores(Cluster):
    """A cluster that looks at what comes back."""

    seen: ClassVar[list[Any]] = []

    def reduce(self, *given: Any, **options: Any) -> Any:
        self.seen.append(super().reduce(*given, **options))
        return self.seen[-1]


def test_row_numbers_alone_come_back_from_private_records() -> None:
    search = NeighborSearch(da.from_array(ROWS, chunks=(150, 12)))
    search._engine._rows = replace(search._engine._rows, cluster=NoScores())  # type: ignore[union-attr]
    search.nearest(QUERIES, 5)
    assert [(one.dtype, one.shape) for one in NoScores.seen] == [(np.int32, (len(QUERIES), 5))]


def scatter_blocks(client: Any, places: list[str]) -> Any:
    """Return the rows as a Dask array whose blocks lie on these workers."""
    size = len(ROWS) // len(places)
    held = [
        client.scatter(ROWS[number * size : (number + 1) * size], workers=[place], hash=False)
        for number, place in enumerate(places)
    ]
    return da.concatenate([da.from_delayed(dask.delayed(one), (size, 12), ROWS.dtype) for one in held])


@contextmanager
def nothing_received(client: Any, size: int) -> Iterator[None]:
    """Check that workers get nothing of so many bytes from each other."""

    def list_received() -> set[Any]:
        logs = client.run(lambda dask_worker: [one["keys"] for one in dask_worker.transfer_incoming_log])
        return {key for log in logs.values() for keys in log for key, length in keys.items() if length >= size}

    before = list_received()
    yield
    assert list_received() == before


def test_private_rows_stay_on_the_worker_that_holds_them(current: Any) -> None:
    current.wait_for_workers(2, timeout=60)
    places = sorted(current.nthreads())
    rows = scatter_blocks(current, places * 12)  # so many that a worker would do several of them in a run
    with nothing_received(current, ROWS.nbytes // 24):
        found = NeighborSearch(rows).nearest(QUERIES[:2], 5)
    np.testing.assert_array_equal(found, NeighborSearch(ROWS).nearest(QUERIES[:2], 5))
    rows = scatter_blocks(current, places[:1] * 24)  # the other worker is idle, and takes nothing
    looked = SpreadRows.of(rows, private=True).reduce(stages.tell_place, operator.or_, stage="looking")
    assert looked == set(places[:1])


def test_private_rows_in_pieces_on_several_workers_are_refused(current: Any) -> None:
    current.wait_for_workers(2, timeout=60)
    rows = scatter_blocks(current, sorted(current.nthreads())).rechunk((400, 12))
    words = r"^checking private records, partition 1 of 2: its pieces are on several workers"
    with nothing_received(current, 100 * ROWS[0].nbytes), pytest.raises(PartitionError, match=words):
        NeighborSearch(rows)


def test_private_rows_are_found_again_or_missed_when_their_worker_dies(current: Any) -> None:
    current.wait_for_workers(2, timeout=60)
    place = min(current.nthreads())
    lost = scatter_blocks(current, [place] * 4)
    made = da.from_array(ROWS, chunks=(100, 12)).persist()
    searches = NeighborSearch(lost), NeighborSearch(made)
    os.kill(current.run(os.getpid, workers=[place])[place], signal.SIGKILL)
    while place in current.nthreads():
        time.sleep(0.02)
    np.testing.assert_array_equal(searches[1].nearest(QUERIES, 5), NeighborSearch(ROWS).nearest(QUERIES, 5))
    with pytest.raises(PartitionError, match=r"partition 1 of 4: the worker that held its rows is gone: load them"):
        searches[0].nearest(QUERIES, 5)


def read_blocks(place: Path) -> Any:
    read = dask.delayed(stages.read_rows)
    return da.concatenate([da.from_delayed(read(str(place), at), (150, 12), ROWS.dtype) for at in range(0, 600, 150)])


def test_private_blocks_are_read_anew_and_held_by_nobody(current: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", ROWS)
    before = {key for keys in current.has_what().values() for key in keys}
    search = NeighborSearch(read_blocks(tmp_path / "rows.npy"))
    for _ in range(2):
        search.nearest(QUERIES, 5)
    assert (tmp_path / "rows.npy.read").read_text() == 12 * "x"
    until = time.monotonic() + 20
    while {key for keys in current.has_what().values() for key in keys} - before:
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.parametrize("where", ["here", "there"])
def test_an_error_of_a_block_names_it_and_nothing_of_its_rows(where: str, request: Any, tmp_path: Path) -> None:
    if where == "there":
        request.getfixturevalue("current")

    def make(rows: Any, kind: str) -> Any:
        return NeighborSearch(rows) if kind == "private" else gaussian_graph(rows, 6.0, "series")

    missing = read_blocks(tmp_path / "rows.npy")
    words = r"partition 1 of 4: it cannot be computed \(FileNotFoundError\); compute this"
    graph = make(missing, "graph")
    with pytest.raises(PartitionError, match=rf"^checking private records, {words}"):
        make(missing, "private")
    with pytest.raises(PartitionError, match=rf"^collecting moments, {words}"):
        _ = graph.degree
    for error, kind in itertools.product((ValueError, ImportError, OSError), ("private", "graph")):
        bad = da.from_delayed(dask.delayed(stages.quote_rows)(error), (300, 12), ROWS.dtype)
        words = rf"partition 2 of 2: it cannot be computed \({error.__name__}\); compute this"
        with pytest.raises(PartitionError, match=words) as raised:
            _ = make(da.concatenate([da.from_array(ROWS[:300], chunks=(300, 12)), bad]), kind).degree
        assert "Smith" not in "".join(traceback.format_exception(raised.value))
    np.save(tmp_path / "rows.npy", ROWS)
    np.testing.assert_allclose(graph.degree, gaussian_graph(ROWS, 6.0, "series").degree, rtol=1e-10)


@pytest.mark.parametrize("worker", ["tcp://127.0.0.1:9", "tcp://198.51.100.7:9"])
def test_private_rows_go_to_no_worker_in_the_clear(monkeypatch: pytest.MonkeyPatch, worker: str) -> None:
    here, there = "tcp://127.0.0.1:8786", "tcp://scheduler:8786"
    client = SimpleNamespace(scheduler=SimpleNamespace(address=here if "198" in worker else there))
    client.nthreads, client.sync = (lambda: {worker: 1}), (lambda function, **_: function())
    monkeypatch.setattr("distributed.default_client", lambda: client)
    with pytest.raises(ValueError, match="tcp:// to another machine is not encrypted, and these rows are private"):
        NeighborSearch(da.from_array(ROWS, chunks=(150, 12)))


def test_private_knn_votes_where_records_lie(current: Any) -> None:
    labels = (ROWS[:, 0] > 0).astype(int)
    options: dict[str, Any] = {"epsilon": 10.0, "delta": 1e-6, "max_answered": 10, "n_neighbors": 20}
    votes = PrivateKNeighborsClassifier(**options).fit(da.from_array(ROWS, chunks=(150, 12)), labels)
    assert votes.n_features_in_ == 12
    found = votes.predict(QUERIES[:10])
    assert set(found.tolist()) <= {0, 1, -1}
    with pytest.raises(ValueError, match="inconsistent"):
        PrivateKNeighborsClassifier(**options).fit(da.from_array(ROWS, chunks=(150, 12)), labels[:-1])


def test_evaluation_is_the_same(workers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from nearveil.privacy.noise import unsafe_seeded
    from nearveil.search import evaluation

    monkeypatch.setattr(evaluation, "_CELLS", 1 << 15)
    retriever = Retriever(Covers(4.0, 0.1, n_sets=4)).fit(ROWS).index(ROWS)
    found = [evaluate(retriever, QUERIES, rng=unsafe_seeded(3), cluster=where) for where in (None, workers)]
    assert found[0] == found[1]


def test_hints_are_the_same(workers: Any) -> None:
    from nearveil.sealed import SealedIndex

    made = []
    for where in (None, workers):
        index = SealedIndex.build(ROWS, seed=b"s" * 32, n_cells=9, n_colours=3, n_secrets=2)
        index.prepare_tokens(cluster=where)
        made.append(index.get_public_tokens())
    assert made[0] == made[1]


def test_cases_of_a_study_are_tasks(workers: Any, tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    from studies._study import Study, run

    from . import cases

    def study() -> Study:
        return Study("squares", cases.list_cases, cases.measure, figures=lambda _: {}, facts=lambda _: {}, template="#")

    there, here = run(study(), tmp_path / "there", cluster=workers), run(study(), tmp_path / "here", jobs=1)
    assert there.rows == here.rows == [{"x": x, "square": x * x} for x in range(5)]
