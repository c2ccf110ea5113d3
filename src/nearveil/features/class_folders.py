"""Train features on a folder with one subfolder of images for each class, and measure them on unseen classes."""

from collections import Counter
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
from nearveil.privacy.checks import check_integer
from nearveil.progress import Progress, no_progress

_RECALL_AT = (1, 8)
_BATCH = 64  # images read before their maps are computed
_BLOCK = 1024  # rows compared at a time
_MIN = 2  # classes, and images of a class
_NO_CLASS = "not in the folder of a class"
_ALONE = "the only image of its class"


@dataclass(frozen=True)
class ClassPhotos:
    """Maps of shape (n, c, h, w), their classes, and the skipped files with reasons."""

    maps: NDArray[np.float16]
    labels: NDArray[np.str_]
    skipped: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class FolderTraining:
    """The result of :func:`train_on_folder`.

    Attributes
    ----------
    model : TrainedExtractor
    trained, held_out : tuple of (int, int)
        Numbers of classes and images for training and for measuring.
    recalls : dict of int to (float, float)
        Recall@k by class on held-out classes, without the head and with it; empty if no class was held out.
    skipped : tuple of (str, str)
        Skipped files with reasons.
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
    progress: Progress = no_progress,
) -> FolderTraining:
    """Train features on class folders, save the model, and measure it on held-out classes.

    The model reveals its training images: nothing protects them.

    Parameters
    ----------
    directory : Path
        One subfolder of images for each class.
    out : Path
        The model file; an existing file is replaced.
    backbone : str, default="efficientnet-lite0"
        A name in :data:`nearveil.features.backbones.EXTRACTORS`. The backbone is frozen.
    descriptors : str, default="SG"
        As in :func:`nearveil.features.train_head`.
    dimension : int, default=512
        Of the features.
    epochs : int, default=20
    held_out : float, default=0.5
        Fraction of the classes, the last by name, used for measuring; 0 for none.
    seed : int, default=0
        The same seed trains the same model.
    progress : callable, optional
        ``progress(text, total)`` starts a stage and returns a function that is called with the units done.

    Returns
    -------
    FolderTraining
    """
    check_integer(dimension, "dimension", len(check_descriptors(descriptors)))
    network: Any = EXTRACTORS[backbone]()
    photos = read_class_folders(directory, network, progress)
    training, measuring = split_classes(photos.labels, held_out)
    model = train_head(
        photos.maps[training],
        photos.labels[training],
        backbone=network,
        descriptors=descriptors,
        dimension=dimension,
        epochs=epochs,
        tick=progress("training", epochs),
        random_state=seed,
    )
    model.save(out)
    maps, labels = photos.maps[measuring], photos.labels[measuring]
    recalls = {}
    if len(maps):
        before, after = unit_rows(maps.mean(axis=(2, 3), dtype=np.float32))[0], model.describe(maps)
        recalls = {k: (measure_recall(before, labels, k), measure_recall(after, labels, k)) for k in _RECALL_AT}
    sizes = [(len(set(photos.labels[part])), int(part.sum())) for part in (training, measuring)]
    return FolderTraining(model, sizes[0], sizes[1], recalls, photos.skipped)


def read_class_folders(directory: Path, backbone: TorchExtractor, progress: Progress) -> ClassPhotos:
    """Read a folder and compute the maps in batches, so that memory holds few full images at a time."""
    if not directory.is_dir():
        raise ValueError(f"folder: there is no folder at {directory}")
    files = sorted(path for path in directory.rglob("*") if path.is_file() and not path.name.startswith("."))
    advance = progress("reading", len(files))
    maps = [np.empty((0, backbone.dimension, 1, 1), np.float16)]
    read: list[tuple[str, str]] = []  # name and class
    skipped: list[tuple[str, str]] = []
    batch: list[Pixels] = []
    for number, file in enumerate(files, start=1):
        path = file.relative_to(directory)
        try:
            if len(path.parts) < 2:
                raise ImageError(_NO_CLASS)
            batch.append(resize(load_image(file), backbone.side))
            read.append((str(path), path.parts[0]))
        except ImageError as error:
            skipped.append((str(path), error.reason))
        if len(batch) == _BATCH or (batch and number == len(files)):
            maps.append(compute_backbone_maps(batch, backbone))
            batch.clear()
        advance(1)
    labels = np.array([label for _, label in read], dtype=np.str_)
    sizes = Counter(labels.tolist())
    usable = np.array([sizes[label] >= _MIN for _, label in read], dtype=bool)
    skipped += [(name, _ALONE) for name, label in read if sizes[label] < _MIN]
    return ClassPhotos(np.concatenate(maps[1:] or maps)[usable], labels[usable], tuple(skipped))


def split_classes(labels: NDArray[np.str_], held_out: float) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return masks of the images for training and for measuring: whole classes, the last by name for measuring."""
    names = sorted(set(labels))
    count = max(_MIN, round(held_out * len(names))) if held_out else 0
    if len(names) - count < _MIN:
        raise ValueError(
            f"folder: there are {len(names)} classes of two images or more; training needs two, and measuring needs "
            "two: add classes, or lower `held_out` (0 measures nothing)"
        )
    training = np.isin(labels, names[: len(names) - count])
    return training, ~training


def measure_recall(features: NDArray[np.float32], labels: NDArray[np.str_], k: int) -> float:
    """Return how often one of the k nearest other images has the same label."""
    hits = 0
    for start in range(0, len(features), _BLOCK):
        scores = features[start : start + _BLOCK] @ features.T
        rows = np.arange(len(scores))
        scores[rows, start + rows] = -np.inf
        nearest = np.argsort(-scores, axis=1, kind="stable")[:, : min(k, len(features) - 1)]
        hits += int((labels[nearest] == labels[start + rows, None]).any(axis=1).sum())
    return hits / len(features)
