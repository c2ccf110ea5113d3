"""What is shown of an index in one state."""

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from nearveil.gallery.publishing import Stamp
from nearveil.protocol.server import Served, ServerProtocol
from nearveil.service._cache import ByteCache

SMALL = 1 << 18  # bytes of an answer that is made at once rather than by a thread: under a millisecond
_SAME = 1e-9  # of fractions


@dataclass(frozen=True, eq=False)
class Settled(Served):
    """A map with what was deleted up to one moment; who answers by it has just looked whether that has changed."""

    living: NDArray[np.bool_] = field(repr=False)

    def alive(self) -> NDArray[np.bool_]:
        """Return which items were there at that moment."""
        return self.living

    @property
    def nbytes(self) -> int:
        """Of an answer without images."""
        return int(self.release.map_.set_size * (4 + self.codes.shape[1]))


@dataclass(frozen=True, eq=False)
class Shown:
    """What is shown of an index in one state: its maps, newest first, and the answers that were made in it."""

    stamp: Stamp
    maps: tuple[Settled, ...]
    protocol: ServerProtocol | None
    answers: ByteCache
    frames: dict[int, bytes]

    @cached_property
    def small(self) -> bool:
        """Whether an answer without images is made in less than a millisecond."""
        return bool(self.maps) and max(one.nbytes for one in self.maps) <= SMALL

    def place(self, candidates: float | None) -> int | None:
        """Return which of the maps is the newest, or the newest for a fraction."""
        for number, one in enumerate(self.maps):
            if candidates is None or math.isclose(one.release.candidates, candidates, rel_tol=0, abs_tol=_SAME):
                return number
        return None
