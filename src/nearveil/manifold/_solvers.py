"""Three ways to an embedding: the query's own iteration, the 2021 first pass, and eigenvectors.

Each takes the query and a start of shape (n, k) and returns the embedding and the objective
``v(Z) = Tr(Z' L_X Z) - alpha Tr(Z' L_Y Z)`` of every iterate, the start included where there is one.
"""

import math
from typing import Any

import numpy as np
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, cg, eigsh

from nearveil.manifold._step import Array, Query

Result = tuple[Array, list[float]]

_TINY = 1e-35  # what divides by less would overflow float32

_ROUNDING = 16  # epsilons of the mean size of a column: a mean below that is what rounding left of none


def majorize(query: Query, start: Array, n_iter: int, rescale: bool) -> Result:
    """Iterate eq. 4 of the 2022 paper.

    A step keeps the degree-weighted mean of the rows, but its rounding error does not, and rescaling
    would feed that error until nothing else is left. So the mean is put back where it belongs; in
    exact arithmetic that changes nothing.
    """
    Z = start * _factor_to_norm(start) if rescale else start
    mean = query.mean(Z)
    mean = mean * (abs(mean) > _ROUNDING * _finfo(Z).eps * query.mean(abs(Z)))
    history = []
    for _ in range(n_iter):
        moved, objective = query.step(Z)
        if not math.isfinite(objective):
            break
        history.append(objective)
        Z = moved - (query.mean(moved) - mean)
        if rescale:
            factor = _factor_to_norm(Z)
            Z, mean = Z * factor, mean * factor
    history.append(query.objective(Z))
    if not math.isfinite(history[-1]):
        raise ValueError("the embedding overflows: use rescale=True, a smaller label_weight or fewer n_iter")
    return Z, history


def cccp(query: Query, start: Array, n_iter: int, rescale: bool) -> Result:
    """Iterate eq. 6 of the 2021 paper: ``Z <- alpha L_X^+ (L_Y Z - S Q)``, S Q = n (Q - mean of Q).

    The pseudo-inverse is applied by conjugate gradients on vectors of mean zero, where L_X is
    definite, so that no matrix is formed. The scale of Z matters to this iteration: `rescale` acts on
    its result alone.
    """
    if query.labels is None or query.label_weight == 0:
        raise ValueError('solver="cccp" needs labels and label_weight > 0: its eq. 6 is zero without them')
    n, k = start.shape
    pull = n * (start - start.mean(axis=0))
    degree = _host(query.graph.degree)[:, None]
    laplacian = _operator(n * k, lambda z: _host(query.graph.laplacian_matmul(to_kind_of(z.reshape(n, k), start))))
    jacobi = _operator(n * k, lambda z: z.reshape(n, k) / degree)
    Z, history = start, [query.objective(start)]
    rtol = max(1e-13, 100 * _finfo(start).eps)
    too_far = 1e-6 * math.sqrt(_finfo(start).max)  # the squares of such numbers, summed, would overflow
    for _ in range(n_iter):
        right = _host(query.label_weight * (query.labels.laplacian_matmul(Z) - pull))
        if not np.isfinite(right).all():
            raise ValueError("the iteration of eq. 6 overflows: use a smaller label_weight or fewer n_iter")
        if not np.any(right):
            raise ValueError("eq. 6 gives zero everywhere: init and labels leave nothing to embed")
        solved, failed = cg(laplacian, (right - right.mean(axis=0)).ravel(), rtol=rtol, maxiter=10 * n, M=jacobi)
        if failed:
            raise ValueError(
                "eq. 6 cannot be solved: the graph falls apart, or nearly; use a larger bandwidth or more neighbours"
            )
        solved = solved.reshape(n, k)
        Z = to_kind_of(solved - solved.mean(axis=0), start)
        if not np.isfinite(solved).all() or np.abs(solved).max() > too_far:
            raise ValueError("the iteration of eq. 6 overflows: use a smaller label_weight or fewer n_iter")
        history.append(query.objective(Z))
    if rescale:
        Z = Z * _factor_to_norm(Z)
        history[-1] = query.objective(Z)
    return Z, history


def spectral(query: Query, start: Array, n_iter: int, rescale: bool) -> Result:
    """Minimise v under ``Z' Z = I`` and columns of mean zero: eigenvectors of ``L_X - alpha L_Y``.

    The papers take the largest; the minimum of their eq. 3 is at the smallest. The constant vector,
    which tells no row from another, is moved to the other end of the spectrum. Neither `n_iter` nor
    the values of `start` play a part: the eigenvectors are found to full precision.
    """
    del n_iter
    n, k = start.shape
    if k >= n:
        raise ValueError(f'n_components must be below the {n} rows for solver="spectral"; got {k}')
    beyond = 2 * float(query.graph.degree.max()) + 1
    matrix = _operator(
        n, lambda z: _host(query.gradient(to_kind_of(z.reshape(n, 1), start))).ravel() + beyond * z.mean()
    )
    try:
        _, vectors = eigsh(matrix, k=k, which="SA", v0=np.random.default_rng(0).standard_normal(n))
    except ArpackNoConvergence:
        raise ValueError("the eigenvectors did not converge: use a larger bandwidth or another solver") from None
    peaks = vectors[np.argmax(np.abs(vectors), axis=0), np.arange(k)]
    Z = to_kind_of(vectors * np.sign(peaks), start)
    Z = Z * _factor_to_norm(Z) if rescale else Z
    return Z, [query.objective(Z)]


SOLVERS = {"majorize": majorize, "cccp": cccp, "spectral": spectral}


def _factor_to_norm(Z: Array) -> float:
    """Return what brings `Z` to Frobenius norm sqrt(n)."""
    largest = float(abs(Z).max())  # divide by it first, so that squares neither overflow nor vanish
    if not _TINY < largest < math.inf:
        raise ValueError(
            "the embedding cannot be rescaled: its rows have met in one point, or overflowed. Start elsewhere (init), "
            "give labels or more rows, or take fewer n_iter"
        )
    scaled = Z / largest
    return math.sqrt(Z.shape[0] / float((scaled * scaled).sum())) / largest


def _finfo(array: Array) -> Any:
    """Return the limits of the floating-point dtype of an array or tensor."""
    return np.finfo(str(array.dtype).removeprefix("torch."))


def _operator(size: int, product: Any) -> Any:
    return LinearOperator((size, size), matvec=lambda z: product(z).ravel(), dtype=np.float64)


def _host(array: Array) -> Any:
    """Bring an array of the graph's library to NumPy, in double precision."""
    return np.asarray(array.cpu() if hasattr(array, "cpu") else array, dtype=np.float64)


def to_kind_of(values: Any, model: Array) -> Array:
    """Bring a NumPy result back to the library, device and dtype of `model`."""
    if isinstance(model, np.ndarray):
        return values.astype(model.dtype, copy=False)
    return model.new_tensor(values)
