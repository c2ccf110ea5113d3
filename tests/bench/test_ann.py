"""The benchmark of public data: files are read as they are, and exact ways find everything."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

BENCH = str(Path(__file__).parents[2] / "bench")
K = 10


@pytest.fixture
def ann(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The script, which starts no process of its own."""
    path, modules = list(sys.path), set(sys.modules)
    sys.path.insert(0, BENCH)
    module = importlib.import_module("ann")
    monkeypatch.setattr(module, "run_apart", lambda work, *arguments, **options: work(*arguments, **options))
    yield module
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(BENCH):
            del sys.modules[name]  # names such as `index` are not those of a package


@pytest.fixture
def data(ann: Any) -> Any:
    return sys.modules["ann_data"]


@pytest.fixture
def rows() -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 128, (40, 6)).astype(np.uint8)


def write_records(path: Path, rows: NDArray[Any], kind: str) -> Path:
    with path.open("wb") as file:
        for row in rows:
            file.write(np.int32(len(row)).tobytes() + row.astype(kind).tobytes())
    return path


def write_matrix(path: Path, rows: NDArray[Any], kind: str) -> Path:
    path.write_bytes(np.array(rows.shape, "<u4").tobytes() + rows.astype(kind).tobytes())
    return path


def write_numpy(path: Path, rows: NDArray[Any], kind: str) -> Path:
    np.save(path, rows.astype(kind)) if path.suffix == ".npy" else np.savez(path, rows=rows.astype(kind))
    return path


WRITERS = {
    ".fvecs": (write_records, "<f4"),
    ".bvecs": (write_records, "u1"),
    ".fbin": (write_matrix, "<f4"),
    ".u8bin": (write_matrix, "u1"),
    ".i8bin": (write_matrix, "i1"),
    ".npy": (write_numpy, "<f2"),
    ".npz": (write_numpy, "<f8"),
}


@pytest.mark.parametrize("suffix", WRITERS)
def test_files_are_read_as_they_are(data: Any, rows: NDArray[Any], tmp_path: Path, suffix: str) -> None:
    write, kind = WRITERS[suffix]
    base, queries = write(tmp_path / f"base{suffix}", rows, kind), write(tmp_path / f"query{suffix}", rows[:5], kind)
    benchmark = data.load([str(base), str(queries)], None, 4, "dot")
    np.testing.assert_array_equal(benchmark.items, rows)
    np.testing.assert_array_equal(benchmark.queries, rows[:4])
    assert (benchmark.metric, benchmark.neighbors) == ("dot", None)


@pytest.mark.parametrize(("suffix", "write"), [(".ivecs", write_records), (".ibin", write_matrix)])
def test_neighbours_are_read(data: Any, rows: NDArray[Any], tmp_path: Path, suffix: str, write: Any) -> None:
    neighbors = np.argsort(np.square(rows[:5, None].astype(int) - rows).sum(axis=2), axis=1)[:, :12]
    files = [
        write_matrix(tmp_path / "base.fbin", rows, "<f4"),
        write_matrix(tmp_path / "query.fbin", rows[:5], "<f4"),
        write(tmp_path / f"truth{suffix}", neighbors, "<i4"),
    ]
    if suffix == ".ibin":  # as big-ann-benchmarks writes it: distances follow
        files[2].write_bytes(files[2].read_bytes() + np.zeros((5, 12), "<f4").tobytes())
    sources = list(map(str, files))
    np.testing.assert_array_equal(data.load(sources, None, 4, "euclidean").neighbors, neighbors[:4, :K])
    assert data.load(sources, 30, 4, "euclidean").neighbors is None  # of fewer items, others are nearest
    write(files[2], neighbors + 30, "<i4")
    with pytest.raises(data.DataError, match="beyond the 40 of the file"):
        data.load(sources, None, 4, "euclidean")


