"""Images in one folder for each class: training on them, and how well features tell the classes apart."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearveil.features.backbones import EXTRACTORS
from nearveil.features.extractor import unit_rows
from nearveil.features.images import ImageError, Pixels, load_image, resize
from nearveil.features.networks import TorchExtractor
from nearveil.features.training import TrainedExtractor, check_descriptors, compute_backbone_maps, train_head

Bars = Callable[[str, int | None], Callable[[int], object]]
"""From what is done, and how many times, to what is called with how many were finished since the last call."""

_AT = (1, 8)  # the k of recall@k
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


@dataclass(frozen=True)
class FolderTraining:
    """What came of training on a folder.

    Attributes
    ----------
    model : TrainedExtractor
    trained, held_out : tuple of (int, int)
        Classes and images that it learned from, and that it was measured on.
    recalls : dict of int to (float, float)
        For each k, how often one of the k nearest is of the same class, without the head and with it; on classes that
        were held out, and empty where none were.
    skipped : tuple of (str, str)
        Files that were left out, each with the reason.
    """

    model: TrainedExtractor
    trained: tuple[int, int]
    held_out: tuple[int, int]
    recalls: dict[int, tuple[float, float]]
    skipped: tuple[tuple[str, str], ...]


def train_on_folder(
    directory: Path,
    out: Path,
    *,
    backbone: str = "efficientnet-lite0",
    descriptors: str = "SG",
    dimension: int = 512,
    epochs: int = 20,
    held_out: float = 0.5,
    seed: int = 0,
    progress: Bars = lambda _what, _count: lambda _done: None,
) -> FolderTraining:
    """Train features for images in one folder a class, write the model, and measure it on classes that were held out.

    Nothing protects the images that it learns from: the model tells of them.

    Parameters
    ----------
    directory : Path
        One folder of images for each class.
    out : Path
        Where the model goes; a file that is there is replaced.
    backbone : str, default="efficientnet-lite0"
        A name in :data:`nearveil.features.backbones.EXTRACTORS`. It stays as it is.
    descriptors : str, default="SG"
        As of :func:`nearveil.features.train_head`.
    dimension : int, default=512
        Of the features.
    epochs : int, default=20
        How often all images are shown.
    held_out : float, default=0.5
        Part of the classes, the last by name, kept to measure; 0 for none.
    seed : int, default=0
        The same seed trains the same model.
    progress : callable, optional
        Called with what is done, and how many times; what it returns is called as that goes on.

    Returns
    -------
    FolderTraining
    """
    check_descriptors(descriptors)
    if dimension < len(descriptors):
        raise ValueError("dimension: it must be at least one for each descriptor")
    network: Any = EXTRACTORS[backbone]()
    photos = read_class_folders(directory, network, progress)
    learned, measured = split_classes(photos.labels, held_out)
    model = train_head(
        photos.maps[learned],
        photos.labels[learned],
        backbone=network,
        descriptors=descriptors,
        dimension=dimension,
        epochs=epochs,
        progress=progress("training", epochs),
        random_state=seed,
    )
    model.save(out)
    recalls = _measure_recalls(model, photos.maps[measured], photos.labels[measured])
    sizes = [(len(set(photos.labels[part])), int(part.sum())) for part in (learned, measured)]
    return FolderTraining(model, sizes[0], sizes[1], recalls, photos.skipped)


def _measure_recalls(
    model: TrainedExtractor, maps: NDArray[np.float16], labels: NDArray[np.str_]
) -> dict[int, tuple[float, float]]:
    """Return recalls without the head and with it."""
    before, after = unit_rows(maps.mean(axis=(2, 3), dtype=np.float32))[0], model.describe(maps)
    return {k: (measure_recall(before, labels, k), measure_recall(after, labels, k)) for k in _AT if len(maps)}


def read_class_folders(directory: Path, backbone: TorchExtractor, progress: Bars) -> ClassPhotos:
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
            maps.append(compute_backbone_maps(images, backbone))
            images.clear()
        tick(1)
    labels = np.array([label for _, label in kept], dtype=np.str_)
    sizes = Counter(labels.tolist())
    enough = np.array([sizes[label] >= _LEAST for _, label in kept], dtype=bool)
    skipped += [(name, _ALONE) for (name, _), many in zip(kept, enough, strict=True) if not many]
    whole = np.concatenate(maps) if maps else np.empty((0, backbone.dimension, 1, 1), np.float16)
    return ClassPhotos(whole[enough], labels[enough], tuple(skipped))


def split_classes(labels: NDArray[np.str_], held_out: float) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Say which images are learned from and which are measured on: whole classes, the last by name."""
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
    """Return how often one of the k nearest others has the same label."""
    found = 0
    for start in range(0, len(features), _BLOCK):
        scores = features[start : start + _BLOCK] @ features.T
        rows = np.arange(len(scores))
        scores[rows, start + rows] = -np.inf
        near = np.argsort(-scores, axis=1, kind="stable")[:, : min(k, len(features) - 1)]
        found += int((labels[near] == labels[start + rows, None]).any(axis=1).sum())
    return found / len(features)
