"""What the studies of retrieval share: galleries, releases that protect a query, what they find, what they cost."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearveil.gallery.publishing import select_first
from nearveil.ledger.budget import PureBudget, charge_guarantee, find_pld_epsilon
from nearveil.mechanisms import AnalyticGaussian, Message, PrivUnit, Release
from nearveil.mechanisms.covers.channels import RandomizedResponse
from nearveil.mechanisms.covers.covers import MappedRelease
from nearveil.mechanisms.messages import candidate_count
from nearveil.mechanisms.projection import fit_projection
from nearveil.privacy import Guarantee
from nearveil.privacy.noise import Source, unsafe_seeded
from nearveil.search.ceiling import neighbor_ceiling
from nearveil.search.evaluation import Copies, true_neighbors
from studies.baselines import Cells, Unary, find_mechanism
from studies.data import load_features

Rows = NDArray[np.float32]
Labels = NDArray[np.int64]

QUERIES = 1200
SETS = {"cub200_cropped_lite0": 100, "cars196_cropped_lite0": 98}  # classes below are public, the others searched
NAMES = {"cub200_cropped_lite0": "CUB", "cars196_cropped_lite0": "Cars"}
FILES = tuple(f"{name}/{name}.npz" for name in SETS)


def count_popularity(gallery: Rows, k: int) -> NDArray[np.int64]:
    """Return how often each item is among the k of highest inner product with another item."""
    return np.bincount(true_neighbors(gallery, gallery, k, leave_out=True).ravel(), minlength=len(gallery))


@dataclass(frozen=True, eq=False)
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
    results = load_features(name)
    public = results.labels < SETS[name]
    rest = np.random.default_rng(seed).permutation(np.flatnonzero(~public))
    queries, gallery = rest[:QUERIES], np.sort(rest[QUERIES:])
    X, y = results.features, results.labels
    return Trial(X[public], y[public], X[gallery], y[gallery], X[queries], y[queries])


@dataclass(frozen=True)
class Halves:
    """A trial in which the same queries are of classes that are known, and of classes that are not."""

    trial: Trial  # the public rows are of one half of the classes; so is the gallery, or it is of all
    known: NDArray[np.bool_]  # which queries are of a class of the public rows
    others: Rows  # other images of the other half, which tell what is popular with such queries


def split_classes(name: str, seed: int, half: int, *, whole_gallery: bool) -> Halves:
    """Return public rows of one half of the classes, a gallery, and queries: the same for both halves."""
    results = load_features(name)
    X, y = results.features, results.labels
    order = np.random.default_rng(seed).permutation(len(y))
    queries, rest = order[:QUERIES], order[QUERIES:]
    items, spare = np.sort(rest[: len(rest) // 2]), rest[len(rest) // 2 :]
    group = (y < SETS[name]) == (half == 0)
    public, others = spare[group[spare]], spare[~group[spare]]
    gallery = items if whole_gallery else items[group[items]]
    trial = Trial(X[public], y[public], X[gallery], y[gallery], X[queries], y[queries])
    return Halves(trial, group[queries], X[others])


@dataclass(frozen=True)
class Rival:
    """A mechanism that protects a query, with the settings that the studies compare."""

    mechanism: str  # its name in the registry
    setting: str  # in words
    parameters: Mapping[str, Any] = field(default_factory=dict)
    directions: int | None = None  # principal directions of the public rows that it projects to


RIVALS = {
    "covers": Rival("covers", "learned for every epsilon and f", {"n_sets": None}),
    "k-means cells": Rival("cells (randomized)", "1/f cells, randomised response"),
    "balanced cells, subset": Rival("cells (subset)", "4/f cells, subset selection"),
    "unary, symmetric": Rival("unary (symmetric)", "64 cells of the public rows"),
    "unary, optimised": Rival("unary (optimised)", "64 cells of the public rows"),
    "PrivUnit": Rival("privunit", "PCA to 64", directions=64),
    "PrivUnit, all dimensions": Rival("privunit", "1280"),
    "LATENT": Rival("latent", "signs, PCA to 8", directions=8),
    "OME": Rival("ome", "11 bits, alpha 1, PCA to 8", {"pairs": "code words"}, directions=8),
    "analytic Gaussian": Rival("analytic-gaussian", "PCA to 64, delta 1e-5", directions=64),
    "random projection": Rival("random-projection", "64 directions, delta 1e-5"),
    "von Mises-Fisher": Rival("von-mises-fisher", "PCA to 64", directions=64),
    "PrivateMail, Gaussian": Rival(
        "privatemail (gaussian)", "k 16, 1,000 anchors, delta 1e-5", {"n_components": 16, "n_anchors": 1000}
    ),
    "PrivateMail, Laplace": Rival("privatemail (laplace)", "k 2, 1,000 anchors", {"n_anchors": 1000}),
    "DP-dSNE": Rival("dp-dsne", "300 anchors, delta 1e-5", {"n_anchors": 300}),
}
SETTINGS = {name: rival.setting for name, rival in RIVALS.items()}
MAPPED = tuple(  # their sets are made for one size of an answer
    name for name, rival in RIVALS.items() if issubclass(find_mechanism(rival.mechanism).kind, MappedRelease)
)


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

    @cached_property
    def directions(self) -> Floats:
        """All principal directions of the centred public rows, the first in the first column."""
        matrix = fit_projection("pca", centre(self.trial, self.trial.public), None).matrix
        assert matrix is not None
        return matrix


@dataclass(frozen=True)
class Found:
    """What queries found, one number each."""

    neighbours: Floats  # the part of the eight nearest items that the answer holds
    same_class: Floats  # whether an item of the query's class is among the eight that were chosen


def centre(trial: Trial, rows: Rows) -> Floats:
    """Return rows less the mean of the public ones, of norm one: as every release has them."""
    return Cells(1.0).fit(trial.public).features(rows, lenient=True)


def build_search(trial: Trial) -> Search:
    """Compare all queries with all items."""
    gallery, queries = (centre(trial, rows).astype(np.float32) for rows in (trial.gallery, trial.queries))
    truth, counts = true_neighbors(queries, gallery, K), count_popularity(gallery, K)
    return Search(trial, queries, gallery, queries @ gallery.T, truth, Copies(gallery), counts)


def make_rival(name: str, epsilon: float, fraction: float, search: Search) -> Release:
    """Return a mechanism of `RIVALS`, fitted on the public rows, without a gallery."""
    rival, public = RIVALS[name], search.trial
    changes = dict(rival.parameters)
    if rival.directions is not None:
        changes["projection"] = search.directions[:, : rival.directions]
    if name in MAPPED:
        changes["candidates"] = fraction
    release: Release = find_mechanism(rival.mechanism).make(epsilon, **changes).fit(public.public, public.public_y)
    return release


def find(
    mechanism: Release, search: Search, rows: Items, fractions: Sequence[float], source: Source
) -> dict[float, Found]:
    """Ask for some queries, and let the client choose eight of each answer."""
    counts = [candidate_count(fraction, len(search.gallery)) for fraction in fractions]
    if isinstance(mechanism, MappedRelease):
        single = isinstance(mechanism._channel, RandomizedResponse)
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


def send_popular(search: Search, rows: Items, fraction: float, counts: NDArray[np.int64]) -> Found:
    """Return what the most popular items find, sent to everybody without a message."""
    items = np.argsort(-counts, kind="stable")[: candidate_count(fraction, len(search.gallery))]
    return choose(search, rows, np.broadcast_to(items, (len(rows), len(items))))


def ask(
    common: dict[str, Any],
    mechanism: Release,
    search: Search,
    rows: Items,
    fractions: Sequence[float],
    popular: NDArray[np.int64] | None = None,
) -> list[dict[str, Any]]:
    """Return what some queries find, beside the ceiling and the floor, at each fraction.

    `common` has the nominal epsilon and the seed of the noise; `popular` says what is popular with such queries, by
    default what is with the items.
    """
    counts = search.counts if popular is None else popular
    delta, results = mechanism.guarantee.delta, []
    for fraction, answer in find(mechanism, search, rows, fractions, unsafe_seeded(common["seed"])).items():
        free = send_popular(search, rows, fraction, counts)
        results.append(
            {
                **common,
                "f": fraction,
                "delta": delta,
                "nn_recall": float(answer.neighbours.mean()),
                "recall": float(answer.same_class.mean()),
                "ceiling": neighbor_ceiling(common["epsilon"], fraction, counts, delta),
                "floor": float(free.neighbours.mean()),
                "recall_floor": float(free.same_class.mean()),
            }
        )
    return results


def _score(mechanism: Release, messages: Sequence[Message], prepared: Any) -> Floats:
    if isinstance(mechanism, Unary | PrivUnit):
        # Linear in the items: what it makes of the unit vectors is all there is to know of a message.
        basis = np.eye(prepared.shape[1])
        return np.asarray(np.stack([mechanism._rank(message, basis) for message in messages]) @ prepared.T)
    return np.stack([mechanism._rank(message, prepared) for message in messages])


def _answer_by_map(mechanism: MappedRelease, messages: Sequence[Message], count: int) -> Items:
    """Return the items of each message's sets, computed once for messages that are equal."""
    keys = [message["sets"].tobytes() for message in messages]
    different = dict(zip(keys, messages, strict=True))
    answers = {key: select_first(mechanism._rank(message, np.empty(0)), count) for key, message in different.items()}
    return np.stack([answers[key] for key in keys])


