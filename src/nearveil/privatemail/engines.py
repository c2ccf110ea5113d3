"""Engines of PrivateMail: the sound one, and those published in 2021 and 2022, which are not sound."""

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
from sklearn.metrics.pairwise import rbf_kernel

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

MOST_STEPS = 100  # public steps of a message: a server does the same work for its gallery
_MOST_TARGETS = 1 << 14
_OUT_OF_REACH = 1e-9  # a row of smaller degree has no neighbour worth the name, and stays


@dataclass(frozen=True, eq=False)
class GalleryEmbedding:
    """Where the server's items and the anchors lie in the server's own embedding."""

    gallery: Floats  # shape (n, k)
    anchors: Floats  # shape (m, k)
    steps: int  # public steps taken: as many as the messages that it is compared with


@dataclass(frozen=True, eq=False)
class Dummies:
    """Rows that a client may hide its target among, and their classes."""

    features: Floats
    labels: Labels

    def draw(self, count: int, source: Source) -> NDArray[np.intp]:
        """Return positions of one row of every class, afresh for each message, shape (count, C)."""
        members = [np.flatnonzero(self.labels == label) for label in np.unique(self.labels)]
        return np.stack([own[source.words(count) % np.uint64(len(own))] for own in members], axis=1)


def choose_anchors(features: Floats, n_anchors: int | None, public_seed: int) -> NDArray[np.intp]:
    """Return the rows that have a direction, or `n_anchors` of them by the public seed."""
    kept = np.flatnonzero(features.any(axis=1))
    if n_anchors is None:
        return kept
    if n_anchors > len(kept):
        raise ValueError(f"n_anchors must be at most the {len(kept)} public rows that differ from their mean")
    return np.sort(np.random.default_rng([public_seed, 2]).choice(kept, n_anchors, replace=False))


def draw_secret_order(count: int, length: int, source: Source) -> NDArray[np.intp]:
    """Return `count` independent uniform permutations of `length` things, but for 64-bit words that are equal."""
    return np.argsort(source.words(count * length).reshape(count, length), axis=1)


def measure_aligned_distances(targets: Floats, anchors: Floats, server: GalleryEmbedding) -> Floats:
    """Bring targets to the server's embedding by Umeyama on the anchors, and measure, shape (t, n)."""
    if not np.array_equal(anchors, server.anchors):  # the same picture needs no turn
        targets = umeyama(anchors, server.anchors).apply(targets)
    distances: Floats = cdist(targets, server.gallery)
    return distances


def read_rows(message: Message, name: str, columns: int, least: int) -> Floats:
    """Return rows of a message as floats, or refuse what is none of ours."""
    rows = message[name]
    if rows.dtype != np.float64 or rows.ndim != 2 or rows.shape[1] != columns:
        raise MessageError(f"{name} must be rows of {columns} doubles")
    if not least <= len(rows) <= least + _MOST_TARGETS:
        raise MessageError(f"{name} must hold {least} to {least + _MOST_TARGETS} rows")
    return rows


def read_steps(message: Message) -> int:
    """Return how many public steps a message has taken."""
    steps = message["steps"]
    if steps.shape != () or steps.dtype.kind not in "iu" or not 0 <= steps <= MOST_STEPS:
        raise MessageError(f"steps must be one whole number from 0 to {MOST_STEPS}")
    return int(steps)


Noise = GaussianNoise | LaplaceNoise
Kind = Literal["gaussian", "laplace"]

_BLOCK = 1 << 22  # weights made at a time: 32 MiB


@dataclass(frozen=True, eq=False)
class Public:
    """What both sides know before anybody asks."""

    anchors: Floats  # unit rows
    labels: NDArray[np.int64] | None
    start: Floats  # where every target starts, the q_0 of the theorems
    embeddings: Floats  # of the anchors before each private step and after the last; no target pulls at them
    bandwidth: float
    label_weight: float
    label_encoding: Encoding

    @property
    def label_graph(self) -> LabelGraph | None:
        """Who repels whom among the anchors."""
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
) -> Public:
    """Move the anchors through all private steps; row 0 of `start` is the targets', the others the anchors'."""
    public = Public(anchors, labels, start[0], start[None, 1:], bandwidth, label_weight, label_encoding)
    graph = gaussian_graph(anchors, bandwidth, method="exact")
    embeddings = [start[1:]]
    for _ in range(steps):
        embeddings.append(smlq_step(embeddings[-1], graph, public.label_graph, label_weight)[0])
    return replace(public, embeddings=np.stack(embeddings))


