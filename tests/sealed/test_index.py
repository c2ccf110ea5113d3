"""An index and its clients: what is found, what is sent, what changes, and what hostile bytes do."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearveil.sealed import SealedClient, SealedError, SealedIndex
from nearveil.sealed.accuracy import bound_fetch_failure, bound_score_error, find_score_deviation
from nearveil.sealed.cells import find_margins, make_cells
from nearveil.sealed.client import choose_best, get_message_scale, make_messages
from nearveil.sealed.layout import Layout, check_rows, choose_cells
from nearveil.sealed.parameters import LWE
from nearveil.sealed.sizes import (
    MOST_COLUMNS,
    Stage,
    bound_row_norm,
    choose_dimension,
    choose_shape,
    choose_side,
    count_secrets,
    shape_records,
)
from nearveil.sealed.tokens import TokenTables
from nearveil.wire.frames import Kind, WireError, frame, unframe
from tests.sealed.exact import ExactClient, connect, make_hints

N = 400


def make_rows(count: int = N, n_features: int = 24, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(20, n_features))
    return centres[rng.integers(0, 20, count)] + 0.4 * rng.normal(size=(count, n_features))


@pytest.fixture(scope="module")
def rows() -> np.ndarray:
    return make_rows()


@pytest.fixture(scope="module")
def index(rows: np.ndarray) -> SealedIndex:
    return SealedIndex.build(rows, records=[f"item {i}".encode() for i in range(N)], n_cells=24, n_colours=6)


@pytest.fixture(scope="module")
def client(index: SealedIndex) -> ExactClient:
    return connect(index)


def get_codes(index: SealedIndex) -> np.ndarray:
    """Return the code at every position, in steps."""
    layout = index.layout
    shape = (layout.n_colours, layout.n_slots, layout.cells_per_colour, layout.dimension)
    return index._database.reshape(shape).transpose(0, 2, 1, 3).reshape(-1, layout.dimension).astype(np.float64)


def test_scores_are_cosines_of_codes_within_the_bound(
    rows: np.ndarray, index: SealedIndex, client: SealedClient
) -> None:
    codes, worst, errors = get_codes(index), float(np.linalg.norm(index._database.astype(float), axis=2).max()), []
    for row in rows[:20]:
        question = client.ask(row)
        found = client.read_scores(question, index.answer(question.data), N)
        projected = check_rows(row[None])[0] @ index.layout.projection
        true = codes @ (projected / np.linalg.norm(projected)) / index.layout.reach
        errors += [match.score - true[match.position] for match in found]
    tolerance = 0.02
    assert len(errors) > 1000
    assert len(errors) * bound_score_error(worst, index.layout.reach, tolerance) < 1e-9
    assert np.abs(errors).max() < tolerance
    assert np.std(errors) < find_score_deviation(worst, index.layout.reach) * 1.2


def test_the_nearest_are_those_of_a_plain_search_among_the_same_cells(
    rows: np.ndarray, index: SealedIndex, client: SealedClient
) -> None:
    unit, hits = check_rows(rows), 0
    for at in range(12):
        found = [int(match.record.split()[1]) for match in client.search(rows[at], index.answer, 8) if match.record]
        assert found[0] == at
        hits += len(set(found) & set(np.argsort(-(unit @ unit[at]))[:8].tolist()))
    assert hits / (12 * 8) > 0.9


def test_every_question_has_the_same_length(rows: np.ndarray, index: SealedIndex, client: SealedClient) -> None:
    asked = {len(client.ask(row).data) for row in rows[:10]}
    asked_records = {len(client.ask_records(range(count)).data) for count in (0, 1, 2, 31, 100)}
    assert [asked, asked_records] == [{stage.question_bytes + 8 + 14} for stage in index.layout.stages.values()]


def _pick_first(projection: np.ndarray) -> np.ndarray:
    """Return a projection that keeps the first number of a row alone."""
    return np.where(np.arange(len(projection))[:, None] == 0, projection, 0)


@pytest.mark.parametrize(
    ("projection", "centroids"),
    [
        (np.zeros_like, np.asarray),
        (_pick_first, np.asarray),
        (lambda own: np.full_like(own, 1e-45), np.asarray),
        (lambda own: own * np.float32(1e-30), np.zeros_like),
        (lambda own: np.full_like(own, 3e38), np.asarray),
        (lambda own: np.where(own > 0, 3e38, -3e38), np.asarray),
        (np.asarray, lambda own: np.full_like(own, 3e38)),
        (np.asarray, lambda own: np.where(own > 0, 3e38, 1e-45)),
    ],
)
def test_no_hostile_layout_makes_a_client_silent_about_some_rows(
    index: SealedIndex, projection: Callable[..., np.ndarray], centroids: Callable[..., np.ndarray]
) -> None:
    layout = replace(
        index.layout,
        projection=projection(index.layout.projection),
        centroids=centroids(index.layout.centroids),
    )
    client = connect(index)
    client.layout = Layout.from_bytes(layout.to_bytes())
    suspect = np.eye(24)[3]
    with np.errstate(all="raise"):  # a program may have said so
        rows = (suspect, suspect + 1e-30, -suspect, np.ones(24), make_rows(1)[0], 1e-310 * suspect, 0 * suspect)
        asked = [client.ask(row) for row in rows]
    assert {len(one.data) for one in asked} == {index.layout.stages["scores"].question_bytes + 8 + 14}
    for row in (suspect, np.ones(24)):
        messages, _ = make_messages(layout, row)
        steps = messages[messages != 0] / get_message_scale(layout)
        assert 0.9 < np.linalg.norm(steps) / np.sqrt(layout.n_colours) < 1.1


def test_search_sends_two_messages_whatever_the_server_answers(
    rows: np.ndarray, index: SealedIndex, client: SealedClient
) -> None:
    rng = np.random.default_rng(0)
    for hostile in (bytes, rng.bytes, lambda size: b"\xff" * size):
        sent: list[bytes] = []

        def send(data: bytes, hostile=hostile, sent=sent) -> bytes:  # type: ignore[no-untyped-def]
            sent.append(data)
            honest = index.answer(data)
            _, flags, body = unframe(honest)
            return frame(Kind.SEALED_ANSWER, body[:8] + hostile(len(body) - 8), flags)

        found = client.search(rows[0], send, 4)
        assert [len(one) for one in sent] == [len(client.ask(rows[1]).data), len(client.ask_records([]).data)]
        assert len(found) == 4


def test_questions_that_wait_are_answered_together(rows: np.ndarray, index: SealedIndex, client: SealedClient) -> None:
    questions = [client.ask(rows[i]) for i in range(5)]
    fetches = [client.ask_records([i, 5]) for i in range(2)]
    data = [questions[0].data, fetches[0].data, *(one.data for one in questions[1:]), fetches[1].data]
    assert index.answer_many(data) == [index.answer(one) for one in data]


@pytest.mark.parametrize("kind", ["questions", "tokens"])
def test_threads_that_wait_share_a_pass(
    rows: np.ndarray, index: SealedIndex, client: SealedClient, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batcher = index._questions if kind == "questions" else index._token_requests
    passes, real = [], batcher._answer

    def watch(questions: list[Any]) -> list[bytes]:
        passes.append(len(questions))
        return real(questions)

    data = [client.ask(rows[i]).data if kind == "questions" else client.begin_pads().data for i in range(6)]
    expected = [index.answer(one) for one in data]
    monkeypatch.setattr(batcher, "_answer", watch)
    with ThreadPoolExecutor(6) as pool:
        with batcher._lock:
            asked = [pool.submit(index.answer, one) for one in data]
            while len(batcher._queue) < 6:
                time.sleep(0.001)
        assert [one.result() for one in asked] == expected
    assert passes == [6]
    with pytest.raises(WireError):
        index.answer(data[0][:-1])
    assert not batcher._queue


def test_processes_that_build_of_one_seed_answer_for_each_other(rows: np.ndarray) -> None:
    one, other = (SealedIndex.build(rows, n_cells=12, n_colours=3, seed=b"gallery") for _ in range(2))
    question = connect(one).ask(rows[0])
    assert one.answer(question.data) == other.answer(question.data)
    third = SealedIndex.build(rows[:-1], n_cells=12, n_colours=3, seed=b"gallery")
    with pytest.raises(SealedError, match="changed since"):
        third.answer(question.data)


def check_consistent(index: SealedIndex) -> None:
    """Check that tokens are made of hints of the data."""
    index.prepare_tokens()
    for part, stage in index.layout.stages.items():
        hints = make_hints(index, part)
        for k, of_secret in enumerate(index._tokens[part].hints):
            np.testing.assert_array_equal(of_secret, hints[k :: stage.n_secrets].reshape(-1, LWE.dimension))
        fresh = TokenTables.build(part, index.layout.seed, index._tokens[part].hints)
        assert index._tokens[part].tables.public == fresh.public
    filled = index._items >= 0
    np.testing.assert_array_equal(filled.sum(axis=1), index.layout.counts)
    np.testing.assert_array_equal(np.abs(get_codes(index)).sum(axis=1) > 0, filled.ravel())


@pytest.mark.parametrize("n_secrets", [1, 2])
def test_changes_are_answered_with_tokens_of_changed_blocks(n_secrets: int) -> None:
    rows = make_rows(100)
    # As many colours as cells: all of them are looked into.
    records = [b"%d" % i for i in range(100)]
    index = SealedIndex.build(rows, records=records, n_cells=12, n_colours=12, n_secrets=n_secrets)
    client = SealedClient(index.layout.to_bytes(), index.get_public_tokens())
    client.prepare(2, index.answer)
    before, serving, fresh = index, index.copy(), make_rows(3, seed=9)
    index = serving
    index.add(fresh, [b"x", b"y", b"z"])
    index.remove([17, 101])
    with pytest.raises(SealedError, match="changed since the question was made"):
        index.answer(client.ask(rows[0]).data)
    assert client.search(rows[17], before.answer, 1)[0].record == b"17"  # the old version still answers
    with pytest.raises(SealedError, match="changed since its layout"):
        index.answer(client.begin_pads().data)
    check_consistent(index)
    client = SealedClient(index.layout.to_bytes(), index.get_public_tokens())
    assert client.search(fresh[2], index.answer, 1)[0].record == b"z"
    assert client.search(fresh[0], index.answer, 1)[0].record == b"x"
    assert client.search(rows[40], index.answer, 1)[0].record == b"40"
    assert all(match.record not in {b"17", b"y"} for match in client.search(fresh[1], index.answer, 16))
    assert len(index) == 101


def test_a_full_index_refuses_and_changes_nothing() -> None:
    index = SealedIndex.build(make_rows(20), n_cells=2, n_colours=1)
    first = index.layout.version
    room = index.layout.counts.size * index.layout.n_slots - len(index)
    with pytest.raises(SealedError, match="too few free slots"):
        index.add(make_rows(room + 1))
    assert index.layout.version == first
    assert len(index.add(make_rows(room))) == room
    with pytest.raises(SealedError, match="items must be numbers of items"):
        index.remove(1000)


@pytest.mark.parametrize("records", [True, False])
def test_an_index_is_kept_in_a_file(tmp_path: Path, records: bool) -> None:
    rows, path = make_rows(60), tmp_path / "sealed"
    index = SealedIndex.build(rows, records=[b"%d" % i for i in range(60)] if records else None, items=range(7, 67))
    index.save(path)
    assert SealedIndex.load(path)._tokens == {}
    index.prepare_tokens()
    index.save(path)
    again = SealedIndex.load(path)
    assert set(again._tokens) == set(again.layout.stages)
    assert again.get_public_tokens() == index.get_public_tokens()
    assert again.get_items().tolist() == list(range(7, 67))
    client = SealedClient(again.layout.to_bytes(), again.get_public_tokens())
    match = client.search(rows[3], again.answer, 1)[0]
    assert (again.get_item(match.position), match.record) == (10, b"3" if records else None)
    with pytest.raises(ValueError, match="read-only"):  # all processes share it
        again.remove([10])
    changed = SealedIndex.load(path, writable=True)
    changed.remove([10])
    assert SealedIndex.load(path).get_items().tolist() == list(range(7, 67))
    changed.save(path)
    loaded = SealedIndex.load(path)
    assert 10 not in loaded.get_items()
    assert loaded.get_public_tokens() == changed.get_public_tokens() != index.get_public_tokens()
    assert [path] == list(tmp_path.iterdir())
    assert path.stat().st_mode & 0o077 == 0


def test_a_file_that_is_damaged_is_not_read(tmp_path: Path, index: SealedIndex) -> None:
    index.save(tmp_path / "sealed")
    whole = (tmp_path / "sealed").read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    for name, data in {"short": whole[:5000], "tiny": b"x", "flipped": bytes(flipped), "longer": whole + b"x"}.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(SealedError, match="missing or corrupted"):
            SealedIndex.load(tmp_path / name)
    with pytest.raises(SealedError, match="missing or corrupted"):
        SealedIndex.load(tmp_path / "missing")


@pytest.mark.parametrize("items", [[1, 1], [-1, 2], [1], [0.5, 1.5], ["a", "b"]])
def test_numbers_of_items_that_cannot_be_are_refused(items: Any) -> None:
    with pytest.raises(SealedError, match="items must be"):
        SealedIndex.build(make_rows(2), items=items)
    index = SealedIndex.build(make_rows(20))
    with pytest.raises(SealedError, match="items must be"):
        index.add(make_rows(2), items=items)


def test_the_guarantee_is_computational_and_costs_nothing(client: SealedClient, index: SealedIndex) -> None:
    assert not client.guarantee.sound  # its randomness came from a seed
    guarantee = connect(index, None).guarantee
    assert guarantee.sound
    assert guarantee.is_computational
    assert (guarantee.epsilon, guarantee.delta) == (0, 0)
    assert [one.bits for one in guarantee.assumptions] == [132, 140, 140]
    said = str(guarantee)
    assert said.startswith("As long as LWE with n = 1024, Q = 2^26, sigma = 6.4 is hard (the best attack known")
    assert said.endswith("This is a computational guarantee, not an unconditional one.")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (np.zeros((3, 4)), "none of them zero"),
        (np.full((3, 4), np.nan), "finite"),
        (np.ones(4), "shape"),
        (np.ones((0, 4)), "at least one"),
        (np.array([["a"]]), "numbers"),
        (np.full((2, 3), np.inf), "finite"),
    ],
)
def test_rows_that_mean_nothing_are_refused(rows: np.ndarray, message: str) -> None:
    with pytest.raises(SealedError, match=message):
        SealedIndex.build(rows)


def test_bad_arguments_are_named(rows: np.ndarray, index: SealedIndex, client: SealedClient) -> None:
    with pytest.raises(SealedError, match="rows must have 24 features"):
        client.ask(np.ones(7))
    with pytest.raises(SealedError, match="positions must be at most 100"):
        client.ask_records(range(101))
    with pytest.raises(SealedError, match="each of a slot"):
        client.ask_records([10**9])
    with pytest.raises(SealedError, match="one record for each row"):
        SealedIndex.build(rows, records=[b"a"])
    with pytest.raises(SealedError, match="side must be from 1 to 128"):
        SealedIndex.build(rows[:10], records=[b"a"] * 10, side=1000)
    with pytest.raises(SealedError, match="pass records for every row"):
        index.add(rows[:1])
    with pytest.raises(ValueError, match="n_cells must be a whole number"):
        SealedIndex.build(rows, n_cells=0)
    plain = SealedIndex.build(rows[:30])
    with pytest.raises(SealedError, match="has no records"):
        connect(plain).ask_records([0])
    with pytest.raises(SealedError, match="No pad of scores is prepared"):
        SealedClient(plain.layout.to_bytes(), plain.get_public_tokens()).ask(rows[0])
    with pytest.raises(SealedError, match="changed since its layout"):
        SealedClient(index.layout.to_bytes(), plain.get_public_tokens())


def test_one_item_is_enough() -> None:
    index = SealedIndex.build([[1.0, 2.0]], records=[b""])
    assert connect(index).search([1.0, 2.0], index.answer)[0].record == b""


def test_questions_that_do_not_fit_are_refused(index: SealedIndex, rows: np.ndarray, client: SealedClient) -> None:
    data = client.ask(rows[0]).data
    kind, flags, body = unframe(data)
    for wrong in (body[:-3], body + b"abc", body[:8]):
        with pytest.raises((SealedError, WireError)):
            index.answer(frame(kind, wrong, flags))
    with pytest.raises(WireError):
        index.answer(frame(kind, body, 2))
    with pytest.raises(WireError):
        index.answer(frame(Kind.SEALED_ANSWER, body, flags))
    question = client.ask(rows[0])
    answer = index.answer(question.data)
    with pytest.raises(WireError, match="one number for each row"):
        client.read_scores(question, frame(Kind.SEALED_ANSWER, unframe(answer)[2][:-2], 0))
    with pytest.raises(WireError):
        client.read_scores(question, frame(Kind.SEALED_ANSWER, unframe(answer)[2], 1))


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_layouts_and_tokens_that_were_changed_are_read_or_refused(data: st.DataObject) -> None:
    index = SHARED
    for whole, read in (
        (index.layout.to_bytes(), Layout.from_bytes),
        (PUBLIC, lambda given: SealedClient(index.layout.to_bytes(), given)),
    ):
        kind, flags, body = unframe(whole)
        at = data.draw(st.integers(0, min(len(body), 160) - 1))
        changed = body[:at] + data.draw(st.binary(min_size=1, max_size=8)) + body[at + 1 :]
        cut = changed[: data.draw(st.sampled_from([len(changed), at, len(changed) - 1]))]
        try:
            read(frame(kind, cut, flags))
        except (WireError, SealedError):
            continue


SHARED = SealedIndex.build(make_rows(40, 8), n_cells=4, n_colours=2)
PUBLIC = SHARED.get_public_tokens()


@pytest.mark.parametrize(("n", "n_cells", "n_colours"), [(500, 20, 5), (90, 30, 10), (7, 7, 1), (40, 40, 40)])
def test_cells_hold_no_more_than_their_slots_and_colours_are_even(n: int, n_cells: int, n_colours: int) -> None:
    vectors = make_rows(n, 8).astype(np.float32)
    n_slots = -(-n // n_cells) + 1
    cells = make_cells(vectors, n_cells, n_colours, n_slots)
    assert np.bincount(cells.cells, minlength=n_cells).max() <= n_slots
    assert len(cells.cells) == n
    assert cells.centroids.shape == (n_cells, 8)


def test_near_cells_have_different_colours_more_often_than_by_chance() -> None:
    cells = make_cells(make_rows(3000, 8).astype(np.float32), 96, 8, 48)
    colours = np.arange(96) // 12
    near = np.argsort(np.linalg.norm(cells.centroids[:, None] - cells.centroids, axis=2), axis=1)[:, 1:6]
    assert (colours[near] == colours[:, None]).mean() < 0.03  # 0.116 by chance


def test_a_question_that_is_nearer_to_an_item_than_the_border_is_asked_in_its_cell() -> None:
    vectors = make_rows(2000, 8).astype(np.float32)
    made = make_cells(vectors, 48, 6, 46)
    near, margins = find_margins(vectors, made.centroids, made.n_colours)
    of_item = near == made.cells[:, None]
    assert of_item.any(axis=1).all()  # the item itself is asked there
    deep = margins[of_item]
    assert np.median(deep) > np.median(margins)  # it lies deeper there than in others
    rng = np.random.default_rng(0)
    steps = rng.normal(size=vectors.shape)
    steps *= 0.999 * np.maximum(deep, 0)[:, None] / np.linalg.norm(steps, axis=1, keepdims=True)
    for vector, step, cell in zip(vectors.astype(np.float64), steps, made.cells, strict=True):
        chosen = choose_cells(vector + step, made.centroids, made.n_colours)
        assert chosen[cell // 8] == cell % 8


def test_an_item_is_not_deep_in_a_cell_that_another_of_its_colour_coincides_with() -> None:
    rng = np.random.default_rng(5)
    centroids = rng.normal(size=(6, 64)).astype(np.float32) * 30
    centroids[1] = centroids[0] * np.float32(1 + 1e-6)  # two of the first colour
    rows = (centroids[0] + rng.normal(size=(200, 64))).astype(np.float32)
    _, margins = find_margins(rows, centroids, 2)
    assert (margins[:, 0] == 0).all()
    assert (margins[:, 1] > 0).all()


def test_shapes_are_chosen_by_size() -> None:
    assert choose_shape(1, 8) == choose_shape(57_000, 256) == (1, 1)  # all slots are probed
    assert choose_shape(1_000_000, 256) == (858, 33)
    assert [choose_side(*shape) for shape in ((10**4, 140), (10**4, 1400), (10**6, 1400), (10**7, 140))] == [
        20,
        12,
        20,
        24,
    ]
    assert [choose_dimension(*shape) for shape in ((10**4, 384), (10**4, 1280), (10**6, 384))] == [384, 256, 256]
    assert choose_shape(100, 64, n_cells=10, n_colours=4) == (12, 4)
    assert choose_shape(100, 64, n_cells=2, n_colours=50) == (2, 2)
    for count in (10**power for power in range(1, 10)):  # no question has more samples than were estimated
        dimension = choose_dimension(count, 1280)
        n_cells, n_colours = choose_shape(count, dimension)
        samples = n_cells // n_colours * dimension
        assert samples <= MOST_COLUMNS
        stages = (
            Stage(n_colours, 8, samples, count_secrets(n_colours, samples), 22),
            shape_records(2 * count, 140, choose_side(count, 140)).stage,
        )
        assert all(stage.n_samples <= LWE.most_samples for stage in stages)
        assert bound_fetch_failure(bound_row_norm(stages[1].n_columns), stages[1].question_bits) <= 2**-40


@pytest.mark.parametrize("n_filled", [0, 3, 20, 50])
def test_the_best_are_chosen_by_work_that_depends_on_shapes_alone(
    n_filled: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(n_filled)
    numbers, filled = rng.integers(-9, 9, (5, 10)), np.zeros(50, bool)
    filled[rng.permutation(50)[:n_filled]] = True
    order = np.argsort(np.where(filled, -numbers.ravel(), 99), kind="stable")[:16]
    looks: list[int] = []
    argmax = np.argmax

    def look(keys: np.ndarray) -> np.intp:
        looks.append(keys.size)
        return argmax(keys)

    monkeypatch.setattr(np, "argmax", look)
    for name in ("sort", "argsort", "lexsort", "partition", "argpartition", "flatnonzero", "nonzero", "unique"):
        monkeypatch.delattr(np, name)  # each takes a time of its own for other numbers
    best = choose_best(numbers, filled.reshape(5, 10), 16)
    assert looks == [50] * 16
    found = [at for at in best.tolist() if filled[at]]
    assert found == [at for at in order.tolist() if filled[at]]
    assert len(set(best.tolist())) == 16
    assert len(choose_best(numbers, filled.reshape(5, 10), 99)) == 50


def test_scores_of_rows_with_many_norms_do_not_wrap() -> None:
    """An item that is longer than all when the index was built is refused: its code would be clipped."""
    rng = np.random.default_rng(3)
    rows = make_rows(400) * np.exp(rng.normal(size=(400, 1)))
    index = SealedIndex.build(rows, normalize=False, n_cells=4, n_colours=4)
    long = 20 * rows[np.linalg.norm(rows, axis=1).argmax()]
    with pytest.raises(SealedError, match="a row is longer than the codes of this index can hold: build it again"):
        index.add(long[None], items=[400])
    client = connect(index)
    query = long / np.linalg.norm(long)
    question = client.ask(query)
    scores = {
        index.get_item(m.position): m.score for m in client.read_scores(question, index.answer(question.data), 401)
    }
    best = max(scores, key=scores.__getitem__)
    assert best == int((rows @ query).argmax())
    assert 0.5 < scores[best] <= 1.01  # of the bound: not negative, as a product that wraps would be
    true = rows @ query
    unit = np.linalg.norm(rows, axis=1).max() / max(scores[n] / true[n] * true[n] for n in range(400) if true[n] > 0)
    assert np.abs(np.array([scores[n] for n in range(400)]) * unit - true).max() < 0.05 * true.max()


def test_cells_leave_out_the_column_of_norms() -> None:
    rng = np.random.default_rng(4)
    rows = make_rows(600) * np.exp(rng.normal(size=(600, 1)) / 2)
    lengths = np.square(rows).sum(axis=1, keepdims=True)
    index = SealedIndex.build(np.concatenate([rows, (1 - lengths) / 2], axis=1), normalize=False, axis=np.eye(25)[-1])
    axis = index.layout.projection[-1] / np.linalg.norm(index.layout.projection[-1])
    parts = index.layout.centroids @ axis
    assert np.abs(parts).max() < 0.02 * np.linalg.norm(index.layout.centroids, axis=1).max()
