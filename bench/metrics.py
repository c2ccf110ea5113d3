"""Measure the metric in every way to search, beside the centred cosine of version 0.2, by which all of them ranked.

The truth is a plain search by the metric of the vectors as given. A local copy has whole features; a message names a
set of a map that reaches every item, and its recall is the expectation over the channel; a sealed question compares the
items of the probed cells. Data that is not on this machine is left out; clusters need none.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import faiss
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from nearveil.cluster import SpreadRows
from nearveil.features import load_image
from nearveil.features.backbones import EfficientNetLite0
from nearveil.mechanisms import Covers
from nearveil.metrics import CENTRED, Metric, ScoreSpace, scale_to_unit
from nearveil.privacy.noise import unsafe_seeded
from nearveil.sealed import SealedClient, SealedIndex
from nearveil.sealed.client import make_messages
from nearveil.search import Retriever, evaluate
from studies.data import DataMissingError, find, load_features

K, QUERIES, EPSILON, CANDIDATES = 10, 400, 4.0, 0.1
FETCHED = 32  # records of a sealed question
Rows = NDArray[np.float32]


@dataclass(frozen=True)
class Line:
    """Shares of the K nearest by the metric: with the metric, and with the centred cosine (`old`)."""

    data: str
    items: int
    metric: Metric
    copy: float
    copy_old: float
    sealed: float
    sealed_old: float
    sealed_within: float  # of the nearest inside the probed cells
    message: float
    message_old: float


def load_glove(count: int) -> Rows:
    """Return word vectors of GloVe as published, drawn from all."""
    with np.load(find("glove100/glove100.npz")) as arrays:
        vectors = arrays["vectors"]
    chosen = np.sort(np.random.default_rng(1).permutation(len(vectors))[:count])
    return np.asarray(vectors[chosen], np.float32)


def load_pixels(count: int) -> Rows:
    """Return images of MNIST as rows of pixels."""
    with np.load(next(find("mnist").glob("*.npz"))) as arrays:
        images = max((arrays[name] for name in arrays.files), key=lambda array: array.size)
    return np.asarray(images[:count].reshape(min(count, len(images)), -1), np.float32)


def load_birds(count: int) -> Rows:
    """Return features of birds, neither centred nor of norm one."""
    return load_features("cub200_cropped_lite0").features[:count]


def draw_clusters(count: int, dimension: int = 384) -> Rows:
    """Draw clusters around a strong mean."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(60, dimension))
    rows = centres[rng.integers(0, 60, count)] + rng.normal(size=(count, dimension)) + 2 * rng.normal(size=dimension)
    return rows.astype(np.float32)


CASES: dict[str, tuple[Callable[[], Rows], Metric]] = {
    "GloVe-100 words": (lambda: load_glove(41_429 + QUERIES), "cosine"),
    "GloVe-100, euclidean": (lambda: load_glove(20_000 + QUERIES), "euclidean"),
    "GloVe-100, dot product": (lambda: load_glove(20_000 + QUERIES), "dot"),
    "CUB birds, EfficientNet-Lite0": (lambda: load_birds(10_940 + QUERIES), "cosine"),
    "MNIST pixels": (lambda: load_pixels(20_000 + QUERIES), "cosine"),
    "clusters with a strong mean, 384 dimensions": (lambda: draw_clusters(9940 + QUERIES), "cosine"),
}  # fmt: skip


def rank_dense(metric: Metric, queries: Rows, gallery: Rows) -> NDArray[np.int64]:
    """Return the K nearest items of each query, by 64-bit scores of the best by 32-bit ones."""
    a, b = queries.astype(np.float64), gallery.astype(np.float64)
    if metric == "cosine":
        a, b = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (a, b))
    nearest = []
    for row in a:
        values = -np.square(b - row).sum(axis=1) if metric == "euclidean" else b @ row
        nearest.append(np.argsort(-values, kind="stable")[:K])
    return np.stack(nearest)


