"""Three ways to an embedding: the query's own iteration, the 2021 first pass, and eigenvectors.

Each takes the graphs and a start of shape (n, k) and returns the embedding and the objective
``v(Z) = Tr(Z' L_X Z) - alpha Tr(Z' L_Y Z)`` of every iterate, the start included where there is one.
"""

import math
from typing import Any

import numpy as np
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, cg, eigsh

from nearveil.graph import GaussianGraph, LabelGraph
from nearveil.manifold._step import Array, smlq_step

Result = tuple[Array, list[float]]

_ROUNDING = 1e-6  # of the largest entry: a mean below it comes from rounding, in float32 too


def majorize(
    graph: GaussianGraph, labels: LabelGraph | None, start: Array, label_weight: float, n_iter: int, rescale: bool
) -> Result:
    """Iterate :func:`smlq_step`.

    A step keeps the degree-weighted mean of the rows, but its rounding error does not, and rescaling
    would feed that error until nothing else is left. So the mean is put back where it belongs; in
    exact arithmetic that changes nothing.
    """
    Z = start * _factor_to_norm(start) if rescale else start
    mean = _weighted_mean(Z, graph)
    mean = mean * (abs(mean) > _ROUNDING * abs(Z).max())
    history = []
    for _ in range(n_iter):
        moved, objective = smlq_step(Z, graph, labels, label_weight)
        if not math.isfinite(objective):
            break
        history.append(objective)
        Z = moved - (_weighted_mean(moved, graph) - mean)
        if rescale:
            factor = _factor_to_norm(Z)
            Z, mean = Z * factor, mean * factor
    history.append(_objective(Z, graph, labels, label_weight))
    if not math.isfinite(history[-1]):
        raise ValueError("the embedding overflows: use rescale=True, a smaller label_weight or fewer n_iter")
    return Z, history


def cccp(
    graph: GaussianGraph, labels: LabelGraph | None, start: Array, label_weight: float, n_iter: int, rescale: bool
) -> Result:
    """Iterate eq. 6 of the 2021 paper: ``Z <- alpha L_X^+ (L_Y Z - S Q)``, S Q = n (Q - mean of Q).

    The pseudo-inverse is applied by conjugate gradients on vectors of mean zero, where L_X is
    definite, so that no matrix is formed. The scale of Z matters to this iteration: `rescale` acts on
    its result alone.
    """
    if labels is None or label_weight == 0:
        raise ValueError('solver="cccp" needs labels and label_weight > 0: its eq. 6 is zero without them')
    n, k = start.shape
    pull = n * (start - start.mean(axis=0))
    operator = LinearOperator(
        (n * k, n * k),
        matvec=lambda z: graph.laplacian_matmul(_as(z.reshape(n, k), start)).ravel(),
        dtype=np.float64,
    )
    jacobi = LinearOperator(
        (n * k, n * k), matvec=lambda z: (z.reshape(n, k) / np.asarray(graph.degree)[:, None]).ravel(), dtype=np.float64
    )
    Z, history = start, [_objective(start, graph, labels, label_weight)]
    rtol = 1e-13 if start.dtype == np.float64 else 1e-6
    for _ in range(n_iter):
        right = label_weight * (labels.laplacian_matmul(Z) - pull)
        right = np.asarray(right - right.mean(axis=0), dtype=np.float64)
        if not np.all(np.isfinite(right)):
            raise ValueError("the iteration of eq. 6 runs away: use a smaller label_weight or fewer n_iter")
        solved, failed = cg(operator, right.ravel(), rtol=rtol, maxiter=10 * n, M=jacobi)
        if failed:
            raise ValueError("conjugate gradients did not converge: the graph is (nearly) disconnected; use a larger bandwidth")
        solved = solved.reshape(n, k)
        Z = _as(solved - solved.mean(axis=0), start)
        history.append(_objective(Z, graph, labels, label_weight))
    return (Z * _factor_to_norm(Z) if rescale else Z), history


def spectral(
    graph: GaussianGraph, labels: LabelGraph | None, start: Array, label_weight: float, n_iter: int, rescale: bool
) -> Result:
    """Minimise v under ``Z' Z = I`` and columns of mean zero: eigenvectors of ``L_X - alpha L_Y``.

    The papers take the largest; the minimum of eq. 3 is at the smallest. The constant vector, which
    tells no row from another, is moved to the other end of the spectrum.
    """
    n, k = start.shape
    if k >= n:
        raise ValueError(f'n_components must be below the {n} rows for solver="spectral"; got {k}')
    degree = np.asarray(graph.degree, dtype=np.float64)
    ceiling = 2 * float(degree.max()) + 1

    def matvec(z: Any) -> Any:
        column = _as(z.reshape(n, 1), start)
        image = graph.laplacian_matmul(column)
        if labels is not None and label_weight:
            image = image - label_weight * labels.laplacian_matmul(column)
        return np.asarray(image, dtype=np.float64).ravel() + ceiling * z.mean()

    operator = LinearOperator((n, n), matvec=matvec, dtype=np.float64)
    try:
        _, vectors = eigsh(operator, k=k, which="SA", v0=np.asarray(start[:, 0], dtype=np.float64))
    except ArpackNoConvergence:
        raise ValueError("the eigenvectors did not converge: use a larger bandwidth or another solver") from None
    peaks = vectors[np.argmax(np.abs(vectors), axis=0), np.arange(k)]
    Z = _as(vectors * np.sign(peaks), start)
    Z = Z * _factor_to_norm(Z) if rescale else Z
    return Z, [_objective(Z, graph, labels, label_weight)]


SOLVERS = {"majorize": majorize, "cccp": cccp, "spectral": spectral}


def _objective(Z: Array, graph: GaussianGraph, labels: LabelGraph | None, label_weight: float) -> float:
    value = (Z * graph.laplacian_matmul(Z)).sum()
    if labels is not None and label_weight:
        value = value - label_weight * (Z * labels.laplacian_matmul(Z)).sum()
    return float(value)


def _factor_to_norm(Z: Array) -> float:
    """Return what brings `Z` to Frobenius norm sqrt(n)."""
    largest = float(abs(Z).max())  # divide by it first, so that squares neither overflow nor vanish
    if not 0 < largest < math.inf:
        raise ValueError("the embedding cannot be rescaled: it is zero everywhere or has overflowed")
    scaled = Z / largest
    return math.sqrt(Z.shape[0] / float((scaled * scaled).sum())) / largest


def _weighted_mean(Z: Array, graph: GaussianGraph) -> Array:
    """Return the mean of the rows, each weighted by its degree."""
    return (graph.degree[:, None] * Z).sum(axis=0) / graph.degree.sum()


def _as(values: Any, model: Array) -> Array:
    """Bring a NumPy result back to the library, device and dtype of `model`."""
    if isinstance(model, np.ndarray):
        return values.astype(model.dtype, copy=False)
    return model.new_tensor(values)
