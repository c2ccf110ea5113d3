"""Dense references, written as the papers write them and used by tests alone."""

from typing import Any

import numpy as np


def unit_rows(n: int, d: int, seed: int = 0) -> Any:
    rows = np.random.default_rng(seed).normal(size=(n, d))
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def dense_weights(X: Any, bandwidth: float) -> Any:
    squares = ((X[:, None, :] - X[None, :, :]) ** 2).sum(axis=2)
    weights = np.exp(-squares / (2 * bandwidth**2))
    np.fill_diagonal(weights, 0)
    return weights


def dense_label_weights(y: Any, bandwidth: float, encoding: str = "integer") -> Any:
    y = np.asarray(y)
    codes = y[:, None].astype(float) if encoding == "integer" else (y[:, None] == np.unique(y)[None, :]).astype(float)
    weights = dense_weights(codes, bandwidth)
    unlabelled = y == -1
    weights[unlabelled, :] = weights[:, unlabelled] = 0
    return weights


def laplacian(weights: Any) -> Any:
    return np.diag(weights.sum(axis=1)) - weights


def dense_step(Z: Any, weights: Any, label_weights: Any, alpha: float) -> Any:
    """Eq. 4 of the 2022 paper."""
    L_X, L_Y = laplacian(weights), laplacian(label_weights)
    return np.diag(1 / np.diag(L_X)) / 2 @ (alpha * L_Y - L_X) @ Z + Z


def dense_objective(Z: Any, weights: Any, label_weights: Any, alpha: float) -> float:
    return float(np.trace(Z.T @ laplacian(weights) @ Z) - alpha * np.trace(Z.T @ laplacian(label_weights) @ Z))
