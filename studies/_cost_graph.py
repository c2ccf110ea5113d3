"""Ways to multiply with the Laplacian of a Gaussian graph: ours, the authors', and rivals."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from studies._timing import measure_peak_gib, time_repeatedly

FEATURES, COLUMNS, BANDWIDTH, TOLERANCE = 64, 2, 6.0, 1e-6
CLASSES, LABEL_WEIGHT, STEPS, REPEATS = 20, 0.6, 5, 3
Product = Callable[[Any], tuple[Any, Any]]
"""From Z to the Laplacian times Z, and the degrees as a column."""


@dataclass(frozen=True)
class Contender:
    """A way to multiply, and the largest size that a bench asks of it."""

    name: str
    dtype: str
    largest: int
    prepare: Callable[[Any], Product]

    def step(self, X: Any, Z: Any) -> Any:
        """Build the operator and multiply once: what the manifold needs of a graph."""
        return self.prepare(X)(Z)[0]


def use_dense(X: Any) -> Product:
    """Form distances, weights and Laplacian as n x n matrices: the authors' way."""
    from scipy.spatial.distance import cdist

    weights = np.exp(cdist(X, X, "sqeuclidean") / (-2 * BANDWIDTH**2))
    np.fill_diagonal(weights, 0)
    degree = weights.sum(axis=1)
    laplacian = np.diag(degree) - weights
    return lambda Z: (laplacian @ Z, degree[:, None])


def use_row_tiles(X: Any) -> Product:
    """Do what comes to mind first without n x n: strips of rows, no symmetry, one thread for exp."""
    ones = np.ones(len(X), dtype=X.dtype)

    def product(Z: Any) -> tuple[Any, Any]:
        out, degree = np.empty_like(Z), np.empty_like(Z[:, :1])
        for start in range(0, len(X), 1024):
            strip = slice(start, start + 1024)
            weights = np.exp((X[strip] @ X.T - 1) / X.dtype.type(BANDWIDTH**2))
            weights[np.arange(len(weights)), np.arange(start, start + len(weights))] = 0
            degree[strip] = (weights @ ones)[:, None]
            out[strip] = degree[strip] * Z[strip] - weights @ Z
        return out, degree

    return product


def use_ours(method: Any) -> Callable[[Any], Product]:
    """Multiply with one of our operators."""

    def prepare(X: Any) -> Product:
        from nearveil.privatemail.graph import gaussian_graph
        from studies.baselines import neighbors_graph

        if method == "neighbors":
            graph: Any = neighbors_graph(X, BANDWIDTH)
        else:
            graph = gaussian_graph(X, BANDWIDTH, method=method, tolerance=TOLERANCE)
        return lambda Z: (graph.laplacian_matmul(Z), graph.degree[:, None])

    return prepare


def use_ours_on_tensors(X: Any) -> Product:
    """Multiply exactly with torch tensors on the host, which share their memory with NumPy."""
    import torch

    product = use_ours("exact")(torch.from_numpy(X))

    def on_host(Z: Any) -> tuple[Any, Any]:
        moved, degree = product(torch.from_numpy(Z))
        return moved.numpy(), degree.numpy()

    return on_host


def use_attention(X: Any) -> Product:
    """Use PyTorch's fused attention; degrees come from its log-sum-exp, the self-term is subtracted."""
    import torch

    on_host = isinstance(X, np.ndarray)
    rows = torch.from_numpy(X) if on_host else X
    kernel = getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention{'_for_cpu' if on_host else ''}")

    def product(Z: Any) -> tuple[Any, Any]:
        values = torch.from_numpy(Z) if on_host else Z
        padded = torch.nn.functional.pad(values.to(rows.dtype), (0, FEATURES - COLUMNS))
        q, v, scale = rows[None, None], padded[None, None], BANDWIDTH**-2
        out, log_sum, *_ = kernel(q, q, v, 0.0, False, scale=scale)
        full = torch.exp(log_sum[0, 0] - scale).to(values.dtype)[:, None]
        moved = (full - 1) * values - (full * out[0, 0, :, :COLUMNS].to(values.dtype) - values)
        return (moved.numpy(), (full - 1).numpy()) if on_host else (moved, full - 1)

    return product


