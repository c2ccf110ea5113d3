"""``nearveil train``: a head of global descriptors for one's own images."""

import json
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nearveil.cli import _budget
from nearveil.cli._budget_view import clean
from nearveil.cli._label import _bars
from nearveil.cli._label_file import check_free
from nearveil.cli._label_task import Bars
from nearveil.features.backbones import EfficientNetLite0, MobileNetV2
from nearveil.features.extractor import unit_rows
from nearveil.features.images import ImageError, Pixels, load_image, resize
from nearveil.features.networks import TorchExtractor
from nearveil.features.training import backbone_maps, check_descriptors, train_head
from nearveil.search.evaluation import true_neighbors

_AT = (1, 8)  # the k of recall@k
_AT_ONCE = 64  # images read before their maps are computed
_LEAST = 2  # classes, and images of a class: with fewer there is nothing to tell apart
_NO_CLASS = "not in the folder of a class"
_ALONE = "the only image of its class"


class Backbone(StrEnum):
    """What the head is put on."""

    efficientnet_lite0 = "efficientnet-lite0"
    mobilenet_v2 = "mobilenet-v2"


_BACKBONES: dict[Backbone, type[EfficientNetLite0] | type[MobileNetV2]] = {
    Backbone.efficientnet_lite0: EfficientNetLite0,
    Backbone.mobilenet_v2: MobileNetV2,
}


@dataclass(frozen=True)
class Photos:
    """What was read: maps of shape (n, c, h, w), the class of each, and what was left out."""

    maps: NDArray[np.float16]
    labels: NDArray[np.str_]
    skipped: tuple[tuple[str, str], ...]


def train(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A folder with one folder of images a class.")],
    out: Annotated[Path, typer.Option(help="Where the model goes, such as model.nvm.")],
    descriptors: Annotated[str, typer.Option(help="S (mean), M (largest) and G (generalised mean), combined.")] = "SG",
    dimension: Annotated[int, typer.Option(min=1, max=65_536, help="Of the features.")] = 512,
    epochs: Annotated[int, typer.Option(min=1, help="How often all images are shown.")] = 20,
    backbone: Annotated[Backbone, typer.Option(help="It stays as it is.")] = Backbone.efficientnet_lite0,
    held_out: Annotated[
        float, typer.Option(min=0, max=1, help="Part of the classes, the last by name, kept to measure; 0 for none.")
    ] = 0.5,
    seed: Annotated[int, typer.Option(min=0, help="The same seed trains the same model.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if there is one.")] = False,
    as_json: _budget.Json = False,
) -> None:
    """Train features for your own images: those of one class come close to each other.

    Nothing protects the images that it learns from: the model tells of them. Use public images, or keep the model.

    It is measured on classes that it has not seen: how often an image of the same class is the nearest, and how often
    one is among the 8 nearest, without the head and with it.

    [bold]Examples[/bold]

    nearveil train birds/ --out birds.nvm

    nearveil train birds/ --out birds.nvm --descriptors SMG --dimension 768 --held-out 0
    """
    with _budget._words(), _bars() as bar:
        check_descriptors(descriptors)
        if dimension < len(descriptors):
            raise ValueError("--dimension: it must be at least one for each descriptor")
        check_free(out, force=force)
        extractor = _backbone(backbone)
        photos = _read(directory, extractor, bar)
        learned, measured = split_classes(photos.labels, held_out)
        model = train_head(
            photos.maps[learned],
            photos.labels[learned],
            backbone=extractor,
            descriptors=descriptors,
            dimension=dimension,
            epochs=epochs,
            progress=bar("training", epochs),
            random_state=seed,
        )
        model.save(out)
        kept, classes = photos.maps[measured], photos.labels[measured]
        plain = unit_rows(kept.mean(axis=(2, 3), dtype=np.float32))[0]
        recalls = {
            f"recall@{k}": {"before": recall(plain, classes, k), "after": recall(model.describe(kept), classes, k)}
            for k in (_AT if len(kept) else ())
        }
    report = {
        "trained": {"classes": len(set(photos.labels[learned])), "images": int(learned.sum())},
        "held_out": {"classes": len(set(classes)), "images": len(kept)},
        **recalls,
        "dimension": model.dimension,
        "fingerprint": model.fingerprint,
        "out": str(out),
        "skipped": [{"file": file, "reason": reason} for file, reason in photos.skipped],
    }
    if as_json:
        typer.echo(json.dumps(report))
    else:
        _show(report, recalls)


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
            f"DIR: there are {len(names)} classes of two images or more; two are needed to learn from, and two "
            "to measure on: add some, or lower --held-out (0 measures nothing)"
        )
    learned = np.isin(labels, names[: len(names) - kept])
    return learned, ~learned


