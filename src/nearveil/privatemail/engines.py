"""Engines of PrivateMail: the sound one, and the published ones of 2021 and 2022, which are not sound."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.spatial.distance import cdist
from scipy.special import softmax

from nearveil.mechanisms.base import Floats, Message, MessageError, make_guarantee
from nearveil.privacy import Guarantee
from nearveil.privacy.noise import (
    GaussianNoise,
    LaplaceNoise,
    Source,
    add_noise,
    analytic_gaussian_scale,
    calibrate_gaussian,
    calibrate_laplace,
    choose_gaussian_grid,
    choose_laplace_grid,
    compute_classical_scale,
)
from nearveil.privatemail.graph import LabelGraph, gaussian_graph, label_graph
from nearveil.privatemail.graph.labels import Encoding
from nearveil.privatemail.manifold import smlq_step, umeyama
from nearveil.privatemail.sensitivity import bound_step, published_2021, published_2022, target_only
from nearveil.privatemail.sensitivity.bounds import Norm

Labels = NDArray[np.int64]
Arrays = dict[str, NDArray[Any]]

MAX_STEPS = 100  # public steps of a message; the server takes as many for its gallery
_MAX_TARGETS = 1 << 14
_MIN_DEGREE = 1e-9  # a row of smaller degree has no neighbours and stays in place


@dataclass(frozen=True, eq=False)
class GalleryEmbedding:
    """The server's embedding of its items and of the anchors."""

    gallery: Floats  # shape (n, k)
    anchors: Floats  # shape (m, k)
    steps: int  # public steps; messages to rank must have taken as many


@dataclass(frozen=True, eq=False)
class Dummies:
    """Rows to hide a target among, and their classes."""

    features: Floats
    labels: Labels

    def draw(self, count: int, source: Source) -> NDArray[np.intp]:
        """Draw one row of every class for each message; return their positions, shape (count, C)."""
        classes = [np.flatnonzero(self.labels == label) for label in np.unique(self.labels)]
        return np.stack([members[source.words(count) % np.uint64(len(members))] for members in classes], axis=1)


def choose_anchors(features: Floats, n_anchors: int | None, public_seed: int) -> NDArray[np.intp]:
    """Return the positions of nonzero rows, or of `n_anchors` of them, drawn by the public seed."""
    nonzero = np.flatnonzero(features.any(axis=1))
    if n_anchors is None:
        return nonzero
    if n_anchors > len(nonzero):
        raise ValueError(f"n_anchors must be at most the {len(nonzero)} public rows that differ from their mean")
    return np.sort(np.random.default_rng([public_seed, 2]).choice(nonzero, n_anchors, replace=False))


def draw_secret_order(count: int, length: int, source: Source) -> NDArray[np.intp]:
    """Return `count` independent permutations of `length` items, uniform up to ties of 64-bit words."""
    return np.argsort(source.words(count * length).reshape(count, length), axis=1)


def measure_aligned_distances(targets: Floats, anchors: Floats, server: GalleryEmbedding) -> Floats:
    """Align targets to the server's embedding by Umeyama on the anchors; return distances, shape (t, n)."""
    if not np.array_equal(anchors, server.anchors):
        targets = umeyama(anchors, server.anchors).apply(targets)
    distances: Floats = cdist(targets, server.gallery)
    return distances


def read_rows(message: Message, name: str, columns: int, least: int) -> Floats:
    """Return rows of a message as floats, or raise."""
    rows = message[name]
    if rows.dtype != np.float64 or rows.ndim != 2 or rows.shape[1] != columns:
        raise MessageError(f"{name} must be rows of {columns} doubles")
    if not least <= len(rows) <= least + _MAX_TARGETS:
        raise MessageError(f"{name} must hold {least} to {least + _MAX_TARGETS} rows")
    return rows


def read_steps(message: Message) -> int:
    """Return the number of public steps of a message, or raise."""
    steps = message["steps"]
    if steps.shape != () or steps.dtype.kind not in "iu" or not 0 <= steps <= MAX_STEPS:
        raise MessageError(f"steps must be one whole number from 0 to {MAX_STEPS}")
    return int(steps)


Noise = GaussianNoise | LaplaceNoise
Kind = Literal["gaussian", "laplace"]

_BLOCK = 1 << 22  # weights in memory at a time: 32 MiB