def use_keops(X: Any) -> Product:
    """Use KeOps' lazy tensors, compiled for this formula."""
    from pykeops.numpy import LazyTensor

    squares = ((LazyTensor(X[:, None, :]) - LazyTensor(X[None, :, :])) ** 2).sum(-1)
    weights = (-squares / (2 * BANDWIDTH**2)).exp()

    def product(Z: Any) -> tuple[Any, Any]:
        sums = weights @ np.hstack([np.ones_like(Z[:, :1]), Z])
        degree = sums[:, :1] - 1
        return degree * Z - (sums[:, 1:] - Z), degree

    return product


CPU = (
    Contender("dense NumPy (the authors' way)", "float64", 20_000, use_dense),
    Contender("row tiles, NumPy", "float64", 20_000, use_row_tiles),
    Contender("row tiles, NumPy", "float32", 20_000, use_row_tiles),
    Contender("exact (ours, NumPy)", "float64", 100_000, use_ours("exact")),
    Contender("exact (ours, NumPy)", "float32", 100_000, use_ours("exact")),
    Contender("exact (ours, torch tensors)", "float32", 100_000, use_ours_on_tensors),
    Contender("fused attention, torch", "float64", 20_000, use_attention),
    Contender("fused attention, torch", "float32", 100_000, use_attention),
    Contender("pyKeOps", "float32", 20_000, use_keops),
    Contender("series (ours)", "float64", 1_000_000, use_ours("series")),
    Contender("series (ours)", "float32", 1_000_000, use_ours("series")),
    Contender("15 nearest neighbours (ours)", "float32", 20_000, use_ours("neighbors")),
)


def draw_rows_and_values(n: int) -> tuple[Any, Any]:
    """Draw rows of norm one and values, the same for every contender."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal(size=(n, FEATURES), dtype=np.float32)
    X /= np.sqrt(np.vecdot(X, X))[:, None]
    return X, rng.standard_normal(size=(n, COLUMNS), dtype=np.float32)


def draw_in_dtype(n: int, dtype: str) -> tuple[Any, Any]:
    """Return rows of norm one and values, in the dtype of a contender."""
    rows, values = draw_rows_and_values(n)
    X = rows.astype(dtype)
    return X / np.sqrt(np.vecdot(X, X))[:, None], values.astype(dtype)


def embed(prepare: Callable[[Any], Product], X: Any, Z: Any, labels: Any) -> Any:
    """Embed rows by the steps of the supervised manifold: the graph is built once and multiplied at every step."""
    from nearveil.privatemail.graph import label_graph

    product, repel = prepare(X), label_graph(labels, BANDWIDTH)
    for _ in range(STEPS):
        pulled, degree = product(Z)
        Z = Z - (pulled - LABEL_WEIGHT * repel.laplacian_matmul(Z)) / (2 * degree)
        Z = np.asarray(Z * np.sqrt(len(Z)) / np.linalg.norm(Z), dtype=X.dtype)
    return Z


def measure_embedding(name: str, dtype: str, n: int) -> dict[str, Any]:
    """Time the embedding of n rows in this process, and take its peak memory."""
    contender = next(entry for entry in CPU if (entry.name, entry.dtype) == (name, dtype))
    X, Z = draw_in_dtype(n, dtype)
    labels = np.random.default_rng(1).integers(0, CLASSES, n)
    times = time_repeatedly(lambda: embed(contender.prepare, X, Z, labels), least=REPEATS + 1, most=REPEATS + 1)
    return {"seconds": times[1:], "peak_gib": measure_peak_gib()}
