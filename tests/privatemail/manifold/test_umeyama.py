"""Umeyama alignment: recovery to 1e-10, least squares, and clouds that determine nothing."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.transform import Rotation
from scipy.stats import ortho_group

from nearveil.privatemail.manifold import umeyama

SQUARE = np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])


@settings(deadline=None)
@given(
    d=st.integers(1, 8),
    extra=st.integers(1, 30),
    scale=st.floats(1e-3, 1e3),
    reflection=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_it_recovers_random_similarities(d: int, extra: int, scale: float, reflection: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rotation = ortho_group.rvs(d, random_state=rng) if d > 1 else np.eye(1)
    if (np.linalg.det(rotation) < 0) != reflection:
        rotation[0] *= -1
    translation = rng.normal(size=d) * scale
    source = rng.normal(size=(d + extra, d))
    target = scale * source @ rotation.T + translation
    found = umeyama(source, target, reflection=reflection)
    assert found.scale == pytest.approx(scale, rel=1e-10)
    np.testing.assert_allclose(found.rotation, rotation, atol=1e-9 if d + extra < d + 3 else 1e-10)
    np.testing.assert_allclose(found.translation, translation, atol=1e-9 * scale)
    np.testing.assert_allclose(found.apply(source), target, atol=1e-10 * scale * 10)


def test_no_nearby_transform_fits_noisy_clouds_better() -> None:
    rng = np.random.default_rng(0)
    source, target = rng.normal(size=(2, 50, 3))
    target = 2 * source + 0.5 * target
    found = umeyama(source, target)
    best = np.sum((found.apply(source) - target) ** 2)
    for _ in range(200):
        turn = Rotation.from_rotvec(0.05 * rng.normal(size=3)).as_matrix()
        scale = found.scale * np.exp(0.05 * rng.normal())
        moved = scale * source @ (turn @ found.rotation).T + found.translation + 0.05 * rng.normal(size=3)
        assert np.sum((moved - target) ** 2) > best


def test_without_reflection_the_determinant_is_one() -> None:
    source = np.random.default_rng(0).normal(size=(20, 3))
    mirrored = source * [1, 1, -1]
    assert np.linalg.det(umeyama(source, mirrored).rotation) == pytest.approx(1)
    assert np.linalg.det(umeyama(source, mirrored, reflection=True).rotation) == pytest.approx(-1)
    assert umeyama(source, mirrored).scale < umeyama(source, mirrored, reflection=True).scale == pytest.approx(1)


@pytest.mark.parametrize("size", [1e-200, 1e-160, 1e200])
def test_units_do_not_matter(size: float) -> None:
    source = np.random.default_rng(0).normal(size=(20, 2))
    assert umeyama(size * source, size * source).scale == pytest.approx(1, rel=1e-12)


def test_a_very_thin_cloud_still_determines_a_rotation() -> None:
    source = np.random.default_rng(0).normal(size=(50, 3)) * [1, 1e-5, 1e-5]
    turn = Rotation.from_rotvec([0.3, 0.2, 0.1]).as_matrix()
    np.testing.assert_allclose(umeyama(source, source @ turn.T).rotation, turn, atol=1e-9)


def test_points_of_another_width_are_named() -> None:
    with pytest.raises(ValueError, match="points must have 3 columns"):
        umeyama(np.eye(3), np.eye(3)).apply(np.ones((2, 2)))


def test_without_scale_lengths_stay() -> None:
    source = np.random.default_rng(0).normal(size=(20, 2))
    assert umeyama(source, 5 * source, scale=False).scale == 1
    assert umeyama(source, 5 * source).scale == pytest.approx(5)


def test_points_in_a_plane_determine_a_proper_rotation() -> None:
    source = np.random.default_rng(0).normal(size=(20, 3)) * [1, 1, 0]
    turn = Rotation.from_rotvec([0.3, 0.2, 0.1]).as_matrix()
    np.testing.assert_allclose(umeyama(source, source @ turn.T).rotation, turn, atol=1e-10)
    with pytest.raises(ValueError, match="leave the rotation open"):
        umeyama(source, source @ turn.T, reflection=True)


def test_the_transform_is_frozen() -> None:
    found = umeyama(np.eye(3), np.eye(3))
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.scale = 2.0  # type: ignore[misc]
    with pytest.raises(ValueError, match="read-only"):
        found.rotation[0, 0] = 2.0


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (np.ones((5, 2)), np.random.default_rng(0).normal(size=(5, 2)), "all points of source are equal"),
        (np.random.default_rng(0).normal(size=(5, 2)), np.ones((5, 2)), "all points of target are equal"),
        (np.outer(np.arange(5.0), [1, 1, 1]), np.outer(np.arange(5.0), [1, 0, 1]), "leave the rotation open"),
        (np.eye(3)[:1], np.eye(3)[:1], "all points of source are equal"),
        (np.eye(3)[:2], np.eye(3)[:2], "leave the rotation open"),
        (np.array([[0.0], [1.0], [2.0]]), np.array([[2.0], [1.0], [0.0]]), "one mirrors the other"),
        (SQUARE, SQUARE * [1, -1], "one mirrors the other"),
        (np.full((1000, 2), 0.1), np.full((1000, 2), 0.1), "all points of source are equal"),
        (np.array([["Alice", "b"]]), np.ones((1, 2)), "source must be an array of real numbers"),
        (np.array([[1j, 2]]), np.ones((1, 2)), "source must be an array of real numbers"),
        (np.ones((5, 2)), np.ones((4, 2)), "must have one shape"),
        (np.ones(5), np.ones(5), "source must have rows and columns"),
        (np.empty((0, 2)), np.empty((0, 2)), "source must have at least one row"),
        (np.full((3, 2), np.nan), np.ones((3, 2)), "source must be finite"),
        (np.eye(3), np.full((3, 3), np.inf), "target must be finite"),
    ],
)
def test_degenerate_clouds_are_named(source: Any, target: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        umeyama(source, target)
