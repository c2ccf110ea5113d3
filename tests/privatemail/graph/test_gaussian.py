"""The Gaussian graphs against dense references: numbers, not shapes."""

import pickle
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearveil.privatemail.graph import gaussian, gaussian_graph, series
from studies.baselines import neighbors_graph
from studies.data import FeatureSet
from tests.reference import dense_weights, laplacian, unit_rows

Convert = Callable[[Any], Any]


def build(X: Any, bandwidth: float, method: Any, n_neighbors: int = 15, **options: Any) -> Any:
    """Build a graph by any method, "neighbors" included."""
    if method == "neighbors":
        return neighbors_graph(X, bandwidth, n_neighbors)
    return gaussian_graph(X, bandwidth, method, **options)


ROUNDING: dict[Any, float] = {np.float64: 1e-13, np.float32: 2e-6}


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("bandwidth", [20.0, 6.0, 1.0, 0.2])
@pytest.mark.parametrize("n", [2, 3, 511, 512, 513, 1100])
def test_exact_equals_dense(convert: Convert, dtype: type, bandwidth: float, n: int) -> None:
    X, Z = unit_rows(n, 5).astype(dtype), unit_rows(n, 3, seed=1).astype(dtype)
    weights = dense_weights(X.astype(np.float64), bandwidth)
    graph = gaussian_graph(convert(X), bandwidth, method="exact")
    rtol = ROUNDING[dtype] * max(1, bandwidth**-2)
    np.testing.assert_allclose(graph.degree, weights.sum(axis=1), rtol=rtol)
    scale = weights @ np.abs(Z)
    assert np.max(np.abs(np.asarray(graph.matmul(convert(Z))) - weights @ Z) / scale) < rtol
    scale = laplacian(weights).diagonal()[:, None]
    assert np.max(np.abs(np.asarray(graph.laplacian_matmul(convert(Z))) - laplacian(weights) @ Z) / scale) < rtol
    assert graph.error_bound == 0
    assert graph.method == "exact"
    assert np.asarray(graph.matmul(convert(Z))).dtype == dtype


@pytest.mark.parametrize("cores", [1, 2, 3, 16])
def test_tiles_and_threads_change_nothing(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    X, Z = unit_rows(103, 4), unit_rows(103, 2, seed=1)
    weights = dense_weights(X, 0.7)
    monkeypatch.setattr(gaussian, "HOST_TILE", 7)
    monkeypatch.setattr("joblib.cpu_count", lambda: cores)
    graph = gaussian_graph(X, 0.7, method="exact")
    np.testing.assert_allclose(graph.matmul(Z), weights @ Z, atol=1e-13)
    np.testing.assert_allclose(graph.interpolate(X, Z), (weights + np.eye(103)) @ Z / (weights.sum(1) + 1)[:, None])


def test_exact_on_a_device_uses_the_same_tiles() -> None:
    X, Z = unit_rows(50, 4), unit_rows(50, 2, seed=1)
    total = gaussian._multiply_symmetric(X, Z, 1.0, tile=8)
    np.testing.assert_allclose(total, dense_weights(X, 1.0) @ Z, atol=1e-14)


def test_tiny_degrees_keep_their_digits() -> None:
    """A subtracted self-term would leave nothing of a degree of 1e-17; a masked one leaves all of it."""
    X = np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    bandwidth = 0.16
    weights = dense_weights(X, bandwidth)
    assert weights.sum(axis=1).max() < 1e-16
    graph = gaussian_graph(X, bandwidth, method="exact")
    np.testing.assert_allclose(graph.degree, weights.sum(axis=1), rtol=1e-12)


@pytest.mark.parametrize("bandwidth", [0.2, 0.1, 0.01])
@pytest.mark.parametrize("method", ["exact", "neighbors"])
def test_float32_rows_meet_the_tolerance_at_small_bandwidths(convert: Convert, method: Any, bandwidth: float) -> None:
    """There the rounding of a 32-bit inner product, times 1 / bandwidth^2, would exceed it."""
    rng = np.random.default_rng(0)
    X = np.repeat(unit_rows(60, 7), 2, axis=0) + 0.3 * bandwidth * rng.normal(size=(120, 7))
    X = (X / np.linalg.norm(X, axis=1, keepdims=True)).astype(np.float32)
    exact = X.astype(np.float64) / np.linalg.norm(X.astype(np.float64), axis=1, keepdims=True)
    graph = build(convert(X), bandwidth, method=method, n_neighbors=119)
    assert np.asarray(graph.degree).dtype == np.float32
    np.testing.assert_allclose(graph.degree, dense_weights(exact, bandwidth).sum(axis=1), rtol=1e-6)


def test_a_sum_over_many_rows_keeps_its_digits_in_float32(convert: Convert) -> None:
    """Rows with a common direction: nothing cancels, so a 32-bit running sum would lose three digits."""
    rng = np.random.default_rng(0)
    X = (0.05 * rng.normal(size=(300_000, 8)) + np.eye(8)[0]).astype(np.float32)
    X /= np.linalg.norm(X, axis=1, keepdims=True)
    graph = gaussian_graph(convert(X), 6.0, method="series")
    sample = X[:20].astype(np.float64)
    expected = np.exp((sample @ X.T.astype(np.float64) - 1) / 36).sum(axis=1) - 1
    np.testing.assert_allclose(np.asarray(graph.degree)[:20], expected, rtol=graph.error_bound + 4e-7)


def test_an_exact_sum_over_many_tiles_keeps_its_digits_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gaussian, "HOST_TILE", 16)
    X = np.repeat(unit_rows(2, 3), 3000, axis=0).astype(np.float32)
    graph = gaussian_graph(X, 6.0, method="exact")
    weight = np.exp((float(X[0].astype(float) @ X[-1].astype(float)) - 1) / 36)
    np.testing.assert_allclose(graph.degree, 2999 + 3000 * weight, rtol=1.5e-7)


