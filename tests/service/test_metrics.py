"""Every way to ask ranks by the gallery's metric: messages, copies, sealed questions, a local index."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cryptography")

from nearveil import AsyncClient, Client
from nearveil.client import Nearest, QuestionError
from nearveil.gallery import Index
from nearveil.metrics import Metric
from tests.metrics import CHOICES, DIMENSION, make_vectors, measure_dense, rank_dense
from tests.service.asking import URL, Scene, scene

pytestmark = pytest.mark.usefixtures("no_pauses")
ROWS, QUERIES = make_vectors(400), make_vectors(12, seed=1)
K = 8


@pytest.fixture(params=CHOICES)
def metric(request: pytest.FixtureRequest) -> Metric:
    chosen: Metric = request.param
    return chosen


def make_gallery(place: Path, metric: Metric, code_bytes: Any = None) -> Path:
    with Index.create(place, dimension=DIMENSION, metric=metric) as index:
        index.add_table(ROWS, ids=[f"key {number}" for number in range(len(ROWS))])
        index.publish(4.0, 0.25, n_sets=6, code_bytes=code_bytes)
    return place


@pytest.fixture
def here(tmp_path: Path, metric: Metric) -> Iterator[Scene]:
    made = make_gallery(tmp_path / "gallery", metric)
    with scene(made, tmp_path, epsilon=1000.0, offers=("codes", "metadata", "sealed")) as found:
        found.gallery.prepare()  # type: ignore[attr-defined]
        yield found


def check_values(metric: Metric, result: Nearest, query: Any) -> list[int]:
    """Check similarities and distances against a plain computation; return the ids."""
    ids = [match.id for match in result.matches]
    true = measure_dense(metric, query[None], ROWS[ids])[0]
    shown = [match.similarity if match.distance is None else match.distance for match in result.matches]
    np.testing.assert_allclose(shown, true, rtol=2e-4)
    assert result.metric == metric
    assert all((match.distance is None) == (metric != "euclidean") for match in result.matches)
    if metric == "euclidean":
        assert [match.similarity for match in result.matches] == [-value for value in shown]
    assert list(np.diff([match.similarity for match in result.matches]) <= 0) == [True] * (len(ids) - 1)
    return ids


def test_copies_indexes_and_batches_are_exact(here: Scene, metric: Metric, tmp_path: Path) -> None:
    true = rank_dense(metric, QUERIES, ROWS, K)
    client, _ = here.client(home=tmp_path / "home")
    client.sync()
    assert client.galleries()[0].metric == metric
    singles = [client.nearest(query, K, by="home") for query in QUERIES]
    batch = client.nearest_many(QUERIES, K)
    with Client(tmp_path / "gallery", home=tmp_path / "no copy") as local:
        exact = [local.nearest(query, K) for query in QUERIES]
    for results in (singles, batch, exact):
        assert [check_values(metric, *pair) for pair in zip(results, QUERIES, strict=True)] == true.tolist()


def test_a_filter_ranks_by_the_metric(here: Scene, metric: Metric, tmp_path: Path) -> None:
    client, _ = here.client(home=tmp_path / "home")
    client.sync()
    found = client.nearest(QUERIES[0], K, where=lambda match: match.id % 2 == 0)
    even = rank_dense(metric, QUERIES[:1], ROWS[::2], K)[0] * 2
    assert check_values(metric, found, QUERIES[0]) == even.tolist()


def test_messages_return_the_nearest_of_their_candidates(here: Scene, metric: Metric) -> None:
    client, _ = here.client()
    for query in QUERIES[:6]:
        found = client.nearest(query, K, 4.0)
        assert found.answer is not None
        candidates = found.answer.ids.astype(int)
        best = candidates[rank_dense(metric, query[None], ROWS[candidates], K)[0]]
        assert check_values(metric, found, query) == best.tolist()


def test_sealed_questions_return_the_nearest_of_their_cells(here: Scene, metric: Metric) -> None:
    client, _ = here.client()
    true, hits = rank_dense(metric, QUERIES, ROWS, K), 0
    for query, near in zip(QUERIES, true, strict=True):
        ids = check_values(metric, client.nearest(query, K, by="sealed"), query)
        hits += len(set(ids) & set(near.tolist()))
    assert hits >= 0.85 * true.size


def test_an_asynchronous_client_ranks_alike(here: Scene, metric: Metric, tmp_path: Path) -> None:
    wire = here.server.wire()

    async def ask() -> list[Nearest]:
        async with AsyncClient(URL, here.server.token, transport=wire, home=tmp_path / "home") as client:
            await client.sync()
            return await client.nearest_many(QUERIES[:3], K)

    results = asyncio.run(ask())
    true = rank_dense(metric, QUERIES[:3], ROWS, K)
    assert [check_values(metric, *pair) for pair in zip(results, QUERIES, strict=False)] == true.tolist()


def test_a_query_of_zeros_is_asked_about_where_it_has_a_distance(here: Scene, metric: Metric) -> None:
    client, wire = here.client()
    for way in ({"epsilon": 4.0}, {"by": "sealed"}):
        if metric == "euclidean":
            check_values(metric, client.nearest(np.zeros(DIMENSION), K, **way), np.zeros(DIMENSION))
            continue
        with pytest.raises(QuestionError, match="all zeros: it has no direction"):
            client.nearest(np.zeros(DIMENSION), K, **way)
        assert wire.posts == []
        assert here.paid == 0


@pytest.mark.parametrize("longer", ["dot", "euclidean"])
@pytest.mark.parametrize("code_bytes", [None, "auto", 16])
def test_a_row_longer_than_all_is_found_after_an_update(tmp_path: Path, longer: Metric, code_bytes: Any) -> None:
    """No code is clipped: the map and the sealed index are made again if theirs cannot hold the row."""
    made = make_gallery(tmp_path / "gallery", longer, code_bytes)
    row = 1.5 * ROWS[np.linalg.norm(ROWS, axis=1).argmax()][::-1]
    with scene(made, tmp_path, epsilon=1000.0, offers=("codes", "metadata", "sealed")) as here:
        here.gallery.prepare()  # type: ignore[attr-defined]
        with Index.open(made) as index:
            before = index.current().published
            (number,) = index.add_table(row[None]).tolist()
            after = index.republish()
            assert (after.public_digest == before.public_digest) == (code_bytes is None)
        here.gallery.prepare()  # type: ignore[attr-defined]
        client, _ = here.client(home=tmp_path / "home")
        client.sync()
        for way in ({"by": "home"}, {"epsilon": 40.0}, {"by": "sealed"}):
            best = client.nearest(row, K, **way).matches[0]
            assert best.id == number
            error = best.value - measure_dense(longer, row[None], row[None])[0, 0]
            assert abs(error) < 0.05 * float(row @ row) ** (1 if longer == "dot" else 0.5)


def test_a_sealed_question_returns_half_of_the_records_that_it_fetches(here: Scene, metric: Metric) -> None:
    client, _ = here.client()
    assert len(client.nearest(QUERIES[0], 20, by="sealed").matches) == 20
    with pytest.raises(QuestionError, match="at most 20, the items of a sealed answer"):
        client.nearest(QUERIES[0], 21, by="sealed")


def test_another_metric_is_another_map_for_clients(tmp_path: Path) -> None:
    """A gallery that gets another metric is fetched again, in every way to ask."""
    made = make_gallery(tmp_path / "gallery", "centred cosine", "auto")
    with scene(made, tmp_path, offers=("codes", "metadata", "sealed")) as here:
        client, _ = here.client(home=tmp_path / "home")
        client.sync()
        assert client.nearest(QUERIES[0], K).metric == "centred cosine"
        with Index.open(made) as index:
            index.set_metric("cosine")
            index.republish()
        here.gallery.prepare()  # type: ignore[attr-defined]
        fresh, _ = here.client(home=tmp_path / "home")
        fresh.sync()
        for result in (
            fresh.nearest(QUERIES[0], K, by="home"),
            fresh.nearest(QUERIES[0], K, 4.0),
            fresh.nearest(QUERIES[0], K, by="sealed"),
        ):
            assert result.metric == "cosine"
            ids = [match.id for match in result.matches]
            true = measure_dense("cosine", QUERIES[:1], ROWS[ids])[0]
            np.testing.assert_allclose([match.similarity for match in result.matches], true, atol=0.02)
