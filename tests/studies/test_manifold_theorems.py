"""The study of the manifold theorems: dense references, the bound by hand, and chances by simulation."""

import math
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import gamma

from studies import manifold_theorems as theorems
from studies._quick import shrink
from studies._report import write
from studies._study import as_frame, run, select
from tests.reference import laplacian


def test_the_graph_between_classes_is_that_of_its_matrix() -> None:
    labels = np.array([2, 0, 0, 1, 2, 2])
    V = (labels[:, None] != labels).astype(float)
    Z = np.random.default_rng(0).normal(size=(6, 3))
    product = theorems.BetweenClasses(labels).laplacian_matmul(Z)
    np.testing.assert_allclose(product, laplacian(V) @ Z, atol=1e-12)


def test_the_quantities_of_the_separation_theorem_are_those_of_its_statement() -> None:
    X, labels = theorems.draw_spheres(0.02, 0)
    thin = slice(None, None, 25)
    X, labels = X[thin], labels[thin]
    Z = X @ np.array([[1.0, 0.0], [0.0, 1.0], [0.3, -0.4]])
    found = theorems.measure_separation(X, labels, Z)
    pairs = [(i, j) for i in range(len(X)) for j in range(i)]
    apart = [np.linalg.norm(Z[i] - Z[j]) for i, j in pairs if labels[i] != labels[j]]
    assert found.gamma == pytest.approx(min(apart))
    ratios = [np.linalg.norm(Z[i] - Z[j]) / np.linalg.norm(X[i] - X[j]) for i, j in pairs]
    assert found.lipschitz == pytest.approx(max(ratios))
    close = [
        np.linalg.norm(Z[i] - Z[j])
        for i, j in pairs
        if labels[i] == labels[j] and np.linalg.norm(X[i] - X[j]) <= 2 * found.radius
    ]
    assert found.diameter == pytest.approx(max(close, default=0.0))
    left = found.lipschitz * found.radius + math.sqrt(2) * found.slack + found.diameter
    assert found.needed == pytest.approx(left / (found.gamma / 2))
    assert found.needed <= 1
    # The bound at its best Q, by hand.
    n = np.bincount(labels).min()
    chances = [
        1
        - math.exp(-2 * (n * found.share - q) ** 2 / n)
        - 4 * math.exp(-q * found.slack**2 / (2 * (found.lipschitz * found.radius) ** 2))
        for q in range(1, math.ceil(n * found.share))
    ]
    assert found.bound == pytest.approx(max([*chances, 0.0]))


def test_rates_are_those_of_the_iterations() -> None:
    X, labels = theorems.load_rows(3)
    X, labels = X[:60], labels[:60]
    weights = np.exp((X @ X.T - 1) / 0.5**2)
    np.fill_diagonal(weights, 0)
    V = np.exp(-((labels[:, None] - labels) ** 2) / 0.5)
    np.fill_diagonal(V, 0)
    first, second, radius = theorems.find_rates(weights, 0.2, laplacian(V))
    degree = weights.sum(axis=1)
    step = np.eye(60) - (laplacian(weights) - 0.2 * laplacian(V)) / (2 * degree[:, None])
    values = np.sort(np.linalg.eigvals(step).real)[::-1]
    constant = np.argmin(np.abs(values - 1))
    assert values[constant] == pytest.approx(1, abs=1e-12)
    assert (first, second) == pytest.approx(tuple(np.delete(values, constant)[:2]))
    change = np.random.default_rng(0).normal(size=60)
    for _ in range(200):  # the first pass, by solving
        solved = np.linalg.lstsq(laplacian(weights), 0.2 * laplacian(V) @ change, rcond=None)[0]
        change, length = solved / np.linalg.norm(solved), np.linalg.norm(solved) / np.linalg.norm(change)
    assert length == pytest.approx(radius, rel=1e-3)


def test_tails_are_those_of_draws() -> None:
    rng = np.random.default_rng(0)
    sums = rng.exponential(size=400_000) + rng.gamma(theorems.ROWS - 1, 0.1, 400_000)
    for at in (3.0, 6.0, 9.0):
        tails = theorems.compute_tails(1.0, 0.1, at)
        assert tails["exact"] == pytest.approx(np.mean(sums > at), abs=4e-3)
    equal = theorems.compute_tails(1.0, 1.0, 60.0)
    assert equal["exact"] == pytest.approx(gamma.sf(60, theorems.ROWS), rel=1e-8)
    assert equal["matched"] == pytest.approx(equal["exact"], rel=1e-8)
    # The printed inequality is false at the mean, by hand; and where one row dominates, centring does not save it.
    at_mean = theorems.compute_tails(1.0, 1.0, float(theorems.ROWS))
    assert at_mean["printed"] == pytest.approx(math.exp(-theorems.ROWS * (2 - math.sqrt(3))))
    assert at_mean["printed"] < 1e-5
    assert 0.4 < at_mean["exact"] < at_mean["centred"] == 1.0
    one = theorems.compute_tails(1.0, 1 / theorems.ROWS, 16.0)
    assert one["centred"] < one["exact"]


def test_the_study_in_miniature(tmp_path: Path, quick_figures: None) -> None:
    with shrink(theorems.STUDY) as small:
        measured = run(small, tmp_path)
        page = write(small, measured, tmp_path).read_text()
    rows = as_frame(measured.rows)
    separation = select(rows, part="separation")
    assert (separation["bound"] <= separation["accuracy"] + 1e-12).all()
    assert ((separation["bound"] > 0) <= (separation["needed"] <= 1)).all()
    gammas = separation.pivot(index="spread", columns="graph", values="gamma")
    assert gammas[theorems.BETWEEN][0.4] > 10 * gammas[theorems.WITHIN][0.4]  # classes that nearly touch
    cosines = select(rows, part="eigenmaps")
    assert ((cosines["last"] > 0) & (cosines["first"] < 1)).all()
    rate = select(rows, part="rate").groupby("bandwidth")[["radius", "measured"]].first()
    assert rate["measured"].to_numpy() == pytest.approx(rate["radius"].to_numpy(), rel=0.05)
    assert "As printed, the bound is below the exact probability: all rows change alike, from 1 times" in page
