"""Where the real data of tests, benchmarks and studies is found."""

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import affine_transform

from nearveil.features.extractor import hog

VARIABLE = "NEARVEIL_DATA"
DEFAULT = "../shared/data"


class DataMissingError(FileNotFoundError):
    """A data set is not on this machine. Everything else works without it."""


@dataclass(frozen=True)
class FeatureSet:
    """Features of images with their labels.

    Attributes
    ----------
    name : str
    features : ndarray of shape (n, d), float32
        As the network gave them: neither centred nor of norm one.
    labels : ndarray of shape (n,), int64
    """

    name: str
    features: NDArray[np.float32]
    labels: NDArray[np.int64]


def data_folder() -> Path:
    """Return the folder of real data: the variable NEARVEIL_DATA, or ``../shared/data``."""
    return Path(os.environ.get(VARIABLE, DEFAULT))


def find(name: str) -> Path:
    """Return the path of a file or folder of real data; `name` is relative to the data folder.

    Raises
    ------
    DataMissingError
        If it is not there; says where it was looked for.
    """
    path = data_folder() / name
    if not path.exists():
        raise DataMissingError(f"no real data at {path}: set {VARIABLE} to the folder that holds {name}")
    return path


def load_features(name: str) -> FeatureSet:
    """Load the image features of a folder such as ``cub200_cropped_lite0`` or ``cars196_cropped_lite0``."""
    with np.load(find(f"{name}/{name}.npz")) as arrays:
        return FeatureSet(name, arrays["features"].astype(np.float32), arrays["labels"].astype(np.int64))


DigitSet = Literal["mnist", "svhn"]

FOLDERS: dict[DigitSet, str] = {"mnist": "mnist", "svhn": "svhn_digits"}
BORDER: dict[DigitSet, int] = {"mnist": 4, "svhn": 6}  # pixels that the second look leaves out


class CachedFeatures:
    """Features that are computed once."""

    def __init__(self, images: NDArray[np.uint8], rows: NDArray[np.float32]) -> None:
        self._rows = {image.tobytes(): row for image, row in zip(images, rows, strict=True)}

    def __call__(self, images: NDArray[Any]) -> NDArray[np.float32]:
        """Return the rows of images seen before."""
        return np.stack([self._rows[image.tobytes()] for image in images])


@dataclass(frozen=True)
class Digits:
    """Private and public images, and their features."""

    name: DigitSet
    private: NDArray[np.uint8]
    private_y: NDArray[np.int64]
    test: NDArray[np.uint8]
    test_y: NDArray[np.int64]
    features: CachedFeatures


def straighten(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Remove the slant of a bright digit on black, by its moments, and centre it."""
    light = image.astype(np.float64)
    total = light.sum()
    if total == 0:
        return image
    down, across = np.mgrid[: image.shape[0], : image.shape[1]]
    centre = np.array([(down * light).sum(), (across * light).sum()]) / total
    down, across = down - centre[0], across - centre[1]
    slant = (down * across * light).sum() / max(float((down**2 * light).sum()), 1.0)
    shear = np.array([[1.0, 0.0], [slant, 1.0]])
    middle = (np.array(image.shape) - 1) / 2
    moved = affine_transform(light, shear, offset=centre - shear @ middle, order=1)
    straight: NDArray[np.uint8] = np.clip(np.rint(moved), 0, 255).astype(np.uint8)
    return straight


def extract_digit_features(name: DigitSet, images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the HOG of images and, finer, of their middles; handwriting is set upright first."""
    seen = np.stack([straighten(image) for image in images]) if name == "mnist" else images
    cut = slice(BORDER[name], -BORDER[name])
    return np.concatenate([hog(seen), hog(np.ascontiguousarray(seen[:, cut, cut]))], axis=1)


@functools.cache
def load_digit_images(name: DigitSet) -> Digits:
    """Read the images and compute their features: once in every process."""
    with np.load(find(f"{FOLDERS[name]}/{FOLDERS[name]}.npz")) as arrays:
        private, test = arrays["x_train"], arrays["x_test"]
        private_y, test_y = arrays["y_train"].astype(np.int64), arrays["y_test"].astype(np.int64)
    images = np.concatenate([private, test])
    return Digits(name, private, private_y, test, test_y, CachedFeatures(images, extract_digit_features(name, images)))
