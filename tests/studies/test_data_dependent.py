"""Data-dependent screening: the worst case, bounds against dense references, prices against integrals."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import ndtr
from scipy.stats import laplace, norm

from nearveil.privacy.accounting import PldAccountant
from nearveil.privacy.events import NoisyScreening, PureDp
from studies import data_dependent
from studies._quick import shrink
from studies._report import write
from studies._study import run
from studies.data_dependent import (
    bound_worst_case,
    compute_smooth_price,
    compute_sparse_vector_epsilon,
    find_noise,
    find_smooth_sensitivities,
    publish,
    sum_divergences,
)
from studies.screening import compute_rdp

SMALL = NoisyScreening(1.5, 3.0, 6)


def divergence(p: float, q: float, order: float) -> float:
    """Bernoulli, from its definition."""
    powers = p**order * q ** (1 - order) + (1 - p) ** order * (1 - q) ** (1 - order)
    return math.log(powers) / (order - 1)


def test_the_worst_case_of_a_thousand_screenings() -> None:
    costs = [bound_worst_case(1000, noise) for noise in (75.0, 30.0, 15.0)]
    assert costs == pytest.approx([1.401, 3.885, 8.750], abs=5e-4)
    assert find_noise(1000, 75.0, costs[1] / costs[0]) == pytest.approx(30, rel=2e-3)


@pytest.mark.parametrize("order", [1.5, 8.0])
def test_the_sum_covers_every_neighbour_in_both_directions(order: float) -> None:
    each = compute_rdp(np.array([order]), SMALL)
    rng = np.random.default_rng(0)
    tight = 0.0
    for _ in range(100):
        votes = rng.integers(0, 7, 5)
        moved = np.clip(votes + rng.integers(-1, 2, 5), 0, 6)
        p, q = (ndtr((t - SMALL.threshold) / SMALL.noise) for t in (votes, moved))
        claim = sum_divergences(votes, each)[0]
        for pair in ((p, q), (q, p)):
            total = sum(divergence(a, b, order) for a, b in zip(*pair, strict=True))
            assert total <= claim * (1 + 1e-12)
            tight = max(tight, total / claim)
    assert tight > 0.6  # the bound is no idle one


def test_the_smooth_sensitivity_is_that_of_all_databases() -> None:
    each = compute_rdp(np.array([4.0]), SMALL)[0]
    grid = list(itertools.product(range(7), repeat=2))
    total = {votes: each[list(votes)].sum() for votes in grid}
    # One record moves each max-vote by at most one.
    near = {a: [b for b in grid if max(abs(x - y) for x, y in zip(a, b, strict=True)) <= 1] for a in grid}
    local = {a: max(abs(total[a] - total[b]) for b in near[a]) for a in grid}
    betas = np.array([0.01, 0.3, 1.0])
    bounds = {a: find_smooth_sensitivities(np.array(a), each, betas) for a in grid}
    for a in grid:
        for beta, bound in zip(betas, bounds[a], strict=True):
            far = {b: max(abs(x - y) for x, y in zip(a, b, strict=True)) for b in grid}
            true = max(math.exp(-beta * far[b]) * local[b] for b in grid)
            assert true * (1 - 1e-12) <= bound <= 1.5 * true
        for b in near[a]:
            assert np.all(bounds[a] <= np.exp(betas) * bounds[b] * (1 + 1e-12))


@pytest.mark.parametrize(("order", "beta", "scale"), [(3.0, 0.05, 2.0), (8.0, 0.01, 5.0), (20.0, 0.001, 9.0)])
def test_the_price_of_the_test_covers_every_pair_of_normal_distributions(
    order: float, beta: float, scale: float
) -> None:
    price = compute_smooth_price(order, beta, np.array([scale]))[0]
    largest = 0.0
    for ratio in np.exp(np.linspace(-beta, beta, 9)):
        for shift in (0.0, min(1.0, ratio)):
            first, second = norm(0, scale), norm(shift, ratio * scale)

            def density(x: float, first: object = first, second: object = second) -> float:
                return math.exp(order * first.logpdf(x) + (1 - order) * second.logpdf(x))  # type: ignore[attr-defined]

            integral = quad(density, -40 * scale, 40 * scale, limit=400, points=[0.0], epsabs=0, epsrel=1e-11)[0]
            largest = max(largest, math.log(integral) / (order - 1))
    assert largest <= price * (1 + 1e-9)
    assert price < 1.2 * largest


def test_a_price_that_does_not_exist_is_infinite() -> None:
    assert np.isinf(compute_smooth_price(60.0, 0.1, np.array([3.0]))).all()


def test_the_test_passes_seldom_where_it_must_not_and_often_where_it_may() -> None:
    votes, delta = np.random.default_rng(0).integers(0, 301, 200), 0.2
    each = compute_rdp(data_dependent.ORDERS, NoisyScreening(30.0, 180.0, 300))
    best = publish(votes, each, delta)
    (at,) = np.flatnonzero(best.order == data_dependent.ORDERS)
    total, far = each[at, votes].sum(), norm.isf(delta / 4)
    smooth = find_smooth_sensitivities(votes, each[at], np.array([best.beta]))[0]
    rng = np.random.default_rng(1)
    log_smooth = np.log(smooth) + best.log_scale * rng.normal(size=20_000)
    noisy = total + best.scale * smooth * rng.normal(size=20_000)
    upper = noisy + far * best.scale * np.exp(log_smooth + far * best.log_scale)
    assert 0.88 < np.mean(upper <= best.budget) < 0.99
    assert np.mean(upper < total) < delta / 2  # the divergence is above its budget, and the test passes


def test_a_stretch_of_the_sparse_vector_technique_is_as_private_as_charged() -> None:
    noise, share = 2.0, 2 ** (1 / 3)
    b = noise / math.sqrt(2 * (1 + share**2))
    assert 2 * b**2 * (1 + share**2) == pytest.approx(noise**2)
    pure = 1 / b + 2 / (share * b)
    expected = PldAccountant().compose(PureDp(pure), 3).epsilon(1e-5)
    assert compute_sparse_vector_epsilon(3, noise, 1e-5) == pytest.approx(expected, rel=1e-9)
    other = 1 / (0.9 * b)  # another split of the variance costs more
    rest = math.sqrt(noise**2 / 2 - (0.9 * b) ** 2)
    assert other + 2 / rest > pure

    def chance(count: int, first: float, last: float) -> float:
        """Of passing over `count` queries of one value, and stopping at the next, from the definition."""

        z = np.linspace(-80, 80, 160_001)  # kinks are whole numbers
        over = count * laplace.logcdf(z - first, scale=share * b)
        return float(np.trapezoid(np.exp(over + laplace.logsf(z - last, scale=share * b)) * laplace.pdf(z, scale=b), z))

    losses = [
        math.log(chance(count, first, last) / chance(count, first + 1, last - 1))
        for count, first, last in ((0, 0.0, 0.0), (3, 0.0, 2.0), (50, 0.0, -20.0), (2000, 0.0, -20.0))
    ]
    assert 0.97 * pure < max(losses) <= pure * (1 + 1e-6)


def test_the_study_in_miniature(tmp_path: Path, quick_figures: None) -> None:
    pytest.importorskip("skimage", reason="scikit-image is not installed (the extra `images`)")
    with shrink(data_dependent.STUDY) as small:
        measured = run(small, tmp_path)
        page = write(small, measured, tmp_path).read_text()
    ways = {(row["data"], row["noise"], row["way"]): row["epsilon"] for row in measured.rows}
    for data, noise in {key[:2] for key in ways}:
        worst, exact, free, paid = (
            ways[data, noise, way]
            for way in (data_dependent.WORST, data_dependent.EXACT, data_dependent.FREE, data_dependent.PAID)
        )
        assert max(free, exact) < worst
        assert free < paid
    assert "A quick run" in page
