"""What all graphs have in common: NumPy arrays and torch tensors behind one namespace, checks, and linear operators.

Everything in this room is written against the array API standard. NumPy 2 follows it by itself, so
``array_api_compat`` is imported only when something other than a NumPy array comes in.
"""

from abc import ABC, abstractmethod
from numbers import Real
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = Any  # a NumPy array or a torch tensor; the standard has no static type for "either"


def namespace(*arrays: Array) -> Any:
    """Return the array API namespace that all `arrays` share: NumPy, or array_api_compat's of another library."""
    if all(isinstance(array, np.ndarray | np.generic) for array in arrays):
        return np
    from array_api_compat import array_namespace

    return array_namespace(*arrays)


def as_array(values: Any) -> Array:
    """Return `values` as an array: of its own library where it has one, else of NumPy.

    Tensors are cut off from their gradient graph: no operator here has a derivative.
    """
    if isinstance(values, np.ndarray):
        return values
    if hasattr(values, "detach"):
        return values.detach()
    return values if hasattr(values, "__dlpack__") else np.asarray(values)


def is_host(array: Array) -> bool:
    """Say whether the memory of `array` can be read by NumPy without a copy."""
    return isinstance(array, np.ndarray) or getattr(array.device, "type", "cpu") == "cpu"


def to_numpy(array: Array) -> Any:
    """Return `array` as a NumPy array, sharing memory where it lies on the host."""
    if isinstance(array, np.ndarray):
        return array
    return np.asarray(array.cpu() if hasattr(array, "cpu") else array)


def move_to_library(values: Array, model: Array) -> Array:
    """Return `values` in the library and on the device of `model`, dtype kept."""
    if isinstance(model, np.ndarray):
        return to_numpy(values)
    from array_api_compat import device

    return namespace(model).asarray(values, device=device(model))


def epsilon_of(array: Array) -> float:
    """Return the distance from 1 to the next number in the dtype of `array`."""
    return float(namespace(array).finfo(array.dtype).eps)


def tiny_of(array: Array) -> float:
    """Return the least positive normal number in the dtype of `array`."""
    return float(namespace(array).finfo(array.dtype).smallest_normal)


def column_of_ones(model: Array) -> Array:
    """Return ones of shape (n, 1) with the dtype and device of `model`, an (n, k) array."""
    return namespace(model).ones_like(model[:, :1])


def segment_sum(values: Array, codes: Array, n_segments: int) -> Array:
    """Sum the rows of `values` that share a code from 0 to ``n_segments - 1``; the array API has no such thing."""
    if isinstance(values, np.ndarray):
        sums = [np.bincount(codes, weights=column, minlength=n_segments) for column in values.T]
        return np.stack(sums, axis=1).astype(values.dtype, copy=False)
    doubles = values.double()
    return doubles.new_zeros((n_segments, values.shape[1])).index_add_(0, codes, doubles).to(values.dtype)


def check_unit_rows(X: Array, name: str = "X", least: int = 2) -> Array:
    """Return a copy of `X`, each row divided by its norm, or raise unless they are of norm one up to rounding.

    What is made of one row depends on no other. Errors name the row, never its values.
    """
    X = as_array(X)
    xp = namespace(X)
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
    wide = X if xp.finfo(X.dtype).bits >= 32 else xp.astype(X, xp.float32)
    norms = xp.sqrt(xp.vecdot(wide, wide))
    if not bool(xp.all(xp.isfinite(norms))):
        row = int(xp.argmin(xp.astype(xp.isfinite(norms), xp.int8)))
        raise ValueError(
            f"{name} holds NaN, infinity or a huge number (first in row {row}): remove or repair such rows"
        )
    if bool(xp.any(norms == 0)):
        row = int(xp.argmin(norms))
        raise ValueError(f"{name} holds a row of zeros (row {row}), which has no direction: remove it")
    off = xp.abs(norms - 1)
    if float(xp.max(off)) > max(1e-4, 8 * epsilon_of(X)):
        row = int(xp.argmax(off))
        raise ValueError(
            f"{name} must have rows of norm 1 (row {row} has not): divide each row by its norm, "
            "as sklearn.preprocessing.normalize does"
        )
    return xp.astype(wide / norms[:, None], X.dtype, copy=False)


