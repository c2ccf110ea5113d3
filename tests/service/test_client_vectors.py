"""Questions about vectors: of any library, many at once, with metadata and filters that never leave the client."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pandas as pd
import pytest
import torch

from nearveil import AsyncClient, Client
from nearveil.client import Match, QuestionError, UnfinishedError
from nearveil.client.timing import choice_period, question_period
from nearveil.gallery import Index
from nearveil.gallery.answers import ItemDetails, encode_details, read_details
from nearveil.ledger import OverBudgetError
from nearveil.wire.frames import WireError
from tests.clocks import Watched, watched
from tests.search.standins import clustered
from tests.service.asking import (
    CANDIDATES,
    COUNT,
    DIMENSION,
    QUERIES,
    URL,
    Scene,
    is_post,
    make_index,
    opened,
    public_of,
    scene,
    unit,
)

__all__ = ["watched"]

PRIVATE = QUERIES[0]
OFFERS = ("names", "metadata")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("made") / "texts"
    rows = 3 * unit(clustered(2, COUNT, DIMENSION)[0])  # whatever their norms
    with Index.create(place, dimension=DIMENSION) as index:
        index.add_table(
            rows,
            ids=[f"doc-{n}" for n in range(COUNT)],
            names=[f"text {n}" for n in range(COUNT)],
            metadata=[{"even": n % 2 == 0, "n": n} for n in range(COUNT)],
        )
        index.publish(4.0, 0.1, n_sets=6, reach=0.0)
    return place


@pytest.fixture
def here(made: Path, tmp_path: Path) -> Iterator[Scene]:
    with scene(made, tmp_path, epsilon=500.0, offers=OFFERS) as found:
        yield found


def test_vectors_of_any_library_and_any_norm_ask_the_same(made: Path, here: Scene) -> None:
    kinds: list[Any] = [
        PRIVATE,
        PRIVATE[None],
        7 * PRIVATE,
        PRIVATE.astype(np.float64),
        torch.tensor(PRIVATE, requires_grad=True),
        torch.tensor(PRIVATE)[None],
        pd.Series(PRIVATE),
        PRIVATE.tolist(),
        [PRIVATE.tolist()],
    ]
    with Client(made, account=here.account) as client:
        answers = [client.nearest(kind, epsilon=4.0, key="one question") for kind in kinds]
    assert here.paid == 1
    for other in answers[1:]:
        assert [match.id for match in other.matches] == [match.id for match in answers[0].matches]
        np.testing.assert_allclose(
            [match.similarity for match in other.matches],
            [match.similarity for match in answers[0].matches],
            atol=1e-6,
        )


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (np.zeros(DIMENSION), "query: its feature must not be all zeros"),
        ([0.0] * DIMENSION, "query: its feature must not be all zeros"),
        ([np.nan] * DIMENSION, "query: feature must be finite"),
        (QUERIES[:2], "query: an array must be one row"),
        ([1.0, "a"], "query: it must be a path"),
        (7.0, "query: it must be a path"),
        (np.array(["a"] * DIMENSION), "query: an array must be one row of numbers"),
    ],
)
def test_what_has_no_direction_is_refused_before_anything_is_sent(here: Scene, wrong: Any, words: str) -> None:
    client, wire = here.client()
    with pytest.raises(QuestionError, match=words):
        client.nearest(wrong, epsilon=4.0)
    assert wire.posts == []
    assert here.paid == 0


def test_metadata_comes_back_with_every_match(here: Scene) -> None:
    client, _ = here.client()
    for match in client.nearest(PRIVATE, epsilon=4.0, k=CANDIDATES).matches:
        assert match.external_id == f"doc-{match.id}"
        assert match.name == f"text {match.id}"
        assert match.metadata == {"even": match.id % 2 == 0, "n": match.id}


def test_a_filter_is_applied_here_and_never_sent(here: Scene) -> None:
    client, wire = here.client()
    everything = client.nearest(PRIVATE, epsilon=4.0, k=CANDIDATES, key="a question")
    sent = list(wire.posts)
    even = client.nearest(PRIVATE, epsilon=4.0, k=3, key="a question", where={"even": True})
    assert list(even.matches) == [match for match in everything.matches if match.metadata["even"]][:3]
    assert even.matches
    late = client.nearest(PRIVATE, epsilon=4.0, key="a question", where=lambda match: match.metadata["n"] > 60)
    assert list(late.matches) == [match for match in everything.matches if match.id > 60][:8]
    assert client.nearest(PRIVATE, epsilon=4.0, key="a question", where={"n": -1}).matches == ()
    assert wire.posts == 4 * sent
    assert here.paid == 1


def test_a_filter_reads_all_candidates_whatever_it_accepts(here: Scene) -> None:
    """A filter that stopped when it has k matches would take a time that tells how many items fit."""
    client, _ = here.client()
    for accepted in (True, False):
        read: list[int] = []

        def accept(match: Match, read: list[int] = read, accepted: bool = accepted) -> bool:
            read.append(match.id)
            return accepted

        client.nearest(PRIVATE, epsilon=4.0, k=1, where=accept)
        assert len(read) == CANDIDATES


def test_filters_that_cannot_work_are_refused_before_anything_is_paid(made: Path, tmp_path: Path) -> None:
    with scene(made, tmp_path, offers=("names",)) as here:
        client, wire = here.client()
        with pytest.raises(QuestionError, match="where: this gallery does not offer metadata"):
            client.nearest(PRIVATE, epsilon=4.0, where={"even": True})
        with pytest.raises(QuestionError, match="where: it must be a mapping"):
            client.nearest(PRIVATE, epsilon=4.0, where="even")  # type: ignore[arg-type]
        assert wire.posts == []
        assert here.paid == 0
        assert {match.external_id for match in client.nearest(PRIVATE, epsilon=4.0).matches} == {None}


def test_a_server_says_that_it_returns_no_ids(made: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nameless = make_index(tmp_path / "images")
    with opened(made) as a, opened(made, "b", offers=("names", "metadata")) as b, opened(nameless, "c") as c:
        for gallery in (a, b, c):
            gallery.prepare()
    assert [record.message.partition(":")[0] for record in caplog.records] == ["birds"]


def test_a_key_that_no_item_has_is_refused_before_anything_is_paid(made: Path, here: Scene) -> None:
    client, wire = here.client()
    assert client.galleries()[0].metadata_keys == ("even", "n")
    with Client(made, account=here.account) as local:
        for one in (client, local):
            with pytest.raises(
                QuestionError, match="where: no item has 'evne' in its metadata; the keys are: even"
            ) as raised:
                one.nearest(PRIVATE, epsilon=4.0, where={"even": "a secret", "evne": "a secret"})
            assert "secret" not in str(raised.value)
    assert (wire.posts, here.paid) == ([], 0)


def test_a_key_that_came_after_the_gallery_was_listed_is_known(tmp_path: Path) -> None:
    rows = unit(clustered(2, COUNT, DIMENSION)[0])
    with Index.create(tmp_path / "texts", dimension=DIMENSION) as index:
        index.add_table(rows, metadata=[{"n": n} for n in range(COUNT)])
        index.publish(4.0, 0.1, n_sets=6, reach=0.0)
        with scene(tmp_path / "texts", tmp_path, offers=OFFERS) as here:
            client, wire = here.client()
            client.galleries()
            index.add_table(rows[:1], metadata=[{"fresh": 1}])
            sent = len(wire.requests)
            with pytest.raises(QuestionError, match=r"client\.galleries\(\) updates them"):
                client.nearest(PRIVATE, epsilon=4.0, where={"fresh": 1})
            assert len(wire.requests) == sent  # what is asked must not depend on a filter
            client.galleries()
            client.nearest(PRIVATE, epsilon=4.0, where={"fresh": 1})
            assert here.paid == 1
            index.add_table(rows[:1], metadata=[{f"key {n}": 1 for n in range(64)}])  # too many to be told
            assert index.metadata_keys() is None
            assert client.galleries()[0].metadata_keys is None
            client.nearest(PRIVATE, epsilon=4.0, where={"whatever": 1})


def test_a_vector_may_lie_in_a_file(here: Scene, tmp_path: Path) -> None:
    client, wire = here.client()
    np.save(tmp_path / "one.npy", PRIVATE)
    np.save(tmp_path / "two.npy", QUERIES[:2])
    by_file, by_row = (
        client.nearest(one, epsilon=4.0, key="a question") for one in (str(tmp_path / "one.npy"), PRIVATE)
    )
    assert by_file.matches == by_row.matches
    assert here.paid == 1
    sent = len(wire.requests)
    for name, words in (("two.npy", "two.npy holds 2 rows"), ("no.npy", "there is no file at")):
        with pytest.raises(QuestionError, match=f"query: .*{words}"):
            client.nearest(tmp_path / name, epsilon=4.0)
    assert len(wire.requests) == sent


def test_a_feature_of_another_length_is_told_both_lengths(here: Scene) -> None:
    client, _ = here.client()
    with pytest.raises(QuestionError, match=f"must have {DIMENSION} numbers, like those of the gallery; it has 3"):
        client.nearest(np.ones(3), epsilon=4.0)


@pytest.mark.parametrize("given", [2, "a.jpg", b"bytes"])
def test_what_prepare_wants_is_said(here: Scene, given: Any) -> None:
    client, wire = here.client()
    with pytest.raises(QuestionError, match=r"images: it must be a list of queries; prepare_sealed\(n\) prepares"):
        client.prepare(given)
    assert wire.requests == []


def test_many_rows_pay_one_debit_and_have_one_key_each(here: Scene) -> None:
    client, wire = here.client()
    found = client.nearest_many(torch.tensor(QUERIES[:5]), k=2, epsilon=2.0)
    assert len({one.key for one in found}) == here.paid == len(wire.posts) == 5
    again = client.nearest_many(QUERIES[:5], k=2, epsilon=2.0, keys=[one.key for one in found])
    assert [one.matches for one in again] == [one.matches for one in found]
    assert all(one.repeated for one in again)
    assert here.paid == 5

    async def ask() -> list[Any]:
        async with AsyncClient(URL, here.server.token, account=here.account, transport=here.server.wire()) as other:
            return await other.nearest_many(QUERIES[:2], epsilon=4.0, keys=["first", "second"])

    assert [one.key for one in asyncio.run(ask())] == ["first", "second"]
    assert here.paid == 7


def test_many_rows_are_sent_at_a_moment_that_sizes_and_their_number_fix(here: Scene, watched: Watched) -> None:
    client, _ = here.client()
    client.galleries()
    public, ends = public_of(here.gallery), set()
    period = question_period(public, 3)
    assert question_period(public) < period < 2 * question_period(public)
    for work in (0.0, 0.0078125, 0.03125):
        watched.work(paying=work, ranking=work / 4)
        client.nearest_many(QUERIES[:3], epsilon=4.0)
        ((_, came),) = [seen for seen in watched.heard if seen[0] == "map"]
        assert [moment for what, moment in watched.sent if what == "query"] == [came + period] * 3
        ends.add(watched.clock.time - watched.heard[-1][1])  # until the call returns
    # Texts of the sets that messages name differ by some bytes.
    assert max(ends) - min(ends) < 1e-4
    assert max(ends) == pytest.approx(choice_period(public, texts=8, text_bytes=500, questions=3), abs=1e-3)


def test_many_rows_come_with_the_matches_of_each(here: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """In batches, of which the last is smaller, and whatever the order of the replies."""
    monkeypatch.setattr("nearveil.client.questions._MOST_TOGETHER", 5)
    client, wire = here.client()
    keys = [f"key {n}" for n in range(12)]
    many = client.nearest_many(QUERIES[:12], epsilon=4.0, keys=keys)
    assert here.paid == len(wire.posts) == 12
    for row, key, together in zip(QUERIES, keys, many, strict=False):
        single = client.nearest(row, epsilon=4.0, key=key)
        assert single.repeated
        assert (single.matches, single.set, single.key) == (together.matches, together.set, together.key)
        assert single.names == together.names
    assert here.paid == 12


def test_an_error_of_a_filter_does_not_change_what_is_sent(here: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """It depends on matches, and whether more rows are asked about is seen."""
    monkeypatch.setattr("nearveil.client.questions._MOST_TOGETHER", 2)
    client, wire = here.client()
    asked: list[int] = []

    def refuse(match: Match) -> bool:
        asked.append(match.id)
        if len(asked) > CANDIDATES:
            raise RuntimeError("no")
        return True

    with pytest.raises(UnfinishedError, match=r"rows\[1\]: no") as raised:
        client.nearest_many(QUERIES[:5], epsilon=4.0, where=refuse)
    assert len(raised.value.results) == 1
    assert len(wire.posts) == here.paid == 5


def test_rows_that_the_account_can_pay_are_answered(made: Path, tmp_path: Path) -> None:
    with scene(made, tmp_path, epsilon=10.0, offers=OFFERS) as here:
        client, wire = here.client()
        with pytest.raises(UnfinishedError, match=r"rows\[2\]: ") as raised:
            client.nearest_many(QUERIES[:4], epsilon=4.0)
        assert len(raised.value.results) == len(wire.posts) == here.paid == 2
        assert isinstance(raised.value.__cause__, OverBudgetError)
        assert client.balance().spent == 8.0
        assert [result.remaining for result in raised.value.results] == [6.0, 2.0]


def test_what_was_answered_before_a_failure_is_not_lost(here: Scene) -> None:
    def broken(request: httpx.Request, reply: httpx.Response) -> httpx.Response:
        if is_post(request) and tuple(request.headers.raw) in [seen[2] for seen in wire.posts[2:]]:
            raise httpx.ReadError("broken pipe", request=request)
        return reply

    client, wire = here.client(broken, retries=0)
    with pytest.raises(UnfinishedError, match=r"rows\[2\]: .*nearest_many\(rows, keys=error.keys\)") as raised:
        client.nearest_many(QUERIES[:4], epsilon=4.0)
    assert (len(raised.value.results), len(raised.value.keys), here.paid) == (2, 4, 4)
    other, _ = here.client()
    found = other.nearest_many(QUERIES[:4], epsilon=4.0, keys=raised.value.keys)
    assert all(one.repeated for one in found)
    assert here.paid == 4


@pytest.mark.parametrize(
    ("rows", "keys", "words"),
    [
        (np.zeros((2, DIMENSION)), None, "query: its feature must not be all zeros"),
        ([[1.0] * DIMENSION, [np.inf] * DIMENSION], None, "rows: must be finite"),
        (QUERIES[:2], ["one"], "keys: there must be 2"),
        (QUERIES[:2], ["one", "one"], "no two the same"),
        ("text", None, "rows must be numbers"),
        (QUERIES[:2, :5], None, "query: a feature must have 8 numbers"),
    ],
)
def test_all_rows_are_checked_before_the_first_is_paid(here: Scene, rows: Any, keys: Any, words: str) -> None:
    client, wire = here.client()
    with pytest.raises(ValueError, match=words):
        client.nearest_many(rows, epsilon=4.0, keys=keys)
    assert wire.posts == []
    assert here.paid == 0


@pytest.mark.parametrize(
    "data",
    [
        b"[]",
        b"{}",
        b"\xff",
        b'{"name":"a","id":null,"metadata":[]}',
        b'{"name":"a","id":7,"metadata":{}}',
        b'{"name":"a\\u001b","id":null,"metadata":{}}',
        b'{"name":"a","id":null,"metadata":{},"more":1}',
        b'{"name":"a","id":null,"metadata":{"a":NaN}}',
        b'{"name":"a","id":null,"metadata":' + b'{"a":' * 20_000 + b"1" + b"}" * 20_000 + b"}",
        b'{"name":"' + b"a" * 5000 + b'","id":null,"metadata":{}}',
    ],
)
def test_metadata_of_bad_will(data: bytes) -> None:
    with pytest.raises(WireError, match="as metadata"):
        read_details(data)


def test_metadata_goes_to_and_fro() -> None:
    given = ItemDetails("Amsel\x1b[2J", "a\nb", {"ä": [1, None, {"b": 0.5}]})
    assert read_details(encode_details(given)) == ItemDetails("Amsel�[2J", "a\nb", given.metadata)
    assert read_details(b"") == ItemDetails("", None, {})
