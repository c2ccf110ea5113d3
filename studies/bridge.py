"""Querying a gallery with features of another network: what a bridge learnt from public images saves."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray
from sklearn.linear_model import RidgeCV

from nearveil.features import EfficientNetLite0, Extractor, gallery_features
from nearveil.features.backbones import MobileNetV2
from studies import _figures as draw
from studies._report import show
from studies._study import Case, Row, Study, summarise
from studies.alignment import fit_bridge
from studies.data import find

K = 8
PHOTOS = "birds_photos"
SEEDS = (0, 1, 2, 3, 4)
MOST: int | None = None  # photographs of a species; all
Floats = NDArray[np.float32]


MEASURES = {"recall": f"recall@{K} by class", "precision": "precision", "agreement": "agreement"}


def centre(rows: Floats, middle: Floats) -> Floats:
    """Return rows of norm one, less a mean."""
    moved = rows - middle
    return np.asarray(moved / np.linalg.norm(moved, axis=1, keepdims=True), dtype=np.float32)


def search(queries: Floats, gallery: Floats) -> NDArray[np.intp]:
    """Return the K nearest items of each query, itself (the item of the same position) left out."""
    return _choose_best(queries @ gallery.T)


def _choose_best(scores: Floats) -> NDArray[np.intp]:
    np.fill_diagonal(scores, -np.inf)
    return np.argsort(-scores, axis=1)[:, :K]


def judge(results: NDArray[np.intp], truth: NDArray[np.intp], labels: NDArray[np.intp]) -> dict[str, float]:
    """Return which shares of queries find their class, of items are of it, and agree with the gallery's own search."""
    same = labels[results] == labels[:, None]
    agree = (results[:, :, None] == truth[:, None, :]).any(axis=2)
    shares = {"recall": same.any(axis=1), "precision": same, "agreement": agree}
    return {name: float(hits.mean()) for name, hits in shares.items()}


def carry_by_regression(source: Floats, target: Floats, queries: Floats) -> Floats:
    """Carry queries over by ridge regression, its penalty chosen by leaving out one anchor at a time."""
    here, there = source.mean(axis=0), target.mean(axis=0)
    model = RidgeCV(np.logspace(-4, 2, 13), fit_intercept=False).fit(source - here, target - there)
    return np.asarray(there + model.predict(queries - here), dtype=np.float32)


def compare(asking: Floats, holding: Floats, labels: NDArray[np.intp], seed: int = 0) -> dict[str, dict[str, float]]:
    """Search the gallery of one network with the queries of another; return the shares of every way."""
    order = np.random.default_rng(seed).permutation(int(labels.max()) + 1)
    anchors = np.isin(labels, order[: len(order) // 2])
    first, second = (_compare_half(asking, holding, labels, part, seed) for part in (anchors, ~anchors))
    return {
        way: {name: (share + second[way][name]) / 2 for name, share in shares.items()} for way, shares in first.items()
    }


def _compare_half(
    asking: Floats, holding: Floats, labels: NDArray[np.intp], anchors: NDArray[np.bool_], seed: int
) -> dict[str, dict[str, float]]:
    source, target, queries, gallery = asking[anchors], holding[anchors], asking[~anchors], holding[~anchors]
    here, there = source.mean(axis=0), target.mean(axis=0)
    centred_gallery = centre(gallery, there)
    truth = search(centred_gallery, centred_gallery)
    alone = centre(queries, here)
    chance = np.random.default_rng(seed).random((len(centred_gallery), len(centred_gallery)), dtype=np.float32)
    ways = {
        "items at random": _choose_best(chance),
        "the gallery's network alone": truth,
        "the client's network alone": search(alone, alone),
        "no alignment": search(alone, centred_gallery),
        "ridge regression": search(centre(carry_by_regression(source, target, queries), there), centred_gallery),
        "bridge": search(centre(fit_bridge(source, target).apply(queries), there), centred_gallery),
    }
    return {way: judge(results, truth, labels[~anchors]) for way, results in ways.items()}


def extract_features(extractors: Sequence[Extractor], most: int | None = None) -> tuple[list[Floats], NDArray[np.intp]]:
    """Return the features of all photographs, or of `most` a species, by each extractor, and their species."""
    folders = sorted(path for path in find(PHOTOS).iterdir() if path.is_dir())
    paths = [path for folder in folders for path in sorted(folder.glob("*.jpg"))[:most]]
    results: list[Floats] = []
    for extractor in extractors:
        made = gallery_features(paths, extractor)
        if made.skipped:
            raise ValueError(f"{len(made.skipped)} photographs cannot be read: {made.skipped[0][1]}")
        results.append(made.features)
    return results, np.unique([path.parent.name for path in paths], return_inverse=True)[1]


def cases() -> list[Case]:
    """Return one case: the features of both networks take nearly all of the time."""
    return [{"photographs": PHOTOS, "seeds": list(SEEDS)}]


def measure(case: Case) -> list[Row]:
    """Compare all ways, for every choice of anchors."""
    find(case["photographs"])  # says what is missing before weights are loaded
    (asking, holding), labels = extract_features([MobileNetV2(), EfficientNetLite0()], MOST)
    return [
        {"seed": seed, "way": way, "queries": len(labels), **shares}
        for seed in case["seeds"]
        for way, shares in compare(asking, holding, labels, seed).items()
    ]


def figures(rows: pd.DataFrame) -> dict[str, Figure]:
    """Draw the three measures of every way."""
    figure, ((axes,),) = draw.make_panels(1, 1, (8, 3.6))
    looks = {"recall": ("o", "blue"), "precision": ("s", "orange"), "agreement": ("^", "black")}
    for position, (name, (marker, colour)) in enumerate(looks.items()):
        results = summarise(rows, name, "way")
        style = {"color": draw.COLOURS[colour], "marker": marker, "label": MEASURES[name]}
        draw.dots(axes, results, shift=0.18 * (position - 1), **style)
    axes.set(xlabel=f"share, of {rows['queries'].iloc[0]} queries", xlim=(0, 1.03))
    draw.finish(figure, axes)
    return {"ways": figure}


def facts(rows: pd.DataFrame) -> dict[str, Any]:
    """Return what was found; every number is one of the rows."""
    means = rows.groupby("way", sort=False)[list(MEASURES)].mean()
    cells = {words: show(rows, name, "way") for name, words in MEASURES.items()}
    return {
        "ways": pd.DataFrame(cells).rename_axis("").reset_index(),
        "agreement": means["agreement"],
        "recall": means["recall"],
        "worse": means.loc["no alignment", "recall"] < means.loc["items at random", "recall"],
    }


PARAMETERS = {"items found": K, "anchors": "half of the species", "ridge penalties": "13, from 1e-4 to 100"}
STUDY = Study("bridge", cases, measure, figures, facts, (f"{PHOTOS}/PROVENANCE.txt",), PARAMETERS, SEEDS)
