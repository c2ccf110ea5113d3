"""PrivateMail as published in 2022. It is not sound, nor are its other versions, which ``studies.published`` has."""

from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from nearveil.lazy import require_extra
from nearveil.mechanisms.messages import Floats, Message, make_guarantee
from nearveil.privacy import Guarantee
from nearveil.privacy.noise import (
    GaussianNoise,
    LaplaceNoise,
    Source,
    add_noise,
    choose_gaussian_grid,
    compute_classical_scale,
)
from nearveil.privatemail.engines import Dummies, GalleryEmbedding, Labels, compute_kernel, draw_secret_order, read_rows
from nearveil.privatemail.graph import LabelGraph, gaussian_graph, label_graph
from nearveil.privatemail.sensitivity import published_2022

Version = Literal["2022", "2021", "2022-code"]
Experiment = Literal["cars196", "cub200", "cifar100"]

_NO_DIVISION_BY_ZERO = 1e-9  # the program adds it to every degree

EXPERIMENTS: dict[Experiment, dict[str, float]] = {  # the columns of Table 2 (2022) that differ
    "cars196": {"bandwidth": 6.0, "label_weight": 0.6},
    "cub200": {"bandwidth": 5.0, "label_weight": 0.5},
    "cifar100": {"bandwidth": 6.0, "label_weight": 0.6},
}


