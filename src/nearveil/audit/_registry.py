"""Every mechanism by name, the specimens that must be caught, and what cannot be audited."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, Literal

from nearveil.audit._experiment import Experiment
from nearveil.audit._subjects import experiment_of
from nearveil.audit.attacks._clock import choosing, clock_experiment
from nearveil.audit.attacks._time import time_experiment
from nearveil.audit.attacks._wire import wire_experiment
from nearveil.audit.specimens import _clock as hasty
from nearveil.audit.specimens import _mechanisms as broken
from nearveil.audit.specimens import _votes as careless
from nearveil.mechanisms import (
    OME,
    AnalyticGaussian,
    Cells,
    Covers,
    DPdSNE,
    Latent,
    PlainLDA,
    PlainManifold,
    PlainTSNE,
    PrivateMail,
    PrivatePCA,
    PrivUnit,
    RandomProjection,
    RawFeatures,
    Unary,
    VonMisesFisher,
)
from nearveil.privacy import Guarantee
from nearveil.privacy.noise import calibrate_gaussian, calibrate_laplace
from nearveil.votes import (
    PateClassifier,
    PrivateDiscriminant,
    PrivateKNeighborsClassifier,
    PrivateKNeighborsRegressor,
    Student,
)

EPSILON = 4.0
DELTA = 1e-4  # rare enough to matter, and seen often enough in the runs that an audit can afford
_SLOW_DELTA = 1e-3  # of mechanisms whose runs take a while
_FEW_DELTA = 0.05  # of those that are fitted anew in every run
_SPECIMEN_TRIALS = 200_000  # of defects that show soon

Make = Callable[[], Any]
Expected = Literal["kept", "broken", "open"]


@dataclass(frozen=True, eq=False)
class Entry:
    """A mechanism that can be audited by name.

    Attributes
    ----------
    name : str
    make : callable
        Returns the experiment. Fits, so it may take a second.
    expected : {"kept", "broken", "open"}
        What an audit must find; "open" where the promise is not proved and no attack on it is known to work.
    subject : str
        The public name that it attacks, such as "nearveil.mechanisms.Covers".
    """

    name: str
    make: Callable[[], Experiment]
    expected: Expected = "kept"
    subject: str = ""


def mechanisms(epsilon: float = EPSILON) -> list[Entry]:
    """Return every mechanism of the library, as ``nearveil mechanisms`` names them, and what surrounds them.

    Parameters
    ----------
    epsilon : float, default=4.0
        What each promises.

    Returns
    -------
    list of Entry
    """
    return [
        _entry(name, make, _expected(name), f"nearveil.{subject}")
        for subject, made in (_releases(epsilon) | _voters(epsilon) | _surroundings(epsilon)).items()
        for name, make in made.items()
    ]


def _releases(epsilon: float) -> dict[str, dict[str, Make]]:
    published: dict[str, Any] = {"allow_unsound": True, "n_public_steps": 5, "start_scale": 1e-8, "n_anchors": 60}
    return {
        "release.Covers": {"covers": lambda: Covers(epsilon, n_sets=10)},
        "release.Cells": {
            "cells (randomized)": lambda: Cells(epsilon),
            "cells (subset)": lambda: Cells(epsilon, response="subset"),
        },
        "release.PrivUnit": {"privunit": lambda: PrivUnit(epsilon)},
        "release.PrivateMail": {
            "privatemail (gaussian)": lambda: PrivateMail(epsilon, delta=DELTA),
            "privatemail (laplace)": lambda: PrivateMail(epsilon, noise="laplace"),
            "privatemail (as published 2022)": lambda: PrivateMail(epsilon, as_published="2022", **published),
            "privatemail (as published 2021)": lambda: PrivateMail(epsilon, as_published="2021", **published),
            "privatemail (as published 2022-code)": lambda: PrivateMail(epsilon, as_published="2022-code", **published),
        },
        "release.Latent": {"latent": lambda: Latent(epsilon)},
        "release.OME": {"ome": lambda: OME(epsilon)},
        "release.Unary": {
            "unary (symmetric)": lambda: Unary(epsilon, "symmetric"),
            "unary (optimised)": lambda: Unary(epsilon, "optimised"),
        },
        "release.AnalyticGaussian": {"analytic-gaussian": lambda: AnalyticGaussian(epsilon, delta=DELTA)},
        "release.RandomProjection": {
            "random-projection": lambda: RandomProjection(epsilon, delta=DELTA, n_components=16),
            "random-projection (as published)": lambda: RandomProjection(
                epsilon, delta=DELTA, n_components=16, as_published=True, allow_unsound=True
            ),
        },
        "release.VonMisesFisher": {"von-mises-fisher": lambda: VonMisesFisher(epsilon)},
        "release.DPdSNE": {"dp-dsne": lambda: DPdSNE(epsilon, n_anchors=60)},
        "release.PrivatePCA": {
            "private-pca (gaussian)": lambda: PrivatePCA(epsilon, n_components=1),
            "private-pca (bingham)": lambda: PrivatePCA(epsilon, n_components=1, method="bingham", allow_unsound=True),
            "private-pca (gibbs)": lambda: PrivatePCA(
                epsilon, n_components=1, method="gibbs", n_sweeps=2, allow_unsound=True
            ),
        },
        "release.RawFeatures": {"raw": RawFeatures},
        "release.PlainManifold": {"plain-manifold": PlainManifold},
        "release.PlainTSNE": {"plain-tsne": PlainTSNE},
        "release.PlainLDA": {"plain-lda": PlainLDA},
        "privacy.noise.GaussianNoise": {
            "gaussian noise": lambda: calibrate_gaussian(epsilon, 1e-5, sensitivity=1.0, size=1)
        },
        "privacy.noise.LaplaceNoise": {"laplace noise": lambda: calibrate_laplace(epsilon, sensitivity=1.0, size=1)},
    }


def _voters(epsilon: float) -> dict[str, dict[str, Make]]:
    def neighbors(delta: float = DELTA, answered: int = 1, screened: int = 0, **more: Any) -> Make:
        return lambda: PrivateKNeighborsClassifier(epsilon, delta, answered, max_screened=screened, **more)

    def numbers(method: Literal["mean", "median"]) -> Make:
        return lambda: PrivateKNeighborsRegressor(0, 1, epsilon=epsilon, delta=DELTA, max_answered=1, method=method)

    def teachers(mechanism: Any, screened: int | None = None) -> Make:
        return lambda: PateClassifier(
            40, mechanism=mechanism, epsilon=epsilon, delta=DELTA, max_answered=1, max_screened=screened
        )

    return {
        "votes.PrivateKNeighborsClassifier": {
            "private-knn (votes)": neighbors(),
            "private-knn (screened votes)": neighbors(screened=1),
            "private-knn (votes, rate 0.25)": neighbors(_SLOW_DELTA, sampling_rate=0.25),
            "private-knn (ten votes)": neighbors(_SLOW_DELTA, 10),
            "private-knn (soft votes)": neighbors(votes="soft"),
            "private-knn (screened soft votes)": neighbors(screened=1, votes="soft"),
            "private-knn (binary votes)": neighbors(votes="binary", clip=2.0),
            "private-knn (nonnegative votes)": neighbors(votes="nonnegative", clip=2.0),
            "private-knn (signed votes)": neighbors(votes="signed", clip=2.0),
        },
        "votes.PrivateKNeighborsRegressor": {
            "private-knn (mean)": numbers("mean"),
            "private-knn (median)": numbers("median"),
        },
        "votes.PateClassifier": {
            "pate (gnmax)": teachers("gnmax"),
            "pate (lnmax)": teachers("lnmax"),
            "pate (confident-gnmax)": teachers("confident-gnmax", 1),
        },
        "votes.PrivateDiscriminant": {
            "discriminant": lambda: PrivateDiscriminant(epsilon, _FEW_DELTA, classes=("in", "out"), publications=2)
        },
        "votes.Student": {
            "student": lambda: Student(PrivateKNeighborsClassifier(epsilon, _FEW_DELTA, 8, max_screened=0), rounds=2)
        },
    }


def _surroundings(epsilon: float) -> dict[str, dict[str, Make]]:
    """Return what an observer sees besides the message itself."""
    # Without httpx there is no client to attack.
    has_client = find_spec("httpx") is not None
    client: dict[str, dict[str, Make]] = {"Client": {"covers: clock": clock_experiment}} if has_client else {}
    return {
        "protocol.ClientProtocol": {"covers: on the wire": wire_experiment},
        "release.PublicMap": {
            "covers: choice": lambda: clock_experiment(choosing, name="covers: choice", at_once=1),
        },
        "audit.time_experiment": {
            "covers: time": lambda: time_experiment(Covers(epsilon, n_sets=10)),
            "cells (randomized): time": lambda: time_experiment(Cells(epsilon)),
            "privunit: time": lambda: time_experiment(PrivUnit(epsilon)),
            "analytic-gaussian: time": lambda: time_experiment(AnalyticGaussian(epsilon)),
        },
        **client,
    }


def _expected(name: str) -> Expected:
    """Say what an audit must find of a mechanism: the papers' own ones are known to be broken, or not proved."""
    if name in ("privatemail (as published 2022-code)", "random-projection (as published)"):
        return "broken"
    # The papers use the label after the noise too, but no attack here sees it at these parameters.
    unproved = ("privatemail (as published 2022)", "privatemail (as published 2021)")
    return "open" if name in (*unproved, "private-pca (bingham)", "private-pca (gibbs)") else "kept"