def test_one_row_leaves_the_edges_of_others_alone() -> None:
    X = unit_rows(6, 3).astype(np.float32)
    moved = X.copy()
    moved[0] *= np.float32(1 + 5e-6)
    first, second = (
        gaussian_graph(rows, 0.5, method="exact").matmul(np.eye(6, dtype=np.float32)) for rows in (X, moved)
    )
    np.testing.assert_array_equal(first[1:, 1:], second[1:, 1:])


def test_changing_the_rows_or_the_degree_afterwards_changes_nothing() -> None:
    X = unit_rows(10, 3)
    graph = gaussian_graph(X, 1.0)
    before = graph.matmul(np.eye(10))
    X[:] = 0
    with pytest.raises(ValueError, match="read-only"):
        graph.degree[0] = 0
    np.testing.assert_array_equal(graph.matmul(np.eye(10)), before)


@pytest.mark.parametrize("method", ["exact", "series", "neighbors"])
def test_no_columns_give_no_columns(convert: Convert, method: Any) -> None:
    graph = build(convert(unit_rows(10, 3)), 6.0, method=method, n_neighbors=3)
    for operation in (graph.matmul, graph.laplacian_matmul, graph.matmul):
        assert tuple(operation(convert(np.ones((10, 0)))).shape) == (10, 0)


@pytest.mark.parametrize("method", ["exact", "series", "neighbors"])
def test_tensors_are_cut_off_from_their_gradients(method: Any) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed (the extra `torch`)")
    rows = torch.from_numpy(unit_rows(10, 3)).requires_grad_()
    graph = build(rows, 6.0, method=method, n_neighbors=3)
    assert not graph.matmul(torch.ones(10, 1, requires_grad=True)).requires_grad


def test_a_degree_that_has_lost_digits_to_underflow_raises() -> None:
    X = np.array([[1.0, 0.0], [0.0, 1.0]])
    bandwidth = np.sqrt(
        -1 / np.log(2e-307)
    )  # a weight of 2e-307: above the least normal number, with few digits to spare
    with pytest.raises(ValueError, match="underflows"):
        gaussian_graph(X, bandwidth, method="exact")


def test_exact_never_forms_the_matrix() -> None:
    n = 12_000  # the matrix would take 1.2 GB
    X, Z = unit_rows(n, 8), unit_rows(n, 2, seed=1)
    tracemalloc.start()
    gaussian_graph(X, 6.0, method="exact").laplacian_matmul(Z)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < n * n * 8 / 8


