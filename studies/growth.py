"""What covers find as a gallery grows, with answers of one size in items; and in one of 60,000 digits."""

import math
from functools import lru_cache
from typing import Any

import faiss
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray

from nearveil.mechanisms import Covers
from nearveil.mechanisms.covers import learning
from nearveil.search.ceiling import best_channel
from studies import _figures as draw
from studies._study import Case, Row, Study, select
from studies.data import find

SIZES = (5_000, 20_000, 60_000)
ANSWER = 600  # items
QUERIES = 2000
K = 8
MOVES = 5  # places along each axis: up to two pixels to each side
DIMENSION = 64
FILES = ("mnist/mnist.npz",)
SETTINGS = ((0.1, 4.0), (0.1, 2.0), (0.02, 4.0))  # f and epsilon, for the digits as they are
DIGIT_QUERIES = 4000
SEEDS = (0, 1)
_SOME = 20_000  # images that the directions come from
_POPULAR = 250_000  # items whose neighbours are counted
_AT_ONCE = 20_000

Singles = NDArray[np.float32]


def _move(images: NDArray[np.uint8], chosen: NDArray[np.int64]) -> Singles:
    """Return images, each moved to its own place, as rows."""
    rows = np.empty((len(chosen), images.shape[1] * images.shape[2]), np.float32)
    numbers, places = np.divmod(chosen, MOVES**2)
    for place in range(MOVES**2):
        down, across = divmod(place, MOVES)
        mine = places == place
        moved = np.roll(images[numbers[mine]], (down - MOVES // 2, across - MOVES // 2), axis=(1, 2))
        rows[mine] = moved.reshape(len(moved), -1)
    return rows


def _draw(images: NDArray[np.uint8], n: int) -> NDArray[np.int64]:
    return np.random.default_rng(0).permutation(len(images) * MOVES**2)[:n]


@lru_cache(maxsize=1)
def load_digits(seed: int) -> tuple[Singles, Singles]:
    """Return all training digits in another order, and some of the test digits, in 64 principal directions."""
    rng = np.random.default_rng(seed)
    with np.load(find(FILES[0])) as arrays:
        train, test = (arrays[name].reshape(len(arrays[name]), -1).astype(np.float32) for name in ("x_train", "x_test"))
    gallery, queries = train[rng.permutation(len(train))], test[rng.permutation(len(test))[:DIGIT_QUERIES]]
    mean = gallery.mean(axis=0)
    directions = learning.projection(gallery - mean, DIMENSION)
    return (gallery - mean) @ directions, (queries - mean) @ directions


@lru_cache(maxsize=1)
def load_moved(n: int) -> tuple[Singles, Singles]:
    """Return a gallery of moved digits and queries of other writers, in 64 principal directions."""
    with np.load(find(FILES[0])) as arrays:
        train, test = arrays["x_train"], arrays["x_test"]
    some = _move(train, _draw(train, _SOME))
    mean = some.mean(axis=0)
    directions = learning.projection(some - mean, DIMENSION)

    def place(images: NDArray[np.uint8], count: int) -> Singles:
        chosen = _draw(images, count)
        parts = [chosen[start : start + _AT_ONCE] for start in range(0, count, _AT_ONCE)]
        return np.concatenate([(_move(images, part) - mean) @ directions for part in parts])

    return place(train, n), place(test, QUERIES)


def cases() -> list[Case]:
    """Return every size; then digits as they are, in every setting."""
    return [
        *({"part": "growth", "items": items} for items in SIZES),
        *({"part": "digits", "seed": seed, "f": f, "epsilon": epsilon} for seed in SEEDS for f, epsilon in SETTINGS),
    ]


def measure(case: Case) -> list[Row]:
    """Learn covers; for a gallery that grows, at the epsilon at which an answer of 600 items begins to work."""
    if case["part"] == "digits":
        found = search(*load_digits(case["seed"]), case["epsilon"], case["f"])
        return [{**found, "part": "digits", "seed": case["seed"]}]
    n = case["items"]
    return [{**search(*load_moved(n), round(math.log(n / ANSWER), 2), ANSWER / n), "part": "growth", "seed": 0}]


def search(gallery: Singles, queries: Singles, epsilon: float, fraction: float) -> Row:
    """Return what covers find, and what no private message passes."""
    n = len(gallery)
    covers = Covers(epsilon, fraction).fit(gallery[:_SOME]).index(gallery)
    items, rows = covers.features(gallery).astype(np.float32), covers.features(queries)
    exact = faiss.IndexFlatIP(DIMENSION)
    exact.add(items)
    truth = exact.search(rows.astype(np.float32), K)[1]
    asked = np.sort(np.random.default_rng(1).permutation(n)[:_POPULAR])
    near = learning.neighbor_lists(items, asked, K)
    best = best_channel(epsilon, fraction, np.bincount(near.ravel(), minlength=n))
    held = covers.members_.T.tocsr()
    found = sum(held[truth[:, rank]].toarray().astype(np.float32) for rank in range(K)) / K
    good, number = covers.map_.choose(rows), covers.map_.n_sets
    own, hit = found[np.arange(len(rows)), good], covers._channel(covers.map_).hit
    recall = float(np.mean(hit * own + (1 - hit) * (found.sum(axis=1) - own) / (number - 1)))
    return {
        "items": n,
        "f": fraction,
        "epsilon": epsilon,
        "n_sets": number,
        "recall": recall,
        "ceiling": best.ceiling,
        "lower": float(best.chances[truth].mean()),
        "share": recall / best.ceiling,
        "reach": covers.reach_,
    }


def figures(rows: pd.DataFrame) -> dict[str, Figure]:
    """Draw the share of the ceiling over the size of the gallery."""
    figure, panels = draw.make_panels(1, 1, (6.0, 3.6))
    axes, sizes = panels[0, 0], select(rows, part="growth").set_index("items")
    axes.fill_between(sizes.index, sizes["share"], sizes["recall"] / sizes["lower"], alpha=0.2, color="0.4",
                      label="the ceiling lies between its two estimates")  # fmt: skip
    draw.curve(axes, "covers", draw.without_interval(sizes["share"]))
    axes.plot(sizes.index, sizes["reach"], color="0.5", linestyle="--", marker="s", label="items in any set")
    axes.set_xscale("log")
    draw.set_ticks(axes, list(sizes.index), [f"{n:,}" for n in sizes.index])
    axes.set_ylim(0, 1.03)
    axes.set_xlabel(f"items of the gallery; answers of {ANSWER}, epsilon ln(items / {ANSWER})")
    axes.set_ylabel("share of the ceiling")
    draw.legend_below(figure, [axes], ncols=3)
    return {"shares": figure}


def facts(rows: pd.DataFrame) -> dict[str, Any]:
    """Return the tables."""
    growth = select(rows, part="growth")
    return {
        "lines": _show(growth),
        "digits": _show(select(rows, part="digits")),
        "first": growth.iloc[0],
        "last": growth.iloc[-1],
    }


def _show(rows: pd.DataFrame) -> pd.DataFrame:
    shown = rows.assign(
        items=rows["items"].map("{:,}".format),
        f=rows["f"].map("{:.2%}".format),
        upper=(rows["recall"] / rows["lower"]).map("{:.3f}".format),
        **{name: rows[name].map("{:.3f}".format) for name in ("recall", "ceiling", "share")},
        reach=rows["reach"].map("{:.0%}".format),
    )
    names = {
        "seed": "seed",
        "items": "items",
        "f": "answer",
        "epsilon": "epsilon",
        "n_sets": "sets",
        "recall": "NN-recall@8",
        "ceiling": "ceiling, plug-in",
        "share": "share",
        "upper": "share of the lower estimate",
        "reach": "items in any set",
    }
    return shown[list(names)].rename(columns=names)


PARAMETERS = {"answer": ANSWER, "k": K, "queries": QUERIES, "dimensions": DIMENSION, "moves": MOVES}
STUDY = Study("growth", cases, measure, figures, facts, FILES, PARAMETERS, SEEDS)
