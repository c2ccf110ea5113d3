"""From parameters and public rows to what a PrivateMail does."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from nearveil.graph.labels import Encoding
from nearveil.mechanisms.base import Floats, Release, checked_labels
from nearveil.mechanisms.message import Message, MessageError
from nearveil.mechanisms.privatemail._steps import (
    MOST_STEPS,
    Arrays,
    Dummies,
    Engine,
    GalleryEmbedding,
    Kind,
    Labels,
    Noise,
    Public,
    Released,
    aligned_distances,
    averages,
    calibrated,
    checked_array,
    checked_count,
    checked_steps,
    exact_steps,
    prepare,
    private_steps,
    secret_order,
    sensitivities,
)
from nearveil.mechanisms.privatemail.published import (
    REASONS,
    Recipe,
    Version,
    anchor_path,
    client_embedding,
    kernel,
    public_steps,
    server_embedding,
)
from nearveil.privacy import Basis, Guarantee
from nearveil.privacy.noise import Source


@dataclass(frozen=True)
class Parameters:
    """The parameters of :class:`nearveil.mechanisms.PrivateMail`, checked one by one."""

    epsilon: float
    delta: float
    noise: Kind
    n_components: int
    bandwidth: float
    label_weight: float
    n_private_steps: int
    n_public_steps: int
    start_scale: float
    label_encoding: Encoding
    n_anchors: int | None
    public_seed: int
    as_published: Version | None
    allow_unsound: bool


def build(given: Parameters, features: Floats, labels: Labels | None) -> Engine:
    """Choose the anchors, then prepare the sound version or a published one."""
    anchors, labels = _anchors(given, features, labels)
    return _sound(given, anchors, labels) if given.as_published is None else _published(given, anchors, labels)


def _anchors(given: Parameters, features: Floats, labels: Labels | None) -> tuple[Floats, Labels | None]:
    """Return the rows that have a direction, or `n_anchors` of them by the public seed."""
    if labels is not None and (labels < -1).any():
        raise ValueError("public_y must hold labels from 0, or -1 for a row without")
    kept = np.flatnonzero(features.any(axis=1))
    if given.n_anchors is not None:
        if given.n_anchors > len(kept):
            raise ValueError(f"n_anchors must be at most the {len(kept)} public rows that differ from their mean")
        kept = np.sort(np.random.default_rng([given.public_seed, 2]).choice(kept, given.n_anchors, replace=False))
    if len(kept) <= given.n_components:
        raise ValueError(
            f"public_X must have more than n_components={given.n_components} rows that differ from their mean"
        )
    return features[kept], None if labels is None else labels[kept]


def _sound(given: Parameters, anchors: Floats, labels: Labels | None) -> Engine:
    generator = np.random.default_rng([given.public_seed, 0])
    public = prepare(
        anchors,
        labels,
        generator.normal(scale=given.start_scale, size=(len(anchors) + 1, given.n_components)),
        bandwidth=given.bandwidth,
        label_weight=given.label_weight,
        label_encoding=given.label_encoding,
        steps=given.n_private_steps,
    )
    delta = given.delta if given.noise == "gaussian" else 0.0
    noises = calibrated(given.noise, given.epsilon, delta, sensitivities(public, given.noise), given.n_components)
    return SoundEngine(public, noises, given.epsilon, delta, given.n_public_steps)


def _published(given: Parameters, anchors: Floats, labels: Labels | None) -> Engine:
    if labels is None or (labels < 0).any():
        raise ValueError("public_y must label every row, from 0, where as_published is set")
    assert given.as_published is not None
    recipe = Recipe(
        given.as_published,
        epsilon=given.epsilon,
        delta=given.delta,
        sigma=given.bandwidth,
        label_weight=given.label_weight,
        start_scale=given.start_scale,
        n_classes=int(labels.max()) + 1,
        private_steps=given.n_private_steps,
        public_steps=given.n_public_steps,
    )
    return PublishedEngine(recipe, anchors, labels, given.n_components, given.public_seed)


class EmbeddingServer(Release):
    """What needs a message, the gallery and the fitted public rows alone; the client's half is added to it."""

    n_public_steps: int
    _engine: Engine

    def continue_embedding(self, message: Message, steps: int) -> Message:
        """Take further public steps: anybody who fitted the same public rows can, and nothing private is needed.

        Parameters
        ----------
        message : Message
        steps : int

        Returns
        -------
        Message
            As if the client had taken them.
        """
        self._check_fitted()
        self._check_message(message)
        further = checked_count(steps)
        if self._engine.read(message)[2] + further > MOST_STEPS:
            raise ValueError(f"steps must not take the message beyond {MOST_STEPS} in all")
        return Message(self.name, message.public_id, self._engine.continued(message, further), message.seeded)

    def embed_gallery(
        self, gallery: ArrayLike, gallery_labels: ArrayLike | None = None, *, steps: int | None = None
    ) -> GalleryEmbedding:
        """Embed the server's items with the anchors, once for many messages.

        Parameters
        ----------
        gallery : array-like of shape (n, d)
        gallery_labels : array-like of shape (n,), optional
            For `as_published` alone.
        steps : int, optional
            Public steps of the messages to come; `n_public_steps` unless given.

        Returns
        -------
        GalleryEmbedding
        """
        features = self.features(gallery, "gallery", lenient=True)
        labels = None if gallery_labels is None else checked_labels(gallery_labels, len(features), "gallery_labels")
        return self._engine.embed_gallery(
            features, labels, self.n_public_steps if steps is None else checked_count(steps)
        )

    def rank_each(
        self, message: Message, gallery: ArrayLike | GalleryEmbedding, gallery_labels: ArrayLike | None = None
    ) -> Floats:
        """Score the server's items for every target of a message, dummies and all; `rank` takes the best of them.

        Parameters
        ----------
        message : Message
        gallery : array-like of shape (n, d) or GalleryEmbedding
            Rows, or what :meth:`embed_gallery` made of them.
        gallery_labels : array-like of shape (n,), optional
            For `as_published` alone.

        Returns
        -------
        ndarray of shape (targets, n)
            The higher, the nearer: minus the distance after Umeyama alignment on the anchors.
        """
        self._check_fitted()
        self._check_message(message)
        if not isinstance(gallery, GalleryEmbedding):
            gallery = self.embed_gallery(gallery, gallery_labels, steps=self._engine.read(message)[2])
        return self._scores(message, gallery)

    def _prepare(self, features: Floats) -> tuple[Floats, GalleryEmbedding]:
        return features, self._engine.embed_gallery(features, None, self.n_public_steps)

    def _rank(self, message: Message, prepared: tuple[Floats, GalleryEmbedding]) -> Floats:
        features, embedded = prepared
        steps = self._engine.read(message)[2]
        if embedded.steps != steps:  # somebody continued the message
            embedded = self._engine.embed_gallery(features, None, steps)
        scores: Floats = self._scores(message, embedded).max(axis=0)
        return scores

    def _scores(self, message: Message, server: GalleryEmbedding) -> Floats:
        targets, anchors, steps = self._engine.read(message)
        if server.steps != steps:
            raise MessageError(f"message has taken {steps} public steps: embed the gallery with as many")
        return -aligned_distances(targets, anchors, server)