@pytest.mark.parametrize("method", ["exact", "neighbors"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_a_degree_that_underflows_raises(convert: Convert, method: Any, dtype: type) -> None:
    X = convert(np.eye(3, dtype=dtype))
    with pytest.raises(ValueError, match=r"degree of 3 row\(s\) underflows.*larger bandwidth"):
        build(X, 0.01, method=method, n_neighbors=1)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize(
    ("bandwidth", "tolerance", "degree"),
    [(6.0, 1e-1, 0), (6.0, 1e-3, 1), (6.0, 1e-6, 2), (6.0, 1e-8, 3), (1.5, 1e-3, 3), (20.0, 1e-9, 2), (1.0, 0.5, 1)],
)
def test_series_keeps_its_certified_bound(
    convert: Convert, dtype: type, bandwidth: float, tolerance: float, degree: int
) -> None:
    X, Z = unit_rows(300, 6).astype(dtype), unit_rows(300, 3, seed=1).astype(dtype)
    weights = dense_weights(X.astype(np.float64), bandwidth)
    graph = gaussian_graph(convert(X), bandwidth, method="series", tolerance=tolerance)
    assert isinstance(graph, series.SeriesGraph)
    assert graph.polynomial.degree == degree
    assert graph.error_bound <= tolerance
    slack = ROUNDING[dtype]
    assert np.max(np.abs(np.asarray(graph.degree) / weights.sum(1) - 1)) <= graph.error_bound + slack
    error = np.abs(np.asarray(graph.matmul(convert(Z))) - weights @ Z)
    assert np.all(error <= graph.error_bound * (weights @ np.abs(Z)) + slack * weights.sum(1)[:, None])
    constant = np.asarray(graph.laplacian_matmul(convert(np.ones((300, 1), dtype=dtype))))
    assert np.max(np.abs(constant)) < 300 * slack


@settings(deadline=None, max_examples=60)
@given(
    n=st.integers(2, 60),
    d=st.integers(1, 12),
    bandwidth=st.floats(0.8, 30),
    tolerance=st.floats(1e-9, 0.9),
    seed=st.integers(0, 2**32 - 1),
)
def test_series_bound_holds_edge_by_edge(n: int, d: int, bandwidth: float, tolerance: float, seed: int) -> None:
    X = unit_rows(n, d, seed)
    X[-1] = -X[0]  # the ends of the interval, where the polynomial is worst
    weights = dense_weights(X, bandwidth)
    try:
        graph = gaussian_graph(X, bandwidth, method="series", tolerance=tolerance)
    except ValueError as error:
        assert 'method="exact"' in str(error)
        return
    approximate = graph.matmul(np.eye(n))
    off = ~np.eye(n, dtype=bool)
    assert np.all(np.abs(approximate[off] / weights[off] - 1) <= graph.error_bound + 1e-12)
    np.testing.assert_allclose(np.diag(approximate), 0, atol=1e-12)


@settings(deadline=None, max_examples=60)
@given(
    n=st.integers(2, 40), bandwidth=st.floats(0.8, 5), tolerance=st.floats(1e-4, 0.9), seed=st.integers(0, 2**32 - 1)
)
def test_an_average_moves_by_no_more_than_theorem_2_allows(
    n: int, bandwidth: float, tolerance: float, seed: int
) -> None:
    X, new, Q = unit_rows(n, 2, seed), unit_rows(20, 2, seed + 1), np.random.default_rng(seed).normal(size=(n, 2))
    X[-1] = -new[0]
    try:
        graph = gaussian_graph(X, bandwidth, method="series", tolerance=tolerance)
    except ValueError:
        return
    exact = gaussian_graph(X, bandwidth, method="exact").interpolate(new, Q)
    moved = np.linalg.norm(graph.interpolate(new, Q) - exact, axis=1).max()
    diameter = np.linalg.norm(Q[:, None] - Q[None], axis=2).max()
    assert moved <= graph.error_bound / (2 * (1 - graph.error_bound)) * diameter + 1e-12


def test_series_bound_is_tight() -> None:
    """If the certificate were halved, opposite rows would break it."""
    X = np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [np.sqrt(0.75), 0.5]])
    weights = dense_weights(X, 6.0)
    graph = gaussian_graph(X, 6.0, method="series", tolerance=1e-6)
    off = ~np.eye(4, dtype=bool)
    assert np.max(np.abs(graph.matmul(np.eye(4))[off] / weights[off] - 1)) > 0.9 * graph.error_bound


