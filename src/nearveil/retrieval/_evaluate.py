"""What a retriever finds, between what any private one can find and what none needs to ask for."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import norm

from nearveil.privacy.noise import Source
from nearveil.release._base import candidate_count, checked_labels
from nearveil.retrieval._answer import Answer
from nearveil.retrieval._codes import Singles
from nearveil.retrieval._retriever import Retriever
from nearveil.retrieval.ceiling import best_channel, neighbor_ceiling

Floats = NDArray[np.float64]
_BLOCK = 1024
_TIE = 1e-6  # cosines in single precision that differ by less are equal


@dataclass(frozen=True)
class Estimate:
    """A figure with its confidence interval.

    Attributes
    ----------
    value, low, high : float
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True)
class Evaluation:
    """What :func:`evaluate` found.

    Attributes
    ----------
    nn_recall : Estimate
        The part of the true k nearest items, by cosine of centred features, among the k that were chosen.
    covered : Estimate
        The part of them among the candidates: `nn_recall` without what the codes lose.
    recall : Estimate or None
        How often an item of the query's class is among the k chosen; None without labels.
    candidates : float
        The largest fraction of the gallery that an answer held.
    message_bytes, answer_bytes : int
        The largest of each.
    ceiling : Estimate
        Theorem D for the mechanism's promise and the popularity of items. The interval brackets that of
        the population of queries (``docs/theory/ceiling.md``).
    floor : Estimate
        What the most popular items would find, sent to everybody without asking.
    share : Estimate
        `nn_recall` over the ceiling's value.
    k, queries, repeats : int
    confidence : float
    """

    nn_recall: Estimate
    covered: Estimate
    recall: Estimate | None
    candidates: float
    message_bytes: int
    answer_bytes: int
    ceiling: Estimate
    floor: Estimate
    share: Estimate
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
) -> Evaluation:
    """Measure a retriever on queries that are not in its gallery.

    The ceiling and the floor need to know how popular items are. Their popularity is that among the
    gallery's own items, each asked for with itself left out: there are many, and the test's queries
    have no part in it. The floor is then measured on the queries.

    Parameters
    ----------
    retriever : Retriever
        With its gallery.
    queries : array-like of shape (n, d)
        Each is asked `repeats` times; for studies, not for private rows.
    query_labels : array-like of shape (n,), optional
        For Recall@k, together with the gallery's labels.
    k : int, default=8
    rng : Source, optional
    confidence : float, default=0.95
        Of every interval.
    repeats : int, default=1

    Returns
    -------
    Evaluation
    """
    if not 0 < confidence < 1:
        raise ValueError("confidence must be between 0 and 1")
    if isinstance(repeats, bool) or not isinstance(repeats, (int, np.integer)) or repeats < 1:
        raise ValueError("repeats must be a whole number of at least 1")
    gallery = retriever.features
    wanted = retriever.mechanism.features(queries, "queries").astype(np.float32)
    labels = _labels(retriever, query_labels, len(wanted))
    if len(gallery) <= k:
        raise ValueError("k must be below the number of items of the gallery")
    truth = true_neighbors(wanted, gallery, k)
    # Whatever is as near as the k-th true neighbour is one: galleries hold duplicates.
    least = np.einsum("nd,nkd->nk", wanted, gallery[truth]).min(axis=1) - _TIE
    found, covered, hits = (np.zeros(len(wanted)) for _ in range(3))
    message_bytes, answer_bytes, most = 0, 0, 0
    for _ in range(repeats):
        chosen, sent, answers = retriever.search(queries, k, rng=rng)
        found += _reached(wanted, gallery, least, chosen).mean(axis=1) / repeats
        covered += _covered(wanted, gallery, least, answers, k) / repeats
        if labels is not None:
            hits += (labels[0][chosen] == labels[1][:, None]).any(axis=1) / repeats
        message_bytes = max(message_bytes, *sent)
        answer_bytes = max(answer_bytes, *(answer.nbytes for answer in answers))
        most = max(most, *(len(answer.ids) for answer in answers))
    fraction = most / len(gallery)
    ceiling, floor = _limits(retriever, truth, fraction, confidence)
    recall = _interval(found, confidence)
    top = max(ceiling.value, 1e-300)
    return Evaluation(
        nn_recall=recall,
        covered=_interval(covered, confidence),
        recall=None if labels is None else _interval(hits, confidence),
        candidates=fraction,
        message_bytes=message_bytes,
        answer_bytes=answer_bytes,
        ceiling=ceiling,
        floor=floor,
        share=Estimate(recall.value / top, recall.low / top, recall.high / top),
        k=k,
        queries=len(wanted),
        repeats=repeats,
        confidence=confidence,
    )


