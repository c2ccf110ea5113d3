"""The export of a discriminant: public rows and released numbers determine it, and released numbers have their noise.

The test of the noise gives a false alarm with a probability of 1e-6 at most. It misses noise that is a twentieth too
small with a probability below 1e-20.
"""

from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from scipy.stats import chi2

from nearveil.privacy.noise import GaussianNoise, gaussian_integers
from nearveil.private_knn import PrivateDiscriminant, PublicDiscriminant, plan_publications
from nearveil.private_knn.discriminant_model import (
    COUNT_UNIT,
    SENSITIVITY,
    SHRINKAGE,
    ClassProjection,
    PublicMoments,
    calibrate_scores,
    estimate_means,
    fit_discriminant,
)
from nearveil.private_knn.neighbors import LONGEST
from nearveil.private_knn.scaling import Rows
from tests.sources import record_words

RNG = np.random.default_rng(11)
CLASSES = range(4)
ROWS, LABELS, PUBLIC = RNG.standard_normal((40, 20)), np.arange(40) % 4, RNG.standard_normal((24, 20))


def make_databases() -> dict[str, tuple[Rows, Any]]:
    """Return private databases that differ in all that a projection must not depend on."""
    return {
        "records": (ROWS, LABELS),
        "others": (RNG.standard_normal(ROWS.shape), LABELS[::-1]),
        "large": (1e6 * ROWS, LABELS),
        "small": (1e-6 * ROWS, LABELS),
        "many": (np.tile(ROWS, (50, 1)), np.tile(LABELS, 50)),
        "few": (ROWS[:5], LABELS[:5]),
        "one class": (ROWS, np.full(40, 3)),
        "shifted": (ROWS + 7, LABELS),
    }


def remove_statistics(model: PublicDiscriminant) -> bytes:
    """Return the bytes of a model whose numbers about private records are all zero."""
    zeros = {name: np.zeros_like(getattr(model, name)) for name in ("weights", "biases", "counts")}
    return replace(model, **zeros).to_bytes()


@pytest.mark.parametrize("public", [PUBLIC, None], ids=["public rows", "no public rows"])
@pytest.mark.parametrize("epsilon", [0.5, 8.0])
def test_the_projection_is_the_same_for_all_private_rows(epsilon: float, public: Rows | None) -> None:
    exports = {
        name: PrivateDiscriminant(epsilon, classes=CLASSES).fit(*records, public=public).export()
        for name, records in make_databases().items()
    }
    assert len({remove_statistics(model) for model in exports.values()}) == 1
    if public is not None:
        directions = exports["records"].projection.n_directions
        expected = ClassProjection.learn(PUBLIC, directions)
        projection = exports["records"].projection
        assert projection.reach == np.abs(PUBLIC).max() == expected.reach
        assert expected.components is not None
        for name in ("components", "offset", "scale"):
            np.testing.assert_array_equal(getattr(projection, name), getattr(expected, name))


@pytest.mark.parametrize("public", [PUBLIC, None], ids=["public rows", "no public rows"])
def test_the_model_follows_from_released_numbers_and_public_rows(public: Rows | None) -> None:
    for rows, labels in make_databases().values():
        fitted = PrivateDiscriminant(2.0, classes=CLASSES).fit(rows, labels, public=public)
        model, statistics = fitted.export(), fitted.statistics_
        images = np.zeros((0, 20)) if public is None else model.projection.transform(public)
        means = estimate_means(statistics, PublicMoments.measure(images))
        scores = calibrate_scores(fit_discriminant(means, SHRINKAGE), means, images)
        np.testing.assert_array_equal(model.counts, statistics.counts.astype(np.float32))
        np.testing.assert_array_equal(model.weights, scores.weights.astype(np.float32))
        np.testing.assert_array_equal(model.biases, scores.biases.astype(np.float32))


@pytest.mark.parametrize("default", [True, False], ids=["default source", "seeded source"])
@pytest.mark.parametrize("public", [PUBLIC, None], ids=["public rows", "no public rows"])
def test_released_numbers_are_exact_sums_plus_the_noise_of_the_source(
    default: bool, public: Rows | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tape = record_words(
        monkeypatch,
        lambda source: PrivateDiscriminant(1.0, classes=CLASSES, source=source).fit(ROWS, LABELS, public=public),
        default=default,
    )
    whole = model.export().projection.round(ROWS).astype(np.int64)
    exact = np.array([[*whole[code == LABELS].sum(axis=0), COUNT_UNIT * 10] for code in CLASSES])
    noise = plan_publications(1.0).votes._noise(exact.size)
    assert isinstance(noise, GaussianNoise)
    drawn = gaussian_integers(Fraction(noise.scale) / Fraction(noise.grid), exact.size, tape).reshape(exact.shape)
    assert len(tape) == 0
    released = exact + drawn * noise.grid
    np.testing.assert_array_equal(model.statistics_.sums, released[:, :-1] / LONGEST)
    np.testing.assert_array_equal(model.statistics_.counts, released[:, -1] / COUNT_UNIT)
    (event,) = model.guarantee.events
    assert noise.effective_scale >= event.event.noise_multiplier * SENSITIVITY


def measure_excess(deviations: Rows) -> float:
    """Return the probability of a sum of squares of normal deviations this far from its mean, on either side."""
    total = float((deviations**2).sum())
    return 2 * min(float(chi2.sf(total, deviations.size)), float(chi2.cdf(total, deviations.size)))


def test_counts_and_sums_have_the_noise_that_is_stated() -> None:
    """Twelve fits of 4,096 classes: 49,152 counts and as many sums, whose variance is known to 0.64 percent."""
    labels, rows = np.arange(300) % 7, np.ones((300, 1))
    counts = np.bincount(labels, minlength=4096)
    fits = [PrivateDiscriminant(1.0, classes=range(4096)).fit(rows, labels) for _ in range(12)]
    (event,) = fits[0].guarantee.events
    stated = event.event.noise_multiplier * SENSITIVITY
    length = fits[0].export().projection.round(rows[:1])[0, 0]
    released = np.array([fit.export().counts for fit in fits], dtype=np.float64)
    count_noise = (released - counts) * COUNT_UNIT / stated
    sum_noise = np.array([fit.statistics_.sums[:, 0] * LONGEST - counts * length for fit in fits]) / stated
    assert measure_excess(count_noise) > 4e-7
    assert measure_excess(sum_noise) > 4e-7
    # Independent of each other: the product of two has mean 0 and variance 1.
    assert abs((count_noise * sum_noise).sum()) < 6 * np.sqrt(count_noise.size)
    assert measure_excess(0.95 * count_noise) < 1e-9
