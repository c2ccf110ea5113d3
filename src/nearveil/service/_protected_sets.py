"""The public half of a protected gallery: a map of public images, and a prototype of each of its sets."""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from nearveil.release import Message
from nearveil.retrieval import Index, NotPublishedError, Published

_AT_ONCE = 8192  # items whose features are held at a time


@dataclass(frozen=True, eq=False)
class PublicSets:
    """The sets of one published map. Nothing here has ever seen a private record.

    Parameters
    ----------
    index : Index
        Of public images.
    published : Published
        A map of it.
    """

    index: Index
    published: Published = field(repr=False)

    @property
    def public_id(self) -> str:
        """The fingerprint that messages for this map carry."""
        return self.published.public_id

    @property
    def count(self) -> int:
        """How many sets there are."""
        return self.published.map.n_sets

    def named(self, message: Message) -> int:
        """Return the set that a message names; MessageError where it names none."""
        return int(self.published.release._named(message)[0])

    def centred(self, rows: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return rows less the public mean, element by element: each depends on itself alone, to the last bit.

        The promise needs that (``docs/theory/private-knn.md``, Theorem 1). Norms are left to the voters, who take them
        in whole numbers.

        Parameters
        ----------
        rows : ndarray of shape (n, d)

        Returns
        -------
        ndarray of shape (n, d)
        """
        return rows.astype(np.float64) - self.published.mean.astype(np.float64)

    @cached_property
    def prototypes(self) -> NDArray[np.float64]:
        """The mean of the public features, centred and of norm one, whose good set each is; shape (n_sets, d).

        A set that is nobody's good set has the mean of its own items. Items that were deleted since are left out.
        """
        release, members = self.published.release, self.published.release.members_
        alive = np.flatnonzero(self.index.alive(self.published))
        chosen, inside = (np.zeros((self.count, self.index.dimension)) for _ in range(2))
        for start in range(0, len(alive), _AT_ONCE):
            some = alive[start : start + _AT_ONCE]
            rows = release.features(self.index.features(self.published.ids[some]), "gallery", lenient=True)
            np.add.at(chosen, release.map_.choose(rows), rows)
            inside += members[:, some] @ rows
        empty = ~chosen.any(axis=1)
        chosen[empty] = inside[empty]
        norms = np.linalg.norm(chosen, axis=1, keepdims=True)
        found: NDArray[np.float64] = np.divide(chosen, norms, out=np.zeros_like(chosen), where=norms > 0)
        return found


def all_sets(public: Index) -> list[PublicSets]:
    """Return the sets of all maps that are kept of public images, the newest first.

    Parameters
    ----------
    public : Index

    Returns
    -------
    list of PublicSets
    """
    maps = [PublicSets(public, one) for one in public.maps()]
    if not maps:
        raise NotPublishedError("public: nothing was published of it yet: call publish(epsilon)")
    return maps
