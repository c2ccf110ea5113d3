"""Every mechanism by name, and the specimens that must be caught."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, Literal

from nearveil.audit import _specimens as broken
from nearveil.audit import _specimens_clock as hasty
from nearveil.audit._attack_clock import choosing, clock_experiment
from nearveil.audit._attack_time import time_experiment
from nearveil.audit._attack_wire import wire_experiment
from nearveil.audit._experiment import Experiment
from nearveil.audit._subjects import experiment_of
from nearveil.privacy import Guarantee
from nearveil.privacy.noise import calibrate_gaussian, calibrate_laplace
from nearveil.release import (
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
from nearveil.votes import PateClassifier, PrivateKNeighborsClassifier

EPSILON = 4.0
DELTA = 1e-5

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
    """

    name: str
    make: Callable[[], Experiment]
    expected: Expected = "kept"


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
    published: dict[str, Any] = {"allow_unsound": True, "n_public_steps": 5, "start_scale": 1e-8, "n_anchors": 60}
    made: dict[str, Make] = {
        "covers": lambda: Covers(epsilon, n_sets=10),
        "cells (randomized)": lambda: Cells(epsilon),
        "cells (subset)": lambda: Cells(epsilon, response="subset"),
        "privunit": lambda: PrivUnit(epsilon),
        "privatemail (gaussian)": lambda: PrivateMail(epsilon),
        "privatemail (laplace)": lambda: PrivateMail(epsilon, noise="laplace"),
        "latent": lambda: Latent(epsilon),
        "ome": lambda: OME(epsilon),
        "unary (symmetric)": lambda: Unary(epsilon, "symmetric"),
        "unary (optimised)": lambda: Unary(epsilon, "optimised"),
        "analytic-gaussian": lambda: AnalyticGaussian(epsilon),
        "random-projection": lambda: RandomProjection(epsilon),
        "von-mises-fisher": lambda: VonMisesFisher(epsilon),
        "dp-dsne": lambda: DPdSNE(epsilon, n_anchors=60),
        "private-pca (gaussian)": lambda: PrivatePCA(epsilon, n_components=1),
        "raw": RawFeatures,
        "plain-manifold": PlainManifold,
        "plain-tsne": PlainTSNE,
        "plain-lda": PlainLDA,
        "gaussian noise": lambda: calibrate_gaussian(epsilon, DELTA, sensitivity=1.0, size=1),
        "laplace noise": lambda: calibrate_laplace(epsilon, sensitivity=1.0, size=1),
        "private-knn (votes)": lambda: PrivateKNeighborsClassifier(epsilon, max_answered=1, max_screened=0),
        "private-knn (screened votes)": lambda: PrivateKNeighborsClassifier(epsilon, max_answered=1, max_screened=1),
        "private-knn (votes, rate 0.25)": lambda: PrivateKNeighborsClassifier(
            epsilon, max_answered=1, max_screened=0, sampling_rate=0.25
        ),
        "private-knn (ten votes)": lambda: PrivateKNeighborsClassifier(epsilon, max_answered=10, max_screened=0),
        "pate (gnmax)": lambda: PateClassifier(40, mechanism="gnmax", epsilon=epsilon, max_answered=1),
        "pate (lnmax)": lambda: PateClassifier(40, mechanism="lnmax", epsilon=epsilon, max_answered=1),
        "pate (confident-gnmax)": lambda: PateClassifier(40, epsilon=epsilon, max_answered=1, max_screened=1),
        "covers: on the wire": wire_experiment,
        "covers: choice": lambda: clock_experiment(choosing, name="covers: choice", at_once=1),
        "covers: time": lambda: time_experiment(Covers(epsilon, n_sets=10)),
        "cells (randomized): time": lambda: time_experiment(Cells(epsilon)),
        "privunit: time": lambda: time_experiment(PrivUnit(epsilon)),
        "analytic-gaussian: time": lambda: time_experiment(AnalyticGaussian(epsilon)),
    }
    if find_spec("httpx") is not None:  # without it there is no client to attack
        made["covers: clock"] = clock_experiment
    unsound: dict[str, Make] = {
        "privatemail (as published 2022-code)": lambda: PrivateMail(epsilon, as_published="2022-code", **published),
        "random-projection (as published)": lambda: RandomProjection(epsilon, as_published=True, allow_unsound=True),
    }
    # The papers use the label after the noise too, but no attack here sees it at these parameters.
    unproved: dict[str, Make] = {
        "privatemail (as published 2022)": lambda: PrivateMail(epsilon, as_published="2022", **published),
        "privatemail (as published 2021)": lambda: PrivateMail(epsilon, as_published="2021", **published),
        "private-pca (bingham)": lambda: PrivatePCA(epsilon, n_components=1, method="bingham", allow_unsound=True),
        "private-pca (gibbs)": lambda: PrivatePCA(
            epsilon, n_components=1, method="gibbs", n_sweeps=2, allow_unsound=True
        ),
    }
    return [
        *(_entry(name, make) for name, make in made.items()),
        *(_entry(name, make, expected="open") for name, make in unproved.items()),
        *(_entry(name, make, expected="broken") for name, make in unsound.items()),
    ]


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
        "classical Gaussian at epsilon 12": broken.classical_gaussian,
        "half the noise of privunit": lambda: (PrivUnit(2 * EPSILON), broken.pure(EPSILON)),
        "numpy's Laplace noise": broken.float_laplace,
        "a request after the answer": broken.request_after_answer,
        "work that depends on the record": lambda: time_experiment(broken.BusyCells(EPSILON)),
        "a search by a heap": hasty.heap_search,
    }
    if find_spec("httpx") is not None:
        made["a question sent as soon as it is made"] = hasty.hasty_question
    return [_entry(name, make, expected="broken") for name, make in made.items()]


def _entry(name: str, make: Make, expected: Expected = "kept") -> Entry:
    def experiment() -> Experiment:
        made = make()
        mechanism, promise = made if isinstance(made, tuple) else (made, None)
        found = replace(experiment_of(mechanism), name=name)
        return replace(found, promise=promise) if isinstance(promise, Guarantee) else found

    return Entry(name, experiment, expected)
