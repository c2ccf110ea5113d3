"""The sound PrivateMail: the target's row alone, with the noise that it needs."""

from dataclasses import dataclass

import numpy as np

from nearveil.privacy import Basis, Guarantee
from nearveil.privacy.noise import Source
from nearveil.release._message import Message, MessageError
from nearveil.release._privatemail_common import (
    Arrays,
    Dummies,
    Floats,
    GalleryEmbedding,
    Labels,
    Released,
    checked_array,
    checked_steps,
    secret_order,
)
from nearveil.release._privatemail_public import anchor_path, public_steps
from nearveil.release._privatemail_steps import Noise, Public, averages, exact_steps, private_steps

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
