"""A private discriminant: exact sums of bounded rows, noise once, and a model that holds nothing else."""

import json
import math
import pickle
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.special import softmax
from sklearn.datasets import load_digits
from sklearn.utils import shuffle
from sklearn.utils.estimator_checks import parametrize_with_checks

from nearveil.ledger import Ledger
from nearveil.mechanisms import Message, MessageError
from nearveil.mechanisms.messages import fingerprint
from nearveil.privacy.noise import compute_gaussian_delta, unsafe_seeded
from nearveil.private_knn import ExhaustedError, PrivateDiscriminant, PublicDiscriminant, plan_publications
from nearveil.private_knn.discriminant import _round_up, sum_classes
from nearveil.private_knn.discriminant_model import (
    COUNT_UNIT,
    SENSITIVITY,
    SHRINKAGE,
    ClassProjection,
    estimate_means,
    fit_discriminant,
)
from nearveil.private_knn.neighbors import LONGEST
from nearveil.private_knn.scaling import Rows
from nearveil.wire.frames import MOST_FEATURES
from tests.estimators import run_check

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
    run_check(check, estimator)


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


def test_noise_is_rounded_up_to_six_digits() -> None:
    assert [_round_up(noise) for noise in (123456.01, 123457.0, 1.2345601)] == [123457.0, 123457.0, 1.23457]


def test_a_forecast_is_near_the_truth() -> None:
    forecast = PrivateDiscriminant(2.0, classes=range(10)).forecast(PRIVATE, PRIVATE_Y, PUBLIC)
    true = np.mean([fitted(source=unsafe_seeded(i)).score(DIGITS[1500:], LABELS[1500:]) for i in range(5)])
    assert abs(forecast.accuracy - true) < 0.05
    low, high = forecast.accuracy_range
    assert low < forecast.accuracy < high < low + 0.1
    assert np.mean(list(forecast.class_accuracy.values())) == pytest.approx(forecast.accuracy)
    assert forecast.floor == 0.1
    assert sum(forecast.records_per_class.values()) == 1000


def test_a_forecast_of_few_records_is_not_too_good() -> None:
    """Fifteen records a class, drawn six times: what is forecast, and what fresh queries and fresh noise give."""
    told, seen, inside = [], [], []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        own = np.concatenate([rng.permutation(np.flatnonzero(code == PRIVATE_Y))[:15] for code in range(10)])
        rows, labels = PRIVATE[own], PRIVATE_Y[own]
        forecast = PrivateDiscriminant(2.0, classes=range(10)).forecast(rows, labels, PUBLIC)
        model = PrivateDiscriminant(2.0, classes=range(10), source=unsafe_seeded(seed)).fit(rows, labels, public=PUBLIC)
        told.append(forecast.accuracy)
        seen.append(model.score(DIGITS[1500:], LABELS[1500:]))
        inside.append(forecast.accuracy_range[0] <= seen[-1] <= forecast.accuracy_range[1])
    assert -0.08 < np.mean(told) - np.mean(seen) < 0.02
    assert np.mean(inside) >= 0.5


def test_what_is_forecast_without_noise_does_not_depend_on_epsilon() -> None:
    found = [PrivateDiscriminant(e, classes=range(10)).forecast(PRIVATE, PRIVATE_Y, PUBLIC) for e in (0.01, 64.0)]
    assert len({one.without_noise for one in found}) == 1
    assert found[0].accuracy < found[1].accuracy


def test_a_forecast_states_the_noise_and_names_the_classes_that_are_small() -> None:
    few = np.flatnonzero((PRIVATE_Y != 3) | (np.cumsum(PRIVATE_Y == 3) <= 12))
    model = PrivateDiscriminant(2.0, classes=range(11), source=unsafe_seeded(0))
    forecast = model.forecast(PRIVATE[few], PRIVATE_Y[few], PUBLIC)
    assert forecast.small_classes == (3, 10)
    assert set(forecast.class_accuracy) == set(range(10))  # nobody knows about a class without records
    released = model.fit(PRIVATE[few], PRIVATE_Y[few], public=PUBLIC).statistics_
    assert forecast.noise_per_class == released.count_noise == pytest.approx(4 * released.noise)
    assert model.export().noise_per_class == pytest.approx(released.count_noise, rel=1e-9)
    assert set(model.export().noisy_classes) >= {3, 10}