def test_series_without_a_good_polynomial_names_the_way_out() -> None:
    with pytest.raises(ValueError, match=r'tolerance 1e-06 at bandwidth 0.5.*use method="exact"'):
        gaussian_graph(unit_rows(50, 4), 0.5, method="series")


def test_series_of_too_many_moments_names_the_way_out() -> None:
    with pytest.raises(ValueError, match=r'degree 3 in 1280 features needs too many moments: use method="exact"'):
        gaussian_graph(unit_rows(5, 1280), 6.0, method="series", tolerance=1e-8)


def test_series_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    X, Z = unit_rows(500, 6), unit_rows(500, 2, seed=1)
    whole = [gaussian_graph(X, 6.0, "series", tolerance=t).matmul(Z) for t in (1e-6, 1e-8)]
    monkeypatch.setattr(series, "HOST_BLOCK", 64 * 12)
    cut = [gaussian_graph(X, 6.0, "series", tolerance=t).matmul(Z) for t in (1e-6, 1e-8)]
    np.testing.assert_allclose(cut, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("method", ["exact", "series", "neighbors"])
def test_interpolation_is_the_kernel_average(convert: Convert, method: Any) -> None:
    X, new, Z = unit_rows(80, 5), unit_rows(30, 5, seed=2), unit_rows(80, 2, seed=1)
    graph = build(convert(X), 2.0, method=method, tolerance=1e-2, n_neighbors=7)
    weights = np.exp((new @ X.T - 1) / 4)
    if method == "neighbors":
        weights *= weights >= np.sort(weights, axis=1)[:, [-7]]
    expected = weights @ Z / weights.sum(axis=1, keepdims=True)
    got = np.asarray(graph.interpolate(convert(new), convert(Z)))
    np.testing.assert_allclose(got, expected, atol=2 * graph.error_bound if method == "series" else 1e-13)
    assert np.asarray(graph.interpolate(convert(new[:0]), convert(Z))).shape == (0, 2)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_neighbors_graph_is_the_symmetric_union(convert: Convert, dtype: type) -> None:
    X, k = unit_rows(120, 6).astype(dtype), 4
    weights = dense_weights(X.astype(np.float64), 0.5)
    keep = weights >= np.sort(weights, axis=1)[:, [-k]]
    expected = np.where(keep | keep.T, weights, 0)
    graph = neighbors_graph(convert(X), 0.5, n_neighbors=k)
    np.testing.assert_allclose(graph.matmul(convert(np.eye(120, dtype=dtype))), expected, rtol=1e-5)
    np.testing.assert_allclose(graph.degree, expected.sum(axis=1), rtol=1e-5)
    assert graph.error_bound == 1  # an edge left out is an edge of weight zero


def test_neighbors_of_all_rows_are_the_exact_graph() -> None:
    X = unit_rows(20, 3)
    graph = neighbors_graph(X, 0.5, n_neighbors=19)
    np.testing.assert_allclose(graph.matmul(np.eye(20)), dense_weights(X, 0.5), atol=1e-14)
    assert graph.error_bound == 0


def test_neighbors_among_duplicates_are_other_rows() -> None:
    X = np.repeat(unit_rows(3, 4), 10, axis=0)
    graph = neighbors_graph(X, 0.5, n_neighbors=3)
    matrix = graph.matmul(np.eye(30))
    assert np.all(np.diag(matrix) == 0)
    assert np.all((matrix > 0).sum(axis=1) >= 3)
    assert np.sum(matrix > 0) <= 2 * 30 * 3  # no row asked for more than three


def test_bad_numbers_of_neighbours_are_named() -> None:
    for number in (True, 5, 0):
        with pytest.raises(ValueError, match="n_neighbors must be an integer"):
            neighbors_graph(unit_rows(5, 3), 1.0, number)
    with pytest.raises(ValueError, match=r"float16.*convert it to float32"):
        neighbors_graph(np.eye(3, dtype=np.float16), 1.0, 1)


def test_numpy_integers_count_neighbours() -> None:
    assert neighbors_graph(unit_rows(9, 3), 1.0, n_neighbors=cast("int", np.int64(3))).method == "neighbors"


@pytest.mark.parametrize(
    ("n", "d", "bandwidth", "tolerance", "method"),
    [
        (5000, 16, 6.0, 1e-6, "series"),  # quadratic, linear in n
        (100, 200, 6.0, 1e-6, "exact"),  # a series is possible, but n^2 is cheaper
        (5000, 16, 0.5, 1e-6, "exact"),  # no series is good enough
        (100, 200, 6.0, 1e-3, "series"),  # a linear polynomial is
    ],
)
def test_auto_takes_the_cheapest_within_tolerance(
    n: int, d: int, bandwidth: float, tolerance: float, method: str
) -> None:
    graph = gaussian_graph(unit_rows(n, d), bandwidth, tolerance=tolerance)
    assert graph.method == method
    assert graph.error_bound <= tolerance


def test_rows_that_are_nearly_of_norm_one_are_made_so() -> None:
    X = unit_rows(50, 4)
    rough = X.astype(np.float32).astype(np.float64) * (1 + 2e-5)
    np.testing.assert_allclose(gaussian_graph(rough, 1.0).degree, gaussian_graph(X, 1.0).degree, rtol=1e-6)


@pytest.mark.parametrize("method", ["exact", "series", "neighbors"])
def test_graphs_survive_pickling(method: Any) -> None:
    graph = build(unit_rows(40, 4), 6.0, method=method)
    Z = unit_rows(40, 2, seed=1)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(graph)).matmul(Z), graph.matmul(Z))  # noqa: S301


