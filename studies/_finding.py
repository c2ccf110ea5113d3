"""What a mechanism's messages find in a gallery, from one ranking of it for all sizes of an answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearveil.mechanisms import Cells, Message, PrivUnit, Release, Unary
from nearveil.mechanisms.base import candidate_count
from nearveil.mechanisms.covers.channel import RandomizedResponse
from nearveil.mechanisms.covers.covers import MappedRelease
from nearveil.privacy.noise import Source
from nearveil.search.evaluation import Copies, popularity, true_neighbors
from nearveil.search.retriever import select_first
from studies._trial import Labels, Rows, Trial

K = 8
_REPEATS = 4  # of messages that name one set: there are few answers, so that asking again costs nothing

Floats = NDArray[np.float64]
Items = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class Search:
    """A trial with all that is true about it; all mechanisms centre by the public mean, so this serves all of them."""

    trial: Trial
    queries: Rows  # centred, of norm one, as the gallery
    gallery: Rows
    near: Rows  # cosines of queries and items
    truth: Items  # the eight nearest items of each query
    copies: Copies  # which items are equal
    counts: NDArray[np.int64]  # how often an item is among the eight nearest of another item


@dataclass(frozen=True)
class Found:
    """What queries found, one number each."""

    neighbours: Floats  # the part of the eight nearest items that the answer holds
    same_class: Floats  # whether an item of the query's class is among the eight that were chosen


def build_search(trial: Trial) -> Search:
    """Compare all queries with all items."""
    centred = Cells(1.0).fit(trial.public)  # any release: all centre alike
    gallery = centred.features(trial.gallery, lenient=True).astype(np.float32)
    queries = centred.features(trial.queries).astype(np.float32)
    truth, counts = true_neighbors(queries, gallery, K), popularity(gallery, K)
    return Search(trial, queries, gallery, queries @ gallery.T, truth, Copies(gallery), counts)


def find(
    mechanism: Release, search: Search, rows: Items, fractions: Sequence[float], source: Source
) -> dict[float, Found]:
    """Ask for some queries, and let the client choose eight of each answer."""
    counts = [candidate_count(fraction, len(search.gallery)) for fraction in fractions]
    if isinstance(mechanism, MappedRelease):
        single = isinstance(mechanism._channel(mechanism.map_), RandomizedResponse)
        rows = np.repeat(rows, _REPEATS if single else 1)
        messages = mechanism.release(search.trial.queries[rows], rng=source)
        answers = [_answer_by_map(mechanism, messages, counts[0])]
    else:
        messages = mechanism.release(search.trial.queries[rows], rng=source)
        scores = _score(mechanism, messages, mechanism._prepare(search.gallery.astype(np.float64)))
        order = np.argpartition(-scores, [count - 1 for count in counts], axis=1)
        answers = [order[:, :count] for count in counts]
    return {fraction: choose(search, rows, answer) for fraction, answer in zip(fractions, answers, strict=True)}


def choose(search: Search, rows: Items, answers: Items) -> Found:
    """Choose by the true feature among the candidates of each answer."""
    offered = np.take_along_axis(search.near[rows], answers, axis=1)
    best = np.argpartition(-offered, K - 1, axis=1)[:, :K]
    labels: Labels = search.trial.gallery_y[np.take_along_axis(answers, best, axis=1)]
    same = (labels == search.trial.query_y[rows, None]).any(axis=1)
    return Found(search.copies.recall(search.truth[rows], answers), same.astype(np.float64))


def send_popular(search: Search, rows: Items, fraction: float, counts: NDArray[np.int64] | None = None) -> Found:
    """Return what the most popular items find, sent to everybody without a message."""
    popular = search.counts if counts is None else counts
    items = np.argsort(-popular, kind="stable")[: candidate_count(fraction, len(search.gallery))]
    return choose(search, rows, np.broadcast_to(items, (len(rows), len(items))))


def _score(mechanism: Release, messages: Sequence[Message], prepared: Any) -> Floats:
    if isinstance(mechanism, Unary | PrivUnit):
        # Linear in the items: what it makes of the unit vectors is all there is to know of a message.
        basis = np.eye(prepared.shape[1])
        return np.asarray(np.stack([mechanism._rank(message, basis) for message in messages]) @ prepared.T)
    return np.stack([mechanism._rank(message, prepared) for message in messages])


def _answer_by_map(mechanism: MappedRelease, messages: Sequence[Message], count: int) -> Items:
    known: dict[bytes, Items] = {}
    found = []
    for message in messages:
        key = message["sets"].tobytes()
        if key not in known:
            known[key] = select_first(mechanism._rank(message, np.empty(0)), count)
        found.append(known[key])
    return np.stack(found)