def test_a_forecast_of_one_record_a_class_is_the_floor() -> None:
    forecast = PrivateDiscriminant(2.0, classes=range(3)).forecast(np.eye(3), range(3))
    assert (forecast.accuracy, forecast.accuracy_range[1], forecast.without_noise) == pytest.approx(
        (1 / 3, 1 / 3, 1 / 3)
    )
    assert forecast.is_noise


@pytest.mark.parametrize("epsilon", [0.1, 0.5, 2.0])
def test_probabilities_are_not_too_sure_and_their_order_stays(epsilon: float) -> None:
    sure, hit, before = [], [], []
    plain = PrivateDiscriminant(epsilon, classes=range(10))
    for seed in range(4):
        model = fitted(epsilon, source=unsafe_seeded(seed))
        chances = model.predict_proba(DIGITS[1500:])
        sure.append(chances.max(axis=1).mean())
        hit.append(model.score(DIGITS[1500:], LABELS[1500:]))
        plain._read_records(PRIVATE, PRIVATE_Y, PUBLIC)
        problem = plain._project_simulated(plan_publications(epsilon).vote_noise)
        scores = fit_discriminant(estimate_means(model.statistics_, problem.moments), SHRINKAGE)
        raw = scores.score(problem.projection.transform(DIGITS[1500:]))
        before.append(softmax(raw, axis=1).max(axis=1).mean())
        np.testing.assert_array_equal(raw.argmax(axis=1), chances.argmax(axis=1))
    assert np.mean(sure) < np.mean(hit) + 0.05
    assert np.mean(sure) < np.mean(before)


def unit_rows(width: int = 6, count: int = 40) -> Rows:
    found: Rows = np.random.default_rng(1).standard_normal((count, width))
    return found


# The bound: one record more or less


ROWS = arrays(np.float64, (5, 6), elements=st.floats(allow_nan=False, allow_infinity=False))


@settings(deadline=None, derandomize=True)
@given(rows=ROWS, code=st.integers(0, 2), public=st.booleans())
def test_one_record_moves_all_sums_by_at_most_the_bound(rows: Rows, code: int, public: bool) -> None:
    projection = ClassProjection.learn(unit_rows(), 4) if public else ClassProjection.none(6)
    whole, codes = projection.round(rows), np.array([code, 0, 1, 2, 2])
    moved = sum_classes(whole, codes, 3) - sum_classes(whole[1:], codes[1:], 3)
    assert sum(int(one) ** 2 for one in moved.ravel()) <= LONGEST**2 + COUNT_UNIT**2
    assert Fraction(SENSITIVITY) ** 2 >= LONGEST**2 + COUNT_UNIT**2
    assert not np.delete(moved, code, axis=0).any()
    assert moved[code, -1] == COUNT_UNIT


def test_the_bound_is_nearly_attained() -> None:
    whole = ClassProjection.none(6).round(np.eye(6)[:1])
    assert np.linalg.norm(sum_classes(whole, np.zeros(1, dtype=np.int64), 2)) > 0.999 * SENSITIVITY


@pytest.mark.parametrize("width", [1, 7, 100])
def test_a_row_is_mapped_alike_in_every_batch(width: int) -> None:
    rng = np.random.default_rng(width)
    projection = ClassProjection.learn(rng.standard_normal((50, width)), 16)
    rows = rng.standard_normal((300, width)) * 10.0 ** rng.integers(-300, 300, (300, 1))
    whole = projection.round(rows)
    np.testing.assert_array_equal(whole[::-1], projection.round(rows[::-1]))
    np.testing.assert_array_equal(whole[7:8], projection.round(rows[7:8]))
    np.testing.assert_array_equal(whole, projection.round(np.asfortranarray(rows)))