def bad_rows(value: float) -> Any:
    X = unit_rows(5, 3)
    X[2] = value
    return X


@pytest.mark.parametrize(
    ("X", "parameters", "message"),
    [
        (bad_rows(np.nan), {}, r"X holds NaN, infinity or a huge number \(first in row 2\)"),
        (bad_rows(np.inf), {}, r"X holds NaN, infinity or a huge number \(first in row 2\)"),
        (bad_rows(1e-3), {}, r"rows of norm 1 \(row 2 has not\)"),
        (unit_rows(5, 3) * (1 + 1e-3), {}, "rows of norm 1"),
        (unit_rows(5, 3), {"bandwidth": unit_rows(5, 3)}, "bandwidth must be from 1e-100 to 1e[+]100$"),
        (unit_rows(5, 3), {"method": unit_rows(5, 3)}, 'method must be "auto"'),
        (unit_rows(5, 3), {"bandwidth": 1e-9}, "bandwidth 1e-09 is too small: the rounding"),
        (bad_rows(0.0), {}, r"X holds a row of zeros \(row 2\), which has no direction"),
        (bad_rows(3.0), {}, r"rows of norm 1 \(row 2 has not\): divide each row by its norm"),
        (unit_rows(1, 3), {}, r"X has 1 row\(s\); it needs at least 2"),
        (np.empty((0, 3)), {}, r"X has 0 row\(s\)"),
        (np.empty((3, 0)), {}, "at least one feature"),
        (np.ones(3), {}, "2-D array"),
        (np.eye(3, dtype=int), {}, "floating-point"),
        (np.eye(3, dtype=np.float16), {}, "float16.*convert it to float32"),
        (np.eye(3, dtype=np.float16), {"method": "series"}, "float16.*convert it to float32"),
        (unit_rows(5, 3), {"bandwidth": 0}, "bandwidth must be from 1e-100"),
        (unit_rows(5, 3), {"bandwidth": -1.0}, "bandwidth must be from 1e-100"),
        (unit_rows(5, 3), {"bandwidth": np.nan}, "bandwidth must be from 1e-100"),
        (unit_rows(5, 3), {"bandwidth": np.inf}, "bandwidth must be from 1e-100"),
        (unit_rows(5, 3), {"bandwidth": "wide"}, "bandwidth must be from 1e-100"),
        (unit_rows(5, 3), {"bandwidth": 1e-200}, "bandwidth must be from 1e-100"),
        (unit_rows(5, 3), {"tolerance": 0.0}, "tolerance must be a finite number above 0"),
        (unit_rows(5, 3), {"method": "magic"}, 'method must be "auto", "exact" or "series"'),
    ],
)
def test_bad_input_is_named(X: Any, parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gaussian_graph(X, **{"bandwidth": 1.0, **parameters})


@pytest.mark.parametrize(
    ("Z", "message"),
    [
        (np.ones((4, 2)), r"Z must have shape \(5, k\)"),
        (np.ones(5), r"Z must have shape \(5, k\)"),
        (np.full((5, 1), np.nan), "Z holds NaN or infinity"),
        (np.full((5, 1), 1j), "Z must hold real numbers"),
        (np.full((5, 1), "a"), "Z must hold real numbers"),
    ],
)
def test_bad_columns_are_named(Z: Any, message: str) -> None:
    graph = gaussian_graph(unit_rows(5, 3), 1.0)
    for operation in (graph.matmul, graph.laplacian_matmul, lambda Z: graph.interpolate(unit_rows(2, 3), Z)):
        with pytest.raises(ValueError, match=message):
            operation(Z)


def test_mixed_libraries_are_named() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed (the extra `torch`)")
    graph = gaussian_graph(unit_rows(5, 3), 1.0)
    with pytest.raises(ValueError, match="Z is a Tensor but the graph holds ndarray"):
        graph.matmul(torch.ones(5, 1))


def test_new_rows_of_another_library_are_named() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed (the extra `torch`)")
    graph = gaussian_graph(torch.from_numpy(unit_rows(5, 3)), 1.0)
    with pytest.raises(ValueError, match="X is a ndarray but the graph holds Tensor"):
        graph.interpolate(unit_rows(2, 3), torch.ones(5, 1))


def test_new_rows_of_another_width_are_named() -> None:
    graph = gaussian_graph(unit_rows(5, 3), 1.0)
    with pytest.raises(ValueError, match="X has 4 features, but the graph was built with 3"):
        graph.interpolate(unit_rows(2, 4), np.ones((5, 1)))


def test_errors_hold_no_values_of_the_rows() -> None:
    X = unit_rows(5, 3)
    X[2] = 123.456
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        gaussian_graph(X, 1.0)
    assert "123" not in str(caught.value)


def test_graph_and_manifold_need_three_packages_alone() -> None:
    program = """
import sys
from importlib.metadata import packages_distributions
allowed = {"numpy", "scipy", "sklearn", "joblib", "cloudpickle", "threadpoolctl", "narwhals", "nearveil"}
blocked = set(packages_distributions()) - allowed
assert "matplotlib" in blocked
class Filter:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in blocked else self.finder.find_spec(name, path, target)
sys.meta_path[:] = [Filter(finder) for finder in sys.meta_path]
import numpy as np, nearveil.privatemail.graph, nearveil.privatemail.manifold
X = np.eye(4)
for method in ("exact", "series"):
    nearveil.privatemail.graph.gaussian_graph(X, 6.0, method=method).laplacian_matmul(X)
nearveil.privatemail.manifold.SupervisedManifold().fit(X, [0, 0, 1, 1]).transform(X)
print("done")
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)  # noqa: S603
    assert result.stdout.strip() == "done", result.stderr


def test_series_keeps_its_bound_on_real_features(birds: FeatureSet) -> None:
    public = birds.features[birds.labels < 100]
    X = public.astype(np.float64) - public.mean(axis=0)
    X = X[:800] / np.linalg.norm(X[:800], axis=1, keepdims=True)
    weights = np.exp((X @ X.T - 1) / 36)
    np.fill_diagonal(weights, 0)
    graph = gaussian_graph(X, 6.0, method="series", tolerance=1e-6)
    assert np.max(np.abs(graph.degree / weights.sum(axis=1) - 1)) <= graph.error_bound
