"""The steps after the release: they use public labels and what was released, and cost nothing."""

import math
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.spatial.distance import cdist
from sklearn.metrics.pairwise import rbf_kernel

from nearveil.graph import gaussian_graph, label_graph
from nearveil.mechanisms.privatemail._steps import Floats, Public
from nearveil.privacy.noise import GaussianNoise, LaplaceNoise, Source, add_noise, gaussian_grid, laplace_grid
from nearveil.privacy.noise.calibration import classical_gaussian_scale
from nearveil.privacy.sensitivity import published_2021, published_2022

_OUT_OF_REACH = 1e-9  # a row of smaller degree has no neighbour worth the name, and stays


@dataclass(frozen=True, eq=False)
class Path:
    """Where the anchors go in T public steps."""

    anchors: Floats
    factors: Floats  # what each step was rescaled by, to bring the anchors to Frobenius norm sqrt(m)


def anchor_path(public: Public, steps: int) -> Path:
    """Move the anchors by the query, its graph rebuilt once from where the private steps left them."""
    rows = [public.embeddings[-1]]
    factors: list[float] = []
    if steps:
        weights = _weights(rows[0], rows[0], public.bandwidth)
        np.fill_diagonal(weights, 0)
    for _ in range(steps):
        drawn = weights @ rows[-1]
        if (labels := public.label_graph) is not None:
            drawn = drawn + public.label_weight * labels.laplacian_matmul(rows[-1])
        moved = _moved(rows[-1], drawn, weights.sum(axis=1))
        factors.append(float(np.sqrt(len(moved)) / np.linalg.norm(moved)))
        rows.append(moved * factors[-1])
    return Path(np.stack(rows), np.array(factors))


def public_steps(public: Public, released: Floats, rows: Floats, path: Path, first: int = 0) -> Floats:
    """Move unlabelled rows along with the anchors, to the end of the path.

    They follow the anchors with weights of the embedding as it was released, and pull at nobody. Rows of
    any number of messages, or of a gallery, move at once.

    `released`: As the private steps left them: what the graph is rebuilt from.
    `rows`: Where they are now.
    `first`: Steps that they have made already.
    """
    if first == len(path.factors):
        return rows
    weights = _weights(released, public.embeddings[-1], public.bandwidth)
    for anchors, factor in zip(path.anchors[first:], path.factors[first:], strict=False):
        rows = factor * _moved(rows, weights @ anchors, weights.sum(axis=1))
    return rows


def _weights(rows: Floats, others: Floats, bandwidth: float) -> Floats:
    """Return Gaussian weights between embedded rows, which are of any norm."""
    found: Floats = np.exp(-cdist(rows, others, "sqeuclidean") / (2 * bandwidth**2))
    return found


def _moved(rows: Floats, drawn: Floats, degree: Floats) -> Floats:
    """Return eq. 4, ``z_i / 2 + (W Z + alpha L_Y Z)_i / (2 D_i)``; a row out of reach stays."""
    reached = degree[:, None] > _OUT_OF_REACH
    return np.where(reached, (rows + drawn / np.where(reached, degree[:, None], 1)) / 2, rows)


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


Labels = NDArray[np.int64]
Version = Literal["2022", "2021", "2022-code"]
Experiment = Literal["cars196", "cub200", "cifar100"]

_NO_DIVISION_BY_ZERO = 1e-9  # the program adds it to every degree

EXPERIMENTS: dict[Experiment, dict[str, float]] = {  # what differs between the columns of Table 2 (2022)
    "cars196": {"bandwidth": 6.0, "label_weight": 0.6},
    "cub200": {"bandwidth": 5.0, "label_weight": 0.5},
    "cifar100": {"bandwidth": 6.0, "label_weight": 0.6},
}

REASONS: dict[Version, str] = {
    "2022": "its sensitivity bound is false (Lemma 1 bounds a square and is used as its root) and the target's own "
    "label is used after the noise, which is not post-processing",
    "2021": "its sensitivity bound holds with a probability that is vacuous, feeds an L2 bound to Laplace noise, is "
    "reused for later iterations that it does not cover, and the target's own label is used after the noise",
    "2022-code": "the program adds noise with a variance for its deviation and uses the target's true label in every "
    "iteration after it: the label is what comes out",
}


class LabelLaplacian(Protocol):
    """What repels: a Laplacian of labels."""

    def laplacian_matmul(self, Z: Floats) -> Floats:
        """Multiply with `Z` of shape (n, k)."""
        ...


