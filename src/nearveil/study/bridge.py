"""``python -m nearveil.study.bridge``: queries of one network against the gallery of another.

Photographs of birds. Half of the species are the public anchors, the other half gallery and queries (every photograph
asks, itself left out), then the other way round. All features are centred by the mean of the anchors.
"""

import functools
import sys
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sklearn.linear_model import RidgeCV

from nearveil.features import EfficientNetLite0, Extractor, MobileNetV2, fit_bridge, gallery_features
from nearveil.study.data import DataMissingError, find

K = 8
PHOTOS = "birds_photos"

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Found:
    """What a search finds, as shares.

    Attributes
    ----------
    recall : float
        Queries with an item of their class among the K found.
    precision : float
        Items found that are of the query's class.
    agreement : float
        Of the K that the gallery's own network finds for the same photograph, how many were found.
    """

    recall: float
    precision: float
    agreement: float


def centred(rows: Floats, mean: Floats) -> Floats:
    """Return rows of norm one, less a mean."""
    moved = rows - mean
    return np.asarray(moved / np.linalg.norm(moved, axis=1, keepdims=True), dtype=np.float32)


def search(queries: Floats, gallery: Floats) -> NDArray[np.intp]:
    """Return the K nearest items of each query, itself (the item of the same position) left out."""
    return _best(queries @ gallery.T)


def _best(scores: Floats) -> NDArray[np.intp]:
    np.fill_diagonal(scores, -np.inf)
    return np.argsort(-scores, axis=1)[:, :K]


def measure(found: NDArray[np.intp], truth: NDArray[np.intp], labels: NDArray[np.intp]) -> Found:
    """Compare what was found with labels and with the gallery's own search."""
    same = labels[found] == labels[:, None]
    agree = (found[:, :, None] == truth[:, None, :]).any(axis=2)
    return Found(float(same.any(axis=1).mean()), float(same.mean()), float(agree.mean()))


def regressed(source: Floats, target: Floats, queries: Floats) -> Floats:
    """Carry queries over by ridge regression, its penalty chosen by leaving out one anchor at a time."""
    here, there = source.mean(axis=0), target.mean(axis=0)
    model = RidgeCV(np.logspace(-4, 2, 13), fit_intercept=False).fit(source - here, target - there)
    return np.asarray(there + model.predict(queries - here), dtype=np.float32)


def compare(asking: Floats, holding: Floats, labels: NDArray[np.intp]) -> dict[str, Found]:
    """Search the gallery of one network with the queries of another, in every way.

    Parameters
    ----------
    asking, holding : ndarray of shape (n, d)
        Features of the same photographs by the client's and by the server's network.
    labels : ndarray of shape (n,)

    Returns
    -------
    dict of str to Found
        The mean over both halves.
    """
    halves = [_compare_half(asking, holding, labels, labels % 2 == part) for part in (0, 1)]
    return {
        way: Found(*(float(np.mean([getattr(half[way], name) for half in halves])) for name in Found.__annotations__))
        for way in halves[0]
    }


def _compare_half(
    asking: Floats, holding: Floats, labels: NDArray[np.intp], known: NDArray[np.bool_]
) -> dict[str, Found]:
    source, target, queries, gallery = asking[known], holding[known], asking[~known], holding[~known]
    here, there = source.mean(axis=0), target.mean(axis=0)
    own = centred(gallery, there)
    truth = search(own, own)
    alone = centred(queries, here)
    chance = np.random.default_rng(0).random((len(own), len(own)), dtype=np.float32)
    ways = {
        "items at random": _best(chance),
        "the gallery's network alone": truth,
        "the client's network alone": search(alone, alone),
        "no alignment": search(alone, own),
        "ridge regression": search(centred(regressed(source, target, queries), there), own),
        "bridge": search(centred(fit_bridge(source, target).apply(queries), there), own),
    }
    return {way: measure(found, truth, labels[~known]) for way, found in ways.items()}


def features(extractors: list[Extractor], most: int | None = None) -> tuple[list[Floats], NDArray[np.intp]]:
    """Return the features of all photographs, or of `most` a species, by each extractor, and their species."""
    folders = sorted(path for path in find(PHOTOS).iterdir() if path.is_dir())
    paths = [path for folder in folders for path in sorted(folder.glob("*.jpg"))[:most]]
    found: list[Floats] = []
    with Progress(transient=True) as progress:
        for extractor in extractors:
            task = progress.add_task(extractor.name, total=len(paths))
            made = gallery_features(paths, extractor, progress=functools.partial(progress.advance, task))
            if made.skipped:
                raise ValueError(f"{len(made.skipped)} photographs cannot be read: {made.skipped[0][1]}")
            found.append(made.features)
    return found, np.unique([path.parent.name for path in paths], return_inverse=True)[1]


def main() -> None:
    """Print the comparison."""
    try:
        extractors: list[Extractor] = [MobileNetV2(), EfficientNetLite0()]
        (asking, holding), labels = features(extractors)
    except (DataMissingError, ModuleNotFoundError) as missing:
        sys.exit(str(missing))
    grid = Table(title=f"{extractors[0].name} asks a gallery of {extractors[1].name}: {len(labels)} queries")
    for heading in ("", f"recall@{K} by class", "precision", "agreement"):
        grid.add_column(heading, justify="right" if heading else "left")
    for way, found in compare(asking, holding, labels).items():
        grid.add_row(way, f"{found.recall:.3f}", f"{found.precision:.3f}", f"{found.agreement:.3f}")
    Console(width=110).print(grid)


if __name__ == "__main__":
    main()