@pytest.mark.parametrize("width", [1, 63, 64, 1280, 4000])
def test_projections_are_exact_where_they_are_largest(width: int) -> None:
    components = np.full((width, 1), 2**15 - 1, dtype=np.int16)
    projection = ClassProjection(components, np.zeros(1), np.ones(1), 1.0, width)
    whole = np.rint((1 - np.arange(width) * 2.0**-20) * 2.0**projection._bits)
    found = projection._project(whole[None] * 2.0**-projection._bits)
    exact = sum(int(one) for one in whole) * (2**15 - 1)
    assert exact < 2**53
    assert int(found[0, 0]) == exact


def test_values_beyond_those_of_the_public_rows_are_cut_off() -> None:
    projection = ClassProjection.learn(unit_rows(), 4)
    far = np.array([[1e300, 0, 0, -1e308, 0, 0], [projection.reach, 0, 0, -projection.reach, 0, 0]])
    whole = projection.round(far)
    np.testing.assert_array_equal(whole[0], whole[1])


def test_the_order_of_records_does_not_matter() -> None:
    order = np.random.default_rng(0).permutation(len(PRIVATE))
    found = []
    for rows, labels in ((PRIVATE, PRIVATE_Y), (PRIVATE[order], PRIVATE_Y[order])):
        model = PrivateDiscriminant(2.0, classes=range(10), source=unsafe_seeded(0)).fit(rows, labels, public=PUBLIC)
        found.append(model.export().to_bytes())
    assert found[0] == found[1]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_private_rows_that_are_not_finite_are_refused_without_a_value(bad: float) -> None:
    rows = PRIVATE.copy()
    rows[3, 5] = bad
    rows[2, 1] = 123456.0
    with pytest.raises(ValueError, match="Input X contains") as caught:
        PrivateDiscriminant(1.0, classes=range(10)).fit(rows, PRIVATE_Y, public=PUBLIC)
    assert "123456" not in str(caught.value)


def test_labels_and_public_rows_are_checked() -> None:
    model = PrivateDiscriminant(1.0, classes=range(9))
    with pytest.raises(ValueError, match="not in classes"):
        model.fit(PRIVATE, PRIVATE_Y, public=PUBLIC)
    model = PrivateDiscriminant(1.0, classes=range(10))
    with pytest.raises(ValueError, match="as many features"):
        model.fit(PRIVATE, PRIVATE_Y, public=PUBLIC[:, :5])
    with pytest.raises(ValueError, match="rows that differ"):
        model.fit(PRIVATE, PRIVATE_Y, public=np.ones_like(PUBLIC))
    with pytest.raises(ValueError, match="public must be given"):
        model.fit(np.ones((20, 5000)), np.arange(20) % 10)
    assert not hasattr(model, "statistics_")


@pytest.mark.parametrize("classes", [range(5000), ["x" * 2000, "y"], np.array(["2020-01-01"], dtype="M8[D]")])
def test_what_cannot_be_published_is_refused_before_anything_is_paid(tmp_path: Path, classes: Any) -> None:
    labels = np.asarray(classes)[:1].repeat(20)
    with Ledger(tmp_path / "ledger.db") as ledger:
        model = PrivateDiscriminant(1.0, classes=classes, ledger=ledger, account="model")
        with pytest.raises(ValueError, match="classes must be"):
            model.fit(PRIVATE[:20], labels, public=PUBLIC)
        assert ledger.accounts() == []


# The noise, and who pays


def test_noise_is_as_large_as_the_guarantee_states() -> None:
    rows, labels = np.zeros((40, 1000)), np.repeat(["a", "b"], 20)
    model = PrivateDiscriminant(1.0, classes=["a", "b"], source=unsafe_seeded(3)).fit(rows, labels)
    multiplier = model.guarantee.events[0].event.noise_multiplier
    stated = multiplier * math.hypot(LONGEST, COUNT_UNIT)
    assert abs(np.std(model.statistics_.sums * LONGEST) / stated - 1) < 0.14  # nine standard errors
    assert compute_gaussian_delta(multiplier, 1.0) <= 1e-5
    assert model.guarantee.epsilon <= 1.0


