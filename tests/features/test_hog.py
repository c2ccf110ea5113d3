import sys
from typing import Any

import numpy as np
import pytest
from skimage.feature import hog as of_one

from nearveil.features.extractor import hog


def _images(*shape: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


@pytest.mark.parametrize(("shape", "cell"), [((28, 28), (7, 7)), ((32, 32, 3), (8, 8)), ((30, 45), (7, 11))])
def test_rows_are_those_of_scikit_image(shape: tuple[int, ...], cell: tuple[int, int]) -> None:
    images = _images(5, *shape)
    axis = 2 if len(shape) == 3 else None
    wanted = [of_one(one, pixels_per_cell=cell, cells_per_block=(2, 2), channel_axis=axis) for one in images]
    found = hog(images)
    assert found.dtype == np.float32
    assert found.shape == (5, 324)
    np.testing.assert_array_equal(found, np.asarray(wanted, dtype=np.float32))


@pytest.mark.parametrize("side", [8, 11, 15, 23])
def test_every_size_has_four_cells_a_side(side: int) -> None:
    images = _images(100, side, side)
    cells = side // 4 * 4 + 1  # one pixel more, for the gradients of the last one that has a cell
    kept = images[:, :cells, :cells]
    np.testing.assert_array_equal(hog(images), hog(kept))
    assert hog(images).shape == (100, 324)
    assert hog(images).any(axis=0).all()


@pytest.mark.parametrize("precision", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(28, 28), (16, 16, 3)])
def test_floats_and_bytes_agree(shape: tuple[int, ...], precision: type) -> None:
    images = _images(20, *shape)
    np.testing.assert_array_equal(hog(images), hog(images.astype(precision) / precision(255)))


def test_a_row_depends_on_its_image_alone() -> None:
    images = _images(1100, 8, 8, 3)
    together = hog(images)
    for number in (0, 511, 512, 1099):
        np.testing.assert_array_equal(hog(images[number : number + 1])[0], together[number])
    np.testing.assert_array_equal(hog(images[::-1])[::-1], together)
    np.testing.assert_array_equal(hog(np.asfortranarray(images)), together)


def test_progress_tells_of_every_image_once() -> None:
    steps: list[int] = []
    hog(_images(1100, 8, 8), tick=steps.append)
    assert sum(steps) == 1100
    assert len(steps) > 1


def test_an_image_of_one_colour_is_zero() -> None:
    assert not hog(np.full((1, 12, 12), 200, dtype=np.uint8)).any()


def test_colour_follows_the_strongest_gradient() -> None:
    colour = np.zeros((1, 16, 16, 3), dtype=np.uint8)
    colour[..., 1] = _images(1, 16, 16) // 2 + 100
    colour[..., 2] = np.arange(16) // 8  # a weak edge elsewhere
    wanted = hog(colour[..., 1])
    assert np.mean(np.abs(hog(colour) - wanted)) < 0.01
    assert not np.array_equal(hog(colour), hog(colour[..., 2]))


@pytest.mark.parametrize(
    ("images", "words"),
    [
        (np.zeros((28, 28)), r"shape \(n, height, width\)"),
        (np.zeros((2, 28, 28, 4)), r"shape \(n, height, width\)"),
        (np.zeros((2, 3, 28, 28)), r"shape \(n, height, width\)"),
        ([np.zeros((9, 9)), np.zeros((8, 9))], "one size"),
        (np.zeros((0, 28, 28)), "at least one image"),
        (np.zeros((1, 7, 28)), "at least 8 pixels"),
        (np.zeros((1, 28, 7, 3), dtype=np.uint8), "at least 8 pixels"),
        (np.full((1, 28, 28), np.nan), "floats from 0 to 1"),
        (np.full((1, 28, 28), np.inf), "floats from 0 to 1"),
        (np.full((1, 28, 28), 1.5), "floats from 0 to 1"),
        (np.full((1, 28, 28), -0.1), "floats from 0 to 1"),
        (np.zeros((1, 28, 28), dtype=np.int64), "must be uint8"),
        (np.zeros((1, 28, 28), dtype=object), "must be uint8"),
    ],
)
def test_what_is_no_image_is_refused(images: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        hog(images)


def test_without_scikit_image_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "skimage.feature", None)
    with pytest.raises(ModuleNotFoundError, match=r"nearveil\[images\]"):
        hog(_images(1, 8, 8))