def check_columns(Z: Array, n: int, model: Array, name: str = "Z") -> Array:
    """Check that `Z` is a finite (n, k) array of the library of `model`, and bring it to its dtype."""
    Z = as_array(Z)
    check_same_library(Z, model, name)
    xp = namespace(Z)
    if Z.ndim != 2 or Z.shape[0] != n:
        raise ValueError(f"{name} must have shape ({n}, k), a row for each row of the graph; got {tuple(Z.shape)}")
    Z = xp.astype(check_real(Z, name), model.dtype, copy=False)
    if not bool(xp.all(xp.isfinite(Z))):
        raise ValueError(f"{name} holds NaN or infinity")
    return Z


def check_same_library(array: Array, model: Array, name: str) -> None:
    """Raise unless `array` is of the library of `model`."""
    if isinstance(array, np.ndarray) != isinstance(model, np.ndarray):
        raise ValueError(
            f"{name} is a {type(array).__name__} but the graph holds {type(model).__name__}: convert one of them"
        )


def check_real(array: Array, name: str) -> Array:
    """Return `array` in floating point; complex numbers, text and objects raise."""
    xp = namespace(array)
    if isinstance(array, np.ndarray) and array.dtype.kind not in "fiub":
        raise ValueError(f"{name} must hold real numbers; got dtype {array.dtype}")
    if xp.isdtype(array.dtype, "complex floating"):
        raise ValueError(f"{name} must hold real numbers; got dtype {array.dtype}")
    return array if xp.isdtype(array.dtype, "real floating") else xp.astype(array, xp.float64)


def check_positive(value: Any, name: str) -> float:
    """Return `value` as a float if it is finite and above zero, else raise with `name`."""
    if not isinstance(value, Real):  # whatever it is, it may hold data: say its type alone
        raise ValueError(f"{name} must be a number above 0; got {type(value).__name__}")
    number = float(value)
    if not (np.isfinite(number) and number > 0):
        raise ValueError(f"{name} must be a finite number above 0; got {number!r}")
    return number


def check_bandwidth(value: float) -> float:
    """Return a bandwidth as a float if its square neither overflows nor vanishes, else raise."""
    bandwidth = check_positive(value, "bandwidth")
    if not 1e-100 < bandwidth < 1e100:
        raise ValueError(f"bandwidth {bandwidth:g} is out of range: use one between 1e-100 and 1e100")
    return bandwidth


