"""The order of neighbours: exact, total, and the same whatever computes it."""

import importlib.util
import pickle
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from threadpoolctl import threadpool_info, threadpool_limits

from nearveil.private_knn import neighbors
from nearveil.private_knn.neighbors import LONGEST, MOST_FEATURES, IntegerRows, NeighborSearch

ENGINES = ("numpy", "torch")
everywhere = pytest.mark.parametrize("engine", ENGINES)


@pytest.fixture(autouse=True)
def _needs(request: pytest.FixtureRequest) -> None:
    params = getattr(request.node, "callspec", None)
    if params and params.params.get("engine") == "torch":
        pytest.importorskip("torch", reason="torch is not installed (the extra `torch`)")


def make_search(rows: Any, engine: str, feature_norm: float | None = None) -> NeighborSearch:
    """Return a search with NumPy, or with the engine of CUDA devices on the CPU."""
    search = NeighborSearch(rows, feature_norm=feature_norm, engine="numpy")
    if engine == "torch":
        table = neighbors._make_table(np.asarray(rows), search._integers)
        search._engine = neighbors._TorchEngine(table, "cpu")
    return search


def brute_force(rows: Any, queries: Any, length: int, feature_norm: float | None = None) -> list[list[int]]:
    """Sort by (squared distance, row number) in Python's own integers."""
    rounding = IntegerRows(rows.shape[1], feature_norm)
    private, asked = rounding.round(rows).tolist(), rounding.round(queries).tolist()
    return [
        sorted(range(len(private)), key=lambda j: (sum((a - b) ** 2 for a, b in zip(x, private[j], strict=True)), j))[
            :length
        ]
        for x in asked
    ]


def cloud(n: int, d: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal((n, d)) + 1


# What is found.


@everywhere
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_the_order_is_that_of_python_integers(engine: Any, data: st.DataObject) -> None:
    n, d, length = (data.draw(st.integers(1, m)) for m in (60, 4, 70))
    few = st.sampled_from([-1.0, 0.0, 0.5, 1.0])  # a grid of few points: most distances are tied
    values = data.draw(st.sampled_from([few, st.floats(-2, 2, width=32)]))
    rows, queries = (data.draw(arrays(np.float64, (m, d), elements=values)) for m in (n, 3))
    norm = data.draw(st.sampled_from([None, 0.7, 3.0]))
    found = make_search(rows, engine, norm).nearest(queries, length)
    assert found.dtype == np.int32
    assert found.tolist() == brute_force(rows, queries, length, norm)


@everywhere
@pytest.mark.parametrize("length", [1, 100, 2999, 3000, 5000])
def test_rows_that_are_all_the_same_come_by_number(engine: Any, length: int) -> None:
    rows = np.tile([[0.6, 0.8, 0.1]], (3000, 1))
    found = make_search(rows, engine).nearest(np.vstack([rows[:2], [[1, 0, 0]]]), length)
    assert (found == np.arange(min(length, 3000))).all()
    assert found.shape == (3, min(length, 3000))


@everywhere
def test_ties_across_the_border_are_broken_by_number(engine: Any) -> None:
    corners = np.random.default_rng(1).choice([-1.0, 1.0], (4000, 5))  # 32 places for 4,000 records
    search = make_search(corners, engine)
    queries = cloud(20, 5)
    integers = [IntegerRows(5).round(part).astype(int) for part in (queries, corners)]
    distances = ((integers[0][:, None] - integers[1]) ** 2).sum(axis=2)
    for length in (1, 90, 125, 126, 2000):
        assert np.array_equal(search.nearest(queries, length), np.argsort(distances, axis=1, kind="stable")[:, :length])


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_no_sample_misleads_the_selection(data: st.DataObject) -> None:
    m, n = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 120))
    low, high = sorted(data.draw(st.tuples(*2 * [st.integers(-3 * LONGEST**2, LONGEST**2)])))
    scores = data.draw(arrays(np.int64, (m, n), elements=st.integers(low, high)))
    length = data.draw(st.integers(1, n))
    # The worst sample sees the nearest records alone and guesses a threshold far too high.
    order = np.argsort(-scores, axis=1, kind="stable")
    sample = np.sort(data.draw(st.sampled_from([order[0, : data.draw(st.integers(1, n))], np.arange(n)])))
    assert np.array_equal(neighbors._find_largest(scores.astype(np.float32), length, sample), order[:, :length])


