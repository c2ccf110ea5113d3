"""What the studies of PrivateMail share: images, the query step by step, and methods that answer with eight items."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import cdist
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA

from nearveil.mechanisms import Covers, Release
from nearveil.privacy.noise import unsafe_seeded
from nearveil.privatemail import PrivateMail
from nearveil.privatemail.graph import label_graph
from nearveil.privatemail.published import EXPERIMENTS
from nearveil.search.ceiling import class_ceiling
from studies import _report
from studies.baselines import (
    DPdSNE,
    PlainManifold,
    PlainTSNE,
    PrivatePCA,
    PrivatePCARelease,
    RandomProjection,
    RawFeatures,
)
from studies.data import FeatureSet, data_folder, load_features
from studies.published import CentredDistances, step_epsilon

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]

K = 8  # items of an answer, as in the papers
DELTA = 1e-5
ANCHORS = 1000  # public rows that both sides embed
EPSILONS = (0.01, 0.1, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)


@dataclass(frozen=True)
class Source:
    """A set of images: its file, its name in print, and the first class that is searched; those before are public."""

    file: str
    title: str
    first: int
    per_class: int  # queries of each class


DIGITS = "the digits of scikit-learn, each in ten styles"  # what a package carries: no file
SETS: dict[str, Source] = {
    "cub200": Source("cub200_cropped_lite0", "CUB-200-2011", 100, 1),
    "cars196": Source("cars196_cropped_lite0", "Cars196", 98, 1),
    "cifar100": Source("cifar100_partial", "CIFAR-100, a part", 50, 2),  # fewer classes are left to ask for
    "digits": Source(DIGITS, "digits in ten styles", 50, 1),
}


def list_files(*names: str) -> tuple[str, ...]:
    """Return the files of some sets, for a study's `data`."""
    files = (SETS[name].file for name in names)
    return tuple(file if file == DIGITS else f"{file}/{file}.npz" for file in files)


def has_files(*names: str) -> bool:
    """Return whether the files of some sets are on this machine."""
    return all((data_folder() / file).exists() for file in list_files(*names))


@dataclass(frozen=True, eq=False)
class Images:
    """Public rows, a gallery, and queries that are in neither, a number of each class."""

    anchors: Floats
    anchor_labels: Labels
    others: Floats
    gallery: Floats
    gallery_labels: Labels
    queries: Floats
    query_labels: Labels
    n_classes: int

    def score(self, chosen: Any, labels: Labels | None = None) -> float:
        """Return how often a query's label, or another that is given, is among those of the items chosen for it."""
        expected = self.query_labels if labels is None else labels
        return float((self.gallery_labels[np.asarray(chosen)] == expected[:, None]).any(axis=1).mean())


@functools.cache
def _load(file: str) -> FeatureSet:
    return _make_styles() if file == DIGITS else load_features(file)


def _make_styles() -> FeatureSet:
    """Return digits in a hundred classes of equal size: tenths of a digit's images along their first component."""
    X, y = load_digits(return_X_y=True)
    labels = np.zeros(len(X), np.int64)
    for digit in range(10):
        rows = np.flatnonzero(y == digit)
        order = rows[np.argsort(PCA(1, random_state=0).fit_transform(X[rows])[:, 0], kind="stable")]
        labels[order] = 10 * digit + np.arange(len(order)) * 10 // len(order)
    return FeatureSet("digits", X.astype(np.float32), labels)


def sample_images(data: str, seed: int, *, gallery: int) -> Images:
    """Draw anchors, gallery and queries. As many queries of every class, so that classes are equally likely."""
    source, features = SETS[data], _load(SETS[data].file)
    X, y = features.features.astype(np.float64), features.labels
    generator = np.random.default_rng([seed, source.first])
    public = generator.permutation(np.flatnonzero(y < source.first))
    rest = generator.permutation(np.flatnonzero(y >= source.first))
    classes = np.unique(y[rest])
    query_rows = np.concatenate([rest[y[rest] == label][: source.per_class] for label in classes])
    gallery_rows = np.setdiff1d(rest, query_rows, assume_unique=True)
    gallery_rows = np.sort(generator.permutation(gallery_rows)[:gallery])
    anchor_rows, other_rows = np.split(public, [ANCHORS])
    return Images(
        anchors=X[anchor_rows],
        anchor_labels=y[anchor_rows],
        others=X[other_rows],
        gallery=X[gallery_rows],
        gallery_labels=y[gallery_rows] - source.first,
        queries=X[query_rows],
        query_labels=y[query_rows] - source.first,
        n_classes=len(classes),
    )


def normalise_rows(drawn: Images) -> tuple[Floats, Floats]:
    """Return gallery and queries, centred by the anchors' mean and of norm one."""
    raw = RawFeatures().fit(drawn.anchors)
    return raw.features(drawn.gallery), raw.features(drawn.queries)


def find_nearest(queries: Floats, gallery: Floats) -> NDArray[np.intp]:
    """Return the eight nearest rows of each query, in any order."""
    return np.argpartition(cdist(queries, gallery), K, axis=1)[:, :K]


