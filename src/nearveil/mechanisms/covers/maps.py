"""The public map, and the choice of a set in whole numbers, in a time that does not depend on the row."""

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from nearveil.mechanisms.messages import Floats, Message, MessageError, check_shape, fingerprint
from nearveil.wire.frames import MOST_FEATURES

Singles = NDArray[np.float32]
Keys = NDArray[np.int32]

NEIGHBORS = 24  # prototypes that vote
DECAY = 8.0  # of their weights, in ranks
MOST_NEIGHBORS = 32  # outputs of the network: a power of two
_LENGTH = 4000.0  # of a direction: products are below 2^24, so sums in 32-bit floats are exact in any order
_FINE = 2.0**20  # steps per unit in 64-bit floats
_INDEX_BITS = (13, 15)  # for up to 8192 prototypes, and for more
_SIMILARITY_DROPS = 7  # a similarity loses the index's bits less these: a key of 32 bits holds both
_LOWEST = np.iinfo(np.int32).min
# The sum of weights is 2^15.02; times a coverage of 255 it is below 2^24.
_WEIGHTS = np.append(np.rint(4096 * np.exp(-np.arange(NEIGHBORS) / DECAY)), 0).astype(np.float32)
_BLOCK = 1 << 22  # coverages converted to floats at once


def round_to_steps(values: Floats, steps: float = _FINE) -> Floats:
    """Return values in whole steps, as floats."""
    return np.rint(values * steps)


def directions(rows: Floats) -> Singles:
    """Return the directions of rows of up to 64 numbers, as integers; correctly rounded, so equal on every machine."""
    largest = np.maximum(np.abs(rows).max(axis=1, keepdims=True), 1.0)
    scaled = np.rint(rows * _FINE / largest)
    norms = np.sqrt((scaled * scaled).sum(axis=1, keepdims=True))  # the sum is below 2^53, so exact
    return np.asarray(np.rint(scaled * _LENGTH / np.maximum(norms, 1.0)), dtype=np.float32)


def similarity_keys(queries: Singles, prototypes: Singles) -> Keys:
    """Return keys of queries and at most 32768 prototypes: larger if nearer; among equally near ones, if first."""
    bits = _index_bits(len(prototypes))
    similarities = (queries @ prototypes.T).astype(np.int32)
    similarities >>= bits - _SIMILARITY_DROPS
    similarities <<= bits
    similarities += (1 << bits) - 1 - np.arange(len(prototypes), dtype=np.int32)
    return similarities


def _index_bits(count: int) -> int:
    """Return the number of bits of a key that identify one of `count` prototypes."""
    return _INDEX_BITS[count > MOST_GRADED]


def largest_keys(keys: Keys) -> Keys:
    """Return the 32 largest keys of each row, in order, by a network that depends on the shape only (Batcher)."""
    n, m = keys.shape
    lists = np.full((1, max(MOST_NEIGHBORS, 1 << (m - 1).bit_length()), n), _LOWEST, dtype=np.int32)
    lists[0, :m] = keys.T
    while lists.shape[1] > 1:
        length, count = len(lists), lists.shape[1] // 2
        first, second = lists[:, :count], lists[::-1, count:]
        lists = np.maximum(first, second)[None] if length == MOST_NEIGHBORS else _exchange(first, second)
        while length > 1:
            length //= 2
            blocks = lists.reshape(-1, 2, length, count, n)
            lists = _exchange(blocks[:, 0], blocks[:, 1]).swapaxes(0, 1)
        lists = lists.reshape(-1, count, n)
    return lists[:, 0].T


def _exchange(first: Keys, second: Keys) -> Keys:
    out = np.empty((2, *first.shape), dtype=np.int32)
    np.maximum(first, second, out=out[0])
    np.minimum(first, second, out=out[1])
    return out


def find_prototypes(keys: Keys, count: int) -> NDArray[np.int64]:
    """Return the prototypes of keys."""
    last = (1 << _index_bits(count)) - 1
    return (last - (keys & last)).astype(np.int64)


