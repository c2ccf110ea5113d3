"""Solvers that the supervised manifold learning query is compared with (``docs/theory/manifold.md``).

A solver takes the query and a start of shape (n, k). It returns the embedding and the objective
``v(Z) = Tr(Z' L_X Z) - alpha Tr(Z' L_Y Z)`` of every iterate, including the start.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, cg, eigsh
from sklearn.utils._param_validation import StrOptions

from nearveil import SupervisedManifold
from nearveil.privacy.parameters import parameter
from nearveil.privatemail.graph._base import Array, find_limits, to_numpy
from nearveil.privatemail.manifold import ManifoldQuery, Result, convert_like, find_norm_factor, majorize

Floats = NDArray[np.float64]


def cccp(query: ManifoldQuery, start: Array, n_iter: int, rescale: bool) -> Result:
    """Iterate eq. 6 of the 2021 paper: ``Z <- alpha L_X^+ (L_Y Z - S Q)``, S Q = n (Q - mean of Q)."""
    # Conjugate gradients apply the pseudo-inverse to vectors of mean zero, where L_X is definite. The scale of Z
    # matters to this iteration: `rescale` acts on its result alone.
    if query.labels is None or query.label_weight == 0:
        raise ValueError('solver="cccp" needs labels and label_weight > 0: its eq. 6 is zero without them')
    n, k = start.shape
    pull = n * (start - start.mean(axis=0))
    degree = _bring_to_host(query.graph.degree)[:, None]
    laplacian = _make_operator((n, k), lambda z: query.graph.laplacian_matmul(convert_like(z, start)))
    jacobi = _make_operator((n, k), lambda z: z / degree)
    Z, history = start, [query.objective(start)]
    rtol = max(1e-13, 100 * find_limits(start).eps)
    too_far = 1e-6 * math.sqrt(find_limits(start).max)  # sums of squares would overflow beyond it
    for _ in range(n_iter):
        right = _bring_to_host(query.label_weight * (query.labels.laplacian_matmul(Z) - pull))
        if not np.isfinite(right).all():
            raise ValueError("the iteration of eq. 6 overflows: use a smaller label_weight or fewer n_iter")
        if not np.any(right):
            raise ValueError("eq. 6 gives zero everywhere: init and labels have no effect")
        solved, failed = cg(laplacian, (right - right.mean(axis=0)).ravel(), rtol=rtol, maxiter=10 * n, M=jacobi)
        if failed:
            raise ValueError(
                "eq. 6 cannot be solved: the graph is (almost) disconnected; use a larger bandwidth or more neighbours"
            )
        solved = solved.reshape(n, k)
        Z = convert_like(solved - solved.mean(axis=0), start)
        if not np.isfinite(solved).all() or np.abs(solved).max() > too_far:
            raise ValueError("the iteration of eq. 6 overflows: use a smaller label_weight or fewer n_iter")
        history.append(query.objective(Z))
    if rescale:
        Z = Z * find_norm_factor(Z)
        history[-1] = query.objective(Z)
    return Z, history


def spectral(query: ManifoldQuery, start: Array, n_iter: int, rescale: bool, *, normalised: bool = False) -> Result:
    """Minimise v under ``Z' Z = I`` and columns of mean zero: eigenvectors of ``L_X - alpha L_Y``.

    `normalised`: under ``Z' D Z = I`` and columns of weighted mean zero, as Laplacian eigenmaps do.
    """
    # The papers take the largest; the minimum of their eq. 3 is at the smallest. The constant vector is shifted to the
    # other end of the spectrum.
    del n_iter
    n, k = start.shape
    if k >= n:
        raise ValueError(f"n_components must be below the {n} rows for the spectral solvers; got {k}")
    degree = _bring_to_host(query.graph.degree)[:, None]
    weight = np.sqrt(degree) if normalised else np.ones((n, 1))
    constant = weight / np.linalg.norm(weight)
    beyond = 2 * float((degree / weight**2).max()) + 1

    def multiply(z: Floats) -> Floats:
        product = _bring_to_host(query.gradient(convert_like(z / weight, start))) / weight
        return np.asarray(product + beyond * constant * (constant * z).sum())

    try:
        _, vectors = eigsh(
            _make_operator((n, 1), multiply), k=k, which="SA", v0=np.random.default_rng(0).standard_normal(n)
        )
    except ArpackNoConvergence:
        raise ValueError("the eigenvectors did not converge: use a larger bandwidth or another solver") from None
    vectors = vectors / weight
    peaks = vectors[np.argmax(np.abs(vectors), axis=0), np.arange(k)]
    Z = convert_like(vectors * np.sign(peaks), start)
    Z = Z * find_norm_factor(Z) if rescale else Z
    return Z, [query.objective(Z)]


SOLVERS: dict[str, Callable[[ManifoldQuery, Array, int, bool], Result]] = {
    "majorize": majorize,
    "cccp": cccp,
    "spectral": spectral,
    "eigenmaps": partial(spectral, normalised=True),
}


@dataclass(eq=False, repr=False)
class ReferenceManifold(SupervisedManifold):
    """The supervised manifold by another solver.

    Parameters
    ----------
    solver : {"majorize", "cccp", "spectral", "eigenmaps"}, default="majorize"
        "majorize" is the query, eq. 4 of the 2022 paper. "cccp" is the first pass of the 2021 paper (its eq. 6),
        "spectral" the eigenvectors of ``L_X - alpha L_Y`` (its eq. 3), "eigenmaps" those relative to the degrees,
        ``Z' D Z = I`` (Laplacian eigenmaps, if ``label_weight=0``). The last two take no steps.

    All other parameters are those of :class:`nearveil.SupervisedManifold`.
    """

    solver: str = parameter("majorize", StrOptions(set(SOLVERS)))

    def _solve(self, query: ManifoldQuery, start: Array) -> Result:
        return SOLVERS[self.solver](query, start, self.n_iter, self.rescale)


def _make_operator(shape: tuple[int, int], product: Callable[[Floats], Array]) -> LinearOperator:
    """Return an operator on vectors from a product with matrices of this shape."""
    size = math.prod(shape)
    return LinearOperator((size, size), matvec=lambda z: _bring_to_host(product(z.reshape(shape))).ravel(), dtype=float)


def _bring_to_host(array: Array) -> Floats:
    """Copy an array to NumPy, in double precision."""
    return np.asarray(to_numpy(array), dtype=np.float64)
