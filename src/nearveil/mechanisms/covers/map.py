"""The public map: what a server publishes of its gallery so that a client can choose one of its sets."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from nearveil.mechanisms.base import Floats, fingerprint
from nearveil.mechanisms.covers.channel import (
    MOST_NEIGHBORS,
    Keys,
    Singles,
    directions,
    find_prototypes,
    largest_keys,
    most_covered,
    round_to_steps,
    similarity_keys,
)
from nearveil.mechanisms.message import Message, MessageError, check_shape

Number = TypeVar("Number", bound=np.generic)

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
_CHUNK = 1 << 18  # similarities that are held at once
_TINY = 2.0**-24  # the smallest component above zero


class MapError(MessageError):
    """A map is not valid: wrong or too large shapes, or numbers that are not finite."""


@dataclass(frozen=True, eq=False)
class PublicMap:
    """A small table from which a client finds the good set of a row. Nothing in it is private.

    Prototypes stand for the gallery; each knows how much of what lies around it every set covers. A row is projected,
    its nearest prototypes are weighted by rank, and the set that covers most is the good one. The choice is a fixed
    function of the row, so a hostile map breaks no guarantee.

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

    Examples
    --------
    >>> from nearveil.mechanisms import Cells
    >>> rows = np.random.default_rng(0).standard_normal((80, 3))
    >>> map_ = Cells(2.0, 0.2).fit(rows[:40]).index(rows[40:]).map_
    >>> PublicMap.from_bytes(map_.to_bytes()).n_sets
    5
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
            object.__setattr__(self, name, _read_only(np.array(given, order="C")))
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
        """Return the good set of each row of norm one: a function of the row and the map alone."""
        if features.shape[1] != len(self.components):
            raise MapError(f"the map is for {len(self.components)} features; X has {features.shape[1]}")
        good = np.zeros(len(features), dtype=np.int64)
        for some in self._chunks(len(features)):
            keys = self._keys(round_to_steps(features[some]) @ self._components)
            good[some] = most_covered(keys, self.coverage)
        return good

    def nearest(self, projected: Floats, count: int) -> NDArray[np.int64]:
        """Return the prototypes nearest to projected rows of any length, nearest first, at most 32 for each."""
        if not 1 <= count <= min(MOST_NEIGHBORS, len(self.prototypes)):
            raise ValueError(f"count must be from 1 to {min(MOST_NEIGHBORS, len(self.prototypes))}")
        near = np.zeros((len(projected), count), dtype=np.int64)
        for some in self._chunks(len(projected)):
            near[some] = find_prototypes(largest_keys(self._keys(projected[some]))[:, :count])
        return near

    def _keys(self, projected: Floats) -> Keys:
        return similarity_keys(directions(projected), self._directions)

    def _chunks(self, n_rows: int) -> Iterator[slice]:
        step = max(1, _CHUNK // len(self.prototypes))
        return (slice(start, start + step) for start in range(0, n_rows, step))

    @cached_property
    def _components(self) -> Floats:
        """Whole numbers up to 2^16. With features in steps of 2^-20 all sums are below 2^53, so exact."""
        wide = self.components.astype(np.float64)
        return _read_only(round_to_steps(wide / max(float(np.abs(wide).max()), _TINY), 2.0**16))

    @cached_property
    def _directions(self) -> Singles:
        return _read_only(directions(self.prototypes.astype(np.float64)))

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
        """Read a map, or raise a MessageError; nothing in the bytes is trusted."""
        read = Message.from_bytes(data, _LARGEST)
        if read.mechanism != _NAME or read["components"].dtype != np.uint16 or read["sizes"].shape != (2,):
            raise MapError("data is not a map")
        n_items, set_size = (int(size) for size in read["sizes"])
        found = cls(read["components"].view(np.float16), read["prototypes"], read["coverage"], n_items, set_size)
        if found.map_id != read.public_id:
            raise MapError("data is not the map that it says it is")
        return found


def _read_only(values: NDArray[Number]) -> NDArray[Number]:
    values.setflags(write=False)
    return values


def _check_size(name: str, shape: tuple[int, ...]) -> None:
    try:
        check_shape(name, shape, _LARGEST)
    except MessageError as error:
        raise MapError(str(error)) from None