def most_covered(keys: Keys, coverage: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return the (first) set with the largest coverage around each query, with prototypes weighted by rank."""
    weights = _rank_weights(keys)
    m, n_sets = coverage.shape
    total = np.zeros((len(keys), n_sets), dtype=np.float32)
    step = max(1, _BLOCK // n_sets)
    for start in range(0, m, step):
        block = slice(start, start + step)
        total += weights[:, block] @ coverage[block].astype(np.float32)
    ranked = total.astype(np.int64) * MOST_SETS + np.arange(MOST_SETS - 1, MOST_SETS - 1 - n_sets, -1)
    best: NDArray[np.int64] = ranked.max(axis=1)
    return MOST_SETS - 1 - best % MOST_SETS


def _rank_weights(keys: Keys) -> Singles:
    """Return the weight of each prototype for each query, shape (n, m); zero except for the nearest."""
    top = largest_keys(keys)[:, :NEIGHBORS]
    ranks = np.zeros(keys.shape, dtype=np.uint8)
    for rank in range(NEIGHBORS):
        ranks += keys < top[:, rank, None]
    # A table of two cache lines; every query reads each weight once.
    return _WEIGHTS.take(ranks)


_NAME = "map"
MOST_DIMENSIONS = 64  # of a projected feature
MOST_PROTOTYPES = 32_768
MOST_GRADED = 8192  # prototypes with coverage in 255 steps; more prototypes have one bit
PROTOTYPES = MOST_GRADED  # in a gallery up to this size, every item is a prototype
MOST_COVERAGE = 1 << 25  # prototypes times sets
MOST_SETS = 4096
MOST_ITEMS = 1 << 32  # the number of ids
_LARGEST = {
    "components": (MOST_FEATURES, MOST_DIMENSIONS),
    "prototypes": (MOST_PROTOTYPES, MOST_DIMENSIONS),
    "coverage": (MOST_PROTOTYPES, MOST_SETS),
    "bits": (MOST_PROTOTYPES, MOST_SETS // 8),
    "sizes": (3,),
}
_SMALL_ANSWER = 0.03  # part of a gallery: smaller answers need more prototypes
_CHUNK = 1 << 18  # similarities in memory at once
_TINY = 2.0**-24  # the smallest positive component


class MapError(MessageError):
    """Raised for an invalid map: wrong or too large shapes, or numbers that are not finite."""


@dataclass(frozen=True, eq=False)
class PublicMap:
    """A small public table that a client uses to find the good set of a row.

    Prototypes represent the gallery, with the coverage of their neighbourhood by every set. A row is projected, its
    nearest prototypes are weighted by rank, and the set with the largest coverage is the good one. The choice is a
    fixed function of the row, so a hostile map breaks no guarantee.

    Examples
    --------
    >>> from nearveil.mechanisms import Covers
    >>> rows = np.random.default_rng(0).standard_normal((80, 3))
    >>> map_ = Covers(2.0, 0.2, n_sets=5).fit(rows[:40]).index(rows[40:]).map_
    >>> PublicMap.from_bytes(map_.to_bytes()).n_sets
    5
    """

    components: NDArray[np.float16] = field(repr=False)  #: projection for features of norm one, shape (d, r)
    prototypes: NDArray[np.int8] = field(repr=False)  #: projected rows, scaled to a largest entry of 127, shape (m, r)
    #: The fraction of items around a prototype that are in a set, times 255, shape (m, n_sets). With more than 8192
    #: prototypes it is 0 or 255, and serialized as bits.
    coverage: NDArray[np.uint8] = field(repr=False)
    n_items: int  #: items of the gallery
    set_size: int  #: items of every answer

    def __post_init__(self) -> None:
        for name, kind in (("components", "f2"), ("prototypes", "i1"), ("coverage", "u1")):
            table = getattr(self, name)
            if table.dtype != np.dtype(kind) or table.ndim != 2 or 0 in table.shape:
                raise MapError(f"{name} must be a table of type {kind} with rows and columns")
            check_shape(name, table.shape, _LARGEST, MapError)
            object.__setattr__(self, name, _read_only(np.array(table, order="C")))
        if not np.isfinite(self.components).all():
            raise MapError("components must be finite")
        if self.components.shape[1] != self.prototypes.shape[1] or len(self.prototypes) != len(self.coverage):
            raise MapError(
                "components and prototypes must have equally many columns, and coverage a row for each prototype"
            )
        if self.n_sets < 2:
            raise MapError(f"coverage must have 2 to {MOST_SETS} sets")
        if self.coverage.size > MOST_COVERAGE:
            raise MapError(f"coverage must hold at most {MOST_COVERAGE} numbers")
        if self.has_bits and (self.coverage + np.uint8(1)).max() > 1:  # 255 + 1 is 0
            raise MapError(f"coverage must be 0 or 255 with more than {MOST_GRADED} prototypes")
        if self.n_items > MOST_ITEMS:
            raise MapError(f"n_items must be at most {MOST_ITEMS}, the number of ids")
        if not 1 <= self.set_size <= self.n_items:
            raise MapError("set_size must be from 1 to n_items")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).from_bytes, (self.to_bytes(),)

    @property
    def n_features(self) -> int:
        """The number of columns of the rows that choose a set."""
        return len(self.components)

    @property
    def n_sets(self) -> int:
        """Number of sets, the L of the channel."""
        return int(self.coverage.shape[1])

    @property
    def has_bits(self) -> bool:
        """Whether the coverage is a bit: whether a set contains most items around a prototype."""
        return len(self.prototypes) > MOST_GRADED

    @property
    def nbytes(self) -> int:
        """Size in bytes; a client fetches a map once."""
        return len(self.to_bytes())

    @cached_property
    def map_id(self) -> str:
        """Fingerprint of the map, in every message."""
        return fingerprint(self.components, self.prototypes, self.coverage, self.n_items, self.set_size)

    def choose(self, features: Floats) -> NDArray[np.int64]:
        """Return the good set of each row of norm one, a function of the row and the map only."""
        if features.shape[1] != len(self.components):
            raise MapError(f"the map is for {len(self.components)} features; X has {features.shape[1]}")
        good = np.zeros(len(features), dtype=np.int64)
        for chunk in self._chunks(len(features)):
            keys = self._keys(round_to_steps(features[chunk]) @ self._components)
            good[chunk] = most_covered(keys, self.coverage)
        return good

    def nearest(self, projected: Floats, count: int) -> NDArray[np.int64]:
        """Return the at most 32 prototypes nearest to each projected row, nearest first."""
        if not 1 <= count <= min(MOST_NEIGHBORS, len(self.prototypes)):
            raise ValueError(f"count must be from 1 to {min(MOST_NEIGHBORS, len(self.prototypes))}")
        near = np.zeros((len(projected), count), dtype=np.int64)
        for chunk in self._chunks(len(projected)):
            near[chunk] = find_prototypes(largest_keys(self._keys(projected[chunk]))[:, :count], len(self.prototypes))
        return near

    def _keys(self, projected: Floats) -> Keys:
        return similarity_keys(directions(projected), self._directions)

    def _chunks(self, n_rows: int) -> list[slice]:
        step = max(1, _CHUNK // len(self.prototypes))
        return [slice(start, start + step) for start in range(0, n_rows, step)]

    @cached_property
    def _components(self) -> Floats:
        """Whole numbers up to 2^16: with features in steps of 2^-20, sums are below 2^53 and exact."""
        wide = self.components.astype(np.float64)
        return _read_only(round_to_steps(wide / max(float(np.abs(wide).max()), _TINY), 2.0**16))

    @cached_property
    def _directions(self) -> Singles:
        return _read_only(directions(self.prototypes.astype(np.float64)))

    def to_bytes(self) -> bytes:
        """Serialize the map, in the format of messages."""
        sizes = [self.n_items, self.set_size]
        arrays: dict[str, NDArray[Any]] = {"components": self.components.view(np.uint16), "prototypes": self.prototypes}
        if self.has_bits:
            sizes.append(self.n_sets)
            arrays["bits"] = np.packbits(self.coverage, axis=1)
        else:
            arrays["coverage"] = self.coverage
        arrays["sizes"] = np.array(sizes, dtype=np.int64)
        return Message(_NAME, self.map_id, arrays).to_bytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Parse untrusted bytes, or raise a MessageError."""
        parts = Message.from_bytes(data, _LARGEST)
        if (
            parts.mechanism != _NAME
            or parts["components"].dtype != np.uint16
            or parts["sizes"].shape not in ((2,), (3,))
        ):
            raise MapError("data is not a map")
        n_items, set_size, *n_sets = (int(size) for size in parts["sizes"])
        coverage = _unpack(parts["bits"], *n_sets) if n_sets else parts["coverage"]
        public_map = cls(parts["components"].view(np.float16), parts["prototypes"], coverage, n_items, set_size)
        if public_map.has_bits != bool(n_sets):
            raise MapError(
                f"data must contain the coverage as bits if, and only if, it has over {MOST_GRADED} prototypes"
            )
        if public_map.map_id != parts.public_id:
            raise MapError("data does not match its map_id")
        return public_map


def _unpack(bits: NDArray[Any], n_sets: int) -> NDArray[np.uint8]:
    """Unpack the coverage, with checks before the allocation."""
    if bits.dtype != np.uint8 or bits.ndim != 2 or not 8 * (bits.shape[1] - 1) < n_sets <= 8 * bits.shape[1]:
        raise MapError("data is not a map: bits must contain one for each set")
    if n_sets < 2:
        raise MapError(f"coverage must have 2 to {MOST_SETS} sets")
    if len(bits) * n_sets > MOST_COVERAGE:
        raise MapError(f"coverage must hold at most {MOST_COVERAGE} numbers")
    return 255 * np.unpackbits(bits, axis=1, count=n_sets)


def _read_only(values: NDArray[Any]) -> NDArray[Any]:
    values.setflags(write=False)
    return values


def count_prototypes(n_items: int, n_sets: int, set_size: int) -> int:
    """Return the number of prototypes of a map, if the gallery has more items."""
    if set_size >= _SMALL_ANSWER * n_items:
        return PROTOTYPES
    return max(PROTOTYPES, min(MOST_PROTOTYPES, MOST_COVERAGE // n_sets))


def usual_number(n_items: int, set_size: int, epsilon: float, least: int, most: int) -> int:
    """Estimate the best number of sets."""
    fraction, favour = set_size / n_items, np.exp(epsilon / 2)
    number = min(2 + 0.11 * favour / fraction, 0.72 * max(1, favour * np.sqrt(fraction)) / fraction)
    return int(min(max(least, round(number)), most))


def count_least_sets(n_items: int, set_size: int, reach: float) -> int:
    """Return how many sets are needed to reach a fraction of the items, at most `MOST_SETS`."""
    reached = math.ceil(reach * n_items - 1e-9)
    least = -(-reached // set_size)
    # A spare position in each set, for smaller sets after deletions.
    return min(least + (least * set_size < reached + least), n_items, MOST_SETS)
