"""Attacks on the private discriminant: records, labels, accounts and bytes of bad will."""

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.exceptions import DataConversionWarning

from nearveil.ledger import Ledger
from nearveil.mechanisms import MessageError
from nearveil.privacy.noise import unsafe_seeded
from nearveil.private_knn import (
    NoiseWarning,
    PrivateDiscriminant,
    PrivateKNeighborsClassifier,
    PublicDiscriminant,
    plan_publications,
)
from nearveil.private_knn.records import make_hard_votes
from studies.pate import PateClassifier
from tests.private_knn.test_discriminant import changed, fitted

RNG = np.random.default_rng(7)
ROWS, PUBLIC, LABELS = RNG.standard_normal((40, 6)), RNG.standard_normal((60, 6)), np.arange(40) % 2
LARGE = 2**53


# One record's label must not change those of others


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.DataConversionWarning")
@pytest.mark.parametrize(
    ("labels", "one", "classes"),
    [
        ([LARGE, LARGE + 1] * 20, float(LARGE), [LARGE, LARGE + 1]),  # all become floats, and the two classes one
        ([1, 2] * 20, "1", ["1", "2"]),  # all become text, and are accepted
        ([1, 2] * 20, 2.0, None),  # classes become floats, and are published so
        ([True, False] * 20, 1, None),
        ([[1], [2]] * 20, [2.0], None),
    ],
)
def test_one_label_does_not_change_the_labels_of_others(labels: list[Any], one: Any, classes: list[Any] | None) -> None:
    with pytest.raises(ValueError, match="one type"):
        make_hard_votes([*labels, one], classes)
    rows = np.vstack([ROWS, ROWS[:1]])
    for model in (PrivateDiscriminant, PrivateKNeighborsClassifier, PateClassifier):
        with pytest.raises(ValueError, match="one type"):
            model(epsilon=1.0, classes=classes).fit(rows, [*labels, one])


@pytest.mark.parametrize("labels", [["a", np.str_("b")], [1, np.int64(2)], (0, 1), range(2)])
def test_labels_of_one_type_are_taken_however_they_are_listed(labels: Any) -> None:
    _, votes, _ = make_hard_votes(labels, None)
    assert votes.class_numbers.tolist() == [0, 1, 2]


# Nothing that is seen tells of a record


@pytest.mark.parametrize("public", [None, 1e-3 * PUBLIC])
@pytest.mark.parametrize("value", [1.7e308, -1.7e308, 5e-324, -0.0])
def test_no_warning_tells_that_a_record_is_large_or_small(value: float, public: Any) -> None:
    rows = ROWS.copy()
    rows[3] = value
    rows[4, 0] = value
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        model = PrivateDiscriminant(1.0, classes=[0, 1]).fit(rows, LABELS, public=public)
    assert set(model.predict(ROWS)) <= {0, 1}


def test_a_record_cannot_pass_for_an_error_that_is_shown() -> None:
    rows = ROWS.astype(object)
    rows[0, 0] = "Input X contains a private word"
    with pytest.raises(ValueError, match="not shown") as caught:
        PrivateDiscriminant(1.0, classes=[0, 1]).fit(rows, LABELS, public=PUBLIC)
    assert "private word" not in str(caught.value)


# Rows that are not public


@pytest.mark.parametrize(
    "public",
    [
        lambda rows: rows,
        lambda rows: rows[::2],
        lambda rows: rows[:1],
        lambda rows: rows.T.T,
        lambda rows: rows.reshape(-1, 6)[::-1],
        memoryview,
    ],
    ids=["same", "half", "one", "turned", "reversed", "view"],
)
def test_private_rows_that_are_given_as_public_are_refused(public: Any, tmp_path: Path) -> None:
    rows = ROWS.copy()
    with Ledger(tmp_path / "ledger.db") as ledger:
        model = PrivateDiscriminant(1.0, classes=[0, 1], ledger=ledger, account="model")
        for ask in (model.fit, model.forecast):
            with pytest.raises(ValueError, match="public must not be X"):
                ask(rows, LABELS, public=public(rows))
        assert ledger.accounts() == []


def test_lists_and_frames_that_are_given_twice_are_refused() -> None:
    pandas = pytest.importorskip("pandas")
    for rows in (ROWS.tolist(), pandas.DataFrame(ROWS)):
        with pytest.raises(ValueError, match="public must not be X"):
            PrivateDiscriminant(1.0, classes=[0, 1]).fit(rows, LABELS, public=rows)


def test_whether_public_rows_are_refused_does_not_depend_on_values() -> None:
    """Copies and other rows of one array are taken: a refusal that compared values would tell of records."""
    whole = np.vstack([ROWS, PUBLIC])
    for rows, public in ((ROWS, ROWS.copy()), (whole[:40], whole[40:]), (whole[::2], whole[1::2])):
        model = PrivateDiscriminant(1.0, classes=[0, 1]).fit(rows, np.arange(len(rows)) % 2, public=public)
        assert set(model.predict(rows)) <= {0, 1}


# Parameters that change while a fit runs


