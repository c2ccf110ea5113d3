"""Retrievers and their figures go by the metric."""

import numpy as np
import pytest

from nearveil.mechanisms import Covers, PrivUnit
from nearveil.metrics import Metric
from nearveil.privacy.noise import unsafe_seeded
from nearveil.search import Retriever, evaluate
from nearveil.search.ceiling import neighbor_ceiling
from tests.metrics import CHOICES, make_vectors, measure_dense, rank_dense
from tests.search.standins import Plain

PUBLIC, ROWS, QUERIES = make_vectors(60, seed=2), make_vectors(300), make_vectors(40, seed=1)
K = 8


@pytest.mark.parametrize("metric", CHOICES)
def test_candidates_are_ranked_by_the_metric(metric: Metric) -> None:
    retriever = Retriever(Plain(), 1.0, code_bytes=None, metric=metric).fit(PUBLIC).index(ROWS)
    assert np.array_equal(retriever.nearest(QUERIES, K), rank_dense(metric, QUERIES, ROWS, K))


@pytest.mark.parametrize("metric", CHOICES)
@pytest.mark.parametrize("mechanism", [Covers(3.0, 0.2), PrivUnit(8.0)], ids=["covers", "privunit"])
def test_figures_go_by_the_metric(metric: Metric, mechanism: Covers) -> None:
    retriever = Retriever(mechanism, 0.2, code_bytes=None, metric=metric).fit(PUBLIC).index(ROWS)
    found = evaluate(retriever, QUERIES, k=K, rng=unsafe_seeded(0))
    chosen, true = retriever.nearest(QUERIES, K, rng=unsafe_seeded(0)), rank_dense(metric, QUERIES, ROWS, K)
    recall = np.mean([len(set(a) & set(b)) / K for a, b in zip(chosen.tolist(), true.tolist(), strict=True)])
    assert found.nn_recall.value == pytest.approx(recall)
    values = measure_dense(metric, ROWS, ROWS) * (-1 if metric == "euclidean" else 1)
    np.fill_diagonal(values, -np.inf)
    near = np.argsort(-values, axis=1, kind="stable")[:, :K]
    counts = np.bincount(near.ravel(), minlength=len(ROWS))
    assert found.ceiling.value >= neighbor_ceiling(mechanism.epsilon, 0.2, counts) - 1e-9
    popular = np.argsort(-counts, kind="stable")[: int(0.2 * len(ROWS))]
    assert found.floor.value == pytest.approx(np.isin(true, popular).mean())
    if isinstance(mechanism, Covers):
        assert found.nn_recall.value > found.floor.value + 0.05
        assert found.covered.value == found.nn_recall.value  # codes lose nothing