@dataclass(frozen=True, eq=False)
class PublishedEngine:
    """The mechanism of the 2022 paper on its anchors; epsilon and delta are its claims for the whole."""

    version: ClassVar[Version] = "2022"
    reason: ClassVar[str] = (
        "its sensitivity bound is false (Lemma 1 bounds a square and is used as its root) and the target's own label "
        "is used after the noise, which is not post-processing"
    )
    repeats: ClassVar[bool] = False  # whether both sides take `n_private_steps`; else the client takes one
    noises: ClassVar[tuple[()]] = ()

    epsilon: float
    delta: float
    sigma: float  # its bandwidth
    label_weight: float
    start_scale: float
    n_private_steps: int
    n_public_steps: int
    n_components: int
    public_seed: int  # of both starts
    anchors: Floats
    labels: Labels  # from 0

    @property
    def bandwidth(self) -> float:
        """The s of ``exp(-d^2 / (2 s^2))``."""
        return self.sigma

    @property
    def setting(self) -> dict[str, Any]:
        """The parameters of the published sensitivities."""
        return {"bandwidth": self.sigma, "label_weight": self.label_weight, "n_classes": int(self.labels.max()) + 1}

    def make_label_graph(self, labels: Labels) -> LabelGraph:
        """Return the graph of labels, which are integers."""
        return label_graph(labels, self.sigma, "integer")

    def calibrate(self, start: Floats) -> tuple[float, float]:
        """Return the published sensitivity of a step, and the standard deviation of its noise."""
        change = published_2022(start, **self.setting)
        return change, compute_classical_scale(change, self.epsilon, self.delta)

    def noise(self, start: Floats) -> GaussianNoise | LaplaceNoise:
        """Return the noise of one private step."""
        change, scale = self.calibrate(start)
        grid = choose_gaussian_grid(min(change, scale), start.size)
        return GaussianNoise(sensitivity=change, scale=scale, size=start.size, grid=grid)

    def guarantee(self) -> Guarantee:
        """Return the published figures, marked as unsound."""
        name, proof = f"as published ({self.version})", "docs/theory/privatemail.md"
        return make_guarantee(self.epsilon, self.delta, name, proof, reason=self.reason, unit="image")

    def release(
        self, features: Floats, labels: Labels | None, dummies: Dummies | None, source: Source
    ) -> tuple[dict[str, Any], NDArray[np.intp]]:
        """Embed the anchors with one target and its true label, and add noise, for each row."""
        if labels is None:
            raise ValueError("labels must be given: as published, the target's own label is used after the noise")
        if (labels < 0).any():
            raise ValueError("labels must be numbered from 0")
        if dummies is not None and self.version != "2022":
            raise ValueError(f'dummies are no part of as_published="{self.version}"')
        weights = compute_kernel(self.anchors, self.anchors, self.bandwidth, same=True)
        pairs = zip(features, labels, strict=True)
        messages = [self._make_message(weights, row, label, dummies, source) for row, label in pairs]
        embeddings, positions = zip(*messages, strict=True)
        return {"embedding": embeddings}, np.array(positions, dtype=np.intp)

    def read(self, message: Message) -> tuple[Floats, Floats, int]:
        """Return targets, anchors and steps."""
        m = len(self.anchors)
        rows = read_rows(message, "embedding", self.n_components, m + 1)
        return rows[:-m], rows[-m:], self.n_public_steps

    def take_steps(self, message: Message, steps: int) -> dict[str, Any]:
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
        start = generator.normal(scale=self.start_scale, size=(len(features) + len(self.anchors), self.n_components))
        rows = np.vstack([features, self.anchors])
        Z = self._embed_server(rows, np.concatenate([labels, self.labels]), start)
        return GalleryEmbedding(Z[: len(features)], Z[len(features) :], steps)

    def _make_message(
        self, anchor_weights: Floats, row: Floats, label: np.int64, dummies: Dummies | None, source: Source
    ) -> tuple[Floats, int]:
        """Return the embedding of one message, and the position of its target."""
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
        target_weights = compute_kernel(targets, np.vstack([targets, self.anchors]), self.bandwidth, same=True)
        generator = np.random.default_rng([self.public_seed, 0])
        # Draw the anchors' start first, so that it does not depend on the number of targets.
        start = np.roll(generator.normal(scale=self.start_scale, size=(m + t, self.n_components)), t, axis=0)
        all_labels = np.concatenate([labels, self.labels])
        return self._embed_client(anchor_weights, target_weights, all_labels, start, source), position

    def _embed_client(
        self, anchor_weights: Floats, target_weights: Floats, labels: Labels, start: Floats, source: Source
    ) -> Floats:
        """Embed the client's rows, targets before anchors, with the targets' true labels, which leak; add noise."""
        # `anchor_weights` are between anchors, `target_weights` from targets to all rows; diagonals are zero.
        t = len(target_weights)
        weights = np.empty((len(start), len(start)))
        weights[t:, t:], weights[:t], weights[t:, :t] = anchor_weights, target_weights, target_weights[:, t:].T
        label_graph, noise, Z = self.make_label_graph(labels), self.noise(start), start
        for _ in range(self.n_private_steps if self.repeats else 1):
            Z = add_noise(self._step(Z, weights, label_graph), noise, source=source)
        rebuilt = compute_kernel(Z, Z, self.bandwidth, same=True)
        for _ in range(self.n_public_steps):
            Z = self.rescale(self._step(Z, rebuilt, label_graph))
        return Z

    def _embed_server(self, rows: Floats, labels: Labels, start: Floats) -> Floats:
        """Embed the server's rows, gallery before anchors, with all their labels and no noise, from its own start."""
        # Single precision, like the program: an error of 1e-7 of a weight, in half the time.
        graph = gaussian_graph(rows.astype(np.float32), self.bandwidth)
        label_graph, Z = self.make_label_graph(labels), start
        for _ in range(self.n_public_steps + self.repeats * self.n_private_steps):
            pull = self.label_weight * label_graph.laplacian_matmul(Z) - graph.laplacian_matmul(Z.astype(np.float32))
            Z = self.rescale(Z + pull / (2 * (graph.degree[:, None] + _NO_DIVISION_BY_ZERO)))
        return Z

    def _step(self, Z: Floats, weights: Floats, label_graph: LabelGraph) -> Floats:
        degree = weights.sum(axis=1)[:, None]
        pull = self.label_weight * label_graph.laplacian_matmul(Z) - (degree * Z - weights @ Z)
        return np.asarray(Z + pull / (2 * (degree + _NO_DIVISION_BY_ZERO)))

    def rescale(self, Z: Floats) -> Floats:
        """Return the embedding after a step without noise, as it is."""
        return Z


ENGINES: dict[Version, type[PublishedEngine]] = {"2022": PublishedEngine}
"""Engines by version; ``studies.published`` adds "2021" and "2022-code"."""


def find_engine(version: Version) -> type[PublishedEngine]:
    """Return the engine of a published version, or raise an ImportError if it needs the studies."""
    if version not in ENGINES:
        with require_extra("studies"):
            import_module("studies.published")
    return ENGINES[version]
