"""The sound engine of PrivateMail (``docs/theory/privatemail.md``); it shares helpers with the published ones."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import cdist
from scipy.special import softmax

from nearveil.cluster import cut_rows
from nearveil.mechanisms.base import make_noise_guarantee
from nearveil.mechanisms.messages import Floats, Message, MessageError
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
)
from nearveil.privatemail.graph import LabelGraph, gaussian_graph, label_graph
from nearveil.privatemail.graph.labels import Encoding
from nearveil.privatemail.manifold import smlq_step
from nearveil.privatemail.sensitivity import Norm, target_only

Labels = NDArray[np.int64]
Noise = GaussianNoise | LaplaceNoise
Kind = Literal["gaussian", "laplace"]

MAX_STEPS = 100  # public steps of a message; the server takes as many for its gallery
_MAX_TARGETS = 1 << 14
_MIN_DEGREE = 1e-9  # a row of smaller degree has no neighbours and stays in place
_BLOCK = 1 << 22  # weights in memory at a time: 32 MiB


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


def read_rows(message: Message, name: str, columns: int, least: int) -> Floats:
    """Return rows of a message as floats, or raise."""
    rows = message[name]
    if rows.dtype != np.float64 or rows.ndim != 2 or rows.shape[1] != columns:
        raise MessageError(f"{name} must be rows of {columns} doubles")
    if not least <= len(rows) <= least + _MAX_TARGETS:
        raise MessageError(f"{name} must hold {least} to {least + _MAX_TARGETS} rows")
    return rows


@dataclass(frozen=True, eq=False)
class PublicState:
    """The anchors and parameters that client and server share."""

    anchors: Floats  # unit rows
    labels: Labels | None
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
    anchors: Floats, labels: Labels | None, start: Floats, *, steps: int, bandwidth: float, label_weight: float,
    label_encoding: Encoding,
) -> PublicState:  # fmt: skip
    """Move the anchors through all private steps. Row 0 of `start` is for targets, the others are for the anchors."""
    public = PublicState(anchors, labels, start[0], start[None, 1:], bandwidth, label_weight, label_encoding)
    graph = gaussian_graph(anchors, bandwidth, method="exact")
    embeddings = [start[1:]]
    for _ in range(steps):
        embeddings.append(smlq_step(embeddings[-1], graph, public.label_graph, label_weight)[0])
    return replace(public, embeddings=np.stack(embeddings))


def bound_sensitivities(public: PublicState, kind: Kind) -> list[float]:
    """Bound the effect of a target on its row in each private step, by Theorems A and A', with its rounding."""
    # Holds from any start of the target's row, also a noisy one (docs/theory/privatemail.md, Theorem 2).
    norm: Norm = "l2" if kind == "gaussian" else "l1"
    bounds = []
    for embedding in public.embeddings[:-1]:
        start = np.vstack([public.start, embedding])
        bound = target_only(public.anchors, start, bandwidth=public.bandwidth, norm=norm)
        bounds.append(bound + 2 * _bound_rounding(public, start, norm))
    return bounds


def _bound_rounding(public: PublicState, start: Floats, norm: Norm) -> float:
    """Bound the distance of a computed row from the exact one."""
    # Exponents are inner products of d terms, off by d roundings of at most 1 / bandwidth^2; sums have m terms. So
    # shares are off by a factor of ``1 + (d / bandwidth^2 + m + 16) eps``, twice for their normalisation.
    m, d = public.anchors.shape
    farthest = float(np.linalg.norm(start, ord=2 if norm == "l2" else 1, axis=1).max())
    return float(2 * (d / public.bandwidth**2 + m + 16) * np.finfo(np.float64).eps * farthest)


def calibrate_steps(kind: Kind, epsilon: float, delta: float, changes: Sequence[float], size: int) -> tuple[Noise, ...]:
    """Return the noise of each private step; together they cost `epsilon` (Gaussian: at `delta`)."""
    # Gaussian steps share one noise multiplier and compose in closed form, Laplace steps share epsilon equally
    # (docs/theory/privatemail.md, Theorem 2; `test_private_steps_cost_what_the_accountant_says`).
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
    grid = choose_gaussian_grid(change * min(1, multiplier), size)
    noise = GaussianNoise(sensitivity=change, scale=multiplier * change, size=size, grid=grid)
    while noise.noise_multiplier < multiplier:
        noise = replace(noise, scale=noise.scale * (1 + 2.0**-18))
    return noise


