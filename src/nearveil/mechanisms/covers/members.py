"""The items of each set and the map of a gallery: prototypes, coverage, updates for a changed gallery, and reach."""

import faiss
import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from nearveil.cluster import SpreadRows, cut_rows
from nearveil.mechanisms.covers.learning import (
    Demand,
    Learned,
    Lists,
    Positions,
    Rows,
    choose_rows,
    find_fine,
    fine_centres,
    measure_coverage,
    project,
    to_directions,
)
from nearveil.mechanisms.covers.maps import DECAY, MOST_GRADED, NEIGHBORS, PublicMap, count_prototypes
from nearveil.metrics import ScoreSpace

SetItems = NDArray[np.int64]  # the items of each set, shape (n_sets, set_size)
_FULL = 255.0  # full coverage
_LEAST = 5  # a smaller coverage counts as none
_FITTING_STEPS = 4
_SETS_AT_ONCE = 64
_SAMPLED = 1 << 20  # items to learn prototypes from
_FITTED = 50_000  # queries to fit the coverage of prototypes to


def map_around_prototypes(
    features: SpreadRows,
    space: ScoreSpace,
    members: csr_array,
    components: NDArray[np.float16],
    learned: Learned | None = None,
) -> PublicMap:
    """Make a map: choose prototypes, and measure the coverage around each, or fit it to `learned` queries."""
    # In a small gallery every item is a prototype, in an order that hides its position; a large one has centroids.
    directions = components.astype(np.float32)
    projected = features.then(to_directions, space, directions, width=components.shape[1])
    n_sets, n_items = members.shape
    set_size = members.nnz // n_sets
    count = count_prototypes(n_items, n_sets, set_size)
    if len(features) <= count:
        rows = projected.gather("placing items")
        order = np.lexsort(rows.T)
        return make_map(components, rows[order], members.toarray().T[order].astype(np.float32), n_items, set_size)
    fine = fine_centres(projected.take(choose_rows(n_items, _SAMPLED), "taking rows"), count, features.cluster)
    nearest = np.empty(n_items, np.uint16)
    for block, centroids in zip(features.cuts, projected.map(find_fine, fine, stage="placing items"), strict=True):
        nearest[block] = centroids
    coverage = measure_around(nearest, members, len(fine.centroids))
    if learned is not None and len(fine.centroids) <= MOST_GRADED:
        near = find_prototypes_of(project(learned.rows[:_FITTED], directions), fine.centroids, NEIGHBORS)
        fit_coverage(coverage, near, learned.lists[:_FITTED], members)
    return make_map(components, fine.centroids, coverage, n_items, set_size)


def make_map(
    components: NDArray[np.float16], prototypes: Rows, coverage: NDArray[np.float32], n_items: int, set_size: int
) -> PublicMap:
    """Round prototypes, and coverage to steps of 1/255 (with many prototypes, to 0 or 1)."""
    largest = np.abs(prototypes).max(axis=1, keepdims=True)
    scaled = np.divide(127 * prototypes, largest, out=np.zeros_like(prototypes), where=largest > 0)
    is_bit = len(coverage) > MOST_GRADED
    steps = np.where(coverage > 0.5, np.uint8(255), np.uint8(0)) if is_bit else np.rint(255 * coverage).astype(np.uint8)
    return PublicMap(components, np.rint(scaled).astype(np.int8), steps, n_items, set_size)


def make_members(set_items: NDArray[np.integer], n_items: int) -> csr_array:
    """Return the membership table of equally large sets, shape (n_sets, n_items)."""
    items = np.sort(set_items, axis=1).ravel()
    parts = (np.ones(len(items), np.uint8), items, np.arange(0, len(items) + 1, set_items.shape[1]))
    return csr_array(parts, shape=(len(set_items), n_items))


def measure_around(nearest: NDArray[np.integer], members: csr_array, count: int) -> NDArray[np.float32]:
    """Return the fraction of the items nearest to each prototype that is in each set, shape (count, n_sets)."""
    around = np.empty((count, members.shape[0]), np.float32)
    for number, (start, end) in enumerate(zip(members.indptr[:-1], members.indptr[1:], strict=True)):
        around[:, number] = np.bincount(nearest[members.indices[start:end]], minlength=count)
    counts = np.maximum(np.bincount(nearest, minlength=count), 1)
    return np.asarray(around / counts[:, None], dtype=np.float32)


def fit_coverage(coverage: NDArray[np.float32], near: Positions, lists: Lists, members: csr_array) -> None:
    """Fit coverage by least squares: sums over the prototypes `near` a query should predict its recall in each set."""
    weights = _weigh_prototypes(near, len(coverage))
    demand = Demand.of(lists, members.shape[1]).top
    total = np.maximum(np.asarray(weights.sum(axis=0)), 1e-6)[:, None]
    for sets in cut_rows(coverage.shape[1], _SETS_AT_ONCE):
        fitted, target = coverage[:, sets], measure_coverage(demand, members[sets].astype(np.float32)).toarray()
        for _ in range(_FITTING_STEPS):
            fitted += 2 * (weights.T @ (target - weights @ fitted)) / total
            np.clip(fitted, 0, 1, out=fitted)


def _weigh_prototypes(near: Positions, count: int) -> csr_array:
    """Return the weight of each of `count` prototypes for each row, from its nearest prototypes; rows sum to 1."""
    n, ranks = near.shape
    weights = np.exp(-np.arange(ranks) / DECAY).astype(np.float32)
    ends = np.arange(0, n * ranks + 1, ranks)
    return csr_array((np.tile(weights / weights.sum(), n), near.ravel(), ends), shape=(n, count))


