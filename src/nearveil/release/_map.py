"""The public map: what a server publishes of its gallery so that a client can choose one of its sets."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

import faiss
import numpy as np
from numpy.typing import NDArray

from nearveil.release._base import Floats, fingerprint
from nearveil.release._message import Message, MessageError, check_shape

_NAME = "map"
MOST_FEATURES = 16_000  # dimensions of a feature: what a column of pgvector holds
MOST_DIMENSIONS = 64  # of a projected feature
MOST_PROTOTYPES = 8192
MOST_SETS = 4096
MOST_ITEMS = 1 << 32  # as many as there are ids
_LARGEST = {
    "components": (MOST_FEATURES, MOST_DIMENSIONS),
    "prototypes": (MOST_PROTOTYPES, MOST_DIMENSIONS),
    "coverage": (MOST_PROTOTYPES, MOST_SETS),
    "sizes": (2,),
}
_CHUNK = 4096  # rows whose nearest prototypes' coverage is held at once
RULE_NEIGHBORS = 24
RULE_DECAY = 8.0


class MapError(MessageError):
    """A map is not valid: wrong or too large shapes, or numbers that are not finite."""


@dataclass(frozen=True, eq=False)
class PublicMap:
    """A small table from which a client finds the good set of a row. Nothing in it is private.

    Prototypes stand for the gallery; each knows how much of what lies around it every set covers. A row is
    projected, its nearest prototypes are weighted by rank, and the set that covers most is the good one.
    The choice is a fixed function of the row, whatever the map holds, so a hostile map breaks no promise.

    Parameters
    ----------
    components : ndarray of shape (d, r), float16
        Projection of features of norm one.
    prototypes : ndarray of shape (m, r), int8
        Projected and scaled so that the largest entry is 127.
    coverage : ndarray of shape (m, n_sets), uint8
        The share of what lies around a prototype that a set holds, times 255.
    n_items : int
        Of the gallery.
    set_size : int
        Items that every answer holds.
    """

    components: NDArray[np.float16] = field(repr=False)
    prototypes: NDArray[np.int8] = field(repr=False)
    coverage: NDArray[np.uint8] = field(repr=False)
    n_items: int
    set_size: int

    def __post_init__(self) -> None:
        for name, kind in (("components", "f2"), ("prototypes", "i1"), ("coverage", "u1")):
            given = getattr(self, name)
            if given.dtype != np.dtype(kind) or given.ndim != 2 or 0 in given.shape:
                raise MapError(f"{name} must be a table of type {kind} with rows and columns")
            _check_size(name, given.shape)
            values = np.array(given, order="C")
            values.setflags(write=False)
            object.__setattr__(self, name, values)
        if not np.isfinite(self.components).all():
            raise MapError("components must be finite")
        if self.components.shape[1] != self.prototypes.shape[1] or len(self.prototypes) != len(self.coverage):
            raise MapError("components, prototypes and coverage must fit each other")
        if self.n_sets < 2:
            raise MapError(f"coverage must be of 2 to {MOST_SETS} sets")
        if self.n_items > MOST_ITEMS:
            raise MapError(f"n_items must be at most {MOST_ITEMS}, as many as there are ids")
        if not 1 <= self.set_size <= self.n_items:
            raise MapError("set_size must be from 1 to n_items")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).from_bytes, (self.to_bytes(),)

    @property
    def n_sets(self) -> int:
        """The number of sets, the L of the channel."""
        return int(self.coverage.shape[1])

    @property
    def nbytes(self) -> int:
        """The bytes that a client fetches once."""
        return len(self.to_bytes())

    @cached_property
    def map_id(self) -> str:
        """The fingerprint that messages carry."""
        return fingerprint(self.components, self.prototypes, self.coverage, self.n_items, self.set_size)

    def choose(self, features: Floats) -> NDArray[np.int64]:
        """Return the good set of each row: a function of the row and the map alone.

        Parameters
        ----------
        features : ndarray of shape (n, d)
            Of norm one.

        Returns
        -------
        ndarray of shape (n,)
        """
        if features.shape[1] != len(self.components):
            raise MapError(f"the map is for {len(self.components)} features; X has {features.shape[1]}")
        # A number may underflow for some rows and not for others. To stop there would tell which.
        with np.errstate(all="ignore"):
            return self._choose(features.astype(np.float32) @ self._components)

    def _choose(self, projected: NDArray[np.float32]) -> NDArray[np.int64]:
        count = min(RULE_NEIGHBORS, len(self.prototypes))
        _, near = self._nearest.search(projected, count)
        good = np.zeros(len(projected), dtype=np.int64)
        for start in range(0, len(projected), _CHUNK):
            some = slice(start, start + _CHUNK)
            # -1 where the projections are so large that no similarity is a number: then any prototype will do.
            good[some] = (self._weights[:count] @ self.coverage[np.maximum(near[some], 0)]).argmax(axis=1)
        return good

    @cached_property
    def _components(self) -> NDArray[np.float32]:
        return self.components.astype(np.float32)

    @cached_property
    def _nearest(self) -> faiss.IndexFlatIP:
        rows = self.prototypes.astype(np.float32)
        norms = np.sqrt(np.einsum("ij,ij->i", rows, rows))[:, None]
        np.divide(rows, norms, out=rows, where=norms > 0)
        index = faiss.IndexFlatIP(rows.shape[1])
        index.add(rows)
        return index

    @cached_property
    def _weights(self) -> NDArray[np.float32]:
        return np.exp(-np.arange(RULE_NEIGHBORS) / RULE_DECAY).astype(np.float32)

    def to_bytes(self) -> bytes:
        """Return the map as bytes, in the form of messages."""
        sizes = np.array([self.n_items, self.set_size], dtype=np.int64)
        arrays: dict[str, NDArray[Any]] = {
            "components": self.components.view(np.uint16),
            "prototypes": self.prototypes,
            "coverage": self.coverage,
            "sizes": sizes,
        }
        return Message(_NAME, self.map_id, arrays).to_bytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read a map; nothing in the bytes is trusted.

        Parameters
        ----------
        data : bytes

        Returns
        -------
        PublicMap

        Raises
        ------
        MessageError
            If they are not a map.
        """
        read = Message.from_bytes(data, _LARGEST)
        if read.mechanism != _NAME or read["components"].dtype != np.uint16 or read["sizes"].shape != (2,):
            raise MapError("data is not a map")
        n_items, set_size = (int(size) for size in read["sizes"])
        found = cls(read["components"].view(np.float16), read["prototypes"], read["coverage"], n_items, set_size)
        if found.map_id != read.public_id:
            raise MapError("data is not the map that it says it is")
        return found


def _check_size(name: str, shape: tuple[int, ...]) -> None:
    try:
        check_shape(name, shape, _LARGEST)
    except MessageError as error:
        raise MapError(str(error)) from None
