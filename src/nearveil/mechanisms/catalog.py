"""Every mechanism in one table, read off the mechanisms themselves."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from nearveil.mechanisms.base import Floats, Release, checked_fraction
from nearveil.mechanisms.baselines._dsne import DPdSNE
from nearveil.mechanisms.baselines._pca import Method, PrivatePCA, PrivatePCARelease
from nearveil.mechanisms.baselines._plain import PlainLDA, PlainManifold, PlainTSNE, RandomProjection, RawFeatures
from nearveil.mechanisms.bits._latent import OME, Latent, Unary
from nearveil.mechanisms.covers.channel import checked_epsilon
from nearveil.mechanisms.covers.covers import Cells, Covers, MappedRelease
from nearveil.mechanisms.message import Message
from nearveil.mechanisms.privatemail._privatemail import PrivateMail
from nearveil.mechanisms.privatemail.published import Version
from nearveil.mechanisms.vectors._analytic import AnalyticGaussian
from nearveil.mechanisms.vectors._fisher import VonMisesFisher
from nearveil.mechanisms.vectors._privunit import PrivUnit
from nearveil.privacy import Guarantee
from nearveil.privacy.noise import unsafe_seeded


def default(epsilon: float, candidates: float = 0.1) -> MappedRelease:
    """Return the release that finds most on image features, at every epsilon and answer size measured: learned covers.

    Where epsilon is very large and answers very small, :class:`PrivUnit` may find more: evaluate both.

    Parameters
    ----------
    epsilon : float
        From 1e-6 to 40.
    candidates : float, default=0.1
        The fraction of the gallery that an answer holds.

    Returns
    -------
    MappedRelease

    Examples
    --------
    >>> default(4.0, 0.1)
    Covers(epsilon=4.0)
    """
    checked_epsilon(epsilon)
    checked_fraction(candidates)
    return Covers(epsilon, candidates)


EPSILON = 4.0
ROWS, DIMENSION, CLASSES = 200, 64, 4


@dataclass(frozen=True)
class Mechanism:
    """A row of the catalog.

    `message_bytes`: Of one message at epsilon 4, fitted on 200 rows of 64 features in 4 classes; None where a
    library is missing.
    """

    name: str  # what messages call it, and the variant
    class_name: str  # of :mod:`nearveil.mechanisms`
    protects: str  # what it protects, in words
    sound: bool  # whether its promise is proved
    reason: str  # why not, where it is not
    kind: str  # "pure", "approximate", "metric, pure" or "none"
    message_bytes: int | None
    source: str  # where it was published


@dataclass(frozen=True)
class _Entry:
    """How to build a mechanism, and where it comes from."""

    make: Callable[[Floats], Release]
    source: str
    variant: str = ""
    labelled: bool = False  # whether a release needs the target's own label
    needs: str = ""  # a library that may be missing, and what can be said without


def _published(version: Version) -> Callable[[Floats], Release]:
    return lambda _: PrivateMail(EPSILON, as_published=version, allow_unsound=True)


def _pca(method: Method) -> Callable[[Floats], Release]:
    def make(private: Floats) -> Release:
        # A seed would void the promise that the table states.
        projector = PrivatePCA(EPSILON, n_components=8, method=method, n_sweeps=2, allow_unsound=True)
        return PrivatePCARelease(projector.fit(private))

    return make


_MAIL = "Vepakomma, Balla, Raskar"
_ENTRIES = (
    _Entry(lambda _: Covers(EPSILON, n_sets=10), "this library"),
    _Entry(lambda _: Cells(EPSILON), "this library; Warner 1965", "randomized"),
    _Entry(lambda _: Cells(EPSILON, response="subset"), "this library; Ye, Barg 2018", "subset"),
    _Entry(lambda _: PrivUnit(EPSILON), "Bhowmick et al. 2018; Asi et al. 2022"),
    _Entry(lambda _: PrivateMail(EPSILON), f"{_MAIL} 2022, made sound", "gaussian"),
    _Entry(lambda _: PrivateMail(EPSILON, noise="laplace"), f"{_MAIL} 2021, made sound", "laplace"),
    _Entry(_published("2022"), f"{_MAIL} 2022", "as published 2022", labelled=True),
    _Entry(_published("2021"), f"{_MAIL} 2021", "as published 2021", labelled=True),
    _Entry(_published("2022-code"), f"{_MAIL} 2022, program", "as published 2022-code", labelled=True),
    _Entry(lambda _: Latent(EPSILON), "Arachchige et al. 2019"),
    _Entry(lambda _: OME(EPSILON), "Lyu et al. 2020"),
    _Entry(lambda _: Unary(EPSILON, "symmetric"), "Erlingsson et al. 2014", "symmetric"),
    _Entry(lambda _: Unary(EPSILON, "optimised"), "Wang et al. 2017", "optimised"),
    _Entry(lambda _: AnalyticGaussian(EPSILON), "Balle, Wang 2018"),
    _Entry(lambda _: RandomProjection(EPSILON), "Kenthapadi et al. 2012, for a record"),
    _Entry(
        lambda _: RandomProjection(EPSILON, as_published=True, allow_unsound=True),
        "Kenthapadi et al. 2012",
        "as published",
    ),
    _Entry(lambda _: VonMisesFisher(EPSILON), "Weggenmann, Kerschbaum 2021"),
    _Entry(lambda _: DPdSNE(EPSILON, n_anchors=60), "Saha et al. 2021"),
    _Entry(_pca("gaussian"), "Dwork et al. 2014", "gaussian"),
    _Entry(_pca("bingham"), "Chaudhuri, Sarwate, Sinha 2013; Kent et al. 2013", "bingham"),
    _Entry(_pca("gibbs"), "Chaudhuri, Sarwate, Sinha 2013", "gibbs"),
    _Entry(lambda _: RawFeatures(), "none"),
    _Entry(lambda _: PlainManifold(), f"{_MAIL} 2022"),
    _Entry(lambda _: PlainTSNE(), "van der Maaten, Hinton 2008; openTSNE", needs="openTSNE"),
    _Entry(lambda _: PlainLDA(), "Fisher 1936"),
)


def catalog() -> list[Mechanism]:
    """Build every mechanism on a small stated example and say what each promises, to whom, and in how many bytes.

    Examples
    --------
    >>> found = {row.name: row for row in catalog()}
    >>> found["privunit"].kind, found["privunit"].protects
    ('pure', 'the query')
    >>> found["private-pca (gaussian)"].protects
    'a record of the set whose covariance is released; not the query'
    """
    generator = np.random.default_rng(0)
    rows, labels = generator.standard_normal((2 * ROWS, DIMENSION)), np.arange(ROWS) % CLASSES
    with threadpool_limits(1):  # rows so few are slower on many threads
        return [_row(entry, rows, labels) for entry in _ENTRIES]


def _row(entry: _Entry, rows: Floats, labels: NDArray[np.int64]) -> Mechanism:
    public, gallery = rows[:ROWS], rows[ROWS:]
    release = entry.make(gallery)
    size: int | None = None
    promise = None
    try:
        release.fit(public, labels)
    except ImportError:
        if not entry.needs:
            raise
    else:
        if hasattr(release, "index"):
            release.index(gallery)
        promise, size = release.guarantee, _message(release, entry, gallery[0]).nbytes
    return Mechanism(
        name=f"{release.name} ({entry.variant})" if entry.variant else release.name,
        class_name=type(release).__name__,
        protects="nothing" if promise is None else _protects(promise),
        sound=promise is None or promise.sound,
        reason="" if promise is None else promise.reason,
        kind="none" if promise is None else _kind(release, promise),
        message_bytes=size,
        source=entry.source,
    )


def _message(release: Release, entry: _Entry, row: Floats) -> Message:
    """Return a message: its noise plays no part, only its size."""
    source = unsafe_seeded(0)
    if entry.labelled:
        assert isinstance(release, PrivateMail)
        message: Message = release.release(row, rng=source, labels=0)
    else:
        message = release.release(row, rng=source)
    # A message that was not seeded says so in one letter more.
    return Message(message.mechanism, message.public_id, message.arrays)


def _protects(promise: Guarantee) -> str:
    if math.isinf(promise.epsilon):
        return "nothing"
    what = "the query" if promise.protects == "query" else f"a {promise.unit}; not the query"
    return what if promise.sound else f"claims: {what}"


def _kind(release: Release, promise: Guarantee) -> str:
    """Say what kind of promise it is; what finite tables add to delta does not make a pure one approximate."""
    if math.isinf(promise.epsilon):
        return "none"
    kind = "pure" if promise.delta == promise.extra_delta else "approximate"
    return f"metric, {kind}" if hasattr(release, "metric_epsilon") else kind