@dataclass(frozen=True, eq=False)
class PublicState:
    """The anchors and parameters that client and server share."""

    anchors: Floats  # unit rows
    labels: NDArray[np.int64] | None
    start: Floats  # the start of every target, q_0 of the theorems
    embeddings: Floats  # of the anchors before each private step and after the last; targets do not affect them
    bandwidth: float
    label_weight: float
    label_encoding: Encoding

    @property
    def label_graph(self) -> LabelGraph | None:
        """The label graph of the anchors; None if labels have no effect."""
        if self.labels is None or self.label_weight == 0:
            return None
        return label_graph(self.labels, self.bandwidth, self.label_encoding)


def prepare_anchors(
    anchors: Floats,
    labels: NDArray[np.int64] | None,
    start: Floats,
    *,
    bandwidth: float,
    label_weight: float,
    label_encoding: Encoding,
    steps: int,
) -> PublicState:
    """Move the anchors through all private steps. Row 0 of `start` is for targets, the others are for the anchors."""
    public = PublicState(anchors, labels, start[0], start[None, 1:], bandwidth, label_weight, label_encoding)
    graph = gaussian_graph(anchors, bandwidth, method="exact")
    embeddings = [start[1:]]
    for _ in range(steps):
        embeddings.append(smlq_step(embeddings[-1], graph, public.label_graph, label_weight)[0])
    return replace(public, embeddings=np.stack(embeddings))


def bound_sensitivities(public: PublicState, kind: Kind) -> list[float]:
    """Bound the effect of a target on its row in each private step, by Theorems A and A'.

    The bound does not depend on the start of the target's row, so it also holds for steps that start from a noisy row
    (``docs/theory/privatemail.md``, Theorem 2). It includes the rounding of a difference.
    """
    norm: Norm = "l2" if kind == "gaussian" else "l1"
    return [
        target_only(
            public.anchors,
            public.labels,
            np.vstack([public.start, embedding]),
            bandwidth=public.bandwidth,
            label_weight=public.label_weight,
            label_encoding=public.label_encoding,
            released="target",
            norm=norm,
        )
        + 2 * _bound_rounding(public, embedding, norm)
        for embedding in public.embeddings[:-1]
    ]


def _bound_rounding(public: PublicState, embedding: Floats, norm: Norm) -> float:
    """Bound the distance of a computed row from the exact one.

    Exponents are inner products of d terms, off by d roundings of at most 1 / bandwidth^2; sums have m terms. So
    shares are off by a factor of ``1 + (d / bandwidth^2 + m + 16) eps``, twice for their normalisation.
    """
    m, d = public.anchors.shape
    rows = np.vstack([public.start, embedding])
    farthest = float(np.linalg.norm(rows, ord=2 if norm == "l2" else 1, axis=1).max())
    return float(2 * (d / public.bandwidth**2 + m + 16) * np.finfo(np.float64).eps * farthest)


def calibrate_steps(kind: Kind, epsilon: float, delta: float, changes: Sequence[float], size: int) -> tuple[Noise, ...]:
    """Return the noise of each private step; together they cost `epsilon` (Gaussian: at `delta`).

    Gaussian steps share one noise multiplier and compose in closed form, Laplace steps share epsilon equally
    (``docs/theory/privatemail.md``, Theorem 2; `test_private_steps_cost_what_the_accountant_says`).
    """
    n = len(changes)
    if kind == "laplace":
        return tuple(calibrate_laplace(epsilon / n, sensitivity=change, size=size) for change in changes)
    if n == 1:
        return (calibrate_gaussian(epsilon, delta, sensitivity=changes[0], size=size),)
    extra = sum(_make_gaussian_noise(change, size, 1.0).extra_delta for change in changes)
    # The privacy loss of a Gaussian step is normal, and n of them add up to that of one with sqrt(n) times the change.
    multiplier = analytic_gaussian_scale(np.sqrt(n) * (1 + 2.0**-40), epsilon, delta - extra)
    return tuple(_make_gaussian_noise(change, size, multiplier) for change in changes)


def _make_gaussian_noise(change: float, size: int, multiplier: float) -> GaussianNoise:
    """Return noise with at least this multiplier, including the costs of the grid."""
    noise = GaussianNoise(
        sensitivity=change,
        scale=multiplier * change,
        size=size,
        grid=choose_gaussian_grid(change * min(1, multiplier), size),
    )
    while noise.noise_multiplier < multiplier:
        noise = replace(noise, scale=noise.scale * (1 + 2.0**-18))
    return noise


