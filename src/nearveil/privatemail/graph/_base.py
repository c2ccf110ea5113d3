"""Gaussian graphs as linear operators, on NumPy arrays and torch tensors, and the checks of their arguments.

The package uses the array API standard, which NumPy 2 implements; ``array_api_compat`` is for other libraries.
"""

from abc import ABC, abstractmethod
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = Any  # a NumPy array or a torch tensor; the standard has no static type for "either"


def find_namespace(array: Array) -> Any:
    """Return the array API namespace of `array`: NumPy, or that of array_api_compat."""
    if isinstance(array, np.ndarray | np.generic):
        return np
    from array_api_compat import array_namespace

    return array_namespace(array)


def as_array(values: Any) -> Array:
    """Return an array or tensor as it is, and other values as a NumPy array. Tensors are detached from their graph."""
    if hasattr(values, "detach"):
        return values.detach()
    return values if hasattr(values, "__dlpack__") else np.asarray(values)


def is_host(array: Array) -> bool:
    """Return whether `array` is in host memory."""
    return isinstance(array, np.ndarray) or getattr(array.device, "type", "cpu") == "cpu"


def to_numpy(array: Array) -> Any:
    """Return `array` as a NumPy array, without a copy if it is in host memory."""
    return np.asarray(array.cpu() if hasattr(array, "cpu") else array)


def move_to_library(values: Array, model: Array) -> Array:
    """Return `values` in the library and on the device of `model`, with their dtype."""
    if isinstance(model, np.ndarray):
        return to_numpy(values)
    return find_namespace(model).asarray(values, device=model.device)


def find_limits(array: Array) -> Any:
    """Return the limits of the floating-point dtype of `array`."""
    return find_namespace(array).finfo(array.dtype)


def check_unit_rows(X: Array, name: str = "X", least: int = 2) -> Array:
    """Divide the rows of a copy of `X` by their norms, about one; an error names the row, never its values."""
    X = as_array(X)
    xp = find_namespace(X)
    if X.ndim != 2 or X.shape[1] == 0:
        raise ValueError(
            f"{name} must be a 2-D array (rows, features) with at least one feature; got shape {tuple(X.shape)}"
        )
    if X.shape[0] < least:
        raise ValueError(f"{name} has {X.shape[0]} row(s); it needs at least {least}")
    if not xp.isdtype(X.dtype, "real floating"):
        raise ValueError(f"{name} must hold floating-point numbers; got dtype {X.dtype}: convert it first")
    if X.shape[0] == 0:
        return X
    wide = X if find_limits(X).bits >= 32 else xp.astype(X, xp.float32)
    norms = xp.sqrt(xp.vecdot(wide, wide))
    unit = xp.abs(norms - 1) <= max(1e-4, 8 * float(find_limits(X).eps))
    for valid, problem in (
        (xp.isfinite(norms), "holds NaN, infinity or a huge number (first in row {}): remove or repair such rows"),
        (norms != 0, "holds a row of zeros (row {}), which has no direction: remove it"),
        (unit, "must have rows of norm 1 (row {} has not): divide each row by its norm, "
               "as sklearn.preprocessing.normalize does"),
    ):  # fmt: skip
        if not bool(xp.all(valid)):
            raise ValueError(f"{name} {problem.format(int(xp.argmin(xp.astype(valid, xp.int8))))}")
    return xp.astype(wide / norms[:, None], X.dtype, copy=False)


def check_real(values: Array, name: str, model: Array | None = None) -> Array:
    """Return an array of real numbers in floating point; of the library and in the dtype of `model`, if given."""
    array = as_array(values)
    on_numpy = isinstance(array, np.ndarray)
    if model is not None and on_numpy != isinstance(model, np.ndarray):
        raise ValueError(
            f"{name} is a {type(array).__name__} but the graph holds {type(model).__name__}: convert one of them"
        )
    xp = find_namespace(array)
    if not (array.dtype.kind in "fiub" if on_numpy else not xp.isdtype(array.dtype, "complex floating")):
        raise ValueError(f"{name} must hold real numbers; got dtype {array.dtype}")
    if model is not None:
        return xp.astype(array, model.dtype, copy=False)
    return array if xp.isdtype(array.dtype, "real floating") else xp.astype(array, xp.float64)


def check_columns(Z: Array, n: int, model: Array | None = None) -> Array:
    """Return `Z` as a finite (n, k) array by :func:`check_real`, or raise."""
    Z = check_real(Z, "Z", model)
    if Z.ndim != 2 or Z.shape[0] != n:
        raise ValueError(f"Z must have shape ({n}, k), a row for each row of the graph; got {tuple(Z.shape)}")
    if not bool(find_namespace(Z).isfinite(Z).all()):
        raise ValueError("Z holds NaN or infinity")
    return Z


