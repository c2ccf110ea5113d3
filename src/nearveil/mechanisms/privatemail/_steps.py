"""What the sound PrivateMail and the published ones share: a server's embedding, dummies, a secret order."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import cdist
from scipy.special import softmax

from nearveil.graph import LabelGraph, gaussian_graph, label_graph
from nearveil.graph.labels import Encoding
from nearveil.manifold import smlq_step, umeyama
from nearveil.mechanisms.message import Message, MessageError
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

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]
Arrays = dict[str, NDArray[Any]]

MOST_STEPS = 100  # public steps of a message: a server does the same work for its gallery
_MOST_TARGETS = 1 << 14


@dataclass(frozen=True, eq=False)
class GalleryEmbedding:
    """Where the server's items and the anchors lie in the server's own embedding.

    Attributes
    ----------
    gallery : ndarray of shape (n, k)
    anchors : ndarray of shape (m, k)
    steps : int
        Public steps taken: as many as the messages that it shall be compared with.
    """

    gallery: Floats
    anchors: Floats
    steps: int


@dataclass(frozen=True, eq=False)
class Dummies:
    """Rows that a client may hide its target among, and their classes."""

    features: Floats
    labels: Labels

    def draw(self, count: int, source: Source) -> NDArray[np.intp]:
        """Return positions of one row of every class, afresh for each message, shape (count, C)."""
        members = [np.flatnonzero(self.labels == label) for label in np.unique(self.labels)]
        return np.stack([own[source.words(count) % np.uint64(len(own))] for own in members], axis=1)


@dataclass(frozen=True, eq=False)
class Released:
    """The arrays of a batch of messages, and where in each message the target is (the client's to keep)."""

    arrays: list[Arrays]
    positions: NDArray[np.intp]


class Engine(Protocol):
    """What a version of PrivateMail does; all of it fitted, nothing in it private."""

    @property
    def noises(self) -> tuple[GaussianNoise | LaplaceNoise, ...]:
        """The noise of each private step, where it is the same for all messages."""
        ...

    def guarantee(self) -> Guarantee:
        """Return what one message promises."""
        ...

    def release(self, features: Floats, labels: Labels | None, dummies: Dummies | None, source: Source) -> Released:
        """Make the arrays of a message for each row of norm one."""
        ...

    def read(self, message: Message) -> tuple[Floats, Floats, int]:
        """Return targets (t, k), anchors (m, k) and public steps of a message, or refuse it."""
        ...

    def continued(self, message: Message, steps: int) -> Arrays:
        """Return the arrays after further public steps."""
        ...

    def embed_gallery(self, features: Floats, labels: Labels | None, steps: int) -> GalleryEmbedding:
        """Embed the server's rows of norm one or zero."""
        ...


def secret_order(count: int, length: int, source: Source) -> NDArray[np.intp]:
    """Return `count` permutations of `length` things, uniform and independent.

    They are the orders of random 64-bit words; two words are equal with a probability of 2^-64.
    """
    return np.argsort(source.words(count * length).reshape(count, length), axis=1)


def aligned_distances(targets: Floats, anchors: Floats, server: GalleryEmbedding) -> Floats:
    """Bring targets to the server's embedding by Umeyama on the anchors, and measure, shape (t, n)."""
    if not np.array_equal(anchors, server.anchors):  # the same picture needs no turn
        targets = umeyama(anchors, server.anchors).apply(targets)
    distances: Floats = cdist(targets, server.gallery)
    return distances


def checked_array(message: Message, name: str, columns: int, least: int) -> Floats:
    """Return rows of a message as floats, or refuse what is none of ours."""
    rows = message[name]
    if rows.dtype != np.float64 or rows.ndim != 2 or rows.shape[1] != columns:
        raise MessageError(f"{name} must be rows of {columns} doubles")
    if not least <= len(rows) <= least + _MOST_TARGETS:
        raise MessageError(f"{name} must hold {least} to {least + _MOST_TARGETS} rows")
    return rows


def checked_count(steps: object) -> int:
    """Return a number of public steps, or refuse it."""
    if isinstance(steps, bool) or not isinstance(steps, int | np.integer) or not 0 <= steps <= MOST_STEPS:
        raise ValueError(f"steps must be a whole number from 0 to {MOST_STEPS}")
    return int(steps)


def checked_steps(message: Message) -> int:
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
    """What both sides know before anybody asks.

    `embeddings`: Where the anchors lie before each of the S private steps, and after the last. They move by the
    same query, among themselves: no target pulls at them, so these rows are public.
    """

    anchors: Floats  # unit rows
    labels: NDArray[np.int64] | None
    start: Floats  # where every target starts, the q_0 of the theorems
    embeddings: Floats
    bandwidth: float
    label_weight: float
    label_encoding: Encoding

    @property
    def label_graph(self) -> LabelGraph | None:
        """Who repels whom among the anchors."""
        if self.labels is None or self.label_weight == 0:
            return None
        return label_graph(self.labels, self.bandwidth, self.label_encoding)


def prepare(
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

    The bound does not depend on where the target's own row starts, so it is known before the first
    step, also for steps that start from a noisy row (``docs/theory/privatemail.md``, Theorem 2). What
    rounding may add to the difference of two rows is added.
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

    Exponents are inner products of d terms, off by d roundings of at most 1 / bandwidth^2; sums have m
    terms. So the shares are off by a factor of ``1 + (d / bandwidth^2 + m + 16) eps`` at most, twice for
    their normalisation, and the row by that much of the farthest anchor.
    """
    m, d = public.anchors.shape
    rows = np.vstack([public.start, embedding])
    farthest = float(np.linalg.norm(rows, ord=2 if norm == "l2" else 1, axis=1).max())
    return float(2 * (d / public.bandwidth**2 + m + 16) * np.finfo(np.float64).eps * farthest)


def calibrated(kind: Kind, epsilon: float, delta: float, changes: Sequence[float], size: int) -> tuple[Noise, ...]:
    """Return the noise of each private step, so that all together cost `epsilon` (Gaussian: at `delta`).

    Several Gaussian steps share one noise multiplier and compose by their privacy loss distributions, in
    closed form (``docs/theory/privatemail.md``, Theorem 2; `test_private_steps_cost_what_the_accountant_says`).
    Laplace steps share epsilon equally and add up.
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
    """Return what each private step would pull unlabelled rows to, shape (n, S, k).

    It is the kernel average of the anchors: the only way in which features enter the query.
    """
    stacked = np.concatenate(list(public.embeddings[:-1]), axis=1)
    block = max(1, _BLOCK // len(public.anchors))
    parts = [
        softmax(features[i : i + block] @ public.anchors.T / public.bandwidth**2, axis=1) @ stacked
        for i in range(0, len(features), block)
    ]
    return np.concatenate(parts).reshape(len(features), len(public.embeddings) - 1, -1)


def private_steps(public: Public, pulled: Floats, noises: Sequence[Noise], source: Source) -> Floats:
    """Take every private step and add its noise.

    `pulled`: The `averages` of the targets.
    `noises`: One for each step.
    """
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
