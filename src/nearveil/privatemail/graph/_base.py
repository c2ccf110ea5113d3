"""Base of all graphs: NumPy and torch behind one namespace, checks and linear operators.

This package uses the array API standard. NumPy 2 implements it, so ``array_api_compat`` is imported for other libraries
only.
"""

from abc import ABC, abstractmethod
from typing import Any, TypeAlias

import numpy as np

from nearveil.privacy.checks import check_range

Array: TypeAlias = Any  # a NumPy array or a torch tensor; the standard has no static type for "either"


def find_namespace(*arrays: Array) -> Any:
    """Return the array API namespace of `arrays`: NumPy, or that of array_api_compat."""
    if all(isinstance(array, np.ndarray | np.generic) for array in arrays):
        return np
    from array_api_compat import array_namespace

    return array_namespace(*arrays)


def as_array(values: Any) -> Array:
    """Return an array or tensor as it is, and other values as a NumPy array. Tensors are detached from their graph."""
    if isinstance(values, np.ndarray):
        return values
    if hasattr(values, "detach"):
        return values.detach()
    return values if hasattr(values, "__dlpack__") else np.asarray(values)


def is_host(array: Array) -> bool:
    """Return whether `array` is in host memory."""
    return isinstance(array, np.ndarray) or getattr(array.device, "type", "cpu") == "cpu"


def to_numpy(array: Array) -> Any:
    """Return `array` as a NumPy array, without a copy if it is in host memory."""
    if isinstance(array, np.ndarray):
        return array
    return np.asarray(array.cpu() if hasattr(array, "cpu") else array)


def move_to_library(values: Array, model: Array) -> Array:
    """Return `values` in the library and on the device of `model`, with their dtype."""
    if isinstance(model, np.ndarray):
        return to_numpy(values)
    from array_api_compat import device

    return find_namespace(model).asarray(values, device=device(model))


def find_limits(array: Array) -> Any:
    """Return the limits of the floating-point dtype of `array`."""
    return find_namespace(array).finfo(array.dtype)


def make_ones(model: Array) -> Array:
    """Return ones of shape (n, 1) with the dtype and device of `model`, an (n, k) array."""
    return find_namespace(model).ones_like(model[:, :1])


def check_unit_rows(X: Array, least: int = 2) -> Array:
    """Divide each row of a copy of `X` by its norm, or raise unless the norms are one up to rounding.

    Rows are independent of each other. Errors name the row, never its values.
    """
    X = as_array(X)
    xp = find_namespace(X)
    if X.ndim != 2 or X.shape[1] == 0:
        raise ValueError(
            f"X must be a 2-D array (rows, features) with at least one feature; got shape {tuple(X.shape)}"
        )
    if X.shape[0] < least:
        raise ValueError(f"X has {X.shape[0]} row(s); it needs at least {least}")
    if not xp.isdtype(X.dtype, "real floating"):
        raise ValueError(f"X must hold floating-point numbers; got dtype {X.dtype}: convert it first")
    if X.shape[0] == 0:
        return X
    wide = X if xp.finfo(X.dtype).bits >= 32 else xp.astype(X, xp.float32)
    norms = xp.sqrt(xp.vecdot(wide, wide))
    if not bool(xp.all(xp.isfinite(norms))):
        row = int(xp.argmin(xp.astype(xp.isfinite(norms), xp.int8)))
        raise ValueError(f"X holds NaN, infinity or a huge number (first in row {row}): remove or repair such rows")
    if bool(xp.any(norms == 0)):
        row = int(xp.argmin(norms))
        raise ValueError(f"X holds a row of zeros (row {row}), which has no direction: remove it")
    off = xp.abs(norms - 1)
    if float(xp.max(off)) > max(1e-4, 8 * float(find_limits(X).eps)):
        row = int(xp.argmax(off))
        raise ValueError(
            f"X must have rows of norm 1 (row {row} has not): divide each row by its norm, "
            "as sklearn.preprocessing.normalize does"
        )
    return xp.astype(wide / norms[:, None], X.dtype, copy=False)


def check_columns(Z: Array, n: int, model: Array | None = None) -> Array:
    """Return `Z` as a finite (n, k) array of floats, in the dtype of `model`, or raise if the libraries differ."""
    Z = as_array(Z)
    if model is not None:
        check_same_library(Z, model, "Z")
    if Z.ndim != 2 or Z.shape[0] != n:
        raise ValueError(f"Z must have shape ({n}, k), a row for each row of the graph; got {tuple(Z.shape)}")
    Z = check_real(Z, "Z") if model is None else find_namespace(Z).astype(check_real(Z, "Z"), model.dtype, copy=False)
    if not bool(find_namespace(Z).isfinite(Z).all()):
        raise ValueError("Z holds NaN or infinity")
    return Z


def check_same_library(array: Array, model: Array, name: str) -> None:
    """Raise unless `array` and `model` are of one library."""
    if isinstance(array, np.ndarray) != isinstance(model, np.ndarray):
        raise ValueError(
            f"{name} is a {type(array).__name__} but the graph holds {type(model).__name__}: convert one of them"
        )


def check_real(array: Array, name: str) -> Array:
    """Return `array` in floating point; raise for complex numbers, text and objects."""
    xp, on_numpy = find_namespace(array), isinstance(array, np.ndarray)
    is_real = array.dtype.kind in "fiub" if on_numpy else not xp.isdtype(array.dtype, "complex floating")
    if not is_real:
        raise ValueError(f"{name} must hold real numbers; got dtype {array.dtype}")
    return array if xp.isdtype(array.dtype, "real floating") else xp.astype(array, xp.float64)


