"""PrivateMail as published, behind the interface of the sound one."""

from dataclasses import dataclass

import numpy as np

from nearveil.privacy import Basis, Guarantee
from nearveil.privacy.noise import Source
from nearveil.release._message import Message
from nearveil.release._privatemail_common import (
    Arrays,
    Dummies,
    Floats,
    GalleryEmbedding,
    Labels,
    Released,
    checked_array,
    secret_order,
)
from nearveil.release._privatemail_published import (
    REASONS,
    Recipe,
    client_embedding,
    kernel,
    server_embedding,
)


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