def recall(features: NDArray[np.float32], labels: NDArray[np.str_], k: int) -> float:
    """Return how often one of the k nearest others has the same label.

    Examples
    --------
    >>> import numpy as np
    >>> recall(np.array([[1, 0], [1, 0], [0, 1]], dtype=np.float32), np.array(["a", "a", "b"]), 1)
    0.6666666666666666
    """
    near = true_neighbors(features, features, min(k, len(features) - 1), leave_out=True)
    return float((labels[near] == labels[:, None]).any(axis=1).mean())


def _backbone(name: Backbone) -> TorchExtractor:
    try:
        return _BACKBONES[name]()
    except ModuleNotFoundError as missing:  # the words say what to install
        raise ValueError(str(missing)) from None


def _read(directory: Path, extractor: TorchExtractor, bar: Bars) -> Photos:
    """Read a folder, and compute the maps as it goes: images in full are never in memory together."""
    if not directory.is_dir():
        raise ValueError("DIR: there is no folder at this path")
    files = sorted(path for path in directory.rglob("*") if path.is_file() and not path.name.startswith("."))
    tick = bar("reading", len(files))
    maps: list[NDArray[np.float16]] = []
    labels: list[str] = []
    names: list[str] = []
    skipped: list[tuple[str, str]] = []
    images: list[Pixels] = []

    def flush() -> None:
        if images:
            maps.append(backbone_maps(images, extractor))
            images.clear()

    for file in files:
        place = file.relative_to(directory)
        try:
            if len(place.parts) < 2:
                raise ImageError(_NO_CLASS)
            images.append(resize(load_image(file), extractor.side))
            labels.append(place.parts[0])
            names.append(str(place))
        except ImageError as error:
            skipped.append((str(place), error.reason))
        if len(images) == _AT_ONCE:
            flush()
        tick(1)
    flush()
    sizes = Counter(labels)
    enough = np.array([sizes[label] >= _LEAST for label in labels], dtype=bool)
    skipped += [(name, _ALONE) for name, kept in zip(names, enough, strict=True) if not kept]
    whole = np.concatenate(maps) if maps else np.empty((0, extractor.dimension, 1, 1), np.float16)
    return Photos(whole[enough], np.array(labels, dtype=np.str_)[enough], tuple(skipped))


def _show(report: dict[str, Any], recalls: dict[str, dict[str, float]]) -> None:
    console = Console(highlight=False)
    trained, held = report["trained"], report["held_out"]
    console.print(f"Trained on {trained['images']:,} images of {trained['classes']:,} classes.")
    if recalls:
        grid = Table(title=f"{held['images']:,} images of {held['classes']:,} classes that it has not seen")
        for heading in ("", "before", "after"):
            grid.add_column(heading, justify="right" if heading else "left")
        for name, pair in recalls.items():
            grid.add_row(name, f"{pair['before']:.3f}", f"{pair['after']:.3f}")
        console.print(grid)
    for one in report["skipped"]:
        console.print(Text(clean(f"skipped {one['file']}: {one['reason']}")), soft_wrap=True)
    console.print(Text(clean(f"The model: {report['out']} ({report['dimension']:,} dimensions).")), soft_wrap=True)
    console.print("Nothing protects the images that it learned from: give it away only if they are public.")
