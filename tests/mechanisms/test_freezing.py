"""Fitting freezes parameters and guarantee together: no mechanism of the catalog says one epsilon and uses another."""

import copy
import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.decomposition import PCA
from sklearn.exceptions import NotFittedError

from nearveil.mechanisms import OME, AnalyticGaussian, Latent, PrivUnit, Release
from nearveil.mechanisms.catalog import REGISTRY
from nearveil.mechanisms.covers.covers import MappedRelease
from nearveil.privacy import Guarantee
from nearveil.privacy.noise import unsafe_seeded
from nearveil.privatemail import PrivateMail
from studies.baselines import (
    BASELINES,
    Cells,
    DPdSNE,
    PrivatePCA,
    PrivatePCARelease,
    RandomProjection,
    Unary,
    VonMisesFisher,
)
from tests.mechanisms.conformance import REFUSAL, attack_attributes, attack_parameters

ROWS = np.random.default_rng(0).standard_normal((400, 16))
LABELS = np.arange(200) % 4


@pytest.mark.parametrize("entry", [*REGISTRY, *BASELINES], ids=lambda entry: entry.name)
def test_no_parameter_of_any_mechanism_changes_after_fit(entry: Any) -> None:
    attack_parameters(_fitted(entry), ROWS[0], labels=0 if entry.labelled else None)


@pytest.mark.parametrize("entry", [*REGISTRY, *BASELINES], ids=lambda entry: entry.name)
def test_no_attribute_of_any_mechanism_changes_after_fit(entry: Any) -> None:
    attack_attributes(_fitted(entry), ROWS[0], labels=0 if entry.labelled else None)


def _fitted(entry: Any) -> Release:
    release: Release = entry.make_release(ROWS[200:]).fit(ROWS[:200], LABELS)
    return release.index(ROWS[200:]) if isinstance(release, MappedRelease) else release


def test_the_noise_of_a_fit_is_not_replaced_by_hand() -> None:
    release, weak = AnalyticGaussian(0.1).fit(ROWS[:200]), AnalyticGaussian(8.0).fit(ROWS[:200])
    with pytest.raises(AttributeError, match=f"noise_ of a fitted AnalyticGaussian {REFUSAL}"):
        release.noise_ = weak.noise_
    assert release.fit(ROWS[:200]).guarantee.epsilon == pytest.approx(0.1)


def test_what_is_learned_besides_a_fit_is_read_only_too() -> None:
    server = Cells(2.0, 0.2).fit(ROWS[:200]).index(ROWS[200:])
    client = Cells(2.0, 0.2).fit_space(server.space_, server.public_digest).use_map(server.map_)
    hidden = PrivateMail(4.0).fit(ROWS[:200], LABELS).with_dummies(ROWS[200:], LABELS)
    for release in (server, server.with_epsilon(0.5), client, hidden):
        attack_attributes(release, ROWS[0])
    assert not hasattr(server.use_map(server.map_), "members_")


def test_guarantee_and_ledger_never_say_less_than_messages_have() -> None:
    release = Unary(8.0).fit(ROWS[:200])
    message = release.release(ROWS[0])
    with pytest.raises(AttributeError, match=r"epsilon of a fitted Unary cannot change"):
        release.set_params(epsilon=0.01)
    assert release.guarantee_of(message) is release.guarantee
    assert release.guarantee.epsilon == pytest.approx(8.0)
    assert clone(release).set_params(epsilon=0.01).fit(ROWS[:200]).guarantee.epsilon == pytest.approx(0.01)


@pytest.mark.parametrize("mechanism", [AnalyticGaussian(8.0), DPdSNE(8.0, n_anchors=60), Cells(8.0, 0.2)])
def test_the_guarantee_stays_that_of_the_fit(mechanism: Release) -> None:
    release = mechanism.fit(ROWS[:200], LABELS)
    stated = release.guarantee
    with pytest.raises(AttributeError, match="cannot change"):
        release.epsilon = 0.01
    assert release.guarantee is stated


def test_an_unsound_projection_never_becomes_sound() -> None:
    release = RandomProjection(4.0, as_published=True, allow_unsound=True).fit(ROWS[:200])
    assert not release.guarantee.sound
    with pytest.raises(AttributeError, match="as_published of a fitted RandomProjection cannot change"):
        release.set_params(as_published=False)
    assert not release.guarantee.sound


@pytest.mark.parametrize("make", [PrivUnit, AnalyticGaussian, VonMisesFisher, Latent, OME])
@pytest.mark.parametrize("kind", ["array", "list", "transformer"])
def test_what_a_parameter_holds_may_change_and_nothing_learned_does(make: Any, kind: str) -> None:
    matrix = np.linalg.qr(np.random.default_rng(1).standard_normal((16, 4)))[0]
    options = {"nominal_epsilon": 40.0} if make is OME else {"epsilon": 4.0}
    parameter: Any = {"array": matrix.copy(), "list": matrix.tolist(), "transformer": PCA(4).fit(ROWS)}[kind]
    release = make(**options, projection=parameter).fit(ROWS[:200])
    stated, sent = release.guarantee, release.release(ROWS[0], rng=unsafe_seeded(1))
    assert release.projection is not parameter
    for changed in (parameter, release.projection):  # that of the caller, and that of the fitted release
        if kind == "transformer":
            changed.components_ = changed.components_[::-1].copy()
        elif changed is parameter or kind == "list":
            changed[0][0] = 7.0
            assert changed is not parameter or release.projection[0][0] == matrix[0, 0]
        else:
            with pytest.raises(ValueError, match="read-only"):
                changed[0][0] = 7.0
        assert release.guarantee is stated
        assert release.release(ROWS[0], rng=unsafe_seeded(1)) == sent