@dataclass(frozen=True)
class Recipe:
    """What a publication does, in its own words.

    `epsilon, delta`: As it states them for the whole.
    """

    version: Version
    epsilon: float
    delta: float
    sigma: float  # its bandwidth
    label_weight: float
    start_scale: float
    n_classes: int  # labels are 0 to ``n_classes - 1``
    private_steps: int  # for "2021"; the others take one
    public_steps: int

    @property
    def bandwidth(self) -> float:
        """The s of ``exp(-d^2 / (2 s^2))``; the program has ``exp(-d^2 / sigma^2)``."""
        return self.sigma / math.sqrt(2) if self.version == "2022-code" else self.sigma

    @property
    def rescales(self) -> bool:
        """Whether an embedding is brought to Frobenius norm sqrt(rows) after each step without noise."""
        return self.version == "2022-code"

    @property
    def server_steps(self) -> int:
        """Steps of the server, from its own start: as many as the client's in 2021, T in 2022 (Algorithm 1)."""
        return self.public_steps + (self.private_steps if self.version == "2021" else 0)

    def labels(self, labels: Labels) -> LabelLaplacian:
        """Return the Laplacian of labels: integers in 2022, one-hot in 2021 (Corollary 1.1)."""
        if self.version == "2022-code":
            return CentredDistances(labels)
        return label_graph(labels, self.sigma, "integer" if self.version == "2022" else "one-hot")

    def noise(self, start: Floats) -> GaussianNoise | LaplaceNoise:
        """Return the noise of one private step."""
        if self.version == "2021":
            return self._laplace(start)
        setting: Any = {"bandwidth": self.sigma, "label_weight": self.label_weight, "n_classes": self.n_classes}
        if self.version == "2022":
            change = published_2022(start, **setting)
            scale = classical_gaussian_scale(change, self.epsilon, self.delta)
        else:
            change = code_sensitivity(start, **setting)
            scale = code_scale(change, self.epsilon, self.delta)
        grid = gaussian_grid(min(change, scale), start.size)
        return GaussianNoise(sensitivity=change, scale=scale, size=start.size, grid=grid)

    def _laplace(self, start: Floats) -> LaplaceNoise:
        n, k = start.shape
        change = published_2021(
            n,
            k,
            self.start_scale,
            bandwidth=self.sigma,
            label_weight=self.label_weight,
            n_classes=self.n_classes,
            beta=Decimal(10) ** -math.ceil(4 * k * n / math.log(10)),  # the largest power of ten that it allows
        )
        scale = change / step_epsilon(self.epsilon, self.private_steps, self.delta)
        return LaplaceNoise(sensitivity=change, scale=scale, size=start.size, grid=laplace_grid(change, start.size))


def strong_composition(epsilon: float, steps: int, delta: float) -> float:
    """Return the budget that the 2021 paper states for `steps` iterations of `epsilon` each.

    ``epsilon sqrt(2 k ln(1/delta')) + k epsilon (e^epsilon - 1)/(e^epsilon + 1)``, delta' being the whole
    delta, because Laplace noise has none of its own.

    Examples
    --------
    >>> round(strong_composition(0.1, 2, 1e-5), 4)
    0.6886
    """
    return epsilon * math.sqrt(2 * steps * math.log(1 / delta)) + steps * epsilon * math.tanh(epsilon / 2)


def step_epsilon(total: float, steps: int, delta: float) -> float:
    """Return the epsilon of one iteration for which `strong_composition` states `total`."""
    return float(brentq(lambda epsilon: strong_composition(epsilon, steps, delta) - total, 0, total + 1, xtol=1e-15))


def client_embedding(
    recipe: Recipe, among: Floats, border: Floats, labels: Labels, start: Floats, source: Source
) -> Floats:
    """Embed the client's rows, targets before anchors, and add the publication's noise.

    `among`: Feature weights between anchors, without diagonal.
    `border`: Feature weights from the targets to all rows, without diagonal.
    `labels`: The targets' own included: that is what leaks.
    """
    t = len(border)
    weights = np.empty((len(start), len(start)))
    weights[t:, t:], weights[:t], weights[t:, :t] = among, border, border[:, t:].T
    repel, noise, Z = recipe.labels(labels), recipe.noise(start), start
    degree = weights.sum(axis=1)
    for _ in range(recipe.private_steps if recipe.version == "2021" else 1):
        Z = add_noise(_step(recipe, weights, degree, repel, Z), noise, source=source)
    rebuilt = kernel(Z, Z, recipe.bandwidth)
    np.fill_diagonal(rebuilt, 0)
    degree = rebuilt.sum(axis=1)
    for _ in range(recipe.public_steps):
        Z = _rescaled(recipe, _step(recipe, rebuilt, degree, repel, Z))
    return Z


def server_embedding(recipe: Recipe, rows: Floats, labels: Labels, start: Floats) -> Floats:
    """Embed the server's rows, gallery before anchors, with all their labels and no noise."""
    # Single precision is off by 1e-7 of a weight, as the program itself is, and takes half the time.
    graph, repel, Z = gaussian_graph(rows.astype(np.float32), recipe.bandwidth), recipe.labels(labels), start
    for _ in range(recipe.server_steps):
        pull = recipe.label_weight * repel.laplacian_matmul(Z) - graph.laplacian_matmul(Z.astype(np.float32))
        Z = _rescaled(recipe, Z + pull / (2 * (graph.degree[:, None] + _NO_DIVISION_BY_ZERO)))
    return Z


def kernel(rows: Floats, others: Floats, bandwidth: float) -> Floats:
    """Return Gaussian weights between rows of any norm."""
    found: Floats = rbf_kernel(rows, others, gamma=1 / (2 * bandwidth**2))
    return found


def _step(recipe: Recipe, weights: Floats, degree: Floats, repel: LabelLaplacian, Z: Floats) -> Floats:
    pull = recipe.label_weight * repel.laplacian_matmul(Z) - (degree[:, None] * Z - weights @ Z)
    moved: Floats = Z + pull / (2 * (degree[:, None] + _NO_DIVISION_BY_ZERO))
    return moved


def _rescaled(recipe: Recipe, Z: Floats) -> Floats:
    return Z * (math.sqrt(len(Z)) / np.linalg.norm(Z)) if recipe.rescales else Z
