"""Expected recall of a public map, estimated from the map alone, with its ceiling and floor.

A hostile server can publish a map with any estimate; the guarantee of a message does not depend on the map.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from nearveil.mechanisms.covers.channels import RandomizedResponse
from nearveil.mechanisms.covers.maps import DECAY
from nearveil.search.ceiling import neighbor_ceiling, popular_floor, reference_line
from nearveil.wire.client import FULL, K, find_prototypes
from nearveil.wire.messages import PublicPart

EPSILONS = tuple(round(0.25 * step, 2) for step in range(1, 49))  # up to 12
_MOST_ROWS = 2048  # prototypes to use as queries if they represent many items


@dataclass(frozen=True, eq=False)
class Outlook:
    """Expected recall of a map, by the mean share of the nearest images in the good set (`right`) and in an `other`."""

    n_sets: int
    right: float
    other: float
    whole: bool  # whether prototypes are the gallery's items, so that their popularity is known
    candidates: float
    reach: float  # the fraction of images in a set; an estimate if prototypes represent many items
    popularity: NDArray[np.int64] | None = field(repr=False)

    def expected(self, epsilon: float) -> float:
        """Estimate the share of the nearest images in an answer."""
        hit = RandomizedResponse(epsilon, self.n_sets).hit
        return hit * self.right + (1 - hit) * self.other

    def ceiling(self, epsilon: float) -> float:
        """Return Theorem D's ceiling for the map's popularity; for equal popularity if it is unknown."""
        if self.popularity is None:
            return reference_line(epsilon, self.candidates)
        return neighbor_ceiling(epsilon, self.candidates, self.popularity)

    @property
    def floor(self) -> float:
        """Recall of an answer that is the same for everyone."""
        return self.candidates if self.popularity is None else popular_floor(self.candidates, self.popularity)


def make_outlook(public: PublicPart) -> Outlook:
    """Estimate recall from a map: its prototypes act as queries, each excluded from its neighbours."""
    # If prototypes are centroids of many items, use the coverage around them and exclude nothing.
    table = public.map
    whole = table.n_items == len(table.prototypes) and not table.has_bits  # comparing many would be slow
    rows = table.prototypes.astype(np.float32)
    queries = np.arange(len(rows)) if whole else np.linspace(0, len(rows) - 1, min(_MOST_ROWS, len(rows))).astype(int)
    near = find_prototypes(table, rows[queries], queries if whole else None)
    weights, counted = np.exp(-np.arange(near.shape[1]) / DECAY), K if whole else 1
    right = other = 0.0
    for prototypes in near:  # one row at a time: a map may have thousands of sets
        covered = table.coverage[prototypes]
        around = covered[:counted].mean(axis=0) / FULL
        good = around[(weights @ covered).argmax()]
        right += good / len(near)
        other += (around.sum() - good) / (table.n_sets - 1) / len(near)
    popularity = np.bincount(near[:, :K].ravel(), minlength=len(rows)) if whole else None
    # At least the items of the best set around a centroid are in a set.
    reach = float(table.coverage.max(axis=1).mean() / FULL)
    return Outlook(table.n_sets, float(right), float(other), whole, public.candidates, reach, popularity)