def test_a_projector_that_learns_anew_changes_no_release() -> None:
    projector = PrivatePCA(1.0, n_components=3).fit(ROWS[:200])
    release = PrivatePCARelease(projector).fit(ROWS[200:])
    stated, sent = release.guarantee, release.release(ROWS[0])
    for changed in (projector, release.projector):
        changed.set_params(epsilon=64.0, n_components=5).fit(ROWS[:200])
        assert release.guarantee is stated
        assert release.release(ROWS[0]) == sent
    with pytest.raises(AttributeError, match="projector__epsilon of a fitted PrivatePCARelease cannot change"):
        release.set_params(projector__epsilon=64.0)
    with pytest.raises(AttributeError):
        projector.guarantee = stated  # type: ignore[misc]


def test_another_epsilon_on_the_same_map_is_another_release() -> None:
    cells = Cells(2.0, 0.2).fit(ROWS[:200]).index(ROWS[200:])
    other = cells.with_epsilon(8.0)
    assert (other.guarantee.epsilon, cells.guarantee.epsilon) == (8.0, 2.0)
    assert other._channel.odds > cells._channel.odds
    message = other.release(ROWS[0])
    assert np.array_equal(cells.rank(message, ROWS[200:]), other.rank(message, ROWS[200:]))
    with pytest.raises(AttributeError, match="cannot change"):
        cells.epsilon = 8.0
    assert cells.with_epsilon(1.0).guarantee.epsilon == 1.0


def test_copies_keep_what_was_fitted_and_clones_nothing() -> None:
    release = PrivUnit(4.0, projection=ROWS[:16, :4].tolist()).fit(ROWS[:200])
    for twin in (copy.copy(release), copy.deepcopy(release), pickle.loads(pickle.dumps(release))):  # noqa: S301
        assert twin.guarantee == release.guarantee
        assert twin.release(ROWS[0], rng=unsafe_seeded(1)) == release.release(ROWS[0], rng=unsafe_seeded(1))
        with pytest.raises(AttributeError, match="cannot change"):
            twin.epsilon = 0.1
        assert twin.fit(ROWS[200:]).guarantee == release.guarantee
        assert release.guarantee.epsilon == pytest.approx(4.0, abs=1e-5)
    with pytest.raises(NotFittedError, match="must be fitted"):
        _ = clone(release).guarantee


def test_what_was_learned_is_read_only() -> None:
    projection = RandomProjection(4.0).fit(ROWS[:200])
    channel = VonMisesFisher(4.0, projection="pca").fit(ROWS[:200])
    for array in (projection.matrix_, projection.mean_, channel.projection_.matrix):
        assert array is not None
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    for frozen, field in ((projection.noise_, "scale"), (channel.channel_, "kappa")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(frozen, field, 1.0)


@pytest.mark.parametrize("twin_of", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])  # noqa: S301
def test_what_was_learned_stays_read_only_in_copies(twin_of: Any) -> None:
    """A matrix that is a thousand times as large needs a thousand times the noise that was fitted."""
    projection = twin_of(RandomProjection(1.0, n_components=8).fit(ROWS[:200]))
    channel = twin_of(VonMisesFisher(4.0, projection="pca").fit(ROWS[:200]))
    cells = twin_of(Cells(2.0, 0.2).fit(ROWS[:200]).index(ROWS[200:]))
    for array in (projection.matrix_, projection.mean_, channel.projection_.matrix, cells.map_.components):
        with pytest.raises(ValueError, match="read-only"):
            array[...] *= 1000


def test_a_failed_fit_leaves_what_was_fitted_before() -> None:
    release = AnalyticGaussian(4.0).fit(ROWS[:200])
    stated = release.guarantee
    with pytest.raises(ValueError, match="public_X"):
        release.fit(np.full((3, 16), np.nan))
    assert release.guarantee is stated
    with pytest.raises(ValueError, match="projection must have"):
        PrivUnit(4.0, projection=np.eye(16)).fit(ROWS).fit(ROWS[:, :8])
    unfitted = AnalyticGaussian(-1.0)
    with pytest.raises(ValueError, match="epsilon"):
        unfitted.fit(ROWS[:200])
    unfitted.epsilon = 4.0
    assert unfitted.fit(ROWS[:200]).guarantee == stated


def test_a_fit_returns_another_object_and_changes_none() -> None:
    unfitted = AnalyticGaussian(1.0)
    release = unfitted.fit(ROWS[:200])
    other = release.fit(1000 + ROWS[200:])
    assert not np.array_equal(other.mean_, release.mean_)
    with pytest.raises(NotFittedError, match="returns the fitted object"):
        unfitted.release(ROWS[0])
    expected = AnalyticGaussian(1.0).fit(ROWS[:200]).release(ROWS[0], rng=unsafe_seeded(3))
    assert release.release(ROWS[0], rng=unsafe_seeded(3)) == expected


def test_a_mechanism_cannot_state_a_guarantee_of_its_own_beside_that_of_the_fit() -> None:
    with pytest.raises(TypeError, match="must define _make_guarantee"):

        class Drifting(AnalyticGaussian):
            @property
            def guarantee(self) -> Guarantee:
                return self._make_guarantee()


def test_a_message_of_a_seed_promises_nothing() -> None:
    release = Unary(2.0).fit(ROWS[:200])
    honest, seeded = release.release(ROWS[0]), release.release(ROWS[0], rng=unsafe_seeded(0))
    assert release.guarantee_of(honest) is release.guarantee
    assert (release.guarantee_of(seeded).sound, release.guarantee_of(seeded).source) == (False, "seeded")