BUDGET = 16.0
DELTA = 1e-5
PRICED: dict[str, Callable[[float], Release]] = {"a pure message": Cells, "analytic Gaussian": AnalyticGaussian}
_FINE = 0.02  # of the count, where finding the last query would take minutes


def count_payable(kind: str, epsilon: float) -> dict[str, Any]:
    """Return how many messages of one kind a budget pays for, with delta 0 and at `DELTA`."""
    guarantee = PRICED[kind](epsilon).fit(np.eye(3)).guarantee
    return {"pure": _count_added(guarantee) if guarantee.delta == 0 else 0, "plan": _count_planned(guarantee)}


def _count_added(guarantee: Guarantee) -> int:
    """Return how many pure messages the ledger's sum of epsilons allows."""
    budget = PureBudget.open(BUDGET)
    (price,) = budget.price(charge_guarantee(guarantee, "query", guarantee.unit, "replace", 0.0))
    assert price is not None
    return budget.limits[0] // price


def _count_planned(guarantee: Guarantee) -> int:
    charge = charge_guarantee(guarantee, "query", guarantee.unit, "replace", DELTA)

    def within(count: int) -> bool:
        # The ledger's own price of a plan, less what samplers of finite precision cost.
        delta = DELTA - count * guarantee.extra_delta
        return delta > 0 and find_pld_epsilon(tuple((text, count * times) for text, times in charge), delta) <= BUDGET

    # One message has its own guarantee, which an accountant's rounding would only blur.
    good = 1 if guarantee.epsilon <= BUDGET and guarantee.delta <= DELTA else 0
    bad = max(2, int(BUDGET / guarantee.epsilon))
    while within(bad):
        good, bad = bad, 4 * bad
    while bad - good > max(1, _FINE * good):
        middle = max(good + 1, int(np.sqrt(good * bad)))
        good, bad = (middle, bad) if within(middle) else (good, middle)
    return good
