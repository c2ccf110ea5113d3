"""The graph of labels: exact, through the sums of each class."""

import math
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from nearveil.privacy.checks import check_choice, check_range
from nearveil.privatemail.graph._base import Array, as_array, check_columns, find_namespace, move_to_library, to_numpy

UNLABELLED = -1
_LARGEST_LABEL = 2**53  # beyond it a floating-point label may have been rounded to its neighbour
_KERNEL_BLOCK = 4096  # classes per block of kernel rows

Encoding = Literal["integer", "one-hot"]


class LabelGraph:
    """Gaussian weights between labels; built by :func:`label_graph`. `classes` are the distinct labels, sorted.

    Every weight depends on two classes only: a product with n rows sums the rows of each class, multiplies the C sums
    by the C x C kernel, gives each row the result of its class, and subtracts the row itself.

    Examples
    --------
    >>> graph = label_graph([0, 0, 1])
    >>> graph.classes.tolist(), graph.degree.round(3)
    ([0, 1], array([1.607, 1.607, 1.213]))
    """

    error_bound = 0.0  # every weight is exact

    def __init__(self, y: Array, codes: NDArray[np.int64], classes: NDArray[Any], bandwidth: float, encoding: Encoding):
        self.shape = (len(codes), len(codes))
        self.classes = classes
        self.bandwidth = bandwidth
        self.encoding = encoding
        self._codes = codes  # on the host; rows without label have code C
        self._model = y

    @cached_property
    def degree(self) -> Array:
        """Sum of the weights of each row, shape (n,), in double precision, in the library of the labels."""
        return move_to_library(self._product(np.ones((len(self._codes), 1)))[:, 0], self._model)

    def matmul(self, Z: Array) -> Array:
        """Multiply the label weights, with a zero diagonal, by `Z` of shape (n, k)."""
        return self._product(check_columns(Z, len(self._codes)))

    def laplacian_matmul(self, Z: Array) -> Array:
        """Multiply the Laplacian of the label weights by `Z` of shape (n, k)."""
        Z = check_columns(Z, len(self._codes))
        degree = find_namespace(Z).astype(move_to_library(self.degree, Z), Z.dtype)
        return degree[:, None] * Z - self._product(Z)

    def _product(self, Z: Array) -> Array:
        xp = find_namespace(Z)
        if Z.shape[1] == 0:
            return Z
        n_classes = len(self.classes)
        codes = move_to_library(self._codes, Z)
        sums = _sum_classes(Z, codes, n_classes)
        unlabelled = xp.zeros_like(Z[:1, :])
        same_class = xp.take(xp.concat([sums, unlabelled]), codes, axis=0)
        other_classes = xp.take(xp.concat([self._kernel_times(sums), unlabelled]), codes, axis=0)
        labelled = xp.astype(codes < n_classes, Z.dtype)
        return other_classes + (same_class - labelled[:, None] * Z)

    def _kernel_times(self, sums: Array) -> Array:
        """Multiply the kernel by the sums of other classes; subtracting the same class later would cancel digits."""
        xp = find_namespace(sums)
        if self.encoding == "one-hot":  # one value for any two classes
            return math.exp(-(self.bandwidth**-2)) * (xp.sum(sums, axis=0)[None, :] - sums)
        parts = []
        for start in range(0, len(self.classes), _KERNEL_BLOCK):
            distances = self.classes[start : start + _KERNEL_BLOCK, None] - self.classes[None, :]
            kernel = np.exp(-0.5 * (distances / self.bandwidth) ** 2) * (distances != 0)
            parts.append(xp.matmul(xp.astype(move_to_library(kernel, sums), sums.dtype), sums))
        return xp.concat(parts) if parts else sums


def _sum_classes(Z: Array, codes: Array, n_classes: int) -> Array:
    """Sum the rows of each class, in double precision."""
    if isinstance(Z, np.ndarray):
        sums = [np.bincount(codes, weights=column, minlength=n_classes + 1) for column in Z.T]
        return np.stack(sums, axis=1)[:n_classes].astype(Z.dtype, copy=False)
    doubles = Z.double()
    return doubles.new_zeros((n_classes + 1, Z.shape[1])).index_add_(0, codes, doubles).to(Z.dtype)[:n_classes]


def label_graph(y: Array, bandwidth: float = 1.0, encoding: Encoding = "integer") -> LabelGraph:
    """Build the Gaussian graph of labels.

    Parameters
    ----------
    y : array-like of shape (n,)
        Labels. -1 (among names, also "-1") means unlabelled: that row has no edges.
    bandwidth : float, default=1.0
        The s of ``exp(-|y_i - y_j|^2 / (2 s^2))``.
    encoding : {"integer", "one-hot"}, default="integer"
        "integer": labels are whole numbers from 0 and the kernel takes their difference, as the papers do. "one-hot":
        any two classes are equally far apart, ``|y_i - y_j|^2 = 2``; labels may then be of any kind that can be sorted.

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
    bandwidth = check_range(bandwidth, "bandwidth", 1e-100, 1e100)  # its square must not overflow or vanish
    check_choice(encoding, "encoding", Encoding)
    y = as_array(y)
    host = _check_labels(to_numpy(y), encoding)
    labelled = host != (UNLABELLED if host.dtype.kind in "iub" else np.array(str(UNLABELLED)).astype(host.dtype.kind))
    classes, labelled_codes = np.unique(host[labelled], return_inverse=True)
    codes = np.full(host.shape, len(classes), dtype=np.int64)
    codes[labelled] = labelled_codes
    return LabelGraph(y, codes, classes, bandwidth, encoding)


def _check_labels(y: NDArray[Any], encoding: Encoding) -> NDArray[Any]:
    """Return the labels as signed integers or names, or raise."""
    if y.ndim != 1 or y.shape[0] == 0:
        raise ValueError(f"y must be a 1-D array with a label for each row; got shape {y.shape}")
    if y.dtype.kind == "O":
        y = np.asarray(y.tolist())
    if y.dtype.kind not in "fiubUS":
        raise ValueError(f"Unknown label type: y has dtype {y.dtype}; use whole numbers or names")
    if y.dtype.kind in "fu":
        if not np.all((y == np.round(y)) & (np.abs(y) <= _LARGEST_LABEL)):
            raise ValueError(
                f"y must hold whole numbers up to {_LARGEST_LABEL}, or -1 for a row without label: it holds fractions, "
                "NaN, infinity or larger numbers"
            )
        y = y.astype(np.int64)
    if encoding == "integer":
        if y.dtype.kind not in "iub":
            raise ValueError('y must hold whole numbers if encoding="integer"; use encoding="one-hot" for names')
        y = y.astype(np.int64)
        if np.any(y < UNLABELLED):
            raise ValueError("y must hold labels from 0 upwards, or -1 for a row without label")
    return y
