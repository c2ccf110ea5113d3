"""PrivateMail as it was published in 2021 and 2022, and as the authors' program does it. None of it is sound."""

import math
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from sklearn.metrics.pairwise import rbf_kernel

from nearveil.graph import LabelGraph, gaussian_graph, label_graph
from nearveil.mechanisms.base import Floats, Message, make_guarantee
from nearveil.mechanisms.privatemail._sound import (
    Arrays,
    Dummies,
    GalleryEmbedding,
    Labels,
    read_rows,
    secret_order,
)
from nearveil.privacy import Guarantee
from nearveil.privacy.noise import GaussianNoise, LaplaceNoise, Source, add_noise, gaussian_grid, laplace_grid
from nearveil.privacy.noise.calibration import classical_gaussian_scale
from nearveil.privacy.sensitivity import published_2021, published_2022
from nearveil.privacy.sensitivity.published import bound_step

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


class CentredDistances:
    """The program's label "Laplacian": of double-centred distances between integer labels.

    Its kernel is ``K = -1/2 J |y_i - y_j| J`` with ``J = I - 11'/n``, whose rows sum to zero, so the "Laplacian" is
    -K: what should repel within a class pulls the embedding to an order of the labels. Products take class sums.
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


def find_code_scale(sensitivity: float, epsilon: float, delta: float) -> float:
    """Return the program's standard deviation, which is what the paper calls the variance."""
    return 2 * math.log(1.25 / delta) * (sensitivity / epsilon) ** 2


@dataclass(frozen=True)
class Recipe:
    """What a publication does, in its own words; epsilon and delta are what it states for the whole."""

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

    def labels(self, labels: Labels) -> LabelGraph | CentredDistances:
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
            change = bound_step(start, **setting, as_programmed=True)
            scale = find_code_scale(change, self.epsilon, self.delta)
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

    Its delta' is the whole delta, because Laplace noise has none of its own.
    """
    return epsilon * math.sqrt(2 * steps * math.log(1 / delta)) + steps * epsilon * math.tanh(epsilon / 2)


def step_epsilon(total: float, steps: int, delta: float) -> float:
    """Return the epsilon of one iteration for which `strong_composition` states `total`."""
    return float(brentq(lambda epsilon: strong_composition(epsilon, steps, delta) - total, 0, total + 1, xtol=1e-15))


def client_embedding(
    recipe: Recipe, among: Floats, border: Floats, labels: Labels, start: Floats, source: Source
) -> Floats:
    """Embed the client's rows, targets before anchors, and add the publication's noise.

    `among` are feature weights between anchors, `border` those from the targets to all rows, both without diagonal.
    The targets' own `labels` are included: that is what leaks.
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
        Z = _rescale(recipe, _step(recipe, rebuilt, degree, repel, Z))
    return Z


def server_embedding(recipe: Recipe, rows: Floats, labels: Labels, start: Floats) -> Floats:
    """Embed the server's rows, gallery before anchors, with all their labels and no noise."""
    # Single precision is off by 1e-7 of a weight, as the program itself is, and takes half the time.
    graph, repel, Z = gaussian_graph(rows.astype(np.float32), recipe.bandwidth), recipe.labels(labels), start
    for _ in range(recipe.server_steps):
        pull = recipe.label_weight * repel.laplacian_matmul(Z) - graph.laplacian_matmul(Z.astype(np.float32))
        Z = _rescale(recipe, Z + pull / (2 * (graph.degree[:, None] + _NO_DIVISION_BY_ZERO)))
    return Z


def kernel(rows: Floats, others: Floats, bandwidth: float) -> Floats:
    """Return Gaussian weights between rows of any norm."""
    found: Floats = rbf_kernel(rows, others, gamma=1 / (2 * bandwidth**2))
    return found


def _step(recipe: Recipe, weights: Floats, degree: Floats, repel: LabelGraph | CentredDistances, Z: Floats) -> Floats:
    pull = recipe.label_weight * repel.laplacian_matmul(Z) - (degree[:, None] * Z - weights @ Z)
    moved: Floats = Z + pull / (2 * (degree[:, None] + _NO_DIVISION_BY_ZERO))
    return moved


def _rescale(recipe: Recipe, Z: Floats) -> Floats:
    return Z * (math.sqrt(len(Z)) / np.linalg.norm(Z)) if recipe.rescales else Z


