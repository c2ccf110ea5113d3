"""Queries of one network against the gallery of another: what a bridge learnt from public images saves."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import RidgeCV

from nearveil.features import EfficientNetLite0, Extractor, MobileNetV2, fit_bridge, gallery_features
from studies._report import table
from studies._study import Case, Mean, Row, Study, grouped, mean
from studies._style import COLOURS, legend_below
from studies.data import find

if TYPE_CHECKING:
    from matplotlib.figure import Figure

K = 8
PHOTOS = "birds_photos"
SEEDS = (0, 1, 2, 3, 4)
MOST: int | None = None  # photographs of a species; all
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Found:
    """What a search finds, as shares."""

    recall: float  # queries with an item of their class among the K found
    precision: float  # items found that are of the query's class
    agreement: float  # of the K that the gallery's own network finds, how many were found


MEASURES = {"recall": f"recall@{K} by class", "precision": "precision", "agreement": "agreement"}


def centred(rows: Floats, middle: Floats) -> Floats:
    """Return rows of norm one, less a mean."""
    moved = rows - middle
    return np.asarray(moved / np.linalg.norm(moved, axis=1, keepdims=True), dtype=np.float32)


def search(queries: Floats, gallery: Floats) -> NDArray[np.intp]:
    """Return the K nearest items of each query, itself (the item of the same position) left out."""
    return _best(queries @ gallery.T)


def _best(scores: Floats) -> NDArray[np.intp]:
    np.fill_diagonal(scores, -np.inf)
    return np.argsort(-scores, axis=1)[:, :K]


def judge(found: NDArray[np.intp], truth: NDArray[np.intp], labels: NDArray[np.intp]) -> Found:
    """Compare what was found with labels and with the gallery's own search."""
    same = labels[found] == labels[:, None]
    agree = (found[:, :, None] == truth[:, None, :]).any(axis=2)
    return Found(float(same.any(axis=1).mean()), float(same.mean()), float(agree.mean()))


def regressed(source: Floats, target: Floats, queries: Floats) -> Floats:
    """Carry queries over by ridge regression, its penalty chosen by leaving out one anchor at a time."""
    here, there = source.mean(axis=0), target.mean(axis=0)
    model = RidgeCV(np.logspace(-4, 2, 13), fit_intercept=False).fit(source - here, target - there)
    return np.asarray(there + model.predict(queries - here), dtype=np.float32)