def test_several_publications_share_one_epsilon() -> None:
    plan = plan_publications(2.0, 1e-5, 9)
    assert plan.events[0][1] == 9
    assert compute_gaussian_delta(plan.events[0][0].noise_multiplier / 3, 2.0) <= 1e-5
    model = fitted(publications=9)
    assert model.guarantee.epsilon <= 2.0
    assert model.statistics_.noise == plan.vote_noise / LONGEST


def test_the_plan_depends_on_nothing_but_the_promise(tmp_path: Path) -> None:
    """So an account that was opened for a gallery pays for models of more classes, too."""
    with Ledger(tmp_path / "ledger.db") as ledger:
        fitted(publications=2, ledger=ledger, account="model")
        more = PrivateDiscriminant(
            2.0, classes=range(12), n_components=3, publications=2, ledger=ledger, account="model"
        )
        more.fit(PRIVATE, PRIVATE_Y, public=PUBLIC)
        assert ledger.account("model").remaining() == ()


def test_it_is_paid_for_before_anything_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = []
    with Ledger(tmp_path / "ledger.db") as ledger:

        def sums(*_: Any) -> None:
            left.append(ledger.account("model").remaining())
            raise KeyboardInterrupt

        monkeypatch.setattr("nearveil.private_knn.discriminant.sum_classes", sums)
        with pytest.raises(KeyboardInterrupt):
            fitted(ledger=ledger, account="model")
        assert left == [()]


def test_classes_read_from_labels_are_no_promise_about_any_record(tmp_path: Path) -> None:
    model = PrivateDiscriminant(2.0).fit(PRIVATE, PRIVATE_Y, public=PUBLIC)
    assert "class that occurs anyway" in str(model.guarantee)
    with Ledger(tmp_path / "ledger.db") as ledger:
        ledger.open_account(
            "model",
            owner="me",
            protects="database",
            unit="record",
            relation="add-remove",
            epsilon=2.0,
            delta=1e-5,
            plan=plan_publications(2.0).events,
        )
        with pytest.raises(ValueError, match="classes must be given"):
            PrivateDiscriminant(2.0, ledger=ledger, account="model").fit(PRIVATE, PRIVATE_Y, public=PUBLIC)
        assert ledger.account("model").remaining() != ()


def test_a_seed_makes_no_promise_and_the_export_says_so() -> None:
    model = fitted(source=unsafe_seeded(0))
    assert not model.guarantee.sound
    assert not PublicDiscriminant.from_bytes(model.export().to_bytes()).guarantee.sound


