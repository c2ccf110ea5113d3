"""Vectors on which metrics differ, and their order by a plain computation in 64 bits."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearveil.metrics import CENTRED, Metric

CHOICES: tuple[Metric, ...] = ("cosine", "dot", "euclidean")
DIMENSION = 16


def make_vectors(count: int, seed: int = 0, dimension: int = DIMENSION, mean: float = 0.7) -> NDArray[np.float32]:
    """Return clusters around a strong mean, with norms that differ."""
    centres = np.random.default_rng(99).standard_normal((12, dimension))
    generator = np.random.default_rng(seed)
    rows = centres[generator.integers(0, 12, count)] + 0.7 * generator.standard_normal((count, dimension)) + mean
    return np.asarray(5 * rows * np.exp(0.3 * generator.standard_normal((count, 1))), np.float32)


def measure_dense(metric: Metric, queries: Any, rows: Any, mean: Any = 0.0) -> NDArray[np.float64]:
    """Return the metric's values, shape (q, n)."""
    a, b = np.asarray(queries, np.float64), np.asarray(rows, np.float64)
    if metric == "dot":
        return np.asarray(a @ b.T)
    if metric == "euclidean":
        return np.asarray(np.sqrt(((a[:, None] - b[None]) ** 2).sum(axis=2)))
    if metric == CENTRED:
        a, b = (values / np.linalg.norm(values, axis=1, keepdims=True) - mean for values in (a, b))
    a, b = (values / np.linalg.norm(values, axis=1, keepdims=True) for values in (a, b))
    return np.asarray(a @ b.T)


def rank_dense(metric: Metric, queries: Any, rows: Any, k: int) -> NDArray[np.intp]:
    """Return the positions of the k nearest rows of each query, nearest first."""
    values = measure_dense(metric, queries, rows)
    return np.argsort(values if metric == "euclidean" else -values, axis=1, kind="stable")[:, :k]