def true_neighbors(queries: Singles, gallery: Singles, k: int, *, leave_out: bool = False) -> NDArray[np.intp]:
    """Return the k items of highest inner product with each query.

    Parameters
    ----------
    queries : ndarray of shape (n, d)
    gallery : ndarray of shape (N, d)
    k : int
    leave_out : bool, default=False
        Whether query i is item i, which is then no neighbour of itself.

    Returns
    -------
    ndarray of shape (n, k)
        In no order.
    """
    found = np.empty((len(queries), k), np.intp)
    for start in range(0, len(queries), _BLOCK):
        scores = queries[start : start + _BLOCK] @ gallery.T
        if leave_out:
            own = np.arange(len(scores))
            scores[own, start + own] = -np.inf
        found[start : start + _BLOCK] = np.argpartition(-scores, k - 1, axis=1)[:, :k]
    return found


def popularity(gallery: Singles, k: int) -> NDArray[np.int64]:
    """Return how often each item is among the k nearest of another item of the gallery.

    Parameters
    ----------
    gallery : ndarray of shape (N, d)
        Features of norm one.
    k : int

    Returns
    -------
    ndarray of shape (N,)
    """
    return np.bincount(true_neighbors(gallery, gallery, k, leave_out=True).ravel(), minlength=len(gallery))


def _limits(
    retriever: Retriever, truth: NDArray[np.intp], fraction: float, confidence: float
) -> tuple[Estimate, Estimate]:
    """Return ceiling and floor."""
    gallery, promise = retriever.features, retriever.guarantee
    # A promise to somebody else says nothing about the query.
    epsilon = promise.epsilon if promise.protects == "query" else np.inf
    own = true_neighbors(gallery, gallery, truth.shape[1], leave_out=True)
    counts = np.bincount(own.ravel(), minlength=len(gallery))
    favourites = np.zeros(len(gallery))
    favourites[np.argsort(-counts, kind="stable")[: candidate_count(fraction, len(gallery))]] = 1
    # The optimum for the gallery's popularity is a possible channel for the queries': on them it cannot be too
    # high. On the gallery itself, which it was fitted to, it cannot be too low.
    chances = best_channel(epsilon, fraction, counts).chances
    value = neighbor_ceiling(epsilon, fraction, counts, promise.delta)
    low = _interval(chances[truth].mean(axis=1), confidence).low
    above = _interval(chances[own].mean(axis=1), confidence)
    high = min(1.0, value + above.high - above.value)
    floor = _interval(favourites[truth].mean(axis=1), confidence)
    return Estimate(value, min(low, value), high), floor


def _labels(
    retriever: Retriever, query_labels: ArrayLike | None, n: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    if query_labels is None:
        return None
    if retriever.labels is None:
        raise ValueError("query_labels need the gallery's labels: call index(gallery, gallery_y)")
    return retriever.labels, checked_labels(query_labels, n, "query_labels")


def _reached(wanted: Singles, gallery: Singles, least: Singles, items: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which items, shape (n, m), are at least so near to their query."""
    found = np.empty(items.shape, dtype=bool)
    for start in range(0, len(items), _BLOCK):
        some = slice(start, start + _BLOCK)
        found[some] = np.einsum("nd,nkd->nk", wanted[some], gallery[items[some]]) >= least[some, None]
    return found


def _covered(wanted: Singles, gallery: Singles, least: Singles, answers: list[Answer], k: int) -> Floats:
    """Return the part of the k nearest that each answer holds; equal answers are looked at together."""
    groups: dict[int, list[int]] = {}
    for row, answer in enumerate(answers):
        groups.setdefault(id(answer), []).append(row)
    found = np.empty(len(answers))
    for rows in groups.values():
        scores = wanted[rows] @ gallery[answers[rows[0]].ids].T
        found[rows] = np.minimum((scores >= least[rows, None]).sum(axis=1), k) / k
    return found


def _interval(values: Floats, confidence: float) -> Estimate:
    """Return the mean of one value in [0, 1] for each query, with an interval after Agresti and Coull.

    z^2 / 2 imagined queries of value 0 and as many of value 1 join the sample, so that queries that all
    agree do not make an interval of no width.
    """
    z = float(norm.ppf((1 + confidence) / 2))
    total = len(values) + z * z
    mean = (values.sum() + z * z / 2) / total
    variance = ((values - mean) ** 2).sum() + z * z / 2 * (mean**2 + (1 - mean) ** 2)
    half = z * np.sqrt(variance) / total
    value = float(values.mean())
    return Estimate(value, float(min(value, max(0.0, mean - half))), float(max(value, min(1.0, mean + half))))
