"""What a public map can be expected to find, from the map alone: a line, its ceiling and its floor.

A hostile server can make a map state anything; the guarantee of a message does not depend on the map.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from nearveil.mechanisms import PublicMap
from nearveil.mechanisms.covers.channels import RandomizedResponse
from nearveil.mechanisms.covers.maps import DECAY
from nearveil.search.ceiling import neighbor_ceiling, popular_floor, reference_line
from nearveil.wire.client import FULL, K, PublicPart, find_prototypes

Singles = NDArray[np.float32]
EPSILONS = tuple(round(0.25 * step, 2) for step in range(1, 49))  # up to 12
_MOST_ROWS = 2048  # that act as queries where prototypes stand for many items


@dataclass(frozen=True, eq=False)
class Outlook:
    """What a map can be expected to find.

    `right, other`: The mean share of the nearest images that the good set holds, and that any other set holds.
    `popularity`: How often each is among the nearest of another; None where prototypes stand for many items.
    """

    n_sets: int
    right: float
    other: float
    whole: bool  # whether the map's prototypes are the gallery's items, so that their popularity is known
    candidates: float
    reach: float  # the part of the images that some set holds; where prototypes stand for many items, about
    popularity: NDArray[np.int64] | None = field(repr=False)

    def expected(self, epsilon: float) -> float:
        """Return the share of the nearest images that an answer is expected to hold. An estimate."""
        hit = RandomizedResponse(epsilon, self.n_sets).hit
        return hit * self.right + (1 - hit) * self.other

    def ceiling(self, epsilon: float) -> float:
        """Return Theorem D for the popularity that the map shows; where it shows none, that of equal popularity."""
        if self.popularity is None:
            return reference_line(epsilon, self.candidates)
        return neighbor_ceiling(epsilon, self.candidates, self.popularity)

    @property
    def floor(self) -> float:
        """What an answer finds that is the same for everybody."""
        return self.candidates if self.popularity is None else popular_floor(self.candidates, self.popularity)


def make_outlook(public: PublicPart) -> Outlook:
    """Look at a map: its prototypes act as queries, each left out of its own neighbours.

    Where prototypes are centroids of many items, the map's coverage around them counts, and nothing is left out.
    """
    held = public.map
    whole = held.n_items == len(held.prototypes) and not held.has_bits  # many would take long to compare
    rows = unit_prototypes(held)
    some = np.arange(len(rows)) if whole else np.linspace(0, len(rows) - 1, min(_MOST_ROWS, len(rows))).astype(int)
    near = find_prototypes(held, rows[some], some if whole else None)
    weights, counted = np.exp(-np.arange(near.shape[1]) / DECAY), K if whole else 1
    right = other = 0.0
    for one in near:  # a row at a time: a map may have thousands of sets
        covered = held.coverage[one]
        around = covered[:counted].mean(axis=0) / FULL
        good = around[(weights @ covered).argmax()]
        right += good / len(near)
        other += (around.sum() - good) / (held.n_sets - 1) / len(near)
    popularity = np.bincount(near[:, :K].ravel(), minlength=len(rows)) if whole else None
    # Of the items around a centroid at least those are in a set that its best set holds.
    reach = float(held.coverage.max(axis=1).mean() / FULL)
    return Outlook(held.n_sets, float(right), float(other), whole, public.candidates, reach, popularity)


def unit_prototypes(held: PublicMap) -> Singles:
    """Return the prototypes with norm one, or zero."""
    rows = held.prototypes.astype(np.float32)
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    np.divide(rows, norms, out=rows, where=norms > 0)
    return rows