_BLOCK = 1 << 22  # weights made at a time: 32 MiB


@dataclass(frozen=True, eq=False)
class SoundEngine:
    """What is public, the noise of each private step, and what it promises."""

    public: Public
    noises: tuple[Noise, ...]
    epsilon: float
    delta: float
    n_public_steps: int

    def guarantee(self) -> Guarantee:
        """Theorems 1 to 3 of ``docs/theory/privatemail.md``; the calibration is certified by that of the noise."""
        extra = sum(noise.extra_delta for noise in self.noises)
        return Guarantee(
            epsilon=self.epsilon,
            delta=max(self.delta, extra),
            protects="query",
            unit="record",
            relation="replace",
            basis=Basis("target's row of the query, Theorems A and A'", "docs/theory/privatemail.md"),
            events=tuple(noise.event for noise in self.noises),
            extra_delta=extra,
        )

    def release(self, features: Floats, labels: Labels | None, dummies: Dummies | None, source: Source) -> Released:
        """Take the private steps of all rows at once, then the public ones."""
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
        rows = self._moved(released.reshape(-1, released.shape[-1])).reshape(released.shape)
        steps = np.array(self.n_public_steps, dtype=np.int32)
        found = [{"released": own, "embedding": now, "steps": steps} for own, now in zip(released, rows, strict=True)]
        return Released(found, np.argmin(order, axis=1))

    def read(self, message: Message) -> tuple[Floats, Floats, int]:
        """Return targets, anchors and steps."""
        _, rows, steps = self._state(message)
        return rows, anchor_path(self.public, steps).anchors[-1], steps

    def continued(self, message: Message, steps: int) -> Arrays:
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

    def _moved(self, released: Floats) -> Floats:
        """Take the public steps of all targets of all messages, a block at a time."""
        path = anchor_path(self.public, self.n_public_steps)
        block = max(1, _BLOCK // len(self.public.anchors))
        parts = (released[i : i + block] for i in range(0, len(released), block))
        return np.concatenate([public_steps(self.public, rows, rows, path) for rows in parts])

    def _state(self, message: Message) -> tuple[Floats, Floats, int]:
        """Return what was released, where it is now, and how many steps that took."""
        k = len(self.public.start)
        released, rows = checked_array(message, "released", k, 1), checked_array(message, "embedding", k, 1)
        if released.shape != rows.shape:
            raise MessageError("embedding must have a row for each row released")
        return released, rows, checked_steps(message)


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
        return Guarantee(
            epsilon=self.recipe.epsilon,
            delta=self.recipe.delta,
            protects="query",
            unit="image",
            relation="replace",
            basis=Basis(f"as published ({self.recipe.version})", "docs/theory/privatemail.md"),
            sound=False,
            reason=REASONS[self.recipe.version],
        )

    def release(self, features: Floats, labels: Labels | None, dummies: Dummies | None, source: Source) -> Released:
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
        return Released([arrays for arrays, _ in found], np.array([position for _, position in found], dtype=np.intp))

    def read(self, message: Message) -> tuple[Floats, Floats, int]:
        """Return targets, anchors and steps."""
        m = len(self.anchors)
        rows = checked_array(message, "embedding", self.n_components, m + 1)
        return rows[:-m], rows[-m:], self.recipe.public_steps

    def continued(self, message: Message, steps: int) -> Arrays:
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
            raise ValueError("gallery must not hold a row that equals the public mean: it has no direction")
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
