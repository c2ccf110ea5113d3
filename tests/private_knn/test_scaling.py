"""Scaling by public bounds: a map of each record alone, and a warning where a scaler has seen private rows."""

import math
import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_wine
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from nearveil.ledger import Ledger
from nearveil.privacy.noise import unsafe_seeded
from nearveil.private_knn import (
    PrivateDiscriminant,
    PrivateKNeighborsClassifier,
    PrivateKNeighborsRegressor,
    PublicDiscriminant,
    ScalingWarning,
    Student,
    plan_publications,
)
from nearveil.private_knn.discriminant import _split_noise
from nearveil.private_knn.discriminant_model import CENTRE_SHARE, COUNT_UNIT, SENSITIVITY, ClassProjection
from nearveil.private_knn.neighbors import LONGEST
from nearveil.private_knn.scaling import ColumnBounds, Rows
from studies.pate import PateClassifier

WINE, WINE_Y = load_wine(return_X_y=True)
# Plausible for such wines, chosen by hand: alcohol, acids, ash, minerals, phenols, colour, ...
WINE_BOUNDS = (
    [11, 0, 1, 10, 70, 0, 0, 0, 0, 1, 0.4, 1, 200],
    [15, 6, 4, 30, 170, 4, 6, 1, 4, 13, 2, 4.5, 1800],
)
CELLS, CELLS_Y = load_breast_cancer(return_X_y=True)
# Plausible for nuclei of cells in such images, chosen by hand: means, their errors, and the largest.
CELLS_BOUNDS = (
    0,
    [
        *[35, 50, 250, 3000, 0.3, 0.5, 0.6, 0.3, 0.4, 0.2],
        *[4, 6, 25, 600, 0.05, 0.2, 0.5, 0.1, 0.1, 0.05],
        *[45, 60, 300, 5000, 0.3, 1.5, 1.5, 0.4, 0.8, 0.3],
    ],
)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
BOX = ColumnBounds.make(([-1, 0, 5], [1, 1e-3, 1e6]), 3)


# The map


@settings(deadline=None, derandomize=True)
@given(rows=arrays(np.float64, (4, 3), elements=FINITE))
def test_the_image_of_a_row_does_not_depend_on_other_rows(rows: Rows) -> None:
    whole = BOX.scale(rows)
    assert np.abs(whole).max() <= 1
    for number, row in enumerate(rows):
        assert BOX.scale(row[None]).tobytes() == whole[number].tobytes()
    projection = replace(ClassProjection.none(len(BOX.low)), bounds=BOX)
    assert projection.round(rows)[:1].tobytes() == projection.round(rows[:1]).tobytes()


def test_bounds_become_the_ends_and_values_beyond_are_clipped() -> None:
    rows = np.array([BOX.low, BOX.high, (BOX.low + BOX.high) / 2, BOX.low - 1, BOX.high + 1, [1e308, -1e308, 1e308]])
    np.testing.assert_array_equal(BOX.scale(rows), [[-1] * 3, [1] * 3, [0] * 3, [-1] * 3, [1] * 3, [1, -1, 1]])


@pytest.mark.parametrize("public", [None, WINE[::2]])
def test_what_is_published_of_the_scaling_is_the_same_for_other_private_rows(public: Any) -> None:
    models = [
        PrivateDiscriminant(2.0, bounds=WINE_BOUNDS, classes=range(3)).fit(rows, WINE_Y, public=public).export()
        for rows in (WINE + 0.0, WINE * 1.5 + 3)
    ]
    projections = [pickle.dumps((one.projection.bounds.low, one.projection.bounds.high)) for one in models]  # type: ignore[union-attr]
    assert projections[0] == projections[1]
    np.testing.assert_array_equal(models[0].projection.bounds.high, WINE_BOUNDS[1])  # type: ignore[union-attr]
    if public is not None:
        assert models[0].projection.offset.tobytes() == models[1].projection.offset.tobytes()
        assert models[0].projection.components.tobytes() == models[1].projection.components.tobytes()  # type: ignore[union-attr]


def test_bounds_of_public_rows_are_theirs_alone() -> None:
    public = np.column_stack([WINE[:60], np.ones(60)])
    private, labels = np.column_stack([WINE[60:], np.arange(118)]), WINE_Y[60:]
    model = PrivateDiscriminant(2.0, bounds="public", classes=range(3)).fit(private, labels, public=public)
    bounds = model.export().projection.bounds
    assert bounds is not None
    np.testing.assert_allclose((bounds.low + bounds.high) / 2, public.mean(axis=0))
    np.testing.assert_allclose(bounds.high - bounds.low, 6 * np.append(WINE[:60].std(axis=0), 1))
    with pytest.raises(ValueError, match="public must be given"):
        PrivateDiscriminant(2.0, bounds="public").fit(private, labels)