def test_a_guess_that_fails_for_one_query_alone_is_mended() -> None:
    rng = np.random.default_rng(0)
    scores = np.stack([rng.permutation(2000), rng.permutation(2000)])
    sample = np.sort(np.argsort(-scores[0])[:100])  # the nearest of the first query: its guess is far too high
    assert (scores[0] >= neighbors._guess_thresholds(scores[:1].astype(np.float32), 200, sample)).sum() < 200
    found = neighbors._find_largest(scores.astype(np.float32), 200, sample)
    assert np.array_equal(found, np.argsort(-scores, axis=1)[:, :200])


def test_as_many_rows_as_fit_into_a_key_are_selected_at_once() -> None:
    scores = np.random.default_rng(0).integers(-3 * LONGEST**2, LONGEST**2 + 1, (128, 500))
    scores[5:9, ::3] = scores[5:9, :1]
    found = neighbors._find_largest(scores.astype(np.float32), 333, np.arange(500))
    assert np.array_equal(found, np.argsort(-scores, axis=1, kind="stable")[:, :333])


def test_the_order_is_that_of_true_distances_where_rounding_cannot_blur_it() -> None:
    rows, queries = cloud(800, 24), cloud(10, 24, seed=1)
    unit = [part / np.linalg.norm(part, axis=1, keepdims=True) for part in (rows, queries)]
    distances = np.linalg.norm(unit[1][:, None] - unit[0], axis=2)
    found = np.take_along_axis(distances, NeighborSearch(rows).nearest(queries, 800), axis=1)
    # Each of two rows is off by sqrt(24) / 2 steps of 1 / 2361, and a comparison has two distances.
    assert np.diff(found, axis=1).min() > -4 * np.sqrt(24) / 2 / 2361
    rank_of_truth = np.abs(np.sort(distances, axis=1) - found).max()
    assert rank_of_truth < 2 * np.sqrt(24) / 2361


# What changes nothing.


@pytest.fixture(scope="module")
def rows() -> Any:
    return cloud(4000, 63)  # 64 columns with that of the norms: a GPU shortens numbers only in aligned products


@pytest.fixture(scope="module")
def queries() -> Any:
    return cloud(150, 63, seed=1)


@pytest.fixture(scope="module")
def truth(rows: Any, queries: Any) -> Any:
    rounding = IntegerRows(63)
    x, y = rounding.round(queries).astype(np.int64), rounding.round(rows).astype(np.int64)
    distances = (x**2).sum(axis=1)[:, None] + (y**2).sum(axis=1) - 2 * x @ y.T
    return np.argsort(distances, axis=1, kind="stable")[:, :700]


@everywhere
@pytest.mark.parametrize("size", [1, 7, 64])
def test_batching_changes_nothing(engine: Any, size: int, rows: Any, queries: Any, truth: Any) -> None:
    search = make_search(rows, engine)
    pieces = [search.nearest(queries[start : start + size], 700) for start in range(0, len(queries), size)]
    assert np.array_equal(np.vstack(pieces), truth)


@everywhere
def test_memory_is_bounded_by_smaller_batches(
    engine: Any, rows: Any, queries: Any, truth: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbors, "SCORE_BYTES", 4 * len(rows) * 8)
    batches = list(make_search(rows, engine).batches(queries, 700))
    assert [part.start for part, _ in batches] == list(range(0, 150, 8))
    assert batches[-1][0].stop == 150
    assert np.array_equal(np.vstack([ids for _, ids in batches]), truth)