class Graph(ABC):
    """A weighted graph without self-loops, as a linear operator that never forms its matrix.

    Attributes
    ----------
    error_bound : float
        Certified largest ``|w~ - w| / w`` over all edges, where ``w`` is the exact weight and ``w~``
        the one this operator uses; 0 where the weights are exact. Rounding is not part of it.
    """

    error_bound: float = 0.0

    def __init__(self, model: Array, n: int, work_dtype: Any) -> None:
        self._model = model  # an array whose library, device and dtype the results have
        self._n = n
        self._work_dtype = work_dtype  # of the arithmetic
        self._degree: Array | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the weight matrix."""
        return (self._n, self._n)

    @property
    def degree(self) -> Array:
        """Sum of the weights of each row, shape (n,). Not to be written to."""
        if self._degree is None:
            self._product_and_degree(namespace(self._model).zeros_like(self._model[:, :0]))
        return self._degree

    def matmul(self, Z: Array) -> Array:
        """Multiply the weight matrix, whose diagonal is zero, with `Z` of shape (n, k)."""
        return self._apply(check_columns(Z, self._n, self._model))

    def laplacian_matmul(self, Z: Array) -> Array:
        """Multiply the Laplacian, degree minus weights, with `Z` of shape (n, k)."""
        Z = check_columns(Z, self._n, self._model)
        product, degree = self._product_and_degree(Z)
        return degree[:, None] * Z - product

    def _product_and_degree(self, Z: Array) -> tuple[Array, Array]:
        """Return weights times `Z` and the degree, in one pass over the edges."""
        if self._degree is not None:
            return self._apply(Z), self._degree
        xp = namespace(Z)
        product = self._apply(xp.concat([column_of_ones(self._model), Z], axis=1))
        self._degree = self._check_degree(xp.asarray(product[:, 0], copy=True))
        if isinstance(self._degree, np.ndarray):
            self._degree.setflags(write=False)
        return product[:, 1:], self._degree

    def _apply(self, Z: Array) -> Array:
        """Multiply in the precision of the arithmetic and return that of the model."""
        xp = namespace(Z)
        if Z.shape[1] == 0:
            return Z
        return xp.astype(self._product(xp.astype(Z, self._work_dtype, copy=False)), self._model.dtype, copy=False)

    def _check_degree(self, degree: Array) -> Array:
        return degree

    @abstractmethod
    def _product(self, Z: Array) -> Array:
        """Multiply the weights with a `Z` of the working dtype that was checked and has a column."""


class GaussianGraph(Graph):
    """Gaussian weights ``exp(-|x_i - x_j|^2 / (2 bandwidth^2))`` between unit rows.

    Built by :func:`nearveil.graph.gaussian_graph`; `method` is "exact", "series" or "neighbors".

    Examples
    --------
    >>> from nearveil.graph import gaussian_graph
    >>> graph = gaussian_graph(np.eye(3), bandwidth=1.0, method="exact")
    >>> graph.shape, graph.degree.round(3)
    ((3, 3), array([0.736, 0.736, 0.736]))
    """

    method: str

    def __init__(self, X: Array, bandwidth: float, model: Array) -> None:
        half = namespace(X).finfo(X.dtype).bits < 32  # rows of 16 bits are multiplied as they are, sums kept in 32
        super().__init__(model, X.shape[0], model.dtype if half else X.dtype)
        self._X = X
        self.bandwidth = bandwidth

    @property
    def _sharpness(self) -> float:
        """The u of ``w = exp(u (x_i.x_j - 1))``, which is the Gaussian weight on unit rows."""
        return self.bandwidth**-2

    def interpolate(self, X: Array, Z: Array) -> Array:
        """Average the rows of `Z`, of shape (n, k), with the weights between new unit rows `X` and those of the graph.

        This is the fixed point of the manifold's step for a new, unlabelled row: it rests where the kernel average of
        all other rows lies.

        Examples
        --------
        >>> from nearveil.graph import gaussian_graph
        >>> graph = gaussian_graph(np.eye(3), bandwidth=0.5)
        >>> graph.interpolate(np.eye(3)[:1], np.array([[1.0], [0.0], [0.0]])).round(3)
        array([[0.965]])
        """
        Z = check_columns(Z, self._n, self._model)
        X = as_array(X)
        check_same_library(X, self._model, "X")
        X = check_unit_rows(namespace(X).astype(check_real(X, "X"), self._X.dtype, copy=False), least=0)
        if X.shape[1] != self._X.shape[1]:
            raise ValueError(f"X has {X.shape[1]} features, but the graph was built with {self._X.shape[1]}")
        if X.shape[0] == 0:
            return Z[:0, :]
        xp = namespace(Z)
        values = xp.astype(xp.concat([column_of_ones(self._model), Z], axis=1), self._work_dtype, copy=False)
        sums = self._cross_product(X, values)
        return xp.astype(sums[:, 1:] / self._check_degree(sums[:, 0])[:, None], self._model.dtype, copy=False)

    def _check_degree(self, degree: Array) -> Array:
        xp = namespace(degree)
        lost = degree < tiny_of(degree) / epsilon_of(degree)
        if bool(xp.any(lost)):
            raise ValueError(
                f"the degree of {int(xp.sum(xp.astype(lost, xp.int64)))} row(s) underflows: at bandwidth "
                f"{self.bandwidth:g} they have no neighbour within reach. Use a larger bandwidth"
            )
        return degree

    @abstractmethod
    def _cross_product(self, X: Array, Z: Array) -> Array:
        """Multiply the (m, n) weights between new rows and those of the graph with `Z`."""