def test_the_layout_of_ann_benchmarks_is_read(data: Any, rows: NDArray[Any], tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    neighbors = np.tile(np.arange(12), (5, 1))
    with h5py.File(tmp_path / "glove.hdf5", "w") as file:
        file["train"], file["test"], file["neighbors"] = rows.astype("<f4"), rows[:5].astype("<f4"), neighbors
        file["distances"] = np.zeros((5, 12))
        file.attrs["distance"] = "angular"
    benchmark = data.load([str(tmp_path / "glove.hdf5")], None, 3, None)
    np.testing.assert_array_equal(benchmark.items[:], rows)
    np.testing.assert_array_equal(benchmark.queries, rows[:3])
    np.testing.assert_array_equal(benchmark.neighbors, neighbors[:3, :K])
    assert benchmark.metric == "cosine"
    assert data.load([str(tmp_path / "glove.hdf5")], None, 3, "dot").neighbors is None  # of another metric
    with h5py.File(tmp_path / "sets.hdf5", "w") as file:
        file["train"], file["test"] = rows, rows
        file.attrs["distance"] = "jaccard"
    with pytest.raises(data.DataError, match="'jaccard'"):
        data.load([str(tmp_path / "sets.hdf5")], None, 3, None)


def test_a_missing_library_is_named(data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)
    (tmp_path / "glove.hdf5").write_bytes(b"")
    with pytest.raises(data.DataError, match=r"needs h5py: pip install h5py"):
        data.load([str(tmp_path / "glove.hdf5")], None, 3, None)


def test_bad_files_are_refused_with_the_reason(data: Any, rows: NDArray[Any], tmp_path: Path) -> None:
    whole = write_records(tmp_path / "base.fvecs", rows, "<f4")
    with pytest.raises(data.DataError, match="add --metric"):
        data.load([str(whole)], None, 5, None)
    with pytest.raises(data.DataError, match="use fewer --queries"):
        data.load([str(whole)], None, 40, "dot")
    whole.write_bytes(whole.read_bytes()[:-1])
    with pytest.raises(data.DataError, match=r"no whole \.fvecs file"):
        data.load([str(whole)], None, 5, "dot")
    short = write_matrix(tmp_path / "base.fbin", rows, "<f4")
    short.write_bytes(short.read_bytes()[:-1])
    with pytest.raises(data.DataError, match=r"no whole \.fbin file: it states 40 x 6"):
        data.load([str(short)], None, 5, "dot")
    with pytest.raises(data.DataError, match="suffix must be one of"):
        data.load([__file__], None, 5, "dot")
    with pytest.raises(FileNotFoundError, match="glove100"):
        data.load([str(tmp_path / "none.fvecs")], None, 5, "dot")


def test_held_out_queries_are_no_items(data: Any, rows: NDArray[Any], tmp_path: Path) -> None:
    benchmark = data.load([str(write_numpy(tmp_path / "base.npy", rows, "<f4"))], 20, 5, "cosine")
    whole = np.concatenate([benchmark.items, benchmark.queries])
    assert (len(benchmark.items), len(benchmark.queries)) == (20, 5)
    np.testing.assert_array_equal(np.unique(whole, axis=0), np.unique(rows[:25], axis=0))


@pytest.mark.parametrize("metric", ["cosine", "dot", "euclidean"])
def test_limits_are_those_of_a_dense_search(ann: Any, metric: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ann, "_BLOCK", 64)
    rng = np.random.default_rng(1)
    items, queries = rng.normal(1, 1, (300, 5)).astype(np.float32), rng.normal(1, 1, (7, 5)).astype(np.float32)
    values = queries.astype(float) @ items.astype(float).T
    if metric == "cosine":
        values /= np.linalg.norm(queries, axis=1)[:, None] * np.linalg.norm(items, axis=1)
    elif metric == "euclidean":
        values = -np.linalg.norm(queries[:, None].astype(float) - items, axis=2)
    limits = ann.find_limits(queries, items, None, metric)
    np.testing.assert_allclose(limits, np.sort(values, axis=1)[:, -K], rtol=1e-6)
    nearest = np.argsort(-values, axis=1)
    assert ann.measure_recall(ann.measure_items(queries, items, nearest[:, :K], metric), limits) == 1
    assert ann.measure_recall(ann.measure_items(queries, items, nearest[:, 3 : K + 3], metric), limits) == 0.7
    nearest[:, 5:] = -1  # fewer answers
    assert ann.measure_recall(ann.measure_items(queries, items, nearest[:, :K], metric), limits) == 0.5


def test_items_that_tie_with_the_tenth_count(ann: Any) -> None:
    items = np.ones((30, 3), np.float32)
    limits = ann.find_limits(items[:1], items, None, "euclidean")
    assert ann.measure_recall(ann.measure_items(items[:1], items, np.arange(15, 25)[None], "euclidean"), limits) == 1


@pytest.mark.parametrize("metric", ["cosine", "dot", "euclidean"])
def test_exact_ways_find_everything(ann: Any, data: Any, metric: str) -> None:
    rng = np.random.default_rng(2)  # a strong mean: the cosine without it has other nearest items
    rows = (rng.normal(size=(420, 8)) + 3 * rng.normal(size=8)).astype(np.float32)
    benchmark = data.Benchmark("toy", metric, rows).select(None, 20, None)
    report = ann.run(benchmark, ("flat", "whole", "messages"), 0.2, 0)
    ways = {record["way"]: record for record in report["ways"]}
    assert ways["FAISS flat"]["recall"] == 1
    assert ways["local copy, whole features"]["recall"] == 1
    assert ways["local copy, whole features"]["bytes_kept"] > 400 * 8 * 4
    assert len({ways[f"message, epsilon {epsilon}"]["bytes_up"] for epsilon in (2, 4, 8)}) == 1
    assert ways["message, epsilon 4"]["bytes_down"] > 80 * 8  # a fifth of the items, a byte for each number at least


def test_a_run_prints_a_table_and_writes_files(
    ann: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [
        "--data",
        "digits",
        "--items",
        "300",
        "--queries",
        "10",
        "--only",
        "flat",
        "hnsw",
        "--out",
        str(tmp_path),
    ]
    monkeypatch.setattr(sys, "argv", ["ann.py", *options])
    ann.main()
    output = capsys.readouterr()
    assert "| FAISS flat |     1.000 |" in output.out
    assert "reading digits" in output.err.splitlines()[0]
    report = json.loads((tmp_path / "ann-digits.json").read_text())
    assert (report["items"], report["metric"], report["ways"][0]["bytes_up"]) == (300, "euclidean", 256)
    monkeypatch.setattr(sys, "argv", ["ann.py", "--draw", str(tmp_path / "ann-digits.json"), "--out", str(tmp_path)])
    ann.main()
    assert (tmp_path / "ann.png").stat().st_size > 5000


def test_absent_data_is_skipped_with_a_reason(
    ann: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NEARVEIL_DATA", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["ann.py", "--data", "glove100", "--out", str(tmp_path)])
    ann.main()
    assert "skipped: no real data at" in capsys.readouterr().out
