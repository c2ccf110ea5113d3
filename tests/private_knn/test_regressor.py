"""Clipped mean and private median: what they find, what one record can change, what it costs."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
from sklearn.utils.estimator_checks import parametrize_with_checks

from nearveil.privacy.noise import unsafe_seeded
from nearveil.private_knn import ExhaustedError, PrivateKNeighborsRegressor
from nearveil.private_knn._knn import ValueStatistic, count_balance
from nearveil.private_knn.neighbors import NO_VOTER
from tests.estimators import run_check

QUIET: dict[str, Any] = {"vote_noise": 0.01, "max_answered": 10**6}
COPIED = "a pickle carries no allowance: two copies would answer twice what was promised"
NOISE = {
    "check_estimators_pickle": COPIED,
    "check_fit_idempotent": "two fits draw noise of their own, so their answers differ",
    "check_supervised_y_2d": "two fits draw noise of their own, so their answers differ",
}


@parametrize_with_checks(  # type: ignore[untyped-decorator]
    [
        PrivateKNeighborsRegressor(-5, 5, epsilon=1.0, source=unsafe_seeded(0)),
        PrivateKNeighborsRegressor(-5, 5, method="median", n_neighbors=1, depth=20, **QUIET),
    ],
    expected_failed_checks=lambda estimator: {"check_estimators_pickle": COPIED} if estimator.vote_noise else NOISE,
)
def test_scikit_learn_accepts_it(estimator: Any, check: Any) -> None:
    run_check(check, estimator)


X = np.random.default_rng(0).uniform(size=(3000, 3))
Y = X @ [1.0, 2.0, -1.0]


@pytest.mark.parametrize("method", ["mean", "median"])
def test_without_noise_it_finds_what_is_there(method: Any) -> None:
    voter = PrivateKNeighborsRegressor(-1, 3, method=method, n_neighbors=15, depth=12, feature_norm=2.0, **QUIET)
    found = voter.fit(X[:2900], Y[:2900]).predict(X[2900:])
    assert np.sqrt(np.mean((found - Y[2900:]) ** 2)) < 0.15


def test_the_median_withstands_what_moves_the_mean() -> None:
    y = Y.copy()
    y[::5] = 100.0  # clipped to 3, yet far away
    errors = {}
    for method in ("mean", "median"):
        voter = PrivateKNeighborsRegressor(-1, 3, method=method, n_neighbors=25, depth=12, feature_norm=2.0, **QUIET)
        errors[method] = np.median(np.abs(voter.fit(X[:2900], y[:2900]).predict(X[2900:]) - Y[2900:]))
    assert errors["median"] < 0.5 * errors["mean"]


def test_a_promise_is_kept_and_still_useful() -> None:
    rows = np.random.default_rng(1).uniform(size=(20_000, 2))
    for method in ("mean", "median"):
        voter = PrivateKNeighborsRegressor(
            0,
            2,
            epsilon=2.0,
            max_answered=20,
            method=method,
            feature_norm=2.0,
            n_neighbors=1500,
            source=unsafe_seeded(2),
        )
        found = voter.fit(rows, rows.sum(axis=1)).predict(rows[:20])
        assert np.abs(found - rows[:20].sum(axis=1)).mean() < 0.15
        assert 1.99 < voter.guarantee.epsilon <= 2


def test_what_is_charged() -> None:
    mean = PrivateKNeighborsRegressor(-1, 3, vote_noise=20.0, max_answered=7).fit(X, Y)
    assert mean.guarantee.events == (SelfComposedDpEvent(GaussianDpEvent(20.0 / 4), 7),)
    median = PrivateKNeighborsRegressor(-1, 3, method="median", depth=9, vote_noise=20.0, max_answered=7).fit(X, Y)
    assert median.guarantee.events == (SelfComposedDpEvent(GaussianDpEvent(20.0 / 3), 7),)


def test_one_record_in_and_one_out_changes_the_sum_by_the_range() -> None:
    rng = np.random.default_rng(0)
    for low, high in [(-1.3, 2.9), *np.sort(rng.normal(size=(200, 2)) * 10.0 ** rng.integers(-3, 4, (200, 1)))]:
        asked = ValueStatistic(low, high, "mean", 8)
        units = asked.votes(np.array([low - 5, low, high, high + 5])).units[:-1, 0] * asked.unit
        assert units.max() - units.min() <= high - low
        assert units.max() - units.min() > (high - low) - 3 * asked.unit


def test_one_record_in_and_one_out_changes_each_count_by_one() -> None:
    """All sets of up to three voters on four cells, and all splits: the balance, in half votes, moves by at most 2."""
    cells = [NO_VOTER, 0, 1, 2, 3]
    for voters in itertools.product(cells, repeat=3):
        for position, cell in itertools.product(range(3), cells):
            other = list(voters)
            other[position] = cell
            for point in (1, 2, 3):
                found = count_balance(np.array([voters, other]), np.array([point, point]))
                assert abs(found[0] - found[1]) <= 2
                assert found[0] == sum(1 if 0 <= v < point else -1 for v in voters if v != NO_VOTER)


def test_caps_decline_and_then_raise() -> None:
    voter = PrivateKNeighborsRegressor(-1, 3, n_neighbors=5, vote_noise=0.1, max_answered=2).fit(X, Y)
    found = voter.predict(X[:3])
    assert np.isfinite(found[:2]).all()
    assert np.isnan(found[2])
    with pytest.raises(ExhaustedError):
        voter.predict(X[:1])


@pytest.mark.parametrize(
    ("parameters", "message"),
    [({"low": 2.0, "high": 1.0}, "low"), ({"low": math.nan}, "low"), ({"high": math.inf}, "low"),
     ({"depth": 0}, "depth"), ({"method": "mode"}, "method"), ({"epsilon": -1.0}, "epsilon")],
)  # fmt: skip
def test_bad_parameters_are_named(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PrivateKNeighborsRegressor(**({"low": 0.0, "high": 1.0} | parameters)).fit(X[:20], Y[:20])


@pytest.mark.parametrize(("low", "high"), [(2**60, 2**60 + 1), (-1.7e308, 1.7e308), (0.0, 5e-324)])
def test_bounds_that_are_none_are_refused_in_words(low: float, high: float) -> None:
    with pytest.raises(ValueError, match="low must be below high"):
        PrivateKNeighborsRegressor(low, high, n_neighbors=3, vote_noise=5.0).fit(X[:20], Y[:20])


def test_bounds_of_a_narrow_type_are_taken() -> None:
    voter = PrivateKNeighborsRegressor(np.int8(-100), np.int8(100), n_neighbors=3, vote_noise=5.0, max_answered=3)
    assert np.isfinite(voter.fit(X[:20], Y[:20]).predict(X[:3])).all()


def test_parameters_that_change_after_fit_change_no_release() -> None:
    voter = PrivateKNeighborsRegressor(0, 8, method="median", depth=1, vote_noise=20.0, max_answered=5, n_neighbors=9)
    voter.fit(X, Y)
    voter.set_params(depth=20, method="mean", low=-100, high=100, source=unsafe_seeded(0))
    assert set(voter.predict(X[:5])) <= {2.0, 6.0}  # one step of the bisection, as was paid
    assert voter.guarantee.sound
    assert voter._poll._source.sound


def test_private_values_are_not_shown() -> None:
    y = np.array(["secret", *["1.0"] * 19], dtype=object)
    with pytest.raises(ValueError, match="not shown") as error:
        PrivateKNeighborsRegressor(0, 1).fit(X[:20], y)
    assert "secret" not in str(error.value)
    assert error.value.__context__ is None
