"""What every graph of this room can be asked."""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from nearveil.graph._arrays import (
    Array,
    as_array,
    check_columns,
    check_real,
    check_same_library,
    check_unit_rows,
    column_of_ones,
    epsilon_of,
    namespace,
    tiny_of,
)


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
        """Multiply the weight matrix, whose diagonal is zero, with `Z`.

        Parameters
        ----------
        Z : array of shape (n, k)

        Returns
        -------
        array of shape (n, k)
        """
        return self._apply(check_columns(Z, self._n, self._model))

    def laplacian_matmul(self, Z: Array) -> Array:
        """Multiply the Laplacian, degree minus weights, with `Z`.

        Parameters
        ----------
        Z : array of shape (n, k)

        Returns
        -------
        array of shape (n, k)
        """
        Z = check_columns(Z, self._n, self._model)
        product, degree = self._product_and_degree(Z)
        return degree[:, None] * Z - product

    def _product_and_degree(self, Z: Array) -> tuple[Array, Array]:
        """Return weights times `Z` and the degree, in one pass over the edges."""
        if self._degree is not None:
            return self._apply(Z), self._degree
        xp = namespace(Z)
        product = self._apply(xp.concat([column_of_ones(self._model), Z], axis=1))
        self._degree = self._checked_degree(xp.asarray(product[:, 0], copy=True))
        if isinstance(self._degree, np.ndarray):
            self._degree.setflags(write=False)
        return product[:, 1:], self._degree

    def _apply(self, Z: Array) -> Array:
        """Multiply in the precision of the arithmetic and return that of the model."""
        xp = namespace(Z)
        if Z.shape[1] == 0:
            return Z
        return xp.astype(self._product(xp.astype(Z, self._work_dtype, copy=False)), self._model.dtype, copy=False)

    def _checked_degree(self, degree: Array) -> Array:
        return degree

    @abstractmethod
    def _product(self, Z: Array) -> Array:
        """Multiply the weights with a `Z` of the working dtype that was checked and has a column."""


class GaussianGraph(Graph):
    """Gaussian weights ``exp(-|x_i - x_j|^2 / (2 bandwidth^2))`` between unit rows.

    Built by :func:`nearveil.graph.gaussian_graph`.

    Attributes
    ----------
    method : str
        How the weights are applied: "exact", "series" or "neighbors".
    bandwidth : float
    error_bound : float
        See :class:`Graph`.
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
        """Average the rows of `Z` with the weights between new rows and those of the graph.

        This is the fixed point of the manifold's step for a new, unlabelled row: it rests where the
        kernel average of all other rows lies.

        Parameters
        ----------
        X : array of shape (m, d)
            New unit rows.
        Z : array of shape (n, k)
            A value for each row of the graph.

        Returns
        -------
        array of shape (m, k)

        Examples
        --------
        >>> import numpy as np
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
        return xp.astype(sums[:, 1:] / self._checked_degree(sums[:, 0])[:, None], self._model.dtype, copy=False)

    def _checked_degree(self, degree: Array) -> Array:
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