def compute_averages(public: PublicState, features: Floats) -> Floats:
    """Return the kernel averages of the anchors for each row and private step, shape (n, S, k)."""
    stacked = np.concatenate(list(public.embeddings[:-1]), axis=1)
    parts = [
        softmax(features[block] @ public.anchors.T / public.bandwidth**2, axis=1) @ stacked
        for block in cut_rows(len(features), max(1, _BLOCK // len(public.anchors)))
    ]
    return np.concatenate(parts).reshape(len(features), len(public.embeddings) - 1, -1)


def take_private_steps(
    public: PublicState, averages: Floats, noises: Sequence[Noise] = (), source: Source | None = None
) -> Floats:
    """Take all private steps of targets with these kernel averages (Algorithm 1), for the server without noise."""
    rows = np.broadcast_to(public.start, (*averages.shape[:-2], len(public.start)))
    for step in range(averages.shape[-2]):
        pull = averages[..., step, :] / 2
        if source is not None:
            # Add noise to the private summand alone: the sum would be rounded depending on the row.
            # The calibration is for one row, and a batch has many.
            pull = add_noise(pull, replace(noises[step], size=pull.size), source=source)
        rows = rows / 2 + pull
    return rows


class AnchorPath(NamedTuple):
    """The anchors during T public steps."""

    anchors: Floats  # shape (T + 1, m, k)
    factors: list[float]  # of each step, which rescales the anchors to Frobenius norm sqrt(m)


def move_anchors(public: PublicState, steps: int) -> AnchorPath:
    """Move the anchors by the query, on a graph rebuilt from their embedding after the private steps."""
    rows = [public.embeddings[-1]]
    factors: list[float] = []
    if steps:
        weights = compute_kernel(rows[0], rows[0], public.bandwidth, same=True)
    for _ in range(steps):
        pull = weights @ rows[-1]
        if (labels := public.label_graph) is not None:
            pull = pull + public.label_weight * labels.laplacian_matmul(rows[-1])
        moved = _step_rows(rows[-1], pull, weights.sum(axis=1))
        factors.append(float(np.sqrt(len(moved)) / np.linalg.norm(moved)))
        rows.append(moved * factors[-1])
    return AnchorPath(np.stack(rows), factors)


def take_public_steps(public: PublicState, released: Floats, rows: Floats, path: AnchorPath, first: int = 0) -> Floats:
    """Move unlabelled rows along the path from step `first`, with weights from `released`; anchors are not affected."""
    if first == len(path.factors):
        return rows
    size = max(1, _BLOCK // len(public.anchors))
    if len(rows) > size:
        parts = [(released[cut], rows[cut]) for cut in cut_rows(len(rows), size)]
        return np.concatenate([take_public_steps(public, *part, path, first) for part in parts])
    weights = compute_kernel(released, public.embeddings[-1], public.bandwidth)
    for anchors, factor in zip(path.anchors[first:], path.factors[first:], strict=False):
        rows = factor * _step_rows(rows, weights @ anchors, weights.sum(axis=1))
    return rows


def compute_kernel(rows: Floats, columns: Floats, bandwidth: float, *, same: bool = False) -> Floats:
    """Return Gaussian weights between rows of any norm; none within a row, if `same`: `columns` begin with `rows`."""
    weights: Floats = np.exp(-cdist(rows, columns, "sqeuclidean") / (2 * bandwidth**2))
    if same:
        np.fill_diagonal(weights, 0)
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
        theorem = "target's row of the query, Theorems A and A'"
        return make_noise_guarantee(self.epsilon, self.delta, self.noises, theorem, "docs/theory/privatemail.md")

    def release(
        self, features: Floats, labels: Labels | None, dummies: Dummies | None, source: Source
    ) -> tuple[dict[str, Any], NDArray[np.intp]]:
        """Return the arrays of all messages, and the target's place in each, for the client (Algorithm 1, 2022)."""
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
        rows = released.reshape(-1, released.shape[-1])
        moved = take_public_steps(self.public, rows, rows, move_anchors(self.public, self.n_public_steps))
        steps = np.full(n, self.n_public_steps, dtype=np.int32)
        return {"released": released, "embedding": moved.reshape(released.shape), "steps": steps}, order.argmin(axis=1)

    def read(self, message: Message) -> tuple[Floats, Floats, int]:
        """Return targets (t, k), anchors (m, k) and public steps of a message, or raise."""
        _, rows, steps = self._state(message)
        return rows, move_anchors(self.public, steps).anchors[-1], steps

    def take_steps(self, message: Message, steps: int) -> dict[str, Any]:
        """Take more public steps of a message."""
        released, rows, before = self._state(message)
        path = move_anchors(self.public, before + steps)
        rows = take_public_steps(self.public, released, rows, path, before)
        return {"released": released, "embedding": rows, "steps": np.array(before + steps, dtype=np.int32)}

    def embed_gallery(self, features: Floats, labels: Labels | None, steps: int) -> GalleryEmbedding:
        """Embed the server's rows like targets, without noise."""
        if labels is not None:
            raise ValueError("gallery_labels must not be given: targets have none, so they would not be comparable")
        rows = take_private_steps(self.public, compute_averages(self.public, features))
        path = move_anchors(self.public, steps)
        return GalleryEmbedding(take_public_steps(self.public, rows, rows, path), path.anchors[-1], steps)

    def _state(self, message: Message) -> tuple[Floats, Floats, int]:
        """Return the released rows, their current embedding and its number of steps, or raise."""
        k = len(self.public.start)
        released, rows = read_rows(message, "released", k, 1), read_rows(message, "embedding", k, 1)
        if released.shape != rows.shape:
            raise MessageError("embedding must have a row for each row released")
        steps = message["steps"]
        if steps.shape != () or steps.dtype.kind not in "iu" or not 0 <= steps <= MAX_STEPS:
            raise MessageError(f"steps must be one whole number from 0 to {MAX_STEPS}")
        return released, rows, int(steps)
