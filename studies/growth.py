"""What covers find as a gallery grows, with answers of one size in items; and in one of 60,000 digits."""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any

import faiss
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray

from nearveil.cluster import SpreadRows
from nearveil.mechanisms import Covers
from nearveil.mechanisms.covers import learning
from nearveil.search.ceiling import best_channel
from studies import _figures as draw
from studies._study import Case, Row, Study, select
from studies.covers import expect_over_channel
from studies.data import find

WHOLE = 60_000  # digits; larger galleries are made of them
SIZES = {"digits as they are": (5_000, 20_000, WHOLE), "deformed digits": (WHOLE, 200_000, 1_000_000)}
ANSWER = 600  # items
QUERIES = 2000
K = 8
TURN, ZOOM, SHIFT = 12, 0.1, 2  # degrees, a part, and pixels: the largest
DIMENSION = 64
FILES = ("mnist/mnist.npz",)
SETTINGS = ((0.1, 4.0), (0.1, 2.0), (0.02, 4.0))  # f and epsilon, for the digits as they are
DIGIT_QUERIES = 4000
SEEDS = (0, 1)
_SOME = 20_000  # images that the directions come from
_POPULAR = 250_000  # items whose neighbours are counted
_AT_ONCE = 20_000

Singles = NDArray[np.float32]


def _deform(images: NDArray[np.uint8], count: int, seed: int) -> Iterator[Singles]:
    """Yield rows of images, all of them in turn, each turned, scaled and shifted in its own way."""
    import torch

    rng, half = np.random.default_rng(seed), images.shape[1] / 2
    for start in range(0, count, _AT_ONCE):
        size = min(_AT_ONCE, count - start)
        angle, scale = np.radians(rng.uniform(-TURN, TURN, size)), rng.uniform(1 - ZOOM, 1 + ZOOM, size)
        moves = np.empty((size, 2, 3), np.float32)
        moves[:, 0, 0] = moves[:, 1, 1] = scale * np.cos(angle)
        moves[:, 1, 0] = scale * np.sin(angle)
        moves[:, 0, 1] = -moves[:, 1, 0]
        moves[:, :, 2] = rng.uniform(-SHIFT / half, SHIFT / half, (size, 2))
        chosen = torch.from_numpy(images[np.arange(start, start + size) % len(images)][:, None].astype(np.float32))
        grid = torch.nn.functional.affine_grid(torch.from_numpy(moves), list(chosen.shape), align_corners=False)
        yield torch.nn.functional.grid_sample(chosen, grid, align_corners=False).numpy().reshape(size, -1)


