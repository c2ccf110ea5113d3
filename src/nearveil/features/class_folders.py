"""Train features on a folder with one subfolder of images for each class, and measure them on unseen classes."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.neighbors import NearestNeighbors

from nearveil.features.backbones import EXTRACTORS
from nearveil.features.extractor import unit_rows
from nearveil.features.images import ImageError, Pixels, load_image, resize
from nearveil.features.networks import TorchExtractor
from nearveil.features.training import Maps, TrainedExtractor, check_descriptors, compute_backbone_maps, train_head
from nearveil.privacy.checks import check_integer
from nearveil.progress import Progress, no_progress

_BATCH = 64  # images read before their maps are computed
_MIN = 2  # classes, and images of a class


@dataclass(frozen=True)
class FolderTraining:
    """The result of :func:`train_on_folder`."""

    model: TrainedExtractor
    trained: tuple[int, int]  # classes and images for training
    held_out: tuple[int, int]  # and for measuring
    recalls: dict[int, tuple[float, float]]  # recall@k by class on held-out classes, without the head and with it
    skipped: tuple[tuple[str, str], ...]  # files with reasons


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
    """Train a head on a folder with a subfolder of images for each class, save it, and measure it on other classes."""
    # The last `held_out` of the classes, by name, measure. The model reveals its training images: nothing protects
    # them.
    check_integer(dimension, "dimension", len(check_descriptors(descriptors)))
    network: Any = EXTRACTORS[backbone]()
    maps, labels, skipped = _read_class_folders(directory, network, progress)
    training = _choose_classes(labels, held_out)
    model = train_head(
        maps[training],
        labels[training],
        backbone=network,
        descriptors=descriptors,
        dimension=dimension,
        epochs=epochs,
        tick=progress("training", epochs),
        random_state=seed,
    )
    model.save(out)
    recalls = {}
    if not training.all():
        maps, names = maps[~training], labels[~training]
        before, after = unit_rows(maps.mean(axis=(2, 3), dtype=np.float32))[0], model.describe(maps)
        recalls = {k: (_measure_recall(before, names, k), _measure_recall(after, names, k)) for k in (1, 8)}
    sizes = [(len(set(labels[part])), int(part.sum())) for part in (training, ~training)]
    return FolderTraining(model, sizes[0], sizes[1], recalls, skipped)


def _read_class_folders(
    directory: Path, backbone: TorchExtractor, progress: Progress
) -> tuple[Maps, NDArray[np.str_], tuple[tuple[str, str], ...]]:
    """Return the maps of a folder, their classes, and the skipped files with reasons; few images are in memory."""
    if not directory.is_dir():
        raise ValueError(f"folder: there is no folder at {directory}; correct the path")
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
                raise ImageError("not in the folder of a class")
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
    skipped += [(name, "the only image of its class") for name, label in read if sizes[label] < _MIN]
    return np.concatenate(maps[1:] or maps)[usable], labels[usable], tuple(skipped)


def _choose_classes(labels: NDArray[np.str_], held_out: float) -> NDArray[np.bool_]:
    """Return a mask of the images for training: whole classes, the first by name."""
    names = sorted(set(labels))
    count = max(_MIN, round(held_out * len(names))) if held_out else 0
    if len(names) - count < _MIN:
        raise ValueError(
            f"folder: there are {len(names)} classes of two images or more; training needs two, and measuring needs "
            "two: add classes, or lower `held_out` (0 measures nothing)"
        )
    return np.isin(labels, names[: len(names) - count])


def _measure_recall(features: NDArray[np.float32], labels: NDArray[np.str_], k: int) -> float:
    """Return how often one of the k nearest other images has the same label."""
    search = NearestNeighbors(n_neighbors=min(k, len(features) - 1), algorithm="brute", metric="cosine").fit(features)
    nearest = search.kneighbors(return_distance=False)
    return float((labels[nearest] == labels[:, None]).any(axis=1).mean())
