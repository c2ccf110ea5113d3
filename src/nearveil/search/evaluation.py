"""Evaluation of a retriever: true neighbours, recall, ceiling and floor."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import norm

from nearveil.cluster import LOCAL, Cluster, connect, cut_rows
from nearveil.gallery.answers import Answer
from nearveil.gallery.codes import Singles
from nearveil.mechanisms.base import check_labels
from nearveil.mechanisms.messages import candidate_count
from nearveil.privacy.checks import check_integer, check_rows
from nearveil.privacy.noise import Source
from nearveil.search.ceiling import Floats, best_channel, neighbor_ceiling
from nearveil.search.retriever import Retriever

Items = NDArray[np.intp]
_CELLS = 1 << 24  # entries of a matrix in memory at once


class Copies:
    """Groups of equal items in a gallery: the `point` of each item, in the order of their `first` items."""

    def __init__(self, gallery: Singles) -> None:
        rows = np.ascontiguousarray(gallery) + gallery.dtype.type(0)  # minus zero is zero
        whole = rows.view(np.dtype((np.void, rows.dtype.itemsize * rows.shape[1]))).ravel()
        _, first, inverse = np.unique(whole, return_index=True, return_inverse=True)
        self.first: Items = np.sort(first)
        self.point: Items = np.argsort(np.argsort(first))[inverse]
        self.sizes: Items = np.bincount(self.point)
        self._order: Items = np.argsort(self.point, kind="stable")
        self._start: Items = np.cumsum(self.sizes) - self.sizes

    def canonical(self, items: NDArray[np.integer]) -> Items:
        """Replace items by the first copies of their points, as many of each as are among `items`; sorted by point."""
        points, positions = np.sort(self.point[items], axis=-1), np.arange(items.shape[-1])
        starts = np.ones(points.shape, dtype=bool)
        starts[..., 1:] = points[..., 1:] != points[..., :-1]
        copy = positions - np.maximum.accumulate(np.where(starts, positions, 0), axis=-1)
        return np.asarray(self._order[self._start[points] + copy])

    def recall(self, truth: Items, items: NDArray[np.integer]) -> NDArray[np.float64]:
        """Return the fraction of each query's true neighbours in one answer to all, or in one answer to each query."""
        answers, recalls = self.canonical(items), np.empty(len(truth))
        if answers.ndim == 1:
            return np.asarray(np.isin(np.arange(len(self.point)), answers)[truth].mean(axis=1))
        for block in cut_rows(len(truth), max(1, _CELLS // len(self.point))):
            inside = np.zeros((len(truth[block]), len(self.point)), dtype=bool)
            np.put_along_axis(inside, answers[block], values=True, axis=1)
            recalls[block] = np.take_along_axis(inside, truth[block], axis=1).mean(axis=1)
        return recalls

    def expand(self, points: Items, sizes: Items, k: int) -> Items:
        """Return the first k items of ordered points, with `sizes` items of each."""
        ends, positions = np.cumsum(sizes, axis=1), np.arange(k)
        which = (ends[:, :, None] <= positions).sum(axis=1)
        chosen, before = (np.take_along_axis(table, which, axis=1) for table in (points, ends - sizes))
        return np.asarray(self._order[self._start[chosen] + positions - before])


def true_neighbors(
    queries: Singles, gallery: Singles, k: int, *, leave_out: bool = False, workers: Cluster = LOCAL
) -> Items:
    """Return the k items of highest inner product with each query, nearest first, then in the order of the gallery."""
    # With `leave_out`, query i is item i and not its own neighbour, but its copies are.
    copies = Copies(gallery)
    points = gallery[copies.first]
    blocks = cut_rows(len(queries), max(1, _CELLS // len(points)))
    arguments = queries, points, copies, k, leave_out
    neighbors = workers.map(_find_nearest, blocks, *arguments, stage="looking for true neighbours")
    return np.concatenate([np.empty((0, k), np.intp), *neighbors])


def _find_nearest(block: slice, queries: Singles, points: Singles, copies: Copies, k: int, leave_out: bool) -> Items:
    """Return the true neighbours of a block of queries."""
    scores = queries[block] @ points.T
    self_points = copies.point[block] if leave_out else np.full(len(scores), -1)
    alone = np.flatnonzero(leave_out & (copies.sizes[self_points] == 1))
    scores[alone, self_points[alone]] = -np.inf
    near = _find_highest(scores, min(k, len(points)))
    return copies.expand(near, copies.sizes[near] - (near == self_points[:, None]), k)


def _find_highest(scores: Singles, count: int) -> Items:
    """Return the positions of the highest scores of each row, highest first; among equal scores, the first."""
    least = np.partition(scores, -count, axis=1)[:, -count, None]
    above, level = scores > least, scores == least
    needed = count - above.sum(axis=1, keepdims=True)
    selected = above | (level & (np.cumsum(level, axis=1, dtype=np.int32) <= needed))
    near = np.nonzero(selected)[1].reshape(len(scores), count)
    order = np.argsort(-np.take_along_axis(scores, near, axis=1), axis=1, kind="stable")
    return np.take_along_axis(near, order, axis=1)


@dataclass(frozen=True)
class Estimate:
    """A figure with its confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True)
class Evaluation:
    """Results of :func:`evaluate`."""

    #: The fraction of the true k nearest items, by the retriever's metric, among the k results. Items with equal
    #: features are copies and count as equal.
    nn_recall: Estimate
    covered: Estimate  #: the fraction among the candidates: `nn_recall` without the loss by codes
    recall: Estimate | None  #: how often an item of the query's class is among the k results; None without labels
    candidates: float  #: the largest fraction of the gallery in an answer
    message_bytes: int  #: of the largest message
    answer_bytes: int  #: of the largest answer
    #: Theorem D for the mechanism's guarantee and the popularity of items; no private mechanism is expected above its
    #: high end on these queries. The interval covers the ceiling of their population (``docs/theory/ceiling.md``).
    ceiling: Estimate
    floor: Estimate  #: recall of the most popular items, without a message
    share: Estimate  #: `nn_recall` over the ceiling's value
    reach: float | None  #: the fraction of items in a set; None if a message can return any item
    k: int
    queries: int
    repeats: int
    confidence: float

    def __str__(self) -> str:
        rows = [
            (f"NN-recall@{self.k}", str(self.nn_recall)),
            ("  among candidates", str(self.covered)),
            ("  ceiling", str(self.ceiling)),
            ("  floor", str(self.floor)),
            ("  share of ceiling", str(self.share)),
            (f"Recall@{self.k}", "no labels" if self.recall is None else str(self.recall)),
            ("candidates", f"{self.candidates:.3f} of the gallery"),
            ("items in any set", "all" if self.reach is None else f"{self.reach:.3f} of the gallery"),
            ("bytes", f"{self.message_bytes:,} out, {self.answer_bytes:,} back"),
            ("queries", f"{self.queries:,} x {self.repeats}, intervals of {self.confidence:.0%}"),
        ]
        return "\n".join(f"{name:<20}{text}" for name, text in rows)


def evaluate(
    retriever: Retriever,
    queries: ArrayLike,
    query_labels: ArrayLike | None = None,
    *,
    k: int = 8,
    rng: Source | None = None,
    confidence: float = 0.95,
    repeats: int = 1,
    cluster: Any = None,
) -> Evaluation:
    """Measure a retriever on queries that are not in its gallery.

    The ceiling and the floor depend on the popularity of items. It is estimated from the gallery, with each item as a
    query that excludes itself; the test queries only raise the ceiling if they show that it must be higher. The floor
    is measured on the queries.

    Each query is searched `repeats` times; for studies, not for private rows. `query_labels`, together with the
    gallery's, give Recall@k. The workers of a `cluster` search true neighbours, most of the work; see
    :func:`nearveil.cluster.connect`.
    """
    if not 0 < confidence < 1:
        raise ValueError("confidence must be between 0 and 1")
    check_integer(repeats, "repeats", 1)
    gallery = retriever.features
    space = retriever.space
    rows = space.make_queries(space.encode(check_rows(queries, "queries"))).astype(np.float32)
    if query_labels is not None:
        if retriever.labels is None:
            raise ValueError("query_labels need the gallery's labels: call index(gallery, gallery_y)")
        query_labels = check_labels(query_labels, len(rows), "query_labels")
    if len(gallery) <= k:
        raise ValueError("k must be below the number of items of the gallery")
    with connect(cluster) as workers:
        truth = true_neighbors(rows, gallery, k, workers=workers)
        own_queries = space.make_queries(gallery).astype(np.float32)
        among_items = true_neighbors(own_queries, gallery, k, leave_out=True, workers=workers)
    copies = Copies(gallery)
    recalls, covered, hits = (np.zeros(len(rows)) for _ in range(3))
    message_bytes, answer_bytes, most = 0, 0, 0
    for _ in range(repeats):
        chosen, sizes, answers = retriever.search(queries, k, rng=rng)
        recalls += copies.recall(truth, chosen) / repeats
        covered += _measure_covered(copies, truth, answers) / repeats
        if retriever.labels is not None and query_labels is not None:
            hits += (retriever.labels[chosen] == query_labels[:, None]).any(axis=1) / repeats
        message_bytes = max(message_bytes, *sizes)
        answer_bytes = max(answer_bytes, *(answer.nbytes for answer in answers))
        most = max(most, *(len(answer.ids) for answer in answers))
    fraction = most / len(gallery)
    ceiling, floor = _find_limits(retriever, truth, among_items, fraction, confidence)
    recall = estimate_mean(recalls, confidence)
    top = max(ceiling.value, 1e-300)
    return Evaluation(
        nn_recall=recall,
        covered=estimate_mean(covered, confidence),
        recall=None if query_labels is None else estimate_mean(hits, confidence),
        candidates=fraction,
        message_bytes=message_bytes,
        answer_bytes=answer_bytes,
        ceiling=ceiling,
        floor=floor,
        share=Estimate(recall.value / top, recall.low / top, recall.high / top),
        reach=getattr(retriever.mechanism, "reach_", None),
        k=k,
        queries=len(rows),
        repeats=repeats,
        confidence=confidence,
    )


def _find_limits(
    retriever: Retriever, truth: Items, among_items: Items, fraction: float, confidence: float
) -> tuple[Estimate, Estimate]:
    """Return ceiling and floor; `among_items` are the neighbours of the gallery's items among themselves."""
    gallery, guarantee = retriever.features, retriever.guarantee
    # A guarantee for the database does not limit messages.
    epsilon = guarantee.epsilon if guarantee.protects == "query" else np.inf
    size = len(gallery)

    def top(neighbors: Items) -> float:
        return neighbor_ceiling(epsilon, fraction, _count_neighbors(neighbors, size), guarantee.delta)

    def chances(neighbors: Items) -> Floats:
        return best_channel(epsilon, fraction, _count_neighbors(neighbors, size)).chances

    # Cross-validation: the optimum of one half is feasible for the other half, so this is not too high.
    halves = truth[::2], truth[1::2]
    crossed = sum(chances(fit)[test].sum() for fit, test in (halves, halves[::-1]) if len(fit)) / truth.size
    value = max(top(among_items), crossed)
    # So is the gallery's optimum. On the data that they are fitted to, optima are not too low.
    best = chances(among_items)
    low = estimate_mean(best[truth].mean(axis=1), confidence).low
    above = estimate_mean(best[among_items].mean(axis=1), confidence)
    high = min(1.0, max(value + above.high - above.value, top(truth)))
    popular = np.argsort(-_count_neighbors(among_items, size), kind="stable")[: candidate_count(fraction, size)]
    floor = estimate_mean(np.isin(truth, popular).mean(axis=1), confidence)
    return Estimate(value, min(low, value), high), floor


def _count_neighbors(neighbors: Items, size: int) -> NDArray[np.int64]:
    """Return how often each item is a neighbour."""
    return np.bincount(neighbors.ravel(), minlength=size)


def _measure_covered(copies: Copies, truth: Items, answers: list[Answer]) -> Floats:
    """Return the fraction of the true neighbours in each answer; queries that share an answer are grouped."""
    groups: dict[int, list[int]] = {}
    for row, answer in enumerate(answers):
        groups.setdefault(id(answer), []).append(row)
    covered = np.empty(len(answers))
    for rows in groups.values():
        covered[rows] = copies.recall(truth[rows], answers[rows[0]].ids)
    return covered


def estimate_mean(values: Floats, confidence: float) -> Estimate:
    """Return the mean of values in [0, 1] with an Agresti-Coull interval, which never has width zero."""
    z = float(norm.ppf((1 + confidence) / 2))
    total = len(values) + z * z
    mean = (values.sum() + z * z / 2) / total
    variance = ((values - mean) ** 2).sum() + z * z / 2 * (mean**2 + (1 - mean) ** 2)
    half = z * np.sqrt(variance) / total
    value = float(values.mean())
    return Estimate(value, float(min(value, max(0.0, mean - half))), float(max(value, min(1.0, mean + half))))
