"""Records in a grid: places, entries, matching, and what comes back."""

import sys
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearveil.sealed import SealedError, SealedIndex
from nearveil.sealed.accuracy import bound_fetch_failure
from nearveil.sealed.lwe import Longs, Words, add_messages
from nearveil.sealed.records import (
    decode_records,
    encode_records,
    find_buckets,
    match_buckets,
    pad_records,
    place_records,
    unpad_record,
)
from nearveil.sealed.sizes import RecordLayout, bound_row_norm, shape_records
from tests.sealed.exact import ExactClient, connect

SEED = bytes(range(32))
ROWS = np.random.default_rng(0).normal(size=(500, 16))
TEXTS = [b"item %d" % i + bytes(i % 7) for i in range(500)]


@pytest.fixture(scope="module", params=[1, 3], ids=["one secret", "three secrets"])
def index(request: pytest.FixtureRequest) -> SealedIndex:
    return SealedIndex.build(ROWS, records=TEXTS, side=6, n_secrets=request.param)


@pytest.fixture(scope="module")
def client(index: SealedIndex) -> ExactClient:
    return connect(index)


@pytest.mark.parametrize(("count", "side"), [(1, 20), (30, 20), (400, 20), (5000, 7), (3000, 1)])
def test_positions_have_places_of_their_own_spread_evenly(count: int, side: int) -> None:
    layout = shape_records(count, 30, side)
    size = layout.n_blocks * layout.block_size
    assert count <= size
    block, column, number = place_records(layout, SEED, np.arange(size))
    assert np.bincount(block, minlength=layout.n_blocks).tolist() == [layout.block_size] * layout.n_blocks
    assert (column.max(), number.max()) == (layout.n_columns - 1, layout.per_column - 1)
    assert len(np.unique((block * layout.n_columns + column) * layout.per_column + number)) == size


def test_neighbours_are_placed_as_if_at_random() -> None:
    layout = shape_records(40_000, 30, 20)
    counts = []
    for start in range(0, 40_000, 400):
        blocks = place_records(layout, SEED, np.arange(start, start + 40))[0]
        counts.append(len(np.unique(find_buckets(layout, blocks)[:, 0])))
    expected = 20 * (1 - (19 / 20) ** 40)
    assert abs(np.mean(counts) - expected) < 0.5


