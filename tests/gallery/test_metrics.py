"""A gallery ranks by its metric, exactly: compared with a plain computation in 64 bits."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nearveil.gallery import Index
from nearveil.gallery.sync import sync_table
from nearveil.mechanisms import Message
from nearveil.metrics import CENTRED, METRICS, Metric, ScoreSpace
from nearveil.wire.client import encode_queries
from nearveil.wire.server import serve_maps
from tests import stored
from tests.cli.galleries import run
from tests.metrics import CHOICES, DIMENSION, make_vectors, measure_dense, rank_dense

from .index_places import index_server, index_url, where

__all__ = ["index_server", "index_url", "where"]  # fixtures

ROWS, QUERIES = make_vectors(300), make_vectors(40, seed=1)


def sort_values(metric: Metric, values: np.ndarray) -> np.ndarray:
    return np.argsort(values if metric == "euclidean" else -values, axis=1, kind="stable")


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("scale", [1e-5, 1.0, 1e4])
def test_products_of_encoded_rows_order_items_as_the_metric(metric: Metric, scale: float) -> None:
    rows, queries = scale * ROWS.astype(np.float64), scale * QUERIES.astype(np.float64)
    space = ScoreSpace.fit(metric, rows / np.linalg.norm(rows, axis=1, keepdims=True) if metric == CENTRED else rows)
    given = (values / np.linalg.norm(values, axis=1, keepdims=True) for values in (rows, queries))
    items, encoded = map(space.encode, given if metric == CENTRED else (rows, queries))
    scores = space.make_queries(encoded) @ items.T
    true = measure_dense(metric, queries, rows, space.mean)
    np.testing.assert_allclose(space.measure(encoded, scores), true, rtol=1e-6, atol=1e-9 * np.abs(true).max())
    assert np.array_equal(np.argsort(-scores, axis=1), np.argsort(true if metric == "euclidean" else -true, axis=1))
    directions = space.make_directions(encoded)
    np.testing.assert_allclose(np.linalg.norm(directions, axis=1), 1)


@pytest.mark.parametrize("metric", CHOICES)
def test_a_mean_of_any_kind_does_not_change_the_order(metric: Metric) -> None:
    true = measure_dense(metric, QUERIES, ROWS)
    fitted = ScoreSpace.fit(metric, ROWS)
    for mean in (np.zeros(DIMENSION), np.full(DIMENSION, 7.0), -3 * fitted.mean):
        space = ScoreSpace(metric, mean, fitted.scale, fitted.balance)
        encoded = space.encode(QUERIES)
        scores = space.make_queries(encoded) @ space.encode(ROWS).T
        np.testing.assert_allclose(space.measure(encoded, scores), true, rtol=1e-7)


@pytest.mark.parametrize("metric", CHOICES)
def test_an_index_searches_by_its_metric(where: str, metric: Metric) -> None:
    with Index.create(where, dimension=DIMENSION, metric=metric) as index:
        index.add_table(ROWS)
    with Index.open(where) as index:
        assert index.metric == metric
        ids, values = index.search(QUERIES, 8)
        true = measure_dense(metric, QUERIES, ROWS)
        assert np.array_equal(ids, rank_dense(metric, QUERIES, ROWS, 8))
        np.testing.assert_allclose(values, np.take_along_axis(true, ids.astype(int), axis=1), rtol=2e-4)


@pytest.mark.parametrize("metric", CHOICES)
@pytest.mark.parametrize("code_bytes", [None, "auto"])
def test_the_candidates_of_a_message_are_ranked_by_the_metric(where: str, metric: Metric, code_bytes: Any) -> None:
    with Index.create(where, dimension=DIMENSION, metric=metric) as index:
        index.add_table(ROWS[:250])
        index.publish(4.0, 0.2, n_sets=8, code_bytes=code_bytes)
        index.add_table(ROWS[250:260])
        published = index.republish()  # updated, with the same constants
        public = serve_maps(index, "words")[0].make_public_part()
        assert public.space.metric == metric
        query = encode_queries(public, QUERIES)
        for number in range(8):
            message = Message("covers", published.public_id, {"sets": np.array([number], np.int32)})
            answer = index.answer(message)
            scores = published.table.scores(query.queries, answer.codes)
            values = public.space.measure(query.encoded, scores)
            true = measure_dense(metric, QUERIES, index.features(answer.ids))
            if code_bytes is None:
                np.testing.assert_allclose(values, true, rtol=1e-4, atol=1e-6 * np.abs(true).max())
                order, expected = sort_values(metric, values)[:, :8], sort_values(metric, true)[:, :8]
                assert (order == expected).mean() > 0.99  # all but ties in 32 bits
            else:
                assert np.abs(values - true).mean() < 0.03 * true.std()
        good = public.map.choose(query.directions)
        members = np.stack([published.release.members_.toarray()[number] for number in good])
        near = rank_dense(metric, QUERIES, index.features(published.ids), 8)
        held = np.take_along_axis(members, near, axis=1).mean()
        assert held > 0.5 > 2 * 0.2  # far more than the fraction: sets are learned for the metric


@pytest.mark.parametrize("metric", CHOICES)
@pytest.mark.parametrize("case", ["far from zero", "one long row"])
def test_rows_of_any_kind_are_found_and_codes_say_what_they_keep(tmp_path: Path, metric: Metric, case: str) -> None:
    rows, queries = ROWS.copy(), QUERIES + 0
    if case == "one long row":
        rows[7] *= 1e4
    else:
        rows, queries = rows + 1000, queries + 1000
    with Index.create(tmp_path / "index", dimension=DIMENSION, metric=metric) as index:
        index.add_table(rows)
        expected = rank_dense(metric, queries, rows, 10)
        assert (index.search(queries, 10)[0] == expected).mean() > 0.99  # all but ties in 32 bits
        published = index.publish(4.0, 0.2, n_sets=8)
    query = published.space.make_queries(published.space.encode(queries))
    near = np.argsort(-published.table.scores(query, published.codes), axis=1)[:, :10]
    share = np.mean([np.isin(true, found).mean() for true, found in zip(expected, near, strict=True)])
    assert published.code_recall is not None
    assert published.code_recall > 0.98
    assert share > 0.9


def test_wrong_metrics_are_named(tmp_path: Path) -> None:
    for wrong in ("manhattan", "", None, 3):
        with pytest.raises(ValueError, match="metric must be one of cosine, dot, euclidean"):
            Index.create(tmp_path / "none", dimension=3, metric=wrong)  # type: ignore[arg-type]
    with Index.create(tmp_path / "dots", dimension=DIMENSION, metric="dot") as index:
        index.add_table(ROWS)
        with pytest.raises(ValueError, match="index the vectors again into a new index"):
            index.set_metric("cosine")
        with pytest.raises(ValueError, match="metric must be one of"):
            index.set_metric("l2")  # type: ignore[arg-type]
        index.set_metric("dot")
        assert index.metric == "dot"


def test_norms_have_a_public_bound(tmp_path: Path) -> None:
    with Index.create(tmp_path / "dots", dimension=DIMENSION, metric="dot") as index:
        with pytest.raises(ValueError, match="rows"):
            index.add_table(2e6 * np.eye(DIMENSION))
        index.add_table(np.eye(DIMENSION) * 1e6)
        assert index.search(np.ones(DIMENSION), 1)[1] == 1e6


def test_rows_of_zeros_have_a_distance_but_no_direction(tmp_path: Path) -> None:
    rows = np.concatenate([np.zeros((1, DIMENSION)), ROWS])
    for metric in CHOICES:
        with Index.create(tmp_path / metric, dimension=DIMENSION, metric=metric) as index:
            if metric == "cosine":
                with pytest.raises(ValueError, match="all zeros"):
                    index.add_table(rows)
                continue
            index.add_table(rows)
            index.publish(4.0, 0.2, n_sets=8)
            if metric == "euclidean":
                assert index.search(np.zeros(DIMENSION), 1)[0].item() == 0


@pytest.mark.parametrize("name", ["index-0.2", "texts-0.2"])
def test_a_gallery_of_0_2_is_served_as_it_is_until_one_command_gives_it_a_metric(tmp_path: Path, name: str) -> None:
    place = tmp_path / "gallery"
    place.mkdir(mode=0o700)
    data = gzip.decompress((Path(stored.__file__).parent / f"{name}.db.gz").read_bytes())
    (place / "index.db").write_bytes(data)
    with Index.open(place) as index:
        assert index.metric == CENTRED
        has_map = bool(index.maps())
        if has_map:
            old, stale = index.current()
            assert (old.space.metric, stale) == (CENTRED, False)
            rows = index.features(old.ids)
            encoded = old.space.encode(rows)
            np.testing.assert_allclose(np.linalg.norm(encoded, axis=1), 1, atol=1e-6)
    result = run("index", "--into", place, "--metric", "cosine", "--json")
    assert (result.exit_code, json.loads(result.stdout)["metric"]) == (0, "cosine")
    with Index.open(place) as index:
        new, stale = index.current()
        assert (index.metric, new.space.metric, stale) == ("cosine", "cosine", False)
        assert new.public_id not in {old.public_id for old in index.maps()[1:]}
        query = index.features(new.ids)[:1] + 0.05
        encoded = new.space.encode(query)
        values = new.space.measure(encoded, new.table.scores(new.space.make_queries(encoded), new.codes))
        np.testing.assert_allclose(values, measure_dense("cosine", query, index.features(new.ids)), atol=0.02)


def test_a_table_keeps_its_metric_in_later_runs(tmp_path: Path) -> None:
    from nearveil.features.vectors import VectorTable

    table = VectorTable(ROWS, [str(number) for number in range(len(ROWS))], None, None)
    first = sync_table(table, tmp_path / "index", metric="euclidean")
    again = sync_table(table, tmp_path / "index")
    assert (first.metric, again.metric, again.learned) == ("euclidean", "euclidean", False)
    with pytest.raises(ValueError, match="metric"):
        sync_table(table, tmp_path / "index", metric="dot")


def test_directions_keep_the_mean_unless_it_hides_the_rows() -> None:
    rows = ROWS / np.linalg.norm(ROWS, axis=1, keepdims=True)
    space = ScoreSpace.fit("cosine", rows)
    assert np.linalg.norm(space.mean) < 0.8
    np.testing.assert_allclose(space.make_directions(space.encode(rows)), rows, atol=1e-7)
    near = rows * 1e-3 + rows[0]  # nearly one direction
    strong = ScoreSpace.fit("cosine", near)
    directions = strong.make_directions(strong.encode(near))
    assert np.linalg.norm(directions - directions.mean(axis=0), axis=1).mean() > 0.3