def bound_sensitivities(public: Public, kind: Kind) -> list[float]:
    """Bound what a target can change in each private step: Theorems A and A' for its row alone.

    The bound does not depend on where the target's own row starts, so it also holds for steps that start from a
    noisy row (``docs/theory/privatemail.md``, Theorem 2). What rounding may add to a difference is added.
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


def _bound_rounding(public: Public, embedding: Floats, norm: Norm) -> float:
    """Bound how far a computed row is from the exact one.

    Exponents are inner products of d terms, off by d roundings of at most 1 / bandwidth^2; sums have m terms. So
    shares are off by a factor of ``1 + (d / bandwidth^2 + m + 16) eps``, twice for their normalisation.
    """
    m, d = public.anchors.shape
    rows = np.vstack([public.start, embedding])
    farthest = float(np.linalg.norm(rows, ord=2 if norm == "l2" else 1, axis=1).max())
    return float(2 * (d / public.bandwidth**2 + m + 16) * np.finfo(np.float64).eps * farthest)


def calibrate_steps(kind: Kind, epsilon: float, delta: float, changes: Sequence[float], size: int) -> tuple[Noise, ...]:
    """Return the noise of each private step, so that all together cost `epsilon` (Gaussian: at `delta`).

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
    """Return noise whose multiplier, every cost of the grid included, is at least `multiplier`."""
    noise = GaussianNoise(
        sensitivity=change,
        scale=multiplier * change,
        size=size,
        grid=choose_gaussian_grid(change * min(1, multiplier), size),
    )
    while noise.noise_multiplier < multiplier:
        noise = replace(noise, scale=noise.scale * (1 + 2.0**-18))
    return noise