class PartlyLabelled:
    """The label "Laplacian" of the authors' program for the rows that have a label; the others have no part in it."""

    def __init__(self, labels: Labels) -> None:
        self._labelled = labels >= 0
        self._own = CentredDistances(labels[self._labelled])

    def laplacian_matmul(self, Z: Floats) -> Floats:
        """Multiply the "Laplacian" with `Z` of shape (n, k)."""
        results: Floats = np.zeros_like(Z)
        results[self._labelled] = self._own.laplacian_matmul(Z[self._labelled])
        return results


def follow_program(labels: Labels, *, bandwidth: float, label_weight: float) -> dict[str, Any]:
    """Return how the authors' program walks: it divides by sigma^2, not by 2 sigma^2."""
    return {"repel": PartlyLabelled(labels), "bandwidth": bandwidth / np.sqrt(2), "label_weight": label_weight}


def follow_paper(labels: Labels, *, bandwidth: float, label_weight: float) -> dict[str, Any]:
    """Return how the paper of 2022 walks."""
    repel = label_graph(labels, bandwidth, "integer")
    return {"repel": repel, "bandwidth": bandwidth, "label_weight": label_weight}


def walk(
    cosines: Floats, start: Floats, *, steps: int, bandwidth: float, label_weight: float = 0.0, repel: Any = None
) -> Iterator[Floats]:
    """Yield the start and the steps of the query without noise, rescaled to Frobenius norm sqrt(n).

    Labels repel by `repel`, a Laplacian.
    """
    weights = np.exp((cosines - 1) / bandwidth**2)
    np.fill_diagonal(weights, 0)
    degree = weights.sum(axis=1)[:, None]
    Z = start * (np.sqrt(len(start)) / np.linalg.norm(start))
    yield Z
    for _ in range(steps):
        pull = weights @ Z - degree * Z
        if repel is not None:
            pull = pull + label_weight * repel.laplacian_matmul(Z)
        Z = Z + pull / (2 * degree)
        Z = Z * (np.sqrt(len(Z)) / np.linalg.norm(Z))
        yield Z


def compute_ceiling(epsilon: float, n_classes: int, delta: float = DELTA) -> float:
    """Return what Recall@8 no private message passes: Theorem C for eight answered classes."""
    return class_ceiling(epsilon, n_classes, K, delta)


def compute_floor(n_classes: int) -> float:
    """Return the Recall@8 of the best answer that is the same for everybody: items of eight classes."""
    return K / n_classes


show = partial(_report.show, spec=".2f", least=0, most=1)
"""Return means of shares over seeds with their intervals, in print."""
Recalls = Iterator[dict[str, Any]]

PAPER = "PrivateMail 2022, as published"
PROGRAM = "PrivateMail 2022, the authors' program"
FIRST = "PrivateMail 2021, as published"
PROJECTION_2012 = "random projection, as published"
UNSOUND = (PAPER, PROGRAM, FIRST, PROJECTION_2012, "private PCA")  # of the query, which the axis speaks of
PLAIN = ("no privacy", "SMLQ, no privacy", "t-SNE, no privacy")
DSNE_ANCHORS = 300
PCA_COLUMNS = 16
SETS_OF = {0.01: 10, 0.1: 10, 0.5: 10, 1.0: 10, 2.0: 10, 4.0: 20, 8.0: 40, 16.0: 40}  # of covers, by epsilon
# The axis of figure 4 of 2021, and the delta that stands below it.
FIRST_EPSILONS = (0.023, 0.311, 1.056, 5.827, 10.527)
FIRST_DELTAS = (0.99, DELTA)
_FEW = (0.01, 0.1, 1.0, 4.0, 16.0)  # each query is an embedding of its own: 15 ms
VERSIONS = {"2022-code": PROGRAM, "2022": PAPER, "2021": FIRST}
PUBLISHED = {  # deltas and epsilons
    "2022-code": ((DELTA,), _FEW),
    "2022": ((DELTA,), _FEW),
    "2021": (FIRST_DELTAS, FIRST_EPSILONS),
}


def make_published(version: Any, data: Any, drawn: Images, seed: int, **changes: Any) -> PrivateMail:
    """Return a published version, fitted on the anchors."""
    mail = PrivateMail.published(version, data, public_seed=seed, allow_unsound=True, **changes)
    return mail.fit(drawn.anchors, drawn.anchor_labels)


def ask_published(version: Any, data: Any, drawn: Images, seed: int) -> Recalls:
    """Ask a published version, which is told the target's label; of 2021 two iterations at the epsilons of figure 4."""
    server = None
    for delta, epsilon in product(*PUBLISHED[version]):
        mail = make_published(version, data, drawn, seed, epsilon=epsilon, delta=delta)
        if server is None:  # epsilon is the client's alone
            server = mail.embed_gallery(drawn.gallery, drawn.gallery_labels)
        step = {"step": step_epsilon(epsilon, 2, delta)} if version == "2021" else {}
        share = ask_with_label(mail, server, drawn, seed)
        yield {"method": VERSIONS[version], "epsilon": epsilon, "delta": delta, **step, "recall": share}


