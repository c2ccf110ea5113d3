"""Messages a second: every release that protects a query, and what the authors of PrivateMail do for each query."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from studies._timing import time_repeatedly

DIMENSION, PUBLIC, BATCH = 1280, 1000, 1000
EPSILON, CANDIDATES = 4.0, 0.1
AUTHORS = "authors' procedure, dense"
Floats = NDArray[np.float64]


def draw_clusters(n: int, dimension: int, seed: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return rows around centres, and which centre; the more rows the more centres."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(0).standard_normal((max(20, n // 500), dimension)).astype(np.float32)
    y = rng.integers(0, len(centres), n)
    return centres[y] + 0.8 * rng.standard_normal((n, dimension)).astype(np.float32), y


def make_authors(anchors: Floats, labels: NDArray[np.int64]) -> Callable[[Floats], Floats]:
    """Return the authors' procedure for one query: dense, all of it anew for every target."""
    n, s, alpha, steps = len(anchors) + 1, 6.0, 0.6, 5
    start = 1e-8 * np.random.default_rng(1).standard_normal((n, 2))

    def answer(x: Floats) -> Floats:
        rows = np.vstack([x, anchors])
        squares = (rows**2).sum(axis=1)
        W = np.exp(-(squares[:, None] + squares - 2 * rows @ rows.T) / s**2)
        gaps = np.abs(np.subtract.outer([labels[0], *labels], [labels[0], *labels])).astype(float)
        V = -(gaps - gaps.mean(axis=0) - gaps.mean(axis=1)[:, None] + gaps.mean()) / 2
        np.fill_diagonal(W, 0)
        L_X, L_Y = np.diag(W.sum(axis=1)) - W, np.diag(V.sum(axis=1)) - V
        D = np.linalg.inv(np.diag(np.diag(L_X)))
        Z = start
        for step in range(steps):
            Z = Z - D @ (L_X @ Z - alpha * (L_Y @ Z)) / 2
            if step == 0:
                Z = Z + 1e-16 * np.random.default_rng().standard_normal(Z.shape)
            Z = Z * np.sqrt(n) / np.linalg.norm(Z)
        return np.asarray(Z)

    return answer


_PROJECTED = {"projection": "pca", "n_components": 64}
_FEW = {"projection": "pca", "n_components": 8}
_TIMED: dict[str, tuple[str, dict[str, Any]]] = {  # names in the registry, and what differs from it
    "covers": ("covers", {"candidates": CANDIDATES, "n_sets": None}),
    "k-means cells": ("cells (randomized)", {"candidates": CANDIDATES}),
    "balanced cells, subset": ("cells (subset)", {"candidates": CANDIDATES}),
    "unary, symmetric": ("unary (symmetric)", {}),
    "unary, optimised": ("unary (optimised)", {}),
    "PrivUnit, all dimensions": ("privunit", {}),
    "PrivUnit, PCA to 64": ("privunit", _PROJECTED),
    "analytic Gaussian": ("analytic-gaussian", {}),
    "von Mises-Fisher, PCA to 64": ("von-mises-fisher", _PROJECTED),
    "random projection": ("random-projection", {}),
    "LATENT, PCA to 8": ("latent", _FEW),
    "OME, PCA to 8": ("ome", {"pairs": "code words", **_FEW}),
    "PrivateMail, Gaussian": ("privatemail (gaussian)", {}),
    "PrivateMail, Laplace": ("privatemail (laplace)", {}),
    "DP-dSNE": ("dp-dsne", {"n_anchors": 100}),
}


def list_releases() -> dict[str, Callable[[], Any]]:
    """Return how to build every release that protects a query with a proved guarantee."""
    from studies.baselines import find_mechanism

    timed = _TIMED.items()
    return {name: partial(find_mechanism(kind).make, EPSILON, **changes) for name, (kind, changes) in timed}


def measure_speed(name: str, gallery_rows: int, *, repeats: int = 3, seconds: float = 0.7) -> dict[str, Any]:
    """Time one release, or the authors' procedure."""
    public, labels = draw_clusters(PUBLIC, DIMENSION, 1)
    queries, _ = draw_clusters(BATCH, DIMENSION, 3)
    if name == AUTHORS:
        unit = (public / np.linalg.norm(public, axis=1, keepdims=True)).astype(float)
        dense, query = make_authors(unit, labels), queries[0].astype(float)
        rates = _measure_rates(lambda: dense(query), 1, repeats, seconds)
        return {"single": rates, "batched": rates, "bytes": 8 * 2 * (PUBLIC + 1)}
    release = list_releases()[name]().fit(public, labels)
    if hasattr(release, "index"):
        release = release.index(draw_clusters(gallery_rows, DIMENSION, 2)[0])
    batch = queries[: _count_affordable(release, queries, seconds)]
    return {
        "single": _measure_rates(lambda: release.release(queries[0]), 1, repeats, seconds),
        "batched": _measure_rates(lambda: release.release(batch), len(batch), repeats, seconds),
        "bytes": release.release(queries[0]).nbytes,
    }


def _count_affordable(release: Any, queries: Any, seconds: float) -> int:
    """Return how many queries are asked at once: all, or what a slow release does in the time of a rate."""
    (_, once) = time_repeatedly(lambda: release.release(queries[0]), least=2, most=2)
    return min(len(queries), max(1, int(10 * seconds / once)))


def _measure_rates(work: Callable[[], object], count: int, repeats: int, seconds: float) -> list[float]:
    work()
    times = (time_repeatedly(work, least=1, most=2000, seconds=seconds) for _ in range(repeats))
    return [count / float(np.median(results)) for results in times]
