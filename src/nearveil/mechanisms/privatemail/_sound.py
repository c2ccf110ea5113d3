"""The sound PrivateMail: private steps with noise, public steps after them, and what published versions share."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import cdist
from scipy.special import softmax

from nearveil.graph import LabelGraph, gaussian_graph, label_graph
from nearveil.graph.labels import Encoding
from nearveil.manifold import smlq_step, umeyama
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
    gaussian_grid,
)
from nearveil.privacy.sensitivity import target_only
from nearveil.privacy.sensitivity.bounds import Norm

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


def secret_order(count: int, length: int, source: Source) -> NDArray[np.intp]:
    """Return `count` independent uniform permutations of `length` things, but for 64-bit words that are equal."""
    return np.argsort(source.words(count * length).reshape(count, length), axis=1)


def aligned_distances(targets: Floats, anchors: Floats, server: GalleryEmbedding) -> Floats:
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


def sensitivities(public: Public, kind: Kind) -> list[float]:
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
        + 2 * _rounding(public, embedding, norm)
        for embedding in public.embeddings[:-1]
    ]


def _rounding(public: Public, embedding: Floats, norm: Norm) -> float:
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
    extra = sum(_gaussian(change, size, 1.0).extra_delta for change in changes)
    # The privacy loss of a Gaussian step is normal, and n of them add up to that of one with sqrt(n) times the change.
    multiplier = analytic_gaussian_scale(np.sqrt(n) * (1 + 2.0**-40), epsilon, delta - extra)
    return tuple(_gaussian(change, size, multiplier) for change in changes)


def _gaussian(change: float, size: int, multiplier: float) -> GaussianNoise:
    """Return noise whose multiplier, every cost of the grid included, is at least `multiplier`."""
    noise = GaussianNoise(
        sensitivity=change, scale=multiplier * change, size=size, grid=gaussian_grid(change * min(1, multiplier), size)
    )
    while noise.noise_multiplier < multiplier:
        noise = replace(noise, scale=noise.scale * (1 + 2.0**-18))
    return noise


def averages(public: Public, features: Floats) -> Floats:
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


def exact_steps(public: Public, pulled: Floats) -> Floats:
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


def anchor_path(public: Public, steps: int) -> AnchorPath:
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
        moved = _step_rows(rows[-1], drawn, weights.sum(axis=1))
        factors.append(float(np.sqrt(len(moved)) / np.linalg.norm(moved)))
        rows.append(moved * factors[-1])
    return AnchorPath(np.stack(rows), np.array(factors))


def public_steps(public: Public, released: Floats, rows: Floats, path: AnchorPath, first: int = 0) -> Floats:
    """Move unlabelled rows along with the anchors, to the end of the path.

    They follow the anchors with weights of the embedding as it was `released`, and pull at nobody. `rows` are where
    they are now, after `first` steps.
    """
    if first == len(path.factors):
        return rows
    weights = _weights(released, public.embeddings[-1], public.bandwidth)
    for anchors, factor in zip(path.anchors[first:], path.factors[first:], strict=False):
        rows = factor * _step_rows(rows, weights @ anchors, weights.sum(axis=1))
    return rows


def _weights(rows: Floats, others: Floats, bandwidth: float) -> Floats:
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
        pulled = averages(self.public, features)[:, None]
        if dummies is not None:
            pool = averages(self.public, dummies.features)
            pulled = np.concatenate([pulled, pool[dummies.draw(n, source)]], axis=1)
        order = secret_order(n, pulled.shape[1], source)
        pulled = np.take_along_axis(pulled, order[:, :, None, None], axis=1)
        released = private_steps(self.public, pulled, self.noises, source)
        rows = self._take_public_steps(released.reshape(-1, released.shape[-1])).reshape(released.shape)
        steps = np.array(self.n_public_steps, dtype=np.int32)
        found = [{"released": own, "embedding": now, "steps": steps} for own, now in zip(released, rows, strict=True)]
        return found, np.argmin(order, axis=1)

    def read(self, message: Message) -> tuple[Floats, Floats, int]:
        """Return targets (t, k), anchors (m, k) and public steps of a message, or refuse it."""
        _, rows, steps = self._state(message)
        return rows, anchor_path(self.public, steps).anchors[-1], steps

    def take_steps(self, message: Message, steps: int) -> Arrays:
        """Take further public steps from where the message is."""
        released, rows, before = self._state(message)
        path = anchor_path(self.public, before + steps)
        rows = public_steps(self.public, released, rows, path, before)
        return {"released": released, "embedding": rows, "steps": np.array(before + steps, dtype=np.int32)}

    def embed_gallery(self, features: Floats, labels: Labels | None, steps: int) -> GalleryEmbedding:
        """Move the server's rows as a target would move, without noise."""
        if labels is not None:
            raise ValueError("gallery_labels must not be given: targets have none, so they would not be comparable")
        rows = exact_steps(self.public, averages(self.public, features))
        path = anchor_path(self.public, steps)
        return GalleryEmbedding(public_steps(self.public, rows, rows, path), path.anchors[-1], steps)

    def _take_public_steps(self, released: Floats) -> Floats:
        """Take the public steps of all targets of all messages, a block at a time."""
        path = anchor_path(self.public, self.n_public_steps)
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
