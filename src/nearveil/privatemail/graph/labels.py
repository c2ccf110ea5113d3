"""The graph of labels: exact, through the sums of each class."""

import math
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from nearveil.privatemail.graph._base import (
    Array,
    Graph,
    as_array,
    check_bandwidth,
    check_real,
    find_namespace,
    move_to_library,
    sum_segments,
    to_numpy,
)

UNLABELLED = -1
_LARGEST_LABEL = 2**53  # beyond it a floating-point label may have been rounded to its neighbour
_KERNEL_BLOCK = 4096  # classes whose kernel rows are made at a time

Encoding = Literal["integer", "one-hot"]


class LabelGraph(Graph):
    """Gaussian weights between labels; built by :func:`label_graph`. `classes` are the distinct labels, sorted.

    Every weight depends on two classes alone, so a product with n rows is: sum the rows of each
    class, multiply the C sums with the C x C kernel, hand each row the result of its class, and
    take out the row itself.

    Examples
    --------
    >>> graph = label_graph([0, 0, 1])
    >>> graph.classes.tolist(), graph.degree.round(3)
    ([0, 1], array([1.607, 1.607, 1.213]))
    """

    def __init__(self, y: Array, codes: NDArray[np.int64], classes: NDArray[Any], bandwidth: float, encoding: Encoding):
        super().__init__(y, y.shape[0], np.float64)
        self.classes = classes
        self.bandwidth = bandwidth
        self.encoding = encoding
        self._codes = codes  # on the host; a row without label has the code C, which no class has

    @property
    def degree(self) -> Array:
        """Sum of the weights of each row, shape (n,), in double precision and in the library of the labels."""
        if self._degree is None:
            self._degree = move_to_library(self._product(np.ones((self._n, 1)))[:, 0], self._model)
        return self._degree

    def matmul(self, Z: Array) -> Array:
        """Multiply the label weights, whose diagonal is zero, with `Z` of shape (n, k)."""
        return self._product(self._check(Z))

    def laplacian_matmul(self, Z: Array) -> Array:
        """Multiply the Laplacian of the label weights with `Z` of shape (n, k)."""
        Z = self._check(Z)
        degree = find_namespace(Z).astype(move_to_library(self.degree, Z), Z.dtype)
        return degree[:, None] * Z - self._product(Z)

    def _check(self, Z: Array) -> Array:
        Z = check_real(as_array(Z), "Z")
        xp = find_namespace(Z)
        if Z.ndim != 2 or Z.shape[0] != self._n:
            raise ValueError(f"Z must have shape ({self._n}, k), a row for each label; got {tuple(Z.shape)}")
        if not bool(xp.all(xp.isfinite(Z))):
            raise ValueError("Z holds NaN or infinity")
        return Z

    def _product(self, Z: Array) -> Array:
        xp = find_namespace(Z)
        if Z.shape[1] == 0:
            return Z
        n_classes = len(self.classes)
        codes = move_to_library(self._codes, Z)
        sums = sum_segments(Z, codes, n_classes + 1)[:n_classes, :]
        none = xp.zeros_like(Z[:1, :])
        of_own_class = xp.take(xp.concat([sums, none]), codes, axis=0)
        of_other_classes = xp.take(xp.concat([self._kernel_times(sums), none]), codes, axis=0)
        labelled = xp.astype(codes < n_classes, Z.dtype)
        return of_other_classes + (of_own_class - labelled[:, None] * Z)

    def _kernel_times(self, sums: Array) -> Array:
        """Multiply the kernel with sums of other classes alone: subtracting a class's own later would cancel digits."""
        xp = find_namespace(sums)
        if self.encoding == "one-hot":  # one value for any two classes
            return math.exp(-(self.bandwidth**-2)) * (xp.sum(sums, axis=0)[None, :] - sums)
        parts = []
        for start in range(0, len(self.classes), _KERNEL_BLOCK):
            apart = self.classes[start : start + _KERNEL_BLOCK, None] - self.classes[None, :]
            kernel = np.exp(-0.5 * (apart / self.bandwidth) ** 2) * (apart != 0)
            parts.append(xp.matmul(xp.astype(move_to_library(kernel, sums), sums.dtype), sums))
        return xp.concat(parts) if parts else sums