class Search:
    """A gallery as one metric encodes it, and the queries."""

    def __init__(self, metric: Metric, gallery: Rows, queries: Rows) -> None:
        if metric == CENTRED:  # version 0.2 stored rows of norm one
            gallery, queries = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (gallery, queries))
        self.space = ScoreSpace.fit(metric, gallery)
        self.items = self.space.encode(gallery).astype(np.float32)
        self.encoded = self.space.encode(queries)
        self.rows = self.space.make_queries(self.encoded)

    def rank(self, row: int, candidates: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the best K of candidates, as a client ranks whole features."""
        scores = self.items[candidates].astype(np.float64) @ self.rows[row]
        return candidates[np.argsort(-scores, kind="stable")[:K]]

    def measure_copy(self, truth: NDArray[np.int64]) -> float:
        """Return the recall of a search in all items."""
        near = faiss.knn(self.rows.astype(np.float32), self.items, FETCHED, metric=faiss.METRIC_INNER_PRODUCT)[1]
        return share(truth, [self.rank(row, candidates) for row, candidates in enumerate(near)])

    def measure_message(self, truth: NDArray[np.int64]) -> float:
        """Return the expected recall of one message, with a map that reaches every item."""
        covers = Covers(EPSILON, CANDIDATES, reach=1.0).fit_space(self.space)
        covers = covers.index_features(SpreadRows.cut(self.items), report=None)
        good, hit = covers.map_.choose(self.space.make_directions(self.encoded)), covers._channel.hit
        sets = np.split(covers.members_.indices.astype(np.int64), covers.members_.indptr[1:-1])
        recalls = np.array(
            [[share(truth[[row]], [self.rank(row, items)]) for items in sets] for row in range(len(truth))]
        )
        right = recalls[np.arange(len(truth)), good]
        other = (recalls.sum(axis=1) - right) / (len(sets) - 1)
        return float((hit * right + (1 - hit) * other).mean())

    def measure_sealed(self, truth: NDArray[np.int64]) -> tuple[float, float]:
        """Return the recall of sealed questions, and its ratio to the share inside the probed cells."""
        index = SealedIndex.build(
            self.items, normalize=False, axis=self.space.axis, by_direction=self.space.metric == "dot"
        )
        layout, probes = index.layout, self.space.make_probes(self.encoded)
        client = SealedClient(layout.to_bytes(), index.get_public_tokens())
        results, inside = [], []
        for row, query in enumerate(self.rows):
            client.prepare(1, index.answer)
            question = client.ask(query, probes[row])
            matches = client.read_scores(question, index.answer(question.data), FETCHED)
            results.append(self.rank(row, np.array([index.get_item(match.position) for match in matches])))
            cells = np.arange(layout.n_colours) * layout.cells_per_colour + make_messages(layout, query, probes[row])[1]
            inside.append(index._items[cells].ravel())
        recall = share(truth, results)
        return recall, recall / max(share(truth, inside), 1e-9)


def share(truth: NDArray[np.int64], results: list[NDArray[np.int64]]) -> float:
    """Return the part of the true neighbours among results."""
    return float(np.mean([np.isin(near, items).mean() for near, items in zip(truth, results, strict=True)]))


def measure(name: str) -> Line:
    """Measure one data set."""
    load, metric = CASES[name]
    rows = load()
    rows = rows[np.random.default_rng(0).permutation(len(rows))]
    queries, gallery = rows[:QUERIES], rows[QUERIES:]
    truth = rank_dense(metric, queries, gallery)
    new, old = Search(metric, gallery, queries), Search(CENTRED, gallery, queries)
    sealed, within = new.measure_sealed(truth)
    return Line(
        name, len(gallery), metric, new.measure_copy(truth), old.measure_copy(truth),
        sealed, old.measure_sealed(truth)[0], within, new.measure_message(truth), old.measure_message(truth),
    )  # fmt: skip


def compare_shares() -> Iterator[str]:
    """Yield the share of the ceiling by the metric and by the centred cosine, with maps that reach every item."""
    for name in ("cub200_cropped_lite0", "cars196_cropped_lite0"):
        try:
            stored = load_features(name)
        except DataMissingError as missing:
            yield str(missing)
            continue
        rows = stored.features[stored.labels >= np.unique(stored.labels).size // 2]
        public = stored.features[stored.labels < np.unique(stored.labels).size // 2]
        rows = rows[np.random.default_rng(0).permutation(len(rows))]
        for epsilon in (2.0, EPSILON):
            for metric in ("cosine", CENTRED):
                mechanism = Covers(epsilon, CANDIDATES, reach=1.0)
                retriever = Retriever(mechanism, code_bytes=None, metric=metric).fit(public).index(rows[800:])
                found = evaluate(retriever, rows[:800], rng=unsafe_seeded(0), repeats=5)
                yield (
                    f"| {name} | {epsilon:g} | {metric} | {found.nn_recall.value:.3f} | {found.ceiling.value:.3f} | "
                    f"{found.share.value:.3f} ({found.share.low:.3f} to {found.share.high:.3f}) | {found.reach:g} |"
                )


def compare_photographs() -> Iterator[str]:
    """Yield how features of photographs retrieve their class and their changed copies, as given and centred."""
    features = {name: load_features(name) for name in ("cub200_cropped_lite0", "cars196_cropped_lite0")}
    public = {
        name: found.features[found.labels < np.unique(found.labels).size // 2] for name, found in features.items()
    }
    both = np.concatenate(list(public.values())).mean(axis=0)
    for name, found in features.items():
        tested = found.labels >= np.unique(found.labels).size // 2
        rows, labels = found.features[tested], found.labels[tested]
        for kind, mean in {"as given": 0 * both, "less the mean of the public classes": public[name].mean(axis=0),
                           "less the mean of public birds and cars": both}.items():  # fmt: skip
            unit = scale_to_unit((rows - mean).astype(np.float64))
            scores = unit @ unit.T
            np.fill_diagonal(scores, -2)
            same = labels[np.argsort(-scores, axis=1)[:, :8]] == labels[:, None]
            yield f"| {name}, classes | {kind} | {same[:, 0].mean():.3f} | {same.mean():.3f} |"
    pictures = [load_image(path) for path in sorted(find("birds_photos").rglob("*.jpg"))]
    extractor = EfficientNetLite0()
    rows = extractor.extract(pictures).astype(np.float64)
    for change, changed in {"cropped by a fifth, mirrored": _crop, "of 40 pixels": _shrink}.items():
        queries = extractor.extract([changed(picture) for picture in pictures]).astype(np.float64)
        for kind, mean in {"as given": 0 * both, "less the mean of public birds and cars": scale_to_unit(both[None])[0],
                           "less the mean of the gallery": rows.mean(axis=0)}.items():  # fmt: skip
            near = np.argsort(-scale_to_unit(queries - mean) @ scale_to_unit(rows - mean).T, axis=1)
            hits = near[:, :8] == np.arange(len(rows))[:, None]
            shares = f"{hits[:, 0].mean():.3f} | {hits.any(axis=1).mean():.3f}"
            yield f"| {len(rows)} photographs, {change} | {kind} | {shares} |"


def _crop(picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
    down, across = picture.shape[0] // 5, picture.shape[1] // 5
    return np.ascontiguousarray(picture[down:, across:][:, ::-1])


def _shrink(picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.asarray(Image.fromarray(picture).resize((40, 40)))


def main() -> None:
    """Print tables, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--shares", action="store_true", help="compare shares of the ceiling on CUB and Cars instead")
    parser.add_argument("--photographs", action="store_true", help="compare features of photographs, centred or not")
    parser.add_argument("--out", type=Path, help="folder for metrics.json")
    arguments = parser.parse_args()
    if arguments.photographs:
        print("| data | features | the nearest | of the 8 nearest |\n" + "|---" * 4 + "|")
        for text in compare_photographs():
            print(text, flush=True)
        return
    if arguments.shares:
        print("| data | epsilon | metric | NN-recall@8 | ceiling | share of the ceiling | reach |\n" + "|---" * 7 + "|")
        for text in compare_shares():
            print(text, flush=True)
        return
    print("| data | items | metric | copy | (0.2) | sealed | (0.2) | of its cells | message, epsilon 4 | (0.2) |")
    print("|---" * 10 + "|", flush=True)
    lines = []
    for name in arguments.only:
        try:
            line = measure(name)
        except DataMissingError as missing:
            print(missing)
            continue
        lines.append(asdict(line))
        shares = [
            line.copy,
            line.copy_old,
            line.sealed,
            line.sealed_old,
            line.sealed_within,
            line.message,
            line.message_old,
        ]
        print(
            f"| {name} | {line.items:,} | {line.metric} | " + " | ".join(f"{value:.3f}" for value in shares) + " |",
            flush=True,
        )
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        report = {"lines": lines, "cores": os.cpu_count(), "queries": QUERIES, "k": K}
        (arguments.out / "metrics.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