@everywhere
@pytest.mark.parametrize("threads", [1, 2])
def test_threads_change_nothing(engine: Any, threads: int, rows: Any, queries: Any, truth: Any) -> None:
    search = make_search(rows, engine)
    with threadpool_limits(threads):  # BLAS, and the OpenMP of torch
        assert np.array_equal(search.nearest(queries, 700), truth)
    if engine == "torch":
        torch = sys.modules["torch"]
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            assert np.array_equal(search.nearest(queries, 700), truth)
        finally:
            torch.set_num_threads(before)


def test_searches_at_the_same_time_leave_thread_limits_alone(rows: Any, queries: Any, truth: Any) -> None:
    def limits() -> list[int]:
        return [library["num_threads"] for library in threadpool_info()]

    search, before = NeighborSearch(rows, engine="numpy"), limits()
    for _ in range(6):  # two that overlap may still end in an order that does no harm
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda _: search.nearest(queries[:20], 700), range(8)))
        assert all(np.array_equal(ids, truth[:20]) for ids in found)
        assert limits() == before


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "Fortran": np.asfortranarray,
    "backwards": lambda array: np.ascontiguousarray(array[::-1, ::-1])[::-1, ::-1],
    "strided": lambda array: np.repeat(array, 2, axis=1)[:, ::2],
    "list": lambda array: array.tolist(),
}


@everywhere
@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_layout_changes_nothing(engine: Any, layout: str, rows: Any, queries: Any, truth: Any) -> None:
    search = make_search(LAYOUTS[layout](rows), engine)
    assert np.array_equal(search.nearest(LAYOUTS[layout](queries), 700), truth)


@everywhere
def test_order_of_queries_and_type_of_numbers_change_nothing(engine: Any, rows: Any, queries: Any) -> None:
    narrow = rows.astype(np.float32), queries.astype(np.float32)
    search = make_search(narrow[0], engine)
    found = search.nearest(narrow[1], 300)
    order = np.random.default_rng(0).permutation(len(queries))
    assert np.array_equal(search.nearest(narrow[1][order], 300), found[order])
    wide = make_search(narrow[0].astype(np.float64), engine)
    assert np.array_equal(wide.nearest(narrow[1].astype(np.longdouble), 300), found)


@pytest.mark.parametrize("factor", [2.0**900, 2.0**-900])
def test_a_common_factor_changes_nothing(factor: float, rows: Any, queries: Any, truth: Any) -> None:
    assert np.array_equal(NeighborSearch(rows * factor).nearest(queries / factor, 700), truth)


def test_a_record_more_leaves_the_order_of_the_others(rows: Any, queries: Any) -> None:
    search = NeighborSearch(rows)
    more = NeighborSearch(np.insert(rows, 1234, queries[0], axis=0))
    found = more.nearest(queries, 301)
    for old, new in zip(search.nearest(queries, 300), found, strict=True):
        others = new[new != 1234]
        assert np.array_equal((others - (others > 1234))[: len(new) - 1], old[: len(new) - 1])