@pytest.mark.parametrize(
    "bounds",
    [(0,), (0, 1, 2), (1, 0), (0, 0), (0, [1, 2]), (0, math.inf), (math.nan, 1), (-1e308, 1e308), "ab", [[0, 1]] * 3],
)
@pytest.mark.parametrize(
    "model",
    [
        PrivateDiscriminant(2.0),
        PrivateKNeighborsClassifier(2.0, max_screened=0),
        PrivateKNeighborsRegressor(0, 1, epsilon=2.0),
    ],
)
def test_bounds_are_checked_before_anything_is_paid(model: Any, bounds: Any, tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.db") as ledger:
        model = clone(model).set_params(bounds=bounds, ledger=ledger, account="model")
        with pytest.raises(ValueError, match="bounds"):
            model.fit(np.ones((20, 3)), np.arange(20) % 2)
        assert ledger.accounts() == []


# The noisy mean of a discriminant without public rows


@settings(deadline=None, derandomize=True)
@given(rows=arrays(np.float64, (5, 3), elements=FINITE))
def test_one_record_moves_the_sum_for_the_mean_by_at_most_the_bound(rows: Rows) -> None:
    released: list[Any] = []

    def release(sums: Any, share: float) -> Rows:
        released.append(sums)
        assert share == CENTRE_SHARE
        return np.asarray(sums, dtype=np.float64)

    model = PrivateDiscriminant(2.0, bounds=(BOX.low, BOX.high))
    for part in (rows, rows[1:]):
        model._read_records(part, np.arange(len(part)) % 2, None)
        model._release_centre(release)
    moved = sum(int(one) ** 2 for one in (released[0] - released[1]).ravel())
    assert moved <= Fraction(SENSITIVITY) ** 2


def test_mean_and_sums_together_cost_one_publication() -> None:
    noise = plan_publications(2.0).vote_noise
    shares = CENTRE_SHARE, replace(ClassProjection.none(len(BOX.low)), bounds=BOX).sums_share
    assert sum(Fraction(_split_noise(noise, share)) ** -2 for share in shares) <= Fraction(noise) ** -2


def test_the_mean_and_the_sums_have_the_noise_of_their_shares() -> None:
    """Rows of zeros: all that is released of them is noise."""
    rows, labels, ones = np.zeros((400, 1000)), np.repeat([0, 1], 200), (-1, 1)
    model = PrivateDiscriminant(1.0, bounds=ones, classes=[0, 1], source=unsafe_seeded(3)).fit(rows, labels)
    noise = plan_publications(1.0).vote_noise
    scale = math.sqrt(1000) / 2 / LONGEST / 400
    assert np.std(model.export().projection.offset) == pytest.approx(noise / math.sqrt(0.2) * scale, rel=0.25)
    # Rows that are not centred at 0 any more have sums, too: the noise of the sums is seen in the count.
    assert model.statistics_.noise * LONGEST == pytest.approx(noise / math.sqrt(0.8))
    counts = [
        PrivateDiscriminant(1.0, bounds=ones, classes=range(300), source=unsafe_seeded(seed))
        .fit(np.zeros((300, 1)), range(300))
        .statistics_.counts
        for seed in range(2)
    ]
    assert np.std(counts) * COUNT_UNIT == pytest.approx(noise / math.sqrt(0.8), rel=0.1)  # 3.5 standard errors
    assert model.export().noise_per_class == pytest.approx(model.statistics_.count_noise)


def test_the_mean_is_paid_for_before_it_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = []
    with Ledger(tmp_path / "ledger.db") as ledger:

        def sums(*_: Any) -> None:
            left.append(ledger.account("model").remaining())
            raise KeyboardInterrupt

        monkeypatch.setattr("nearveil.private_knn.discriminant.sum_classes", sums)
        model = PrivateDiscriminant(2.0, bounds=WINE_BOUNDS, classes=range(3), ledger=ledger, account="model")
        with pytest.raises(KeyboardInterrupt):
            model.fit(WINE, WINE_Y)
        assert left == [()]


def test_as_many_classes_as_are_charged_for_have_a_mean() -> None:
    labels = np.arange(4096)
    with pytest.raises(ValueError, match="classes must be fewer than"):
        PrivateDiscriminant(2.0, bounds=(0, 1)).fit(np.ones((4096, 1)), labels)


def test_a_model_with_bounds_is_read_again() -> None:
    for public in (None, WINE[::2]):
        model = PrivateDiscriminant(2.0, bounds=WINE_BOUNDS, classes=range(3)).fit(WINE + 0.0, WINE_Y, public=public)
        again = PublicDiscriminant.from_bytes(model.export().to_bytes())
        np.testing.assert_array_equal(again.decision_function(WINE), model.decision_function(WINE))
        assert again.noise_per_class == model.export().noise_per_class


def test_a_forecast_with_bounds_is_near_the_truth() -> None:
    forecast = PrivateDiscriminant(2.0, bounds=CELLS_BOUNDS, classes=range(2)).forecast(CELLS[::2], CELLS_Y[::2])
    scores = [
        PrivateDiscriminant(2.0, bounds=CELLS_BOUNDS, classes=range(2), source=unsafe_seeded(seed))
        .fit(CELLS[::2], CELLS_Y[::2])
        .score(CELLS[1::2], CELLS_Y[1::2])
        for seed in range(5)
    ]
    assert abs(forecast.accuracy - np.mean(scores)) < 0.05
    assert forecast.noise_per_class == pytest.approx(plan_publications(2.0).vote_noise / COUNT_UNIT / math.sqrt(0.8))


@pytest.mark.filterwarnings("ignore::nearveil.private_knn.ScalingWarning")
@pytest.mark.parametrize(
    ("X", "y", "bounds"), [(WINE, WINE_Y, WINE_BOUNDS), (CELLS, CELLS_Y, CELLS_BOUNDS)], ids=["wine", "breast cancer"]
)
def test_bounds_reach_what_a_scaler_that_leaks_reaches(X: Rows, y: Any, bounds: Any) -> None:
    leaky, bounded = [], []
    for seed in range(20):
        train, test, labels, truth = train_test_split(X, y, test_size=0.3, random_state=seed, stratify=y)
        model = PrivateDiscriminant(2.0, classes=np.unique(y), source=unsafe_seeded(seed))
        leaky.append(make_pipeline(StandardScaler(), clone(model)).fit(train, labels).score(test, truth))
        bounded.append(clone(model).set_params(bounds=bounds).fit(train, labels).score(test, truth))
    assert np.mean(bounded) > np.mean(leaky) - 0.05
    assert np.mean(bounded) > 0.88


# Neighbours


def test_rows_and_queries_of_a_vote_are_scaled_alike() -> None:
    low, high = map(np.asarray, WINE_BOUNDS)
    scaled = np.clip((WINE - (low + high) / 2) / ((high - low) / 2), -1, 1)
    quiet: dict[str, Any] = {"n_neighbors": 7, "vote_noise": 0.01, "max_answered": 10**4, "source": unsafe_seeded(0)}
    inside = PrivateKNeighborsClassifier(**quiet, bounds=WINE_BOUNDS).fit(WINE[::2], WINE_Y[::2])
    before = PrivateKNeighborsClassifier(**quiet, feature_norm=math.sqrt(13)).fit(scaled[::2], WINE_Y[::2])
    votes = np.rint(inside.answer(WINE[1::2]).votes)
    np.testing.assert_array_equal(votes, np.rint(before.answer(scaled[1::2]).votes))
    assert np.mean(votes.argmax(axis=1) == WINE_Y[1::2]) > 0.9
    values = PrivateKNeighborsRegressor(0, 2, **quiet, bounds=WINE_BOUNDS).fit(WINE[::2], WINE_Y[::2])
    assert np.mean(np.abs(values.predict(WINE[1::2]) - WINE_Y[1::2])) < 0.15


# Scalers that were fitted on private rows


def fit_student(rows: Rows, labels: Any) -> Any:
    voter = PrivateKNeighborsClassifier(4.0, max_answered=20, max_screened=0, n_neighbors=20)
    return Student(voter, random_state=0).fit(rows, labels, public=WINE[:40] + 0.5)


FITS: dict[str, Callable[[Rows, Any], Any]] = {
    "discriminant": lambda rows, labels: PrivateDiscriminant(2.0).fit(rows, labels),
    "classifier": lambda rows, labels: PrivateKNeighborsClassifier(2.0, n_neighbors=5).fit(rows, labels),
    "regressor": lambda rows, labels: PrivateKNeighborsRegressor(0, 2, epsilon=2.0, n_neighbors=5).fit(rows, labels),
    "pate": lambda rows, labels: PateClassifier(4, epsilon=2.0).fit(rows, labels),
    "student": fit_student,
}


@pytest.mark.parametrize("fit", FITS.values(), ids=FITS)
def test_a_scaler_that_was_fitted_on_private_rows_is_noticed(fit: Callable[[Rows, Any], Any]) -> None:
    rows = np.column_stack([StandardScaler().fit_transform(WINE), np.zeros(len(WINE))])[:, :13]
    with pytest.warns(ScalingWarning, match="bounds=") as caught:
        fit(rows, WINE_Y)
    assert [Path(one.filename).name for one in caught if one.category is ScalingWarning] == [Path(__file__).name]
    with warnings.catch_warnings():
        warnings.simplefilter("error", ScalingWarning)
        fit(rows + 1e-5, WINE_Y)
        fit(rows * (1 + 1e-5), WINE_Y)
        fit(StandardScaler().fit(WINE[::2]).transform(WINE), WINE_Y)
        fit(np.column_stack([rows[:, 1:], WINE[:, 0]]), WINE_Y)
