"""Images in one folder for each class, read for training, and how well features tell the classes apart."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nearveil.features.images import ImageError, Pixels, load_image, resize
from nearveil.features.networks import TorchExtractor
from nearveil.features.training import backbone_maps

_AT_ONCE = 64  # images read before their maps are computed
_BLOCK = 1024  # rows that are compared at once
_LEAST = 2  # classes, and images of a class: with fewer there is nothing to tell apart
_NO_CLASS = "not in the folder of a class"
_ALONE = "the only image of its class"


@dataclass(frozen=True)
class ClassPhotos:
    """What was read: maps of shape (n, c, h, w), the class of each, and what was left out with the reason."""

    maps: NDArray[np.float16]
    labels: NDArray[np.str_]
    skipped: tuple[tuple[str, str], ...]


def read_class_folders(
    directory: Path, backbone: TorchExtractor, progress: Callable[[str, int | None], Callable[[int], object]]
) -> ClassPhotos:
    """Read a folder, and compute the maps as it goes: images in full are never in memory together."""
    if not directory.is_dir():
        raise ValueError(f"folder: there is no folder at {directory}")
    files = sorted(path for path in directory.rglob("*") if path.is_file() and not path.name.startswith("."))
    tick = progress("reading", len(files))
    maps: list[NDArray[np.float16]] = []
    kept: list[tuple[str, str]] = []  # name and class
    skipped: list[tuple[str, str]] = []
    images: list[Pixels] = []
    for number, file in enumerate(files, start=1):
        place = file.relative_to(directory)
        try:
            if len(place.parts) < 2:
                raise ImageError(_NO_CLASS)
            images.append(resize(load_image(file), backbone.side))
            kept.append((str(place), place.parts[0]))
        except ImageError as error:
            skipped.append((str(place), error.reason))
        if len(images) == _AT_ONCE or (images and number == len(files)):
            maps.append(backbone_maps(images, backbone))
            images.clear()
        tick(1)
    labels = np.array([label for _, label in kept], dtype=np.str_)
    sizes = Counter(labels.tolist())
    enough = np.array([sizes[label] >= _LEAST for _, label in kept], dtype=bool)
    skipped += [(name, _ALONE) for (name, _), many in zip(kept, enough, strict=True) if not many]
    whole = np.concatenate(maps) if maps else np.empty((0, backbone.dimension, 1, 1), np.float16)
    return ClassPhotos(whole[enough], labels[enough], tuple(skipped))


def split_classes(labels: NDArray[np.str_], held_out: float) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Say which images are learned from and which are measured on: whole classes, the last by name.

    Examples
    --------
    >>> import numpy as np
    >>> split_classes(np.array(["a", "b", "c", "d", "a"]), 0.5)[1]
    array([False, False,  True,  True, False])
    """
    names = sorted(set(labels))
    kept = max(_LEAST, round(held_out * len(names))) if held_out else 0
    if len(names) - kept < _LEAST:
        raise ValueError(
            f"folder: there are {len(names)} classes of two images or more; two are needed to learn from, and two "
            "to measure on: add some, or lower `held_out` (0 measures nothing)"
        )
    learned = np.isin(labels, names[: len(names) - kept])
    return learned, ~learned


def measure_recall(features: NDArray[np.float32], labels: NDArray[np.str_], k: int) -> float:
    """Return how often one of the k nearest others has the same label.

    Examples
    --------
    >>> import numpy as np
    >>> measure_recall(np.array([[1, 0], [1, 0], [0, 1]], dtype=np.float32), np.array(["a", "a", "b"]), 1)
    0.6666666666666666
    """
    found = 0
    for start in range(0, len(features), _BLOCK):
        scores = features[start : start + _BLOCK] @ features.T
        rows = np.arange(len(scores))
        scores[rows, start + rows] = -np.inf
        near = np.argsort(-scores, axis=1, kind="stable")[:, : min(k, len(features) - 1)]
        found += int((labels[near] == labels[start + rows, None]).any(axis=1).sum())
    return found / len(features)