def label_graph(y: Array, bandwidth: float = 1.0, encoding: Encoding = "integer") -> LabelGraph:
    """Build the Gaussian graph of labels.

    Parameters
    ----------
    y : array-like of shape (n,)
        Labels. -1 (among names, also "-1") means unlabelled: that row has no edges.
    bandwidth : float, default=1.0
        The s of ``exp(-|y_i - y_j|^2 / (2 s^2))``.
    encoding : {"integer", "one-hot"}, default="integer"
        "integer": labels are whole numbers from 0 and the kernel takes their difference, as the
        papers do. "one-hot": any two classes are equally far apart, ``|y_i - y_j|^2 = 2``; labels
        may then be of any kind that can be sorted.

    Examples
    --------
    >>> import numpy as np
    >>> graph = label_graph([0, 0, 1, -1], bandwidth=1.0)
    >>> graph.degree.round(3)
    array([1.607, 1.607, 1.213, 0.   ])
    >>> graph.matmul(np.eye(4)).round(3)
    array([[0.   , 1.   , 0.607, 0.   ],
           [1.   , 0.   , 0.607, 0.   ],
           [0.607, 0.607, 0.   , 0.   ],
           [0.   , 0.   , 0.   , 0.   ]])
    """
    bandwidth = check_bandwidth(bandwidth)
    if encoding not in ("integer", "one-hot"):
        raise ValueError(f'encoding must be "integer" or "one-hot"; got {encoding!r}')
    y = as_array(y)
    host = _check_labels(to_numpy(y), encoding)
    labelled = host != (UNLABELLED if host.dtype.kind in "iub" else np.array(str(UNLABELLED)).astype(host.dtype.kind))
    classes, codes_of_labelled = np.unique(host[labelled], return_inverse=True)
    codes = np.full(host.shape, len(classes), dtype=np.int64)
    codes[labelled] = codes_of_labelled
    return LabelGraph(y, codes, classes, bandwidth, encoding)


def _check_labels(y: NDArray[Any], encoding: Encoding) -> NDArray[Any]:
    """Return the labels as integers or names, or raise."""
    if y.ndim != 1 or y.shape[0] == 0:
        raise ValueError(f"y must be a 1-D array with a label for each row; got shape {y.shape}")
    if y.dtype.kind == "O":  # numbers or names in a box of objects
        y = np.asarray(y.tolist())
    if y.dtype.kind not in "fiubUS":
        raise ValueError(f"Unknown label type: y has dtype {y.dtype}; use whole numbers or names")
    if y.dtype.kind in "fu":
        y = _convert_to_integers(y)
    if encoding == "integer":
        if y.dtype.kind not in "iub":
            raise ValueError('y must hold whole numbers where encoding="integer"; use encoding="one-hot" for names')
        y = y.astype(np.int64)
        if np.any(y < UNLABELLED):
            raise ValueError("y must hold labels from 0 upwards, or -1 for a row without label")
    return y


def _convert_to_integers(y: NDArray[Any]) -> NDArray[np.int64]:
    """Return floating-point or unsigned labels as signed integers, or raise where one would change."""
    if not np.all(np.isfinite(y)):
        raise ValueError("y holds NaN or infinity: mark rows without label with -1")
    if np.any(y != np.round(y)):
        raise ValueError("y must hold class labels, but it has fractions")
    if np.any(np.abs(y) > _LARGEST_LABEL):
        raise ValueError(f"y must hold labels up to {_LARGEST_LABEL}: number the classes from 0")
    return y.astype(np.int64)
