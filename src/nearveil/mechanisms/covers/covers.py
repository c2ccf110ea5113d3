"""Covers and cells: mechanisms whose message names one set of a public map.

The channel is randomised response. A client chooses its set by the map in whole numbers, in a time that tells nothing.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field
from decimal import Context
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any, Literal, Self, TypeVar, get_args

import numpy as np
import scipy.sparse
from numpy.typing import ArrayLike, NDArray
from sklearn.base import clone
from sklearn.exceptions import NotFittedError

from nearveil.cluster import SpreadRows, connect, cut_rows, use_one_thread
from nearveil.mechanisms.base import (
    Floats,
    Message,
    MessageError,
    TractableRelease,
    candidate_count,
    check_fraction,
    check_number,
    check_shape,
    fingerprint,
    make_guarantee,
)
from nearveil.mechanisms.covers.learning import (
    CHOICE_DECAY,
    CHOICE_RANKS,
    Learned,
    Progress,
    Rows,
    centres,
    choose_rows,
    find_fine,
    fine_centres,
    learn_sets,
    project,
    projection,
)
from nearveil.mechanisms.covers.members import (
    carry_members,
    count_near,
    find_near,
    find_prototypes_of,
    fit_coverage,
    make_members,
    measure_around,
    measure_local,
    reach_items,
)
from nearveil.privacy import Guarantee
from nearveil.privacy.checks import check_numbers, check_rows
from nearveil.privacy.events import PureDp
from nearveil.privacy.noise import Source
from nearveil.wire.frames import MOST_FEATURES

_WORD = 1 << 64
_DECIMAL = Context(prec=60)
_LARGEST_EPSILON = 40.0  # e^40 words still fit between two thresholds of a 64-bit word
_LEAST_EPSILON = 1e-6  # below 1e-12 a rounded word would weigh more than epsilon

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class RandomizedResponse:
    """Name the good set with odds e^epsilon against each other set."""

    epsilon: float  # from 1e-6 to 40
    n_sets: int  # at least 2

    def __post_init__(self) -> None:
        checked_epsilon(self.epsilon)
        if not 2 <= self.n_sets < 1 << 20:
            raise ValueError("n_sets must be from 2 to a million")

    @cached_property
    def _miss(self) -> int:
        """Return how many words name one particular other set; rounded up, so that the odds of the good one fall."""
        return _WORD // (_exp(self.epsilon) + self.n_sets - 1) + 1

    @property
    def odds(self) -> Fraction:
        """Return the odds of the good set against one other, exactly; never above e^epsilon."""
        return Fraction(_WORD - (self.n_sets - 1) * self._miss, self._miss)

    @property
    def hit(self) -> float:
        """Return the probability of the good set."""
        return 1 - (self.n_sets - 1) * self._miss / _WORD

    def sample(self, good: Indices, source: Source) -> Indices:
        """Name one set for each row, whose `good` sets are given; one out of range would name itself, so is refused."""
        _check_good(good, self.n_sets)
        words = source.words(len(good))
        first = np.uint64(_WORD - (self.n_sets - 1) * self._miss)
        others = ((words - first) // np.uint64(self._miss)).astype(np.int64)  # wraps around where a word is a hit
        return np.where(words < first, good, others + (others >= good))


@dataclass(frozen=True)
class SubsetSelection:
    """Name `size` cells; subsets with the good one are e^epsilon times as likely (Wang et al. 2016, Ye, Barg 2018)."""

    epsilon: float  # from 1e-6 to 40
    n_sets: int
    size: int  # from 1 to ``n_sets - 1``

    def __post_init__(self) -> None:
        checked_epsilon(self.epsilon)
        if not 2 <= self.n_sets < 1 << 20:
            raise ValueError("n_sets must be from 2 to a million")
        if not 1 <= self.size < self.n_sets:
            raise ValueError("size must be from 1 to n_sets - 1")

    @cached_property
    def _threshold(self) -> int:
        """Return how many words mean that the good cell is in; rounded down."""
        weight = self.size * _exp(self.epsilon)
        return int(_WORD * weight / (weight + self.n_sets - self.size))

    @property
    def odds(self) -> Fraction:
        """Return the odds of a subset with the good cell against one without, exactly; never above e^epsilon."""
        return Fraction(self._threshold * (self.n_sets - self.size), (_WORD - self._threshold) * self.size)

    @property
    def hit(self) -> float:
        """Return the probability that the good cell is in."""
        return self._threshold / _WORD

    def sample(self, good: Indices, source: Source) -> Indices:
        """Name a subset for each row, sorted, so that the place of the good cell tells nothing."""
        _check_good(good, self.n_sets)
        kept = source.words(len(good)) < np.uint64(self._threshold)
        order = _draw_orders(len(good), self.n_sets, source)
        # The good cell goes first or last in the random order; the order of the others stays uniform.
        place = np.argsort(np.where(order == good[:, None], np.where(kept, -1, self.n_sets)[:, None], 0), 1, "stable")
        chosen = np.take_along_axis(order, place, axis=1)[:, : self.size]
        return np.sort(chosen, axis=1)


def _draw_orders(n: int, length: int, source: Source) -> Indices:
    """Return uniformly random orders, shape (n, length): by random keys, drawn anew should two be equal."""
    while True:
        keys = source.words(n * length).reshape(n, length)
        order = np.argsort(keys, axis=1)
        ranked = np.take_along_axis(keys, order, axis=1)
        if (ranked[:, 1:] != ranked[:, :-1]).all():
            return order


def _check_good(good: Indices, n_sets: int) -> None:
    if ((good < 0) | (good >= n_sets)).any():
        raise ValueError(f"good must be one of the {n_sets} sets")


def checked_epsilon(epsilon: float) -> float:
    """Return the epsilon of a channel, or say what is wrong with it."""
    if not _LEAST_EPSILON <= check_number(epsilon, "epsilon") <= _LARGEST_EPSILON:
        raise ValueError(f"epsilon must be from {_LEAST_EPSILON:g} to {_LARGEST_EPSILON:g}; smaller protects more")
    return float(epsilon)


@lru_cache(maxsize=256)
def _exp(epsilon: float) -> Fraction:
    """Return e^epsilon to 50 digits, rounded down; epsilon is the decimal number that is written, as in the ledger."""
    # Nothing here may depend on the decimal context of the application.
    near = _DECIMAL.exp(_DECIMAL.create_decimal(repr(float(epsilon))))
    return Fraction(near) * (1 - Fraction(1, 10**50))


Singles = NDArray[np.float32]
Keys = NDArray[np.int32]

NEIGHBORS = CHOICE_RANKS  # prototypes that have a say
DECAY = CHOICE_DECAY  # of their weights, in ranks
MOST_NEIGHBORS = 32  # what the network keeps: a power of two
_LENGTH = 4000.0  # of a direction: products of two are below 2^24, so exact in 32-bit floats in any order of summing
_FINE = 2.0**20  # steps of a unit in numbers of 64 bits
_INDEX_BITS = (13, 15)  # of up to 8192 prototypes, and of more
_SIMILARITY_DROPS = 7  # bits of a similarity fewer than the index has: 32 bits hold the rest and the index
_LOWEST = np.iinfo(np.int32).min
# Weights sum up to 2^15.02; times a coverage of 255 that is below 2^24.
_WEIGHTS = np.append(np.rint(4096 * np.exp(-np.arange(NEIGHBORS) / DECAY)), 0).astype(np.float32)
_BLOCK = 1 << 22  # coverages that are floats at once


def round_to_steps(values: Floats, steps: float = _FINE) -> Floats:
    """Return values in whole steps, as floats that are whole numbers."""
    return np.rint(values * steps)


def directions(rows: Floats) -> Singles:
    """Return rows of up to 64 numbers as integers of one length; correctly rounded, so equal on every machine."""
    largest = np.maximum(np.abs(rows).max(axis=1, keepdims=True), 1.0)
    scaled = np.rint(rows * _FINE / largest)
    norms = np.sqrt((scaled * scaled).sum(axis=1, keepdims=True))  # the sum is below 2^53, so exact
    return np.asarray(np.rint(scaled * _LENGTH / np.maximum(norms, 1.0)), dtype=np.float32)


def similarity_keys(queries: Singles, prototypes: Singles) -> Keys:
    """Return keys of queries with at most 32768 prototypes: larger if nearer, and of equally near ones if first."""
    bits = _index_bits(len(prototypes))
    similarities = (queries @ prototypes.T).astype(np.int32)
    similarities >>= bits - _SIMILARITY_DROPS
    similarities <<= bits
    similarities += (1 << bits) - 1 - np.arange(len(prototypes), dtype=np.int32)
    return similarities


def _index_bits(count: int) -> int:
    """Return how many bits of a key name one of so many prototypes."""
    return _INDEX_BITS[count > MOST_GRADED]


def largest_keys(keys: Keys) -> Keys:
    """Return the 32 largest keys of each row, largest first, by a network of comparisons that is fixed by the shape.

    Lists are merged in pairs (Batcher's bitonic merge). The lowest number of 32 bits stands where there are fewer.
    """
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
    """Return which of so many prototypes keys belong to."""
    last = (1 << _index_bits(count)) - 1
    return (last - (keys & last)).astype(np.int64)


def most_covered(keys: Keys, coverage: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return the (first) set that covers most around each query: its nearest prototypes are weighted by rank."""
    weights = _rank_weights(keys)
    m, n_sets = coverage.shape
    total = np.zeros((len(keys), n_sets), dtype=np.float32)
    step = max(1, _BLOCK // n_sets)
    for start in range(0, m, step):
        some = slice(start, start + step)
        total += weights[:, some] @ coverage[some].astype(np.float32)
    ranked = total.astype(np.int64) * MOST_SETS + np.arange(MOST_SETS - 1, MOST_SETS - 1 - n_sets, -1)
    best: NDArray[np.int64] = ranked.max(axis=1)
    return MOST_SETS - 1 - best % MOST_SETS


def _rank_weights(keys: Keys) -> Singles:
    """Return the weight of each prototype for each query, shape (n, m); zero for all but the nearest."""
    top = largest_keys(keys)[:, :NEIGHBORS]
    ranks = np.zeros(keys.shape, dtype=np.uint8)
    for place in range(NEIGHBORS):
        ranks += keys < top[:, place, None]
    # A table of two cache lines, of which every query takes each weight once.
    return _WEIGHTS.take(ranks)


Number = TypeVar("Number", bound=np.generic)

_NAME = "map"
MOST_DIMENSIONS = 64  # of a projected feature
MOST_PROTOTYPES = 32_768
MOST_GRADED = 8192  # prototypes that tell shares of what lies around them; of more, whether it is most, as a bit
MOST_COVERAGE = 1 << 25  # prototypes times sets
MOST_SETS = 4096
MOST_ITEMS = 1 << 32  # as many as there are ids
_LARGEST = {
    "components": (MOST_FEATURES, MOST_DIMENSIONS),
    "prototypes": (MOST_PROTOTYPES, MOST_DIMENSIONS),
    "coverage": (MOST_PROTOTYPES, MOST_SETS),
    "bits": (MOST_PROTOTYPES, MOST_SETS // 8),
    "sizes": (3,),
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
        The share of what lies around a prototype that a set holds, times 255. Of more than 8192 prototypes it is 0 or
        255, and the map's bytes hold it as bits.
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
            raise MapError("components and prototypes must have as many columns, and coverage a row for each prototype")
        if self.n_sets < 2:
            raise MapError(f"coverage must be of 2 to {MOST_SETS} sets")
        if self.coverage.size > MOST_COVERAGE:
            raise MapError(f"coverage must hold at most {MOST_COVERAGE} numbers")
        if self.has_bits and (self.coverage + np.uint8(1)).max() > 1:  # 255 + 1 is 0
            raise MapError(f"coverage must be 0 or 255 where there are more than {MOST_GRADED} prototypes")
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
    def has_bits(self) -> bool:
        """Whether prototypes tell of each set no more than that it holds most of what lies around them."""
        return len(self.prototypes) > MOST_GRADED

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
            near[some] = find_prototypes(largest_keys(self._keys(projected[some]))[:, :count], len(self.prototypes))
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
        sizes = [self.n_items, self.set_size]
        arrays: dict[str, NDArray[Any]] = {
            "components": self.components.view(np.uint16),
            "prototypes": self.prototypes,
        }
        if self.has_bits:
            sizes.append(self.n_sets)
            arrays["bits"] = np.packbits(self.coverage, axis=1)
        else:
            arrays["coverage"] = self.coverage
        arrays["sizes"] = np.array(sizes, dtype=np.int64)
        return Message(_NAME, self.map_id, arrays).to_bytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read a map, or raise a MessageError; nothing in the bytes is trusted."""
        read = Message.from_bytes(data, _LARGEST)
        if read.mechanism != _NAME or read["components"].dtype != np.uint16 or read["sizes"].shape not in ((2,), (3,)):
            raise MapError("data is not a map")
        n_items, set_size, *n_sets = (int(size) for size in read["sizes"])
        coverage = _unpack(read["bits"], *n_sets) if n_sets else read["coverage"]
        found = cls(read["components"].view(np.float16), read["prototypes"], coverage, n_items, set_size)
        if found.has_bits != bool(n_sets):
            raise MapError(f"data must hold the coverage of more than {MOST_GRADED} prototypes as bits, of others not")
        if found.map_id != read.public_id:
            raise MapError("data is not the map that it says it is")
        return found


def _unpack(bits: NDArray[Any], n_sets: int) -> NDArray[np.uint8]:
    """Return the coverage that bits tell, checked before it takes memory."""
    if bits.dtype != np.uint8 or bits.ndim != 2 or not 8 * (bits.shape[1] - 1) < n_sets <= 8 * bits.shape[1]:
        raise MapError("data is not a map: bits must hold one for each set")
    if n_sets < 2:
        raise MapError(f"coverage must be of 2 to {MOST_SETS} sets")
    if len(bits) * n_sets > MOST_COVERAGE:
        raise MapError(f"coverage must hold at most {MOST_COVERAGE} numbers")
    return 255 * np.unpackbits(bits, axis=1, count=n_sets)


def _read_only(values: NDArray[Number]) -> NDArray[Number]:
    values.setflags(write=False)
    return values


def _check_size(name: str, shape: tuple[int, ...]) -> None:
    try:
        check_shape(name, shape, _LARGEST)
    except MessageError as error:
        raise MapError(str(error)) from None


_OF_THE_GALLERY = ("map_", "members_", "drift_", "_gallery_digest")
PROTOTYPES = MOST_GRADED  # a gallery up to this size stands for itself
_SMALL_ANSWER = 0.03  # of a gallery: below it, where a row lies must be told more precisely
_SAMPLED = 1 << 20  # items that prototypes are learned from
_FITTED = 50_000  # queries that the coverage of prototypes is fitted to
DUE = 0.1  # the part of a gallery that may change before its sets should be learned anew


@dataclass(frozen=True)
class Grouping:
    """Sets of a gallery, and how a client shall choose among them."""

    members: scipy.sparse.csr_array  # ones where an item is in a set
    components: NDArray[np.float16]  # the projection of features
    prototypes: Rows  # projected rows that stand for the gallery
    coverage: NDArray[np.float32]  # the share of what lies around a prototype that a set holds


class MappedRelease(TractableRelease):
    """A message names sets of a public map; the server answers with their items, at most floor(f N) of them."""

    epsilon: float
    candidates: float
    map_: PublicMap
    members_: scipy.sparse.csr_array
    _gallery_digest: str

    def fit_mean(self, mean: ArrayLike, public_digest: str | None = None) -> Self:
        """Take the public mean instead of public rows: it is all that a mapped release needs of them.

        Parameters
        ----------
        mean : array-like of shape (d,)
            As the server published it.
        public_digest : str, optional
            `public_digest` of the server's release, so that messages fit both sides; by default that of the mean.
        """
        row = check_numbers(mean, "mean")
        if row.ndim != 1:
            raise ValueError(f"mean must be one row; it has {row.ndim} dimensions")
        rows = check_rows(row[None], "mean")  # the mean of one row is that row, to the last bit
        return self._fit_public(rows, None, fingerprint(rows, None) if public_digest is None else str(public_digest))

    @property
    def public_digest(self) -> str:
        """The fingerprint of the public rows, for :meth:`fit_mean` at the other side."""
        self._check_fitted()
        return str(self._public_digest)

    def index(self, gallery: ArrayLike, *, progress: Progress | None = None, cluster: Any = None) -> Self:
        """Build the public map of a gallery: the server's part, done once and published.

        Parameters
        ----------
        gallery : array-like of shape (n, d)
        progress : callable, optional
            Called with what is done now, in words, and the part of all work that is done, from 0 to 1.
        cluster : str or dask.distributed.Client, optional
            Whose workers search; see :func:`nearveil.cluster.connect`. The map is the same to the last bit.

        Returns
        -------
        self
        """
        features = self.gallery_features(gallery)
        with connect(cluster) as workers:
            return self.index_features(SpreadRows.cut(features, workers), progress=progress)

    def gallery_features(self, gallery: ArrayLike) -> Rows:
        """Return the features of public rows in 32 bits, by blocks: all of them in 64 bits would fill the memory."""
        given = np.asarray(gallery)
        if given.ndim != 2 or len(given) < 2:
            self.features(given, "gallery", lenient=True)
            raise ValueError("gallery must hold at least two items")
        return _make_features(given, self)

    def index_features(self, features: SpreadRows, *, progress: Progress | None) -> Self:
        """Do the work of :meth:`index` on features in partitions."""
        size = candidate_count(self.candidates, len(features))
        tell = progress or (lambda _stage, _done: None)
        with use_one_thread():
            grouping = self._group(features, size, tell)
        self._store(
            map_=_make_map(len(features), grouping, size),
            members_=grouping.members,
            drift_=0.0,
            _gallery_digest=_hash_rows(features),
        )
        tell("making the map", 1.0)
        return self

    @property
    def reach_(self) -> float:
        """The part of the items that are in any set: the others are never returned."""
        self._check_indexed()
        return float(len(np.unique(self.members_.indices)) / self.members_.shape[1])

    def use_map(self, public_map: PublicMap) -> Self:
        """Take the map that a server published: the client's part. The guarantee holds for any map."""
        self._check_fitted()
        if not isinstance(public_map, PublicMap):
            raise MapError("public_map must be a PublicMap; PublicMap.from_bytes reads one")
        if len(public_map.components) != self.n_features_in_:
            raise MapError(f"public_map must be for {self.n_features_in_} features, as public_X had")
        if public_map.set_size != candidate_count(self.candidates, public_map.n_items):
            raise MapError(
                f"public_map must have sets of {self.candidates:g} of its items, the candidates of this release"
            )
        self._store(without=_OF_THE_GALLERY, map_=public_map)  # members belong to another map
        return self

    def with_epsilon(self, epsilon: float) -> Self:
        """Return a release with the same public rows, gallery and map at another epsilon, with its own guarantee."""
        other: Self = clone(self).set_params(epsilon=epsilon).fit_mean(self.mean_, self.public_digest)
        other._store(**{name: value for name, value in vars(self).items() if name in _OF_THE_GALLERY})
        return other

    def _make_guarantee(self) -> Guarantee:
        return set_guarantee(self.epsilon)

    def _log_density(self, messages: list[Message], features: Floats) -> Floats:
        public_map = self._map()
        good = public_map.choose(features)
        named = self._read_sets(messages)
        odds = float(self._channel(public_map).odds)
        return np.where((named[:, None, :] == good[None, :, None]).any(axis=2), np.log(odds), 0.0)

    def _fit(self, features: Floats, labels: NDArray[np.int64] | None) -> None:
        del features, labels  # the public mean is all that both sides need; the map carries the rest
        checked_epsilon(self.epsilon)
        check_fraction(self.candidates)

    def _prepare(self, features: Floats) -> Floats:
        self._check_indexed()
        rows = features.astype(np.float32)
        if self._gallery_digest not in {_hash_rows(SpreadRows.cut(rows)), fingerprint(rows)}:  # the second: up to 0.1
            raise ValueError("gallery must be the one that was indexed, in the same order: call index(gallery) anew")
        return features

    def _release(self, features: Floats, source: Source) -> list[Message]:
        public_map = self._map()
        named = self._channel(public_map).sample(public_map.choose(features), source).astype(np.int32)
        return self._messages(source, sets=named.reshape(len(features), -1))

    def _rank(self, message: Message, prepared: Floats) -> Floats:
        del prepared  # which items are in a set was settled when the gallery was indexed
        named = self.read_sets(message)
        return np.asarray(self.members_[named].sum(axis=0) > 0, dtype=np.float64)

    def read_sets(self, message: Message) -> NDArray[np.int64]:
        """Return the sets that a message names, checked."""
        self._check_messages([message])
        return self._read_sets([message]).reshape(-1)

    def _read_sets(self, messages: list[Message]) -> NDArray[np.int64]:
        """Return the sets that messages of this mechanism name, a row for each."""
        channel = self._channel(self._map())
        size = channel.size if isinstance(channel, SubsetSelection) else 1
        named = [message["sets"] for message in messages]
        if all(one.dtype == np.int32 and one.shape == (size,) for one in named):
            rows: NDArray[np.int64] = np.array(named, dtype=np.int64).reshape(-1, size)
            if ((rows >= 0) & (rows < channel.n_sets)).all():
                return rows
        raise MessageError(f"message must name {size} of the {channel.n_sets} sets")

    def _public_parts(self) -> tuple[object, ...]:
        # Not epsilon: which set a message names means the same at any, and the client's choice need not be the map's.
        return (self._map().map_id,)

    def _map(self) -> PublicMap:
        if not hasattr(self, "map_"):
            raise NotFittedError(
                f"{type(self).__name__} needs a map: call index(gallery) at the server, use_map(map) at the client"
            )
        return self.map_

    def _check_indexed(self) -> None:
        if not hasattr(self, "members_"):
            raise NotFittedError(f"{type(self).__name__} must index its gallery first: call index(gallery)")

    @abstractmethod
    def _channel(self, public_map: PublicMap) -> RandomizedResponse | SubsetSelection:
        """Return the channel for a map."""

    @abstractmethod
    def _group(self, features: SpreadRows, set_size: int, tell: Progress) -> Grouping:
        """Make the sets of a gallery, features of norm one (or zero), and tell how far it is."""


@lru_cache(maxsize=256)
def set_guarantee(epsilon: float) -> Guarantee:
    """Return the guarantee of a message that names sets: pure epsilon, whatever the map; made once for each epsilon."""
    epsilon = checked_epsilon(epsilon)
    theorem = "exact odds of a channel that names sets"
    return make_guarantee(epsilon, 0.0, theorem, "docs/theory/covers.md", events=(PureDp(epsilon),))


def find_components(features: Rows) -> NDArray[np.float16]:
    """Return the projection that a map publishes."""
    return projection(features, MOST_DIMENSIONS).astype(np.float16)


def spread_features(release: MappedRelease, gallery: SpreadRows) -> SpreadRows:
    """Return the features of public rows in partitions, as of :meth:`MappedRelease.gallery_features`."""
    return gallery.then(_make_features, release)


def _make_features(rows: NDArray[Any], release: MappedRelease) -> Rows:
    found = np.empty(rows.shape, np.float32)
    for some in cut_rows(len(rows), max(1, _CHUNK // rows.shape[1])):  # what is in a processor's cache is fast
        found[some] = release.features(rows[some], "gallery", lenient=True)
    return found


def _hash_rows(features: SpreadRows) -> str:
    """Return the fingerprint of a gallery: that of its partitions' where there are several."""
    found = list(features.map(fingerprint, stage="taking fingerprints"))
    return found[0] if len(found) == 1 else fingerprint(*found)


def group_around_prototypes(
    features: SpreadRows,
    members: scipy.sparse.csr_array,
    components: NDArray[np.float16],
    learned: Learned | None = None,
) -> Grouping:
    """Choose prototypes of a gallery, and measure what the sets cover around each, or fit it to `learned` queries.

    A small gallery stands for itself, in an order that tells no item's position; a large one has k-means centroids.
    """
    directions = components.astype(np.float32)
    placed = features.then(project, directions, width=components.shape[1])
    n_sets, n_items = members.shape
    count = count_prototypes(n_items, n_sets, members.nnz // n_sets)
    if len(features) <= count:
        rows = placed.gather("placing items")
        order = np.lexsort(rows.T)
        return Grouping(members, components, rows[order], members.toarray().T[order].astype(np.float32))
    found = fine_centres(placed.take(choose_rows(n_items, _SAMPLED), "taking rows"), count, features.cluster)
    nearest = np.empty(n_items, np.uint16)
    for some, its in zip(features.cuts, placed.map(find_fine, found, stage="placing items"), strict=True):
        nearest[some] = its
    coverage = measure_around(nearest, members, len(found.centroids))
    if learned is not None and len(found.centroids) <= MOST_GRADED:
        near = find_prototypes_of(project(learned.rows[:_FITTED], directions), found.centroids, NEIGHBORS)
        fit_coverage(coverage, near, learned.lists[:_FITTED], members)
    return Grouping(members, components, found.centroids, coverage)


def count_prototypes(n_items: int, n_sets: int, set_size: int) -> int:
    """Return how many prototypes a map has, where there are as many items."""
    if set_size >= _SMALL_ANSWER * n_items:
        return PROTOTYPES
    return max(PROTOTYPES, min(MOST_PROTOTYPES, MOST_COVERAGE // n_sets))


def _round_coverage(coverage: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return shares in steps of 1/255; of many prototypes, whether they are more than a half."""
    if len(coverage) > MOST_GRADED:
        return np.where(coverage > 0.5, np.uint8(255), np.uint8(0))
    return np.rint(255 * coverage).astype(np.uint8)


def _check_places(before: ArrayLike, n_items: int, n_before: int) -> NDArray[np.int64]:
    places = np.asarray(before)
    if places.shape != (n_items,) or not np.issubdtype(places.dtype, np.integer):
        raise ValueError(f"before must hold one whole number for each of the {n_items} items")
    kept = places[places >= 0]
    if (places < -1).any() or (kept >= n_before).any() or len(np.unique(kept)) < len(kept):
        raise ValueError(f"before must name each of the {n_before} earlier items at most once, or be -1")
    return places.astype(np.int64)


def _make_map(n_items: int, grouping: Grouping, size: int) -> PublicMap:
    placed = grouping.prototypes
    largest = np.abs(placed).max(axis=1, keepdims=True)
    scaled = np.divide(127 * placed, largest, out=np.zeros_like(placed), where=largest > 0)
    return PublicMap(
        components=grouping.components,
        prototypes=np.rint(scaled).astype(np.int8),
        coverage=_round_coverage(grouping.coverage),
        n_items=n_items,
        set_size=size,
    )


@dataclass(eq=False, repr=False)
class Covers(MappedRelease):
    """Name one of a few overlapping sets of the gallery, learned so that this very channel finds most neighbours.

    The message names the good set of the record with odds e^epsilon against every other set, exactly. The server
    returns the set's items, the client re-ranks them with its true feature. Popular items enter many sets. Few sets
    are best where epsilon is small: then the good one is named more often.

    Parameters
    ----------
    epsilon : float
        From 1e-6 to 40. Pure: delta is 0.
    candidates : float, default=0.1
        The fraction f of the gallery that each answer holds.
    n_sets : int, optional
        The number L of sets; by default that with the best recall on held-out items of the gallery.
    reach : float, default=0.0
        The part of the items that must be in some set. With 0 the sets are those that find most, and what is hardly
        ever wanted may be in none; then it is never returned. With 1 every item can be returned, which costs recall.

    Attributes
    ----------
    map_ : PublicMap
        What the server publishes.
    members_ : csr array of shape (n_sets, n_items)
        Which items are in which set; at the server alone.
    reach_ : float
        The part of the items that are in any set.
    drift_ : float
        Items that were added or removed by :meth:`update` since the sets were learned, as a part of the gallery.

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> X = load_digits().data
    >>> server = Covers(epsilon=4.0, candidates=0.2, n_sets=6).fit(X[:300]).index(X[300:1700])
    >>> client = Covers(epsilon=4.0, candidates=0.2, n_sets=6).fit(X[:300]).use_map(server.map_)
    >>> message = client.release(X[1700])
    >>> int(server.rank(message, X[300:1700]).sum())
    280
    >>> print(client.guarantee)
    Seeing this message changes the odds between any two records by at most a factor of 55.
    """

    name = "covers"

    epsilon: float
    candidates: float = 0.1
    _: KW_ONLY
    n_sets: int | None = None
    reach: float = 0.0

    def update(self, gallery: ArrayLike, before: ArrayLike) -> Self:
        """Bring sets and map in step with a gallery that has changed a little, without learning them anew.

        Items that stayed keep their sets. A new item enters the sets that hold most of what lies around it, so does
        whatever takes the places of removed items, and every set holds floor(f N) items again. A client needs the new
        map; messages for the old one do not fit it.

        Where new items are like the old ones little is lost. Learn anew (:meth:`index`) when `drift_` has passed
        `DUE`, a tenth of the gallery, or when what is new lies where no item was: no set holds what surrounds it.

        Parameters
        ----------
        gallery : array-like of shape (n, d)
            As it is now.
        before : array-like of shape (n,), int
            Where each item stood in the gallery that was indexed, or updated last; -1 for a new one.

        Returns
        -------
        self

        Examples
        --------
        >>> from sklearn.datasets import load_digits
        >>> X = load_digits().data
        >>> covers = Covers(epsilon=4.0, candidates=0.2, n_sets=6).fit(X[:300]).index(X[300:1700])
        >>> covers = covers.update(X[320:1750], [*range(20, 1400), *[-1] * 50])
        >>> covers.map_.n_items, covers.map_.set_size, round(covers.drift_, 3)
        (1430, 286, 0.049)
        """
        return self.update_features(SpreadRows.cut(self.gallery_features(gallery)), before)

    def update_features(self, features: SpreadRows, before: ArrayLike) -> Self:
        """Do the work of :meth:`update` on features in partitions."""
        self._check_indexed()
        places = _check_places(before, len(features), self.members_.shape[1])
        old, size = self.map_, candidate_count(self.candidates, len(features))
        near = find_near(features, old, count_near(old))
        local = measure_local(near, old)
        held = reach_items(carry_members(self.members_, places, local, size), local, self.reach)
        members = make_members(held, len(features))
        if len(features) <= count_prototypes(len(features), old.n_sets, size) or len(old.prototypes) == old.n_items:
            grouping = group_around_prototypes(features, members, old.components)
            public_map = _make_map(len(features), grouping, size)
        else:
            around = _round_coverage(measure_around(near[:, 0], members, len(old.prototypes)))
            public_map = PublicMap(old.components, old.prototypes, around, len(features), size)
        stayed = int((places >= 0).sum())
        changed = len(features) - stayed + self.members_.shape[1] - stayed
        self._store(
            map_=public_map,
            members_=members,
            drift_=self.drift_ + changed / len(features),
            _gallery_digest=_hash_rows(features),
        )
        return self

    def _fit(self, features: Floats, labels: NDArray[np.int64] | None) -> None:
        super()._fit(features, labels)
        if not 0 <= check_number(self.reach, "reach") <= 1:
            raise ValueError("reach must be a part of the gallery, from 0 to 1")

    def _channel(self, public_map: PublicMap) -> RandomizedResponse:
        return RandomizedResponse(self.epsilon, public_map.n_sets)

    def _group(self, features: SpreadRows, set_size: int, tell: Progress) -> Grouping:
        if self.n_sets is not None and not 2 <= self.n_sets <= len(features):
            raise ValueError("n_sets must be at least 2 and at most the number of items in the gallery")
        n = len(features)
        least = -(-int(np.ceil(self.reach * n - 1e-9)) // set_size)
        if self.n_sets is not None and self.n_sets < least:
            raise ValueError(f"n_sets must be at least {least}, so that sets of this size reach so many items")
        learned = learn_sets(features, set_size, self.epsilon, self.n_sets, tell, least=least)
        tell("making the map", 0.8)
        members = learned.sets.astype(np.uint8)
        components = learned.directions[:, :MOST_DIMENSIONS].astype(np.float16)
        if self.reach > 0:
            free = _make_map(n, group_around_prototypes(features, members, components), set_size)
            local = measure_local(find_near(features, free, count_near(free)), free)
            members = make_members(reach_items(members.indices.reshape(-1, set_size), local, self.reach), n)
        return group_around_prototypes(features, members, components, learned)


CellKind = Literal["kmeans", "balanced"]
Response = Literal["randomized", "subset"]


@dataclass(eq=False, repr=False)
class Cells(MappedRelease):
    """Name a cell of the gallery, by randomised response or subset selection.

    Parameters
    ----------
    epsilon : float
        From 1e-6 to 40. Pure: delta is 0.
    candidates : float, default=0.1
        The fraction f of the gallery that each answer holds at most.
    kind : {"kmeans", "balanced"}, default="kmeans"
        "kmeans": a cell holds the floor(f N) items nearest to its centroid, and cells overlap.
        "balanced": every item is in one cell, and cells are of one size, give or take one.
    response : {"randomized", "subset"}, default="randomized"
        "randomized" names one cell. "subset" names as many balanced cells as an answer affords.
    n_cells : int, optional
        As few as hold the whole gallery, about ``1 / f``, for "randomized"; four times as many for "subset".

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> X = load_digits().data
    >>> cells = Cells(2.0, 0.2, kind="balanced").fit(X[:300]).index(X[300:])
    >>> cells.release(X[0]).mechanism, cells.map_.n_sets
    ('cells', 6)
    """

    name = "cells"

    epsilon: float
    candidates: float = 0.1
    _: KW_ONLY
    kind: CellKind = "kmeans"
    response: Response = "randomized"
    n_cells: int | None = None

    def _channel(self, public_map: PublicMap) -> RandomizedResponse | SubsetSelection:
        if self.response == "randomized":
            return RandomizedResponse(self.epsilon, public_map.n_sets)
        largest = -(-public_map.n_items // public_map.n_sets)
        return SubsetSelection(self.epsilon, public_map.n_sets, max(1, public_map.set_size // largest))

    def _group(self, features: SpreadRows, set_size: int, tell: Progress) -> Grouping:
        count = self._count(len(features), set_size)
        tell("making cells", 0.0)
        return self._make_cells(features.gather("gathering rows"), set_size, count)

    def _make_cells(self, features: Rows, set_size: int, count: int) -> Grouping:
        centroids = centres(features, count, seed=0)
        if self.kind == "kmeans" and self.response == "randomized":
            nearest = np.argpartition(_squared_distances(features, centroids).T, set_size - 1, axis=1)[:, :set_size]
            members = make_members(nearest, len(features))
        else:
            cells = assign_balanced(_squared_distances(features, centroids))
            ones = np.ones(len(features), dtype=np.uint8)
            members = scipy.sparse.csr_array((ones, (cells, np.arange(len(features)))), shape=(count, len(features)))
            members.sort_indices()
        components = find_components(features)
        placed = centroids @ components.astype(np.float32)
        return Grouping(members, components, placed, np.eye(count, dtype=np.float32))

    def _count(self, n_items: int, set_size: int) -> int:
        """Return the number of cells, checked."""
        if self.kind not in get_args(CellKind):
            raise ValueError('kind must be "kmeans" or "balanced"')
        if self.response not in get_args(Response):
            raise ValueError('response must be "randomized" or "subset"')
        if set_size == n_items:
            raise ValueError("candidates must be less than the whole gallery: nothing need be asked for that")
        least = -(-n_items // set_size)
        usual = least if self.response == "randomized" else min(4 * least, n_items)
        count = usual if self.n_cells is None else self.n_cells
        whole = self.kind == "balanced" or self.response == "subset"
        if not max(2, least if whole else 2) <= count <= n_items:
            raise ValueError(f"n_cells must be from {max(2, least)} to the {n_items} items of the gallery")
        return count


def assign_balanced(distances: NDArray[np.float32]) -> NDArray[np.int64]:
    """Assign rows to cells of one size, give or take one; rows that lose most by waiting choose first."""
    n, count = distances.shape
    room = np.full(count, n // count)
    room[: n % count] += 1
    cells = np.full(n, -1)
    waiting = np.arange(n)
    while len(waiting):
        open_cells = np.flatnonzero(room)
        near = distances[np.ix_(waiting, open_cells)]
        wish = near.argmin(axis=1)
        loss = np.partition(near, 1, axis=1)[:, 1] - near.min(axis=1) if len(open_cells) > 1 else near[:, 0]
        for place, cell in enumerate(open_cells):
            asking = np.flatnonzero(wish == place)
            taken = asking[np.argsort(-loss[asking], kind="stable")[: room[cell]]]
            cells[waiting[taken]] = cell
            room[cell] -= len(taken)
        waiting = waiting[cells[waiting] < 0]
    return cells


def _squared_distances(features: Rows, centroids: Rows) -> NDArray[np.float32]:
    """Return squared distances, shape (n, n_cells), up to the rows' own norms."""
    return np.asarray((centroids**2).sum(axis=1) - 2 * features @ centroids.T, dtype=np.float32)
