"""A private discriminant: exact sums of bounded rows, noise once, and a model that holds nothing else."""

from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.utils import shuffle
from sklearn.utils.estimator_checks import parametrize_with_checks

from nearveil.ledger import Ledger
from nearveil.privacy.noise import unsafe_seeded
from nearveil.votes import ExhaustedError, PrivateDiscriminant, PublicDiscriminant

DIGITS, LABELS = shuffle(*load_digits(return_X_y=True), random_state=0)
PRIVATE, PRIVATE_Y, PUBLIC = DIGITS[:1000], LABELS[:1000], DIGITS[1000:1500]

DIFFERS = "two fits draw noise of their own, so their scores differ"
COUNTED = "a seeded source remembers how much was drawn from it"
EXPECTED_FAILED_CHECKS = {
    "check_estimators_overwrite_params": COUNTED,
    "check_fit_idempotent": DIFFERS,
    "check_supervised_y_2d": DIFFERS,
}


@parametrize_with_checks(
    [PrivateDiscriminant(64.0, source=unsafe_seeded(0))], expected_failed_checks=lambda _: EXPECTED_FAILED_CHECKS
)  # type: ignore[untyped-decorator]
def test_scikit_learn_accepts_it(estimator: Any, check: Any) -> None:
    check(estimator)


def fitted(epsilon: float = 2.0, **parameters: Any) -> PrivateDiscriminant:
    model = PrivateDiscriminant(epsilon, classes=range(10), **parameters)
    model.fit(PRIVATE, PRIVATE_Y, public=PUBLIC)
    return model


def test_it_classifies_and_so_does_what_it_exports() -> None:
    model = fitted(source=unsafe_seeded(0))
    assert model.score(DIGITS[1500:], LABELS[1500:]) > 0.85
    again = PublicDiscriminant.from_bytes(model.export().to_bytes())
    np.testing.assert_array_equal(again.predict_proba(DIGITS[1500:]), model.predict_proba(DIGITS[1500:]))
    assert again.guarantee == model.guarantee


def test_an_account_pays_for_as_many_publications_as_it_was_opened_for(tmp_path: Any) -> None:
    with Ledger(tmp_path / "ledger.db") as ledger:
        for _ in range(2):
            fitted(publications=2, ledger=ledger, account="model")
        with pytest.raises(ExhaustedError, match="publications"):
            fitted(publications=2, ledger=ledger, account="model")


def test_a_forecast_is_near_the_truth() -> None:
    forecast = PrivateDiscriminant(2.0, classes=range(10)).forecast(PRIVATE, PRIVATE_Y, PUBLIC)
    true = np.mean([fitted(source=unsafe_seeded(i)).score(DIGITS[1500:], LABELS[1500:]) for i in range(5)])
    assert abs(forecast.accuracy - true) < 0.05
    assert forecast.floor == 0.1
    assert sum(forecast.records_per_class.values()) == 1000
