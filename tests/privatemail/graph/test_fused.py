"""The GPU kernel against dense references; needs a CUDA device."""

from functools import partial
from typing import Any

import numpy as np
import pytest

from nearveil import SupervisedManifold
from nearveil.privatemail.graph import gaussian_graph, label_graph
from studies.baselines import neighbors_graph
from tests.reference import dense_label_weights, dense_weights, unit_rows

torch = pytest.importorskip("torch", reason="torch is not installed (the extra `torch`)")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def on_gpu(array: Any, dtype: Any = None) -> Any:
    return torch.from_numpy(np.ascontiguousarray(array)).to("cuda", dtype)


@pytest.mark.parametrize(("dtype", "rounding"), [("float64", 1e-13), ("float32", 5e-7), ("float16", 5e-4)])
@pytest.mark.parametrize("bandwidth", [6.0, 1.0, 0.5])
@pytest.mark.parametrize(
    ("n", "d", "k"), [(2, 1, 1), (127, 5, 2), (129, 64, 3), (1000, 100, 4), (700, 128, 9), (300, 129, 2)]
)
def test_it_equals_dense(dtype: str, rounding: float, bandwidth: float, n: int, d: int, k: int) -> None:
    if dtype == "float16" and d > 128:
        pytest.skip("rows of 16 bits need the kernel, which takes 128 features")
    X = on_gpu(unit_rows(n, d), getattr(torch, dtype))
    Z = unit_rows(n, k, seed=1)
    weights = dense_weights(X.double().cpu().numpy(), bandwidth)  # of the rounded rows: the kernel's own error
    graph = gaussian_graph(X, bandwidth, method="exact")
    values = on_gpu(Z, torch.float64 if dtype == "float64" else torch.float32)
    rtol = rounding * max(1, bandwidth**-2)
    np.testing.assert_allclose(graph.degree.cpu(), weights.sum(axis=1), rtol=rtol)
    error = np.abs(graph.matmul(values).cpu().numpy() - weights @ Z)
    assert np.max(error / (weights @ np.abs(Z))) < rtol
    new = on_gpu(unit_rows(50, d, seed=2), getattr(torch, dtype))
    cross = np.exp((new.double().cpu().numpy() @ X.double().cpu().numpy().T - 1) / bandwidth**2)
    expected = cross @ Z / cross.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(graph.interpolate(new, values).cpu(), expected, atol=4 * rtol)


def test_tiny_degrees_keep_their_digits() -> None:
    X = np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    degree = dense_weights(X, 0.25).sum(axis=1)
    graph = gaussian_graph(on_gpu(X, torch.float32), 0.25, method="exact")
    assert degree.max() < 1e-6
    np.testing.assert_allclose(graph.degree.cpu(), degree, rtol=1e-5)


@pytest.mark.parametrize("build", [partial(gaussian_graph, method="series"), neighbors_graph])
def test_the_other_graphs_run_there_too(build: Any) -> None:
    X, Z = unit_rows(500, 8), unit_rows(500, 2, seed=1)
    host, device = (build(rows, 6.0) for rows in (X, on_gpu(X)))
    np.testing.assert_allclose(device.laplacian_matmul(on_gpu(Z)).cpu(), host.laplacian_matmul(Z), atol=1e-9)


def test_the_label_graph_runs_there_too() -> None:
    y, Z = np.arange(60) % 5 - 1, unit_rows(60, 2)
    graph = label_graph(on_gpu(y), 2.0)
    np.testing.assert_allclose(graph.matmul(on_gpu(Z)).cpu(), dense_label_weights(y, 2.0) @ Z, atol=1e-12)
    assert graph.degree.is_cuda


def test_the_step_is_the_same_on_both() -> None:
    from nearveil.privatemail.manifold import smlq_step

    X, Z, y = unit_rows(300, 16), unit_rows(300, 2, seed=1), np.arange(300) % 7
    host, _ = smlq_step(Z, gaussian_graph(X, 0.5), label_graph(y, 0.5), 0.6)
    device, _ = smlq_step(on_gpu(Z), gaussian_graph(on_gpu(X), 0.5), label_graph(on_gpu(y), 0.5), 0.6)
    np.testing.assert_allclose(device.cpu(), host, atol=1e-12)
    assert SupervisedManifold(init=Z, bandwidth=0.5).fit(X, y).embedding_.shape == (300, 2)