def test_what_another_thread_sets_during_a_fit_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guarantee was made for one source of noise, and the noise was drawn from another."""
    pay, model = PrivateDiscriminant._charge_account, PrivateDiscriminant(1.0, classes=[0, 1])
    released = []

    def swapped(self: PrivateDiscriminant, *arguments: Any) -> None:
        model.set_params(source=unsafe_seeded(0), classes=None, epsilon=50.0, shrinkage=3.0)
        pay(self, *arguments)

    monkeypatch.setattr(PrivateDiscriminant, "_charge_account", swapped)
    for _ in range(2):
        model.set_params(source=None, classes=[0, 1], epsilon=1.0, shrinkage="auto")
        model.fit(ROWS, LABELS, public=PUBLIC)
        assert model.guarantee.sound
        assert "anyway" not in str(model.guarantee)
        released.append(model.statistics_.sums)
    assert not np.array_equal(released[0], released[1])


@pytest.mark.parametrize(
    "model",
    [PrivateDiscriminant(1.0, classes=[0, 1]), PateClassifier(4, mechanism="gnmax", vote_noise=9.0, classes=[0, 1])],
)
def test_a_column_of_labels_warns_once(model: Any) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", NoiseWarning)
        model.fit(ROWS, LABELS[:, None])
    assert [one.category for one in caught] == [DataConversionWarning]


# Who pays, and for what


def test_only_an_account_that_counts_publications_pays_for_several(tmp_path: Path) -> None:
    """Else each model would state what a few publications cost together, and there could be any number of them."""
    with Ledger(tmp_path / "ledger.db") as ledger:
        terms: dict[str, Any] = {
            "owner": "me",
            "protects": "database",
            "unit": "record",
            "relation": "add-remove",
            "delta": 1e-4,
        }
        account = ledger.open_account("all", epsilon=30.0, **terms)
        before = account.receipt()
        with pytest.raises(ValueError, match="opened for"):
            PrivateDiscriminant(1.0, classes=[0, 1], publications=2, account=account).fit(ROWS, LABELS, public=PUBLIC)
        assert account.receipt() == before
        for _ in range(2):  # each is paid for, and states what it costs alone
            PrivateDiscriminant(1.0, classes=[0, 1], account=account).fit(ROWS, LABELS, public=PUBLIC)


@pytest.mark.parametrize(
    "classes",
    [
        range(4097),
        ["a" * 1001, "b"],
        ["a\n", "b"],
        ["\u202ea", "b"],
        ["\ud800", "b"],
        [2**63, 2**63 + 1],
        [f"{'ü' * 200} {i}" for i in range(1000)],
        np.array(["2020-01-01", "2021-01-01"], dtype="datetime64[D]"),
    ],
    ids=["many", "long", "newline", "turned", "surrogate", "large", "text", "dates"],
)
def test_what_nobody_could_read_is_refused_before_it_is_paid_for(classes: Any, tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.db") as ledger:
        model = PrivateDiscriminant(1.0, classes=classes, ledger=ledger, account="model")
        with pytest.raises((ValueError, TypeError)):
            model.fit(ROWS, np.asarray(classes)[LABELS], public=PUBLIC)
        assert ledger.accounts() == []


def test_no_more_numbers_are_released_than_are_charged_for() -> None:
    charged = plan_publications(1.0).size
    assert charged >= 4096 * 4097  # of as many classes as a model may have, and features without public rows
    with pytest.raises(ValueError, match="n_components"):
        PrivateDiscriminant(1.0, classes=[0, 1], n_components=4097).fit(ROWS, LABELS, public=PUBLIC)


def test_the_guarantee_is_that_of_the_fit_whatever_is_set_afterwards() -> None:
    model = PrivateDiscriminant(2.0, classes=[0, 1]).fit(ROWS, LABELS, public=PUBLIC)
    stated, published = model.guarantee, model.export().to_bytes()
    model.set_params(epsilon=0.01, delta=1e-12, unit="person", publications=9)
    model.statistics_.sums[:] = 0
    model.classes_ = np.array(["x", "y"])
    assert model.guarantee is stated
    assert model.export().to_bytes() == published
    for name in ("weights", "biases", "counts", "classes"):
        with pytest.raises(ValueError, match="read-only"):
            getattr(model.export(), name)[:] = 0


# Bytes of bad will


@pytest.mark.parametrize("text", ["a\x1b[2J", "a\u202e", "a\n", "a\u200b", "\ud800"])
def test_text_that_does_not_print_is_refused(text: str) -> None:
    model = fitted().export()
    names = [text, *map(str, range(9))]
    for about in ({"kind": "U", "classes": names}, {"guarantee": {"unit": text}}, {"guarantee": {"reason": text}}):
        with pytest.raises(MessageError, match="print"):
            PublicDiscriminant.from_bytes(changed(model, **about))


@pytest.mark.parametrize("counts", [np.full(10, np.nan), np.zeros(9), np.full(10, -np.inf), np.zeros((10, 1))])
def test_counts_that_are_none_are_refused(counts: Any) -> None:
    model = fitted().export()
    object.__setattr__(model, "counts", counts.astype(np.float32))
    with pytest.raises(MessageError, match="counts"):
        PublicDiscriminant.from_bytes(model.to_bytes())


@pytest.mark.parametrize("multiplier", [1e-300, 1e-5, 0.3, 30.0, math.inf, 0.0, -1.0])
@pytest.mark.parametrize(("epsilon", "delta"), [(1e-9, 1e-5), (0.5, 1e-12), (1e-9, 0.0)])
def test_a_guarantee_that_its_noise_does_not_keep_is_refused(multiplier: float, epsilon: float, delta: float) -> None:
    claim = {"noise_multiplier": multiplier, "publications": 10**6, "epsilon": epsilon, "delta": delta}
    with pytest.raises(MessageError):
        PublicDiscriminant.from_bytes(changed(fitted().export(), guarantee={**claim, "extra_delta": 0.0}))