@dataclass(frozen=True, eq=False)
class PublishedEngine:
    """The recipe of a publication, the anchors, and the seed of both starts."""

    recipe: Recipe
    anchors: Floats
    labels: Labels
    n_components: int
    public_seed: int
    noises: tuple[()] = ()

    def guarantee(self) -> Guarantee:
        """State what was published, and that it does not hold."""
        return replace(
            make_guarantee(
                self.recipe.epsilon,
                self.recipe.delta,
                f"as published ({self.recipe.version})",
                "docs/theory/privatemail.md",
                reason=REASONS[self.recipe.version],
            ),
            unit="image",
        )

    def release(
        self, features: Floats, labels: Labels | None, dummies: Dummies | None, source: Source
    ) -> tuple[list[Arrays], NDArray[np.intp]]:
        """Embed and noise the anchors and one target, with its own label, for each row."""
        if labels is None:
            raise ValueError("labels must be given: as published, the target's own label is used after the noise")
        if (labels < 0).any():
            raise ValueError("labels must be numbered from 0")
        if dummies is not None and self.recipe.version != "2022":
            raise ValueError(f'dummies are no part of as_published="{self.recipe.version}"')
        among = kernel(self.anchors, self.anchors, self.recipe.bandwidth)
        np.fill_diagonal(among, 0)
        found = [self._one(among, row, label, dummies, source) for row, label in zip(features, labels, strict=True)]
        return [arrays for arrays, _ in found], np.array([position for _, position in found], dtype=np.intp)

    def read(self, message: Message) -> tuple[Floats, Floats, int]:
        """Return targets, anchors and steps."""
        m = len(self.anchors)
        rows = read_rows(message, "embedding", self.n_components, m + 1)
        return rows[:-m], rows[-m:], self.recipe.public_steps

    def take_steps(self, message: Message, steps: int) -> Arrays:
        """Refuse: what was published is no post-processing."""
        del message, steps
        raise ValueError("as published, further steps need the target's own label, which no message may hold")

    def embed_gallery(self, features: Floats, labels: Labels | None, steps: int) -> GalleryEmbedding:
        """Embed the gallery and the anchors together, with all their labels, from the server's own start."""
        if labels is None:
            raise ValueError(
                "gallery_labels must be given (to rank_each): as published, the server embeds with its labels"
            )
        if (labels < 0).any():
            raise ValueError("gallery_labels must be numbered from 0")
        if not np.any(features, axis=1).all():
            raise ValueError("gallery must not hold a row that equals the public mean: centred, it is zero")
        generator = np.random.default_rng([self.public_seed, 1])
        start = generator.normal(
            scale=self.recipe.start_scale, size=(len(features) + len(self.anchors), self.n_components)
        )
        rows = np.vstack([features, self.anchors])
        Z = server_embedding(self.recipe, rows, np.concatenate([labels, self.labels]), start)
        return GalleryEmbedding(Z[: len(features)], Z[len(features) :], steps)

    def _one(
        self, among: Floats, row: Floats, label: np.int64, dummies: Dummies | None, source: Source
    ) -> tuple[Arrays, int]:
        """Return the arrays of one message, and where in it the target is."""
        targets, labels, position = row[None], np.array([label]), 0
        if dummies is not None:
            # One of every class but the target's own, as Algorithm 1 has it.
            others = Dummies(dummies.features[dummies.labels != label], dummies.labels[dummies.labels != label])
            drawn = others.draw(1, source)[0]
            order = secret_order(1, len(drawn) + 1, source)[0]
            targets = np.vstack([targets, others.features[drawn]])[order]
            labels, position = np.concatenate([labels, others.labels[drawn]])[order], int(np.argmin(order))
        t, m = len(targets), len(self.anchors)
        border = kernel(targets, np.vstack([targets, self.anchors]), self.recipe.bandwidth)
        np.fill_diagonal(border, 0)
        generator = np.random.default_rng([self.public_seed, 0])
        # Anchors first, so that they start from the same place however many targets there are.
        start = np.roll(generator.normal(scale=self.recipe.start_scale, size=(m + t, self.n_components)), t, axis=0)
        all_labels = np.concatenate([labels, self.labels])
        return {"embedding": client_embedding(self.recipe, among, border, all_labels, start, source)}, position