@given(st.lists(st.binary(max_size=12), min_size=1, max_size=5), st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_records_of_any_bytes_are_encoded_and_read(records: list[bytes], start: int) -> None:
    layout = RecordLayout(max(map(len, records)) + 1, 20, 3, 4, 1)
    positions, padded = np.arange(start, start + len(records)), pad_records(records, layout.width)
    assert [unpad_record(row) for row in padded] == records
    entries = encode_records(layout, SEED, positions, padded)
    assert entries.shape == (len(records), layout.n_entries)
    assert -32 <= entries.min() <= entries.max() < 32
    np.testing.assert_array_equal(decode_records(layout, SEED, positions, entries.astype(np.int64) % 64), padded)


@pytest.mark.parametrize("width", [40, 41, 42, 48])  # 4, 2, 0 and 0 spare bits in the last entry
def test_whitened_records_are_as_random_ones(width: int) -> None:
    layout = shape_records(20_000, width, 20)
    entries = encode_records(layout, SEED, np.arange(20_000), np.zeros((20_000, width), np.uint8)).astype(np.float64)
    norms = np.linalg.norm(entries.T, axis=1)
    assert norms.max() < bound_row_norm(20_000)
    assert bound_row_norm(20_000) < 1.03 * norms.mean()
    assert abs(np.corrcoef(entries.T) - np.eye(layout.n_entries)).max() < 0.05


def can_place(buckets: np.ndarray, chosen: tuple[int, ...]) -> bool:
    """Check Hall's condition."""
    return all(
        len(set(buckets[list(some)].ravel())) >= len(some)
        for size in range(1, len(chosen) + 1)
        for some in combinations(chosen, size)
    )


@pytest.mark.parametrize("seed", range(40))
def test_the_first_records_that_can_be_placed_together_are(seed: int) -> None:
    rng = np.random.default_rng(seed)
    side = int(rng.integers(2, 5))
    buckets = np.stack([rng.integers(0, side, 9), side + rng.integers(0, side, 9)], axis=1)
    is_real = rng.random(9) < 0.9
    owners = match_buckets(buckets, is_real.tolist(), 2 * side)
    expected: tuple[int, ...] = ()
    for record in np.flatnonzero(is_real).tolist():
        if can_place(buckets, (*expected, record)):
            expected = (*expected, record)
    assert tuple(sorted(owner for owner in owners if owner >= 0)) == expected
    assert all(owner < 0 or bucket in buckets[owner] for bucket, owner in enumerate(owners))


def test_matching_takes_as_many_steps_for_all_records() -> None:
    """The moment of the question that follows would tell which records are near the query, or how many."""
    rng, count, side = np.random.default_rng(0), 50, 10
    apart = np.stack([np.arange(count) % side, side + np.arange(count) % side], axis=1)
    cases = [
        (np.tile([0, side], (count, 1)), count),
        (apart, count),
        (apart, 0),
        (np.stack([rng.integers(0, side, count), side + rng.integers(0, side, count)], axis=1), count),
        (np.stack([np.arange(count) // 2 % side, side + (np.arange(count) + 1) // 2 % side], axis=1), 10),
    ]
    steps = []
    for buckets, n_real in cases:
        lines = 0

        def trace(frame: Any, event: str, argument: Any) -> Any:
            nonlocal lines
            del argument
            lines += event == "line" and frame.f_code.co_name == "match_buckets"
            return trace

        sys.settrace(trace)
        try:
            match_buckets(buckets, [number < n_real for number in range(count)], 2 * side)
        finally:
            sys.settrace(None)
        steps.append(lines)
    assert max(steps) < 1.05 * min(steps)


def test_records_come_back_byte_for_byte(index: SealedIndex, client: ExactClient) -> None:
    assert index.layout.records is not None
    positions = [p for p in range(index.layout.counts.size * index.layout.n_slots) if index.get_item(p) >= 0]
    fetched = 0
    for start in range(0, 480, 30):
        wanted = positions[start : start + 30]
        question = client.ask_records(wanted)
        records = client.read_records(question, index.answer(question.data))
        assert records == [TEXTS[index.get_item(position)] for position in question.positions]
        assert list(question.positions) == [position for position in wanted if position in question.positions]
        assert question.positions[0] == wanted[0]
        fetched += len(records)
    assert fetched > 16 * 0.9 * 12


@pytest.mark.parametrize("positions", [[], [5], list(range(30))])
def test_every_bucket_is_asked_for_a_column_or_for_nothing(
    index: SealedIndex, client: ExactClient, positions: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = []

    def add(zeros: Words, messages: Longs, bits: int) -> Words:
        sent.append(messages)
        return add_messages(zeros, messages, bits)

    monkeypatch.setattr("nearveil.sealed.client.add_messages", add)
    question = client.ask_records(positions)
    layout = index.layout.records
    assert layout is not None
    (messages,) = sent
    assert messages.shape == (12, 6 * layout.n_columns)
    assert set(np.unique(messages)) <= {0, 1 << 20}
    assert (messages != 0).sum(axis=1).tolist() == [int(position >= 0) for position in question.buckets]
    assert sorted(set(question.buckets) - {-1}) == sorted(question.positions)
    assert question.positions[:1] == tuple(positions[:1])


def test_entries_are_wrong_as_rarely_as_the_bound_says(index: SealedIndex, client: ExactClient) -> None:
    """Errors have the variance of the theorem, which is far below half a step of an entry."""
    layout = index.layout.records
    assert layout is not None
    stage, errors = layout.stage, []
    for start in range(20):
        question = client.ask_records(range(start, start + 30))
        raw = client._decrypt("records", question, index.answer(question.data)) / (65537 * 65536 / 64)
        errors.append(raw - np.rint(raw))
    norm = np.linalg.norm(np.stack([index._get_group("records", b) for b in range(12)]).astype(float), axis=2).max()
    assert norm < bound_row_norm(stage.n_columns)
    assert bound_fetch_failure(bound_row_norm(stage.n_columns), stage.question_bits) <= 2**-40
    deviation = (
        np.sqrt((40.96 + 4 ** (26 - stage.question_bits) / 12) * norm**2 + (1024 * 40.96 + 1) * 2**20 / 12) / 2**20
    )
    assert 0.3 * deviation < np.std(errors) < 1.1 * deviation


def test_rows_that_are_too_long_for_the_bound_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "nearveil.sealed.records.bound_row_norm", lambda n_columns: 0.9 * bound_row_norm(n_columns) / 1.4
    )
    with pytest.raises(SealedError, match="another seed"):
        SealedIndex.build(ROWS, records=TEXTS, seed=b"s")


def test_a_hostile_answer_is_read_as_some_records(index: SealedIndex, client: ExactClient) -> None:
    from nearveil.wire.frames import Kind, frame, unframe

    question = client.ask_records(range(30))
    body = unframe(index.answer(question.data))[2]
    for hostile in (bytes(len(body) - 8), b"\xff" * (len(body) - 8)):
        records = client.read_records(question, frame(Kind.SEALED_ANSWER, body[:8] + hostile, 1))
        assert len(records) == len(question.positions)
