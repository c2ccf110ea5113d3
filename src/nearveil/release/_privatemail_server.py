"""The half of PrivateMail that holds nothing private: the server's, and that of whoever continues an embedding."""

from numpy.typing import ArrayLike

from nearveil.release._base import Floats, Release, checked_labels
from nearveil.release._message import Message, MessageError
from nearveil.release._privatemail_common import (
    MOST_STEPS,
    Engine,
    GalleryEmbedding,
    aligned_distances,
    checked_count,
)


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