def specimens() -> list[Entry]:
    """Return mechanisms that are broken on purpose. An audit that does not say so is blind.

    Returns
    -------
    list of Entry
    """
    made: dict[str, Make] = {
        "the label kept after the noise": broken.label_after_noise,
        "a variance for a deviation": broken.variance_as_deviation,
        "fixed-size sample charged as Poisson": broken.fixed_size_sample,
        "one sample charged as two": broken.shared_sample,
        "OME's claim at alpha 7": broken.ome_claim,
        "half the noise of privunit": lambda: (PrivUnit(2 * EPSILON), broken.pure(EPSILON)),
        "numpy's Laplace noise": broken.float_laplace,
        "a request after the answer": broken.request_after_answer,
        "work that depends on the record": lambda: time_experiment(broken.BusyCells(1.0)),
        "a search by a heap": hasty.heap_search,
        "half the noise of a discriminant": lambda: careless.QuietDiscriminant(EPSILON, _FEW_DELTA),
        "a discriminant that does not pay": lambda: careless.FreeDiscriminant(EPSILON, _FEW_DELTA),
    }
    if find_spec("httpx") is not None:
        made["a question sent as soon as it is made"] = hasty.hasty_question
    planted: dict[str, Make] = {
        "classical Gaussian at epsilon 12": broken.classical_gaussian,
        "four fifths of the vote noise": lambda: careless.QuietVotes(EPSILON, max_answered=1, max_screened=0),
        "exact votes in one of 2,000 answers": lambda: careless.OnceExactVotes(EPSILON, max_answered=1, max_screened=0),
        "labels decided before the noise": lambda: careless.NoiselessLabels(EPSILON, max_answered=1, max_screened=0),
        "caps that are ignored": lambda: careless.EndlessVotes(EPSILON, max_answered=1, max_screened=0),
        "screening that is not charged": lambda: careless.FreeScreening(EPSILON, max_answered=1, max_screened=1),
    }
    return [
        *(_entry(name, make, "broken") for name, make in made.items()),
        *(_entry(name, make, "broken", trials=_SPECIMEN_TRIALS) for name, make in planted.items()),
    ]


