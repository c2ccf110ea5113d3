"""Which items are in which set: brought in step with a changed gallery, and so that every item can be returned."""

from typing import TYPE_CHECKING

import faiss
import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from nearveil.cluster import SpreadRows
from nearveil.mechanisms.covers.learning import (
    CHOICE_DECAY,
    CHOICE_RANKS,
    Demand,
    Lists,
    Positions,
    Rows,
    measure_coverage,
    project,
)

if TYPE_CHECKING:
    from nearveil.mechanisms.covers.covers import PublicMap

Held = NDArray[np.int64]  # the items of each set, shape (n_sets, set_size)
_FULL = 255.0  # of a coverage
_LEAST = 5  # a coverage below is none
_FITTING_STEPS = 4
_SETS_AT_ONCE = 64


def make_members(held: NDArray[np.integer], n_items: int) -> csr_array:
    """Return sets of one size, shape (n_sets, n_items), from the items that each holds, in any order."""
    items = np.sort(held, axis=1).ravel()
    parts = (np.ones(len(items), np.uint8), items, np.arange(0, len(items) + 1, held.shape[1]))
    return csr_array(parts, shape=(len(held), n_items))


def measure_around(nearest: NDArray[np.integer], members: csr_array, count: int) -> NDArray[np.float32]:
    """Return which part of the items nearest to each prototype every set holds, shape (count, n_sets)."""
    around = np.empty((count, members.shape[0]), np.float32)
    for number, (start, end) in enumerate(zip(members.indptr[:-1], members.indptr[1:], strict=True)):
        around[:, number] = np.bincount(nearest[members.indices[start:end]], minlength=count)
    counts = np.maximum(np.bincount(nearest, minlength=count), 1)
    return np.asarray(around / counts[:, None], dtype=np.float32)


def fit_coverage(coverage: NDArray[np.float32], near: Positions, lists: Lists, members: csr_array) -> None:
    """Fit coverage by least squares, so that sums over prototypes `near` a query tell what it finds in each set."""
    weights = _weigh_prototypes(near, len(coverage))
    wanted = Demand.of(lists, members.shape[1]).top
    total = np.maximum(np.asarray(weights.sum(axis=0)), 1e-6)[:, None]
    for start in range(0, coverage.shape[1], _SETS_AT_ONCE):
        some = slice(start, start + _SETS_AT_ONCE)
        held, found = coverage[:, some], measure_coverage(wanted, members[some].astype(np.float32)).toarray()
        for _ in range(_FITTING_STEPS):
            held += 2 * (weights.T @ (found - weights @ held)) / total
            np.clip(held, 0, 1, out=held)


def _weigh_prototypes(near: Positions, count: int) -> csr_array:
    """Return how much each of `count` prototypes says to a client about each row, given the nearest; rows sum to 1."""
    n, ranks = near.shape
    weights = np.exp(-np.arange(ranks) / CHOICE_DECAY).astype(np.float32)
    ends = np.arange(0, n * ranks + 1, ranks)
    return csr_array((np.tile(weights / weights.sum(), n), near.ravel(), ends), shape=(n, count))


def find_prototypes_of(placed: Rows, prototypes: NDArray[np.generic], count: int) -> Positions:
    """Return the prototypes that lie nearest to projected rows, shape (n, count): fast, where nothing is private."""
    index = faiss.IndexFlatIP(prototypes.shape[1])
    rows = prototypes.astype(np.float32)
    index.add(rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9))
    found = index.search(placed, count)[1]
    return np.asarray(np.maximum(found, 0), dtype=np.int64)


def find_near(features: SpreadRows, held: "PublicMap", count: int) -> Positions:
    """Return the prototypes of a map nearest to each row, shape (n, count)."""
    placed = features.then(project, held.components.astype(np.float32), width=held.components.shape[1])
    found = placed.map(find_prototypes_of, held.prototypes, count, stage="placing items")
    near = np.empty((len(features), count), np.int64)
    for some, its in zip(features.cuts, found, strict=True):
        near[some] = its
    return near


def measure_local(near: Positions, held: "PublicMap") -> csr_array:
    """Return the shares that sets hold around rows, shape (n_sets, n), by the prototypes `near` each row."""
    coverage = np.where(held.coverage < _LEAST, 0, held.coverage / _FULL).astype(np.float32)
    return (_weigh_prototypes(near, len(held.prototypes)) @ csr_array(coverage)).T.tocsr()


def count_near(held: "PublicMap") -> int:
    """Return how many prototypes say what lies around a row: several, where each is one item or tells but a bit."""
    several = len(held.prototypes) == held.n_items or held.has_bits
    return min(CHOICE_RANKS, len(held.prototypes)) if several else 1


def carry_members(members: csr_array, before: Positions, local: csr_array, set_size: int) -> Held:
    """Return sets for a changed gallery: old members stay, then those enter around which a set holds most."""
    n = len(before)
    stayed = np.flatnonzero(before >= 0)
    moved = csr_array((np.ones(len(stayed), np.float32), (before[stayed], stayed)), shape=(members.shape[1], n))
    value = (local + 2 * (members.astype(np.float32) @ moved)).tocsr()
    held = np.empty((value.shape[0], set_size), dtype=np.int64)
    for number, (start, end) in enumerate(zip(value.indptr[:-1], value.indptr[1:], strict=True)):
        items, worth = value.indices[start:end], value.data[start:end]
        if len(items) < set_size:  # a set that holds all that it knows of: any others
            others = np.setdiff1d(np.arange(n), items)[: set_size - len(items)]
            items, worth = np.concatenate([items, others]), np.concatenate([worth, np.zeros(len(others))])
        held[number] = items[np.argpartition(worth, -set_size)[-set_size:]]
    return held


def reach_items(held: Held, local: csr_array, reach: float) -> Held:
    """Bring items that no set holds into the sets that hold most around them, until a part `reach` of all is in one.

    Each takes the place of an item that another set holds, too, and around which this set holds least.
    """
    n_sets, n = local.shape
    held, holders = held.copy(), np.bincount(held.ravel(), minlength=n)
    lost = np.flatnonzero(holders == 0)
    room = min(int(np.ceil(reach * n - 1e-9)), held.size) - (n - len(lost))
    if room <= 0:
        return held
    by_item = local.T.tocsr()
    best = np.asarray(by_item[lost].max(axis=1).todense()).ravel()
    lost = lost[np.argsort(-best, kind="stable")[:room]]
    wish = by_item[lost].toarray()
    is_open = np.ones(n_sets, dtype=bool)
    while len(lost):
        wish[:, ~is_open] = -1
        favourite, done = wish.argmax(axis=1), np.zeros(len(lost), dtype=bool)
        for number in np.unique(favourite):
            asking = np.flatnonzero(favourite == number)
            asking = asking[np.argsort(-wish[asking, number], kind="stable")]
            spare = np.flatnonzero(holders[held[number]] > 1)
            worth = local[[number]].toarray()[0]
            spare = spare[np.argsort(worth[held[number, spare]], kind="stable")][: len(asking)]
            holders[held[number, spare]] -= 1
            held[number, spare] = lost[asking[: len(spare)]]
            holders[held[number, spare]] += 1
            done[asking[: len(spare)]] = True
            is_open[number] = len(spare) == len(asking)
        lost, wish = lost[~done], wish[~done]
    return held
