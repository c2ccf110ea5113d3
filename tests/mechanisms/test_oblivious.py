"""The client's rule does the same work for every row on every map of one size, and it is exact."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import faiss
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from nearveil.mechanisms import PublicMap
from nearveil.mechanisms.covers.maps import (
    _FINE,
    _WEIGHTS,
    MOST_NEIGHBORS,
    NEIGHBORS,
    directions,
    find_prototypes,
    largest_keys,
    most_covered,
    round_to_steps,
    similarity_keys,
)

DIMENSION, PROTOTYPES, SETS = 12, 700, 9


def unit(rows: NDArray[Any]) -> NDArray[np.float64]:
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True))


def some_map(seed: int = 0, **changed: NDArray[Any]) -> PublicMap:
    rng = np.random.default_rng(seed)
    parts: dict[str, NDArray[Any]] = {
        "components": np.linalg.qr(rng.standard_normal((DIMENSION, 8)))[0].astype(np.float16),
        "prototypes": rng.integers(-128, 128, (PROTOTYPES, 8)).astype(np.int8),
        "coverage": rng.integers(0, 256, (PROTOTYPES, SETS)).astype(np.uint8),
    }
    return PublicMap(**(parts | changed), n_items=1000, set_size=100)


def sorted_prototypes() -> NDArray[np.int8]:
    """Return prototypes along one column: a heap sees each new one as the nearest so far, or none."""
    rising = np.linspace(-127, 127, PROTOTYPES).astype(np.int8)
    return np.stack([rising, *[np.full(PROTOTYPES, 40, np.int8)] * 7], axis=1)


HOSTILE: dict[str, Callable[[], PublicMap]] = {
    "honest": some_map,
    "sorted": lambda: some_map(prototypes=sorted_prototypes()),
    "subnormal components": lambda: some_map(components=np.full((DIMENSION, 8), 6e-8, np.float16)),
    "one subnormal among huge": lambda: some_map(
        components=np.where(np.arange(8) == 0, 6e-8, np.full((DIMENSION, 8), 65504.0)).astype(np.float16)
    ),
    "components of zeros": lambda: some_map(components=np.zeros((DIMENSION, 8), np.float16)),
    "prototypes of zeros": lambda: some_map(prototypes=np.zeros((PROTOTYPES, 8), np.int8)),
    "ties everywhere": lambda: some_map(
        prototypes=np.ones((PROTOTYPES, 8), np.int8), coverage=np.full((PROTOTYPES, SETS), 255, np.uint8)
    ),
}
ROWS = unit(
    np.concatenate(
        [
            np.random.default_rng(1).standard_normal((20, DIMENSION)),
            np.eye(DIMENSION),
            -np.eye(DIMENSION),
            np.eye(DIMENSION)[:2] + 1e-300,
        ]
    )
)


def reference(public_map: PublicMap, features: NDArray[np.float64], step: int = 64) -> NDArray[np.int64]:
    """Return the rule in integers, by sorting."""
    wide = public_map.components.astype(np.float64)
    scale = max(float(np.abs(wide).max()), 2.0**-24)
    components = np.rint(wide / scale * 2**16).astype(np.int64)
    projected = np.rint(features * 2**20).astype(np.int64) @ components
    queries, prototypes = (_long_directions(rows) for rows in (projected, public_map.prototypes.astype(np.int64)))
    similarities = (queries @ prototypes.T) // step
    near = np.argsort(-similarities, axis=1, kind="stable")[:, :NEIGHBORS]
    weights = np.rint(4096 * np.exp(-np.arange(NEIGHBORS) / 8)).astype(np.int64)[: near.shape[1]]
    return np.asarray((weights[:, None] * public_map.coverage.astype(np.int64)[near]).sum(axis=1).argmax(axis=1))


def _long_directions(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    wide = rows.astype(np.longdouble)
    scaled = np.rint(wide * 2**20 / np.maximum(np.abs(wide).max(axis=1, keepdims=True), 1))
    norms = np.sqrt((scaled**2).sum(axis=1, keepdims=True))
    return np.asarray(np.rint(scaled * 4000 / np.maximum(norms, 1)), dtype=np.int64)


@pytest.mark.parametrize("name", HOSTILE)
def test_the_rule_is_that_of_integers(name: str) -> None:
    public_map = HOSTILE[name]()
    np.testing.assert_array_equal(public_map.choose(ROWS), reference(public_map, ROWS))


def test_the_rule_is_that_of_integers_for_many_prototypes() -> None:
    """Keys of 32 bits hold an index of 15 bits, and a similarity without its last 8."""
    rng, count = np.random.default_rng(5), 32_768
    prototypes, bits = rng.integers(-128, 128, (count, 8)).astype(np.int8), rng.integers(0, 2, (count, SETS))
    public_map = some_map(prototypes=prototypes, coverage=(255 * bits).astype(np.uint8))
    np.testing.assert_array_equal(public_map.choose(ROWS), reference(public_map, ROWS, step=256))
    keys = similarity_keys(public_map._directions[[0, -1]], np.concatenate([-public_map._directions[:1]] * count))
    assert find_prototypes(largest_keys(keys), count)[:, :3].tolist() == [[0, 1, 2]] * 2


def test_one_row_and_many_are_chosen_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    public_map = some_map()
    rows = unit(np.random.default_rng(2).standard_normal((300, DIMENSION)))
    monkeypatch.setattr("nearveil.mechanisms.covers.maps._CHUNK", 5000)
    together = public_map.choose(rows)
    np.testing.assert_array_equal(together, np.concatenate([public_map.choose(row[None]) for row in rows]))
    monkeypatch.setattr("nearveil.mechanisms.covers.maps._BLOCK", 100)
    np.testing.assert_array_equal(together, public_map.choose(rows))


@settings(max_examples=60, derandomize=True, deadline=None)
@given(hnp.arrays(np.int32, st.tuples(st.integers(1, 4), st.integers(1, 300))))
def test_the_network_finds_the_largest(keys: NDArray[np.int32]) -> None:
    found = largest_keys(keys)
    padded = np.full((len(keys), MOST_NEIGHBORS), np.iinfo(np.int32).min, np.int32)
    kept = np.sort(keys, axis=1)[:, ::-1][:, :MOST_NEIGHBORS]
    padded[:, : kept.shape[1]] = kept
    np.testing.assert_array_equal(found, padded)


def test_the_network_sorts_zeros_and_ones() -> None:
    """A network that finds the largest of all zeros and ones finds them of all numbers (Knuth's principle)."""
    for m in (1, 2, 3, 5, 8, 12):
        every = (np.arange(1 << m)[:, None] >> np.arange(m) & 1).astype(np.int32)
        np.testing.assert_array_equal(largest_keys(every)[:, :m], np.sort(every, axis=1)[:, ::-1])
    rng = np.random.default_rng(3)
    for m in (64, 1000, 8192, 32_768):
        some = (rng.random((40, m)) < rng.random((40, 1)) * 80 / m).astype(np.int32)
        np.testing.assert_array_equal(largest_keys(some), np.sort(some, axis=1)[:, ::-1][:, :MOST_NEIGHBORS])


@settings(max_examples=100, derandomize=True, deadline=None)
@given(hnp.arrays(np.float64, (3, 64), elements=st.floats(-(2.0**53), 2.0**53)))
def test_all_numbers_are_whole_and_all_sums_exact(rows: NDArray[np.float64]) -> None:
    """Sums of whole numbers below 2^24 are exact in 32 bits, in any order; no number is subnormal or not finite."""
    found = directions(rows).astype(np.float64)
    assert (found == np.rint(found)).all()
    assert (np.abs(found) @ np.abs(found).T).max() < 2**24
    keys = similarity_keys(directions(rows), directions(rows))
    near = ((found @ found.T).astype(np.int64) // 64) * 8192 + 8191 - np.arange(3)
    np.testing.assert_array_equal(keys, near)


def test_sums_of_coverage_are_exact() -> None:
    assert (np.rint(_WEIGHTS) == _WEIGHTS).all()
    assert _WEIGHTS.sum() * 255 < 2**24
    # Features of norm one by components up to 2^16, of 16,000 dimensions, by Cauchy and Schwarz; squares of 64 numbers.
    assert (_FINE + 16_000**0.5) * 2**16 * 16_000**0.5 < 2**53
    assert 64 * _FINE**2 < 2**53


@pytest.mark.parametrize("name", HOSTILE)
def test_tables_of_a_map_hold_whole_numbers(name: str) -> None:
    public_map = HOSTILE[name]()
    for table in (public_map._components, public_map._directions, round_to_steps(ROWS)):
        assert (table == np.rint(table)).all()
        assert np.isfinite(table).all()


def test_equal_prototypes_are_taken_in_order() -> None:
    keys = similarity_keys(directions(np.ones((2, 3))), directions(np.ones((50, 3))))
    np.testing.assert_array_equal(find_prototypes(largest_keys(keys), 50), np.tile(np.arange(MOST_NEIGHBORS), (2, 1)))
    assert most_covered(keys, np.full((50, 4), 9, np.uint8)).tolist() == [0, 0]


class _Recorder:
    """Writes down every call that the release makes, Python's and others, in order."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if "nearveil" in frame.f_code.co_filename:  # not what a collection of garbage calls
            name = getattr(argument, "__name__", "") if event.startswith("c_") else frame.f_code.co_name
            self.seen.append((f"{event} {name}", frame.f_lineno))


def recorded(public_map: PublicMap, row: NDArray[np.float64]) -> list[tuple[str, int]]:
    recorder = _Recorder()
    before = sys.getprofile()
    sys.setprofile(recorder)
    try:
        public_map.choose(row[None])
    finally:
        sys.setprofile(before)
    return recorder.seen


def test_every_row_on_every_map_of_a_size_takes_the_same_steps() -> None:
    seen = []
    for make in HOSTILE.values():
        public_map = make()
        public_map.choose(ROWS)  # what is computed once and kept depends on the map alone
        seen += [recorded(public_map, row) for row in ROWS]
    assert len(seen[0]) > 100
    assert all(one == seen[0] for one in seen)


def lines(public_map: PublicMap, row: NDArray[np.float64]) -> list[tuple[str, int]]:
    """The lines of this package that a choice runs: operators of arrays call no function that a profiler sees."""
    seen: list[tuple[str, int]] = []

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if "nearveil" not in frame.f_code.co_filename:
            return None
        if event == "line":
            seen.append((frame.f_code.co_name, frame.f_lineno))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        public_map.choose(row[None])
    finally:
        sys.settrace(before)
    return seen


def test_every_row_on_every_map_of_a_size_runs_the_same_lines() -> None:
    seen = []
    for make in HOSTILE.values():
        public_map = make()
        public_map.choose(ROWS)
        seen += [lines(public_map, row) for row in ROWS]
    assert len(seen[0]) > 100
    assert all(one == seen[0] for one in seen)


DEPENDENT = (
    "sort",
    "argsort",
    "partition",
    "argpartition",
    "nonzero",
    "flatnonzero",
    "where",
    "unique",
    "searchsorted",
)


@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_that_looks_at_the_numbers_takes_part(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sorting, heaps and searches take a time that depends on what they find."""
    public_map = HOSTILE[name]()
    for function in DEPENDENT:
        monkeypatch.setattr(np, function, None)
    monkeypatch.setattr(faiss.IndexFlat, "search", None, raising=False)
    monkeypatch.setattr(faiss.IndexFlatIP, "search", None, raising=False)
    assert public_map.choose(ROWS).shape == (len(ROWS),)


def test_as_many_prototypes_are_nearest_as_there_are() -> None:
    public_map = some_map()
    rows = np.random.default_rng(4).standard_normal((5, 8))
    near = public_map.nearest(rows, 32)
    cosines = directions(rows) @ directions(public_map.prototypes.astype(np.float64)).T
    order = np.argsort(-(cosines // 64), axis=1, kind="stable")[:, :32]
    np.testing.assert_array_equal(near, order)
    for count in (0, 33):
        with pytest.raises(ValueError, match="count must be from 1 to 32"):
            public_map.nearest(rows, count)