def compute_averages(public: Public, features: Floats) -> Floats:
    """Return the kernel averages of the anchors that each private step pulls rows to, shape (n, S, k)."""
    stacked = np.concatenate(list(public.embeddings[:-1]), axis=1)
    block = max(1, _BLOCK // len(public.anchors))
    parts = [
        softmax(features[i : i + block] @ public.anchors.T / public.bandwidth**2, axis=1) @ stacked
        for i in range(0, len(features), block)
    ]
    return np.concatenate(parts).reshape(len(features), len(public.embeddings) - 1, -1)


def private_steps(public: Public, pulled: Floats, noises: Sequence[Noise], source: Source) -> Floats:
    """Take every private step of targets that are pulled to these `averages`, and add its noise."""
    rows = np.broadcast_to(public.start, (*pulled.shape[:-2], len(public.start)))
    for step, noise in enumerate(noises):
        pull = pulled[..., step, :] / 2
        # Noise goes to what is private alone: added to the row first, it would be rounded as that row happens to be.
        # A row is a message's; the calibration is for one row, and a batch is many of them.
        rows = rows / 2 + add_noise(pull, replace(noise, size=pull.size), source=source)
    return rows


def take_exact_steps(public: Public, pulled: Floats) -> Floats:
    """Take the same steps without noise: the server's, for rows that are its own."""
    rows = np.broadcast_to(public.start, (len(pulled), len(public.start)))
    for step in range(pulled.shape[1]):
        rows = (rows + pulled[:, step]) / 2
    return rows


@dataclass(frozen=True, eq=False)
class AnchorPath:
    """Where the anchors go in T public steps."""

    anchors: Floats
    factors: Floats  # what each step was rescaled by, to bring the anchors to Frobenius norm sqrt(m)


def move_anchors(public: Public, steps: int) -> AnchorPath:
    """Move the anchors by the query, its graph rebuilt once from where the private steps left them."""
    rows = [public.embeddings[-1]]
    factors: list[float] = []
    if steps:
        weights = _compute_weights(rows[0], rows[0], public.bandwidth)
        np.fill_diagonal(weights, 0)
    for _ in range(steps):
        drawn = weights @ rows[-1]
        if (labels := public.label_graph) is not None:
            drawn = drawn + public.label_weight * labels.laplacian_matmul(rows[-1])
        moved = _step_rows(rows[-1], drawn, weights.sum(axis=1))
        factors.append(float(np.sqrt(len(moved)) / np.linalg.norm(moved)))
        rows.append(moved * factors[-1])
    return AnchorPath(np.stack(rows), np.array(factors))


def public_steps(public: Public, released: Floats, rows: Floats, path: AnchorPath, first: int = 0) -> Floats:
    """Move unlabelled rows along with the anchors, from step `first` to the end of the path.

    They follow the anchors with weights of the embedding as it was `released`, and pull at nobody.
    """
    if first == len(path.factors):
        return rows
    weights = _compute_weights(released, public.embeddings[-1], public.bandwidth)
    for anchors, factor in zip(path.anchors[first:], path.factors[first:], strict=False):
        rows = factor * _step_rows(rows, weights @ anchors, weights.sum(axis=1))
    return rows


def _compute_weights(rows: Floats, others: Floats, bandwidth: float) -> Floats:
    """Return Gaussian weights between embedded rows, which are of any norm."""
    found: Floats = np.exp(-cdist(rows, others, "sqeuclidean") / (2 * bandwidth**2))
    return found


def _step_rows(rows: Floats, drawn: Floats, degree: Floats) -> Floats:
    """Return eq. 4, ``z_i / 2 + (W Z + alpha L_Y Z)_i / (2 D_i)``; a row out of reach stays."""
    reached = degree[:, None] > _OUT_OF_REACH
    return np.where(reached, (rows + drawn / np.where(reached, degree[:, None], 1)) / 2, rows)


@dataclass(frozen=True, eq=False)
class SoundEngine:
    """What is public, the noise of each private step, and the guarantee."""

    public: Public
    noises: tuple[Noise, ...]
    epsilon: float
    delta: float
    n_public_steps: int

    def guarantee(self) -> Guarantee:
        """Theorems 1 to 3 of ``docs/theory/privatemail.md``; the calibration is certified by that of the noise."""
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
        """Return a message's arrays for each row, and where in it the target is (for the client alone)."""
        if labels is not None:
            raise ValueError("labels must not be given: the target's label enters nothing unless as_published is set")
        n = len(features)
        pulled = compute_averages(self.public, features)[:, None]
        if dummies is not None:
            pool = compute_averages(self.public, dummies.features)
            pulled = np.concatenate([pulled, pool[dummies.draw(n, source)]], axis=1)
        order = draw_secret_order(n, pulled.shape[1], source)
        pulled = np.take_along_axis(pulled, order[:, :, None, None], axis=1)
        released = private_steps(self.public, pulled, self.noises, source)
        rows = self._take_public_steps(released.reshape(-1, released.shape[-1])).reshape(released.shape)
        steps = np.array(self.n_public_steps, dtype=np.int32)
        found = [{"released": own, "embedding": now, "steps": steps} for own, now in zip(released, rows, strict=True)]
        return found, np.argmin(order, axis=1)

    def read(self, message: Message) -> tuple[Floats, Floats, int]:
        """Return targets (t, k), anchors (m, k) and public steps of a message, or refuse it."""
        _, rows, steps = self._state(message)
        return rows, move_anchors(self.public, steps).anchors[-1], steps

    def take_steps(self, message: Message, steps: int) -> Arrays:
        """Take further public steps from where the message is."""
        released, rows, before = self._state(message)
        path = move_anchors(self.public, before + steps)
        rows = public_steps(self.public, released, rows, path, before)
        return {"released": released, "embedding": rows, "steps": np.array(before + steps, dtype=np.int32)}

    def embed_gallery(self, features: Floats, labels: Labels | None, steps: int) -> GalleryEmbedding:
        """Move the server's rows as a target would move, without noise."""
        if labels is not None:
            raise ValueError("gallery_labels must not be given: targets have none, so they would not be comparable")
        rows = take_exact_steps(self.public, compute_averages(self.public, features))
        path = move_anchors(self.public, steps)
        return GalleryEmbedding(public_steps(self.public, rows, rows, path), path.anchors[-1], steps)

    def _take_public_steps(self, released: Floats) -> Floats:
        """Take the public steps of all targets of all messages, a block at a time."""
        path = move_anchors(self.public, self.n_public_steps)
        block = max(1, _BLOCK // len(self.public.anchors))
        parts = (released[i : i + block] for i in range(0, len(released), block))
        return np.concatenate([public_steps(self.public, rows, rows, path) for rows in parts])

    def _state(self, message: Message) -> tuple[Floats, Floats, int]:
        """Return what was released, where it is now, and how many steps that took."""
        k = len(self.public.start)
        released, rows = read_rows(message, "released", k, 1), read_rows(message, "embedding", k, 1)
        if released.shape != rows.shape:
            raise MessageError("embedding must have a row for each row released")
        return released, rows, read_steps(message)


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
    """Return the 2021 paper's budget for `steps` of `epsilon`; delta' is all of delta, as Laplace noise has none."""
    return epsilon * math.sqrt(2 * steps * math.log(1 / delta)) + steps * epsilon * math.tanh(epsilon / 2)


def step_epsilon(total: float, steps: int, delta: float) -> float:
    """Return the epsilon of one iteration for which `compose_strongly` states `total`."""
    return float(brentq(lambda epsilon: compose_strongly(epsilon, steps, delta) - total, 0, total + 1, xtol=1e-15))


def embed_client(
    recipe: Recipe, among: Floats, border: Floats, labels: Labels, start: Floats, source: Source
) -> Floats:
    """Embed the client's rows, targets before anchors, with the targets' own `labels`, which leak, and add noise.

    `among` are feature weights between anchors, `border` those from the targets to all rows, both without diagonal.
    """
    t = len(border)
    weights = np.empty((len(start), len(start)))
    weights[t:, t:], weights[:t], weights[t:, :t] = among, border, border[:, t:].T
    repel, noise, Z = recipe.labels(labels), recipe.noise(start), start
    degree = weights.sum(axis=1)
    for _ in range(recipe.private_steps if recipe.version == "2021" else 1):
        Z = add_noise(_step(recipe, weights, degree, repel, Z), noise, source=source)
    rebuilt = compute_kernel(Z, Z, recipe.bandwidth)
    np.fill_diagonal(rebuilt, 0)
    degree = rebuilt.sum(axis=1)
    for _ in range(recipe.public_steps):
        Z = _rescale(recipe, _step(recipe, rebuilt, degree, repel, Z))
    return Z


def embed_server(recipe: Recipe, rows: Floats, labels: Labels, start: Floats) -> Floats:
    """Embed the server's rows, gallery before anchors, with all their labels and no noise."""
    # Single precision is off by 1e-7 of a weight, as the program itself is, and takes half the time.
    graph, repel, Z = gaussian_graph(rows.astype(np.float32), recipe.bandwidth), recipe.labels(labels), start
    for _ in range(recipe.server_steps):
        pull = recipe.label_weight * repel.laplacian_matmul(Z) - graph.laplacian_matmul(Z.astype(np.float32))
        Z = _rescale(recipe, Z + pull / (2 * (graph.degree[:, None] + _NO_DIVISION_BY_ZERO)))
    return Z


def compute_kernel(rows: Floats, others: Floats, bandwidth: float) -> Floats:
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
        among = compute_kernel(self.anchors, self.anchors, self.recipe.bandwidth)
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
        Z = embed_server(self.recipe, rows, np.concatenate([labels, self.labels]), start)
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
            order = draw_secret_order(1, len(drawn) + 1, source)[0]
            targets = np.vstack([targets, others.features[drawn]])[order]
            labels, position = np.concatenate([labels, others.labels[drawn]])[order], int(np.argmin(order))
        t, m = len(targets), len(self.anchors)
        border = compute_kernel(targets, np.vstack([targets, self.anchors]), self.recipe.bandwidth)
        np.fill_diagonal(border, 0)
        generator = np.random.default_rng([self.public_seed, 0])
        # Anchors first, so that they start from the same place however many targets there are.
        start = np.roll(generator.normal(scale=self.recipe.start_scale, size=(m + t, self.n_components)), t, axis=0)
        all_labels = np.concatenate([labels, self.labels])
        return {"embedding": embed_client(self.recipe, among, border, all_labels, start, source)}, position
