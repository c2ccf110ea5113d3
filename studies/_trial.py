"""Galleries of images that several studies search: who is public, who is searched, and who asks."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from studies.data import load_features

Rows = NDArray[np.float32]
Labels = NDArray[np.int64]

QUERIES = 1200
SETS = {"cub200_cropped_lite0": 100, "cars196_cropped_lite0": 98}  # classes below are public, the others searched
NAMES = {"cub200_cropped_lite0": "CUB", "cars196_cropped_lite0": "Cars"}
FILES = tuple(f"{name}/{name}.npz" for name in SETS)


@dataclass(frozen=True)
class Trial:
    """Public rows, a gallery, and queries that are in neither."""

    public: Rows
    public_y: Labels
    gallery: Rows
    gallery_y: Labels
    queries: Rows
    query_y: Labels


def split(name: str, seed: int) -> Trial:
    """Return the public classes, and `QUERIES` seeded queries removed from the images of the others."""
    found = load_features(name)
    public = found.labels < SETS[name]
    rest = np.random.default_rng(seed).permutation(np.flatnonzero(~public))
    queries, gallery = rest[:QUERIES], np.sort(rest[QUERIES:])
    X, y = found.features, found.labels
    return Trial(X[public], y[public], X[gallery], y[gallery], X[queries], y[queries])


@dataclass(frozen=True)
class Halves:
    """A trial in which the same queries are of classes that are known, and of classes that are not."""

    trial: Trial  # the public rows are of one half of the classes; so is the gallery, or it is of all
    known: NDArray[np.bool_]  # which queries are of a class of the public rows
    others: Rows  # other images of the other half, which tell what is popular with such queries


def split_classes(name: str, seed: int, half: int, *, whole_gallery: bool) -> Halves:
    """Return public rows of one half of the classes, a gallery, and queries of all classes.

    Which image is public, which is in the gallery and which is a query does not depend on `half`, so that each query
    can be asked once as one of a known class and once as one of an unknown class.
    """
    found = load_features(name)
    X, y = found.features, found.labels
    order = np.random.default_rng(seed).permutation(len(y))
    queries, rest = order[:QUERIES], order[QUERIES:]
    items, spare = np.sort(rest[: len(rest) // 2]), rest[len(rest) // 2 :]
    own = (y < SETS[name]) == (half == 0)
    public, others = spare[own[spare]], spare[~own[spare]]
    gallery = items if whole_gallery else items[own[items]]
    trial = Trial(X[public], y[public], X[gallery], y[gallery], X[queries], y[queries])
    return Halves(trial, own[queries], X[others])