def _read_digits(seed: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return training and test digits, both in a random order."""
    rng = np.random.default_rng(seed)
    with np.load(find(FILES[0])) as arrays:
        train, test = arrays["x_train"], arrays["x_test"]
    return train[rng.permutation(len(train))], test[rng.permutation(len(test))]


def _learn_projection(rows: Singles) -> Callable[[Iterable[Singles]], Singles]:
    """Return a function that projects blocks of rows to 64 principal directions."""
    mean = rows.mean(axis=0)
    directions = learning.projection(rows - mean, DIMENSION)
    return lambda blocks: np.concatenate([(block - mean) @ directions for block in blocks])


@lru_cache(maxsize=1)
def load_digits(seed: int, n: int = WHOLE, queries: int = DIGIT_QUERIES) -> tuple[Singles, Singles]:
    """Return training digits as a gallery, and some of the test digits, in 64 principal directions."""
    gallery, test = (images.reshape(len(images), -1).astype(np.float32) for images in _read_digits(seed))
    project = _learn_projection(gallery[:n])
    return project([gallery[:n]]), project([test[:queries]])


@lru_cache(maxsize=1)
def load_deformed(n: int) -> tuple[Singles, Singles]:
    """Return a gallery of deformed training digits and deformed test digits, in 64 principal directions."""
    train, test = _read_digits(0)
    project = _learn_projection(next(_deform(train, _SOME, 1)))
    return project(_deform(train, n, 1)), project(_deform(test, QUERIES, 2))


def cases() -> list[Case]:
    """Return every size; then digits as they are, in every setting."""
    growth = ({"part": "growth", "data": data, "items": items} for data, sizes in SIZES.items() for items in sizes)
    digits = ({"part": "digits", "seed": seed, "f": f, "epsilon": epsilon} for seed in SEEDS for f, epsilon in SETTINGS)
    return [*growth, *digits]


def measure(case: Case) -> list[Row]:
    """Learn covers; for a gallery that grows, at the epsilon at which an answer of 600 items begins to work."""
    if case["part"] == "digits":
        results = search(*load_digits(case["seed"]), case["epsilon"], case["f"])
        return [{**results, "part": "digits", "seed": case["seed"]}]
    n, data = case["items"], case["data"]
    rows = load_deformed(n) if data == "deformed digits" else load_digits(0, n, QUERIES)
    return [{**search(*rows, round(math.log(n / ANSWER), 2), ANSWER / n), "part": "growth", "data": data, "seed": 0}]


def search(gallery: Singles, queries: Singles, epsilon: float, fraction: float) -> Row:
    """Return what covers find, and what no private message passes."""
    n = len(gallery)
    covers = Covers(epsilon, fraction).fit(gallery[:_SOME]).index(gallery)
    items, rows = covers.gallery_features(gallery), covers.features(queries)
    exact = faiss.IndexFlatIP(DIMENSION)
    exact.add(items)
    truth = exact.search(rows.astype(np.float32), K)[1]
    sample = np.sort(np.random.default_rng(1).permutation(n)[:_POPULAR])
    near = learning.neighbor_lists(SpreadRows.cut(items), covers.space_, sample, K)
    best = best_channel(epsilon, fraction, np.bincount(near.ravel(), minlength=n))
    memberships = covers.members_.T.tocsr()
    coverage = sum(memberships[truth[:, rank]].toarray().astype(np.float32) for rank in range(K)) / K
    recall = expect_over_channel(covers, coverage, rows)
    return {
        "items": n,
        "f": fraction,
        "epsilon": epsilon,
        "n_sets": covers.map_.n_sets,
        "recall": recall,
        "ceiling": best.ceiling,
        "lower": float(best.chances[truth].mean()),
        "share": recall / best.ceiling,
        "known": expect_over_channel(covers, coverage, None) / best.ceiling,
        "bytes": covers.map_.nbytes,
        "reach": covers.reach_,
    }


def figures(rows: pd.DataFrame) -> dict[str, Figure]:
    """Draw the share of the ceiling over the size of the gallery."""
    figure, ((axes,),) = draw.make_panels(1, 1, (6.4, 3.8))
    growth = select(rows, part="growth")
    for position, (data, part) in enumerate(growth.groupby("data", sort=False)):
        sizes = part.set_index("items")
        band = {"alpha": 0.2, "color": "0.4", "label": "the ceiling lies between its two estimates"}
        axes.fill_between(sizes.index, sizes["share"], sizes["recall"] / sizes["lower"], **band)
        draw.curve(axes, str(data), draw.without_interval(sizes["share"]), index=position, label=f"covers, {data}")
        reach: Any = {"color": "0.5", "linestyle": "--", "marker": "s", "label": "items in any set"}
        axes.plot(sizes.index, sizes["reach"], **reach)
    x = f"items of the gallery; answers of {ANSWER}, epsilon ln(items / {ANSWER})"
    axes.set(xscale="log", ylim=(0, 1.03), xlabel=x)
    draw.set_ticks(axes, sorted(set(growth["items"])), [f"{n:,}" for n in sorted(set(growth["items"]))])
    draw.finish(figure, axes, "share of the ceiling", ncols=2)
    return {"shares": figure}


def facts(rows: pd.DataFrame) -> dict[str, Any]:
    """Return the tables."""
    growth = select(rows, part="growth")
    at_whole = select(growth, items=WHOLE)
    lines, digits = _show(growth), _show(select(rows, part="digits"))
    ends = {"first": growth.iloc[0], "last": growth.iloc[-1]}
    return {**ends, "whole": at_whole.iloc[0], "deformed": at_whole.iloc[-1], "lines": lines, "digits": digits}


def _show(rows: pd.DataFrame) -> pd.DataFrame:
    shown = rows.assign(
        items=rows["items"].map("{:,}".format),
        f=rows["f"].map("{:.2%}".format),
        upper=(rows["recall"] / rows["lower"]).map("{:.3f}".format),
        **{name: rows[name].map("{:.3f}".format) for name in ("recall", "ceiling", "share", "known")},
        bytes=(rows["bytes"] / 1e6).map("{:.1f}".format),
        reach=rows["reach"].map("{:.0%}".format),
    )
    names = {"f": "answer", "n_sets": "sets", "recall": "NN-recall@8", "ceiling": "ceiling, plug-in",
             "known": "true good set", "upper": "share of the lower estimate", "reach": "items in any set",
             "bytes": "map, MB"}  # fmt: skip
    columns = ["data" if "data" in rows else "seed", "items", "f", "epsilon", "n_sets", "recall", "ceiling", "share"]
    return shown[[*columns, "known", "upper", "reach", "bytes"]].rename(columns=names)


PARAMETERS = {
    "answer": ANSWER,
    "k": K,
    "queries": QUERIES,
    "dimensions": DIMENSION,
    "largest turn": f"{TURN} degrees",
    "largest scaling": ZOOM,
    "largest shift": f"{SHIFT} pixels",
}
STUDY = Study("growth", cases, measure, figures, facts, FILES, PARAMETERS, SEEDS)