def find_prototypes_of(projected: Rows, prototypes: NDArray[np.generic], count: int) -> Positions:
    """Return the prototypes nearest to projected public rows, shape (n, count); not in constant time."""
    index = faiss.IndexFlatIP(prototypes.shape[1])
    rows = prototypes.astype(np.float32)
    index.add(rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9))
    return np.asarray(np.maximum(index.search(projected, count)[1], 0), dtype=np.int64)


def find_near(features: SpreadRows, space: ScoreSpace, public_map: PublicMap, count: int) -> Positions:
    """Return the prototypes of a map nearest to each row, shape (n, count)."""
    components = public_map.components
    projected = features.then(to_directions, space, components.astype(np.float32), width=components.shape[1])
    blocks = projected.map(find_prototypes_of, public_map.prototypes, count, stage="placing items")
    near = np.empty((len(features), count), np.int64)
    for cut, block in zip(features.cuts, blocks, strict=True):
        near[cut] = block
    return near


def measure_local(features: SpreadRows, space: ScoreSpace, public_map: PublicMap) -> csr_array:
    """Return the coverage of sets around rows, shape (n_sets, n), from the prototypes near each row."""
    # Several prototypes if each is one item or has only a bit.
    several = len(public_map.prototypes) == public_map.n_items or public_map.has_bits
    near = find_near(features, space, public_map, min(NEIGHBORS, len(public_map.prototypes)) if several else 1)
    coverage = np.where(public_map.coverage < _LEAST, 0, public_map.coverage / _FULL).astype(np.float32)
    return (_weigh_prototypes(near, len(public_map.prototypes)) @ csr_array(coverage)).T.tocsr()


def update_members(
    members: csr_array,
    features: SpreadRows,
    space: ScoreSpace,
    old_map: PublicMap,
    before: Positions,
    replaced: int,
    set_size: int,
    reach: float,
) -> csr_array:
    """Update the membership table: place new items (-1 in `before`, the old positions) and `replaced` others again."""
    n, remaining = len(before), np.flatnonzero(before >= 0)
    ones = np.ones(len(remaining), np.float32)
    moves = csr_array((ones, (before[remaining], remaining)), shape=(members.shape[1], n))
    carried = members.astype(np.float32) @ moves
    sampled = before < 0
    sampled[choose_rows(n, replaced)] = True
    chosen = np.flatnonzero(sampled)
    near = measure_local(SpreadRows.cut(features.take(chosen, "taking rows")), space, old_map)
    local = csr_array((near.data, chosen[near.indices], near.indptr), shape=carried.shape)
    local = (local + carried.multiply(~sampled)).tocsr()
    return make_members(reach_items(carry_members(carried, local, set_size), local, reach), n)


def carry_members(carried: csr_array, local: csr_array, set_size: int) -> SetItems:
    """Return sets for a changed gallery: old members first, then items with the largest coverage around them."""
    n = carried.shape[1]
    value = (local + 2 * carried).tocsr()
    set_items = np.empty((value.shape[0], set_size), dtype=np.int64)
    for number, (start, end) in enumerate(zip(value.indptr[:-1], value.indptr[1:], strict=True)):
        items, values = value.indices[start:end], value.data[start:end]
        if len(items) < set_size:  # fill up with any items
            fillers = np.setdiff1d(np.arange(n), items)[: set_size - len(items)]
            items, values = np.concatenate([items, fillers]), np.concatenate([values, np.zeros(len(fillers))])
        set_items[number] = items[np.argpartition(values, -set_size)[-set_size:]]
    return set_items


def reach_items(set_items: SetItems, local: csr_array, reach: float) -> SetItems:
    """Add items in no set to the sets with the largest coverage around them, until `reach` of all are in one."""
    # Each replaces an item that is also in another set, the one with the smallest coverage around it.
    n_sets, n = local.shape
    set_items, copies = set_items.copy(), np.bincount(set_items.ravel(), minlength=n)
    missing = np.flatnonzero(copies == 0)
    room = min(int(np.ceil(reach * n - 1e-9)), set_items.size) - (n - len(missing))
    if room <= 0:
        return set_items
    by_item = local.T.tocsr()
    best = np.asarray(by_item[missing].max(axis=1).todense()).ravel()
    missing = missing[np.argsort(-best, kind="stable")[:room]]
    preference = by_item[missing].toarray()
    is_open = np.ones(n_sets, dtype=bool)
    while len(missing):
        preference[:, ~is_open] = -1
        favourite, done = preference.argmax(axis=1), np.zeros(len(missing), dtype=bool)
        for number in np.unique(favourite):
            entering = np.flatnonzero(favourite == number)
            entering = entering[np.argsort(-preference[entering, number], kind="stable")]
            spare = np.flatnonzero(copies[set_items[number]] > 1)
            values = local[[number]].toarray()[0]
            spare = spare[np.argsort(values[set_items[number, spare]], kind="stable")][: len(entering)]
            copies[set_items[number, spare]] -= 1
            set_items[number, spare] = missing[entering[: len(spare)]]
            copies[set_items[number, spare]] += 1
            done[entering[: len(spare)]] = True
            is_open[number] = len(spare) == len(entering)
        missing, preference = missing[~done], preference[~done]
    return set_items
