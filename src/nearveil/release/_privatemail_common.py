"""What the sound PrivateMail and the published ones share: a server's embedding, dummies, a secret order."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import cdist

from nearveil.manifold import umeyama
from nearveil.privacy import Guarantee
from nearveil.privacy.noise import GaussianNoise, LaplaceNoise, Source
from nearveil.release._message import Message, MessageError

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