def check_bandwidth(value: float) -> float:
    """Return a bandwidth as a float, or raise if its square could overflow or vanish."""
    return check_range(value, "bandwidth", 1e-100, 1e100)


class Graph(ABC):
    """A weighted graph without self-loops, as a linear operator that never forms its matrix.

    `error_bound` is the certified largest ``|w~ - w| / w`` of an edge with computed weight w~, except for rounding.
    """

    error_bound: float = 0.0

    def __init__(self, model: Array, n: int, work_dtype: Any) -> None:
        self._model = model  # results have its library, device and dtype
        self._n = n
        self._work_dtype = work_dtype  # of the arithmetic
        self._degree: Array | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the weight matrix."""
        return (self._n, self._n)

    @property
    def degree(self) -> Array:
        """Sum of the weights of each row, shape (n,). Read-only."""
        if self._degree is None:
            self._product_and_degree(find_namespace(self._model).zeros_like(self._model[:, :0]))
        return self._degree

    def matmul(self, Z: Array) -> Array:
        """Multiply the weight matrix, with a zero diagonal, by `Z` of shape (n, k)."""
        return self._apply(check_columns(Z, self._n, self._model))

    def laplacian_matmul(self, Z: Array) -> Array:
        """Multiply the Laplacian, degree minus weights, by `Z` of shape (n, k)."""
        Z = check_columns(Z, self._n, self._model)
        product, degree = self._product_and_degree(Z)
        return degree[:, None] * Z - product

    def _product_and_degree(self, Z: Array) -> tuple[Array, Array]:
        """Return weights times `Z` and the degree, in one pass over the edges."""
        if self._degree is not None:
            return self._apply(Z), self._degree
        xp = find_namespace(Z)
        product = self._apply(xp.concat([make_ones(self._model), Z], axis=1))
        self._degree = self._check_degree(xp.asarray(product[:, 0], copy=True))
        if isinstance(self._degree, np.ndarray):
            self._degree.setflags(write=False)
        return product[:, 1:], self._degree

    def _apply(self, Z: Array) -> Array:
        """Multiply in the working precision; return the dtype of the model."""
        xp = find_namespace(Z)
        if Z.shape[1] == 0:
            return Z
        return xp.astype(self._product(xp.astype(Z, self._work_dtype, copy=False)), self._model.dtype, copy=False)

    def _check_degree(self, degree: Array) -> Array:
        return degree

    @abstractmethod
    def _product(self, Z: Array) -> Array:
        """Multiply the weights by a checked `Z` of the working dtype with at least one column."""


class GaussianGraph(Graph):
    """Gaussian weights ``exp(-|x_i - x_j|^2 / (2 bandwidth^2))`` between unit rows.

    Built by :func:`nearveil.privatemail.graph.gaussian_graph`; `method` is "exact", "series" or "neighbors".

    Examples
    --------
    >>> from nearveil.privatemail.graph import gaussian_graph
    >>> graph = gaussian_graph(np.eye(3), bandwidth=1.0, method="exact")
    >>> graph.shape, graph.degree.round(3)
    ((3, 3), array([0.736, 0.736, 0.736]))
    """

    method: str

    def __init__(self, X: Array, bandwidth: float, model: Array) -> None:
        half = find_namespace(X).finfo(X.dtype).bits < 32  # 16-bit rows are multiplied as they are, with 32-bit sums
        super().__init__(model, X.shape[0], model.dtype if half else X.dtype)
        self._X = X
        self.bandwidth = bandwidth

    @property
    def _sharpness(self) -> float:
        """The u of ``w = exp(u (x_i.x_j - 1))``, which is the Gaussian weight on unit rows."""
        return self.bandwidth**-2

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
        Z = check_columns(Z, self._n, self._model)
        X = as_array(X)
        check_same_library(X, self._model, "X")
        X = check_unit_rows(find_namespace(X).astype(check_real(X, "X"), self._X.dtype, copy=False), least=0)
        if X.shape[1] != self._X.shape[1]:
            raise ValueError(f"X has {X.shape[1]} features, but the graph was built with {self._X.shape[1]}")
        if X.shape[0] == 0:
            return Z[:0, :]
        xp = find_namespace(Z)
        values = xp.astype(xp.concat([make_ones(self._model), Z], axis=1), self._work_dtype, copy=False)
        sums = self._cross_product(X, values)
        return xp.astype(sums[:, 1:] / self._check_degree(sums[:, 0])[:, None], self._model.dtype, copy=False)

    def _check_degree(self, degree: Array) -> Array:
        xp = find_namespace(degree)
        limits = find_limits(degree)
        lost = degree < float(limits.smallest_normal) / float(limits.eps)
        if bool(xp.any(lost)):
            raise ValueError(
                f"the degree of {int(xp.sum(xp.astype(lost, xp.int64)))} row(s) underflows: at bandwidth "
                f"{self.bandwidth:g} they have no neighbours. Use a larger bandwidth"
            )
        return degree

    @abstractmethod
    def _cross_product(self, X: Array, Z: Array) -> Array:
        """Multiply the (m, n) weights between new rows and those of the graph by `Z`."""
