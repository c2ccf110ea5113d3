"""Where the real data of tests, benchmarks and studies is found."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

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
    """Return the path of one file or folder of real data.

    Parameters
    ----------
    name : str
        Relative to the data folder.

    Returns
    -------
    Path

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
    """Load a set of image features such as ``cub200_cropped_lite0`` or ``cars196_cropped_lite0``.

    Parameters
    ----------
    name : str
        The folder of the set.

    Returns
    -------
    FeatureSet
    """
    with np.load(find(f"{name}/{name}.npz")) as arrays:
        return FeatureSet(name, arrays["features"].astype(np.float32), arrays["labels"].astype(np.int64))
