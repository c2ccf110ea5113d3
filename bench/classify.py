"""Splits for classification: birds (CUB-200-2011) by family and cars (Cars196) by body.

A part of the images is public and unlabelled, a part is the private records, the rest are queries, as many of each
class. The split for choosing parameters ("development") shares no image with the one that is reported.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CLASSES = {
    "cub200_cropped_lite0": (
        "Auklet", "Blackbird", "Flycatcher", "Grebe", "Grosbeak", "Gull", "Kingfisher", "Oriole", "Sparrow", "Swallow",
        "Tern", "Vireo", "Warbler", "Woodpecker", "Wren",
    ),
    "cars196_cropped_lite0": ("Cab", "Convertible", "Coupe", "Hatchback", "Minivan", "SUV", "Sedan", "Van", "Wagon"),
}  # fmt: skip
TITLES = {"cub200_cropped_lite0": "birds, 15 families", "cars196_cropped_lite0": "cars, 9 bodies"}
PUBLIC, DEVELOPMENT = 0.3, 0.4  # shares of the images
QUERIES = 30  # of each class
NEIGHBORS = 10  # of the classifier without any privacy
Rows = NDArray[np.float32]


@dataclass(frozen=True)
class Trial:
    """Public images, private records and queries, with norm one."""

    data: str
    classes: tuple[str, ...]
    public: Rows
    private: Rows
    private_y: NDArray[np.str_]
    queries: Rows
    query_y: NDArray[np.str_]


def labels_of(name: str) -> NDArray[np.str_]:
    """Return the family of every bird, or the body of every car: a word of the name of its class."""
    from studies.data import find

    with np.load(find(f"{name}/{name}.npz")) as arrays:
        names, numbers = arrays["class_names"], arrays["labels"]
    words = [one.split("_")[-1].split(".")[-1] if name.startswith("cub") else one.split()[-2] for one in names]
    found: NDArray[np.str_] = np.array(words)[numbers]
    return found


def split(name: str, part: str, seed: int = 0) -> Trial:
    """Return the images of one part, cut into public, private and queries."""
    from studies.data import load_features

    rng, labels, rows = np.random.default_rng(seed), labels_of(name), load_features(name).features.astype(np.float32)
    once = np.unique(rows, axis=0, return_index=True)[1]  # some photographs of cars are there twice
    order = rng.permutation(once[np.isin(labels[once], CLASSES[name])])
    cut = round(DEVELOPMENT * len(order))
    here = order[:cut] if part == "development" else order[cut:]
    queries = np.concatenate([here[labels[here] == one][:QUERIES] for one in CLASSES[name]])
    rest = rng.permutation(np.setdiff1d(here, queries))
    public, private = np.split(rest, [round(PUBLIC * len(rest))])
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return Trial(name, CLASSES[name], rows[public], rows[private], labels[private], rows[queries], labels[queries])


def accuracy_without_privacy(trial: Trial) -> float:
    """Return what the nearest private records say, seen as they are."""
    from sklearn.neighbors import KNeighborsClassifier

    middle = trial.public.mean(axis=0)
    nearest = KNeighborsClassifier(NEIGHBORS, metric="cosine").fit(trial.private - middle, trial.private_y)
    return float((nearest.predict(trial.queries - middle) == trial.query_y).mean())