def compute_averages(public: PublicState, features: Floats) -> Floats:
    """Return the kernel averages of the anchors for each row and private step, shape (n, S, k)."""
    stacked = np.concatenate(list(public.embeddings[:-1]), axis=1)
    block = max(1, _BLOCK // len(public.anchors))
    parts = [
        softmax(features[i : i + block] @ public.anchors.T / public.bandwidth**2, axis=1) @ stacked
        for i in range(0, len(features), block)
    ]
    return np.concatenate(parts).reshape(len(features), len(public.embeddings) - 1, -1)


def take_private_steps(public: PublicState, averages: Floats, noises: Sequence[Noise], source: Source) -> Floats:
    """Take all private steps of targets with these kernel averages, each with its noise (Algorithm 1)."""
    rows = np.broadcast_to(public.start, (*averages.shape[:-2], len(public.start)))
    for step, noise in enumerate(noises):
        pull = averages[..., step, :] / 2
        # Add noise to the private summand alone: the sum would be rounded depending on the row.
        # The calibration is for one row, and a batch has many.
        rows = rows / 2 + add_noise(pull, replace(noise, size=pull.size), source=source)
    return rows


def take_exact_steps(public: PublicState, averages: Floats) -> Floats:
    """Take the same steps without noise, for the server's rows."""
    rows = np.broadcast_to(public.start, (len(averages), len(public.start)))
    for step in range(averages.shape[1]):
        rows = (rows + averages[:, step]) / 2
    return rows


@dataclass(frozen=True, eq=False)
class AnchorPath:
    """The anchors during T public steps."""

    anchors: Floats  # shape (T + 1, m, k)
    factors: Floats  # of each step, which rescales the anchors to Frobenius norm sqrt(m)


def move_anchors(public: PublicState, steps: int) -> AnchorPath:
    """Move the anchors by the query, on a graph rebuilt from their embedding after the private steps."""
    rows = [public.embeddings[-1]]
    factors: list[float] = []
    if steps:
        weights = compute_kernel(rows[0], rows[0], public.bandwidth)
        np.fill_diagonal(weights, 0)
    for _ in range(steps):
        pull = weights @ rows[-1]
        if (labels := public.label_graph) is not None:
            pull = pull + public.label_weight * labels.laplacian_matmul(rows[-1])
        moved = _step_rows(rows[-1], pull, weights.sum(axis=1))
        factors.append(float(np.sqrt(len(moved)) / np.linalg.norm(moved)))
        rows.append(moved * factors[-1])
    return AnchorPath(np.stack(rows), np.array(factors))


def take_public_steps(public: PublicState, released: Floats, rows: Floats, path: AnchorPath, first: int = 0) -> Floats:
    """Move unlabelled rows along with the anchors, from step `first` to the end of the path.

    Their weights come from the embedding as `released`, and they do not affect the anchors.
    """
    if first == len(path.factors):
        return rows
    weights = compute_kernel(released, public.embeddings[-1], public.bandwidth)
    for anchors, factor in zip(path.anchors[first:], path.factors[first:], strict=False):
        rows = factor * _step_rows(rows, weights @ anchors, weights.sum(axis=1))
    return rows


def compute_kernel(rows: Floats, columns: Floats, bandwidth: float) -> Floats:
    """Return Gaussian weights between rows of any norm."""
    weights: Floats = np.exp(-cdist(rows, columns, "sqeuclidean") / (2 * bandwidth**2))
    return weights


def _step_rows(rows: Floats, pull: Floats, degree: Floats) -> Floats:
    """Return eq. 4, ``z_i / 2 + (W Z + alpha L_Y Z)_i / (2 D_i)``; a row without neighbours stays."""
    connected = degree[:, None] > _MIN_DEGREE
    return np.where(connected, (rows + pull / np.where(connected, degree[:, None], 1)) / 2, rows)


@dataclass(frozen=True, eq=False)
class SoundEngine:
    """The sound mechanism: the public state, the noise of each private step, and the guarantee."""

    public: PublicState
    noises: tuple[Noise, ...]
    epsilon: float
    delta: float
    n_public_steps: int

    def guarantee(self) -> Guarantee:
        """Return the guarantee of Theorems 1 to 3 of ``docs/theory/privatemail.md``."""
        extra = sum(noise.extra_delta for noise in self.noises)
        return make_guarantee(
            self.epsilon,
            max(self.delta, extra),
            "target's row of the query, Theorems A and A'",
            "docs/theory/privatemail.md",
            events=tuple(noise.event for noise in self.noises),
            extra_delta=extra,
        )

    def release(
        self, features: Floats, labels: Labels | None, dummies: Dummies | None, source: Source
    ) -> tuple[list[Arrays], NDArray[np.intp]]:
        """Return the arrays of a message for each row, and the position of its target (for the client alone).

        Algorithm 1 of the 2022 paper: average the anchors, mix in the dummies, take the private steps with noise, then
        public steps on the released rows alone.
        """
        if labels is not None:
            raise ValueError("labels must not be given: the target's label enters nothing unless as_published is set")
        n = len(features)
        averages = compute_averages(self.public, features)[:, None]
        if dummies is not None:
            pool = compute_averages(self.public, dummies.features)
            averages = np.concatenate([averages, pool[dummies.draw(n, source)]], axis=1)
        order = draw_secret_order(n, averages.shape[1], source)
        averages = np.take_along_axis(averages, order[:, :, None, None], axis=1)
        released = take_private_steps(self.public, averages, self.noises, source)
        moved = self._move_targets(released.reshape(-1, released.shape[-1])).reshape(released.shape)
        steps = np.array(self.n_public_steps, dtype=np.int32)
        messages = [
            {"released": rows, "embedding": embedding, "steps": steps}
            for rows, embedding in zip(released, moved, strict=True)
        ]
        return messages, np.argmin(order, axis=1)

    def read(self, message: Message) -> tuple[Floats, Floats, int]:
        """Return targets (t, k), anchors (m, k) and public steps of a message, or raise."""
        _, rows, steps = self._state(message)
        return rows, move_anchors(self.public, steps).anchors[-1], steps

    def take_steps(self, message: Message, steps: int) -> Arrays:
        """Take more public steps of a message."""
        released, rows, before = self._state(message)
        path = move_anchors(self.public, before + steps)
        rows = take_public_steps(self.public, released, rows, path, before)
        return {"released": released, "embedding": rows, "steps": np.array(before + steps, dtype=np.int32)}

    def embed_gallery(self, features: Floats, labels: Labels | None, steps: int) -> GalleryEmbedding:
        """Embed the server's rows like targets, without noise."""
        if labels is not None:
            raise ValueError("gallery_labels must not be given: targets have none, so they would not be comparable")
        rows = take_exact_steps(self.public, compute_averages(self.public, features))
        path = move_anchors(self.public, steps)
        return GalleryEmbedding(take_public_steps(self.public, rows, rows, path), path.anchors[-1], steps)

    def _move_targets(self, released: Floats) -> Floats:
        """Take the public steps of all targets of all messages, a block at a time."""
        path = move_anchors(self.public, self.n_public_steps)
        block = max(1, _BLOCK // len(self.public.anchors))
        parts = (released[i : i + block] for i in range(0, len(released), block))
        return np.concatenate([take_public_steps(self.public, rows, rows, path) for rows in parts])

    def _state(self, message: Message) -> tuple[Floats, Floats, int]:
        """Return the released rows, their current embedding and its number of steps, or raise."""
        k = len(self.public.start)
        released, rows = read_rows(message, "released", k, 1), read_rows(message, "embedding", k, 1)
        if released.shape != rows.shape:
            raise MessageError("embedding must have a row for each row released")
        return released, rows, read_steps(message)


Version = Literal["2022", "2021", "2022-code"]
Experiment = Literal["cars196", "cub200", "cifar100"]

_NO_DIVISION_BY_ZERO = 1e-9  # the program adds it to every degree

EXPERIMENTS: dict[Experiment, dict[str, float]] = {  # the columns of Table 2 (2022) that differ
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
    "iteration after it: the result is the label",
}


class CentredDistances:
    """The program's label "Laplacian": of double-centred distances between integer labels.

    Its kernel is ``K = -1/2 J |y_i - y_j| J`` with ``J = I - 11'/n``. Its rows sum to zero, so the
    "Laplacian" is -K and sorts the embedding by label instead of repelling within classes. Products use class sums.
    """

    def __init__(self, labels: NDArray[np.int64]) -> None:
        self._classes, self._codes = np.unique(labels, return_inverse=True)
        self._distances = np.abs(self._classes[:, None] - self._classes[None, :]).astype(np.float64)

    def laplacian_matmul(self, Z: Floats) -> Floats:
        """Multiply the "Laplacian" with `Z` of shape (n, k)."""
        sums = np.zeros((len(self._classes), Z.shape[1]))
        np.add.at(sums, self._codes, Z - Z.mean(axis=0))
        product = (self._distances @ sums)[self._codes]
        centred: Floats = (product - product.mean(axis=0)) / 2
        return centred


def find_code_scale(sensitivity: float, epsilon: float, delta: float) -> float:
    """Return the program's standard deviation, which is the paper's variance."""
    return 2 * math.log(1.25 / delta) * (sensitivity / epsilon) ** 2


@dataclass(frozen=True)
class Recipe:
    """A published algorithm, with its own parameters; epsilon and delta are its claims for the whole."""

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
        """Whether each step without noise rescales the embedding to Frobenius norm sqrt(rows)."""
        return self.version == "2022-code"

    @property
    def server_steps(self) -> int:
        """Steps of the server, from its own start: as many as the client's in 2021, T in 2022 (Algorithm 1)."""
        return self.public_steps + (self.private_steps if self.version == "2021" else 0)

    def make_label_graph(self, labels: Labels) -> LabelGraph | CentredDistances:
        """Return the graph of labels: integers in 2022, one-hot in 2021 (Corollary 1.1)."""
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
            scale = compute_classical_scale(change, self.epsilon, self.delta)
        else:
            change = bound_step(start, **setting, as_programmed=True)
            scale = find_code_scale(change, self.epsilon, self.delta)
        grid = choose_gaussian_grid(min(change, scale), start.size)
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
        return LaplaceNoise(
            sensitivity=change, scale=scale, size=start.size, grid=choose_laplace_grid(change, start.size)
        )


def compose_strongly(epsilon: float, steps: int, delta: float) -> float:
    """Return the 2021 paper's total epsilon of `steps`; delta' is all of delta, because Laplace noise has none."""
    return epsilon * math.sqrt(2 * steps * math.log(1 / delta)) + steps * epsilon * math.tanh(epsilon / 2)


def step_epsilon(total: float, steps: int, delta: float) -> float:
    """Return the epsilon of one iteration for which `compose_strongly` states `total`."""
    return float(brentq(lambda epsilon: compose_strongly(epsilon, steps, delta) - total, 0, total + 1, xtol=1e-15))


def embed_client(
    recipe: Recipe, anchor_weights: Floats, target_weights: Floats, labels: Labels, start: Floats, source: Source
) -> Floats:
    """Embed the client's rows, targets before anchors, with the targets' true `labels`, which leak, and add noise.

    `anchor_weights` are between anchors, `target_weights` from the targets to all rows, both with a zero diagonal.
    """
    t = len(target_weights)
    weights = np.empty((len(start), len(start)))
    weights[t:, t:], weights[:t], weights[t:, :t] = anchor_weights, target_weights, target_weights[:, t:].T
    label_graph, noise, Z = recipe.make_label_graph(labels), recipe.noise(start), start
    degree = weights.sum(axis=1)
    for _ in range(recipe.private_steps if recipe.version == "2021" else 1):
        Z = add_noise(_step(recipe, weights, degree, label_graph, Z), noise, source=source)
    rebuilt = compute_kernel(Z, Z, recipe.bandwidth)
    np.fill_diagonal(rebuilt, 0)
    degree = rebuilt.sum(axis=1)
    for _ in range(recipe.public_steps):
        Z = _rescale(recipe, _step(recipe, rebuilt, degree, label_graph, Z))
    return Z


def embed_server(recipe: Recipe, rows: Floats, labels: Labels, start: Floats) -> Floats:
    """Embed the server's rows, gallery before anchors, with all their labels and no noise."""
    # Single precision, like the program: an error of 1e-7 of a weight, in half the time.
    graph = gaussian_graph(rows.astype(np.float32), recipe.bandwidth)
    label_graph, Z = recipe.make_label_graph(labels), start
    for _ in range(recipe.server_steps):
        pull = recipe.label_weight * label_graph.laplacian_matmul(Z) - graph.laplacian_matmul(Z.astype(np.float32))
        Z = _rescale(recipe, Z + pull / (2 * (graph.degree[:, None] + _NO_DIVISION_BY_ZERO)))
    return Z


def _step(
    recipe: Recipe, weights: Floats, degree: Floats, label_graph: LabelGraph | CentredDistances, Z: Floats
) -> Floats:
    pull = recipe.label_weight * label_graph.laplacian_matmul(Z) - (degree[:, None] * Z - weights @ Z)
    moved: Floats = Z + pull / (2 * (degree[:, None] + _NO_DIVISION_BY_ZERO))
    return moved


def _rescale(recipe: Recipe, Z: Floats) -> Floats:
    return Z * (math.sqrt(len(Z)) / np.linalg.norm(Z)) if recipe.rescales else Z


@dataclass(frozen=True, eq=False)
class PublishedEngine:
    """A published mechanism: its recipe, the anchors, and the seed of both starts."""

    recipe: Recipe
    anchors: Floats
    labels: Labels
    n_components: int
    public_seed: int
    noises: tuple[()] = ()

    def guarantee(self) -> Guarantee:
        """Return the published figures, marked as unsound."""
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
        """Embed the anchors with one target and its true label, and add noise, for each row."""
        if labels is None:
            raise ValueError("labels must be given: as published, the target's own label is used after the noise")
        if (labels < 0).any():
            raise ValueError("labels must be numbered from 0")
        if dummies is not None and self.recipe.version != "2022":
            raise ValueError(f'dummies are no part of as_published="{self.recipe.version}"')
        weights = compute_kernel(self.anchors, self.anchors, self.recipe.bandwidth)
        np.fill_diagonal(weights, 0)
        messages = [
            self._make_message(weights, row, label, dummies, source)
            for row, label in zip(features, labels, strict=True)
        ]
        return [arrays for arrays, _ in messages], np.array([position for _, position in messages], dtype=np.intp)

    def read(self, message: Message) -> tuple[Floats, Floats, int]:
        """Return targets, anchors and steps."""
        m = len(self.anchors)
        rows = read_rows(message, "embedding", self.n_components, m + 1)
        return rows[:-m], rows[-m:], self.recipe.public_steps

    def take_steps(self, message: Message, steps: int) -> Arrays:
        """Raise: the published steps are not post-processing."""
        del message, steps
        raise ValueError("as published, further steps need the target's own label, which no message may hold")

    def embed_gallery(self, features: Floats, labels: Labels | None, steps: int) -> GalleryEmbedding:
        """Embed the gallery and the anchors together, with all their labels, from the server's start."""
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
        Z = embed_server(self.recipe, rows, np.concatenate([labels, self.labels]), start)
        return GalleryEmbedding(Z[: len(features)], Z[len(features) :], steps)

    def _make_message(
        self, anchor_weights: Floats, row: Floats, label: np.int64, dummies: Dummies | None, source: Source
    ) -> tuple[Arrays, int]:
        """Return the arrays of one message, and the position of its target."""
        targets, labels, position = row[None], np.array([label]), 0
        if dummies is not None:
            # One of every class except the target's (Algorithm 1).
            foreign = dummies.labels != label
            candidates = Dummies(dummies.features[foreign], dummies.labels[foreign])
            drawn = candidates.draw(1, source)[0]
            order = draw_secret_order(1, len(drawn) + 1, source)[0]
            targets = np.vstack([targets, candidates.features[drawn]])[order]
            labels, position = np.concatenate([labels, candidates.labels[drawn]])[order], int(np.argmin(order))
        t, m = len(targets), len(self.anchors)
        target_weights = compute_kernel(targets, np.vstack([targets, self.anchors]), self.recipe.bandwidth)
        np.fill_diagonal(target_weights, 0)
        generator = np.random.default_rng([self.public_seed, 0])
        # Draw the anchors' start first, so that it does not depend on the number of targets.
        start = np.roll(generator.normal(scale=self.recipe.start_scale, size=(m + t, self.n_components)), t, axis=0)
        all_labels = np.concatenate([labels, self.labels])
        embedding = embed_client(self.recipe, anchor_weights, target_weights, all_labels, start, source)
        return {"embedding": embedding}, position
