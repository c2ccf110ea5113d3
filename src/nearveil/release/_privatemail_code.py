"""What the authors' program of 2022 does differently from their paper."""

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class CentredDistances:
    """The program's label "Laplacian": of double-centred distances between integer labels.

    Its kernel is ``K = -1/2 J |y_i - y_j| J`` with ``J = I - 11'/n``. The rows of K sum to zero, so the
    "Laplacian", degree minus kernel, is -K: what should repel within a class pulls the embedding to
    an order of the labels. Products take the sums of each class; no n x n matrix is formed.

    Examples
    --------
    >>> CentredDistances(np.array([0, 2])).laplacian_matmul(np.eye(2))
    array([[-0.5,  0.5],
           [ 0.5, -0.5]])
    """

    def __init__(self, labels: NDArray[np.int64]) -> None:
        self._classes, self._codes = np.unique(labels, return_inverse=True)
        self._apart = np.abs(self._classes[:, None] - self._classes[None, :]).astype(np.float64)

    def laplacian_matmul(self, Z: Floats) -> Floats:
        """Multiply the "Laplacian" with `Z` of shape (n, k)."""
        sums = np.zeros((len(self._classes), Z.shape[1]))
        np.add.at(sums, self._codes, Z - Z.mean(axis=0))
        product = (self._apart @ sums)[self._codes]
        found: Floats = (product - product.mean(axis=0)) / 2
        return found


def code_sensitivity(start: Floats, *, bandwidth: float, label_weight: float, n_classes: int) -> float:
    """Return the program's bound: Lemma 1 with c where the paper has c^2, in one of its places. Not sound.

    Examples
    --------
    >>> start = np.random.default_rng(0).normal(size=(1001, 2))
    >>> round(code_sensitivity(start, bandwidth=6.0, label_weight=0.6, n_classes=98))
    538
    """
    n, s2, alpha, c = len(start), bandwidth**2, label_weight, n_classes - 1
    low = n * math.exp(-2 / s2) + math.exp(-1 / (2 * s2)) - 1
    high = n + math.exp(-1 / (2 * s2)) - 1
    low_added = (n + 1) * math.exp(-2 / s2) - 1
    if min(low, low_added) <= 0:
        raise ValueError(f"bandwidth must be larger: the program's bound breaks down for {n} rows at {bandwidth:g}")
    label = (n + 1) * math.exp(-c / (2 * s2)) - 1  # the paper has c^2 here
    diagonal = alpha**2 * ((n / low) ** 2 + (n / low_added) ** 2 - 2 * label**2 / (n * high))
    mixed = 2 * alpha * math.exp(-(c**2 + 4) / (2 * s2))
    off_diagonal = (
        (alpha**2 + 1) * (low**-2 + low_added**-2)
        - mixed * (high**-2 + n**-2)
        - 2 * (alpha**2 * math.exp(-(c**2) / s2) + math.exp(-4 / s2)) / (n * high)
        + 4 * alpha / (low * low_added)
    )
    return (n * off_diagonal + diagonal) * math.sqrt(n + 1) / 2 * float(np.linalg.norm(start))


def code_scale(sensitivity: float, epsilon: float, delta: float) -> float:
    """Return the program's standard deviation, which is what the paper calls the variance.

    Examples
    --------
    >>> f"{code_scale(1.0, 1.0, 1e-5):.3f}"
    '23.472'
    """
    return 2 * math.log(1.25 / delta) * (sensitivity / epsilon) ** 2