class GaussianGraph(ABC):
    """Gaussian weights ``exp(-|x_i - x_j|^2 / (2 bandwidth^2))`` between unit rows, without self-loops.

    A linear operator that never forms its matrix, built by :func:`nearveil.privatemail.graph.gaussian_graph`; `method`
    is "exact" or "series". `error_bound` is the certified largest ``|w~ - w| / w`` of an edge, besides rounding.

    Examples
    --------
    >>> from nearveil.privatemail.graph import gaussian_graph
    >>> graph = gaussian_graph(np.eye(3), bandwidth=1.0, method="exact")
    >>> graph.shape, graph.degree.round(3)
    ((3, 3), array([0.736, 0.736, 0.736]))
    """

    method: str
    error_bound: float = 0.0

    def __init__(self, X: Array, bandwidth: float, model: Array) -> None:
        self._X = X
        self.bandwidth = bandwidth
        self._sharpness = bandwidth**-2  # the u of ``w = exp(u (x_i.x_j - 1))``, the Gaussian weight on unit rows
        self._model = model  # ones of shape (n, 1); results have its library, device and dtype
        # 16-bit rows are multiplied as they are, with 32-bit sums.
        self._work_dtype = model.dtype if find_limits(X).bits < 32 else X.dtype
        self._degree: Array | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the weight matrix."""
        return (self._model.shape[0], self._model.shape[0])

    @property
    def degree(self) -> Array:
        """Sum of the weights of each row, shape (n,). Read-only."""
        if self._degree is None:
            self._product_and_degree(self._model[:, :0])
        return self._degree

    def matmul(self, Z: Array) -> Array:
        """Multiply the weight matrix, with a zero diagonal, by `Z` of shape (n, k)."""
        return self._apply(check_columns(Z, self.shape[0], self._model))

    def laplacian_matmul(self, Z: Array) -> Array:
        """Multiply the Laplacian, degree minus weights, by `Z` of shape (n, k)."""
        Z = check_columns(Z, self.shape[0], self._model)
        product, degree = self._product_and_degree(Z)
        return degree[:, None] * Z - product

    def interpolate(self, X: Array, Z: Array) -> Array:
        """Average the rows of `Z`, of shape (n, k), with the weights between new unit rows `X` and those of the graph.

        This is the fixed point of the manifold's step for a new, unlabelled row: the kernel average of all other rows.

        Examples
        --------
        >>> from nearveil.privatemail.graph import gaussian_graph
        >>> graph = gaussian_graph(np.eye(3), bandwidth=0.5)
        >>> graph.interpolate(np.eye(3)[:1], np.array([[1.0], [0.0], [0.0]])).round(3)
        array([[0.965]])
        """
        Z = check_columns(Z, self.shape[0], self._model)
        X = check_unit_rows(check_real(X, "X", self._X), least=0)
        if X.shape[1] != self._X.shape[1]:
            raise ValueError(f"X has {X.shape[1]} features, but the graph was built with {self._X.shape[1]}")
        if X.shape[0] == 0:
            return Z[:0, :]
        xp = find_namespace(Z)
        values = xp.astype(xp.concat([self._model, Z], axis=1), self._work_dtype, copy=False)
        sums = self._cross_product(X, values)
        return xp.astype(sums[:, 1:] / self._check_degree(sums[:, 0])[:, None], self._model.dtype, copy=False)

    def _product_and_degree(self, Z: Array) -> tuple[Array, Array]:
        """Return weights times `Z` and the degree, in one pass over the edges."""
        if self._degree is not None:
            return self._apply(Z), self._degree
        xp = find_namespace(Z)
        product = self._apply(xp.concat([self._model, Z], axis=1))
        self._degree = self._check_degree(xp.asarray(product[:, 0], copy=True))
        if isinstance(self._degree, np.ndarray):
            self._degree.setflags(write=False)
        return product[:, 1:], self._degree

    def _apply(self, Z: Array) -> Array:
        """Multiply in the working precision; return the dtype of the model."""
        if Z.shape[1] == 0:
            return Z
        xp = find_namespace(Z)
        return xp.astype(self._product(xp.astype(Z, self._work_dtype, copy=False)), self._model.dtype, copy=False)

    def _check_degree(self, degree: Array) -> Array:
        xp, limits = find_namespace(degree), find_limits(degree)
        lost = degree < float(limits.smallest_normal) / float(limits.eps)
        if bool(xp.any(lost)):
            raise ValueError(
                f"the degree of {int(xp.sum(xp.astype(lost, xp.int64)))} row(s) underflows: at bandwidth "
                f"{self.bandwidth:g} they have no neighbours. Use a larger bandwidth"
            )
        return degree

    @abstractmethod
    def _product(self, Z: Array) -> Array:
        """Multiply the weights by a checked `Z` of the working dtype with at least one column."""

    @abstractmethod
    def _cross_product(self, X: Array, Z: Array) -> Array:
        """Multiply the (m, n) weights between new rows and those of the graph by `Z`."""
