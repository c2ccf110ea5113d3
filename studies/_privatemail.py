"""What the studies of PrivateMail share: images, the query step by step, and Recall@8 straight from a ranking."""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.spatial.distance import cdist

from nearveil.mechanisms import RawFeatures
from nearveil.mechanisms.privatemail.published import EXPERIMENTS, CentredDistances, Experiment
from nearveil.search.ceiling import class_ceiling
from studies._report import interval
from studies._study import summarise
from studies.data import FeatureSet, load_features

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]

K = 8  # items of an answer, as in the papers
DELTA = 1e-5
ANCHORS = 1000  # public rows that both sides embed
EPSILONS = (0.01, 0.1, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)


@dataclass(frozen=True)
class Source:
    """A set of images: its file, its name in print, and the first class that is searched; those before are public."""

    file: str
    title: str
    first: int
    per_class: int  # queries of each class


SETS: dict[Experiment, Source] = {
    "cub200": Source("cub200_cropped_lite0", "CUB-200-2011", 100, 1),
    "cars196": Source("cars196_cropped_lite0", "Cars196", 98, 1),
    "cifar100": Source("cifar100_partial", "CIFAR-100, a part", 50, 2),  # fewer classes are left to ask for
}


def list_files(*names: Experiment) -> tuple[str, ...]:
    """Return the files of some sets, for a study's `data`."""
    return tuple(f"{SETS[name].file}/{SETS[name].file}.npz" for name in names)


@dataclass(frozen=True, eq=False)
class Images:
    """Public rows, a gallery, and queries that are in neither, a number of each class."""

    anchors: Floats
    anchor_labels: Labels
    others: Floats
    gallery: Floats
    gallery_labels: Labels
    queries: Floats
    query_labels: Labels
    n_classes: int

    def score(self, chosen: Any, labels: Labels | None = None) -> float:
        """Return how often a query's label, or another that is given, is among those of the items chosen for it."""
        wanted = self.query_labels if labels is None else labels
        return float((self.gallery_labels[np.asarray(chosen)] == wanted[:, None]).any(axis=1).mean())


@functools.cache
def _load(file: str) -> FeatureSet:
    return load_features(file)


def sample_images(data: Experiment, seed: int, *, gallery: int, anchors: int = 0) -> Images:
    """Draw anchors, gallery and queries. As many queries of every class, so that classes are equally likely."""
    source, found = SETS[data], _load(SETS[data].file)
    X, y = found.features.astype(np.float64), found.labels
    generator = np.random.default_rng([seed, source.first])
    public = generator.permutation(np.flatnonzero(y < source.first))
    rest = generator.permutation(np.flatnonzero(y >= source.first))
    classes = np.unique(y[rest])
    asked = np.concatenate([rest[y[rest] == label][: source.per_class] for label in classes])
    kept = np.setdiff1d(rest, asked, assume_unique=True)
    kept = np.sort(generator.permutation(kept)[:gallery])
    own, others = np.split(public, [anchors or ANCHORS])
    return Images(
        anchors=X[own],
        anchor_labels=y[own],
        others=X[others],
        gallery=X[kept],
        gallery_labels=y[kept] - source.first,
        queries=X[asked],
        query_labels=y[asked] - source.first,
        n_classes=len(classes),
    )


def normalise_rows(drawn: Images) -> tuple[Floats, Floats]:
    """Return gallery and queries, centred by the anchors' mean and of norm one."""
    raw = RawFeatures().fit(drawn.anchors)
    return raw.features(drawn.gallery), raw.features(drawn.queries)


def find_nearest(queries: Floats, gallery: Floats) -> NDArray[np.intp]:
    """Return the eight nearest rows of each query, in any order."""
    return np.argpartition(cdist(queries, gallery), K, axis=1)[:, :K]


class Repel(Protocol):
    """A Laplacian of labels."""

    def laplacian_matmul(self, Z: Floats) -> Floats:
        """Multiply with `Z` of shape (n, k)."""
        ...


class PartlyLabelled:
    """The label "Laplacian" of the authors' program for the rows that have a label; the others have no part in it."""

    def __init__(self, labels: Labels) -> None:
        self._labelled = labels >= 0
        self._own = CentredDistances(labels[self._labelled])

    def laplacian_matmul(self, Z: Floats) -> Floats:
        """Multiply the "Laplacian" with `Z` of shape (n, k)."""
        found: Floats = np.zeros_like(Z)
        found[self._labelled] = self._own.laplacian_matmul(Z[self._labelled])
        return found


def walk(
    cosines: Floats, repel: Repel | None, start: Floats, *, bandwidth: float, label_weight: float, steps: int
) -> Iterator[Floats]:
    """Take steps of the query without noise, rescaled to Frobenius norm sqrt(n), and tell where each led."""
    weights = np.exp((cosines - 1) / bandwidth**2)
    np.fill_diagonal(weights, 0)
    degree = weights.sum(axis=1)[:, None]
    Z = start * (np.sqrt(len(start)) / np.linalg.norm(start))
    yield Z
    for _ in range(steps):
        pull = weights @ Z - degree * Z
        if repel is not None:
            pull = pull + label_weight * repel.laplacian_matmul(Z)
        Z = Z + pull / (2 * degree)
        Z = Z * (np.sqrt(len(Z)) / np.linalg.norm(Z))
        yield Z


def compute_ceiling(epsilon: float, n_classes: int, delta: float = DELTA) -> float:
    """Return what Recall@8 no private message passes: Theorem C for eight answered classes."""
    return class_ceiling(epsilon, n_classes, K, delta)


def compute_floor(n_classes: int) -> float:
    """Return the Recall@8 of the best answer that is the same for everybody: items of eight classes."""
    return K / n_classes


def show(frame: pd.DataFrame, column: str, *by: str) -> pd.Series:
    """Return means of shares over seeds with their intervals, in print."""
    return summarise(frame, column, *by).apply(interval, axis=1, args=(".2f", 0, 1))


def round_up(value: float) -> str:
    """Return an upper bound in print, never below what it is."""
    return f"{math.ceil(value * 1000 - 1e-9) / 1000:.3f}"


def get_published_parameters(data: Experiment) -> dict[str, float]:
    """Return bandwidth and label weight of the paper's Table 2."""
    return EXPERIMENTS[data]