def test_reduced_precision_of_torch_changes_nothing(rows: Any, queries: Any, truth: Any) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed (the extra `torch`)")
    search, before = make_search(rows, "torch"), torch.get_float32_matmul_precision()
    try:
        for precision in ("highest", "high", "medium"):
            torch.set_float32_matmul_precision(precision)
            assert np.array_equal(search.nearest(queries, 700), truth)
            assert torch.get_float32_matmul_precision() == precision
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert np.array_equal(search.nearest(queries, 700), truth)
            assert torch.is_autocast_enabled("cpu")
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_product_in_fewer_bits_is_refused(rows: Any, queries: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed (the extra `torch`)")
    search = make_search(rows, "torch")
    monkeypatch.setattr(neighbors, "_keep_float32", lambda _: nullcontext())
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(RuntimeError, match="less exact than float32"):
        search.nearest(queries, 700)


def test_cuda_changes_nothing(rows: Any, queries: Any, truth: Any) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed (the extra `torch`)")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    search, before = NeighborSearch(rows, engine="cuda"), torch.get_float32_matmul_precision()
    corners = np.random.default_rng(1).choice([-1.0, 1.0], (4000, 5))
    tied = NeighborSearch(corners, engine="numpy").nearest(cloud(20, 5), 126)
    assert np.array_equal(NeighborSearch(corners, engine="cuda").nearest(cloud(20, 5), 126), tied)
    try:
        for precision in ("highest", "high", "medium"):
            torch.set_float32_matmul_precision(precision)
            assert np.array_equal(search.nearest(queries, 700), truth)
            assert np.array_equal(search.nearest(queries[:1], 700), truth[:1])
    finally:
        torch.set_float32_matmul_precision(before)


def test_plain_float32_distances_do_change_with_batching(rows: Any, queries: Any) -> None:
    plain, rounding = (rows.astype(np.float32), queries[:64].astype(np.float32)), IntegerRows(63)
    whole = [part.astype(np.float32) for part in (rounding.round(rows), rounding.round(queries[:64]))]
    changed = []
    for private, asked in (plain, whole):
        single = np.vstack([asked[i : i + 1] @ private.T for i in range(64)])
        changed.append(np.mean(single != asked @ private.T))
    assert changed[1] == 0
    if changed[0] == 0:
        pytest.skip("products on this machine do not change with batching")
    assert changed[0] > 0.01


def test_a_pickle_searches_alike(rows: Any, queries: Any, truth: Any) -> None:
    again = pickle.loads(pickle.dumps(NeighborSearch(rows)))  # noqa: S301
    assert np.array_equal(again.nearest(queries, 700), truth)


# Rounding.

anything = st.floats(allow_nan=False, allow_infinity=False)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_row_is_rounded_by_itself(data: st.DataObject) -> None:
    d = data.draw(st.sampled_from([1, 2, 7, 33, 130]))
    row, *others = (data.draw(arrays(np.float64, d, elements=anything)) for _ in range(3))
    rounding = IntegerRows(d, data.draw(st.sampled_from([None, 1e-300, 1.0, 1e300])))
    alone = rounding.round(row[None])
    assert np.array_equal(rounding.round([others[0], row, others[1]])[1:2], alone)
    wide = np.zeros((d, 3))
    wide[:, 1] = row
    assert np.array_equal(rounding.round(wide.T)[1:2], alone)
    assert np.array_equal(rounding.round(np.tile(row, (40, 1)))[-1:], alone)


def test_long_rows_are_rounded_by_themselves() -> None:
    rows = cloud(600, 3001)  # more than one chunk, and sums that pair differently in each layout
    rounding = IntegerRows(3001)
    together = rounding.round(rows)
    assert np.array_equal(together, np.vstack([rounding.round(row[None]) for row in rows]))
    assert np.array_equal(together, rounding.round(np.asfortranarray(rows)))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_rounded_row_is_too_long(data: st.DataObject) -> None:
    assert 3 * (LONGEST + 0.8) ** 2 < 2**24
    d = data.draw(st.sampled_from([1, 2, 3, 324, 4097]))
    norm = data.draw(st.sampled_from([None, 1.0, 1e-310, 1e300]))
    pattern = data.draw(arrays(np.float64, min(d, 5), elements=anything))
    row = np.resize(pattern, d)
    rounded = IntegerRows(d, norm).round(row[None]).astype(np.int64)
    assert (rounded**2).sum() <= LONGEST**2


def test_no_rounded_row_is_too_long_where_all_coordinates_are_rounded_up() -> None:
    assert 3 * LONGEST**2 < 2**24
    for d in (4, 1000, 2**16, MOST_FEATURES):
        radius = LONGEST - np.sqrt(d) / 2
        # One coordinate takes what the others leave, which all lie just above one half.
        half = np.full(d, 0.5 + 1e-3)
        half[0] = np.sqrt(max(1, radius**2 - half[1:] @ half[1:]))
        squares = (IntegerRows(d).round(half[None]).astype(np.int64) ** 2).sum()
        assert (radius - np.sqrt(d) / 2) ** 2 <= squares <= LONGEST**2


def test_every_partial_sum_is_exact() -> None:
    rng = np.random.default_rng(3)
    direction = rng.standard_normal(700)
    x, y = (IntegerRows(700).round(row[None])[0].astype(np.int64) for row in (direction, -direction))
    for _ in range(50):
        terms = rng.permutation(np.append(2 * x * y, -(y @ y)))  # opposite rows: the longest sums there are
        exact = np.cumsum(terms)
        assert np.abs(exact).max() < 2**24
        assert np.array_equal(np.cumsum(terms.astype(np.float32), dtype=np.float32), exact)


def test_rows_keep_their_direction_and_length() -> None:
    rows = cloud(50, 20)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    radius = LONGEST - np.sqrt(20) / 2
    assert np.abs(IntegerRows(20).round(rows) - radius * rows / lengths).max() < 0.52
    assert lengths.min() < 6 < lengths.max()
    clipped = rows / np.maximum(lengths / 6, 1)
    assert np.abs(IntegerRows(20, 6.0).round(rows) - radius * clipped / 6).max() < 0.52


@pytest.mark.parametrize("size", [1e300, 1.7e308, 1.0, 1e-300, 1e-320])
def test_rows_of_any_magnitude_are_rounded_alike(size: float) -> None:
    with np.errstate(all="raise"):
        row = IntegerRows(3).round([[0.0, size, -size]])[0]
    assert row.tolist() == [0, 1671, -1671]


def test_zero_rows_stay_zero_and_tiny_ones_vanish_below_a_bound() -> None:
    assert IntegerRows(4).round(np.zeros((2, 4))).tolist() == [[0] * 4] * 2
    assert IntegerRows(2, 1.0).round([[1e-320, 0.0], [0.0, 5e-324], [1.0, 0]]).tolist() == [[0, 0], [0, 0], [2363, 0]]


# What is refused, and what is empty.


def test_empty_sets() -> None:
    for engine in ("numpy", "auto"):
        search = NeighborSearch(np.empty((0, 3)), engine=engine)
        assert search.nearest(np.ones((4, 3)), 5).shape == (4, 0)
        assert NeighborSearch(np.ones((4, 3)), engine=engine).nearest(np.empty((0, 3)), 5).shape == (0, 4)


SECRET = 123.456


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([SECRET, 1.0], "shape"),
        (np.full((2, 2, 2), SECRET), "shape"),
        ([[SECRET, np.nan]], "finite"),
        ([[SECRET, -np.inf]], "finite"),
        (np.array([[np.longdouble("1e4000")]]), "finite"),
        ([["a", "b"]], "real numbers"),
        ([[SECRET + 1j]], "real numbers"),
        (np.array([[SECRET, None]]), "real numbers"),
        (np.empty((3, 0)), "features"),
        (np.empty((0, MOST_FEATURES + 1)), "features"),
    ],
)
def test_rows_that_are_none_are_refused_without_their_values(rows: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        NeighborSearch(rows)
    assert "123" not in str(refused.value)


def test_queries_that_fit_nothing_are_refused() -> None:
    search = NeighborSearch(np.eye(3))
    with pytest.raises(ValueError, match=r"queries must have shape \(n, 3\)"):
        search.nearest(np.eye(4), 2)
    with pytest.raises(ValueError, match="queries must be finite"):
        search.nearest([[1.0, np.nan, 0]], 2)


@pytest.mark.parametrize("norm", [0.0, -1.0, np.nan, np.inf])
def test_a_norm_that_is_none_is_refused(norm: float) -> None:
    with pytest.raises(ValueError, match="feature_norm"):
        NeighborSearch(np.eye(3), feature_norm=norm)


def test_engines_that_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="engine must be one of"):
        NeighborSearch(np.eye(3), engine="gpu")  # type: ignore[arg-type]
    torch = pytest.importorskip("torch", reason="torch is not installed (the extra `torch`)")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert NeighborSearch(np.eye(3)).engine == "numpy"
    with pytest.raises(ValueError, match="no CUDA device"):
        NeighborSearch(np.eye(3), engine="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert neighbors._choose_engine("auto") == "cuda"
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert NeighborSearch(np.eye(3)).engine == "numpy"
    with pytest.raises(ValueError, match=r"nearveil\[torch\]"):
        NeighborSearch(np.eye(3), engine="cuda")