def not_auditable() -> dict[str, str]:
    """Return the public names that no audit attacks, each with its reason.

    Returns
    -------
    dict of str to str

    Examples
    --------
    >>> not_auditable()["nearveil.votes.NetworkStudent"]
    'learns from public rows and labels alone; whoever gives it labels is audited'
    """
    data = "holds values, releases nothing"
    return {
        "nearveil.AsyncClient": "does what nearveil.Client does, whose clock and conversation are audited",
        "nearveil.SupervisedManifold": "promises nothing: it is fitted on public rows",
        "nearveil.__version__": "text",
        "nearveil.mechanisms.Budgets": data,
        "nearveil.mechanisms.GalleryEmbedding": data,
        "nearveil.mechanisms.MapError": "an error",
        "nearveil.mechanisms.Message": data,
        "nearveil.mechanisms.MessageError": "an error",
        "nearveil.mechanisms.Price": data,
        "nearveil.mechanisms.PrivatePCARelease": "a release without noise by a private PCA, which is audited",
        "nearveil.mechanisms.Release": "what all releases have in common; each is audited",
        "nearveil.mechanisms.default": "returns Covers, which is audited",
        "nearveil.votes.Answers": data,
        "nearveil.votes.Asked": data,
        "nearveil.votes.ExhaustedError": "an error",
        "nearveil.votes.Forecast": "computed without noise, for the owner of the records alone; never published",
        "nearveil.votes.ModelError": "an error",
        "nearveil.votes.NetworkStudent": "learns from public rows and labels alone; whoever gives it labels is audited",
        "nearveil.votes.PublicDiscriminant": "the export of a discriminant, whose experiment reads it",
        "nearveil.votes.PublicStudent": "the export of a student; the student's experiment reads it",
        "nearveil.votes.VotePlan": data,
        "nearveil.votes.plan_publications": "returns a plan, releases nothing",
    }


def _entry(name: str, make: Make, expected: Expected = "kept", subject: str = "", trials: int | None = None) -> Entry:
    def experiment() -> Experiment:
        made = make()
        mechanism, promise = made if isinstance(made, tuple) else (made, None)
        found = replace(experiment_of(mechanism), name=name)
        found = found if trials is None else replace(found, trials=trials)
        return replace(found, promise=promise) if isinstance(promise, Guarantee) else found

    return Entry(name, experiment, expected, subject)