def compare(asking: Floats, holding: Floats, labels: NDArray[np.intp], seed: int = 0) -> dict[str, Found]:
    """Search the gallery of one network with the queries of another, in every way."""
    order = np.random.default_rng(seed).permutation(int(labels.max()) + 1)
    known = np.isin(labels, order[: len(order) // 2])
    halves = [_compare_half(asking, holding, labels, part, seed) for part in (known, ~known)]
    return {
        way: Found(*(float(np.mean([getattr(half[way], name) for half in halves])) for name in Found.__annotations__))
        for way in halves[0]
    }


def _compare_half(
    asking: Floats, holding: Floats, labels: NDArray[np.intp], known: NDArray[np.bool_], seed: int
) -> dict[str, Found]:
    source, target, queries, gallery = asking[known], holding[known], asking[~known], holding[~known]
    here, there = source.mean(axis=0), target.mean(axis=0)
    own = centred(gallery, there)
    truth = search(own, own)
    alone = centred(queries, here)
    chance = np.random.default_rng(seed).random((len(own), len(own)), dtype=np.float32)
    ways = {
        "items at random": _best(chance),
        "the gallery's network alone": truth,
        "the client's network alone": search(alone, alone),
        "no alignment": search(alone, own),
        "ridge regression": search(centred(regressed(source, target, queries), there), own),
        "bridge": search(centred(fit_bridge(source, target).apply(queries), there), own),
    }
    return {way: judge(found, truth, labels[~known]) for way, found in ways.items()}


def features(extractors: Sequence[Extractor], most: int | None = None) -> tuple[list[Floats], NDArray[np.intp]]:
    """Return the features of all photographs, or of `most` a species, by each extractor, and their species."""
    folders = sorted(path for path in find(PHOTOS).iterdir() if path.is_dir())
    paths = [path for folder in folders for path in sorted(folder.glob("*.jpg"))[:most]]
    found: list[Floats] = []
    for extractor in extractors:
        made = gallery_features(paths, extractor)
        if made.skipped:
            raise ValueError(f"{len(made.skipped)} photographs cannot be read: {made.skipped[0][1]}")
        found.append(made.features)
    return found, np.unique([path.parent.name for path in paths], return_inverse=True)[1]


def cases() -> list[Case]:
    """Return one case: the features of both networks take nearly all of the time."""
    return [{"photographs": PHOTOS, "seeds": list(SEEDS)}]


def measure(case: Case) -> list[Row]:
    """Compare all ways, for every choice of anchors."""
    find(case["photographs"])  # says what is missing before weights are loaded
    (asking, holding), labels = features([MobileNetV2(), EfficientNetLite0()], MOST)
    return [
        {"seed": seed, "way": way, "queries": len(labels), **asdict(found)}
        for seed in case["seeds"]
        for way, found in compare(asking, holding, labels, seed).items()
    ]


def figures(rows: Sequence[Row]) -> "dict[str, Figure]":
    """Draw the three measures of every way."""
    from matplotlib.figure import Figure

    groups = {way: group for (way,), group in grouped(rows, "way").items()}
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    looks = {"recall": ("o", "blue"), "precision": ("s", "orange"), "agreement": ("^", "black")}
    for place, (name, (marker, colour)) in enumerate(looks.items()):
        found = [mean(row[name] for row in group) for group in groups.values()]
        errors = [[p.value - p.low for p in found], [p.high - p.value for p in found]]
        heights = [at + 0.18 * (place - 1) for at in range(len(groups))]
        axes.errorbar(
            [p.value for p in found],
            heights,
            xerr=errors,
            color=COLOURS[colour],
            marker=marker,
            linestyle="",
            capsize=2,
            label=MEASURES[name],
        )
    axes.set(xlabel=f"share, of {rows[0]['queries']} queries", xlim=(0, 1.03), ylim=(len(groups) - 0.5, -0.5))
    axes.set_yticks(range(len(groups)), list(groups))
    legend_below(figure, [axes])
    return {"ways": figure}


def tell(rows: Sequence[Row]) -> str:
    """Say what was found; every number is one of the rows."""
    groups = {way: group for (way,), group in grouped(rows, "way").items()}
    found = {way: {name: mean(row[name] for row in group) for name in MEASURES} for way, group in groups.items()}
    lines = [[way, *(_span(measures[name]) for name in MEASURES)] for way, measures in found.items()]
    bridge, alone, none, chance = (
        found[way] for way in ("bridge", "the client's network alone", "no alignment", "items at random")
    )
    worse = none["recall"].value < chance["recall"].value
    return "\n\n".join(
        [
            "![Recall, precision and agreement of six ways to search: the bridge comes close to the client's network "
            "alone, no alignment is as bad as chance](bridge-ways.svg)",
            table(["", *MEASURES.values()], lines),
            f"With the bridge, a query finds {bridge['agreement'].value:.1%} of what the gallery's network would have "
            f"found; the client's network finds {alone['agreement'].value:.1%} of it by itself. Without alignment "
            f"recall is {none['recall'].value:.3f}, {'below' if worse else 'not below'} the "
            f"{chance['recall'].value:.3f} of items at random.",
            "The bridge was chosen over ridge regression, and all components over fewer, by these same photographs, so "
            "its lead over the regression is somewhat flattered. The anchors are birds, too, of other species; anchors "
            "of another kind were not measured. [How to use it](../../howto/features.md).",
        ]
    )


def _span(found: Mean) -> str:
    return f"{found.value:.3f} ({found.low:.3f} to {found.high:.3f})"


STUDY = Study(
    name="bridge",
    title="Queries of one network against the gallery of another",
    about=(
        "MobileNetV2 asks a gallery of EfficientNet-Lite0. 600 photographs of 20 species of birds: half of the species "
        "are the public anchors, the other half gallery and queries (every photograph asks, itself left out), then the "
        "other way round. All features are centred by the mean of the anchors. A seed draws the halves; intervals are "
        "95% over seeds, which share their photographs. *Agreement* is the part of what the gallery's own network "
        "finds for the same photograph. Nothing is private here: the bridge is applied before a release."
    ),
    cases=cases,
    measure=measure,
    figures=figures,
    tell=tell,
    data=(f"{PHOTOS}/PROVENANCE.txt",),
    parameters={"items found": K, "anchors": "half of the species", "ridge penalties": "13, from 1e-4 to 100"},
    seeds=SEEDS,
)