def test_a_forecast_costs_nothing_and_changes_nothing(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.db") as ledger:
        model = PrivateDiscriminant(2.0, classes=range(10), ledger=ledger, account="model")
        model.forecast(PRIVATE, PRIVATE_Y, PUBLIC)
        assert ledger.accounts() == []
        assert not hasattr(model, "statistics_")


def test_a_forecast_says_where_there_is_noise_alone() -> None:
    forecast = PrivateDiscriminant(0.001, classes=range(10)).forecast(PRIVATE, PRIVATE_Y, PUBLIC)
    assert forecast.accuracy < 0.25 < forecast.without_noise
    assert forecast.noise_per_class > max(forecast.records_per_class.values())


# What is published


def test_neither_export_nor_pickle_holds_a_record(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.db") as ledger:
        model = fitted(ledger=ledger, account="model")
        exported = model.export().to_bytes()
    for row in PRIVATE[:50]:
        for held in (exported, pickle.dumps(model), pickle.dumps(model.export())):
            assert row.tobytes() not in held
    assert b"ledger.db" not in exported


def test_it_is_small() -> None:
    rng = np.random.default_rng(0)
    rows, public, labels = *rng.standard_normal((2, 300, 1280)), np.arange(300) % 15
    for directions, most in ((64, 180_000), (128, 345_000)):
        model = PrivateDiscriminant(2.0, n_components=directions, classes=range(15)).fit(rows, labels, public=public)
        assert len(model.export().to_bytes()) < most


def test_a_file_is_read_again(tmp_path: Path) -> None:
    model = fitted().export()
    model.save(tmp_path / "model.nv")
    again = PublicDiscriminant.load(tmp_path / "model.nv")
    assert again.to_bytes() == model.to_bytes()
    assert str(again.guarantee) == str(model.guarantee)
    assert again.model_id == model.model_id


@pytest.mark.parametrize("classes", [["b", "a"], [3, 1], [1.0, 2.0], [True, False]])
def test_labels_keep_their_type(classes: list[Any]) -> None:
    labels = np.array(classes * 10)
    rows = np.random.default_rng(0).standard_normal((20, 3))
    model = PublicDiscriminant.from_bytes(
        PrivateDiscriminant(64.0, classes=classes).fit(rows, labels).export().to_bytes()
    )
    assert model.classes.dtype.kind == labels.dtype.kind
    assert model.predict(rows).dtype.kind == labels.dtype.kind


def changed(model: PublicDiscriminant, **about: Any) -> bytes:
    """Return the bytes of a model that says something else about itself, with a fingerprint that fits."""
    held = Message.from_bytes(model.to_bytes())
    told = json.loads(held["about"].tobytes())
    guarantee = about.pop("guarantee", {})
    told = {**told, **about, "guarantee": {**told["guarantee"], **guarantee}}
    arrays = {**held.arrays, "about": np.frombuffer(json.dumps(told, sort_keys=True).encode(), dtype=np.uint8)}
    order = ("about", "offset", "scale", "reach", "weights", "biases", "counts", "components")
    return Message("discriminant", fingerprint(*(arrays[name] for name in order)), arrays).to_bytes()


@pytest.mark.parametrize(
    "about",
    [
        {"guarantee": {"epsilon": 0.1}},
        {"guarantee": {"noise_multiplier": 1e-9}},
        {"guarantee": {"noise_multiplier": math.nan}},
        {"guarantee": {"publications": 10**9}},
        {"guarantee": {"publications": 0}},
        {"guarantee": {"publications": True}},
        {"guarantee": {"unit": "x" * 2000}},
        {"guarantee": {"unit": ""}},
        {"guarantee": {"source": "dice"}},
        {"classes": [1, 1]},
        {"classes": ["a"] * 10},
        {"classes": [str(i) for i in range(10)]},
        {"classes": list(range(5000))},
        {"classes": [2**70, *range(9)]},
        {"classes": 3},
        {"kind": "O"},
        {"kind": []},
        {"n_features": 63},
        {"n_features": -64},
        {"n_features": None},
        {"n_features": math.inf},
        {"more": 1},
    ],
)
def test_models_that_lie_about_themselves_are_refused(about: dict[str, Any]) -> None:
    model = fitted().export()
    assert PublicDiscriminant.from_bytes(changed(model)).model_id == model.model_id
    with pytest.raises(MessageError):
        PublicDiscriminant.from_bytes(changed(model, **about))


def test_bytes_of_a_hostile_server_are_refused() -> None:
    held = fitted().export().to_bytes()
    for data in (b"", held[:-1], held + b"x", held[:2000], b"NVM\x09" + held[4:], bytes(len(held))):
        with pytest.raises(MessageError):
            PublicDiscriminant.from_bytes(data)
    spoiled = bytearray(held)
    spoiled[-1] ^= 1
    with pytest.raises(MessageError):
        PublicDiscriminant.from_bytes(bytes(spoiled))


def test_sizes_are_checked_before_anything_is_read() -> None:
    width = MOST_FEATURES + 1
    model = replace(
        fitted().export(), projection=ClassProjection.none(width), weights=np.zeros((10, width), dtype=np.float32)
    )
    with pytest.raises(MessageError, match=f"at most .*{MOST_FEATURES}"):
        PublicDiscriminant.from_bytes(model.to_bytes())
