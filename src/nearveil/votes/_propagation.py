"""From a few noisy answers to labels for all public rows. Nothing here sees a private label."""

import math
from typing import Self

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.cluster import MiniBatchKMeans
from sklearn.decomposition import PCA
from sklearn.metrics import pairwise_distances_argmin
from sklearn.metrics.pairwise import rbf_kernel
from sklearn.neighbors import kneighbors_graph

Rows = NDArray[np.float64]

_EXACT = 53  # bits of a whole number that float64 holds
_FRIENDS = 10  # neighbours of a row in the graph of the public rows
_STEPS = 30  # of spreading; what is left of the start falls like _KEEP to this power
_KEEP = 0.9  # share of a row's label that comes from its neighbours
_AT_ONCE = 4096  # rows of a kernel matrix


class HalfWhitening(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Principal components of the public rows, each scaled by its variance to the power of -1/4.

    Fitted on public rows, it may be used on private ones: a row's image depends on that row alone, bit for bit. Rows
    and components are rounded to whole multiples of a public step so fine that every product and every sum of them is
    a whole number below 2^53; such sums are exact in any order, so batches cannot matter (attacked by
    ``tests/votes/test_student.py``).

    `n_components`: At most so many.
    `reach_`: The largest magnitude of a public value; larger ones are cut off.
    """

    def __init__(self, n_components: int = 64, random_state: int = 0) -> None:
        self.n_components = n_components
        self.random_state = random_state

    def fit(self, X: Rows, y: None = None) -> Self:  # noqa: ARG002
        """Learn the components from public rows."""
        n, d = X.shape
        if not np.ptp(X, axis=0).any():
            raise ValueError("public must hold rows whose features differ")
        found = PCA(min(self.n_components, n - 1, d), random_state=self.random_state).fit(X)
        varied = found.explained_variance_ > 1e-9 * found.explained_variance_[0]
        self._bits = (_EXACT - math.ceil(math.log2(d + 1))) // 2
        self.reach_ = float(np.abs(X).max()) or 1.0
        self._components = np.rint(found.components_[varied].T * 2.0**self._bits)
        self._mean = self._whole(found.mean_[None]) @ self._components
        self._scale = found.explained_variance_[varied] ** -0.25 * self.reach_ * 4.0**-self._bits
        return self

    def transform(self, X: Rows) -> Rows:
        """Map rows."""
        mapped: Rows = (self._whole(X) @ self._components - self._mean) * self._scale
        return mapped

    def _whole(self, X: Rows) -> Rows:
        return np.rint(np.clip(np.asarray(X, dtype=np.float64) / self.reach_, -1, 1) * 2.0**self._bits)


def unit(rows: Rows) -> Rows:
    """Return rows of norm 1; rows of zeros stay."""
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(norms > 0, norms, 1.0)


def typical(rows: Rows, count: int, seed: int) -> NDArray[np.int64]:
    """Return the public rows to ask about: those nearest to the centres of `count` clusters.

    Returns: In no order that means anything; filled up at random where clusters share a row.
    """
    rng = np.random.default_rng(seed)
    if count >= len(rows):
        return rng.permutation(len(rows))
    found = MiniBatchKMeans(count, random_state=seed, n_init=1, batch_size=2048, max_iter=20).fit(rows)
    chosen = np.unique(pairwise_distances_argmin(found.cluster_centers_, rows))
    others = rng.permutation(np.setdiff1d(np.arange(len(rows)), chosen))
    return rng.permutation(np.concatenate([chosen, others[: count - len(chosen)]]))


def graph(rows: Rows) -> sparse.csr_array:
    """Return the normalised graph of the nearest public neighbours."""
    links = sparse.csr_array(kneighbors_graph(rows, min(_FRIENDS, len(rows) - 1)))
    links = links.maximum(links.T)
    scale = sparse.diags_array(1 / np.sqrt(np.maximum(links.sum(axis=1), 1.0)))
    return sparse.csr_array(scale @ links @ scale)


def spread(links: sparse.csr_array, scores: Rows) -> Rows:
    """Let neighbours agree (Zhou et al. 2004): each row keeps a tenth of its own score."""
    result = scores
    for _ in range(_STEPS):
        result = _KEEP * (links @ result) + (1 - _KEEP) * scores
    return result


def regress(rows: Rows, asked: NDArray[np.int64], shares: Rows, noise: float) -> Rows:
    """Return what the noisy shares of votes say about every public row.

    Kernel ridge regression, which is the mean of a Gaussian process. The noise is public, so its regularisation is
    known: the variance of the noise over that of a class's share. Queries that are alike average their noise away.

    `shares`: Noisy counts over the number of voters.
    `noise`: Standard deviation of the noise on a share.
    Returns: Largest magnitude of a row: 1.
    """
    n_classes = shares.shape[1]
    gamma = 1 / max(rows.shape[1] * float(rows.var()), 1e-300)
    kernel = rbf_kernel(rows[asked], gamma=gamma)
    kernel[np.diag_indices_from(kernel)] += max(noise**2 * n_classes**2 / max(n_classes - 1, 1), 1e-6)
    weights = np.linalg.solve(kernel, shares - 1 / n_classes)
    parts = range(0, len(rows), _AT_ONCE)
    scores = np.concatenate([rbf_kernel(rows[i : i + _AT_ONCE], rows[asked], gamma=gamma) @ weights for i in parts])
    scaled: Rows = scores / np.maximum(np.abs(scores).max(axis=1, keepdims=True), 1e-300)
    return scaled