def ask_with_label(mail: PrivateMail, server: Any, drawn: Images, seed: int) -> float:
    """Return the recall of a version that is told the targets' labels."""
    messages = mail.release(drawn.queries, labels=drawn.query_labels, rng=unsafe_seeded(seed))
    return drawn.score([np.argpartition(-mail.rank_each(message, server)[0], K)[:K] for message in messages])


def _ask(release: Release, prepared: Any, drawn: Images, seed: int) -> float:
    messages = release.release(drawn.queries, rng=unsafe_seeded(seed))
    return drawn.score([np.argpartition(-release._rank(message, prepared), K)[:K] for message in messages])


def ask_noisy(data: Any, drawn: Images, seed: int) -> Recalls:
    """Ask what adds noise to an embedding: PrivateMail made sound, DP-dSNE, random projections."""
    published: Any = {**EXPERIMENTS[data], "public_seed": seed}
    makers: dict[str, Callable[[float], Release]] = {
        "PrivateMail, Gaussian": partial(PrivateMail, **published),
        "PrivateMail, Laplace": partial(PrivateMail, noise="laplace", **published),
        "DP-dSNE": partial(DPdSNE, n_anchors=DSNE_ANCHORS, public_seed=seed),
        "random projection": partial(RandomProjection, projection_seed=seed),
        PROJECTION_2012: partial(RandomProjection, projection_seed=seed, as_published=True, allow_unsound=True),
    }
    for name, make in makers.items():
        prepared = None
        for epsilon in EPSILONS:
            release = make(epsilon).fit(drawn.anchors, drawn.anchor_labels)
            if prepared is None:  # the server's part is without noise, so it is the same at every epsilon
                prepared = release._prepare(release.features(drawn.gallery))
            delta = 0.0 if name == "PrivateMail, Laplace" else DELTA
            yield {"method": name, "epsilon": epsilon, "delta": delta, "recall": _ask(release, prepared, drawn, seed)}


def ask_pca(_: Any, drawn: Images, seed: int) -> Recalls:
    """Ask private PCA: epsilon is for a record of the set that directions are learned from, not for the query."""
    for epsilon in EPSILONS:
        projector = PrivatePCA(epsilon, n_components=PCA_COLUMNS, mean=drawn.anchors.mean(axis=0))
        release = PrivatePCARelease(projector.fit(drawn.others, rng=unsafe_seeded(seed))).fit(drawn.anchors)
        share = _ask(release, release._prepare(release.features(drawn.gallery)), drawn, seed)
        yield {"method": "private PCA", "epsilon": epsilon, "delta": DELTA, "recall": share}


def ask_plain(_: Any, drawn: Images, seed: int) -> Recalls:
    """Ask without any noise."""
    makers: tuple[Release, ...] = (RawFeatures(), PlainManifold(public_seed=seed), PlainTSNE(public_seed=seed))
    for name, unfitted in zip(PLAIN, makers, strict=True):
        release = unfitted.fit(drawn.anchors, drawn.anchor_labels)
        share = _ask(release, release._prepare(release.features(drawn.gallery)), drawn, seed)
        yield {"method": name, "epsilon": None, "delta": None, "recall": share}


def ask_covers(_: Any, drawn: Images, seed: int) -> Recalls:
    """Ask for one of the server's sets; the server answers with an item of each of its eight commonest classes."""
    servers: dict[float, Covers] = {}
    for epsilon in EPSILONS:
        learned = min(max(epsilon, 1.0), 8.0)  # one map below epsilon 1, one from 8 on: they hardly differ
        if learned not in servers:
            n_sets = SETS_OF[learned]
            servers[learned] = Covers(learned, 1 / n_sets, n_sets=n_sets).fit(drawn.anchors).index(drawn.gallery)
        server = servers[learned]
        client = Covers(epsilon, server.candidates, n_sets=server.n_sets).fit(drawn.anchors).use_map(server.map_)
        members = server.members_.toarray().astype(bool)
        answers = [choose_by_class(np.flatnonzero(group), drawn.gallery_labels) for group in members]
        messages = client.release(drawn.queries, rng=unsafe_seeded(seed))
        share = drawn.score([answers[int(message["sets"][0])] for message in messages])
        yield {"method": "covers", "epsilon": epsilon, "delta": 0.0, "recall": share}


def choose_by_class(items: NDArray[Any], labels: Labels) -> NDArray[np.intp]:
    """Return eight of a set's items, of as many of its commonest classes; all from the server's own knowledge."""
    _, first, counts = np.unique(labels[items], return_index=True, return_counts=True)
    best = items[first[np.argsort(-counts, kind="stable")[:K]]]
    # A set of fewer classes is filled up with its other items.
    return np.asarray(np.concatenate([best, np.setdiff1d(items, best)])[:K])


GROUPS: dict[str, Callable[[Any, Images, int], Recalls]] = {
    "program": partial(ask_published, "2022-code"),
    "paper": partial(ask_published, "2022"),
    "first": partial(ask_published, "2021"),
    "noisy": ask_noisy,
    "principal": ask_pca,
    "plain": ask_plain,
    "covers": ask_covers,
}
